"""100,000 malformed messages over the real sockets: nothing dies, every one is counted, good ones still pass."""

from __future__ import annotations

import random
import socket
import threading

import fuzz_frames as fuzz
import pytest
import zmq
from wire_harness import FAST, PATIENCE, Stage, diff, greeting_router, response, until

from dpi_engine.wire import handshake as hs
from dpi_engine.wire.codec import MAX_FRAME_BYTES, decode_outputs, decode_ready_response, decode_request, encode_request
from dpi_engine.wire.coordination import CoordinatorState, RankTable, WakeUp
from dpi_engine.wire.errors import WireError
from dpi_engine.wire.lease import Group
from dpi_engine.wire.messages import (
    WIRE_VERSION,
    EngineCoreOutputs,
    EngineCoreRequest,
    LoadRecord,
    RankState,
    RequestType,
    SamplingParams,
)
from dpi_engine.wire.sockets import make_socket, split_tcp

DECODERS = {
    "request": (decode_request, fuzz.REQUESTS),
    "outputs": (decode_outputs, fuzz.OUTPUTS),
    "ready response": (lambda f: decode_ready_response(f[0]), fuzz.READY_RESPONSES),
    "engine's handshake": (lambda f: hs.decode_engine_message(f[0]), fuzz.HANDSHAKES),
    "head's handshake": (lambda f: hs.decode_head_message(f[0]), fuzz.HEAD_MESSAGES),
}


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_raise_nothing_but_wire_errors(name: str) -> None:
    decode, corpus = DECODERS[name]
    for message in corpus:
        decode(message)
    refused = 0
    for message in fuzz.messages(1, 5000, corpus):
        try:
            decode(message)
        except WireError:
            refused += 1
    assert refused > 1500


def test_30000_bad_messages_do_not_shake_the_head() -> None:
    group = Group(4, frozenset(range(4)), declared={"model": "a"}, diff=diff)
    with Stage(size=4, group=group) as stage:
        peer = stage.up(3, declared={"model": "a"})
        strangers = [b"\x00\x00", b"\x09\x00", hs.identity(1, b"stranger"), b"x", b"long" * 40]
        socks = [
            make_socket(stage.context, zmq.DEALER, connect=stage.head.endpoints[0], identity=identity)
            for identity in strangers
        ]
        try:
            # A stranger's HELLO names another model or comes under a bad identity, so that not one may be accepted.
            corpus = [m for m in fuzz.HANDSHAKES if b"HELLO" not in m[0] or b"version" in m[0]]
            sent = 0
            for index, message in enumerate(fuzz.messages(2, 32_000, corpus)):
                sock = socks[index % len(socks)]
                if sock is socks[0] and b"HELLO" in b"".join(message):
                    continue  # as rank 0 of vLLM it would be a valid registration without fields
                sock.send_multipart(message)
                sent += 1
            until(lambda: counted(stage.head.counters, "handshake") == sent, f"all {sent} are counted")
            assert [i.state for i in stage.head.do(stage.head.head.ranks)[:3]] == [RankState.NEW] * 3
            assert ("handshake", "internal") not in stage.head.counters.snapshot()
            good = stage.up(2, declared={"model": "a"})
            assert stage.head.wait_state(2, RankState.READY).epoch == good.epoch == 1
            assert stage.head.wait_state(3, RankState.READY).epoch == peer.epoch
        finally:
            for sock in socks:
                sock.close(0)


def counted(counters, name: str) -> int:
    """Bad messages counted on a socket; answers that found a full queue are another matter."""
    return sum(n for (sock, reason), n in counters.snapshot().items() if sock == name and reason != "send_queue_full")


def test_30000_bad_requests_do_not_shake_the_engine() -> None:
    with Stage() as stage:
        link, front = stage.up(0), stage.fronts[0]
        identity = front.read(front.router, "ready response")[0]
        for message in fuzz.messages(3, 30_000, fuzz.REQUESTS):
            front.router.send_multipart([identity, *message])
        good = EngineCoreRequest("good", [1], sampling_params=SamplingParams())
        front.router.send_multipart([identity, *encode_request(RequestType.ADD, good)])
        taken = []

        def arrived() -> bool:
            taken.extend(link.inbox.drain())
            return bool(taken) and getattr(taken[-1].payload, "request_id", "") == "good"

        until(arrived, "the good request behind them")
        assert len(taken) - 1 + link.counters.total("input") == 30_000
        assert ("input", "internal") not in link.counters.snapshot()
        assert link.counters.total("input") > 15_000
        while front.pull.poll(100):
            for output in decode_outputs(front.pull.recv_multipart()).outputs:
                assert output.error


