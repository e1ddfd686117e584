-- health: the checks of the sessions, the tables and the server, each seen failing.

select plan(18);

set pgdefer.notify = off;
\ir health.helpers.psql

select queue.register_worker('w', info => '{"dead_after": "30 min"}') as worker, queue.register_worker('some', '{q,mov*}', '{"dead_after": "30 min"}') as some \gset
select queue.defer('w') from generate_series(1, 90) \g /dev/null
select queue.finish_many(jsonb_agg(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', 'succeeded'))) from queue.fetch(:worker, null, 100) f \g /dev/null
begin;
insert into queue.finished (id, finished_at, attempts, state) select -n, now(), 1, 'failed' from generate_series(1, 25) n;
select matches(pg_temp.health('failures'), '^warn\|25 of 115 jobs that ended within the hour failed\|', 'many failures');
update queue.finished set finished_at = now() - interval '2 hours' where id > -18;
select matches(pg_temp.health('failures'), '^warn\|8 of 8 jobs', 'most of few');
update queue.finished set finished_at = now() - interval '2 hours' where id > -22;
select matches(pg_temp.health('failures'), '^ok\|4 of 4 jobs', 'of four, all may be bad luck');
rollback;
begin;
update queue.worker set last_seen_at = now() + interval '20 seconds' where name = 'some';
select matches(pg_temp.health_at_begin('clock'), '^warn\|it has been set back by 00:00:20 or more\|', 'a clock that was set back');
update queue.worker set last_seen_at = now() + interval '2 hours' where name = 'some';
select matches(pg_temp.health('clock'), '^fail\|', 'by much');
rollback;
begin;
select queue.schedule('ahead', '@hourly', 'w') \g /dev/null
update queue.schedule set last_run_at = now() + interval '20 days';
select matches(pg_temp.health_at_begin('clock'), '^fail\|it has been set back by 20 days or more\|', 'workers have been seen since, and schedules wait');
select queue.enable_schedule('ahead', false) \g /dev/null
select matches(pg_temp.health('clock'), '^ok\|', 'but not one that is switched off');
rollback;
select matches(pg_temp.health('notifications'), '^ok\|0% of their queue is in use; switched off here', 'it reports that notifications are off');

-- Old transactions
create function pg_temp.later(name text, in_time interval) returns text language sql as $$select concat_ws('|', h.status, h.detail, h.fix) from queue._health(clock_timestamp() + in_time) h where h.name = later.name$$;
create table public.written (id bigint);
begin;
insert into public.written values (1);
set local pgdefer.notify = off;
select queue.pause('health') \g /dev/null
prepare transaction 'health';
select matches(pg_temp.health('transactions'), '^ok', 'a prepared transaction');
select matches(pg_temp.later('admission', '1 min'), '^fail\|a prepared transaction of role .* \(prepared transaction health\)', 'that holds the admission lock');
select matches((select concat_ws('|', h.status, h.detail, h.fix) from pg_prepared_xacts p, queue._health(p.prepared + interval '10 min') h where p.gid = 'health' and h.name = 'transactions'), '^warn\|prepared transaction ''health'' has had a transaction open for 00:10:00: dead rows can''t be removed meanwhile\|commit prepared ''health'', or rollback prepared ''health''', 'after ten minutes');
select matches(pg_temp.later('transactions', '2 h'), '^fail\|prepared transaction ''health'' has had a transaction open for', 'after two hours');
rollback prepared 'health';
select matches(pg_temp.later('transactions', '2 h'), '^ok\|no transaction has been open for 5 minutes', 'and none');

-- Dead rows
begin;
insert into queue.job_override (id) select -n from generate_series(1, 150000) n;
rollback;
select pg_stat_force_next_flush() \g /dev/null
select matches(pg_temp.health('bloat'), '^warn\|job_override: 1500[0-9]+ dead rows, [0-9]+ live, [0-9.]+ [kM]B\|vacuum queue.job_override', 'dead rows of a hot table');
select matches(pg_temp.health('autovacuum'), '^fail\|job_override: 1500[0-9]+ dead rows, last vacuumed never\|', 'that autovacuum leaves');
vacuum queue.job_override;
select pg_stat_force_next_flush() \g /dev/null
select matches(pg_temp.health('bloat'), '^ok', 'until they are vacuumed');
select matches(pg_temp.health('autovacuum'), '^ok', 'and not longer');

select is_empty('select * from queue.check()', 'in order');
select * from finish();
