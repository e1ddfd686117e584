-- health: the checks of the version, workers, queues and due work, each seen failing.

select plan(40);

set pgdefer.notify = off;
\ir health.helpers.psql

select is((select array_agg(distinct status) from queue.health() where name <> 'workers'), '{ok}', 'and it is well');
select results_eq($$select status, detail, fix from queue.health() where name = 'workers'$$, $$values ('warn', '0 alive', 'Start a worker: pgdefer worker -A MODULE')$$, 'but has no worker');
select is((select count(distinct name)::integer from queue.health()), 18, 'health has a row for each check');

-- Jobs that nobody has admitted
begin;
create function pg_temp.health_later(name text) returns text language sql as $$select concat_ws('|', h.status, h.detail) from queue._health(clock_timestamp() + interval '6 s') h where h.name = health_later.name$$;
select queue.defer('t', scheduled_at => '2999-01-01Z'), queue.defer('t', options => '{"held": true}'), queue.defer('t', needs => array[currval('queue.job_id_seq')]) \g /dev/null
select is(pg_temp.health_later('workers'), 'warn|0 alive', 'new jobs that are not ready');
select queue.defer('t', queue => 'new'), queue.defer('t', queue => 'new'), queue.defer('t', queue => 'sleeping') \g /dev/null
select matches(pg_temp.health('workers'), '^warn\|0 alive\|', 'new jobs have some seconds');
select is(pg_temp.health_later('workers'), 'fail|0 alive, 3 jobs ready or running', 'then a worker should have admitted them');
select is(pg_temp.health_later('queues'), 'fail|ready jobs in 2 queues that no live worker serves: new, sleeping', 'and served their queues');
insert into queue.pause (queue, is_paused) values ('new', true);
select is(pg_temp.health_later('queues'), 'fail|ready jobs in 1 queue that no live worker serves: sleeping', 'but for a paused one');
select queue.defer_many((select jsonb_agg('{"task": "t"}'::jsonb) from generate_series(1, 10001))) \g /dev/null
select is(pg_temp.health_later('workers'), 'fail|0 alive, more than 10000 jobs ready or running', 'many of them');
rollback;

select queue.register_worker('w', info => '{"dead_after": "30 min"}') as worker, queue.register_worker('some', '{q,mov*}', '{"dead_after": "30 min"}') as some \gset
select queue.defer('t', queue => 'q'), queue.defer('t', queue => 'q', scheduled_at => '2999-01-01Z'), queue.defer('t', queue => 'moved'), queue.defer('t', queue => 'win') \g /dev/null
select queue.tick() \g /dev/null
select is((select string_agg(h.name || ' ' || h.status, ', ') from queue.health() h where h.status <> 'ok'), null, 'all is well');
begin;
update queue.installation set version = '0.0.1';
select matches(pg_temp.health('version'), '^fail\|code .*, tables 0\.0\.1\|Install a release in between', 'tables from which no migration leads');
update queue.installation set version = '99.0.0';
select matches(pg_temp.health('version'), '^fail\|code .*, tables 99\.0\.0\|Upgrade the code', 'later tables');
rollback;
-- Says since when workers can reach the server. Outside of an era nobody knows.
create function pg_temp.up_since(p_at timestamptz, p_era text default queue._era()) returns void language sql as $$
  update queue.installation set up_since = p_at, era = p_era;
  update queue.installation i set written = i.xmin;
$$;
begin;
update queue.worker set last_seen_at = now() - interval '1 hour', dead_after = '1 min';
select pg_temp.up_since(now() - interval '30 s') \g /dev/null
select matches(pg_temp.health('workers'), '^warn\|0 alive, 2 silent since before the server started or was promoted, [0-9]+ jobs ready or running\|'
  'Wait: they have 00:01:00 from then on to come back', 'workers that have time to come back');
