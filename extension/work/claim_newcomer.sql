-- Claims a job that is new, or has got its signal, as it is admitted, if there is nothing else to do.
-- Tests: work/claim_newcomer.sql, work/claim.newcomers.spec, work/signals.wait.spec.

-- Claims jobs: their ids in claim order, NULL for none. first_claim: the number of their claim, if that order
-- is the order of ids, none is large and all of them start for the first time, so that queue.first_run
-- describes them. p_may_wait: the transaction holds no row that the holder of the admission lock could need.
-- p_at_once: how many of p_max_jobs the worker starts at once, as _start_at_once; NULL: all.
-- Fast path for a mostly idle worker: at most one new job and no other work pending. No lane has a ready job,
-- nothing is due, handed over or left from before, no task is paused, and the newcomer is plain, without a
-- timeout or a deadline. It is claimed as it is admitted, in three short statements: most of the cost of a
-- single job is set-up of statements, in every transaction (ADR 1). A job whose signal is all that is pending
-- is claimed as shortly (_resume_signalled). All else is left to _claim_one_lane.
-- Locks: the admission lock by try, if this session's last fetch took only newcomers (the hint was_dry); then
-- as _claim_one_lane.
-- Why the newcomer can be claimed as it is inserted: under the admission lock no other job becomes ready, so
-- the first statement's findings hold for the others. Claim and cursor commit together: if they are rolled
-- back, the next admission finds the job again. A row that another session is claiming counts as ready,
-- because the claim may be rolled back. The clock of the claim is read after the snapshot.
-- Why no wake-up is lost: rows that are not new, or not visible yet, stay ahead of the cursor or among its
-- in_flight. A signal that was taken leaves no settlement, and the cursor where it was. If the job gets
-- another signal meanwhile, that settlement may go, too: the signal is kept, and the job's next wait finds
-- it.
-- With a function of its own for the look, a job takes 3.7 % more instructions; for the claim, 1.0 % more.
-- In one piece, because set-up of statements and calls is most of the cost of a single job (ADR 1).
create or replace function queue._claim_newcomer(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_options jsonb, p_may_wait boolean,
  p_at_once integer, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz;
  v_has_lock boolean := false;
  v_queues text[];
  v_tick bigint;
  v_in_flight xid8[];
  v_upto pg_snapshot;
  v_own xid8;
  v_from xid8;
  v_pending bigint;  -- the job of a pending settlement, if that is a new signal; 0: another settlement
  v_claimed record;
begin
  if current_setting('pgdefer.was_dry', true) = 'on' and p_max_jobs > 0 and p_options is null
    and queue._lock_admission(false) then
    v_has_lock := true;
    v_now := clock_timestamp();
    if p_queues is not null then
      v_queues := queue._match_queues(p_queues);
    end if;
    select k.tick, k.in_flight, pg_current_snapshot(), pg_current_xact_id_if_assigned(),
      array(
        select j.id from queue.job j
        where (j.xid, j.id) > (k.next_xid, -9223372036854775808)
          and j.xid <= pg_snapshot_xmax(pg_current_snapshot())
          and pg_visible_in_snapshot(j.xid, pg_current_snapshot())
          and j.xid is distinct from pg_current_xact_id_if_assigned()
        limit 2),
      coalesce(
        case when k.in_flight <> '{}'
          then (select 0 from queue.pending_settlement h where h.xid = any (k.in_flight) limit 1) end,
        (select case h.kind when 'signal' then h.job_id else 0 end
         from queue.pending_settlement h where h.xid >= k.next_xid limit 1))
    into v_tick, v_in_flight, v_upto, v_own, ids, v_pending
    from queue.cursor k
    where not k.has_backlog and {{is_quiet}}
    order by k.tick desc limit 1;
    if v_in_flight <> '{}' then
      if exists (select from unnest(v_in_flight) x (xid)
                 where pg_visible_in_snapshot(x.xid, v_upto) and x.xid is distinct from v_own
                   and exists (select from queue.job j where j.xid = x.xid)) then
        ids := null;  -- jobs deferred in a transaction that was in flight are new too
      end if;
    end if;
    if cardinality(ids) = 1 and v_pending is null then
      insert into queue.active_job (id, deadline, attempt, flags, claim, claimed_at, worker_id)
      select j.id, 'infinity', 1, j.flags | l.extra_flags, nextval('queue.claim_seq'),
        clock_timestamp(), p_worker
      from queue.job j
      cross join lateral (
        select l.extra_flags from queue.lane l
        where l.queue = j.queue and l.priority = j.priority and l.kind = {{lane_plain}}
          and l.paused_until is null and l.tag_base is null
          and (v_queues is null or l.queue = any (v_queues)) limit 1) l
      where j.id = ids[1] and {{is_plain}} and j.flags & ({{lease}} | {{large}}) = 0
        and j.id > coalesce(pg_sequence_last_value('queue.needed_seq'), 0)
      returning claim into first_claim;
      if first_claim is not null then
        update queue.cursor k
        set tick = v_tick + 1, next_xid = pg_snapshot_xmax(v_upto), high_id = greatest(k.high_id, ids[1]),
          in_flight = case when pg_snapshot_xmin(v_upto) < pg_snapshot_xmax(v_upto)
            then queue._in_flight(v_upto, v_own) else '{}' end
        where k.tick = v_tick;
        return;
      end if;
    elsif v_pending is not null then
      v_from := (select k.next_xid from queue.cursor k where k.tick = v_tick);
      -- Now and then _admit runs instead, to move the cursor past the settlements that were taken here.
      if ids = '{}' and v_pending > 0 and random() > 0.01
        and queue._resume_signalled(array[v_pending], p_worker, v_queues, v_from) is null then
        delete from queue.pending_settlement h
        where h.xid >= v_from and h.job_id = v_pending and h.kind = 'signal';
        ids := array[v_pending];
        return;
      end if;
    elsif ids = '{}' and clock_timestamp() - v_now < interval '2 ms' then
      -- A slow read has met many rows that are not visible yet. _admit moves the cursor past them.
      ids := null;
      return;
    end if;
  end if;
  v_claimed := queue._claim_one_lane(p_worker, p_queues,
    case when p_max_jobs > {{always_fit}} then queue._fitting(p_max_jobs) else p_max_jobs end, p_options,
    p_may_wait, v_has_lock, p_at_once);
  ids := v_claimed.ids;
  first_claim := v_claimed.first_claim;
end $$;
