-- Privileges: the rights of each kind of role, and that nothing under a caller's control changes them.

select plan(176);

-- The outcome of a call by a role: ok, or its SQLSTATE. Its effects are undone.
create function pg_temp.as_role(role text, call text) returns text language plpgsql as $$
begin
  begin
    execute format('set local role %I', role);
    execute call;
    raise exception using errcode = 'P0999';
  exception
    when sqlstate 'P0999' then return 'ok';
    when others then return sqlstate;
  end;
end $$;

create role "pgdefer tap 'producer'" login;
create role pgdefer_tap_worker;
create role pgdefer_tap_operator;
create role pgdefer_tap_reader;
create role pgdefer_tap_nobody;
create role pgdefer_tap_both;
select queue.grant_access('pgdefer tap ''producer''', 'producer');
select queue.grant_access('pgdefer_tap_worker', 'worker');
select queue.grant_access('pgdefer_tap_operator', 'operator');
select queue.grant_access('pgdefer_tap_reader', 'reader');
select queue.grant_access('pgdefer_tap_both', 'producer'), queue.grant_access('pgdefer_tap_both', 'reader');
select lives_ok($$select queue.grant_access('pgdefer_tap_reader', 'reader')$$, 'granting twice is harmless');

-- The rights: p(roducer), w(orker), o(perator), r(eader)
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
select queue.defer('t') as id \gset
select f.claim from queue.fetch(:worker) f \gset
select queue.defer('t') as other \gset
select queue.finish_step(:id, :claim, 'f') \g /dev/null
create table public.thing (id integer);
grant all on public.thing to public;

