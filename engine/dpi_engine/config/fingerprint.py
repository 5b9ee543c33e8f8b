"""Whether two launches would run the same thing: a declared fingerprint of flags, a resolved one of what engines found.

Fields are flat (name -> JSON value), so that a mismatch can be named. Per-node facts never enter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from dpi_engine.config.errors import ConfigError
from dpi_engine.config.keys import describe
from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.config.parallel import Mode, ParallelConfig

if TYPE_CHECKING:
    from dpi_engine.config.settings import Settings

SCHEMA_VERSION = 4
"""Version of the set of fields and of what they mean; raised when either changes."""

UNSET = "auto"
"""Value of a field that nobody gave, which is not the same as a value that happens to equal the default of today."""

Fields = dict[str, Any]


class FieldDiff(msgspec.Struct, frozen=True):
    """One field in which two fingerprints differ."""

    field: str
    expected: Any
    got: Any


class FingerprintMismatch(ConfigError):
    """A rank would run something else than the head; `diffs` lists the fields."""

    def __init__(self, message: str, diffs: list[FieldDiff]) -> None:
        super().__init__(message)
        self.diffs = diffs


def declared(settings: Settings) -> Fields:
    """What the flags say of steps and answers that all ranks share. The operator compares it before pods exist."""
    from dpi_engine.config.settings import FIELDS

    fields: Fields = {"schema_version": SCHEMA_VERSION}
    for field in FIELDS:
        if field.flag.shared:
            value = getattr(settings, field.name)
            fields[field.name] = UNSET if value is None else value
    mode = ParallelConfig.from_settings(settings, cores=1).mode
    if mode is Mode.EXTERNAL and settings.data_parallel_rank is None:
        mode = Mode.HYBRID  # a launch of one rank in a group whose other launches may have more
    fields["load_balancing_mode"] = str(mode)
    return fields


def resolved(
    settings: Settings,
    spec: ModelSpec,
    *,
    weights_digest: str,
    dtype: str,
    max_model_len: int,
    wire_version: int,
) -> Fields:
    """What an engine found after reading the model; compared at HELLO and on `/ranks`.

    `dtype` and `max_model_len` are the settled values. The model's name is left out (the same weights may lie at
    different paths) and its config stands field by field under `spec.`, so that a difference has a name.
    """
    fields = declared(settings)
    del fields["model"]
    fields |= {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "wire_version": wire_version,
        "weights_digest": weights_digest,
    }
    for name, value in msgspec.to_builtins(spec).items():
        if name in ("moe", "mla") and value is not None:
            fields |= {f"spec.{name}.{part}": inner for part, inner in value.items()}
        else:
            fields[f"spec.{name}"] = value
    # One long list of equal windows, or of layers, says no more than its digest.
    fields["spec.layer_windows"] = digest({"layer_windows": list(spec.layer_windows)})[:16]
    if spec.moe:
        fields["spec.moe.layers"] = digest({"layers": list(spec.moe.layers)})[:16]
    return fields


def canonical(fields: Mapping[str, Any]) -> bytes:
    """Fields as JSON with sorted keys and no blanks. Raises ValueError for NaN and infinities."""
    return json.dumps(dict(fields), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def digest(fields: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical form, 64 hex digits."""
    return hashlib.sha256(canonical(fields)).hexdigest()


def diff(expected: Mapping[str, Any], got: Mapping[str, Any]) -> list[FieldDiff]:
    """Fields that both know and that differ, by name. A field only one side knows is an older or newer version's."""
    both = sorted(expected.keys() & got.keys())
    return [FieldDiff(f, expected[f], got[f]) for f in both if _plain(expected[f]) != _plain(got[f])]


def mismatch_message(diffs: list[FieldDiff], rank: int, peer: str = "") -> str:
    """One line for a mismatch of `rank` (at `peer`): every field with expected and got value."""
    at = f" ({peer})" if peer else ""
    listed = "; ".join(f"{d.field}: expected {_short(d.expected)}, got {_short(d.got)}" for d in diffs)
    return f"rank {rank}{at} has another configuration than the head: {listed}. Start it with the head's values."


def require_equal(expected: Mapping[str, Any], got: Mapping[str, Any], rank: int, peer: str = "") -> None:
    """Raise FingerprintMismatch unless both agree on all fields they both know."""
    if diffs := diff(expected, got):
        raise FingerprintMismatch(mismatch_message(diffs, rank, peer), diffs)


def _plain(value: Any) -> Any:
    """Value with tuples as lists and booleans apart from numbers, as it looks after a trip over the wire."""
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return ("bool", value) if isinstance(value, bool) else value


def _short(value: Any) -> str:
    return describe(value).rsplit(" (", 1)[0]
