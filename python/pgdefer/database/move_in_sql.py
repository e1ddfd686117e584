"""Moving in the jobs of other queues: the statements find their tables by the search path.

Tests: integration/test_move_in.py, integration/test_move_in_defaults.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from psycopg.errors import UndefinedTable

from pgdefer.database.sql import Statement
from pgdefer.errors import PgDeferError, sqlstate_of

__all__ = ["BELOW_ALL", "UNCHANGED", "tables_of"]

# A number below the ids of all rows, which may be negative.
BELOW_ALL = -(2**63)
# Options that keep a task's defaults from dropping what is moved, or from putting it off.
UNCHANGED: dict[str, Any] = {"idempotency_key": "", "group": "", "held": False, "on_limit": "block"}


@contextlib.contextmanager
def tables_of(queue: str) -> Iterator[None]:
    """Let the error of a missing table say whose it is: by itself it says that of this queue."""
    try:
        yield
    except Exception as error:
        if sqlstate_of(error) != UndefinedTable.sqlstate:
            raise
        said = str(error).partition("\n")[0]
        raise PgDeferError(
            f"the tables of {queue} are not here: {said}",
            hint="Name the database that has them; a schema of its own must be in the search_path.",
        ) from error


# The other queue's producers and workers wait from this statement to the end of the transaction.
PROCRASTINATE_LOCK = Statement("lock table procrastinate_jobs in share row exclusive mode")

# Its waiting jobs. Jobs behind a running job of the same lock stay there, because they would run
# beside it.
_PROCRASTINATE = """
    from procrastinate_jobs j
    where j.status = 'todo' and j.id > cast(:after as bigint)
      and not exists (
        select from procrastinate_jobs d where d.status = 'doing' and d.lock = j.lock)
"""

PROCRASTINATE_NEXT = Statement(f"select min(j.id) as id {_PROCRASTINATE}")

# Moves some of them, in the order of their ids. A job whose time never comes, such as infinity, is
# held. With -infinity it runs at once.
PROCRASTINATE = Statement(f"""
    with picked as materialized (
      select j.*, coalesce(j.scheduled_at >= '10000-01-01 UTC', false) as is_never,
        case when j.scheduled_at >= '0001-01-03 UTC' and j.scheduled_at < '10000-01-01 UTC'
          then j.scheduled_at end as at
      {_PROCRASTINATE} order by j.id limit cast(:most as bigint)),
    made as materialized (
      select * from queue.defer_many((
        select coalesce(jsonb_agg(jsonb_strip_nulls(jsonb_build_object(
            'task', p.task_name, 'queue', p.queue_name, 'priority', p.priority,
            'lock', coalesce(replace(replace(p.lock, '{{', '{{{{'), '}}', '}}}}'), ''),
            'queueing_lock',
            coalesce(replace(replace(p.queueing_lock, '{{', '{{{{'), '}}', '}}}}'), ''),
            'scheduled_at', p.at,
            'options', cast(cast(:options as text) as jsonb) || jsonb_build_object(
              'on_conflict', 'ignore', 'held', p.is_never,
              'delay', case when p.at is null then 0 end,
              'headers', jsonb_build_object('procrastinate',
                jsonb_build_object('id', p.id, 'attempts', p.attempts)))))
          || jsonb_build_object('args', p.args) order by p.id), '[]')
        from picked p))),
    ended as (
      update procrastinate_jobs j set status = 'cancelled' from picked p where j.id = p.id)
    select (select count(*) from picked) as found, (select max(p.id) from picked p) as last,
      (select count(*) from made) as made,
      (select count(*) from picked p where p.lock is not null) as locked,
      (select count(*) from picked p where p.scheduled_at > now()) as scheduled
""")

PROCRASTINATE_LEFT = Statement("""
    select count(*) filter (where status = 'todo') as behind,
      count(*) filter (where status = 'doing') as running
    from procrastinate_jobs where status in ('todo', 'doing')
