"""The model of bench/simulate_cluster.py beside three databases: job by job the same."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import psycopg
import pytest
from psycopg import sql

from pgdefer.contrib.cluster import Cluster, shard_of
from support import ROOT

from .conftest import NAMES, keys, rows


@pytest.fixture(scope="module")
def simulator() -> ModuleType:
    path = ROOT / "bench" / "simulate_cluster.py"
    spec = importlib.util.spec_from_file_location("simulate_cluster", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulate_cluster"] = module
    spec.loader.exec_module(module)
    return module


def test_the_same_seed_gives_the_same_figures(simulator: ModuleType) -> None:
    options = ["--shards", "4", "--seconds", "40", "--lost-for", "5", "--keys", "500"]
    first, again, other = (
        simulator.simulate(simulator.parsed([*options, "--seed", seed])) for seed in "112"
    )
    assert first == again != other


def run_some(dsn: str, count: int) -> int:
    """Run the oldest jobs of a shard, as many as its capacity."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute("select queue.register_worker('w')").fetchone()
        assert row is not None
        fetched = connection.execute(
            "select id, claim from queue.fetch(%s, max_jobs => %s)", [row[0], count]
        ).fetchall()
        for job in fetched:
            connection.execute("select queue.succeed(%s, %s)", job)
        connection.execute("select queue.deregister_worker(%s)", [row[0]])
    return len(fetched)


class Both:
    """The model, and the databases."""

    def __init__(self, model: Any, cluster: Cluster, dsns: dict[str, str]) -> None:
        self.model, self.cluster, self.dsns = model, cluster, dsns
        self.refused: list[str] = []

    def defer(self, drawn: list[str]) -> None:
        self.model.defer(map(shard_of, drawn))
        for key in drawn:
            try:
                self.cluster.defer("work", {}, shard_key=key)
            except psycopg.OperationalError:
                self.refused.append(key)
        assert self.model.refused == len(self.refused)

    def run(self) -> None:
        for number, name in enumerate(NAMES):
            if number != self.model.lost:
                ran = run_some(self.dsns[name], self.model.capacity)
                assert ran == min(self.model.capacity, self.model.backlog[number]), name
        self.model.run()

    def lose(self, number: int) -> None:
        self.model.lose(number)
        stop(self.dsns, NAMES[number], is_open=False)
        self.cluster.app_of(NAMES[number]).close()

    def recover(self, number: int) -> None:
        self.model.recover()
        stop(self.dsns, NAMES[number], is_open=True)
        for key in self.refused:
            self.cluster.defer("work", {}, shard_key=key)

    def move(self, slot: int, number: int) -> None:
        jobs = self.model.move(slot, number)
        assert self.cluster.move(slot, NAMES[number]).jobs == jobs


def test_the_model_and_three_databases_agree(
    simulator: ModuleType, cluster: Cluster, dsns: dict[str, str]
) -> None:
    """Skewed keys; a shard is stopped, and its jobs are deferred when it is back; a slot moves."""
    rng = random.Random(7)
    names = keys(lambda _: True, 40)
    assert [simulator.slot_of(name) for name in names] == [shard_of(name) for name in names]
    weights = [1 / (n + 1) for n in range(len(names))]
    both = Both(simulator.Model(3, capacity=5), cluster, dsns)
    hottest_of_a = next(key for key in names if shard_of(key) * 3 // 1024 == 0)
    events: dict[int, Callable[[], None]] = {
        3: lambda: both.lose(1),
        6: lambda: both.recover(1),
        7: lambda: both.move(shard_of(hottest_of_a), 2),
    }
    for second in range(9):
        events.get(second, lambda: None)()
        both.defer(rng.choices(names, weights, k=12))
        both.run()
    assert both.refused
    count = "select count(*) from queue.jobs where finished_at is null"
    assert [rows(dsns[name], count)[0][0] for name in NAMES] == both.model.backlog
    done = "select count(*) from queue.jobs where state = 'succeeded'"
    assert [rows(dsns[name], done)[0][0] for name in NAMES] == both.model.ran
    assert sum(both.model.ran) + sum(both.model.backlog) == 9 * 12


def stop(dsns: dict[str, str], name: str, *, is_open: bool) -> None:
    """Let nobody into a database, as if its server had stopped; or let them in again."""
    with psycopg.connect(dsns["a"], autocommit=True) as connection:
        database = sql.Identifier(f"shard_{name}")
        allowed = sql.Literal(is_open)
        connection.execute(
            sql.SQL("alter database {} allow_connections {}").format(database, allowed)
        )
        if not is_open:
            connection.execute(
                "select pg_terminate_backend(pid, 60000) from pg_stat_activity where datname = %s",
                [f"shard_{name}"],
            )
