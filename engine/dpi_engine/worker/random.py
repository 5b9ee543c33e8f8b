"""Counter-based random numbers: one uniform per token, a function of (seed, output index) and of nothing else.

So a request draws the same numbers alone or in any batch, after a preemption, and when another rank takes it over.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S1, _S2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_U27, _U30, _U31, _U33, _U11 = (np.uint64(n) for n in (27, 30, 31, 33, 11))
_TWO_POW_53 = 1.0 / (1 << 53)


def seed_bits(seed: int) -> np.uint64:
    """The low 64 bits of any Python int, negative ones too."""
    return np.uint64(seed & 0xFFFFFFFFFFFFFFFF)


def uniforms(seeds: NDArray[np.uint64], index: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniforms in [0, 1), one for each pair of seed [m] and output index [m].

    The seed is scattered first (neighbouring seeds must not share a stream), then the SplitMix64 sequence that starts
    there is read at position `index`.
    """
    with np.errstate(over="ignore"):
        s = seeds ^ (seeds >> _U33)
        s = s * _S1
        s ^= s >> _U33
        s *= _S2
        s ^= s >> _U33
        x = s + (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        x ^= x >> _U30
        x *= _M1
        x ^= x >> _U27
        x *= _M2
        x ^= x >> _U31
    return (x >> _U11).astype(np.float64) * _TWO_POW_53
