-- Sleeping and waking: producers send a NOTIFY only while a worker sleeps.
--
-- The sleep lock and the sleepers' lock are advisory (sleep_lock and sleeper_lock in extension/macros). defer
-- takes the sleep lock shared, by try, until its transaction ends. If it gets the lock, no worker sleeps on
-- it now, and none can before this transaction ends, so none needs waking. If it does not, a sleeper holds
-- the lock exclusively, and defer sends a NOTIFY.
--
-- A worker about to sleep tries to take the sleep lock exclusively, in its listening session; if it gets it,
-- it is the lead sleeper. If it does not, there are two cases. Another worker is the lead sleeper: then every
-- producer notifies, all listeners receive it, and this worker may sleep too; it holds the sleepers' lock
-- shared to show this. Or producers that will not notify are in flight: then it polls, from 2 ms doubling to
-- 1 s, until they have ended. When the lead sleeper becomes busy, it releases the sleep lock and wakes the
-- others, and one of them takes the lock. A worker in the line of sleepers (work/line.sql) that is behind two
-- others holds neither lock. A session that takes these locks in bad faith costs others notifications or
-- polling, never a job.
--
-- The session's setting pgdefer.sleeper says what it is: lead (it holds the sleep lock), listener (it holds
-- the sleepers' lock), rest (in the line behind two others) or poll N (it polls, last after N ms). The last
-- two hold no lock. Empty: it does not sleep.

-- Locks: the sleep lock or the sleepers' lock by try, kept until after_sleep or the session's end; those of
-- _join_line. A frozen lead sleeper makes producers notify, which all other listeners hear.
-- Two sessions: work/worker_sleep.lead_sleeper.spec, work/worker_sleep.in_flight.spec, work/line.races.spec.
-- Raises: 22023, QJ007.
create or replace function queue.before_sleep(worker bigint, queues text[] default null,
  options jsonb default null)
returns table (may_sleep boolean, wait_for interval, channels text[], is_drained boolean,
  look_after interval)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_worker record;
  v_state text := coalesce(current_setting('pgdefer.sleeper', true), '');
  v_wait interval := interval '5 s';
  v_due timestamptz;
  v_ahead integer := 0;
begin
  if cardinality(queues) > 100 then
    perform queue._check_are_few(queues);
  end if;
  perform queue._check_asked(queues), queue._check_sleep_options(options);
  {{if_restricted}}
    perform queue._require_worker(before_sleep.worker);
    queues := queue._narrow_queues('{worker}', queues);
  end if;
  select w.id, w.info, w.apart_since into v_worker
  from queue.worker w where w.id = before_sleep.worker and w.gone_at is null;
  if not found then
    perform queue._worker_gone(before_sleep.worker);
  end if;
  may_sleep := true;
  look_after := interval '0';
  if v_worker.info -> 'listen' = 'false' or current_setting('pgdefer.notify', true) = 'off' then
    channels := '{}';
    v_wait := interval '1 s';
  else
    channels := array['pgdefer', 'pgdefer_worker_' || v_worker.id];
    if options -> 'in_line' = 'true' and v_worker.apart_since is null then
      v_ahead := queue._join_line(v_worker.id, queues, options);
    elsif options -> 'in_line' = 'true' then
      -- It gets no job now (work/quarantine.sql), so it keeps nobody else asleep.
      perform queue._leave_line(v_worker.id, false);
    end if;
    v_state := case when v_state = 'rest' then '' else v_state end;
    if v_ahead > 1 then
      channels := channels[2:];
      -- The third finds what both before it have missed. The others, maybe many, look less often.
      v_wait := case v_ahead when 2 then '2 s' else greatest(interval '10 s', v_ahead * interval '0.5 s') end;
      perform queue._leave_sleep_lock(v_state);
      v_state := 'rest';
    elsif v_ahead = 1 then
      v_wait := interval '1 s';  -- within this it notices that the first has died, asleep or awake
      look_after := interval '80 ms';
    end if;
    if v_state not in ('lead', 'rest') then
      v_state := queue._become_sleeper(v_state);
    end if;
    if v_state ^@ 'poll ' then
      v_wait := make_interval(secs => substring(v_state from 6)::integer / 1000.0);
      may_sleep := false;
    end if;
    if v_state is distinct from current_setting('pgdefer.sleeper', true) then
      perform set_config('pgdefer.sleeper', v_state, false);
    end if;
    v_wait := least(v_wait, case when not queue._may_notify() then interval '1 s' end);
  end if;
  v_due := least(queue._next_due(), queue._next_deadline(queues, options));
  if v_due is not null and v_ahead < 2 then
    v_wait := least(v_wait, greatest(v_due - clock_timestamp() + look_after, interval '0'));
  end if;
  -- Skips claims that are just being delivered to another session of the worker.
  perform from queue.undelivered u where u.worker_id = before_sleep.worker limit 1 for update skip locked;
  if found then
    wait_for := interval '0';
    is_drained := false;
  else
    wait_for := v_wait;
    is_drained := queue._is_drained(queues, options, v_due);
  end if;
  return next;
