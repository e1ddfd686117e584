"""What the commands that move in other queues' jobs have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from psycopg.errors import UndefinedTable

from pgdefer.errors import PgDeferError, sqlstate_of

__all__ = ["BELOW_ALL", "UNCHANGED", "tables_of"]

# Below the ids of all rows, which may be negative.
BELOW_ALL = -(2**63)
# Options that keep a task's defaults from dropping what is moved, or from putting it off.
UNCHANGED: dict[str, Any] = {"idempotency_key": "", "group": "", "held": False, "on_limit": "block"}


@contextlib.contextmanager
def tables_of(queue: str) -> Iterator[None]:
    """Let the error of a missing table say whose it is: by itself it says that of this queue."""
    try:
        yield
    except Exception as error:
        if sqlstate_of(error) != UndefinedTable.sqlstate:
            raise
        said = str(error).partition("\n")[0]
        raise PgDeferError(
            f"the tables of {queue} are not here: {said}",
            hint="Name the database that has them; a schema of its own must be in the search_path.",
        ) from error
