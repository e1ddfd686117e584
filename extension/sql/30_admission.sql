-- Admission: the one admitter reads what is new in the log and moves it through the gates.
--
-- The log is read by snapshots, not by ids. The cursor holds the snapshot up to which it was read
-- (next_xid, and the transactions in flight then). A row is new when its xid is at or above it, or
-- among those in flight then, and is visible in the present snapshot. So neither a late commit nor a
-- small id is ever missed, nor a row admitted twice. A range too large for one slice goes to
-- queue.backlog. It is looked through there for the priorities that it holds, and then read by priority
-- (queue.backlog_part), while what is committed later is read first.
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
-- Whoever has it must not keep it while nobody works: the server ends a session that stays idle in this transaction for 10 s,
-- or for less where that is its setting.
create or replace function queue._lock_admission(p_wait boolean)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_wait then
    perform from queue.admission for update;
  else
    perform from queue.admission for update skip locked;
    if not found then
      return false;
    end if;
  end if;
  if current_setting('idle_in_transaction_session_timeout') = '0'
    or current_setting('idle_in_transaction_session_timeout')::interval > interval '10 s'
  then
    perform set_config('idle_in_transaction_session_timeout', '10s', true);
  end if;
  return true;
end $$;

-- Which other session holds ADM, or most likely does; since: when its transaction began, NULL where its role's sessions are hidden from the owner.
create or replace function queue._admission_holder(out pid integer, out role text, out state text, out application text, out since timestamptz)
language plpgsql stable parallel safe security invoker as $$
begin
  select l.pid, a.usename, a.state, a.application_name, a.xact_start into pid, role, state, application, since
  from queue.admission m
  join pg_locks l on l.locktype = 'transactionid' and l.transactionid = m.xmax and l.mode = 'ExclusiveLock' and l.granted
  left join pg_stat_activity a on a.pid = l.pid
  where l.pid <> pg_backend_pid();
  if not found then
    -- a savepoint took it, whose own number is gone: then by the lock of the table, of which the row's is part. NULL for a
    -- prepared transaction, which has no session
    select l.pid, coalesce(a.usename, p.owner), case when l.pid is null then 'prepared transaction ' || p.gid else a.state end, a.application_name,
      coalesce(a.xact_start, p.prepared)
    into pid, role, state, application, since
    from pg_locks l
    left join pg_stat_activity a on a.pid = l.pid
    left join pg_prepared_xacts p on l.pid is null and l.virtualtransaction = '-1/' || p.transaction::text
    where l.locktype = 'relation' and l.relation = 'queue.admission'::regclass and l.mode = 'RowShareLock' and l.granted
      and l.database = (select d.oid from pg_database d where d.datname = current_database()) and l.pid is distinct from pg_backend_pid()
      and not exists (select from pg_locks w where w.pid = l.pid and not w.granted)
    order by coalesce(a.xact_start, p.prepared) limit 1;
  end if;
end $$;

-- Locks: ADM by try. Raises: 42501 where the owner may not end that session.
create or replace function queue.unblock()
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v record;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  perform from queue.admission for update skip locked;
  if found then
    return null;  -- nobody holds it
  end if;
  v := queue._admission_holder();
  if v.pid is not null then
    begin
      perform pg_terminate_backend(v.pid);
    exception when insufficient_privilege then
      raise exception using errcode = '42501', message = 'the owner of the queue may not end this session',
        detail = format('pid: %s, role: %s', v.pid, v.role),
        hint = format('As that role, as a superuser or as a member of pg_signal_backend: select pg_terminate_backend(%s).', v.pid);
    end;
  end if;
  return v.pid;
end $$;
comment on function queue.unblock() is
  'Ends the session that holds the admission lock just now, and with it keeps others from fetching: see the check admission of queue.health(). Its transaction is rolled back. Returns its process id, NULL if nobody holds the lock. A worker that is ended so connects again.';

