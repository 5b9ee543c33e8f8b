"""Mixtures of experts: never of both engines; all of vLLM's ranks under our head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from peer_vllm import START_S, Vllm
from process_pods import PORTS, Pod, until
from process_streams import Stream

PROMPT = "nine ranks wait for the head"
TWO = ("--data-parallel-size", "2")
REFUSED = 78


def test_all_ranks_are_theirs_under_our_head(
    ours: Callable[..., Pod], theirs: Callable[..., Vllm], interop_mixture: Path
) -> None:
    head = ours(*TWO, "--data-parallel-size-local", "0", model=interop_mixture, wait=False)
    peer = theirs(
        *TWO,
        *("--data-parallel-size-local", "1", "--data-parallel-start-rank"),
        "1",
        rpc=head.rpc,
        name="vllm-rank-1",
        headless=True,
        collectives=True,
        model=interop_mixture,
    )
    first = theirs(
        *TWO,
        *("--data-parallel-size-local", "1", "--data-parallel-start-rank"),
        "0",
        rpc=head.rpc,
        name="vllm-rank-0",
        headless=True,
        collectives=True,
        model=interop_mixture,
    )
    with head, peer:
        until(lambda: "rank 1 waits for rank 0" in head.log, "the answer to rank 1 is held", START_S)
        with first:
            head.until_ready(START_S)
            head.until_serves(0, 1)
            hashes = {rank["fields"]["parallel_config_hash"] for rank in head.ranks().values()}
            assert len(hashes) == 1 and len(next(iter(hashes))) == 64
            texts = {head.text(PROMPT, rank=rank, max_tokens=30) for rank in (0, 1) for _ in range(2)}
            assert len(texts) == 1
            streams = [Stream(head, PROMPT, rank=rank, max_tokens=200) for rank in (0, 1) for _ in range(2)]
            assert len({stream.until_end().text for stream in streams}) == 1
            stream = Stream(head, PROMPT, rank=1, max_tokens=7000).until_tokens(5)
            until(lambda: head.metric("vllm:num_requests_running", engine="1") == 1, "its load is known")
            stream.leave()
            until(lambda: head.metric("vllm:num_requests_running", engine="1") == 0, "it was aborted")
            assert head.text(PROMPT, rank=0, max_tokens=30) in texts, "an idle group is woken"


def test_ranks_of_theirs_with_another_configuration_are_refused(
    ours: Callable[..., Pod], theirs: Callable[..., Vllm], interop_mixture: Path
) -> None:
    head = ours(*TWO, "--data-parallel-size-local", "0", model=interop_mixture, wait=False)

    def rank(number: int, *flags: str) -> Vllm:
        place = ("--data-parallel-size-local", "1", "--data-parallel-start-rank", str(number))
        name = f"vllm-rank-{number}"
        return theirs(*TWO, *place, *flags, rpc=head.rpc, name=name, headless=True, model=interop_mixture)

    with head, rank(0), rank(1, "--dp-sync-interval", "8"):
        until(lambda: "would not run the same configuration" in head.log, "a hash differs", START_S)
        states = until(
            lambda: (s := sorted(r["state"] for r in head.ranks().values())) == ["LOST", "READY"] and s, "one is out"
        )
        assert states == ["LOST", "READY"]
        assert "parallel_config_hash" in head.log
        assert head.manage("/startupz").status == 503


def test_our_rank_is_refused_before_their_head_hears_of_it(
    ours: Callable[..., Pod], theirs: Callable[..., Vllm], interop_mixture: Path
) -> None:
    head = theirs(*TWO, "--data-parallel-size-local", "0", rpc=PORTS.take(1), name="vllm-head", model=interop_mixture)
    with (
        head,
        ours(*TWO, "--data-parallel-start-rank", "0", head=head, model=interop_mixture, wait=False) as ranks,
    ):
        assert ranks.wait_exit() == REFUSED
        assert "never mixed" in ranks.log
        assert head.running
