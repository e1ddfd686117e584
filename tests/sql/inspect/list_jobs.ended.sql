-- queue.jobs shows what the end of a claim has changed, before the next fetch or tick has read it.

select plan(15);

set pgdefer.notify = off;

select queue.register_worker('w', info => '{"dead_after": "30 min"}') as worker \gset

create function pg_temp.job(id bigint) returns text language sql as $$
  select concat_ws(' ', j.state, j.queue, j.priority, coalesce(j.lock, '-'), j.needs) from queue.jobs j where j.id = job.id
$$;

select queue.defer('a need', options => '{"held": true}') as need \gset
select queue.defer('t', lock => 'l') as job \gset
select f.claim from queue.fetch(:worker) f \gset
select is(queue.fail(:job, :claim, 'e', options => '{"retry_in": "1 hour", "queue": "other", "priority": 7, "lock": "m"}'), 'scheduled', 'fail changes a job');
select is(pg_temp.job(:job), 'scheduled other 7 m', 'its queue, priority and lock are the new ones');
select bag_eq($$select s.queue_name || ' ' || s.priority from queue.search(state => 'scheduled') s$$, array['other 7'], 'search says the same');
select is((select s.queue_name from queue.search(queue => 'oth*') s), 'other', 'which finds it in its new queue');
select is_empty($$select from queue.search(queue => 'default', task => 't')$$, 'and not in its old one');
select is((select r.queue || ' ' || r.priority from queue.list_jobs(:job - 1) r), 'other 7', 'list_jobs, too');
select bag_eq($$select s.queue || ' ' || s.scheduled from queue.stats() s where s.task = 't' and s.scheduled > 0$$, array['other 1'], 'stats counts it in its new queue');
select bag_eq($$select m.queue || ' ' || m.scheduled from queue.metrics m where m.scheduled > 0$$, array['other 1'], 'and so do the metrics');
select queue.tick() \g /dev/null
select is(pg_temp.job(:job), 'scheduled other 7 m', 'nothing differs after the admission');
select is((select s.queue_name from queue.search(queue => 'oth*') s), 'other', 'also for search');

select queue.reschedule(:job) \g /dev/null
select f.claim from queue.fetch(:worker) f \gset
select queue.fail(:job, :claim, 'e', options => '{"retry_in": 0, "lock": ""}') \g /dev/null
select is(pg_temp.job(:job), 'ready other 7 -', 'a lock that was removed, and settings of an earlier retry');

-- Needs are added to those that the job has.
select f.claim from queue.fetch(:worker) f \gset
select queue.retry_later(:job, :claim, needs => array[:need]) \g /dev/null
select is(pg_temp.job(:job), format('upstream_failed other 7 - {%s}', :need), 'retry_later adds a need');
select queue.done(array[:need]) \g /dev/null
select f.claim from queue.fetch(:worker) f \gset
select queue.defer('b') as newer \gset
select queue.retry_later(:job, :claim, needs => array[:newer]) \g /dev/null
select is(pg_temp.job(:job), format('waiting other 7 - {%s,%s}', :need, :newer), 'and another one to that');
select queue.tick() \g /dev/null
select is(pg_temp.job(:job), format('waiting other 7 - {%s,%s}', :need, :newer), 'nothing differs after the admission');

select is_empty('select * from queue.check()', 'every invariant holds');
select * from finish();