end $$;
comment on function queue.before_sleep(bigint, text[], jsonb) is
  'Tells whether a worker may sleep. Call it in the session that listens. If may_sleep is true: LISTEN on'
    ' the channels, fetch once more, then wait for a notification for at most wait_for. If it is false,'
    ' notifications may not arrive: just fetch again after wait_for. is_drained: no job of these queues is'
    ' ready, due or still to be admitted, so none starts until somebody commits, ends, resumes or retries'
    ' something, or a time comes. options: tasks and deadline_within, as in fetch, for ready jobs; in_line:'
    ' of the workers that serve the same queues, only the first two are notified of jobs; busy: it runs'
    ' jobs, so it stands behind workers that do not. look_after: how long to wait after a notification on'
    ' pgdefer, because another worker, which is likely to take the job, heard it too.';

-- Locks: releases those that before_sleep took in this session; those of _leave_line.
create or replace function queue.after_sleep(worker bigint)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_state text := coalesce(current_setting('pgdefer.sleeper', true), '');
begin
  {{if_restricted}}
    perform queue._require_worker(after_sleep.worker);
  end if;
  perform queue._leave_sleep_lock(v_state), queue._leave_line(after_sleep.worker, true);
  if v_state <> '' then
    perform set_config('pgdefer.sleeper', '', false);
  end if;
end $$;
comment on function queue.after_sleep(bigint) is
  'Call it in the session that listens when a worker that slept is busy again. It releases the sleep'
    ' lock, so that producers need not notify, and wakes another sleeper instead.';

-- Makes a session in this state the lead sleeper or a listener, or lets it poll. Returns its new state.
-- Locks: the sleep lock or the sleepers' lock by try, kept by the lead sleeper or a listener.
-- Why no wake-up is lost: it polls while it has neither lock; see also _joins_lead_sleeper.
create or replace function queue._become_sleeper(p_state text)
returns text language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_state = 'listener' then
    if not pg_try_advisory_lock_shared({{sleep_lock}}) then
      return p_state;
    end if;
    -- The lead sleeper has left.
    perform pg_advisory_unlock_shared({{sleep_lock}}), pg_advisory_unlock_shared({{sleeper_lock}});
  end if;
  if pg_try_advisory_lock({{sleep_lock}}) then
    return 'lead';
  elsif queue._joins_lead_sleeper() then
    return 'listener';
  end if;
  return 'poll ' || least(2 * coalesce(substring(p_state from '^poll ([0-9]+)$')::integer, 1), 1000);
end $$;

