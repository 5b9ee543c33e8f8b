"""Ranks join, are refused by name, die, freeze, come back: real sockets, in one process."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import zmq
from wire_harness import FAST, PATIENCE, Stage, diff, response, until

from dpi_engine.wire import handshake as hs
from dpi_engine.wire.codec import decode_outputs, decode_ready_response, encode_request
from dpi_engine.wire.errors import HandshakeTimeout, TypedRefusal
from dpi_engine.wire.inbox import InboxItem, LinkEvent
from dpi_engine.wire.lease import Group
from dpi_engine.wire.messages import (
    DEAD_SENTINEL,
    WIRE_VERSION,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LoadRecord,
    RankState,
    RequestType,
    SamplingParams,
)
from dpi_engine.wire.sockets import make_socket


def take(link, kind) -> InboxItem:
    """The next item of a kind; items before it are passed over."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        for item in link.inbox.drain():
            if item.kind is kind:
                return item
        link.inbox.wait(0.1)
    raise AssertionError(f"did not come: {kind}")


def request(rid: str, epoch: int = 0) -> EngineCoreRequest:
    return EngineCoreRequest(rid, [1, 2, 3], sampling_params=SamplingParams(max_tokens=4), epoch=epoch)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_four_ranks_of_which_two_are_remote_serve_two_front_ends(transport: str) -> None:
    with Stage(transport, size=4, front_ends=2, group=Group(4, frozenset({0, 1})), coordinator=True) as stage:
        links = [stage.up(rank, step=lambda: (None, 7)) for rank in range(4)]
        stage.head.call(stage.head.head.wait_ready(PATIENCE))
        for rank in range(4):
            stage.head.wait_state(rank, RankState.READY)
        for index, front in enumerate(stage.fronts):
            routes = {}
            for _ in range(4):
                identity, payload = front.read(front.router, "ready response")
                ready = decode_ready_response(payload)
                assert ready is not None and ready.epoch == 1
                routes[ready.data_parallel_rank] = identity
            assert {hs.parse_identity(i)[0] for i in routes.values()} == {0, 1, 2, 3}
            rid = f"r{index}"
            front.router.send_multipart([routes[3], *encode_request(RequestType.ADD, request(rid, 1))])
            item = take(links[3], RequestType.ADD)
            assert (item.payload.request_id, item.client_index, item.payload.client_index) == (rid, index, index)
            links[3].send(index, EngineCoreOutputs(3, [EngineCoreOutput(rid, [42])]))
            outputs = decode_outputs(front.read(front.pull, "output"))
            assert outputs.outputs[0].new_token_ids == [42] and outputs.epoch == 1 and outputs.timestamp > 0
            front.router.send_multipart([routes[3], *encode_request(RequestType.ABORT, [rid])])
            assert take(links[3], RequestType.ABORT).payload == [rid]
            assert list(links[3].inbox.early_aborts)[-1] == rid
        until(lambda: stage.head.info(0).steps == 7, "the beats carry the step count")


def test_a_local_rank_is_given_ipc_addresses_and_a_remote_one_tcp() -> None:
    with Stage(size=2, group=Group(2, frozenset({0}))) as stage:
        addresses = stage.head.head.addresses
        addresses.inputs, addresses.local_inputs = ["tcp://127.0.0.1:1"], ["ipc:///nowhere"]
        assert stage.link(0).connect(PATIENCE).addresses.inputs == ["ipc:///nowhere"]
        assert stage.link(1).connect(PATIENCE).addresses.inputs == ["tcp://127.0.0.1:1"]


