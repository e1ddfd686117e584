-- Groups: their counts, and their callbacks, each deferred once, when its time has come.

select plan(65);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- Two admissions close a group, the next defers a callback, and one more admits it.
\set settle 'do $x$ begin perform queue.tick(); end $x$; do $x$ begin perform queue.tick(); end $x$; do $x$ begin perform queue.tick(); end $x$; do $x$ begin perform queue.tick(); end $x$;'

-- State, jobs, unfinished, succeeded, failed, cancelled; then the callbacks that were deferred.
create function pg_temp.grp(name text) returns text language sql as $$
  select concat_ws(' ', g.state, g.jobs, g.unfinished, g.succeeded, g.failed, g.cancelled)
    || coalesce(': ' || nullif(concat_ws(' ', (select j.task from queue.jobs j where j.id = g.on_end_id),
      (select j.task from queue.jobs j where j.id = g.on_success_id),
      (select j.task from queue.jobs j where j.id = g.on_failure_id)), ''), '')
  from queue.groups g where g.name = grp.name
$$;

create function pg_temp.opened(name text) returns boolean language sql as $$
  select queue.open_group(name, '{"task": "end"}', '{"task": "success"}', '{"task": "failure"}')
$$;

create function pg_temp.add(name text, n integer default 1, options jsonb default '{}') returns void language sql as $$
  select from queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'member', 'options', jsonb_build_object('group', name) || options)) from generate_series(1, n)))
$$;

