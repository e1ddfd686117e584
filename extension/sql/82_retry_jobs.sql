-- Manual retries: finished jobs become unfinished again, under their old ids and with their history.

-- Locks: the jobs' rows of queue.live and queue.finished, waited for in the order of ids; ADM, waited for.
-- Raises: 22023, QJ008.
create or replace function queue.retry(ids bigint[], force boolean default false)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', retry.ids);
  end if;
  perform queue._check_isolation();
  perform queue._check_ids(retry.ids);
  return query select r.id, r.outcome, r.error from queue._retry(retry.ids, coalesce(retry.force, false)) r;
end $$;
comment on function queue.retry(bigint[], boolean) is
  'Runs jobs again: finished ones (failed, cancelled, succeeded), and those that wait for a retry at once. Failures, crashes and yields are counted anew. A running job, or one whose expires_at has passed, is refused (QJ003) without force; with force the running claim is lost. One that has never started is refused (QJ004) while another job has its queueing lock. A row for each id: the new state in outcome, or an error with the state that it has.';

-- Locks and errors: as retry.
create or replace function queue.retry_failed(task text default null, queue text default null, max_jobs integer default 1000, after_id bigint default null)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_queue('{operator}', retry_failed.queue);
  end if;
  perform queue._check_isolation();
  if retry_failed.task is not null then
    perform queue._check_name('task', retry_failed.task);
  end if;
  if retry_failed.queue is not null then
    perform queue._check_name('queue', retry_failed.queue);
  end if;
  if retry_failed.max_jobs not between 1 and 1000 then
    perform queue._invalid('max_jobs must be 1 to 1000', 'Retry at most 1,000, then call again with the last id as after_id.', 'max_jobs: ' || retry_failed.max_jobs);
  end if;
  return query
    select r.id, r.outcome, r.error
    from queue._retry(array(
      select f.id from queue.finished f
      join queue.job j on j.id = f.id
      left join queue.job_state s on s.id = f.id
      where f.state = 'failed' and (retry_failed.after_id is null or f.id > retry_failed.after_id) and (retry_failed.task is null or j.task = retry_failed.task)
        and (retry_failed.queue is null or queue._matches(coalesce(s.queue, j.queue), retry_failed.queue))
      order by f.id limit coalesce(retry_failed.max_jobs, 1000)), false) r;
end $$;
comment on function queue.retry_failed(text, text, integer, bigint) is
  'queue.retry for jobs that have failed, oldest first: of a task, of queues (a name, prefix* or *), NULL: of all. At most max_jobs, which is 1,000 at most; where as many rows come there may be more: call again with the id of the last as after_id.';

-- What became of each id, in the order in which they were given. A job that has never started takes its queueing lock again,
-- and is refused (QJ004) where another has it.
-- Locks: first of all the queueing locks' rows, in their order: whoever defers such a job may hold them long; then as retry.
-- Why no job comes back without its key: what came to its end while this waited for ADM is looked at again under it.
-- Two sessions: retry_cancel_key.spec.
create or replace function queue._retry(p_ids bigint[], p_force boolean)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security invoker rows 10 as $$
#variable_conflict use_column
declare
  v_job record;
  v_done bigint[] := '{}'::bigint[];
  v_back bigint[] := '{}'::bigint[];
  v_keyed bigint[];
  v_unkeyed bigint[];
