"""Stop strings against a plain search in the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpi_engine.frontend.interface import InvalidRequest
from dpi_engine.frontend.stopping import StopMatcher


def oracle(text: str, stops: list[str], include: bool, active_from: int = 0) -> tuple[str, str | None]:
    """The first end of a stop string beyond `active_from` in the whole text decides; of two, the longer one."""
    for end in range(active_from + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    out = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        out += text
        if stop is not None:
            return out, stop
    return out + matcher.flush(), None


PIECES = st.lists(st.text("ab-", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab-", min_size=1, max_size=4), max_size=4, unique=True)


@given(PIECES, STOPS, st.booleans())
def test_any_chunking_gives_what_a_search_in_the_whole_text_gives(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    assert run(pieces, stops, include) == oracle("".join(pieces), stops, include)


@given(PIECES, STOPS)
def test_text_is_held_back_only_while_it_may_become_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = whole = ""
    for piece in pieces:
        whole += piece
        text, stop = matcher.push(piece)
        out += text
        if stop is not None:
            return
        open_ends = [n for s in stops for n in range(1, len(s)) if whole.endswith(s[:n])]
        assert out == whole[: len(whole) - max(open_ends, default=0)]


@given(PIECES, STOPS, st.integers(0, 6))
def test_matches_within_the_first_tokens_do_not_count(pieces: list[str], stops: list[str], silent: int) -> None:
    matcher = StopMatcher(stops)
    out, found = "", None
    for index, piece in enumerate(pieces):
        text, found = matcher.push(piece, may_stop=index >= silent)
        out += text
        if found is not None:
            break
    else:
        out += matcher.flush()
    assert (out, found) == oracle("".join(pieces), stops, False, len("".join(pieces[:silent])))


@pytest.mark.parametrize(
    ("pieces", "stops", "include", "expected"),
    [
        (["END of it"], ["END"], False, ("", "END")),  # at the very beginning
        (["END of it"], ["END"], True, ("END", "END")),
        (["a", "E", "N", "D", "x"], ["END"], False, ("a", "END")),  # over token borders
        (["aEN"], ["END"], False, ("aEN", None)),  # held back, given out at the end
        (["xabcd"], ["abcd", "bc"], False, ("xa", "bc")),  # overlapping: what is complete first
        (["xabc"], ["bc", "abc"], False, ("x", "abc")),  # complete at once: the longer one
        (["\n", "\n", "x"], ["\n\n"], False, ("", "\n\n")),
        (["plain"], [], False, ("plain", None)),
    ],
)
def test_single_cases(pieces: list[str], stops: list[str], include: bool, expected: tuple[str, str | None]) -> None:
    assert run(pieces, stops, include) == expected


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty string"):
        StopMatcher(["a", ""])
