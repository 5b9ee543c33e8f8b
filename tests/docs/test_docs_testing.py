"""The page that says what is tested names tests that exist."""

import re
from pathlib import Path

from spread import ALONE, API_SERVER, LONG, SERVICE

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_named_on_the_page_exists():
    page = (ROOT / "docs" / "development" / "testing.md").read_text("utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    defined = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        defined |= set(re.findall(r"^ *(?:async )?def (test_\w+)", file.read_text("utf-8"), flags=re.M))
    assert len(named) > 20
    assert named <= defined, sorted(named - defined)


def test_every_folder_named_on_the_page_exists():
    page = (ROOT / "docs" / "development" / "testing.md").read_text("utf-8")
    for path in re.findall(r"`(tests/[\w/.]+)`", page):
        assert (ROOT / path).exists(), path


def test_the_version_that_interop_builds_is_the_one_the_pages_name():
    built = re.search(r"^version=(\S+)$", (ROOT / "benchmarks/peer/setup.sh").read_text("utf-8"), re.M)
    tested = re.search(r'^VERSION = "(.*)"$', (ROOT / "tests/interop/peer_vllm.py").read_text("utf-8"), re.M)
    assert built and tested and built[1] == tested[1]
    for page in ("how-to/data-parallel.md", "development/testing.md"):
        assert f"vLLM {built[1]}" in (ROOT / "docs" / page).read_text("utf-8"), page


def test_files_that_are_dealt_out_by_name_are_those_that_share_what_they_are_said_to_share():
    texts = {f.relative_to(ROOT).as_posix(): f.read_text("utf-8") for f in (ROOT / "tests").rglob("test_*.py")}
    assert set(SERVICE) == {
        name for name, text in texts.items() if re.search(r"^def test_\w+\(.*\bgroup: Group", text, re.M)
    }
    assert set(API_SERVER) == {name for name, text in texts.items() if re.search("^from api_server import", text, re.M)}
    assert set(ALONE) <= texts.keys()
    assert all((ROOT / name).exists() for name in LONG)
