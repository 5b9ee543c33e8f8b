"""What an API server means when it refuses a pod. Pure."""

from __future__ import annotations


def is_quota(message: str) -> bool:
    """The namespace's quota is used up, which passes; a pod that lacks what a quota asks for is simply wrong."""
    return "exceeded quota" in message.lower()


def is_terminating(message: str) -> bool:
    """The namespace goes, and everything in it."""
    return "because it is being terminated" in message
