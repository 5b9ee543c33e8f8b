"""`dpi serve`: supervises the processes of one pod, keeps the ranks' leases (on the head) and answers for the pod."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from dpi_engine.config import fingerprint
from dpi_engine.config.build import build
from dpi_engine.config.errors import ConfigError, SourceError
from dpi_engine.config.experts import ExpertPlacement
from dpi_engine.config.machine import auto_dtype, cpu_features, usable_cpus
from dpi_engine.config.network import AddressError, host_port, resolve, source_address, tcp_endpoint
from dpi_engine.config.parallel import Mode, ParallelConfig, Ports
from dpi_engine.config.pod import PodIdentity
from dpi_engine.config.settings import Settings
from dpi_engine.config.sources import ModelFiles, default_cache_dir, resolve_model
from dpi_engine.config.tensor_parallel import check_tensor_parallel
from dpi_engine.launch.addresses import PodAddresses
from dpi_engine.launch.children import Child, describe_exit
from dpi_engine.launch.control import (
    ApiReport,
    ControlServer,
    CoordinatorReport,
    Drain,
    EngineReport,
    FromChild,
    RankTable,
    UtilityResult,
)
from dpi_engine.launch.exit_codes import (
    EXIT_CHILD,
    EXIT_HANDSHAKE,
    EXIT_INTERRUPTED,
    EXIT_LOST_HEAD,
    EXIT_OK,
    EXIT_REFUSED,
)
from dpi_engine.launch.failures import LaunchFailed, give_up
from dpi_engine.launch.management import UtilityFailed, Verdict, make_management_app, read_token
from dpi_engine.launch.metrics import PodMetrics
from dpi_engine.launch.ports import HeldPorts, check_all, check_free
from dpi_engine.launch.spec import ChildKind, ChildSpec
from dpi_engine.launch.supervisor import make_supervisor_app, policy_of
from dpi_engine.launch.utility_calls import UtilityCalls
from dpi_engine.launch.view import PodState
from dpi_engine.tokenizer.spec import read_spec
from dpi_engine.wire.counters import WireCounters
from dpi_engine.wire.head import HeadHandshake
from dpi_engine.wire.lease import DRAINING, LEFT, Group, LeaseTimings, Missing
from dpi_engine.wire.messages import RankInfo, RankState
from dpi_engine.wire.places import Place, places_of
from dpi_engine.wire.sockets import RuntimeDir, backoff

log = logging.getLogger(__name__)

WATCH_S = 0.25
STANDSTILL_S = 1.5
"""A gap between two looks that only a standstill of this process explains."""
STOP_MARGIN_S = 5.0
TAKEN = (errno.EADDRINUSE, errno.EACCES)
LOOK_UP_S = 5.0
"""For one look-up of the head's name; a stop waits for it."""


