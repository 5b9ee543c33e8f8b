"""The parts of the GPU check that decide: which streams agree, what a step reads, and the models made on the spot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_steps.bench import LOADS, row
from gpu_steps.decode import flops_per_token, verdict
from gpu_steps.graphs import MAX_LEN, NEAR, Again, same_logits
from gpu_steps.machine import copy_bandwidth, describe
from gpu_steps.models import quick_model
from gpu_steps.shapes import SHAPES, StepBytes, config, make_model
from gpu_steps.two_ranks import TIE, Answer, compare
from gpu_steps.versus import PLANS, even_step

from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.config.sources import resolve_model
from dpi_engine.models.registry import load_model
from dpi_engine.ops import TorchOps
from dpi_engine.ops.interface import PAGE_SIZE
from dpi_engine.tokenizer import load_tokenizer, read_spec

CLEAR, TIED = [-1.0, -2.0], [-1.0, -1.0 - TIE / 2]


def answer(tokens: str, best: list[list[float]] | None = None, error: str = "") -> Answer:
    return Answer(list(tokens), best or [CLEAR] * len(tokens), error)


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        (answer("abcd"), answer("abcd"), (1, 0, 0)),
        (answer("abcd"), answer("abxd"), (0, 0, 1)),
        (answer("abc", [CLEAR, TIED, CLEAR]), answer("axy", [CLEAR, TIED, CLEAR]), (0, 1, 0)),
        (answer("abc", [CLEAR, TIED, CLEAR]), answer("axy"), (0, 0, 1)),
        (answer("abc", [CLEAR, TIED, CLEAR]), answer("abx", [CLEAR, TIED, CLEAR]), (0, 0, 1)),
        (answer("abc"), answer("ab"), (0, 0, 1)),
        (answer("abc"), answer("abc", error="gone"), (0, 0, 1)),
    ],
)
def test_streams_agree_part_at_a_tie_or_differ(a: Answer, b: Answer, want: tuple[int, int, int]) -> None:
    found = compare([a], [b])
    assert (found.same, found.ties, found.different) == want
    assert bool(found.first) == bool(found.different)


@pytest.mark.parametrize("shape", SHAPES)
def test_made_models_are_complete_and_every_id_has_a_text(shape: str, tmp_path: Path) -> None:
    files = resolve_model(str(make_model(tmp_path / shape, shape)), tmp_path, weightless=True)
    spec, bundle = read_spec(files), load_tokenizer(files)
    assert isinstance(spec, ModelSpec) and bundle.eos_ids == (0,)
    assert bundle.tokenizer.get_vocab_size() == spec.vocab_size
    ids = bundle.tokenizer.encode("The night train noticed one morning that copper wires carry a signal.").ids
    assert 8 < len(ids) < 60
    assert all(bundle.tokenizer.decode([i]) for i in (1, 700, spec.vocab_size - 1))


def test_bytes_of_a_step_are_those_of_the_weights_it_multiplies_with(tmp_path: Path) -> None:
    files = resolve_model(str(make_model(tmp_path, "tiny")), tmp_path, weightless=True)
    model = load_model(files, read_spec(files), TorchOps("cpu", torch.float32), load_format="dummy")
    sizes = StepBytes.of("tiny", 4)
    norms = 4 * (3 * (2 * 64 + 2 * 32) + 64)
    embedding = 4 * 1024 * 64  # held beside the head, and only looked up
    assert sizes.weights == model.weight_bytes - norms - embedding
    assert sizes.token * 16 == model.cache_bytes_per_block()


def test_a_row_of_the_table_names_the_share_of_the_memorys_speed() -> None:
    load = LOADS["cpu"]
    sizes = StepBytes.of("tiny", 4)
    read = sizes.weights + 4 * 40 * sizes.token
    result: dict[str, Any] = {"itl_ms": {"p50": 2.0}, "ttft_ms": {"p50": 30.0}, "output_tok_s": 1234.5}
    line = row(result, load, 4, peak=10 * read / 2e-3).split()
    assert line[0] == "4" and line[1] == "1234.5" and line[3] == "2.00" and line[-1] == "10.0%"


def test_the_machine_is_described() -> None:
    told = dict(describe("cpu"))
    assert told["torch"] == torch.__version__ and told["copy"].endswith("GB/s read and written")
    assert 1e8 < copy_bandwidth("cpu") < 1e13


def test_bytes_of_a_step_count_the_experts_that_its_tokens_want() -> None:
    one, many = StepBytes.of("tiny-moe", 4), StepBytes.of("tiny-moe", 4, 1000)
    expert = 4 * 3 * 64 * 48
    assert one.weights - StepBytes.of("tiny-moe", 4, 0).weights == pytest.approx(3 * 2 * expert, abs=100)
    assert many.weights - one.weights == pytest.approx(3 * 6 * expert, abs=100)
    assert many.token == one.token


def test_quick_models_are_random_and_make_no_rows_twice() -> None:
    model = quick_model("tiny", TorchOps("cpu", torch.float32), 64)
    table = model._embedding  # type: ignore[attr-defined]
    assert float(table.float().std()) == pytest.approx(1 / 8, rel=0.05)
    assert len({tuple(row.tolist()) for row in table[:, :4]}) == len(table)


def test_replayed_steps_give_the_logits_of_launched_ones() -> None:
    ops = TorchOps("cpu", torch.float32)
    assert same_logits(quick_model("tiny", ops, MAX_LEN), ops, Again(), 5) <= NEAR


def test_a_recording_that_replays_another_step_is_noticed() -> None:
    class Once:
        """Replays nothing: the logits stay those of the recording."""

        def record(self, run: Any) -> Any:
            run()
            return lambda: None

    ops = TorchOps("cpu", torch.float32)
    assert same_logits(quick_model("tiny", ops, MAX_LEN), ops, Once(), 5) > 10 * NEAR


def test_work_of_a_prompt_token() -> None:
    spec = ModelSpec.from_config(config("llama-8b"))
    assert flops_per_token(spec, 0) == pytest.approx(2 * 6.98e9, rel=0.01)
    assert flops_per_token(spec, 1000) - flops_per_token(spec, 0) == 4 * 32 * 4096 * 1000
    sparse = ModelSpec.from_config(config("qwen3-30b-a3b"))
    assert flops_per_token(sparse, 0) == pytest.approx(2 * 2.7e9, rel=0.1)


def test_goals_are_judged() -> None:
    assert verdict(0.61, 0.6) == "goal 60% met" and verdict(0.59, 0.6) == "goal 60% MISSED"
    assert verdict(0.02, 0.03, most=True) == "goal 3% met" and verdict(0.04, 0.03, most=True) == "goal 3% MISSED"


@pytest.mark.parametrize("context", [1, 15, 16, 17, 64])
def test_streams_that_are_compared_have_as_many_keys_each(context: int) -> None:
    step, blocks = even_step(3, context, torch.device("cpu"))
    assert step.kv_lens.tolist() == [context] * 3 and step.positions.tolist() == [context - 1] * 3
    own = [set(row) for row in step.block_tables.tolist()]
    assert all(len(row) == -(-context // PAGE_SIZE) for row in own)
    assert set.union(*own) == set(range(1, blocks)) and sum(map(len, own)) == blocks - 1
    for slot, pages in zip(step.slots.tolist(), step.block_tables.tolist(), strict=True):
        assert slot == pages[(context - 1) // PAGE_SIZE] * PAGE_SIZE + (context - 1) % PAGE_SIZE


@pytest.mark.timeout(300)
def test_the_comparison_with_transformers_runs_dry() -> None:
    """On the CPU nothing is compiled; that both sides compute their steps is what this shows."""
    tools = Path(__file__).resolve().parents[2] / "tools"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tools), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "gpu_steps.versus", "--device", "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if "ours ms" in line)
    assert "static cache, torch.compile with its eager backend (dry run)" in lines[at - 1]
    rows = [line.split() for line in lines[at + 1 :]]
    assert [int(row[0]) for row in rows] == list(PLANS["cpu"].streams)
    assert all(float(number) > 0 for row in rows for number in row)
