-- Semaphores. A slot is a live claim: `used` counts the claims that run under a key, and is written under
-- ADM only, in the transaction that makes or settles the claim. Limited lanes are claimed under ADM only,
-- so that the limit is a hard one.
--
-- So that a job which nobody will start holds no slot, slots are given at the claim, not before. So that
-- fetch does not look at jobs that can't start, at most as many jobs of a key and lane are in queue.live,
-- unclaimed, as the key has free slots (`ready`); the others wait in queue.waiting. A ready job that is
-- met while its key is full goes back there. A job with several keys waits for the first that is shut, and
-- holds none meanwhile. Rows are replaced by newer ones and read newest first.

-- The keys of jobs by their flags: 'm' || lock and 'k' || concurrency key. n: the job's place in p_ids.
create or replace function queue._keys_of(p_ids bigint[], p_flags smallint[])
returns table (n integer, id bigint, key text, slots integer, discards boolean)
language plpgsql stable parallel safe security invoker rows 50 as $$
#variable_conflict use_column
begin
  return query
    select u.n::integer, u.id, k.key, k.slots, j.discards
    from unnest(p_ids, p_flags) with ordinality u (id, flags, n)
    cross join lateral (
      select j.keys, j.limits, coalesce(s.lock, j.lock) as lock,
        u.flags & 4 <> 0 and j.options ->> 'on_limit' = 'discard' and coalesce(s.claims, 0) = 0
          and coalesce(s.extra_flags, 0) & 32 = 0 as discards
      from queue.job j left join queue.job_state s on s.id = j.id where j.id = u.id offset 0) j
    cross join lateral (
      select 'm' || j.lock, 1 where u.flags & 2 <> 0 and j.lock <> ''
      union all
      select 'k' || k.key, k.slots from unnest(j.keys, j.limits) k (key, slots) where u.flags & 4 <> 0) k (key, slots)
    where u.flags & 6 <> 0;
end $$;

