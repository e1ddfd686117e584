-- Asking: why a job is not running, what would come next, and whether the invariants hold.

-- Raises: QJ001.
create or replace function queue.why(id bigint)
returns text language plpgsql stable parallel safe security definer
set search_path = pg_catalog, pg_temp set jit = off as $$
#variable_conflict use_column
declare
  v record;
  v_text text;
  v_key text;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator,reader}', array[why.id]);
  end if;
  select j.id, j.state, j.reason, j.queue, j.task, j.lock, j.scheduled_at, j.worker_id, j.claim, j.started_at, j.finished_at, j.error,
    w.reason as gate, w.key, w.at, l.paused_until, l.kind, v.id is not null as is_live
  into v
  from queue.jobs j
  left join queue.waiting w on w.id = j.id
  left join queue.live v on v.id = j.id
  left join queue.lane l on l.lane = v.lane
  where j.id = why.id;
  if not found then
    perform queue._job_not_found(why.id);
  end if;
  case v.state
    when 'succeeded' then return format('it succeeded at %s', v.finished_at);
    when 'failed' then return format('it failed at %s: %s%s', v.finished_at, coalesce(v.reason, ''), coalesce(' (' || v.error || ')', ''));
    when 'cancelled' then return format('it was cancelled at %s: %s', v.finished_at, v.reason);
    when 'running' then
      return format('it runs since %s on worker %s, claim %s', v.started_at, v.worker_id, v.claim)
        || coalesce((select format('; its timeout passed at %s; its handler could not be ended and still runs', o.timeout_at)
                     from queue._overdue() o where o.id = v.id), '')
        || coalesce((select case when l.is_own then format('; its lease ends at %s', l.expires_at) else format('; its timeout ends at %s', l.expires_at - interval '10 s') end
                     from queue.lease l where l.id = v.id and l.claim = v.claim), '')
        || case when v.reason is not null then format('; its worker has been told to abort it: %s', v.reason) else '' end;
    when 'held' then return 'it is held; queue.unhold lets it go on';
    when 'scheduled' then return format('its time has not come: %s', v.scheduled_at);
    when 'waiting', 'upstream_failed' then
      return case v.state when 'waiting' then 'it needs ' else 'a need failed; retry it: ' end
        || coalesce(queue._why_needs(why.id, v.state = 'upstream_failed'), 'jobs that are being looked at');
    else null;
  end case;
  if v.gate = 'task_paused' then
    return format('its task %s is paused%s', v.task, coalesce(' until ' || v.at, ''));
  elsif v.gate = 'parked' then
    return 'a large backlog is being admitted, in which older jobs of its lock may be';
  elsif v.gate = 'slot' then
    v_key := substr(v.key, 2);
    select string_agg(r.id::text, ', ' order by r.id) into v_text
    from (select j.id from queue.live l join queue.job j on j.id = l.id left join queue.job_state s on s.id = j.id
          where l.claim is not null
            and case left(v.key, 1) when 'm' then coalesce(s.lock, j.lock) = v_key else v_key = any (j.keys) end
          order by j.id limit 20) r;
    return case left(v.key, 1)
      when 'm' then format('its lock %s is held by job %s', v_key, coalesce(v_text, 'that is about to start'))
      else format('its concurrency key %s is full: job %s', v_key, coalesce(v_text, 'that is about to start')) end;
  elsif v.state = 'blocked' then
    select m.id into v_text
    from (select m.id, 0 as n from queue.lock_member m where m.lock = v.lock and m.has_turn
          union all (select m.id, 1 from queue.lock_member m where m.lock = v.lock and not m.is_late order by m.id limit 1)
          union all (select m.id, 2 from queue.lock_member m where m.lock = v.lock order by m.id limit 1)) m
    where m.id <> why.id order by m.n limit 1;
    return coalesce(
      (select format('its lock %s is held by job %s', v.lock, j.id)
         || case when not queue._covers(queue._limits('{operator,reader}'), j.queue) then ''
                 else format(' (%s)', j.state) || case when j.finished_at is not null then '; the next fetch or tick passes it on' else '' end end
       from queue.jobs j where j.id = v_text::bigint),
      format('its lock %s is free; the next fetch or tick passes it on', v.lock));
  elsif not v.is_live then
    v.paused_until := queue._paused_until(v.queue);
    v.at := queue._task_paused_until(v.task, v.queue);
  end if;
  if v.at > clock_timestamp() then
    return format('its task %s is paused%s', v.task, case when isfinite(v.at) then format(' until %s', v.at) else '' end);
  elsif v.paused_until > clock_timestamp() then
    return format('its queue %s is paused%s', v.queue, case when isfinite(v.paused_until) then format(' until %s', v.paused_until) else '' end);
  elsif not exists (
    select from queue.worker w where w.gone_at is null and w.last_seen_at + w.dead_after >= clock_timestamp()
      and (w.queues is null or exists (select from unnest(w.queues) q where queue._matches(v.queue, q)))) then
    return format('no live worker serves its queue %s', v.queue);
  elsif not v.is_live then
    return case when exists (select from queue.handover h where h.job_id = why.id and h.kind = 'again')
      then 'its last run has just ended; the next fetch or tick admits it again'
      else 'it has not been admitted yet; the next fetch or tick does that' end;
  elsif queue._is_queue_full(v.queue) then
    return queue._why_full(v.queue);
  elsif v.kind = 2 then
    return 'it crashed before, so it is claimed alone, by a worker that runs nothing else';
  end if;
  select string_agg(distinct format('%s %s', case left(k.key, 1) when 'm' then 'lock' else 'concurrency key' end, substr(k.key, 2)), ', ') into v_text
  from queue.live l
  cross join lateral queue._keys_of(array[l.id], array[l.flags]) k
  cross join lateral (select s.slots, s.used from queue.semaphore s where s.key = k.key order by s.tick desc limit 1) s
  where l.id = why.id and s.used >= s.slots;
  if v_text is not null then
    return format('no slot is free: %s', v_text);
  end if;
  return 'it is ready: the next worker with a free slot takes it in its order';
