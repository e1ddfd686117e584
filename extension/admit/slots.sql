-- Semaphores. _refill (admit/refill.sql) gives a slot that becomes free to the next job.
-- A slot is a live claim: `used` counts the claims that run under a key, and the slots that are reserved
-- (admit/reserve.sql). It is written only under the admission lock, in the transaction that makes or settles
-- the claim. Limited lanes are claimed only under the admission lock, so that the limit is hard.
--
-- Slots are taken at the claim, not before, so that a job which no worker starts holds none. For each key and
-- lane, queue.active_job has at most as many unclaimed jobs (`ready`) as the key has free slots, so that
-- fetch does not read jobs that can't start. The others wait in queue.waiting; a new job does not come before
-- a ready one, as far as _make_way looks. A ready job goes back there if fetch finds its key full, or finds
-- that a heavy job goes before it. A job with several keys waits for the first full one. It holds no slot
-- meanwhile, but may reserve some. Rows are replaced, and read newest first.

-- The keys of jobs by their flags: 'm' || lock and 'k' || concurrency key. n: the job's place in p_ids.
create or replace function queue._keys_of(p_ids bigint[], p_flags smallint[])
returns table (n integer, id bigint, key text, slots integer, discards boolean, weight integer,
  rate_limit integer, rate_per interval)
