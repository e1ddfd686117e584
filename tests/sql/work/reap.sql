-- Reaping: what it ends, and what it leaves: dead workers, leases, timeouts, crash loops, damaged rows.
select plan(158);

\ir workers.helpers.psql

alter table queue.worker disable trigger stay_alive;
select queue.register_worker('w') as w1, queue.register_worker('w', info => '{"dead_after": "1 day"}') as w2 \gset
alter table queue.worker enable trigger stay_alive;

-- A dead worker's claims end as crashed, and its jobs are ready again at once
select queue.defer('t', options => '{"retry": {"max_attempts": 1}}') as a, queue.defer('t', lock => 'l', concurrency_key => 'k', concurrency_limit => 1) as b, queue.defer('t', lock => 'l') as b2 \gset
select count(*), max(claim) as claim from queue.fetch(:w1, null, 10) \gset
select is(:count, 2, 'the worker has two claims');
select is_empty('select * from queue.reap() where reaped <> 0', 'while it lives nothing is reaped');
select ok((select next_expiry between now() and now() + interval '31 s' from queue.reap()), 'reap says when the next may die');
select pg_temp.kill(:w1);
select is((select is_alive from queue.workers where id = :w1), false, 'without a heartbeat it is not alive');
select is((select count(*) from queue.fetch(:w2, null, 10)), 0::bigint, 'until it is reaped its jobs are its own');
update queue.worker set dead_after = '30 s' where id = :w1;
select is_empty(format('select * from queue.heartbeat(%s)', :w1), 'a heartbeat that comes before the reaper');
select is((select reaped from queue.reap()), 0, 'saves it');
select pg_temp.kill(:w1);
select is((select reaped from queue.reap()), 2, 'reap ends both claims');
select is(pg_temp.job(:a), 'ready 1 0 1 1', 'crashes are counted apart from failures: max_attempts counts these only');
select is(pg_temp.job(:b), 'ready 1 0 1 1', 'a job with lock and slot goes back to its place');
select is(pg_temp.history(:a), 'crashed', 'the attempt has crashed');
select ok((select error like 'worker % (w) died: its last heartbeat was at %' from queue.attempts where job_id = :a), 'and says how');
select is((select error like 'worker %' from queue.jobs where id = :a), true, 'so does the job');
select is_empty('select * from queue.check()', 'lock and slot are in order');
select is((select reaped from queue.reap()), 0, 'they are reaped once');
select is(test.refusal(format('select queue.heartbeat(%s)', :w1)), 'QJ007', 'the worker learns that it is gone');
select is(test.refusal(format('select * from queue.fetch(%s)', :w1)), 'QJ007', 'fetch tells it too');
select is(test.refusal(format('select * from queue.before_sleep(%s)', :w1)), 'QJ007', 'and before_sleep');
select is(test.refusal(format('select queue.succeed(%s, %s)', :a, :claim)), 'QJ002', 'it can''t finish what it lost');
select is(test.refusal(format('select queue.fail(%s, %s, ''late'')', :b, :claim)), 'QJ002', 'nor fail it');
select is(test.refusal(format('select queue.extend(%s, %s, ''1 hour'')', :a, :claim)), 'QJ002', 'nor extend it');
select is((select not is_alive and not has_left from queue.workers where id = :w1), true, 'it is shown for a while');

-- A job with a crash is next claimed alone
select id, claim from queue.fetch(:w2, null, 10) \gset
select is(:id::bigint, :a::bigint, 'a worker that runs nothing gets it, and nothing beside it');
select queue.succeed(:id, :claim) \g /dev/null
select is(pg_temp.job(:a), 'succeeded 2 0 1 2', 'it may succeed');
select id, claim from queue.fetch(:w2, null, 10) \gset
select is(:id::bigint, :b::bigint, 'the other''s turn');
select is(queue.fail(:id, :claim, 'e'), 'failed', 'a failure is still the first');
select id, claim from queue.fetch(:w2, null, 10) \gset
select is(:id::bigint, :b2::bigint, 'the lock passes to the next, which has not crashed');
select queue.succeed(:id, :claim) \g /dev/null

-- crash_loop: at max_crashes, if the last crash came while the job ran alone
create function pg_temp.crash(options jsonb default null) returns text language plpgsql as $$
declare
  v_worker bigint := queue.register_worker('victim');
  v_id bigint;
