-- A job, or an end, that admission can't bear, by a fault of the queue: it stops the others only until the next
-- maintenance. The end that a worker reports: work/ends.sql.

select plan(48);

\ir admission.helpers.psql

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- A job that can't be admitted, by a fault of the queue, stops the others only until the next maintenance. Here
-- the fault is a constraint on locks.
select pg_temp.run() \g /dev/null
alter table queue.lock_member add constraint lock_member_fault_check check (lock !~ 'poison');
select queue.defer('before', lock => 'a') as before, queue.defer('poison', lock => 'poison') as poison, queue.defer('after', lock => 'a') as after \gset
select queue.defer('needs it', needs => array[:poison]) \g /dev/null
select queue.open_group('fault', '{"task": "group ended"}') \g /dev/null
select queue.defer('in group', lock => 'poison', options => '{"group": "fault"}') \g /dev/null
select queue.close_group('fault') \g /dev/null
select queue.defer('held', options => '{"held": true}') as held \gset
select queue.defer('waits', lock => 'poison', needs => array[:held]) as waits \gset
select throws_ok('select pg_temp.run()', '23514', null, 'fetch fails');
set client_min_messages = error;
select lives_ok('select queue.tick()', 'tick does not');
reset client_min_messages;
select queue.tick() \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.run() || ' ' || pg_temp.run(), 'before group ended after', 'the others run, and its group has ended');
select is((select j.state || ' ' || j.reason || ' ' || j.attempts from queue.jobs j where j.id = :poison), 'failed admission 0', 'it has failed');
select matches((select j.error from queue.jobs j where j.id = :poison), 'lock_member_fault_check.* \(23514\)$', 'and says why');
select is((select j.state from queue.jobs j where j.task = 'needs it'), 'upstream_failed', 'those that need it know');
select is_empty('select * from queue.check()', 'sound');
-- Who ends a job of a lock admits what is new.
select queue.defer('ends', lock => 'b', concurrency_key => 'b', concurrency_limit => 1) as ends \gset
select queue.tick() \g /dev/null
select f.claim as ends_claim from queue.fetch(:worker, options => jsonb_build_object('ids', array[:ends])) f \gset
select queue.defer('poison', lock => 'poison') \g /dev/null
set client_min_messages = error;
select lives_ok(format($$select queue.finish_many('[{"id": %s, "claim": %s, "outcome": "succeeded"}]')$$, :ends, :ends_claim), 'a job can end beside one at fault');
reset client_min_messages;
select is((select j.state from queue.jobs j where j.id = :ends), 'succeeded', 'and has succeeded');
-- parked jobs, and as many faults as no jobs cause
select queue.defer('p') from generate_series(1, 3) \g /dev/null
do $$ begin perform queue._lock_admission(true), queue._admit(2); end $$;
select queue.defer('p', lock => l) from unnest('{fine,poison}'::text[]) l \g /dev/null
do $$ begin perform queue._lock_admission(true), queue._admit(1); end $$;
select is((select count(*) from queue.waiting w where w.reason = 'parked'), 2::bigint, 'jobs with locks wait for the backlog');
set client_min_messages = error;
select lives_ok('select queue.tick()', 'one of them is at fault');
select is((select array_agg(j.state || j.lock) from queue.jobs j where j.task = 'p' and j.state <> 'ready'), '{failedpoison}', 'and fails alone');
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'p', 'lock', 'poison')) from generate_series(1, 101) n)) \g /dev/null
select queue.defer('innocent', lock => 'fine too') \g /dev/null
do $$ begin perform queue._lock_admission(true), queue._admit(1000, p_singly => true); end $$;
select is((select count(*) from queue.jobs j where j.task = 'p' and j.state = 'failed'), 101::bigint, 'of many, one call lets a hundred fail');
select is((select string_agg(distinct j.state || ' ' || j.reason, ', ') from queue.jobs j where j.task in ('p', 'innocent') and j.reason = 'backlog'), 'blocked backlog', 'the others wait, in case it is mended');
alter table queue.lock_member drop constraint lock_member_fault_check;
select lives_ok('select queue.tick()', 'until it is mended');
reset client_min_messages;
select is((select count(*) from queue.jobs j where j.task in ('p', 'innocent') and j.reason = 'backlog'), 0::bigint, 'then they are admitted');
select is((select r.outcome from queue.retry(array[:poison]) r), 'ready', 'then it can be retried');
select is((select r.outcome from queue.retry(array[:waits]) r), 'upstream_failed', 'and one with a need waits for that');
select lives_ok($$select queue.delete_queue('default', true)$$, 'the rest goes');


