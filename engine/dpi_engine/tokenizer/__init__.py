"""What the files of a model say before any tensor is read: tokenizer, chat template, GGUF header. Imports no torch."""

from dpi_engine.config.gguf_file import GgufError, GgufHeader, is_gguf, read_header
from dpi_engine.tokenizer.bundle import TokenizerBundle, load_tokenizer, read_tokenizer
from dpi_engine.tokenizer.errors import TokenizerError
from dpi_engine.tokenizer.spec import read_spec

__all__ = [
    "GgufError",
    "GgufHeader",
    "TokenizerBundle",
    "TokenizerError",
    "is_gguf",
    "load_tokenizer",
    "read_header",
    "read_spec",
    "read_tokenizer",
]
