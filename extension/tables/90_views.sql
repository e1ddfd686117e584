-- What fetch returns of a claimed job: as it was deferred, but for what has changed since. Private.
create view queue.claimed as
select v.id, v.claim, j.task, coalesce(s.args, j.args) as args, coalesce(s.queue, j.queue) as queue,
  coalesce(s.priority, j.priority) as priority, nullif(coalesce(s.lock, j.lock), '') as lock, v.attempt::integer as attempt,
  nullif(coalesce(s.scheduled_at, j.scheduled_at), '-infinity') as scheduled_at, coalesce(s.deadline, j.deadline) as deadline,
  (j.options ->> 'timeout')::interval as timeout, j.options -> 'headers' as headers, (j.options ->> 'parent')::bigint as parent
from queue.live v
cross join lateral (
  select j.task, j.args, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.options
  from queue.job j where j.id = v.id offset 0) j
left join lateral (
  select s.args, s.queue, s.priority, s.lock, s.scheduled_at, s.deadline
  from queue.job_state s where s.id = v.id and v.flags & 2048 <> 0 offset 0) s on true;

-- What fetch says of a job that nothing has changed since it was deferred, when it starts for the first time.
create view queue.first_run as
select j.id, j.task, j.args, j.queue, j.priority, nullif(j.lock, '') as lock, 1 as attempt, nullif(j.scheduled_at, '-infinity') as scheduled_at,
  j.deadline, (j.options ->> 'timeout')::interval as timeout, j.options -> 'headers' as headers, (j.options ->> 'parent')::bigint as parent
from queue.job j;

create view queue.jobs as
select j.id, j.task, coalesce(s.queue, j.queue) as queue,
  case
    when f.id is not null then f.state
    when v.claim is not null then 'running'
    when v.id is not null and coalesce(r.scheduled_at <= statement_timestamp(), true) then 'ready'
    when w.reason = 'held' then 'held'
    when w.reason = 'schedule' and coalesce(r.scheduled_at > statement_timestamp(), true) then 'scheduled'
    when w.reason = 'needs' then 'waiting'
    when w.reason = 'upstream_failed' then 'upstream_failed'
    when w.reason in ('slot', 'parked') then 'blocked'
    when w.reason = 'task_paused' then 'ready'
    when m.id is not null and m.is_passed
      and not (s.claims > 0 and exists (select from queue.handover h where h.job_id = j.id and h.kind = 'again')) then 'blocked'
    when j.flags & 32 <> 0 and s.id is null then 'held'
    when coalesce(r.scheduled_at, s.scheduled_at, j.scheduled_at) > statement_timestamp() then 'scheduled'
    when j.needs is not null and s.id is null then 'waiting'
    else 'ready'
  end as state,
  case
    when f.id is not null then f.reason
    when v.claim is not null then a.reason
    when w.reason = 'task_paused' or v.id is not null and l.paused_until > statement_timestamp() then 'paused'
    when w.reason = 'slot' then case left(w.key, 1) when 'm' then 'lock' else 'limit' end
    when w.reason = 'parked' then 'backlog'
    when w.id is null and v.id is null and m.is_passed
      and not (s.claims > 0 and exists (select from queue.handover h where h.job_id = j.id and h.kind = 'again')) then 'lock'
  end as reason,
  coalesce(r.args, s.args, j.args) as args, coalesce(r.priority, s.priority, j.priority) as priority, nullif(coalesce(s.lock, j.lock), '') as lock,
  j.queueing_lock, j.keys[1] as concurrency_key, coalesce(n.needs, j.needs) as needs, coalesce(s.deadline, j.deadline) as deadline,
  nullif(coalesce(r.scheduled_at, s.scheduled_at, j.scheduled_at), '-infinity') as scheduled_at, (j.options ->> 'expires_at')::timestamptz as expires_at,
  j.created_at, coalesce(v.claimed_at, f.started_at, s.started_at) as started_at, f.finished_at,
  coalesce(f.attempts, v.attempt, s.attempts, 0)::integer as attempts, coalesce(s.failures, 0) as failures,
  coalesce(s.crashes, 0) as crashes,
  coalesce(s.claims, 0) + case when v.claim is not null or f.state = 'succeeded' and f.worker_id is not null then 1 else 0 end as claims,
  v.claim, coalesce(v.worker_id, f.worker_id) as worker_id, coalesce(f.error, case when f.id is null then s.error end) as error, f.result,
  j.options ->> 'description' as description, j.options -> 'headers' as headers, (j.options ->> 'parent')::bigint as parent,
  coalesce(s.progress, 0) as progress
