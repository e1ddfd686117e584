-- Which due runs happen: overlap, paused queues, runs that can't be deferred, how they are found.

select plan(34);

\ir schedules.helpers.psql

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

create function pg_temp.plan(query text) returns setof text language plpgsql as $$
begin
  return query execute 'explain (costs off) ' || query;
end $$;

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
select queue.schedule('beside', :'hourly', 'beside', options => '{"overlap": "skip", "catch_up": "all"}') \g /dev/null
select pg_temp.outage('beside', '21 min') \g /dev/null
select queue.tick() \g /dev/null
select s.last_job_id from queue.schedules s where s.name = 'beside' \gset
select queue.run_now('beside') as manual \gset
select queue.done(array[:manual]) \g /dev/null
select pg_temp.outage('beside', '2 hours') \g /dev/null
select queue.tick() \g /dev/null
select is((select count(*) from queue.schedule_runs r where r.name = 'beside' and r.skipped = 'overlap'), 1::bigint, 'but a job of run_now does not hide one that is unfinished');
select is((select s.last_job_id from queue.schedules s where s.name = 'beside'), :last_job_id::bigint, 'which stays the last job');
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
select queue._add_pause(null, 'p latest', now()) \g /dev/null
select queue.tick() \g /dev/null
select is((select reason from queue.schedules where name = 'p latest'), null, 'a pause that has passed pauses nothing');
select queue.unschedule(name) from queue.schedules where name like 'p %' \g /dev/null
select pg_temp.work() \g /dev/null

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

-- What an option needs may be registered with the task later
select queue.schedule('unique', :'hourly', 'unique', options => '{"unique_for": "1 day"}') \g /dev/null
select pg_temp.outage('unique', '30 min') \g /dev/null
select queue.tick() \g /dev/null
select is((select r.skipped || ': ' || r.detail from queue.schedule_runs r where r.name = 'unique'), 'error: unique_for needs an idempotency_key',
  'without a key the run is skipped');
select throws_ok($$select queue.run_now('unique')$$, '22023', 'unique_for needs an idempotency_key', 'and run_now refused');
select queue.register_task('unique', '{"idempotency_key": "{scheduled_for}"}') \g /dev/null
delete from queue.schedule_run r where r.name = 'unique';
select pg_temp.outage('unique', '30 min') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.history('unique'), '0 job', 'until the task registers one');
select queue.unschedule('unique') \g /dev/null
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

-- Under a held xmin each run leaves a dead row before the mark: so the search begins at the mark.
set enable_seqscan = off;
select matches((select string_agg(btrim(p), '; ') from pg_temp.plan($$select s.due_at from queue.schedule s where s.due_at >= now() order by s.due_at limit 1$$) p),
               '^Limit; ->  Index (Only )?Scan using schedule_due_idx on schedule s; Index Cond: \(due_at >= now\(\)\)$', 'due schedules are found from the mark on');
select cmp_ok((select due_at from queue.cursor), '>', now() - interval '1 min', 'which follows the clock');

select * from finish();
