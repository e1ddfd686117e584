-- Results: what became of a job, and waiting for it.
--
-- Who waits appends a row to queue.awaited and raises queue.awaited_seq to the job's id. Whoever ends a job
-- looks for such rows only if its id is at most the sequence's last value: an end that nobody waits for costs
-- the reading of that. Neither waits for the other. What may be missed, as polling is the net: an end that is
-- under way while the row is appended, and where two raise the sequence at once.

-- Raises: QJ001.
create or replace function queue.result(id bigint)
returns table (state text, result jsonb, error text)
language plpgsql stable parallel safe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{producer,worker,operator,reader}', array[result.id]);
  end if;
  return query select j.state, j.result, j.error from queue.jobs j where j.id = result.id;
  if not found then
    perform queue._job_not_found(result.id);
  end if;
end $$;
comment on function queue.result(bigint) is
  'The job''s state, and once it has finished its result or error. error: the last one, also while it waits for a retry.';

-- Raises: QJ001.
create or replace function queue.needs(id bigint)
returns table (need_id bigint, task text, state text, result jsonb, error text)
language plpgsql stable parallel safe security definer rows 5
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_limits text[];
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{worker,operator,reader}', array[needs.id]);
    v_limits := queue._limits('{worker,operator,reader}');
  end if;
  if not exists (select from queue.job j where j.id = needs.id) then
    perform queue._job_not_found(needs.id);
  end if;
  return query
    select d.id, j.task, case when j.id is null then 'deleted' when j.is_seen then j.state end, j.result, j.error
    from queue._direct_needs(needs.id) d
    left join lateral (
      select j.id, x.is_seen, j.state, case when x.is_seen then j.task end as task, case when x.is_seen then j.result end as result,
        case when x.is_seen then j.error end as error
      from queue.jobs j cross join lateral (select queue._covers(v_limits, j.queue) as is_seen) x where j.id = d.id offset 0) j on true
    order by d.id;
end $$;
comment on function queue.needs(bigint) is
  'What a job needs, by id: their tasks, states, results and last errors, for a handler that decides by them. State deleted: by force. Of jobs of queues that are not the caller''s only the ids.';

-- Locks: none. Raises: QJ001.
create or replace function queue.await_result(id bigint)
returns table (state text, result jsonb, error text, channel text, wait_for interval)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_since timestamptz;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  select r.state, r.result, r.error into state, result, error from queue.result(await_result.id) r;
  if not state in ('succeeded', 'failed', 'cancelled') then
    select min(a.since) into v_since from queue.awaited a where a.id = await_result.id;
    if v_since is null then
      insert into queue.awaited (id, since) values (await_result.id, v_now);
    end if;
    if await_result.id > (select s.last_value from queue.awaited_seq s) then
      perform setval('queue.awaited_seq', await_result.id);
    end if;
    -- often at first, as an end may just be under way
    wait_for := least(greatest(v_now - coalesce(v_since, v_now), interval '20 ms'), interval '5 s');
    if current_setting('pgdefer.notify', true) is not distinct from 'off' then
      wait_for := least(wait_for, interval '1 s');
    else
      channel := 'pgdefer_result_' || await_result.id;
    end if;
  end if;
  return next;
end $$;
comment on function queue.await_result(bigint) is
  'As result, and says how to wait when the job has not finished: LISTEN on channel (NULL: no notification will come), call again, and unless it has finished now wait for a notification for at most wait_for and call again. Both are NULL once it has finished.';

-- Tells those who wait for jobs that have ended.
-- Locks: rows of queue.awaited by skip locked.
create or replace function queue._tell_waiters(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
begin
  if p_ids[1] > (select s.last_value from queue.awaited_seq s) and cardinality(p_ids) = 1 then
    return;
  end if;
  with gone as (
    delete from queue.awaited a
    where a.ctid = any (array(
      select a.ctid from unnest(p_ids) u (id)
      cross join lateral (select a.ctid from queue.awaited a where a.id = u.id for update skip locked) a))
    returning a.id)
  select array_agg(distinct g.id) into v_ids from gone g;
  if v_ids is not null and current_setting('pgdefer.notify', true) is distinct from 'off' then
    perform pg_notify('pgdefer_result_' || u.id, '') from unnest(v_ids) u (id);
  end if;
end $$;
