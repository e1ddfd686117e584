-- Workers: registration, heartbeats, good-byes, deaths, aborts.

select plan(83);

\ir workers.helpers.psql

-- register_worker
alter table queue.worker disable trigger stay_alive;
select queue.register_worker('w') as w1, queue.register_worker('w', info => '{"dead_after": "1 day"}') as w2 \gset
select isnt(:w1::bigint, :w2::bigint, 'names need not be unique: each registration makes a new worker');
select queue.register_worker('all', '{a,b*,*}', '{"host": "h", "dead_after": "5 s", "n": 1}') as w3 \gset
select results_eq(format('select name, queues, info, dead_after, is_alive, running from queue.workers where id = %s', :w3),
                  $$values ('all', '{a,b*,*}'::text[], '{"host": "h", "dead_after": "5 s", "n": 1}'::jsonb, '5 s'::interval, true, 0)$$, 'a worker is shown as it registered');
select is((select dead_after from queue.workers where id = :w1), '30 s', 'a worker is dead after 30 s by default');
alter table queue.worker enable trigger stay_alive;
select queue.register_worker('x', null, '{"dead_after": 7}') as w7s \gset
select is((select dead_after from queue.workers where id = :w7s), '7 s', 'dead_after may be seconds');
select is(test.refusal('select queue.register_worker(' || arguments || ')'), '22023', 'register_worker(' || left(arguments, 60) || ')') from (values
  ('null'), (''''''), (quote_literal(repeat('x', 1001))), ('''w'', ''{}'''), ('''w'', ''{a,null}'''), ('''w'', array['''']'), (format('''w'', array[%L]', repeat('x', 1001))),
  ('''w'', null, null'), ('''w'', null, ''[]'''), ('''w'', null, ''1'''), ('''w'', null, ''{"dead_after": "soon"}'''), ('''w'', null, ''{"dead_after": 0.5}'''), ('''w'', null, ''{"dead_after": -1}'''), ('''w'', null, ''{"dead_after": []}'''), ('''w'', null, ''{"listen": "no"}''')) v (arguments);
select lives_ok(format('select queue.register_worker(%L, array[%L])', repeat('w', 1000), repeat('q', 999) || '*'), 'names of 1,000 bytes');

-- heartbeat
update queue.worker set last_seen_at = last_seen_at - interval '10 s' where id = :w1;
select is_empty(format('select * from queue.heartbeat(%s)', :w1), 'a heartbeat returns no row when there is nothing to abort');
select ok((select last_seen_at > now() - interval '5 s' from queue.workers where id = :w1), 'and is noted');
select is(test.refusal('select queue.heartbeat(424242)'), 'QJ007', 'a worker that never was');
select is(test.refusal('select queue.heartbeat(null)'), 'QJ007', 'nor NULL');
select queue.heartbeat(:w1, 123456789012) \g /dev/null
select is((select memory from queue.workers where id = :w1), 123456789012, 'it tells the worker''s memory');
select last_seen_at as last_seen from queue.worker where id = :w1 \gset
select is(test.refusal(format('select queue.heartbeat(%s, -1)', :w1)), '22023', 'which is not negative');
select is((select row(memory, last_seen_at) from queue.worker where id = :w1), row(123456789012, :'last_seen'::timestamptz), 'a refused one changes nothing');
select queue.heartbeat(:w1, memory => 0) \g /dev/null
select is((select memory from queue.workers where id = :w1), 0::bigint, 'nothing is a number too');
select queue.heartbeat(:w1) \g /dev/null
select is((select memory from queue.workers where id = :w1), null, 'unknown again if the next one does not tell it');

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as w4 \gset

-- deregister_worker: running jobs go back to ready
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as w5 \gset
select queue.defer('d1', lock => 'd', options => '{"timeout": "1 minute"}') as d1, queue.defer('d2', concurrency_key => 'd', concurrency_limit => 1) as d2, queue.defer('d3') as d3 \gset
select max(claim) as claim from queue.fetch(:w5, null, 10) \gset
select queue.extend(:d3, :claim, '1 hour') \g /dev/null
select is(queue.deregister_worker(:w5), 3, 'deregister_worker returns how many jobs it gave back');
select is((select string_agg(pg_temp.job(id), ', ' order by id) from unnest(array[:d1, :d2, :d3]) id), 'ready 0 0 0 1, ready 0 0 0 1, ready 0 0 0 1', 'as if never claimed');
select is_empty('select * from queue.lease', 'timeouts and leases have ended');
select is_empty('select * from queue.check()', 'locks and slots are in order');
select is((select last_seen_at > registered_at and has_left from queue.workers where id = :w5), true, 'it was last seen as it left');
select is(queue.deregister_worker(:w5), 0, 'again: nothing, and no error');
select is(queue.deregister_worker(424242), 0, 'a worker that never was: the same');
select is(test.refusal(format('select * from queue.fetch(%s)', :w5)), 'QJ007', 'it is gone');
select is((select count(*) from queue.fetch(:w4, null, 10)), 3::bigint, 'another takes them, side by side');
select queue.succeed(id, claim) from queue.jobs where state = 'running' \g /dev/null
begin isolation level repeatable read;
select is(test.refusal('select queue.reap()'), 'QJ008', 'reap in REPEATABLE READ');
rollback;

-- worker_died: running jobs have crashed, at once
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as w11 \gset
select queue.defer('d1', lock => 'd') as d1, queue.defer('d2') as d2, queue.defer('d3') as d3 \gset
select max(claim) as claim from queue.fetch(:w11, null, 10) \gset
select queue.extend(:d3, :claim, '1 hour') \g /dev/null
select is(queue.worker_died(:w11), 2, 'worker_died returns how many claims it ended');
select is((select string_agg(pg_temp.job(id), ', ' order by id) from unnest(array[:d1, :d2, :d3]) id), 'ready 1 0 1 1, ready 1 0 1 1, running 1 0 0 1', 'as crashed, except one with a lease of its own');
select is(test.refusal(format('select queue.heartbeat(%s)', :w11)), 'QJ007', 'the worker is gone');
select is(queue.worker_died(:w11), 0, 'again: nothing, and no error');
select is(queue.worker_died(424242), 0, 'a worker that never was: the same');
select is((select count(*) from queue.workers where id = :w4 and is_alive), 1::bigint, 'others live on');
select queue.succeed(:d3, :claim) \g /dev/null
select id, claim from queue.fetch(:w4, null, 1) \gset
select queue.succeed(:id, :claim) \g /dev/null
select id, claim from queue.fetch(:w4, null, 1) \gset
select queue.succeed(:id, :claim) \g /dev/null
begin isolation level repeatable read;
select is(test.refusal(format('select queue.worker_died(%s)', :w4)), 'QJ008', 'worker_died in REPEATABLE READ');
rollback;

-- an answer is short, so that a client that does not read it holds up nobody
select count(queue.defer('many')) from generate_series(1, 1200) \g /dev/null
select queue.tick() \g /dev/null
select queue.register_worker('many') as many \gset
do $$ begin
  while exists (select from queue.fetch((select max(w.id) from queue.workers w), max_jobs => 500)) loop end loop;
end $$;
select queue.retry(array(select j.id from queue.jobs j where j.task = 'many' order by j.id limit 200), force => true) \g /dev/null
select count(queue.cancel(j.id, true)) from queue.jobs j where j.task = 'many' and j.state = 'running' \g /dev/null
create temp table told as select h.* from queue.heartbeat(:many) h;
select is((select count(*) from told), 1000::bigint, 'a heartbeat names a thousand jobs at most');
do $$ begin
  for n in 1 .. 5 loop
    insert into told select h.* from queue.heartbeat((select max(w.id) from queue.workers w)) h;
  end loop;
end $$;
select is((select count(distinct (t.id, t.claim)) from told t), 1200::bigint, 'others each time, so that all are named');
select is((select count(*) from told t where t.reason = 'retried'), 200::bigint, 'and those that were taken away once');
select queue.deregister_worker(:many) \g /dev/null
select queue.delete_queue('default', true) \g /dev/null

-- cancel with abort
select queue.defer('abortable', options => '{"retry": {"max_attempts": 9}}') as id \gset
select claim from queue.fetch(:w4) \gset
select is(test.refusal(format('select queue.cancel(%s)', :id)), 'QJ003', 'a running job is not cancelled without abort');
select is(queue.cancel(:id, abort => true), 'running', 'with abort it runs on until its worker stops it');
select is(queue.cancel(:id, abort => true), 'running', 'twice is once');
select results_eq(format('select state, reason from queue.jobs where id = %s', :id), $$values ('running', 'cancelled')$$, 'it shows');
select results_eq(format('select id, claim, reason from queue.heartbeat(%s)', :w4), format('values (%s::bigint, %s::bigint, ''cancelled'')', :id, :claim), 'heartbeat tells its worker');
select is((select count(*) from queue.heartbeat(:w4)), 1::bigint, 'each time');
select is(queue.fail(:id, :claim, 'stopped'), 'cancelled', 'an aborted job does not retry');
select is(pg_temp.job(:id), 'cancelled aborted 1 0 0 1', 'it is cancelled');
select is(pg_temp.history(:id), 'aborted', 'the attempt was aborted');
select is_empty(format('select * from queue.heartbeat(%s)', :w4), 'and is told no longer');
-- whatever the outcome, except succeed
create function pg_temp.abort(outcome jsonb) returns text language plpgsql as $$
declare
  v_id bigint;
  v_claim bigint;
  v_worker bigint := (select max(w.id) from queue.workers w where w.is_alive);
begin
  select f.id, f.claim into v_id, v_claim from queue.fetch(v_worker) f;
  perform queue.cancel(v_id, true);
  perform queue.finish_many(jsonb_build_array(outcome || jsonb_build_object('id', v_id, 'claim', v_claim)));
  return concat_ws(' ', pg_temp.job(v_id), pg_temp.history(v_id), (select count(*) from queue.heartbeat(v_worker)));
end $$;
select queue.defer('abortable', options => '{"retry": {"max_attempts": 9}}') from generate_series(1, 6) \g /dev/null
select is(pg_temp.abort(outcome), expected, outcome ->> 'outcome') from (values
  ('{"outcome": "succeeded", "result": 1}'::jsonb, 'succeeded 1 0 0 1 0'),
  ('{"outcome": "failed", "error": "e"}', 'cancelled aborted 1 0 0 1 aborted 0'),
  ('{"outcome": "failed", "error": "e", "options": {"outcome": "timed_out"}}', 'cancelled aborted 1 0 0 1 aborted 0'),
  ('{"outcome": "retry_later"}', 'cancelled aborted 1 0 0 1 aborted 0'),
  ('{"outcome": "released"}', 'cancelled aborted 1 0 0 1 aborted 0'),
  ('{"outcome": "aborted"}', 'cancelled aborted 1 0 0 1 aborted 0')) v (outcome, expected);
-- of a plain job, in the handler's own transaction
select queue.defer('abortable') as id \gset
select claim from queue.fetch(:w4) \gset
select queue.cancel(:id, true) \g /dev/null
select queue.succeed(:id, :claim) \g /dev/null
select is(pg_temp.job(:id), 'succeeded 1 0 0 1', 'an aborted job that ends with succeed has succeeded');
select is_empty('select * from queue.abort', 'and leaves nothing to tell');
-- of a job whose worker is dead, or gone, or that deregisters
select queue.defer('abortable') as id \gset
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as w8 \gset
select claim from queue.fetch(:w8) \gset
select queue.cancel(:id, true) \g /dev/null
select pg_temp.kill(:w8);
select is((select reaped from queue.reap()), 1, 'a worker that dies before it is told');
select is(pg_temp.job(:id), 'cancelled aborted 1 0 1 1', 'the job is cancelled');
select is(pg_temp.history(:id), 'crashed', 'the attempt has crashed');
select queue.defer('abortable') as id \gset
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as w9 \gset
select claim from queue.fetch(:w9) \gset
select queue.extend(:id, :claim, '1 hour') \g /dev/null
select pg_temp.kill(:w9);
select queue.reap() \g /dev/null
select is(queue.cancel(:id, true), 'running', 'a claim with a lease whose worker is gone already');
update queue.lease set expires_at = now();
select is((select reaped from queue.reap()), 1, 'ends with its lease');
select is(pg_temp.job(:id), 'cancelled aborted 1 0 1 1', 'cancelled');
select queue.defer('abortable') as id \gset
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as w10 \gset
select claim from queue.fetch(:w10) \gset
select queue.cancel(:id, true) \g /dev/null
select is(queue.deregister_worker(:w10), 1, 'a worker that deregisters');
select is(pg_temp.job(:id), 'cancelled aborted 1 0 0 1', 'undoes no cancel');
select is_empty('select * from queue.abort', 'nobody is told any more');

-- An aborted job's lock, slot and queueing lock are passed on
select queue.defer('x', lock => 'al', concurrency_key => 'ak', concurrency_limit => 1, queueing_lock => 'aq', options => '{"unique_until": "finish"}') as x1,
  queue.defer('x', lock => 'al', concurrency_key => 'ak', concurrency_limit => 1) as x2 \gset
select id, claim from queue.fetch(:w4, null, 5) \gset
select queue.cancel(:id, true) \g /dev/null
select * from queue.finish_many(jsonb_build_array(jsonb_build_object('id', :id, 'claim', :claim, 'outcome', 'aborted'))) \g /dev/null
select id, claim from queue.fetch(:w4, null, 5) \gset
select is(:id::bigint, :x2::bigint, 'the next has its lock and slot');
select queue.succeed(:id, :claim) \g /dev/null
select is_empty('select * from queue.queueing_lock', 'its queueing lock is free');

-- Maintenance by hundreds of workers
select count(queue.register_worker('many')) from generate_series(1, 100) \g /dev/null
select queue.register_worker('one') as w11 \gset
begin;
set local track_functions = 'pl';
select from queue.reap() \g /dev/null
select ok(pg_stat_get_xact_function_calls('queue._up_since()'::regprocedure) between 1 and 20,
  'reap asks for the server''s start a few times, not once for each worker');
commit;
select count(queue.register_worker('others')) from generate_series(1, 50) \g /dev/null
set track_functions = 'pl';
select setseed(0.5) \g /dev/null
select format('do $d$ begin perform queue.heartbeat(%s); end $d$', :w11) from generate_series(1, 50) \gexec
select pg_stat_force_next_flush() \g /dev/null
select ok(pg_stat_get_function_calls('queue._maintain(interval)'::regprocedure) between 1 and 25,
  'if many workers are alive, a part of the heartbeats maintains');
alter table queue.worker disable trigger stay_alive;
update queue.worker set last_seen_at = now() - interval '1 hour', dead_after = '1 day' where id <> :w11;
alter table queue.worker enable trigger stay_alive;
select pg_stat_get_function_calls('queue._maintain(interval)'::regprocedure) as calls \gset
select format('do $d$ begin perform queue.heartbeat(%s); end $d$', :w11) from generate_series(1, 5) \gexec
select pg_stat_force_next_flush() \g /dev/null
select is(pg_stat_get_function_calls('queue._maintain(interval)'::regprocedure) - :calls, 5::bigint,
  'if all but one have died, each of its heartbeats does');
reset track_functions;

-- is_busy. Of other sessions: tests/py/integration/test_connections.py
select is(queue.is_busy(pg_backend_pid()), true, 'this session works');
select is(queue.is_busy(0), false, 'there is no such session');

select * from finish();