begin
  perform set_config('pgdefer.look_after', '', false);  -- on a busy machine the last look took long
  select f.id into v_id from queue.fetch(v_worker, null, 1, crash.options) f;
  perform pg_temp.kill(v_worker);
  perform queue.reap();
  return pg_temp.job(v_id);
end $$;
select queue.defer('loop') as id \gset
select is(pg_temp.crash(), 'ready 1 0 1 1', 'the first crash');
select is(pg_temp.crash(), 'ready 2 0 2 2', 'the second, alone');
select is(pg_temp.crash(), 'failed crash_loop 3 0 3 3', 'the third, alone: crash_loop at the default of 3');
select is((select error like 'worker % died%' from queue.jobs where id = :id), true, 'with its error');
select queue.defer('one', options => '{"retry": {"max_crashes": 1}}') \g /dev/null
select is(pg_temp.crash(), 'ready 1 0 1 1', 'max_crashes 1: the first crash is not charged, as other code may have caused it');
select is(pg_temp.crash(), 'failed crash_loop 2 0 2 2', 'the next one is');
select queue.defer('unlimited', options => '{"retry": {"max_crashes": null}}') as id \gset
select pg_temp.crash() \g /dev/null
select count(pg_temp.crash()) from generate_series(1, 5) \g /dev/null
select is(pg_temp.job(:id), 'ready 6 0 6 6', 'max_crashes null: never');
select queue.cancel(:id) \g /dev/null
select queue.defer('fragile', options => '{"retry": {"on_crash": "fail", "max_attempts": 9}}') \g /dev/null
select is(pg_temp.crash(), 'failed crashed 1 0 1 1', 'on_crash fail: failed at the first, wherever it ran');
select queue.register_task('by task', '{"retry": {"on_crash": "fail"}}');
select queue.defer('by task') \g /dev/null
select is(pg_temp.crash(), 'failed crashed 1 0 1 1', 'by the task''s policy too');
-- a run that waits ends the count
select queue.defer('long life', options => '{"retry": {"max_crashes": 2}}') as id \gset
select pg_temp.crash() \g /dev/null
select claim from queue.fetch(:w2) \gset
select queue.sleep(:id, :claim, 'nap', now()) \g /dev/null
select is(pg_temp.job(:id), 'ready 2 0 0 2', 'a durable job that crashed and then slept has no crash');
select is(pg_temp.crash(), 'ready 3 0 1 3', 'its next one is the first');
select claim from queue.fetch(:w2) \gset
select queue.retry_later(:id, :claim) \g /dev/null
select is(pg_temp.job(:id), 'ready 4 0 0 4', 'so it is after retry_later');
select pg_temp.crash() \g /dev/null
select is(pg_temp.crash(), 'failed crash_loop 6 0 2 6', 'two without a wait between are too many');
-- failures and crashes alternate
select queue.defer('both', options => '{"retry": {"max_attempts": 2, "max_crashes": 2}}') as id \gset
select pg_temp.crash() \g /dev/null
select id, claim from queue.fetch(:w2, null, 1) \gset
select is(queue.fail(:id, :claim, 'e'), 'ready', 'a failure after a crash is the first failure');
select queue.tick() \g /dev/null
select is(pg_temp.crash(), 'failed crash_loop 3 1 2 3', 'a crash after a failure is the second crash');
select is(pg_temp.history(:id), 'crashed failed crashed', 'the history has them all');

-- A job that crashed keeps its place: needs, locks, schedule
select queue.defer('need') as need \gset
select queue.defer('dependent', needs => array[:need], lock => 'dl', scheduled_at => now()) as dependent, queue.defer('behind', lock => 'dl') as behind \gset
select id, claim from queue.fetch(:w2) \gset
select queue.succeed(:id, :claim) \g /dev/null
select is(pg_temp.crash(), 'ready 1 0 1 1', 'a job with needs and a lock');
select is(pg_temp.job(:behind), 'blocked lock 0 0 0 0', 'keeps its turn');
select is_empty('select * from queue.check()', 'everything is in order');
select id, claim from queue.fetch(:w2, null, 1) \gset
select is(:id::bigint, :dependent::bigint, 'it runs again');
select queue.succeed(:id, :claim) \g /dev/null
select id, claim from queue.fetch(:w2) \gset
select is(:id::bigint, :behind::bigint, 'and then the next');
select queue.succeed(:id, :claim) \g /dev/null

