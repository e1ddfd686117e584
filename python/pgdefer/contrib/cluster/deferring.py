# Generated from deferring_async.py: change that, and run `make generate`.
"""Deferring in the shard of each job's key.

Tests: cluster/test_map.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import Any, Unpack

import psycopg

from pgdefer.client.client import Client
from pgdefer.contrib.cluster import sql
from pgdefer.contrib.cluster.base import ClusterBase
from pgdefer.contrib.cluster.shards import ELSEWHERE, KeyedJob, is_unreached
from pgdefer.database.callers import OWN, AnyConnection
from pgdefer.errors import InvalidParameter, PgDeferError, sqlstate_of
from pgdefer.options import DeferOptions
from pgdefer.tasks.deferral import deferring
from pgdefer.tasks.job import Job
from pgdefer.tasks.prepared_job import PreparedJob

__all__ = ["Deferring"]


class Deferring(ClusterBase):
    """The calls that defer."""

    def defer(
        self,
        task: str,
        args: Mapping[str, Any] | None = None,
        *,
        shard_key: str | None = None,
        connection: AnyConnection = OWN,
        **options: Unpack[DeferOptions],
    ) -> Job[Any]:
        """Defer a job in the shard of its key.

        Without `shard_key`, the key is the job's lock, else its share, else its header `tenant`. If
        the key has moved to another shard, or is moving, the call follows it, for `patience`
        seconds. A `connection` must lead to the right shard; with it, the call does not follow the
        key, but raises the shard's error.
        """
        job = self.keyed(task, args, shard_key, options)
        return (self._deferred([job], connection))[0]

    def defer_many(self, calls: Iterable[tuple[str, PreparedJob[Any]]]) -> list[Job[Any]]:
        """Defer calls (`app.prepare`) with their keys: for each shard, all or none.

        While a slot of that shard moves, this holds only for each key.
        """
        jobs = KeyedJob.all_of(calls)
        if not self.map.slots:
            self.refresh()
        found: dict[str, list[int]] = {}
        for number, job in enumerate(jobs):
            found.setdefault(self.map.owner_of(job.key), []).append(number)
        done: dict[int, Job[Any]] = {}
        for numbers in found.values():
            some = [jobs[number] for number in numbers]
            done.update(zip(numbers, self._deferred(some), strict=True))
        return [done[number] for number in range(len(jobs))]

    def refresh(self, shard: str | None = None) -> None:
        """Read the map of a shard, or of the first database that answers."""
        error: Exception | None = None
        for app in [self.app_of(shard)] if shard is not None else self.apps():
            try:
                rows = app.client.call(sql.MAP, {})
            except Exception as caught:
                error = caught
            else:
                if rows[0][0]["slots"]:
                    self.map.learn(rows[0][0])
                    return
        raise error or InvalidParameter(
            "no database of the cluster has a map",
            hint="Give the DSN of a shard: `python -m pgdefer.contrib.cluster create` makes them.",
        )

    def _deferred(
        self, jobs: Sequence[KeyedJob], connection: AnyConnection = OWN
    ) -> list[Job[Any]]:
        """Defer jobs of one shard; a job whose key has moved is deferred where the key is now."""
        if not self.map.slots:
            self.refresh()
        keys = {job.key: job for job in jobs}
        shard = self.map.owner_of(jobs[0].key)
        until = monotonic() + self.patience
        while True:
            home = self._home_of(jobs[0].key)
            app = self.app_of(shard)
            try:
                return _defer_in(app.client, jobs, connection)
            except Exception as error:
                is_elsewhere = sqlstate_of(error) in ELSEWHERE
                if connection is not OWN or (is_elsewhere and monotonic() > until):
                    raise
                if not is_elsewhere and not self._has_moved(error, home):
                    raise
            if len(keys) > 1:
                by_key = {
                    key: self._deferred([job for job in jobs if job.key == key]) for key in keys
                }
                return [by_key[job.key].pop(0) for job in jobs]
            if not is_elsewhere:
                shard = self.map.owner_of(jobs[0].key)
                continue
            self.refresh(shard)
            found = (app.client.call(sql.FIND, {"key": jobs[0].key}))[0][0]
            if found in (None, shard):
                time.sleep(0.02)
            shard = found or shard

    def _has_moved(self, error: Exception, home: tuple[str, str]) -> bool:
        """Ask the other databases for the map, because a shard does not answer.

        Return whether the shard has moved, and the call was not made: only then it can be repeated.
        """
        if not isinstance(error, psycopg.OperationalError):
            return False
        shard, dsn = home
        for app in self.apps():
            if self._apps.get(shard) is not app:
                with contextlib.suppress(psycopg.Error, PgDeferError):
                    told = (app.client.call(sql.MAP, {}))[0][0]
                    if told["slots"]:
                        self.map.learn(told)
        return self.map.shards[shard] != dsn and is_unreached(error)


def _defer_in(
    client: Client, jobs: Sequence[KeyedJob], connection: AnyConnection
) -> list[Job[Any]]:
    """Defer jobs in one shard."""
    calls = [job.call for job in jobs]
    text = f"[{','.join(job.to_json() for job in jobs)}]"
    tasks = [call.task for call in calls]
    with deferring(client, calls) as deferral:
        rows = client.call(sql.DEFER_MANY, {"jobs": text}, connection, tasks=tasks)
        done: list[Job[Any]] = [Job(row[0], client) for row in rows]
        if deferral is not None:
            deferral.jobs.extend(done)
        return done
