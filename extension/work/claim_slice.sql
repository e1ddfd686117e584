-- Claims many jobs as they are admitted, if there is nothing else to do.
-- Tests: work/claim_slice.sql, work/claim.slices.spec.

-- Claims up to p_n jobs as they are admitted, if no lane of p_queues (NULL: any) has a ready job, nothing is
-- due or handed over, no task is paused, and the next jobs are plain and have one queue and priority. It
-- stops before the first job that is not. That saves each job an update and its entry in the index of lanes:
-- a third of the WAL of its run. If there are more new jobs than p_n, they go to the backlog, which finds the
-- most urgent ones. A backlog is read here only if it may wait. first_claim: as for _claim_newcomer. is_all:
-- there is no other job to claim.
-- Locks: the caller holds the admission lock.
-- Why the jobs can be claimed as they are inserted, and why no wake-up is lost: as for _claim_newcomer. The
-- place in the backlog up to which it has been read commits with the claims.
-- In one piece: each part of the backlog continues with what the last one left.
create or replace function queue._claim_slice(
  p_worker bigint, p_queues text[], p_n integer, out ids bigint[], out first_claim bigint, out is_all boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_queues text[];
  v_look record;
  v_part record;
  v_read record;
  v_lane integer;
  v_flags integer := 0;
begin
  is_all := false;
  if p_queues is not null then
    v_queues := queue._match_queues(p_queues);
  end if;
  select k.tick, k.next_xid, k.has_backlog, k.high_id, k.due_at, pg_current_snapshot() as upto,
    pg_current_xact_id_if_assigned() as own,
    coalesce(pg_sequence_last_value('queue.needed_seq'), 0) as high_need_id,
    exists (select from queue.job j where j.xid >= k.next_xid) as has_jobs
  into v_look
  from queue.cursor k
  where {{is_quiet}}
    and exists (select from queue.pending_settlement h where h.xid >= k.next_xid) is false
    and exists (select from queue.pending_settlement h where h.xid = any (k.in_flight)) is false
    and exists (select from queue.lane l where l.retag_from is not null) is false
    and exists (
      select from unnest(k.in_flight) x (xid)
      where pg_visible_in_snapshot(x.xid, pg_current_snapshot())
        and x.xid is distinct from pg_current_xact_id_if_assigned()
        and exists (select from queue.job j where j.xid = x.xid)) is false
  order by k.tick desc limit 1;
  if v_look.tick is null or v_look.has_jobs = v_look.has_backlog then
    return;
  end if;
  while p_n > 0 loop
    if v_look.has_backlog then
      perform queue._scan_backlog(1000) where exists (select from queue.backlog);
      exit when not queue._may_backlog_wait();
      select p.no, p.from_xid, p.from_id, p.to_xid, p.to_id, p.upto, p.own into v_part
      from queue.backlog_part p order by p.priority desc, p.no limit 1;
      exit when not found;
    else
      select null::bigint as no, v_look.next_xid as from_xid, -9223372036854775808 as from_id,
        pg_snapshot_xmax(v_look.upto) as to_xid, 9223372036854775807 as to_id, v_look.upto, v_look.own
      into v_part;
    end if;
    first_claim := coalesce(first_claim, nextval('queue.claim_seq'));
    with fresh as materialized (
      select j.id, j.xid, j.flags, j.queue, j.priority,
        {{is_plain}} and j.id > v_look.high_need_id as is_plain
      from queue.job j
      where (j.xid, j.id) > (v_part.from_xid, v_part.from_id)
        and (j.xid, j.id) <= (v_part.to_xid, v_part.to_id)
        and pg_visible_in_snapshot(j.xid, v_part.upto) and j.xid is distinct from v_part.own
      order by j.xid, j.id limit p_n::bigint + case when v_part.no is null then 1 else 0 end),
    lane as materialized (
      select l.lane, l.queue, l.priority, l.extra_flags
      from (select f.queue, f.priority from fresh f limit 1) f
      cross join lateral (
        select l.lane, l.queue, l.priority, l.extra_flags from queue.lane l
        where l.queue = f.queue and l.priority = f.priority and l.kind = {{lane_plain}}
          and l.tag_base is null and (l.paused_until is null or l.paused_until <= v_now)
          and (v_queues is null or l.queue = any (v_queues)) and (v_lane is null or l.lane = v_lane)
        limit 1) l),
    slice as materialized (
      select count(*) as n, array_agg(f.id) as ids, bit_or(f.flags) as flags, min(l.lane) as lane,
        (array_agg(f.xid))[count(*)] as xid, max(f.id) as high_id,
        bool_and(f.is_plain and f.queue = l.queue and f.priority = l.priority) and count(*) <= p_n as is_plain
      from fresh f left join lane l on true),
    claimed as (
      insert into queue.active_job (id, deadline, attempt, flags, claim, claimed_at, worker_id)
      select f.id, 'infinity', 1, f.flags | (select l.extra_flags from lane l), first_claim,
        (select clock_timestamp()), p_worker
      from fresh f where (select s.is_plain from slice s))
    select s.* into v_read from slice s;
    if v_part.no is null and v_read.n > p_n then
      exit when not queue._may_backlog_wait();
      insert into queue.backlog (no, from_xid, from_id, to_xid, upto, own, is_first)
      values (nextval('queue.tick_seq'), v_part.from_xid, v_part.from_id, v_part.to_xid, v_part.upto,
        v_part.own, true);
      perform queue._move_cursor(v_look.tick, v_look.upto, v_look.own, v_look.high_id, true, v_look.due_at);
      v_look.has_backlog := true;
      continue;
    end if;
    exit when v_read.is_plain is not true;
    ids := ids || v_read.ids;
    v_lane := v_read.lane;
    v_flags := v_flags | v_read.flags;
    p_n := p_n - v_read.n;
    if v_part.no is null then
      perform queue._move_cursor(v_look.tick, v_look.upto, v_look.own,
        greatest(v_look.high_id, v_read.high_id), false, v_look.due_at);
      is_all := true;
      exit;
    elsif (v_read.xid, v_read.ids[v_read.n]) = (v_part.to_xid, v_part.to_id) then
      delete from queue.backlog_part p where p.no = v_part.no;
    else
      update queue.backlog_part p set from_xid = v_read.xid, from_id = v_read.ids[v_read.n]
      where p.no = v_part.no;
    end if;
  end loop;
  if ids is null then
    first_claim := null;
    return;
  end if;
  if v_flags < 0 then
    first_claim := null;
  end if;
  if v_flags & {{lease}} <> 0 then
    perform queue._lease_timeouts(ids, aj.claim, aj.claimed_at) from queue.active_job aj where aj.id = ids[1];
  end if;
  ids := array(select u.id from unnest(ids) u (id) order by u.id);
end $$;