-- A plain job, in a lane that is there already; and one that is due. A fault is a constraint on places.
create function pg_temp.break(task text) returns void language plpgsql as $$
begin
  execute format('alter table queue.active_job add constraint active_job_fault_check check (id <> %s)', (select j.id from queue.jobs j where j.task = break.task));
end $$;
create function pg_temp.mend() returns void language plpgsql as $$
begin
  alter table queue.active_job drop constraint if exists active_job_fault_check;
  perform queue._lock_admission(true), queue._retry_shelved();
end $$;
select pg_temp.run() \g /dev/null
select queue.defer('warm') \g /dev/null
select pg_temp.run() \g /dev/null
select queue.defer('plain poison'), queue.defer('plain') \g /dev/null
select pg_temp.break('plain poison') \g /dev/null
select throws_ok('select pg_temp.run()', '23514', null, 'a plain job stops a fetch');
set client_min_messages = error;
select lives_ok('select queue.tick()', 'but not maintenance');
select is(pg_temp.run(), 'plain', 'the others run');
select is((select j.state || ' ' || j.reason from queue.jobs j where j.task = 'plain poison'), 'failed admission', 'it has failed');
select pg_temp.mend() \g /dev/null
select queue.pause(task => t, until => clock_timestamp() + interval '1 hour'), queue.defer(t) from unnest('{due poison,due}'::text[]) t \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.break('due poison') \g /dev/null
do $$ begin delete from queue.pause; update queue.waiting w set at = clock_timestamp() where w.reason = 'task_paused'; perform queue._lock_admission(true), queue._rewind_due_mark(); end $$;
select throws_ok('select pg_temp.run()', '23514', null, 'a job that is due stops a fetch');
select lives_ok('select queue.tick()', 'but not maintenance');
select is(pg_temp.run(), 'due', 'the others run');
select is((select string_agg(c.problem || ', ' || j.task, '; ') from queue.check() c left join queue.jobs j using (id)), 'a settlement that the cursor has passed, due poison', 'it is shelved, and check names it');
select matches((select queue.why(j.id) from queue.jobs j where j.task = 'due poison'), '^it is shelved, because of a fault', 'why says so');
select pg_temp.mend() \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.run(), 'due poison', 'once mended, it runs');

-- A job that a rate lets start
set client_min_messages = error;
select queue.defer(t, options => '{"concurrency": [{"key": "rate", "rate": {"limit": 1, "per": "3 s"}}]}') from unnest('{first of rate,rate poison}'::text[]) t \g /dev/null
select is(pg_temp.run(), 'first of rate', 'one starts');
select pg_temp.break('rate poison') \g /dev/null
do $$ begin
  while not exists (select from queue.waiting w where w.key = 'krate' and w.at <= clock_timestamp()) loop
    perform pg_sleep(0.01);
  end loop;
end $$;
select queue.defer('beside') \g /dev/null
select throws_ok('select pg_temp.run()', '23514', null, 'the other stops a fetch');
select queue.tick() \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.run(), 'beside', 'but not maintenance');
select pg_temp.mend() \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.run(), 'rate poison', 'once mended, it runs');
select is_empty('select * from queue.check()', 'sound');
reset client_min_messages;

-- An end that has a slot and a turn: it fails at the turn, when its slot is free already
select queue.defer('ends', lock => 'l', concurrency_key => 'k', concurrency_limit => 1), queue.defer('turn poison', lock => 'l') \g /dev/null
select pg_temp.break('turn poison') \g /dev/null
select array_agg(f.task) from queue.fetch(:worker, max_jobs => 2) f \g /dev/null
do $$ begin perform queue.succeed(j.id, j.claim) from queue.jobs j where j.state = 'running'; end $$;
select queue.tick() \g /dev/null
select is((select s.used from queue.semaphores s where s.key = 'k'), 0, 'the slot is free');
select pg_temp.mend() \g /dev/null
select queue.tick() \g /dev/null
select is((select s.used from queue.semaphores s where s.key = 'k'), 0, 'and is freed once');
select is(pg_temp.run(), 'turn poison', 'once mended, the turn is passed on');

