"""Model specs from config.json and GGUF metadata: what each architecture means, and errors that name the key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as hs

from dpi_engine.config.errors import ModelSpecError
from dpi_engine.config.model_spec import ARCHITECTURES, LATER_ARCHITECTURES, ModelSpec
from dpi_engine.config.moe_spec import MlaSpec, MoeSpec
from dpi_engine.config.rope import LinearRope, Llama3Rope, YarnRope

BASE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def config(architecture: str = "LlamaForCausalLM", **changes: object) -> dict:
    return {"architectures": [architecture], **BASE, **changes}


DEEPSEEK = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
MOE_KEYS = {
    "MixtralForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
}


def moe_config(architecture: str, **changes: object) -> dict:
    return config(architecture, **{**MOE_KEYS[architecture], **changes})


def spec(architecture: str = "LlamaForCausalLM", **changes: object) -> ModelSpec:
    return ModelSpec.from_config(config(architecture, **changes))


def refused(data: dict, *words: str) -> None:
    with pytest.raises(ModelSpecError) as caught:
        ModelSpec.from_config(data)
    for word in words:
        assert word in str(caught.value)


def without(key: str, architecture: str = "LlamaForCausalLM") -> dict:
    return {k: v for k, v in config(architecture).items() if k != key}


def test_a_plain_llama():
    s = spec()
    assert (s.hidden_size, s.num_layers, s.num_heads, s.num_kv_heads, s.head_dim) == (64, 4, 4, 2, 16)
    assert (s.q_size, s.kv_size, s.vocab_size, s.max_position_embeddings) == (64, 32, 1000, 512)
    assert (s.rope_theta, s.rope_scaling, s.rms_norm_eps, s.dtype) == (10000.0, None, 1e-5, "bfloat16")
    assert not (s.tie_word_embeddings or s.attention_bias or s.attention_out_bias or s.mlp_bias or s.qk_norm)
    assert (s.eos_token_ids, s.bos_token_id, s.layer_windows) == ((2,), 1, (0, 0, 0, 0))


@pytest.mark.parametrize(
    ("architecture", "changes", "qkv", "out", "mlp", "norm"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, True, True, True, False),
        ("MistralForCausalLM", {"sliding_window": None}, False, False, False, False),
        ("Qwen2ForCausalLM", {}, True, False, False, False),
        ("Qwen3ForCausalLM", {"head_dim": 16}, False, False, False, True),
        ("Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": True}, True, True, False, True),
    ],
)
def test_biases_and_norms_of_each_architecture(architecture, changes, qkv, out, mlp, norm):
    s = spec(architecture, **changes)
    assert (s.attention_bias, s.attention_out_bias, s.mlp_bias, s.qk_norm) == (qkv, out, mlp, norm)


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 7}, (0, 0, 0, 0)),
        ("MistralForCausalLM", {"sliding_window": None}, (0, 0, 0, 0)),
        ("MistralForCausalLM", {"sliding_window": 7}, (7, 7, 7, 7)),
        ("MistralForCausalLM", {}, (4096,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 7}, (0, 0, 0, 0)),
        ("Qwen2ForCausalLM", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 7)),
        ("Qwen2ForCausalLM", {"sliding_window": 7, "use_sliding_window": True}, (0, 0, 0, 0)),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            },
            (0, 7, 0, 7),
        ),
    ],
)
def test_sliding_windows_per_layer(architecture, changes, windows):
    assert spec(architecture, **changes).layer_windows == windows


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, 1e5, None),
        ({"rope_parameters": {"rope_theta": 1e5}, "rope_theta": 1e4}, 1e5, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 1e4, LinearRope(2.0)),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 1e4, Llama3Rope(8.0, 1.0, 4.0, 8192)),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            5e5,
            Llama3Rope(8.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
            1e4,
            YarnRope(4.0, 128),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "mscale": 1.0, "truncate": False}},
            1e4,
            YarnRope(4.0, 512, beta_fast=16.0, mscale=1.0, truncate=False),
        ),
    ],
)
def test_rope_in_old_and_new_form(changes, theta, scaling):
    s = spec(**changes)
    assert (s.rope_theta, s.rope_scaling) == (theta, scaling)


def test_end_tokens_are_gathered_from_both_files():
    s = ModelSpec.from_config(config(eos_token_id=[5, 6]), {"eos_token_id": [6, 7]})
    assert s.eos_token_ids == (5, 6, 7)
    assert ModelSpec.from_config(config(eos_token_id=None, bos_token_id=None), {}).eos_token_ids == ()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_under_either_key(key):
    assert ModelSpec.from_config({**without("torch_dtype"), key: "float16"}).dtype == "float16"
    assert ModelSpec.from_config(without("torch_dtype")).dtype == "float32"


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
@pytest.mark.parametrize("value", [None, "64", 64.0, True, -1, 0, [64]])
def test_sizes_must_be_there_and_whole(key, value):
    refused(config(**{key: value}), "config.json", repr(key))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (without("architectures"), ["'architectures' is missing"]),
        (config() | {"architectures": "LlamaForCausalLM"}, ["'architectures'", "a list with one name"]),
        (config("LLamaForCausalLM"), ["'LLamaForCausalLM' is not known", *ARCHITECTURES, "Did you mean"]),
        (without("max_position_embeddings"), ["'max_position_embeddings' is missing"]),
        (without("num_key_value_heads", "MistralForCausalLM"), ["'num_key_value_heads' is missing"]),
        (config(num_key_value_heads=3), ["4 attention heads cannot share 3"]),
        (config(num_key_value_heads=0), ["4 attention heads cannot share 0"]),
        (config(hidden_size=66), ["hidden_size 66", "num_attention_heads 4", "head_dim"]),
        (config(head_dim=15), ["15", "even width"]),
        (config(hidden_act="gelu"), ["'hidden_act'", "'silu'", "'gelu'"]),
        (config(quantization_config={"quant_method": "awq"}), ["'awq'", "GGUF"]),
        (config(torch_dtype="float8"), ["'torch_dtype'", "bfloat16", "'float8'"]),
        (config(tie_word_embeddings="yes"), ["'tie_word_embeddings'", "true or false"]),
        (config(rms_norm_eps=0), ["'rms_norm_eps'", "above 0"]),
        (config(rms_norm_eps=float("nan")), ["'rms_norm_eps'", "finite"]),
        (config(rope_theta="big"), ["'rope_theta'", "'big'"]),
        (config(rope_scaling=[1]), ["'rope_scaling'", "a mapping"]),
        (config(rope_scaling={"type": "dynamic", "factor": 2}), ["rope_type 'dynamic'", "linear, llama3, yarn"]),
        (config(rope_scaling={"type": "linear"}), ["rope_scaling", "'factor' is missing"]),
        (config(rope_scaling={"type": "yarn", "factor": -1}), ["'factor'", "above 0"]),
        (config(rope_parameters={"a": {"rope_theta": 1}}), ["rope_parameters", "one entry per kind of layer"]),
        (config(rope_parameters={"partial_rotary_factor": 0.5}), ["'partial_rotary_factor'", "0.5"]),
        (config(partial_rotary_factor=0.25), ["'partial_rotary_factor'", "0.25"]),
        (config(eos_token_id="x"), ["'eos_token_id'", "token id"]),
        (config(eos_token_id=1000), ["token id 1000", "vocabulary of 1000"]),
        (config("Qwen2ForCausalLM", use_sliding_window=True, layer_types=["x"]), ["'layer_types'", "4 entries"]),
        (config("MistralForCausalLM", num_hidden_layers=5000), ["'num_hidden_layers'", "at most 4096"]),
        (config(num_hidden_layers=10**9), ["'num_hidden_layers'", "at most 4096"]),
        ([], ["config.json", "a mapping"]),
    ],
)
def test_what_cannot_be_run_is_named(data, words):
    refused(data, *words)


@pytest.mark.parametrize("architecture", LATER_ARCHITECTURES)
def test_some_mixtures_of_experts_are_known_but_not_in_this_version(architecture):
    refused(config(architecture), architecture, "not in this version")


def moe_of(architecture: str, **changes: object) -> MoeSpec:
    got = ModelSpec.from_config(moe_config(architecture, **changes)).moe
    assert got is not None
    return got


def test_experts_of_each_architecture():
    assert moe_of("MixtralForCausalLM") == MoeSpec(num_experts=8, top_k=2, intermediate_size=128, layers=(0, 1, 2, 3))
    qwen = moe_of("Qwen3MoeForCausalLM", mlp_only_layers=[3], decoder_sparse_step=2, norm_topk_prob=True)
    assert qwen == MoeSpec(num_experts=8, top_k=2, intermediate_size=32, layers=(1,))
    assert not moe_of("Qwen3MoeForCausalLM").normalize
    common = {"num_experts": 16, "top_k": 4, "intermediate_size": 32, "layers": (1, 2, 3), "scaling": 2.5}
    v3 = MoeSpec(
        **common, shared_intermediate_size=64, scoring="sigmoid", correction_bias=True, groups=4, kept_groups=2,
        group_best=2,
    )  # fmt: skip
    assert moe_of("DeepseekV3ForCausalLM") == v3
    v2 = MoeSpec(**common, shared_intermediate_size=64, normalize=False)
    assert moe_of("DeepseekV2ForCausalLM") == v2
    grouped = moe_of("DeepseekV2ForCausalLM", topk_method="group_limited_greedy", n_shared_experts=None)
    assert (grouped.groups, grouped.kept_groups, grouped.group_best) == (4, 2, 1)
    assert grouped.shared_intermediate_size == 0


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_the_newer_name_for_the_number_of_experts(architecture):
    data = moe_config(architecture)
    data.pop("num_experts", None)
    assert ModelSpec.from_config({**data, "num_local_experts": 6}).moe.num_experts == 6


def test_latent_attention():
    s = ModelSpec.from_config(moe_config("DeepseekV3ForCausalLM", head_dim=8, num_nextn_predict_layers=1))
    assert s.mla == MlaSpec(q_rank=24, kv_rank=16, nope_dim=12, rope_dim=8, value_dim=10)
    assert (s.head_dim, s.rope_dim, s.num_kv_heads, s.q_size, s.extra_layers) == (20, 8, 4, 80, 1)
    direct = ModelSpec.from_config(moe_config("DeepseekV2ForCausalLM", q_lora_rank=None, rope_interleave=False))
    assert direct.mla.q_rank is None and not direct.mla.interleaved


def test_windows_and_theta_of_mixtures():
    assert ModelSpec.from_config(moe_config("MixtralForCausalLM")).layer_windows == (0,) * 4
    assert ModelSpec.from_config(moe_config("MixtralForCausalLM")).rope_theta == 1e6
    assert ModelSpec.from_config(moe_config("MixtralForCausalLM", sliding_window=7)).layer_windows == (7,) * 4
    windowed = moe_config("Qwen3MoeForCausalLM", sliding_window=7, use_sliding_window=True)
    assert ModelSpec.from_config(windowed).layer_windows == (7,) * 4


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("MixtralForCausalLM", {"num_local_experts": None}, ["'num_local_experts' is missing"]),
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, ["9 experts per token", "only 8"]),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": None}, ["'moe_intermediate_size' is missing"]),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": "x"}, ["'mlp_only_layers'", "a list of layer numbers"]),
        ("DeepseekV3ForCausalLM", {"n_group": 5}, ["16 experts do not divide into 5 groups"]),
        ("DeepseekV3ForCausalLM", {"topk_group": 5}, ["cannot choose 5 of 4 groups"]),
        ("DeepseekV3ForCausalLM", {"n_group": 16, "topk_group": 4}, ["groups of 1 experts by their 2 best"]),
        ("DeepseekV3ForCausalLM", {"num_experts_per_tok": 9}, ["hold fewer than the 9 experts per token"]),
        ("DeepseekV3ForCausalLM", {"n_group": None}, ["'n_group' is missing"]),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, ["'scoring_func'", "'sigmoid'"]),
        ("DeepseekV3ForCausalLM", {"topk_method": "greedy"}, ["'topk_method'", "'noaux_tc'"]),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, ["'topk_method'", "'group_limited_greedy'"]),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, ["'norm_topk_prob'", "false"]),
        ("DeepseekV2ForCausalLM", {"moe_layer_freq": 2}, ["'moe_layer_freq'", "1"]),
        ("DeepseekV2ForCausalLM", {"attention_bias": True}, ["'attention_bias'", "not in this version"]),
        ("DeepseekV2ForCausalLM", {"kv_lora_rank": None}, ["'kv_lora_rank' is missing"]),
        ("DeepseekV2ForCausalLM", {"qk_rope_head_dim": 7}, ["7", "even width"]),
        ("DeepseekV3ForCausalLM", {"quantization_config": {"quant_method": "fp8"}}, ["'fp8'"]),
    ],
)
def test_what_of_a_mixture_cannot_be_run_is_named(architecture, changes, words):
    refused(moe_config(architecture, **changes), "config.json", *words)


_VALUE = hs.recursive(
    hs.none() | hs.booleans() | hs.integers() | hs.floats() | hs.text(max_size=5),
    lambda x: hs.lists(x, max_size=3) | hs.dictionaries(hs.text(max_size=5), x, max_size=3),
    max_leaves=6,
)
_KEYS = [
    *BASE,
    "architectures",
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "head_dim",
    "dtype",
    *DEEPSEEK,
    "num_local_experts",
    "num_experts",
    "mlp_only_layers",
    "decoder_sparse_step",
    "moe_layer_freq",
    "topk_method",
    "num_nextn_predict_layers",
]


@given(hs.sampled_from(ARCHITECTURES), hs.dictionaries(hs.sampled_from(_KEYS), _VALUE, max_size=3))
def test_no_config_escapes_as_another_error(architecture, changes):
    try:
        whole = config(architecture, use_sliding_window=True, **MOE_KEYS.get(architecture, {}))
        got = ModelSpec.from_config(whole | changes)
    except ModelSpecError as e:
        assert "config.json" in str(e)
    else:
        assert len(got.layer_windows) == got.num_layers and got.num_heads % got.num_kv_heads == 0


GGUF = {
    "general.architecture": "llama",
    "general.file_type": 3,
    "llama.embedding_length": 64,
    "llama.block_count": 3,
    "llama.feed_forward_length": 128,
    "llama.context_length": 512,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 16,
    "llama.rope.freq_base": 1e5,
    "tokenizer.ggml.tokens": ["a"] * 50,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 3,
    "tokenizer.ggml.bos_token_id": 1,
}
TENSORS = ["token_embd.weight", "blk.0.attn_q.weight"]


def as_arch(arch: str, **changes: object) -> dict:
    renamed = {k.replace("llama.", arch + "."): v for k, v in GGUF.items()}
    return renamed | {"general.architecture": arch} | changes


def test_gguf_metadata_of_a_llama():
    s = ModelSpec.from_gguf_metadata(GGUF, TENSORS)
    assert (s.architecture, s.hidden_size, s.num_layers, s.head_dim) == ("LlamaForCausalLM", 64, 3, 16)
    assert (s.vocab_size, s.rope_theta, s.tie_word_embeddings, s.dtype) == (50, 1e5, True, "bfloat16")
    assert (s.eos_token_ids, s.bos_token_id, s.layer_windows) == ((2, 3), 1, (0, 0, 0))
    assert not ModelSpec.from_gguf_metadata(GGUF, [*TENSORS, "output.weight"]).tie_word_embeddings


def test_gguf_metadata_of_mixtures():
    mixtral = ModelSpec.from_gguf_metadata(GGUF | {"llama.expert_count": 8, "llama.expert_used_count": 2}, TENSORS)
    assert mixtral.architecture == "MixtralForCausalLM"
    assert mixtral.moe == MoeSpec(num_experts=8, top_k=2, intermediate_size=128, layers=(0, 1, 2))
    sizes = {"qwen3moe.expert_count": 8, "qwen3moe.expert_used_count": 2, "qwen3moe.expert_feed_forward_length": 32}
    qwen = ModelSpec.from_gguf_metadata(as_arch("qwen3moe", **sizes), TENSORS)
    assert (qwen.architecture, qwen.qk_norm) == ("Qwen3MoeForCausalLM", True)
    assert qwen.moe == MoeSpec(num_experts=8, top_k=2, intermediate_size=32, layers=(0, 1, 2))


def test_gguf_metadata_of_qwen_and_of_variants():
    qwen2 = ModelSpec.from_gguf_metadata(as_arch("qwen2"), TENSORS)
    assert (qwen2.architecture, qwen2.attention_bias, qwen2.qk_norm) == ("Qwen2ForCausalLM", True, False)
    wide = as_arch("qwen3", **{"qwen3.attention.key_length": 32, "qwen3.rope.dimension_count": 32})
    qwen3 = ModelSpec.from_gguf_metadata(wide, TENSORS)
    assert (qwen3.architecture, qwen3.head_dim, qwen3.qk_norm, qwen3.attention_bias) == (
        "Qwen3ForCausalLM",
        32,
        True,
        False,
    )
    yarn = GGUF | {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    yarn["llama.rope.scaling.original_context_length"] = 128
    assert ModelSpec.from_gguf_metadata(yarn, TENSORS).rope_scaling == YarnRope(4.0, 128)
    linear = GGUF | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    assert ModelSpec.from_gguf_metadata(linear, TENSORS).rope_scaling == LinearRope(2.0)
    window = GGUF | {"llama.attention.sliding_window": 9, "general.file_type": 1}
    got = ModelSpec.from_gguf_metadata(window, TENSORS)
    assert (got.layer_windows, got.dtype) == ((9, 9, 9), "float16")


@pytest.mark.parametrize(
    ("metadata", "tensors", "words"),
    [
        ({}, TENSORS, ["'general.architecture' is missing"]),
        (as_arch("gemma"), TENSORS, ["'gemma' is not known", "llama, qwen2, qwen3"]),
        (as_arch("qwen3moe"), TENSORS, ["'qwen3moe.expert_count' is missing"]),
        (as_arch("qwen2moe"), TENSORS, ["'qwen2moe'", "safetensors"]),
        (as_arch("deepseek2"), TENSORS, ["'deepseek2'", "safetensors"]),
        (GGUF | {"llama.expert_count": 8}, TENSORS, ["'llama.expert_used_count' is missing"]),
        (GGUF | {"llama.expert_count": 8, "llama.expert_used_count": 9}, TENSORS, ["9 experts per token"]),
        (as_arch("qwen3", **{"qwen3.expert_count": 8}), TENSORS, ["'qwen3' with experts", "llama, qwen3moe"]),
        (GGUF, [*TENSORS, "rope_freqs.weight"], ["rope_freqs.weight", "safetensors"]),
        (GGUF | {"llama.block_count": "3"}, TENSORS, ["'llama.block_count'", "whole number"]),
        (GGUF | {"llama.rope.dimension_count": 8}, TENSORS, ["'llama.rope.dimension_count'", "16"]),
        (GGUF | {"llama.attention.value_length": 8}, TENSORS, ["'llama.attention.value_length'", "16"]),
        (GGUF | {"llama.rope.scaling.type": "longrope"}, TENSORS, ["longrope", "none, linear, yarn"]),
        (GGUF | {"tokenizer.ggml.tokens": "abc"}, TENSORS, ["'tokenizer.ggml.tokens'", "list"]),
        (GGUF | {"tokenizer.ggml.eos_token_id": 50}, TENSORS, ["token id 50"]),
    ],
)
def test_gguf_metadata_that_cannot_be_run_is_named(metadata, tensors, words):
    with pytest.raises(ModelSpecError) as caught:
        ModelSpec.from_gguf_metadata(metadata, tensors)
    for word in words:
        assert word in str(caught.value)
