-- delete and delete_queue.

select plan(65);

\ir change.helpers.psql

set pgdefer.notify = off;

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- Each state
call pg_temp.make_zoo();
select is(pg_temp.says('queue.delete(pg_temp.ids())'), 'QJ003' || repeat(', deleted', 12), 'delete: what does not run');
select is(pg_temp.states(), 'running' || repeat(', gone', 12), 'is gone');
select is_empty('select * from queue.check()', 'in order');
select is(pg_temp.says('queue.delete(pg_temp.ids())'), 'QJ003' || repeat(', QJ001', 12), 'once');
call pg_temp.make_zoo();
select is(pg_temp.says('queue.delete(pg_temp.ids(), force => true)'), 'deleted' || repeat(', deleted', 12), 'with force what runs too');
select is_empty('select * from queue.check()', 'in order');
select is_empty($$select j.id from queue.attempt a join pg_temp.zoo j on j.id = a.job_id union all select s.id from queue.job_override s join pg_temp.zoo z on z.id = s.id$$, 'without a trace');

-- delete: needs
select queue.defer('need') as need \gset
select queue.defer('dependent', needs => array[:need]) as id \gset
select queue.defer('dependent of that', needs => array[:id]) as last \gset
select is((select concat_ws(' ', d.outcome, d.error) from queue.delete(array[:need]) d), format('ready, needed by job %s QJ003', :id), 'a need of an unfinished job is not deleted');
select is(pg_temp.says(format('queue.delete(array[%s, %s])', :need, :id)), 'QJ003, QJ003', 'nor with that, because another needs it in turn');
select is((select count(*)::integer from queue.jobs where id in (:need, :id, :last)), 3, 'nothing has gone');
select is(pg_temp.says(format('queue.delete(array[%s, %s, %s])', :need, :id, :last)), 'deleted, deleted, deleted', 'all of them together go');
select is_empty('select * from queue.check()', 'in order');
select queue.defer('need') as need \gset
select queue.defer('t', needs => array[:need]) as block, queue.defer('t', needs => array[:need], options => '{"on_need_failure": "proceed"}') as proceed \gset
select is(pg_temp.says(format('queue.delete(array[%s], true)', :need)), 'deleted', 'with force');
select is(pg_temp.state(:block) || ', ' || pg_temp.state(:proceed), 'upstream_failed, ready', 'its dependents count it as failed');
select is_empty('select * from queue.check()', 'in order');
select queue.defer('need') as need, queue.defer('other need', scheduled_at => '2999-01-01Z') as other \gset
select queue.defer('t', needs => array[:need, :other]) as id \gset
select pg_temp.run(:need, 'succeeded') \g /dev/null
select is((select concat_ws(' ', d.outcome, d.error) from queue.delete(array[:need]) d), format('succeeded, needed by job %s QJ003', :id), 'a need that has succeeded');
select is(pg_temp.says(format('queue.delete(array[%s], true)', :need)), 'deleted', 'goes with force');
select is(pg_temp.state(:id), 'waiting', 'and has still succeeded');
select queue.done(array[:other]) \g /dev/null
select is(pg_temp.state(:id), 'ready', 'so that its dependent continues');
select is(pg_temp.run(:id, 'succeeded'), 'succeeded', 'and ends');
select queue.delete(array[:id]) \g /dev/null
select is_empty(format('select * from queue.need where job_id = %s', :id), 'with its needs');

-- delete: everything that the jobs held
select queue.defer('t', queue => 'd', lock => 'd') as a, queue.defer('t', queue => 'd', lock => 'd') as b, queue.defer('t', queue => 'd', concurrency_key => 'd', concurrency_limit => 1) as c,
  queue.defer('t', queue => 'd', concurrency_key => 'd', concurrency_limit => 1) as d \gset
