-- Ready jobs that no worker has claimed hold no slot: a job that comes before them takes it.

select plan(27);

\ir ../admit/gates.helpers.psql
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
create function pg_temp.one_by_one(n integer) returns bigint[] language plpgsql as $$
declare
  v_ids bigint[];
begin
  for i in 1 .. n loop
    v_ids := v_ids || pg_temp.claim(1);
    perform pg_temp.finish_all();
  end loop;
  return v_ids;
end $$;
-- a key's limit, used, ready and waiting
create function pg_temp.counts(key text) returns text language plpgsql as $$
begin
  return (select concat_ws(' ', s."limit", s.used, s.ready, s.waiting) from queue.semaphores s where s.key = counts.key);
end $$;

-- Nearer deadlines, each admitted when the one before is ready.
select queue.defer('far', concurrency_key => 'K', concurrency_limit => 1, deadline => '2990-01-01Z') as far \gset
select queue.tick() \g /dev/null
select queue.defer('nearer', concurrency_key => 'K', concurrency_limit => 1, deadline => '2980-01-01Z') as nearer \gset
select queue.tick() \g /dev/null
select queue.defer('nearest', concurrency_key => 'K', concurrency_limit => 1, deadline => '2970-01-01Z') as nearest \gset
select queue.defer('never', concurrency_key => 'K', concurrency_limit => 1) as never \gset
select queue.tick() \g /dev/null
select is(pg_temp.counts('K'), '1 0 1 3', 'one is ready, three wait');
select is((select array_agg(p.id) from queue.peek(n => 10) p), array[:nearest, :far]::bigint[], 'peek shows the nearest first, and none without a slot');
select is(pg_temp.claim(1), array[:nearest]::bigint[], 'the nearest takes the slot');
select is(pg_temp.claim(10), null, 'and no other one');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.finish_all();
select is(pg_temp.claim(10), array[:nearer]::bigint[], 'then the next');
select pg_temp.finish_all();
select is(pg_temp.one_by_one(2), array[:far, :never]::bigint[], 'then the others');
select is(pg_temp.counts('K'), '1 0 0 0', 'none is left');

-- A retry comes before a younger job that is ready.
select queue.defer('old', concurrency_key => 'K', concurrency_limit => 1, options => '{"retry": {"max_attempts": 2, "base": "1 s"}}') as old \gset
select pg_temp.claim(1) \g /dev/null
select queue.fail(j.id, j.claim, 'x') from queue.jobs j where j.id = :old \g /dev/null
select queue.defer('young', concurrency_key => 'K', concurrency_limit => 1) as young \gset
select queue.tick() \g /dev/null
select queue.reschedule(:old) \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.counts('K'), '1 0 1 1', 'the younger one is ready');
select is(pg_temp.one_by_one(2), array[:old, :young]::bigint[], 'the older one is first');

-- A limit above 1: between ready jobs, too.
select min(d) as a from (select queue.defer('t', concurrency_key => 'L', concurrency_limit => 3, deadline => '2990-01-01Z'::timestamptz + n * interval '10 days') as d from generate_series(1, 5) n) x \gset
select queue.tick() \g /dev/null
select queue.defer('between', concurrency_key => 'L', concurrency_limit => 3, deadline => '2990-01-15Z') as between \gset
select queue.defer('first', concurrency_key => 'L', concurrency_limit => 3, deadline => '2989-01-15Z') as first \gset
select queue.tick() \g /dev/null
select is((select array_agg(p.id) from queue.peek() p), array[:first, :a, :between, :a + 1, :a + 2]::bigint[], 'peek shows those that fit before the ready ones');
select is(pg_temp.claim(10), array[:first, :a, :between]::bigint[], 'as many as the limit, in one order');
select is(pg_temp.counts('L'), '3 3 0 4', 'the ready ones that they passed wait');
select pg_temp.finish_all();
select is(pg_temp.claim(10), array[:a + 1, :a + 2, :a + 3]::bigint[], 'and follow in order');
select pg_temp.finish_all();
select is(pg_temp.one_by_one(1), array[:a + 4]::bigint[], 'to the last');

