-- The gates, in their order: held, needs, schedule, a paused task, the lock's turn, slots. A job is
-- looked at once per gate, and waits in that gate's own place. Everything here runs under ADM.
--
-- A gate that opens for one job may open another: a lock's next job may end at a full key, and so give
-- its turn on at once. So no gate calls another. Each returns what it lets go, and _advance, the one
-- function that calls them all, goes on until nothing is left.

-- New jobs that are not plain: joins locks, writes needs, and sends them to their first gate.
create or replace function queue._admit_gated(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
  v_joined record;
  v_held bigint[];
  v_flags integer;
  v_only_locks boolean;
begin
  select array_agg(j.id order by j.id), bit_or(j.flags), bool_and(j.flags & 3 <> 0 and j.flags & (8 | 16 | 32 | 64) = 0 and s.id is null)
  into v_ids, v_flags, v_only_locks
  from unnest(p_ids) u (id)
  cross join lateral (select j.id, j.flags from queue.job j where j.id = u.id offset 0) j
  left join lateral (select s.id from queue.job_state s where s.id = u.id offset 0) s on true;
  if v_flags & 3 <> 0 then
    v_joined := queue._join_locks(v_ids);
    if v_only_locks and not exists (select from queue.pause p where p.task is not null) then
      -- those that wait for their turn need not be looked at again
      perform queue._advance(
        p_arrived => v_joined.displaced, p_turned => v_joined.free || v_joined.passed, p_keys => v_joined.keys);
      return;
    end if;
  else
    select null::bigint[] as passed, null::bigint[] as displaced, null::text[] as keys into v_joined;
  end if;
  if v_flags & 8 <> 0 then
    perform queue._join_needs(v_ids);
  end if;
  if v_flags & 64 <> 0 then
    insert into queue.expiry (id, at)
    select j.id, (j.options ->> 'expires_at')::timestamptz from queue.job j where j.id = any (v_ids) and j.flags & 64 <> 0;
  end if;
  if v_flags & 32 <> 0 then
    with held as (
      insert into queue.waiting (id, reason) select j.id, 'held' from queue.job j where j.id = any (v_ids) and j.flags & 32 <> 0
      returning id)
    select array_agg(h.id) into v_held from held h;
    v_ids := array(select u.id from unnest(v_ids) u (id) where u.id not in (select unnest(v_held)));
  end if;
  perform queue._advance(
    p_arrived => v_ids || v_joined.displaced, p_turned => v_joined.passed, p_keys => v_joined.keys, p_changed => v_held);
end $$;

-- Sends jobs through the gates, and on from each job that this moves to those that it lets go, until nothing moves.
--   p_arrived: in no gate; to go through all of them
--   p_turned: in no gate; they have passed all but the last, slots
--   p_ended: finished, and their locks and dependents do not know yet
--   p_keys: semaphores that may have room for those that wait
--   p_locks: the job that has the turn may have to give it to an older one
--   p_changed: jobs whose dependents have to look at their needs again
-- The order matters: as long as a job is in no gate nobody may look where it is, so these come first.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
-- How long: a chain of any length takes one turn of the loop for each link. After 20 turns and 50 ms the rest is handed over to
-- the next admission, so that nobody waits long for ADM. The first 20 turns are taken however long they last, so that a short
-- chain ends in the same way on a busy machine.
-- Why no wake-up is lost: what is handed over is read as what ended claims hand over (30_admission.sql): jobs in no gate (again, with flags 0: they hold nothing), keys (refill), dependents (recheck), locks
-- (regate).
create or replace function queue._advance(
  p_arrived bigint[] default null, p_turned bigint[] default null, p_ended bigint[] default null,
  p_keys text[] default null, p_locks text[] default null, p_changed bigint[] default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_until constant timestamptz := clock_timestamp() + interval '50 ms';
  v_arrived bigint[] := p_arrived;
  v_met bigint[];  -- as arrived, with their needs met
  v_turned bigint[] := p_turned;
  v_ended bigint[] := p_ended;
  v_keys text[] := p_keys;
  v_locks text[] := p_locks;
  v_changed bigint[] := p_changed;
  v_turns integer := 0;
  v record;
begin
  loop
    v_turns := v_turns + 1;
    if v_arrived <> '{}' or v_met <> '{}' then
      v := queue._pass_gates(v_arrived, v_met);
      v_arrived := null;
      v_met := null;
      v_turned := v_turned || v.passed;
      v_changed := v_changed || v.failed;
    end if;
    if v_turned <> '{}' then
      v := queue._enter_slots(v_turned, false);
      v_turned := null;
      v_keys := v_keys || v.grown;
      if v.discarded is not null then
        perform queue._finish_unclaimed(v.discarded, 'cancelled', 'limit', null);
        v_ended := v_ended || v.discarded;
      end if;
    end if;
    if v_ended <> '{}' then
      v_turned := queue._leave_locks(v_ended, false);
      v_changed := v_changed || array(
        select u.id from unnest(v_ended) u (id) where (select d.job_id from queue.need d where d.need_id = u.id limit 1) is not null);
      v_ended := null;
    end if;
    if v_turned <> '{}' then
      null;
    elsif v_keys <> '{}' then
      v_keys := queue._refill(v_keys);
    elsif v_locks <> '{}' then
      v := queue._displace(v_locks, '{}');
      v_locks := null;
      v_arrived := v.displaced;
      v_turned := v.passed;
      v_keys := v.keys;
    elsif v_changed <> '{}' then
      v := queue._needs_changed(v_changed);
      v_met := v.met;
      v_keys := v.keys;
      v_changed := v.changed;
    else
      return;
    end if;
    exit when v_turns > 20 and clock_timestamp() > v_until;
  end loop;
  if v_turned <> '{}' then
    perform queue._keep_turns(v_turned);
  end if;
  insert into queue.handover (job_id, kind, flags, payload)
  select u.id, 'again', 0, null::jsonb from unnest(v_arrived || v_met || v_turned) u (id)
  union all
  select u.id, 'recheck', 4096, null from unnest(v_changed) u (id)
  union all
  select m.id, 'regate', 0, null
  from unnest(v_locks) u (lock) cross join lateral (select m.id from queue.lock_member m where m.lock = u.lock order by m.id limit 1) m
  union all
  select 0, 'refill', 0, to_jsonb(v_keys) where v_keys <> '{}';
end $$;

-- Goes on with what _advance has handed over in this very transaction, which its own admissions do not read: an operation must
-- find every job in its place.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._advance_own()
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
begin
  loop
    with gone as (
      delete from queue.handover h
      where h.xid = pg_current_xact_id_if_assigned() and (h.kind = 'again' and h.flags = 0 and h.payload is null or h.kind = 'refill')
      returning h.job_id, h.kind, h.payload)
    select count(*) as n, array_agg(g.job_id) filter (where g.kind = 'again') as ids,
      array_agg(k.key) filter (where g.kind = 'refill') as keys
    into v
    from gone g left join lateral jsonb_array_elements_text(g.payload) k (key) on g.kind = 'refill';
    exit when v.n = 0;
    perform queue._advance(p_arrived => v.ids, p_keys => v.keys);
  end loop;
end $$;

-- Sends jobs that are in no gate to the first that is shut for them. p_met: likewise, from the gate of needs. passed: those
-- for whom all were open, so that only slots are left; failed: those that wait, as a need of theirs has failed.
-- Locks: the caller holds ADM.
create or replace function queue._pass_gates(p_ids bigint[], p_met bigint[], out passed bigint[], out failed bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_flags integer;
  v_is_later boolean;
  v_waiting record;
begin
  select bit_or(j.flags | coalesce(s.extra_flags, 0)), bool_or(coalesce(s.scheduled_at, j.scheduled_at) > v_now) into v_flags, v_is_later
  from unnest(p_ids || p_met) u (id)
  cross join lateral (select j.flags, j.scheduled_at from queue.job j where j.id = u.id offset 0) j
  left join lateral (select s.scheduled_at, s.extra_flags from queue.job_state s where s.id = u.id offset 0) s on true;
  passed := p_ids;
  if v_flags & 8 <> 0 and p_ids <> '{}' then
    v_waiting := queue._wait_for_needs(p_ids);
    passed := v_waiting.passed;
    failed := v_waiting.failed;
  end if;
  passed := passed || p_met;
  if v_is_later then
    with seen as materialized (
      select u.id, coalesce(s.scheduled_at, j.scheduled_at) as at
      from unnest(passed) u (id)
      cross join lateral (select j.scheduled_at from queue.job j where j.id = u.id offset 0) j
      left join lateral (select s.scheduled_at from queue.job_state s where s.id = u.id offset 0) s on true),
    later as (
      insert into queue.waiting (id, reason, at) select x.id, 'schedule', x.at from seen x where x.at > v_now)
    select array_agg(x.id order by x.id) into passed from seen x where x.at is null or x.at <= v_now;
    perform queue._heed_clock();
  end if;
  if passed is not null and exists (select from queue.pause p where p.task is not null) then
    passed := queue._wait_for_task(passed);
  end if;
  if passed is not null and v_flags & 1 <> 0 then
    passed := queue._wait_for_turn(passed);
  end if;
end $$;

-- Something waits for a time to come: while the clock stands before the mark of what is due, as it was set back since, the
-- mark goes back with it, or the next admission, should it be after the mark, would begin there.
-- Locks: the caller holds ADM.
create or replace function queue._heed_clock()
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_tick bigint;
  v_due_at timestamptz;
begin
  select k.tick, k.due_at into v_tick, v_due_at from queue.cursor k order by k.tick desc limit 1;
  if v_due_at > clock_timestamp() then
    update queue.cursor k set due_at = '-infinity' where k.tick = v_tick;
  end if;
end $$;

-- Moves jobs whose time has come on. Returns the new mark: nothing that waits lies before it.
create or replace function queue._admit_due(p_due_at timestamptz, p_slice integer)
returns timestamptz language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_ids bigint[];
  v_at timestamptz;
begin
  with due as (
    delete from queue.waiting w
    where w.ctid = any (array(select d.ctid from queue.waiting d
                              where d.at >= p_due_at and d.at <= v_now order by d.at, d.id limit p_slice))
    returning w.id, w.at)
  select array_agg(d.id order by d.id), max(d.at) into v_ids, v_at from due d;
  perform queue._advance(p_arrived => v_ids);
  return case when cardinality(v_ids) >= p_slice then v_at else v_now end;
end $$;

-- Admits jobs that were put aside while there was a backlog, in the order of ids, and returns how many.
create or replace function queue._unpark(p_slice integer)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
begin
  with parked as (
    delete from queue.waiting w
    where w.ctid = any (array(select p.ctid from queue.waiting p where p.reason = 'parked' order by p.id limit p_slice))
    returning w.id)
  select array_agg(p.id) into v_ids from parked p;
  if v_ids is not null then
    perform queue._admit_gated(v_ids);
  end if;
  return coalesce(cardinality(v_ids), 0);
end $$;

-- Where jobs go in queue.live: lane, order key, flags and attempts so far, in the order of ids. Makes lanes that are
-- missing. all_flags: what any of them has; is_low: one lies below its lane's low mark.
-- The flag 2 stands for the semaphore 'm' || lock, which ordered jobs of a lock with mutex members ask too.
-- offset 0 keeps what is looked up for a job from being looked up again wherever it is named.
create or replace function queue._places(
  p_ids bigint[], out ids bigint[], out lanes integer[], out deadlines timestamptz[], out flags smallint[], out attempts smallint[],
  out all_flags integer, out is_low boolean)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_queues text[];
  v_priorities integer[];
  v_kinds smallint[];
  v_high_need_id bigint := coalesce(pg_sequence_last_value('queue.needed_seq'), 0);
  v_is_complete boolean;
begin
  for v_pass in 1 .. 2 loop
    select array_agg(x.id), array_agg(x.deadline), array_agg(x.flags), array_agg(x.attempts),
      array_agg(x.queue), array_agg(x.priority), array_agg(x.kind), array_agg(x.lane), bool_and(x.lane is not null), bit_or(x.flags), bool_or(x.is_low)
    into ids, deadlines, flags, attempts, v_queues, v_priorities, v_kinds, lanes, v_is_complete, all_flags, is_low
    from (
      select x.id, x.deadline, (x.flags | coalesce(l.extra_flags, 0))::smallint as flags, x.attempts, x.queue, x.priority, x.kind, l.lane,
        l.is_idle or (x.deadline, x.id) < (l.low_deadline, l.low_id) as is_low
      from (
        select y.id, y.deadline, y.queue, y.priority, y.attempts, y.flags | y.mixed as flags,
          (case when y.flags & 1024 <> 0 then 2
                when (y.flags | y.mixed) & (2 | 4 | 64 | 256 | 8192) <> 0 or y.flags & 8 <> 0 and queue._needs_mode(y.options) & 1 <> 0
                  or exists (select from queue.queue_config c where c.queue = y.queue and (c.max_running is not null or c.rate_limit is not null))
                then 1 else 0 end)::smallint as kind
        from (
          select j.id, coalesce(s.deadline, j.deadline, 'infinity') as deadline, coalesce(s.queue, j.queue) as queue,
            coalesce(s.priority, j.priority) as priority, least(coalesce(s.attempts, 0), 32766)::smallint as attempts,
            (j.flags | coalesce(s.extra_flags, 0)) & (case when s.lock = '' then 0 else 3 end | 4 | 8 | 64 | 128 | 256 | 512 | 8192 | -32768)
              | case when s.crashes > 0 then 1024 else 0 end
              | case when s.id is not null then 2048 else 0 end
              | case when j.id <= v_high_need_id and (select d.job_id from queue.need d where d.need_id = j.id limit 1) is not null then 4096 else 0 end as flags,
            j.options,
            case when (j.flags | coalesce(s.extra_flags, 0)) & 1 <> 0
                   and (select m.id from queue.lock_member m where m.lock = coalesce(s.lock, j.lock) and m.is_mutex limit 1) is not null
                 then 2 else 0 end as mixed
          from queue.job j left join lateral (select s.* from queue.job_state s where s.id = j.id offset 0) s on true
          where j.id = any (p_ids) order by j.id offset 0) y offset 0) x
      left join lateral (select l.lane, l.extra_flags, l.is_idle, l.low_deadline, l.low_id from queue.lane l
                         where l.queue = x.queue and l.priority = x.priority and l.kind = x.kind limit 1) l on true
      order by x.id) x;
    exit when v_is_complete is not false;
    insert into queue.lane (lane, queue, priority, kind, paused_until, extra_flags)
    select queue._new_lane(), u.queue, u.priority, u.kind, queue._paused_until(u.queue),
      case when exists (select from queue.queue_config c where c.queue = u.queue and c.retain is not null) then 512 else 0 end
    from (select distinct u.queue, u.priority, u.kind
          from unnest(v_queues, v_priorities, v_kinds, lanes) u (queue, priority, kind, lane) where u.lane is null) u;
  end loop;
end $$;

-- A number for a new lane: those of dropped ones come again.
create or replace function queue._new_lane()
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_lane integer;
begin
  loop
    v_lane := nextval('queue.lane_seq');
    exit when not exists (select from queue.lane l where l.lane = v_lane);
  end loop;
  return v_lane;
end $$;

-- Puts placed jobs into queue.live and lowers low marks; p_is_low: some of them need it.
create or replace function queue._to_live(
  p_ids bigint[], p_lanes integer[], p_deadlines timestamptz[], p_flags smallint[], p_attempts smallint[], p_is_low boolean default true)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  insert into queue.live (id, deadline, lane, attempt, flags)
  select u.id, u.deadline, u.lane, u.attempt, u.flags
  from unnest(p_ids, p_deadlines, p_lanes, p_attempts, p_flags) u (id, deadline, lane, attempt, flags);
  if p_is_low then
    perform queue._lower(p_lanes, p_deadlines, p_ids);
  end if;
end $$;
