"""Counts of tokens that are cheap to keep per token, and are given to Prometheus many at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from prometheus_client import Histogram


class BatchHistogram(Histogram):
    """A histogram that takes observations which somebody else has counted."""

    @property
    def bounds(self) -> Sequence[float]:
        """Upper bounds of the buckets, the last is infinite."""
        return self._upper_bounds

    def observe_counted(self, counts: Sequence[int], total: float) -> None:
        """`counts` per bucket, not cumulative; `total`: sum of what was observed. As `observe` for each would do."""
        self._raise_if_not_observable()
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)


class TokenTally:
    """Tokens of one rank, and the times between them, since the last `flush`."""

    __slots__ = ("_bounds", "_counts", "_intervals", "_sum", "_tokens", "tokens")

    def __init__(self, tokens: Any, intervals: BatchHistogram) -> None:
        """`tokens`, `intervals`: the rank's children of a Counter and a BatchHistogram, in seconds."""
        self._tokens = tokens
        self._intervals = intervals
        self._bounds = intervals.bounds
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self.tokens = 0

    def interval(self, seconds: float, count: int) -> None:
        """`count` tokens came after `seconds` each."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def flush(self) -> None:
        if self.tokens:
            self._tokens.inc(self.tokens)
            self.tokens = 0
        if any(self._counts):
            self._intervals.observe_counted(self._counts, self._sum)
            self._counts, self._sum = [0] * len(self._bounds), 0.0