-- A heavy job that does not fit beside a claim passes nobody.
select queue.defer('light', concurrency_key => 'W', concurrency_limit => 3) as light \gset
select pg_temp.claim(1) \g /dev/null
select queue.defer('light', concurrency_key => 'W', concurrency_limit => 3, deadline => '2990-01-01Z') as far \gset
select queue.tick() \g /dev/null
select queue.defer('heavy', deadline => '2980-01-01Z', options => '{"concurrency": [{"key": "W", "limit": 3, "weight": 3}]}') as heavy \gset
select queue.tick() \g /dev/null
select is(pg_temp.claim(10), array[:far]::bigint[], 'a ready job starts');
select pg_temp.finish_all();
select is(pg_temp.claim(10), array[:heavy]::bigint[], 'the heavy one when there is room');
select pg_temp.finish_all();

-- A job of two keys passes a ready one if both have room.
select queue.defer('far', concurrency_key => 'A', concurrency_limit => 1, deadline => '2990-01-01Z') as far \gset
select queue.tick() \g /dev/null
select queue.defer('both', deadline => '2980-01-01Z', options => '{"concurrency": [{"key": "A", "limit": 1}, {"key": "B", "limit": 1}]}') as both \gset
select queue.tick() \g /dev/null
select is(pg_temp.claim(10), array[:both]::bigint[], 'two keys');
select is(pg_temp.counts('A') || ', ' || pg_temp.counts('B'), '1 1 0 1, 1 1 0 0', 'both are in use');
select pg_temp.finish_all();
select is(pg_temp.claim(10), array[:far]::bigint[], 'then one');
select pg_temp.finish_all();

-- With options of fetch; and by finish_and_fetch.
select queue.defer('far', concurrency_key => 'K', concurrency_limit => 1, deadline => '2990-01-01Z') as far \gset
select queue.tick() \g /dev/null
select queue.defer('near', concurrency_key => 'K', concurrency_limit => 1, deadline => '2980-01-01Z') as near \gset
select queue.tick() \g /dev/null
select is((select array_agg(f.id) from queue.fetch(:worker, null, 5, '{"tasks": ["far", "near"]}') f), array[:near]::bigint[], 'of some tasks');
select is((select array_agg(f.id) from queue.jobs j cross join lateral queue.finish_and_fetch(:worker, jsonb_build_array(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'succeeded')), null, 1) f where j.id = :near), array[:far]::bigint[], 'then the other one');
select pg_temp.finish_all();
select queue.defer('far', concurrency_key => 'K', concurrency_limit => 1, deadline => '2990-01-01Z') as far \gset
select queue.tick() \g /dev/null
select queue.defer('near', concurrency_key => 'K', concurrency_limit => 1, deadline => '2980-01-01Z') as near \gset
select queue.tick() \g /dev/null
select pg_temp.claim(1) \g /dev/null
select queue.defer('nearest', concurrency_key => 'K', concurrency_limit => 1, deadline => '2970-01-01Z') as nearest \gset
select queue.tick() \g /dev/null
select is(pg_temp.counts('K'), '1 1 1 1', 'the one that was passed is still ready');
select is((select array_agg(f.id) from queue.jobs j cross join lateral queue.finish_and_fetch(:worker, jsonb_build_array(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'succeeded')), null, 1) f where j.id = :near), array[:nearest]::bigint[], 'when the slot is passed on, the nearest takes it');
select pg_temp.finish_all();
select is(pg_temp.claim(10), array[:far]::bigint[], 'then the other');
select pg_temp.finish_all();

-- 2,000 of them, each nearer than all before: they start in order, and none is moved for each claim.
select queue.defer('t', concurrency_key => 'M', concurrency_limit => 1, deadline => '2990-01-01Z') as last \gset
select queue.tick() \g /dev/null
select count(queue.defer('t', concurrency_key => 'M', concurrency_limit => 1, deadline => '2980-01-01Z'::timestamptz - n * interval '1 minute')) from generate_series(1, 2000) n \g /dev/null
select queue.tick() \g /dev/null
select queue.tick() \g /dev/null
select array_agg(j.id order by j.deadline) as expected from (select j.id, j.deadline from queue.jobs j where j.state in ('ready', 'blocked') order by j.deadline limit 50) j \gset
select is(pg_temp.one_by_one(50), :'expected'::bigint[], 'each of many takes the slot before the ready one');
select is_empty('select * from queue.check()', 'in order');
