-- Quarantine: a job that has crashed runs alone, all jobs get their turn, and a worker that is never idle makes room.

select plan(50);

-- Fetches for a worker: the tasks, in claim order. A session that looked for long at what a worker runs, as on a
-- busy machine, does not look again too soon: forget that.
create function pg_temp.got(worker bigint, n integer default 10, queues text[] default null, options jsonb default null) returns text language plpgsql as $$
begin
  perform set_config('pgdefer.look_after', '', false);
  return (select string_agg(f.task, ' ') from queue.fetch(worker, queues, n, options) f);
end $$;

-- A worker's claims on a task succeed.
create function pg_temp.finish(worker bigint, task text default null) returns void language sql as $$
  select queue.finish_many(o) from (
    select jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'succeeded')) as o from queue.jobs j
    where j.worker_id = finish.worker and j.state = 'running' and (finish.task is null or j.task = finish.task)) x
  where x.o is not null
$$;

-- As finish, and fetches in the same call.
create function pg_temp.finish_got(worker bigint, n integer default 10) returns text language plpgsql as $$
declare
  v_outcomes jsonb;
begin
  perform set_config('pgdefer.look_after', '', false);
  select jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'succeeded')) into v_outcomes
  from queue.jobs j where j.worker_id = finish_got.worker and j.state = 'running';
  return (select string_agg(f.task, ' ') from queue.finish_and_fetch(finish_got.worker, coalesce(v_outcomes, '[]'), null, n) f);
end $$;

-- Jobs of these tasks, which have crashed once and are ready: two transactions.
create function pg_temp.deferred(variadic tasks text[]) returns void language sql as $$
  select queue.defer(t, queue => 'c', options => '{"retry": {"max_crashes": 9}}') from unnest(tasks) t
$$;
create function pg_temp.crash() returns void language plpgsql as $$
declare
  v_worker bigint := queue.register_worker('victim', '{c}');
begin
  perform from queue.fetch(v_worker, '{c}', 1000);
  update queue.worker set last_seen_at = last_seen_at - interval '1 hour', dead_after = '0' where id = v_worker;
  perform queue.reap();
end $$;

-- Lets time pass since all crashes.
create function pg_temp.later(passed interval) returns void language sql as $$
  update queue.attempt set finished_at = finished_at - passed;
  update queue.worker set apart_since = apart_since - passed, apart_until = apart_until - passed where apart_until is not null;
$$;

select queue.register_worker('a', info => '{"dead_after": "1 day"}') as a, queue.register_worker('b', info => '{"dead_after": "1 day"}') as b \gset

-- Alone
select pg_temp.deferred('x', 'y');
select pg_temp.crash();
select queue.defer('p' || n) from generate_series(1, 4) n \g /dev/null
select is(pg_temp.got(:a), 'x', 'a worker that runs nothing gets a job that crashed, and nothing beside it');
select is(pg_temp.got(:a), null, 'nor with the next call');
select is(pg_temp.got(:a, 10, '{default}'), null, 'whatever queues it asks for');
select is(pg_temp.got(:a, 10, null, '{"tasks": ["p1"]}'), null, 'and whatever options');
select is(pg_temp.finish_got(:b, 1), 'y', 'another worker gets the other');
select is((select string_agg(concat_ws(' ', task, state, crashes), ', ' order by task) from queue.jobs where queue = 'c'), 'x running 1, y running 1', 'both run');
select pg_temp.finish(:a);

-- Turns
select pg_temp.deferred('z1', 'z2', 'z3');
select pg_temp.crash();
select is(pg_temp.finish_got(:a, 1), 'p1', 'after one that ran alone it is the others'' turn');
select is(pg_temp.finish_got(:a, 1), 'z1', 'then that of those that crashed, counting what the call itself ends');
select is(pg_temp.finish_got(:a, 1), 'p2', 'and so on');
select pg_temp.finish(:a);
select is(pg_temp.got(:a, 1), 'z2', 'also in two calls');
select is(pg_temp.finish_got(:a, 5), 'p3 p4', 'others come together');
select pg_temp.finish(:a, 'p3');
select is(pg_temp.got(:a), null, 'while one of them runs no crashed job comes');
select pg_temp.finish(:a);
select is(pg_temp.got(:a), 'z3', 'but when it has ended');
select queue.defer('newcomer') as newcomer \gset
select is(pg_temp.got(:a), null, 'jobs deferred meanwhile do not run beside it');
select queue.cancel(:newcomer) \g /dev/null
select is(pg_temp.finish_got(:a), null, 'all is done');
select is_empty('select * from queue.worker where id = ' || :a || ' and apart_since is not null', 'and the worker is as any other');
select pg_temp.finish(:b);
select is_empty('select * from queue.check()', 'everything is in order');

-- Options
select pg_temp.deferred('o1', 'o2');
select pg_temp.crash();
select is(pg_temp.got(:a, 1, '{other}'), null, 'only of the queues asked for');
select is(pg_temp.got(:a, 1, null, '{"tasks": ["o2"]}'), 'o2', 'tasks');
select is(pg_temp.finish_got(:a, 1), 'o1', 'the other one');
select pg_temp.finish(:a);
select pg_temp.deferred('o3');
select pg_temp.crash();
select queue.defer('plain') as plain \gset
select is(pg_temp.got(:a, 2, null, jsonb_build_object('ids', jsonb_build_array(:plain))), 'plain', 'ids of others');
select pg_temp.finish(:a);
select is(pg_temp.got(:a, 2, null, jsonb_build_object('ids', array(select id from queue.jobs where task = 'o3'))), 'o3', 'ids of one that crashed');
select pg_temp.finish(:a);
select pg_temp.deferred('by hand');
select pg_temp.crash();
select is((select task from queue.next('{c}', ack => true)), 'by hand', 'an operator takes it by hand');

