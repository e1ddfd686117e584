-- Checking invariants: queue.check() checks whether the tables agree with each other.
-- Tests: admit/restore.sql, operate/change.sql.

-- Returns every violated invariant. It reads one snapshot; a sound database gives no row.
create or replace function queue.check()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set enable_nestloop = off set jit = off as $$
begin
  {{installed}}
  return query select c.problem, c.id, c.detail from queue._check_places() c;
  return query select c.problem, c.id, c.detail from queue._check_locks() c;
  return query select c.problem, c.id, c.detail from queue._check_semaphores() c;
  return query select c.problem, c.id, c.detail from queue._check_reserved() c;
  return query select c.problem, c.id, c.detail from queue._check_tags() c;
  return query select c.problem, c.id, c.detail from queue._check_need_rows() c;
  return query select c.problem, c.id, c.detail from queue._check_claim_rows() c;
  return query select c.problem, c.id, c.detail from queue._check_schedules() c;
  return query select c.problem, c.id, c.detail from queue._check_suspended() c;
  return query select c.problem, c.id, c.detail from queue._check_groups() c;
  return query
    select 'a queueing lock whose job has started'::text, k.job_id, k.key
    from queue.queueing_lock k join queue.job j on j.id = k.job_id
    where exists (select from queue.finished f where f.id = j.id)
      or j.queueing_lock is distinct from k.key
      or j.flags & {{until_start}} <> 0 and exists (select from queue.active_job aj
        where aj.id = j.id and aj.claim is not null);
  return query
    select 'a job without its queueing lock'::text, j.id, j.queueing_lock
    from queue.job_now j
    where j.queueing_lock is not null and j.claims = 0
      and not exists (select from queue.finished f where f.id = j.id)
      and (j.flags & {{until_finish}} <> 0
        or not exists (select from queue.active_job aj where aj.id = j.id and aj.claim is not null))
      and not exists (select from queue.pending_settlement h where h.job_id = j.id)
      and not exists (select from queue.queueing_lock k where k.key = j.queueing_lock and k.job_id = j.id);
  return query
    select 'not one row'::text, null::bigint, x.name
    from (select 'admission'::text as name, count(*) as n from queue.admission union all
          select 'cursor', count(*) from queue.cursor union all
          select 'minute_cursor', count(*) from queue.minute_cursor union all
          select 'horizon', count(*) from queue.horizon union all
          select 'installation', count(*) from queue.installation) x
    where x.n <> 1;
  return query
    select 'claimed without a worker'::text, aj.id, format('worker %s', aj.worker_id)
    from queue.active_job aj where aj.claim is not null and aj.worker_id is null;
  return query
    select 'restrictions that are not enforced'::text, null::bigint, c.relname::text
    from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relname = 'unrestricted'
      and exists (select from queue.access a where a.queues is not null);
end $$;
comment on function queue.check() is
  'Returns every violated invariant of the tables: problem, the job if it concerns one, detail. A sound'
    ' database has none.';

