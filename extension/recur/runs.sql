-- Running due schedules: which runs happen, which are skipped, and what is recorded about them.

-- Runs due schedules, at most about p_slice runs. Returns the new due mark: no schedule is due before it.
-- Locks: the caller holds the admission lock.
create or replace function queue._run_due_schedules(p_mark timestamptz, p_slice integer, out mark timestamptz,
  out runs integer, out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
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
    -- One of them can't run at all. It must not stop the others.
    foreach v_row in array v_rows loop
      begin
        v_done := queue._run_schedules(array[v_row], v_now, p_slice);
        runs := runs + v_done.runs;
        has_more := has_more or v_done.has_more;
      exception when others then
        v_error := format('error: %s (%s)', left(sqlerrm, 1000), sqlstate);
        update queue.schedule s set due_at = v_now + interval '1 minute', reason = v_error
        where s.ctid = v_row;
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

-- Runs the schedules in the rows, until p_budget jobs are deferred. looked_at: how many rows it reached. It
-- writes plain jobs and all records at the end, in one statement each.
-- Locks: the caller holds the admission lock. It postpones a run whose key another transaction has taken
-- (_try_defer_run).
-- In one piece: a version with a call for each schedule took 28 % longer for 1,000 due ones.
create or replace function queue._run_schedules(
  p_rows tid[], p_now timestamptz, p_budget integer, out looked_at integer, out runs integer,
  out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_found record;
  v_has_pause boolean := exists (select from queue.pause p where p.is_paused
    and (p.until is null or p.until > p_now));
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
  -- Plain jobs.
  v_ids bigint[] := '{}'::bigint[];
  v_tasks text[] := '{}'::text[];
  v_args jsonb[] := '{}'::jsonb[];
  v_queues text[] := '{}'::text[];
  v_priorities integer[] := '{}'::integer[];
  -- Records.
  v_names text[] := '{}'::text[];
  v_run_ats timestamptz[] := '{}'::timestamptz[];
  v_job_ids bigint[] := '{}'::bigint[];
  v_skips text[] := '{}'::text[];
  v_details text[] := '{}'::text[];
  -- Schedules.
  v_dues timestamptz[] := '{}'::timestamptz[];
  v_nexts timestamptz[] := '{}'::timestamptz[];
  v_lasts timestamptz[] := '{}'::timestamptz[];
  v_last_jobs bigint[] := '{}'::bigint[];
  v_reasons text[] := '{}'::text[];
begin
  looked_at := 0;
  runs := 0;
  has_more := false;
  -- what v_plan and v_text are of: nothing yet
  select null::bigint[] as parsed, null::text as timezone, null::timestamptz as run_at,
    null::text as catch_up, null::interval as max_delay into v_plan_of;
  select null::text as timezone, null::timestamptz as run_at into v_text_of;
  for v_found in
    select s.name, s.next_run_at, s.last_run_at, s.last_job_id, s.is_plain, s.skips_overlap, s.catch_up,
      s.max_delay, s.parsed, s.timezone,
      s.task, s.args, s.options, t.is_plain as task_is_plain, t.queue as task_queue,
      t.priority as task_priority
    from unnest(p_rows) with ordinality u (row_id, n)
    cross join lateral (select s.* from queue.schedule s where s.ctid = u.row_id offset 0) s
    left join lateral (
      select t.is_plain, t.queue, t.priority
      from queue.task t
      where t.name = s.task offset 0) t on true
    order by u.n
  loop
    exit when runs >= p_budget;
    looked_at := looked_at + 1;
    v_queue := coalesce(nullif(coalesce(v_found.options ->> 'queue', v_found.task_queue), ''), 'default');
    if v_has_pause then
      v_until := greatest(queue._paused_until(v_queue), queue._task_paused_until(v_found.task, v_queue));
      if v_until > p_now then
        -- It looks once a minute, as the task's queue may change.
        v_dues := v_dues || least(v_until, p_now + interval '1 minute');
        v_nexts := v_nexts || v_found.next_run_at;
        v_lasts := v_lasts || v_found.last_run_at;
        v_last_jobs := v_last_jobs || v_found.last_job_id;
        v_reasons := v_reasons || 'paused'::text;
        continue;
      end if;
    end if;
    -- Many schedules have the same runs.
    if (v_found.next_run_at, v_found.parsed, v_found.timezone, v_found.catch_up, v_found.max_delay)
      is distinct from (v_plan_of.run_at, v_plan_of.parsed, v_plan_of.timezone, v_plan_of.catch_up,
        v_plan_of.max_delay)
    then
      select * into v_plan
      from queue._plan_runs(v_found.parsed, v_found.timezone, v_found.next_run_at, p_now, v_found.catch_up,
        v_found.max_delay);
      select v_found.next_run_at as run_at, v_found.parsed, v_found.timezone, v_found.catch_up,
        v_found.max_delay into v_plan_of;
    end if;
    for i in 1 .. cardinality(v_plan.skips) loop
      v_names := v_names || v_found.name;
      v_run_ats := v_run_ats || v_plan.skips[i];
      v_job_ids := v_job_ids || null::bigint;
      v_skips := v_skips || v_plan.skipped;
      v_details := v_details || case when i = cardinality(v_plan.skips)
        and v_plan.skipped_to > v_plan.skips[i]
                                     then format('and every run up to %s',
                                       queue._rfc3339(v_plan.skipped_to, v_found.timezone)) end;
      v_found.last_run_at := v_plan.skipped_to;
    end loop;
    v_next_run_at := v_plan.next_run_at;
    v_overlaps := 0;
    v_is_new := false;
    v_is_busy := false;
    v_error := null;
    foreach v_run_at in array v_plan.runs loop
      continue when exists (select from queue.schedule_run r
        where r.name = v_found.name and r.run_at = v_run_at);
      v_id := null;
      v_skipped := null;
      v_detail := null;
      v_error := null;
      if v_found.skips_overlap and (
        v_is_new or exists (select from queue.job j where j.id = v_found.last_job_id
          and not exists (select from queue.finished f where f.id = j.id)))
      then
        v_skipped := 'overlap';
        v_detail := format('job %s is unfinished', v_found.last_job_id);
        v_overlaps := v_overlaps + 1;
        if v_overlaps = 10 then
          -- The job will not have ended for the following runs either.
          v_found.last_run_at := queue._last_run(v_found.parsed, v_found.timezone, v_run_at, p_now);
          v_next_run_at := queue._cron_next(v_found.parsed, v_found.timezone, v_found.last_run_at);
          if v_found.last_run_at > v_run_at then
            v_detail := v_detail || format(', for every run up to %s',
              queue._rfc3339(v_found.last_run_at, v_found.timezone));
          end if;
        end if;
      elsif v_found.is_plain and v_found.task_is_plain is not false then
        if (v_run_at, v_found.timezone) is distinct from (v_text_of.run_at, v_text_of.timezone) then
          v_text := queue._rfc3339(v_run_at, v_found.timezone);
          select v_found.timezone as timezone, v_run_at as run_at into v_text_of;
        end if;
        v_id := nextval('queue.job_id_seq');
        v_ids := v_ids || v_id;
        v_tasks := v_tasks || v_found.task;
        v_args := v_args || (v_found.args || jsonb_build_object('scheduled_for', v_text));
        v_queues := v_queues || v_queue;
        v_priorities := v_priorities || coalesce((v_found.options ->> 'priority')::integer,
          v_found.task_priority, 0);
      else
        select d.id, d.is_busy, d.skipped, d.detail, d.error
        into v_id, v_is_busy, v_skipped, v_detail, v_error
        from queue._try_defer_run(v_found.task, v_found.args, v_found.options, v_run_at, v_found.timezone) d;
      end if;
      exit when v_is_busy;
      v_names := v_names || v_found.name;
      v_run_ats := v_run_ats || v_run_at;
      v_job_ids := v_job_ids || v_id;
      v_skips := v_skips || v_skipped;
      v_details := v_details || v_detail;
      exit when v_overlaps = 10;
      v_found.last_run_at := v_run_at;
      if v_id is not null then
        runs := runs + 1;
        v_is_new := true;
        v_found.last_job_id := v_id;
      end if;
    end loop;
    if v_is_busy then
      -- Another session is deferring with this queueing lock. The longer that takes, the later is the next
      -- try.
      v_dues := v_dues || p_now + greatest(interval '100 ms',
        least(interval '10 s', (p_now - v_run_at) / 10));
      v_nexts := v_nexts || v_run_at;
      v_reasons := v_reasons || 'queueing_lock'::text;
    else
      v_dues := v_dues || greatest(v_next_run_at, case when v_next_run_at is not null then p_now end);
      v_nexts := v_nexts || v_next_run_at;
      v_reasons := v_reasons || v_error;
      has_more := has_more or coalesce(v_next_run_at <= p_now, false);
    end if;
    v_lasts := v_lasts || v_found.last_run_at;
    v_last_jobs := v_last_jobs || v_found.last_job_id;
    if random() < 0.02 then
      v_prune := v_prune || v_found.name;
    end if;
  end loop;

  insert into queue.log (id, task, args, job_options)
  select u.id, u.task, u.args,
    row(u.queue, u.priority, null, null, null, null, null, null, null, null, null, null)::queue.job_options
  from unnest(v_ids, v_tasks, v_args, v_queues, v_priorities) u (id, task, args, queue, priority);
  insert into queue.schedule_run (name, run_at, decided_at, job_id, is_manual, skipped, detail)
  select u.name, u.run_at, p_now, u.job_id, false, u.skipped, u.detail
  from unnest(v_names, v_run_ats, v_job_ids, v_skips, v_details) u (name, run_at, job_id, skipped, detail)
  on conflict on constraint schedule_run_pkey do nothing;
  update queue.schedule s
  set due_at = u.due_at, next_run_at = u.next_run_at, last_run_at = u.last_run_at,
    last_job_id = u.last_job_id, reason = u.reason
  from unnest(p_rows[:looked_at], v_dues, v_nexts, v_lasts, v_last_jobs, v_reasons) u (row_id, due_at,
    next_run_at, last_run_at, last_job_id, reason)
  where s.ctid = u.row_id;
  perform queue._prune_runs(n) from unnest(v_prune) n;
end $$;

-- Defers the job of one run. If it can't be deferred, skipped and detail say why (as in queue.schedule_run),
-- and error is what the schedule then shows. is_busy: another transaction has taken a key of the job (a
-- queueing lock or an idempotency key), so nothing is decided yet.
-- Locks: it waits for 5 ms for such a key.
create or replace function queue._try_defer_run(
  p_task text, p_args jsonb, p_options jsonb, p_run_at timestamptz, p_timezone text,
  out id bigint, out is_busy boolean, out skipped text, out detail text, out error text)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_lock_timeout text := current_setting('lock_timeout');
begin
  is_busy := false;
  perform set_config('lock_timeout', '5ms', true);
  id := queue._defer_run(p_task, p_args, p_options, p_run_at, p_timezone);
  perform set_config('lock_timeout', v_lock_timeout, true);
exception
  when lock_not_available then
    is_busy := true;
  when sqlstate 'QJ004' then
    skipped := 'queueing_lock';
    get stacked diagnostics detail = pg_exception_detail;
  when others then
    skipped := 'error';
    get stacked diagnostics detail = pg_exception_detail;
    detail := left(concat_ws(': ', sqlerrm, nullif(detail, '')), 1000);
    error := format('error: %s (%s)', detail, sqlstate);
end $$;
