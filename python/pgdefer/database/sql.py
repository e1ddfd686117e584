"""The statements of the package, but for those of move_in_sql, contrib/web and contrib/cluster.

Parameters are written `:name`, as SQLAlchemy's `text` requires; `.psycopg` is psycopg's form.

Tests: unit/test_conventions.py.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["Statement"]


class Statement:
    """One statement, in the forms of the drivers."""

    def __init__(self, text: str) -> None:
        self.text = " ".join(text.split())

    @functools.cached_property
    def psycopg(self) -> bytes:
        """The statement with %(name)s for its parameters."""
        return re.sub(r"(?<!:):(\w+)", r"%(\1)s", self.text).encode()

    @functools.cached_property
    def sqlalchemy(self) -> sa.TextClause:
        """The statement as SQLAlchemy's text, which takes long to make."""
        import sqlalchemy  # noqa: PLC0415 (optional)

        return sqlalchemy.text(self.text)

    @functools.cached_property
    def json(self) -> Statement:
        """The statement with each row as JSON written by the database, in the column `row`."""
        return Statement(f"select cast(row_to_json(r) as text) as row from ({self.text}) as r")


# Connecting. Overrides the default of the role or database. Read-only is not overridden: operators
# use it to keep everybody from writing.

READ_COMMITTED = Statement("set default_transaction_isolation to 'read committed'")

# Psycopg reads times in this style only. The order of month and day, for what is typed in, stays.
STYLES = Statement("set datestyle to iso; set intervalstyle to postgres")

# Bounds how long a worker's calls wait for a row that a transaction has locked. An operator's call
# holds rows for no longer than that.
BOUND_WAITS = Statement("""
    select set_config('lock_timeout', '10s', false) where current_setting('lock_timeout') = '0'
""")

SET_ZONE = Statement("select set_config('TimeZone', cast(:zone as text), false)")

# Undoes what a handler may have left in its session; what the DSN sets remains.
UNDO = Statement(f"""
    reset session authorization; reset role; reset all; close all; unlisten *; discard temp;
    select pg_advisory_unlock_all(); {READ_COMMITTED.text}
""")

# Deferring

REGISTER_TASKS = Statement("""
    select queue.register_task(t.name, t.defaults)
    from jsonb_to_recordset(cast(cast(:tasks as text) as jsonb)) as t (name text, defaults jsonb)
""")

# REGISTER_TASKS that gives up where another transaction holds a task's row longer than `patience`.
TRY_REGISTER_TASKS = Statement(f"""
    {REGISTER_TASKS.text.strip()}
    where set_config('lock_timeout', cast(:patience as text), true) <> ''
""")

# The two casts make drivers that look up the parameters' types pass them as text.
DEFER = Statement("""
    select * from queue.defer(
      task => cast(:task as text),
      args => cast(cast(:args as text) as jsonb),
      queue => cast(:queue as text),
      priority => cast(:priority as integer),
      lock => cast(:lock as text),
      queueing_lock => cast(:queueing_lock as text),
      scheduled_at => cast(cast(:scheduled_at as text) as timestamptz),
      deadline => cast(cast(:deadline as text) as timestamptz),
      needs => cast(:needs as bigint[]),
      concurrency_key => cast(:concurrency_key as text),
      concurrency_limit => cast(:concurrency_limit as integer),
      options => cast(cast(:options as text) as jsonb))
""")

# Also the time at which the job was deferred: its created_at.
DEFER_WITH_TIME = Statement(DEFER.text.replace("*", "*, current_timestamp", 1))

DEFER_WITHOUT_OPTIONS = Statement("""
    select * from queue.defer(
      task => cast(:task as text), args => cast(cast(:args as text) as jsonb))
""")

DEFER_MANY = Statement("select * from queue.defer_many(cast(cast(:jobs as text) as jsonb))")