end $$;
comment on function queue.why(bigint) is
  'Says why a job is not running: which job holds its lock or which fill its key, what it needs, until when it is paused or scheduled, whether any live worker serves its queue.';

-- Claims whose timeout has passed, and which their worker has extended since, as it could not end the handler.
create or replace function queue._overdue()
returns table (id bigint, timeout_at timestamptz) language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select l.id, t.at
    from (select l.id, l.claim, l.expires_at from queue.lease l where l.is_own order by l.expires_at desc limit 10000) l
    cross join lateral (select v.claimed_at from queue.live v where v.id = l.id and v.claim = l.claim offset 0) v
    cross join lateral (
      select v.claimed_at + (j.options ->> 'timeout')::interval as at from queue.job j where j.id = l.id offset 0) t
    where l.expires_at > t.at + interval '10 s';
end $$;

create or replace function queue._why_full(p_queue text)
returns text language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v record;
begin
  select c.max_running, c.rate_limit, c.rate_per,
    coalesce((select s.used from queue.semaphore s where s.key = 'q' || p_queue order by s.tick desc limit 1), 0) as used
  into v from queue.queue_config c where c.queue = p_queue;
  if v.used >= v.max_running then
    return format('its queue %s has reached max_running %s', p_queue, v.max_running);
  end if;
  return format('its queue %s has used up its rate of %s per %s; the next start is at %s', p_queue, v.rate_limit, v.rate_per, queue._next_start(p_queue));
end $$;

