-- The audit: each function that an operator may call writes one row, and nobody can remove one.

select plan(109);

create role pgdefer_audit_worker;
create role pgdefer_audit_operator;
create role pgdefer_audit_producer;
create role pgdefer_audit_shop;
create role pgdefer_audit_none;
select queue.grant_access('pgdefer_audit_worker', 'worker'), queue.grant_access('pgdefer_audit_operator', 'operator'),
  queue.grant_access('pgdefer_audit_producer', 'producer') \g /dev/null

-- The audited calls of a call by a role. Its effects are undone.
create function pg_temp.written(p_role text, p_call text) returns text language plpgsql as $$
declare
  v_last bigint := (select coalesce(max(a.id), 0) from queue.audit_log a);
  v_calls text;
begin
  begin
    if p_role <> '' then
      execute format('set local role %I', p_role);
    end if;
    execute p_call;
    set local role none;
    select coalesce(string_agg(a.call || case when a.role = coalesce(nullif(p_role, ''), current_user)
      and a.login = session_user then '' else ' by another' end, ' ' order by a.id), '') into v_calls
    from queue.audit_log a where a.id > v_last;
    raise exception using errcode = 'P0999';
  exception
    when sqlstate 'P0999' then return v_calls;
    when others then return sqlstate || ' ' || sqlerrm;
  end;
end $$;

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
-- A plain job is ended in fewer steps, and recorded all the same.
select current_setting('is_superuser') as is_superuser \gset
\if :is_superuser
select queue.defer('t', queue => 'hand') as plain, queue.defer('t', queue => 'hand'), queue.defer('t', queue => 'hand') \gset
select f.claim as plain_claim from queue.fetch(:worker, '{hand}') f \gset
set session authorization pgdefer_audit_operator;
select queue.succeed(f.id, f.claim) from queue.next('{hand}') f \g /dev/null
select queue.fail(f.id, f.claim, 'x') from queue.next('{hand}') f \g /dev/null
select queue.succeed(:plain, :plain_claim) \g /dev/null
reset session authorization;
select is((select string_agg(concat_ws(' ', a.role = 'pgdefer_audit_operator', a.role = a.login, a.call), ' ' order by a.id) from queue.audit a where a.role = 'pgdefer_audit_operator'),
  't t next t t succeed t t next t t fail t t succeed', 'a role that claims a job by hand and ends it');
\else
select skip(1, 'needs a superuser');
\endif

select queue.defer('t', queue => 'run') as id \gset
select f.claim from queue.fetch(:worker) f \gset
select queue.extend(:id, :claim, '1 day'), queue.finish_step(:id, :claim, 's') \g /dev/null
select queue.defer('t', '{"a": null}', queue => 'shop', priority => 3) as ready,
  queue.defer('t', queue => 'shop', scheduled_at => '2999-01-01Z') as later,
  queue.defer('t', queue => 'mail', options => '{"held": true}') as held, queue.defer('t', queue => 'shop') as ended \gset
select queue.fail_jobs(array[:ended]), queue.schedule('daily', '@daily', 't'), queue.register_task('t', '{"priority": 1}') \g /dev/null

