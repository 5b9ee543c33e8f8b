"""Rows of logits in float32, and finding the few largest of a row without sorting the vocabulary.

A row is cut into groups of GROUP tokens and the largest of each group is taken in one pass. The k-th largest of those
bounds the k-th largest logit from below, and only groups that reach the bound can hold one of the k: so all candidates
(ties included) come from about k groups.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GROUP = 64

Floats = NDArray[np.float32]


class RowBuffer:
    """Room for float32 rows [rows, vocab padded to GROUP], kept between steps; the padding is -inf."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.groups = -(-vocab // GROUP)
        self._device = device
        self._room = torch.empty(0)
        self._spare = torch.empty(0)

    def load(self, logits: Tensor, rows: NDArray[np.int64] | None = None) -> Rows:
        """Copy logits [m, vocab] of any float type (or only `rows` of it) as float32. Valid until the next load."""
        m = logits.shape[0] if rows is None else len(rows)
        if self._room.shape[0] < m:
            self._room = torch.empty(m, self.groups * GROUP, dtype=torch.float32, device=self._device)
            self._room[:, self.vocab :] = -torch.inf
        z = self._room[:m]
        if rows is None or m == logits.shape[0]:
            z[:, : self.vocab].copy_(logits)
        else:
            z[:, : self.vocab].copy_(logits.index_select(0, to_device(rows, self._device)))
        return Rows(z, self)

    def spare(self, m: int) -> Tensor:
        """A second table [m, padded vocab] to compute in, as it was left: memory kept is faster than memory new."""
        if self._spare.shape[0] < m:
            self._spare = torch.empty_like(self._room[:m])
        return self._spare[:m]


class Rows:
    """Float32 rows z [m, padded vocab] on a device. Change z first: `peaks` is computed once, and most rests on it."""

    __slots__ = ("_peaks", "buffer", "z")

    def __init__(self, z: Tensor, buffer: RowBuffer) -> None:
        self.z = z
        self.buffer = buffer
        self._peaks: Floats | None = None

    @property
    def device(self) -> torch.device:
        return self.z.device

    def peaks(self) -> Floats:
        """Largest of each group [m, groups], on the host. A not-a-number in a group shows as one."""
        if self._peaks is None:
            self._peaks = to_host(self.z.view(self.z.shape[0], -1, GROUP).amax(2))
        return self._peaks

    def max(self) -> Floats:
        """Largest of each row [m]; not-a-number where the row holds one."""
        return self.peaks().max(axis=1)

    def argmax(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index of the largest of each of `rows`, the lowest among equals."""
        group = self.peaks()[rows].argmax(axis=1)
        return group * GROUP + self._groups(rows, group).argmax(axis=1)

    def _groups(self, rows: NDArray[np.int64], groups: NDArray[np.int64]) -> Floats:
        z = self.z.view(self.z.shape[0], -1, GROUP)
        return to_host(z[to_device(rows, z.device), to_device(groups, z.device)])

    def bound(self, rows: NDArray[np.int64], k: NDArray[np.int64]) -> Floats:
        """A value per row that at least k[i] of its logits reach; -inf where groups are fewer than k."""
        peaks = self.peaks()[rows]
        n = peaks.shape[1]
        most = min(int(k.max()), n)
        top = np.sort(np.partition(peaks, n - most, axis=1)[:, n - most :], axis=1)
        found = top[np.arange(len(rows)), np.maximum(most - k, 0)]
        return np.where(k > n, np.float32(-np.inf), found)

    def at_least(self, rows: NDArray[np.int64], bound: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
        """All logits of `rows` that reach `bound` [len(rows)], -inf never: (index into rows, token, value), each [n],
        in the order of rows and then of tokens."""
        peaks = self.peaks()[rows]
        at, group = np.nonzero((peaks >= bound[:, None]) & (peaks > -np.inf))
        values = self._groups(rows[at], group)
        i, j = np.nonzero((values >= bound[at][:, None]) & (values > -np.inf))
        return at[i], group[i] * GROUP + j, values[i, j]

    def sorted_at_least(self, rows: NDArray[np.int64], bound: Floats) -> tuple[NDArray[np.int64], Floats]:
        """The same as a table: tokens [len(rows), c] and values, descending by value, then ascending by token; rows
        with fewer end in -inf."""
        at, tokens, values = self.at_least(rows, bound)
        sizes = np.bincount(at, minlength=len(rows))
        widest = max(int(sizes.max()), 1)
        column = np.arange(len(at)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        table = np.full((len(rows), widest), np.inf, np.float32)
        ids = np.zeros((len(rows), widest), np.int64)
        table[at, column] = -values
        ids[at, column] = tokens
        order = np.argsort(table, axis=1, kind="stable")
        return np.take_along_axis(ids, order, 1), -np.take_along_axis(table, order, 1)


def to_host(t: Tensor) -> NDArray:
    """A numpy array of t; on the CPU the same memory."""
    return t.numpy() if t.device.type == "cpu" else t.cpu().numpy()


def to_device(a: NDArray, device: torch.device) -> Tensor:
    """A tensor of a on the device; on the CPU the same memory."""
    t = torch.from_numpy(a)
    return t if device.type == "cpu" else t.to(device, non_blocking=True)
