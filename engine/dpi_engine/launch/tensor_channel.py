"""What the first worker of a rank and the others tell each other besides steps: one datagram per message."""

from __future__ import annotations

import select
import socket
from typing import TypeAlias

import msgspec

MAX_MESSAGE = 1 << 16


class Call(msgspec.Struct, tag="call", kw_only=True):
    """`caches`: make KV caches of `value` blocks; `sleep`: give back what level `value` does; `load`: the weights."""

    name: str
    value: int = 0


class Stage(msgspec.Struct, tag="stage", kw_only=True):
    """A worker shows life while it loads."""

    stage: str
    fraction: float | None = None


class Done(msgspec.Struct, tag="done", kw_only=True):
    """A worker has done what it was asked for, `load` at first. `free`, `total`, `own`: bytes of its device."""

    free: int = 0
    total: int = 0
    own: int = 0


class Failed(msgspec.Struct, tag="failed", kw_only=True):
    """A worker ends. `refused`: what it was asked for cannot run here, so trying again changes nothing."""

    error: str
    refused: bool = False


Message: TypeAlias = Call | Stage | Done | Failed

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Message)


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends; a message is whole or not there, and an end whose process is gone reads as closed."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """One end. Never waits for the other to read: what it is sent is little and rare."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.settimeout(5.0)

    def send(self, message: Message) -> None:
        """Raises OSError when the other end is gone."""
        if isinstance(message, Failed):
            message.error = message.error[: MAX_MESSAGE // 8]
        self._end.send(_encode(message))

    def receive(self, timeout: float) -> Message | None:
        """The next message within `timeout` seconds; None when there is none, or no longer anybody."""
        readable, _, _ = select.select([self._end], [], [], timeout)
        if not readable:
            return None
        try:
            data = self._end.recv(MAX_MESSAGE)
        except OSError:
            return None
        return _decoder.decode(data) if data else None

    def close(self) -> None:
        self._end.close()
