"""Fingerprints: equal for equal work whatever the node, different by name otherwise; digests of weight headers."""

from __future__ import annotations

import contextlib
import json
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as hs

from dpi_engine.config import fingerprint as fp
from dpi_engine.config.errors import WeightFileError
from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.config.moe_spec import MlaSpec, MoeSpec
from dpi_engine.config.settings import FIELDS, Settings, parse_serve
from dpi_engine.config.weight_headers import header_digest, weights_digest

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    layer_windows=(0, 0),
    eos_token_ids=(2,),
)


def resolved(settings: Settings, **changes: object) -> dict:
    known = {"weights_digest": "ab", "dtype": "bfloat16", "max_model_len": 256, "wire_version": 1}
    return fp.resolved(settings, changes.pop("spec", SPEC), **(known | changes))


def test_launches_of_one_service_declare_the_same():
    head = parse_serve(["m", "-dp", "4", "-dpl", "2", "-asc", "1", "--port", "1"])
    other = parse_serve(
        [
            "m",
            "-dp",
            "4",
            "-dpl",
            "1",
            "-dpr",
            "3",
            "--headless",
            "-dpa",
            "h",
            "--log-level",
            "debug",
            "--host",
            "0.0.0.0",
        ]
    )
    assert fp.declared(head) == fp.declared(other)
    assert fp.diff(fp.declared(head), fp.declared(other)) == []
    assert fp.digest(fp.declared(head)) == fp.digest(fp.declared(other))


def test_per_node_and_secret_settings_are_in_no_fingerprint():
    names = set(resolved(Settings(model="m"))) | set(fp.declared(Settings(model="m")))
    for word in (
        "host",
        "port",
        "address",
        "local",
        "rank",
        "headless",
        "api_key",
        "threads",
        "log_level",
        "cache_dir",
    ):
        assert not [n for n in names if word in n.split("_") or n == word], word


@pytest.mark.parametrize(
    ("argv", "field", "got"),
    [
        (["--max-num-seqs", "32"], "max_num_seqs", 32),
        (["--max-model-len", "100"], "max_model_len", 100),
        (["--dtype", "float32"], "dtype", "float32"),
        (["-q", "int8"], "quantization", "int8"),
        (["--kv-cache-dtype", "fp8"], "kv_cache_dtype", "fp8"),
        (["-dp", "2"], "data_parallel_size", 2),
        (["--seed", "1"], "seed", 1),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--scheduling-policy", "priority"], "scheduling_policy", "priority"),
    ],
)
def test_one_differing_flag_is_named(argv, field, got):
    head, other = fp.declared(parse_serve(["m"])), fp.declared(parse_serve(["m", *argv]))
    assert fp.diff(head, other) == [fp.FieldDiff(field, head[field], got)]
    assert fp.digest(head) != fp.digest(other)


def test_what_makes_a_mixture_differs_field_by_field():
    moe = MoeSpec(num_experts=8, top_k=2, intermediate_size=4, layers=(0, 1))
    mla = MlaSpec(q_rank=None, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=4)
    replace = msgspec.structs.replace
    head = resolved(Settings(model="m"), spec=replace(SPEC, moe=moe, mla=mla))
    assert head["spec.moe.top_k"] == 2 and head["spec.mla.kv_rank"] == 8
    assert not {"spec.moe", "spec.mla"} & head.keys()
    other = replace(SPEC, moe=replace(moe, top_k=4, layers=(1,)), mla=replace(mla, value_dim=8))
    names = [d.field for d in fp.diff(head, resolved(Settings(model="m"), spec=other))]
    assert names == ["spec.mla.value_dim", "spec.moe.layers", "spec.moe.top_k"]
    assert fp.digest(head) == fp.digest(resolved(Settings(model="m"), spec=replace(SPEC, moe=moe, mla=mla)))


def test_unset_is_declared_as_auto():
    assert fp.declared(Settings(model="m"))["max_model_len"] == "auto"
    assert fp.declared(Settings(model="m"))["schema_version"] == fp.SCHEMA_VERSION


