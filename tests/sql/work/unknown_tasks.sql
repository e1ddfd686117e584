-- Unknown tasks: a job goes back for others with a growing delay, and fails once nobody has known its task for the grace period.

select plan(33);

\ir workers.helpers.psql

-- A worker claims the job and does not know its task: the new state, and the seconds until it is offered again.
create function pg_temp.unknown(worker bigint) returns text language plpgsql as $$
declare
  v record;
  v_state text;
begin
  select f.id, f.claim into v from queue.fetch(unknown.worker, null, 1) f;
  select f.state into v_state
  from queue.finish_many(jsonb_build_array(jsonb_build_object('id', v.id, 'claim', v.claim, 'outcome', 'unknown_task'))) f;
  return concat_ws(' ', v_state, (select round(extract(epoch from j.scheduled_at - a.finished_at))
                                  from queue.jobs j join queue.attempts a on a.job_id = j.id and a.claim = v.claim
                                  where j.id = v.id and v_state = 'scheduled'));
end $$;

-- The delay has passed.
create procedure pg_temp.later(id bigint) language plpgsql as $$
begin
  update queue.waiting w set at = clock_timestamp() where w.id = later.id;
  update queue.job_override s set scheduled_at = clock_timestamp() where s.id = later.id;
  commit;
  perform from queue.tick();
end $$;

select queue.register_worker('old') as old, queue.register_worker('new') as new, queue.register_worker('older') as older \gset
select is(queue.configure('{}') -> 'unknown_task_grace', '"00:10:00"', 'the grace period is 10 minutes');
select queue.defer('t', lock => 'l') as id, queue.defer('u', lock => 'l') as behind \gset
select count(*) from queue.before_sleep(:old, null, '{"in_line": true}') \gset
select is(pg_temp.unknown(:old), 'scheduled 1', 'the job goes back, for a second');
select is_empty('select from queue.sleeper', 'its worker leaves the line, so that another gets the job next');
-- Far ahead, so that it does not come while the next tests run.
update queue.waiting w set at = w.at + interval '1 hour' where w.id = :id;
update queue.job_override s set scheduled_at = s.scheduled_at + interval '1 hour' where s.id = :id;
select is(pg_temp.job(:id), 'scheduled 0 0 0 1', 'no attempt is counted, and no failure');
select is((select concat_ws(' ', outcome, error, details) from queue.attempts where job_id = :id), 'released worker ' || :old || ' (old) does not know the task t {"unknown_task": "t"}', 'the attempt says who it was');
select is(queue.why(:id) like 'its time has not come: %; its task t is not known to worker ' || :old || ' (old)', true, 'why does');
select results_eq($$select status, detail from queue.health() where name = 'tasks'$$,
                  format($$values ('warn', 'unknown tasks: t (1 job) to worker %s (old)')$$, :old), 'so does health');
select is_empty(format('select * from queue.fetch(%s)', :new), 'the next job of its lock waits');
call pg_temp.later(:id);
select is(pg_temp.unknown(:older), 'scheduled 2', 'then 2 s');
select is(queue.why(:id) like '%not known to worker ' || :old || ' (old), ' || :older || ' (older)', true, 'why names both');
call pg_temp.later(:id);
select is(queue.why(:id) like 'it is ready%not known to worker%', true, 'also while it is ready');
select is(pg_temp.unknown(:old), 'scheduled 4', 'then 4 s');
call pg_temp.later(:id);
select is(pg_temp.unknown(:old), 'scheduled 8', '8 s');
call pg_temp.later(:id);
select is(pg_temp.unknown(:old), 'scheduled 10', '10 s');
call pg_temp.later(:id);
select is(pg_temp.unknown(:old), 'scheduled 10', 'and no more');
call pg_temp.later(:id);
select id, claim from queue.fetch(:new) \gset known_
select is(queue.fail(:known_id, :known_claim, 'x', options => '{"retry_in": "0 s"}'), 'ready', 'one that knows it takes it');
select results_eq($$select status from queue.health() where name = 'tasks'$$, $$values ('ok')$$, 'and it is known');
select is(pg_temp.unknown(:old), 'scheduled 1', 'after that the time starts again');

-- The grace period
update queue.attempt set finished_at = finished_at - interval '8 minutes' where job_id = :id;
call pg_temp.later(:id);
select is(pg_temp.unknown(:old), 'scheduled 2', 'until it has passed');
call pg_temp.later(:id);
select pg_temp.unknown(:old) \g /dev/null
call pg_temp.later(:id);
select pg_temp.unknown(:old) \g /dev/null
update queue.attempt set finished_at = (select clock_timestamp() - interval '9 minutes 51 s') where job_id = :id;
call pg_temp.later(:id);
select matches(pg_temp.unknown(:old), '^scheduled [0-9]$', 'it is offered for the last time as it ends, before its 10 s');
update queue.attempt set finished_at = finished_at - interval '9 s' where job_id = :id;
call pg_temp.later(:id);
select is(pg_temp.unknown(:older), 'failed', 'then it has failed');
select is((select concat_ws(' ', state, reason, error) from queue.jobs where id = :id),
          format('failed unknown_task no worker knows the task t: %s (old), %s (older)', :old, :older), 'with its reason, and who did not know it');
select is((select task from queue.fetch(:new)), 'u', 'its lock is passed on');
select queue.finish_many(jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'succeeded'))) from queue.jobs j where j.state = 'running' \g /dev/null
select is(queue.configure('{"unknown_task_grace": "0 s"}') -> 'unknown_task_grace', '"00:00:00"', 'none');
select id, outcome from queue.retry(array[:id]::bigint[]) \g /dev/null
select is(pg_temp.unknown(:old), 'failed', 'and it fails at once');
select throws_ok($$select queue.configure('{"unknown_task_grace": "-1 s"}')$$, '22023', null, 'no period below 0');

-- Told to abort meanwhile
select queue.configure('{"unknown_task_grace": "10 minutes"}') \g /dev/null
select queue.defer('t') as id \gset
select id, claim from queue.fetch(:old) \gset
select queue.cancel(:id, true) \g /dev/null
select is((select f.state from queue.finish_many(jsonb_build_array(jsonb_build_object('id', :id, 'claim', :claim, 'outcome', 'unknown_task'))) f), 'cancelled', 'one that was told to abort is cancelled');
select is((select f.error from queue.finish_many(jsonb_build_array(jsonb_build_object('id', :id, 'claim', :claim, 'outcome', 'unknown_task'))) f), 'QJ002', 'a lost claim');

-- A version of the args that the worker does not know
select queue.defer('t', '{"__version__": 7}') as id \gset
select id, claim from queue.fetch(:old) \gset
select queue.finish_many(jsonb_build_array(jsonb_build_object('id', :id, 'claim', :claim, 'outcome', 'unknown_task'))) \g /dev/null
select is((select error from queue.attempts where job_id = :id), format('worker %s (old) does not know the task t in version 7', :old), 'the text names the version');
select is((select details ->> 'unknown_task' from queue.attempts where job_id = :id), 't', 'its attempt names the task alone');
select alike((select detail from queue.health() where name = 'tasks'), 'unknown tasks: %t in version 7 (1 job) to worker %', 'health names the version');
select alike(queue.why(:id), '%; its task t in version 7 is not known to worker % (old)', 'so does why');
select is_empty('select * from queue.check()', 'everything is in order');

select * from finish();
