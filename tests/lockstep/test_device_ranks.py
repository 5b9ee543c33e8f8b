"""Ranks as processes whose tokens travel by torch.distributed: whole texts, loss of a rank, and coming together again.

Gloo stands in for NCCL, and calls made again for recorded steps; all else is what ranks on GPUs run.
"""

from __future__ import annotations

import signal
import time

import pytest
from coupled_ranks import alone
from device_ranks import PATIENCE, Group, RankProcess, group

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], list(range(10, 50)), [60]]
TOKENS = [12, 17, 6, 9]


def add_all(ranks: list[RankProcess], more: int = 0) -> list[list[int]]:
    """One request for each rank; what one rank alone says to each."""
    for rank in ranks:
        rank.tell("add", "a", PROMPTS[rank.rank], TOKENS[rank.rank] + more)
    return alone(PROMPTS[: len(ranks)], [n + more for n in TOKENS[: len(ranks)]])


def texts(made: Group) -> list[list[int]]:
    return [found[0] for found in made.all("texts", ["a"])]


def wait_for(rank: RankProcess, what: str, value: int, at_least: bool = False) -> dict[str, int]:
    end = time.monotonic() + PATIENCE
    while True:
        state: dict[str, int] = rank.ask("state")
        if state[what] == value or (at_least and state[what] > value):
            return state
        assert time.monotonic() < end, f"rank {rank.rank}: {what} is {state[what]}, not {value}"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("size", "way", "graphs"),
    [(2, "all-to-all", False), (2, "all-gather", True), (4, "all-gather", False), (4, "all-to-all", True)],
)
def test_texts_are_those_of_one_rank(size: int, way: str, graphs: bool) -> None:
    with group(size, way, graphs) as made:
        made.announce()
        want = add_all(made.ranks)
        assert texts(made) == want
        states = made.all("state")
    assert {state["linked"] for state in states} == {1}
    assert {state["steps"] + state["dummies"] for state in states} == {states[0]["steps"] + states[0]["dummies"]}
    # The same steps were replayed on all, whether a rank had work or not; those with prompts on none.
    assert len({state["replays"] for state in states}) == 1
    assert all((state["replays"] > 0) == graphs for state in states)
    assert all(state["recorded"] == (4 if graphs else 0) for state in states)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_rank_that_dies_is_waited_for_and_the_rest_goes_on_under_a_new_epoch(graphs: bool) -> None:
    with group(2, "auto", graphs) as made:
        made.announce()
        want = add_all(made.ranks, more=300)
        wait_for(made.ranks[0], "steps", 5, at_least=True)
        made.ranks[1].end()
        broken = wait_for(made.ranks[0], "group", 0)
        assert broken["linked"] == 0 and broken["left"] == 1
        made.announce(but=[1])
        made.replace(1)
        made.announce()
        made.ranks[1].tell("add", "a", PROMPTS[1], TOKENS[1] + 300)
        assert texts(made) == want
        states = made.all("state")
    assert [state["linked"] for state in states] == [3, 3]
    # What was recorded over the links of the first epoch was recorded anew, on the one that had stayed.
    assert [state["recorded"] for state in states] == ([8, 4] if graphs else [0, 0])


def test_a_rank_that_freezes_is_left_in_the_middle_of_a_collective() -> None:
    """Gloo would wait for it for minutes."""
    with group(2, "all-gather") as made:
        made.announce()
        want = add_all(made.ranks, more=300)
        wait_for(made.ranks[0], "steps", 5, at_least=True)
        made.ranks[1].freeze()
        made.announce(but=[1])
        state = wait_for(made.ranks[0], "group", 0)
        assert state["linked"] == 0 and state["left"] == 1
        made.ranks[1].process.send_signal(signal.SIGCONT)
        made.announce()
        assert texts(made) == want
        assert [state["linked"] for state in made.all("state")] == [3, 3]
