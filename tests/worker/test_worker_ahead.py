"""One step ahead: the same answers as step by step, one wait for each step, one token for nothing at a late stop."""

from __future__ import annotations

import numpy as np
import pytest
from ahead_toys import CountingTransfers, DrawingOps, FakeRecorder
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_toys import VOCAB, ToyModel, greedy

from dpi_engine.core.ahead import AheadCore
from dpi_engine.core.engine import EngineCore, EngineFailed
from dpi_engine.core.limits import SchedulerConfig
from dpi_engine.core.scheduler import Scheduler
from dpi_engine.wire.messages import EngineCoreRequest, FinishReason, SamplingParams
from dpi_engine.worker.ahead_runner import AheadRunner
from dpi_engine.worker.sampling import NOT_A_NUMBER

LIMITS = {"max_num_seqs": 4, "max_model_len": 120, "num_blocks": 40, "max_num_batched_tokens": 48}


class Bench:
    """A core over the toy model; `run` until nothing is left, with the outputs put together by request."""

    def __init__(self, ahead: bool, model: ToyModel | None = None, **limits: int) -> None:
        sizes = {**LIMITS, **limits}
        self.model = model or ToyModel()
        self.transfers = CountingTransfers()
        self.runner = AheadRunner(self.model, DrawingOps(), transfers=self.transfers, **sizes)
        config = SchedulerConfig(
            num_blocks=sizes["num_blocks"], block_size=16, max_model_len=120, vocab_size=VOCAB,
            max_num_seqs=sizes["max_num_seqs"], max_num_batched_tokens=sizes["max_num_batched_tokens"],
        )  # fmt: skip
        self.core = (AheadCore if ahead else EngineCore)(Scheduler(config), self.runner)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, tuple[FinishReason, object]] = {}
        self.finished: list[str] = []
        self.now = 0.0

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        self.tokens[name] = []
        self.core.add(EngineCoreRequest(name, prompt, sampling_params=params), self.now)

    def step(self) -> None:
        self.now += 1.0
        out = self.core.step(self.now)
        for entry in [e for entries in out.outputs.values() for e in entries]:
            assert entry.output_index == len(self.tokens[entry.request_id])
            self.tokens[entry.request_id] += entry.new_token_ids
            if entry.finish_reason is not None:
                assert entry.request_id not in self.ends
                self.ends[entry.request_id] = (entry.finish_reason, entry.error or entry.stop_reason)
        self.finished += [i for ids in out.finished.values() for i in ids]

    def run(self) -> None:
        for _ in range(2000):
            if not self.core.has_work():
                break
            self.step()
        else:
            raise AssertionError("the core never comes to an end")
        assert sorted(self.finished) == sorted(self.tokens)
        assert self.core.scheduler.kv_usage == 0 and self.core.scheduler.is_quiet()


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def params(kind: int, seed: int, tokens: int, stop: int | None = None) -> SamplingParams:
    more = {"max_tokens": tokens, "seed": seed, "stop_token_ids": [stop] if stop is not None else None}
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "bad_words_token_ids": [[3], [5, 7]], "min_tokens": 2},
    ]
    return SamplingParams(**{**kinds[kind], **more})  # type: ignore[arg-type]


def both(fill, **limits: int) -> tuple[Bench, Bench]:
    """The same requests, ahead and step by step."""
    one, other = Bench(True, **limits), Bench(False, **limits)
    for bench in (one, other):
        fill(bench)
        bench.run()
    assert one.tokens == other.tokens and one.ends == other.ends
    return one, other


def test_decodes_are_launched_ahead_and_give_the_same_tokens() -> None:
    def fill(bench: Bench) -> None:
        for i in range(3):
            bench.add(f"r{i}", prompt(5 + 9 * i, i), params(i % 2, i, 30))

    one, other = both(fill)
    assert isinstance(one.core, AheadCore) and one.core.ahead >= 25
    # One wait for each step that samples, and the next step is launched before it.
    assert one.transfers.waits == one.transfers.downs == len(one.model.steps) <= len(other.model.steps) + 1
    assert one.transfers.ups == one.transfers.downs
    pairs = "".join(event[0] for event in one.transfers.events)
    assert pairs.startswith("llw") and "lw" * 20 in pairs[1:]
    assert "".join(event[0] for event in other.transfers.events) == "lw" * other.transfers.downs


def test_a_late_stop_costs_one_token() -> None:
    model = ToyModel()
    first = prompt(9, 3)
    sequence = list(first)
    for _ in range(10):
        sequence.append(int(model.logits_after(sequence).argmax()))
    stop = sequence[9 + 4]
    count = sequence[9:].index(stop) + 1

    def fill(bench: Bench) -> None:
        bench.add("stops", first, greedy(max_tokens=50, stop_token_ids=[stop]))

    one, other = both(fill)
    assert one.ends["stops"] == (FinishReason.STOP, stop) and len(one.tokens["stops"]) == count
    assert len(one.model.steps) == len(other.model.steps) + 1


