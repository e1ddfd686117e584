-- What becomes of an attempt that did not succeed: retry policies, yields, releases, aborts.

-- Ends the claim with an outcome other than succeeded and returns the job's new state.
-- Locks: the claim's row of queue.live; ADM by try with p_settle.
-- Raises: 22023, QJ001, QJ002, QJ005.
create or replace function queue._end_attempt(p_outcome jsonb, p_id bigint, p_claim bigint, p_settle boolean)
returns text language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_live record;
  v_job record;
  v_state record;
  v_now timestamptz := clock_timestamp();
  v_kind text := p_outcome ->> 'outcome';
  v_options jsonb := coalesce(nullif(p_outcome -> 'options', 'null'), '{}');
  v_policy jsonb;
  v_at timestamptz;
  v_reason text;
  v_final text;
  v_limit integer;
  v_payload jsonb;
begin
  delete from queue.live v where v.id = p_id and v.claim = p_claim
  returning v.id, v.claim, v.attempt, v.flags, v.claimed_at, v.worker_id into v_live;
  if not found then
    perform queue._refuse(p_id, p_claim);
  end if;
  select j.options, j.task, j.queue, j.lock, t.defaults into v_job
  from queue.job j left join queue.task t on t.name = j.task where j.id = p_id;
  select s.failures, s.crashes, s.progress, s.lock into v_state from queue.job_state s where s.id = p_id;
  if v_kind in ('failed', 'retry_later') and exists (select from queue.abort a where a.id = p_id and a.claim = p_claim) then
    v_kind := 'aborted';
  end if;
  if v_kind = 'failed' then
    perform queue._check_keys('options', v_options, array['retryable', 'retry_at', 'retry_in', 'priority', 'queue', 'lock', 'reason', 'outcome']);
    v_policy := coalesce(v_job.options -> 'retry', v_job.defaults -> 'retry', '{}');
    v_limit := case when v_policy ? 'max_attempts' then (v_policy ->> 'max_attempts')::integer
                    when v_policy = '{}' then 1 end;
    if v_options -> 'retryable' = 'false' or coalesce(v_state.failures, 0) + 1 >= v_limit then
      v_final := 'failed';
      v_reason := coalesce(v_options ->> 'reason', case when v_options -> 'retryable' = 'false' then 'not_retryable' else 'attempts' end);
    else
      v_at := coalesce(queue._timestamp('retry_at', v_options -> 'retry_at'), v_now + queue._interval('retry_in', v_options -> 'retry_in'),
                       v_now + queue.backoff(v_policy, coalesce(v_state.failures, 0) + 1));
    end if;
  elsif v_kind = 'retry_later' then
    v_limit := case when v_job.options -> 'max_progress' = 'null' then null else coalesce((v_job.options ->> 'max_progress')::integer, 100) end;
    if coalesce(v_state.progress, 0) + 1 > v_limit then
      v_final := 'failed';
      v_reason := 'max_progress';
    else
      v_at := queue._timestamp('at', p_outcome -> 'at');
      v_payload := queue._check_yield(p_id, p_outcome -> 'needs', v_live.claimed_at);
    end if;
  elsif v_kind = 'aborted' then
    v_final := 'cancelled';
    v_reason := 'aborted';
  end if;
  insert into queue.attempt (job_id, claim, attempt, worker_id, started_at, finished_at, outcome, error, details)
  values (p_id, p_claim, v_live.attempt, v_live.worker_id, v_live.claimed_at, v_now,
          case v_kind when 'retry_later' then 'yielded' else coalesce(v_options ->> 'outcome', v_kind) end,
          coalesce(p_outcome ->> 'error', p_outcome ->> 'message'), p_outcome -> 'details');
  insert into queue.job_state as s (id, attempts, claims, failures, progress, scheduled_at, priority, queue, lock, error)
  values (p_id, v_live.attempt - case when v_kind = 'released' then 1 else 0 end, 1, case when v_kind = 'failed' then 1 else 0 end,
          case when v_kind = 'retry_later' then 1 else 0 end, v_at, (v_options ->> 'priority')::integer, v_options ->> 'queue',
          v_options ->> 'lock', p_outcome ->> 'error')
  on conflict on constraint job_state_pkey do update
    set (attempts, claims, failures, progress, scheduled_at, priority, queue, lock, error)
      = (excluded.attempts, s.claims + 1, s.failures + excluded.failures, s.progress + excluded.progress,
         case when v_kind = 'released' then s.scheduled_at else excluded.scheduled_at end, coalesce(excluded.priority, s.priority),
         coalesce(excluded.queue, s.queue), coalesce(excluded.lock, s.lock), coalesce(excluded.error, s.error));
  if v_options ? 'lock' and v_final is null then
    v_payload := jsonb_build_object('old_lock', coalesce(v_state.lock, v_job.lock, ''));
  end if;
  if v_final is not null then
    insert into queue.finished (id, finished_at, started_at, worker_id, attempts, state, reason, error)
    values (p_id, v_now, v_live.claimed_at, v_live.worker_id, v_live.attempt, v_final, v_reason, coalesce(p_outcome ->> 'error', p_outcome ->> 'message'));
    perform queue._close(array[p_id], array[v_live.flags | 64 | 256 | 128]::smallint[], v_now);
    perform queue._hand_over(array[p_id], array[v_live.flags], 'ended', null, p_settle);
    return v_final;
  end if;
  delete from queue.lease l where l.id = p_id;
  delete from queue.abort a where a.id = p_id;
  perform queue._hand_over(array[p_id], array[v_live.flags], 'again', v_at, p_settle, v_payload);
  return case when v_at > v_now then 'scheduled' else 'ready' end;
