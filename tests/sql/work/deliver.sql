-- Delivering: an answer of fetch is bounded. The rest is handed out separately, without the admission lock.

select plan(78);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
create function pg_temp.large(bytes integer) returns jsonb language sql as $$
  select jsonb_build_object('data', repeat('x', large.bytes))
$$;
create function pg_temp.got(max_jobs integer default 100) returns text language sql as $$
  select string_agg(f.task || ' ' || octet_length(f.args::text), ', ' order by f.n)
  from queue.fetch((select w.id from queue.workers w where w.name = 'w'), null, got.max_jobs) with ordinality
    f (id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, timeout, headers, parent, n)
$$;
create function pg_temp.aside() returns bigint language sql as $$
  select count(*) from queue.undelivered u join queue.active_job v on v.id = u.id and v.claim = u.claim
$$;
create function pg_temp.finish() returns void language sql as $$
  select queue.finish_many(jsonb_agg(jsonb_build_object('id', v.id, 'claim', v.claim, 'outcome', 'succeeded'))) from queue.active_job v where v.claim is not null
$$;

-- Claims that fit come at once
select queue.defer('small') \g /dev/null
select queue.defer('medium', pg_temp.large(30000)) \g /dev/null
select is(pg_temp.got(), 'small 2, medium 30012', 'claims that fit into one answer come at once');
select pg_temp.finish() \g /dev/null

-- The others are claimed, and come with the next fetch
select queue.defer('a', pg_temp.large(30000)), queue.defer('b', pg_temp.large(30000)), queue.defer('c', pg_temp.large(30000)), queue.defer('d') \g /dev/null
select is(pg_temp.got(), 'a 30012, b 30012', 'an answer holds 64 kB');
select is(pg_temp.aside(), 2::bigint, 'the rest is put aside');
select is((select count(*) from queue.jobs j where j.state = 'running'), 4::bigint, 'claimed');
select is(pg_temp.got(), 'c 30012, d 2', 'and comes with the next fetch, in order');
select is(pg_temp.aside(), 0::bigint, 'once');
select is(pg_temp.got(), null, 'and no more');
select pg_temp.finish() \g /dev/null

-- A job that never fits
select queue.defer('huge', pg_temp.large(3000000)), queue.defer('huge too', pg_temp.large(3000000)), queue.defer('small') \g /dev/null
select is(pg_temp.got(), null, 'a job larger than an answer is put aside with all behind it');
select is((select b.wait_for from queue.before_sleep(:worker) b), interval '0', 'nobody sleeps over it');
select queue.after_sleep(:worker) \g /dev/null
begin;
select is(pg_temp.got(), 'huge 3000012', 'it comes alone: 4 MB at once, or one job');
select is((select count(*) from pg_locks l join pg_class c on c.oid = l.relation where c.relname in ('admission', 'active_job') and l.mode <> 'AccessShareLock' and l.pid = pg_backend_pid()), 0::bigint,
          'in a transaction that holds neither the admission lock nor a claim');
commit;
select is(pg_temp.got(), 'huge too 3000012, small 2', 'then the others');
select pg_temp.finish() \g /dev/null

-- max_jobs counts
select queue.defer('a', pg_temp.large(60000)), queue.defer('b', pg_temp.large(60000)), queue.defer('c', pg_temp.large(60000)), queue.defer('d', pg_temp.large(60000)) \g /dev/null
select is(pg_temp.got(4), 'a 60012', 'of four claims one fits');
select is(pg_temp.got(1), 'b 60012', 'no more are handed out than are asked for');
select is(pg_temp.got(4), 'c 60012, d 60012', 'then the others');
select pg_temp.finish() \g /dev/null

-- A job that must run alone, and is too large for an answer
select queue.defer('crashes', pg_temp.large(100000)) as id \gset
select pg_temp.got(), pg_temp.got() \g /dev/null
select queue.finish_many(jsonb_build_array(jsonb_build_object('id', v.id, 'claim', v.claim, 'outcome', 'crashed'))) from queue.active_job v where v.id = :id \g /dev/null
select queue.defer('other') \g /dev/null
select is(pg_temp.got(), null, 'it is put aside');
select is(pg_temp.got(), 'crashes 100012', 'and comes with the next fetch');
select is(pg_temp.got(), null, 'with nothing beside it');
select pg_temp.finish() \g /dev/null
select is(pg_temp.got(), 'other 2', 'until it has ended');
select pg_temp.finish() \g /dev/null

