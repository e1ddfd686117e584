-- Attempts that did not succeed: retry policies, yields, releases, aborts, crashes.

-- Locks: none. Raises: QJ001, QJ002.
create or replace function queue.attempts_left(id bigint, claim bigint)
returns table (max_attempts integer, failures integer, is_last boolean)
language plpgsql stable parallel safe security definer rows 1
set search_path = pg_catalog, pg_temp {{planner}} as $$
begin
  {{if_restricted}}
    perform queue._require_claims(array[attempts_left.id], array[attempts_left.claim]);
  end if;
  if not exists (select from queue.active_job aj
                 where aj.id = attempts_left.id and aj.claim = attempts_left.claim) then
    perform queue._raise_claim_error(attempts_left.id, attempts_left.claim);
  end if;
  return query
    select x.max_attempts, x.failures, coalesce(x.failures + 1 >= x.max_attempts, false)
    from (
      select queue._max_attempts({{retry_policy}}, '{}') as max_attempts,
        coalesce((select s.failures from queue.job_override s where s.id = j.id), 0)::integer as failures
      from queue.job j left join queue.task t on t.name = j.task where j.id = attempts_left.id) x;
end $$;
comment on function queue.attempts_left(bigint, bigint) is
  'For a handler. Returns at which failure its job fails for good by its retry policy (NULL: never), how'
    ' often it has failed since the last manual retry, and whether a failure of this run would be the last.';

-- Volatile, so that it sees what another call in the same statement has done.
-- Locks: none. Raises: QJ001.
create or replace function queue.attempt_outcome(id bigint, claim bigint)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
begin
  {{if_restricted}}
    perform queue._require_jobs('{worker,operator}', array[attempt_outcome.id]);
  end if;
  return (select a.outcome from queue.attempt a
          where a.job_id = attempt_outcome.id and a.claim = attempt_outcome.claim);
end $$;
comment on function queue.attempt_outcome(bigint, bigint) is
  'Returns how queue.attempts shows the end of a claim; NULL if it has succeeded or has not ended. A worker'
    ' calls it when its handler has ended its claim by sleep, wait, await_jobs or fail_step: if the job was'
    ' told to abort, the claim ended as aborted.';