select queue.create_queue('kept'), queue.open_group('kept'), queue.schedule('kept', '@daily', 't') \g /dev/null
create temp table calls (call text, may text);
insert into calls values
  ('select queue.defer(''t'')', 'p'),
  ('select queue.defer(''t'', lock => ''l'', queueing_lock => ''q'', needs => array[:other]::bigint[], concurrency_key => ''k'', concurrency_limit => 1, options => ''{"delay": 1}'')', 'p'),
  ('select queue.defer_many(''[{"task": "t"}, {"task": "t", "lock": "l"}]'')', 'p'),
  ('create trigger x after insert on public.thing for each row execute function queue.defer_trigger(''t'')', 'p'),
  ('select * from queue.version()', 'pwor'),
  ('select queue.register_task(''t'', ''{}'')', 'pwo'),
  ('select queue.register_worker(''x'')', 'w'),
  ('select queue.fetch(:worker)', 'w'),
  ('select queue.fetch(:worker, array[''*''], 5, ''{"order": "listed"}'')', 'w'),
  ('select queue.finish_and_fetch(:worker, ''[]'')', 'w'),
  ('select queue.heartbeat(:worker)', 'w'),
  ('select queue.extend(:id, :claim, ''1 min'')', 'wo'),
  ('select queue.before_sleep(:worker), queue.after_sleep(:worker)', 'w'),
  ('select queue.succeed(:id, :claim, ''1'')', 'wo'),
  ('select queue.fail(:id, :claim, ''x'')', 'wo'),
  ('select queue.retry_later(:id, :claim)', 'wo'),
  ('select queue.release(:id, :claim)', 'wo'),
  ('select queue.attempts_left(:id, :claim)', 'wo'),
  ('select queue.finish_many(''[]'')', 'w'),
  ('select queue.function_call(:id, :claim)', 'w'),
  ('select queue.run_function(:id, :claim)', 'w'),
  ('select queue.deregister_worker(:worker)', 'w'),
  ('select queue.worker_died(:worker)', 'w'),
  ('select * from queue.reap()', 'wo'),
  ('select queue.unblock()', 'o'),
  ('select * from queue.tick()', 'wo'),
  ('select queue.peek()', 'wor'),
  ('select queue.cancel(:other)', 'o'),
  ('select queue.cancel_children(:other)', 'o'),
  ('select queue.hold(:other)', 'o'),
  ('select queue.pause()', 'o'),
  ('select queue.resume()', 'o'),
  ('select queue.configure_queue(''q'', ''{}'')', 'o'),
  ('select queue.configure_key(''k'', ''{"limit": 2}'')', 'o'),
  ('select queue.configure_share(''s'', ''{"weight": 2}'')', 'o'),
  ('select queue.configure(''{}'')', 'o'),
  ('select queue.create_queue(''q'')', 'o'),
  ('select queue.prune()', 'o'),
  ('select queue.why(:other)', 'or'),
  ('select queue.check()', 'or'),
  ('select count(*) from queue.jobs', 'or'),
  ('select count(*) from queue.attempts', 'or'),
  ('select count(*) from queue.audit', 'or'),
  ('select count(*) from queue.queues', 'or'),
  ('select count(*) from queue.workers', 'or'),
  ('select count(*) from queue.tasks', 'or'),
  ('select count(*) from queue.locks', 'or'),
  ('select count(*) from queue.semaphores', 'or'),
  ('select count(*) from queue.shares', 'or'),
  ('select count(*) from queue.groups', 'or'),
  ('select count(*) from queue.metrics', 'or'),
  ('select count(*) from queue.schedules', 'wor'),
  ('select count(*) from queue.schedule_runs', 'or'),
  ('select count(*) from queue.unadmitted', ''),
  ('select count(*) from queue.unfinished', ''),
  ('select count(*) from queue.job_now', ''),
  ('select count(*) from queue.need_now', ''),
  ('select count(*) from queue.cursor_now', ''),
  ('select count(*) from queue.claimed_job', ''),
  ('select count(*) from queue.first_run', ''),
  ('select count(*) from queue.unrestricted', ''),
  ('select count(*) from queue.visible_queues', ''),
  ('select count(*) from queue.hidden_paths', ''),
  ('select queue.defer_group(''[]'', ''{"task": "t"}'')', 'p'),
  ('select queue.defer_chain(''[{"task": "t"}]'')', 'p'),
  ('select queue.result(:id)', 'pwor'),
  ('select queue.needs(:id)', 'wor'),
  ('select queue.await_result(:id)', 'pw'),
  ('select queue.claims(:worker)', 'w'),
  ('select queue.backoff(''{}'', 1)', 'wor'),
  ('select queue.next_runs(''@daily'')', 'wor'),
  ('select queue.schedule(''s'', ''@daily'', ''t'')', 'wo'),
  ('select queue.unschedule(''s'')', 'wo'),
  ('select queue.enable_schedule(''kept'', false)', 'o'),
  ('select queue.run_now(''kept'')', 'o'),
  ('select queue.next()', 'o'),
  ('select queue.move(array[:other], ''q'')', 'o'),
  ('select queue.copy(:other)', 'o'),
  ('select queue.delete(array[:other])', 'o'),
  ('select queue.fail_jobs(array[:other])', 'o'),
  ('select queue.done(array[:other])', 'o'),
  ('select queue.set_priority(array[:other], 1)', 'o'),
  ('select queue.set_deadline(array[:other], now())', 'o'),
  ('select queue.reschedule(:other)', 'o'),
  ('select queue.set_args(:other, ''{}'')', 'o'),
  ('select queue.delete_queue(''kept'')', 'o'),
  ('select queue.retry(array[:other])', 'o'),
  ('select queue.retry_failed()', 'o'),
  ('select queue.hold(:other), queue.unhold(:other)', 'o'),
  ('select queue.search()', 'or'),
  ('select queue.get(:id, ''a'')', 'or'),
  ('select queue.graph(:id)', 'or'),
  ('select queue.stats()', 'or'),
  ('select queue.series()', 'or'),
  ('select queue.task_stats()', 'or'),
  ('select count(*) from queue.minutes', 'or'),
  ('select queue.health()', 'or'),
  ('select queue.autoscale_hint()', 'or'),
  ('select queue.begin_step(:id, :claim, ''a'')', 'w'),
  ('select queue.finish_step(:id, :claim, ''a'')', 'w'),
  ('select queue.finish_steps(:id, :claim, ''[{"name": "l"}]'')', 'w'),
  ('select queue.read_steps(:id, :claim)', 'w'),
  ('select queue.sleep(:id, :claim, ''a'', now())', 'w'),
  ('select queue.wait(:id, :claim, ''a'', ''s'')', 'w'),
  ('select queue.await_jobs(:id, :claim, ''a'', array[:other])', 'w'),
  ('select queue.signal(:other, ''s'')', 'pwo'),
  ('select queue.publish(''e'')', 'pwo'),
  ('select queue.open_group(''other'')', 'p'),
  ('select queue.close_group(''kept'')', 'po'),
  ('select queue.emit(:id, :claim, ''s'', ''1'')', 'w'),
  ('select queue.read_stream(:id, ''s'')', 'pwor'),
  ('select queue.set_progress(:id, :claim, 1)', 'w'),
  ('select queue.fork(:id, ''f'')', 'o'),
  ('select count(*) from queue.steps', 'or'),
  ('select queue.migration()', ''),
  ('select queue.install()', ''),
  ('select queue.migrate()', ''),
  ('select queue.uninstall(true)', ''),
  ('select queue.grant_access(''pgdefer_tap_nobody'', ''operator'')', ''),
  ('select queue.rehearse()', ''),
  ('select queue.revoke_access(''pgdefer_tap_reader'')', ''),
  ('select queue._admit(1)', ''),
  ('select queue._lock_admission(true)', ''),
  ('select queue._invalid(''a'', ''b'')', ''),
  ('select count(*) from queue.job', ''),
  ('select count(*) from queue.log', ''),
  ('select count(*) from queue.active_job', ''),
  ('insert into queue.log (task) values (''t'')', ''),
  ('update queue.active_job set claim = null', ''),
  ('delete from queue.finished', ''),
  ('update queue.tasks set name = ''x''', ''),
  ('select from queue.admission for update', ''),
  ('lock table queue.admission', ''),
  ('truncate queue.log', ''),
  ('delete from queue.audit', ''),
  ('insert into queue.audit_log (role, call, args) values (''x'', ''x'', ''{}'')', ''),
  ('select nextval(''queue.claim_seq'')', ''),
  ('select nextval(''queue.job_id_seq'')', ''),
  ('create table queue.x ()', ''),
  ('create function queue.x() returns int language sql as ''select 1''', '');
