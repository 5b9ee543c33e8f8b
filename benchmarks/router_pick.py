"""Microseconds per placement, by number of ranks: our router beside vLLM's.

All place the same requests under the same load: 4 in flight per rank, each end frees a place, an engine report now and
then. `router` is a placement alone, `whole life` with first token, end and reports, `+ session` with a key. `scan` is
the formula that vLLM 0.32 evaluates for every rank and request, written again here:
max(clients * own, waiting + running) + 6 * waiting * max(0, kv - 0.5). `vLLM` is its own method, run in the same minute
where `benchmarks/peer/setup.sh` has installed it. Figures are processor time.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import Protocol

from suite.servers import PEER

from dpi_engine.frontend.router import Router
from dpi_engine.wire.messages import RankState


class Placer(Protocol):
    def pick(self, request_id: str) -> int: ...

    def first_token(self, request_id: str) -> None: ...

    def finish(self, request_id: str) -> None: ...

    def report(self, rank: int, seq: int, waiting: int, running: int, kv_usage: float) -> None: ...


class Bucketed:
    def __init__(self, ranks: int, sessions: bool = False, clients: int = 1, index: int = 0) -> None:
        self._router = Router(ranks, client_count=clients, client_index=index)
        self._sessions = sessions
        for rank in range(ranks):
            self._router.set_state(rank, RankState.READY, 1)

    def pick(self, request_id: str) -> int:
        keys = (request_id[-2:],) if self._sessions else ()
        return self._router.pick(request_id, 128, affinity=keys).rank

    def first_token(self, request_id: str) -> None:
        self._router.prefilled(request_id)

    def finish(self, request_id: str) -> None:
        self._router.finish(request_id)

    def report(self, rank: int, seq: int, waiting: int, running: int, kv_usage: float) -> None:
        self._router.report(rank, 1, seq, waiting, running, kv_usage)


class Scan:
    """vLLM's rule. `clients` front ends, this one `index`; `report` is of what the coordinator published last."""

    def __init__(self, ranks: int, clients: int = 1, index: int = 0) -> None:
        self._clients = clients
        self._own = [0] * ranks
        self._load = [[0, 0, 0.0] for _ in range(ranks)]
        self._rank_of: dict[str, int] = {}
        self._start = ranks * index // clients

    def pick(self, request_id: str) -> int:
        count = len(self._own)
        best, best_score = 0, float("inf")
        for i in range(count):
            rank = (self._start + i) % count
            waiting, running, kv_usage = self._load[rank]
            score = max(self._clients * self._own[rank], waiting + running) + waiting * 6 * max(0.0, kv_usage - 0.5)
            if score < best_score:
                best, best_score = rank, score
        self._load[best][0] += self._clients
        self._own[best] += 1
        self._start = (self._start + 1) % count
        self._rank_of[request_id] = best
        return best

    def first_token(self, request_id: str) -> None:
        """The rule does not know prompts."""

    def finish(self, request_id: str) -> None:
        self._own[self._rank_of.pop(request_id)] -= 1

    def report(self, rank: int, seq: int, waiting: int, running: int, kv_usage: float) -> None:
        self._load[rank] = [waiting, running, kv_usage]


def measure_pick(placer: Placer, ranks: int, picks: int) -> float:
    """Microseconds per pick alone; ends of requests are not timed."""
    batch, spent = 256, 0.0
    for i in range(4 * ranks):
        placer.pick(f"w{i}")
        placer.first_token(f"w{i}")
    for turn in range(-(-picks // batch)):
        ids = [f"r{turn}-{i}" for i in range(batch)]
        start = time.thread_time()
        for request_id in ids:
            placer.pick(request_id)
        spent += time.thread_time() - start
        for request_id in ids:
            placer.first_token(request_id)
            placer.finish(request_id)
    return spent / (-(-picks // batch) * batch) * 1e6


def measure(placer: Placer, ranks: int, picks: int, reports: bool) -> float:
    """Microseconds per pick (with the end of an older request, and a report every 8th time if asked for)."""
    rng = random.Random(1)
    live: deque[str] = deque()
    for i in range(4 * ranks):
        live.append(f"w{i}")
        placer.pick(live[-1])
    ids = [f"r{i}" for i in range(picks)]
    loads = [(rng.randrange(ranks), rng.randrange(3), rng.randrange(2, 6), rng.random()) for _ in range(picks)]
    start = time.thread_time()
    for i, request_id in enumerate(ids):
        placer.pick(request_id)
        placer.first_token(request_id)
        live.append(request_id)
        placer.finish(live.popleft())
        if reports and i % 8 == 0:
            rank, waiting, running, kv_usage = loads[i]
            placer.report(rank, i, waiting, running, kv_usage)
    return (time.thread_time() - start) / picks * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 64, 1024, 4096])
    parser.add_argument("--picks", type=int, default=20000)
    args = parser.parse_args()
    peer = peer_times(args.ranks)
    print(f"{'ranks':>6}  {'us/pick: router':>16}  {'whole life':>10}  {'+ session':>10}  {'scan':>9}  {'vLLM':>9}")
    for ranks in args.ranks:
        plain = measure_pick(Bucketed(ranks), ranks, args.picks)
        reported = measure(Bucketed(ranks), ranks, args.picks, reports=True)
        sessions = measure(Bucketed(ranks, sessions=True), ranks, args.picks, reports=True)
        warm = max(20, min(args.picks, 400_000 // ranks))
        scan = Scan(ranks)
        # Filling the table costs the scan 4 * ranks picks before the measured ones.
        scanned = measure(scan, ranks, warm, reports=True) if ranks <= 256 else _scan_only(scan, warm)
        theirs = f"{peer[ranks]:>9.2f}" if peer else f"{'-':>9}"
        print(f"{ranks:>6}  {plain:>16.2f}  {reported:>10.2f}  {sessions:>10.2f}  {scanned:>9.2f}  {theirs}")
    if not peer:
        print("vLLM is not installed (benchmarks/peer/setup.sh); its formula alone is compared")


def peer_times(ranks: list[int]) -> dict[int, float]:
    """Microseconds per pick of vLLM's own method, by number of ranks; empty where it is not installed."""
    python = PEER / "venv" / "bin" / "python"
    if not python.exists():
        return {}
    command = [str(python), str(Path(__file__).with_name("peer_router.py")), *map(str, ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"vLLM's router could not be measured:\n{done.stderr[-2000:]}")
    return {int(n): float(us) for n, us in json.loads(done.stdout.splitlines()[-1]).items()}


def _scan_only(scan: Scan, picks: int) -> float:
    start = time.thread_time()
    for i in range(picks):
        scan.pick(f"r{i}")
    return (time.thread_time() - start) / picks * 1e6


if __name__ == "__main__":
    main()
