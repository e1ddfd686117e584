-- A job whose signal has come is claimed at once, as a newcomer is, and becomes what it becomes by the long way.

select plan(27);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
select queue.register_task('t', '{}') \g /dev/null

-- What fetch makes of what is pending: its answer, and what it leaves behind. Once as if it had found only newcomers
-- before, else by the long way. is_short: it left the cursor alone. All is rolled back.
create function pg_temp.fetched(is_dry boolean, queues text[] default null) returns jsonb language plpgsql as $$
declare
  v_tick bigint := (select k.tick from queue.cursor_now k);
  v_answer jsonb;
begin
  perform set_config('pgdefer.was_dry', case when fetched.is_dry then 'on' else 'off' end, false), setseed(0.5);
  select jsonb_agg(to_jsonb(f) - 'claim' order by f.id) into v_answer
  from queue.fetch((select w.id from queue.workers w where w.name = 'w'), fetched.queues, 10) f;
  raise exception using errcode = 'ZZ000', message = jsonb_build_object(
    'is_short', v_tick = (select k.tick from queue.cursor_now k),
    'rest', jsonb_build_object('answer', v_answer,
      'active', (select jsonb_agg(to_jsonb(aj) - '{claim,claimed_at}'::text[] || jsonb_build_object('is_claimed', aj.claim is not null and aj.claimed_at is not null) order by aj.id) from queue.active_job aj),
      'leases', (select jsonb_agg(v.id order by v.id) from queue.lease v),
      'waiting', (select jsonb_agg(to_jsonb(w) order by w.id) from queue.waiting w),
      'suspended', (select jsonb_agg(w.job_id order by w.job_id) from queue.suspended w),
      'steps', (select jsonb_agg(jsonb_build_array(s.job_id, s.name, s.value, s.finished_at is not null) order by s.job_id, s.name) from queue.step s),
      'signals', (select jsonb_agg(r.payload order by r.no) from queue.received_signal r),
      'pending', (select jsonb_agg(to_jsonb(h) order by h.seq) from queue.pending_settlement h)))::text;
exception when sqlstate 'ZZ000' then
  return sqlerrm::jsonb;
end $$;

-- Whether fetch takes the fast path; NULL if the two ways differ.
create function pg_temp.is_short(queues text[] default null) returns boolean language plpgsql as $$
declare
  v_short jsonb := pg_temp.fetched(true, is_short.queues);
  v_long jsonb := pg_temp.fetched(false, is_short.queues);
begin
  if v_short -> 'rest' = v_long -> 'rest' then
    return (v_short ->> 'is_short')::boolean;
  end if;
  raise warning 'by the fast path %, by the long path %', v_short -> 'rest', v_long -> 'rest';
  return null;
end $$;

