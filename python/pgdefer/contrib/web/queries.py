"""The statements of the pages: they read public views and functions.

Tests: contrib/test_web.py.
"""

from __future__ import annotations

# The lists have a row more than the pages show, which then say so.

# What changes with the rights of a role: each grant_access and revoke_access makes another version
# of the schema's row, because it grants or revokes the use of the schema.
RIGHTS = """
select (select xmin::text from pg_namespace where nspname = 'queue') as version,
  array(select oid::bigint from pg_roles where pg_has_role(oid, 'usage') order by oid) as roles
"""

HEALTH = "select name, status, detail, fix from queue.health()"

METRICS = """
select queue, paused = 1 as is_paused, ready, running, blocked, scheduled, waiting,
  upstream_failed, held, failed, round(oldest_ready_seconds) as oldest, succeeded_5m, failed_5m,
  cancelled_5m, workers
from queue.metrics order by running + ready desc, queue limit 501
"""

SERIES = """
select at, succeeded, failed, cancelled, failures,
  extract(epoch from wait_p50)::float8 as wait_p50,
  extract(epoch from wait_p95)::float8 as wait_p95,
  extract(epoch from run_p50)::float8 as run_p50,
  extract(epoch from run_p95)::float8 as run_p95
from queue.series(within => '6 hours', step => '5 minutes') order by at
"""

JOBS = """
select id, queue_name as queue, task_name as task, job_state as state, reason, priority, attempts,
  created_at, scheduled_at, started_at, finished_at, left(error, 1000) as error,
  left(description, 201) as description, left(excerpt, 200) as excerpt, next_id
from queue.search(pattern => %(pattern)s, queue => %(queue)s, state => %(state)s,
  max_bytes => %(max_bytes)s, by => %(by)s, task => %(task)s,
  before => %(before)s, max_jobs => %(n)s)
"""

# Which of these jobs have a time from one moment until another. is_older: the job was deferred so
# long before that no job below it was deferred in that time.
_FROM = "%(from)s::timestamp at time zone %(zone)s::text"
_TO = "%(to)s::timestamp at time zone %(zone)s::text"
_TIMES = ("created", "started", "finished", "scheduled")
JOBS_BY_TIME = {
    time: f"""
select s.*, to_char(s.{time}_at at time zone %(zone)s::text, 'YYYY-MM-DD HH24:MI:SS') as moment,
  coalesce(s.{time}_at >= coalesce({_FROM}, '-infinity')
    and s.{time}_at < coalesce({_TO}, 'infinity'), false) as is_found,
  coalesce(s.created_at < {_FROM} - interval '1 hour', false) as is_older
from ({JOBS.strip()}) s
order by s.id desc nulls last
"""  # noqa: S608 (composed of the constants above)
    for time in _TIMES
}

# The id from which on all jobs were deferred after a moment, found by halving: ids follow the time,
# but for transactions that stay open, which get an hour. NULL if nothing is known.
FIRST_AFTER = f"""
with recursive half (low, high) as (
  select 0::numeric, (select max(coalesce(s.id + 1, s.next_id))
    from queue.search(max_jobs => 1, max_bytes => 10000) s)
  union all
  select case when s.id is null then x.middle else h.low end, coalesce(s.id, h.high)
  from half h
  cross join lateral (select floor((h.low + h.high) / 2) as middle) x
  left join lateral (
    select s.id
    from queue.search(before => x.middle::bigint, max_jobs => 1, max_bytes => 10000) s
    where s.created_at > {_TO} + interval '1 hour') s on true
  where h.high - h.low > 50)
select nullif(min(high), max(high))::bigint as id from half
"""  # noqa: S608

JOB = """
select id, task, queue, state, reason, priority, lock, queueing_lock, concurrency_key, needs,
  parent, deadline, scheduled_at, expires_at, created_at, started_at, finished_at, attempts,
  failures, crashes, claim, worker_id, left(error, 5001) as error, percent::float8 as percent,
  left(message, 1001) as message,
  left(description, 2001) as description, left(jsonb_pretty(args), 10001) as args,
  left(jsonb_pretty(result), 10001) as result, left(jsonb_pretty(headers), 5001) as headers,
  left(jsonb_pretty(options), 5001) as options
from queue.jobs where id = %(id)s
"""

# The last ones, five of them with their tracebacks.
ATTEMPTS = """
select attempt, worker_id, started_at, finished_at, outcome, left(error, 501) as error,
  case when row_number() over (order by finished_at desc) <= 5
    then left(details ->> 'traceback', 5001) end as traceback
from queue.attempts where job_id = %(id)s order by finished_at desc limit 21
"""

# The last ones.
STEPS = """
select * from (
  select name, left(value::text, 301) as value, failures, left(error, 301) as error,
    finished_at, row_number() over (order by claim desc, finished_at desc) as n
  from queue.steps where job_id = %(id)s order by claim desc, finished_at desc limit 101) s
order by n desc
"""

WAITS = "select step, signal, event, until from queue.waits_for(%(id)s)"

STREAMS = "select stream, items as size, last_at from queue.streams(%(id)s) limit 101"

ONE_STREAM = """
select items as size from queue.streams(%(id)s) where stream = %(name)s
"""

STREAM = """
select no, emitted_at, left(value::text, 501) as value
from queue.read_stream(%(id)s, %(name)s, %(after)s) order by no limit 50
"""

