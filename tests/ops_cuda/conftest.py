"""These tests run Triton's kernels: on a GPU (DPI_TEST_DEVICE=cuda), or on the CPU in Triton's interpreter.

The interpreter must be asked for before anything imports Triton (TRITON_INTERPRET=1), so `make test` runs this folder
in processes of its own (tests/ops/test_ops_cuda_interpreted.py).
"""

import os

if os.environ.get("TRITON_INTERPRET") != "1" and not os.environ.get("DPI_TEST_DEVICE", "").startswith("cuda"):
    collect_ignore_glob = ["test_*.py"]
