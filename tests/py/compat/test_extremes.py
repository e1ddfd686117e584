"""An accepted call never makes a later one fail: extremes of every argument, from the catalog.

Each argument of each function gets the extremes of its type, and so does each value inside its
JSON. Refusals are those of bad arguments, with a readable DETAIL. After an accepted call all other
calls still work.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql

from support import add_shards

pytestmark = pytest.mark.client

FUNCTIONS = """
select p.proname, coalesce(p.proargnames[1:p.pronargs], '{}'),
  array(select format_type(t, null) from unnest(p.proargtypes) with ordinality u (t, n) order by n),
  p.provolatile = 'v'
from pg_proc p
where p.pronamespace = 'queue'::regnamespace and p.proname !~ '^_'
  and p.prorettype <> 'trigger'::regtype
  and p.proname !~ '^(install|uninstall|migrate|migration|rehearse|work)$'
  and p.proname !~ '^(grant_access|revoke_access)$'
order by 1
"""  # fmt: skip
SHARDS = FUNCTIONS.replace("!~ '^_'", "~ '^shard'")
# A shard, whose slots 0 and 1 leave, and to which slot 700 comes.
MOVING: tuple[LiteralString, ...] = (
    """select queue.shard_start('a', '{"a": "dbname=a", "b": "dbname=b"}')""",
    "select queue.shard_leave(n, 'b'), queue.shard_list(n) from generate_series(0, 1) n",
    "select queue.shard_receive(700, 'b', 2, 2), queue.shard_part_leave(0, 6)",
)
REFUSALS = {f"QJ00{n}" for n in range(1, 8)} | {"22023", "42501", "55000", "55P03"}
LONGEST_DETAIL = 3000

INTERVALS = [
    "-1 s", "0", "1 us", "4000 years", "4001 years", "10000 years", "178000000 years",
    "-8000 years +2929000 days", "8000 years -2910000 days", "2147483647 mons -2147483648 days",
    "-1 day 48:00", "infinity", "-infinity",
]  # fmt: skip
MOMENTS = [
    "infinity", "-infinity", "4714-11-24 00:00+00 BC", "0001-01-01 BC", "0001-01-01 00:00+00",
    "9999-12-31 23:59:59.999999+00", "294276-12-31 23:59:59.999999+00",
]  # fmt: skip
WORDS = ["", "x" * 1000, "x" * 1001, "*", "{", "\\", "1e9", "9223372036854775808", "NaN"]
IDS = [-(2**63), -(2**31), -1, 0, 1, 2, 2**31, 2**63 - 1]
EXTREMES: dict[str, list[Any]] = {
    "integer": [-(2**31), -1, 0, 1, 32767, 32768, 2**31 - 1],
    "bigint": IDS,
    "bigint[]": [[id] for id in IDS] + [[], [None], [[1], [2]], [1] * 5000, IDS],
    "numeric": ["1e131071", "-1e131071", "1e-16383", "NaN", "Infinity", -1, 0, 100, 101],
    "boolean": [True, False],
    "uuid": ["00000000-0000-0000-0000-000000000000"],
    "regclass": ["pg_class", "0", "4294967295"],
    "interval": INTERVALS,
    "timestamp with time zone": MOMENTS,
    "text": [*WORDS, "é" * 100_000],
    "text[]": [[], [None], [""], ["x" * 1001], ["*"], ["q"] * 5000, [["a"], ["b"]]],
}
NUMBERS = [
    "1e131071", "-1e131071", "1e-16383", "1e400", "1e300", "1e-300", "-1", "0", "0.5", "1.0",
    "126230400000", "999999999", "1000000000", "2147483647", "2147483648", "9223372036854775807",
    "9223372036854775808", "999999999999999999",
]  # fmt: skip
OTHERS = ["null", "true", "[]", "{}", "[1e131071]", '{"a": 1e131071}', "[[[]]]"]
# As written in JSON: json.dumps has no 1e131071. Most keys take one type.
JSON = [*NUMBERS, *OTHERS, *map(json.dumps, [INTERVALS[3], MOMENTS[0], *WORDS])]
FEW = ["1e131071", "-1", "null", "[]", "{}", '""']
NAMES = [*FEW, *map(json.dumps, WORDS)]
KINDS = {
    key: values
    for keys, values in [
        ("timeout retain delay base cap first retry_in per max_delay dead_after deadline_within",
         [*NUMBERS, *map(json.dumps, INTERVALS)]),
        ("expires_at retry_at at scheduled_at", [*FEW, *map(json.dumps, MOMENTS)]),
        ("deadline", [*NUMBERS, *map(json.dumps, [*INTERVALS, *MOMENTS])]),
        ("error message description reason lock queue queueing_lock task concurrency_key", NAMES),
        ("key on_limit catch_up outcome backoff", NAMES),
        # These take anything.
        ("k d r h host args details result headers", FEW),
    ]
    for key in keys.split()
}  # fmt: skip


class Raw(str):
    """JSON text as it is."""

    __slots__ = ()


def to_json(value: Any) -> str:
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{to_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(to_json, value)) + "]"
    return json.dumps(value)


def variants(value: Any, key: str = "") -> Iterator[Any]:
    """Put each extreme in place of each value in a JSON value, one at a time."""
    yield from map(Raw, KINDS.get(key, JSON))
    if isinstance(value, dict):
        for inside, inner in value.items():
            for variant in variants(inner, inside):
                yield value | {inside: variant}
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            for variant in variants(inner):
                yield [*value[:place], variant, *value[place + 1 :]]


OPTIONS: dict[str, Any] = {
    "timeout": "1 min", "retain": "1 day", "expires_at": "2100-01-01T00:00:00Z", "delay": "0",
    "retry": {"max_attempts": 5, "backoff": "exponential", "base": "0", "factor": 1, "cap": "1 min",
              "first": "0", "jitter": 0, "max_crashes": 2},
    "max_progress": 3, "parent": None, "description": "d", "headers": {"h": "h"},
    "concurrency": [{"key": "k2", "limit": 2, "rate": {"limit": 3, "per": "1 s"}, "weight": 1}],
    "share": "s", "max_wait": "1 min", "on_limit": "block", "held": False,
}  # fmt: skip
JOB = {
    "task": "t", "args": {"k": "v"}, "queue": "q", "priority": 1, "lock": "l", "needs": None,
    "scheduled_at": None, "deadline": None, "queueing_lock": None,
    "concurrency_key": "k", "concurrency_limit": 1,
}  # fmt: skip
OUTCOMES = [
    {"id": 1, "claim": 1, "outcome": "failed", "error": "e", "details": {"d": 1},
     "options": {"retryable": True, "retry_at": None, "retry_in": None, "priority": 1,
                 "queue": "q", "lock": "l", "reason": "r"}},
    {"id": 1, "claim": 1, "outcome": "retry_later", "at": None, "needs": [], "message": "m"},
    {"id": 1, "claim": 1, "outcome": "succeeded", "result": {"r": 1}},
]  # fmt: skip
CARRIED = {
    "format": 2, "slot": 700, "part": 7, "version": 2, "piece": 1, "is_last": True,
    "receipt": "00000000-0000-0000-0000-000000000000", "jobs": [JOB | {"id": 1}],
}  # fmt: skip
OBJECTS: dict[tuple[str, str], list[Any]] = {
    ("defer", "options"): [
        OPTIONS,
        {"retry": {"wait": 0, "linear_wait": 0, "exponential_wait": 0}},
    ],
    ("register_task", "defaults"): [
        OPTIONS | {"deadline": "1 day", "priority": 1, "concurrency_limit": 1}
    ],
    ("defer_many", "jobs"): [[JOB], [{"task": "t", "args": {}, "queue": "q", "priority": 1}]],
    ("finish_many", "outcomes"): [[outcome] for outcome in OUTCOMES],
    ("fail", "details"): [{"d": 1}],
    ("fail", "options"): [OUTCOMES[0]["options"]],
    ("retry", "changes"): [
        {"retry_at": "2100-01-01T00:00:00Z", "priority": 1, "queue": "q", "lock": "l"},
        {"retry_in": "1 s"},
    ],
    ("succeed", "result"): [{"r": 1}],
    ("set_args", "args"): [{"k": "v"}],
    ("defer", "args"): [{"k": "v"}],
    ("schedule", "args"): [{"k": "v"}],
    ("schedule", "options"): [
        OPTIONS | {"deadline": "1 day", "priority": 1, "max_delay": "1 day", "catch_up": "all"}
    ],
    ("configure_queue", "options"): [
        {"max_running": 5, "retain": "1 day", "paused": False},
        {"rate": {"limit": 5, "per": "1 s"}},
    ],
    ("register_worker", "info"): [{"dead_after": "1 min", "listen": False, "host": "h"}],
    ("configure_key", "options"): [{"limit": 2, "rate": {"limit": 5, "per": "1 s"}}],
    ("configure_share", "options"): [{"weight": 2}],
    ("backoff", "policy"): [OPTIONS["retry"]],
    ("fetch", "options"): [
        {"deadline_within": "1 s"},
        {"ids": [1], "tasks": ["t"], "functions": True},
    ],
    ("finish_and_fetch", "options"): [{"deadline_within": "1 s"}],
    ("shard_key", "job"): [JOB],
    ("shard_defer", "args"): [{"k": "v"}],
    ("shard_defer", "options"): [JOB | {"options": OPTIONS}],
    ("shard_defer_many", "jobs"): [[JOB]],
    ("shard_part_arrive", "carried"): [CARRIED],
    ("shard_start", "shards"): [{"c": "dbname=c"}],
    ("shard_learn", "map"): [{"shards": {"c": "dbname=c"}, "slots": [["c", 2]]}],
}
TEXTS = {
    "task": "t", "queue": "q", "name": "q", "cron": "every 1 second", "timezone": "UTC",
    "by": "text", "path": "a", "lock": "l", "key": "k", "shard_key": "k", "self": "a",
    "target": "b", "source": "b",
}  # fmt: skip
# Calls that need a value of their own.
BASES = {
    "worker": "(select max(id) from queue.workers where name = 'w')",
    "id": "(select max(id) from queue.jobs where state = 'running')",
    "claim": "(select max(claim) from queue.jobs where state = 'running')",
    "ids": "array(select id from queue.jobs)",
    "failures": "3", "max_jobs": "5", "n": "2", "lease": "interval '1 min'", "priority": "1",
    "args": "'{}'::jsonb", "options": "null", "defaults": "'{}'::jsonb", "policy": "'{}'::jsonb",
    "jobs": """'[{"task": "t"}]'::jsonb""", "then": """'{"task": "t"}'::jsonb""",
    "outcomes": "'[]'::jsonb", "info": "'{}'::jsonb", "force": "true", "paused": "false",
    "enabled": "true", "ack": "false", "within": "interval '1 min'", "max_bytes": "100000",
    "abort": "true", "after": "now()", "slot": "700", "part": "7", "version": "2",
    "started": "true", "format": "2", "receipt": "gen_random_uuid()",
    "carried": "null",
    "job": """'{"lock": "l"}'::jsonb""", "shards": "queue.shard_map() -> 'shards'",
    "map": "queue.shard_map()",
}  # fmt: skip

# The job that runs, for id 1 and claim 1.
REAL_PAIR = """(
  select case when jsonb_typeof(x.v) <> 'array' then x.v else (
    select coalesce(jsonb_agg(case when o @> '{"id": 1, "claim": 1}' then o || (
        select jsonb_build_object('id', max(j.id), 'claim', max(j.claim))
        from queue.jobs j where j.state = 'running') else o end), '[]')
    from jsonb_array_elements(x.v) o) end
  from (select %s::jsonb) x (v))
