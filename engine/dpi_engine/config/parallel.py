"""Which ranks a launch runs, in which mode, and on which ports. Pure: no I/O, no clock."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from dpi_engine.config.errors import ParallelError

if TYPE_CHECKING:
    from dpi_engine.config.settings import Settings

MAX_DEFAULT_API_SERVERS = 64
_EXPERT_EXCHANGE = 200  # offset of local rank 0's expert exchange port
_WILDCARDS = ("0.0.0.0", "::", "[::]", "*")


class Mode(enum.StrEnum):
    """Who spreads requests over ranks: one front end for all, one per launch, or something outside.

    External: one rank and one endpoint per launch. Multi-port: several ranks per launch, an endpoint for each.
    """

    INTERNAL = "internal"
    HYBRID = "hybrid"
    EXTERNAL = "external"
    MULTI_PORT = "multi-port"


OUTSIDE = (Mode.EXTERNAL, Mode.MULTI_PORT)
"""Modes in which a front end has one rank, so that something outside spreads requests."""


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of one launch. `size` counts the ranks of all launches; this one runs `size_local` from `start_rank` on.

    `api_server_count` is 0 exactly on headless launches. `notes` tell what was derived against the flags' first look.
    """

    mode: Mode = Mode.INTERNAL
    size: int = 1
    size_local: int = 1
    start_rank: int = 0
    headless: bool = False
    api_server_count: int = 1
    address: str = "127.0.0.1"
    rpc_port: int = 29550
    notes: tuple[str, ...] = ()

    @classmethod
    def from_settings(cls, settings: Settings, cores: int) -> ParallelConfig:
        """Derive the layout; `cores` bounds the default number of API servers.

        Raises ParallelError naming the flags that contradict each other and what to change.
        """
        _refuse_contradictions(settings)
        size, headless = settings.data_parallel_size, settings.headless
        mode = _mode(settings)
        local, start = _local(settings, mode)
        if headless and local == 0:
            raise ParallelError("--headless with --data-parallel-size-local 0 would run nothing: give at least 1")
        if mode is not Mode.INTERNAL and local == 0:
            raise ParallelError(
                "--data-parallel-size-local 0 with hybrid balancing (--data-parallel-hybrid-lb, or "
                "--data-parallel-start-rank without --headless) leaves this launch's front end without ranks: give at "
                "least 1, or leave those flags out for a head that serves the ranks of other launches"
            )
        if local > size:
            raise ParallelError(
                f"--data-parallel-size-local {local} is more than --data-parallel-size {size}: "
                "the size counts the ranks of all launches together. Raise it or lower the local size."
            )
        if start + local > size or start >= size:
            last = f"..{start + local - 1}" if local > 1 else ""
            raise ParallelError(
                f"rank {start}{last} of this launch is out of range: expected ranks within 0..{size - 1} "
                f"(--data-parallel-size {size}). Lower {_start_flag(settings)} or --data-parallel-size-local, "
                "or raise the size."
            )
        return cls(
            mode=mode,
            size=size,
            size_local=local,
            start_rank=start,
            headless=headless,
            api_server_count=_api_servers(settings, mode, local, cores),
            address=_address(settings.data_parallel_address),
            rpc_port=settings.data_parallel_rpc_port,
            notes=_notes(settings, mode, local),
        )

    @property
    def local_ranks(self) -> list[int]:
        """Global numbers of the ranks this launch runs, ascending; empty on a head without ranks."""
        return list(range(self.start_rank, self.start_rank + self.size_local))

    @property
    def is_head(self) -> bool:
        """This launch serves the handshake and, where there is one, the coordinator."""
        return self.start_rank == 0 and not self.headless

    @property
    def remote_ranks(self) -> list[int]:
        """Ranks that other launches run."""
        local = set(self.local_ranks)
        return [rank for rank in range(self.size) if rank not in local]

    @property
    def served_ranks(self) -> list[int]:
        """Ranks that this launch's front ends send requests to."""
        if self.headless:
            return []
        return list(range(self.size)) if self.mode is Mode.INTERNAL else self.local_ranks

    @property
    def is_member(self) -> bool:
        """This launch has front ends of its own and belongs to a group whose head is another launch."""
        return not self.headless and not self.is_head

    def ranks_drain(self, together: bool) -> bool:
        """Told to stop, the ranks of this launch are still needed when its front ends are done, if they have any.

        together: ranks step together. Front ends of other launches then have requests that need these ranks too; with
        internal balancing all front ends are the head's, which ends last.
        """
        shared = together and self.mode is not Mode.INTERNAL and bool(self.remote_ranks)
        return self.headless or shared

    def front_end_ranks(self, index: int) -> list[int]:
        """Ranks that API server `index` of this launch sends requests to."""
        return [self.start_rank + index] if self.mode is Mode.MULTI_PORT else self.served_ranks

    def http_port(self, base: int, index: int) -> int:
        """Port of API server `index`: all share `base`, but for one port after the other in multi-port mode."""
        return base + index if self.mode is Mode.MULTI_PORT else base

    def needs_coordinator(self, moe: bool = False) -> bool:
        """Some launch must run a coordinator: with several ranks, unless they are dense and balanced from outside."""
        return self.size > 1 and (moe or self.mode not in OUTSIDE)


