-- A limit's common case, in few statements: all ended claims of a batch have the same one key.
-- Tests: admit/one_key.sql.

-- The one key that all of these jobs have, if it has no weight and no rate and nothing else of them counts;
-- else NULL.
create or replace function queue._only_key(p_ids bigint[], p_flags smallint[])
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select case when bool_and(cardinality(j.keys) = 1 and (j.options ? 'terms') is not true
        and u.flags & {{counted}} = {{keys}})
      and min(j.keys[1]) = max(j.keys[1]) then 'k' || min(j.keys[1]) end
    from unnest(p_ids, p_flags) u (id, flags)
    cross join lateral (select j.keys, j.options from queue.job j where j.id = u.id offset 0) j);
end $$;

-- p_n claims of jobs with one key have ended (_only_key). This gives their slots to the jobs that wait for
-- them, as _release_slots and _refill do together. It does so only if the key has no rate, its jobs that are
-- ready or wait are in one lane without shares, and none of them has reserved slots. is_done: whether it did;
-- if not, nothing has changed.
-- With p_max_jobs, it also claims the jobs that the next fetch of p_worker would claim from p_queues (names;
-- NULL: all), if they are simple: the first ready ones, or if none is ready, those that get the slots. The
-- semaphore is then changed once, and jobs that get the slots save an update and their entry in the index of
-- lanes. ids: the claimed jobs, NULL for none. first_claim: as for _claim_newcomer. flags: the flags that any
-- of them has; the caller records their timeouts.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
-- Why no wake-up is lost: as many jobs become ready as _refill would take, or are claimed.
-- In one piece (ADR 1): it is most of what a job with a key costs.
create or replace function queue._pass_slots_on(p_key text, p_n integer,
  p_worker bigint default null, p_queues text[] default null, p_max_jobs integer default 0,
  out is_done boolean, out ids bigint[], out first_claim bigint, out flags smallint)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_count record;
  v_room integer;
  v_next record;  -- the jobs that get the slots
  v_deadline timestamptz;  -- of the first one
  v_id bigint;
  v_ready record;
  v_tids tid[];  -- the ready jobs that are claimed
  v_have_deadlines boolean;
  v_stays boolean;  -- its lane has other jobs of the key
  v_now timestamptz;
