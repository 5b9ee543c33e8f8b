"""What many objects, and a large one, cost the operator: time until all is Ready, writes, CPU, memory.

A real API server with etcd, and kwok in place of kubelets: it makes every pod Running and Ready as soon as it is bound.
The pods' engines are one process that answers `/ranks` for all of them, so the operator polls as it does in earnest.

    python benchmarks/operator_scale.py [--objects 200 --ranks 4] [--large 256] [--idle 60] [--out FILE]

Needs the programs that `make cluster` builds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from api_server import kubeconfig, kubectl, program  # noqa: E402

NODES = 4
DEADLINE_S = 900.0
WRITES = ("create", "update", "patch", "delete", "apply", "replace")
STAGES = """\
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: node-up}
spec:
  resourceRef: {apiGroup: v1, kind: Node}
  selector:
    matchExpressions:
      - {key: '.status.conditions.[] | select( .type == "Ready" ) | .status', operator: NotIn, values: ["True"]}
  next:
    statusTemplate: |
      allocatable: {cpu: "1000", memory: 1Ti, pods: "10000"}
      capacity: {cpu: "1000", memory: 1Ti, pods: "10000"}
      conditions:
        - {type: Ready, status: "True", reason: KubeletReady, lastTransitionTime: {{ Now | Quote }}}
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-up}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions:
      - {key: .metadata.deletionTimestamp, operator: DoesNotExist}
      - {key: .status.phase, operator: In, values: [Pending]}
  next:
    statusTemplate: |
      {{ $now := Now | Quote }}
      phase: Running
      podIP: 127.0.0.1
      podIPs: [{ip: 127.0.0.1}]
      startTime: {{ $now }}
      conditions:
        - {type: PodScheduled, status: "True", lastTransitionTime: {{ $now }}}
        - {type: Initialized, status: "True", lastTransitionTime: {{ $now }}}
        - {type: ContainersReady, status: "True", lastTransitionTime: {{ $now }}}
        - {type: Ready, status: "True", lastTransitionTime: {{ $now }}}
      containerStatuses:
        {{ range .spec.containers }}
        - name: {{ .name }}
          image: {{ .image }}
          imageID: ""
          ready: true
          restartCount: 0
          state: {running: {startedAt: {{ $now }}}}
        {{ end }}
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-gone}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions:
      - {key: .metadata.deletionTimestamp, operator: Exists}
  next: {delete: true}
"""


class Engines(BaseHTTPRequestHandler):
    """Every head: all ranks READY, empty queues."""

    ranks = 1
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        rank = {"state": "READY", "waiting": 0, "running": 0, "kv_usage": 0.0, "fields": {"wire_version": 1}}
        ranks = [{"rank": n, "fingerprint": "f" * 64, **rank} for n in range(self.ranks)]
        body = json.dumps({"ready": {"ok": True}, "ranks": ranks}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def engines(ranks: int) -> Iterator[int]:
    """The port on which heads of groups of this size answer."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Heads", (Engines,), {"ranks": ranks}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def process(command: list[str], log: Path) -> Iterator[psutil.Process]:
    with log.open("w") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "KUBECONFIG": str(kubeconfig())})
    try:
        yield psutil.Process(child.pid)
    finally:
        child.terminate()
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def object_of(name: str, ranks: int, port: int, node: str) -> dict[str, Any]:
    return {
        "apiVersion": "dpinference.dev/v1alpha1",
        "kind": "DataParallelInference",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "model": {"name": "m"},
            "engine": {"image": "engine:1", "device": "cpu", "ports": {"management": port, "http": 1024}},
            "parallelism": {"dataParallelSize": ranks},
            "template": {"spec": {"nodeName": node, "serviceAccountName": "default"}},
            "handshake": {"requireConfigHash": False},
        },
    }


