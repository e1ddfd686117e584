-- The gates, in their order: held, needs, schedule, a paused task, the lock's turn, slots. A job is
-- looked at once per gate, and waits in that gate's own place. Everything here runs under ADM.

-- New jobs that are not plain: joins locks, writes needs, and sends them to their first gate.
create or replace function queue._admit_gated(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
  v_free bigint[];
  v_gone bigint[];
  v_flags integer;
  v_only_locks boolean;
begin
  select array_agg(j.id order by j.id), bit_or(j.flags), bool_and(j.flags & 3 <> 0 and j.flags & (8 | 16 | 32 | 64) = 0 and s.id is null)
  into v_ids, v_flags, v_only_locks
  from unnest(p_ids) u (id)
  cross join lateral (select j.id, j.flags from queue.job j where j.id = u.id offset 0) j
  left join lateral (select s.id from queue.job_state s where s.id = u.id offset 0) s on true;
  if v_flags & 3 <> 0 then
    v_free := queue._join_locks(v_ids);
    if v_only_locks and not exists (select from queue.pause p where p.task is not null) then
      -- those that wait for their turn need not be looked at again
      perform queue._to_slots(v_free) where v_free is not null;
      return;
    end if;
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
    select array_agg(h.id) into v_gone from held h;
    v_ids := array(select u.id from unnest(v_ids) u (id) where u.id <> all (v_gone));
  end if;
  perform queue._route(v_ids, false);
  if v_gone is not null then
    -- last: only now every job here is in a gate or in queue.live
    perform queue._needs_changed(v_gone);
  end if;
end $$;

-- Sends jobs that are in no gate to the first that is shut for them, or to queue.live.
-- p_has_turn: they had the turn at their lock (they come from queue.live) and keep it. p_needs_met: they come
-- from the gate of needs.
create or replace function queue._route(p_ids bigint[], p_has_turn boolean, p_needs_met boolean default false)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_flags integer;
  v_is_later boolean;
  v_pass bigint[] := p_ids;
begin
  if v_pass is null or v_pass = '{}' then
    return;
  end if;
  select bit_or(j.flags | coalesce(s.extra_flags, 0)), bool_or(coalesce(s.scheduled_at, j.scheduled_at) > v_now) into v_flags, v_is_later
  from unnest(p_ids) u (id)
  cross join lateral (select j.flags, j.scheduled_at from queue.job j where j.id = u.id offset 0) j
  left join lateral (select s.scheduled_at, s.extra_flags from queue.job_state s where s.id = u.id offset 0) s on true;
  if p_has_turn and v_flags & 3 <> 0 then
    perform queue._keep_turns(p_ids);
  end if;
  if v_flags & 8 <> 0 and not p_needs_met then
    v_pass := queue._wait_for_needs(v_pass);
  end if;
  if v_is_later then
    with seen as materialized (
      select u.id, coalesce(s.scheduled_at, j.scheduled_at) as at
      from unnest(v_pass) u (id)
      cross join lateral (select j.scheduled_at from queue.job j where j.id = u.id offset 0) j
      left join lateral (select s.scheduled_at from queue.job_state s where s.id = u.id offset 0) s on true),
    later as (
      insert into queue.waiting (id, reason, at) select x.id, 'schedule', x.at from seen x where x.at > v_now)
    select array_agg(x.id order by x.id) into v_pass from seen x where x.at is null or x.at <= v_now;
    perform queue._heed_clock();
  end if;
  if v_pass is not null and exists (select from queue.pause p where p.task is not null) then
    v_pass := queue._wait_for_task(v_pass);
  end if;
  if v_pass is not null and v_flags & 1 <> 0 then
    v_pass := queue._wait_for_turn(v_pass);
  end if;
  if v_pass is not null then
    perform queue._to_slots(v_pass);
  end if;
  if p_has_turn and v_flags & 1 <> 0 then
    -- last: only now those that had the turn are in a gate or in queue.live
    perform queue._displace(queue._locks_of(p_ids), '{}');
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
  perform queue._route(v_ids, false);
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
            (j.flags | coalesce(s.extra_flags, 0)) & (case when s.lock = '' then 0 else 3 end | 4 | 8 | 64 | 128 | 256 | 512 | 8192)
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