-- Calls that change something, by each role that may: an operator, or only the owner.
create temp table calls (name text, call text);
select queue.open_group('audited') \g /dev/null
insert into calls values
  ('cancel', 'select queue.cancel(:ready)'),
  ('cancel', 'select queue.cancel(:id, abort => true)'),
  ('cancel_children', 'select queue.cancel_children(:id, abort => true)'),
  ('close_group', 'select queue.close_group(''audited'')'),
  ('configure', 'select queue.configure(''{"max_size": 200000}'')'),
  ('configure_key', 'select queue.configure_key(''k*'', ''{"limit": 2}'')'),
  ('configure_queue', 'select queue.configure_queue(''shop'', ''{"max_running": 3, "paused": true}'')'),
  ('configure_share', 'select queue.configure_share(''s'', ''{"weight": 2}'')'),
  ('copy', 'select queue.copy(:ready, ''other'')'),
  ('create_queue', 'select queue.create_queue(''new'', true)'),
  ('create_queue', 'select queue.create_queue(''new''), queue.delete_queue(''new'')'),
  ('delete', 'select queue.delete(array[:ready])'),
  ('delete_queue', 'select queue.delete_queue(''mail'', true)'),
  ('done', 'select queue.done(array[:ready, :id, :ended])'),
  ('enable_schedule', 'select queue.enable_schedule(''daily'', false)'),
  ('enable_schedule', 'select queue.enable_schedule(''daily'')'),
  ('extend', 'select queue.extend(:id, :claim, ''1 min'')'),
  ('fail', 'select queue.fail(:id, :claim, ''x'')'),
  ('fail_jobs', 'select queue.fail_jobs(array[:ready, :id])'),
  ('fork', 'select queue.fork(:id, ''s'')'),
  ('grant_access', 'select queue.grant_access(''pgdefer_audit_none'', ''reader'')'),
  ('hold', 'select queue.hold(:ready)'),
  ('move', 'select queue.move(array[:ready], ''other'')'),
  ('next', 'select queue.next()'),
  ('next', 'select queue.next(ack => true)'),
  ('pause', 'select queue.pause(''shop'')'),
  ('pause', 'select queue.pause(task => ''t'')'),
  ('prune', 'select queue.prune(10, ''failed'', ''0'')'),
  ('publish', 'select queue.publish(''e'')'),
  ('reap', 'select queue.reap()'),
  ('register_task', 'select queue.register_task(''t'', ''{"priority": 2}'')'),
  ('release', 'select queue.release(:id, :claim)'),
  ('reschedule', 'select queue.reschedule(:later)'),
  ('resume', 'select queue.resume(''shop'')'),
  ('retry', 'select queue.retry(array[:ended])'),
  ('retry', 'select queue.retry(array[:ready])'),
  ('retry', 'select queue.retry(array[:ended], changes => ''{"queue": "other", "lock": "l"}'')'),
  ('retry_failed', 'select queue.retry_failed()'),
  ('retry_later', 'select queue.retry_later(:id, :claim)'),
  ('revoke_access', 'select queue.revoke_access(''pgdefer_audit_producer'')'),
  ('run_now', 'select queue.run_now(''daily'')'),
  ('schedule', 'select queue.schedule(''daily'', ''@hourly'', ''t'')'),
  ('signal', 'select queue.signal(:ready, ''s'')'),
  ('set_args', 'select queue.set_args(:ready, ''{"b": 1}'')'),
  ('set_deadline', 'select queue.set_deadline(array[:ready, :ended], now())'),
  ('set_priority', 'select queue.set_priority(array[:ready, :ended], 9)'),
  ('succeed', 'select queue.succeed(:id, :claim)'),
  ('tick', 'select queue.tick()'),
  ('unblock', 'select queue.unblock()'),
  ('unhold', 'select queue.unhold(:held)'),
  ('unschedule', 'select queue.unschedule(''daily'')');
update calls set call = replace(replace(replace(replace(replace(replace(call, ':id', :'id'), ':claim', :'claim'), ':ready', :'ready'), ':later', :'later'), ':held', :'held'), ':ended', :'ended');
select is(pg_temp.written(case when has_function_privilege('pgdefer_audit_operator', p.oid, 'execute') then 'pgdefer_audit_operator' else '' end, c.call),
  case when c.call ~ 'delete_queue.*create_queue|create_queue.*delete_queue' then 'create_queue delete_queue' else c.name end, c.call)
from calls c join pg_proc p on p.pronamespace = 'queue'::regnamespace and p.proname = c.name order by c.name, c.call;

