-- Needs: modes, failures and their retries, locks, slots and times beside them, retention.
-- The full table is in tests/py/races/test_needs_oracle.py, the races are in admit/needs.*.spec.

select plan(130);

\ir needs.helpers.psql

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- Arguments
select is(pg_temp.refusal('select queue.defer(''t'', needs => array[null]::bigint[])'), '22023', 'NULL is no need');
select is(pg_temp.refusal('select queue.defer(''t'', needs => ''{{1},{2}}'')'), '22023', 'nor is a list of lists one');
select is(pg_temp.refusal('select queue.defer(''t'', needs => array[123456])'), 'QJ001 id: 123456', 'a need must be there');
select is(pg_temp.refusal('select queue.defer_many(''[{"task": "t", "needs": [123456]}]'')'), 'QJ001 id: 123456', 'in a batch too');
select is(pg_temp.refusal('select queue.defer(''t'', options => ''{"needs_mode": "some"}'')'), '22023', 'an unknown mode');
select is(pg_temp.refusal('select queue.defer(''t'', options => ''{"on_need_failure": "stop"}'')'), '22023', 'an unknown behaviour');
select is_empty('select from queue.job', 'nothing of that was deferred');
select pg_temp.defer('a') \g /dev/null
select queue.defer('d', needs => array[pg_temp.id('a'), pg_temp.id('a')]) \g /dev/null
select is((select j.needs from queue.jobs j where j.task = 'd'), array[pg_temp.id('a')], 'a need counts once');
select is(pg_temp.states(), 'a:ready d:waiting', 'it waits');
select is(queue.why(pg_temp.id('d')), format('it needs job %s (ready)', pg_temp.id('a')), 'and why says for what');
select is((select count(*) from queue.fetch(:worker, max_jobs => 10)), 1::bigint, 'fetch gives the need alone');
select is(pg_temp.finish('a'), 'succeeded', 'which succeeds');
select is(pg_temp.run('d'), 'succeeded', 'then the dependent runs');
call pg_temp.clear();

-- A need in the same transaction, also if it runs, ends or is held before it is admitted
begin;
select pg_temp.defer('a'), pg_temp.defer('b', 'a'), pg_temp.defer('c', 'a b') \g /dev/null
commit;
select is(pg_temp.states(), 'a:ready b:waiting c:waiting', 'jobs of one transaction');
select is(pg_temp.run('a'), 'succeeded', 'a');
select is(pg_temp.states(), 'a:succeeded b:ready c:waiting', 'one need of two is not enough');
select is(pg_temp.run('b'), 'succeeded', 'b');
select is(pg_temp.run('c'), 'succeeded', 'c');
select pg_temp.defer('d', 'a b') \g /dev/null
select is(pg_temp.states(), 'a:succeeded b:succeeded c:succeeded d:ready', 'succeeded needs block nothing');
call pg_temp.clear();

-- Modes and failures
select pg_temp.defer(t) from unnest('{a,b}'::text[]) t \g /dev/null
select pg_temp.defer(m || '_' || f, 'a b', m, f) from unnest('{all,any}'::text[]) m, unnest('{block,proceed}'::text[]) f \g /dev/null
select is(pg_temp.states(), 'a:ready b:ready all_block:waiting all_proceed:waiting any_block:waiting any_proceed:waiting', 'all wait');
select is(pg_temp.run('a', 'failed', '{"error": "e"}'), 'failed', 'one need fails');
select is(pg_temp.states(), 'a:failed b:ready all_block:upstream_failed all_proceed:waiting any_block:waiting any_proceed:ready',
          'under any and block one failure dooms nothing; under any and proceed it lets go');
