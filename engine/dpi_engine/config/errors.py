"""Errors that a user can mend. The command line prints their text without a traceback and exits with 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(Exception):
    """Base of every error that wrong input of the user causes: the text says what, where, and what to do."""


class SettingsError(ConfigError):
    """A flag, environment variable or configuration file holds something that cannot be used."""


class ParallelError(SettingsError):
    """The parallel flags contradict each other, or name a layout that is not in this version."""


class ModelSpecError(ConfigError):
    """A model's config.json or GGUF metadata describes something that cannot be run."""


class SourceError(ConfigError):
    """A model cannot be found, fetched or read."""


class WeightFileError(SourceError):
    """A weight file's header is truncated, malformed or unreasonably large."""


def near(name: str, known: Iterable[str], limit: int = 3) -> str:
    """` Did you mean 'a' or 'b'?` for the names most like `name`, or an empty string."""
    found = difflib.get_close_matches(name, sorted(set(known)), n=limit, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(f) for f in found)}?" if found else ""
