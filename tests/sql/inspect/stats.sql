-- stats, metrics and autoscale_hint: every figure for known jobs.

select plan(51);

set pgdefer.notify = off;

-- A row's counts of unfinished jobs.
create function pg_temp.counts(queue text) returns text language sql as $$
  select concat_ws(' ', sum(s.scheduled), sum(s.waiting), sum(s.upstream_failed), sum(s.blocked), sum(s.ready), sum(s.running), sum(s.held), sum(s.failed)) from queue.stats() s where s.queue = counts.queue
$$;
create function pg_temp.metrics(queue text) returns text language sql as $$
  select concat_ws(' ', m.scheduled, m.waiting, m.upstream_failed, m.blocked, m.ready, m.running, m.held, m.failed) from queue.metrics m where m.queue = metrics.queue
$$;

select is_empty('select * from queue.stats()', 'no figures of an empty queue');
select is_empty('select * from queue.metrics', 'nor metrics');
select is_empty('select * from queue.autoscale_hint()', 'nor a hint');
select is(test.refusal('select queue.autoscale_hint(' || within || ')'), '22023', 'autoscale_hint(' || within || ')') from (values ('null'), ('''0'''), ('''-1 minute''')) v (within);

-- Before any worker has called
select queue.defer('t', queue => 'q'), queue.defer('t', queue => 'q', options => '{"held": true}'), queue.defer('t', queue => 'q', scheduled_at => '2999-01-01Z'), queue.defer('t', queue => 'q', lock => 'l') \g /dev/null
select is(pg_temp.counts('q'), '1 0 0 0 2 0 1 0', 'jobs that have not been admitted count');
select is(pg_temp.metrics('q'), '1 0 0 0 2 0 1 0', 'in the metrics too');
select is((select slots from queue.autoscale_hint() where queue = 'q'), 1, 'so that a worker is requested');

-- By state, before and after
select queue.register_worker('w', info => '{"dead_after": "30 min"}') as worker \gset
select max(claim) as claim from queue.fetch(:worker, null, 10) \gset
select is(pg_temp.counts('q'), '1 0 0 0 0 2 1 0', 'running ones');
select queue.defer('t', queue => 'q', lock => 'l'), queue.defer('u', queue => 'q'), queue.defer('t', queue => 'q', concurrency_key => 'k', concurrency_limit => 1),
  queue.defer('t', queue => 'q', concurrency_key => 'k', concurrency_limit => 1) \g /dev/null
select queue.defer('t', queue => 'q', needs => array[(select min(id) from queue.jobs where state = 'running')]),
  queue.defer('t', queue => 'q', needs => array[(select id from queue.jobs where state = 'held')]) \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.counts('q'), '1 1 1 2 2 2 1 0', 'each state');
select is(pg_temp.metrics('q'), '1 1 1 2 2 2 1 0', 'in the metrics too');
select is((select string_agg(concat_ws(' ', s.task, s.ready), ', ' order by s.task) from queue.stats() s), 't 1, u 1', 'by task');
select is((select sum(s.scheduled + s.waiting + s.upstream_failed + s.blocked + s.ready + s.running + s.held) from queue.stats() s), (select count(*)::numeric from queue.jobs), 'each job once');
select queue.pause(task => 'u') \g /dev/null
select is(pg_temp.counts('q'), '1 1 1 2 2 2 1 0', 'of a paused task too');
select queue.resume(task => 'u') \g /dev/null
begin;
select queue.fail(j.id, j.claim, 'again', options => '{"retry_in": 0}') from queue.jobs j where j.state = 'running' and j.lock is null \g /dev/null
select is(pg_temp.counts('q'), '1 1 1 2 3 1 1 0', 'one whose retry is not settled yet');
rollback;
begin;
select queue.fail(j.id, j.claim, 'later', options => '{"retry_in": "1 hour"}') from queue.jobs j where j.state = 'running' and j.lock is null \g /dev/null
select is(pg_temp.counts('q'), '2 1 1 2 2 1 1 0', 'one whose retry is not due');
select is(pg_temp.metrics('q'), '2 1 1 2 2 1 1 0', 'in the metrics too');
select ok((select bool_and(oldest_ready_for >= '0') from queue.stats()), 'the oldest that is ready is due');
select is((select ready from queue.autoscale_hint() where queue = 'q'), 2::bigint, 'nor is it ready for the hint');
rollback;
select is((select (count(*) filter (where u.state = j.state))::integer from queue.unfinished u join queue.jobs j on j.id = u.id), 10, 'as the jobs themselves say');
select ok((select oldest_ready_for between '0' and '1 minute' from queue.stats() where task = 'u'), 'the oldest that is ready');
update queue.job set created_at = created_at - interval '1 hour' where task = 'u';
select ok((select oldest_ready_for between '1 h' and '1 h 1 minute' from queue.stats() where task = 'u'), 'since it was due');
select ok((select oldest_ready_seconds between 3600 and 3660 from queue.metrics), 'in seconds');
select queue.move(array_agg(id), 'moved') from queue.jobs where task = 'u' \g /dev/null
select is(pg_temp.counts('moved'), '0 0 0 0 1 0 0 0', 'by the queue that they are in now');

