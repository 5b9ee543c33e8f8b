"""A thin client of the Kubernetes API: plain documents, a deadline for every call, every call counted."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException
from yaml import YAMLError

from dpi_operator import telemetry
from dpi_operator.apply.kinds import KINDS, Kind
from dpi_operator.plan.names import MANAGER

REQUEST_TIMEOUT_S = 15.0
PAGE = 500

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


class ApiError(Exception):
    """The API answered with an error, or not at all (status 0)."""

    def __init__(self, status: int, message: str, reason: str = "") -> None:
        super().__init__(f"{status or 'no answer'}: {message}")
        self.status, self.message, self.reason = status, message, reason


POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


async def load_configuration() -> tuple[Configuration, str]:
    """From the pod's account inside a cluster, else from KUBECONFIG; and the namespace that goes without saying.

    Raises ApiError when there is neither.
    """
    configuration = Configuration()
    try:
        kube_config.load_incluster_config(configuration)
        return configuration, POD_NAMESPACE.read_text().strip() if POD_NAMESPACE.exists() else ""
    except kube_config.ConfigException:
        try:
            # Set to nothing it is as good as unset; the library takes it for a file of no name.
            file = os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
            loader = await kube_config.load_kube_config(config_file=file, client_configuration=configuration)
            return configuration, loader.current_context["context"].get("namespace") or ""
        # The library checks little of what such a file holds, and nothing of its types.
        except (
            kube_config.ConfigException,
            OSError,
            YAMLError,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
        ) as e:
            text = " ".join(str(e).split())
            raise ApiError(0, f"neither in a cluster nor a usable KUBECONFIG: {text}") from e


class Api:
    """Calls for the kinds in KINDS with the verbs listed there. Raises ApiError, KeyError for anything else."""

    def __init__(self, client: ApiClient, concurrency: int = 20, namespace: str = "") -> None:
        self._client, self.namespace = client, namespace or "default"
        self._slots = asyncio.Semaphore(concurrency)

    @classmethod
    async def connect(cls, concurrency: int = 20) -> Api:
        configuration, namespace = await load_configuration()
        configuration.connection_pool_maxsize = concurrency
        try:
            client = ApiClient(configuration)
        except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
            raise ApiError(0, f"the certificates of KUBECONFIG cannot be used: {e}") from e
        return cls(client, concurrency, namespace)

    async def close(self) -> None:
        await self._client.close()

    async def call(
        self,
        verb: str,
        kind: Kind,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        sub: str = "",
    ) -> dict[str, Any]:
        allowed = dict(kind.subresources).get(sub, ()) if sub else kind.verbs
        if verb not in allowed:
            raise KeyError(f"{verb} of {kind.plural}{'/' + sub if sub else ''} is not in KINDS")
        resource = f"{kind.plural}/{sub}" if sub else kind.plural
        return await self._request(verb, resource, method, path, query, body, content_type)

    async def _request(
        self,
        verb: str,
        resource: str,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        headers = {"Accept": "application/json", "Content-Type": content_type}
        url = self._client.configuration.host + quote(path) + ("?" + urlencode(query) if query else "")
        # Also refreshes a token that is about to expire.
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        try:
            async with self._slots:
                response = await self._client.rest_client.request(
                    method, url, headers=headers, body=body, _request_timeout=REQUEST_TIMEOUT_S
                )
                data = await response.read()
        except ApiException as e:
            telemetry.API_REQUESTS.labels(verb, resource, str(e.status)).inc()
            raise _from_exception(e) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            telemetry.API_REQUESTS.labels(verb, resource, "none").inc()
            raise ApiError(0, f"{method} {path}: {': '.join(filter(None, (type(e).__name__, str(e))))}") from e
        telemetry.API_REQUESTS.labels(verb, resource, str(response.status)).inc()
        if not 200 <= response.status < 300:
            raise _from_body(response.status, data)
        try:
            document = json.loads(data) if data else {}
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise ApiError(0, f"{method} {path}: the answer is no object: is that an API server?")
        return document

    async def has_group(self, group: str) -> bool:
        """Whether the API server serves any version of this API group: discovery, which every account may read."""
        try:
            await self._request("discover", group, "GET", f"/apis/{group}")
        except ApiError as e:
            if e.status == 404:
                return False
            raise
        return True

    async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any] | None:
        """None when it does not exist."""
        k = KINDS[kind]
        try:
            return await self.call("get", k, "GET", k.path(namespace, name))
        except ApiError as e:
            if e.status == 404:
                return None
            raise

    async def list_all(self, kind: str, namespace: str | None, selector: str = "") -> list[dict[str, Any]]:
        """All items, in pages; `namespace` None: of every namespace."""
        k, token = KINDS[kind], ""
        items: list[dict[str, Any]] = []
        while True:
            query = {"limit": str(PAGE)} | ({"labelSelector": selector} if selector else {})
            query |= {"continue": token} if token else {}
            try:
                page = await self.call("list", k, "GET", k.path(namespace), query)
            except ApiError as e:
                if e.status == 410 and token:  # the list has changed too much meanwhile: from the beginning
                    items, token = [], ""
                    continue
                raise
            items += page.get("items") or []
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return items

    async def create(self, kind: str, namespace: str, body: dict[str, Any], dry_run: bool = False) -> dict[str, Any]:
        """Refused where a field is not known, which would else be dropped. `dry_run`: only ask whether it would be."""
        k = KINDS[kind]
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return await self.call("create", k, "POST", k.path(namespace), query, body)

    async def apply(self, kind: str, namespace: str, body: dict[str, Any], sub: str = "") -> dict[str, Any]:
        """Server-side apply; fields that others set meanwhile and that are ours are taken back."""
        k, name = KINDS[kind], body["metadata"]["name"]
        query = {"fieldManager": MANAGER, "force": "true"}
        return await self.call("patch", k, "PATCH", k.path(namespace, name, sub), query, body, APPLY, sub)

    async def replace(self, kind: str, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        """Update, refused when the object changed since it was read."""
        k = KINDS[kind]
        return await self.call("update", k, "PUT", k.path(namespace, body["metadata"]["name"]), None, body)

    async def merge(
        self, kind: str, namespace: str, name: str, body: dict[str, Any], manager: str = MANAGER
    ) -> dict[str, Any]:
        """JSON merge patch."""
        k = KINDS[kind]
        return await self.call("patch", k, "PATCH", k.path(namespace, name), {"fieldManager": manager}, body, MERGE)

    async def delete(self, kind: str, namespace: str, name: str, uid: str, grace_s: int | None = None) -> None:
        """Delete that very object; one that is gone, or is another by now, is fine."""
        k = KINDS[kind]
        body: dict[str, Any] = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            await self.call("delete", k, "DELETE", k.path(namespace, name), None, body)
        except ApiError as e:
            if e.status not in (404, 409):
                raise


def _from_exception(e: ApiException) -> ApiError:
    return _from_body(e.status or 0, e.body if isinstance(e.body, bytes | str) else b"", str(e.reason or ""))


def _from_body(status: int, data: bytes | str, otherwise: str = "") -> ApiError:
    try:
        document = json.loads(data)
    except ValueError:
        text = data.decode(errors="replace") if isinstance(data, bytes) else data
        return ApiError(status, text[:500] or otherwise)
    if not isinstance(document, dict):
        return ApiError(status, str(document)[:500])
    return ApiError(status, str(document.get("message") or otherwise), str(document.get("reason") or ""))