-- The catalog: a new function must be listed above, or here with the reason why it changes nothing.
select is_empty($$
  select p.proname from pg_proc p
  where p.pronamespace = 'queue'::regnamespace and p.provolatile = 'v' and not starts_with(p.proname, '_')
    and (has_function_privilege('pgdefer_audit_operator', p.oid, 'execute')
      or not exists (select from queue._function_grants() g where g.name = p.proname))
    and p.proname not in (select c.name from calls c)
    and p.proname <> all ('{install,migrate,uninstall}'::text[])  -- the table queue.installation tells
    and p.proname <> all ('{attempt_outcome,backoff,rehearse}'::text[])  -- reads; draws a number; its transaction can't be committed
$$, 'every function that may change something, and that an operator or only the owner may call, writes one row');

-- A call that asks for what is so already succeeds, changes nothing and is noted, with how it was before.
select is(pg_temp.written('pgdefer_audit_operator', format('select queue.hold(%s)', :held)), 'hold', 'a held job is held');
select is(pg_temp.written('pgdefer_audit_operator', 'select queue.pause(''shop''), queue.pause(''shop'')'), 'pause pause', 'a paused queue paused');
select is(pg_temp.written('pgdefer_audit_operator', format('select queue.cancel(%s, true), queue.cancel(%1$s, true)', :id)), 'cancel cancel', 'a job that is being aborted cancelled');
begin;
select queue.hold(:held) as again, (select to_jsonb(j) from queue.jobs j where j.id = :held) as was \gset
select is((select concat_ws(' ', :'again', to_jsonb(j) = :'was', a.before) from queue.jobs j, queue.audit a where j.id = :held order by a.id desc limit 1),
  'held t [{"queue": "mail", "state": "held"}]', 'and the entry says that it was so');
rollback;

-- Workers and producers write none, nor does the owner in the role of a worker.
select is(pg_temp.written('pgdefer_audit_worker', format(c.call, :worker, :id, :claim)), '', 'a worker: ' || c.call)
from unnest(array['select queue.fetch(%s)', 'select queue.heartbeat(%s)', 'select queue.tick(), queue.reap()',
  'select queue.succeed(%2$s, %3$s)', 'select queue.fail(%2$s, %3$s, ''x'')', 'select queue.release(%2$s, %3$s)',
  'select queue.retry_later(%2$s, %3$s)', 'select queue.extend(%2$s, %3$s, ''1 min'')',
  'select queue.finish_and_fetch(%s, ''[{"id": %2$s, "claim": %3$s, "outcome": "succeeded"}]'')',
  'select queue.schedule(''daily'', ''@daily'', ''t''), queue.register_task(''t'', ''{"priority": 1}''), queue.unschedule(''none'')']) c (call);
select is(pg_temp.written('pgdefer_audit_worker', $$select queue.schedule('daily', '@hourly', 't'), queue.register_task('t', '{}')$$),
  'schedule register_task', 'but what it changes of schedules and tasks is noted');
select is(pg_temp.written('pgdefer_audit_producer', $$select queue.defer('t'), queue.defer_many('[{"task": "t"}]')$$), '', 'a producer');
select is(pg_temp.written('', format('select queue.succeed(%s, %s)', :id, :claim)), '', 'the owner may be the worker');
select is(pg_temp.written('', format('select queue.signal(%s, ''s''), queue.publish(''e'')', :ready)), '', 'or send signals');
select is(pg_temp.written('pgdefer_audit_operator', 'select queue.publish(''e''), queue.publish(''e'')'), 'publish publish', 'a publish of an event that is there leaves a row too');
select is(pg_temp.written('pgdefer_audit_operator', $$select queue.configure('{}')$$), '', 'settings that are read');
select is(pg_temp.written('pgdefer_audit_operator', $$select queue.next(array['nothing'])$$), '', 'a next that finds nothing');
select matches(pg_temp.written('pgdefer_audit_operator', $$select queue.cancel(1000000)$$), '^QJ001', 'a call that raises');
select is((select count(*) from queue.audit a where a.call = 'cancel'), 0::bigint, 'leaves nothing');

