"""The command-line tools at an endpoint: what they say when it does not answer as asked, or they are asked wrongly."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest
from server_harness import drive, echo_client, running

from dpi_engine.frontend.interface import EngineError
from dpi_engine.launch.exit_codes import EXIT_CRASHED, EXIT_OK, EXIT_USAGE
from dpi_engine.tools import load
from dpi_engine.tools.bench import BenchCommand
from dpi_engine.tools.chat import ChatCommand
from dpi_engine.tools.endpoint import Endpoint, EndpointError
from dpi_engine.tools.ranks import RanksCommand

OTHER_PORT = "is this the other port?"


def test_a_model_that_is_not_served_is_no_wrong_port() -> None:
    async def main() -> None:
        async with running() as server, Endpoint(server.url) as endpoint:
            with pytest.raises(EndpointError, match="the model 'nope' does not exist here") as caught:
                await endpoint.post("/tokenize", {"model": "nope", "prompt": "x"})
            assert OTHER_PORT not in str(caught.value)
            with pytest.raises(EndpointError, match="404") as caught:
                await endpoint.get("/ranks")
            assert OTHER_PORT in str(caught.value)

    drive(main)


@pytest.mark.parametrize("command", [BenchCommand(), ChatCommand(), RanksCommand()], ids=lambda c: c.name)
def test_an_address_without_a_scheme_is_given_one(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(["--url", "node-a:8081/"])) == EXIT_USAGE
    assert "--url 'node-a:8081/': expected an address such as http://node-a:8081\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--streams", "0"], "--streams must be at least 1"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--warmup", "-1"], "--warmup must be at least 0"),
        (["--timeout", "0"], "--timeout: expected seconds above 0, got 0"),
        (["--timeout", "nan"], "--timeout: expected seconds above 0, got nan"),
        (["--timeout", "inf"], "--timeout: expected seconds above 0, got inf"),
    ],
)
def test_bench_refuses_numbers_that_mean_nothing(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    command = BenchCommand()
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(flags)) == 2
    assert words in capsys.readouterr().err


def bench_against(*flags: str, **changes: Any) -> int:
    """Exit code of `dpi bench` against a server of the echo client."""
    codes = []

    async def main() -> None:
        async with running(**changes) as server:
            parser = argparse.ArgumentParser()
            BenchCommand().add_arguments(parser)
            codes.append(await load.bench(parser.parse_args(["--url", server.url, *flags])))

    drive(main)
    return codes[0]


def test_bench_counts_what_it_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PROGRESS_EVERY_S", 0.0)
    flags = ["--streams", "2", "--requests", "3", "--input-tokens", "20", "--output-tokens", "7", "--rounds", "2"]
    assert bench_against(*flags, "--json") == EXIT_OK
    said = capsys.readouterr()
    rounds = [json.loads(line) for line in said.out.splitlines()]
    assert [(r["requests"], r["failed"], r["output_tokens"], r["prompt_tokens"]) for r in rounds] == [
        (3, 0, 21, 60)
    ] * 2
    assert "dpi bench: round 1 of 2, prompts made: 3 of 3\n" in said.err
    assert "dpi bench: round 2 of 2, requests done: 3 of 3\n" in said.err


def test_short_work_of_bench_says_nothing_on_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_against("--streams", "2", "--input-tokens", "20", "--output-tokens", "7") == EXIT_OK
    said = capsys.readouterr()
    assert "2 streams, 20 tokens in, 7 out" in said.out
    assert said.err == ""


def test_what_failed_is_no_line_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--streams", "2", "--input-tokens", "20", "--output-tokens", "7", "--warmup", "0", "--json"]
    assert bench_against(*flags, client=echo_client(fail_after=(3, EngineError("the rank is lost")))) == EXIT_CRASHED
    said = capsys.readouterr()
    assert [json.loads(line)["failed"] for line in said.out.splitlines()] == [2]
    assert "dpi bench: failed: " in said.err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_ranks_refuses_an_interval_that_means_nothing(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    command = RanksCommand()
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(["--once", "--interval", seconds])) == 2
    assert f"--interval: expected seconds above 0, got {seconds}" in capsys.readouterr().err
