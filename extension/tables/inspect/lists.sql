create index finished_cancelled_idx on queue.finished (id) where state = 'cancelled';

-- For lists of such jobs, however many other jobs wait for their time or for a slot.
create index waiting_list_idx on queue.waiting (reason, id)
  where reason in ('held', 'upstream_failed', 'needs', 'signal', 'task_paused', 'moving');

create index attempt_at_idx on queue.attempt using brin (finished_at) with (pages_per_range = 32,
  autosummarize = on);

-- Unfinished jobs, without reading the finished ones. due_at: the time from which the job could have run, if
-- no gate had held it. Private.
create view queue.unfinished as
select j.id, j.task, coalesce(u.queue, j.queue) as queue,
  coalesce(u.state, case when j.is_suspended then 'waiting'
    when j.scheduled_at > statement_timestamp() then 'scheduled' else 'ready' end) as state,
  coalesce(j.scheduled_at, j.created_at) as due_at
from (
  select aj.id, case when aj.claim is null then 'ready' else 'running' end as state, null as queue
  from queue.active_job aj
  union all
  select w.id, case w.reason when 'schedule' then 'scheduled' when 'needs' then 'waiting'
    when 'signal' then 'waiting'
    when 'slot' then 'blocked' when 'parked' then 'blocked' when 'moving' then 'blocked'
    when 'task_paused' then 'ready' else w.reason end, null as queue
  from queue.waiting w
  union all
  select m.id, 'blocked' as state, null as queue
  from queue.lock_member m
  where not exists (select from queue.active_job aj where aj.id = m.id)
    and not exists (select from queue.waiting w where w.id = m.id)
    and not exists (select from queue.finished f where f.id = m.id)
    and not exists (select from queue.pending_settlement h where h.job_id = m.id and h.kind = 'again')
  union all
  -- As in queue.jobs: the state comes from the job's wait or its time, and the queue may be a new one.
  select h.job_id, h.payload ->> 'state', h.payload #>> '{change,queue}'
  from queue.pending_settlement h where h.kind = 'again'
  union all
  select a.id, a.state, null as queue from queue.unadmitted a) u
join queue.job_now j on j.id = u.id;

create view queue.metrics as
with u as materialized (
  select u.queue, count(*) filter (where u.state = 'scheduled') as scheduled,
    count(*) filter (where u.state = 'waiting') as waiting,
    count(*) filter (where u.state = 'upstream_failed') as upstream_failed,
    count(*) filter (where u.state = 'blocked') as blocked,
    count(*) filter (where u.state = 'ready') as ready, count(*)
      filter (where u.state = 'running') as running,
    count(*) filter (where u.state = 'held') as held, min(u.due_at)
      filter (where u.state = 'ready') as oldest_ready_at
  from queue.unfinished u group by u.queue)
select q.name as queue,
  coalesce((select p.is_paused and coalesce(p.until > statement_timestamp(), true) from queue.pause p
            where p.task is null
              and (p.queue is null or p.queue = q.name or right(p.queue, 1) = '*'
              and starts_with(q.name, left(p.queue, -1)))
            order by p.no desc limit 1), false)::integer as paused,
  coalesce(u.scheduled, 0) as scheduled, coalesce(u.waiting, 0) as waiting,
  coalesce(u.upstream_failed, 0) as upstream_failed, coalesce(u.blocked, 0) as blocked,
  coalesce(u.ready, 0) as ready,
  coalesce(u.running, 0) as running, coalesce(u.held, 0) as held, coalesce(f.failed, 0) as failed,
  coalesce(extract(epoch from statement_timestamp() - u.oldest_ready_at), 0)::double precision
    as oldest_ready_seconds,
  coalesce(d.succeeded, 0) as succeeded_5m, coalesce(d.failed, 0) as failed_5m,
  coalesce(d.cancelled, 0) as cancelled_5m,
  (select count(*) from queue.worker w
   where w.gone_at is null and w.last_seen_at + w.dead_after >= statement_timestamp()
     and (w.queues is null or exists (
     select from unnest(w.queues) p where p = q.name or right(p, 1) = '*'
       and starts_with(q.name, left(p, -1))))) as workers
from (select c.queue as name from queue.queue_config c union select l.queue
  from queue.lane l union select u.queue from u) q
left join u on u.queue = q.name
left join (
  select j.queue, count(*) as failed
  from queue.finished f join queue.job_now j on j.id = f.id
  where f.state = 'failed' group by 1) f on f.queue = q.name
left join (
  select j.queue, count(*) filter (where f.state = 'succeeded') as succeeded,
    count(*) filter (where f.state = 'failed') as failed, count(*)
      filter (where f.state = 'cancelled') as cancelled
  from queue.finished f join queue.job_now j on j.id = f.id
  where f.finished_at > statement_timestamp() - interval '5 minutes' group by 1) d on d.queue = q.name
where (select vis.is_all from queue.visible_queues vis)
  or q.name like any ((select vis.queues from queue.visible_queues vis)::text[]);
comment on view queue.metrics is
  'A row for each queue with its figures, for postgres_exporter: queue is a label, the others are gauges.'
    ' Jobs by state; jobs that ended in the last 5 minutes; live workers that serve the queue.';
