-- Calls of operators after a large import: they admit no more of it than they need.

select plan(46);

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
select is((select x.outcome from queue.delete(array[:b]) x), 'deleted', 'and one deleted');
select is_empty('select * from queue.check()', 'in order');

-- Jobs that new ones need
select queue.register_worker('x', info => '{"dead_after": "1 day"}') as other \gset
select queue.defer('needed', queue => 'end') as a, queue.defer('pruned', queue => 'end') as b, queue.defer('awaited', queue => 'end') as d, queue.defer('last', queue => 'end') as z \gset
select queue.done(array[:a, :b, :d, :z]) \g /dev/null
create function pg_temp.import_needs(needs bigint[], priority integer, lock text default null) returns void language sql as $$
  select pg_temp.import(6000);
  select from queue.defer_many(jsonb_build_array(jsonb_build_object('task', 'needs', 'queue', 'late', 'needs', needs, 'lock', lock, 'priority', priority)));
  select pg_temp.import(6000);
$$;
select pg_temp.import_needs(array[:a], -5) \g /dev/null
select queue._new_dependents(array[:b]) as none, queue._new_dependents(array[:a, :b]) as one, queue._new_dependents() as any \gset
select is(:'none'::bigint[], '{}', 'no new job needs this one');
select is(cardinality(:'one'::bigint[]), 1, 'one needs that one');
select is(:'any'::bigint[], :'one'::bigint[], 'and no other any');
select is((select x.outcome from queue.delete(array[:b]) x), 'deleted', 'a job that nobody needs is deleted');
select cmp_ok(pg_temp.left(), '>', 6000::bigint, 'before all of the import is admitted');
select is((select x.error from queue.delete(array[:a]) x), 'QJ003', 'a job is kept that a new one needs');
select is(pg_temp.left(), 0::bigint, 'even as the last');
select queue.cancel(max(j.id)) from queue.jobs j where j.task = 'needs' \g /dev/null
select pg_temp.import_needs(array[:d], 5) \g /dev/null
select is(queue.prune(state => 'succeeded', older_than => '0'), 2, 'pruning removes what nobody needs');
select set_eq($$select j.task from queue.jobs j where j.state = 'succeeded'$$, $$values ('awaited')$$, 'and keeps what a new job needs');
select cmp_ok(pg_temp.left(), '>', 0::bigint, 'without admitting all');
select queue.cancel(max(j.id)) from queue.jobs j where j.task = 'needs' \g /dev/null
select queue._admit_all() \g /dev/null
-- A fork has no needs of its own, but may await what its original awaited.
select queue.defer('parent', queue => 'end') as parent \gset
select claim from queue.fetch(:other, null, 1, jsonb_build_object('ids', jsonb_build_array(:parent))) \gset
select queue.defer('child', queue => 'end', options => jsonb_build_object('parent', :parent)) as child \gset
select queue.finish_step(:parent, :claim, 'children', to_jsonb(:child)), queue.await_jobs(:parent, :claim, 'ended', array[:child]) \g /dev/null
select queue.done(array[:child]) \g /dev/null
select claim from queue.fetch(:other, null, 1, jsonb_build_object('ids', jsonb_build_array(:parent))) \gset
select queue.finish_step(:parent, :claim, 'after', 'null'), queue.succeed(:parent, :claim) \g /dev/null
select pg_temp.import(6000), queue.fork(:parent, 'after'), pg_temp.import(6000) \g /dev/null
select is(cardinality(queue._new_dependents(array[:child])), 1, 'a fork may need the child of its original');
select queue._admit_all() \g /dev/null
-- A job with an ordered lock stays parked while there is a backlog.
select pg_temp.import_needs(array[:d], 5, 'l') \g /dev/null
do $$
begin
  perform queue._lock_admission(true);
  while not exists (select from queue.waiting w where w.reason = 'parked') loop
    assert (select a.has_more from queue._admit(1000) a);
  end loop;
end $$;
select isnt_empty($$select from queue.waiting w where w.reason = 'parked'$$, 'a new job may be parked');
update queue.finished f set purge_at = clock_timestamp() - interval '1 hour', finished_at = f.finished_at - interval '1 hour' where f.id = :d;
select is(queue.prune(), 0, 'what it needs is kept');
select is(pg_temp.left(), 0::bigint, 'as its lock must know its older jobs');

-- Settings and retries
select pg_temp.import(6000) \g /dev/null
select queue.defer('again', queue => 'again') as e \gset
select queue.fail_jobs(array[:e], 'no') \g /dev/null
select pg_temp.import(9000) \g /dev/null
select is((select x.outcome from queue.retry(array[:e]) x), 'ready', 'a job is retried');
select cmp_ok(pg_temp.left(), '>', 5000::bigint, 'before all of the import is admitted');
select queue.configure_key('k', '{"limit": 7}') \g /dev/null
select queue.configure_queue('again', '{"retain": "1 minute"}') \g /dev/null
select queue.configure_queue('default', '{"max_running": 3, "retain": "2 minutes"}') \g /dev/null
select cmp_ok(pg_temp.left(), '>', 1000::bigint, 'settings change before that');
select queue._admit_all() \g /dev/null
select is((select s."limit" from queue.semaphores s where s.key = 'k'), 7, 'a key keeps its limit when more jobs are admitted');
select is((select count(*) from queue.fetch(:worker, '{default}', 100)), 2::bigint, 'a queue its own, of which one job runs');
select max(j.id) as last from queue.jobs j where j.state = 'blocked' \gset
select is(queue.cancel(:last), 'cancelled', 'a job that is cancelled');
select is((select f.purge_at - f.finished_at from queue.finished f where f.id = :last), interval '2 minutes', 'is kept as its queue says');
select is(queue.cancel(:e), 'cancelled', 'the retried job is cancelled');
select pg_temp.import(6000) \g /dev/null
select is((select x.outcome from queue.retry(array[:e], changes => '{"lock": "l1"}') x), 'blocked', 'a retry that changes the lock');
select is(pg_temp.left(), 0::bigint, 'must know its older jobs');
select is_empty('select * from queue.check()', 'in order');

select * from finish();
