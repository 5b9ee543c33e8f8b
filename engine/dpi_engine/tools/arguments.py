"""What the tools ask of their arguments beyond what argparse does."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path


def wrong_seconds(tool: str, flag: str, seconds: float) -> bool:
    """Whether `seconds` is no time that passes, zero, without end or no number; that is then said on standard error."""
    wrong = not 0 < seconds < math.inf
    if wrong:
        print(f"{tool}: {flag}: expected seconds above 0, got {seconds:g}", file=sys.stderr)
    return wrong


def finite(text: str) -> float:
    """A number that JSON has, too. For argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return number


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number of at least `least`, at most `most`. For argparse."""

    def number(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, got {text}")
        return value

    number.__name__ = "int"  # as messages of argparse call it
    return number


def filled(text: str) -> str:
    """Not empty, as a variable of the shell is that is not set. For argparse."""
    if not text:
        raise argparse.ArgumentTypeError("expected a value, got an empty text; leave the flag out for the default")
    return text


def path(text: str) -> Path:
    """For argparse. An empty one would be the current folder."""
    return Path(filled(text))


def utf8(text: str) -> str:
    """Text that can be sent: bytes that were none come from the system as lone surrogates. For argparse."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"expected text in UTF-8, got {text!a}") from None
    return text
