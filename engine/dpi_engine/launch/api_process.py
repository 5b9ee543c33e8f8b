"""One API server process: the OpenAI API in front, the ranks behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from pathlib import Path
from typing import Any

from dpi_engine.config.errors import ConfigError
from dpi_engine.config.pod import PodIdentity
from dpi_engine.config.sources import resolve_model
from dpi_engine.frontend.client import ZmqEngineClient
from dpi_engine.frontend.events import RankEvent
from dpi_engine.frontend.interface import EngineError
from dpi_engine.frontend.replay import WAIT_S
from dpi_engine.frontend.utility import ALLOWED_METHODS
from dpi_engine.launch import child
from dpi_engine.launch.control import ApiReport, ControlTask, RankTable, ToChild, UtilityCall, UtilityResult
from dpi_engine.launch.exit_codes import EXIT_OK, EXIT_REFUSED
from dpi_engine.launch.failures import give_up
from dpi_engine.launch.spec import ChildSpec
from dpi_engine.server.app import make_app
from dpi_engine.server.chat_template import ChatTemplate, load_template
from dpi_engine.server.metrics import Metrics
from dpi_engine.server.serving import serve
from dpi_engine.tokenizer.bundle import TokenizerBundle, load_tokenizer, read_tokenizer
from dpi_engine.wire.messages import Dialect, LoadRecord, RankState, SchedulerStats

log = logging.getLogger(__name__)

INTRODUCTIONS_S = 3.0
"""How long a front end waits, once it can serve, for the other ranks that the head calls READY to connect."""


class ApiProcess:
    """State of one API server. `run` ends after a drain."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec, self.settings = spec, spec.settings
        self.report = ApiReport(index=spec.index, pid=os.getpid())
        self._loads: dict[int, LoadRecord] = {}
        self._ready_at_head = 0
        self._elsewhere: dict[int, str] = {}
        self.stop = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.client = ZmqEngineClient(
            spec.inputs_bind,
            spec.outputs_bind,
            num_ranks=spec.num_ranks,
            first_rank=spec.first_rank,
            client_index=spec.client_index,
            client_count=spec.clients,
            group_size=self.settings.data_parallel_size,
            elsewhere=self._where,
            dialect=Dialect(self.settings.data_parallel_protocol),
            coordinator=spec.stats_connect,
            waves=spec.waves,
            follow_coordinator=bool(spec.head),
            max_queued_requests=self.settings.max_num_queued_reqs,
            prefill_unit=self.settings.max_num_batched_tokens,
            on_stats=self._on_stats,
            on_event=self._on_event,
            on_step=self._on_step,
            on_replay=self._on_replay,
            max_replays=self.settings.max_request_replays,
            # Ranks that share experts take no new work until the lost one is back.
            seek_ranks=spec.incarnation > 0,
            replay_wait=self.settings.reform_timeout if spec.waves else WAIT_S,
        )
        self.metrics: Metrics | None = None
        self.control = ControlTask(spec.control, spec.name, self._make_report, self._on_control)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        bundle = await loop.run_in_executor(None, self._load_tokenizer)
        # A template that cannot be used is refused before anybody waits for a model to load.
        if (template := load_template(self.settings.chat_template, bundle.chat_template)) is not None:
            ChatTemplate(template, bundle.special_tokens)
        try:
            await self.client.start()
        except OSError as e:
            await self.control.close()
            return give_up(e)
        self.control.start()
        try:
            await self._until_known()
            if self.stop.is_set():
                return EXIT_OK
            self.metrics = Metrics(
                self.settings.served_names[0], self.client.max_model_len, primary=self.spec.client_index == 0
            )
            self.metrics.watch(self.client.counters)
            app = make_app(self.client, bundle, self.settings, self.metrics)
            host = PodIdentity.from_env(os.environ).http_host(self.settings.host)
            await serve(app, host, self.spec.port, reuse_port=True, stop=self.stop, on_listening=self._on_listening)
        except OSError as e:
            where = f"{self.settings.host or ''}:{self.spec.port}"
            log.error("cannot listen on %s (--host, --port): %s", where, e.strerror or e)
            return EXIT_REFUSED
        finally:
            await self.client.close()
            await self.control.close()
        return EXIT_OK

    def _where(self, rank: int) -> str:
        """Where requests for a rank of another launch go."""
        if place := self._elsewhere.get(rank):
            return f"rank {rank} has its endpoint {place}"
        if self.spec.head:
            host = self.spec.head.removeprefix("tcp://").rpartition(":")[0]
            named = f"GET /ranks on the management port of the head ({host}) names it"
            return f"rank {rank} has its endpoint in another pod: {named}"
        return f"rank {rank} has its endpoint in another pod, which has not joined yet"

    def _load_tokenizer(self) -> TokenizerBundle:
        if self.settings.tokenizer is not None:
            return read_tokenizer(self.settings.tokenizer)
        weightless = self.settings.load_format == "dummy"
        return load_tokenizer(resolve_model(self.spec.model_path, Path(self.spec.cache_dir), weightless=weightless))

    async def _until_known(self) -> None:
        """Until a rank has told its length limit; the launcher's deadline ends this process if none ever does.

        A front end that was started again meets ranks that are READY long since: it serves when they have come back.
        """
        while not self.stop.is_set() and not self.client.ready():
            with contextlib.suppress(EngineError):
                await self.client.wait_ready(0.25)
        with contextlib.suppress(EngineError):
            await self.client.wait_ready(INTRODUCTIONS_S, self._ready_at_head)

    # -- launcher ----------------------------------------------------------------------------------------------------

    def _on_listening(self, listens: bool) -> None:
        self.report.listening = listens

    def _make_report(self) -> ApiReport:
        report = self.report
        report.ready, report.in_flight = self.client.ready(), self.client.in_flight
        report.lost, report.linked = self.client.cut_off(), self.client.linked()
        report.max_model_len = self.client.max_model_len
        report.loads = list(self._loads.values())
        report.malformed = {f"{s}:{r}": n for (s, r), n in self.client.counters.snapshot().items()}
        return report

    def _on_control(self, message: ToChild) -> None:
        if isinstance(message, RankTable):
            self.client.max_model_len = self.client.max_model_len or message.max_model_len
            self.client.set_ranks(message.ranks)
            self._elsewhere = message.elsewhere
            self._ready_at_head = sum(info.state is RankState.READY for info in message.ranks)
            if self.metrics is not None:
                for info in message.ranks:
                    self.metrics.on_rank(info)
        elif isinstance(message, UtilityCall):
            task = asyncio.get_running_loop().create_task(self._utility(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _utility(self, call: UtilityCall) -> None:
        result = UtilityResult(call_id=call.call_id)
        try:
            result.results = await self.client.utility(call.method, *call.args, timeout=call.timeout_s)
        except EngineError as e:
            result.error = str(e)
            refused = type(e) is EngineError  # a rank's own answer
            result.status = 404 if call.method not in ALLOWED_METHODS else 400 if refused else e.status
        await self.control.send(result)

    # -- ranks -------------------------------------------------------------------------------------------------------

    def _on_stats(self, rank: int, record: LoadRecord | SchedulerStats) -> None:
        if isinstance(record, LoadRecord):
            self._loads[rank] = record
        if self.metrics is not None:
            self.metrics.on_stats(rank, record)

    def _on_step(self, rank: int, num_tokens: int) -> None:
        if self.metrics is not None:
            self.metrics.on_iteration(rank, num_tokens)

    def _on_replay(self, rank: int) -> None:
        if self.metrics is not None:
            self.metrics.of("dpi_requests_replayed_total", rank).inc()

    def _on_event(self, event: RankEvent) -> None:
        if self.metrics is not None:
            self.metrics.on_event(event)


def _run(spec: ChildSpec, early_stop: threading.Event) -> int:
    async def main() -> int:
        process = ApiProcess(spec)
        if early_stop.is_set():
            return EXIT_OK
        import signal

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, process.stop.set)
        return await process.run()

    try:
        import uvloop
    except ImportError:
        return asyncio.run(main())
    return uvloop.run(main())


def main() -> int:
    early_stop = threading.Event()
    spec = child.start(early_stop.set)
    try:
        return _run(spec, early_stop)
    except ConfigError as e:
        log.error("%s", e)
        return EXIT_REFUSED
