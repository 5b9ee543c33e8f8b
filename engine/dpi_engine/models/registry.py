"""From model files to a model that computes."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from dpi_engine.config.errors import ConfigError
from dpi_engine.config.gguf_file import read_header
from dpi_engine.config.model_spec import DENSE_ARCHITECTURES, ModelSpec
from dpi_engine.config.sources import ModelFiles
from dpi_engine.config.tensor_parallel import WHOLE, check_tensor_parallel
from dpi_engine.models.decoder import BlockFactory, Decoder
from dpi_engine.models.deepseek import DeepseekBlocks
from dpi_engine.models.dummy import DummySource
from dpi_engine.models.gguf_weights import GgufSource, quantized
from dpi_engine.models.mixtral import MixtralBlocks
from dpi_engine.models.packed_cache import PackedCache
from dpi_engine.models.qwen3_moe import Qwen3MoeBlocks
from dpi_engine.models.weight_cache import cached
from dpi_engine.models.weights import Progress, SafetensorsSource, Weights, WeightSource
from dpi_engine.ops.exchange import ExpertExchange
from dpi_engine.ops.interface import Ops
from dpi_engine.ops.tensor_group import TensorGroup

log = logging.getLogger(__name__)

Model = Decoder
LOAD_FORMATS = ("auto", "dummy")

_FACTORIES: dict[str, type[BlockFactory]] = dict.fromkeys(DENSE_ARCHITECTURES, BlockFactory) | {
    "MixtralForCausalLM": MixtralBlocks,
    "Qwen3MoeForCausalLM": Qwen3MoeBlocks,
    "DeepseekV2ForCausalLM": DeepseekBlocks,
    "DeepseekV3ForCausalLM": DeepseekBlocks,
}
# Left in checkpoints by older tools; computed here.
_DERIVED = (".rotary_emb.inv_freq",)
INDEX = "model.safetensors.index.json"


def open_weights(files: ModelFiles, spec: ModelSpec, cache_dir: Path | None, progress: Progress) -> WeightSource:
    """The weights of a model. Raises WeightError, GgufError.

    Quantized GGUF goes through the disk cache `cache_dir`/weights (None: dequantized in memory, each time).
    """
    if files.format == "safetensors":
        index = files.directory / INDEX
        return SafetensorsSource(files.weights, index if len(files.weights) > 1 and index.exists() else None)
    path = files.weights[0]
    header = read_header(path)
    if cache_dir is None or not quantized(header):
        return GgufSource(header, spec)
    return cached(lambda: GgufSource(header, spec), path, cache_dir / "weights", progress)


def load_model(
    files: ModelFiles | None,
    spec: ModelSpec,
    ops: Ops,
    *,
    max_model_len: int | None = None,
    cache_dir: Path | None = None,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    exchange: ExpertExchange | None = None,
    group: TensorGroup | None = None,
) -> Model:
    """Build the model of `spec` on `ops` with the weights of `files`.

    `max_model_len` bounds positions (None: the spec's max_position_embeddings). `load_format` 'dummy' takes random
    weights made from `seed` and needs no `files`. `progress(stage, fraction)` is called often enough to show life.
    `exchange` says which experts of a mixture this rank holds and reaches the others; only its own are read. None: all.
    `group`: the workers that share the layers; only the parts of this one are read. None: all parts.
    Raises WeightError (tensor, expected, got, file), GgufError, RopeError, OpsUnavailable, or ConfigError for an
    architecture or load format that is not known, or an exchange or a number of workers that does not fit.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load format '{load_format}' is not known; known: {', '.join(LOAD_FORMATS)}")
    factory = _FACTORIES.get(spec.architecture)
    if factory is None:
        raise ConfigError(f"architecture '{spec.architecture}' is not known; known: {', '.join(_FACTORIES)}")
    if exchange is not None and spec.moe is None:
        raise ConfigError(f"an expert exchange was given, but {spec.architecture} has no experts")
    shard = WHOLE if group is None else group.shard
    check_tensor_parallel(spec, shard.size)
    started = time.monotonic()
    report: Progress = progress or (lambda stage, fraction: None)
    source: WeightSource
    if load_format == "dummy":
        source = DummySource(spec, seed)
    elif files is None:
        raise ConfigError("load format 'auto' needs the model's files; only 'dummy' does without")
    else:
        source = open_weights(files, spec, cache_dir, report)
    try:
        # A tied checkpoint may still carry the head, which is the embedding once more.
        unused = (*_DERIVED, "lm_head.weight") if spec.tie_word_embeddings else _DERIVED
        extra = [f"model.layers.{spec.num_layers + i}." for i in range(spec.extra_layers)]
        packed: PackedCache | None = None
        if cache_dir is not None and files is not None and load_format != "dummy" and ops.layout is not None:
            kind = ops.layout, str(ops.weight_dtype), ops.quantization, shard
            packed = PackedCache(cache_dir / "packed", files.weights, spec, *kind)
        weights = Weights(source, unused, extra, packed)
        max_len = max_model_len or spec.max_position_embeddings
        model = Decoder(spec, ops, weights, factory(exchange, shard), max_len, report, group)
        if load_format != "dummy":
            weights.finish()
        if packed is not None:
            packed.finish()
    finally:
        source.close()
    log.info(
        "loaded %s: %.0f M parameters, %s on %s (%s ops), in %.2f s",
        spec.architecture, weights.elements / 1e6, ops.dtype, ops.device, ops.name, time.monotonic() - started,
    )  # fmt: skip
    if ops.quantization is not None:
        log.info(
            "%s linears: %d MB of weights; as they were: embeddings, norms%s%s",
            ops.quantization,
            model.weight_bytes >> 20,
            "" if spec.mla is None else ", the parts of heads in latent attention",
            "" if spec.moe is None else ", experts and their routers",
        )
    return model
