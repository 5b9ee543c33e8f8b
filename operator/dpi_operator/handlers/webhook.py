"""The validating webhook: the reconciler's own judgement of a spec, before the API server takes it.

It is served by every operator, a standby too, since the API server may ask any of them. Nothing depends on it: what it
would refuse the reconciler refuses in the condition Accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from dpi_operator.api.types import GROUP, KIND
from dpi_operator.plan.acceptance import refusals

log = logging.getLogger(__name__)

PATH = "/validate"
CERTIFICATE, KEY = "tls.crt", "tls.key"
"""Names of the files in a Secret of type kubernetes.io/tls."""

REVIEW = "admission.k8s.io/v1"
MAX_BODY = 8 << 20
"""Bytes: a request holds the object twice, and one may have 1.5 MiB."""

LOOK_S = 10.0
"""Seconds between two looks at the certificate's files, which are renewed while the operator runs."""

UNPROCESSABLE = 422


class BadReview(ValueError):
    """What came is no AdmissionReview of a kind that is judged here."""


def answer(review: Any, domain: str) -> dict[str, Any]:
    """AdmissionReview with the answer to one. Raises BadReview."""
    request = review.get("request") if isinstance(review, Mapping) else None
    if not isinstance(request, Mapping) or not isinstance(request.get("uid"), str):
        raise BadReview(f"expected an AdmissionReview of {REVIEW} with a request and its uid")
    kind = request.get("kind")
    named = (kind.get("group"), kind.get("kind")) if isinstance(kind, Mapping) else None
    if named != (GROUP, KIND):
        raise BadReview(f"expected a {KIND} of {GROUP}, got {named}")
    response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    if found := _found(request, domain):
        message = "; ".join(f"{f.reason.value}: {f}" for f in found)
        status = {"code": UNPROCESSABLE, "reason": "Invalid", "message": message}
        response |= {"allowed": False, "status": status}
    return {"apiVersion": REVIEW, "kind": "AdmissionReview", "response": response}


def _found(request: Mapping[str, Any], domain: str) -> Any:
    """Why the object is refused. A spec that does not change is not judged: its labels may be, and it may go."""
    new, old = request.get("object"), request.get("oldObject")
    if request.get("operation") not in ("CREATE", "UPDATE") or not isinstance(new, Mapping):
        return ()
    metadata = new.get("metadata")
    if isinstance(metadata, Mapping) and metadata.get("deletionTimestamp"):
        return ()
    if isinstance(old, Mapping) and old.get("spec") == new.get("spec"):
        return ()
    return refusals(_named(new, request), domain)


def _named(document: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """With name and namespace, which a request may hold beside the object."""
    given = document.get("metadata")
    metadata = dict(given) if isinstance(given, Mapping) else {}
    metadata.setdefault("namespace", request.get("namespace") or "default")
    if not metadata.get("name"):
        # `generateName`: the name comes after admission, and is longer by five characters.
        metadata["name"] = f"{metadata.get('generateName') or 'x'}xxxxx"
    return {**document, "metadata": metadata}


def make_webhook_app(domain: str) -> web.Application:
    """`domain`: DNS domain of the cluster."""

    async def validate(request: web.Request) -> web.Response:
        try:
            review = json.loads(await request.read())
            return web.json_response(answer(review, domain))
        except (ValueError, RecursionError) as e:
            return web.Response(status=400, text=f"{e}\n")

    app = web.Application(client_max_size=MAX_BODY)
    app.router.add_post(PATH, validate)
    return app


class Certificate:
    """A TLS context that follows its files. Raises OSError or ssl.SSLError when they cannot be used at the start."""

    def __init__(self, folder: Path) -> None:
        self._files = (folder / CERTIFICATE, folder / KEY)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._seen = self._state()
        self._load()

    def _state(self) -> tuple[tuple[int, int], ...]:
        return tuple((s.st_mtime_ns, s.st_ino) for s in (f.stat() for f in self._files))

    def _load(self) -> None:
        pair = [str(f) for f in self._files]
        # First into another context: a pair that does not match would leave this one with half of it.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*pair)
        self.context.load_cert_chain(*pair)

    def renew(self) -> bool:
        """Take files that have changed; connections made from now on get them. False: nothing new that can be used."""
        try:
            if (state := self._state()) == self._seen:
                return False
            self._load()
        except (OSError, ssl.SSLError) as e:
            log.warning("the webhook keeps its certificate, the new one cannot be used: %s", e)
            return False
        self._seen = state
        log.info("the webhook has a new certificate")
        return True


async def _follow(certificate: Certificate) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        certificate.renew()


@contextlib.asynccontextmanager
async def serving(port: int, folder: Path, domain: str) -> AsyncIterator[int]:
    """Serves on all addresses until the end of the block; the port. Raises OSError, ssl.SSLError."""
    certificate = Certificate(folder)
    runner = web.AppRunner(make_webhook_app(domain), access_log=None)
    await runner.setup()
    following = asyncio.create_task(_follow(certificate))
    try:
        await web.TCPSite(runner, None, port, ssl_context=certificate.context).start()
        # Port 0 gives each address family a port of its own: that of IPv4 is told where there is one.
        yield int(min(runner.addresses, key=len)[1])
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await runner.cleanup()
