"""The operations models are made of, and the choice of the backend that runs them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from dpi_engine.ops.eight_bit import FORMATS, KV_FORMATS, EightBitTorchOps
from dpi_engine.ops.interface import Ops, OpsUnavailable
from dpi_engine.ops.torch_int8 import Int8TorchOps
from dpi_engine.ops.torch_ref import TorchOps

__all__ = ["Ops", "OpsUnavailable", "TorchOps", "parse_dtype", "select_ops", "torch_dtype_here"]

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """'auto' or None -> None, else the torch dtype. Raises ValueError naming the known ones."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return None
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: expected auto, {', '.join(_DTYPES)}; got '{dtype}'")
    return _DTYPES[dtype]


def torch_dtype_here(device: torch.device) -> torch.dtype:
    """The dtype torch computes best in on `device`: bfloat16 where the hardware multiplies it."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if device.type == "cpu":
        # Older torch has no public list of features, only these two questions.
        if hasattr(torch.cpu, "get_capabilities"):
            features = torch.cpu.get_capabilities()
            fast = any(features.get(name) for name in ("avx512_bf16", "amx_bf16"))
        else:
            fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        if fast:
            return torch.bfloat16
    return torch.float32


def select_ops(
    device: str = "auto",
    dtype: str | torch.dtype | None = None,
    name: str = "auto",
    threads: int = 1,
    cache_dir: str | os.PathLike[str] | None = None,
    quantization: str | None = None,
    kv_cache: str = "auto",
    attention: str = "auto",
    head_dim: int | None = None,
) -> Ops:
    """The backend for `device` ('auto', 'cpu', 'cuda', 'cuda:1').

    `name` 'torch' is the reference; 'cpu' and 'cuda' our kernels for that kind of device, and their absence an error;
    'auto' our kernels for the device, with a warning and the reference where they cannot run. `threads` is the number
    of compute threads, set process-wide on a CPU; a numbered GPU becomes the process's current one. `cache_dir` holds
    the built kernels. `quantization`: None, or int8 or fp8 for linears; `kv_cache`: auto, or fp8 for KV caches. There
    is no other kind of these than the one asked for. `attention`: auto, or what computes it on GPUs, for heads of
    `head_dim` (ops/cuda/attention_choice.py). Raises OpsUnavailable, or ValueError for an unknown name, dtype,
    quantization or kind of cache.
    """
    if name not in ("auto", "torch", "cpu", "cuda"):
        raise ValueError(f"ops: expected auto, torch, cpu or cuda; got '{name}'")
    if quantization is not None and quantization not in FORMATS:
        raise ValueError(f"quantization: expected {', '.join(FORMATS)} or none, got '{quantization}'")
    if kv_cache not in KV_FORMATS:
        raise ValueError(f"KV cache: expected {' or '.join(KV_FORMATS)}, got '{kv_cache}'")
    wanted = parse_dtype(dtype)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise OpsUnavailable(f"device '{device}' is not one that torch knows: {error}") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise OpsUnavailable(f"device '{device}': this torch ({torch.__version__}) sees no CUDA device")
    if attention != "auto" and (name == "torch" or (place.type == "cpu" and name != "cuda")):
        raise OpsUnavailable(
            f"--attention-backend {attention} chooses among kernels for GPUs, not for ops '{name}' on "
            f"'{device}': leave it out"
        )
    if place.type == "cpu":
        torch.set_num_threads(max(1, threads))
    if name in ("cpu", "cuda") and place.type != name and not (name == "cuda" and _interpreted()):
        raise OpsUnavailable(f"ops '{name}' runs on device {name}, not on '{device}'")
    eight = [f"--quantization {quantization}"] if quantization is not None else []
    eight += [f"--kv-cache-dtype {kv_cache}"] if kv_cache != "auto" else []
    if place.type == "cpu" and name in ("auto", "cpu") and eight not in ([], ["--quantization int8"]):
        raise OpsUnavailable(
            f"{' and '.join(eight)}: the kernels for CPUs have int8 linears alone; --ops torch computes this on CPUs, "
            "many times slower"
        )
    if place.type == "cuda" and place.index is not None:
        if place.index >= torch.cuda.device_count():
            raise OpsUnavailable(f"device '{device}': this machine has {torch.cuda.device_count()} CUDA device(s)")
        torch.cuda.set_device(place)
    if name != "torch":
        try:
            kind = place.type if name == "auto" else name
            if kind == "cuda":
                dtype_there = wanted or torch_dtype_here(place)
                return _cuda_kernels(place, dtype_there, quantization, KV_FORMATS[kv_cache], attention, head_dim)
            return _kernels(place, wanted, kind, threads, cache_dir, quantization)
        except OpsUnavailable as error:
            if attention != "auto":
                raise
            if eight:
                raise OpsUnavailable(
                    f"{error}; --ops torch computes {' and '.join(eight)} too, many times slower"
                ) from error
            if name != "auto":
                raise
            name = place.type
            log.warning(
                "%s (%s): running on plain torch, %s slower. --ops torch silences this, --ops %s makes it an error.",
                *(_MISSING.get(name, "there are no kernels"), error, _SLOWER.get(name, "perhaps"), name),
            )
    dtype_here = wanted or torch_dtype_here(place)
    kv_dtype = KV_FORMATS[kv_cache]
    if quantization is None:
        return TorchOps(place, dtype_here, kv_dtype)
    if quantization == "int8" and place.type == "cpu":  # as the kernels for CPUs have it, activations too
        return Int8TorchOps(place, dtype_here, kv_dtype)
    return EightBitTorchOps(place, dtype_here, quantization, kv_dtype)


_MISSING = {
    "cpu": "the compiled CPU kernels cannot be used",
    "cuda": "the Triton kernels cannot be used",
}
_SLOWER = {"cpu": "two to three times", "cuda": "without CUDA graphs and much"}


def _interpreted() -> bool:
    """Triton runs kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _kernels(
    place: torch.device,
    dtype: torch.dtype | None,
    name: str,
    threads: int,
    cache_dir: str | os.PathLike[str] | None,
    quantization: str | None,
) -> Ops:
    if name == "cpu":
        return _cpu_kernels(dtype, threads, cache_dir, quantization)
    raise OpsUnavailable(f"there are none for device '{place}'")


def _cuda_kernels(
    place: torch.device,
    dtype: torch.dtype,
    quantization: str | None,
    kv_dtype: torch.dtype | None,
    attention: str,
    head_dim: int | None,
) -> Ops:
    try:
        from dpi_engine.ops.cuda import CudaOps
    except ImportError as error:
        raise OpsUnavailable(f"Triton does not import: {error}; it comes with the extra 'cuda'") from error
    return CudaOps(place, dtype, quantization, kv_dtype, attention, head_dim)


def _cpu_kernels(
    dtype: torch.dtype | None, threads: int, cache_dir: str | os.PathLike[str] | None, quantization: str | None
) -> Ops:
    try:
        from dpi_engine.ops.cpu import make_cpu_ops
    except ImportError as error:
        raise OpsUnavailable(f"module dpi_engine.ops.cpu does not load: {error}") from error
    folder = Path(cache_dir) if cache_dir is not None else Path.home() / ".cache" / "dpinference"
    ops: Ops = make_cpu_ops(dtype, threads, folder, quantization)
    return ops
