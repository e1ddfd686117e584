-- Slots that become free go to the jobs that wait for them.
-- Tests: admit/refill.sql, admit/slots.sql, admit/rates.sql.

-- Gives free slots of keys to waiting jobs, in each lane by deadline and id. Jobs with several keys may have
-- to wait for another key, so it looks at more jobs, up to some hundreds; the next admission continues.
-- Returns keys whose limit this has raised.
-- Why no wake-up is lost: it is called in the admission that frees the slots.
-- Locks: the caller holds the admission lock.
-- In one piece: the loop is one query, and what its result needs.
create or replace function queue._refill(p_keys text[])
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_moved record;
  v_extra integer := 0;
  v_grown text[];
begin
  loop
    with heavy as materialized (
      select h.key, h.queue, h.priority from queue._heavy_waiting(p_keys) h),
    room as materialized (
      select s.key, l.lane, l.low, l.low_deadline, s.slots, s.rate_limit,
        s.free - l.ready as room, s.rate_room - l.ready as rate_room,
        greatest(least(s.free - l.ready, s.rate_room - l.ready, l.waiting), v_extra) as look
      from (select distinct u.key from unnest(p_keys) u (key)) u
      cross join lateral (
        select s.key, s.slots, s.rate_limit, s.lanes, s.ready, s.waiting, s.lows, s.low_deadlines,
          {{free_slots}} as free,
          queue._rate_room(u.key, s.rate_limit, s.rate_per, s.rate_limit, clock_timestamp()) as rate_room
        from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) s
      cross join lateral unnest(s.lanes, s.ready, s.waiting, s.lows, s.low_deadlines)
        l (lane, ready, waiting, low, low_deadline)
      where l.waiting > 0 and least(s.free, s.rate_room) > l.ready
        and not exists (select from heavy h join queue.lane k on k.lane = l.lane
          where h.key = s.key and h.queue = k.queue and h.priority > k.priority)),
    let as (
      delete from queue.waiting w
      where w.ctid = any (array(
        select w.ctid from room r
        cross join lateral (
          -- In order: a job whose weight does not fit holds up the jobs behind it.
          select w.ctid
          from (
            select w.tid as ctid,
              greatest(sum(w.weight) over o - r.room, sum(w.rate_weight) over o - r.rate_room) > 0
                as is_beyond,
              bool_or(greatest(w.weight - r.room, w.rate_weight - r.rate_room) > 0) over o as is_stopped
            from (
              select w.ctid as tid, w.deadline, w.id, least(coalesce(w.weight, 1), r.slots) as weight,
                least(coalesce(w.weight, 1), r.rate_limit) as rate_weight
              from queue.waiting w
              where w.reason = 'slot' and w.key = r.key and w.lane = r.lane
                and (w.deadline, w.id) >= (r.low_deadline, r.low)
              order by w.deadline, w.id limit r.look) w
            window o as (order by w.deadline, w.id rows unbounded preceding)) w
          where not w.is_stopped and (v_extra > 0 or not w.is_beyond)) w))
      returning w.id, w.key, w.lane, w.deadline, w.flags, w.attempt, w.moves, w.weight, w.reserved)
    select array_agg(l.key) as keys, array_agg(l.lane) as lanes, array_agg(l.id) as ids,
      array_agg(case when l.is_last then l.id + 1 end) as lows,
      array_agg(case when l.is_last then l.deadline end) as low_deadlines,
      array_agg(case when l.deadline < '{{end_of_tags}}' then l.deadline
        else coalesce(n.deadline, l.deadline) end) as deadlines, array_agg(n.flags) as flags,
      array_agg(l.attempt) as attempts, array_agg(coalesce(l.weight, 1)) as weights,
      array_agg(l.moves) as moves, bool_or(l.moves is not null) as have_several,
      (select array_agg(l.id) from let l cross join unnest(l.reserved) k) as reserved_ids,
      (select array_agg(k) from let l cross join unnest(l.reserved) k) as reserved_keys
    into v_moved
    from (select l.*, row_number() over (partition by l.key, l.lane order by l.deadline desc, l.id desc) = 1
        as is_last from let l) l
    cross join lateral (
      -- These may have changed since the job began to wait.
      select (select s.deadline from queue.job_override s where s.id = l.id) as deadline,
        (l.flags | case when exists (select from queue.job_override s where s.id = l.id) then {{overridden}}
          else 0 end
          | case when (select d.job_id from queue.need d where d.need_id = l.id limit 1) is not null
            then {{needed}} else 0 end)::smallint as flags) n;
    exit when v_moved.keys is null;
    if v_extra > 0 or v_moved.have_several then
      perform queue._free_reserved(v_moved.reserved_ids, v_moved.reserved_keys);
      perform queue._add_slots(v_moved.keys, v_moved.lanes, null, null,
        array_fill(-1, array[cardinality(v_moved.ids)]), v_moved.lows, v_moved.low_deadlines);
      v_grown := v_grown || v_moved.reserved_keys || (select e.grown from queue._enter_slots(v_moved.ids,
        v_moved.keys, v_moved.deadlines, v_moved.moves) e);
      v_extra := greatest(2 * v_extra, 10);
      if v_extra > 300 then
        insert into queue.pending_settlement (job_id, kind, flags, payload) select v_moved.ids[1], 'refill',
          0, to_jsonb(p_keys);
        exit;
      end if;
    else
      perform queue._add_slots(v_moved.keys, v_moved.lanes, null,
        v_moved.weights, array_fill(-1, array[cardinality(v_moved.ids)]),
        v_moved.lows, v_moved.low_deadlines);
      perform queue._make_ready(v_moved.ids, v_moved.lanes, v_moved.deadlines, v_moved.flags,
        v_moved.attempts);
      exit;
    end if;
  end loop;
  perform queue._set_next_starts(p_keys);
  if exists (select from queue.waiting w where w.reserved is not null) then
    v_grown := v_grown || queue._give_up_reserved(p_keys);
  end if;
  return v_grown;
