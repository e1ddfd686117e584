"""Deep and wide: the effects of one call end, however long the chain, with the default stack depth.

Each test builds one shape of DEPTH jobs and ends the job that blocks it. Nothing may raise, and no job may remain.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
DEPTH = 10_000
SECONDS = 300  # seconds for one statement, on a busy machine
# The simplest recursion ends at a depth of 860. Shapes that need a call per job have the full depth only in the
# long form.
wide = pytest.mark.parametrize("depth", [900, pytest.param(DEPTH, marks=pytest.mark.soak)])
deep = pytest.mark.parametrize("depth", [400, pytest.param(DEPTH, marks=pytest.mark.soak)])
FULL = {"concurrency_key": "K", "concurrency_limit": 1}
DISCARD = FULL | {"options": {"on_limit": "discard"}}

BRIEF = """
    select count(*) from queue.defer_many(jsonb_build_array(jsonb_build_object('task','a','concurrency_key','K','concurrency_limit',1)) || (select jsonb_agg(jsonb_build_object('task','t','lock','L','concurrency_key','K','concurrency_limit',1,'options','{"on_limit":"discard"}'::jsonb)) from generate_series(1,%s)))
"""
# A chain: each job needs the one before.
CHAIN = """
    do $$
    declare
      v_id bigint := (select min(j.id) from queue.jobs j where j.task = 'root');
    begin
      for n in 1 .. {n} loop
        v_id := queue.defer('t', needs => array[v_id], concurrency_key => {key}, concurrency_limit => {limit}, options => '{options}');
      end loop;
    end $$
