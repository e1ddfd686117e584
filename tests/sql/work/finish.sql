-- Ending claims: each outcome alone, many at once, with a fetch; refusals; malformed input changes nothing.

select plan(133);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- An outcome in the form of finish_many.
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
select is(test.refusal(format('select queue.succeed(%s, %s)', :id, :claim)), 'QJ002', 'a claim ends once');
select is(test.refusal(format('select queue.fail(%s, %s, ''late'')', :id, :claim)), 'QJ002', 'whatever the outcome');
select is(test.refusal(format('select queue.retry_later(%s, %s)', :id, :claim)), 'QJ002', 'a yield too');
select is(test.refusal(format('select queue.release(%s, %s)', :id, :claim)), 'QJ002', 'a release too');
select is(test.refusal('select queue.succeed(123456, 1)'), 'QJ001', 'an id that is not there');
select is(test.refusal('select queue.succeed(null, 1)'), '22023', 'no id');
select is(test.refusal('select queue.release(1, null)'), '22023', 'no claim');
select is(pg_temp.job(:id), 'succeeded 1 0 1', 'nothing of that has changed the job');
select queue.defer('t') \g /dev/null
select id, claim from queue.fetch(:worker) \gset
select is(test.refusal(format('select queue.succeed(%s, %s)', :id, :claim - 1)), 'QJ002', 'an older claim is refused while the job runs');
select is(test.refusal(format('select queue.succeed(%s, %s)', :id, :claim + 1)), 'QJ002', 'a claim that never was too');
select is(test.refusal(format(call, :id, :claim - 1)), 'QJ002', call || ' with an older claim')
from (values ('select queue.fail(%s, %s, ''no'')'), ('select queue.retry_later(%s, %s)'), ('select queue.release(%s, %s)')) v (call);
select is((select string_agg(concat_ws(' ', f.state, f.error), ', ') from queue.finish_many(jsonb_build_array(pg_temp.outcome(:id, :claim - 1, 'failed'))) f), 'QJ002', 'among many too');
select is((select state from queue.jobs where id = :id), 'running', 'and the job runs on');

-- In the handler's own transaction
create table effect (job_id bigint);
begin;
insert into effect values (:id);
select queue.succeed(:id, :claim) \g /dev/null
rollback;
select is((select state from queue.jobs where id = :id), 'running', 'rolled back with the handler''s transaction, the outcome is none');
begin;
insert into effect values (:id);
select queue.succeed(:id, :claim) \g /dev/null
select is((select count(*) from pg_locks l where l.relation = 'queue.admission'::regclass and l.pid = pg_backend_pid() and l.mode = 'RowShareLock'), 0::bigint,
          'succeed takes no part in admission');
commit;
select is((select count(*) from effect), 1::bigint, 'committed with it, both exist');
select is((select state from queue.jobs where id = :id), 'succeeded', 'the outcome too');

-- QJ008
select queue.defer('t') \g /dev/null
select id, claim from queue.fetch(:worker) \gset
begin isolation level repeatable read;
select is(test.refusal(format(call, :id, :claim)), 'QJ008', format(call, 'id', 'claim') || ' in REPEATABLE READ')
from (values ('select queue.succeed(%s, %s)'), ('select queue.fail(%s, %s, ''no'')'), ('select queue.retry_later(%s, %s)'), ('select queue.release(%s, %s)'),
             ('select * from queue.finish_many(''[{"id": %s, "claim": %s, "outcome": "succeeded"}]'')'),
             ('select * from queue.finish_and_fetch(1, ''[{"id": %s, "claim": %s, "outcome": "succeeded"}]'')')) v (call);
