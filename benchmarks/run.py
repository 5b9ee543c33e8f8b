"""The benchmark table. See docs/performance.md.

python benchmarks/run.py                 ours alone
python benchmarks/run.py --peer          ours and the peer's, round by round in turn
python benchmarks/run.py --list          the rows and how long each takes
python benchmarks/run.py --peer --only w32 prefix --rounds 3
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engine"), str(HERE.parent / "operator")]

from suite.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
