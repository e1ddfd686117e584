"""Shards: jobs spread by key over several databases, each with a complete queue.

`Cluster(app, dsn)` defers in the shard of a job's key; `python -m pgdefer.contrib.cluster` creates
clusters and moves slots. The rules are in extension/cluster/.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from pgdefer.app import App
from pgdefer.checks import check_number, check_text
from pgdefer.contrib.cluster import sql
from pgdefer.contrib.cluster.deferring import Deferring
from pgdefer.contrib.cluster.deferring_async import AsyncDeferring
from pgdefer.contrib.cluster.install import check_are_apart, has_map, install, self_of
from pgdefer.contrib.cluster.move_slot import Move, SlotBusy, move
from pgdefer.contrib.cluster.shards import SLOTS, ShardMap, shard_of
from pgdefer.database.source import Source
from pgdefer.errors import InvalidParameter, PgDeferError, is_lost
from pgdefer.options import checked_mapping

__all__ = ["Cluster", "Move", "ShardMap", "SlotBusy", "install", "shard_of"]

# The errors of one shard, despite which calls go on with the others.
FAILURES = (psycopg.Error, PgDeferError)


class Cluster(Deferring, AsyncDeferring):
    """An app over several databases.

    The map comes from any of the `dsns`, and from the shards themselves when it has changed. The
    DSNs in it have no passwords: libpq finds these in its password file. `patience`: for how many
    seconds a call follows a key that moves.
    """

    @classmethod
    def create(cls, app: App, shards: Mapping[str, str]) -> Cluster:
        """Install the functions in each of these databases, and divide the slots among them.

        After a failure, call it again: it goes on. Raises InvalidParameter if two DSNs lead to the
        same database, if one has the map of another cluster, or if a DSN has a password.
        """
        if not checked_mapping("shards", shards):
            raise ValueError('shards is empty: give the name and DSN of each, {"a": "dbname=a"}')
        for name, dsn in shards.items():
            _check_shard(name, dsn)
        check_are_apart(shards)
        for dsn in shards.values():
            install(dsn)  # before the first map: none is made if a database can't be reached
        # Existing maps are checked before the first new one is made: they may be another cluster's.
        for name in sorted(shards, key=lambda name: not has_map(shards[name])):
            install(shards[name], self=name, shards=shards)
        return cls(app, *shards.values())

    def of(self, key: str) -> App:
        """Return the app bound to the shard of a key. Its calls do not check keys."""
        if not self.map.slots:
            self.refresh()
        return self.app_of(self.map.owner_of(key))

    def add(self, name: str, dsn: str) -> list[str]:
        """Add an empty shard, to which slots can then be moved; or change the DSN of a shard.

        Return the shards that can't be reached: they learn of it later, from the others. Raises
        InvalidParameter if the DSN has a password, or if the cluster has another database as the
        shard of this name: both would then take its keys.
        """
        _check_shard(name, dsn)
        found, wrong = self.learn()
        if name in self.map.shards and self_of(dsn) != name:
            raise InvalidParameter(
                f"there is a shard {name!r}, and this database is not it",
                hint="Choose another name. A shard that has moved to another server keeps its map.",
            )
        version = self.map.versions.get(name, 0) + 1
        known = ShardMap(
            {**self.map.shards, name: dsn}, self.map.slots, {**self.map.versions, name: version}
        )
        install(dsn, self=name, known=known)
        self.map = known
        wrong.pop(name, None)
        return self._tell(found, wrong)

    def move(self, slot: int, to: str, *, patience: float = 0.5, started: bool = False) -> Move:
        """Move a slot with its jobs. After a failure, call it again: it goes on where it stopped.

        Each part of the slot waits until none of its jobs runs; after `patience` seconds, it is put
        last. Jobs that were started before, and wait for another attempt, do not move; with
        `started` they move as new jobs. Raises SlotBusy if a transaction that has deferred for the
        slot stays open for longer than `patience`, or if another process moves the slot.

        If a connection is lost, it goes on by a new one, at most three times: without CPU for 10
        seconds, for example, the server ends its session.
        """
        _check_slot(slot)
        check_number("patience", patience, (int, float), at_least=0, at_most=math.inf)
        return self._move(Move(slot), to, patience, started)

    def _move(self, done: Move, to: str, patience: float, started: bool, tries: int = 3) -> Move:
        found, wrong = self.learn()
        source = self._owner(done.slot)
        if to not in self.map.shards:
            raise InvalidParameter(
                f"there is no shard {to!r}",
                hint=f"The map has {', '.join(sorted(self.map.shards))}. Add the shard first.",
            )
        _must_answer([source, to], wrong)
        self._tell(found, wrong)  # ends moves that are over, as one without its last step
        way = {name: self.app_of(name).source for name in (source, to)}
        try:
            move(done, way, patience=patience, started=started)
        except psycopg.Error as error:
            idle = psycopg.errors.IdleInTransactionSessionTimeout
            if not tries or not (isinstance(error, idle) or is_lost(error)):
                raise
            return self._move(done, to, patience, started, tries - 1)
        if done.is_done:
            self.refresh(to)
            self._tell(found, wrong)
        return done

    def stay(self, slot: int) -> None:
        """Give up a move of a slot. Raises InvalidParameter if a part of it has left."""
        _check_slot(slot)
        found, wrong = self.learn()
        source = self._owner(slot)
        _must_answer([source], wrong)
        self.app_of(source).client.call(sql.STAY, {"slot": slot})
        self.refresh(source)
        self._tell(found, wrong)

    def tell(self) -> list[str]:
        """Tell all shards the map. Return those that don't answer: they learn of it later.

        A database without a map, or with that of a shard of another name, is not told.
        """
        return self._tell(*self._maps(self.map.shards))

    def _tell(self, found: Iterable[str], wrong: dict[str, str]) -> list[str]:
        """Tell the map to shards that have answered; note those that no longer do."""
        for name in [name for name in found if name not in wrong]:
            try:
                told = {"map": self.map.to_json(), "self": None}
                self.app_of(name).client.call(sql.LEARN, told)
            except FAILURES as error:
                wrong[name] = _said(error)
        return sorted(wrong)

    def _owner(self, slot: int) -> str:
        """Return the shard of a slot."""
        return self.map.slots[slot][0]

    def learn(self) -> tuple[dict[str, Mapping[str, Any]], dict[str, str]]:
        """Read the map of each shard that can be reached: one alone may be out of date.

        Return these maps, and what is wrong with the other shards.
        """
        self.refresh()
        found: dict[str, Mapping[str, Any]] = {}
        wrong: dict[str, str] = {}
        asked: dict[str, str] = {}
        # A map may tell of more shards, or where one is now.
        while new := dict(self.map.shards.items() - asked.items()):
            asked |= new
            answers, failures = self._maps(new)
            found = {name: told for name, told in found.items() if name not in new} | answers
            wrong = {name: why for name, why in wrong.items() if name not in new} | failures
            for told in answers.values():
                self.map.learn(told)
        return found, wrong

    def _maps(self, names: Iterable[str]) -> tuple[dict[str, Mapping[str, Any]], dict[str, str]]:
        """Return the map of each shard that answers, and what is wrong with the others.

        All are asked at the same time. A silent shard delays this until its connection times out.
        """
        found: dict[str, Mapping[str, Any]] = {}
        wrong: dict[str, str] = {}
        names = sorted(names)
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            answers = list(pool.map(_map_of, [self.app_of(name) for name in names]))
        for name, told in zip(names, answers, strict=True):
            if isinstance(told, str):
                wrong[name] = told
            elif told["self"] != name:
                wrong[name] = f"its database is {told['self'] or 'none of the shards'}"
            else:
                found[name] = told
        return found, wrong

    def split(self, queue: str, max_running: int) -> dict[str, int]:
        """Divide a queue's limit among the shards, at least 1 each; return the parts.

        Raises OperationalError if a shard does not answer; then all keep their limits.
        No shard lends its part to another: one with few jobs leaves its part unused.
        """
        check_text("queue", queue, "mail")
        check_number("max_running", max_running, int, at_least=1)
        _, wrong = self.learn()
        names = sorted(self.map.shards)
        if max_running < len(names):
            raise ValueError(f"a limit of {max_running} can't be divided among {len(names)} shards")
        _must_answer(names, wrong)
        whole, rest = divmod(max_running, len(names))
        parts = {name: whole + (number < rest) for number, name in enumerate(names)}
        for name, part in parts.items():
            self.app_of(name).client.call(sql.LIMIT, {"queue": queue, "limit": part})
        return parts

    def check(self) -> list[str]:
        """Return what is wrong: shards that are down, slots with no shard or with two.

        It reports moves that have begun and no longer go on. It also reports jobs that have left a
        shard and not arrived, even while they are being moved.
        """
        told, failed = self.learn()
        wrong = [f"shard {name}: {why}" for name, why in failed.items()]
        for slot, (owner, _) in enumerate(self.map.slots):
            claims = [name for name in told if told[name]["slots"][slot][0] == name]
            if len(claims) != 1 and (owner in told or claims):
                wrong.append(f"slot {slot}: {', '.join(claims) or 'no shard'}")
        for name in told:
            try:
                wrong += self._unfinished(name)
            except FAILURES as error:
                wrong.append(f"shard {name}: {_said(error)}")
        return wrong

    def _unfinished(self, shard: str) -> Iterator[str]:
        """Return what is wrong with the moves away from a shard."""
        call = self.app_of(shard).client.call
        for slot, target, jobs in call(sql.UNDER_WAY, {}):
            yield f"slot {slot}: {jobs} jobs have left {shard}: go on with its move to {target}"
        for slot, target, held in call(sql.STOPPED, {}):
            yield (
                f"slot {slot}: its move from {shard} to {target} has stopped and holds {held} jobs:"
                " go on with it, or give it up"
            )


def _check_shard(name: str, dsn: str) -> None:
    """Check what the map is to hold. Every role that uses the queue can read it."""
    check_text("a shard's name", name, "a")
    check_text(f"the DSN of shard {name!r}", dsn, "dbname=a")
    given = conninfo_to_dict(Source(dsn).conninfo())
    if given.get("password") or given.get("sslpassword"):
        raise InvalidParameter(
            f"the DSN of shard {name!r} has a password, which every role could read in the map",
            hint="Leave it out, and put it into libpq's password file (~/.pgpass).",
        )


def _check_slot(slot: object) -> None:
    """Raise TypeError for what is no number, InvalidParameter if there is no such slot."""
    if not isinstance(slot, int) or isinstance(slot, bool):
        raise TypeError(f"slot must be a whole number, not {slot!r}: shard_of(key) is one")
    if not 0 <= slot < SLOTS:
        raise InvalidParameter(
            f"there is no slot {slot}", hint=f"Slots are 0 to {SLOTS - 1}: shard_of(key)."
        )


def _must_answer(names: Iterable[str], wrong: Mapping[str, str]) -> None:
    """Raise OperationalError if one of these shards has not answered: do not wait for it again."""
    for name in names:
        if name in wrong:
            raise psycopg.OperationalError(f"shard {name}: {wrong[name]}")


def _map_of(app: App) -> Mapping[str, Any] | str:
    """Return the map of a shard, or why it has none."""
    try:
        told: Mapping[str, Any] = app.client.call(sql.MAP, {})[0][0]
    except FAILURES as error:
        return _said(error)
    return told if told["slots"] else "its database has no map"


def _said(error: Exception) -> str:
    """Return the reason why a shard does not answer, in one line."""
    if isinstance(error, psycopg.OperationalError):
        return "can't be reached"
    return " ".join(str(error).split())