select is(queue.why(pg_temp.id('all_block')), format('a need failed: job %s (failed: retry it)', pg_temp.id('a')), 'why says which failed');
select is(queue.cancel(pg_temp.id('b')), 'cancelled', 'the other is cancelled');
select is(pg_temp.states(), 'a:failed b:cancelled all_block:upstream_failed all_proceed:ready any_block:upstream_failed any_proceed:ready', 'all have failed');
select is((select r.outcome from queue.retry(array[pg_temp.id('b')]) r), 'ready', 'it is retried');
select is(pg_temp.states(), 'a:failed b:ready all_block:upstream_failed all_proceed:waiting any_block:waiting any_proceed:ready',
          'its dependents wait again, also one that it had let go and that has not started');
select is(pg_temp.run('b'), 'succeeded', 'and succeeds');
select is(pg_temp.states(), 'a:failed b:succeeded all_block:upstream_failed all_proceed:ready any_block:ready any_proceed:ready', 'one has succeeded');
select is(queue.hold(pg_temp.id('any_block')), 'held', 'a dependent is held');
select is((select r.outcome from queue.retry(array[pg_temp.id('a')]) r), 'ready', 'the first is retried');
select is(pg_temp.run('a'), 'succeeded', 'and succeeds');
select is(pg_temp.states(), 'a:succeeded b:succeeded all_block:ready all_proceed:ready any_block:held any_proceed:ready', 'all go');
call pg_temp.clear();

-- A succeeded job is retried while its needs have failed
select pg_temp.defer('a'), pg_temp.defer('b', 'a') \g /dev/null
select is(pg_temp.run('a', 'failed'), 'failed', 'a need fails');
select is((select d.outcome from queue.done(array[pg_temp.id('b')]) d), 'succeeded', 'its dependent is done by hand');
select pg_temp.defer(m || '_' || f, 'b', m, f) from unnest('{all,any}'::text[]) m, unnest('{block,proceed}'::text[]) f \g /dev/null
select is(pg_temp.states(), 'a:failed b:succeeded all_block:ready all_proceed:ready any_block:ready any_proceed:ready', 'which lets others go');
select is((select r.outcome from queue.retry(array[pg_temp.id('b')]) r), 'upstream_failed', 'retried, it can not run');
select is(pg_temp.states(), 'a:failed b:upstream_failed all_block:upstream_failed all_proceed:ready any_block:upstream_failed any_proceed:ready',
          'nor can those that it had let go');
select is((select r.outcome from queue.retry(array[pg_temp.id('a')]) r), 'ready', 'the need is retried');
select is(pg_temp.states(), 'a:ready b:waiting all_block:waiting all_proceed:waiting any_block:waiting any_proceed:waiting', 'all wait again');
call pg_temp.clear();

-- held counts as failed, but only while it lasts
select pg_temp.defer('a', more => '{"held": true}'), pg_temp.defer('b') \g /dev/null
select pg_temp.defer('d', 'a b'), pg_temp.defer('p', 'a', failure => 'proceed'), pg_temp.defer('e', 'd') \g /dev/null
select is(pg_temp.states(), 'a:held b:ready d:upstream_failed p:ready e:upstream_failed', 'a held need has failed');
select is(queue.unhold(pg_temp.id('a')), 'ready', 'let go');
select is(pg_temp.states(), 'a:ready b:ready d:waiting p:waiting e:waiting', 'it is pending again');
select is(queue.hold(pg_temp.id('b')), 'held', 'the other is held');
select is(pg_temp.states(), 'a:ready b:held d:upstream_failed p:waiting e:upstream_failed', 'and failure spreads recursively');
select is(queue.cancel(pg_temp.id('e')), 'cancelled', 'a dependent may be cancelled meanwhile');
select is(queue.unhold(pg_temp.id('b')), 'ready', 'let go');
select is(pg_temp.states(), 'a:ready b:ready d:waiting p:waiting e:cancelled', 'and stays so');
call pg_temp.clear();

-- Deferred together with its dependent
select pg_temp.defer('a', more => '{"held": true}') as a \gset
select queue.defer('d', lock => 'l', needs => array[:a]), queue.defer('any', lock => 'l', needs => array[:a], options => '{"needs_mode": "any"}') \g /dev/null
select is(pg_temp.states(), 'a:held d:upstream_failed any:upstream_failed', 'a held need counts as failed also for jobs with a lock');
call pg_temp.clear();

