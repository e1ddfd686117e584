-- Operating on many jobs by hand: move, copy, delete, fail_jobs, done, set_priority, set_deadline, reschedule, set_args, delete_queue.

select plan(269);

set pgdefer.notify = off;

create function pg_temp.job(id bigint) returns text language sql as $$
  select concat_ws(' ', j.state, j.reason, j.attempts, j.failures, j.crashes, j.claims) from queue.jobs j where j.id = job.id
$$;

create function pg_temp.state(id bigint) returns text language sql as $$
  select concat_ws(' ', j.state, j.reason) from queue.jobs j where j.id = state.id
$$;

create function pg_temp.run(id bigint, outcome text, more jsonb default '{}') returns text language plpgsql as $$
declare
  v_text text;
begin
  select d.state into v_text
  from queue.fetch((select min(w.id) from queue.workers w), null, 1, jsonb_build_object('ids', jsonb_build_array(run.id))) f
  cross join lateral queue.finish_many(jsonb_build_array(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', outcome) || more)) d;
  return v_text;
end $$;

-- A new job of each state, in this order; fillers has the jobs that they wait for.
create table pg_temp.zoo (no serial, name text, id bigint);
create table pg_temp.filler (id bigint);
create function pg_temp.zoo(name text) returns bigint language sql as $$select z.id from pg_temp.zoo z where z.name = zoo.name$$;
create function pg_temp.ids() returns bigint[] language sql as $$select array(select z.id from pg_temp.zoo z where z.id is not null order by z.no)$$;
create procedure pg_temp.make_zoo() language plpgsql as $$
declare
  v_worker bigint := (select min(w.id) from queue.workers w);
  v_name text;
begin
  perform queue.fail_jobs(array(select f.id from pg_temp.filler f)), queue.delete(pg_temp.ids(), true), queue.delete(array(select f.id from pg_temp.filler f));
  truncate pg_temp.zoo restart identity;
  truncate pg_temp.filler;
  insert into pg_temp.zoo (name) select unnest('{running,ready,paused,scheduled,retrying,blocked,full,waiting,upstream_failed,held,succeeded,failed,cancelled}'::text[]);
  insert into pg_temp.filler values (queue.defer('filler', queue => 'zoo', lock => 'zoo', concurrency_key => 'zoo', concurrency_limit => 1));
  foreach v_name in array '{running,retrying,succeeded,failed,cancelled}'::text[] loop
    update pg_temp.zoo z set id = queue.defer(v_name, queue => 'zoo', options => case v_name when 'retrying' then '{"retry": {"max_attempts": 5, "base": "1 day"}}' end::jsonb)
    where z.name = v_name;
  end loop;
  commit;
  perform queue.finish_many(jsonb_agg(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', case f.task when 'succeeded' then 'succeeded' else 'failed' end)))
  from queue.fetch(v_worker, '{zoo}', 100) f where f.task in ('retrying', 'succeeded', 'failed');
  commit;
  perform queue.cancel(pg_temp.zoo('cancelled'), true);
  perform queue.finish_many(jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'failed'))) from queue.jobs j where j.id = pg_temp.zoo('cancelled');
  update pg_temp.zoo z set id = queue.defer('ready', queue => 'zoo') where z.name = 'ready';
  update pg_temp.zoo z set id = queue.defer('paused', queue => 'zoo paused') where z.name = 'paused';
  update pg_temp.zoo z set id = queue.defer('scheduled', queue => 'zoo', scheduled_at => '2999-01-01Z') where z.name = 'scheduled';
  update pg_temp.zoo z set id = queue.defer('blocked', queue => 'zoo', lock => 'zoo') where z.name = 'blocked';
  update pg_temp.zoo z set id = queue.defer('full', queue => 'zoo', concurrency_key => 'zoo', concurrency_limit => 1) where z.name = 'full';
  update pg_temp.zoo z set id = queue.defer('waiting', queue => 'zoo', needs => array[(select min(f.id) from pg_temp.filler f)]) where z.name = 'waiting';
  update pg_temp.zoo z set id = queue.defer('upstream_failed', queue => 'zoo', needs => array[queue.defer('needed', queue => 'zoo', options => '{"held": true}')]) where z.name = 'upstream_failed';
  insert into pg_temp.filler select j.id from queue.jobs j where j.task = 'needed' and j.state = 'held';
  update pg_temp.zoo z set id = queue.defer('held', queue => 'zoo', options => '{"held": true}') where z.name = 'held';
  perform queue.pause('zoo paused');
  commit;
  perform queue.tick();
end $$;
create function pg_temp.states() returns text language sql as $$
  select string_agg(coalesce(nullif(concat_ws(' ', j.state, j.reason), ''), 'gone'), ', ' order by z.no) from pg_temp.zoo z left join queue.jobs j on j.id = z.id
$$;

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
call pg_temp.make_zoo();
select is(pg_temp.states(), 'running, ready, ready paused, scheduled, scheduled, blocked lock, blocked limit, waiting, upstream_failed, held, succeeded, failed attempts, cancelled aborted',
          'a job of each state');
select is_empty('select * from queue.check()', 'in order');

-- The result of a call for each job: the outcome, or the error.
create function pg_temp.says(call text) returns text language plpgsql as $$
declare
  v_text text;
begin
  execute format('select string_agg(case when r.error is null then r.outcome else r.error end, '', '' order by r.n) from %s with ordinality r (id, outcome, error, n)', call) into v_text;
  return v_text;
end $$;

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

call pg_temp.make_zoo();
select is(pg_temp.says('queue.delete(pg_temp.ids())'), 'QJ003' || repeat(', deleted', 12), 'delete: what does not run');
select is(pg_temp.states(), 'running' || repeat(', gone', 12), 'is gone');
select is_empty('select * from queue.check()', 'in order');
select is(pg_temp.says('queue.delete(pg_temp.ids())'), 'QJ003' || repeat(', QJ001', 12), 'once');
call pg_temp.make_zoo();
select is(pg_temp.says('queue.delete(pg_temp.ids(), force => true)'), 'deleted' || repeat(', deleted', 12), 'with force what runs too');
select is_empty('select * from queue.check()', 'in order');
select is_empty($$select j.id from queue.attempt a join pg_temp.zoo j on j.id = a.job_id union all select s.id from queue.job_override s join pg_temp.zoo z on z.id = s.id$$, 'without a trace');

-- A mixed list
select queue.defer('t') as a, queue.defer('t') as b, queue.defer('t', queue => 'mixed', priority => 2000) as running \gset
select claim from queue.fetch(:worker, '{mixed}') \gset
select results_eq(format('select * from queue.done(array[%s, 424242, %s, %s, %s])', :b, :running, :a, :b),
                  format('values (%s::bigint, ''succeeded'', null), (424242, null, ''QJ001''), (%s, ''succeeded'', null), (%s, ''succeeded'', null)', :b, :running, :a), 'a row for each id, in the order given, each once');
select results_eq(format('select * from queue.delete(array[%s, 424242, %s])', :b, :a), format('values (%s::bigint, ''deleted'', null), (424242, null, ''QJ001''), (%s, ''deleted'', null)', :b, :a), 'deleted ones too');

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

-- copy
select queue.defer('t', '{"n": 1}', queue => 'c', priority => 3, lock => 'copied', queueing_lock => 'unique', concurrency_key => 'k', concurrency_limit => 2, deadline => '2999-01-01Z',
  options => '{"description": "d", "headers": {"h": 1}, "retry": {"max_attempts": 2}, "timeout": "1 h", "retain": "2 h", "expires_at": "2999-01-02Z"}') as id \gset
select queue.copy(:id, 'elsewhere') as copy \gset
select isnt(:copy::bigint, :id::bigint, 'a copy has an id of its own');
select is((select concat_ws('|', task, queue, args, priority, lock, queueing_lock, concurrency_key, deadline at time zone 'UTC', expires_at at time zone 'UTC', description, headers, attempts, state, reason) from queue.jobs where id = :copy),
          't|elsewhere|{"n": 1}|3|copied|k|2999-01-01 00:00:00|2999-01-02 00:00:00|d|{"h": 1}|0|ready', 'the same args and options');
select queue.tick() \g /dev/null
select is(pg_temp.state(:copy), 'blocked lock', 'and the same lock');
select is((select array_agg(j.limits) from queue.job j where j.id in (:id, :copy)), '{{2},{2}}', 'and limit');
select is((select count(distinct j.options)::integer from queue.job j where j.id in (:id, :copy)), 1, 'all options');
select is_empty('select * from queue.check()', 'in order');
select queue.delete(array[:id]) \g /dev/null
select is(pg_temp.job(:copy), 'ready 0 0 0 0', 'deleting the original does not harm the copy');
select is(pg_temp.run(:copy, 'succeeded', '{"result": 1}'), 'succeeded', 'which runs');
select queue.copy(:copy) as copy2 \gset
select results_eq(format('select args, queue, state, result, finished_at from queue.jobs where id = %s', :copy2), $$values ('{"n": 1}'::jsonb, 'elsewhere', 'ready', null::jsonb, null::timestamptz)$$, 'a copy of a finished job is to run; its queue is the same by default');
select queue.delete(array[:copy2]) \g /dev/null
select is(pg_temp.state(:copy), 'succeeded', 'deleting the copy does not harm the original');

-- Copies of jobs in each state, with changes since they were deferred
call pg_temp.make_zoo();
select queue.set_priority(pg_temp.ids(), 5) \g /dev/null
create table pg_temp.copies (no integer, id bigint);
insert into pg_temp.copies select z.no, queue.copy(z.id, 'zoo copies') from pg_temp.zoo z;
select queue.tick() \g /dev/null
select is((select string_agg(j.state, ', ' order by c.no) from pg_temp.copies c join queue.jobs j on j.id = c.id),
          'ready, ready, ready, scheduled, ready, blocked, blocked, waiting, upstream_failed, held, ready, ready, ready', 'copies of each state');
select is((select array_agg(distinct j.priority) from pg_temp.copies c join queue.jobs j on j.id = c.id), '{5}', 'with the priority that was set');
select is((select array_agg(distinct concat_ws(' ', j.attempts, j.failures, j.claims, j.error)) from pg_temp.copies c join queue.jobs j on j.id = c.id), '{"0 0 0"}', 'and no history');
select is_empty('select * from queue.check()', 'in order');
select is((select count(*)::integer from queue.delete(array(select id from pg_temp.copies)) where outcome = 'deleted'), 13, 'they go');
select queue.defer('t', options => '{"expires_at": "2000-01-01Z"}') as id \gset
select queue.tick() \g /dev/null
select is(pg_temp.state(:id), 'cancelled expired', 'of one that has expired');
select queue.copy(:id) as copy \gset
select is((select concat_ws(' ', state, expires_at) from queue.jobs where id = :copy), 'ready', 'the copy does not expire');
select queue.defer('t', lock => 'a', options => '{"retry": {"max_attempts": 3}}') as id \gset
select pg_temp.run(:id, 'failed', '{"options": {"lock": "", "queue": "changed", "priority": 9}}') \g /dev/null
select queue.copy(:id) as copy \gset
select is((select string_agg(concat_ws(' ', lock, queue, priority), ', ') from queue.jobs where id in (:id, :copy)), 'changed 9, changed 9', 'changes by a retry');
select queue.defer('t', scheduled_at => '2999-01-01Z') as id \gset
select queue.reschedule(:id) \g /dev/null
select is(pg_temp.run(:id, 'failed', '{"options": {"retry_in": "1 h"}}'), 'scheduled', 'one that was to run later, was rescheduled and has run');
select queue.copy(:id) as copy \gset
select is((select concat_ws(' ', state, scheduled_at) from queue.jobs where id = :copy), 'ready', 'does not go back to its first time in the copy');
select queue.tick() \g /dev/null
select is_empty('select * from queue.check()', 'in order');
select queue.defer('need') as need, queue.defer('lost need') as lost \gset
select queue.defer('t', needs => array[:need, :lost], options => '{"needs_mode": "any"}') as id \gset
select queue.delete(array[:lost], true) \g /dev/null
select queue.copy(:id) as copy \gset
select is((select needs from queue.jobs where id = :copy), array[:need]::bigint[], 'only the needs that still exist');

-- 10 MB of args
select queue.defer('large', jsonb_build_object('data', repeat('0123456789', 1000000))) as id \gset
select queue.copy(:id, 'large') as copy, queue.copy(:id, 'large') as copy2 \gset
select is((select count(*)::integer from queue.jobs where id in (:id, :copy, :copy2) and octet_length(args ->> 'data') = 10000000), 3, 'copies of 10 MB');
select queue.delete(array[:id, :copy2]) \g /dev/null
select is_empty(format('select * from queue.fetch(%s, ''{large}'')', :worker), 'which fetch puts aside');
select is((select octet_length(f.args ->> 'data') from queue.fetch(:worker, '{large}') f), 10000000, 'outlive the original');
select is(pg_temp.says(format('queue.move(array[%s], ''large2'', true)', :copy)), 'ready', 'and move');
select is_empty(format('select * from queue.fetch(%s, ''{large2}'')', :worker), 'put aside again');
select is((select octet_length(f.args ->> 'data') from queue.fetch(:worker, '{large2}') f), 10000000, 'whole');
select queue.done(array[:copy]), queue.heartbeat(:worker) \g /dev/null

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

-- next
select queue.defer('n', '{"n": 1}', queue => 'next') as a, queue.defer('n', queue => 'next', priority => 1) as b, queue.defer('n', queue => 'next') as c \gset
select is((select count(*)::integer from queue.workers where name = 'operator'), 0, 'no worker so far');
select results_eq('select id, task, queue, priority, attempt, expires_at - now() between ''19 min'' and ''21 min'' from queue.next(''{next}'')', format('values (%s::bigint, ''n'', ''next'', 1, 1, true)', :b), 'the next job, with a lease');
select claim from queue.jobs where id = :b \gset
select is(pg_temp.job(:b), 'running 1 0 0 1', 'runs');
select queue.tick(), queue.reap() \g /dev/null
select is(pg_temp.job(:b), 'running 1 0 0 1', 'as long as its lease');
select is(queue.fail(:b, :claim, 'by hand'), 'failed', 'and ends by its claim');
select results_eq('select id, args, expires_at from queue.next(''{nex*}'', ack => true)', format('values (%s::bigint, ''{"n": 1}''::jsonb, null::timestamptz)', :a), 'with ack');
select is(pg_temp.job(:a), 'succeeded operator 1 0 0 1', 'it is done with');
select id from queue.next('{next}', lease => '1 second') \gset
select is(:id::bigint, :c::bigint, 'the last');
select is_empty('select * from queue.next(''{next}'')', 'and no more');
select is_empty('select * from queue.next(''{next}'', true)', 'with ack neither');
update queue.lease set expires_at = now() - interval '1 second' where queue.lease.id = :c;
select queue.reap() \g /dev/null
select is(pg_temp.job(:c), 'ready 1 0 1 1', 'past its lease it has crashed');
select is((select id from queue.next('{next}')), :c::bigint, 'and comes again');
select queue.done(array[:c]) \g /dev/null
select is(test.refusal('select queue.next(' || arguments || ')'), '22023', 'next(' || arguments || ')') from (values ('''{}'''), ('array['''']'), ('''{nil}'', lease => null'), ('''{nil}'', lease => ''0''')) v (arguments);
select is_empty('select * from queue.check()', 'in order');

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
select is_empty('select * from queue.check()', 'in order');

-- Names
create table pg_temp.odd (name text);
insert into pg_temp.odd values ('"'), ('''; drop table x'), ('--x'), ('ÄÖ 日本'), (repeat('x', 1000)), ('%s'), (E'a\nb'), (' ');
select queue.create_queue(name), queue.defer(name, queue => name, lock => name) from pg_temp.odd \g /dev/null
select is((select count(*)::integer from pg_temp.odd o join queue.jobs j on j.queue = o.name and j.task = o.name and j.lock = o.name), 8, 'odd names');
select is((select string_agg(m.outcome, ' ') from pg_temp.odd o join queue.jobs j on j.queue = o.name cross join lateral queue.move(array[j.id], 'x' || left(o.name, 999)) m), 'ready' || repeat(' ready', 7), 'work in move');
select is((select string_agg(m.outcome, ' ') from pg_temp.odd o join queue.jobs j on j.queue = 'x' || left(o.name, 999) cross join lateral queue.move(array[j.id], o.name) m), 'ready' || repeat(' ready', 7), 'and back');
select is((select sum(queue.delete_queue(o.name, true))::integer from pg_temp.odd o), 8, 'and delete_queue');
select is_empty('select * from queue.check()', 'in order');

select * from finish();