-- A call that ends claims hands out nothing, and claims nothing
select queue.defer('small') \g /dev/null
select f.id, f.claim from queue.fetch(:worker) f \gset
select queue.defer('huge', pg_temp.large(100000)), queue.defer('behind') \g /dev/null
select is(pg_temp.got(1), null, 'put aside');
select is_empty(format('select * from queue.finish_and_fetch(%s, %L)', :worker, jsonb_build_array(jsonb_build_object('id', :id, 'claim', :claim, 'outcome', 'succeeded'))),
                'a call that ends claims hands out nothing large, nor claims');
select is((select string_agg(f.task, ', ') from queue.finish_and_fetch(:worker, '[]') f), 'huge', 'one that ends none does');
select is(pg_temp.got(), 'behind 2', 'then claims continue');
select pg_temp.finish() \g /dev/null

-- Another session of the same worker finds it too, without the session's hint
select queue.defer('huge', pg_temp.large(100000)) \g /dev/null
select pg_temp.got() \g /dev/null
reset pgdefer.undelivered;
select is(pg_temp.got(), null, 'a session without the hint looks when there is nothing to claim');
select is(pg_temp.got(), 'huge 100012', 'and hands it out then');
select pg_temp.finish() \g /dev/null

-- Claims that are aside
select queue.defer('huge', pg_temp.large(100000)) as id \gset
select pg_temp.got() \g /dev/null
select is_empty(format('select * from queue.claims(%s)', :worker), 'are none that the worker should know');
select is(pg_temp.got(), 'huge 100012', 'and come with the next fetch');
select pg_temp.finish() \g /dev/null
select queue.defer('huge', pg_temp.large(100000)) as id \gset
select pg_temp.got() \g /dev/null
select queue.retry(array[:id]::bigint[], force => true) \g /dev/null
select is(pg_temp.got(), null, 'one that was taken away is not handed out: claimed again, it is aside again');
select is(pg_temp.got(), 'huge 100012', 'and comes by its new claim');
select pg_temp.finish() \g /dev/null
select queue.defer('huge', pg_temp.large(100000)) as id \gset
select pg_temp.got() \g /dev/null
select queue.cancel(:id, abort => true) \g /dev/null
select is((select h.reason from queue.heartbeat(:worker) h where h.id = :id), 'cancelled', 'one can be told to abort');
select is(pg_temp.got(), null, 'and is not handed out then');
select results_eq(format('select j.state, j.reason from queue.jobs j where j.id = %s', :id), $$values ('cancelled', 'aborted')$$, 'but ends');
select queue.defer('huge', pg_temp.large(100000)) as id \gset
select queue.register_worker('dies', info => '{"dead_after": "1 s"}') as dies \gset
select * from queue.fetch(:dies) \g /dev/null
select queue.worker_died(:dies) \g /dev/null
select is((select concat_ws(' ', j.state, j.crashes) from queue.jobs j where j.id = :id), 'ready 0', 'a claim that was never handed out is not a crash');
select is((select a.outcome from queue.attempts a where a.job_id = :id), 'released', 'but was released');
reset pgdefer.undelivered;
select pg_temp.got(), pg_temp.got() \g /dev/null
select pg_temp.finish() \g /dev/null

-- Claims that expired while they were aside are not handed out
select queue.defer('huge', pg_temp.large(100000), options => '{"expires_at": "2999-01-01"}') as id,
       queue.defer('other', pg_temp.large(100000)) as other \gset
select pg_temp.got() \g /dev/null
select is(pg_temp.aside(), 2::bigint, 'two are aside');
update queue.expiry set at = clock_timestamp() where id = :id;
select is(pg_temp.got(), null, 'one whose expires_at has passed ends, in a transaction that hands out nothing');
select results_eq(format('select j.state, j.reason from queue.jobs j where j.id = %s', :id), $$values ('cancelled', 'expired')$$, 'cancelled, as expired');
select is(pg_temp.aside(), 1::bigint, 'and is aside no longer');
select is(pg_temp.got(), 'other 100012', 'the others come after it');
select pg_temp.finish() \g /dev/null
select is_empty('select * from queue.check()', 'all is in its place');