class Ports(msgspec.Struct, frozen=True):
    """The fixed ports of a head, from its handshake port on."""

    handshake: int

    @classmethod
    def of(cls, settings: Settings) -> Ports:
        return cls(settings.data_parallel_rpc_port)

    @property
    def frontend_stats_publish(self) -> int:
        """Coordinator to front ends."""
        return self.handshake + 1

    @property
    def coordinator_input(self) -> int:
        """Coordinator to engines."""
        return self.handshake + 2

    @property
    def coordinator_output(self) -> int:
        """Engines to coordinator."""
        return self.handshake + 3

    @property
    def store(self) -> int:
        """Where rank 0 keeps the rendezvous store by which the devices of ranks that share experts are linked."""
        return self.handshake + 4

    @property
    def rendezvous(self) -> list[int]:
        """Where vLLM ranks that share experts find each other, on the machine of rank 0."""
        return list(range(self.handshake + 5, self.handshake + 10))

    def requests(self, api_server: int) -> int:
        """Where API server process `api_server` hands requests to engines."""
        return self.handshake + 10 + 2 * api_server

    def outputs(self, api_server: int) -> int:
        """Where engines bring outputs to API server process `api_server`."""
        return self.handshake + 11 + 2 * api_server

    def expert_exchange(self, local_rank: int) -> int:
        """Where the expert exchange of the launch's `local_rank`-th rank listens."""
        return self.handshake + _EXPERT_EXCHANGE + local_rank

    def bound(self, settings: Settings, parallel: ParallelConfig, moe: bool = True) -> list[tuple[str, int]]:
        """(what it is for, port) of every port this launch binds, but for `exchange`.

        The name begins with `--` where it is for HTTP.
        """
        named = [("--management-port", settings.management_port)]
        if parallel.headless:
            return named
        named.append(("--port", settings.port))
        if parallel.mode is Mode.MULTI_PORT:
            named += [
                (f"--port {settings.port} + {i} (rank {parallel.start_rank + i})", settings.port + i)
                for i in range(1, parallel.size_local)
            ]
            named.append(("--data-parallel-supervisor-port", settings.data_parallel_supervisor_port))
        base = f"--data-parallel-rpc-port {self.handshake}"
        if parallel.is_head:
            named.append((f"handshake ({base})", self.handshake))
            if parallel.mode is not Mode.INTERNAL and parallel.needs_coordinator(moe):
                named.append((f"coordinator to front ends ({base} + 1)", self.frontend_stats_publish))
            if parallel.mode is Mode.INTERNAL or parallel.needs_coordinator(moe):
                named += [
                    (f"coordinator to ranks ({base} + 2)", self.coordinator_input),
                    (f"ranks to coordinator ({base} + 3)", self.coordinator_output),
                ]
        if parallel.mode is not Mode.INTERNAL:
            return named  # requests stay within the launch
        for i in range(parallel.api_server_count):
            named.append((f"requests of API server {i} ({base} + {10 + 2 * i})", self.requests(i)))
            named.append((f"outputs of API server {i} ({base} + {11 + 2 * i})", self.outputs(i)))
        return named

    def exchange(self, parallel: ParallelConfig, own_address: bool) -> dict[int, tuple[str, int]]:
        """What it is for, and the port, by rank of this launch where ranks share experts.

        `own_address`: no other launch has the address. Those that share one, as on a loopback, tell their ranks apart
        by the rank itself.
        """
        base = f"--data-parallel-rpc-port {self.handshake}"
        found = {}
        for local_rank, rank in enumerate(parallel.local_ranks):
            port = self.expert_exchange(local_rank if own_address else rank)
            found[rank] = (f"expert exchange of rank {rank} ({base} + {port - self.handshake})", port)
        return found

    def check(self, settings: Settings, parallel: ParallelConfig) -> None:
        """Raise ParallelError if a port of this launch lies outside 1..65535 or serves two ends; both are named."""
        shared = settings.enable_expert_parallel and parallel.size > 1
        exchange = list(self.exchange(parallel, own_address=True).values()) if shared else []
        if shared and parallel.is_head and settings.device != "cpu":
            base = f"--data-parallel-rpc-port {self.handshake}"
            exchange.append((f"rendezvous store of the experts' devices ({base} + 4)", self.store))
        self._distinct(self.bound(settings, parallel) + exchange)

    def check_exchange(self, settings: Settings, parallel: ParallelConfig, own_address: bool) -> None:
        """The same once it is known whether this launch shares its address with others. Raises ParallelError."""
        exchange = list(self.exchange(parallel, own_address).values())
        self._distinct(self.bound(settings, parallel) + exchange)

    @staticmethod
    def _distinct(ports: list[tuple[str, int]]) -> None:
        taken: dict[int, str] = {}
        for what, port in ports:
            if not 1 <= port <= 65535:
                lower = "--port" if what.startswith("--port") else "--data-parallel-rpc-port"
                raise ParallelError(f"port {port} for {what} is out of range: expected 1..65535. Lower {lower}.")
            if port in taken:
                raise ParallelError(
                    f"port {port} is wanted twice: for {taken[port]} and for {what}. Change one of them."
                )
            taken[port] = what


