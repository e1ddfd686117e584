-- Claiming under the common limit, in few statements: all jobs at hand have the same one key.
-- Tests: admit/one_key.sql.

-- Claims up to p_n jobs of one limited lane, as _claim_limited does, if these jobs have one and the same key
-- with room for all of them, and no other limit, and the lane is not paused. If not, it changes nothing and
-- ids is NULL. first_claim: as for _claim_newcomer.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._claim_one_key(
  p_worker bigint, p_lane integer, p_n integer, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_jobs record;
  v_now timestamptz;
begin
  select array_agg(x.tid) as tids, array_agg(x.id order by x.deadline, x.id) as ids, bit_or(x.flags) as flags,
    bool_or(x.deadline < 'infinity') as have_deadlines, 'k' || min(x.keys[1]) as key,
    bool_and(cardinality(x.keys) = 1 and (x.options ? 'terms') is not true and x.flags & {{keys}} <> 0)
      and min(x.keys[1]) = max(x.keys[1]) as has_one_key
  into v_jobs
  from (
    select aj.tid, aj.id, aj.deadline, aj.flags, j.keys, j.options
    from queue.lane l
    cross join lateral (
      select aj.ctid as tid, aj.id, aj.deadline, aj.flags from queue.active_job aj
      where aj.lane = l.lane and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id) and aj.claim is null
      order by aj.deadline, aj.id limit p_n for update of aj skip locked) aj
    cross join lateral (select j.keys, j.options from queue.job j where j.id = aj.id offset 0) j
    where l.lane = p_lane and (l.paused_until is null or l.paused_until <= clock_timestamp())
      and not exists (select from queue.queue_config c where c.queue = l.queue
      and (c.max_running is not null or c.rate_limit is not null))) x;
  if v_jobs.has_one_key is not true
    or v_jobs.flags & ({{mutex}} | {{needs}} | {{expires}} | {{queueing_lock}}) <> 0 then
    return;
  end if;
  with gone as (
    delete from queue.semaphore s
    where s.ctid = (select s.ctid from queue.semaphore s where s.key = v_jobs.key order by s.tick desc limit 1)
      and s.rate_limit is null and s.lanes = array[p_lane] and s.slots - s.used >= cardinality(v_jobs.ids)
    returning s.slots, s.limit_id, s.used, s.lanes, s.ready[1] - cardinality(v_jobs.ids) as ready, s.waiting,
      s.lows, s.low_deadlines)
  insert into queue.semaphore (key, tick, slots, limit_id, used, lanes, ready, waiting, lows, low_deadlines)
  select v_jobs.key, nextval('queue.tick_seq'), g.slots, g.limit_id, g.used + cardinality(v_jobs.ids),
    case when x.stays then g.lanes else '{}' end, case when x.stays then array[g.ready] else '{}' end,
    case when x.stays then g.waiting else '{}' end, case when x.stays then g.lows else '{}' end,
    case when x.stays then g.low_deadlines else '{}' end
  from gone g cross join lateral (select g.ready > 0 or g.waiting[1] > 0 as stays) x;
  if not found then
    return;
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
