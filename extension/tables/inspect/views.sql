-- What operators and readers see, besides jobs (jobs.sql). Views call no function of the extension, so that
-- it can be dropped without them. Therefore they repeat rules that functions have: _matches, _paused_until,
-- _task_paused_until, _virtual_time and _tag_step.
--
-- PostgreSQL would let the table's owner, and so an ORM, write to a table through a view of that table alone.
-- The join named read_only prevents this. It is one row without columns, which the planner removes first:
-- plans stay those of the table, and conditions reach its indexes.

create view queue.attempts as
select a.job_id, a.attempt, a.claim, a.worker_id, a.started_at, a.finished_at, a.outcome, a.error, a.details
from queue.attempt a cross join (select) read_only
where (select x.is_all from queue.visible_queues x)
  or exists (select from queue.job_now j
             where j.id = a.job_id
               and j.queue like any ((select x.queues from queue.visible_queues x)::text[]));
comment on view queue.attempts is 'All attempts that did not succeed.';

create view queue.steps as
select s.job_id, (s.name || case when s.no > 1 then '#' || s.no else '' end) collate "default" as name,
  s.value, s.fingerprint, s.claim, s.finished_at, coalesce(s.failures, 0) as failures, s.error
from queue.step s cross join (select) read_only
where s.finished_at is not null
  and ((select x.is_all from queue.visible_queues x)
    or exists (select from queue.job_now j
               where j.id = s.job_id
                 and j.queue like any ((select x.queues from queue.visible_queues x)::text[])));
comment on view queue.steps is
  'The finished steps of durable jobs: their values, and the claims that finished them. A sleep and a wait'
    ' for jobs (await_jobs) appear when they begin; the value of a sleep is the time of its end. failures:'
    ' how often the step failed before it finished. error: the last error, if it has failed for good.';

create view queue.workers as
select w.id, w.name, w.queues, w.info, w.registered_at, w.last_seen_at, w.dead_after,
  w.gone_at is null and w.last_seen_at + w.dead_after >= statement_timestamp() as is_alive,
  coalesce(aj.running, 0)::integer as running, w.memory, w.has_left
from queue.worker w
left join (select aj.worker_id, count(*) as running from queue.active_job aj where aj.claim is not null
  group by aj.worker_id) aj on aj.worker_id = w.id
where (w.gone_at is null or w.gone_at > statement_timestamp() - interval '1 minute'
    or not w.is_clear and not w.has_left)
  and ((select x.is_all from queue.visible_queues x)
    or exists (select from unnest(w.queues) q
      where q like any ((select x.queues from queue.visible_queues x)::text[])));
comment on view queue.workers is
  'Registered workers, and those that have gone within the last minute, or have died with jobs that still'
    ' count as theirs. memory: the resident bytes that the last heartbeat reported, or NULL. has_left: the'
    ' worker has deregistered.';

create view queue.tasks as
select coalesce(t.name, p.task) as name, coalesce(t.defaults, '{}') as defaults,
  coalesce(p.paused_in, '{}') as paused_in
from queue.task t
full join (select p.task, array_agg(coalesce(p.queue, '*') order by p.no) as paused_in from queue.pause p
           where p.task is not null and p.is_paused and coalesce(p.until > statement_timestamp(), true)
           group by p.task) p on p.task = t.name;
comment on view queue.tasks is
  'Registered tasks and their defaults. paused_in: the queues (names, prefix* or *) in which pause has'
    ' stopped the task. A pattern may cover queues that were resumed one by one since. A paused task is'
    ' shown even if nobody has registered it.';

create view queue.queues as
select q.queue as name, q.created_at, c.max_running, c.rate_limit, c.rate_per, c.retain,
  coalesce(x.ready, 0) as ready,
  coalesce(x.running, 0) as running,
  nullif(greatest(p.paused_until, statement_timestamp()), statement_timestamp()) as paused_until