class Launcher:
    """One pod of a group. `run` returns the exit code: 0 only after a stop that was asked for."""

    def __init__(self, settings: Settings, pod: PodIdentity, token: str | None) -> None:
        self.settings, self.pod, self.token = settings, pod, token
        self.pod_name = pod.name or socket.gethostname()
        self.parallel = ParallelConfig.from_settings(settings, usable_cpus())
        self.state = PodState(
            headless=self.parallel.headless,
            size=self.parallel.size,
            local=tuple(self.parallel.local_ranks),
            serves=tuple(self.parallel.served_ranks),
            api_servers=self.parallel.api_server_count,
            pod=self.pod_name,
            member=self.parallel.is_member,
        )
        self.moe = False  # known when the model has been found
        self.coupled = False  # the ranks share experts, and step together
        self.vllm = settings.data_parallel_protocol == "vllm"
        self.vllm_experts = False  # the same, and they are vLLM's
        self.declared = fingerprint.declared(settings)
        self.cache_dir = Path(settings.cache_dir) if settings.cache_dir else default_cache_dir(os.environ, Path.home())
        self.counters = WireCounters()
        self.restarts: dict[str, int] = {}
        self.metrics = PodMetrics(self.state, self.counters, settings.served_names[0], self.restarts)
        self.head: HeadHandshake | None = None
        self.children: dict[str, Child] = {}
        self._run_dir: Path | None = None
        self._control: ControlServer | None = None
        self._addresses: PodAddresses | None = None
        self._stop = asyncio.Event()
        self._heard = asyncio.Event()  # a child has told something that may complete the launch
        self._drain_until = 0.0  # when what runs is ended, once this launch stops
        self._failed: asyncio.Future[LaunchFailed] | None = None
        self._finish = False  # this launch ends for a reason that lets running requests finish
        self._calls = UtilityCalls()
        self._held = HeldPorts()
        self._places: list[Place] = []  # as the group's head has told them
        self._max_model_len = 0
        self._listeners: list[web.AppRunner] = []
        self._background: set[asyncio.Task[Any]] = set()  # keeps tasks from being collected
        self._began = time.monotonic()

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(sig, self._on_signal)
        for note in self.parallel.notes:
            log.warning("%s", note)
        if self.vllm:
            log.warning(
                "--data-parallel-protocol vllm: it has no fingerprints, epochs and beats. Whether ranks run the same "
                "is not checked, that one is gone shows by its connections alone, a step that never ends not at all"
            )
        try:
            folder = RuntimeDir()
        except OSError as e:
            return give_up(e)
        with folder as run_dir:
            self._run_dir = run_dir.path
            try:
                await self._serve_management()
                model_path = await self._resolve_model()
                if not self._stop.is_set():
                    await self._start(model_path)
                    await self._watch()
                code = EXIT_OK
            except LaunchFailed as e:
                log.error("%s", e)
                code = e.code
            except ConfigError as e:
                log.error("%s", e)
                code = EXIT_REFUSED
            except OSError as e:
                code = give_up(e)
            finally:
                await self._shut_down()
                for listener in self._listeners:
                    await listener.cleanup()
        return code

    async def _serve_management(self) -> None:
        settings = self.settings
        await self._listen(make_management_app(self, self.token), "--management-port", settings.management_port)
        where = f"http://{host_port(self._http_host(), settings.management_port)}"
        log.info("management API on %s (/livez /readyz /startupz /metrics /ranks)", where)
        if self.parallel.mode is Mode.MULTI_PORT:
            app = make_supervisor_app(self.ready, self._supervised)
            await self._listen(app, "--data-parallel-supervisor-port", settings.data_parallel_supervisor_port)

    async def _listen(self, app: web.Application, flag: str, port: int) -> None:
        """Serve `app` until the end. Raises LaunchFailed naming the flag of a port that cannot be had."""
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        self._listeners.append(runner)
        host = self._http_host()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as e:
            unresolved = isinstance(e, socket.gaierror)  # its numbers are not the system's
            # asyncio wraps the system's words in its own
            why = os.strerror(e.errno).lower() if e.errno and not unresolved else str(e.strerror or e)
            wrong_host = "; --host must be a name or an address of this machine"
            todo = "; free it or give another" if e.errno in TAKEN else wrong_host
            message = f"{flag} {port}: cannot listen on {host}: {why}{todo}"
            raise LaunchFailed(message, EXIT_REFUSED) from None

    async def _resolve_model(self) -> str:
        """Find or fetch the model once for all children; returns its folder or file."""

        def progress(text: str) -> None:
            if self._stop.is_set():
                raise SourceError("stopped while the model was being fetched")
            if text != self.state.stage:
                self.state.stage = text
                log.info("%s", text)

        self.state.stage = f"finding {self.settings.model}"
        find = functools.partial(resolve_model, weightless=self.settings.load_format == "dummy")
        task = asyncio.create_task(asyncio.to_thread(find, self.settings.model, self.cache_dir, progress))
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not task.done():
            return ""
        await asyncio.to_thread(self._read_kind, task.result())
        return str(task.result().location)

    def _read_kind(self, files: ModelFiles) -> None:
        """Whether the model has experts, and whether ranks share them. Raises ConfigError."""
        spec = read_spec(files)
        self.moe = spec.moe is not None
        check_tensor_parallel(spec, self.settings.tensor_parallel_size)
        if self.moe and self.vllm and self.parallel.size > 1:
            if self.parallel.local_ranks:
                raise ConfigError(
                    f"{spec.architecture} is a mixture of experts, whose ranks are never mixed: with "
                    "--data-parallel-protocol vllm all of them are vLLM's. Leave the protocol out and run every rank "
                    "with `dpi serve`, or give the head --data-parallel-size-local 0 and run every rank with "
                    "`vllm serve --headless`"
                )
            self.vllm_experts = True
        if not self.settings.enable_expert_parallel:
            return
        if spec.moe is None:
            raise ConfigError(
                f"--enable-expert-parallel (-ep): {spec.architecture} has no experts to spread; leave it out"
            )
        ExpertPlacement(spec.moe.num_experts, self.parallel.size)  # raises where some rank would hold none
        self.coupled = self.parallel.size > 1
        if self.coupled:
            self.declared["build"] = build()  # steps that are computed together are those of one build

    @property
    def waves(self) -> bool:
        """The ranks rest and work together, so that the first request to an idle group wakes all."""
        return self.coupled or self.vllm_experts

    async def _start(self, model_path: str) -> None:
        assert self._run_dir is not None
        host = None
        if self.parallel.is_head and self.parallel.remote_ranks:
            address = self.pod.control_host(self.parallel.address)
            try:
                host = await asyncio.to_thread(resolve, address, 30.0)
            except AddressError as e:
                why = f"{self.pod.control_setting}: {e}; the head binds it, give a name or IP of this machine"
                raise LaunchFailed(why, EXIT_REFUSED) from None
        addresses = PodAddresses(self._run_dir, Ports.of(self.settings), self.parallel, host)
        self._addresses = addresses
        own = {"--management-port", "--data-parallel-supervisor-port"}  # held by this process by now
        wanted = [w for w in addresses.ports.bound(self.settings, self.parallel, self.moe) if w[0] not in own]
        check_all(wanted, self._http_host(), addresses.host, self.pod.control_setting, self._held)
        exchange = await self._exchange(addresses) if self.coupled else {}
        if self._stop.is_set():
            return
        self._control = ControlServer(addresses.control(), self._on_report)
        self._control.start()
        (self._run_dir / "prometheus").mkdir()
        coordinated = self.parallel.is_head and self.parallel.needs_coordinator(self.moe)
        if not self.parallel.headless:
            await self._start_head(addresses, coordinated)
        if coordinated:
            ends = addresses.coordinator()
            self._add_child(ChildKind.COORDINATOR, 0, "coordinator", coordinator=ends, waves=self.waves)
        head = tcp_endpoint(self.parallel.address, self.parallel.rpc_port)
        self._add_api_servers(addresses, model_path, head, coordinated)
        threads = self.settings.cpu_threads or usable_cpus() // max(1, self.parallel.size_local)
        threads = max(1, threads // self.settings.tensor_parallel_size)
        handshake = [] if self.parallel.headless else addresses.handshake()[:1]
        if not self.parallel.is_head:
            handshake.append(head)
        for local_rank, rank in enumerate(self.parallel.local_ranks):
            self._add_child(
                ChildKind.ENGINE,
                rank,
                f"rank-{rank}",
                model_path=model_path,
                handshake=handshake,
                local=not self.parallel.headless,
                drains=self.parallel.ranks_drain(self.coupled),
                threads=threads,
                local_rank=local_rank,
                local_ranks=self.parallel.size_local,
                exchange=exchange.get(rank, []),
            )
        for child in self.children.values():
            child.start()

    async def _exchange(self, addresses: PodAddresses) -> dict[int, list[Any]]:
        """IP and port on which each rank of this launch takes links of the others. Raises LaunchFailed, ConfigError."""
        host = await self._exchange_host(addresses)
        if self._stop.is_set():
            return {}
        addresses.ports.check_exchange(self.settings, self.parallel, self.pod.in_pod)
        found: dict[int, list[Any]] = {}
        for rank, (what, port) in addresses.ports.exchange(self.parallel, self.pod.in_pod).items():
            check_free(what, host, port, self.pod.control_setting)
            found[rank] = [host, port]
        return found

    async def _exchange_host(self, addresses: PodAddresses) -> str:
        """The IP by which ranks of other pods reach this one's: that from which it reaches the head.

        The head's name may get its address later than this launch starts, so it is looked up anew until it has one.
        Raises LaunchFailed at --handshake-timeout. What it gives back after a stop was asked for is of no use.
        """
        if self.pod.ip is not None:
            return self.pod.ip
        own = "127.0.0.1"
        if self.parallel.is_head:
            return addresses.host or own
        deadline = self._began + self.settings.handshake_timeout
        told = float("-inf")
        for pause in backoff():
            try:
                head = await asyncio.to_thread(resolve, self.parallel.address, LOOK_UP_S)
                return source_address(head, self.parallel.rpc_port)
            except AddressError as e:
                self.state.stage = f"looking for the head: {e}"
            now = time.monotonic()
            if now >= deadline:
                limit = f"--handshake-timeout {self.settings.handshake_timeout:.0f} s"
                raise LaunchFailed(f"not complete after {limit}; {self.state.stage}", EXIT_HANDSHAKE)
            if now - told >= LeaseTimings().report:
                told = now
                log.warning("%s", self.state.stage)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause, deadline - now)):
                    await self._stop.wait()
            if self._stop.is_set():
                break
        return own

    def _add_api_servers(self, addresses: PodAddresses, model_path: str, head: str, coordinated: bool) -> None:
        assert self._run_dir is not None
        alone = self.parallel.mode is Mode.MULTI_PORT  # each has ranks, and numbers for /metrics, of its own
        for i in range(self.parallel.api_server_count):
            ranks = self.parallel.front_end_ranks(i)
            if alone:
                self._metrics_folder(i).mkdir()
            self._add_child(
                ChildKind.API,
                i,
                f"api-{i}",
                model_path=model_path,
                port=self.parallel.http_port(self.settings.port, i),
                clients=1 if alone else self.parallel.api_server_count,
                client_index=0 if alone else i,
                first_rank=ranks[0],
                num_ranks=len(ranks),
                head=head if self.parallel.is_member else "",
                inputs_bind=addresses.inputs(i),
                outputs_bind=addresses.outputs(i),
                stats_connect=addresses.coordinator().front_connect if coordinated else None,
                waves=self.waves,
            )

    def _metrics_folder(self, api: int) -> Path:
        """Where an API server shares its numbers with those that serve the same ranks."""
        assert self._run_dir is not None
        folder = self._run_dir / "prometheus"
        return folder / str(api) if self.parallel.mode is Mode.MULTI_PORT else folder

    async def _start_head(self, addresses: PodAddresses, coordinated: bool) -> None:
        """Keep the leases: of the whole group on the head, elsewhere of the ranks behind this launch's front ends."""
        group = Group(
            size=self.parallel.size,
            local=frozenset(self.parallel.local_ranks),
            only_local=self.parallel.is_member,
            remote_headless=self.parallel.mode is Mode.INTERNAL,
            declared=self.declared,
            diff=fingerprint.diff,
            coupled=self.coupled and self.parallel.is_head,
            vllm=self.vllm,
        )
        self.head = HeadHandshake(
            addresses.handshake(),
            group,
            addresses.head_addresses(coordinated),
            timings=LeaseTimings(),
            counters=self.counters,
            on_change=self._on_ranks,
            on_report=self._on_missing,
            dtype=self._settled_dtype(),
            fingerprint=fingerprint.digest(self.declared),
            rendezvous=addresses.ports.rendezvous if self.vllm_experts else (),
        )
        await self.head.start()
        self.state.leases = self.head.ranks()
        if self.parallel.is_head and self.parallel.remote_ranks:
            log.info(
                "handshake on %s; waiting for ranks %s of other pods",
                ", ".join(e for e in self.head.endpoints if e.startswith("tcp")),
                _ranges(self.parallel.remote_ranks),
            )
            log.warning(
                "control%s ports on %s are neither encrypted nor authenticated; let only this group's pods reach them",
                " and request" if self.parallel.mode is Mode.INTERNAL else "",
                addresses.host,
            )

    def _settled_dtype(self) -> str:
        """`--dtype auto` is settled here for all ranks, so that mixed nodes agree."""
        if self.settings.dtype != "auto" or self.settings.device == "cuda":
            return self.settings.dtype.replace("auto", "bfloat16")
        return auto_dtype(cpu_features())

    def _add_child(self, kind: ChildKind, index: int, name: str, **fields: Any) -> None:
        assert self._addresses is not None and self._run_dir is not None
        spec = ChildSpec(
            kind=kind,
            index=index,
            name=name,
            control=self._addresses.control(),
            run_dir=str(self._run_dir),
            settings=self.settings,
            cache_dir=str(self.cache_dir),
            declared=self.declared,
            pod=self.pod_name,
            **fields,
        )
        environment = {}
        if kind is ChildKind.API:
            environment["PROMETHEUS_MULTIPROC_DIR"] = str(self._metrics_folder(index))
        if kind is ChildKind.ENGINE:
            environment["OMP_NUM_THREADS"] = str(spec.threads)
            # Threads that spin for long at the end of a parallel region take the core from the front end, and from
            # each other on a shared machine; 20,000 turns bridge the gaps within a step.
            if "OMP_WAIT_POLICY" not in os.environ:
                environment["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", "20000")
        child = Child(spec, environment, self._on_exit, self._on_give_up)
        if self.parallel.mode is Mode.MULTI_PORT and kind is not ChildKind.COORDINATOR:
            child.policy = policy_of(self.settings.data_parallel_supervisor_policy)
        self.children[name] = child

    # -- watching ----------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Until a stop is asked for. Raises LaunchFailed."""
        assert self._failed is not None
        deadline = self._began + self.settings.handshake_timeout
        stop = asyncio.create_task(self._stop.wait())
        heard = asyncio.create_task(self._heard.wait())
        looked = time.monotonic()
        try:
            while not stop.done():
                if heard.done():
                    self._heard.clear()
                    heard = asyncio.create_task(self._heard.wait())
                news: set[asyncio.Future[Any]] = {stop, self._failed, heard}
                await asyncio.wait(news, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
                looked, gap = time.monotonic(), time.monotonic() - looked
                if gap > STANDSTILL_S:  # this process stood still: the reports wait in its own socket
                    self.state.forgive(gap)
                if self._failed.done():
                    raise self._failed.result()
                now = time.monotonic()
                self._refresh(now)
                if not self.state.complete and now > deadline:
                    raise LaunchFailed(
                        f"not complete after --handshake-timeout {self.settings.handshake_timeout:.0f} s; "
                        f"missing: {self.state.waiting_for()}",
                        EXIT_HANDSHAKE,
                    )
        finally:
            stop.cancel()
            heard.cancel()

    def _refresh(self, now: float) -> None:
        if self.head:
            self.state.leases = self.head.ranks()
        for child in self.children.values():
            self.restarts[child.spec.name] = child.restarts
            if child.spec.kind is ChildKind.ENGINE:
                self.state.pids[child.spec.index] = child.pid if child.alive else None
                self.state.restarts[child.spec.index] = child.restarts
        for name, why in self.state.frozen(now):
            child = self.children[name]
            if child.alive and child.process is not None:
                log.error("%s hangs (%s) and is killed", name, why)
                self.state.forget(name)
                child.process.kill()
        if not self.state.complete and self.state.all_up():
            self.state.complete = True
            ports = {c.spec.port for c in self.children.values() if c.spec.kind is ChildKind.API}
            where = "".join(f", http://{host_port(self._http_host(), port)}/v1" for port in sorted(ports))
            log.info("ready in %.1f s: %s%s", now - self._began, self._what(), where)

    def _http_host(self) -> str:
        return self.pod.http_host(self.settings.host)

    def _what(self) -> str:
        ranks = _ranges(self.parallel.local_ranks) or "none"
        if self.parallel.headless:
            return f"headless ranks {ranks}"
        return f"{self.settings.served_names[0]}, {self.parallel.size} ranks (here: {ranks})"

    # -- news --------------------------------------------------------------------------------------------------------

    def _on_report(self, name: str, message: FromChild) -> None:
        now = time.monotonic()
        child = self.children.get(name)
        if child is None:
            return
        if not self.state.complete:
            self._heard.set()
        if isinstance(message, EngineReport):
            self.state.engines[message.rank] = (now, message)
            if message.refused and self._failed and not self._failed.done():
                self._finish = True
                self._failed.set_result(LaunchFailed(f"{name}: {message.refused}", EXIT_REFUSED))
            if message.places and message.places != self._places:
                self._places = message.places
                self._publish_ranks([n for n, c in self.children.items() if c.spec.kind is ChildKind.API])
        elif isinstance(message, ApiReport):
            known = self.state.apis.get(message.index)
            self.state.apis[message.index] = (now, message)
            if known is None:
                self._publish_ranks([name])  # new, or started again: it has no table yet
            self._max_model_len = message.max_model_len or self._max_model_len
            self._take_links(message, known[1] if known else None)
        elif isinstance(message, CoordinatorReport):
            self.state.coordinator = (now, message)
        elif isinstance(message, UtilityResult):
            self._calls.take(message)

    def _take_links(self, report: ApiReport, before: ApiReport | None) -> None:
        """A vLLM rank sends no beats: that a front end lost its connection is the only news of its end, and that one
        has a connection again, be it a front end that was started anew, the only news that it was not."""
        if self.head is None:
            return
        silent = {r.rank for r in self.state.leases if not r.boot_id and r.state is RankState.READY}
        for rank in silent & (report.lost.keys() - (before.lost.keys() if before else set())):
            self.head.unreachable(rank, report.lost[rank])
        for rank in set(report.linked) - set(before.linked if before else ()):
            self.head.reached(rank)

    def _on_ranks(self, ranks: list[RankInfo]) -> None:
        before = {r.rank: r.state for r in self.state.leases}
        for r in ranks:
            if r.state is not before.get(r.rank) and r.state in (RankState.LOST, RankState.SUSPECT):
                in_order = r.stage == DRAINING or r.error.startswith(LEFT)
                level = logging.INFO if in_order else logging.WARNING
                log.log(level, "rank %d is %s: %s", r.rank, r.state, r.error or r.stage)
        self.state.leases = ranks
        self._publish_ranks([n for n, c in self.children.items() if c.spec.kind is ChildKind.API])

    def _publish_ranks(self, names: list[str]) -> None:
        if self._control is None or self.head is None:
            return
        ranks = self.head.ranks()
        places = self._places if self.parallel.is_member else places_of(ranks)
        local = frozenset(self.parallel.local_ranks)
        elsewhere = {
            rank: f"in pod {place.pod}"
            for place in places
            for rank in range(max(place.first, 0), min(place.last + 1, self.parallel.size))
            if rank not in local
        }
        if self.parallel.mode is Mode.MULTI_PORT:
            for index, rank in enumerate(self.parallel.local_ranks):
                port = self.parallel.http_port(self.settings.port, index)
                elsewhere[rank] = f"on port {port} of this pod"
        for name in names:
            own = self.parallel.front_end_ranks(self.children[name].spec.index)
            served = [r for r in ranks if r.rank in own]
            table = RankTable(ranks=served, elsewhere=elsewhere, max_model_len=self._max_model_len)
            self._spawn(self._control.send(name, table))

    def _on_missing(self, missing: list[Missing]) -> None:
        """The handshake has logged them; probes show them through the state."""

    def _on_exit(self, child: Child, code: int) -> None:
        why = describe_exit(code)
        if child.spec.kind is ChildKind.ENGINE:
            self.state.engine_gone(child.spec.index)
            if self.head:
                self.head.process_exited(child.spec.index, f"its process ended ({why})")
        elif child.spec.kind is ChildKind.API:
            self.state.api_gone(child.spec.index)
            self.metrics.forget_process(child.pid)
        else:
            self.state.coordinator = None

    def _on_give_up(self, child: Child, why: str) -> None:
        if self._failed and not self._failed.done():
            ended = child.process.returncode if child.process else None
            code = {EXIT_REFUSED: EXIT_REFUSED, EXIT_LOST_HEAD: EXIT_HANDSHAKE}.get(ended or 0, EXIT_CHILD)
            if code == EXIT_CHILD and child.policy.limit == 0:
                policy = self.settings.data_parallel_supervisor_policy
                why += f"; the others end with it (--data-parallel-supervisor-policy {policy})"
            # What the other ranks compute needs nothing of the lost one, unless they share experts.
            self._finish = code == EXIT_CHILD and not self.coupled
            self._failed.set_result(LaunchFailed(why, code))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- stop --------------------------------------------------------------------------------------------------------

    def _on_signal(self) -> None:
        """Stop; at the second signal do not wait for running requests."""
        if self._stop.is_set():
            log.warning("a second signal: running requests are ended now")
            self._drain_until = 0.0
            for name, child in self.children.items():
                if child.spec.kind is ChildKind.API:
                    child.stop()
                elif child.spec.kind is ChildKind.ENGINE and self._control is not None:
                    self._spawn(self._control.send(name, Drain(timeout_s=0.0)))
        self._stop.set()

    async def _shut_down(self) -> None:
        """Front ends finish what runs, then engines and the coordinator end; everything within the time limits."""
        self.state.draining = True
        if self.head:
            self.head.stopping = True
        limit = self.settings.shutdown_timeout if self._stop.is_set() or self._finish else 0.0
        self._drain_until = time.monotonic() + limit
        running = [c for c in self.children.values() if c.alive]
        if running:
            log.info("stopping %d processes; running requests may take %.0f s", len(running), limit)
        for child in self.children.values():
            child.stopping = True
        await self._drain([c for c in self.children.values() if c.spec.kind is ChildKind.API])
        engines = [c for c in self.children.values() if c.spec.kind is ChildKind.ENGINE]
        await (self._drain if self.parallel.ranks_drain(self.coupled) else self._stop_children)(engines)
        await self._stop_children([c for c in self.children.values() if c.spec.kind is ChildKind.COORDINATOR])
        self._held.close()
        if self.head:
            await self.head.close()
        if self._control:
            await self._control.close()
        if running:
            log.info("stopped")

    async def _drain(self, children: list[Child]) -> None:
        """Stop them when they have finished what they do, within what is left of the time for it."""
        left = max(0.0, self._drain_until - time.monotonic())
        if self._control:
            for child in children:
                if child.alive:
                    await self._control.send(child.spec.name, Drain(timeout_s=left))
        await self._stop_children(children, left)

    async def _stop_children(self, children: list[Child], drain_s: float = 0.0) -> None:
        if not children:
            return

        async def one(child: Child) -> None:
            child.stop()
            await child.join(drain_s + STOP_MARGIN_S)

        await asyncio.gather(*(one(c) for c in children))

    # -- PodView -----------------------------------------------------------------------------------------------------

    def live(self) -> Verdict:
        return self.state.live(time.monotonic())

    def ready(self) -> Verdict:
        return self.state.ready()

    def started(self) -> Verdict:
        return self.state.started()

    def ranks(self) -> dict[str, Any]:
        malformed = self.state.malformed()
        for (sock, reason), n in self.counters.snapshot().items():
            malformed[f"{sock}:{reason}"] = malformed.get(f"{sock}:{reason}", 0) + n
        return {
            "pod": self.pod.name,
            "role": "headless" if self.parallel.headless else "member" if self.parallel.is_member else "head",
            "mode": self.parallel.mode.value,
            "model": self.settings.served_names[0],
            "size": self.parallel.size,
            "tensor_parallel_size": self.settings.tensor_parallel_size,
            "local_ranks": self.parallel.local_ranks,
            "head_lost": {str(rank): why for rank, why in self.state.heads_lost().items()},
            "protocol": self.settings.data_parallel_protocol,
            "fingerprint": fingerprint.digest(self.declared),
            "declared": self.declared,
            "ranks": [msgspec.to_builtins(r) for r in self.state.rank_infos()],
            "missing": self.state.missing(),
            "api_servers": [msgspec.to_builtins(r) for _, (_, r) in sorted(self.state.apis.items())],
            "malformed_frames": malformed,
            "ready": self.ready()._asdict(),
            "uptime_s": round(time.monotonic() - self._began, 3),
        }

    def _supervised(self) -> dict[str, Any]:
        """How each rank of a multi-port launch stands, with its port."""
        listening = {index: report.listening for index, (_, report) in self.state.apis.items()}
        states = {info.rank: info for info in self.state.rank_infos()}
        return {
            "policy": self.settings.data_parallel_supervisor_policy,
            "ranks": [
                {
                    "rank": rank,
                    "port": self.parallel.http_port(self.settings.port, index),
                    "state": states[rank].state if rank in states else RankState.NEW,
                    "stage": states[rank].stage if rank in states else "",
                    "listening": listening.get(index, False),
                }
                for index, rank in enumerate(self.parallel.local_ranks)
            ],
        }

    def metrics_text(self) -> tuple[bytes, str]:
        return self.metrics.render(self._run_dir / "prometheus" if self._run_dir else None)

    async def utility(self, method: str, args: list[Any]) -> dict[int, Any]:
        apis = [n for n, c in self.children.items() if c.spec.kind is ChildKind.API and c.alive]
        if not apis or self._control is None:
            raise UtilityFailed(503, "no front end in this pod: ask the management API of rank 0's pod")
        # Any front end reaches all ranks, but where each has ranks of its own.
        asked = apis if self.parallel.mode is Mode.MULTI_PORT else apis[:1]
        return await self._calls.call(self._control.send, asked, method, args)


def _ranges(ranks: list[int]) -> str:
    """`0-3, 8`"""
    parts: list[str] = []
    start = previous = None
    for rank in [*ranks, None]:
        if previous is not None and rank == previous + 1:
            previous = rank
            continue
        if start is not None:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = rank
    return ", ".join(parts)


def launch(settings: Settings, environment: dict[str, str] | None = None) -> int:
    """Run one pod until it is told to stop. Returns the exit code. Raises ConfigError for settings that cannot be."""
    pod = PodIdentity.from_env(environment if environment is not None else dict(os.environ))
    token = read_token(settings.management_token_file)

    async def main() -> int:
        return await Launcher(settings, pod, token).run()  # made here: it needs a running loop

    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(main())
    return EXIT_INTERRUPTED
