"""The probes' HTTP server, with clients that hang up, stay silent or are too many."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from pgdefer.worker import probes as served
from pgdefer.worker.probes import Answer, Probes

from .conftest import wait_for

pytestmark = pytest.mark.client

HALF = b"GET /healthz HT"
RESET = struct.pack("ii", 1, 0)  # closing sends RST


Serve = Callable[[Callable[[str], Answer]], tuple[str, int]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    opened: list[Probes] = []

    def start(answer: Callable[[str], Answer]) -> tuple[str, int]:
        opened.append(Probes("127.0.0.1:0", answer))
        return "127.0.0.1", opened[-1].port

    yield start
    for each in opened:
        each.close()


def well(_path: str) -> Answer:
    return 200, "text/plain", b"ok\n"


def is_answered(address: tuple[str, int]) -> bool:
    host, port = address
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/healthz") as answer:
            return bool(answer.read() == b"ok\n")
    except OSError:
        return False


def is_closed(client: socket.socket) -> bool:
    """Whether the server has closed the connection, on which it has sent nothing."""
    try:
        return client.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_a_client_that_hangs_up_makes_no_traceback(
    serve: Serve, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    has_gone = threading.Event()

    def answer(_path: str) -> Answer:
        has_gone.wait(300)
        return 200, "text/plain", b"x" * 10_000_000

    caplog.set_level(logging.DEBUG, "pgdefer.worker")
    with socket.create_connection(serve(answer)) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    has_gone.set()
    wait_for(lambda: "an HTTP client got no answer: " in caplog.text, 30)
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
    assert capfd.readouterr().err == ""


def test_a_silent_client_is_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served._Handler, "timeout", 0.2)
    with socket.create_connection(serve(well), timeout=30) as client:
        client.sendall(HALF)
        assert client.recv(1) == b""


def test_a_client_that_drips_is_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its request has one deadline."""
    monkeypatch.setattr(served._Handler, "timeout", 0.5)
    with socket.create_connection(serve(well), timeout=0.05) as client:

        def drips() -> bool:
            client.sendall(b"x")
            try:
                return client.recv(1) == b""
            except TimeoutError:
                return False

        with contextlib.suppress(ConnectionError):
            wait_for(drips, 30)


def test_clients_are_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served._Handler, "timeout", 300.0)
    address = serve(well)
    clients = [socket.create_connection(address) for _ in range(served._MOST + 20)]
    try:
        for client in clients[: served._MOST]:
            client.sendall(HALF)
        wait_for(lambda: sum(map(is_closed, clients)) == 20, 30)
        names = [thread.name for thread in threading.enumerate()]
        assert sum("process_request_thread" in name for name in names) == served._MOST
    finally:
        for client in clients:
            client.close()
    wait_for(lambda: is_answered(address), 30)


def test_head_is_answered_without_a_body(serve: Serve) -> None:
    with socket.create_connection(serve(well), timeout=30) as client:
        client.sendall(b"HEAD /healthz HTTP/1.0\r\n\r\n")
        with client.makefile("rb") as file:
            head, _, body = file.read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 ")
    assert b"Content-Length: 3" in head
    assert body == b""
