-- Operating on many jobs by hand: move, copy, delete, fail_jobs, done, set_priority, reschedule, delete_queue.

select plan(999);

set pgdefer.notify = off;

create function pg_temp.refusal(call text) returns text language plpgsql as $$
declare
  v_hint text;
begin
  execute call;
  return 'accepted';
exception when others then
  get stacked diagnostics v_hint = pg_exception_hint;
  return sqlstate || case when v_hint = '' then ' without a hint' else '' end;
end $$;

create function pg_temp.job(id bigint) returns text language sql as $$
  select concat_ws(' ', j.state, j.reason, j.attempts, j.failures, j.crashes, j.claims) from queue.jobs j where j.id = job.id
$$;

create function pg_temp.state(id bigint) returns text language sql as $$
  select concat_ws(' ', j.state, j.reason) from queue.jobs j where j.id = state.id
$$;

create function pg_temp.run(id bigint, outcome text, more jsonb default '{}') returns text language plpgsql as $$
declare
  v_text text;
begin
  select d.state into v_text
  from queue.fetch((select min(w.id) from queue.workers w), null, 1, jsonb_build_object('ids', jsonb_build_array(run.id))) f
  cross join lateral queue.finish_many(jsonb_build_array(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', outcome) || more)) d;
  return v_text;
end $$;

-- A new job of each state, in this order; fillers has those that they wait for.
create table pg_temp.zoo (no serial, name text, id bigint);
create table pg_temp.filler (id bigint);
create function pg_temp.zoo(name text) returns bigint language sql as $$select z.id from pg_temp.zoo z where z.name = zoo.name$$;
create function pg_temp.ids() returns bigint[] language sql as $$select array_agg(z.id order by z.no) from pg_temp.zoo z$$;
create procedure pg_temp.make_zoo() language plpgsql as $$
declare
  v_worker bigint := (select min(w.id) from queue.workers w);
  v_name text;
begin
  perform queue.fail_jobs(array(select f.id from pg_temp.filler f)), queue.delete(pg_temp.ids(), true), queue.delete(array(select f.id from pg_temp.filler f));
  truncate pg_temp.zoo restart identity;
  truncate pg_temp.filler;
  insert into pg_temp.zoo (name) select unnest('{running,ready,paused,scheduled,retrying,blocked,full,waiting,upstream_failed,held,succeeded,failed,cancelled}'::text[]);
  insert into pg_temp.filler values (queue.defer('filler', queue => 'zoo', lock => 'zoo', concurrency_key => 'zoo', concurrency_limit => 1));
  foreach v_name in array '{running,retrying,succeeded,failed,cancelled}'::text[] loop
    update pg_temp.zoo z set id = queue.defer(v_name, queue => 'zoo', options => case v_name when 'retrying' then '{"retry": {"max_attempts": 5, "base": "1 day"}}' end::jsonb)
    where z.name = v_name;
  end loop;
  commit;
  perform queue.finish_many(jsonb_agg(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', case f.task when 'succeeded' then 'succeeded' else 'failed' end)))
  from queue.fetch(v_worker, '{zoo}', 100) f where f.task in ('retrying', 'succeeded', 'failed');
  commit;
  perform queue.cancel(pg_temp.zoo('cancelled'), true);
  perform queue.finish_many(jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'failed'))) from queue.jobs j where j.id = pg_temp.zoo('cancelled');
  update pg_temp.zoo z set id = queue.defer('ready', queue => 'zoo') where z.name = 'ready';
  update pg_temp.zoo z set id = queue.defer('paused', queue => 'zoo paused') where z.name = 'paused';
  update pg_temp.zoo z set id = queue.defer('scheduled', queue => 'zoo', scheduled_at => '2999-01-01Z') where z.name = 'scheduled';
  update pg_temp.zoo z set id = queue.defer('blocked', queue => 'zoo', lock => 'zoo') where z.name = 'blocked';
  update pg_temp.zoo z set id = queue.defer('full', queue => 'zoo', concurrency_key => 'zoo', concurrency_limit => 1) where z.name = 'full';
  update pg_temp.zoo z set id = queue.defer('waiting', queue => 'zoo', needs => array[(select min(f.id) from pg_temp.filler f)]) where z.name = 'waiting';
  update pg_temp.zoo z set id = queue.defer('upstream_failed', queue => 'zoo', needs => array[queue.defer('needed', queue => 'zoo', options => '{"held": true}')]) where z.name = 'upstream_failed';
  insert into pg_temp.filler select j.id from queue.jobs j where j.task = 'needed' and j.state = 'held';
  update pg_temp.zoo z set id = queue.defer('held', queue => 'zoo', options => '{"held": true}') where z.name = 'held';
  perform queue.pause('zoo paused');
  commit;
  perform queue.tick();
end $$;
create function pg_temp.states() returns text language sql as $$
  select string_agg(coalesce(nullif(concat_ws(' ', j.state, j.reason), ''), 'gone'), ', ' order by z.no) from pg_temp.zoo z left join queue.jobs j on j.id = z.id
$$;

select queue.register_worker('w') as worker \gset
call pg_temp.make_zoo();
select is(pg_temp.states(), 'running, ready, ready paused, scheduled, scheduled, blocked lock, blocked limit, waiting, upstream_failed, held, succeeded, failed attempts, cancelled aborted',
          'a job of each state');
select is_empty('select * from queue.check()', 'in order');
