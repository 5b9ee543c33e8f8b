"""Shared memory between the workers of a rank: sums and rows are whole, nobody waits for ever, steps arrive as sent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.testing import assert_close

from dpi_engine.config.errors import ConfigError
from dpi_engine.config.tensor_parallel import Shard
from dpi_engine.ops.interface import StepTensors
from dpi_engine.wire.errors import WorkerLost
from dpi_engine.worker.nccl_group import NcclGroup
from dpi_engine.worker.placement import Placement, place_worker
from dpi_engine.worker.plan_region import Order, PlanRegion
from dpi_engine.worker.sharded_model import ShardedModel
from dpi_engine.worker.shared_group import SLOT_BYTES, SharedGroup, group_bytes
from dpi_engine.worker.shared_region import SharedRegion
from tensor_ranks import Workers


def never() -> None:
    return


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 8), (7, 33), (0, 16), (3, SLOT_BYTES // 4 + 5)])
def test_sums_are_the_same_bits_on_every_worker(dtype: torch.dtype, size: int, shape: tuple[int, int]) -> None:
    """Small ones and such that need several rounds, several times after each other."""
    workers = Workers(size)
    generator = torch.Generator().manual_seed(size)
    rounds = 1 if shape[1] > 1000 else 5
    values = [[torch.randn(shape, generator=generator).to(dtype) for _ in range(size)] for _ in range(rounds)]
    want = [sum((part.float() for part in parts[1:]), parts[0].float()).to(dtype) for parts in values]

    def work(index: int) -> list[torch.Tensor]:
        return [workers.groups[index].all_reduce(parts[index].clone()) for parts in values]

    for found in workers.run(work):
        for got, expected in zip(found, want, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("shape", [(1, 5), (4, 33), (0, 16), (70, SLOT_BYTES // 256), (2, SLOT_BYTES // 4 + 3)])
def test_the_first_worker_gathers_columns_in_order(shape: tuple[int, int]) -> None:
    workers = Workers(3)
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    found = workers.run(lambda i: workers.groups[i].gather(parts[i]))
    assert torch.equal(found[0], torch.cat(parts, dim=1))
    assert all(f.shape[0] == shape[0] for f in found)


def test_a_worker_that_does_not_come_is_named_in_time() -> None:
    workers = Workers(2, timeout=0.3)
    with pytest.raises(WorkerLost, match=r"worker 1 did not bring its part of a layer within 0 s"):
        workers.groups[0].all_reduce(torch.ones(1, 4))


def test_news_of_a_lost_worker_end_a_wait_long_before_its_deadline() -> None:
    region, lost = SharedRegion(group_bytes(2)), threading.Event()

    def check() -> None:
        if lost.is_set():
            raise WorkerLost("worker 1 is gone")

    group = SharedGroup(Shard(2, 0), region, 0, check, create=True, timeout=3600.0)
    threading.Timer(0.2, lost.set).start()
    with pytest.raises(WorkerLost, match="worker 1 is gone"):
        group.gather(torch.ones(1, 4))


def test_signals_do_not_end_a_wait() -> None:
    region = SharedRegion(64)
    semaphore = region.semaphore(0, create=True)
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        timers = [threading.Timer(0.05 * i, os.kill, (os.getpid(), signal.SIGUSR1)) for i in range(1, 4)]
        timers.append(threading.Timer(0.4, semaphore.post))
        for timer in timers:
            timer.start()
        assert semaphore.wait(never, 60.0)
    finally:
        for timer in timers:
            timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert seen
    assert not semaphore.try_wait()


def step(n: int, b: int, width: int, m: int, seed: int) -> StepTensors:
    rng = np.random.default_rng(seed)

    def ints(*shape: int, dtype: Any = np.int64) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, 1 << 30, shape, dtype=dtype))

    return StepTensors(
        ids=ints(n), positions=ints(n), slots=ints(n), block_tables=ints(b, width, dtype=np.int32),
        kv_lens=ints(b, dtype=np.int32), cu_q=ints(b + 1, dtype=np.int32), rows=ints(m), max_q=n, max_kv=7 * n,
    )  # fmt: skip


def plans_of(size: int) -> list[PlanRegion]:
    region = SharedRegion(PlanRegion.bytes_needed(size, 4, 64, 320))
    return [PlanRegion(region, size, never, create=i == 0) for i in range(size)]


@pytest.mark.parametrize("largest", [False, True])
def test_steps_arrive_as_they_were_sent(largest: bool) -> None:
    """Also the largest that a runner makes, many without waiting for the reader's work to end."""
    first, *others = plans_of(3)
    sent = [step(64, 4, 21, 64, i) if largest else step(1 + i, 1 + i % 3, 2 + i, i % 2, i) for i in range(12)]

    def read(index: int) -> list[StepTensors]:
        found = []
        for _ in sent:
            assert others[index - 1].wait(index) is Order.STEP
            found.append(others[index - 1].read_step(index, torch.device("cpu")))
        assert others[index - 1].wait(index) is Order.CALL
        return found

    results: dict[int, list[StepTensors]] = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: read(i)}), daemon=True) for i in (1, 2)]
    for thread in threads:
        thread.start()
    for one in sent:
        first.order_step(one)
    first.order_call()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    for found in results.values():
        for got, want in zip(found, sent, strict=True):
            for name in StepTensors.__slots__:
                a, b = getattr(got, name), getattr(want, name)
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name


