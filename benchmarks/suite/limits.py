"""Job: which batch limit suits the peer best on this machine; its tuned runs have the best one (`servers.PEER_LIMITS`).

Not part of the table: it starts the peer anew for each limit. `--only limits`.
"""

from __future__ import annotations

from collections.abc import Sequence

from suite.context import Context, Row
from suite.machine import has_bf16
from suite.served import texts_of
from suite.servers import SMOLLM2, STREAMS_MAX, ServerFailed, peer
from suite.workload import OUTPUT_RATE, TTFT, NotSane, Shape, first_model, play

BATCHED_TOKENS = (1024, 2048, 4096, 8192)
SHAPE = Shape(32, 128, 128)
ROWS = (Row("limits", "the peer tuned, 32 streams, by tokens of a step", (OUTPUT_RATE, TTFT), (), SHAPE, 40),)


def run(context: Context, rows: Sequence[Row]) -> None:
    texts = texts_of(SMOLLM2)
    sides: dict[str, dict[str, list[float]]] = {}
    try:
        for tokens in BATCHED_TOKENS:
            limits = ("--max-num-seqs", str(STREAMS_MAX), "--max-num-batched-tokens", str(tokens))
            with peer(dtype="bfloat16" if has_bf16() else "float32", limits=limits) as server:
                model = first_model(server)
                values = sides.setdefault(f"{tokens} tokens", {})
                play(server, model, texts.take(8, 128), Shape(8, 128, 8), real_model=False)
                for _ in range(context.rounds):
                    outcome = play(server, model, texts.take(SHAPE.count, SHAPE.input_tokens), SHAPE)
                    for key, value in outcome.values.items():
                        values.setdefault(key, []).append(value)
    except (ServerFailed, NotSane, TimeoutError, OSError) as e:
        context.fail(rows[0], str(e) or type(e).__name__)
    if sides:
        context.put(rows[0], sides)
