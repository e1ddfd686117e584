-- The backlog: urgent jobs do not wait behind it, and locks keep their order across it.

select plan(31);

\ir admission.helpers.psql

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- A later commit of higher priority does not wait behind a backlog.
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'low', 'priority', -1)) from generate_series(1, 5000) n)) \g /dev/null
select is(pg_temp.run(1), 'low', 'the first slice of a backlog is admitted');
select isnt_empty('select * from queue.backlog_part', 'and more waits');
select queue.defer('high', priority => 5) \g /dev/null
select pg_sleep(0.011) \g /dev/null
select is(pg_temp.run(1), 'high', 'the first fetch that starts 10 ms after a commit, with enough to do, admits it and claims it');
select isnt_empty('select * from queue.backlog_part', 'though a backlog is before it');
select is(pg_temp.run(1), 'low', 'then the backlog continues');
select pg_temp.run(2000) \g /dev/null
select pg_temp.run(2000) \g /dev/null
select pg_temp.run(2000) \g /dev/null
select is((select count(*) from queue.jobs j where j.task = 'low' and j.state = 'succeeded'), 5000::bigint, 'all of the backlog runs');

-- The least priority has no negative.
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'least', 'queue', 'least', 'priority', -2147483648)) from generate_series(1, 5000) n)) \g /dev/null
select is((select count(*) from queue.fetch(:worker, '{least}', 1)), 1::bigint, 'a slice of a backlog of the least priority is admitted');
select lives_ok($$select queue._has_stock('{least}')$$, 'and compared with what waits');
select queue.delete_queue('least', true) \g /dev/null

-- Nor does one committed with the backlog, before any admission: whatever the size of batches.
do $$
begin
  for i in 1 .. 20 loop
    perform queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'backlog', 'queue', 'outage', 'priority', n % 3 - 1)) from generate_series(1, 500) n));
    commit;
    perform queue.defer('urgent', queue => 'outage', priority => 5 + i % 2) where i in (7, 20);
    commit;
  end loop;
end $$;
create function pg_temp.next(max_jobs integer) returns text language plpgsql as $$
begin
  return (select string_agg(f.task || ' ' || f.priority, ',') from queue.fetch((select max(w.id) from queue.workers w), '{outage}', max_jobs) f);
end $$;
select is(pg_temp.next(1), 'urgent 6', 'the most urgent of an outage comes first');
select is(pg_temp.next(2), 'urgent 5,backlog 1', 'the next one second, before all others');
create temp table outage (n integer generated always as identity, priority integer);
do $$
begin
  for i in 1 .. 200 loop
    insert into outage (priority) select f.priority from queue.fetch((select max(w.id) from queue.workers w), '{outage}', 500) f;
    exit when not found and not exists (select from queue.unadmitted);
    commit;
  end loop;
end $$;
select is((select count(*) from outage), 9999::bigint, 'all others follow');
select is_empty('select * from outage o join outage p on p.n = o.n + 1 where p.priority > o.priority', 'by priority, in batches of 500 too');
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'many', 'queue', 'bands', 'priority', n)) from generate_series(1, 3000) n)) \g /dev/null
select is((select max(f.priority) from queue.fetch(:worker, '{bands}', 1) f), 3000, 'the same with 3,000 priorities');
select queue.delete_queue('outage', true), queue.delete_queue('bands', true) \g /dev/null

-- Jobs with many keys: an admission takes fewer of them, the most urgent first, and other jobs do not wait for all.
create function pg_temp.with_keys(task text, jobs integer, keys integer, priority integer) returns jsonb language sql as $$
  select jsonb_agg(jsonb_build_object('task', task, 'queue', 'keys', 'priority', priority, 'options', jsonb_build_object('concurrency',
    (select jsonb_agg(jsonb_build_object('key', concat_ws('.', task, n, k), 'limit', 1)) from generate_series(1, keys) k)))) from generate_series(1, jobs) n
$$;
create function pg_temp.tasks(max_jobs integer) returns text language plpgsql as $$
begin
  return (select string_agg(distinct f.task, ' ') from queue.fetch((select max(w.id) from queue.workers w), '{keys}', max_jobs) f);
