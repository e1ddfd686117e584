-- Admission: one session at a time reads new rows of the log and moves their jobs through the gates.
--
-- The log is read by snapshots, not by ids. The cursor holds the snapshot up to which it was read (next_xid,
-- and the transactions in flight then). A row is new if it is visible now and its xid is at or above
-- next_xid, or was in flight then. So neither a late commit nor a small id is ever missed, and no row is
-- admitted twice. A range too large for one slice goes to queue.backlog. There it is first scanned for
-- priorities, and then read by priority (queue.backlog_part); later commits are read before it.
--
-- Lock order of the whole package, each class once and sorted:
--   own claimed rows of queue.active_job  <  the admission lock (queue.admission)  <  everything else.
-- The holder of the admission lock never waits for a row of queue.active_job (it uses SKIP LOCKED), so a
-- process that holds claimed rows may safely wait for the admission lock. The tables of tables/admit and of
-- tables/recur are written only under the admission lock, by one process at a time, so there are no races
-- there. The exceptions: queue.active_job; queue.pending_settlement, to which all append; queue.expiry, from
-- which the end of a claim deletes its job; and queue.queue_config, to which configure_queue adds a queue
-- first.
--
-- Why no wake-up is lost: a process that ends a claim takes the admission lock by try and settles in the same
-- transaction, or appends to queue.pending_settlement. That table is read with the same cursor as the log, so
-- the argument for new jobs (work/sleep.sql) holds for it.

