"""Services whose linears are quantized when they are loaded (`--quantization int8`), as whole processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from process_pods import Pod, until

from dpi_engine.ops import build

PROMPTS = ("every request finds its way", "blocks are taken", "the quick brown fox", "tokens come back one by one")
COMMON = ("--cpu-threads", "1", "--num-gpu-blocks-override", "1200", "--served-model-name", "tiny")
INT8 = (*COMMON, "-q", "int8")
REFUSED = 78
TOLERANCE = 0.5
"""Of logarithms of probabilities, with the random weights of the tiny model: bfloat16 itself differs by up to 0.1."""

needs_int8 = pytest.mark.skipif(
    "avx512bf16" not in build.possible_isas(build.cpu_features()), reason="this processor has no int8 kernels"
)


@pytest.fixture(scope="module")
def int8_pod(make_pod: Callable[..., Pod]) -> Iterator[Pod]:
    with make_pod("-dp", "2", *INT8, defaults=False) as pod:
        yield pod


def first_tokens(pod: Pod, rank: int | None = None) -> list[dict[str, float]]:
    """Logarithms of the probabilities of the likeliest first tokens after each prompt."""
    found = []
    for prompt in PROMPTS:
        answer = pod.complete(prompt, rank=rank, max_tokens=1, logprobs=5)
        assert answer.status == 200, answer.text
        found.append(answer.json["choices"][0]["logprobs"]["top_logprobs"][0])
    return found


def listens(pod: Pod) -> bool:
    try:
        return "HELLO" in pod.log and pod.manage("/livez").status == 200
    except OSError:
        return False


@needs_int8
def test_both_ranks_answer_alike_and_near_what_bfloat16_answers(int8_pod: Pod, make_pod: Callable[..., Pod]) -> None:
    assert first_tokens(int8_pod, 0) == first_tokens(int8_pod, 1)
    texts = {int8_pod.text(PROMPTS[0], rank=rank, max_tokens=40) for rank in (0, 1)}
    assert len(texts) == 1
    with make_pod(*COMMON, "--dtype", "bfloat16", defaults=False) as plain:
        want = first_tokens(plain)
        assert "int8" not in plain.log
    errors = [
        abs(got[token] - value)
        for got, of in zip(first_tokens(int8_pod), want, strict=True)
        for token, value in of.items()
        if token in got
    ]
    assert len(errors) > 2 * len(PROMPTS)  # mostly the same tokens are the likeliest
    assert 0 < max(errors) < TOLERANCE


@needs_int8
def test_ranks_show_it_and_the_log_says_what_is_quantized(int8_pod: Pod) -> None:
    for entry in int8_pod.ranks().values():
        assert entry["fields"]["quantization"] == "int8"
    assert int8_pod.log.count("int8 linears") >= 2


@needs_int8
def test_a_pod_without_it_is_refused_by_name(make_pod: Callable[..., Pod]) -> None:
    group = ("-dp", "2", "-dpl", "1")
    with make_pod(*group, *INT8, "--handshake-timeout", "3600", defaults=False, wait=False) as head:
        until(lambda: head.running and listens(head), "the head takes pods")
        with make_pod(*group, "-dpr", "1", *COMMON, head=head, defaults=False, wait=False) as pod:
            assert pod.wait_exit() == REFUSED
            for word in ("quantization", "expected 'int8'", "got 'auto'"):
                assert word in pod.log
        assert head.running


def test_a_processor_without_its_instructions_is_named(make_pod: Callable[..., Pod]) -> None:
    with make_pod(*INT8, env={"DPI_CPU_ISA": "avx2", "DPI_NATIVE_DIR": ""}, defaults=False, wait=False) as pod:
        assert pod.wait_exit() == REFUSED
        assert "int8 linears need avx512_vnni and avx512_bf16, these kernels are for avx2" in pod.log
        assert "--ops torch computes --quantization int8 too, many times slower" in pod.log
        assert "Traceback" not in pod.log
