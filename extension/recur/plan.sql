-- Planning: which runs of a schedule are due, and what happens to each, also to those that were missed while
-- no worker or server was up. recur/schedules.sql says why each run happens at most once.

-- Says what to do at p_now with the runs from p_first on. skips, skipped: those to skip, and why; it has only
-- the first 10, and the last of these stands for all up to skipped_to. runs: those to run, at most 100.
-- next_run_at: the next one after these.
create or replace function queue._plan_runs(
  p_parsed bigint[], p_timezone text, p_first timestamptz, p_now timestamptz, p_catch_up text,
  p_max_delay interval,
  out skips timestamptz[], out skipped text, out skipped_to timestamptz, out runs timestamptz[],
  out next_run_at timestamptz)
language plpgsql stable parallel safe security invoker as $$
declare
  -- With catch_up none, the last run still counts as in time if a busy worker may not have reached it.
  v_grace constant interval := case when p_catch_up = 'none' then interval '15 s' end;
  v_limit constant timestamptz := p_now - least(p_max_delay, v_grace);
  v_run_at timestamptz := p_first;
  v_end timestamptz;
begin
  skips := '{}';
  runs := '{}';
  if p_first > p_now then
    -- The clock was set back.
    next_run_at := p_first;
    return;
  end if;
  next_run_at := queue._cron_next(p_parsed, p_timezone, p_first);
  if coalesce(next_run_at, 'infinity') > p_now and coalesce(v_limit, '-infinity') <= p_first then
    runs := array[p_first];
    return;
  end if;
  -- Runs before v_run_at are skipped.
  if p_catch_up <> 'all' and next_run_at <= p_now then
    skipped := 'missed';
    v_run_at := queue._last_run(p_parsed, p_timezone, next_run_at, p_now);
    next_run_at := queue._cron_next(p_parsed, p_timezone, v_run_at);
  end if;
  if v_run_at < v_limit then
    skipped := case when coalesce(p_max_delay >= v_grace, p_max_delay is null) then 'missed'
      else 'max_delay' end;
    v_run_at := case when p_catch_up <> 'all' then next_run_at else queue._cron_next(p_parsed, p_timezone,
      v_limit - interval '1 us') end;
  end if;
  v_end := coalesce(v_run_at, 'infinity');
  v_run_at := p_first;
  while v_run_at < v_end and v_run_at <= p_now loop
    skipped_to := v_run_at;
    if cardinality(skips) = 10 then
      skipped_to := queue._last_run(p_parsed, p_timezone, v_run_at, least(v_end - interval '1 us', p_now));
      v_run_at := v_end;
      exit;
    end if;
    skips := skips || v_run_at;
    v_run_at := queue._cron_next(p_parsed, p_timezone, v_run_at);
  end loop;
  while v_run_at <= p_now and cardinality(runs) < 100 loop
    runs := runs || v_run_at;
    v_run_at := queue._cron_next(p_parsed, p_timezone, v_run_at);
  end loop;
  next_run_at := nullif(v_run_at, 'infinity');
end $$;

-- The last run up to p_to; p_from is a run. Each round halves the remaining time, so a year of runs each
-- second takes no longer.
create or replace function queue._last_run(p_parsed bigint[], p_timezone text, p_from timestamptz,
  p_to timestamptz)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_last timestamptz := p_from;
  v_to timestamptz := p_to;
  v_next timestamptz;
begin
  loop
    v_next := queue._cron_next(p_parsed, p_timezone, v_last + (v_to - v_last) / 2);
    if v_next <= p_to then
      v_last := v_next;
    else
      exit when v_to - v_last <= interval '1 s';
      v_to := v_last + (v_to - v_last) / 2;
    end if;
  end loop;
  return v_last;
end $$;

-- An instant in RFC 3339 format, in a zone's local time with its offset.
create or replace function queue._rfc3339(p_at timestamptz, p_timezone text)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_local timestamp := p_at at time zone p_timezone;
  v_offset interval := v_local - (p_at at time zone 'UTC');
begin
  return to_char(v_local, case when date_trunc('second', v_local) = v_local then 'YYYY-MM-DD"T"HH24:MI:SS'
    else 'YYYY-MM-DD"T"HH24:MI:SS.US' end)
    || case when v_offset < interval '0' then '-' else '+' end
      || to_char(greatest(v_offset, -v_offset), 'HH24:MI');
end $$;

-- The keys of a schedule's options that defer does not have.
create or replace function queue._schedule_keys()
returns text[] language plpgsql immutable parallel safe security invoker as $$
begin
  return array['catch_up', 'max_delay', 'overlap', 'enabled', 'source'];
end $$;

-- Defers the job of one run.
-- Locks and errors: as defer.
create or replace function queue._defer_run(p_task text, p_args jsonb, p_options jsonb, p_run_at timestamptz,
  p_timezone text)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
begin
  return queue._defer_full(
    p_task, p_args || jsonb_build_object('scheduled_for', queue._rfc3339(p_run_at, p_timezone)),
    p_options ->> 'queue', (p_options ->> 'priority')::integer,
    p_options ->> 'lock', p_options ->> 'queueing_lock', null,
    p_run_at + queue._interval('deadline', p_options -> 'deadline'), null,
    p_options ->> 'concurrency_key', (p_options ->> 'concurrency_limit')::integer,
    nullif(p_options - ({{argument_keys}} || queue._schedule_keys()), '{}'));
end $$;

-- Deletes all but the last 100 runs of a schedule.
create or replace function queue._prune_runs(p_name text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.schedule_run r
  where r.name = p_name
    and r.run_at < (select k.run_at from queue.schedule_run k where k.name = p_name
      order by k.run_at desc offset 99 limit 1);
end $$;

-- Deletes runs of removed schedules, after 7 days, 1,000 at a time.
-- Locks: the caller holds the admission lock.
create or replace function queue._prune_old_runs()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.schedule_run r
  where r.ctid = any (array(
    select k.ctid from queue.schedule_run k
    where k.decided_at < clock_timestamp() - interval '7 days'
      and not exists (select from queue.schedule s where s.name = k.name)
    limit 1000));
end $$;
