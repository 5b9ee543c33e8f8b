"""Job: two ranks of a tiny model, dense or with experts that both share; what is measured is all but the model."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

from suite.context import Context, Row
from suite.figures import OURS, TUNED, Goal
from suite.served import Side, texts_of
from suite.servers import KV_GIB, PEER, REPOSITORY, STREAMS_MAX, ServerFailed, ours, peer
from suite.workload import OUTPUT_RATE, SERVED, NotSane, Shape, first_model, play

SHAPE = Shape(64, 128, 128, requests=256)
DENSE, MOE = "tiny-qwen3", "tiny-qwen3-moe"
MODELS_S = 600

ROWS = (
    Row(
        "dp2-dense",
        f"two ranks of a tiny dense model, {SHAPE.count} requests of 128 tokens in, 128 out, {SHAPE.streams} at a time",
        SERVED,
        (Goal(OUTPUT_RATE, 2.0, TUNED, 2.0),),
        SHAPE,
        7,
    ),
    Row(
        "dp2-moe",
        f"two ranks that share the experts of a tiny model, {SHAPE.count} requests as above",
        SERVED,
        (Goal(OUTPUT_RATE, 2.0, TUNED, 2.0),),
        SHAPE,
        12,
    ),
)
MODEL_OF = {"dp2-dense": DENSE, "dp2-moe": MOE}
PATCHED = (
    "runs with two collectives added that it lacks on CPUs (benchmarks/peer/collectives), and without torch.compile, "
    "which cannot trace them; its experts are cut across the ranks, since its bfloat16 kernel crashes on whole ones "
    "(--enable-expert-parallel)"
)


def make_models() -> None:
    """The tiny models, where they are not there yet. Raises ServerFailed."""
    folder = PEER / "models"
    if all((folder / name).exists() for name in (DENSE, MOE)):
        return
    folder.mkdir(parents=True, exist_ok=True)
    script = REPOSITORY / "benchmarks" / "peer" / "make_models.py"
    command = [sys.executable, str(script), str(folder), "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MODELS_S)
    if done.returncode:
        raise ServerFailed(f"{script} ended with code {done.returncode}: {done.stderr[-1500:]}")


@contextlib.contextmanager
def sides_up(context: Context, key: str) -> Iterator[list[Side]]:
    """Two ranks on each side, a core for each."""
    group = ["--data-parallel-size", "2"]
    moe = key == "dp2-moe"
    shared = ["--enable-expert-parallel"] if moe else []
    name = MODEL_OF[key]
    with contextlib.ExitStack() as stack:
        found = []
        if context.peer:
            eager = ("--enforce-eager",) if moe else ()
            server = stack.enter_context(peer(name, *group, *eager, bind="0|1", collectives=moe))
            found.append(Side(TUNED, server, first_model(server)))
        flags = ("--max-num-seqs", str(STREAMS_MAX), "--kv-cache-memory", f"{KV_GIB}GiB", *group, *shared)
        server = stack.enter_context(ours(str(PEER / "models" / name), *flags))
        found.insert(0, Side(OURS, server, first_model(server)))
        yield found


def run(context: Context, rows: Sequence[Row]) -> None:
    for row in rows:
        try:
            make_models()
            texts = texts_of(str(PEER / "models" / MODEL_OF[row.key]))
            with sides_up(context, row.key) as sides:
                values: dict[str, dict[str, list[float]]] = {side.name: {} for side in sides}
                warm = Shape(32, 128, 16)
                for side in sides:
                    play(side.server, side.model, texts.take(32, 128), warm, real_model=False)
                for turn in range(context.rounds):
                    prompts = texts.take(row.shape.count, row.shape.input_tokens)
                    for side in sides if turn % 2 == 0 else sides[::-1]:
                        outcome = play(side.server, side.model, prompts, row.shape, real_model=False)
                        for key, value in outcome.values.items():
                            values[side.name].setdefault(key, []).append(value)
            context.put(row, values, labels={TUNED: PATCHED} if context.peer and row.key == "dp2-moe" else None)
        except (ServerFailed, NotSane, TimeoutError, OSError, subprocess.TimeoutExpired) as e:
            context.fail(row, str(e) or type(e).__name__)
