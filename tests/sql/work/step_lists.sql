-- Lists of steps: finished by one call, or stored with the outcome of their run.

select plan(55);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- A job's steps in the view, in the order of their times.
create function pg_temp.steps(id bigint) returns text language sql as $$
  select string_agg(concat_ws('=', s.name, s.value, s.fingerprint), ' ' order by s.finished_at) from queue.steps s where s.job_id = steps.id
$$;

-- An outcome in the form of finish_many.
create function pg_temp.outcome(id bigint, claim bigint, outcome text, steps jsonb, more jsonb default '{}') returns jsonb language sql as $$
  select jsonb_build_object('id', id, 'claim', claim, 'outcome', outcome, 'steps', steps) || more
$$;

-- A call
select queue.defer('t', options => '{"retry": {"max_attempts": 9}}') as id \gset
select claim from queue.fetch(:worker) \gset
select lives_ok(format('select queue.finish_steps(%s, %s, ''[{"name": "b", "value": {"n": 1}}, {"name": "a", "fingerprint": "v1"}, {"name": "b#2", "value": null}]'')', :id, :claim), 'several steps are finished');
select is(pg_temp.steps(:id), 'b={"n": 1} a=v1 b#2', 'in their order, with values and fingerprints');
select is((select count(distinct finished_at) from queue.steps), 3::bigint, 'each at a time of its own');
select ok((select max(finished_at) <= clock_timestamp() and min(finished_at) > clock_timestamp() - interval '1 minute' from queue.steps), 'which is now');
select is((select count(*) from queue.step where run = :claim and claim = :claim), 3::bigint, 'by this claim');
select lives_ok(format('select queue.finish_steps(%s, %s, ''[]'')', :id, :claim), 'an empty list is one');
select is(test.refusal(format('select queue.finish_steps(%s, %s, ''[{"name": "c"}, {"name": "b#2"}]'')', :id, :claim)), 'QJ003', 'a step that is finished is refused');
select is(pg_temp.steps(:id), 'b={"n": 1} a=v1 b#2', 'and with it the others');
select queue.begin_step(:id, :claim, 'd', 'v1'), queue.begin_step(:id, :claim, 'e', 'v1') \g /dev/null
select queue.finish_steps(:id, :claim, '[{"name": "d", "value": 4}, {"name": "e", "value": 5, "fingerprint": "v2"}]') \g /dev/null
select is(pg_temp.steps(:id), 'b={"n": 1} a=v1 b#2 d=4=v1 e=5=v2', 'steps that were begun keep their fingerprint unless there is another');
select is((select finished from queue.begin_step(:id, :claim, 'd#2')), false, 'the next use of a name is another step');

-- Refusals, which change nothing
select is(test.refusal(format('select queue.finish_steps(%s, %s, %L)', :id, :claim, steps)), '22023', left(coalesce(steps, 'NULL'), 60))
from (values (null), ('{}'), ('"a"'), ('[1]'), ('[null]'), ('["a"]'), ('[{}]'), ('[{"name": ""}]'), ('[{"name": 5}]'), ('[{"name": null}]'), ('[{"name": "x", "fingerprint": 5}]'),
  ('[{"name": "x", "fingerprint": ""}]'), ('[{"name": "x", "more": 1}]'), ('[{"name": "x"}, {"name": "x"}]'), ('[{"name": "x#2"}, {"name": "y"}, {"name": "x#2"}]'),
  ('[{"name": "' || repeat('x', 1001) || '"}]'), ('[{"name": "x", "fingerprint": "' || repeat('x', 1001) || '"}]'),
  ((select jsonb_agg(jsonb_build_object('name', 'n' || n)) from generate_series(1, 1001) n)::text)) v (steps);
select queue.configure('{"max_size": 100000}') \g /dev/null
select is(test.refusal(format('select queue.finish_steps(%s, %s, jsonb_build_array(jsonb_build_object(''name'', ''x'', ''value'', repeat(''x'', 200000))))', :id, :claim)), '22023', 'too large a value');
select is(test.refusal(format('select queue.finish_steps(%s, %s, ''[{"name": "x"}]'')', :id, :claim - 1)), 'QJ002', 'an old claim');
select is(test.refusal('select queue.finish_steps(999999, 1, ''[]'')'), 'QJ001', 'no such job');
begin isolation level repeatable read;
select is(test.refusal(format('select queue.finish_steps(%s, %s, ''[]'')', :id, :claim)), 'QJ008', 'the wrong isolation level');
rollback;
select is((select count(*) from queue.step where finished_at is not null), 5::bigint, 'nothing of that left a step');
select lives_ok(format('select queue.finish_steps(%s, %s, (select jsonb_agg(jsonb_build_object(''name'', ''many'', ''value'', n) || jsonb_build_object(''name'', ''many#'' || n)) from generate_series(1, 1000) n))', :id, :claim), 'a thousand are accepted');
select is((select string_agg(value::text, ' ' order by finished_at) from queue.steps where value::text in ('1', '2', '999', '1000') and name like 'many%'), '1 2 999 1000', 'in their order');
select queue.delete(array[:id], true) \g /dev/null

