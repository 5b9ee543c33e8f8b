"""One text per prompt, however many ranks there are and however the scheduler cuts and repeats the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from process_model import TEXT
from process_pods import Pod, until

TOKENS = 48
TIE = 1e-4
"""Prompts whose two best logits lie this close together somewhere are left out: rounding may decide there."""

SHARED = TEXT[:700]
SHORT = [TEXT[17 * i : 20 * i + 30] for i in range(10)]
PROMPTS = SHORT + [SHARED + f" request {i}" for i in range(4)] + [TEXT[40 * i : 40 * i + 150 * i] for i in (1, 2, 4)]


def ask_all(pod: Pod, **fields: Any) -> list[dict[str, Any]]:
    """Choices of all prompts, sent at once; the short ones come first in every queue."""
    answer = pod.complete(PROMPTS, max_tokens=TOKENS, timeout=120, **fields)
    assert answer.status == 200, answer.text
    return answer.json["choices"]


@pytest.fixture(scope="module")
def expected(make_pod: Callable[..., Pod]) -> dict[str, str]:
    """Text by prompt of one rank that computes each prompt alone, in one piece, without cached blocks."""
    flags = ("--no-enable-prefix-caching", "--max-num-batched-tokens", "4096", "--max-num-seqs", "1")
    texts = {}
    with make_pod(*flags) as pod:
        for prompt in PROMPTS:
            choice = pod.complete(prompt, max_tokens=TOKENS, logprobs=2).json["choices"][0]
            gaps = [
                best - second
                for best, second in (sorted(top.values())[:-3:-1] for top in choice["logprobs"]["top_logprobs"])
            ]
            assert len(gaps) == TOKENS
            if min(gaps) > TIE:
                texts[prompt] = choice["text"]
    left_out = len(PROMPTS) - len(texts)
    print(f"{left_out} of {len(PROMPTS)} prompts left out")
    assert left_out <= 2
    assert len(set(texts.values())) > len(texts) // 2
    return texts


@pytest.mark.parametrize(
    ("what", "ranks"),
    [("chunked", 1), ("chunked", 4), ("preempted", 1), ("preempted", 2), ("prefix", 2), ("prefix", 4)],
)
def test_texts_are_the_same(make_pod: Callable[..., Pod], expected: dict[str, str], what: str, ranks: int) -> None:
    flags = {
        "chunked": ["--max-num-batched-tokens", "32", "--max-num-seqs", "16", "--no-enable-prefix-caching"],
        # Ten short prompts begin with 2 or 3 blocks each and end with 5 or 6; there are 25.
        "preempted": ["--num-gpu-blocks-override", "26", "--max-model-len", "400", "--no-enable-prefix-caching"],
        "prefix": ["--max-num-batched-tokens", "256"],
    }[what]
    pinned: dict[str, Any] = {"rank": 0} if what == "preempted" else {}
    with make_pod("-dp", str(ranks), "--api-server-count", "1", *flags) as pod:
        rounds = [ask_all(pod, **pinned) for _ in range(2)]
        for choices in rounds:
            got = {p: c["text"] for p, c in zip(PROMPTS, choices, strict=True) if p in expected}
            assert got == expected
        if what == "preempted":
            until(lambda: pod.metric("vllm:num_preemptions_total") > 0, "preemptions are counted")
        if what == "prefix":
            until(lambda: pod.metric("vllm:prefix_cache_hits_total") > len(SHARED) // 8, "hits are counted")
        if what == "chunked":
            # 32 tokens a step: the prompts alone are far more steps than one for each.
            until(lambda: pod.metric("dpi_engine_steps_total") > 2 * len(PROMPTS) + TOKENS, "steps")
