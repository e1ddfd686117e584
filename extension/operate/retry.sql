-- Manual retries: finished jobs become unfinished again, under their old ids and with their history.

-- Locks: those of _lock_rows. Raises: 22023, QJ008.
create or replace function queue.retry(ids bigint[], force boolean default false,
  from_step text default null, changes jsonb default null)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_changes jsonb;
  v_step text;
  v_no integer;
  v_without bigint[] := '{}'::bigint[];
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator}', retry.ids);
    perform queue._require_queue('{operator}', retry.changes ->> 'queue')
    where retry.changes ->> 'queue' <> '';
  end if;
  perform queue._check_isolation();
  perform queue._check_ids(retry.ids);
  v_changes := queue._check_changes('changes', retry.changes);
  if retry.from_step is not null then
    select k.name, k.no into v_step, v_no from queue._step_key(retry.from_step) k;
    v_without := array(
      select distinct j.id from queue.job j
      where j.id = any (retry.ids) and not queue._has_step(j.id, v_step, v_no));
  end if;
  return query select r.id, r.outcome, r.error
    from queue._retry(array(select u.id from unnest(retry.ids) u (id) where u.id <> all (v_without)),
      coalesce(retry.force, false), 'retry', jsonb_build_object('force', retry.force, 'from_step',
      retry.from_step, 'changes', nullif(v_changes, '{}')), v_step, v_no, v_changes) r;
  return query
    select j.id, j.state, 'QJ009'::text from queue.all_jobs j where j.id = any (v_without) order by j.id;
end $$;
comment on function queue.retry(bigint[], boolean, text, jsonb) is
  'Runs jobs again: finished ones (failed, cancelled, succeeded), and at once those that wait for a retry,'
    ' sleep, or wait for a signal or event. The counters of failures, crashes and yields are reset; a step'
    ' that has failed for good runs again, unless the handler has gone on to another one since. A finished'
    ' job that never started keeps its scheduled_at. A running job, or one whose expires_at has passed, is'
    ' refused (QJ003) without force; with force the running claim is lost. A job that has never started is'
    ' refused (QJ004) while another job holds its queueing lock. from_step: a finished step, from which the'
    ' job continues; that step and those that finished later are forgotten. A wait that is forgotten does'
    ' not give back the signal that it took. A job without that step is refused (QJ009). changes: as in the'
    ' options of fail, retry_at or retry_in (when to run, instead of at once), and priority, queue and lock'
    ' (as it is, not a template; empty text for none). In its new lock the job has the place of its id. A'
    ' job that is refused does not change. Returns a row for each id: the new state in outcome, or an error'
    ' with its state.';

-- Locks and errors: as retry.
create or replace function queue.retry_failed(task text default null, queue text default null,
  max_jobs integer default 1000, after_id bigint default null)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp {{planner}} as $$
begin
  {{if_restricted}}
    perform queue._require_queue('{operator}', retry_failed.queue);
  end if;
  perform queue._check_isolation();
  if retry_failed.task is not null then
    perform queue._check_name('task', retry_failed.task);
  end if;
  if retry_failed.queue is not null then
    perform queue._check_name('queue', retry_failed.queue);
  end if;
  if retry_failed.max_jobs not between 1 and 1000 then
    perform queue._invalid('max_jobs must be 1 to 1000',
      'Retry at most 1,000, then call again with the last id as after_id.',
      'max_jobs: ' || retry_failed.max_jobs);
  end if;
  return query
    select r.id, r.outcome, r.error
    from queue._retry(array(
      select f.id from queue.finished f
      join queue.job_now j on j.id = f.id
      where f.state = 'failed' and (retry_failed.after_id is null or f.id > retry_failed.after_id)
        and (retry_failed.task is null or j.task = retry_failed.task)
        and (retry_failed.queue is null or queue._matches(j.queue, retry_failed.queue))
      order by f.id limit coalesce(retry_failed.max_jobs, 1000)), false, 'retry_failed',
      jsonb_build_object('task', retry_failed.task, 'queue', retry_failed.queue, 'max_jobs',
        retry_failed.max_jobs, 'after_id', retry_failed.after_id)) r;
end $$;
comment on function queue.retry_failed(text, text, integer, bigint) is
  'Runs queue.retry on failed jobs, oldest first: those of a task, of queues (a name, prefix* or *), or'
    ' NULL: of all. It retries at most max_jobs, which is at most 1,000; if it returns that many rows, call'
    ' it again with the last id as after_id.';

