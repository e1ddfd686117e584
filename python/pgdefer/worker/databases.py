"""Which databases one process works for: from a list of DSNs, or from a file with one per line."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from pgdefer._text import escaped, logger
from pgdefer.database.source import PLACE, Source
from pgdefer.errors import InvalidParameter
from pgdefer.options import as_list

__all__ = ["Database", "DsnFile", "distinct", "read_dsns"]

log = logger("pgdefer.worker")

# What makes two DSNs lead to the same database as the same user.
_PLACE = (*PLACE, "user")


@dataclasses.dataclass(frozen=True)
class Database:
    """A database to work for: its DSN, and the name that logs use, which has no password."""

    name: str
    dsn: str
    place: tuple[str, ...]

    @property
    def server(self) -> tuple[str, ...]:
        """The part of its place that names the server."""
        return self.place[: _PLACE.index("dbname")]

    @classmethod
    def of(cls, dsn: str) -> Database:
        """Return the database of a DSN. Raises InvalidParameter, which does not quote the DSN."""
        parts = conninfo_to_dict(Source(dsn).conninfo())
        place = tuple(str(parts.get(part) or "") for part in _PLACE)
        service, host, address, port, database, user = place
        where = ":".join(filter(None, (host or address, port)))
        name = "/".join(filter(None, (where, database or service or user)))
        return cls(escaped(name or "(default)"), dsn, place)


def distinct(databases: Iterable[Database]) -> dict[tuple[str, ...], Database]:
    """Return the databases by their places; log those that are listed twice."""
    found: dict[tuple[str, ...], Database] = {}
    names: set[str] = set()
    for database in databases:
        if database.place in found:
            log.warning("%s is listed twice, and served once", database.name)
            continue
        if database.name in names:
            user = escaped(database.place[-1] or "the default user")
            name = f"{database.name} as {user}"
            name = f"{name} ({len(names) + 1})" if name in names else name
            database = dataclasses.replace(database, name=name)  # noqa: PLW2901
        names.add(database.name)
        found[database.place] = database
    return found


def read_dsns(dsns: Iterable[str]) -> dict[tuple[str, ...], Database]:
    """Return the databases of a list. Raises InvalidParameter, TypeError, ValueError."""
    if not (listed := as_list("dsns", dsns)):
        raise ValueError("dsns is empty: give one DSN at least, or the path of a file")
    return distinct(map(Database.of, listed))


class DsnFile:
    """A file with one DSN per line; `#` begins a comment line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: object = None
        self._seen: object = None
        self._is_unreadable = False
        #: How many of its lines can't be read, as of the last time.
        self.unreadable = 0

    def read(self) -> dict[tuple[str, ...], Database]:
        """Return the databases; log the lines that can't be read. Raises OSError."""
        state = self._seen = self._state()
        found = []
        self.unreadable = 0
        text = self.path.read_text("utf-8-sig", errors="replace")
        # Only now: a file that can't be read does not change when it can be.
        self._read, self._is_unreadable = state, False
        for number, line in enumerate(text.splitlines(), 1):
            dsn = line.strip()
            if not dsn or dsn.startswith("#"):
                continue
            try:
                found.append(Database.of(dsn))
            except (InvalidParameter, ValueError) as error:
                self.unreadable += 1
                log.error("%s, line %d: %s", self.path, number, error)
        return distinct(found)

    def changed(self) -> dict[tuple[str, ...], Database] | None:
        """Return the databases if the file has changed since it was read; else None.

        A file that has changed since the last call may be half written: it is read next time.
        """
        try:
            state = self._state()
            if state == self._read:
                return None
            if state != self._seen:
                self._seen = state
                return None
            return self.read()
        except OSError as error:
            self._seen = None
            if not self._is_unreadable:
                self._is_unreadable = True
                log.warning("%s can't be read, its databases stay: %s", self.path, error)
            return None

    def _state(self) -> tuple[int, int, int]:
        found = os.stat(self.path)  # noqa: PTH116 (no resolved path: a link may lead elsewhere)
        return found.st_mtime_ns, found.st_ino, found.st_size
