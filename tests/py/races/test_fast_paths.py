"""The fast paths for one concurrency key and for locks do what the general ways would.

Two databases get the same random calls. In the second, the functions of the fast paths always
decline. After each call, what it returned and the stored state must be the same in both.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from pgdefer.database.embedded import EmbeddedServer
from support import count_from_one, create_database
from workers import wait_for

Call = tuple[Any, ...]
# worker, queues, max_jobs, options
Asked = tuple[int, list[str] | None, int, dict[str, int] | None]

ALWAYS_DECLINE = """
create or replace function queue._pass_slots_on(p_key text, p_n integer,
  p_worker bigint default null, p_queues text[] default null, p_max_jobs integer default 0,
  out is_done boolean, out ids bigint[], out first_claim bigint, out flags smallint)
language plpgsql as 'begin is_done := false; end';
create or replace function queue._claim_one_key(
  p_worker bigint, p_lanes integer[], p_n integer, out ids bigint[], out first_claim bigint)
language plpgsql as 'begin end';
create or replace function queue._pass_turns_on(p_ids bigint[], p_unless_news boolean default false)
returns boolean language plpgsql as 'begin return false; end';
"""
# Counts how often each fast path was taken, in sequences, which a rollback leaves alone.
COUNT_USES = """
create sequence test.passed;
create sequence test.claimed;
create sequence test.followed;
create sequence test.turned;
grant usage on sequence test.passed, test.claimed, test.followed, test.turned to public;
alter function queue._pass_slots_on(text, integer, bigint, text[], integer)
rename to _pass_slots_on_short;
create function queue._pass_slots_on(p_key text, p_n integer,
  p_worker bigint default null, p_queues text[] default null, p_max_jobs integer default 0,
  out is_done boolean, out ids bigint[], out first_claim bigint, out flags smallint)
language plpgsql as $$
begin
  select p.is_done, p.ids, p.first_claim, p.flags into is_done, ids, first_claim, flags
  from queue._pass_slots_on_short(p_key, p_n, p_worker, p_queues, p_max_jobs) p;
  if is_done then
    perform nextval('test.passed');
  end if;
  if ids is not null then
    perform nextval('test.followed');
  end if;
end $$;
alter function queue._claim_one_key(bigint, integer[], integer) rename to _claim_one_key_short;
create function queue._claim_one_key(
  p_worker bigint, p_lanes integer[], p_n integer, out ids bigint[], out first_claim bigint)
language plpgsql as $$
begin
  select c.ids, c.first_claim into ids, first_claim
  from queue._claim_one_key_short(p_worker, p_lanes, p_n) c;
  if ids is not null then
    perform nextval('test.claimed');
  end if;
end $$;
alter function queue._pass_turns_on(bigint[], boolean) rename to _pass_turns_on_short;
create function queue._pass_turns_on(p_ids bigint[], p_unless_news boolean default false)
returns boolean language plpgsql as $$
begin
  if queue._pass_turns_on_short(p_ids, p_unless_news) then
    perform nextval('test.turned');
    return true;
  end if;
  return false;
end $$;
"""
# Where nothing waits, a low mark says nothing; the lane of a running job may be missing.
STATE = """
select id, state, reason, attempts, failures, crashes, queue, priority, deadline, worker_id
from queue.jobs order by id;
select kind, key, "limit", used, ready, waiting from queue.semaphores order by 1, 2;
select s.key, s.slots, s.used, l.lane, l.ready, l.waiting,
  case when l.waiting > 0 then (l.low_deadline, l.low) end
from (select distinct on (key) * from queue.semaphore order by key, tick desc) s
left join lateral unnest(s.lanes, s.ready, s.waiting, s.lows, s.low_deadlines)
  l (lane, ready, waiting, low, low_deadline) on true order by s.key, l.lane;
