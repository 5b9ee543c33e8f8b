"""Cross-check of a scheduler's whole state, for tests and for looking into a suspect one."""

from __future__ import annotations

from collections import Counter

from dpi_engine.core.request import RequestStatus
from dpi_engine.core.scheduler import Scheduler


def check_integrity(scheduler: Scheduler) -> None:
    """Raise AssertionError if requests, slots, queues and blocks disagree. O(everything)."""
    running = scheduler._running
    pool = scheduler._cache.pool
    pool.check_integrity()
    held: Counter[int] = Counter()
    for request in running:
        name = request.request_id
        require(request.status is RequestStatus.RUNNING and request.slot >= 0, f"{name}: listed, but not running")
        require(request.num_computed <= len(request.tokens), f"{name}: more computed than known")
        require(request.num_computed <= len(request.block_ids) * pool.block_size, f"{name}: computed without a block")
        require(len(set(request.block_ids)) == len(request.block_ids), f"{name}: a block twice in its table")
        held.update(request.block_ids)
    for block in range(pool.num_blocks):
        require(pool.refs(block) == held[block], f"block {block}: holders miscounted")
    slots = [request.slot for request in running]
    require(
        sorted(slots + scheduler._free_slots) == list(range(scheduler.config.max_num_seqs)), "slots lost or doubled"
    )
    require(running == sorted(running, key=lambda request: request.key), "running requests out of order")
    live = [request.request_id for request in running]
    for queue in (scheduler._waiting, scheduler._preempted):
        queued = queue.requests()
        require(len(queue) == len(queued), f"{queue.status.name}: count is wrong")
        require(queue.num_tokens == sum(len(r.tokens) for r in queued), f"{queue.status.name}: token count is wrong")
        require(all(not r.block_ids and r.slot == -1 for r in queued), f"{queue.status.name}: one holds something")
        live += [request.request_id for request in queued]
    require(sorted(live) == sorted(scheduler._requests), "a request is lost or listed twice")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