"""

EMPTYING = """
select string_agg(format('delete from queue.%I', relname), '; ') from pg_class
where relnamespace = 'queue'::regnamespace and relkind = 'r'
  and relname not in ('installation', 'admission', 'cursor', 'minute_cursor', 'horizon')
"""
VIEWS = """
select relname from pg_class where relnamespace = 'queue'::regnamespace and relkind = 'v'
  and relname not in ('unrestricted', 'no_defaults')
"""
PROBES = [
    "select * from queue.fetch({worker})",
    "select * from queue.fetch({worker}, '{{q}}', 10)",
    "select * from queue.fetch({worker}, null, 10)",
    "select * from queue.fetch({worker}, null, 10, '{{\"deadline_within\": \"4000 years\"}}')",
    "select * from queue.before_sleep({worker})",
    "select * from queue.after_sleep({worker})",
    "select * from queue.heartbeat({worker})",
    "select queue.is_busy(2147483647)",
    "select * from queue.tick()",
    "select * from queue.peek()",
    "select * from queue.stats()",
    "select * from queue.series('7 days', '1 day')",
    "select * from queue.task_stats('7 days')",
    "select * from queue.health()",
    "select * from queue.autoscale_hint()",
    "select * from queue.search()",
    "select * from queue.list_jobs()",
    "select * from queue.search('x')",
    """
    select queue.why(id), (select count(*) from queue.graph(id)), (queue.result(id)).state,
      queue.copy(id), (select count(*) from queue.get(id, '$')),
      (select count(*) from queue.streams(id)), (select count(*) from queue.waits_for(id))
    from queue.jobs where id <= {last}
    """,
    """select * from queue.finish_many((
      select coalesce(jsonb_agg(jsonb_build_object('id', id, 'claim', claim, 'outcome',
        case id % 3 when 0 then 'released' when 1 then 'retry_later' else 'failed' end)), '[]')
      from queue.jobs where state = 'running'))
    """,
    "select * from queue.tick()",
    "select queue.next('{{*}}', lease => '4000 years')",
    "select queue.run_now(name) from queue.schedules",
    "select queue.resume(), queue.resume(task => 't')",
    "select * from queue.finish_and_fetch({worker}, '[]', null, 10)",
    """select * from queue.finish_many((
      select coalesce(jsonb_agg(jsonb_build_object(
        'id', id, 'claim', claim, 'outcome', 'failed')), '[]')
      from queue.jobs where state = 'running'))
    """,
    "select * from queue.retry(array(select id from queue.jobs), true)",
    "select * from queue.done(array(select id from queue.jobs where id % 2 = 0))",
    "select * from queue.prune(10, 'failed', '4000 years')",
    "select * from queue.tick()",
    "select queue.deregister_worker(id) from queue.workers",
]  # fmt: skip

# What an accepted call could break for all others.
SHORT = {*PROBES[:3], *(PROBES[n] for n in (4, 7, 14, 15)), "select * from queue.jobs"}


class Extremes:
    """Calls with extremes, and the checks after each accepted one."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        self.emptying = self.value(EMPTYING)
        self.views = [row[0] for row in connection.execute(VIEWS).fetchall()]
        self.more: tuple[LiteralString, ...] = ()
        self.accepted = 0
        self.failures: list[object] = []

    def value(self, statement: str) -> Any:
        row = self.connection.execute(statement.encode()).fetchone()
        assert row is not None
        return row[0]

    def begin(self) -> None:
        """Start again: a worker, a running job and some that wait."""
        execute = self.connection.execute
        execute(self.emptying.encode())
        execute("select queue.register_worker('w'), queue.register_task('t')")
        execute("select queue.schedule('q', '@daily', 't')")
        execute("select queue.defer('t', queue => 'q', lock => 'l')")
        execute("select * from queue.fetch((select max(id) from queue.workers))")
        execute("select queue.defer('t', queue => 'q', lock => 'l'), queue.defer('t')")
        execute("select queue.defer('t', queue => 'q') from generate_series(1, 4)")
        for statement in self.more:
            execute(statement)

    def call(self, function: str, arguments: dict[str, tuple[str, Any]], changes: bool) -> None:
        given = ", ".join(f'"{name}" => {text}' for name, (text, _) in arguments.items())
        values = [value for text, value in arguments.values() if "%s" in text]
        statement = f"select * from queue.{function}({given})".encode()
        short = {name: str(value)[:100] for name, (_, value) in arguments.items() if value}
        try:
            self.connection.execute(statement, values)
        except psycopg.Error as error:
            if error.sqlstate not in REFUSALS:
                self.failures.append((function, short, error.sqlstate, str(error)[:300]))
            elif len(error.diag.message_detail or "") > LONGEST_DETAIL:
                self.failures.append((function, short, "a long DETAIL"))
            return
        self.accepted += 1
        if changes:
            self.probe(function, short)
            self.begin()
            if self.accepted % 100 == 0:
                self.connection.execute("vacuum")

    def probe(self, function: str, short: object) -> None:
        worker = BASES["worker"]
        last = self.value("select coalesce(max(id), 0) from queue.jobs")
        probes = [*PROBES, *(f"select * from queue.{view}" for view in self.views)]
        if self.accepted % 10 != 1:  # all of them after each call would take minutes
            probes = [probe for probe in probes if probe in SHORT]
        for probe in probes:
            statement = probe.format(worker=worker, last=last)
            try:
                self.connection.execute(statement.encode())
            except psycopg.Error as error:
                if error.sqlstate not in ("QJ007", "QJ002"):
                    self.failures.append((function, short, probe, error.sqlstate, str(error)[:300]))
        if broken := self.connection.execute("select * from queue.check()").fetchall():
            self.failures.append((function, short, "check", broken[:3]))


