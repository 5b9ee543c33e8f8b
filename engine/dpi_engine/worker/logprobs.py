"""Log probabilities of tokens and their best alternatives, from the model's own logits (no sampling parameter in)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpi_engine.ops.interface import Ops
from dpi_engine.wire.messages import LogprobsLists
from dpi_engine.worker.rows import Floats, RowBuffer, to_device, to_host

Longs = NDArray[np.int64]

CHUNK = 64
"""Rows widened to float32 at a time, so that prompt log probabilities of a long chunk need little memory."""


def token_logprobs(logits: Tensor, tokens: Longs, k: Longs, ops: Ops, buffer: RowBuffer) -> list[LogprobsLists]:
    """One LogprobsLists of a single position for each row of logits [t, vocab].

    tokens [t] are the tokens that follow, k [t] how many alternatives each row wants (0 to vocab). Alternatives fall in
    probability, equals in order of id; a token's rank counts the tokens at least as likely, itself included. Backends
    with `row_logsumexp(logits) -> [t]` and `topk(logits, k) -> values, ids [t, k]` are asked for those.
    """
    chosen = to_host(logits.gather(1, to_device(tokens, logits.device)[:, None]).float())[:, 0]
    norm = _norm(logits, ops, buffer)
    # One more than wanted: a token above the last of them has all that are as likely in the list, and so its rank.
    values, ids = _best(logits, min(int(k.max()) + 1, buffer.vocab), ops, buffer)
    ranks = (values >= chosen[:, None]).sum(axis=1)
    for row in np.flatnonzero(~(chosen > values[:, -1])).tolist():
        ranks[row] = int((logits[row] >= logits[row, tokens[row]]).sum())
    with np.errstate(invalid="ignore"):  # rows that are not finite; their requests fail
        own, logs = chosen - norm, values - norm[:, None]
    found = []
    for i, token in enumerate(tokens.tolist()):
        wanted = int(k[i])
        best, theirs = ids[i, :wanted].tolist(), logs[i, :wanted].tolist()
        if wanted and values[i, wanted - 1] == -np.inf:
            _complete(best, theirs, wanted, buffer.vocab)
        one = LogprobsLists(token_ids=[[token, *best]], logprobs=[[float(own[i]), *theirs]], ranks=[int(ranks[i])])
        found.append(one)
    return found


def joined(rows: list[LogprobsLists]) -> LogprobsLists:
    """Consecutive positions as one."""
    return LogprobsLists(
        token_ids=[r.token_ids[0] for r in rows],
        logprobs=[r.logprobs[0] for r in rows],
        ranks=[r.ranks[0] for r in rows],
    )


def _norm(logits: Tensor, ops: Ops, buffer: RowBuffer) -> Floats:
    """log(sum(exp(row))) [t] float32."""
    if hasattr(ops, "row_logsumexp"):
        return to_host(ops.row_logsumexp(logits))
    parts = [logits[i : i + CHUNK] for i in range(0, len(logits), CHUNK)]
    # The padding is -inf and adds nothing.
    return np.concatenate([to_host(torch.logsumexp(buffer.load(part).z, dim=1)) for part in parts])


def _best(logits: Tensor, k: int, ops: Ops, buffer: RowBuffer) -> tuple[Floats, Longs]:
    """The k largest logits of each row and their ids, [t, k]; -inf where fewer are finite."""
    if hasattr(ops, "topk"):
        values, ids = ops.topk(logits, k)
        return to_host(values), to_host(ids)
    found_values, found_ids = np.full((len(logits), k), -np.inf, np.float32), np.zeros((len(logits), k), np.int64)
    for start in range(0, len(logits), CHUNK):
        rows = buffer.load(logits[start : start + CHUNK])
        at = np.arange(len(rows.z))
        some_ids, some = rows.sorted_at_least(at, rows.bound(at, np.full(len(at), k)))
        width = min(k, some.shape[1])
        found_values[start : start + CHUNK, :width] = some[:, :width]
        found_ids[start : start + CHUNK, :width] = some_ids[:, :width]
    return found_values, found_ids


def _complete(ids: list[int], logs: list[float], wanted: int, vocab: int) -> None:
    """Fill up with tokens of probability 0, in order of id, where fewer than `wanted` have any."""
    finite = sum(1 for x in logs if x > -np.inf)
    del ids[finite:], logs[finite:]
    have = set(ids)
    for token in range(vocab):
        if len(ids) == wanted:
            return
        if token not in have:
            ids.append(token)
            logs.append(float("-inf"))