-- The state decides, never counters: failed, retried, succeeded is one success
select pg_temp.defer(t) from unnest('{a,b}'::text[]) t \g /dev/null
select pg_temp.defer('d', 'a b') \g /dev/null
select is(pg_temp.run('a', 'failed', '{"options": {"retry_in": 0}}'), 'ready', 'a need fails and is retried');
select is(pg_temp.run('a', 'failed', '{"options": {"retryable": false}}'), 'failed', 'fails for good');
select is((select r.outcome from queue.retry(array[pg_temp.id('a')]) r), 'ready', 'is retried by hand');
select is(pg_temp.run('a'), 'succeeded', 'and succeeds');
select is((select r.outcome from queue.retry(array[pg_temp.id('a')], true) r), 'ready', 'and once more');
select is(pg_temp.run('a'), 'succeeded', 'and succeeds');
select is(pg_temp.states(), 'a:succeeded b:ready d:waiting', 'the other need is still needed');
select is((select r.outcome from queue.done(array[pg_temp.id('b')]) r), 'succeeded', 'an operator marks it as done');
select is(pg_temp.states(), 'a:succeeded b:succeeded d:ready', 'that counts');
select is((select r.outcome from queue.retry(array[pg_temp.id('b')], true) r), 'ready', 'it is run again');
select is(pg_temp.states(), 'a:succeeded b:ready d:waiting', 'the dependent has not started: it waits again');
select is(pg_temp.run('b', 'none'), 'running', 'it runs');
select is(pg_temp.run('d', 'none'), 'not ready', 'and the dependent does not');
call pg_temp.clear();

-- Many needs, ending in any order
select pg_temp.defer('n' || n) from generate_series(1, 40) n \g /dev/null
select queue.defer('d', needs => array(select j.id from queue.jobs j)) \g /dev/null
select queue.defer('p', needs => array(select j.id from queue.jobs j where j.task <> 'd'), options => '{"on_need_failure": "proceed"}') \g /dev/null
select pg_temp.states() \g /dev/null
select results_eq('select w.need_id from queue.waiting w', $$select pg_temp.id('n40') from generate_series(1, 2)$$, 'a job is held by its last need');
select is(length(queue.why(pg_temp.id('d'))) between 300 and 500 and queue.why(pg_temp.id('d')) like 'it needs job % and more', true, 'why names the first twenty');
select is((select count(*) from (select pg_temp.run('n' || n) as said from generate_series(1, 40) n where n % 7 <> 5 order by n * 17 % 41) r where r.said = 'succeeded'), 34::bigint, '34 succeed, in disorder');
select is((select string_agg(j.state, ' ') from queue.jobs j where j.task in ('d', 'p')), 'waiting waiting', 'they wait for six more');
select is_empty('select * from queue.check()', 'held by one that holds them');
select is((select count(*) from (select pg_temp.run('n' || n, 'failed') as said from generate_series(1, 40) n where n % 7 = 5 order by n * 17 % 41) r where r.said = 'failed'), 6::bigint, 'these fail');
select is((select string_agg(j.state, ' ' order by j.id) from queue.jobs j where j.task in ('d', 'p')), 'upstream_failed ready', 'which decides both');
select is((select count(*) from queue.retry(array(select j.id from queue.jobs j where j.state = 'failed' order by j.id limit 5)) r where r.error is null), 5::bigint, 'five are retried');
select is((select string_agg(j.state, ' ' order by j.id) from queue.jobs j where j.task in ('d', 'p')), 'upstream_failed waiting', 'one failure is enough');
select is((select count(*) from queue.retry_failed() r where r.error is null), 1::bigint, 'the last too');
select is((select string_agg(j.state, ' ' order by j.id) from queue.jobs j where j.task in ('d', 'p')), 'waiting waiting', 'that leaves none');
select is((select count(*) from (select pg_temp.run(j.task) as said from queue.jobs j where j.state = 'ready') r where r.said = 'succeeded'), 6::bigint, 'they succeed');
select is((select string_agg(j.state, ' ' order by j.id) from queue.jobs j where j.task in ('d', 'p')), 'ready ready', 'and both go');
call pg_temp.clear();

