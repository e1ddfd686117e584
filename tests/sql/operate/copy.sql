-- copy, of jobs in each state too.

select plan(32);

\ir change.helpers.psql

set pgdefer.notify = off;

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

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
select queue.defer('t', options => '{"held": true}') as id \gset
select queue.copy(:id) as copy \gset
select is(pg_temp.state(:copy), 'held', 'the copy of a held job is held, also before admission');
-- a replacement that is committed and not admitted yet
select queue.defer('t', '{"n": 1}', queueing_lock => 'replaced') as id \gset
select queue.tick() \g /dev/null
select queue.defer('t', jsonb_build_object('n', repeat('2', 3000)), queueing_lock => 'replaced', priority => 7, scheduled_at => '2999-01-01Z', options => '{"on_conflict": "replace"}') \g /dev/null
select queue.copy(:id) as copy \gset
select is((select concat_ws(' ', state, priority, length(args ->> 'n'), scheduled_at at time zone 'UTC') from queue.jobs where id = :copy),
          'scheduled 7 3000 2999-01-01 00:00:00', 'is in the copy');
select is((select j.size from queue.job j where j.id = :copy), octet_length(jsonb_build_object('n', repeat('2', 3000))::text), 'with its size');
select queue.delete(array[:id, :copy]) \g /dev/null
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

select is_empty('select * from queue.check()', 'in order');

select * from finish();
