create view queue.locks as
select m.lock,
  (array_agg(m.id order by v.claim is not null desc, m.has_turn desc, m.id))[1] as job_id,
  count(v.claim)::integer as running,
  (count(*) - count(v.claim))::integer as waiting,
  bool_or(m.is_mutex) as has_mutex
from queue.lock_member m
left join queue.live v on v.id = m.id
group by m.lock;

create view queue.semaphores as
select case left(s.key, 1) when 'k' then 'concurrency_key' when 'm' then 'lock' else 'queue' end as kind,
  substr(s.key, 2) as key, s.slots as "limit", s.used,
  (select coalesce(sum(r), 0) from unnest(s.ready) r)::integer as ready,
  (select coalesce(sum(w), 0) from unnest(s.waiting) w)::integer as waiting
from (select distinct on (s.key) s.key, s.slots, s.used, s.ready, s.waiting from queue.semaphore s order by s.key, s.tick desc) s;

comment on view queue.locks is 'Locks with unfinished jobs: the job that runs or comes first, how many run (one at most) and wait.';
comment on view queue.semaphores is
  'Concurrency keys, mutex locks and max_running of queues: the limit, how many claims use it, how many jobs are ready for it and wait.';
