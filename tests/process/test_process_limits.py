"""Limits of the system that a large group runs into: each process names the limit, and is not started again."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable

import pytest
from process_pods import Pod, until

from free_ports import PORTS

REFUSED = 78
RANKS = 300
LIMIT = (1024, 1024)
"""Of file descriptors; the ranks of the test need 1,156."""


def test_a_launch_that_may_not_open_enough_files_says_which_limit_to_raise(make_pod: Callable[..., Pod]) -> None:
    pod = make_pod("-dp", str(RANKS), "-dpl", "0", wait=False)
    pod.command = ["prlimit", f"--nofile={LIMIT[0]}:{LIMIT[1]}", *pod.command]
    with pod:
        assert pod.wait_exit() == REFUSED
        assert f"head of {RANKS} ranks: 1156 file descriptors are needed" in pod.log
        assert "raise it where the process is started" in pod.log
        assert "Traceback" not in pod.log


@pytest.mark.parametrize(("child", "what"), [("api-0", "front end"), ("coordinator", "coordinator")])
def test_a_child_that_may_not_open_enough_files_ends_the_launch_by_name(
    make_pod: Callable[..., Pod], child: str, what: str
) -> None:
    """Each process counts its own: here the limit falls between the start of the launcher and that of the child."""
    with make_pod("-dp", str(RANKS), "-dpl", "0", "--api-server-count", "1", wait=False) as pod:

        def there() -> int | None:
            try:
                return pod.children().get(child)
            except OSError:  # it does not listen yet
                return None

        pid = until(there, f"{child} runs")
        assert pod.process is not None
        resource.prlimit(pod.process.pid, resource.RLIMIT_NOFILE, LIMIT)
        os.kill(pid, signal.SIGKILL)
        assert pod.wait_exit() == REFUSED
        assert f"{what} of {RANKS} ranks: 1156 file descriptors are needed" in pod.log
        assert f"{child} was refused, see its last message" in pod.log
        assert "Traceback" not in pod.log


def test_connections_of_an_earlier_server_do_not_hold_the_port(make_pod: Callable[..., Pod]) -> None:
    """A server that closes first leaves its end of the connection in TIME_WAIT."""
    port = PORTS.take(1)
    with socket.create_server(("127.0.0.1", port), reuse_port=False) as earlier:
        client = socket.create_connection(("127.0.0.1", port))
        earlier.accept()[0].close()
        client.close()
    with make_pod(port=port) as pod:
        assert pod.complete("once").status == 200