DEFER_GROUP = Statement("""
    select then_id, ids from queue.defer_group(
      cast(cast(:jobs as text) as jsonb), cast(cast(:then as text) as jsonb))
""")

DEFER_CHAIN = Statement("select * from queue.defer_chain(cast(cast(:jobs as text) as jsonb))")

# Recurring runs

SCHEDULE = Statement("""
    select queue.schedule(s.name, s.cron, s.task, s.args, s.timezone, s.options)
    from jsonb_to_recordset(cast(cast(:schedules as text) as jsonb))
      as s (name text, cron text, task text, args jsonb, timezone text, options jsonb)
""")

SCHEDULES_OF = Statement("""
    select name from queue.schedules where source = cast(:source as text)
""")

UNSCHEDULE = Statement("""
    select was_there from queue.unschedule(cast(:name as text)) as was_there
""")

# Working

REGISTER_WORKER = Statement("""
    select * from queue.register_worker(
      cast(:name as text), cast(:queues as text[]), cast(:info as jsonb))
""")

_CLAIM = """
    id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, timeout,
    headers, parent, steps
"""
# The number of these columns; finish_and_fetch returns one more, the error.
CLAIM_COLUMNS = 14

FETCH = Statement(f"""
    select {_CLAIM} from queue.fetch(
      cast(:worker as bigint), cast(:queues as text[]), cast(:max_jobs as integer),
      cast(:options as jsonb))
""")

FINISH_AND_FETCH = Statement(f"""
    select {_CLAIM}, error from queue.finish_and_fetch(
      cast(:worker as bigint), cast(:outcomes as jsonb), cast(:queues as text[]),
      cast(:max_jobs as integer), cast(:options as jsonb))
""")

FINISH_MANY = Statement("""
    select id, claim, state, error from queue.finish_many(cast(:outcomes as jsonb))
""")

# FINISH_MANY that gives up where another transaction holds a claim's row longer than `patience`.
TRY_FINISH_MANY = Statement("""
    select f.id, f.claim, f.state, f.error
    from (select set_config('lock_timeout', cast(:patience as text), true) as patience offset 0) p
    cross join lateral queue.finish_many(
      case when p.patience <> '' then cast(:outcomes as jsonb) end) f
""")

HEARTBEAT = Statement("""
    select id, claim, reason
    from queue.heartbeat(cast(:worker as bigint), cast(:memory as bigint))
""")

DEREGISTER_WORKER = Statement("select * from queue.deregister_worker(cast(:worker as bigint))")

WORKER_DIED = Statement("""
    select ended from queue.worker_died(cast(:worker as bigint)) as ended
""")

BEFORE_SLEEP = Statement("""
    select may_sleep, wait_for, channels, is_drained, look_after
    from queue.before_sleep(
        cast(:worker as bigint), cast(:queues as text[]), cast(:options as jsonb))
""")

AFTER_SLEEP = Statement("select queue.after_sleep(cast(:worker as bigint))")

CLAIMS = Statement("select id, claim from queue.claims(cast(:worker as bigint))")

IS_BUSY = Statement("select queue.is_busy(cast(:session as integer)) as is_busy")

# In handlers

EXTEND = Statement("""
    select * from queue.extend(
      cast(:id as bigint), cast(:claim as bigint), cast(cast(:lease as text) as interval))
""")

# EXTEND that gives up where another transaction holds the claim's row for longer than `patience`.
TRY_EXTEND = Statement("""
    select queue.extend(
      cast(:id as bigint), cast(:claim as bigint), cast(cast(:lease as text) as interval))
    where set_config('lock_timeout', cast(:patience as text), true) <> ''
""")

ATTEMPTS_LEFT = Statement("""
    select max_attempts, failures, is_last
    from queue.attempts_left(cast(:id as bigint), cast(:claim as bigint))
""")

SUCCEED = Statement("""
    select queue.succeed(
      cast(:id as bigint), cast(:claim as bigint), cast(cast(:result as text) as jsonb))
""")

