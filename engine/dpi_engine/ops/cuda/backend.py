"""The backend for CUDA devices: our Triton kernels, and the matrix products that torch takes from cuBLAS."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpi_engine.ops import torch_moe
from dpi_engine.ops.cuda import experts as expert_kernels
from dpi_engine.ops.cuda import linear as linear_kernels
from dpi_engine.ops.cuda import rope as rope_kernels
from dpi_engine.ops.cuda import router as router_kernels
from dpi_engine.ops.cuda import rows, sampling
from dpi_engine.ops.cuda.attention_choice import Asked, choose_attention
from dpi_engine.ops.cuda.runtime import interpreted
from dpi_engine.ops.eight_bit import FORMATS, EightBitLinear, EightBitTorchOps, pack_eight_bit
from dpi_engine.ops.interface import Draws, HeadShape, OpsUnavailable, RopeTable, StepTensors
from dpi_engine.ops.torch_ref import TorchOps

MAX_HEAD_DIM = 256
MAX_ROW = 65536
"""Widest row that one program norms."""


class CudaOps(TorchOps):
    """Linears of 16 bits, the embedding and latent attention are those of TorchOps; so is the layout of caches.

    `quantization`: None, or one of eight_bit.FORMATS for linears. `attention`: as choose_attention has it; `head_dim`:
    width of the model's heads, None for latents. Raises OpsUnavailable where the kernels cannot run:
    no CUDA device, one older than compute capability 8.0 (8.9 for e4m3), or a kernel that does not compile or gives a
    wrong answer in a small try.
    """

    name = "cuda"
    draws = True
    records = True

    def __init__(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        quantization: str | None = None,
        kv_dtype: torch.dtype | None = None,
        attention: str = "auto",
        head_dim: int | None = None,
    ) -> None:
        if quantization is not None and quantization not in FORMATS:
            raise OpsUnavailable(f"quantization '{quantization}' is not one of {', '.join(FORMATS)}")
        super().__init__(device, dtype, kv_dtype)
        self.quantization = quantization
        self._prepack = False
        if self.device.type != "cuda" and not interpreted():
            raise OpsUnavailable(f"ops 'cuda' runs on CUDA devices, not on '{device}'")
        capability = None
        if self.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(self.device)
            if major < 8:
                raise OpsUnavailable(
                    f"ops 'cuda' needs compute capability 8.0 or newer; device '{device}' has {major}.{minor}"
                )
            capability = (major, minor)
            check_e4m3(str(device), capability, quantization, self.kv_dtype)
        self._try()
        asked = Asked(capability, dtype, self.kv_dtype, head_dim)
        self._attention = choose_attention(attention, asked, self.device)

    def _try(self) -> None:
        """One small kernel against torch: whether Triton finds its compiler, and the driver takes what it makes."""
        x = torch.arange(48, dtype=torch.float32, device=self.device).view(3, 16)
        try:
            got = rows.rms_norm(x, torch.ones(16, device=self.device), 1e-6).cpu()
        except Exception as error:  # Triton raises what its compiler, its launcher and the driver do
            raise OpsUnavailable(f"Triton's kernels do not run here: {type(error).__name__}: {error}") from error
        want = x.cpu() * torch.rsqrt(x.cpu().square().mean(-1, keepdim=True) + 1e-6)
        if not torch.allclose(got, want, rtol=1e-4, atol=1e-4):
            raise OpsUnavailable("Triton's kernels give wrong results here (root mean square norm of a small table)")
        if self.quantization is not None:
            self._try_linear(self.quantization)

    def _try_linear(self, quantization: str) -> None:
        """A small product with weights of 8 bits."""
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(24, 48, generator=generator)
        x = torch.randn(3, 48, generator=generator).to(self.dtype)
        reference = EightBitTorchOps("cpu", self.dtype, quantization)
        want = reference.linear(x, reference.pack_linear(weight)).float()
        try:
            got = self.linear(x.to(self.device), self.pack_linear(weight)).cpu().float()
        except Exception as error:  # as above
            raise OpsUnavailable(
                f"linears of {quantization} do not run here: {type(error).__name__}: {error}"
            ) from error
        self.bytes_saved = 0
        if not torch.allclose(got, want, rtol=0.02, atol=0.1):
            raise OpsUnavailable(f"Triton's linears of {quantization} give wrong results here (a small product)")

    # Linears

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        if self.quantization is None:
            return super().pack_linear(weight, bias)
        return pack_eight_bit(weight, bias, self, self.quantization)

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        if isinstance(packed, EightBitLinear):
            return linear_kernels.linear(x.contiguous(), packed)
        return super().linear(x, packed)

    # Rows

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rows.rms_norm(x, weight, eps) if x.shape[1] <= MAX_ROW else super().rms_norm(x, weight, eps)

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        if residual.shape[1] > MAX_ROW:
            return super().add_rms_norm(residual, delta, weight, eps)
        return rows.add_rms_norm(residual, delta, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return rows.silu_mul(gate_up)

    # Attention

    def new_cache(self, num_blocks: int, shape: HeadShape) -> Tensor:
        if shape.dim > MAX_HEAD_DIM or shape.dim % 2:
            raise OpsUnavailable(
                f"ops 'cuda' has attention for even head widths up to {MAX_HEAD_DIM}, the model has {shape.dim}: "
                "use --ops torch"
            )
        return super().new_cache(num_blocks, shape)

    def rope_write(
        self,
        qkv: Tensor,
        step: StepTensors,
        rope: RopeTable,
        cache: Tensor,
        shape: HeadShape,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        return rope_kernels.rope_write(qkv, step, rope, cache, shape, q_norm, k_norm, eps)

    def attention(
        self, q: Tensor, step: StepTensors, cache: Tensor, shape: HeadShape, scale: float, window: int = 0
    ) -> Tensor:
        return self._attention(q, step, cache, shape, scale, window)

    # Experts

    def route(self, x: Tensor, router: torch_moe.Router) -> tuple[Tensor, Tensor]:
        moe = router.moe
        if moe.groups > 1:
            return super().route(x, router)
        logits = torch.nn.functional.linear(x.float(), router.weight)
        return router_kernels.choose(
            logits, router.bias, moe.top_k, moe.scoring == "sigmoid", moe.normalize, moe.scaling
        )

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, packed: torch_moe.PackedExperts) -> Tensor:
        return expert_kernels.experts(x.contiguous(), ids.contiguous(), weights.contiguous(), packed)

    # Tokens

    def argmax(self, logits: Tensor) -> Tensor:
        return sampling.largest(logits)[0]

    def draw(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        return sampling.draw(logits, draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniform)


def check_e4m3(device: str, capability: tuple[int, int], quantization: str | None, kv_dtype: torch.dtype) -> None:
    """Raise OpsUnavailable where floats of 8 bits are asked for and `device` has none."""
    wanted = [
        flag
        for flag, asked in (
            ("--quantization fp8", quantization == "fp8"),
            ("--kv-cache-dtype fp8", kv_dtype == torch.float8_e4m3fn),
        )
        if asked
    ]
    if wanted and capability < (8, 9):
        raise OpsUnavailable(
            f"{' and '.join(wanted)}: e4m3 needs compute capability 8.9 or newer; device '{device}' has "
            f"{capability[0]}.{capability[1]}. --quantization int8 works there; else leave it out"
        )
