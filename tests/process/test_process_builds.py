"""Launches of different builds and protocols in one group: who is refused, who is not, and in which words."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from process_moe import make_moe_model
from process_pods import ROOT, Pod, until

from dpi_engine.wire.messages import WIRE_VERSION

REFUSED = 78


def other_build(folder: Path, file: str, old: str, new: str) -> dict[str, str]:
    """A copy of the engine with a change in one file; the environment that runs it."""
    engine = folder / "engine"
    shutil.copytree(ROOT / "engine", engine, ignore=shutil.ignore_patterns("__pycache__"))
    source = engine / "dpi_engine" / file
    text = source.read_text("utf-8")
    assert old in text
    source.write_text(text.replace(old, new, 1), "utf-8")
    return {"PYTHONPATH": f"{engine}:{ROOT / 'operator'}"}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe_model(tmp_path_factory.mktemp("moe") / "tiny-moe")


def test_a_launch_of_another_wire_version_is_refused_by_name(make_pod: Callable[..., Pod], tmp_path: Path) -> None:
    version = f"WIRE_VERSION = {WIRE_VERSION}"
    env = other_build(tmp_path, "wire/messages.py", version, f"WIRE_VERSION = {WIRE_VERSION + 1}")
    shared = ("-dp", "2", "-dpl", "1")
    with make_pod(*shared, wait=False) as head:
        with make_pod(*shared, "-dpr", "1", head=head, env=env, wait=False) as other:
            assert other.wait_exit() == REFUSED
            assert f"rank 1 speaks wire version {WIRE_VERSION + 1}, the head {WIRE_VERSION}" in other.log
            assert "Traceback" not in other.log
        assert head.running


def test_dense_launches_may_be_of_different_builds(make_pod: Callable[..., Pod], tmp_path: Path) -> None:
    env = other_build(tmp_path, "cli.py", '"""The `dpi` command', '"""This `dpi` command')
    shared = ("-dp", "2", "-dpl", "1")
    with make_pod(*shared, wait=False) as head, make_pod(*shared, "-dpr", "1", head=head, env=env):
        head.until_ready()


def test_ranks_that_share_experts_are_of_one_build(moe: Path, process_cache: Path, tmp_path: Path) -> None:
    env = other_build(tmp_path, "cli.py", '"""The `dpi` command', '"""This `dpi` command')
    shared = ("--enable-expert-parallel", "-dp", "2", "-dpl", "1")
    with Pod(moe, *shared, cache=process_cache, wait=False) as head:
        with Pod(moe, *shared, "-dpr", "1", cache=process_cache, head=head, env=env, wait=False) as other:
            assert other.wait_exit() == REFUSED
            said = re.search(r"build: expected '([^']+)', got '([^']+)'", other.log)
            assert said is not None and said[1] != said[2] and "torch" in said[1]
            assert "loaded" not in other.log  # known before a weight was read
        assert head.running


def test_a_vllm_head_is_told_nothing_by_a_launch_of_our_protocol(make_pod: Callable[..., Pod]) -> None:
    """It ends at the first word of a rank that it does not know; here its handshake socket alone stands for it."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as head:
        port = head.bind_to_random_port("tcp://127.0.0.1", 20000, 29000)
        pod = make_pod("-dp", "2", "-dpl", "1", "-dpr", "1", "--headless", rpc=port, wait=False)
        pod.headless = True
        with pod:
            until(lambda: not pod.running, "it gives up")
            assert pod.wait_exit() == REFUSED
            assert f"tcp://127.0.0.1:{port} is connected and does not greet" in pod.log
            assert "give --data-parallel-protocol vllm here too" in pod.log
            assert "Traceback" not in pod.log
        assert not head.poll(0)
