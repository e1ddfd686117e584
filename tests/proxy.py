"""A proxy before a server's socket, as a network that may stop."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path


class Proxy:
    """Passes on connections to a server's socket in the same folder, as port `port`."""

    def __init__(self, folder: Path, port: int, target: int) -> None:
        self._target = str(folder / f".s.PGSQL.{target}")
        self._passes = threading.Event()
        self._passes.set()
        self._sockets: list[socket.socket] = []
        self._listening = socket.socket(socket.AF_UNIX)
        path = folder / f".s.PGSQL.{port}"
        self._listening.bind(str(path))
        path.chmod(0o777)
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
        self._listening.close()
        self.cut()
        self.heal()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
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
