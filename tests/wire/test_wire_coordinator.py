"""The coordinator: payloads as captured, publication times, restarts, and the process itself."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest
import zmq
from wire_harness import PATIENCE, Stage, until

from dpi_engine.wire.codec import decode_outputs, encode, encode_outputs
from dpi_engine.wire.coordination import (
    CHANGE_INTERVAL,
    IDLE_INTERVAL,
    Broadcast,
    CoordinatorState,
    Publish,
    RankLease,
    RankTable,
    WakeUp,
    decode_update,
)
from dpi_engine.wire.errors import WireError
from dpi_engine.wire.messages import Dialect, EngineCoreOutputs, LoadRecord, Pace, SchedulerStats
from dpi_engine.wire.sockets import make_socket


def stats(rank: int, waiting: int, running: int, kv: float) -> EngineCoreOutputs:
    s = SchedulerStats(num_waiting_reqs=waiting, num_running_reqs=running, kv_cache_usage=kv)
    return EngineCoreOutputs(rank, scheduler_stats=s)


def load(rank: int, seq: int, waiting: int = 0, epoch: int = 1) -> EngineCoreOutputs:
    return EngineCoreOutputs(rank, load=LoadRecord(rank, epoch, seq, waiting, 0, 0.0))


def payloads(actions: list) -> list[str]:
    return [a.payload.hex() for a in actions if isinstance(a, Publish)]


def test_count_messages_equal_captured_ones() -> None:
    state = CoordinatorState(2, Dialect.VLLM)
    assert payloads(state.due(IDLE_INTERVAL)) == ["9392930000cb0000000000000000930000cb000000000000000000c2"]
    state.on_engine(stats(0, 1, 0, 0.0), 6.0)
    state.on_engine(stats(1, 1, 0, 0.0), 6.0)
    assert payloads(state.due(6.0)) == ["9392930100cb0000000000000000930100cb000000000000000000c2"]
    for rank in (0, 1):
        state.on_engine(stats(rank, 0, 3, 0.0001831166453030164), 7.0)
    assert payloads(state.due(7.0)) == ["9392930003cb3f28006001800000930003cb3f2800600180000000c2"]


def test_a_captured_run_of_waves() -> None:
    state = CoordinatorState(2, Dialect.VLLM, moe=True)
    assert state.on_front_end(WakeUp(b"\0\0", 0)) == [Broadcast(0, b"\0\0")]
    assert state.on_front_end(WakeUp(b"\0\0", 0))[0].frames(Dialect.VLLM) == [
        b"\x02", bytes.fromhex("9200c4020000"),
    ]  # fmt: skip
    actions = state.on_engine(EngineCoreOutputs(0, start_wave=0), 0.0)
    assert payloads(actions) == ["93c000c3"] and actions[1] == Broadcast(0, 0)
    assert state.on_front_end(WakeUp(1, 0)) == []  # it runs already
    assert payloads(state.on_engine(EngineCoreOutputs(0, wave_complete=0), 0.0)) == ["93c001c2"]
    assert payloads(state.on_engine(EngineCoreOutputs(1, start_wave=1), 0.0)) == ["93c001c3"]
    assert payloads(state.on_engine(EngineCoreOutputs(0, wave_complete=1), 0.0)) == ["93c002c2"]


WAVES = {
    # (wave, running) before, event, (wave, running) after, broadcast
    "old start": ((3, False), {"start_wave": 2}, (3, False), None),
    "start of the current wave": ((3, False), {"start_wave": 3}, (3, True), Broadcast(3, 1)),
    "start of the running wave": ((3, True), {"start_wave": 3}, (3, True), None),
    "start of a later wave": ((3, True), {"start_wave": 5}, (5, True), Broadcast(5, 1)),
    "old end": ((3, True), {"wave_complete": 2}, (3, True), None),
    "end of the current wave": ((3, True), {"wave_complete": 3}, (4, False), None),
    "end of a later wave": ((3, True), {"wave_complete": 7}, (8, False), None),
}


@pytest.mark.parametrize("case", WAVES)
def test_wave_transitions(case: str) -> None:
    before, event, after, broadcast = WAVES[case]
    state = CoordinatorState(2, Dialect.VLLM, moe=True)
    state.wave, state.running = before
    actions = state.on_engine(EngineCoreOutputs(1, **event), 0.0)
    assert (state.wave, state.running) == after
    assert [a for a in actions if isinstance(a, Broadcast)] == ([broadcast] if broadcast else [])
    assert bool(payloads(actions)) == (before != after)


def stand(rank: int, seq: int, wave: int, pace: Pace = Pace.REST, group: int = 1) -> EngineCoreOutputs:
    """A rank's report of where it stands."""
    return EngineCoreOutputs(rank, load=LoadRecord(rank, 1, seq, 0, 0, 0.0, group=group, wave=wave, pace=pace))