def test_a_first_worker_that_fails_in_the_middle_of_a_step_ends_the_rank() -> None:
    """The others wait in a meeting to which it will not come: there is no next step."""

    class Broken:
        spec = None

        def forward(self, step: StepTensors, caches: Any) -> torch.Tensor:
            raise IndexError("slots: one is outside the cache")

    model = ShardedModel(Broken(), plans_of(2)[0], lambda call, value: None)  # type: ignore[arg-type]
    with pytest.raises(WorkerLost, match=r"first worker failed in a step.*outside the cache"):
        model.forward(step(2, 1, 1, 1, 0), None)


@pytest.mark.parametrize(
    ("asked", "size", "gpus", "want"),
    [
        ("auto", 2, 0, [Placement("cpu", 2)] * 4),
        ("cpu", 2, 4, [Placement("cpu", 2)] * 4),
        ("cuda", 2, 4, [Placement(f"cuda:{i}", 1) for i in range(4)]),
        ("auto", 2, 2, [Placement(f"cuda:{i % 2}", 2) for i in range(4)]),
    ],
)
def test_workers_get_a_gpu_each_or_share_the_cpu(asked: str, size: int, gpus: int, want: list[Placement]) -> None:
    """Two ranks of two workers."""
    assert [place_worker(asked, rank, 2, size, worker, gpus) for rank in (0, 1) for worker in (0, 1)] == want


@pytest.mark.parametrize(
    ("asked", "gpus", "words"), [("cuda:1", 4, "is one device"), ("cuda", 1, "needs as many GPUs, torch sees 1")]
)
def test_too_few_gpus_are_refused_by_name(asked: str, gpus: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        place_worker(asked, 0, 1, 2, 0, gpus)


def _over_gloo(index: int, store: str, results: Any) -> None:
    group = NcclGroup(Shard(2, index), store, torch.device("cpu"), backend="gloo")
    mine = torch.arange(6.0).view(2, 3) + 10 * index
    results.put((index, group.all_reduce(mine.clone()).numpy(), group.gather(mine).numpy()))
    group.close()


def test_the_group_for_gpus_does_the_same_over_gloo(tmp_path: Path) -> None:
    """NCCL wants a GPU for each worker; the calls are those of any backend."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_over_gloo, args=(i, str(tmp_path / "store"), results), daemon=True) for i in range(2)
    ]
    for process in processes:
        process.start()
    found = {index: (total, rows) for index, total, rows in (results.get(timeout=120.0) for _ in processes)}
    for process in processes:
        process.join(60.0)
        assert process.exitcode == 0
    first = torch.arange(6.0).view(2, 3)
    for total, _ in found.values():
        assert_close(torch.from_numpy(total), 2 * first + 10)
    assert_close(torch.from_numpy(found[0][1]), torch.cat([first, first + 10], dim=1))


def test_shared_memory_has_no_name() -> None:
    def named() -> set[str]:
        return {m.path for m in psutil.Process().memory_maps() if m.path.startswith("/dev/shm/")}

    before = named()
    workers = Workers(2)
    workers.run(lambda i: workers.groups[i].all_reduce(torch.ones(1, 4)))
    assert named() <= before
