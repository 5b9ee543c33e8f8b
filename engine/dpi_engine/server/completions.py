"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aiohttp import web

from dpi_engine.server.context import read_context
from dpi_engine.server.errors import bad_request
from dpi_engine.server.generation import Plan, Wanted, check_logprobs, make_plan
from dpi_engine.server.job import Job, Whole
from dpi_engine.server.json_body import read_json
from dpi_engine.server.logprobs import CompletionLogprobsWriter, prompt_logprobs
from dpi_engine.server.prompts import (
    DEFAULT_COMPLETION_TOKENS,
    Prompt,
    check_length,
    encode,
    read_forms,
    room_for,
    truncate,
)
from dpi_engine.server.schemas.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from dpi_engine.server.sequence import Choice, Output
from dpi_engine.server.state import STATE, ServerState


async def handle_completions(request: web.Request) -> web.StreamResponse:
    """Raises ApiError for anything wrong with the request."""
    state = request.app[STATE]
    body = await read_json(request, CompletionRequest)
    context = read_context(request)
    state.check_model(body.model)
    return await _Job(state, body, make_plan(state, body, context, *await _prepare(state, body))).answer(request)


async def _prepare(state: ServerState, body: CompletionRequest) -> tuple[list[Prompt], Wanted]:
    """Prompts as tokens, and what is wanted for them."""
    limit = state.options.max_logprobs
    logprobs = check_logprobs("logprobs", body.logprobs, limit)
    wanted_prompt = check_logprobs("prompt_logprobs", body.prompt_logprobs, limit)
    max_model_len = state.max_model_len()
    # Scoring a prompt (echo, no new tokens) still computes one token, which nobody gets to see.
    score_only = bool(body.echo) and body.max_tokens == 0
    prompts = []
    for form in read_forms(body.prompt, state.texts.vocab_size, state.options.max_sequences):
        if isinstance(form, str):
            check_length(state.texts.fewest_tokens(form), body.truncate_prompt_tokens, max_model_len, "prompt")
            ids = await encode(state.bundle.tokenizer, form, add_special_tokens=body.add_special_tokens is not False)
        else:
            ids = form
        kept = truncate(ids, body.truncate_prompt_tokens, max_model_len)
        text = form if isinstance(form, str) and len(kept) == len(ids) else None
        prompts.append(Prompt(kept, text, text))
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("'max_tokens' must be at least 1 (0 needs 'echo': true)", "max_tokens", "out_of_range")
    asked = 1 if score_only else body.max_tokens
    room = [
        room_for(
            len(prompt.token_ids),
            asked,
            DEFAULT_COMPLETION_TOKENS,
            max_model_len,
            param="max_tokens",
            prompt_param="prompt",
        )
        for prompt in prompts
    ]
    if body.echo and logprobs is not None:
        wanted_prompt = max(logprobs, wanted_prompt or 0)
    return prompts, Wanted(
        prefix="cmpl-",
        logprobs=None if score_only else logprobs,
        prompt_logprobs=wanted_prompt,
        max_tokens=room,
        keep_tokens=not score_only,
        score_each=bool(body.stream),
    )


class _Job(Job):
    chunk_type = CompletionResponse

    def __init__(self, state: ServerState, body: CompletionRequest, plan: Plan) -> None:
        super().__init__(state, plan, shows_tokens=body.logprobs is not None)
        self._body = body
        self._echo = bool(body.echo)
        self._skip = body.skip_special_tokens is not False
        self._writers: dict[int, CompletionLogprobsWriter] = {}

    def logprobs(self, output: Output) -> list[CompletionLogprobs]:
        if self._body.logprobs is None or output.logprobs is None:
            return []
        writer = self._writers.get(output.index)
        if writer is None:
            writer = self._writers[output.index] = self._writer(len(self._echo_text(output.index)))
        return [writer.output(output.token_ids, output.logprobs)]

    def response(self, wholes: list[Whole]) -> CompletionResponse:
        plan = self.plan
        answers = []
        for i, whole in enumerate(wholes):
            answer = CompletionChoice(
                index=i,
                text=self._echo_text(i) + whole.text,
                logprobs=_concatenated(self._echo_logprobs(i) + whole.logprobs),
                finish_reason=whole.finish_reason,
                stop_reason=whole.stop_reason,
            )
            if self._body.prompt_logprobs is not None:
                rows = self._scored(i).prompt_logprobs
                num_prompt = len(plan.prompt_of(i).token_ids)
                answer.prompt_logprobs = prompt_logprobs(
                    self.state.texts, num_prompt, rows, count=self._body.prompt_logprobs
                )
            if plan.return_token_ids:
                answer.token_ids = whole.token_ids
                answer.prompt_token_ids = plan.prompt_of(i).token_ids
            answers.append(answer)
        return CompletionResponse(
            id=plan.request_id, created=self.created, model=plan.model, choices=answers, usage=plan.usage()
        )

    def text_chunk(self, index: int, text: Any) -> CompletionResponse:
        return self.chunk([CompletionChoice(index=index, text=text)])

    def news(self, output: Output) -> Iterator[CompletionResponse]:
        if not output.token_ids and output.finish_reason is None:
            return  # a part of the prompt's log probabilities
        i, plan, parts = output.index, self.plan, self.logprobs(output)
        choice = CompletionChoice(
            index=i, text=output.text, finish_reason=output.finish_reason, stop_reason=output.stop_reason
        )
        if self.is_first(i):
            choice.text = self._echo_text(i) + output.text
            parts = self._echo_logprobs(i) + parts
            if plan.return_token_ids:
                choice.prompt_token_ids = plan.prompt_of(i).token_ids
        choice.logprobs = _concatenated(parts)
        if plan.return_token_ids:
            choice.token_ids = output.token_ids
        if self.is_news(choice.text, choice.finish_reason):
            yield self.chunk([choice])

    def _scored(self, index: int) -> Choice:
        """The choice whose request brings the prompt's log probabilities."""
        own = self.plan.choices[index]
        return own if own.prompt_logprobs is not None else self.plan.of_prompt(index // self.plan.n)[0]

    def _echo_text(self, index: int) -> str:
        if not self._echo:
            return ""
        prompt = self.plan.prompt_of(index)
        if prompt.text is None:
            prompt.text = self.state.bundle.tokenizer.decode(prompt.token_ids, skip_special_tokens=self._skip)
        return prompt.text

    def _writer(self, start: int) -> CompletionLogprobsWriter:
        return CompletionLogprobsWriter(
            self.state.texts,
            self._body.logprobs or 0,
            start=start,
            skip_special_tokens=self._skip,
            as_ids=self.plan.as_ids,
        )

    def _echo_logprobs(self, index: int) -> list[CompletionLogprobs]:
        if not self._echo or self._body.logprobs is None:
            return []
        prompt = self.plan.prompt_of(index)
        offsets = None
        if prompt.encoded_text is not None:
            encoding = self.state.bundle.tokenizer.encode(
                prompt.encoded_text, add_special_tokens=self._body.add_special_tokens is not False
            )
            offsets = [start for start, _ in encoding.offsets]
        return [self._writer(0).prompt(prompt.token_ids, self._scored(index).prompt_logprobs, offsets)]


def _concatenated(parts: list[CompletionLogprobs]) -> CompletionLogprobs | None:
    """One object of several in a row, None for none."""
    if not parts:
        return None
    whole = parts[0]
    for part in parts[1:]:
        whole.text_offset += part.text_offset
        whole.token_logprobs += part.token_logprobs
        whole.tokens += part.tokens
        whole.top_logprobs += part.top_logprobs
    return whole
