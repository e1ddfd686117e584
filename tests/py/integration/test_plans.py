"""Plans: no call reads a whole backlog, whatever the planner believed when it made its plan.

A queue's tables are often empty when they are analyzed, and full a moment later. So every statement
that works on some jobs leaves the planner no other way than from their ids. Not tested are calls
that must read more: `pause` counts jobs, `deregister_worker` and `reap` look for those of a worker.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
import pytest
from psycopg import sql

pytestmark = pytest.mark.long

Connection = psycopg.Connection[Any]
Rows = list[tuple[Any, ...]]
Node = dict[str, Any]

BACKLOG = 400
# A call is about at most 10 jobs: no node of its plans may read or discard this many rows. They are
# fewer than the backlog of a kind, and more than the lanes of all, as a tick looks at each lane.
LIMIT = 300

KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "spent": lambda n: {},
    "plain": lambda n: {},
    "priority": lambda n: {"priority": n % 3},
    "deadline": lambda n: {"deadline": "2100-01-01T00:00:00Z"},
    "lock": lambda n: {"lock": f"shared {n // BACKLOG}"},
    "locks": lambda n: {"lock": f"ordered {n}"},
    "shared mutex": lambda n: {
        "lock": f"shared mutex {n // BACKLOG}",
        "options": {"lock_mode": "mutex"},
    },
    "mixed": lambda n: {
        "lock": f"mixed {n // BACKLOG}",
        "options": {"lock_mode": ("mutex", "ordered")[n % 2]},
    },
    "mutex": lambda n: {"lock": f"mutex {n}", "options": {"lock_mode": "mutex"}},
    "key": lambda n: {"concurrency_key": "one", "concurrency_limit": 3},
    "keys": lambda n: {
        "options": {
            "concurrency": [{"key": f"a {n % 50}", "limit": 2}, {"key": f"b {n % 7}", "limit": 9}]
        }
    },
    "queueing lock": lambda n: {"queueing_lock": f"start {n}"},
    "finish lock": lambda n: {
        "queueing_lock": f"finish {n}",
        "options": {"unique_until": "finish"},
    },
    "idempotency key": lambda n: {"options": {"idempotency_key": f"once {n}"}},
    "scheduled": lambda n: {"scheduled_at": "2100-01-01T00:00:00Z"},
    "due": lambda n: {"scheduled_at": "2000-01-01T00:00:00Z"},
    "held": lambda n: {"options": {"held": True}},
    "expiring": lambda n: {"options": {"expires_at": "2100-01-01T00:00:00Z"}},
    "timeout": lambda n: {"options": {"timeout": "1 hour"}},
    "retain": lambda n: {"options": {"retain": "1 hour"}},
    "need": lambda n: {"needs": [1]},
    "share": lambda n: {"options": {"share": f"share {n // BACKLOG}"}},
    "shares": lambda n: {"options": {"share": f"share {n}"}},
    "shares of a key": lambda n: {
        "concurrency_key": "of shares",
        "concurrency_limit": 3,
        "options": {"share": f"share {n}"},
    },
    "limited": lambda n: {},
    "rated": lambda n: {},
}
OUTCOMES: list[dict[str, Any]] = [
    {"outcome": "succeeded"},
    {"outcome": "failed", "error": "x"},
    {"outcome": "failed", "options": {"retry_in": "1 hour"}},
    {"outcome": "released"},
    {"outcome": "retry_later"},
    {"outcome": "retry_later", "at": "2100-01-01T00:00:00Z"},
    {"outcome": "retry_later", "needs": [1]},
]


# After it, random() returns no small number for a while.
SEED = "select setseed(0.1)"


class Session:
    """One session, whose plans are kept, and read on request."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.connection.prepare_threshold = 0
        self.connection.add_notice_handler(self._on_notice)
        self.connection.execute("load 'auto_explain'")
        for name, value in [
            ("log_nested_statements", "on"),
            ("log_analyze", "on"),
            ("log_timing", "off"),
            ("log_format", "json"),
        ]:
            self.connection.execute(f"set auto_explain.{name} = {value}".encode())
        self._plans: list[str] = []
        #: The calls that read too much: the call, the number of rows, the table, the statement.
        self.offences: list[tuple[str, float, str, str]] = []
        # however slow the machine is
        info = '{"dead_after": "1 day"}'
        self.connection.execute(SEED)
        assert self("select min(random()) > 0.1 from generate_series(1, 10)") == [(True,)]
        (self.worker,) = self("select queue.register_worker('plans', info => %s)", info)[0]

    def __call__(self, statement: str, *parameters: object) -> Rows:
        return self.connection.execute(statement.encode(), parameters).fetchall()

    def watched(self, what: str, statement: str, *parameters: object) -> Rows:
        """Call, and record the statements inside that read too much.

        Calls look for claims of forgotten workers once in 10 s, count the jobs that have ended
        meanwhile, and read all semaphores from time to time, at random: not this one. Nor does it
        tag lanes anew, as the first job of a share in a new priority makes an admission do.
        """
        while self("select from queue.lane where retag_from is not null"):
            self("select queue.tick()")
        self.connection.execute(SEED)
        reviewed = (
            "select set_config('pgdefer.reviewed_at', extract(epoch from now())::text, false)"
        )
        self.connection.execute(reviewed)
        counted = "set safe_at = '-infinity', looked_at = clock_timestamp()"
        self.connection.execute(f"update queue.minute_cursor {counted}".encode())
        self._plans.clear()
        self.connection.execute("set client_min_messages = log")
        self.connection.execute("set auto_explain.log_min_duration = 0")
        try:
            return self(statement, *parameters)
        finally:
            self.connection.execute("set auto_explain.log_min_duration = -1")
            self.connection.execute("set client_min_messages = warning")
            assert self._plans
            for plan in map(json.loads, self._plans):
                for node in _nodes(plan["Plan"]):
                    if (rows := _read(node)) > LIMIT:
                        of = node.get("Relation Name", node.get("Index Name", node["Node Type"]))
                        text = " ".join(plan["Query Text"].split())
                        self.offences.append((what, rows, of, text[:500]))

    def _on_notice(self, message: psycopg.errors.Diagnostic) -> None:
        text = message.message_primary or ""
        if text.startswith("duration:"):
            self._plans.append(text.partition("plan:")[2])

    def defer(self, kind: str, numbers: range) -> list[int]:
        """Defer jobs of a kind, in a queue of its name."""
        jobs = [{"task": "t", "queue": kind, "args": {"n": n}, **KINDS[kind](n)} for n in numbers]
        return [id for (id,) in self("select queue.defer_many(%s)", json.dumps(jobs))]

    def admit(self) -> None:
        """Admit all deferred jobs."""
        while self("select admitted from queue.tick()") != [(0,)]:
            pass

    def run(self, kind: str, *, rounds: int, watched: bool) -> int:
        """Run jobs of a kind, ten at a time, to every kind of end; return their number."""
        call = self.watched if watched else lambda what, *rest: self(*rest)
        ended: list[dict[str, Any]] = []
        count = 0
        for number in range(rounds):
            time.sleep(0.011)  # so that the log is read again
            rows = call(
                f"finish_and_fetch, {kind}",
                "select id, claim, error from queue.finish_and_fetch(%s, %s, %s, 10)",
                *(self.worker, json.dumps(ended), [kind]),
            )
            assert [error for *_, error in rows if error is not None] == []
            ended = [
                {"id": id, "claim": claim, **OUTCOMES[(n + number) % len(OUTCOMES)]}
                for n, (id, claim, _) in enumerate(rows)
            ]
            count += len(rows)
        call(f"finish_many, {kind}", "select * from queue.finish_many(%s)", json.dumps(ended))
        return count


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for inner in node.get("Plans", []):
        yield from _nodes(inner)


