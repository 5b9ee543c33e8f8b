"""Every relative link leads somewhere, and every page can be reached from the map."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs_pages import DOCS, PAGES, ROOT, prose, slug

_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


def _links(page: Path) -> list[tuple[Path, str]]:
    """(file, anchor) of every relative link."""
    found = []
    for target in _LINK.findall(re.sub(r"`[^`\n]*`(?!\])", "", prose(page))):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found.append(((page.parent / file).resolve() if file else page, anchor))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for file, anchor in _links(page):
        assert file.exists(), f"{page}: {file} does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(h) for h in headings}, f"{page}: {file} has no heading for #{anchor}"


def test_every_page_can_be_reached_from_the_map() -> None:
    linked = {file for file, _ in _links(DOCS / "index.md")}
    assert set(DOCS.rglob("*.md")) - {DOCS / "index.md"} <= linked


def test_pages_speak_of_the_project_alone() -> None:
    for page in PAGES:
        assert not re.search(
            r"/(?:work|root)/|\bTODO\b|https?://(?!127\.0\.0\.1|10\.|HOST|HEAD)", page.read_text("utf-8")
        ), page