@pytest.fixture
def extremes(conn: psycopg.Connection[Any]) -> Extremes:
    conn.execute("set client_min_messages = error; set jit = off")
    # Written out, because that is what a client receives.
    conn.adapters.register_loader("timestamptz", psycopg.types.string.TextLoader)
    conn.adapters.register_loader("interval", psycopg.types.string.TextLoader)
    conn.adapters.register_loader("jsonb", psycopg.types.string.TextLoader)
    made = Extremes(conn)
    made.begin()
    return made


def is_castable(connection: psycopg.Connection[Any], value: Any, type_: str) -> bool:
    try:
        connection.execute(sql.SQL("select %s::{}").format(sql.SQL(type_)), (value,))  # type: ignore[arg-type]
    except psycopg.Error:
        return False
    return True


def bases_of(names: list[str], types: list[str]) -> dict[str, tuple[str, Any]]:
    """Return the normal value of each parameter, for calls in which another gets its extremes."""
    return {
        name: ((f"'{TEXTS[name]}'" if name in TEXTS else "null")
               if type_ == "text"
               else "null" if name == "after" and type_ == "bigint"
               else BASES["id"] if name == "job" and type_ == "bigint"
               else BASES.get(name, "null"), None)
        for name, type_ in zip(names, types, strict=True)
    }  # fmt: skip


