-- Jobs that wait for each other, because one got another lock after the other had begun to wait: health tells of them.

select plan(16);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

\ir ../work/claim.helpers.psql
create function pg_temp.health() returns text language plpgsql as $$
begin
  perform queue.tick();
  return (select concat_ws('|', h.status, h.detail, h.fix) from queue.health() h where h.name = 'deadlocks');
end $$;
-- A job with a lock begins, and waits for a new one, which it returns.
create function pg_temp.awaited(parent bigint) returns bigint language plpgsql as $$
declare
  v_child bigint := queue.defer('child');
begin
  perform queue.await_jobs(parent, pg_temp.claim(parent), 'aw', array[v_child]);
  return v_child;
end $$;
create procedure pg_temp.lock(job bigint, lock text) language sql as $$
  select queue.fail(job, pg_temp.claim(job), 'x', null, jsonb_build_object('retry_in', 0, 'retryable', true, 'lock', lock))
$$;

select is(pg_temp.health(), 'ok|no jobs wait for each other', 'of none');

-- A parent and its child
select queue.defer('p', lock => 'L') as p \gset
select pg_temp.awaited(:p) as c \gset
select is(pg_temp.health(), 'ok|no jobs wait for each other', 'a job that waits for one that is ready');
call pg_temp.lock(:c, 'L');
select is(pg_temp.health(), format('fail|2 jobs wait for each other: %s -> %s -> %s|Cancel one of them: select queue.cancel(id)', :p, :c, :p), 'its child gets its lock');
select is(queue.why(:c), format('its lock L is held by job %s (waiting)', :p), 'why says what it waits for');
select queue.defer('late', lock => 'L') as late, queue.defer('needs', lock => 'M', needs => array[:p]) as needs \gset
select alike(pg_temp.health(), '% -> ' || :p || '|%', 'those who wait for these are not counted');

-- Over two locks
select queue.defer('a', lock => 'A') as a, queue.defer('b', lock => 'B') as b \gset
select pg_temp.awaited(:a) as of_a, pg_temp.awaited(:b) as of_b \gset
call pg_temp.lock(:of_a, 'B');
select alike(pg_temp.health(), '% -> ' || :p || '|%', 'a child waits behind another parent, whose child is ready');
call pg_temp.lock(:of_b, 'A');
select alike(pg_temp.health(), '% -> ' || :p || ', ...|%', 'and that one behind the first');
select queue.cancel(:c) \g /dev/null
select is(pg_temp.health(), format('fail|4 jobs wait for each other: %s -> %s -> %s -> %s -> %s|Cancel one of them: select queue.cancel(id)', :a, :of_a, :b, :of_b, :a), 'the first two are free');
select queue.cancel(:of_b) \g /dev/null
select is(pg_temp.health(), 'ok|no jobs wait for each other', 'so are these');
select isnt(pg_temp.claim(:b), null, 'and go on');

-- A child that needs a mutex job of its parent's lock, which waits for something else than the lock
select queue.defer('o', lock => 'mixed') as o, queue.defer('m', lock => 'mixed', options => '{"lock_mode": "mutex"}') as m \gset
select queue.defer('child', needs => array[:m]) as child \gset
select queue.await_jobs(:o, pg_temp.claim(:o), 'aw', array[:child]) \g /dev/null
select queue.fail(:m, pg_temp.claim(:m), 'x', null, '{"retry_in": "1 hour", "retryable": true}') \g /dev/null
select is((select h.status from queue.health() h where h.name = 'deadlocks'), 'ok', 'a job whose run has just ended waits for nobody');
select is(pg_temp.health(), 'ok|no jobs wait for each other', 'nor one that waits for its time');

-- A job that needs any of its needs, and awaits another one
select queue.defer('done') as done \gset
select queue.defer('any', lock => 'any', needs => array[:done], options => '{"needs_mode": "any"}') as any, queue.defer('child') as child \gset
select queue.succeed(:done, pg_temp.claim(:done));
select queue.await_jobs(:any, pg_temp.claim(:any), 'aw', array[:child]) \g /dev/null
select queue.tick() \g /dev/null
select is(queue._awaited_job(:any), :child::bigint, 'health follows it to that one');

-- 60 parents in a ring, younger than 200 that wait for others
create temp table parent as select n, queue.defer('parent', lock => 'parent ' || n) as id from generate_series(1, 260) n;
create temp table child as select p.n, pg_temp.awaited(p.id) as id from parent p;
select is(pg_temp.health(), 'ok|no jobs wait for each other', 'each waits for its child');
do $$ begin perform queue.fail(c.id, pg_temp.claim(c.id), 'x', null, jsonb_build_object('retry_in', 0, 'retryable', true, 'lock', 'parent ' || case c.n when 260 then 201 else c.n + 1 end)) from child c where c.n > 200; end $$;
select alike(pg_temp.health(), 'fail|120 jobs wait for each other: ' || (select p.id from parent p where p.n = 201) || ' -> % -> ...|%', 'then 60 for the next parent');
select is_empty('select * from queue.check()', 'all is sound');

select * from finish();
