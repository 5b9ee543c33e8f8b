"""The operator as a process: health port, lease, watches, workers; ends when the lease is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpi_operator import telemetry
from dpi_operator.api.types import KIND
from dpi_operator.apply.client import Api, ApiError
from dpi_operator.apply.events import Events
from dpi_operator.apply.executor import Executor
from dpi_operator.apply.optional import OptionalKinds
from dpi_operator.apply.refusals import Refusals
from dpi_operator.handlers.health import age_check, make_health_app, serve_health
from dpi_operator.handlers.lease import Lease, LeaseLost
from dpi_operator.handlers.watching import SERVER_TIMEOUT_S, WatchesEnded, watch
from dpi_operator.handlers.webhook import CERTIFICATE, KEY, serving
from dpi_operator.handlers.workers import Workers

log = logging.getLogger(__name__)

EXIT_OK, EXIT_LEASE_LOST, EXIT_FAILED = 0, 3, 1

FIRST_WAIT_S, LAST_WAIT_S, LAST_LOOK_S = 1.0, 30.0, 10.0
MOST_TRIES = 8
STEADY_S = 120.0
"""Watches that a missing kind ended begin anew; when that happens MOST_TRIES times, each within STEADY_S, it is the end
of this process: another may do better."""


@dataclass(frozen=True, slots=True)
class Options:
    """Command line of `dpi-operator run`. No `namespaces`: all of them."""

    namespaces: tuple[str, ...] = ()
    metrics_port: int = 8080
    lease_namespace: str = "default"
    lease_name: str = "dpi-operator"
    workers: int = 10
    api_concurrency: int = 20
    resync_s: float = 600.0
    cluster_domain: str = "cluster.local"
    webhook_port: int | None = None  # None: no webhook
    webhook_certificates: Path = Path("/etc/dpi-operator/tls")


def identity() -> str:
    """Unique to this process, readable: host name and a random part."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


@dataclass(slots=True)
class _Life:
    """When lists of all objects last worked: the sign that the API server can be reached."""

    last_list: float = field(default_factory=time.monotonic)
    leading: bool = False


async def run(options: Options, stop: asyncio.Event | None = None) -> int:
    """Until `stop` is set, without one until SIGTERM or SIGINT, or until the lease is lost. The exit code."""
    if stop is None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    life, who = _Life(), identity()
    too_old = age_check("all objects were last listed", lambda: life.last_list, 3 * SERVER_TIMEOUT_S)
    app = make_health_app(live=lambda: too_old() if life.leading else "", ready=lambda: "")
    try:
        api = await Api.connect(options.api_concurrency)
        health = await serve_health(app, options.metrics_port)
    except OSError as e:
        log.error("port %d of /healthz and /metrics: %s; give another --metrics-port", options.metrics_port, e.strerror)
        return EXIT_FAILED
    except ApiError as e:
        log.error("cannot start: %s", e)
        return EXIT_FAILED
    lease = Lease(api, options.lease_namespace, options.lease_name, who)
    try:
        async with contextlib.AsyncExitStack() as stack:
            if options.webhook_port is not None and not await _serve_webhook(options, stack):
                return EXIT_FAILED
            if not await _until(lease.acquire(), stop):
                return EXIT_OK
            life.leading, life.last_list = True, time.monotonic()
            telemetry.LEADER.set(1)
            return await _lead(options, api, lease, life, stop, who)
    except ApiError as e:
        log.error("cannot go on: %s", e)
        return EXIT_FAILED
    finally:
        await health.cleanup()
        await api.close()


async def _serve_webhook(options: Options, stack: contextlib.AsyncExitStack) -> bool:
    """Whether the webhook is served, until the stack ends."""
    folder = options.webhook_certificates
    try:
        port = await stack.enter_async_context(serving(options.webhook_port or 0, folder, options.cluster_domain))
    except (OSError, ssl.SSLError) as e:
        log.error(
            "the webhook cannot be served on port %s with %s and %s in %s: %s",
            options.webhook_port, CERTIFICATE, KEY, folder, e,
        )  # fmt: skip
        return False
    log.info("the webhook is served on port %d", port)
    return True