-- Returns the outcome for each id, in the given order. If a step is given (p_step, p_no), a job that runs
-- again forgets it and those after it, before it goes through its gates. p_changes: the result of
-- _check_changes, which is written before that, too; a finished job is in no lock, so it just joins the other
-- one. A job that has never started takes its queueing lock again, and is refused (QJ004) if another job
-- holds it.
-- Locks: those of _lock_rows, with the free queueing locks of its jobs.
-- Why no job comes back without its key: jobs that ended while this waited for the admission lock are checked
-- again under it. So is everything else that others may have changed meanwhile: whether a job has still
-- failed, and whether the caller may still use its queue.
-- Two sessions: operate/retry.cancel_key.spec, operate/retry.lock.spec, operate/retry.twice.spec.
create or replace function queue._retry(p_ids bigint[], p_force boolean, p_call text, p_args jsonb,
  p_step text default null, p_no integer default null, p_changes jsonb default null)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security invoker rows 10 as $$
declare
  v_before jsonb;
  v_job record;
  v_at constant timestamptz := coalesce(queue._timestamp('retry_at', p_changes -> 'retry_at'),
    clock_timestamp() + queue._interval('retry_in', p_changes -> 'retry_in'));  -- NULL: at once
  v_change constant jsonb := nullif(p_changes - '{retry_at,retry_in}'::text[], '{}');
  v_done bigint[] := '{}'::bigint[];
  v_back bigint[] := '{}'::bigint[];
  v_keyed bigint[];
  v_unkeyed bigint[];
  v_retakable bigint[];
begin
  v_keyed := queue._lock_rows(p_ids, p_retakes => true,
    p_admitted => case when (p_changes ? 'lock') is not true then p_ids end);  -- the lock's older jobs, too
  v_retakable := queue._retakable(p_ids);
  perform queue._require_jobs('{operator}', p_ids);  -- they may have moved while this waited
  v_before := queue._jobs_before(p_ids, variadic array(
    select k from jsonb_object_keys(v_change - 'queue') k
    union all select 'scheduled_at' where v_at is not null));
  for v_job in
    select j.id, aj.claim, aj.worker_id, f.id is not null as is_finished, f.state, w.reason,
      j.claims,
      j.flags & {{expires}} <> 0
        and (j.options ->> 'expires_at')::timestamptz <= clock_timestamp() as is_expired,
      exists (select from queue.unsettled h where h.job_id = j.id and h.kind in ('ended', 'again'))
        as is_ending,
      j.id = any (v_retakable) and k.job_id is distinct from j.id as lacks_key,
      k.job_id is null as is_key_free
    from (select distinct u.id from unnest(p_ids) u (id)) u
    join queue.job_now j on j.id = u.id
    left join queue.active_job aj on aj.id = j.id
    left join queue.finished f on f.id = j.id
    left join queue.waiting w on w.id = j.id
    left join queue.queueing_lock k on k.key = j.queueing_lock
    order by j.id
  loop
    if v_job.is_expired and not p_force or v_job.is_ending
      or p_call = 'retry_failed' and v_job.state is distinct from 'failed' then
      continue;
    elsif v_job.lacks_key then
      continue when v_job.is_key_free;  -- it has ended while this waited
      v_unkeyed := v_unkeyed || v_job.id;
    elsif v_job.is_finished then
      -- It may have ended meanwhile, and another call may hold its row and wait for the admission lock.
      perform from queue.finished f where f.id = v_job.id for update skip locked;
      continue when not found;
      perform queue._forget_steps(v_job.id, p_step, p_no);
      v_back := v_back || v_job.id;
      v_done := v_done || v_job.id;
    elsif v_job.claim is not null then
      if p_force and queue._take_back(v_job.id, v_job.claim, v_job.worker_id, v_job.is_expired, p_step, p_no,
        v_at, v_change) then
        v_done := v_done || v_job.id;
      end if;
    elsif v_job.reason in ('schedule', 'signal') and v_job.claims > 0 then
      continue when (select t.place from queue._dequeue(v_job.id) t) is null;
      delete from queue.suspended w where w.job_id = v_job.id;
      delete from queue.expiry e where v_job.is_expired and e.id = v_job.id;
      perform queue._change_sleep(array[v_job.id], v_at);
      perform queue._forget_steps(v_job.id, p_step, p_no);
      perform queue._reset_counters(array[v_job.id], v_at);
      perform queue._change_on_retry(array[v_job.id], v_change) where v_change is not null;
      perform queue._advance(p_arrived => array[v_job.id]);
      perform queue._change_lock(v_job.id, v_change ->> 'lock') where v_change ? 'lock';
      v_done := v_done || v_job.id;
    end if;
  end loop;
  perform queue._drop_queueing_locks(array(select u.id from unnest(v_keyed) u (id)
    where u.id not in (select unnest(v_done))), {{queueing_lock}})
  where v_keyed is not null;
  perform queue._requeue_finished(v_back, v_at, v_change);
  perform queue._announce();
  perform queue._audit_jobs(p_call, p_args, v_done, v_before, v_change ->> 'queue');
  return query select r.id, r.outcome, r.error from queue._change_results(p_ids, v_done, v_unkeyed) r;