def test_the_mode_is_declared_not_the_flags_that_lead_to_it():
    implied = Settings(model="m", data_parallel_size=4, data_parallel_size_local=2, data_parallel_start_rank=2)
    asked = Settings(model="m", data_parallel_size=4, data_parallel_size_local=2, data_parallel_hybrid_lb=True)
    assert fp.declared(implied) == fp.declared(asked)
    assert fp.declared(implied)["load_balancing_mode"] == "hybrid"


def test_resolved_fields_survive_the_wire_and_name_differences_of_the_model():
    head = resolved(parse_serve(["m"]))
    assert "model" not in head
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(head))
    assert fp.diff(head, travelled) == [] and fp.digest(head) == fp.digest(travelled)
    other = msgspec.structs.replace(SPEC, rope_theta=5e5, layer_windows=(0, 8))
    names = [d.field for d in fp.diff(head, resolved(parse_serve(["elsewhere"]), spec=other, weights_digest="cd"))]
    assert names == ["spec.layer_windows", "spec.rope_theta", "weights_digest"]


def test_a_mismatch_is_told_with_rank_peer_field_expected_and_got():
    head, other = resolved(parse_serve(["m"])), resolved(parse_serve(["m"]), dtype="float16", wire_version=2)
    with pytest.raises(fp.FingerprintMismatch) as caught:
        fp.require_equal(head, other, rank=3, peer="10.0.0.4")
    assert [d.field for d in caught.value.diffs] == ["dtype", "wire_version"]
    message = str(caught.value)
    for word in ("rank 3 (10.0.0.4)", "dtype: expected 'bfloat16', got 'float16'", "wire_version: expected 1, got 2"):
        assert word in message
    fp.require_equal(head, dict(head), rank=3)


def test_fields_only_one_side_knows_are_not_compared():
    assert fp.diff({"a": 1, "b": 2}, {"a": 1, "c": 3}) == []


def test_true_is_not_one():
    assert [d.field for d in fp.diff({"a": True}, {"a": 1})] == ["a"]


_JSON = hs.recursive(
    hs.none() | hs.booleans() | hs.integers(-(2**53), 2**53) | hs.text(max_size=5), lambda x: hs.lists(x, max_size=3)
)


@given(hs.dictionaries(hs.text(max_size=5), _JSON, max_size=6), hs.randoms())
def test_digest_ignores_the_order_of_fields(fields, random):
    items = list(fields.items())
    random.shuffle(items)
    assert fp.digest(dict(items)) == fp.digest(fields)
    assert json.loads(fp.canonical(fields)) == fields


@given(hs.dictionaries(hs.sampled_from("abc"), _JSON), hs.dictionaries(hs.sampled_from("abc"), _JSON))
def test_diff_is_empty_exactly_when_common_fields_are_equal(a, b):
    common = a.keys() & b.keys()
    same = fp.digest({k: a[k] for k in common}) == fp.digest({k: b[k] for k in common})
    assert (fp.diff(a, b) == []) == same
    assert [d.field for d in fp.diff(a, b)] == [d.field for d in fp.diff(b, a)]


def test_canonical_form_refuses_what_json_cannot_say():
    with pytest.raises(ValueError):
        fp.canonical({"a": float("nan")})


def test_every_shared_flag_is_declared():
    assert {f.name for f in FIELDS if f.flag.shared} <= set(fp.declared(Settings(model="m")))


# -- weight headers --


def safetensors(path, tensors: dict[str, list[int]], fill: bytes = b"\0", note: str = "") -> None:
    header, offset = {"__metadata__": {"note": note}} if note else {}, 0
    for name, shape in tensors.items():
        size = 4
        for n in shape:
            size *= n
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + fill * offset)


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def gguf(path, tensors: dict[str, list[int]], version: int = 3, tail: bytes = b"\1" * 4096) -> bytes:
    metadata = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("llama.block_count") + struct.pack("<II", 4, 2),
        text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 3) + struct.pack("<3f", 1, 2, 3),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
        text("flag") + struct.pack("<I?", 7, True),
    ]
    data = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)) + b"".join(metadata)
    offset = 0
    for name, shape in tensors.items():
        data += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)
        offset += 64
    path.write_bytes(data + tail)
    return data