rollback;
begin isolation level serializable;
select is(test.refusal(format('select queue.succeed(%s, %s)', :id, :claim)), 'QJ008', 'and in SERIALIZABLE');
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
select queue.tick() \g /dev/null
select is(pg_temp.job(:id), 'ready 0 0 1', 'no attempt is counted, the claim is');
select results_eq(format('select outcome from queue.attempts where job_id = %s', :id), array['released'], 'the history has it');
select is((select started_at from queue.jobs where id = :id), null, 'it has not started');
select is_empty('select * from queue.lease', 'its timeout ended with the claim');
select id as again, claim as claim2, attempt from queue.fetch(:worker) \gset
select is(:again::bigint, :id::bigint, 'it is claimed again, with its lock and slot');
select is(:attempt, 1, 'as its first attempt');
select cmp_ok(:claim2::bigint, '>', :claim::bigint, 'a claim''s number rises');
select is((select count(*) from queue.lease), 1::bigint, 'with a new timeout');
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
update queue.job_override set scheduled_at = now();
update queue.waiting set at = now();
select id, claim from queue.fetch(:worker) \gset
select queue.defer('need', queue => 'other') as need \gset
select is(queue.retry_later(:id, :claim, needs => array[:need]), 'waiting', 'after other jobs');
select queue.tick() \g /dev/null
select is((select state from queue.jobs where id = :id), 'waiting', 'for which it waits');
select * from queue.fetch(:worker, '{other}') \gset need_
select queue.succeed(:need_id, :need_claim) \g /dev/null
select id, claim, attempt from queue.fetch(:worker, '{default}') \gset
select is(:attempt, 4, 'it continues when they are done');
select is(queue.retry_later(:id, :claim), 'failed', 'after max_progress yields the next one fails');
select is(pg_temp.job(:id), 'failed max_progress 4 0 4', 'with that reason');
select is(test.refusal(call), '22023', call) from (values
  ('select queue.retry_later(1, 1, ''infinity'')'), ('select queue.retry_later(1, 1, needs => ''{1,null}'')'), ('select queue.retry_later(1, 1, needs => ''{-1}'')')) v (call);

-- The default is 100 yields; null is no limit.
select queue.defer('hundred') as hundred, queue.defer('endless', options => '{"max_progress": null}') as endless \gset
do $$
begin
  for i in 1 .. 101 loop
    perform queue.retry_later(f.id, f.claim) from queue.fetch((select max(w.id) from queue.workers w), null, 2) f;
    commit;
  end loop;
end $$;
select is(pg_temp.job(:hundred), 'failed max_progress 101 0 101', 'without max_progress the 101st yield fails');
select is((select progress from queue.jobs where id = :endless), 101, 'with null none does');
select id, claim from queue.fetch(:worker) \gset
select queue.succeed(:id, :claim) \g /dev/null

-- finish_many
select queue.defer('m1') as m1, queue.defer('m2') as m2, queue.defer('m3', options => '{"retry": {"base": "1 hour"}}') as m3, queue.defer('m4') as m4,
  queue.defer('m5') as m5, queue.defer('m6') as m6, queue.defer('m7') as m7 \gset
select max(claim) as claim from queue.fetch(:worker, null, 10) \gset
select results_eq(
  format($$select id, claim, state, error from queue.finish_many(jsonb_build_array(
    pg_temp.outcome(%1$s, %8$s, 'succeeded', '{"result": {"n": 1}}'), pg_temp.outcome(%2$s, %8$s, 'failed', '{"error": "no", "details": {"x": null}}'),
    pg_temp.outcome(%3$s, %8$s, 'failed', '{"error": "again", "options": {"priority": 3}}'), pg_temp.outcome(%4$s, %8$s, 'retry_later', '{"at": "2999-01-01T00:00:00Z", "message": "m"}'),
    pg_temp.outcome(%5$s, %8$s, 'released'), pg_temp.outcome(%6$s, %8$s - 1, 'succeeded'), pg_temp.outcome(%7$s, %8$s, 'aborted', '{"error": "told to"}'),
    pg_temp.outcome(999999, %8$s, 'failed', '{"error": "x"}'), pg_temp.outcome(999998, 1, 'succeeded'))) order by id$$,
    :m1, :m2, :m3, :m4, :m5, :m6, :m7, :claim),
  format($$values (%1$s::bigint, %8$s::bigint, 'succeeded', null), (%2$s, %8$s, 'failed', null), (%3$s, %8$s, 'scheduled', null), (%4$s, %8$s, 'scheduled', null),
    (%5$s, %8$s, 'ready', null), (%6$s, %8$s - 1, null, 'QJ002'), (%7$s, %8$s, 'cancelled', null), (999998, 1, null, 'QJ002'), (999999, %8$s, null, 'QJ001')$$,
    :m1, :m2, :m3, :m4, :m5, :m6, :m7, :claim),
  'finish_many takes every outcome, reports what is refused in its row, and goes on');
select is(pg_temp.job(:m7), 'cancelled aborted 1 0 1', 'an aborted job is cancelled');
select queue.tick() \g /dev/null
select is((select priority from queue.jobs where id = :m3), 3, 'options take effect');
select is((select result from queue.jobs where id = :m1), '{"n": 1}', 'so do results');
select is((select details from queue.attempts where job_id = :m2), '{"x": null}', 'and details');
select is((select state from queue.jobs where id = :m6), 'running', 'refused claims keep running');
select is_empty('select * from queue.finish_many(''[]'')', 'an empty list is fine');

