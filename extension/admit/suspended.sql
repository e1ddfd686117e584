-- The gate of signals: a suspended job waits here until its signal or event comes, or its wait times out.
--
-- signal and publish only append: the signal or event, and a row of queue.pending_settlement, which admission
-- reads by the same snapshots as the log. Everything else is decided here, under the admission lock: which
-- wait takes a signal, which of several events with the same name counts, and whether a wait has timed out
-- first. A signal or event that was sent after the timeout does not end the wait, nor does an event that
-- expired before the wait began, whenever that is decided. So a signal is delivered once and a wait ends
-- once, whatever happens at the same time.
-- Why no wake-up is lost: a job that reaches this gate sees every signal whose settlement has been read,
-- because that signal was committed. A later admission reads the settlement of a signal that commits later,
-- and finds the job waiting here. A job that is elsewhere then (it is held, or needs another job) looks for
-- its signals when it comes back. An event ends its wait at once, because the event may not be kept for so
-- long.
-- Two sessions: work/signals.wait.spec, work/signals.timeout.spec, work/waits.prune.spec.
-- Tests: admit/suspended.sql, work/waits.sql, work/waits.late.sql.

-- Whether the wait of a suspended job began before an event expired, at p_at: when its last attempt ended. A
-- job that came from another shard has no attempts; its wait counts as begun.
create or replace function queue._wait_began_by(p_id bigint, p_at timestamptz)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return coalesce((select a.finished_at from queue.attempt a where a.job_id = p_id
    order by a.claim desc limit 1) <= p_at, true);
end $$;