end $$;

-- Ends the claim of a running job that is to run again, and tells its worker. False: another session is
-- ending it. With a step (p_step, p_no) the job forgets it, and those after it. Settling makes the changes
-- (p_change), after it has released what the claim held under the old names.
-- Locks: the caller holds the admission lock; the claim's row of queue.active_job by skip locked.
create or replace function queue._take_back(p_id bigint, p_claim bigint, p_worker bigint,
  p_is_expired boolean, p_step text, p_no integer, p_at timestamptz, p_change jsonb)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform from queue.active_job aj where aj.id = p_id and aj.claim = p_claim for update skip locked;
  if not found then
    return false;
  end if;
  delete from queue.expiry e where p_is_expired and e.id = p_id;
  perform queue._forget_steps(p_id, p_step, p_no);
  perform queue._end_attempt(jsonb_strip_nulls(jsonb_build_object('outcome', 'retried', 'error',
    'taken back by a retry with force', 'at', p_at, 'change', p_change)), p_id, p_claim, true);
  perform queue._notify_abort(p_id, p_claim, p_worker, 'retried');
  return true;
end $$;

-- Deletes a step of a job, and all that were finished later or were only begun. The job no longer waits for
-- the jobs that these steps awaited. A wait for jobs ends its claim, so it is that claim's last step. Without
-- a step (p_name is NULL) a step that has failed for good runs again, unless the handler has gone on to
-- another one.
-- Locks: the caller holds the admission lock, and the job's row of queue.active_job or queue.finished, if
-- there is one. Why no wake-up is lost: nobody waits for a step, and the caller sends the job through its
-- gates afterwards.
create or replace function queue._forget_steps(p_id bigint, p_name text, p_no integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_from record;
begin
  if p_name is null then
    delete from queue.step s
    where s.job_id = p_id and s.error is not null and s.finished_at is not null and not exists (
      select from queue.step t
      where t.job_id = s.job_id
        and (t.claim, coalesce(t.finished_at, 'infinity')) > (s.claim, s.finished_at));
    return;
  end if;
  select f.claim, f.finished_at into v_from from queue.step f
  where f.job_id = p_id and f.name = p_name and f.no = coalesce(p_no, 1);
  if found then
    update queue.need d set claim = null where d.job_id = p_id and d.claim >= v_from.claim;
    delete from queue.step s
    where s.job_id = p_id
      and ((s.claim, s.finished_at) < (v_from.claim, v_from.finished_at)) is not true;
  end if;
end $$;

-- Makes finished jobs unfinished: they join their locks by their old ids, and go through the gates. Jobs that
-- need them and have passed that gate go back to wait, and pass their deadlines on. p_at, p_change: as in
-- _take_back; the changes come first, while the jobs are in no lock yet.
-- Locks: the caller holds the admission lock and the rows of queue.finished; rows of queue.active_job by skip
-- locked.
create or replace function queue._requeue_finished(p_ids bigint[], p_at timestamptz, p_change jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_joined record;
begin
  if p_ids = '{}' then
    return;
  end if;
  perform queue._count_ends_of(p_ids, false);
  with gone as (
    delete from queue.finished f where f.id = any (p_ids)
    returning f.id, f.attempts, f.started_at, f.state = 'succeeded'
      and f.worker_id is not null as was_claimed)
  insert into queue.job_override as s (id, attempts, claims, started_at, has_steps)
  select g.id, g.attempts, g.was_claimed::integer, g.started_at,
    exists (select from queue.step t where t.job_id = g.id)
  from gone g
  on conflict on constraint job_override_pkey do update
    set (attempts, claims, started_at, has_steps, tag) = (excluded.attempts, s.claims + excluded.claims,
      coalesce(excluded.started_at, s.started_at), excluded.has_steps, null);
  perform queue._change_sleep(p_ids, p_at);
  perform queue._reset_counters(p_ids, p_at);
  perform queue._change_on_retry(p_ids, p_change) where p_change is not null;
  perform queue._write_lock(p_ids, p_change ->> 'lock') where p_change ? 'lock';
  insert into queue.expiry (id, at)
  select j.id, (j.options ->> 'expires_at')::timestamptz from queue.job j
  where j.id = any (p_ids) and j.flags & {{expires}} <> 0
    and (j.options ->> 'expires_at')::timestamptz > clock_timestamp();
  perform queue._propagate_deadline(p_ids, p_takes => true);
  v_joined := queue._join_locks(p_ids);
  perform queue._advance(
    p_arrived => p_ids || v_joined.displaced, p_turned => v_joined.passed, p_keys => v_joined.keys,
    p_changed => p_ids);
end $$;