-- Only a lease of its own decides
select queue.defer('leased') as id \gset
select claim from queue.fetch(:w2) \gset
select ok((select queue.extend(:id, :claim, '20 minutes') between now() + interval '19 minutes' and now() + interval '21 minutes'), 'extend returns the end of the lease');
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as w4 \gset
select pg_temp.kill(:w2);
select is((select reaped from queue.reap()), 0, 'a claim with a lease of its own outlives its worker');
select is((select state from queue.jobs where id = :id), 'running', 'it runs');
select ok((select queue.extend(:id, :claim, '1 hour') > now() + interval '59 minutes'), 'may be extended');
select ok((select next_expiry < now() + interval '2 hours' from queue.reap()), 'and is what reap waits for');
update queue.lease set expires_at = now();
select is((select reaped from queue.reap()), 1, 'when the lease has ended so has the claim');
select is(pg_temp.job(:id), 'ready 1 0 1 1', 'as a crash');
select ok((select error like 'its lease ended at %' from queue.attempts where job_id = :id), 'that says so');
select is(test.refusal(format('select queue.extend(%s, %s, ''1 hour'')', :id, :claim)), 'QJ002', 'nothing to extend any more');
select id, claim from queue.fetch(:w4, null, 1) \gset
select queue.extend(:id, :claim, '1 s') \g /dev/null
update queue.lease set expires_at = now();
select is((select reaped from queue.reap()), 1, 'it ends a claim whose worker lives as well');
select is((select is_alive from queue.workers where id = :w4), true, 'as this one does');
select id, claim from queue.fetch(:w4, null, 1) \gset
select queue.succeed(:id, :claim) \g /dev/null
select is_empty('select * from queue.lease', 'no lease is left');
-- A claim with a lease of its own counts as alone
select queue.defer('leased', options => '{"retry": {"max_crashes": 1}}') as id \gset
select claim from queue.fetch(:w4) \gset
select queue.extend(:id, :claim, '1 s') \g /dev/null
update queue.lease set expires_at = now();
select is((select reaped from queue.reap()), 1, 'with max_crashes 1');
select is(pg_temp.job(:id), 'failed crash_loop 1 0 1 1', 'a lease of its own counts as alone');
select queue.defer('leased') as id \gset
select claim from queue.fetch(:w4) \gset
select is(test.refusal(call), state, call) from (values
  (format('select queue.extend(%s, %s, null)', :id, :claim), '22023'), (format('select queue.extend(%s, %s, ''0'')', :id, :claim), '22023'), (format('select queue.extend(%s, %s, ''-1 s'')', :id, :claim), '22023'),
  (format('select queue.extend(%s, %s, ''200000 years'')', :id, :claim), '22023'), (format('select queue.extend(%s, %s, ''1 s'')', :id, :claim - 1), 'QJ002'), ('select queue.extend(424242, 1, ''1 s'')', 'QJ001'),
  ('select queue.extend(null, 1, ''1 s'')', '22023')) v (call, state);
select queue.extend(:id, :claim, '1 hour') \g /dev/null
select lives_ok(format('select queue.release(%s, %s)', :id, :claim), 'a release ends the lease with the claim');
select is_empty('select * from queue.lease', 'so that it decides nothing about the next');
select id, claim from queue.fetch(:w4) \gset
select queue.succeed(:id, :claim) \g /dev/null

-- timeout: 10 s past it the attempt is timed out, a failure
select queue.defer('slow', options => '{"timeout": "1 minute", "retry": {"max_attempts": 2}}') as id \gset
select claim, timeout from queue.fetch(:w4) \gset
select is(:'timeout'::interval, '1 minute'::interval, 'fetch tells the timeout');
select ok((select l.expires_at - v.claimed_at = interval '70 s' from queue.lease l join queue.active_job v on v.id = l.id), 'which has 10 s to spare');
create function pg_temp.age(id bigint, by interval) returns void language sql as $$
  update queue.active_job v set claimed_at = v.claimed_at - by where v.id = age.id;
  update queue.lease l set expires_at = l.expires_at - by where l.id = age.id
