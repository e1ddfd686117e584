"""Roles that are restricted to some queues: no function or view reads or changes anything of the others.

The catalog gives the calls, so a new function can't be forgotten.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql

from support import add_shards

pytestmark = pytest.mark.long

KINDS = ("producer", "worker", "operator", "reader")
OWN = ["a*", "exact"]

# The values of parameters, by name, that refer to other queues. `ids` and the like stand for jobs
# of the setup.
FOREIGN: dict[str, list[Any]] = {
    "task": ["secret task"],
    "args": ["{}"],
    "queue": ["b1", "b*", None, "*"],
    "queues": [["b1"], ["b*"], ["*"], None],
    "name": ["b1"],
    "priority": [7],
    "memory": [None],
    "lock": ["l"],
    "of_table": [None, "pg_class"],
    "needs": [None],
    "scheduled_at": [None],
    "state": [None],
    "pattern": [None, "secret"],
    "path": ["x", "$"],
    "message": ["m"],
    "error": ["e"],
    "details": [None],
    "changes": ['{"queue": "b1"}', '{"lock": "l"}', None],
    "result": ["1"],
    "lease": ["1 hour"],
    "max_jobs": [100],
    "n": [100],
    "ack": [True, False],
    "force": [True],
    "abort": [True],
    "paused": [True],
    "enabled": [False],
    "defaults": ['{"priority": 3}'],
    "older_than": [None],
    "until": [None],
    "at": [None],
    "before": [None],
    "by": ["text"],
    "max_bytes": [None],
    "info": ["{}"],
    "steps": ['[{"name": "a"}]'],
    "policy": ["{}"],
    "failures": [1],
    "cron": ["@daily"],
    "timezone": ["UTC"],
    "after": [None],
    "after_id": [None],
    "within": ["1 minute"],
    "step": ["1 minute"],
    "deadline": [None],
    "queueing_lock": [None, "secret key"],
    "concurrency_key": [None],
    "concurrency_limit": [None],
    "payload": ["{}"],
    "value": ["1"],
    "fingerprint": [None],
    "from_step": [None, "s"],
    "signal": ["s"],
    "event": [None],
    "stream": ["s"],
    "percent": [50],
    "timeout": [None],
    "retain": [None],
    "on_end": [None],
    "on_success": [None],
    "on_failure": [None],
    "session": [1],
    # of shards
    "key": ["k"],
    "shard_key": ["k"],
    "job": ['{"lock": "k"}'],
    "p_key": ["k"],
    "p_keys": [["k"]],
    "p_code": ["55000"],
    "p_jobs": ['[{"task": "secret task", "shard_key": "k"}]'],
    "p_message": ["m"],
    "p_hint": ["h"],
    "p_detail": ["d"],
}

SETUP = """
do $$
declare
  v_worker bigint := queue.register_worker('secret worker', '{b*}', '{"secret": true}');
  v record;
begin
  perform queue.register_task('secret task', '{"queue": "b1"}');
  perform queue.schedule('secret schedule', '@yearly', 'secret task', options => '{"queue": "b1"}');
  perform queue.create_queue('b1');
  for i in 1 .. 4 loop
    perform queue.defer('secret task', '{"x": "secret"}', 'b1', options => '{"description": "secret", "headers": {"h": "secret"}}');
  end loop;
  commit;
  for v in select f.id, f.claim from queue.fetch(v_worker, '{b1}', 4) f loop
    if v.id % 4 = 1 then
      perform queue.succeed(v.id, v.claim, '"secret result"');
    elsif v.id % 4 = 2 then
      perform queue.fail(v.id, v.claim, 'secret error');
    elsif v.id % 4 = 3 then
      perform queue.emit(v.id, v.claim, 'secret stream', '"secret value"');
    else
      perform queue.wait(v.id, v.claim, 'secret step', 'secret signal');
    end if;
  end loop;
  perform queue.defer('secret task', '{"x": "secret"}', 'b1');
  commit;
  perform queue.defer('secret task', '{"x": "secret"}', 'b2', options => '{"delay": "1 hour"}');
  perform queue.defer('secret task', '{"x": "secret"}', 'b1', options => '{"held": true}');
  perform queue.defer('secret task', '{"x": "secret"}', 'b1', lock => 'secret lock', queueing_lock => 'secret key',
                      concurrency_key => 'secret concurrency', concurrency_limit => 1);
  perform queue.defer('secret task', '{"x": "secret"}', 'b1', needs => array[(select min(j.id) from queue.jobs j where j.state = 'ready')]);
end $$
"""

DIGEST = """
select md5(string_agg(x.line, e'\\n' order by x.line))
from (
  select to_jsonb(j)::text from queue.jobs j where j.queue like 'b%'
  union all select to_jsonb(a)::text from queue.attempts a join queue.jobs j on j.id = a.job_id where j.queue like 'b%'
  union all select to_jsonb(w)::text from queue.worker w where w.name = 'secret worker'
  union all select to_jsonb(c)::text from queue.queue_config c where c.queue like 'b%'
  union all select to_jsonb(t)::text from queue.task t
  union all select to_jsonb(s)::text from queue.schedule s
  union all select to_jsonb(p)::text from queue.pause p
  union all select to_jsonb(r)::text from queue.need r
  union all select to_jsonb(r)::text from queue.abort r
  union all select to_jsonb(l)::text from queue.lease l) x (line)
