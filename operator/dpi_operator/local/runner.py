"""`dpi up`: the plan of one object run as processes on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.live import Live

from dpi_engine.config.machine import usable_cpus
from dpi_engine.config.network import port_is_free
from dpi_engine.launch.exit_codes import EXIT_CRASHED, EXIT_INTERRUPTED, EXIT_USAGE
from dpi_engine.standard_streams import Unfailing
from dpi_engine.tools.console import make_console
from dpi_operator.api.reasons import Reason
from dpi_operator.api.types import DataParallelInference, Runtime
from dpi_operator.api.validate import Finding
from dpi_operator.local.ignored import ignored_fields
from dpi_operator.local.pods import PodProcess
from dpi_operator.local.ranks import PodAnswer, ask_pods, rank_rows, rank_table
from dpi_operator.plan.network import Local
from dpi_operator.plan.pods import NotPlannable, PodPlan, Role, plan_group

if TYPE_CHECKING:
    import aiohttp

POLL_S = 0.5
STARTING_POLL_S = 0.2
PROGRESS_S = 5.0
STOP_MARGIN_S = 10.0
LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What the command line of `dpi up` says."""

    state_dir: Path
    ask: str | None = None
    logs: bool = False
    timeout_s: float = 600.0
    table: bool = True


class UpFailed(RuntimeError):
    """The group did not come up; the message says why."""

    code = EXIT_CRASHED  # of `dpi up`


class NoFolder(UpFailed):
    """The one that was given cannot hold logs."""

    code = EXIT_USAGE


def unusable_ports(plans: list[PodPlan]) -> list[str]:
    """Declared ports that are none, that two pods want, or that are held, each with the field that sets it."""
    wrong = []
    wanted_by: dict[int, str] = {}
    for plan in plans:
        ports = plan.ports
        wanted = [("management", ports.management)]
        wanted += [("http", port) for port in plan.http_ports]
        if len(plan.http_ports) > 1:
            wanted.append(("supervisor", ports.supervisor))
        if plan.role is Role.RANK0:
            wanted.append(("rpc", ports.rpc))
        for field, port in wanted:
            who = f"spec.engine.ports.{field} of {plan.name}"
            if port > LAST_PORT:
                wrong.append(f"port {port} for {who} is above {LAST_PORT}: lower it, or run fewer pods here")
            elif port in wanted_by:
                wrong.append(f"port {port} is wanted twice: for {wanted_by[port]} and for {who}; change one of them")
            elif not port_is_free("127.0.0.1", port):
                wrong.append(f"port {port} of {plan.name} is in use; change spec.engine.ports.{field} or free it")
            wanted_by.setdefault(port, who)
    return wrong