def _mode(settings: Settings) -> Mode:
    """What the flags ask for, by vLLM's rules: a hybrid launch of one rank is external, one of all ranks internal."""
    if settings.data_parallel_multi_port_external_lb:
        return Mode.MULTI_PORT
    if settings.data_parallel_external_lb or settings.data_parallel_rank is not None:
        return Mode.EXTERNAL
    local, start = settings.data_parallel_size_local, settings.data_parallel_start_rank
    hybrid = settings.data_parallel_hybrid_lb or (local is not None and start is not None and not settings.headless)
    if not hybrid or local == settings.data_parallel_size:
        return Mode.INTERNAL
    return Mode.EXTERNAL if local == 1 else Mode.HYBRID


def _local(settings: Settings, mode: Mode) -> tuple[int, int]:
    """(ranks of this launch, its first rank)"""
    if settings.data_parallel_rank is not None:
        return 1, settings.data_parallel_rank
    local = settings.data_parallel_size_local
    return settings.data_parallel_size if local is None else local, settings.data_parallel_start_rank or 0


def _notes(settings: Settings, mode: Mode, local: int) -> tuple[str, ...]:
    if mode is Mode.EXTERNAL and settings.data_parallel_rank is None:
        why = "hybrid balancing of one rank per launch (--data-parallel-size-local 1) is external balancing"
        return (f"{why}: this launch's endpoint has rank {settings.data_parallel_start_rank or 0} alone",)
    if mode is Mode.INTERNAL and settings.data_parallel_hybrid_lb and local == settings.data_parallel_size:
        return ("hybrid balancing with all ranks in one launch is internal balancing",)
    return ()


def _start_flag(settings: Settings) -> str:
    return "--data-parallel-start-rank" if settings.data_parallel_rank is None else "--data-parallel-rank"