-- Ends n claims of the group's jobs with an outcome.
create function pg_temp.finish(outcome text, n integer default 1) returns void language sql as $$
  select from queue.finish_many((select coalesce(jsonb_agg(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', finish.outcome)), '[]')
    from queue.fetch((select max(id) from queue.workers), null, n, '{"tasks": ["member"]}') f))
$$;

create function pg_temp.callbacks() returns text[] language sql as $$
  select coalesce(array_agg(j.task order by j.id), '{}') from queue.jobs j where j.task in ('end', 'success', 'failure')
$$;

-- All succeed
select ok(pg_temp.opened('a'), 'a group is opened');
select is(pg_temp.grp('a'), 'open 0 0 0 0 0', 'it has no jobs');
select pg_temp.add('a', 2) \g /dev/null
:settle
select is(pg_temp.grp('a'), 'open 2 2 0 0 0', 'jobs join it when they are admitted');
select is((select flags from queue.active_job limit 1)::integer, 4096, 'their end will be handed over');
select pg_temp.finish('succeeded', 2) \g /dev/null
:settle
select is(pg_temp.grp('a'), 'open 2 0 2 0 0', 'all have ended, but more may come');
select is(pg_temp.callbacks(), '{}', 'so nothing follows');
select pg_temp.add('a') \g /dev/null
select ok(queue.close_group('a'), 'it is closed');
select is((select state from queue.groups where name = 'a'), 'closing', 'which admission sees later');
:settle
select is(pg_temp.grp('a'), 'closed 3 1 2 0 0', 'a job is unfinished');
select is_empty('select * from queue.check()', 'all is sound');
select pg_temp.finish('succeeded') \g /dev/null
:settle
select is(pg_temp.grp('a'), 'ended 3 0 3 0 0: end success', 'the last end calls back');
select isnt((select ended_at from queue.groups where name = 'a'), null, 'and is recorded');
select is(pg_temp.callbacks(), '{end,success}', 'once each');
:settle
select ok(not queue.close_group('a'), 'it can be closed again, without effect');
:settle
select is(pg_temp.callbacks(), '{end,success}', 'nothing is deferred twice');
select is_empty('select * from queue.check()', 'all is sound');

-- Failures, and retries
select pg_temp.opened('b'), pg_temp.add('b', 3) \g /dev/null
select pg_temp.finish('failed') \g /dev/null
:settle
select is(pg_temp.grp('b'), 'open 3 2 0 1 0: failure', 'the first failure calls back, in an open group too');
select pg_temp.finish('failed') \g /dev/null
:settle
select is(pg_temp.callbacks(), '{end,success,failure}', 'the second does not');
select queue.close_group('b') \g /dev/null
:settle
select pg_temp.finish('succeeded') \g /dev/null
:settle
select is(pg_temp.grp('b'), 'ended 3 0 1 2 0: end failure', 'a group with failures ends without success');
select queue.retry(array(select id from queue.jobs where task = 'member' and state = 'failed')) \g /dev/null
:settle
select is(pg_temp.grp('b'), 'closed 3 2 1 0 0: end failure', 'retried jobs are unfinished again');
select is((select ended_at from queue.groups where name = 'b'), null, 'and so is the group');
select is_empty('select * from queue.check()', 'all is sound');
select pg_temp.finish('succeeded', 2) \g /dev/null
:settle
select is(pg_temp.grp('b'), 'ended 3 0 3 0 0: end success failure', 'once all have succeeded, that calls back too');
select is(pg_temp.callbacks(), '{end,success,failure,end,success}', 'and the others not again');

-- A job that fails for now has not failed
select pg_temp.opened('retries') \g /dev/null
select queue.defer('member', options => '{"group": "retries", "retry": {"max_attempts": 2, "base": 0}}') \g /dev/null
select queue.close_group('retries') \g /dev/null
:settle
select pg_temp.finish('failed') \g /dev/null
:settle
select is(pg_temp.grp('retries'), 'closed 1 1 0 0 0', 'a job that will be retried has not failed');
select pg_temp.finish('released') \g /dev/null
select pg_temp.finish('retry_later') \g /dev/null
:settle
select is(pg_temp.grp('retries'), 'closed 1 1 0 0 0', 'nor one that was released, or yields');
select pg_temp.finish('succeeded') \g /dev/null
:settle
select is(pg_temp.grp('retries'), 'ended 1 0 1 0 0: end success', 'its last outcome counts');

-- Without jobs, or callbacks
select pg_temp.opened('empty'), queue.close_group('empty') \g /dev/null
:settle
select is(pg_temp.grp('empty'), 'ended 0 0 0 0 0: end success', 'a group without jobs ends when it is closed');
select queue.open_group('plain'), pg_temp.add('plain', 2), queue.close_group('plain') \g /dev/null
:settle
select pg_temp.finish('failed'), pg_temp.finish('succeeded') \g /dev/null
:settle
select is(pg_temp.grp('plain'), 'ended 2 0 1 1 0', 'one without callbacks counts');
select is((select count(*) from queue.pending_settlement), 0::bigint, 'and nothing is left to settle');

-- Other ends
select pg_temp.opened('ends') \g /dev/null
select pg_temp.add('ends', 7) \g /dev/null
select pg_temp.add('ends', options => '{"expires_at": "2000-01-01 00:00+00"}') \g /dev/null
:settle
select is(pg_temp.grp('ends'), 'open 8 7 0 0 1: failure', 'a job that expires is cancelled, which is a failure');
select array(select id from queue.jobs where task = 'member' and state = 'ready' order by id) as ids \gset
select queue.cancel((:'ids'::bigint[])[1]) \g /dev/null
select queue.fail_jobs((:'ids'::bigint[])[2:2]) \g /dev/null
select queue.done((:'ids'::bigint[])[3:3]) \g /dev/null
select is(pg_temp.grp('ends'), 'open 8 4 1 1 2: failure', 'operators end jobs: cancelled, failed and done');
select queue.done((:'ids'::bigint[])[2:2]) \g /dev/null
select is(pg_temp.grp('ends'), 'open 8 4 2 0 2: failure', 'and change how one has ended');
select queue.delete((:'ids'::bigint[])[4:4]) \g /dev/null
select is(pg_temp.grp('ends'), 'open 8 3 2 0 3: failure', 'an unfinished job that is deleted was cancelled');
select queue.delete((:'ids'::bigint[])[1:1]) \g /dev/null
select is(pg_temp.grp('ends'), 'open 8 3 2 0 3: failure', 'a finished one counts as it ended');
select queue.hold((:'ids'::bigint[])[5]) \g /dev/null
select id, claim from queue.fetch(:worker, null, 1, '{"tasks": ["member"]}') \gset
select queue.delete(array[:id], force => true) \g /dev/null
select is(pg_temp.grp('ends'), 'open 8 2 2 0 4: failure', 'so does a running one that is deleted by force');
select queue.close_group('ends'), queue.copy((:'ids'::bigint[])[5]) \g /dev/null
:settle
select is(pg_temp.grp('ends'), 'closed 8 2 2 0 4: failure', 'a held job is waited for; a copy is in no group');
select is_empty('select * from queue.check()', 'all is sound');
select queue.cancel((:'ids'::bigint[])[5]) \g /dev/null
select pg_temp.finish('aborted') \g /dev/null
:settle
select is(pg_temp.grp('ends'), 'ended 8 0 2 0 6: end failure', 'the last job is cancelled, and the group has ended');
select queue.delete(array(select id from queue.jobs where task = 'member' and state = 'held')) \g /dev/null

-- With the gates
select pg_temp.opened('gates') \g /dev/null
select queue.defer('member', lock => 'l', options => '{"group": "gates"}') as first \gset
select queue.defer('member', lock => 'l', concurrency_key => 'k', concurrency_limit => 1, needs => array[:first], options => '{"group": "gates"}') \g /dev/null
select queue.defer('member', lock => 'm', scheduled_at => now() - interval '1 s', options => '{"group": "gates", "lock_mode": "mutex"}') \g /dev/null
select queue.defer('member', concurrency_key => 'k', concurrency_limit => 1, options => '{"group": "gates"}') \g /dev/null
select queue.defer('member', priority => 9, options => '{"group": "gates", "timeout": "1 min", "share": "s"}') \g /dev/null
select queue.close_group('gates') \g /dev/null
:settle
select is(pg_temp.grp('gates'), 'closed 5 5 0 0 0', 'jobs with locks, keys, needs, a time or a share join too');
select is_empty('select * from queue.check()', 'all is sound');
select pg_temp.finish('succeeded', 5) \g /dev/null
select pg_temp.finish('succeeded', 5) \g /dev/null
select pg_temp.finish('succeeded', 5) \g /dev/null
:settle
select is(pg_temp.grp('gates'), 'ended 5 0 5 0 0: end success', 'and are counted');

-- By one job at a time, in the handler's transaction
select pg_temp.opened('single'), pg_temp.add('single', 2), queue.close_group('single') \g /dev/null
:settle
select id, claim from queue.fetch(:worker, null, 1, '{"tasks": ["member"]}') \gset
select queue.succeed(:id, :claim) \g /dev/null
:settle
select is(pg_temp.grp('single'), 'closed 2 1 1 0 0', 'succeed hands the end over');
select id, claim from queue.fetch(:worker, null, 1, '{"tasks": ["member"]}') \gset
select queue.fail(:id, :claim, 'e') \g /dev/null
:settle
select is(pg_temp.grp('single'), 'ended 2 0 1 1 0: end failure', 'and so does fail');

-- The first job of an idle worker is not claimed before it has joined
select queue.fetch(:worker), queue.fetch(:worker) \g /dev/null
select queue.fetch(:worker, null, 50) \g /dev/null
select queue.fetch(:worker) \g /dev/null
select queue.open_group('newcomer') \g /dev/null
select pg_temp.add('newcomer') \g /dev/null
select id from queue.fetch(:worker) \gset
select is(pg_temp.grp('newcomer'), 'open 1 1 0 0 0', 'a newcomer has joined when it runs');

-- Jobs that are committed, but not read yet
select pg_temp.opened('backlog'), pg_temp.add('backlog', 7), queue.close_group('backlog') \g /dev/null
select queue._admit(2) \g /dev/null
select queue._admit(2) \g /dev/null
select is((select state from queue.groups where name = 'backlog'), 'closing', 'a group is not closed while there is a backlog');
:settle
select is(pg_temp.grp('backlog'), 'closed 7 7 0 0 0', 'its jobs may be there');
-- Many small ranges, and a slow machine: the parts that were scanned have been read, others have not been scanned.
select pg_get_functiondef('queue._scan_backlog'::regproc) as scan \gset
create or replace function queue._scan_backlog(p_slice integer) returns void language sql as 'select';
select pg_temp.opened('unscanned'), pg_temp.add('unscanned', 3), queue.close_group('unscanned') \g /dev/null
select queue._admit(2) \g /dev/null
select queue._admit(2) \g /dev/null
select queue._admit(2) \g /dev/null
select is((select state || ' ' || jobs from queue.groups where name = 'unscanned'), 'closing 2', 'nor while a part of it has not been scanned');
:scan;
:settle
select is(pg_temp.grp('unscanned'), 'closed 3 3 0 0 0', 'so that no job is missing');
select queue.cancel(id) from queue.jobs where task = 'member' and state = 'ready' \g /dev/null

-- A transaction that has ended, and has not released its locks yet
select pg_get_functiondef('queue._adding_transactions'::regproc) as adding \gset
create temporary table ended as select pg_current_xact_id() as xid;
create or replace function queue._adding_transactions() returns table (xid xid8) language sql as 'select e.xid from pg_temp.ended e';
select pg_temp.opened('released'), queue.close_group('released') \g /dev/null
select queue._admit(100) \g /dev/null
select queue._admit(100) \g /dev/null
:adding;
select is(pg_temp.grp('released'), 'ended 0 0 0 0 0: end success', 'a group does not wait for a transaction that has ended');

-- A callback that can't be deferred
select pg_temp.opened('refused'), pg_temp.add('refused'), queue.close_group('refused') \g /dev/null
:settle
select queue.register_task('end', '{"lock": "{x}"}') \g /dev/null
select queue.finish_many((select jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'succeeded')) from queue.jobs j where j.state = 'running')) \g /dev/null
set client_min_messages = error;
select pg_temp.finish('succeeded') \g /dev/null
:settle
reset client_min_messages;
select is(pg_temp.grp('refused'), 'ended 1 0 1 0 0: success', 'a callback whose task has got other defaults may be refused; the others follow');
select alike((select error from queue.groups where name = 'refused'), 'on_end: %(22023)', 'the group says why');
select queue.register_task('end', '{"queueing_lock": "q", "idempotency_key": "i", "group": "a", "queue": "other"}') \g /dev/null
select queue.close_group('refused') \g /dev/null
:settle
select is(pg_temp.grp('refused'), 'ended 1 0 1 0 0: end success', 'closing it again tries again');
select results_eq($$select j.queueing_lock, j.idempotency_key, j.queue, g.error from queue.groups g join queue.jobs j on j.id = g.on_end_id where g.name = 'refused'$$,
                  $$values (null, null, 'other', null)$$, 'a callback takes its task''s defaults, but no key for which it would wait, and no group');

