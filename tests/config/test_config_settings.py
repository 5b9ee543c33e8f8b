"""Settings: three sources with one precedence, exact conversions, errors that name the source, and round trips."""

from __future__ import annotations

import argparse
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as hs

from dpi_engine.config import settings as st
from dpi_engine.config.errors import ParallelError, SettingsError
from dpi_engine.config.fields import Field
from dpi_engine.config.loading import FlagParser, metavar, read_sources
from dpi_engine.config.refusals import advice
from dpi_engine.config.settings import BY_NAME, FIELDS, GROUPS, Settings, parse_serve, to_flags

PARSER = FlagParser(prog="dpi serve", allow_abbrev=False)
st.add_arguments(PARSER)


def read(argv: list[str], env: dict[str, str] | None = None) -> Settings:
    """Settings without the rules between fields, so that each field can be tried over its whole range."""
    return Settings(**read_sources(PARSER.parse_args(argv), env or {}, FIELDS))


def write(tmp_path, text: str) -> str:
    path = tmp_path / "conf.yaml"
    path.write_text(text)
    return str(path)


def error(argv: list[str], env: dict[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_serve(argv, env)
    return str(caught.value)


def test_defaults_are_those_of_the_table():
    s = parse_serve(["m"])
    assert s == Settings(model="m")
    assert (s.port, s.management_port, s.max_num_seqs, s.max_num_batched_tokens) == (8000, 8081, 64, 512)
    assert (s.data_parallel_rpc_port, s.data_parallel_address, s.block_size) == (29550, "127.0.0.1", 16)
    assert s.served_names == ["m"]


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["-dp", "4"], "data_parallel_size", 4),
        (["-dp=4"], "data_parallel_size", 4),
        (["-dp", "2", "-dpl", "0"], "data_parallel_size_local", 0),
        (["-dp", "2", "-dpl", "1", "-dpr", "1", "--headless"], "data_parallel_start_rank", 1),
        (["-dpa", "head.ns.svc"], "data_parallel_address", "head.ns.svc"),
        (["-dpp", "31000"], "data_parallel_rpc_port", 31000),
        (["-asc", "3"], "api_server_count", 3),
        (["-tp", "1"], "tensor_parallel_size", 1),
        (["-dpb", "mp"], "data_parallel_backend", "mp"),
        (["-dp", "2", "-dph", "-dpl", "2"], "data_parallel_hybrid_lb", True),
        (["--max_model_len", "128"], "max_model_len", 128),
        (["--max_model_len=128"], "max_model_len", 128),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--kv-cache-memory", "2GiB"], "kv_cache_memory", 2 << 30),
        (["--kv-cache-memory-bytes", "1.5Ki"], "kv_cache_memory", 1536),
        (["--kv-cache-memory", "2 GB"], "kv_cache_memory", 2 * 10**9),
        (["--kv-cache-memory", "123456789012"], "kv_cache_memory", 123456789012),
        (["--api-key", "a", "b", "--api-key", "c"], "api_key", ["a", "b", "c"]),
        (["--api-key=-x"], "api_key", ["-x"]),
        (["--served-model-name", "x", "y"], "served_model_name", ["x", "y"]),
        (["--shutdown-timeout", "2.5"], "shutdown_timeout", 2.5),
        (["--port", "1", "--port", "2"], "port", 2),
    ],
)
def test_flags_and_their_short_forms(argv, name, value):
    assert getattr(parse_serve(["m", *argv]), name) == value


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("DPI_MAX_MODEL_LEN", "64", "max_model_len", 64),
        ("DPI_HEADLESS", "true", "headless", True),
        ("DPI_ENABLE_PREFIX_CACHING", "off", "enable_prefix_caching", False),
        ("DPI_API_KEY", "a, b", "api_key", ["a", "b"]),
        ("DPI_KV_CACHE_MEMORY", "64Mi", "kv_cache_memory", 64 << 20),
        ("DPI_DTYPE", "float32", "dtype", "float32"),
    ],
)
def test_environment(name, text, field, value):
    assert getattr(parse_serve(["m"], {name: text}), field) == value