RUN_FUNCTION = Statement("""
    select state, outcome, error
    from queue.run_function(cast(:id as bigint), cast(:claim as bigint))
""")

# For the transaction of a database function.
SET_STATEMENT_TIMEOUT = Statement("""
    select set_config('statement_timeout', cast(:timeout as text), true)
""")

RETRY_LATER = Statement("""
    select * from queue.retry_later(
      cast(:id as bigint), cast(:claim as bigint), cast(cast(:at as text) as timestamptz),
      cast(:needs as bigint[]), cast(:message as text))
""")

# Durable jobs

# The outcome, as queue.attempts calls it. It is in a subquery, so that the call that ends the claim
# comes first.
_OUTCOME = "queue.attempt_outcome(cast(:id as bigint), cast(:claim as bigint))"

BEGIN_STEP = Statement("""
    select finished from queue.begin_step(
      cast(:id as bigint), cast(:claim as bigint), cast(:name as text),
      cast(:fingerprint as text))
""")

FINISH_STEP = Statement("""
    select queue.finish_step(
      cast(:id as bigint), cast(:claim as bigint), cast(:name as text),
      cast(cast(:value as text) as jsonb))
""")

FINISH_STEPS = Statement("""
    select queue.finish_steps(
      cast(:id as bigint), cast(:claim as bigint), cast(cast(:steps as text) as jsonb))
""")

FAIL_STEP = Statement(f"""
    select ended.state, {_OUTCOME} as outcome
    from (select queue.fail_step(
      cast(:id as bigint), cast(:claim as bigint), cast(:name as text), cast(:error as text),
      cast(cast(:details as text) as jsonb), cast(cast(:options as text) as jsonb)) as state
    ) as ended
""")

READ_STEPS = Statement("""
    select name, cast(value as text) as value from queue.read_steps(
      cast(:id as bigint), cast(:claim as bigint), cast(:after as text))
""")

SLEEP = Statement(f"""
    select {_OUTCOME} as outcome
    from (select queue.sleep(
      cast(:id as bigint), cast(:claim as bigint), cast(:name as text),
      coalesce(cast(cast(:at as text) as timestamptz),
        clock_timestamp() + cast(cast(:delay as text) as interval)))) as ended
""")

WAIT = Statement(f"""
    select {_OUTCOME} as outcome
    from (select queue.wait(
      cast(:id as bigint), cast(:claim as bigint), cast(:name as text), cast(:signal as text),
      cast(:event as text), cast(cast(:timeout as text) as interval))) as ended
""")

AWAIT_JOBS = Statement(f"""
    select {_OUTCOME} as outcome
    from (select queue.await_jobs(
      cast(:id as bigint), cast(:claim as bigint), cast(:name as text),
      cast(:jobs as bigint[]))) as ended
""")

SIGNAL = Statement("""
    select queue.signal(
      cast(:id as bigint), cast(:name as text), cast(cast(:payload as text) as jsonb))
""")

PUBLISH = Statement("""
    select is_first from queue.publish(
      cast(:event as text), cast(cast(:payload as text) as jsonb),
      cast(cast(:retain as text) as interval)) as is_first
""")

OPEN_GROUP = Statement("""
    select * from queue.open_group(
      cast(:name as text), cast(cast(:on_end as text) as jsonb),
      cast(cast(:on_success as text) as jsonb), cast(cast(:on_failure as text) as jsonb))
""")

CLOSE_GROUP = Statement("""
    select was_open from queue.close_group(cast(:name as text)) as was_open
""")

EMIT = Statement("""
    select * from queue.emit(
      cast(:id as bigint), cast(:claim as bigint), cast(:stream as text),
      cast(cast(:value as text) as jsonb))
""")

READ_STREAM = Statement("""
    select no, cast(value as text) as value from queue.read_stream(
      cast(:id as bigint), cast(:stream as text), cast(:after as bigint))
""")

