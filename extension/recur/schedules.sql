-- Recurring runs: schedules, and the jobs that they defer.
--
-- A schedule's row says which run is the next that has not been handled (next_run_at). Admission
-- (admit/admission.sql) finds the row when it is due, defers the job or records why not, and sets next_run_at
-- to a later run, all in one transaction under the admission lock (recur/runs.sql).
-- Why there is at most one job for (name, run_at), however often schedules are checked, and whatever the
-- clock does: next_run_at always lies after last_run_at, which only rises. And a run that queue.schedule_run
-- has recorded is not run again (_run_schedules). Rows of queue.schedule are written only under the admission
-- lock; rows of queue.schedule_run never change, and are pruned.

-- Locks: the admission lock, waited for, only if something changes. Raises: 22023, QJ008.
create or replace function queue.schedule(
  name text, cron text, task text, args jsonb default '{}', timezone text default 'UTC',
  options jsonb default null)
returns timestamptz language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_args jsonb := coalesce(schedule.args, '{}');
  v_options jsonb;
  v_parsed bigint[];
  v_old record;
  v_now timestamptz;
  v_is_enabled boolean;
  v_next_run_at timestamptz;
begin
  {{installed}}
  perform queue._check_isolation();
  perform queue._check_name('name', schedule.name);
  perform queue._check_name('task', schedule.task);
  if jsonb_typeof(v_args) <> 'object' then
    perform queue._invalid('args must be a JSON object', 'Pass the arguments by name: {"name": value}.',
      'type: ' || jsonb_typeof(v_args));
  elsif v_args ? 'scheduled_for' then
    perform queue._invalid('args may not contain scheduled_for',
      'Leave it out: each run adds it, with the time of the run.');
  end if;
  perform queue._check_size('args', v_args);
  perform queue._unmask_args(queue._hidden_paths() -> schedule.task, v_args, '{}');
  v_options := queue._check_schedule_options(schedule.options, v_args);
  perform queue._refuse_sensitive_templates(t.sensitive, v_options)
  from queue.task t where t.name = schedule.task;
  v_parsed := queue._cron_parse(schedule.cron);
  perform queue._check_timezone(schedule.timezone);
  if queue._cron_next(v_parsed, schedule.timezone, clock_timestamp()) is null then
    perform queue._cron_never(schedule.cron, schedule.timezone);
  end if;
  for v_look in 1 .. 2 loop
    select s.* into v_old from queue.schedule s where s.name = schedule.name;
    if (v_old.cron, v_old.timezone, v_old.task, v_old.args, v_old.options)
       = (schedule.cron, schedule.timezone, schedule.task, v_args, v_options) then
      return v_old.next_run_at;
    elsif v_look = 1 then
      perform queue._lock_schedules();
    end if;
  end loop;
  v_now := clock_timestamp();
  v_is_enabled := coalesce((v_options ->> 'enabled')::boolean, true);
  if v_is_enabled and v_old.next_run_at is not null
    and (v_old.cron, v_old.timezone) = (schedule.cron, schedule.timezone) then
    v_next_run_at := v_old.next_run_at;
  else
    if v_old.next_run_at <= v_now then
      perform queue._note_changed(schedule.name, v_old.parsed, v_old.timezone, v_old.next_run_at, v_now,
        'changed');
    end if;
    if v_is_enabled then
      v_next_run_at := queue._cron_next(v_parsed, schedule.timezone, greatest(v_now, v_old.last_run_at));
    end if;
  end if;
  perform queue._audit('schedule', jsonb_build_object('name', schedule.name, 'cron', schedule.cron, 'task',
    schedule.task, 'args', v_args, 'timezone', schedule.timezone, 'options', v_options),
    p_before => queue._schedule_before(schedule.name));
  insert into queue.schedule as s (name, due_at, next_run_at, is_enabled, is_plain, skips_overlap, catch_up,
    max_delay, created_at, changed_at, cron, parsed, timezone, task, args, options)
  values (schedule.name,
    greatest(v_next_run_at, case when v_next_run_at is not null then v_now end), v_next_run_at, v_is_enabled,
    v_options - (array['queue', 'priority'] || queue._schedule_keys()) = '{}'
      and octet_length(v_args::text) <= 1900, coalesce(v_options ->> 'overlap' = 'skip', false),
      coalesce(v_options ->> 'catch_up', 'latest'), queue._interval('max_delay', v_options -> 'max_delay'),
      v_now, v_now, schedule.cron, v_parsed, schedule.timezone, schedule.task, v_args, v_options)
  on conflict on constraint schedule_pkey do update
    set (due_at, next_run_at, is_enabled, is_plain, skips_overlap, catch_up, max_delay, changed_at, cron,
      parsed, timezone, task, args, options, reason)
      = (excluded.due_at, excluded.next_run_at, excluded.is_enabled, excluded.is_plain,
        excluded.skips_overlap, excluded.catch_up,
         excluded.max_delay, excluded.changed_at, excluded.cron, excluded.parsed, excluded.timezone,
         excluded.task, excluded.args,
         excluded.options, null);
  perform queue._announce();
  return v_next_run_at;
