"""What goes wrong with tokenizers."""

from dpi_engine.config.errors import ConfigError


class TokenizerError(ConfigError):
    """A tokenizer that is missing, unknown or broken. The text names the file or key, what was expected and got."""