"""

FUNCTIONS = """
select p.proname, p.proargnames[1:p.pronargs], array(select format_type(t, null) from unnest(p.proargtypes) with ordinality u (t, n) order by n)
from pg_proc p
where p.pronamespace = 'queue'::regnamespace and p.prorettype <> 'trigger'::regtype and has_function_privilege(%s, p.oid, 'execute')
order by 1
"""


@pytest.fixture
def owner(conn: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    conn.execute("set pgdefer.notify = off")
    return conn


@pytest.fixture
def roles(owner: psycopg.Connection[Any]) -> Iterator[dict[str, str]]:
    names = {kind: f"limited_{kind}" for kind in KINDS}
    for kind, name in names.items():
        owner.execute(f"create role {name}".encode())
        owner.execute("select queue.grant_access(%s, %s, %s)", (name, kind, OWN))
    yield names
    drop(owner, *names.values())


def drop(connection: psycopg.Connection[Any], *names: str) -> None:
    connection.execute("rollback")
    connection.execute("reset role")
    connection.execute("reset session authorization")
    for name in names:
        connection.execute("select queue.revoke_access(%s)", (name,))
        connection.execute(f"drop owned by {name} cascade".encode())
        connection.execute(f"drop role {name}".encode())


def become(connection: psycopg.Connection[Any], role: str) -> None:
    connection.execute(sql.SQL("set session authorization {}").format(sql.Identifier(role)))


def outcome(connection: psycopg.Connection[Any], statement: str, *arguments: Any) -> str:
    """Return the result of a call, or its error with all its fields."""
    try:
        with connection.transaction():
            return str(connection.execute(statement.encode(), arguments or None).fetchall())
    except psycopg.Error as error:
        diag = error.diag
        return f"{error.sqlstate} {diag.message_primary} {diag.message_detail} {diag.message_hint}"


def values_of(
    function: str, name: str, jobs: list[tuple[int, int | None]], worker: int
) -> list[Any]:
    ids = [job for job, _ in jobs]
    if name == "worker":
        return [worker]
    if name in {"id", "job"}:
        return [*ids]
    if name in {"ids", "p_ids", "p_needs"}:
        return [json.dumps([id]) if name == "p_needs" else [id] for id in ids]
    if name == "claim":
        return [claim for _, claim in jobs if claim is not None]
    if name in {"jobs", "then"}:
        made = [
            {"task": "secret task"},
            {"task": "t", "queue": "b1"},
            {"task": "t", "queue": "a1", "needs": ids[:1]},
            {"task": "t", "queue": "a1", "options": {"parent": ids[0]}},
            {"task": "t", "queue": "a1", "queueing_lock": "secret key"},
            {"task": "t", "queueing_lock": "secret key", "args": {"y": 1},
             "options": {"on_conflict": "replace"}},
            {"task": "t", "queueing_lock": "secret key", "options": {"on_conflict": "ignore"}},
        ]  # fmt: skip
        key = {"shard_key": "k"} if function.startswith("shard") else {}
        return [json.dumps(job if name == "then" else [job | key]) for job in made]
    if name == "outcomes":
        return [
            json.dumps([{"id": job, "claim": claim, "outcome": outcome}])
            for job, claim in jobs
            if claim is not None
            for outcome in ("succeeded", "failed", "released", "retry_later", "aborted")
        ] + ["[]"]
    if name == "options":
        if function in ("fetch", "finish_and_fetch"):
            return [
                None,
                json.dumps({"ids": ids}),
                '{"tasks": ["secret task"]}',
                '{"functions": true}',
            ]
        if function == "defer":
            return [None, '{"on_conflict": "replace"}', json.dumps({"parent": ids[0]})]
        return [None]
    found = FOREIGN.get(name)
    assert found is not None, (
        f"queue.{function} has a parameter that this test does not know: {name}"
    )
    return found


VIEWS = """
select c.relname from pg_class c
where c.relnamespace = 'queue'::regnamespace and c.relkind = 'v' and has_table_privilege(c.oid, 'select')
"""

# Errors that no call of a public function may raise.
BROKEN = ("42601", "42883", "42703", "42P01", "XX000", "22P02")

# Functions that change state that belongs to no queue, by rules that no caller can change.
MAINTENANCE = {"tick", "reap"}


def leaks_of(
    owner: psycopg.Connection[Any], role: str, functions_of: LiteralString = FUNCTIONS
) -> list[tuple[Any, ...]]:
    """Call every function that a role may, on other queues; return everything that was read or changed."""
    owner.execute(SETUP.encode())
    owner.execute("select queue.tick()")
    rows = owner.execute("select id, claim from queue.jobs where queue like 'b%' order by id")
    jobs: list[tuple[int, int | None]] = [(row[0], row[1]) for row in rows.fetchall()]
    assert any(claim for _, claim in jobs)
    row = owner.execute("select max(id) from queue.worker").fetchone()
    assert row
    before = owner.execute(DIGEST.encode()).fetchone()
    functions = owner.execute(functions_of.encode(), (role,)).fetchall()
    assert len(functions) > 3
    leaks = []
    for function, names, types in functions:
        if function in MAINTENANCE:
            continue
        parameters = list(zip(names or [], types, strict=True))
        lists = [values_of(function, name, jobs, row[0]) for name, _ in parameters]
        text = ", ".join(f"{name} => %s::{type_}" for name, type_ in parameters)
        text = text.replace("then =>", '"then" =>')
        for arguments in itertools.islice(itertools.product(*lists), 150):
            owner.execute("begin")
            become(owner, role)
            said = outcome(owner, f"select to_jsonb(x) from queue.{function}({text}) x", *arguments)
            owner.execute("reset session authorization")
            after = owner.execute(DIGEST.encode()).fetchone()
            owner.execute("rollback")
            assert said[:5] not in BROKEN, (function, said)
            # Names that the caller itself passed may come back.
            shown = said
            for word in ("secret task", "secret key"):
                if any(word in str(argument) for argument in arguments):
                    shown = shown.replace(word, "")
            if "secret" in shown or after != before:
                leaks.append((function, arguments, said[:300], after == before))
    become(owner, role)
    for (view,) in owner.execute(VIEWS.encode()).fetchall():
        said = outcome(owner, f"select to_jsonb(x) from queue.{view} x")
        if "secret" in said or "b1" in said:
            leaks.append((view, said[:300]))
    owner.execute("reset session authorization")
    return leaks


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_other_queues_is_read_or_changed(
    owner: psycopg.Connection[Any], roles: dict[str, str], kind: str
) -> None:
    assert leaks_of(owner, roles[kind]) == []


SHARDS = FUNCTIONS.replace(
    "order by 1\n", "and p.proname ~ '^_?shard' and p.proname <> '_shard_refuse' order by 1\n"
)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_other_queues_is_read_or_changed_through_shards(
    owner: psycopg.Connection[Any], roles: dict[str, str], dsn: str, kind: str
) -> None:
    """All slots are this shard's, so that no key is refused before a queue is."""
    add_shards(dsn)
    owner.execute("update queue.shard_slot set shard = 'a', is_plain = true")
    assert leaks_of(owner, roles[kind], SHARDS) == []