end $$;
comment on function queue.schedule(text, text, text, jsonb, text, jsonb) is
  'Defers a job at each run of a cron expression in a time zone, with scheduled_for in its args. Calling it'
    ' again with the same arguments has no effect; other arguments take effect at once. Returns the next'
    ' run, NULL if disabled. options: those of defer but parent, queue, priority, lock, queueing_lock,'
    ' concurrency_key, concurrency_limit, deadline (an interval from the time of the run), and catch_up'
    ' (none | latest | all), max_delay (1 second to 4,000 years), overlap (allow | skip), enabled, source.';

-- Locks: the admission lock, waited for. Raises: 22023, QJ008.
create or replace function queue.unschedule(name text)
returns boolean language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  {{installed}}
  perform queue._check_isolation();
  perform queue._check_name('name', unschedule.name);
  perform queue._lock_admission(true);
  perform queue._audit('unschedule', jsonb_build_object('name', unschedule.name), p_before => b.before)
  from queue._schedule_before(unschedule.name) b (before) where b.before is not null;
  delete from queue.schedule s where s.name = unschedule.name;
  return found;
end $$;
comment on function queue.unschedule(text) is
  'Removes a schedule. Jobs that it has deferred stay, and its runs stay for 7 days. Returns whether it'
    ' existed.';

-- Locks: the admission lock, waited for. Raises: 22023 (no such schedule too), QJ008.
create or replace function queue.enable_schedule(name text, enabled boolean default true)
returns timestamptz language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_old record;
  v_now timestamptz;
  v_next_run_at timestamptz;
begin
  {{installed}}
  perform queue._check_isolation();
  perform queue._check_name('name', enable_schedule.name);
  if enable_schedule.enabled is null then
    perform queue._invalid('enabled must be true or false', 'Leave it out to enable the schedule.');
  end if;
  perform queue._lock_schedules();
  select s.is_enabled, s.next_run_at, s.last_run_at, s.parsed, s.timezone into v_old from queue.schedule s
  where s.name = enable_schedule.name;
  if not found then
    perform queue._no_schedule(enable_schedule.name);
  end if;
  perform queue._audit('enable_schedule', jsonb_build_object('name', enable_schedule.name, 'enabled',
    enable_schedule.enabled), p_before => jsonb_build_object('enabled', v_old.is_enabled));
  if v_old.is_enabled = enable_schedule.enabled then
    return v_old.next_run_at;
  end if;
  v_now := clock_timestamp();
  if enable_schedule.enabled then
    v_next_run_at := queue._cron_next(v_old.parsed, v_old.timezone, greatest(v_now, v_old.last_run_at));
  elsif v_old.next_run_at <= v_now then
    perform queue._note_changed(enable_schedule.name, v_old.parsed, v_old.timezone, v_old.next_run_at, v_now,
      'disabled');
  end if;
  update queue.schedule s
  set is_enabled = enable_schedule.enabled, next_run_at = v_next_run_at, due_at = v_next_run_at,
    reason = null, changed_at = v_now
  where s.name = enable_schedule.name;
  perform queue._announce();
  return v_next_run_at;