$$;
select pg_temp.age(:id, '65 s');
select is((select reaped from queue.reap()), 0, 'within these its worker may end it');
select pg_temp.age(:id, '6 s');
select is((select reaped from queue.reap()), 1, 'past them reap does');
select is(pg_temp.job(:id), 'ready 1 1 0 1', 'as a failure, that follows the policy');
select is(pg_temp.history(:id), 'timed_out', 'with its own name');
select is((select error from queue.attempts where job_id = :id), 'not done within its timeout of 1 minute', 'and reason');
select id, claim from queue.fetch(:w4) \gset
select is((select count(*) from queue.lease), 1::bigint, 'the next attempt has a new timeout');
select pg_temp.age(:id, '71 s');
select is((select reaped from queue.reap()), 1, 'which passes too');
select is(pg_temp.job(:id), 'failed attempts 2 2 0 2', 'max_attempts counts them');
-- a timeout and a lease of its own
select queue.defer('slow', options => '{"timeout": 60}') as id \gset
select claim from queue.fetch(:w4) \gset
select ok((select queue.extend(:id, :claim, '1 hour') between v.claimed_at + interval '70 s' and v.claimed_at + interval '70 s' from queue.active_job v where v.id = :id), 'a lease of its own does not outlive the timeout');
select ok((select queue.extend(:id, :claim, '10 s') < now() + interval '15 s'), 'a shorter one counts');
select pg_temp.age(:id, '11 s');
select is((select reaped from queue.reap()), 1, 'and ends');
select is(pg_temp.history(:id), 'crashed', 'as a crash');
select id, claim from queue.fetch(:w4, null, 1) \gset
select queue.extend(:id, :claim, '1 hour') \g /dev/null
select pg_temp.age(:id, '71 s');
select is((select reaped from queue.reap()), 1, 'past the timeout');
select is(pg_temp.job(:id), 'failed attempts 2 1 1 2', 'it is timed out, however often extended');
-- a handler that could not be ended, of a live worker
select queue.defer('stuck', lock => 'stuck', options => '{"timeout": 60, "retry": {"max_attempts": 2}}') as id, queue.defer('t', lock => 'stuck') as behind \gset
select claim from queue.fetch(:w4) \gset
select unalike(queue.why(:id), '%its timeout passed%', 'before its timeout');
update queue.active_job set claimed_at = claimed_at - interval '62 s' where id = :id;
update queue.lease set expires_at = expires_at - interval '62 s' where id = :id;
select ok((select queue.extend(:id, :claim, '30 s') between now() + interval '29 s' and now() + interval '31 s'), 'extended after its timeout it is not bounded by that');
select alike(queue.why(:id), format('%%; its timeout passed at %s; its handler could not be ended and still runs; its lease ends at %%', v.claimed_at + interval '60 s'), 'why says so')
from queue.active_job v where v.id = :id;
select is((select status || ': ' || detail from queue.health() where name = 'timeouts'),
          format('warn: 1 job running past the timeout, as the handler could not be ended: job %s at %s', :id, (select date_trunc('second', v.claimed_at) + interval '1 minute' from queue.active_job v where v.id = :id)), 'health too');
select pg_temp.age(:id, '20 s');
update queue.active_job set claimed_at = claimed_at - interval '20 s' where id = :id;
select is((select reaped from queue.reap()), 0, 'its claim stays');
select is(pg_temp.job(:behind), 'blocked lock 0 0 0 0', 'and its lock');
select ok((select queue.extend(:id, :claim, '30 s') > now() + interval '29 s'), 'for as long as it is extended');
select pg_temp.age(:id, '31 s');
select is((select reaped from queue.reap()), 1, 'and not longer');
select is(pg_temp.history(:id), 'timed_out', 'as timed out');
select is((select status from queue.health() where name = 'timeouts'), 'ok', 'health has nothing to say');
select claim from queue.fetch(:w4) \gset
select is(queue.fail(:id, :claim, 'e'), 'failed', 'its second attempt');
select id, claim from queue.fetch(:w4) \gset
select is(:id::bigint, :behind::bigint, 'then the next');
select queue.succeed(:id, :claim) \g /dev/null
-- a timeout that passes while the worker is dead
select queue.defer('slow', options => '{"timeout": "1 minute"}') as id \gset
select is(pg_temp.crash(), 'ready 1 0 1 1', 'a timeout does not keep a claim alive');
select is_empty('select * from queue.lease', 'and goes with it');
select id, claim from queue.fetch(:w4, null, 1) \gset
select queue.succeed(:id, :claim) \g /dev/null

