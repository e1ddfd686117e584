-- Tasks that are database functions: registered, run by run_function, and by queue.work.

select plan(47);

create schema billing;
create table billing.closed (month text constraint month_check check (month <> 'never'));
create table billing.late (n integer, constraint late_key unique (n) deferrable initially deferred);
create function billing.close_month(args jsonb) returns jsonb language plpgsql as $$
begin
  insert into billing.closed (month) values (args ->> 'month');
  return jsonb_build_object('closed', args ->> 'month');
end $$;
create function billing."Odd name"(jsonb) returns integer language sql as $$ select 7 $$;
create function billing.nothing(args jsonb) returns void language sql as $$ insert into billing.closed (month) values ('nothing') $$;
create function billing.breaks(args jsonb) returns void language plpgsql as $$
begin
  insert into billing.closed (month) values ('broken');
  raise exception 'broken' using errcode = 'P7777';
end $$;
create function billing.breaks_late(args jsonb) returns void language sql as $$ insert into billing.late (n) values (1), (1) $$;
create function billing.rows(jsonb) returns setof integer language sql as $$ select 1 $$;
create function billing.other(text) returns integer language sql as $$ select 1 $$;
create procedure billing.procedure(jsonb) language sql as $$ select 1 $$;

create function pg_temp.job(id bigint) returns text language sql as $$
  select concat_ws(' ', j.state, j.reason, j.attempts, j.result, j.error) from queue.jobs j where j.id = job.id
$$;

-- Registering
select queue.register_task('close', '{"function": "billing.close_month", "retry": {"max_attempts": 2}}') \g /dev/null
select queue.register_task('odd', '{"function": "billing.\"Odd name\""}'), queue.register_task('nothing', '{"function": "BILLING.Nothing"}'),
  queue.register_task('breaks', '{"function": "billing.breaks"}'), queue.register_task('breaks late', '{"function": "billing.breaks_late"}'),
  queue.register_task('length', '{"function": "pg_catalog.jsonb_typeof"}') \g /dev/null
select is((select string_agg(function, ', ' order by name) from queue.task), 'billing.breaks, billing.breaks_late, billing.close_month, pg_catalog.jsonb_typeof, billing.nothing, billing."Odd name"',
          'functions are looked up as they are registered');
select is(test.refusal(format('select queue.register_task(''x'', %L)', jsonb_build_object('function', f))), '22023', f::text)
from (values ('"close_month"'::jsonb), ('"public.close_month"'), ('"billing.none"'), ('"billing.rows"'), ('"billing.other"'), ('"billing.procedure"'), ('"a.b.c"'), ('"billing.close_month(jsonb)"'),
  ('""'), ('1'), ('"billing.close_month; drop table billing.closed"'), ('"pg_temp.job"')) v (f);
create role work_producer;
select queue.grant_access('work_producer', 'producer') \g /dev/null
set role work_producer;
select is(test.refusal($$select queue.register_task('evil', '{"function": "pg_catalog.jsonb_typeof"}')$$), '42501', 'a producer may set no function');
select is(test.refusal($$select queue.register_task('close', '{}')$$), '42501', 'nor take one away');
reset role;

-- run_function
select queue.register_worker('w') as worker \gset
select queue.defer('close', '{"month": "May"}') as id \gset
select id, claim from queue.fetch(:worker) \gset
select is(r::text, '(succeeded,succeeded,)', 'it runs the function') from queue.run_function(:id, :claim) r;
select is(pg_temp.job(:id), 'succeeded 1 {"closed": "May"}', 'whose answer is the result');
select is((select string_agg(month, ' ') from billing.closed), 'May', 'once');
select is(test.refusal(format('select queue.run_function(%s, %s)', :id, :claim)), 'QJ002', 'a claim that has ended');
select is((select string_agg(month, ' ') from billing.closed), 'May', 'runs nothing');
select queue.defer('unknown') as id \gset
select id, claim from queue.fetch(:worker) \gset
select is(r::text, '(scheduled,released,"no worker knows the task")', 'a task without a function goes back') from queue.run_function(:id, :claim) r;
select is((select details from queue.attempts where job_id = :id), '{"unknown_task": "unknown"}', 'as not known');
select queue.cancel(:id) \g /dev/null

-- A job that was told to abort
select queue.defer('unknown') as unknown, queue.defer('close', '{"month": "never"}') as fails \gset
create temp table told as select f.id, f.claim from queue.fetch(:worker, null, 2) f;
select queue.cancel(t.id, true) from told t \g /dev/null
select results_eq('select r.state, r.outcome from told t cross join lateral queue.run_function(t.id, t.claim) r',
                  $$ values ('cancelled', 'aborted'), ('cancelled', 'aborted') $$, 'ends as aborted, whether there is a function or not');

-- A claim that is lost while the function runs
create function billing.loses(args jsonb) returns void language sql as $$
  insert into billing.closed (month) values ('lost');
  select queue.release((args ->> 'id')::bigint, j.claim) from queue.jobs j where j.id = (args ->> 'id')::bigint
$$;
select queue.register_task('loses', '{"function": "billing.loses"}') \g /dev/null
select queue.defer('loses') as id \gset
select queue.set_args(:id, jsonb_build_object('id', :id)) \g /dev/null
select id, claim from queue.fetch(:worker) \gset
select is(r.state || ' ' || r.outcome, 'failed failed', 'by the function itself, then all is undone and it fails') from queue.run_function(:id, :claim) r;
select is((select count(*) from billing.closed where month = 'lost'), 0::bigint, 'and its writes are undone');

