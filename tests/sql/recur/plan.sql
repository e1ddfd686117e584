-- Which runs of a schedule are due after an outage, and scheduled_for.

select plan(41);

\ir schedules.helpers.psql

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
from (values ('none', null), ('latest', 'ready 0'), ('all', 'ready 2, ready 1, ready 0'), ('late', null), ('in time', null),
  ('all but', 'ready 1, ready 0'), ('all late', null)) v (task, jobs);
select is(pg_temp.history(name), history, format('history after 3 hours: %s', name))
from (values ('none', '2 missed, 1 missed, 0 missed'), ('latest', '2 missed, 1 missed, 0 job'), ('all', '2 job, 1 job, 0 job'),
  ('late', '2 max_delay, 1 max_delay, 0 max_delay'), ('in time', '2 missed, 1 missed, 0 missed'),
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

-- catch_up none runs the last one, as latest does, unless it is more than 15 s late, or later than max_delay.
create function pg_temp.planned(every text, max_delay interval, late interval) returns text language sql as $$
  select concat_ws(' ', cardinality(r.skips), r.skipped, r.runs[1] - '2026-01-01Z', cardinality(r.runs), r.next_run_at - '2026-01-01Z')
  from queue._plan_runs(queue._cron_parse('every ' || every), 'UTC', '2026-01-01Z', '2026-01-01Z'::timestamptz + late, 'none', max_delay) r $$;
select is(pg_temp.planned('1 second', null, '0.3 s'), '0 00:00:00 1 00:00:01', 'none runs what is in time');
select is(pg_temp.planned('1 second', null, '5.3 s'), '5 missed 00:00:05 1 00:00:06', 'and of several the last');
select is(pg_temp.planned('20 seconds', null, '34 s'), '1 missed 00:00:20 1 00:00:40', 'if that is a little late');
select is(pg_temp.planned('20 seconds', null, '36 s'), '2 missed 0 00:00:40', 'but not if it is more than 15 s late');
select is(pg_temp.planned('20 seconds', '1 hour', '36 s'), '2 missed 0 00:00:40', 'a longer max_delay changes nothing');
select is(pg_temp.planned('20 seconds', '3 s', '24 s'), '2 max_delay 0 00:00:40', 'a shorter one does');

-- The last run before a time, compared with the runs one by one
select is(queue._last_run(queue._cron_parse(cron), zone, f.runs[1], f.runs[60] + tail), f.runs[60], format('last run of %s in %s', cron, zone))
from (values ('* * * * *', 'UTC', '0 s'::interval), ('*/7 3 * * *', 'Europe/Paris', '4 min'), ('30 2 * * *', 'Europe/Paris', '59 min'), ('0 0 29 2 *', 'Asia/Kolkata', '1 day'),
  ('every 90 seconds', 'UTC', '89.9 s'), ('0 0 0 1 1 *', 'America/New_York', '200 days'), ('0 */5 * * MON', 'Australia/Lord_Howe', '1 s')) v (cron, zone, tail)
cross join lateral (select array_agg(r order by r) from queue.next_runs(cron, zone, '2026-03-27 12:00+00', 60) r) f (runs);

select * from finish();
