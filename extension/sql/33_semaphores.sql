-- Semaphores. A slot is a live claim: `used` counts the claims that run under a key, and is written under
-- ADM only, in the transaction that makes or settles the claim. Limited lanes are claimed under ADM only,
-- so that the limit is a hard one.
--
-- So that a job which nobody will start holds no slot, slots are given at the claim, not before. So that
-- fetch does not look at jobs that can't start, at most as many jobs of a key and lane are in queue.live,
-- unclaimed, as the key has free slots (`ready`); the others wait in queue.waiting. A ready job that is
-- met while its key is full goes back there. Rows are replaced by newer ones and read newest first.

-- The keys of jobs, by their flags: 'm' || lock and 'k' || concurrency key.
create or replace function queue._keys_of(p_ids bigint[], p_flags smallint[])
returns table (id bigint, key text, slots integer) language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  return query
    select u.id, k.key, k.slots
    from unnest(p_ids, p_flags) u (id, flags)
    cross join lateral (
      select j.keys, j.limits, coalesce(s.lock, j.lock) as lock
      from queue.job j left join queue.job_state s on s.id = j.id where j.id = u.id offset 0) j
    cross join lateral (
      select 'm' || j.lock, 1, 0::bigint where u.flags & 2 <> 0 and j.lock <> ''
      union all
      select 'k' || k.key, k.slots, k.n from unnest(j.keys, j.limits) with ordinality k (key, slots, n) where u.flags & 4 <> 0) k (key, slots, n)
    where u.flags & 6 <> 0
    order by u.id, k.n;
end $$;

-- Sends jobs that have passed every other gate to queue.live, or to wait for a slot.
-- p_refill: they were taken from the waiting, whom they need not queue up behind.
-- Discards jobs that say so when they would have to wait (on_limit).
create or replace function queue._to_slots(p_ids bigint[], p_refill boolean default false)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_place record;
  v_job record;
  v_item record;
  v_pairs text[] := '{}'::text[];   -- lane || ' ' || key
  v_lanes integer[];
  v_keys text[];
  v_free integer[];
  v_ready integer[];
  v_waiting integer[];
  v_dirty boolean[];
  v_at integer;
  v_shut integer;
  v_pass bigint[] := '{}'::bigint[];
  v_wait bigint[] := '{}'::bigint[];
  v_wait_keys text[] := '{}'::text[];
  v_wait_lanes integer[] := '{}'::integer[];
  v_discard bigint[];
