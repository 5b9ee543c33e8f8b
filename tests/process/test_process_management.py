"""The management API's calls that change state, on a running service."""

from __future__ import annotations

import pytest
from process_group import TOKEN, Group, call
from process_pods import until
from process_streams import Stream, caught

PROMPT = "blocks are taken, pages are filled"
RANKS = ("0", "1", "2", "3")


def results(group: Group, method: str, *args: object) -> dict[str, object]:
    answer = call(group.head, method, *args)
    assert answer.status == 200, answer.text
    assert answer.json["method"] == method
    return answer.json["results"]


def test_without_a_token_file_every_call_is_closed(group: Group) -> None:
    answer = call(group.headless, "is_sleeping")
    assert answer.status == 403
    assert "--management-token-file" in answer.json["error"]["message"]


@pytest.mark.parametrize("token", [None, "", "sesam", "sesame2", "\xe9"])
def test_a_wrong_token_is_refused(group: Group, token: str | None) -> None:
    answer = call(group.head, "is_sleeping", token=token)
    assert answer.status == 401
    assert "Authorization" in answer.json["error"]["message"]


@pytest.mark.parametrize("method", ["add_lora", "execute_method", "shutdown", "__class__", "save_sharded_state"])
def test_unknown_methods_are_refused_by_name(group: Group, method: str) -> None:
    answer = call(group.head, method)
    assert answer.status == 404
    assert method in answer.json["error"]["message"]
    assert "reset_prefix_cache" in answer.json["error"]["message"]


def test_wrong_arguments_are_named(group: Group) -> None:
    answer = call(group.head, "sleep", 7)
    assert answer.status == 400
    assert "sleep level 7: expected 0, 1 or 2" in answer.json["error"]["message"]
    for method, args, expected in [
        ("reset_prefix_cache", (1, 2, 3, 4), "at most reset_running_requests, reset_connector"),
        ("is_sleeping", ("foo",), "none"),
    ]:
        answer = call(group.head, method, *args)
        assert answer.status == 400
        message = answer.json["error"]["message"]
        assert message.endswith(f"{method}: wrong arguments {list(args)}: expected {expected}")
    answer = group.head.manage("/utility/sleep", {"level": 1}, {"Authorization": f"Bearer {TOKEN}"})
    assert answer.status == 400
    assert "JSON list" in answer.json["error"]["message"]
    assert group.head.complete(PROMPT).status == 200


def test_a_get_changes_nothing(group: Group) -> None:
    answer = group.head.manage("/utility/sleep", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status == 405
    assert results(group, "is_sleeping") == dict.fromkeys(RANKS, False)


def test_a_paused_scheduler_keeps_requests_and_goes_on(group: Group) -> None:
    stream = Stream(group.head, PROMPT, rank=2, max_tokens=7000).until_tokens(10)
    try:
        results(group, "pause_scheduler", "keep", False)
        assert results(group, "is_scheduler_paused") == dict.fromkeys(RANKS, True)
        tokens = stream.at_rest()
        waiting = Stream(group.head, PROMPT, rank=2, max_tokens=5)
        until(lambda: group.head.rank(2)["waiting"] + group.head.rank(2)["running"] == 2, "the second one waits")
        assert (stream.at_rest(), waiting.tokens) == (tokens, 0)
        results(group, "resume_scheduler")
        assert results(group, "is_scheduler_paused") == dict.fromkeys(RANKS, False)
        assert waiting.until_end().finish_reason == "length"
        stream.until_tokens(stream.tokens + 20)
    finally:
        results(group, "resume_scheduler")
        stream.leave()


@pytest.mark.parametrize("level", [1, 2])
def test_ranks_sleep_and_wake_up_and_answer_as_before(group: Group, level: int) -> None:
    before = group.head.text(PROMPT, max_tokens=30)
    try:
        results(group, "sleep", level)
        assert results(group, "is_sleeping") == dict.fromkeys(RANKS, True)
        asleep = Stream(group.head, PROMPT, rank=1, max_tokens=30)
        until(lambda: group.head.rank(1)["waiting"] == 1, "a request waits for the rank to wake up")
        refused = call(group.head, "resume_scheduler")
        assert refused.status == 400
        assert "wake_up first" in refused.json["error"]["message"]
    finally:
        results(group, "wake_up")
    assert results(group, "is_sleeping") == dict.fromkeys(RANKS, False)
    assert asleep.until_end().text == before
    assert {group.head.text(PROMPT, rank=rank, max_tokens=30) for rank in range(4)} == {before}


def test_sleeping_ends_what_runs_with_an_abort(group: Group) -> None:
    stream = Stream(group.head, PROMPT, rank=3, max_tokens=6000).until_tokens(5)
    try:
        results(group, "sleep", 1)
        assert stream.until_end().finish_reason == "abort"
    finally:
        results(group, "wake_up")


@pytest.mark.parametrize("level", [1, 2])
def test_sleeping_can_keep_what_runs(group: Group, level: int) -> None:
    """It is computed anew when the ranks wake up, with the text of a run that nothing broke."""
    whole = group.head.text(PROMPT, rank=3, max_tokens=1500)
    try:
        stream = caught(
            lambda: Stream(group.head, PROMPT, rank=3, max_tokens=1500).until_tokens(5),
            lambda: results(group, "sleep", level, "keep"),
            lambda: results(group, "wake_up"),
        )
        seen = stream.at_rest()
    finally:
        results(group, "wake_up")
    assert stream.until_end().finish_reason == "length"
    assert seen < stream.tokens
    assert stream.text == whole


def test_a_reset_prefix_cache_has_no_hits(group: Group) -> None:
    prompt = PROMPT * 8

    def cached() -> int:
        answer = group.head.complete(prompt, rank=0, max_tokens=2)
        return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert results(group, "reset_prefix_cache") == dict.fromkeys(RANKS, True)
    assert cached() == 0


def test_a_profile_is_taken_and_written(group: Group) -> None:
    results(group, "profile", True)
    twice = call(group.head, "profile", True)
    assert twice.status == 400
    assert "already" in twice.json["error"]["message"]
    group.head.text(PROMPT, rank=0)
    written = results(group, "profile", False)
    assert set(written) == set(RANKS)
    import pstats

    names = {function for _, _, function in pstats.Stats(str(written["0"])).stats}
    assert "step" in names
    again = call(group.head, "profile", False)
    assert again.status == 400
    assert "no profile" in again.json["error"]["message"]