-- Releases the lock of a session in this state. If that was the lead sleeper, it wakes the others.
create or replace function queue._leave_sleep_lock(p_state text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_state = 'lead' then
    perform pg_advisory_unlock({{sleep_lock}});
    if pg_try_advisory_lock({{sleeper_lock}}) then
      perform pg_advisory_unlock({{sleeper_lock}});
    else
      perform queue._wake();
    end if;
  elsif p_state = 'listener' then
    perform pg_advisory_unlock_shared({{sleeper_lock}});
  end if;
end $$;

-- Whether there is a lead sleeper, which then knows of this listener.
-- Locks: the sleepers' lock, shared and by try, kept if so.
-- Why none is forgotten: a lead sleeper that leaves releases the sleep lock, and then looks at the sleepers'
-- lock. This function takes the sleepers' lock, and then looks at the sleep lock. So one of them sees the
-- other.
create or replace function queue._joins_lead_sleeper()
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  if not pg_try_advisory_lock_shared({{sleeper_lock}}) then
    return false;
  elsif pg_try_advisory_lock_shared({{sleep_lock}}) then
    perform pg_advisory_unlock_shared({{sleep_lock}}), pg_advisory_unlock_shared({{sleeper_lock}});
    return false;
  end if;
  return true;
end $$;

-- Whether jobs of these queues and tasks wait for the rate of a key. The first job of each lane has the time
-- of its start.
create or replace function queue._has_shut_rate(p_queues text[], p_tasks text[])
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (
    select from queue.waiting r
    join queue.lane l on l.lane = r.lane
    where r.reason = 'slot' and r.at is not null
      and (p_queues is null or l.queue = any (p_queues))
      and (l.paused_until is null or l.paused_until <= clock_timestamp())
      and (p_tasks is null or exists (
        select from queue.waiting w
        where w.key = r.key and w.lane = r.lane and left(w.reason, 4) = 'slot' and w.task = any (p_tasks))));
end $$;

-- When the next ready job of these queues comes within the option deadline_within; NULL: none that is known.
-- It is at least 100 ms away, so that a worker that may not claim such jobs does not spin. It reads one row
-- of each busy lane. It looks neither at lanes with shares, which don't list their jobs by deadline, nor at
-- jobs that wait for a slot: the worker finds these when it next looks.
create or replace function queue._next_deadline(p_queues text[], p_options jsonb)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_within interval := queue._interval('deadline_within', p_options -> 'deadline_within');
  v_queues text[];
begin
  if v_within is null then
    return null;
  elsif p_queues is not null then
    v_queues := queue._match_queues(p_queues);
  end if;
  return (
    select min(greatest(r.deadline - v_within, v_now + interval '100 ms'))
    from queue.lane l
    cross join lateral (
      select aj.deadline from queue.active_job aj
      where aj.lane = l.lane and aj.deadline >= v_now + v_within and aj.deadline < 'infinity'
        and aj.claim is null
      order by aj.deadline, aj.id limit 1) r
    where not l.is_idle and (v_queues is null or l.queue = any (v_queues))
      and (l.paused_until is null or l.paused_until <= v_now));
end $$;

-- Checks the options of before_sleep. This comes before it takes a lock, because a refusal would not release
-- a lock of the session.
-- Raises: 22023.
create or replace function queue._check_sleep_options(p_options jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
begin
  perform queue._check_keys('options', p_options, array['tasks', 'deadline_within', 'in_line', 'busy']);
  if jsonb_typeof(p_options -> 'in_line') <> 'boolean' or jsonb_typeof(p_options -> 'busy') <> 'boolean' then
    perform queue._invalid('in_line and busy must be true or false', 'Pass a JSON boolean.');
  end if;
  if p_options - '{in_line,busy}'::text[] <> '{}' then
    perform queue._selection(p_options - '{in_line,busy}'::text[]);
  end if;
end $$;

-- Whether no job of these queues can start by itself: none is ready, nothing is due, no committed job is
-- still to be admitted, and no claim is still to be reaped. Jobs that a rate, max_running or a key holds back
-- count as ready, and so do crashed ones that must run alone. p_due: when the next thing is due, as
-- before_sleep found. If that is now, it checks whose jobs are due, so that steady commits to other queues do
-- not keep a worker. It reads the first 1,000; if there are more, the queues are not drained, because fetch
-- admits them.
-- p_options: those of before_sleep, checked.
-- Locks: none.
create or replace function queue._is_drained(p_queues text[], p_options jsonb, p_due timestamptz)
returns boolean language plpgsql stable parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_queues text[];
  v_tasks text[];
  v_before timestamptz;
begin
  v_before := v_now + queue._interval('deadline_within', p_options -> 'deadline_within');
  if jsonb_typeof(p_options -> 'tasks') = 'array' then
    v_tasks := array(select t from jsonb_array_elements_text(p_options -> 'tasks') t);
  end if;
  if p_queues is not null then
    v_queues := queue._match_queues(p_queues);
  end if;
  if exists (
      select from queue.lane l
      cross join lateral (
        select from queue.active_job aj
        where {{is_ready}}
          and (v_before is null or queue._deadline_of(aj.id, aj.deadline) < v_before)
          and (v_tasks is null or exists (select from queue.job j
            where j.id = aj.id and j.task = any (v_tasks)))
        limit 1) r
      where not l.is_idle and (v_queues is null or l.queue = any (v_queues))
        and (l.paused_until is null or l.paused_until <= v_now))
    or exists (
      select from queue.worker w
      where w.gone_at is null and w.last_seen_at + w.dead_after < v_now
          and (select queue._up_since()) + w.dead_after < v_now
        or w.gone_at is not null and not w.is_clear and not w.has_left)
  then
    return false;
  elsif v_before is null and queue._has_shut_rate(v_queues, v_tasks) then
    return false;
  elsif p_due > v_now + interval '20 ms' is not false then
    return true;
  end if;
  return (
    select not (k.has_backlog or k.due_at > v_now
      or exists (select from queue.unsettled h where h.xid > {{shelved}})
      or coalesce(queue._next_lease_end() <= v_now, false)
      or exists (select from queue.schedule s where s.due_at >= k.due_at and s.due_at <= v_now)
      or exists (
        select from queue.expiry e
        where e.at <= v_now and (select aj.claim from queue.active_job aj where aj.id = e.id) is null)
      or queue._has_any_of(p_queues, array(select j.queue from queue.job j
        where j.xid >= k.next_xid limit 1000))
      or queue._has_any_of(p_queues, array(select j.queue from queue.job j
        where j.xid = any (k.in_flight) limit 1000))
      or queue._has_any_of(p_queues, array(
           select j.queue
           from (select w.id from queue.waiting w where w.at >= k.due_at and w.at <= v_now
             order by w.at limit 1000) w
           cross join lateral (select j.queue from queue.job_now j where j.id = w.id offset 0) j)))
    from queue.cursor_now k);
end $$;
