"""Which rank holds which experts: a partition in order, as even as it can be, and refusals that say what to do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as hs

from dpi_engine.config.errors import ConfigError, ParallelError
from dpi_engine.config.experts import ExpertPlacement
from dpi_engine.config.refusals import shares_experts
from dpi_engine.config.settings import parse_serve


@given(hs.integers(1, 400).flatmap(lambda n: hs.tuples(hs.just(n), hs.integers(1, n))))
def test_every_expert_lives_on_one_rank_and_no_rank_has_two_more_than_another(case):
    experts, size = case
    places = [ExpertPlacement(experts, size, rank) for rank in range(size)]
    assert [e for place in places for e in place.local] == list(range(experts))
    counts = [len(place.local) for place in places]
    assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)
    assert counts == [places[0].count(rank) for rank in range(size)]
    owners = [places[0].owner(e) for e in range(experts)]
    assert owners == list(places[-1].owners)
    assert all(e in places[owner].local for e, owner in enumerate(owners))


def test_more_experts_go_to_the_first_ranks():
    assert [list(ExpertPlacement(10, 4, rank).local) for rank in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((8, 9, 0), ["over 9 ranks", "8 experts", "1 ranks would hold none", "at most 8"]),
        ((8, 4, 4), ["rank 4", "size 4"]),
        ((8, 4, -1), ["rank -1"]),
        ((8, 0, 0), ["size 0"]),
        ((0, 1, 0), ["0 experts"]),
    ],
)
def test_what_cannot_be_placed_is_named(arguments, words):
    with pytest.raises(ConfigError) as caught:
        ExpertPlacement(*arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("expert", [-1, 8])
def test_an_expert_that_is_not_there_has_no_owner(expert):
    with pytest.raises(ConfigError, match=f"expert {expert}.*0 to 7"):
        ExpertPlacement(8, 2, 0).owner(expert)


@pytest.mark.parametrize("device", ["cpu", "cuda", "auto"])
def test_ranks_share_experts_on_every_device(device):
    assert shares_experts(parse_serve(["m", "-ep", "-dp", "2", "--device", device]))


def test_the_port_of_the_store_is_that_of_nothing_else():
    argv = ["m", "-ep", "-dp", "2", "--port", "29554"]
    with pytest.raises(ParallelError, match=r"port 29554 is wanted twice.*rendezvous store"):
        parse_serve([*argv, "--device", "cuda"])
    parse_serve([*argv, "--device", "cpu"])  # no store there
