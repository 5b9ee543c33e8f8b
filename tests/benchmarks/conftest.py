"""Tests of the benchmark table itself: its arithmetic, its client, and a small run of it."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "process")]