begin
  select p.* into v_place from queue._place(p_ids) p;
  if not exists (select from unnest(v_place.flags) f where f & 6 <> 0) then
    perform queue._to_live(v_place.ids, v_place.lanes, v_place.deadlines, v_place.flags, v_place.attempts);
    return;
  end if;
  -- the newest job's limit is the key's
  perform queue._set_slots(x.keys, x.slots)
  from (select array_agg(k.key) as keys, array_agg(k.slots) as slots
        from (select distinct on (k.key) k.key, k.slots from queue._keys_of(v_place.ids, v_place.flags) k order by k.key, k.id desc) k) x;
  for v_item in
    select distinct u.lane, k.key, s.slots - s.used as free, l.ready, l.waiting
    from unnest(v_place.ids, v_place.lanes) u (id, lane)
    join queue._keys_of(v_place.ids, v_place.flags) k on k.id = u.id
    cross join lateral (select s.slots, s.used from queue.semaphore s where s.key = k.key order by s.tick desc limit 1) s
    left join lateral (select l.ready, l.waiting from queue.key_lane l where l.key = k.key and l.lane = u.lane order by l.tick desc limit 1) l on true
  loop
    v_pairs := v_pairs || (v_item.lane || ' ' || v_item.key);
    v_lanes := v_lanes || v_item.lane;
    v_keys := v_keys || v_item.key;
    v_free := v_free || v_item.free;
    v_ready := v_ready || coalesce(v_item.ready, 0);
    v_waiting := v_waiting || coalesce(v_item.waiting, 0);
    v_dirty := v_dirty || false;
  end loop;
  for v_job in
    select u.id, u.lane, u.flags, k.pairs
    from unnest(v_place.ids, v_place.lanes, v_place.flags) u (id, lane, flags)
    left join (select k.id, array_agg(k.key) as pairs from queue._keys_of(v_place.ids, v_place.flags) k group by k.id) k on k.id = u.id
    order by u.id
  loop
    v_shut := null;
    if v_job.pairs is not null then
      for i in 1 .. cardinality(v_job.pairs) loop
        v_at := array_position(v_pairs, v_job.lane || ' ' || v_job.pairs[i]);
        if v_ready[v_at] >= v_free[v_at] or (v_waiting[v_at] > 0 and not p_refill) then
          v_shut := v_at;
          exit;
        end if;
      end loop;
      if v_shut is not null and queue._is_discarded(v_job.id) then
        v_discard := v_discard || v_job.id;
        continue;
      elsif v_shut is not null then
        v_waiting[v_shut] := v_waiting[v_shut] + 1;
        v_dirty[v_shut] := true;
        v_wait := v_wait || v_job.id;
        v_wait_keys := v_wait_keys || v_keys[v_shut];
        v_wait_lanes := v_wait_lanes || v_job.lane;
        continue;
      end if;
      for i in 1 .. cardinality(v_job.pairs) loop
        v_at := array_position(v_pairs, v_job.lane || ' ' || v_job.pairs[i]);
        v_ready[v_at] := v_ready[v_at] + 1;
        v_dirty[v_at] := true;
      end loop;
    end if;
    v_pass := v_pass || v_job.id;
  end loop;
  perform queue._to_live(array_agg(u.id), array_agg(u.lane), array_agg(u.deadline), array_agg(u.flags), array_agg(u.attempt))
  from unnest(v_place.ids, v_place.lanes, v_place.deadlines, v_place.flags, v_place.attempts) u (id, lane, deadline, flags, attempt)
  where u.id = any (v_pass)
  having count(*) > 0;
  if v_wait <> '{}' then
    insert into queue.waiting (id, reason, key, lane)
    select u.id, 'slot', u.key, u.lane from unnest(v_wait, v_wait_keys, v_wait_lanes) u (id, key, lane);
    perform queue._keep_turns(array_agg(j.id)) from queue.job j where j.id = any (v_wait) and j.flags & 1 <> 0 having count(*) > 0;
  end if;
  perform queue._set_key_lanes(array_agg(u.key), array_agg(u.lane), array_agg(u.ready), array_agg(u.waiting))
  from unnest(v_keys, v_lanes, v_ready, v_waiting, v_dirty) u (key, lane, ready, waiting, dirty) where u.dirty
  having count(*) > 0;
  if v_discard is not null then
    perform queue._cancel_admitted(v_discard, 'limit');
  end if;
end $$;

-- Whether a job that finds no slot is to be discarded: on_limit, and it has not started before.
create or replace function queue._is_discarded(p_id bigint)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  return exists (select from queue.job j where j.id = p_id and j.options ->> 'on_limit' = 'discard')
    and not exists (select from queue.job_state s where s.id = p_id and s.claims > 0)
    and queue._is_settled(p_id);
end $$;

