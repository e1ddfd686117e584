"""A proxy before a server, as a network that may stop."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import Any


def _address(folder: Path | None, port: int) -> Any:
    return ("127.0.0.1", port) if folder is None else str(folder / f".s.PGSQL.{port}")


class Proxy:
    """Passes on connections to a port, as port `port`: of sockets in a folder, or of TCP."""

    def __init__(self, folder: Path | None, port: int, target: int) -> None:
        self._target = _address(folder, target)
        self._passes = threading.Event()
        self._passes.set()
        self._sockets: list[socket.socket] = []
        self._family = socket.AF_INET if folder is None else socket.AF_UNIX
        self._listening = socket.socket(self._family)
        self._listening.bind(_address(folder, port))
        if folder is not None:
            Path(_address(folder, port)).chmod(0o777)
        self._listening.listen(100)
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        """Let nothing pass, in either direction: no connection ends, and none is refused."""
        self._passes.clear()

    def cut(self) -> None:
        """End all connections, with what is on its way."""
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        """Let pass again what was held, and new connections."""
        self._passes.set()

    def close(self) -> None:
        """End for good."""
        # Closed only, it would still accept one connection: `_accept` waits for that.
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        self.heal()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.socket(self._family)
        with client, server, contextlib.suppress(OSError):
            self._passes.wait()
            server.connect(self._target)
            self._sockets += [client, server]
            back = threading.Thread(target=self._pass_on, args=(server, client), daemon=True)
            back.start()
            self._pass_on(client, server)
            back.join()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self._passes.is_set():
                    self._passes.wait()
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
