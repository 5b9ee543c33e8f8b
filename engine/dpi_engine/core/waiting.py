"""Requests that wait for a slot and blocks, in the order in which they shall run."""

from __future__ import annotations

import heapq

from dpi_engine.core.request import Request, RequestStatus

_COMPACT_ABOVE = 64


class WaitingQueue:
    """A heap by `Request.key`. Taking a request out of its middle is O(1): it is skipped when its turn comes.

    Push and pop are O(log n). Skipped entries are swept out when they are the greater part, so memory stays
    proportional to what waits. `num_tokens` sums the known tokens of what waits.
    """

    __slots__ = ("_heap", "_live", "num_tokens", "status")

    def __init__(self, status: RequestStatus) -> None:
        """Holds requests of this status only; one that has another status by now is no longer here."""
        self.status = status
        self.num_tokens = 0
        self._live = 0
        self._heap: list[tuple[tuple[int, int], Request]] = []

    def __len__(self) -> int:
        return self._live

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.key, request))
        self._live += 1
        self.num_tokens += len(request.tokens)

    def peek(self) -> Request | None:
        """The first request, left where it is."""
        heap = self._heap
        while heap:
            request = heap[0][1]
            if request.status is self.status:
                return request
            heapq.heappop(heap)
        return None

    def pop(self) -> Request:
        """Take the first request. Raises IndexError if there is none."""
        request = self.peek()
        if request is None:
            raise IndexError("nothing waits")
        heapq.heappop(self._heap)
        self._live -= 1
        self.num_tokens -= len(request.tokens)
        return request

    def discard(self, request: Request) -> None:
        """Count `request` out. Its status has changed, or is about to: before the next call of any method here."""
        self._live -= 1
        self.num_tokens -= len(request.tokens)
        if len(self._heap) > max(_COMPACT_ABOVE, 2 * self._live):
            self._heap = [entry for entry in self._heap if entry[1].status is self.status and entry[1] is not request]
            heapq.heapify(self._heap)

    def requests(self) -> list[Request]:
        """What waits, in order. O(n log n)."""
        return [entry[1] for entry in sorted(self._heap, key=lambda e: e[0]) if entry[1].status is self.status]