-- Under any, the last one fails first: the next pending one holds the job, so not all needs are read again.
select pg_temp.defer('n' || n) from generate_series(1, 9) n \g /dev/null
select queue.defer('d', needs => array(select j.id from queue.jobs j), options => '{"needs_mode": "any"}') \g /dev/null
select pg_temp.states() \g /dev/null
select is(pg_temp.run('n5', 'failed') || pg_temp.run('n8', 'failed') || pg_temp.run('n9', 'failed'), 'failedfailedfailed', 'some fail, the last one, too');
select pg_temp.states() \g /dev/null
select is((select w.need_id from queue.waiting w), pg_temp.id('n7'), 'the next pending one holds the job');
update queue.waiting w set need_id = pg_temp.id('n9');
select is(row(c.ask, c.freed, c.freed_at), row(null::bigint[], array[pg_temp.id('d')], array[pg_temp.id('n9')]), 'admission has looked for that one alone') from queue._dependents_to_check(array[pg_temp.id('n9')]) c;
select is(queue._find_next_need(array[pg_temp.id('d')], array[pg_temp.id('n9')]), null, 'past those that have failed');
select is(array(select pg_temp.run('n' || n, 'failed') from unnest('{7,6,4,3,2}'::integer[]) n), array_fill('failed'::text, '{5}'), 'others fail');
select is(pg_temp.states() ~ 'd:waiting', true, 'one is left');
select is(pg_temp.run('n1', 'failed'), 'failed', 'it fails, too');
select is(pg_temp.states() ~ 'd:upstream_failed', true, 'that was the last hope');
select is_empty('select * from queue.check()', 'sound');
select is(array(select r.outcome from queue.retry_failed() r), array_fill('ready'::text, '{9}'), 'all are retried');
select is(pg_temp.run('n3'), 'succeeded', 'one succeeds');
select is(pg_temp.states() ~ 'd:ready', true, 'that is enough');
call pg_temp.clear();

-- A need that holds a lock, and a dependent that holds its lock while it waits
select pg_temp.defer('a') \g /dev/null
select queue.defer('d', lock => 'l', needs => array[pg_temp.id('a')]), queue.defer('e', lock => 'l') \g /dev/null
select is(pg_temp.states(), 'a:ready d:waiting e:blocked', 'an ordered lock keeps the order while its first job waits for needs');
select is(pg_temp.run('a'), 'succeeded', 'the need ends');
select is(pg_temp.states(), 'a:succeeded d:ready e:blocked', 'the first goes');
select is((select r.outcome from queue.retry(array[pg_temp.id('a')], true) r), 'ready', 'the need is run again');
select is(pg_temp.states(), 'a:ready d:waiting e:blocked', 'the first waits again');
select is(pg_temp.run('a') || pg_temp.run('d'), 'succeededsucceeded', 'both end');
select is(pg_temp.states(), 'a:succeeded d:succeeded e:ready', 'and the second goes');
call pg_temp.clear();

