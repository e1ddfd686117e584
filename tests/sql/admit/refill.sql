-- Ready jobs that no worker has claimed hold no slot: jobs that come before them take it.

select plan(74);

\ir gates.helpers.psql
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
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
select is((select array_agg(p.id) from queue.peek(n => 10) p), array[:nearest]::bigint[], 'peek shows the nearest, and none without a slot');
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
select aj.xmin as before from queue.active_job aj where aj.id = :a \gset
select queue.defer('between', concurrency_key => 'L', concurrency_limit => 3, deadline => '2990-01-15Z') as between \gset
select queue.defer('first', concurrency_key => 'L', concurrency_limit => 3, deadline => '2989-01-15Z') as first \gset
select queue.tick() \g /dev/null
select is((select aj.xmin::text from queue.active_job aj where aj.id = :a), :'before', 'no more make way than have to');
select is((select array_agg(p.id) from queue.peek() p), array[:first, :a, :between]::bigint[], 'the two are ready, and the last two of the ready ones wait');
select is(pg_temp.claim(10), array[:first, :a, :between]::bigint[], 'as many as the limit, in one order');
select is(pg_temp.counts('L'), '3 3 0 4', 'the ready ones that they passed wait');
select pg_temp.finish_all();
select is(pg_temp.claim(10), array[:a + 1, :a + 2, :a + 3]::bigint[], 'and follow in order');
select pg_temp.finish_all();
select is(pg_temp.one_by_one(1), array[:a + 4]::bigint[], 'to the last');

-- A heavy job takes the place of several, and holds up those behind it until it fits.
select queue.defer('light', concurrency_key => 'W', concurrency_limit => 3) as light \gset
select pg_temp.claim(1) \g /dev/null
select min(d) as far from (select queue.defer('light', concurrency_key => 'W', concurrency_limit => 3, deadline => '2990-01-01Z') as d from generate_series(1, 2)) x \gset
select queue.tick() \g /dev/null
select queue.defer('heavy', deadline => '2980-01-01Z', options => '{"concurrency": [{"key": "W", "limit": 3, "weight": 3}]}') as heavy \gset
select queue.tick() \g /dev/null
select is(pg_temp.claim(10), null, 'none passes the heavy one');
select pg_temp.finish_all();
select is(pg_temp.claim(10), array[:heavy]::bigint[], 'it starts when there is room');
select pg_temp.finish_all();
select is(pg_temp.claim(10), array[:far, :far + 1]::bigint[], 'then the others');
select pg_temp.finish_all();

select queue.defer('light', concurrency_key => 'W', concurrency_limit => 2) as far \gset
select queue.tick() \g /dev/null
select queue.defer('heavy', deadline => '2910-01-01Z', options => '{"concurrency": [{"key": "W", "limit": 2, "weight": 2}]}') as heavy \gset
select queue.tick() \g /dev/null
select is(pg_temp.one_by_one(2), array[:heavy, :far]::bigint[], 'also that of one beside a free slot');

-- A heavy job goes before lighter ones of a lower priority, whenever they come, but not before those of another queue.
create function pg_temp.defer_heavy(weight integer, priority integer, queue text default null) returns bigint language sql as $$
  select queue.defer('t', priority => defer_heavy.priority, queue => defer_heavy.queue, options => jsonb_build_object('concurrency',
    jsonb_build_array(jsonb_build_object('key', 'P', 'limit', 2, 'weight', weight))))
$$;
create function pg_temp.finish_one() returns void language sql as $$
  select queue.succeed(j.id, j.claim) from queue.jobs j where j.state = 'running' order by j.id limit 1
