"""One sequence on its way through the core: its tokens, where it stands, and when it is done."""

from __future__ import annotations

import enum
import hashlib

from dpi_engine.wire.messages import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreRequest,
    EventType,
    FinishReason,
    LogprobsLists,
    PrefillStats,
    SamplingParams,
)

_SEED_MASK = (1 << 63) - 1


class RequestStatus(enum.IntEnum):
    """WAITING -> RUNNING -> (PREEMPTED -> RUNNING ->) one of the finished states, from any state."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def finished(self) -> bool:
        return self >= RequestStatus.FINISHED_STOPPED


FINISHED_STATUS = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH,
    FinishReason.ABORT: RequestStatus.FINISHED_ABORTED,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
    FinishReason.REPETITION: RequestStatus.FINISHED_STOPPED,
}


class Request:
    """State of one sequence. The scheduler owns it; nothing else writes to it.

    `tokens` is the prompt, then the outputs. Positions [0, num_computed) have their keys and values in `block_ids`;
    `hashes[i]` names the content of the i-th full block, and the first `num_published` of them were offered to the
    prefix index. `max_total` is the number of tokens, prompt included, at which it ends for length.
    `plain`: a step may sample it before the result of the step before is known.
    """

    __slots__ = (
        "arrival",
        "block_ids",
        "cached_tokens",
        "client_index",
        "eos_token_id",
        "events",
        "hashes",
        "key",
        "max_total",
        "min_total",
        "num_computed",
        "num_preemptions",
        "num_prompt",
        "num_published",
        "num_sent",
        "plain",
        "prompt_logprobs",
        "read_prefix_cache",
        "reported",
        "request_id",
        "root",
        "sampling",
        "seed",
        "slot",
        "status",
        "stop_ids",
        "stop_reason",
        "tokens",
        "wants_prompt_logprobs",
    )

    def __init__(
        self, request: EngineCoreRequest, *, arrival: int, by_priority: bool, engine_seed: int, length_limit: int
    ) -> None:
        """`request` has passed `validation.check`. `arrival` numbers the requests of this scheduler.

        `length_limit` is the most tokens that any sequence may have. Requests run in the order of `key`: by priority
        (lower first) if `by_priority`, then by arrival.
        """
        sampling = request.sampling_params
        prompt = request.prompt_token_ids
        if sampling is None or prompt is None:
            raise ValueError(f"request {request.request_id!r}: sampling parameters and prompt tokens are needed")
        self.request_id = request.request_id
        self.client_index = request.client_index
        self.arrival = arrival
        self.key = (request.priority if by_priority else 0, arrival)
        self.sampling = sampling
        self.seed = (
            derive_seed(engine_seed, request.request_id) if sampling.seed is None else sampling.seed & _SEED_MASK
        )
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.events: list[EngineCoreEvent] | None = None

        self.tokens: list[int] = [*prompt, *request.output_token_ids]
        self.num_prompt = len(prompt)
        self.max_total = length_limit
        if sampling.max_tokens is not None:
            self.max_total = min(length_limit, self.num_prompt + sampling.max_tokens)
        self.min_total = self.num_prompt + sampling.min_tokens
        # With ignore_eos, all_stop_token_ids still names end-of-sequence ids: min_tokens masks them.
        self.eos_token_id = None if sampling.ignore_eos else sampling.eos_token_id
        stop_ids = set(sampling.stop_token_ids or ())
        if not sampling.ignore_eos:
            stop_ids.update(sampling.all_stop_token_ids or ())
            stop_ids.discard(-1 if sampling.eos_token_id is None else sampling.eos_token_id)
        self.stop_ids = frozenset(stop_ids)
        self.plain = _is_plain(sampling)

        self.slot = -1
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.hashes: list[bytes] = []
        self.root = b""
        self.num_published = 0
        self.num_sent = 0  # of block_ids, how many the runner knows
        self.num_preemptions = 0
        self.cached_tokens = 0  # prompt and replayed tokens found in the cache when first scheduled

        # A replayed request has delivered its prompt's log probabilities with its first output.
        self.wants_prompt_logprobs = sampling.prompt_logprobs is not None and not request.output_token_ids
        self.prompt_logprobs: LogprobsLists | None = None
        self.read_prefix_cache = not sampling.skip_reading_prefix_cache
        self.reported = False  # has given an output here

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED_STOPPED

    def append(self, token: int) -> FinishReason | None:
        """Take one more output token; returns why the request ends with it, if it does.

        The end-of-sequence token leaves `stop_reason` None, another stop token is its own reason. Output k (from 0) can
        stop only if k >= min_tokens; the limits on length hold in any case.
        """
        index = len(self.tokens)
        self.tokens.append(token)
        if index >= self.min_total:
            if token == self.eos_token_id:
                return FinishReason.STOP
            if token in self.stop_ids:
                self.stop_reason = token
                return FinishReason.STOP
        return FinishReason.LENGTH if index + 1 >= self.max_total else None

    def note(self, event: EventType, now: float) -> None:
        """Record an event for the next output. `now`: seconds, monotonic."""
        entry = EngineCoreEvent(event, now)
        if self.events is None:
            self.events = [entry]
        else:
            self.events.append(entry)

    def add_prompt_logprobs(self, rows: LogprobsLists) -> None:
        """Append the rows of one more chunk of the prompt."""
        have = self.prompt_logprobs
        if have is None:
            self.prompt_logprobs = LogprobsLists(list(rows.token_ids), list(rows.logprobs), list(rows.ranks))
        else:
            have.token_ids.extend(rows.token_ids)
            have.logprobs.extend(rows.logprobs)
            have.ranks.extend(rows.ranks)

    def describe_prefill(self, output: EngineCoreOutput, cache_block_size: int | None) -> None:
        """Put what only the first output carries into `output`: the prompt's log probabilities, and its cost.

        `cache_block_size` None: there is no prefix cache to write to.
        """
        self.reported = True
        if self.wants_prompt_logprobs:
            self.wants_prompt_logprobs = False
            rows, self.prompt_logprobs = self.prompt_logprobs, None
            output.new_prompt_logprobs_tensors = rows if rows is not None else LogprobsLists([], [], [])
        cached = min(self.cached_tokens, self.num_prompt)
        full = 0 if cache_block_size is None else self.num_prompt // cache_block_size * cache_block_size
        output.prefill_stats = PrefillStats(
            num_prompt_tokens=self.num_prompt,
            num_computed_tokens=self.num_prompt - cached,
            num_cached_tokens=cached,
            num_local_cached_tokens=cached,
            num_cache_creation_tokens=max(0, full - cached),
        )


def _is_plain(sampling: SamplingParams) -> bool:
    """Nothing but the logits decides what is drawn, and nothing but the token comes out."""
    return not (
        sampling.logprobs is not None
        or sampling.prompt_logprobs is not None
        or sampling.min_tokens
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.logit_bias
        or sampling.allowed_token_ids is not None
        or sampling.bad_words_token_ids
    )


def derive_seed(engine_seed: int, request_id: str) -> int:
    """Seed of a request that came without one: the same on every engine with the same `engine_seed`, 63 bits."""
    text = f"{engine_seed}/{request_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & _SEED_MASK
