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
    with_commands(echo=Echo, up=broken)
    assert cli.main(["up"]) == 2
    assert "pip install 'dpinference[engine]'" in capsys.readouterr().err
    assert cli.main(["ecko"]) == 2
    assert "'ecko' is no subcommand; there are: echo, up. Did you mean 'echo'?" in capsys.readouterr().err


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that takes nothing (/dev/full)")
def test_output_that_takes_no_more_is_an_error_in_words(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dpi_engine", "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=240
        )
    assert (done.returncode, done.stderr) == (1, "dpi: error: standard output: No space left on device\n")


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