-- A function that fails with an SQLSTATE of pgdefer while its claim is valid
create function billing.asks(args jsonb) returns void language plpgsql as $$ begin raise 'no job 0' using errcode = 'QJ001'; end $$;
select queue.register_task('asks', '{"function": "billing.asks"}') \g /dev/null
select queue.defer('asks') as id \gset
select id, claim from queue.fetch(:worker) \gset
select is(r::text, '(failed,failed,"no job 0")', 'its error is a failure as any') from queue.run_function(:id, :claim) r;
select is(pg_temp.job(:id), 'failed attempts 1 no job 0', 'which the job tells');

-- work
select queue.defer('close', '{"month": "June"}') as june, queue.defer('odd') as odd, queue.defer('nothing') as nothing, queue.defer('breaks') as breaks,
  queue.defer('breaks late') as late, queue.defer('length') as length, queue.defer('python') as python, queue.defer('close', '{"month": "never"}') as never \gset
call queue.work(array['none']);
select is(pg_temp.job(:june), 'ready 0', 'of other queues it runs nothing');
call queue.work(null, 1);
select is(pg_temp.job(:june) || ', ' || pg_temp.job(:odd), 'succeeded 1 {"closed": "June"}, ready 0', 'max_jobs');
call queue.work();
select is(pg_temp.job(:odd), 'succeeded 1 7', 'any result that is JSON');
select is(pg_temp.job(:nothing), 'succeeded 1', 'or none');
select is(pg_temp.job(:length), 'succeeded 1 "object"', 'functions of the system');
select is(pg_temp.job(:python), 'ready 0', 'tasks that are none are left to others');
select is(pg_temp.job(:breaks), 'failed attempts 1 broken', 'an error is a failure');
select is((select concat_ws(' ', details ->> 'type', details ->> 'message') from queue.attempts where job_id = :breaks), 'P7777 broken', 'with its code');
select is((select details ->> 'traceback' like '%billing.breaks(jsonb) line 4 at RAISE%' from queue.attempts where job_id = :breaks), true, 'and its context');
select is((select string_agg(month, ' ') from billing.closed), 'May June nothing', 'and nothing of what it wrote');
select is((select details ->> 'type' from queue.attempts where job_id = :late), '23505', 'deferred constraints fail it too');
select is(pg_temp.job(:never) like 'failed attempts 2 %month_check%', true, 'the retry policy counts');
select is((select count(*) from queue.workers where is_alive and name = 'queue.work'), 0::bigint, 'it says good-bye');
select is_empty('select * from queue.check()', 'everything is in order');

-- Cancelled by statement_timeout
create function billing.sleeps(args jsonb) returns void language plpgsql as $$
begin
  insert into billing.closed (month) values ('slept');
  perform pg_sleep(60);
end $$;
select queue.register_task('sleeps', '{"function": "billing.sleeps"}') \g /dev/null
select queue.defer('sleeps') as id, queue.defer('close', '{"month": "July"}') as july \gset
set statement_timeout = '1 s';
\set ON_ERROR_STOP 0
call queue.work();
reset statement_timeout;
-- On a busy machine a second may pass before the job starts.
select not exists (select from queue.attempts a where a.job_id = :id) as is_early \gset
\if :is_early
  set statement_timeout = '30 s';
  call queue.work();
  reset statement_timeout;
\endif
\set ON_ERROR_STOP 1
select is((select state || ' ' || outcome from queue.jobs j join queue.attempts a on a.job_id = j.id where j.id = :id), 'failed timed_out', 'its job has timed out');
select is((select count(*) from billing.closed where month = 'slept'), 0::bigint, 'its writes are undone');
select is(pg_temp.job(:july), 'ready 0', 'and work ends');
call queue.work();

-- A worker whose handler runs for longer than dead_after
create function billing.reaped(args jsonb) returns integer language plpgsql as $$
declare
  v_reaped integer;
begin
  update queue.worker set last_seen_at = last_seen_at - interval '1 hour', dead_after = '0' where name = 'queue.work' and gone_at is null;
  select r.reaped into v_reaped from queue.reap() r;
  update queue.worker set dead_after = '30 s' where name = 'queue.work' and gone_at is null;
  return v_reaped;
end $$;
select queue.register_task('reaped', '{"function": "billing.reaped"}') \g /dev/null
select queue.defer('reaped') as id \gset
call queue.work();
select is(pg_temp.job(:id), 'succeeded 1 0', 'its session shows that it is alive');
select is(test.refusal($$select queue.register_worker('x', info => '{"session": 5}')$$), '22023', 'whose session only the server says');

-- Only the worker's own session shows that it runs
select queue.register_worker('elsewhere', info => '{"session": true}') as elsewhere \gset
update queue.worker set last_seen_at = last_seen_at - interval '1 hour', dead_after = '0', info = info || '{"session": 0}' where id = :elsewhere;
select queue.reap() \g /dev/null
select isnt((select gone_at from queue.worker where id = :elsewhere), null, 'the transaction of another session is no sign of life');

select queue.revoke_access('work_producer') \g /dev/null
drop role work_producer;

select * from finish();
