-- Waking without paying: producers send a NOTIFY only while somebody sleeps.
--
-- The latch is advisory lock (1885824102, 1). defer takes it shared, by try, until its transaction
-- ends. Got: nobody sleeps on it now, and nobody can before this transaction ends, so that nobody
-- needs waking. Not got: a sleeper holds it exclusively: NOTIFY.
-- A worker about to sleep tries it exclusively, in its listening session (the sentinel). When that
-- fails, either another is the sentinel (then every producer notifies, and all listeners hear it: it
-- may sleep too, and holds lock 2 shared to say so), or producers are in flight that will not notify
-- (then it polls, from 20 ms doubling to 1 s, until they have ended).
-- The sentinel that becomes busy gives the latch back and wakes the others, of which one takes it.
-- Whoever takes these locks in bad faith costs others notifications or polling, never a job.

-- Locks: none. Sends the notification, unless the session or database has SET pgdefer.notify = off. Qualified, as defer.
create or replace function queue._wake()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if coalesce(pg_catalog.current_setting('pgdefer.notify', true), '') operator(pg_catalog.<>) 'off' then
    perform pg_catalog.pg_notify('pgdefer', '');
  end if;
end $$;

-- When something is due that no commit announces: a schedule, a lease, a recurring run. now() for what
-- is already there and not admitted.
create or replace function queue._next_due()
returns timestamptz language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_due timestamptz;
begin
  select least(
    case when c.has_backlog or exists (select from queue.job j where j.xid >= c.next_xid)
           or exists (select from queue.job j where j.xid = any (array(select x from unnest(c.in_flight) x where pg_visible_in_snapshot(x, pg_current_snapshot()))))
         then clock_timestamp() end,
    case when exists (select from queue.handover h where pg_visible_in_snapshot(h.xid, pg_current_snapshot())) then clock_timestamp() + interval '10 ms'
    -- one that waits for the end of a transaction (_until), which wakes nobody
         when exists (select from queue.handover) then clock_timestamp() + interval '100 ms' end,
    (select w.at from queue.waiting w where w.at >= c.due_at order by w.at limit 1),
    (select s.due_at from queue.schedule s where s.due_at >= c.due_at order by s.due_at limit 1),
    case when c.due_at > clock_timestamp() then clock_timestamp() end,  -- the clock was set back
    (select min(p.until) from queue.pause p where p.is_paused and p.until > clock_timestamp() and isfinite(p.until)),
    -- what only tick can do, and may fail to do at once, is due in a moment, so that nobody spins
    (select greatest(e.at, clock_timestamp() + interval '10 ms') from queue.expiry e
     where (select v.claim from queue.live v where v.id = e.id) is null order by e.at limit 1),
    (select greatest(x.at, clock_timestamp() + interval '10 ms') from queue._next_lease_end() x (at) where x.at is not null),
    (select min(queue._next_start(c.queue)) from queue.queue_config c where c.rate_limit is not null))
  into v_due
  from (select k.* from queue.cursor k order by k.tick desc limit 1) c;
  return v_due;
end $$;

-- Whether there is a sentinel, which then knows of this listener.
-- Locks: session-level advisory (1885824102, 2), shared, kept if so.
-- Why none is forgotten: a sentinel that leaves gives lock 1 back and looks at 2 afterwards; this takes 2
-- and looks at 1 afterwards. So one of them sees the other.
create or replace function queue._joins_sentinel()
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  if not pg_try_advisory_lock_shared(1885824102, 2) then
    return false;
  elsif pg_try_advisory_lock_shared(1885824102, 1) then
    perform pg_advisory_unlock_shared(1885824102, 1), pg_advisory_unlock_shared(1885824102, 2);
    return false;
  end if;
  return true;
end $$;

-- Whether nothing of these queues is left that starts without anybody's help: nothing is ready (what a rate, max_running or a key
-- holds back, or has crashed and is to be claimed alone, is), nothing is due, nothing that is committed has yet to be admitted,
-- no claim has yet to be reaped. p_due: what _next_due has just said. Where that is now it looks whose it is, so that what others
-- commit all the time keeps nobody: the first 1,000, and where there are more it is not drained, as fetch admits them.
-- p_options: tasks and deadline_within of fetch, for what is ready.
-- Locks: none. Raises: 22023.
create or replace function queue._is_drained(p_queues text[], p_options jsonb, p_due timestamptz)
returns boolean language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_queues text[];
  v_tasks text[];
  v_before timestamptz;
