"""The compiled kernels as Python functions: load the library, declare its signatures, join torch's OpenMP runtime."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch  # noqa: F401 - its OpenMP runtime must be in the process before the kernels are

from dpi_engine.ops.interface import OpsUnavailable

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float

SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "dpi_prepare": ([], _I),
    "dpi_run": ([_P, _L, _I], _L),
    "dpi_embed": ([_P] * 3 + [_L] * 3 + [_I] * 3, _I),
    "dpi_rms_norm": ([_P, _P, _P, _P, _L, _L, _F, _I, _I, _I], None),
    "dpi_silu_mul": ([_P, _P, _L, _L, _I, _I], None),
    "dpi_rope_write": ([_P] * 10 + [_L] * 3 + [_I] * 3 + [_F, _I, _I, _I], _I),
    "dpi_attention": ([_P] * 7 + [_L] * 3 + [_I] * 5 + [_F, _I, _I, _I], _I),
    "dpi_latent_write": ([_P] * 10 + [_L] * 3 + [_I] * 4 + [_F, _I, _I, _I], _I),
    "dpi_latent_attention": ([_P] * 6 + [_L] * 3 + [_I] * 4 + [_F, _I, _I, _I], _I),
    "dpi_experts": ([_P] * 8 + [_L] * 4 + [_I] * 4, _I),
    "dpi_pack_panels": ([_P, _P, _L, _L, _I, _I], None),
    "dpi_route": ([_P] * 6 + [_L] * 3 + [_I] * 6 + [_F, _I, _I], _I),
    "dpi_linear": ([_P] * 4 + [_L] * 3 + [_I], None),
    "dpi_linear_dot": ([_P] * 4 + [_L] * 3 + [_I] * 2, _I),
    "dpi_linear_int8": ([_P] * 6 + [_L] * 3 + [_I] * 2, _I),
    "dpi_int8_room": ([_L], _L),
    "dpi_pack_int8": ([_P] * 3 + [_L] * 2 + [_I] * 2, _I),
    "dpi_pack_linear": ([_P, _P, _L, _L, _I], None),
    "dpi_argmax": ([_P, _P, _P, _L, _L, _I, _I], None),
    "dpi_logsumexp": ([_P, _P, _L, _L, _I, _I], None),
    "dpi_topk": ([_P, _P, _P, _L, _L, _L, _I, _I], _I),
}

_RUNTIMES = ("libgomp", "libiomp5", "libomp")


def openmp_runtimes() -> list[str]:
    """Paths of the OpenMP runtimes mapped into this process."""
    found: dict[str, None] = {}
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            path = line.rstrip("\n").partition("/")[2]
            if Path(path).name.startswith(_RUNTIMES):
                found["/" + path] = None
    return list(found)


def load(path: Path) -> ctypes.CDLL:
    """Raises OpsUnavailable when the library does not load or is not ours."""
    runtimes = openmp_runtimes()
    if not runtimes:
        raise OpsUnavailable("this torch has no OpenMP runtime (libgomp, libiomp5), which the CPU kernels need")
    try:
        # Already mapped: this only makes its symbols visible to the kernels, which name no runtime of their own.
        ctypes.CDLL(runtimes[0], mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(path))
        for name, (arguments, result) in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = result
    except (OSError, AttributeError) as error:
        raise OpsUnavailable(f"CPU kernels {path} do not load: {error}") from error
    if library.dpi_prepare():
        raise OpsUnavailable(f"CPU kernels {path}: the operating system does not grant what this instruction set needs")
    return library
