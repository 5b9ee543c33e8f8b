"""One setting's description, and the conversions between its value and the texts of flag, environment and YAML.

The class body of `Settings` is the table: each attribute is annotated with a `Flag`, and `fields_of` reads it back.
"""

from __future__ import annotations

import math
import re
import typing
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any

import msgspec

from dpi_engine.config.keys import describe

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_SCALE = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_INT = re.compile(r"[+-]?\d{1,19}")
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


@dataclass(frozen=True, slots=True)
class Flag:
    """What a setting is, beside its name, type and default.

    `low` and `high` bound a number, both included. `size`: a byte count that may be written 2GiB. `short` and `also`
    are other spellings of the flag. `shared`: it shapes steps or answers of all ranks, so it is in the fingerprint.
    `secret`: its value is never printed.
    """

    group: str
    help: str
    short: str = ""
    also: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    size: bool = False
    shared: bool = False
    secret: bool = False
    metavar: str = ""


@dataclass(frozen=True, slots=True)
class Field:
    """One row of the table. `kind` is str, int, float, bool or list (of str); `optional`: None is a value too."""

    name: str
    kind: type
    optional: bool
    default: Any
    flag: Flag

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return "DPI_" + self.name.upper()

    @property
    def options(self) -> tuple[str, ...]:
        """All spellings of the flag, the long name first; without the `--no-` form of a switch."""
        return (self.option, *self.flag.also, *([self.flag.short] if self.flag.short else []))

    @property
    def expected(self) -> str:
        """The accepted values in words."""
        flag = self.flag
        if flag.choices:
            return "one of " + ", ".join(flag.choices)
        if self.kind is bool:
            return "true or false"
        if self.kind is list:
            return "a list of texts"
        if self.kind is str:
            return "text"
        noun = "a byte count such as 2147483648 or 2GiB" if flag.size else _NOUNS[self.kind]
        return noun + _bounds(flag)

    def from_text(self, text: str) -> Any:
        """Value of one flag argument or environment variable. ValueError without a message if it is not one."""
        if self.kind is bool:
            return _switch(text)
        if self.kind is list:
            return [self._item(part.strip()) for part in text.split(",")]
        if self.kind is str:
            return self._checked(self._item(text))
        if self.kind is int:
            return self._checked(_byte_count(text) if self.flag.size else _whole(text))
        return self._checked(float(text))

    def from_native(self, value: Any) -> Any:
        """Value of a YAML node, whose type must be right already. ValueError without a message if it is not."""
        if self.kind is list:
            items = value if isinstance(value, list) else [value]
            if not all(isinstance(item, str) for item in items):
                raise ValueError
            return [self._item(item) for item in items]
        if self.flag.size and isinstance(value, str):
            return self._checked(_byte_count(value))
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not self.kind:
            raise ValueError
        return self._checked(self._item(value) if isinstance(value, str) else value)

    def to_text(self, value: Any) -> str:
        """The text that `from_text` reads back (of one element, for a list)."""
        return ("true" if value else "false") if self.kind is bool else str(value)

    def show(self, value: Any) -> str:
        """A refused value for an error message."""
        if not self.flag.secret:
            return describe(value)
        items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
        return "an empty text" if any(isinstance(i, str) and not i.strip() for i in items) else _UNSHOWN

    def _item(self, text: str) -> str:
        if not text or "\0" in text or (self.flag.choices and text not in self.flag.choices):
            raise ValueError
        return text

    def _checked(self, value: Any) -> Any:
        flag = self.flag
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError
        if (flag.low is not None and value < flag.low) or (flag.high is not None and value > flag.high):
            raise ValueError
        return value


_UNSHOWN = "a value that is not shown"

_NOUNS = {int: "a whole number", float: "a number"}


def _bounds(flag: Flag) -> str:
    if flag.low is not None and flag.high is not None:
        return f" {flag.low}..{flag.high}"
    if flag.low is not None:
        return f" of at least {flag.low}"
    return "" if flag.high is None else f" of at most {flag.high}"


def _whole(text: str) -> int:
    if not _INT.fullmatch(text):
        raise ValueError
    return int(text)


def _byte_count(text: str) -> int:
    match = _BYTES.fullmatch(text.strip())
    if match is None or len(text) > 40:
        raise ValueError
    number, unit = match.group(1), (match.group(2) or "").lower()
    scaled = int(number) * _SCALE[unit] if "." not in number else float(number) * _SCALE[unit]
    return int(scaled)


def _switch(text: str) -> bool:
    word = text.lower()
    if word not in _TRUE + _FALSE:
        raise ValueError
    return word in _TRUE


def fields_of(struct: type[msgspec.Struct]) -> tuple[Field, ...]:
    """The table that `struct`'s annotated attributes make, in their order."""
    hints = typing.get_type_hints(struct, include_extras=True)
    rows = []
    for item in msgspec.structs.fields(struct):
        annotated = hints[item.name]
        flag = next(m for m in annotated.__metadata__ if isinstance(m, Flag))
        kind, optional = _kind(annotated.__origin__)
        default = item.default
        if default is msgspec.NODEFAULT and callable(item.default_factory):
            default = item.default_factory()
        rows.append(Field(item.name, kind, optional, default, flag))
    return tuple(rows)


def _kind(hint: Any) -> tuple[type, bool]:
    optional = False
    if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union:
        optional = True
        (hint,) = (a for a in typing.get_args(hint) if a is not NoneType)
    return (list if typing.get_origin(hint) is list else hint), optional