select max(f.claim) as claim, count(*) from queue.fetch(:worker, '{d}', 10) f \gset
select is(:count, 2, 'two run');
select is(pg_temp.says(format('queue.delete(array[%s, %s])', :a, :c)), 'QJ003, QJ003', 'they are not deleted');
select is(pg_temp.says(format('queue.delete(array[%s, %s], force => true)', :a, :c)), 'deleted, deleted', 'but with force');
select is(pg_temp.state(:b) || ', ' || pg_temp.state(:d), 'ready, ready', 'their lock and slot are free');
select is_empty('select * from queue.check()', 'in order');
select is(test.refusal(format('select queue.succeed(%s, %s)', :a, :claim)), 'QJ002', 'the claims are lost: succeed');
select is(test.refusal(format('select queue.fail(%s, %s, ''late'')', :a, :claim)), 'QJ002', 'fail');
select is(test.refusal(format('select queue.extend(%s, %s, ''1 s'')', :a, :claim)), 'QJ002', 'extend');
select is(test.refusal(format('select queue.release(%s, %s)', :a, :claim)), 'QJ002', 'release');
select is((select string_agg(error, ' ') from queue.finish_many(format('[{"id": %s, "claim": %s, "outcome": "succeeded"}, {"id": %s, "claim": %s, "outcome": "failed"}]', :a, :claim, :c, :claim)::jsonb)), 'QJ002 QJ002', 'finish_many');
select is((select string_agg(h.id || h.reason, ' ') from queue.heartbeat(:worker) h where h.id in (:a, :c)), :a || 'deleted ' || :c || 'deleted', 'the worker is told');
select queue.defer('t', queueing_lock => 'gone') as id \gset
select queue.delete(array[:id]) \g /dev/null
select is(test.refusal('select queue.defer(''t'', queueing_lock => ''gone'')'), 'accepted', 'a queueing lock is free when its job is deleted');
select queue.defer('t', options => '{"expires_at": "2999-01-01Z", "timeout": "1 h"}') as id, queue.defer('t', priority => 3000, options => '{"timeout": "1 h"}') as leased \gset
select is((select array_agg(f.id) from queue.fetch(:worker) f), array[:leased]::bigint[], 'one with an expiry, one with a lease');
select is(pg_temp.says(format('queue.delete(array[%s, %s], true)', :id, :leased)), 'deleted, deleted', 'are deleted');
select is_empty(format('select id from queue.expiry where id = %s union all select id from queue.lease where id = %s', :id, :leased), 'with them');
select queue.defer('t', options => '{"on_limit": "discard"}', lock => 'x', concurrency_key => 'x', concurrency_limit => 1) as a,
  queue.defer('t', lock => 'x', concurrency_key => 'x', concurrency_limit => 1) as b, queue.defer('t', options => '{"on_limit": "discard"}', lock => 'x', concurrency_key => 'x', concurrency_limit => 1) as c \gset
select is(pg_temp.says(format('queue.delete(array[%s, %s, %s], true)', :b, :a, :c)), 'deleted, deleted, deleted', 'of which one could be discarded meanwhile');
select is_empty('select * from queue.check()', 'in order');
begin;
select queue.defer('t') as id \gset
select is(pg_temp.says(format('queue.delete(array[%s], true)', :id)), 'QJ003', 'an uncommitted job is not deleted');
select is(pg_temp.says(format('queue.move(array[%s], ''m'')', :id)), 'QJ003', 'nor moved');
commit;
select is(pg_temp.says(format('queue.delete(array[%s], true)', :id)), 'deleted', 'and then it is');

-- delete_queue
select is(queue.create_queue('gone'), true, 'a new queue');
select is(queue.create_queue('gone'), false, 'once');
select is(queue.delete_queue('gone'), 0, 'goes, with no job in it');
select is_empty('select * from queue.queues where name = ''gone''', 'without a trace');
select queue.create_queue('gone', paused => true) \g /dev/null
select queue.defer('t', queue => 'gone') as a, queue.defer('t', queue => 'gone') as b, queue.defer('t', queue => 'gone', lock => 'g') as c, queue.defer('t', queue => 'gone', lock => 'g') as d,
  queue.defer('t', queue => 'stays', lock => 'g') as other \gset