-- A time, a slot and needs
select pg_temp.defer('a') \g /dev/null
select queue.defer('d', needs => array[pg_temp.id('a')], scheduled_at => clock_timestamp() + interval '1 hour') \g /dev/null
select queue.defer('k1', concurrency_key => 'k', concurrency_limit => 1), queue.defer('k2', needs => array[pg_temp.id('a')], concurrency_key => 'k', concurrency_limit => 1) \g /dev/null
select is(pg_temp.states(), 'a:ready d:waiting k1:ready k2:waiting', 'needs come first');
select is(pg_temp.run('a'), 'succeeded', 'the need ends');
select is(pg_temp.states(), 'a:succeeded d:scheduled k1:ready k2:blocked', 'then the time and the slot');
select is((select r.outcome from queue.retry(array[pg_temp.id('a')], true) r), 'ready', 'the need is run again');
select is(pg_temp.states(), 'a:ready d:waiting k1:ready k2:waiting', 'out of every gate they go back to wait');
select is(pg_temp.run('a', 'failed'), 'failed', 'the need fails');
select is(pg_temp.states(), 'a:failed d:upstream_failed k1:ready k2:upstream_failed', 'and they with it');
select is(pg_temp.run('k1'), 'succeeded', 'the slot is free');
call pg_temp.clear();

-- Retention keeps the needs of unfinished jobs, and their states are known afterwards
select pg_temp.defer('a', more => '{"retain": "1 hour"}'), pg_temp.defer('f', more => '{"retain": "1 hour"}'), pg_temp.defer('x', more => '{"retain": "1 hour"}') \g /dev/null
select pg_temp.defer('d', 'a') \g /dev/null
select pg_temp.defer('e', 'f') \g /dev/null
select is(pg_temp.run('a') || pg_temp.run('x') || pg_temp.run('f', 'failed'), 'succeededsucceededfailed', 'three end');
update queue.finished set purge_at = clock_timestamp() - interval '1 second', finished_at = finished_at - interval '1 hour 1 second';
select is(queue.prune(), 1, 'the one that nobody needs is pruned');
select is(pg_temp.states(), 'a:succeeded f:failed d:ready e:upstream_failed', 'the others are kept');
select is(pg_temp.refusal(format('select queue.defer(''t'', needs => array[%s])', pg_temp.id('a'))), format('QJ001 id: %s', pg_temp.id('a')),
          'but they can''t be needed again: their time has passed');
select is(pg_temp.run('d', 'failed') || queue.cancel(pg_temp.id('e')), 'failedcancelled', 'the dependents end');
select is(queue.prune(), 2, 'now they go');
select is((select count(*) from queue.retry(array[pg_temp.id('d'), pg_temp.id('e')]) r where r.error is null), 2::bigint, 'the dependents are retried');
select is(pg_temp.states(), 'd:ready e:upstream_failed', 'their needs are still known');
call pg_temp.clear();
select is_empty('select from queue.need', 'and forgotten with them');

-- Deleting
select pg_temp.defer('a'), pg_temp.defer('b') \g /dev/null
select pg_temp.defer('d', 'a'), pg_temp.defer('e', 'b'), pg_temp.defer('p', 'a', failure => 'proceed') \g /dev/null
select is(pg_temp.run('b'), 'succeeded', 'a need ends');
select is((select string_agg(coalesce(r.error, r.outcome), ' ') from queue.delete(array[pg_temp.id('a'), pg_temp.id('b')]) r), 'QJ003 QJ003', 'a needed job is not deleted');
select is((select string_agg(coalesce(r.error, r.outcome), ' ') from queue.delete(array[pg_temp.id('a'), pg_temp.id('b')], true) r), 'deleted deleted', 'but by force');
select is(pg_temp.states(), 'd:upstream_failed e:ready p:ready', 'one that had not succeeded counts as failed');
select is(queue.why(pg_temp.id('d')) like 'a need failed: job % (deleted: cancel this job, or end it by queue.done)', true, 'why says so');
call pg_temp.clear();

-- check() finds errors
select pg_temp.defer('a') \g /dev/null
select pg_temp.defer('d', 'a'), pg_temp.defer('e') \g /dev/null
select pg_temp.states() \g /dev/null
update queue.waiting set need_id = pg_temp.id('e');
select is((select problem from queue.check()), 'names a need that does not hold it', 'a wrong hint');
update queue.waiting set need_id = pg_temp.id('a'), reason = 'upstream_failed';
select results_eq('select problem from queue.check() order by 1', $$values ('names a need that does not hold it'), ('waits for needs although they do not hold it')$$, 'a wrong state');
update queue.waiting set reason = 'needs';
update queue.active_job set flags = flags & ~4096 where id = pg_temp.id('a');
select is((select problem from queue.check()), 'needed, but not marked as needed', 'a mark that is missing');
update queue.active_job set flags = flags | 4096 where id = pg_temp.id('a');
select is_empty('select * from queue.check()', 'sound again');
call pg_temp.clear();