end $$;

-- A claim has died with its worker or its lease: counts the crash; ready again at once, or failed.
-- A job whose claim was not alone (it had not crashed before, and had no lease of its own) is never
-- failed for a crash loop: another job may have killed the process.
create or replace function queue._crash(p_id bigint, p_claim bigint)
returns text language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_live record;
  v_policy jsonb;
  v_crashes integer;
  v_alone boolean;
  v_final text;
  v_reason text;
  v_now timestamptz := clock_timestamp();
begin
  delete from queue.live v where v.id = p_id and v.claim = p_claim
  returning v.id, v.attempt, v.flags, v.claimed_at, v.worker_id into v_live;
  if not found then
    perform queue._refuse(p_id, p_claim);
  end if;
  v_alone := v_live.flags & 1024 <> 0 or exists (select from queue.lease l where l.id = p_id and l.claim = p_claim and l.is_own);
  select coalesce(j.options -> 'retry', t.defaults -> 'retry', '{}') into v_policy
  from queue.job j left join queue.task t on t.name = j.task where j.id = p_id;
  insert into queue.job_state as s (id, attempts, claims, crashes, error)
  values (p_id, v_live.attempt, 1, 1, 'crashed')
  on conflict on constraint job_state_pkey do update
    set (attempts, claims, crashes, error, scheduled_at) = (excluded.attempts, s.claims + 1, s.crashes + 1, excluded.error, null)
  returning s.crashes into v_crashes;
  insert into queue.attempt (job_id, claim, attempt, worker_id, started_at, finished_at, outcome, error)
  values (p_id, p_claim, v_live.attempt, v_live.worker_id, v_live.claimed_at, v_now, 'crashed', 'the worker or its lease died');
  if exists (select from queue.abort a where a.id = p_id and a.claim = p_claim) then
    v_final := 'cancelled';
    v_reason := 'aborted';
  elsif v_policy ->> 'on_crash' = 'fail' then
    v_final := 'failed';
    v_reason := 'crashed';
  elsif v_alone and v_policy -> 'max_crashes' is distinct from 'null' and v_crashes >= coalesce((v_policy ->> 'max_crashes')::integer, 3) then
    v_final := 'failed';
    v_reason := 'crash_loop';
  end if;
  if v_final is not null then
    insert into queue.finished (id, finished_at, started_at, worker_id, attempts, state, reason, error)
    values (p_id, v_now, v_live.claimed_at, v_live.worker_id, v_live.attempt, v_final, v_reason, 'crashed');
    perform queue._close(array[p_id], array[v_live.flags | 64 | 256 | 128]::smallint[], v_now);
    perform queue._hand_over(array[p_id], array[v_live.flags], 'ended', null, true);
  else
    delete from queue.lease l where l.id = p_id;
    delete from queue.abort a where a.id = p_id;
    perform queue._hand_over(array[p_id], array[v_live.flags], 'again', null, true);
  end if;
  return coalesce(v_final, 'ready');
end $$;

-- Raises: 22023 unless it is a retry policy.
create or replace function queue._check_retry(policy jsonb)
returns void language plpgsql stable parallel safe security invoker as $$
declare
  v_item record;