-- Sends jobs that have passed every other gate to queue.live, or to wait for a slot. p_is_refill: they were taken
-- from the waiting, whom they need not queue up behind. grown: keys whose limit has grown; discarded: jobs in no gate
-- that would have to wait, and are to be discarded instead (on_limit).
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._enter_slots(p_ids bigint[], p_is_refill boolean, out discarded bigint[], out grown text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
  v_turns record;
  v_taken record;
begin
  v := queue._places(p_ids);
  if v.all_flags & 6 = 0 then
    perform queue._to_live(v.ids, v.lanes, v.deadlines, v.flags, v.attempts, v.is_low);
    return;
  elsif v.all_flags & 2 <> 0 and exists (select from unnest(v.flags) f where f & 3 = 2) then
    v_turns := queue._await_turns(v.ids, v.flags);
    if v_turns.asked is not null then
      select s.grown into v_taken
      from queue._places(v_turns.asked) a
      cross join lateral queue._take_slots(a.ids, a.lanes, a.deadlines, a.flags, a.attempts, true) s;
      grown := v_turns.keys || v_taken.grown;
    end if;
    if v_turns.late is not null then
      v := queue._places(array(select u.id from unnest(v.ids) u (id) where u.id <> all (v_turns.late)));
      if v.ids is null then
        return;
      end if;
    end if;
  end if;
  v_taken := queue._take_slots(v.ids, v.lanes, v.deadlines, v.flags, v.attempts, p_is_refill);
  discarded := v_taken.discarded;
  grown := grown || v_taken.grown;
end $$;

-- As _enter_slots, of jobs whose places are known (_places).
create or replace function queue._take_slots(
  p_ids bigint[], p_lanes integer[], p_deadlines timestamptz[], p_flags smallint[], p_attempts smallint[], p_is_refill boolean,
  out discarded bigint[], out grown text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  k record;                                   -- ns, pairs: which job has which (key, lane); keys, lanes: those
  p record;                                   -- what each (key, lane) has
  v_row integer := 1;
  v_first integer;
  v_pair integer;
  v_shut integer;
  v_ready integer[];                          -- what is added to it
  v_waiting integer[];
  v_lows bigint[];
  v_pass integer[] := '{}'::integer[];
  v_wait integer[] := '{}'::integer[];
  v_wait_keys text[] := '{}'::text[];
  v_wait_several boolean[] := '{}'::boolean[];
begin
  select array_agg(x.n order by x.n) as ns, array_agg(x.pair order by x.n) as pairs,
    array_agg(x.key) as set_keys, array_agg(x.slots) as set_slots, array_agg(x.id) as set_ids,
    array_agg(x.key order by x.pair) filter (where x.is_first) as keys,
    array_agg(x.lane order by x.pair) filter (where x.is_first) as lanes,
    array_agg(x.id) filter (where x.discards and not p_is_refill and queue._is_settled(x.id)) as discards
  into k
  from (
    select x.n, x.id, x.key, x.slots, x.discards, x.lane, dense_rank() over (order by x.key, x.lane)::integer as pair,
      row_number() over (partition by x.key, x.lane) = 1 as is_first
    from (select x.n, x.id, x.key, x.slots, x.discards, p_lanes[x.n] as lane from queue._keys_of(p_ids, p_flags) x) x) x;
  grown := queue._set_slots(k.set_keys, k.set_slots, k.set_ids);
  select array_agg(s.slots - s.used order by u.n) as free, array_agg(coalesce(s.ready[s.at], 0) order by u.n) as ready,
    array_agg(coalesce(s.waiting[s.at], 0) order by u.n) as waiting
  into p
  from unnest(k.keys, k.lanes) with ordinality u (key, lane, n)
  cross join lateral (
    select s.slots, s.used, s.ready, s.waiting, array_position(s.lanes, u.lane) as at
    from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) s;
  v_ready := array_fill(0, array[cardinality(k.keys)]);
  v_waiting := v_ready;
  v_lows := array_fill(null::bigint, array[cardinality(k.keys)]);
  for n in 1 .. cardinality(p_ids) loop
    v_first := v_row;
    v_shut := null;
    while k.ns[v_row] = n loop
      v_pair := k.pairs[v_row];
      if v_shut is null and (p.ready[v_pair] + v_ready[v_pair] >= p.free[v_pair]
                             or p.waiting[v_pair] + v_waiting[v_pair] > 0 and not p_is_refill) then
        v_shut := v_pair;
      end if;
      v_row := v_row + 1;
    end loop;
    if v_shut is null then
      v_pass := v_pass || n;
      for i in v_first .. v_row - 1 loop
        v_pair := k.pairs[i];
        v_ready[v_pair] := v_ready[v_pair] + 1;
      end loop;
    elsif p_ids[n] = any (k.discards) then
      discarded := discarded || p_ids[n];
    else
      v_waiting[v_shut] := v_waiting[v_shut] + 1;
      v_lows[v_shut] := least(v_lows[v_shut], p_ids[n]);
      v_wait := v_wait || n;
      v_wait_keys := v_wait_keys || k.keys[v_shut];
      v_wait_several := v_wait_several || (v_row - v_first > 1);
    end if;
  end loop;
  perform queue._to_live(array_agg(p_ids[n]), array_agg(p_lanes[n]), array_agg(p_deadlines[n]), array_agg(p_flags[n]), array_agg(p_attempts[n]))
  from unnest(v_pass) n having count(*) > 0;
  if v_wait <> '{}' then
    insert into queue.waiting (id, reason, key, lane, deadline, flags, attempt, has_several)
    select p_ids[u.n], 'slot', u.key, p_lanes[u.n], p_deadlines[u.n], p_flags[u.n], p_attempts[u.n], u.several
    from unnest(v_wait, v_wait_keys, v_wait_several) u (n, key, several);
    perform queue._keep_turns(array_agg(p_ids[n])) from unnest(v_wait) n where p_flags[n] & 1 <> 0 having count(*) > 0;
  end if;
  perform queue._add_slots(k.keys, k.lanes, null, v_ready, v_waiting, v_lows);
  if discarded is not null then
    perform queue._keep_turns(discarded);
  end if;
end $$;

-- Makes semaphores that are missing and sets limits: of jobs with one key the newest decides. Returns the
-- keys whose limit has grown and that jobs may wait for.
-- Locks: the caller holds ADM.
create or replace function queue._set_slots(p_keys text[], p_slots integer[], p_ids bigint[])
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_grown text[];
begin
  with asked as materialized (
    select distinct on (u.key) u.key, u.slots, u.id from unnest(p_keys, p_slots, p_ids) u (key, slots, id) order by u.key, u.id desc),
  old as materialized (
    select a.key, a.slots, a.id, o.tid, o.slots as old_slots, o.used, o.lanes, o.ready, o.waiting, o.lows
    from asked a
    left join lateral (
      select s.ctid as tid, s.slots, s.limit_id, s.used, s.lanes, s.ready, s.waiting, s.lows
      from queue.semaphore s where s.key = a.key order by s.tick desc limit 1) o on true
    where o.slots is null or o.slots <> a.slots and o.limit_id <= a.id),
  gone as (
    delete from queue.semaphore s where s.ctid = any (array(select o.tid from old o))),
  made as (
    insert into queue.semaphore (key, tick, slots, limit_id, used, lanes, ready, waiting, lows)
    select o.key, nextval('queue.tick_seq'), o.slots, o.id, coalesce(o.used, 0), coalesce(o.lanes, '{}'), coalesce(o.ready, '{}'),
      coalesce(o.waiting, '{}'), coalesce(o.lows, '{}')
    from old o)
  select array_agg(o.key) into v_grown from old o where o.slots > o.old_slots and o.lanes <> '{}';
  return v_grown;
end $$;

-- Adds to the counts of keys: slots in use, and per lane ready and waiting jobs. Keys and lanes may repeat;
-- an array that is NULL adds nothing. p_lows: below it nothing waits in that lane, in which the waiting
-- have become fewer; else the least id that has begun to wait.
-- Locks: the caller holds ADM.
create or replace function queue._add_slots(
  p_keys text[], p_lanes integer[], p_used integer[], p_ready integer[], p_waiting integer[], p_lows bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  with added as (
    select u.key, coalesce(sum(u.used), 0)::integer as used, array_agg(u.lane) as lanes, array_agg(u.ready) as ready,
      array_agg(u.waiting) as waiting, array_agg(u.low) as lows
    from unnest(p_keys, p_lanes, p_used, p_ready, p_waiting, p_lows) u (key, lane, used, ready, waiting, low)
    group by u.key
    having count(*) filter (where u.used <> 0 or u.ready <> 0 or u.waiting <> 0) > 0),
  old as materialized (
    select a.key, a.used, a.lanes, a.ready, a.waiting, a.lows, o.tid, o.slots, o.limit_id, o.used as old_used,
      o.lanes as old_lanes, o.ready as old_ready, o.waiting as old_waiting, o.lows as old_lows
    from added a
    left join lateral (
      select s.ctid as tid, s.slots, s.limit_id, s.used, s.lanes, s.ready, s.waiting, s.lows
      from queue.semaphore s where s.key = a.key order by s.tick desc limit 1) o on true),
  gone as (
    delete from queue.semaphore s where s.ctid = any (array(select o.tid from old o)))
  insert into queue.semaphore (key, tick, slots, limit_id, used, lanes, ready, waiting, lows)
  select o.key, nextval('queue.tick_seq'), coalesce(o.slots, 0), coalesce(o.limit_id, 0), coalesce(o.old_used, 0) + o.used,
    coalesce(l.lanes, '{}'), coalesce(l.ready, '{}'), coalesce(l.waiting, '{}'), coalesce(l.lows, '{}')
  from old o
  cross join lateral (
    select array_agg(x.lane) as lanes, array_agg(x.ready) as ready, array_agg(x.waiting) as waiting, array_agg(x.low) as lows
    from (
      select x.lane, sum(x.ready)::integer as ready, sum(x.waiting)::integer as waiting,
        case when sum(x.waiting) < sum(x.old_waiting) then max(x.low) else min(x.low) end as low
      from (
        select u.lane, u.ready, u.waiting, u.waiting as old_waiting, case when u.waiting > 0 then u.low end as low
        from unnest(o.old_lanes, o.old_ready, o.old_waiting, o.old_lows) u (lane, ready, waiting, low)
        union all
        select u.lane, coalesce(u.ready, 0), coalesce(u.waiting, 0), 0, u.low
        from unnest(o.lanes, o.ready, o.waiting, o.lows) u (lane, ready, waiting, low) where u.lane is not null) x
      group by x.lane) x
    where x.ready <> 0 or x.waiting <> 0) l;
end $$;

-- Claims have ended: gives their slots back and returns the keys, for _advance.
-- p_flags as in queue.live: 16384 counts in its queue's max_running.
-- Locks: the caller holds ADM.
create or replace function queue._release_slots(p_ids bigint[], p_flags smallint[])
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_keys text[];
begin
  v_keys := array(select k.key from queue._keys_of(p_ids, p_flags) k);
  if (select bit_or(f) from unnest(p_flags) f) & 16384 <> 0 then
    v_keys := v_keys || array(
      select 'q' || j.queue
      from unnest(p_ids, p_flags) u (id, flags)
      cross join lateral (select coalesce(s.queue, j.queue) as queue from queue.job j left join queue.job_state s on s.id = j.id
                          where j.id = u.id offset 0) j
      where u.flags & 16384 <> 0);
  end if;
  perform queue._add_slots(v_keys, null, array_fill(-1, array[cardinality(v_keys)]), null, null, null);
  return v_keys;
end $$;

-- Lets waiting jobs of keys with free slots in, first by id in each lane. Those with several keys may have
-- to wait for another one, so that it looks at more, up to some hundreds; the next admission goes on. Returns keys whose
-- limit has grown by that.
-- Locks: the caller holds ADM.
create or replace function queue._refill(p_keys text[])
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
  v_extra integer := 0;
  v_grown text[];
begin
  loop
    with room as materialized (
      select s.key, l.lane, l.low, greatest(least(s.slots - s.used - l.ready, l.waiting), v_extra) as room
      from (select distinct u.key from unnest(p_keys) u (key)) u
      cross join lateral (
        select s.key, s.slots, s.used, s.lanes, s.ready, s.waiting, s.lows
        from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) s
      cross join lateral unnest(s.lanes, s.ready, s.waiting, s.lows) l (lane, ready, waiting, low)
      where l.waiting > 0 and s.slots - s.used > l.ready),
    let as (
      delete from queue.waiting w
      where w.ctid = any (array(
        select w.ctid from room r
        cross join lateral (
          select w.ctid from queue.waiting w
          where w.reason = 'slot' and w.key = r.key and w.lane = r.lane and w.id >= r.low order by w.id limit r.room) w))
      returning w.id, w.key, w.lane, w.deadline, w.flags, w.attempt, w.has_several)
    select array_agg(l.key) as keys, array_agg(l.lane) as lanes, array_agg(l.id) as ids, array_agg(l.id + 1) as lows,
      array_agg(coalesce(n.deadline, l.deadline)) as deadlines, array_agg(n.flags) as flags, array_agg(l.attempt) as attempts,
      bool_or(l.has_several) as has_several
    into v
    from let l
    cross join lateral (
      -- what may have changed since
      select (select s.deadline from queue.job_state s where s.id = l.id) as deadline,
        (l.flags | case when exists (select from queue.job_state s where s.id = l.id) then 2048 else 0 end
          | case when (select d.job_id from queue.need d where d.need_id = l.id limit 1) is not null then 4096 else 0 end)::smallint as flags) n;
    exit when v.keys is null;
    if v_extra > 0 or v.has_several then
      perform queue._add_slots(v.keys, v.lanes, null, null, array_fill(-1, array[cardinality(v.ids)]), v.lows);
      v_grown := v_grown || (select e.grown from queue._enter_slots(v.ids, true) e);
      v_extra := greatest(2 * v_extra, 10);
      if v_extra > 300 then
        insert into queue.handover (job_id, kind, flags, payload) select v.ids[1], 'refill', 0, to_jsonb(p_keys);
        exit;
      end if;
    else
      perform queue._add_slots(v.keys, v.lanes, null, array_fill(1, array[cardinality(v.ids)]), array_fill(-1, array[cardinality(v.ids)]), v.lows);
      perform queue._to_live(v.ids, v.lanes, v.deadlines, v.flags, v.attempts);
      exit;
    end if;
  end loop;
  return v_grown;
end $$;

-- Jobs have left queue.live unclaimed: their keys have fewer ready ones. Returns the keys, for _advance.
-- Locks: the caller holds ADM.
create or replace function queue._unready(p_ids bigint[], p_lanes integer[], p_flags smallint[])
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
begin
  select array_agg(k.key) as keys, array_agg(p_lanes[k.n]) as lanes, array_agg(-1) as ready into v
  from queue._keys_of(p_ids, p_flags) k;
  perform queue._add_slots(v.keys, v.lanes, null, v.ready, null, null);
  return v.keys;
end $$;

-- Notes of jobs that are taken from their slots, and that would have been discarded there (on_limit), that they
-- were not: they come back to them, but are not admitted again.
create or replace function queue._never_discard(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  insert into queue.job_state as s (id, extra_flags)
  select j.id, 32 from queue.job j where j.id = any (p_ids) and j.options ->> 'on_limit' = 'discard'
  on conflict on constraint job_state_pkey do update set extra_flags = s.extra_flags | 32;
end $$;

-- A job has left queue.waiting, where it waited for a slot.
-- Locks: the caller holds ADM.
create or replace function queue._unwait(p_key text, p_lane integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_lane is not null then
    perform queue._add_slots(array[p_key], array[p_lane], null, null, array[-1], null);
  end if;
end $$;

-- Claims up to p_n jobs of lanes, in the order of p_lanes, where limits are asked: semaphores, a queue's
-- max_running and rate, expires_at, and queueing locks that a defer is replacing. Lanes of one queue and
-- priority are read as one. Only jobs of p_tasks, and with a deadline before p_before, if given.
-- Locks: the caller holds ADM; rows of queue.live and queue.queueing_lock by skip locked.
create or replace function queue._claim_limited(
  p_worker bigint, p_lanes integer[], p_n integer, p_tasks text[] default null, p_before timestamptz default null)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_start timestamptz := clock_timestamp();
  v_won bigint[] := '{}'::bigint[];
  v_left bigint[] := '{}'::bigint[];
  v_full text[] := '{}'::text[];
  v_take integer := p_n;
  v_ids bigint[];
  v record;
begin
  loop
    v_ids := array(
      select c.id
      from (
        select min(u.n) as rank, array_agg(l.lane) as lanes, array_agg(l.low_deadline) as deadlines, array_agg(l.low_id) as ids
        from unnest(p_lanes) with ordinality u (lane, n)
        cross join lateral (
          select l.lane, l.queue, l.priority, l.kind, l.low_deadline, l.low_id from queue.lane l where l.lane = u.lane offset 0) l
        where l.queue <> all (v_full) and (l.kind = 0 or not queue._is_queue_full(l.queue))
        group by l.queue, l.priority order by 1 limit 100) g
      cross join lateral (
        select v.id
        from unnest(g.lanes, g.deadlines, g.ids) l (lane, deadline, id)
        cross join lateral (
          select v.id, v.deadline from queue.live v
          where v.lane = l.lane and (v.deadline, v.id) >= (l.deadline, l.id) and v.claim is null
            and v.id <> all (v_left) and (p_before is null or v.deadline < p_before)
            and (p_tasks is null or exists (select from queue.job j where j.id = v.id and j.task = any (p_tasks)))
          order by v.deadline, v.id limit v_take) v
        order by v.deadline, v.id limit v_take) c
      -- where those of the first lanes can't start, however many they are, the next round looks at the others' first, too
      limit case when v_left = '{}' then v_take end);
    exit when v_ids = '{}';
    select c.won, c.rest, c.full_queues into v from queue._claim_ids(p_worker, v_ids, p_n - cardinality(v_won)) c;
    v_won := v_won || v.won;
    v_left := v_left || v.rest;
    v_full := v_full || v.full_queues;
    exit when cardinality(v_won) >= p_n or clock_timestamp() > v_start + interval '100 ms';
    if v.rest <> '{}' then
      perform queue._pass_by(v_left);
    end if;
    v_take := greatest(p_n - cardinality(v_won), least(2 * v_take::bigint, 1000));
  end loop;
  return v_won;
end $$;

-- Claims up to p_n jobs of lanes that are of p_tasks, have a deadline before p_before, and are among p_only, as
-- far as given.
-- Among those that wait for a slot it looks where slots are free, which others of their lane are ready for,
-- but nobody may want: at the first 200 of each key and lane.
-- Locks: as _claim_limited.
create or replace function queue._claim_chosen(
  p_worker bigint, p_lanes integer[], p_n integer, p_tasks text[], p_before timestamptz, p_only bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_won bigint[] := '{}'::bigint[];
  v_ids bigint[];
begin
  if p_only is null then
    v_won := queue._claim_limited(p_worker, p_lanes, p_n, p_tasks, p_before);
    if cardinality(v_won) >= p_n then
      return v_won;
    end if;
    v_ids := array(
      select w.id
      from (
        select s.key, l.lane, l.low, s.slots - s.used as free
        from (select distinct on (s.key) s.key, s.slots, s.used, s.lanes, s.waiting, s.lows from queue.semaphore s
              where s.lanes <> '{}' order by s.key, s.tick desc) s
        cross join lateral unnest(s.lanes, s.waiting, s.lows) l (lane, waiting, low)
        where s.used < s.slots and l.waiting > 0 and l.lane = any (p_lanes) offset 0) s
      cross join lateral (
        select w.id
        from (select w.id, w.deadline from queue.waiting w
              where w.reason = 'slot' and w.key = s.key and w.lane = s.lane and w.id >= s.low order by w.id limit 200) w
        where (p_before is null or w.deadline < p_before)
          and (p_tasks is null or exists (select from queue.job j where j.id = w.id and j.task = any (p_tasks)))
        limit s.free) w);
  else
    v_ids := array(
      select w.id from unnest(p_only) u (id)
      cross join lateral (
        select w.id, w.key from queue.waiting w where w.id = u.id and w.reason || '' = 'slot' and w.lane = any (p_lanes) offset 0) w
      cross join lateral (select s.slots, s.used from queue.semaphore s where s.key = w.key order by s.tick desc limit 1) s
      where s.used < s.slots);
  end if;
  perform queue._bring_forward(v_ids);
  if p_only is not null then
    v_ids := array(select distinct u.id from unnest(p_only) u (id));
  end if;
  v_ids := array(
    select v.id
    from unnest(v_ids) u (id)
    cross join lateral (
      select v.id, v.lane, v.deadline from queue.live v
      where v.id = u.id and v.claim is null and v.lane = any (p_lanes) and (p_before is null or v.deadline < p_before) offset 0) v
    where p_tasks is null or exists (select from queue.job j where j.id = v.id and j.task = any (p_tasks))
    order by array_position(p_lanes, v.lane), v.deadline, v.id);
  if v_ids = '{}' then
    return v_won;
  end if;
  return v_won || (select c.won from queue._claim_ids(p_worker, v_ids, p_n - cardinality(v_won)) c);
end $$;

-- Moves jobs that wait for slots to queue.live, though others are ready before them: the caller claims them.
-- Locks: the caller holds ADM.
create or replace function queue._bring_forward(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
begin
  with gone as (
    delete from queue.waiting w where w.id = any (p_ids) returning w.id, w.key, w.lane)
  select array_agg(g.id) as ids, array_agg(g.key) as keys, array_agg(g.lane) as lanes into v from gone g;
  if v.ids is null then
    return;
  end if;
  perform queue._add_slots(v.keys, v.lanes, null, null, array_fill(-1, array[cardinality(v.ids)]), null);
  select x.* into v from queue._places(v.ids) x;
  perform queue._add_slots(array_agg(k.key), array_agg(v.lanes[k.n]), null, array_agg(1), null, null) from queue._keys_of(v.ids, v.flags) k;
  perform queue._to_live(v.ids, v.lanes, v.deadlines, v.flags, v.attempts);
end $$;

-- Where a defer is replacing ready jobs of p_ids, which may take long: lets as many others of their keys and lanes in
-- as there are free slots that no other ready job is there for.
-- Locks: the caller holds ADM; rows of queue.queueing_lock by skip locked. Why no wake-up is lost: who is let in is ready for
-- this loop's next turn, and one that is replaced stays ready; limits are looked at again as each is claimed.
-- Two sessions: replace_fetch.spec.
create or replace function queue._pass_by(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
  v record;
begin
  v_ids := array(
    select v.id from queue.live v where v.id = any (p_ids) and v.claim is null and v.flags & 6 <> 0 and v.flags & (256 | 8192) <> 0);
  if v_ids <> '{}' then
    v_ids := queue._lock_queueing_locks(v_ids);
  end if;
  if v_ids = '{}' then
    return;
  end if;
  select array_agg(v.id) as ids, array_agg(v.flags) as flags, array_agg(v.lane) as lanes into v from queue.live v where v.id = any (v_ids);
  perform queue._bring_forward(array(
    select w.id
    from (select k.key, v.lanes[k.n] as lane, count(*) as n from queue._keys_of(v.ids, v.flags) k group by 1, 2) k
    cross join lateral (
      select s.slots, s.used, s.lanes, s.ready, s.lows from queue.semaphore s where s.key = k.key order by s.tick desc limit 1) s
    cross join lateral unnest(s.lanes, s.ready, s.lows) l (lane, ready, low)
    cross join lateral (
      select w.id from queue.waiting w
      where w.reason = 'slot' and w.key = k.key and w.lane = k.lane and w.id >= l.low
      order by w.id limit greatest(s.slots - s.used - (l.ready - k.n), 0)) w
    where l.lane = k.lane));
end $$;

-- Claims those of p_ids, at most p_n, that limits let start. Ready jobs that meet a full key go to wait;
-- rest: those that stay where they are; full_queues: queues whose own limits let no more start.
-- Locks: as _claim_limited.
create or replace function queue._claim_ids(
  p_worker bigint, p_ids bigint[], p_n integer, out won bigint[], out rest bigint[], out full_queues text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_claim bigint := nextval('queue.claim_seq');  -- under ADM, so that the claims before have lesser ones
  v record;                                   -- the jobs whose rows could be locked
  k record;                                   -- ns, nos: which job has which key; keys, free: those
  v_due bigint[] := '{}'::bigint[];           -- have expired
  v_fixed bigint[] := '{}'::bigint[];         -- their queueing lock is being replaced
  v_queues text[] := '{}'::text[];            -- with limits, and how many jobs they let start
  v_room integer[] := '{}'::integer[];
  v_queue integer;
  v_row integer := 1;
  v_first integer;
  v_shut integer;
  v_taken integer[];
  v_counted bigint[] := '{}'::bigint[];       -- count in max_running
  v_add_keys text[] := '{}'::text[];          -- what is added to semaphores
  v_add_lanes integer[] := '{}'::integer[];
  v_add_used integer[] := '{}'::integer[];
  v_add_ready integer[] := '{}'::integer[];
  v_add_waiting integer[] := '{}'::integer[];
  v_add_lows bigint[] := '{}'::bigint[];
  v_wait integer[] := '{}'::integer[];
  v_wait_keys text[] := '{}'::text[];
  v_wait_several boolean[] := '{}'::boolean[];
begin
  won := '{}'::bigint[];
  rest := '{}'::bigint[];
  full_queues := '{}'::text[];
  select array_agg(v.id order by u.n) as ids, array_agg(v.flags order by u.n) as flags, array_agg(v.lane order by u.n) as lanes,
    array_agg(l.queue order by u.n) as queues, array_agg(l.kind > 0 and l.is_limited order by u.n) as are_limited, bit_or(v.flags) as all_flags
  into v
  from unnest(p_ids) with ordinality u (id, n)
  cross join lateral (
    select v.id, v.flags, v.lane from queue.live v where v.id = u.id and v.claim is null for update of v skip locked) v
  cross join lateral (
    select l.queue, l.kind,
      exists (select from queue.queue_config c where c.queue = l.queue and (c.max_running is not null or c.rate_limit is not null)) as is_limited
    from queue.lane l where l.lane = v.lane offset 0) l;
  if v.ids is null then
    rest := p_ids;
    return;
  elsif cardinality(v.ids) < cardinality(p_ids) then
    rest := array(select u.id from unnest(p_ids) u (id) where u.id <> all (v.ids));
  end if;
  if v.all_flags & 64 <> 0 then
    v_due := array(select e.id from queue.expiry e where e.id = any (v.ids) and e.at <= v_now);
  end if;
  if v.all_flags & (256 | 8192) <> 0 then
    v_fixed := queue._lock_queueing_locks(v.ids);
  end if;
  if v.all_flags & 6 <> 0 then
    select array_agg(x.n order by x.n) as ns, array_agg(x.no order by x.n) as nos,
      array_agg(x.key order by x.no) filter (where x.is_first) as keys,
      array_agg(x.free order by x.no) filter (where x.is_first) as free
    into k
    from (
      select x.n, x.key, x.no, x.is_first, s.slots - s.used as free
      from (
        select x.n, x.key, dense_rank() over (order by x.key)::integer as no, row_number() over (partition by x.key) = 1 as is_first
        from queue._keys_of(v.ids, v.flags) x) x
      left join lateral (
        select s.slots, s.used from queue.semaphore s where s.key = x.key order by s.tick desc limit 1) s on x.is_first) x;
    v_taken := array_fill(0, array[cardinality(k.keys)]);
  end if;
  for n in 1 .. cardinality(v.ids) loop
    exit when cardinality(won) >= p_n;
    v_first := v_row;
    v_shut := null;
    v_queue := null;
    if v.flags[n] & 6 <> 0 then
      while k.ns[v_row] = n loop
        if v_taken[k.nos[v_row]] >= k.free[k.nos[v_row]] then
          v_shut := coalesce(v_shut, k.nos[v_row]);
        end if;
        v_row := v_row + 1;
      end loop;
    end if;
    if v.ids[n] = any (v_due) then
      rest := rest || v.ids[n];
      continue;
    elsif v.ids[n] = any (v_fixed) then
      rest := rest || v.ids[n];
      continue;
    elsif v_shut is not null then
      v_wait := v_wait || n;
      v_wait_keys := v_wait_keys || k.keys[v_shut];
      v_wait_several := v_wait_several || (v_row - v_first > 1);
      for i in v_first .. v_row - 1 loop
        v_add_keys := v_add_keys || k.keys[k.nos[i]];
        v_add_lanes := v_add_lanes || v.lanes[n];
        v_add_used := v_add_used || 0;
        v_add_ready := v_add_ready || -1;
        v_add_waiting := v_add_waiting || (k.nos[i] = v_shut)::integer;
        v_add_lows := v_add_lows || case when k.nos[i] = v_shut then v.ids[n] end;
      end loop;
      continue;
    end if;
    if v.are_limited[n] then
      v_queue := array_position(v_queues, v.queues[n]);
      if v_queue is null then
        v_queues := v_queues || v.queues[n];
        v_room := v_room || queue._queue_room(v.queues[n], p_n, v_now);
        v_queue := cardinality(v_queues);
      end if;
      if v_room[v_queue] <= 0 then
        rest := rest || v.ids[n];
        continue;
      end if;
      v_room[v_queue] := v_room[v_queue] - 1;
    end if;
    for i in v_first .. v_row - 1 loop
      v_taken[k.nos[i]] := v_taken[k.nos[i]] + 1;
      v_add_keys := v_add_keys || k.keys[k.nos[i]];
      v_add_lanes := v_add_lanes || v.lanes[n];
      v_add_used := v_add_used || 1;
      v_add_ready := v_add_ready || -1;
      v_add_waiting := v_add_waiting || 0;
      v_add_lows := v_add_lows || null::bigint;
    end loop;
    won := won || v.ids[n];
  end loop;
  if won <> '{}' then
    for i in 1 .. cardinality(v_queues) loop
      v_counted := v_counted || queue._count_starts(
        v_queues[i], array(select v.ids[n] from generate_series(1, cardinality(v.ids)) n
                           where v.are_limited[n] and v.queues[n] = v_queues[i] and v.ids[n] = any (won)), v_now);
      if v_room[i] <= 0 then
        full_queues := full_queues || v_queues[i];
      end if;
    end loop;
    update queue.live v
    set claim = v_claim, worker_id = p_worker, claimed_at = v_now, attempt = v.attempt + 1,
      flags = v.flags | case when v.id = any (v_counted) then 16384 else 0 end
    where v.id = any (won);
    if v.all_flags & 256 <> 0 then
      perform queue._drop_queueing_locks(won, 256);
    end if;
    if v.all_flags & 8 <> 0 then
      perform queue._begin_any(array_agg(v.ids[n])) from generate_series(1, cardinality(v.ids)) n
      where v.flags[n] & 8 <> 0 and v.ids[n] = any (won) having count(*) > 0;
    end if;
    if v.all_flags & 128 <> 0 then
      perform queue._lease_timeouts(won, v_claim, v_now);
    end if;
  else
    full_queues := v_queues;
  end if;
  if v_wait <> '{}' then
    with gone as (
      delete from queue.live v where v.id = any (array(select v.ids[n] from unnest(v_wait) n)) returning v.id, v.lane, v.deadline, v.flags, v.attempt)
    insert into queue.waiting (id, reason, key, lane, deadline, flags, attempt, has_several)
    select g.id, 'slot', v_wait_keys[u.i], g.lane, g.deadline, g.flags, g.attempt, v_wait_several[u.i]
    from gone g cross join lateral (select array_position(v_wait, array_position(v.ids, g.id)) as i) u;
    perform queue._keep_turns(array_agg(v.ids[n])) from unnest(v_wait) n where v.flags[n] & 1 <> 0 having count(*) > 0;
  end if;
  if v_add_keys <> '{}' then
    perform queue._add_slots(v_add_keys, v_add_lanes, v_add_used, v_add_ready, v_add_waiting, v_add_lows);
  end if;
  if true = any (v_wait_several) then
    perform queue._advance(p_keys => v_add_keys);
  end if;
  if v_due <> '{}' then
    perform queue._expire(v_due);
  end if;
end $$;

-- Whether a queue's max_running or rate lets no job start now.
create or replace function queue._is_queue_full(p_queue text)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (select from queue.queue_config c where c.queue = p_queue and (c.max_running is not null or c.rate_limit is not null))
    and queue._queue_room(p_queue, 1, clock_timestamp()) = 0;
end $$;

-- How many jobs, at most p_n, a queue's max_running and rate let start at p_now.
create or replace function queue._queue_room(p_queue text, p_n integer, p_now timestamptz)
returns integer language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_config record;
  v_last record;
  v_room integer := p_n;
  v_low integer := 0;
  v_middle integer;
begin
  select c.max_running, c.rate_limit, c.rate_per into v_config from queue.queue_config c where c.queue = p_queue;
  if v_config.max_running is not null then
    v_room := least(v_room, v_config.max_running
      - coalesce((select s.used from queue.semaphore s where s.key = 'q' || p_queue order by s.tick desc limit 1), 0));
  end if;
  if v_config.rate_limit is not null then
    select r.no, greatest(r.at, p_now) - v_config.rate_per as horizon into v_last
    from queue.rate_start r where r.queue = p_queue order by r.no desc limit 1;
    -- k more may start when the one that comes limit starts before the k-th of them lies outside the window
    v_room := least(v_room, v_config.rate_limit);
    while v_low < v_room loop
      v_middle := (v_low + v_room + 1) / 2;
      if exists (select from queue.rate_start r
                 where r.queue = p_queue and r.no = v_last.no + v_middle - v_config.rate_limit and r.at >= v_last.horizon) then
        v_room := v_middle - 1;
      else
        v_low := v_middle;
      end if;
    end loop;
  end if;
  return greatest(v_room, 0);
end $$;

-- When a queue's rate lets the next job start; NULL for at once.
create or replace function queue._next_start(p_queue text)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_at timestamptz;
begin
  select r.at + c.rate_per into v_at
  from queue.queue_config c
  cross join lateral (select r.no from queue.rate_start r where r.queue = c.queue order by r.no desc limit 1) l
  cross join lateral (select r.at from queue.rate_start r where r.queue = c.queue and r.no = l.no + 1 - c.rate_limit) r
  where c.queue = p_queue and c.rate_limit is not null and r.at + c.rate_per >= clock_timestamp();
  return v_at;
end $$;

-- Notes starts of a queue's jobs: in its rate, at p_now, and in its max_running. Returns the jobs that count
-- in the latter.
-- Locks: the caller holds ADM.
create or replace function queue._count_starts(p_queue text, p_ids bigint[], p_now timestamptz)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_config record;
  v_no bigint;
  v_at timestamptz;
begin
  select c.max_running, c.rate_limit into v_config from queue.queue_config c where c.queue = p_queue;
  if v_config.rate_limit is not null then
    select r.no, r.at into v_no, v_at from queue.rate_start r where r.queue = p_queue order by r.no desc limit 1;
    v_no := coalesce(v_no, 0);
    insert into queue.rate_start (queue, no, at)
    select p_queue, v_no + n, greatest(v_at, p_now) from generate_series(1, cardinality(p_ids)) n;
    delete from queue.rate_start r
    where r.queue = p_queue and r.no > v_no - v_config.rate_limit and r.no <= v_no + cardinality(p_ids) - v_config.rate_limit;
  end if;
  if v_config.max_running is null then
    return '{}'::bigint[];
  end if;
  perform queue._add_slots(array['q' || p_queue], null, array[cardinality(p_ids)], null, null, null);
  return p_ids;
end $$;

-- Removes semaphores that nobody has used since a million others were written. At most 1,000.
-- Locks: the caller holds ADM.
create or replace function queue._forget_semaphores()
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  delete from queue.semaphore s
  where s.ctid = any (array(
    select s.ctid from queue.semaphore s
    where s.used = 0 and s.lanes = '{}' and s.tick < (select q.last_value - 1000000 from queue.tick_seq q)
    order by s.tick limit 1000));
end $$;

-- What of check() concerns semaphores.
create or replace function queue._check_semaphores()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select 'slots in use that no claim has'::text, null::bigint, format('%s: used %s, claims %s', coalesce(s.key, c.key), s.used, c.n)
    from (select distinct on (s.key) s.key, s.used from queue.semaphore s order by s.key, s.tick desc) s
    full join (
      select k.key, count(*) as n
      from (
        select k.key
        from (select array_agg(v.id) as ids, array_agg(v.flags) as flags
              from (select v.id, v.flags from queue.live v where v.claim is not null and v.flags & 6 <> 0
                    union all
                    select h.job_id, h.flags from queue.handover h where h.kind in ('ended', 'again') and h.flags & 6 <> 0) v) a
        cross join lateral queue._keys_of(a.ids, a.flags) k
        union all
        select 'q' || l.queue from queue.live v join queue.lane l on l.lane = v.lane where v.claim is not null and v.flags & 16384 <> 0
        union all
        select 'q' || coalesce(t.queue, j.queue) from queue.handover h join queue.job j on j.id = h.job_id
        left join queue.job_state t on t.id = j.id where h.kind in ('ended', 'again') and h.flags & 16384 <> 0) k
      group by k.key) c on c.key = s.key
    where coalesce(s.used, 0) <> coalesce(c.n, 0) or left(s.key, 1) = 'm' and s.used > 1;
  return query
    select x.problem, null::bigint, format('%s, lane %s: slots %s, used %s, ready %s (%s), waiting %s (%s), low %s (%s)', x.key, x.lane, x.slots, x.used,
                                           x.ready, x.is_ready, x.waiting, x.is_waiting, x.low, x.least_id)
    from (
      select case when s.ready is distinct from coalesce(v.n, 0) or s.waiting is distinct from coalesce(w.n, 0) then 'counts of a key are wrong'
                  when w.n > 0 and s.low > w.id then 'waits for a slot below the low mark'
                  when s.waiting > 0 and s.ready < s.slots - s.used and not exists (select from queue.handover h where h.kind = 'refill' and h.payload ? s.key)
                    then 'a free slot and a job that waits for it' end as problem,
        coalesce(s.key, w.key, v.key) as key, coalesce(s.lane, w.lane, v.lane) as lane, s.slots, s.used, s.ready, v.n as is_ready,
        s.waiting, w.n as is_waiting, s.low, w.id as least_id
      from (
        select s.key, s.slots, s.used, l.lane, l.ready, l.waiting, l.low
        from (select distinct on (s.key) s.* from queue.semaphore s order by s.key, s.tick desc) s
        cross join lateral unnest(s.lanes, s.ready, s.waiting, s.lows) l (lane, ready, waiting, low)) s
      full join (
        select w.key, w.lane, count(*) as n, min(w.id) as id from queue.waiting w
        where w.reason = 'slot' and w.lane is not null group by w.key, w.lane) w on w.key = s.key and w.lane = s.lane
      full join (
        select k.key, a.lanes[k.n] as lane, count(*) as n
        from (select array_agg(v.id) as ids, array_agg(v.flags) as flags, array_agg(v.lane) as lanes
              from queue.live v where v.claim is null and v.flags & 6 <> 0) a
        cross join lateral queue._keys_of(a.ids, a.flags) k
        group by 1, 2) v on v.key = coalesce(s.key, w.key) and v.lane = coalesce(s.lane, w.lane)) x
    where x.problem is not null;
end $$;