FINISHED_STEPS = Statement("""
    select name, value, fingerprint, claim, finished_at, failures, error
    from queue.steps where job_id = cast(:id as bigint) order by claim, finished_at
""")

FORK = Statement("select id from queue.fork(cast(:id as bigint), cast(:from_step as text)) as id")

SET_PROGRESS = Statement("""
    select queue.set_progress(
      cast(:id as bigint), cast(:claim as bigint), cast(:percent as numeric),
      cast(:message as text))
""")

# Calls of a running job that take effect at once, even if its handler's transaction rolls back.
AT_ONCE = (
    EXTEND,
    FINISH_STEP,
    FINISH_STEPS,
    FAIL_STEP,
    SLEEP,
    WAIT,
    AWAIT_JOBS,
    EMIT,
    SET_PROGRESS,
)

# Waiting for results

RESULT = Statement("""
    select state, result, error, channel, wait_for
    from queue.await_result(cast(:id as bigint))
""")

NEEDS = Statement("""
    select need_id, task, state, result, error from queue.needs(cast(:id as bigint))
""")

HOW_ENDED = Statement(f"""
    select {_OUTCOME} as outcome, state from queue.result(cast(:id as bigint))
""")

STATE = Statement("select state from queue.result(cast(:id as bigint))")

# Operating

_JOB_CHANGE = "select id, outcome, error from"

JOB = Statement("select * from queue.jobs where id = cast(:id as bigint)")

JOB_DETAILS = Statement("""
    select id, task, queue, state, reason, cast(args as text) as args, priority, lock,
      queueing_lock, concurrency_key, needs, deadline, scheduled_at, expires_at, created_at,
      started_at, finished_at, attempts, failures, crashes, claims, claim, worker_id, error,
      cast(result as text) as result, description, cast(headers as text) as headers, parent,
      idempotency_key, progress, percent, message, cast(options as text) as options from
      queue.jobs where id = cast(:id as bigint)
""")

ATTEMPTS = Statement("""
    select attempt, claim, worker_id, started_at, finished_at, outcome, error, details
    from queue.attempts where job_id = cast(:id as bigint) order by claim
""")

SEARCH = Statement("""
    select id, queue_name as queue, task_name as task, job_state as state, reason, priority,
      attempts, created_at, scheduled_at, started_at, finished_at, error, description, bytes,
      excerpt, next_id
    from queue.search(
      pattern => cast(:pattern as text), queue => cast(:queue as text),
      state => cast(:state as text), max_bytes => cast(:max_bytes as bigint),
      by => cast(:by as text), task => cast(:task as text), before => cast(:before as bigint),
      max_jobs => cast(:max_jobs as integer))
""")

# Turns the hiding of sensitive args on or off, for the rest of the transaction.
HIDE_SENSITIVE = Statement("""
    select coalesce(current_setting('pgdefer.hide_sensitive', true), '') as before,
      set_config('pgdefer.hide_sensitive', cast(:hide as text), true)
""")

LIST_JOBS = Statement(f"""
    select id, queue, task, state, reason, priority, attempts, created_at, scheduled_at, started_at,
      finished_at, error, description, excerpt
    from ({SEARCH.text}) as s where id is not null
""")

GET = Statement("""
    select cast(value as text) as value
    from queue.get(cast(:id as bigint), cast(:path as text)) as value
""")

WHY = Statement("select why from queue.why(cast(:id as bigint)) as why")

GRAPH = Statement("""
    select job_id, need_id, depth, task, state from queue.graph(cast(:id as bigint))
""")

_ENDED = """
    select id, task, queue, state, error, finished_at, finished_at - started_at as ran_for
    from queue.jobs
    where (cast(:task as text) is null or task = cast(:task as text))
      and (cast(:queue as text) is null or queue = cast(:queue as text)
           or right(cast(:queue as text), 1) = '*'
             and starts_with(queue, left(cast(:queue as text), -1)))
"""

