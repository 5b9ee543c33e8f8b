"""What `generate` returns: the tokens of one request, for a reader that is called or one that waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dpi_engine.frontend.interface import Generation, GenerationRequest, TokenDelta
from dpi_engine.frontend.streams import RequestStream


class Sender(Protocol):
    """What sends requests and takes them back."""

    def begin(self, request: GenerationRequest) -> RequestStream: ...

    def abandon(self, stream: RequestStream) -> None: ...

    def abandon_from_anywhere(self, stream: RequestStream) -> None: ...


class TokenStream(Generation):
    """Sends at `listen` or at the first `anext`; aborts when left before the end."""

    def __init__(self, client: Sender, request: GenerationRequest) -> None:
        self._client = client
        self._request = request
        self._stream: RequestStream | None = None
        self._over = False

    def listen(self, listener: Callable[[], None]) -> None:
        self._begin().listener = listener

    def take(self) -> TokenDelta | None:
        stream = self._stream
        if stream is None or self._over:
            return None
        delta = stream.take()
        if delta is not None:
            self._over = stream.taken
            return delta
        if stream.error is not None:
            self._over = True
            raise stream.error
        return None

    def leave(self) -> None:
        self._over = True
        if self._stream is not None:
            self._stream.listener = None
            self._client.abandon(self._stream)

    def _begin(self) -> RequestStream:
        try:
            self._stream = self._client.begin(self._request)
        except BaseException:
            self._over = True
            raise
        return self._stream

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._over:
            raise StopAsyncIteration
        stream = self._stream or self._begin()
        while True:
            delta = self.take()
            if delta is not None:
                return delta
            try:
                await stream.wait()
            except BaseException:
                self._over = True
                self._client.abandon(stream)
                raise

    async def aclose(self) -> None:
        """`leave`."""
        self.leave()

    def __del__(self) -> None:
        stream = self._stream
        if stream is not None and not self._over and not stream.finished:
            self._client.abandon_from_anywhere(stream)
