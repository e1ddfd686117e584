-- The gates, in their order: held, needs, signals, schedule, a paused task, the lock's turn, slots. Each gate
-- checks a job once, and has its own place for waiting jobs. Everything here runs under the admission lock.
--
-- A gate that opens for one job may open another gate: the next job of a lock may be discarded at a full key,
-- and so pass its turn on at once. So no gate calls another. Each returns the jobs that it releases, and
-- _advance, the only function that calls them all, continues until none is left.
-- Tests: admit/admission.sql, admit/backlog.sql.

-- Sends jobs through the gates, and continues with the jobs that these release, until nothing moves.
--   p_arrived: in no gate; they have to pass all of them
--   p_turned: in no gate; they have passed all but the last, slots
--   p_ended: finished, but their locks and dependents do not know yet
--   p_keys: semaphores that may have room for waiting jobs
--   p_locks: locks whose job at its turn may have to give way to an older one
--   p_changed: jobs whose dependents must check their needs again
-- The order matters: no function may look for a job that is in no gate, so these come first.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
-- Duration: a round of the loop takes one link of each chain, and at most 1,000 of the jobs that arrive, as
-- when a job ends that many need. The rest is handed over to the next admission after 20 rounds and 50 ms, or
-- after 500 ms if more than 1,000 jobs are left to arrive, so that nobody waits long for the admission lock.
-- Otherwise the first 20 rounds run however long they take, so that a short chain ends in the same way on a
-- busy machine.
-- Why no wake-up is lost: the rest is handed over like ended claims (admit/admission.sql), by kind: jobs in
-- no gate (again, with flags 0 because they hold nothing), keys (refill), dependents (recheck), locks
-- (readmit).
-- In one piece: each step of the loop decides what the next ones may do.
create or replace function queue._advance(
  p_arrived bigint[] default null, p_turned bigint[] default null, p_ended bigint[] default null,
  p_keys text[] default null, p_locks text[] default null, p_changed bigint[] default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_start constant timestamptz := clock_timestamp();
  v_arrived bigint[] := p_arrived;
  v_met bigint[];  -- arrived jobs whose needs are met
  v_later bigint[] := '{}'::bigint[];  -- arrived jobs beyond 1,000
  v_turned bigint[] := p_turned;
  v_ended bigint[] := p_ended;
  v_keys text[] := p_keys;
  v_locks text[] := p_locks;
  v_changed bigint[] := p_changed;
  v_rounds integer := 0;
  v_step record;
  v_way record;
begin
  perform queue._count_in_groups(p_changed) where p_changed <> '{}';
  loop
    v_rounds := v_rounds + 1;
    if greatest(cardinality(v_arrived), cardinality(v_met)) > 1000 then
      v_later := v_arrived[1001:] || v_met[1001:] || v_later;
      v_arrived := v_arrived[:1000];
      v_met := v_met[:1000];
    end if;
    if v_arrived <> '{}' or v_met <> '{}' then
      v_step := queue._pass_gates(v_arrived, v_met);
      v_arrived := null;
      v_met := null;
      v_turned := v_turned || v_step.passed;
      v_changed := v_changed || v_step.failed;
    end if;
    if v_turned <> '{}' then
      v_step := queue._enter_slots(v_turned);
      v_turned := null;
      v_way := queue._make_way(v_step.passed);
      v_arrived := v_way.ids;
      v_keys := v_keys || v_step.grown || v_way.keys;
      if v_step.discarded is not null then
        perform queue._finish_unclaimed(v_step.discarded, 'cancelled', 'limit', null);
        v_ended := v_ended || v_step.discarded;
      end if;
    end if;
    if v_ended <> '{}' then
      perform queue._count_in_groups(v_ended);
      v_turned := queue._leave_locks(v_ended, false);
      v_changed := v_changed || array(
        select u.id from unnest(v_ended) u (id)
        where (select d.job_id from queue.need d where d.need_id = u.id limit 1) is not null);
      v_ended := null;
    end if;
    if v_turned <> '{}' or v_arrived <> '{}' then
      null;
    elsif v_later <> '{}' then
      v_arrived := v_later;
      v_later := '{}';
    elsif v_keys <> '{}' then
      v_keys := queue._refill(v_keys);
    elsif v_locks <> '{}' then
      v_step := queue._give_turn_to_older(v_locks, '{}');
      v_locks := null;
      v_arrived := v_step.displaced;
      v_turned := v_step.passed;
      v_keys := v_step.keys;
    elsif v_changed <> '{}' then
      v_step := queue._needs_changed(v_changed);
      v_met := v_step.met;
      v_keys := v_step.keys;
      v_changed := v_step.changed;
    else
      return;
    end if;
    exit when v_rounds > 20 and clock_timestamp() > v_start + interval '50 ms'
      or cardinality(v_arrived) > 1000 and clock_timestamp() > v_start + interval '500 ms';
  end loop;
  if v_turned <> '{}' then
    perform queue._keep_turns(v_turned);
  end if;
  insert into queue.pending_settlement (job_id, kind, flags, payload)
  select u.id, 'again', 0, null::jsonb from unnest(v_arrived || v_met || v_turned || v_later) u (id)
  union all
  select u.id, 'recheck', {{needed}}, null from unnest(v_changed) u (id)
  union all
  select m.id, 'readmit', 0, null
  from unnest(v_locks) u (lock)
  cross join lateral (select m.id from queue.lock_member m where m.lock = u.lock order by m.id limit 1) m
  union all
  select 0, 'refill', 0, to_jsonb(v_keys) where v_keys <> '{}';
end $$;

-- Continues with the rest that _advance has handed over in this transaction, which the transaction's own
-- admissions do not read: an operation must find every job in its place.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._advance_own()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_own record;
begin
  loop
    with gone as (
      delete from queue.pending_settlement h
      where h.xid = pg_current_xact_id_if_assigned()
        and (h.kind = 'again' and h.flags = 0 and h.payload is null or h.kind = 'refill')
      returning h.job_id, h.kind, h.payload)
    select count(*) as n, array_agg(g.job_id) filter (where g.kind = 'again') as ids,
      array_agg(k.key) filter (where g.kind = 'refill') as keys
    into v_own
    from gone g left join lateral jsonb_array_elements_text(g.payload) k (key) on g.kind = 'refill';
    exit when v_own.n = 0;
    perform queue._advance(p_arrived => v_own.ids, p_keys => v_own.keys);
  end loop;
end $$;

-- Parks new jobs. Those with an ordered lock stay until all backlog has been read, as it may contain older
-- jobs of the lock. Others stay until one of the next admissions takes them (_unpark); for that, weight is
-- their priority with the other sign.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: while a job is parked, the cursor says
-- that there is a backlog, so workers do not sleep, and each admission looks here.
create or replace function queue._park(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  insert into queue.waiting (id, reason, weight)
  select j.id, 'parked', case when j.flags & {{ordered}} = 0 then -greatest(j.priority, -2147483647) end
  from unnest(p_ids) u (id)
  cross join lateral (select j.id, j.flags, j.priority from queue.job_now j where j.id = u.id offset 0) j;
end $$;

-- Takes the most urgent of the parked jobs that have no ordered lock.
-- Locks: the caller holds the admission lock.
create or replace function queue._unpark()
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
begin
  with gone as (
    delete from queue.waiting w
    where w.ctid = any (array(select p.ctid from queue.waiting p
      where p.reason = 'parked' and p.weight is not null order by p.weight, p.id limit 1000))
    returning w.id)
  select array_agg(g.id) into v_ids from gone g;
  return v_ids;
end $$;

-- Admits new jobs that are not plain: joins locks, writes needs, and sends them to their first gate.
create or replace function queue._admit_gated(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
  v_joined record;
  v_held bigint[];
  v_flags integer;
  v_only_locks boolean;
begin
  select array_agg(j.id order by j.id), bit_or(j.flags), bool_and(j.flags & {{lock}} <> 0
    and j.flags & ({{needs}} | {{scheduled}} | {{held}} | {{expires}}) = 0 and not j.is_overridden)
  into v_ids, v_flags, v_only_locks
  from unnest(p_ids) u (id)
  cross join lateral (
    select j.id, j.flags, j.is_overridden from queue.job_now j where j.id = u.id offset 0) j;
  if v_flags & {{needed}} <> 0 then
    perform queue._join_groups(v_ids);
  end if;
  if v_flags & {{lock}} <> 0 then
    v_joined := queue._join_locks(v_ids);
    if v_only_locks and not exists (select from queue.pause p where p.task is not null) then
      -- Jobs that wait for their turn need no other check.
      perform queue._advance(
        p_arrived => v_joined.displaced, p_turned => v_joined.free || v_joined.passed,
        p_keys => v_joined.keys);
      return;
    end if;
  else
    select null::bigint[] as passed, null::bigint[] as displaced, null::text[] as keys into v_joined;
  end if;
  if v_flags & {{needs}} <> 0 then
    perform queue._join_needs(v_ids);
  end if;
  if v_flags & {{expires}} <> 0 then
    insert into queue.expiry (id, at)
    select j.id, (j.options ->> 'expires_at')::timestamptz from queue.job j
    where j.id = any (v_ids) and j.flags & {{expires}} <> 0;
  end if;
  if v_flags & {{held}} <> 0 then
    with held as (
      insert into queue.waiting (id, reason) select j.id, 'held' from queue.job j
      where j.id = any (v_ids) and j.flags & {{held}} <> 0
      returning id)
    select array_agg(h.id) into v_held from held h;
    v_ids := array(select u.id from unnest(v_ids) u (id) where u.id not in (select unnest(v_held)));
  end if;
  perform queue._advance(
    p_arrived => v_ids || v_joined.displaced, p_turned => v_joined.passed, p_keys => v_joined.keys,
    p_changed => v_held);
end $$;

-- Sends jobs that are in no gate to the first gate that is closed for them. p_met: jobs that have passed the
-- gate of needs. passed: jobs for which all gates but slots were open. failed: jobs that wait because one of
-- their needs has failed.
-- Locks: the caller holds the admission lock.
create or replace function queue._pass_gates(p_ids bigint[], p_met bigint[], out passed bigint[],
  out failed bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_flags integer;
  v_is_later boolean;
  v_is_suspended boolean;
  v_waiting record;
begin
  select bit_or(j.flags), bool_or(j.scheduled_at > v_now), bool_or(j.is_suspended)
  into v_flags, v_is_later, v_is_suspended
  from unnest(p_ids || p_met) u (id)
  cross join lateral (
    select j.flags, j.scheduled_at, j.is_suspended from queue.job_now j where j.id = u.id offset 0) j;
  passed := p_ids;
  if v_flags & {{needs}} <> 0 and p_ids <> '{}' then
    v_waiting := queue._wait_for_needs(p_ids);
    passed := v_waiting.passed;
    failed := v_waiting.failed;
  end if;
  passed := passed || p_met;
  if v_is_suspended and passed is not null then
    v_waiting := queue._wait_for_signals(passed);
    passed := v_waiting.passed;
    if v_waiting.is_timed then
      perform queue._rewind_due_mark();
    end if;
  end if;
  if v_is_later then
    with seen as materialized (
      select u.id, j.scheduled_at as at
      from unnest(passed) u (id)
      cross join lateral (select j.scheduled_at from queue.job_now j where j.id = u.id offset 0) j),
    later as (
      insert into queue.waiting (id, reason, at) select x.id, 'schedule', x.at from seen x where x.at > v_now)
    select array_agg(x.id order by x.id) into passed from seen x where x.at is null or x.at <= v_now;
    perform queue._rewind_due_mark();
  end if;
  if passed is not null and exists (select from queue.pause p where p.task is not null) then
    passed := queue._wait_for_task(passed);
  end if;
  if passed is not null and v_flags & {{ordered}} <> 0 then
    passed := queue._wait_for_turn(passed);
  end if;
end $$;

-- Returns the jobs whose task is not paused; the others wait.
-- Locks: the caller holds the admission lock.
create or replace function queue._wait_for_task(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_pass bigint[];
  v_waits boolean;
begin
  with seen as materialized (
    select u.id, queue._task_paused_until(j.task, j.queue) as until
    from unnest(p_ids) u (id)
    cross join lateral (select j.task, j.queue from queue.job_now j where j.id = u.id offset 0) j),
  wait as (
    insert into queue.waiting (id, reason, at) select s.id, 'task_paused', nullif(s.until, 'infinity')
    from seen s where s.until > v_now)
  select array_agg(s.id order by s.id) filter (where s.until is null or s.until <= v_now),
    bool_or(s.until > v_now) into v_pass, v_waits from seen s;
  if v_waits then
    perform queue._rewind_due_mark();
  end if;
  return v_pass;
end $$;
