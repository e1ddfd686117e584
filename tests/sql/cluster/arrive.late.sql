-- A mover that stood still brings a part again, after another one has ended the move, and the slot is leaving this
-- database, or has left it (extension/cluster/arrive.sql). This database is shard a; b exists by name only.

select plan(10);

select 'key ' || n as key, queue._shard_part_of('key ' || n) as part from generate_series(1, 20000) n where queue.shard_of('key ' || n) = 700 limit 1 \gset
create function pg_temp.parts() returns text language sql as $$ select md5(string_agg(p::text, ' ' order by p.part)) from queue.shard_part p where p.slot = 700 $$;
select queue.shard_receive(700, 'b', 2, queue.shard_format());
create temp table c as select n as part, jsonb_build_object('format', queue.shard_format(), 'slot', 700, 'part', n, 'version', 2, 'receipt', gen_random_uuid(), 'piece', 1, 'is_last', true,
  'jobs', case when n = :part then jsonb_build_array(jsonb_build_object('id', 1, 'task', 'once', 'args', '{}'::jsonb, 'options', jsonb_build_object('headers', jsonb_build_object('shard_key', :'key')))) else '[]' end) as carried
from generate_series(0, 4095) n;
create function pg_temp.late() returns text language sql as $$
  select (queue.shard_part_arrive(c.carried))::text = format('(0,%s)', c.carried ->> 'receipt') from c where c.carried -> 'jobs' <> '[]'
$$;
select is((select sum((queue.shard_part_arrive(c.carried)).deferred) from c), 1::bigint, 'the job arrives');
select is(pg_temp.late(), 'true', 'a second time none does, and the receipt is the same');
select queue.shard_moved(700, 2);
select is(pg_temp.late(), 'true', 'nor after the move');
select is(pg_temp.parts(), null, 'of which nothing is left');
select queue.register_worker('w') as worker \gset
select count(queue.succeed(f.id, f.claim)) from queue.fetch(:worker) f;

-- It leaves
select queue.shard_leave(700, 'b'), queue.shard_list(700);
create temp table before as select pg_temp.parts() as parts;
select is(pg_temp.late(), 'true', 'nor while the slot leaves');
select is(pg_temp.parts(), before.parts, 'whose parts are still here') from before;
select is((select string_agg(state, ' ') from queue.jobs), 'succeeded', 'the job has run once');
select queue.shard_part_gone(700, p, (queue.shard_part_jobs(700, p) ->> 'receipt')::uuid) from queue.shard_leave_empty(700) p;
select lives_ok('select queue.shard_moved(700, 3)', 'it leaves');
select throws_ok('select pg_temp.late()', '22023', 'this slot does not come here', 'then it is refused');
select queue.shard_receive(700, 'b', 4, queue.shard_format());
select throws_ok('select pg_temp.late()', '22023', 'this slot does not come here', 'also while the slot comes back');

select * from finish();
