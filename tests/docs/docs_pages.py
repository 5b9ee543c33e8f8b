"""The pages of the documentation, and what can be read out of them."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

sys.path.insert(0, str(ROOT / "tests" / "server"))  # the HTTP application of its harness is looked at here too


@dataclass(frozen=True)
class Block:
    """A fenced block: `language` is the word after the fence, `line` where it begins."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    found = []
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if match[1] in languages:
            found.append(Block(page, text[: match.start()].count("\n") + 1, match[1], match[2]))
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def code_spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def section(page: Path, title: str) -> str:
    """What stands between the heading `title` and the next one of its level or above."""
    lines, inside = [], 0
    for line in page.read_text(encoding="utf-8").splitlines():
        level = len(line) - len(line.lstrip("#")) if line.startswith("#") else 0
        if inside and level and level <= inside:
            break
        if inside:
            lines.append(line)
        elif level and line.lstrip("# ") == title:
            inside = level
    assert inside, f"{page}: no heading {title!r}"
    return "\n".join(lines)


def table_rows(text: str) -> list[list[str]]:
    """Cells of all tables in `text`, without heads and rules."""
    rows: list[list[str]] = []
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if not line.startswith("|") or line.startswith("|--"):
            continue
        if i + 1 < len(lines) and lines[i + 1].startswith("|--"):
            continue
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))])
    return rows


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def commands(block: Block) -> list[list[str]]:
    """Words of each command in a shell block; comments, background marks and pipes are left out."""
    joined = re.sub(r"\\\n\s*", " ", block.text)
    found = []
    for line in joined.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if set(word) <= set("&|;"):
                break
            words.append(word)
        if words:
            found.append(words)
    return found


def slug(title: str) -> str:
    """Anchor of a heading."""
    text = re.sub(r"[^\w\- ]", "", title.replace("`", "").lower())
    return text.strip().replace(" ", "-")