async def _until(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Whether `work` ended before a stop was asked for."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        task.result()
        return True
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return False


async def _lead(options: Options, api: Api, lease: Lease, life: _Life, stop: asyncio.Event, who: str) -> int:
    optional = OptionalKinds(api, options.namespaces)
    workers = Workers(
        api,
        Executor(api, Events(api, who)),
        optional,
        concurrency=options.workers,
        domain=options.cluster_domain,
        resync_s=options.resync_s,
    )
    parts = {
        asyncio.create_task(stop.wait(), name="stop"),
        asyncio.create_task(lease.hold(), name="lease"),
        asyncio.create_task(workers.reporter.run(), name="asking heads"),
        asyncio.create_task(_look(options, api, workers, optional, life), name="watching"),
    }
    code = EXIT_OK
    try:
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.get_name() == "stop":
                continue
            error = task.exception()
            if isinstance(error, LeaseLost):
                log.error("the lease is lost (%s): ending, so that only one operator acts", error)
                code = EXIT_LEASE_LOST
            else:
                log.error("%s ended: %s", task.get_name(), error or "without a reason")
                code = EXIT_FAILED
    finally:
        telemetry.LEADER.set(0)
        for task in parts:
            task.cancel()
        await workers.stop()
        await asyncio.gather(*parts, return_exceptions=True)
    if code != EXIT_LEASE_LOST:
        await lease.release()
    return code


async def _look(options: Options, api: Api, workers: Workers, optional: OptionalKinds, life: _Life) -> None:
    """Watches, and lists at intervals, for as long as the cluster knows the kind. Raises when the watches end."""
    tries = 0
    while True:
        await _wait_for_kind(options, api, life)
        while not await optional.look():
            log.warning("waiting: the API server does not say which kinds it has")
            await asyncio.sleep(2.0)
        began = time.monotonic()
        try:
            await _watch_until_kinds_change(options, api, workers, optional, life)
            continue
        except _KindGone:
            workers.mark_all(())
            continue
        except WatchesEnded as e:
            tries = 1 if time.monotonic() - began > STEADY_S else tries + 1
            if not e.again or tries > MOST_TRIES:
                raise
            wait = min(FIRST_WAIT_S * 2 ** (tries - 1), LAST_WAIT_S)
            workers.mark_all(())
            log.warning("%s; they begin anew in %.0f s (try %d of %d)", e, wait, tries, MOST_TRIES)
        await asyncio.sleep(wait)


class _KindGone(Exception):
    """The cluster does not know our kind any more."""


async def _watch_until_kinds_change(
    options: Options, api: Api, workers: Workers, optional: OptionalKinds, life: _Life
) -> None:
    """Watches know their kinds from the start on: when a CRD came or went they begin anew.

    Raises WatchesEnded, and _KindGone when a list says so.
    """
    optional.changed.clear()
    watched = optional.present
    log.info("optional kinds that are here: %s", ", ".join(watched) or "none")
    watching = asyncio.create_task(watch(workers.mark, options.namespaces, watched))
    changed = asyncio.create_task(optional.changed.wait())
    listing = asyncio.create_task(_list_all(options, api, workers, optional, life))
    try:
        await asyncio.wait({watching, changed, listing}, return_when=asyncio.FIRST_COMPLETED)
        if listing.done():
            listing.result()
        if watching.done():
            await optional.look()  # watches also end because a kind has gone: then they begin anew without it
            if optional.present == watched:
                watching.result()
    finally:
        for task in (watching, changed, listing):
            task.cancel()
        await asyncio.gather(watching, changed, listing, return_exceptions=True)
    workers.mark_all([*(set(watched) ^ set(optional.present))])


async def _wait_for_kind(options: Options, api: Api, life: _Life) -> None:
    """Watches find out once, at their start, which kinds there are: until the cluster knows ours there are none.

    An answer that says so is a sign of life too: a restart would not bring the kind back.
    """
    told, wait, refusals = "", FIRST_WAIT_S, Refusals()
    while True:
        try:
            for namespace in options.namespaces or (None,):
                await api.list_all(KIND, namespace)
            if told:
                log.info("the cluster knows %s: watching", KIND)
            return
        except ApiError as e:
            if refusals.believed(e):
                raise
            if e.status == 404:
                life.last_list = time.monotonic()
            unknown = f"the cluster does not know {KIND}: apply the output of `dpi-operator crd`"
            text = unknown if e.status == 404 else str(e)
            if text != told:
                log.warning("waiting: %s", text)
                told = text
        await asyncio.sleep(wait)
        wait = min(wait * 2, LAST_LOOK_S)


async def _list_all(options: Options, api: Api, workers: Workers, optional: OptionalKinds, life: _Life) -> None:
    """Every object is marked at the start and at intervals, so that nothing rests on an event that was missed.

    Lists are made more often than objects are marked: they are also the sign of life. Raises _KindGone.
    """
    marked = -options.resync_s
    while True:
        try:
            for namespace in options.namespaces or (None,):
                objects = await api.list_all(KIND, namespace)
                if time.monotonic() - marked >= options.resync_s:
                    for item in objects:
                        workers.mark((item["metadata"]["namespace"], item["metadata"]["name"]))
            await optional.look()
            life.last_list = time.monotonic()
            telemetry.LAST_LIST.set(time.time())
            if time.monotonic() - marked >= options.resync_s:
                marked = time.monotonic()
        except ApiError as e:
            if e.status == 404:
                raise _KindGone from e
            log.warning("objects not listed: %s", e)
            await asyncio.sleep(5.0)
            continue
        await asyncio.sleep(min(60.0, options.resync_s))
