-- Running schedules that are due: which runs happen, which are skipped, and what is noted of them.

-- Runs what is due, at most about p_slice runs. Returns the new mark: nothing lies before it.
-- Locks: the caller holds ADM.
create or replace function queue._run_due_schedules(p_mark timestamptz, p_slice integer, out mark timestamptz, out runs integer, out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_rows tid[];
  v_dues timestamptz[];
  v_done record;
  v_is_done boolean;
  v_row tid;
  v_error text;
begin
  select array_agg(d.row_id order by d.due_at, d.timezone, d.parsed), array_agg(d.due_at order by d.due_at)
  into v_rows, v_dues
  from (select s.ctid as row_id, s.due_at, s.timezone, s.parsed from queue.schedule s
        where s.due_at >= p_mark and s.due_at <= v_now order by s.due_at limit p_slice) d;
  mark := v_now;
  runs := 0;
  has_more := false;
  if v_rows is null then
    return;
  end if;
  begin
    v_done := queue._run_schedules(v_rows, v_now, p_slice);
    v_is_done := true;
  exception when others then
    v_is_done := false;
  end;
  if v_is_done then
    runs := v_done.runs;
    has_more := v_done.has_more;
    if v_done.looked_at < cardinality(v_rows) then
      mark := v_dues[v_done.looked_at + 1];
    end if;
  else
    -- one of them can't be run at all: it must not stop the others
    foreach v_row in array v_rows loop
      begin
        v_done := queue._run_schedules(array[v_row], v_now, p_slice);
        runs := runs + v_done.runs;
        has_more := has_more or v_done.has_more;
      exception when others then
        v_error := format('error: %s (%s)', left(sqlerrm, 1000), sqlstate);
        update queue.schedule s set due_at = v_now + interval '1 minute', reason = v_error where s.ctid = v_row;
        raise warning 'pgdefer: a schedule can''t be run: %', v_error;
      end;
    end loop;
  end if;
  if mark = v_now and cardinality(v_rows) >= p_slice then
    mark := v_dues[cardinality(v_dues)];
  end if;
  has_more := has_more or mark < v_now;
  if runs > 0 then
    perform queue._announce();
  end if;
end $$;

-- Runs the schedules in the rows, until p_budget jobs are deferred; looked_at: how many rows it came to.
-- Plain jobs and all notes are written at the end, in one statement each.
-- Locks: the caller holds ADM. Queueing locks are waited for 5 ms, then the run is put off.
create or replace function queue._run_schedules(
  p_rows tid[], p_now timestamptz, p_budget integer, out looked_at integer, out runs integer, out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
  v_has_pause boolean := exists (select from queue.pause p where p.is_paused and (p.until is null or p.until > p_now));
  v_lock_timeout text := current_setting('lock_timeout');
  v_plan record;
  v_plan_of record;
  v_run_at timestamptz;
  v_next_run_at timestamptz;
  v_overlaps integer;
  v_is_new boolean;
  v_is_busy boolean;
  v_until timestamptz;
  v_queue text;
  v_id bigint;
  v_skipped text;
  v_detail text;
  v_error text;
  v_text text;
  v_text_of record;
  v_prune text[] := '{}'::text[];
  -- plain jobs
  v_ids bigint[] := '{}'::bigint[];
  v_tasks text[] := '{}'::text[];
  v_args jsonb[] := '{}'::jsonb[];
  v_queues text[] := '{}'::text[];
  v_priorities integer[] := '{}'::integer[];
  -- notes
  v_names text[] := '{}'::text[];
  v_run_ats timestamptz[] := '{}'::timestamptz[];
  v_job_ids bigint[] := '{}'::bigint[];
  v_skips text[] := '{}'::text[];
  v_details text[] := '{}'::text[];
  -- schedules
  v_dues timestamptz[] := '{}'::timestamptz[];
  v_nexts timestamptz[] := '{}'::timestamptz[];
  v_lasts timestamptz[] := '{}'::timestamptz[];
  v_last_jobs bigint[] := '{}'::bigint[];
  v_reasons text[] := '{}'::text[];
begin
  looked_at := 0;
  runs := 0;
  has_more := false;
  select null::bigint[] as parsed, null::text as timezone, null::timestamptz as run_at, null::text as catch_up, null::interval as max_delay into v_plan_of;
  select null::text as timezone, null::timestamptz as run_at into v_text_of;
  for v in
    select s.name, s.next_run_at, s.last_run_at, s.last_job_id, s.is_plain, s.skips_overlap, s.catch_up, s.max_delay, s.parsed, s.timezone,
      s.task, s.args, s.options, t.is_plain as task_is_plain, t.queue as task_queue, t.priority as task_priority
    from unnest(p_rows) with ordinality u (row_id, n)
    cross join lateral (select s.* from queue.schedule s where s.ctid = u.row_id offset 0) s
    left join lateral (select t.is_plain, t.queue, t.priority from queue.task t where t.name = s.task offset 0) t on true
    order by u.n
  loop
    exit when runs >= p_budget;
    looked_at := looked_at + 1;
    v_queue := coalesce(nullif(coalesce(v.options ->> 'queue', v.task_queue), ''), 'default');
    if v_has_pause then
      v_until := greatest(queue._paused_until(v_queue), queue._task_paused_until(v.task, v_queue));
      if v_until > p_now then
        -- once a minute, as the task's queue may change
        v_dues := v_dues || least(v_until, p_now + interval '1 minute');
        v_nexts := v_nexts || v.next_run_at;
        v_lasts := v_lasts || v.last_run_at;
        v_last_jobs := v_last_jobs || v.last_job_id;
        v_reasons := v_reasons || 'paused'::text;
        continue;
      end if;
    end if;
    -- many have the same runs
    if (v.next_run_at, v.parsed, v.timezone, v.catch_up) = (v_plan_of.run_at, v_plan_of.parsed, v_plan_of.timezone, v_plan_of.catch_up)
      and v.max_delay is not distinct from v_plan_of.max_delay
    then
      null;
    else
      select * into v_plan from queue._plan_runs(v.parsed, v.timezone, v.next_run_at, p_now, v.catch_up, v.max_delay);
      select v.next_run_at as run_at, v.parsed, v.timezone, v.catch_up, v.max_delay into v_plan_of;
    end if;
    for i in 1 .. cardinality(v_plan.skips) loop
      v_names := v_names || v.name;
      v_run_ats := v_run_ats || v_plan.skips[i];
      v_job_ids := v_job_ids || null::bigint;
      v_skips := v_skips || v_plan.skipped;
      v_details := v_details || case when i = cardinality(v_plan.skips) and v_plan.skipped_to > v_plan.skips[i]
                                     then format('and every run up to %s', queue._rfc3339(v_plan.skipped_to, v.timezone)) end;
      v.last_run_at := v_plan.skipped_to;
    end loop;
    v_next_run_at := v_plan.next_run_at;
    v_overlaps := 0;
    v_is_new := false;
    v_is_busy := false;
    v_error := null;
    foreach v_run_at in array v_plan.runs loop
      continue when exists (select from queue.schedule_run r where r.name = v.name and r.run_at = v_run_at);
      v_id := null;
      v_skipped := null;
      v_detail := null;
      v_error := null;
      if v.skips_overlap and (
        v_is_new or exists (select from queue.job j where j.id = v.last_job_id and not exists (select from queue.finished f where f.id = j.id)))
      then
        v_skipped := 'overlap';
        v_detail := format('job %s is unfinished', v.last_job_id);
        v_overlaps := v_overlaps + 1;
        if v_overlaps = 10 then
          -- nor will it have ended for the runs that follow
          v.last_run_at := queue._last_run(v.parsed, v.timezone, v_run_at, p_now);
          v_next_run_at := queue._cron_next(v.parsed, v.timezone, v.last_run_at);
          if v.last_run_at > v_run_at then
            v_detail := v_detail || format(', for every run up to %s', queue._rfc3339(v.last_run_at, v.timezone));
          end if;
        end if;
      elsif v.is_plain and v.task_is_plain is not false then
        if (v_run_at, v.timezone) = (v_text_of.run_at, v_text_of.timezone) then
          null;
        else
          v_text := queue._rfc3339(v_run_at, v.timezone);
          select v.timezone as timezone, v_run_at as run_at into v_text_of;
        end if;
        v_id := nextval('queue.job_id_seq');
        v_ids := v_ids || v_id;
        v_tasks := v_tasks || v.task;
        v_args := v_args || (v.args || jsonb_build_object('scheduled_for', v_text));
        v_queues := v_queues || v_queue;
        v_priorities := v_priorities || coalesce((v.options ->> 'priority')::integer, v.task_priority, 0);
      else
        begin
          perform set_config('lock_timeout', '5ms', true);
          v_id := queue._defer_run(v.task, v.args, v.options, v_run_at, v.timezone);
          perform set_config('lock_timeout', v_lock_timeout, true);
        exception
          when lock_not_available then
            v_is_busy := true;
          when sqlstate 'QJ004' then
            v_skipped := 'queueing_lock';
            get stacked diagnostics v_detail = pg_exception_detail;
          when others then
            v_skipped := 'error';
            get stacked diagnostics v_detail = pg_exception_detail;
            v_detail := left(concat_ws(': ', sqlerrm, nullif(v_detail, '')), 1000);
            v_error := format('error: %s (%s)', v_detail, sqlstate);
        end;
      end if;
      exit when v_is_busy;
      v_names := v_names || v.name;
      v_run_ats := v_run_ats || v_run_at;
      v_job_ids := v_job_ids || v_id;
      v_skips := v_skips || v_skipped;
      v_details := v_details || v_detail;
      exit when v_overlaps = 10;
      v.last_run_at := v_run_at;
      if v_id is not null then
        runs := runs + 1;
        v_is_new := true;
        v.last_job_id := v_id;
      end if;
    end loop;
    if v_is_busy then
      -- somebody else is deferring with this queueing lock: the longer that takes, the later another look
      v_dues := v_dues || p_now + greatest(interval '100 ms', least(interval '10 s', (p_now - v_run_at) / 10));
      v_nexts := v_nexts || v_run_at;
      v_reasons := v_reasons || 'queueing_lock'::text;
    else
      v_dues := v_dues || greatest(v_next_run_at, case when v_next_run_at is not null then p_now end);
      v_nexts := v_nexts || v_next_run_at;
      v_reasons := v_reasons || v_error;
      has_more := has_more or coalesce(v_next_run_at <= p_now, false);
    end if;
    v_lasts := v_lasts || v.last_run_at;
    v_last_jobs := v_last_jobs || v.last_job_id;
    if random() < 0.02 then
      v_prune := v_prune || v.name;
    end if;
  end loop;

  insert into queue.log (id, task, args, given)
  select u.id, u.task, u.args, row(u.queue, u.priority, null, null, null, null, null, null, null, null, null, null)::queue.given
  from unnest(v_ids, v_tasks, v_args, v_queues, v_priorities) u (id, task, args, queue, priority);
  insert into queue.schedule_run (name, run_at, decided_at, job_id, is_manual, skipped, detail)
  select u.name, u.run_at, p_now, u.job_id, false, u.skipped, u.detail
  from unnest(v_names, v_run_ats, v_job_ids, v_skips, v_details) u (name, run_at, job_id, skipped, detail)
  on conflict on constraint schedule_run_pkey do nothing;
  update queue.schedule s
  set due_at = u.due_at, next_run_at = u.next_run_at, last_run_at = u.last_run_at, last_job_id = u.last_job_id, reason = u.reason
  from unnest(p_rows[:looked_at], v_dues, v_nexts, v_lasts, v_last_jobs, v_reasons) u (row_id, due_at, next_run_at, last_run_at, last_job_id, reason)
  where s.ctid = u.row_id;
  perform queue._prune_runs(n) from unnest(v_prune) n;
end $$;

-- Defers the job of one run.
-- Locks and errors: as defer.
create or replace function queue._defer_run(p_task text, p_args jsonb, p_options jsonb, p_run_at timestamptz, p_timezone text)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
begin
  return queue._defer_full(
    p_task, p_args || jsonb_build_object('scheduled_for', queue._rfc3339(p_run_at, p_timezone)), p_options ->> 'queue', (p_options ->> 'priority')::integer,
    p_options ->> 'lock', p_options ->> 'queueing_lock', null, p_run_at + queue._interval('deadline', p_options -> 'deadline'), null,
    p_options ->> 'concurrency_key', (p_options ->> 'concurrency_limit')::integer,
    nullif(p_options - (array['queue', 'priority', 'lock', 'queueing_lock', 'deadline', 'concurrency_key', 'concurrency_limit']
                        || queue._schedule_keys()), '{}'));
end $$;

-- What to do at p_now about the runs from p_first on: those to skip and why (the first 10; the
-- last of these stands for all up to skipped_to), those to make (100 at most), and the next one then.
create or replace function queue._plan_runs(
  p_parsed bigint[], p_timezone text, p_first timestamptz, p_now timestamptz, p_catch_up text, p_max_delay interval,
  out skips timestamptz[], out skipped text, out skipped_to timestamptz, out runs timestamptz[], out next_run_at timestamptz)
language plpgsql stable parallel safe security invoker as $$
declare
  -- with catch_up none a run still counts as in time while a busy worker may not have come to it
  v_limit constant timestamptz := p_now - coalesce(p_max_delay, case when p_catch_up = 'none' then interval '15 s' end);
  v_run_at timestamptz := p_first;
  v_end timestamptz;
begin
  skips := '{}';
  runs := '{}';
  if p_first > p_now then
    -- the clock was set back
    next_run_at := p_first;
    return;
  end if;
  next_run_at := queue._cron_next(p_parsed, p_timezone, p_first);
  if coalesce(next_run_at, 'infinity') > p_now and coalesce(v_limit, '-infinity') <= p_first then
    runs := array[p_first];
    return;
  end if;
  -- what lies before v_run_at is skipped
  if p_catch_up <> 'all' and next_run_at <= p_now then
    skipped := 'missed';
    v_run_at := queue._last_run(p_parsed, p_timezone, next_run_at, p_now);
    next_run_at := queue._cron_next(p_parsed, p_timezone, v_run_at);
  end if;
  if v_run_at < v_limit then
    skipped := case when p_max_delay is null then 'missed' else 'max_delay' end;
    v_run_at := case when p_catch_up = 'all' then queue._cron_next(p_parsed, p_timezone, v_limit - interval '1 us') else next_run_at end;
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

-- The last run up to p_to; p_from is one.
-- Each turn halves what is left of the time, so that it takes no longer for runs each second of a year.
create or replace function queue._last_run(p_parsed bigint[], p_timezone text, p_from timestamptz, p_to timestamptz)
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

-- An instant as RFC 3339 has it, in a zone's local time with its offset.
create or replace function queue._rfc3339(p_at timestamptz, p_timezone text)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_local timestamp := p_at at time zone p_timezone;
  v_offset interval := v_local - (p_at at time zone 'UTC');
begin
  return to_char(v_local, case when date_trunc('second', v_local) = v_local then 'YYYY-MM-DD"T"HH24:MI:SS' else 'YYYY-MM-DD"T"HH24:MI:SS.US' end)
    || case when v_offset < interval '0' then '-' else '+' end || to_char(greatest(v_offset, -v_offset), 'HH24:MI');
end $$;

-- Forgets all but the last 100 runs of a schedule.
create or replace function queue._prune_runs(p_name text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.schedule_run r
  where r.name = p_name
    and r.run_at < (select k.run_at from queue.schedule_run k where k.name = p_name order by k.run_at desc offset 99 limit 1);
end $$;

-- Forgets runs of schedules that are gone, after 7 days.
-- Locks: the caller holds ADM.
create or replace function queue._prune_old_runs(p_max integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.schedule_run r
  where r.ctid = any (array(
    select k.ctid from queue.schedule_run k
    where k.decided_at < clock_timestamp() - interval '7 days' and not exists (select from queue.schedule s where s.name = k.name)
    limit p_max));
end $$;