-- A claim of a fetch that was in flight when its worker went (work/reap.late_fetch.spec)
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as w6 \gset
select queue.defer('late') as late \gset
select claim from queue.fetch(:w4) \gset
select queue.deregister_worker(:w6) \g /dev/null
update queue.active_job set worker_id = :w6 where id = :late;
select is((select reaped from queue.reap()), 1, 'is found');
select id, claim from queue.fetch(:w4, null, 1) \gset
select queue.succeed(:id, :claim) \g /dev/null
select queue.reap() \g /dev/null
select is((select count(*) from queue.workers where id = :w6), 1::bigint, 'the worker is shown for a minute');
update queue.worker set gone_at = gone_at - interval '2 minutes' where id = :w6;
insert into queue.sleeper (worker_id, is_busy, served, pid) values (:w6, false, 1, pg_backend_pid());
select queue.reap() \g /dev/null
select is((select count(*) from queue.workers where id = :w6), 0::bigint, 'and no longer');
select is((select count(*) from queue.sleeper), 0::bigint, 'nor is its place in the line of sleepers kept');

-- One damaged row keeps no other from being reaped
create function public.refuse_attempt() returns trigger language plpgsql as $$
begin
  if exists (select from queue.job j where j.id = new.job_id and j.task = 'poisoned') then
    raise exception 'an audit trigger of the owner''s that fails';
  end if;
  return new;
end $$;
create trigger audit before insert on queue.attempt for each row execute function public.refuse_attempt();
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as w7 \gset
select queue.defer('good') as p1, queue.defer('poisoned') as p2, queue.defer('good') as p3, queue.defer('good') as p4, queue.defer('poisoned') as p5, queue.defer('good') as p6 \gset
select max(claim) as claim from queue.fetch(:w7, null, 10) \gset
select queue.extend(id, :claim, '1 s') from unnest(array[:p4, :p5, :p6]) id \g /dev/null
update queue.lease set expires_at = now() - interval '1 s' * (10 - id % 10);
select pg_temp.kill(:w7);
set client_min_messages = error;
select is((select reaped from queue.reap()), 4, 'others are reaped: of the dead worker, and of leases that ended');
select is((select string_agg(state, ' ' order by id) from queue.jobs where id between :p1 and :p6), 'ready running ready ready running ready', 'the poisoned ones stay');
select is((select reaped from queue.reap()), 0, 'and are tried again each time');
select ok((select expires_at > now() + interval '50 s' from queue.lease where id = :p5), 'leases in a minute, so that no worker is kept awake');
reset client_min_messages;
select ok((select gone_at is not null from queue.worker where id = :w7), 'the worker''s row stays as long');
drop trigger audit on queue.attempt;
update queue.lease set expires_at = now();
select is((select reaped from queue.reap()), 2, 'until they are sound');
select is_empty('select * from queue.check()', 'everything is in order');
select queue.cancel(id) from queue.jobs where id between :p1 and :p6 \g /dev/null

-- Claims whose worker is forgotten, which no fetch leaves: made by hand, and by a fetch that was prepared and committed long after
select count(*) from queue.delete(array(select j.id from queue.jobs j), true) \g /dev/null
select queue.register_worker('forgotten') as forgotten, queue.register_worker('another') as another \gset
select queue.defer('t', options => '{"retry": {"max_attempts": 1}}') as a, queue.defer('t') as b \gset
select count(*) from queue.fetch(:forgotten, null, 10) \g /dev/null
select queue.extend(:b, j.claim, '1 hour') from queue.jobs j where j.id = :b \g /dev/null
delete from queue.worker w where w.id = :forgotten;
select is((select c.problem from queue.check() c), 'claimed by a removed worker', 'check knows it');
reset pgdefer.reviewed_at;
select is((select t.reaped from queue.tick() t), 1, 'tick ends its claims');
select is(pg_temp.job(:a), 'ready 1 0 1 1', 'as crashed, as nobody knows better');
select is((select j.state from queue.jobs j where j.id = :b), 'running', 'except one with a lease of its own');
select is_empty('select * from queue.check()', 'sound again');
select queue.release(:b, j.claim) from queue.jobs j where j.id = :b \g /dev/null
select queue.cancel(:a) \g /dev/null
select queue.register_worker('prepares') as prepares \gset
begin;
select count(*) from queue.fetch(:prepares, null, 10) \g /dev/null
prepare transaction 'fetch';
select pg_temp.kill(:prepares);
select from queue.reap() \g /dev/null
select from queue.reap() \g /dev/null
update queue.worker set gone_at = gone_at - interval '2 minutes' where id = :prepares;
select from queue.reap() \g /dev/null
select from queue.reap() \g /dev/null
commit prepared 'fetch';
reset pgdefer.reviewed_at;
select from queue.tick() \g /dev/null
select is((select count(*) from queue.jobs j where j.state = 'running'), 0::bigint, 'the claims of a prepared fetch whose worker has died meanwhile are found');
select is_empty('select * from queue.check()', 'and it is sound');