def test_an_unlimited_role_reads_and_changes_them(
    owner: psycopg.Connection[Any], roles: dict[str, str]
) -> None:
    """The test above can fail: nearly all functions on jobs are in it."""
    owner.execute("select queue.grant_access(%s, 'operator')", (roles["operator"],))
    owner.execute("select queue.grant_access(%s, 'worker')", (roles["operator"],))
    leaks = leaks_of(owner, roles["operator"])
    found = {leak[0] for leak in leaks}
    assert found >= set(
        "jobs attempts workers tasks schedules queues metrics move copy delete fail_jobs done"
        " set_priority reschedule set_args next delete_queue search list_jobs get stats cancel hold retry pause"
        " configure_queue result graph why peek fetch finish_and_fetch finish_many succeed fail"
        " release retry_later extend heartbeat deregister_worker register_task streams waits_for".split()
    ), found


def test_a_limited_producer(owner: psycopg.Connection[Any], roles: dict[str, str]) -> None:
    owner.execute("select queue.register_task('else', '{\"queue\": \"b\"}')")
    need = owner.execute("select queue.defer('t', queue => 'b')").fetchone()
    assert need
    become(owner, roles["producer"])
    may = [
        "queue.defer('t', queue => 'a')",
        "queue.defer('t', queue => 'a1', options => '{\"delay\": 5}', lock => 'x')",
        "queue.defer('t', queue => 'exact')",
        "queue.defer('else', queue => 'a')",
        'queue.defer_many(\'[{"task": "t", "queue": "a"}, {"task": "t", "queue": "exact"}]\')',
        'queue.defer_group(\'[{"task": "t", "queue": "a"}]\', \'{"task": "t", "queue": "a"}\')',
    ]
    for call in may:
        assert outcome(owner, f"select {call}")[0] == "[", call
    may_not = [
        "queue.defer('t')",
        "queue.defer('else')",
        "queue.defer('t', queue => 'b')",
        "queue.defer('t', queue => 'exactly')",
        'queue.defer_many(\'[{"task": "t", "queue": "a"}, {"task": "t"}]\')',
        'queue.defer_chain(\'[{"task": "t", "queue": "a"}, {"task": "t", "queue": "b"}]\')',
    ]
    for call in may_not:
        assert outcome(owner, f"select {call}").startswith("42501"), call
    call = f"select queue.defer('t', queue => 'a', needs => array[{need[0]}])"
    assert outcome(owner, call).startswith("QJ001")
    owner.execute("reset session authorization")
    row = owner.execute("select count(*) from queue.jobs where queue = 'b'").fetchone()
    assert row == (1,)


def test_a_limited_worker(owner: psycopg.Connection[Any], roles: dict[str, str]) -> None:
    for queue in ("a1", "b", "exact", "a2"):
        owner.execute("select queue.defer('t', queue => %s)", (queue,))
    become(owner, roles["worker"])
    rows = owner.execute("select queue.register_worker('w')").fetchone()
    assert rows
    worker = rows[0]
    fetched = owner.execute(
        "select id, claim, queue from queue.fetch(%s, null, 10)", (worker,)
    ).fetchall()
    assert sorted(row[2] for row in fetched) == ["a1", "a2", "exact"]
    done = owner.execute("select outcome from (select queue.finish_many(%s::jsonb) as outcome) x", (
        json.dumps([{"id": i, "claim": c, "outcome": "succeeded"} for i, c, _ in fetched]),
    )).fetchall()  # fmt: skip
    assert len(done) == 3
    owner.execute("select * from queue.heartbeat(%s)", (worker,))
    owner.execute("select * from queue.before_sleep(%s)", (worker,))
    owner.execute("select * from queue.after_sleep(%s)", (worker,))
    owner.execute("select * from queue.tick()")
    assert outcome(owner, "select queue.register_worker('w', '{b}')").startswith("42501")
    for call in (
        f"fetch({worker}, ",
        f"finish_and_fetch({worker}, '[]', ",
        f"before_sleep({worker}, ",
        "peek(",
    ):
        assert outcome(owner, f"select queue.{call}'{{b,c*}}')").startswith("42501"), call
        assert outcome(owner, f"select queue.{call}'{{b,c*,a1}}')").startswith("["), call
    assert owner.execute("select queue.deregister_worker(%s)", (worker,)).fetchone() == (0,)
    owner.execute("reset session authorization")
    row = owner.execute("select queues from queue.worker where id = %s", (worker,)).fetchone()
    assert row
    assert sorted(row[0]) == sorted(OWN)


