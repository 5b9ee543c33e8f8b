"""The vllm dialect over sockets: our engine under a head that behaves as vLLM's, a vLLM engine under our head."""

from __future__ import annotations

import threading
import time
from typing import Any

import golden_frames as golden
import msgspec
import pytest
import zmq
from wire_harness import FAST, PATIENCE, Stage, own_endpoint, response, until, until_free

from dpi_engine.wire.codec import encode
from dpi_engine.wire.engine_link import EngineLink
from dpi_engine.wire.errors import HandshakeTimeout, TypedRefusal
from dpi_engine.wire.inbox import LinkEvent
from dpi_engine.wire.lease import Group
from dpi_engine.wire.messages import Dialect, EngineCoreOutput, EngineCoreOutputs, FinishReason, RankState, RequestType
from dpi_engine.wire.sockets import bound_endpoint, make_socket

HELLO = bytes.fromhex("83a6737461747573a548454c4c4fa56c6f63616cc2a8686561646c657373c3")
READY = bytes.fromhex("83a6737461747573a55245414459a56c6f63616cc2a8686561646c657373c3")


class VllmHead:
    """Speaks as vLLM's front end and coordinator do, raw bytes only; notes the order of what it sees."""

    def __init__(self, at: str = "") -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.seen: list[tuple[str, list[bytes]]] = []
        self.handshake = make_socket(self.context, zmq.ROUTER, bind=until_free(at or own_endpoint()))
        self.router = make_socket(self.context, zmq.ROUTER, bind=own_endpoint())
        self.pull = make_socket(self.context, zmq.PULL, bind="tcp://127.0.0.1:*")
        self.xpub = make_socket(self.context, zmq.XPUB, bind="tcp://127.0.0.1:*")
        self.reports = make_socket(self.context, zmq.PULL, bind="tcp://127.0.0.1:*")
        self.endpoint = bound_endpoint(self.handshake)
        self.thread: threading.Thread | None = None

    def serve_start(self) -> None:
        """Until READY came; then, as vLLM does, the handshake socket is closed."""
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        addresses = {
            "inputs": [bound_endpoint(self.router)],
            "outputs": [bound_endpoint(self.pull)],
            "coordinator_input": bound_endpoint(self.xpub),
            "coordinator_output": bound_endpoint(self.reports),
            "frontend_stats_publish_address": "ipc:///nowhere",
        }
        init = encode({"addresses": addresses, "parallel_config": {}})
        names = {self.handshake: "handshake", self.router: "input", self.xpub: "subscription"}
        poller = zmq.Poller()
        for sock in names:
            poller.register(sock, zmq.POLLIN)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for sock, _ in poller.poll(100):
                frames = sock.recv_multipart()
                self.seen.append((names[sock], frames))
                if sock is self.xpub:
                    sock.send(b"READY")
                elif sock is self.handshake and frames[1] == HELLO:
                    sock.send_multipart([frames[0], init])
                elif sock is self.handshake:
                    self.handshake.close(0)
                    return

    def close(self) -> None:
        if self.thread is not None:
            self.thread.join(PATIENCE)
        self.context.destroy(0)


@pytest.fixture
def vllm_head():
    head = VllmHead()
    yield head
    head.close()


def engine(endpoint: str, **options: Any) -> EngineLink:
    options = {"timings": FAST, **options}
    return EngineLink(rank=1, endpoint=endpoint, local=False, headless=True, dialect=Dialect.VLLM, **options)