""")

# Of a table `tasks` as in the article "A minimal task queue", without a status for what is moved.
TASKS_LOCK = Statement("lock table tasks in share row exclusive mode")

TASKS_LACKS = Statement("""
    select string_agg(c.wanted, ', ' order by c.no) as columns
    from unnest(array['id bigint not null', 'task_type', 'payload', 'status', 'priority', 'retries',
        'max_retries', 'finished_at', 'error']) with ordinality c (wanted, no)
    where not exists (
      select from pg_catalog.pg_attribute a
      where a.attrelid = cast('tasks' as regclass) and a.attname = split_part(c.wanted, ' ', 1)
        and (a.attname <> 'id'
          or a.attnotnull and cast(a.atttypid as regtype) in ('smallint', 'integer', 'bigint')))
""")

TASKS_NEXT = Statement("""
    select min(id) as id from tasks where status = 'pending' and id > cast(:after as bigint)
""")

TASKS = Statement("""
    with picked as materialized (
      select t.* from tasks t
      where t.status = 'pending' and t.id > cast(:after as bigint)
      order by t.id limit cast(:most as bigint)),
    made as materialized (
      select * from queue.defer_many((
        select coalesce(jsonb_agg(jsonb_build_object(
            'task', p.task_type, 'args', p.payload, 'priority', p.priority, 'queueing_lock', '',
            'options', cast(cast(:options as text) as jsonb) || jsonb_build_object(
              'delay', 0,
              'retry', jsonb_build_object('max_attempts',
                least(greatest(cast(p.max_retries as bigint) - p.retries, 1), 999999999)),
              'headers', jsonb_build_object('tasks',
                jsonb_build_object('id', p.id, 'retries', p.retries)))) order by p.id), '[]')
        from picked p))),
    ended as (
      update tasks t set status = 'done', finished_at = now(), error = 'moved to pgdefer'
      from picked p where t.id = p.id)
    select (select count(*) from picked) as found, (select max(p.id) from picked p) as last,
      (select count(*) from made) as made, 0 as locked, 0 as scheduled
""")

TASKS_LEFT = Statement("""
    select 0 as behind, count(*) as running from tasks where status = 'running'
""")

# Of django-tasks-db: its positional arguments have names only in the project's code.
DJANGO_LOCK = Statement("""
    lock table django_tasks_database_dbtaskresult in share row exclusive mode
""")

DJANGO = Statement("""
    select cast(id as text) as id, task_path, cast(args_kwargs as text) as args_kwargs, priority,
      queue_name, case when run_after < '9000-01-01' then run_after end as run_after,
      coalesce(run_after between now() and '9000-01-01', false) as is_scheduled
    from django_tasks_database_dbtaskresult
    where status = 'READY' order by enqueued_at, id limit 1000
""")

DJANGO_END = Statement("""
    update django_tasks_database_dbtaskresult t
    set status = 'FAILED', finished_at = now(), traceback = 'moved to pgdefer as job ' || j.job
    from unnest(cast(:ids as uuid[]), cast(:jobs as bigint[])) j (id, job)
    where t.id = j.id
    returning t.id
""")

DJANGO_LEFT = Statement("""
    select count(*) as running from django_tasks_database_dbtaskresult where status = 'RUNNING'
