"""Runs no-op jobs until it is stopped: DSN; prints a line once it sleeps."""

from __future__ import annotations

import sys

from pgdefer import App
from pgdefer.worker.worker import Worker


def main(dsn: str) -> None:
    app = App(dsn)

    @app.task(name="noop")
    async def noop(n: int) -> None:
        if n == 0:
            print("running", flush=True)

    noop.defer(n=0)
    Worker(app, concurrency=200).run()


if __name__ == "__main__":
    main(sys.argv[1])
