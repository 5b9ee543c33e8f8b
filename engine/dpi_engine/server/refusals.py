"""Fields with a meaning that this server version cannot honour.

They are refused by name: an answer that silently lacks the JSON schema, the tools or the suffix asked for is worse than
an error. A value that asks for nothing (null, an empty list, `response_format: text`) passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dpi_engine.server.errors import unsupported
from dpi_engine.server.schemas.chat import ChatRequest
from dpi_engine.server.schemas.completions import CompletionRequest

Harmless = Callable[[Any], bool]


def _empty(value: Any) -> bool:
    """null, false, 0, "", [] and {} ask for nothing."""
    return not value


def _text_format(value: Any) -> bool:
    return not value or (isinstance(value, dict) and value.get("type") == "text")


def _no_tool(value: Any) -> bool:
    return not value or value in ("none", "auto")


def _text_only(value: Any) -> bool:
    return not value or value == ["text"]


_EVERYWHERE: dict[str, tuple[Harmless, str]] = {
    "response_format": (_text_format, "only {'type': 'text'} is; ask for the format in the prompt"),
    "structured_outputs": (_empty, ""),
    "guided_json": (_empty, ""),
    "guided_regex": (_empty, ""),
    "guided_choice": (_empty, ""),
    "guided_grammar": (_empty, ""),
    "structural_tag": (_empty, ""),
    "use_beam_search": (_empty, ""),
    "logits_processors": (_empty, ""),
    "prompt_embeds": (_empty, "send text or token ids"),
    "kv_transfer_params": (_empty, ""),
    "mm_processor_kwargs": (_empty, "the model takes text only"),
}

_COMPLETION: dict[str, tuple[Harmless, str]] = {
    **_EVERYWHERE,
    "suffix": (_empty, "the text after a gap cannot be given"),
}

_CHAT: dict[str, tuple[Harmless, str]] = {
    **_EVERYWHERE,
    "tools": (_empty, "describe the tools in the system message and read the answer's text"),
    "tool_choice": (_no_tool, "there are no tools to choose from"),
    "functions": (_empty, "function calls are not"),
    "function_call": (_no_tool, "function calls are not"),
    "audio": (_empty, "the model answers in text"),
    "modalities": (_text_only, "only ['text'] is"),
    "prediction": (_empty, ""),
    "web_search_options": (_empty, ""),
    "echo": (_empty, "use /v1/completions, or continue_final_message"),
}

_BY_KIND: Mapping[type[msgspec.Struct], dict[str, tuple[Harmless, str]]] = {
    CompletionRequest: _COMPLETION,
    ChatRequest: _CHAT,
}


def refuse_unsupported(body: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    """Raise ApiError 400 for the first field of `body` that cannot be honoured for requests of `kind`."""
    table = _BY_KIND.get(kind)
    if table is None:
        return
    for name, (harmless, detail) in table.items():
        if name in body and not harmless(body[name]):
            raise unsupported(name, detail)