class Operator:
    """The operator's process and what its own metrics say."""

    def __init__(self, process: psutil.Process, port: int) -> None:
        self.process, self.port, self.most_rss = process, port, 0.0

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def rss_mb(self) -> float:
        return self.process.memory_info().rss / 1e6

    def writes(self) -> int:
        """Calls of the API that write, but for the renewing of the lease."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        total = 0.0
        for line in text.splitlines():
            m = re.match(r"dpi_api_requests_total\{(.*)\} (\S+)$", line)
            if m is None:
                continue
            labels = dict(re.findall(r'(\w+)="([^"]*)"', m[1]))
            if labels["verb"].lower() in WRITES and "lease" not in labels["resource"].lower():
                total += float(m[2])
        return int(total)


def count(kind: str, selector: str = "") -> int:
    more = ["-l", selector] if selector else []
    return len(kubectl("get", kind, "-n", "default", *more, "--no-headers", "-o", "name").stdout.split())


def ready_objects() -> int:
    path = 'jsonpath={range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{"\\n"}{end}'
    return kubectl("get", "dpi", "-n", "default", "-o", path).stdout.split().count("True")


def run(operator: Operator, documents: list[dict[str, Any]], pods: int, idle_s: float) -> dict[str, Any]:
    """Create, wait, idle, delete; figures of each."""
    cpu, writes, began = operator.cpu_s(), operator.writes(), time.monotonic()
    kubectl("create", "-f", "-", document=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}))
    created_s = ready_s = 0.0
    while not ready_s:
        operator.most_rss = max(operator.most_rss, operator.rss_mb())
        if not created_s and count("pods", "app.kubernetes.io/managed-by=dpi-operator") >= pods:
            created_s = time.monotonic() - began
        if created_s and ready_objects() == len(documents):
            ready_s = time.monotonic() - began
        if time.monotonic() - began > DEADLINE_S:
            raise SystemExit(f"not all Ready after {DEADLINE_S:.0f} s: {ready_objects()} of {len(documents)}")
        time.sleep(0.5)
    row: dict[str, Any] = {"pods created s": round(created_s, 1), "Ready s": round(ready_s, 1)}
    row |= {"cpu s": round(operator.cpu_s() - cpu, 1), "writes": operator.writes() - writes}
    time.sleep(20)  # the last writes that follow from becoming ready
    cpu, writes = operator.cpu_s(), operator.writes()
    time.sleep(idle_s)
    operator.most_rss = max(operator.most_rss, operator.rss_mb())
    row |= {"idle writes": operator.writes() - writes, "idle cpu %": round(100 * (operator.cpu_s() - cpu) / idle_s, 1)}
    row["RSS MB"] = round(operator.most_rss)
    began = time.monotonic()
    kubectl("delete", "dpi", "--all", "-n", "default", "--wait=false")
    # No garbage collector runs here; what an object owned is removed by hand, untimed.
    for kind in ("pods", "services", "configmaps", "controllerrevisions", "networkpolicies", "serviceaccounts"):
        kubectl("delete", kind, "-n", "default", "-l", "app.kubernetes.io/managed-by=dpi-operator", "--wait=false")
    while count("pods") and time.monotonic() - began < 120:
        time.sleep(1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--objects", type=int, default=200, help="objects of the first case (200)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks, and pods, of each of them (4)")
    parser.add_argument("--large", type=int, default=256, help="ranks, and pods, of the one large object (256)")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds in which nothing may be written (60)")
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    args = parser.parse_args()
    for name in ("etcd", "kube-apiserver", "kubectl", "kwok"):
        if program(name) is None:
            raise SystemExit(f"no {name}: `make cluster` builds it")
    with tempfile.TemporaryDirectory(prefix="dpi-scale-") as folder, contextlib.ExitStack() as stack:
        home = Path(folder)
        crd = subprocess.run([sys.executable, "-m", "dpi_operator", "crd"], capture_output=True, text=True, check=True)
        kubectl("apply", "--server-side", "-f", "-", document=crd.stdout)
        kubectl("wait", "--for=condition=Established", "crd/dataparallelinferences.dpinference.dev", "--timeout=30s")
        kubectl("create", "serviceaccount", "default", "-n", "default", check=False)
        stages = home / "stages.yaml"
        stages.write_text(STAGES)
        nodes = [
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"fake-{n}"}, "spec": {}} for n in range(NODES)
        ]
        kubectl("apply", "-f", "-", document=yaml.safe_dump_all(nodes))
        kwok = [str(program("kwok")), "--kubeconfig", str(kubeconfig()), "--manage-all-nodes", "--config", str(stages)]
        stack.enter_context(process(kwok, home / "kwok.log"))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "dpi_operator", "run", "--metrics-port", str(port)]
        operator = Operator(stack.enter_context(process(command, home / "operator.log")), port)
        deadline = time.monotonic() + 60
        while True:
            try:
                operator.writes()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise SystemExit(f"the operator does not answer: {(home / 'operator.log').read_text()}") from None
                time.sleep(0.5)
        rows = {}
        for label, objects, ranks in (
            (f"{args.objects} objects of {args.ranks} ranks", args.objects, args.ranks),
            (f"1 object of {args.large} ranks", 1, args.large),
        ):
            print(f"{label}: ...", file=sys.stderr, flush=True)
            with engines(ranks) as heads:
                documents = [object_of(f"o{n}", ranks, heads, f"fake-{n % NODES}") for n in range(objects)]
                rows[label] = run(operator, documents, objects * ranks, args.idle)
        columns = list(next(iter(rows.values())))
        print(f"| {'':26} | " + " | ".join(columns) + " |")
        print("|---|" + "---|" * len(columns))
        for label, row in rows.items():
            print(f"| {label:26} | " + " | ".join(str(row[c]) for c in columns) + " |")
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