$$;
select pg_temp.defer_heavy(1, 0) as light from generate_series(1, 4) \g /dev/null
select cardinality(pg_temp.claim(10)) as n \gset
select pg_temp.defer_heavy(2, 5) as heavy \gset
select queue.tick() \g /dev/null
select pg_temp.finish_one() \g /dev/null
select is(pg_temp.claim(10), null, 'a job that waited does not take the slot that the heavy one needs');
select pg_temp.defer_heavy(1, 0) as late \gset
select is(pg_temp.claim(10), null, 'nor does a new one');
select alike(queue.why(:late), format('%%concurrency key P goes first to job %s (weight 2)', :heavy), 'why names the heavy one');
select pg_temp.defer_heavy(1, 9) as urgent \gset
select is(pg_temp.claim(10), array[:urgent]::bigint[], 'one of a higher priority does');
select pg_temp.defer_heavy(1, 0, 'elsewhere') as elsewhere \gset
select queue.tick() \g /dev/null
select pg_temp.finish_one() \g /dev/null
select is(pg_temp.claim(10), array[:elsewhere]::bigint[], 'and one of another queue');
select is_empty('select * from queue.check()', 'that is in order');
select pg_temp.finish_all();
select queue.tick() \g /dev/null
select is_empty('select * from queue.check()', 'also when all are ready, and the first one decides');
select is(pg_temp.claim(10), array[:heavy]::bigint[], 'when there is room, the heavy one starts');
select pg_temp.finish_all();
select is(cardinality(pg_temp.claim(10)), 2, 'then the others');
select pg_temp.finish_all();
select pg_temp.finish_all() from (select pg_temp.claim(10) offset 0) x;
-- It leaves.
select pg_temp.defer_heavy(1, 0), pg_temp.defer_heavy(1, 0) \g /dev/null
select cardinality(pg_temp.claim(10)) as n \gset
select pg_temp.defer_heavy(2, 5) as heavy \gset
select queue.tick() \g /dev/null
select pg_temp.finish_one() \g /dev/null
select pg_temp.defer_heavy(1, 0) \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.counts('P'), '2 1 0 2', 'the first light one that comes waits, too');
select is(pg_temp.claim(10), null, 'and does not start');
select queue.cancel(:heavy) \g /dev/null
select is(cardinality(pg_temp.claim(10)), 1, 'when it leaves, the lighter one gets the slot');
select pg_temp.finish_all();

-- Light jobs of a higher priority hold up nobody, also while a heavy one waits elsewhere, and then becomes ready.
select pg_temp.defer_heavy(1, 5) \g /dev/null
select pg_temp.claim(10) \g /dev/null
select pg_temp.defer_heavy(1, 5) from generate_series(1, 3) \g /dev/null
select pg_temp.defer_heavy(2, 0, 'elsewhere') \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.defer_heavy(1, 0) \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.finish_one() \g /dev/null
select queue.tick() \g /dev/null
select is_empty('select * from queue.check()', 'no job waits in vain');
select cardinality(pg_temp.one_by_one(5)) as n \gset

-- Of two heavy jobs the lighter one would fit, behind the other. And a worker of one task takes a heavy job out of its line.
create function pg_temp.defer_of(task text, weight integer, priority integer) returns bigint language sql as $$
  select queue.defer(task, priority => defer_of.priority, options => jsonb_build_object('concurrency',
    jsonb_build_array(jsonb_build_object('key', 'O', 'limit', 4, 'weight', weight))))
$$;
select pg_temp.defer_of('light', 2, 5) \g /dev/null
select pg_temp.claim(10) \g /dev/null
select pg_temp.defer_of('heavy', 4, 5), pg_temp.defer_of('heavy', 2, 5) \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.defer_of('light', 1, 0) as light \gset
select is(pg_temp.claim(10), null, 'a light job waits for the heavier one of two');
select pg_temp.finish_all();
select cardinality(pg_temp.one_by_one(3)) as n \gset
select pg_temp.defer_of('light', 1, 5) from generate_series(1, 3) \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.defer_of('heavy', 2, 5) as heavy \gset
select queue.tick() \g /dev/null
select pg_temp.defer_of('light', 1, 0) \g /dev/null
select queue.tick() \g /dev/null
select is((select array_agg(f.id) from queue.fetch(:worker, null, 1, '{"tasks": ["heavy"]}') f), array[:heavy]::bigint[], 'a worker of its task takes a heavy job');
select queue.tick() \g /dev/null
select is_empty('select * from queue.check()', 'then none waits in vain');
select pg_temp.finish_all();
select cardinality(pg_temp.one_by_one(4)) as n \gset

