"""Whole small models on the CUDA backend against the same models on the reference: prompts, chunks, decodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_support import DEVICE, REFERENCE, build_step, close, moved, ops_of

from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.core.ahead import AheadCore
from dpi_engine.core.engine import EngineCore
from dpi_engine.core.limits import SchedulerConfig
from dpi_engine.core.scheduler import Scheduler
from dpi_engine.models.registry import load_model
from dpi_engine.wire.messages import EngineCoreRequest, SamplingParams
from dpi_engine.worker.ahead_runner import AheadRunner
from dpi_engine.worker.runner import Runner

BASE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 101,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": BASE,
    "qwen2": {**BASE, "architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 2, "num_key_value_heads": 1},
    "mistral, window": {**BASE, "architectures": ["MistralForCausalLM"], "sliding_window": 9},
    "qwen3-moe": {
        **BASE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "deepseek-v3": {
        **BASE, "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_logits_are_those_of_the_reference(config: dict[str, Any]) -> None:
    spec = ModelSpec.from_config(config)
    ours = load_model(None, spec, ops_of(torch.float32), load_format="dummy")
    theirs = load_model(None, spec, REFERENCE, load_format="dummy")
    pieces = [[(20, 20), (9, 9), (1, 1)], [(1, 21), (5, 14), (1, 2)], [(1, 22), (1, 15), (1, 3)]]
    _, blocks = build_step([(1, 40), (1, 40), (1, 40)])
    caches, their_caches = ours.new_caches(blocks), theirs.new_caches(blocks)
    tables, _ = build_step([(1, 40), (1, 40), (1, 40)], seed=3)
    for at, step_pieces in enumerate(pieces):
        step, _ = build_step(step_pieces)
        step.block_tables = tables.block_tables
        n = step.ids.shape[0]
        step.ids = torch.randint(101, (n,), generator=torch.Generator().manual_seed(at)).to(DEVICE)
        table = torch.cat([tables.block_tables[i : i + 1].expand(q, -1) for i, (q, _) in enumerate(step_pieces)]).long()
        pages = table.gather(1, (step.positions // 16).unsqueeze(1)).squeeze(1)
        step.slots = pages * 16 + step.positions % 16
        close(ours.forward(step, caches), theirs.forward(moved(step, "cpu"), their_caches), torch.float32)


def test_the_loop_one_step_ahead_gives_the_tokens_of_the_reference() -> None:
    """The whole way: draws on the device, tokens that stay there for the next step, the core that launches ahead."""
    spec = ModelSpec.from_config(BASE)
    limits = {"max_num_seqs": 3, "max_model_len": 64, "num_blocks": 16, "max_num_batched_tokens": 32}
    config = SchedulerConfig(block_size=16, vocab_size=spec.vocab_size, **limits)
    prompts = [[5, 9, 77, 3], [8] * 11, [50, 51]]

    def run(core: EngineCore) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
            core.add(EngineCoreRequest(f"r{i}", prompt, sampling_params=params), float(i))
        for now in range(10, 100):
            for output in [o for entries in core.step(float(now)).outputs.values() for o in entries]:
                found.setdefault(output.request_id, []).extend(output.new_token_ids)
            if not core.has_work():
                break
        return found

    ours = ops_of(torch.float32)
    ahead = AheadCore(Scheduler(config), AheadRunner(load_model(None, spec, ours, load_format="dummy"), ours, **limits))
    theirs = Runner(load_model(None, spec, REFERENCE, load_format="dummy"), REFERENCE, **limits)
    assert run(ahead) == run(EngineCore(Scheduler(config), theirs))
    assert ahead.ahead >= 3