def test_our_engine_serves_under_a_vllm_head(vllm_head: VllmHead) -> None:
    link = engine(vllm_head.endpoint, pod="p", declared={"never": "sent"})
    try:
        vllm_head.serve_start()
        assert link.connect(PATIENCE).addresses.frontend_stats_publish_address == "ipc:///nowhere"
        link.progress("is not sent in this dialect", 0.5)
        link.open_io(response(1), PATIENCE)
        link.ready({"never": "sent"}, timeout=PATIENCE)
        vllm_head.thread.join(PATIENCE)
        by_name = dict(vllm_head.seen)
        assert [name for name, _ in vllm_head.seen].count("handshake") == 2
        assert vllm_head.seen[0] == ("handshake", [b"\x01\x00", HELLO])
        assert vllm_head.seen[-1] == ("handshake", [b"\x01\x00", READY])
        assert by_name["subscription"] == [b"\x01"]
        identity, payload = by_name["input"]
        ready = msgspec.msgpack.decode(payload)
        assert identity == b"\x01\x00" and len(ready) == 17 and ready["dp_stats_address"] == "ipc:///nowhere"

        vllm_head.router.send_multipart([b"\x01\x00", b"\x03", golden.UTILITY_CALL])
        vllm_head.router.send_multipart([b"\x01\x00", b"\x00", golden.ADD])
        items: list[Any] = []
        until(lambda: items.extend(link.inbox.drain()) or len(items) >= 2, "a utility call and a request")
        assert [item.kind for item in items] == [RequestType.UTILITY, RequestType.ADD]
        rid = items[1].payload.request_id
        link.send(0, EngineCoreOutputs(1, [EngineCoreOutput(rid, [7], finish_reason=FinishReason.STOP)]))
        assert vllm_head.pull.poll(int(PATIENCE * 1000))
        fields = msgspec.msgpack.decode(vllm_head.pull.recv())
        assert (len(fields), len(fields[1][0]), fields[1][0][:2]) == (9, 18, [rid, [7]])
        vllm_head.xpub.send_multipart([b"\x02", bytes.fromhex("9200c4020000")])
        wave = until(link.inbox.drain, "the wave")[0]
        assert (wave.kind, wave.payload.wave, wave.payload.exclude) == (RequestType.START_DP_WAVE, 0, b"\0\0")
    finally:
        link.close()


def test_a_head_that_comes_late_gets_one_hello(vllm_head: VllmHead) -> None:
    late = vllm_head.endpoint
    vllm_head.handshake.unbind(late)
    link = engine(late, timings=FAST.scaled(0.1))
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(link.connect(PATIENCE)))
    thread.start()
    try:
        time.sleep(0.5)  # several attempts find nobody
        vllm_head.handshake.bind(late)
        vllm_head.serve_start()
        thread.join(PATIENCE)
        assert result
        link.open_io(response(1), PATIENCE)
        link.ready(timeout=PATIENCE)
        vllm_head.thread.join(PATIENCE)
        assert [frames[1] for name, frames in vllm_head.seen if name == "handshake"] == [HELLO, READY]
    finally:
        link.close()


def test_an_engine_whose_vllm_head_is_gone_gives_up(vllm_head: VllmHead) -> None:
    link = engine(vllm_head.endpoint)
    try:
        vllm_head.serve_start()
        link.connect(PATIENCE)
        link.open_io(response(1), PATIENCE)
        link.ready(timeout=PATIENCE)
        vllm_head.thread.join(PATIENCE)
        vllm_head.router.close(0)
        events: list[Any] = []
        until(lambda: events.extend(link.inbox.drain()) or len(events) >= 3, "three events")
        assert [event.kind for event in events] == [
            LinkEvent.CLIENT_DROPPED,
            LinkEvent.HEAD_LOST,
            LinkEvent.GAVE_UP,
        ]
        assert isinstance(link.failure, HandshakeTimeout)
    finally:
        link.close()


