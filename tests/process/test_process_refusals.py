"""Pods that cannot join or cannot start: each says what is wrong, and the head goes on."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_model import CONFIG
from process_pods import PORTS, Pod, stopped, until

PROMPT = "blocks are taken"
REFUSED = 78
NO_GROUP = 3


@pytest.fixture(scope="module")
def waiting_head(make_pod: Callable[..., Pod]) -> Iterator[Pod]:
    """A head with rank 0 of 4, which serves while the others are missing."""
    with make_pod("-dp", "4", "-dpl", "1", "--handshake-timeout", "3600", wait=False) as head:
        until(lambda: head.running and serves(head), "rank 0 serves")
        yield head


def serves(pod: Pod) -> bool:
    try:
        return pod.complete(PROMPT, max_tokens=1).status == 200
    except OSError:
        return False


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-dp", "4", "-dpr", "1", "--max-model-len", "512"], ["max_model_len", "expected 'auto'", "got 512"]),
        (["-dp", "4", "-dpr", "1", "--dtype", "bfloat16"], ["dtype", "expected 'float32'", "got 'bfloat16'"]),
        (["-dp", "4", "-dpr", "1", "--seed", "5"], ["seed", "expected 0", "got 5"]),
        (["-dp", "4", "-dpr", "1", "-tp", "2"], ["tensor_parallel_size", "expected 1", "got 2"]),
        (["-dp", "6", "-dpr", "1"], ["data_parallel_size", "expected 4", "got 6"]),
        (["-dp", "4", "-dpr", "1", "--no-enable-prefix-caching"], ["enable_prefix_caching", "expected True"]),
        (["-dp", "8", "-dpr", "6"], ["rank 6 is outside 0..3"]),
        (["-dp", "4", "-dpl", "2", "-dpr", "0"], ["rank 0 is expected beside the head", "--data-parallel-size-local"]),
    ],
)
def test_a_pod_of_another_configuration_is_refused_by_name(
    make_pod: Callable[..., Pod], waiting_head: Pod, flags: list[str], words: list[str]
) -> None:
    with make_pod("-dpl", "1", *flags, head=waiting_head, wait=False) as pod:
        assert pod.wait_exit() == REFUSED
        for word in words:
            assert word in pod.log
        assert "Traceback" not in pod.log
    assert serves(waiting_head)
    assert waiting_head.running


def test_a_pod_of_another_model_is_refused_by_name(
    make_pod: Callable[..., Pod], waiting_head: Pod, tiny_model: Path, tmp_path: Path
) -> None:
    """The flags are the same; that the model differs shows when it has been read."""
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    (other / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 1e-5}))
    with make_pod("-dp", "4", "-dpl", "1", "-dpr", "1", head=waiting_head, wait=False, model=other) as pod:
        assert pod.wait_exit() == REFUSED
        assert "(resolved): " in pod.log
        assert "rms_norm_eps" in pod.log
    assert serves(waiting_head)


def test_a_second_pod_of_the_same_rank_is_refused_and_the_first_goes_on(
    make_pod: Callable[..., Pod], waiting_head: Pod
) -> None:
    flags = ("-dp", "4", "-dpl", "1", "-dpr", "3")
    with make_pod(*flags, head=waiting_head, name="first") as first:
        waiting_head.until_serves(3)
        text = waiting_head.text(PROMPT, rank=3)
        with make_pod(*flags, head=waiting_head, name="second", wait=False) as second:
            assert second.wait_exit() == REFUSED
            assert "rank 3 is taken: held by [pod first" in second.log
            assert "asked for by [pod second" in second.log
        assert first.running
        assert waiting_head.text(PROMPT, rank=3) == text


def test_a_pod_without_headless_is_told_to_add_it(make_pod: Callable[..., Pod], waiting_head: Pod) -> None:
    """By itself it would be a launch of external balancing."""
    with make_pod("-dp", "4", "-dpl", "1", "-dpr", "1", member_of=waiting_head, wait=False) as pod:
        assert pod.wait_exit() == REFUSED
        assert "the head needs headless=True; add --headless there" in pod.log
        assert "Traceback" not in pod.log


def test_a_second_head_is_told_that_the_ports_are_taken(make_pod: Callable[..., Pod], waiting_head: Pod) -> None:
    pod = make_pod("-dp", "4", "-dpl", "1", wait=False, rpc=waiting_head.rpc)
    pod.start()
    assert pod.wait_exit() == REFUSED
    assert f"port {waiting_head.rpc} of 127.0.0.1 is in use" in pod.log
    assert not pod.family()
    shutil.rmtree(pod.runtime)
    assert serves(waiting_head)


def test_missing_ranks_are_named_until_and_at_the_time_limit(make_pod: Callable[..., Pod]) -> None:
    with make_pod("-dp", "3", "-dpl", "1", "--handshake-timeout", "30", wait=False) as head:

        def named() -> bool:
            try:
                answer = head.manage("/startupz")
            except OSError:  # it does not listen yet
                return False
            return answer.status == 503 and "rank 1 (NEW, no HELLO yet), rank 2 (NEW, no HELLO yet)" in answer.text

        until(named, "/startupz names the missing ranks")
        missing = head.manage("/ranks").json["missing"]
        assert {"rank": 2, "state": "NEW", "stage": "no HELLO yet"} in missing
        assert head.wait_exit() == NO_GROUP
        assert "not complete after --handshake-timeout 30 s; missing: rank 1 (NEW" in head.log


# -- models ------------------------------------------------------------------------------------------------------------


def spoiled(kind: str, folder: Path, tiny: Path) -> Path:
    """A copy of the tiny model with something wrong about it."""
    shutil.copytree(tiny, folder)
    if kind == "no folder":
        shutil.rmtree(folder)
    elif kind == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif kind == "no weights":
        (folder / "model.safetensors").unlink()
    elif kind == "config of another size":
        (folder / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": 128}))
    elif kind == "one layer too many":
        (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 3}))
    elif kind == "unknown architecture":
        (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["GrokForCausalLM"]}))
    elif kind == "config is no JSON":
        (folder / "config.json").write_text("{")
    elif kind == "header is garbage":
        (folder / "model.safetensors").write_bytes(b"\xff" * 5000)
    elif kind == "weights are cut off":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    elif kind == "tokenizer is garbage":
        (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no folder", ["model 'model': nothing is there"]),
        ("no tokenizer", ["tokenizer.json: the file is missing"]),
        ("no weights", ["missing in model: model.safetensors"]),
        ("config of another size", ["mlp.gate_proj.weight", "[128, 64]", "[96, 64]"]),
        ("one layer too many", ["model.layers.2.", "missing"]),
        ("unknown architecture", ["GrokForCausalLM", "Qwen3ForCausalLM"]),
        ("config is no JSON", ["config.json"]),
        ("header is garbage", ["model.safetensors"]),
        ("weights are cut off", ["model.safetensors"]),
        ("tokenizer is garbage", ["tokenizer.json"]),
    ],
)
def test_a_broken_model_is_named_and_ends_the_pod(
    make_pod: Callable[..., Pod], tiny_model: Path, tmp_path: Path, kind: str, words: list[str]
) -> None:
    model = spoiled(kind, tmp_path / "spoiled", tiny_model)
    with make_pod(model=model, wait=False) as pod:
        assert pod.wait_exit() == REFUSED
        for word in words:
            assert word in pod.log
        assert "Traceback" not in pod.log
        assert "starting it again" not in pod.log


# -- ports -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "offset"),
    [
        ("--management-port", 0),
        ("--port", 0),
        ("--data-parallel-rpc-port", 0),
        ("--data-parallel-rpc-port", 3),
        ("--data-parallel-rpc-port", 11),
    ],
)
def test_a_port_in_use_is_named_with_its_flag(make_pod: Callable[..., Pod], flag: str, offset: int) -> None:
    with socket.socket() as taken:
        first = PORTS.take(31)
        taken.bind(("127.0.0.1", first + offset))
        taken.listen()
        options = {"--management-port": "management", "--port": "port", "--data-parallel-rpc-port": "rpc"}
        pod = make_pod("-dp", "2", "-dpl", "1", wait=False, **{options[flag]: first})
        pod.start()
        try:
            assert pod.wait_exit() == REFUSED
            assert flag in pod.log
            assert str(first + offset) in pod.log
            assert "in use" in pod.log
            assert "free it or give another" in pod.log
            assert "Traceback" not in pod.log
        finally:
            taken.close()
            pod.__exit__(None, None, None)


def pid_of_rank_0(pod: Pod) -> int | None:
    try:
        entries = pod.ranks()
    except OSError:  # it does not listen yet
        return None
    return entries[0]["pid"] if entries else None


AWAY = "192.0.2.1"
"""An address that no machine has."""


@pytest.mark.parametrize(
    ("flags", "env", "words"),
    [
        (["-dpa", AWAY], {}, f"{AWAY}:.* cannot be bound here: .*--data-parallel-address must be an address of this"),
        ([], {"DPI_POD_IP": AWAY}, f"{AWAY}:.* cannot be bound here: .*DPI_POD_IP must be an address of this machine"),
        (["--host", AWAY], {}, f"cannot listen on {AWAY}: .*--host must be a name or an address of this"),
        (["--host", "300.1.1.1"], {}, r"cannot listen on 300\.1\.1\.1: .*--host must be a name or an address of this"),
        (["--host", "no-such.invalid"], {}, "cannot listen on no-such.invalid: .* not known; --host must be"),
        (["-dpa", "no-such.invalid"], {}, "--data-parallel-address: host 'no-such.invalid': no such name.*IP of this"),
    ],
    ids=["address", "pod ip", "host", "no host", "host's name", "name"],
)
def test_an_address_of_another_machine_is_named_with_its_setting(
    make_pod: Callable[..., Pod], flags: list[str], env: dict[str, str], words: str
) -> None:
    with make_pod("-dp", "2", "-dpl", "1", *flags, env=env, wait=False) as pod:
        assert pod.wait_exit() == REFUSED
        assert re.search(words, pod.log), pod.log
        assert "unknown error" not in pod.log.lower() and "Traceback" not in pod.log


def test_a_temporary_folder_with_too_long_a_path_is_named(make_pod: Callable[..., Pod], tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with make_pod(env={"TMPDIR": str(long), "XDG_RUNTIME_DIR": ""}, wait=False) as pod:
        assert pod.wait_exit() == REFUSED
        assert f"no folder for sockets: {long} is too long a path; set TMPDIR to another" in pod.log


def test_a_port_is_held_from_the_start_not_only_once_the_model_is_loaded(make_pod: Callable[..., Pod]) -> None:
    with make_pod(wait=False) as first:
        with stopped(until(lambda: pid_of_rank_0(first), "the first pod has started its rank")):
            with make_pod(port=first.port, wait=False) as second:
                assert second.wait_exit() == REFUSED
                assert f"--port: port {first.port}" in second.log
                second.port = 0  # it is the first's, which goes on
            assert first.manage("/startupz").status == 503  # it has not loaded
        first.until_ready()


@pytest.mark.parametrize("template", ["/no/such/file.jinja", "{{ bad }"])
def test_a_chat_template_that_cannot_be_used_is_refused_at_once(make_pod: Callable[..., Pod], template: str) -> None:
    with make_pod("--chat-template", template, wait=False) as pod:
        assert pod.wait_exit() == REFUSED
        assert "chat" in pod.log and "template" in pod.log
        assert "Traceback" not in pod.log
