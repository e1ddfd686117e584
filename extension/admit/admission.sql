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
-- Calls of operators also take rows of queue.finished and queue.queueing_lock before the admission lock
-- (operate/lock_jobs.sql); heartbeat, deregister_worker and worker_died take the worker's row before all.
-- A function whose caller holds the admission lock says which rows its own statements lock, if any; what it
-- calls says the same of itself.
-- The holder of the admission lock never waits for a row of queue.active_job (it uses SKIP LOCKED), so a
-- process that holds claimed rows may safely wait for the admission lock. The tables of tables/admit and of
-- tables/recur are written only under the admission lock, by one process at a time, so there are no races
-- there. The exceptions: queue.active_job; queue.pending_settlement, to which all append; queue.expiry, from
-- which the end of a claim deletes its job; and queue.queue_config, to which configure_queue adds a queue
-- first.
--
-- Why no wake-up is lost: a process that ends a claim takes the admission lock by try and settles in the same
-- transaction, or appends to queue.pending_settlement. That table is read with the same cursor as the log, so
-- the argument for new jobs (work/worker_sleep.sql) holds for it.

-- Admits in this order: pending settlements, a slice of each new range, a slice of the most urgent part of
-- the backlog, jobs that are due.
-- p_is_lazy: the backlog waits while there is enough to do in p_queues (_has_stock). p_singly: one by one
-- (admit/singly.sql). has_more: another call will find more.
-- Locks: the caller holds the admission lock.
create or replace function queue._admit(
  p_slice integer, p_is_lazy boolean default false, p_queues text[] default null,
  p_singly boolean default false, out admitted integer, out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_start timestamptz := clock_timestamp();
  v_new record := queue._look_for_rows();
  v_taken record;
  v_ended record;
  v_range record;
  v_due timestamptz;
  v_xid xid8;
  v_high_id bigint := v_new.high_id;
  v_has_backlog boolean := v_new.has_backlog;
  v_is_read boolean := false;  -- the whole backlog has been read, so no job need stay parked
  v_retags boolean;
  v_gated bigint[];
  v_parked bigint[];
  v_move boolean;
begin
  admitted := 0;
  has_more := pg_snapshot_xmax(v_new.upto) < v_new.next_xid;
  if has_more then
    perform queue._restart_cursor();
    return;
  end if;
  -- A slow read met many rows that are not visible yet: let the cursor pass them.
  v_move := v_new.has_pending or v_new.ranges <> '{}' or clock_timestamp() - v_start > interval '2 ms';
  if v_new.has_pending then
    v_taken := queue._take_settlements(v_new.next_xid, v_new.ended_xids, v_new.upto, v_new.own);
    v_ended := queue._settle_all_slots(v_taken.ids, v_taken.kinds, v_taken.flags, v_taken.payloads, p_singly);
    -- A yield may need a job that is admitted below.
    v_new.high_need_id := coalesce(pg_sequence_last_value('queue.needed_seq'), 0);
    admitted := 1;
  end if;
  foreach v_xid in array v_new.ranges loop
    v_range := queue._admit_range(
      v_xid, -9223372036854775808, case when v_xid < v_new.next_xid then v_xid
        else pg_snapshot_xmax(v_new.upto) end, 9223372036854775807,
      v_new.upto, v_new.own, p_slice, v_high_id, v_new.high_need_id, v_new.has_task_pause or p_singly,
      v_has_backlog);
    v_high_id := v_range.high_id;
    v_has_backlog := v_has_backlog or v_range.is_cut;
    admitted := admitted + v_range.n;
    v_gated := v_gated || v_range.gated;
    v_parked := v_parked || v_range.parked;
  end loop;
  if v_has_backlog and not (p_is_lazy and not v_new.has_pending and queue._has_stock(p_queues)) then
    select b.high_id, admitted + b.n, v_gated || b.gated, v_parked || b.parked, b.is_read, b.retags
    into v_high_id, admitted, v_gated, v_parked, v_is_read, v_retags
    from queue._admit_backlog(p_slice, v_high_id, v_new.high_need_id, v_new.has_task_pause or p_singly) b;
    v_move := true;
  end if;
  -- All at once, so that jobs of one lock come in the order of ids; and before turns are passed on.
  if v_gated is not null then
    v_parked := v_parked || queue._admit_all_gated(v_gated, p_singly);
  end if;
  if v_parked is not null then
    v_has_backlog := true;
    perform queue._park(v_parked);
  end if;
  if v_new.has_pending then
    perform queue._settle_all(v_ended.ids, v_ended.kinds, v_ended.flags, p_singly);
  end if;
  if v_is_read then
    v_has_backlog := queue._admit_parked(p_slice, p_singly) or exists (select from queue.backlog)
      or exists (select from queue.backlog_part) or v_retags;
  end if;
  v_due := v_new.due_at;
  if v_new.due_at > v_start or v_new.next_due <= v_start or v_new.next_run <= v_start then
    select d.mark, admitted + d.n, d.has_more into v_due, admitted, has_more
    from queue._admit_all_due(v_start, v_new.due_at, v_new.next_due, v_new.next_run, p_slice, p_singly) d;
    v_move := true;
  end if;
  if not v_has_backlog and (v_gated is not null or v_new.has_pending or v_due <> v_new.due_at) then
    v_has_backlog := exists (select from queue.lane l where l.retag_from is not null);
  end if;
  perform queue._move_cursor(v_new.tick, v_new.upto, v_new.own, v_high_id, v_has_backlog, v_due) where v_move;
  has_more := has_more or v_has_backlog;
end $$;

-- As _admit, but a job that fails at the gates stops no other job, nor does a claim whose end can't be
-- settled. An error elsewhere is raised again. fetch does not use this: it would cost a savepoint each time,
-- and heartbeats, which do, come soon (work/maintenance.sql).
-- Locks: the caller holds the admission lock.
create or replace function queue._admit_or_singly(p_slice integer, out admitted integer, out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
begin
  select a.admitted, a.has_more into admitted, has_more from queue._admit(p_slice) a;
exception when {{fault}} then
  raise warning 'pgdefer: admission failed, and starts again job by job: % (%)', sqlerrm, sqlstate;
  -- If jobs must be tried again, there is more, but not at once.
  select a.admitted, a.has_more and a.admitted > 0 into admitted, has_more
  from queue._admit(p_slice, p_singly => true) a;
end $$;

-- The cursor, and what it has not passed yet. ranges: the xids where ranges of new jobs begin. ended_xids:
-- the transactions in flight then that have committed since. Besides: whether there are settlements, and when
-- the next waiting job and the next schedule are due. All of it by one snapshot, upto.
create or replace function queue._look_for_rows(
  out tick bigint, out next_xid xid8, out high_id bigint, out has_backlog boolean, out due_at timestamptz,
  out upto pg_snapshot, out own xid8, out has_pending boolean, out high_need_id bigint,
  out has_task_pause boolean, out next_due timestamptz, out next_run timestamptz, out ended_xids xid8[],
  out ranges xid8[])
language plpgsql stable parallel unsafe security invoker as $$
declare
  v_in_flight xid8[];
  v_has_jobs boolean;
begin
  select k.tick, k.next_xid, k.high_id, k.has_backlog, k.due_at, k.in_flight,
    pg_current_snapshot(), pg_current_xact_id_if_assigned(),
    exists (select from queue.job j where j.xid >= k.next_xid),
    exists (select from queue.pending_settlement h where h.xid >= k.next_xid),
    coalesce(pg_sequence_last_value('queue.needed_seq'), 0),
    exists (select from queue.pause p where p.task is not null),
    (select w.at from queue.waiting w where w.at >= k.due_at order by w.at limit 1),
    (select s.due_at from queue.schedule s where s.due_at >= k.due_at order by s.due_at limit 1)
  into tick, next_xid, high_id, has_backlog, due_at, v_in_flight, upto, own, v_has_jobs, has_pending,
    high_need_id, has_task_pause, next_due, next_run
  from queue.cursor_now k;
  ended_xids := '{}'::xid8[];
  ranges := '{}'::xid8[];
  if v_in_flight <> '{}' then
    ended_xids := array(select x from unnest(v_in_flight) x
      where pg_visible_in_snapshot(x, upto) and x is distinct from own order by x);
    ranges := array(select x from unnest(ended_xids) x
      where exists (select from queue.job j where j.xid = x) order by x);
    has_pending := has_pending or exists (select from queue.pending_settlement h
      where h.xid = any (ended_xids));
  end if;
  if v_has_jobs then
    ranges := ranges || next_xid;
  end if;
end $$;

-- Whether an admission at p_now would find anything to do.
create or replace function queue._has_work(p_now timestamptz)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_new record := queue._look_for_rows();
begin
  return v_new.ranges <> '{}' or v_new.has_backlog or v_new.has_pending or v_new.due_at > p_now
    or least(v_new.next_due, v_new.next_run) <= p_now is true
    or pg_snapshot_xmax(v_new.upto) < v_new.next_xid;
end $$;

-- Whether the backlog may wait, and one of the queues (NULL: any) has a ready job that comes before it: by
-- priority, then by id. New jobs are admitted before the backlog, and must not hold it up for ever.
create or replace function queue._has_stock(p_queues text[])
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_queues text[] := case when p_queues is not null then queue._match_queues(p_queues) end;
begin
  return queue._may_backlog_wait()
    and exists (
      select from queue.lane l
      cross join lateral (
        select aj.id from queue.active_job aj
        where {{is_ready}}
        order by aj.deadline, aj.id limit 1) r
      where not l.is_idle and (v_queues is null or l.queue = any (v_queues))
        and (l.paused_until is null or l.paused_until <= clock_timestamp())
        and ((-l.priority::bigint, r.id) < (
          select -p.priority::bigint, p.from_id from queue.backlog_part p
          order by p.priority desc, p.no limit 1)) is not false);
end $$;

-- Admits a slice of the most urgent parts of the backlog, with parked jobs that may come in. gated, parked:
-- as _admit_range. is_read: all of the backlog has been read. retags: some lanes have jobs that need new
-- tags.
-- Locks: the caller holds the admission lock.
create or replace function queue._admit_backlog(
  p_slice integer, p_high_id bigint, p_high_need_id bigint, p_has_task_pause boolean,
  out n integer, out high_id bigint, out gated bigint[], out parked bigint[], out is_read boolean,
  out retags boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_part record;
  v_range record;
begin
  retags := queue._retag(p_slice);
  gated := queue._unpark();
  perform queue._scan_backlog(p_slice);
  n := 0;
  high_id := p_high_id;
  is_read := true;
  while n < p_slice loop
    v_part := queue._next_backlog_part();
    exit when v_part.upto is null;
    v_range := queue._admit_range(
      v_part.from_xid, v_part.from_id, v_part.to_xid, v_part.to_id, v_part.upto, v_part.own,
      null, high_id, p_high_need_id, p_has_task_pause, v_part.must_park, v_part.top, v_part.bottom);
    high_id := v_range.high_id;
    n := n + v_range.n;
    gated := gated || v_range.gated;
    parked := parked || v_range.parked;
    is_read := false;
  end loop;
end $$;

-- Moves jobs whose time has come. Returns the new due mark: no waiting job lies before it.
-- Why no wake-up is lost: the keys go to _advance; with p_singly they are handed over, and the next admission
-- advances each.
create or replace function queue._admit_due(p_due_at timestamptz, p_slice integer, p_singly boolean)
returns timestamptz language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_ids bigint[];
  v_keys text[];
  v_at timestamptz;
  v_n integer;
begin
  with due as materialized (
    select d.ctid as tid, d.at, d.key, d.reason = 'slot' and d.lane is not null as is_mark
    from queue.waiting d
    where d.at >= p_due_at and d.at <= v_now order by d.at, d.id limit p_slice),
  gone as (
    delete from queue.waiting w
    where w.ctid = any (array(select d.tid from due d where not d.is_mark))
    returning w.id),
  opened as (
    -- The rates of their keys allow more starts (_set_next_starts).
    update queue.waiting w set at = null
    where w.ctid = any (array(select d.tid from due d where d.is_mark))
    returning w.key)
  select (select array_agg(g.id order by g.id) from gone g), (select array_agg(o.key) from opened o),
    (select max(d.at) from due d), (select count(*) from due d)
  into v_ids, v_keys, v_at, v_n;
  if p_singly then
    perform queue._advance_singly(v_ids);
    -- The next admission settles each key alone, if it must.
    insert into queue.pending_settlement (job_id, kind, flags, payload)
    select distinct 0, 'refill', 0, to_jsonb(array[k]) from unnest(v_keys) k;
  else
    perform queue._advance(p_arrived => v_ids, p_keys => v_keys);
  end if;
  return case when v_n >= p_slice then v_at else v_now end;
end $$;

-- Admits jobs with ordered locks that were parked while there was a backlog, in the order of ids. Returns
-- whether there were any, or other jobs are parked.
create or replace function queue._admit_parked(p_slice integer, p_singly boolean)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
  v_left bigint[];
begin
  with parked as (
    delete from queue.waiting w
    where w.ctid = any (array(select p.ctid from queue.waiting p
      where p.reason = 'parked' and p.weight is null order by p.id limit p_slice))
    returning w.id)
  select array_agg(p.id) into v_ids from parked p;
  if v_ids is not null then
    v_left := queue._admit_all_gated(v_ids, p_singly);
    perform queue._park(v_left);
  end if;
  return v_ids is not null or exists (select from queue.waiting w where w.reason = 'parked');
end $$;

-- Admits jobs and runs schedules that are due by p_now. p_due_at: none is due before it; mark: the same from
-- now on; p_next_due, p_next_run: when the first job, and the first schedule, is due.
-- Locks: the caller holds the admission lock.
create or replace function queue._admit_all_due(
  p_now timestamptz, p_due_at timestamptz, p_next_due timestamptz, p_next_run timestamptz, p_slice integer,
  p_singly boolean, out mark timestamptz, out n integer, out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
begin
  n := 0;
  has_more := false;
  mark := p_now;
  if p_due_at > p_now then
    -- The clock was set back.
    has_more := true;
    mark := '-infinity';
    return;
  end if;
  if p_next_due <= p_now then
    mark := least(mark, queue._admit_due(p_due_at, p_slice, p_singly));
    n := 1;
    has_more := mark < p_now;
  end if;
  if p_next_run <= p_now then
    select least(_admit_all_due.mark, r.mark), n + r.runs, _admit_all_due.has_more or r.has_more
    into mark, n, has_more
    from queue._run_due_schedules(p_due_at, p_slice) r;
  end if;
end $$;
