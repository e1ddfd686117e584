-- Concurrency: hard limits per key, several keys, discard, max_running, rates.

select plan(74);

\ir gates.helpers.psql
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- One key
select min(d) as a from (select queue.defer('t', concurrency_key => 'K', concurrency_limit => 2) as d from generate_series(1, 5)) x \gset
select is(pg_temp.claim(), array[:a, :a + 1]::bigint[], 'as many as the limit');
select is(pg_temp.claim(), null, 'and no more');
select is((select string_agg(j.state || coalesce(' ' || j.reason, ''), ', ' order by j.id) from queue.jobs j where j.id > :a + 1),
          'blocked limit, blocked limit, blocked limit', 'the others wait');
select is(queue.why(:a + 2), format('its concurrency key K is full: job %s, %s', :a, :a + 1), 'why names those that fill the key');
select is((select row (s.kind, s."limit", s.used, s.ready, s.waiting)::text from queue.semaphores s where s.key = 'K'), '(concurrency_key,2,2,0,3)', 'as does the view');
select pg_temp.succeed(:a);
select is(pg_temp.claim(), array[:a + 2]::bigint[], 'a slot that comes back goes to the next');
select queue.release(:a + 1, j.claim) from queue.jobs j where j.id = :a + 1;
select is(cardinality(pg_temp.claim()), 1, 'a release gives one back');
select is(queue.fail(j.id, j.claim, 'x'), 'failed', 'a failure too') from queue.jobs j where j.state = 'running' order by j.id limit 1;
select is(cardinality(pg_temp.claim()), 1, 'and one goes');
select pg_temp.finish_all();
select pg_temp.claim() \g /dev/null
select pg_temp.finish_all();
select is((select s.used from queue.semaphores s where s.key = 'K'), 0, 'at the end none is used');

-- Waiting jobs get a slot by priority, then id.
select queue.defer('first', concurrency_key => 'P', concurrency_limit => 1) as a \gset
select pg_temp.claim() \g /dev/null
select queue.defer('low', concurrency_key => 'P', concurrency_limit => 1) as low \gset
select queue.defer('high', priority => 5, concurrency_key => 'P', concurrency_limit => 1) as high \gset
select pg_temp.claim() \g /dev/null
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:high]::bigint[], 'priority first');
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:low]::bigint[], 'then id');
select pg_temp.finish_all();

-- New jobs take slots by deadline, too.
select queue.defer('later', deadline => '2990-01-01Z', concurrency_key => 'N', concurrency_limit => 1) as later \gset
select queue.defer('sooner', deadline => '2980-01-01Z', concurrency_key => 'N', concurrency_limit => 1) as sooner, queue.defer('never', concurrency_key => 'N', concurrency_limit => 1) as never \gset
select is(pg_temp.claim(1), array[:sooner]::bigint[], 'of two new jobs, the one with the near deadline');
select pg_temp.finish_all();
select is(pg_temp.claim(1), array[:later]::bigint[], 'then the other');
select pg_temp.finish_all();
select is(pg_temp.claim(1), array[:never]::bigint[], 'then the one without');
select pg_temp.finish_all();

-- Within a priority by deadline, then id: also a late job with a near deadline, or one that gets it while it waits.
select queue.defer('first', concurrency_key => 'P', concurrency_limit => 1) as a \gset
select pg_temp.claim() \g /dev/null
select queue.defer('none', concurrency_key => 'P', concurrency_limit => 1) as none,
  queue.defer('far', deadline => '2990-01-01Z', concurrency_key => 'P', concurrency_limit => 1) as far,
  queue.defer('moved', concurrency_key => 'P', concurrency_limit => 1) as moved \gset
select queue.tick() \g /dev/null
select queue.defer('near', deadline => '2980-01-01Z', concurrency_key => 'P', concurrency_limit => 1) as near \gset
select results_eq(format('select outcome from queue.set_deadline(array[%s], ''2970-01-01Z'')', :moved), '{blocked}'::text[], 'one gets a deadline while it waits');
select queue.defer('needs', deadline => '2960-01-01Z', needs => array[:none]) as needs \gset
select queue.tick() \g /dev/null
select is_empty('select * from queue.check()', 'in order');
select pg_temp.finish_all();
select is(pg_temp.one_by_one(5), array[:none, :needs, :moved, :near, :far]::bigint[], 'a slot is given by deadline, also that of dependents, then id');
-- Many, in waves, with the same order as a sort.
select queue.defer('t', concurrency_key => 'P', concurrency_limit => 1, deadline => case when n % 3 > 0 then '2900-01-01Z'::timestamptz + (n * 7 % 11) * interval '1 day' end)
from generate_series(1, 20) n \g /dev/null
select pg_temp.one_by_one(5) as begun \gset
select queue.defer('t', concurrency_key => 'P', concurrency_limit => 1, deadline => '2899-01-01Z'::timestamptz + (n * 5 % 7) * interval '1 day') from generate_series(1, 10) n \g /dev/null
select queue.tick() \g /dev/null
select is_empty('select * from queue.check()', 'in order');
select array_agg(j.id order by j.deadline nulls last, j.id) as expected from queue.jobs j where j.state in ('ready', 'blocked') \gset
select is(pg_temp.one_by_one(25), :'expected'::bigint[], 'many in that order, also before the one that is ready already');

