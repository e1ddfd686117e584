-- Admission: the one admitter reads what is new in the log and moves it through the gates.
--
-- The log is read by snapshots, not by ids. The cursor holds the snapshot up to which it was read
-- (next_xid, and the transactions in flight then). A row is new when its xid is at or above it, or
-- among those in flight then, and is visible in the present snapshot. So neither a late commit nor a
-- small id is ever missed, nor a row admitted twice. A range too large for one slice goes to
-- queue.backlog and is read on from there, while what is committed later is read first.
--
-- Lock order of the whole package, each class once and sorted:
--   own claimed rows of queue.live  <  ADM (queue.admission)  <  everything else.
-- The holder of ADM never waits for a row of queue.live (it takes them by skip locked), so whoever
-- holds claimed rows may wait for ADM. Everything that is not queue.job, queue.live, queue.finished,
-- queue.attempt, queue.handover or queue.queueing_lock is written under ADM only, by one process at a
-- time: there is no race in there to reason about.
--
-- Why no wake-up is lost: whoever ends a claim takes ADM by try and settles in the same transaction,
-- or appends to queue.handover, which is read with the same cursor as the log, so that the argument
-- for new jobs (57_sleep.sql) holds for it.

-- Locks: ADM. Without p_wait it gives up at once when another has it.
create or replace function queue._lock_admission(p_wait boolean)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_wait then
    perform from queue.admission for update;
    return true;
  end if;
  perform from queue.admission for update skip locked;
  return found;
end $$;

