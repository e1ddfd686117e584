"""Runs jobs that know when they were deferred: DSN JOBS; prints the delays in seconds."""

from __future__ import annotations

import asyncio
import json
import sys
import time

from pgdefer import App
from pgdefer.worker.worker import Worker


async def main(dsn: str, jobs: int) -> None:
    app = App(dsn)
    waits: list[float] = []

    @app.task(name="stamp")
    async def stamp(at: float) -> None:
        waits.append(time.time() - at)
        if len(waits) == jobs:
            worker.stop()

    worker = Worker(app)
    await worker.run_async()
    print(json.dumps(waits))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
