"""Prompts: the four forms of the completions API, encoding, truncation, length limits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from dpi_engine.server.errors import bad_request
from dpi_engine.server.params import token_ids

LONG_TEXT_CHARS = 20_000
"""Texts above this are encoded in a thread, so that the streams of others go on."""

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(slots=True)
class Prompt:
    """One prompt as tokens.

    `text` is what `echo` gives back: what the client sent, or once asked for what the ids read as. `encoded_text` is
    set if the ids are exactly its encoding.
    """

    token_ids: list[int]
    text: str | None = None
    encoded_text: str | None = None


def read_forms(value: Any, vocab_size: int, max_prompts: int) -> list[str | list[int]]:
    """str | list[str] | list[int] | list[list[int]] -> a list of texts or token lists. Raises ApiError 400."""
    if isinstance(value, str):
        return [_text(value, "prompt")]
    if value is None:
        raise bad_request("'prompt' is required", "prompt", "missing_field")
    if not isinstance(value, list):
        raise bad_request(
            f"'prompt' must be a string, a list of strings, a list of token ids or a list of such lists, "
            f"got {type(value).__name__}",
            "prompt",
            "invalid_type",
        )
    if not value:
        raise bad_request("'prompt' must not be an empty list", "prompt", "empty_prompt")
    if all(_is_id(item) for item in value):
        return [token_ids("prompt", value, vocab_size, len(value))]
    if len(value) > max_prompts:
        raise bad_request(f"'prompt' may hold at most {max_prompts} prompts, got {len(value)}", "prompt", "too_many")
    if all(isinstance(item, str) for item in value):
        return [_text(item, f"prompt[{i}]") for i, item in enumerate(value)]
    for i, item in enumerate(value):
        if not isinstance(item, list) or not all(_is_id(token) for token in item):
            raise bad_request(
                f"'prompt[{i}]' does not fit: a list of prompts holds strings only, or lists of token ids only",
                "prompt",
                "invalid_type",
            )
        if not item:
            raise bad_request(f"'prompt[{i}]' must not be empty", "prompt", "empty_prompt")
        token_ids(f"prompt[{i}]", item, vocab_size, len(item))
    return value


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(text: str, name: str) -> str:
    if not text:
        raise bad_request(f"'{name}' must not be empty", "prompt", "empty_prompt")
    return text


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text; long ones are encoded off the event loop."""
    if len(text) <= LONG_TEXT_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def work() -> list[int]:
        # The batch call lets go of the interpreter lock, the single one does not.
        return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    return await asyncio.to_thread(work)


def check_length(fewest: int, truncated: int | None, max_model_len: int, prompt_param: str) -> None:
    """Raise ApiError 400 for a text that cannot fit whatever its tokens are, before the work of encoding it."""
    if truncated is None and fewest >= max_model_len:
        raise bad_request(
            f"the prompt has at least {fewest} tokens, but this model's maximum context length is {max_model_len} "
            "tokens; shorten it or set truncate_prompt_tokens",
            prompt_param,
            "context_length_exceeded",
        )


def truncate(ids: list[int], limit: int | None, max_model_len: int) -> list[int]:
    """The last `limit` tokens (-1: as many as leave room for one). Raises ApiError 400."""
    if limit is None:
        return ids
    if limit == -1:
        limit = max_model_len - 1
    if not 1 <= limit <= max_model_len:
        raise bad_request(
            f"'truncate_prompt_tokens' must be -1 or between 1 and {max_model_len}, got {limit}",
            "truncate_prompt_tokens",
            "out_of_range",
        )
    return ids[-limit:]


def room_for(
    num_prompt: int, asked: int | None, default: int | None, max_model_len: int, *, param: str, prompt_param: str
) -> int:
    """How many tokens may be generated after a prompt of `num_prompt`.

    `asked` is what the client wants, `default` what it gets when it does not say (None: all the room there is). Raises
    ApiError 400, naming both lengths and the limit, when prompt and answer do not fit `max_model_len`.
    """
    if num_prompt == 0:
        raise bad_request("the prompt has no tokens", prompt_param, "empty_prompt")
    room = max_model_len - num_prompt
    if room < 1:
        raise bad_request(
            f"the prompt has {num_prompt} tokens, but this model's maximum context length is {max_model_len} tokens "
            f"and at least one must be left for the answer; shorten the prompt to {max_model_len - 1} tokens or set "
            "truncate_prompt_tokens",
            prompt_param,
            "context_length_exceeded",
        )
    if asked is None:
        return room if default is None else min(room, default)
    if asked < 1:
        raise bad_request(f"'{param}' must be at least 1, got {asked}", param, "out_of_range")
    if asked > room:
        shown = str(asked) if asked < 2**64 else "a number beyond 64 bits"
        raise bad_request(
            f"'{param}' is {shown}, but this model's maximum context length is {max_model_len} tokens and the prompt "
            f"has {num_prompt}, so at most {room} can be generated",
            param,
            "context_length_exceeded",
        )
    return asked
