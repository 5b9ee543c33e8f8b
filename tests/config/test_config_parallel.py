"""Which ranks a launch runs: every combination of flags is either a layout or a refusal that says what to change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as hs

from dpi_engine.config.errors import ParallelError
from dpi_engine.config.parallel import Mode, ParallelConfig, Ports
from dpi_engine.config.settings import MAX_API_SERVERS, Settings, parse_serve

KEYS = {
    "dp": "data_parallel_size",
    "dpl": "data_parallel_size_local",
    "dpr": "data_parallel_start_rank",
    "dpn": "data_parallel_rank",
    "dph": "data_parallel_hybrid_lb",
    "dpe": "data_parallel_external_lb",
    "dpm": "data_parallel_multi_port_external_lb",
    "asc": "api_server_count",
    "dpa": "data_parallel_address",
    "headless": "headless",
}


def layout(cores: int = 64, **flags: object) -> ParallelConfig:
    return ParallelConfig.from_settings(Settings(model="m", **{KEYS[k]: v for k, v in flags.items()}), cores)


@pytest.mark.parametrize(
    ("flags", "mode", "ranks", "head", "coordinator"),
    [
        ({}, "internal", [0], True, False),
        ({"dp": 2}, "internal", [0, 1], True, True),
        ({"dp": 2, "dpl": 0}, "internal", [], True, True),
        ({"dp": 1, "dpl": 0}, "internal", [], True, False),
        ({"dp": 4, "dpl": 2}, "internal", [0, 1], True, True),
        ({"dp": 4, "dpl": 4, "dpr": 0}, "internal", [0, 1, 2, 3], True, True),
        ({"dp": 2, "dpr": 0}, "internal", [0, 1], True, True),
        ({"dp": 4, "dpl": 2, "dpr": 2, "headless": True}, "internal", [2, 3], False, True),
        ({"dp": 4, "dpl": 1, "dpr": 1, "headless": True}, "internal", [1], False, True),
        ({"dp": 2, "dpl": 2, "dpr": 0, "headless": True}, "internal", [0, 1], False, True),
        ({"dp": 2, "dpl": 1, "headless": True}, "internal", [0], False, True),
        ({"headless": True}, "internal", [0], False, False),
        ({"headless": True, "asc": 0}, "internal", [0], False, False),
        ({"dp": 2, "dph": True, "dpl": 2}, "internal", [0, 1], True, True),
        ({"dp": 4, "dph": True, "dpl": 2}, "hybrid", [0, 1], True, True),
        ({"dp": 4, "dph": True, "dpl": 2, "dpr": 2}, "hybrid", [2, 3], False, True),
        ({"dp": 4, "dpl": 2, "dpr": 2}, "hybrid", [2, 3], False, True),
        ({"dp": 2, "dph": True, "dpl": 1}, "external", [0], True, False),
        ({"dp": 4, "dpl": 1, "dpr": 1}, "external", [1], False, False),
        ({"dp": 2, "dpn": 1}, "external", [1], False, False),
        ({"dp": 2, "dpn": 0, "dpl": 1, "dpe": True}, "external", [0], True, False),
    ],
)
def test_accepted_combinations(flags, mode, ranks, head, coordinator):
    got = layout(**flags)
    assert (got.mode, got.local_ranks, got.is_head, got.needs_coordinator()) == (mode, ranks, head, coordinator)
    assert sorted(got.local_ranks + got.remote_ranks) == list(range(got.size))
    assert got.needs_coordinator(moe=True) == (got.size > 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"dp": 2, "dpl": 3}, ["--data-parallel-size-local 3", "--data-parallel-size 2", "Raise it or lower"]),
        ({"dp": 4, "dpl": 2, "dpr": 4, "headless": True}, ["rank 4..5", "0..3", "--data-parallel-start-rank"]),
        ({"dp": 4, "dpl": 2, "dpr": 3, "headless": True}, ["rank 3..4", "0..3"]),
        ({"dp": 4, "dpr": 2, "headless": True}, ["rank 2..5", "--data-parallel-size-local"]),
        ({"dp": 2, "dpl": 0, "headless": True}, ["--headless", "--data-parallel-size-local 0", "at least 1"]),
        ({"dp": 2, "headless": True, "asc": 2}, ["--headless", "--api-server-count says 2", "leave it out"]),
        ({"dp": 2, "headless": True, "asc": 1}, ["--headless", "--api-server-count says 1"]),
        ({"dp": 2, "asc": 0}, ["--api-server-count 0", "--headless"]),
        (
            {"dp": 4, "dpl": 2, "dph": True, "headless": True},
            ["--headless", "--data-parallel-hybrid-lb", "drop either"],
        ),
        ({"dp": 4, "dpn": 1, "headless": True}, ["--headless", "--data-parallel-rank", "--data-parallel-start-rank"]),
        ({"dp": 4, "dpl": 2, "dph": True, "dpe": True, "dpn": 0}, ["--data-parallel-hybrid-lb", "keep one"]),
        ({"dp": 4, "dpl": 2, "dpm": True, "dph": True}, ["--data-parallel-multi-port-external-lb", "keep one"]),
        ({"dp": 2, "dph": True}, ["--data-parallel-hybrid-lb needs --data-parallel-size-local"]),
        ({"dp": 2, "dpe": True}, ["--data-parallel-external-lb needs --data-parallel-rank"]),
        ({"dp": 2, "dpn": 0, "dpl": 2}, ["--data-parallel-size-local says 2", "set it to 1"]),
        ({"dp": 2, "dpn": 2}, ["rank 2 ", "0..1", "Lower --data-parallel-rank"]),
        ({"dp": 1, "dpn": 0}, ["--data-parallel-size of at least 2"]),
        ({"dp": 4, "dpn": 0, "dpr": 1}, ["exclude each other"]),
        ({"dpa": "0.0.0.0"}, ["0.0.0.0", "no other launch can connect"]),
        ({"dpa": "::"}, ["::", "no other launch can connect"]),
        ({"dpa": "tcp://h"}, ["'tcp://h'", "without scheme and port"]),
        ({"dpa": "h:29550"}, ["'h:29550'", "--data-parallel-rpc-port"]),
        ({"dpa": "a b"}, ["'a b'"]),
    ],
)
def test_refused_combinations(flags, words):
    with pytest.raises(ParallelError) as caught:
        layout(**flags)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1", "fd00::1", "[fd00::1]", "head-0.internal.ns.svc.cluster.local"])
def test_addresses_of_a_head(address):
    assert layout(dpa=address).address == address


@pytest.mark.parametrize(
    ("flags", "cores", "count"),
    [
        ({"dp": 1}, 8, 1),
        ({"dp": 2}, 8, 2),
        ({"dp": 8}, 2, 1),
        ({"dp": 8}, 1, 1),
        ({"dp": 8}, 4, 2),
        ({"dp": 2}, 2, 1),
        ({"dp": 4, "dpl": 0}, 16, 4),
        ({"dp": 4096}, 512, 64),
        ({"dp": 4, "asc": 3}, 1, 3),
        ({"dp": 8, "dpl": 4, "dph": True}, 16, 4),
        ({"dp": 8, "dpn": 1}, 16, 1),
        ({"dp": 8, "dpl": 4, "dpr": 4, "headless": True}, 16, 0),
    ],
)
def test_default_number_of_api_servers(flags, cores, count):
    assert layout(cores, **flags).api_server_count == count


@given(hs.integers(1, 50), hs.integers(0, 50) | hs.none(), hs.integers(0, 60) | hs.none(), hs.booleans())
def test_an_accepted_layout_is_within_range(size, local, start, headless):
    try:
        got = layout(dp=size, dpl=local, dpr=start, headless=headless)
    except ParallelError:
        return
    assert all(0 <= rank < size for rank in got.local_ranks)
    assert len(got.local_ranks) == got.size_local
    assert got.is_head == (not headless and got.start_rank == 0)
    assert (got.api_server_count == 0) == headless


@given(hs.lists(hs.integers(1, 5), min_size=1, max_size=6))
def test_a_head_and_its_headless_launches_cover_every_rank_once(shares):
    size, ranks, start = sum(shares), [], 0
    for i, share in enumerate(shares):
        flags = {"dp": size, "dpl": share} | ({"dpr": start, "headless": True} if i else {})
        ranks += layout(**flags).local_ranks
        start += share
    assert ranks == list(range(size))


def test_ports_follow_the_handshake_port():
    ports = Ports(29550)
    assert (ports.frontend_stats_publish, ports.coordinator_input, ports.coordinator_output) == (29551, 29552, 29553)
    assert ports.store == 29554
    assert [(ports.requests(i), ports.outputs(i)) for i in (0, 1)] == [(29560, 29561), (29562, 29563)]
    assert ports.expert_exchange(3) == 29753
    assert ports.outputs(MAX_API_SERVERS - 1) < ports.expert_exchange(0)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "8081"], ["port 8081", "--management-port", "--port"]),
        (["--port", "29550"], ["port 29550", "--port", "handshake"]),
        (["--management-port", "29552"], ["port 29552", "--management-port", "coordinator to ranks"]),
        (["-dp", "2", "--port", "29562"], ["port 29562", "--port", "requests of API server 1"]),
        (["-dpp", "65530"], ["port 65540", "1..65535", "Lower --data-parallel-rpc-port"]),
        (["-dpp", "7990"], ["port 8000", "--port", "requests of API server 0"]),
        (
            ["-dp", "2", "-ep", "-dpp", "65335"],
            ["port 65536", "expert exchange of rank 1", "Lower --data-parallel-rpc"],
        ),
        (["-dp", "2", "-ep", "--port", "29750"], ["port 29750", "--port", "expert exchange of rank 0"]),
        (["-dp", "4", "-dpl", "2", "-dpr", "2", "--headless", "-ep", "--management-port", "29751"], ["of rank 3"]),
    ],
)
def test_port_faults_name_both_uses(argv, words):
    with pytest.raises(ParallelError) as caught:
        parse_serve(["m", *argv])
    for word in words:
        assert word in str(caught.value)


def test_a_headless_launch_binds_only_its_management_port():
    got = parse_serve(["m", "-dp", "2", "-dpl", "1", "-dpr", "1", "--headless", "--port", "29550", "-dpp", "65530"])
    layout_ = ParallelConfig.from_settings(got, 2)
    assert Ports.of(got).bound(got, layout_) == [("--management-port", 8081)]


@given(hs.integers(1, 65535), hs.integers(1, 65535), hs.integers(1, 65535), hs.integers(1, 64))
def test_checked_ports_are_distinct_and_in_range(base, port, management, servers):
    s = Settings(
        model="m", data_parallel_rpc_port=base, port=port, management_port=management, api_server_count=servers
    )
    parallel = ParallelConfig.from_settings(s, 64)
    bound = [p for _, p in Ports.of(s).bound(s, parallel)]
    sound = len(bound) == len(set(bound)) and max(bound) <= 65535
    try:
        Ports.of(s).check(s, parallel)
    except ParallelError:
        assert not sound
    else:
        assert sound


def test_modes_read_as_words():
    assert [str(m) for m in Mode] == ["internal", "hybrid", "external", "multi-port"]