"""


@pytest.fixture(autouse=True)
def within_time(conn: Connection) -> None:
    """No statement takes longer than SECONDS; the stack depth limit is the default."""
    assert conn.execute(
        "select boot_val, reset_val from pg_settings where name = 'max_stack_depth'"
    )
    assert conn.execute("show max_stack_depth").fetchone() == ("2MB",)
    conn.execute(f"set statement_timeout = '{SECONDS} s'")


def register(conn: Connection) -> int:
    return int(ask(conn, "select queue.register_worker('w', null, '{\"dead_after\": 600}')"))


def ask(conn: Connection, query: str, *parameters: Any) -> Any:
    row = conn.execute(query, parameters).fetchone()
    assert row is not None
    return row[0]


def ask_all(conn: Connection, query: str, ids: list[int]) -> int:
    """Count over all ids, with as many ids per call as it may change."""
    return sum(ask(conn, query, ids[at : at + 1000]) for at in range(0, len(ids), 1000))


def defer(conn: Connection, *jobs: dict[str, Any]) -> list[int]:
    rows = conn.execute("select queue.defer_many(%s)", [json.dumps(jobs)]).fetchall()
    return [id for (id,) in rows]


def fetch(conn: Connection, worker: int, n: int = 1) -> list[tuple[int, int]]:
    """Claim all ready jobs, once everything is admitted, in as many answers as necessary."""
    admit(conn)
    pairs: list[tuple[int, int]] = []
    query = "select id, claim from queue.fetch(%s, null, %s)"
    while more := conn.execute(query, [worker, n - len(pairs)]).fetchall():
        pairs += more
        if len(pairs) == n:
            break
    return pairs


def finish(conn: Connection, pairs: list[tuple[int, int]], **outcome: Any) -> None:
    outcome = {"outcome": "succeeded"} | outcome
    outcomes = [outcome | {"id": id, "claim": claim} for id, claim in pairs]
    refused = conn.execute(
        "select * from queue.finish_many(%s) where error is not null", [json.dumps(outcomes)]
    ).fetchall()
    assert refused == []


def admit(conn: Connection) -> None:
    """Tick until nothing new is left."""
    while ask(conn, "select t.admitted from queue.tick() t"):
        pass


def states(conn: Connection) -> dict[str, int]:
    rows = conn.execute("select state from queue.jobs").fetchall()
    return dict(collections.Counter(state for (state,) in rows))


def settled(conn: Connection, **expected: int) -> None:
    """The states of all jobs, when ticks change nothing any more; functions that read everything work."""
    admit(conn)
    found = states(conn)
    while found != expected:
        ask(conn, "select t.admitted from queue.tick() t")
        before, found = found, states(conn)
        if found == before:
            break
    assert found == expected
    assert conn.execute("select * from queue.check()").fetchall() == []
    ask(conn, "select queue.pause()")
    ask(conn, "select queue.resume()")


# The cycle of lock, slot and end


@pytest.mark.parametrize("n", [300, pytest.param(DEPTH, marks=pytest.mark.soak)])
def test_a_producer_alone(conn: Connection, n: int) -> None:
    worker = register(conn)
    assert ask(conn, BRIEF.replace("%s", str(n))) == n + 1
    ((_, claim),) = fetch(conn, worker)
    settled(conn, running=1, cancelled=n)
    finish(conn, [(1, claim)])
    settled(conn, succeeded=1, cancelled=n)


@pytest.mark.parametrize("modes", ["ordered", "mutex", "ordered mutex"])
@wide
def test_members_of_a_lock_with_discard(conn: Connection, depth: int, modes: str) -> None:
    """The holder of their lock ends while another job has the slot."""
    worker = register(conn)
    _, head = defer(conn, {"task": "a"} | FULL, {"task": "head", "lock": "L"})
    pairs = fetch(conn, worker, 2)
    mode = modes.split()
    jobs = [
        {"task": "t", "lock": "L"}
        | DISCARD
        | {"options": {"on_limit": "discard", "lock_mode": mode[n % len(mode)]}}
        for n in range(depth)
    ]
    defer(conn, *jobs)
    admit(conn)
    finish(conn, [pair for pair in pairs if pair[0] == head])
    settled(conn, running=1, succeeded=1, cancelled=depth)


@pytest.mark.parametrize("modes", ["ordered", "mutex", "ordered mutex"])
@wide
def test_expired_members_of_a_lock(conn: Connection, depth: int, modes: str) -> None:
    worker = register(conn)
    defer(conn, {"task": "head", "lock": "L"})
    pairs = fetch(conn, worker)
    expires_at = ask(conn, "select (clock_timestamp() + interval '1 s')::text")
    mode = modes.split()
    jobs = [
        {
            "task": "t",
            "lock": "L",
            "options": {"expires_at": expires_at, "lock_mode": mode[n % len(mode)]},
        }
        for n in range(depth)
    ]
    defer(conn, *jobs, {"task": "last", "lock": "L"})
    ask(
        conn, "select pg_sleep(greatest(0, extract(epoch from %s - clock_timestamp())))", expires_at
    )
    finish(conn, pairs)
    settled(conn, succeeded=1, cancelled=depth, ready=1)


@deep
@pytest.mark.parametrize(
    "call",
    [
        "select count(queue.cancel(id)) from unnest(%s::bigint[]) id",
        "select count(*) from queue.fail_jobs(%s) where error is null",
        "select count(*) from queue.done(%s) where error is null",
        "select count(*) from queue.delete(%s, true) where error is null",
    ],
    ids=["cancel", "fail_jobs", "done", "delete"],
)
@pytest.mark.parametrize("modes", ["ordered", "ordered mutex"])
def test_members_of_a_lock_ended_by_hand(
    conn: Connection, depth: int, call: str, modes: str
) -> None:
    register(conn)
    mode = modes.split()
    ids = defer(
        conn,
        *(
            {"task": "t", "lock": "L", "options": {"lock_mode": mode[n % len(mode)]}}
            for n in range(depth)
        ),
    )
    (last,) = defer(conn, {"task": "last", "lock": "L"})
    admit(conn)
    assert ask_all(conn, call, ids) == depth
    admit(conn)
    assert ask(conn, "select state from queue.jobs where id = %s", last) == "ready"
    assert conn.execute("select * from queue.check()").fetchall() == []


@deep
def test_a_mixed_lock(conn: Connection, depth: int) -> None:
    """Ordered and mutex members in turn: each runs alone, and the last of them runs."""
    worker = register(conn)
    jobs = [
        {"task": "t", "lock": "L", "options": {"lock_mode": ["ordered", "mutex"][n % 2]}}
        for n in range(depth)
    ]
    defer(conn, *jobs)
    admit(conn)
    for _ in range(20):
        (pair,) = fetch(conn, worker, 10)
        finish(conn, [pair])
    rows = conn.execute(
        "select id from queue.jobs where state <> 'succeeded' order by id"
    ).fetchall()
    left = [id for (id,) in rows]
    assert len(left) == depth - 20
    assert (
        ask_all(conn, "select count(*) from queue.done(%s) where error is null", left[:-1])
        == depth - 21
    )
    assert [id for id, _ in fetch(conn, worker, 10)] == left[-1:]


@deep
def test_locks_that_lead_to_one_another(conn: Connection, depth: int) -> None:
    """Each of many locks has a holder whose end discards the next one of it."""
    worker = register(conn)
    defer(conn, {"task": "a"} | FULL)
    fetch(conn, worker)
    heads = defer(conn, *({"task": "h", "lock": f"L{n}"} for n in range(depth)))
    defer(conn, *({"task": "t", "lock": f"L{n}"} | DISCARD for n in range(depth)))
    admit(conn)
    call = "select count(*) from queue.done(%s) where error is null"
    assert ask_all(conn, call, heads) == depth
    settled(conn, running=1, succeeded=depth, cancelled=depth)


# Slots


@deep
def test_keys_that_are_shut_in_turn(conn: Connection, depth: int) -> None:
    """Half of the jobs reach k1 first, half k2; each is full, then opens while the other is full."""
    worker = register(conn)

    def keys(*names: str) -> dict[str, Any]:
        return {"concurrency": [{"key": name, "limit": 1} for name in names]}

    one, two = defer(
        conn, {"task": "a", "options": keys("k1")}, {"task": "a", "options": keys("k2")}
    )
    claims = dict(fetch(conn, worker, 2))
    orders = [("k1", "k2"), ("k2", "k1")]
    ids = defer(conn, *({"task": "t", "options": keys(*orders[n % 2])} for n in range(depth)))
    for holder, other in ((one, "k1"), (two, "k2")):
        assert fetch(conn, worker) == []
        finish(conn, [(holder, claims[holder])])
        if holder == one:  # the other one is still full: fill this one again
            assert fetch(conn, worker) == []
            (one,) = defer(conn, {"task": "a", "priority": 1, "options": keys(other)})
            claims |= dict(fetch(conn, worker))
            assert one in claims
    assert fetch(conn, worker) == []
    finish(conn, [(one, claims[one])])
    for _ in range(10):
        (pair,) = fetch(conn, worker, 10)
        assert pair[0] == ids.pop(0)
        finish(conn, [pair])
    assert ask_all(conn, "select count(*) from queue.done(%s) where error is null", ids) == len(ids)
    settled(conn, succeeded=depth + 3)


@wide
def test_waiters_for_a_slot_that_expire(conn: Connection, depth: int) -> None:
    worker = register(conn)
    defer(conn, {"task": "a"} | FULL)
    pairs = fetch(conn, worker)
    expires_at = ask(conn, "select (clock_timestamp() + interval '1 s')::text")
    defer(
        conn, *({"task": "t", "options": {"expires_at": expires_at}} | FULL for _ in range(depth))
    )
    defer(conn, {"task": "last"} | FULL)
    ask(
        conn, "select pg_sleep(greatest(0, extract(epoch from %s - clock_timestamp())))", expires_at
    )
    finish(conn, pairs)
    settled(conn, succeeded=1, cancelled=depth, ready=1)


# Needs


def chain(
    conn: Connection, options: dict[str, Any], is_full: bool = False, depth: int = DEPTH
) -> None:
    conn.execute(
        CHAIN.format(
            n=depth,
            options=json.dumps(options),
            key="'K'" if is_full else "null",
            limit=1 if is_full else "null",
        )
    )
    admit(conn)


@deep
@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_chain_of_needs_that_fails_and_is_retried(
    conn: Connection, depth: int, mode: str
) -> None:
    worker = register(conn)
    (root,) = defer(conn, {"task": "root"})
    chain(conn, {"needs_mode": mode}, depth=depth)
    finish(conn, fetch(conn, worker), outcome="failed", options={"retryable": False})
    settled(conn, failed=1, upstream_failed=depth)
    assert ask(conn, "select error is null from queue.retry(%s)", [root])
    settled(conn, ready=1, waiting=depth)
    finish(conn, fetch(conn, worker))
    ((id, claim),) = fetch(conn, worker, 10)
    assert id == root + 1
    assert ask(
        conn, "select queue.fail(%s, %s, 'x', options => '{\"retryable\": false}')", id, claim
    )
    settled(conn, succeeded=1, failed=1, upstream_failed=depth - 1)


@pytest.mark.parametrize("end", ["succeed", "cancel", "hold", "delete"])
@pytest.mark.parametrize("mode", ["all", "any"])
@wide
def test_a_chain_that_proceeds_and_is_discarded(
    conn: Connection, depth: int, mode: str, end: str
) -> None:
    worker = register(conn)
    defer(conn, {"task": "a"} | FULL)
    fetch(conn, worker)
    (root,) = defer(conn, {"task": "root"})
    options = {"needs_mode": mode, "on_need_failure": "proceed", "on_limit": "discard"}
    chain(conn, options, is_full=True, depth=depth)
    if end == "succeed":
        finish(conn, fetch(conn, worker))
        settled(conn, running=1, succeeded=1, cancelled=depth)
    elif end == "delete":
        ask(conn, "select error is null from queue.delete(%s, true)", [root])
        settled(conn, running=1, cancelled=depth)
    else:
        ask(conn, f"select queue.{end}(%s)", root)
        rest = {"held": 1, "cancelled": depth} if end == "hold" else {"cancelled": depth + 1}
        settled(conn, running=1, **rest)


@deep
def test_a_chain_of_needs_ended_by_one_call(conn: Connection, depth: int) -> None:
    """From the last to the first and the other way round."""
    register(conn)
    (root,) = defer(conn, {"task": "root"})
    chain(conn, {}, depth=depth)
    ids = list(range(root, root + depth + 1))
    call = "select count(*) from queue.{}(%s) where error is null"
    assert ask(conn, call.format("fail_jobs"), ids[::-2]) == len(ids[::-2])
    admit(conn)
    assert ask_all(conn, call.format("done"), ids) == len(ids)
    settled(conn, succeeded=depth + 1)


@wide
def test_a_deadline_that_spreads(conn: Connection, depth: int) -> None:
    register(conn)
    defer(conn, {"task": "root"})
    chain(conn, {}, depth=depth)
    conn.execute(
        "select queue.defer('urgent', needs => array[(select max(id) from queue.jobs)],"
        " deadline => '2100-01-01')"
    )
    admit(conn)
    count = "select count(*) from queue.jobs where deadline = '2100-01-01'"
    assert ask(conn, count) == depth + 2
    settled(conn, ready=1, waiting=depth + 1)


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
@wide
def test_one_that_needs_many(conn: Connection, depth: int, outcome: str) -> None:
    worker = register(conn)
    ids = defer(conn, *({"task": "t"} for _ in range(depth)))
    for mode in ("all", "any"):
        defer(conn, {"task": "in", "priority": -1, "needs": ids, "options": {"needs_mode": mode}})
    admit(conn)
    finish(conn, fetch(conn, worker, depth), outcome=outcome)
    if outcome == "succeeded":
        settled(conn, succeeded=depth, ready=2)
    else:
        settled(conn, failed=depth, upstream_failed=2)
        assert (
            ask_all(conn, "select count(*) from queue.retry(%s) where error is null", ids) == depth
        )
        settled(conn, ready=depth, waiting=2)


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
@wide
def test_many_that_need_one(conn: Connection, depth: int, outcome: str) -> None:
    worker = register(conn)
    (root,) = defer(conn, {"task": "root"})
    defer(conn, *({"task": "t", "needs": [root]} for _ in range(depth)))
    admit(conn)
    finish(conn, fetch(conn, worker), outcome=outcome)
    if outcome == "succeeded":
        settled(conn, succeeded=1, ready=depth)
    else:
        settled(conn, failed=1, upstream_failed=depth)
        ask(conn, "select error is null from queue.retry(%s)", [root])
        settled(conn, ready=1, waiting=depth)


@wide
def test_a_chain_within_a_lock_and_a_key(conn: Connection, depth: int) -> None:
    """All edges at once: each member of the lock is needed by the next, and discarded when it proceeds."""
    worker = register(conn)
    defer(conn, {"task": "a"} | FULL)
    fetch(conn, worker)
    (root,) = defer(conn, {"task": "root", "lock": "L"})
    conn.execute(
        f"""
        do $$
        declare
          v_id bigint := {root};
        begin
          for n in 1 .. {depth} loop
            v_id := queue.defer('t', needs => array[v_id], lock => 'L', concurrency_key => 'K', concurrency_limit => 1,
              options => '{{"on_need_failure": "proceed", "on_limit": "discard"}}');
          end loop;
        end $$
        """
    )
    admit(conn)
    finish(conn, fetch(conn, worker))
    settled(conn, running=1, succeeded=1, cancelled=depth)


# Queueing locks


@pytest.mark.parametrize(
    ("keys", "depth"),
    [
        (1, 1000),
        pytest.param(1, DEPTH, marks=pytest.mark.soak),
        (3000, 3000),
        pytest.param(DEPTH, DEPTH, marks=pytest.mark.soak),
    ],
)
def test_replaced_often(
    conn: Connection, connect: Callable[..., Connection], keys: int, depth: int
) -> None:
    worker = register(conn)
    defer(conn, *({"task": "t", "args": {"n": 0}, "queueing_lock": f"Q{n}"} for n in range(keys)))
    admit(conn)
    replace = {"options": {"on_conflict": "replace"}}
    with conn.transaction():
        for start in range(0, depth, 1000):
            numbers = range(start + 1, start + 1001)
            jobs = [
                {"task": "t", "args": {"n": n}, "queueing_lock": f"Q{n % keys}"} | replace
                for n in numbers
            ]
            if keys == 1:
                for job in jobs:
                    defer(conn, job)
            else:
                defer(conn, *jobs)
        # meanwhile nobody starts them, and nobody waits for them
        other = connect()
        (plain,) = defer(other, {"task": "plain", "priority": -1})
        ((id, claim),) = fetch(other, worker)
        assert id == plain
        finish(other, [(id, claim)])
    found: list[int] = []
    fetch_some = "select (args ->> 'n')::integer from queue.fetch(%s, null, %s)"
    while rows := conn.execute(fetch_some, [worker, depth]).fetchall():
        found += [n for (n,) in rows]
    assert sorted(found) == ([depth] if keys == 1 else list(range(1, depth + 1)))
    settled(conn, succeeded=1, running=keys)