def test_kinds_are_siblings(owner: psycopg.Connection[Any]) -> None:
    """A worker of some queues that is also an operator of all serves these, and may end any claim."""
    owner.execute("create role limits_both")
    try:
        owner.execute("select queue.grant_access('limits_both', 'worker', '{a}')")
        owner.execute("select queue.grant_access('limits_both', 'operator')")
        owner.execute("select queue.defer('t', queue => q) from unnest('{a,b}'::text[]) q")
        become(owner, "limits_both")
        (worker,) = owner.execute("select queue.register_worker('w')").fetchone() or ()
        rows = owner.execute("select queue from queue.fetch(%s, null, 9)", (worker,)).fetchall()
        assert rows == [("a",)]
        call = f"select queue.fetch({worker}, '{{b}}')"
        assert outcome(owner, call).startswith("42501")
        said = "select queue.succeed(n.id, n.claim) from queue.next('{b}') n"
        assert outcome(owner, said)[0] == "["
    finally:
        owner.execute("reset session authorization")
        drop(owner, "limits_both")


def test_the_queueing_lock_of_a_job_that_is_not_seen(
    owner: psycopg.Connection[Any], roles: dict[str, str]
) -> None:
    owner.execute("select queue.defer('t', queue => 'b secret', queueing_lock => 'k')")
    become(owner, roles["producer"])
    owner.execute("reset session authorization")
    (need,) = owner.execute("select queue.defer('n', queue => 'z')").fetchone() or ()
    text = "select queue.defer('t', queue => 'a', queueing_lock => 'own', needs => %s)"
    (holder,) = owner.execute(text.encode(), [[need]]).fetchone() or ()
    become(owner, roles["producer"])
    text = "select queue.defer('t', queue => 'a', queueing_lock => 'own', options => %s)"
    said = outcome(owner, text, '{"on_conflict": "ignore"}')
    assert str(holder) in said, said  # whatever that job needs
    for way in ("raise", "ignore", "replace"):
        said = outcome(
            owner,
            "select queue.defer('t', queue => 'a', queueing_lock => 'k', options => %s)",
            json.dumps({"on_conflict": way}),
        )
        assert said.startswith("QJ004"), (way, said)
        assert "secret" not in said
        assert way == "raise" or said.endswith("has this queueing_lock. Pass another one."), said
    owner.execute("reset session authorization")


def test_the_idempotency_key_of_a_job_that_is_not_seen(
    owner: psycopg.Connection[Any], roles: dict[str, str]
) -> None:
    """A restricted producer does not learn its id, also once the job was removed or moved."""
    defer = "select queue.defer('t', queue => %s, options => '{\"idempotency_key\": \"k\"}')"
    (secret,) = owner.execute(defer.encode(), ["b secret"]).fetchone() or ()

    def refused() -> bool:
        become(owner, roles["producer"])
        said = outcome(owner, defer, "a")
        owner.execute("reset session authorization")
        assert str(secret) not in said
        assert "secret" not in said
        return said.startswith("QJ004 already queued")

    assert refused()
    owner.execute("select queue.delete(array[%s]::bigint[])", [secret])
    assert refused()
    # its own key, whether the job still exists or not
    own = "select queue.defer('own', queue => 'a', options => '{\"idempotency_key\": \"k\"}')"
    become(owner, roles["producer"])
    ids = {owner.execute(own.encode()).fetchone() for _ in range(2)}
    owner.execute("reset session authorization")
    owner.execute("select queue.delete(array[%s]::bigint[])", ids.copy().pop())
    become(owner, roles["producer"])
    ids.add(owner.execute(own.encode()).fetchone())
    assert len(ids) == 1
    assert outcome(owner, own.replace("'a'", "'b'")) == f"[({ids.pop()[0]},)]"
    owner.execute("reset session authorization")


def test_limited_readers_and_operators(
    owner: psycopg.Connection[Any], roles: dict[str, str]
) -> None:
    for queue in ("a1", "b", "exact", "a%", "ab_"):
        owner.execute("select queue.defer('t', queue => %s)", (queue,))
    owner.execute("select queue.tick()")
    own = {"a1", "exact", "a%", "ab_"}
    for kind in ("reader", "operator"):
        become(owner, roles[kind])
        for statement in (
            "select queue from queue.jobs",
            "select name from queue.queues",
            "select queue from queue.metrics",
            "select queue from queue.stats()",
            "select queue_name from queue.search()",
            "select queue from queue.list_jobs()",
            "select queue from queue.peek(null, 100)",
            "select queue from queue.peek('{*}', 100)",
        ):
            assert {row[0] for row in owner.execute(statement.encode())} == own, statement
        owner.execute("reset session authorization")
    become(owner, roles["operator"])
    row = owner.execute("select id from queue.jobs where queue = 'a1'").fetchone()
    assert row
    for call in ("hold(%s)", "unhold(%s)", "why(%s)", "move(array[%s], 'exact')", "cancel(%s)"):
        owner.execute(f"select queue.{call}".encode(), row)
    owner.execute("select queue.pause('a*'), queue.resume('a*'), queue.pause('exact')")
    assert outcome(owner, "select queue.pause()").startswith("42501")
    assert outcome(owner, "select queue.pause('*')").startswith("42501")
    assert outcome(owner, "select queue.retry_failed()").startswith("42501")
    assert outcome(owner, "select queue.prune(1, 'failed')").startswith("42501")


