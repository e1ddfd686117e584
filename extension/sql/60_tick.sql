-- tick: everything that is due. Any worker calls it; pg_cron or psql may call it instead.

-- Locks: as reap; then ADM, waited for. A transaction of its own.
-- Raises: QJ008.
create or replace function queue.tick()
returns table (admitted integer, reaped integer, pruned integer, next_due timestamptz)
language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_hashjoin = off
set enable_mergejoin = off set jit = off as $$
#variable_conflict use_column
declare
  v_admit record;
  v_start timestamptz := clock_timestamp();
begin
  perform queue._check_isolation();
  select r.reaped into reaped from queue.reap() r;
  perform queue._check_restore();
  perform queue._lock_admission(true);
  admitted := 0;
  loop
    select a.* into v_admit from queue._admit(1000) a;
    admitted := admitted + v_admit.admitted;
    exit when not v_admit.has_more or clock_timestamp() > v_start + interval '1 s';
  end loop;
  perform queue._expire_due();
  perform queue._repair();
  pruned := queue.prune(1000);
  next_due := queue._next_due();
  return next;
end $$;
comment on function queue.tick() is
  'Does everything that is due: admission, expiry, reaping, repair, recurring runs, pruning. Any worker calls it; pg_cron can.';

-- Cancels jobs whose expires_at has passed before they started.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._expire_due()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
begin
  v_ids := array(select e.id from queue.expiry e where e.at <= clock_timestamp() order by e.at limit 1000);
  if v_ids <> '{}' then
    perform queue._expire(v_ids);
  end if;
end $$;

-- Cancels jobs with reason expired, if they have not started.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._expire(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_id bigint;
begin
  foreach v_id in array p_ids loop
    if queue._take_out(v_id) is not null then
      perform queue._conclude(v_id, 'cancelled', 'expired', null);
    elsif not exists (select from queue.live v where v.id = v_id and v.claim is null) then
      delete from queue.expiry e where e.id = v_id;
    end if;
  end loop;
end $$;

-- Mends what can only be wrong after a bug or an aborted repair: keys with free slots and waiting jobs.
-- Locks: the caller holds ADM.
create or replace function queue._repair()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_keys text[];
begin
  v_keys := array(select distinct l.key from queue.key_lane l where l.waiting > 0);
  if v_keys <> '{}' then
    perform queue._refill(v_keys);
  end if;
  -- a replacement that was rolled back left the mark of the one before
  update queue.queueing_lock k set replacing = null
  where k.key = any (array(
    select q.key from queue.queueing_lock q
    where q.replacing is not null
      and not exists (select from queue.handover h where h.kind = 'replace' and h.payload ->> 'seq' = q.replacing::text)
    for update skip locked));
end $$;

-- How long a finished job is kept, by the job, its queue, or the default of its state; NULL for ever.
create or replace function queue._retention(p_id bigint)
returns interval language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_retain interval;
begin
  select coalesce((j.options ->> 'retain')::interval, c.retain, case when f.state = 'succeeded' then interval '7 days' end) into v_retain
  from queue.job j
  join queue.finished f on f.id = j.id
  left join queue.job_state s on s.id = j.id
  left join queue.queue_config c on c.queue = coalesce(s.queue, j.queue)
  where j.id = p_id;
  return v_retain;
end $$;

-- Locks: rows of finished jobs by skip locked. What an unfinished job needs is kept.
create or replace function queue.prune(max_jobs integer default 10000)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_ids bigint[];
begin
  if prune.max_jobs is null or prune.max_jobs < 1 then
    perform queue._invalid('max_jobs must be at least 1', 'Say how many jobs to remove at most.');
  end if;
  v_ids := array(
    select f.id
    from (
      (select f.id from queue.finished f where f.purge_at <= v_now order by f.purge_at limit prune.max_jobs)
      union all
      (select f.id from queue.finished f
       where f.purge_at is null and f.state = 'succeeded' and f.finished_at < v_now - interval '7 days'
       order by f.finished_at limit prune.max_jobs)) f
    where not exists (
      select from queue.need d
      where d.need_id = f.id and not exists (select from queue.finished o where o.id = d.job_id))
    limit prune.max_jobs);
  v_ids := array(select f.id from queue.finished f where f.id = any (v_ids) order by f.id for update skip locked);
  perform queue._erase(v_ids);
  return cardinality(v_ids);
end $$;
comment on function queue.prune(integer) is
  'Removes finished jobs whose retention has passed, at most max_jobs, and returns how many. Those that unfinished jobs need are kept.';

-- Removes every trace of jobs that are finished and in no gate.
create or replace function queue._erase(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.finished f where f.id = any (p_ids);
  delete from queue.attempt a where a.job_id = any (p_ids);
  delete from queue.job_state s where s.id = any (p_ids);
  delete from queue.need d where d.job_id = any (p_ids) or d.need_id = any (p_ids);
  delete from queue.job j where j.id = any (p_ids);
end $$;
