"""Tokens per second of a small mixture of experts on the CPU kernels and on plain torch, random weights: 64 experts, 8
for each token, hidden size 512, 12 layers; with grouped-query attention (the shape of Qwen3-MoE) and with latent
attention and shared experts (the shape of DeepSeek-V3).

    PYTHONPATH=engine python benchmarks/moe_cpu.py [--dtype bfloat16,float32] [--threads 2] [--seconds 2]

Each round measures every backend once, so that a busy machine troubles all alike; shown is each one's best round. With
one thread the clock is that thread's processor time, which other processes trouble less than time on the wall.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ops_cpu import make_step

from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.models.registry import Model, load_model
from dpi_engine.ops import OpsUnavailable, select_ops
from dpi_engine.ops.interface import StepTensors

BASE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 8,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
MODELS: dict[str, dict[str, Any]] = {
    "grouped-query": {
        **BASE,
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 64,
        "num_experts": 64,
        "norm_topk_prob": True,
    },
    "latent": {
        **BASE,
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": 256,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
}
STEPS = [  # name, sequences, computed before, in this step
    ("decode B=1, context 176", 1, 175, 1),
    ("decode B=8, context 176", 8, 175, 1),
    ("decode B=32, context 176", 32, 175, 1),
    ("prefill 4 x 128", 4, 0, 128),
    ("prefill 1 x 1024", 1, 0, 1024),
]
ROUNDS = 3


def best_ms(model: Model, step: StepTensors, caches: list[Any], seconds: float, clock: Callable[[], float]) -> float:
    """Milliseconds of the fastest forward pass within `seconds`, of at least three."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = clock()
        model.forward(step, caches)
        times.append((clock() - start) * 1e3)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16,float32", help="comma-separated")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=2.0, help="per measurement")
    parser.add_argument("--only", default="", help="steps whose name contains this")
    parser.add_argument("--model", default=",".join(MODELS))
    arguments = parser.parse_args()
    cache_dir = Path(os.environ.get("DPI_BENCH_CACHE", Path(tempfile.gettempdir()) / "dpi-ops-bench"))
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    print("model, dtype               step                       kernels ms  tokens/s   torch ms  tokens/s  ratio")
    for name in arguments.model.split(","):
        for dtype in arguments.dtype.split(","):
            spec = ModelSpec.from_config({**MODELS[name], "dtype": dtype})
            models: list[Model] = []
            for backend in ("cpu", "torch"):
                try:
                    ops = select_ops("cpu", dtype, backend, arguments.threads, cache_dir)
                except OpsUnavailable as error:
                    parser.error(f"backend {backend}: {error}")
                models.append(load_model(None, spec, ops, load_format="dummy"))
            caches = [model.new_caches(32 * 12 + 1) for model in models]
            for title, sequences, before, count in STEPS:
                if arguments.only not in title:
                    continue
                step = make_step(sequences, before, count)
                best = [float("inf")] * len(models)
                for _ in range(ROUNDS):
                    for i, model in enumerate(models):
                        best[i] = min(best[i], best_ms(model, step, caches[i], arguments.seconds / ROUNDS, clock))
                rates = [sequences * count / ms * 1e3 for ms in best]
                print(
                    f"{name + ', ' + dtype:<26} {title:<26} {best[0]:10.2f} {rates[0]:9.0f} "
                    f"{best[1]:10.2f} {rates[1]:9.0f} {best[1] / best[0]:6.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
