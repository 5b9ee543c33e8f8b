"""What ends a request, and what the step that ends it delivers."""

from __future__ import annotations

import pytest
from core_kv_model import Bench, config, expected_outputs

from dpi_engine.core.integrity import check_integrity
from dpi_engine.core.plan import StepResult
from dpi_engine.wire.messages import EngineCoreRequest, FinishReason, SamplingParams

PROMPT = [3, 1, 4, 1, 1]


def stop_case(**sampling: object) -> tuple[int, FinishReason | None, int | str | None]:
    """Outputs of seed 1 after PROMPT are fixed; `at` k names the k-th of them."""
    values = {"max_tokens": 8, "seed": 1, **sampling}
    bench = Bench(config(max_model_len=16))
    record = bench.add(
        EngineCoreRequest("a", PROMPT, sampling_params=SamplingParams(**values))  # type: ignore[arg-type]
    )
    bench.drain()
    return len(record.tokens), record.reason, record.stop_reason


FREE = expected_outputs(
    EngineCoreRequest("a", PROMPT, sampling_params=SamplingParams(max_tokens=20)), 1, config(max_model_len=64)
)[0]


@pytest.mark.parametrize(
    ("sampling", "length", "reason", "stop_reason"),
    [
        ({}, 8, FinishReason.LENGTH, None),
        ({"max_tokens": 1}, 1, FinishReason.LENGTH, None),
        ({"max_tokens": None}, 11, FinishReason.LENGTH, None),
        ({"max_tokens": 100}, 11, FinishReason.LENGTH, None),
        ({"eos_token_id": FREE[3]}, 4, FinishReason.STOP, None),
        ({"eos_token_id": FREE[3], "all_stop_token_ids": [FREE[3]]}, 4, FinishReason.STOP, None),
        ({"eos_token_id": FREE[3], "ignore_eos": True}, 8, FinishReason.LENGTH, None),
        ({"all_stop_token_ids": [FREE[3]], "ignore_eos": True}, 8, FinishReason.LENGTH, None),
        ({"stop_token_ids": [FREE[2]]}, 3, FinishReason.STOP, FREE[2]),
        ({"stop_token_ids": [FREE[2]], "ignore_eos": True, "eos_token_id": FREE[2]}, 3, FinishReason.STOP, FREE[2]),
        ({"stop_token_ids": [FREE[2]], "eos_token_id": FREE[2]}, 3, FinishReason.STOP, None),
        ({"all_stop_token_ids": [FREE[2]]}, 3, FinishReason.STOP, FREE[2]),
        ({"stop_token_ids": [FREE[7]]}, 8, FinishReason.STOP, FREE[7]),
        ({"eos_token_id": FREE[0]}, 1, FinishReason.STOP, None),
    ],
)
def test_what_ends_a_request(
    sampling: dict[str, object], length: int, reason: FinishReason, stop_reason: int | None
) -> None:
    assert len(set(FREE[:8])) == 8
    assert stop_case(**sampling) == (length, reason, stop_reason)


def apply_tokens(tokens: list[int], **sampling: object) -> tuple[list[int], FinishReason | None, int | str | None]:
    """What comes out when the first step of a one-token prompt yields `tokens` at once."""
    bench = Bench(config())
    params = SamplingParams(**{"max_tokens": 10, **sampling})  # type: ignore[arg-type]
    bench.scheduler.add(EngineCoreRequest("a", [1], sampling_params=params), 0.0)
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None
    out = bench.scheduler.apply(plan, StepResult(step=1, token_ids=[tokens]), 0.0)
    check_integrity(bench.scheduler)
    (output,) = out.outputs[0]
    assert out.finished == ({0: ["a"]} if output.finish_reason is not None else {})
    return output.new_token_ids, output.finish_reason, output.stop_reason


@pytest.mark.parametrize(
    ("tokens", "sampling", "taken", "reason"),
    [
        ([5, 6, 7], {}, [5, 6, 7], None),
        ([5, 6, 7], {"stop_token_ids": [6]}, [5, 6], FinishReason.STOP),
        ([5, 6, 7], {"eos_token_id": 5}, [5], FinishReason.STOP),
        ([5, 6, 7], {"max_tokens": 2}, [5, 6], FinishReason.LENGTH),
        ([6, 6, 6], {"stop_token_ids": [6], "min_tokens": 1}, [6, 6], FinishReason.STOP),
        ([6, 6, 6], {"eos_token_id": 6, "min_tokens": 3}, [6, 6, 6], None),
        ([6, 6, 6], {"eos_token_id": 6, "min_tokens": 2, "max_tokens": 2}, [6, 6], FinishReason.LENGTH),
    ],
)
def test_a_stop_discards_the_later_tokens_of_its_step(
    tokens: list[int], sampling: dict[str, object], taken: list[int], reason: FinishReason | None
) -> None:
    got = apply_tokens(tokens, **sampling)
    assert got[:2] == (taken, reason)


def test_log_probabilities_are_cut_with_the_tokens() -> None:
    bench = Bench(config(), tokens_per_step=lambda context: 3)
    record = bench.add_prompt("a", [1, 2], logprobs=0, max_tokens=4)
    bench.drain()
    assert len(record.tokens) == 4 and record.logprob_tokens == record.tokens


def test_a_step_that_yields_nothing_fails_that_request_alone() -> None:
    assert apply_tokens([])[1] is FinishReason.ERROR
