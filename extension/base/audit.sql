-- The audit: a call by which an operator changes something leaves one row in queue.audit_log, in the
-- transaction of the call. A call that raises leaves none, as it has changed nothing.
--
-- There are four kinds of functions:
-- * Functions that only operators or the owner may call write a row each time they return: also if they
--   refused all ids, or had nothing to change, as when a held job is held. The row says what was before.
--   There are two exceptions: next if it finds no job, and configure if it sets nothing.
-- * Functions that programs call as they start (schedule, unschedule, register_task) write a row if they
--   change something, whatever the caller's role.
-- * Functions that workers call too (succeed, fail, release, retry_later, extend, tick, reap) write a row if
--   the caller may not report outcomes, and so is not a worker (macro if_operator).
-- * Functions that programs of all kinds call (signal, publish) write a row if the caller may operate and is
--   not a worker (_is_operator).
--
-- Locks: none for which another session waits. Rows are only appended, and only their number is unique.
-- Why no wake-up is lost: nobody waits for the audit.

-- Appends the row. p_args: the call's arguments without the ids; NULLs are omitted.
create or replace function queue._audit(p_call text, p_args jsonb, p_queues text[] default null,
  p_before jsonb default null, p_ids bigint[] default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  insert into queue.audit_log (role, call, args, ids, queues, before)
  values (queue._caller(), p_call,
    (select coalesce(jsonb_object_agg(e.key, e.value), '{}') from jsonb_each(p_args) e
     where e.value <> 'null'),
    p_ids, p_queues, p_before);
end $$;

-- Appends the row of a call that changed these jobs. p_before: the result of _jobs_before. Jobs that were
-- alike share one entry, which has their ids unless it applies to all jobs. p_queue: another queue that the
-- call affected.
create or replace function queue._audit_jobs(p_call text, p_args jsonb, p_ids bigint[], p_before jsonb,
  p_queue text default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_before jsonb;
  v_queues text[];
begin
  select jsonb_agg(g.job || case when cardinality(g.ids) < cardinality(p_ids)
      then jsonb_build_object('ids', g.ids) else '{}' end order by g.ids[1])
  into v_before
  from (
    select b.job - 'id' as job, array_agg(b.id order by b.id) as ids
    from (select e.job, (e.job ->> 'id')::bigint as id from jsonb_array_elements(p_before) e (job)) b
    where b.id in (select unnest(p_ids)) group by 1) g;
  v_queues := array(select distinct e.job ->> 'queue' from jsonb_array_elements(v_before) e (job)
    union select p_queue where p_queue is not null);
  perform queue._audit(p_call, p_args, v_queues, v_before, p_ids);
end $$;

-- Jobs as they are now: state and queue, and more columns of queue.jobs. Nothing in args is cut.
-- Locks: none; the caller holds locks under which the jobs can't change.
create or replace function queue._jobs_before(p_ids bigint[], variadic p_columns text[] default '{}')
returns jsonb language plpgsql volatile parallel unsafe security invoker as $$
begin
  return (
    select jsonb_agg(jsonb_build_object('id', j.id, 'state', j.state, 'queue', j.queue)
      || case when p_columns = '{}' then '{}' else (
        select jsonb_object_agg(c, case c when 'priority' then to_jsonb(j.priority)
          when 'deadline' then to_jsonb(j.deadline) when 'scheduled_at' then to_jsonb(j.scheduled_at)
          when 'lock' then to_jsonb(j.lock) when 'task' then to_jsonb(j.task)
          when 'args' then (select n.args from queue.job_now n where n.id = j.id) end)
        from unnest(p_columns) c) end)
    from (select distinct i.id from unnest(p_ids) i (id)) u
    cross join lateral (
      select j.id, j.state, j.queue, j.priority, j.deadline, j.scheduled_at, j.lock, j.task
      from queue.all_jobs j where j.id = u.id offset 0) j);
end $$;

-- Appends the row of a call that ended or extended a claim.
create or replace function queue._audit_claim(p_call text, p_id bigint, p_claim bigint,
  p_args jsonb default '{}')
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._audit_jobs(p_call, p_args || jsonb_build_object('claim', p_claim), array[p_id],
    (select jsonb_build_array(jsonb_build_object('id', j.id, 'state', 'running', 'queue', j.queue))
     from queue.all_jobs j where j.id = p_id));
end $$;

-- The pauses that a call may end or replace, in the order in which they were set; NULL if there are none.
create or replace function queue._pauses_before(p_queue text, p_task text)
returns jsonb language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select jsonb_agg(jsonb_strip_nulls(jsonb_build_object('queue', p.queue, 'task', p.task, 'paused',
      p.is_paused, 'until', p.until)) order by p.no)
    from queue.pause p
    where (p_task is null or p.task is not distinct from p_task)
      and (p_queue is null or p.queue is null or queue._matches(p.queue, p_queue)
        or queue._matches(p_queue, p.queue)));
end $$;

-- A schedule as the audit records it; NULL if there is none.
create or replace function queue._schedule_before(p_name text)
returns jsonb language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select jsonb_build_object('cron', s.cron, 'task', s.task, 'args', s.args, 'timezone', s.timezone,
      'options', s.options, 'enabled', s.is_enabled)
    from queue.schedule s where s.name = p_name);
end $$;

-- The grants of a role by grant_access: the queues of each kind, null for all; NULL if there are no grants.
create or replace function queue._access_before(p_role text)
returns jsonb language plpgsql stable parallel safe security invoker as $$
begin
  return (select jsonb_object_agg(a.kind, a.queues) from queue.access a where a.role = p_role);
end $$;

-- A queue's settings, and the pauses that apply to it.
create or replace function queue._queue_before(p_name text)
returns jsonb language plpgsql stable parallel safe security invoker as $$
begin
  return jsonb_strip_nulls(jsonb_build_object('pauses', queue._pauses_before(p_name, null)))
    || coalesce((
      select jsonb_strip_nulls(jsonb_build_object('max_running', c.max_running, 'rate_limit', c.rate_limit,
        'rate_per', c.rate_per, 'retain', c.retain))
      from queue.queue_config c where c.queue = p_name), '{}');
end $$;

-- Removes rows that are older than p_older_than. Only the owner may do this: others could hide their own
-- calls.
-- Locks: the rows, by skip locked. Raises: 22023 without an age, 42501.
create or replace function queue._prune_audit(p_max_rows integer, p_older_than interval)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_removed integer;
begin
  if not pg_has_role(queue._caller(), current_user, 'usage') then
    raise exception using errcode = '42501', message = 'only the owner may prune the audit',
      detail = 'role: ' || queue._caller(), hint = 'Have the owner of the queue call it.';
  elsif p_older_than is null then
    perform queue._invalid('the audit is pruned by age only', 'Pass older_than, an interval.');
  end if;
  delete from queue.audit_log a where a.id = any (array(
    select l.id from queue.audit_log l where l.at <= clock_timestamp() - p_older_than
    order by l.at limit p_max_rows for update skip locked));
  get diagnostics v_removed = row_count;
  return v_removed;
end $$;

-- Whether the caller may operate, and is not a worker.
create or replace function queue._is_operator()
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return has_function_privilege(queue._caller(), 'queue.cancel(bigint, boolean)'::regprocedure, 'execute')
    and not has_function_privilege(queue._caller(), 'queue.finish_many(jsonb)'::regprocedure, 'execute');
end $$;
