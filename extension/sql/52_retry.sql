-- What becomes of an attempt that did not succeed: retry policies, yields, releases, aborts, crashes.

-- Ends the claim with an outcome other than succeeded and returns the job's new state. Beside the
-- outcomes of _check_outcome there is one of our own: retried (by queue.retry with force). crashed comes
-- from reap, or, then with a claim, from a worker that lives: what died there ran this job only.
-- What a retry changes (queue, priority, lock) is handed over, not written here: whoever settles gives
-- back first what the claim held under the old names.
-- Locks: the claim's row of queue.live, and by it the job's row of queue.job_state; ADM by try with p_settle.
-- Raises: QJ001, QJ002, QJ005; the outcome has been checked.
create or replace function queue._end_attempt(p_outcome jsonb, p_id bigint, p_claim bigint, p_settle boolean)
returns text language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_kind text := p_outcome ->> 'outcome';
  v_label text;
  v_error text := left(coalesce(p_outcome ->> 'error', p_outcome ->> 'message'), 10000);
  v_options jsonb := jsonb_strip_nulls(coalesce(nullif(p_outcome -> 'options', 'null'), '{}'));
  v_live record;
  v_job record;
  v_state record;
  v_is_alone boolean;
  v_limit integer;
  v_at timestamptz;
  v_payload jsonb;
  v_final text;
  v_reason text;
begin
  delete from queue.live v where v.id = p_id and v.claim = p_claim
  returning v.attempt, v.flags, v.claimed_at, v.worker_id into v_live;
  if not found then
    perform queue._refuse(p_id, p_claim);
  end if;
  select j.options, j.scheduled_at, coalesce(nullif(j.options -> 'retry', 'null'), nullif(t.defaults -> 'retry', 'null'), '{}') as policy into v_job
  from queue.job j left join queue.task t on t.name = j.task where j.id = p_id;
  select coalesce(max(s.failures), 0) as failures, coalesce(max(s.crashes), 0) as crashes, coalesce(max(s.progress), 0) as progress
  into v_state from queue.job_state s where s.id = p_id;
  v_label := case v_kind when 'retry_later' then 'yielded' when 'retried' then 'aborted' else coalesce(v_options ->> 'outcome', v_kind) end;
  if v_kind <> 'retried' and v_live.flags & 32 <> 0 and exists (select from queue.abort a where a.id = p_id and a.claim = p_claim) then
    v_label := case v_kind when 'crashed' then 'crashed' else 'aborted' end;
    v_kind := 'aborted';
  end if;
  case v_kind
    when 'failed' then
      v_limit := queue._max_attempts(v_job.policy, v_options);
      if v_options -> 'retryable' = 'false' or v_state.failures + 1 >= v_limit then
        v_final := 'failed';
        v_reason := coalesce(v_options ->> 'reason', case when v_options -> 'retryable' = 'false' then 'not_retryable' else 'attempts' end);
      else
        v_at := coalesce(queue._timestamp('retry_at', v_options -> 'retry_at'),
                         v_now + coalesce(queue._interval('retry_in', v_options -> 'retry_in'), queue.backoff(v_job.policy, v_state.failures + 1)));
        v_payload := nullif(jsonb_build_object('change', v_options - '{retryable,retry_at,retry_in,reason,outcome}'::text[]), '{"change": {}}');
      end if;
    when 'retry_later' then
      if v_state.progress + 1 > (case when v_job.options -> 'max_progress' = 'null' then null
                                      else coalesce((v_job.options ->> 'max_progress')::integer, 100) end) then
        v_final := 'failed';
        v_reason := 'max_progress';
      else
        v_at := queue._timestamp('at', p_outcome -> 'at');
        v_payload := queue._check_yield(p_id, p_outcome -> 'needs');
      end if;
    when 'aborted' then
      v_final := 'cancelled';
      v_reason := 'aborted';
    when 'crashed' then
      v_is_alone := p_outcome ? 'claim' or v_live.flags & (16 | 1024) <> 0 or exists (select from queue.lease l where l.id = p_id and l.claim = p_claim and l.is_own);
      v_final := case when v_job.policy ->> 'on_crash' = 'fail'
                        or v_is_alone and v_state.crashes + 1 >= case when v_job.policy -> 'max_crashes' = 'null' then null
                                                                      else coalesce((v_job.policy ->> 'max_crashes')::integer, 3) end
                      then 'failed' end;
      v_reason := case when v_job.policy ->> 'on_crash' = 'fail' then 'crashed' else 'crash_loop' end;
    else null;
  end case;
  if v_final is null and v_kind <> 'retried' and v_live.flags & 64 <> 0
    and exists (select from queue.expiry e where e.id = p_id and e.at <= v_now) then
    v_final := 'cancelled';
    v_reason := 'expired';
  end if;
  -- one that was rescheduled to a time before its own does not go back to that
  v_at := coalesce(v_at, case when v_job.scheduled_at > v_now then '-infinity'::timestamptz end);
  insert into queue.attempt (job_id, claim, attempt, worker_id, started_at, finished_at, outcome, error, details)
  values (p_id, p_claim, v_live.attempt, v_live.worker_id, v_live.claimed_at, v_now, v_label, v_error,
          queue._cut_details(nullif(p_outcome -> 'details', 'null')));
  insert into queue.job_state as s (id, attempts, claims, failures, crashes, progress, scheduled_at, started_at, error)
  values (p_id, v_live.attempt - case when v_kind = 'released' then 1 else 0 end, 1, case when v_kind = 'failed' then 1 else 0 end,
          case when v_label = 'crashed' then 1 else 0 end, case when v_kind = 'retry_later' then 1 else 0 end, v_at,
          case when v_kind <> 'released' then v_live.claimed_at end, case when v_kind not in ('retry_later', 'released', 'retried') then v_error end)
  on conflict on constraint job_state_pkey do update
    set (attempts, claims, failures, crashes, progress, scheduled_at, started_at, error)
      = (excluded.attempts, s.claims + 1, s.failures + excluded.failures, s.crashes + excluded.crashes, s.progress + excluded.progress,
         case when v_kind = 'released' then s.scheduled_at else excluded.scheduled_at end, coalesce(excluded.started_at, s.started_at),
         coalesce(excluded.error, s.error));
  if v_final is not null then
    insert into queue.finished (id, finished_at, started_at, worker_id, attempts, state, reason, error)
    values (p_id, v_now, v_live.claimed_at, v_live.worker_id, v_live.attempt, v_final, v_reason, v_error);
    perform queue._close(array[p_id], array[v_live.flags]);
    perform queue._tell_waiters(array[p_id]);
    perform queue._hand_over(array[p_id], array[v_live.flags], 'ended', p_settle);
    return v_final;
  end if;
  if v_live.flags & 128 <> 0 then
    delete from queue.lease l where l.id = p_id;
  end if;
  if v_kind = 'retried' then
    perform queue._start_over(array[p_id]);
  end if;
  perform queue._hand_over(array[p_id], array[v_live.flags], 'again', p_settle, v_payload);
  return coalesce(case when v_kind = 'retry_later' then queue._yield_state(p_id, v_payload) end,
                  case when v_at > v_now then 'scheduled' else 'ready' end);
