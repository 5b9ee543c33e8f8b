"""What is refused at the door, by code, and that a refusal changes nothing."""

from __future__ import annotations

import math

import pytest

from dpi_engine.core.limits import SchedulerConfig
from dpi_engine.core.scheduler import Scheduler
from dpi_engine.core.validation import RequestRefused
from dpi_engine.wire.messages import EngineCoreRequest, SamplingParams

CONFIG = {
    "num_blocks": 6,
    "block_size": 4,
    "max_model_len": 16,
    "vocab_size": 50,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
}


def refused(scheduler: Scheduler, request: EngineCoreRequest) -> RequestRefused:
    before = scheduler.stats()
    with pytest.raises(RequestRefused) as caught:
        scheduler.add(request, 0.0)
    assert scheduler.stats() == before and scheduler.take_finished() == {}
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "code", "says"),
    [
        ([], "empty_prompt", "empty"),
        (None, "empty_prompt", "empty"),
        ([1, 50], "token_out_of_range", "50"),
        ([1, -1], "token_out_of_range", "-1"),
        ([1] * 16, "prompt_too_long", "16 tokens"),
        ([1] * 400, "prompt_too_long", "400 tokens"),
    ],
)
def test_prompts(prompt: list[int] | None, code: str, says: str) -> None:
    error = refused(
        Scheduler(SchedulerConfig(**CONFIG)), EngineCoreRequest("a", prompt, sampling_params=SamplingParams())
    )
    assert error.code == code and says in error.message


@pytest.mark.parametrize(("length", "fits"), [(19, True), (20, False), (21, False)])
def test_a_prompt_that_can_never_fit_the_pool(length: int, fits: bool) -> None:
    scheduler = Scheduler(SchedulerConfig(**{**CONFIG, "max_model_len": 1000}))
    request = EngineCoreRequest("a", [1] * length, sampling_params=SamplingParams())
    if fits:
        scheduler.add(request, 0.0)
        assert scheduler.num_waiting == 1
    else:
        error = refused(scheduler, request)
        assert error.code == "does_not_fit" and "20 tokens" in error.message


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 0},
        {"max_tokens": -3},
        {"min_tokens": -1},
        {"min_tokens": 5, "max_tokens": 4},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"top_k": -2},
        {"min_p": 1.5},
        {"min_p": math.nan},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"logprobs": 21},
        {"logprobs": -1},
        {"prompt_logprobs": 21},
        {"allowed_token_ids": []},
        {"logit_bias": {1: math.nan}},
        {"bad_words_token_ids": [[]]},
    ],
)
def test_sampling_parameters(changes: dict[str, object]) -> None:
    request = EngineCoreRequest("a", [1], sampling_params=SamplingParams(**changes))  # type: ignore[arg-type]
    error = refused(Scheduler(SchedulerConfig(**CONFIG)), request)
    assert error.code == "invalid_sampling"
    assert any(name in error.message for name in changes) and "expected" in error.message


@pytest.mark.parametrize(
    "changes",
    [
        {"stop_token_ids": [50]},
        {"allowed_token_ids": [-1]},
        {"logit_bias": {50: 1.0}},
        {"bad_words_token_ids": [[1, 77]]},
    ],
)
def test_token_ids_in_sampling_parameters(changes: dict[str, object]) -> None:
    request = EngineCoreRequest("a", [1], sampling_params=SamplingParams(**changes))  # type: ignore[arg-type]
    error = refused(Scheduler(SchedulerConfig(**CONFIG)), request)
    assert error.code == "token_out_of_range" and next(iter(changes)) in error.message


@pytest.mark.parametrize(
    "changes",
    [
        {"pooling_params": {"task": "embed"}},
        {"mm_features": [{}]},
        {"prompt_embeds": b"x"},
        {"lora_request": {"name": "x"}},
        {"resumable": True},
        {"sampling_params": None},
    ],
)
def test_kinds_of_request(changes: dict[str, object]) -> None:
    fields: dict[str, object] = {"sampling_params": SamplingParams(), **changes}
    error = refused(Scheduler(SchedulerConfig(**CONFIG)), EngineCoreRequest("a", [1], **fields))  # type: ignore[arg-type]
    assert error.code == "unsupported_request" and next(iter(changes)) in error.message


def test_what_vllm_sends_for_no_such_thing_is_taken() -> None:
    request = EngineCoreRequest(
        "a", [1], [], SamplingParams(bad_words=[], stop_token_ids=[], top_k=-1, max_tokens=None)
    )
    scheduler = Scheduler(SchedulerConfig(**CONFIG))
    scheduler.add(request, 0.0)
    assert scheduler.num_waiting == 1


@pytest.mark.parametrize(
    ("outputs", "max_tokens", "code"),
    [
        ([1, 2, 3], 3, "nothing_to_generate"),
        ([1] * 14, None, "nothing_to_generate"),
        ([1, 99], None, "token_out_of_range"),
    ],
)
def test_replays(outputs: list[int], max_tokens: int | None, code: str) -> None:
    request = EngineCoreRequest(
        "a", [1, 2], sampling_params=SamplingParams(max_tokens=max_tokens), output_token_ids=outputs
    )
    assert refused(Scheduler(SchedulerConfig(**CONFIG)), request).code == code


def test_a_live_id_is_refused_and_its_request_goes_on() -> None:
    scheduler = Scheduler(SchedulerConfig(**CONFIG))
    request = EngineCoreRequest("a", [1], sampling_params=SamplingParams())
    scheduler.add(request, 0.0)
    assert refused(scheduler, request).code == "duplicate_request"
    assert scheduler.schedule(0.0) is not None
    assert refused(scheduler, request).code == "duplicate_request"


def test_a_full_queue_refuses() -> None:
    scheduler = Scheduler(SchedulerConfig(**CONFIG, max_queued=2))
    for name in "ab":
        scheduler.add(EngineCoreRequest(name, [1], sampling_params=SamplingParams()), 0.0)
    assert refused(scheduler, EngineCoreRequest("c", [1], sampling_params=SamplingParams())).code == "queue_full"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_blocks", 1),
        ("block_size", 0),
        ("max_model_len", 1),
        ("vocab_size", 0),
        ("max_num_seqs", 0),
        ("long_prefill_token_threshold", -1),
        ("max_num_batched_tokens", 1),
    ],
)
def test_settings_that_no_schedule_can_satisfy(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        SchedulerConfig(**{**CONFIG, name: value})
