"""What one step costs in the scheduler alone: microseconds for schedule(), apply() and both, by batch size.

`python benchmarks/scheduler_overhead.py [--steps N] [--profile]` prints a table. The result of each step is made before
the clock starts, so no model time is in it. `--profile` adds where the time of the largest decode batch goes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time

from dpi_engine.core.limits import SchedulerConfig
from dpi_engine.core.plan import StepPlan, StepResult
from dpi_engine.core.scheduler import Scheduler
from dpi_engine.wire.messages import EngineCoreRequest, SamplingParams

MAX_MODEL_LEN = 8192


def make(sequences: int, prompt_tokens: int, waiting: int = 0) -> Scheduler:
    blocks_each = MAX_MODEL_LEN // 16
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=1 + blocks_each * sequences,
            block_size=16,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=50_000,
            max_num_seqs=sequences,
            max_num_batched_tokens=max(512, sequences),
        )
    )
    sampling = SamplingParams(max_tokens=None, stop_token_ids=[1, 2], eos_token_id=0)
    for i in range(sequences + waiting):
        prompt = [(i * 7919 + k) % 49_000 + 3 for k in range(prompt_tokens)]
        scheduler.add(EngineCoreRequest(f"request-{i}", prompt, sampling_params=sampling), 0.0)
    return scheduler


def result_of(plan: StepPlan) -> StepResult:
    return StepResult(step=plan.step, token_ids=[[7 + plan.step % 1000] for work in plan.work if work.sample])


def prefill(scheduler: Scheduler, sequences: int) -> None:
    while scheduler.num_running < sequences or any(len(r.tokens) == r.num_prompt for r in scheduler._running):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.apply(plan, result_of(plan), 0.0)


def measure(scheduler: Scheduler, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each schedule and each apply."""
    scheduling, applying = [], []
    for _ in range(steps):
        start = time.perf_counter()
        plan = scheduler.schedule(0.0)
        middle = time.perf_counter()
        assert plan is not None
        result = result_of(plan)
        resumed = time.perf_counter()
        scheduler.apply(plan, result, 0.0)
        scheduling.append(middle - start)
        applying.append(time.perf_counter() - resumed)
    return scheduling, applying


def row(name: str, scheduling: list[float], applying: list[float]) -> str:
    both = [a + b for a, b in zip(scheduling, applying, strict=True)]
    p99 = statistics.quantiles(both, n=100)[98]
    cells = [statistics.median(scheduling), statistics.median(applying), statistics.median(both), p99]
    return f"{name:<36}" + "".join(f"{cell * 1e6:>12.1f}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="steps per row (default 1000)")
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    args = parser.parse_args()

    print(f"{'microseconds per step':<36}{'schedule':>12}{'apply':>12}{'both p50':>12}{'both p99':>12}")
    for sequences in (1, 8, 32, 64, 256):
        scheduler = make(sequences, 128)
        prefill(scheduler, sequences)
        print(row(f"decode, {sequences} running", *measure(scheduler, args.steps)))
    scheduler = make(64, 128, waiting=10_000)
    prefill(scheduler, 64)
    print(row("decode, 64 running, 10000 waiting", *measure(scheduler, args.steps)))

    scheduler = make(64, 512)
    print(row("prefill, 512 tokens a step", *measure(scheduler, 64)))

    scheduler = make(1, 16)
    sampling = SamplingParams()
    start = time.perf_counter()
    for i in range(10_000):
        scheduler.add(EngineCoreRequest(f"queued-{i}", [5] * 128, sampling_params=sampling), 0.0)
    added = time.perf_counter()
    scheduler.abort([f"queued-{i}" for i in range(10_000)])
    aborted = time.perf_counter()
    print(
        f"add, 128 tokens: {(added - start) * 100:.1f} us each; abort while waiting: {(aborted - added) * 100:.1f} us"
    )

    if args.profile:
        scheduler = make(64, 128)
        prefill(scheduler, 64)
        profiler = cProfile.Profile()
        profiler.enable()
        measure(scheduler, args.steps)
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(12)


if __name__ == "__main__":
    main()