-- Whether every job is in exactly one place, and in the right one.
create or replace function queue._check_places()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'in two places'::text, x.id, string_agg(x.place, ', ' order by x.place)
    from (select aj.id, 'active_job'::text as place from queue.active_job aj union all
          select f.id, 'finished' from queue.finished f union all
          select w.id, 'waiting ' || w.reason from queue.waiting w) x
    group by x.id having count(*) > 1;
  return query
    select 'no such job'::text, x.id, x.place
    from (select aj.id, 'active_job'::text as place from queue.active_job aj union all
          select f.id, 'finished' from queue.finished f union all
          select w.id, 'waiting' from queue.waiting w union all
          select m.id, 'lock_member' from queue.lock_member m union all
          select k.job_id, 'queueing_lock' from queue.queueing_lock k union all
          select l.id, 'lease' from queue.lease l union all
          select s.id, 'job_override' from queue.job_override s union all
          select a.job_id, 'attempt' from queue.attempt a) x
    where not exists (select from queue.job j where j.id = x.id);
  return query
    select 'unknown state or kind'::text, f.id, f.state from queue.finished f
    where f.state not in ('succeeded', 'failed', 'cancelled')
    union all
    select 'unknown state or kind', h.job_id, h.kind from queue.pending_settlement h
    where h.kind not in ('ended', 'again', 'replace', 'recheck', 'readmit', 'refill', 'signal', 'event',
      'group');
  return query
    select 'admitted, but in no table'::text, j.id, format('flags %s', j.flags)
    from queue.job j
    cross join queue.cursor_now c
    where j.xid < c.next_xid and j.xid <> all (c.in_flight)
      and not exists (select from queue.active_job aj where aj.id = j.id)
      and not exists (select from queue.finished f where f.id = j.id)
      and not exists (select from queue.waiting w where w.id = j.id)
      and not exists (select from queue.lock_member m where m.id = j.id)
      and not exists (select from queue.pending_settlement h where h.job_id = j.id)
      and not exists (select from queue.backlog b where (j.xid, j.id) > (b.from_xid, b.from_id)
        and j.xid <= b.to_xid)
      and not exists (select from queue.backlog_part b
                      where (j.xid, j.id) > (b.from_xid, b.from_id) and (j.xid, j.id) <= (b.to_xid, b.to_id)
                        and j.priority <= b.priority);
  return query
    select 'a settlement that the cursor has passed'::text, o.job_id, o.kind
    from queue._orphaned_settlements() o;
  return query
    select 'due before the due mark'::text, w.id, format('at %s, mark %s', w.at, k.due_at)
    from queue.waiting w
    cross join queue.cursor_now k
    where w.at < k.due_at;
  return query
    select 'ready below the low mark'::text, aj.id, format('lane %s', aj.lane)
    from queue.active_job aj join queue.lane l on l.lane = aj.lane
    where aj.claim is null and ((aj.deadline, aj.id) < (l.low_deadline, l.low_id) or l.is_idle);
  return query
    select 'in a missing lane'::text, aj.id, format('lane %s', aj.lane)
    from queue.active_job aj
    where not (aj.lane is null and aj.claim > 0 or exists (select from queue.lane l where l.lane = aj.lane))
    union all
    select 'waits for a slot in a missing lane', w.id, format('lane %s', w.lane) from queue.waiting w
    where w.lane is not null and not exists (select from queue.lane l where l.lane = w.lane)
    union all
    select 'waits for a slot without its task', w.id, w.task from queue.waiting w
    join queue.job j on j.id = w.id where w.lane is not null and j.task is distinct from w.task;
  return query
    select 'in the wrong lane for its queue and priority'::text, aj.id, format('lane %s', aj.lane)
    from queue.active_job aj join queue.lane l on l.lane = aj.lane
    join queue.job_now j on j.id = aj.id
    where aj.claim is null
      and ((l.queue, l.priority) <> (j.queue, j.priority) or aj.deadline <> coalesce(j.deadline, 'infinity')
        and aj.deadline >= '{{end_of_tags}}');
  return query
    select 'a job with a lock that it has not joined'::text, j.id, j.lock
    from (select aj.id from queue.active_job aj union all select w.id from queue.waiting w
      where w.reason <> 'parked') x
    join queue.job_now j on j.id = x.id
    where j.lock is not null and not exists (select from queue.lock_member m
      where m.id = j.id and m.lock = j.lock);
end $$;