def test_digest_sees_headers_and_sizes_not_content_nor_folder(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    safetensors(a / "m.safetensors", {"w": [2, 3]}, b"\0")
    safetensors(b / "m.safetensors", {"w": [2, 3]}, b"\7")
    assert weights_digest([a / "m.safetensors"]) == weights_digest([b / "m.safetensors"])
    safetensors(b / "m.safetensors", {"w": [3, 2]})
    assert weights_digest([a / "m.safetensors"]) != weights_digest([b / "m.safetensors"])
    safetensors(b / "m.safetensors", {"v": [2, 3]})
    assert weights_digest([a / "m.safetensors"]) != weights_digest([b / "m.safetensors"])


def test_digest_of_shards_ignores_their_order(tmp_path):
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for i, path in enumerate(paths):
        safetensors(path, {f"w{i}": [i + 1]})
    assert weights_digest(paths) == weights_digest(reversed(paths))
    assert weights_digest(paths) != weights_digest(paths[:2])


def test_gguf_digest_ends_where_the_tensors_begin(tmp_path):
    a, b, c = tmp_path / "a.gguf", tmp_path / "b.gguf", tmp_path / "c.gguf"
    gguf(a, {"w": [2, 3]})
    gguf(b, {"w": [2, 3]}, tail=b"\2" * 4096)
    gguf(c, {"w": [3, 2]})
    assert header_digest(a) == header_digest(b) != header_digest(c)


def test_every_truncation_of_a_header_is_an_error(tmp_path):
    path = tmp_path / "m.gguf"
    data = gguf(path, {"w": [2], "v": [3]})
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(WeightFileError, match=r"m\.gguf"):
            header_digest(path)
    path = tmp_path / "m.safetensors"
    safetensors(path, {"w": [2]})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightFileError, match=r"m\.safetensors"):
            header_digest(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"NOPE" + b"\0" * 60, "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), "at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62), "at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 99), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1), "array of arrays"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 77, 1), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("t") + struct.pack("<I", 2**31), "dimensions"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("t") + struct.pack("<IIQ", 0, 0, 0), "claims 0 dimensions"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("t") + struct.pack("<IQIQ", 1, 2, 0, 33), "no multiple of 32"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("t") + struct.pack("<IQIQ", 1, 2, 0, 2**50), "beyond its end"),
    ],
)
def test_malformed_gguf_is_named(tmp_path, data, words):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(WeightFileError, match=words):
        header_digest(path)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 3) + b"{]}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 8) + b'{"a": 1}',
        struct.pack("<Q", 27) + b'{"a": {"data_offsets": [0]}}'[:27],
    ],
)
def test_malformed_safetensors_is_named(tmp_path, data):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(WeightFileError, match=r"x\.safetensors"):
        header_digest(path)


@given(hs.binary(max_size=200), hs.sampled_from(["x.gguf", "x.safetensors"]), hs.booleans())
def test_random_bytes_never_escape_as_another_error(tmp_path_factory, data, name, magic):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes((b"GGUF\3\0\0\0" if magic else b"") + data)
    with contextlib.suppress(WeightFileError):
        assert len(header_digest(path)) == 64


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(WeightFileError, match=r"none\.gguf"):
        weights_digest([tmp_path / "none.gguf"])


def test_a_hybrid_launch_of_one_rank_may_join_launches_of_more():
    several = parse_serve(["m", "-dp", "3", "-dpl", "2", "-dph"])
    one = parse_serve(["m", "-dp", "3", "-dpl", "1", "-dpr", "2"])
    assert fp.declared(one) == fp.declared(several)
    assert fp.declared(parse_serve(["m", "-dp", "3", "-dpn", "2"]))["load_balancing_mode"] == "external"
