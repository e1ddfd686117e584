-- Steps: finished once, by the current claim, with a number for each use of a name in a run; the steps that fetch returns.

select plan(62);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- A job's step in the view.
create function pg_temp.steps(id bigint) returns text language sql as $$
  select string_agg(concat_ws('=', s.name, s.value), ' ' order by s.name) from queue.steps s where s.job_id = steps.id
$$;

-- One step, in a run and in the next
select queue.defer('t', options => '{"retry": {"max_attempts": 9}}') as id \gset
select claim, steps is null as none from queue.fetch(:worker) \gset
select ok(:'none', 'a job without steps comes without any');
select results_eq(format('select * from queue.begin_step(%s, %s, ''charge'')', :id, :claim), 'values (false, null::jsonb)', 'a new step is not finished');
select is((select count(*) from queue.step), 0::bigint, 'to ask leaves nothing');
select lives_ok(format('select queue.finish_step(%s, %s, ''charge'', ''{"amount": 5}'')', :id, :claim), 'it is finished');
select results_eq('select job_id, name, value, fingerprint, claim, finished_at <= now() from queue.steps',
                  format('values (%s::bigint, ''charge'', ''{"amount": 5}''::jsonb, null::text, %s::bigint, true)', :id, :claim), 'the view shows it');
select is(test.refusal(format('select queue.finish_step(%s, %s, ''charge'', ''6'')', :id, :claim)), 'QJ003', 'once');
select is(pg_temp.steps(:id), 'charge={"amount": 5}', 'its value is what it was');
select is(queue.fail(:id, :claim, 'later'), 'ready', 'the run fails');
select claim as old, :claim as first from queue.jobs where id = :id \gset
select id as again, claim, attempt, steps::text as steps from queue.fetch(:worker) \gset
select is(:'steps'::jsonb, '{"charge": {"amount": 5}}', 'the next comes with the step');
select results_eq(format('select * from queue.begin_step(%s, %s, ''charge'')', :id, :claim), 'values (true, ''{"amount": 5}''::jsonb)', 'begin_step returns it too');
select is((select claim from queue.steps), :first::bigint, 'it stays that of the claim which finished it');

-- Names that are used repeatedly
select results_eq(format('select * from queue.begin_step(%s, %s, ''charge'')', :id, :claim), 'values (false, null::jsonb)', 'the second use of the name in this run is another step');
select is(pg_temp.steps(:id), 'charge={"amount": 5}', 'which is not shown before it is finished');
select lives_ok(format('select queue.finish_step(%s, %s, ''charge'', ''2'')', :id, :claim), 'it is finished by its name');
select is(pg_temp.steps(:id), 'charge={"amount": 5} charge#2=2', 'and is the second');
select is((select finished from queue.begin_step(:id, :claim, 'charge')), false, 'the third');
select is((select finished from queue.begin_step(:id, :claim, 'charge')), false, 'asked again, before it is finished, is the third');
select lives_ok(format('select queue.finish_step(%s, %s, ''charge'', ''3'')', :id, :claim), 'is finished');
select lives_ok(format('select queue.finish_step(%s, %s, ''charge#5'', ''5'')', :id, :claim), 'a number says which use it is');
select is(pg_temp.steps(:id), 'charge={"amount": 5} charge#2=2 charge#3=3 charge#5=5', 'of the name');
select is((select value from queue.begin_step(:id, :claim, 'charge#2')), '2', 'also to begin_step');
select is(test.refusal(format('select queue.finish_step(%s, %s, ''charge#2'')', :id, :claim)), 'QJ003', 'and to its end, which is refused');
select lives_ok(format('select queue.finish_step(%s, %s, ''a#b'')', :id, :claim), 'text after # that is not a number belongs to the name');
select queue.release(:id, :claim) \g /dev/null
select claim, steps::text as steps from queue.fetch(:worker) \gset
select is(:'steps'::jsonb, '{"charge": {"amount": 5}, "charge#2": 2, "charge#3": 3, "charge#5": 5, "a#b": null}', 'after a release all come again');
select is(array(select b.value from generate_series(1, 4) cross join lateral queue.begin_step(:id, :claim + generate_series * 0, 'charge') b), '{"{\"amount\": 5}", 2, 3, 5}',
          'a run that asks for each gets them in their order');
select is((select finished from queue.begin_step(:id, :claim, 'charge')), false, 'and then one that is new');

-- Fingerprints
select is((select finished from queue.begin_step(:id, :claim, 'pay', 'v1')), false, 'a step with a fingerprint begins');
select is(queue.fail(:id, :claim, 'later'), 'ready', 'its run ends before it does');
select claim, steps ? 'pay' as begun from queue.fetch(:worker) \gset
select ok(not :'begun', 'the next comes without it');
select is((select finished from queue.begin_step(:id, :claim, 'pay', 'v2')), false, 'it may change as long as it is not finished');
select lives_ok(format('select queue.finish_step(%s, %s, ''pay'', ''true'')', :id, :claim), 'it is finished');
select is((select fingerprint from queue.steps where name = 'pay'), 'v2', 'with the fingerprint of its last beginning');
select queue.fail(:id, :claim, 'later') \g /dev/null
select claim from queue.fetch(:worker) \gset
select throws_ok(format('select * from queue.begin_step(%s, %s, ''pay'', ''v3'')', :id, :claim), 'QJ009', 'step changed', 'then another is refused');
select is((select value from queue.begin_step(:id, :claim, 'pay', 'v2')), 'true', 'the same is not');
select is((select value from queue.begin_step(:id, :claim, 'a#b', 'v1')), null, 'nor one where there was none');