-- Retention
update queue.group_state set ended_at = now() - interval '8 days' where ended_at is not null;
select queue.prune() \g /dev/null
select is(array(select name from queue.groups order by name), '{a,b,backlog,ends,gates,newcomer,plain,refused,retries,single,unscanned}', 'a group is kept for as long as it has jobs');
select queue.delete(array(select id from queue.jobs where task = 'member' and state <> 'running' limit 1000)) \g /dev/null
select queue.prune() \g /dev/null
select is(array(select name from queue.groups), '{newcomer}', 'and while it is open');
select is((select count(*) from queue.group_close), 0::bigint, 'nothing else is left of it');
select ok(queue.open_group('a'), 'its name can be used again');
select is_empty('select * from queue.check()', 'all is sound');

-- Many groups at once: one look at the settlements for all of them, and 200 groups' callbacks in an admission
select count(queue.open_group('many ' || n, '{"task": "many"}')), count(queue.close_group('many ' || n)) from generate_series(1, 300) n \g /dev/null
select queue.tick() \g /dev/null
create temporary table looked (n bigint);
-- what follows counts, beside its own scans, those that this session has not yet reported
select from pg_stat_force_next_flush() \g /dev/null
do $$ begin
  perform queue._lock_admission(true), queue._admit(1000);
  insert into looked values (pg_stat_get_xact_numscans('queue.pending_settlement'::regclass)
    + pg_stat_get_xact_numscans('queue.pending_settlement_pkey'::regclass));
end $$;
select cmp_ok((select n from looked), '<', 100::bigint, 'an admission does not read the settlements for each group');
select is((select count(*) from queue.jobs where task = 'many'), 200::bigint, 'it defers the callbacks of 200 groups');
:settle
select is((select count(distinct on_end_id) from queue.groups where name like 'many %' and state = 'ended'), 300::bigint, 'and the next one the others');
select is_empty('select * from queue.check()', 'all is sound');

-- A transaction that adds jobs to a group may stay open for long
begin;
select pg_current_xact_id() as adding \gset
prepare transaction 'adding';
insert into queue.pending_settlement (job_id, kind, flags, xid) values (-1, 'group', 0, :'adding');
select clock_timestamp() as looked_at \gset
select cmp_ok(queue._next_due(), '>', :'looked_at'::timestamptz + interval '500 ms', 'workers do not poll for its end');
rollback prepared 'adding';
select queue.tick() \g /dev/null
select is_empty('select * from queue.check()', 'after its end nothing is left of that');
