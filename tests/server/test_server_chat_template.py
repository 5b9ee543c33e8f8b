"""Chat templates: what model authors rely on works, what could do harm does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpi_engine.server.chat_template import ChatTemplate, TemplateError, load_template
from dpi_engine.server.errors import ApiError

USER: list[dict[str, Any]] = [{"role": "user", "content": "hi <b>"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **more: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    return template.render(USER if messages is None else messages, **more)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ unk_token }}", "<s>hi <b></s><unk>"),
        ("{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}", "user\n"),
        ("{{ messages | tojson }}", json.dumps(USER)),
        ('{{ {"b": "\u00e4<", "a": 1} | tojson(indent=1) }}', '{\n "b": "\u00e4<",\n "a": 1\n}'),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ tools is none }}{{ documents is none }}{{ undefined_thing is defined }}", "TrueTrueFalse"),
        ("{{ add_generation_prompt }}", "True"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = ns.x + 1 %}{{ ns.x }}", "2"),
    ],
)
def test_helpers(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].pop('role') }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ none.x.y }}",
        "{% include 'other' %}",
        "{{ messages[7].content.x }}",
        "{{ ({}).missing.deeper }}",
        "{{ no_such_function() }}",
    ],
)
def test_whatever_fails_in_a_template_is_the_requests_fault(source: str) -> None:
    with pytest.raises(ApiError) as caught:
        render(source)
    assert caught.value.status == 400 and caught.value.code == "template_error"


def test_the_authors_words_reach_the_client() -> None:
    with pytest.raises(ApiError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{{ x | no_such_filter }}", "{% endif %}"])
def test_a_template_that_does_not_parse_says_so_at_start(source: str) -> None:
    with pytest.raises(TemplateError, match="does not parse"):
        ChatTemplate(source, {})


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "continue_final_message", "tokenize"])
def test_kwargs_cannot_replace_what_the_server_sets(name: str) -> None:
    with pytest.raises(ApiError, match=name):
        render("x", extra={name: 1})
    assert render("{{ thinking }}", extra={"thinking": False}) == "False"


def test_continuing_cuts_after_the_final_content() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "  b c"}]
    source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert render(source, turns, add_generation_prompt=False, continue_final_message=True) == "[a][b c"
    with pytest.raises(ApiError, match="cannot be continued"):
        render("{{ messages[0].content }}", turns, add_generation_prompt=False, continue_final_message=True)


def test_the_setting_is_a_path_or_a_template(tmp_path: Path) -> None:
    assert load_template(None, "model's own") == "model's own"
    assert load_template("{{ inline }}", "model's own") == "{{ inline }}"
    file = tmp_path / "template.jinja"
    file.write_text("{{ from_file }}", encoding="utf-8")
    assert load_template(str(file), None) == "{{ from_file }}"
    with pytest.raises(TemplateError, match="missing"):
        load_template(str(tmp_path / "missing.jinja"), None)
