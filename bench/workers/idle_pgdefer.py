"""Worker processes: DSN PROCESSES FILE; each job appends to the file how long it waited, in seconds.

They end with this process's input.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from pgdefer import App
from pgdefer.worker.worker import Worker


def main(dsn: str, processes: int, path: str) -> None:
    children = []
    for _ in range(processes):
        pid = os.fork()
        if not pid:
            work(dsn, path)
            return
        children.append(pid)
    print(*children, flush=True)
    sys.stdin.read()
    for pid in children:
        os.kill(pid, signal.SIGTERM)
    for pid in children:
        os.waitpid(pid, 0)


def work(dsn: str, path: str) -> None:
    app = App(dsn)
    file = os.open(path, os.O_WRONLY | os.O_APPEND)

    @app.task(name="stamp")
    async def stamp(at: float) -> None:
        os.write(file, f"{time.time() - at}\n".encode())

    Worker(app).run()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
