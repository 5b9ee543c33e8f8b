"""Scheduler and runner together: the same text however the work is cut, preempted, cached; failures; sleep."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from worker_toys import VOCAB, ToyModel, ToyOps, greedy

from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.core.engine import MAX_FAILED_STEPS, EngineFailed
from dpi_engine.models.registry import load_model
from dpi_engine.ops.torch_ref import TorchOps
from dpi_engine.wire.messages import EngineCoreRequest, FinishReason, SamplingParams
from dpi_engine.worker.offline import GenerationFailed, OfflineEngine

ROOMY = {"num_blocks": 400, "max_model_len": 256, "max_num_seqs": 32, "max_num_batched_tokens": 512}
MODES = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 19, "max_num_seqs": 8},
    "preempted": {"num_blocks": 14, "max_num_seqs": 8, "enable_prefix_caching": False},
    "preempted, chunked and cached": {"num_blocks": 14, "max_num_batched_tokens": 16, "max_num_seqs": 6},
}


def prompts_sharing_a_prefix(count: int, vocab: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, vocab, 33).tolist()
    own = [rng.integers(3, vocab, int(n)).tolist() for n in rng.integers(1, 45, count)]
    return [shared + tail if i % 2 else tail for i, tail in enumerate(own)]


def toy_engine(model: ToyModel | None = None, **more) -> OfflineEngine:
    return OfflineEngine(model or ToyModel(), ToyOps(), **{**ROOMY, **more})


class Chunks:
    """Counts the steps in which each request's prompt was computed."""

    def __init__(self, engine: OfflineEngine) -> None:
        self.parts: Counter[int] = Counter()
        execute = engine.runner.execute

        def counting(plan):
            for w in plan.work:
                self.parts[w.slot] += not w.sample
            return execute(plan)

        engine.runner.execute = counting  # type: ignore[method-assign]


def check_mode(name: str, engine: OfflineEngine, chunks: Chunks, results) -> None:
    """The mode did what its name says, else equal text would prove nothing."""
    stats = engine.core.stats()
    assert (stats.preemptions > 0) == ("preempted" in name)
    if "chunked" in name:
        assert sum(chunks.parts.values()) > 1
    if "cached" in name:
        assert sum(r.prefill.num_cached_tokens for r in results) > 0
    assert stats.running == stats.waiting == 0 and stats.kv_usage == 0


def toy_params(i: int) -> SamplingParams:
    kinds = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.9, top_p=0.8, logprobs=1),
        SamplingParams(temperature=1.2, top_k=20, repetition_penalty=1.3, frequency_penalty=0.4),
        SamplingParams(temperature=0.0, presence_penalty=1.5, bad_words_token_ids=[[5], [7, 9]], logit_bias={4: 1.0}),
        SamplingParams(temperature=0.7, min_p=0.1, min_tokens=5, stop_token_ids=list(range(0, VOCAB, 3))),
        SamplingParams(temperature=1.0, prompt_logprobs=2),
    ]
    params = kinds[i % len(kinds)]
    params.max_tokens, params.seed = 30, 100 + i
    return params


