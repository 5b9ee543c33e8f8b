"""Times in objects: RFC 3339 text in UTC, epoch seconds in the planner."""

from __future__ import annotations

from datetime import UTC, datetime


def to_text(seconds: float) -> str:
    """Whole seconds, as Kubernetes writes them."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def to_seconds(text: str | None) -> float | None:
    """None for no text and for text that is no time."""
    if not text:
        return None
    try:
        parsed = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


def in_words(seconds: float) -> str:
    """A duration for a person: 41 s, 5 min, 2 h."""
    if seconds < 120:
        return f"{max(0, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 7200 else f"{round(seconds / 3600)} h"
