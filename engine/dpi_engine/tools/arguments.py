"""What the tools ask of their arguments beyond what argparse does."""

from __future__ import annotations

import math
import sys


def wrong_seconds(tool: str, flag: str, seconds: float) -> bool:
    """Whether `seconds` is no time that passes, zero, without end or no number; that is then said on standard error."""
    wrong = not 0 < seconds < math.inf
    if wrong:
        print(f"{tool}: {flag}: expected seconds above 0, got {seconds:g}", file=sys.stderr)
    return wrong