-- No heartbeat could arrive while the server was down: a lease from before its start lasts for a while after it
select queue.register_worker('before', info => '{"dead_after": "1 day"}') as before \gset
select queue.defer('leased', queue => 'apart') as leased, queue.defer('timed', queue => 'apart', options => '{"timeout": "1 hour"}') as timed \gset
select f.claim from queue.fetch(:before, '{apart}', 2) f where f.id = :leased \gset
select queue.extend(:leased, :claim, '1 hour') \g /dev/null
update queue.lease set expires_at = now(), given_at = pg_postmaster_start_time() - interval '1 s' where id in (:leased, :timed);
select pg_get_functiondef('queue._grace_until()'::regprocedure) as grace \gset
create or replace function queue._grace_until() returns timestamptz language sql as $$ select clock_timestamp() + interval '1 hour' $$;
select is((select r.reaped from queue.reap() r), 0, 'a lease and a timeout from before the start of the server wait for it');
select ok(queue._next_lease_end() > now() + interval '50 minutes', 'and keep nobody awake');
select pg_get_functiondef('queue._up_since()'::regprocedure) as up_since \gset
create sequence asked;
create or replace function queue._up_since() returns timestamptz language sql as $$ select case when nextval('asked') > 0 then clock_timestamp() end $$;
select queue._next_lease_end() \g /dev/null
select is((select last_value from asked), 1::bigint, 'since when the server is up is asked once, not for each lease');
:up_since;
select queue.extend(:leased, :claim, '1 hour') \g /dev/null
update queue.lease set expires_at = now() where id = :leased;
select is((select r.reaped from queue.reap() r), 1, 'one that was extended since then does not');
create or replace function queue._grace_until() returns timestamptz language sql as $$ select clock_timestamp() - interval '1 s' $$;
select is((select r.reaped from queue.reap() r), 1, 'after a while the others end as well');
:grace;
select ok(queue._grace_until() - pg_postmaster_start_time() = interval '30 s', 'which is 30 s');
select queue.deregister_worker(:before) \g /dev/null
select is_empty('select * from queue.lease', 'none is left');

-- After a promotion the start of the server is long ago: what counts is since when workers can reach it
select queue.register_worker('reconnects', info => '{"dead_after": "1 minute"}') as reconnects \gset
select queue.defer('t', queue => 'outage') as id \gset
select f.claim from queue.fetch(:reconnects, '{outage}') f \gset
update queue.worker set last_seen_at = now() - interval '1 hour' where id = :reconnects;
begin;
update queue.installation set up_since = clock_timestamp();
update queue.installation i set written = i.xmin;
commit;
select is((select r.reaped from queue.reap() r), 0, 'a worker that was silent during the outage has time to come back');
select ok((select r.next_expiry > now() + interval '50 s' from queue.reap() r), 'its dead_after, from then on');
select ok(queue._is_drained('{outage}', null, null), 'and keeps nobody awake');
update queue.installation set era = 'another';
update queue.worker set dead_after = '1 ms' where id = :reconnects;
select is((select r.reaped from queue._reap('1 s') r), 0, 'before the era has begun nobody is dead');
begin;
update queue.installation set up_since = now() - interval '2 minutes', era = queue._era();
update queue.installation i set written = i.xmin;
commit;
select is((select r.reaped from queue.reap() r), 1, 'after that it is dead');
select is(queue._up_since(), (select i.up_since from queue.installation i), 'all count from the same moment');

-- Since a reaper looked, the claim has been extended, or another one has begun.
select queue.register_worker('runs', info => '{"dead_after": "1 day"}') as runs \gset
select queue.defer('t', queue => 'since') as id \gset
select f.claim from queue.fetch(:runs, '{since}') f \gset
select queue.extend(:id, :claim, '1 hour') \g /dev/null
select is(queue._reap_claim(:id, :claim, 'crashed', 'too early'), 0, 'a claim that was extended is not ended');
select is((select j.state from queue.jobs j where j.id = :id), 'running', 'its job runs');
update queue.lease set claim = :claim - 1, expires_at = now() where id = :id;
select is(queue._reap_claim(:id, :claim - 1, 'crashed', 'too late'), 0, 'nor the next claim in place of one that has ended');
select is((select j.state || ' ' || j.claim from queue.jobs j where j.id = :id), 'running ' || :claim, 'its job runs');
select is_empty('select * from queue.lease', 'and the lease of the ended claim goes');
select queue.succeed(:id, :claim);

