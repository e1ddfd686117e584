-- Sleeping: how long a worker may wait, and the sleep lock as seen by one session (several: work/worker_sleep.lead_sleeper.spec).

select plan(103);

-- The sleep lock and the lock of the other sleepers, as held by this session.
create function pg_temp.held() returns text language sql as $$
  select coalesce(string_agg(format('%s %s', l.objid, l.mode), ', ' order by l.objid), 'nothing')
  from pg_locks l
  where l.locktype = 'advisory' and l.pid = pg_backend_pid() and l.classid = 1885824102
    and l.database = (select d.oid from pg_database d where d.datname = current_database())
$$;

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
select queue.register_worker('poller', info => '{"listen": false, "dead_after": "1 day"}') as poller \gset
select queue.register_worker('gone', info => '{"dead_after": "1 day"}') as gone \gset
select queue.deregister_worker(:gone) \g /dev/null

select is(test.refusal('select queue.before_sleep(null)'), 'QJ007', 'no worker');
select is(test.refusal('select queue.before_sleep(999999)'), 'QJ007', 'a worker that never was');
select is(test.refusal(format('select queue.before_sleep(%s)', :gone)), 'QJ007', 'a worker that is gone');

select is(test.refusal(format('select queue.before_sleep(%s, ''{}'')', :worker)), '22023', 'no queues');
select is(test.refusal(format('select queue.before_sleep(%s, null, ''{"tasks": [1]}'')', :worker)), '22023', 'tasks are names');
select is(test.refusal(format('select queue.before_sleep(%s, null, ''{"tasks": [null]}'')', :worker)), '22023', 'each of them');
select is(pg_temp.held(), 'nothing', 'a call that is refused leaves no lock');

-- the lead sleeper
select is((select (s.may_sleep, s.wait_for, s.channels)::text from queue.before_sleep(:worker) s), format('(t,00:00:05,"{pgdefer,pgdefer_worker_%s}")', :worker), 'may sleep on both channels, and looks again after 5 s');
select is(pg_temp.held(), '1 ExclusiveLock', 'a single sleeper holds the sleep lock');
select is((select s.may_sleep from queue.before_sleep(:worker) s), true, 'again');
select is(pg_temp.held(), '1 ExclusiveLock', 'holds it once');
select queue.after_sleep(:worker) \g /dev/null
select is(pg_temp.held(), 'nothing', 'after_sleep releases it');
select lives_ok(format('select queue.after_sleep(%s)', :worker), 'again');
select is(pg_temp.held(), 'nothing', 'does nothing');
select queue.before_sleep(:worker) \g /dev/null
select lives_ok(format('select queue.after_sleep(%s)', :gone), 'after_sleep of whichever worker');
select is(pg_temp.held(), 'nothing', 'releases the locks of its session');

-- Producers
begin;
select queue.defer('t');
select is(pg_temp.held(), '1 ShareLock', 'a producer holds the sleep lock shared');
select queue.defer('t'), queue.defer_many('[{"task": "t"}]');
select is(pg_temp.held(), '1 ShareLock', 'until its transaction ends');
rollback;
select is(pg_temp.held(), 'nothing', 'not longer');
create table public.thing (id integer);
create trigger t after insert on public.thing for each row execute function queue.defer_trigger('t');
begin;
insert into public.thing values (1);
select is(pg_temp.held(), '1 ShareLock', 'in a trigger too');
rollback;

-- Workers that do not listen
select is((select (s.may_sleep, s.wait_for, s.channels)::text from queue.before_sleep(:poller) s), '(t,00:00:01,{})', 'a worker that does not listen looks each second');
select is(pg_temp.held(), 'nothing', 'and takes no lock');
set pgdefer.notify = off;
select is((select (s.may_sleep, s.wait_for, s.channels)::text from queue.before_sleep(:worker) s), '(t,00:00:01,{})', 'nor does any if notifications are off');
select is(pg_temp.held(), 'nothing', 'without a lock either');
reset pgdefer.notify;

