"""Handshake and steady state of a large group on this machine: real head, coordinator, front ends; emulated ranks.

The head is `HeadHandshake` with its leases, the coordinator the process that a service has, a front end
`ZmqEngineClient` with its router, each in a process of its own, over TCP. The ranks are `emulated_ranks.py`: real
sockets and messages, compute replaced by sleep, many to a process. All ranks say HELLO at one time; when all are ready,
front ends keep `--in-flight` requests per rank going, and the processes' CPU time is taken.

    python benchmarks/routing_scale.py [--ranks 1024] [--front-ends 2] [--seconds 15]

CPU figures are percent of one core. Times are read off one clock (CLOCK_MONOTONIC) that all processes share.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import zmq

from dpi_engine.frontend.client import ZmqEngineClient
from dpi_engine.frontend.interface import GenerationRequest
from dpi_engine.wire.codec import encode
from dpi_engine.wire.coordination import RankLease, RankTable
from dpi_engine.wire.head import HeadAddresses, HeadHandshake
from dpi_engine.wire.lease import Group, LeaseTimings
from dpi_engine.wire.messages import RankInfo, RankState, SamplingParams
from dpi_engine.wire.sockets import make_context, make_socket

HERE = Path(__file__).resolve()
ANY = "tcp://127.0.0.1:*"
TIMEOUT_S = 60.0


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


async def told() -> dict[str, Any]:
    """The next line that the parent writes; ends the process where the parent is gone."""
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    if not line:
        raise SystemExit(0)
    return dict(json.loads(line))


# ------------------------------------------------------------------------------------------------ the head


async def run_head(args: argparse.Namespace) -> None:
    where = await told()
    context = make_context(8)
    push = make_socket(context, zmq.PUSH, connect=where["pull"])
    tables = 0

    def publish(infos: list[RankInfo]) -> None:
        nonlocal tables
        tables += 1
        leases = [RankLease(i.rank, i.state.value, i.epoch, bytes.fromhex(i.boot_id)) for i in infos]
        push.send(encode(RankTable(1, tables, leases)), zmq.NOBLOCK)

    head = HeadHandshake(
        [ANY],
        Group(args.ranks, frozenset()),
        HeadAddresses(
            inputs=where["inputs"],
            outputs=where["outputs"],
            coordinator_input=where["back"],
            coordinator_output=where["pull"],
            stats_publish=where["front"],
        ),
        timings=LeaseTimings().scaled(args.lease_scale),
        on_change=publish,
    )
    await head.start()
    say(event="listening", endpoint=head.endpoints[0])
    await head.wait_ready(TIMEOUT_S)
    say(event="ready", at=time.monotonic(), tables=tables)
    await told()
    left = [f"rank {r.rank}: {r.stage}" for r in head.ranks() if r.state is not RankState.READY or r.epoch != 1]
    print("\n".join(left[:20]), file=sys.stderr)
    say(event="over", errors=head.counters.total(), not_ready=len(left))
    await head.close()
    push.close(0)
    context.term()


# ------------------------------------------------------------------------------------------------ a front end


async def run_front_end(args: argparse.Namespace) -> None:
    where = await told()
    client = ZmqEngineClient(
        [ANY],
        [ANY],
        num_ranks=args.ranks,
        client_index=args.index,
        client_count=args.front_ends,
        coordinator=where["front"],
    )
    await client.start()
    say(event="listening", input=client.input_endpoints[0], output=client.output_endpoints[0])
    await client.wait_ready(TIMEOUT_S, args.ranks)
    say(event="ready", at=time.monotonic())
    await told()
    rng = random.Random(args.index)
    streams = args.ranks * args.in_flight // args.front_ends
    done, failed, firsts = 0, 0, []
    stop = asyncio.Event()

    async def stream(number: int) -> None:
        nonlocal done, failed
        turn = 0
        await asyncio.sleep(rng.random() * args.ramp)
        while not stop.is_set():
            turn += 1
            length = max(1, min(200, int(rng.expovariate(1 / args.mean_tokens))))
            request = GenerationRequest(
                request_id=f"{args.index}-{number}-{turn}",
                prompt_token_ids=list(range(rng.randrange(8, 64))),
                sampling=SamplingParams(max_tokens=length, temperature=0.0),
            )
            sent, seen = time.monotonic(), 0
            try:
                async for delta in client.generate(request):
                    if not seen and len(firsts) < 200_000:
                        firsts.append(time.monotonic() - sent)
                    seen += len(delta.new_token_ids)
            except Exception as error:
                failed += 1
                print(f"request failed: {error}", file=sys.stderr)
                await asyncio.sleep(1.0)
                continue
            done += seen == length
            failed += seen != length

    tasks = [asyncio.create_task(stream(i)) for i in range(streams)]
    await told()
    begin = (time.monotonic(), done)
    say(event="measuring")
    await told()
    seconds, count = time.monotonic() - begin[0], done - begin[1]
    updates = client._feed.updates if client._feed is not None else 0
    say(event="over", rate=count / seconds, failed=failed, updates=updates, errors=client.counters.total())
    stop.set()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.close()


# ------------------------------------------------------------------------------------------------ the parent


class Part:
    """A child process that reads orders and writes events, one JSON document a line."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, bufsize=1
        )
        self._path = log

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def hear(self, event: str) -> dict[str, Any]:
        """The next event, which must be this one. Raises RuntimeError with the end of the log."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line or json.loads(line)["event"] != event:
            tail = self._path.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self.name}: expected {event!r}, got {line!r}; its log ends with:\n{tail}")
        return dict(json.loads(line))

    def cpu(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self._log.close()


def coordinator(ranks: int, log: Path) -> tuple[subprocess.Popen[bytes], list[str]]:
    """The coordinator's own process and its endpoints: front, back, pull."""
    command = [sys.executable, "-m", "dpi_engine.coordinator", "--size", str(ranks)]
    command += ["--front", ANY, "--back", ANY, "--pull", ANY]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stderr=out)
    end = time.monotonic() + 30
    while not (found := re.search(r"ranks on (\S+), (\S+), (\S+)\n", log.read_text())):
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the coordinator did not start:\n{log.read_text()}")
        time.sleep(0.05)
    return process, list(found.groups())