def test_why_names_other_queues_jobs_without_their_state(
    owner: psycopg.Connection[Any], roles: dict[str, str]
) -> None:
    def one(statement: str, *arguments: object) -> Any:
        row = owner.execute(statement.encode(), arguments).fetchone()
        assert row is not None
        return row[0]

    foreign = one("select queue.defer('t', queue => 'b', lock => 'l')")
    done = one("select queue.defer('t', queue => 'b')")
    needs = [foreign, done]
    waits = one("select queue.defer('t', queue => 'a', needs => %s::bigint[])", needs)
    behind = one("select queue.defer('t', queue => 'a', lock => 'l')")
    owner.execute("select queue.tick()")
    owner.execute("select queue.done(array[%s::bigint])", (done,))
    assert one("select queue.why(%s)", waits) == f"it needs job {foreign} (ready)"
    idle = "no live worker serves its queue a; "
    held = f"{idle}its lock l is held by job {foreign}"
    assert one("select queue.why(%s)", behind) == f"{held} (ready)"
    for state in ("ready", "held"):
        if state == "held":
            owner.execute("select queue.hold(%s::bigint)", (foreign,))
        become(owner, roles["reader"])
        text = one("select queue.why(%s)", waits).partition(" job ")[2]
        assert text == f"{foreign}, job {done}" or (state == "held" and text == ""), text
        assert one("select queue.why(%s)", behind) == held
        owner.execute("reset session authorization")


def test_the_barrier_holds(owner: psycopg.Connection[Any], roles: dict[str, str]) -> None:
    """A reader's own condition sees no hidden row."""
    owner.execute("select queue.defer('secret', queue => 'b')")
    owner.execute("select queue.defer('open', queue => 'a')")
    owner.execute("select queue.tick()")
    become(owner, roles["reader"])
    seen: list[str] = []
    owner.add_notice_handler(lambda diag: seen.append(str(diag.message_primary)))
    owner.execute(
        "create function pg_temp.spy(t text) returns boolean language plpgsql cost 0.0001 as"
        " $$ begin raise notice '%', t; return true; end $$"
    )
    owner.execute("select count(*) from queue.jobs where pg_temp.spy(task)")
    owner.execute("select count(*) from queue.queues where pg_temp.spy(name)")
    assert set(seen) == {"open", "a"}
    owner.execute("drop function pg_temp.spy(text)")


def test_who_is_asked(owner: psycopg.Connection[Any], roles: dict[str, str]) -> None:
    """SET ROLE, membership, ownership, other roles' functions, and grants by hand."""
    deferred = "select queue.defer('t', queue => 'b')"
    owner.execute("create role limits_free")
    owner.execute("select queue.grant_access('limits_free', 'producer')")
    owner.execute("create role limits_member in role limited_producer")
    owner.execute("create role limits_both in role limited_producer, limits_free")
    owner.execute("create role limits_apart noinherit in role limited_producer, limits_free")
    owner.execute("create role limits_by_hand")
    owner.execute("grant usage on schema queue to limits_by_hand")
    owner.execute("grant execute on all functions in schema queue to limits_by_hand")
    owner.execute("create role limits_nobody")
    owner.execute("create schema limits authorization limited_producer")
    owner.execute("grant usage on schema limits to public")
    try:
        become(owner, "limits_free")
        assert outcome(owner, deferred)[0] == "["
        become(owner, "limits_member")
        assert outcome(owner, deferred).startswith("42501")
        assert outcome(owner, "select queue.defer('t', queue => 'a')")[0] == "["
        become(owner, "limits_both")
        assert outcome(owner, deferred)[0] == "["
        # A role that gives up a wider role for a restricted one is restricted.
        owner.execute("set role limited_producer")
        assert outcome(owner, deferred).startswith("42501")
        owner.execute("reset role")
        assert outcome(owner, deferred)[0] == "["
        become(owner, "limits_apart")
        assert outcome(owner, deferred).startswith("42501")
        owner.execute("set role limits_free")
        assert outcome(owner, deferred)[0] == "["
        owner.execute("reset role")
        # Once restrictions are in use, a right needs a row of queue.access.
        become(owner, "limits_by_hand")
        assert outcome(owner, deferred).startswith("42501")
        # A restricted role's function gives nobody, not even that role, rights that the role lacks.
        become(owner, "limited_producer")
        owner.execute(
            "create function limits.defer() returns bigint language sql security definer as"
            " $$ select queue.defer('t', queue => 'b') $$"
        )
        assert outcome(owner, "select limits.defer()").startswith("42501")
        become(owner, "limits_nobody")
        assert outcome(owner, "select limits.defer()").startswith("42501")
        assert outcome(owner, deferred).startswith("42501")
        # Settings can't fake a role.
        become(owner, "limited_producer")
        assert outcome(owner, "set role = 'limits_free'").startswith("42501")
        owner.execute("reset session authorization")
        assert outcome(owner, deferred)[0] == "["
        owner.execute("set role limited_producer")
        assert outcome(owner, deferred).startswith("42501")
        owner.execute("reset role")
        # A renamed role loses its rights, but gains none.
        owner.execute("alter role limited_producer rename to limits_renamed")
        become(owner, "limits_renamed")
        assert outcome(owner, deferred).startswith("42501")
        assert outcome(owner, "select queue.defer('t', queue => 'a')").startswith("42501")
        owner.execute("reset session authorization")
        owner.execute("alter role limits_renamed rename to limited_producer")
    finally:
        drop(owner, "limits_free", "limits_member", "limits_both", "limits_apart",
             "limits_by_hand", "limits_nobody")  # fmt: skip


