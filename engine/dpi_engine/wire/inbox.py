"""What the wire hands to the engine's main loop: requests, and news about the link itself, in one ordered queue."""

from __future__ import annotations

import enum
import threading
from collections import deque
from typing import Any, NamedTuple

from dpi_engine.wire.messages import RequestType
from dpi_engine.wire.sockets import Waker


class LinkEvent(enum.Enum):
    """News of the link. After HEAD_LOST, FENCED and CLIENT_DROPPED the core aborts (all, or that client's) requests.

    HEAD_LOST, FENCED and REJOINED are about whoever routes to this rank. Those about a GROUP come where
    that is its own front end and the head of the group is another launch's.
    """

    HEAD_LOST = "head_lost"  # the head is silent; the link registers anew by itself. payload: reason
    FENCED = "fenced"  # the head has given this rank up; the link registers anew. payload: the head's message
    REJOINED = "rejoined"  # registered under a new epoch; payload: InitMessage
    GROUP_LOST = "group_lost"  # the group's head is silent or has given this rank up; payload: reason
    GROUP_JOINED = "group_joined"  # registered with the group's head anew; payload: its InitMessage
    GROUP_REFUSED = "group_refused"  # by the group's head, while requests are served; payload: the TypedRefusal
    GAVE_UP = "gave_up"  # registering anew failed: exit non-zero. payload: the exception
    CLIENT_DROPPED = "client_dropped"  # a front end is gone or does not read; payload: reason
    CLIENT_BACK = "client_back"  # the same front end, or a new one in its place, can be told what it missed; reason


class InboxItem(NamedTuple):
    """`client_index` is the front end a request came from, -1 for the coordinator and for events."""

    kind: RequestType | LinkEvent
    payload: Any
    client_index: int


class Inbox:
    """Many writers, one reader. `early_aborts` shows the ids of ABORT messages before their turn in the queue comes."""

    def __init__(self) -> None:
        self._items: deque[InboxItem] = deque()
        self._ready = threading.Condition()
        self.early_aborts: deque[str] = deque()
        self._waker: Waker | None = None

    def watch(self) -> int:
        """A file descriptor that is readable after a `put`, until the next `drain`; for a reader that polls sockets."""
        if self._waker is None:
            self._waker = Waker()
            self._waker.wake()
        return self._waker.fd

    def put(self, item: InboxItem) -> None:
        """Append and wake the reader."""
        if item.kind is RequestType.ABORT:
            self.early_aborts.extend(item.payload)
        with self._ready:
            self._items.append(item)
            self._ready.notify()
        if self._waker is not None:
            self._waker.wake()

    def drain(self) -> list[InboxItem]:
        """All that is there now, oldest first; does not wait."""
        if self._waker is not None:
            self._waker.clear()
        items: list[InboxItem] = []
        take = self._items.popleft
        while self._items:
            items.append(take())
        return items

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for an item; true when there is one."""
        with self._ready:
            return bool(self._items) or self._ready.wait_for(lambda: bool(self._items), timeout)

    def __len__(self) -> int:
        return len(self._items)