end $$;
create function pg_temp.parked() returns bigint language sql as $$select count(*) from queue.waiting w where w.reason = 'parked'$$;
select queue.defer_many(pg_temp.with_keys('heavy', 60, 100, 0) || pg_temp.with_keys('urgent', 1, 1, 7)) \g /dev/null
select is(pg_temp.tasks(1), 'urgent', 'jobs with 6,000 keys: the most urgent comes first');
select is(pg_temp.parked(), 11::bigint, 'the last ones wait for another admission');
select is((select max(w.id) - min(w.id) from queue.waiting w where w.reason = 'parked'), 10::bigint, 'by id');
select is((select distinct queue.why(w.id) from queue.waiting w where w.reason = 'parked'), 'a backlog of jobs with keys or needs is being admitted, the most urgent first', 'and say so');
select queue.defer('mine', queue => 'mine') \g /dev/null
select pg_sleep(0.011) \g /dev/null
select is((select count(*) from queue.fetch(:worker, '{mine}', 1)), 1::bigint, 'later jobs do not wait for them');
select queue.tick(), queue.tick() \g /dev/null
select is((select count(*) from queue.active_job aj join queue.job j on j.id = aj.id where j.task = 'heavy'), 60::bigint, 'all come in');
select queue.delete_queue('keys', true), queue.delete_queue('mine', true) \g /dev/null
-- during a backlog of less urgent jobs: before its end
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'low', 'queue', 'keys', 'priority', -1)) from generate_series(1, 5000) n)) \g /dev/null
select is(pg_temp.tasks(1), 'low', 'a backlog');
select queue.defer_many(pg_temp.with_keys('heavy', 60, 100, 0) || pg_temp.with_keys('urgent', 1, 1, 7)) \g /dev/null
select pg_sleep(0.011) \g /dev/null
select is(pg_temp.tasks(1), 'urgent', 'the most urgent of later ones does not wait for it');
select is(pg_temp.parked(), 11::bigint, 'others are parked');
select is(pg_temp.tasks(5), 'heavy', 'those that are not come next');
select is(pg_temp.tasks(50), 'heavy', 'then the parked ones');
select is(pg_temp.parked(), 0::bigint, 'all of them');
select isnt_empty('select * from queue.backlog_part', 'before the end of the backlog');
select queue.delete_queue('keys', true) \g /dev/null

-- Ordered locks across a backlog: creation order, although later transactions are admitted first
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'lock ' || n % 3, 'lock', 'l' || n % 3, 'priority', n % 5)) from generate_series(1, 300) n)) \g /dev/null
do $$
begin
  for i in 1 .. 40 loop
    perform queue._lock_admission(true);
    perform queue._admit(10);
    if i % 3 = 0 then
      perform queue.defer('lock ' || i % 3, lock => 'l' || i % 3, priority => 100 + i);
    end if;
    if i = 5 then
      create temp table parked as select count(*) as n, max(j.reason) as reason, min(queue.why(j.id)) as why from queue.jobs j where j.reason = 'backlog';
    end if;
    commit;
  end loop;
end $$;
select is((select (p.n > 0, p.reason)::text from parked p), '(t,backlog)', 'younger jobs with a lock are parked while older ones of it may be in the backlog');
select matches((select p.why from parked p), 'backlog', 'why says so');
select queue.defer('lock 0', lock => 'l0', priority => 1000) \g /dev/null
create temp table order_of_locks (n integer generated always as identity, id bigint, lock text, priority integer);
do $$
begin
  for i in 1 .. 1000 loop
    insert into order_of_locks (id, lock, priority)
    select f.id, f.lock, f.priority from queue.fetch((select max(w.id) from queue.workers w), null, 2) f;
    exit when not found and not exists (select from queue.jobs j where j.lock is not null and j.finished_at is null);
    perform queue.succeed(r.id, r.claim) from queue.active_job r where r.claim is not null;
    commit;
  end loop;
end $$;
select is((select count(*) from order_of_locks), 314::bigint, 'every job with a lock ran');
select is_empty('select * from order_of_locks o join order_of_locks p on p.lock = o.lock and p.n > o.n and p.id < o.id', 'in creation order, whatever the priorities');
select is_empty('select * from queue.waiting w where w.reason = ''parked''', 'none is parked any more');

select * from finish();