-- A queue may have a rate and max_running: both apply.
select queue.configure_queue('both', '{"max_running": 2, "rate": {"limit": 3, "per": "1 day"}}');
select queue.defer('t', queue => 'both') from generate_series(1, 5) \g /dev/null
select is(cardinality(pg_temp.claim(10, '{both}')), 2, 'max_running');
select is(pg_temp.claim(10, '{both}'), null, 'and no more');
select pg_temp.finish_all();
select is(cardinality(pg_temp.claim(10, '{both}')), 1, 'then the rate');
select pg_temp.finish_all();
select is(pg_temp.claim(10, '{both}'), null, 'and no more');
select matches(queue.why(min(j.id)), 'has used up its rate of 3 per 1 day') from queue.jobs j where j.queue = 'both' and j.state = 'ready';
select queue.configure_queue('both', '{"rate": null}');
select is(cardinality(pg_temp.claim(10, '{both}')), 2, 'without a rate max_running again');
select pg_temp.finish_all();
select is((select row (q.max_running, q.rate_limit)::text from queue.queues q where q.name = 'both'), '(2,)', 'the view shows it');
select is((select s."limit" from queue.semaphores s where s.kind = 'queue' and s.key = 'both'), 2, 'as does that of limits');

-- A key shared by several queues, one of which is paused, still reaches its limit on the others.
select queue.pause('still') \g /dev/null
select queue.defer('t', queue => 'still', concurrency_key => 'S', concurrency_limit => 2) from generate_series(1, 3) \g /dev/null
select min(d) as a from (select queue.defer('t', concurrency_key => 'S', concurrency_limit => 2) as d from generate_series(1, 3)) x \gset
select is(pg_temp.claim(), array[:a, :a + 1]::bigint[], 'a paused queue holds no slot');
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:a + 2]::bigint[], 'nor later');
select pg_temp.finish_all();
select queue.resume('still') \g /dev/null
select is(cardinality(pg_temp.claim()), 2, 'resumed, its jobs go up to the limit');
select pg_temp.finish_all();
select pg_temp.claim() \g /dev/null
select pg_temp.finish_all();

-- Several keys: all or none
select queue.defer('one', concurrency_key => 'A', concurrency_limit => 1) as one \gset
select pg_temp.claim() \g /dev/null
select queue.defer('both', options => '{"concurrency": [{"key": "A", "limit": 1}, {"key": "B", "limit": 1}]}') as both \gset
select is(pg_temp.claim(), null, 'one of its keys is full');
select queue.defer('b', concurrency_key => 'B', concurrency_limit => 1) as b \gset
select is(pg_temp.claim(), array[:b]::bigint[], 'it holds no slot of the other meanwhile');
select pg_temp.succeed(:one);
select is(pg_temp.claim(), null, 'now the other is full');
select pg_temp.succeed(:b);
select is(pg_temp.claim(), array[:both]::bigint[], 'with both free it goes');
select is((select sum(s.used) from queue.semaphores s where s.key in ('A', 'B')), 2::bigint, 'and takes both');
select pg_temp.finish_all();
select is((select sum(s.used) from queue.semaphores s where s.key in ('A', 'B')), 0::bigint, 'and gives both back');

-- on_limit discard
select queue.defer('t', concurrency_key => 'D', concurrency_limit => 1) as a \gset
select pg_temp.claim() \g /dev/null
select queue.defer('t', concurrency_key => 'D', concurrency_limit => 1, options => '{"on_limit": "discard"}') as b \gset
select is(pg_temp.claim(), null, 'no slot');
select is((select j.state || ' ' || j.reason from queue.jobs j where j.id = :b), 'cancelled limit', 'discarded');
select pg_temp.finish_all();

