-- Recurring runs: their jobs, outages, overlap, pauses, changes, refusals, history.

select plan(150);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- An expression for each hour whose last run was 20 minutes ago: none comes due while the tests run. began_at: the time
-- that counts as now, because a minute may end between this statement and one that asks for the run 21 minutes ago.
create temp table clock as
select format('%s * * * *', to_char(now() - interval '20 min', 'FMMI')) as hourly, date_trunc('minute', now() - interval '20 min') as last_run,
  now() as began_at;
select hourly from clock \gset

-- Moves a schedule to the state it would have if no worker had run for this long.
create function pg_temp.outage(name text, length interval default '3 hours') returns void language sql as $$
  update queue.schedule s
  set next_run_at = queue._cron_next(s.parsed, s.timezone, c.began_at - length), last_run_at = null, due_at = clock_timestamp()
  from clock c
  where s.name = outage.name
$$;

-- How many hours a run was before the last one.
create function pg_temp.hours(run_at timestamptz) returns text language sql as $$
  select (extract(epoch from c.last_run - run_at) / 3600)::numeric(9, 0)::text from clock c
$$;

-- The outcomes of a schedule's runs.
create function pg_temp.history(name text) returns text language sql as $$
  select string_agg(format('%s %s', pg_temp.hours(r.run_at), coalesce(r.skipped, 'job')), ', ' order by r.run_at)
  from queue.schedule_runs r where r.name = history.name
$$;

-- The jobs of a task, and their runs.
create function pg_temp.jobs(task text) returns text language sql as $$
  select string_agg(format('%s %s', j.state, pg_temp.hours((j.args ->> 'scheduled_for')::timestamptz)), ', ' order by j.id)
  from queue.jobs j where j.task = jobs.task
$$;

-- Ends everything that is ready.
create function pg_temp.work() returns void language plpgsql as $$
declare
  v_outcomes jsonb;
begin
  loop
    select jsonb_agg(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', 'succeeded')) into v_outcomes from queue.fetch(1, null, 1000) f;
    exit when v_outcomes is null;
    perform queue.finish_many(v_outcomes);
  end loop;
end $$;

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

create function pg_temp.plan(query text) returns setof text language plpgsql as $$
begin
  return query execute 'explain (costs off) ' || query;
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

-- scheduled_for
select is(queue._rfc3339('2026-07-01 07:00:05+00', 'Europe/Paris'), '2026-07-01T09:00:05+02:00', 'scheduled_for has the zone''s offset');
select is(queue._rfc3339('2026-01-01 07:00+00', 'America/St_Johns'), '2026-01-01T03:30:00-03:30', 'west of Greenwich');
select is(queue._rfc3339('2026-01-01 07:00+00', 'UTC'), '2026-01-01T07:00:00+00:00', 'in UTC');
select is(queue._rfc3339('2026-10-25 01:30:00.25+00', 'Europe/Paris'), '2026-10-25T02:30:00.250000+01:00', 'which distinguishes the two passes of an hour');

-- Outages of 3 hours
select queue.schedule('none', :'hourly', 'none', options => '{"catch_up": "none"}'), queue.schedule('latest', :'hourly', 'latest', options => '{"catch_up": "latest"}'),
  queue.schedule('all', :'hourly', 'all', options => '{"catch_up": "all"}'), queue.schedule('late', :'hourly', 'late', options => '{"max_delay": "10 min"}'),
  queue.schedule('in time', :'hourly', 'in time', options => '{"max_delay": 1800, "catch_up": "none"}'),
  queue.schedule('all but', :'hourly', 'all but', options => '{"catch_up": "all", "max_delay": "100 min"}'),
  queue.schedule('all late', :'hourly', 'all late', options => '{"catch_up": "all", "max_delay": "19 min"}') \g /dev/null
select pg_temp.outage(name) from queue.schedules where name <> 'plain' \g /dev/null
select queue.tick() \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.jobs(task), jobs, format('jobs after 3 hours: %s', task))
from (values ('none', null), ('latest', 'ready 0'), ('all', 'ready 2, ready 1, ready 0'), ('late', null), ('in time', 'ready 0'),
  ('all but', 'ready 1, ready 0'), ('all late', null)) v (task, jobs);
select is(pg_temp.history(name), history, format('history after 3 hours: %s', name))
from (values ('none', '2 missed, 1 missed, 0 missed'), ('latest', '2 missed, 1 missed, 0 job'), ('all', '2 job, 1 job, 0 job'),
  ('late', '2 max_delay, 1 max_delay, 0 max_delay'), ('in time', '2 missed, 1 missed, 0 job'),
  ('all but', '2 max_delay, 1 job, 0 job'), ('all late', '2 max_delay, 1 max_delay, 0 max_delay')) v (name, history);
