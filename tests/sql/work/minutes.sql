-- The figures of each minute: each end counted once, whatever removes the job before; series and task_stats.

select plan(63);

set pgdefer.notify = off;

-- Counts now, although 10 s have not passed.
create function pg_temp.count_now() returns void language plpgsql as $$
begin
  perform queue._lock_admission(true);
  perform queue._count_minutes('1 minute', '0');
end $$;

create function pg_temp.sums() returns text language sql as $$
  select string_agg(concat_ws(' ', s.queue, s.task, s.succeeded, s.failed, s.cancelled, s.failures), ', ' order by s.queue, s.task)
  from (select m.queue, m.task, sum(m.succeeded) as succeeded, sum(m.failed) as failed, sum(m.cancelled) as cancelled, sum(m.failures) as failures
    from queue.minutes m group by 1, 2) s
$$;

-- Defers a job that run_all ends by an outcome, after it has run for so long.
create function pg_temp.job(task text, outcome text, queue text default 'q', took interval default '0', options jsonb default null) returns bigint language sql as $$
  select queue.defer(task, jsonb_build_object('outcome', outcome, 'took', took), queue, options => options)
$$;
create function pg_temp.run_all() returns void language plpgsql as $$
declare
  v_job record;
begin
  for v_job in select f.id, f.claim, f.args from queue.fetch((select max(w.id) from queue.workers w), null, 1000) f loop
    update queue.active_job aj set claimed_at = clock_timestamp() - (v_job.args ->> 'took')::interval where aj.id = v_job.id;
    perform queue.finish_many(jsonb_build_array(jsonb_build_object('id', v_job.id, 'claim', v_job.claim, 'outcome', v_job.args ->> 'outcome')));
  end loop;
end $$;

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
select pg_temp.count_now();
select is_empty('select * from queue.minutes', 'nothing has happened');
select is((select count(*)::integer from queue.series()), (select count(*)::integer from queue.series() where succeeded + failed + cancelled + failures = 0 and run_p50 is null), 'a series of nothing');
select ok((select count(*) between 71 and 73 from queue.series()), 'has a row for each step');
select is_empty('select * from queue.task_stats()', 'and no task');

-- Each outcome
select pg_temp.job('a', 'succeeded'), pg_temp.job('a', 'succeeded', 'r'), pg_temp.job('b', 'failed'), pg_temp.job('b', 'failed', options => '{"retry": {"max_attempts": 2, "base": "1 hour"}}') \g /dev/null
select pg_temp.run_all();
select pg_temp.job('d', 'released') as released \gset
select pg_temp.run_all(), queue.delete(array[:released]) \g /dev/null
select queue.defer('c', queue => 'q') as c \gset
select queue.cancel(:c) \g /dev/null
select pg_temp.count_now();
select is(pg_temp.sums(), 'q a 1 0 0 0, q b 0 1 0 2, q c 0 0 1 0, r a 1 0 0 0', 'each state of jobs, and failures of attempts');
select pg_temp.count_now();
select is(pg_temp.sums(), 'q a 1 0 0 0, q b 0 1 0 2, q c 0 0 1 0, r a 1 0 0 0', 'are counted once');
select pg_temp.job('a', 'succeeded') \g /dev/null
select pg_temp.run_all(), pg_temp.count_now();
select is((select sum(m.succeeded)::integer from queue.minutes m where m.queue = 'q' and m.task = 'a'), 2, 'further ones are added');
select is((select array_agg(s order by s) from (select sum(n) as s from queue.minute m, unnest(m.runs) n where m.queue = 'q' and m.task = 'a') x), '{2}', 'with their times');
select is((select sum(m.succeeded)::integer from queue.minute m, unnest(m.waits) where m.task = 'c'), null, 'a job that never started has none');
select results_eq($$select task, succeeded, failed, cancelled, failures, failure_rate from queue.task_stats()$$,
  $$values ('a', 3::bigint, 0::bigint, 0::bigint, 0::bigint, 0.0000), ('b', 0, 1, 0, 2, 1.0000), ('c', 0, 0, 1, 0, null)$$, 'task_stats');
select results_eq($$select sum(succeeded), sum(failed), sum(cancelled), sum(failures) from queue.series()$$, $$values (3::numeric, 1::numeric, 1::numeric, 2::numeric)$$, 'series');
select is((select sum(succeeded)::integer from queue.series('1 hour', '1 minute', p.queue, p.task)), p.n, 'of ' || p::text)
from (values ('q', null, 2), ('r', 'a', 1), ('r', 'b', 0), ('q*', null, 2), ('*', 'a', 3), ('none', null, 0)) p (queue, task, n);

-- By the clock of the minute, not of the count
truncate queue.minute;
select pg_temp.job('old', 'succeeded') as old \gset
select pg_temp.run_all();
update queue.finished set finished_at = '2001-02-03T04:05:59.999999Z' where id = :old;
update queue.minute_cursor set counted_to = '2001-02-03T04:05:06Z', safe_at = '2001-02-03T04:06:00Z', looked_at = clock_timestamp();
select queue._count_ends('2001-02-03T04:05:06Z', '2001-02-03T04:06:00Z');
select is((select m.minute from queue.minutes m), '2001-02-03T04:05:00Z'::timestamptz, 'a job counts for the minute in which it ended');
select pg_temp.count_now();
select is_empty($$select from queue.minutes where task = 'old'$$, 'which goes after 7 days');