-- With outcomes
select queue.defer('t', options => '{"retry": {"max_attempts": 9}}') as id \gset
select claim from queue.fetch(:worker) \gset
select is((select state from queue.finish_many(jsonb_build_array(pg_temp.outcome(:id, :claim, 'failed', '[{"name": "a", "value": 1}, {"name": "b", "value": 2}]', '{"error": "later"}')))), 'ready', 'a run fails with steps');
select claim as old, :claim as first from queue.jobs where id = :id \gset
select claim, steps::text as steps from queue.fetch(:worker) \gset
select is(:'steps'::jsonb, '{"a": 1, "b": 2}', 'the next comes with them');
select is((select error from queue.finish_many(jsonb_build_array(pg_temp.outcome(:id, :first, 'released', '[{"name": "lost"}]')))), 'QJ002', 'an outcome of a lost claim');
select is(pg_temp.steps(:id), 'a=1 b=2', 'stores no step');
select results_eq(format('select id, state, error from queue.finish_many(jsonb_build_array(pg_temp.outcome(%1$s, %2$s, ''succeeded'', ''[{"name": "old"}]''), pg_temp.outcome(%1$s, %3$s, ''retry_later'', ''[{"name": "c", "value": 3}]'', ''{"needs": []}'')))', :id, :first, :claim),
                  format('values (%1$s::bigint, null, ''QJ002''), (%1$s::bigint, ''ready'', null)', :id), 'nor one in a list with that of the current claim');
select is(pg_temp.steps(:id), 'a=1 b=2 c=3', 'which stores its own');
select claim from queue.fetch(:worker) \gset
select is((select state from queue.finish_many(jsonb_build_array(pg_temp.outcome(:id, :claim, 'released', '[{"name": "a", "value": "other"}, {"name": "d", "value": 4}]')))), 'ready', 'a step that is finished does not refuse an outcome');
select is(pg_temp.steps(:id), 'a=1 b=2 c=3 d=4', 'but stays as it is');
select claim from queue.fetch(:worker) \gset
select is(test.refusal(format('select queue.finish_many(jsonb_build_array(pg_temp.outcome(%s, %s, ''succeeded'', ''[{"name": 5}]'')))', :id, :claim)), '22023', 'a malformed step refuses the list');
select is(test.refusal(format('select queue.finish_many(jsonb_build_array(''{"id": 1, "claim": 1, "outcome": "succeeded"}''::jsonb, pg_temp.outcome(%s, %s, ''succeeded'', ''5'')))', :id, :claim)), '22023', 'also where it is not the first outcome');
select is((select state from queue.jobs where id = :id), 'running', 'which changes nothing');
select is((select error from queue.finish_many(jsonb_build_array(pg_temp.outcome(:id, :claim, 'retry_later', '[{"name": "e", "value": 5}]', jsonb_build_object('needs', array[:id]))))), 'QJ005', 'an outcome that asks for a cycle is refused');
select is(pg_temp.steps(:id), 'a=1 b=2 c=3 d=4 e=5', 'but its steps are stored: the run had finished them');

-- Successes, with a plain job before and after, and with a fetch
select queue.defer('t'), queue.defer('t') \g /dev/null
create temp table claims as select id, claim from queue.fetch(:worker, max_jobs => 2);
insert into claims values (:id, :claim);
select is((select count(*) from claims c, queue.finish_many((select jsonb_agg(case when id = :id then pg_temp.outcome(id, claim, 'succeeded', '[{"name": "f", "value": 6}]') else pg_temp.outcome(id, claim, 'succeeded', null) - 'steps' end order by id desc) from claims)) f where f.id = c.id and f.state = 'succeeded'),
          3::bigint, 'steps come with one of several successes');
select is(pg_temp.steps(:id), 'a=1 b=2 c=3 d=4 e=5 f=6', 'and are stored');
select is((select outcome from queue.retry(array[:id])), 'ready', 'retried');
select claim from queue.fetch(:worker) \gset
select is((select count(*) from queue.finish_and_fetch(:worker, jsonb_build_array(pg_temp.outcome(:id, :claim, 'succeeded', '[{"name": "g"}]', '{"result": 5}')))), 0::bigint, 'finish_and_fetch takes steps too');
select queue.fork(:id, 'd') as copy \gset
select is(pg_temp.steps(:copy), 'a=1 b=2 c=3', 'a fork has the steps before one, of whichever call');
select is((select result from queue.jobs where id = :id), '5', 'the result is there too');

select is_empty('select * from queue.check()', 'all is sound');
select * from finish();
