"""Each sampling parameter against a plain oracle, distributions by chi-square with fixed seeds, and independence of the
batch."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from worker_toys import ToyOps, new

from dpi_engine.wire.messages import SamplingParams
from dpi_engine.worker import draw as draw_module
from dpi_engine.worker.batch import Batch
from dpi_engine.worker.random import uniforms
from dpi_engine.worker.rows import GROUP, RowBuffer
from dpi_engine.worker.sampling import Sampler
from dpi_engine.worker.slot_params import SlotParams

DEVICE = os.environ.get("DPI_TEST_DEVICE", "cpu")
"""Where logits lie; what comes out is compared on the CPU."""


class Bench:
    """Sampler over `n` slots of a `vocab`-token model; logits are given directly."""

    def __init__(self, vocab: int, n: int = 64, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> None:
        self.device = device
        self.batch = Batch(max_num_seqs=n, max_model_len=256, max_num_batched_tokens=64, device=torch.device(device))
        self.params = SlotParams(n, vocab)
        self.sampler = Sampler(ToyOps(dtype, device), self.batch, self.params)

    def enter(self, slot: int, params: SamplingParams, prompt=(1,), outputs=(), seed: int = 0) -> None:
        sequence = new(slot, [*prompt, *outputs], [1], params, prompt=len(prompt), seed=seed)
        self.batch._enter(sequence)
        self.params.set(sequence)

    def sample(self, logits: torch.Tensor, slots=None, index=None):
        slots = np.arange(len(logits)) if slots is None else np.array(slots)
        index = self.batch.lengths[slots] - self.batch.prompt_lengths[slots] if index is None else np.array(index)
        return self.sampler.sample(logits.to(self.device), slots, index)


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def probabilities(row: torch.Tensor, p: SamplingParams) -> np.ndarray:
    """The distribution by definition, in float64: temperature, min-p, top-k (ties stay), top-p."""
    z = row.double().numpy() / p.temperature
    w = np.exp(z - z.max())
    w /= w.sum()
    w[w < p.min_p * w.max()] = 0
    if 0 < p.top_k < len(w):
        w[w < np.sort(w)[-p.top_k]] = 0
    w /= w.sum()
    order = np.argsort(-w, kind="stable")
    before = np.cumsum(w[order]) - w[order]
    w[order[before >= p.top_p]] = 0
    return w / w.sum()


CASES = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.4),
    "hot": SamplingParams(temperature=2.5),
    "top_k": SamplingParams(top_k=7),
    "top_k 1": SamplingParams(top_k=1),
    "top_k is the vocabulary": SamplingParams(top_k=300),
    "top_k -1": SamplingParams(top_k=-1),
    "top_k many": SamplingParams(top_k=250, temperature=3.0),
    "top_p": SamplingParams(top_p=0.7),
    "top_p tiny": SamplingParams(top_p=1e-6),
    "top_p near 1": SamplingParams(top_p=0.999, temperature=2.0),
    "min_p": SamplingParams(min_p=0.08),
    "min_p and top_p": SamplingParams(min_p=0.02, top_p=0.8, temperature=1.3),
    "all of them": SamplingParams(temperature=0.8, top_k=12, top_p=0.9, min_p=0.03),
}


@pytest.mark.parametrize("first_try", [256, 2], ids=["nucleus found at once", "nucleus by histogram"])
@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution(name, first_try, monkeypatch):
    monkeypatch.setattr(draw_module, "FIRST_TRY", first_try)
    params, vocab, draws = CASES[name], 300, 6000
    row = random_logits(1, vocab, seed=5)[0]
    expected = probabilities(row, params)
    bench = Bench(vocab, n=1)
    bench.enter(0, params, seed=42)
    logits = row.expand(500, vocab)
    tokens = np.concatenate(
        [bench.sample(logits, [0] * 500, np.arange(i, i + 500)).tokens for i in range(0, draws, 500)]
    )
    counts = np.bincount(tokens, minlength=vocab)
    assert counts[expected == 0].sum() == 0
    big = expected * draws >= 5
    seen = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum()) * draws
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    chi = ((seen - wanted) ** 2 / wanted).sum()
    freedom = max(len(seen) - 1, 1)
    # Wilson-Hilferty: the 99.9 % point of chi-square. The seed is fixed, so this either always holds or never.
    assert chi < freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3


def test_uniforms_are_uniform_and_streams_of_neighbouring_seeds_differ():
    index = np.arange(20000)
    one = uniforms(np.full(20000, 7, np.uint64), index)
    many = uniforms(index.astype(np.uint64), np.zeros(20000, np.int64))
    for u in (one, many):
        counts = np.bincount((u * 50).astype(int), minlength=50)
        assert ((counts - 400) ** 2 / 400).sum() < 85.4  # 99.9 % at 49
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(one, uniforms(np.full(20000, 8, np.uint64), index))[0, 1]) < 0.02
    assert (one >= 0).all() and (one < 1).all()


def mixed_params(i: int) -> SamplingParams:
    kinds = [*CASES.values(), SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, repetition_penalty=1.3)]
    kinds += [SamplingParams(logit_bias={3: 2.0}, top_p=0.9), SamplingParams(temperature=0.0, frequency_penalty=0.5)]
    return kinds[i % len(kinds)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [300, 5000])
def test_a_row_draws_the_same_alone_and_in_a_batch_of_32(dtype, vocab):
    logits = random_logits(32, vocab, seed=3, scale=2.0).to(dtype)
    bench = Bench(vocab, dtype=dtype)
    for i in range(32):
        bench.enter(i, mixed_params(i), prompt=range(1, 9), outputs=range(i % 5), seed=1000 + i)
    together = bench.sample(logits).tokens
    for i in range(32):
        alone = Bench(vocab, n=3, dtype=dtype)
        alone.enter(2, mixed_params(i), prompt=range(1, 9), outputs=range(i % 5), seed=1000 + i)
        assert alone.sample(logits[i : i + 1], [2]).tokens[0] == together[i], i
    order = np.random.default_rng(0).permutation(32)
    assert (bench.sample(logits[order], order).tokens == together[order]).all()


def test_seed_and_output_index_alone_decide_and_any_int_is_a_seed():
    logits = random_logits(1, 300, scale=0.5).expand(8, 300)
    seeds = [0, 1, -1, 2**64 - 1, 2**63, 2**70 + 5, 5, 0]
    bench = Bench(300)
    for slot, seed in enumerate(seeds):
        bench.enter(slot, SamplingParams(), seed=seed)
    tokens = [bench.sample(logits, index=[i] * 8).tokens.tolist() for i in range(20)]
    columns = [tuple(t[i] for t in tokens) for i in range(8)]
    assert columns[0] == columns[7] and columns[2] == columns[3] and columns[5] == columns[6]
    assert len(set(columns)) == 5


def test_temperatures_below_the_threshold_are_greedy():
    logits = random_logits(3, 300, scale=0.01)
    bench = Bench(300)
    for slot, t in enumerate((0.0, 1e-6, 9e-6)):
        bench.enter(slot, SamplingParams(temperature=t, top_k=3, seed=1))
    assert bench.sample(logits).tokens.tolist() == logits.argmax(1).tolist()


def test_ties_take_the_lowest_id_when_greedy_and_all_take_part_in_top_k():
    logits = torch.zeros(1, 300)
    logits[0, [40, 41, 200]] = 3.0
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logit_bias={1: 0.5})):
        bench = Bench(300)
        bench.enter(0, params)
        assert bench.sample(logits).tokens.tolist() == [40]
    bench = Bench(300)
    bench.enter(0, SamplingParams(top_k=1))
    tokens = bench.sample(logits.expand(60, 300), [0] * 60, np.arange(60)).tokens
    assert set(tokens.tolist()) == {40, 41, 200}


def penalized(row: torch.Tensor, p: SamplingParams, prompt: list[int], outputs: list[int]) -> torch.Tensor:
    z = row.clone()
    for t in set(prompt) | set(outputs):
        z[t] = z[t] / p.repetition_penalty if z[t] > 0 else z[t] * p.repetition_penalty
    for t in set(outputs):
        z[t] -= p.frequency_penalty * outputs.count(t) + p.presence_penalty
    return z


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(repetition_penalty=0.6),
        SamplingParams(frequency_penalty=0.9),
        SamplingParams(presence_penalty=1.1),
        SamplingParams(presence_penalty=-0.5, frequency_penalty=-0.3, repetition_penalty=1.2),
    ],
)
def test_penalties(params):
    vocab = 100
    rng = np.random.default_rng(1)
    prompt, outputs = rng.integers(0, 40, 30).tolist(), rng.integers(20, 60, 25).tolist()
    bench = Bench(vocab, n=4)
    params.temperature = 0.0
    bench.enter(1, params, prompt, outputs[:10])
    for token in outputs[10:]:  # counted as they come, as the runner does
        bench.params.seen[1].add(token)
        bench.batch.append(np.array([1]), np.array([token]))
    logits = random_logits(1, vocab, seed=8)
    rows = RowBuffer(vocab, torch.device(DEVICE)).load(logits)
    bench.sampler._penalize(rows, np.array([0]), np.array([1]))
    expected = penalized(logits[0], params, prompt, outputs)
    torch.testing.assert_close(rows.z[0, :vocab].cpu(), expected)
    assert bench.sample(logits, [1]).tokens[0] == expected.argmax()


def test_prompt_tokens_count_for_repetition_only():
    logits = torch.zeros(1, 50)
    logits[0, 7], logits[0, 9] = 2.0, 1.9
    for params, expected in [
        (SamplingParams(temperature=0, presence_penalty=2.0), 7),
        (SamplingParams(temperature=0, frequency_penalty=2.0), 7),
        (SamplingParams(temperature=0, repetition_penalty=2.0), 9),
    ]:
        bench = Bench(50)
        bench.enter(0, params, prompt=[7])
        assert bench.sample(logits).tokens.tolist() == [expected]


def test_logit_bias_allowed_tokens_and_ids_outside_the_vocabulary():
    logits = random_logits(4, 300)
    bench = Bench(300)
    bench.enter(0, SamplingParams(temperature=0, logit_bias={250: 100.0, 999: 100.0, -1: 100.0}))
    bench.enter(1, SamplingParams(temperature=0, logit_bias={int(logits[1].argmax()): -100.0}))
    bench.enter(2, SamplingParams(temperature=0, allowed_token_ids=[5, 17, 400, 63]))
    bench.enter(3, SamplingParams(temperature=0, allowed_token_ids=[400]))
    out = bench.sample(logits)
    assert out.tokens[0] == 250
    assert out.tokens[1] == logits[1].topk(2).indices[1]
    assert out.tokens[2] == max((5, 17, 63), key=lambda t: logits[2, t])
    assert list(out.errors) == [3]


def test_min_tokens_masks_every_stop_until_reached():
    logits = torch.zeros(1, 300)
    logits[0, 2], logits[0, 9], logits[0, 11] = 5, 4, 3
    params = SamplingParams(temperature=0, min_tokens=3, eos_token_id=2, stop_token_ids=[9], all_stop_token_ids=[2, 9])
    for outputs, expected in (((), 11), ((11,), 11), ((11, 11), 11), ((11, 11, 11), 2)):
        bench = Bench(300)
        bench.enter(0, params, outputs=outputs)
        assert bench.sample(logits).tokens.tolist() == [expected]


def test_ignored_eos_is_not_masked_by_min_tokens():
    logits = torch.zeros(1, 300)
    logits[0, 2] = 5
    bench = Bench(300)
    bench.enter(0, SamplingParams(temperature=0, min_tokens=3, eos_token_id=2, ignore_eos=True))
    assert bench.sample(logits).tokens.tolist() == [2]


def test_bad_words_of_one_and_of_many_tokens():
    logits = torch.zeros(1, 300)
    logits[0, 20], logits[0, 21], logits[0, 22] = 5, 4, 3
    params = SamplingParams(temperature=0, bad_words_token_ids=[[21], [7, 8, 20], [8, 22, 23]])
    for prompt, outputs, expected in [
        ([1], [], 20),
        ([1], [8], 20),
        ([1], [7, 8], 22),
        ([1], [7, 8, 9], 20),
        ([7, 8], [], 20),  # words are looked for in the output alone
        ([7], [8], 20),
    ]:
        bench = Bench(300)
        bench.enter(0, params, prompt=prompt, outputs=outputs)
        assert bench.sample(logits).tokens.tolist() == [expected], outputs


def test_edits_come_before_penalties_and_temperature():
    # 2 + bias 4 = 6, halved by the penalty is 3, below 3.5; were the bias last it would be 5.
    logits = torch.zeros(1, 64)
    logits[0, 5], logits[0, 6] = 2.0, 3.5
    bench = Bench(64)
    bench.enter(0, SamplingParams(temperature=0, logit_bias={5: 4.0}, repetition_penalty=2.0), prompt=[5])
    assert bench.sample(logits).tokens.tolist() == [6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_of_the_raw_logits_with_alternatives_and_ranks(dtype):
    vocab = 3000
    logits = random_logits(6, vocab, seed=11).to(dtype)
    bench = Bench(vocab, dtype=dtype)
    wanted = [None, 0, 1, 5, 20, -1]
    for slot, k in enumerate(wanted):
        bench.enter(slot, SamplingParams(temperature=1.7, top_k=50, logit_bias={8: 3.0}, logprobs=k), seed=slot)
    out = bench.sample(logits)
    reference = torch.log_softmax(logits.float(), 1)
    assert out.logprobs is not None and out.logprobs[0] is None
    for i in range(1, 6):
        one = out.logprobs[i]
        k = vocab if wanted[i] == -1 else wanted[i]
        assert one is not None and len(one.token_ids[0]) == len(one.logprobs[0]) == k + 1
        assert one.token_ids[0][0] == out.tokens[i]
        torch.testing.assert_close(torch.tensor(one.logprobs[0]), reference[i][one.token_ids[0]], atol=2e-5, rtol=0)
        order = np.argsort(-logits[i].float().numpy(), kind="stable")[:k]
        assert one.token_ids[0][1:] == order.tolist()
        assert one.ranks == [int((logits[i] >= logits[i, out.tokens[i]]).sum())]


def test_greedy_rows_with_logprobs_keep_the_plain_path():
    logits = random_logits(2, 300)
    bench = Bench(300)
    bench.enter(0, SamplingParams(temperature=0, logprobs=2))
    bench.enter(1, SamplingParams(temperature=0))
    out = bench.sample(logits)
    assert out.tokens.tolist() == logits.argmax(1).tolist()
    assert out.logprobs is not None and out.logprobs[1] is None and out.logprobs[0].ranks == [1]


def test_masked_logits_of_the_model_fill_up_alternatives_with_zero_probability():
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [4, 9]] = torch.tensor([1.0, 2.0])
    bench = Bench(300)
    bench.enter(0, SamplingParams(temperature=0, logprobs=4))
    one = bench.sample(logits).logprobs[0]
    assert one.token_ids == [[9, 9, 4, 0, 1]]
    assert one.logprobs[0][3:] == [-np.inf, -np.inf]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_fail_alone(value):
    logits = random_logits(6, 300)
    logits[1, 7] = value
    logits[4, 299] = value
    kinds = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5)]
    bench = Bench(300)
    for slot in range(6):
        bench.enter(slot, kinds[slot % 3], seed=slot)
    out = bench.sample(logits)
    assert sorted(out.errors) == [1, 4] and all("not finite" in e for e in out.errors.values())
    clean = random_logits(6, 300)
    same = bench.sample(clean).tokens
    assert [out.tokens[i] for i in (0, 2, 3, 5)] == [same[i] for i in (0, 2, 3, 5)]


@pytest.mark.parametrize("vocab", [GROUP, GROUP - 1, GROUP + 1, 1000, 17])
def test_candidates_are_complete_with_ties(vocab):
    rng = np.random.default_rng(vocab)
    z = torch.from_numpy(rng.integers(-4, 4, (5, vocab)).astype(np.float32))  # full of ties
    rows = RowBuffer(vocab, torch.device(DEVICE)).load(z)
    for k in (1, 2, 15, vocab):
        which = np.array([0, 2, 4])
        ids, values = rows.sorted_at_least(which, rows.bound(which, np.full(3, k)))
        for at, row in enumerate(which):
            order = np.argsort(-z[row].numpy(), kind="stable")
            kth = z[row, order[k - 1]]
            needed = [t for t in order.tolist() if z[row, t] >= kth]
            assert ids[at, : len(needed)].tolist() == needed
            assert values[at, : len(needed)].tolist() == z[row, needed].tolist()
    assert rows.argmax(np.arange(5)).tolist() == z.argmax(1).tolist()


def test_one_flat_row_does_not_change_what_narrow_rows_draw():
    vocab = 20000
    logits = random_logits(4, vocab, seed=2)
    logits[3] = 1.0
    bench = Bench(vocab)
    for slot in range(4):
        bench.enter(slot, SamplingParams(top_k=40, top_p=0.95), seed=slot)
    out = bench.sample(logits).tokens
    assert (out[:3] == bench.sample(logits[:3]).tokens).all()
    bench.enter(3, SamplingParams(top_p=0.5), seed=9)
    flat = bench.sample(logits[3:].expand(200, vocab), [3] * 200, np.arange(200)).tokens
    # Equal logits stay in order of id, so the nucleus of half the mass is the lower half.
    assert flat.max() < vocab // 2 + 2 and flat.min() >= 0 and len(set(flat.tolist())) > 190


def test_what_the_masks_hide_does_not_count_alone_or_beside_others():
    logits = random_logits(2, 300)
    logits[0, 8] = torch.nan
    allowed = SamplingParams(temperature=0, allowed_token_ids=[4, 5])
    bench = Bench(300)
    bench.enter(0, allowed)
    bench.enter(1, SamplingParams(temperature=0))
    beside, alone = bench.sample(logits), bench.sample(logits[:1])
    assert not beside.errors and not alone.errors
    assert beside.tokens[0] == alone.tokens[0] == max((4, 5), key=lambda t: logits[0, t])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_draws_what_the_cpu_draws():
    vocab = 5000
    logits = random_logits(32, vocab, seed=3, scale=2.0)
    tokens = []
    for device in ("cpu", "cuda"):
        bench = Bench(vocab, device=device)
        for i in range(32):
            bench.enter(i, mixed_params(i), prompt=range(1, 9), outputs=range(i % 5), seed=1000 + i)
        out = bench.sample(logits)
        assert not out.errors
        tokens.append(out.tokens)
    # Exponentials differ in the last digit, so a draw may fall on the other side of an edge, though hardly two.
    assert (tokens[0] != tokens[1]).sum() <= 1
