"""Log probabilities in the two shapes of OpenAI's API, and prompt log probabilities. Pure."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from dpi_engine.server.bundle import TokenTexts
from dpi_engine.server.schemas.chat import ChatLogprobs, TokenLogprob, TopLogprob
from dpi_engine.server.schemas.completions import CompletionLogprobs
from dpi_engine.server.schemas.sampling import PromptLogprobs
from dpi_engine.wire.messages import LogprobsLists

FLOOR = -9999.0
"""Stands for minus infinity (a masked token), which JSON cannot carry."""


def finite(value: float) -> float:
    """`value`, or the floor for what is no finite number or lies below it."""
    return max(value, FLOOR) if math.isfinite(value) else FLOOR


def _alternatives(rows: LogprobsLists, position: int, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest (token id, log probability) at a position, best first."""
    pairs = zip(rows.token_ids[position][1:], rows.logprobs[position][1:], strict=False)
    return sorted(((token, finite(value)) for token, value in pairs), key=lambda pair: -pair[1])[:count]


def _label(texts: TokenTexts, token_id: int, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else texts.text(token_id)


class CompletionLogprobsWriter:
    """Builds the parallel lists of /v1/completions for one choice, chunk by chunk.

    Keeps where in the choice's text the next token begins; bytes of a split character count once it is whole.
    """

    def __init__(
        self, texts: TokenTexts, count: int, *, start: int = 0, skip_special_tokens: bool = True, as_ids: bool = False
    ) -> None:
        self._texts = texts
        self._count = count
        self._offset = start
        self._skip = skip_special_tokens
        self._as_ids = as_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def prompt(
        self, token_ids: Sequence[int], rows: LogprobsLists | None, offsets: Sequence[int] | None = None
    ) -> CompletionLogprobs:
        """Echoed prompt tokens; rows are for tokens 1 on, the first token has no log probability.

        `offsets`: where each token begins, if the tokenizer said so; else it follows from the tokens' text.
        """
        result = CompletionLogprobs([], [], [], [])
        for position, token_id in enumerate(token_ids):
            offset = self._advance(token_id)
            result.text_offset.append(offset if offsets is None else offsets[position])
            row = position - 1
            if row < 0 or rows is None or row >= len(rows.token_ids):
                result.tokens.append(_label(self._texts, token_id, self._as_ids))
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
            else:
                self._add(result, token_id, rows, row)
        return result

    def output(self, token_ids: Sequence[int], rows: LogprobsLists) -> CompletionLogprobs:
        """Generated tokens, a row for each."""
        result = CompletionLogprobs([], [], [], [])
        for position, token_id in enumerate(token_ids[: len(rows.token_ids)]):
            result.text_offset.append(self._advance(token_id))
            self._add(result, token_id, rows, position)
        return result

    def _add(self, result: CompletionLogprobs, token_id: int, rows: LogprobsLists, position: int) -> None:
        chosen = finite(rows.logprobs[position][0])
        best: dict[str, float] = {}
        for token, value in _alternatives(rows, position, self._count):
            best.setdefault(_label(self._texts, token, self._as_ids), value)
        name = _label(self._texts, token_id, self._as_ids)
        best.setdefault(name, chosen)
        result.tokens.append(name)
        result.token_logprobs.append(chosen)
        result.top_logprobs.append(best)

    def _advance(self, token_id: int) -> int:
        offset = self._offset
        if not (self._skip and self._texts.vocabulary.is_special(token_id)):
            self._offset += len(self._decoder.decode(self._texts.raw(token_id)))
        return offset


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], rows: LogprobsLists, count: int, as_ids: bool = False
) -> ChatLogprobs:
    """Generated tokens in the chat shape, with `count` alternatives each."""
    content = []
    for position, token_id in enumerate(token_ids[: len(rows.token_ids)]):
        top = [
            TopLogprob(_label(texts, token, as_ids), value, list(texts.raw(token)))
            for token, value in _alternatives(rows, position, count)
        ]
        chosen = finite(rows.logprobs[position][0])
        content.append(TokenLogprob(_label(texts, token_id, as_ids), chosen, list(texts.raw(token_id)), top))
    return ChatLogprobs(content)


def prompt_logprobs(
    texts: TokenTexts, num_prompt_tokens: int, rows: LogprobsLists | None, count: int
) -> PromptLogprobs:
    """Per prompt token {id: {logprob, rank, decoded_token}}: itself and `count` alternatives; None for the first."""
    result: PromptLogprobs = [None] * num_prompt_tokens
    if rows is None:
        return result
    for position, (tokens, values) in enumerate(zip(rows.token_ids, rows.logprobs, strict=True)):
        if position + 1 >= num_prompt_tokens:
            break
        entry = {}
        for place, (token, value) in enumerate(zip(tokens[: count + 1], values, strict=False)):
            key = str(token)
            if key not in entry:
                rank = rows.ranks[position] if place == 0 else place
                entry[key] = {"logprob": finite(value), "rank": rank, "decoded_token": texts.text(token)}
        result[position + 1] = entry
    return result
