-- The common case of a limit, in few statements: all ended claims of a batch have the same one key.
-- Tests: admit/one_key.sql.

-- Gives the slots of ended claims to the jobs that wait for them, as _release_slots and _refill do together,
-- if all of these claims have one and the same key, the key has no rate, and its jobs that are ready or wait
-- are in one lane without shares. Returns whether it did; if not, nothing has changed.
-- Locks: the caller holds the admission lock.
-- Why no wake-up is lost: as many jobs become ready as _refill would take.
create or replace function queue._pass_slots_on(p_ids bigint[], p_flags smallint[])
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_key text;
  v_is_only boolean;
  v_count record;
  v_room integer;
  v_next record;
begin
  select 'k' || min(j.keys[1]),
    bool_and(cardinality(j.keys) = 1 and (j.options ? 'terms') is not true
      and u.flags & {{counted}} = {{keys}})
      and min(j.keys[1]) = max(j.keys[1])
  into v_key, v_is_only
  from unnest(p_ids, p_flags) u (id, flags)
  cross join lateral (select j.keys, j.options from queue.job j where j.id = u.id offset 0) j;
  if not v_is_only then
    return false;
  end if;
  select s.ctid as tid, s.slots, s.limit_id, s.used - cardinality(p_ids) as used, s.lanes, s.ready, s.waiting,
    s.lows, s.low_deadlines, l.low_deadline, l.low_id, l.is_idle,
    s.rate_limit is null and cardinality(s.lanes) <= 1 and l.tag_base is null as is_plain
  into v_count
  from queue.semaphore s
  left join lateral (select l.low_deadline, l.low_id, l.is_idle, l.tag_base from queue.lane l
    where l.lane = s.lanes[1] offset 0) l on true
  where s.key = v_key order by s.tick desc limit 1;
  v_room := least(v_count.slots - v_count.used - v_count.ready[1], v_count.waiting[1]);
  if v_count.is_plain is not true then
    return false;
  elsif v_room > 0 then
    select array_agg(w.tid) as tids, array_agg(w.id) as ids, array_agg(w.attempt) as attempts,
      array_agg(coalesce(s.deadline, w.deadline)) as deadlines,
      -- may have changed since
      array_agg((w.flags | case when s.id is not null then {{overridden}} else 0 end
        | case when (select d.job_id from queue.need d where d.need_id = w.id limit 1) is not null
          then {{needed}} else 0 end)::smallint) as flags,
      max(w.deadline) as last_deadline, (array_agg(w.id order by w.deadline desc, w.id desc))[1] as last_id,
      bool_or(num_nonnulls(w.weight, w.at) > 0 or w.has_several or w.deadline < '{{end_of_tags}}')
        as are_special,
      bool_or((coalesce(s.deadline, w.deadline), w.id) < (v_count.low_deadline, v_count.low_id)) as is_low
    into v_next
    from (
      select w.ctid as tid, w.id, w.deadline, w.attempt, w.flags, w.weight, w.at, w.has_several
      from queue.waiting w
      where w.reason = 'slot' and w.key = v_key and w.lane = v_count.lanes[1]
        and (w.deadline, w.id) >= (v_count.low_deadlines[1], v_count.lows[1])
      order by w.deadline, w.id limit v_room) w
    left join lateral (select s.id, s.deadline from queue.job_override s where s.id = w.id offset 0) s
      on true;
    if v_next.are_special is not false then
      return false;
    end if;
    delete from queue.waiting w where w.ctid = any (v_next.tids);
    insert into queue.active_job (id, deadline, lane, attempt, flags)
    select u.id, u.deadline, v_count.lanes[1], u.attempt, u.flags
    from unnest(v_next.ids, v_next.deadlines, v_next.attempts, v_next.flags) u (id, deadline, attempt, flags);
    if v_next.is_low or v_count.is_idle then
      perform queue._lower_marks(array_fill(v_count.lanes[1], array[cardinality(v_next.ids)]),
        v_next.deadlines, v_next.ids);
    end if;
    v_count.ready[1] := v_count.ready[1] + cardinality(v_next.ids);
    v_count.waiting[1] := v_count.waiting[1] - cardinality(v_next.ids);
    v_count.lows[1] := v_next.last_id + 1;
    v_count.low_deadlines[1] := v_next.last_deadline;
  end if;
  with gone as (
    delete from queue.semaphore s where s.ctid = v_count.tid)
  insert into queue.semaphore (key, tick, slots, limit_id, used, lanes, ready, waiting, lows, low_deadlines)
  values (v_key, nextval('queue.tick_seq'), v_count.slots, v_count.limit_id, v_count.used, v_count.lanes,
    v_count.ready, v_count.waiting, v_count.lows, v_count.low_deadlines);
  return true;
end $$;
