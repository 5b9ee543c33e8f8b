"""How many KV cache blocks a rank gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dpi_engine.config.machine import memory_available, memory_total
from dpi_engine.ops.interface import PAGE_SIZE

GIB = 1 << 30

CPU_SHARE, CPU_CAP = 0.4, 4 * GIB
"""On the CPU the memory also serves the page cache and other processes: take less than half, and no more than this."""

CUDA_SHARE = 0.9
"""On a GPU: leave some for fragmentation and other processes."""

CUDA_CONTEXT = GIB // 2
"""What CUDA itself takes of a GPU for each process; no call tells."""


class NotEnoughCacheMemory(ValueError):
    """The KV cache cannot hold one sequence of max_model_len tokens (`fits` is the longest that it can), or is to be
    larger than the whole memory.
    """

    def __init__(self, message: str, fits: int) -> None:
        super().__init__(message)
        self.fits = fits


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device, weights loaded already: `free` now, `total`, what this process holds of it (`own`), and what
    a step will take beside the cache (`step`). A `total` of 0 is not known.

    On a CPU `own` and `step` are 0, and `total` bounds only what is asked for.
    """

    free: int
    total: int = 0
    own: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class BlockBudget:
    """num_blocks counts the null block; `source` says what decided it."""

    num_blocks: int
    bytes: int
    source: str

    @property
    def tokens(self) -> int:
        """Tokens that fit in all sequences together."""
        return (self.num_blocks - 1) * PAGE_SIZE


def plan_blocks(
    *,
    bytes_per_block: int,
    max_model_len: int,
    device: torch.device,
    memory: Memory,
    sharers: int = 1,
    num_gpu_blocks_override: int | None = None,
    kv_cache_memory: int | None = None,
    utilization: float = CUDA_SHARE,
) -> BlockBudget:
    """Blocks for one rank, of `bytes_per_block` over all layers.

    In this order: `num_gpu_blocks_override` blocks (the null block among them); `kv_cache_memory` bytes; a share of
    `memory`. On a CPU that is a part of what is free, divided among the `sharers`. On a GPU it is an equal part of
    `utilization` of the whole, less what this rank holds and its steps take, whether the other ranks have loaded before
    it or not, and never more than is free: a part of what is free would give the first rank what the weights of the
    next one need. A size that was asked for may not exceed the whole memory, for all sharers together: a system that
    lends more than it has would take it, and kill a rank when the cache fills. Raises NotEnoughCacheMemory.
    """
    if num_gpu_blocks_override is not None:
        blocks, source = num_gpu_blocks_override, "--num-gpu-blocks-override"
    elif kv_cache_memory is not None:
        blocks, source = kv_cache_memory // bytes_per_block, "--kv-cache-memory"
    elif device.type == "cpu":
        share = int(CPU_SHARE * memory.free / sharers)
        blocks = min(share, CPU_CAP) // bytes_per_block
        source = f"{CPU_SHARE:.0%} of {_gib(memory.free)} available memory for {sharers} rank(s)"
        if share > CPU_CAP:
            source = f"the default of at most {_gib(CPU_CAP)} per rank"
    else:
        share = int(utilization * memory.total / sharers) - memory.own - memory.step
        less = f"less {_gib(memory.own)} in use" + (f" and {_gib(memory.step)} for a step" if memory.step else "")
        source = f"{utilization:.0%} of the GPU's {_gib(memory.total)} for {sharers} rank(s), {less}"
        if share > utilization * memory.free - memory.step:
            share = int(utilization * memory.free) - memory.step
            source = f"{utilization:.0%} of {_gib(memory.free)} that others leave of the GPU's {_gib(memory.total)}"
        blocks = max(0, share) // bytes_per_block
    needed = -(-max_model_len // PAGE_SIZE) + 1
    if blocks < needed:
        fits = max(0, blocks - 1) * PAGE_SIZE
        lower = f"lower --max-model-len to at most {fits}, or " if fits >= PAGE_SIZE else ""
        if device.type == "cuda" and kv_cache_memory is None and utilization < 0.95:
            lower += "raise --gpu-memory-utilization, or "
        raise NotEnoughCacheMemory(
            f"KV cache: {source} gives {blocks} blocks of {PAGE_SIZE} tokens ({bytes_per_block} bytes each), but one "
            f"sequence of max_model_len={max_model_len} tokens needs {needed} ({_gib(needed * bytes_per_block)}); "
            f"{lower}raise --kv-cache-memory to {needed * bytes_per_block} bytes or more",
            fits,
        )
    room = max(0, memory.total // sharers - memory.own) // bytes_per_block
    if memory.total and blocks > room and (num_gpu_blocks_override or kv_cache_memory):
        raise NotEnoughCacheMemory(
            f"KV cache: {source} asks for {blocks} blocks ({_gib(blocks * bytes_per_block)}) on each of {sharers} "
            f"rank(s), more than there is of {_gib(memory.total)}: lower it to at most "
            f"{room if num_gpu_blocks_override else room * bytes_per_block}",
            max(0, room - 1) * PAGE_SIZE,
        )
    return BlockBudget(blocks, blocks * bytes_per_block, source)


def device_memory(device: torch.device) -> Memory:
    """Of the GPU, or of the machine under the cgroup's limit. Raises RuntimeError if nothing tells."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading needed for a while is free again
        free, total = torch.cuda.mem_get_info(device)
        return Memory(free, total, torch.cuda.memory_reserved(device) + CUDA_CONTEXT)
    available = memory_available()
    if available is None:
        raise RuntimeError("neither /proc/meminfo nor a cgroup says how much memory is free; set --kv-cache-memory")
    return Memory(available, memory_total() or 0)


def _gib(n: int) -> str:
    return f"{n / GIB:.2f} GiB"
