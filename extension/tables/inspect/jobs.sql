-- Jobs as operators see them: the log with what admission, workers and operators have made of each job. As in
-- views.sql, views call no function of the extension.

-- Committed jobs that admission has not read yet. In a rehearsal also its own jobs that rehearse has not
-- admitted. Private.
create view queue.unadmitted as
select j.id, j.task, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs,
  case when j.flags & {{held}} <> 0 then 'held'
    when j.scheduled_at > statement_timestamp() then 'scheduled' when j.needs is not null then 'waiting'
    else 'ready' end as state
from queue.cursor_now k
cross join (select coalesce(max(r.upto), 0) as upto from queue.rehearsal r) r
cross join lateral (
  select j.id, j.task, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs
  from queue.job j
  where j.xid >= k.next_xid and (j.id > r.upto or j.xid <> pg_current_xact_id_if_assigned())
  union all
  select j.id, j.task, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs
  from unnest(k.in_flight) x cross join lateral (
    select j.id, j.task, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs
    from queue.job j
    where j.xid = x and (j.id > r.upto or j.xid <> pg_current_xact_id_if_assigned()) offset 0) j
  union all
  select j.id, j.task, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs
  from (select b.from_xid, b.from_id, b.to_xid, 9223372036854775807 as to_id from queue.backlog b
        union all select p.from_xid, p.from_id, p.to_xid, p.to_id from queue.backlog_part p) b
  cross join lateral (
    select j.id, j.task, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs
    from queue.job j
    where (j.xid, j.id) > (b.from_xid, b.from_id) and (j.xid, j.id) <= (b.to_xid, b.to_id)
      -- This says nothing new, but lets the planner expect few rows: else it reads the whole log for each
      -- part.
      and j.xid >= b.from_xid and j.xid <= b.to_xid offset 0) j
  -- By an index each, because these tables may have been empty when a function made its plan.
  where not exists (select from queue.active_job aj where aj.id = j.id offset 0)
    and not exists (select from queue.waiting w where w.id = j.id offset 0)
    and not exists (select from queue.finished f where f.id = j.id offset 0)
    and not exists (select from queue.lock_member m where m.lock = j.lock and m.id = j.id offset 0)
  offset 0) j;

-- All jobs with all columns of queue.jobs, for functions, which run as the owner and show callers what
-- they may see. Private.
create view queue.all_jobs as
select j.id, j.task, g.queue,
  case
    when f.id is not null then f.state
    when aj.claim is not null then 'running'
    when aj.id is not null and coalesce(r.scheduled_at <= statement_timestamp(), true) then 'ready'
    when w.reason = 'held' then 'held'
    when w.reason = 'schedule' and coalesce(r.scheduled_at > statement_timestamp(), true) then 'scheduled'
    when w.reason in ('needs', 'signal') then 'waiting'
    when w.reason = 'upstream_failed' then 'upstream_failed'
    when w.reason in ('slot', 'parked', 'moving') then 'blocked'
    when w.reason = 'task_paused' then 'ready'
    when m.id is not null and m.is_passed and aj.id is null and h.payload is null then 'blocked'
    when j.is_suspended then 'waiting'
    when g.state in ('waiting', 'upstream_failed') then g.state
    when j.flags & {{held}} <> 0 and not j.is_overridden then 'held'
    when coalesce(r.scheduled_at, j.scheduled_at) > statement_timestamp() then 'scheduled'
    when j.needs is not null and not j.is_overridden then 'waiting'
    else 'ready'
  end as state,
  case
    when f.id is not null then f.reason
    when aj.claim is not null then a.reason
    when w.reason = 'task_paused' or aj.id is not null and l.paused_until > statement_timestamp()
      then 'paused'
    when w.reason = 'slot' then case left(w.key, 1) when 'm' then 'lock' else 'limit' end
    when w.reason = 'parked' then 'backlog'
    when w.reason in ('signal', 'moving') then w.reason
    when w.id is null and aj.id is null and m.is_passed and h.payload is null then 'lock'
    when w.id is null and aj.id is null and j.is_suspended then 'signal'
    -- The job is not admitted, and ready as above.
    when w.id is null and aj.id is null
      and (j.flags & {{held}} = 0 and j.needs is null or j.is_overridden)
      and coalesce(coalesce(r.scheduled_at, j.scheduled_at) <= statement_timestamp(), true)
      and coalesce(g.state not in ('waiting', 'upstream_failed'), true)
      and ((select p.is_paused and coalesce(p.until > statement_timestamp(), true) from queue.pause p
          where p.task is null and (p.queue is null or p.queue = g.queue
            or right(p.queue, 1) = '*' and starts_with(g.queue, left(p.queue, -1)))
          order by p.no desc limit 1)
        or (select p.is_paused and coalesce(p.until > statement_timestamp(), true) from queue.pause p
          where (p.task = j.task or p.task is null and not p.is_paused)
            and (p.queue is null or p.queue = g.queue
              or right(p.queue, 1) = '*' and starts_with(g.queue, left(p.queue, -1)))
          order by p.no desc limit 1)) then 'paused'
  end as reason,
  coalesce(r.args, j.args) as args,
  coalesce(r.priority, (g.change ->> 'priority')::integer, j.priority) as priority,
  case when g.change ? 'lock' then nullif(g.change ->> 'lock', '') else j.lock end as lock,
  j.queueing_lock, j.keys[1] as concurrency_key,
  case when g.needs is null then coalesce(n.needs, j.needs)
    else array(select unnest(coalesce(n.needs, j.needs)) union
      select e::bigint from jsonb_array_elements_text(g.needs) e order by 1) end as needs,
  j.deadline, nullif(coalesce(r.scheduled_at, j.scheduled_at), '-infinity') as scheduled_at,
  (j.options ->> 'expires_at')::timestamptz as expires_at,
  j.created_at, coalesce(aj.claimed_at, f.started_at, j.started_at) as started_at, f.finished_at,
  coalesce(f.attempts, aj.attempt, j.attempts)::integer as attempts, j.failures, j.crashes,
  j.claims + case when aj.claim is not null or f.state = 'succeeded'
    and f.worker_id is not null then 1 else 0 end as claims,
  aj.claim, coalesce(aj.worker_id, f.worker_id) as worker_id,
  coalesce(f.error, case when f.id is null then j.error end) as error, f.result,
  j.options ->> 'description' as description, j.options -> 'headers' as headers,
  (j.options ->> 'parent')::bigint as parent, j.options ->> 'idempotency_key' as idempotency_key,
  j.progress, j.percent, j.message,
  nullif(
    coalesce(j.options, '{}')
      - '{headers,description,parent,idempotency_key,expires_at,delay,held,terms}'::text[]
    || case when j.keys is null then '{}'
      else (
        select jsonb_build_object('concurrency', jsonb_agg(
          jsonb_strip_nulls(jsonb_build_object('key', k.key, 'limit', k.most))
            || coalesce(nullif(j.options -> 'terms' -> (k.n - 1)::integer, 'null'), '{}') order by k.n))
        from unnest(j.keys, j.limits) with ordinality k (key, most, n)) end, '{}') as options
