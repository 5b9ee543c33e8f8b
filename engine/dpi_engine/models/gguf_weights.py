"""Weights of a GGUF file under Hugging Face names, dequantized one tensor at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dpi_engine.config.gguf_file import GgufHeader, GgufTensor
from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.models.weights import Index, WeightError, WeightSource

_F32, _F16 = 0, 1
_PLAIN = {_F32: torch.float32, _F16: torch.float16}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_SINGLE = re.compile(r"(\w+)\.(weight|bias)")
_ROTATED = re.compile(r"self_attn\.(q|k)_proj\.(weight|bias)$")


def hugging_face_name(name: str) -> str | None:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`; None for a name that has no counterpart."""
    if (match := _BLOCK.fullmatch(name)) and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    if (match := _SINGLE.fullmatch(name)) and match[1] in _TOP:
        return f"{_TOP[match[1]]}.{match[2]}"
    return None


def quantized(header: GgufHeader) -> bool:
    """True when some tensor has to be computed rather than read."""
    return any(t.ggml_type not in _PLAIN for t in header.tensors.values())


class GgufSource(WeightSource):
    """Matrices as bfloat16 when they were quantized, else as stored; vectors as float32."""

    def __init__(self, header: GgufHeader, spec: ModelSpec) -> None:
        """Raises WeightError for a tensor of an unknown type or one that ends beyond the file."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # slow, and needed only without a cache

        self._header = header
        # Llama's q and k rows are stored in the order of the original checkpoint: pairs side by side, not in halves.
        self._unpair = header.metadata.get("general.architecture") == "llama"
        self._heads = {"q": spec.num_heads, "k": spec.num_kv_heads}
        self._tensors: dict[str, GgufTensor] = {}
        self._sizes: dict[str, int] = {}
        for tensor in header.tensors.values():
            name = hugging_face_name(tensor.name) or tensor.name
            try:
                block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.ggml_type)]
            except (ValueError, KeyError):
                raise WeightError(
                    f"{header.path}: tensor '{tensor.name}': ggml type {tensor.ggml_type} is not known"
                ) from None
            if tensor.shape and tensor.shape[-1] % block:
                raise WeightError(
                    f"{header.path}: tensor '{tensor.name}': expected rows of a multiple of {block}, "
                    f"got shape {list(tensor.shape)}"
                )
            count = math.prod(tensor.shape) // block * size
            if tensor.offset + count > header.file_size:
                raise WeightError(
                    f"{header.path}: cut short: tensor '{tensor.name}' ends at byte {tensor.offset + count}, "
                    f"the file has {header.file_size}"
                )
            if name in self._tensors:
                raise WeightError(
                    f"{header.path}: tensors '{self._tensors[name].name}' and '{tensor.name}' are one weight"
                )
            self._tensors[name] = tensor
            self._sizes[name] = count
        self._data = np.memmap(header.path, mode="r", dtype=np.uint8)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def stored_shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype `get` gives."""
        tensor = self._tensors[name]
        if len(tensor.shape) == 1:
            return torch.float32
        return _PLAIN.get(tensor.ggml_type, torch.bfloat16)

    def get(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = self._tensors[name]
        result = self._values(name, tensor.offset, self._sizes[name], tensor.shape)
        rotated = _ROTATED.search(name)
        if self._unpair and rotated:
            result = _unpair_rows(result, self._heads[rotated[1]])
        return result

    def get_part(self, name: str, index: Index, shape: Sequence[int]) -> Tensor:
        """Only the bytes of the wanted entry, or rows, are read and dequantized; blocks never cross a row."""
        tensor = self._tensors[name]
        first, *rest = index
        if isinstance(first, slice):
            return self._rows(name, first.start, first.stop, shape)[(slice(None), *rest)]
        if len(tensor.shape) < 2 or not 0 <= first < tensor.shape[0]:
            raise WeightError(f"{self._header.path}: tensor '{tensor.name}' {list(tensor.shape)} has no entry {first}")
        size, inner, at = self._sizes[name] // tensor.shape[0], tensor.shape[1:], tensor.offset
        at += first * size
        if rest and isinstance(rest[0], slice) and len(inner) > 1:
            row = size // inner[0]
            first, last = rest[0].start, rest[0].stop
            at, size, inner = at + first * row, (last - first) * row, (last - first, *inner[1:])
            rest[0] = slice(None)
        return self._values(name, at, size, inner)[tuple(rest)]

    def _rows(self, name: str, start: int, stop: int, shape: Sequence[int]) -> Tensor:
        """Rows start .. stop - 1. All are read where a part of a head would have to be put in order, or of a vector."""
        tensor = self._tensors[name]
        count = tensor.shape[0]
        rotated = _ROTATED.search(name) if self._unpair else None
        head = max(1, count // self._heads[rotated[1]]) if rotated else 1
        if len(tensor.shape) < 2 or start % head or stop % head:
            return self.get(name, shape)[start:stop]
        size = self._sizes[name] // count
        part = (stop - start, *tensor.shape[1:])
        result = self._values(name, tensor.offset + start * size, (stop - start) * size, part)
        return _unpair_rows(result, (stop - start) // head) if rotated else result

    def _values(self, name: str, offset: int, size: int, shape: tuple[int, ...]) -> Tensor:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize, quant_shape_to_byte_shape

        tensor = self._tensors[name]
        kind = GGMLQuantizationType(tensor.ggml_type)
        raw = np.asarray(self._data[offset : offset + size])
        try:
            if tensor.ggml_type in _PLAIN:
                values = raw.view(np.float32 if tensor.ggml_type == _F32 else np.float16).reshape(shape)
            else:
                values = dequantize(raw.reshape(quant_shape_to_byte_shape(shape, kind)), kind)
        except (NotImplementedError, ValueError) as error:
            raise WeightError(f"{self._header.path}: tensor '{tensor.name}' of type {kind.name}: {error}") from error
        return torch.from_numpy(np.array(values)).to(self.stored_dtype(name))

    def file_of(self, name: str) -> str:
        return str(self._header.path)


def _unpair_rows(rows: Tensor, heads: int) -> Tensor:
    """Rows of each head from (a0 b0 a1 b1 ...) to (a0 a1 ... b0 b1 ...); left alone where they do not divide evenly."""
    if rows.shape[0] % (2 * heads):
        return rows  # the shape check that follows names the tensor
    half = rows.shape[0] // heads // 2
    return rows.view(heads, half, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