update calls set call = replace(replace(replace(replace(call, ':id', :'id'), ':claim', :'claim'), ':other', :'other'), ':worker', :'worker');
create temp table kinds (kind text, role text);
insert into kinds values ('p', 'pgdefer tap ''producer'''), ('w', 'pgdefer_tap_worker'), ('o', 'pgdefer_tap_operator'), ('r', 'pgdefer_tap_reader'), ('', 'pgdefer_tap_nobody');

select is((select string_agg(k.kind, '' order by strpos('pwor', k.kind)) from kinds k where pg_temp.as_role(k.role, c.call) = 'ok'), nullif(c.may, ''),
          format('%s: %s', coalesce(nullif(c.may, ''), 'nobody'), left(c.call, 90)))
from calls c;
select is((select string_agg(distinct pg_temp.as_role(k.role, c.call), ', ') from calls c cross join kinds k where k.kind = '' or strpos(c.may, k.kind) = 0),
          '42501', 'a role without the right gets that error, and nothing else');
select is(pg_temp.as_role('pgdefer_tap_both', 'select queue.defer(''t''), (select count(*) from queue.jobs)'), 'ok', 'two kinds add up');
select is(pg_temp.as_role('pgdefer_tap_both', 'select queue.fetch(1)'), '42501', 'to no more');

