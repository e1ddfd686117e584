"""No function ever executes a text that a caller passes: calls made from the catalog."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, LiteralString

import psycopg
import pytest

from support import add_shards

pytestmark = pytest.mark.client

# Each would call public.canary(), if it were put into a statement.
HIT = "select public.canary()"
PAYLOADS = [
    f"'; {HIT}; --",
    f"'); {HIT}; --",
    f'"; {HIT}; --',
    f'x"; {HIT}; select "x',
    f"\\'; {HIT}; --",
    f"$$; {HIT}; $$",
    f"$f$; {HIT}; $f$",
    f"E'\\'; {HIT}; --",
    "' || public.canary() || '",
    "'||(select public.canary())||'",
    "public.canary()",
    "(select public.canary())",
    "%s%I%L%1$s%n%%",
    "{canary}{}{0}%(x)s:x",
    "*",
    "canary*",
    "\\",
    "\\x00",
    "é☃\U0001f600\u202e\ufeff",
    "\t\r\n\x01\x7f",
    "null",
    "NULL::text; --",
    "1 union select public.canary()",
    "../../etc/passwd",
    "pg_sleep(9)",
    "' or ''='",
    "a" * 1000,
]

# The values of parameters that are not text, by name or type.
SAMPLES: dict[str, Any] = {
    "claim": 1, "worker": 1, "lease": "1 hour", "within": "1 minute", "older_than": None,
    "max_jobs": 5, "n": 2, "failures": 1, "max_bytes": 10_000, "force": False,
    "concurrency_limit": None, "slot": 5, "part": 5, "version": 2, "started": False,
    "format": 1, "receipt": None, "session": 1,
}  # fmt: skip

# Texts that must be valid for the others to be read.
TEXTS = {
    "task": "t", "queue": "q", "name": "n", "cron": "@daily", "timezone": "UTC", "by": "text",
    "path": "a", "role": "injected_role", "kind": "reader", "error": "e", "lock": "l",
    "queueing_lock": None, "concurrency_key": None, "pattern": "p", "state": None, "message": "m",
    "fingerprint": "f", "from_step": "s", "signal": None, "event": "e", "stream": "s", "after": "s",
    "key": "k", "shard_key": "k", "self": "a", "target": "b", "source": "b",
}  # fmt: skip

JOB = {
    "task": "t", "args": {"k": "v"}, "queue": "q", "lock": "l {k}", "queueing_lock": None,
    "scheduled_at": None, "deadline": None, "concurrency_key": "k", "concurrency_limit": 1,
    "options": {"description": "d", "delay": "1 s", "on_conflict": "raise", "lock_mode": "mutex"},
}  # fmt: skip
OUTCOME = {
    "id": 1, "claim": 1, "outcome": "failed", "error": "e", "details": {"d": "d"}, "message": "m",
    "options": {"queue": "q", "lock": "l", "reason": "r", "retry_in": "1 s"},
}  # fmt: skip
CALLBACK = {"task": "t", "args": {"k": "v"}, "queue": "q", "lock": "l {k}"}
CARRIED = {
    "format": 1, "slot": 700, "part": 7, "version": 2, "piece": 1, "is_last": True,
    "receipt": "00000000-0000-0000-0000-000000000000", "jobs": [JOB | {"id": 1}],
}  # fmt: skip
OBJECTS: dict[str, Any] = {
    "args": {"k": "v"},
    "carried": CARRIED,
    "job": JOB,
    "shards": {"c": "dbname=c"},
    "map": {"shards": {"c": "dbname=c"}, "slots": [["c", 2]]},
    "jobs": [JOB],
    "then": JOB,
    "changes": {"queue": "q", "lock": "l", "retry_in": "1 s"},
    "outcomes": [OUTCOME],
    "steps": [{"name": "s", "value": {"v": "v"}, "fingerprint": "f"}],
    "details": {"d": "d"},
    "result": {"r": "r"},
    "info": {"host": "h", "client": "pgdefer 0.1.0", "dead_after": "30 s"},
    "policy": {"backoff": "linear", "base": "1 s"},
    "defaults": {"queue": "q", "lock": "{k}", "description": "d", "retry": {"base": "1 s"}},
    "options": {},
    "payload": {"p": "p"},
    "value": {"v": "v"},
    "on_end": CALLBACK,
    "on_success": CALLBACK,
    "on_failure": CALLBACK,
}
OPTIONS: dict[str, Any] = {
    "defer": JOB["options"],
    "fetch": {"order": "listed", "tasks": ["t"], "ids": ["1"], "deadline_within": "1 s"},
    "finish_and_fetch": {"order": "listed", "tasks": ["t"], "ids": ["1"]},
    "fail": OUTCOME["options"],
    "configure_key": {"limit": 2, "rate": {"limit": 1, "per": "1 s"}},
    "configure_share": {"weight": 2},
    "configure_queue": {"rate": {"limit": 1, "per": "1 s"}, "retain": "1 day"},
    "schedule": {"queue": "q", "lock": "l", "catch_up": "all", "source": "s", "max_delay": "1 day"},
}

FUNCTIONS = """
select p.proname, p.prokind::text, coalesce(p.proargnames[1:p.pronargs], '{}'), array(select format_type(t, null) from unnest(p.proargtypes) with ordinality u (t, n) order by n)
from pg_proc p
where p.pronamespace = 'queue'::regnamespace and p.proname !~ '^_' and p.prorettype <> 'trigger'::regtype order by 1
"""

SHARDS = FUNCTIONS.replace("!~ '^_'", "~ '^shard'")

# The server's own messages about text that is not a value of a type, and about invalid JSON.
REFUSALS = {
    "22023",
    "42501",
    "55000",
    "55P03",
    "QJ001",
    "QJ002",
    "QJ003",
    "QJ004",
    "QJ005",
    "QJ006",
    "QJ007",
    "QJ009",
}


def variants(value: Any, payload: str) -> Iterator[Any]:
    """Put the payload in place of each text in a JSON value, also each key, one at a time."""
    if isinstance(value, str) or value is None:
        yield payload
    elif isinstance(value, dict):
        yield value | {payload: payload}
        for key, inner in value.items():
            for variant in variants(inner, payload):
                yield value | {key: variant}
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            for variant in variants(inner, payload):
                yield [*value[:place], variant, *value[place + 1 :]]


@pytest.fixture
def canary(conn: psycopg.Connection[Any]) -> Iterator[psycopg.Connection[Any]]:
    conn.execute("set pgdefer.notify = off")
    # A sequence also remembers rolled-back calls.
    conn.execute("create sequence public.sung")
    conn.execute(
        "create function public.canary() returns text language plpgsql as"
        " $$ begin perform nextval('public.sung'); return 'hit'; end $$"
    )
    conn.execute("create role injected_role")
    yield conn
    conn.execute("select queue.revoke_access('injected_role')")
    conn.execute("drop role injected_role")
    conn.execute("drop function public.canary()")
    conn.execute("drop sequence public.sung")


def is_silent(connection: psycopg.Connection[Any]) -> bool:
    return connection.execute("select is_called from public.sung").fetchone() == (False,)


def base(function: str, name: str, type_: str) -> Any:
    if type_ == "jsonb":
        return json.dumps(OPTIONS.get(function, {}) if name == "options" else OBJECTS[name])
    if type_ == "text":
        return TEXTS[name]
    if type_ == "text[]":
        return ["q"]
    if type_ == "bigint[]":
        return [1]
    return SAMPLES.get(name, 1 if type_ == "bigint" else None)


def attacks(function: str, name: str, type_: str) -> Iterator[Any]:
    for place, payload in enumerate(PAYLOADS):
        if type_ == "text":
            yield payload
        elif place > 12 and type_ == "jsonb":
            return  # which has many places for each
        elif type_ == "text[]":
            yield [payload]
            yield ["q", payload]
        elif type_ == "jsonb":
            value = OPTIONS.get(function, {}) if name == "options" else OBJECTS[name]
            for variant in variants(value, payload):
                yield json.dumps(variant)


@pytest.mark.long
def test_nothing_is_executed(canary: psycopg.Connection[Any]) -> None:
    calls, attacked = attack_all(canary, FUNCTIONS)
    assert {("defer", "lock"), ("finish_many", "outcomes"), ("grant_access", "role")} <= attacked
    assert calls > 3000


def test_shards_execute_nothing(canary: psycopg.Connection[Any], dsn: str) -> None:
    add_shards(dsn)
    canary.execute("update queue.shard_slot set shard = 'a', is_plain = true")
    calls, attacked = attack_all(canary, SHARDS)
    assert {
        ("shard_defer", "shard_key"),
        ("shard_learn", "map"),
        ("shard_leave", "target"),
    } <= attacked
    assert calls > 500


def attack_all(
    canary: psycopg.Connection[Any], functions: LiteralString
) -> tuple[int, set[tuple[str, str]]]:
    """Call functions with each payload in each place; return how many calls, and of what."""
    canary.execute("select queue.register_worker('w')")
    canary.execute("select queue.defer('t')")
    canary.execute("select queue.fetch(1)")
    calls = 0
    attacked = set()
    for function, kind, names, types in canary.execute(functions.encode()).fetchall():
        if function == "uninstall":
            continue
        # a procedure gets as far as its first commit, which is refused in a transaction
        refusals = REFUSALS | {"2D000"} if kind == "p" else REFUSALS
        parameters = list(zip(names, types, strict=True))
        statement = f"{'call' if kind == 'p' else 'select * from'} queue.{function}(" + ", ".join(
            f"\"{name}\" => %s::{type_}" for name, type_ in parameters
        ) + ")"  # fmt: skip
        bases = [base(function, name, type_) for name, type_ in parameters]
        for place, (name, type_) in enumerate(parameters):
            for attack in attacks(function, name, type_):
                arguments = [*bases[:place], attack, *bases[place + 1 :]]
                code = None
                try:
                    with canary.transaction(force_rollback=True):
                        canary.execute(statement.encode(), arguments)
                except psycopg.Error as error:
                    code = error.sqlstate
                assert code is None or code in refusals, (function, name, attack, code)
                calls += 1
                attacked.add((function, name))
            assert is_silent(canary), (function, name)
    return calls, attacked


def test_names_come_back_as_they_were(canary: psycopg.Connection[Any]) -> None:
    for payload in PAYLOADS:
        queue = payload.rstrip("*") or "q"
        key = payload.replace("{", "(")
        row = canary.execute(
            "select queue.defer(%s, %s, %s, lock => %s, queueing_lock => %s)",
            (payload, json.dumps({payload: payload}), queue, "l", key),
        ).fetchone()
        assert row
        found = canary.execute(
            "select task, args, queue, queueing_lock from queue.jobs where id = %s", row
        ).fetchone()
        assert found == (payload, {payload: payload}, queue, key)
    assert is_silent(canary)


def test_a_trigger_executes_nothing(canary: psycopg.Connection[Any]) -> None:
    for place, payload in enumerate(PAYLOADS):
        canary.execute(f'create table public.attacked_{place} ("a" text)'.encode())
        text = payload.replace("'", "''").replace("%", "%%")
        canary.execute(
            f"create trigger t after insert on public.attacked_{place} for each row"
            f" execute function queue.defer_trigger('{text}')".replace("%%", "%").encode()
        )
        canary.execute(f"insert into public.attacked_{place} values (%s)".encode(), (payload,))
        row = canary.execute(
            "select task, args from queue.jobs order by id desc limit 1"
        ).fetchone()
        assert row == (payload, {"a": payload})
    assert is_silent(canary)


def test_the_canary_sings(canary: psycopg.Connection[Any]) -> None:
    with canary.transaction(force_rollback=True):
        canary.execute(("select '" + PAYLOADS[8] + "'").encode())
    assert not is_silent(canary)