-- Several at once, beside a heavy job that waits, and where there is room for some or all.
select queue.defer('b', concurrency_key => 'W', concurrency_limit => 2) as b \gset
select queue.defer('heavy', options => '{"concurrency": [{"key": "W", "limit": 2, "weight": 2}]}') as heavy \gset
select queue.tick() \g /dev/null
select min(d) as a from (select queue.defer('a', concurrency_key => 'W', concurrency_limit => 2, deadline => '2910-01-01Z') as d from generate_series(1, 2)) x \gset
select queue.tick() \g /dev/null
select is(pg_temp.claim(10), array[:a, :a + 1]::bigint[], 'two take the slots');
select pg_temp.finish_all();
select is(pg_temp.one_by_one(2), array[:b, :heavy]::bigint[], 'then the others');
select queue.defer('b', concurrency_key => 'X', concurrency_limit => 3) as b \gset
select queue.defer('heavy', options => '{"concurrency": [{"key": "X", "limit": 3, "weight": 3}]}') as heavy \gset
select queue.tick() \g /dev/null
select aj.xmin as before from queue.active_job aj where aj.id = :b \gset
select queue.defer('a', concurrency_key => 'X', concurrency_limit => 3, deadline => '2910-01-01Z') as a \gset
select queue.tick() \g /dev/null
select is((select aj.xmin::text from queue.active_job aj where aj.id = :b), :'before', 'none makes way for one that fits');
select is(pg_temp.claim(10), array[:a, :b]::bigint[], 'both start');
select pg_temp.finish_all();
select is(pg_temp.claim(10), array[:heavy]::bigint[], 'then the heavy one');
select pg_temp.finish_all();

-- One that has to make way at two keys, while its task is being paused.
select queue.defer('both', deadline => '2990-01-01Z', options => '{"concurrency": [{"key": "A", "limit": 1}, {"key": "C", "limit": 1}]}') as far \gset
select queue.tick() \g /dev/null
select queue.pause(task => 'both') \g /dev/null
select queue.resume(task => 'both') \g /dev/null
select queue.defer('near', deadline => '2980-01-01Z', concurrency_key => 'A', concurrency_limit => 1) as a, queue.defer('near', deadline => '2980-01-01Z', concurrency_key => 'C', concurrency_limit => 1) as c \gset
select queue.tick() \g /dev/null
select is_empty('select * from queue.check()', 'in order');
select is(pg_temp.claim(10), array[:a, :c]::bigint[], 'both of these start');
select pg_temp.finish_all();
select is(pg_temp.claim(10), array[:far]::bigint[], 'then it does');
select pg_temp.finish_all();

-- A retry, where the newest job of the key is gone.
select queue.defer('old', concurrency_key => 'N', concurrency_limit => 1, options => '{"retry": {"max_attempts": 2, "base": "1 hour"}}') as old \gset
select pg_temp.claim(1) \g /dev/null
select queue.fail(j.id, j.claim, 'x') from queue.jobs j where j.id = :old \g /dev/null
select queue.defer('young', concurrency_key => 'N', concurrency_limit => 1) as young, queue.defer('gone', concurrency_key => 'N', concurrency_limit => 1) as gone \gset
select queue.tick() \g /dev/null
select queue.delete(array[:gone]::bigint[]) \g /dev/null
select queue.configure_key('N*', '{"limit": 1}') \g /dev/null
select queue.reschedule(:old) \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.one_by_one(2), array[:old, :young]::bigint[], 'is first, too');

-- A ready job that another one has passed, with options of fetch, makes way, too.
select queue.defer('y', concurrency_key => 'K', concurrency_limit => 1) as far \gset
select queue.tick() \g /dev/null
select queue.defer('x', concurrency_key => 'K', concurrency_limit => 1) as x \gset
select id from queue.fetch(:worker, null, 1, '{"tasks": ["x"]}') \g /dev/null
select queue.defer('z', concurrency_key => 'K', concurrency_limit => 1, deadline => '2910-01-01Z') as near \gset
select queue.tick() \g /dev/null
select is(pg_temp.counts('K'), '1 1 0 2', 'one runs, two wait');
select pg_temp.finish_all();
select is(pg_temp.one_by_one(2), array[:near, :far]::bigint[], 'the one that waits is first');

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