end $$;
comment on function queue.enable_schedule(text, boolean) is
  'Enables or disables a schedule, until queue.schedule changes it. An enabled schedule runs from now on;'
    ' missed runs are not made up for. Returns the next run, NULL if disabled.';

-- Locks: as defer; then the admission lock, waited for. If this transaction already holds the admission lock,
-- from an earlier call, it waits at most 500 ms for keys that another transaction has taken: nobody gets jobs
-- meanwhile.
-- Raises: as defer; 22023 if there is no such schedule; QJ008; 55P03 after those 500 ms.
-- Two sessions: operate/change.again.spec.
create or replace function queue.run_now(name text)
returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_schedule record;
  v_run_at timestamptz := clock_timestamp();
  v_timeout text;
  v_id bigint;
begin
  {{installed}}
  perform queue._check_isolation();
  perform queue._check_name('name', run_now.name);
  select s.* into v_schedule from queue.schedule s where s.name = run_now.name;
  if not found then
    perform queue._no_schedule(run_now.name);
  end if;
  v_timeout := queue._cap_lock_timeout('500ms') where queue._has_admission();
  v_id := queue._defer_run(v_schedule.task, v_schedule.args, v_schedule.options, v_run_at,
    v_schedule.timezone);
  perform set_config('lock_timeout', v_timeout, true) where v_timeout is not null;
  perform queue._lock_admission(true);
  insert into queue.schedule_run (name, run_at, decided_at, job_id, is_manual)
  values (run_now.name, v_run_at, clock_timestamp(), v_id, true)
  on conflict on constraint schedule_run_pkey do nothing;
  -- overlap looks at the last job alone, so if that is unfinished, it stays the last one.
  update queue.schedule s set last_job_id = v_id
  where s.name = run_now.name and not exists (select from queue.job j where j.id = s.last_job_id
    and not exists (select from queue.finished f where f.id = j.id));
  perform queue._audit('run_now', jsonb_build_object('name', run_now.name), p_ids => array[v_id]);
  perform queue._announce();
  return v_id;
end $$;
comment on function queue.run_now(text) is
  'Defers a schedule''s job now, in addition to its runs, even if it is disabled or its last job is'
    ' unfinished. Returns the job''s id.';

-- Returns the options without those that are JSON null, and checks that args fill every {field} in them.
-- Raises: 22023.
create or replace function queue._check_schedule_options(p_options jsonb, p_args jsonb)
returns jsonb language plpgsql stable parallel unsafe security invoker as $$
declare
  v_options jsonb := '{}'::jsonb;
  v_args jsonb := p_args || '{"scheduled_for": "2000-01-01T00:00:00.000001+00:00"}';
  v_names constant text[] := {{argument_keys}};
  v_key text;