begin
  perform queue._check_keys('retry', policy, array['max_attempts', 'backoff', 'base', 'factor', 'cap', 'first', 'jitter', 'on_crash',
    'max_crashes', 'wait', 'linear_wait', 'exponential_wait']);
  for v_item in select e.key, e.value, jsonb_typeof(e.value) as type, e.value #>> '{}' as text from jsonb_each(policy) e loop
    case
      when v_item.key in ('max_attempts', 'max_crashes') then
        if v_item.type <> 'null' and (v_item.type <> 'number' or v_item.text !~ '^[1-9][0-9]{0,8}$') then
          perform queue._invalid(format('retry: %s must be a whole number of at least 1, or null', v_item.key), 'null stands for no limit.', 'value: ' || v_item.value::text);
        end if;
      when v_item.key = 'backoff' then
        if v_item.type <> 'string' or v_item.text not in ('constant', 'linear', 'exponential') then
          perform queue._invalid('retry: backoff is not one of its values', 'Allowed: constant, linear, exponential.', 'value: ' || v_item.value::text);
        end if;
      when v_item.key = 'on_crash' then
        if v_item.type <> 'string' or v_item.text not in ('retry', 'fail') then
          perform queue._invalid('retry: on_crash is not one of its values', 'Allowed: retry, fail.', 'value: ' || v_item.value::text);
        end if;
      when v_item.key in ('base', 'cap', 'first') then
        perform queue._interval('retry: ' || v_item.key, v_item.value);
      else
        if v_item.type <> 'number' or v_item.value::numeric < 0 or v_item.key = 'jitter' and v_item.value::numeric > 1 then
          perform queue._invalid(format('retry: %s must be a number', v_item.key), 'jitter lies between 0 and 1, the others at or above 0.', 'value: ' || v_item.value::text);
        end if;
    end case;
  end loop;
  if policy ?| '{wait,linear_wait,exponential_wait}' and policy ?| '{backoff,base,factor,cap,first}' then
    perform queue._invalid('retry: two kinds of policy are mixed', 'Use wait, linear_wait, exponential_wait, or backoff with base, factor, cap, first.');
  end if;
end $$;

-- With n failures before this one (n = failures - 1):
--   wait + linear_wait * n + exponential_wait ^ (n + 1) seconds (as Procrastinate's RetryStrategy), or
--   constant: base; linear: base * k; exponential: base * factor ^ (k - 1), at most cap, where k counts
--   the failures, or with `first` those after the first.
-- Raises: 22023.
create or replace function queue.backoff(policy jsonb, failures integer)
returns interval language plpgsql volatile parallel safe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_max constant double precision := 315360000;  -- ten years
  v_seconds double precision;
  v_k integer := backoff.failures;
  v_base double precision;
  v_cap double precision;
begin
  perform queue._check_retry(coalesce(backoff.policy, '{}'));
  if backoff.failures is null or backoff.failures < 1 then
    perform queue._invalid('failures must be at least 1', 'It counts the failure that the delay follows.');
  end if;
  if backoff.policy ?| '{wait,linear_wait,exponential_wait}' then
    v_seconds := coalesce((policy ->> 'wait')::double precision, 0) + coalesce((policy ->> 'linear_wait')::double precision, 0) * (v_k - 1);
    v_base := coalesce((policy ->> 'exponential_wait')::double precision, 0);
    if v_base > 0 then
      v_seconds := v_seconds + case when v_k * ln(v_base) > ln(v_max) then v_max else v_base ^ v_k end;
    end if;
  elsif policy ? 'first' and v_k = 1 then
    v_seconds := extract(epoch from queue._interval('first', policy -> 'first'));
  else
    if policy ? 'first' then
      v_k := v_k - 1;
    end if;
    v_base := coalesce(extract(epoch from queue._interval('base', policy -> 'base')), 0);
    v_cap := extract(epoch from queue._interval('cap', policy -> 'cap'));
    v_seconds := case coalesce(policy ->> 'backoff', 'constant')
      when 'constant' then v_base
      when 'linear' then v_base * v_k
      else queue._grow(v_base, coalesce((policy ->> 'factor')::double precision, 2), v_k - 1) end;
    v_seconds := least(v_seconds, v_cap);
  end if;
  if policy ? 'jitter' then
    v_seconds := v_seconds * (1 - (policy ->> 'jitter')::double precision * random());
  end if;
  return make_interval(secs => least(v_seconds, v_max));
end $$;
comment on function queue.backoff(jsonb, integer) is
  'The delay that a retry policy puts after the failures-th failure. jitter shortens it by up to that share. At most 10 years.';

-- base * factor ^ n, at most ten years in seconds, without overflow.
create or replace function queue._grow(p_base double precision, p_factor double precision, p_n integer)
returns double precision language plpgsql immutable parallel safe security invoker as $$
begin
  if p_base = 0 or p_factor = 0 and p_n > 0 then
    return 0;
  elsif p_factor > 0 and ln(p_base) + p_n * ln(p_factor) > ln(315360000::double precision) then
    return 315360000;
  elsif p_factor > 0 and ln(p_base) + p_n * ln(p_factor) < -15 then
    return 0;
  end if;
  return p_base * p_factor ^ p_n;
end $$;