select is((select array_agg(distinct s.next_run_at) from queue.schedules s), array[last_run + interval '1 hour'], 'all of them run next at the same time') from clock;
select is((select array_agg(distinct s.last_run_at) from queue.schedules s where s.name <> 'plain'), array[last_run], 'and have dealt with the same run') from clock;

select queue.schedule('always', :'hourly', 'always', options => '{"max_delay": "4000 years"}') \g /dev/null
select pg_temp.outage('always') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.history('always'), '2 missed, 1 missed, 0 job', 'the longest possible max_delay');
select queue.unschedule('always') \g /dev/null

-- Long outages of frequent schedules
select queue.schedule('second', 'every 1 second', 's', options => '{"catch_up": "latest"}') \g /dev/null
select pg_temp.outage('second', '10 years') \g /dev/null
select queue._run_due_schedules('-infinity', 1000) \g /dev/null
select is((select count(*) from queue.jobs where task = 's'), 1::bigint, '300 million missed runs are one job');
select cmp_ok((select run_at from queue.schedule_runs where name = 'second' and job_id is not null), '>', now() - interval '10 s', 'for the last of them');
select is((select count(*) from queue.schedule_runs where name = 'second' and skipped = 'missed'), 10::bigint, '10 of those skipped are in the history');
select matches((select detail from queue.schedule_runs where name = 'second' and detail is not null), '^and every run up to 20..-..-..T', 'which says that it continues');
select queue.unschedule('second') \g /dev/null
select queue.schedule('minutes', 'every 1 minute', 'm', options => '{"catch_up": "all"}') \g /dev/null
select pg_temp.outage('minutes', '5 hours') \g /dev/null
select is(r.runs = 100 and r.has_more and mark <= clock_timestamp(), true, 'runs to make up for come in portions') from queue._run_due_schedules('-infinity', 1000) r;
select cmp_ok((select due_at from queue.schedule where name = 'minutes'), '>', now() - interval '1 min', 'between which others get their turn');
select queue.tick() \g /dev/null
select is((select count(*) from queue.jobs where task = 'm') between 300 and 302, true, 'until all are deferred');
select queue.unschedule('minutes') \g /dev/null

-- The last run before a time, compared with the runs one by one
select is(queue._last_run(queue._cron_parse(cron), zone, f.runs[1], f.runs[60] + tail), f.runs[60], format('last run of %s in %s', cron, zone))
from (values ('* * * * *', 'UTC', '0 s'::interval), ('*/7 3 * * *', 'Europe/Paris', '4 min'), ('30 2 * * *', 'Europe/Paris', '59 min'), ('0 0 29 2 *', 'Asia/Kolkata', '1 day'),
  ('every 90 seconds', 'UTC', '89.9 s'), ('0 0 0 1 1 *', 'America/New_York', '200 days'), ('0 */5 * * MON', 'Australia/Lord_Howe', '1 s')) v (cron, zone, tail)
cross join lateral (select array_agg(r order by r) from queue.next_runs(cron, zone, '2026-03-27 12:00+00', 60) r) f (runs);

-- Overlap
select queue.schedule('overlap', :'hourly', 'overlap', options => '{"overlap": "skip", "catch_up": "all"}') \g /dev/null
select pg_temp.outage('overlap') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.history('overlap'), '2 job, 1 overlap, 0 overlap', 'overlap skip: one job, and no other until it is finished');
select is((select detail from queue.schedule_runs where skipped = 'overlap' limit 1), format('job %s is unfinished', (select id from queue.jobs where task = 'overlap')), 'and which it was');
select pg_temp.work() \g /dev/null
delete from queue.schedule_run r where r.name = 'overlap' and skipped is not null;
select pg_temp.outage('overlap', '30 min') \g /dev/null
select queue.tick() \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.jobs('overlap'), 'succeeded 2, ready 0', 'once it has ended, the next one');
select pg_temp.work() \g /dev/null
select queue.schedule('overlap', :'hourly', 'overlap', options => '{"overlap": "skip", "catch_up": "all", "queue": "other", "lock": "l", "queueing_lock": "q"}') \g /dev/null
select queue.run_now('overlap') \g /dev/null
delete from queue.schedule_run r where r.name = 'overlap' and not is_manual;
select pg_temp.outage('overlap', '2 hours') \g /dev/null
select queue.tick() \g /dev/null
select is((select count(*) from queue.schedule_runs r where r.name = 'overlap' and r.skipped = 'overlap'), 2::bigint, 'a job of run_now counts too');
select pg_temp.work() \g /dev/null
select queue.schedule('overlap', 'every 1 second', 'overlaps', options => '{"overlap": "skip", "catch_up": "all"}') \g /dev/null
delete from queue.schedule_run r where r.name = 'overlap';
select pg_temp.outage('overlap', '1 year') \g /dev/null
select queue._run_due_schedules('-infinity', 1000) \g /dev/null
select is((select count(*) from queue.jobs where task = 'overlaps'), 1::bigint, 'a long outage of a schedule without overlap is one job');
select matches((select string_agg(coalesce(skipped, 'job') || coalesce(' ' || detail, ''), ', ' order by run_at) from queue.schedule_runs where name = 'overlap'),
               '^job, overlap job \d+ is unfinished, .*overlap job \d+ is unfinished, for every run up to 20..-..-..T..:..:..\+00:00$', 'and ten runs in the history');