ENDED_LATELY = Statement(f"""
    {_ENDED} and finished_at > now() - interval '10 minutes'
    order by finished_at desc limit cast(:n as integer)
""")

ENDED_SINCE = Statement(f"""
    {_ENDED} and finished_at > greatest(cast(:start as timestamptz), cast(:since as timestamptz))
      - interval '5 seconds'
    order by finished_at limit 100000
""")

# The database's clock, by a call that any role with access to the queue may make.
NOW = Statement("select now() as now from queue.version()")

TASKS = Statement("select name, defaults, paused_in from queue.tasks order by name")

# For the App, which reads JSON from text: a caller's connection may load it in its own way.
LIST_TASKS = Statement("""
    select name, cast(defaults as text) as defaults, paused_in from queue.tasks order by name
""")

LIST_WORKERS = Statement("""
    select id, name, queues, cast(info as text) as info, is_alive, running, registered_at,
      last_seen_at, dead_after, memory
    from queue.workers order by id
""")

LIST_SCHEDULES = Statement("""
    select name, cron, timezone, task, cast(args as text) as args, enabled, next_run_at,
      last_run_at, last_job_id, reason, cast(options as text) as options, catch_up, max_delay,
      overlap, source, created_at, changed_at
    from queue.schedules order by name
""")

LOCKS = Statement("""
    select lock, job_id, running, waiting, has_mutex from queue.locks order by waiting desc, lock
""")

SEMAPHORES = Statement("""
    select kind, key, "limit", used, ready, waiting, rate_limit, rate_per
    from queue.semaphores order by kind, key
""")

SHARES = Statement("""
    select queue, priority, share, weight, waiting, started
    from queue.shares order by queue, priority desc, waiting desc, share
""")

GROUPS = Statement("""
    select name, state, jobs, unfinished, succeeded, failed, cancelled, on_end_id, on_success_id,
      on_failure_id, error, opened_at, closed_at, ended_at
    from queue.groups
    where name = coalesce(cast(:name as text), name) order by opened_at desc, name
""")

LIMITS = Statement("""
    select kind, key, "limit", rate_limit || ' per ' || rate_per as rate, used, ready, waiting
    from queue.semaphores order by kind, key
""")

TASK_STATS = Statement("""
    select queue, task, scheduled, waiting, upstream_failed, blocked, ready, running, held, failed,
      oldest_ready_for, succeeded_5m, failed_5m, cancelled_5m
    from queue.stats() order by queue, task
""")

HEALTH = Statement("select name, status, detail, fix from queue.health()")

PEEK = Statement("select * from queue.peek(cast(:queues as text[]), cast(:n as integer))")

NEXT = Statement("""
    select * from queue.next(
      cast(:queues as text[]), cast(:ack as boolean), cast(:lease as interval))
""")

MOVE = Statement(f"""
    {_JOB_CHANGE}
    queue.move(cast(:ids as bigint[]), cast(:queue as text), cast(:force as boolean))
""")

COPY = Statement("select id from queue.copy(cast(:id as bigint), cast(:queue as text)) as id")

RETRY = Statement(f"""
    {_JOB_CHANGE} queue.retry(
      cast(:ids as bigint[]), cast(:force as boolean), cast(:from_step as text),
      cast(cast(:changes as text) as jsonb))
""")

RETRY_FAILED = Statement(f"""
    {_JOB_CHANGE} queue.retry_failed(
      cast(:task as text), cast(:queue as text), cast(:max_jobs as integer),
      cast(:after as bigint))
""")

DELETE = Statement(f"""
    {_JOB_CHANGE} queue.delete(cast(:ids as bigint[]), cast(:force as boolean))
""")

FAIL_JOBS = Statement(f"""
    {_JOB_CHANGE} queue.fail_jobs(cast(:ids as bigint[]), cast(:message as text))
""")

DONE = Statement(f"{_JOB_CHANGE} queue.done(cast(:ids as bigint[]))")

