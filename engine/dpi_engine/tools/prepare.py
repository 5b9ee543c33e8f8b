"""Fetch a model and make what an engine makes at its first start, without serving it: for images and shared volumes.

`python -m dpi_engine.tools.prepare MODEL --cache-dir DIR`: afterwards `dpi serve MODEL --cache-dir DIR` starts without
a network, and DIR may be read-only. Where it is not, an engine keeps its packed weights there, which depend on the
processor and are not made here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dpi_engine.config.errors import ConfigError
from dpi_engine.config.sources import FORMS, ModelFiles, resolve_model
from dpi_engine.tools.arguments import path


def prepare(model: str, cache_dir: Path) -> ModelFiles:
    """The files of `model`, fetched into `cache_dir` with the weights unpacked beside them.

    Raises ConfigError: not found, not supported, or `cache_dir` cannot be written.
    """
    from dpi_engine.config.gguf_file import read_header
    from dpi_engine.models.gguf_weights import GgufSource, quantized
    from dpi_engine.models.registry import open_weights
    from dpi_engine.tokenizer.spec import read_spec

    files = resolve_model(model, cache_dir, lambda line: print(line, flush=True))
    source = open_weights(files, read_spec(files), cache_dir, lambda stage, fraction: None)
    dequantizes = isinstance(source, GgufSource) and quantized(read_header(files.weights[0]))
    source.close()
    if dequantizes:  # an engine would go on without; an image made for this must not
        raise ConfigError(f"model {model!r}: the unpacked weights cannot be kept below {cache_dir}; the log says why")
    return files


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dpi_engine.tools.prepare", description="Fetch and unpack a model.")
    parser.add_argument("model", help=FORMS)
    parser.add_argument("--cache-dir", type=path, required=True, help="folder that `dpi serve` will get, too")
    arguments = parser.parse_args()
    try:
        files = prepare(arguments.model, arguments.cache_dir)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{files.name}: ready in {arguments.cache_dir}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
