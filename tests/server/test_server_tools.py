"""The command-line tools at an endpoint: what they say when it does not answer as asked, or they are asked wrongly."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from rich.console import Console
from server_harness import drive, echo_client, running

from dpi_engine import cli
from dpi_engine.frontend.interface import EngineError
from dpi_engine.launch.exit_codes import EXIT_CRASHED, EXIT_INTERRUPTED, EXIT_OK, EXIT_PIPE, EXIT_USAGE
from dpi_engine.tools import load
from dpi_engine.tools.bench import BenchCommand
from dpi_engine.tools.chat import ChatCommand
from dpi_engine.tools.endpoint import Endpoint, EndpointError
from dpi_engine.tools.ranks import RanksCommand, ranks_table
from small_server import http_server

OTHER_PORT = "is this the other port?"


def parsed(command: Any, *flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(list(flags))


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


@pytest.mark.parametrize("address", ["node-a:8081/", "ftp://node-a:8081"])
@pytest.mark.parametrize("command", [BenchCommand(), ChatCommand(), RanksCommand()], ids=lambda c: c.name)
def test_an_address_that_is_not_http_is_shown_as_one(
    command: Any, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(parsed(command, "--url", address)) == EXIT_USAGE
    assert f"--url '{address}': expected an address such as http://node-a:8081\n" in capsys.readouterr().err


def test_the_table_of_bench_fits_a_terminal_of_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    flags = ["--streams", "2", "--input-tokens", "20", "--output-tokens", "7", "--warmup", "0"]
    assert bench_against(*flags) == EXIT_OK
    heads = " ".join(capsys.readouterr().out.splitlines()[1].split())
    assert heads == "round out tok/s TTFT p50 p99 ITL p50 p99 TPOT e2e p50 s failed"


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
    assert command.run(parsed(command, *flags)) == EXIT_USAGE
    assert words in capsys.readouterr().err


def bench_against(*flags: str, **changes: Any) -> int:
    """Exit code of `dpi bench` against a server of the echo client."""
    codes = []

    async def main() -> None:
        async with running(**changes) as server:
            codes.append(await load.bench(parsed(BenchCommand(), "--url", server.url, *flags)))

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


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_ranks_refuses_an_interval_that_means_nothing(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    command = RanksCommand()
    assert command.run(parsed(command, "--once", "--interval", seconds)) == EXIT_USAGE
    assert f"--interval: expected seconds above 0, got {seconds}" in capsys.readouterr().err


STREAM = "data: {}\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "5", "null", '"x"', "nonsense", '{"data": [1], "ranks": [1], "tokens": 5}'),
        '{"data": [{}], "ranks": [{"rank": 0}], "tokens": [1]}',
        '{"data": {"a": 1}, "ranks": 5, "tokens": {"a": 1}}',
        *(STREAM.format(e) for e in ("5", '{"error": "broken"}', '{"choices": [null]}', '{"choices": 3}', "[")),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        [ChatCommand(), "hi"],
        [ChatCommand(), "--model", "m", "hi"],
        [RanksCommand(), "--once"],
        [BenchCommand(), "--streams", "1"],
        [BenchCommand(), "--model", "m", "--streams", "1"],
    ],
    ids=lambda c: f"{c[0].name}-{len(c)}",
)
def test_whatever_a_stranger_answers_is_said_in_a_line(
    command: list[Any], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tool, *flags = command

    async def main() -> None:
        async with http_server(lambda _: text) as port:
            args = parsed(tool, "--url", f"http://127.0.0.1:{port}", *flags)
            assert await asyncio.to_thread(tool.run, args) == EXIT_CRASHED

    drive(main)
    assert f"dpi {tool.name}: " in capsys.readouterr().err


def test_null_in_an_event_is_what_is_not_given(capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        '{"error": null, "choices": [{"delta": null}]}',
        '{"choices": null}',
        '{"choices": [{"delta": {"content": "yes"}}]}',
    ]
    text = "".join(f"data: {e}\n\n" for e in [*events, "[DONE]"])

    async def main() -> None:
        async with http_server(lambda _: text) as port:
            args = parsed(ChatCommand(), "--url", f"http://127.0.0.1:{port}", "--model", "m", "hi")
            assert await asyncio.to_thread(ChatCommand().run, args) == 0

    drive(main)
    assert capsys.readouterr().out == "yes\n"


@pytest.mark.parametrize(
    ("flags", "changes", "requests"),
    [
        (["--input-tokens", "4", "--output-tokens", "99999"], {}, 8),  # refused
        (["--streams", "2"], {"client": echo_client(fail_after=(3, EngineError("the rank is lost")))}, 2),
    ],
)
def test_what_failed_is_no_line_of_the_json(
    flags: list[str], changes: dict[str, Any], requests: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_against("--warmup", "0", "--json", *flags, **changes) == EXIT_CRASHED
    out, err = capsys.readouterr()
    assert [json.loads(line)["failed"] for line in out.splitlines()] == [requests]
    assert "dpi bench: failed: " in err


@pytest.mark.parametrize(
    "error", ["[enforce fail at alloc_cpu.cpp:119] no memory", "model '/m/[/x]': nothing is there"]
)
def test_brackets_in_an_error_are_no_markup(error: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"rank": 0, "state": "LOST", "pod": "p[/y]", "error": error}
    console = Console(width=200)
    with console.capture() as shown:
        console.print(ranks_table({"ranks": [row]}))
    assert error in shown.get()
    assert "p[/y]" in shown.get()


def test_a_table_that_nobody_reads_ends_as_all_output_does() -> None:
    code = "from dpi_engine.tools.console import make_console as m\nc = m()\nfor _ in range(9999): c.print('x' * 60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait() == EXIT_PIPE


def test_ctrl_c_at_the_prompt_ends_a_conversation() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        arguments = ["chat", "--url", "http://127.0.0.1:9", "--model", "m"]
        os.execv(sys.executable, [sys.executable, "-m", "dpi_engine", *arguments])
    try:
        shown = b""
        while b"> " not in shown:
            shown += os.read(terminal, 1000)
        time.sleep(0.2)  # from the prompt to the read behind it
        os.write(terminal, b"\x03")
        deadline = time.monotonic() + 20
        status = 0
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert ended[0], "it goes on"
        status = os.waitstatus_to_exitcode(ended[1])
        pid = 0
        assert status == EXIT_INTERRUPTED
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(terminal)


def test_text_that_the_terminal_cannot_show_is_no_failure() -> None:
    async def main() -> None:
        async with running() as server:
            process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-m",
                    "dpi_engine",
                    "chat",
                    "--url",
                    server.url,
                    "--echo",
                    "--max-tokens",
                    "2",
                    "日本",
                ),
                env={**os.environ, "PYTHONIOENCODING": "ascii"},
                stdout=asyncio.subprocess.PIPE,
            )
            out, _ = await process.communicate()
            assert process.returncode == 0
            assert b"> \\u65e5\\u672c" in out

    drive(main)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *((["chat", "--temperature", t, "hi"], f"--temperature: expected a number, got '{t}'") for t in ("nan", "inf")),
        (["chat", "caf\udce9"], "argument question: expected text in UTF-8, got 'caf\\udce9'"),
        (["chat", "--system", "caf\udce9", "hi"], "--system: expected text in UTF-8"),
        (["chat", "--model", "caf\udce9", "hi"], "--model: expected text in UTF-8"),
        (["bench", "--model", "caf\udce9"], "--model: expected text in UTF-8"),
        (["bench", "--model", ""], "--model: expected a value, got an empty text"),
        (["chat", "--api-key", ""], "--api-key: expected a value, got an empty text"),
        (["up", "-f", ""], "-f/--filename: expected a value, got an empty text"),
        (["render", "-f", ""], "-f/--filename: expected a value, got an empty text"),
        (["up", "-f", "m.yaml", "--state-dir", ""], "--state-dir: expected a value, got an empty text"),
        (["serve", "m", "--config", ""], "--config: expected a file, got an empty text"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == EXIT_USAGE
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8:surrogateescape"])  # the latter is that of LC_ALL=C
def test_a_question_that_is_no_text_is_refused_by_name(encoding: str) -> None:
    command = [sys.executable, "-m", "dpi_engine", "chat", "--url", "http://127.0.0.1:9", "--model", "m"]
    done = subprocess.run(
        command, input=b"caf\xe9\n", env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, timeout=240
    )
    assert done.returncode == EXIT_USAGE
    assert done.stderr.splitlines()[-1] == b"dpi chat: standard input: expected text in UTF-8"


INTERRUPTED_ROUND = """
import asyncio, os, signal, sys
from dpi_engine import cli
from dpi_engine.tools import load
done, whole = [], load.run_round
async def round_or_ctrl_c(*args):
    if len(done) == 2:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(240)
    done.append(await whole(*args))
    return done[-1]
load.run_round = round_or_ctrl_c
sys.exit(cli.main(sys.argv[1:]))
"""


def test_the_rounds_that_ended_before_a_ctrl_c_are_shown() -> None:
    async def main() -> None:
        async with running() as server:
            flags = ["--streams", "1", "--input-tokens", "20", "--output-tokens", "7", "--rounds", "3"]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", INTERRUPTED_ROUND, "bench", "--url", server.url, *flags),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, err = await process.communicate()
            assert (process.returncode, err) == (EXIT_INTERRUPTED, b"")
            assert [line.split()[0] for line in out.splitlines()[2:]] == [b"1", b"2", b"out"]

    drive(main)


def test_the_median_of_rounds_is_rounded_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter([100.1, 100.4])
    whole = load.summary
    monkeypatch.setattr(load, "summary", lambda *a: {**whole(*a), "output_tok_s": next(rates)})
    flags = ["--streams", "1", "--input-tokens", "20", "--output-tokens", "7"]
    assert bench_against(*flags, "--rounds", "2") == EXIT_OK
    assert "out tok/s: min 100.1, median 100.2, max 100.4" in capsys.readouterr().out