-- Invariants of needs, for queue.check().
create or replace function queue._check_need_rows()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'waits for needs although they do not hold it'::text, w.id,
      format('%s: %s', w.reason, coalesce(n.reason, 'met'))
    from (select array_agg(w.id) as ids from queue.waiting w where w.reason in ('needs', 'upstream_failed')) a
    cross join lateral queue._needs_states(a.ids) n
    join queue.waiting w on w.id = n.id
    where n.reason is distinct from w.reason and not queue._has_pending_settlement(w.id);
  return query
    select 'names a need that does not hold it'::text, w.id, format('%s: %s', w.reason, w.need_id)
    from queue.waiting w
    left join queue.need d on d.job_id = w.id and d.need_id = w.need_id
    left join queue.finished f on f.id = d.need_id
    left join queue.waiting n on n.id = d.need_id
    where w.reason in ('needs', 'upstream_failed') and w.need_id is not null
      and (d.need_id is null
           or (w.reason = 'needs') <> (coalesce(f.state, d.deleted_state) is null
             and (d.mode & {{ended}} <> 0 or coalesce(n.reason not in ('held', 'upstream_failed'), true)))
           or coalesce(f.state, d.deleted_state) = 'succeeded')
      and not queue._has_pending_settlement(w.id);
  return query
    select 'ready although its needs are not met'::text, n.id, n.reason
    from (select array_agg(aj.id) as ids from queue.active_job aj
      where aj.claim is null and aj.flags & {{needs}} <> 0) a
    cross join lateral queue._needs_states(a.ids) n
    where n.reason is not null and not queue._has_pending_settlement(n.id);
  return query
    select 'needed, but not marked as needed'::text, aj.id, format('needed by %s', min(d.job_id))
    from queue.active_job aj join queue.need d on d.need_id = aj.id
    where aj.flags & {{needed}} = 0 and not exists (select from queue.finished f where f.id = d.job_id)
      and not exists (select from queue.pending_settlement h where h.job_id = aj.id)
    group by aj.id;
  return query
    select 'a need that is not a job'::text, d.need_id, format('of %s', d.job_id)
    from queue.need d
    where not exists (select from queue.job j where j.id = d.job_id)
      or d.deleted_state is null and not exists (select from queue.job j where j.id = d.need_id);
end $$;

-- Whether a job's wait for its needs is about to change: the job or one of its needs is handed over.
create or replace function queue._has_pending_settlement(p_id bigint)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (
    select from queue.pending_settlement h
    where h.job_id = p_id or h.job_id in (select d.need_id from queue.need d where d.job_id = p_id));
end $$;

-- Invariants of steps and waits, for queue.check().
create or replace function queue._check_suspended()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'no such job'::text, x.id, x.place
    from (select s.job_id as id, 'step'::text as place from queue.step s union
          select w.job_id, 'suspended' from queue.suspended w union
          select i.job_id, 'stream_item' from queue.stream_item i) x
    where not exists (select from queue.job j where j.id = x.id);
  return query
    select 'suspended, and runs or is finished'::text, w.job_id, w.step
    from queue.suspended w
    where exists (select from queue.active_job aj where aj.id = w.job_id)
      or exists (select from queue.finished f where f.id = w.job_id);
  return query
    select 'waits for nothing'::text, w.id, w.reason
    from queue.waiting w
    where w.reason = 'signal' and not exists (select from queue.suspended s where s.job_id = w.id);
  return query
    select 'waits for something that has come'::text, w.id, coalesce(s.signal, s.event)
    from queue.waiting w join queue.suspended s on s.job_id = w.id
    where w.reason = 'signal'
      and (exists (select from queue.received_signal r where r.job_id = w.id and r.name = s.signal)
        and not exists (select from queue.pending_settlement h where h.job_id = w.id and h.kind = 'signal')
        or exists (select from queue.event e where e.name = s.event and e.is_standing
          and e.published_at > s.until is not true
          and queue._wait_began_by(w.id, e.expires_at)
          and not exists (select from queue.pending_settlement h
            where h.job_id = -e.no and h.kind = 'event')));
  return query
    select 'steps that fetch would not return'::text, j.id, null::text
    from (select distinct s.job_id as id from queue.step s) j
    join queue.active_job aj on aj.id = j.id and aj.claim is null
    left join queue.job_override o on o.id = j.id
    where o.has_steps is not true or aj.flags & {{overridden}} = 0;
end $$;
