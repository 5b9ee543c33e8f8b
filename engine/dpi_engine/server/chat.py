"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aiohttp import web

from dpi_engine.server.chat_messages import normalize_messages
from dpi_engine.server.chat_template import ChatTemplate, TemplateError
from dpi_engine.server.context import read_context
from dpi_engine.server.errors import bad_request
from dpi_engine.server.generation import Plan, Wanted, check_logprobs, make_plan
from dpi_engine.server.job import Job, Whole
from dpi_engine.server.json_body import read_json
from dpi_engine.server.logprobs import chat_logprobs, prompt_logprobs
from dpi_engine.server.prompts import Prompt, check_length, encode, room_for, truncate
from dpi_engine.server.schemas.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    Conversation,
)
from dpi_engine.server.sequence import Output
from dpi_engine.server.state import STATE, ServerState


async def handle_chat(request: web.Request) -> web.StreamResponse:
    """Raises ApiError for anything wrong with the request."""
    state = request.app[STATE]
    body = await read_json(request, ChatRequest)
    context = read_context(request)
    state.check_model(body.model)
    prompt, wanted = await _prepare(state, body)
    return await _Job(state, body, make_plan(state, body, context, [prompt], wanted)).answer(request)


def template_for(state: ServerState, fields: Conversation) -> ChatTemplate:
    """The template to use. Raises ApiError 400 if there is none, or the request brings one and may not."""
    if fields.chat_template is not None:
        if not state.options.trust_request_chat_template:
            raise bad_request(
                "'chat_template' in requests is off (a template is a program); the server can be started with "
                "--trust-request-chat-template, or with its own --chat-template",
                "chat_template",
                "not_allowed",
            )
        try:
            return ChatTemplate(fields.chat_template, state.bundle.special_tokens)
        except TemplateError as error:
            raise bad_request(str(error), "chat_template", "template_error") from error
    if state.template is None:
        raise bad_request(
            "this model brings no chat template; start the server with --chat-template, or use /v1/completions",
            "messages",
            "no_chat_template",
        )
    return state.template


def render_messages(state: ServerState, fields: Conversation) -> str:
    """The prompt text of a conversation. Raises ApiError 400."""
    messages = normalize_messages(fields.messages)
    extra: dict[str, Any] = dict(fields.chat_template_kwargs or {})
    if fields.documents is not None:
        extra.setdefault("documents", fields.documents)
    if fields.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", fields.reasoning_effort)
    continued = bool(fields.continue_final_message)
    add = fields.add_generation_prompt
    return template_for(state, fields).render(
        messages,
        add_generation_prompt=not continued if add is None else add,
        continue_final_message=continued,
        extra=extra,
    )


async def _prepare(state: ServerState, body: ChatRequest) -> tuple[Prompt, Wanted]:
    limit = state.options.max_logprobs
    top = check_logprobs("top_logprobs", body.top_logprobs, limit)
    if top and not body.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs': true", "top_logprobs", "invalid_combination")
    text = render_messages(state, body)
    max_model_len = state.max_model_len()
    check_length(state.texts.fewest_tokens(text), body.truncate_prompt_tokens, max_model_len, "messages")
    ids = await encode(state.bundle.tokenizer, text, add_special_tokens=bool(body.add_special_tokens))
    ids = truncate(ids, body.truncate_prompt_tokens, max_model_len)
    asked, param = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, param = body.max_tokens, "max_tokens"
    room = room_for(len(ids), asked, None, max_model_len, param=param, prompt_param="messages")
    return Prompt(ids), Wanted(
        prefix="chatcmpl-",
        logprobs=(top or 0) if body.logprobs else None,
        prompt_logprobs=check_logprobs("prompt_logprobs", body.prompt_logprobs, limit),
        max_tokens=[room],
    )


class _Job(Job):
    chunk_type = ChatChunk

    def __init__(self, state: ServerState, body: ChatRequest, plan: Plan) -> None:
        super().__init__(state, plan, shows_tokens=bool(body.logprobs))
        self._body = body

    def logprobs(self, output: Output) -> list[ChatLogprobs]:
        if not self._body.logprobs or output.logprobs is None:
            return []
        top = self._body.top_logprobs or 0
        return [chat_logprobs(self.state.texts, output.token_ids, output.logprobs, top, self.plan.as_ids)]

    def response(self, wholes: list[Whole]) -> ChatResponse:
        plan = self.plan
        answers = []
        for i, whole in enumerate(wholes):
            answer = ChatChoice(
                index=i,
                message=ChatMessage("assistant", whole.text),
                logprobs=_joined(whole.logprobs) if self._body.logprobs else None,
                finish_reason=whole.finish_reason,
                stop_reason=whole.stop_reason,
            )
            if plan.return_token_ids:
                answer.token_ids = whole.token_ids
            answers.append(answer)
        response = ChatResponse(
            id=plan.request_id, created=self.created, model=plan.model, choices=answers, usage=plan.usage()
        )
        if self._body.prompt_logprobs is not None:
            num_prompt, rows = len(plan.prompts[0].token_ids), plan.choices[0].prompt_logprobs
            response.prompt_logprobs = prompt_logprobs(self.state.texts, num_prompt, rows, self._body.prompt_logprobs)
        if plan.return_token_ids:
            response.prompt_token_ids = plan.prompts[0].token_ids
        return response

    def text_chunk(self, index: int, text: Any) -> ChatChunk:
        return self.chunk([ChatChunkChoice(index=index, delta=ChatDelta(content=text))])

    def news(self, output: Output) -> Iterator[ChatChunk]:
        """The role comes first for each choice."""
        plan = self.plan
        opens = not self.begun
        if self.is_first(output.index):
            role = self.chunk([ChatChunkChoice(index=output.index, delta=ChatDelta(role="assistant", content=""))])
            if plan.return_token_ids and opens:
                role.prompt_token_ids = plan.prompts[0].token_ids
            yield role
        choice = ChatChunkChoice(
            index=output.index,
            delta=ChatDelta(content=output.text or None),
            logprobs=next(iter(self.logprobs(output)), None),
            finish_reason=output.finish_reason,
        )
        if output.finish_reason is not None:
            choice.stop_reason = output.stop_reason
        if plan.return_token_ids:
            choice.token_ids = output.token_ids
        if self.is_news(output.text, output.finish_reason):
            yield self.chunk([choice])


def _joined(parts: list[ChatLogprobs]) -> ChatLogprobs:
    return ChatLogprobs([token for part in parts for token in part.content or ()])
