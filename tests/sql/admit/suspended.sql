-- The fast path of signalled jobs to their lane leads to the same place as the way through all gates.

select plan(27);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
select queue.register_task('t', '{}') \g /dev/null

-- What a signal makes of a job: its row, its lane, whether the lane's mark lies above it, the value of its step,
-- the signals that are left. By the fast path, if it takes the job, or through the gates. All is rolled back.
create function pg_temp.resumed(id bigint, is_short boolean) returns jsonb language plpgsql as $$
declare
  v_others bigint[] := array[resumed.id];
begin
  perform queue._lock_admission(true);
  if is_short then
    v_others := queue._resume_signalled(array[resumed.id]);
  end if;
  if v_others is not null then
    perform queue._advance(p_arrived => queue._take_signals(v_others, null));
  end if;
  raise exception using errcode = 'ZZ000', message = jsonb_build_object(
    'ready', (select to_jsonb(aj) - 'lane' from queue.active_job aj where aj.id = resumed.id),
    'lane', (select jsonb_build_array(l.queue, l.priority, l.kind, l.is_idle, (aj.deadline, aj.id) >= (l.low_deadline, l.low_id))
      from queue.active_job aj join queue.lane l using (lane) where aj.id = resumed.id),
    'waiting', (select to_jsonb(w) - 'lane' from queue.waiting w where w.id = resumed.id),
    'suspended', (select count(*) from queue.suspended w where w.job_id = resumed.id),
    'state', (select concat_ws(' ', j.state, j.reason) from queue.jobs j where j.id = resumed.id),
    'step', (select jsonb_build_array(s.value, s.finished_at is not null) from queue.step s where s.job_id = resumed.id),
    'left', (select jsonb_agg(r.payload order by r.no) from queue.received_signal r where r.job_id = resumed.id))::text;
exception when sqlstate 'ZZ000' then
  return sqlerrm::jsonb || jsonb_build_object('is_short', v_others is null);
end $$;

create table pg_temp.made (name text, id bigint, is_short boolean);
insert into pg_temp.made
select o.name, (select d from queue.defer_many(jsonb_build_array(jsonb_build_object('task', 't') || o.options)) d), o.is_short
from (values
  ('a job', '{}'::jsonb, true),
  ('a job with a deadline', '{"deadline": "2099-01-01 00:00Z"}', true),
  ('a job with a timeout', '{"options": {"timeout": "1 hour"}}', true),
  ('a job with a retention', '{"options": {"retain": "1 hour"}}', true),
  ('a job with a priority', '{"priority": 5}', true),
  ('a job that was deferred for a time', '{"scheduled_at": "2020-01-01 00:00Z"}', true),
  ('a job with an ordered lock', '{"lock": "o"}', false),
  ('a job with a mutex lock', '{"lock": "m", "options": {"lock_mode": "mutex"}}', false),
  ('a job with a key', '{"concurrency_key": "k", "concurrency_limit": 1}', false),
  ('a job that expires', '{"options": {"expires_at": "2099-01-01 00:00Z"}}', false),
  ('a job of a share', '{"queue": "shared", "options": {"share": "a"}}', false),
  ('a job of a limited queue', '{"queue": "limited"}', false),
  ('a job that is needed', '{}', true),
  ('a job that was rescheduled', '{}', false),
  ('a job of a queue without a lane', '{"queue": "left"}', false),
  ('a job that is held', '{}', false),
  ('a job whose task is paused', '{}', false)) o (name, options, is_short);

select count(queue.wait(f.id, f.claim, 'w', signal => 's')) from queue.fetch(:worker, max_jobs => 100) f \g /dev/null
select queue.tick() \g /dev/null
select is((select count(*) from queue.jobs j where j.reason = 'signal'), 17::bigint, 'all wait for their signal');

select queue.configure_queue('limited', '{"max_running": 3}') \g /dev/null
select queue.defer('needs', needs => array[m.id]) from pg_temp.made m where m.name = 'a job that is needed' \g /dev/null
select queue.reschedule(m.id, now() + interval '1 day') from pg_temp.made m where m.name = 'a job that was rescheduled' \g /dev/null
select queue.hold(m.id) from pg_temp.made m where m.name = 'a job that is held' \g /dev/null
select queue.move(array[m.id], 'nowhere') from pg_temp.made m where m.name = 'a job of a queue without a lane' \g /dev/null
select queue.tick() \g /dev/null

-- the oldest of its name is taken
select queue.signal(m.id, 'other', '0') from pg_temp.made m \g /dev/null
select queue.signal(m.id, 's', '1') from pg_temp.made m \g /dev/null
select queue.signal(m.id, 's', '2') from pg_temp.made m \g /dev/null
update queue.lane l set is_idle = true where l.priority = 5;

select is(pg_temp.resumed(m.id, true), pg_temp.resumed(m.id, false) || jsonb_build_object('is_short', m.is_short), m.name)
from pg_temp.made m where m.name <> 'a job whose task is paused' order by m.id;
insert into queue.pause (task, is_paused) values ('t', true);
select is(pg_temp.resumed(m.id, true), pg_temp.resumed(m.id, false) || jsonb_build_object('is_short', m.is_short), m.name)
from pg_temp.made m where m.name = 'a job whose task is paused';
delete from queue.pause;

select queue.tick() \g /dev/null
select is_empty('select * from queue.check()', 'all is sound');

-- Of many signals an admission takes 500, so that it does not hold its lock long; none is forgotten.
create function pg_temp.admit() returns bigint language plpgsql as $$
begin
  perform queue._lock_admission(true);
  perform from queue._admit(1000);
  return (select count(*) from queue.jobs j where j.task = 'one of many' and j.state = 'ready');
end $$;

select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'one of many')) from generate_series(1, 1020))) \g /dev/null
do $$
begin
  while exists (select from queue.jobs j where j.task = 'one of many' and j.claims = 0) loop
    perform queue.wait(f.id, f.claim, 'w', signal => 's')
    from queue.fetch((select w.id from queue.workers w), max_jobs => 200, options => '{"tasks": ["one of many"]}') f;
  end loop;
end $$;
select pg_temp.admit() from generate_series(1, 3) \g /dev/null
select queue.signal(j.id, 's') from queue.jobs j where j.task = 'one of many' and j.reason = 'signal' order by j.id \g /dev/null
select is(pg_temp.admit(), 500::bigint, 'one admission takes 500');
select queue.publish('beside the signals') \g /dev/null
select is(pg_temp.admit(), 1000::bigint, 'the next one, too, when something else has to be settled');
select is_empty('select * from queue.check()', 'the others still wait');
select ok(b.wait_for <= '10 ms', 'and no worker sleeps long meanwhile') from queue.before_sleep(:worker, null) b;
select is(pg_temp.admit(), 1020::bigint, 'in the end all are ready');
select is_empty('select * from queue.check()', 'and all is sound');

-- Of very many it takes an eighth, so that none is handed over more than a few times.
begin;
select string_agg(k.kind || ' ' || k.n, ', ' order by k.kind) as taken
from (select k.kind, count(*) as n
  from queue._hand_signals_over(array_fill(1::bigint, '{8800}'),
    array_fill('signal'::text, '{8000}') || array_fill('recheck'::text, '{800}'), array_fill(0::smallint, '{8800}')) h,
  unnest(h.kinds) k (kind) group by k.kind) k \gset
select count(*) as left from queue.pending_settlement where kind = 'signal' \gset
rollback;
select is(:'taken'::text, 'recheck 800, signal 1000', 'an eighth');
select is(:left::integer, 7000, 'and hands the others over');

select * from finish();
