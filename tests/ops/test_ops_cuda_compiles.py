"""Every Triton kernel, as the backend launches it for common models, compiles for Hopper and Ampere: no GPU is needed
for that. What it takes of a multiprocessor must be there.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from dpi_engine.ops.cuda import attention, experts, linear, rope, router, rows, sampling
from dpi_engine.ops.eight_bit import EightBitLinear
from dpi_engine.ops.interface import PAGE_SIZE, HeadShape, RopeTable, StepTensors
from dpi_engine.ops.torch_moe import PackedExperts

SHARED_BYTES = {90: 227 * 1024, 80: 163 * 1024}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
_TYPES = {
    F32: "fp32", BF16: "bf16", F16: "fp16", torch.int32: "i32", torch.int64: "i64", INT8: "i8", E4M3: "fp8e4nv",
}  # fmt: skip


class Launch(NamedTuple):
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


class Usage(NamedTuple):
    """What a kernel takes: registers of a thread, bytes of stack (spilled registers), bytes of shared memory."""

    registers: int
    stack: int
    shared: int


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


def ints(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def step(sequences: int, queries: int) -> StepTensors:
    n = sequences * queries
    longs = torch.zeros(n, dtype=torch.int64)
    return StepTensors(
        longs, longs, longs, ints(sequences, 64), ints(sequences), ints(sequences + 1), longs, queries, 1
    )


def attend(
    shape: HeadShape, dtype: torch.dtype, sequences: int, queries: int, window: int = 0, held: torch.dtype | None = None
) -> None:
    cache = empty(2, 8, PAGE_SIZE, shape.kv_heads, shape.dim, dtype=held or dtype)
    q = empty(sequences * queries, shape.heads * shape.dim, dtype=dtype)
    attention.attention(q, step(sequences, queries), cache, shape, 0.1, window, 4)


def rotate(shape: HeadShape, dtype: torch.dtype, normed: bool, held: torch.dtype | None = None) -> None:
    table = RopeTable(empty(64, shape.dim // 2, dtype=F32), empty(64, shape.dim // 2, dtype=F32))
    cache = empty(2, 8, PAGE_SIZE, shape.kv_heads, shape.dim, dtype=held or dtype)
    norm = empty(shape.dim, dtype=F32) if normed else None
    qkv = empty(2, (shape.heads + 2 * shape.kv_heads) * shape.dim, dtype=dtype)
    rope.rope_write(qkv, step(2, 1), table, cache, shape, norm, norm, 1e-6)


def product(
    n: int, inputs: int, outputs: int, kind: torch.dtype, dtype: torch.dtype = BF16, bias: bool = False
) -> None:
    packed = EightBitLinear(
        empty(outputs, inputs, dtype=kind), empty(outputs, dtype=F32), empty(outputs) if bias else None
    )
    linear.linear(empty(n, inputs, dtype=dtype), packed)


def expert_layer(tokens: int, dtype: torch.dtype) -> None:
    packed = PackedExperts(empty(8, 2 * 96, 128, dtype=dtype), empty(8, 128, 96, dtype=dtype))
    experts.experts(empty(tokens, 128, dtype=dtype), ints(tokens, 2), empty(tokens, 2, dtype=F32), packed)


def draws(vocab: int, dtype: torch.dtype) -> None:
    def each(kind: torch.dtype = F32) -> Tensor:
        return empty(2, dtype=kind)

    sampling.draw(empty(2, vocab, dtype=dtype), each(), each(torch.int32), each(), each(), each())


LLAMA, QWEN = HeadShape(32, 8, 128), HeadShape(14, 2, 64)
LAUNCHES: dict[str, Callable[[], object]] = {
    "rms norm": lambda: rows.rms_norm(empty(2, 4096), empty(4096, dtype=F32), 1e-5),
    "add rms norm, odd width": lambda: rows.add_rms_norm(empty(2, 896), empty(2, 896), empty(896, dtype=F32), 1e-5),
    "widest norm": lambda: rows.rms_norm(empty(2, 65536, dtype=F32), empty(65536, dtype=F32), 1e-5),
    "silu": lambda: rows.silu_mul(empty(2, 28672)),
    "rope": lambda: rotate(LLAMA, BF16, False),
    "rope with norms": lambda: rotate(HeadShape(16, 8, 128), BF16, True),
    "rope, odd heads": lambda: rotate(HeadShape(3, 3, 80), F32, True),
    "decode": lambda: attend(LLAMA, BF16, 4, 1),
    "decode, window": lambda: attend(QWEN, F16, 4, 1, 4096),
    "decode, wide heads": lambda: attend(HeadShape(8, 4, 256), BF16, 4, 1),
    "decode, float32": lambda: attend(QWEN, F32, 4, 1),
    "decode, widest float32": lambda: attend(HeadShape(2, 2, 256), F32, 4, 1),
    "chunk": lambda: attend(LLAMA, BF16, 1, 64),
    "chunk, window": lambda: attend(QWEN, BF16, 1, 64, 4096),
    "chunk, wide heads": lambda: attend(HeadShape(8, 4, 256), BF16, 1, 64),
    "chunk, odd heads": lambda: attend(HeadShape(3, 3, 80), F16, 1, 64),
    "chunk, float32": lambda: attend(QWEN, F32, 1, 64),
    "chunk, widest float32": lambda: attend(HeadShape(2, 2, 256), F32, 1, 64),
    "decode over e4m3": lambda: attend(LLAMA, BF16, 4, 1, held=E4M3),
    "chunk over e4m3": lambda: attend(LLAMA, BF16, 1, 64, held=E4M3),
    "rope into e4m3": lambda: rotate(HeadShape(16, 8, 128), BF16, True, E4M3),
    "linear of e4m3": lambda: product(1, 4096, 28672, E4M3),
    "linear of e4m3, chunk": lambda: product(2048, 4096, 6144, E4M3, bias=True),
    "linear of int8": lambda: product(8, 14336, 4096, INT8),
    "linear of int8, chunk": lambda: product(2048, 4096, 6144, INT8),
    "linear of int8, float32": lambda: product(64, 896, 4864, INT8, F32),
    "experts of a few": lambda: expert_layer(3, BF16),
    "experts of many": lambda: expert_layer(1024, BF16),
    "experts, float32": lambda: expert_layer(1024, F32),
    "router": lambda: router.choose(empty(2, 128, dtype=F32), None, 8, False, True, 1.0),
    "router, sigmoid": lambda: router.choose(empty(2, 60, dtype=F32), empty(60, dtype=F32), 4, True, False, 2.5),
    "draw": lambda: draws(151936, BF16),
    "draw, float32": lambda: draws(32001, F32),
}


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    found: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {key: named.pop(key) for key in ("num_warps", "num_stages") if key in named}
        found.append(Launch(kernel, dict(zip(kernel.arg_names, args, strict=False)) | named, options))

    monkeypatch.setattr(JITFunction, "run", run)
    return found


def compiled(launch: Launch, capability: int, folder: Path) -> Usage:
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    facts: dict[tuple[int], list[list[Any]]] = {}
    for i, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name], facts[(i,)] = "*" + _TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
    source = ASTSource(launch.kernel, signature, constants, facts)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    said = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True, timeout=60).stdout
    used = {k: int(v) for k, _, v in (word.partition(":") for word in said.split()) if v.isdigit()}
    return Usage(used["REG"], used["STACK"], kernel.metadata.shared)


@pytest.mark.parametrize("what", LAUNCHES)
def test_kernel_compiles(what: str, caught: list[Launch], tmp_path: Path) -> None:
    LAUNCHES[what]()
    assert caught
    for launch in caught:
        for capability, shared in SHARED_BYTES.items():
            if capability < 89 and any(getattr(a, "dtype", None) == E4M3 for a in launch.arguments.values()):
                continue  # refused there (ops/cuda/backend.py)
            usage = compiled(launch, capability, tmp_path)
            print(f"{launch.kernel.__name__} sm_{capability} {launch.options}: {usage}", file=sys.stderr)
            assert usage.shared <= shared
            assert usage.stack <= 512