from (select c.queue, c.created_at from queue.queue_config c
      union all
      select u.queue, null as created_at
      from (select l.queue from queue.lane l
        union select a.queue from queue.unadmitted a
        -- Jobs that were claimed as they were admitted (work/claim_slice.sql) may be in a queue without
        -- lanes.
        union select j.queue from queue.active_job aj join queue.job_now j on j.id = aj.id
          where aj.lane is null
        union
        select p.queue from queue.pause p
        where p.task is null and p.is_paused and right(p.queue, 1) <> '*'
          and coalesce(p.until > statement_timestamp(), true)) u
      where not exists (select from queue.queue_config c where c.queue = u.queue)) q
left join queue.queue_config c on c.queue = q.queue
left join lateral (
  select case when p.is_paused then coalesce(p.until, 'infinity') end as paused_until
  from queue.pause p
  where p.task is null
    and (p.queue is null or p.queue = q.queue or right(p.queue, 1) = '*'
    and starts_with(q.queue, left(p.queue, -1)))
  order by p.no desc limit 1) p on true
left join (select a.queue, sum(a.jobs - a.running)::bigint as ready, sum(a.running)::bigint as running
           from (
             select l.queue, a.jobs, a.running from queue.lane l
             -- They are counted before the join. After it a million jobs would take three times as long.
             join (select aj.lane, count(*) as jobs, count(aj.claim) as running
                   from queue.active_job aj where aj.lane is not null group by aj.lane) a on a.lane = l.lane
             union all
             select j.queue, 1, 1 from queue.active_job aj join queue.job_now j on j.id = aj.id
             where aj.lane is null
             union all
             select a.queue, 1, 0 from queue.unadmitted a where a.state = 'ready') a
           group by a.queue) x on x.queue = q.queue
where (select vis.is_all from queue.visible_queues vis)
  or q.queue like any ((select vis.queues from queue.visible_queues vis)::text[]);
comment on view queue.queues is
  'Queues that are configured or paused, have had ready jobs, or have new jobs. ready: without those that'
    ' wait for a lock or a limit, or whose task is paused; new jobs, which no fetch has looked at yet,'
    ' count.';

create view queue.locks as
select m.lock,
  -- By aggregates: sorting a million members takes three times as long.
  coalesce(min(m.id) filter (where aj.claim is not null), min(m.id) filter (where m.has_turn), min(m.id))
    as job_id,
  count(aj.claim)::integer as running,
  (count(*) - count(aj.claim))::integer as waiting,
  bool_or(m.is_mutex) as has_mutex
from queue.lock_member m
left join (select aj.id, aj.claim from queue.active_job aj where aj.claim is not null) aj on aj.id = m.id
group by m.lock;
comment on view queue.locks is
  'Locks with unfinished jobs: the job that runs or comes next, how many run (at most one) and how many'
    ' wait. New jobs, which no fetch has looked at yet, do not count.';

create view queue.semaphores as
select case left(s.key, 1) when 'k' then 'concurrency_key' when 'm' then 'lock' else 'queue' end as kind,
  substr(s.key, 2) as key,
  case when left(s.key, 1) = 'q'
    then (select c.max_running from queue.queue_config c where c.queue = substr(s.key, 2))
    else nullif(s.slots, 2147483647) end as "limit", s.used,
  (select least(coalesce(sum(r), 0), 2147483647) from unnest(s.ready) r)::integer as ready,
  (select coalesce(sum(w), 0) from unnest(s.waiting) w)::integer as waiting, s.rate_limit, s.rate_per
from (select distinct on (s.key) s.key, s.slots, s.used, s.ready, s.waiting, s.rate_limit, s.rate_per
  from queue.semaphore s order by s.key, s.tick desc) s;
comment on view queue.semaphores is
  'Concurrency keys, mutex locks and the max_running of queues: the limit, how much of it running jobs use'
    ' (or jobs with several keys have reserved), how much of it ready jobs ask for, and how many jobs wait.'
    ' For a queue there are only the limit and the number of running jobs. The rate is rate_limit starts per'
    ' rate_per. New jobs, which no fetch has looked at yet, do not count.';

