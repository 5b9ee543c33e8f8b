"""Token ids to text, one sequence at a time as tokens come, with stop strings."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Protocol

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from dpi_engine.frontend.stopping import StopMatcher

CONTEXT_TOKENS = 6
"""Prompt tokens that a decoder with word-dependent spaces is shown before the output."""


class Piece(msgspec.Struct, frozen=True):
    """What a push gave: settled text, the stop string that ended the sequence, how many tokens of the push count."""

    text: str
    stop: str | None = None
    tokens_used: int = 0


class Vocabulary:
    """Texts and bytes of single tokens of a tokenizer, and streams over it. Shared by all sequences."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.byte_level = _is_byte_level(tokenizer)
        self._added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in self._added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._settled: dict[bool, dict[int, str]] = {False: {}, True: {}}

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, which need not be whole characters; empty for an id outside the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """The token alone as text; bytes that are not whole characters show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def stream(self, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> TextStream:
        if self.byte_level:
            return ByteStream(self, skip_special_tokens)
        return DecodedStream(self.tokenizer, prompt_token_ids, skip_special_tokens)

    def settled_texts(self, skip_special_tokens: bool) -> dict[int, str]:
        """Texts of tokens that leave no character open where none was: they are the same wherever the token stands.

        Streams over a byte-level vocabulary fill it as they meet the tokens.
        """
        return self._settled[skip_special_tokens]

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id < 0:
            return b""
        added = self._added.get(token_id)
        if added is not None:
            return added.content.encode()
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            try:
                return bytes([_BYTE_OF_CHARACTER[character] for character in token])
            except KeyError:
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode()
        return token.replace("\u2581", " ").encode()


class TextStream(Protocol):
    """Text of a sequence, token by token."""

    def step(self, token_id: int) -> str:
        """The text that this token settles; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left of an incomplete character when no more tokens come."""
        ...


class ByteStream:
    """For byte-level BPE: the text is the tokens' bytes one after another, so an incremental UTF-8 decoder is exact."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._texts = vocabulary.settled_texts(skip_special_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._open = False  # the decoder keeps the beginning of a character

    def step(self, token_id: int) -> str:
        was_open = self._open
        if not was_open:
            known = self._texts.get(token_id)
            if known is not None:
                return known
        if self._skip and self._vocabulary.is_special(token_id):
            text = ""
        else:
            text = self._decoder.decode(self._vocabulary.token_bytes(token_id))
            self._open = bool(self._decoder.getstate()[0])
        if not was_open and not self._open:
            self._texts[token_id] = text
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class DecodedStream:
    """For every other decoder, by the tokenizer's own stream.

    Such decoders drop the space before the first word of a text, so the output is decoded behind the end of its prompt.
    Where a later byte makes one invalid run of bytes whose beginning is out as text already, that text stays.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._settled = 0  # characters given out
        self._open = False

    def step(self, token_id: int) -> str:
        self._ids.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:
            # A token changed how the text before it reads. What is out stays; go on from the text as it reads now.
            text = self._rest()
            self._stream = DecodeStream(
                ids=(self._context + self._ids)[-CONTEXT_TOKENS:], skip_special_tokens=self._skip
            )
        self._open = text is None
        if not text:
            return ""
        self._settled += len(text)
        return text

    def flush(self) -> str:
        if not self._open:
            return ""
        self._open = False
        return self._rest()

    def _rest(self) -> str:
        """Text of all tokens beyond what is out."""
        before = self._tokenizer.decode(self._context, skip_special_tokens=self._skip)
        whole = self._tokenizer.decode(self._context + self._ids, skip_special_tokens=self._skip)
        return whole[len(before) + self._settled :]


class Detokenizer:
    """Output text of one sequence.

    `min_tokens`: stop strings that are complete within the first `min_tokens` tokens do not count.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """Raises InvalidRequest for an empty stop string."""
        self._stream = vocabulary.stream(prompt_token_ids, skip_special_tokens)
        self._matcher = StopMatcher(stop, include_stop_str_in_output)
        self._include = include_stop_str_in_output
        self._any_stop = bool(stop)
        self._min_tokens = min_tokens
        self._count = 0
        self._stopped = False

    def push(self, token_ids: Sequence[int], *, last_is_stop_token: bool = False) -> Piece:
        """Take the next tokens.

        Stops at the first token that completes a stop string: `stop` says which, `tokens_used` up to which token of
        this push the sequence goes; tokens after it, and later pushes, are not part of the sequence (empty Piece).
        With `last_is_stop_token` the last one ended the sequence as a stop token: it counts, its text is left out
        unless stop strings are to be included.
        """
        if self._stopped:
            return Piece("")
        if len(token_ids) == 1 and not self._any_stop and not last_is_stop_token:
            self._count += 1
            return Piece(self._stream.step(token_ids[0]), None, 1)
        parts: list[str] = []
        silent = len(token_ids) - 1 if last_is_stop_token and not self._include else -1
        for index, token_id in enumerate(token_ids):
            self._count += 1
            if index == silent:
                continue
            text = self._stream.step(token_id)
            if text:
                settled, stop = self._matcher.push(text, self._count > self._min_tokens)
                parts.append(settled)
                if stop is not None:
                    self._stopped = True
                    return Piece("".join(parts), stop, index + 1)
        return Piece("".join(parts), None, len(token_ids))

    def finish(self) -> Piece:
        """No more tokens come: an incomplete character becomes U+FFFD, and text kept back is given out."""
        if self._stopped:
            return Piece("")
        self._stopped = True
        settled, stop = self._matcher.push(self._stream.flush(), self._count > self._min_tokens)
        return Piece(settled if stop is not None else settled + self._matcher.flush(), stop)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = tokenizer.decoder
    if decoder is None:
        return False
    described = json.loads(decoder.__getstate__())
    steps = described["decoders"] if described.get("type") == "Sequence" else [described]
    return [step.get("type") for step in steps] == ["ByteLevel"]


def _characters_of_bytes() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character; those that are not printable come from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _characters_of_bytes()
