"""A worker's answers over HTTP: /healthz, /readyz and, if the App has metrics, /metrics."""

from __future__ import annotations

import contextlib
import http.server
import ipaddress
import logging
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from pgdefer._text import logger
from pgdefer.errors import PgDeferError, describe

__all__ = ["Answer", "Probes", "answer", "parse_address"]

log = logger("pgdefer.worker")

Answer = tuple[int, str, bytes]
_TEXT = "text/plain; charset=utf-8"


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"http must be HOST:PORT, such as 127.0.0.1:9000, not {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


# How long a client may take to send its request, and to read the answer, in seconds.
_TIMEOUT = 5.0
# How many clients get an answer at once. Each has a thread; further ones are turned away.
_MOST = 50


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _TIMEOUT
    server: _Server

    def handle(self) -> None:
        """Answer, unless the request as a whole takes too long."""
        self._limit = threading.Timer(self.timeout, self._hang_up)
        self._limit.daemon = True
        self._limit.start()
        try:
            super().handle()
        finally:
            self._limit.cancel()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        """Answer."""
        self._limit.cancel()
        path = self.path.partition("?")[0]
        try:
            status, kind, body = self.server.answer(path)
        except Exception as error:
            said = f"{type(error).__name__}: {describe(error)}"
            log.error("%s could not be answered: %s", path, said)
            status, kind, body = 500, _TEXT, b"this failed, and the worker's log says why\n"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        """Answer without the body."""
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Log nothing: probes come often."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, answer: Callable[[str], Answer]) -> None:
        self.address_family = _family(host)
        self.answer = answer
        self._free = threading.BoundedSemaphore(_MOST)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or turn the client away."""
        if not self._free.acquire(blocking=False):
            log.debug("an HTTP client was turned away, as there are %d", _MOST)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()  # no thread could be started
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, in a thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, *_: Any) -> None:
        """Log it in one line: usually the client has gone before it read the answer."""
        error = sys.exception()
        assert error is not None
        level = logging.DEBUG if isinstance(error, OSError) else logging.ERROR
        log.log(level, "an HTTP client got no answer: %s", describe(error))


class Probes:
    """A server in its own thread, so that it answers even if the worker's loop does not."""

    def __init__(self, address: str, answer: Callable[[str], Answer]) -> None:
        host, port = parse_address(address)
        try:
            self._server = _Server(host, port, answer)
        except OSError as error:
            raise PgDeferError(f"http {address}: {error.strerror or error}") from error
        #: The port in use, even if 0 was passed.
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="pgdefer-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def answer(
    path: str,
    call_soon: Callable[[Callable[[], object]], object],
    ready: Callable[[], tuple[bool, str]],
    metrics: Callable[[], tuple[str, bytes]] | None,
) -> Answer:
    """Return what a worker answers. Called in threads.

    `call_soon` calls a function in the worker's event loop. `ready` returns whether the worker gets
    jobs, and the text to answer.
    """
    match path:
        case "/healthz":
            # A worker that has lost its database is not dead: a restart would not help.
            is_well = _goes_on(call_soon)
            return (200, _TEXT, b"ok\n") if is_well else (503, _TEXT, b"the event loop hangs\n")
        case "/readyz":
            is_ready, said = ready()
            return (200 if is_ready else 503), _TEXT, f"{said}\n".encode()
        case "/metrics" if metrics is not None:
            return (200, *metrics())
    return 404, _TEXT, b"there are /healthz and /readyz, and /metrics where the App has any\n"


def _goes_on(call_soon: Callable[[Callable[[], object]], object]) -> bool:
    """Whether an event loop goes on within some seconds."""
    answered = threading.Event()
    call_soon(answered.set)
    return answered.wait(5.0)


def _family(host: str) -> Any:
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return socket.AF_INET
    return socket.AF_INET6 if version == 6 else socket.AF_INET
