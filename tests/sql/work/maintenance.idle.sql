-- Maintenance by heartbeat and idle fetches: a client that never calls tick sees every job run.

select plan(19);

select queue.register_worker('w') as worker, queue.register_worker('dead') as dead \gset

\ir workers.helpers.psql

-- A dead worker
select queue.defer('t') as id \gset
select count(*) from queue.fetch(:dead) \g /dev/null
select pg_temp.kill(:dead);
select is_empty(format('select * from queue.heartbeat(%s)', :worker), 'a heartbeat');
select results_eq(format('select id, attempt from queue.fetch(%s)', :worker), format('values (%s::bigint, 2)', :id), 'ends the claims of the dead');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.state = 'running' \g /dev/null

-- Work that is due
select queue.defer('e', scheduled_at => now() + interval '1 hour', options => '{"expires_at": "2999-01-01T00:00:00Z"}') as expires \gset
select queue.heartbeat(:worker) \g /dev/null
update queue.expiry set at = clock_timestamp();
select queue.heartbeat(:worker) \g /dev/null
select is((select state || ' ' || reason from queue.jobs where id = :expires), 'cancelled expired', 'it lets jobs expire');
select queue.schedule('s', 'every 1 second', 'recurs') \g /dev/null
select pg_sleep_until(next_run_at) from queue.schedules \g /dev/null
select queue.heartbeat(:worker) \g /dev/null
select is((select count(*) > 0 from queue.jobs where task = 'recurs'), true, 'it runs schedules');
select queue.unschedule('s') \g /dev/null
select queue.cancel(id) from queue.jobs where task = 'recurs' and state = 'ready' \g /dev/null
select queue.defer('old', options => '{"retain": "0 s"}') as old \gset
select id, claim from queue.fetch(:worker, options => '{"tasks": ["old"]}') \gset
select queue.succeed(:id, :claim) \g /dev/null
update queue.finished set purge_at = clock_timestamp() - interval '1 hour' where id = :id;
select queue.heartbeat(:worker) from generate_series(1, 1) \g /dev/null
select queue.heartbeat(:worker) \g /dev/null
select is_empty(format('select * from queue.jobs where id = %s', :old), 'it prunes');

-- A fetch that finds nothing
select queue.defer('leased') as id \gset
select id, claim from queue.fetch(:worker, options => '{"tasks": ["leased"]}') \gset
select queue.extend(:id, :claim, '1 microsecond') \g /dev/null
select is_empty(format('select * from queue.fetch(%s, %L)', :worker, '{none}'), 'a fetch that finds nothing');
select is((select state || ' ' || crashes from queue.jobs where id = :id), 'ready 1', 'ends a lease');
select is((select id from queue.finish_and_fetch(:worker, '[]')), :id::bigint, 'whose job continues');
select queue.extend(:id, j.claim, '1 microsecond') from queue.jobs j where j.id = :id \g /dev/null
select is_empty(format('select * from queue.finish_and_fetch(%s, %L, %L)', :worker, '[]', '{none}'), 'so does finish_and_fetch');
select is((select crashes from queue.jobs where id = :id), 2, 'which finds nothing');
select id, claim from queue.fetch(:worker) \gset
select queue.succeed(:id, :claim) \g /dev/null

-- A call that has no time left still ends twenty claims
select queue.register_worker('dead') as dead \gset
select queue.defer('t') from generate_series(1, 30) \g /dev/null
select count(*) from queue.fetch(:dead, max_jobs => 30) \g /dev/null
select pg_temp.kill(:dead);
select is((select reaped from queue._reap('0 s')), 20, 'twenty claims end, however little time there is');
select is((select reaped from queue._reap('0 s')), 10, 'then the others');
select queue.cancel(id) from queue.jobs where task = 't' and state = 'ready' \g /dev/null

-- Cases in which a heartbeat runs no maintenance
select queue.register_worker('dead') as dead \gset
select queue.defer('t') as id \gset
select count(*) from queue.fetch(:dead) \g /dev/null
select pg_temp.kill(:dead);
begin isolation level repeatable read;
select lives_ok(format('select * from queue.heartbeat(%s)', :worker), 'in another isolation level it beats');
commit;
select is((select state from queue.jobs where id = :id), 'running', 'and no more');
begin;
select pg_current_xact_id() \g /dev/null
select lives_ok(format('select * from queue.heartbeat(%s)', :worker), 'in a transaction that has written');
commit;
select is((select state from queue.jobs where id = :id), 'running', 'too');

-- An error in maintenance fails nothing else
create function pg_temp.breaks() returns trigger language plpgsql as $$ begin raise 'broken'; end $$;
create trigger breaks before update on queue.worker for each row when (new.gone_at is not null) execute function pg_temp.breaks();
set client_min_messages to error;
update queue.worker set last_seen_at = last_seen_at - interval '10 s' where id = :worker;
select is_empty(format('select * from queue.heartbeat(%s)', :worker), 'a heartbeat answers whatever fails in maintenance');
select ok((select last_seen_at > clock_timestamp() - interval '5 s' from queue.worker where id = :worker), 'and is noted');
drop trigger breaks on queue.worker;
select queue.heartbeat(:worker) \g /dev/null
select is((select state from queue.jobs where id = :id), 'ready', 'the next one does it');

select * from finish();
