"""Every statement that this package sends: calls of the functions and views of schema `queue`.

Parameters are written `:name`, as SQLAlchemy's `text` wants them; `.psycopg` has psycopg's form.
"""

from __future__ import annotations

import functools
import re

__all__ = ["Statement"]


class Statement:
    """One statement, in the forms that the drivers want."""

    def __init__(self, text: str) -> None:
        self.text = " ".join(text.split())

    @functools.cached_property
    def psycopg(self) -> bytes:
        """The statement with %(name)s for its parameters."""
        return re.sub(r"(?<!:):(\w+)", r"%(\1)s", self.text).encode()


# Deferring

REGISTER_TASKS = Statement("""
    select queue.register_task(t.name, t.defaults)
    from jsonb_to_recordset(cast(cast(:tasks as text) as jsonb)) as t (name text, defaults jsonb)
""")

# Texts are cast twice: drivers that look up the parameters' types then take them as texts.
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

DEFER_PLAIN = Statement("""
    select * from queue.defer(
      task => cast(:task as text), args => cast(cast(:args as text) as jsonb))
""")

DEFER_MANY = Statement("select * from queue.defer_many(cast(cast(:jobs as text) as jsonb))")

# Recurring runs

SCHEDULE = Statement("""
    select queue.schedule(s.name, s.cron, s.task, s.args, s.timezone, s.options)
    from jsonb_to_recordset(cast(cast(:schedules as text) as jsonb))
      as s (name text, cron text, task text, args jsonb, timezone text, options jsonb)
""")

SCHEDULES_OF = Statement("""
    select name from queue.schedules where source = cast(:source as text)
""")

UNSCHEDULE = Statement("select * from queue.unschedule(cast(:name as text))")

# Working

REGISTER_WORKER = Statement("""
    select * from queue.register_worker(
      cast(:name as text), cast(:queues as text[]), cast(:info as jsonb))
""")

_CLAIM = """
    id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, timeout,
    headers, parent
"""

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

HEARTBEAT = Statement("select id, claim, reason from queue.heartbeat(cast(:worker as bigint))")

DEREGISTER_WORKER = Statement("select * from queue.deregister_worker(cast(:worker as bigint))")

BEFORE_SLEEP = Statement("""
    select may_sleep, wait_for, channels
    from queue.before_sleep(cast(:worker as bigint), cast(:queues as text[]))
""")

AFTER_SLEEP = Statement("select queue.after_sleep(cast(:worker as bigint))")

TICK = Statement("select from queue.tick()")

CLAIMS = Statement("""
    select id, claim from queue.jobs
    where worker_id = cast(:worker as bigint) and state = 'running'
""")

# Installing

VERSION = Statement("select code, tables from queue.version()")

HAS_EXTENSION = Statement("""
    select exists (select from pg_available_extensions where name = 'pgdefer') as available,
      exists (select from pg_extension where extname = 'pgdefer') as created
""")

CREATE_EXTENSION = Statement("create extension if not exists pgdefer")

UPDATE_EXTENSION = Statement("alter extension pgdefer update")

INSTALL = Statement("select * from queue.install()")

MIGRATE = Statement("select * from queue.migrate()")


def listen(channel: str) -> Statement:
    """Return LISTEN, the one command that is no call of a function."""
    return Statement('listen "{}"'.format(channel.replace('"', '""')))


# The demo's own tables, and what it shows

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
    where id > :after and state not in ('succeeded', 'failed', 'cancelled')
""")

DEMO_LAST_ID = Statement("select coalesce(max(id), 0) from queue.jobs")

DEMO_STATES = Statement("""
    select task, state, count(*),
      percentile_cont(array[0.5, 0.99]) within group (
        order by extract(epoch from started_at - created_at))
    from queue.jobs where id > :after group by task, state order by task, state
""")

DEMO_SPAN = Statement("""
    select count(*), extract(epoch from max(finished_at) - min(created_at))
    from queue.jobs where id > :after
""")

DEMO_LARGEST = Statement("""
    select path, bytes, lines, ms from pgdefer_demo.file order by ms desc limit 10
""")

DEMO_FOLDERS = Statement("""
    select count(*), sum(files), sum(bytes) from pgdefer_demo.folder
""")
