"""Job: the front end alone. Ranks without a model answer with the prompt; what the head's processes spend is counted.

Both heads get the same ranks (`stub_engine.py`), over the same wire. Paced, every token is an event of its own on both
sides; in the flood tokens come as fast as the ranks can send, and a front end that falls behind may put several into
one event.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from suite.context import Context, Row
from suite.figures import OURS, TUNED, Goal, Measure
from suite.served import Side, texts_of
from suite.servers import (
    MAX_MODEL_LEN,
    OUR_START_S,
    PEER,
    PEER_START_S,
    SMOLLM2,
    SMOLLM2_FOLDER,
    ServerFailed,
    free_ports,
    our_environment,
    peer_environment,
    peer_python,
    serving,
    stop,
)
from suite.workload import GENERATOR, ITL, OUTPUT_RATE, TTFT, NotSane, Outcome, Shape, first_model, play

RANKS = 2
PACED_MS = 40.0
PER_CORE = Measure("tok_s_per_core", "tok/s per core", "tok/s", higher=True, digits=0)
EVENTS = Measure("tokens_per_event", "tokens per event", "", digits=2)
MEASURES = (PER_CORE, OUTPUT_RATE, EVENTS, TTFT, ITL, GENERATOR)
SHAPE = Shape(64, 128, 128)

ROWS = (
    Row(
        "front",
        f"front end alone, {SHAPE.streams} streams, a token for each every {PACED_MS:.0f} ms",
        MEASURES,
        (Goal(PER_CORE, 3.0, TUNED, 3.0),),
        SHAPE,
        6,
    ),
    Row(
        "front-flood",
        f"front end alone, {SHAPE.streams} streams, tokens as fast as they go",
        MEASURES,
        (Goal(PER_CORE, 3.0, TUNED, 3.0),),
        SHAPE,
        3,
    ),
)


def _ours(model: str, port: int, rpc: int) -> contextlib.AbstractContextManager:
    command = [sys.executable, "-m", "dpi_engine", "serve", model, "--port", str(port)]
    command += ["--management-port", str(port + 1), "--data-parallel-rpc-port", str(rpc)]
    command += ["--data-parallel-protocol", "vllm", "--api-server-count", "1", *_group()]
    return serving(OURS, command, port, f"http://127.0.0.1:{port}/health", our_environment(), OUR_START_S)


def _group() -> list[str]:
    flags = ["--data-parallel-size", str(RANKS), "--data-parallel-size-local", "0"]
    return [*flags, "--data-parallel-address", "127.0.0.1", "--max-model-len", str(MAX_MODEL_LEN)]


def _theirs(port: int, rpc: int) -> contextlib.AbstractContextManager:
    command = [str(peer_python()), "-m", "vllm.entrypoints.cli.main", "serve", str(PEER / "models" / SMOLLM2_FOLDER)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--data-parallel-rpc-port", str(rpc)]
    command += ["--disable-uvicorn-access-log", "--api-server-count", "1", "--dtype", "bfloat16", *_group()]
    return serving(TUNED, command, port, f"http://127.0.0.1:{port}/health", peer_environment(True), PEER_START_S)


@contextlib.contextmanager
def stub_ranks(rpc: int, step_ms: float) -> Iterator[None]:
    """The ranks, for the length of the block; they join as soon as there is a head. Raises ServerFailed."""
    command = [sys.executable, str(Path(__file__).parent / "stub_engine.py"), "--head", f"tcp://127.0.0.1:{rpc}"]
    command += ["--ranks", str(RANKS), "--step-ms", str(step_ms)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        yield
        if process.poll() is not None:
            raise ServerFailed(f"the ranks without a model ended with code {process.returncode}")
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            stop(process)


@contextlib.contextmanager
def heads_up(context: Context, step_ms: float) -> Iterator[list[Side]]:
    """A head of ours and, where wanted, one of the peer's, each with ranks of its own."""
    with contextlib.ExitStack() as stack:
        found = []
        for name in (OURS, TUNED) if context.peer else (OURS,):
            first = free_ports(260)
            port, rpc = first, first + 2
            stack.enter_context(stub_ranks(rpc, step_ms))
            head = _ours(context.model or SMOLLM2, port, rpc) if name == OURS else _theirs(port, rpc)
            server = stack.enter_context(head)
            found.append(Side(name, server, first_model(server)))
        yield found


def per_core(outcome: Outcome, shape: Shape) -> Outcome:
    """With the rate per core that the front end's processes had, and how many tokens an event held."""
    values = outcome.values
    values[PER_CORE.key] = round(1000 / values["cpu_s_per_1000"], 1)
    values[EVENTS.key] = round(shape.count * shape.output_tokens / values["events"], 3)
    return outcome


def until_served(side: Side, prompts: list[list[int]]) -> None:
    """A head may answer /health before its ranks have joined."""
    end = time.monotonic() + 120
    while True:
        try:
            play(side.server, side.model, prompts, Shape(len(prompts), len(prompts[0]), 4), real_model=False)
            return
        except NotSane:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


def run(context: Context, rows: Sequence[Row]) -> None:
    """Those of ROWS that are wanted; heads are started anew for each, since the ranks' pace is theirs."""
    texts = texts_of(context.model or SMOLLM2)
    for row in rows:
        try:
            with heads_up(context, PACED_MS if row.key == "front" else 0.0) as sides:
                values: dict[str, dict[str, list[float]]] = {side.name: {} for side in sides}
                for side in sides:
                    until_served(side, texts.take(8, row.shape.input_tokens))
                shares = []
                for turn in range(context.rounds):
                    prompts = texts.take(row.shape.count, row.shape.input_tokens)
                    for side in sides if turn % 2 == 0 else sides[::-1]:
                        outcome = per_core(
                            play(side.server, side.model, prompts, row.shape, real_model=not context.model), row.shape
                        )
                        shares.append(outcome.values["others_share"])
                        for key, value in outcome.values.items():
                            values[side.name].setdefault(key, []).append(value)
            context.put(row, values, [f"{RANKS} ranks without a model, the same for both heads"])
        except (ServerFailed, NotSane, TimeoutError, OSError) as e:
            context.fail(row, str(e) or type(e).__name__)
