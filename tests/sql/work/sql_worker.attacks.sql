-- A function that runs as a task can do nothing to its worker: errors of every class, claims that it ends itself, settings, roles, rights.

select plan(42);

create schema evil;
create table evil.seen (what text);
create function evil.note(args jsonb) returns text language plpgsql as $$
begin
  insert into evil.seen (what) values (concat_ws(' ', args ->> 'what', current_user, current_setting('search_path')));
  return current_setting('transaction_isolation');
end $$;
create function evil.raises(args jsonb) returns void language plpgsql as $$
begin
  insert into evil.seen (what) values ('raised');
  raise exception 'raised' using errcode = args ->> 'code';
end $$;
create function evil.asserts(jsonb) returns void language plpgsql as $$ begin assert false, 'never'; end $$;
create function evil.commits(jsonb) returns void language plpgsql as $$ begin commit; end $$;
create function evil.recurses(jsonb) returns void language plpgsql as $$ begin perform evil.recurses($1); end $$;
create function evil.length(args jsonb) returns integer language sql as $$ select length(args ->> 'text') $$;
create function evil.many(jsonb, out a integer, out b text) language sql as $$ select 1, 'x' $$;
create function evil.infinite(jsonb) returns double precision language sql as $$ select float8 'infinity' $$;
create function evil.large(jsonb) returns text language sql as $$ select repeat('x', 20000000) $$;
create function evil.dropped(jsonb) returns void language sql as $$ select $$;
create function evil.forbidden(jsonb) returns void language sql as $$ select $$;
revoke execute on function evil.forbidden(jsonb) from public;
-- ends its own claim, the only one that runs
create function evil.ends(args jsonb) returns void language plpgsql as $$
declare
  v record;
begin
  insert into evil.seen (what) values ('ended');
  select j.id, j.claim into v from queue.jobs j where j.state = 'running';
  execute args ->> 'how' using v.id, v.claim;
end $$;
create function evil.sets(args jsonb) returns void language plpgsql as $$
begin
  perform set_config(s.key, s.value, false) from jsonb_each_text(args) s;
end $$;
select queue.register_task(p.proname, jsonb_build_object('function', 'evil.' || p.proname)) from pg_proc p
where p.pronamespace = 'evil'::regnamespace \g /dev/null

create function pg_temp.job(id bigint) returns text language sql as $$
  select concat_ws(' ', j.state, j.reason, j.attempts, j.result, left(j.error, 60)) from queue.jobs j where j.id = job.id
$$;

-- Types that hide the system's, in a session that has not compiled the worker yet
create schema hides;
create function hides.hit(value anyelement) returns boolean language plpgsql as $$
begin
  insert into evil.seen (what) values ('hit');
  return true;
end $$;
select format('create domain hides.%I as pg_catalog.text check (hides.hit(value))', t)
from unnest('{bool,int4,int8,interval,jsonb,name,record,text,timestamptz}'::text[]) t \gexec
select queue.defer('length', '{"text": "hidden"}') as id, queue.defer('raises', '{"code": "22012"}') as raises \gset
set search_path = hides, pg_catalog, tap;
call queue.work();
reset search_path;
select is(pg_temp.job(:id), 'succeeded 1 6', 'with types that hide those of the system it works');
select is(pg_temp.job(:raises), 'failed attempts 1 raised', 'errors too');
select is_empty('select * from evil.seen', 'and their checks are not called');
drop schema hides cascade;

-- Errors of every class
select queue.defer('raises', jsonb_build_object('code', c)) from unnest(
  '{01000,02000,08006,0A000,22012,22023,23505,25001,25006,28000,2D000,2F005,34000,38001,3F000,40001,40P01,42501,42P01,53200,53300,54001,55P03,57P01,57P03,58030,F0000,P0001,P0002,P0004,QJ001,QJ002,QJ007,QJ008,QJ090,XX000,XX001}'::text[]) c
\g /dev/null
select queue.defer('asserts') as asserts, queue.defer('commits') as commits, queue.defer('recurses') as recurses, queue.defer('note', '{"what": "after"}') as after \gset
set max_stack_depth = '500kB';
call queue.work();
reset max_stack_depth;
select is((select string_agg(j.args ->> 'code', ' ') from queue.jobs j join queue.attempts a on a.job_id = j.id
           where j.task = 'raises' and (j.state, j.reason, a.outcome, a.details ->> 'type') is distinct from ('failed', 'attempts', 'failed', j.args ->> 'code')), null,
          'an error of any class is a failure, with its code');
