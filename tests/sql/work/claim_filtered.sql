-- Fetching some tasks only: jobs that wait for a slot behind any number of jobs of other tasks.

select plan(56);

set pgdefer.notify = off;

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- Defers so many jobs of a task under a key.
create function pg_temp.defer(n integer, task text, concurrency jsonb default '{}', more jsonb default '{}') returns void language plpgsql as $$
begin
  perform queue.defer_many((
    select jsonb_agg(jsonb_build_object('task', defer.task, 'options', jsonb_build_object('concurrency', jsonb_build_array('{"key": "k", "limit": 5}' || defer.concurrency))) || defer.more)
    from generate_series(1, defer.n)));
end $$;
-- The tasks that a fetch of some tasks returns.
create function pg_temp.pick(tasks text[], n integer default 10, options jsonb default '{}') returns text language plpgsql as $$
begin
  return (select string_agg(f.task, ' ' order by f.n) from queue.fetch((select max(w.id) from queue.workers w), null, pick.n,
      jsonb_strip_nulls(jsonb_build_object('tasks', pick.tasks)) || pick.options) with ordinality
    f (id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, timeout, headers, parent, steps, n));
end $$;
create function pg_temp.end_all() returns void language plpgsql as $$
begin
  perform queue.finish_many(jsonb_agg(jsonb_build_object('id', v.id, 'claim', v.claim, 'outcome', 'succeeded')))
  from queue.active_job v where v.claim is not null having count(*) > 0;
  perform queue.delete(array(select j.id from queue.jobs j where j.finished_at is null));
end $$;

-- The rows of jobs that wait, and how many of them have not been moved since.
create temporary table noted (place tid, version xid);
create function pg_temp.note_waiting() returns void language plpgsql as $$
begin
  truncate noted;
  insert into noted select w.ctid, w.xmin from queue.waiting w;
end $$;
create function pg_temp.left_waiting() returns integer language plpgsql as $$
begin
  return (select count(*) from noted n join queue.waiting w on w.ctid = n.place and w.xmin = n.version);
end $$;

-- Jobs of other tasks
select pg_temp.defer(205, 'a'), pg_temp.defer(1, 'b'), pg_temp.defer(1, 'c'), pg_temp.defer(1, 'b', more => '{"deadline": "2999-01-01Z"}'), pg_temp.defer(5, 'a') \g /dev/null
select queue.tick() \g /dev/null
select is((select row (s.used, s.ready, s.waiting)::text from queue.semaphores s where s.key = 'k'), '(0,5,208)', 'most wait');
select is(pg_temp.pick('{none,neither}'), null, 'none is of these tasks');
select is(pg_temp.pick('{b}', 1), 'b', 'one behind more than 200 of another task');
select is(pg_temp.pick('{c,b}', 1), 'b', 'of two tasks, the first job');
select is(pg_temp.pick('{c,b,c}', 9), 'c', 'then the next');
select is(pg_temp.pick('{a}', 9), 'a a', 'others take what slots are left');
select is(pg_temp.pick('{a,b}', 9), null, 'and no more');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();

-- Ready jobs
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', case when n = 999 then 'b' else 'a' end)) from generate_series(1, 1000) n)) \g /dev/null
select is(pg_temp.pick('{b}'), 'b', 'one behind a thousand ready ones');
select pg_temp.end_all();
select pg_temp.defer(999, 'a', '{"limit": 2000}'), pg_temp.defer(1, 'b', '{"limit": 2000}') \g /dev/null
select is(pg_temp.pick('{b}'), 'b', 'also where jobs have a key');
select pg_temp.end_all();

