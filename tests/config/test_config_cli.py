"""The `dpi` command: finds subcommands without loading the others, stays light, and ends with the right code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dpi_engine.config.docs as docs
from dpi_engine import cli
from dpi_engine.config import settings
from dpi_engine.config.errors import ConfigError

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch",
    "aiohttp",
    "zmq",
    "numpy",
    "transformers",
    "uvloop",
    "tokenizers",
    "kopf",
    "kubernetes",
    "huggingface_hub",
)


class Echo:
    name = "echo"
    help = "say what settings it got"

    def add_arguments(self, parser):
        settings.add_arguments(parser)

    def run(self, args):
        got = settings.from_args(args, {"DPI_SEED": "7"})
        print(got)
        return 5


class Fails(Echo):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def run(self, args):
        raise self.error


@pytest.fixture
def with_commands(monkeypatch):
    def use(**loaders):
        monkeypatch.setattr(cli, "commands", lambda: loaders)

    return use


def broken():
    raise ImportError("No module named 'kopf'")


def test_a_command_gets_its_flags_and_gives_the_exit_code(with_commands, capsys):
    with_commands(echo=Echo)
    assert cli.main(["echo", "m", "--port", "9"]) == 5
    assert capsys.readouterr().out.strip() == "Settings(model='m', seed=7, port=9)"


def test_wrong_input_ends_with_2_and_no_traceback(with_commands, capsys):
    with_commands(echo=Echo)
    assert cli.main(["echo", "m", "--prt", "9"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("dpi: error: flag --prt is not known. Did you mean '--port'") and "Traceback" not in err
    with_commands(echo=lambda: Fails(ConfigError("wrong model")))
    assert cli.main(["echo", "m"]) == 2
    assert "wrong model" in capsys.readouterr().err
    with_commands(echo=lambda: Fails(KeyboardInterrupt()))
    assert cli.main(["echo", "m"]) == 130


def test_faults_of_our_own_are_not_hidden(with_commands):
    with_commands(echo=lambda: Fails(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["echo", "m"])


def test_the_overview_lists_all_even_those_that_cannot_load(with_commands, capsys):
    with_commands(echo=Echo, up=broken)
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "say what settings it got" in out and "(not available: No module named 'kopf')" in out
    assert cli.main([]) == 2


def test_a_command_that_cannot_load_says_what_it_needs(with_commands, capsys):
    with_commands(echo=Echo, other=broken)
    assert cli.main(["other"]) == 2
    assert "pip install 'dpinference[engine]'" in capsys.readouterr().err
    assert cli.main(["ecko"]) == 2
    assert "'ecko' is no subcommand; there are: echo, other. Did you mean 'echo'?" in capsys.readouterr().err


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"dpi (\d+\.\d+\.\d+.*|unknown \(not installed\))\n", capsys.readouterr().out)


def environment(*paths: Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("DPI_")}
    env["PYTHONPATH"] = os.pathsep.join(str(p) for p in (ROOT / "engine", ROOT / "operator", *paths))
    return env


def run(code: str, *paths: Path, args: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, env=environment(*paths), capture_output=True, text=True, timeout=240)


def test_the_builtin_list_is_that_of_the_project_file():
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split('entry-points."dpinference.commands"]')[1].split("\n[")[0]
    assert dict(re.findall(r'^([\w-]+) = "([^"]+)"$', section, re.M)) == cli.BUILT_IN


def test_an_installed_distribution_adds_commands(tmp_path):
    info = tmp_path / "addon-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: addon\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[dpinference.commands]\nhello = addon_mod:COMMAND\n")
    (tmp_path / "addon_mod.py").write_text(
        "class C:\n    name = 'hello'\n    help = 'greet'\n"
        "    def add_arguments(self, parser): parser.add_argument('who')\n"
        "    def run(self, args): print('hello', args.who); return 3\n"
        "COMMAND = C()\n"
    )
    done = run("import sys; from dpi_engine.cli import main; sys.exit(main())", tmp_path, args=("hello", "you"))
    assert (done.returncode, done.stdout) == (3, "hello you\n"), done.stderr


def test_help_and_settings_import_nothing_heavy():
    code = (
        "import sys, dpi_engine.cli as cli, dpi_engine.config.fingerprint, dpi_engine.config.sources\n"
        "import dpi_engine.config.machine, dpi_engine.config.logs, dpi_engine.config.network, dpi_engine.config.pod\n"
        "from dpi_engine.config import settings\n"
        "cli.main(['--help']); settings.parse_serve(['m'])\n"
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = run(code)
    assert done.stdout.strip().endswith("HEAVY []"), done.stdout + done.stderr


def test_module_can_be_run():
    done = run("import runpy; runpy.run_module('dpi_engine', run_name='__main__')", args=("--version",))
    assert done.returncode == 0 and done.stdout.startswith("dpi ")


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`$dpi` and `$operator` are the two programs; `line` says where their streams go."""
    env = {**environment(), "dpi": f"{sys.executable} -m dpi_engine", "operator": f"{sys.executable} -m dpi_operator"}
    return subprocess.run(["sh", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that takes nothing (/dev/full)")
@pytest.mark.parametrize(
    "command", ["$dpi --help", "$dpi serve --help", "$dpi ranks --help", "$operator version", "$operator run --help"]
)
def test_output_that_takes_no_more_is_an_error_in_words(command: str, tmp_path: Path) -> None:
    name = "dpi-operator" if "operator" in command else "dpi"
    done = shell(f"{command} > /dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (1, f"{name}: error: standard output: No space left on device\n")
    assert shell(f"{command} > /dev/full 2>&1", tmp_path).returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that takes nothing (/dev/full)")
@pytest.mark.parametrize(
    "command",
    ["$dpi nosuch", "$dpi ranks --url x", "$dpi up -f nowhere", "$operator run --resync-seconds 0", "$operator"],
)
def test_an_error_that_cannot_be_told_keeps_its_code(command: str, tmp_path: Path) -> None:
    assert shell(f"{command} 2> /dev/full", tmp_path).returncode == 2
    assert shell(f"{command} > /dev/full 2>&1", tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("line", "code"),
    [
        *(("$dpi --help >&-", 0), ("$dpi ranks --help >&- 2>&-", 0), ("$operator version >&-", 0)),
        *(("$dpi ranks --url x >&-", 2), ("$dpi ranks --url x 2>&-", 2), ("$dpi ranks --url x <&- >&- 2>&-", 2)),
        ("$dpi chat --url http://127.0.0.1:9 --model m <&-", 0),  # there is no question
    ],
)
def test_streams_that_are_closed_are_as_devnull(line: str, code: int, tmp_path: Path) -> None:
    done = shell(line, tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_command_opens_is_no_standard_stream_of_its_children() -> None:
    code = (
        "import os, socket, subprocess, sys\n"
        "from dpi_engine.standard_streams import run_command\n"
        "for number in (0, 1): os.close(number)\n"
        "sys.stdin = sys.stdout = None\n"
        "def work():\n"
        "    with socket.socket() as s:\n"
        "        assert s.fileno() > 2\n"
        "        return subprocess.run(['sh', '-c', 'echo said; read line; exit 7']).returncode\n"
        "sys.exit(run_command('x', work))"
    )
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


def test_ctrl_c_while_the_program_is_imported_is_no_traceback() -> None:
    code = (
        "import runpy, sys\n"
        "class Interrupted:\n"
        "    def find_spec(name, path, target=None):\n"
        "        if name == 'dpi_engine.cli': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted)\n"
        "runpy.run_module('dpi_engine', run_name='__main__')"
    )
    done = run(code)
    assert (done.returncode, done.stderr) == (130, "")


def test_the_installed_programs_are_the_modules() -> None:
    text = (ROOT / "pyproject.toml").read_text().split("[project.scripts]")[1].split("\n[")[0]
    assert dict(re.findall(r'^([\w-]+) = "([^"]+)"', text, re.M)) == {
        "dpi": "dpi_engine.__main__:main",
        "kubectl-dpi": "dpi_engine.__main__:main",
        "dpi-operator": "dpi_operator.__main__:main",
    }


def test_the_page_of_flags_is_the_tables():
    path = ROOT / "docs/reference/flags.md"
    assert path.read_text() == docs.render(), "run: python -m dpi_engine.config.docs docs/reference/flags.md"


def test_the_page_names_every_setting():
    page = docs.render()
    for field in settings.FIELDS:
        assert field.env in page
        assert all(f"`{o}" in page for o in field.options[1:])
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == len(settings.FIELDS)