begin
  v_keyed := array(
    select f.id from unnest(p_ids) u (id)
    cross join lateral (
      select f.id from queue.finished f join queue.job j on j.id = f.id left join queue.job_state s on s.id = f.id
      where f.id = u.id and j.queueing_lock is not null and coalesce(s.claims, 0) = 0 and not (f.state = 'succeeded' and f.worker_id is not null)
      offset 0) f);
  if v_keyed <> '{}' then
    insert into queue.queueing_lock (key, job_id)
    select j.queueing_lock, j.id from queue.job j where j.id = any (v_keyed) order by j.queueing_lock, j.id
    on conflict on constraint queueing_lock_pkey do nothing;
  end if;
  perform from queue.live v where v.id = any (p_ids) order by v.id for update;
  perform from queue.finished f where f.id = any (p_ids) order by f.id for update;
  perform queue._admit_all();
  for v_job in
    select j.id, v.claim, v.worker_id, f.id is not null as is_finished, w.reason, coalesce(s.claims, 0) as claims,
      j.flags & 64 <> 0 and (j.options ->> 'expires_at')::timestamptz <= clock_timestamp() as is_expired,
      exists (select from queue.handover h where h.job_id = j.id and h.kind in ('ended', 'again')) as is_ending,
      f.id is not null and j.queueing_lock is not null and coalesce(s.claims, 0) = 0 and not (f.state = 'succeeded' and f.worker_id is not null)
        and (select k.job_id from queue.queueing_lock k where k.key = j.queueing_lock) is distinct from j.id as lacks_key
    from (select distinct u.id from unnest(p_ids) u (id)) u
    join queue.job j on j.id = u.id
    left join queue.job_state s on s.id = j.id
    left join queue.live v on v.id = j.id
    left join queue.finished f on f.id = j.id
    left join queue.waiting w on w.id = j.id
    order by j.id
  loop
    if v_job.is_expired and not p_force or v_job.is_ending then
      continue;
    elsif v_job.lacks_key then
      v_unkeyed := v_unkeyed || v_job.id;
    elsif v_job.is_finished then
      -- it may have come to its end meanwhile, and another call hold its row, and wait for ADM
      perform from queue.finished f where f.id = v_job.id for update skip locked;
      continue when not found;
      v_back := v_back || v_job.id;
      v_done := v_done || v_job.id;
    elsif v_job.claim is not null then
      perform from queue.live v where v.id = v_job.id and v.claim = v_job.claim for update skip locked;
      continue when not p_force or not found;
      delete from queue.expiry e where v_job.is_expired and e.id = v_job.id;
      perform queue._end_attempt('{"outcome": "retried", "error": "taken back by a retry with force"}', v_job.id, v_job.claim, true);
      perform queue._tell_abort(v_job.id, v_job.claim, v_job.worker_id, 'retried');
      v_done := v_done || v_job.id;
    elsif v_job.reason = 'schedule' and v_job.claims > 0 then
      continue when (select t.place from queue._take_out(v_job.id) t) is null;
      perform queue._start_over(array[v_job.id]);
      perform queue._advance(p_arrived => array[v_job.id]);
      v_done := v_done || v_job.id;
    end if;
  end loop;
  perform queue._drop_queueing_locks(array(select u.id from unnest(v_keyed) u (id) where u.id not in (select unnest(v_done))), 256 | 8192)
  where v_keyed <> '{}';
  perform queue._bring_back(v_back);
  perform queue._announce();
  return query
    select u.id, j.state, case when j.id is null then 'QJ001' when u.id in (select unnest(v_unkeyed)) then 'QJ004' when u.id not in (select unnest(v_done)) then 'QJ003' end
    from (select u.id, min(u.n) as n from unnest(p_ids) with ordinality u (id, n) group by u.id) u
    left join lateral (select j.id, j.state from queue.jobs j where j.id = u.id offset 0) j on true
    order by u.n;
end $$;

-- Makes finished jobs unfinished: they join their locks by their old ids, and go through the gates; those
-- that need them and have passed that gate go back to wait.
-- Locks: the caller holds ADM and the rows of queue.finished; rows of queue.live by skip locked.
create or replace function queue._bring_back(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_joined record;
begin
  if p_ids = '{}' then
    return;
  end if;
  with gone as (
    delete from queue.finished f where f.id = any (p_ids)
    returning f.id, f.attempts, f.started_at, f.state = 'succeeded' and f.worker_id is not null as was_claimed)
  insert into queue.job_state as s (id, attempts, claims, started_at)
  select g.id, g.attempts, g.was_claimed::integer, g.started_at from gone g
  on conflict on constraint job_state_pkey do update
    set (attempts, claims, started_at) = (excluded.attempts, s.claims + excluded.claims, coalesce(excluded.started_at, s.started_at));
  perform queue._start_over(p_ids);
  insert into queue.expiry (id, at)
  select j.id, (j.options ->> 'expires_at')::timestamptz from queue.job j
  where j.id = any (p_ids) and j.flags & 64 <> 0 and (j.options ->> 'expires_at')::timestamptz > clock_timestamp();
  v_joined := queue._join_locks(p_ids);
  perform queue._advance(
    p_arrived => p_ids || v_joined.displaced, p_turned => v_joined.passed, p_keys => v_joined.keys, p_changed => p_ids);
end $$;
