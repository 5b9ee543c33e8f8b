"""Ranks that share experts, with real schedulers, runners, models and links: texts, waves, pauses, losses."""

from __future__ import annotations

import time

import numpy as np
import pytest
from coupled_ranks import VOCAB, Head, Rank, alone, until

from dpi_engine.core.lockstep import Phase

PROMPTS = [np.random.default_rng(i).integers(0, VOCAB, 5 + 17 * i).tolist() for i in range(6)]
LENGTHS = [40, 3, 25, 60, 1, 12]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return alone(PROMPTS, LENGTHS)


def resting(ranks: list[Rank]) -> bool:
    machines = [r.lockstep for r in ranks]
    return all(m.phase is Phase.REST and not m.woken for m in machines) and len({r.mesh.exchanges for r in ranks}) == 1


@pytest.mark.parametrize(("size", "interval"), [(2, 1), (2, 16), (3, 4)])
def test_texts_are_those_of_one_rank_and_all_ranks_make_the_same_exchanges(
    size: int, interval: int, expected: list[list[int]]
) -> None:
    with Head(size, interval) as ranks:
        for i, (prompt, count) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
            ranks[i % size].add(str(i), prompt, count)
            time.sleep(0.02 * (i % 3))  # some come while a wave runs
        assert [ranks[i % size].text(str(i)) for i in range(len(PROMPTS))] == expected
        until(lambda: resting(ranks), "all ranks rest")
        waves = {r.lockstep.wave for r in ranks}
        assert len(waves) == 1 and waves.pop() >= 1
        steps = {r.coupled.counts.steps + r.coupled.counts.dummy_steps for r in ranks}
        assert len(steps) == 1 and steps.pop() % interval == 0


def test_a_rank_without_work_makes_dummy_steps_and_rests_when_nobody_works(expected: list[list[int]]) -> None:
    with Head(2) as ranks:
        busy, idle = ranks
        until(lambda: busy.coupled.group and resting(ranks), "a group at rest")
        busy.add("3", PROMPTS[3], LENGTHS[3])
        assert busy.text("3") == expected[3]
        until(lambda: resting(ranks), "both rest")
        assert idle.coupled.counts.steps == 0
        assert [r.coupled.counts.waves for r in (idle, busy)] == [1, 1]
        assert [r.coupled.counts.formed for r in (idle, busy)] == [1, 1]
        assert idle.coupled.counts.dummy_steps == busy.coupled.counts.steps >= LENGTHS[3]
        assert busy.coupled.counts.dummy_steps == 0  # nobody computes for nobody
        exchanges = busy.mesh.exchanges
        time.sleep(0.5)
        assert busy.mesh.exchanges == exchanges == idle.mesh.exchanges
        reports = [(r.start_wave, r.wave_complete) for r in busy.reports]
        assert reports == [(None, 0), (1, None), (1, None), (None, 1)]  # formed; begun, running, over


def test_a_lost_rank_ends_nothing_on_the_others_and_they_go_on_when_it_is_back(expected: list[list[int]]) -> None:
    head = Head(3)
    with head as ranks:
        for rank, i in ((0, 0), (1, 3)):
            ranks[rank].add(str(i), PROMPTS[i], LENGTHS[i])
        ranks[2].add("lost", PROMPTS[2], 900)
        until(lambda: min(len(ranks[0].texts["0"]), len(ranks[1].texts["3"])) > 3, "both speak")
        weights = ranks[0].core.runner._model
        head.lose(2)
        until(lambda: ranks[0].coupled.group == ranks[1].coupled.group == 0, "both have given the group up")
        said = {name: len(r.texts[name]) for r, name in ((ranks[0], "0"), (ranks[1], "3"))}
        time.sleep(0.3)
        assert said == {name: len(r.texts[name]) for r, name in ((ranks[0], "0"), (ranks[1], "3"))}
        assert ranks[0].coupled.apart_for(time.monotonic()) > 0.2
        assert "rank 2 (LOST)" in ranks[0].mesh.missing
        new = head.replace(2)
        assert ranks[0].text("0") == expected[0]
        assert ranks[1].text("3") == expected[3]
        assert ranks[0].core.runner._model is weights
        new.add("5", PROMPTS[5], LENGTHS[5])
        assert new.text("5") == expected[5]
        assert {r.lockstep.group for r in ranks} == {new.lockstep.group} and new.lockstep.group > 1
        assert ranks[0].ended == {"0": "LENGTH"} and ranks[1].ended == {"3": "LENGTH"}


def test_a_link_that_breaks_between_living_ranks_is_made_anew(expected: list[list[int]]) -> None:
    with Head(3) as ranks:
        ranks[0].add("3", PROMPTS[3], LENGTHS[3])
        until(lambda: len(ranks[0].texts["3"]) > 3, "it speaks")
        ranks[1].do(lambda: ranks[1].mesh._links[2].sock.shutdown(2))
        assert ranks[0].text("3") == expected[3]
        assert all(r.coupled.counts.breaks >= 1 for r in ranks)


