"""Prompts of real text: windows of this repository's own files, as token ids, no two of which begin alike."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
PATTERNS = ("README.md", "LICENSE", "docs/**/*.md", "engine/**/*.py", "operator/**/*.py", "charts/**/*.md")
BLOCK = 16
"""Tokens of a cache block: a beginning of so many that two prompts share would be computed once for both."""


class TextError(RuntimeError):
    """There is too little text for what is asked."""


def clone_text(repository: Path = REPOSITORY) -> str:
    """Prose first, then source."""
    files: list[Path] = []
    for pattern in PATTERNS:
        files += sorted(p for p in repository.glob(pattern) if p.is_file())
    if not files:
        raise TextError(f"{repository}: none of {', '.join(PATTERNS)}")
    return "\n\n".join(f.read_text(errors="replace") for f in files)


class Texts:
    """Windows of one text, taken one after the other; a second pass over it starts elsewhere. Deterministic."""

    def __init__(self, tokenizer: Tokenizer, text: str | None = None) -> None:
        self._ids = tokenizer.encode(clone_text() if text is None else text, add_special_tokens=False).ids
        self._seen: set[tuple[int, ...]] = set()
        self._at = 0
        self._passes = 0

    def take(self, count: int, length: int) -> list[list[int]]:
        """`count` prompts of `length` tokens with beginnings that no prompt had before. Raises TextError."""
        if length > len(self._ids):
            raise TextError(f"the text has {len(self._ids)} tokens, a prompt should have {length}")
        taken = []
        while len(taken) < count:
            if self._at + length > len(self._ids):
                self._passes += 1
                if self._passes > 64:
                    raise TextError(f"{len(self._ids)} tokens of text are used up after {len(self._seen)} prompts")
                self._at = 7 * self._passes
                continue
            window = self._ids[self._at : self._at + length]
            self._at += length
            first = tuple(window[:BLOCK])
            if first not in self._seen:
                self._seen.add(first)
                taken.append(window)
        return taken
