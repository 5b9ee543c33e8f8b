"""A complete engine client without an engine: what it generates follows from the prompt, so that tests know it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from dpi_engine.frontend.interface import (
    EngineError,
    Generation,
    GenerationRequest,
    InvalidRequest,
    NoReadyRank,
    TokenDelta,
)
from dpi_engine.wire.messages import LogprobsLists, RankInfo, RankState


class Pulled(Generation):
    """Deltas of a generator, which goes on when its last delta was taken."""

    def __init__(self, deltas: AsyncGenerator[TokenDelta, None]) -> None:
        self._deltas = deltas
        self._ready: TokenDelta | EngineError | None = None
        self._taken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def listen(self, listener: Callable[[], None]) -> None:
        self._task = asyncio.create_task(self._pull(listener))

    async def _pull(self, listener: Callable[[], None]) -> None:
        try:
            async with aclosing(self._deltas) as deltas:
                async for delta in deltas:
                    self._ready = delta
                    self._taken.clear()
                    listener()
                    await self._taken.wait()
        except EngineError as error:
            self._ready = error
            listener()

    def take(self) -> TokenDelta | None:
        ready, self._ready = self._ready, None
        self._taken.set()
        if isinstance(ready, EngineError):
            raise ready
        return ready

    def leave(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def __anext__(self) -> TokenDelta:
        return await anext(self._deltas)


@dataclass
class EchoClient:
    """Greedy requests repeat their prompt's tokens, others walk through the vocabulary from their seed.

    `script` replaces that by fixed tokens. `per_delta`: tokens per delta. `gate`: while cleared, nothing is generated.
    `fail_after`: (tokens, error) to raise. What happened is kept in `requests`, `aborted` and `finished`.
    """

    vocab_size: int
    max_model_len: int = 256
    num_ranks: int = 2
    per_delta: int = 1
    script: list[int] | None = None
    fail_after: tuple[int, EngineError] | None = None
    prompt_logprobs_apart: bool = False
    is_ready: bool = True
    gate: asyncio.Event | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    active: set[str] = field(default_factory=set)
    generated: int = 0
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def generate(self, request: GenerationRequest) -> Generation:
        return Pulled(self._deltas(request))

    async def _deltas(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        if not self.ready():
            raise NoReadyRank("no rank is ready")
        rank = request.data_parallel_rank or 0
        if rank >= self.num_ranks:
            raise InvalidRequest(f"data_parallel_rank must be below {self.num_ranks}, got {rank}")
        self.requests.append(request)
        self.active.add(request.request_id)
        ended = False
        try:
            sampling = request.sampling
            if sampling.prompt_logprobs is not None and self.prompt_logprobs_apart:
                yield TokenDelta(new_token_ids=[], prompt_logprobs=self._prompt_rows(request), rank=rank)
            index = 0
            while not ended:
                await asyncio.sleep(0)
                if self.gate is not None:
                    await self.gate.wait()
                delta = self._next(request, index, rank)
                if self.fail_after is not None and index + len(delta.new_token_ids) > self.fail_after[0]:
                    raise self.fail_after[1]
                index += len(delta.new_token_ids)
                self.generated += len(delta.new_token_ids)
                ended = delta.finish_reason is not None
                if ended:
                    self.finished.append(request.request_id)
                yield delta
        finally:
            self.active.discard(request.request_id)
            if not ended:
                self.aborted.append(request.request_id)

    def _next(self, request: GenerationRequest, index: int, rank: int) -> TokenDelta:
        sampling = request.sampling
        assert sampling.max_tokens is not None and sampling.seed is not None
        ids: list[int] = []
        reason: str | None = None
        stop_reason: int | str | None = None
        while len(ids) < self.per_delta and reason is None:
            token = self.token(request, index + len(ids))
            ids.append(token)
            count = index + len(ids)
            if count >= sampling.min_tokens:
                if token == sampling.eos_token_id and not sampling.ignore_eos:
                    reason = "stop"
                elif token in (sampling.stop_token_ids or ()):
                    reason, stop_reason = "stop", token
            if reason is None and count >= sampling.max_tokens:
                reason = "length"
        first = index == 0
        own_prompt = first and sampling.prompt_logprobs is not None and not self.prompt_logprobs_apart
        return TokenDelta(
            new_token_ids=ids,
            logprobs=None if sampling.logprobs is None else self.rows(ids, sampling.logprobs),
            prompt_logprobs=self._prompt_rows(request) if own_prompt else None,
            finish_reason=reason,
            stop_reason=stop_reason,
            cached_tokens=len(request.prompt_token_ids) // 16 * 16 if first else None,
            rank=rank,
        )

    def token(self, request: GenerationRequest, index: int) -> int:
        """The token at an output index: a function of prompt, parameters and seed alone."""
        sampling = request.sampling
        if self.script is not None:
            return self.script[index % len(self.script)]
        if sampling.allowed_token_ids:
            return sampling.allowed_token_ids[index % len(sampling.allowed_token_ids)]
        if sampling.temperature == 0:
            return request.prompt_token_ids[index % len(request.prompt_token_ids)]
        assert sampling.seed is not None
        return 32 + (sampling.seed * 31 + index * 7) % 64

    def rows(self, ids: list[int], count: int) -> LogprobsLists:
        """Row of a token: itself at -0.5 with rank 1, then itself, a masked one, others at -2, -3, ..."""
        tokens, values = [], []
        for token in ids:
            others = [(token + step) % self.vocab_size for step in range(1, count + 1)]
            tokens.append([token, token, *others][: count + 1])
            values.append([-0.5, -0.5, -math.inf, *(-float(n) for n in range(2, count + 1))][: count + 1])
        return LogprobsLists(tokens, values, [1] * len(ids))

    def _prompt_rows(self, request: GenerationRequest) -> LogprobsLists:
        assert request.sampling.prompt_logprobs is not None
        return self.rows(request.prompt_token_ids[1:], request.sampling.prompt_logprobs)

    async def utility(self, method: str, *args: Any, timeout: float = 30.0) -> dict[int, Any]:
        self.calls.append((method, args))
        return {rank: not method.startswith("is_") for rank in range(self.num_ranks)}

    def ranks(self) -> list[RankInfo]:
        state, stage = (RankState.READY, "") if self.is_ready else (RankState.LOADING, "weights")
        return [RankInfo(rank=rank, state=state, stage=stage) for rank in range(self.num_ranks)]

    def ready(self) -> bool:
        return self.is_ready
