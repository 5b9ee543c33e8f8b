"""What a child process of the launcher is told: one JSON document on its standard input, so no secret is in argv."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from dpi_engine.config.settings import Settings


class ChildKind(enum.StrEnum):
    ENGINE = "engine"
    API = "api"
    COORDINATOR = "coordinator"


class CoordinatorEndpoints(msgspec.Struct, kw_only=True):
    """Addresses of the coordinator's three sockets, as bound and as reached by local and by remote peers."""

    front_bind: list[str]
    back_bind: list[str]
    pull_bind: list[str]
    front_connect: str
    front_remote: str
    back_local: str
    pull_local: str
    back_remote: str
    pull_remote: str


class TensorPart(msgspec.Struct, kw_only=True):
    """What a worker of a rank is told beyond what the rank's first one was.

    `memory` and `channel` are file descriptors that it inherits: of the shared memory, of which `plan_bytes` are for
    the steps' inputs and the rest for partial results, and of a socket to the first worker. `store`: path of the file
    by which workers on GPUs find each other.
    """

    index: int
    size: int
    memory: int
    memory_bytes: int
    plan_bytes: int
    channel: int
    store: str
    dtype: str


class ChildSpec(msgspec.Struct, kw_only=True):
    """Everything one child needs. `index` is the rank of an engine, the number of an API server.

    `handshake`: of whoever routes to the rank, then of the group's head where that is another launch. `parent`: the
    process that starts it, with which it ends: the launcher, or the first worker of its rank.
    """

    kind: ChildKind
    index: int
    name: str
    control: str
    run_dir: str
    settings: Settings
    model_path: str = ""
    cache_dir: str = ""
    pod: str = ""
    parent: int = 0
    declared: dict[str, Any] = {}
    incarnation: int = 0
    threads: int = 1
    local_ranks: int = 1
    # engines
    local_rank: int = 0
    handshake: list[str] = []
    local: bool = True
    drains: bool = False  # after SIGTERM it goes on until nobody needs it, for the shutdown timeout at most
    tensor: TensorPart | None = None  # of a worker that shares the rank's layers, but for the first
    exchange: list[Any] = []  # [IP, port] where a rank that steps together with the others takes their links
    # API servers
    port: int = 0
    clients: int = 1  # front ends that share its ranks
    client_index: int = 0  # among those
    first_rank: int = 0
    num_ranks: int = 1
    waves: bool = False  # ranks step together; of the coordinator too
    head: str = ""  # of the group, where that is another launch
    inputs_bind: list[str] = []
    outputs_bind: list[str] = []
    stats_connect: str | None = None
    # coordinator
    coordinator: CoordinatorEndpoints | None = None
