"""Greedy text of mixtures through the serving core is that of transformers, whole, chunked, cached or preempted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_oracle import DEVICE, make_oracle, random_ids

from dpi_engine.ops import OpsUnavailable
from dpi_engine.wire.messages import SamplingParams
from dpi_engine.worker.offline import OfflineEngine

MODES = {
    "batched": {"num_blocks": 200, "max_num_batched_tokens": 512},
    "chunked and cached": {"num_blocks": 200, "max_num_batched_tokens": 19, "max_num_seqs": 4},
    "preempted": {"num_blocks": 14, "max_num_batched_tokens": 48, "enable_prefix_caching": False},
}
OUTPUTS, TIE = 36, 1e-3


@pytest.mark.parametrize("backend", ["torch", "cpu"] if DEVICE == "cpu" else ["torch"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v2-groups", "deepseek-v3"])
def test_greedy_text_is_that_of_transformers_in_every_mode(family: str, backend: str, tmp_path: Path) -> None:
    try:
        oracle = make_oracle(family, tmp_path, ops=backend)
    except OpsUnavailable as error:
        pytest.skip(f"the CPU kernels cannot run here: {error}")
    prompts = [random_ids(n, 40 + n)[:n] for n in (40, 3, 7, 12, 9)]
    prompts += [prompts[0][:32] + random_ids(4, 9)]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUTS, ignore_eos=True)
    texts: dict[str, list[list[int]]] = {}
    for name, limits in MODES.items():
        engine = OfflineEngine(oracle.model, oracle.model.ops, **{"max_model_len": 128, "max_num_seqs": 8, **limits})
        texts[name] = [r.token_ids for r in engine.run(prompts, params)]
        stats = engine.core.stats()
        assert (stats.preemptions > 0) == (name == "preempted")
        assert stats.prefix_hits > 0 or "cached" not in name
    left_out = 0
    for i, prompt in enumerate(prompts):
        outputs = texts["batched"][i]
        assert len(outputs) == OUTPUTS
        with torch.no_grad():
            tokens = torch.tensor([prompt + outputs[:-1]])
            logits = oracle.reference(tokens, use_cache=False).logits[0, len(prompt) - 1 :]
        best = logits.topk(2).values
        if bool(((best[:, 0] - best[:, 1]) < TIE).any()):
            left_out += 1  # rounding decides
            continue
        assert logits.argmax(-1).tolist() == outputs
        for name in MODES:
            assert texts[name][i] == outputs, name
    assert left_out <= 2