select cmp_ok((select next_run_at from queue.schedules where name = 'overlap'), '>', clock_timestamp() - interval '5 s', 'not one for each second');
select queue.unschedule('overlap') \g /dev/null
select pg_temp.work() \g /dev/null

-- A paused queue
select queue.schedule('p ' || v.catch_up, :'hourly', 'p ' || v.catch_up, options => jsonb_build_object('queue', 'paused', 'catch_up', v.catch_up))
from unnest('{none,latest,all}'::text[]) v (catch_up) \g /dev/null
select queue.pause('pau*') \g /dev/null
select pg_temp.outage(name) from queue.schedules where name like 'p %' \g /dev/null
select queue.tick() \g /dev/null
select queue.tick() \g /dev/null
select is((select count(*) from queue.jobs where queue = 'paused'), 0::bigint, 'on a paused queue nothing piles up');
select is((select array_agg(distinct reason) from queue.schedules where name like 'p %'), '{paused}', 'the view says why');
select cmp_ok(queue._next_due(), '>', clock_timestamp() + interval '10 s', 'nobody stays awake for it');
select queue.resume('pau*') \g /dev/null
select cmp_ok(queue._next_due(), '<=', clock_timestamp(), 'resumed, they are due');
select queue.tick() \g /dev/null
select queue.tick() \g /dev/null
select is((select string_agg(concat_ws(': ', name, pg_temp.jobs(name)), '; ' order by name) from queue.schedules where name like 'p %'),
          'p all: ready 2, ready 1, ready 0; p latest: ready 0; p none', 'and catch_up decides');
select is((select array_agg(distinct reason) from queue.schedules where name like 'p %'), '{null}', 'the view says so');
select pg_temp.work() \g /dev/null
select queue.pause(task => 'p latest', until => now() + interval '1 hour') \g /dev/null
select pg_temp.outage('p latest', '22 min') \g /dev/null
select queue.tick() \g /dev/null
select is((select reason from queue.schedules where name = 'p latest'), 'paused', 'a paused task does the same');
select queue.pause(task => 'p latest', until => now()) \g /dev/null
select queue.tick() \g /dev/null
select is((select reason from queue.schedules where name = 'p latest'), null, 'a pause that has passed pauses nothing');
select queue.unschedule(name) from queue.schedules where name like 'p %' \g /dev/null
select pg_temp.work() \g /dev/null

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
select queue.schedule('held', :'hourly', 'held', options => '{"held": true, "delay": "1 hour"}') \g /dev/null
select pg_temp.outage('held', '30 min') \g /dev/null
select queue.tick() \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.jobs('held'), 'held 0', 'even held');
select queue.unschedule('held') \g /dev/null

-- A run that can't be deferred is recorded, and stops nobody
select queue.register_task('poisoned', '{"lock": "{nothing}"}') \g /dev/null
select queue.schedule('poisoned', :'hourly', 'poisoned') \g /dev/null
select queue.defer('holder', queueing_lock => 'taken') as holder \gset
select queue.schedule('taken', :'hourly', 'taken', options => '{"queueing_lock": "taken"}') \g /dev/null
select queue.schedule('ignores', :'hourly', 'ignores', options => '{"queueing_lock": "taken", "on_conflict": "ignore"}') \g /dev/null
select queue.schedule('after', :'hourly', 'after') \g /dev/null
select pg_temp.outage(name, '30 min') from queue.schedules where name in ('poisoned', 'taken', 'ignores', 'after') \g /dev/null
select queue.tick() \g /dev/null
select results_eq($$select r.skipped, r.detail from queue.schedule_runs r where r.name = 'poisoned'$$,
  $$values ('error'::text, 'lock names a field that args do not fill: template: {nothing}, field: nothing'::text)$$, 'a run that can''t be deferred is recorded');
