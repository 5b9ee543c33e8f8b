"""What completions and chat have in common: limits, sampling, choices, usage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dpi_engine.frontend.detokenizer import Detokenizer
from dpi_engine.frontend.interface import GenerationRequest
from dpi_engine.server.context import RequestContext, new_request_id
from dpi_engine.server.params import (
    check_choices,
    check_label,
    check_priority,
    check_stream,
    derive_seed,
    integer,
    make_sampling,
    stop_strings,
)
from dpi_engine.server.prompts import Prompt
from dpi_engine.server.schemas.sampling import PromptTokensDetails, SamplingFields, Usage
from dpi_engine.server.sequence import Choice
from dpi_engine.server.state import ServerState
from dpi_engine.wire.messages import SamplingParams

MAX_CACHE_SALT = 256


@dataclass(slots=True, kw_only=True)
class Plan:
    """A checked request: what to generate for which prompts. Choice i of prompt p has index p * n + i."""

    request_id: str
    model: str
    n: int
    prompts: list[Prompt]
    choices: list[Choice]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    as_ids: bool

    def usage(self, choices: Sequence[Choice] | None = None) -> Usage:
        """Counts as they stand: each prompt once, tokens of all choices."""
        chosen = self.choices if choices is None else choices
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        completion_tokens = sum(choice.num_tokens for choice in chosen)
        cached = sum(min(choice.cached_tokens for choice in self.of_prompt(p)) for p in range(len(self.prompts)))
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    def of_prompt(self, prompt_index: int) -> list[Choice]:
        return self.choices[prompt_index * self.n : (prompt_index + 1) * self.n]

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of a choice."""
        return self.prompts[index // self.n]


@dataclass(slots=True, kw_only=True)
class Wanted:
    """What differs between the endpoints.

    `logprobs`, `prompt_logprobs`: alternatives per token, None for none. `max_tokens`: per prompt. `keep_tokens` False:
    the prompt is only scored. `score_each`: every choice brings the prompt's log probabilities, not only the first.
    """

    prefix: str
    logprobs: int | None
    prompt_logprobs: int | None
    max_tokens: Sequence[int]
    keep_tokens: bool = True
    score_each: bool = False


def check_logprobs(name: str, value: int | None, limit: int) -> int | None:
    """Raises ApiError 400 outside 0..limit."""
    return None if value is None else integer(name, value, 0, limit, 0)


def make_plan(
    state: ServerState, fields: SamplingFields, context: RequestContext, prompts: list[Prompt], wanted: Wanted
) -> Plan:
    """Check everything that is left to check and make the requests. Raises ApiError 400 or 404."""
    model = state.check_model(fields.model)
    check_stream(fields)
    n = check_choices(fields)
    if len(prompts) * n > state.options.max_sequences:
        limit = state.options.max_sequences
        integer("n", len(prompts) * n, 1, limit, 1)
    priority = check_priority(fields.priority, state.options.priority_scheduling)
    cache_salt = check_label("cache_salt", fields.cache_salt, MAX_CACHE_SALT)
    base = context.request_id or check_label("request_id", fields.request_id, 128) or new_request_id()
    request_id = wanted.prefix + base.removeprefix(wanted.prefix)
    stops = stop_strings(fields.stop)
    arrival = time.time()
    by_length: dict[int, SamplingParams] = {}
    choices: list[Choice] = []
    for p, (prompt, max_tokens) in enumerate(zip(prompts, wanted.max_tokens, strict=True)):
        sampling = by_length.get(max_tokens)
        if sampling is None:
            sampling = by_length[max_tokens] = make_sampling(
                fields,
                max_tokens=max_tokens,
                logprobs=wanted.logprobs,
                prompt_logprobs=wanted.prompt_logprobs,
                tokenizer=state.bundle.tokenizer,
                vocab_size=state.texts.vocab_size,
                eos_ids=state.texts.eos_ids,
                eos_id=state.texts.eos_id,
            )
        for i in range(n):
            index = p * n + i
            own = msgspec.structs.replace(sampling, seed=derive_seed(fields.seed, i))
            if i and not wanted.score_each:
                own.prompt_logprobs = None
            choices.append(
                Choice(
                    index=index,
                    request=GenerationRequest(
                        request_id=request_id if len(prompts) * n == 1 else f"{request_id}-{index}",
                        prompt_token_ids=prompt.token_ids,
                        sampling=own,
                        priority=priority,
                        cache_salt=cache_salt,
                        data_parallel_rank=context.rank,
                        session_id=context.session_id,
                        arrival_time=arrival,
                    ),
                    detokenizer=Detokenizer(
                        state.texts.vocabulary,
                        prompt_token_ids=prompt.token_ids,
                        stop=stops,
                        include_stop_str_in_output=bool(fields.include_stop_str_in_output),
                        skip_special_tokens=fields.skip_special_tokens is not False,
                        min_tokens=fields.min_tokens or 0,
                    ),
                    timer=state.metrics.timer(num_prompt_tokens=len(prompt.token_ids), n=n, max_tokens=max_tokens),
                    hidden_stops=state.texts.eos_ids - frozenset(fields.stop_token_ids or ()),
                    keep_tokens=wanted.keep_tokens,
                )
            )
    options = fields.stream_options
    return Plan(
        request_id=request_id,
        model=model,
        n=n,
        prompts=prompts,
        choices=choices,
        stream=bool(fields.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(fields.return_token_ids),
        as_ids=bool(fields.return_tokens_as_token_ids),
    )
