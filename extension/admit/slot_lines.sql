-- The lines of keys with slots: what jobs ask for, and how the lines stand. A key's line: the jobs of a lane
-- that wait for it, in their order.
-- Tests: admit/slots.sql, admit/enter_slots.sql, admit/shares.slots.sql.

-- What jobs ask for. The (key, lane) with the number i is (keys[i], lanes[i]), and newest[i] is the newest of
-- its jobs. The job at place ns[r] asks for weights[r] slots of the one with the number pairs[r], in the
-- order of the jobs, then of the numbers. discards: jobs that must not wait (on_limit), without those whose
-- queueing lock a defer is replacing; none in a refill. grown: keys whose limit one of the jobs has raised.
-- Locks: the caller holds the admission lock; rows of queue.queueing_lock by skip locked.
create or replace function queue._slot_requests(
  p_ids bigint[], p_lanes integer[], p_flags smallint[], p_is_refill boolean,
  out keys text[], out lanes integer[], out newest bigint[], out ns integer[], out pairs integer[],
  out weights integer[], out discards bigint[], out grown text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_set_keys text[];                          -- the limits that each job says
  v_set_slots integer[];
  v_set_ids bigint[];
  v_set_rate_limits integer[];
  v_set_rate_pers interval[];
begin
  select array_agg(x.n order by x.n, x.pair), array_agg(x.pair order by x.n, x.pair),
    array_agg(x.weight order by x.n, x.pair),
    array_agg(x.key order by x.pair) filter (where x.is_first),
    array_agg(x.lane order by x.pair) filter (where x.is_first),
    array_agg(x.newest order by x.pair) filter (where x.is_first),
    array_agg(x.id) filter (where x.discards and not p_is_refill and queue._try_lock_queueing_lock(x.id)),
    array_agg(x.key), array_agg(x.slots), array_agg(x.id), array_agg(x.rate_limit), array_agg(x.rate_per)
  into ns, pairs, weights, keys, lanes, newest, discards, v_set_keys, v_set_slots, v_set_ids,
    v_set_rate_limits, v_set_rate_pers
  from (
    select x.n, x.id, x.key, x.slots, x.discards, x.lane, x.weight, x.rate_limit, x.rate_per,
      dense_rank() over (order by x.key, x.lane)::integer as pair,
      row_number() over (partition by x.key, x.lane) = 1 as is_first,
      max(x.id) over (partition by x.key, x.lane) as newest
    from (select x.n, x.id, x.key, x.slots, x.discards, x.weight, x.rate_limit, x.rate_per,
        p_lanes[x.n] as lane
      from queue._keys_of(p_ids, p_flags) x) x) x;
  grown := queue._set_slots(v_set_keys, v_set_slots, v_set_ids, v_set_rate_limits, v_set_rate_pers);
end $$;

-- How the line of each (key, lane) stands: the key's limits, what of them is free, how many of its jobs are
-- ready in the lane, and how many wait there. newest: the newest job whose limits have been read, 0 if that
-- is not known. behind_heavy: the numbers of lines that wait for a heavy job (_heavy_waiting).
-- Locks: the caller holds the admission lock.
create or replace function queue._slot_lines(p_keys text[], p_lanes integer[],
  out slots integer[], out free integer[], out rates integer[], out rate_room integer[],
  out have_rates boolean, out ready integer[], out waiting integer[], out newest bigint[],
  out behind_heavy integer[])
language plpgsql volatile parallel safe security invoker as $$
declare
  v_have_other_lanes boolean;
begin
  select array_agg(s.slots order by u.n), array_agg({{free_slots}} order by u.n),
    array_agg(s.rate_limit order by u.n),
    array_agg(queue._rate_room(u.key, s.rate_limit, s.rate_per, s.rate_limit, clock_timestamp())
      order by u.n),
    bool_or(s.rate_limit is not null),
    array_agg(coalesce(s.ready[s.at], 0) order by u.n), array_agg(coalesce(s.waiting[s.at], 0) order by u.n),
    array_agg(s.limit_id order by u.n),
    bool_or(s.lanes not in ('{}', array[u.lane]))
  into slots, free, rates, rate_room, have_rates, ready, waiting, newest, v_have_other_lanes
  from unnest(p_keys, p_lanes) with ordinality u (key, lane, n)
  cross join lateral (
    select s.slots, s.used, s.rate_limit, s.rate_per, s.limit_id, s.lanes, s.ready, s.waiting,
      array_position(s.lanes, u.lane) as at
    from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) s;
  if v_have_other_lanes then
    behind_heavy := array(
      select u.n
      from queue._heavy_waiting(p_keys) h
      join unnest(p_keys, p_lanes) with ordinality u (key, lane, n) on u.key = h.key
      join queue.lane l on l.lane = u.lane
      where l.queue = h.queue and l.priority < h.priority);
  end if;
end $$;

-- The place and the id of the first job in the line of each (key, lane).
create or replace function queue._line_heads(p_keys text[], p_lanes integer[],
  out places timestamptz[], out ids bigint[])
language plpgsql stable parallel safe security invoker as $$
begin
  select array_agg(h.deadline order by u.n), array_agg(h.id order by u.n) into places, ids
  from unnest(p_keys, p_lanes) with ordinality u (key, lane, n)
  cross join lateral (
    select s.lows, s.low_deadlines, array_position(s.lanes, u.lane) as at
    from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) s
  left join lateral (
    select w.deadline, w.id from queue.waiting w
    where w.reason = 'slot' and w.key = u.key and w.lane = u.lane
      and (w.deadline, w.id) >= (s.low_deadlines[s.at], s.lows[s.at])
    order by w.deadline, w.id limit 1) h on true;
end $$;
