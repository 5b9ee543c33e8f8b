"""What a model is made of, read from `config.json` or GGUF metadata into one frozen struct."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from dpi_engine.config.errors import ModelSpecError, near
from dpi_engine.config.keys import Keys, describe
from dpi_engine.config.moe_spec import MAX_LAYERS, MlaSpec, MoeSpec, gguf_moe, read_mla, read_moe
from dpi_engine.config.rope import DEFAULT_THETA, RopeScaling, gguf_scaling, read_rope

DENSE_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
MOE_ARCHITECTURES = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
ARCHITECTURES = DENSE_ARCHITECTURES + MOE_ARCHITECTURES
"""Architectures that run in this version."""

LATER_ARCHITECTURES = ("Qwen2MoeForCausalLM",)
"""Mixtures of experts known by name, not in this version."""

GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""general.architecture of GGUF files that are read; `llama` with experts is Mixtral."""

_GGUF_SAFETENSORS_ONLY = ("deepseek2", "qwen2moe")
_DEFAULT_THETAS = {"MixtralForCausalLM": 1e6}
_GGUF_DTYPES = {0: "float32", 1: "float16"}

_DTYPES = ("bfloat16", "float16", "float32")


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and switches of one decoder. Sizes count elements, positions count tokens.

    `attention_bias`: q, k and v projections have a bias; `attention_out_bias`: the output projection has one.
    `layer_windows[i]`: keys that layer i's attention sees, the query's own included; 0 for all.
    `moe`: routed experts, None for a dense model; `mla`: latent attention, None for grouped-query attention. With
    `mla`, `head_dim` is the width of a query head, and `num_kv_heads` equals `num_heads`.
    `extra_layers`: layers that the checkpoint has after the last one, for speculation; they are not run.
    `dtype`: of the stored weights (for quantized GGUF the type they are widened to).
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float = DEFAULT_THETA
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int, ...] = ()
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    extra_layers: int = 0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "bfloat16"

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, where: str = "config.json"
    ) -> ModelSpec:
        """Read a parsed config.json; end tokens named only by generation_config.json are added.

        Raises ModelSpecError: unknown architecture, missing or wrongly typed key, or a variant that cannot be run.
        """
        keys = Keys(config, where)
        architecture = _architecture(keys)
        _refuse_variants(keys)
        hidden, layers, heads = (
            keys.integer(k, low=1) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        max_position = keys.integer("max_position_embeddings", low=1)
        theta, scaling = read_rope(keys, max_position, _DEFAULT_THETAS.get(architecture, DEFAULT_THETA))
        windows = _layer_windows(keys, architecture, layers)
        mla = read_mla(keys) if architecture.startswith("Deepseek") else None
        bias = keys.flag("attention_bias", False)
        qwen2 = architecture == "Qwen2ForCausalLM"
        qwen3 = architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
        biased = (architecture == "LlamaForCausalLM" or qwen3) and bias
        spec = cls(
            architecture=architecture,
            hidden_size=hidden,
            intermediate_size=keys.integer("intermediate_size", low=1),
            num_layers=layers,
            num_heads=heads,
            # Only Llama predates grouped heads; elsewhere a guess would fit no checkpoint.
            num_kv_heads=heads
            if mla
            else keys.integer("num_key_value_heads", *([heads] if architecture.startswith("Llama") else [])),
            head_dim=mla.nope_dim + mla.rope_dim if mla else _head_dim(keys, hidden, heads, architecture),
            vocab_size=keys.integer("vocab_size", low=1),
            max_position_embeddings=max_position,
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6, above=0.0),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=keys.flag("tie_word_embeddings", False),
            attention_bias=qwen2 or biased,
            attention_out_bias=biased,
            mlp_bias=architecture == "LlamaForCausalLM" and keys.flag("mlp_bias", False),
            qk_norm=qwen3,
            layer_windows=windows,
            moe=read_moe(keys, architecture, layers),
            mla=mla,
            extra_layers=keys.integer("num_nextn_predict_layers", 0, high=64) if mla else 0,
            eos_token_ids=_merge(keys.ids("eos_token_id"), generation_config, where),
            bos_token_id=next(iter(keys.ids("bos_token_id")), None),
            dtype=_dtype(keys),
        )
        return _checked(spec, where)

    @classmethod
    def from_gguf_metadata(
        cls, metadata: Mapping[str, Any], tensor_names: Collection[str], where: str = "GGUF metadata"
    ) -> ModelSpec:
        """Read GGUF metadata (key -> plain value; arrays as lists). `tensor_names` tell whether embeddings are tied.

        Raises ModelSpecError as `from_config` does.
        """
        keys = Keys(metadata, where)
        arch = keys.text("general.architecture")
        if arch in _GGUF_SAFETENSORS_ONLY:
            raise ModelSpecError(
                f"{where}: general.architecture {arch!r} is not read from GGUF in this version; serve the model's "
                "safetensors form, where this version has its architecture"
            )
        if arch not in GGUF_ARCHITECTURES:
            known = ", ".join(GGUF_ARCHITECTURES)
            raise ModelSpecError(f"{where}: general.architecture {arch!r} is not known; known: {known}.")
        if "rope_freqs.weight" in tensor_names:
            raise ModelSpecError(
                f"{where}: rotary frequencies come as a tensor (rope_freqs.weight), which is not in this version; "
                "serve the model's safetensors form, whose config.json has them as numbers"
            )
        hidden, layers, heads = (
            keys.integer(f"{arch}.{k}", low=1) for k in ("embedding_length", "block_count", "attention.head_count")
        )
        max_position = keys.integer(f"{arch}.context_length", low=1)
        head_dim = keys.integer(f"{arch}.attention.key_length", hidden // heads, low=1)
        _same(keys, f"{arch}.attention.value_length", head_dim)
        _same(keys, f"{arch}.rope.dimension_count", head_dim)
        window = keys.integer(f"{arch}.attention.sliding_window", 0)
        eos = keys.ids("tokenizer.ggml.eos_token_id") + keys.ids("tokenizer.ggml.eot_token_id")
        moe = gguf_moe(keys, arch, layers)
        spec = cls(
            architecture="MixtralForCausalLM" if moe and arch == "llama" else GGUF_ARCHITECTURES[arch],
            hidden_size=hidden,
            intermediate_size=keys.integer(f"{arch}.feed_forward_length", low=1),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=keys.integer(f"{arch}.attention.head_count_kv", heads, low=1),
            head_dim=head_dim,
            vocab_size=_gguf_vocab(keys, arch),
            max_position_embeddings=max_position,
            rms_norm_eps=keys.number(f"{arch}.attention.layer_norm_rms_epsilon", above=0.0),
            rope_theta=keys.number(f"{arch}.rope.freq_base", DEFAULT_THETA, above=0.0),
            rope_scaling=gguf_scaling(metadata, arch, max_position, where),
            tie_word_embeddings="output.weight" not in tensor_names,
            attention_bias=arch == "qwen2" or "blk.0.attn_q.bias" in tensor_names,
            attention_out_bias="blk.0.attn_output.bias" in tensor_names,
            mlp_bias="blk.0.ffn_down.bias" in tensor_names,
            qk_norm=arch in ("qwen3", "qwen3moe"),
            layer_windows=(window,) * min(layers, MAX_LAYERS),
            moe=moe,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            bos_token_id=next(iter(keys.ids("tokenizer.ggml.bos_token_id")), None),
            dtype=_GGUF_DTYPES.get(keys.integer("general.file_type", -1, low=-1), "bfloat16"),
        )
        return _checked(spec, where)

    @property
    def rope_dim(self) -> int:
        """Width of the part of a head that is rotated."""
        return self.mla.rope_dim if self.mla else self.head_dim

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim


def _architecture(keys: Keys) -> str:
    names = keys.raw("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise keys.wrong("architectures", "a list with one name", names)
    name = names[0]
    if name in LATER_ARCHITECTURES:
        raise ModelSpecError(f"{keys.where}: {name} is a mixture of experts, which is not in this version")
    if name not in ARCHITECTURES:
        raise ModelSpecError(
            f"{keys.where}: architecture {name!r} is not known; known: {', '.join(ARCHITECTURES)}."
            f"{near(name, ARCHITECTURES)}"
        )
    return name


def _refuse_variants(keys: Keys) -> None:
    if keys.has("quantization_config"):
        method = keys.mapping("quantization_config").get("quant_method", "unnamed")
        raise ModelSpecError(
            f"{keys.where}: weights quantized with {method!r} are not in this version; use the unquantized model, "
            "or a GGUF file of it"
        )
    activation = keys.text("hidden_act", "silu")
    if activation != "silu":
        raise keys.wrong("hidden_act", "'silu'", activation)
    if keys.number("partial_rotary_factor", 1.0) != 1.0:
        raise keys.wrong("partial_rotary_factor", "1.0 (the whole head is rotated)", keys.raw("partial_rotary_factor"))


def _head_dim(keys: Keys, hidden: int, heads: int, architecture: str) -> int:
    if keys.has("head_dim") or architecture == "Qwen3ForCausalLM":
        return keys.integer("head_dim", 128, low=1)
    if hidden % heads:
        raise ModelSpecError(
            f"{keys.where}: hidden_size {hidden} is no multiple of num_attention_heads {heads}; give head_dim"
        )
    return hidden // heads


def _layer_windows(keys: Keys, architecture: str, layers: int) -> tuple[int, ...]:
    if layers > MAX_LAYERS:
        raise keys.wrong("num_hidden_layers", f"at most {MAX_LAYERS}", layers)
    if architecture == "LlamaForCausalLM" or architecture.startswith("Deepseek"):
        return (0,) * layers
    mistral = architecture in ("MistralForCausalLM", "MixtralForCausalLM")
    # A null window means none; an absent key means the architecture's own default.
    absent = "sliding_window" not in keys.data
    window = (0 if architecture == "MixtralForCausalLM" else 4096) if absent else keys.integer("sliding_window", 0)
    if not mistral and not keys.flag("use_sliding_window", False):
        return (0,) * layers
    if architecture == "Qwen3MoeForCausalLM":
        return (window,) * layers  # one window for all layers
    if keys.has("layer_types"):
        types = keys.raw("layer_types")
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != layers or any(t not in known for t in types):
            raise keys.wrong("layer_types", f"{layers} entries, each one of {', '.join(known)}", types)
        return tuple(window if t == "sliding_attention" else 0 for t in types)
    first = 0 if mistral else keys.integer("max_window_layers", 28)
    return tuple(window if i >= first else 0 for i in range(layers))


def _merge(eos: tuple[int, ...], generation: Mapping[str, Any] | None, where: str) -> tuple[int, ...]:
    more = Keys(generation, f"generation_config.json beside {where}").ids("eos_token_id") if generation else ()
    return tuple(dict.fromkeys(eos + more))


def _dtype(keys: Keys) -> str:
    key = "dtype" if keys.has("dtype") else "torch_dtype"
    name = keys.text(key, "float32")
    if name not in _DTYPES:
        raise keys.wrong(key, f"one of {', '.join(_DTYPES)}", name)
    return name


def _gguf_vocab(keys: Keys, arch: str) -> int:
    if keys.has(f"{arch}.vocab_size"):
        return keys.integer(f"{arch}.vocab_size", low=1)
    tokens = keys.raw("tokenizer.ggml.tokens")
    if not isinstance(tokens, list | tuple) or not tokens:
        raise keys.wrong("tokenizer.ggml.tokens", "a list of tokens", tokens)
    return len(tokens)


def _same(keys: Keys, key: str, head_dim: int) -> None:
    if keys.integer(key, head_dim) != head_dim:
        raise keys.wrong(key, f"{head_dim}, the width of a head", keys.raw(key))


def _checked(spec: ModelSpec, where: str) -> ModelSpec:
    """Relations between fields that no single key can break."""
    if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
        raise ModelSpecError(
            f"{where}: {spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads evenly"
        )
    if spec.rope_dim % 2:
        raise ModelSpecError(f"{where}: a head is {describe(spec.rope_dim)} wide; rotation needs an even width")
    for token in (*spec.eos_token_ids, *([] if spec.bos_token_id is None else [spec.bos_token_id])):
        if token >= spec.vocab_size:
            raise ModelSpecError(f"{where}: token id {token} lies outside the vocabulary of {spec.vocab_size}")
    return spec
