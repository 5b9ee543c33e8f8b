"""Memory that costs nothing until it is used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def lazy_zeros(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in CPU memory, shape `size`. Pages are taken from the system when they are first touched: torch.zeros
    writes them all at once, seconds for a cache of some GiB."""
    count = int(np.prod(size, dtype=np.int64))
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype).view(*size)
