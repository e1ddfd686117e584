-- Recurring runs: their jobs, changes, refusals, history, access.

select plan(94);

\ir schedules.helpers.psql

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- SQLSTATE and message of a call. Its effects are undone.
create function pg_temp.refusal(call text) returns text language plpgsql as $$
declare
  v_hint text;
begin
  execute call;
  raise exception 'accepted' using errcode = 'P0999';
exception when others then
  get stacked diagnostics v_hint = pg_exception_hint;
  return case sqlstate when 'P0999' then 'accepted' else concat(sqlstate, ' ', sqlerrm, case v_hint when '' then ' (no hint)' end) end;
end $$;

-- A schedule
select is(queue.schedule('plain', :'hourly', 'plain', '{"a": 1}', 'Europe/Paris', '{"queue": "reports", "priority": 3, "lock": null}'),
          last_run + interval '1 hour', 'schedule returns the next run') from clock;
select results_eq(
  $$select s.name collate "default", s.cron, s.timezone, s.task, s.args, s.options, s.enabled, s.next_run_at, s.last_run_at, s.last_job_id, s.reason, s.catch_up, s.max_delay, s.overlap, s.source
    from queue.schedules s$$,
  $$select 'plain'::text, c.hourly, 'Europe/Paris'::text, 'plain'::text, '{"a": 1}'::jsonb, '{"queue": "reports", "priority": 3}'::jsonb, true, c.last_run + interval '1 hour',
      null::timestamptz, null::bigint, null::text, 'latest'::text, null::interval, 'allow'::text, null::text from clock c$$, 'the view shows it');
select is((select admitted from queue.tick()), 0, 'nothing is due');
select is((select wait_for > '0' from queue.before_sleep(:worker)), true, 'so workers may sleep');
select queue.after_sleep(:worker) \g /dev/null

-- A run
select pg_temp.outage('plain', '21 min') \g /dev/null
select is((select wait_for from queue.before_sleep(:worker)), interval '0', 'workers know that it is due');
select queue.after_sleep(:worker) \g /dev/null
select is((select count(*) from queue.fetch(:worker)), 0::bigint, 'a fetch defers the job');
select is((select wait_for from queue.before_sleep(:worker)), interval '0', 'and nobody sleeps over it');
select queue.after_sleep(:worker) \g /dev/null
select results_eq(
  format($$select f.task, f.args - 'scheduled_for', (f.args ->> 'scheduled_for')::timestamptz, f.queue, f.priority from queue.fetch(%s) f$$, :worker),
  $$select 'plain'::text, '{"a": 1}'::jsonb, c.last_run, 'reports'::text, 3 from clock c$$, 'the next fetch starts it');
select results_eq($$select r.name collate "default", r.run_at, r.job_id, r.skipped, r.detail, r.manual from queue.schedule_runs r$$,
  $$select 'plain'::text, c.last_run, j.id, null::text, null::text, false from clock c, queue.jobs j$$, 'the history has the run and its job');
select results_eq($$select s.next_run_at, s.last_run_at, s.last_job_id from queue.schedules s$$,
  $$select c.last_run + interval '1 hour', c.last_run, j.id from clock c, queue.jobs j$$, 'so has the view');
select is((select admitted from queue.tick()), 0, 'it runs once');
select pg_temp.outage('plain', '21 min') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.jobs('plain'), 'running 0', 'even if the schedule forgot: its history knows');
select queue.finish_many(jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'succeeded'))) from queue.jobs j where state = 'running' \g /dev/null

update queue.schedule s set next_run_at = last_run + interval '1 hour', due_at = clock_timestamp() from clock;
select is((select admitted from queue.tick()), 0, 'nothing runs before its time, however often workers call');
select is((select due_at from queue.schedule), last_run + interval '1 hour', 'but is looked at again then') from clock;

-- The clock is set back (the due mark is ahead of it), and a schedule is due before the mark
update queue.cursor set due_at = clock_timestamp() + interval '1 hour';
select queue.schedule('soon', 'every 1 second', 'soon') \g /dev/null
select is((select k.due_at <= s.due_at from queue.cursor_now k, queue.schedule s where s.name = 'soon'), true, 'the mark goes back, too');
select queue.unschedule('soon') \g /dev/null

