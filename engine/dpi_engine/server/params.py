"""From request fields to `SamplingParams`: ranges, limits, defaults. Pure; every complaint names its field."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection

from tokenizers import Tokenizer

from dpi_engine.server.errors import bad_request
from dpi_engine.server.schemas.sampling import SamplingFields
from dpi_engine.wire.messages import OutputKind, SamplingParams

MAX_N = 128
MAX_STOP = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 256
MAX_BIASES = 1024
MAX_BAD_WORDS = 256
SEED_LIMIT = 2**63
MIN_TEMPERATURE = 1e-6


def between(name: str, value: float | None, low: float, high: float, default: float) -> float:
    """`value` if low <= value <= high, `default` for None; else ApiError 400 with the limits."""
    if value is None:
        return default
    if not low <= value <= high:
        raise bad_request(f"'{name}' must be between {low:g} and {high:g}, got {value:g}", name, "out_of_range")
    return value


def integer(name: str, value: int | None, low: int, high: int, default: int) -> int:
    """The same for integers, which may be too large to be floats."""
    if value is None:
        return default
    if not low <= value <= high:
        got = str(value) if abs(value) < 2**64 else "a number beyond 64 bits"
        raise bad_request(f"'{name}' must be between {low} and {high}, got {got}", name, "out_of_range")
    return value


def _temperature(value: float | None) -> float:
    value = between("temperature", value, 0.0, 2.0, 1.0)
    if 0 < value < MIN_TEMPERATURE:
        raise bad_request(
            f"'temperature' must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, got {value:g}",
            "temperature",
            "out_of_range",
        )
    return value


def _top_p(value: float | None) -> float:
    value = between("top_p", value, 0.0, 1.0, 1.0)
    if value == 0:
        raise bad_request("'top_p' must be above 0; for the likeliest token use temperature 0", "top_p", "out_of_range")
    return value


def _repetition(value: float | None) -> float:
    if value is not None and not (0 < value <= 100 and math.isfinite(value)):
        raise bad_request(
            f"'repetition_penalty' must be above 0 and at most 100, got {value:g}", "repetition_penalty", "out_of_range"
        )
    return 1.0 if value is None else value


def token_ids(name: str, ids: list[int] | None, vocab_size: int, limit: int) -> list[int]:
    """Known token ids, at most `limit` of them; else ApiError 400."""
    if ids is None:
        return []
    if len(ids) > limit:
        raise bad_request(f"'{name}' may have at most {limit} entries, got {len(ids)}", name, "too_many")
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise bad_request(
                f"'{name}[{position}]' must be a token id from 0 to {vocab_size - 1}, got {token_id}",
                name,
                "out_of_vocabulary",
            )
    return ids


def stop_strings(stop: str | list[str] | None) -> list[str]:
    """Up to 16 non-empty strings, without doubles; else ApiError 400."""
    if stop is None:
        return []
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > MAX_STOP:
        raise bad_request(f"'stop' may have at most {MAX_STOP} strings, got {len(strings)}", "stop", "too_many")
    for text in strings:
        if not text:
            raise bad_request("'stop' strings must not be empty", "stop", "empty_string")
        if len(text) > MAX_STOP_CHARS:
            raise bad_request(f"'stop' strings may have at most {MAX_STOP_CHARS} characters", "stop", "too_long")
    return list(dict.fromkeys(strings))


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not bias:
        return None
    if len(bias) > MAX_BIASES:
        raise bad_request(f"'logit_bias' may have at most {MAX_BIASES} entries", "logit_bias", "too_many")
    result: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 19 and int(key) < vocab_size):
            raise bad_request(
                f"'logit_bias' keys must be token ids from 0 to {vocab_size - 1}, got {key[:40]!r}",
                "logit_bias",
                "out_of_vocabulary",
            )
        result[int(key)] = between("logit_bias", value, -100.0, 100.0, 0.0)
    return result


def _bad_words(words: list[str] | None, tokenizer: Tokenizer) -> list[list[int]] | None:
    """Token sequences of each word, as it is written at the start of a text and after a space."""
    if not words:
        return None
    if len(words) > MAX_BAD_WORDS:
        raise bad_request(f"'bad_words' may have at most {MAX_BAD_WORDS} entries", "bad_words", "too_many")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip() or len(word) > MAX_STOP_CHARS:
            raise bad_request(
                f"'bad_words' must be of 1 to {MAX_STOP_CHARS} characters, not all blank", "bad_words", "empty_string"
            )
        for written in (word, " " + word.lstrip()):
            ids = tokenizer.encode(written, add_special_tokens=False).ids
            if ids:
                sequences[tuple(ids)] = None
    return [list(ids) for ids in sequences]


def check_choices(fields: SamplingFields) -> int:
    """How many choices per prompt: `n`, with `best_of` allowed only where it changes nothing."""
    n = integer("n", fields.n, 1, MAX_N, 1)
    if fields.best_of is not None and fields.best_of != n:
        raise bad_request(
            f"'best_of' other than 'n' is not supported by this server version: got {fields.best_of}, n is {n}",
            "best_of",
            "unsupported_parameter",
        )
    return n


def check_stream(fields: SamplingFields) -> None:
    """`stream_options` needs `stream`, and prompt log probabilities have no place in a stream."""
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("'stream_options' needs 'stream': true", "stream_options", "invalid_combination")
    if fields.prompt_logprobs is not None and fields.stream:
        raise bad_request("'prompt_logprobs' needs 'stream': false", "prompt_logprobs", "invalid_combination")


def check_priority(priority: int | None, priority_scheduling: bool) -> int:
    value = integer("priority", priority, -(2**31), 2**31 - 1, 0)
    if value and not priority_scheduling:
        raise bad_request(
            "'priority' needs a server started with --scheduling-policy priority", "priority", "invalid_combination"
        )
    return value


def check_label(name: str, value: str | None, limit: int) -> str | None:
    """A short non-empty printable string, or None."""
    if value is None:
        return None
    if not value or len(value) > limit or not value.isprintable():
        raise bad_request(f"'{name}' must be 1 to {limit} printable characters", name, "invalid_value")
    return value


def derive_seed(seed: int | None, index: int) -> int:
    """Seed of choice `index`: seed + index, or a random one, so that every request has one."""
    return secrets.randbits(62) if seed is None else (seed + index) % SEED_LIMIT


def make_sampling(
    fields: SamplingFields,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    tokenizer: Tokenizer,
    vocab_size: int,
    eos_ids: Collection[int],
    eos_id: int | None,
) -> SamplingParams:
    """The parameters of one request, without its seed. Raises ApiError 400.

    Stop strings are matched where the text is made, so they are not part of it. Ends of sequence beside `eos_id` are
    stop ids, unless `ignore_eos`; `all_stop_token_ids` always has them all, since that set is what min_tokens masks.
    """
    stop_ids = token_ids("stop_token_ids", fields.stop_token_ids, vocab_size, MAX_STOP_IDS)
    allowed = token_ids("allowed_token_ids", fields.allowed_token_ids, vocab_size, vocab_size)
    if fields.allowed_token_ids is not None and not allowed:
        raise bad_request("'allowed_token_ids' must not be empty", "allowed_token_ids", "empty_list")
    min_tokens = integer("min_tokens", fields.min_tokens, 0, 2**31 - 1, 0)
    if min_tokens > max_tokens:
        raise bad_request(
            f"'min_tokens' must not exceed the {max_tokens} tokens that may be generated, got {min_tokens}",
            "min_tokens",
            "out_of_range",
        )
    if fields.seed is not None:
        integer("seed", fields.seed, 0, SEED_LIMIT - 1, 0)
    ignore_eos = bool(fields.ignore_eos)
    other_ends = set() if ignore_eos else set(eos_ids) - {eos_id}
    all_stops = sorted(set(eos_ids) | set(stop_ids))
    return SamplingParams(
        presence_penalty=between("presence_penalty", fields.presence_penalty, -2.0, 2.0, 0.0),
        frequency_penalty=between("frequency_penalty", fields.frequency_penalty, -2.0, 2.0, 0.0),
        repetition_penalty=_repetition(fields.repetition_penalty),
        temperature=_temperature(fields.temperature),
        top_p=_top_p(fields.top_p),
        top_k=max(integer("top_k", fields.top_k, -1, 2**31 - 1, 0), 0),
        min_p=between("min_p", fields.min_p, 0.0, 1.0, 0.0),
        stop_token_ids=sorted(other_ends | set(stop_ids)) or None,
        ignore_eos=ignore_eos,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=fields.skip_special_tokens is not False,
        output_kind=OutputKind.DELTA,
        logit_bias=_logit_bias(fields.logit_bias, vocab_size),
        allowed_token_ids=allowed or None,
        bad_words=fields.bad_words or None,
        bad_words_token_ids=_bad_words(fields.bad_words, tokenizer),
        eos_token_id=None if ignore_eos else eos_id,
        all_stop_token_ids=all_stops or None,
    )