select is(pg_temp.job(:asserts), 'failed attempts 1 never', 'so is an assertion');
select is((select a.details ->> 'type' from queue.attempts a where a.job_id = :commits), '2D000', 'and a function that would commit');
select is((select a.details ->> 'type' from queue.attempts a where a.job_id = :recurses), '54001', 'or recurses');
select is(pg_temp.job(:after), 'succeeded 1 "read committed"', 'and what comes after it runs');
select is((select count(*) from evil.seen where what = 'raised'), 0::bigint, 'none of their writes is left');

-- Claims that the function ends itself
select queue.defer('ends', jsonb_build_object('how', h)) from unnest(array['select queue.succeed($1, $2)', 'select queue.fail($1, $2, ''mine'')', 'select queue.release($1, $2)',
  'select queue.retry_later($1, $2)', 'select * from queue.done(array[$1])', 'select * from queue.retry(array[$1], true)', 'select * from queue.delete(array[$1], true)']) h \g /dev/null
call queue.work();
select is((select string_agg(concat_ws(' ', j.args ->> 'how', pg_temp.job(j.id)), '; ') from queue.jobs j
           where j.task = 'ends' and (j.state, j.attempts, j.claims) is distinct from ('failed', 1, 1)), null, 'one that ends its claim itself has failed');
select is((select count(*) from queue.jobs where task = 'ends'), 7::bigint, 'however it does');
select is((select distinct error like 'the claim had ended when the function returned:%' from queue.jobs where task = 'ends'), true, 'and gets that error');
select is((select count(*) from evil.seen where what = 'ended'), 0::bigint, 'and undone');

-- Large args, odd results
select queue.defer('length', jsonb_build_object('text', repeat('x', 200000))) as long, queue.defer('length', '{"text": "x"}') as short,
  queue.defer('many') as many, queue.defer('infinite') as infinite, queue.defer('large') as large \gset
call queue.work();
select is(pg_temp.job(:long), 'succeeded 1 200000', 'args that are too large for the answer of one fetch');
select is(pg_temp.job(:short), 'succeeded 1 1', 'and those after them');
select is(pg_temp.job(:many), 'succeeded 1 {"a": 1, "b": "x"}', 'a row is an object');
select is(pg_temp.job(:infinite), 'succeeded 1 "Infinity"', 'values without a JSON form become text');
select is(pg_temp.job(:large) like 'failed attempts 1 %too large%', true, 'too large a result fails it, because its effect can be undone');

-- Settings do not reach the next function, nor the worker
create role work_other;
create role work_limited;
grant work_other to work_limited;
grant usage on schema evil to work_other, work_limited;
grant insert on evil.seen to work_other, work_limited;
select queue.grant_access('work_limited', 'worker', '{mine}') \g /dev/null
truncate evil.seen;
select queue.defer('sets', '{"search_path": "pg_temp, evil"}'), queue.defer('note', '{"what": "path"}'),
  queue.defer('sets', '{"default_transaction_isolation": "serializable"}'), queue.defer('note', '{"what": "isolation"}'),
  queue.defer('sets', '{"default_transaction_read_only": "on"}'), queue.defer('note', '{"what": "read only"}') \g /dev/null
select current_setting('search_path') as path \gset
call queue.work();
reset default_transaction_isolation;
reset default_transaction_read_only;
select is((select string_agg(what, ', ' order by what) from evil.seen), format('isolation %1$s %2$s, path %1$s %2$s, read only %1$s %2$s', current_user, :'path'), 'search_path and the defaults of transactions');
select is((select count(*) from queue.jobs where state = 'succeeded' and task in ('sets') ), 3::bigint, 'all have succeeded');
truncate evil.seen;
select queue.defer('sets', '{"role": "work_other"}', 'mine', 2) as role, queue.defer('note', '{"what": "role"}', 'mine', 1) as note,
  queue.defer('sets', '{"role": "pg_monitor"}', 'mine') as no_member, queue.defer('note', '{"what": "theirs"}', 'theirs') as theirs, queue.defer('forbidden', '{}', 'mine') as forbidden \gset