def test_yaml_keys_with_dashes_or_underscores_and_native_types(tmp_path):
    path = write(
        tmp_path,
        "model: m\nmax-model-len: 64\nmax_num_seqs: 8\nheadless: true\nserved-model-name: [a, b]\napi-key: k\n"
        "kv-cache-memory: 1GiB\nshutdown-timeout: 3\nhost: null\n",
    )
    s = parse_serve(["--config", path])
    assert (s.model, s.max_model_len, s.max_num_seqs, s.headless) == ("m", 64, 8, True)
    assert (s.served_model_name, s.api_key, s.kv_cache_memory) == (["a", "b"], ["k"], 1 << 30)
    assert s.shutdown_timeout == 3.0 and isinstance(s.shutdown_timeout, float) and s.host is None
    assert parse_serve([], {"DPI_CONFIG": path}) == s


def test_flags_win_over_environment_over_yaml_over_default(tmp_path):
    path = write(tmp_path, "model: yaml\nport: 1001\nmax-num-seqs: 11\nseed: 5\n")
    env = {"DPI_PORT": "1002", "DPI_MAX_NUM_SEQS": "12"}
    s = parse_serve(["flag", "--config", path, "--port", "1003"], env)
    assert (s.model, s.port, s.max_num_seqs, s.seed, s.management_port) == ("flag", 1003, 12, 5, 8081)
    assert parse_serve(["--config", path, "--no-headless"], {"DPI_HEADLESS": "1"}).headless is False