select is((select count(*)::integer from queue.fetch(:worker, '{gone}', 10)), 0, 'created paused, it gives no jobs');
select is(queue.resume('gone'), 4, 'resume returns the number of released jobs');
select is((select count(*)::integer from queue.fetch(:worker, '{gone}', 1)), 1, 'and it gives');
select throws_ok('select queue.delete_queue(''gone'')', 'QJ006', 'queue not empty', 'a queue with unfinished jobs is not deleted');
select is(test.refusal('select queue.delete_queue(''gone'')'), 'QJ006', 'a hint says what to do');
select queue.configure_queue('gone', '{"max_running": 2, "rate": {"limit": 100, "per": "1 minute"}}') \g /dev/null
select queue.move(array[:b], 'stays') \g /dev/null
select queue.defer('t', needs => array[:a]) as dependent \gset
select is(queue.delete_queue('gone', true), 3, 'with force it is, running ones too');
select is((select l.ids from queue.audit l order by l.id desc limit 1), array[:a, :c, :d]::bigint[], 'the audit names the jobs');
select is_empty($$select name from queue.queues where name = 'gone' union all select queue from queue.lane where queue = 'gone' union all select key from queue.semaphore where key = 'qgone'
  union all select key from queue.rate_start where key = 'qgone' union all select queue from queue.pause where queue = 'gone'$$, 'all of it');
select is(concat_ws(', ', pg_temp.state(:b), pg_temp.state(:other), pg_temp.state(:dependent)), 'ready, ready, upstream_failed', 'a job that was moved stays, a lock is free, a dependent sees it');
select is_empty('select * from queue.check()', 'in order');
select queue.defer('t', queue => 'gone') as id, queue.defer('t', queue => 'gone') as id2, queue.defer('t', scheduled_at => '2999-01-01Z') as later \gset
select is((select count(*)::integer from queue.fetch(:worker, '{gone}', 10)), 2, 'a job deferred later creates it again');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.queue = 'gone' \g /dev/null
select queue.defer('t', queue => 'stays', needs => array[:id, :later]) as dependent \gset
select is(test.refusal('select queue.delete_queue(''gone'')'), 'QJ006', 'a job that another queue''s job needs keeps it');
select queue.cancel(:dependent) \g /dev/null
select is(queue.delete_queue('gone'), 2, 'finished jobs do not');

-- A queue that exists only by its pause, and a schedule whose runs wait for its end
select queue.schedule('paused', '* * * * *', 't', options => '{"queue": "pause only"}'), queue.pause('pause only') \g /dev/null
update queue.schedule set next_run_at = next_run_at - interval '1 minute', due_at = clock_timestamp() where name = 'paused';
select queue.tick() \g /dev/null
select is((select concat_ws(', ', q.name, s.reason) from queue.queues q, queue.schedules s where q.name = 'pause only' and s.name = 'paused'), 'pause only, paused', 'a queue that is only paused is listed');
select is(queue.delete_queue('pause only'), 0, 'and goes');
select is_empty($$select from queue.queues where name = 'pause only'$$, 'with its pause');
select queue.tick() \g /dev/null
select is((select s.reason from queue.schedules s where s.name = 'paused'), null, 'its schedule goes on at once');
select queue.unschedule('paused') \g /dev/null
select queue.delete_queue('pause only', true) \g /dev/null

-- Many jobs that an earlier call has locked, and nobody holds
select count(queue.defer('t', queue => 'many')) from generate_series(1, 300) \g /dev/null
select queue.tick() \g /dev/null
select test.refusal('select queue.delete_queue(''many'')') \g /dev/null
select pg_current_xact_id() as before \gset
select is(queue.delete_queue('many', true), 300, 'are deleted');
-- tests in other databases of the server take some, too
select cmp_ok(pg_current_xact_id()::text::bigint - :before, '<', 200::bigint, 'without a transaction for each');
select is_empty('select * from queue.check()', 'in order');

select * from finish();