begin
  is_done := false;
  if p_key is null then
    return;
  end if;
  select s.ctid as tid, s.slots, s.limit_id, s.used - p_n as used, s.lanes, s.ready, s.waiting,
    s.lows, s.low_deadlines, l.low_deadline, l.low_id, l.is_idle,
    s.rate_limit is null and cardinality(s.lanes) <= 1 and l.tag_base is null as is_plain,
    coalesce(pg_sequence_last_value('queue.needed_seq'), 0) as high_need_id
  into v_count
  from queue.semaphore s
  left join lateral (select l.low_deadline, l.low_id, l.is_idle, l.tag_base from queue.lane l
    where l.lane = s.lanes[1] offset 0) l on true
  where s.key = p_key order by s.tick desc limit 1;
  v_room := least(v_count.slots - v_count.used - v_count.ready[1], v_count.waiting[1]);
  if v_count.is_plain is not true or v_count.waiting[1] > v_room
    and exists (select from queue.waiting w where w.reserved is not null and w.key = p_key) then
    return;
  elsif v_room > 0 then
    select array_agg(w.tid) as tids, array_agg(w.id) as ids, array_agg(w.attempt) as attempts,
      array_agg(w.deadline) as deadlines, array_agg(w.flags) as flags, bit_or(w.flags) as all_flags,
      max(w.old_deadline) as last_deadline, bool_or(w.is_special) as are_special,
      bool_or((w.deadline, w.id) < (v_count.low_deadline, v_count.low_id)) as is_low
    into v_next
    from (
      select w.ctid as tid, w.id, w.deadline as old_deadline, coalesce(s.deadline, w.deadline) as deadline,
        w.attempt, num_nonnulls(w.weight, w.at, w.moves) > 0 or w.deadline < '{{end_of_tags}}'
          as is_special,
        -- These may have changed since the job began to wait.
        (w.flags | case when s.id is not null then {{overridden}} else 0 end
          | case when w.id <= v_count.high_need_id and (select d.job_id from queue.need d
              where d.need_id = w.id limit 1) is not null then {{needed}} else 0 end)::smallint as flags
      from queue.waiting w
      left join lateral (select s.id, s.deadline from queue.job_override s where s.id = w.id offset 0) s
        on true
      where w.reason = 'slot' and w.key = p_key and w.lane = v_count.lanes[1]
        and (w.deadline, w.id) >= (v_count.low_deadlines[1], v_count.lows[1])
      order by w.deadline, w.id limit v_room) w;
    if v_next.are_special is not false then
      return;
    end if;
    v_room := cardinality(v_next.ids);
    v_deadline := v_next.deadlines[1];
    v_id := v_next.ids[1];
  end if;
  if v_count.ready[1] = 0 and v_room between 1 and p_max_jobs then
    flags := v_next.all_flags;
    if flags & ({{mutex}} | {{needs}} | {{expires}} | {{queueing_lock}}) = 0
      and queue._is_next_lane(p_worker, p_queues, v_count.lanes[1], false, v_room = p_max_jobs) then
      ids := v_next.ids;
      v_have_deadlines := v_deadline < 'infinity';
    end if;
  elsif v_count.ready[1] > 0
    and p_max_jobs between 1 and least(v_count.ready[1], v_count.slots - v_count.used) then
    if queue._is_next_lane(p_worker, p_queues, v_count.lanes[1], true, true) then
      v_ready := queue._lock_ready(v_count.lanes[1], p_key, p_max_jobs, v_deadline, v_id);
      v_tids := v_ready.tids;
      ids := v_ready.ids;
      flags := v_ready.flags;
      v_have_deadlines := v_ready.have_deadlines;
    end if;
  end if;
  if ids is not null then
    first_claim := nextval('queue.claim_seq');
    v_now := clock_timestamp();  -- after the snapshot that shows that their turn has come
    v_count.used := v_count.used + cardinality(ids);
  end if;
  if v_room > 0 then
    delete from queue.waiting w where w.ctid = any (v_next.tids);
    if ids is not null and v_tids is null then
      insert into queue.active_job (id, deadline, attempt, flags, claim, claimed_at, worker_id)
      select u.id, u.deadline, u.attempt + 1, u.flags, first_claim, v_now, p_worker
      from unnest(v_next.ids, v_next.deadlines, v_next.attempts, v_next.flags)
        u (id, deadline, attempt, flags);
    else
      insert into queue.active_job (id, deadline, lane, attempt, flags)
      select u.id, u.deadline, v_count.lanes[1], u.attempt, u.flags
      from unnest(v_next.ids, v_next.deadlines, v_next.attempts, v_next.flags)
        u (id, deadline, attempt, flags);
      if v_next.is_low or v_count.is_idle then
        perform queue._lower_marks(array_fill(v_count.lanes[1], array[v_room]), v_next.deadlines, v_next.ids);
      end if;
      v_count.ready[1] := v_count.ready[1] + v_room;
    end if;
    v_count.waiting[1] := v_count.waiting[1] - v_room;
    v_count.lows[1] := v_next.ids[v_room] + 1;
    v_count.low_deadlines[1] := v_next.last_deadline;
  end if;
  if v_tids is not null then
    update queue.active_job aj
    set claim = first_claim, worker_id = p_worker, claimed_at = v_now, attempt = aj.attempt + 1
    where aj.ctid = any (v_tids);
    v_count.ready[1] := v_count.ready[1] - cardinality(ids);
  end if;
  v_stays := v_count.ready[1] > 0 or v_count.waiting[1] > 0;
  with gone as (
    delete from queue.semaphore s where s.ctid = v_count.tid)
  insert into queue.semaphore (key, tick, slots, limit_id, used, lanes, ready, waiting, lows, low_deadlines)
  values (p_key, nextval('queue.tick_seq'), v_count.slots, v_count.limit_id, v_count.used,
    case when v_stays then v_count.lanes else '{}' end, case when v_stays then v_count.ready else '{}' end,
    case when v_stays then v_count.waiting else '{}' end, case when v_stays then v_count.lows else '{}' end,
    case when v_stays then v_count.low_deadlines else '{}' end);
  if v_have_deadlines or flags & {{overridden}} <> 0 or flags < 0 then
    first_claim := null;
  end if;
  is_done := true;
