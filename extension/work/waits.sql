-- Sleeps and waits: a durable job gives its claim back, and continues later with a new one.
--
-- Each function here ends the claim as a yield does, but counts no progress. So the job holds no slot and
-- no worker meanwhile; at an ordered lock it keeps its turn, as a job that waits for a retry does.
-- Locks: the claim's row of queue.active_job, which is deleted; it protects the job's rows of
-- queue.job_override, queue.step and queue.suspended, which are written next. Never the admission lock,
-- because a handler's own transaction may be long.
-- Why no wake-up is lost: see admit/suspended.sql.

-- Locks: see the top. Raises: 22023, QJ001, QJ002, QJ003 (the step is finished), QJ008.
create or replace function queue.sleep(id bigint, claim bigint, name text, until timestamptz)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_until timestamptz := greatest(sleep.until, clock_timestamp());
begin
  {{if_restricted}}
    perform queue._require_claims(array[sleep.id], array[sleep.claim]);
  end if;
  perform queue._check_isolation();
  if sleep.until is null then
    perform queue._invalid('until is missing', 'Pass the time at which the job continues.');
  end if;
  perform queue._check_moment('until', sleep.until);
  perform queue._suspend(sleep.id, sleep.claim, sleep.name,
    jsonb_build_object('outcome', 'suspended', 'at', v_until), to_jsonb(queue._utc(v_until)));
end $$;
comment on function queue.sleep(bigint, bigint, text, timestamptz) is
  'Ends the claim. The job continues with a new claim at the given time, or at once if that has passed. It'
    ' holds no slot and no worker meanwhile; at an ordered lock it keeps its turn. In its next run the step'
    ' of this name is finished. Its value is the time at which the sleep ended: the given time or that of'
    ' the call, whichever is later, unless queue.retry, queue.reschedule or a replacement (on_conflict) has'
    ' changed it. A sleep counts neither as a failure nor as progress.';

-- Locks: see the top. Raises: 22023, QJ001, QJ002, QJ003 (the step is finished), QJ008.
create or replace function queue.wait(id bigint, claim bigint, name text, signal text default null,
  event text default null, timeout interval default null)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_no integer;
begin
  {{if_restricted}}
    perform queue._require_claims(array[wait.id], array[wait.claim]);
  end if;
  perform queue._check_isolation();
  if num_nonnulls(wait.signal, wait.event) <> 1 then
    perform queue._invalid('wait takes either a signal or an event', 'Give one of the two.');
  end if;
  perform queue._check_name(case when wait.signal is null then 'event' else 'signal' end,
    coalesce(wait.signal, wait.event));
  perform queue._check_interval('timeout', wait.timeout);
  v_no := queue._suspend(wait.id, wait.claim, wait.name, '{"outcome": "suspended", "is_open": true}', null);
  if v_no is not null then
    insert into queue.suspended (job_id, no, step, signal, event, until)
    values (wait.id, v_no, (queue._step_key(wait.name)).name, wait.signal, wait.event,
      clock_timestamp() + wait.timeout);
  end if;
end $$;
comment on function queue.wait(bigint, bigint, text, text, text, interval) is
  'Ends the claim. The job continues with a new claim once the signal was sent to it or the event was'
    ' published, before or after this call. A signal ends one wait; the oldest signal is taken first. In the'
    ' job''s next run the step of this name is finished; its value is the payload, or null if the timeout'
    ' passed first. The job holds no slot and no worker meanwhile; at an ordered lock it keeps its turn.';

-- Locks: see the top. Raises: 22023, QJ001, QJ002, QJ003 (the step is finished), QJ005, QJ008.
create or replace function queue.await_jobs(id bigint, claim bigint, name text, ids bigint[])
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
begin
  {{if_restricted}}
    perform queue._require_claims(array[await_jobs.id], array[await_jobs.claim]);
    perform queue._require_jobs('{worker,operator}', await_jobs.ids);
  end if;
  perform queue._check_isolation();
  if array_ndims(await_jobs.ids) = 1 is not true or array_position(await_jobs.ids, null) is not null then
    perform queue._invalid('ids must be a list of jobs', 'Pass the id of at least one job, and no NULL.');
  end if;
  perform queue._suspend(await_jobs.id, await_jobs.claim, await_jobs.name,
    jsonb_build_object('outcome', 'suspended', 'needs', to_jsonb(await_jobs.ids)), null);
end $$;
comment on function queue.await_jobs(bigint, bigint, text, bigint[]) is
  'Ends the claim. The job continues with a new claim once all these jobs have ended, whether or not they'
    ' succeeded; queue.needs returns their states, results and errors. In its next run the step of this name'
    ' is finished. A job that no longer exists counts as ended, if a finished step has its id in a list. The'
    ' jobs count as needs (for deadlines, retention, queue.graph), but their failure does not hold the job.'
    ' The job holds no slot and no worker meanwhile, so they may run in the same queue. At an ordered lock'
    ' it keeps its turn, so it can''t await a job that waits behind it for that lock (QJ005).';

-- Locks: none. Raises: QJ001.
create or replace function queue.waits_for(id bigint)
returns table (step text, signal text, event text, until timestamptz)
language plpgsql stable parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp {{planner}} as $$
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator,reader}', array[waits_for.id]);
  end if;
  if not exists (select from queue.job j where j.id = waits_for.id) then
    perform queue._job_not_found(waits_for.id);
  end if;
  return query
    select queue._step_name(w.step, w.no), w.signal collate "default", w.event collate "default", w.until
    from queue.suspended w where w.job_id = waits_for.id;
end $$;
comment on function queue.waits_for(bigint) is
  'Returns the signal (queue.signal) or the event (queue.publish) that a durable job waits for, the step'
    ' that waits, and when its timeout ends; no row if it waits for neither.';

-- Ends a claim, and writes the step after which the job continues: finished with a value, or unfinished if
-- the outcome says is_open. Returns the number of the step's use; NULL if the job has ended instead (it was
-- told to abort, or has expired).
-- Locks and errors: those of the functions above.
create or replace function queue._suspend(p_id bigint, p_claim bigint, p_name text, p_outcome jsonb,
  p_value jsonb)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_key record := queue._step_key(p_name);
  v_step record;
begin
  perform queue._lock_claim(p_id, p_claim, true);
  v_step := queue._step_to_end(p_id, p_claim, v_key.name, v_key.no);
  if v_step.is_finished then
    perform queue._step_is_finished(p_id, p_name);
  elsif queue._end_attempt(p_outcome, p_id, p_claim, false) in ('failed', 'cancelled') then
    return null;
  end if;
  insert into queue.step (job_id, claim, run, finished_at, no, name, value, is_sleep)
  values (p_id, p_claim, p_claim, case when not p_outcome ? 'is_open' then clock_timestamp() end, v_step.no,
    v_key.name, p_value, p_outcome ? 'at')
  on conflict on constraint step_pkey do update set claim = excluded.claim, run = excluded.run,
    finished_at = excluded.finished_at, value = excluded.value, is_sleep = excluded.is_sleep, error = null;
  return v_step.no;
end $$;
