-- Privileges: nothing under a caller's control changes them, neither a search_path nor casts.

select plan(13);

\ir permissions.helpers.psql

-- Roles are the whole server's: permissions.sql, which may run at the same time, has others.
create role "pgdefer tap 'hostile producer'" login;
create role pgdefer_tap_bystander;
select queue.grant_access('pgdefer tap ''hostile producer''', 'producer');
create table public.thing (id integer);
grant all on public.thing to public;
create trigger defers after insert on public.thing for each row execute function queue.defer_trigger('by trigger');

-- A hostile search_path, and hostile objects in pg_temp: each would raise XX000 if it were reached.
create schema evil;
grant usage on schema evil to public;
create function evil.hit() returns void language plpgsql as $$ begin raise exception 'hit' using errcode = 'XX000'; end $$;
do $$
declare
  v record;
begin
  -- functions with names that the code calls, for common types
  for v in
    select distinct p.proname, oidvectortypes(p.proargtypes) as arguments
    from pg_proc p
    where p.pronamespace = 'pg_catalog'::regnamespace and p.prokind = 'f' and p.provariadic = 0
      and p.proname = any ('{coalesce,clock_timestamp,now,format,nextval,currval,jsonb_typeof,jsonb_build_object,jsonb_array_elements,jsonb_array_elements_text,jsonb_each,jsonb_object_keys,jsonb_strip_nulls,octet_length,jsonb_contains,length,left,right,strpos,starts_with,cardinality,array_position,array_remove,unnest,current_setting,set_config,pg_notify,pg_current_xact_id,pg_current_xact_id_if_assigned,pg_current_snapshot,pg_snapshot_xmax,pg_snapshot_xip,pg_visible_in_snapshot,pg_try_advisory_lock,pg_try_advisory_xact_lock_shared,pg_advisory_xact_lock,to_jsonb,random,isfinite,make_interval,to_regclass,pg_control_system,generate_series,substr,replace,split_part,extract,date_part,array_fill,nullif,greatest,least}'::text[])
      and not exists (select from unnest(p.proargtypes) t where (select y.typtype from pg_type y where y.oid = t) = 'p')
  loop
    execute format('create function evil.%I(%s) returns void language plpgsql as $f$ begin raise exception ''hit'' using errcode = ''XX000''; end $f$', v.proname, v.arguments);
  end loop;
  -- operators of text, integers, times and JSON
  for v in
    select o.oprname, format_type(o.oprleft, null) as l, format_type(o.oprright, null) as r
    from pg_operator o
    where o.oprnamespace = 'pg_catalog'::regnamespace and o.oprleft <> 0 and o.oprname !~ '[~?@#!%]'
      and format_type(o.oprleft, null) = any ('{text,integer,bigint,smallint,"timestamp with time zone",interval,jsonb,xid8,boolean}')
      and format_type(o.oprright, null) = any ('{text,integer,bigint,smallint,"timestamp with time zone",interval,jsonb,xid8,boolean}')
  loop
    if to_regprocedure(format('evil.op(%s, %s)', v.l, v.r)) is null then
      execute format('create function evil.op(%s, %s) returns boolean language plpgsql as $f$ begin raise exception ''hit'' using errcode = ''XX000''; end $f$', v.l, v.r);
    end if;
    execute format('create operator evil.%s (leftarg = %s, rightarg = %s, function = evil.op)', v.oprname, v.l, v.r);
  end loop;
end $$;
select cmp_ok((select count(*) from pg_operator o where o.oprnamespace = 'evil'::regnamespace), '>', 100::bigint, 'there are hostile operators');
select cmp_ok((select count(*) from pg_proc o where o.pronamespace = 'evil'::regnamespace), '>', 80::bigint, 'and functions');

set search_path = pg_catalog, public, tap, pg_temp;  -- what follows would hit pgTAP, too
create temp table job (id bigint);
create temp table live (id bigint);
create temp table task (name text);
create temp table worker (id bigint);
create temp table lane (lane integer);
create temp table cursor (tick bigint);
create domain pg_temp.bigint as text check (value = 'hit');
create domain pg_temp.jsonb as text check (value = 'hit');
create domain pg_temp.text as integer;
create domain pg_temp.regclass as text check (value = 'hit');
create function evil.num_nonnulls(text, integer, text, text, timestamptz, timestamptz, bigint[], text, integer, jsonb) returns void
language plpgsql as $$ begin raise exception 'hit' using errcode = 'XX000'; end $$;
create function pg_temp.now() returns timestamptz language plpgsql as $$ begin raise exception 'hit' using errcode = 'XX000'; end $$;
create function pg_temp.unnest(anyarray) returns setof anyelement language plpgsql as $$ begin raise exception 'hit' using errcode = 'XX000'; end $$;

