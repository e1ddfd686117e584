-- Calls of operators after a large import: they admit no more of it than they need.

select plan(22);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
create function pg_temp.import(n integer) returns void language sql as $$
  select from queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'import', 'args', jsonb_build_object('n', n), 'lock', 'l' || n % 10,
    'options', '{"concurrency": [{"key": "k", "limit": 5}]}'::jsonb)) from generate_series(1, n) n))
$$;
create function pg_temp.left() returns bigint language sql as $$ select count(*) from queue.unadmitted $$;

select queue.defer('a') as a, queue.defer('b') as b, queue.defer('c', queue => 'other', lock => 'l1') as c \gset
select queue.tick() \g /dev/null
select pg_temp.import(6000) \g /dev/null
select is(queue.hold(:a), 'held', 'a job that was admitted before');
select cmp_ok(pg_temp.left(), '>', 1000::bigint, 'changes before all of the import is admitted');
select is(queue.unhold(:a), 'ready', 'is ready again');
select results_eq(format('select outcome, error from queue.set_priority(array[%s, %s], 5)', :a, :b), $$values ('ready', null), ('ready', null)$$, 'as do two');
select is(queue.cancel(:b), 'cancelled', 'is cancelled');
select cmp_ok(pg_temp.left(), '>', 0::bigint, 'with a part still not admitted');
-- A job of the import
select max(j.id) as last from queue.jobs j \gset
select is((select x.outcome from queue.move(array[:last], 'other') x), 'blocked', 'a job of the import moves, too');
select is((select j.queue from queue.jobs j where j.id = :last), 'other', 'once it is admitted');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.import(6000) \g /dev/null
select is(queue.pause('default'), 12000, 'a pause counts jobs that are not admitted yet');
select cmp_ok(pg_temp.left(), '>', 1000::bigint, 'does not admit all of them');
select is((select count(*) from queue.fetch(:worker, '{default}', 100)), 0::bigint, 'and stops them');
select is(queue.resume('default'), 12000, 'until they are resumed');
select is(queue.pause(task => 'import'), 12000, 'so does a pause of a task');
select is((select string_agg(f.task, ' ') from queue.fetch(:worker, '{default}', 100) f), 'a', 'which others do not notice');
select is(queue.resume(task => 'import'), 12000, 'until it is resumed');
-- What needs to know all
select pg_temp.import(6000) \g /dev/null
select is(queue.hold(:c), 'held', 'a job with an ordered lock');
select is(pg_temp.left(), 0::bigint, 'is held when its older jobs are known');
select is((select x.outcome from queue.set_deadline(array[:c], null) x), 'held', 'so is a deadline changed');
select is((select x.outcome from queue.delete(array[:b]) x), 'deleted', 'a delete must know the jobs that need the deleted ones');
select is(pg_temp.left(), 0::bigint, 'so it admits all');
select is_empty('select * from queue.check()', 'in order');

select * from finish();