-- When the worker must fetch again
create function pg_temp.wait_for(otherwise interval default '0') returns interval language plpgsql as $$
declare
  v_wait interval;
begin
  select s.wait_for into v_wait from queue.before_sleep((select w.id from queue.workers w where w.name = 'w')) s;
  perform queue.after_sleep(1);
  return v_wait;
end $$;
create function pg_temp.fetch() returns bigint language sql as $$
  select count(*) from queue.fetch((select w.id from queue.workers w where w.name = 'w'), null, 100)
$$;
select is(pg_temp.wait_for(), interval '5 s', 'nothing is due');
select queue.defer('t') \g /dev/null
select is(pg_temp.wait_for(), interval '0', 'a job that is not admitted: at once');
select is(pg_temp.fetch(), 1::bigint, 'fetched');
select is(pg_temp.wait_for(), interval '5 s', 'not any more');
select queue.defer('t', scheduled_at => clock_timestamp() + interval '3 s') as id \gset
select pg_temp.fetch() \g /dev/null
select ok(pg_temp.wait_for() between interval '0 s' and interval '3 s', 'a schedule: until its time');
select queue.defer('t', scheduled_at => clock_timestamp() + interval '2 s') as id2 \gset
select pg_temp.fetch() \g /dev/null
select ok(pg_temp.wait_for() between interval '0 s' and interval '2 s', 'the nearest');
select queue.cancel(:id), queue.cancel(:id2) \g /dev/null
select is(pg_temp.wait_for(), interval '5 s', 'cancelled ones are not waited for');
select queue.defer('t', scheduled_at => clock_timestamp() + interval '1 hour') as id \gset
select pg_temp.fetch() \g /dev/null
select is(pg_temp.wait_for(), interval '5 s', 'those far off cost nothing');
select queue.pause('q', clock_timestamp() + interval '2 s') \g /dev/null
select queue.defer('t', queue => 'q') as paused \gset
select pg_temp.fetch() \g /dev/null
select ok(pg_temp.wait_for() between interval '0 s' and interval '2 s', 'the end of a pause');
select queue.resume('q') \g /dev/null
select is(pg_temp.fetch(), 1::bigint, 'resumed');
select is(pg_temp.wait_for(), interval '5 s', 'is no end any more');
select queue.defer('t', options => jsonb_build_object('expires_at', clock_timestamp() + interval '2 s'), queue => 'unserved') as id \gset
select queue.fetch(:worker, array['none']) \g /dev/null
select ok(pg_temp.wait_for() between interval '0 s' and interval '2 s', 'the end of a job''s life');
select queue.cancel(:id) \g /dev/null
select queue.extend(j.id, j.claim, interval '2 s') from queue.jobs j where j.id = :paused \g /dev/null
select ok(pg_temp.wait_for() between interval '0 s' and interval '2 s', 'the end of a lease');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.id = :paused \g /dev/null
select is(pg_temp.wait_for(), interval '5 s', 'which ends with its claim');

select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 't', 'scheduled_at', '2999-01-01Z')) from generate_series(1, 500) n)) \g /dev/null
begin;
select queue._lock_admission(true) \g /dev/null
select queue._admit(100) \g /dev/null
commit;
select is(pg_temp.wait_for(), interval '0', 'a backlog: at once');
do $$
begin
  -- on a busy machine a fetch reads less of it
  while exists (select from queue.unadmitted) loop
    if pg_temp.fetch() > 0 then
      raise 'a job of the future was fetched';
    end if;
  end loop;
end $$;
select is(pg_temp.fetch(), 0::bigint, 'until it is read');
select is(pg_temp.wait_for(), interval '5 s', 'not any more');

begin;
select queue.defer('t');
select pg_temp.wait_for() \g /dev/null
commit;
select is(pg_temp.held(), 'nothing', 'a producer that sleeps itself is left with nothing');