-- Admits in this order: pending settlements, a slice of each new range, a slice of the most urgent part of
-- the backlog, jobs that are due.
-- Locks: the caller holds the admission lock. has_more: another call will find more.
-- In one piece, because each fetch runs it: a call costs more than a step that finds nothing to do.
create or replace function queue._admit(p_slice integer, out admitted integer, out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_cursor record;
  v_part record;
  v_ended record;
  v_range record;
  v_xid xid8;
  v_start timestamptz := clock_timestamp();
  v_high_id bigint;
  v_has_backlog boolean;
  v_has_pending boolean;
  v_ended_xids xid8[] := '{}'::xid8[];  -- transactions in flight then that have committed since
  v_ranges xid8[] := '{}'::xid8[];      -- the xids where ranges to admit begin
  v_gated bigint[];
  v_parked bigint[];
  v_is_read boolean := false;           -- of the whole backlog, so that jobs need not be parked any longer
  v_read integer;
  v_retags boolean := false;
  v_move boolean;
  v_due timestamptz;
begin
  select k.*, pg_current_snapshot() as upto, pg_current_xact_id_if_assigned() as own,
    exists (select from queue.job j where j.xid >= k.next_xid) as has_jobs,
    exists (select from queue.pending_settlement h where h.xid >= k.next_xid) as has_pending,
    coalesce(pg_sequence_last_value('queue.needed_seq'), 0) as high_need_id,
    exists (select from queue.pause p where p.task is not null) as has_task_pause,
    (select w.at from queue.waiting w where w.at >= k.due_at order by w.at limit 1) as next_due,
    (select s.due_at from queue.schedule s where s.due_at >= k.due_at order by s.due_at limit 1) as next_run
  into v_cursor
  from queue.cursor_now k;
  if pg_snapshot_xmax(v_cursor.upto) < v_cursor.next_xid then
    perform queue._restart_cursor();
    admitted := 0;
    has_more := true;
    return;
  end if;
  admitted := 0;
  has_more := false;
  v_high_id := v_cursor.high_id;
  v_has_backlog := v_cursor.has_backlog;
  v_has_pending := v_cursor.has_pending;
  if v_cursor.in_flight <> '{}' then
    v_ended_xids := array(select x from unnest(v_cursor.in_flight) x
      where pg_visible_in_snapshot(x, v_cursor.upto) and x is distinct from v_cursor.own order by x);
    v_ranges := array(select x from unnest(v_ended_xids) x
      where exists (select from queue.job j where j.xid = x) order by x);
    v_has_pending := v_has_pending or exists (select from queue.pending_settlement h
      where h.xid = any (v_ended_xids));
  end if;
  if v_cursor.has_jobs then
    v_ranges := v_ranges || v_cursor.next_xid;
  end if;
  -- a slow read met many rows that are not visible yet: let the cursor pass them
  v_move := v_has_pending or v_ranges <> '{}' or clock_timestamp() - v_start > interval '2 ms';
  if v_has_pending then
    v_ended := queue._take_settlements(v_cursor.next_xid, v_ended_xids, v_cursor.upto, v_cursor.own);
    perform queue._settle_slots(v_ended.ids, v_ended.kinds, v_ended.flags, v_ended.payloads);
    -- a yield may need a job that is admitted below
    v_cursor.high_need_id := coalesce(pg_sequence_last_value('queue.needed_seq'), 0);
    admitted := 1;
  end if;
  foreach v_xid in array v_ranges loop
    v_range := queue._admit_range(
      v_xid, -9223372036854775808, case when v_xid < v_cursor.next_xid then v_xid
        else pg_snapshot_xmax(v_cursor.upto) end, 9223372036854775807,
      v_cursor.upto, v_cursor.own, p_slice, v_high_id, v_cursor.high_need_id, v_cursor.has_task_pause,
        v_has_backlog);
    v_high_id := v_range.high_id;
    v_has_backlog := v_has_backlog or v_range.is_cut;
    admitted := admitted + v_range.n;
    v_gated := v_gated || v_range.gated;
    v_parked := v_parked || v_range.parked;
  end loop;
  if v_has_backlog then
    v_retags := queue._retag(p_slice);
    perform queue._scan_backlog(p_slice);
    v_is_read := true;
    v_read := 0;
    while v_read < p_slice loop
      v_part := queue._next_backlog_part();
      exit when v_part.upto is null;
      v_range := queue._admit_range(
        v_part.from_xid, v_part.from_id, v_part.to_xid, v_part.to_id, v_part.upto, v_part.own,
        null, v_high_id, v_cursor.high_need_id, v_cursor.has_task_pause, v_part.must_park, v_part.top,
        v_part.bottom);
      v_high_id := v_range.high_id;
      v_read := v_read + v_range.n;
      v_gated := v_gated || v_range.gated;
      v_parked := v_parked || v_range.parked;
      v_is_read := false;
    end loop;
    admitted := admitted + v_read;
    v_move := true;
  end if;
  -- all at once, so that jobs of one lock come in the order of ids; before turns are passed on
  if v_gated is not null then
    perform queue._admit_gated(v_gated);
  end if;
  if v_parked is not null then
    insert into queue.waiting (id, reason) select u.id, 'parked' from unnest(v_parked) u (id);
  end if;
  if v_has_pending then
    perform queue._settle(v_ended.ids, v_ended.kinds, v_ended.flags);
  end if;
  if v_is_read then
    v_has_backlog := queue._admit_parked(p_slice) > 0 or exists (select from queue.backlog)
      or exists (select from queue.backlog_part) or v_retags;
  end if;
  v_due := v_cursor.due_at;
  if v_cursor.due_at > v_start then
    -- the clock was set back
    v_due := '-infinity';
    v_move := true;
    has_more := true;
  elsif v_cursor.next_due <= v_start or v_cursor.next_run <= v_start then
    v_due := v_start;
    if v_cursor.next_due <= v_start then
      v_due := least(v_due, queue._admit_due(v_cursor.due_at, p_slice));
      admitted := admitted + 1;
      has_more := v_due < v_start;
    end if;
    if v_cursor.next_run <= v_start then
      select least(v_due, r.mark), admitted + r.runs, _admit.has_more or r.has_more
      into v_due, admitted, has_more
      from queue._run_due_schedules(v_cursor.due_at, p_slice) r;
    end if;
    v_move := true;
  end if;
  if not v_has_backlog and (v_gated is not null or v_has_pending or v_due <> v_cursor.due_at) then
    v_has_backlog := exists (select from queue.lane l where l.retag_from is not null);
  end if;
  if v_move then
    perform queue._move_cursor(v_cursor.tick, v_cursor.upto, v_cursor.own, v_high_id, v_has_backlog, v_due);
  end if;
  has_more := has_more or v_has_backlog;
end $$;

-- Admits everything that is visible, so that an operator finds every job behind the gates.
-- Locks: the admission lock, waited for.
create or replace function queue._admit_all()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_admit record;
begin
  perform queue._lock_admission(true);
  loop
    select a.* into v_admit from queue._admit(1000) a;
    exit when not v_admit.has_more;
  end loop;
  perform queue._advance_own();
end $$;
