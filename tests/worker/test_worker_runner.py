"""The runner on plans made by hand: what it computes, appends and forgets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from worker_toys import VOCAB, BlindOps, ToyModel, ToyOps, greedy, new, plan, work

from dpi_engine.frontend.streams import engine_error
from dpi_engine.wire.messages import SamplingParams
from dpi_engine.worker.batch import PlanError
from dpi_engine.worker.random import uniforms
from dpi_engine.worker.runner import CPU_WARM_UP_TOKENS, Runner, RunnerAsleep


def make_runner(model=None, ops=None, **more):
    sizes = {"max_num_seqs": 8, "max_model_len": 120, "num_blocks": 64, "max_num_batched_tokens": 128, **more}
    return Runner(model or ToyModel(), ops or ToyOps(), **sizes)


def oracle(model: ToyModel, tokens: list[int], count: int) -> list[int]:
    out: list[int] = []
    for _ in range(count):
        out.append(int(model.logits_after(tokens + out).argmax()))
    return out


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def decode(runner: Runner, slot: int, length: int, count: int, blocks: list[int]) -> list[int]:
    """Greedy decode steps for one slot that knows `length` tokens, taking fresh blocks as needed."""
    out = []
    for i in range(count):
        fresh = [blocks.pop(0)] if (length + i) % 16 == 1 else []
        out += runner.execute(plan([work(slot, length + i - 1, 1, blocks=fresh)])).token_ids[0]
    return out


def test_prefill_and_decode_follow_the_sequence_through_scattered_blocks():
    runner, model = make_runner(), ToyModel()
    tokens = prompt_of(20)
    first = runner.execute(plan([work(3, 0, 20)], [new(3, tokens, [40, 7], greedy())])).token_ids[0]
    rest = decode(runner, 3, 21, 20, [55, 9, 12])
    assert first + rest == oracle(model, tokens, 21)


def test_a_prompt_in_chunks_samples_only_at_its_end():
    model = ToyModel()
    runner = make_runner(model)
    tokens = prompt_of(50)
    sequence = new(0, tokens, [5, 3, 9, 2], greedy())
    assert runner.execute(plan([work(0, 0, 17, sample=False)], [sequence])).token_ids == []
    assert runner.execute(plan([work(0, 17, 17, sample=False)])).token_ids == []
    assert runner.execute(plan([work(0, 34, 16)])).token_ids == [oracle(model, tokens, 1)]


def test_mixed_step_of_chunk_decode_and_new_sequence_keeps_the_order_of_the_plan():
    model = ToyModel()
    runner = make_runner(model)
    a, b, c = prompt_of(5, 1), prompt_of(40, 2), prompt_of(9, 3)
    out_a = runner.execute(plan([work(1, 0, 5)], [new(1, a, [1], greedy())])).token_ids[0]
    result = runner.execute(
        plan(
            [work(1, 5, 1), work(4, 0, 30, sample=False), work(0, 0, 9)],
            [new(4, b, [2, 3, 4], greedy()), new(0, c, [5], greedy())],
        )
    )
    assert [out_a[0], result.token_ids[0][0]] == oracle(model, a, 2)
    assert result.token_ids[1] == oracle(model, c, 1)
    assert len(result.token_ids) == 2
    step = model.steps[-1]
    assert (step.max_q, step.max_kv) == (30, 30)
    assert step.cu_q.tolist() == [0, 1, 31, 40]
    assert step.kv_lens.tolist() == [6, 30, 9]
    assert step.rows.tolist() == [0, 39]
    assert step.ids.dtype == step.positions.dtype == step.slots.dtype == step.rows.dtype == torch.int64
    assert step.block_tables.dtype == step.kv_lens.dtype == step.cu_q.dtype == torch.int32
    assert step.block_tables.is_contiguous() and step.block_tables.shape == (3, 2)


def test_cached_prefix_is_read_and_not_written():
    model = ToyModel()
    runner = make_runner(model)
    tokens = prompt_of(40)
    runner.execute(plan([work(0, 0, 40)], [new(0, tokens, [1, 2, 3], greedy())]))
    result = runner.execute(plan([work(1, 32, 8)], [new(1, tokens, [1, 2, 9], greedy())]))
    assert result.token_ids == [oracle(model, tokens, 1)]
    assert set((model.steps[-1].slots // 16).tolist()) == {9}


def test_slot_given_up_and_taken_again_in_one_plan_starts_clean():
    model = ToyModel()
    runner = make_runner(model)
    first = new(2, prompt_of(4), [1], greedy(allowed_token_ids=[5], presence_penalty=1.0, logprobs=1))
    assert runner.execute(plan([work(2, 0, 4)], [first])).token_ids == [[5]]
    tokens = prompt_of(6, 9)
    result = runner.execute(plan([work(2, 0, 6)], [new(2, tokens, [1], greedy())], released=[2]))
    assert result.token_ids == [oracle(model, tokens, 1)]
    assert result.logprobs is None


def test_resumed_sequence_goes_on_with_index_and_counts_of_its_outputs():
    tokens = prompt_of(6)
    params = SamplingParams(temperature=1.0, frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2)
    whole = make_runner()
    out = whole.execute(plan([work(0, 0, 6)], [new(0, tokens, [1, 2], params, seed=99)])).token_ids[0]
    for i in range(9):
        out += whole.execute(plan([work(0, 6 + i, 1)])).token_ids[0]
    resumed = make_runner()
    known = tokens + out[:4]
    again = resumed.execute(plan([work(5, 0, 10)], [new(5, known, [8, 4], params, prompt=6, seed=99)])).token_ids[0]
    for i in range(5):
        again += resumed.execute(plan([work(5, 10 + i, 1)])).token_ids[0]
    assert again == out[4:]


def test_every_output_index_draws_its_own_uniform():
    class Flat(ToyModel):
        def forward(self, step, caches):
            return torch.zeros(len(step.rows), VOCAB)

    runner = make_runner(Flat())
    out = runner.execute(plan([work(0, 0, 3)], [new(0, [1, 2, 3], [1], SamplingParams(), seed=12)])).token_ids[0]
    for i in range(8):
        out += runner.execute(plan([work(0, 3 + i, 1)])).token_ids[0]
    # All tokens are as likely, so the uniform is the token.
    assert out == (uniforms(np.full(9, 12, np.uint64), np.arange(9)) * VOCAB).astype(int).tolist()


@pytest.mark.parametrize("ops", [ToyOps(), BlindOps()], ids=["argmax finds NaN", "argmax skips NaN"])
@pytest.mark.parametrize("params", [greedy(), SamplingParams(temperature=0.8), greedy(logit_bias={3: 1.0}, logprobs=2)])
def test_not_a_number_fails_its_request_alone(ops, params):
    model = ToyModel()
    model.poison = {17}
    runner = make_runner(model, ops)
    good, bad = [1, 2, 3], [1, 17, 3]
    result = runner.execute(
        plan(
            [work(0, 0, 3), work(1, 0, 3), work(2, 0, 3)],
            [new(0, good, [1], greedy()), new(1, bad, [2], params), new(2, good, [3], greedy())],
        )
    )
    expected = oracle(model, good, 1)
    assert result.token_ids == [expected, [], expected]
    assert list(result.errors) == [1] and "not finite" in result.errors[1]
    assert engine_error(result.errors[1], None, 3).status == 500
    # The others go on; the failed one was not advanced.
    result = runner.execute(plan([work(0, 3, 1), work(2, 3, 1)], released=[1]))
    assert result.token_ids == [oracle(model, good, 2)[1:]] * 2 and not result.errors


def test_one_not_a_number_among_good_logits_is_found():
    class OneBad(ToyModel):
        def forward(self, step, caches):
            logits = super().forward(step, caches)
            logits[0, 3] = torch.nan
            return logits

    for ops in (ToyOps(), BlindOps()):
        for params in (greedy(), SamplingParams(temperature=1.0, top_k=5), SamplingParams(temperature=1.0)):
            runner = make_runner(OneBad(), ops)
            result = runner.execute(plan([work(0, 0, 3)], [new(0, [1, 2, 3], [1], params)]))
            assert list(result.errors) == [0]


def test_no_legal_token_names_the_masks():
    runner = make_runner()
    params = greedy(allowed_token_ids=[4], bad_words_token_ids=[[4]])
    result = runner.execute(plan([work(0, 0, 2)], [new(0, [1, 2], [1], params)]))
    assert result.token_ids == [[]] and "allowed_token_ids" in result.errors[0]
    told = engine_error(result.errors[0], None, 3)
    assert told.status == 400 and str(told).startswith("rank 3: no token may follow: ")


def test_prompt_logprobs_are_the_same_whole_and_in_chunks():
    model = ToyModel()
    tokens = prompt_of(45)
    params = greedy(prompt_logprobs=3)

    def run(chunks: list[int]):
        runner, at, ids, values, ranks = make_runner(ToyModel()), 0, [], [], []
        for count in chunks:
            entering = [new(0, tokens, [1, 2, 3], params)] if at == 0 else []
            last = at + count == 45
            result = runner.execute(plan([work(0, at, count, sample=last, prompt=True)], entering))
            if 0 in result.prompt_logprobs:
                ids += result.prompt_logprobs[0].token_ids
                values += result.prompt_logprobs[0].logprobs
                ranks += result.prompt_logprobs[0].ranks
            at += count
        return ids, values, ranks

    whole = run([45])
    assert whole == run([16, 16, 13]) == run([44, 1]) == run([1, 43, 1])
    ids, values, ranks = whole
    assert len(ids) == len(values) == len(ranks) == 44
    for i in range(44):
        logs = torch.log_softmax(model.logits_after(tokens[: i + 1]), 0)
        assert ids[i][0] == tokens[i + 1]
        assert values[i] == pytest.approx(logs[ids[i]].tolist(), abs=1e-5)
        assert ranks[i] == int((logs >= logs[tokens[i + 1]]).sum())
        assert values[i][1:] == pytest.approx(logs.topk(3).values.tolist(), abs=1e-5)


def test_plans_that_cannot_be_right_are_refused_by_name():
    runner = make_runner()
    runner.execute(plan([work(0, 0, 3)], [new(0, [1, 2, 3], [1], greedy())]))
    for bad, words in [
        (plan([work(0, 3, 2)]), "knows 4 tokens"),
        (plan([work(0, 3, 1, sample=False)]), "knows 4 tokens"),
        (plan([work(0, 3, 0)]), "chunks of"),
        (plan([work(1, 0, 20)], [new(1, prompt_of(20), [3], greedy())]), "1 blocks of 16"),
        (plan([work(8, 0, 1)], [new(8, [1], [3], greedy())]), "8 slots"),
        (plan([work(2, 0, 1)], [new(2, prompt_of(200), [3], greedy())]), "200 tokens"),
        (plan([work(0, 3, 1, blocks=list(range(1, 20)))]), "blocks"),
    ]:
        with pytest.raises(PlanError, match=words):
            runner.execute(bad)


def test_empty_plan_only_takes_and_gives_slots():
    runner = make_runner()
    result = runner.execute(plan([], [new(0, [1, 2, 3], [1], greedy())]))
    assert result.token_ids == [] and not result.errors


def test_dummy_and_warm_up_leave_batch_and_other_blocks_alone():
    model = ToyModel()
    runner = make_runner(model)
    tokens = prompt_of(10)
    first = runner.execute(plan([work(0, 0, 10)], [new(0, tokens, [1], greedy())])).token_ids[0]
    before = len(model.steps)
    runner.dummy()
    assert (model.steps[-1].slots < 16).all() and len(model.steps) == before + 1
    assert runner.warm_up() > 0
    assert {s.max_q for s in model.steps[before:]} == {1, CPU_WARM_UP_TOKENS} and all(
        (s.slots < 16).all() for s in model.steps[before:]
    )
    second = runner.execute(plan([work(0, 10, 1)])).token_ids[0]
    assert first + second == oracle(model, tokens, 2)


def test_sleep_drops_and_wake_restores():
    made = []

    def reload():
        made.append(ToyModel())
        return made[-1]

    runner = make_runner(reload=reload)
    tokens = prompt_of(10)
    first = plan([work(0, 0, 10)], [new(0, tokens, [1], greedy())])
    expected = runner.execute(first).token_ids
    for level, loads in ((1, 0), (2, 1)):
        runner.sleep(level)
        assert runner.asleep == level
        with pytest.raises(RunnerAsleep, match=f"level {level}"):
            runner.execute(first)
        with pytest.raises(RunnerAsleep):
            runner.dummy()
        runner.wake()
        assert runner.asleep == 0 and len(made) == loads
        assert runner.execute(first).token_ids == expected
    with pytest.raises(ValueError, match="sleep level 3"):
        runner.sleep(3)
    with pytest.raises(ValueError, match="no loader"):
        make_runner().sleep(2)