begin
  if p_options is null or jsonb_typeof(p_options) = 'null' then
    return v_options;
  end if;
  p_options := queue._flat('options', p_options);
  perform queue._check_keys('options', p_options, queue._schedule_keys() || v_names || queue._option_keys());
  select coalesce(jsonb_object_agg(e.key, e.value), '{}') into v_options
  from jsonb_each(p_options) e where e.value <> 'null' or e.key = 'max_progress';
  perform queue._check_types('options', v_options);
  foreach v_key in array array['catch_up', 'overlap'] loop
    if v_options ? v_key and (
      jsonb_typeof(v_options -> v_key) <> 'string'
      or not v_options ->> v_key = any (case v_key when 'overlap' then '{allow,skip}'::text[]
        else '{none,latest,all}'::text[] end))
    then
      perform queue._invalid(v_key || ' is not one of its values',
        'Allowed: ' || case v_key when 'overlap' then 'allow, skip.' else 'none, latest, all.' end,
        'value: ' || left((v_options -> v_key)::text, 200));
    end if;
  end loop;
  if coalesce(jsonb_typeof(v_options -> 'enabled'), 'boolean') <> 'boolean' then
    perform queue._invalid('enabled must be true or false', 'Pass a JSON boolean.');
  elsif queue._interval('max_delay', v_options -> 'max_delay') < interval '1 s' then
    perform queue._invalid('max_delay is too short',
      'Pass an interval of at least 1 second.');
  elsif v_options ? 'source' then
    if jsonb_typeof(v_options -> 'source') <> 'string' then
      perform queue._invalid('source must be text', 'Name the program that registers this schedule.');
    end if;
    perform queue._check_name('source', v_options ->> 'source');
  end if;
  perform queue._interval('deadline', v_options -> 'deadline');
  if v_options ->> 'queue' <> '' then
    perform queue._check_queue(v_options ->> 'queue');
  end if;
  foreach v_key in array
    array['lock', 'queueing_lock', 'concurrency_key', 'idempotency_key', 'share', 'group'] loop
    if v_options ->> v_key <> '' then
      perform queue._fill(v_key, v_options ->> v_key, v_args);
    end if;
  end loop;
  -- By the time of a run, the task may have a limit, or an idempotency_key for unique_for.
  perform queue._check_concurrency(v_options ->> 'concurrency_key',
    coalesce((v_options ->> 'concurrency_limit')::integer, 1), v_options -> 'concurrency');
  perform queue._fill('concurrency_key', c ->> 'key', v_args)
    from jsonb_array_elements(v_options -> 'concurrency') c;
  v_options := v_options || queue._check_options(v_options - (v_names || queue._schedule_keys()));
  perform queue._check_no_parent(v_options);
  return v_options;
end $$;

-- Raises: 22023, always.
create or replace function queue._no_schedule(name text)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  perform queue._invalid('no such schedule', 'queue.schedules lists them.', 'name: ' || left(name, 200));
end $$;

-- Records that the runs from p_run_at to p_now were skipped, because their schedule was changed or disabled:
-- in one row, that of the first run.
-- Locks: the caller holds the admission lock.
create or replace function queue._note_changed(p_name text, p_parsed bigint[], p_timezone text,
  p_run_at timestamptz, p_now timestamptz, p_change text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_last constant timestamptz := queue._last_run(p_parsed, p_timezone, p_run_at, p_now);
begin
  insert into queue.schedule_run (name, run_at, decided_at, is_manual, skipped, detail)
  values (p_name, p_run_at, clock_timestamp(), false, 'changed', format('the schedule was %s at %s%s',
    p_change, p_now, case when v_last > p_run_at then
      format('; it skips every run up to %s', queue._rfc3339(v_last, p_timezone)) end))
  on conflict on constraint schedule_run_pkey do nothing;
end $$;

-- Prepares a change of a schedule. Its due_at must not lie before the cursor's, which could be if the clock
-- was set back.
-- Locks: the admission lock, waited for.
create or replace function queue._lock_schedules()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._lock_admission(true);
  perform queue._rewind_due_mark();
end $$;

-- Makes admission check paused schedules again.
-- Locks: the caller holds the admission lock.
create or replace function queue._resume_schedules()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.schedule s set due_at = clock_timestamp() where s.reason = 'paused' and s.due_at is not null;
end $$;

-- Invariants of schedules, for queue.check().
create or replace function queue._check_schedules()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'a schedule that is never checked'::text, null::bigint, format('%s: due %s', s.name, s.due_at)
    from queue.schedule s cross join queue.cursor_now k
    where s.is_enabled and (s.due_at is null or s.due_at < least(k.due_at, clock_timestamp()));
  return query
    select 'a schedule whose next run has been'::text, null::bigint, format('%s: %s', s.name, s.next_run_at)
    from queue.schedule s where s.next_run_at <= s.last_run_at;
end $$;