-- A heavy job that does not fit is passed by none, wherever it waits.
select pg_temp.defer(1, 'used', '{"weight": 2}') \g /dev/null
select pg_temp.pick('{used}') \g /dev/null
select pg_temp.defer(205, 'a'), pg_temp.defer(1, 'light', '{"weight": 2}'), pg_temp.defer(1, 'b'), pg_temp.defer(1, 'heavy', '{"weight": 5}'), pg_temp.defer(1, 'b'), pg_temp.defer(1, 'heavy', '{"weight": 4}'), pg_temp.defer(1, 'c'), pg_temp.defer(1, 'heavy', '{"weight": 5}') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.pick('{b,c}'), 'b', 'one before a heavy job, but none behind it');
select queue.cancel(j.id) from queue.jobs j where j.task = 'heavy' and j.state = 'blocked' order by j.id limit 1 \g /dev/null
select is(pg_temp.pick('{b,c}'), 'b', 'until it leaves; the next heavy one is as good');
select queue.cancel(j.id) from queue.jobs j where j.task in ('heavy', 'light') and j.state = 'blocked' \g /dev/null
select is(pg_temp.pick('{b,c}'), 'c', 'then the last');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();
select queue.configure_key('k', '{"limit": 5, "rate": {"limit": 3, "per": "1 hour"}}');
select pg_temp.defer(1, 'used', '{"weight": 2}') \g /dev/null
select pg_temp.pick('{used}') \g /dev/null
select pg_temp.defer(2, 'a', '{"weight": 1}'), pg_temp.defer(1, 'heavy', '{"weight": 2}'), pg_temp.defer(1, 'b') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.pick('{b}'), null, 'nor if it is too heavy for the rate only');
select queue.configure_key('k', '{"limit": 5, "rate": {"limit": 4, "per": "1 hour"}}');
select is(pg_temp.pick('{b}'), 'b', 'with a higher rate it is not');
select pg_temp.end_all();
select queue.configure_key('k', '{"limit": 5, "rate": {"limit": 3, "per": "0.000001"}}');
select pg_temp.defer(1, 'used', '{"weight": 1}') \g /dev/null
select pg_temp.pick('{used}') \g /dev/null
select pg_temp.defer(3, 'a'), pg_temp.defer(1, 'heavy', '{"weight": 5}'), pg_temp.defer(1, 'b') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.pick('{b}'), null, 'nor if it is heavier than the rate, and too heavy for the slots');
select queue.configure_key('k', '{"limit": null, "rate": null}');
select pg_temp.end_all();

-- deadline_within
select pg_temp.defer(205, 'a', more => jsonb_build_object('deadline', now() + interval '1 minute')), pg_temp.defer(1, 'b', more => jsonb_build_object('deadline', now() + interval '2 minutes')),
  pg_temp.defer(1, 'b', more => jsonb_build_object('deadline', now() + interval '2 hours')), pg_temp.defer(1, 'b') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.pick('{b}', 10, '{"deadline_within": "1 hour"}'), 'b', 'of these, the one with a near deadline');
select is(pg_temp.pick('{b}', 10, '{"deadline_within": "1 hour"}'), null, 'and no other');
select is(pg_temp.pick(null, 2, '{"deadline_within": "1 hour"}'), 'a a', 'of any task');
select pg_temp.end_all();
select pg_temp.defer(205, 'a'), pg_temp.defer(1, 'b', more => jsonb_build_object('deadline', now() + interval '2 minutes', 'options', '{"share": "s", "concurrency": [{"key": "k", "limit": 5}]}'::jsonb)), pg_temp.defer(1, 'b') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.pick('{b}', 10, '{"deadline_within": "1 hour"}'), 'b', 'where shares take turns, too');
select is(pg_temp.pick('{b}'), 'b', 'and without a deadline');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();

-- A job that goes back to wait keeps its task.
select pg_temp.defer(2, 'a'), pg_temp.defer(1, 'b') \g /dev/null
select queue.tick() \g /dev/null
select queue.configure_key('k', '{"limit": 1}');
select is(pg_temp.pick('{a}', 1), 'a', 'one runs');
select is(pg_temp.pick('{a,b}'), null, 'the others meet a full key');
select is_empty('select * from queue.check()', 'in order');
select queue.configure_key('k', '{"limit": null}');
select pg_temp.end_all();