create function pg_temp.under(path pg_catalog.text, calls pg_catalog.text[]) returns pg_catalog.text language plpgsql as $$
declare
  v_call pg_catalog.text;
begin
  foreach v_call in array calls loop
    begin
      perform pg_catalog.set_config('search_path', path, true);
      execute v_call;
      perform pg_catalog.set_config('search_path', 'pg_catalog, public, tap, pg_temp', true);
    exception when others then
      return pg_catalog.format('%s: %s %s', v_call, sqlstate, sqlerrm);
    end;
  end loop;
  return 'ok';
end $$;
create temp table hostile_calls (n integer generated always as identity, call pg_catalog.text);
insert into hostile_calls (call) values
  ($$select queue.register_task('evil', '{}')$$),
  ($$select queue.defer('plain')$$),
  ($$select queue.register_task('evil', '{"lock": "{a}", "timeout": "1 min", "retry": {"max_attempts": 5, "base": "1 s"}}')$$),
  ($$select queue.register_worker('evil', '{evil*}', '{"dead_after": "1 min"}')$$),
  ($$select queue.defer('evil', '{"a": R}', 'evil', 1, null, 'evil {a}', '2020-01-01', '2020-01-01', null, 'evil {a}', 2, '{"delay": null, "description": "x", "expires_at": "2999-01-01"}')$$),
  ($$select queue.defer_many('[{"task": "plain", "queue": "evil"}, {"task": "plain", "queue": "evil", "priority": 3}]')$$),
  ($$select queue.defer_many('[{"task": "evil", "queue": "evil", "args": {"a": 2}, "scheduled_at": "2999-01-01Z"}, {"task": "x", "options": {"delay": 5, "retain": "1 day"}}]')$$),
  ($$insert into public.thing values (2)$$),
  ($$select queue.fetch(W, '{evil*,default}', 10)$$),
  ($$select queue.before_sleep(W), queue.after_sleep(W)$$),
  ($$select queue.heartbeat(W), queue.extend(I, C, '1 min')$$),
  ($$select queue.fail(I, C, 'x', '{"a": 1}', '{"retry_in": "0 s"}')$$),
  ($$select queue.fetch(W, '{*}', 3, '{"order": "listed", "deadline_within": "1 hour"}')$$),
  ($$select queue.finish_and_fetch(W, '[{"id": I, "claim": C, "outcome": "released"}]', '{*}', 2)$$),
  ($$select queue.finish_many('[{"id": I, "claim": C, "outcome": "succeeded", "result": 1}]')$$),
  ($$select queue.fetch(W, null, 3)$$),
  ($$select queue.finish_step(I, C, 'bR', '1'), queue.finish_steps(I, C, '[{"name": "lR", "value": 1}, {"name": "lR#2"}]'), queue.emit(I, C, 's', '1'), queue.set_progress(I, C, 5, 'x')$$),
  ($$select queue.signal(I, 's'), queue.publish('e' || R), queue.fork(I, 'bR')$$),
  ($$select queue.read_steps(I, C), queue.read_stream(I, 's'), queue.streams(I), queue.waits_for(I)$$),
  ($$select queue.begin_step(I, C, 'bR'), queue.begin_step(I, C, 'aR', 'f')$$),
  ($$select queue.fail_step(I, C, 'failedR', 'x', '{"a": 1}', '{"retryable": false}')$$),
  ($$select queue.wait(I, C, 'wR', 's', timeout => '1 min')$$),
  ($$select queue.fetch(W, null, 3)$$),
  ($$select queue.sleep(I, C, 'nR', '2020-01-01')$$),
  ($$select queue.fetch(W, null, 3)$$),
  ($$select queue.retry_later(I, C)$$),
  ($$select queue.reap()$$),
  ($$select queue.tick()$$),
  ($$select queue.pause('evil'), queue.resume('evil'), queue.create_queue('evil 2'), queue.configure_queue('evil', '{"max_running": 3, "rate": {"limit": 5000, "per": "1 s"}}')$$),
  ($$select queue.why(I), queue.peek(), queue.check()$$),
  ($$select count(*) from queue.jobs, queue.attempts, queue.queues, queue.workers, queue.tasks$$),
  ($$select queue.cancel_children(I, true)$$),
  ($$select queue.cancel(I, true)$$),
  ($$select queue.next_runs('*/5 * * * MON', 'Europe/Paris'), queue.backoff('{"base": "1 s", "backoff": "exponential"}', 3), queue.version(), queue.prune()$$),
  ($$select queue.grant_access('pgdefer_tap_bystander', 'operator'), queue.revoke_access('pgdefer_tap_bystander')$$),
  ($$select queue.worker_died(0)$$),
  ($$select queue.deregister_worker(W)$$),
  ($$select queue.install()$$);