language plpgsql stable parallel unsafe security invoker rows 50 as $$
begin
  return query
    select u.n::integer, u.id, k.key, k.slots, j.discards, coalesce((k.terms ->> 'weight')::integer, 1),
      (k.terms #>> '{rate,limit}')::integer,
      case when k.terms ? 'rate' then queue._interval('per', k.terms #> '{rate,per}') end
    from unnest(p_ids, p_flags) with ordinality u (id, flags, n)
    cross join lateral (
      select j.keys, j.limits, j.lock, j.options -> 'terms' as terms,
        u.flags & {{keys}} <> 0 and j.options ->> 'on_limit' = 'discard' and j.claims = 0
          and not j.is_kept as discards
      from queue.job_now j where j.id = u.id offset 0) j
    cross join lateral (
      select 'm' || j.lock, 1, null::jsonb where u.flags & {{mutex}} <> 0 and j.lock is not null
      union all
      select 'k' || k.key, coalesce(k.slots, 2147483647), j.terms -> (k.n - 1)::integer
      from unnest(j.keys, j.limits) with ordinality k (key, slots, n)
      where u.flags & {{keys}} <> 0) k (key, slots, terms)
    where u.flags & {{slots}} <> 0;
end $$;

-- Creates missing semaphores and sets limits and rates: configure_key decides, else the newest job with the
-- key. Returns the keys that jobs may wait for if their limit has grown or their rate has changed.
-- Locks: the caller holds the admission lock.
create or replace function queue._set_slots(p_keys text[], p_slots integer[], p_ids bigint[],
  p_rate_limits integer[] default null, p_rate_pers interval[] default null)
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_changed text[];
  v_is_configured boolean := exists (select from queue.key_config);
begin
  with asked as materialized (
    select distinct on (u.key) u.key, coalesce(c.slots, u.slots) as slots, u.id,
      coalesce(c.rate_limit, u.rate_limit) as rate_limit, coalesce(c.rate_per, u.rate_per) as rate_per
    from unnest(p_keys, p_slots, p_ids, p_rate_limits, p_rate_pers) u (key, slots, id, rate_limit, rate_per)
    left join lateral (
      select c.* from queue._key_config(substr(u.key, 2)) c
      where v_is_configured and left(u.key, 1) = 'k') c on true
    order by u.key, u.id desc),
  old as materialized (
    select a.key, a.slots, a.rate_limit, a.rate_per, a.id, o.tid, o.slots as old_slots, o.used, o.lanes,
      o.ready, o.waiting, o.lows, o.low_deadlines,
      (o.rate_limit, o.rate_per) is distinct from (a.rate_limit, a.rate_per) as has_other_rate
    from asked a
    left join lateral (
      select s.ctid as tid, s.slots, s.rate_limit, s.rate_per, s.limit_id, s.used, s.lanes, s.ready,
        s.waiting, s.lows, s.low_deadlines
      from queue.semaphore s where s.key = a.key order by s.tick desc limit 1) o on true
    where o.slots is null or o.limit_id <= a.id
      and (o.slots <> a.slots or o.rate_limit is distinct from a.rate_limit
           or o.rate_per is distinct from a.rate_per)),
  gone as (
    delete from queue.semaphore s where s.ctid = any (array(select o.tid from old o))),
  made as (
    insert into queue.semaphore (key, tick, slots, rate_limit, rate_per, limit_id, used, lanes, ready,
      waiting, lows, low_deadlines)
    select o.key, nextval('queue.tick_seq'), o.slots, o.rate_limit, o.rate_per, o.id, coalesce(o.used, 0),
      coalesce(o.lanes, '{}'), coalesce(o.ready, '{}'), coalesce(o.waiting, '{}'), coalesce(o.lows, '{}'),
      coalesce(o.low_deadlines, '{}')
    from old o)
  select array_agg(o.key) into v_changed from old o
  where o.lanes <> '{}' and (o.slots > o.old_slots or o.has_other_rate);
  return v_changed;
end $$;

-- Handles keys that jobs wait for and whose rate allows no more starts now. It writes the time of the next
-- start into the row of the first job of each lane; _admit_due then gives these their slots. If the rate
-- allows a start again since the caller looked, that time is now. It writes none while ready jobs use up the
-- rate, because claims call it again. Nor does it write one for lanes that wait for a heavy job
-- (_heavy_waiting), because the refill after that job does so.
-- Locks: the caller holds the admission lock.
-- Why no wake-up is lost: a function that takes this job out of queue.waiting returns the key for _refill,
-- which calls this function again.
create or replace function queue._set_next_starts(p_keys text[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  with heavy as materialized (
    select h.key, h.queue, h.priority from queue._heavy_waiting(p_keys) h),
  shut as materialized (
    select w.tid, w.id, coalesce(
        queue._rate_opens_at(s.key, s.rate_limit, s.rate_per,
          least(l.ready::bigint + coalesce(w.weight, 1), 2147483647)::integer),
        case when l.ready::bigint + least(coalesce(w.weight, 1), s.slots) <= {{free_slots}}
            and l.ready::bigint + least(coalesce(w.weight, 1), s.rate_limit) <= s.rate_limit
          then clock_timestamp() end) as at
    from (select distinct u.key from unnest(p_keys) u (key)) u
    cross join lateral (
      select s.key, s.slots, s.used, s.rate_limit, s.rate_per, s.lanes, s.ready, s.waiting, s.lows,
        s.low_deadlines
      from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) s
    cross join lateral unnest(s.lanes, s.ready, s.waiting, s.lows, s.low_deadlines)
      l (lane, ready, waiting, low, low_deadline)
    cross join lateral (
      select w.ctid as tid, w.id, w.weight from queue.waiting w
      where w.reason = 'slot' and w.key = s.key and w.lane = l.lane
        and (w.deadline, w.id) >= (l.low_deadline, l.low)
      order by w.deadline, w.id limit 1) w
    where s.rate_limit is not null and l.waiting > 0
      and not exists (select from heavy h join queue.lane k on k.lane = l.lane
        where h.key = s.key and h.queue = k.queue and h.priority > k.priority))
  -- If this were joined to shut, the planner might read all waiting jobs.
  update queue.waiting w set at = (select s.at + interval '1 microsecond' from shut s where s.id = w.id)
  where w.ctid = any (array(select s.tid from shut s where s.at is not null));
  if found then
    perform queue._rewind_due_mark();
  end if;
end $$;

-- Returns, for each queue, the most urgent heavy job that waits for one of these keys and does not fit yet.
-- Jobs of its queue and key with a lower priority wait for it. Otherwise light jobs could take each slot that
-- becomes free, and the heavy one would never start.
-- Why no wake-up is lost: when the heavy job starts or leaves queue.waiting, the key goes to _refill, because
-- the job has a weight. When the heavy job fits, slots are free, and the key goes there, too.
create or replace function queue._heavy_waiting(p_keys text[])
returns table (key text, queue text, priority integer, id bigint)
language plpgsql stable parallel safe security invoker rows 1 as $$
begin
  return query
    select distinct on (u.key, l.queue) u.key, l.queue, l.priority, w.id
    from (
      select distinct u.key from unnest(p_keys) u (key)
      where exists (select from queue.waiting w
        where left(w.reason, 4) = 'slot' and w.key = u.key and w.weight is not null)) u
    cross join lateral (select s.* from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) s
    cross join lateral unnest(s.lanes, s.ready, s.waiting) o (lane, ready, waiting)
    join queue.lane l on l.lane = o.lane
    cross join lateral (
      -- If the heaviest fits, all fit.
      select w.id, w.weight from queue.waiting w
      where left(w.reason, 4) = 'slot' and w.key = u.key and w.lane = o.lane and w.weight is not null
      order by w.weight desc limit 1) w
    where o.waiting > 0
      and (least(w.weight, s.slots) > {{free_slots}} - o.ready
        or least(w.weight, s.rate_limit) > queue._rate_room(s.key, s.rate_limit, s.rate_per, s.rate_limit,
          clock_timestamp()) - o.ready)
    order by u.key, l.queue, l.priority desc;
end $$;

-- The heavy job (_heavy_waiting) for which the jobs of a key in a lane wait; NULL for none.
create or replace function queue._heavy_before(p_key text, p_lane integer)
returns bigint language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select h.id from queue._heavy_waiting(array[p_key]) h join queue.lane l on l.lane = p_lane
    where h.queue = l.queue and h.priority > l.priority);
end $$;

-- Adds to the counts of keys: slots in use, and per lane ready and waiting jobs. Keys and lanes may repeat;
-- an array that is NULL adds nothing. (p_low_deadlines, p_lows): for lanes with fewer waiting jobs,
-- the point below which none waits (one for each lane); for others, a job that has begun to wait.
-- p_newest: the newest jobs with these keys whose limits have been read (_set_slots).
-- Locks: the caller holds the admission lock.
create or replace function queue._add_slots(
  p_keys text[], p_lanes integer[], p_used integer[], p_ready integer[], p_waiting integer[], p_lows bigint[],
  p_low_deadlines timestamptz[] default null, p_newest bigint[] default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  with added as (
    select u.key, coalesce(sum(u.used), 0)::integer as used, array_agg(u.lane) as lanes,
      array_agg(u.ready) as ready,
      array_agg(u.waiting) as waiting, array_agg(u.low) as lows, array_agg(u.low_deadline) as low_deadlines,
      max(u.newest) as newest,
      count(*) filter (where u.used <> 0 or u.ready <> 0 or u.waiting <> 0 or u.low is not null) > 0
        as has_counts
    from unnest(p_keys, p_lanes, p_used, p_ready, p_waiting, p_lows, p_low_deadlines, p_newest)
      u (key, lane, used, ready, waiting, low, low_deadline, newest)
    group by u.key),
  old as materialized (
    select a.key, a.used, a.lanes, a.ready, a.waiting, a.lows, a.low_deadlines, o.tid, o.slots,
      greatest(o.limit_id, a.newest) as limit_id, o.rate_limit, o.rate_per,
      o.used as old_used, o.lanes as old_lanes, o.ready as old_ready, o.waiting as old_waiting,
      o.lows as old_lows, o.low_deadlines as old_low_deadlines
    from added a
    left join lateral (
      select s.ctid as tid, s.slots, s.limit_id, s.rate_limit, s.rate_per, s.used, s.lanes, s.ready,
        s.waiting, s.lows, s.low_deadlines
      from queue.semaphore s where s.key = a.key order by s.tick desc limit 1) o on true
    where a.has_counts or a.newest > o.limit_id),
  gone as (
    delete from queue.semaphore s where s.ctid = any (array(select o.tid from old o)))
  insert into queue.semaphore (key, tick, slots, limit_id, rate_limit, rate_per, used, lanes, ready, waiting,
    lows, low_deadlines)
  select o.key, nextval('queue.tick_seq'), coalesce(o.slots, 0), coalesce(o.limit_id, 0), o.rate_limit,
    o.rate_per,
    coalesce(o.old_used, 0) + o.used,
    coalesce(l.lanes, '{}'), coalesce(l.ready, '{}'), coalesce(l.waiting, '{}'), coalesce(l.lows, '{}'),
    coalesce(l.low_deadlines, '{}')
  from old o
  cross join lateral (
    select array_agg(x.lane) as lanes, array_agg(x.ready) as ready, array_agg(x.waiting) as waiting,
      array_agg(x.low) as lows, array_agg(x.low_deadline) as low_deadlines
    from (
      select x.lane, sum(x.ready)::integer as ready, sum(x.waiting)::integer as waiting,
        case when sum(x.waiting) < sum(x.old_waiting)
          then coalesce(max(x.low) filter (where x.is_new), max(x.low)) else min(x.low) end as low,
        case when sum(x.waiting) < sum(x.old_waiting)
          then coalesce(max(x.low_deadline) filter (where x.is_new), max(x.low_deadline))
          else min(x.low_deadline) end as low_deadline
      from (
        select u.lane, u.ready, u.waiting, u.waiting as old_waiting, false as is_new,
          case when u.waiting > 0 then u.low end as low,
          case when u.waiting > 0 then u.low_deadline end as low_deadline
        from unnest(o.old_lanes, o.old_ready, o.old_waiting, o.old_lows, o.old_low_deadlines)
          u (lane, ready, waiting, low, low_deadline)
        union all
        select u.lane, coalesce(u.ready, 0), coalesce(u.waiting, 0), 0, true, u.low, u.low_deadline
        from unnest(o.lanes, o.ready, o.waiting, o.lows, o.low_deadlines)
          u (lane, ready, waiting, low, low_deadline)
        where u.lane is not null) x
      group by x.lane) x
    where x.ready <> 0 or x.waiting <> 0) l;
end $$;

-- Claims have ended: frees their slots and returns the keys, for _advance.
-- p_flags as in queue.active_job: queue_slot counts in its queue's max_running.
-- Locks: the caller holds the admission lock.
-- Why no wake-up is lost: each caller passes the returned keys to _advance (admit/gates.sql), which calls
-- _refill.
create or replace function queue._release_slots(p_ids bigint[], p_flags smallint[])
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_keys text[];
  v_used integer[];
begin
  select coalesce(array_agg(k.key), '{}'), coalesce(array_agg(-k.weight), '{}') into v_keys, v_used
  from queue._keys_of(p_ids, p_flags) k;
  if (select bit_or(f) from unnest(p_flags) f) & {{queue_slot}} <> 0 then
    v_keys := v_keys || array(
      select 'q' || j.queue
      from unnest(p_ids, p_flags) u (id, flags)
      cross join lateral (select j.queue from queue.job_now j where j.id = u.id offset 0) j
      where u.flags & {{queue_slot}} <> 0);
  end if;
  perform queue._add_slots(v_keys, null,
    v_used || array_fill(-1, array[cardinality(v_keys) - cardinality(v_used)]), null, null, null);
  return v_keys;
end $$;

-- Jobs have left queue.active_job unclaimed: reduces the ready counts of their keys. Returns the keys, for
-- _advance.
-- Locks: the caller holds the admission lock.
create or replace function queue._count_unready(p_ids bigint[], p_lanes integer[], p_flags smallint[])
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_keys record;
begin
  select array_agg(k.key) as keys, array_agg(p_lanes[k.n]) as lanes, array_agg(-k.weight) as ready into v_keys
  from queue._keys_of(p_ids, p_flags) k;
  perform queue._add_slots(v_keys.keys, v_keys.lanes, null, v_keys.ready, null, null);
  return v_keys.keys;
end $$;

-- A job has left queue.waiting, where it waited for a slot.
-- Locks: the caller holds the admission lock.
create or replace function queue._count_unwaiting(p_key text, p_lane integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_lane is not null then
    perform queue._add_slots(array[p_key], array[p_lane], null, null, array[-1], null);
  end if;
end $$;

-- Marks jobs that lose their slots, so that on_limit no longer discards them: they come back to their slots,
-- but are not admitted again.
create or replace function queue._never_discard(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  insert into queue.job_override as s (id, is_kept)
  select j.id, true from queue.job j where j.id = any (p_ids) and j.options ->> 'on_limit' = 'discard'
  on conflict on constraint job_override_pkey do update set is_kept = true;
end $$;

-- Removes unused semaphores that nobody has used since a million others were written, at most 1,000.
-- Locks: the caller holds the admission lock.
create or replace function queue._forget_semaphores()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  with gone as (
    delete from queue.semaphore s
    where s.ctid = any (array(
      select s.ctid from queue.semaphore s
      where s.used = 0 and s.lanes = '{}' and s.tick < (select q.last_value - 1000000 from queue.tick_seq q)
        and (s.rate_limit is null or not exists (select from queue.rate_start r where r.key = s.key))
      order by s.tick limit 1000))
    returning s.key)
  -- The key had a rate before.
  delete from queue.rate_start r using gone g where r.key = g.key;
  -- No window can contain these starts any more.
  delete from queue.rate_start r
  where r.key = any (array(
    select s.key from queue.semaphore s
    where s.used = 0 and s.lanes = '{}' and s.rate_limit is not null
      and (select r.at from queue.rate_start r where r.key = s.key order by r.no desc limit 1)
        < clock_timestamp() - s.rate_per
    order by s.tick limit 100));
end $$;
