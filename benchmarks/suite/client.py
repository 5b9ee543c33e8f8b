"""A streaming HTTP client that costs as little as it can while the clock runs.

The load generator shares the cores with what it measures. So during a round it only keeps what arrives with the time of
arrival; taking apart chunks, events and JSON comes after the round's last byte.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dpi_engine.tools.load import Sample

END_OF_CHUNKS = b"0\r\n\r\n"


class ClientError(RuntimeError):
    """What came back is not a whole streamed answer."""


class _Connection(asyncio.Protocol):
    """One request on one connection; `done` is set when the answer has ended, however."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self._transport: Any = None
        self.start = 0.0
        self.pieces: list[tuple[float, bytes]] = []
        self.error = ""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))
        self._tail = data if len(data) >= len(END_OF_CHUNKS) else (self._tail + data)[-len(END_OF_CHUNKS) :]
        if self._tail.endswith(END_OF_CHUNKS):
            self._transport.close()
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self.error = f"the connection broke: {error}"
        self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


@dataclass(slots=True)
class Answer:
    """A streamed answer: the events' JSON with their times in seconds since it was begun to connect."""

    start: float
    times: list[float] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)


def request_bytes(host: str, port: int, path: str, body: dict[str, Any]) -> bytes:
    """A POST that asks to close the connection afterwards."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


def unchunk(raw: bytes) -> tuple[bytes, list[int], list[int]]:
    """Payload of a chunked body; ends of its chunks in the payload and in `raw`. Raises ClientError if cut off."""
    payload, ends, raw_ends, at = bytearray(), [], [], 0
    while True:
        line_end = raw.find(b"\r\n", at)
        if line_end < 0:
            raise ClientError("the answer ended inside a chunk")
        size = int(raw[at:line_end].split(b";")[0], 16)
        if size == 0:
            return bytes(payload), ends, raw_ends
        at = line_end + 2 + size
        if at + 2 > len(raw):
            raise ClientError("the answer ended inside a chunk")
        payload += raw[line_end + 2 : at]
        ends.append(len(payload))
        raw_ends.append(at)
        at += 2


def take_apart(start: float, pieces: Sequence[tuple[float, bytes]]) -> Answer:
    """Events of an answer as it arrived. Raises ClientError for an error status, a cut off or a broken stream."""
    raw = b"".join(data for _, data in pieces)
    head, found, body = raw.partition(b"\r\n\r\n")
    if not found:
        raise ClientError("no answer")
    status = head.split(b"\r\n", 1)[0].decode("latin-1")
    if " 200" not in status:
        raise ClientError(f"{status}: {body[:500].decode(errors='replace')}")
    arrived: list[int] = []
    total = -len(head) - len(found)
    for _, data in pieces:
        total += len(data)
        arrived.append(total)
    if b"transfer-encoding: chunked" in head.lower():
        payload, ends, raw_ends = unchunk(body)
    else:
        payload, ends, raw_ends = body, [len(body)], [len(body)]
    answer = Answer(start)
    at, finished = 0, False
    while not finished:
        at = payload.find(b"data:", at)
        if at < 0:
            raise ClientError("the stream ended before [DONE]")
        end = payload.find(b"\n", at)
        end = len(payload) if end < 0 else end
        text = payload[at + 5 : end].strip()
        finished = text == b"[DONE]"
        if not finished:
            # An event is there when its last byte is: find the chunk with it, then the piece with that chunk's byte.
            chunk = bisect.bisect_left(ends, end)
            in_raw = raw_ends[chunk] - (ends[chunk] - end)
            piece = bisect.bisect_left(arrived, in_raw)
            answer.times.append(pieces[min(piece, len(pieces) - 1)][0] - start)
            answer.events.append(json.loads(text))
        at = end
    return answer


@dataclass(slots=True)
class Reply:
    """One request's outcome: `sample` for statistics, `text` what was generated. A failure is in `sample.error`."""

    sample: Sample
    text: str = ""


def reply_of(answer: Answer, zero: float, output_tokens: int) -> Reply:
    """Checks the count of tokens and that every event is one of a completion."""
    sample = Sample(answer.start - zero)
    parts = []
    for at, event in zip(answer.times, answer.events, strict=True):
        if "error" in event:
            sample.error = str(event["error"])[:300]
            return Reply(sample)
        for choice in event.get("choices") or ():
            parts.append(choice.get("text") or "")
            sample.times.append(answer.start - zero + at)
        if usage := event.get("usage"):
            sample.prompt_tokens, sample.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    if sample.output_tokens != output_tokens:
        sample.error = f"asked for {output_tokens} tokens, got {sample.output_tokens}"
    return Reply(sample, "".join(parts))


@dataclass(slots=True)
class Round:
    """Replies in the order of the requests; seconds of the round; processor seconds of this process meanwhile;
    pieces: reads of a socket."""

    replies: list[Reply]
    seconds: float
    generator_cpu_s: float
    pieces: int


async def run_round(
    host: str,
    port: int,
    bodies: Sequence[dict[str, Any]],
    output_tokens: int,
    in_flight: int = 0,
    deadline_s: float = 900.0,
) -> Round:
    """Send `bodies` to /v1/completions, all at once or `in_flight` at a time, and read the streams to their ends.

    Raises TimeoutError after `deadline_s`, OSError without a server.
    """
    loop = asyncio.get_running_loop()
    requests = [request_bytes(host, port, "/v1/completions", body) for body in bodies]
    gate = asyncio.Semaphore(in_flight or len(bodies))

    async def one(request: bytes) -> _Connection:
        async with gate:
            connection = _Connection(request)
            connection.start = time.perf_counter()
            await loop.create_connection(lambda: connection, host, port)
            await connection.done
            return connection

    cpu, zero = time.process_time(), time.perf_counter()
    async with asyncio.timeout(deadline_s):
        connections = await asyncio.gather(*(one(r) for r in requests))
    seconds, cpu = time.perf_counter() - zero, time.process_time() - cpu
    replies = []
    for connection in connections:
        try:
            if connection.error:
                raise ClientError(connection.error)
            replies.append(reply_of(take_apart(connection.start, connection.pieces), zero, output_tokens))
        except (ClientError, ValueError) as e:
            failed = Sample(connection.start - zero)
            failed.error = str(e) or type(e).__name__
            replies.append(Reply(failed))
    return Round(replies, seconds, cpu, sum(len(c.pieces) for c in connections))


def completion_body(model: str, prompt: Any, output_tokens: int) -> dict[str, Any]:
    """Greedy, streamed, of exactly `output_tokens` tokens."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
