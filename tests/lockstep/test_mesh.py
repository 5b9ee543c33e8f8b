"""Links between ranks: forming, collectives, and every way in which they end."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time

import pytest
from mesh_harness import KEY, PATIENCE, form, meshes, table, together, until_formed

from dpi_engine.wire.errors import ExchangeError, WireError
from dpi_engine.wire.exchange.frames import (
    HEADER_BYTES,
    HELLO_BYTES,
    Hello,
    Kind,
    decode_header,
    decode_hello,
    encode_header,
    encode_hello,
)
from dpi_engine.wire.exchange.mesh import Mesh
from dpi_engine.wire.sockets import split_tcp


def connect(mesh: Mesh) -> socket.socket:
    return socket.create_connection(split_tcp(mesh.endpoint), timeout=PATIENCE)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_ranks_agree_on_the_maximum(size: int) -> None:
    with meshes(size) as ranks:
        form(ranks)
        for turn in range(20):
            values = [[rank * turn, -rank, 2**40 + rank] for rank in range(size)]
            found = together([lambda m=m, v=v: m.all_reduce_max(v) for m, v in zip(ranks, values, strict=True)])
            assert found == [[max(column) for column in zip(*values, strict=True)]] * size


def test_each_rank_gets_what_each_other_one_sent_it_whatever_the_size() -> None:
    """Frames from nothing to far more than the kernel's buffers hold, in both directions at once."""
    size, rng = 3, random.Random(5)
    with meshes(size) as ranks:
        form(ranks)
        for _ in range(12):
            sent = [
                [rng.randbytes(rng.choice((0, 1, 31, 70_000, 5_000_000))) for _ in range(size)] for _ in range(size)
            ]

            def one(mesh: Mesh, sent: list[list[bytes]] = sent) -> list[bytes]:
                cut = [[p[: len(p) // 3], memoryview(p)[len(p) // 3 :]] for p in sent[mesh.rank]]
                return [bytes(view) for view in mesh.swap(Kind.TOKENS, cut)]

            got = together([lambda m=m: one(m) for m in ranks])
            for me in range(size):
                assert got[me] == [sent[r][me] if r != me else b"" for r in range(size)]


def test_a_fast_rank_is_held_back_by_the_buffers_of_a_slow_one() -> None:
    """One frame per exchange is taken; what a peer sends beyond waits in the kernel, not in this process."""
    with meshes(2) as ranks:
        form(ranks)
        fast, slow = ranks
        progress: list[int] = []

        def run() -> None:
            for number in range(8):
                fast.swap(Kind.TOKENS, [[], [bytes(30_000_000)]])
                progress.append(number)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        time.sleep(0.5)
        assert progress == []  # not even the first exchange can end without the other rank
        for number in range(8):
            assert slow.swap(Kind.TOKENS, [[b"x"], []])[0].nbytes == 30_000_000
            assert len(slow._links[0].body) == 30_000_000
            assert len(progress) <= number + 1
        thread.join(PATIENCE)
        assert progress == list(range(8))


def test_a_peer_that_leaves_ends_the_exchange_of_all_others_at_once() -> None:
    with meshes(4) as ranks:
        form(ranks)
        leaving = threading.Timer(0.2, ranks[2].leave)
        leaving.start()

        def one(mesh: Mesh) -> None:
            try:
                mesh.all_reduce_max([1])
            except ExchangeError:
                mesh.leave()
                raise

        found = together([lambda m=m: one(m) for m in ranks if m.rank != 2])
        assert all(isinstance(error, ExchangeError) for error in found)
        assert "rank 2 left group 1" in " ".join(map(str, found))
        assert [m.left for m in ranks] == [1] * 4 and [m.group for m in ranks] == [0] * 4
        form(ranks, epoch=2)  # and the same processes come together again
        assert together([lambda m=m: m.all_reduce_max([m.rank]) for m in ranks]) == [[3]] * 4


def test_news_of_the_head_end_an_exchange_that_waits_for_a_frozen_rank() -> None:
    with meshes(3) as ranks:
        form(ranks)
        timer = threading.Timer(0.3, lambda: [m.announce(table(ranks, 2, without=1)) for m in ranks])
        timer.start()
        found = together([lambda m=m: m.all_reduce_max([1]) for m in ranks if m.rank != 1])
        for error in found:
            assert isinstance(error, ExchangeError)
            assert "the head announced group 2: rank 1 (LOST)" in str(error)


def test_the_deadline_names_the_missing_ranks() -> None:
    with meshes(4, deadline_s=0.5) as ranks:
        form(ranks)
        found = together([lambda m=m: m.all_reduce_max([1]) for m in ranks if m.rank in (0, 3)])
        for error in found:
            assert isinstance(error, ExchangeError)
            assert "exchange 1 (SYNC) of group 1 did not end within" in str(error)
            assert "still missing: ranks 1, 2" in str(error)


def test_a_resting_rank_hears_that_another_began_and_that_one_left() -> None:
    with meshes(2) as ranks:
        form(ranks)
        resting, busy = ranks
        assert resting.rest(0.05) is False
        thread = threading.Thread(target=lambda: together([lambda: busy.all_reduce_max([7])]), daemon=True)
        thread.start()
        assert any(resting.rest(1.0) for _ in range(30))
        assert resting.all_reduce_max([3]) == [7]
        thread.join(PATIENCE)
        busy.leave()
        with pytest.raises(ExchangeError, match="rank 1 left group 1"):
            for _ in range(30):
                resting.rest(1.0)


def test_another_wakes_a_resting_rank_and_one_that_forms() -> None:
    waker, other = socket.socketpair()
    with meshes(2) as ranks:
        form(ranks)
        other.send(b"x")
        began = time.monotonic()
        assert ranks[0].rest(60.0, [waker.fileno()]) is False
        ranks[0].leave()
        assert ranks[0].form(60.0, [waker.fileno()]) is False
        assert time.monotonic() - began < 50.0
    waker.close()
    other.close()


def test_ranks_that_hear_of_an_epoch_at_different_times_come_together() -> None:
    with meshes(3) as ranks:
        for mesh, after in zip(ranks, (0.6, 0.0, 0.3), strict=True):
            threading.Timer(after, mesh.announce, [table(ranks, 4)]).start()
        assert together([lambda m=m: until_formed(m) for m in ranks]) == [True] * 3


def test_an_epoch_that_is_over_before_it_is_formed_gives_way_to_the_next() -> None:
    with meshes(3) as ranks:
        for mesh in ranks[:2]:
            mesh.announce(table(ranks, 1))
        assert together([lambda m=m: m.form(0.3) for m in ranks[:2]]) == [False] * 2
        for mesh in ranks:
            mesh.announce(table(ranks, 2))
            mesh.announce(table(ranks, 1))  # late: passed over
        assert together([lambda m=m: until_formed(m) for m in ranks]) == [True] * 3
        assert [m.group for m in ranks] == [2] * 3


def test_an_incomplete_group_is_not_formed() -> None:
    with meshes(2) as ranks:
        for mesh in ranks:
            mesh.announce(table(ranks, 1, without=1))
        assert together([lambda m=m: m.form(0.3) for m in ranks]) == [False] * 2
        assert ranks[0].missing == "rank 1 (LOST)"


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (Hello(1, 0, 1, 2, bytes(16)), "bad_key"),
        (Hello(1, 0, 0, 2, KEY), "stale_epoch"),
        (Hello(1, 1, 1, 2, KEY), "bad_rank"),
        (Hello(1, 0, 1, 3, KEY), "bad_rank"),
        (Hello(0, 0, 1, 2, KEY), "bad_rank"),
        (Hello(7, 0, 1, 2, KEY), "bad_rank"),
    ],
)
def test_a_stranger_gets_no_link(hello: Hello, code: str) -> None:
    with meshes(2) as ranks:
        mesh = ranks[0]
        mesh.announce(table(ranks, 1))
        assert mesh.form(0.05) is False
        with connect(mesh) as stranger:
            stranger.sendall(encode_hello(hello))
            for _ in range(100):
                mesh.form(0.05)
                if mesh.counters.total():
                    break
            assert mesh.counters.snapshot() == {("exchange", code): 1}
            assert stranger.recv(1) == b""
        ranks[1].announce(table(ranks, 1))
        assert together([lambda m=m: until_formed(m) for m in ranks]) == [True] * 2


def test_thousands_of_bad_connections_do_not_keep_ranks_from_coming_together() -> None:
    rng = random.Random(3)
    with meshes(2) as ranks:
        for mesh in ranks:
            mesh.announce(table(ranks, 1))
        stop = threading.Event()

        def attack() -> int:
            sent = 0
            while not stop.is_set() and sent < 3000:
                try:
                    with connect(ranks[sent % 2]) as sock:
                        sock.sendall(rng.choice((b"", b"\x00" * 4, b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(60))))
                except OSError:
                    continue
                sent += 1
            return sent

        attackers = [threading.Thread(target=attack, daemon=True) for _ in range(2)]
        for thread in attackers:
            thread.start()
        time.sleep(0.3)
        assert together([lambda m=m: until_formed(m) for m in ranks]) == [True] * 2
        stop.set()
        for thread in attackers:
            thread.join(PATIENCE)
        assert together([lambda m=m: m.all_reduce_max([m.rank]) for m in ranks]) == [[1]] * 2


def spoil(mesh: Mesh, data: bytes) -> None:
    """Write into the link to rank 0 what no rank would."""
    mesh._links[0].sock.sendall(data)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n and more", "malformed"),
        (encode_header(Kind.SYNC, 1, 1, 1, 1 << 40), "too_large"),
        (encode_header(Kind.SYNC, 1, 2, 1, 8), "out_of_step"),
        (encode_header(Kind.SYNC, 1, 1, 2, 8), "out_of_step"),
        (encode_header(Kind.TOKENS, 1, 1, 1, 8), "out_of_step"),
        (encode_header(Kind.SYNC, 0, 1, 1, 8), "out_of_step"),
        (encode_header(Kind.SYNC, 1, 1, 1, 5) + b"12345", "malformed"),
    ],
)
def test_a_frame_that_is_not_the_next_one_ends_the_group_by_name(data: bytes, code: str) -> None:
    with meshes(2) as ranks:
        form(ranks)
        spoil(ranks[1], data)
        with pytest.raises(ExchangeError, match="rank 1"):
            ranks[0].all_reduce_max([1])
        assert ranks[0].counters.snapshot() == {("exchange", code): 1}


