-- Results: the outcome of a job, and waiting for it. succeed stores a result (work/finish.sql); it is kept as
-- long as its job (work/retention.sql).
--
-- A waiting client appends a row to queue.awaited and raises queue.awaited_seq to the job's id. A session
-- that ends a job looks for such rows only if the job's id is at most the sequence's last value. So an end
-- that nobody waits for costs only that read. Neither session waits for the other. Two kinds of ends may be
-- missed: one that is in progress while the row is appended, and one for which a second client raises the
-- sequence at the same time. Polling covers them.

-- Raises: QJ001.
create or replace function queue.result(id bigint)
returns table (state text, result jsonb, error text)
language plpgsql stable parallel safe security definer rows 1
set search_path = pg_catalog, pg_temp {{planner}} as $$
begin
  {{if_restricted}}
    perform queue._require_jobs('{producer,worker,operator,reader}', array[result.id]);
  end if;
  return query select j.state, j.result, j.error from queue.all_jobs j where j.id = result.id;
  if not found then
    perform queue._job_not_found(result.id);
  end if;
end $$;
comment on function queue.result(bigint) is
  'Returns the job''s state and, once it has finished, its result or error. error: the last one, also'
    ' while the job waits for a retry.';

-- Raises: QJ001.
create or replace function queue.needs(id bigint)
returns table (need_id bigint, task text, state text, result jsonb, error text)
language plpgsql stable parallel safe security definer rows 5
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_allowed text[];
begin
  {{if_restricted}}
    perform queue._require_jobs('{worker,operator,reader}', array[needs.id]);
    v_allowed := queue._allowed_queues('{worker,operator,reader}');
  end if;
  if not exists (select from queue.job j where j.id = needs.id) then
    perform queue._job_not_found(needs.id);
  end if;
  return query
    select d.id,
      j.task, case when j.id is null then 'deleted' when j.is_seen then j.state end, j.result, j.error
    from queue._direct_needs(needs.id) d
    left join lateral (
      select j.id, x.is_seen, j.state, case when x.is_seen then j.task end
        as task, case when x.is_seen then j.result end as result,
        case when x.is_seen then j.error end as error
      from queue.all_jobs j cross join lateral (select queue._allows(v_allowed, j.queue) as is_seen) x
      where j.id = d.id offset 0) j on true
    order by d.id;
end $$;
comment on function queue.needs(bigint) is
  'Returns the needs of a job, by id, with their tasks, states, results and last errors, for handlers'
    ' that depend on them. State deleted: deleted by force. For jobs in queues that the caller may not use,'
    ' it returns only the ids.';

-- Locks: none. Raises: QJ001.
create or replace function queue.await_result(id bigint)
returns table (state text, result jsonb, error text, channel text, wait_for interval)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_now timestamptz := clock_timestamp();
  v_since timestamptz;
begin
  {{installed}}
  select r.state, r.result, r.error into state, result, error from queue.result(await_result.id) r;
  if not state in ('succeeded', 'failed', 'cancelled') then
    select min(a.since) into v_since from queue.awaited a where a.id = await_result.id;
    if v_since is null then
      insert into queue.awaited (id, since) values (await_result.id, v_now);
    end if;
    if await_result.id > (select s.last_value from queue.awaited_seq s) then
      perform setval('queue.awaited_seq', await_result.id);
    end if;
    -- Often at first, because an end may be in progress.
    wait_for := least(greatest(v_now - coalesce(v_since, v_now), interval '20 ms'), interval '5 s');
    if not queue._may_notify() then
      wait_for := least(wait_for, interval '1 s');
    else
      channel := 'pgdefer_result_' || await_result.id;
    end if;
  end if;
  return next;
end $$;
comment on function queue.await_result(bigint) is
  'Returns the same as result, and how to wait for a job that has not finished. LISTEN on channel (NULL: no'
    ' notification will come) and call again. If the job still has not finished, wait up to wait_for for a'
    ' notification and call again. Both are NULL once the job has finished.';