-- A job that makes way gives on its other keys.
select queue.defer('far', deadline => '2990-01-01Z', options => '{"concurrency": [{"key": "A", "limit": 1}, {"key": "C", "limit": 1}]}') as far \gset
select queue.defer('c', deadline => '2991-01-01Z', concurrency_key => 'C', concurrency_limit => 1) as c \gset
select queue.tick() \g /dev/null
select queue.defer('near', deadline => '2980-01-01Z', concurrency_key => 'A', concurrency_limit => 1) as near \gset
select queue.tick() \g /dev/null
select is_empty('select * from queue.check()', 'in order');
select is(pg_temp.claim(10), array[:near, :c]::bigint[], 'to those that wait for them');
select pg_temp.finish_all();
select is(pg_temp.claim(10), array[:far]::bigint[], 'then it starts');
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
select is(pg_temp.counts('K'), '1 1 0 2', 'both others wait');
select is((select array_agg(f.id) from queue.jobs j cross join lateral queue.finish_and_fetch(:worker, jsonb_build_array(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'succeeded')), null, 1) f where j.id = :near), array[:nearest]::bigint[], 'when the slot is passed on, the nearest takes it');
select pg_temp.finish_all();
select is(pg_temp.claim(10), array[:far]::bigint[], 'then the other');
select pg_temp.finish_all();

-- However many other jobs are between them, and whatever else is turned away.
select queue.defer('far', concurrency_key => 'K', concurrency_limit => 1) as far \gset
select queue.tick() \g /dev/null
select min(d) as m from (select queue.defer('m', deadline => '2980-01-01Z') as d from generate_series(1, 10)) x \gset
select queue.defer('near', concurrency_key => 'K', concurrency_limit => 1, deadline => '2910-01-01Z') as near \gset
select queue.tick() \g /dev/null
select is(pg_temp.claim(3), array[:near, :m, :m + 1]::bigint[], 'beside jobs without a key');
select pg_temp.claim(10) \g /dev/null
select pg_temp.finish_all();
select is(pg_temp.claim(10), array[:far]::bigint[], 'the last');
select pg_temp.finish_all();
select queue.defer('b', concurrency_key => 'B', concurrency_limit => 1) as b \gset
select pg_temp.claim(1) \g /dev/null
select queue.defer('far', deadline => '2990-01-01Z', concurrency_key => 'A', concurrency_limit => 1) as far \gset
select queue.tick() \g /dev/null
select queue.defer('ab', deadline => '2980-01-01Z', options => '{"concurrency": [{"key": "A", "limit": 1}, {"key": "B", "limit": 1}]}') as ab \gset
select queue.defer('near', deadline => '2985-01-01Z', concurrency_key => 'A', concurrency_limit => 1) as near \gset
select queue.tick() \g /dev/null
select is(pg_temp.claim(5), array[:near]::bigint[], 'behind one that waits for another key');
select pg_temp.finish_all();
select is(pg_temp.one_by_one(2), array[:ab, :far]::bigint[], 'which follows when that has room');
select queue.defer('x', concurrency_key => 'K', concurrency_limit => 1) as far \gset
select queue.tick() \g /dev/null
select queue.defer('y', deadline => '2910-01-01Z', concurrency_key => 'K', concurrency_limit => 1) from generate_series(1, 6) \g /dev/null
select queue.defer('x', deadline => '2920-01-01Z', concurrency_key => 'K', concurrency_limit => 1) as near \gset
select queue.tick() \g /dev/null
select is((select array_agg(f.id) from queue.fetch(:worker, null, 5, '{"tasks": ["x"]}') f), array[:near]::bigint[], 'the first of some tasks');
select pg_temp.finish_all();
select pg_temp.one_by_one(7) \g /dev/null

-- Beside a key whose limit grows.
select queue.defer('g', concurrency_key => 'G', concurrency_limit => 1) from generate_series(1, 3) \g /dev/null
select queue.defer('far', concurrency_key => 'K', concurrency_limit => 1) as far \gset
select queue.tick() \g /dev/null
select queue.defer('g', concurrency_key => 'G', concurrency_limit => 3), queue.defer('near', concurrency_key => 'K', concurrency_limit => 1, deadline => '2910-01-01Z') \g /dev/null
select queue.tick() \g /dev/null
select is_empty('select * from queue.check()', 'none waits although a slot is free');
select is(pg_temp.counts('G'), '3 0 3 1', 'its jobs are ready');
select queue.cancel(j.id) from queue.jobs j where j.state in ('ready', 'blocked') \g /dev/null

