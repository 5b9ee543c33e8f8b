"""Typed reading of one mapping from outside, with errors that name file, key, expected and got."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from dpi_engine.config.errors import ModelSpecError

_MISSING: Any = object()


_SHORT = reprlib.Repr()  # never walks a whole nested value, whose text could be of any length
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel = 2


def describe(value: Any) -> str:
    """A value and its type, short enough for one line."""
    return f"{_SHORT.repr(value)} ({type(value).__name__})"


class Keys:
    """Read-only view of `data`; `where` names its origin in errors. A null value counts as absent.

    Every method raises ModelSpecError when the key is absent and has no default, or has the wrong type or range.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        if not isinstance(data, Mapping):
            raise ModelSpecError(f"{where}: expected a mapping of keys to values, got {describe(data)}")
        self.data = data
        self.where = where

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def wrong(self, key: str, expected: str, got: Any) -> ModelSpecError:
        return ModelSpecError(f"{self.where}: key {key!r}: expected {expected}, got {describe(got)}")

    def raw(self, key: str, default: Any = _MISSING) -> Any:
        value = self.data.get(key)
        if value is None:
            if default is _MISSING:
                raise ModelSpecError(f"{self.where}: key {key!r} is missing; a complete model has it")
            return default
        return value

    def inside(self, key: str) -> Keys:
        return Keys(self.mapping(key), f"{self.where}: {key}")

    def integer(self, key: str, default: Any = _MISSING, low: int = 0, high: int = 2**31) -> int:
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"a whole number {low}..{high}", value)
        return value

    def number(self, key: str, default: Any = _MISSING, above: float = -math.inf) -> float:
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= above:
            raise self.wrong(key, "a finite number" + (f" above {above:g}" if above > -math.inf else ""), value)
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        value = self.raw(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "text", value)
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.raw(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(key, "a mapping", value)
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as one number or a list; empty when absent."""
        value = self.raw(key, [])
        items = list(value) if isinstance(value, list | tuple) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise self.wrong(key, "a token id or a list of token ids", value)
        return tuple(items)