select is_empty($$
  select p.proname from pg_proc p
  where p.pronamespace = 'queue'::regnamespace and not starts_with(p.proname, '_') and p.prokind <> 'p' and not exists (select from calls c where c.call ~ format('queue\.%s\(', p.proname))
$$, 'no public function is left out above');
select is_empty($$
  select c.relname from pg_class c
  where c.relnamespace = 'queue'::regnamespace and c.relkind = 'v' and not exists (select from calls x where x.call ~ format('queue\.%s\M', c.relname))
$$, 'nor a view');
select is_empty($$
  select k.role, p.proname from kinds k cross join pg_proc p
  where p.pronamespace = 'queue'::regnamespace and has_function_privilege(k.role, p.oid, 'execute')
    and not (p.proname = 'work' and k.kind = 'w')  -- it can't be called in here
    and not exists (select from calls c where c.call ~ format('queue\.%s\(', p.proname) and k.kind <> '' and strpos(c.may, k.kind) > 0)
  union all
  select k.role, r.relname from kinds k cross join pg_class r
  where r.relnamespace = 'queue'::regnamespace and r.relkind = 'v' and has_table_privilege(k.role, r.oid, 'select')
    and not exists (select from calls c where c.call ~ format('queue\.%s\M', r.relname) and k.kind <> '' and strpos(c.may, k.kind) > 0)
$$, 'and no kind has more than is said above');

-- No kind has rights to an internal function or a table, and PUBLIC has none at all.
select is_empty($$
  select k.role, p.proname from kinds k cross join pg_proc p
  where p.pronamespace = 'queue'::regnamespace and starts_with(p.proname, '_') and has_function_privilege(k.role, p.oid, 'execute')
$$, 'no kind may call an internal function');
select is_empty($$
  select k.role, c.relname from kinds k cross join pg_class c
  where c.relnamespace = 'queue'::regnamespace and c.relkind in ('r', 'S', 'v')
    and (case c.relkind when 'S' then has_sequence_privilege(k.role, c.oid, 'usage, select, update')
           else has_table_privilege(k.role, c.oid, case c.relkind when 'r' then 'select, ' else '' end || 'insert, update, delete, truncate, references, trigger') end)
$$, 'nor touch a table or sequence, nor change a view');
select is_empty($$
  select p.oid::regprocedure::text from pg_proc p where p.pronamespace = 'queue'::regnamespace and has_function_privilege('pgdefer_tap_nobody', p.oid, 'execute')
  union all
  select c.oid::regclass::text from pg_class c
  where c.relnamespace = 'queue'::regnamespace
    and case c.relkind when 'S' then has_sequence_privilege('pgdefer_tap_nobody', c.oid, 'usage, select') when 'r' then has_table_privilege('pgdefer_tap_nobody', c.oid, 'select')
          when 'v' then has_table_privilege('pgdefer_tap_nobody', c.oid, 'select') else false end
  union all
  select 'queue' where has_schema_privilege('pgdefer_tap_nobody', 'queue', 'usage, create')
$$, 'PUBLIC can do nothing');
select is_empty($$select k.role from kinds k where has_schema_privilege(k.role, 'queue', 'create')$$, 'and nobody can put anything into the schema');

-- The roles that write to a table whose trigger defers need no right.
create trigger defers after insert on public.thing for each row execute function queue.defer_trigger('by trigger');
select is(pg_temp.as_role('pgdefer_tap_nobody', 'insert into public.thing values (1)'), 'ok', 'a role that may write to a table may fire its trigger');

-- Refusals
select is(test.refusal(call), '22023', call)
from (values ($$select queue.grant_access('pgdefer_tap_missing', 'worker')$$), ($$select queue.grant_access(null, 'worker')$$), ($$select queue.grant_access('', 'worker')$$),
             ($$select queue.grant_access('public', 'worker')$$), ($$select queue.grant_access('pgdefer_tap_nobody', 'god')$$), ($$select queue.grant_access('pgdefer_tap_nobody', null)$$),
             ($$select queue.revoke_access('pgdefer_tap_missing')$$), ($$select queue.revoke_access(null)$$)) v (call);