@pytest.mark.parametrize(
    ("argv", "env", "words"),
    [
        (["m", "--max-model-len", "abc"], {}, ["flag --max-model-len", "whole number of at least 2", "'abc'"]),
        (["m", "--max-model-len", "0"], {}, ["flag --max-model-len", "at least 2", "'0'"]),
        (["m", "--port", "70000"], {}, ["flag --port", "1..65535", "'70000'"]),
        (["m", "--port", "1_0"], {}, ["flag --port", "'1_0'"]),
        (
            ["m", "--dtype", "bfloat"],
            {},
            ["flag --dtype", "auto, bfloat16, float32, float16", "Did you mean 'bfloat16'"],
        ),
        (["m", "--kv-cache-memory", "2XB"], {}, ["--kv-cache-memory", "2GiB", "'2XB'"]),
        (["m", "--kv-cache-memory", "0"], {}, ["--kv-cache-memory", "'0'"]),
        (["m", "--shutdown-timeout", "nan"], {}, ["--shutdown-timeout", "'nan'"]),
        (["m", "--handshake-timeout", "inf"], {}, ["--handshake-timeout", "'inf'"]),
        (["m", "--host", ""], {}, ["flag --host", "text"]),
        (["m", "--max-modle-len", "3"], {}, ["--max-modle-len is not known", "Did you mean '--max-model-len'"]),
        (["m", "-dq", "3"], {}, ["-dq is not known"]),
        (["m", "--port"], {}, ["--port", "expected one argument", "--help"]),
        (["m", "extra"], {}, ["unrecognized arguments: extra"]),
        (["m", "--headless=yes"], {}, ["--headless"]),
        ([], {}, ["no model given", "DPI_MODEL", "--config"]),
        (["m", "--model", "n"], {}, ["given twice", "'m'", "'n'"]),
        (["m"], {"DPI_PORT": "tcp://10.0.0.7:8000"}, ["DPI_PORT", "tcp://10.0.0.7:8000", "enableServiceLinks: false"]),
        (["m"], {"DPI_DATA_PARALLEL_START_RANK": ""}, ["DPI_DATA_PARALLEL_START_RANK", "Unset the variable"]),
        (["m"], {"DPI_HEADLESS": "maybe"}, ["DPI_HEADLESS", "true or false", "'maybe'"]),
        (["m"], {"DPI_MAX_MODEL_LENN": "3"}, ["DPI_MAX_MODEL_LENN is not known", "'DPI_MAX_MODEL_LEN'"]),
        (["m"], {"DPI_API_KEY": "a,,b"}, ["DPI_API_KEY", "list of texts", "got an empty text"]),
        (["m"], {"DPI_API_KEY": ""}, ["DPI_API_KEY", "got an empty text", "Unset the variable"]),
        (["m", "--api-key", ""], {}, ["flag --api-key", "got an empty text"]),
        (["m", "--api-key", "hunter2", ""], {"DPI_API_KEY": "k"}, ["flag --api-key", "got an empty text"]),
        (["m", "--config", "/nowhere/x.yaml"], {}, ["/nowhere/x.yaml", "No such file"]),
    ],
)
def test_errors_name_source_expected_and_got(argv, env, words):
    message = error(argv, env)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: x\n", ["key port", "1..65535", "'x' (str)"]),
        ("port: '80'\n", ["key port", "'80' (str)", "Remove the quotes"]),
        ("port: true\n", ["key port", "True (bool)"]),
        ("port: 1.5\n", ["key port", "1.5 (float)"]),
        ("headless: 1\n", ["key headless", "true or false", "1 (int)"]),
        ("dtype: 16\n", ["key dtype", "16 (int)", "in quotes"]),
        ("served-model-name: [a, 1]\n", ["key served-model-name", "list of texts"]),
        ("max-modle-len: 3\n", ["key max-modle-len is not known", "'max-model-len'"]),
        ("enable-lora: true\n", ["key enable-lora", "not in this version", "merge the adapter"]),
        ("max-num-seqs: 3\nmax_num_seqs: 4\n", ["given twice"]),
        ("port: 3\nport: 4\n", ["not valid YAML", "'port' is given twice", "line 2"]),
        ("a: [\n", ["not valid YAML", "line 2"]),
        ("- a\n", ["expected keys with values", "list"]),
        ("just text\n", ["expected keys with values"]),
        ("model: !!python/object/apply:os.system [true]\n", ["not valid YAML", "python/object"]),
        ("? [a, b]\n: 1\n", ["conf.yaml"]),
        ("1: 2\n", ["key 1 is not known"]),
        ("config: x\n", ["key config is not known"]),
        ("api-key: 12\n", ["key api-key", "a value that is not shown"]),
        ("api-key: ''\n", ["key api-key", "got an empty text"]),
    ],
)
def test_yaml_errors_name_file_and_key(tmp_path, text, words):
    path = write(tmp_path, text)
    message = error(["m", "--config", path])
    assert path in message
    for word in words:
        assert word in message


def test_yaml_files_are_bounded_and_must_be_text(tmp_path):
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (1 << 20) + b"\n")
    assert "at most 1048576 bytes" in error(["m", "--config", str(big)])
    binary = tmp_path / "bin.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x01model")
    assert "not valid YAML" in error(["m", "--config", str(binary)])
    deep = tmp_path / "deep.yaml"
    deep.write_text("model: " + "[" * 5000)
    assert "not valid YAML" in error(["m", "--config", str(deep)])
    empty = write(tmp_path, "")
    assert parse_serve(["m", "--config", empty]) == Settings(model="m")


def test_all_wrong_values_are_reported_at_once(tmp_path):
    path = write(tmp_path, "seed: -1\n")
    message = error(["m", "--config", path, "--port", "x"], {"DPI_MAX_NUM_SEQS": "y"})
    assert len(message.splitlines()) == 3


def test_secrets_are_in_no_message():
    assert "hunter2" not in repr(parse_serve(["m", "--api-key", "hunter2"]))
    assert "hunter2" not in error(["m"], {"DPI_API_KEY": "hunter2,"})
    assert "hunter2" not in error(["m", "--api-key", "hunter2", ""])