set session authorization work_limited;
call queue.work();
select is(current_user, 'work_limited'::name, 'it ends as whom it began');
reset session authorization;
select is((select string_agg(what, ', ' order by what) from evil.seen), 'role work_limited ' || :'path', 'and runs all as this role');
select is(pg_temp.job(:role), 'succeeded 1', 'a member may take on a role, even one without rights in the queue');
select is(pg_temp.job(:no_member) like 'failed attempts 1 permission denied%', true, 'but no other');
select is(pg_temp.job(:theirs), 'ready 0', 'a role that is restricted to some queues runs only their jobs');
select is(pg_temp.job(:forbidden), 'failed attempts 1 permission denied for function forbidden', 'a function that the role may not call fails');
select queue.cancel(:theirs) \g /dev/null

-- A function that no longer exists
drop function evil.dropped(jsonb);
select queue.defer('dropped') as id \gset
call queue.work();
select is(pg_temp.job(:id) like 'scheduled 0 %', true, 'its task is not known');
select is(queue.why(:id) like '%task dropped is not known to worker % (queue.work)', true, 'as why says');
create function evil.dropped(jsonb) returns integer language sql as $$ select 1 $$;
update queue.waiting set at = clock_timestamp() where id = :id;
update queue.job_override set scheduled_at = clock_timestamp() where id = :id;
call queue.work();
select is(pg_temp.job(:id) like 'succeeded 1 1%', true, 'until it is there again');

-- The job's own timeout: the run ends as timed out when it returns, and nobody else runs it meanwhile
create function evil.late(args jsonb) returns integer language plpgsql as $$
declare
  v_reaped integer;
begin
  insert into evil.seen (what) values ('late');
  while exists (select from queue.jobs where state = 'running' and started_at + interval '50 ms' > clock_timestamp()) loop
    perform pg_sleep(0.01);
  end loop;
  update queue.lease set expires_at = clock_timestamp();
  select r.reaped into v_reaped from queue.reap() r;
  if v_reaped > 0 then
    raise 'it was reaped';
  end if;
  return v_reaped;
end $$;
select queue.register_task('late', '{"function": "evil.late"}') \g /dev/null
truncate evil.seen;
select queue.defer('late', options => '{"timeout": "50 ms"}') as id, queue.defer('length', '{"text": "y"}') as next \gset
call queue.work();
select is(pg_temp.job(:id), 'failed attempts 1 not done within its timeout of 00:00:00.05', 'one that has not ended within its timeout fails when it ends');
select is((select a.outcome from queue.attempts a where a.job_id = :id), 'timed_out', 'as timed out');
select is_empty('select * from evil.seen', 'undone');
select is(pg_temp.job(:next), 'succeeded 1 1', 'and the next one runs');
select queue.defer('length', '{"text": "y"}', options => '{"timeout": "1 minute"}') as id \gset
call queue.work();
select is(pg_temp.job(:id), 'succeeded 1 1', 'within its timeout it succeeds');

-- A function that cancels itself ends the worker, like any cancel
select queue.defer('raises', '{"code": "57014"}') as id, queue.defer('note', '{"what": "cancel"}') as next \gset
\set ON_ERROR_STOP 0
call queue.work();
\set ON_ERROR_STOP 1
select is((select j.state || ' ' || a.outcome from queue.jobs j join queue.attempts a on a.job_id = j.id where j.id = :id), 'failed timed_out', 'one that is cancelled');
select is(pg_temp.job(:next), 'ready 0', 'leaves the others to the next call');
call queue.work(null, 1);
select is(pg_temp.job(:next), 'succeeded 1 "read committed"', 'which runs them');

-- Refusals
select throws_ok('call queue.work(null, 0)', '22023', null, 'at least one job');
select throws_ok('call queue.work()', '2D000', null, 'within a transaction');
select is((select count(*) from queue.workers where is_alive and name = 'queue.work'), 0::bigint, 'no worker is left');
select is_empty('select * from queue.jobs where state = ''running''', 'nor a claim');

select is_empty('select * from queue.check()', 'everything is in order');
select queue.revoke_access('work_limited') \g /dev/null
drop owned by work_limited, work_other;
drop role work_limited, work_other;

select * from finish();