class CountingState(CoordinatorState):
    """Counts what was taken as good."""

    accepted = 0

    def on_engine(self, outputs: EngineCoreOutputs, now: float):
        actions = super().on_engine(outputs, now)
        self.accepted += 1
        return actions

    def on_ranks(self, table: RankTable, now: float):
        actions = super().on_ranks(table, now)
        self.accepted += 1
        return actions

    def on_front_end(self, wake: WakeUp, now: float = 0.0):
        self.accepted += 1
        return super().on_front_end(wake, now)


CHANNELS = {
    "pull": (2, zmq.PUSH, fuzz.OUTPUTS + fuzz.RANK_TABLES, "coordinator_pull", 20_000),
    "front": (0, zmq.XSUB, fuzz.WAKE_UPS, "coordinator_front", 10_000),
    "back": (1, zmq.XSUB, fuzz.REQUESTS, "coordinator_back", 10_000),
}


@pytest.mark.parametrize("channel", CHANNELS)
def test_40000_bad_messages_do_not_shake_the_coordinator(channel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at, kind, corpus, name, count = CHANNELS[channel]
    monkeypatch.setattr("wire_harness.CoordinatorState", CountingState)
    with Stage(size=1, coordinator=True, moe=True) as stage:
        coordinator = stage.coordinator
        assert coordinator is not None
        sock = make_socket(stage.context, kind, connect=coordinator.endpoints[at])
        try:
            stream = fuzz.messages(4, count, corpus)
            for message in stream if kind == zmq.PUSH else fuzz.no_subscriptions(stream):
                sock.send_multipart(message)
            state = coordinator.state
            assert isinstance(state, CountingState)
            until(
                lambda: counted(coordinator.counters, name) + state.accepted == count, f"all {count} are accounted for"
            )
            assert (name, "internal") not in coordinator.counters.snapshot()
            assert counted(coordinator.counters, name) > count // 3
            link = stage.up(0)
            link.report_load(LoadRecord(0, 0, 1 << 62, 77, 0, 0.0))
            link.close()
            assert stage.head.wait_state(0, RankState.LOST).epoch == 1
        finally:
            sock.close(0)


def test_bytes_that_are_no_zmq_at_all_do_not_shake_the_head() -> None:
    rng = random.Random(5)
    with Stage("tcp") as stage:
        address = split_tcp(stage.head.endpoints[0])
        for payload in [b"", b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n", *(rng.randbytes(300) for _ in range(50))]:
            with socket.create_connection(address, PATIENCE) as raw:
                raw.sendall(payload)
        assert stage.up(0).epoch == 1


def test_a_frame_beyond_the_limit_ends_its_connection_alone() -> None:
    with Stage() as stage:
        stage.up(0)
        sock = make_socket(stage.context, zmq.DEALER, connect=stage.head.endpoints[0], identity=b"\x01\x00")
        try:
            sock.send(b"x" * (MAX_FRAME_BYTES + 1))
            assert stage.link(1).connect(PATIENCE).epoch == 1
            stage.head.wait_state(0, RankState.READY)
        finally:
            sock.close(0)


def test_bad_messages_of_a_head_do_not_shake_the_engine() -> None:
    context: zmq.Context = zmq.Context()
    with Stage() as stage:
        router = greeting_router(context, stage.endpoint("bad-head"))
        try:
            stage.head.endpoints = [f"ipc://{stage.folder}/bad-head"]
            link = stage.link(0, timings=FAST.scaled(100))
            answers = threading.Thread(target=answer_hello, args=(router,))
            answers.start()
            link.connect(PATIENCE)
            answers.join(PATIENCE)
            link.open_io(response(0), PATIENCE)
            sent = 0
            for message in fuzz.messages(6, 5000, fuzz.HEAD_MESSAGES):
                try:  # what decodes by chance may be an order to register anew
                    hs.decode_head_message(message[-1])
                except WireError:
                    router.send_multipart([hs.identity(0, link.boot_id), *message])
                    sent += message != hs.GREETING  # which may come again at any time
            ack = hs.HeadMessage(status=hs.READY, epoch=1)
            router.send_multipart([hs.identity(0, link.boot_id), hs.encode_head_message(ack)])
            link.ready(timeout=PATIENCE)
            assert link.counters.total("engine_handshake") == sent > 3000
        finally:
            router.close(0)
            context.destroy(0)


def answer_hello(router) -> None:
    assert router.poll(int(PATIENCE * 1000))
    identity, hello = router.recv_multipart()
    assert hs.decode_engine_message(hello).status == hs.HELLO
    addresses = hs.Addresses(inputs=[], outputs=[])
    init = hs.InitMessage(addresses=addresses, version=WIRE_VERSION, epoch=1, boot_id=identity[2:])
    router.send_multipart([identity, hs.encode_init(init)])
