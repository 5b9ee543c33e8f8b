"""One rank of a group whose tokens travel by torch.distributed, as a process of its own; gloo stands in for NCCL.

It is told what to do by lines on its standard input and answers on its standard output, one JSON value each. What the
head does for real ranks (wire/head.py) the test does: it tells who belongs to which epoch.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PATIENCE = 60.0


class RankProcess:
    """The test's side of one process."""

    def __init__(self, rank: int, size: int, way: str, graphs: bool, port: int = 0) -> None:
        self.rank = rank
        here = Path(__file__)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(here.parent), str(here.parent.parent / "worker"), *filter(None, sys.path)]
            ),
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, str(here), str(rank), str(size), way, str(int(graphs)), str(port)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def tell(self, *order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        assert ready, f"rank {self.rank} is silent"
        line = self.process.stdout.readline()
        assert line, f"rank {self.rank} ended with {self.process.wait()}"
        return json.loads(line)

    def ask(self, *order: Any) -> Any:
        self.tell(*order)
        return self.hear()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Group:
    """All processes, and the epochs they are told of."""

    def __init__(self, size: int, way: str = "auto", graphs: bool = False) -> None:
        self.size, self.way, self.graphs, self.epoch = size, way, graphs, 0
        self.ranks = [RankProcess(rank, size, way, graphs) for rank in range(size)]
        self.endpoints = [rank.hear() for rank in self.ranks]

    def replace(self, rank: int) -> None:
        self.ranks[rank].end()
        self.ranks[rank] = RankProcess(rank, self.size, self.way, self.graphs)
        self.endpoints[rank] = self.ranks[rank].hear()

    def announce(self, but: Sequence[int] = ()) -> None:
        """A new epoch, of all ranks but those."""
        self.epoch += 1
        for rank in self.ranks:
            if rank.rank not in but:
                rank.tell("epoch", self.epoch, [[r, e] for r, e in enumerate(self.endpoints) if r not in but])

    def all(self, *order: Any) -> list[Any]:
        for rank in self.ranks:
            rank.tell(*order)
        return [rank.hear() for rank in self.ranks]


@contextlib.contextmanager
def group(size: int, way: str = "auto", graphs: bool = False) -> Iterator[Group]:
    made = Group(size, way, graphs)
    try:
        yield made
    finally:
        for rank in made.ranks:
            rank.end()


def serve(rank: int, size: int, way: str, graphs: bool) -> None:
    """In the process: a rank's loop, as launch/engine_process.py has it."""
    import torch
    from ahead_toys import FakeRecorder
    from coupled_ranks import CONFIG, EXPERTS, VOCAB, request

    from dpi_engine.config.experts import ExpertPlacement
    from dpi_engine.config.model_spec import ModelSpec
    from dpi_engine.core.coupled import CoupledCore
    from dpi_engine.core.engine import EngineCore
    from dpi_engine.core.limits import SchedulerConfig
    from dpi_engine.core.lockstep import Lockstep
    from dpi_engine.core.scheduler import Scheduler
    from dpi_engine.models.registry import load_model
    from dpi_engine.ops.torch_ref import TorchOps
    from dpi_engine.wire.exchange.device_experts import DeviceExperts
    from dpi_engine.wire.exchange.device_links import DeviceLinks
    from dpi_engine.wire.exchange.experts import Way
    from dpi_engine.wire.exchange.mesh import Mesh
    from dpi_engine.wire.group import GroupTable, Member
    from dpi_engine.wire.sockets import Waker
    from dpi_engine.worker.ahead_runner import AheadRunner
    from dpi_engine.worker.linked_devices import LinkedDevices
    from dpi_engine.worker.runner import Runner

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")

    class Ops(TorchOps):
        """The reference, with draws and recordings, which here are calls made again."""

        draws = records = graphs

        def draw(self, logits: torch.Tensor, draws: Any) -> tuple[torch.Tensor, torch.Tensor]:
            assert float(draws.temperature.max()) == 0.0, "only the best token is drawn here"
            best, tokens = logits.float().max(1)
            return tokens, best

    mesh = Mesh(rank, size, "127.0.0.1", 0)
    ops = Ops(torch.device("cpu"), torch.float32)
    links = DeviceLinks(mesh, ops.device, "gloo", ("127.0.0.1", 0))
    exchange = DeviceExperts(links, ExpertPlacement(EXPERTS, size, rank), Way(way))
    model = load_model(None, ModelSpec.from_config(CONFIG), ops, load_format="dummy", exchange=exchange)
    limits = {"max_num_seqs": 8, "max_model_len": 1000, "max_num_batched_tokens": 64}
    runner = (AheadRunner if graphs else Runner)(model, ops, num_blocks=200, meeting=exchange, **limits)
    recorder = FakeRecorder()
    if isinstance(runner, AheadRunner):
        runner.record(lambda stage, done: None, recorder)
    with exchange.alone():
        runner.warm_up()
    scheduler = Scheduler(SchedulerConfig(num_blocks=200, block_size=16, vocab_size=VOCAB, **limits))
    core = EngineCore(scheduler, runner)
    coupled = CoupledCore(core, mesh, Lockstep(rank, size), lambda: None, LinkedDevices(links, runner))
    texts: dict[str, list[int]] = {}
    ended: set[str] = set()
    wanted: list[str] | None = None
    orders: deque[list[Any]] = deque()
    waker = Waker()

    def listen() -> None:
        """The thread of the wire: news of epochs must arrive while the rank waits in an exchange."""
        for line in sys.stdin:
            match json.loads(line):
                case ["epoch", epoch, members]:
                    missing = "" if len(members) == size else "a rank is lost"
                    mesh.announce(GroupTable(epoch, bytes(16), [Member(r, 1, e) for r, e in members], missing))
                case order:
                    orders.append(order)
                    waker.wake()
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    answer(mesh.endpoint)
    coupled.joined(time.monotonic())
    while True:
        waker.clear()
        while orders:
            match orders.popleft():
                case ["add", name, prompt, tokens]:
                    core.add(request(name, prompt, tokens), time.monotonic())
                    texts[name] = []
                case ["texts", names]:
                    wanted = names
                case ["state"]:
                    answer({
                        "group": coupled.group, "linked": links.group, "breaks": coupled.counts.breaks,
                        "steps": coupled.counts.steps, "dummies": coupled.counts.dummy_steps,
                        "recorded": recorder.recorded, "replays": _replays(runner), "left": mesh.left,
                    })  # fmt: skip
        now = time.monotonic()
        if coupled.idle():
            coupled.rest(now, 0.2, waker.fd)
        else:
            for entries in coupled.turn(now).outputs.outputs.values():
                for output in entries:
                    texts[output.request_id] += output.new_token_ids
                    if output.finish_reason is not None:
                        assert output.error is None, output.error
                        ended.add(output.request_id)
        coupled.take_reports()
        if wanted is not None and ended.issuperset(wanted):
            answer([texts[name] for name in wanted])
            wanted = None


def _replays(runner: Any) -> int:
    graphs = getattr(runner, "graphs", None)
    return 0 if graphs is None else int(graphs.replays)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "1")
