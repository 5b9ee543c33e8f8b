"""Links between the devices of all ranks of a group: a process group of torch.distributed for each epoch.

The mesh (mesh.py) stays: it says who belongs to an epoch, carries what the hosts agree on, and notices who leaves. A
collective itself does not: one that waits for a lost peer waits for ever. So whoever waits here looks at the mesh
meanwhile, and a group is left by abort, which ends what the device still waits for.

The code is the same for NCCL and for gloo, where tests show it on CPUs. With NCCL a collective is something the device
was told, in order with all else, and only `settle` has the host wait; with gloo the host waits in each.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dpi_engine.config.errors import ConfigError
from dpi_engine.wire.errors import ExchangeError
from dpi_engine.wire.exchange.frames import Kind
from dpi_engine.wire.exchange.mesh import CannotListen, Mesh

log = logging.getLogger(__name__)

JOIN_S = 60.0
"""How long the devices of a group may take to be linked, once its hosts are."""
LOOK_EVERY_S = 0.002
"""How often a wait looks whether a peer has left."""
NAP_S = 20e-6

# torch's watchdog would end the process when a peer is lost. The mesh notices, and the group is left by abort.
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_PORT = struct.Struct("<H")


class Event(Protocol):
    """A point in what a device was told."""

    def record(self) -> None: ...
    def query(self) -> bool: ...


class DeviceLinks:
    """Collectives between devices of the ranks of `mesh`, one device each; `backend` is nccl or gloo.

    `store`: IP and port where rank 0 keeps the rendezvous store; that of the other ranks is not looked at. All methods
    belong to the thread that computes. `event` makes events of the device's current stream (None: CUDA's on a CUDA
    device; elsewhere the host waits in each collective).
    """

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        backend: str,
        store: tuple[str, int],
        *,
        join_s: float = JOIN_S,
        event: Callable[[], Event] | None = None,
    ) -> None:
        if backend not in ("nccl", "gloo"):
            raise ValueError(f"backend: expected nccl or gloo, got '{backend}'")
        self.mesh, self.device, self.backend = mesh, device, backend
        self.group = 0
        """Epoch of the process group that stands; 0 while there is none."""
        self._own_store, self._join_s = store, join_s
        self._server: dist.Store | None = None
        self._pg: Any = None
        self._left: list[Any] = []
        self._event = event or (torch.cuda.Event if device.type == "cuda" else None)
        self._pending = False

    # -- a group -----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Link the devices under the epoch of the mesh's links. Every rank calls it when these stand.

        Raises ExchangeError: a peer left, or the links did not come about in time. Raises ConfigError, which no further
        try mends: two ranks compute on one device; CannotListen: the store's port cannot be had.
        """
        self.leave()
        port = self._open_store() if self.mesh.rank == 0 else 0
        port = self._meet(port)
        epoch, host = self.mesh.group, self.mesh.host_of(0)
        made: list[Any] = []
        given_up = threading.Event()

        def make() -> None:
            try:
                made.append(self._make(epoch, host, port))
                if given_up.is_set():
                    made[0].abort()
            except Exception as error:  # RuntimeError of torch, of many kinds
                made.append(error)

        # In a thread: neither the store nor NCCL can be told to give up. One left behind ends by its own time-out.
        thread = threading.Thread(target=make, name=f"links-of-group-{epoch}", daemon=True)
        end = time.monotonic() + self._join_s
        thread.start()
        try:
            while thread.is_alive():
                thread.join(LOOK_EVERY_S * 5)
                self.mesh.check()
                if time.monotonic() > end:
                    raise ExchangeError(f"the devices of group {epoch} were not linked within {self._join_s:.0f} s")
        except ExchangeError:
            given_up.set()
            raise
        if isinstance(made[0], Exception):
            self.mesh.check()  # a lost peer is the better reason
            raise ExchangeError(f"the devices of group {epoch} cannot be linked: {made[0]}") from made[0]
        self._pg, self.group = made[0], epoch
        log.info("group %d: the devices of %d ranks are linked by %s", epoch, self.mesh.size, self.backend)

    def _open_store(self) -> int:
        """The port of the store that this rank keeps as long as it lives."""
        host, port = self._own_store
        if self._server is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((host, port))
                listener.listen(max(128, self.mesh.size))
            except OSError as error:
                listener.close()
                raise CannotListen(
                    error.errno,
                    f"cannot keep the rendezvous store of the expert exchange on {host} port {port}: {error.strerror}; "
                    "it follows --data-parallel-rpc-port: free it or give another",
                ) from None
            self._own_store = (host, int(listener.getsockname()[1]))
            # Bound here, lest torch listen on all addresses. The store closes the descriptor.
            self._server = dist.TCPStore(
                host, self._own_store[1], is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
                timeout=timedelta(seconds=self._join_s),
            )  # fmt: skip
        return self._own_store[1]

    def _meet(self, port: int) -> int:
        """Tell all ranks this one's device, and get the store's port. Raises ConfigError where two have one device."""
        mine = _PORT.pack(port) + device_identity(self.device, self.mesh.rank).encode()
        found = [bytes(payload) for payload in self.mesh.swap(Kind.SYNC, [[mine]] * self.mesh.size)]
        found[self.mesh.rank] = mine
        if any(len(payload) < _PORT.size for payload in found):
            raise ExchangeError("a rank sent no device: it does not run the same release")
        owners: dict[bytes, int] = {}
        for rank, payload in enumerate(found):
            first = owners.setdefault(payload[_PORT.size :], rank)
            if first != rank:
                raise ConfigError(
                    f"ranks {first} and {rank} compute on one GPU ({payload[_PORT.size :].decode(errors='replace')}), "
                    "and NCCL links one rank for each GPU: give each rank a GPU of its own (fewer ranks, or other "
                    "CUDA_VISIBLE_DEVICES), or leave out --enable-expert-parallel"
                )
        return int(_PORT.unpack(found[0][: _PORT.size])[0])

    def _make(self, epoch: int, host: str, port: int) -> Any:
        """A process group in which one collective has already gone through. Raises what torch does."""
        wait = timedelta(seconds=self._join_s)
        server = self._server
        store = server or dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
        under = dist.PrefixStore(f"dpi/{epoch}", store)
        rank, size, deadline = self.mesh.rank, self.mesh.size, timedelta(seconds=self.mesh.deadline_s)
        pg: Any
        if self.backend == "nccl":
            for name, value in NCCL_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            torch.cuda.set_device(self.device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = deadline
            pg = dist.ProcessGroupNCCL(under, rank, size, options)
            pg.eager_connect_single_device(self.device)
        else:
            own = self._own_store[0] if server is not None else _own_address(host, port)
            gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = deadline
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
            pg = dist.ProcessGroupGloo(under, rank, size, gloo)
        mine = torch.tensor([rank], dtype=torch.int32, device=self.device)
        everyone = torch.empty(size, dtype=torch.int32, device=self.device)
        pg._allgather_base(everyone, mine).wait()
        if everyone.tolist() != list(range(size)):
            raise RuntimeError(f"ranks answered as {everyone.tolist()}")
        return pg

    def leave(self) -> None:
        """Give up the group, whatever its devices wait for. Nothing happens without one."""
        pg, self._pg, self.group, self._pending = self._pg, None, 0, False
        if pg is None:
            return
        pg.abort()
        if self.backend == "nccl":
            torch.cuda.synchronize(self.device)  # what was told in vain ends now
        else:
            self._left.append(pg)  # it waits for its threads when it goes, and they perhaps for a frozen peer

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x [n, ...] below each other in order of ranks: [size * n, ...]. n is the same on all."""
        out = x.new_empty(self.mesh.size * x.shape[0], *x.shape[1:])
        if x.shape[0]:
            self._run(lambda pg: pg._allgather_base(out, x))
        return out

    def all_to_all(self, x: Tensor, receive: Sequence[int], send: Sequence[int]) -> Tensor:
        """Rows of x [sum(send), ...] in order of the ranks that get them -> [sum(receive), ...] in order of those that
        sent them. The others' numbers must fit: what one sends is what the other receives."""
        out = x.new_empty(sum(receive), *x.shape[1:])
        self._run(lambda pg: pg.alltoall_base(out, x, list(receive), list(send)))
        return out

    def _run(self, call: Callable[[Any], Any]) -> None:
        if self._pg is None:
            raise ExchangeError("this rank's device has no group")
        began = time.monotonic()
        try:
            work = call(self._pg)
            if self._event is None:
                self._until(work.is_completed, began)
            work.wait()  # on CUDA the stream waits, not the host
        except RuntimeError as error:
            if isinstance(error, ExchangeError):
                raise
            self.mesh.check()
            raise ExchangeError(f"a collective of group {self.group} failed: {error}") from error
        finally:
            self.mesh.waited_s += time.monotonic() - began
        self.mesh.exchanges += 1
        self._pending = self._event is not None

    def told(self) -> None:
        """The device is about to be told collectives that do not come through here: those of a recorded step."""
        self._pending = self._event is not None

    def settle(self) -> None:
        """Wait until the device has done what it was told, collectives among it. Raises ExchangeError: it never will.

        Before anything that would have the host wait for the device and could not be told to stop.
        """
        if not self._pending:
            return
        assert self._event is not None
        began = time.monotonic()
        event = self._event()
        event.record()
        self._until(event.query, began)
        self._pending = False
        self.mesh.waited_s += time.monotonic() - began

    def _until(self, done: Callable[[], bool], began: float) -> None:
        look = began + LOOK_EVERY_S
        while not done():
            now = time.monotonic()
            if now >= look:
                self.mesh.check()
                look = now + LOOK_EVERY_S
                if now - began > self.mesh.deadline_s:
                    raise ExchangeError(
                        f"a collective of group {self.group} did not end within {self.mesh.deadline_s:.0f} s"
                    )
            time.sleep(NAP_S)


def device_identity(device: torch.device, rank: int) -> str:
    """What tells `device` from every other of all machines. CPUs take part as often as wanted: they count by rank."""
    if device.type != "cuda":
        return f"cpu of rank {rank}"
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"GPU {torch.cuda.get_device_properties(device).uuid} of machine {machine}"


def _own_address(host: str, port: int) -> str:
    """The address of this machine on the way to `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
