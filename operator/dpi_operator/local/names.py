"""Names that are typed on a command line."""

from __future__ import annotations

import argparse
import re


def object_name(text: str) -> str:
    """A name without the kind that kubectl takes before it. For argparse."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"expected the name of an object alone, such as smollm2, got {text!r}")
    return text
