"""Endpoints, names, ports, pod identity and log lines."""

from __future__ import annotations

import io
import ipaddress
import json
import logging
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as hs

from dpi_engine.config import network
from dpi_engine.config.errors import SettingsError
from dpi_engine.config.logs import setup_logging
from dpi_engine.config.network import AddressError, is_ip, port_is_free, resolve, split_endpoint, tcp_endpoint
from dpi_engine.config.pod import PodIdentity


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        ("127.0.0.1", "tcp://127.0.0.1:5"),
        ("head.ns.svc", "tcp://head.ns.svc:5"),
        ("::1", "tcp://[::1]:5"),
        ("[fd00::1]", "tcp://[fd00::1]:5"),
        ("fe80::1%eth0", "tcp://[fe80::1%eth0]:5"),
    ],
)
def test_endpoints_and_brackets(host, endpoint):
    assert tcp_endpoint(host, 5) == endpoint
    assert split_endpoint(endpoint) == (host.strip("[]"), 5)


@given(hs.ip_addresses() | hs.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?(\.[a-z]{1,5}){0,3}", fullmatch=True))
def test_endpoints_round_trip(host):
    assert split_endpoint(tcp_endpoint(str(host), 65535)) == (str(host), 65535)
    assert is_ip(str(host)) == (not isinstance(host, str))


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "host",
        "tcp://",
        "tcp://:5",
        "tcp://h:",
        "tcp://h:x",
        "tcp://h:65536",
        "tcp://::1:5",
        "tcp://[::1:5",
        "tcp://[h]:5",
        "ipc:///tmp/x",
        "tcp://h:5/x",
        "tcp://h:-1",
        "tcp://h:٣",
        "tcp://h:999999999999",
    ],
)
def test_malformed_endpoints_are_refused(endpoint):
    with pytest.raises(AddressError, match="expected tcp://HOST:PORT"):
        split_endpoint(endpoint)


@given(hs.text(max_size=30))
def test_no_endpoint_escapes_as_another_error(text):
    try:
        host, port = split_endpoint(text)
    except AddressError:
        return
    assert host and 0 <= port <= 65535


@pytest.mark.parametrize(("host", "port"), [("", 5), ("a b", 5), ("h/x", 5), ("h", -1), ("h", 65536)])
def test_endpoints_of_impossible_parts_are_refused(host, port):
    with pytest.raises(AddressError):
        tcp_endpoint(host, port)


def test_resolving():
    assert resolve("10.1.2.3", 0.0) == "10.1.2.3"
    assert resolve("[::1]", 0.0) == "::1"
    assert ipaddress.ip_address(resolve("localhost", 60.0)).is_loopback
    with pytest.raises(AddressError, match=r"'nowhere\.invalid'"):
        resolve("nowhere.invalid", 30.0)
    with pytest.raises(AddressError, match="no such name"):
        resolve("x" * 300, 30.0)


def test_a_name_service_that_does_not_answer_is_left_at_the_deadline(monkeypatch):
    release = threading.Event()

    def hang(*_args, **_kwargs):
        release.wait(30)
        raise OSError("late")

    monkeypatch.setattr(network.socket, "getaddrinfo", hang)
    with pytest.raises(AddressError, match=r"no answer within 0\.05 s"):
        resolve("slow.example", 0.05)
    release.set()


def test_free_and_taken_ports():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
    assert port_is_free("127.0.0.1", port)
    with pytest.raises(AddressError, match=r"192\.0\.2\.1:5000 cannot be bound here"):
        port_is_free("192.0.2.1", 5000)


@pytest.mark.parametrize(
    ("env", "host", "binds", "control"),
    [
        ({}, None, "127.0.0.1", "head"),
        ({}, "0.0.0.0", "0.0.0.0", "head"),
        ({}, "[::1]", "::1", "head"),
        ({"DPI_POD_IP": "10.0.0.3"}, None, "0.0.0.0", "10.0.0.3"),
        ({"DPI_POD_IP": "fd00::3"}, None, "::", "fd00::3"),
        ({"DPI_POD_IP": "10.0.0.3"}, "127.0.0.1", "127.0.0.1", "10.0.0.3"),
        ({"DPI_POD_IP": ""}, None, "127.0.0.1", "head"),
    ],
)
def test_what_a_pod_binds(env, host, binds, control):
    pod = PodIdentity.from_env(env)
    assert (pod.http_host(host), pod.control_host("head")) == (binds, control)
    assert pod.in_pod == bool(env.get("DPI_POD_IP"))


def test_pod_identity():
    env = {"DPI_POD_IP": "10.0.0.3", "DPI_POD_NAME": "p", "DPI_POD_NAMESPACE": "n"}
    assert PodIdentity.from_env(env) == PodIdentity(ip="10.0.0.3", name="p", namespace="n")
    with pytest.raises(SettingsError, match="DPI_POD_IP: expected an IP address"):
        PodIdentity.from_env({"DPI_POD_IP": "$(POD_IP)"})


@pytest.fixture
def root_logger():
    root = logging.getLogger()
    before = (root.level, root.handlers[:])
    yield root
    logging.captureWarnings(False)
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def test_text_lines_have_time_level_process_and_message(root_logger):
    out = io.StringIO()
    setup_logging("info", "text", "engine-3", out)
    root_logger.info("loaded %d tensors", 5)
    root_logger.debug("not shown")
    (line,) = out.getvalue().splitlines()
    assert line.endswith("Z INFO    engine-3: loaded 5 tensors") and line[4] == "-" and line[10] == "T"


def test_json_lines_are_one_object_each_even_with_a_trace(root_logger):
    out = io.StringIO()
    setup_logging("warning", "json", "api-0", out)
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        root_logger.exception("failed: %s", "ü\n")
    (line,) = out.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["process"], entry["message"]) == ("error", "api-0", "failed: ü\n")
    assert "ValueError" in entry["trace"]


def test_setting_up_twice_does_not_double_lines_and_traces_are_kept(root_logger):
    first, out = io.StringIO(), io.StringIO()
    setup_logging("info", "text", "a", first)
    setup_logging("info", "text", "b", out)
    try:
        raise KeyError("x")
    except KeyError:
        root_logger.exception("oops")
    assert first.getvalue() == "" and out.getvalue().count("oops") == 1 and "KeyError: 'x'" in out.getvalue()


@pytest.mark.parametrize(("level", "fmt"), [("loud", "text"), ("info", "xml")])
def test_unknown_level_or_format(level, fmt):
    with pytest.raises(ValueError, match="expected one of"):
        setup_logging(level, fmt, "x")
