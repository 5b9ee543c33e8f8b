"""The form of all that the `dpi` dialect puts on the wire, in words, and the file that pins it to a wire version.

`python tests/wire/wire_forms.py` writes the file anew. It refuses while the forms have changed and the version has not:
peers of two releases would then take each other for equals and misread what the other says.
"""

from __future__ import annotations

import enum
import importlib
import json
import pkgutil
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

import dpi_engine.wire
from dpi_engine.core.lockstep import Vote
from dpi_engine.wire import coordination, handshake, messages
from dpi_engine.wire.messages import WIRE_VERSION

FILE = Path(__file__).with_name("wire_forms.json")

ELSEWHERE = {
    "messages.RankInfo": "goes from a launcher to its own children, and as JSON to whoever asks",
    "inbox.LinkEvent": "stays within a process",
    "exchange.experts.Way": "stays within a process",
}
"""Types of the wire's modules that no other release ever reads."""


def _modules() -> Iterator[tuple[str, ModuleType]]:
    package = dpi_engine.wire
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        yield found.name.removeprefix(package.__name__ + "."), importlib.import_module(found.name)


def _type(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    return re.sub(r"(?:\w+\.)+(\w+)", r"\1", text.replace("<class '", "").replace("'>", ""))


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        return f" = {field.default!r}"
    if field.default_factory is not msgspec.NODEFAULT:
        return f" = {field.default_factory()!r}"
    return ""


def _struct(kind: type[msgspec.Struct]) -> list[str]:
    config = kind.__struct_config__
    form = "array" if config.array_like else "map"
    tag = "" if config.tag is None else f", tag {config.tag}"
    fields = msgspec.structs.fields(kind)
    short = ", defaults left out" if config.omit_defaults else ""
    return [f"{form}{tag}{short}", *(f"{f.encode_name}: {_type(f.type)}{_default(f)}" for f in fields)]


def _enum(kind: type[enum.Enum]) -> list[str]:
    return [f"{member.name} = {member.value!r}" for member in kind]


def forms() -> dict[str, list[str]]:
    """By `module.Name`, sorted: every message, enumeration and packed layout of the wire's modules, and its words."""
    found: dict[str, list[str]] = {}
    for where, module in _modules():
        for name, value in vars(module).items():
            key = f"{where}.{name}"
            if isinstance(value, struct.Struct):
                found[key] = [value.format]
            if key in ELSEWHERE or name.startswith("_") or getattr(value, "__module__", "") != module.__name__:
                continue
            if isinstance(value, type) and issubclass(value, msgspec.Struct):
                found[key] = _struct(value)
            elif isinstance(value, type) and issubclass(value, enum.Enum):
                found[key] = _enum(value)
    words = (handshake.INIT, handshake.ERROR, handshake.PLACES, *handshake.ENGINE_STATUSES)
    found["handshake statuses"] = sorted(words)
    found["identity"] = [handshake.identity(0x0102, b"abcdefgh").hex()]
    found["last word"] = [messages.DEAD_SENTINEL.hex()]
    found["sync"] = list(Vote._fields)
    load = messages.LoadRecord(3, 2, 9, 1, 4, 0.5, 70, 6, 500, 400, 1, 8, 7, 2)
    found["load report, bytes"] = [coordination.encode_load_report(load, 5).hex()]
    return dict(sorted(found.items()))


def pinned() -> tuple[int, dict[str, list[str]]]:
    """Version and forms of the file."""
    known = json.loads(FILE.read_text("utf-8"))
    return known["wire_version"], known["forms"]


def differences(before: dict[str, list[str]], now: dict[str, list[str]]) -> list[str]:
    """What changed, one line for each word that came or went."""
    found = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name, []), now.get(name, [])
        found += [f"{name}: - {word}" for word in old if word not in new]
        found += [f"{name}: + {word}" for word in new if word not in old]
        if sorted(old) == sorted(new) and old != new:
            found.append(f"{name}: another order")
    return found


def main() -> int:
    now = forms()
    if FILE.exists():
        version, before = pinned()
        changed = differences(before, now)
        if changed and version == WIRE_VERSION:
            print("\n".join(changed), file=sys.stderr)
            print(f"raise WIRE_VERSION first: version {version} has other forms", file=sys.stderr)
            return 1
    FILE.write_text(json.dumps({"wire_version": WIRE_VERSION, "forms": now}, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
