-- Results: what became of a job, and waiting for it.
--
-- Who waits makes a row in queue.awaited and marks the job in queue.live as needed (4096), so that a finish
-- of jobs that nobody waits for asks and does nothing more than otherwise. A job that is not there yet gets
-- the mark when it comes from a gate (_place) or from the log (_admit_range, if its id is at most the last
-- value of queue.awaited_seq). Two things may go wrong without harm, as polling is the net: whoever puts the
-- job into queue.live may not see the row yet, and two who wait may set the sequence at once.

-- Raises: QJ001.
create or replace function queue.result(id bigint)
returns table (state text, result jsonb, error text)
language plpgsql stable parallel safe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  return query select j.state, j.result, j.error from queue.jobs j where j.id = result.id;
  if not found then
    perform queue._job_not_found(result.id);
  end if;
end $$;
comment on function queue.result(bigint) is
  'The job''s state, and once it has finished its result or error. error: the last one, also while it waits for a retry.';

-- Locks: the job's row of queue.live by skip locked; its row of queue.awaited. Raises: QJ001.
create or replace function queue.await_result(id bigint)
returns table (state text, result jsonb, error text, channel text, wait_for interval)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_job record;
  v_is_marked boolean;
begin
  select j.created_at, f.id is not null as is_finished, a.id is not null as is_awaited, v.flags & 4096 <> 0 as is_marked,
    v.id is not null as is_live, w.id is not null or m.id is not null as is_in_gate
  into v_job
  from queue.job j
  left join queue.finished f on f.id = j.id
  left join queue.awaited a on a.id = j.id
  left join queue.live v on v.id = j.id
  left join queue.waiting w on w.id = j.id
  left join queue.job_state s on s.id = j.id
  left join queue.lock_member m on m.lock = coalesce(s.lock, j.lock) and m.id = j.id
  where j.id = await_result.id;
  v_is_marked := v_job.is_marked;
  if not v_job.is_finished and not v_job.is_awaited then
    insert into queue.awaited (id) values (await_result.id) on conflict on constraint awaited_pkey do nothing;
    if not v_job.is_live and await_result.id > (select s.last_value from queue.awaited_seq s) then
      perform setval('queue.awaited_seq', await_result.id);
    end if;
  end if;
  if v_job.is_live and not v_job.is_marked then
    update queue.live v set flags = v.flags | 4096
    where v.id = (select l.id from queue.live l where l.id = await_result.id for update skip locked);
    v_is_marked := found;
  end if;
  select r.state, r.result, r.error into state, result, error from queue.result(await_result.id) r;
  if state in ('succeeded', 'failed', 'cancelled') then
    delete from queue.awaited a where a.id = await_result.id;
  else
    wait_for := case
      when v_is_marked or v_job.is_in_gate and v_job.is_awaited then interval '5 s'
      when v_job.is_live or v_job.is_in_gate then interval '20 ms'
      else least(greatest(clock_timestamp() - v_job.created_at, interval '20 ms'), interval '1 s') end;
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
create or replace function queue._tell_waiters(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
begin
  with gone as (
    delete from queue.awaited a where a.id = any (p_ids) returning a.id)
  select array_agg(g.id) into v_ids from gone g;
  if v_ids is not null and current_setting('pgdefer.notify', true) is distinct from 'off' then
    perform pg_notify('pgdefer_result_' || u.id, '') from unnest(v_ids) u (id);
  end if;
end $$;