create or replace function queue.peek(queues text[] default null, n integer default 10)
returns table (id bigint, task text, args jsonb, queue text, priority integer, lock text, attempts integer, scheduled_at timestamptz, deadline timestamptz)
language plpgsql stable parallel safe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    queues := queue._bound_queues('{worker,operator,reader}', queues);
  end if;
  if peek.n is null or peek.n < 1 then
    perform queue._invalid('n must be at least 1', 'Say how many jobs to show.');
  end if;
  return query
    select j.id, j.task, j.args, j.queue, j.priority, j.lock, j.attempts, j.scheduled_at, j.deadline
    from (
      select c.id, g.priority, c.deadline, c.first_id
      from (
        select l.queue, l.priority, array_agg(l.lane) as lanes, array_agg(l.low_deadline) as deadlines, array_agg(l.low_id) as ids
        from queue.lane l
        where not l.is_idle and (l.paused_until is null or l.paused_until <= clock_timestamp())
          and (peek.queues is null or exists (select from unnest(peek.queues) q where queue._matches(l.queue, q)))
          and (l.kind = 0 or not queue._is_queue_full(l.queue))
        group by l.queue, l.priority) g
      cross join lateral (
        select v.id, v.deadline, first_value(v.id) over (order by v.deadline, v.id) as first_id
        from unnest(g.lanes, g.deadlines, g.ids) l (lane, deadline, id)
        cross join lateral (
          select v.id, v.deadline from queue.live v
          where v.lane = l.lane and (v.deadline, v.id) >= (l.deadline, l.id) and v.claim is null
          order by v.deadline, v.id limit peek.n) v
        order by v.deadline, v.id limit peek.n) c
      union all
      (select a.id, a.priority, coalesce(a.deadline, 'infinity'), min(a.id) over (partition by a.queue, a.priority)
       from queue.unadmitted a
       where a.flags & 32 = 0 and a.needs is null and coalesce(a.scheduled_at <= clock_timestamp(), true)
         and (a.lock is null or not exists (select from queue.lock_member m where m.lock = a.lock))
         and (peek.queues is null or exists (select from unnest(peek.queues) q where queue._matches(a.queue, q)))
         and coalesce(queue._paused_until(a.queue) <= clock_timestamp(), true)
       order by a.priority desc, coalesce(a.deadline, 'infinity'), a.id limit peek.n)
      order by priority desc, first_id, deadline, id limit peek.n) c
    cross join lateral (select j.* from queue.jobs j where j.id = c.id offset 0) j
    order by c.priority desc, c.first_id, c.deadline, c.id;
end $$;
comment on function queue.peek(text[], integer) is
  'The jobs that fetch would take next, in order. Changes nothing.';

