"""Models with linears of int8: as near to the truth as 8 bits allow, on our kernels and on the reference."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from gguf_maker import write_gguf
from model_oracle import Oracle, PagedBatch, make_oracle, random_ids

from dpi_engine.config.sources import resolve_model
from dpi_engine.models.registry import load_model
from dpi_engine.ops import OpsUnavailable
from dpi_engine.tokenizer import read_spec

FAMILIES = ("llama-64-untied", "llama-80-tied", "llama-biases", "qwen3-128", "mixtral", "deepseek-v2-lite")

TOLERANCE = 0.1
"""bfloat16 itself is 0.01 to 0.035 from the truth with these random weights, int8 0.03 to 0.07."""


def make(family: str, folder: Path, ops: str = "cpu") -> Oracle:
    try:
        return make_oracle(family, folder, torch.bfloat16, ops, quantization="int8")
    except OpsUnavailable as error:
        pytest.skip(f"no int8 kernels here: {error}")


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root mean square of the error over that of the logits."""
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


@pytest.mark.parametrize("ops", ["cpu", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_near_the_truth(family: str, ops: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dpi_engine")
    oracle = make(family, tmp_path, ops)
    ids = random_ids(40, 3)
    want = oracle.truth(ids)
    got = PagedBatch(oracle.model).run([(0, ids)])
    error = error_of(got, want)
    assert 0 < error < TOLERANCE, error
    said = next(r.getMessage() for r in caplog.records if "int8 linears" in r.getMessage())
    assert ("experts" in said) == (oracle.model.spec.moe is not None)
    assert ("latent attention" in said) == (oracle.model.spec.mla is not None)


def test_a_gguf_file_gives_what_safetensors_give(tmp_path: Path) -> None:
    oracle = make("llama-64-untied", tmp_path)
    files = resolve_model(str(write_gguf(tmp_path / "model.gguf", oracle.reference)), tmp_path)
    model = load_model(files, read_spec(files), oracle.model.ops)
    ids = random_ids(30, 4)
    assert torch.equal(PagedBatch(model).run([(0, ids)]), PagedBatch(oracle.model).run([(0, ids)]))


def test_weights_take_a_byte_each(tmp_path: Path) -> None:
    """All but the embedding and the norms, which stay bfloat16."""
    oracle = make("llama-64-untied", tmp_path)
    parameters = {name: p.numel() for name, p in oracle.reference.named_parameters()}
    whole = sum(n for name, n in parameters.items() if "norm" in name or "embed" in name)
    assert oracle.model.weight_bytes == 2 * whole + sum(parameters.values()) - whole
    again = load_model(oracle.files, oracle.model.spec, oracle.model.ops)
    assert again.weight_bytes == oracle.model.weight_bytes
