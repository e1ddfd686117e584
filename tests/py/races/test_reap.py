"""Every dead claim ends once, however many reapers run at once."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from pgdefer.database.embedded import temporary_server
from support import install

Connection = psycopg.Connection[Any]
Connect = Callable[..., Connection]

WORKERS = 20
CLAIMS = 10


def together(connect: Connect, *actions: Callable[[Connection], None]) -> None:
    """Let all begin at the same moment, each with a connection; their errors are raised."""
    gate = threading.Barrier(len(actions))

    def run(action: Callable[[Connection], None], conn: Connection) -> None:
        gate.wait(300)
        action(conn)

    with ThreadPoolExecutor(len(actions)) as pool:
        for each in [pool.submit(run, action, connect()) for action in actions]:
            each.result()


@pytest.mark.long
def test_a_long_outage_is_nobodys_death() -> None:
    """The first caller after the server's restart must not end claims that others still run."""
    with temporary_server(durable=True) as server:
        install(server, "postgres")
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as conn:
            conn.execute("select queue.defer('t')")
            conn.execute(
                "select queue.fetch(w) from queue.register_worker('w', null, '{\"dead_after\": 2}') w"
            )
            # As long ago as if the server had been down for an hour.
            conn.execute("update queue.worker set last_seen_at = now() - interval '1 hour'")
        server._stop("fast")
        server.ensure_running()
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as conn:
            begun = time.monotonic()
            reaped, next_expiry = conn.execute("select * from queue.reap()").fetchall()[0]
            assert reaped == 0
            while reaped == 0:
                conn.execute("select pg_sleep_until(%s)", [next_expiry])
                reaped, next_expiry = conn.execute("select * from queue.reap()").fetchall()[0]
                assert time.monotonic() < begun + 30
            [up_for] = conn.execute(
                "select clock_timestamp() - pg_postmaster_start_time()"
            ).fetchall()
            assert up_for[0].total_seconds() >= 2
            assert reaped == 1


def claim_all(conn: Connection) -> list[tuple[int, int, int]]:
    """Many workers with claims on jobs of every kind; return (id, claim, worker)."""
    conn.execute(
        """
        select * from queue.defer_many((
          select jsonb_agg(jsonb_build_object('task', 't')
            || case n %% 4
                 when 0 then '{}'
                 when 1 then jsonb_build_object('lock', 'lock ' || n)
                 when 2 then '{"concurrency_key": "k", "concurrency_limit": 1000}'
                 else '{"options": {"timeout": "1 hour"}}' end)
          from generate_series(1, %s) n))
        """,
        (WORKERS * CLAIMS,),
    )
    claims = []
    for n in range(WORKERS):
        row = conn.execute("select * from queue.register_worker(%s)", (f"w{n}",)).fetchone()
        assert row is not None
        rows = conn.execute(
            "select id, claim from queue.fetch(%s, null, %s)", (row[0], CLAIMS)
        ).fetchall()
        claims += [(id, claim, row[0]) for id, claim in rows]
    assert len(claims) == WORKERS * CLAIMS
    return claims


def kill_all(conn: Connection, *, are_known: bool = False) -> None:
    """Make every worker dead; with `are_known` all reapers see the same ones, and compete."""
    conn.execute(
        "update queue.worker set last_seen_at = last_seen_at - interval '1 hour', dead_after = '0'"
    )
    if are_known:
        conn.execute("update queue.worker set gone_at = clock_timestamp()")


def reap_until_clear(reaped: list[int]) -> Callable[[Connection], None]:
    """A reaper, which stops when no dead worker has a claim left, and counts the claims that it ended."""

    def reap(conn: Connection) -> None:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            row = conn.execute("select reaped from queue.reap()").fetchone()
            assert row is not None
            reaped.append(row[0])
            row = conn.execute(
                "select count(*) from queue.active_job where claim is not null"
            ).fetchone()
            if row == (0,):
                return
        raise TimeoutError

    return reap


@pytest.mark.parametrize("are_known", [False, True])
def test_four_reapers_count_each_dead_job_once(
    conn: Connection, connect: Connect, are_known: bool
) -> None:
    claims = claim_all(conn)
    kill_all(conn, are_known=are_known)
    reaped: list[int] = []
    together(connect, *[reap_until_clear(reaped)] * 4)
    assert sum(reaped) == len(claims)
    assert conn.execute(
        "select crashes, claims, failures, state, count(*) from queue.jobs group by 1, 2, 3, 4"
    ).fetchall() == [(1, 1, 0, "ready", len(claims))]
    rows = conn.execute("select job_id, claim, worker_id, outcome from queue.attempts").fetchall()
    assert sorted(rows) == sorted((*claim, "crashed") for claim in claims)


def test_four_reapers_of_leases_and_timeouts(conn: Connection, connect: Connect) -> None:
    claims = claim_all(conn)
    for id, claim, _ in claims[: len(claims) // 2]:
        conn.execute("select queue.extend(%s, %s, '1 hour')", (id, claim))
    conn.execute("update queue.active_job set claimed_at = claimed_at - interval '2 hours'")
    conn.execute("update queue.lease set expires_at = clock_timestamp()")
    kill_all(conn)
    reaped: list[int] = []
    together(connect, *[reap_until_clear(reaped)] * 4)
    assert sum(reaped) == len(claims)
    ended = Counter(id for (id,) in conn.execute("select job_id from queue.attempts").fetchall())
    assert ended == Counter(id for id, _, _ in claims)
    row = conn.execute("select count(*) from queue.lease").fetchone()
    assert row == (0,)


def test_zombies_that_finish_while_they_are_reaped(conn: Connection, connect: Connect) -> None:
    claims = claim_all(conn)
    kill_all(conn, are_known=True)
    said: dict[int, str | None] = {}
    reaped: list[int] = []

    def zombie(mine: list[tuple[int, int, int]], seed: int) -> Callable[[Connection], None]:
        order = random.Random(seed)

        def finish(conn: Connection) -> None:
            order.shuffle(mine)
            while mine:
                some = [mine.pop() for _ in range(min(len(mine), order.randint(1, 4)))]
                outcomes = [
                    {"id": id, "claim": claim, "outcome": order.choice(["succeeded", "failed"])}
                    for id, claim, _ in some
                ]
                rows = conn.execute(
                    "select id, state, error from queue.finish_many(%s)", (json.dumps(outcomes),)
                ).fetchall()
                assert len(rows) == len(some)
                said.update({id: state for id, state, error in rows})

        return finish

    zombies = [zombie(claims[n::3], n) for n in range(3)]
    together(connect, *zombies, *[reap_until_clear(reaped)] * 3)
    assert len(said) == len(claims)
    accepted = {id: state for id, state in said.items() if state is not None}
    assert sum(reaped) == len(claims) - len(accepted)
    for id, state, crashes, claimed in conn.execute(
        "select id, state, crashes, claims from queue.jobs"
    ).fetchall():
        assert claimed == 1
        assert (state, crashes) == ((accepted[id], 0) if id in accepted else ("ready", 1))
