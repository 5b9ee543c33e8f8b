"""Which blocks each request holds: found by prefix, taken, published once computed, given back."""

from __future__ import annotations

from dpi_engine.core.blocks import BlockPool
from dpi_engine.core.limits import SchedulerConfig
from dpi_engine.core.prefix import PrefixHasher
from dpi_engine.core.request import Request


class KVCache:
    """Block tables of requests over one pool.

    A request takes all blocks that its known tokens need when it is admitted, so a prompt that has begun never stops
    half-way for want of blocks; only new tokens make it grow.
    """

    __slots__ = (
        "block_size",
        "enabled",
        "hasher",
        "hits",
        "pool",
        "preempted_hits",
        "preempted_queries",
        "preempted_requests",
        "queries",
        "requests",
    )

    def __init__(self, config: SchedulerConfig) -> None:
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.block_size = config.block_size
        self.enabled = config.enable_prefix_caching
        self.hasher = PrefixHasher(config.block_size, config.cache_namespace)
        self.requests = self.queries = self.hits = 0
        self.preempted_requests = self.preempted_queries = self.preempted_hits = 0

    def admit(self, request: Request, headroom: int) -> bool:
        """Give `request` blocks for all its known tokens, found ones first; False (nothing changed) if it does not fit.

        `headroom` blocks must stay free after that. At least the last token is left to compute, for its logits; a
        block that is shared is full and computed, so its holders only read it.
        """
        pool = self.pool
        if pool.num_free <= headroom:
            return False
        num_tokens = len(request.tokens)
        found: list[int] = []
        if self.enabled:
            self.hasher.extend(request.hashes, request.root, request.tokens, num_tokens)
            if request.read_prefix_cache and not request.wants_prompt_logprobs:
                found = pool.find(request.hashes[: (num_tokens - 1) // self.block_size])
        fresh = pool.blocks_for(num_tokens) - len(found)
        if pool.num_free - pool.count_free(found) < fresh + headroom:
            return False
        pool.acquire(found)
        request.block_ids = found + pool.allocate(fresh)
        request.num_published = len(found)
        request.num_computed = len(found) * self.block_size
        if self.enabled:
            self._count(request, num_tokens)
        return True

    def grow(self, request: Request, more: int = 0) -> list[int] | None:
        """Append the blocks that the known tokens, and `more`, need beyond the table, and return them; None if too few
        are free."""
        count = self.pool.blocks_for(len(request.tokens) + more) - len(request.block_ids)
        if count > self.pool.num_free:
            return None
        fresh = self.pool.allocate(count)
        request.block_ids += fresh
        return fresh

    def publish(self, request: Request) -> None:
        """Make the request's computed full blocks findable."""
        full = request.num_computed // self.block_size
        if full <= request.num_published:
            return
        if self.enabled:
            self.hasher.extend(request.hashes, request.root, request.tokens, full * self.block_size)
            for i in range(request.num_published, full):
                self.pool.publish(request.block_ids[i], request.hashes[i])
        request.num_published = full

    def release(self, request: Request, *, forget: bool = False) -> None:
        """Give back all blocks. `forget`: their content is not to be trusted, nobody shall find it."""
        if forget:
            self.pool.forget(request.block_ids)
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed = 0
        request.num_published = 0

    def _count(self, request: Request, num_tokens: int) -> None:
        if request.num_preemptions:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += request.num_computed
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += request.num_computed
