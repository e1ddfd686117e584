-- What queue.check() reports of semaphores.
-- Tests: admit/slots.sql, admit/reserve.sql.

-- The invariants of semaphores, for queue.check().
create or replace function queue._check_semaphores()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel unsafe security invoker rows 10 as $$
begin
  return query
    select 'slots in use without a claim'::text, null::bigint,
      format('%s: used %s, claims %s', coalesce(s.key, c.key), s.used, c.n)
    from (select distinct on (s.key) s.key, s.used from queue.semaphore s order by s.key, s.tick desc) s
    full join (
      select k.key, sum(k.weight) as n
      from (
        select k.key, k.weight
        from (select array_agg(aj.id) as ids, array_agg(aj.flags) as flags
              from (select aj.id, aj.flags from queue.active_job aj
                where aj.claim is not null and aj.flags & {{slots}} <> 0
                    union all
                    select h.job_id, h.flags from queue.pending_settlement h
                    where h.kind in ('ended', 'again') and h.flags & {{slots}} <> 0) aj) a
        cross join lateral queue._keys_of(a.ids, a.flags) k
        union all
        select k.key, k.weight from queue.waiting w
        cross join lateral queue._keys_of(array[w.id], array[w.flags]) k
        where w.reserved is not null and k.key = any (w.reserved)
        union all
        select 'q' || j.queue, 1 from queue.active_job aj join queue.job_now j on j.id = aj.id
        where aj.claim is not null and aj.flags & {{queue_slot}} <> 0
        union all
        select 'q' || j.queue, 1 from queue.pending_settlement h join queue.job_now j on j.id = h.job_id
        where h.kind in ('ended', 'again') and h.flags & {{queue_slot}} <> 0) k
      group by k.key) c on c.key = s.key
    where coalesce(s.used, 0) <> coalesce(c.n, 0) or left(s.key, 1) = 'm' and s.used > 1;
  return query
    select x.problem, null::bigint,
      format('%s, lane %s: slots %s, used %s, ready %s (%s), waiting %s (%s), low %s (%s)', x.key, x.lane,
      x.slots, x.used, x.ready, x.is_ready, x.waiting, x.is_waiting, x.low, x.least_id)
    from (
      select case when s.ready is distinct from coalesce(aj.n, 0)
        or s.waiting is distinct from coalesce(w.n, 0) then 'counts of a key are wrong'
                  when w.n > 0 and (s.low_deadline, s.low) > (w.deadline, w.id)
                    then 'waits for a slot below the low mark'
                  when s.waiting > 0
                    and s.ready::bigint + least(coalesce(w.weight, 1), s.slots) <= {{free_slots}}
                    and (queue._rate_room(s.key, s.rate_limit, s.rate_per, s.rate_limit, clock_timestamp())
                      >= s.ready::bigint + least(coalesce(w.weight, 1), s.rate_limit)) is not false
                    and not w.is_marked
                    -- A heavy job, or one before it, has waited for the rate. The next admission passes on
                    -- what they leave.
                    and not exists (select from queue.waiting h join queue.waiting b
                      on b.reason = 'slot' and b.key = h.key and b.lane = h.lane and b.at is not null
                      where h.reason = 'slot' and h.key = s.key and h.weight is not null)
                    and queue._heavy_before(s.key, s.lane) is null
                    and not exists (select from queue.pending_settlement h
                    where h.kind = 'refill' and h.payload ? s.key)
                    then 'a job waits although a slot is free' end as problem,
        coalesce(s.key, w.key, aj.key) as key, coalesce(s.lane, w.lane, aj.lane) as lane, s.slots, s.used,
        s.ready, aj.n as is_ready,
        s.waiting, w.n as is_waiting, s.low, w.id as least_id
      from (
        select s.key, s.slots, s.rate_limit, s.rate_per, s.used, l.lane, l.ready, l.waiting, l.low,
          l.low_deadline
        from (select distinct on (s.key) s.* from queue.semaphore s order by s.key, s.tick desc) s
        cross join lateral unnest(s.lanes, s.ready, s.waiting, s.lows, s.low_deadlines)
          l (lane, ready, waiting, low, low_deadline)) s
      full join (
        select w.key, w.lane, count(*) as n, (array_agg(w.id order by w.deadline, w.id))[1] as id,
          min(w.deadline) as deadline, (array_agg(w.weight order by w.deadline, w.id))[1] as weight,
          count(w.at) > 0 as is_marked
        from queue.waiting w
        where w.reason = 'slot' and w.lane is not null group by w.key, w.lane) w on w.key = s.key
          and w.lane = s.lane
      full join (
        select k.key, a.lanes[k.n] as lane, sum(k.weight) as n
        from (select array_agg(aj.id) as ids, array_agg(aj.flags) as flags, array_agg(aj.lane) as lanes
              from queue.active_job aj where aj.claim is null and aj.flags & {{slots}} <> 0) a
        cross join lateral queue._keys_of(a.ids, a.flags) k
        group by 1, 2) aj on aj.key = coalesce(s.key, w.key) and aj.lane = coalesce(s.lane, w.lane)) x
    where x.problem is not null;
end $$;

-- A job that has reserved slots waits for claims to end (admit/reserve.sql).
create or replace function queue._check_reserved()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'slots are reserved for a job whose key is not full'::text, w.id,
      format('%s, %s', w.key, w.reserved)
    from queue.waiting w
    cross join lateral (select s.slots, s.used from queue.semaphore s where s.key = w.key
      order by s.tick desc limit 1) s
    where w.reserved is not null and least(coalesce(w.weight, 1), s.slots) <= {{free_slots}}
      and not exists (select from queue.pending_settlement h
        where h.kind = 'refill' and h.payload ? w.key);
end $$;
