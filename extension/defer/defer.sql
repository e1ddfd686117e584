-- Deferring: it only appends to the log. Decisions that need agreement are made after the commit
-- (admit/admission.sql). extension/macros names the bits of flags.

-- Locks: the row of its idempotency key, then that of its queueing lock. It takes no other lock that anybody
-- waits for: the sleep lock (work/worker_sleep.sql) is shared and by try; with needs come those of
-- _check_needs, in a group that of _join_open_group.
-- For speed it has no search_path of its own, so it qualifies every name and operator; _defer_any has one.
-- Raises: 22023, QJ001 (a need or parent that isn't visible), QJ004.
create or replace function queue.defer(
  task text, args jsonb default '{}', queue text default null, priority integer default null,
  lock text default null, queueing_lock text default null, scheduled_at timestamptz default null,
  deadline timestamptz default null, needs bigint[] default null,
  concurrency_key text default null, concurrency_limit integer default null, options jsonb default null)
returns bigint language plpgsql volatile parallel unsafe security definer as $$
declare
  v_id bigint;
  v_is_awake boolean;
  v_none pg_catalog.regclass;  -- stays NULL: see _unrestricted
begin
  -- The common case takes one statement and few functions, because each is set up again in every transaction.
  -- It is a call with only a task and small args, without restricted roles, for a task that is registered
  -- with at most a queue and a priority.
  if coalesce(v_none, queue._unrestricted()) is not null
    and pg_catalog.num_nonnulls(defer.queue, defer.priority, defer.lock, defer.queueing_lock,
      defer.scheduled_at, defer.deadline, defer.needs, defer.concurrency_key, defer.concurrency_limit,
      defer.options) operator(pg_catalog.=) 0
  then
    if pg_catalog.jsonb_contains(defer.args, '{}')
      and pg_catalog.pg_column_size(defer.args) operator(pg_catalog.<) 2000
      and pg_catalog.octet_length(cast(defer.args as pg_catalog.text)) operator(pg_catalog.<=) 2000
    then
      insert into queue.log (task, args, job_options)
      select t.name, defer.args, t.job_options from queue.task t
      where t.name operator(pg_catalog.=) defer.task and t.is_plain
      returning id, pg_catalog.pg_try_advisory_xact_lock_shared({{sleep_lock}}) into v_id, v_is_awake;
      if v_is_awake then
        return v_id;
      end if;
    end if;
  end if;
  if v_id is not null then
    perform queue._wake();
    return v_id;
  end if;
  return queue._defer_any(defer.task, defer.args, defer.queue, defer.priority, defer.lock,
    defer.queueing_lock, defer.scheduled_at, defer.deadline, defer.needs, defer.concurrency_key,
    defer.concurrency_limit, defer.options);
end $$;
comment on function queue.defer(text, jsonb, text, integer, text, text, timestamptz, timestamptz, bigint[],
  text, integer, jsonb) is
  'Defers a job and returns its id. Workers see it if and only if the transaction commits. For NULL the'
    ' task''s registered default applies, else the system''s (queue default, priority 0); empty text means'
    ' none. lock, queueing_lock and concurrency_key may contain {field}, filled from args; {{ and }} are'
    ' braces.';

-- All or nothing. A plain job (task, args, queue, priority) costs about 3 us.
-- Locks and errors: as defer.
create or replace function queue.defer_many(jobs jsonb)
returns setof bigint language plpgsql volatile parallel unsafe security definer rows 1000
set search_path = pg_catalog, pg_temp as $$
declare
  v_jobs jsonb;
  v_job jsonb;
begin
  {{installed}}
  if jsonb_typeof(defer_many.jobs) is distinct from 'array' then
    perform queue._invalid('jobs must be a JSON array', 'Pass [{"task": text, "args": object, ...}, ...].');
  end if;
  if to_regclass('queue.unrestricted') is not null and not exists (
    select from jsonb_array_elements(defer_many.jobs) e
    where jsonb_typeof(e) <> 'object' or e - '{task,args,queue,priority}'::text[] <> '{}'
      or jsonb_typeof(e -> 'task') is distinct from 'string'
      or coalesce(jsonb_typeof(e -> 'args'), 'object') <> 'object'
      or coalesce(jsonb_typeof(e -> 'queue'), 'string') <> 'string'
      or coalesce(jsonb_typeof(e -> 'priority'), 'number') <> 'number'
      or length(e ->> 'priority') > 9 or strpos(e ->> 'priority', '.') > 0
      or pg_column_size(e) >= 4000 or octet_length(e ->> 'args') > 2000)
    and not exists (
      select from (select distinct e ->> 'task' as task from jsonb_array_elements(defer_many.jobs) e) e
      left join queue.task t on t.name = e.task
      where not t.is_plain or e.task = '' or octet_length(e.task) > 1000)
    and not exists (
      select from (select distinct e ->> 'queue' as queue from jsonb_array_elements(defer_many.jobs) e) e
      where octet_length(e.queue) > 1000 or right(e.queue, 1) = '*')
  then
    return query
      with appended as (
        insert into queue.log (task, args, job_options)
        select j.task, coalesce(j.args, '{}'),
          case when num_nonnulls(j.queue, j.priority) = 0 then t.job_options
               else row(nullif(coalesce(j.queue, t.queue), ''), coalesce(j.priority, t.priority), null, null,
                 null, null, null, null, null, null, null, null)::queue.job_options end
        from rows from (jsonb_to_recordset(defer_many.jobs) as (task text, args jsonb, queue text,
          priority integer))
          with ordinality j (task, args, queue, priority, n)
        left join queue.task t on t.name = j.task
        order by j.n
        returning id)
      select a.id from appended a;
  else
    v_jobs := queue._nested_jobs(defer_many.jobs);
    perform queue._reserve_idempotency_keys(v_jobs);
    for v_job in select jsonb_array_elements(v_jobs) loop
      return next queue._defer_json(v_job);
    end loop;
  end if;
  perform queue._announce();
end $$;
comment on function queue.defer_many(jsonb) is
  'Defers an array of jobs, each an object with the names of defer''s arguments; options may also stand'
    ' beside them: {"task": "t", "delay": "5 minutes"}. Returns the ids in input order. Defers all jobs or'
    ' none.';

-- defer with any arguments. The first statement serves calls with only args, a queue and a priority, if the
-- task is not registered, or only with a queue and a priority.
-- Locks and errors: as defer.
create or replace function queue._defer_any(
  p_task text, p_args jsonb, p_queue text, p_priority integer, p_lock text, p_queueing_lock text,
  p_scheduled_at timestamptz,
  p_deadline timestamptz, p_needs bigint[], p_concurrency_key text, p_concurrency_limit integer,
  p_options jsonb)
returns bigint language plpgsql volatile parallel unsafe security invoker
set search_path = pg_catalog, pg_temp as $$
declare
  v_id bigint;
  v_is_awake boolean;
  v_none regclass;  -- stays NULL: see _unrestricted
begin
  if num_nonnulls(p_lock, p_queueing_lock, p_scheduled_at, p_deadline, p_needs, p_concurrency_key,
    p_concurrency_limit, p_options) = 0 then
    if coalesce(v_none, queue._unrestricted()) is not null and p_args @> '{}'
      and (right(p_queue, 1) = '*' or octet_length(p_queue) > 1000) is not true
      and pg_column_size(p_args) < 2000 and octet_length(p_args::text) <= 2000 then
      insert into queue.log (task, args, job_options)
      select p_task, p_args,
        case when num_nonnulls(p_queue, p_priority) = 0 then t.job_options
             else row(nullif(coalesce(p_queue, t.queue), ''), coalesce(p_priority, t.priority), null, null,
               null, null, null, null, null, null, null, null)::queue.job_options end
      from (select) one left join queue.task t on t.name = p_task
      where coalesce(t.is_plain, p_task <> '' and octet_length(p_task) <= 1000)
      returning id, pg_try_advisory_xact_lock_shared({{sleep_lock}}) into v_id, v_is_awake;
    end if;
  end if;
  if v_id is null then
    v_id := queue._defer_checked(p_task, coalesce(p_args, '{}'), p_queue, p_priority, p_lock, p_queueing_lock,
      p_scheduled_at, p_deadline, p_needs, p_concurrency_key, p_concurrency_limit, p_options);
    v_is_awake := pg_try_advisory_xact_lock_shared({{sleep_lock}});
  end if;
  if not v_is_awake then
    perform queue._wake();
  end if;
  return v_id;
end $$;