def run(args: argparse.Namespace, folder: Path) -> None:
    parts: list[Part] = []
    me = [sys.executable, str(HERE)]
    shared = ["--ranks", str(args.ranks), "--front-ends", str(args.front_ends), "--in-flight", str(args.in_flight)]
    shared += ["--lease-scale", str(args.lease_scale), "--ramp", str(args.step), "--mean-tokens", str(args.mean_tokens)]

    def part(name: str, command: list[str]) -> Part:
        parts.append(Part(name, command, folder / f"{name}.log"))
        return parts[-1]

    relay, (front, back, pull) = coordinator(args.ranks, folder / "coordinator.log")
    try:
        fronts = [
            part(f"front-{i}", [*me, "--role", "front-end", "--index", str(i), *shared]) for i in range(args.front_ends)
        ]
        for each in fronts:
            each.tell(front=front)
        at = [each.hear("listening") for each in fronts]
        head = part("head", [*me, "--role", "head", *shared])
        head.tell(front=front, back=back, pull=pull, inputs=[a["input"] for a in at], outputs=[a["output"] for a in at])
        endpoint = head.hear("listening")["endpoint"]
        fleets = []
        for i in range(args.processes):
            first, last = args.ranks * i // args.processes, args.ranks * (i + 1) // args.processes
            command = [sys.executable, str(HERE.with_name("emulated_ranks.py")), "--head", endpoint]
            command += ["--first", str(first), "--count", str(last - first), "--size", str(args.ranks)]
            command += ["--front-ends", str(args.front_ends), "--step", str(args.step), "--timeout", str(TIMEOUT_S)]
            command += ["--beat", str(LeaseTimings().beat * args.lease_scale)]
            fleets.append(part(f"ranks-{first}", command))
        for fleet in fleets:
            fleet.hear("opened")
        before = head.cpu()
        begin = time.monotonic()
        for fleet in fleets:
            fleet.tell()
        joined = [fleet.hear("joined") for fleet in fleets]
        last_hello = max(j["last_hello"] for j in joined)
        ready = head.hear("ready")
        routed = [each.hear("ready")["at"] for each in fronts]
        handshake = {
            "first to last HELLO, s": last_hello - begin,
            "last HELLO to READY at the head, s": ready["at"] - last_hello,
            "last HELLO to ready at every front end, s": max(routed) - last_hello,
            "tables published": ready["tables"],
            "CPU of the head, s": head.cpu() - before,
        }
        show(f"handshake of {args.ranks} ranks in {args.processes} processes", handshake)

        idle = usage({"head": head, "coordinator": relay, **{f.name: f for f in fronts}}, args.seconds / 3)
        for each in fronts:
            each.tell()
        time.sleep(args.step * 20)
        for each in fronts:
            each.tell()
        for each in fronts:
            each.hear("measuring")
        start = time.monotonic()
        busy = usage(
            {"head": head, "coordinator": relay, **{f.name: f for f in fronts}, **{f.name: f for f in fleets}},
            args.seconds,
        )
        stop = time.monotonic()
        for each in fronts:
            each.tell()
        over = [each.hear("over") for each in fronts]
        for fleet in fleets:
            fleet.tell()
        counted = [fleet.hear("over") for fleet in fleets]
        head.tell()
        end = head.hear("over")
        turns = [
            str(t) for t in range(int(start * 10) + 1, int(stop * 10)) if all(str(t) in c["samples"] for c in counted)
        ]
        spreads = []
        for turn in turns:
            here = [c["samples"][turn] for c in counted]
            spreads.append(max(most for most, _ in here) / max(1e-9, sum(total for _, total in here) / args.ranks))
        mean = (
            sum(total for turn in turns for total in (c["samples"][turn][1] for c in counted))
            / max(1, len(turns))
            / args.ranks
        )
        reports = sum(c["reports"][turns[-1]] - c["reports"][turns[0]] for c in counted) / (len(turns) - 1) * 10
        show(
            f"steady state, {args.seconds:g} s, a step sleeps {args.step:g} s",
            {
                "requests per second": sum(o["rate"] for o in over),
                "requests failed": sum(o["failed"] for o in over),
                "in flight per rank, mean": mean,
                "in flight, max / mean (mean of samples)": sum(spreads) / len(spreads),
                "load reports per second": reports,
                "load report, mean bytes": sum(c["mean_report"] for c in counted) / len(counted),
                "load report, longest": max(c["longest_report"] for c in counted),
                "ranks that lost their lease": end["not_ready"],
                "messages refused": end["errors"] + sum(x["errors"] for x in (*over, *counted)),
            },
        )
        rows = {f"{name}, idle": share for name, share in idle.items()} | {
            f"{name}, busy": s for name, s in busy.items()
        }
        show("CPU, percent of one core", {name: 100 * share for name, share in rows.items()})
    finally:
        for each in parts:
            each.end()
        relay.terminate()
        relay.wait(10)