-- Plans that were made while the tables were empty
vacuum analyze queue.need, queue.active_job, queue.finished, queue.waiting, queue.job_override;
discard plans;
select count(queue.defer('n')) from generate_series(1, 3000) \g /dev/null
select max(j.id) as some from queue.jobs j \gset
select queue.defer('w', needs => array[:some]) \g /dev/null
select pg_temp.states() is null as warmed \g /dev/null
select queue.defer('d', needs => array[j.id]) from queue.jobs j where j.task = 'n' \g /dev/null
select pg_temp.states() is null as warmed \g /dev/null
-- The numbers of index entries and table rows that a call reads. Of ticks it is the least of three: some do work that
-- is due only now and then.
create function pg_temp.read() returns bigint language sql as $$
  select sum(coalesce(pg_stat_get_xact_tuples_returned(c.oid), 0)) from pg_class c where c.relnamespace = 'queue'::regnamespace and c.relkind in ('r', 'i')
$$;
create function pg_temp.reads(call text) returns bigint language plpgsql as $$
declare
  v_before bigint := pg_temp.read();
begin
  execute call;
  return pg_temp.read() - v_before;
end $$;
select cmp_ok(pg_temp.reads(format('select queue.defer(''e'', needs => array[%s, %s])', :some, :some - 1)), '<', 100::bigint, 'a defer with needs reads only these');
create temp table tick_reads as select pg_temp.reads('select from queue.tick()') as n;
select queue.defer('e', needs => array[:some, :some - 1]) \g /dev/null
insert into tick_reads select pg_temp.reads('select from queue.tick()');
select queue.defer('e', needs => array[:some, :some - 1]) \g /dev/null
insert into tick_reads select pg_temp.reads('select from queue.tick()');
select cmp_ok((select min(n) from tick_reads), '<', 100::bigint, 'so does its admission');
select cmp_ok(pg_temp.reads(format('select from queue.hold(%s)', :some)), '<', 100::bigint, 'and the change of a need');
call pg_temp.clear();

-- A job that 3,500 need, on a slow server: the admission lock is not held until all have passed
select queue.defer('n') as root \gset
select count(queue.defer('d', needs => array[:root])) from generate_series(1, 3500) \g /dev/null
do $$ begin while (select t.admitted from queue.tick() t) > 0 loop end loop; end $$;
create function pg_temp.slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.6); return null; end $$;
create trigger slow after insert on queue.active_job for each statement execute function pg_temp.slow();
select queue.done(array[:root]) \g /dev/null
select is((select count(*) from queue.unsettled u where u.kind = 'again'), 2500::bigint, 'the first thousand pass, and the rest is handed over');
select is((select string_agg(x.state || ' ' || x.n, ', ' order by x.state) from (select j.state, count(*) as n from queue.jobs j where j.task = 'd' group by j.state) x), 'ready 1000, waiting 2500', 'and still waits');
select is(queue.pause(), 3500, 'a pause counts it');
select is((select count(*) from queue.unsettled u where u.kind = 'again'), 1500::bigint, 'and is not held up by it');
select queue.resume() \g /dev/null
drop trigger slow on queue.active_job;
select queue.tick() \g /dev/null
select is((select count(*) from queue.unsettled u where u.kind = 'again'), 0::bigint, 'to the next admission');
select is((select count(*) from queue.jobs j where j.task = 'd' and j.state = 'ready'), 3500::bigint, 'then all are ready');
select is_empty('select * from queue.check()', 'in order');
call pg_temp.clear();

select * from finish();
