"""The client that parses after the round: times and texts are those of the stream, whatever the pieces it comes in."""

from __future__ import annotations

import json

import pytest
from suite.client import Answer, ClientError, reply_of, take_apart, unchunk
from suite.workload import NotSane, agreement, check_texts

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(value: object) -> bytes:
    text = b"data: " + (b"[DONE]" if value is None else json.dumps(value).encode()) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(text), text)


def token(text: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}
BODY = [event(token("a")), event(token(" b")), event(token(" c")), event(USAGE), event(None), b"0\r\n\r\n"]


def test_events_have_the_time_of_their_last_byte() -> None:
    pieces = [(10.1, HEAD + BODY[0]), (10.2, BODY[1][:9]), (10.3, BODY[1][9:]), (10.4, b"".join(BODY[2:]))]
    answer = take_apart(10.0, pieces)
    assert answer.times == pytest.approx([0.1, 0.3, 0.4, 0.4])
    reply = reply_of(answer, 9.0, 3)
    assert reply.text == "a b c" and not reply.sample.error
    assert reply.sample.times == pytest.approx([1.1, 1.3, 1.4])
    assert (reply.sample.start, reply.sample.prompt_tokens, reply.sample.output_tokens) == (1.0, 5, 3)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_the_size_of_the_pieces_changes_nothing(size: int) -> None:
    whole = HEAD + b"".join(BODY)
    pieces = [(float(i), whole[i : i + size]) for i in range(0, len(whole), size)]
    answer = take_apart(0.0, pieces)
    assert reply_of(answer, 0.0, 3).text == "a b c"
    assert answer.times == sorted(answer.times)
    ends, at = [], len(HEAD)
    for part in BODY[:4]:
        at += len(part)
        ends.append(at)
    for time, end, part in zip(answer.times, ends, BODY, strict=False):
        assert end - len(part) - size <= time <= end


def test_two_events_in_one_chunk_and_a_body_without_chunks() -> None:
    text = b'data: {"choices": [{"text": "x"}]}\n\ndata: {"choices": [{"text": "y"}]}\n\ndata: [DONE]\n\n'
    plain = b"HTTP/1.1 200 OK\r\n\r\n"
    assert [e["choices"][0]["text"] for e in take_apart(0.0, [(1.0, plain + text)]).events] == ["x", "y"]
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)
    assert take_apart(0.0, [(1.0, HEAD), (2.0, chunk)]).times == [2.0, 2.0]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "no answer"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nbusy", "503 Service Unavailable: busy"),
        (HEAD + BODY[0], "inside a chunk"),
        (HEAD + BODY[0] + b"0\r\n\r\n", r"before \[DONE\]"),
    ],
)
def test_a_broken_answer_is_an_error_not_a_figure(raw: bytes, says: str) -> None:
    with pytest.raises(ClientError, match=says):
        take_apart(0.0, [(1.0, raw)])


def test_a_chunk_that_is_cut_off_is_noticed() -> None:
    assert unchunk(b"3\r\nabc\r\n0\r\n\r\n") == (b"abc", [3], [6])
    for raw in (b"3\r\nabc\r\n", b"5\r\nabc\r\n", b"3"):
        with pytest.raises(ClientError):
            unchunk(raw)


def test_too_few_tokens_and_errors_in_the_stream_fail_the_request() -> None:
    answer = Answer(0.0, [0.1, 0.2], [token("a"), USAGE])
    assert reply_of(answer, 0.0, 4).sample.error == "asked for 4 tokens, got 3"
    broken = Answer(0.0, [0.1], [{"error": {"message": "out of blocks"}}])
    assert "out of blocks" in reply_of(broken, 0.0, 3).sample.error


def test_answers_that_cannot_be_text_are_refused() -> None:
    check_texts("s", ["a plain answer"], real_model=True)
    check_texts("s", ["", "\ufffd"], real_model=False)
    check_texts("s", ["a plain answer", "another one of them", "#\n#\n#\n"], real_model=True)
    for text in ("", "\ufffd\ufffd\ufffd!"):
        with pytest.raises(NotSane, match="s: answer 1"):
            check_texts("s", ["a plain answer", text], real_model=True)
    with pytest.raises(NotSane, match="2 of 3 answers say nothing"):
        check_texts("s", ["      ", "a plain answer", "ababab"], real_model=True)


def test_agreement_is_of_beginnings() -> None:
    assert agreement(["same beginning here, then", "x"], ["same beginning here, else", "y"]) == 0.5
    with pytest.raises(NotSane):
        agreement(["a"], [])