-- Sends jobs through the gate. passed: the jobs that wait for nothing, have taken their signal or event, or
-- have timed out. The others wait; is_timed: at least one of them has a timeout.
-- Locks: the caller holds the admission lock; the jobs are in no gate, so no other session changes their
-- rows.
create or replace function queue._wait_for_signals(p_ids bigint[], out passed bigint[], out is_timed boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_job record;
  v_payload jsonb;
  v_is_over boolean;
begin
  is_timed := false;
  for v_job in
    select u.id, s.is_suspended, w.job_id, w.signal, w.event, w.until
    from unnest(p_ids) u (id)
    left join lateral (select s.is_suspended from queue.job_override s where s.id = u.id offset 0) s on true
    left join lateral (
      select w.job_id, w.signal, w.event, w.until from queue.suspended w
      where s.is_suspended and w.job_id = u.id offset 0) w on true
    order by u.id
  loop
    v_payload := null;
    v_is_over := v_job.job_id is null;
    if v_job.signal is not null then
      delete from queue.received_signal r
      where r.ctid = (select o.ctid from queue.received_signal o
                      where o.job_id = v_job.id and o.name = v_job.signal
                        and o.received_at > v_job.until is not true
                      order by o.no limit 1)
      returning r.payload into v_payload;
      v_is_over := found;
    elsif v_job.event is not null then
      -- An event that this admission takes only later counts, too, because the timeout may be over by then.
      -- An event that has a successor comes first, because this wait began before it expired.
      select e.payload into v_payload from queue.event e
      where e.name = v_job.event and e.published_at > v_job.until is not true
        and queue._wait_began_by(v_job.id, e.expires_at)
      order by not e.is_standing and e.expires_at > v_now, e.no limit 1;
      v_is_over := found;
    end if;
    if not v_is_over and v_job.until <= v_now is not true then
      insert into queue.waiting (id, reason, at) values (v_job.id, 'signal', v_job.until);
      is_timed := is_timed or v_job.until is not null;
      continue;
    elsif v_job.is_suspended then
      perform queue._end_waits(array[v_job.id], v_payload);
    end if;
    passed := passed || v_job.id;
  end loop;
end $$;

-- Makes signalled jobs ready whose signal ends their wait at this gate, and for which no later gate can be
-- closed: jobs of a plain lane, which a queue with limits does not have. It returns the others, for
-- _take_signals. With a worker it claims them at once, as _claim_newcomer does with new jobs: only from lanes
-- that the worker serves (p_queues; NULL: all) and that are not paused, and no job with a timeout. It claims
-- none if several settlements are pending from p_from on.
-- Its statements are few and short: their set-up is most of the time from a signal to its job's start.
-- is_suspended stays set in queue.job_override, until the end of an attempt or this gate sets it again.
-- Locks: the caller holds the admission lock, which protects all rows that change here.
-- Why no wake-up is lost: a signal that is not taken here is left to _take_signals.
create or replace function queue._resume_signalled(
  p_ids bigint[], p_worker bigint default null, p_queues text[] default null, p_from xid8 default null)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_id bigint;
  v_others bigint[];
  v_step text;
  v_no integer;
  v_signal tid;
  v_payload jsonb;
  v_attempt smallint;
  v_lane integer;
  v_deadline timestamptz;
  v_flags smallint;
  v_is_low boolean;
begin
  foreach v_id in array p_ids loop
    select w.step, w.no, r.ctid, r.payload, least(s.attempts, 32766), l.lane,
      coalesce(s.deadline, j.deadline, 'infinity'),
      (j.flags | s.extra_flags) & ({{lease}} | {{retain}} | {{needed}} | {{large}}) | {{overridden}}
        | l.extra_flags
        | case when (select d.job_id from queue.need d where d.need_id = v_id limit 1) is not null
          then {{needed}} else 0 end,
      l.is_idle or (coalesce(s.deadline, j.deadline, 'infinity'), v_id) < (l.low_deadline, l.low_id)
    into v_step, v_no, v_signal, v_payload, v_attempt, v_lane, v_deadline, v_flags, v_is_low
    from queue.suspended w
    cross join lateral (
      select r.ctid, r.payload from queue.received_signal r
      where r.job_id = v_id and r.name = w.signal and r.received_at > w.until is not true
      order by r.no limit 1) r
    join queue.job_override s on s.id = v_id
    join queue.job j on j.id = v_id
    join queue.lane l on l.queue = coalesce(s.queue, j.queue)
      and l.priority = coalesce(s.priority, j.priority) and l.kind = {{lane_plain}}
    where w.job_id = v_id and l.tag_base is null and (j.options ? 'share') is not true and s.crashes = 0
      and (j.flags | s.extra_flags) & ({{lock_or_keys}} | {{needs}} | {{expires}} | {{queueing_lock}}) = 0
      and coalesce(s.scheduled_at, j.scheduled_at) > clock_timestamp() is not true
      and (select p.no from queue.pause p where p.task is not null limit 1) is null
      and (p_worker is null or (j.flags | s.extra_flags) & {{lease}} = 0 and l.paused_until is null
        and not l.is_idle and (p_queues is null or l.queue = any (p_queues))
        and (select h.xid from queue.pending_settlement h where h.xid >= p_from limit 1 offset 1) is null);
    if v_step is not null then
      -- || '' keeps the planner from an index whose condition is on reason.
      delete from queue.waiting w where w.id = v_id and w.reason || '' = 'signal';
    end if;
    if v_step is null or not found then
      v_others := v_others || v_id;
      continue;
    end if;
    delete from queue.received_signal r where r.ctid = v_signal;
    delete from queue.suspended w where w.job_id = v_id;
    update queue.step s set finished_at = clock_timestamp(), value = v_payload
    where s.job_id = v_id and s.name = v_step and s.no = v_no;
    if p_worker is null then
      insert into queue.active_job (id, deadline, lane, attempt, flags)
      values (v_id, v_deadline, v_lane, v_attempt, v_flags);
      if v_is_low then
        perform queue._lower_marks(array[v_lane], array[v_deadline], array[v_id]);
      end if;
    else
      insert into queue.active_job (id, deadline, lane, attempt, flags, claim, claimed_at, worker_id)
      values (v_id, v_deadline, v_lane, v_attempt + 1, v_flags, nextval('queue.claim_seq'), clock_timestamp(),
        p_worker);
    end if;
  end loop;
  return v_others;
end $$;

-- Ends the waits for these events, and takes the jobs that got a signal out of the gate. Returns the jobs
-- that have left it, which are in no gate now; they check their waits when they come back. The first event of
-- a name counts until it expires. Then the next one takes its place, once all waits have ended that began
-- before. The first one stays for waits that are not committed yet, until _prune_events deletes it. If many
-- jobs wait for an event, this ends the waits of 500 of them; later admissions end those of the others.
-- Locks: the caller holds the admission lock, which protects all rows that change here. Why no wake-up is
-- lost: if there may be more jobs, the event is appended again for the next admission.
create or replace function queue._take_signals(p_ids bigint[], p_events bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
  v_event record;
  v_ended record;
  v_expired bigint;
begin
  if p_ids is not null then
    v_ids := queue._leave_signal_gate(p_ids);
    -- Signals to jobs that were deleted meanwhile.
    delete from queue.received_signal r
    where r.job_id = any (array(select u.id from unnest(p_ids) u (id)
      where not exists (select from queue.job j where j.id = u.id)));
  end if;
  for v_event in
    select e.no, e.name, e.is_standing from queue.event e where e.no = any (p_events) order by e.no
  loop
    if not v_event.is_standing then
      select e.no into v_expired from queue.event e
      where e.name = v_event.name and e.is_standing and e.expires_at <= clock_timestamp();
      if found then
        v_ended := queue._end_waits_for(v_expired);
        v_ids := v_ids || v_ended.ids;
        if v_ended.has_more then
          insert into queue.pending_settlement (job_id, kind, flags) values (-v_event.no, 'event', 0);
          continue;
        end if;
        update queue.event e set is_standing = false where e.no = v_expired;
        delete from queue.pending_settlement h
        where h.xid = any (array(select u.xid from queue.unsettled u where u.job_id = -v_expired))
          and h.job_id = -v_expired and h.kind = 'event';
      end if;
      if exists (select from queue.event e where e.name = v_event.name and e.is_standing) then
        delete from queue.event e where e.no = v_event.no;
        continue;
      end if;
      update queue.event e set is_standing = true where e.no = v_event.no;
    end if;
    v_ended := queue._end_waits_for(v_event.no);
    v_ids := v_ids || v_ended.ids;
    if v_ended.has_more then
      insert into queue.pending_settlement (job_id, kind, flags) values (-v_event.no, 'event', 0);
    end if;
  end loop;
  return v_ids;
end $$;

-- Ends up to 500 waits for an event. ids: the jobs that have left the gate; has_more: there may be others.
-- Locks and wake-ups: as _take_signals.
create or replace function queue._end_waits_for(p_no bigint, out ids bigint[], out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_event record;
  v_jobs bigint[];
begin
  select e.name, e.payload, e.published_at, e.expires_at into v_event from queue.event e where e.no = p_no;
  v_jobs := array(
    select w.job_id from queue.suspended w
    where w.event = v_event.name and v_event.published_at > w.until is not true
      and queue._wait_began_by(w.job_id, v_event.expires_at)
    limit 500);
  ids := queue._leave_signal_gate(v_jobs);
  perform queue._end_waits(v_jobs, v_event.payload);
  has_more := cardinality(v_jobs) = 500;
end $$;

-- Takes the jobs that are in this gate out of it, and returns them; a held job is in another gate.
-- Locks: the caller holds the admission lock.
create or replace function queue._leave_signal_gate(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
begin
  with gone as (
    delete from queue.waiting w
    where w.ctid = any (array(
      select w.ctid from unnest(p_ids) u (id)
      cross join lateral (
        -- || '' keeps the planner from an index whose condition is on reason.
        select w.ctid from queue.waiting w where w.id = u.id and w.reason || '' = 'signal' offset 0) w))
    returning w.id)
  select array_agg(g.id) into v_ids from gone g;
  return v_ids;
end $$;

-- Ends the waits of jobs: the step of each is finished, and the payload is its value.
-- Locks: the caller holds the admission lock; the jobs are in no gate. Why no wake-up is lost: the caller
-- sends the jobs on.
create or replace function queue._end_waits(p_ids bigint[], p_payload jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.step s set finished_at = clock_timestamp(), value = p_payload
  where s.ctid = any (array(
    select s.ctid from unnest(p_ids) u (id)
    cross join lateral (
      select w.job_id, w.step, w.no from queue.suspended w where w.job_id = u.id offset 0) w
    cross join lateral (
      select s.ctid from queue.step s
      where s.job_id = w.job_id and s.name = w.step and s.no = w.no offset 0) s));
  delete from queue.suspended w where w.job_id = any (p_ids);
  update queue.job_override s set is_suspended = false where s.id = any (p_ids);
end $$;

-- Deletes expired events, except those that a wait must still get. p_safe_at: the result of _safe_at, called
-- before an admission.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: at p_safe_at the transactions of all
-- waits that began before the event expired had ended. Such a wait has got the event, or it is on its way to
-- the gate (its job is held, or needs another one), and queue.suspended shows it.
create or replace function queue._prune_events(p_max integer, p_safe_at timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.event e
  where e.ctid = any (array(
    select e.ctid from queue.event e
    where e.expires_at <= least(p_safe_at, clock_timestamp())
      and not exists (
        select from queue.suspended w
        where w.event = e.name and queue._wait_began_by(w.job_id, e.expires_at))
    limit p_max));
end $$;
