"""Triton kernels for CUDA devices, and the backend made of them. Importing this needs Triton."""

from dpi_engine.ops.cuda.backend import CudaOps

__all__ = ["CudaOps"]