-- Nor are jobs that were paused meanwhile
select queue.defer('huge', pg_temp.large(100000), 'stops') as id, queue.defer('stops', pg_temp.large(100000)) as other \gset
select pg_temp.got() \g /dev/null
select queue.pause('stops'), queue.pause(task => 'stops') \g /dev/null
select is(pg_temp.got(), null, 'a job paused while it is aside is not handed out');
select is((select count(*) from queue.jobs j where j.id in (:id, :other) and j.state <> 'running' and j.attempts = 0), 2::bigint, 'it is given back');
select is(pg_temp.aside(), 0::bigint, 'nothing is aside');
select queue.resume('stops'), queue.resume(task => 'stops') \g /dev/null
select pg_temp.got() \g /dev/null
select is(pg_temp.got(), 'huge 100012, stops 100012', 'then they come again');
select pg_temp.finish() \g /dev/null

-- A claim that is not fetched is released: the slots of its worker are full, by claims ahead, or it stops
select queue.defer('a', pg_temp.large(30000)), queue.defer('b', pg_temp.large(30000)) \g /dev/null
select queue.defer('late', pg_temp.large(30000), options => '{"timeout": "1 s"}') as id \gset
select count(*) from queue.fetch(:worker, null, 3, '{"ahead": 1}') \g /dev/null
select queue.heartbeat(:worker) \g /dev/null
select is(pg_temp.aside(), 1::bigint, 'one is aside, and the worker''s slots are full');
update queue.active_job set claimed_at = claimed_at - interval '3 s' where id = :id;
select queue.heartbeat(:worker) \g /dev/null
select is((select count(*) from queue.undelivered u where u.id = :id), 0::bigint, 'it is released, by any maintenance');
select queue.register_worker('idle', info => '{"dead_after": "1 day"}') as idle \gset
select is((select string_agg(f.task, ', ') from queue.fetch(:idle, null, 3) f), 'late', 'so that another worker gets it');
select is((select string_agg(concat_ws(' ', a.attempt, a.outcome), ', ') from queue.attempts a where a.job_id = :id), '1 released', 'without an attempt');
select pg_temp.finish() \g /dev/null
select queue.deregister_worker(:idle) \g /dev/null
select queue.defer('huge', pg_temp.large(100000), options => '{"timeout": "1 s"}') as id \gset
select is(pg_temp.got(), null, 'one that fits into no first answer is put aside');
update queue.active_job set claimed_at = claimed_at - interval '25 s' where id = :id;
select is(pg_temp.got(), 'huge 100012', 'and handed out to a client that seldom fetches');
select pg_temp.finish() \g /dev/null
select queue.defer('huge', pg_temp.large(100000), options => '{"timeout": "1 s"}') as id \gset
select pg_temp.got() \g /dev/null
update queue.active_job set claimed_at = claimed_at - interval '40 s' where id = :id;
select is(pg_temp.got(), null, 'but not ever so late, as its timeout counts from the claim');
select is((select concat_ws(' ', j.state, j.attempts) from queue.jobs j where j.id = :id), 'ready 0', 'but given back');
select pg_temp.got() \g /dev/null
select is(pg_temp.got(), 'huge 100012', 'and handed out by its next claim');
select pg_temp.finish() \g /dev/null

-- After a full answer a session claims no more than fits
select count(*) from queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'many', 'args', pg_temp.large(1900))) from generate_series(1, 100))) \g /dev/null
reset pgdefer.fitting;
create function pg_temp.count_got() returns bigint language sql as $$
  select count(*) from queue.fetch((select w.id from queue.workers w where w.name = 'w'), null, 100)
$$;
select is(pg_temp.count_got(), 32::bigint, 'an answer takes 32 of 100 jobs');
select is(pg_temp.aside(), 68::bigint, 'the rest is aside');
select is(pg_temp.count_got(), 68::bigint, 'and comes next');
select pg_temp.finish() \g /dev/null
select count(*) from queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'many', 'args', pg_temp.large(1900))) from generate_series(1, 100))) \g /dev/null
select is(pg_temp.count_got(), 32::bigint, 'then only as many are claimed');
select is(pg_temp.aside(), 0::bigint, 'and none is put aside');
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'many', 'priority', 1)) from generate_series(1, 50))) \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.count_got(), 32::bigint, 'of small jobs likewise');
select is(pg_temp.count_got(), 36::bigint, 'and then more');
reset pgdefer.fitting;
select pg_temp.count_got() \g /dev/null
select pg_temp.finish() \g /dev/null