-- Finished jobs, by time windows
select queue.defer('w', queue => 'win') from generate_series(1, 100) \g /dev/null
select queue.finish_many(jsonb_agg(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', 'succeeded'))) from queue.fetch(:worker, '{win}', 100) f \g /dev/null
-- job n of 100 waited n ms, ran n s; ten ended 10 minutes ago
update queue.finished f set started_at = j.created_at + n * interval '1 ms', finished_at = j.created_at + n * interval '1 ms' + n * interval '1 s'
from (select j.id, j.created_at, row_number() over (order by j.id) as n from queue.job j where j.queue = 'win') j where f.id = j.id;
update queue.job set created_at = created_at - interval '2 minutes' where queue = 'win';
update queue.finished f set started_at = started_at - interval '2 minutes', finished_at = finished_at - interval '2 minutes' from queue.job j where j.id = f.id and j.queue = 'win';
select results_eq($$select succeeded_5m, failed_5m, cancelled_5m, failures_5m, per_second_5m, wait_p50_5m, wait_p95_5m, wait_p99_5m, run_p50_5m, run_p95_5m, run_p99_5m from queue.stats() where queue = 'win'$$,
                  $$values (100::bigint, 0::bigint, 0::bigint, 0::bigint, 0.333, interval '50.5 ms', interval '95.05 ms', interval '99.01 ms', interval '50.5 s', interval '95.05 s', interval '99.01 s')$$,
                  'the last five minutes');
select results_eq($$select succeeded_1h, failed_1h, per_second_1h, wait_p50_1h, run_p99_1h from queue.stats() where queue = 'win'$$,
                  $$values (100::bigint, 0::bigint, 0.028, interval '50.5 ms', interval '99.01 s')$$, 'the last hour');
update queue.finished f set finished_at = f.finished_at - interval '10 minutes', started_at = f.started_at - interval '10 minutes'
from (select j.id, row_number() over (order by j.id) as n from queue.job j where j.queue = 'win') j where f.id = j.id and j.n <= 10;
select results_eq($$select succeeded_5m, succeeded_1h from queue.stats() where queue = 'win'$$, 'values (90::bigint, 100::bigint)', 'those that ended before are not in the five minutes');
update queue.finished f set finished_at = f.finished_at - interval '2 hours', started_at = f.started_at - interval '2 hours'
from (select j.id, row_number() over (order by j.id) as n from queue.job j where j.queue = 'win') j where f.id = j.id and j.n <= 10;
select results_eq($$select succeeded_5m, succeeded_1h from queue.stats() where queue = 'win'$$, 'values (90::bigint, 90::bigint)', 'nor in the hour');
select is((select succeeded_5m from queue.metrics where queue = 'win'), 90::bigint, 'the metrics have the five minutes');
select results_eq($$select per_second, run_for, slots from queue.autoscale_hint() where queue = 'win'$$, $$values (0.300, interval '55.5 s', 17)$$, 'the hint asks for as many slots as the rate keeps busy');
select queue.defer('w', queue => 'win') from generate_series(1, 60) \g /dev/null
select is((select slots from queue.autoscale_hint('555 s') where queue = 'win'), 17 + 6, 'and more for what is ready');
select is((select slots from queue.autoscale_hint('1 s') where queue = 'win'), 17 + 60, 'at most one each');
select queue.configure_queue('win', '{"max_running": 5}') \g /dev/null
select is((select slots from queue.autoscale_hint('1 s') where queue = 'win'), 5, 'at most max_running');
select queue.pause('win') \g /dev/null
select is_empty('select * from queue.autoscale_hint() where queue = ''win''', 'and none for a paused queue');
select is((select paused from queue.metrics where queue = 'win'), 1, 'which the metrics show');
select queue.resume('win') \g /dev/null

-- One long job among short ones, of a second each
select queue.defer('long', queue => 'long') as long \gset
select count(*) from queue.fetch(:worker, '{long}', 1) \g /dev/null
update queue.active_job set claimed_at = claimed_at - interval '10 years' where id = :long;
select results_eq($$select running, run_for > '9 years', slots from queue.autoscale_hint() where queue = 'long'$$, 'values (1::bigint, true, 1)', 'one that has run for 10 years is one slot');
select queue.defer('short', queue => 'long') from generate_series(1, 100) \g /dev/null
select is((select slots from queue.autoscale_hint() where queue = 'long'), 101, 'jobs that waited beside it may take as long');
select count(*) from queue.fetch(:worker, '{long}', 100) \g /dev/null
update queue.active_job set claimed_at = claimed_at - interval '1 second' where id > :long;
select queue.finish_many(jsonb_agg(jsonb_build_object('id', aj.id, 'claim', aj.claim, 'outcome', 'succeeded'))) from queue.active_job aj where aj.id > :long \g /dev/null
select results_eq($$select run_for < '10 s', slots from queue.autoscale_hint() where queue = 'long'$$, 'values (true, 1)', 'unless others have ended: then these show how long one takes');
select queue.done(array[:long]) \g /dev/null
select results_eq($$select per_second, slots from queue.autoscale_hint() where queue = 'long'$$, 'values (0.337, 2)', 'nor was it more than one slot of the last five minutes when it ends');
select lives_ok($$select from queue.autoscale_hint('4000 years')$$, 'in any time');
select throws_ok($$select from queue.autoscale_hint('4001 years')$$, '22023', null, 'up to 4,000 years');
select queue.delete(array_agg(id)) from queue.jobs where queue = 'long' \g /dev/null

-- Failures: jobs that failed, and attempts
select queue.defer('f', queue => 'fails', options => '{"retry": {"max_attempts": 2}}') as id, queue.defer('f', queue => 'fails') as gone \gset
select queue.finish_many(jsonb_build_array(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', 'failed'))) from queue.fetch(:worker, '{fails}', 1) f \g /dev/null
select queue.finish_many(jsonb_build_array(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', 'failed'))) from queue.fetch(:worker, '{fails}', 1) f \g /dev/null
select queue.cancel(:gone) \g /dev/null
select results_eq($$select failed, failed_5m, failures_5m, cancelled_5m, failed_1h, failures_1h, cancelled_1h, ready from queue.stats() where queue = 'fails'$$,
                  'values (1::bigint, 1::bigint, 2::bigint, 1::bigint, 1::bigint, 2::bigint, 1::bigint, 0::bigint)', 'one job failed, two attempts did');
update queue.finished set finished_at = finished_at - interval '1 day' where id = :id;
update queue.attempt set finished_at = finished_at - interval '10 minutes' where job_id = :id;
select results_eq($$select failed, failed_5m, failures_5m, failed_1h, failures_1h from queue.stats() where queue = 'fails'$$,
                  'values (1::bigint, 0::bigint, 0::bigint, 0::bigint, 2::bigint)', 'it is kept, but not in the windows');
select is((select failed from queue.metrics where queue = 'fails'), 1::bigint, 'in the metrics too');
update queue.attempt set finished_at = finished_at - interval '1 day' where job_id = :id;
select queue.delete(array[:id, :gone]) \g /dev/null
select is_empty($$select * from queue.stats() where queue = 'fails'$$, 'a queue without jobs has no row');

-- metrics, in the form for postgres_exporter
select is((select string_agg(format('%s %s', a.attname, format_type(a.atttypid, null)), ', ' order by a.attnum) from pg_attribute a where a.attrelid = 'queue.metrics'::regclass and format_type(a.atttypid, null) not in ('bigint', 'integer', 'double precision')),
          'queue text', 'one label, the rest numbers');
select is_empty('select * from queue.metrics m where m is null or not m is not null', 'and none is NULL');
select queue.register_worker('some', '{q,mov*}', '{"dead_after": "30 min"}') \g /dev/null
select is((select string_agg(concat_ws(' ', queue, workers), ', ' order by queue) from queue.metrics), 'fails 1, long 1, moved 2, q 2, win 1', 'workers by the queues that they serve');

-- All of it in a read-only transaction
begin transaction isolation level repeatable read read only;
select lives_ok('select from queue.stats(), queue.metrics, queue.autoscale_hint(), queue.health()', 'all of it in a read-only transaction');
commit;
select is_empty('select * from queue.check()', 'in order');
select * from finish();
