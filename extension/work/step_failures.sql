-- Failures of steps: a step's own retry policy, apart from that of its job.
--
-- After a failure that is not the last, the run ends as by a sleep, and the next one continues at the step.
-- It counts for the step, neither for the job nor as progress. After the last failure the step is finished,
-- with a note of the error as its value, and the claim goes on: the handler may do something else instead.
-- So later runs take the same path, and do not try the step again.
-- Locks: the claim's row of queue.active_job, which protects the job's rows of queue.step and
-- queue.job_override. Never the admission lock, because a handler's own transaction may be long.
-- Why no wake-up is lost: as in work/waits.sql, the end of the claim is handed over to the next admission.

-- Locks: see the top. Raises: 22023, QJ001, QJ002, QJ003 (the step is finished), QJ008.
create or replace function queue.fail_step(id bigint, claim bigint, name text, error text,
  details jsonb default null, options jsonb default null)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_key record;
  v_step record;
  v_failed record;
  v_at timestamptz;
begin
  {{if_restricted}}
    perform queue._require_claims(array[fail_step.id], array[fail_step.claim]);
  end if;
  perform queue._check_isolation();
  perform queue._check_step_options(fail_step.options);
  v_key := queue._step_key(fail_step.name);
  perform queue._lock_claim(fail_step.id, fail_step.claim, true);
  v_step := queue._step_to_end(fail_step.id, fail_step.claim, v_key.name, v_key.no);
  if v_key.no is null and v_step.no > 1 and not exists (
    select from queue.step s where s.job_id = fail_step.id and s.no = v_step.no and s.name = v_key.name) then
    -- If no other use was begun, the call means the last one.
    v_step.no := v_step.no - 1;
    v_step.is_finished := true;
  end if;
  if v_step.is_finished then
    perform from queue.step s
    where s.job_id = fail_step.id and s.no = v_step.no and s.name = v_key.name and s.error is not null
      and s.claim = fail_step.claim;
    perform queue._step_is_finished(fail_step.id, fail_step.name) where not found;
    return null;
  end if;
  insert into queue.step as s (job_id, claim, run, no, name, fingerprint, failures, failed_at, error)
  values (fail_step.id, fail_step.claim, fail_step.claim, v_step.no, v_key.name,
    fail_step.options ->> 'fingerprint', 1, clock_timestamp(), left(coalesce(fail_step.error, ''), 10000))
  on conflict on constraint step_pkey do update set claim = excluded.claim, run = excluded.run,
    fingerprint = coalesce(excluded.fingerprint, s.fingerprint), failures = coalesce(s.failures, 0) + 1,
    failed_at = coalesce(s.failed_at, excluded.failed_at), error = excluded.error
  returning s.failures, s.failed_at into v_failed;
  v_at := queue._next_try(fail_step.options, v_failed.failures, v_failed.failed_at);
  if v_at is null then
    update queue.step s
    set finished_at = clock_timestamp(),
      value = jsonb_build_object('__pgdefer__', 'step_failed', 'value', left(s.error, 1000))
    where s.job_id = fail_step.id and s.name = v_key.name and s.no = v_step.no;
    return null;
  end if;
  return queue._end_attempt(jsonb_build_object('outcome', 'suspended', 'label',
    coalesce(fail_step.options ->> 'outcome', 'failed'), 'at', v_at, 'error', left(fail_step.error, 10000),
    'details', fail_step.details), fail_step.id, fail_step.claim, false);
end $$;
comment on function queue.fail_step(bigint, bigint, text, text, jsonb, jsonb) is
  'Records that a step failed. If it is to be tried again, this ends the claim, and the call returns the'
    ' job''s new state, as fail does. The job continues with a new claim when the step''s retry policy says'
    ' so. The failure counts for the step, not for the job. Otherwise the call returns NULL and the run goes'
    ' on: the step has failed for good. It is finished, with the value {"__pgdefer__": "step_failed",'
    ' "value": the error}. If that answer is lost, the same run may repeat the call, which counts once; for'
    ' a name that is used again in one run, see begin_step. options: retry (the policy, as of a task;'
    ' without one there is one attempt), retryable (false: it fails for good; true: it is tried again,'
    ' whatever the policy), retry_at or retry_in (the time), deadline (a time) or deadline_in (an interval'
    ' after the step''s first failure): a try that would begin later is not made; fingerprint (see'
    ' begin_step), outcome (timed_out, if it ended for that).';

-- Raises: 22023 if they are not options of queue.fail_step.
create or replace function queue._check_step_options(options jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
declare
  v_options jsonb := jsonb_strip_nulls(options);
begin
  if options is null then
    return;
  end if;
  perform queue._check_keys('options', options,
    array['retry', 'retryable', 'retry_at', 'retry_in', 'deadline', 'deadline_in', 'fingerprint',
    'outcome']);
  if v_options ?& '{deadline,deadline_in}'::text[] then
    perform queue._invalid('deadline and deadline_in exclude each other', 'Give one of the two.');
  elsif v_options ? 'fingerprint' and jsonb_typeof(v_options -> 'fingerprint') <> 'string' then
    perform queue._invalid('fingerprint must be text', 'Pass a JSON string of at most 1,000 bytes.');
  end if;
  perform queue._check_retry(options -> 'retry') where v_options ? 'retry';
  perform queue._check_name('fingerprint', v_options ->> 'fingerprint') where v_options ? 'fingerprint';
  perform queue._check_moment('deadline', queue._timestamp('deadline', v_options -> 'deadline'), true);
  perform queue._interval('deadline_in', v_options -> 'deadline_in');
  perform queue._check_fail_options(v_options - '{retry,deadline,deadline_in,fingerprint}'::text[]);
end $$;

-- Returns when a step runs again after its p_failures-th failure; the first one was at p_first. NULL: never.
create or replace function queue._next_try(p_options jsonb, p_failures integer, p_first timestamptz)
returns timestamptz language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_options jsonb := jsonb_strip_nulls(coalesce(p_options, '{}'));
  v_policy jsonb := coalesce(nullif(p_options -> 'retry', 'null'), '{}');
  v_at timestamptz;
begin
  if v_options -> 'retryable' = 'false' or p_failures >= queue._max_attempts(v_policy, v_options) then
    return null;
  end if;
  v_at := coalesce(queue._timestamp('retry_at', v_options -> 'retry_at'),
    clock_timestamp() + coalesce(queue._interval('retry_in', v_options -> 'retry_in'),
      queue.backoff(v_policy, p_failures)));
  if v_at > coalesce(queue._timestamp('deadline', v_options -> 'deadline'),
    p_first + queue._interval('deadline_in', v_options -> 'deadline_in')) then
    return null;
  end if;
  return v_at;
end $$;
