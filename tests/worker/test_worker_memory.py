"""How the number of KV cache blocks comes about."""

from __future__ import annotations

import pytest
import torch

from dpi_engine.worker.memory import CPU_CAP, GIB, Memory, NotEnoughCacheMemory, device_memory, plan_blocks
from dpi_engine.worker.placement import Placement, place

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KIB = 1024


@pytest.mark.parametrize(
    "device,memory,more,blocks,source",
    [
        (CPU, Memory(5 * GIB), {}, 2 * 1024, "40% of 5.00 GiB"),
        (CPU, Memory(5 * GIB), {"sharers": 2}, 1024, "2 rank"),
        (CPU, Memory(500 * GIB), {}, CPU_CAP // (1024 * KIB), "at most 4.00 GiB"),
        (CUDA, Memory(98 * GIB, 100 * GIB, 2 * GIB), {}, 88 * 1024, "90% of the GPU's 100.00 GiB for 1 rank"),
        (CUDA, Memory(30 * GIB, 100 * GIB, 2 * GIB), {}, 27 * 1024, "90% of 30.00 GiB that others leave"),
        (CUDA, Memory(98 * GIB, 100 * GIB, 2 * GIB, 3 * GIB), {}, 85 * 1024, "2.00 GiB in use and 3.00 GiB for a step"),
        (CUDA, Memory(98 * GIB, 100 * GIB, 2 * GIB), {"utilization": 0.5}, 48 * 1024, "50% of the GPU's 100.00 GiB"),
        (CUDA, Memory(30 * GIB, 100 * GIB, 2 * GIB, 3 * GIB), {}, 24 * 1024, "90% of 30.00 GiB that others leave"),
        (CPU, Memory(5 * GIB), {"kv_cache_memory": GIB}, 1024, "--kv-cache-memory"),
        (CPU, Memory(5 * GIB), {"kv_cache_memory": GIB, "num_gpu_blocks_override": 77}, 77, "--num-gpu-blocks-ov"),
    ],
)
def test_blocks_and_what_decided_them(device, memory, more, blocks, source):
    budget = plan_blocks(bytes_per_block=1024 * KIB, max_model_len=512, device=device, memory=memory, **more)
    assert budget.num_blocks == blocks and source in budget.source
    assert budget.bytes == blocks * 1024 * KIB and budget.tokens == (blocks - 1) * 16


@pytest.mark.parametrize("weights", [2, 9])
def test_ranks_on_one_gpu_get_the_same_whoever_loads_first(weights):
    """24 GiB, two ranks: what each gets leaves room for the other's weights, and neither gets more by being early."""
    total = 24 * GIB
    free, blocks = total, []
    for _ in range(2):
        free -= weights * GIB
        assert free >= 0
        memory = Memory(free, total, weights * GIB)
        budget = plan_blocks(bytes_per_block=1024 * KIB, max_model_len=512, device=CUDA, memory=memory, sharers=2)
        blocks.append(budget.num_blocks)
        free -= budget.bytes
    assert blocks[0] == blocks[1] == int((10.8 - weights) * 1024) and free >= 0.1 * total - GIB


def test_a_gpu_full_of_weights_gives_no_negative_cache():
    with pytest.raises(NotEnoughCacheMemory) as caught:
        plan_blocks(bytes_per_block=KIB, max_model_len=512, device=CUDA, memory=Memory(GIB, 24 * GIB, 23 * GIB))
    assert caught.value.fits == 0 and "gives 0 blocks" in str(caught.value)


def test_a_gpu_without_room_names_the_share_it_may_use():
    with pytest.raises(NotEnoughCacheMemory, match="raise --gpu-memory-utilization, or raise --kv-cache-memory"):
        plan_blocks(bytes_per_block=GIB, max_model_len=512, device=CUDA, memory=Memory(9 * GIB, 24 * GIB, GIB))
    with pytest.raises(NotEnoughCacheMemory) as caught:
        plan_blocks(
            bytes_per_block=GIB, max_model_len=512, device=CUDA, memory=Memory(9 * GIB, 24 * GIB, GIB), utilization=0.98
        )
    assert "--gpu-memory-utilization" not in str(caught.value)


@pytest.mark.parametrize(
    "asked,local_rank,local_ranks,gpus,want",
    [
        ("auto", 1, 2, 0, Placement("cpu", 2)),
        ("cpu", 1, 2, 8, Placement("cpu", 2)),
        ("auto", 0, 1, 1, Placement("cuda:0", 1)),
        ("cuda", 1, 2, 1, Placement("cuda:0", 2)),
        ("cuda", 1, 2, 2, Placement("cuda:1", 1)),
        ("cuda", 2, 5, 2, Placement("cuda:0", 3)),
        ("cuda", 3, 5, 2, Placement("cuda:1", 2)),
        ("cuda", 0, 2, 0, Placement("cuda", 2)),
        ("cuda:1", 0, 2, 4, Placement("cuda:1", 2)),
    ],
)
def test_ranks_go_round_the_gpus(asked, local_rank, local_ranks, gpus, want):
    assert place(asked, local_rank, local_ranks, gpus) == want


def test_one_longest_sequence_must_fit():
    fits = plan_blocks(bytes_per_block=KIB, max_model_len=512, device=CPU, memory=Memory(0), kv_cache_memory=33 * KIB)
    assert fits.num_blocks == 33
    with pytest.raises(NotEnoughCacheMemory) as caught:
        plan_blocks(bytes_per_block=KIB, max_model_len=513, device=CPU, memory=Memory(0), kv_cache_memory=33 * KIB)
    message = str(caught.value)
    assert caught.value.fits == 512
    for words in ("33 blocks", "max_model_len=513", "needs 34", "--max-model-len to at most 512", str(34 * KIB)):
        assert words in message


def test_no_memory_at_all_offers_no_impossible_length():
    with pytest.raises(NotEnoughCacheMemory) as caught:
        plan_blocks(bytes_per_block=GIB, max_model_len=512, device=CPU, memory=Memory(GIB))
    assert caught.value.fits == 0 and "--max-model-len to" not in str(caught.value)


@pytest.mark.parametrize("asked", [{"kv_cache_memory": 100 << 40}, {"num_gpu_blocks_override": 1 << 31}])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_cache_larger_than_the_machine_is_refused_with_the_most_that_fits(device, asked):
    memory = Memory(5 * GIB, 8 * GIB, GIB)
    with pytest.raises(NotEnoughCacheMemory) as caught:
        plan_blocks(bytes_per_block=KIB, max_model_len=512, device=device, memory=memory, sharers=2, **asked)
    (flag,) = asked
    most = 3 << (20 if flag == "num_gpu_blocks_override" else 30)
    for words in ("--" + flag.replace("_", "-"), "8.00 GiB", "2 rank(s)", f"lower it to at most {most}"):
        assert words in str(caught.value)
    fits = plan_blocks(bytes_per_block=KIB, max_model_len=512, device=device, memory=memory, sharers=2, **{flag: most})
    assert fits.num_blocks == 3 << 20


def test_this_machine_says_what_it_has():
    memory = device_memory(CPU)
    assert 0 < memory.free <= memory.total < 1 << 50