end $$;

-- Whether the next fetch of a worker would claim from this lane. The lane is one of p_queues (NULL: all) and
-- not paused, its jobs have not crashed before, and its queue has no limit. The worker is free. Other lanes
-- of these queues have no ready job that comes first (a crashed one, or one of no lesser priority), and no
-- ready job at all unless p_is_enough. Without p_has_ready the lane itself must have no ready job either.
create or replace function queue._is_next_lane(p_worker bigint, p_queues text[], p_lane integer,
  p_has_ready boolean, p_is_enough boolean)
returns boolean language plpgsql stable parallel safe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
begin
  return exists (
    select from queue.lane k
    where k.lane = p_lane and k.kind = {{lane_limited}}
      and (p_queues is null or k.queue = any (p_queues))
      and (k.paused_until is null or k.paused_until <= v_now)
      and exists (select from queue.queue_config c where c.queue = k.queue and {{has_limit}}) is false
      and exists (select from queue.worker w where w.id = p_worker and w.gone_at is null
        and w.apart_since is null) is true
      and exists (
        select from queue.lane l
        cross join lateral (
          select from queue.active_job aj
          where {{is_ready}} limit 1) r
        where not l.is_idle and (p_queues is null or l.queue = any (p_queues))
          and (l.lane <> k.lane or not p_has_ready)
          and (not p_is_enough or l.priority >= k.priority or l.kind = {{lane_crashed}})
          and (l.paused_until is null or l.paused_until <= v_now)) is false);
end $$;

-- Locks the first p_n ready jobs of a lane, if they have p_key alone and nothing that their claim must look
-- at, and if they come before the job (p_deadline, p_id), which is about to become ready (NULL: none).
-- Otherwise tids and ids are NULL. flags: the flags that any of them has.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._lock_ready(
  p_lane integer, p_key text, p_n integer, p_deadline timestamptz, p_id bigint,
  out tids tid[], out ids bigint[], out flags smallint, out have_deadlines boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_is_simple boolean;
begin
  select array_agg(aj.tid), array_agg(aj.id), bit_or(aj.flags), bool_or(aj.deadline < 'infinity'),
    count(*) = p_n and bool_and(aj.is_simple)
  into tids, ids, flags, have_deadlines, v_is_simple
  from (
    select aj.tid, aj.id, aj.deadline, aj.flags,
      ('k' || j.keys[1] = p_key and cardinality(j.keys) = 1 and (j.options ? 'terms') is not true
        and aj.flags & ({{mutex}} | {{needs}} | {{expires}} | {{queueing_lock}}) = 0
        and (p_id is null or (aj.deadline, aj.id) < (p_deadline, p_id))) is true as is_simple
    from (
      select aj.ctid as tid, aj.id, aj.deadline, aj.flags
      from queue.active_job aj
      where aj.lane = p_lane and aj.claim is null
        and (aj.deadline, aj.id) >= (
          select l.low_deadline, l.low_id from queue.lane l where l.lane = p_lane)
      order by aj.deadline, aj.id limit p_n for update skip locked) aj
    cross join lateral (select j.keys, j.options from queue.job j where j.id = aj.id offset 0) j) aj;
  if v_is_simple is not true then
    tids := null;
    ids := null;
  end if;
end $$;