def claim_folder(folder: Path) -> int:
    """A descriptor of `folder`, made if need be, that keeps another `dpi up` out until it is closed or we end.

    Raises UpFailed when another one has it, NoFolder when it cannot be had.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claimed = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as e:
        raise NoFolder(f"--state-dir {folder}: cannot be used: {e.strerror or e}") from None
    try:
        fcntl.flock(claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(claimed)
        raise UpFailed(
            f"--state-dir {folder}: another `dpi up` writes its logs there; stop it, or give this one another name "
            "(metadata.name) or folder"
        ) from None
    return claimed


class LocalRunner:
    """Runs all groups of one object. `run` returns the exit code."""

    def __init__(self, dpi: DataParallelInference, options: UpOptions) -> None:
        self.dpi, self.options = dpi, options
        if dpi.spec.engine.runtime is not Runtime.DPI:
            raise NotPlannable(
                Finding(
                    Reason.NOT_SUPPORTED,
                    "spec.engine.runtime",
                    f"{dpi.spec.engine.runtime.value} runs from its image; here only the dpi runtime runs",
                )
            )
        groups = 0 if dpi.spec.suspend else dpi.spec.replicas
        self.plans = [p for group in range(groups) for p in plan_group(dpi, group, Local())]
        self.console = make_console(Unfailing(sys.stdout))  # the pods run on, whatever becomes of what is printed
        self._failure: asyncio.Future[str] | None = None
        self._stop = asyncio.Event()
        self._states: dict[tuple[int, int], str] = {}
        self.pods: list[PodProcess] = []

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def endpoints(self) -> list[str]:
        return [f"http://127.0.0.1:{port}/v1" for p in self.plans for port in p.http_ports]

    @property
    def served_name(self) -> str:
        return self.dpi.spec.model.served_name or self.dpi.spec.model.name

    def _thread_args(self, plan: PodPlan) -> tuple[str, ...]:
        """Ranks of one machine share its CPUs evenly, unless the object says otherwise."""
        if any(a.partition("=")[0] == "--cpu-threads" for a in plan.args):
            return ()
        ranks = sum(p.rank_count for p in self.plans)
        return ("--cpu-threads", str(max(1, usable_cpus() // ranks)))

    def _fail(self, why: str) -> None:
        if self._failure and not self._failure.done():
            self._failure.set_result(why)

    def _report_changes(self, rows: list[dict[str, object]]) -> None:
        for row in rows:
            key = (int(str(row["group"])), int(str(row["rank"])))
            state = str(row.get("state"))
            if self._states.get(key) != state:
                known = key in self._states
                self._states[key] = state
                why = f": {row.get('error') or row.get('stage')}" if row.get("error") or row.get("stage") else ""
                if known or state != "NEW":
                    self.say(f"rank {key[1]} ({row['pod']}): {state}{'' if state == 'READY' else why}")

    def _on_signal(self) -> None:
        """Stop; at the second signal the pods do not wait for running requests, as `dpi serve` does."""
        if self._stop.is_set():
            for pod in self.pods:
                pod.terminate()
        self._stop.set()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._failure = loop.create_future()
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(sig, self._on_signal)
        if not self.plans:
            why = "suspend is set" if self.dpi.spec.suspend else "replicas is 0"
            self.say(f"{self.dpi.metadata.name}: {why}, nothing to run")
            return 0
        if wrong := unusable_ports(self.plans):
            for line in wrong:
                self.say(f"error: {line}")
            return 1
        try:
            claimed = claim_folder(self.options.state_dir)
        except UpFailed as e:
            self.say(f"error: {e}")
            return e.code
        try:
            return await self._run()
        finally:
            os.close(claimed)

    async def _run(self) -> int:
        if fields := ignored_fields(self.dpi):
            self.say("without a cluster these fields mean nothing: " + ", ".join(fields))
        for plan in self.plans:
            log_file = self.options.state_dir / f"{plan.name}.log"
            log_file.unlink(missing_ok=True)
            pod = PodProcess(
                plan,
                log_file,
                self.dpi.spec.failure_policy.max_restarts,
                self.say,
                self._fail,
                echo=self.options.logs,
                extra_args=self._thread_args(plan),
                forget_after_s=self.dpi.spec.failure_policy.backoff.reset_after_seconds,
            )
            self.pods.append(pod)
            ranks = f"rank {plan.rank_start}" + (
                f" to {plan.rank_start + plan.rank_count - 1}" if plan.rank_count > 1 else ""
            )
            self.say(f"starting {plan.name} ({plan.role.value}, {ranks}), log in {log_file}")
            pod.start()
        try:
            import aiohttp  # slow, and the pods start meanwhile

            async with aiohttp.ClientSession() as session:
                await self._until_ready(session)
                if self._stop.is_set():
                    return EXIT_INTERRUPTED
                if self.options.ask is not None:
                    return await self._ask_and_show(session, self.options.ask)
                return await self._watch(session)
        except UpFailed as e:
            self.say(f"error: {e}")
            return 1
        finally:
            await self._shut_down()

    async def _look(self, session: aiohttp.ClientSession) -> list[PodAnswer]:
        """What the pods answer now; raises UpFailed when one gave up."""
        assert self._failure is not None
        answers = await ask_pods(session, self.plans)
        for pod, answer in zip(self.pods, answers, strict=True):
            pod.seen(answer.ready, time.monotonic())
        if self._failure.done():
            raise UpFailed(self._failure.result())
        return answers

    async def _rest(self, seconds: float) -> None:
        """Until the next look, cut short by a stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    async def _until_ready(self, session: aiohttp.ClientSession) -> None:
        began = time.monotonic()
        spoke = began
        while not self._stop.is_set():
            answers = await self._look(session)
            rows = rank_rows(answers)
            self._report_changes(rows)
            if all(r.get("state") == "READY" for r in rows) and all(a.ready for a in answers):
                self.say(f"ready in {time.monotonic() - began:.1f} s: model {self.served_name}")
                for endpoint in self.endpoints():
                    self.say(f"  {endpoint}")
                return
            now = time.monotonic()
            missing = [
                f"rank {r['rank']} {r.get('state')}{' ' + str(r.get('stage')) if r.get('stage') else ''}"
                for r in rows
                if r.get("state") != "READY"
            ] or [f"{a.plan.name} not ready ({a.error or 'starting'})" for a in answers if not a.ready]
            if now - began > self.options.timeout_s:
                raise UpFailed(f"not ready after --timeout {self.options.timeout_s:g} s: {'; '.join(missing)}")
            if now - spoke >= PROGRESS_S:
                spoke = now
                self.say(f"waiting ({now - began:.0f} s): {'; '.join(missing)}")
            await self._rest(STARTING_POLL_S)

    async def _ask_and_show(self, session: aiohttp.ClientSession, question: str) -> int:
        assert self._failure is not None
        chat = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dpi_engine", "chat", "--url", self.endpoints()[0]),
            *("--model", self.served_name, "--echo", question),
        )
        done = asyncio.create_task(chat.wait())
        stop = asyncio.create_task(self._stop.wait())
        shown: list[dict[str, object]] = []
        while not done.done():
            news: set[asyncio.Future[Any]] = {done, stop, self._failure}
            await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED, timeout=POLL_S)
            if stop.done() or self._failure.done():
                with contextlib.suppress(ProcessLookupError):
                    chat.terminate()
                await chat.wait()
            else:
                shown = rank_rows(await ask_pods(session, self.plans))
        stop.cancel()
        if self._failure.done():
            raise UpFailed(self._failure.result())
        if self._stop.is_set():
            return EXIT_INTERRUPTED
        if rows := rank_rows(await ask_pods(session, self.plans)) or shown:
            self.console.print()
            self.console.print(rank_table(rows))
        return chat.returncode or 0

    async def _watch(self, session: aiohttp.ClientSession) -> int:
        self.say("Ctrl-C stops")
        live = self.options.table and self.console.is_terminal
        with Live(console=self.console, auto_refresh=False) if live else contextlib.nullcontext() as view:
            while not self._stop.is_set():
                rows = rank_rows(await self._look(session))
                self._report_changes(rows)
                if view is not None:
                    view.update(rank_table(rows), refresh=True)
                await self._rest(POLL_S)
        return 0

    async def _shut_down(self) -> None:
        if any(pod.process and pod.process.returncode is None for pod in self.pods):
            self.say("stopping")
        for pod in reversed(self.pods):  # headless pods first: rank 0 still routes while they drain
            pod.terminate()
        limit = self.dpi.spec.lifecycle.shutdown_timeout_seconds + STOP_MARGIN_S
        clean = await asyncio.gather(*(pod.join(limit) for pod in self.pods))
        for pod, ended in zip(self.pods, clean, strict=True):
            if not ended:
                self.say(f"{pod.plan.name} did not end within {limit:.0f} s and was killed")
        if self.pods:
            self.say("stopped")