SET_PRIORITY = Statement(f"""
    {_JOB_CHANGE} queue.set_priority(cast(:ids as bigint[]), cast(:priority as integer))
""")

SET_DEADLINE = Statement(f"""
    {_JOB_CHANGE} queue.set_deadline(
      cast(:ids as bigint[]), cast(cast(:at as text) as timestamptz))
""")

HOLD = Statement("select state from queue.hold(cast(:id as bigint)) as state")

UNHOLD = Statement("select state from queue.unhold(cast(:id as bigint)) as state")

CANCEL = Statement("""
    select state from queue.cancel(cast(:id as bigint), cast(:abort as boolean)) as state
""")

CANCEL_CHILDREN = Statement(f"""
    {_JOB_CHANGE} queue.cancel_children(cast(:id as bigint), cast(:abort as boolean))
""")

SET_ARGS = Statement("""
    select state
    from queue.set_args(cast(:id as bigint), cast(cast(:args as text) as jsonb)) as state
""")

RESCHEDULE = Statement("""
    select state
    from queue.reschedule(cast(:id as bigint), cast(cast(:at as text) as timestamptz)) as state
""")

DEFER_ONE = Statement(f"select id from ({DEFER.text}) as d (id)")

_QUEUE = """
    select name, ready, running, max_running, rate_limit || ' per ' || rate_per as rate, retain,
      paused_until, created_at
    from queue.queues
"""

QUEUES = Statement(f"{_QUEUE} order by name")

KNOWN_QUEUES = Statement("select name from queue.queues where name = any (cast(:names as text[]))")

QUEUE = Statement(f"{_QUEUE} where name = cast(:name as text)")

CREATE_QUEUE = Statement("""
    select is_new
    from queue.create_queue(cast(:name as text), cast(:paused as boolean)) as is_new
""")

DELETE_QUEUE = Statement("""
    select jobs from queue.delete_queue(cast(:name as text), cast(:force as boolean)) as jobs
""")

PAUSE = Statement("""
    select jobs from queue.pause(
      cast(:queue as text), cast(cast(:until as text) as timestamptz), cast(:task as text)) as jobs
""")

RESUME = Statement("""
    select jobs from queue.resume(cast(:queue as text), cast(:task as text)) as jobs
""")

CONFIGURE_QUEUE = Statement("""
    select queue.configure_queue(cast(:name as text), cast(:options as jsonb))
""")

CONFIGURE_KEY = Statement("""
    select queue.configure_key(cast(:pattern as text), cast(:options as jsonb))
""")

CONFIGURE_SHARE = Statement("""
    select queue.configure_share(cast(:pattern as text), cast(:options as jsonb))
""")

UNBLOCK = Statement("select session from queue.unblock() as session")

WORKERS = Statement("""
    select id, name, queues, info, is_alive, running, memory, registered_at, last_seen_at,
      dead_after, has_left, clock_timestamp() - last_seen_at as silent_for,
      case when is_alive then clock_timestamp() else last_seen_at end - registered_at as up_for
    from queue.workers order by id
""")

STATS = Statement("select * from queue.stats()")

CHECK = Statement("select * from queue.check()")

REAP = Statement("select * from queue.reap()")

TICK_ONCE = Statement("select * from queue.tick()")

PRUNE = Statement("""
    select jobs from queue.prune(
      cast(:max_jobs as integer), cast(:state as text), cast(cast(:older_than as text) as interval))
      as jobs
""")

SCHEDULES = Statement("select * from queue.schedules order by name")

SCHEDULE_ONE = Statement("""
    select next_run_at from queue.schedule(
      cast(:name as text), cast(:cron as text), cast(:task as text),
      cast(cast(:args as text) as jsonb), cast(:timezone as text),
      cast(cast(:options as text) as jsonb)) as next_run_at
""")

