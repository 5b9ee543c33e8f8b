"""Mixtures of experts through the whole service: every rank holds all experts and gives the same text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from process_model import TEXT
from process_pods import Pod

EXPERTS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
    "DeepseekV3ForCausalLM": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
}


@pytest.mark.parametrize("architecture", EXPERTS)
def test_two_ranks_give_one_text(
    architecture: str, tiny_model: Path, make_pod: Callable[..., Pod], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [architecture], **EXPERTS[architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    prompts = [TEXT[17 * i : 20 * i + 30] for i in range(4)]
    flags = ("-dp", "2", "--api-server-count", "1", "--load-format", "dummy", "--max-num-batched-tokens", "64")
    with make_pod(*flags, model=folder) as pod:
        texts = [[pod.text(prompt, rank=rank) for prompt in prompts] for rank in (0, 1)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1 and all(texts[0])
