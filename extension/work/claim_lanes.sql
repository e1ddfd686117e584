-- Claiming from lanes without limits.
-- Tests: work/fetch.sql.

-- Claims up to p_n jobs of plain lanes, in the order of p_lanes. first_claim: as for _claim_newcomer.
-- Locks: rows of queue.active_job by skip locked.
-- Why no paused job starts, and no limited job uncounted: the claiming statement reads the lanes again.
-- Why a job's claims rise: a row that this statement sees was made ready by a transaction that already had
-- its number.
-- Why it starts after the end of jobs that it needed or followed: the clock is read after the snapshot.
create or replace function queue._claim_plain(
  p_worker bigint, p_lanes integer[], p_n integer, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_flags integer;
  v_is_mixed boolean;
begin
  with claimed as (
    update queue.active_job aj
    set claim = (select nextval('queue.claim_seq')), worker_id = p_worker,
      claimed_at = (select clock_timestamp()), attempt = aj.attempt + 1
    where aj.ctid = any (array(
      select c.ctid
      from unnest(p_lanes) u (lane)
      cross join lateral (
        select l.lane, l.low_deadline, l.low_id from queue.lane l
        where l.lane = u.lane and l.kind = {{lane_plain}}
          and (l.paused_until is null or l.paused_until <= (select clock_timestamp())) offset 0) l
      cross join lateral (
        select aj.ctid from queue.active_job aj
        where {{is_ready}}
        order by aj.deadline, aj.id limit p_n for update of aj skip locked) c
      limit p_n))
    returning aj.id, aj.claim, aj.lane, aj.deadline, aj.attempt, aj.flags)
  select array_agg(c.id order by c.id), max(c.claim),
    bit_or(c.flags | case when c.attempt > 1 then {{overridden}} else 0 end),
    bool_or(c.deadline < 'infinity' or c.lane <> p_lanes[1])
  into ids, first_claim, v_flags, v_is_mixed
  from claimed c;
  if v_flags & ({{lease}} | {{overridden}}) <> 0 or v_flags < 0 or v_is_mixed then
    if v_flags & {{lease}} <> 0 then
      perform queue._lease_timeouts(ids, first_claim, (select aj.claimed_at from queue.active_job aj
        where aj.id = ids[1]));
    end if;
    if cardinality(ids) > 1 then
      ids := array(select aj.id from queue.active_job aj where aj.id = any (ids)
        order by array_position(p_lanes, aj.lane), aj.deadline, aj.id);
    end if;
    if v_is_mixed or v_flags & {{overridden}} <> 0 or v_flags < 0 then
      first_claim := null;
    end if;
  end if;
end $$;

-- Returns the lanes that hold a ready job which may start, in the order in which they are read: by priority,
-- then the queue whose first job is oldest. plain_lanes: those that can be claimed from without the admission
-- lock, because no limited lane has a higher priority.
create or replace function queue._probe_lanes(
  p_lanes integer[], out lanes integer[], out kind smallint, out plain_lanes integer[])
language plpgsql stable parallel safe security invoker as $$
begin
  with ready as (
    select l.lane, l.kind, l.priority,
      first_value(f.id) over (partition by l.queue, l.priority order by f.deadline, f.id) as first_id,
      max(l.priority) filter (where l.kind = {{lane_limited}}) over () as limited_priority
    from unnest(p_lanes) u (lane)
    cross join lateral (
      select l.lane, l.priority, l.kind, l.queue, l.low_deadline, l.low_id from queue.lane l
      where l.lane = u.lane offset 0) l
    cross join lateral (
      select aj.deadline, aj.id from queue.active_job aj
      where {{is_ready}}
      order by aj.deadline, aj.id limit 1) f
    where l.kind = {{lane_plain}}
      or not exists (select from queue.queue_config c where c.queue = l.queue and {{has_limit}})
      or queue._queue_room(l.queue, 1, clock_timestamp()) > 0)
  select array_agg(r.lane order by r.n), max(r.kind),
    array_agg(r.lane order by r.n) filter (where r.is_plain)
  into lanes, kind, plain_lanes
  from (select r.*, row_number() over (order by r.priority desc, r.first_id, r.lane) as n,
      r.kind = {{lane_plain}} and (r.limited_priority is null or r.priority >= r.limited_priority) as is_plain
    from ready r) r;
end $$;

-- Records when reap must end claims of jobs with a timeout: 10 s after it.
create or replace function queue._lease_timeouts(p_ids bigint[], p_claim bigint, p_now timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  insert into queue.lease (id, claim, expires_at, is_own)
  select j.id, p_claim, p_now + (j.options ->> 'timeout')::interval + {{timeout_grace}}, false
  from queue.job j where j.id = any (p_ids) and j.flags & {{lease}} <> 0;
end $$;
