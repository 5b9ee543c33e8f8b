"""When to believe an API server that refuses everything."""

from __future__ import annotations

import time

from dpi_operator.apply.client import ApiError

REFUSED_S = 20.0
"""An API server that has just started has not read the roles yet, and refuses everybody for some seconds."""


class Refusals:
    """Refusals (401, 403) of one thing that is asked again and again."""

    def __init__(self) -> None:
        self._since: float | None = None

    def believed(self, error: ApiError) -> bool:
        """Whether it has been refused for REFUSED_S, so that the account lacks the right; other errors begin anew."""
        if error.status not in (401, 403):
            self._since = None
            return False
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now - self._since >= REFUSED_S
