-- Changing many jobs by hand: move, set_priority, set_deadline, reschedule, set_args; the arguments of copy, delete, fail_jobs and done, too.

select plan(153);

\ir change.helpers.psql

set pgdefer.notify = off;

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
call pg_temp.make_zoo();
select is(pg_temp.states(), 'running, ready, ready paused, scheduled, scheduled, blocked lock, blocked limit, waiting, upstream_failed, held, succeeded, failed attempts, cancelled aborted',
          'a job of each state');
select is_empty('select * from queue.check()', 'in order');

-- Arguments
select is(test.refusal(format('select queue.%s(array(select generate_series(1, 1001))::bigint[]%s)', name, rest)), '22023', name || ' of more than 1,000 jobs')
from (values ('move', ', ''q'''), ('delete', ''), ('fail_jobs', ''), ('done', ''), ('set_priority', ', 1'), ('set_deadline', ', now()')) v (name, rest);
select is(test.refusal('select queue.' || call), '22023', call) from (values
  ('move(null, ''q'')'), ('move(array[1, null], ''q'')'), ('move(''{}'', null)'), ('move(''{}'', '''')'), ('move(''{}'', ''a*'')'), ('move(''{}'', repeat(''x'', 1001))'),
  ('copy(1, '''')'), ('copy(1, ''a*'')'), ('delete(null)'), ('delete(array[null]::bigint[])'), ('fail_jobs(null)'), ('fail_jobs(array[null]::bigint[], ''x'')'), ('done(null)'), ('delete(''{{1},{2}}'')'), ('retry(''{{1},{2}}'')'), ('move(''{{1},{2}}'', ''q'')'),
  ('done(array[1, null])'), ('set_priority(null, 1)'), ('set_priority(''{}'', null)'), ('set_priority(array[null]::bigint[], 1)'), ('set_deadline(null, now())'), ('set_deadline(''{}'', ''-infinity'')'), ('set_deadline(''{}'', ''12000-01-01Z'')'), ('reschedule(1, ''infinity'')'),
  ('set_args(1, null)'), ('set_args(1, ''[]'')'), ('set_args(1, ''1'')'), ('set_args(1, ''null'')'),
  ('reschedule(1, ''-infinity'')'), ('delete_queue(null)'), ('delete_queue('''')'), ('delete_queue(''*'')'), ('delete_queue(''never was'')'), ('delete_queue(''never was'', true)')) v (call);
select is(test.refusal('select queue.' || call), 'QJ001', call) from (values ('copy(424242)'), ('copy(null)'), ('copy(424242, ''q'')'), ('reschedule(424242)'), ('reschedule(null)'), ('set_args(424242, ''{}'')'), ('set_args(null, ''{}'')')) v (call);
select is_empty('select * from queue.' || call, 'no ids, no rows: ' || call) from (values ('move(''{}'', ''q'')'), ('delete(''{}'')'), ('fail_jobs(''{}'')'), ('done(''{}'')'), ('set_priority(''{}'', 1)'), ('set_deadline(''{}'', null)')) v (call);
begin isolation level repeatable read;
select is(test.refusal('select queue.' || call), 'QJ008', call || ' in REPEATABLE READ') from (values
  ('move(''{1}'', ''q'')'), ('delete(''{1}'')'), ('fail_jobs(''{1}'')'), ('done(''{1}'')'), ('set_priority(''{1}'', 1)'), ('set_deadline(''{1}'', null)'), ('reschedule(1)'), ('set_args(1, ''{}'')'), ('delete_queue(''q'')')) v (call);
rollback;

-- Each call on each state
select is(pg_temp.says('queue.move(pg_temp.ids(), ''other'')'), 'QJ003, ready, ready, scheduled, scheduled, blocked, blocked, waiting, upstream_failed, held, succeeded, failed, cancelled', 'move: all but the running one');
select is(pg_temp.states(), 'running, ready, ready, scheduled, scheduled, blocked lock, blocked limit, waiting, upstream_failed, held, succeeded, failed attempts, cancelled aborted', 'they keep their states; the other queue is not paused');
select is((select string_agg(j.queue, ' ' order by z.no) from pg_temp.zoo z join queue.jobs j on j.id = z.id), 'zoo' || repeat(' other', 12), 'and are in the other queue');
select is_empty('select * from queue.check()', 'in order');
select is(pg_temp.says('queue.move(pg_temp.ids(), ''zoo'', force => true)'), 'ready, ready, ready, scheduled, scheduled, blocked, blocked, waiting, upstream_failed, held, succeeded, failed, cancelled', 'with force the running one too');
select is(pg_temp.says('queue.move(pg_temp.ids(), ''zoo paused'')'), 'ready, ready, ready, scheduled, scheduled, blocked, blocked, waiting, upstream_failed, held, succeeded, failed, cancelled', 'into a paused queue');
select is(pg_temp.states(), 'ready paused, ready paused, ready paused, scheduled, scheduled, blocked lock, blocked limit, waiting, upstream_failed, held, succeeded, failed attempts, cancelled aborted', 'where they wait');
select is_empty('select * from queue.check()', 'in order');

call pg_temp.make_zoo();
select is(pg_temp.says('queue.set_priority(pg_temp.ids(), 7)'), 'running, ready, ready, scheduled, scheduled, blocked, blocked, waiting, upstream_failed, held, succeeded, failed, cancelled', 'set_priority: all');
select is(pg_temp.states(), 'running, ready, ready paused, scheduled, scheduled, blocked lock, blocked limit, waiting, upstream_failed, held, succeeded, failed attempts, cancelled aborted', 'they keep their states');
select is((select array_agg(distinct j.priority) from pg_temp.zoo z join queue.jobs j on j.id = z.id), '{7}', 'and have the priority');
select is_empty('select * from queue.check()', 'in order');
select is(pg_temp.says('queue.set_deadline(pg_temp.ids(), ''2999-01-01Z'')'), 'running, ready, ready, scheduled, scheduled, blocked, blocked, waiting, upstream_failed, held, succeeded, failed, cancelled', 'set_deadline: all');
select is((select array_agg(distinct j.deadline) from pg_temp.zoo z join queue.jobs j on j.id = z.id), array['2999-01-01Z'::timestamptz], 'and have it');
select is_empty('select * from queue.check()', 'in order');
select queue.set_deadline(pg_temp.ids(), null) \g /dev/null
select is((select count(j.deadline) from pg_temp.zoo z join queue.jobs j on j.id = z.id), 0::bigint, 'NULL: none');
select is((select string_agg(test.refusal(format('select queue.reschedule(%s, ''2999-02-02Z'')', z.id)), ', ' order by z.no) from pg_temp.zoo z),
          'QJ003, accepted, accepted, accepted, accepted, accepted, accepted, accepted, accepted, accepted, QJ003, QJ003, QJ003', 'reschedule: what is to come');
select is(pg_temp.states(), 'running, scheduled, scheduled, scheduled, scheduled, scheduled, scheduled, waiting, upstream_failed, held, succeeded, failed attempts, cancelled aborted', 'is then scheduled, behind the gates before that');
select is((select string_agg(queue.reschedule(z.id), ', ' order by z.no) from pg_temp.zoo z where z.name not in ('running', 'succeeded', 'failed', 'cancelled')),
          'ready, ready, ready, ready, blocked, blocked, waiting, upstream_failed, held', 'and now');
select is_empty('select * from queue.check()', 'in order');
call pg_temp.make_zoo();
select is((select string_agg(test.refusal(format('select queue.set_args(%s, ''{"n": "new"}'')', z.id)), ', ' order by z.no) from pg_temp.zoo z),
          'QJ003, accepted, accepted, accepted, accepted, accepted, accepted, accepted, accepted, accepted, QJ003, accepted, accepted', 'set_args: what may run yet');
select is(pg_temp.states(), 'running, ready, ready paused, scheduled, scheduled, blocked lock, blocked limit, waiting, upstream_failed, held, succeeded, failed attempts, cancelled aborted', 'they keep their states');
select is((select string_agg(z.name, ', ' order by z.no) from pg_temp.zoo z join queue.jobs j on j.id = z.id where j.args <> '{"n": "new"}'), 'running, succeeded', 'and have the args');
select is_empty('select * from queue.check()', 'in order');

-- move
select queue.defer('t', '{"n": 1}', queue => 'from', priority => 3, options => '{"retry": {"max_attempts": 3}, "description": "d"}') as id, queue.defer('t', queue => 'from', priority => 3) as next \gset
select pg_temp.run(:id, 'failed', '{"error": "one"}') \g /dev/null
select queue.pause('to') \g /dev/null
select is(pg_temp.says(format('queue.move(array[%s], ''to'')', :id)), 'ready', 'a job that failed once');
select results_eq(format('select queue, task, args, priority, description, attempts, failures, error, state, reason from queue.jobs where id = %s', :id),
                  $$values ('to', 't', '{"n": 1}'::jsonb, 3, 'd', 1, 1, 'one', 'ready', 'paused')$$, 'keeps everything but its queue');
select results_eq(format('select attempt, outcome, error from queue.attempts where job_id = %s', :id), $$values (1, 'failed', 'one')$$, 'its history');
select is_empty('select * from queue.fetch((select min(id) from queue.workers), ''{to}'')', 'and waits there');
select queue.resume('to') \g /dev/null
select results_eq('select id, queue, attempt from queue.fetch((select min(id) from queue.workers), ''{to}'')', format('values (%s::bigint, ''to'', 2)', :id), 'until it is resumed');
select is(pg_temp.says(format('queue.move(array[%s], ''from'')', :id)), 'QJ003', 'a running one stays');
select claim from queue.jobs where id = :id \gset
select is(pg_temp.job(:id), 'running 2 1 0 2', 'and runs on');
select is(pg_temp.says(format('queue.move(array[%s], ''from'', force => true)', :id)), 'ready', 'with force it goes');
select is(pg_temp.job(:id), 'ready 1 1 0 2', 'its attempt not counted');
select results_eq(format('select outcome, error from queue.attempts where job_id = %s order by claim', :id), $$values ('failed', 'one'), ('released', 'taken back by a move with force')$$, 'but written down');
select is(test.refusal(format('select queue.succeed(%s, %s)', :id, :claim)), 'QJ002', 'the old claim is lost');
select is((select string_agg(h.reason, ' ') from queue.heartbeat(:worker) h where (h.id, h.claim) = (:id, :claim)), 'moved', 'its worker is told');
select results_eq('select id from queue.fetch((select min(id) from queue.workers), ''{from}'', 2)', format('values (%s::bigint), (%s)', :id, :next), 'and it has its place by id');
select queue.fail(j.id, j.claim, 'two', options => '{"retryable": false}') from queue.jobs j where j.id = :id \g /dev/null
select is(pg_temp.says(format('queue.move(array[%s], ''to'')', :id)), 'failed', 'one that has failed');
select is((select string_agg(r.outcome, '') from queue.retry(array[:id]) r), 'ready', 'and is retried');
select results_eq('select id, attempt from queue.fetch((select min(id) from queue.workers), ''{to}'')', format('values (%s::bigint, 3)', :id), 'runs there');
select queue.defer('t', queue => 'from') as id \gset
select queue.configure_queue('limited', '{"max_running": 1, "retain": "1 hour"}') \g /dev/null
select queue.defer('t', queue => 'limited') as first \gset
select is(pg_temp.says(format('queue.move(array[%s], ''limited'')', :id)), 'ready', 'into a queue with a limit');
select is((select count(*)::integer from queue.fetch(:worker, '{limited}', 10)), 1, 'that holds for it');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.queue = 'limited' and j.state = 'running' \g /dev/null
select is((select count(*)::integer from queue.fetch(:worker, '{limited}', 10)), 1, 'and the next');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.queue = 'limited' and j.state = 'running' \g /dev/null
select is((select purge_at - finished_at from queue.finished where id = :id), '1 hour', 'it is kept as its new queue says');
select queue.move(array[:id], 'from') \g /dev/null
select is((select purge_at from queue.finished where id = :id), null, 'or by default, moved away again');
select is_empty('select * from queue.check()', 'in order');

-- A lock keeps its order across queues
select queue.defer('t', queue => 'from', lock => 'm') as a, queue.defer('t', queue => 'from', lock => 'm') as b, queue.defer('t', queue => 'from', lock => 'm') as c \gset
select queue.tick() \g /dev/null
select is(pg_temp.says(format('queue.move(array[%s, %s, %s], ''to'')', :b, :a, :c)), 'blocked, ready, blocked', 'jobs of one lock');
select is(pg_temp.run(:b, 'succeeded'), null, 'the second has to wait');
select is(pg_temp.run(:a, 'succeeded'), 'succeeded', 'for the first');
select is(pg_temp.run(:c, 'succeeded'), null, 'the third');
select is(pg_temp.run(:b, 'succeeded'), 'succeeded', 'for the second');
select is(pg_temp.run(:c, 'succeeded'), 'succeeded', 'as before');

-- set_priority and reschedule
select queue.defer('t', queue => 'p') as a, queue.defer('t', queue => 'p') as b, queue.defer('t', queue => 'p', priority => 1) as c \gset
select queue.set_priority(array[:b], 2) \g /dev/null
select is((select array_agg(f.id) from queue.fetch(:worker, '{p}', 3) f), array[:b, :c, :a]::bigint[], 'a higher priority runs first');
select queue.set_priority(array[:b], -2) \g /dev/null
select queue.release(j.id, j.claim) from queue.jobs j where j.id in (:a, :b, :c) \g /dev/null
select is((select array_agg(f.id) from queue.fetch(:worker, '{p}', 3) f), array[:c, :a, :b]::bigint[], 'a running one gets it for its next run');
select queue.done(array[:a, :b, :c]) \g /dev/null
select queue.defer('t', options => '{"retry": {"max_attempts": 2, "base": "1 day"}}', priority => 6000) as id \gset
select is(pg_temp.run(:id, 'failed'), 'scheduled', 'a job that waits for its retry');
select is(queue.reschedule(:id, now() + interval '1 h'), 'scheduled', 'gets an earlier time');
select ok((select scheduled_at between now() + interval '59 min' and now() + interval '1 h' from queue.jobs where id = :id), 'that one');
select is(queue.reschedule(:id), 'ready', 'or now');
select is((select f.id from queue.fetch(:worker) f), :id::bigint, 'and runs');
select queue.done(array[:id]) \g /dev/null
select queue.defer('need') as need \gset
select queue.defer('t', needs => array[:need]) as id \gset
select is(queue.reschedule(:id, '2999-01-01Z'), 'waiting', 'a job that waits for its needs');
select queue.done(array[:need]) \g /dev/null
select is(pg_temp.state(:id), 'scheduled', 'waits for its time then');
select queue.hold(:id), queue.reschedule(:id) \g /dev/null
select is(queue.unhold(:id), 'ready', 'a held one has the new time when it is released');

-- set_args
select queue.defer('t', '{"n": 1, "m": 1}', queue => 'p', lock => 'l{n}') as a, queue.defer('t', '{"n": 1}', queue => 'p', lock => 'l{n}') as b \gset
select queue.set_args(:a, '{"n": 2}'), queue.set_args(:b, '{"n": 3}') as b_state \gset
select is(:'b_state'::text, 'blocked', 'its lock stays');
select results_eq('select f.id, f.args, f.lock from queue.fetch(' || :worker || ', ''{p}'') f', format('values (%s::bigint, ''{"n": 2}''::jsonb, ''l1'')', :a), 'it runs with the new args, all of them');
select claim from queue.jobs where id = :a \gset
select is(queue.fail(:a, :claim, 'x'), 'failed', 'fails');
select is(queue.set_args(:a, '{"n": 4}'), 'failed', 'gets others');
select queue.retry(array[:a]) \g /dev/null
select results_eq('select f.id, f.args from queue.fetch(' || :worker || ', ''{p}'') f', format('values (%s::bigint, ''{"n": 4}''::jsonb)', :a), 'and runs again with these, before the younger one');
select queue.done(array[:a, :b]) \g /dev/null
begin;
select queue.defer('t') as id \gset
select is(test.refusal(format('select queue.%s', call)), 'QJ003', call || ' before its defer has committed') from (values (format('set_args(%s, ''{}'')', :id)), (format('hold(%s)', :id))) v (call);
rollback;

-- Names
create table pg_temp.odd (name text);
insert into pg_temp.odd values ('"'), ('''; drop table x'), ('--x'), ('ÄÖ 日本'), (repeat('x', 1000)), ('%s'), (E'a\nb'), (' ');
select queue.create_queue(name), queue.defer(name, queue => name, lock => name) from pg_temp.odd \g /dev/null
select is((select count(*)::integer from pg_temp.odd o join queue.jobs j on j.queue = o.name and j.task = o.name and j.lock = o.name), 8, 'odd names');
select is((select string_agg(m.outcome, ' ') from pg_temp.odd o join queue.jobs j on j.queue = o.name cross join lateral queue.move(array[j.id], 'x' || left(o.name, 999)) m), 'ready' || repeat(' ready', 7), 'work in move');
select is((select string_agg(m.outcome, ' ') from pg_temp.odd o join queue.jobs j on j.queue = 'x' || left(o.name, 999) cross join lateral queue.move(array[j.id], o.name) m), 'ready' || repeat(' ready', 7), 'and back');
select is((select sum(queue.delete_queue(o.name, true))::integer from pg_temp.odd o), 8, 'and delete_queue');
select is_empty('select * from queue.check()', 'in order');

-- Many jobs of a few keys: the keys are looked at once for all of them, not once for each
create function pg_temp.rows_read(call text) returns bigint language plpgsql as $$
declare
  v_before bigint;
begin
  select sum(s.seq_tup_read + coalesce(s.idx_tup_fetch, 0)) into v_before from pg_stat_xact_user_tables s where s.schemaname = 'queue';
  execute call;
  return (select sum(s.seq_tup_read + coalesce(s.idx_tup_fetch, 0)) from pg_stat_xact_user_tables s where s.schemaname = 'queue') - v_before;
end $$;
select queue.defer('many', queue => 'many', options => '{"concurrency": [{"key": "many A", "limit": 50, "weight": 3}, {"key": "many B", "limit": 30, "weight": 2}]}') from generate_series(1, 400) \g /dev/null
do $$ begin while (select t.admitted from queue.tick() t) > 0 loop end loop; end $$;
select cmp_ok(pg_temp.rows_read(format('select queue.%s', c)), '<', 15000::bigint, 'many jobs of a key: ' || left(c, 12))
from (values (1, 'set_priority(%L, 3)'), (2, 'set_deadline(%L, ''2999-01-01Z'')'), (3, 'move(%L, ''many'')'), (4, 'fail_jobs(%L)')) x (no, f),
  lateral (select format(x.f, (select array_agg(j.id) from (select j.id from queue.jobs j where j.task = 'many' order by j.id limit 200) j)) as c) y order by x.no;
select cmp_ok(pg_temp.rows_read(format('select queue.done(%L)', (select array_agg(j.id) from queue.jobs j where j.task = 'many' and j.state <> 'failed'))), '<', 15000::bigint, 'and done');
select is((select string_agg(distinct j.state, ' ' order by j.state) from queue.jobs j where j.task = 'many'), 'failed succeeded', 'do their work');
select is_empty('select * from queue.check()', 'in order');

-- The caller's own limit of waiting
set lock_timeout = '3s';
begin;
select queue.set_priority(array(select j.id from queue.jobs j limit 2), 3) \g /dev/null
select is(current_setting('lock_timeout'), '3s', 'a call on many jobs leaves it as it was');
commit;
reset lock_timeout;
begin;
select queue.set_priority(array(select j.id from queue.jobs j limit 2), 3) \g /dev/null
select is(current_setting('lock_timeout'), '10s', 'or sets one for the rest of the transaction');
commit;

-- A claim that is taken back, and whose job ends by that
select queue.configure_queue('hour', '{"retain": "1 hour"}'), queue.configure_queue('month', '{"retain": "30 days"}') \g /dev/null
select queue.defer('t', queue => 'hour') as id \gset
select f.id from queue.fetch(:worker, '{hour}') f \g /dev/null
select queue.cancel(:id, abort => true) \g /dev/null
select is((select m.outcome from queue.move(array[:id], 'month', force => true) m), 'cancelled', 'a job that its worker was told to abort ends');
select cmp_ok((select f.purge_at - f.finished_at from queue.finished f where f.id = :id), '>=', '30 days'::interval, 'and is kept as its new queue says');
-- One of them can't be settled
select queue.configure_queue('fails', '{"max_running": 3}') \g /dev/null
select queue.defer('t', queue => 'fails') as a, queue.defer('t', queue => 'fails') as b, queue.defer('poisoned', queue => 'fails') as c \gset
select f.id from queue.fetch(:worker, '{fails}', 3) f \g /dev/null
create function pg_temp.refuse() returns trigger language plpgsql as $$ begin raise exception 'a trigger of the owner''s that fails'; end $$;
select set_config('test.refused', :c::text, false) \g /dev/null
create trigger refuse before insert on queue.active_job for each row when (new.id = current_setting('test.refused')::bigint) execute function pg_temp.refuse();
set client_min_messages = error;
select is(pg_temp.says(format('queue.move(array[%s, %s, %s], ''moved'', force => true)', :a, :b, :c)), 'ready, ready, QJ003', 'of jobs of which one can''t be settled the others move');
reset client_min_messages;
drop trigger refuse on queue.active_job;
do $$ begin while (select t.admitted from queue.tick() t) > 0 loop end loop; end $$;
select is((select string_agg(j.queue || ' ' || j.state, ', ' order by j.id) from queue.jobs j where j.id in (:a, :b, :c)), 'moved ready, moved ready, fails ready', 'and it stays where it was');
select is((select string_agg(s.used::text, ' ') from queue.semaphore s where s.key = 'qfails' and s.used <> 0), null, 'the slots of the old queue are free');
select is_empty('select * from queue.check()', 'in order');

select * from finish();