-- A new job at fault that another transaction is replacing: maintenance leaves it for later, and does not spin
set pgdefer.notify = off;  -- PREPARE TRANSACTION refuses notifications
alter table queue.lock_member add constraint lock_member_fault_check check (lock !~ 'poison');
select queue.defer('replaced', lock => 'poison', queueing_lock => 'q') \g /dev/null
begin;
select queue.defer('replaced', lock => 'poison', queueing_lock => 'q', options => '{"on_conflict": "replace"}') \g /dev/null
prepare transaction 'replacing';
create function pg_temp.rounds() returns integer language plpgsql as $$
begin
  perform queue._lock_admission(true);
  for n in 1 .. 10 loop
    if not (select a.has_more from queue._admit_or_singly(1000) a) then
      return n;
    end if;
  end loop;
end $$;
select is(pg_temp.rounds(), 2, 'it is tried twice');
rollback prepared 'replacing';
alter table queue.lock_member drop constraint lock_member_fault_check;
select is(pg_temp.run(), 'replaced', 'once mended, it runs');
set pgdefer.notify = on;

-- A transaction that has handed an end over itself, which its own admission does not read
begin;
insert into queue.pending_settlement (job_id, kind, flags) values (1, 'recheck', 0);
select lives_ok('select queue._lock_admission(true), queue._admit(1000, p_singly => true)', 'an end of its own is none to settle');
rollback;

-- A replacement that was shelved, and is mended when a later one has been applied
select queue.defer('r', queueing_lock => 'r') as replaced \gset
select queue.tick() \g /dev/null
alter table queue.job_override add constraint fault_check check (args ->> 'n' <> '1');
select queue.defer('r', '{"n": 1}', queueing_lock => 'r', options => '{"on_conflict": "replace"}') \g /dev/null
select queue.tick() \g /dev/null
select is((select c.problem from queue.check() c), 'a settlement that the cursor has passed', 'it is shelved');
select queue.defer('r', '{"n": 2}', queueing_lock => 'r', options => '{"on_conflict": "replace"}') \g /dev/null
select queue.tick() \g /dev/null
alter table queue.job_override drop constraint fault_check;
do $$ begin perform queue._lock_admission(true), queue._retry_shelved(); end $$;
select queue.tick() \g /dev/null
select is((select j.args from queue.jobs j where j.id = :replaced), '{"n": 2}', 'the later one remains');
select is_empty('select * from queue.check()', 'sound again');
select is(pg_temp.run(), 'r', 'and the job runs');

-- Ends that fail only together
select queue.defer('ends', lock => l), queue.defer('behind', lock => l) from unnest('{a,b}'::text[]) l \g /dev/null
select queue.defer('ends', concurrency_key => k, concurrency_limit => 1), queue.defer('behind', concurrency_key => k, concurrency_limit => 1) from unnest('{a,b}'::text[]) k \g /dev/null
create function public.fault() returns trigger language plpgsql as $$
begin
  if (select count(*) from entered e join queue.job j on j.id = e.id where j.task = 'behind') > 1 then
    raise cardinality_violation;
  end if;
  return null;
end $$;
create trigger fault after insert on queue.active_job referencing new table as entered for each statement execute function public.fault();
select array_agg(f.task) from queue.fetch(:worker, max_jobs => 4) f \g /dev/null
do $$ begin perform queue.succeed(j.id, j.claim) from queue.jobs j where j.state = 'running'; end $$;
select throws_ok('select pg_temp.run()', '21000', null, 'ends that fail together stop a fetch');
select lives_ok('select queue.tick()', 'but not maintenance');
reset client_min_messages;
select is(pg_temp.run(), 'behind behind behind behind', 'all turns and slots are passed on');
select is_empty('select * from queue.check()', 'sound again');
drop trigger fault on queue.active_job;
drop function public.fault();

select * from finish();