def test_triggers(owner: psycopg.Connection[Any], roles: dict[str, str]) -> None:
    """A trigger defers with the rights of its table's owner, or of the writing role."""
    for role in ("limits_app", "limits_writer"):
        owner.execute(f"create role {role}".encode())
    owner.execute("select queue.grant_access('limits_app', 'producer')")
    owner.execute("create schema limits")
    owner.execute("grant all on schema limits to public")
    try:
        become(owner, "limits_app")
        owner.execute("create table limits.free (n int)")
        owner.execute("grant insert on limits.free to public")
        owner.execute(
            "create trigger d after insert on limits.free for each row"
            " execute function queue.defer_trigger('t', '{\"queue\": \"b\"}')"
        )
        become(owner, "limited_producer")
        for queue in ("a", "b"):
            owner.execute(f"create table limits.own_{queue} (n int)".encode())
            owner.execute(f"grant insert on limits.own_{queue} to public".encode())
            owner.execute(
                f"create trigger d after insert on limits.own_{queue} for each row execute"
                f" function queue.defer_trigger('t', '{{\"queue\": \"{queue}\"}}')".encode()
            )
        for role in ("limited_producer", "limits_writer"):
            become(owner, role)
            assert outcome(owner, "insert into limits.free values (1) returning 1")[0] == "["
            assert outcome(owner, "insert into limits.own_a values (1) returning 1")[0] == "["
            said = outcome(owner, "insert into limits.own_b values (1) returning 1")
            assert said.startswith("42501"), said
        # needs or a parent that the owner's job may have, it may have whoever writes
        owner.execute("reset session authorization")
        (parent,) = (
            owner.execute("select min(id) from queue.jobs where queue = 'b'").fetchone() or ()
        )
        keys = json.dumps({"queue": "a", "options": {"parent": parent}})
        owner.execute(
            "create trigger p after update on limits.free for each row"
            f" execute function queue.defer_trigger('t', '{keys}')".encode()
        )
        owner.execute("grant update, select on limits.free to public")
        for role in ("limited_producer", "limits_writer"):
            become(owner, role)
            assert outcome(owner, "update limits.free set n = 2 returning 1")[0] == "["
        owner.execute("reset session authorization")
        owner.execute("delete from limits.free")
        owner.execute("select queue.delete(array_agg(id)) from queue.jobs where parent is not null")
        rows = owner.execute(
            "select queue, count(*) from queue.jobs group by 1 order by 1"
        ).fetchall()
        assert rows == [("a", 2), ("b", 2)]
    finally:
        owner.execute("rollback")
        owner.execute("reset session authorization")
        owner.execute("drop schema limits cascade")
        drop(owner, "limits_app", "limits_writer")


def test_schedules_run_whoever_ticks(owner: psycopg.Connection[Any], roles: dict[str, str]) -> None:
    owner.execute(
        "select queue.schedule('s', 'every 1 second', 't', options => '{\"queue\": \"b\"}')"
    )
    owner.execute("select pg_sleep(1.1)")
    become(owner, roles["worker"])
    owner.execute("select * from queue.tick()")
    owner.execute("reset session authorization")
    row = owner.execute("select count(*) > 0 from queue.jobs where queue = 'b'").fetchone()
    assert row == (True,)
    owner.execute("select queue.unschedule('s')")


def test_limits_come_and_go(owner: psycopg.Connection[Any]) -> None:
    def marks() -> tuple[bool, int]:
        row = owner.execute(
            "select to_regclass('queue.unrestricted') is null, (select count(*) from pg_class c where"
            " c.relnamespace = 'queue'::regnamespace and 'security_barrier=true' = any (c.reloptions))"
        ).fetchone()
        assert row
        return row[0], row[1]

    owner.execute("create role limits_some")
    try:
        assert marks() == (False, 0)
        owner.execute("select queue.grant_access('limits_some', 'worker')")
        assert marks() == (False, 0)
        owner.execute("select queue.grant_access('limits_some', 'producer', '{a}')")
        assert marks() == (True, 8)
        become(owner, "limits_some")
        assert outcome(owner, "select queue.defer('t')").startswith("42501")
        owner.execute("select queue.register_worker('w')")
        # Its rights as a worker are unrestricted, and so are rights that both kinds have.
        owner.execute("select queue.register_task('t')")
        owner.execute("reset session authorization")
        owner.execute("select queue.grant_access('limits_some', 'producer')")
        assert marks() == (False, 0)
        become(owner, "limits_some")
        assert outcome(owner, "select queue.defer('t')")[0] == "["
        owner.execute("reset session authorization")
        owner.execute("select queue.grant_access('limits_some', 'producer', '{*}')")
        assert marks() == (False, 0)
        owner.execute("select queue.grant_access('limits_some', 'operator', '{a}')")
        assert marks() == (True, 8)
        owner.execute("select queue.revoke_access('limits_some')")
        assert marks() == (False, 0)
        for bad in ("{}", "{NULL}", '{""}', "{{a,b},{c,d}}"):
            said = outcome(owner, "select queue.grant_access('limits_some', 'reader', %s)", bad)
            assert said.startswith("22023"), bad
    finally:
        drop(owner, "limits_some")


