"""Memory that the workers of one rank share, and semaphores in it.

The memory has no name in any file system: it is gone with the last process that holds it, however that one ends.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable

from dpi_engine.wire.errors import WorkerLost

SEMAPHORE_BYTES = 64
"""Room for a sem_t (32 bytes in glibc and musl), each in a cache line of its own."""

SLICE_S = 0.1
"""A wait looks this often whether the others live."""

SPIN_S = 30e-6
"""How long a wait asks again before it sleeps: waking up costs more than this."""

_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_slow = ctypes.CDLL(None, use_errno=True)  # gives the interpreter to other threads meanwhile
_quick = ctypes.PyDLL(None)  # for calls that never wait
_clockwait = getattr(_slow, "sem_clockwait", None)  # glibc 2.30
_trywait, _post = _quick.sem_trywait, _quick.sem_post


class SharedRegion:
    """`size` bytes behind a file descriptor, zeros at first, mapped. Other processes map the same by `fd`."""

    def __init__(self, size: int, fd: int | None = None) -> None:
        """Raises OSError where the memory cannot be had."""
        if fd is None:
            fd = os.memfd_create("dpi-tensor-parallel", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
        self.fd, self.size = fd, size
        self.memory = mmap.mmap(fd, size)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def semaphore(self, offset: int, *, create: bool) -> Semaphore:
        """The semaphore at `offset` bytes; only the process that made the region creates it."""
        return Semaphore(self._base + offset, create)

    def close(self) -> None:
        """Let go of the descriptor; the memory itself stays mapped until the process ends."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Semaphore:
    """A POSIX semaphore between processes. What was written before `post` is seen after `wait`."""

    def __init__(self, address: int, create: bool) -> None:
        self._at = ctypes.c_void_p(address)
        if create and _quick.sem_init(self._at, 1, 0):
            raise OSError(ctypes.get_errno(), "sem_init")

    def post(self) -> None:
        _post(self._at)

    def try_wait(self) -> bool:
        return not _trywait(self._at)

    def wait(self, check: Callable[[], None], timeout: float | None, spin: float = SPIN_S) -> bool:
        """Take one. False when `timeout` seconds are over (None: never). `check` runs about every SLICE_S seconds
        meanwhile and may raise.
        """
        if not _trywait(self._at):
            return True
        began = time.monotonic()
        while time.monotonic() - began < spin:
            if not _trywait(self._at):
                return True
        deadline = None if timeout is None else began + timeout
        while True:
            if self._sleep(SLICE_S):
                return True
            check()
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def _sleep(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        if _clockwait is None:
            while time.monotonic() < end:
                if not _trywait(self._at):
                    return True
                time.sleep(1e-4)
            return False
        until = _Timespec(int(end), int(end % 1 * 1e9))
        if not _clockwait(self._at, _MONOTONIC, ctypes.byref(until)):
            return True
        error = ctypes.get_errno()
        if error not in (errno.ETIMEDOUT, errno.EINTR):
            raise WorkerLost(f"a wait for another worker failed: {os.strerror(error)}")
        return False
