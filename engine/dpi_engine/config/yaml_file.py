"""A bounded YAML file with a mapping in it, read without surprises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dpi_engine.config.errors import SettingsError
from dpi_engine.config.keys import describe

MAX_CONFIG_BYTES = 1 << 20


class OnceLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key.value, str) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_yaml(path: str) -> dict[Any, Any]:
    """The mapping in YAML file `path`; empty for an empty file.

    Raises SettingsError: not readable, larger than MAX_CONFIG_BYTES, no YAML, a key twice, tags, or no mapping.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as e:
        raise SettingsError(f"file {path} (--config): cannot be read: {e.strerror or e}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise SettingsError(f"file {path} (--config): expected at most {MAX_CONFIG_BYTES} bytes, got more")
    try:
        loaded = yaml.load(data, Loader=OnceLoader)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as e:
        text = " ".join(str(e).split()).replace("<byte string>", path).replace("<unicode string>", path)
        raise SettingsError(f"file {path} (--config): not valid YAML: {text or type(e).__name__}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise SettingsError(f"file {path} (--config): expected keys with values, got {describe(loaded)}")
    return loaded