def resting(size: int, wave: int) -> CoordinatorState:
    """A coordinator that knows of `size` resting ranks."""
    state = CoordinatorState(size, moe=True)
    for rank in range(size):
        state.on_engine(stand(rank, 0, wave), 0.0)
    assert (state.wave, state.running) == (wave, False)
    return state


def broadcasts(actions: list) -> list[Broadcast]:
    return [action for action in actions if isinstance(action, Broadcast)]


def test_a_rank_that_began_a_wave_wakes_the_others_until_each_has_acknowledged() -> None:
    state = resting(3, 5)
    actions = state.on_engine(stand(1, 1, 5, Pace.ENGAGED), 10.0)
    assert broadcasts(actions) == [Broadcast(5, None, 1)]
    assert decode_update(actions[0].payload).running
    assert state.on_engine(stand(0, 1, 5, Pace.ENGAGED), 10.01) == []  # one has acknowledged
    sent, now = [], 10.01
    while now < 14.0:  # the other has lost every message so far
        now = max(state.next_due(), now + 0.001)
        sent += [now for _ in broadcasts(state.due(now))]
    gaps = [b - a for a, b in itertools.pairwise([10.0, *sent])]
    assert gaps == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0][: len(gaps)], abs=0.01) and len(gaps) >= 5
    state.on_engine(stand(2, 1, 5, Pace.ENGAGED), now)
    assert broadcasts(state.due(now + 60.0)) == []
    for rank in range(3):
        actions = state.on_engine(stand(rank, 2, 6), now)
    assert (state.wave, state.running) == (6, False) and broadcasts(actions) == []


def test_a_front_ends_wake_up_is_repeated_until_acknowledged_and_leaves_out_who_has_the_request() -> None:
    state = resting(3, 5)
    assert state.on_front_end(WakeUp(1, 5), 1.0) == [Broadcast(5, 1, 1)]
    state.on_engine(stand(0, 1, 6), 1.01)  # that wave has passed here already: it was there
    assert broadcasts(state.due(1.2)) == [Broadcast(5, 1, 1)]
    state.on_engine(stand(2, 1, 5, Pace.ENGAGED), 1.25)
    state.on_engine(stand(1, 1, 5, Pace.ENGAGED), 1.25)
    assert state.on_front_end(WakeUp(0, 5), 1.3) == []  # it runs


def test_a_stale_wake_up_wakes_everyone_for_the_current_wave() -> None:
    state = resting(3, 5)
    assert state.on_front_end(WakeUp(1, 4), 1.0) == [Broadcast(5, None, 1)]


def test_a_coordinator_started_anew_learns_of_the_running_wave_from_the_ranks_records() -> None:
    state = CoordinatorState(3, moe=True)
    actions = state.on_engine(stand(2, 7, 9, Pace.ENGAGED, group=4), 1.0)
    assert (state.wave, state.running) == (9, True)
    assert broadcasts(actions) == [Broadcast(9, None, 4)]  # for all it knows, the others sleep
    for rank in (0, 1):
        assert broadcasts(state.on_engine(stand(rank, 7, 9, Pace.ENGAGED, group=4), 1.0)) == []
    assert broadcasts(state.due(30.0)) == []


