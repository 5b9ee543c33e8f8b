"""What is watched, and the settings of the watching framework. Every event only marks an object dirty."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import kopf

from dpi_operator import telemetry
from dpi_operator.api.types import GROUP, KIND, PLURAL, VERSION
from dpi_operator.apply.kinds import CHILD_KINDS, KINDS, Kind
from dpi_operator.handlers.reporter import Owner
from dpi_operator.plan.names import L_NAME, MANAGED_BY, MANAGER

SERVER_TIMEOUT_S = 240
CLIENT_TIMEOUT_S = 270
CONNECT_TIMEOUT_S = 10
REQUEST_TIMEOUT_S = 15
LONGEST_BACKOFF_S = 30.0
STOP_S = 10.0
BEGIN_S = 60.0
"""All watches have begun by then, or it is tried anew."""


class WatchesEnded(RuntimeError):
    """No watch runs any more. `again`: a kind went away or is not known yet, so that they may begin anew."""

    def __init__(self, message: str, again: bool) -> None:
        super().__init__(message)
        self.again = again


def _worth_telling(record: logging.LogRecord) -> bool:
    """Not that signals are ignored, which this process handles itself, nor traces of a 404, which `watch` reports."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if getattr(error, "status", None) == 404:
        return False
    return not record.getMessage().startswith("OS signals are ignored: running not in the main thread")


for _name in ("running", "orchestration"):
    logging.getLogger(f"kopf._core.reactor.{_name}").addFilter(_worth_telling)


class Backoffs:
    """Endless, growing, never in step: the API server may be away for as long as it likes."""

    def __iter__(self) -> Iterator[float]:
        wait = 1.0
        while True:
            yield wait * random.uniform(0.7, 1.3)
            wait = min(wait * 2, LONGEST_BACKOFF_S)


def _selector(kind: Kind) -> Any:
    return (kind.group, kind.version, kind.plural) if kind.group else (kind.version, kind.plural)


def _watched(optional: Sequence[str]) -> tuple[str, ...]:
    return ("Pod", *CHILD_KINDS, *optional)


def make_settings(optional: Sequence[str] = ()) -> kopf.OperatorSettings:
    """Nothing of the framework's own is written to the cluster: no finalizer, no annotation, no event, no peering."""
    settings = kopf.OperatorSettings()
    settings.watching.server_timeout = SERVER_TIMEOUT_S
    settings.watching.client_timeout = CLIENT_TIMEOUT_S
    settings.watching.connect_timeout = CONNECT_TIMEOUT_S
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = REQUEST_TIMEOUT_S
    settings.networking.connect_timeout = CONNECT_TIMEOUT_S
    settings.networking.error_backoffs = Backoffs()
    settings.networking.enforce_retry_after = True
    settings.peering.standalone = True
    # Namespaces and CRDs are given, not looked for: no right to read either is needed.
    settings.scanning.disabled = True
    settings.persistence.finalizer = f"{GROUP}/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    settings.posting.enabled = False
    settings.process.ultimate_exiting_timeout = None  # its end is seen and answered by `watch`
    settings.execution.max_workers = 16
    settings.queueing.worker_limit = 64
    for name in _watched(optional):
        kind = KINDS[name]
        settings.watching.label_selectors[_selector(kind)] = f"{MANAGED_BY}={MANAGER}"
    return settings


def make_registry(mark: Callable[[Owner, str], None], optional: Sequence[str] = ()) -> kopf.OperatorRegistry:
    """Handlers of all kinds; `optional`: those of the optional ones that the cluster has."""
    found = kopf.OperatorRegistry()

    @kopf.on.login(registry=found)
    def login(**kwargs: Any) -> Any:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=found)
    async def own(name: str, namespace: str | None, **_: Any) -> None:
        telemetry.LAST_EVENT.set(time.time())
        mark((namespace or "", name), "")

    async def child(namespace: str | None, labels: Any, meta: Any, resource: kopf.Resource, **_: Any) -> None:
        telemetry.LAST_EVENT.set(time.time())
        # Whose it is, and whose its label says it is: anybody can change a label.
        owners = {r.get("name") for r in meta.get("ownerReferences") or () if r.get("kind") == KIND}
        for name in sorted((owners | {labels.get(L_NAME)}) - {None}):
            mark((namespace or "", name), by_resource[resource.group, resource.plural])

    by_resource = {(KINDS[name].group, KINDS[name].plural): name for name in _watched(optional)}

    for name in _watched(optional):
        kind = KINDS[name]
        watched = kopf.on.event(*_selector(kind), registry=found, labels={MANAGED_BY: MANAGER})
        watched(child)
    return found