begin
  if p_options is not null then
    perform queue._check_keys('options', p_options, array['tasks', 'deadline_within']);
    if coalesce(jsonb_typeof(p_options -> 'tasks'), 'array') not in ('array', 'null') then
      perform queue._invalid('tasks must be a list', 'Pass a JSON array.');
    elsif jsonb_typeof(p_options -> 'tasks') = 'array' then
      v_tasks := array(select t from jsonb_array_elements_text(p_options -> 'tasks') t);
    end if;
    v_before := v_now + queue._interval('deadline_within', p_options -> 'deadline_within');
  end if;
  if p_queues is not null then
    v_queues := queue._match_queues(p_queues);
  end if;
  if exists (
      select from queue.lane l
      cross join lateral (
        select from queue.live v
        where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null
          and (v_before is null or v.deadline < v_before)
          and (v_tasks is null or exists (select from queue.job j where j.id = v.id and j.task = any (v_tasks)))
        limit 1) r
      where not l.is_idle and (v_queues is null or l.queue = any (v_queues)) and (l.paused_until is null or l.paused_until <= v_now))
    or exists (
      select from queue.worker w
      where w.gone_at is null and greatest(w.last_seen_at, pg_postmaster_start_time()) + w.dead_after < v_now)
  then
    return false;
  elsif p_due > v_now + interval '20 ms' is not false then
    return true;
  end if;
  return (
    select not (k.has_backlog or k.due_at > v_now
      or exists (select from queue.handover)
      or coalesce(queue._next_lease_end() <= v_now, false)
      or exists (select from queue.schedule s where s.due_at >= k.due_at and s.due_at <= v_now)
      or exists (
        select from queue.expiry e
        where e.at <= v_now and (select v.claim from queue.live v where v.id = e.id) is null)
      or queue._has_any_of(p_queues, array(select j.queue from queue.job j where j.xid >= k.next_xid limit 1000))
      or queue._has_any_of(p_queues, array(select j.queue from queue.job j where j.xid = any (k.in_flight) limit 1000))
      or queue._has_any_of(p_queues, array(
           select coalesce(s.queue, j.queue)
           from (select w.id from queue.waiting w where w.at >= k.due_at and w.at <= v_now order by w.at limit 1000) w
           cross join lateral (select j.queue from queue.job j where j.id = w.id offset 0) j
           left join lateral (select s.queue from queue.job_state s where s.id = w.id offset 0) s on true)))
    from (select k.* from queue.cursor k order by k.tick desc limit 1) k);
end $$;

-- Whether a list of queues' names holds one that is asked for; or 1,000, as there may be more behind them.
create or replace function queue._has_any_of(p_queues text[], p_names text[])
returns boolean language plpgsql immutable parallel safe security invoker as $$
begin
  return cardinality(p_names) > 0
    and (p_queues is null or cardinality(p_names) >= 1000
         or exists (select from unnest(p_names) n join unnest(p_queues) q on queue._matches(n, q)));
end $$;

-- Locks: session-level advisory (1885824102, 1) or (1885824102, 2) by try, kept until after_sleep or
-- the session's end. A frozen sentinel keeps producers notifying, which all other listeners hear.
-- Raises: 22023, QJ007.
create or replace function queue.before_sleep(worker bigint, queues text[] default null, options jsonb default null)
returns table (may_sleep boolean, wait_for interval, channels text[], is_drained boolean)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_worker record;
  v_state text := coalesce(current_setting('pgdefer.sleeper', true), '');
  v_wait interval := interval '5 s';
  v_poll integer;
  v_due timestamptz;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_worker(before_sleep.worker);
    queues := queue._bound_queues('{worker}', queues);
  end if;
  select w.id, w.info into v_worker from queue.worker w where w.id = before_sleep.worker and w.gone_at is null;
  if not found then
    perform queue._worker_gone(before_sleep.worker);
  end if;
  may_sleep := true;
  if v_worker.info -> 'listen' = 'false' or current_setting('pgdefer.notify', true) = 'off' then
    channels := '{}';
    v_wait := interval '1 s';
  else
    channels := array['pgdefer', 'pgdefer_worker_' || v_worker.id];
    if v_state = 'listener' and pg_try_advisory_lock_shared(1885824102, 1) then
      -- the sentinel has gone
      perform pg_advisory_unlock_shared(1885824102, 1), pg_advisory_unlock_shared(1885824102, 2);
      v_state := '';
    end if;
    if v_state not in ('sentinel', 'listener') then
      if pg_try_advisory_lock(1885824102, 1) then
        v_state := 'sentinel';
      elsif queue._joins_sentinel() then
        v_state := 'listener';
      else
        v_poll := least(coalesce(nullif(substring(v_state from '^poll ([0-9]+)$'), '')::integer, 10) * 2, 1000);
        v_state := 'poll ' || v_poll;
        v_wait := make_interval(secs => v_poll / 1000.0);
        may_sleep := false;
      end if;
    end if;
    perform set_config('pgdefer.sleeper', v_state, false);
  end if;
  v_due := queue._next_due();
  if v_due is not null then
    v_wait := least(v_wait, greatest(v_due - clock_timestamp(), interval '0'));
  end if;
  -- not what is on its way to another session of the worker's
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
  'Decides, in the session that listens, whether a worker may sleep: LISTEN on the channels, fetch once more, then wait for a notification for at most wait_for. may_sleep false: notifications may fail to come, just fetch again after wait_for. is_drained: nothing of these queues is ready or due, or has yet to be admitted, so that nothing starts until somebody commits, ends, resumes or retries something, or a time comes; options: tasks and deadline_within, as of fetch, for what is ready.';

-- Locks: gives back what before_sleep took in this session.
create or replace function queue.after_sleep(worker bigint)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_state text := coalesce(current_setting('pgdefer.sleeper', true), '');
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_worker(after_sleep.worker);
  end if;
  if v_state = 'sentinel' then
    perform pg_advisory_unlock(1885824102, 1);
    if pg_try_advisory_lock(1885824102, 2) then
      perform pg_advisory_unlock(1885824102, 2);
    else
      perform queue._wake();
    end if;
  elsif v_state = 'listener' then
    perform pg_advisory_unlock_shared(1885824102, 2);
  end if;
  if v_state <> '' then
    perform set_config('pgdefer.sleeper', '', false);
  end if;
end $$;
comment on function queue.after_sleep(bigint) is
  'To be called in the session that listens when a worker that slept has become busy: gives the latch back, so that producers need not notify, and wakes another sleeper in its place.';
