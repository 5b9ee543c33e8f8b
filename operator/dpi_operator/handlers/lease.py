"""One active operator at a time: a Lease that is taken before anything is watched, and whose loss ends the process."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from datetime import UTC, datetime
from typing import Any

from dpi_operator.apply.client import Api, ApiError
from dpi_operator.apply.refusals import Refusals
from dpi_operator.plan.times import to_seconds

log = logging.getLogger(__name__)

DURATION_S = 15
RENEW_S = 4.0
RETRY_S = 3.0


def _micro(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LeaseLost(RuntimeError):
    """Another operator may be active: this one must stop at once."""


class Lease:
    """`identity` is unique to this process."""

    def __init__(self, api: Api, namespace: str, name: str, identity: str) -> None:
        self._api, self._namespace, self._name, self._identity = api, namespace, name, identity
        self._seen: tuple[str, str] = ("", "")
        self._seen_at = 0.0

    async def acquire(self) -> None:
        """Waits until the lease is ours. An API server that does not answer is asked again.

        Raises ApiError where the account has no right to the lease.
        """
        told, refusals = "", Refusals()
        while True:
            try:
                holder = await self._try()
            except ApiError as e:
                if refusals.believed(e):
                    raise
                holder = f"unknown ({e})"
            if not holder:
                log.info("lease %s/%s is ours (%s)", self._namespace, self._name, self._identity)
                return
            if holder != told:
                log.info("standing by: lease %s/%s is held by %s", self._namespace, self._name, holder)
                told = holder
            await asyncio.sleep(RETRY_S * random.uniform(0.8, 1.2))

    async def hold(self) -> None:
        """Renews for as long as it can. Raises LeaseLost."""
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                async with asyncio.timeout(DURATION_S / 2):
                    holder = await self._try()
            except (ApiError, TimeoutError) as e:
                why = str(e) or f"no answer within {DURATION_S / 2:g} s"
                if time.monotonic() - renewed > DURATION_S - RENEW_S:
                    raise LeaseLost(f"not renewed for {time.monotonic() - renewed:.0f} s: {why}") from e
                log.warning("lease %s/%s not renewed: %s", self._namespace, self._name, why)
                continue
            if holder:
                raise LeaseLost(f"taken by {holder}")
            renewed = time.monotonic()

    async def release(self) -> None:
        """Let a standby take over at once; best effort."""
        try:
            live = await self._api.get("Lease", self._namespace, self._name)
            if live and (live.get("spec") or {}).get("holderIdentity") == self._identity:
                live["spec"]["holderIdentity"] = ""
                live["spec"]["leaseDurationSeconds"] = 1
                await self._api.replace("Lease", self._namespace, live)
        except ApiError as e:
            log.info("lease not released: %s", e)

    async def _try(self) -> str:
        """Take or renew it. The holder when it is another's, else an empty string."""
        now = time.time()
        live = await self._api.get("Lease", self._namespace, self._name)
        if live is None:
            body = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": self._spec(now, now, 0),
            }
            return await self._write(self._api.create("Lease", self._namespace, body))
        spec = live.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder and holder != self._identity and not self._expired(holder, spec):
            return str(holder)
        began = to_seconds(spec.get("acquireTime")) if holder == self._identity else now
        transitions = int(spec.get("leaseTransitions") or 0) + (holder != self._identity)
        live["spec"] = self._spec(now, began or now, transitions)
        return await self._write(self._api.replace("Lease", self._namespace, live))

    async def _write(self, call: Any) -> str:
        try:
            await call
        except ApiError as e:
            if e.status == 409:
                return "another that was quicker"
            raise
        return ""

    def _expired(self, holder: str, spec: dict[str, Any]) -> bool:
        """Judged by our own clock from when we saw it renewed last: clocks of machines differ."""
        mark = (holder, str(spec.get("renewTime")))
        if mark != self._seen:
            self._seen, self._seen_at = mark, time.monotonic()
        return time.monotonic() - self._seen_at > float(spec.get("leaseDurationSeconds") or DURATION_S)

    def _spec(self, now: float, began: float, transitions: int) -> dict[str, Any]:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_S,
            "acquireTime": _micro(began),
            "renewTime": _micro(now),
            "leaseTransitions": transitions,
        }