def test_records_of_an_old_group_count_no_more_and_a_rank_that_joins_is_not_woken() -> None:
    state = resting(2, 5)
    state.on_engine(stand(0, 1, 5, Pace.ENGAGED), 1.0)
    actions = state.on_engine(stand(1, 1, 7, group=2), 2.0)  # rank 0 has not said yet that it has joined group 2
    assert (state.wave, state.running) == (7, False) and broadcasts(actions) == []
    assert broadcasts(state.due(30.0)) == []


def test_a_paused_group_is_not_woken() -> None:
    state = resting(2, 5)
    for rank in range(2):
        state.on_engine(stand(rank, 1, 6, Pace.HELD), 1.0)
    assert state.on_front_end(WakeUp(0, 6), 2.0) == [] and broadcasts(state.due(30.0)) == []


def test_a_stale_wake_up_excludes_nobody_and_dense_models_have_no_waves() -> None:
    state = CoordinatorState(2, Dialect.VLLM, moe=True)
    state.wave = 5
    assert state.on_front_end(WakeUp(1, 4)) == [Broadcast(5, None)]
    dense = CoordinatorState(2)
    assert dense.on_front_end(WakeUp(1, 0)) == []
    assert dense.on_engine(EngineCoreOutputs(0, start_wave=9), 0.0) == [] and dense.wave == 0


def test_a_steady_stream_of_events_does_not_postpone_publication() -> None:
    state = CoordinatorState(1)
    now, published = 0.0, []
    for seq in range(1000):
        now += 0.001
        state.on_engine(load(0, seq), now)
        if state.due(now):
            published.append(now)
    gaps = [b - a for a, b in itertools.pairwise(published)]
    assert len(published) >= 9 and max(gaps) < CHANGE_INTERVAL + 0.002 and min(gaps) > CHANGE_INTERVAL - 0.002


def test_repeats_and_overtaken_records_are_no_change() -> None:
    state = CoordinatorState(1)
    state.on_engine(load(0, 5, waiting=3), 1.0)
    update = decode_update(state.due(1.2)[0].payload)
    assert update.loads == [LoadRecord(0, 1, 5, 3, 0, 0.0)]
    for late in (load(0, 5, waiting=9), load(0, 4, waiting=9), load(0, 99, waiting=9, epoch=0)):
        state.on_engine(late, 2.0)
    assert state.next_due() == 1.2 + IDLE_INTERVAL
    state.on_engine(load(0, 0, waiting=1, epoch=2), 2.0)  # a new incarnation counts from 0 again
    assert decode_update(state.due(2.0)[0].payload).loads == [LoadRecord(0, 2, 0, 1, 0, 0.0)]


@pytest.mark.parametrize(
    "outputs", [load(2, 0), load(-1, 0), EngineCoreOutputs(0, load=LoadRecord(1, 0, 0, 0, 0, 0.0))]
)
def test_reports_of_strange_ranks_are_refused(outputs: EngineCoreOutputs) -> None:
    with pytest.raises(WireError):
        CoordinatorState(2).on_engine(outputs, 0.0)


def test_the_rank_table_goes_out_at_once_and_an_older_one_is_ignored() -> None:
    state = CoordinatorState(1)
    ready = RankTable(1, 2, [RankLease(0, "READY", 1, b"12345678")])
    assert decode_update(state.on_ranks(ready, 0.0)[0].payload).ranks == ready
    assert state.on_ranks(RankTable(1, 1, [RankLease(0, "LOST", 1)]), 0.0) == []
    assert state.on_ranks(RankTable(1, 3, ready.ranks), 0.0) == []  # the same again
    lost = RankTable(2, 0, [RankLease(0, "LOST", 1)])  # of a later head
    assert decode_update(state.on_ranks(lost, 0.0)[0].payload).ranks == lost
    with pytest.raises(WireError):
        state.on_ranks(RankTable(3, 0, []), 0.0)


