"""A small Kubernetes API over HTTP for faults that a real one cannot be made to show: cut watches, slow and failing
answers. It holds plain documents, knows label selectors, server-side apply by whole fields, uid preconditions,
resource versions, owner references and watches; it validates nothing."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from dpi_operator.apply.kinds import KINDS, OPTIONAL_KINDS

Key = tuple[str, str, str]  # plural, namespace, name
PATH = re.compile(
    r"^/(?:api/v1|apis/(?P<group>[^/]+)/(?P<version>[^/]+))(?:/namespaces/(?P<ns>[^/]+))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?$"
)
BY_PLURAL = {k.plural: k for k in KINDS.values()}


def merge(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        out = {**old, **{k: merge(old.get(k), v) for k, v in new.items()}}
        return {k: v for k, v in out.items() if v is not None}
    return copy.deepcopy(new)


def by_type(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    merged = {c["type"]: c for c in old} | {c["type"]: c for c in new}
    return list(merged.values())


@dataclass
class ApiModel:
    objects: dict[Key, dict[str, Any]] = field(default_factory=dict)
    version: int = 100
    calls: list[tuple[str, str]] = field(default_factory=list)  # method and path of everything but watches
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)  # "METHOD plural" -> answer
    installed: set[str] = field(default_factory=set)  # optional kinds whose CRD is there
    groups: set[str] = field(default_factory=set)  # API groups that are there besides
    gone: set[str] = field(default_factory=set)  # kinds that are always there but for a CRD that was deleted
    refuse_watch: dict[str, tuple[int, str]] = field(default_factory=dict)  # plural -> answer to a watch
    refused: int = 0  # watches that were
    away: bool = False
    delay: float = 0.0
    watchers: list[tuple[str, str | None, str, asyncio.Queue[Any]]] = field(default_factory=list)
    sends: set[web.StreamResponse] = field(default_factory=set)
    port: int = 0
    _runner: web.AppRunner | None = None

    def use(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let KUBECONFIG lead here for the rest of a test."""
        config = tmp_path / "kubeconfig"
        config.write_text(yaml.safe_dump(self.kubeconfig()))
        monkeypatch.setenv("KUBECONFIG", str(config))

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def stop(self) -> None:
        self.cut_watches()
        assert self._runner is not None
        await self._runner.cleanup()

    def kubeconfig(self) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "x",
            "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
            "clusters": [{"name": "x", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "x", "user": {"token": "t"}}],
        }

    # -- for tests -----------------------------------------------------------------------------------------------------

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [o for k, o in sorted(self.objects.items()) if k[0] == KINDS[kind].plural]

    def get(self, kind: str, name: str, namespace: str = "ns") -> dict[str, Any] | None:
        return self.objects.get((KINDS[kind].plural, namespace, name))

    def put(self, document: dict[str, Any]) -> dict[str, Any]:
        """As another client would create or change it."""
        kind = KINDS[document["kind"]]
        key = (kind.plural, document["metadata"]["namespace"], document["metadata"]["name"])
        live = self.objects.get(key)
        if live is None:
            return self._store(key, copy.deepcopy(document), "ADDED")
        if live.get("spec") != document.get("spec"):
            document = {**document, "metadata": {**document["metadata"]}}
            document["metadata"]["generation"] = live["metadata"].get("generation", 1) + 1
        return self._store(key, merge(live, document) | {"spec": copy.deepcopy(document.get("spec"))}, "MODIFIED")

    def set_status(self, kind: str, name: str, status: dict[str, Any], namespace: str = "ns") -> None:
        key = (KINDS[kind].plural, namespace, name)
        live = copy.deepcopy(self.objects[key])
        live["status"] = merge(live.get("status") or {}, status)
        self._store(key, live, "MODIFIED")

    def remove(self, kind: str, name: str, namespace: str = "ns") -> None:
        """Delete an object and, as the garbage collector would, what it owns."""
        key = (KINDS[kind].plural, namespace, name)
        gone = self.objects.pop(key)
        self._tell(key, "DELETED", gone)
        for other, document in list(self.objects.items()):
            owners = document["metadata"].get("ownerReferences") or ()
            if any(o["uid"] == gone["metadata"]["uid"] for o in owners):
                self.objects.pop(other)
                self._tell(other, "DELETED", document)

    def cut_watches(self) -> None:
        for _, _, _, queue in self.watchers:
            queue.put_nowait(None)

    def writes(self) -> list[tuple[str, str]]:
        return [c for c in self.calls if c[0] != "GET" and "/leases" not in c[1]]

    # -- the server ----------------------------------------------------------------------------------------------------

    def _store(self, key: Key, document: dict[str, Any], what: str) -> dict[str, Any]:
        self.version += 1
        metadata = document["metadata"]
        metadata.setdefault("uid", f"uid-{self.version}")
        metadata.setdefault("generation", 1)
        metadata.setdefault("creationTimestamp", "2026-11-29T00:00:00Z")
        metadata["resourceVersion"] = str(self.version)
        document.setdefault("kind", BY_PLURAL[key[0]].name)
        document.setdefault("apiVersion", BY_PLURAL[key[0]].api_version)
        self.objects[key] = document
        self._tell(key, what, document)
        return document

    def _tell(self, key: Key, what: str, document: dict[str, Any]) -> None:
        for plural, namespace, selector, queue in self.watchers:
            if plural == key[0] and namespace in (None, key[1]) and self._selected(document, selector):
                queue.put_nowait({"type": what, "object": copy.deepcopy(document)})

    @staticmethod
    def _selected(document: dict[str, Any], selector: str) -> bool:
        labels = document["metadata"].get("labels") or {}
        return all(labels.get(k) == v for k, _, v in (p.partition("=") for p in selector.split(",") if p))

    def _error(self, status: int, message: str) -> web.Response:
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": status}
        return web.json_response(body, status=status)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self.away:
            assert request.transport is not None
            request.transport.abort()
            raise web.HTTPServiceUnavailable
        if self.delay:
            await asyncio.sleep(self.delay)
        if found := self._discovery(request.path):
            return web.json_response(found)
        m = PATH.match(request.path)
        if m is None:
            return self._error(404, f"no such path {request.path}")
        plural, namespace, name, sub = m["plural"], m["ns"], m["name"], m["sub"]
        missing = {*self.gone, *(k for k in OPTIONAL_KINDS if k not in self.installed)}
        absent = {(KINDS[k].group, KINDS[k].plural) for k in missing}
        if (m["group"] or "", plural) in absent:
            self.calls.append((request.method, request.path))
            return self._error(404, "the server could not find the requested resource")
        if request.query.get("watch"):
            if refusal := self.refuse_watch.get(plural):
                self.refused += 1
                return self._error(*refusal)
            return await self._watch(request, plural, namespace)
        self.calls.append((request.method, request.path))
        if refusal := self.refuse.get(f"{request.method} {plural}"):
            return self._error(*refusal)
        body = json.loads(await request.read() or b"null")
        if name is None and request.method == "GET":
            selector = request.query.get("labelSelector", "")
            items = [
                o
                for k, o in sorted(self.objects.items())
                if k[0] == plural and namespace in (None, k[1]) and self._selected(o, selector)
            ]
            version = {"resourceVersion": str(self.version)}
            return web.json_response({"kind": "List", "apiVersion": "v1", "metadata": version, "items": items})
        if name is None:
            return self._create(plural, namespace or "", body, dry_run="dryRun" in request.query)
        return self._one(request, (plural, namespace or "", name), sub, body)

    def _create(self, plural: str, namespace: str, body: dict[str, Any], dry_run: bool) -> web.Response:
        metadata = body["metadata"]
        if "name" not in metadata:
            metadata["name"] = f"{metadata['generateName']}{self.version}"
        key = (plural, namespace, metadata["name"])
        if key in self.objects:
            return self._error(409, f"{metadata['name']} already exists")
        if dry_run:
            return web.json_response(body, status=201)
        return web.json_response(self._store(key, body, "ADDED"), status=201)

    def _one(self, request: web.Request, key: Key, sub: str | None, body: Any) -> web.Response:
        live = self.objects.get(key)
        kind = request.headers.get("Content-Type", "")
        if live is None and not (request.method == "PATCH" and "apply" in kind and not sub):
            return self._error(404, f"{key[0]} {key[2]} not found")
        if request.method == "GET":
            return web.json_response(live)
        if request.method == "DELETE":
            assert live is not None
            if (wanted := (body or {}).get("preconditions", {}).get("uid")) not in (None, live["metadata"]["uid"]):
                return self._error(409, f"uid is not {wanted}")
            self.remove(BY_PLURAL[key[0]].name, key[2], key[1])
            return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})
        if request.method == "PUT":
            assert live is not None
            if body["metadata"].get("resourceVersion") != live["metadata"]["resourceVersion"]:
                return self._error(409, "the object has been modified")
            return web.json_response(self._store(key, body, "MODIFIED"))
        if live is None:
            return web.json_response(self._store(key, body, "ADDED"), status=201)
        if sub == "status":
            document = copy.deepcopy(live)
            if key[0] == "pods":
                status = document.setdefault("status", {})
                status["conditions"] = by_type(status.get("conditions") or [], body["status"]["conditions"])
            else:
                document["status"] = body["status"]
        else:
            document = merge(live, {k: v for k, v in body.items() if k != "status"})
        same = {k: v for k, v in document.items() if k != "metadata"} == {
            k: v for k, v in live.items() if k != "metadata"
        } and merge(live["metadata"], document["metadata"]) == live["metadata"]
        return web.json_response(live if same else self._store(key, document, "MODIFIED"))

    async def _watch(self, request: web.Request, plural: str, namespace: str | None) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        queue: asyncio.Queue[Any] = asyncio.Queue()
        entry = (plural, namespace, request.query.get("labelSelector", ""), queue)
        since = int(request.query.get("resourceVersion") or 0)
        for key, document in sorted(self.objects.items()):
            if (
                key[0] == plural
                and namespace in (None, key[1])
                and self._selected(document, entry[2])
                and int(document["metadata"]["resourceVersion"]) > since
            ):
                queue.put_nowait({"type": "MODIFIED", "object": document})
        self.watchers.append(entry)
        try:
            while (event := await queue.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
            await response.write_eof()
        finally:
            self.watchers.remove(entry)
        return response

    def _discovery(self, path: str) -> dict[str, Any] | None:
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        kinds = [k for k in KINDS.values() if (not k.switch or k.name in self.installed) and k.name not in self.gone]
        groups = {(k.group, k.version) for k in kinds if k.group} | {("apiextensions.k8s.io", "v1")}
        if path.count("/") == 2 and path.removeprefix("/apis/") in self.groups:
            return {"kind": "APIGroup", "apiVersion": "v1", "name": path.removeprefix("/apis/"), "versions": []}
        if path == "/apis":
            listed = [
                {
                    "name": g,
                    "versions": [{"groupVersion": f"{g}/{v}", "version": v}],
                    "preferredVersion": {"groupVersion": f"{g}/{v}", "version": v},
                }
                for g, v in sorted(groups)
            ]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        for group, version in [*groups, ("", "v1")]:
            if path == (f"/apis/{group}/{version}" if group else "/api/v1"):
                verbs = ["get", "list", "watch", "create", "patch", "delete"]
                found = [
                    {
                        "name": k.plural,
                        "singularName": k.name.lower(),
                        "namespaced": True,
                        "kind": k.name,
                        "verbs": verbs,
                    }
                    for k in kinds
                    if (k.group, k.version) == (group, version)
                ]
                extra = ["namespaces", "events"] if not group else []
                extra += ["customresourcedefinitions"] if group == "apiextensions.k8s.io" else []
                known = {f["name"] for f in found}
                found += [
                    {"name": n, "singularName": n[:-1], "namespaced": False, "kind": n.title(), "verbs": verbs}
                    for n in extra
                    if n not in known
                ]
                listed = f"{group}/{version}" if group else "v1"
                return {"kind": "APIResourceList", "groupVersion": listed, "resources": found}
        return None
