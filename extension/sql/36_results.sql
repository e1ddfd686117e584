-- Results: what became of a job, and waiting for it.
--
-- Who waits makes a row in queue.awaited and marks the job in queue.live as needed (4096), so that a finish
-- of jobs that nobody waits for asks and does nothing more than otherwise. A job in a gate gets the mark when
-- it enters queue.live (_place). Where the mark can't be set now (the row is locked, the job not admitted
-- yet), await_result says so by a short wait_for: polling is the net.

-- Raises: QJ001.
create or replace function queue.result(id bigint)
returns table (state text, result jsonb, error text)
language plpgsql stable parallel safe security definer rows 1
set search_path = pg_catalog, pg_temp as $$
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

-- Locks: the job's row of queue.live by skip locked. Raises: QJ001.
create or replace function queue.await_result(id bigint)
returns table (state text, result jsonb, error text, channel text, wait_for interval)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_is_marked boolean := false;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  if exists (select from queue.job j where j.id = await_result.id) and not exists (select from queue.finished f where f.id = await_result.id) then
    if not exists (select from queue.awaited a where a.id = await_result.id) then
      insert into queue.awaited (id) values (await_result.id) on conflict on constraint awaited_pkey do nothing;
    end if;
    if exists (select from queue.live v where v.id = await_result.id and v.flags & 4096 = 0) then
      update queue.live v set flags = v.flags | 4096
      where v.id = (select l.id from queue.live l where l.id = await_result.id for update skip locked);
      v_is_marked := found;
    else
      v_is_marked := exists (select from queue.live v where v.id = await_result.id)
        or exists (select from queue.waiting w where w.id = await_result.id);
    end if;
  end if;
  select r.state, r.result, r.error into state, result, error from queue.result(await_result.id) r;
  if not state in ('succeeded', 'failed', 'cancelled') then
    wait_for := case when v_is_marked then interval '5 s' else interval '20 ms' end;
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