def test_foreign_variables_and_pod_identity_are_left_alone():
    env = {"DPI_SERVICE_HOST": "10.0.0.1", "DPI_POD_IP": "10.0.0.2", "PATH": "/bin", "DPI_PORT_8000_TCP_ADDR": "x"}
    assert parse_serve(["m"], env) == Settings(model="m")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nnodes", "2"], ["--nnodes", "-dpr"]),
        (["--enable-eplb"], ["--enable-eplb", "leave it out"]),
        (["--enable-lora"], ["merge the adapter"]),
        (["--lora-modules", "a=b"], ["merge the adapter"]),
        (["--no-enable-chunked-prefill"], ["--no-enable-chunked-prefill", "--max-num-batched-tokens"]),
        (["-q", "awq"], ["-q", "GGUF"]),
        (["--quantization=gptq"], ["--quantization gptq", "int8", "GGUF"]),
        (["-q", "int8", "--dtype", "float32"], ["--quantization int8 (-q) with --dtype float32", "leave --dtype out"]),
        (["-q", "fp8", "--device", "cpu"], ["--quantization fp8 (-q) with --device cpu", "use int8", "--ops torch"]),
        (["--kv-cache-dtype", "fp8", "--device", "cpu"], ["--kv-cache-dtype fp8 with --device cpu", "--ops torch"]),
        (["--kv-cache-dtype", "fp8", "--data-parallel-protocol", "vllm"], ["--kv-cache-dtype fp8", "round otherwise"]),
        (["--attention-backend", "triton", "--device", "cpu"], ["--attention-backend triton", "kernels for GPUs"]),
        (["--attention-backend", "flash-attn", "--ops", "torch"], ["--attention-backend flash-attn", "leave it out"]),
        (["--kv-cache-dtype-skip-layers", "0"], ["--kv-cache-dtype-skip-layers", "all layers"]),
        (["-q", "int8", "--data-parallel-protocol", "vllm"], ["--data-parallel-protocol vllm", "different answers"]),
        (["--quantization-config", "x"], ["--quantization-config is", "GGUF"]),
        (["-O3"], ["-O3", "--ops"]),
        (["--enable-elastic-ep"], ["not in this version"]),
        (["-tp", "2", "-ep"], ["--tensor-parallel-size 2", "--enable-expert-parallel"]),
        (["-pp", "2"], ["--pipeline-parallel-size 2"]),
        (["-dpb", "ray"], ["--data-parallel-backend ray", "--headless"]),
        (["-ep", "-dp", "2", "--data-parallel-protocol", "vllm"], ["--enable-expert-parallel", "all of one kind"]),
        (["--block-size", "32"], ["--block-size 32", "16"]),
    ],
)
def test_what_is_not_built_is_refused_by_name_with_what_to_do(argv, words):
    message = error(["m", *argv])
    assert "not in this version" in message
    for word in words:
        assert word in message


def test_own_flags_are_never_advised_against():
    assert [o for f in FIELDS for o in f.options if advice(o)] == []
    assert advice("--never-heard-of") is None


def test_a_step_must_hold_one_token_per_sequence():
    message = error(["m", "--max-num-seqs", "1024"])
    assert "--max-num-batched-tokens 512" in message and "--max-num-seqs 1024" in message
    assert parse_serve(["m", "--max-num-seqs", "512"]).max_num_seqs == 512


def test_port_collisions_name_both_ends():
    with pytest.raises(ParallelError, match=r"port 8081 is wanted twice: for --management-port and for --port"):
        parse_serve(["m", "--port", "8081"])
    with pytest.raises(ParallelError, match=r"outputs of API server 0 \(--data-parallel-rpc-port 29550 \+ 11\)"):
        parse_serve(["m", "--port", "29561"])


def test_flags_are_rendered_in_the_tables_order_and_only_if_changed():
    s = Settings(model="m", port=9, data_parallel_size=2, dtype="float32", headless=True, enable_prefix_caching=False)
    assert to_flags(s) == [
        *("m", "--dtype", "float32", "--no-enable-prefix-caching", "--data-parallel-size", "2", "--headless"),
        *("--port", "9"),
    ]
    assert to_flags(Settings(model="-m")) == ["--model=-m"]


_TEXT = hs.text(hs.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)