def test_an_engine_joins_the_next_vllm_head_with_its_weights(vllm_head: VllmHead) -> None:
    link = engine(vllm_head.endpoint)
    following = None
    try:
        vllm_head.serve_start()
        link.connect(PATIENCE)
        link.open_io(response(1), PATIENCE)
        link.ready(timeout=PATIENCE)
        vllm_head.thread.join(PATIENCE)
        vllm_head.router.close(0)
        following = VllmHead(vllm_head.endpoint)
        following.serve_start()
        events: list[Any] = []
        until(lambda: events.extend(link.inbox.drain()) or len(events) >= 3, "three events")
        kinds = [event.kind for event in events]
        assert kinds == [LinkEvent.CLIENT_DROPPED, LinkEvent.HEAD_LOST, LinkEvent.REJOINED]
        following.thread.join(PATIENCE)
        names = [name for name, _ in following.seen]
        assert names.count("handshake") == 2 and following.seen[-1] == ("handshake", [b"\x01\x00", READY])
        assert names.count("input") == 1, "it has introduced itself to the new front end"
        following.router.send_multipart([b"\x01\x00", b"\x00", golden.ADD])
        until(link.inbox.drain, "a request of the new head")
    finally:
        link.close()
        if following is not None:
            following.close()


def test_an_engine_that_was_cut_off_goes_on_under_the_same_vllm_head(vllm_head: VllmHead) -> None:
    """Such a head listens for no HELLO any more: the connections that come back are all there is."""
    link = engine(vllm_head.endpoint)
    try:
        vllm_head.serve_start()
        link.connect(PATIENCE)
        link.open_io(response(1), PATIENCE)
        link.ready(timeout=PATIENCE)
        vllm_head.thread.join(PATIENCE)
        at = bound_endpoint(vllm_head.router)
        vllm_head.router.close(0)
        events: list[Any] = []
        until(lambda: events.extend(link.inbox.drain()) or len(events) >= 2, "it notices")
        assert events[-1].kind is LinkEvent.HEAD_LOST
        vllm_head.router = make_socket(vllm_head.context, zmq.ROUTER, bind=until_free(at))
        until(lambda: events.extend(link.inbox.drain()) or len(events) >= 4, "it goes on")
        assert [event.kind for event in events[2:]] == [LinkEvent.CLIENT_BACK, LinkEvent.REJOINED]
        assert events[-1].payload is None
        assert vllm_head.router.poll(int(PATIENCE * 1000))
        assert vllm_head.router.recv_multipart()[0] == b"\x01\x00"
        vllm_head.router.send_multipart([b"\x01\x00", b"\x00", golden.ADD])
        until(link.inbox.drain, "a request")
    finally:
        link.close()


def test_vllm_ranks_that_share_experts_are_told_where_to_meet() -> None:
    ports = [29555, 29556, 29557, 29558, 29559]
    group = Group(2, frozenset(), vllm=True)
    with Stage("tcp", group=group, rendezvous=ports) as stage:
        socks = {
            rank: make_socket(
                stage.context, zmq.DEALER, connect=stage.head.endpoints[0], identity=rank.to_bytes(2, "little")
            )
            for rank in (0, 1)
        }
        socks[1].send(HELLO)
        stage.head.wait_state(1, RankState.HELLO)
        assert not socks[1].poll(300), "rank 0 is not there yet"
        socks[0].send(HELLO)
        for sock in socks.values():
            assert sock.poll(int(PATIENCE * 1000))
            assert msgspec.msgpack.decode(sock.recv())["parallel_config"] == {
                "data_parallel_master_ip": "127.0.0.1",
                "data_parallel_master_port": ports[0],
                "_data_parallel_master_port_list": ports[1:],
                "_coord_store_port": 0,
                "data_parallel_size": 2,
            }
        hashed = READY[:0] + b"\x84" + READY[1:] + b"\xb4parallel_config_hash\xd9\x40"
        socks[0].send(hashed + b"a" * 64)
        assert stage.head.wait_state(0, RankState.READY).fields == {"parallel_config_hash": "a" * 64}
        socks[1].send(HELLO)  # started anew while rank 0 runs, which meets nobody any more
        until(lambda: stage.head.info(1).epoch == 2, "it was heard")
        assert not socks[1].poll(300)
        stage.head.do(lambda: stage.head.head.unreachable(0, "gone with it"))
        socks[0].send(HELLO)
        for sock in socks.values():
            assert sock.poll(int(PATIENCE * 1000)) and sock.recv()
            sock.close(0)


