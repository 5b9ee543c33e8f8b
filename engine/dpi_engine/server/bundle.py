"""The tokenizer as the server sees it, and the text and bytes of single tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tokenizers import Tokenizer

from dpi_engine.frontend.detokenizer import Vocabulary


class TokenizerBundle(Protocol):
    """What a model's tokenizer files give: the tokenizer, its chat template and the special tokens.

    `eos_ids` are all ids that end an answer, the main one first. `special_tokens` maps bos_token, eos_token and the
    like to their text, as chat templates name them.
    """

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def eos_ids(self) -> Sequence[int]: ...
    @property
    def special_tokens(self) -> Mapping[str, str]: ...


class TokenTexts:
    """Single tokens as log probabilities show them, over the vocabulary that detokenizing uses."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        tokenizer = bundle.tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.vocab_size = max(tokenizer.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        # Characters that one token can stand for at most, where no normalizer may shorten a text before it is cut.
        exact = self.vocabulary.byte_level and tokenizer.normalizer is None
        self._longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0) if exact else 0
        self.eos_ids = frozenset(bundle.eos_ids)
        self.eos_id: int | None = next(iter(bundle.eos_ids), None)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of a text's tokens, known without encoding it; 0 where nothing is known."""
        return len(text) // self._longest if self._longest else 0

    def raw(self, token_id: int) -> bytes:
        """The bytes that the token stands for; empty for an id the tokenizer does not know."""
        return self.vocabulary.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        """Readable text of the token; one that is part of a character reads `bytes:\\xf0\\x9f`."""
        raw = self.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