-- A ready job that gives way is not discarded; nor one whose lock is mixed.
select queue.defer('far', concurrency_key => 'K', concurrency_limit => 1, lock => 'k', options => '{"on_limit": "discard", "lock_mode": "mutex"}') as far \gset
select queue.tick() \g /dev/null
select queue.defer('near', concurrency_key => 'K', concurrency_limit => 1, deadline => '2910-01-01Z') as near \gset
select queue.tick() \g /dev/null
select is(pg_temp.one_by_one(2), array[:near, :far]::bigint[], 'it runs afterwards');
select queue.defer('turn', concurrency_key => 'K', concurrency_limit => 1, lock => 'k') as turn \gset
select queue.tick() \g /dev/null
select queue.defer('near', concurrency_key => 'K', concurrency_limit => 1, deadline => '2910-01-01Z') as near \gset
select queue.defer('next', lock => 'k') as next \gset
select queue.tick() \g /dev/null
select is_empty('select * from queue.check()', 'in order');
select is(pg_temp.one_by_one(3), array[:near, :turn, :next]::bigint[], 'a lock keeps its order');

-- Changed deadlines: of one that waits, and of one that is ready.
select queue.defer('a', concurrency_key => 'K', concurrency_limit => 1, deadline => '2950-01-01Z') as a, queue.defer('b', concurrency_key => 'K', concurrency_limit => 1, deadline => '2960-01-01Z') as b \gset
select queue.tick() \g /dev/null
select queue.set_deadline(array[:b]::bigint[], '2940-01-01Z') \g /dev/null
select is((select array_agg(p.id) from queue.peek() p), array[:b]::bigint[], 'one that waits gets a nearer one');
select queue.set_deadline(array[:b]::bigint[], '2955-01-01Z') \g /dev/null
select is((select array_agg(p.id) from queue.peek() p), array[:a]::bigint[], 'a ready one a later one');
select queue.defer('needs', deadline => '2910-01-01Z', needs => array[:b]::bigint[]) as needs \gset
select queue.tick() \g /dev/null
select is(pg_temp.one_by_one(3), array[:b, :needs, :a]::bigint[], 'or one that needs it has a nearer one');

-- Under a rate.
select queue.defer('far', options => '{"concurrency": [{"key": "R", "limit": 10, "rate": {"limit": 3, "per": "1 hour"}}]}') from generate_series(1, 3) \g /dev/null
select queue.tick() \g /dev/null
select queue.defer('heavy', deadline => '2910-01-01Z', options => '{"concurrency": [{"key": "R", "limit": 10, "weight": 5, "rate": {"limit": 5, "per": "1 hour"}}]}') as heavy \gset
select queue.configure_key('R', '{"rate": {"limit": 3, "per": "1 hour"}}') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.claim(1), array[:heavy]::bigint[], 'a heavy job that fits alone');
select pg_temp.finish_all();
select queue.cancel(j.id) from queue.jobs j where j.state in ('ready', 'blocked') \g /dev/null

-- 2,000 of them, each nearer than all before: they start in order.
select queue.defer('t', concurrency_key => 'M', concurrency_limit => 1, deadline => '2990-01-01Z') as last \gset
select queue.tick() \g /dev/null
select count(queue.defer('t', concurrency_key => 'M', concurrency_limit => 1, deadline => '2980-01-01Z'::timestamptz - n * interval '1 minute')) from generate_series(1, 2000) n \g /dev/null
select queue.tick() \g /dev/null
select queue.tick() \g /dev/null
select array_agg(j.id order by j.deadline) as expected from (select j.id, j.deadline from queue.jobs j where j.state in ('ready', 'blocked') order by j.deadline limit 50) j \gset
select is(pg_temp.one_by_one(50), :'expected'::bigint[], 'each of many takes the slot before the ready one');
select is_empty('select * from queue.check()', 'in order');
