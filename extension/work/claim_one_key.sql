-- Claiming under a limit that all jobs at hand share, because they have the same one key: in few statements.
-- Tests: admit/one_key.sql.

-- Claims up to p_n jobs, as _claim_limited does, if the lanes have one queue and priority, and all jobs with
-- a limit have one and the same key. The key must have room for all of them, and they must have no other
-- limit. If not, it changes nothing and ids is NULL. Paused lanes are left out. first_claim: as for
-- _claim_newcomer.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._claim_one_key(
  p_worker bigint, p_lanes integer[], p_n integer, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_jobs record;
  v_now timestamptz;
begin
  if cardinality(p_lanes) > 1 and (
    select min(l.queue) < max(l.queue) or min(l.priority) < max(l.priority)
    from queue.lane l where l.lane = any (p_lanes)) then
    return;
  end if;
  select array_agg(x.tid) as tids, array_agg(x.id order by x.deadline, x.id) as ids, bit_or(x.flags) as flags,
    bit_or(x.flags) filter (where x.is_limited) as limits, bool_or(x.deadline < 'infinity') as have_deadlines,
    'k' || min(x.keys[1]) as key, count(*) filter (where x.is_limited)::integer as n,
    min(x.lane) filter (where x.is_limited) as lane,
    bool_and(not x.is_limited or coalesce(cardinality(x.keys), 0) = 1 and (x.options ? 'terms') is not true)
      and (min(x.keys[1]) = max(x.keys[1])) is not false as has_one_key
  into v_jobs
  from (
    select aj.tid, aj.id, aj.lane, aj.deadline, aj.flags, c.is_limited, j.keys, j.options
    from (
      select c.id, l.kind > {{lane_plain}} as is_limited
      from unnest(p_lanes) u (lane)
      cross join lateral (
        select l.lane, l.kind, l.low_deadline, l.low_id from queue.lane l
        where l.lane = u.lane and (l.paused_until is null or l.paused_until <= clock_timestamp())
          and not exists (select from queue.queue_config c where c.queue = l.queue and {{has_limit}})
        offset 0) l
      cross join lateral (
        select aj.id, aj.deadline from queue.active_job aj
        where {{is_ready}}
        order by aj.deadline, aj.id limit p_n) c
      order by c.deadline, c.id limit p_n) c
    cross join lateral (
      select aj.ctid as tid, aj.id, aj.lane, aj.deadline, aj.flags from queue.active_job aj
      where aj.id = c.id and aj.claim is null for update of aj skip locked) aj
    left join lateral (
      select j.keys, j.options from queue.job j where j.id = aj.id and aj.flags & {{keys}} <> 0 offset 0) j
      on c.is_limited) x;
  if v_jobs.has_one_key is not true
    or v_jobs.limits & ({{mutex}} | {{needs}} | {{expires}} | {{queueing_lock}}) <> 0 then
    return;
  end if;
  if v_jobs.n > 0 then
    with gone as (
      delete from queue.semaphore s
      where s.ctid = (select s.ctid from queue.semaphore s where s.key = v_jobs.key
          order by s.tick desc limit 1)
        and s.rate_limit is null and s.lanes = array[v_jobs.lane] and s.slots - s.used >= v_jobs.n
      returning s.slots, s.limit_id, s.used, s.lanes, s.ready[1] - v_jobs.n as ready, s.waiting,
        s.lows, s.low_deadlines)
    insert into queue.semaphore (key, tick, slots, limit_id, used, lanes, ready, waiting, lows, low_deadlines)
    select v_jobs.key, nextval('queue.tick_seq'), g.slots, g.limit_id, g.used + v_jobs.n,
      case when x.stays then g.lanes else '{}' end, case when x.stays then array[g.ready] else '{}' end,
      case when x.stays then g.waiting else '{}' end, case when x.stays then g.lows else '{}' end,
      case when x.stays then g.low_deadlines else '{}' end
    from gone g cross join lateral (select g.ready > 0 or g.waiting[1] > 0 as stays) x;
    if not found then
      return;
    end if;
  end if;
  ids := v_jobs.ids;
  v_now := clock_timestamp();  -- after the snapshot that shows the jobs ready
  first_claim := nextval('queue.claim_seq');
  update queue.active_job aj
  set claim = first_claim, worker_id = p_worker, claimed_at = v_now, attempt = aj.attempt + 1
  where aj.ctid = any (v_jobs.tids);
  if v_jobs.flags & {{lease}} <> 0 then
    perform queue._lease_timeouts(ids, first_claim, v_now);
  end if;
  if v_jobs.have_deadlines or v_jobs.flags & {{overridden}} <> 0 or v_jobs.flags < 0 then
    first_claim := null;
  end if;
end $$;

-- Settles claims that have ended with slots of concurrency keys. If all have one key, and the next fetch of
-- p_worker would claim jobs of that key, it claims these, at most p_max_jobs: ids is NULL for none.
-- Workers of one key take turns here. If nothing but limited jobs is ready, each waits a moment for the
-- admission lock: to append a settlement costs more, and the next fetch would have to wait as well.
-- Locks: the admission lock, waited for up to 50 ms.
-- Why no wake-up is lost: see admit/admission.sql; if it claims as many jobs as have ended, no more are ready
-- than before. Two sessions: tests/py/races/test_fast_paths.py.
create or replace function queue._settle_and_claim(p_ids bigint[], p_flags smallint[], p_worker bigint,
  p_queues text[], p_max_jobs integer, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_queues text[] := case when p_queues is not null then queue._match_queues(p_queues) end;
  v_now timestamptz := clock_timestamp();
  v_key text;
  v_passed record;
begin
  if exists (select from queue.lane l where not l.is_idle and l.kind <> {{lane_limited}}
    and (v_queues is null or l.queue = any (v_queues))) is false then
    v_key := queue._only_key(p_ids, p_flags);
  end if;
  -- If others must be admitted, the slots are given back first: a new job may be discarded if no slot is
  -- free. This looks before it takes the lock, because others wait for the lock.
  if v_key is not null and {{is_look_due}} then
    if queue._has_work(v_now) then
      p_max_jobs := 0;
    else
      perform set_config('pgdefer.looked_at', date_part('epoch', v_now)::text, false);
    end if;
  end if;
  if v_key is not null and queue._wait_for_admission() then
    begin
      v_passed := queue._pass_slots_on(v_key, cardinality(p_ids), p_worker, v_queues, p_max_jobs);
    exception when {{fault}} then
      -- _settle_or_append meets it again, and reports it
      select null::bigint[] as ids, null::bigint as first_claim, 0 as flags, false as is_done into v_passed;
    end;
    if v_passed.is_done then
      ids := v_passed.ids;
      first_claim := v_passed.first_claim;
      if coalesce(cardinality(ids), 0) < cardinality(p_ids) then
        perform queue._announce();  -- more jobs are ready than before
      end if;
      if v_passed.flags & {{lease}} <> 0 then
        perform queue._lease_timeouts(ids, aj.claim, aj.claimed_at) from queue.active_job aj
        where aj.id = ids[1];
      end if;
      return;
    end if;
  end if;
  perform queue._settle_or_append(p_ids, p_flags, bit_or(f), 'ended', true) from unnest(p_flags) f;
end $$;