-- Options of the job
select queue.register_task('opts', '{"lock": "task:{a}", "deadline": "1 hour"}') \g /dev/null
select queue.schedule('opts', :'hourly', 'opts', '{"a": "x"}',
  options => '{"deadline": "2 hours", "queueing_lock": "q:{scheduled_for}", "concurrency_key": "k:{a}", "concurrency_limit": 2, "timeout": "5 s", "description": "d", "headers": {"h": 1}}') \g /dev/null
select pg_temp.outage('opts', '30 min') \g /dev/null
select queue.tick() \g /dev/null
select queue.tick() \g /dev/null
select results_eq($$select j.lock collate "default", j.queueing_lock collate "default", j.concurrency_key collate "default", j.deadline, j.description, j.headers from queue.jobs j where j.task = 'opts'$$,
  $$select 'task:x'::text, 'q:' || queue._rfc3339(last_run, 'UTC'), 'k:x'::text, last_run + interval '2 hours', 'd'::text, '{"h": 1}'::jsonb from clock$$,
  'every option of defer reaches the job; the deadline counts from the run');
select pg_temp.work() \g /dev/null
select queue.schedule('nested', '@daily', 'e', options => '{"options": {"timeout": "5 s"}, "lock": "l"}') \g /dev/null
select is((select s.options from queue.schedules s where s.name = 'nested'), '{"lock": "l", "timeout": "5 s"}', 'options may stand apart');
select queue.unschedule('nested') \g /dev/null
select queue.schedule('held', :'hourly', 'held', options => '{"held": true, "delay": "1 hour"}') \g /dev/null
select pg_temp.outage('held', '30 min') \g /dev/null
select queue.tick() \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.jobs('held'), 'held 0', 'even held');
select queue.unschedule('held') \g /dev/null

-- The same again, and changes
select changed_at as changed from queue.schedules where name = 'plain' \gset
select queue.schedule('plain', :'hourly', 'plain', '{"a": 1}', 'Europe/Paris', '{"priority": 3, "queue": "reports"}') \g /dev/null
select is((select changed_at from queue.schedules where name = 'plain'), :'changed', 'the same arguments again change nothing');
delete from queue.schedule_run r where r.name = 'plain';
select pg_temp.outage('plain', '30 min') \g /dev/null
select is(queue.schedule('plain', :'hourly', 'changed', '{"b": 2}', 'Europe/Paris'), last_run, 'a change of the job leaves the times as they are') from clock;
select queue.tick() \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.jobs('changed'), 'ready 0', 'and counts from the next run on');
select pg_temp.outage('plain') \g /dev/null
select is(queue.schedule('plain', '*/5 * * * *', 'changed'), (select queue.next_runs('*/5 * * * *', n => 1)), 'a change of the times takes effect at once');
select queue.tick() \g /dev/null
select is(pg_temp.jobs('changed'), 'ready 0', 'and no run before it is made up for');
select is(pg_temp.history('plain'), '2 changed, 0 job', 'which the history says');
select matches((select r.detail from queue.schedule_runs r where r.name = 'plain' and r.skipped = 'changed'), '^the schedule was changed at .*; it skips every run up to 20..-..-..T', 'for all of them');
select pg_temp.work() \g /dev/null

select queue.schedule('keeps', '@daily', 'e', options => '{"retain": {"failed": "36 hours", "succeeded": 90000.50}}'), queue.enable_schedule('keeps', false) \g /dev/null
set intervalstyle = iso_8601;
select is(queue.schedule('keeps', '@daily', 'e', options => '{"retain": {"failed": "36 hours", "succeeded": 90000.50}}'), null, 'nor with an interval, in a session that writes intervals in another style');
reset intervalstyle;
select queue.unschedule('keeps') \g /dev/null
select queue.schedule('expires', '@daily', 'e', options => '{"expires_at": "2999-01-01T00:00:00+00:00"}'), queue.enable_schedule('expires', false) \g /dev/null
set timezone = 'Europe/Paris';
select is(queue.schedule('expires', '@daily', 'e', options => '{"expires_at": "2999-01-01T00:00:00+00:00"}'), null, 'nor from a session in another time zone');
set timezone = 'Asia/Kolkata';
select isnt(queue.schedule('expires', '@daily', 'e', options => '{"expires_at": "2999-01-01T00:00:00"}'), null, 'unless a time without a zone means another there');
reset timezone;
select queue.unschedule('expires') \g /dev/null

