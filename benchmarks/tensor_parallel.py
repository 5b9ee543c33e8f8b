"""One rank with one worker and with several: tokens per second, and what it costs to share the layers.

Random weights of a model in the shape of Qwen2.5-0.5B (14 heads, so that 2 workers fit), real worker processes. All
rows of one run have the same number of threads in total; compare rows of one run only. Times are lower quartiles:
other programs only add to them. A meeting is one sum of a row of hidden values over two processes.

    python benchmarks/tensor_parallel.py --size 1 2 --threads 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from dpi_engine.config.settings import parse_serve
from dpi_engine.config.sources import default_cache_dir
from dpi_engine.launch.engine_loading import LoadedEngine, load
from dpi_engine.launch.spec import ChildKind, ChildSpec
from dpi_engine.wire.messages import EngineCoreRequest, SamplingParams


def config(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": args.vocab,
        "hidden_size": args.hidden, "intermediate_size": args.inner, "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads, "num_key_value_heads": args.kv_heads, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "eos_token_id": 0,
    }  # fmt: skip


def engine_of(args: argparse.Namespace, folder: Path, size: int) -> LoadedEngine:
    flags = [str(folder), "--load-format", "dummy", "--dtype", args.dtype, "-tp", str(size), "--max-model-len", "2048"]
    settings = parse_serve([*flags, "--max-num-seqs", "64", "--num-gpu-blocks-override", "1500", "--device", "cpu"], {})
    spec = ChildSpec(
        kind=ChildKind.ENGINE,
        index=0,
        name="rank-0",
        control="",
        run_dir=str(folder),
        settings=settings,
        model_path=str(folder),
        cache_dir=str(args.cache),
        threads=max(1, args.threads // size),
    )
    return load(spec, args.dtype, lambda stage, fraction: None)


def quiet(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=4)[0]


def meeting_us(width: int, rounds: int = 4000) -> float:
    """Microseconds of one meeting of two processes. To be called before torch has threads: it forks."""
    import torch

    from dpi_engine.config.tensor_parallel import Shard
    from dpi_engine.worker.shared_group import SharedGroup, group_bytes
    from dpi_engine.worker.shared_region import SharedRegion

    torch.set_num_threads(1)
    region = SharedRegion(group_bytes(2))
    groups = [SharedGroup(Shard(2, i), region, 0, lambda: None, create=i == 0) for i in range(2)]
    child = os.fork()
    x, found = torch.zeros(1, width), []
    for _ in range(rounds):
        began = time.perf_counter()
        groups[0 if child else 1].all_reduce(x)
        found.append(time.perf_counter() - began)
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return 1e6 * quiet(found)


def decode(engine: LoadedEngine, streams: int, steps: int) -> float:
    """Seconds of a step."""
    params = SamplingParams(temperature=0.0, max_tokens=steps + 8, ignore_eos=True)
    core = engine.core
    for i in range(streams):
        core.add(EngineCoreRequest(f"r{i}", [1 + i] * 32, sampling_params=params), time.monotonic())
    for _ in range(4):
        core.step(time.monotonic())
    walls = []
    for _ in range(steps):
        began = time.perf_counter()
        core.step(time.monotonic())
        walls.append(time.perf_counter() - began)
    while core.has_work():
        core.step(time.monotonic())
    return quiet(walls)


def prefill(engine: LoadedEngine, tokens: int, times: int) -> float:
    """Seconds for one prompt."""
    found = []
    for i in range(times):
        prompt = [2 + (i * 7 + j * 13) % 1000 for j in range(tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        engine.core.add(EngineCoreRequest(f"p{i}", prompt, sampling_params=params), time.monotonic())
        began = time.perf_counter()
        while engine.core.has_work():
            engine.core.step(time.monotonic())
        found.append(time.perf_counter() - began)
    return quiet(found)


def order_us(engine: LoadedEngine) -> str:
    """Microseconds to hand a step of 64 sequences to the other workers, without computing it."""
    import torch

    from dpi_engine.ops.interface import StepTensors
    from dpi_engine.worker.plan_region import PlanRegion
    from dpi_engine.worker.shared_region import SharedRegion

    size = engine.workers.size if engine.workers else 1
    if size == 1:
        return "-"
    region = SharedRegion(PlanRegion.bytes_needed(size, 64, 512, 2048))
    first = PlanRegion(region, size, lambda: None, create=True)
    others = [PlanRegion(region, size, lambda: None, create=False) for _ in range(size - 1)]
    long, small = torch.zeros(64, dtype=torch.int64), torch.zeros(65, dtype=torch.int32)
    step = StepTensors(long, long, long, torch.zeros(64, 128, dtype=torch.int32), small[:64], small, long, 1, 2048)
    found = []
    for _ in range(500):
        began = time.perf_counter()
        first.order_step(step)
        for i, other in enumerate(others, 1):
            other.wait(i)
            other.read_step(i, torch.device("cpu"))
        found.append(time.perf_counter() - began)
    return f"{1e6 * quiet(found):.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--threads", type=int, default=2, help="of all workers of the rank together")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=60)
    for name, value in (
        ("hidden", 896), ("inner", 4864), ("layers", 24), ("heads", 14), ("kv-heads", 2), ("vocab", 151936)
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--cache", type=Path, default=default_cache_dir({}, Path.home()))
    args = parser.parse_args()
    print(f"a meeting of two processes, {args.hidden} values: {meeting_us(args.hidden):.0f} us")
    print("workers  threads each  decode 1: ms  tok/s  decode 16: ms  tok/s  prompt of 256: ms  order of a step: us")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config(args)))
        for size in args.size:
            engine = engine_of(args, folder, size)
            try:
                one = decode(engine, 1, args.steps)
                many = decode(engine, 16, args.steps)
                prompt = prefill(engine, 256, 5)
                each = max(1, args.threads // size)
                print(
                    f"{size:7}  {each:12}  {1e3 * one:12.1f}  {1 / one:5.1f}  {1e3 * many:13.1f}"
                    f"  {16 / many:5.1f}  {1e3 * prompt:17.0f}  {order_us(engine):>19}",
                    flush=True,
                )
            finally:
                if engine.workers is not None:
                    engine.workers.close()


if __name__ == "__main__":
    main()