select id, deadline, case when claim is null then lane end, attempt, flags, claim is null, worker_id
from queue.active_job order by id;
select id, reason, key, lane, deadline, flags, attempt, moves, weight
from queue.waiting order by id;
select id, lock, has_turn, is_late, is_passed from queue.lock_member order by id;
select l.id, l.expires_at - a.claimed_at
from queue.lease l left join queue.active_job a on a.id = l.id order by l.id;
select job_id, kind, flags from queue.pending_settlement order by seq;
select * from queue.check()""".split(";")
CLAIMED = "id, task, args, queue, priority, lock, attempt, deadline, timeout, headers"
FAR = "2990-01-0{}Z"


def some_options(rng: random.Random) -> dict[str, Any]:
    """Draw the rarer options of a job; most jobs have none."""
    options: dict[str, Any] = {}
    rare: dict[str, list[Any]] = {
        "share": ["x", "y"],
        "expires_at": ["2999-01-01Z"],
        "timeout": ["1 hour"],
        "retry": [{"max_attempts": 3, "base": 0}],
        "idempotency_key": ["i1", "i2"],
        "headers": [{"a": "b"}],
        "on_limit": ["discard"],
        "held": [True],
        "retain": ["1 day"],
    }
    for name, values in rare.items():
        if rng.random() < (0.3 if name == "retry" else 0.03):
            options[name] = rng.choice(values)
    return options


def a_defer(rng: random.Random, rare: float, keys: str) -> Call:
    given: dict[str, Any] = {"task": rng.choice(["t", "t", "t", "u"])}
    options = some_options(rng) if rng.random() < rare else {}
    if rng.random() < 0.2:
        options["retry"] = {"max_attempts": 3, "base": 0}
    key = rng.choice(keys)
    if key == "L":
        given["lock"] = rng.choice("lmn")
    if rng.random() < 0.06 * rare:
        options["concurrency"] = [
            {"key": k, "limit": rng.randint(2, 5)} | ({"weight": 2} if rng.random() < 0.5 else {})
            for k in rng.choice(["A", "B", "AB"])
        ]
    elif key not in "L ":
        given |= {"concurrency_key": key, "concurrency_limit": rng.choice([1, 2, 3, 3, 3, 4, 5])}
    if rng.random() < rare * 0.3:
        given["priority"] = rng.choice([0, 0, 5])
    if rng.random() < rare * 0.3:
        given["deadline"] = FAR.format(rng.randint(1, 5))
    if rng.random() < rare * 0.2:
        given["queue"] = rng.choice(["q", "r"])
    if rng.random() < rare * 0.2:
        given["lock"] = rng.choice(["l", "m"])
        options["lock_mode"] = rng.choice(["ordered", "mutex"])
    if rng.random() < rare * 0.15:
        given["needs"] = [rng.randint(1, 40)]
        options["needs_mode"] = rng.choice(["all", "any"])
    if rng.random() < rare * 0.1:
        given["queueing_lock"] = rng.choice(["o", "p"])
        options["on_conflict"] = rng.choice(["ignore", "replace"])
        options["unique_until"] = rng.choice(["start", "finish"])
    if options:
        given["options"] = options
    return ("defer", given, rng.choice([1, 1, 1, 2, 6]))


OUTCOMES: list[dict[str, Any]] = [
    {"outcome": "succeeded"},
    {"outcome": "failed", "error": "x"},
    {"outcome": "failed", "error": "x", "options": {"retry_in": "0"}},
    {"outcome": "released"},
    {"outcome": "retry_later"},
    {"outcome": "succeeded", "steps": [{"name": "s", "value": 1}]},
    {"outcome": "released", "steps": [{"name": "s", "value": 2}]},
    {"outcome": "crashed"},
]


def some_outcomes(rng: random.Random) -> list[tuple[int, dict[str, Any]]]:
    """Which of the running jobs end, and how."""
    only = rng.random() < 0.6
    return [
        (rank, OUTCOMES[0] if only else rng.choices(OUTCOMES, [10, 2, 2, 2, 2, 1, 1, 0.2])[0])
        for rank in rng.sample(range(8), rng.randint(1, 6))
    ]


def an_operation(rng: random.Random) -> Call:
    job, jobs = rng.randint(1, 60), [rng.randint(1, 60) for _ in range(rng.randint(1, 4))]
    a_queue = rng.choice(["default", "q"])
    kind = rng.choice(
        "cancel hold unhold priority deadline move delete retry pause key queue "
        "share tick marks died".split()
    )
    match kind:
        case "cancel":
            return ("cancel", {"id": job, "abort": rng.random() < 0.5})
        case "hold" | "unhold":
            return (kind, {"id": job})
        case "priority":
            return ("set_priority", {"ids": jobs, "priority": rng.choice([0, 5])})
        case "deadline":
            return ("set_deadline", {"ids": jobs, "at": FAR.format(rng.randint(1, 5))})
        case "move":
            return ("move", {"ids": jobs, "queue": a_queue, "force": rng.random() < 0.3})
        case "delete" | "retry":
            return (kind, {"ids": jobs, "force": rng.random() < 0.3})
        case "pause":
            return (
                rng.choice(["pause", "resume", "resume"]),
                rng.choice([{"queue": a_queue}, {"task": "u"}, {"queue": None}]),
            )
        case "key":
            limit = rng.choice([1, 2, 3, 5, None])
            rate = rng.choice([None] * 5 + [{"limit": 30, "per": "1 day"}])
            return (
                "configure_key",
                {"pattern": rng.choice("AB"), "options": {"limit": limit, "rate": rate}},
            )
        case "queue":
            return (
                "configure_queue",
                {"name": a_queue, "options": {"max_running": rng.choice([2, 4, None, None])}},
            )
        case "share":
            return ("configure_share", {"pattern": "x", "options": {"weight": rng.choice([1, 3])}})
        case _:
            return (kind, {})


def a_call(rng: random.Random, rare: float, keys: str) -> Call:
    number = rng.random()
    if " " not in keys and rng.random() < 0.5:
        number = 0.8  # mostly outcomes and the next jobs in one call
    queues = rng.choice([None] * 8 + [["default"], ["q", "r"], ["*"]])
    if number < 0.3:
        return a_defer(rng, rare, keys)
    n = rng.randint(1, 7)
    options = {"ahead": rng.randint(0, n)} if rng.random() < 0.2 else None
    asked = rng.randint(0, 1), queues, n, options
    if number < 0.55:
        return ("fetch", asked)
    if number < 0.75:
        return ("finish_many", some_outcomes(rng))
    if number < 0.9 or rng.random() > rare:
        return ("finish_and_fetch", some_outcomes(rng), asked)
    return an_operation(rng)


class Side:
    """One of the two databases."""

    def __init__(self, dsn: str, change: str) -> None:
        count_from_one(dsn)
        self.conn = psycopg.connect(dsn, autocommit=True)
        self.conn.execute("set timezone to 'UTC'")
        self.conn.execute(change)
        self.workers = [self.register(), self.register()]

    def register(self) -> int:
        return int(self.one("select queue.register_worker('w')"))

    def one(self, query: str, *values: Any) -> Any:
        row = self.conn.execute(query.encode(), values).fetchone()
        return row and row[0]

    def call(self, call: Call) -> Any:
        """Make a call; return what must be the same on both sides."""
        try:
            return getattr(self, "_" + call[0], self._any)(*call)
        except psycopg.Error as error:
            return error.sqlstate

    def _any(self, name: str, given: dict[str, Any]) -> Any:
        listed = ", ".join(f"{argument} => %s" for argument in given)
        values = [json.dumps(v) if isinstance(v, dict) else v for v in given.values()]
        rows = self.conn.execute(f"select * from queue.{name}({listed})".encode(), values)
        return rows.fetchall()

    def _defer(self, name: str, given: dict[str, Any], n: int) -> Any:
        return [self._any(name, given) for _ in range(n)]

    def _outcomes(self, chosen: list[tuple[int, dict[str, Any]]]) -> str:
        running = self.conn.execute(
            "select id, claim from queue.active_job where claim is not null order by id"
        ).fetchall()
        return json.dumps(
            [
                {"id": running[rank][0], "claim": running[rank][1]} | outcome
                for rank, outcome in chosen
                if rank < len(running)
            ]
        )

    def _finish_many(self, name: str, chosen: list[tuple[int, dict[str, Any]]]) -> Any:
        return self.conn.execute(
            "select id, state, error from queue.finish_many(%s) order by id",
            [self._outcomes(chosen)],
        ).fetchall()

    def _fetch(self, name: str, asked: Asked) -> Any:
        return self._claim("steps from queue.fetch(%s, %s, %s, %s)", asked, [])

    def _finish_and_fetch(
        self, name: str, chosen: list[tuple[int, dict[str, Any]]], asked: Asked
    ) -> Any:
        source = "steps, error from queue.finish_and_fetch(%s, %s, %s, %s, %s)"
        return self._claim(source, asked, [self._outcomes(chosen)])

    def _claim(self, source: str, asked: Asked, outcomes: list[str]) -> Any:
        worker, queues, n, options = asked
        self.conn.execute("select set_config('pgdefer.looked_at', '', false)")  # it admits first
        query = f"select {CLAIMED}, {source}"
        values = [self.workers[worker], *outcomes, queues, n, options and json.dumps(options)]
        return self.conn.execute(query.encode(), values).fetchall()

    def _tick(self, name: str, given: dict[str, Any]) -> Any:
        return self.one("select admitted from queue.tick()")

    def _marks(self, name: str, given: dict[str, Any]) -> None:
        with self.conn.transaction():
            self.one("select queue._lock_admission(true)")
            self.conn.execute("select queue._raise_marks(array(select lane from queue.lane))")

    def _died(self, name: str, given: dict[str, Any]) -> Any:
        dead = self.workers.pop(0)
        self.workers.append(self.register())
        return self.one("select queue.worker_died(%s)", dead)

    def state(self) -> list[Any]:
        return [
            [row for (row,) in self.conn.execute(f"select x::text from ({query}) x".encode())]
            for query in STATE
        ]


class Pairs:
    """Makes pairs of databases, which are dropped at once."""

    def __init__(self, server: EmbeddedServer, template: str) -> None:
        self._server = server
        self._template = template
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def pair(self) -> Iterator[list[Side]]:
        made: list[Side] = []
        names = [f"one_key_{next(self._numbers)}" for _ in range(2)]
        try:
            for name, change in zip(names, [COUNT_USES, ALWAYS_DECLINE], strict=True):
                create_database(self._server, name, self._template)
                made.append(Side(self._server.dsn(name), change))
            yield made
        finally:
            for side in made:
                side.conn.close()
            with psycopg.connect(self._server.dsn("postgres"), autocommit=True) as conn:
                for name in names:
                    conn.execute(f"drop database if exists {name} with (force)".encode())

    def difference(self, calls: list[Call], uses: Counter[str]) -> tuple[int, str] | None:
        """Return after which call the two sides differ, and how."""
        with self.pair() as (short, general):
            for n, call in enumerate(calls):
                found = [[side.call(call), *side.state()] for side in (short, general)]
                if found[0] != found[1] or found[0][-1]:
                    return n, "\n".join(
                        f"short:   {one}\ngeneral: {other}"
                        for one, other in zip(*found, strict=True)
                        if one != other or one is found[0][-1]
                    )
            for name in "passed", "claimed", "followed", "turned":
                query = f"select case when is_called then last_value else 0 end from test.{name}"
                uses[name] += short.one(query)
        return None

    def shrink(self, calls: list[Call]) -> list[Call]:
        """Leave out calls as long as the sides still differ."""
        size = len(calls) // 2
        while size:
            start = 0
            while start < len(calls):
                fewer = calls[:start] + calls[start + size :]
                if found := self.difference(fewer, Counter()):
                    calls = fewer[: found[0] + 1]
                else:
                    start += size
            size //= 2
        return calls


# Which key new jobs have: L stands for one of three locks, a blank for nothing.
KEYS = ["AAAAB ", "AAAAB", "A", "A"]
LOCKS = ["L", "LL ", "LLLA"]


def compare(pairs: Pairs, seed: int, n: int, uses: Counter[str], of: Sequence[str] = KEYS) -> None:
    rng = random.Random(seed)
    rare = rng.choice([0, 0.2, 0.5, 1])
    keys = rng.choice(of)
    calls = [a_call(rng, rare, keys) for _ in range(n)]
    if found := pairs.difference(calls, uses):
        fewest = pairs.shrink(calls[: found[0] + 1])
        again = pairs.difference(fewest, Counter()) or found
        listed = "\n".join(map(str, fewest))
        pytest.fail(f"seed {seed}: after\n{listed}\n{again[1]}", pytrace=False)


@pytest.fixture
def pairs(server: EmbeddedServer, _base: Any) -> Pairs:
    return Pairs(server, _base.template_dbname)


def test_the_short_ways_do_the_same(pairs: Pairs) -> None:
    uses: Counter[str] = Counter()
    compare(pairs, 21, 80, uses)
    assert uses["passed"] > 3
    assert uses["claimed"] > 3
    assert uses["followed"] > 3


def test_turns_are_passed_on_alike(pairs: Pairs) -> None:
    uses: Counter[str] = Counter()
    compare(pairs, 1, 80, uses, LOCKS)
    assert uses["turned"] > 3


@pytest.mark.long
def test_turns_are_passed_on_alike_with_all_options(pairs: Pairs) -> None:
    uses: Counter[str] = Counter()
    for seed in range(6):
        compare(pairs, seed, 100, uses, LOCKS)
    assert uses["turned"] > 30


@pytest.mark.long
def test_the_short_ways_do_the_same_with_all_options(pairs: Pairs) -> None:
    uses: Counter[str] = Counter()
    for seed in (6, 8, 10, 14, 21, 29):
        compare(pairs, seed, 100, uses)
    assert uses["passed"] > 30
    assert uses["claimed"] > 30
    assert uses["followed"] > 30


def holder_of_one_key(dsn: str, conn: psycopg.Connection[Any]) -> tuple[Side, str]:
    """A worker that runs all of a full key, and holds back how these jobs ended."""
    side = Side(dsn, "")
    side.call(("defer", {"task": "t", "concurrency_key": "A", "concurrency_limit": 2}, 6))
    assert len(side.call(("fetch", (0, None, 2, None)))) == 2
    conn.execute("begin")
    conn.execute("select queue.tick()")  # the admission lock is taken
    return side, side._outcomes([(0, OUTCOMES[0]), (1, OUTCOMES[0])])


ENDS = "select id from queue.finish_and_fetch(%s, %s, null, 2) where error is null"


def test_a_turn_is_waited_for(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn, ThreadPoolExecutor() as pool:
        # however busy the machine is, nobody gives up
        conn.execute(
            "do $$ begin execute regexp_replace(pg_get_functiondef("
            "'queue._wait_for_admission'::regproc), '50 ?ms', '1 h', 'g'); end $$"
        )
        side, outcomes = holder_of_one_key(dsn, conn)
        claimed = pool.submit(side.conn.execute, ENDS, [side.workers[0], outcomes])
        pid = side.conn.info.backend_pid
        waits = "select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
        with psycopg.connect(dsn, autocommit=True) as other:
            wait_for(lambda: other.execute(waits, [pid]).fetchone() is not None)
        conn.execute("commit")
        assert claimed.result().fetchall() == [(3,), (4,)]
        assert side.one("select count(*) from queue.check()") == 0
        side.conn.close()


def test_a_turn_is_not_waited_for_long(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        side, outcomes = holder_of_one_key(dsn, conn)
        setting = "select current_setting('lock_timeout')"
        side.conn.execute("set lock_timeout = '10ms'")  # a stricter one holds
        assert side.conn.execute(ENDS, [side.workers[0], outcomes]).fetchall() == []
        assert side.one(setting) == "10ms"
        assert side.one("select count(*) from queue.pending_settlement") == 2
        assert side.one("select state from queue.jobs where id = 1") == "succeeded"
        conn.execute("commit")
        assert [row[0] for row in side.call(("fetch", (0, None, 9, None)))] == [3, 4]
        assert side.one("select count(*) from queue.check()") == 0
        side.conn.close()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_the_short_ways_do_the_same_for_long(pairs: Pairs, seed: int) -> None:
    for part in range(10):
        compare(pairs, 1000 * seed + part, 300, Counter())
        compare(pairs, 1000 * seed + part, 300, Counter(), LOCKS)
