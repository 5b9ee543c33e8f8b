"""The front end's side of the wire: requests out to the ranks, tokens back to their readers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from dpi_engine.frontend.affinity import affinity_keys
from dpi_engine.frontend.events import ClientClosed, EventHook, Hooks, ReplayHook, StatsHook, StepHook
from dpi_engine.frontend.feed import CoordinatorFeed
from dpi_engine.frontend.interface import (
    EngineClient,
    EngineError,
    Generation,
    GenerationRequest,
    NoReadyRank,
    Overloaded,
    RankLost,
)
from dpi_engine.frontend.keeper import RankKeeper
from dpi_engine.frontend.links import RANK_BYTES, Links
from dpi_engine.frontend.replay import SETTLE_S, WAIT_S, Replays
from dpi_engine.frontend.requests import check_request, open_stream, rename, to_message
from dpi_engine.frontend.router import Router
from dpi_engine.frontend.streams import RequestStream
from dpi_engine.frontend.token_stream import TokenStream
from dpi_engine.frontend.transport import Transport
from dpi_engine.frontend.utility import UtilityCalls, UtilityTimeout
from dpi_engine.wire import codec
from dpi_engine.wire.counters import WireCounters
from dpi_engine.wire.errors import WireError
from dpi_engine.wire.messages import (
    Dialect,
    EngineCoreOutputs,
    FinishReason,
    LoadRecord,
    RankInfo,
    RankState,
    RequestType,
)

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""How often links are probed and unknown loads rated anew."""

PROBE_AFTER_S = (0.02, 0.1, 0.3)
"""When all links are probed after some connection went away: its route, and its last outputs, may take a moment."""

CLOSED = "the front end is shutting down"


