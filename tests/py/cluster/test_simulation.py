"""The model of bench/simulate_cluster.py beside three databases: job by job the same."""

from __future__ import annotations

import importlib.util
import random
import sys
from types import ModuleType

import psycopg
import pytest

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


def test_the_model_and_three_databases_agree(
    simulator: ModuleType, cluster: Cluster, dsns: dict[str, str]
) -> None:
    """Skewed keys; a shard is stopped, and its jobs are deferred when it is back; a slot moves."""
    rng = random.Random(7)
    names = keys(lambda _: True, 40)
    assert [simulator.slot_of(name) for name in names] == [shard_of(name) for name in names]
    weights = [1 / (n + 1) for n in range(len(names))]
    model = simulator.Model(3, capacity=5)
    refused: list[str] = []
    lost = 1
    busiest: str | None = None
    cluster.patience = 0

    def defer(key: str) -> None:
        cluster.defer("work", {}, shard_key=key)

    for second in range(9):
        drawn = rng.choices(names, weights, k=12)
        model.defer(map(shard_of, drawn))
        for key in drawn:
            try:
                defer(key)
            except psycopg.OperationalError:
                refused.append(key)
        for number, name in enumerate(NAMES):
            if number != model.lost:
                ran = run_some(dsns[name], model.capacity)
                assert ran == min(model.capacity, model.backlog[number]), (second, name)
        model.run()
        assert model.refused == len(refused)
        if second == 2:
            model.lose(lost)
            stop(dsns, "b", is_open=False)
            cluster.app_of("b").close()
        elif second == 5:
            model.recover()
            stop(dsns, "b", is_open=True)
            for key in refused:
                defer(key)
        elif second == 6:
            busiest = max(
                set(names),
                key=lambda key: model.owner[shard_of(key)] == 0 and weights[names.index(key)],
            )
            moved = model.move(shard_of(busiest), 2)
            assert cluster.move(shard_of(busiest), "c").jobs == moved
    assert refused
    assert busiest is not None
    count = "select count(*) from queue.jobs where finished_at is null"
    assert [rows(dsns[name], count)[0][0] for name in NAMES] == model.backlog
    done = "select count(*) from queue.jobs where state = 'succeeded'"
    assert [rows(dsns[name], done)[0][0] for name in NAMES] == model.ran
    assert sum(model.ran) + sum(model.backlog) == 9 * 12


def stop(dsns: dict[str, str], name: str, *, is_open: bool) -> None:
    """Let nobody into a database any more, as if its server had stopped; or let them in again."""
    with psycopg.connect(dsns["a"], autocommit=True) as connection:
        database = psycopg.sql.Identifier(f"shard_{name}")
        allowed = psycopg.sql.Literal(is_open)
        connection.execute(
            psycopg.sql.SQL("alter database {} allow_connections {}").format(database, allowed)
        )
        if not is_open:
            connection.execute(
                "select pg_terminate_backend(pid, 60000) from pg_stat_activity where datname = %s",
                [f"shard_{name}"],
            )