end $$;

-- After how many failures a job has failed; NULL for never. Without a policy after the first, unless the
-- handler says when to run it again.
create or replace function queue._max_attempts(p_policy jsonb, p_options jsonb)
returns integer language plpgsql immutable parallel safe security invoker as $$
begin
  return case
    when p_options -> 'retryable' = 'true' then null
    when p_policy ? 'max_attempts' then (p_policy ->> 'max_attempts')::integer
    when p_policy ?| '{backoff,base,factor,cap,first,wait,linear_wait,exponential_wait}'::text[] or p_options ?| '{retry_at,retry_in}'::text[] then null
    else 1 end;
end $$;

-- Details of an attempt up to 100 kB; of larger ones their size and how they begin, of huge ones (16 MB) that they were.
create or replace function queue._cut_details(p_details jsonb)
returns jsonb language plpgsql immutable parallel unsafe security invoker as $$
declare
  v_size bigint;
begin
  if pg_column_size(p_details) > 16 then
    v_size := queue._text_size(p_details, 16777216);
  end if;
  if v_size > 100000 then
    return jsonb_strip_nulls(jsonb_build_object('truncated', v_size, 'begins', case when v_size <= 16777216 then left(p_details::text, 10000) end));
  end if;
  return p_details;
end $$;

-- Counts anew what has been counted of jobs: a manual retry.
-- Locks: the caller holds the rows of queue.live, or ADM where there are none.
create or replace function queue._start_over(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  update queue.job_state s
  set failures = 0, crashes = 0, progress = 0, ignores_needs = false, is_yielded = false,
    scheduled_at = case when s.claims = 0 then s.scheduled_at when j.scheduled_at > clock_timestamp() then '-infinity' end
  from queue.job j
  where s.id = any (p_ids) and j.id = s.id;
end $$;

-- Writes what fail changed on retry: queue and priority. _change_lock changes the lock, once the job is in a gate.
-- Locks: the caller holds ADM; the job is in no gate.
create or replace function queue._change_on_retry(p_id bigint, p_change jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  update queue.job_state s
  set queue = coalesce(p_change ->> 'queue', s.queue), priority = coalesce((p_change ->> 'priority')::integer, s.priority)
  where s.id = p_id;
end $$;

-- Raises: 22023 unless they are options of queue.fail.
create or replace function queue._check_fail_options(options jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
declare
  v_options jsonb := jsonb_strip_nulls(options);
begin
  perform queue._check_keys('options', options, array['retryable', 'retry_at', 'retry_in', 'priority', 'queue', 'lock', 'reason', 'outcome']);
  if v_options ? 'retryable' and jsonb_typeof(v_options -> 'retryable') <> 'boolean' then
    perform queue._invalid('retryable must be true or false', 'Pass a JSON boolean.');
  elsif v_options ?& '{retry_at,retry_in}'::text[] then
    perform queue._invalid('retry_at and retry_in exclude each other', 'Give one of the two.');
  elsif v_options -> 'retryable' = 'false' and v_options ?| '{retry_at,retry_in}'::text[] then
    perform queue._invalid('a failure that is not retryable has no time of a retry', 'Leave out retryable, or the time.');
  elsif v_options ? 'outcome' and v_options -> 'outcome' <> '"timed_out"' then
    perform queue._invalid('outcome is not one of its values', 'Allowed: timed_out. Leave it out for any other failure.',
                           'outcome: ' || left(v_options ->> 'outcome', 200));
  elsif v_options ? 'reason' and (jsonb_typeof(v_options -> 'reason') <> 'string' or octet_length(v_options ->> 'reason') > 1000) then
    perform queue._invalid('reason must be text', 'Pass a JSON string of at most 1,000 bytes.');
  elsif v_options ? 'lock' and v_options -> 'lock' <> '""' then
    perform queue._check_name('lock', v_options ->> 'lock');
  end if;
  perform queue._check_types('options', v_options);
  if v_options ? 'queue' then
    perform queue._check_queue(v_options ->> 'queue');
  end if;
  perform queue._interval('retry_in', v_options -> 'retry_in');
  perform queue._check_moment('retry_at', queue._timestamp('retry_at', v_options -> 'retry_at'));
end $$;

-- Raises: 22023 unless it is a retry policy.
create or replace function queue._check_retry(policy jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
declare
  v_item record;
begin
  perform queue._check_keys('retry', policy, array['max_attempts', 'backoff', 'base', 'factor', 'cap', 'first', 'jitter', 'on_crash',
    'max_crashes', 'wait', 'linear_wait', 'exponential_wait']);
  for v_item in select e.key, e.value, jsonb_typeof(e.value) as type, e.value #>> '{}' as text from jsonb_each(policy) e where e.value <> 'null' loop
    case
      when v_item.key in ('max_attempts', 'max_crashes') then
        if v_item.type <> 'number' or v_item.text !~ '^[1-9][0-9]{0,8}$' then
          perform queue._invalid(format('retry: %s must be a whole number of at least 1, or null', v_item.key), 'null stands for no limit.',
                                 'value: ' || left(v_item.text, 200));
        end if;
      when v_item.key = 'backoff' then
        if v_item.type <> 'string' or v_item.text not in ('constant', 'linear', 'exponential') then
          perform queue._invalid('retry: backoff is not one of its values', 'Allowed: constant, linear, exponential.', 'value: ' || left(v_item.text, 200));
        end if;
      when v_item.key = 'on_crash' then
        if v_item.type <> 'string' or v_item.text not in ('retry', 'fail') then
          perform queue._invalid('retry: on_crash is not one of its values', 'Allowed: retry, fail.', 'value: ' || left(v_item.text, 200));
        end if;
      when v_item.key in ('base', 'cap', 'first') then
        perform queue._interval('retry: ' || v_item.key, v_item.value);
      else
        if v_item.type <> 'number' or v_item.value < '0' or v_item.key = 'jitter' and v_item.value > '1' then
          perform queue._invalid(format('retry: %s must be a number', v_item.key), 'jitter lies between 0 and 1, the others at or above 0.',
                                 'value: ' || left(v_item.text, 200));
        end if;
    end case;
  end loop;
  if jsonb_strip_nulls(policy) ?| '{wait,linear_wait,exponential_wait}' and jsonb_strip_nulls(policy) ?| '{backoff,base,factor,cap,first}' then
    perform queue._invalid('retry: two kinds of policy are mixed', 'Use wait, linear_wait, exponential_wait, or backoff with base, factor, cap, first.');
  end if;
end $$;

-- With n failures before this one (n = failures - 1):
--   wait + linear_wait * n + exponential_wait ^ (n + 1) seconds (as Procrastinate's RetryStrategy), or
--   constant: base; linear: base * k; exponential: base * factor ^ (k - 1), where k counts the failures,
--   or with `first` those after the first. cap bounds every delay.
-- Raises: 22023.
create or replace function queue.backoff(policy jsonb, failures integer)
returns interval language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_policy jsonb := jsonb_strip_nulls(coalesce(backoff.policy, '{}'));
  v_seconds double precision;
  v_k integer := backoff.failures;
begin
  perform queue._check_retry(v_policy);
  if backoff.failures is null or backoff.failures < 1 then
    perform queue._invalid('failures must be at least 1', 'It counts the failure that the delay follows.');
  end if;
  if v_policy ?| '{wait,linear_wait,exponential_wait}' then
    v_seconds := queue._number(v_policy -> 'wait') + queue._number(v_policy -> 'linear_wait') * (v_k - 1)
      + case when v_policy ? 'exponential_wait' then queue._grow(1, queue._number(v_policy -> 'exponential_wait'), v_k) else 0 end;
  elsif v_policy ? 'first' and v_k = 1 then
    v_seconds := queue._seconds(v_policy -> 'first');
  else
    v_k := v_k - case when v_policy ? 'first' then 1 else 0 end;
    v_seconds := case coalesce(v_policy ->> 'backoff', 'constant')
      when 'constant' then queue._seconds(v_policy -> 'base')
      when 'linear' then queue._seconds(v_policy -> 'base') * v_k
      else queue._grow(queue._seconds(v_policy -> 'base'), case when v_policy ? 'factor' then queue._number(v_policy -> 'factor') else 2 end, v_k - 1) end;
  end if;
  v_seconds := least(v_seconds, case when v_policy ? 'cap' then queue._seconds(v_policy -> 'cap') end, 315360000);
  if v_policy ? 'jitter' then
    v_seconds := v_seconds * (1 - queue._number(v_policy -> 'jitter') * random());
  end if;
  return make_interval(secs => v_seconds);
end $$;
comment on function queue.backoff(jsonb, integer) is
  'The delay that a retry policy puts after the failures-th failure. jitter shortens it by up to that share. At most 10 years.';

-- A policy's number as far as it matters: below a billionth 0, at most ten years of seconds.
create or replace function queue._number(p_value jsonb)
returns double precision language plpgsql immutable parallel safe security invoker as $$
begin
  return case when p_value > '0.000000001' then least(p_value::numeric, 315360000)::double precision else 0 end;
end $$;

-- A policy's interval in seconds, 0 when there is none.
create or replace function queue._seconds(p_value jsonb)
returns double precision language plpgsql stable parallel unsafe security invoker as $$
begin
  return least(coalesce(extract(epoch from queue._interval('interval', p_value)), 0), 315360000)::double precision;
end $$;

-- base * factor ^ n, at most ten years in seconds, and 0 below a nanosecond: nothing over- or underflows.
create or replace function queue._grow(p_base double precision, p_factor double precision, p_n integer)
returns double precision language plpgsql immutable parallel safe security invoker as $$
declare
  v_log double precision;
begin
  if p_base = 0 or p_n = 0 then
    return p_base;
  elsif p_factor = 0 then
    return 0;
  end if;
  v_log := ln(p_base) + p_n * ln(p_factor);
  return case when v_log > 20 then 315360000 when v_log < -20 then 0 else p_base * p_factor ^ p_n end;
end $$;