def test_a_port_in_use_is_named() -> None:
    with meshes(1) as ranks:
        host, port = split_tcp(ranks[0].endpoint)
        with pytest.raises(OSError, match=f"expert exchange on {host} port {port}.*--data-parallel-rpc-port"):
            Mesh(1, 2, host, port)


def test_headers_and_hellos_survive_a_round_trip_and_nothing_else_is_one() -> None:
    header = decode_header(encode_header(Kind.SUMS, 513, 2**40, 2**50, 77), 100)
    assert header == (Kind.SUMS, 513, 2**40, 2**50, 77)
    hello = Hello(3, 65534, 9, 65535, KEY)
    assert decode_hello(encode_hello(hello)) == hello
    rng = random.Random(1)
    good = encode_hello(hello)
    for _ in range(3000):
        bad = bytearray(good)
        bad[rng.randrange(8)] ^= 1 << rng.randrange(8)
        try:
            decoded = decode_hello(bytes(bad))
        except WireError:
            continue
        assert decoded.rank != 3  # only the rank's two bytes carry no redundancy
    for _ in range(3000):
        with pytest.raises(WireError):
            decode_header(rng.randbytes(HEADER_BYTES), 1 << 30)
    assert len(good) == HELLO_BYTES and struct.calcsize("<4sBBHQQQ") == HEADER_BYTES