PARTS = 8


# All of them take some minutes of computing: the short form takes one in thirty.
@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_accepted_is_safe(extremes: Extremes, part: int, every: int) -> None:
    functions = extremes.connection.execute(FUNCTIONS.encode()).fetchall()
    try_all(extremes, functions[part::PARTS], every)
    assert extremes.accepted > 20 or every > 1


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.soak)])
def test_what_shards_accept_is_safe(extremes: Extremes, dsn: str, every: int) -> None:
    add_shards(dsn)
    extremes.emptying = extremes.value(EMPTYING)
    extremes.more = MOVING
    extremes.begin()
    try_all(extremes, extremes.connection.execute(SHARDS.encode()).fetchall(), every)
    assert extremes.accepted > 10


def try_all(extremes: Extremes, functions: list[tuple[Any, ...]], every: int) -> None:
    """Call functions with each extreme in each place."""
    numbers = itertools.count()
    connection = extremes.connection
    for function, names, types, changes in functions:
        for name, type_ in zip(names, types, strict=True):
            if type_ == "jsonb":
                objects = OBJECTS.get((function, name), [])
                values = [to_json(v) for one in objects for v in variants(one, name)] or JSON
            else:
                values = EXTREMES[type_]
            for value in values:
                if next(numbers) % every == 0 and is_castable(connection, value, type_):
                    arguments = bases_of(names, types) | {name: (f"%s::{type_}", value)}
                    if function.startswith("finish") and name == "outcomes":
                        arguments[name] = (REAL_PAIR, value)
                    extremes.call(function, arguments, changes)
    assert not extremes.failures, "\n".join(map(str, extremes.failures))