-- waiting: how far a share's next tag lies ahead of the first ready (or waiting) job, in turns.
create view queue.shares as
with first as (
  select g.queue, g.priority, g.key, min(f.deadline) as tag
  from (select distinct t.queue, t.priority, t.key from queue.share_tag t) g
  join queue.lane l on l.queue = g.queue and l.priority = g.priority and l.tag_base is not null
  cross join lateral (
    (select aj.deadline from queue.active_job aj
     where g.key = '' and not l.is_idle and aj.lane = l.lane
       and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id) and aj.deadline >= l.tag_base
       and aj.deadline < coalesce(l.retag_from, '{{end_of_tags}}') and aj.claim is null
     order by aj.deadline, aj.id limit 1)
    union all
    (select w.deadline from queue.waiting w
     where g.key <> '' and w.reason = 'slot' and w.key = g.key and w.lane = l.lane
       and w.deadline >= l.tag_base and w.deadline < coalesce(l.retag_from, '{{end_of_tags}}')
     order by w.deadline, w.id limit 1)) f
  group by g.queue, g.priority, g.key),
ahead as (
  select t.queue, t.priority, t.share, greatest(extract(epoch from t.tag - f.tag), 0) * 1000000 as ahead,
    0 as started
  from queue.share_tag t
  left join first f on f.queue = t.queue and f.priority = t.priority and f.key = t.key
  union all
  select j.queue, j.priority, coalesce(j.options ->> 'share', ''), 0, 1
  from (
    (select aj.id from queue.active_job aj
     where aj.claimed_at > statement_timestamp() - interval '1 minute' limit 10000)
    union all
    (select f.id from queue.finished f
     where f.finished_at > statement_timestamp() - interval '1 minute'
       and f.started_at > statement_timestamp() - interval '1 minute' limit 10000)) x
  cross join lateral (
    select j.queue, j.priority, j.options from queue.job_now j where j.id = x.id offset 0) j
  where exists (select from queue.lane l
    where l.queue = j.queue and l.priority = j.priority and l.tag_base is not null))
select a.queue, a.priority, a.share, w.weight,
  sum(coalesce(floor(a.ahead / round(100000 / w.weight)::numeric), 0))::bigint as waiting,
  sum(a.started) as started
from ahead a
cross join lateral (
  select coalesce(
    (select c.weight from queue.share_config c where c.pattern = a.share),
    (select c.weight from queue.share_config c
     where right(c.pattern, 1) = '*' and starts_with(a.share, left(c.pattern, -1)) and a.share <> ''
     order by length(c.pattern) desc limit 1),
    1) as weight offset 0) w
group by a.queue, a.priority, a.share, w.weight;
comment on view queue.shares is
  'Shares with ready jobs, with jobs that wait for slots, or with jobs that started within the last minute,'
    ' by queue and priority; an empty share is that of the jobs without one. waiting: about how many jobs it'
    ' has that are ready or wait, as far as its turns show. started: its starts in the last minute, among at'
    ' most 10,000 jobs that run and 10,000 that have ended. New jobs, which no fetch has looked at yet, do'
    ' not count.';

create view queue.schedules as
select s.name, s.cron, s.timezone, s.task,
  case when (select h.paths from queue.hidden_paths h) ? s.task
    then (select c.args
      from (select s.args, (select h.paths from queue.hidden_paths h) -> s.task as paths) x
      cross join lateral ({{masked}}) c (args))
    else s.args end as args, s.options, s.is_enabled as enabled,
  s.next_run_at, s.last_run_at, s.last_job_id, case when s.is_enabled then s.reason else 'disabled' end
    as reason,
  s.catch_up, s.max_delay, case when s.skips_overlap then 'skip' else 'allow' end as overlap,
  s.options ->> 'source' as source,
  s.created_at, s.changed_at
from queue.schedule s cross join (select) read_only;
comment on view queue.schedules is
  'Schedules, each with its next run and the last run that was handled. reason: why it does not run although'
    ' it is due: disabled, paused, queueing_lock, or the error of the last run.';

create view queue.schedule_runs as
select r.name, r.run_at, r.job_id, r.skipped, r.detail, r.is_manual as manual, r.decided_at
from queue.schedule_run r cross join (select) read_only;
comment on view queue.schedule_runs is
  'The history of runs, at least the last 100 of each schedule: the job, or why the run was skipped (missed,'
    ' max_delay, overlap, queueing_lock, changed, error); detail says more. manual: the run was started by'
    ' run_now.';
