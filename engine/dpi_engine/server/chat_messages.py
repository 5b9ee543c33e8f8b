"""Checks the messages of a conversation and brings them to the form that chat templates expect. Pure."""

from __future__ import annotations

import json
from typing import Any

from dpi_engine.server.errors import ApiError, bad_request

MAX_MESSAGES = 10_000


def normalize_messages(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Messages with plain string content.

    Text parts are joined by line breaks. Arguments of past tool calls become objects, as templates want them. Raises
    ApiError 400 for an empty list, a message without role or content, and content that is not text.
    """
    if messages is None:
        raise bad_request("'messages' is required", "messages", "missing_field")
    if not messages:
        raise bad_request("'messages' must not be empty", "messages", "empty_list")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(f"'messages' may hold at most {MAX_MESSAGES}, got {len(messages)}", "messages", "too_many")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise bad_request(f"'{where}.role' must be a non-empty string", f"{where}.role", "invalid_type")
    calls = message.get("tool_calls")
    result = dict(message)
    result["content"] = _content(message.get("content"), where, optional=role == "assistant" and bool(calls))
    if calls:
        result["tool_calls"] = _tool_calls(calls, where)
    else:
        result.pop("tool_calls", None)
    return result


def _content(content: Any, where: str, *, optional: bool) -> str:
    name = f"{where}.content"
    if isinstance(content, str):
        return content
    if content is None:
        if optional:
            return ""
        raise bad_request(f"'{name}' is required", name, "missing_field")
    if not isinstance(content, list):
        raise bad_request(
            f"'{name}' must be a string or a list of text parts, got {type(content).__name__}", name, "invalid_type"
        )
    if not content:
        raise bad_request(f"'{name}' must not be an empty list", name, "empty_list")
    return "\n".join(_part(part, f"{name}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise bad_request(f"'{where}' must be an object with a type", where, "invalid_type")
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise ApiError(
            400,
            f"'{where}.type' {str(kind)[:60]!r} is not supported by this server version: the model takes text only",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise bad_request(f"'{where}.text' must be a string", f"{where}.text", "invalid_type")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    name = f"{where}.tool_calls"
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise bad_request(f"'{name}' must be a list of objects", name, "invalid_type")
    result = []
    for i, call in enumerate(calls):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"'{name}[{i}].function' needs a name", f"{name}[{i}].function", "invalid_type")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                where_arguments = f"{name}[{i}].function.arguments"
                raise bad_request(f"'{where_arguments}' is not valid JSON: {error}", where_arguments) from error
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result
