-- Privileges: the rights of each kind of role.

select plan(183);

\ir permissions.helpers.psql

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
  ('select queue.check_triggers()', 'p'),
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
  ('select queue.attempt_outcome(:id, :claim)', 'wo'),
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
  ('select count(*) from queue.unsettled', ''),
  ('select count(*) from queue.unfinished', ''),
  ('select count(*) from queue.job_now', ''),
  ('select count(*) from queue.need_now', ''),
  ('select count(*) from queue.cursor_now', ''),
  ('select count(*) from queue.claimed_job', ''),
  ('select count(*) from queue.first_run', ''),
  ('select count(*) from queue.unrestricted', ''),
  ('select count(*) from queue.visible_queues', ''),
  ('select count(*) from queue.hidden_paths', ''),
  ('select count(*) from queue.all_jobs', ''),
  ('select queue.defer_group(''[]'', ''{"task": "t"}'')', 'p'),
  ('select queue.defer_chain(''[{"task": "t"}]'')', 'p'),
  ('select queue.result(:id)', 'pwor'),
  ('select queue.needs(:id)', 'wor'),
  ('select queue.await_result(:id)', 'pw'),
  ('select queue.claims(:worker)', 'w'),
  ('select queue.is_busy(0)', 'w'),
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
  ('select queue.list_jobs()', 'or'),
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
  ('select queue.fail_step(:id, :claim, ''failed'', ''x'')', 'w'),
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
  ('select queue.streams(:id)', 'pwor'),
  ('select queue.waits_for(:id)', 'or'),
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
  ('update queue.task set name = ''x''', ''),
  ('select from queue.admission for update', ''),
  ('lock table queue.admission', ''),
  ('truncate queue.log', ''),
  ('delete from queue.audit_log', ''),
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
select is((select string_agg(distinct pg_temp.as_role(k.role, c.call), ', ') from kinds k cross join unnest('{update queue.tasks set name = $$x$$,delete from queue.audit}'::text[]) c (call) where k.kind = 'o'),
          '55000', 'not even operators write through a view');
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

-- A restricted role that gets another name: it sees nothing, also once its old name is cleaned up.
create role pgdefer_tap_old;
select queue.grant_access('pgdefer_tap_old', 'reader', '{a}');
alter role pgdefer_tap_old rename to pgdefer_tap_new;
select queue.revoke_access('pgdefer_tap_old');
select is(pg_temp.as_role('pgdefer_tap_new', 'select from queue.jobs'), '42501', 'a role that was renamed does not lose its restriction but its rights');
select is(pg_temp.as_role('pgdefer_tap_reader', 'select from queue.jobs'), 'ok', 'unlike those with other rights');
select queue.grant_access('pgdefer_tap_new', 'reader', '{a}');
select is(pg_temp.as_role('pgdefer_tap_new', 'select from queue.jobs'), 'ok', 'which it can get again');
alter role pgdefer_tap_new rename to pgdefer_tap_newer;
create role pgdefer_tap_new;
select queue.grant_access('pgdefer_tap_new', 'reader');
select is(pg_temp.as_role('pgdefer_tap_newer', 'select from queue.jobs'), '42501', 'also if another role gets its old name, and rights');
select queue.revoke_access('pgdefer_tap_new');
drop role pgdefer_tap_new, pgdefer_tap_newer;

-- The owner keeps its own rights, whatever is granted to it, and revoked.
create view owner_lacks as
select p.proname as name from pg_proc p
where p.pronamespace = 'queue'::regnamespace and not exists (select from aclexplode(p.proacl) x where x.grantee = p.proowner)
union all
select c.relname from pg_class c
where c.relnamespace = 'queue'::regnamespace and c.relkind = 'v' and c.relacl is not null and not exists (select from aclexplode(c.relacl) x where x.grantee = c.relowner)
union all
select n.nspname from pg_namespace n
where n.nspname = 'queue' and not exists (select from aclexplode(n.nspacl) x where x.grantee = n.nspowner and x.privilege_type = 'USAGE');
create temp table before_owner as select name from owner_lacks;
select queue.grant_access(pg_get_userbyid(n.nspowner), 'operator', '{a}') from pg_namespace n where n.nspname = 'queue';
select bag_eq('select name from owner_lacks', 'select name from before_owner', 'a restriction of the owner takes nothing from it');
select queue.revoke_access(pg_get_userbyid(n.nspowner)) from pg_namespace n where n.nspname = 'queue';
select bag_eq('select name from owner_lacks', 'select name from before_owner', 'nor does an end of its access');

-- Revoking
select queue.revoke_access(k.role) from kinds k where k.kind <> '';
select queue.revoke_access('pgdefer_tap_both');
select is((select string_agg(distinct pg_temp.as_role(k.role, c.call), ', ') from calls c cross join kinds k), '42501', 'revoke_access revokes everything');
select lives_ok($$drop role "pgdefer tap 'producer'", pgdefer_tap_worker, pgdefer_tap_operator, pgdefer_tap_reader, pgdefer_tap_both, pgdefer_tap_nobody$$, 'so that the roles can be dropped');

-- Default privileges
create role pgdefer_tap_default;
select n.nspowner::regrole as owner from pg_namespace n where n.nspname = 'queue' \gset
alter default privileges for role :owner grant select on tables to pgdefer_tap_default;
select test.install_anew() \g /dev/null
select ok(not has_table_privilege('pgdefer_tap_default', 'queue.log', 'select'), 'default privileges give no right to new tables');
alter default privileges for role :owner revoke select on tables from pgdefer_tap_default;
drop role pgdefer_tap_default;

-- A restore without privileges: PUBLIC may call every function, and only the schema is closed to it.
create view public_may_call as
select p.oid::regprocedure from pg_proc p
cross join lateral aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
where p.pronamespace = 'queue'::regnamespace and a.grantee = 0;
create role pgdefer_tap_restored;
grant execute on all routines in schema queue to public;
select queue.install() \g /dev/null
select is_empty('select * from public_may_call', 'install leaves PUBLIC no function');
grant execute on all routines in schema queue to public;
select queue.grant_access('pgdefer_tap_restored', 'producer');
select is(pg_temp.as_role('pgdefer_tap_restored', 'select queue.cancel(1)'), '42501', 'nor does a role get more than its kind');
select is_empty('select * from public_may_call', 'as grant_access revokes it too');
select queue.revoke_access('pgdefer_tap_restored');
drop role pgdefer_tap_restored;

select * from finish();