-- A worker that is gone gets an error at once, and a bad number is refused
select queue.defer('huge', pg_temp.large(100000)) as id \gset
select queue.register_worker('goes', info => '{"dead_after": "1 day"}') as goes \gset
select * from queue.fetch(:goes) \g /dev/null
select is(pg_temp.aside(), 1::bigint, 'one is aside');
select throws_ok(format('select * from queue.fetch(%s, max_jobs => 0)', :goes), '22023', null, 'max_jobs must be valid even if claims are aside');
select queue.deregister_worker(:goes) \g /dev/null
select throws_ok(format('select * from queue.fetch(%s)', :goes), 'QJ007', null, 'a worker that is gone gets no empty answer first');
select throws_ok(format('select * from queue.finish_and_fetch(%s, %L)', :goes, '[]'), 'QJ007', null, 'by no call');
reset pgdefer.undelivered;
select pg_temp.got(), pg_temp.got() \g /dev/null
select pg_temp.finish() \g /dev/null
delete from queue.undelivered where worker_id = :goes;

-- Sizes follow the args
select queue.defer('huge', pg_temp.large(100000), scheduled_at => now() + interval '1 day') as id, queue.defer('grows', scheduled_at => now() + interval '1 day') as grows \gset
select queue.tick() \g /dev/null
select queue.set_args(:id, '{}'), queue.set_args(:grows, pg_temp.large(100000)) \g /dev/null
select queue.reschedule(:id), queue.reschedule(:grows) \g /dev/null
select is(pg_temp.got(), 'huge 2', 'by other args a job may shrink, or grow');
select is(pg_temp.got(), 'grows 100012', 'and is put aside by its present size');
select pg_temp.finish() \g /dev/null

-- Headers count, and numbers by their digits
select queue.defer('headers', options => jsonb_build_object('headers', pg_temp.large(100000))) \g /dev/null
select queue.defer('digits', '{"n": 1e60000}') \g /dev/null
select is(pg_temp.got(), null, 'headers count too');
select is(pg_temp.got(), 'headers 2, digits 60008', 'and digits as they are printed');
select pg_temp.finish() \g /dev/null
select is((select count(*) from queue.jobs j where j.finished_at is null), 0::bigint, 'all are done');

-- The server ends a session that idles with the admission lock.
-- Calls a function in a transaction with such a setting; what is the setting then? In one statement: while it
-- stands, no session may idle.
create function pg_temp.timeout_in(setting text, call text) returns text language plpgsql as $$
begin
  perform set_config('idle_in_transaction_session_timeout', setting, true);
  execute call;
  return current_setting('idle_in_transaction_session_timeout');
end $$;
select is(pg_temp.timeout_in('0', 'select queue.tick()'), '10s', 'a transaction that holds the admission lock must not idle');
select is(current_setting('idle_in_transaction_session_timeout'), '0', 'only that one');

select is(pg_temp.timeout_in('7s', 'select queue.tick()'), '7s', 'a stricter setting stays');
-- Nor does what follows an operation in its transaction wait long for others.
create function pg_temp.lock_timeout_in(setting text) returns text language plpgsql as $$
begin
  perform set_config('lock_timeout', setting, true), queue.pause('elsewhere');
  return current_setting('lock_timeout');
end $$;
select is(pg_temp.lock_timeout_in('0'), '10s', 'what waits for a lock after an operation gives up');
select is(pg_temp.lock_timeout_in('1min'), '10s', 'soon');
select is(pg_temp.lock_timeout_in('7s'), '7s', 'or sooner');
select is(current_setting('lock_timeout'), '0', 'only in that transaction');
select queue.resume('elsewhere') \g /dev/null
select is(pg_temp.timeout_in('500ms', 'select queue.prune()'), '500ms', 'also where the lock is waited for');
select is(pg_temp.timeout_in('1min', 'select queue.tick()'), '10s', 'a looser one does not');

select * from finish();
