"""Two ranks of one group, an engine of ours and one of vLLM, asked for the same."""

from __future__ import annotations

from typing import Any, Protocol

import pytest

PROMPT = "nine ranks wait for the head"
PROMPTS: tuple[Any, ...] = (PROMPT, "the quick brown fox", list(range(5, 40)))
ASKED: tuple[dict[str, Any], ...] = (
    {"logprobs": 2},
    {"stop": ["the"], "max_tokens": 60},
    {"min_tokens": 4, "ignore_eos": False},
    {"logit_bias": {"40": 100}},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"prompt_logprobs": 1},
    {"n": 2, "temperature": 0.8, "seed": 7},
)


class Head(Protocol):
    def complete(self, prompt: Any, rank: int | None = None, **body: Any) -> Any: ...

    def text(self, prompt: Any, rank: int | None = None, **body: Any) -> str: ...


def check_texts(head: Head) -> None:
    """Greedy text of ranks 0 and 1 is the same."""
    for prompt in PROMPTS:
        assert head.text(prompt, rank=0, max_tokens=40) == head.text(prompt, rank=1, max_tokens=40)


def check_what_is_asked_for(head: Head) -> None:
    """Rank 1 answers as rank 0 whatever a request asks for."""
    for asked in ASKED:
        answers = [head.complete(PROMPT, rank=rank, **asked) for rank in (0, 1)]
        assert [a.status for a in answers] == [200, 200], (asked, [a.text for a in answers])
        first, second = (a.json for a in answers)
        assert first["usage"] == second["usage"], asked
        if "seed" not in asked:  # each samples with random numbers of its own
            assert first["choices"][0]["text"] == second["choices"][0]["text"], asked
        if (expected := first["choices"][0]["logprobs"]) is not None:
            got = second["choices"][0]["logprobs"]
            assert got["tokens"] == expected["tokens"]
            assert got["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-3)