def test_a_length_that_is_reached_is_foreseen() -> None:
    one, other = both(lambda bench: bench.add("a", prompt(9, 3), greedy(max_tokens=12)))
    assert len(one.model.steps) == len(other.model.steps) == 12


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 4), st.integers(2, 24), st.integers(0, 12), st.booleans()),
        min_size=1, max_size=9,
    ),
    st.integers(12, 40),
    st.integers(0, 100),
)  # fmt: skip
def test_any_requests_get_the_same_answers(requests, blocks: int, seed: int) -> None:
    def run(ahead: bool) -> Bench:
        bench = Bench(ahead, num_blocks=blocks)
        waiting = sorted(enumerate(requests), key=lambda entry: entry[1][3])
        while waiting or bench.core.has_work():
            while waiting and (waiting[0][1][3] <= bench.now or not bench.core.has_work()):
                i, (length, kind, tokens, _, stops) = waiting.pop(0)
                stop = (seed + i) % 13 if stops else None
                bench.add(f"r{i}", prompt(length, seed + i), params(kind, i, tokens, stop))
            bench.step()
            assert bench.now < 2000
        return bench

    one, other = run(True), run(False)
    assert one.tokens == other.tokens and one.ends == other.ends
    assert sorted(one.finished) == sorted(other.finished)
    assert one.core.scheduler.kv_usage == 0 and one.core.scheduler.is_quiet()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=5), st.integers(0, 50))
def test_aborts_at_any_time_leave_the_others_as_they_are(aborts: list[tuple[int, int]], seed: int) -> None:
    def run(ahead: bool, aborted: list[tuple[int, int]]) -> Bench:
        bench = Bench(ahead)
        for i in range(6):
            bench.add(f"r{i}", prompt(3 + 5 * i, seed + i), params(i % 2, i, 12))
        while bench.core.has_work():
            bench.step()
            for at, which in aborted:
                if at == bench.now:
                    bench.core.abort([f"r{which}"])
            assert bench.now < 500
        return bench

    mixed, whole = run(True, aborts), run(False, [])
    for name, tokens in mixed.tokens.items():
        assert tokens == whole.tokens[name][: len(tokens)]
        assert name not in mixed.ends or tokens == whole.tokens[name]
    assert sorted(mixed.finished) == sorted(whole.finished)
    assert mixed.core.scheduler.kv_usage == 0


def test_an_abort_with_two_steps_on_the_device() -> None:
    bench = Bench(True)
    bench.add("a", prompt(9, 1), greedy(max_tokens=40))
    for _ in range(3):
        bench.step()
    assert bench.core.has_work() and not bench.core.scheduler.is_quiet()
    bench.core.abort(["a"])
    bench.run()
    assert len(bench.tokens["a"]) == 3 and "a" not in bench.ends


def test_logits_that_are_not_numbers_end_the_request_alone() -> None:
    model = ToyModel()
    model.poison = {150}
    sound = [t for t in prompt(60, 4) if t < 100][:9]
    one = Bench(True, model)
    one.add("sick", [150, 7], greedy(max_tokens=9))
    one.add("well", sound, greedy(max_tokens=9))
    one.run()
    assert one.ends["sick"] == (FinishReason.ERROR, NOT_A_NUMBER) and one.tokens["sick"] == []
    if 150 not in one.tokens["well"]:
        assert one.ends["well"][0] is FinishReason.LENGTH


def test_what_settles_is_reported_by_the_next_step() -> None:
    bench = Bench(True)
    bench.add("a", prompt(9, 1), greedy(max_tokens=3))
    bench.step()
    assert isinstance(bench.core, AheadCore)
    bench.core.settle(bench.now)
    assert not bench.core.scheduler.reset_prefix_cache(bench.now)  # it holds blocks, but nothing is in flight
    assert bench.core.scheduler.reset_prefix_cache(bench.now, preempt_running=True)
    bench.run()
    plain = Bench(False)
    plain.add("a", prompt(9, 1), greedy(max_tokens=3))
    plain.run()
    assert bench.tokens == plain.tokens


@pytest.mark.parametrize("level", [1])
def test_sleep_takes_the_step_on_the_device_first(level: int) -> None:
    bench = Bench(True)
    bench.runner.record(lambda stage, done: None, FakeRecorder())
    bench.add("a", prompt(9, 1), greedy(max_tokens=8))
    for _ in range(3):
        bench.step()
    bench.core.sleep(level, bench.now)
    assert bench.runner.graphs is None
    bench.core.wake()
    assert bench.runner.graphs is not None
    bench.run()
    plain = Bench(False)
    plain.add("a", prompt(9, 1), greedy(max_tokens=8))
    plain.run()
    assert bench.tokens == plain.tokens


def test_a_device_that_fails_ends_the_requests_and_at_last_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(True)
    calls = iter(range(100))

    def broken(step, caches):
        if next(calls) >= 3:
            raise RuntimeError("the device is lost")
        return ToyModel.forward(bench.model, step, caches)

    monkeypatch.setattr(bench.model, "forward", broken)
    bench.add("a", prompt(9, 1), greedy(max_tokens=40))
    bench.add("b", prompt(4, 2), greedy(max_tokens=40))
    bench.run()
    assert all(reason is FinishReason.ERROR and "the device is lost" in str(why) for reason, why in bench.ends.values())
    with pytest.raises(EngineFailed, match="the device is lost"):
        for i in range(5):
            bench.add(f"more{i}", prompt(4, i), greedy(max_tokens=4))
            bench.step()


def test_steps_are_replayed_from_graphs_with_the_same_tokens() -> None:
    def fill(bench: Bench) -> None:
        if isinstance(bench.core, AheadCore):
            bench.runner.record(lambda stage, done: None, FakeRecorder())
        for i in range(4):
            bench.add(f"r{i}", prompt(5 + 9 * i, i), params(i % 4, i, 5 + 7 * i))

    one, _ = both(fill)
    assert one.runner.graphs is not None and one.runner.graphs.replays >= 20