@pytest.mark.parametrize(
    ("limit", "unlimit"),
    [
        (
            "select queue.grant_access('limits_other', 'reader', '{a}')",
            "select queue.revoke_access('limits_other')",
        ),
        # Everything about plans; grant_access also changes the schema's rights, after which
        # all plans are remade.
        (
            "drop view queue.unrestricted",
            "create view queue.unrestricted as select 1",
        ),
    ],
)
def test_a_limit_holds_at_once_where_plans_were_made_without_one(
    owner: psycopg.Connection[Any], dsn: str, limit: LiteralString, unlimit: LiteralString
) -> None:
    """The plans of the calls of every job contain that nobody is restricted, until somebody is."""
    outcomes = (
        "jsonb_build_array(jsonb_build_object('id', %s, 'claim', %s, 'outcome', 'succeeded'))"
    )
    calls = {
        "select queue.succeed(%s, %s)": "QJ002",
        f"select state, error from queue.finish_many({outcomes})": "QJ002",
        f"select error from queue.finish_and_fetch({{worker}}, {outcomes})": "QJ007",
        "select id, claim from queue.fetch({worker})": "QJ007",
        "select queue.defer('t')": "42501",
    }
    owner.execute("create role limits_warm")
    owner.execute("create role limits_other")
    owner.execute("grant usage on schema queue to limits_warm")
    owner.execute(
        "grant execute on function queue.defer, queue.register_worker, queue.fetch, queue.succeed,"
        " queue.finish_many, queue.finish_and_fetch to limits_warm"
    )
    try:
        with psycopg.connect(dsn, autocommit=True) as warm:
            become(warm, "limits_warm")
            (worker,) = warm.execute("select queue.register_worker('w')").fetchone() or ()

            def claimed() -> tuple[int, int]:
                owner.execute("select queue.defer('t')")
                (row,) = warm.execute("select id, claim from queue.fetch(%s)", (worker,))
                return row

            def call(statement: str) -> str:
                given = claim[: statement.count("%s")]
                return outcome(warm, statement.replace("{worker}", str(worker)), *given)

            for statement in calls:
                for _ in range(7):
                    claim = claimed()
                    assert call(statement)[0] == "["
            claim = claimed()
            for begin, end in (("begin", "rollback"), ("begin", "commit")):
                owner.execute(begin)
                owner.execute(limit)
                assert call("select queue.defer('t')")[0] == "["
                owner.execute(end)
            for statement, said in calls.items():
                assert call(statement).startswith(said), statement
            state = owner.execute("select state from queue.jobs where id = %s", claim[:1])
            assert state.fetchone() == ("running",)
            owner.execute(unlimit)
            assert call("select queue.defer('t')")[0] == "["
    finally:
        drop(owner, "limits_warm", "limits_other")


def test_a_renamed_role_is_not_without_limits(owner: psycopg.Connection[Any]) -> None:
    owner.execute("create role limits_name")
    owner.execute("create role limits_other")
    owner.execute("select queue.grant_access('limits_name', 'operator', '{a}')")
    owner.execute("select queue.defer('t', queue => 'z')")
    owner.execute("alter role limits_name rename to limits_renamed")
    try:
        owner.execute("select queue.grant_access('limits_other', 'reader')")
        become(owner, "limits_renamed")
        assert outcome(owner, "select queue.search()") == "[]"
        assert outcome(owner, "select queue.delete('{1}')").startswith("QJ001")
        owner.execute("reset session authorization")
    finally:
        owner.execute("reset session authorization")
        owner.execute("alter role limits_renamed rename to limits_name")
        drop(owner, "limits_name", "limits_other")


def test_a_team_gives_a_new_role_nothing_of_an_old_one(owner: psycopg.Connection[Any]) -> None:
    owner.execute("create role limits_team")
    owner.execute("select queue.grant_access('limits_team', 'reader')")
    owner.execute("create role limits_eve")
    owner.execute("select queue.grant_access('limits_eve', 'operator')")
    owner.execute("drop owned by limits_eve")
    owner.execute("drop role limits_eve")
    owner.execute("create role limits_eve in role limits_team")
    try:
        owner.execute("select queue.grant_access('limits_eve', 'producer')")
        become(owner, "limits_eve")
        assert outcome(owner, "select queue.delete('{1}')").startswith("42501")
    finally:
        drop(owner, "limits_eve", "limits_team")


def test_a_limited_operator_ends_the_claim_that_it_has(
    owner: psycopg.Connection[Any], roles: dict[str, str]
) -> None:
    for _ in range(2):
        owner.execute("select queue.defer('t', queue => 'a')")
    (need,) = owner.execute("select queue.defer('n', queue => 'a1')").fetchone() or ()
    become(owner, roles["operator"])
    options = json.dumps({"queue": "a", "retry_in": "1 hour"})
    for call in (
        f"queue.fail(n.id, n.claim, 'x', options => '{options}')",
        f"queue.retry_later(n.id, n.claim, needs => '{{{need}}}')",
    ):
        said = outcome(owner, f"select {call} from queue.next('{{a}}') n")
        assert said[0] == "[", said
    owner.execute("reset session authorization")


def test_a_dropped_role_leaves_nothing_to_the_next_of_its_name(
    owner: psycopg.Connection[Any],
) -> None:
    for kind in ("operator", "producer"):
        owner.execute("create role limits_old")
        owner.execute("select queue.grant_access('limits_old', %s, '{a}')", (kind,))
        rows = owner.execute("select kind from queue.access").fetchall()
        assert rows == [(kind,)]
        become(owner, "limits_old")
        may = outcome(owner, "select queue.delete('{1}')")
        assert may.startswith("42501") == (kind == "producer")
        owner.execute("reset session authorization")
        owner.execute("drop owned by limits_old")
        owner.execute("drop role limits_old")
    owner.execute("select queue.revoke_access('limits_old')")
    assert owner.execute("select * from queue.access").fetchall() == []
    assert outcome(owner, "select queue.revoke_access('limits_old')").startswith("22023")


