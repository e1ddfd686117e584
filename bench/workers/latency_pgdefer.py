"""One worker of pgdefer, whose moments are written down: DSN FILE.

For each job it appends the times, by time.time(), at which its notification was heard, its fetch was sent and
answered, and its handler started.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from pgdefer import App
from pgdefer.database import sql
from pgdefer.database.connection import Connection
from pgdefer.worker.listener import SleepListener
from pgdefer.worker.worker import Worker


def main(dsn: str, path: str) -> None:
    app = App(dsn)
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    last: dict[str, float] = {}
    call, heard = Connection.call, SleepListener._heard

    async def timed_call(
        connection: Connection, statement: sql.Statement, **parameters: object
    ) -> list[tuple[Any, ...]]:
        sent = time.time()
        rows = await call(connection, statement, **parameters)
        if rows and "max_jobs" in parameters:
            last.update(sent=sent, answered=time.time())
        return rows

    def timed_heard(listener: SleepListener, channel: str, payload: str) -> None:
        last["heard"] = time.time()
        heard(listener, channel, payload)

    Connection.call = timed_call  # type: ignore[assignment, method-assign]
    SleepListener._heard = timed_heard  # type: ignore[method-assign]

    @app.task(name="stamp")
    async def stamp() -> None:
        os.write(file, (json.dumps({**last, "started": time.time()}) + "\n").encode())

    Worker(app).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