-- Admits what is new: handovers, a slice of each range that is new, a slice of the most urgent of the backlog, what is due.
-- Locks: the caller holds ADM. has_more: another call will find more.
create or replace function queue._admit(p_slice integer, out admitted integer, out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  c record;
  v_part record;
  v_ended record;
  v_range record;
  v_xid xid8;
  v_start timestamptz := clock_timestamp();
  v_high_id bigint;
  v_has_backlog boolean;
  v_has_handover boolean;
  v_ended_xids xid8[] := '{}'::xid8[];  -- those in flight then that have committed since
  v_ranges xid8[] := '{}'::xid8[];      -- the xids from which there is something to admit
  v_gated bigint[];
  v_parked bigint[];
  v_is_read boolean := false;           -- the whole backlog, so that nothing need be parked any longer
  v_read integer;
  v_move boolean;
  v_due timestamptz;
begin
  select k.*, pg_current_snapshot() as upto, pg_current_xact_id_if_assigned() as own,
    exists (select from queue.job j where j.xid >= k.next_xid) as has_jobs,
    exists (select from queue.handover h where h.xid >= k.next_xid) as has_handover,
    coalesce(pg_sequence_last_value('queue.needed_seq'), 0) as high_need_id,
    exists (select from queue.pause p where p.task is not null) as has_task_pause,
    (select w.at from queue.waiting w where w.at >= k.due_at order by w.at limit 1) as next_due,
    (select s.due_at from queue.schedule s where s.due_at >= k.due_at order by s.due_at limit 1) as next_run
  into c
  from queue.cursor k order by k.tick desc limit 1;
  if pg_snapshot_xmax(c.upto) < c.next_xid then
    perform queue._restart_cursor();
    admitted := 0;
    has_more := true;
    return;
  end if;
  admitted := 0;
  has_more := false;
  v_high_id := c.high_id;
  v_has_backlog := c.has_backlog;
  v_has_handover := c.has_handover;
  if c.in_flight <> '{}' then
    v_ended_xids := array(select x from unnest(c.in_flight) x where pg_visible_in_snapshot(x, c.upto) and x is distinct from c.own order by x);
    v_ranges := array(select x from unnest(v_ended_xids) x where exists (select from queue.job j where j.xid = x) order by x);
    v_has_handover := v_has_handover or exists (select from queue.handover h where h.xid = any (v_ended_xids));
  end if;
  if c.has_jobs then
    v_ranges := v_ranges || c.next_xid;
  end if;
  -- a look that took long met many rows that are not visible yet: let the cursor pass them
  v_move := v_has_handover or v_ranges <> '{}' or clock_timestamp() - v_start > interval '2 ms';
  if v_has_handover then
    v_ended := queue._take_handovers(c.next_xid, v_ended_xids, c.upto, c.own);
    perform queue._settle_slots(v_ended.ids, v_ended.kinds, v_ended.flags, v_ended.payloads);
    c.high_need_id := coalesce(pg_sequence_last_value('queue.needed_seq'), 0);  -- a yield may need what is admitted below
    admitted := 1;
  end if;
  foreach v_xid in array v_ranges loop
    v_range := queue._admit_range(
      v_xid, -9223372036854775808, case when v_xid < c.next_xid then v_xid else pg_snapshot_xmax(c.upto) end, 9223372036854775807,
      c.upto, c.own, p_slice, v_high_id, c.high_need_id, c.has_task_pause, v_has_backlog);
    v_high_id := v_range.high_id;
    v_has_backlog := v_has_backlog or v_range.is_cut;
    admitted := admitted + v_range.n;
    v_gated := v_gated || v_range.gated;
    v_parked := v_parked || v_range.parked;
  end loop;
  if v_has_backlog then
    perform queue._look_through(p_slice);
    v_is_read := true;
    v_read := 0;
    while v_read < p_slice loop
      v_part := queue._next_part();
      exit when v_part.upto is null;
      v_range := queue._admit_range(
        v_part.from_xid, v_part.from_id, v_part.to_xid, v_part.to_id, v_part.upto, v_part.own,
        null, v_high_id, c.high_need_id, c.has_task_pause, v_part.must_park, v_part.top, v_part.bottom);
      v_high_id := v_range.high_id;
      v_read := v_read + v_range.n;
      v_gated := v_gated || v_range.gated;
      v_parked := v_parked || v_range.parked;
      v_is_read := false;
    end loop;
    admitted := admitted + v_read;
    v_move := true;
  end if;
  -- all at once, so that those of one lock come in the order of ids; before turns are given on
  if v_gated is not null then
    perform queue._admit_gated(v_gated);
  end if;
  if v_parked is not null then
    insert into queue.waiting (id, reason) select u.id, 'parked' from unnest(v_parked) u (id);
  end if;
  if v_has_handover then
    perform queue._settle(v_ended.ids, v_ended.kinds, v_ended.flags);
  end if;
  if v_is_read then
    v_has_backlog := queue._unpark(p_slice) > 0 or exists (select from queue.backlog) or exists (select from queue.backlog_part);
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
    perform queue._move_cursor(c.tick, c.upto, c.own, v_high_id, v_has_backlog, v_due);
  end if;
  has_more := has_more or v_has_backlog;
end $$;

-- Notes that everything that is visible in p_upto has been read, the transaction p_own excepted.
-- An update that changes the key is read newest first like a row of its own.
-- Locks: the caller holds ADM.
create or replace function queue._move_cursor(
  p_tick bigint, p_upto pg_snapshot, p_own xid8, p_high_id bigint, p_has_backlog boolean, p_due_at timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  update queue.cursor k
  set tick = p_tick + 1, next_xid = pg_snapshot_xmax(p_upto), in_flight = queue._in_flight(p_upto, p_own), high_id = p_high_id,
    has_backlog = p_has_backlog, due_at = p_due_at
  where k.tick = p_tick;
end $$;

-- The transactions that a snapshot saw in flight, p_own among them.
create or replace function queue._in_flight(p_upto pg_snapshot, p_own xid8)
returns xid8[] language plpgsql immutable parallel safe security invoker as $$
begin
  if pg_snapshot_xmin(p_upto) = pg_snapshot_xmax(p_upto) then
    return '{}'::xid8[];
  end if;
  return array(select x from pg_snapshot_xip(p_upto) x union select p_own where p_own < pg_snapshot_xmax(p_upto) order by 1);
end $$;

-- The transaction whose end a look at a row of queue.live has to wait for: the one that has it locked, by the row's xmax, where that
-- is under way, else this one. As the xid of a handover it has the next admission after that end take it, and none before.
-- A savepoint's own number is no transaction's, nor is that of a multixact, which a row has that was locked before a savepoint and
-- deleted in it: then each admission looks. Multixacts are counted apart, so a number may be one's and a transaction's: who waited for
-- that transaction could wait for the wrong one, so he does not while any member of the multixact is under way.
create or replace function queue._until(p_xmax xid)
returns xid8 language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_own constant xid8 := pg_current_xact_id();
  v_snapshot constant pg_snapshot := pg_current_snapshot();
  v_until constant xid8 := (select x from pg_snapshot_xip(v_snapshot) x where x::xid = p_xmax);
begin
  if v_until is null then
    return v_own;
  elsif mxid_age(p_xmax) between 1 and (select mxid_age(d.datminmxid) from pg_database d where d.datname = current_database()) then
    if exists (
      select from pg_get_multixact_members(p_xmax) m
      -- a member has but the low 32 bits of its number
      where pg_xact_status((v_own::text::bigint + age(v_own::xid) - age(m.xid))::text::xid8) = 'in progress')
    then
      return v_own;
    end if;
  end if;
  return v_until;
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

-- Looks what priorities the backlog holds, part by part, for at most 50 ms: so the most urgent of it can be read first,
-- wherever it is. Of more than 8 priorities in one part neighbours make a band, which is read as one.
-- Locks: the caller holds ADM.
create or replace function queue._look_through(p_slice integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_until constant timestamptz := clock_timestamp() + interval '50 ms';
  v_range record;
  v_seen record;
  v_bands record;
begin
  loop
    select b.* into v_range from queue.backlog b order by b.no limit 1;
    exit when not found;
    select count(*) as n, max(s.priority) as high, min(s.priority) as low, (array_agg(s.xid))[count(*)] as to_xid, (array_agg(s.id))[count(*)] as to_id
    into v_seen
    from (
      select l.xid, l.id, coalesce((l.given).priority, 0) as priority
      from queue.log l
      where (l.xid, l.id) > (v_range.from_xid, v_range.from_id) and l.xid <= v_range.to_xid
        and pg_visible_in_snapshot(l.xid, v_range.upto) and l.xid is distinct from v_range.own
      order by l.xid, l.id limit p_slice) s;
    if v_seen.n > 0 then
      if v_seen.low = v_seen.high then
        select array[v_seen.high] as tops, array[v_seen.low] as bottoms into v_bands;
      else
        select array_agg(b.top order by b.top desc) as tops, array_agg(b.bottom order by b.top desc) as bottoms into v_bands
        from (
          select max(r.priority) as top, min(r.priority) as bottom
          from (
            select p.priority, row_number() over (order by p.priority desc) - 1 as n, count(*) over () as total
            from (
              select distinct coalesce((l.given).priority, 0) as priority from queue.log l
              where (l.xid, l.id) > (v_range.from_xid, v_range.from_id) and (l.xid, l.id) <= (v_seen.to_xid, v_seen.to_id)
                and pg_visible_in_snapshot(l.xid, v_range.upto) and l.xid is distinct from v_range.own) p) r
          group by r.n * 8 / greatest(r.total, 8)) b;
      end if;
      insert into queue.backlog_part (no, priority, is_first, is_mixed, from_xid, from_id, to_xid, to_id, upto, own, tops, bottoms)
      values (nextval('queue.tick_seq'), v_bands.tops[1], v_range.is_first, v_seen.low < v_seen.high, v_range.from_xid,
              v_range.from_id, v_seen.to_xid, v_seen.to_id, v_range.upto, v_range.own, v_bands.tops, v_bands.bottoms);
    end if;
    if v_seen.n < p_slice then
      delete from queue.backlog b where b.no = v_range.no;
    else
      update queue.backlog b set from_xid = v_seen.to_xid, from_id = v_seen.to_id where b.no = v_range.no;
    end if;
    exit when clock_timestamp() > v_until;
  end loop;
end $$;

-- The most urgent band of the backlog, the oldest of those, which is then out of it: rows of the log from (from_xid, from_id),
-- which is read already, to (to_xid, to_id), of a priority from bottom to top. upto NULL: there is none. must_park: older jobs of a
-- lock may be left behind, or put aside already, so that those with an ordered lock are put aside (_admit_range).
-- Locks: the caller holds ADM.
create or replace function queue._next_part(
  out from_xid xid8, out from_id bigint, out to_xid xid8, out to_id bigint, out upto pg_snapshot, out own xid8,
  out top integer, out bottom integer, out must_park boolean)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_no bigint;
  v_is_last boolean;
begin
  select p.no, p.from_xid, p.from_id, p.to_xid, p.to_id, p.upto, p.own, p.tops[1], p.bottoms[1], cardinality(p.tops) = 1,
    not p.is_first or p.is_mixed or exists (select from queue.backlog_part o where o.no < p.no)
      or exists (select from queue.waiting w where w.reason = 'parked')
  into v_no, from_xid, from_id, to_xid, to_id, upto, own, top, bottom, v_is_last, must_park
  from queue.backlog_part p order by p.priority desc, p.no limit 1;
  if v_is_last then
    delete from queue.backlog_part p where p.no = v_no;
  else
    update queue.backlog_part p set priority = p.tops[2], tops = p.tops[2:], bottoms = p.bottoms[2:] where p.no = v_no;
  end if;
end $$;

-- Admits at most p_slice jobs of a range of the log, those of a priority from p_bottom to p_top if given. The rest goes to
-- queue.backlog (is_cut). Plain ones go to queue.live here, the others through the gates: also those that may be needed, as
-- jobs were with ids up to p_high_need_id. With p_park, jobs with an ordered lock are put aside until all backlog has
-- been read, and then admitted in the order of ids: older ones of the same lock may be in there.
-- Locks: the caller holds ADM.
create or replace function queue._admit_range(
  p_from_xid xid8, p_from_id bigint, p_to_xid xid8, p_to_id bigint, p_upto pg_snapshot, p_own xid8, p_slice integer,
  p_high_id bigint, p_high_need_id bigint, p_has_task_pause boolean, p_park boolean, p_top integer default null, p_bottom integer default null,
  out n integer, out high_id bigint, out is_cut boolean, out gated bigint[], out parked bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_low bigint[];
begin
  with fresh as materialized (
    select j.id, j.flags, coalesce(j.deadline, 'infinity') as deadline, l.lane, l.extra_flags,
      (coalesce(j.deadline, 'infinity'), j.id) < (l.low_deadline, l.low_id) or l.is_idle as is_low,
      j.flags & (1 | 2 | 4 | 8 | 16 | 32 | 64 | 256 | 8192) = 0 and j.id > p_high_need_id and l.lane is not null and not p_has_task_pause as is_plain
    from (select j.id, j.flags, j.deadline, j.queue, j.priority from queue.job j
          where (j.xid, j.id) > (p_from_xid, p_from_id) and (j.xid, j.id) <= (p_to_xid, p_to_id)
            and (p_top is null or j.priority between p_bottom and p_top)
            and pg_visible_in_snapshot(j.xid, p_upto) and j.xid is distinct from p_own
          order by j.xid, j.id limit p_slice) j
    left join lateral (select l.lane, l.low_deadline, l.low_id, l.is_idle, l.extra_flags from queue.lane l
                       where l.queue = j.queue and l.priority = j.priority and l.kind = 0 limit 1) l on true),
  plain as (
    insert into queue.live (id, deadline, lane, attempt, flags)
    select x.id, x.deadline, x.lane, 0, x.flags | x.extra_flags from fresh x where x.is_plain)
  select count(*), greatest(p_high_id, max(x.id)),
    array_agg(x.id) filter (where not x.is_plain and not (p_park and x.flags & 1 <> 0)),
    array_agg(x.id) filter (where p_park and x.flags & 1 <> 0),
    array_agg(x.id) filter (where x.is_plain and x.is_low)
  into n, high_id, gated, parked, v_low
  from fresh x;
  is_cut := coalesce(n >= p_slice, false);
  if is_cut then
    insert into queue.backlog (no, from_xid, from_id, to_xid, upto, own, is_first)
    select nextval('queue.tick_seq'), x.xid, x.id, p_to_xid, p_upto, p_own, not p_park
    from (select j.xid, j.id from queue.job j
          where (j.xid, j.id) > (p_from_xid, p_from_id) and (j.xid, j.id) <= (p_to_xid, p_to_id)
            and pg_visible_in_snapshot(j.xid, p_upto) and j.xid is distinct from p_own
          order by j.xid, j.id offset p_slice - 1 limit 1) x;
  end if;
  if v_low is not null then
    perform queue._lower(array_agg(v.lane), array_agg(v.deadline), array_agg(v.id)) from queue.live v where v.id = any (v_low);
  end if;
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
returns void language plpgsql volatile parallel unsafe security invoker set enable_bitmapscan = off as $$
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
  delete from queue.backlog_part;
  delete from queue.deleted;
  update queue.job j set xid = pg_current_xact_id()
  where not exists (select from queue.live v where v.id = j.id)
    and not exists (select from queue.finished f where f.id = j.id)
    and not exists (select from queue.waiting w where w.id = j.id)
    and not exists (select from queue.lock_member m left join queue.job_state s on s.id = j.id
                    where m.lock = coalesce(s.lock, j.lock) and m.id = j.id)
    and not exists (select from queue.handover h where h.job_id = j.id and h.kind in ('ended', 'again'));
  update queue.job j set xid = '3' where j.xid >= pg_snapshot_xmax(v_snapshot) and j.xid <> pg_current_xact_id();
  update queue.handover h set xid = pg_current_xact_id();
  update queue.horizon h set looked_at = '-infinity', looked_xid = '0';
  perform queue._note_needed((select max(d.need_id) from queue.need d));
  insert into queue.cursor (tick, next_xid, in_flight, high_id, has_backlog, due_at)
  select k.tick + 1, pg_snapshot_xmax(v_snapshot),
    array(select x from pg_snapshot_xip(v_snapshot) x union select pg_current_xact_id() where pg_current_xact_id() < pg_snapshot_xmax(v_snapshot) order by 1),
    k.high_id, exists (select from queue.waiting w where w.reason = 'parked'), '-infinity'
  from queue.cursor k order by k.tick desc limit 1;
  delete from queue.cursor k where k.tick < (select max(m.tick) from queue.cursor m);
  update queue.installation i set system_identifier = (select c.system_identifier from pg_control_system() c)
  where i.system_identifier <> (select c.system_identifier from pg_control_system() c);
end $$;