def subscriber(context: zmq.Context, endpoint: str):
    sock = make_socket(context, zmq.XSUB, connect=endpoint)
    sock.send(b"\x01")
    return sock


def newest(sock, condition, what: str):
    """The first update that fulfils the condition."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if sock.poll(200):
            update = decode_update(sock.recv())
            if condition(update):
                return update
    raise AssertionError(f"did not come: {what}")


def test_loads_travel_from_engines_to_front_ends_and_survive_a_restart_of_the_coordinator() -> None:
    with Stage(coordinator=True) as stage:
        links = [stage.up(rank) for rank in range(2)]
        front = subscriber(stage.context, stage.coordinator.endpoints[0])
        try:
            for rank, link in enumerate(links):
                link.report_load(LoadRecord(rank, 0, 1, 10 + rank, 2, 0.5))
            both = lambda u: u.loads is not None and [r.waiting for r in u.loads] == [10, 11]  # noqa: E731
            assert [r.epoch for r in newest(front, both, "both loads").loads] == [1, 1]
            stage.stop_coordinator()
            stage.start_coordinator()
            newest(front, both, "both loads, from a new coordinator that was told nothing")
        finally:
            front.close(0)


def test_a_load_report_in_the_vllm_dialect_is_the_18_key_map() -> None:
    with Stage(coordinator=True, dialect=Dialect.VLLM) as stage:
        front = subscriber(stage.context, stage.coordinator.endpoints[0])
        try:
            stage.up(1).report_load(LoadRecord(1, 0, 1, 4, 5, 0.25))

            def arrived() -> bool:
                return bool(front.poll(100)) and msgspec.msgpack.decode(front.recv()) == [
                    [[0, 0, 0.0], [4, 5, 0.25]], 0, False,
                ]  # fmt: skip

            until(arrived, "the counts of rank 1")
        finally:
            front.close(0)


def test_start_wave_reaches_the_engines() -> None:
    with Stage(coordinator=True, moe=True) as stage:
        link = stage.up(0)
        front = subscriber(stage.context, stage.coordinator.endpoints[0])
        try:
            front.send(encode(WakeUp(None, 0)))
            assert until(lambda: link.inbox.drain(), "the wake-up")[0].payload.wave == 0
        finally:
            front.close(0)


def test_the_process_serves_and_ends_on_sigterm(tmp_path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    folder = os.path.relpath(tmp_path)
    folder = str(tmp_path) if len(folder) > len(str(tmp_path)) else folder
    at = {name: f"ipc://{folder}/{name}" for name in ("front", "back", "pull")}
    command = [sys.executable, "-m", "dpi_engine.coordinator", "--size", "1"]
    for name, endpoint in at.items():
        command += [f"--{name}", endpoint]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    context: zmq.Context = zmq.Context()
    try:
        back = subscriber(context, at["back"])
        assert back.poll(int(PATIENCE * 1000)) and back.recv() == b"READY"
        front = subscriber(context, at["front"])
        push = make_socket(context, zmq.PUSH, connect=at["pull"])
        push.send(b"\xc1 garbage")
        push.send_multipart(encode_outputs(load(0, 1, waiting=8)))
        newest(front, lambda u: u.loads and u.loads[0].waiting == 8, "the load")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert "wire errors: 1" in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        context.destroy(0)


def test_an_address_in_use_ends_the_process_with_its_name(tmp_path) -> None:
    context: zmq.Context = zmq.Context()
    held = make_socket(context, zmq.PULL, bind="tcp://127.0.0.1:*")
    try:
        endpoint = held.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-m", "dpi_engine.coordinator", "--size", "1", "--front", endpoint]
        command += ["--back", "tcp://127.0.0.1:*", "--pull", "tcp://127.0.0.1:*"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 1 and f"cannot bind {endpoint}" in done.stderr
    finally:
        held.close(0)
        context.destroy(0)


def test_outputs_with_a_load_stay_readable_for_front_ends() -> None:
    assert decode_outputs(encode_outputs(load(0, 3))) == load(0, 3)