-- What removes a job before it has been counted
truncate queue.minute;
select pg_temp.job('kept', 'failed') as a, pg_temp.job('gone', 'failed') as b, pg_temp.job('done', 'failed') as c, pg_temp.job('brief', 'succeeded', options => '{"retain": 0}') as d \gset
select pg_temp.run_all();
select queue.retry(array[:a]), queue.delete(array[:b]), queue.done(array[:c]), queue.prune() \g /dev/null
select is_empty(format('select from queue.finished where id in (%s, %s, %s)', :a, :b, :d), 'none of these is kept');
select pg_temp.count_now();
select is(pg_temp.sums(), 'q brief 1 0 0 0, q done 1 1 0 1, q gone 0 1 0 1, q kept 0 1 0 1', 'jobs that were retried, deleted, marked as done or pruned');
select queue.delete(array[:a]), queue.delete(array[:c]) \g /dev/null
select pg_temp.count_now();
select is(pg_temp.sums(), 'q brief 1 0 0 0, q done 1 1 0 1, q gone 0 1 0 1, q kept 0 1 0 1', 'are not counted again when they are deleted later');
truncate queue.minute;
select pg_temp.job('again', 'succeeded') as again \gset
select pg_temp.run_all(), queue.done(array[:again]), pg_temp.count_now() \g /dev/null
select is(pg_temp.sums(), 'q again 1 0 0 0', 'nor is one that had succeeded when it was marked as done');

-- The times
truncate queue.minute;
select pg_temp.job('long', 'succeeded', took => n * interval '1 second') from generate_series(1, 100) n \g /dev/null
select pg_temp.run_all(), pg_temp.count_now();
select ok(extract(epoch from t.run_p50) between 50 / 1.123 and 50 * 1.123, 'the median of run times: ' || t.run_p50) from queue.task_stats() t where t.task = 'long';
select ok(extract(epoch from t.run_p95) between 95 / 1.123 and 95 * 1.123, 'and p95: ' || t.run_p95) from queue.task_stats() t where t.task = 'long';
select ok(t.wait_p95 <= '1.3 ms', 'a start before it was due is no wait') from queue.task_stats() t where t.task = 'long';
select ok(abs(1 - extract(epoch from queue._percentile(array[queue._class_of(n * interval '1 ms')], '{1}', 0.5)) * 1000 / n) <= 0.122 + 0.002, n || ' ms')
from unnest('{2,10,12.5,12.6,1000,99999,86400000}'::numeric[]) n;
select is(queue._add_counts(a::integer[], b::integer[]), c::integer[], a || ' and ' || b) from (values ('{}', '{}', '{}'), ('{}', '{0,3}', '{0,3}'), ('{0,3}', '{}', '{0,3}'), ('{1,2}', '{4,0,5}', '{5,2,5}'), ('{4,0,5}', '{1,2}', '{5,2,5}')) v (a, b, c);
select is(queue._counts_by_class('{3,null,1,3}', '{1,9,2,4}'), '{2,0,5}', 'the counts of classes, of which one is unknown');
select is(queue._class_of(t::interval), c, 'the class of ' || t) from (values ('0', 1), ('-1 hour', 1), ('1 ms', 1), ('1.3 ms', 2), ('100 years', 90)) v (t, c);

-- Bounded work
truncate queue.minute;
insert into queue.finished (id, finished_at, attempts, state)
select queue.defer('burst', queue => 'q' || n % 3), clock_timestamp(), 0, 'cancelled' from generate_series(1, 12000) n \g /dev/null
select pg_temp.count_now();
select is((select sum(m.cancelled)::integer from queue.minutes m), 12000, 'thousands are counted in parts');
select is_empty('select from queue.minute group by minute, queue, task having count(*) > 1', 'into the same minutes');

delete from queue.finished f using queue.job j where j.id = f.id and j.task = 'burst';
delete from queue.log l where l.task = 'burst';

-- The clock was set back
update queue.minute_cursor set counted_to = clock_timestamp() + interval '1 hour', looked_at = clock_timestamp() + interval '1 hour', safe_at = clock_timestamp() + interval '1 hour';
insert into queue.minute select date_trunc('minute', clock_timestamp() + interval '30 minutes', 'UTC'), 'q', 'future', 1, 0, 0, 0, '{}', '{}';
select pg_temp.count_now();
select ok((select k.counted_to <= clock_timestamp() from queue.minute_cursor k), 'after the clock was set back, counting begins again');
select is_empty($$select from queue.minutes where task = 'future'$$, 'without the minutes that are to come');

-- Roles, limits
select is(test.refusal('select queue.series(' || c || ')'), '22023', 'series(' || c || ')')
from unnest(array['null', '''59 s''', '''8 days''', '''-1 hour''', '''1 hour'', ''90 s''', '''1 hour'', ''2 hours''', '''1 hour'', null', '''1 hour'', ''0''']) c;
select is(test.refusal('select queue.task_stats(' || c || ')'), '22023', 'task_stats(' || c || ')') from unnest(array['null', '''1 mon''']) c;
select lives_ok($$select queue.series('7 days', '1 minute')$$, 'the longest series');
create role pgdefer_minutes_reader;
select queue.grant_access('pgdefer_minutes_reader', 'reader', '{r*}');
truncate queue.minute;
select pg_temp.job('a', 'succeeded'), pg_temp.job('a', 'succeeded', 'r1'), pg_temp.job('b', 'failed') \g /dev/null
select pg_temp.run_all(), pg_temp.count_now();
set role pgdefer_minutes_reader;
select is((select array_agg(m.queue || ' ' || m.task) from queue.minutes m), '{r1 a}', 'a restricted role sees the minutes of its queues');
select is((select sum(s.succeeded + s.failed)::integer from queue.series() s), 1, 'in the series');
select is((select array_agg(t.task || ' ' || t.succeeded) from queue.task_stats() t), '{a 1}', 'and by task');
reset role;
select queue.revoke_access('pgdefer_minutes_reader');
drop role pgdefer_minutes_reader;
select is_empty('select * from queue.check()', 'every invariant holds');

select * from finish();