-- Enabling
select is(queue.enable_schedule('plain', false), null, 'a disabled schedule has no next run');
select results_eq($$select enabled, next_run_at, reason from queue.schedules where name = 'plain'$$, $$values (false, null::timestamptz, 'disabled'::text)$$, 'the view says so');
select is(queue.schedule('plain', '*/5 * * * *', 'changed'), null, 'nor after the same schedule once more');
select is(queue.enable_schedule('plain'), (select queue.next_runs('*/5 * * * *', n => 1)), 'enabled, it has');
select is(queue.enable_schedule('plain'), (select queue.next_runs('*/5 * * * *', n => 1)), 'twice too');
select is(queue.schedule('plain', '*/5 * * * *', 'changed', options => '{"enabled": false}'), null, 'options can disable');
select is((select admitted from queue.tick()), 0, 'a disabled schedule does not run');
select is(queue.schedule('plain', '*/5 * * * *', 'changed'), (select queue.next_runs('*/5 * * * *', n => 1)), 'and enable');

-- By hand
select queue.enable_schedule('plain', false) \g /dev/null
select queue.run_now('plain') as manual \gset
select results_eq($$select r.job_id, r.run_at > now() - interval '1 min' from queue.schedule_runs r where r.name = 'plain' and r.manual$$,
  format('values (%s::bigint, true)', :manual), 'run_now defers a job, though disabled, and the history has it');
select is((select (args ->> 'scheduled_for')::timestamptz from queue.jobs where id = :manual), (select run_at from queue.schedule_runs where job_id = :manual), 'which is for now');
select is((select last_job_id from queue.schedules where name = 'plain'), :manual::bigint, 'it is the last job');
select pg_temp.work() \g /dev/null

-- Removing
select queue.schedule('latest', :'hourly', 'latest'), queue.schedule('late', :'hourly', 'late') \g /dev/null
select pg_temp.outage('latest'), queue.tick() \g /dev/null
select is(queue.unschedule('plain'), true, 'unschedule');
select is(queue.unschedule('plain'), false, 'twice');
select isnt(pg_temp.history('plain'), null, 'its runs are kept');
select queue._prune_old_runs() \g /dev/null
select isnt(pg_temp.history('plain'), null, 'for a time');
update queue.schedule_run r set decided_at = now() - interval '8 days' where r.name in ('plain', 'latest');
select queue._prune_old_runs() \g /dev/null
select is(pg_temp.history('plain'), null, 'of a week');
select isnt(pg_temp.history('latest'), null, 'longer if the schedule exists');
insert into queue.schedule_run (name, run_at, decided_at, is_manual, skipped) select 'latest', now() - n * interval '1 hour' - interval '1 day', now(), false, 'missed' from generate_series(1, 200) n;
select queue._prune_runs('latest') \g /dev/null
select is((select array[count(*), count(job_id)] from queue.schedule_runs where name = 'latest'), '{100,1}', 'but the last 100 only');

