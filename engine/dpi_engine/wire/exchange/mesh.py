"""Links between all ranks of a group, one TCP connection per pair, and the collectives over them.

The thread that computes also sends and receives: everything is non-blocking, one poll waits for all links at once, and
a rank reads while it writes, so that large frames in both directions cannot block each other. A rank takes one frame of
each link per exchange and leaves the next in the kernel's buffers, whose size bounds what a fast rank can be ahead.

A wait ends with what it waits for, with the news that a peer left (its connection closed, or the head said so), or at
its deadline; the last two raise ExchangeError. Whoever leaves closes all its links, so the others learn of it at once.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dpi_engine.wire.counters import WireCounters
from dpi_engine.wire.errors import ExchangeError, WireError
from dpi_engine.wire.exchange.frames import (
    HEADER_BYTES,
    HELLO_BYTES,
    Header,
    Hello,
    Kind,
    decode_header,
    decode_hello,
    encode_header,
    encode_hello,
)
from dpi_engine.wire.group import GroupTable
from dpi_engine.wire.sockets import Waker, need_descriptors, split_tcp, tcp_endpoint

log = logging.getLogger(__name__)

SOCKET = "exchange"
DEADLINE_S = 240.0
"""An exchange that has not ended by then is given up. Longer than any step may take, shorter than what the launcher
calls a hang (300 s), so that the missing ranks are named first."""
MAX_PAYLOAD = 1 << 30
HELLO_S = 3.0
"""How long a connection may take to say who it is."""
RETRY_S = 0.1
MAX_STRANGERS = 64
"""Connections beside those of the group that may wait to be understood."""
MAX_PIECES = 64  # of one sendmsg; more go out in further calls

Buffer = bytes | bytearray | memoryview


class CannotListen(OSError):
    """The port of the exchange cannot be had; the text names it and what to change."""


@dataclass(slots=True)
class _Link:
    """A connection to one rank, with what is being sent and received in the exchange in progress."""

    rank: int
    sock: socket.socket
    fd: int
    out: list[memoryview] = field(default_factory=list)
    head: bytearray = field(default_factory=lambda: bytearray(HEADER_BYTES))
    got: int = 0
    header: Header | None = None
    body: bytearray = field(default_factory=bytearray)
    done: bool = True

    def begin(self, pieces: list[memoryview]) -> None:
        self.out, self.got, self.header, self.done = pieces, 0, None, False

    @property
    def events(self) -> int:
        return (0 if self.done else select.POLLIN) | (select.POLLOUT if self.out else 0)

    def send(self) -> None:
        """As much as the kernel takes. Raises OSError."""
        while self.out:
            try:
                sent = self.sock.sendmsg(self.out[:MAX_PIECES])
            except BlockingIOError:
                return
            while sent and self.out:
                first = self.out[0]
                if sent < first.nbytes:
                    self.out[0] = first[sent:]
                    break
                sent -= first.nbytes
                self.out.pop(0)

    def receive(self, check: Callable[[Header], None], max_payload: int) -> None:
        """As much of this exchange's frame as is there. Raises OSError, EOFError and WireError."""
        while not self.done:
            if self.header is None:
                view = memoryview(self.head)[self.got :]
            else:
                view = memoryview(self.body)[self.got : self.header.length]
            try:
                n = self.sock.recv_into(view)
            except BlockingIOError:
                return
            if not n:
                raise EOFError
            self.got += n
            if self.header is None and self.got == HEADER_BYTES:
                self.header = decode_header(self.head, max_payload)
                check(self.header)
                self.got = 0
                if len(self.body) < self.header.length:
                    self.body = bytearray(self.header.length)
            if self.header is not None and self.got == self.header.length:
                self.done = True

    @property
    def payload(self) -> memoryview:
        assert self.header is not None
        return memoryview(self.body)[: self.header.length]


@dataclass(slots=True)
class _Stranger:
    """A connection that has not shown who it is, or that waits for this rank to learn of its epoch."""

    sock: socket.socket
    until: float
    data: bytearray = field(default_factory=bytearray)
    hello: Hello | None = None


@dataclass(slots=True)
class _Dial:
    """A connection being made to a lower rank."""

    rank: int
    retry_at: float = 0.0
    sock: socket.socket | None = None
    until: float = 0.0
    greeted: bool = False
    data: bytearray = field(default_factory=bytearray)