-- The contents of a row
create function pg_temp.last() returns text language sql as $$
  select concat_ws(' ', a.call, replace(a.args::text, '"', ''), cardinality(a.ids), coalesce(a.queues::text, 'all'), replace(a.before::text, '"', ''))
  from queue.audit a order by a.id desc limit 1
$$;
select queue.set_args(:ready, '{"b": null}') \g /dev/null
select is(pg_temp.last(), 'set_args {args: {b: null}} 1 {shop} [{args: {a: null}, task: t, queue: shop, state: ready}]', 'the args before, with their nulls');
select queue.set_priority(array[:ready, :ended], 9) \g /dev/null
select is(pg_temp.last(), format('set_priority {priority: 9} 2 {shop} [{ids: [%s], queue: shop, state: ready, priority: 3}, {ids: [%s], queue: shop, state: failed, priority: 0}]', :ready, :ended), 'each as it was');
select queue.set_deadline(array[:ready], '2999-01-01Z'), queue.set_deadline(array[:ready, :ended], null) \g /dev/null
select matches(pg_temp.last(), 'set_deadline {} 2 {shop} .*deadline: 2999-01-01T', 'the deadline before');
select queue.configure_share('s*', '{"weight": 2}'), queue.configure_share('s*', '{"weight": null}') \g /dev/null
select is(pg_temp.last(), 'configure_share {options: {weight: null}, pattern: s*} all {weight: 2}', 'a weight');
select queue.configure_key('k*', '{"limit": 2, "rate": {"limit": 3, "per": "1 min"}}'), queue.configure_key('k*', '{"rate": null}') \g /dev/null
select is(pg_temp.last(), 'configure_key {options: {rate: null}, pattern: k*} all {limit: 2, rate_per: 00:01:00, rate_limit: 3}', 'a key');
select queue.move(array[:later, :id], 'other') \g /dev/null
select is(pg_temp.last(), 'move {force: false, queue: other} 1 {other,shop} [{queue: shop, state: scheduled}]', 'the changed values, and both queues');
select queue.move(array[:id], 'other') \g /dev/null
select is(pg_temp.last(), 'move {force: false, queue: other} 0 {other}', 'also where all were refused');
select queue.reschedule(:later, '2998-01-01Z') \g /dev/null
select matches(pg_temp.last(), 'scheduled_at: 2999-01-01T', 'the time before');
select queue.delete(array[:ready]) \g /dev/null
select is(pg_temp.last(), 'delete {force: false} 1 {shop} [{task: t, queue: shop, state: ready}]', 'the deleted jobs');
select queue.pause('shop'), queue.pause('shop', until => '2999-01-01Z') \g /dev/null
select matches(pg_temp.last(), '^pause {queue: shop, until: 2999-\S+} {shop} \[{queue: shop, paused: true}]$', 'the pause before');
select queue.configure_queue('shop', '{"max_running": 3}'), queue.resume('shop'), queue.configure_queue('shop', '{"max_running": null}') \g /dev/null
select is(pg_temp.last(), 'configure_queue {name: shop, options: {max_running: null}} {shop} {max_running: 3}', 'the previous settings, also of a removed limit');
select queue.configure('{"max_size": 200000}') \g /dev/null
select is(pg_temp.last(), 'configure {max_size: 200000} all {max_size: 16777216, unknown_task_grace: 00:10:00}', 'of the whole queue');
select queue.schedule('daily', '@hourly', 'u') \g /dev/null
select is(pg_temp.last(), 'schedule {args: {}, cron: @hourly, name: daily, task: u, options: {}, timezone: UTC} all {args: {}, cron: @daily, task: t, enabled: true, options: {}, timezone: UTC}', 'a schedule');
select queue.unschedule('daily') \g /dev/null
select is(pg_temp.last(), 'unschedule {name: daily} all {args: {}, cron: @hourly, task: u, enabled: true, options: {}, timezone: UTC}', 'that goes');
select queue.register_task('t', '{"priority": 4}') \g /dev/null
select is(pg_temp.last(), 'register_task {name: t, defaults: {priority: 4}} all {priority: 1}', 'a task');
select queue.grant_access('pgdefer_audit_shop', 'reader', '{shop*}'), queue.grant_access('pgdefer_audit_shop', 'operator', '{shop*}') \g /dev/null
select is(pg_temp.last(), 'grant_access {kind: operator, role: pgdefer_audit_shop, queues: [shop*]} all {reader: [shop*]}', 'access');

