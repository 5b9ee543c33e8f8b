"""Decides what each step computes, and takes its result.

There are no prefill and decode phases: every request has known tokens and computed tokens, and a step lets the second
catch up with the first within a budget. That covers whole and chunked prompts, prefix hits, decoding, resumption after
preemption, and several new tokens per step alike. No I/O and no clock: times are arguments, in seconds, monotonic.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable
from operator import attrgetter

from dpi_engine.core import validation
from dpi_engine.core.kvcache import KVCache
from dpi_engine.core.limits import PauseMode, Policy, SchedulerConfig
from dpi_engine.core.outputs import CoreStats, StepOutputs, check_result, first_rows
from dpi_engine.core.plan import NewSequence, SequenceWork, StepPlan, StepResult
from dpi_engine.core.request import FINISHED_STATUS, Request, RequestStatus
from dpi_engine.core.validation import RequestRefused
from dpi_engine.core.waiting import WaitingQueue
from dpi_engine.wire.messages import EngineCoreOutput, EngineCoreRequest, EventType, FinishReason, LogprobsLists

_BY_KEY = attrgetter("key")
_RUNNING = RequestStatus.RUNNING


class Scheduler:
    """Requests in, plans out, results in, outputs out. One plan is in flight at a time; on top of it one that was made
    by `schedule_ahead`.

    Order: requests that run come first, those with one token to compute before those with more, so a long prompt only
    gets what the others leave; then preempted ones, then waiting ones, in the order of their keys and never past the
    first that does not fit. When blocks run out the running request with the last key is preempted: its tokens are
    kept, its blocks go back, and it waits in front of all that came after it.

    A request is admitted only if all its known tokens get blocks and one more block stays free for each request that
    then runs (unless it is alone). So nobody is preempted within `block_size` tokens after an admission, and preemption
    cannot thrash.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._cache = KVCache(config)
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []  # by key
        self._waiting = WaitingQueue(RequestStatus.WAITING)
        self._preempted = WaitingQueue(RequestStatus.PREEMPTED)
        self._free_slots = list(range(config.max_num_seqs))  # a heap: low slots first keep batches dense
        self._released: list[int] = []
        self._flight: list[tuple[StepPlan, list[Request]]] = []  # the older first
        self._finished: dict[int, list[str]] = {}
        self._pause: PauseMode | None = None
        self._arrivals = 0
        self._preemptions = 0
        self._steps = 0
        self._last_step: float | None = None
        self._chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens

    # -- requests in and out -------------------------------------------------------------------------------------------

    def add(self, request: EngineCoreRequest, now: float) -> None:
        """Take a request into the queue. Raises RequestRefused, and is then as before."""
        config = self.config
        if request.request_id in self._requests:
            raise RequestRefused("duplicate_request", f"request_id: {request.request_id!r} is in progress already")
        validation.check(
            request,
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            capacity=config.capacity,
            max_logprobs=config.max_logprobs,
        )
        if config.max_queued is not None and self.num_waiting >= config.max_queued:
            raise RequestRefused("queue_full", f"{self.num_waiting} requests wait already; try again later")
        entry = Request(
            request,
            arrival=self._arrivals,
            by_priority=config.policy is Policy.PRIORITY,
            engine_seed=config.seed,
            length_limit=config.length_limit,
        )
        entry.root = self._cache.hasher.root(request.cache_salt)
        entry.note(EventType.QUEUED, now)
        self._arrivals += 1
        self._requests[entry.request_id] = entry
        self._waiting.push(entry)
        if request.abort_immediately:
            self._finish(entry, FinishReason.ABORT)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End these requests, whatever they are doing; returns the ids that were there. Unknown ids are ignored.

        No output comes back, as whoever aborts no longer listens; the ids are in the next `finished`. What a step in
        flight computes for them is dropped.
        """
        ended = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, FinishReason.ABORT)
                ended.append(request_id)
        return ended

    def finish_all(self, reason: FinishReason = FinishReason.ABORT, error: str | None = None) -> StepOutputs:
        """End every request, telling each client. `error`: message for `FinishReason.ERROR`."""
        out = StepOutputs()
        for request in list(self._requests.values()):
            self._end_with_output(request, reason, error, out)
        out.finished = self.take_finished()
        return out

    def take_finished(self) -> dict[int, list[str]]:
        """Ids of requests that ended since the last report, by client index; for when no step brings them along."""
        finished, self._finished = self._finished, {}
        return finished

    def request_ids(self, client_index: int | None = None) -> list[str]:
        """Ids of unfinished requests, of one client or of all."""
        return [r.request_id for r in self._requests.values() if client_index in (None, r.client_index)]

    # -- steps ---------------------------------------------------------------------------------------------------------

    def schedule(self, now: float, first: int | None = None) -> StepPlan | None:
        """The next step, or None if there is nothing to do. Raises RuntimeError while a plan is in flight.

        `first`: tokens of a step that nothing runs in yet. To the first prompt, however long, others are added up to
        these, so that its answer does not wait for all that arrived with it.
        """
        if self._flight:
            step = self._flight[0][0].step
            raise RuntimeError(f"step {step} is in flight: apply its result before the next schedule")
        if self._pause is PauseMode.KEEP or not self.has_work():
            return None
        work: list[SequenceWork] = []
        requests: list[Request] = []
        budget = self.config.max_num_batched_tokens
        longer = self._schedule_decodes(work, requests, now)
        budget -= len(work)
        for request in longer:
            if budget <= 0:
                break
            fresh = request.block_ids[request.num_sent :]
            budget -= self._plan_chunk(request, fresh, budget, work, requests)
        new: list[NewSequence] = []
        budget -= self._admit(budget, None if work else first, work, requests, new, now)
        if not work:
            return None
        return self._launch(work, requests, new, self.config.max_num_batched_tokens - budget)

    def schedule_ahead(self, now: float) -> StepPlan | None:
        """The step after the one in flight, whose result is not known: one more token of each sequence that it samples
        and that goes on. Apply the results in the order of the plans.

        None where the result may decide more than who has ended: a request could be taken up, a prompt goes on, blocks
        run out, or what may be drawn depends on the tokens before. Sequences that end in the step in flight are
        computed for nothing; what comes of them is dropped.
        """
        if len(self._flight) != 1 or self._pause is PauseMode.KEEP:
            return None
        if self._free_slots and self._next_queue() is not None:
            return None
        going: list[Request] = []
        ending = blocks = 0
        for work, request in zip(self._flight[0][0].work, self._flight[0][1], strict=True):
            if request.status is not _RUNNING:
                continue
            if not (work.sample and request.plain):
                return None
            num_tokens = len(request.tokens)
            if num_tokens + 1 >= request.max_total:
                ending += 1
                continue
            going.append(request)
            blocks += num_tokens + 1 > len(request.block_ids) * self._cache.block_size
        if not going or len(going) + ending != len(self._running) or blocks > self._cache.pool.num_free:
            return None
        ahead: list[SequenceWork] = []
        for request in going:
            num_tokens = len(request.tokens)
            fresh: list[int] = []
            if num_tokens + 1 > len(request.block_ids) * self._cache.block_size:
                fresh = self._cache.grow(request, 1) or []
                request.num_sent = len(request.block_ids)
            ahead.append(SequenceWork(request.slot, num_tokens, 1, fresh, True))
        return self._launch(ahead, going, [], len(ahead))

    def _launch(
        self, work: list[SequenceWork], requests: list[Request], new: list[NewSequence], num_tokens: int
    ) -> StepPlan:
        self._steps += 1
        released, self._released = self._released, []
        plan = StepPlan(step=self._steps, work=work, new=new, released=released, num_tokens=num_tokens)
        self._flight.append((plan, requests))
        return plan

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> StepOutputs:
        """Take the result of the plan in flight; returns what the clients get.

        Raises ValueError, and is then as before, if the result does not belong to the plan.
        """
        requests = self._check_flight(plan)
        check_result(plan, result)
        del self._flight[0]
        self._last_step = now
        out = StepOutputs()
        block_size = self._cache.block_size
        errors, logprobs = result.errors, result.logprobs
        sample = -1
        ended = False
        for work, request in zip(plan.work, requests, strict=True):
            if work.sample:
                sample += 1
            if request.status is not _RUNNING:
                continue  # aborted in flight
            if work.sample and sample in errors:
                self._end_with_output(request, FinishReason.ERROR, errors[sample], out, unlist=False)
                ended = True
                continue
            if work.prompt_logprobs:
                rows = result.prompt_logprobs.get(work.slot)
                if rows is None:
                    message = "the step returned no log probabilities for the prompt"
                    self._end_with_output(request, FinishReason.ERROR, message, out, unlist=False)
                    ended = True
                    continue
                request.add_prompt_logprobs(rows)
            computed = work.start + work.count
            request.num_computed = computed
            if computed >= (request.num_published + 1) * block_size:
                self._cache.publish(request)
            if not work.sample:
                continue
            rows = logprobs[sample] if logprobs is not None else None
            if self._take_tokens(request, result.token_ids[sample], rows, out):
                ended = True
        if ended:
            self._running = [request for request in self._running if request.status is _RUNNING]
        out.finished = self.take_finished()
        return out

    def fail_step(self, plan: StepPlan, error: str, now: float) -> StepOutputs:
        """The plan in flight could not be run: its requests end with `error`, all others go on."""
        requests = self._check_flight(plan)
        del self._flight[0]
        self._last_step = now
        out = StepOutputs()
        for request in requests:
            if request.status is _RUNNING:
                self._end_with_output(request, FinishReason.ERROR, error, out)
        out.finished = self.take_finished()
        return out

    # -- pause, reset, state -------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode | str) -> StepOutputs:
        """Stop taking up new requests; see `PauseMode`. Raises ValueError for an unknown mode.

        A second pause replaces the first one's mode. `is_quiet` tells when a `wait` is over.
        """
        self._pause = PauseMode(mode)
        return self.finish_all() if self._pause is PauseMode.ABORT else StepOutputs()

    def resume(self) -> None:
        """Go on with what waits. Without effect if not paused."""
        self._pause = None

    @property
    def is_paused(self) -> bool:
        return self._pause is not None

    def is_quiet(self) -> bool:
        """No step is in flight, and without new requests (or, if paused, `resume`) none would come."""
        return not self._flight and not self.has_work()

    def has_work(self) -> bool:
        """Would `schedule` find something to do (once no plan is in flight)?"""
        if self._pause is None:
            return bool(self._requests)
        return self._pause is not PauseMode.KEEP and bool(self._running or self._preempted)

    def reset_prefix_cache(self, now: float, *, preempt_running: bool = False) -> bool:
        """Forget all cached content; False (nothing changed) while sequences hold blocks.

        `preempt_running` makes running sequences give up theirs, to be computed anew; never while a plan is in flight.
        """
        if preempt_running and not self._flight:
            while self._running:
                self._preempt(self._running.pop(), now)
        return self._cache.pool.reset()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def kv_usage(self) -> float:
        """Fraction of blocks held by sequences, 0 to 1."""
        return self._cache.pool.usage

    def stats(self) -> CoreStats:
        """Load now and totals since start. O(running)."""
        cache = self._cache
        pending = [len(request.tokens) - request.num_computed for request in self._running]
        return CoreStats(
            waiting=self.num_waiting,
            preempted=len(self._preempted),
            running=len(self._running),
            kv_usage=cache.pool.usage,
            waiting_tokens=self._waiting.num_tokens
            + self._preempted.num_tokens
            + sum(count for count in pending if count > 1),
            steps=self._steps,
            last_step=self._last_step,
            preemptions=self._preemptions,
            prefix_requests=cache.requests,
            prefix_queries=cache.queries,
            prefix_hits=cache.hits,
            preempted_requests=cache.preempted_requests,
            preempted_queries=cache.preempted_queries,
            preempted_hits=cache.preempted_hits,
        )

    # -- parts of a step -----------------------------------------------------------------------------------------------

    def _schedule_decodes(self, work: list[SequenceWork], requests: list[Request], now: float) -> list[Request]:
        """See that every running request has blocks for its known tokens, preempting from the end where they run out.

        Plans those with one token to compute and returns the others. A victim has a later key than the request in need,
        so nothing was planned for it yet.
        """
        block_size = self._cache.block_size
        running = self._running
        longer: list[Request] = []
        i = 0
        while i < len(running):
            request = running[i]
            i += 1
            num_tokens = len(request.tokens)
            fresh: list[int] = []
            if num_tokens > len(request.block_ids) * block_size:
                while (grown := self._cache.grow(request)) is None:
                    victim = running.pop()
                    self._preempt(victim, now)
                    if victim is request:
                        return longer
                fresh = grown
            start = request.num_computed
            if num_tokens - start == 1:
                if fresh:
                    request.num_sent = len(request.block_ids)
                work.append(SequenceWork(request.slot, start, 1, fresh, True))
                requests.append(request)
            else:
                longer.append(request)
        return longer

    def _plan_chunk(
        self, request: Request, fresh: list[int], budget: int, work: list[SequenceWork], requests: list[Request]
    ) -> int:
        """Plan the request's next tokens, as many as budget and chunk limit allow; returns how many."""
        start = request.num_computed
        num_tokens = len(request.tokens)
        count = min(num_tokens - start, budget, self._chunk)
        want_rows = request.wants_prompt_logprobs and start + 1 < request.num_prompt
        work.append(SequenceWork(request.slot, start, count, fresh, start + count == num_tokens, want_rows))
        requests.append(request)
        request.num_sent = len(request.block_ids)
        return count

    def _admit(
        self,
        budget: int,
        first: int | None,
        work: list[SequenceWork],
        requests: list[Request],
        new: list[NewSequence],
        now: float,
    ) -> int:
        """Take preempted, then waiting requests into the batch while budget, slots and blocks last; returns the tokens
        planned. `first` as for `schedule`.

        Stops at the first that does not fit: one with large needs is not passed for ever by those behind it.
        """
        planned = 0
        while planned < budget and self._free_slots:
            queue = self._next_queue()
            if queue is None:
                break
            request = queue.peek()
            headroom = len(self._running) + 1 if self._running else 0
            if request is None or not self._cache.admit(request, headroom):
                break
            queue.pop()
            if not request.num_preemptions:
                request.cached_tokens = request.num_computed
            request.status = _RUNNING
            request.slot = heapq.heappop(self._free_slots)
            request.note(EventType.SCHEDULED, now)
            bisect.insort(self._running, request, key=_BY_KEY)
            new.append(
                NewSequence(
                    slot=request.slot,
                    request_id=request.request_id,
                    token_ids=list(request.tokens),
                    num_prompt_tokens=request.num_prompt,
                    block_ids=list(request.block_ids),
                    sampling=request.sampling,
                    seed=request.seed,
                )
            )
            planned += self._plan_chunk(request, [], budget - planned, work, requests)
            if first is not None:
                budget, first = min(budget, first), None  # the first prompt has all it needs
        return planned

    def _next_queue(self) -> WaitingQueue | None:
        """The queue whose first request comes next. Paused, only what has begun goes on."""
        resumed = self._preempted.peek()
        if self._pause is not None:
            return self._preempted if resumed else None
        waiting = self._waiting.peek()
        if resumed is None:
            return self._waiting if waiting else None
        return self._preempted if waiting is None or resumed.key < waiting.key else self._waiting

    def _preempt(self, request: Request, now: float) -> None:
        """Send a request, taken off `_running` by the caller, back to wait; it keeps its tokens and nothing else."""
        self._cache.release(request)
        self._release_slot(request)
        request.prompt_logprobs = None  # they come anew with the recomputed prompt
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        request.note(EventType.PREEMPTED, now)
        self._preemptions += 1
        self._preempted.push(request)

    def _take_tokens(
        self, request: Request, tokens: list[int], logprobs: LogprobsLists | None, out: StepOutputs
    ) -> bool:
        """Append a step's new tokens up to the first that ends the request, and report them; True if it ended."""
        index = request.num_outputs
        reason: FinishReason | None = None
        taken = 0
        for token in tokens:
            taken += 1
            reason = request.append(token)
            if reason is not None:
                break
        if not taken:
            self._end_with_output(request, FinishReason.ERROR, "the step returned no token", out, unlist=False)
            return True
        if taken < len(tokens):
            tokens = tokens[:taken]
            logprobs = first_rows(logprobs, taken)
        output = EngineCoreOutput(request.request_id, tokens, logprobs, output_index=index)
        if not request.reported:
            request.describe_prefill(output, self._cache.block_size if self._cache.enabled else None)
        if request.events is not None:
            output.events, request.events = request.events, None
        out.put(request.client_index, output)
        if reason is None:
            return False
        output.finish_reason = reason
        output.stop_reason = request.stop_reason
        self._finish(request, reason, unlist=False)
        return True

    def _end_with_output(
        self, request: Request, reason: FinishReason, error: str | None, out: StepOutputs, *, unlist: bool = True
    ) -> None:
        output = EngineCoreOutput(
            request.request_id,
            [],
            finish_reason=reason,
            events=request.events,
            output_index=request.num_outputs,
            error=error,
        )
        out.put(request.client_index, output)
        self._finish(request, reason, unlist=unlist)

    def _finish(self, request: Request, reason: FinishReason, *, unlist: bool = True) -> None:
        """Give back all that the request holds. `unlist` False: the caller takes it off `_running` itself."""
        status = request.status
        request.status = FINISHED_STATUS[reason]
        if status is _RUNNING:
            # Content computed on the way to an error (not-a-number, say) must not reach anybody else.
            self._cache.release(request, forget=reason is FinishReason.ERROR)
            self._release_slot(request)
            if unlist:
                self._running.remove(request)
        elif status is RequestStatus.WAITING:
            self._waiting.discard(request)
        else:
            self._preempted.discard(request)
        del self._requests[request.request_id]
        self._finished.setdefault(request.client_index, []).append(request.request_id)

    def _release_slot(self, request: Request) -> None:
        """The slot may be taken by the next plan, which tells the runner of its release first."""
        self._released.append(request.slot)
        heapq.heappush(self._free_slots, request.slot)
        request.slot = -1

    def _check_flight(self, plan: StepPlan) -> list[Request]:
        if not self._flight or self._flight[0][0] is not plan:
            flying = f"step {self._flight[0][0].step}" if self._flight else "none"
            raise ValueError(f"plan of step {plan.step} is not in flight (in flight: {flying})")
        return self._flight[0][1]
