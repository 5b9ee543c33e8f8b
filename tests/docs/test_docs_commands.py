"""Every command line in the pages is one that the real parsers take; every example file is one that is read."""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path

import pytest
from docs_pages import DOCS, PAGES, ROOT, Block, blocks, commands, section, spans, table_rows

from dpi_engine import cli
from dpi_engine.config import settings
from dpi_engine.config.loading import FlagParser
from dpi_operator.api.read import read_manifest
from dpi_operator.api.validate import validate
from dpi_operator.plan.network import Local
from dpi_operator.plan.pods import plan_group

SHELL = [b for page in PAGES for b in blocks(page, "bash", "sh")]
YAML = [b for page in PAGES for b in blocks(page, "yaml")]


def _parser(name: str) -> FlagParser:
    command = cli.commands()[name]()
    parser = FlagParser(prog=f"dpi {name}", allow_abbrev=False)
    command.add_arguments(parser)
    return parser


def _example_files(folder: Path) -> None:
    """Blocks that begin with `# NAME.yaml` become files of that name."""
    for block in YAML:
        if match := re.match(r"# ([\w-]+\.yaml)\n", block.text):
            (folder / match[1]).write_text(block.text)


@pytest.mark.parametrize("block", SHELL, ids=lambda b: b.name)
def test_commands_parse(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _example_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    for words in commands(block):
        if words[0] == "dpi" and not words[1].startswith("-"):
            args = _parser(words[1]).parse_args(words[2:])
            if words[1] == "serve":
                settings.from_args(args, {})
            elif words[1] == "up":
                assert (ROOT / args.filename).is_file(), args.filename
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), words[2]


def test_there_are_commands_to_parse() -> None:
    named = {words[1] for block in SHELL for words in commands(block) if words[0] == "dpi"}
    assert named >= set(cli.BUILT_IN)


@pytest.mark.parametrize("block", [b for b in YAML if "kind: DataParallelInference" in b.text], ids=lambda b: b.name)
def test_example_manifests_can_be_planned(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "example.yaml"
    file.write_text(block.text)
    dpi = read_manifest(str(file))
    assert not validate(dpi)
    assert plan_group(dpi, 0, Local())


@pytest.mark.parametrize("name", [n for n in cli.BUILT_IN if n != "serve"])
def test_the_page_of_the_command_line_has_every_flag_of_a_command(name: str) -> None:
    rows = table_rows(section(DOCS / "reference" / "cli.md", f"dpi {name}"))
    written = {word.split()[0] for row in rows for word in spans(row[0]) if word.startswith("-")}
    shown = {o for a in _parser(name)._actions if not isinstance(a, argparse._HelpAction) for o in a.option_strings}
    assert written == shown


@pytest.mark.parametrize("name", [n for n in cli.BUILT_IN if n != "serve"])
def test_defaults_of_tools_are_as_written(name: str) -> None:
    defaults = {o: a.default for a in _parser(name)._actions for o in a.option_strings}
    for row in table_rows(section(DOCS / "reference" / "cli.md", f"dpi {name}")):
        flags = [word.split()[0] for word in spans(row[0]) if word.startswith("-")]
        written = row[1].strip("`")
        if len(flags) == 1 and re.fullmatch(r"[\d.]+|http\S+", written):
            default = defaults[flags[0]]
            assert default == type(default)(written), row


def test_commands_are_listed() -> None:
    rows = table_rows((DOCS / "reference" / "cli.md").read_text("utf-8").partition("## dpi serve")[0])
    assert {row[0].strip("`").split()[1] for row in rows} == {*cli.BUILT_IN, "--version"}


def test_questions_are_that_of_the_demo_and_their_answers_end():
    """The small model answers it in every number format; another one may get a text that goes on for two minutes."""
    asked = re.search(r'--ask "(.+)"', (ROOT / "Makefile").read_text())
    assert asked is not None
    shown = [q for page in PAGES for q in re.findall(r"What is the capital[^?]*\?", page.read_text())]
    assert len(shown) > 5 and set(shown) == {asked[1]}
    posts = [block.text for block in SHELL if "/v1/chat/completions" in block.text]
    assert len(posts) > 2 and all('"max_tokens"' in text for text in posts)