end $$;

-- A ready job holds no slot until it is claimed. If jobs begin to wait that come before ready ones of their
-- key and lane, and do not fit beside them, this takes out as many of the ready ones by weight, beginning
-- with the last: ids. These pass the gate again, and wait behind the others. keys: semaphores that have room
-- now. It does nothing where shares take turns. It looks at the last 1,000 ready jobs of a lane. _take_slots
-- names the keys, but not for a job of several keys that goes on from one line to another: two lines could
-- give way to it in turn, for ever.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked: a ready job whose row
-- another transaction holds keeps its place.
-- Why no wake-up is lost: _advance sends the jobs on, and then calls _refill for their keys.
-- Two sessions: admit/refill.locked.spec.
create or replace function queue._make_way(p_keys text[], out ids bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_later bigint[];
begin
  if p_keys is null then
    return;
  end if;
  v_later := array(
    with line as materialized (
      -- spare: the room beside the ready jobs, which may be large.
      select s.key, l.lane, l.ready, l.low, l.low_deadline, greatest(s.room - l.ready, 0) as spare
      from (select distinct u.key from unnest(p_keys) u (key)) u
      cross join lateral (
        select s.key, s.lanes, s.ready, s.waiting, s.lows, s.low_deadlines, least({{free_slots}},
          queue._rate_room(s.key, s.rate_limit, s.rate_per, s.rate_limit, clock_timestamp())) as room
        from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) s
      cross join lateral unnest(s.lanes, s.ready, s.waiting, s.lows, s.low_deadlines)
        l (lane, ready, waiting, low, low_deadline)
      where l.waiting > 0 and l.ready > 0 and l.low_deadline >= '{{end_of_tags}}'),
    later as (
      select a.lane, array_agg(aj.id) as ids, array_agg(aj.flags) as flags,
        array_agg(aj.deadline) as deadlines
      from (
        select l.lane, array_agg(substr(l.key, 2)) as names,
          (array_agg(l.low_deadline order by l.low_deadline, l.low))[1] as low_deadline,
          (array_agg(l.low order by l.low_deadline, l.low))[1] as low
        from line l group by l.lane) a
      cross join lateral (
        select aj.id, aj.flags, aj.deadline from queue.active_job aj
        where aj.lane = a.lane and (aj.deadline, aj.id) > (a.low_deadline, a.low) and aj.claim is null
        order by aj.deadline desc, aj.id desc limit 1000) aj
      where aj.flags & {{slots}} <> 0 and exists (select from queue.job j
        where j.id = aj.id and (j.keys && a.names or j.lock = any (a.names)) offset 0)
      group by a.lane),
    queued as (
      select k.key, a.lane, k.id, a.deadlines[k.n] as deadline, k.weight, l.spare, true as is_ready
      from later a
      cross join lateral queue._keys_of(a.ids, a.flags) k
      join line l on l.key = k.key and l.lane = a.lane
      union all
      select l.key, l.lane, w.id, w.deadline, w.weight, l.spare, false
      from line l
      cross join lateral (
        select w.deadline, w.id, coalesce(w.weight, 1) as weight from queue.waiting w
        where w.reason = 'slot' and w.key = l.key and w.lane = l.lane
          and (w.deadline, w.id) >= (l.low_deadline, l.low)
        order by w.deadline, w.id limit least(l.ready::bigint + l.spare, 2000)) w)
    select distinct x.id
    from (
      select q.id, q.is_ready, q.spare,
        -- What the waiting jobs before it weigh, and the ready jobs behind it.
        sum(q.weight) filter (where not q.is_ready) over o as before,
        sum(q.weight) filter (where q.is_ready) over (partition by q.key, q.lane
          order by q.deadline desc, q.id desc) - q.weight as behind
      from queued q window o as (partition by q.key, q.lane order by q.deadline, q.id)) x
    where x.is_ready and x.behind < x.before - x.spare);
  if v_later <> '{}' then
    select t.ids, t.keys into ids, keys from queue._dequeue_all(v_later) t;
  end if;
end $$;
