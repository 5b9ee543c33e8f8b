"""Experts on several devices compute what one rank with all of them does. Gloo on CPUs runs the code that NCCL runs.

Ranks are threads here, each with links and a process group of its own; test_device_ranks.py has them as processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator

import pytest
import torch
from mesh_harness import form, meshes, table, together
from test_expert_exchange import EXPERTS, HIDDEN, experts, layer, tokens

from dpi_engine.config.errors import ConfigError
from dpi_engine.config.experts import ExpertPlacement
from dpi_engine.ops.exchange import NOT_HERE, StepOfAll
from dpi_engine.wire.errors import ExchangeError
from dpi_engine.wire.exchange import device_experts, device_links
from dpi_engine.wire.exchange.device_experts import DeviceExperts
from dpi_engine.wire.exchange.device_links import DeviceLinks
from dpi_engine.wire.exchange.experts import MeshExperts, Way
from dpi_engine.wire.exchange.mesh import CannotListen, Mesh
from dpi_engine.worker.placement import check_own_device

CPU = torch.device("cpu")
STORE = ("127.0.0.1", 0)


@contextlib.contextmanager
def linked(size: int) -> Iterator[list[DeviceLinks]]:
    with meshes(size) as made:
        form(made)
        links = [DeviceLinks(mesh, CPU, "gloo", STORE) for mesh in made]
        assert together([link.join for link in links]) == [None] * size
        yield links
        for link in links:
            link.leave()


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[DeviceLinks]]:
    with linked(request.param) as links:
        yield links


def exchanges(links: list[DeviceLinks], way: Way = Way.AUTO) -> list[DeviceExperts]:
    size = len(links)
    return [DeviceExperts(link, ExpertPlacement(EXPERTS, size, rank), way) for rank, link in enumerate(links)]


def step(exchange: DeviceExperts, *mine: torch.Tensor) -> torch.Tensor:
    exchange.begin(mine[0].shape[0], eager=True, unrecorded=False)
    return layer(exchange, *mine)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[3, 5, 1, 2], [5, 0, 0, 7], [0, 0, 0, 0]])
@pytest.mark.parametrize("way", [Way.ALL_GATHER, Way.ALL_TO_ALL])
def test_sums_are_those_of_one_rank(ranks: list[DeviceLinks], way: Way, rows: list[int], dtype: torch.dtype) -> None:
    mine = [tokens(n, 3, 17 + r, dtype) for r, n in enumerate(rows[: len(ranks)])]
    jobs = [lambda e=e, t=t: [step(e, *t) for _ in range(2)] for e, t in zip(exchanges(ranks, way), mine, strict=True)]
    for (first, second), t in zip(together(jobs), mine, strict=True):
        assert first.dtype is dtype and torch.equal(first, second)
        close = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
        torch.testing.assert_close(first, experts(*t), **close)


def test_both_ways_give_the_bits_that_the_links_of_cpus_give(ranks: list[DeviceLinks]) -> None:
    mine = [tokens(4 + r, 3, r, torch.bfloat16) for r in range(len(ranks))]
    placed = [ExpertPlacement(EXPERTS, len(ranks), rank) for rank in range(len(ranks))]
    plain = [MeshExperts(link.mesh, p) for link, p in zip(ranks, placed, strict=True)]
    want = together([lambda e=e, t=t: layer(e, *t) for e, t in zip(plain, mine, strict=True)])
    for way in (Way.ALL_GATHER, Way.ALL_TO_ALL):
        got = together([lambda e=e, t=t: step(e, *t) for e, t in zip(exchanges(ranks, way), mine, strict=True)])
        for a, b in zip(want, got, strict=True):
            assert torch.equal(a, b), way


def test_all_tokens_to_one_expert(ranks: list[DeviceLinks]) -> None:
    for way in (Way.ALL_GATHER, Way.ALL_TO_ALL):
        mine = [tokens(5, 1, r) for r in range(len(ranks))]
        for _, ids, _ in mine:
            ids.fill_(EXPERTS - 1)
        got = together([lambda e=e, t=t: step(e, *t) for e, t in zip(exchanges(ranks, way), mine, strict=True)])
        for out, t in zip(got, mine, strict=True):
            torch.testing.assert_close(out, experts(*t))


def test_all_to_all_carries_only_what_is_wanted_and_padding_wants_nothing(ranks: list[DeviceLinks]) -> None:
    mine = [tokens(2 + r, 2, r) for r in range(len(ranks))]

    def rows(exchange: DeviceExperts, t: tuple[torch.Tensor, ...]) -> torch.Tensor:
        exchange.begin(t[0].shape[0], eager=True, unrecorded=False)
        batch = exchange.dispatch(*t)
        exchange.combine(torch.zeros_like(batch.hidden), batch)
        return (batch.ids != NOT_HERE).any(1)

    for here in together(
        [lambda e=e, t=t: rows(e, t) for e, t in zip(exchanges(ranks, Way.ALL_TO_ALL), mine, strict=True)]
    ):
        assert bool(here.all())
    size = len(ranks)
    found = together([lambda e=e, t=t: rows(e, t) for e, t in zip(exchanges(ranks, Way.ALL_GATHER), mine, strict=True)])
    for here in found:
        padded = here.view(size, size + 1)  # the last rank has most: size + 1
        for rank in range(size):
            assert not bool(padded[rank, 2 + rank :].any())


def test_the_way_of_a_step_follows_from_what_all_ranks_share(
    ranks: list[DeviceLinks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_experts, "WORTH_A_STOP", 4)
    size = len(ranks)

    def way(exchange: DeviceExperts, n: int, k: int) -> bool:
        exchange.begin(n, eager=True, unrecorded=False)
        return exchange._all_to_all(k)

    def ways(rows: list[int], k: int) -> list[bool]:
        return together([lambda e=e, n=n: way(e, n, k) for e, n in zip(exchanges(ranks), rows, strict=True)])

    assert ways([4] + [0] * (size - 1), 1) == [True] * size  # one rank has enough for a stop of all
    assert ways([3] * size, 1) == [False] * size
    assert ways([9] * size, size) == [False] * size  # nearly every token goes everywhere


def test_a_step_that_is_recorded_has_one_shape(ranks: list[DeviceLinks]) -> None:
    """More rows than any rank has tokens, and no length that the host must read, whatever way was asked for."""

    def recorded(exchange: DeviceExperts, n: int) -> tuple[StepOfAll, torch.Size, torch.Tensor]:
        found = exchange.begin(n, eager=False, unrecorded=exchange.placement.ep_rank == 1)
        exchange.pad(8)
        mine = tokens(8, 3, exchange.placement.ep_rank)
        batch = exchange.dispatch(*mine)
        out = exchange.combine(experts(batch.hidden, batch.ids, batch.weights, exchange.placement.local.start), batch)
        torch.testing.assert_close(out, experts(*mine), rtol=1e-5, atol=1e-6)
        return found, batch.hidden.shape, out

    jobs = [lambda e=e, r=r: recorded(e, r) for r, e in enumerate(exchanges(ranks, Way.ALL_TO_ALL))]
    for found, shape, _ in together(jobs):
        assert found == StepOfAll(tokens=len(ranks) - 1, eager=False, unrecorded=True)
        assert shape == (8 * len(ranks), HIDDEN)


def test_a_step_that_is_larger_than_what_was_begun_is_an_error(ranks: list[DeviceLinks]) -> None:
    exchange = exchanges(ranks)[0]
    exchange.pad(2)
    with pytest.raises(ValueError, match="3 tokens in a step that was begun for 2"):
        exchange.dispatch(*tokens(3, 2, 0))


def test_a_pass_alone_exchanges_nothing_and_is_as_wide_as_a_step_of_all() -> None:
    with meshes(2) as made:  # not linked
        exchange = exchanges([DeviceLinks(mesh, CPU, "gloo", STORE) for mesh in made])[1]
        mine = tokens(3, 2, 0)
        with exchange.alone():
            batch = exchange.dispatch(*mine)
            assert batch.hidden.shape == (6, HIDDEN)
            assert exchange.combine(torch.zeros_like(batch.hidden), batch).shape == mine[0].shape
        exchange.pad(3)
        with pytest.raises(ExchangeError, match="no group"):
            layer(exchange, *mine)  # type: ignore[arg-type]


def test_a_placement_for_another_group_is_refused() -> None:
    with meshes(2) as made, pytest.raises(ValueError, match="rank 0 of 3"):
        DeviceExperts(DeviceLinks(made[1], CPU, "gloo", STORE), ExpertPlacement(EXPERTS, 3, 0))


def test_each_epoch_has_keys_of_its_own_in_one_store() -> None:
    with meshes(2) as made:
        links = [DeviceLinks(mesh, CPU, "gloo", STORE) for mesh in made]
        form(made)
        together([link.join for link in links])
        store, port = links[0]._server, links[0]._own_store[1]
        for mesh, link in zip(made, links, strict=True):
            mesh.leave()
            link.leave()
            assert link.group == 0
            with pytest.raises(ExchangeError, match="no group"):
                link.all_gather(torch.ones(1))
        form(made, epoch=2)
        assert together([link.join for link in links]) == [None, None]
        assert [link.group for link in links] == [2, 2]
        assert links[0]._server is store and links[0]._own_store[1] == port
        got = together([lambda i=i, link=link: link.all_gather(torch.full((1,), i)) for i, link in enumerate(links)])
        assert [g.tolist() for g in got] == [[0, 1], [0, 1]]
        for link in links:
            link.leave()


def test_two_ranks_on_one_gpu_are_named_before_nccl_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(device_links, "device_identity", lambda device, rank: "GPU 1234" if rank else "GPU 99")
    monkeypatch.setattr(DeviceLinks, "_make", lambda self, *args: asked.append(self.mesh.rank))
    with meshes(3) as made:
        form(made)
        found = together([DeviceLinks(mesh, CPU, "nccl", STORE).join for mesh in made])
    for error in found:
        assert isinstance(error, ConfigError)
        assert "ranks 1 and 2 compute on one GPU (GPU 1234)" in str(error)
        assert "leave out --enable-expert-parallel" in str(error)
    assert asked == []


def test_ranks_of_one_launch_on_one_gpu_are_refused_before_the_weights_are_read() -> None:
    check_own_device("cuda:0", 1, 4)
    with pytest.raises(ConfigError, match=r"2 of this launch's 4 ranks would compute on cuda:1.*--data-parallel-size"):
        check_own_device("cuda:1", 2, 4)


def test_a_store_that_cannot_listen_names_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, meshes(2) as made:
        form(made)
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"rendezvous store.*port {port}.*--data-parallel-rpc-port"):
            DeviceLinks(made[0], CPU, "gloo", ("127.0.0.1", port)).join()


def test_a_rank_that_is_lost_while_devices_are_linked_ends_the_wait() -> None:
    with meshes(2) as made:
        form(made)

        def vanish() -> None:
            mesh = made[1]
            mesh.swap(device_links.Kind.SYNC, [[device_links._PORT.pack(0) + b"elsewhere"]] * 2)
            mesh.leave()

        error, _ = together([DeviceLinks(made[0], CPU, "gloo", STORE).join, vanish])
        assert isinstance(error, ExchangeError) and "rank 1 left group 1" in str(error)


def test_links_that_do_not_come_about_are_given_up_in_time() -> None:
    with meshes(2) as made:
        form(made)

        def silent() -> None:  # stays in the group, and never comes to the store
            made[1].swap(device_links.Kind.SYNC, [[device_links._PORT.pack(0) + b"elsewhere"]] * 2)

        error, _ = together([DeviceLinks(made[0], CPU, "gloo", STORE, join_s=0.3).join, silent])
        assert isinstance(error, ExchangeError)
        assert "were not linked within 0 s" in str(error) or "cannot be linked" in str(error)


@dataclasses.dataclass
class NeverDone:
    """A point that the device does not come to."""

    asked: int = 0

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 5000


def waiting(mesh: Mesh) -> DeviceLinks:
    """Links whose device is behind with a collective."""
    links = DeviceLinks(mesh, CPU, "gloo", STORE, event=NeverDone)
    links._pending = True
    return links


def test_the_host_waits_for_the_device_until_a_rank_is_lost() -> None:
    with meshes(2) as made:
        form(made)
        links = waiting(made[0])
        made[1].leave()
        with pytest.raises(ExchangeError, match="rank 1 left group 1"):
            links.settle()


def test_the_host_waits_for_the_device_until_the_head_tells_of_another_group() -> None:
    with meshes(2) as made:
        form(made)
        links = waiting(made[0])
        made[0].announce(table(made, 2, without=1))
        with pytest.raises(ExchangeError, match="group 1 is over"):
            links.settle()


def test_the_host_goes_on_when_the_device_is_done_and_does_not_wait_twice() -> None:
    with meshes(2) as made:
        form(made)
        events: list[NeverDone] = []

        def event() -> NeverDone:
            events.append(NeverDone(asked=4990))
            return events[-1]

        links = DeviceLinks(made[0], CPU, "gloo", STORE, event=event)
        links.settle()
        assert events == []  # nothing was told
        links._pending = True
        links.settle()
        links.settle()
        assert len(events) == 1 and events[0].asked == 5001


def test_a_replayed_step_is_waited_for_though_no_collective_passed_here() -> None:
    with meshes(2) as made:
        form(made)
        links = DeviceLinks(made[0], CPU, "gloo", STORE, event=NeverDone)
        exchange = DeviceExperts(links, ExpertPlacement(EXPERTS, 2, 0))
        exchange.settle()  # nothing was told
        exchange.pad(4)  # as before each replay
        made[1].leave()
        with pytest.raises(ExchangeError, match="rank 1 left group 1"):
            exchange.settle()


def test_a_peer_that_began_the_next_exchange_is_not_taken_for_lost() -> None:
    with meshes(2) as made:
        form(made)
        made[1]._links[0].sock.send(b"x")
        made[0].check()
        made[1].leave()
        with pytest.raises(ExchangeError, match="rank 1 left"):
            made[0].check()