@pytest.mark.parametrize("is_alone", [False, True])
def test_an_upgrade_gives_a_new_role_nothing_of_an_old_one(
    owner: psycopg.Connection[Any], is_alone: bool
) -> None:
    """But all roles keep theirs if the tables were restored without the schema's rights."""
    for role in ("limits_eve", "limits_team"):
        owner.execute(f"create role {role}".encode())
        owner.execute("select queue.grant_access(%s, 'operator', '{a}')", (role,))
    owner.execute("drop owned by limits_eve")
    owner.execute("drop role limits_eve")
    owner.execute("create role limits_eve")
    try:
        if is_alone:
            owner.execute("revoke usage on schema queue from limits_team")
        owner.execute("select queue.install()")
        rows = owner.execute("select role from queue.access order by role").fetchall()
        assert rows == [("limits_eve",)] * is_alone + [("limits_team",)]
        for role, may in (("limits_eve", is_alone), ("limits_team", True)):
            become(owner, role)
            said = outcome(owner, "select error from queue.delete('{1}')")
            assert said.startswith("[('QJ001',)]" if may else "42501"), said
            owner.execute("reset session authorization")
    finally:
        owner.execute("reset session authorization")
        drop(owner, "limits_eve", "limits_team")


def test_a_member_of_a_limited_team_has_nothing_of_an_old_role(
    owner: psycopg.Connection[Any],
) -> None:
    owner.execute("create role limits_eve")
    owner.execute("select queue.grant_access('limits_eve', 'operator')")
    owner.execute("drop owned by limits_eve")
    owner.execute("drop role limits_eve")
    owner.execute("create role limits_team")
    owner.execute("select queue.grant_access('limits_team', 'operator', '{a}')")
    owner.execute("create role limits_eve in role limits_team")
    owner.execute("select queue.defer('t', queue => 'a'), queue.defer('t', queue => 'b')")
    try:
        become(owner, "limits_eve")
        assert outcome(owner, "select outcome from queue.delete('{1}')") == "[('deleted',)]"
        assert outcome(owner, "select queue.delete('{2}')").startswith("QJ001")
    finally:
        owner.execute("reset session authorization")
        drop(owner, "limits_eve", "limits_team")


@pytest.mark.unchecked("it uninstalls")
def test_plans_that_were_made_with_the_tables_end_with_them(
    owner: psycopg.Connection[Any], dsn: str
) -> None:
    with psycopg.connect(dsn, autocommit=True) as warm:
        (worker,) = warm.execute("select queue.register_worker('w')").fetchone() or ()
        calls = (
            "select queue.defer('t')",
            f"select * from queue.fetch({worker})",
            "select * from queue.finish_many('[]')",
            f"select * from queue.finish_and_fetch({worker}, '[]')",
        )
        for _ in range(7):
            for call in calls:
                assert outcome(warm, call)[0] == "["
            (job,) = warm.execute("select queue.defer('t')").fetchone() or ()
            (claim,) = warm.execute(f"select claim from queue.fetch({worker})").fetchone() or ()
            assert outcome(warm, "select queue.succeed(%s, %s)", job, claim)[0] == "["
        owner.execute("select queue.uninstall(true)")
        try:
            for call in (*calls, "select queue.succeed(1, 1)"):
                assert outcome(warm, call).startswith("QJ090"), call
        finally:
            owner.execute("select queue.install()")
        assert outcome(warm, "select queue.defer('t')") == "[(1,)]"


@pytest.mark.unchecked("it uninstalls")
def test_uninstalling_takes_back_what_was_given(owner: psycopg.Connection[Any]) -> None:
    owner.execute("create role limits_kept")
    try:
        owner.execute("select queue.grant_access('limits_kept', 'operator', '{a}')")
        owner.execute("select queue.uninstall(true)")
        owner.execute("select queue.install()")
        become(owner, "limits_kept")
        assert outcome(owner, "select queue.delete('{1}')").startswith("42501")
    finally:
        owner.execute("reset session authorization")
        drop(owner, "limits_kept")


WITH_BARRIER = ("jobs", "attempts", "queues", "workers", "metrics", "audit")


@pytest.mark.parametrize("view", WITH_BARRIER)
def test_a_reader_that_stays_open_stops_nobody_but_the_first_limit(
    owner: psycopg.Connection[Any], dsn: str, view: str
) -> None:
    """Views become barriers with the first restriction, which waits briefly for open readers."""
    owner.execute("create role limits_first")
    owner.execute("select queue.defer('t')")
    try:
        with psycopg.connect(dsn) as reader, psycopg.connect(dsn, autocommit=True) as other:
            reader.execute(f"select * from queue.{view}".encode()).fetchall()
            granting = threading.Thread(
                target=owner.execute,
                args=("select queue.grant_access('limits_first', 'reader', '{a}')",),
            )
            granting.start()
            waiting = "select from pg_stat_activity where wait_event_type = 'Lock' and query ~ %s"
            other.execute("set statement_timeout = '60 s'")
            for _ in range(3):
                while not other.execute(waiting, ("^select queue.grant_access",)).fetchall():
                    assert granting.is_alive()
                other.execute("select * from queue.set_priority('{1}', 1)").fetchall()
                for each in WITH_BARRIER:
                    other.execute(f"select * from queue.{each}".encode()).fetchall()
            reader.rollback()
            granting.join()
        assert owner.execute("select to_regclass('queue.unrestricted')").fetchone() == (None,)
    finally:
        drop(owner, "limits_first")


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (None, ["a*", "exact"]),
        (["*"], ["a*", "exact"]),
        (["e*", "a1"], ["exact", "a1"]),
        (["b", "ab*", "exact"], ["ab*", "exact"]),
        (["a*"], ["a*"]),
        (["exact*"], ["exact"]),
        (["b"], None),
        (["exactly"], None),
    ],
)
def test_what_is_left_of_a_list(
    owner: psycopg.Connection[Any],
    roles: dict[str, str],
    asked: list[str] | None,
    given: list[str] | None,
) -> None:
    become(owner, roles["worker"])
    said = outcome(owner, "select queue.register_worker('w', %s::text[])", asked)
    owner.execute("reset session authorization")
    row = owner.execute("select queues from queue.worker").fetchone()
    assert (row[0] if row else None) == given, said