select is(pg_temp.as_role('pgdefer_tap_nobody', 'select queue.version()'), '42501', 'and nothing was granted');

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
  ($$select queue.finish_step(I, C, 'b', '1'), queue.finish_steps(I, C, '[{"name": "l", "value": 1}, {"name": "l#2"}]'), queue.emit(I, C, 's', '1'), queue.set_progress(I, C, 5, 'x')$$),
  ($$select queue.signal(I, 's'), queue.publish('e' || R), queue.fork(I, 'b')$$),
  ($$select queue.read_steps(I, C), queue.read_stream(I, 's')$$),
  ($$select queue.begin_step(I, C, 'b'), queue.begin_step(I, C, 'a', 'f')$$),
  ($$select queue.wait(I, C, 'w', 's', timeout => '1 min')$$),
  ($$select queue.fetch(W, null, 3)$$),
  ($$select queue.sleep(I, C, 'n', '2020-01-01')$$),
  ($$select queue.fetch(W, null, 3)$$),
  ($$select queue.retry_later(I, C)$$),
  ($$select queue.reap()$$),
  ($$select queue.tick()$$),
  ($$select queue.pause('evil'), queue.resume('evil'), queue.create_queue('evil 2'), queue.configure_queue('evil', '{"max_running": 3, "rate": {"limit": 5, "per": "1 s"}}')$$),
  ($$select queue.why(I), queue.peek(), queue.check()$$),
  ($$select count(*) from queue.jobs, queue.attempts, queue.queues, queue.workers, queue.tasks$$),
  ($$select queue.cancel_children(I, true)$$),
  ($$select queue.cancel(I, true)$$),
  ($$select queue.next_runs('*/5 * * * MON', 'Europe/Paris'), queue.backoff('{"base": "1 s", "backoff": "exponential"}', 3), queue.version(), queue.prune()$$),
  ($$select queue.grant_access('pgdefer_tap_nobody', 'operator'), queue.revoke_access('pgdefer_tap_nobody')$$),
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
set role "pgdefer tap 'producer'";
reset role;
grant create on schema public to "pgdefer tap 'producer'";
set role "pgdefer tap 'producer'";
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
select is(pg_temp.as_role('pgdefer tap ''producer''', $$insert into public.trap values ('x')$$), '22023', 'a cast to json of a user is refused');
select is(pg_temp.as_role('pgdefer tap ''producer''', $$insert into public.trap2 values (array['x'::public.bait])$$), '22023', 'inside an array of a domain too');
select is(pg_temp.as_role('pgdefer tap ''producer''', $$insert into public.trap3 values (row (array['x'::public.bait]))$$), '22023', 'inside a row too');
alter function public.to_json(public.bait) owner to current_user;
create or replace function public.to_json(b public.bait) returns json language sql as $$ select '"trusted"'::json $$;
insert into public.trap values ('x');
select is((select j.args::text from queue.jobs j where j.task = 'trap'), '{"b": "trusted"}', 'one of a superuser is called');
create type public.colour as enum ('red');
create table public.harmless (c public.colour, r int4range);
create trigger t after insert on public.harmless for each row execute function queue.defer_trigger('harmless');
insert into public.harmless values ('red', '[1,2)');
select is((select j.args from queue.jobs j where j.task = 'harmless'), '{"c": "red", "r": "[1,2)"}', 'types of users without casts are plain');

-- Revoking
select queue.revoke_access(k.role) from kinds k where k.kind <> '';
select queue.revoke_access('pgdefer_tap_both');
select is((select string_agg(distinct pg_temp.as_role(k.role, c.call), ', ') from calls c cross join kinds k), '42501', 'revoke_access revokes everything');
drop table public.trap, public.trap2, public.trap3 cascade;
drop function public.to_json cascade;
drop domain public.baited cascade;
drop type public.bait cascade;
revoke all on schema public from "pgdefer tap 'producer'";
select lives_ok($$drop role "pgdefer tap 'producer'", pgdefer_tap_worker, pgdefer_tap_operator, pgdefer_tap_reader, pgdefer_tap_both, pgdefer_tap_nobody$$, 'so that the roles can be dropped');

select * from finish();
