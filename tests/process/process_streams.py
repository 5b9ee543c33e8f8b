"""A streamed completion read in a thread, so that a test can watch it and do something to the service meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from process_pods import PATIENCE, Pod, until


def caught(start: Callable[[], Stream], act: Callable[[], object], undo: Callable[[], object]) -> Stream:
    """A stream that `act` has brought to rest. Where it had ended before that, `undo`, and another one is started."""
    for _ in range(20):
        stream = start()
        act()
        if not stream.ended.wait(1.0):
            return stream
        assert stream.finish_reason == "length", (stream.events[-1:], stream.failure)
        undo()
    raise AssertionError("20 streams had ended before what was to stop them was done")


class Stream:
    """One SSE completion. `events` are its data in order, `[DONE]` left out; `failure` is how the connection broke."""

    def __init__(
        self, pod: Pod, prompt: Any, *, rank: int | None = None, max_tokens: int = 4000, **fields: Any
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.times: list[float] = []  # when each of them was read, monotonic seconds
        self.done = False
        self.failure: Exception | None = None
        self.status = 0
        self.ended = threading.Event()
        body = {
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            **fields,
        }
        headers = {"Content-Type": "application/json"}
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        self._connection = http.client.HTTPConnection("127.0.0.1", pod.port, timeout=PATIENCE)
        self._connection.connect()
        self._socket = self._connection.sock
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            response = self._connection.getresponse()
            self.status = response.status
            if response.status != 200:
                self.events.append(json.loads(response.read()))
                return
            while line := response.readline():
                if line.startswith(b"data: [DONE]"):
                    self.done = True
                elif line.startswith(b"data: "):
                    self.times.append(time.monotonic())
                    self.events.append(json.loads(line[6:]))
        except Exception as error:
            self.failure = error
        finally:
            self.ended.set()

    @property
    def tokens(self) -> int:
        """Events with text so far. An event holds more than one token when the server was slower than the rank."""
        return sum(1 for event in self.events if "choices" in event)

    def token_ids(self, since: float, until: float) -> int:
        """How many came between these times. For a stream with `return_token_ids`."""
        timed = zip(self.times, list(self.events), strict=False)
        return sum(len(e["choices"][0]["token_ids"]) for at, e in timed if since <= at <= until and e.get("choices"))

    @property
    def text(self) -> str:
        return "".join(e["choices"][0]["text"] for e in self.events if e.get("choices"))

    @property
    def finish_reason(self) -> str | None:
        reasons = [e["choices"][0].get("finish_reason") for e in self.events if e.get("choices")]
        return next((r for r in reversed(reasons) if r), None)

    @property
    def error(self) -> dict[str, Any] | None:
        """The error event, if there was one."""
        return next((e["error"] for e in self.events if "error" in e), None)

    def until_tokens(self, count: int, patience: float = PATIENCE) -> Stream:
        until(lambda: self.tokens >= count or self.ended.is_set(), f"{count} tokens of a stream", patience)
        assert self.tokens >= count, f"ended after {self.tokens} tokens: {self.events[-1:]}, {self.failure}"
        return self

    def until_end(self, patience: float = PATIENCE) -> Stream:
        assert self.ended.wait(patience), f"a stream did not end within {patience:.0f} s ({self.tokens} tokens)"
        return self

    def at_rest(self) -> int:
        """How many tokens have come, once no more do; the stream must not end."""

        def rest() -> bool:
            before = self.tokens
            assert not self.ended.wait(1.0), f"ended after {self.tokens} tokens: {self.events[-1:]}, {self.failure}"
            return self.tokens == before

        until(rest, "the stream rests")
        return self.tokens

    def leave(self) -> None:
        """Close the connection as a client that goes away."""
        with contextlib.suppress(OSError):  # the server was quicker
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads, which would hold up the close
        self._socket.close()
        self._connection.close()
