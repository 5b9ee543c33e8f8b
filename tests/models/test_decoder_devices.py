"""Every tensor of a forward pass lies on the model's device: checked on tensors without data, so no GPU is needed.

A tensor left on the CPU shows here as an error of torch, as it would on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.models.registry import Model, load_model
from dpi_engine.ops import TorchOps, staging, torch_ref
from dpi_engine.ops.interface import StepTensors

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}


def plain_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **rest: object) -> Tensor:
    """torch picks a kernel by asking the driver, which is not there."""
    scores = q @ k.transpose(-1, -2)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ v


MIXTURES = {
    "qwen3-moe": {
        **CONFIG,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "deepseek-v3": {
        **CONFIG,
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}


class PlainLane:
    """Pinned memory and events are the driver's."""

    def __init__(self, device: torch.device) -> None:
        pass

    def pinned(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def mark(self) -> PlainLane:
        return self

    def synchronize(self) -> None:
        pass


@pytest.fixture(params=["dense", *MIXTURES])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setattr(torch_ref.F, "scaled_dot_product_attention", plain_attention)
    monkeypatch.setattr(staging, "CudaLane", PlainLane)
    # Without data there is nothing to try it on.
    monkeypatch.setattr(torch_ref.torch_moe, "grouped_works", lambda device, dtype: True)
    with FakeTensorMode():
        spec = ModelSpec.from_config(MIXTURES.get(request.param, CONFIG))
        yield load_model(None, spec, TorchOps("cuda", torch.bfloat16), load_format="dummy")


def make_step(tokens: int, sequences: int, max_q: int) -> StepTensors:
    def ints(n: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(n, dtype=dtype, device="cuda")

    return StepTensors(
        ids=ints(tokens),
        positions=ints(tokens),
        slots=ints(tokens),
        block_tables=ints(4 * sequences, torch.int32).view(sequences, 4),
        kv_lens=ints(sequences, torch.int32),
        cu_q=ints(sequences + 1, torch.int32),
        rows=ints(sequences),
        max_q=max_q,
        max_kv=40,
    )


def test_a_step_of_decodes(model: Model) -> None:
    logits = model.forward(make_step(3, 3, 1), model.new_caches(10))
    assert logits.shape == (3, 100) and logits.device.type == "cuda" and logits.dtype == torch.bfloat16


def test_a_step_of_chunks_and_a_decode(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk begins its prompt, the second goes on with one; their sizes are read on the host otherwise."""
    which = torch.zeros(1, dtype=torch.int64, device="cuda")

    def split(step: StepTensors) -> object:
        decodes = torch_ref._decodes(step.block_tables[which], step.kv_lens[which], 30)
        return torch_ref._Mixed([(0, 0, 20, 20), (1, 20, 5, 30)], decodes, which)

    monkeypatch.setattr(torch_ref, "_split", split)
    logits = model.forward(make_step(26, 3, 20), model.new_caches(10))
    assert logits.shape == (3, 100) and logits.device.type == "cuda"


def test_a_tensor_left_on_the_cpu_is_noticed(model: Model) -> None:
    step = make_step(3, 3, 1)
    step.kv_lens = step.kv_lens.cpu()
    with pytest.raises(RuntimeError, match="device"):
        model.forward(step, model.new_caches(10))
