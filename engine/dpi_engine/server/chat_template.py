"""Chat templates: Jinja in a sandbox, with the helpers that model authors rely on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dpi_engine.config.errors import ConfigError
from dpi_engine.server.errors import bad_request

_RESERVED = frozenset({"messages", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"})
_FINAL = "\ue000final-message-ends-here\ue000"


class TemplateError(ConfigError, ValueError):
    """A template that cannot be read; the message says which one and why."""


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it only renders them."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Not Jinja's own filter: that one escapes for HTML, models were trained without.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def load_template(setting: str | None, model_template: str | None) -> str | None:
    """The template's source: the setting (a path, or the template itself) if given, else the model's own.

    Raises TemplateError for a setting that is neither a readable file nor a template.
    """
    if not setting:
        return model_template
    if "{" in setting or "\n" in setting:
        return setting
    try:
        return Path(setting).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TemplateError(
            f"--chat-template {setting!r} is neither a template (no '{{') nor a readable file: {error}"
        ) from error


class ChatTemplate:
    """A compiled template; `special_tokens` are variables in it. Raises TemplateError if the source does not parse."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not parse: {error}") from error
        self._knows_developer = "developer" in source
        self._tokens = {"bos_token": "", "eos_token": "", **special_tokens}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        With `continue_final_message` the text ends right after the last message's content, so that the model goes on
        with it. `extra` are further template variables. Raises ApiError 400 for whatever goes wrong in the template.
        """
        if continue_final_message and add_generation_prompt:
            raise bad_request(
                "'continue_final_message' needs 'add_generation_prompt': false",
                "continue_final_message",
                "invalid_combination",
            )
        reserved = sorted(_RESERVED & set(extra or ()))
        if reserved:
            raise bad_request(
                f"'chat_template_kwargs' must not set {', '.join(reserved)}", "chat_template_kwargs", "reserved_name"
            )
        turns = [self._role(dict(message)) for message in messages]
        if continue_final_message:
            turns[-1]["content"] = f"{turns[-1]['content']}{_FINAL}"
        text = self._render(turns, add_generation_prompt, extra or {})
        if not continue_final_message:
            return text
        before, found, _ = text.rpartition(_FINAL)
        if not found:
            raise bad_request(
                "this chat template does not show the final message, so it cannot be continued",
                "continue_final_message",
                "template_error",
            )
        return before

    def _role(self, message: dict[str, Any]) -> dict[str, Any]:
        # `developer` is the newer name of `system`; most templates know the old one only.
        if message.get("role") == "developer" and not self._knows_developer:
            message["role"] = "system"
        return message

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, extra: Mapping[str, Any]) -> str:
        variables = {"tools": None, "documents": None, **self._tokens, **extra}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(variables)
        except Exception as error:  # a template may raise anything; none of it is the server's fault
            reason = str(error) or type(error).__name__
            raise bad_request(
                f"the chat template refused the messages: {reason[:500]}", "messages", "template_error"
            ) from error
