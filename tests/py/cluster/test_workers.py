"""One worker process for all shards: a ledger of what ran, one shard stopped meanwhile."""

from __future__ import annotations

import collections
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from pgdefer import App, MultiWorker, current_job
from pgdefer.contrib.cluster import Cluster, shard_of

from .conftest import NAMES, keys, rows
from .test_simulation import stop


async def test_every_job_runs_once_and_in_order(
    cluster: Cluster, app: App, dsns: dict[str, str]
) -> None:
    """Also those that handlers defer by the cluster, wherever their keys belong."""
    ran: list[tuple[str, int, str]] = []

    @app.task(name="work", lock="{key}")
    def work(key: str, n: int) -> None:
        ran.append((key, n, conninfo_to_dict(current_job().dsn)["dbname"]))
        if 100 <= n < 200:
            cluster.defer("work", {"key": key[::-1], "n": n + 100})

    names = keys(lambda _: True, 9)
    home = {key: "abc"[shard_of(key) * 3 // 1024] for key in names}
    jobs = [(names[n % 9], n) for n in range(60)]
    for key, n in jobs:
        cluster.defer("work", {"key": key, "n": n})
    stop(dsns, "b", is_open=False)
    cluster.app_of("b").close()
    with pytest.raises(psycopg.OperationalError):
        cluster.defer("work", {"key": next(key for key in names if home[key] == "b"), "n": 1000})
    await MultiWorker(app, [dsns["a"], dsns["c"]], drain=True).run_async()
    assert {key for key, *_ in ran} == {key for key in names if home[key] != "b"}
    stop(dsns, "b", is_open=True)
    later = [(names[n % 9], n) for n in range(100, 160)]
    for key, n in later:
        cluster.defer("work", {"key": key, "n": n})
    # a child may come to a shard that is drained: so once more
    for _ in range(2):
        await MultiWorker(app, list(dsns.values()), drain=True).run_async()
    wanted = jobs + later + [(key[::-1], n + 100) for key, n in later]
    assert collections.Counter((key, n) for key, n, _ in ran) == collections.Counter(wanted)
    assert all(where == f"shard_{'abc'[shard_of(key) * 3 // 1024]}" for key, _, where in ran)
    for key in names:
        numbers = [n for other, n, _ in ran if other == key]
        assert numbers == sorted(numbers)
    assert cluster.check() == []


def run(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pgdefer.contrib.cluster", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in {0, 1}, done.stderr
    return done.stdout


def test_the_command(dsns: dict[str, str], tmp_path: Path) -> None:
    assert run("create", *(f"{name}={dsns[name]}" for name in NAMES)) == ""
    assert run("slots", "--dsn", dsns["a"]).splitlines() == [
        "a: 342 slots: 0-341", "b: 341 slots: 342-682", "c: 341 slots: 683-1023",
    ]  # fmt: skip
    said = run("move", "--dsn", dsns["b"], "5", "c")
    assert said.startswith("0 jobs moved; the longest pause of a part: 0.00 s")
    assert run("slots", "--dsn", dsns["a"]).splitlines()[0] == "a: 341 slots: 0-4, 6-341"
    assert run("check", "--dsn", dsns["a"]) == ""
    run("dsns", "--dsn", dsns["a"], tmp_path / "shards")
    assert (tmp_path / "shards").read_text("utf-8").splitlines() == [dsns[name] for name in NAMES]
    assert rows(dsns["b"], "select queue.shard_map() -> 'slots' -> 5") == [(["c", 2],)]