-- A queue that may start no more keeps its jobs where they wait.
select queue.configure_queue('full', '{"max_running": 1}');
select pg_temp.defer(1, 'a', more => '{"queue": "full"}'), pg_temp.defer(9, 'b', '{"limit": 3}', '{"queue": "full"}') \g /dev/null
select is(pg_temp.pick('{a}'), 'a', 'its one job runs');
select pg_temp.note_waiting();
select is(pg_temp.pick('{b}'), null, 'so no other starts');
select is(pg_temp.pick('{b}'), null, 'nor later');
select is(pg_temp.left_waiting(), 7, 'all that waited are left alone');
select is((select row (s.used, s.ready, s.waiting)::text from queue.semaphores s where s.key = 'k'), '(1,2,7)', 'and no more of them become ready than the key has room for');
select queue.configure_queue('full', '{"max_running": null}');
select pg_temp.end_all();

-- It makes no more jobs ready than it claims, so that the others keep their order.
select pg_temp.defer(5, 'a'), pg_temp.defer(5, 'c'), pg_temp.defer(5, 'b') \g /dev/null
select is(pg_temp.pick('{b}', 1), 'b', 'the first of another task');
select is((select row (s.used, s.ready, s.waiting)::text from queue.semaphores s where s.key = 'k'), '(1,5,9)', 'the others of its task wait');
select is(pg_temp.pick(null, 4), 'a a a a', 'jobs of any task start in their order');
select is(pg_temp.pick('{b}', 1), null, 'then all slots are taken');
select queue.finish_many(jsonb_agg(jsonb_build_object('id', v.id, 'claim', v.claim, 'outcome', 'succeeded'))) from queue.active_job v where v.claim is not null \g /dev/null
select is(pg_temp.pick('{a,b,c}', 5), 'a c c c c', 'and those before it follow');
select pg_temp.end_all();
select pg_temp.defer(5, 'a'), pg_temp.defer(5, 'c'), pg_temp.defer(5, 'b') \g /dev/null
select queue.tick() \g /dev/null
select is((select string_agg(f.task, ' ') from queue.fetch(:worker, null, 1, jsonb_build_object('ids', (select jsonb_agg(j.id order by j.id desc) from queue.jobs j where j.task <> 'a' and j.finished_at is null))) f), 'c', 'the first of some ids');
select is((select row (s.used, s.ready, s.waiting)::text from queue.semaphores s where s.key = 'k'), '(1,5,9)', 'the others of them wait');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();

-- Jobs that wait for another key do not hide those behind them.
-- A job gets its keys by name: it waits for z only when it has its slot of k.
select pg_temp.defer(1, 'held', '{"key": "z", "limit": 1}') \g /dev/null
select pg_temp.pick('{held}') \g /dev/null
select pg_temp.defer(5, 'a') \g /dev/null
select queue.defer('b', options => '{"concurrency": [{"key": "k", "limit": 5}, {"key": "z", "limit": 1}]}') from generate_series(1, 40) \g /dev/null
select pg_temp.defer(1, 'b') \g /dev/null
select is(pg_temp.pick('{b}', 1), 'b', 'one behind jobs that wait for a full key, too');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();
select pg_temp.defer(1, 'held', '{"key": "z", "limit": 1}') \g /dev/null
select pg_temp.pick('{held}') \g /dev/null
select pg_temp.defer(5, 'a') \g /dev/null
select queue.defer('b', options => '{"concurrency": [{"key": "k", "limit": 5}, {"key": "z", "limit": 1}]}') from generate_series(1, 900) \g /dev/null
select pg_temp.defer(1, 'b') \g /dev/null
create temporary table result (task text);
do $$
begin
  loop
    insert into result select pg_temp.pick('{b}', 1);
    commit;
    exit when (select r.task from result r) is not null or (select s.is_drained from queue.before_sleep((select max(w.id) from queue.workers w), null, '{"tasks": ["b"]}') s);
    delete from result;
  end loop;
end $$;
select is((select r.task from result r), 'b', 'where they are many, several fetches find it, and the worker does not sleep before');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();
select pg_temp.defer(9, 'a'), pg_temp.defer(9, 'b') \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.note_waiting();
select is(pg_temp.pick('{b}', 5, '{"max_running": {"default": 2}}'), 'b b', 'a worker at its own limit');
select is((select row (s.used, s.ready, s.waiting)::text from queue.semaphores s where s.key = 'k'), '(2,5,11)', 'leaves the others where they wait');
select cmp_ok(pg_temp.left_waiting(), '>=', 8, 'and does not touch those that it did not try');
select pg_temp.end_all();

