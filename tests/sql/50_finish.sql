-- Ending claims: each outcome alone, many at once, with a fetch; refusals; what is malformed changes nothing.

select plan(999);

select queue.register_worker('w') as worker \gset

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

-- An outcome as finish_many takes it.
create function pg_temp.outcome(id bigint, claim bigint, outcome text, more jsonb default '{}') returns jsonb language sql as $$
  select jsonb_build_object('id', id, 'claim', claim, 'outcome', outcome) || more
$$;

-- State, reason, attempts, failures, claims.
create function pg_temp.job(id bigint) returns text language sql as $$
  select concat_ws(' ', j.state, j.reason, j.attempts, j.failures, j.claims) from queue.jobs j where j.id = job.id
$$;

-- succeed
select queue.defer('t') \g /dev/null
select id, claim from queue.fetch(:worker) \gset
select lives_ok(format('select queue.succeed(%s, %s, ''{"answer": [42, null]}'')', :id, :claim), 'a claim succeeds');
select is(pg_temp.job(:id), 'succeeded 1 0 1', 'so has the job, at its first attempt');
select results_eq(format('select result, error, worker_id, claim, started_at is not null, finished_at >= started_at from queue.jobs where id = %s', :id),
                  format('values (''{"answer": [42, null]}''::jsonb, null::text, %s::bigint, null::bigint, true, true)', :worker), 'with its result, worker and times');
select is_empty('select * from queue.attempts', 'an attempt that succeeded leaves no row');
select is(pg_temp.refusal(format('select queue.succeed(%s, %s)', :id, :claim)), 'QJ002', 'a claim ends once');
select is(pg_temp.refusal(format('select queue.fail(%s, %s, ''late'')', :id, :claim)), 'QJ002', 'whatever the outcome');
select is(pg_temp.refusal(format('select queue.retry_later(%s, %s)', :id, :claim)), 'QJ002', 'a yield too');
select is(pg_temp.refusal(format('select queue.release(%s, %s)', :id, :claim)), 'QJ002', 'a release too');
select is(pg_temp.refusal('select queue.succeed(123456, 1)'), 'QJ001', 'an id that is not there');
select is(pg_temp.refusal('select queue.succeed(null, 1)'), '22023', 'no id');
select is(pg_temp.refusal('select queue.release(1, null)'), '22023', 'no claim');
select is(pg_temp.job(:id), 'succeeded 1 0 1', 'nothing of that has changed the job');
select queue.defer('t') \g /dev/null
select id, claim from queue.fetch(:worker) \gset
select is(pg_temp.refusal(format('select queue.succeed(%s, %s)', :id, :claim - 1)), 'QJ002', 'an older claim is refused while the job runs');
select is(pg_temp.refusal(format('select queue.succeed(%s, %s)', :id, :claim + 1)), 'QJ002', 'a claim that never was too');

-- In the handler's own transaction
create table effect (job_id bigint);
begin;
insert into effect values (:id);
select queue.succeed(:id, :claim) \g /dev/null
rollback;
select is(pg_temp.job(:id), 'running 1 0 0' where false);
select is((select state from queue.jobs where id = :id), 'running', 'rolled back with the handler''s transaction, the outcome is none');
begin;
insert into effect values (:id);
select queue.succeed(:id, :claim) \g /dev/null
select is((select count(*) from pg_locks l where l.relation = 'queue.admission'::regclass and l.pid = pg_backend_pid() and l.mode = 'RowShareLock'), 0::bigint,
          'succeed takes no part in admission');
commit;
select is((select count(*) from effect), 1::bigint, 'committed with it, both are there');
select is((select state from queue.jobs where id = :id), 'succeeded', 'the outcome too');

-- QJ008
select queue.defer('t') \g /dev/null
select id, claim from queue.fetch(:worker) \gset
begin isolation level repeatable read;
select is(pg_temp.refusal(format(call, :id, :claim)), 'QJ008', format(call, 'id', 'claim') || ' in REPEATABLE READ')
from (values ('select queue.succeed(%s, %s)'), ('select queue.fail(%s, %s, ''no'')'), ('select queue.retry_later(%s, %s)'), ('select queue.release(%s, %s)'),
             ('select * from queue.finish_many(''[{"id": %s, "claim": %s, "outcome": "succeeded"}]'')'),
             ('select * from queue.finish_and_fetch(1, ''[{"id": %s, "claim": %s, "outcome": "succeeded"}]'')')) v (call);
rollback;
begin isolation level serializable;
select is(pg_temp.refusal(format('select queue.succeed(%s, %s)', :id, :claim)), 'QJ008', 'and in SERIALIZABLE');
rollback;
select is((select state from queue.jobs where id = :id), 'running', 'none of which has ended the claim');