async def watch(mark: Callable[[Owner, str], None], namespaces: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Watch until cancelled; `mark` is called in this loop. Raises WatchesEnded as soon as one of the watches ends.

    The framework has a loop and a thread to itself: at its end it cancels every task that it finds in its loop.
    """
    loop, stop = asyncio.get_running_loop(), threading.Event()
    ended: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
        if not ended.done():
            again = isinstance(error, _NotBegun) or getattr(error, "status", None) == 404
            text = getattr(error, "message", None) or error or "without a reason"
            ended.set_exception(WatchesEnded(f"the watches ended: {text}", again))

    async def body() -> None:
        error: BaseException | None = None
        framework = asyncio.create_task(
            kopf.operator(
                registry=make_registry(lambda owner, kind: _call(loop, mark, owner, kind), optional),
                settings=make_settings(optional),
                standalone=True,
                clusterwide=not namespaces,
                namespaces=tuple(namespaces),
                stop_flag=stop,
            )
        )
        try:
            await _first_end(framework, _watch_names(namespaces, optional))
        except BaseException as e:
            error = e
        _call(loop, finish, error)  # before the framework has cleaned up, which may take long
        stop.set()  # its own thread that waits for this would hold up the end of the loop
        await asyncio.wait({framework}, timeout=STOP_S)
        if framework.done() and not framework.cancelled():
            framework.exception()  # said already

    def run() -> None:
        try:
            asyncio.run(body())
        except BaseException as e:
            _call(loop, finish, e)

    thread = threading.Thread(target=run, name="watches", daemon=True)
    thread.start()
    try:
        await ended
    finally:
        stop.set()
        await loop.run_in_executor(None, thread.join, STOP_S)


class _NotBegun(RuntimeError):
    pass


def _watch_names(namespaces: Sequence[str], optional: Sequence[str]) -> set[str]:
    """Names that the framework gives to the tasks of all watches that are wanted."""
    kinds = [KINDS[name] for name in (KIND, *_watched(optional))]
    resources = [f"{k.plural}.{k.version}.{k.group}".strip(".") for k in kinds]
    return {f"watcher for {resource}@{namespace}" for resource in resources for namespace in namespaces or (None,)}


async def _first_end(framework: asyncio.Task[None], wanted: set[str]) -> None:
    """Returns or raises what the framework or the first of its watches does at its end.

    The framework looks once which kinds there are and leaves out what is not known yet: such a watch would be missing
    without a word.
    """
    deadline = time.monotonic() + BEGIN_S
    watches: dict[str, asyncio.Task[None]] = {}
    while True:
        watches |= {t.get_name(): t for t in asyncio.all_tasks() if t.get_name() in wanted}
        if framework.done():
            framework.result()
            return
        if wanted == watches.keys():
            break
        if time.monotonic() > deadline:
            lacking = ", ".join(sorted(wanted - watches.keys()))
            raise _NotBegun(f"not begun within {BEGIN_S:.0f} s: {lacking}")
        if any(t.done() for t in watches.values()):
            break
        await asyncio.sleep(0.05)
    done, _ = await asyncio.wait({framework, *watches.values()}, return_when=asyncio.FIRST_COMPLETED)
    for task in sorted(done, key=lambda t: t is framework):
        if not task.cancelled():
            task.result()
            return


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *values: Any) -> None:
    """Hand values over to the other thread's loop, if that one still runs."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *values)
