-- Many jobs claimed as they are admitted: the same ones in the same order as by the long way.

select plan(44);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
select queue.register_task('t', '{}') \g /dev/null

select queue.fetch(:worker) \g /dev/null
select queue.defer('t') \g /dev/null
select is((select string_agg(e.state, ' ') from queue.fetch(:worker, max_jobs => 2147483647) f cross join lateral queue.finish_many(jsonb_build_array(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', 'succeeded'))) e),
          'succeeded', 'max_jobs may be as large as an integer can');

-- What fetch returns, and what it leaves behind: once as if nothing had been ready after the last fetch, once as if
-- something had. sliced: how many jobs it claimed as it admitted them. All is rolled back.
create function pg_temp.fetched(hint text, n integer, queues text[]) returns jsonb language plpgsql as $$
declare
  v_answer jsonb;
  v_sliced bigint;
begin
  perform set_config('pgdefer.was_dry', hint, false), set_config('pgdefer.looked_at', '', false), setseed(0.5);
  select jsonb_agg(to_jsonb(f) - 'claim') into v_answer
  from queue.fetch((select w.id from queue.workers w where w.name = 'w'), fetched.queues, fetched.n) f;
  v_sliced := (select count(*) from queue.active_job aj where aj.lane is null);
  if (select count(distinct (aj.claim, aj.claimed_at)) from queue.active_job aj where aj.lane is null) > 1 then
    raise exception 'one fetch, several claims';
  end if;
  while (select t.admitted from queue.tick() t) > 0 loop  -- on a busy machine one does not admit all
  end loop;
  raise exception using errcode = 'ZZ000', message = jsonb_build_object('sliced', v_sliced,
    'rest', jsonb_build_object('answer', v_answer,
      'active', (select jsonb_agg(to_jsonb(aj) - '{claim,claimed_at,lane}'::text[] || jsonb_build_object('is_claimed', aj.claim is not null and aj.claimed_at is not null) order by aj.id) from queue.active_job aj),
      'leases', (select jsonb_agg(jsonb_build_array(v.id, v.is_own, v.expires_at - v.given_at > '59 min') order by v.id) from queue.lease v),
      'check', (select jsonb_agg(to_jsonb(c)) from queue.check() c),
      'states', (select jsonb_agg(jsonb_build_array(j.id, j.state, j.reason) order by j.id) from queue.jobs j)))::text;
exception when sqlstate 'ZZ000' then
  return sqlerrm::jsonb;
end $$;

-- How many jobs fetch claims as it admits them; NULL if that differs from the long way, or check() finds anything.
create function pg_temp.sliced(n integer default 40, queues text[] default null) returns bigint language plpgsql as $$
declare
  v_short jsonb := pg_temp.fetched('slice', sliced.n, sliced.queues);
  v_long jsonb := pg_temp.fetched('off', sliced.n, sliced.queues);
begin
  if (v_long ->> 'sliced')::bigint = 0 and v_short -> 'rest' = v_long -> 'rest' and v_short #> '{rest,check}' = 'null' then
    return (v_short ->> 'sliced')::bigint;
  end if;
  raise warning 'at once %, by the long way %: %', v_short -> 'sliced', v_long -> 'sliced',
    (select jsonb_agg(jsonb_build_array(s.key, left(s.value::text, 1000), left(l.value::text, 1000)))
     from jsonb_each(v_short -> 'rest') s join jsonb_each(v_long -> 'rest') l using (key) where s.value <> l.value);
  return null;
end $$;

-- n jobs; those with the numbers of `other` get its options.
create function pg_temp.make(n integer, other jsonb default '{}', numbers integer[] default '{}') returns void language sql as $$
  select count(*) from queue.defer_many((
    select jsonb_agg('{"task": "t"}' || case when g = any (make.numbers) then make.other else '{}' end order by g)
    from generate_series(1, make.n) g));
$$;
create function pg_temp.end_all() returns void language plpgsql as $$
declare
  v_outcomes jsonb;
begin
  loop
    perform queue.tick();
    select jsonb_agg(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', 'succeeded')) into v_outcomes
    from queue.fetch((select w.id from queue.workers w where w.name = 'w'), null, 2000) f;
    exit when v_outcomes is null;
    perform queue.finish_many(v_outcomes);
  end loop;
  perform queue.cancel(u.id) from queue.unfinished u;
end $$;

-- A lane, without which no job is plain
select queue.defer('t') \g /dev/null
select pg_temp.end_all() \g /dev/null

select format('select pg_temp.make(%s, %L, %L)', o.n, o.other, o.numbers),
  format('select is(pg_temp.sliced(%s), %s::bigint, %L)', o.asked, o.sliced, o.name),
  'select pg_temp.end_all()'
from (values
  (1, 'as many jobs as are new', 40, 40, '{}', '{}', 40),
  (2, 'fewer are new', 35, 40, '{}', '{}', 35),
  (3, 'one more is new', 41, 40, '{}', '{}', 40),
  (4, 'many more are new', 2500, 40, '{}', '{}', 40),
  (5, 'as many as an answer holds', 2500, 1500, '{}', '{}', 504),
  (6, 'a fetch of few jobs', 40, 29, '{}', '{}', 0),
  (7, 'a timeout', 40, 40, '{"options": {"timeout": "1 hour"}}', '{2,30}', 40),
  (8, 'a retention', 40, 40, '{"options": {"retain": "1 hour"}}', '{2,30}', 40),
  (9, 'large args', 40, 40, '{"args": {"x": "' || repeat('x', 3000) || '"}}', '{2}', 40),
  (10, 'a lock', 40, 40, '{"lock": "l"}', '{30}', 0),
  (11, 'a key', 40, 40, '{"concurrency_key": "k", "concurrency_limit": 1}', '{30}', 0),
  (12, 'a deadline', 40, 40, '{"deadline": "2099-01-01 00:00Z"}', '{30}', 0),
  (13, 'another priority', 40, 40, '{"priority": 1}', '{30}', 0),
  (14, 'another queue', 40, 40, '{"queue": "q"}', '{30}', 0),
  (15, 'another queue whose jobs are first', 40, 40, '{"queue": "q"}', '{1}', 0),
  (16, 'a time', 40, 40, '{"scheduled_at": "2099-01-01 00:00Z"}', '{30}', 0),
  (17, 'a queueing lock', 40, 40, '{"queueing_lock": "k"}', '{30}', 0),
  (18, 'an expiry', 40, 40, '{"options": {"expires_at": "2099-01-01 00:00Z"}}', '{30}', 0),
  (19, 'a deadline far behind in the backlog', 2500, 40, '{"deadline": "2099-01-01 00:00Z"}', '{2400}', 0),
  (20, 'a priority far behind in the backlog', 2500, 40, '{"priority": 1}', '{2400}', 0),
  (21, 'a lock far behind in the backlog', 2500, 40, '{"lock": "l"}', '{2400}', 0)
) o (no, name, n, asked, other, numbers, sliced) order by o.no \gexec

-- Something else to be done
select pg_temp.make(40) \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.make(40) \g /dev/null
select is(pg_temp.sliced(), 0::bigint, 'ready jobs come first');
select pg_temp.end_all() \g /dev/null
select pg_temp.make(40) \g /dev/null
select is(pg_temp.sliced(40, '{q}'), 0::bigint, 'the worker serves another queue');
select is(pg_temp.sliced(40, '{q,def*}'), 40::bigint, 'it serves this one, too');
update queue.worker w set apart_since = now() where w.id = :worker;
select is((pg_temp.fetched('slice', 40, null) ->> 'sliced')::integer, 0, 'the worker runs something alone');
update queue.worker w set apart_since = null where w.id = :worker;
select pg_temp.end_all() \g /dev/null
select queue.pause('default') \g /dev/null
select pg_temp.make(40) \g /dev/null
select is(pg_temp.sliced(), 0::bigint, 'the queue is paused');
select queue.resume('default') \g /dev/null
select pg_temp.end_all() \g /dev/null
select queue.pause(task => 'other') \g /dev/null
select pg_temp.make(40) \g /dev/null
select is(pg_temp.sliced(), 0::bigint, 'a task is paused');
select queue.resume(task => 'other') \g /dev/null
select pg_temp.end_all() \g /dev/null
select pg_temp.make(40) \g /dev/null
select is(pg_temp.sliced(), 40::bigint, 'nothing of this is left');

-- Other workers
select queue.register_worker('other', info => '{"dead_after": "1 day"}') as other \gset
select is(pg_temp.sliced(), 40::bigint, 'what is new is claimed, though another worker is alive');
select pg_temp.end_all() \g /dev/null
select pg_temp.make(2500) \g /dev/null
select is(pg_temp.sliced(), 0::bigint, 'but not a slice of more, as they would wait for each other');
select queue.deregister_worker(:other) \g /dev/null
select is(pg_temp.sliced(), 40::bigint, 'once it is gone this is done');
select pg_temp.end_all() \g /dev/null

-- New jobs do not hold up a backlog that is older.
select pg_temp.make(2500) \g /dev/null
create table pg_temp.got (n integer, id bigint);
select 'select set_config(''pgdefer.looked_at'', '''', false)', 'select pg_temp.make(60)',
  format('insert into pg_temp.got select %s, f.id from queue.fetch(%s, null, 50) f', n, :worker)
from generate_series(1, 10) n \gexec
select is((select count(*) from pg_temp.got), 500::bigint, 'each fetch is full');
select is((select max(g.id) - min(g.id) from pg_temp.got g), 499::bigint, 'and gets the oldest, though as many are new each time');
select is_empty('select * from queue.check()', 'check() finds nothing');
select queue.finish_many(jsonb_agg(jsonb_build_object('id', aj.id, 'claim', aj.claim, 'outcome', 'succeeded'))) from queue.active_job aj where aj.claim is not null \g /dev/null
select pg_temp.end_all() \g /dev/null

-- What runs so is known to its queue
select pg_temp.make(60) \g /dev/null
select set_config('pgdefer.was_dry', 'slice', false), set_config('pgdefer.looked_at', '', false) \g /dev/null
select f.id, f.claim from queue.fetch(:worker, null, 40) f limit 1 \gset
select is((select count(*) from queue.active_job aj where aj.lane is null and aj.claim is not null), 40::bigint, '40 jobs run without a lane');
select results_eq('select q.ready, q.running from queue.queues q where q.name = ''default''', 'values (20::bigint, 40::bigint)', 'queue.queues counts them, and those that are left in the log');
begin;
delete from queue.lane;
delete from queue.job j where j.id not in (select aj.id from queue.active_job aj);
select results_eq('select q.ready, q.running from queue.queues q where q.name = ''default''', 'values (0::bigint, 40::bigint)', 'also where it has no lane any more');
rollback;
select queue.configure_queue('default', '{"max_running": 41, "retain": "1 hour"}') \g /dev/null
select is((select s.used from queue.semaphores s where s.kind = 'queue'), 40, 'so does a limit that is set later');
select is((select count(*) from queue.fetch(:worker, null, 10)), 1::bigint, 'so one more may start');
select is_empty('select * from queue.check()', 'check() finds nothing');
select queue.release(:id, :claim), queue.configure_queue('default', '{"max_running": null, "retain": null}') \g /dev/null
select is((select f.id from queue.fetch(:worker, null, 1) f), :id::bigint, 'a job that is released comes first again');
select throws_like('select queue.delete_queue(''default'')', '%', 'a queue with such jobs is not deleted by mistake');
select is_empty('select * from queue.check()', 'check() finds nothing');
select * from finish();
