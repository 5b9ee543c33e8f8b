"""Which attention is chosen and why, and how libraries are called. Modules stand in for them here: they have the names
and arguments that the libraries document, check shapes, and compute by the reference. The libraries were not run.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from cuda_support import DEVICE, REFERENCE, build_step, close, moved, random
from torch import Tensor

from dpi_engine.ops import OpsUnavailable
from dpi_engine.ops.cuda import CudaOps, attention_choice
from dpi_engine.ops.cuda.attention_choice import Asked, choose_attention
from dpi_engine.ops.cuda.attention_libraries import FlashAttention, FlashInferAttention
from dpi_engine.ops.interface import PAGE_SIZE, HeadShape, StepTensors

SHAPE = HeadShape(6, 2, 64)
HOPPER = Asked((9, 0), torch.bfloat16, torch.bfloat16, 128)
PIECES = [(1, 30), (9, 25), (1, 1), (16, 16), (5, 100)]
PLACE = torch.device(DEVICE)


def step_of(tables: Tensor, kv_lens: Tensor, cu_q: Tensor, max_q: int) -> StepTensors:
    none = torch.zeros(0, dtype=torch.int64)
    longest = int(kv_lens.max())
    return moved(StepTensors(none, none, none, tables, kv_lens, cu_q, none, max_q, longest), "cpu")


def flash_attn_stand_in() -> ModuleType:
    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor,
        cu_seqlens_q: Tensor, max_seqlen_q: int, softmax_scale: float, causal: bool, window_size: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        n, heads, dim = q.shape
        assert k_cache.shape == v_cache.shape and k_cache.shape[1] == PAGE_SIZE and k_cache.shape[3] == dim
        assert causal and {cache_seqlens.dtype, page_table.dtype, cu_seqlens_q.dtype} == {torch.int32}
        assert page_table.shape[0] == cache_seqlens.shape[0] == cu_seqlens_q.shape[0] - 1
        assert window_size == (-1, -1) or window_size[1] == 0
        step = step_of(page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q)
        cache = torch.stack([k_cache, v_cache]).cpu().float()
        shape = HeadShape(heads, k_cache.shape[2], dim)
        out = REFERENCE.attention(q.reshape(n, -1).cpu().float(), step, cache, shape, softmax_scale, window_size[0] + 1)
        return out.view(n, heads, dim).to(q)

    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    return module


def flashinfer_stand_in() -> ModuleType:
    class BatchPrefillWithPagedKVCacheWrapper:
        plans = 0

        def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
            assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

        def plan(
            self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
            num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, sm_scale: float,
            window_left: int, q_data_type: torch.dtype, kv_data_type: torch.dtype,
        ) -> None:  # fmt: skip
            type(self).plans += 1
            for x in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
                assert x.dtype == torch.int32
            starts = paged_kv_indptr.tolist()
            assert len(paged_kv_indices) == starts[-1] and len(starts) == len(qo_indptr)
            lasts = paged_kv_last_page_len.tolist()
            assert all(1 <= last <= page_size for last in lasts)
            pages = [b - a for a, b in pairwise(starts)]
            tables = torch.zeros(len(pages), max(pages), dtype=torch.int32)
            for i, (a, b) in enumerate(pairwise(starts)):
                tables[i, : b - a] = paged_kv_indices[a:b]
            lens = [(count - 1) * page_size + last for count, last in zip(pages, lasts, strict=True)]
            counts = (qo_indptr[1:] - qo_indptr[:-1]).tolist()
            self.step = step_of(tables, torch.tensor(lens, dtype=torch.int32), qo_indptr.cpu(), max(counts))
            assert causal and q_data_type == kv_data_type
            self.shape, self.scale, self.window = (
                HeadShape(num_qo_heads, num_kv_heads, head_dim_qk),
                sm_scale,
                window_left,
            )

        def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
            cache = torch.stack(paged_kv_cache).cpu().float()
            flat = q.reshape(q.shape[0], -1).cpu().float()
            out = REFERENCE.attention(flat, self.step, cache, self.shape, self.scale, self.window + 1)
            return out.view(q.shape).to(q)

    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    module.__version__ = "9.9"  # type: ignore[attr-defined]
    return module


def importer(*names: str) -> Any:
    made = {"flashinfer": flashinfer_stand_in, "flash_attn_interface": flash_attn_stand_in}

    def load(name: str) -> ModuleType:
        if name not in names:
            raise ImportError(f"No module named '{name}'")
        return made[name]()

    return load


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpi_engine.ops.cuda.attention_libraries.WORKSPACE_BYTES", 1024)


@pytest.mark.parametrize(
    ("there", "name", "because"),
    [
        (("flashinfer", "flash_attn_interface"), "flashinfer", "attention by flashinfer 9.9 (the first choice)"),
        (("flash_attn_interface",), "flash-attn", "not flashinfer: module flashinfer does not import: ImportError"),
        ((), "triton", "not flash-attn: module flash_attn_interface does not import"),
    ],
)
def test_the_first_that_imports_is_taken_and_the_log_says_why(
    there: tuple[str, ...], name: str, because: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_attention("auto", HOPPER, PLACE, importer(*there)).name == name
    assert because in caplog.text


@pytest.mark.parametrize("name", ["flashinfer", "flash-attn", "triton"])
def test_one_that_is_asked_for_is_taken(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_attention(name, HOPPER, PLACE, importer("flashinfer", "flash_attn_interface")).name == name
    assert f"(--attention-backend {name})" in caplog.text


@pytest.mark.parametrize("name", ["flashinfer", "flash-attn"])
def test_one_that_does_not_import_is_refused_by_name(name: str) -> None:
    with pytest.raises(OpsUnavailable, match=f"^--attention-backend {name}: module .* does not import.*or use triton"):
        choose_attention(name, HOPPER, PLACE, importer())


@pytest.mark.parametrize(
    ("name", "asked", "words"),
    [
        ("flash-attn", Asked((8, 0), torch.bfloat16, torch.bfloat16, 128), "capability 9.0, this GPU has 8.0"),
        ("flash-attn", Asked((9, 0), torch.bfloat16, torch.bfloat16, 260), "up to 256"),
        ("flashinfer", Asked((9, 0), torch.bfloat16, torch.bfloat16, 80), "heads of 64, 128, 256.*are 80 wide"),
        ("flashinfer", Asked((9, 0), torch.float32, torch.float32, 64), "not in float32"),
        ("flash-attn", Asked((9, 0), torch.bfloat16, torch.float8_e4m3fn, 64), "cache of 8 bits"),
        ("flashinfer", Asked((9, 0), torch.bfloat16, torch.bfloat16, None), "latent attention"),
        ("flashinfer", Asked(None, torch.bfloat16, torch.bfloat16, 64), "interpreter"),
    ],
)
def test_what_a_library_is_not_for(name: str, asked: Asked, words: str) -> None:
    load = importer("flashinfer", "flash_attn_interface")
    with pytest.raises(OpsUnavailable, match=f"--attention-backend {name}: .*{words}"):
        choose_attention(name, asked, PLACE, load)
    other = choose_attention("auto", asked, PLACE, load)  # and is passed over
    assert other.name != name


def test_a_name_that_is_not_known() -> None:
    with pytest.raises(ValueError, match="expected auto, flashinfer, flash-attn or triton; got 'xformers'"):
        choose_attention("xformers", HOPPER, PLACE)


@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("library", ["flashinfer", "flash-attn"])
@pytest.mark.parametrize("pieces", [PIECES, [(1, 30), (1, 1), (1, 17)], [(20, 20)]], ids=["mixed", "decodes", "prompt"])
def test_calls(library: str, window: int, pieces: list[tuple[int, int]]) -> None:
    step, blocks = build_step(pieces)
    cache = random(2, blocks, PAGE_SIZE, 2, 64, seed=1)
    q = random(step.ids.shape[0], 6 * 64, seed=2)
    attend: Any
    if library == "flashinfer":
        attend = FlashInferAttention(flashinfer_stand_in(), PLACE)
    else:
        attend = FlashAttention(flash_attn_stand_in())
    want = REFERENCE.attention(q.cpu(), moved(step, "cpu"), cache.cpu(), SHAPE, 0.125, window)
    close(attend(q, step, cache, SHAPE, 0.125, window), want)


def test_a_step_is_planned_once_for_all_layers_of_a_kind() -> None:
    module = flashinfer_stand_in()
    attend = FlashInferAttention(module, PLACE)
    step, blocks = build_step(PIECES)
    cache = random(2, blocks, PAGE_SIZE, 2, 64, seed=1)
    q = random(step.ids.shape[0], 6 * 64, seed=2)
    for window in (0, 0, 20, 20):
        attend(q, step, cache, SHAPE, 0.125, window)
    assert module.BatchPrefillWithPagedKVCacheWrapper.plans == 2
    again, _ = build_step(PIECES)
    attend(q, again, cache, SHAPE, 0.125, 20)
    assert module.BatchPrefillWithPagedKVCacheWrapper.plans == 3


def test_no_queries() -> None:
    step, blocks = build_step([(1, 5)])
    cache = random(2, blocks, PAGE_SIZE, 2, 64)
    nothing = torch.empty(0, 6 * 64, device=DEVICE)
    for attend in (FlashAttention(flash_attn_stand_in()), FlashInferAttention(flashinfer_stand_in(), PLACE)):
        assert attend(nothing, step, cache, SHAPE, 0.125, 0).shape == (0, 6 * 64)


def test_the_backend_chooses_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CudaOps(DEVICE, torch.float32, head_dim=64)._attention.name == "triton"
    with pytest.raises(OpsUnavailable, match="--attention-backend flashinfer"):
        CudaOps(DEVICE, torch.float32, attention="flashinfer", head_dim=64)
    chosen = FlashAttention(flash_attn_stand_in())
    monkeypatch.setattr("dpi_engine.ops.cuda.backend.choose_attention", lambda *args: chosen)
    ops = CudaOps(DEVICE, torch.float32, head_dim=64)
    step, blocks = build_step([(3, 20)])
    cache, q = random(2, blocks, PAGE_SIZE, 2, 64), random(3, 6 * 64, seed=2)
    want = REFERENCE.attention(q.cpu(), moved(step, "cpu"), cache.cpu(), SHAPE, 0.125)
    close(ops.attention(q, step, cache, SHAPE, 0.125), want)


def test_modules_are_named_once() -> None:
    assert list(attention_choice.MODULES) == ["flashinfer", "flash-attn"]