def values(field: Field) -> hs.SearchStrategy:
    flag = field.flag
    if flag.choices:
        return hs.sampled_from(flag.choices)
    if field.kind is bool:
        return hs.booleans()
    if field.kind is int:
        return hs.integers(int(flag.low or 0), int(flag.high or 10**18))
    if field.kind is float:
        return hs.floats(flag.low, flag.high, allow_nan=False)
    return hs.lists(_TEXT, max_size=3) if field.kind is list else _TEXT


def any_settings() -> hs.SearchStrategy[Settings]:
    optional = {f.name: values(f) | hs.just(f.default) for f in FIELDS if f.name != "model"}
    return hs.builds(Settings, model=_TEXT, **optional)


@given(any_settings())
def test_flags_round_trip(settings):
    assert read(to_flags(settings)) == settings


@given(any_settings())
def test_flags_round_trip_whatever_the_environment_says_of_the_same_fields(settings):
    env = {f.env: str(max(1, f.flag.low or 1)) for f in FIELDS if f.kind is int and f.name != "num_gpu_blocks_override"}
    changed = {f.name for f in st.changed(settings)}
    got = read(to_flags(settings), env)
    for field in FIELDS:
        if field.name in changed:
            assert getattr(got, field.name) == getattr(settings, field.name)


@given(hs.data())
def test_environment_round_trips_for_every_scalar(data):
    field = data.draw(hs.sampled_from([f for f in FIELDS if f.kind is not list and f.name != "model"]))
    value = data.draw(values(field))
    assert getattr(read(["m"], {field.env: field.to_text(value)}), field.name) == value


@given(hs.lists(hs.text(max_size=8), max_size=6), hs.dictionaries(hs.sampled_from([f.env for f in FIELDS]), hs.text()))
def test_no_input_escapes_as_another_error(argv, env):
    try:
        parse_serve(argv, env)
    except SettingsError as e:
        assert str(e)


@pytest.mark.parametrize("flag", ["-h", "--help", "--help=all", "--he", "--version"])
def test_a_flag_that_ends_a_program_is_an_error_like_another_where_settings_are_read(flag, capsys):
    with pytest.raises(SettingsError, match=f"flag {flag.partition('=')[0]} is not known"):
        parse_serve(["m", flag])
    assert capsys.readouterr().out == ""


def test_the_table_is_complete_and_consistent():
    assert [f.name for f in FIELDS] == [f.name for f in msgspec.structs.fields(Settings)]
    options = [o for f in FIELDS for o in f.options]
    assert len(options) == len(set(options))
    for field in FIELDS:
        assert field.flag.group in GROUPS and field.flag.help and not field.flag.help.endswith(".")
        if field.default not in (None, []) and field.name != "model":
            assert field.from_text(field.to_text(field.default)) == field.default
        if field.kind in (int, float):
            assert field.flag.low is not None and (field.flag.high is None or not math.isinf(field.flag.high))
    assert BY_NAME["data_parallel_size"].env == "DPI_DATA_PARALLEL_SIZE"


def test_only_what_is_measured_in_seconds_is_said_to_be():
    for field in FIELDS:
        if field.kind in (int, float):
            assert (metavar(field) == "SECONDS") == field.flag.help.startswith("seconds"), field.option


def test_help_is_grouped_and_shows_defaults():
    parser = argparse.ArgumentParser(prog="x")
    st.add_arguments(parser)
    text = parser.format_help()
    for group in GROUPS:
        assert f"{group}:" in text
    assert "(default: 8000)" in text and "-dpl" in text and "--no-headless" in text and "SUPPRESS" not in text


def test_nested_yaml_aliases_cost_nothing(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    message = error(["m", "--config", write(tmp_path, "\n".join([*lines, "port: *a29"]))])
    assert "key port" in message and len(message) < 10_000


def test_a_value_shown_as_seconds_is_one_of_seconds():
    numbers = [field for field in FIELDS if field.kind is float]
    assert len(numbers) > 2
    for field in numbers:
        assert (metavar(field) == "SECONDS") == field.flag.help.startswith("seconds"), field.name