-- A worker that is never idle
select queue.defer('long'), queue.defer('more'), queue.defer('more') \g /dev/null
select is(pg_temp.got(:a, 1), 'long', 'a long job');
select pg_temp.deferred('q');
select pg_temp.crash();
select is(pg_temp.got(:a, 1), 'more', 'just after a crash others continue');
select pg_temp.finish(:a, 'more');
select pg_temp.later('6 s');
select is(pg_temp.got(:a, 1), null, 'once it has waited for 5 s a busy worker gets nothing more');
select ok((select apart_until - apart_since = '30 s' from queue.worker where id = :a), 'for 30 s');
select is(pg_temp.got(:a, 1), null, 'nor with the next call');
select queue.defer('long') \g /dev/null
select is(pg_temp.got(:b, 1, '{default}'), 'more', 'the other one, which would make room at the same time, continues');
select is(pg_temp.got(:b, 1), 'long', 'though it could get it');
select is(pg_temp.finish_got(:a, 1), 'q', 'when its jobs have ended it gets the job that crashed');
select pg_temp.finish(:a);
select pg_temp.finish(:b);

-- A worker whose jobs do not end
select queue.defer('longest', priority => 1), queue.defer('m1'), queue.defer('m2'), queue.defer('m3') \g /dev/null
select is(pg_temp.got(:a, 1), 'longest', 'a longer job');
select pg_temp.deferred('q');
select pg_temp.crash();
select pg_temp.later('6 s');
select is(pg_temp.got(:a, 1), null, 'it makes room');
select pg_temp.later('31 s');
select is(pg_temp.got(:a, 1), 'm1', 'for no longer than it was to');
select is(pg_temp.got(:b, 1, '{default}'), 'm2', 'another worker');
select is(pg_temp.got(:b, 1), null, 'makes room in its place');
select pg_temp.finish(:b);
update queue.worker set apart_since = null, apart_until = null where id = :b;
select pg_temp.later('10 minutes');
select is(pg_temp.got(:a, 1), null, 'it tries again');
select cmp_ok((select apart_until - apart_since from queue.worker where id = :a), '>', '2 minutes'::interval, 'for longer, as the job has waited longer');
select is(pg_temp.got(:b, 1), 'q', 'one that is idle takes it meanwhile');
select is(pg_temp.got(:a, 1), 'm3', 'and so the first need not wait for it');
select pg_temp.finish(:a);
select pg_temp.finish(:b);

-- A worker that may get no job does not stand in line before one that may
update queue.worker set apart_since = null, apart_until = null, apart_id = null, apart_claim = null;
create function pg_temp.hears(worker bigint) returns boolean language sql as $$
  select 'pgdefer' = any (s.channels) from queue.before_sleep(worker, options => '{"in_line": true, "busy": true}') s $$;
select queue.register_worker('c', info => '{"dead_after": "1 day"}') as c \gset
select pg_temp.hears(w) from unnest(array[:a, :b, :c]) w \g /dev/null
update queue.sleeper set joined_at = joined_at - interval '1 s';
select is(pg_temp.hears(:c), false, 'one behind two others does not hear of jobs');
select pg_temp.deferred('l1', 'l2');
select pg_temp.crash();
select is(pg_temp.got(:a, 1) || pg_temp.got(:b, 1), 'l1l2', 'they run jobs that crashed');
select pg_temp.hears(w) from unnest(array[:a, :b]) w \g /dev/null
select is(pg_temp.hears(:c), true, 'so it hears of jobs, as they would get none');
select pg_temp.finish(:a), pg_temp.finish(:b) \g /dev/null

-- If the job could not start, no worker makes room
select queue.configure_queue('c', '{"max_running": 1}') \g /dev/null
select pg_temp.deferred('f1');
select pg_temp.crash();
select queue.defer('full', queue => 'c', priority => 5), queue.defer('n1'), queue.defer('n2'), queue.defer('n3') \g /dev/null
select is(pg_temp.got(:b, 1, '{default}'), 'n1', 'b is busy');
select is(pg_temp.got(:b, 1, '{c}'), 'full', 'and its queue full');
select pg_temp.later('1 minute');
select is(pg_temp.got(:a, 1), 'n2', 'a worker that runs nothing gets another job');
select is(pg_temp.got(:a, 1), 'n3', 'and no worker makes room for it');
select pg_temp.finish(:a);
select pg_temp.finish(:b);

-- Without quarantined jobs their lanes are idle
select pg_temp.got(:a), pg_temp.finish(:a) \g /dev/null
select queue.tick() \g /dev/null
select is_empty('select * from queue.lane where kind = 2 and not is_idle', 'lanes of quarantined jobs that are empty are out of sight');

-- A search for what a worker runs took long just now, so nothing is known: that alone keeps no job from it.
select queue.deregister_worker(w.id) from queue.worker w where w.gone_at is null \g /dev/null
select queue.delete(array(select j.id from queue.jobs j where j.finished_at is null)) \g /dev/null
select queue.register_worker('new') as new \gset
select pg_temp.deferred('r');
select pg_temp.crash();
select queue.defer('plain') \g /dev/null
select pg_temp.later('6 s');
select set_config('pgdefer.look_after', (extract(epoch from clock_timestamp()) + 50)::text, false) \g /dev/null
select is((select f.task from queue.fetch(:new) f), 'plain', 'a worker that runs nothing, as far as is known, gets a job');
select pg_temp.finish(:new);
select is(pg_temp.got(:new), 'r', 'and the one that crashed once that is known');
select pg_temp.finish(:new);

select * from finish();