class Mesh:
    """The links of rank `rank` in a group of `size`, which listen on `host` (an IP) and `port` (0: any free one).

    All methods but `announce` belong to the thread that computes. `max_payload`: bytes of the largest frame that a
    peer may send. `deadline_s`: seconds that one exchange may take. Raises CannotListen when the port cannot be bound,
    TooFewDescriptors when this process may not have so many links.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        host: str,
        port: int,
        *,
        max_payload: int = MAX_PAYLOAD,
        deadline_s: float = DEADLINE_S,
        counters: WireCounters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        need_descriptors(2 * size, f"expert exchange of {size} ranks")
        self.rank, self.size = rank, size
        self.max_payload, self.deadline_s = max_payload, deadline_s
        self.counters = counters or WireCounters()
        self.group = 0
        """Epoch of the links that stand; 0 while there are none."""
        self.left = 0
        """Highest epoch whose links this rank has given up."""
        self.seen = 0
        """Highest epoch that it was told of."""
        self.exchanges = 0
        self.waited_s = 0.0
        """Seconds spent in exchanges, waiting for others included."""
        self._clock = clock
        self._table: GroupTable | None = None
        self._number = 0
        self._links: dict[int, _Link] = {}
        self._dials: dict[int, _Dial] = {}
        self._met: dict[int, socket.socket] = {}  # links of the epoch that is being formed
        self._strangers: list[_Stranger] = []
        self._hangups = select.poll()  # of the links that stand
        self._waker = Waker()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen(max(128, size))
            self._listener.setblocking(False)
        except OSError as error:
            self._listener.close()
            raise CannotListen(
                error.errno,
                f"cannot listen for the expert exchange on {host} port {port}: {error.strerror}; "
                "it follows --data-parallel-rpc-port: free it or give another",
            ) from None
        self.endpoint = tcp_endpoint(host, int(self._listener.getsockname()[1]))

    # -- any thread --------------------------------------------------------------------------------------------------

    def announce(self, table: GroupTable) -> None:
        """The head told of an epoch. An older one than is known is passed over."""
        if table.epoch > self.seen:
            self._table, self.seen = table, table.epoch
            self._waker.wake()

    # -- forming -----------------------------------------------------------------------------------------------------

    def host_of(self, rank: int) -> str:
        """The IP where `rank` takes links. Raises ExchangeError where the group is not known to be complete."""
        table = self._table
        if table is None or len(table.members) != self.size:
            raise ExchangeError(f"group {self.group} is over: not all of its ranks are there")
        return split_tcp(table.members[rank].endpoint)[0]

    @property
    def missing(self) -> str:
        """Who keeps the group from being complete, in words; empty when it is complete or nothing is known."""
        return self._table.missing if self._table is not None else ""

    def formable(self) -> bool:
        """A complete group is announced, and its epoch is not over for this rank."""
        table = self._table
        return table is not None and table.epoch > self.left and len(table.members) == self.size

    def form(self, timeout: float, fds: Sequence[int] = ()) -> bool:
        """Go on linking up with the announced group for at most `timeout` seconds. True when all links stand.

        Returns early for news and when one of `fds` is readable.
        """
        end = self._clock() + timeout
        while True:
            if self._turn_to_table() and len(self._met) == self.size - 1:
                self._adopt()
                return True
            now = self._clock()
            if now >= end:
                return False
            if self._poll_forming(end - now, fds):
                return False

    def _turn_to_table(self) -> bool:
        """True while there is a complete group to be linked; begins its dials when it is new."""
        table = self._table
        if table is None or not self.formable():
            self._stop_forming()
            return False
        if set(self._dials) | {-1} != set(range(self.rank)) | {-1} or self._forming_epoch != table.epoch:
            self._stop_forming()
            self._dials = {rank: _Dial(rank) for rank in range(self.rank)}
            self._forming_epoch = table.epoch
            for stranger in list(self._strangers):
                if stranger.hello is not None:
                    self._judge(stranger)
        now = self._clock()
        for dial in self._dials.values():
            if dial.sock is None and dial.rank not in self._met and now >= dial.retry_at:
                self._dial(dial, table)
        return True

    _forming_epoch = 0

    def _dial(self, dial: _Dial, table: GroupTable) -> None:
        dial.retry_at, dial.until = self._clock() + RETRY_S, self._clock() + 2 * HELLO_S
        dial.greeted, dial.data = False, bytearray()
        host, port = split_tcp(table.members[dial.rank].endpoint)
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect((host, port))
        except BlockingIOError:
            pass
        except OSError:
            sock.close()
            return
        dial.sock = sock

    def _poll_forming(self, timeout: float, fds: Sequence[int]) -> bool:
        """Wait for and handle one round of events. True when the caller should look around."""
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._waker.fd, select.POLLIN)
        for fd in fds:
            poller.register(fd, select.POLLIN)
        dials = {d.sock.fileno(): d for d in self._dials.values() if d.sock is not None and d.rank not in self._met}
        for fd, dial in dials.items():
            poller.register(fd, select.POLLIN if dial.greeted else select.POLLOUT)
        strangers = {s.sock.fileno(): s for s in self._strangers}
        for fd in strangers:
            poller.register(fd, select.POLLIN)
        ready = dict(poller.poll(max(1, int(min(timeout, RETRY_S) * 1000))))
        if self._waker.fd in ready:
            self._waker.clear()
        if self._listener.fileno() in ready:
            self._accept()
        for fd, dial in dials.items():
            if fd in ready:
                self._on_dial(dial)
        for fd, stranger in strangers.items():
            if fd in ready:
                self._on_stranger(stranger)
        now = self._clock()
        for stranger in [s for s in self._strangers if s.until < now]:
            self._drop(stranger, "silent")
        for dial in self._dials.values():
            if dial.sock is not None and dial.until < now and dial.rank not in self._met:
                self._hang_up(dial)
        return any(fd in ready for fd in fds)

    def _hang_up(self, dial: _Dial) -> None:
        if dial.sock is not None:
            dial.sock.close()
        dial.sock, dial.retry_at = None, self._clock() + RETRY_S

    def _on_dial(self, dial: _Dial) -> None:
        table, sock = self._table, dial.sock
        if table is None or sock is None:
            return
        try:
            if not dial.greeted:
                if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(error, "connect")
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hello = Hello(self.rank, dial.rank, self._forming_epoch, self.size, table.key)
                sock.send(encode_hello(hello))  # 52 bytes into an empty buffer: all or an error
                dial.greeted = True
                return
            chunk = sock.recv(HELLO_BYTES - len(dial.data))
            if not chunk:
                raise EOFError
            dial.data += chunk
            if len(dial.data) < HELLO_BYTES:
                return
            answer = decode_hello(dial.data)
            self._check_hello(answer, table)
            if answer.rank != dial.rank:
                raise WireError("bad_rank", f"exchange: rank {answer.rank} answered in place of {dial.rank}")
        except BlockingIOError:
            return
        except WireError as error:
            self.counters.count(SOCKET, error.code)
            self._hang_up(dial)
        except (OSError, EOFError):
            self._hang_up(dial)
        else:
            self._met[dial.rank], dial.sock = sock, None

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setblocking(False)
            if len(self._strangers) >= MAX_STRANGERS + self.size:
                self.counters.count(SOCKET, "too_many_connections")
                sock.close()
                continue
            self._strangers.append(_Stranger(sock, self._clock() + HELLO_S))

    def _on_stranger(self, stranger: _Stranger) -> None:
        if stranger.hello is not None:  # it has said all it may say before an answer: more means that it has gone
            self._drop(stranger, None)
            return
        try:
            chunk = stranger.sock.recv(HELLO_BYTES - len(stranger.data))
            if not chunk:
                raise EOFError
            stranger.data += chunk
            if len(stranger.data) < HELLO_BYTES:
                return
            stranger.hello = decode_hello(stranger.data)
        except BlockingIOError:
            return
        except WireError as error:
            self._drop(stranger, error.code)
        except (OSError, EOFError):
            self._drop(stranger, None)
        else:
            self._judge(stranger)

    def _judge(self, stranger: _Stranger) -> None:
        """Take a connection that has said HELLO into the group, let it wait for an epoch to come, or refuse it."""
        hello, table = stranger.hello, self._table
        assert hello is not None
        if table is None or hello.group > table.epoch:
            # Its head was quicker. The news that tells of the epoch comes in a moment.
            stranger.until = self._clock() + HELLO_S
            return
        try:
            self._check_hello(hello, table)
            if not self.rank < hello.rank < self.size:
                raise WireError("bad_rank", f"exchange: rank {hello.rank} has no business to call rank {self.rank}")
        except WireError as error:
            self._drop(stranger, error.code)
            return
        if not self.formable() or self._forming_epoch != table.epoch:
            return  # not begun to form: judged again then
        if (old := self._met.pop(hello.rank, None)) is not None:
            old.close()
        try:
            stranger.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stranger.sock.send(encode_hello(Hello(self.rank, hello.rank, table.epoch, self.size, table.key)))
        except OSError:
            self._drop(stranger, None)
            return
        self._strangers.remove(stranger)
        self._met[hello.rank] = stranger.sock

    def _check_hello(self, hello: Hello, table: GroupTable) -> None:
        if hello.group != table.epoch:
            raise WireError("stale_epoch", f"exchange: a link of epoch {hello.group}, this is {table.epoch}")
        if not hmac.compare_digest(hello.key, table.key):
            raise WireError("bad_key", "exchange: a link with another key than this group's")
        if hello.to != self.rank or hello.size != self.size:
            raise WireError("bad_rank", f"exchange: a link to rank {hello.to} of {hello.size} came to {self.rank}")

    def _drop(self, stranger: _Stranger, code: str | None) -> None:
        if code is not None:
            self.counters.count(SOCKET, code)
        stranger.sock.close()
        if stranger in self._strangers:
            self._strangers.remove(stranger)

    def _stop_forming(self) -> None:
        for dial in self._dials.values():
            if dial.sock is not None:
                dial.sock.close()
        for sock in self._met.values():
            sock.close()
        self._dials, self._met, self._forming_epoch = {}, {}, 0

    def _adopt(self) -> None:
        self._links = {rank: _Link(rank, sock, sock.fileno()) for rank, sock in sorted(self._met.items())}
        self._hangups = select.poll()
        for link in self._links.values():
            self._hangups.register(link.fd, select.POLLRDHUP)
        self.group, self._number = self._forming_epoch, 0
        self._met, self._dials, self._forming_epoch = {}, {}, 0

    # -- links that stand --------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Give up the links of this epoch; the peers see them close. Nothing happens without links."""
        if self.group:
            self.left = max(self.left, self.group)
        for link in self._links.values():
            link.sock.close()
        self._links, self.group = {}, 0

    def abandon(self) -> None:
        """The head is lost, or has given this rank up: whatever epoch was announced is over."""
        self.leave()
        self._stop_forming()
        self.left = max(self.left, self.seen)

    def close(self) -> None:
        self.leave()
        self._stop_forming()
        for stranger in list(self._strangers):
            self._drop(stranger, None)
        self._listener.close()
        self._waker.close()

    def check_news(self) -> None:
        """Raises ExchangeError if the head has announced another epoch than that of the links."""
        if self.group and self.seen > self.group:
            missing = f": {self.missing}" if self.missing else ""
            raise ExchangeError(f"group {self.group} is over, the head announced group {self.seen}{missing}")

    def check(self) -> None:
        """Raises ExchangeError where a peer has left or the group is over; reads nothing and waits for nothing.

        For exchanges that go other ways than these links, whose waits do not end when a peer is gone.
        """
        self.check_news()
        by_fd = {link.fd: link for link in self._links.values()}
        for fd, _ in self._hangups.poll(0):
            raise self._gone(by_fd[fd])

    def rest(self, timeout: float, fds: Sequence[int] = ()) -> bool:
        """Wait until a peer has begun an exchange (True), or one of `fds` is readable or the time is up (False).

        Raises ExchangeError when a peer left or the group is over.
        """
        self.check_news()
        poller = select.poll()
        poller.register(self._waker.fd, select.POLLIN)
        for fd in fds:
            poller.register(fd, select.POLLIN)
        by_fd = {link.fd: link for link in self._links.values()}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(max(0, int(timeout * 1000)))}
        if self._waker.fd in ready:
            self._waker.clear()
            self.check_news()
        began = False
        for fd in ready & by_fd.keys():
            try:
                if not by_fd[fd].sock.recv(1, socket.MSG_PEEK):
                    raise EOFError
                began = True
            except BlockingIOError:
                continue
            except (OSError, EOFError):
                raise self._gone(by_fd[fd]) from None
        return began

    def _gone(self, link: _Link) -> ExchangeError:
        return ExchangeError(f"rank {link.rank} left group {self.group}: its connection closed")

    def swap(self, kind: Kind, parts: Sequence[Sequence[Buffer]]) -> list[memoryview]:
        """One exchange: `parts[r]`, in pieces, to each other rank r, and what each of them sent to this one, by rank.

        The entry of this rank is empty. What is returned is valid until the next exchange. Raises ExchangeError; the
        links are of no use then: call `leave`.
        """
        if not self.group:
            raise ExchangeError("this rank has no group")
        began = self._clock()
        self.exchanges += 1
        self._number += 1
        number, group = self._number, self.group

        def check(header: Header, rank: int) -> None:
            if (header.kind, header.rank, header.group, header.number) != (kind, rank, group, number):
                raise WireError(
                    "out_of_step",
                    f"expected {kind.name} {number} of rank {rank} in group {group}, got {header.kind.name} "
                    f"{header.number} of rank {header.rank} in group {header.group}",
                )

        links = list(self._links.values())
        for link in links:
            pieces = [p if isinstance(p, memoryview) else memoryview(p) for p in parts[link.rank]]
            pieces = [p.cast("B") if p.format != "B" or p.ndim != 1 else p for p in pieces if p.nbytes]
            length = sum(p.nbytes for p in pieces)
            link.begin([memoryview(encode_header(kind, self.rank, group, number, length)), *pieces])
        for link in links:
            self._pump(link, check)
        waiting = {link.fd: link for link in links if link.events}
        if waiting:
            self._wait(waiting, check, began, kind)
        self.waited_s += self._clock() - began
        found = [memoryview(b"")] * self.size
        for link in links:
            found[link.rank] = link.payload
        return found

    def _wait(self, waiting: dict[int, _Link], check: Callable[[Header, int], None], began: float, kind: Kind) -> None:
        poller = select.poll()
        poller.register(self._waker.fd, select.POLLIN)
        for fd, link in waiting.items():
            poller.register(fd, link.events)
        while waiting:
            left = began + self.deadline_s - self._clock()
            if left <= 0:
                names = ", ".join(str(link.rank) for link in waiting.values())
                raise ExchangeError(
                    f"exchange {self._number} ({kind.name}) of group {self.group} did not end within "
                    f"{self.deadline_s:.0f} s; still missing: ranks {names}"
                )
            for fd, _ in poller.poll(int(left * 1000) + 1):
                if fd == self._waker.fd:
                    self._waker.clear()
                    self.check_news()
                    continue
                link = waiting[fd]
                before = link.events
                self._pump(link, check)
                if not link.events:
                    del waiting[fd]
                    poller.unregister(fd)
                elif link.events != before:
                    poller.modify(fd, link.events)

    def _pump(self, link: _Link, check: Callable[[Header, int], None]) -> None:
        try:
            link.send()
            link.receive(lambda header: check(header, link.rank), self.max_payload)
        except WireError as error:
            self.counters.count(SOCKET, error.code)
            log.error("rank %d: exchange with rank %d: %s", self.rank, link.rank, error)
            raise ExchangeError(f"rank {link.rank} is out of step: {error.detail}") from None
        except (OSError, EOFError):
            raise self._gone(link) from None

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum of all ranks' `values` (as many on each, 64 bits). Raises ExchangeError."""
        form = struct.Struct(f"<{len(values)}q")
        mine = form.pack(*values)
        found = self.swap(Kind.SYNC, [[mine]] * self.size)
        columns = [tuple(values)]
        for rank, payload in enumerate(found):
            if rank == self.rank:
                continue
            if payload.nbytes != form.size:
                self.counters.count(SOCKET, "malformed")
                raise ExchangeError(f"rank {rank} sent {payload.nbytes} bytes of a sync, expected {form.size}")
            columns.append(form.unpack(payload))
        return [max(column) for column in zip(*columns, strict=True)]

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self.close()
