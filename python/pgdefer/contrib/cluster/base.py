"""A cluster's map, and its app for each database.

Tests: cluster/test_map.py.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from pgdefer.app import App
from pgdefer.checks import check_number
from pgdefer.contrib.cluster.shards import KeyedJob, ShardMap, key_of
from pgdefer.options import as_list
from pgdefer.tasks.job import Job
from pgdefer.tasks.prepared import prepare

__all__ = ["ClusterBase"]


class ClusterBase:
    """What a cluster knows without asking."""

    def __init__(self, app: App, *dsns: str, patience: float = 10) -> None:
        if not isinstance(app, App):
            raise TypeError(f"app must be an App, not {app!r}")
        check_number("patience", patience, (int, float), at_least=0, at_most=math.inf)
        self.app = app
        self.patience = patience
        self.map = ShardMap()
        self._seeds = [app.bind(dsn) for dsn in dsns]
        self._apps: dict[str, App] = {}
        self._bound_to: dict[str, str] = {}
        self._lock = threading.Lock()  # of both: threads must not bind a shard twice

    def app_of(self, shard: str) -> App:
        """Return the app bound to a shard. Raises LookupError if the map does not know it.

        If the shard's DSN has changed, the app and its jobs follow it.
        """
        with self._lock:
            dsn = self.map.shards[shard]
            if shard not in self._apps:
                self._apps[shard] = self.app.bind(dsn)
            elif self._bound_to[shard] != dsn:
                self._apps[shard].client.move(dsn)
            self._bound_to[shard] = dsn
            return self._apps[shard]

    def apps(self) -> Iterator[App]:
        """Return the bound apps of all shards that are known, and those of the given DSNs."""
        yield from self._seeds
        for shard in list(self.map.shards):  # the caller may learn of another one
            yield self.app_of(shard)

    def close(self) -> None:
        """Close the connections of synchronous calls."""
        for app in (*self._seeds, *self._apps.values()):
            app.close()

    async def close_async(self) -> None:
        """Close the connections of the running event loop, and those of synchronous calls."""
        for app in (*self._seeds, *self._apps.values()):
            await app.close_async()

    def keyed(
        self,
        task: str,
        args: Mapping[str, Any] | None,
        shard_key: str | None,
        options: Mapping[str, Any],
    ) -> KeyedJob:
        """Return a job with its key. Its parent is not the running job, which may be elsewhere."""
        given = {"parent": None, **options}
        job = key_of(self.app, prepare(self.app.client, task, args, given), shard_key)
        for need in as_list("needs", options.get("needs") or []):
            if isinstance(need, Job) and self.map.slots and not self._is_in(need, job.key):
                raise ValueError(f"job {need.id}, which this one needs, is in another shard")
        return job

    def _home_of(self, key: str) -> tuple[str, str]:
        """Return the shard of a key, and its DSN."""
        shard = self.map.owner_of(key)
        return shard, self.map.shards[shard]

    def _is_in(self, job: Job[Any], key: str) -> bool:
        return job.client is self.app_of(self.map.owner_of(key)).client