REFUSALS = {
    "rank beyond the size": ({"rank": 9}, "rank_out_of_range", ["rank 9", "0..1"]),
    "says it is remote": (
        {"rank": 0, "local": False, "headless": True},
        "wrong_locality",
        ["rank 0", "beside the head"],
    ),
    "says it is local": ({"rank": 1, "local": True, "headless": False}, "wrong_locality", ["rank 1", "another node"]),
    "has a front end": ({"rank": 1, "headless": False}, "wrong_headless", ["rank 1", "--headless"]),
    "another model": (
        {"rank": 1, "declared": {"model": "b", "seed": 0}},
        "fingerprint_mismatch",
        ["rank 1", "model", "expected 'a'", "got 'b'"],
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_rank_that_does_not_fit_is_refused_by_name_and_the_head_goes_on(case: str) -> None:
    options, code, words = REFUSALS[case]
    group = Group(2, frozenset({0}), declared={"model": "a", "seed": 0}, diff=diff)
    with Stage(size=2, group=group) as stage:
        options = {"declared": {"model": "a", "seed": 0}, **options}
        with pytest.raises(TypedRefusal) as caught:
            stage.link(**options).connect(PATIENCE)
        assert caught.value.code == code
        for word in words:
            assert word in str(caught.value)
        assert stage.head.counters.snapshot().keys() == {("handshake", code)}  # a late answer makes it ask again
        stage.up(1, declared={"model": "a", "seed": 0})
        stage.head.wait_state(1, RankState.READY)


def test_another_wire_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with Stage() as stage:
        monkeypatch.setattr("dpi_engine.wire.registration.WIRE_VERSION", WIRE_VERSION + 1)
        with pytest.raises(TypedRefusal) as caught:
            stage.link(0).connect(PATIENCE)
        assert caught.value.code == "protocol_version"


def test_resolved_fields_must_equal_those_of_the_first_rank() -> None:
    with Stage(group=Group(2, frozenset({0, 1}), diff=diff)) as stage:
        stage.up(0, resolved={"dtype": "bfloat16", "config": "x"})
        with pytest.raises(TypedRefusal) as caught:
            stage.up(1, resolved={"dtype": "float32", "config": "x"})
        assert caught.value.code == "fingerprint_mismatch"
        assert caught.value.details["differences"] == [{"field": "dtype", "expected": "bfloat16", "got": "float32"}]
        assert stage.head.info(1).state is not RankState.READY


def test_a_second_process_for_a_living_rank_is_refused_and_both_are_named() -> None:
    with Stage() as stage:
        first = stage.up(0, pod="pod-a")
        with pytest.raises(TypedRefusal) as caught:
            stage.link(0, pod="pod-b").connect(PATIENCE)
        assert caught.value.code == "duplicate_rank"
        for word in ("pod-a", "pod-b", first.boot_id.hex()):
            assert word in caught.value.message
        assert stage.head.info(0).boot_id == first.boot_id.hex()


def test_a_rank_that_dies_is_lost_and_its_successor_gets_a_higher_epoch() -> None:
    with Stage() as stage:
        first = stage.up(0)
        first.close()
        lost = stage.head.wait_state(0, RankState.LOST)
        assert "connection is closed" in lost.stage
        second = stage.up(0)
        info = stage.head.wait_state(0, RankState.READY)
        assert (second.epoch, info.epoch, info.restarts) == (2, 2, 1)


def test_a_process_that_its_supervisor_saw_end_is_lost() -> None:
    with Stage() as stage:
        stage.up(0)
        stage.head.do(lambda: stage.head.head.process_exited(0, "exit code -9"))
        info = stage.head.info(0)
        assert (info.state, info.stage) == (RankState.LOST, "exit code -9")


def test_a_frozen_rank_is_suspect_then_lost_then_fenced_when_it_wakes() -> None:
    # SUSPECT for so long that no pause of this process leaps over it.
    with Stage(timings=replace(FAST, suspect=1.0, lost=5.0)) as stage:
        frozen, epoch = stage.link(0), 0
        thaw = zmq.Context()
        sock = make_socket(thaw, zmq.DEALER, connect=stage.head.endpoints[0], identity=hs.identity(0, b"12345678"))
        try:
            hello = hs.EngineMessage(status=hs.HELLO, local=True, headless=False, version=WIRE_VERSION)
            sock.send(hs.encode_engine_message(hello))
            assert sock.recv() == b""  # the greeting
            assert sock.poll(int(PATIENCE * 1000))
            init = hs.decode_head_message(sock.recv())
            epoch = init.epoch
            ready = hs.EngineMessage(status=hs.READY, local=True, headless=False, epoch=epoch)
            sock.send(hs.encode_engine_message(ready))
            stage.head.wait_state(0, RankState.LOST)
            states = [change[0].state for change in stage.head.changes]
            assert states == [RankState.HELLO, RankState.READY, RankState.SUSPECT, RankState.LOST]
            sock.send(hs.encode_engine_message(hs.EngineMessage(status=hs.BEAT, epoch=epoch)))

            def fenced() -> bool:
                while sock.poll(100):
                    message = hs.decode_head_message(sock.recv())
                    if message.status == hs.ERROR:
                        assert message.error.code == "fenced" and "silent" in message.error.message
                        return True
                return False

            until(fenced, "the old epoch is fenced")
            assert stage.head.info(0).state is RankState.LOST
            assert frozen.connect(PATIENCE).epoch == epoch + 1
        finally:
            sock.close(0)
            thaw.destroy(0)


def test_a_fenced_engine_aborts_and_registers_anew_by_itself() -> None:
    with Stage() as stage:
        link = stage.up(0)
        old = link.boot_id
        stage.head.do(lambda: stage.head.head.unreachable(0, "a front end cannot reach it", epoch=1))
        assert "another" not in take(link, LinkEvent.FENCED).payload
        assert take(link, LinkEvent.REJOINED).payload.epoch == 2
        info = stage.head.wait_state(0, RankState.READY)
        assert (info.epoch, link.epoch) == (2, 2) and info.boot_id == link.boot_id.hex() != old.hex()
        stage.head.do(lambda: stage.head.head.unreachable(0, "late news of the old epoch", epoch=1))
        assert stage.head.wait_state(0, RankState.READY).epoch == 2


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_engines_register_with_a_restarted_head_under_higher_epochs(transport: str) -> None:
    with Stage(transport) as stage:
        links = [stage.up(rank) for rank in range(2)]
        stage.head.close()
        for link in links:
            take(link, LinkEvent.HEAD_LOST)
        stage.start_head()
        stage.head.call(stage.head.head.wait_ready(PATIENCE))
        for link in links:
            assert take(link, LinkEvent.REJOINED).payload.epoch == 2
        front = stage.fronts[0]
        identities = [front.read(front.router, "ready response")[0] for _ in range(4)]
        front.router.send_multipart([identities[-1], *encode_request(RequestType.ADD, request("again", 2))])
        rank = hs.parse_identity(identities[-1])[0]
        assert take(links[rank], RequestType.ADD).payload.request_id == "again"


def test_an_engine_whose_head_stays_away_gives_up_with_a_reason() -> None:
    with Stage(size=1) as stage:
        link = stage.up(0, timings=replace(FAST, rejoin=1.0))
        stage.head.close()
        failure = take(link, LinkEvent.GAVE_UP).payload
        assert isinstance(failure, HandshakeTimeout) and "no connection" in str(failure) and link.failure is failure
        stage.start_head()


def test_a_request_of_another_epoch_is_answered_with_an_error() -> None:
    with Stage() as stage:
        link, front = stage.up(0), stage.fronts[0]
        identity = front.read(front.router, "ready response")[0]
        front.router.send_multipart([identity, *encode_request(RequestType.ADD, request("old", epoch=7))])
        outputs = decode_outputs(front.read(front.pull, "error output"))
        assert outputs.outputs[0].finish_reason is FinishReason.ERROR and "epoch 7" in outputs.outputs[0].error
        assert outputs.finished_requests == ["old"]
        assert link.counters.snapshot() == {("input", "stale_epoch"): 1}


def test_a_bad_request_whose_id_can_be_read_fails_alone() -> None:
    with Stage() as stage:
        link, front = stage.up(0), stage.fronts[0]
        identity = front.read(front.router, "ready response")[0]
        bad = request("bad")
        bad.prompt_token_ids = "not tokens"  # type: ignore[assignment]
        front.router.send_multipart([identity, *encode_request(RequestType.ADD, bad)])
        outputs = decode_outputs(front.read(front.pull, "error output"))
        assert outputs.outputs[0].request_id == "bad" and outputs.outputs[0].finish_reason is FinishReason.ERROR
        front.router.send_multipart([identity, *encode_request(RequestType.ADD, request("good"))])
        assert take(link, RequestType.ADD).payload.request_id == "good"


def test_a_dying_engine_tells_every_front_end_and_the_head() -> None:
    with Stage(front_ends=2) as stage:
        link = stage.up(0)
        link.send(1, EngineCoreOutputs(0, [EngineCoreOutput("last", [1])]))
        link.dead("out of memory")
        assert stage.head.wait_state(0, RankState.LOST).stage == "left: out of memory"
        assert stage.fronts[0].read(stage.fronts[0].pull, "sentinel") == [DEAD_SENTINEL]
        assert decode_outputs(stage.fronts[1].read(stage.fronts[1].pull, "output")).outputs[0].request_id == "last"
        assert stage.fronts[1].read(stage.fronts[1].pull, "sentinel") == [DEAD_SENTINEL]


def test_a_front_end_that_does_not_read_is_dropped_and_stops_nobody() -> None:
    with Stage(front_ends=2) as stage:
        link = stage.up(0, client_limit=1 << 20)
        stage.fronts[0].pull.close(0)
        big = EngineCoreOutputs(0, [EngineCoreOutput("big", list(range(20000)))])
        for _ in range(1200):
            link.send(0, big)
        assert take(link, LinkEvent.CLIENT_DROPPED).client_index == 0
        link.send(1, EngineCoreOutputs(0, [EngineCoreOutput("small", [1])]))
        assert decode_outputs(stage.fronts[1].read(stage.fronts[1].pull, "output")).outputs[0].request_id == "small"
        assert link.counters.snapshot()[("output", "client_dropped")] > 0


def test_missing_ranks_are_named_with_their_stage_before_and_at_the_deadline() -> None:
    reports: list[list] = []
    with Stage(size=3, timings=replace(FAST, report=0.5), on_report=reports.append) as stage:
        stage.up(0)
        slow = stage.link(1)
        slow.connect(PATIENCE)
        slow.progress("loading weights", 0.25)
        until(lambda: stage.head.info(1).state is RankState.LOADING, "progress arrives")
        named = [(1, "LOADING", "loading weights 25%"), (2, "NEW", "no HELLO yet")]
        until(lambda: named in [[(m.rank, str(m.state), m.stage) for m in r] for r in list(reports)], "a report")
        with pytest.raises(HandshakeTimeout) as caught:
            stage.head.call(stage.head.head.wait_ready(0.2))
        for words in ("2 of 3", "rank 1 (LOADING, loading weights 25%", "rank 2 (NEW"):
            assert words in str(caught.value)


def test_an_endpoint_nobody_listens_on_is_named_at_the_deadline() -> None:
    with Stage() as stage:
        stage.head.endpoints = [f"ipc://{stage.folder}/nobody"]
        with pytest.raises(HandshakeTimeout, match=r"head at ipc://.*/nobody: no connection"):
            stage.link(0).connect(0.5)
        stage.head.endpoints = ["tcp://no-such-name.invalid:1"]
        with pytest.raises(HandshakeTimeout, match=r"no-such-name\.invalid"):
            stage.link(0).connect(0.5)


@pytest.mark.parametrize(("transport", "words"), [("ipc", ""), ("tcp", "address 127.0.0.1")])
def test_ranks_are_named_with_the_address_that_they_have(
    transport: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Over ipc there is none, though the library has user and process in its place."""
    caplog.set_level("INFO")
    with Stage(transport) as stage:
        stage.up(0)
        joined = next(line for line in caplog.messages if line.startswith("rank 0: READY"))
        assert words in joined
        assert ("address" in joined) is bool(words)


def test_an_address_in_use_is_named() -> None:
    with Stage("tcp") as stage, pytest.raises(OSError, match="cannot bind tcp://127"):
        stage.start_head()


def test_the_coordinators_address_is_passed_on_in_the_ready_response() -> None:
    with Stage(coordinator=True) as stage:
        stage.up(0)
        _, payload = stage.fronts[0].read(stage.fronts[0].router, "ready response")
        assert decode_ready_response(payload).dp_stats_address == stage.coordinator.endpoints[0]
        assert response(0).dp_stats_address is None


def test_a_new_head_that_runs_another_configuration_ends_the_rank_with_its_reason() -> None:
    with Stage(group=Group(2, frozenset({0, 1}), diff=diff)) as stage:
        link = stage.up(0, resolved={"weights": "x"})
        stage.head.close()
        stage._head_options = {"resolved": {"weights": "y"}}
        stage.start_head()
        failure = take(link, LinkEvent.GAVE_UP).payload
        assert isinstance(failure, TypedRefusal) and "weights: expected 'y', got 'x'" in failure.message
        assert stage.head.info(0).state is not RankState.READY


def test_text_from_outside_cannot_break_a_line_of_the_log() -> None:
    with Stage() as stage:
        stage.up(0, pod="pod\nERROR forged line " + "x" * 1000)
        pod = stage.head.info(0).pod
        assert pod.startswith("pod?ERROR forged") and len(pod) == 253


def test_a_rank_whose_wire_thread_fails_gives_up_and_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with Stage() as stage:
        link = stage.up(0)
        broken = OSError("no more descriptors")

        def fail() -> None:
            raise broken

        monkeypatch.setattr(link._io, "_send_load", fail)
        link.report_load(LoadRecord(0, 0, 1, 0, 0, 0.0))
        assert take(link, LinkEvent.GAVE_UP).payload is broken and link.failure is broken
        stage.head.wait_state(0, RankState.LOST)
