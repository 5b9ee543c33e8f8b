"""A rank with a front end of its own registers twice: there for its work, with the group's head for what all share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from wire_harness import FAST, PATIENCE, FrontEnd, HeadThread, Stage, diff, response, until

from dpi_engine.wire import handshake as hs
from dpi_engine.wire.codec import decode_outputs, decode_ready_response, encode_request
from dpi_engine.wire.coordination import CoordinatorState, decode_load_report
from dpi_engine.wire.engine_link import EngineLink
from dpi_engine.wire.errors import Refusal, TypedRefusal
from dpi_engine.wire.head import HeadAddresses
from dpi_engine.wire.inbox import InboxItem, LinkEvent
from dpi_engine.wire.lease import Group, LeaseTable, Peer, Refuse
from dpi_engine.wire.messages import (
    WIRE_VERSION,
    Dialect,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    LoadRecord,
    RankInfo,
    RankState,
    RequestType,
    SamplingParams,
)
from dpi_engine.wire.places import Place, places_of
from dpi_engine.wire.sockets import bound_endpoint, make_socket


class Own:
    """The launch of ranks 2 and 3 of 4: their leases and a front end, over ipc."""

    def __init__(self, stage: Stage, **options: Any) -> None:
        self.front = FrontEnd(stage.context, lambda name: stage.endpoint(f"own-{name}"))
        self.endpoint = stage.endpoint("own-h")
        self.group = Group(4, frozenset({2, 3}), remote_headless=False, only_local=True, **options)
        self.start()

    def start(self) -> None:
        self.head = HeadThread([self.endpoint], self.group, HeadAddresses([self.front.input], [self.front.output]))

    def info(self, rank: int) -> Any:
        return next(i for i in self.head.do(self.head.head.ranks) if i.rank == rank)

    def close(self) -> None:
        self.head.close()
        self.front.close()


HEAD_GROUP = Group(4, frozenset({0, 1}), remote_headless=False)


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage(size=4, group=HEAD_GROUP, coordinator=True, dtype="bfloat16") as made:
        made.head.head.addresses.inputs = made.head.head.addresses.outputs = []
        yield made


@pytest.fixture
def own(stage: Stage) -> Iterator[Own]:
    made = Own(stage)
    yield made
    for link in stage.links:
        link.close()
    stage.links.clear()
    made.close()


def link_of(stage: Stage, own: Own, rank: int = 2, **options: Any) -> EngineLink:
    options = {"timings": FAST, "dialect": stage.dialect, **options}
    link = EngineLink(
        rank=rank, endpoint=own.endpoint, head=stage.head.endpoints[0], local=True, headless=False, **options
    )
    stage.links.append(link)
    return link


def up(stage: Stage, own: Own, **options: Any) -> EngineLink:
    link = link_of(stage, own, **options)
    link.connect(PATIENCE)
    link.open_io(response(link.rank), PATIENCE)
    link.ready(timeout=PATIENCE)
    return link


def take(link: EngineLink, kind: LinkEvent | RequestType) -> InboxItem:
    """The next item of a kind; items before it are passed over, those after it are kept."""
    waiting: list[InboxItem] = link.__dict__.setdefault("taken", [])

    def look() -> bool:
        waiting.extend(link.inbox.drain())
        return any(i.kind is kind for i in waiting)

    until(look, f"{kind} comes")
    at = next(n for n, i in enumerate(waiting) if i.kind is kind)
    item = waiting[at]
    del waiting[: at + 1]
    return item


def load(running: int, seq: int) -> LoadRecord:
    return LoadRecord(2, 0, seq, 0, running, 0.25)


def test_work_goes_by_the_own_front_end_and_the_rest_by_the_head(stage: Stage, own: Own) -> None:
    link = link_of(stage, own)
    init = link.connect(PATIENCE)
    head = stage.head.head.addresses
    assert init.addresses.inputs == [own.front.input] and init.addresses.outputs == [own.front.output]
    assert init.addresses.coordinator_input == head.coordinator_input
    assert init.addresses.coordinator_output == head.coordinator_output
    assert init.dtype == "bfloat16"
    link.progress("loading weights", 0.5)
    until(lambda: "50%" in stage.head.info(2).stage and "50%" in own.info(2).stage, "both hear of the progress")
    link.open_io(response(2), PATIENCE)
    link.ready(timeout=PATIENCE)
    until(lambda: stage.head.info(2).state is own.info(2).state is RankState.READY, "READY at both")
    assert (stage.head.info(2).local, own.info(2).local) == (False, True)
    identity, payload = own.front.read(own.front.router, "ready response")
    ready = decode_ready_response(payload)
    assert ready is not None and ready.dp_stats_address == head.stats_publish
    request = EngineCoreRequest("r", [1], sampling_params=SamplingParams(max_tokens=1), epoch=link.epoch)
    own.front.router.send_multipart([identity, *encode_request(RequestType.ADD, request)])
    assert take(link, RequestType.ADD).payload.request_id == "r"
    link.send(0, EngineCoreOutputs(2, [EngineCoreOutput("r", [7])]))
    assert decode_outputs(own.front.read(own.front.pull, "output")).outputs[0].new_token_ids == [7]
    link.report_load(load(3, 1))
    until(lambda: stage.head.info(2).running == 3, "the head hears of the load by the beats")


def test_a_rank_that_the_head_refuses_is_never_routed_to(stage: Stage) -> None:
    group = Group(4, frozenset({0, 1}), remote_headless=False, declared={"seed": 0}, diff=diff)
    with Stage(size=4, group=group) as strict:
        own = Own(strict)
        try:
            with pytest.raises(TypedRefusal) as caught:
                link_of(strict, own, declared={"seed": 1}).connect(PATIENCE)
            assert caught.value.code == Refusal.FINGERPRINT
            assert own.info(2).state is RankState.NEW
            strict.up(0, {"weights": "x"}, declared={"seed": 0})
            link = link_of(strict, own, declared={"seed": 0})
            link.connect(PATIENCE)
            link.open_io(response(2), PATIENCE)
            with pytest.raises(TypedRefusal, match="weights: expected 'x', got 'y'"):
                link.ready({"weights": "y"}, timeout=PATIENCE)
            assert own.info(2).state is not RankState.READY
        finally:
            for link in strict.links:
                link.close()
            strict.links.clear()
            own.close()


def test_without_its_head_a_rank_works_on_and_follows_the_next_one(stage: Stage, own: Own) -> None:
    link = up(stage, own)
    epoch, joined = link.epoch, link.group_epoch
    identity, _ = own.front.read(own.front.router, "ready response")
    stage.head.close()
    assert "no word from the head" in take(link, LinkEvent.GROUP_LOST).payload
    assert "no word from the head" in link.head_lost
    request = EngineCoreRequest("r", [1], sampling_params=SamplingParams(max_tokens=1), epoch=epoch)
    own.front.router.send_multipart([identity, *encode_request(RequestType.ADD, request)])
    assert take(link, RequestType.ADD).payload.request_id == "r"
    link.send(0, EngineCoreOutputs(2, [EngineCoreOutput("r", [7])]))
    assert decode_outputs(own.front.read(own.front.pull, "output")).epoch == epoch
    until(lambda: own.info(2).state is RankState.READY, "READY without the head")
    # The next head has its coordinator somewhere else.
    back = make_socket(stage.context, zmq.XPUB, bind="tcp://127.0.0.1:*")
    pull = make_socket(stage.context, zmq.PULL, bind="tcp://127.0.0.1:*")
    try:
        stage.start_head()
        addresses = stage.head.head.addresses
        addresses.inputs = addresses.outputs = []
        addresses.coordinator_input, addresses.coordinator_output = bound_endpoint(back), bound_endpoint(pull)
        addresses.stats_publish = "tcp://127.0.0.1:9"
        take(link, LinkEvent.GROUP_JOINED)
        assert link.head_lost == ""
        assert (link.epoch, link.group_epoch) == (epoch, joined + 1)
        assert back.poll(int(PATIENCE * 1000)) and back.recv() == b"\x01"
        link.report_load(load(1, 1))
        assert pull.poll(int(PATIENCE * 1000))
        report = decode_load_report(pull.recv())
        assert report.head_epoch == link.group_epoch
        assert (report.epoch, report.running) == (epoch, 1)
        again = decode_ready_response(own.front.read(own.front.router, "another introduction")[1])
        assert again is not None and (again.epoch, again.dp_stats_address) == (epoch, "tcp://127.0.0.1:9")
        stage.head.wait_state(2, RankState.READY)
        assert own.info(2).epoch == epoch
    finally:
        for sock in (back, pull):
            sock.close(0)


@pytest.mark.parametrize("at", ["HELLO", "READY"])
def test_a_rank_that_a_new_head_refuses_can_finish_what_its_front_end_sent(at: str) -> None:
    settings = {"seed": 0}
    with Stage(size=4, group=Group(4, frozenset({0, 1}), remote_headless=False, declared=settings, diff=diff)) as stage:
        own = Own(stage)
        try:
            link = link_of(stage, own, declared=settings)
            link.connect(PATIENCE)
            link.open_io(response(2), PATIENCE)
            link.ready({"weights": "x"}, timeout=PATIENCE)
            own.front.read(own.front.router, "ready response")
            stage.head.close()
            take(link, LinkEvent.GROUP_LOST)
            if at == "HELLO":
                stage._group = Group(4, frozenset({0, 1}), remote_headless=False, declared={"seed": 5}, diff=diff)
            else:
                stage._head_options = {"resolved": {"weights": "y"}}
            stage.start_head()
            refusal = take(link, LinkEvent.GROUP_REFUSED).payload
            assert isinstance(refusal, TypedRefusal) and "expected" in refusal.message
            assert link.head_lost == str(refusal) and link.failure is None
            time.sleep(2 * FAST.lost)
            assert own.info(2).state is RankState.READY
            link.send(0, EngineCoreOutputs(2, [EngineCoreOutput("r", [7])]))
            assert decode_outputs(own.front.read(own.front.pull, "output")).outputs[0].new_token_ids == [7]
            link.goodbye("stopped")
            until(lambda: own.info(2).error == "left: stopped", "it leaves in order")
        finally:
            for link in stage.links:
                link.close()
            stage.links.clear()
            own.close()


def test_a_rank_that_its_own_front_end_lost_joins_that_one_alone(stage: Stage, own: Own) -> None:
    link = up(stage, own)
    epoch, joined = link.epoch, link.group_epoch
    own.head.do(lambda: own.head.head.unreachable(2, "no way to it"))
    take(link, LinkEvent.FENCED)
    take(link, LinkEvent.REJOINED)
    assert (link.epoch, link.group_epoch) == (epoch + 1, joined)
    until(lambda: own.info(2).state is RankState.READY, "it is READY again")
    assert stage.head.wait_state(2, RankState.READY).epoch == joined


def test_one_rank_of_a_launch_is_told_where_all_are(stage: Stage, own: Own) -> None:
    stage.up(0, pod="pod-a", headless=False)
    second, third = (up(stage, own, rank=rank, pod="pod-b") for rank in (2, 3))
    until(lambda: second.places == [Place(0, 0, "pod-a"), Place(2, 3, "pod-b")], "it hears of all pods")
    stage.up(1, pod="pod-a", headless=False)
    until(lambda: second.places == [Place(0, 1, "pod-a"), Place(2, 3, "pod-b")], "and of what has changed")
    assert third.places == []
    second.close()
    stage.links.remove(second)
    until(lambda: len(third.places) == 2, "when that one has left, another one is told")


def test_leaving_in_order_tells_both(stage: Stage, own: Own) -> None:
    link = up(stage, own)
    link.drain()
    until(lambda: own.info(2).stage == stage.head.info(2).stage == "draining", "both know that it drains")
    link.goodbye("stopped")
    stage.links.clear()
    until(lambda: own.info(2).error == stage.head.info(2).error == "left: stopped", "both know why it left")


def test_a_head_that_names_no_usable_coordinator_does_not_end_a_rank(stage: Stage, own: Own) -> None:
    link = up(stage, own)
    stage.head.close()
    take(link, LinkEvent.GROUP_LOST)
    stage.start_head()
    stage.head.head.addresses.inputs = stage.head.head.addresses.outputs = []
    stage.head.head.addresses.coordinator_input = "nonsense://"
    take(link, LinkEvent.GROUP_JOINED)
    until(lambda: link.counters.snapshot().get(("coordinator_subscription", "bad_address")), "it is counted")
    link.send(0, EngineCoreOutputs(2, [EngineCoreOutput("r", [7])]))
    assert decode_outputs(own.front.read(own.front.pull, "output")).outputs[0].new_token_ids == [7]


# ---------------------------------------------------------------------------------------------- pure parts


@pytest.mark.parametrize(
    ("pods", "places"),
    [
        ([], []),
        ([""], []),
        (["a"], [(0, 0, "a")]),
        (["a", "a", "b"], [(0, 1, "a"), (2, 2, "b")]),
        (["a", "", "a"], [(0, 0, "a"), (2, 2, "a")]),
        (["a", "b", "a", "a"], [(0, 0, "a"), (1, 1, "b"), (2, 3, "a")]),
    ],
)
def test_places_are_runs_of_ranks_in_one_pod(pods: list[str], places: list[tuple[int, int, str]]) -> None:
    infos = [RankInfo(rank=rank, pod=pod) for rank, pod in enumerate(pods)]
    assert places_of(reversed(infos)) == [Place(*p) for p in places]


def test_a_front_end_takes_its_own_ranks_alone() -> None:
    table = LeaseTable(Group(4, frozenset({2, 3}), remote_headless=False, only_local=True), FAST, 0.0)
    for rank in (0, 1, 4, 65535):
        decision = table.hello(Peer(rank, "aa" * 8), 0.0, local=True, headless=False, version=WIRE_VERSION)
        assert isinstance(decision, Refuse) and decision.code is Refusal.RANK_OUT_OF_RANGE
        assert "2..3" in decision.message and "at this front end" in decision.message
    assert [i.rank for i in table.infos(0.0)] == [2, 3]
    assert [m.rank for m in table.missing(0.0)] == [2, 3]


@pytest.mark.parametrize(("remote_headless", "again"), [(True, False), (False, True)])
def test_a_vllm_rank_with_a_front_end_of_its_own_may_say_hello_again(remote_headless: bool, again: bool) -> None:
    """Its connection is closed after READY, and nobody here routes to it: only its HELLO tells of a restart."""
    table = LeaseTable(Group(2, frozenset({0}), remote_headless=remote_headless, vllm=True), FAST, 0.0)
    peer = Peer(1)
    table.hello(peer, 0.0, local=False, headless=remote_headless)
    table.ready(peer, 0, 0.0)
    decision = table.hello(peer, 1.0, local=False, headless=remote_headless)
    assert isinstance(decision, Refuse) is not again


def test_loads_of_a_new_life_count_though_their_front_ends_epochs_began_anew() -> None:
    state = CoordinatorState(4)

    def report(head_epoch: int, epoch: int, seq: int, running: int) -> int:
        record = LoadRecord(2, epoch, seq, 0, running, 0.0)
        state.on_engine(EngineCoreOutputs(2, epoch=head_epoch, load=record), 0.0)
        return state._loads[2].running

    assert report(3, 7, 500, 9) == 9
    assert report(3, 7, 499, 1) == 9
    assert report(4, 1, 1, 2) == 2
    assert report(3, 8, 600, 9) == 2


# -------------------------------------------------------------------------------------------- vLLM's bytes


def test_both_hellos_of_the_vllm_dialect_are_vllms_to_the_byte() -> None:
    """To the head neither local nor headless, to the own front end local; READY to both, addresses from each."""
    context: zmq.Context[Any] = zmq.Context()
    routers = [make_socket(context, zmq.ROUTER, bind="tcp://127.0.0.1:*") for _ in range(2)]
    front = FrontEnd(context, lambda name: "tcp://127.0.0.1:*")
    head, own = routers
    link = EngineLink(
        rank=1,
        endpoint=bound_endpoint(own),
        head=bound_endpoint(head),
        local=True,
        headless=False,
        dialect=Dialect.VLLM,
        timings=FAST,
    )
    thread = threading.Thread(target=lambda: link.connect(PATIENCE))
    try:
        thread.start()
        prefix = bytes.fromhex("83a6737461747573a548454c4c4fa56c6f63616c")
        for router, local in ((head, b"\xc2"), (own, b"\xc3")):
            assert router.poll(int(PATIENCE * 1000))
            identity, hello = router.recv_multipart()
            assert identity == b"\x01\x00"
            assert hello == prefix + local + b"\xa8headless\xc2"
            inputs = [front.input] if router is own else ["ipc:///of/the/head"]
            outputs = [front.output] if router is own else ["ipc:///of/the/head"]
            init = hs.InitMessage(addresses=hs.Addresses(inputs=inputs, outputs=outputs))
            router.send_multipart([identity, hs.encode_init(init, Dialect.VLLM)])
        thread.join(PATIENCE)
        assert link.init is not None and link.init.addresses.inputs == [front.input]
        link.open_io(response(1), PATIENCE)
        link.ready(timeout=PATIENCE)
        for router in (head, own):
            assert router.poll(int(PATIENCE * 1000))
            assert b"READY" in router.recv_multipart()[1]
        assert decode_ready_response(front.read(front.router, "ready response")[1]) is not None
    finally:
        link.close()
        front.close()
        for router in routers:
            router.close(0)
        context.destroy(0)