-- Many ids: one small row.
create temp table many as select d.id from queue.defer_many((select jsonb_agg('{"task": "t", "queue": "shop2"}'::jsonb) from generate_series(1, 1000))) d (id);
select count(*) from (select queue.hold(m.id) from many m limit 3) h \g /dev/null
select count(*) from queue.fail_jobs(array(select m.id from many m)) \g /dev/null
select is((select format('%s %s %s', a.call, cardinality(a.ids), jsonb_path_query_array(a.before, '$[*].state')) from queue.audit a order by a.id desc limit 1),
  'fail_jobs 1000 ["held", "ready"]', 'a thousand jobs, in one row');
select count(*) from queue.retry(array(select m.id from many m)) \g /dev/null
select is((select a.before::text from queue.audit a order by a.id desc limit 1), '[{"queue": "shop2", "state": "failed"}]', 'that were all alike');
select cmp_ok((select pg_column_size(a) from queue.audit_log a order by a.id desc limit 1), '<', 8500, 'takes little more than their ids');

-- Who may read it, and who may change it
create function pg_temp.seen(role text) returns text language plpgsql as $$
declare
  v_seen text;
begin
  execute format('set local role %I', role);
  select string_agg(distinct q, ' ' order by q) into v_seen from queue.audit a, unnest(case when a.queues is null then '{all}' when a.queues = '{}' then '{none}' else a.queues end) q;
  set local role none;
  return v_seen;
end $$;
begin;
select queue.grant_access('pgdefer_audit_none', 'reader'), queue.set_priority('{999999}', 1) \g /dev/null
select is(pg_temp.seen('pgdefer_audit_shop'), 'shop shop2', 'a restricted role: only calls on its queues');
select is(pg_temp.seen('pgdefer_audit_none'), case when :'is_superuser' = 'on' then 'all hand none other shop shop2' else 'all none other shop shop2' end, 'others: all');
rollback;
select is(pg_temp.written('pgdefer_audit_shop', $$select queue.pause('shop2'), queue.pause('shop*')$$), 'pause pause', 'it is audited like others');
select matches(pg_temp.written('pgdefer_audit_operator', c.call), '^42501', c.call)
from unnest(array['delete from queue.audit_log', 'update queue.audit_log set role = ''x''', 'truncate queue.audit_log',
  $$select queue.prune(10, 'audit', '0')$$]) c (call);
select is(pg_temp.written('', $$select queue.prune(10, 'audit')$$), '22023 the audit is pruned by age only', 'not without an age');
select is(queue.prune(10, 'audit', '1 hour'), 0, 'younger rows stay');
update queue.audit_log a set at = a.at - interval '1 day' where a.id in (select l.id from queue.audit_log l order by l.id limit 12);
select is(queue.prune(10, 'audit', '1 hour'), 10, 'at most so many');
select is(queue.prune(10, 'audit', '1 hour'), 2, 'the owner may, by age');
select is(pg_temp.last(), 'prune {state: audit, max_jobs: 10, older_than: 01:00:00} all {pruned: 2}', 'and that is audited');
select queue.prune(), (select count(*) from queue.tick()) \g /dev/null
select cmp_ok((select count(*) from queue.audit), '>', 15::bigint, 'nothing else removes any');
select is_empty('select * from queue.check()', 'check finds nothing');
select * from finish();
drop owned by pgdefer_audit_worker, pgdefer_audit_operator, pgdefer_audit_producer, pgdefer_audit_shop, pgdefer_audit_none;
drop role pgdefer_audit_worker, pgdefer_audit_operator, pgdefer_audit_producer, pgdefer_audit_shop, pgdefer_audit_none;