class ZmqEngineClient(EngineClient):
    """Requests to ranks `first_rank` .. `first_rank + num_ranks - 1` over ZMQ. Lives in one event loop.

    `start` binds a ROUTER on `input_endpoints` and a PULL on `output_endpoints`. A rank gets requests when its engine
    has introduced itself and, once the head has published a table (by the coordinator or `set_ranks`), that says READY
    for the same epoch. `max_queued_requests` bounds the requests of all `client_count` front ends that have no token
    yet; each takes its share. `coordinator`: endpoint to subscribe to, if there is one; with `follow_coordinator` the
    one that engines name when they introduce themselves. `waves`: the model needs them. `group_size`, `elsewhere`: as
    the Router has them. `seek_ranks`: there was a front end before this one, to which vLLM ranks have introduced
    themselves, as they do once. `max_replays`: how often a request may go on at another rank when its own was lost, and
    `replay_wait` for how many seconds it waits for one.
    """

    def __init__(
        self,
        input_endpoints: Sequence[str],
        output_endpoints: Sequence[str],
        *,
        num_ranks: int,
        first_rank: int = 0,
        client_index: int = 0,
        client_count: int = 1,
        dialect: Dialect = Dialect.DPI,
        coordinator: str | None = None,
        follow_coordinator: bool = False,
        waves: bool = False,
        group_size: int | None = None,
        elsewhere: Callable[[int], str] = lambda rank: "it is served by another launch",
        max_queued_requests: int | None = None,
        prefill_unit: int = 512,
        counters: WireCounters | None = None,
        on_stats: StatsHook | None = None,
        on_event: EventHook | None = None,
        on_step: StepHook | None = None,
        on_replay: ReplayHook | None = None,
        seek_ranks: bool = False,
        max_replays: int = 0,
        replay_wait: float = WAIT_S,
    ) -> None:
        self.input_endpoints = list(input_endpoints)
        self.output_endpoints = list(output_endpoints)
        self.counters = counters or WireCounters()
        self.max_model_len = 0
        self.late_outputs = 0  # outputs for requests that had ended here: normal after aborts
        self._index = client_index
        self._dialect = dialect
        self._extended = dialect is Dialect.DPI  # epochs, output indexes and seeds are meant
        self._coordinator, self._follow = coordinator, follow_coordinator
        self._seek = seek_ranks and dialect is Dialect.VLLM
        self._waves = waves
        self._queue_limit = None if max_queued_requests is None else -(-max_queued_requests // client_count)
        self._hooks = Hooks(on_stats, on_event, on_step, on_replay)
        self._router = Router(
            num_ranks,
            first_rank=first_rank,
            client_index=client_index,
            client_count=client_count,
            prefill_unit=prefill_unit,
            group_size=group_size,
            elsewhere=elsewhere,
        )
        self._links = Links(first_rank, num_ranks, dialect)
        self._keeper = RankKeeper(
            self._links,
            self._router,
            self._hooks,
            send_abort=lambda rank, ids: self._send(rank, RequestType.ABORT, ids),
            on_gone=self._on_gone,
            on_change=self._on_change,
        )
        self._utility = UtilityCalls()
        self._replays = Replays(
            max_replays,
            replay_wait,
            alone=num_ranks == 1,
            resumes=self._extended,
            place=self._place_again,
            replayed=self._hooks.replay,
        )
        self._streams: dict[str, RequestStream] = {}
        self._rank_of_fd: dict[int, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: Transport | None = None
        self._feed: CoordinatorFeed | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._probes: list[asyncio.TimerHandle] = []
        self._closed = False

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind and begin to listen; `input_endpoints` and `output_endpoints` then name the ports really bound.

        Raises OSError naming the endpoint that cannot be bound, or the limit that is too low for so many ranks.
        """
        if self._loop is not None:
            raise RuntimeError("the client was started before")
        transport = Transport(
            self.input_endpoints,
            self.output_endpoints,
            self.counters,
            ranks=self._router.num_ranks,
            on_input=self._on_introduction,
            on_output=self._on_output,
            on_disconnect=lambda _: self._probe_soon(),
        )
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self.input_endpoints, self.output_endpoints = transport.input_endpoints, transport.output_endpoints
        if self._coordinator is not None:
            self._feed = self._subscribe(transport, self._coordinator)
        self._ticker = asyncio.create_task(self._tick_forever(), name="engine client probes")

    def _subscribe(self, transport: Transport, endpoint: str) -> CoordinatorFeed:
        return CoordinatorFeed(
            transport,
            endpoint,
            self._dialect,
            self.counters,
            on_load=self._on_load,
            on_counts=self._on_counts,
            # Where engines name the coordinator, whoever keeps their leases here tells their states, not its head.
            on_ranks=(lambda infos: None) if self._follow else self.set_ranks,
            waves=self._waves,
        )

    def _follow_to(self, endpoint: str | None) -> None:
        """An engine says where the coordinator of its group is: subscribe there, and leave the one before."""
        if not self._follow or not endpoint or endpoint == self._coordinator or self._transport is None:
            return
        try:
            feed = self._subscribe(self._transport, endpoint)
        except OSError as error:
            self.counters.count("coordinator", "bad_address")
            logger.error("an engine names a coordinator that cannot be reached: %s", error)
            return
        logger.info("following the coordinator at %s", endpoint)
        if self._feed is not None:
            feed.wave, feed.running = self._feed.wave, self._feed.running
            self._feed.close()
        self._coordinator, self._feed = endpoint, feed

    async def close(self) -> None:
        """Abort what is in flight, end its readers with ClientClosed, close the sockets. Idempotent."""
        if self._closed:
            return
        self._closed = True
        by_rank: dict[int, list[str]] = {}
        for stream in list(self._streams.values()):
            by_rank.setdefault(stream.rank, []).append(stream.wire_id)
            self._end(stream, ClientClosed(CLOSED))
        for rank, ids in by_rank.items():
            self._send(rank, RequestType.ABORT, ids)
        self._replays.close(ClientClosed(CLOSED))
        for rank in self._links.ranks():
            self._utility.fail_rank(rank, ClientClosed(CLOSED))
        for timer in self._probes:
            timer.cancel()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        if self._transport is not None:
            await self._transport.close()

    async def wait_ready(self, timeout: float, num_ranks: int = 1) -> None:
        """Return when `num_ranks` ranks may get work. Raises NoReadyRank naming the others after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._router.num_ready < num_ranks:
            self._changed.clear()
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                    await self._changed.wait()
            except TimeoutError:
                raise NoReadyRank(
                    f"after {timeout:g} s {self._router.num_ready} ranks are ready, expected {num_ranks}: "
                    + "; ".join(self._keeper.missing()[:16])
                ) from None

    # -- what the HTTP server asks ---------------------------------------------------------------------------------

    def generate(self, request: GenerationRequest) -> Generation:
        """Deltas of one request until it is finished.

        It is sent by `listen`, or when the first delta is asked for. Leaving early (`leave`, `aclose`, cancellation,
        dropping it) aborts it in the engine at once. Raises, from then on: InvalidRequest, NoReadyRank, Overloaded,
        RankLost, ClientClosed, EngineError.
        """
        return TokenStream(self, request)

    async def utility(self, method: str, *args: Any, timeout: float = 30.0) -> dict[int, Any]:
        """Call an allow-listed method on every ready rank; results by rank.

        Raises InvalidRequest (unknown method), NoReadyRank, UtilityTimeout naming the silent ranks, or the first error
        that a rank gave.
        """
        self._utility.check(method)
        calls: dict[int, tuple[int, asyncio.Future[Any]]] = {}
        try:
            for rank in self._links.ranks():
                if self._router.state(rank) == RankState.READY:
                    call_id, future = self._utility.open(rank)
                    calls[rank] = (call_id, future)
                    call = codec.UtilityCall(self._index, call_id, method, list(args))
                    if not self._send(rank, RequestType.UTILITY, call):
                        self._keeper.unreachable(rank)
            if not calls:
                raise NoReadyRank(f"utility method {method}: no rank is ready; expected at least one")
            done, silent = await asyncio.wait([future for _, future in calls.values()], timeout=timeout)
            for future in done:
                future.result()
            if silent:
                ranks = sorted(rank for rank, (_, future) in calls.items() if future in silent)
                raise UtilityTimeout(f"utility method {method}: no answer from ranks {ranks} within {timeout:g} s")
            return {rank: future.result() for rank, (_, future) in calls.items()}
        finally:
            for call_id, future in calls.values():
                self._utility.close(call_id)
                if not future.cancel() and not future.cancelled():
                    future.exception()  # looked at: no complaint about an error that nobody saw

    def ranks(self) -> list[RankInfo]:
        """All ranks served here, with their states as requests are routed by and the engines' newest numbers."""
        return self._keeper.infos()

    def cut_off(self) -> dict[int, str]:
        """Ranks that this front end has lost its connection to and why, whatever the head says of them."""
        return self._keeper.cut_off()

    def linked(self) -> list[int]:
        """Ranks that this front end has a connection to."""
        return self._keeper.linked()

    def ready(self) -> bool:
        return not self._closed and self._router.num_ready > 0

    @property
    def in_flight(self) -> int:
        """Requests of this front end that have not ended."""
        return len(self._streams) + len(self._replays)

    @property
    def queued(self) -> int:
        """Requests of this front end without a first token."""
        return self._router.queued

    def set_ranks(self, infos: Iterable[RankInfo]) -> None:
        """Take over the head's table. Requests on a rank that is LOST or back under a new epoch go on at another rank,
        or end in RankLost."""
        self._keeper.publish(infos)

    # -- requests (for TokenStream) --------------------------------------------------------------------------------

    def begin(self, request: GenerationRequest) -> RequestStream:
        """Check, place and send a request. Raises InvalidRequest, Overloaded, NoReadyRank, ClientClosed."""
        if self._closed or self._loop is None:
            raise ClientClosed(CLOSED if self._closed else "the front end has not started")
        check_request(request, self.max_model_len)
        if self._queue_limit is not None and self._router.queued >= self._queue_limit:
            raise Overloaded(
                f"{self._router.queued} requests wait for their first token here, the limit is {self._queue_limit} "
                "(--max-num-queued-reqs over all API servers); try again later"
            )
        stream = open_stream(request, seeded=self._extended)
        self._place(stream)
        return stream

    def _place(self, stream: RequestStream) -> None:
        """Send a stream to the rank that the router picks. Raises NoReadyRank, InvalidRequest."""
        request, done = stream.request, stream.output_token_ids
        keys = affinity_keys(request.prompt_token_ids, request.session_id, request.cache_salt)
        for _ in range(self._router.num_ranks):
            tokens = len(request.prompt_token_ids) + len(done)
            place = self._router.pick(stream.wire_id, tokens, request.data_parallel_rank, affinity=keys)
            stream.rank, stream.epoch, stream.placed_at = place.rank, place.epoch, len(done)
            wave = self._feed.wave if self._feed is not None else 0
            message = to_message(stream, self._index, wave, time.time(), self._extended)
            try:
                sent = self._send(place.rank, RequestType.ADD, message)
            except BaseException:
                self._router.finish(stream.wire_id)
                raise
            if sent:
                self._streams[stream.wire_id] = stream
                if self._feed is not None:
                    self._feed.dispatched(place.rank, self._links[place.rank].identity or b"")
                return
            self._router.finish(stream.wire_id)
            self._keeper.unreachable(place.rank)
        raise NoReadyRank(f"none of {self._router.num_ranks} ranks could be reached; try again later")

    def _place_again(self, stream: RequestStream) -> None:
        rename(stream)
        self._place(stream)

    def _lost(self, stream: RequestStream, error: RankLost) -> None:
        """The rank of a stream that was in flight is lost: it goes on elsewhere, or ends in `error`."""
        now = time.monotonic()
        if self._replays.take(stream, error, now) and self._loop is not None:
            self._loop.call_later(SETTLE_S, self._replay, now + SETTLE_S)

    def _replay_soon(self) -> None:
        """Not within the news that made it possible: sending may bring news of its own."""
        if self._loop is not None and not self._closed and len(self._replays):
            self._loop.call_soon(self._replay)

    def _replay(self, due: float = 0.0) -> None:
        """`due`: it is at least so late, though a loop whose clock stands still within a turn has come early."""
        if not self._closed:
            self._replays.place_all(max(due, time.monotonic()))

    def abandon(self, stream: RequestStream) -> None:
        """The reader has left: abort in the engine now. Nothing happens for a request that has ended."""
        known = self._streams.pop(stream.wire_id, None)
        stream.finished = True
        if known is None:
            return
        self._router.finish(stream.wire_id)
        if not self._send(stream.rank, RequestType.ABORT, [stream.wire_id]):
            self._keeper.unreachable(stream.rank)

    def abandon_from_anywhere(self, stream: RequestStream) -> None:
        """`abandon` for a finaliser: it may run in any thread, within a send, or after the loop has ended."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and so are the sockets
                self._loop.call_soon_threadsafe(self.abandon, stream)

    def _send(self, rank: int, kind: RequestType, payload: Any) -> bool:
        """Send to a rank's engine now; False if it is not connected."""
        identity = self._links[rank].identity
        if identity is None or self._transport is None:
            return False
        return self._transport.send(identity, codec.encode_request(kind, payload, self._dialect))

    def _end(self, stream: RequestStream, error: EngineError) -> None:
        self._streams.pop(stream.wire_id, None)
        self._router.finish(stream.wire_id)
        stream.fail(error)

    # -- what comes in ---------------------------------------------------------------------------------------------

    def _on_introduction(self, frames: list[zmq.Frame]) -> None:
        try:
            codec.check_frames([frame.buffer for frame in frames], 2, 2, "message on the input socket")
            ready = codec.decode_ready_response(frames[1].buffer)
            if not self._keeper.introduce(frames[0].bytes, ready):
                self.counters.count("input", "stale_epoch")
            elif ready is not None:
                self._follow_to(ready.dp_stats_address)
        except WireError as error:
            self._reject("input", error)
            return
        self.max_model_len = self._links.max_model_len() or self.max_model_len

    def _on_output(self, frames: list[zmq.Frame]) -> None:
        try:
            message = codec.decode_outputs([frame.buffer for frame in frames])
            if isinstance(message, codec.Dead):
                self._on_dead(frames[0])
                return
            rank = message.engine_index
            if rank not in self._links:
                raise WireError("rank_out_of_range", f"outputs of rank {rank}, which is not served here")
            if self._extended and message.epoch != self._router.epoch(rank):
                self.counters.count("output", "stale_epoch")
                return
            self._rank_of_fd[frames[0].get(zmq.SRCFD)] = rank
            self._take(rank, message)
        except WireError as error:
            self._reject("output", error)

    def _take(self, rank: int, message: EngineCoreOutputs) -> None:
        streams, router, indexed = self._streams, self._router, self._extended
        told: list[RequestStream] = []
        for output in message.outputs:
            stream = streams.get(output.request_id)
            if stream is None or stream.rank != rank:
                self.late_outputs += 1
                continue
            if output.finish_reason == FinishReason.ERROR:
                error = stream.error_of(output)
                if isinstance(error, RankLost):  # it came to a later life of the rank
                    del streams[stream.wire_id]
                    router.finish(stream.wire_id)
                    self._lost(stream, error)
                    continue
            if output.new_token_ids and len(stream.output_token_ids) == stream.placed_at:
                router.prefilled(stream.wire_id)
            if stream.push(output, indexed):
                told.append(stream)
            if stream.finished:
                del streams[stream.wire_id]
                router.finish(stream.wire_id)
                if output.finish_reason is None:  # ended here, not by the engine
                    self._send(rank, RequestType.ABORT, [stream.wire_id])
        # Readers run when all outputs are in their streams: what they do may bring further messages in.
        for stream in told:
            try:
                stream.wake()
            except Exception:
                logger.exception("the reader of request %s failed", stream.request.request_id)
                self.abandon(stream)
        for wire_id in message.finished_requests or ():
            stream = streams.get(wire_id)
            if stream is not None and stream.rank == rank:
                self._end(stream, EngineError(f"rank {rank}: the engine ended the request without a reason"))
        if message.load is not None:
            self._on_load(message.load)
        if message.step_tokens:
            self._hooks.step(rank, message.step_tokens)
        stats = message.scheduler_stats
        if stats is not None:
            if message.load is None and self._feed is None:
                self._on_counts(rank, stats.num_waiting_reqs, stats.num_running_reqs, stats.kv_cache_usage)
            self._hooks.stats(rank, stats)
        if message.utility_output is not None and not self._utility.answer(message.utility_output):
            self.counters.count("output", "late_utility_answer")

    def _on_load(self, record: LoadRecord) -> None:
        if record.rank in self._links and self._router.report(
            record.rank,
            record.epoch,
            record.seq,
            record.waiting,
            record.running,
            record.kv_usage,
            record.waiting_tokens,
        ):
            self._hooks.stats(record.rank, record)

    def _on_counts(self, rank: int, waiting: int, running: int, kv_usage: float) -> None:
        if rank in self._links:
            self._router.report(rank, self._router.epoch(rank), None, waiting, running, kv_usage)

    def _on_dead(self, frame: zmq.Frame) -> None:
        # The sentinel names no rank; the connection it came on does, by what came on it before.
        rank = self._links.ranks()[0] if self._router.num_ranks == 1 else self._rank_of_fd.get(frame.get(zmq.SRCFD))
        if rank is None:
            self.counters.count("output", "dead_without_rank")
            self._probe_soon()
        else:
            self._keeper.died(rank)

    def _on_gone(self, rank: int, wire_ids: list[str], reason: str) -> None:
        if self._transport is not None:
            self._transport.take_outputs()  # a rank that left in order has sent them all
        for wire_id in wire_ids:
            stream = self._streams.pop(wire_id, None)
            if stream is not None:
                self._lost(stream, RankLost(f"rank {rank} was lost while it ran the request: {reason}"))
        self._utility.fail_rank(rank, RankLost(f"rank {rank} was lost before it answered: {reason}"))

    def _on_change(self, rank: int) -> None:
        self._changed.set()
        self._replay_soon()

    def _reject(self, socket: str, error: WireError) -> None:
        self.counters.count(socket, error.code)
        logger.debug("dropped a message on the %s socket: %s", socket, error)

    # -- probes ----------------------------------------------------------------------------------------------------

    def _probe_soon(self) -> None:
        if self._loop is None or self._closed:
            return
        for timer in self._probes:
            timer.cancel()
        self._probes = [self._loop.call_later(after, self._keeper.probe, True) for after in PROBE_AFTER_S]

    def _seek_ranks(self) -> None:
        """Meet by their names vLLM ranks that have connected and say nothing: an empty abort shows whether one has."""
        for rank in self._links.ranks():
            if self._links[rank].identity is not None or self._transport is None:
                continue
            name = rank.to_bytes(RANK_BYTES, "little")
            if self._transport.send(name, codec.encode_request(RequestType.ABORT, [], self._dialect)):
                self._keeper.introduce(name, None)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                if self._seek:
                    self._seek_ranks()
                self._keeper.probe(every_rank=self._dialect is Dialect.VLLM)
                self._router.refresh_unknown()
                self._replays.place_all(time.monotonic())
            except Exception:
                logger.exception("probing the ranks failed; trying again in %g s", TICK_S)