-- max_running
select queue.configure_queue('q', '{"max_running": 2}');
select queue.defer('t', queue => 'q') from generate_series(1, 5) \g /dev/null
select is(cardinality(pg_temp.claim()), 2, 'max_running');
select is(pg_temp.claim(), null, 'holds');
select matches(queue.why((select max(j.id) from queue.jobs j)), 'has reached max_running 2', 'why says so');
select queue.configure_queue('q', '{"max_running": 3}');
select is(cardinality(pg_temp.claim()), 1, 'raising it counts running jobs');
select queue.configure_queue('q', '{"max_running": null}');
select is(cardinality(pg_temp.claim()), 2, 'and null removes it');
select pg_temp.finish_all();

-- rate
select queue.configure_queue('r', '{"rate": {"limit": 3, "per": "1 hour"}}');
select queue.defer('t', queue => 'r') from generate_series(1, 5) \g /dev/null
select is(cardinality(pg_temp.claim()), 3, 'as many starts as the rate allows');
select pg_temp.finish_all();
select is(pg_temp.claim(), null, 'a finished job gives no start back');
select matches(queue.why((select max(j.id) from queue.jobs j)), 'used up its rate of 3 per 01:00:00; the next start is at', 'why says when the next may start');
select queue.configure_queue('r', '{"rate": null}');
select is(cardinality(pg_temp.claim()), 2, 'without the rate they go');
select pg_temp.finish_all();
-- the window is closed: a start exactly as long ago as its length counts
select queue.configure_queue('edge', '{"rate": {"limit": 1, "per": "10 minutes"}}');
insert into queue.rate_start (key, no, at) values ('qedge', 1, '2030-01-01 12:00Z');
select is(queue._queue_room('edge', 5, '2030-01-01 12:10Z'), 0, 'at the end of the window there is no room');
select is(queue._queue_room('edge', 5, '2030-01-01 12:10:00.000001Z'), 1, 'and a microsecond later there is');
-- the clock is set back by 5 minutes after the second start: the later ones count from then
select queue.configure_queue('back', '{"rate": {"limit": 5, "per": "10 minutes"}}');
select queue.defer('t', queue => 'back') from generate_series(1, 12) \g /dev/null
select is(cardinality(pg_temp.claim(2, '{back}')), 2, 'two start');
update queue.rate_start r set at = r.at + interval '5 minutes' where r.key = 'qback' and r.no = 2;
select is(cardinality(pg_temp.claim(5, '{back}')), 3, 'three more');
update queue.rate_start r set at = r.at - interval '12 minutes' where r.key = 'qback';
select is(cardinality(pg_temp.claim(10, '{back}')), 1, 'the first has left the window: the second has not, nor have those after it');
update queue.rate_start r set at = r.at - interval '12 minutes' where r.key = 'qback';
select is(cardinality(pg_temp.claim(10, '{back}')), 5, 'then as many as the rate allows');
select pg_temp.finish_all();

-- The newest job sets a key's limit, whichever is admitted first
select queue.defer('t', concurrency_key => 'old', concurrency_limit => 5, options => '{"held": true}') as old \gset
select queue.defer('t', concurrency_key => 'old', concurrency_limit => 1) \g /dev/null
select queue.tick() \g /dev/null
select is((select s."limit" from queue.semaphores s where s.key = 'old'), 1, 'the newer one is admitted first');
select queue.unhold(:old) \g /dev/null
select is((select s."limit" from queue.semaphores s where s.key = 'old'), 1, 'an older one that commits later does not change it');
select is(cardinality(pg_temp.claim()), 1, 'nor lets more start');
select pg_temp.finish_all();
select pg_temp.claim() \g /dev/null
select pg_temp.finish_all();
select pg_temp.finish_all();

-- Every way out of a state frees the slot for the next job, in the same transaction.
call pg_temp.leave('ready: cancel', '{"concurrency_key": "W", "concurrency_limit": 1}');
call pg_temp.leave('ready: delete', '{"concurrency_key": "W", "concurrency_limit": 1}');
call pg_temp.leave('ready: done', '{"concurrency_key": "W", "concurrency_limit": 1}');
call pg_temp.leave('ready: fail_jobs', '{"concurrency_key": "W", "concurrency_limit": 1}');
call pg_temp.leave('running: succeeded', '{"concurrency_key": "W", "concurrency_limit": 1}');
call pg_temp.leave('running: failed', '{"concurrency_key": "W", "concurrency_limit": 1}');
call pg_temp.leave('running: delete', '{"concurrency_key": "W", "concurrency_limit": 1}');
call pg_temp.leave('running: done', '{"concurrency_key": "W", "concurrency_limit": 1}');
call pg_temp.leave('running: fail_jobs', '{"concurrency_key": "W", "concurrency_limit": 1}');
call pg_temp.leave('running: reap', '{"concurrency_key": "W", "concurrency_limit": 1}');
call pg_temp.leave('ready: hold', '{"concurrency_key": "W", "concurrency_limit": 1}');
select is_empty($$select * from told where state <> 'ready'$$, 'the next one is ready');
select is((select count(*) from told), 11::bigint, 'each way');