select matches(pg_temp.health('queues'), '^ok', 'their queues are served');
update queue.worker set last_seen_at = now() where name = 'some';
select is(pg_temp.health('workers'), 'ok|1 alive, 1 silent since before the server started or was promoted', 'one has come');
update queue.worker set last_seen_at = now() - interval '1 hour';
select pg_temp.up_since(now() - interval '80 s') \g /dev/null
select matches(pg_temp.health('workers'), '^fail\|0 alive, 2 dead and not reaped, [0-9]+ jobs', 'after that nobody waits for them');
select pg_temp.up_since(now() - interval '80 s', 'another') \g /dev/null
select matches(pg_temp.health('workers'), '^fail\|0 alive, 2 silent .*, [0-9]+ jobs ready or running\|Start a worker: pgdefer worker -A MODULE$', 'nobody has come since the server started');
rollback;
begin;
select pg_temp.up_since('-infinity') \g /dev/null
update queue.worker set last_seen_at = last_seen_at - interval '1 hour' where name = 'some';
select matches(pg_temp.health('workers'), '^fail\|1 alive, 1 dead and not reaped\|Start a worker, or call queue\.tick', 'a dead worker that nobody reaps');
update queue.worker set last_seen_at = last_seen_at - interval '1 hour';
select matches(pg_temp.health('workers'), '^fail\|0 alive, 2 dead and not reaped, [0-9]+ jobs ready or running\|', 'no live one, and jobs');
update queue.worker set gone_at = now() - interval '2 min', has_left = true;
select matches(pg_temp.health('workers'), '^fail\|0 alive, [0-9]+ jobs ready or running\|Start a worker', 'workers that have left');
update queue.active_job set claim = 1, claimed_at = now(), worker_id = (select min(w.id) from queue.worker w);
select matches(pg_temp.health('workers'), '^fail\|0 alive, 1 dead and not reaped, [0-9]+ jobs', 'and one with jobs that nobody has given back');
update queue.worker set gone_at = now(), is_clear = true;
select matches(pg_temp.health('workers'), '^fail\|0 alive, [0-9]+ jobs ready or running\|Start a worker', 'none at all');
rollback;
begin;
update queue.worker set queues = '{win}' where queues is null;
select matches(pg_temp.health('queues'), '^ok', 'queues that are served');
update queue.worker set queues = '{win,q}';
select matches(pg_temp.health('queues'), '^fail\|ready jobs in 1 queue that no live worker serves: moved\|', 'one that is not');
update queue.worker set queues = '{win}';
select matches(pg_temp.health('queues'), '^fail\|ready jobs in 2 queues that no live worker serves: moved, q\|', 'queues that are not');
rollback;
select queue.pause(task => 'idle') \g /dev/null
select queue.defer('idle', queue => 'win') from generate_series(1, 2) \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.health('paused'), 'warn|ready jobs of paused tasks: idle|select queue.resume(task => name)', 'a paused task with ready jobs');
select queue.resume(task => 'idle'), queue.delete(array(select j.id from queue.jobs j where j.task = 'idle')) \g /dev/null
begin;
select queue.pause('win') \g /dev/null
select is(pg_temp.health('paused'), 'warn|ready jobs in 1 paused queue: win|select queue.resume(name)', 'a paused queue with ready jobs');
update queue.worker set queues = '{q,moved}';
select matches(pg_temp.health('queues'), '^ok', 'which needs no worker');
rollback;
begin;
update queue.waiting set at = now() - interval '2 minutes' where reason = 'schedule';
update queue.cursor set due_at = '-infinity';
select matches(pg_temp.health_at_begin('due'), '^warn\|overdue for 00:02:00\|Start a worker, or call queue\.tick', 'a job that is overdue');
update queue.waiting set at = now() - interval '2 hours' where reason = 'schedule';
select matches(pg_temp.health_at_begin('due'), '^fail\|overdue for 02:00:00\|', 'for long');
rollback;
begin;
insert into queue.lease values (1, 1, now() - interval '2 minutes', true);
select matches(pg_temp.health_at_begin('due'), '^warn\|overdue for 00:02:00\|', 'a lease that nobody reaps');
rollback;
select queue.schedule('nightly', '0 3 * * *', 'report'), queue.schedule('hourly', '@hourly', 'report') \g /dev/null
begin;
update queue.schedule set due_at = now() - interval '2 minutes' where name = 'nightly';
select matches(pg_temp.health('schedules'), '^fail\|1 late, 0 with an error: nightly\|', 'a recurring run that is late');
rollback;
begin;
update queue.schedule set reason = 'no such thing' where name = 'nightly';
select matches(pg_temp.health('schedules'), '^warn\|0 late, 1 with an error: nightly: no such thing\|', 'one that cannot be deferred');
update queue.schedule set is_enabled = false, due_at = null, next_run_at = null where name = 'nightly';
select matches(pg_temp.health('schedules'), '^ok', 'or that is disabled');
rollback;

-- Handlers that wait for their children
select queue.defer('parent') as parent \gset
select claim from queue.fetch(:worker, options => jsonb_build_object('ids', array[:parent])) \gset
select queue.defer('child', options => jsonb_build_object('parent', :parent)) as child, queue.defer('child') as other \gset
select queue.tick() \g /dev/null
select queue.await_result(:child), queue.await_result(:other) \g /dev/null
select matches(pg_temp.health('results'), '^ok', 'a result is awaited');
update queue.awaited set since = since - interval '31 s';
select is(pg_temp.health('results'), format('warn|1 job awaited and ready, but not started, while the jobs that deferred them run: job %s of job %s|'
  'See select queue.why(id). If waiting handlers fill all slots, start another worker; or let them wait by queue.await_jobs (call and gather in Python), which frees their slots', :child, :parent), 'for long');
begin;
update queue.lane set paused_until = 'infinity';
select matches(pg_temp.health('results'), '^ok', 'in a paused queue');
rollback;
select id as child, claim as child_claim from queue.fetch(:worker, options => jsonb_build_object('ids', array[:child])) \gset
select matches(pg_temp.health('results'), '^ok', 'a child that runs');
select queue.release(:child, :child_claim), queue.succeed(:parent, :claim) \g /dev/null
select matches(pg_temp.health('results'), '^ok', 'a parent that has ended');

select is_empty('select * from queue.check()', 'in order');
select * from finish();