-- If all workers are silent at once, the server was silent, or its clock was set forward: they get their time again
create function pg_temp.silent_for(silence interval) returns void language sql as $$
  update queue.worker w set last_seen_at = clock_timestamp() - silence where w.gone_at is null
$$;
create procedure pg_temp.up_for(since interval) language plpgsql as $$
begin
  update queue.installation set up_since = now() - since;
  update queue.installation i set written = i.xmin;
end $$;
create function pg_temp.alive() returns bigint language sql as $$ select count(*) from queue.worker w where w.gone_at is null $$;
select queue.deregister_worker(w.id) from queue.workers w \g /dev/null
alter table queue.worker disable trigger stay_alive;
select queue.register_worker('one') as one, queue.register_worker('other') as other \gset
select queue.defer('t', queue => 'silence') as id \gset
select f.claim from queue.fetch(:one, '{silence}') f \gset
call pg_temp.up_for('1 hour');
select pg_temp.silent_for('45 s');
select is((select r.reaped from queue.reap() r), 0, 'a reaper gives nobody up');
select is(pg_temp.alive(), 2::bigint, 'both are alive');
select ok(now() - queue._up_since() < interval '30 s', 'their silence counts from now on');
select ok(queue._is_era(queue._era()), 'in the same era');
call pg_temp.up_for('1 hour');
select pg_temp.silent_for('45 s');
select is_empty(format('select * from queue.heartbeat(%s)', :other), 'the heartbeat of one');
select is(pg_temp.alive(), 2::bigint, 'does not give up the other');
select is((select r.reaped from queue.reap() r), 0, 'nor does a reaper after it');
select is((select j.state || ' ' || j.claim from queue.jobs j where j.id = :id), 'running ' || :claim, 'and its job runs on');
call pg_temp.up_for('40 s');
select pg_temp.silent_for('45 s');
select is((select r.reaped from queue.reap() r), 1, 'once more silent as long');
select is(pg_temp.alive(), 0::bigint, 'without a sign of life, they have died');
select queue.register_worker('one') as one, queue.register_worker('other') as other \gset
call pg_temp.up_for('1 hour');
select pg_temp.silent_for('45 s');
select queue.register_worker('new') as new \gset
select is((select r.reaped from queue.reap() r), 0, 'where a new worker has come');
select is(pg_temp.alive(), 1::bigint, 'the others have died');

-- A clock that was set back
select queue.register_worker('dies', info => '{"dead_after": "1 minute"}') as dies \gset
select pg_temp.silent_for('-1 hour');
select is((select r.reaped from queue.reap() r), 0, 'what was seen later than now');
select ok((select w.last_seen_at <= clock_timestamp() from queue.worker w where w.id = :dies), 'counts as seen now');
call pg_temp.up_for('-1 hour');
select is((select r.reaped from queue.reap() r), 0, 'so does');
select ok(queue._up_since() <= clock_timestamp(), 'the start of the server');

-- An era that begins within one start of the server, as by a migration, takes nobody's time away
call pg_temp.up_for('1 hour');
update queue.installation set version = version;
select queue.register_worker('next') as next \gset
select ok(now() - queue._up_since() < interval '30 s', 'its silence counts from then on');
select ok(queue._is_era(queue._era()), 'in the new era');

-- A heartbeat that can't restart it, because of its isolation, is not seen
select queue.deregister_worker(w.id) from queue.workers w \g /dev/null
select queue.register_worker('one') as one, queue.register_worker('other') as other \gset
call pg_temp.up_for('1 hour');
select pg_temp.silent_for('45 s');
begin isolation level repeatable read;
select count(*) from queue.heartbeat(:one) \g /dev/null
commit;
select ok((select r.next_expiry > now() from queue.reap() r), 'the reaper after it restarts it');
select is(pg_temp.alive(), 2::bigint, 'and gives nobody up');
select is_empty('select * from queue.check()', 'everything is in order');

select * from finish();