-- Ends the claim with an outcome other than succeeded and returns the job's new state. In addition to the
-- outcomes of _check_outcome there are two internal ones. retried comes from queue.retry with force (at,
-- change: the time and the changes). suspended comes from work/waits.sql and work/step_failures.sql (is_open:
-- its wait has not ended yet; label: the attempt's outcome, if not yielded). crashed comes from reap or, with
-- a claim, from a live worker whose process ran only this job and died. A run that ends by waiting clears the
-- count of crashes, as a job that lives for months may crash now and then. Changes for a retry (queue,
-- priority, lock) are handed over, not written here: settling first releases what the claim held under the
-- old names.
-- Locks: the claim's row of queue.active_job, which protects the job's row of queue.job_override; if the job
-- has ended, those of _clean_up; with p_settle also the admission lock, by try; for an unknown task those of
-- _leave_line. Why no wake-up is lost: the claim is settled, here or by the next admission.
-- Raises: QJ001, QJ002, QJ005; the outcome has been checked.
create or replace function queue._end_attempt(p_outcome jsonb, p_id bigint, p_claim bigint, p_settle boolean)
returns text language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz;  -- read under the lock of the claim's row, as work/minutes.sql asks for
  v_kind text := p_outcome ->> 'outcome';
  v_label text;
  v_active record;
  v_end record;
  v_state text;  -- after a yield
  v_at timestamptz;
begin
  delete from queue.active_job aj where aj.id = p_id and aj.claim = p_claim
  returning aj.attempt, aj.lane, aj.flags, aj.claimed_at, aj.worker_id, aj.deadline into v_active;
  v_now := clock_timestamp();
  if not found then
    perform queue._raise_claim_error(p_id, p_claim);
  end if;
  v_label := case v_kind when 'retry_later' then 'yielded'
    when 'suspended' then coalesce(p_outcome ->> 'label', 'yielded') when 'retried' then 'aborted'
    when 'unknown_task' then 'released' else coalesce(p_outcome -> 'options' ->> 'outcome', v_kind) end;
  if v_kind <> 'retried' and v_active.flags & {{aborting}} <> 0
    and exists (select from queue.abort a where a.id = p_id and a.claim = p_claim) then
    v_label := case v_kind when 'crashed' then 'crashed' else 'aborted' end;
    v_kind := 'aborted';
  end if;
  v_end := queue._judge_attempt(p_outcome, v_kind, p_id, p_claim, v_active.lane, v_active.worker_id, v_now);
  if v_kind = 'unknown_task' then
    perform queue._leave_line(v_active.worker_id, false);
    v_label := coalesce(v_end.final, v_label);
  end if;
  if v_end.final is null and v_kind <> 'retried' and v_active.flags & {{expires}} <> 0
    and exists (select from queue.expiry e where e.id = p_id and e.at <= v_now) then
    v_end.final := 'cancelled';
    v_end.reason := 'expired';
  end if;
  -- If the job's first time is still to come, it was rescheduled to an earlier one, and must not go back.
  v_at := coalesce(v_end.at, case when (select j.scheduled_at from queue.job j where j.id = p_id) > v_now
    then '-infinity'::timestamptz end);
  insert into queue.attempt (job_id, claim, attempt, worker_id, started_at, finished_at, outcome, error,
    details)
  values (p_id, p_claim, v_active.attempt, v_active.worker_id, v_active.claimed_at, v_now, v_label,
          v_end.error, case when v_kind = 'unknown_task' then jsonb_build_object('unknown_task', v_end.task)
               else queue._truncate_details(nullif(p_outcome -> 'details', 'null')) end);
  insert into queue.job_override as s (id, attempts, claims, failures, crashes, progress, scheduled_at,
    started_at, error, has_steps, is_suspended, tag)
  values (p_id, v_active.attempt - case when v_kind in ('released', 'unknown_task') then 1 else 0 end,
    1, case when v_kind = 'failed' then 1 else 0 end, case when v_label = 'crashed' then 1 else 0 end,
    case when v_kind = 'retry_later' then 1 else 0 end, v_at,
    case when v_kind not in ('released', 'unknown_task') then v_active.claimed_at end,
    case when v_kind not in ('retry_later', 'released', 'retried') then v_end.error end,
    v_kind = 'suspended' or exists (select from queue.step t where t.job_id = p_id),
    v_kind = 'suspended' and p_outcome ? 'is_open',
    case when v_kind = 'released' and v_active.deadline < '{{end_of_tags}}' then v_active.deadline end)
  on conflict on constraint job_override_pkey do update
  set attempts = excluded.attempts, claims = s.claims + 1, failures = s.failures + excluded.failures,
    crashes = case when v_kind in ('retry_later', 'suspended') then 0 else s.crashes + excluded.crashes end,
    progress = s.progress + excluded.progress,
    scheduled_at = case when v_kind = 'released' then s.scheduled_at else excluded.scheduled_at end,
    started_at = coalesce(excluded.started_at, s.started_at), error = coalesce(excluded.error, s.error),
    has_steps = excluded.has_steps, is_suspended = excluded.is_suspended, tag = excluded.tag;
  if v_end.final is not null then
    insert into queue.finished (id, finished_at, started_at, worker_id, attempts, state, reason, error)
    values (p_id, v_now, v_active.claimed_at, v_active.worker_id, v_active.attempt, v_end.final, v_end.reason,
      v_end.error);
    perform queue._clean_up(array[p_id], array[v_active.flags]);
    perform queue._notify_waiters(array[p_id]);
    perform queue._settle_or_append(array[p_id], array[v_active.flags], v_active.flags, 'ended', p_settle);
    return v_end.final;
  end if;
  if v_active.flags & {{lease}} <> 0 then
    delete from queue.lease l where l.id = p_id;
  end if;
  if v_kind = 'retried' then
    perform queue._reset_counters(array[p_id], v_end.at);
  end if;
  v_state := case when v_kind = 'retry_later' then queue._yield_state(p_id, v_end.payload) end;
  perform queue._settle_or_append(array[p_id], array[v_active.flags], v_active.flags, 'again', p_settle,
    jsonb_build_object('state', v_state) || v_end.payload);  -- mostly NULL; queue.jobs shows it until then
  return coalesce(v_state, case when v_at > v_now then 'scheduled' else 'ready' end);
end $$;

-- What an outcome means for its job. final: the state in which it ends, with its reason; else it runs again,
-- at a time if given, with payload as its changes. task: the job's. p_kind: the outcome, or aborted.
-- A crash is charged only to a job that was claimed alone or with a lease of its own, or if a live worker
-- reports it (crashed with a claim). That it was the dead worker's only claim proves nothing. A handler may
-- still have run whose claim had ended: by succeed in its own transaction, by its timeout, or by an operator.
-- The answer of the fetch may never have arrived, so that the job did not run at all. And an earlier call of
-- reap may have ended the worker's other claims.
-- Raises: as _end_attempt.
create or replace function queue._judge_attempt(
  p_outcome jsonb, p_kind text, p_id bigint, p_claim bigint, p_lane integer, p_worker bigint,
  p_now timestamptz, out final text, out reason text, out at timestamptz, out payload jsonb, out error text,
  out task text)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_options jsonb := jsonb_strip_nulls(coalesce(nullif(p_outcome -> 'options', 'null'), '{}'));
  v_job record;
  v_state record;
  v_is_alone boolean;
  v_limit integer;
begin
  error := left(coalesce(p_outcome ->> 'error', p_outcome ->> 'message'), 10000);
  select j.task, j.options, {{retry_policy}} as policy into v_job
  from queue.job j left join queue.task t on t.name = j.task where j.id = p_id;
  select coalesce(max(s.failures), 0) as failures, coalesce(max(s.crashes), 0) as crashes,
    coalesce(max(s.progress), 0) as progress
  into v_state from queue.job_override s where s.id = p_id;
  task := v_job.task;
  case p_kind
    when 'failed' then
      v_limit := queue._max_attempts(v_job.policy, v_options);
      if v_options -> 'retryable' = 'false' or v_state.failures + 1 >= v_limit then
        final := 'failed';
        reason := coalesce(v_options ->> 'reason', case when v_options -> 'retryable' = 'false'
          then 'not_retryable' else 'attempts' end);
      else
        at := coalesce(queue._timestamp('retry_at', v_options -> 'retry_at'),
          p_now + coalesce(queue._interval('retry_in', v_options -> 'retry_in'),
          queue.backoff(v_job.policy, v_state.failures + 1)));
        payload := nullif(jsonb_build_object('change',
          v_options - '{retryable,retry_at,retry_in,reason,outcome}'::text[]), '{"change": {}}');
      end if;
    when 'retry_later' then
      if v_state.progress + 1 > (case when v_job.options -> 'max_progress' = 'null' then null
        else coalesce((v_job.options ->> 'max_progress')::integer, 100) end) then
        final := 'failed';
        reason := 'max_progress';
      else
        at := queue._timestamp('at', p_outcome -> 'at');
        payload := queue._check_yield(p_id, p_outcome -> 'needs');
      end if;
    when 'retried' then
      at := (p_outcome ->> 'at')::timestamptz;
      payload := case when p_outcome ? 'change' then jsonb_build_object('change', p_outcome -> 'change') end;
    when 'suspended' then
      at := queue._timestamp('at', p_outcome -> 'at');
      payload := case when p_outcome ? 'needs'
        then queue._check_awaited(p_id, p_claim, p_outcome -> 'needs') end;
    when 'unknown_task' then
      select u.at, u.error into at, error from queue._unknown_task(p_id, v_job.task, p_worker, p_now) u;
      if at is null then
        final := 'failed';
        reason := 'unknown_task';
      end if;
    when 'aborted' then
      final := 'cancelled';
      reason := 'aborted';
    when 'crashed' then
      v_is_alone := p_outcome ? 'claim'
        or exists (select from queue.lane l where l.lane = p_lane and l.kind = {{lane_crashed}})
        or exists (select from queue.lease l where l.id = p_id and l.claim = p_claim and l.is_own);
      v_limit := case when v_job.policy -> 'max_crashes' is distinct from 'null'
        then coalesce((v_job.policy ->> 'max_crashes')::integer, 3) end;
      final := case when v_job.policy ->> 'on_crash' = 'fail'
        or v_is_alone and v_state.crashes + 1 >= v_limit then 'failed' end;
      reason := case when v_job.policy ->> 'on_crash' = 'fail' then 'crashed' else 'crash_loop' end;
    else null;
  end case;
end $$;

-- Raises: 22023 if they are not options of queue.fail.
create or replace function queue._check_fail_options(options jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
declare
  v_options jsonb := jsonb_strip_nulls(options);
begin
  perform queue._check_keys('options', options,
    array['retryable', 'retry_at', 'retry_in', 'priority', 'queue', 'lock', 'reason', 'outcome']);
  if v_options ? 'retryable' and jsonb_typeof(v_options -> 'retryable') <> 'boolean' then
    perform queue._invalid('retryable must be true or false', 'Pass a JSON boolean.');
  elsif v_options -> 'retryable' = 'false' and v_options ?| '{retry_at,retry_in}'::text[] then
    perform queue._invalid('a failure that is not retryable can''t have a retry time',
      'Leave out retryable, or the time.');
  elsif v_options ? 'outcome' and v_options -> 'outcome' <> '"timed_out"' then
    perform queue._invalid('outcome is not one of its values',
      'Allowed: timed_out. Leave it out for any other failure.',
      'outcome: ' || left(v_options ->> 'outcome', 200));
  elsif v_options ? 'reason'
    and (jsonb_typeof(v_options -> 'reason') <> 'string' or octet_length(v_options ->> 'reason') > 1000) then
    perform queue._invalid('reason must be text', 'Pass a JSON string of at most 1,000 bytes.');
  end if;
  perform queue._check_changes('options', v_options - '{retryable,reason,outcome}'::text[]);
end $$;

-- Returns the changes that a retry makes (retry_at or retry_in, priority, queue, lock), without nulls.
-- Raises: 22023 for an unknown key or an invalid value.
create or replace function queue._check_changes(what text, changes jsonb)
returns jsonb language plpgsql stable parallel unsafe security invoker as $$
declare
  v_changes jsonb := jsonb_strip_nulls(changes);
begin
  perform queue._check_keys(what, changes, array['retry_at', 'retry_in', 'priority', 'queue', 'lock']);
  if v_changes ?& '{retry_at,retry_in}'::text[] then
    perform queue._invalid('retry_at and retry_in exclude each other', 'Give one of the two.');
  end if;
  perform queue._check_types(what, v_changes);
  if v_changes -> 'lock' <> '""' then
    perform queue._check_name('lock', v_changes ->> 'lock');
  end if;
  if v_changes ? 'queue' then
    perform queue._check_queue(v_changes ->> 'queue');
  end if;
  perform queue._interval('retry_in', v_changes -> 'retry_in');
  perform queue._check_moment('retry_at', queue._timestamp('retry_at', v_changes -> 'retry_at'));
  return v_changes;
end $$;

-- Keeps details of an attempt up to 100 kB; of larger ones the size and the beginning, of huge ones (more
-- than 16 MB) only a size.
create or replace function queue._truncate_details(p_details jsonb)
returns jsonb language plpgsql immutable parallel unsafe security invoker as $$
declare
  v_size bigint;
begin
  if pg_column_size(p_details) > 16 then
    v_size := queue._text_size(p_details, 16777216);
  end if;
  if v_size > 100000 then
    return jsonb_strip_nulls(jsonb_build_object('truncated', v_size,
      'begins', case when v_size <= 16777216 then left(p_details::text, 10000) end));
  end if;
  return p_details;
end $$;

-- Resets jobs' counters, and those of their steps, for a manual retry at a time (NULL: at once; a job that
-- has never started keeps its own).
-- Locks: the caller holds the rows of queue.active_job, or the admission lock if there are none.
create or replace function queue._reset_counters(p_ids bigint[], p_at timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.job_override s
  set failures = 0, crashes = 0, progress = 0, ignores_needs = false, is_yielded = false,
    scheduled_at = coalesce(p_at, case when s.claims = 0 then s.scheduled_at
      when j.scheduled_at > clock_timestamp() then '-infinity' end)
  from queue.job j
  where s.id = any (p_ids) and j.id = s.id;
  update queue.step s set failures = null, failed_at = null, error = null
  where s.job_id = any (p_ids) and s.failures is not null and s.finished_at is null;
end $$;