create function pg_temp.end_all() returns void language sql as $$
  select queue.tick();
  select queue.finish_many(coalesce(jsonb_agg(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', 'succeeded')), '[]'))
  from queue.fetch((select w.id from queue.workers w where w.name = 'w'), null, 10) f;
$$;

create table pg_temp.made (name text, id bigint, is_short boolean);
insert into pg_temp.made
select o.name, (select d from queue.defer_many(jsonb_build_array(jsonb_build_object('task', 't') || o.options)) d), o.is_short
from (values
  ('a job', '{}'::jsonb, true),
  ('a job with a deadline', '{"deadline": "2099-01-01 00:00Z"}', true),
  ('a job with a retention', '{"options": {"retain": "1 hour"}}', true),
  ('a job with a priority', '{"priority": 5}', true),
  ('a job of another queue', '{"queue": "q"}', true),
  ('a job with a timeout', '{"options": {"timeout": "1 hour"}}', false),
  ('a job with a lock', '{"lock": "o"}', false),
  ('a job with a key', '{"concurrency_key": "k", "concurrency_limit": 1}', false),
  ('one', '{}', null), ('two', '{}', null), ('early', '{}', null), ('a job of q', '{"queue": "q"}', null),
  ('beside a new job', '{}', null), ('beside an event', '{}', null), ('event', '{}', null), ('beside a ready job', '{}', null),
  ('long', jsonb_build_object('args', jsonb_build_object('data', repeat('x', 35000))), null)) o (name, options, is_short);
select count(queue.wait(f.id, f.claim, 'w', signal => 's')) from queue.fetch(:worker, max_jobs => 100) f
where f.id not in (select m.id from pg_temp.made m where m.name in ('early', 'event')) \g /dev/null
select count(queue.wait(v.id, v.claim, 'w', event => 'e')) from queue.active_job v join pg_temp.made m using (id) where m.name = 'event' \g /dev/null
select queue.tick() \g /dev/null
select is((select count(*) from queue.jobs j where j.reason = 'signal'), 16::bigint, 'jobs wait for signals');

-- Jobs by themselves
select format('select queue.signal(%s, ''s'', ''1'')', m.id),
  format('select is(pg_temp.is_short(), %L, %L)', m.is_short, m.name),
  'select pg_temp.end_all()'
from pg_temp.made m where m.id <= (select x.id from pg_temp.made x where x.name = 'a job with a key') order by m.id \gexec

select id from pg_temp.made where name = 'one' \gset
select id as two from pg_temp.made where name = 'two' \gset

-- A signal for which the job does not wait
select queue.signal(:id, 'other', '2') \g /dev/null
select is(pg_temp.is_short(), false, 'no wait takes the signal');
select pg_temp.end_all() \g /dev/null

-- Two jobs at once, and two signals to one job
select queue.signal(:id, 's', '3') \g /dev/null
select queue.signal(:two, 's', '4') \g /dev/null
select is(pg_temp.is_short(), false, 'two jobs that got their signal are claimed at once');
select pg_temp.end_all() \g /dev/null
select is((select array_agg(j.state) from queue.jobs j where j.id in (:id, :two)), '{succeeded,succeeded}', 'both have run');

-- A job that does not wait
select id as early from pg_temp.made where name = 'early' \gset
select queue.signal(:early, 's', '5') \g /dev/null
select is(pg_temp.is_short(), false, 'the job is running');
select queue.tick() \g /dev/null
select queue.wait(v.id, v.claim, 'w', signal => 's') from queue.active_job v where v.id = :early \g /dev/null
select is(pg_temp.is_short(), false, 'an early signal is found by the wait');
select pg_temp.end_all() \g /dev/null

-- What the worker must not claim
select id from pg_temp.made where name = 'a job of q' \gset
select queue.signal(:id, 's', '6') \g /dev/null
select is(pg_temp.is_short('{default}'), false, 'the worker does not serve the queue');
select is(pg_temp.is_short('{q}'), true, 'it serves the queue');
update queue.lane l set is_idle = true where l.queue = 'q';
select is(pg_temp.is_short(), false, 'the lane has to become busy');
update queue.lane l set is_idle = false where l.queue = 'q';
update queue.lane l set paused_until = 'infinity' where l.queue = 'q';
select is(pg_temp.is_short(), false, 'the queue is paused');
update queue.lane l set paused_until = null where l.queue = 'q';
update queue.worker w set apart_since = now() where w.id = :worker;
select is((pg_temp.fetched(true) ->> 'is_short')::boolean, false, 'the worker runs something alone');
update queue.worker w set apart_since = null where w.id = :worker;
select pg_temp.end_all() \g /dev/null

-- Something else to be done
select id from pg_temp.made where name = 'beside a new job' \gset
select queue.signal(:id, 's', '7'), queue.defer('t') \g /dev/null
select is(pg_temp.is_short(), false, 'a new job is claimed at once too');
select pg_temp.end_all() \g /dev/null
select id from pg_temp.made where name = 'beside an event' \gset
select id as other from pg_temp.made where name = 'event' \gset
select queue.publish('e', '8') \g /dev/null
select queue.signal(:id, 's', '8') \g /dev/null
select is(pg_temp.is_short(), false, 'as is a job that got an event before');
select pg_temp.end_all() \g /dev/null
select is((select array_agg(j.state) from queue.jobs j where j.id in (:id, :other)), '{succeeded,succeeded}', 'both have run');
select id from pg_temp.made where name = 'beside a ready job' \gset
select queue.defer('t') \g /dev/null
select queue.tick() \g /dev/null
select queue.signal(:id, 's', '9') \g /dev/null
select is(pg_temp.is_short(), false, 'and a ready job');
select pg_temp.end_all() \g /dev/null

-- An answer that is too long
select id from pg_temp.made where name = 'long' \gset
select queue.signal(:id, 's', jsonb_build_object('data', repeat('x', 35000))) \g /dev/null
select is(pg_temp.is_short(), true, 'a job with a long value');
select set_config('pgdefer.was_dry', 'on', false), setseed(0.5) \g /dev/null
select is_empty(format('select from queue.fetch(%s, null, 10)', :worker), 'its value and its args are too long for an answer');
select results_eq(format('select f.id, octet_length(f.args::text), octet_length(f.steps::text) from queue.fetch(%s, null, 10) f', :worker),
  format('values (%s::bigint, 35012, 35019)', :id), 'and come alone with the next');

select pg_temp.end_all() \g /dev/null
select is_empty('select * from queue.check()', 'all is sound');

select * from finish();
