"""Errors of the wire: what was wrong with a message, and why a peer was refused."""

from __future__ import annotations

import enum
from typing import Any


class Refusal(enum.StrEnum):
    """Why a head refuses an engine's message. The value crosses the wire."""

    BAD_MESSAGE = "bad_message"
    BAD_IDENTITY = "bad_identity"
    PROTOCOL_VERSION = "protocol_version"
    RANK_OUT_OF_RANGE = "rank_out_of_range"
    LOCALITY = "wrong_locality"
    HEADLESS = "wrong_headless"
    DUPLICATE_RANK = "duplicate_rank"
    FINGERPRINT = "fingerprint_mismatch"
    READY_BEFORE_HELLO = "ready_before_hello"
    FENCED = "fenced"


class WireError(ValueError):
    """A message that cannot be used.

    `code` is a short word to count by (`malformed`, `frame_count`, `too_large`, `unknown_type`, `unsupported_field`);
    `detail` says what was expected and what came. `request_id` is set when the message was a request whose id could
    still be read, so that its sender can be told.
    """

    def __init__(self, code: str, detail: str, request_id: str | None = None) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.request_id = request_id


class TypedRefusal(Exception):
    """The head refused this rank. `code` is a value of `Refusal`; `details` carries fields to show or act upon."""

    def __init__(self, code: str, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(f"the head refused this rank ({code}): {message}")
        self.code = code
        self.message = message
        self.details = details or {}


class HandshakeTimeout(TimeoutError):
    """A stage of the handshake did not end by its deadline; the message names the stage and who is missing."""


class ExchangeError(RuntimeError):
    """An exchange between ranks cannot be finished: a peer left, froze, or the group is being formed anew.

    The step's results are void on every rank; the caches of its tokens may hold anything. The text names the peer.
    """


class WorkerLost(RuntimeError):
    """A worker of this rank ended, failed or froze: the others cannot go on, so the rank's process must end.

    The text names the worker and says why.
    """