def _refuse_contradictions(s: Settings) -> None:
    """Pairs of flags that vLLM refuses too."""
    external = s.data_parallel_external_lb or s.data_parallel_rank is not None
    asked = [
        flag
        for wanted, flag in (
            (s.data_parallel_hybrid_lb, "--data-parallel-hybrid-lb"),
            (external, "--data-parallel-rank" if s.data_parallel_rank is not None else "--data-parallel-external-lb"),
            (s.data_parallel_multi_port_external_lb, "--data-parallel-multi-port-external-lb"),
        )
        if wanted
    ]
    if len(asked) > 1:
        raise ParallelError(f"{' and '.join(asked)} ask for different balancing modes: keep one of them")
    if s.headless and asked:
        raise ParallelError(
            f"--headless runs ranks without a front end, and {asked[0]} asks for one: drop either. "
            "The first rank of a headless launch is given by --data-parallel-start-rank."
        )
    if s.data_parallel_rank is not None and s.data_parallel_start_rank is not None:
        raise ParallelError(
            "--data-parallel-rank (the one rank of an external launch) and --data-parallel-start-rank (the first of "
            "several) exclude each other: keep one of them"
        )
    if s.data_parallel_hybrid_lb and s.data_parallel_size_local is None:
        raise ParallelError("--data-parallel-hybrid-lb needs --data-parallel-size-local: how many ranks run here?")
    if s.data_parallel_multi_port_external_lb:
        _refuse_multi_port(s)
    if not external:
        return
    if s.data_parallel_rank is None:
        raise ParallelError("--data-parallel-external-lb needs --data-parallel-rank: which rank runs here?")
    if s.data_parallel_size_local not in (None, 1):
        raise ParallelError(
            f"--data-parallel-rank runs one rank here, --data-parallel-size-local says {s.data_parallel_size_local}: "
            "set it to 1 or leave it out"
        )
    if s.data_parallel_size == 1:
        raise ParallelError("--data-parallel-rank needs --data-parallel-size of at least 2; leave it out for one rank")


def _refuse_multi_port(s: Settings) -> None:
    flag, size, local = "--data-parallel-multi-port-external-lb", s.data_parallel_size, s.data_parallel_size_local
    if size < 2:
        raise ParallelError(f"{flag} needs --data-parallel-size of at least 2; leave it out for one rank")
    if local is None or local < 2:
        given = "is not given" if local is None else f"says {local}"
        raise ParallelError(
            f"{flag} runs several ranks here, and --data-parallel-size-local {given}: give at least 2, or one rank per "
            "launch with --data-parallel-rank"
        )
    if local <= size and size % local:
        raise ParallelError(
            f"{flag} needs as many ranks in every launch: --data-parallel-size {size} is not a multiple of "
            f"--data-parallel-size-local {local}. Change one of them."
        )
    if s.api_server_count not in (None, 1):
        raise ParallelError(
            f"{flag} runs one API server per rank, --api-server-count says {s.api_server_count}: leave it out"
        )


def _api_servers(settings: Settings, mode: Mode, local: int, cores: int) -> int:
    wanted = settings.api_server_count
    if settings.headless:
        if wanted:
            raise ParallelError(f"--headless runs no API server, --api-server-count says {wanted}: leave it out here")
        return 0
    if wanted == 0:
        raise ParallelError("--api-server-count 0 leaves no front end: give --headless for ranks alone, or at least 1")
    if mode is Mode.MULTI_PORT:
        return local
    if wanted is not None:
        return wanted
    over = {Mode.INTERNAL: settings.data_parallel_size, Mode.HYBRID: local, Mode.EXTERNAL: 1}[mode]
    # Each takes up to a core, and the ranks need some, too.
    return max(1, min(over, cores // 2, MAX_DEFAULT_API_SERVERS))


def _address(address: str) -> str:
    if address in _WILDCARDS:
        raise ParallelError(
            f"--data-parallel-address {address} is every address of a machine, which no other launch can connect to: "
            "give the head's own name or IP"
        )
    if "/" in address or any(c.isspace() for c in address) or (address.count(":") == 1 and "[" not in address):
        raise ParallelError(
            f"--data-parallel-address {address!r}: expected a name or an IP without scheme and port "
            "(the port is --data-parallel-rpc-port)"
        )
    return address