@pytest.mark.parametrize("name", MODES)
def test_every_kind_of_request_comes_out_the_same_in_every_mode(name):
    prompts = prompts_sharing_a_prefix(18, VOCAB)
    params = [toy_params(i) for i in range(18)]
    expected = [toy_engine(enable_prefix_caching=False).run([p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    engine = toy_engine(**MODES[name])
    chunks = Chunks(engine)
    results = engine.run(prompts, params)
    check_mode(name, engine, chunks, results)
    for got, want in zip(results, expected, strict=True):
        assert got.token_ids == want.token_ids and got.finish_reason == want.finish_reason
        assert got.logprobs == want.logprobs and got.prompt_logprobs == want.prompt_logprobs
    assert all(r.prompt_logprobs is not None for r in results[5::6])
    assert {r.finish_reason for r in results} == {FinishReason.STOP, FinishReason.LENGTH}
    # Another seed, another text: the seeds do decide.
    params[1].seed += 1
    assert engine.run([prompts[1]], params[1])[0].token_ids != expected[1].token_ids


@pytest.fixture(scope="module")
def decoder():
    spec = ModelSpec(
        architecture="Qwen3ForCausalLM",
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=512,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        qk_norm=True,
        dtype="float32",
    )
    ops = TorchOps(torch.device("cpu"), torch.float32)
    return load_model("", spec, ops, load_format="dummy", seed=3), ops


@pytest.mark.parametrize("name", MODES)
def test_greedy_text_of_a_decoder_is_the_same_in_every_mode(decoder, name):
    model, ops = decoder
    prompts = prompts_sharing_a_prefix(12, 512, seed=4)
    whole = OfflineEngine(model, ops, **{**ROOMY, "enable_prefix_caching": False})
    expected = [whole.run([p], greedy(max_tokens=24, logprobs=2))[0] for p in prompts]
    engine = OfflineEngine(model, ops, **{**ROOMY, **MODES[name]})
    chunks = Chunks(engine)
    results = engine.run(prompts, greedy(max_tokens=24))
    check_mode(name, engine, chunks, results)
    close = 0
    for got, want in zip(results, expected, strict=True):
        if min(rows.logprobs[0][1] - rows.logprobs[0][2] for rows in want.logprobs) < 1e-4:
            close += 1
            continue
        assert got.token_ids == want.token_ids
    assert close <= 2 and len({tuple(r.token_ids) for r in results}) > 6


def test_replay_of_a_half_done_request_goes_on_as_if_nothing_had_happened():
    prompt = list(range(10, 30))
    params = SamplingParams(temperature=1.0, presence_penalty=0.5, min_tokens=8, max_tokens=20, seed=5)
    whole = toy_engine().generate([prompt], params)[0]
    engine = toy_engine()
    engine.core.add(EngineCoreRequest("r", prompt, sampling_params=params, output_token_ids=whole[:7]), 0.0)
    tail, index = [], []
    while engine.core.has_work():
        for output in engine.core.step(1.0).outputs[0]:
            tail += output.new_token_ids
            index.append(output.output_index)
    assert tail == whole[7:] and index[0] == 7


def test_not_a_number_ends_one_request_and_its_blocks_are_not_reused_as_prefix():
    model = ToyModel()
    model.poison = {17}
    engine = toy_engine(model)
    bad, good = [1] * 20 + [17] + [2] * 30, [1] * 20 + [18] + [2] * 30
    results = engine.run([bad, good], greedy(max_tokens=5))
    assert results[0].finish_reason is FinishReason.ERROR and "not finite" in results[0].error
    assert results[1].error is None and len(results[1].token_ids) == 5
    with pytest.raises(GenerationFailed, match="not finite"):
        engine.generate([bad], greedy(max_tokens=5))
    assert engine.core.stats().kv_usage == 0


class Breaking(ToyModel):
    """Raises in the passes whose number is in `broken`."""

    def __init__(self, broken: set[int]) -> None:
        super().__init__()
        self.broken = broken
        self.passes = 0

    def forward(self, step, caches):
        self.passes += 1
        if self.passes in self.broken:
            raise RuntimeError("out of memory in the kernel")
        return super().forward(step, caches)


def test_failed_step_ends_its_requests_and_the_engine_goes_on():
    engine = toy_engine(Breaking({3}))
    result = engine.run([[1, 2, 3]], greedy(max_tokens=10))[0]
    assert result.finish_reason is FinishReason.ERROR and "out of memory in the kernel" in result.error
    assert len(result.token_ids) == 2
    assert engine.generate([[1, 2, 3]], greedy(max_tokens=10)) == toy_engine().generate(
        [[1, 2, 3]], greedy(max_tokens=10)
    )


def test_steps_that_keep_failing_end_the_engine():
    engine = toy_engine(Breaking(set(range(100))))
    for _ in range(MAX_FAILED_STEPS - 1):
        assert engine.run([[1, 2, 3]], greedy())[0].error
    with pytest.raises(EngineFailed, match=f"{MAX_FAILED_STEPS} steps in a row"):
        engine.run([[1, 2, 3]], greedy())


def test_abort_while_a_step_computes_drops_its_output():
    engine = toy_engine()
    core = engine.core
    for name in ("stays", "goes"):
        core.add(EngineCoreRequest(name, [1, 2, 3], sampling_params=greedy(max_tokens=3)), 0.0)
    core.step(1.0)
    out = core.step(2.0, before_apply=lambda: core.abort(["goes"]))
    assert [o.request_id for o in out.outputs[0]] == ["stays"]
    assert out.finished == {0: ["goes"]}
    out = core.step(3.0)
    assert out.finished == {0: ["stays"]} and not core.has_work()
    core.add(EngineCoreRequest("later", [1], sampling_params=greedy()), 4.0)
    assert core.abort(["later", "unknown"]) == ["later"]
    out = core.step(5.0)
    assert not out.outputs and out.finished == {0: ["later"]}


def test_sleep_keeps_requests_and_wake_goes_on_with_the_same_text():
    prompt, params = list(range(40)), greedy(max_tokens=12)
    expected = toy_engine().generate([prompt], params)[0]
    engine = toy_engine()
    core = engine.core
    core.add(EngineCoreRequest("r", prompt, sampling_params=params), 0.0)
    got = [core.step(1.0).outputs[0][0].new_token_ids[0] for _ in range(5)]
    core.sleep(1, 2.0)
    assert not core.has_work() and not core.step(3.0)
    with pytest.raises(ValueError, match="no loader"):
        core.sleep(2, 3.0)
    core.wake()
    while core.has_work():
        got += core.step(4.0).outputs[0][0].new_token_ids
    assert got == expected
    # What was cached before is gone and must not be found.
    result = engine.run([prompt], params)[0]
    assert result.token_ids == expected


def test_times_of_a_step_cover_its_parts():
    engine = toy_engine()
    engine.generate([[1, 2, 3]], greedy(max_tokens=2))
    times = engine.core.times
    assert min(times.schedule, times.prepare, times.forward, times.sample, times.apply) > 0
