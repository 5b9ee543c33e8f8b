"""One rank: joins its head, loads the model, then computes steps until it is told to stop.

Threads: this one computes; the wire's two keep the lease and move frames; one reports to the launcher.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from typing import Any

import msgspec

from dpi_engine import collector
from dpi_engine.config import fingerprint
from dpi_engine.config.errors import ConfigError
from dpi_engine.core.coupled import CoupledCore
from dpi_engine.core.lockstep import Lockstep
from dpi_engine.core.outputs import StepOutputs
from dpi_engine.core.utility import Utilities, UtilityError
from dpi_engine.core.validation import RequestRefused
from dpi_engine.launch import child, engine_loading
from dpi_engine.launch.control import ControlThread, Drain, EngineReport, LockstepReport, ToChild
from dpi_engine.launch.engine_loading import LoadedEngine
from dpi_engine.launch.exit_codes import EXIT_CRASHED, EXIT_LOST_HEAD, EXIT_OK, EXIT_REFUSED
from dpi_engine.launch.spec import ChildSpec
from dpi_engine.wire.codec import StartWave, UtilityCall
from dpi_engine.wire.engine_link import EngineLink
from dpi_engine.wire.errors import HandshakeTimeout, TypedRefusal, WorkerLost
from dpi_engine.wire.exchange.mesh import CannotListen, Mesh
from dpi_engine.wire.inbox import InboxItem, LinkEvent
from dpi_engine.wire.lease import LeaseTimings
from dpi_engine.wire.messages import (
    Dialect,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LoadRecord,
    PrefixCacheStats,
    ReadyResponse,
    RequestType,
    SchedulerStats,
    UtilityOutput,
)
from dpi_engine.wire.sockets import TooFewDescriptors

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.25
DRAIN_LEAST_S = 0.5
"""A draining rank serves at least this long: until every front end has heard of it and sends its requests elsewhere."""

VLLM_STATS_CLIENT = 0
"""The front end that keeps the statistics of vLLM ranks."""

PEER_VERSION = "0.32.0"
"""What we tell vLLM front ends to be; they do not compare it."""


class EngineProcess:
    """State of one rank's process. `run` returns its exit code."""

    def __init__(self, spec: ChildSpec, stop: threading.Event) -> None:
        self.spec, self.stop = spec, stop
        settings = spec.settings
        self.dialect = Dialect(settings.data_parallel_protocol)
        self.report = EngineReport(rank=spec.index, stage="starting")
        self.engine: LoadedEngine | None = None
        self._mesh: Mesh | None = None  # where ranks share experts
        self._coupled: CoupledCore | None = None
        self._formed_once = False
        self._waits = "waits for the group"
        self._step_began: float | None = None
        self._steps = 0
        self._joining = False  # for the first time
        self._interruptible = True  # until requests are served, a signal ends the process wherever it is
        self._drain_s = settings.shutdown_timeout if spec.drains else 0.0
        self._load_seq = 0
        self._last_load: tuple[object, ...] = ()
        self._prefix_sent = (0, 0, 0)
        self._dropped: dict[int, list[str]] = {}  # by front end: requests that ended while it could not be told
        self._link = EngineLink(
            rank=spec.index,
            endpoint=spec.handshake[0],
            local=spec.local,
            headless=settings.headless,
            head=spec.handshake[1] if len(spec.handshake) > 1 else None,
            dialect=self.dialect,
            declared=spec.declared,
            fingerprint=fingerprint.digest(spec.declared),
            pod=spec.pod,
            step=self._step_age,
            # As long as it was ready to wait for the head at first, it looks for a new one.
            timings=dataclasses.replace(LeaseTimings(), rejoin=settings.handshake_timeout),
        )
        self._control = ControlThread(spec.control, spec.name, self._make_report, self._on_control)

    # -- other threads -----------------------------------------------------------------------------------------------

    def _step_age(self) -> tuple[float | None, int]:
        began = self._step_began
        return (None if began is None else time.monotonic() - began), self._steps

    def _make_report(self) -> EngineReport:
        report = self.report
        report.step_age_s, report.steps = self._step_age()
        report.epoch, report.boot_id = self._link.epoch, self._link.boot_id.hex()
        report.group_epoch, report.head_lost = self._link.group_epoch, self._link.head_lost
        report.places = self._link.places
        report.malformed = {f"{s}:{r}": n for (s, r), n in self._link.counters.snapshot().items()}
        if (coupled := self._coupled) is not None and self._mesh is not None:
            counts = coupled.counts
            report.lockstep = LockstepReport(
                group=coupled.group,
                waves=counts.waves,
                syncs=counts.syncs,
                dummy_steps=counts.dummy_steps,
                breaks=counts.breaks,
                formed=counts.formed,
                exchange_s=self._mesh.waited_s,
            )
        if self._joining and (trouble := self._link.trouble):
            report = msgspec.structs.replace(report, stage=f"{report.stage}: {trouble}")
        return report

    def _on_control(self, message: ToChild) -> None:
        if isinstance(message, Drain):
            self._drain_s = message.timeout_s

    def terminate(self) -> None:
        """SIGTERM, in the main thread. Raises KeyboardInterrupt while there is nothing to finish."""
        self.stop.set()
        if self._interruptible:
            raise KeyboardInterrupt

    def _progress(self, stage: str, fraction: float | None) -> None:
        if self.stop.is_set():
            raise KeyboardInterrupt
        self.report.stage = stage if fraction is None else f"{stage} {fraction:.0%}"
        self._link.progress(stage, fraction)

    # -- life --------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        self._control.start()
        try:
            try:
                return self._run()
            except Exception as e:
                # An import that the stop broke off may end in an error of its own.
                if self.stop.is_set() and self._interruptible:
                    raise KeyboardInterrupt from e
                raise
        except KeyboardInterrupt:
            self._interruptible = False
            self._link.goodbye("stopped while loading")
            return EXIT_OK
        except TypedRefusal as e:
            self.report.error = e.message
            log.error("%s", e)
            self._link.close()
            return EXIT_REFUSED
        except HandshakeTimeout as e:
            self.report.error = str(e)
            log.error("%s", e)
            self._link.close()
            return EXIT_LOST_HEAD
        except (ConfigError, ValueError, OSError, RuntimeError, MemoryError) as e:
            known = isinstance(e, ConfigError | TooFewDescriptors)
            known = known or type(e).__name__ in ("OpsUnavailable", "NotEnoughCacheMemory")
            plain = known or isinstance(e, WorkerLost | CannotListen)
            text = (e.strerror if isinstance(e, OSError) else None) or str(e)
            self.report.error = text if plain else f"{type(e).__name__}: {e}"
            if plain:
                log.error("%s", text)
            else:
                log.exception("rank %d failed", self.spec.index)
            self._link.dead(self.report.error)
            return EXIT_REFUSED if known else EXIT_CRASHED
        finally:
            if self._mesh is not None:
                self._mesh.close()
            if self.engine is not None and self.engine.workers is not None:
                self.engine.workers.close()
            self._control.stop()

    def _run(self) -> int:
        settings = self.spec.settings
        if self.stop.is_set():
            raise KeyboardInterrupt
        self.report.stage = f"joining the head at {self.spec.handshake[-1]}"
        self._joining = True
        init = self._link.connect(settings.handshake_timeout)
        self._joining = False
        dtype = init.dtype if init.dtype != "auto" else settings.dtype
        if self.spec.exchange:
            host, port = self.spec.exchange
            size = settings.data_parallel_size
            self._mesh = Mesh(self.spec.index, size, host, port, counters=self._link.counters)
            self._link.couple(self._mesh, lambda: self._waits)
        with collector.paused():
            engine = engine_loading.load(self.spec, dtype, self._progress, self._mesh)
        self.engine = engine
        if engine.workers is not None:
            self.report.workers = engine.workers.pids
        if self._mesh is not None:
            lockstep = Lockstep(self.spec.index, self._mesh.size, settings.dp_sync_interval)
            self._coupled = CoupledCore(engine.core, self._mesh, lockstep, self._link.left_group, engine.devices)
        self.report.stage = "opening channels"
        self.report.fields = engine.resolved
        self._link.open_io(self._ready_response(engine), settings.handshake_timeout)
        # A head that restarts just now is waited for as long as one that was not there yet.
        self._link.ready(engine.resolved, fingerprint.digest(engine.resolved), max(30.0, settings.handshake_timeout))
        self.report.stage, self.report.ready = "", True
        log.info("rank %d is ready under epoch %d", self.spec.index, self._link.epoch)
        if self._coupled is not None:
            self._coupled.joined(time.monotonic())
        self._interruptible = False
        return self._serve(engine)

    def _ready_response(self, engine: LoadedEngine) -> ReadyResponse:
        settings = self.spec.settings
        return ReadyResponse(
            max_model_len=engine.max_model_len,
            num_gpu_blocks=engine.num_blocks,
            block_size=engine.block_size,
            dtype=engine.dtype,
            vllm_version=PEER_VERSION,
            data_parallel_rank=self.spec.index,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            instance_id=self._link.boot_id.hex() or f"rank-{self.spec.index}",
        )

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _serve(self, engine: LoadedEngine) -> int:
        core = engine.core
        utilities = Utilities(core, time.monotonic, os.path.join(self.spec.cache_dir, "profiles"))
        inbox = self._link.inbox
        stopped_at: float | None = None
        while True:
            if engine.workers is not None:
                engine.workers.check()
            if self.stop.is_set():
                if stopped_at is None:
                    stopped_at = time.monotonic()
                    self._begin_drain()
                if self._drained(engine, time.monotonic() - stopped_at):
                    break
            for item in inbox.drain():
                code = self._handle(item, engine, utilities)
                if code is not None:
                    return code
            if self._coupled is not None:
                if not self._coupled_turn(self._coupled, engine):
                    self.report.error = self._not_formed(self._coupled)
                    log.error("rank %d ends: %s", self.spec.index, self.report.error)
                    self._link.dead(self.report.error)
                    return EXIT_CRASHED
            elif core.has_work():
                self._step(engine)
            else:
                self._send(StepOutputs(), engine)
                inbox.wait(IDLE_WAIT_S)
        self._send(core.scheduler.finish_all(FinishReason.ABORT), engine)
        self._link.goodbye("stopped")
        return EXIT_OK

    def _begin_drain(self) -> None:
        if self._coupled is not None:
            self._coupled.stopping = True
        if self._drain_s:
            log.info("rank %d is draining, for %.0f s at most", self.spec.index, self._drain_s)
            self.report.stage = "draining"
            self._link.drain()

    def _drained(self, engine: LoadedEngine, for_s: float) -> bool:
        """Is it time to leave, `for_s` seconds after SIGTERM?"""
        if for_s >= self._drain_s:
            return True
        if self._coupled is not None and self._coupled.group and self._coupled.lockstep.engaged:
            return False  # the others' steps need this rank
        return for_s >= DRAIN_LEAST_S and not engine.core.scheduler.num_unfinished

    def _coupled_turn(self, coupled: CoupledCore, engine: LoadedEngine) -> bool:
        """A step or a sync together with the other ranks, or a wait for news. False when they stayed away too long."""
        now = time.monotonic()
        if coupled.idle():
            self._send(StepOutputs(), engine)
            coupled.rest(now, IDLE_WAIT_S, self._link.inbox.watch())
        else:
            self._step_began = now
            try:
                turn = coupled.turn(now, self._take_early_aborts)
            finally:
                self._step_began = None
            self._steps += turn.computed
            self._send(turn.outputs, engine, turn.tokens)
        for report in coupled.take_reports():
            message = EngineCoreOutputs(start_wave=report.start_wave, wave_complete=report.wave_complete)
            self._report_load(engine, message)
        coupled.settle()
        self._formed_once |= coupled.group > 0
        missing = coupled.links.missing or "links to the other ranks"
        self._waits = "" if coupled.group else f"waits for {missing}"
        if not self.stop.is_set():
            self.report.stage = self._waits
        apart = coupled.apart_for(now)
        return apart is None or apart < self._reform_limit()

    def _reform_limit(self) -> float:
        settings = self.spec.settings
        if self._formed_once:
            return settings.reform_timeout
        return max(settings.handshake_timeout, settings.reform_timeout)

    def _not_formed(self, coupled: CoupledCore) -> str:
        missing = coupled.links.missing or "links to the other ranks could not be made"
        return (
            f"the ranks that share experts did not come together within {self._reform_limit():.0f} s "
            f"(--reform-timeout): {missing}"
        )

    def _step(self, engine: LoadedEngine) -> None:
        core = engine.core
        now = time.monotonic()
        self._step_began = now
        try:
            outputs = core.step(now, self._take_early_aborts)
        finally:
            self._step_began = None
        self._steps += 1
        self._send(outputs, engine, core.step_tokens)

    def _take_early_aborts(self) -> None:
        """Aborts that came while the step was computed take effect before its outputs."""
        aborts, engine = self._link.inbox.early_aborts, self.engine
        while aborts and engine is not None:
            engine.core.abort([aborts.popleft()])

    def _handle(self, item: InboxItem, engine: LoadedEngine, utilities: Utilities) -> int | None:
        """One message or event; an exit code when the process must end."""
        core, kind = engine.core, item.kind
        if kind is RequestType.ADD:
            self._add(item.payload, item.client_index, engine)
        elif kind is RequestType.ABORT:
            core.abort(item.payload)
            self._send_finished(engine)
        elif kind is RequestType.UTILITY:
            self._utility(item.payload, engine, utilities)
        elif kind is RequestType.START_DP_WAVE:
            if self._coupled is not None:  # others do not run in lockstep
                start: StartWave = item.payload
                self._coupled.lockstep.start_wave(start.wave, start.exclude, start.group)
        elif kind in (LinkEvent.HEAD_LOST, LinkEvent.FENCED):
            self.report.ready, self.report.stage = False, f"joining again: {item.payload}"
            self._drop_all(engine)
            if len(self.spec.handshake) == 1:
                self._head_lost()
        elif kind is LinkEvent.REJOINED:
            self.report.ready, self.report.stage = True, ""
            self._last_load = ()
            if item.payload is not None:
                self._dropped.clear()
            if len(self.spec.handshake) == 1 and self._coupled is not None:
                self._coupled.joined(time.monotonic())
            log.info("rank %d is back under epoch %d", self.spec.index, self._link.epoch)
        elif kind is LinkEvent.GROUP_LOST:
            if self._coupled is None:
                log.warning("rank %d serves on without the head: %s", self.spec.index, item.payload)
            else:
                log.warning("rank %d waits for the head, as the group does: %s", self.spec.index, item.payload)
            self._head_lost()
        elif kind is LinkEvent.GROUP_JOINED:
            self._last_load = ()
            if self._coupled is not None:
                self._coupled.joined(time.monotonic())
            log.info("rank %d has joined the head again under epoch %d", self.spec.index, self._link.group_epoch)
        elif kind is LinkEvent.CLIENT_DROPPED:
            self._drop_client(item.client_index, item.payload, engine)
        elif kind is LinkEvent.CLIENT_BACK:
            self._tell_dropped(item.client_index, engine)
        elif kind is LinkEvent.GROUP_REFUSED and self._coupled is None:
            self.report.refused = str(item.payload)  # the launcher lets all of the launch finish, and ends it
        elif kind in (LinkEvent.GAVE_UP, LinkEvent.GROUP_REFUSED):
            self.report.error = str(item.payload)
            self._link.close()
            if isinstance(item.payload, TypedRefusal):
                return EXIT_REFUSED
            return EXIT_LOST_HEAD if isinstance(item.payload, HandshakeTimeout) else EXIT_CRASHED
        return None

    def _head_lost(self) -> None:
        """Without a head there is no group of ranks."""
        if self._coupled is not None:
            self._coupled.head_lost()

    def _drop_all(self, engine: LoadedEngine) -> None:
        """Forget every request: the link is gone, so nobody can be told."""
        ids = engine.core.scheduler.request_ids()
        if ids:
            log.warning("rank %d: %d requests are dropped", self.spec.index, len(ids))
            engine.core.abort(ids)
        engine.core.scheduler.take_finished()
        if self.dialect is not Dialect.VLLM:  # a front end that was only cut off has the same requests still
            self._dropped.clear()

    def _drop_client(self, client: int, reason: str, engine: LoadedEngine) -> None:
        """End the requests of a front end that cannot be told now; it learns of them when it is back."""
        ids = engine.core.scheduler.request_ids(client)
        if ids:
            log.warning(
                "rank %d: %d requests of front end %d are dropped: %s", self.spec.index, len(ids), client, reason
            )
            engine.core.abort(ids)
            self._dropped.setdefault(client, []).extend(ids)
        self._send_finished(engine, but_to=client)  # which would take it for an end without a reason

    def _tell_dropped(self, client: int, engine: LoadedEngine) -> None:
        ids = self._dropped.pop(client, [])
        if ids:
            error = f"rank_lost: rank {self.spec.index} lost its connection to the front end while it ran the request"
            ended = [EngineCoreOutput(i, [], finish_reason=FinishReason.ERROR, error=error) for i in ids]
            self._emit(client, EngineCoreOutputs(outputs=ended, finished_requests=ids), engine)

    def _add(self, request: EngineCoreRequest, client: int, engine: LoadedEngine) -> None:
        request.client_index = client
        try:
            if request.epoch and request.epoch != self._link.epoch:
                raise RequestRefused("stale_epoch", f"sent under epoch {request.epoch}, this is {self._link.epoch}")
            engine.core.add(request, time.monotonic())
            if self._coupled is not None:
                self._coupled.lockstep.request(request.current_wave)
        except RequestRefused as e:
            refused = EngineCoreOutput(
                request.request_id, [], finish_reason=FinishReason.ERROR, error=f"{e.code}: {e.message}"
            )
            self._emit(client, EngineCoreOutputs(outputs=[refused], finished_requests=[request.request_id]), engine)

    def _utility(self, call: UtilityCall, engine: LoadedEngine, utilities: Utilities) -> None:
        def answer_later(value: Any, failure: str | None, ended: StepOutputs) -> None:
            if ended:
                self._send(ended, engine)
            output = UtilityOutput(call.call_id, failure, None if failure else [None, value])
            self._emit(call.client_index, EngineCoreOutputs(utility_output=output), engine)

        try:
            if self._coupled is not None:
                begun = self._coupled.call(utilities, call.method, call.args, answer_later)
                if begun is not None:
                    self._send(begun, engine)
                    return
            value, caused = utilities.call(call.method, call.args)
            answer = UtilityOutput(call.call_id, None, [None, value])
        except UtilityError as e:
            caused = StepOutputs()
            answer = UtilityOutput(call.call_id, str(e))
        if caused:
            self._send(caused, engine)
        self._emit(call.client_index, EngineCoreOutputs(utility_output=answer), engine)

    # -- out ---------------------------------------------------------------------------------------------------------

    def _send(self, step: StepOutputs, engine: LoadedEngine, tokens: int = 0) -> None:
        """Outputs and finished ids of a step to their front ends, with the load on the first message."""
        clients = step.outputs.keys() | step.finished.keys()
        if self._report_load(engine) and self.dialect is Dialect.VLLM:
            clients |= {VLLM_STATS_CLIENT}
        for client in clients:
            message = EngineCoreOutputs(
                outputs=step.outputs.get(client, []),
                finished_requests=step.finished.get(client) or None,
                step_tokens=tokens,
            )
            tokens = 0
            self._emit(client, message, engine)

    def _send_finished(self, engine: LoadedEngine, but_to: int | None = None) -> None:
        for client, ids in engine.core.scheduler.take_finished().items():
            if client != but_to:
                self._emit(client, EngineCoreOutputs(finished_requests=ids), engine)

    def _emit(self, client: int, message: EngineCoreOutputs, engine: LoadedEngine) -> None:
        message.engine_index, message.epoch = self.spec.index, self._link.epoch
        message.timestamp = time.monotonic()
        if self.dialect is Dialect.VLLM:
            if client == VLLM_STATS_CLIENT:
                message.scheduler_stats = self._scheduler_stats(engine)
        else:
            message.load = self.report.load
        self._link.send(client, message)

    def _report_load(self, engine: LoadedEngine, outputs: EngineCoreOutputs | None = None) -> bool:
        """True when it is not what was reported last. `outputs`: what else the coordinator is told, changed or not."""
        stats = engine.core.stats()
        asleep = engine.core.runner.asleep
        coupled = self._coupled
        stand = (0, 0, 0) if coupled is None else (coupled.group, coupled.lockstep.wave, int(coupled.pace))
        key = (stats.waiting, stats.running, stats.kv_usage, asleep, self._link.epoch, stand)
        if key == self._last_load and outputs is None:
            return False
        self._last_load = key
        self._load_seq += 1
        load = LoadRecord(
            rank=self.spec.index,
            epoch=self._link.epoch,
            seq=self._load_seq,
            waiting=stats.waiting,
            running=stats.running,
            kv_usage=stats.kv_usage,
            waiting_tokens=stats.waiting_tokens,
            preemptions=stats.preemptions,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            sleep_level=asleep,
            group=stand[0],
            wave=stand[1],
            pace=stand[2],
        )
        self.report.load = load
        self._link.report_load(load, outputs)
        return True

    def _scheduler_stats(self, engine: LoadedEngine) -> SchedulerStats:
        """vLLM's form: prefix cache numbers since the last report."""
        stats = engine.core.stats()
        now = (stats.prefix_requests, stats.prefix_queries, stats.prefix_hits)
        requests, queries, hits = (a - b for a, b in zip(now, self._prefix_sent, strict=True))
        self._prefix_sent = now
        return SchedulerStats(
            num_running_reqs=stats.running,
            num_waiting_reqs=stats.waiting,
            kv_cache_usage=stats.kv_usage,
            prefix_cache_stats=PrefixCacheStats(requests=requests, queries=queries, hits=hits),
        )


def main() -> int:
    stop = threading.Event()
    process: EngineProcess | None = None

    def terminate() -> None:
        stop.set()
        if process is not None:
            process.terminate()

    try:
        process = EngineProcess(child.start(terminate), stop)
        return process.run()
    except KeyboardInterrupt:  # before there was anything to leave in order
        return 0
