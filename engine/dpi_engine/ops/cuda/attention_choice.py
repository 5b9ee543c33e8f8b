"""Which attention a GPU computes: FlashInfer where it imports, flash-attn 3 next, else our kernels. Chosen once."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from dpi_engine.ops.cuda.attention_libraries import Attention, FlashAttention, FlashInferAttention, TritonAttention
from dpi_engine.ops.interface import OpsUnavailable

log = logging.getLogger(__name__)

MODULES = {"flashinfer": "flashinfer", "flash-attn": "flash_attn_interface"}
"""In order of preference: what to import. After them come our kernels, `triton`."""

FLASHINFER_DIMS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class Asked:
    """What attention is for. capability: of the GPU, None in Triton's interpreter; head_dim None: latent attention."""

    capability: tuple[int, int] | None
    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int | None


def unfit(name: str, asked: Asked) -> str | None:
    """Why library `name` cannot be for that; None where it can."""
    if asked.head_dim is None:
        return "latent attention is PyTorch's"
    if asked.capability is None:
        return "it runs on GPUs, not in Triton's interpreter"
    if asked.dtype == torch.float32:
        return "it computes in 16 bits, not in float32"
    if asked.kv_dtype != asked.dtype:
        return "a cache of 8 bits is read by our kernels"
    if name == "flash-attn":
        if asked.capability[0] != 9:
            return f"version 3 is for compute capability 9.0, this GPU has {asked.capability[0]}.{asked.capability[1]}"
        if asked.head_dim > 256 or asked.head_dim % 8:
            return f"it has heads of up to 256 in steps of 8, the model's are {asked.head_dim} wide"
    elif asked.head_dim not in FLASHINFER_DIMS:
        return f"it has heads of {', '.join(map(str, FLASHINFER_DIMS))}, the model's are {asked.head_dim} wide"
    return None


def choose_attention(
    wanted: str,
    asked: Asked,
    device: torch.device,
    load: Callable[[str], ModuleType] = importlib.import_module,
) -> Attention:
    """The attention `wanted` (auto, flashinfer, flash-attn, triton), logged with the reason.

    Raises OpsUnavailable for a library that was asked for by name and cannot be had; ValueError for another name.
    """
    if wanted not in ("auto", *MODULES, "triton"):
        raise ValueError(f"attention: expected auto, {', '.join(MODULES)} or triton; got '{wanted}'")
    passed_over: list[str] = []
    for name in MODULES if wanted == "auto" else (wanted,):
        if name == "triton":
            break
        why = unfit(name, asked)
        if why is None:
            try:
                module = load(MODULES[name])
                found: Attention = (
                    FlashInferAttention(module, device) if name == "flashinfer" else FlashAttention(module)
                )
            except Exception as error:  # a broken build of a library raises what it likes
                why = f"module {MODULES[name]} does not import: {type(error).__name__}: {error}"
            else:
                version = getattr(module, "__version__", "of unknown version")
                log.info("attention by %s %s (%s)", name, version, _because(wanted, passed_over))
                return found
        passed_over.append(f"not {name}: {why}")
    if wanted in MODULES:
        raise OpsUnavailable(
            f"--attention-backend {wanted}: {passed_over[0].partition(': ')[2]}; leave it out, or use triton"
        )
    log.info("attention by our Triton kernels (%s)", _because(wanted, passed_over))
    return TritonAttention()


def _because(wanted: str, passed_over: list[str]) -> str:
    if wanted != "auto":
        return f"--attention-backend {wanted}"
    return "; ".join(passed_over) or "the first choice"