-- fail, with the default of one attempt
select is(queue.fail(:id, :claim, 'boom', '{"type": "E", "none": null, "deep": {"none": null}}'), 'failed', 'fail returns the new state');
select is(pg_temp.job(:id), 'failed attempts 1 1 1', 'a job has one attempt unless a policy says otherwise');
select results_eq(format('select attempt, claim, worker_id, outcome, error, details, started_at <= finished_at from queue.attempts where job_id = %s', :id),
                  format('values (1, %s::bigint, %s::bigint, ''failed'', ''boom'', ''{"type": "E", "none": null, "deep": {"none": null}}''::jsonb, true)', :claim, :worker),
                  'the attempt is kept, details as they were');
select is((select error from queue.jobs where id = :id), 'boom', 'the job has its error');
select queue.defer('t') \g /dev/null
select id, claim from queue.fetch(:worker) \gset
select is(queue.fail(:id, :claim, null), 'failed', 'an error may be NULL');

-- release
select queue.defer('t', lock => 'l', concurrency_key => 'k', concurrency_limit => 1, options => '{"timeout": "1 hour"}') \g /dev/null
select id, claim from queue.fetch(:worker) \gset
select lives_ok(format('select queue.release(%s, %s)', :id, :claim), 'a job is given back');
select is(pg_temp.job(:id), 'ready 0 0 1', 'no attempt is counted, the claim is');
select results_eq(format('select outcome from queue.attempts where job_id = %s', :id), array['released'], 'the history has it');
select is((select started_at from queue.jobs where id = :id), null, 'it has not started');
select is_empty('select * from queue.lease', 'its timeout ended with the claim');
select id as again, claim as claim2, attempt from queue.fetch(:worker) \gset
select is(:again::bigint, :id::bigint, 'it is claimed again, with its lock and slot');
select is(:attempt, 1, 'as its first attempt');
select cmp_ok(:claim2::bigint, '>', :claim::bigint, 'a claim''s number rises');
select is((select count(*) from queue.lease), 1::bigint, 'with a timeout anew');
select queue.succeed(:id, :claim2) \g /dev/null
select is(pg_temp.job(:id), 'succeeded 1 0 2', 'and ends as any other');
select is_empty('select * from queue.lease', 'nothing is left of it');

-- retry_later
select queue.defer('t', options => '{"max_progress": 3}') \g /dev/null
select id, claim from queue.fetch(:worker) \gset
select is(queue.retry_later(:id, :claim, message => 'step 1'), 'ready', 'a job yields and is called again');
select results_eq(format('select outcome, error from queue.attempts where job_id = %s', :id), $$values ('yielded', 'step 1')$$, 'the message is in its history');
select results_eq(format('select progress, failures, attempts, error from queue.jobs where id = %s', :id), 'values (1, 0, 1, null::text)', 'a yield is progress, no failure');
select id, claim, attempt from queue.fetch(:worker) \gset
select is(:attempt, 2, 'the next attempt');
select is(queue.retry_later(:id, :claim, now() + interval '1 hour'), 'scheduled', 'not before a time');
select results_eq(format('select state, scheduled_at > now() + interval ''59 minutes'' from queue.jobs where id = %s', :id), $$values ('scheduled', true)$$, 'which it shows');
select is_empty(format('select * from queue.fetch(%s)', :worker), 'until then it is not run');
update queue.job_state set scheduled_at = now();
update queue.waiting set at = now();
select id, claim from queue.fetch(:worker) \gset
select queue.defer('need', queue => 'other') as need \gset
select is(queue.retry_later(:id, :claim, needs => array[:need]), 'waiting', 'after other jobs');
select queue.tick() \g /dev/null
select is((select state from queue.jobs where id = :id), 'waiting', 'for which it waits');
select * from queue.fetch(:worker, '{other}') \gset need_
select queue.succeed(:need_id, :need_claim) \g /dev/null
select id, claim, attempt from queue.fetch(:worker, '{default}') \gset
select is(:attempt, 4, 'it goes on when they are done');
select is(queue.retry_later(:id, :claim), 'failed', 'after max_progress yields the next one fails');
select is(pg_temp.job(:id), 'failed max_progress 4 0 4', 'with that reason');
select is(pg_temp.refusal(call), '22023', call) from (values
  ('select queue.retry_later(1, 1, ''infinity'')'), ('select queue.retry_later(1, 1, needs => ''{1,null}'')'), ('select queue.retry_later(1, 1, needs => ''{-1}'')')) v (call);
select queue.defer('t', options => '{"max_progress": null}') \g /dev/null
create function pg_temp.yield_often(n integer) returns text language plpgsql as $$
declare
  v_text text;
begin
  for i in 1 .. n loop
    select queue.retry_later(f.id, f.claim) into v_text from queue.fetch((select max(w.id) from queue.workers w)) f;
    if v_text is distinct from 'ready' then
      return i || ': ' || coalesce(v_text, 'none');
    end if;
  end loop;
  return 'ready';
end $$;
select queue.defer('hundred') as hundred \gset
