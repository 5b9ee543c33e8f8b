"""Microseconds per placement of vLLM's own load-balancing client, by number of ranks, as one JSON object.

Run by the Python that has vLLM (`benchmarks/peer`); `router_pick.py` does. Its client object is not built, since that
would start engines: the method gets an object with the fields that it reads.
"""

from __future__ import annotations

import json
import sys
import time
import types
from collections import Counter

from vllm.v1.engine.core_client import DPLBAsyncMPClient


def placed(ranks: int, picks: int) -> float:
    """Microseconds per call, over `picks` calls with reported loads that differ from rank to rank."""
    client = types.SimpleNamespace(
        reqs_in_flight={},
        engine_inflight=Counter(),
        client_count=1,
        eng_start_index=0,
        core_engines=[rank.to_bytes(2, "little") for rank in range(ranks)],
        lb_engines=[[rank % 3, 2 + rank % 4, (rank % 10) / 10] for rank in range(ranks)],
    )
    requests = [
        types.SimpleNamespace(request_id=str(i), data_parallel_rank=None, pooling_params=None) for i in range(picks)
    ]
    start = time.thread_time()
    for request in requests:
        DPLBAsyncMPClient.get_core_engine_for_request(client, request)
    return (time.thread_time() - start) / picks * 1e6


def main() -> None:
    print(json.dumps({ranks: placed(ranks, max(50, 200_000 // ranks)) for ranks in map(int, sys.argv[1:])}))


if __name__ == "__main__":
    main()