-- Refusals
select is(pg_temp.refusal(call), refusal, call)
from (values
  ($$select queue.schedule(null, '@daily', 't')$$, '22023 name is missing'),
  ($$select queue.schedule('', '@daily', 't')$$, '22023 name is missing'),
  ($$select queue.schedule(repeat('x', 1001), '@daily', 't')$$, '22023 name is too long'),
  ($$select queue.schedule('n', '@daily', 't', options => jsonb_build_object('lock', repeat('l', 970) || '{scheduled_for}'))$$, '22023 lock is too long'),
  ($$select queue.schedule('n', '@daily', null)$$, '22023 task is missing'),
  ($$select queue.schedule('n', '30 2 30 2 *', 't')$$, '22023 invalid cron expression'),
  ($$select queue.schedule('n', null, 't')$$, '22023 invalid cron expression'),
  ($$select queue.schedule('n', '* 2 * 3 SUN#2', 't', timezone => 'America/New_York')$$, '22023 invalid cron expression'),
  ($$select queue.schedule('n', '@daily', 't', timezone => 'CET+1')$$, '22023 unknown time zone'),
  ($$select queue.schedule('n', '@daily', 't', timezone => null)$$, '22023 unknown time zone'),
  ($$select queue.schedule('n', '@daily', 't', '[]')$$, '22023 args must be a JSON object'),
  ($$select queue.schedule('n', '@daily', 't', '{"scheduled_for": 1}')$$, '22023 args may not contain scheduled_for'),
  ($$select queue.schedule('n', '@daily', 't', options => '[]')$$, '22023 options must be a JSON object'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"catchup": "all"}')$$, '22023 options has an unknown key'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"scheduled_at": "2030-01-01"}')$$, '22023 options has an unknown key'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"catch_up": "some"}')$$, '22023 catch_up is not one of its values'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"overlap": true}')$$, '22023 overlap is not one of its values'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"enabled": "yes"}')$$, '22023 enabled must be true or false'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"max_delay": "soon"}')$$, '22023 max_delay is not an interval'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"max_delay": 0}')$$, '22023 max_delay is too short'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"max_delay": "4001 years"}')$$, '22023 max_delay is not an interval'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"max_delay": "4000 years 1 us"}')$$, '22023 max_delay is not an interval'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"source": 1}')$$, '22023 source must be text'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"queue": "a*"}')$$, '22023 a queue''s name may not end in *'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"queue": 1}')$$, '22023 options has a value of a wrong type'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"priority": 1.5}')$$, '22023 options has a value of a wrong type'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"deadline": "2030-01-01"}')$$, '22023 deadline is not an interval'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"lock": "{a}"}')$$, '22023 lock names a field that args do not fill'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"share": "{a}"}')$$, '22023 share names a field that args do not fill'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"group": "{a}"}')$$, '22023 group names a field that args do not fill'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"concurrency_key": "{a}", "concurrency_limit": 1}')$$, '22023 concurrency_key names a field that args do not fill'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"concurrency": [{"key": "{a}", "limit": 1}]}')$$, '22023 concurrency_key names a field that args do not fill'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"timeout": "-1 s"}')$$, '22023 timeout is not an interval'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"parent": 1}')$$, '22023 parent belongs to a single job'),
  ($$select queue.unschedule(null)$$, '22023 name is missing'),
  ($$select queue.run_now('n')$$, '22023 no such schedule'),
  ($$select queue.enable_schedule('n')$$, '22023 no such schedule'),
  ($$select queue.enable_schedule('late', null)$$, '22023 enabled must be true or false')) v (call, refusal);
select is((select count(*) from queue.schedules where name = 'n'), 0::bigint, 'a refused call leaves nothing');
begin isolation level repeatable read;
select is(pg_temp.refusal($$select queue.schedule('n', '@daily', 't')$$), 'QJ008 wrong isolation level', 'not in REPEATABLE READ');
rollback;
select lives_ok($$select queue.schedule(E'o''neill "*" \u00e9 {}', '@daily', E'\u4efb\u52a1 ''')$$, 'any name will do');

-- Access
create role pgdefer_tap_schedules;
create function pg_temp.may(kind text) returns text language plpgsql as $$
begin
  perform queue.grant_access('pgdefer_tap_schedules', kind);
  return (select concat_ws(' ',
    string_agg(p.proname, ' ' order by p.proname) filter (where has_function_privilege('pgdefer_tap_schedules', p.oid, 'execute')),
    (select string_agg(c.relname, ' ' order by c.relname) from pg_class c
     where c.relnamespace = 'queue'::regnamespace and c.relname ~ '^schedule' and c.relkind in ('r', 'v') and has_table_privilege('pgdefer_tap_schedules', c.oid, 'select')))
    from pg_proc p where p.pronamespace = 'queue'::regnamespace
      and p.proname in ('schedule', 'unschedule', 'run_now', 'enable_schedule', 'next_runs', '_run_schedules', '_run_due_schedules', '_defer_run'));
end $$;
select is(pg_temp.may('producer'), '', 'producers have nothing to do with schedules');
select is(pg_temp.may('reader'), 'next_runs schedule_runs schedules', 'readers see them');
select queue.revoke_access('pgdefer_tap_schedules') \g /dev/null
select is(pg_temp.may('worker'), 'next_runs schedule unschedule schedules', 'workers register them');
select queue.revoke_access('pgdefer_tap_schedules') \g /dev/null
select is(pg_temp.may('operator'), 'enable_schedule next_runs run_now schedule unschedule schedule_runs schedules', 'operators may do all');
set role pgdefer_tap_schedules;
select lives_ok($$select queue.schedule('by role', '@daily', 't')$$, 'schedule as a role without rights on tables');
select lives_ok($$select queue.run_now('by role')$$, 'run_now');
select lives_ok($$select queue.tick()$$, 'tick');
reset role;
select queue.revoke_access('pgdefer_tap_schedules') \g /dev/null
drop role pgdefer_tap_schedules;

select * from finish();