""")

# Of Solid Queue, and of Steady Queue, which has its tables under other names.
_SOLID = {
    "jobs": "solid_queue_jobs",
    "ready": "solid_queue_ready_executions",
    "scheduled": "solid_queue_scheduled_executions",
    "blocked": "solid_queue_blocked_executions",
    "claimed": "solid_queue_claimed_executions",
    "failed": "solid_queue_failed_executions",
    "semaphores": "solid_queue_semaphores",
    "recurring": "solid_queue_recurring_tasks",
    "pauses": "solid_queue_pauses",
}
_STEADY = {
    "jobs": "steady_queue_job",
    "ready": "steady_queue_readyexecution",
    "scheduled": "steady_queue_scheduledexecution",
    "blocked": "steady_queue_blockedexecution",
    "claimed": "steady_queue_claimedexecution",
    "failed": "steady_queue_failedexecution",
    "semaphores": "steady_queue_semaphore",
    "recurring": "steady_queue_recurringtask",
    "pauses": "steady_queue_pause",
}


def _of_both(text: str) -> tuple[Statement, Statement]:
    return Statement(text.format(**_SOLID)), Statement(text.format(**_STEADY))


# In the order in which their transactions lock these tables first. Those that select rows of an
# execution for update must wait for this lock, not for the rows.
SOLID_LOCK, STEADY_LOCK = _of_both("lock table {jobs} in share row exclusive mode")
SOLID_LOCK_MORE, STEADY_LOCK_MORE = _of_both(
    "lock table {scheduled}, {blocked}, {semaphores}, {ready} in exclusive mode"
)
SOLID_LOCK_CLAIMED, STEADY_LOCK_CLAIMED = _of_both("lock table {claimed} in share mode")

# Rails keeps times in UTC without saying so.
SOLID_TIMES = Statement("set local timezone to 'UTC'")

# The concurrency keys of its unfinished jobs. A semaphore counts the free slots, and ready jobs
# have theirs already. Jobs stay behind a running job of the same key, and behind those of a batch.
SOLID_KEYS, STEADY_KEYS = _of_both("""
    select j.concurrency_key as key,
      bool_or(c.job_id is not null or to_jsonb(j) ->> 'batch_id' is not null) as is_held,
      max(m.value) + count(r.job_id) as slots
    from {jobs} j
    left join {claimed} c on c.job_id = j.id
    left join {ready} r on r.job_id = j.id
    left join {semaphores} m on m.key = j.concurrency_key
    where j.finished_at is null and j.concurrency_key is not null
    group by j.concurrency_key
""")

SOLID, STEADY = _of_both("""
    select j.id, j.class_name, cast(j.arguments as text) as arguments, j.queue_name, j.priority,
      cast(s.scheduled_at as timestamptz) as scheduled_at, j.concurrency_key,
      coalesce(cast(s.scheduled_at as timestamptz) > now(), false) as is_scheduled
    from {jobs} j left join {scheduled} s on s.job_id = j.id
    where j.id > cast(:after as bigint) and j.finished_at is null
      and (s.job_id is not null or exists (select from {ready} r where r.job_id = j.id)
        or exists (select from {blocked} b where b.job_id = j.id))
      and to_jsonb(j) ->> 'batch_id' is null
      and (j.concurrency_key is null or j.concurrency_key <> all (cast(:held as text[])))
    order by j.id limit 1000
""")

# Marks them as if they had run: what their schedules have recorded about them must stay.
SOLID_END, STEADY_END = _of_both("""
    with ready as (delete from {ready} r where r.job_id = any (cast(:ids as bigint[]))),
    scheduled as (delete from {scheduled} s where s.job_id = any (cast(:ids as bigint[]))),
    blocked as (delete from {blocked} b where b.job_id = any (cast(:ids as bigint[])))
    update {jobs} j set finished_at = now(), updated_at = now()
    where j.id = any (cast(:ids as bigint[])) returning j.id
""")

# The slots of the jobs that were ready there.
SOLID_SLOTS, STEADY_SLOTS = _of_both(
    "delete from {semaphores} m where m.key = any (cast(:keys as text[])) returning m.key"
)

SOLID_LEFT, STEADY_LEFT = _of_both("""
    select (select count(*) from {ready}) + (select count(*) from {scheduled})
        + (select count(*) from {blocked}) as behind,
      (select count(*) from {claimed}) as running, (select count(*) from {failed}) as failed,
      (select count(*) from {recurring}) as recurring, (select count(*) from {pauses}) as paused
""")