def test_our_dialect_under_a_vllm_head_is_refused_by_name_and_the_head_hears_nothing(
    vllm_head: VllmHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would die of a HELLO from a rank that it does not know."""
    monkeypatch.setattr("dpi_engine.wire.registration.GREETING_S", 1.0)
    link = EngineLink(rank=1, endpoint=vllm_head.endpoint, local=False, headless=True, timings=FAST)
    try:
        with pytest.raises(TypedRefusal, match=r"does not greet.*vLLM head.*--data-parallel-protocol vllm") as caught:
            link.connect(PATIENCE)
        assert caught.value.code == "protocol_version"
        assert not vllm_head.handshake.poll(0)
    finally:
        link.close()


def test_a_deadline_before_the_greeting_is_named_too(vllm_head: VllmHead) -> None:
    link = EngineLink(rank=1, endpoint=vllm_head.endpoint, local=False, headless=True, timings=FAST)
    try:
        with pytest.raises(
            HandshakeTimeout, match="does not greet as the head of this release does: it is a vLLM head"
        ):
            link.connect(1.0)
        assert not vllm_head.handshake.poll(0)
    finally:
        link.close()


def test_our_dialect_is_refused_by_a_head_of_ours_that_speaks_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpi_engine.wire.registration.GREETING_S", 1.0)
    with Stage(dialect=Dialect.VLLM) as stage:
        with pytest.raises(TypedRefusal, match="give --data-parallel-protocol vllm here too"):
            stage.link(0, dialect=Dialect.DPI).connect(PATIENCE)
        assert stage.head.info(0).state is RankState.NEW


def test_vllms_dialect_is_refused_by_a_head_of_ours_and_both_learn_why() -> None:
    """An engine of ours reads the refusal; one of vLLM's gets the same bytes, and the head's table has the reason."""
    with Stage("tcp") as stage:
        with pytest.raises(TypedRefusal, match="rank 0 is a vLLM engine, or one of ours that speaks its protocol") as e:
            stage.link(0, dialect=Dialect.VLLM).connect(PATIENCE)
        assert e.value.code == "protocol_version"
        sock = make_socket(stage.context, zmq.DEALER, connect=stage.head.endpoints[0], identity=b"\x01\x00")
        sock.send(HELLO[:-11] + b"\xc3\xa8headless\xc2")
        assert sock.recv() == b""
        assert msgspec.msgpack.decode(sock.recv())["error"]["code"] == "protocol_version"
        sock.close(0)
        assert stage.head.counters.snapshot() == {("handshake", "protocol_version"): 2}
        stage.up(1)


def test_a_vllm_engine_serves_under_our_head() -> None:
    with Stage("tcp", dialect=Dialect.VLLM) as stage:
        sock = make_socket(stage.context, zmq.DEALER, connect=stage.head.endpoints[0], identity=b"\x01\x00")
        hello = HELLO[:-11] + b"\xc3\xa8headless\xc2"  # beside the head
        sock.send(hello)
        assert sock.poll(int(PATIENCE * 1000))
        init = msgspec.msgpack.decode(sock.recv())
        assert list(init) == ["addresses", "parallel_config"] and init["parallel_config"] == {}
        assert list(init["addresses"]) == [
            "inputs",
            "outputs",
            "coordinator_input",
            "coordinator_output",
            "frontend_stats_publish_address",
        ]
        sock.send(hello.replace(b"HELLO", b"READY"))
        stage.head.wait_state(1, RankState.READY)
        sock.close(0)  # a vLLM engine does that, and it is no loss
        link = stage.up(0)  # one of ours beside it
        time.sleep(2 * FAST.lost)
        info = stage.head.info(1)
        assert (info.state, info.boot_id) == (RankState.READY, "")
        assert stage.head.info(0).state is RankState.READY and link.failure is None
        stage.head.do(lambda: stage.head.head.unreachable(1, "its request connection is closed"))
        assert stage.head.info(1).state is RankState.LOST