-- Of jobs that are named, all are tried, however many are asked for.
select pg_temp.defer(5, 'a'), pg_temp.defer(1, 'held', '{"key": "z", "limit": 1}') \g /dev/null
select pg_temp.pick('{a,held}', 6) \g /dev/null
select pg_temp.defer(5, 'c') \g /dev/null
select queue.defer('b', options => '{"concurrency": [{"key": "k", "limit": 5}, {"key": "z", "limit": 1}]}') from generate_series(1, 2) \g /dev/null
select pg_temp.defer(1, 'b') \g /dev/null
select queue.tick() \g /dev/null
select queue.succeed(j.id, j.claim) from queue.jobs j where j.task = 'a' and j.state = 'running' limit 1 \g /dev/null
select is((select string_agg(w.reason || ' ' || w.key, ', ' order by w.id) from queue.waiting w join queue.jobs j using (id) where j.task = 'b'), 'slot kk, slot kk, slot kk', 'all three wait for a slot of the same key');
select is(pg_temp.pick(null, 5, jsonb_build_object('ids', (select jsonb_agg(j.id) from queue.jobs j where j.task = 'b' and j.finished_at is null))), 'b', 'one behind two that wait for a full key, too');
select pg_temp.end_all();
select pg_temp.defer(1, 'a') \g /dev/null
select pg_temp.pick('{a}') \g /dev/null
select pg_temp.defer(2, 'heavy', '{"weight": 5}'), pg_temp.defer(1, 'b') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.pick(null, 2, jsonb_build_object('ids', (select jsonb_agg(j.id) from queue.jobs j where j.task <> 'a' and j.finished_at is null))), 'b', 'one behind heavy jobs, which do not fit');
select pg_temp.end_all();

-- Of many queues, those without such a job do not count, however many they are.
select queue.defer('a', queue => 'many' || n, priority => 1) from generate_series(1, 120) n \g /dev/null
select queue.defer('b', queue => 'one more') \g /dev/null
select is(pg_temp.pick('{b}'), 'b', 'one behind 120 queues with jobs of another task');
select is((select count(*) from queue.fetch(:worker, null, 200)), 120::bigint, 'their jobs run');
select queue.defer('c', queue => 'one more') \g /dev/null
select is((select f.task from queue.fetch(:worker, null, 1, '{"order": "listed"}') f), 'c', 'one behind 120 queues without a job');
select pg_temp.end_all();

-- However many wait, a fetch reads few of them, whether it finds any or not.
analyze;
set plan_cache_mode = force_generic_plan;
select pg_temp.defer(1, 'used') \g /dev/null
select pg_temp.pick('{used}') \g /dev/null
select pg_temp.defer(20000, 'a', '{"weight": 2}'), pg_temp.defer(100, 'b') \g /dev/null
do $$ begin
  loop
    perform queue._lock_admission(true);
    exit when not (select a.has_more from queue._admit(1000) a);
    commit;
  end loop;
end $$;
create function pg_temp.reads() returns bigint language sql volatile as $$
  select sum(t.seq_tup_read + (select sum(i.idx_tup_read) from pg_stat_user_indexes i where i.relid = t.relid))::bigint
  from pg_stat_user_tables t where t.schemaname = 'queue' and t.relname in ('waiting', 'log', 'active_job', 'job_override')
$$;
-- maintenance was just now, so that the next fetch leaves it: it reads more rows
select set_config('pgdefer.maintained_at', extract(epoch from clock_timestamp())::text, false) \g /dev/null
select pg_stat_force_next_flush() \g /dev/null
select pg_temp.reads() as before \gset
select is(pg_temp.pick('{none}', 1), null, 'none of them');
select pg_stat_force_next_flush() \g /dev/null
select cmp_ok(pg_temp.reads() - :before, '<', 200::bigint, 'a fetch that finds none reads few');
select pg_temp.reads() as before \gset
select is(pg_temp.pick('{b}', 1), 'b', 'one of them');
select pg_stat_force_next_flush() \g /dev/null
select cmp_ok(pg_temp.reads() - :before, '<', 200::bigint, 'as does one that finds one');
select * from finish();
