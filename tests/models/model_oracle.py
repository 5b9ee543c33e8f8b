"""Tiny random models made by transformers, and a hand-run paged batch to compare our decoder with them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpi_engine.config.sources import ModelFiles, default_cache_dir, resolve_model
from dpi_engine.models.registry import Model, load_model
from dpi_engine.ops import select_ops
from dpi_engine.ops.interface import PAGE_SIZE, StepTensors
from dpi_engine.tokenizer import read_spec

DEVICE = os.environ.get("DPI_TEST_DEVICE", "cpu")
"""Where our side of the comparison runs."""

OPS = os.environ.get("DPI_TEST_OPS", "torch")
"""And on which operations, where a test does not say."""

if not torch.cuda.is_available():
    # transformers asks this before every forward pass, and a CUDA build of torch may crash over it without a driver.
    torch.cuda.is_current_stream_capturing = lambda: False

BASE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DEEPSEEK = {
    "num_key_value_heads": 4, "q_lora_rank": 40, "kv_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 20, "n_routed_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 40,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip
QWEN3_MOE = {"head_dim": 32, "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 56}

# name -> (transformers model type, changes to BASE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-64-untied": ("llama", {"head_dim": 64}),
    "llama-80-tied": ("llama", {"head_dim": 80, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"head_dim": 64, "attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("llama", {"head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "llama-rope-llama3": ("llama", {"head_dim": 64, "rope_parameters": LLAMA3}),
    "llama-rope-linear": (
        "llama", {"head_dim": 64, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}
    ),
    "llama-rope-yarn": ("llama", {"head_dim": 64, "rope_parameters": YARN}),
    "llama-rope-yarn-mscale": (
        "llama",
        {"head_dim": 64, "rope_parameters": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.7, "beta_fast": 20.0}},
    ),
    "llama-rope-yarn-untruncated": ("llama", {"head_dim": 64, "rope_parameters": {**YARN, "truncate": False}}),
    "llama-rope-yarn-factor": ("llama", {"head_dim": 64, "rope_parameters": {**YARN, "attention_factor": 1.7}}),
    "mistral-96-window": ("mistral", {"head_dim": 96, "sliding_window": 21}),
    "mistral-no-window": ("mistral", {"head_dim": 64, "sliding_window": None}),
    "qwen2-128-tied": (
        "qwen2",
        {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen2-window-from-layer-1": (
        "qwen2",
        {
            "hidden_size": 128, "num_attention_heads": 2, "use_sliding_window": True, "sliding_window": 18,
            "max_window_layers": 1,
        },
    ),
    "qwen3-128": ("qwen3", {"head_dim": 128}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 32}),
    "mixtral-window": ("mixtral", {"num_local_experts": 4, "sliding_window": 19, "head_dim": 64}),
    "qwen3-moe": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-some-dense": ("qwen3_moe", {**QWEN3_MOE, "mlp_only_layers": [1], "attention_bias": True}),
    "deepseek-v2-lite": ("deepseek_v2", {**DEEPSEEK, "n_shared_experts": 2, "q_lora_rank": None}),
    "deepseek-v2-groups": (
        "deepseek_v2",
        {**DEEPSEEK, "n_shared_experts": 1, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v3": ("deepseek_v3", {**DEEPSEEK, "n_group": 3, "topk_group": 2}),
    "deepseek-v3-yarn": (
        "deepseek_v3",
        {
            **DEEPSEEK, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.1, "beta_fast": 20.0},
        },
    ),
    "deepseek-v3-halves": (
        "deepseek_v3", {**DEEPSEEK, "n_group": 4, "topk_group": 2, "rope_interleave": False, "v_head_dim": 32}
    ),
    "qwen3-80-tied": ("qwen3", {"head_dim": 80, "tie_word_embeddings": True}),
}  # fmt: skip


def build_oracle(name: str, **more: Any) -> Any:
    """The transformers model of a family, in float32, with every parameter random (norms and biases too). `more`
    changes its configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = FAMILIES[name]
    torch.manual_seed(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**BASE, **changes, **more})).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return model