-- Session settings that must not break a function
select set_config('pgdefer.sleeper', 'nonsense', false) \g /dev/null
select is((select s.may_sleep from queue.before_sleep(:worker) s), true, 'nonsense in the session''s setting: it sleeps');
select queue.after_sleep(:worker) \g /dev/null
select is(pg_temp.held(), 'nothing', 'and wakes');
select set_config('pgdefer.sleeper', 'lead', false) \g /dev/null
set client_min_messages = error;
select lives_ok(format('select queue.after_sleep(%s)', :worker), 'a state that is not true does no harm');
select is(pg_temp.held(), 'nothing', 'to anybody');
reset client_min_messages;
select is((select s.may_sleep from queue.before_sleep(:worker) s), true, 'and it sleeps again');
select is(pg_temp.held(), '1 ExclusiveLock', 'with the sleep lock');

-- Far back in the line of sleepers
select queue.before_sleep(:worker, options => '{"in_line": true}') \g /dev/null
update queue.sleeper set joined_at = joined_at - interval '1 s';
create function pg_temp.behind(n integer) returns interval language plpgsql as $$
declare
  v_worker bigint := (select s.worker_id from queue.sleeper s order by s.place desc limit 1);
begin
  insert into queue.sleeper (worker_id, is_busy, place, served, pid)
  select queue.register_worker('ahead'), false, -i, s.served, s.pid
  from queue.sleeper s, generate_series((select count(*) from queue.sleeper), behind.n) i
  where s.worker_id = v_worker;
  return (select s.wait_for from queue.before_sleep(v_worker, options => '{"in_line": true}') s);
end $$;
select is(pg_temp.behind(2), interval '2 s', 'the third looks every 2 s');
select is(pg_temp.behind(3), interval '10 s', 'the fourth every 10 s');
select is(pg_temp.behind(20), interval '10 s', 'the twentieth behind the first too');
select is(pg_temp.behind(30), interval '15 s', 'those behind it more rarely');
select is(pg_temp.behind(80), interval '30 s', 'but not less often than every 30 s');
select queue.deregister_worker(w.id) from queue.worker w where w.name = 'ahead' \g /dev/null
select queue.after_sleep(:worker) \g /dev/null

-- A ready job whose deadline comes within deadline_within, 4 s from now
select queue.defer('t', queue => 'near', deadline => now() + interval '30 minutes') as near \gset
select queue.tick() \g /dev/null
create function pg_temp.waits(queues text[]) returns interval language sql as $$
  select s.wait_for
  from (select max(j.deadline) - clock_timestamp() - interval '4 s' as within from queue.jobs j where j.queue = 'near') x
  cross join lateral queue.before_sleep((select w.id from queue.workers w where w.name = 'w'), queues, jsonb_build_object('deadline_within', x.within)) s
$$;
select ok(pg_temp.waits('{near}') between '0' and '4 s', 'a worker looks when its deadline is near enough');
select ok(pg_temp.waits(null) between '0' and '4 s', 'also one of all queues');
select is(pg_temp.waits('{other}'), interval '5 s', 'but not one of other queues');
select is((select s.wait_for from queue.before_sleep(:worker, '{near}', '{"deadline_within": "1 hour"}') s), interval '5 s', 'nor for one that is near already');
select is((select s.wait_for from queue.before_sleep(:worker, '{near}') s), interval '5 s', 'or without that option');
select queue.defer('t', queue => 'near') \g /dev/null
select queue.delete(array[:near]) \g /dev/null
select queue.tick() \g /dev/null
select is((select s.wait_for from queue.before_sleep(:worker, '{near}', '{"deadline_within": "1 hour"}') s), interval '5 s', 'a job without a deadline never is');
select queue.after_sleep(:worker) \g /dev/null

