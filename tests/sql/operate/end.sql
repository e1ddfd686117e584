-- fail_jobs and done.

select plan(32);

\ir change.helpers.psql

set pgdefer.notify = off;

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- Each state
call pg_temp.make_zoo();
select is(pg_temp.says('queue.fail_jobs(pg_temp.ids(), ''by hand'')'), 'failed, failed, failed, failed, failed, failed, failed, failed, failed, failed, QJ003, QJ003, QJ003', 'fail_jobs: unfinished jobs');
select is(pg_temp.states(), concat(repeat('failed operator, ', 10), 'succeeded, failed attempts, cancelled aborted'), 'is failed');
select is((select array_agg(distinct j.error) from pg_temp.zoo z join queue.jobs j on j.id = z.id where j.reason = 'operator'), '{by hand}', 'with the message');
select is_empty('select * from queue.check()', 'in order');

call pg_temp.make_zoo();
select is(pg_temp.says('queue.done(pg_temp.ids())'), 'succeeded, succeeded, succeeded, succeeded, succeeded, succeeded, succeeded, succeeded, succeeded, succeeded, QJ003, succeeded, succeeded', 'done: what has not succeeded');
select is(pg_temp.states(), concat(repeat('succeeded operator, ', 10), 'succeeded, succeeded operator, succeeded operator'), 'has succeeded');
select is_empty('select * from queue.check()', 'in order');
select is(pg_temp.says('queue.done(pg_temp.ids())'), 'QJ003' || repeat(', QJ003', 12), 'once');

-- A mixed list
select queue.defer('t') as a, queue.defer('t') as b, queue.defer('t', queue => 'mixed', priority => 2000) as running \gset
select claim from queue.fetch(:worker, '{mixed}') \gset
select results_eq(format('select * from queue.done(array[%s, 424242, %s, %s, %s])', :b, :running, :a, :b),
                  format('values (%s::bigint, ''succeeded'', null), (424242, null, ''QJ001''), (%s, ''succeeded'', null), (%s, ''succeeded'', null)', :b, :running, :a), 'a row for each id, in the order given, each once');
select results_eq(format('select * from queue.delete(array[%s, 424242, %s])', :b, :a), format('values (%s::bigint, ''deleted'', null), (424242, null, ''QJ001''), (%s, ''deleted'', null)', :b, :a), 'deleted ones too');

-- fail_jobs
select queue.defer('t', options => '{"retry": {"max_attempts": 10}}', priority => 4000) as running, queue.defer('t', options => '{"retry": {"max_attempts": 10}}') as ready, queue.defer('t', priority => 4000) as told \gset
select queue.defer('t', needs => array[:running]) as dependent \gset
select max(claim) as claim from queue.fetch(:worker, null, 2) \gset
select queue.cancel(:told, true), queue.heartbeat(:worker) \g /dev/null
select is(pg_temp.says(format('queue.fail_jobs(array[%s, %s, %s], ''no good'')', :running, :ready, :told)), 'failed, failed, failed', 'a running job, a ready one, one that was told to abort');
select results_eq(format('select state, reason, error, attempts, failures from queue.jobs where id in (%s, %s, %s) order by id', :running, :ready, :told),
                  $$values ('failed', 'operator', 'no good', 1, 1), ('failed', 'operator', 'no good', 0, 0), ('failed', 'operator', 'no good', 1, 1)$$, 'have failed for good, whatever their policy');
select results_eq(format('select outcome, error from queue.attempts where job_id = %s', :running), $$values ('failed', 'no good')$$, 'the attempt under way too');
select is(pg_temp.state(:dependent), 'upstream_failed', 'dependents see it');
select is(test.refusal(format('select queue.succeed(%s, %s)', :running, :claim)), 'QJ002', 'the claim is lost');
select is((select count(*)::integer from queue.heartbeat(:worker) h where h.id in (:running, :told)), 2, 'the worker is told, once for each');
select is_empty('select * from queue.check()', 'in order');
select queue.fail_jobs(array[:dependent]) \g /dev/null
select is((select concat(state, error) from queue.jobs where id = :dependent), 'failed', 'without a message');
select is((select string_agg(r.outcome, '') from queue.retry(array[:running]) r), 'ready', 'retry brings it back');

-- done
select queue.defer('t', priority => 5000, lock => 'done', concurrency_key => 'done', concurrency_limit => 1) as running, queue.defer('t', lock => 'done') as blocked, queue.defer('t', concurrency_key => 'done', concurrency_limit => 1) as full \gset
select queue.defer('t', needs => array[:running]) as dependent \gset
select claim from queue.fetch(:worker) \gset
select is(pg_temp.says(format('queue.done(array[%s])', :running)), 'succeeded', 'a running job');
select is(pg_temp.job(:running), 'succeeded operator 1 0 0 1', 'has succeeded');
select is(concat_ws(', ', pg_temp.state(:blocked), pg_temp.state(:full), pg_temp.state(:dependent)), 'ready, ready, ready', 'releases its lock, slot and dependents');
select is(test.refusal(format('select queue.fail(%s, %s, ''late'')', :running, :claim)), 'QJ002', 'the claim is lost');
select is((select string_agg(h.reason, ' ') from queue.heartbeat(:worker) h), 'done', 'the worker is told');
select queue.defer('t', options => '{"retain": "1 hour"}') as need \gset
select queue.defer('t', needs => array[:need]) as dependent \gset
select queue.fail_jobs(array[:need], 'once') \g /dev/null
update queue.finished set finished_at = finished_at - interval '1 day', purge_at = purge_at - interval '1 day' where id = :need;
select is(pg_temp.state(:dependent), 'upstream_failed', 'a need that has failed');
select queue.done(array[:need]) \g /dev/null
select is(pg_temp.state(:need) || ', ' || pg_temp.state(:dependent), 'succeeded operator, ready', 'and is done by hand releases its dependent');
select ok((select f.finished_at > now() - interval '1 minute' and f.purge_at - f.finished_at = '1 hour' and f.error = 'once' from queue.finished f where f.id = :need), 'it is kept from then on, with its last error');
select is_empty('select * from queue.check()', 'in order');

-- Beside a running job that was told to abort
select queue.defer('t', priority => 6000, lock => 'told') as told, queue.defer('t', priority => 6000, lock => 'other') as other \gset
select f.id from queue.fetch(:worker, max_jobs => 2) f \g /dev/null
select queue.cancel(:told, abort => true) \g /dev/null
select is((select string_agg(h.reason, ' ') from queue.heartbeat(:worker) h), 'cancelled', 'a job that its worker was told to abort');
select is((select string_agg(d.outcome, ' ') from queue.done(array[:other, :told]) d), 'succeeded succeeded', 'is done with another one');
select is((select string_agg(h.reason, ' ') from queue.heartbeat(:worker) h), 'done done', 'the worker is told of both');
select is_empty('select * from queue.check()', 'in order');

select * from finish();