ENABLE_SCHEDULE = Statement("""
    select next_run_at
    from queue.enable_schedule(cast(:name as text), cast(:enabled as boolean)) as next_run_at
""")

RUN_NOW = Statement("select id from queue.run_now(cast(:name as text)) as id")

NEXT_RUNS = Statement("""
    select run_at, cast(run_at at time zone cast(:timezone as text) as text) as local
    from queue.next_runs(
      cast(:cron as text), cast(:timezone as text), n => cast(:n as integer)) as run_at
""")

TOP_QUEUES = Statement("""
    select queue, case when paused = 1 then 'paused' end as paused, ready, running,
      blocked, scheduled, waiting, upstream_failed, held, failed,
      make_interval(secs => nullif(oldest_ready_seconds, 0)) as oldest,
      round((succeeded_5m + failed_5m + cancelled_5m) / 300.0, 2) as per_second, failed_5m,
      workers
    from queue.metrics order by running + ready desc, queue
""")

# Testing

CLOCK = Statement("select clock_timestamp() as now from queue.version()")

REHEARSE = Statement("select jobs from queue.rehearse() as jobs")

# These two call functions, which keep their plans. Planning the view would take milliseconds in
# each test, because drivers forget prepared statements in a rollback.
DEFERRED = Statement("""
    select id, task, cast(args as text) as args, queue, priority, lock, queueing_lock,
      concurrency_key, state, reason, scheduled_at, deadline, attempts, error, description,
      cast(headers as text) as headers, parent
    from queue.list_jobs(after => cast(:after as bigint), max_jobs => cast(:max_jobs as integer))
    order by id
""")

LAST_ID = Statement("select coalesce(max(id), 0) as id from queue.search(max_jobs => 1)")

RESULT_TEXT = Statement("""
    select state, cast(result as text) as result, error from queue.result(cast(:id as bigint))
""")

RUNS_WITHIN = Statement("""
    select run_at,
      cast(run_at + cast(cast(:deadline as text) as interval) as text) as deadline
    from queue.next_runs(
      cast(:cron as text), cast(:timezone as text),
      after => greatest(clock_timestamp() + cast(cast(:start as text) as interval),
        cast(cast(:after as text) as timestamptz)),
      n => cast(:n as integer)) as run_at
    where run_at <= clock_timestamp() + cast(cast(:start as text) as interval)
      + cast(cast(:length as text) as interval)
""")

# Completing words

_LIKE = "where starts_with(name, cast(:word as text)) order by name limit 200"

QUEUES_LIKE = Statement(f"select name from queue.queues {_LIKE}")

TASKS_LIKE = Statement(f"select name from queue.tasks {_LIKE}")

SCHEDULES_LIKE = Statement(f"select name from queue.schedules {_LIKE}")

# What names a queue or task, beside jobs.

QUEUE_NAMES = Statement("""
    select name
    from (
      select name from queue.queues
      union select unnest(queues) from queue.workers
      union select options ->> 'queue' from queue.schedules
      union select defaults ->> 'queue' from queue.tasks) as q
    where right(name, 1) <> '*'
""")

TASK_NAMES = Statement("select name from queue.tasks union select task from queue.schedules")

# Installing

VERSION = Statement("select code, tables from queue.version()")

HAS_EXTENSION = Statement("""
    select exists (select from pg_available_extensions where name = 'pgdefer') as available,
      exists (select from pg_extension where extname = 'pgdefer') as created,
      to_regprocedure('queue.version()') is not null as has_code
""")

CREATE_EXTENSION = Statement("create extension if not exists pgdefer")

UPDATE_EXTENSION = Statement("alter extension pgdefer update")

INSTALL = Statement("select * from queue.install()")

MIGRATE = Statement("select * from queue.migrate()")

MIGRATION = Statement("select statement from queue.migration()")

UNINSTALL = Statement("select queue.uninstall()")

UNINSTALL_BY_FORCE = Statement("select queue.uninstall(force => true)")

