"""The ModelSpec of a model's files, whichever form they have."""

from __future__ import annotations

import json
from typing import Any

from dpi_engine.config.errors import ModelSpecError
from dpi_engine.config.gguf_file import read_header
from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.config.sources import ModelFiles


def read_spec(files: ModelFiles) -> ModelSpec:
    """From config.json (and generation_config.json) or from GGUF metadata.

    Raises ModelSpecError, GgufError: what the files say cannot be read or run.
    """
    if files.format == "gguf":
        header = read_header(files.weights[0])
        return ModelSpec.from_gguf_metadata(header.metadata, header.tensors.keys(), where=str(header.path))
    if files.config is None:
        raise ModelSpecError(f"{files.directory}: config.json is missing")
    generation = _object(files.generation_config) if files.generation_config else None
    return ModelSpec.from_config(_object(files.config), generation, where=str(files.config))


def _object(path: Any) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelSpecError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelSpecError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