-- A queue that has used up its rate is due when its next start is
select queue.configure_queue('rated', '{"rate": {"limit": 1, "per": "4 seconds"}}') \g /dev/null
select queue.defer('t', queue => 'rated'), queue.defer('t', queue => 'rated') \g /dev/null
select is((select count(*) from queue.fetch(:worker, '{rated}', 5)), 1::bigint, 'one start within 4 s');
select queue.tick() \g /dev/null
update queue.rate_start set at = clock_timestamp() where key = 'qrated';
select cmp_ok(s.wait_for, '<=', interval '4 s', 'the next is waited for') from queue.before_sleep(:worker, '{rated}') s;
select queue.after_sleep(:worker) \g /dev/null

-- Whether the queues are drained: none of their jobs starts without help
create function pg_temp.is_drained(queues text[] default '{d}', options jsonb default null) returns boolean language plpgsql as $$
declare
  v_is boolean;
begin
  select s.is_drained into v_is from queue.before_sleep((select w.id from queue.workers w where w.name = 'w'), queues, options) s;
  perform queue.after_sleep(1);
  return v_is;
end $$;
create function pg_temp.look() returns bigint language sql as $$  -- admits, and claims nothing
  select count(*) from queue.fetch((select w.id from queue.workers w where w.name = 'w'), '{none}', 1)
$$;
create function pg_temp.rid() returns void language sql as $$
  select queue.delete(array(select j.id from queue.jobs j), true)
$$;
select pg_temp.rid() \g /dev/null
select pg_temp.look() \g /dev/null
select is(pg_temp.is_drained(), true, 'an empty queue is drained');
select is(pg_temp.is_drained(null), true, 'so are all of them');
select queue.defer('t', queue => 'd') as id \gset
select is(pg_temp.is_drained(), false, 'not with a job that is not admitted');
select is(pg_temp.is_drained('{d*}'), false, 'seen by a pattern too');
select is(pg_temp.is_drained(null), false, 'and by who asks for all');
select is(pg_temp.is_drained('{e}'), true, 'another queue is');
select pg_temp.look() \g /dev/null
select is(pg_temp.is_drained(), false, 'nor with one that is ready');
select is(pg_temp.is_drained('{e,f*}'), true, 'which other queues need not wait for');
select is(pg_temp.is_drained(options => '{"tasks": ["t", "u"]}'), false, 'its task among those asked for');
select is(pg_temp.is_drained(options => '{"tasks": ["u"]}'), true, 'and not');
select is(pg_temp.is_drained(options => '{"deadline_within": "1 hour"}'), true, 'its deadline is not within that');
select queue.defer('t', queue => 'd', deadline => now() + interval '30 minutes') as near \gset
select pg_temp.look() \g /dev/null
select is(pg_temp.is_drained(options => '{"deadline_within": "1 hour"}'), false, 'and is');
select is(test.refusal(format('select queue.before_sleep(%s, null, %L)', :worker, o)), '22023', 'options ' || o)
from (values ('{"order": "listed"}'), ('{"tasks": "t"}'), ('{"deadline_within": "soon"}'), ('{"in_line": 1}'), ('[]')) v (o);
select queue.pause('d') \g /dev/null
select is(pg_temp.is_drained(), true, 'paused jobs need help');
select queue.resume('d') \g /dev/null
select is(pg_temp.is_drained(), false, 'resumed');
select is((select count(*) from queue.fetch(:worker, '{d}', 10)), 2::bigint, 'both are claimed');
select is(pg_temp.is_drained(), true, 'running jobs are for their worker to end');
select pg_temp.rid() \g /dev/null

-- jobs that need help
select queue.defer('t', queue => 'd', scheduled_at => now() + interval '1 hour'), queue.defer('t', queue => 'd', options => '{"held": true}') \g /dev/null
select queue.defer('t', queue => 'd', lock => 'l', scheduled_at => now() + interval '1 hour') as first, queue.defer('t', queue => 'd', lock => 'l') as second,
       queue.defer('t', queue => 'e', options => '{"held": true}') as need \gset
