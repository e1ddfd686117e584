-- Claims ahead of need: the option ahead of fetch, and what a pause tells workers.

select plan(28);

create function pg_temp.refusal(call text) returns text language plpgsql as $$
begin
  execute call;
  return 'accepted';
exception when others then
  return sqlstate || ' ' || sqlerrm;
end $$;

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- The tasks that a fetch gives, in the order of the claims; they are finished afterwards.
create function pg_temp.run(max_jobs integer, options jsonb) returns text language plpgsql as $$
declare
  v_text text;
begin
  select string_agg(f.task, ' ' order by f.n) into v_text
  from queue.fetch((select w.id from queue.workers w where w.name = 'w'), null, run.max_jobs, run.options)
    with ordinality f (id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, timeout, headers, parent,
      steps, n);
  perform queue.finish_many(jsonb_agg(jsonb_build_object('id', v.id, 'claim', v.claim, 'outcome', 'released')))
  from queue.active_job v where v.claim is not null having count(*) > 0;
  return v_text;
end $$;

-- Plain jobs
select queue.defer('a' || n) from generate_series(1, 5) n;
select is(pg_temp.run(5, '{"ahead": 3}'), 'a1 a2 a3 a4 a5', 'plain jobs are claimed ahead');
select is(pg_temp.run(3, '{"ahead": 3}'), 'a1 a2 a3', 'also where none is to start at once');
select is(pg_temp.run(3, '{"ahead": 0}'), 'a1 a2 a3', 'none ahead');
select is(pg_temp.run(3, '{"ahead": null}'), 'a1 a2 a3', 'null is none, too');
select is((select string_agg(j.attempts::text, ' ') from queue.jobs j), '0 0 0 0 0', 'those given back have had no attempt');

-- Options that select
select is(pg_temp.run(5, '{"ahead": 3, "tasks": ["a1", "a3", "a5"]}'), 'a1 a3', 'where options select jobs, none is claimed ahead');
select is(pg_temp.run(5, '{"ahead": 5, "order": "listed"}'), null, 'and nothing where all would be ahead');

-- A key: as long as a job of it is ready, only those that start at once
select queue.defer('k' || n, priority => 1, concurrency_key => 'k', concurrency_limit => 4) from generate_series(1, 6) n;
select is(pg_temp.run(5, '{"ahead": 3}'), 'k1 k2', 'a limited job is not claimed ahead, and no plain one overtakes it');
select is(pg_temp.run(5, '{"ahead": 5}'), null, 'nothing where all would be ahead');
select is(pg_temp.run(7, '{"ahead": 2}'), 'k1 k2 k3 k4 a1', 'up to what starts at once plain jobs follow, as ever');
select is((select s.used from queue.semaphores s where s.key = 'k'), 0, 'no slot is left in use');
select is((select count(*)::int from queue.jobs j where j.concurrency_key = 'k' and j.attempts > 0), 0, 'nor an attempt');
select is(pg_temp.run(8, null), 'k1 k2 k3 k4 a1 a2 a3 a4', 'without the option all start at once');

-- A queue with max_running, beside a plain one
create temp table gone as select c.* from queue.jobs j cross join lateral queue.cancel(j.id) c where j.concurrency_key = 'k';
select queue.defer('m' || n, queue => 'm', priority => 9) from generate_series(1, 4) n;
select queue.configure_queue('m', '{"max_running": 3}');
select is(pg_temp.run(5, '{"ahead": 3}'), 'm1 m2', 'nor is a job of a queue with max_running');
select is(pg_temp.run(6, '{"ahead": 2}'), 'm1 m2 m3 a1', 'plain ones follow where the queue is full');
select queue.pause('m');
select is(pg_temp.run(5, '{"ahead": 3}'), 'a1 a2 a3 a4 a5', 'a queue that can start nothing is in nobody''s way');

-- With outcomes
select is((select string_agg(f.task, ' ') from queue.finish_and_fetch(:worker, '[]', null, 5, '{"ahead": 5}') f),
          'a1 a2 a3 a4 a5', 'finish_and_fetch takes it, too');
select is((select count(*)::int from queue.fetch(:worker, null, 5, '{"ahead": 5}')), 0, 'nothing is left');
select is((select count(*)::int from queue.check()), 0, 'all invariants hold');

-- Refused
select is(pg_temp.refusal(format('select queue.fetch(%s, null, 2, %L)', :worker, o)),
          '22023 ahead must be a whole number from 0 to max_jobs', o)
from unnest(array['{"ahead": -1}', '{"ahead": 3}', '{"ahead": 0.5}', '{"ahead": "1"}', '{"ahead": 1e30}', '{"ahead": []}', '["ahead"]', '"ahead"']) o;
select is(pg_temp.refusal(format('select queue.fetch(%s, null, 2, %L)', :worker, '{"ahead": 1, "other": 2}')) like '22023%', true, 'other keys are checked, too');
select * from finish();