select is((select reason from queue.schedules where name = 'poisoned'), 'error: lock names a field that args do not fill: template: {nothing}, field: nothing (22023)', 'the view says why nothing runs');
select matches((select status || ' ' || detail from queue.health() where name = 'schedules'), '^warn 0 late, 1 with an error: poisoned: error: lock names', 'and so does health');
select results_eq($$select r.skipped, r.detail from queue.schedule_runs r where r.name = 'taken'$$,
  format($$values ('queueing_lock'::text, 'id: %s, queueing_lock: taken'::text)$$, :holder), 'so is a queueing_lock that is taken');
select is((select job_id from queue.schedule_runs r where r.name = 'ignores'), :holder::bigint, 'with on_conflict ignore the waiting job is the run''s');
select is(pg_temp.history('after'), '0 job', 'others run');
select is((select array_agg(next_run_at = last_run + interval '1 hour') from queue.schedules, clock where name in ('poisoned', 'taken', 'ignores', 'after')),
          '{t,t,t,t}', 'and each goes on to its next run');
select queue.register_task('poisoned', '{}') \g /dev/null
delete from queue.schedule_run r where r.name = 'poisoned';
select pg_temp.outage('poisoned', '30 min') \g /dev/null
select queue.tick() \g /dev/null
select is((select reason from queue.schedules where name = 'poisoned'), null, 'until a run is deferred');
select is((select status from queue.health() where name = 'schedules'), 'ok', 'which ends the warning');
select queue.tick() \g /dev/null
select pg_temp.work() \g /dev/null
-- a run that can't even update its row
update queue.schedule s set timezone = 'Europe/Atlantis' where s.name = 'poisoned';
delete from queue.schedule_run r where r.name = 'after';
update queue.schedule s set next_run_at = last_run, last_run_at = null, due_at = clock_timestamp() from clock where s.name in ('poisoned', 'after');
set client_min_messages = error;
select queue.tick() \g /dev/null
reset client_min_messages;
select matches((select reason from queue.schedules where name = 'poisoned'), '^error: .*Europe/Atlantis.*22023', 'one that can''t be run at all says so');
select is(pg_temp.history('after'), '0 job', 'and stops nobody');
select queue.tick() \g /dev/null
select cmp_ok(queue._next_due(), '>', clock_timestamp() + interval '10 s', 'nor keeps workers awake');
select queue.unschedule(name) from queue.schedules where name in ('poisoned', 'taken', 'ignores', 'after') \g /dev/null
select pg_temp.work() \g /dev/null

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
select pg_temp.work() \g /dev/null

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
select is(queue.unschedule('plain'), true, 'unschedule');
select is(queue.unschedule('plain'), false, 'twice');
select isnt(pg_temp.history('plain'), null, 'its runs are kept');
select queue._prune_old_runs(1000) \g /dev/null
select isnt(pg_temp.history('plain'), null, 'for a time');
update queue.schedule_run r set decided_at = now() - interval '8 days' where r.name in ('plain', 'latest');
select queue._prune_old_runs(1000) \g /dev/null
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
  ($$select queue.schedule('n', '@daily', 't', options => '{"concurrency_key": "{a}", "concurrency_limit": 1}')$$, '22023 concurrency_key names a field that args do not fill'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"concurrency": [{"key": "{a}", "limit": 1}]}')$$, '22023 concurrency_key names a field that args do not fill'),
  ($$select queue.schedule('n', '@daily', 't', options => '{"timeout": "-1 s"}')$$, '22023 timeout is not an interval'),
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

-- Under a held xmin each run leaves a dead row before the mark: so the search begins at the mark.
set enable_seqscan = off;
select matches((select string_agg(btrim(p), '; ') from pg_temp.plan($$select s.due_at from queue.schedule s where s.due_at >= now() order by s.due_at limit 1$$) p),
               '^Limit; ->  Index (Only )?Scan using schedule_due_idx on schedule s; Index Cond: \(due_at >= now\(\)\)$', 'due schedules are found from the mark on');
select cmp_ok((select due_at from queue.cursor), '>', now() - interval '1 min', 'which follows the clock');

select * from finish();