select queue.defer('t', queue => 'd', needs => array[:need]) \g /dev/null
select pg_temp.look() \g /dev/null
select is(pg_temp.is_drained(), true, 'the future, held, blocked, waiting for a need');
select queue.reschedule(:first, now() - interval '1 s') \g /dev/null
select is(pg_temp.is_drained(), false, 'its time has come');
select pg_temp.rid() \g /dev/null

-- jobs that wait for the rate of a key, also beside the one that has the time
select queue.defer('r', queue => x.queue, options => '{"concurrency": [{"key": "smtp", "rate": {"limit": 1, "per": "1 hour"}}]}') from unnest('{d,d,e}'::text[]) x (queue) \g /dev/null
select is((select count(*) from queue.fetch(:worker, '{d}', 10)), 1::bigint, 'a rate of 1');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.state = 'running' \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.is_drained(), false, 'a job that the rate of its key holds back starts later by itself');
select is((select s.is_drained from queue.before_sleep(:worker, '{e}') s), false, 'in each queue that has such jobs');
select is((select s.is_drained from queue.before_sleep(:worker, '{f}') s), true, 'not in others');
select is((select s.is_drained from queue.before_sleep(:worker, '{d}', '{"tasks": ["r"]}') s), false, 'a worker of its task');
select is((select s.is_drained from queue.before_sleep(:worker, '{d}', '{"tasks": ["t"]}') s), true, 'or of others');
select queue.pause('d') \g /dev/null
select is(pg_temp.is_drained(), true, 'nor in a paused queue');
select queue.resume('d'), queue.after_sleep(:worker) \g /dev/null
select queue.cancel(j.id) from queue.jobs j where j.task = 'r' and j.finished_at is null \g /dev/null

-- jobs that need none
select queue.configure_queue('d', '{"max_running": 1}') \g /dev/null
select queue.defer('t', queue => 'd'), queue.defer('t', queue => 'd') \g /dev/null
select is((select count(*) from queue.fetch(:worker, '{d}', 10)), 1::bigint, 'max_running 1');
select is(pg_temp.is_drained(), false, 'a job that its queue''s limit holds back starts later by itself');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.state = 'running' \g /dev/null
select is((select count(*) from queue.fetch(:worker, '{d}', 10)), 1::bigint, 'the other');
select queue.configure_queue('d', '{"max_running": null}') \g /dev/null
update queue.worker set last_seen_at = '2000-01-01', dead_after = '0' where id = :worker;
select queue.register_worker('w2') as other \gset
update queue.worker set name = 'w ' || id where id = :worker;
update queue.worker set name = 'w' where id = :other;
select is(pg_temp.is_drained(), false, 'a dead worker''s claim');
select is((select reaped from queue.reap()), 1, 'is reaped');
select is(pg_temp.is_drained(), false, 'and is to be claimed alone');
select id, claim from queue.fetch(:other, '{d}', 1) \gset
select is(pg_temp.is_drained(), true, 'by whom it is');
begin;
select queue._lock_admission(true) \g /dev/null
select is((select count(*) from queue.pending_settlement), 0::bigint, 'no settlement is pending');
commit;
insert into queue.pending_settlement (job_id, kind, flags) values (:id, 'ended', 0);
select is(pg_temp.is_drained(), false, 'a pending settlement may free something');
delete from queue.pending_settlement;
select pg_temp.rid() \g /dev/null

-- Many jobs of another queue
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 't', 'queue', 'e')) from generate_series(1, 999) n)) \g /dev/null
select is(pg_temp.is_drained(), true, '999 jobs of another queue that are not admitted are looked through');
select queue.defer('t', queue => 'e') \g /dev/null
select is(pg_temp.is_drained(), false, 'behind 1,000 there may be more');
select pg_temp.look() \g /dev/null
select pg_temp.look() \g /dev/null
select is(pg_temp.is_drained(), true, 'until they are admitted');

select * from finish();