def _read(node: Node) -> float:
    removed = ("Rows Removed by Filter", "Rows Removed by Join Filter")
    rows = node.get("Actual Rows", 0) + sum(node.get(name, 0) for name in removed)
    return float(rows * node.get("Actual Loops", 1))


@pytest.fixture
def session(dsn: str, conn: Connection) -> Iterator[Session]:
    for (table,) in conn.execute(
        "select c.relname from pg_class c"
        " where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r'"
    ).fetchall():
        name = sql.Identifier("queue", table)
        conn.execute(sql.SQL("alter table {} set (autovacuum_enabled = false)").format(name))
    session = Session(dsn)
    session("select queue.defer('t', queue => 'first', options => '{\"held\": true}')")
    session("select queue.configure_queue('limited', '{\"max_running\": 5}')")
    session("""select queue.configure_queue('rated', '{"rate": {"limit": 9, "per": "1 ms"}}')""")
    yield session
    session.connection.close()


BELIEFS = ["nothing", "lopsided"]
MORE_BELIEFS = ["empty", "tiny", "full"]


@pytest.mark.parametrize(
    "believed",
    BELIEFS + [pytest.param(each, marks=pytest.mark.soak) for each in MORE_BELIEFS],
)
def test_no_call_reads_a_backlog_through(session: Session, conn: Connection, believed: str) -> None:
    if believed == "empty":
        conn.execute("vacuum analyze")
    for kind in KINDS:
        session.defer(kind, range(3))
    for kind in KINDS:
        session.run(kind, rounds=3, watched=False)
    if believed in ("tiny", "lopsided"):
        conn.execute("vacuum analyze")
    made = {kind: session.defer(kind, range(BACKLOG, 2 * BACKLOG)) for kind in KINDS}
    session.admit()
    if believed == "full":
        conn.execute("vacuum analyze")
    elif believed == "lopsided":
        conn.execute("vacuum analyze queue.log, queue.active_job")
    # many that have ended, or come again, so that their records are a backlog too
    session.run("spent", rounds=BACKLOG // 10, watched=False)
    ran = {kind: session.run(kind, rounds=4, watched=True) for kind in KINDS}
    assert {kind for kind, count in ran.items() if not count} == {"scheduled", "held", "need"}
    for kind, ids in made.items():
        if kind != "spent":
            _operate(session, kind, ids[BACKLOG // 2 :])
    for statement in (
        "select * from queue.tick()",
        f"select * from queue.before_sleep({session.worker})",
        f"select * from queue.heartbeat({session.worker})",
        "select queue.defer('t', needs => '{1,2}')",
        """
        select queue.defer('t', queueing_lock => 'start 700',
                           options => '{"on_conflict": "ignore"}')
        """,
    ):
        session.watched(statement, statement)
    assert session.offences == []


def _operate(session: Session, kind: str, ids: Sequence[int]) -> None:
    """Call each operation on some jobs of a kind that have not run, and fetch the rest."""
    at = iter(range(0, len(ids), 5))
    for call in (
        "move(%s, 'elsewhere')",
        "set_priority(%s, 7)",
        "fail_jobs(%s, 'x')",
        "done(%s)",
        "delete(%s, true)",
        "retry(%s, true)",
    ):
        n = next(at)
        session.watched(f"{call}, {kind}", f"select * from queue.{call}", list(ids[n : n + 5]))
    for call in (
        "cancel(%s)",
        "hold(%s)",
        "copy(%s, 'elsewhere')",
        "reschedule(%s, '2100-01-01')",
        "set_args(%s, '{}')",
        "result(%s)",
        "graph(%s)",
    ):
        id = ids[next(at)]
        session.watched(f"{call}, {kind}", f"select * from queue.{call}", id)
        if call.startswith("cancel"):
            session.watched(f"retry, {kind}", "select * from queue.retry(%s)", [id])
        elif call.startswith("hold"):
            session.watched(f"unhold, {kind}", "select * from queue.unhold(%s)", id)
        time.sleep(0.011)
        session.watched(
            f"fetch after {call}, {kind}", "select * from queue.fetch(%s)", session.worker
        )


def test_no_walk_over_needs_reads_more_than_the_jobs_it_reaches(session: Session) -> None:
    first, *parents = session.defer("plain", range(3))
    session.admit()
    claims = dict(session("select id, claim from queue.fetch(%s, max_jobs => 3)", session.worker))
    wait = "select queue.await_jobs(%s, %s, 'children', %s)"
    for parent in parents:
        children = session.defer("spent", range(60))  # each with each would be far above LIMIT
        session.watched("await while others wait", wait, parent, claims[parent], children)
    session.admit()
    ids = [first]
    for _ in range(30):  # a job has over LIMIT places on the ways to the first
        ids += session("select queue.defer('t', needs => %s)", ids[-2:])[0]
    session.admit()
    refused = "select queue.retry_later(%s, %s, needs => %s)"
    with pytest.raises(psycopg.Error, match="cycle"):
        session.watched("a cycle", refused, first, claims[first], [ids[-1]])
    session("select count(queue.defer('t', needs => %s)) from generate_series(1, 300)", [first])
    session.admit()
    locked = session.defer("locks", range(1))
    session.watched("await with a lock", wait, first, claims[first], locked)
    session.watched("settle it", "select * from queue.tick()")
    assert session.offences == []


def test_ends_are_counted_by_ranges_of_pages_after_an_operation(session: Session) -> None:
    """The first call of a session makes the plan, and operations scan no bitmaps."""
    ids = session.defer("spent", range(BACKLOG))
    session.admit()
    session("select * from queue.done(%s)", ids[:100])
    session("select * from queue.delete(%s)", ids[:1])
    read = "select seq_tup_read from pg_stat_user_tables where relid = 'queue.finished'::regclass"
    session("select pg_stat_force_next_flush()")
    before = session(read)
    session(
        "update queue.minute_cursor set counted_to = clock_timestamp() - interval '1 hour',"
        " safe_at = clock_timestamp(), looked_at = '-infinity' returning 1"
    )
    session("select * from queue.heartbeat(%s)", session.worker)
    assert session("select sum(succeeded) > 90 from queue.minutes") == [(True,)]
    session("select pg_stat_force_next_flush()")
    assert session(read) == before


def test_new_jobs_are_read_once_in_however_many_parts_the_backlog_is(
    conn: Connection, session: Session
) -> None:
    """As after a large import: one transaction, and admissions that have looked at all of it."""
    session.defer("plain", range(20_000))
    conn.execute("analyze queue.log")
    admit = "select a.has_more from queue._lock_admission(true), lateral queue._admit(1000) a"
    while session("select count(*) from queue.backlog_part")[0][0] < 3:
        assert session(admit) == [(True,)]
    ((rows,),) = session("select count(*) from queue.unadmitted")
    statement = "explain (analyze, format json) select count(*) from queue.unadmitted"
    (((plan,),),) = session(statement)
    of_log = [one for one in _nodes(plan["Plan"]) if one.get("Relation Name") == "log"]
    assert 0 < rows <= sum(map(_read, of_log)) < 2 * rows


def test_removal_in_pace_reads_few_of_a_backlog(conn: Connection, session: Session) -> None:
    """As in a drain: none has ended when the session makes its plans, many when it looks again."""
    session.defer("plain", range(8 * BACKLOG))
    conn.execute("vacuum analyze")
    fetch = "select id, claim, 'succeeded' as outcome from queue.fetch(%s, max_jobs => 50)"
    ended: list[dict[str, Any]] = []
    parts = []
    while len(parts) < 8 * BACKLOG // 50:
        session("select set_config('pgdefer.pruned_at', '', false)")
        session.watched("removal in pace", "select queue._prune_in_pace()")
        session("select * from queue.finish_many(%s)", json.dumps(ended))
        ended = [
            {"id": id, "claim": claim, "outcome": outcome}
            for id, claim, outcome in session(fetch, session.worker)
        ]
        parts += [count for (count,) in session("select count(*) from queue.backlog_part")]
    assert {0, 1, 2} <= set(parts)
    assert session.offences == []


def test_a_key_is_not_compared_with_all_names(session: Session, conn: Connection) -> None:
    """Of the patterns of configure_key only prefixes are read, as for shares."""
    numbers = f"from generate_series(1, {BACKLOG}) n"
    session(f"""select queue.configure_key('exact ' || n, '{{"limit": 3}}') {numbers}""")
    session(f"""select queue.configure_share('exact ' || n, '{{"weight": 3}}') {numbers}""")
    session("""select queue.configure_key('prefix 7*', '{"limit": 3}')""")
    conn.execute("vacuum analyze")
    keys = ("exact 7", "prefix 7 and more", "none")
    for key in keys:
        arguments = "'t', concurrency_key => %s, concurrency_limit => 1"
        options = "options => jsonb_build_object('share', %s::text)"
        session(f"select queue.defer({arguments}, {options})", key, key)
    session.watched("admit", "select * from queue.tick()")
    found = session('select key, "limit" from queue.semaphores where key = any(%s)', list(keys))
    assert dict(found) == {"exact 7": 3, "prefix 7 and more": 3, "none": 1}
    assert [each for each in session.offences if "config" in each[2]] == []