from queue.job_now j
-- What the next admission has yet to do for a job that runs again; JSON null: only to admit it. All of it is
-- read once, and only if the job has run before.
left join lateral (
  select (select jsonb_object_agg(u.job_id, u.payload order by u.payload is not null, u.seq)
    from queue.unsettled u where u.kind = 'again') -> j.id::text as payload
  where j.claims > 0 offset 0) h on true
cross join lateral (
  select h.payload ->> 'state' as state, h.payload -> 'change' as change,
    coalesce(h.payload #>> '{change,queue}', j.queue) as queue,
    nullif(h.payload -> 'needs', '[]') as needs) g
left join queue.active_job aj on aj.id = j.id
left join queue.lane l on l.lane = aj.lane
left join queue.abort a on a.id = aj.id and a.claim = aj.claim
left join queue.finished f on f.id = j.id
left join queue.waiting w on w.id = j.id
left join queue.lock_member m on m.lock = j.lock and m.id = j.id
left join lateral (
  -- The last committed replacement of the job that has not been applied yet.
  select h.payload -> 'args' as args, (h.payload ->> 'priority')::integer as priority,
    coalesce((h.payload ->> 'scheduled_at')::timestamptz, '-infinity') as scheduled_at
  from queue.unsettled h
  join queue.queueing_lock k on k.key = h.payload ->> 'key' and k.replacing = (h.payload ->> 'seq')::bigint
  where j.flags & {{queueing_lock}} <> 0 and h.job_id = j.id and h.kind = 'replace' and f.id is null
    and aj.claim is null) r on true
left join lateral (
  select array_agg(d.need_id order by d.need_id) as needs
  from queue.need d
  where j.flags & {{needs}} <> 0 and d.job_id = j.id) n on true;

create view queue.jobs as
select j.id, j.task, j.queue, j.state, j.reason,
  case when (select h.paths from queue.hidden_paths h) ? j.task
    then (select c.args
      from (select j.args, (select h.paths from queue.hidden_paths h) -> j.task as paths) x
      cross join lateral ({{masked}}) c (args))
    else j.args end as args,
  j.priority, j.lock, j.queueing_lock, j.concurrency_key, j.needs, j.deadline, j.scheduled_at, j.expires_at,
  j.created_at, j.started_at, j.finished_at, j.attempts, j.failures, j.crashes, j.claims, j.claim,
  j.worker_id, j.error, j.result, j.description, j.headers, j.parent, j.idempotency_key, j.progress,
  j.percent, j.message, j.options
from queue.all_jobs j
where (select x.is_all from queue.visible_queues x)
  or j.queue like any ((select x.queues from queue.visible_queues x)::text[]);
comment on view queue.jobs is
  'All jobs, until they are removed. The state is the one that the database knows so far: admission may'
    ' change that of a new job. Sensitive args (register_task) read *** for all but the owner.';