-- Refusals, which change nothing
select is(test.refusal(format(call, :id, :claim - 1)), 'QJ002', format(call, 'id', 'an old claim'))
from (values ('select * from queue.begin_step(%s, %s, ''x'')'), ('select queue.finish_step(%s, %s, ''x'')'), ('select * from queue.read_steps(%s, %s)')) v (call);
select is(test.refusal('select queue.finish_step(999999, 1, ''x'')'), 'QJ001', 'no such job');
select is(test.refusal(format('select queue.finish_step(%s, %s, '''')', :id, :claim)), '22023', 'no name');
select is(test.refusal(format('select queue.begin_step(%s, %s, repeat(''x'', 1001))', :id, :claim)), '22023', 'too long a name');
select is(test.refusal(format('select queue.begin_step(%s, %s, ''x'', repeat(''x'', 1001))', :id, :claim)), '22023', 'too long a fingerprint');
select queue.configure('{"max_size": 100000}') \g /dev/null
select is(test.refusal(format('select queue.finish_step(%s, %s, ''x'', to_jsonb(repeat(''x'', 200000)))', :id, :claim)), '22023', 'too large a value');
begin isolation level repeatable read;
select is(test.refusal(format('select queue.finish_step(%s, %s, ''x'')', :id, :claim)), 'QJ008', 'the wrong isolation level');
rollback;
select is_empty('select * from queue.steps where name = ''x''', 'nothing of that left a step');

-- In the handler's own transaction
create table effect (n integer);
begin;
insert into effect values (1);
select queue.finish_step(:id, :claim, 'own') \g /dev/null
rollback;
select is((select finished from queue.begin_step(:id, :claim, 'own')), false, 'rolled back with the writes, a step is not finished');
begin;
insert into effect values (1);
select queue.finish_step(:id, :claim, 'own') \g /dev/null
select queue.succeed(:id, :claim) \g /dev/null
commit;
select is((select count(*) from effect), 1::bigint, 'they commit together, with the job''s end too');
select is((select state from queue.jobs where id = :id), 'succeeded', 'which may be in the same transaction');
select isnt_empty(format('select from queue.steps where job_id = %s', :id), 'a finished job keeps its steps');
select is((select outcome from queue.retry(array[:id])), 'ready', 'retried');
select claim, steps::text as steps from queue.fetch(:worker) \gset
select ok(:'steps'::jsonb ? 'own', 'it has them still');

-- More than fits into one answer
select queue.finish_step(:id, :claim, 'big' || n, to_jsonb(string_agg(md5(n::text || i), ''))) from generate_series(1, 3) n, generate_series(1, 1250) i group by n \g /dev/null
select queue.release(:id, :claim) \g /dev/null
select claim, steps::text as steps from queue.fetch(:worker) \gset
select is(:'steps'::jsonb, '{}', 'steps of more than 64 kB are left out of the answer');
select is((select string_agg(name, ' ' order by name) from queue.read_steps(:id, :claim)), 'a#b big1', 'and read by a call, as many as fit into its answer');
select is((select string_agg(name, ' ' order by name) from queue.read_steps(:id, :claim, 'big2')), 'big3 charge charge#2 charge#3 charge#5 own pay', 'after the last');
select is_empty(format('select * from queue.read_steps(%s, %s, ''pay'')', :id, :claim), 'until there are none');
select queue.succeed(:id, :claim) \g /dev/null

-- Two uses that are begun; values that are short only as stored
select queue.defer('t') as two \gset
select claim from queue.fetch(:worker) \gset
select queue.begin_step(:two, :claim, 'twice', 'v1'), queue.begin_step(:two, :claim, 'twice#2', 'v1') \g /dev/null
select queue.finish_step(:two, :claim, 'twice', '1') \g /dev/null
select is(pg_temp.steps(:two), 'twice=1', 'of uses that are begun the first is finished');
select is((queue._step_key('twice#0'))::text, '(twice#0,)', 'no use has the number 0');
select queue.finish_step(:two, :claim, 'flat', to_jsonb(repeat('x', 70000))) \g /dev/null
select queue.release(:two, :claim) \g /dev/null
select steps::text as steps from queue.fetch(:worker) \gset
select is(:'steps'::jsonb, '{}', 'a value that is long only in the answer is left out of it');
select queue.delete(array[:two], true) \g /dev/null

-- Names that contain numbers come back as they were given: n#1 is no use of n, which has no number.
select queue.defer('t') as two \gset
select claim from queue.fetch(:worker) \gset
select queue.finish_step(:two, :claim, name, '1') from unnest(array['n', 'n#1', 'n#2', 'n#2#1', 'n#2#2', 'n#02', '#2', 'n#', 'n #1', 'n#1234567890', E'n\n#3', 'é#2']) name \g /dev/null
select queue.release(:two, :claim) \g /dev/null
select steps::text as steps from queue.fetch(:worker) \gset
select is(array(select jsonb_object_keys(:'steps'::jsonb) collate "C" order by 1), array(select name collate "C" from unnest(array['n', 'n#1', 'n#2', 'n#2#1', 'n#2#2', 'n#02', '#2', 'n#', 'n #1', 'n#1234567890', E'n\n#3', 'é#2']) name order by 1),
          'names come back as they were given');
select queue.delete(array[:two], true) \g /dev/null

select is((select outcome from queue.delete(array[:id])), 'deleted', 'a job that is deleted');
select is((select count(*) from queue.step), 0::bigint, 'takes its steps with it');
select is_empty('select * from queue.check()', 'all is sound');
select * from finish();