@dataclass
class Oracle:
    """Both models of one family, and the truth: logits of transformers for whole sequences."""

    name: str
    reference: Any
    model: Model
    files: ModelFiles

    def truth(self, ids: list[int]) -> Tensor:
        """Logits [tokens, vocab]. Fails where rounding could decide which experts a token goes to: no oracle then."""
        gaps: list[Tensor] = []

        def watch(router: Any, _: Any, out: Any) -> None:
            scores = out[0].float()
            scores = scores.sigmoid() if hasattr(router, "e_score_correction_bias") else scores.softmax(-1)
            ordered = (scores + getattr(router, "e_score_correction_bias", 0.0)).sort(-1, descending=True).values
            gaps.append((ordered[:, router.top_k - 1] - ordered[:, router.top_k]).min())

        routers = [m for m in self.reference.modules() if "router" in type(m).__name__.lower()]
        hooks = [m.register_forward_hook(watch) for m in routers if m.top_k < m.num_experts]
        with torch.no_grad():
            logits: Tensor = self.reference(torch.tensor([ids]), use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        assert not gaps or logits.dtype != torch.float32 or min(gaps) > 2e-6, "a near tie: draw other weights"
        return logits


def make_oracle(
    name: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    ops: str = OPS,
    threads: int = 1,
    quantization: str | None = None,
    **more: Any,
) -> Oracle:
    """`ops` is 'torch', 'cpu' or 'cuda'; `more` changes the configuration. Raises OpsUnavailable."""
    reference = build_oracle(name, **more)
    reference.save_pretrained(folder)
    files = resolve_model(str(folder), folder)
    backend = select_ops(DEVICE, dtype, ops, threads, default_cache_dir(os.environ, Path.home()), quantization)
    return Oracle(name, reference, load_model(files, read_spec(files), backend), files)


@dataclass
class PagedBatch:
    """Sequences with scattered block tables over one cache; `run` computes pieces of any of them in one step."""

    model: Model
    num_blocks: int = 64
    tables: dict[int, list[int]] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.caches = self.model.new_caches(self.num_blocks)
        order = torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(5)) + 1
        self._free: list[int] = order.tolist()

    def step(self, pieces: list[tuple[int, list[int]]], rows: list[int] | None = None) -> StepTensors:
        """Tensors for `pieces` (sequence, its next tokens); `rows` default to all."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        cu_q, kv_lens = [0], []
        for sequence, tokens in pieces:
            start = self.done.get(sequence, 0)
            table = self.tables.setdefault(sequence, [])
            while len(table) * PAGE_SIZE < start + len(tokens):
                table.append(self._free.pop())
            for position in range(start, start + len(tokens)):
                positions.append(position)
                slots.append(table[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
            ids += tokens
            cu_q.append(len(ids))
            kv_lens.append(start + len(tokens))
            self.done[sequence] = start + len(tokens)
        width = max(len(self.tables[s]) for s, _ in pieces)
        padded = [self.tables[s] + [0] * (width - len(self.tables[s])) for s, _ in pieces]
        device = self.model.ops.device

        def ints(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return StepTensors(
            ids=ints(ids),
            positions=ints(positions),
            slots=ints(slots),
            block_tables=ints(padded, torch.int32),
            kv_lens=ints(kv_lens, torch.int32),
            cu_q=ints(cu_q, torch.int32),
            rows=ints(list(range(len(ids))) if rows is None else rows),
            max_q=max(len(t) for _, t in pieces),
            max_kv=max(kv_lens),
            every_row=rows is None,
        )

    def run(self, pieces: list[tuple[int, list[int]]], rows: list[int] | None = None) -> Tensor:
        """Logits [rows, vocab] of one step, on the CPU in float32."""
        return self.model.forward(self.step(pieces, rows), self.caches).float().cpu()

    def release(self, sequence: int) -> None:
        """Give the blocks back, to be taken again first."""
        self._free += self.tables.pop(sequence)
        self.done.pop(sequence)


def random_ids(count: int, seed: int, vocab: int = BASE["vocab_size"]) -> list[int]:
    values: list[int] = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return values


def greedy(model: Model, prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens for each prompt, computed as one batch."""
    batch = PagedBatch(model, num_blocks=2 + sum((len(p) + count) // PAGE_SIZE + 1 for p in prompts))
    ends, total = [], 0
    for prompt in prompts:
        total += len(prompt)
        ends.append(total - 1)
    logits = batch.run(list(enumerate(prompts)), rows=ends)
    out = [[int(t)] for t in logits.argmax(-1)]
    for _ in range(count - 1):
        logits = batch.run([(i, [tokens[-1]]) for i, tokens in enumerate(out)])
        for tokens, token in zip(out, logits.argmax(-1), strict=True):
            tokens.append(int(token))
    return out
