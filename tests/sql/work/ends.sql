-- A fault of the queue that the end of a claim meets: the outcome counts, whoever waits behind it waits for the fault
-- to be mended, and others go on.

select plan(16);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
set client_min_messages = error;

create function pg_temp.states() returns text language sql as $$
  select string_agg(format('%s %s', j.task, j.state), ', ' order by j.id) from queue.jobs j
$$;
create function pg_temp.end_all(worker bigint, call text, outcome text) returns text language plpgsql as $$
declare
  v_outcomes jsonb := (select jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', outcome)) from queue.jobs j where j.state = 'running');
begin
  if call = 'finish_many' then
    return (select string_agg(distinct coalesce(f.error, f.state), ', ') from queue.finish_many(v_outcomes) f);
  end if;
  return (select string_agg(f.task || coalesce(f.error, ''), ', ' order by f.task) from queue.finish_and_fetch(worker, v_outcomes, '{k}', 10) f);
end $$;
-- The jobs named behind can't become ready.
create function pg_temp.break() returns void language plpgsql as $$
begin
  execute (select format('alter table queue.active_job add constraint active_job_fault_check check (id not in (%s))', string_agg(j.id::text, ',')) from queue.jobs j where j.task = 'behind');
end $$;
create function pg_temp.mend(worker bigint) returns text language plpgsql as $$
begin
  alter table queue.active_job drop constraint active_job_fault_check;
  perform queue._lock_admission(true), queue._retry_shelved();
  return null;
end $$;

-- A lock, whose turn can't be passed on, and a key, whose slot can't
select queue.defer('ends', lock => 'l'), queue.defer('behind', lock => 'l'), queue.defer('ends too', lock => 'm'), queue.defer('well', lock => 'm') \g /dev/null
select array_agg(f.task) from queue.fetch(:worker, max_jobs => 10) f \g /dev/null
select pg_temp.break() \g /dev/null
select is(pg_temp.end_all(:worker, 'finish_many', 'succeeded'), 'succeeded', 'outcomes count, although a turn can''t be passed on');
select is(pg_temp.states(), 'ends succeeded, behind blocked, ends too succeeded, well blocked', 'nobody has a turn yet');
select queue.tick() \g /dev/null
select is((select string_agg(f.task, ', ') from queue.fetch(:worker, max_jobs => 10) f), 'well', 'maintenance settles what it can');
select is((select string_agg(c.problem || ', ' || j.task, '; ') from queue.check() c left join queue.jobs j using (id)), 'a settlement that the cursor has passed, ends', 'check names the other one');
select pg_temp.end_all(:worker, 'finish_many', 'succeeded') \g /dev/null
select pg_temp.mend(:worker) \g /dev/null
select queue.tick() \g /dev/null
select is((select string_agg(f.task, ', ') from queue.fetch(:worker, max_jobs => 10) f), 'behind', 'once mended, the turn is passed on');
select is(pg_temp.end_all(:worker, 'finish_many', 'succeeded'), 'succeeded', 'and it ends well');

-- With a fetch, by the shortest way: all have one key
select queue.delete(array_agg(j.id)) from queue.jobs j \g /dev/null
select queue.defer(task, queue => 'k', concurrency_key => 'k', concurrency_limit => 1) from unnest('{ends,behind,last}'::text[]) task \g /dev/null
select array_agg(f.task) from queue.fetch(:worker, max_jobs => 10) f \g /dev/null
select pg_temp.break() \g /dev/null
select is(pg_temp.end_all(:worker, 'finish_and_fetch', 'succeeded'), null, 'with a fetch outcomes count as well');
select is(pg_temp.states(), 'ends succeeded, behind blocked, last blocked', 'the slot is free, and given to nobody');
select queue.tick() \g /dev/null
select is((select string_agg(c.problem || ', ' || j.task, '; ') from queue.check() c left join queue.jobs j using (id)), 'a settlement that the cursor has passed, ends', 'check names that too');
select pg_temp.mend(:worker) \g /dev/null
select queue.tick() \g /dev/null
select is((select string_agg(f.task, ', ') from queue.fetch(:worker, max_jobs => 10) f), 'behind', 'once mended, the slot is given on');
select is(pg_temp.end_all(:worker, 'finish_and_fetch', 'succeeded'), 'last', 'and so on');

-- Outcomes that are no success
select queue.defer('fails', options => '{"retry": {"max_attempts": 2, "wait": 0}}', lock => 'l'), queue.defer('behind', lock => 'l') \g /dev/null
select array_agg(f.task) from queue.fetch(:worker, max_jobs => 10) f \g /dev/null
select pg_temp.break() \g /dev/null
select is(pg_temp.end_all(:worker, 'finish_many', 'failed'), 'failed, ready', 'a failure counts');
select queue.tick() \g /dev/null
select array_agg(f.task) from queue.fetch(:worker, max_jobs => 10) f \g /dev/null
select is(pg_temp.end_all(:worker, 'finish_many', 'failed'), 'failed', 'the last one too');
select is((select j.state from queue.jobs j where j.task = 'fails'), 'failed', 'and is not repeated');
select queue.tick() \g /dev/null
select pg_temp.mend(:worker) \g /dev/null
select queue.tick() \g /dev/null
select is((select string_agg(f.task, ', ') from queue.fetch(:worker, max_jobs => 10) f), 'behind', 'once mended, the next one runs');
select is((select count(*) from queue.check()), 0::bigint, 'everything agrees');

select * from finish();
