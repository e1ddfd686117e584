"""Shares and rates in numbers: how soon small owners start, how even the turns are, and that no window is exceeded."""

from __future__ import annotations

import bisect
import collections
import itertools
import json
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, LiteralString

import psycopg
import pytest

Connection = psycopg.Connection[Any]
REGISTER: LiteralString = "select queue.register_worker('w', null, '{\"dead_after\": \"1 day\"}')"


def defer(conn: Connection, share: str, n: int) -> None:
    conn.execute(
        "select count(queue.defer('t', options => jsonb_build_object('share', %s::text)))"
        " from generate_series(1, %s)",
        [share, n],
    )


def starts(conn: Connection, n: int, batch: int = 100) -> list[str]:
    """Claim n jobs and return their shares, in the order of claims."""
    ((worker,),) = conn.execute(REGISTER)
    shares: list[str] = []
    while len(shares) < n:
        rows = conn.execute(
            "select j.options ->> 'share' from queue.fetch(%s, null, %s) with ordinality f"
            " join queue.job j on j.id = f.id order by f.ordinality",
            [worker, min(batch, n - len(shares))],
        ).fetchall()
        assert rows, f"only {len(shares)} of {n} start"
        shares += [share for (share,) in rows]
    return shares


@pytest.mark.parametrize("n", [2000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_small_owners_start_at_once(conn: Connection, n: int) -> None:
    """A defers very many jobs, B to K one each: all ten start within the next 20 claims."""
    defer(conn, "A", n)
    starts(conn, n // 10)
    for share in "BCDEFGHIJK":
        defer(conn, share, 1)
    conn.execute("select queue.tick()")
    assert set(starts(conn, 20, 5)) == set("ABCDEFGHIJK")


@pytest.mark.parametrize("n", [1000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_weights(conn: Connection, n: int) -> None:
    """3:1 is 3:1, +-2 %, also after a change of weights."""
    conn.execute("select queue.configure_share('heavy', '{\"weight\": 3}')")
    defer(conn, "heavy", n)
    defer(conn, "light", n)
    first = collections.Counter(starts(conn, n // 2))
    assert first["heavy"] / first["light"] == pytest.approx(3, rel=0.02)
    conn.execute("select queue.configure_share('heavy', '{\"weight\": 1}')")
    conn.execute("select queue.tick()")
    second = collections.Counter(starts(conn, n // 2))
    assert second["heavy"] / second["light"] == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("n", [100, pytest.param(1000, marks=pytest.mark.soak)])
def test_turns_are_even(conn: Connection, n: int) -> None:
    """Jain's index of n shares, which have deferred 1 to 30 times as much as they get."""
    conn.execute(
        "select count(queue.defer('t', options => jsonb_build_object('share', 's' || s)))"
        " from generate_series(1, %s) s cross join generate_series(1, 11 + s %% 30)",
        [n],
    )
    got = list(collections.Counter(starts(conn, 10 * n)).values())
    index = sum(got) ** 2 / (n * sum(x * x for x in got))
    assert len(got) == n
    assert index >= 0.99


# Rates


@pytest.mark.parametrize(
    ("n", "workers"), [(300, 2), pytest.param(20_000, 8, marks=pytest.mark.soak)]
)
def test_no_window_has_more_starts_than_the_rate(
    dsn: str, conn: Connection, n: int, workers: int
) -> None:
    """By started_at, while the limit is changed, in both directions."""
    window, limits = 0.05, itertools.cycle([2, 40, 10])  # 2: the next change comes in time
    conn.execute(
        "select count(queue.defer('t', options => %s)) from generate_series(1, %s)",
        [json.dumps({"concurrency": [{"key": "k", "rate": {"limit": 5, "per": "0.05 s"}}]}), n],
    )

    def work() -> None:
        with psycopg.connect(dsn, autocommit=True) as own:
            ((worker,),) = own.execute(REGISTER)
            while left(own):
                own.execute(
                    "select queue.finish_many(jsonb_agg(jsonb_build_object("
                    "'id', f.id, 'claim', f.claim, 'outcome', 'succeeded')))"
                    " from queue.fetch(%s, null, 7) f having count(*) > 0",
                    [worker],
                )

    def left(own: Connection) -> bool:
        ((is_left,),) = own.execute(
            "select exists (select from queue.active_job) or exists (select from queue.waiting)"
        )
        return bool(is_left)

    conn.execute("select queue.tick()")
    changes: list[tuple[float, float, int]] = [(0, 0, 5)]  # begun, over, the limit from then on
    with ThreadPoolExecutor(workers) as pool:
        working = [pool.submit(work) for _ in range(workers)]
        while wait(working, 6 * window).not_done:
            limit = next(limits)
            begun = now(conn)
            rate = {"rate": {"limit": limit, "per": f"{window} s"}}
            conn.execute("select queue.configure_key('k', %s)", [json.dumps(rate)])
            changes.append((begun, now(conn), limit))
        for each in working:
            each.result()
    times = [
        float(at)
        for (at,) in conn.execute(
            "select extract(epoch from started_at) from queue.finished order by started_at"
        )
    ]
    assert len(times) == n
    assert len(changes) > 2
    for i, at in enumerate(times):
        in_window = i + 1 - bisect.bisect_left(times, at - window + 1e-6)
        known = [k for k, (_, over, _) in enumerate(changes) if over <= at][-1]
        most = max(
            [changes[known][2]] + [limit for begun, _, limit in changes[known + 1 :] if begun <= at]
        )
        assert in_window <= most, f"{in_window} starts in {window} s until {at}, of {most}"
    assert not conn.execute("select * from queue.check()").fetchall()


def now(conn: Connection) -> float:
    ((at,),) = conn.execute("select extract(epoch from clock_timestamp())")
    return float(at)