-- Every invariant that does not hold. Reads one snapshot; a sound database gives no row.
create or replace function queue.check()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security definer rows 10
set search_path = pg_catalog, pg_temp set enable_nestloop = off set jit = off as $$
#variable_conflict use_column
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  return query
    select 'in two places'::text, x.id, string_agg(x.place, ', ' order by x.place)
    from (select v.id, 'live'::text as place from queue.live v union all
          select f.id, 'finished' from queue.finished f union all
          select w.id, 'waiting ' || w.reason from queue.waiting w) x
    group by x.id having count(*) > 1;
  return query
    select 'no such job'::text, x.id, x.place
    from (select v.id, 'live'::text as place from queue.live v union all
          select f.id, 'finished' from queue.finished f union all
          select w.id, 'waiting' from queue.waiting w union all
          select m.id, 'lock_member' from queue.lock_member m union all
          select k.job_id, 'queueing_lock' from queue.queueing_lock k union all
          select l.id, 'lease' from queue.lease l union all
          select s.id, 'job_state' from queue.job_state s union all
          select a.job_id, 'attempt' from queue.attempt a) x
    where not exists (select from queue.job j where j.id = x.id);
  return query
    select 'of no known state or kind'::text, f.id, f.state from queue.finished f where f.state not in ('succeeded', 'failed', 'cancelled')
    union all
    select 'of no known state or kind', h.job_id, h.kind from queue.handover h where h.kind not in ('ended', 'again', 'replace', 'recheck', 'regate', 'refill');
  return query
    select 'admitted and nowhere'::text, j.id, format('flags %s', j.flags)
    from queue.job j
    cross join (select c.next_xid, c.in_flight from queue.cursor c order by c.tick desc limit 1) c
    where j.xid < c.next_xid and j.xid <> all (c.in_flight)
      and not exists (select from queue.live v where v.id = j.id) and not exists (select from queue.finished f where f.id = j.id)
      and not exists (select from queue.waiting w where w.id = j.id)
      and not exists (select from queue.lock_member m where m.id = j.id)
      and not exists (select from queue.handover h where h.job_id = j.id)
      and not exists (select from queue.backlog b where (j.xid, j.id) > (b.from_xid, b.from_id) and j.xid <= b.to_xid)
      and not exists (select from queue.backlog_part b
                      where (j.xid, j.id) > (b.from_xid, b.from_id) and (j.xid, j.id) <= (b.to_xid, b.to_id) and j.priority <= b.priority);
  return query
    select 'handed over, and the cursor has passed it'::text, o.job_id, o.kind from queue._orphaned_handovers() o;
  return query
    select 'waits for a time before the mark of what is due'::text, w.id, format('at %s, mark %s', w.at, k.due_at)
    from queue.waiting w
    cross join (select c.due_at from queue.cursor c order by c.tick desc limit 1) k
    where w.at < k.due_at;
  return query
    select 'ready below the low mark'::text, v.id, format('lane %s', v.lane)
    from queue.live v join queue.lane l on l.lane = v.lane
    where v.claim is null and ((v.deadline, v.id) < (l.low_deadline, l.low_id) or l.is_idle);
  return query
    select 'in a lane that is missing'::text, v.id, format('lane %s', v.lane)
    from queue.live v where not exists (select from queue.lane l where l.lane = v.lane)
    union all
    select 'waits for a slot in a lane that is missing', w.id, format('lane %s', w.lane)
    from queue.waiting w where w.lane is not null and not exists (select from queue.lane l where l.lane = w.lane);
  return query
    select 'in another lane than its queue and priority have'::text, v.id, format('lane %s', v.lane)
    from queue.live v join queue.lane l on l.lane = v.lane
    join queue.job j on j.id = v.id left join queue.job_state s on s.id = v.id
    where v.claim is null
      and ((l.queue, l.priority) <> (coalesce(s.queue, j.queue), coalesce(s.priority, j.priority))
           or v.deadline <> coalesce(s.deadline, j.deadline, 'infinity'));
  return query
    select 'a job with a lock that it has not joined'::text, j.id, coalesce(s.lock, j.lock)
    from (select v.id from queue.live v union all select w.id from queue.waiting w where w.reason <> 'parked') x
    join queue.job j on j.id = x.id left join queue.job_state s on s.id = x.id
    where coalesce(s.lock, j.lock) <> '' and not exists (select from queue.lock_member m where m.id = j.id and m.lock = coalesce(s.lock, j.lock));
  return query select c.problem, c.id, c.detail from queue._check_locks() c;
  return query select c.problem, c.id, c.detail from queue._check_semaphores() c;
  return query select c.problem, c.id, c.detail from queue._check_need_rows() c;
  return query select c.problem, c.id, c.detail from queue._check_claim_rows() c;
  return query select c.problem, c.id, c.detail from queue._check_schedules() c;
  return query
    select 'a queueing lock whose job has started'::text, k.job_id, k.key
    from queue.queueing_lock k join queue.job j on j.id = k.job_id
    where exists (select from queue.finished f where f.id = j.id)
      or j.queueing_lock is distinct from k.key
      or j.flags & 256 <> 0 and exists (select from queue.live v where v.id = j.id and v.claim is not null);
  return query
    select 'not one row'::text, null::bigint, x.name
    from (select 'admission'::text as name, count(*) as n from queue.admission union all
          select 'cursor', count(*) from queue.cursor union all
          select 'installation', count(*) from queue.installation) x
    where x.n <> 1;
  return query
    select 'claimed by a worker that never was'::text, v.id, format('worker %s', v.worker_id)
    from queue.live v where v.claim is not null and v.worker_id is null;
  return query
    select 'limits that nobody looks for'::text, null::bigint, c.relname::text
    from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relname = 'unlimited' and exists (select from queue.access a where a.queues is not null);
end $$;
comment on function queue.check() is
  'Every invariant of the tables that does not hold: problem, the job if it is one, detail. No rows on a sound database.';
