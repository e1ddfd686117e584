"""One worker of pgdefer: DSN FILE; each handler appends to the file how long its job took to go on, in seconds."""

from __future__ import annotations

import os
import sys
import time

from pgdefer import App, current_job
from pgdefer.worker.worker import Worker


def main(dsn: str, path: str) -> None:
    app = App(dsn)
    file = os.open(path, os.O_WRONLY | os.O_APPEND)

    @app.task(name="stamp")
    async def stamp(at: float) -> None:
        os.write(file, f"{time.time() - at}\n".encode())

    @app.task(name="waits")
    async def waits() -> None:
        payload = await current_job().wait_for_async("w", signal="s")
        os.write(file, f"{time.time() - payload['at']}\n".encode())

    Worker(app).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
