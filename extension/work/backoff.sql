-- How long a failed job waits for its next attempt. _judge_attempt (work/attempts.sql) decides whether there
-- is one, and when.
-- Tests: work/attempts.sql.

-- With n failures before this one (n = failures - 1):
--   wait + linear_wait * n + exponential_wait ^ (n + 1) seconds (as Procrastinate's RetryStrategy), or
--   constant: base; linear: base * k; exponential: base * factor ^ (k - 1), where k counts the failures, or
--     with `first` the failures after the first. cap limits every delay.
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
    perform queue._invalid('failures must be at least 1', 'It includes the failure that the delay follows.');
  end if;
  if v_policy ?| '{wait,linear_wait,exponential_wait}' then
    v_seconds := queue._number(v_policy -> 'wait') + queue._number(v_policy -> 'linear_wait') * (v_k - 1)
      + case when v_policy ? 'exponential_wait' then queue._exponential_delay(1,
        queue._number(v_policy -> 'exponential_wait'), v_k) else 0 end;
  elsif v_policy ? 'first' and v_k = 1 then
    v_seconds := queue._seconds(v_policy -> 'first');
  else
    v_k := v_k - case when v_policy ? 'first' then 1 else 0 end;
    v_seconds := case coalesce(v_policy ->> 'backoff', 'constant')
      when 'constant' then queue._seconds(v_policy -> 'base')
      when 'linear' then queue._seconds(v_policy -> 'base') * v_k
      else queue._exponential_delay(queue._seconds(v_policy -> 'base'), case
        when v_policy ? 'factor' then queue._number(v_policy -> 'factor') else 2 end, v_k - 1) end;
  end if;
  v_seconds := least(v_seconds, case when v_policy ? 'cap' then queue._seconds(v_policy -> 'cap') end,
    {{ten_years}});
  if v_policy ? 'jitter' then
    v_seconds := v_seconds * (1 - queue._number(v_policy -> 'jitter') * random());
  end if;
  return make_interval(secs => v_seconds);
end $$;
comment on function queue.backoff(jsonb, integer) is
  'Returns the delay that a retry policy sets after the failures-th failure, at most 10 years. jitter'
    ' shortens it by up to that share.';

-- The number of failures at which a job fails; NULL for never. Without a policy it is the first, unless the
-- handler says when to run the job again.
create or replace function queue._max_attempts(p_policy jsonb, p_options jsonb)
returns integer language plpgsql immutable parallel safe security invoker as $$
begin
  return case
    when p_options -> 'retryable' = 'true' then null
    when p_policy ? 'max_attempts' then (p_policy ->> 'max_attempts')::integer
    when p_policy ?| '{backoff,base,factor,cap,first,wait,linear_wait,exponential_wait}'::text[]
      or p_options ?| '{retry_at,retry_in}'::text[] then null
    else 1 end;
end $$;

-- A policy's interval in seconds, 0 if it has none.
create or replace function queue._seconds(p_value jsonb)
returns double precision language plpgsql stable parallel unsafe security invoker as $$
begin
  return least(coalesce(extract(epoch from queue._interval('interval', p_value)), 0),
    {{ten_years}})::double precision;
end $$;

-- A policy's number within useful bounds: 0 if below a billionth, at most ten years of seconds.
create or replace function queue._number(p_value jsonb)
returns double precision language plpgsql immutable parallel safe security invoker as $$
begin
  return case when p_value > '0.000000001' then least(p_value::numeric, {{ten_years}})::double precision
    else 0 end;
end $$;

-- base * factor ^ n, at most ten years in seconds, and 0 below a nanosecond: neither overflows nor
-- underflows.
create or replace function queue._exponential_delay(
  p_base double precision, p_factor double precision, p_n integer)
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
  return case when v_log > 20 then {{ten_years}} when v_log < -20 then 0 else p_base * p_factor ^ p_n end;
end $$;