def usage(processes: dict[str, Any], seconds: float) -> dict[str, float]:
    """CPU seconds per second of each process over the next `seconds`."""

    def now() -> dict[str, float]:
        taken = {}
        for name, each in processes.items():
            times = psutil.Process((each.process if isinstance(each, Part) else each).pid).cpu_times()
            taken[name] = times.user + times.system
        return taken

    begin, before = time.monotonic(), now()
    time.sleep(seconds)
    after, took = now(), time.monotonic() - begin
    return {name: (after[name] - before[name]) / took for name in processes}


def show(title: str, rows: dict[str, float]) -> None:
    print(f"\n{title}")
    for name, value in rows.items():
        print(f"  {name:<46} {value:>10,.2f}" if isinstance(value, float) else f"  {name:<46} {value:>10,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=2, help="processes that the ranks share")
    parser.add_argument("--front-ends", type=int, default=2)
    parser.add_argument("--in-flight", type=int, default=4, help="requests per rank")
    parser.add_argument("--mean-tokens", type=float, default=16.0)
    parser.add_argument("--step", type=float, default=0.5, help="seconds that a step sleeps")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument(
        "--lease-scale", type=float, default=1.0, help="lease times so many times longer, on a machine that is busy"
    )
    parser.add_argument("--role", choices=["head", "front-end"], help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--ramp", type=float, default=0.5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role is not None:
        asyncio.run(run_head(args) if args.role == "head" else run_front_end(args))
        return
    with tempfile.TemporaryDirectory(prefix="dpi-scale") as folder:
        run(args, Path(folder))


if __name__ == "__main__":
    main()