-- on_limit applies once, when the job is admitted: not after an operator has changed the job.
select queue.defer('t', concurrency_key => 'O', concurrency_limit => 1, options => '{"on_limit": "discard"}') as a \gset
select queue.tick() \g /dev/null
select queue.hold(:a) \g /dev/null
select queue.defer('t', concurrency_key => 'O', concurrency_limit => 1) as b \gset
select is(pg_temp.claim(), array[:b]::bigint[], 'another takes the slot while it is held');
select is(queue.unhold(:a), 'blocked', 'it waits for a slot, as it was admitted');
select is((select r.outcome from queue.set_priority(array[:a]::bigint[], 5) r), 'blocked', 'whatever is changed');
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:a]::bigint[], 'and runs');
select pg_temp.finish_all();

-- Claims that go back come first for the slots that they free.
select array_agg(queue.defer('t', concurrency_key => 'R', concurrency_limit => 2)) as ids from generate_series(1, 4) \gset
select is(pg_temp.claim(), (:'ids'::bigint[])[1:2], 'two run');
select count(*) from queue.finish_many((
  select jsonb_agg(jsonb_build_object('id', v.id, 'claim', v.claim, 'outcome', 'released')) from queue.active_job v where v.claim is not null)) \g /dev/null
select results_eq(
  format('select j.state from queue.jobs j where j.id = any (%L) order by j.id', :'ids'), '{ready,ready,blocked,blocked}'::text[],
  'given back, they are the next');
select pg_temp.finish_all();

-- Of jobs that are admitted together the newest one's limit counts.
select queue.defer('t', queue => 'own', concurrency_key => 'N', concurrency_limit => 1) as a, queue.defer('t', queue => 'own', concurrency_key => 'N', concurrency_limit => 2) as b \gset
select is(pg_temp.claim(queues => '{own}'), array[:a, :b]::bigint[], 'two run');
select pg_temp.finish_all();

-- A job that waits for more slots than are free is not overtaken by one that needs fewer.
select queue.defer('t', queue => 'own', options => '{"concurrency": [{"key": "J", "limit": 3, "weight": 2}]}') as a,
  queue.defer('t', queue => 'own', options => '{"concurrency": [{"key": "J", "limit": 3, "weight": 2}]}') as b \gset
select pg_temp.claim(queues => '{own}') \g /dev/null
select queue.defer('t', queue => 'own', options => '{"concurrency": [{"key": "J", "limit": 3}]}') as c \gset
select is(pg_temp.claim(queues => '{own}'), null, 'the last slot stays free');
select pg_temp.finish_all();
select is(pg_temp.claim(queues => '{own}'), array[:b, :c]::bigint[], 'both run');
select pg_temp.finish_all();

-- Nor by jobs of a lower priority that were ready before it came.
select min(d) as low from (select queue.defer('t', queue => 'own', options => '{"concurrency": [{"key": "H", "limit": 3}]}') as d from generate_series(1, 2)) x \gset
select queue.tick() \g /dev/null
select queue.defer('t', queue => 'own', priority => 2, options => '{"concurrency": [{"key": "H", "limit": 3}]}') as first,
  queue.defer('t', queue => 'own', priority => 2, options => '{"concurrency": [{"key": "H", "limit": 3, "weight": 3}]}') as heavy \gset
select is(pg_temp.claim(queues => '{own}'), array[:first]::bigint[], 'two slots stay free');
select is_empty('select * from queue.check()', 'sound');
select pg_temp.finish_all();
select is(pg_temp.claim(queues => '{own}'), array[:heavy]::bigint[], 'for the heavy one');
select pg_temp.finish_all();
select is(pg_temp.claim(queues => '{own}'), array[:low, :low + 1]::bigint[], 'the others run afterwards');
select pg_temp.finish_all();

-- What a check of many jobs that wait costs
select queue.defer('t', concurrency_key => 'C', concurrency_limit => 1) from generate_series(1, 50) \g /dev/null
select queue.tick() \g /dev/null
begin;
set local track_functions = 'pl';
select is_empty('select * from queue.check()', 'sound');
select cmp_ok((select s.calls from pg_stat_xact_user_functions s where s.funcname = '_keys_of'), '<', 10::bigint, 'the keys of many jobs are read together');
commit;
select * from finish();