def test_a_failing_step_ends_its_own_requests_and_the_group_goes_on(expected: list[list[int]]) -> None:
    with Head(2) as ranks:
        ranks[1].add("3", PROMPTS[3], LENGTHS[3])
        until(lambda: len(ranks[1].texts["3"]) > 3, "it speaks")
        execute = ranks[0].core.runner.execute

        def failing(plan):
            ranks[0].core.runner.execute = execute
            raise MemoryError("no memory for this step")

        ranks[0].core.runner.execute = failing
        ranks[0].add("bad", PROMPTS[0], 5)
        assert ranks[0].text("bad") == []
        assert "no memory for this step" in ranks[0].ended["bad"]
        assert ranks[1].text("3") == expected[3]
        ranks[0].add("0", PROMPTS[0], LENGTHS[0])
        assert ranks[0].text("0") == expected[0]


def test_a_pause_is_answered_when_all_ranks_stand_still_and_a_resume_when_all_go(expected: list[list[int]]) -> None:
    with Head(3) as ranks:
        ranks[0].add("3", PROMPTS[3], LENGTHS[3])
        until(lambda: len(ranks[0].texts["3"]) > 3, "it speaks")
        ranks[1].utility("pause_scheduler", "keep")
        ranks[2].utility("pause_scheduler", "keep")
        at = len(ranks[0].texts["3"])
        until(lambda: len(ranks[0].texts["3"]) > at + 3, "rank 0 goes on while it is not paused itself")
        assert not ranks[1].answers and not ranks[2].answers
        ranks[0].utility("pause_scheduler", "keep")
        until(lambda: all(r.answers.get("pause_scheduler") == (None, None) for r in ranks), "all pauses are answered")
        at = len(ranks[0].texts["3"])
        ranks[1].add("5", PROMPTS[5], LENGTHS[5])
        ranks[2].do(lambda: ranks[2].lockstep.start_wave(99))  # a late wake-up
        time.sleep(0.3)
        assert len(ranks[0].texts["3"]) == at and not ranks[1].texts["5"]
        for rank in ranks[:2]:
            rank.utility("resume_scheduler")
        time.sleep(0.2)
        assert not ranks[0].answers.get("resume_scheduler") and not ranks[1].texts["5"]
        ranks[2].utility("resume_scheduler")
        until(lambda: all(r.answers.get("resume_scheduler") == (None, None) for r in ranks), "all resumes are answered")
        assert ranks[0].text("3") == expected[3]
        assert ranks[1].text("5") == expected[5]


def test_ranks_sleep_only_when_none_needs_their_experts(expected: list[list[int]]) -> None:
    with Head(2) as ranks:
        ranks[0].add("3", PROMPTS[3], LENGTHS[3])
        until(lambda: len(ranks[0].texts["3"]) > 3, "it speaks")
        ranks[1].utility("sleep", 2)
        assert ranks[0].text("3") == expected[3]  # to the end, with the experts of the rank that wants to sleep
        assert ranks[1].core.runner.asleep == 0 and not ranks[1].answers
        ranks[0].utility("sleep", 1)
        until(lambda: all(r.answers.get("sleep") == (None, None) for r in ranks), "both sleep")
        assert [r.core.runner.asleep for r in ranks] == [1, 2]
        ranks[0].add("5", PROMPTS[5], LENGTHS[5])
        ranks[0].utility("wake_up")
        time.sleep(0.2)
        assert not ranks[0].texts["5"] and ranks[1].core.runner.asleep == 2
        ranks[1].utility("wake_up")
        until(lambda: all(r.answers.get("wake_up") == (True, None) for r in ranks), "both are awake")
        assert ranks[0].text("5") == expected[5]


def test_the_newest_of_two_contrary_calls_counts() -> None:
    with Head(2) as ranks:
        ranks[0].utility("pause_scheduler", "keep")
        until(lambda: ranks[0].core.scheduler.is_paused, "rank 0 is paused")
        ranks[0].utility("resume_scheduler")
        until(lambda: ranks[0].answers.get("resume_scheduler") == (None, None), "it goes on")
        value, failure = ranks[0].answers["pause_scheduler"]
        assert value is None and "resume_scheduler came before every rank had done it" in failure
        ranks[0].utility("pause_scheduler", "sideways")
        assert "expected one of" in until(lambda: ranks[0].answers.get("pause_scheduler"), "an answer")[1]


def test_a_rank_lost_while_all_are_paused_comes_back_into_a_paused_group(expected: list[list[int]]) -> None:
    head = Head(2)
    with head as ranks:
        for rank in ranks:
            rank.utility("pause_scheduler", "keep")
        until(lambda: all("pause_scheduler" in r.answers for r in ranks), "both are paused")
        head.lose(1)
        new = head.replace(1)
        until(lambda: ranks[0].coupled.group == new.coupled.group > 0, "they are linked again")
        new.add("0", PROMPTS[0], LENGTHS[0])
        time.sleep(0.3)
        assert not new.texts["0"]
        ranks[0].utility("resume_scheduler")
        assert new.text("0") == expected[0]


def test_a_head_that_is_lost_takes_the_group_along_and_a_new_one_goes_on_from_its_epoch(
    expected: list[list[int]],
) -> None:
    head = Head(2)
    with head as ranks:
        until(lambda: all(r.coupled.group for r in ranks), "a group")
        group = ranks[0].coupled.group
        for rank in ranks:
            rank.do(rank.coupled.head_lost)
        until(lambda: all(r.mesh.left >= group for r in ranks), "both have left")
        ranks[0].add("0", PROMPTS[0], LENGTHS[0])
        for rank in ranks:
            rank.do(lambda r=rank: r.coupled.joined(time.monotonic()))
        assert ranks[0].text("0") == expected[0]
        assert ranks[0].coupled.group > group