-- One id twice: only the current claim counts, wherever it is in the list
select queue.release(:m6, :claim) \g /dev/null
select id as z, claim as claim2 from queue.fetch(:worker, options => jsonb_build_object('ids', jsonb_build_array(:m6))) \gset
select results_eq(
  format($$select claim, state, error from queue.finish_many(jsonb_build_array(pg_temp.outcome(%1$s, %2$s, 'succeeded', '{"result": 1}'), pg_temp.outcome(%1$s, %3$s, 'succeeded', '{"result": 2}'))) order by claim$$, :z, :claim2, :claim),
  format($$values (%s::bigint, null, 'QJ002'), (%s, 'succeeded', null)$$, :claim, :claim2), 'a zombie''s claim and the current one in one list');
select is((select result from queue.jobs where id = :z), '1', 'each with its own result');
select queue.defer('twice') as twice \gset
select claim from queue.fetch(:worker, options => jsonb_build_object('ids', jsonb_build_array(:twice))) \gset
select results_eq(
  format($$select state, error from queue.finish_many(jsonb_build_array(pg_temp.outcome(%1$s, %2$s, 'failed', '{"error": "e"}'), pg_temp.outcome(%1$s, %2$s, 'succeeded'))) order by state$$, :twice, :claim),
  $$values ('succeeded', null), (null, 'QJ002')$$, 'a claim ends once within a list too');

-- Malformed input changes nothing
select queue.defer('good') as good \gset
select claim from queue.fetch(:worker, options => jsonb_build_object('ids', jsonb_build_array(:good))) \gset
create function pg_temp.spoilt(bad text) returns text language sql as $$
  select test.refusal(format('select * from queue.finish_many(jsonb_build_array(%3$L::jsonb, pg_temp.outcome(%1$s, %2$s, ''succeeded'')))', j.id, j.claim, bad))
  from queue.jobs j where j.task = 'good'
$$;
select is(pg_temp.spoilt(bad), '22023', 'malformed: ' || left(bad, 100)) from (values
  ('1'), ('null'), ('[]'), ('"text"'), ('{}'), ('{"id": 1, "claim": 1}'), ('{"id": 1, "outcome": "succeeded"}'), ('{"claim": 1, "outcome": "succeeded"}'),
  ('{"id": "one", "claim": 1, "outcome": "succeeded"}'), ('{"id": 1.5, "claim": 1, "outcome": "succeeded"}'), ('{"id": 1e30, "claim": 1, "outcome": "succeeded"}'),
  ('{"id": [1], "claim": 1, "outcome": "succeeded"}'), ('{"id": null, "claim": 1, "outcome": "succeeded"}'), ('{"id": 1, "claim": 1, "outcome": null}'),
  ('{"id": 1, "claim": 1, "outcome": "done"}'), ('{"id": 1, "claim": 1, "outcome": "exploded"}'), ('{"id": 1, "claim": 1, "outcome": "retried"}'), ('{"id": 1, "claim": 1, "outcome": 1}'),
  ('{"id": 1, "claim": 1, "outcome": "succeeded", "extra": 1}'), ('{"id": 1, "claim": 1, "outcome": "failed", "extra": 1}'),
  ('{"id": 1, "claim": 1, "outcome": "failed", "error": {"a": 1}}'), ('{"id": 1, "claim": 1, "outcome": "failed", "error": 1}'),
  ('{"id": 1, "claim": 1, "outcome": "retry_later", "message": []}'), ('{"id": 1, "claim": 1, "outcome": "retry_later", "at": "soon"}'),
  ('{"id": 1, "claim": 1, "outcome": "retry_later", "at": "infinity"}'), ('{"id": 1, "claim": 1, "outcome": "retry_later", "at": 5}'),
  ('{"id": 1, "claim": 1, "outcome": "retry_later", "needs": 1}'), ('{"id": 1, "claim": 1, "outcome": "retry_later", "needs": ["one"]}'),
  ('{"id": 1, "claim": 1, "outcome": "retry_later", "needs": [null]}'), ('{"id": 1, "claim": 1, "outcome": "retry_later", "needs": [1.5]}'),
  ('{"id": 1, "claim": 1, "outcome": "retry_later", "needs": {"1": 1}}'),
  ('{"id": 1, "claim": 1, "outcome": "failed", "options": []}'), ('{"id": 1, "claim": 1, "outcome": "failed", "options": "x"}'),
  ('{"id": 1, "claim": 1, "outcome": "failed", "options": {"extra": 1}}'), ('{"id": 1, "claim": 1, "outcome": "failed", "options": {"retryable": "no"}}'),
  ('{"id": 1, "claim": 1, "outcome": "failed", "options": {"retry_in": "soon"}}'), ('{"id": 1, "claim": 1, "outcome": "failed", "options": {"retry_at": "2030-99-01"}}')) v (bad);
