"""What every combination of flags that choose a balancing mode is: vLLM's outcome, and ours where it differs.

The rows are those that were seen with vLLM 0.32, by running its argument reader, and its checks for multi-port mode.
`dense` differences are about models that are no mixtures of experts, which vLLM refuses in external balancing.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dpi_engine.config.errors import ConfigError, ParallelError
from dpi_engine.config.parallel import ParallelConfig
from dpi_engine.config.settings import parse_serve

DOC = Path(__file__).parents[2] / "docs/reference/differences-from-vllm.md"

# flags, mode, first rank, local ranks, API servers, coordinator (of a dense model)
ACCEPTED_AS_BY_VLLM = [
    ("", "internal", 0, 1, 1, False),
    ("-dp 2", "internal", 0, 2, 2, True),
    ("-dp 2 -dpl 0", "internal", 0, 0, 2, True),
    ("-dp 2 -dpl 2", "internal", 0, 2, 2, True),
    ("-dp 4 -dpl 2", "internal", 0, 2, 4, True),
    ("-dp 2 -dpr 0", "internal", 0, 2, 2, True),
    ("-dp 4 -dpl 2 --api-server-count 1", "internal", 0, 2, 1, True),
    ("-dp 4 -dpl 2 -dpr 2 --headless", "internal", 2, 2, 0, True),
    ("-dp 4 -dpl 1 -dpr 3 --headless", "internal", 3, 1, 0, True),
    ("-dp 4 -dpl 2 --headless", "internal", 0, 2, 0, True),
    ("-dp 2 --headless --api-server-count 0", "internal", 0, 2, 0, True),
    ("-dp 4 -dpl 2 -dph", "hybrid", 0, 2, 2, True),
    ("-dp 4 -dpl 2 -dph -dpr 2", "hybrid", 2, 2, 2, True),
    ("-dp 4 -dpl 2 -dpr 2", "hybrid", 2, 2, 2, True),
    ("-dp 4 -dpl 2 -dpr 0", "hybrid", 0, 2, 2, True),
    ("-dp 8 -dpl 4 -dph --api-server-count 2", "hybrid", 0, 4, 2, True),
    ("-dp 2 -dpl 2 -dph", "internal", 0, 2, 2, True),
]

REFUSED_AS_BY_VLLM = [
    ("-dp 0", ["--data-parallel-size", "1..65535", "'0'"]),
    ("-dpp 70000", ["--data-parallel-rpc-port", "1..65535", "70000"]),
    ("-dpp 0", ["--data-parallel-rpc-port", "1..65535"]),
    ("-dpb foo", ["--data-parallel-backend", "mp, ray", "foo"]),
    ("-dp 2 -dpl 3", ["--data-parallel-size-local 3", "--data-parallel-size 2"]),
    ("-dp 2 -dpn 2", ["rank 2", "0..1", "--data-parallel-rank"]),
    ("-dp 4 -dpl 2 -dpr 4 --headless", ["rank 4..5", "0..3", "--data-parallel-start-rank"]),
    ("-dp 2 -dpn 0 -dpl 2", ["--data-parallel-size-local says 2", "set it to 1"]),
    ("-dp 2 -dpe", ["--data-parallel-external-lb needs --data-parallel-rank"]),
    ("-dpn 0", ["--data-parallel-rank", "--data-parallel-size of at least 2"]),
    ("-dp 2 -dph", ["--data-parallel-hybrid-lb needs --data-parallel-size-local"]),
    ("-dp 4 -dpl 2 --headless -dph", ["--headless", "--data-parallel-hybrid-lb", "drop either"]),
    ("-dp 4 -dpl 2 -dph -dpe -dpn 0", ["--data-parallel-hybrid-lb", "--data-parallel-rank", "keep one"]),
    ("-dp 4 -dpl 2 -dph -dpn 0", ["--data-parallel-hybrid-lb", "--data-parallel-rank", "keep one"]),
    ("-dp 4 -dpl 2 -dph -dpm", ["--data-parallel-hybrid-lb", "--data-parallel-multi-port-external-lb", "keep one"]),
    ("-dp 4 -dpl 2 -dpm -dpn 0", ["--data-parallel-rank", "--data-parallel-multi-port-external-lb", "keep one"]),
    ("-dp 4 -dpl 2 -dpm -dpe -dpn 0", ["--data-parallel-multi-port-external-lb", "keep one"]),
    ("-dp 1 -dpl 1 -dpm", ["--data-parallel-multi-port-external-lb needs --data-parallel-size of at least 2"]),
    ("-dp 4 -dpm", ["--data-parallel-size-local is not given", "at least 2"]),
    ("-dp 4 -dpl 1 -dpm", ["--data-parallel-size-local says 1", "--data-parallel-rank"]),
    ("-dp 4 -dpl 8 -dpm", ["--data-parallel-size-local 8", "--data-parallel-size 4"]),
    ("-dp 5 -dpl 2 -dpm", ["--data-parallel-size 5", "not a multiple", "--data-parallel-size-local 2"]),
    ("-dp 4 -dpl 2 -dpm -dpr 3", ["rank 3..4", "0..3", "--data-parallel-start-rank"]),
    ("-dp 4 -dpl 2 -dpm --api-server-count 2", ["one API server per rank", "--api-server-count says 2"]),
    ("-dp 4 -dpl 2 -dpm --data-parallel-supervisor-port 8001", ["port 8001", "--data-parallel-supervisor-port"]),
    ("-dp 4 -dpl 2 -dpm --data-parallel-supervisor-port 8000", ["port 8000", "--data-parallel-supervisor-port"]),
    ("-dp 4 -dpl 2 -dpm --uds /tmp/x", ["--uds", "--port"]),
    ("-dp 4 -dpl 2 -dpm --grpc", ["--grpc"]),
    ("-dp 4 -dpl 2 -dpm --ssl-keyfile k", ["--ssl-keyfile", "TLS"]),
    ("-dp 2 --headless --api-server-count 2", ["--headless", "--api-server-count says 2"]),
    ("-dp 4 -dpl 2 -dpm --headless", ["--headless", "--data-parallel-multi-port-external-lb"]),
    ("-dp 4 -dpn 0 -dpr 1", ["--data-parallel-rank", "--data-parallel-start-rank", "exclude"]),
    ("--nnodes 2 -dpb ray", ["--nnodes"]),
    ("-dp 2 --enable-fault-tolerance", ["--enable-fault-tolerance"]),
    ("-dp 2 --enable-elastic-ep", ["--enable-elastic-ep"]),
    ("-dp 2 --dp-sync-interval 0", ["--dp-sync-interval"]),
]

# What differs: flags, what vLLM makes of them, and either what ours is (as above) or words of its refusal.
DIFFERENT = [
    ("-dp 2 -dpn 1", "external", ("external", 1, 1, 1, False)),
    ("-dp 2 -dpn 0 -dpe", "external", ("external", 0, 1, 1, False)),
    ("-dp 4 -dpl 1 -dpr 1", "dies late", ("external", 1, 1, 1, False)),
    ("-dp 4 -dpl 1 -dph", "dies late", ("external", 0, 1, 1, False)),
    ("-dp 4 -dpl 2 -dpm", "multi-port", ("multi-port", 0, 2, 2, False)),
    ("-dp 4 -dpl 2 -dpm -dpr 2", "multi-port", ("multi-port", 2, 2, 2, False)),
    ("-dp 4 -dpl 2 -dpm --api-server-count 1", "multi-port", ("multi-port", 0, 2, 2, False)),
    ("-dp 4 -dpl 0 -dph", "hybrid", ["--data-parallel-size-local 0", "without ranks"]),
    ("-dp 2 --api-server-count 0", "headless", ["--api-server-count 0", "--headless"]),
    ("-dp 2 -dpl 0 --headless", "nothing", ["--headless", "--data-parallel-size-local 0"]),
    ("-dp 2 -dpn 0 --headless", "headless", ["--headless", "--data-parallel-rank", "--data-parallel-start-rank"]),
    ("--nnodes 2 --node-rank 1 -dp 4", "internal", ["--nnodes", "-dpr"]),
    ("--nnodes 4 --node-rank 3 -dpe", "external", ["--nnodes", "-dpr"]),
    ("-dp 2 -dpb ray", "ray", ["--data-parallel-backend ray", "mp"]),
    ("-dp 2 -dpa 0.0.0.0", "internal", ["0.0.0.0", "no other launch"]),
    ("-dp 4 -dpl 2 -dpm --dp-supervisor-probe-interval-s 1", "multi-port", ["--dp-supervisor-probe-interval-s"]),
]


def outcome(flags: str) -> tuple[str, int, int, int, bool]:
    parallel = ParallelConfig.from_settings(parse_serve(["m", *flags.split()]), 64)
    assert parallel.size_local == len(parallel.local_ranks)
    return (
        str(parallel.mode),
        parallel.start_rank,
        parallel.size_local,
        parallel.api_server_count,
        parallel.needs_coordinator(moe=False),
    )


def refusal(flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_serve(["m", *flags.split()])
    return str(caught.value)


@pytest.mark.parametrize(("flags", "mode", "start", "local", "servers", "coordinator"), ACCEPTED_AS_BY_VLLM)
def test_what_vllm_accepts_is_accepted_as_the_same(
    flags: str, mode: str, start: int, local: int, servers: int, coordinator: bool
) -> None:
    assert outcome(flags) == (mode, start, local, servers, coordinator)


@pytest.mark.parametrize(("flags", "words"), REFUSED_AS_BY_VLLM)
def test_what_vllm_refuses_is_refused_with_what_to_change(flags: str, words: list[str]) -> None:
    text = refusal(flags)
    for word in words:
        assert word in text


@pytest.mark.parametrize(("flags", "theirs", "ours"), DIFFERENT)
def test_what_differs_is_as_decided(flags: str, theirs: str, ours: tuple[str, int, int, int, bool] | list[str]) -> None:
    if isinstance(ours, tuple):
        assert outcome(flags) == ours
        return
    text = refusal(flags)
    for word in ours:
        assert word in text


def test_every_difference_stands_in_the_table_of_differences() -> None:
    text = DOC.read_text("utf-8").partition("## How flags choose a mode")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    shown = [re.findall(r"`([^`]+)`", row.split("|")[1]) for row in rows]
    listed = {flags for spans in shown for flags in spans}
    assert listed == {flags for flags, *_ in DIFFERENT}


# ------------------------------------------------------------------------------------------------- what follows of it


def layout(flags: str) -> ParallelConfig:
    return ParallelConfig.from_settings(parse_serve(["m", *flags.split()]), 64)


@pytest.mark.parametrize(
    ("flags", "head", "member", "served"),
    [
        ("-dp 4 -dpl 2", True, False, [0, 1, 2, 3]),
        ("-dp 4 -dpl 2 -dpr 2 --headless", False, False, []),
        ("-dp 4 -dpl 2 -dph", True, False, [0, 1]),
        ("-dp 4 -dpl 2 -dph -dpr 2", False, True, [2, 3]),
        ("-dp 4 -dpn 0", True, False, [0]),
        ("-dp 4 -dpn 3", False, True, [3]),
        ("-dp 4 -dpl 2 -dpm", True, False, [0, 1]),
        ("-dp 4 -dpl 2 -dpm -dpr 2", False, True, [2, 3]),
    ],
)
def test_who_leads_and_which_ranks_a_launch_serves(flags: str, head: bool, member: bool, served: list[int]) -> None:
    parallel = layout(flags)
    assert (parallel.is_head, parallel.is_member, parallel.served_ranks) == (head, member, served)


@pytest.mark.parametrize("flags", ["-dp 4 -dpl 2", "-dp 4 -dpl 2 -dph", "-dp 2 -dpn 0", "-dp 4 -dpl 2 -dpm", ""])
def test_a_coordinator_is_needed_by_several_ranks_unless_dense_and_balanced_from_outside(flags: str) -> None:
    parallel = layout(flags)
    outside = parallel.mode in ("external", "multi-port")
    assert parallel.needs_coordinator(moe=True) is (parallel.size > 1)
    assert parallel.needs_coordinator(moe=False) is (parallel.size > 1 and not outside)


def test_ports_of_a_multi_port_launch_are_consecutive_with_a_rank_each() -> None:
    parallel = layout("-dp 8 -dpl 4 -dpm -dpr 4 --port 9000")
    assert [parallel.http_port(9000, i) for i in range(parallel.api_server_count)] == [9000, 9001, 9002, 9003]
    assert [parallel.front_end_ranks(i) for i in range(4)] == [[4], [5], [6], [7]]


@pytest.mark.parametrize("flags", ["-dp 4 -dpl 1 -dpr 1", "-dp 2 -dpl 1 -dph", "-dp 2 -dpl 2 -dph"])
def test_a_mode_other_than_asked_for_is_noted(flags: str) -> None:
    assert len(layout(flags).notes) == 1
    assert str(layout(flags).mode) in layout(flags).notes[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("-dp 4 -dpl 2 -dpm --port 8080", ["port 8081", "--management-port", "rank 1"]),
        ("-dp 4 -dpl 2 -dpm --port 65535", ["port 65536", "1..65535", "Lower --port"]),
        ("-dp 2 -dpl 2 -dpm --data-parallel-supervisor-port 8081", ["port 8081", "--data-parallel-supervisor-port"]),
        ("-dp 4 -dpl 2 -dph --port 29551", ["port 29551", "coordinator to front ends"]),
        ("-dp 2 -dpn 0 --port 29550", ["port 29550", "handshake"]),
    ],
)
def test_ports_of_a_mode_that_clash_are_named(flags: str, words: list[str]) -> None:
    with pytest.raises(ParallelError) as caught:
        parse_serve(["m", *flags.split()])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("flags", ["-dp 4 -dpl 2 -dph --port 29560", "-dp 2 -dpn 1 --port 29550"])
def test_ports_that_a_mode_does_not_bind_are_free_for_others(flags: str) -> None:
    assert parse_serve(["m", *flags.split()]).port >= 29550
