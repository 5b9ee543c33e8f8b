"""How evenly requests are spread: our router beside vLLM's rule, on the same trace, without sockets or clocks.

Requests arrive at random and last for different times; each rank runs `--slots` of them and queues the others. Every
front end places its own requests by its own router, and all learn the ranks' numbers as the coordinator publishes them,
every 0.1 s. Printed are the number of requests in flight on the fullest rank over that on an average one, and how long
requests waited for a slot. vLLM's rule is the formula of `router_pick.py`. The same seed gives the same figures.

    python benchmarks/router_spread.py [--ranks 64 256 1024] [--front-ends 1 4] [--load 0.5 0.9]
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from router_pick import Bucketed, Placer, Scan

PUBLISH_S = 0.1
MEAN_S = 2.0
"""Mean time that a request computes."""


@dataclass
class Rank:
    """The sleeping engine: `running` requests compute, the others wait their turn."""

    running: int = 0
    waiting: deque[int] = field(default_factory=deque)


@dataclass
class Spread:
    ratio: float
    mean_wait_s: float
    worst_wait_s: float


Trace = list[tuple[float, float]]
"""(arrival, seconds of computing) of each request."""


def trace(ranks: int, slots: int, load: float, seconds: float, seed: int) -> Trace:
    """Poisson arrivals that keep `load` of all slots busy, lengths exponential with a floor."""
    rng = random.Random(seed)
    now, made = 0.0, []
    while now < seconds:
        now += rng.expovariate(ranks * slots * load / MEAN_S)
        made.append((now, 0.1 + rng.expovariate(1 / (MEAN_S - 0.1))))
    return made


def replay(requests: Trace, ranks: int, slots: int, placers: list[Placer]) -> Spread:
    """Every front end places each `len(placers)`-th request."""
    engines = [Rank() for _ in range(ranks)]
    events: list[tuple[float, int, int]] = []  # (time, request, rank): ends of computing
    waits, ratios = [0.0] * len(requests), []
    publication, seq, warm = PUBLISH_S, 0, requests[-1][0] / 3

    def begin(now: float, request: int, rank: int) -> None:
        engines[rank].running += 1
        waits[request] = now - requests[request][0]
        placers[request % len(placers)].first_token(str(request))
        heapq.heappush(events, (now + requests[request][1], request, rank))

    def end(now: float, request: int, rank: int) -> None:
        placers[request % len(placers)].finish(str(request))
        engine = engines[rank]
        engine.running -= 1
        if engine.waiting:
            begin(now, engine.waiting.popleft(), rank)

    def publish(now: float) -> None:
        nonlocal seq
        seq += 1
        for rank, engine in enumerate(engines):
            usage = min(1.0, (engine.running + len(engine.waiting)) / (2 * slots))
            for placer in placers:
                placer.report(rank, seq, len(engine.waiting), engine.running, usage)
        if now > warm:
            loads = [engine.running + len(engine.waiting) for engine in engines]
            ratios.append(max(loads) * ranks / max(1, sum(loads)))

    for number, (arrival, _) in enumerate(requests):
        while True:
            due = min(publication, events[0][0] if events else arrival)
            if due >= arrival:
                break
            if due == publication:
                publish(due)
                publication += PUBLISH_S
            else:
                now, request, rank = heapq.heappop(events)
                end(now, request, rank)
        rank = placers[number % len(placers)].pick(str(number))
        if engines[rank].running < slots:
            begin(arrival, number, rank)
        else:
            engines[rank].waiting.append(number)
    late = [wait for (arrival, _), wait in zip(requests, waits, strict=True) if arrival > warm]
    return Spread(sum(ratios) / len(ratios), sum(late) / len(late), max(late))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--front-ends", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--load", type=float, nargs="+", default=[0.5, 0.9])
    parser.add_argument("--slots", type=int, default=8, help="requests that a rank computes at once")
    parser.add_argument("--seconds", type=float, default=12.0, help="length of the trace")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(f"{'':32}{'max / mean in flight':>22}  {'mean wait, ms':>18}  {'longest wait, s':>18}")
    print(f"{'ranks':>6} {'front ends':>11} {'load':>5} {'':7}" + 3 * f"{'router':>11}{'vLLM rule':>10}")
    for ranks in args.ranks:
        for clients in args.front_ends:
            for load in args.load:
                requests = trace(ranks, args.slots, load, args.seconds, args.seed)
                ours = _replay(requests, ranks, args.slots, clients, lambda n, c, i: Bucketed(n, clients=c, index=i))
                theirs = _replay(requests, ranks, args.slots, clients, Scan)
                print(
                    f"{ranks:>6} {clients:>11} {load:>5.2f} {'':7}"
                    f"{ours.ratio:>11.3f}{theirs.ratio:>10.3f}"
                    f"{1000 * ours.mean_wait_s:>11.2f}{1000 * theirs.mean_wait_s:>10.2f}"
                    f"{ours.worst_wait_s:>11.2f}{theirs.worst_wait_s:>10.2f}"
                )


def _replay(requests: Trace, ranks: int, slots: int, clients: int, make: Callable[[int, int, int], Placer]) -> Spread:
    return replay(requests, ranks, slots, [make(ranks, clients, index) for index in range(clients)])


if __name__ == "__main__":
    main()