GROUPS = """
select name, state, jobs, unfinished, succeeded, failed, cancelled, on_end_id, on_success_id,
  on_failure_id, left(error, 301) as error, opened_at, ended_at
from queue.groups order by ended_at desc nulls first, opened_at desc limit 501
"""

WHY = "select queue.why(%(id)s) as why"

# The last ones.
TIMELINE = """
select at, what from (
select * from (
  select created_at, 0, 'deferred' from queue.jobs where id = %(id)s
  union select scheduled_at, 1, 'scheduled' from queue.jobs where id = %(id)s
  union select started_at, 2, 'attempt ' || attempts || ' started' from queue.jobs
    where id = %(id)s and attempts > 0
  union select started_at, 2, 'attempt ' || attempt || ' started' from queue.attempts
    where job_id = %(id)s
  union select finished_at, 3, 'step ' || name || case when error is null then '' else ' failed' end
    from queue.steps where job_id = %(id)s
  union select finished_at, 4, 'attempt ' || attempt || ': ' || outcome from queue.attempts
    where job_id = %(id)s
  union select finished_at, 5, state from queue.jobs where id = %(id)s) x (at, n, what)
where at is not null order by at desc, n desc, what desc limit 301) x
order by at, n, what
"""

# The nearest 1,000 jobs.
GRAPH = """
select job_id, need_id, depth, task, state
from (select *, dense_rank() over (order by abs(depth), job_id) as n from queue.graph(%(id)s)) g
where n <= 1000 order by depth, job_id, need_id limit 5000
"""

AUDIT_OF_JOB = """
select at, role, login, call, left(args::text, 500) as args, left(before::text, 500) as before
from queue.audit where ids @> array[%(id)s::bigint] order by id desc limit 51
"""

# Without the two columns that count jobs, PostgreSQL counts none.
QUEUES = """
select name, max_running, rate_limit, rate_per, retain, paused_until
from queue.queues order by name limit 1001
"""

QUEUE_COUNTS = "select name, ready, running from queue.queues order by name limit 1001"

LOCKS = """
select lock, job_id, running, waiting, has_mutex from queue.locks
order by waiting desc, lock limit 501
"""

SEMAPHORES = """
select kind, key, "limit", used, ready, waiting from queue.semaphores
order by waiting desc, used desc, kind, key limit 501
"""

SHARES = """
select queue, priority, share, weight, waiting, started from queue.shares
order by waiting desc, started desc, queue, share limit 501
"""

SCHEDULES = """
select name, cron, timezone, task, enabled, next_run_at, last_run_at, last_job_id, reason,
  left(args::text, 500) as args, source
from queue.schedules order by name limit 501
"""

NEXT_RUNS = """
select run_at as utc, run_at at time zone timezone as local,
  case when shift >= '0' then '+' else '' end || left(shift::text, -3) as shift,
  shift <> lag(shift) over (order by run_at) as is_changed
from (
  select n.run_at, s.timezone,
    (n.run_at at time zone s.timezone) - (n.run_at at time zone 'UTC') as shift
  from queue.schedules s, queue.next_runs(s.cron, s.timezone) as n (run_at)
  where s.name = %(name)s) n
order by run_at
"""

SCHEDULE = """
select name, cron, timezone, task, enabled, next_run_at, last_run_at, last_job_id, reason,
  left(jsonb_pretty(args), 20001) as args, left(jsonb_pretty(options), 20001) as options,
  catch_up, overlap, max_delay, source, created_at, changed_at
from queue.schedules where name = %(name)s
"""

RUNS = """
select run_at, job_id, skipped, left(detail, 500) as detail, manual from queue.schedule_runs
where name = %(name)s order by run_at desc limit 51
"""

WORKERS = """
select id, name, array_to_string(queues, ', ') as queues, registered_at, last_seen_at, dead_after,
  is_alive, running, pg_size_pretty(memory) as memory, left(info::text, 500) as info
from queue.workers order by is_alive desc, running desc, id limit 501
"""

RUNNING = """
select worker_id, id, task, started_at from queue.jobs where claim is not null
order by started_at limit 500
"""

TASKS = """
select name, left(defaults::text, 2000) as defaults,
  left(array_to_string(paused_in, ', '), 2000) as paused_in
from queue.tasks order by name limit 1001
"""

TASK_STATS = """
select task, succeeded, failed, cancelled, failures, failure_rate::float8 as failure_rate,
  extract(epoch from wait_p50)::float8 as wait_p50,
  extract(epoch from wait_p95)::float8 as wait_p95,
  extract(epoch from run_p50)::float8 as run_p50,
  extract(epoch from run_p95)::float8 as run_p95
from queue.task_stats(within => '1 day')
order by succeeded + failed + cancelled + failures desc, task limit 501
"""

AUDIT = """
select id, at, role, login, call, left(args::text, 500) as args, cardinality(ids) as jobs,
  ids[1:5] as ids, array_to_string(queues, ', ') as queues, left(before::text, 500) as before
from queue.audit
where (%(before)s::bigint is null or id < %(before)s)
  and (%(role)s::text is null or role = %(role)s)
  and (%(call)s::text is null or call = %(call)s)
order by id desc limit 51
"""

STATES_OF = """
select state, queue, count(*) as jobs from queue.jobs where id = any (%(ids)s::bigint[])
group by state, queue order by jobs desc, state, queue limit 50
"""