UNINSTALL_IF_EMPTY = Statement("select queue.uninstall(force => null)")

DROP_EXTENSION = Statement("drop extension if exists pgdefer")

# The plain file sets these for its own transaction; in the caller's they would persist.
AFTER_PLAIN_CODE = Statement("set local check_function_bodies to default")

AFTER_PLAIN_MESSAGES = Statement("set local client_min_messages to default")


def listen(channel: str) -> Statement:
    """Return LISTEN on a channel."""
    return Statement('listen "{}"'.format(channel.replace('"', '""')))


def unlisten(channel: str) -> Statement:
    """Return UNLISTEN of a channel."""
    return Statement('unlisten "{}"'.format(channel.replace('"', '""')))


def create_database(name: str) -> Statement:
    """Return the statement that creates a database for tests."""
    return Statement('create database "{}"'.format(name.replace('"', '""')))


def drop_database(name: str) -> Statement:
    """Return the statement that drops it, even if clients are connected."""
    return Statement('drop database "{}" with (force)'.format(name.replace('"', '""')))


# The demo's own tables and queries

DEMO_PREPARE = Statement("""
    drop schema if exists pgdefer_demo cascade;
    create schema pgdefer_demo;
    create table pgdefer_demo.file (
      path text primary key,
      folder text not null,
      bytes bigint not null,
      lines bigint not null,
      sha256 text not null,
      blake2b text not null,
      ms double precision not null
    );
    create table pgdefer_demo.folder (folder text primary key, files integer, bytes bigint);
    create trigger file_defers_index after insert on pgdefer_demo.file
      for each row execute function queue.defer_trigger('demo.index')
""")

DEMO_ADD_FILE = Statement("""
    insert into pgdefer_demo.file (path, folder, bytes, lines, sha256, blake2b, ms)
    values (:path, :folder, :bytes, :lines, :sha256, :blake2b, :ms)
    on conflict (path) do nothing
""")

DEMO_ADD_TO_FOLDER = Statement("""
    insert into pgdefer_demo.folder as f (folder, files, bytes) values (:folder, 1, :bytes)
    on conflict (folder) do update set files = f.files + 1, bytes = f.bytes + excluded.bytes
""")

DEMO_LOCK = Statement("select pg_try_advisory_lock(1885824102, 100)")

DEMO_UNFINISHED = Statement("""
    select count(*) from queue.jobs
    where id > :after and queue = 'demo' and state not in ('succeeded', 'failed', 'cancelled')
""")

DEMO_STATES = Statement("""
    select task, state, count(*),
      percentile_cont(array[0.5, 0.99]) within group (
        order by extract(epoch from started_at - created_at))
    from queue.jobs where id > :after and queue = 'demo'
    group by task, state order by task, state
""")

DEMO_SPAN = Statement("""
    select count(*), extract(epoch from max(finished_at) - min(created_at))
    from queue.jobs where id > :after and queue = 'demo'
""")

DEMO_LARGEST = Statement("""
    select path, bytes, lines, ms from pgdefer_demo.file order by ms desc limit 10
""")

DEMO_FOLDERS = Statement("""
    select count(*), sum(files), sum(bytes) from pgdefer_demo.folder
""")

# Whether the transaction has an id: it gets one when it writes or locks rows.
MAY_HAVE_WRITTEN = Statement("select pg_current_xact_id_if_assigned() is not null")

# The first object on which the role lacks the rights for pg_dump, or pg_restore; NULL if none.
MAY_DUMP = Statement("""
    select min('table ' || n.nspname || '.' || c.relname)
    from pg_class c
    join pg_namespace n on n.oid = c.relnamespace
    where n.nspname = 'queue' and c.relkind in ('r', 'p')
      and not has_table_privilege(c.oid, 'select')
""")

MAY_RESTORE = Statement("""
    select case when not has_database_privilege(current_database(), 'create')
      then 'database ' || current_database() end
""")
