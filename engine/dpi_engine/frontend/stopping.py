"""Stop strings in a text that comes in pieces. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dpi_engine.frontend.interface import InvalidRequest


class StopMatcher:
    """Finds the first stop string in a growing text, and keeps back only what may still become one.

    The match that is complete first wins (of two that end at the same character, the longer one), so the outcome does
    not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Iterable[str], include_in_output: bool = False) -> None:
        """Raises InvalidRequest for an empty stop string: it would match everywhere."""
        self._stops = tuple(dict.fromkeys(stops))
        if not all(self._stops):
            raise InvalidRequest("stop: got an empty string; expected strings of at least one character")
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._include = include_in_output
        self._held = ""

    def push(self, piece: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Take more text. Returns (text that is settled now, stop string found or None).

        After a stop string was found nothing more may be pushed. `may_stop` False: a match that ends within this piece
        does not count (not enough tokens are out), though one may begin here.
        """
        if not self._stops:
            return piece, None
        held = len(self._held)
        text = self._held + piece
        if may_stop:
            best: tuple[int, int, str] | None = None
            for stop in self._stops:
                # What is held has been judged already: a match must end in the new text.
                start = text.find(stop, max(0, held - len(stop) + 1))
                if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                    best = (start + len(stop), start, stop)
            if best is not None:
                self._held = ""
                end, start, stop = best
                return text[: end if self._include else start], stop
        keep = self._open_from(text)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """The text kept back: no more will come."""
        held, self._held = self._held, ""
        return held

    def _open_from(self, text: str) -> int:
        """Where the longest end of `text` begins that a stop string begins with; len(text) if there is none."""
        earliest = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), earliest)
            while start >= 0:
                if stop.startswith(text[start:]):
                    earliest = start
                    break
                start = text.find(stop[0], start + 1, earliest)
        return earliest