select is(test.refusal('select * from queue.finish_many(' || call || ')'), '22023', 'malformed: ' || call) from (values
  ('null'), ('''{}'''), ('''1'''), ('''"x"'''), ('''null'''), ('''{"id": 1, "claim": 1, "outcome": "succeeded"}''')) v (call);
select throws_ok($$select queue.finish_many('[1]')$$, '22023', 'an outcome must be a JSON object', 'which the message says');
select is((select state from queue.jobs where id = :good), 'running', 'all or nothing: the good outcome beside them was not stored');

-- A need that can't be seen, or that closes a cycle, is refused in its row
select queue.defer('other') as other \gset
select claim as other_claim from queue.fetch(:worker, options => jsonb_build_object('ids', jsonb_build_array(:other))) \gset
select results_eq(
  format($$select id, state, error from queue.finish_many(jsonb_build_array(pg_temp.outcome(%1$s, %2$s, 'retry_later', '{"needs": [888888]}'), pg_temp.outcome(%3$s, %4$s, 'succeeded'))) order by id$$,
         :good, :claim, :other, :other_claim),
  format($$values (%s::bigint, null, 'QJ001'), (%s, 'succeeded', null)$$, :good, :other), 'a need that is not there');
select results_eq(
  format($$select state, error from queue.finish_many(jsonb_build_array(pg_temp.outcome(%1$s, %2$s, 'retry_later', '{"needs": [%1$s]}')))$$, :good, :claim),
  $$values (null::text, 'QJ005')$$, 'a job that needs itself');
select is((select count(*) from queue.attempts where job_id = :good), 0::bigint, 'neither left anything');
select queue.succeed(:good, :claim) \g /dev/null

-- finish_and_fetch
select queue.defer('f1') as f1, queue.defer('f2') as f2 \gset
select id, claim from queue.fetch(:worker, options => jsonb_build_object('ids', jsonb_build_array(:f1))) \gset
select results_eq(
  format($$select id, task, attempt, error from queue.finish_and_fetch(%4$s, jsonb_build_array(pg_temp.outcome(%1$s, %2$s, 'succeeded'), pg_temp.outcome(%1$s, %2$s - 1, 'failed'), pg_temp.outcome(777777, 1, 'succeeded')), null, 1, '{"ids": [%3$s]}') order by id$$,
         :f1, :claim, :f2, :worker),
  format($$values (%s::bigint, null, null, 'QJ002'), (%s, 'f2', 1, null), (777777, null, null, 'QJ002')$$, :f1, :f2),
  'one round trip: what was refused, and what is to be done next');
select is((select state from queue.jobs where id = :f1), 'succeeded', 'the outcome counts');
select is(test.refusal(format('select * from queue.finish_and_fetch(%s, ''[{"id": 1}]'')', :worker)), '22023', 'malformed outcomes');
select is(test.refusal('select * from queue.finish_and_fetch(424242, ''[]'')'), 'QJ007', 'a worker that is not there');
select is(test.refusal(format('select * from queue.finish_and_fetch(%s, ''[]'', null, 0)', :worker)), '22023', 'max_jobs of 0');
select claim from queue.jobs where id = :f2 \gset
select is(test.refusal(format('select * from queue.finish_and_fetch(424242, ''[{"id": %s, "claim": %s, "outcome": "succeeded"}]'')', :f2, :claim)), 'QJ007', 'which undoes the outcomes with it');
select is((select state from queue.jobs where id = :f2), 'running', 'so that they can be sent again');
select is_empty(format('select * from queue.finish_and_fetch(%s, jsonb_build_array(pg_temp.outcome(%s, %s, ''succeeded'')), ''{nothing*}'')', :worker, :f2, :claim), 'with nothing to do it returns nothing');
select is((select state from queue.jobs where id = :f2), 'succeeded', 'and has finished');
select is_empty(format('select * from queue.finish_and_fetch(%s, null, ''{nothing*}'')', :worker), 'NULL for no outcomes');
select queue.defer('f3') as f3 \gset
select claim from queue.fetch(:worker, options => jsonb_build_object('ids', jsonb_build_array(:f3))) \gset
select results_eq(
  format($$select id, error from queue.finish_and_fetch(%s, jsonb_build_array(pg_temp.outcome(777777, 1, 'succeeded'), pg_temp.outcome(%s, %s, 'failed')), '{nothing*}')$$,
         :worker, :f3, :claim),
  $$values (777777::bigint, 'QJ002')$$, 'a refused success beside a failure that counts');

select * from finish();