-- Makes semaphores that are missing and sets their limits.
create or replace function queue._set_slots(p_keys text[], p_slots integer[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  with old as materialized (
    select u.key, u.slots, o.tick, o.used
    from unnest(p_keys, p_slots) u (key, slots)
    left join lateral (select s.tick, s.used, s.slots from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) o on true
    where o.slots is distinct from u.slots),
  made as (
    insert into queue.semaphore (key, tick, slots, used)
    select o.key, nextval('queue.tick_seq'), o.slots, coalesce(o.used, 0) from old o)
  delete from queue.semaphore s
  where s.ctid = any (array(select s.ctid from old o cross join lateral (select s.ctid from queue.semaphore s
                            where s.key = o.key and s.tick = o.tick offset 0) s));
end $$;

-- Adds p_used[i] (below zero: gives back) to the slots in use of p_keys[i].
create or replace function queue._add_used(p_keys text[], p_used integer[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  with old as materialized (
    select u.key, u.used, o.tick, o.slots, o.used as old_used, o.ctid as tid
    from unnest(p_keys, p_used) u (key, used)
    cross join lateral (select s.tick, s.used, s.slots, s.ctid from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) o),
  made as (
    insert into queue.semaphore (key, tick, slots, used)
    select o.key, nextval('queue.tick_seq'), o.slots, o.old_used + o.used from old o)
  delete from queue.semaphore s where s.ctid = any (array(select o.tid from old o));
end $$;

-- Writes the counts of keys and lanes.
create or replace function queue._set_key_lanes(p_keys text[], p_lanes integer[], p_ready integer[], p_waiting integer[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  with old as materialized (
    select u.key, u.lane, u.ready, u.waiting, o.ctid as tid
    from unnest(p_keys, p_lanes, p_ready, p_waiting) u (key, lane, ready, waiting)
    left join lateral (select l.ctid from queue.key_lane l where l.key = u.key and l.lane = u.lane order by l.tick desc limit 1) o on true),
  made as (
    insert into queue.key_lane (key, lane, tick, ready, waiting)
    select o.key, o.lane, nextval('queue.tick_seq'), o.ready, o.waiting from old o where o.ready > 0 or o.waiting > 0)
  delete from queue.key_lane l where l.ctid = any (array(select o.tid from old o where o.tid is not null));
end $$;

-- Adds to the counts of keys and lanes; p_keys and p_lanes may repeat.
create or replace function queue._add_key_lanes(p_keys text[], p_lanes integer[], p_ready integer[], p_waiting integer[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  perform queue._set_key_lanes(array_agg(x.key), array_agg(x.lane), array_agg(x.ready), array_agg(x.waiting))
  from (
    select u.key, u.lane, coalesce(o.ready, 0) + u.ready as ready, coalesce(o.waiting, 0) + u.waiting as waiting
    from (select u.key, u.lane, sum(u.ready)::integer as ready, sum(u.waiting)::integer as waiting
          from unnest(p_keys, p_lanes, p_ready, p_waiting) u (key, lane, ready, waiting) group by u.key, u.lane) u
    left join lateral (select l.ready, l.waiting from queue.key_lane l where l.key = u.key and l.lane = u.lane order by l.tick desc limit 1) o on true) x
  having count(*) > 0;
end $$;

-- Claims of keyed jobs have ended: gives their slots back and lets the next jobs in.
-- p_flags as in queue.live: 16384 counts in its queue's max_running.
create or replace function queue._release_slots(p_ids bigint[], p_flags smallint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_keys text[];
  v_used integer[];
begin
  select array_agg(x.key order by x.key), array_agg(x.used order by x.key) into v_keys, v_used
  from (
    select k.key, -count(*)::integer as used
    from (
      select k.key from queue._keys_of(p_ids, p_flags) k
      union all
      select 'q' || coalesce(s.queue, j.queue) from unnest(p_ids, p_flags) u (id, flags)
      join queue.job j on j.id = u.id left join queue.job_state s on s.id = u.id where u.flags & 16384 <> 0) k
    group by k.key) x;
  if v_keys is not null then
    perform queue._add_used(v_keys, v_used);
    perform queue._refill(v_keys);
  end if;
end $$;

-- Lets waiting jobs of keys with free slots in, first by id in each lane.
create or replace function queue._refill(p_keys text[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
begin
  with room as materialized (
    select u.key, l.lane, s.slots - s.used - l.ready as room
    from unnest(p_keys) u (key)
    cross join lateral (select s.slots, s.used from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) s
    cross join lateral (select distinct on (l.lane) l.lane, l.ready, l.waiting from queue.key_lane l where l.key = u.key order by l.lane, l.tick desc) l
    where l.waiting > 0 and s.slots - s.used - l.ready > 0),
  let as (
    delete from queue.waiting w
    where w.ctid = any (array(
      select w.ctid from room r
      cross join lateral (select w.ctid from queue.waiting w where w.reason = 'slot' and w.key = r.key and w.lane = r.lane
                          order by w.id limit r.room) w))
    returning w.id, w.key, w.lane),
  counted as (
    select queue._add_key_lanes(array_agg(l.key), array_agg(l.lane), array_agg(0), array_agg(-1)) from let l having count(*) > 0)
  select array_agg(l.id order by l.id) into v_ids from let l left join counted c on true;
  if v_ids is not null then
    perform queue._to_slots(v_ids, true);
  end if;
end $$;

-- Jobs leave queue.live unclaimed: their keys have fewer ready ones.
create or replace function queue._unready(p_ids bigint[], p_lanes integer[], p_flags smallint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_keys text[];
begin
  select array_agg(k.key) into v_keys
  from (
    select k.key, queue._add_key_lanes(array_agg(k.key), array_agg(u.lane), array_agg(-1), array_agg(0))
    from unnest(p_ids, p_lanes) u (id, lane) join queue._keys_of(p_ids, p_flags) k on k.id = u.id
    group by k.key) k;
  if v_keys is not null then
    perform queue._refill(v_keys);
  end if;
end $$;

-- Claims up to p_n jobs of p_lanes under ADM, where limits are asked: semaphores, a queue's max_running
-- and rate, expires_at, and queueing locks that a defer is replacing.
-- Locks: the caller holds ADM; rows of queue.live and queue.queueing_lock by skip locked.
create or replace function queue._claim_limited(p_worker bigint, p_claim bigint, p_lanes integer[], p_n integer)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_won bigint[] := '{}'::bigint[];
  v_seen bigint[] := '{}'::bigint[];
  v_ids bigint[];
begin
  for v_pass in 1 .. 20 loop
    v_ids := array(
      select c.id
      from (select u.lane, l.low_deadline, l.low_id, min(u.n) over (partition by l.queue, l.priority) as rank
            from unnest(p_lanes) with ordinality u (lane, n)
            cross join lateral (select l.* from queue.lane l where l.lane = u.lane offset 0) l
            where l.kind = 0 or not queue._is_queue_full(l.queue)) r
      cross join lateral (
        select v.id, v.deadline from queue.live v
        where v.lane = r.lane and (v.deadline, v.id) >= (r.low_deadline, r.low_id) and v.claim is null and v.id <> all (v_seen)
        order by v.deadline, v.id limit p_n - cardinality(v_won)) c
      order by r.rank, c.deadline, c.id limit p_n - cardinality(v_won));
    exit when v_ids = '{}';
    v_seen := v_seen || v_ids;
    v_won := v_won || queue._claim_ids(p_worker, p_claim, v_ids, p_n);
    exit when cardinality(v_won) >= p_n;
  end loop;
  return v_won;
end $$;

-- Claims those of p_ids, at most p_n, that limits let start; ready jobs that meet a full key go to wait.
-- Locks: as _claim_limited.
create or replace function queue._claim_ids(p_worker bigint, p_claim bigint, p_ids bigint[], p_n integer)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_won bigint[] := '{}'::bigint[];
  v_needy bigint[] := '{}'::bigint[];
  v_job record;
  v_item record;
  v_keys text[] := '{}'::text[];
  v_free integer[] := '{}'::integer[];
  v_taken integer[] := '{}'::integer[];
  v_at integer;
  v_shut text;
  v_counted bigint[] := '{}'::bigint[];
  v_demote bigint[] := '{}'::bigint[];
  v_demote_keys text[] := '{}'::text[];
  v_shut_queues text[] := '{}'::text[];
  v_all_keys text[];
  v_all_lanes integer[];
begin
  for v_item in
    select distinct k.key, s.slots - s.used as free
    from (select array_agg(v.id) as ids, array_agg(v.flags) as flags
          from unnest(p_ids) u (id) cross join lateral (select v.id, v.flags from queue.live v where v.id = u.id and v.flags & 6 <> 0 offset 0) v) l
    cross join lateral queue._keys_of(l.ids, l.flags) k
    cross join lateral (select s.slots, s.used from queue.semaphore s where s.key = k.key order by s.tick desc limit 1) s
  loop
    v_keys := v_keys || v_item.key;
    v_free := v_free || v_item.free;
    v_taken := v_taken || 0;
  end loop;
  for v_job in
    select v.id, v.flags, v.lane, l.queue, l.kind, k.keys, c.max_running, c.rate_limit, c.rate_per
    from unnest(p_ids) with ordinality u (id, n)
    cross join lateral (select v.id, v.flags, v.lane from queue.live v where v.id = u.id and v.claim is null for update of v skip locked) v
    cross join lateral (select l.queue, l.kind from queue.lane l where l.lane = v.lane offset 0) l
    left join lateral (select c.max_running, c.rate_limit, c.rate_per from queue.queue_config c where c.queue = l.queue offset 0) c on l.kind > 0
    left join lateral (select array_agg(k.key) as keys from queue._keys_of(array[v.id], array[v.flags]) k) k on v.flags & 6 <> 0
    order by u.n
  loop
    exit when cardinality(v_won) >= p_n;
    continue when v_job.queue = any (v_shut_queues);
    if v_job.flags & 64 <> 0 and exists (select from queue.expiry e where e.id = v_job.id and e.at <= v_now) then
      perform queue._expire(array[v_job.id]);
      continue;
    end if;
    if v_job.flags & (256 | 8192) <> 0 then
      perform from queue.queueing_lock k where k.job_id = v_job.id and k.key = (select j.queueing_lock from queue.job j where j.id = v_job.id)
        and k.replacing is null for update skip locked;
      continue when not found and exists (select from queue.queueing_lock k where k.job_id = v_job.id
                                          and k.key = (select j.queueing_lock from queue.job j where j.id = v_job.id));
    end if;
    v_shut := null;
    for i in 1 .. coalesce(cardinality(v_job.keys), 0) loop
      v_at := array_position(v_keys, v_job.keys[i]);
      if v_taken[v_at] >= v_free[v_at] then
        v_shut := v_job.keys[i];
        exit;
      end if;
    end loop;
    if v_shut is not null then
      v_demote := v_demote || v_job.id;
      v_demote_keys := v_demote_keys || v_shut;
      continue;
    end if;
    if v_job.max_running is not null then
      v_at := array_position(v_keys, 'q' || v_job.queue);
      if v_at is null then
        v_keys := v_keys || ('q' || v_job.queue);
        v_free := v_free || coalesce((select s.slots - s.used from queue.semaphore s where s.key = 'q' || v_job.queue order by s.tick desc limit 1), 0);
        v_taken := v_taken || 0;
        v_at := cardinality(v_keys);
      end if;
      if v_taken[v_at] >= v_free[v_at] then
        v_shut_queues := v_shut_queues || v_job.queue;
        continue;
      end if;
    end if;
    if v_job.rate_limit is not null and not queue._take_rate(v_job.queue, v_job.rate_limit, v_job.rate_per) then
      v_shut_queues := v_shut_queues || v_job.queue;
      continue;
    end if;
    if v_job.max_running is not null then
      v_taken[v_at] := v_taken[v_at] + 1;
      v_counted := v_counted || v_job.id;
    end if;
    for i in 1 .. coalesce(cardinality(v_job.keys), 0) loop
      v_at := array_position(v_keys, v_job.keys[i]);
      v_taken[v_at] := v_taken[v_at] + 1;
      v_all_keys := v_all_keys || v_job.keys[i];
      v_all_lanes := v_all_lanes || v_job.lane;
    end loop;
    v_won := v_won || v_job.id;
    if v_job.flags & 8 <> 0 then
      v_needy := v_needy || v_job.id;
    end if;
  end loop;
  if v_demote <> '{}' then
    perform queue._demote(v_demote, v_demote_keys);
  end if;
  if v_won = '{}' then
    return null;
  end if;
  perform queue._add_used(array_agg(u.key order by u.key), array_agg(u.taken order by u.key))
  from unnest(v_keys, v_taken) u (key, taken) where u.taken > 0 having count(*) > 0;
  if v_all_keys is not null then
    perform queue._add_key_lanes(v_all_keys, v_all_lanes, array_fill(-1, array[cardinality(v_all_keys)]), array_fill(0, array[cardinality(v_all_keys)]));
  end if;
  update queue.live v
  set claim = p_claim, worker_id = p_worker, claimed_at = v_now, attempt = v.attempt + 1,
    flags = v.flags | case when v.id = any (v_counted) then 16384 else 0 end
  where v.id = any (v_won);
  delete from queue.queueing_lock k
  where (k.key, k.job_id) in (select j.queueing_lock, j.id from queue.job j where j.id = any (v_won) and j.flags & 256 <> 0);
  if v_needy <> '{}' then
    perform queue._begin_any(v_needy);
  end if;
  perform queue._lease_timeouts(v_won, p_claim, v_now);
  return v_won;
end $$;

-- Whether a queue's max_running or rate lets no job start now.
create or replace function queue._is_queue_full(p_queue text)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_config record;
begin
  select c.max_running, c.rate_limit, c.rate_per into v_config from queue.queue_config c where c.queue = p_queue;
  return found and (
    v_config.max_running is not null
      and coalesce((select s.used >= s.slots from queue.semaphore s where s.key = 'q' || p_queue order by s.tick desc limit 1), false)
    or v_config.rate_limit is not null
      and coalesce((select r.at > clock_timestamp() - v_config.rate_per from queue.rate_start r where r.queue = p_queue
                    order by r.at desc, r.seq desc offset v_config.rate_limit - 1 limit 1), false));
end $$;

-- Ready jobs that met a full key wait for it.
create or replace function queue._demote(p_ids bigint[], p_keys text[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_gone record;
begin
  with gone as (
    delete from queue.live v where v.id = any (p_ids) returning v.id, v.lane, v.flags),
  waiting as (
    insert into queue.waiting (id, reason, key, lane)
    select g.id, 'slot', p_keys[array_position(p_ids, g.id)], g.lane from gone g)
  select array_agg(g.id) as ids, array_agg(g.lane) as lanes, array_agg(g.flags) as flags,
    array_agg(g.id) filter (where g.flags & 1 <> 0) as ordered
  into v_gone from gone g;
  perform queue._add_key_lanes(array_agg(k.key), array_agg(u.lane), array_agg(-1), array_agg(0))
  from unnest(v_gone.ids, v_gone.lanes) u (id, lane) join queue._keys_of(v_gone.ids, v_gone.flags) k on k.id = u.id;
  perform queue._add_key_lanes(array_agg(p_keys[array_position(p_ids, u.id)]), array_agg(u.lane), array_agg(0), array_agg(1))
  from unnest(v_gone.ids, v_gone.lanes) u (id, lane);
  if v_gone.ordered is not null then
    perform queue._keep_turns(v_gone.ordered);
  end if;
end $$;

-- Takes a start from a queue's rate; false when the last window is full. Exact: under ADM, and the
-- instants are the database's clock at the claim.
create or replace function queue._take_rate(p_queue text, p_limit integer, p_per interval)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_nth timestamptz;
begin
  select r.at into v_nth from queue.rate_start r where r.queue = p_queue order by r.at desc, r.seq desc offset p_limit - 1 limit 1;
  if v_nth > v_now - p_per then
    return false;
  end if;
  insert into queue.rate_start (queue, at, seq)
  values (p_queue, greatest(v_now, (select max(r.at) from queue.rate_start r where r.queue = p_queue)), nextval('queue.tick_seq'));
  delete from queue.rate_start r where r.queue = p_queue and r.at < v_nth;
  return true;
end $$;

-- Counts a running ordered job in the semaphore of its lock, which has got a mutex member.
create or replace function queue._count_running_ordered(p_lock text, p_id bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  perform from queue.live v where v.id = p_id and v.flags & 2 = 0 for update skip locked;
  if found then
    perform queue._set_slots(array['m' || p_lock], array[1]);
    perform queue._add_used(array['m' || p_lock], array[1]);
    update queue.live v set flags = v.flags | 2 where v.id = p_id;
  end if;
end $$;