create temp table outcomes (run integer, n integer, said pg_catalog.text);
create procedure pg_temp.attack(run integer, path pg_catalog.text) language plpgsql as $$
declare
  v record;
  v_claim record;
begin
  for v in select h.n, h.call from hostile_calls h order by h.n loop
    select l.id, l.claim into v_claim from queue.active_job l where l.claim is not null order by l.claim desc, l.id limit 1;
    insert into outcomes
    select attack.run, v.n, pg_temp.under(path, array[replace(replace(replace(replace(v.call, 'W', coalesce((select max(w.id) from queue.worker w)::pg_catalog.text, '0')),
                                                      'I', coalesce(v_claim.id, 0)::pg_catalog.text), 'C', coalesce(v_claim.claim, 0)::pg_catalog.text), 'R', run::pg_catalog.text)]);
    commit;
  end loop;
end $$;
select matches(pg_temp.under('evil, pg_catalog', array['select ''a''::pg_catalog.text = ''b''']), 'XX000 hit$', 'a caller that asks for it reaches an operator of the attack');
select matches(pg_temp.under('pg_temp, pg_catalog', array['select ''{}''::jsonb']), '23514', 'and so is a type');
call pg_temp.attack(0, 'pg_catalog, public, tap, pg_temp');
call pg_temp.attack(1, 'evil, pg_temp, pg_catalog');
call pg_temp.attack(2, 'pg_temp, evil, pg_catalog');
call pg_temp.attack(3, '');
select is((select string_agg(o.said, ', ') from outcomes o where o.run = 0 and o.said <> 'ok'), null, 'without an attack everything works');
select is((select string_agg(o.said, ', ') from outcomes o where o.run = a.run and o.said <> 'ok'), null, a.attack)
from (values (1, 'with a hostile search_path too'), (2, 'with pg_temp first too'), (3, 'with an empty one too')) a (run, attack);

-- to_jsonb calls a cast to json: it must not run with the rights of the queue's owner.
set role "pgdefer tap 'hostile producer'";
reset role;
grant create on schema public to "pgdefer tap 'hostile producer'";
set role "pgdefer tap 'hostile producer'";
create type public.bait as enum ('x');
create domain public.baited as public.bait;
create function public.to_json(b public.bait) returns json language plpgsql as $$ begin raise exception 'cast ran as %', current_user using errcode = 'XX000'; end $$;
create cast (public.bait as json) with function public.to_json(public.bait);
create table public.trap (b public.bait);
create table public.trap2 (b public.baited[]);
create table public.trap3 (c public.trap2);
create trigger t after insert on public.trap for each row execute function queue.defer_trigger('trap');
create trigger t after insert on public.trap2 for each row execute function queue.defer_trigger('trap');
create trigger t after insert on public.trap3 for each row execute function queue.defer_trigger('trap');
reset role;
select is(pg_temp.as_role('pgdefer tap ''hostile producer''', $$insert into public.trap values ('x')$$), '22023', 'a cast to json of a user is refused');
select is(pg_temp.as_role('pgdefer tap ''hostile producer''', $$insert into public.trap2 values (array['x'::public.bait])$$), '22023', 'inside an array of a domain too');
select is(pg_temp.as_role('pgdefer tap ''hostile producer''', $$insert into public.trap3 values (row (array['x'::public.bait]))$$), '22023', 'inside a row too');
alter function public.to_json(public.bait) owner to current_user;
create or replace function public.to_json(b public.bait) returns json language sql as $$ select '"trusted"'::json $$;
insert into public.trap values ('x');
select is((select j.args::text from queue.jobs j where j.task = 'trap'), '{"b": "trusted"}', 'one of a superuser is called');
create type public.colour as enum ('red');
create table public.harmless (c public.colour, r int4range);
create trigger t after insert on public.harmless for each row execute function queue.defer_trigger('harmless');
insert into public.harmless values ('red', '[1,2)');
select is((select j.args from queue.jobs j where j.task = 'harmless'), '{"c": "red", "r": "[1,2)"}', 'types of users without casts are plain');

drop table public.trap, public.trap2, public.trap3 cascade;
drop function public.to_json cascade;
drop domain public.baited cascade;
drop type public.bait cascade;
revoke all on schema public from "pgdefer tap 'hostile producer'";
select queue.revoke_access('pgdefer tap ''hostile producer''');
drop role "pgdefer tap 'hostile producer'", pgdefer_tap_bystander;

select * from finish();