-- Admits what is new: handovers, a slice of each range that is new, a slice of the oldest backlog, what is due.
-- Locks: the caller holds ADM. has_more: another call will find more.
create or replace function queue._admit(p_slice integer, out admitted integer, out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  c record;
  v_old record;
  v_ended record;
  v_xid xid8;
  v_start timestamptz := clock_timestamp();
  v_high record;
  v_gated bigint[];
  v_parked bigint[];
  v_is_read boolean := false;
  v_move boolean;
  v_due timestamptz;
begin
  select k.*,
    exists (select from queue.job j where j.xid >= k.next_xid) as has_jobs,
    case when k.ended <> '{}' then array(select x from unnest(k.ended) x where exists (select from queue.job j where j.xid = x)) end as stragglers,
    exists (select from queue.handover h where h.xid >= k.next_xid)
      or k.ended <> '{}' and exists (select from queue.handover h where h.xid = any (k.ended)) as has_handover,
    (select s.last_value from queue.needed_seq s) as high_need_id, exists (select from queue.pause p where p.task is not null) as has_task_pause,
    (select w.at from queue.waiting w where w.at >= k.due_at order by w.at limit 1) as next_due,
    (select s.due_at from queue.schedule s where s.due_at >= k.due_at order by s.due_at limit 1) as next_run
  into c
  from (
    select k.*, s.upto, s.own,
      case when k.in_flight = '{}' then '{}'
        else array(select x from unnest(k.in_flight) x where pg_visible_in_snapshot(x, s.upto) and x is distinct from s.own order by x) end as ended
    from (select k.* from queue.cursor k order by k.tick desc limit 1) k
    cross join (select pg_current_snapshot() as upto, pg_current_xact_id_if_assigned() as own) s) k;
  if pg_snapshot_xmax(c.upto) < c.next_xid then
    perform queue._restart_cursor();
    admitted := 0;
    has_more := true;
    return;
  end if;
  admitted := 0;
  has_more := false;
  select c.high_id as id, c.high_lock_id as lock_id, c.has_backlog as backlog into v_high;
  -- a look that took long met many rows that are not visible yet: let the cursor pass them
  v_move := c.has_jobs or c.has_handover or c.stragglers <> '{}' or clock_timestamp() - v_start > interval '2 ms';
  if c.has_handover then
    select h.ids, h.kinds, h.flags, h.payloads into v_ended from queue._take_handovers(c.next_xid, c.ended, c.upto, c.own) h;
    perform queue._settle_slots(v_ended.ids, v_ended.kinds, v_ended.flags, v_ended.payloads);
    select s.last_value into c.high_need_id from queue.needed_seq s;  -- a yield may need what is admitted below
    admitted := 1;
  end if;
  foreach v_xid in array coalesce(c.stragglers, '{}') || case when c.has_jobs then array[c.next_xid] end loop
    select r.high_id, r.high_lock_id, v_high.backlog or r.is_cut, admitted + r.n, v_gated || r.gated, v_parked || r.parked
    into v_high.id, v_high.lock_id, v_high.backlog, admitted, v_gated, v_parked
    from queue._admit_range(v_xid, -9223372036854775808, case when v_xid < c.next_xid then v_xid else pg_snapshot_xmax(c.upto) end, c.upto, c.own,
                            p_slice, v_high.id, v_high.lock_id, c.high_need_id, c.has_task_pause, v_high.backlog, null) r;
  end loop;
  if c.has_backlog then
    delete from queue.backlog b where b.no = (select o.no from queue.backlog o order by o.no limit 1)
    returning b.no, b.from_xid, b.from_id, b.to_xid, b.upto, b.own, b.is_first into v_old;
    v_is_read := not found;
    if not v_is_read then
      select r.high_id, r.high_lock_id, admitted + r.n, v_gated || r.gated, v_parked || r.parked
      into v_high.id, v_high.lock_id, admitted, v_gated, v_parked
      from queue._admit_range(v_old.from_xid, v_old.from_id, v_old.to_xid, v_old.upto, v_old.own, p_slice, v_high.id, v_high.lock_id,
                              c.high_need_id, c.has_task_pause, not v_old.is_first, v_old.no) r;
    end if;
    v_move := true;
  end if;
  -- all at once, so that those of one lock come in the order of ids; before turns are given on
  if v_gated is not null then
    perform queue._admit_gated(v_gated, c.high_lock_id);
  end if;
  if v_parked is not null then
    insert into queue.waiting (id, reason) select u.id, 'parked' from unnest(v_parked) u (id);
  end if;
  if c.has_handover then
    perform queue._settle(v_ended.ids, v_ended.kinds, v_ended.flags);
  end if;
  if v_is_read then
    select u.high_lock_id, u.n > 0 or exists (select from queue.backlog) into v_high.lock_id, v_high.backlog
    from queue._unpark(p_slice, v_high.lock_id) u;
  end if;
  v_due := c.due_at;
  if c.due_at > v_start then
    -- the clock was set back
    v_due := '-infinity';
    v_move := true;
    has_more := true;
  elsif c.next_due <= v_start or c.next_run <= v_start then
    v_due := v_start;
    if c.next_due <= v_start then
      v_due := least(v_due, queue._admit_due(c.due_at, p_slice));
      admitted := admitted + 1;
      has_more := v_due < v_start;
    end if;
    if c.next_run <= v_start then
      select least(v_due, r.mark), admitted + r.runs, has_more or r.has_more into v_due, admitted, has_more
      from queue._run_due_schedules(c.due_at, p_slice) r;
    end if;
    v_move := true;
  end if;
  if v_move then
    with gone as (
      delete from queue.cursor k where k.tick = c.tick)
    insert into queue.cursor (tick, next_xid, in_flight, high_id, high_lock_id, has_backlog, due_at)
    values (c.tick + 1, pg_snapshot_xmax(c.upto),
            array(select x from pg_snapshot_xip(c.upto) x union select c.own where c.own < pg_snapshot_xmax(c.upto) order by 1),
            v_high.id, v_high.lock_id, v_high.backlog, v_due);
  end if;
  has_more := has_more or v_high.backlog;
end $$;

-- Whether the log may hold what has not been admitted: a look at its end, for those who need nothing else of _admit.
-- Locks: the caller holds ADM.
create or replace function queue._has_news()
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  return (
    select k.has_backlog or k.in_flight <> '{}' or (select j.id from queue.job j where j.xid >= k.next_xid limit 1) is not null
    from queue.cursor k order by k.tick desc limit 1);
end $$;

-- Admits at most p_slice jobs of a range of the log (see queue.backlog, where the rest goes: is_cut).
-- Plain ones go to queue.live here, the others through the gates. With p_park, jobs with an ordered lock
-- are put aside until all backlog has been read, and then admitted in the order of ids: older ones of
-- the same lock may be in there. Only the oldest range (is_first) need not.
-- Locks: the caller holds ADM.
create or replace function queue._admit_range(
  p_from_xid xid8, p_from_id bigint, p_to_xid xid8, p_upto pg_snapshot, p_own xid8, p_slice integer,
  p_high_id bigint, p_high_lock_id bigint, p_high_need_id bigint, p_has_task_pause boolean, p_park boolean, p_no bigint,
  out n integer, out high_id bigint, out high_lock_id bigint, out is_cut boolean, out gated bigint[], out parked bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
begin
  with fresh as materialized (
    select j.id, j.xid, j.flags, coalesce(j.deadline, 'infinity') as deadline, l.lane,
      (coalesce(j.deadline, 'infinity'), j.id) < (l.low_deadline, l.low_id) or l.is_idle as is_low,
      j.flags & (1 | 2 | 4 | 8 | 16 | 32 | 64 | 256 | 8192) = 0 and l.lane is not null and not p_has_task_pause
        -- one that was needed before it was admitted is marked in _place
        and (j.id > p_high_need_id or (select d.job_id from queue.need d where d.need_id = j.id limit 1) is null) as is_plain, l.extra_flags
    from (select j.id, j.xid, j.flags, j.deadline, j.queue, j.priority from queue.job j
          where (j.xid, j.id) > (p_from_xid, p_from_id) and j.xid <= p_to_xid
            and pg_visible_in_snapshot(j.xid, p_upto) and j.xid is distinct from p_own
          order by j.xid, j.id limit p_slice) j
    left join lateral (select l.lane, l.low_deadline, l.low_id, l.is_idle, l.extra_flags from queue.lane l
                       where l.queue = j.queue and l.priority = j.priority and l.kind = 0 limit 1) l on true),
  plain as (
    insert into queue.live (id, deadline, lane, attempt, flags)
    select x.id, x.deadline, x.lane, 0,
      x.flags | x.extra_flags
    from fresh x where x.is_plain)
  select count(*) as n, max(x.id) as high_id,
    max(x.id) filter (where x.flags & 3 <> 0 and not (p_park and x.flags & 1 <> 0)) as high_lock_id,
    array_agg(x.id) filter (where not x.is_plain and not (p_park and x.flags & 1 <> 0)) as gated,
    array_agg(x.id) filter (where p_park and x.flags & 1 <> 0) as parked,
    array_agg(x.lane) filter (where x.is_plain and x.is_low) as low_lanes,
    array_agg(x.deadline) filter (where x.is_plain and x.is_low) as low_deadlines,
    array_agg(x.id) filter (where x.is_plain and x.is_low) as low_ids
  into v from fresh x;
  n := v.n;
  is_cut := n >= p_slice;
  high_id := greatest(p_high_id, v.high_id);
  high_lock_id := greatest(p_high_lock_id, v.high_lock_id);
  if is_cut then
    insert into queue.backlog (no, from_xid, from_id, to_xid, upto, own, is_first)
    select coalesce(p_no, nextval('queue.tick_seq')), x.xid, x.id, p_to_xid, p_upto, p_own, not p_park
    from (select j.xid, j.id from queue.job j
          where (j.xid, j.id) > (p_from_xid, p_from_id) and j.xid <= p_to_xid
            and pg_visible_in_snapshot(j.xid, p_upto) and j.xid is distinct from p_own
          order by j.xid, j.id offset p_slice - 1 limit 1) x;
  end if;
  if v.low_lanes is not null then
    perform queue._lower(v.low_lanes, v.low_deadlines, v.low_ids);
  end if;
  gated := v.gated;
  parked := v.parked;
end $$;

-- Lowers the low marks of lanes to keys that were inserted below them, (p_deadlines[i], p_ids[i]).
-- Locks: the caller holds ADM.
create or replace function queue._lower(p_lanes integer[], p_deadlines timestamptz[], p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  update queue.lane l
  set low_deadline = least(u.deadline, l.low_deadline), is_idle = false,
    low_id = case when (u.deadline, u.id) < (l.low_deadline, l.low_id) then u.id else l.low_id end
  from (select distinct on (u.lane) u.lane, u.deadline, u.id
        from unnest(p_lanes, p_deadlines, p_ids) u (lane, deadline, id) order by u.lane, u.deadline, u.id) u
  where l.lane = u.lane and ((u.deadline, u.id) < (l.low_deadline, l.low_id) or l.is_idle);
end $$;

-- Raises the low marks of lanes past what is claimed or gone.
-- Locks: the caller holds ADM, so that nothing is made ready meanwhile. A row that another claims and
-- gives up again by rollback would be passed by: so the mark stops at the first row that is unclaimed
-- in this snapshot, which such a row is.
create or replace function queue._raise_low_marks(p_lanes integer[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_lane record;
begin
  for v_lane in
    select l.lane, l.low_deadline, l.low_id, f.deadline, f.id, k.high_id
    from queue.lane l
    cross join (select k.high_id from queue.cursor k order by k.tick desc limit 1) k
    left join lateral (
      select v.deadline, v.id from queue.live v
      where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null
      order by v.deadline, v.id limit 1) f on true
    where l.lane = any (p_lanes)
  loop
    if v_lane.id is not null then
      if v_lane.id > v_lane.low_id + 100 or v_lane.deadline > v_lane.low_deadline then
        update queue.lane l set low_deadline = v_lane.deadline, low_id = v_lane.id where l.lane = v_lane.lane;
      end if;
    elsif v_lane.high_id > v_lane.low_id + 100 or v_lane.low_deadline < 'infinity' then
      update queue.lane l set low_deadline = 'infinity', low_id = v_lane.high_id + 1 where l.lane = v_lane.lane;
    end if;
  end loop;
end $$;

-- Where there are many lanes, marks those that hold nothing ready, so that fetch passes them by, and removes
-- those that hold nothing at all.
-- Locks: the caller holds ADM, so that nothing is made ready meanwhile. What is claimed just now counts as
-- ready until that transaction ends, as it may be given up.
create or replace function queue._rest_lanes()
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_idle integer[];
begin
  if (select count(*) from (select from queue.lane l where not l.is_idle limit 51) l) > 50 then
    update queue.lane l set is_idle = true
    where l.lane = any (array(
      select l.lane from queue.lane l
      where not l.is_idle
        and (select v.id from queue.live v
             where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null
             order by v.deadline, v.id limit 1) is null
      limit 10000));
  end if;
  if (select count(*) from (select from queue.lane l where l.is_idle limit 1001) l) > 1000 then
    v_idle := array(
      select l.lane from queue.lane l
      where l.is_idle and (select v.id from queue.live v where v.lane = l.lane limit 1) is null limit 10000);
    delete from queue.lane l
    where l.lane = any (v_idle)
      and l.lane <> all (array(select distinct s.lane from (select unnest(s.lanes) as lane from queue.semaphore s where s.lanes <> '{}') s
                               where s.lane = any (v_idle)));
  end if;
end $$;

-- After a restore into another cluster the stored transaction ids mean nothing, or lie ahead: admit
-- again whatever has not been admitted, and give every row an xid that this cluster has seen.
-- Locks: the caller holds ADM.
create or replace function queue._restart_cursor()
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_snapshot pg_snapshot := pg_current_snapshot();
begin
  delete from queue.backlog;
  delete from queue.deleted;
  update queue.job j set xid = pg_current_xact_id()
  where not exists (select from queue.live v where v.id = j.id)
    and not exists (select from queue.finished f where f.id = j.id)
    and not exists (select from queue.waiting w where w.id = j.id)
    and not exists (select from queue.lock_member m left join queue.job_state s on s.id = j.id
                    where m.lock = coalesce(s.lock, j.lock) and m.id = j.id)
    and not exists (select from queue.handover h where h.job_id = j.id);
  update queue.job j set xid = '3' where j.xid >= pg_snapshot_xmax(v_snapshot) and j.xid <> pg_current_xact_id();
  update queue.handover h set xid = pg_current_xact_id();
  update queue.horizon h set looked_at = '-infinity', looked_xid = '0';
  perform queue._note_needed((select max(d.need_id) from queue.need d));
  insert into queue.cursor (tick, next_xid, in_flight, high_id, high_lock_id, has_backlog, due_at)
  select k.tick + 1, pg_snapshot_xmax(v_snapshot),
    array(select x from pg_snapshot_xip(v_snapshot) x union select pg_current_xact_id() where pg_current_xact_id() < pg_snapshot_xmax(v_snapshot) order by 1),
    k.high_id, k.high_lock_id, exists (select from queue.waiting w where w.reason = 'parked'), '-infinity'
  from queue.cursor k order by k.tick desc limit 1;
  delete from queue.cursor k where k.tick < (select max(m.tick) from queue.cursor m);
  update queue.installation i set system_identifier = (select c.system_identifier from pg_control_system() c)
  where i.system_identifier <> (select c.system_identifier from pg_control_system() c);
end $$;
