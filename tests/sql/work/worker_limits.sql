-- max_running of one worker: how many jobs of a queue it runs at once.

select plan(27);

create function pg_temp.register(name text) returns bigint language sql as $$
  select queue.register_worker(name, info => '{"dead_after": "1 day"}');
$$;
create function pg_temp.claim(worker bigint, limits jsonb, n integer default 10, more jsonb default '{}', queues text[] default null)
returns text language sql as $$
  select string_agg(f.task, ' ' order by f.n)
  from queue.fetch(claim.worker, claim.queues, claim.n, claim.more || jsonb_build_object('max_running', claim.limits)) with ordinality
    f (id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, timeout, headers, parent, n);
$$;
-- Ends the claim of one job, or all.
create function pg_temp.finish(task text default null, outcome text default 'succeeded') returns void language sql as $$
  select from queue.finish_many((
    select jsonb_agg(jsonb_build_object('id', aj.id, 'claim', aj.claim, 'outcome', finish.outcome))
    from queue.active_job aj join queue.job j on j.id = aj.id
    where aj.claim is not null and (finish.task is null or finish.task = j.task)));
$$;
select pg_temp.register('v') as v, pg_temp.register('w') as w \gset

select queue.defer('a' || n, queue => 'a') from generate_series(1, 4) n \g /dev/null
select queue.defer('b' || n, queue => 'b.x', priority => -1) from generate_series(1, 3) n \g /dev/null
select queue.defer('c' || n, queue => 'b.y', priority => -2) from generate_series(1, 3) n \g /dev/null
select is(pg_temp.claim(:v, '{"a": 2, "b.*": 1}'), 'a1 a2 b1 c1', 'so many of each queue');
select is(pg_temp.claim(:v, '{"a": 2, "b.*": 1}'), null, 'and no more');
select is(pg_temp.claim(:w, '{"a": 1, "*": 3, "b.*": 1}'), 'a3 b2 c2', 'of each worker; the longest pattern applies');
select is(pg_temp.claim(:v, '{"a": 3, "b.*": 1}'), 'a4', 'more if the limit is higher');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.finish('b1');
select is(pg_temp.claim(:w, '{"*": 1}'), null, 'what another worker ends gives no room');
select is(pg_temp.claim(:v, '{"*": 1}'), 'b3', 'what this one ends does');
select pg_temp.finish('b3', 'released');
select is(pg_temp.claim(:v, '{"*": 1}'), 'b3', 'a job that was given back comes again');
select pg_temp.finish('c1', 'failed');
select is(pg_temp.claim(:v, '{"*": 1}', more => '{"order": "listed"}', queues => '{b.x,b.y}'), 'c3', 'beside order');
select pg_temp.finish();
select is(pg_temp.claim(:v, '{}'), null, 'nothing is left');
select is((select count(*) from queue.worker_claim c where c.worker_id = :v), 0::bigint, 'nothing is kept of what has ended');

-- With limits of all workers
select queue.configure_queue('both', '{"max_running": 2}');
select queue.defer('d' || n, queue => 'both') from generate_series(1, 5) n \g /dev/null
select is(pg_temp.claim(:v, '{"both": 3}'), 'd1 d2', 'the queue''s own limit is lower');
select pg_temp.finish();
select is(pg_temp.claim(:v, '{"both": 1}'), 'd3', 'or the worker''s is');
select is(pg_temp.claim(:w, '{"both": 1}'), 'd4', 'the other takes the rest');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.finish();
select is(pg_temp.claim(:v, null), 'd5', 'null is no limit');
select pg_temp.finish();

-- A full queue hides nothing behind it, whatever else is chosen
select queue.defer('e' || n, queue => 'e', priority => 9) from generate_series(1, 300) n \g /dev/null
select queue.defer('f', queue => 'f') \g /dev/null
select is(pg_temp.claim(:v, '{"e": 1}', 5), 'e1 f', 'lower priorities start');
select queue.defer('k' || n, queue => 'e', priority => 9, concurrency_key => 'k', concurrency_limit => 1) from generate_series(1, 3) n \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.claim(:v, '{"e": 2}', 5, '{"tasks": ["k1", "k2"]}'), 'k1', 'only some tasks');
select is(pg_temp.claim(:v, '{"e": 2}', 5, jsonb_build_object('ids', (select jsonb_agg(j.id) from queue.jobs j where j.task in ('e5', 'k2')))), null, 'ids');
select is_empty('select * from queue.check()', 'in order');

-- A worker that has gone
select queue.deregister_worker(:v);
delete from queue.worker w where w.id = :v;
select queue._forget_claims_of_gone_workers();
select is((select count(*) from queue.worker_claim c where c.worker_id = :v), 0::bigint, 'nothing is left of it');

-- Bad input
select throws_ok(format($$select queue.fetch(%s, options => jsonb_build_object('max_running', %L::jsonb))$$, :w, o), '22023', null, left(o, 40))
from (values ('1'), ('{"a": 0}'), ('{"a": -1}'), ('{"a": 1.5}'), ('{"": 1}'),
  ((select jsonb_object_agg('q' || n, 1)::text from generate_series(1, 101) n))) o (o);
select * from finish();