from queue.job j
left join queue.job_state s on s.id = j.id
left join queue.live v on v.id = j.id
left join queue.lane l on l.lane = v.lane
left join queue.abort a on a.id = v.id and a.claim = v.claim
left join queue.finished f on f.id = j.id
left join queue.waiting w on w.id = j.id
left join queue.lock_member m on m.lock = coalesce(s.lock, j.lock) and m.id = j.id
left join lateral (
  -- a replacement that is committed and not admitted yet: of those of a key the last
  select h.payload -> 'args' as args, (h.payload ->> 'priority')::integer as priority,
    coalesce((h.payload ->> 'scheduled_at')::timestamptz, '-infinity') as scheduled_at
  from queue.handover h
  where j.flags & (256 | 8192) <> 0 and h.job_id = j.id and h.kind = 'replace' and f.id is null and v.claim is null
  order by h.seq desc limit 1) r on true
left join lateral (select array_agg(d.need_id order by d.need_id) as needs from queue.need d where (j.flags | coalesce(s.extra_flags, 0)) & 8 <> 0 and d.job_id = j.id) n on true
where (select x.is_all from queue.visible x) or coalesce(s.queue, j.queue) like any ((select x.queues from queue.visible x)::text[]);

create view queue.attempts as
select a.job_id, a.attempt, a.claim, a.worker_id, a.started_at, a.finished_at, a.outcome, a.error, a.details
from queue.attempt a
where (select x.is_all from queue.visible x)
  or exists (select from queue.job j left join queue.job_state s on s.id = j.id
             where j.id = a.job_id and coalesce(s.queue, j.queue) like any ((select x.queues from queue.visible x)::text[]));

create view queue.workers as
select w.id, w.name, w.queues, w.info, w.registered_at, w.last_seen_at, w.dead_after,
  w.gone_at is null and w.last_seen_at + w.dead_after >= statement_timestamp() as is_alive,
  coalesce(v.running, 0)::integer as running
from queue.worker w
left join (select v.worker_id, count(*) as running from queue.live v where v.claim is not null group by v.worker_id) v on v.worker_id = w.id
where (select x.is_all from queue.visible x)
  or exists (select from unnest(w.queues) q where q like any ((select x.queues from queue.visible x)::text[]));

create view queue.tasks as
select t.name, t.defaults from queue.task t;

create view queue.queues as
select q.queue as name, q.created_at, c.max_running, c.rate_limit, c.rate_per, c.retain, coalesce(x.ready, 0) as ready,
  coalesce(x.running, 0) as running, nullif(greatest(p.paused_until, statement_timestamp()), statement_timestamp()) as paused_until
from (select c.queue, c.created_at from queue.queue_config c
      union all
      select u.queue, null as created_at
      from (select l.queue from queue.lane l union select a.queue from queue.unadmitted a) u
      where not exists (select from queue.queue_config c where c.queue = u.queue)) q
left join queue.queue_config c on c.queue = q.queue
left join lateral (
  select case when p.is_paused then coalesce(p.until, 'infinity') end as paused_until
  from queue.pause p
  where p.task is null and (p.queue is null or p.queue = q.queue or right(p.queue, 1) = '*' and starts_with(q.queue, left(p.queue, -1)))
  order by p.no desc limit 1) p on true
left join (select l.queue, count(v.id) filter (where v.claim is null) as ready,
             count(v.id) filter (where v.claim is not null) as running
           from queue.lane l left join queue.live v on v.lane = l.lane group by l.queue) x on x.queue = q.queue
where (select v.is_all from queue.visible v) or q.queue like any ((select v.queues from queue.visible v)::text[]);

comment on view queue.jobs is 'Every job that is kept, in its state as far as it is known.';
comment on view queue.attempts is 'Every attempt that did not succeed.';
comment on view queue.workers is 'Registered workers, and those that have gone within the last minute.';
comment on view queue.tasks is 'Registered tasks and their defaults.';
comment on view queue.queues is 'Queues that are configured, or that have had jobs which were ready.';
