"""Whether a model fits a GPU: the size of its weights before they are read, and of its largest step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ahead_toys import DrawingOps
from worker_toys import ToyModel, ToyOps

from dpi_engine.config.errors import ConfigError
from dpi_engine.config.experts import ExpertPlacement
from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.models.registry import load_model
from dpi_engine.ops import TorchOps
from dpi_engine.ops.eight_bit import EightBitTorchOps
from dpi_engine.ops.interface import StepTensors
from dpi_engine.worker.profile import step_bytes
from dpi_engine.worker.weight_size import GIB, check_weights_fit, weight_bytes, weight_elements

DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 500,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA_8B = {
    **DENSE, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "tied": {**DENSE, "tie_word_embeddings": True},
    "qwen3-moe": {
        **DENSE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "deepseek": {
        **DENSE, "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_weights_are_as_large_as_they_turn_out(config: dict[str, Any]) -> None:
    spec = ModelSpec.from_config(config)
    model = load_model(None, spec, TorchOps("cpu", torch.float32), load_format="dummy")
    assert weight_elements(spec) * 4 == pytest.approx(model.weight_bytes, rel=0.01)
    assert weight_elements(spec, 4) == weight_elements(spec) // 4


class Placed:
    """An exchange that only says which experts are here."""

    def __init__(self, placement: ExpertPlacement) -> None:
        self.placement = placement


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_shares_experts_needs_room_for_its_own(rank: int) -> None:
    spec = ModelSpec.from_config(SHAPES["qwen3-moe"])
    placement = ExpertPlacement(6, 4, rank)  # 2, 2, 1, 1
    exchange: Any = Placed(placement)
    model = load_model(None, spec, TorchOps("cpu", torch.float32), load_format="dummy", exchange=exchange)
    here = weight_elements(spec, experts=len(placement.local))
    assert here * 4 == pytest.approx(model.weight_bytes, rel=0.01)
    assert here < weight_elements(spec)
    total = int(here * 4 * 1.2)
    check_weights_fit(spec, torch.float32, 1, total, 0.9, 1, len(placement.local))
    with pytest.raises(ConfigError, match="more ranks that share the experts"):
        check_weights_fit(spec, torch.float32, 1, total // 2, 0.9, 1, len(placement.local))


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_quantized_weights_are_as_large_as_they_turn_out(config: dict[str, Any]) -> None:
    spec = ModelSpec.from_config(config)
    model = load_model(None, spec, EightBitTorchOps("cpu", torch.bfloat16, "fp8"), load_format="dummy")
    # Scales, a number of four bytes for each output, are much of a model as small as this.
    assert weight_bytes(spec, torch.bfloat16, quantized=True) == pytest.approx(model.weight_bytes, rel=0.06)
    assert weight_bytes(spec, torch.bfloat16, quantized=True) < 0.95 * weight_bytes(spec, torch.bfloat16)


def test_what_fits_only_when_it_is_quantized_is_told_so() -> None:
    spec = ModelSpec.from_config(LLAMA_8B)
    with pytest.raises(ConfigError, match="or --quantization int8 or fp8"):
        check_weights_fit(spec, torch.bfloat16, 1, 14 * GIB, 0.9, 1)
    check_weights_fit(spec, torch.bfloat16, 1, 14 * GIB, 0.9, 1, quantized=True)


def test_a_known_model_has_its_known_size() -> None:
    assert weight_elements(ModelSpec.from_config(LLAMA_8B)) == pytest.approx(8.03e9, rel=0.001)


@pytest.mark.parametrize(
    ("dtype", "workers", "gib", "sharers", "words"),
    [
        (torch.bfloat16, 1, 80, 1, None),
        (torch.bfloat16, 1, 17, 1, None),
        (torch.bfloat16, 1, 16, 1, "15.0 GiB in bfloat16, more than the 14.4 GiB .*-parallel-size 2 "),
        (torch.bfloat16, 2, 16, 1, None),
        (torch.float32, 1, 24, 1, "use --dtype bfloat16, or --tensor-parallel-size 2 "),
        (torch.bfloat16, 1, 24, 2, r"90% of 24.0 GiB for 2 rank\(s\).*; use fewer ranks .*-parallel-size 2 "),
        (torch.float32, 1, 2, 1, "-parallel-size 32 "),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    dtype: torch.dtype, workers: int, gib: int, sharers: int, words: str | None
) -> None:
    spec = ModelSpec.from_config(LLAMA_8B)
    if words is None:
        check_weights_fit(spec, dtype, workers, gib * GIB, 0.9, sharers)
        return
    with pytest.raises(ConfigError, match=words):
        check_weights_fit(spec, dtype, workers, gib * GIB, 0.9, sharers)


class FakeMeter:
    """A step takes 1000 bytes for each token and 10 for each row of logits; the first also what libraries take once."""

    def __init__(self) -> None:
        self.model = Steps()
        self.begun = 0

    def begin(self) -> None:
        self.begun = len(self.model.sizes)

    def most(self) -> int:
        assert len(self.model.sizes) == self.begun + 1
        tokens, rows = self.model.sizes[-1]
        return 1000 * tokens + 10 * rows + (10**6 if len(self.model.sizes) == 1 else 0)


class Steps(ToyModel):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []

    def forward(self, step: StepTensors, caches: torch.Tensor) -> torch.Tensor:
        assert not step.block_tables.any() and int(step.slots.max()) < 16 and len(caches) == 2
        self.sizes.append((step.ids.shape[0], step.rows.shape[0]))
        return torch.zeros(step.rows.shape[0], self.spec.vocab_size)


def test_the_largest_step_is_measured_without_what_is_taken_once() -> None:
    meter = FakeMeter()
    vocab = meter.model.spec.vocab_size
    found = step_bytes(meter.model, ToyOps(), tokens=300, sequences=20, meter=meter)  # type: ignore[arg-type]
    assert found == 300_200 + 2 * 4 * 20 * vocab
    assert meter.model.sizes == [(300, 20), (300, 20)]


def test_recorded_decodes_take_their_own() -> None:
    meter = FakeMeter()
    vocab = meter.model.spec.vocab_size
    found = step_bytes(meter.model, DrawingOps(), tokens=300, sequences=20, meter=meter)  # type: ignore[arg-type]
    assert found == 300_200 + 20_200 + 4 * 20 * vocab + 2 * 4 * 20 * vocab


def test_nothing_is_measured_on_a_cpu() -> None:
    model = Steps()
    assert step_bytes(model, ToyOps(), tokens=300, sequences=20) == 0 and not model.sizes  # type: ignore[arg-type]
