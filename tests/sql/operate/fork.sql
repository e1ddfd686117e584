-- Going back to a step: retry from it, and a copy that continues from it.

select plan(34);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

create function pg_temp.steps(id bigint) returns text language sql as $$
  select string_agg(s.name, ' ' order by s.claim, s.finished_at) from queue.steps s where s.job_id = steps.id
$$;

-- Four steps in two runs
select queue.defer('t', '{"n": 1}', lock => 'l', options => '{"retry": {"max_attempts": 9}}') as id \gset
select claim from queue.fetch(:worker) \gset
select queue.finish_step(:id, :claim, 'a', '1') \g /dev/null
select queue.finish_step(:id, :claim, 'b', '2') \g /dev/null
select queue.fail(:id, :claim, 'no') \g /dev/null
select claim from queue.fetch(:worker) \gset
select queue.finish_step(:id, :claim, 'c', '3') \g /dev/null
select queue.finish_step(:id, :claim, 'c#2', '4') \g /dev/null
select is((select error from queue.retry(array[:id], from_step => 'c')), 'QJ003', 'a running job does not go back');
select is(pg_temp.steps(:id), 'a b c c#2', 'nor are its steps');
select queue.succeed(:id, :claim) \g /dev/null

-- Forks
select queue.fork(:id, 'c') as fork \gset
select queue.fork(:id, 'a') as first \gset
select is(pg_temp.steps(:fork), 'a b', 'a fork has the steps before the one from which it continues');
select is(pg_temp.steps(:first), null, 'from the first step there are none');
select results_eq(format('select id, task, args, lock, steps, attempt from queue.fetch(%s, max_jobs => 5)', :worker),
                  format('values (%s::bigint, ''t''::text, ''{"n": 1}''::jsonb, ''l''::text, ''{"a": 1, "b": 2}''::jsonb, 1)', :fork), 'and comes with them when it first runs');
select claim from queue.jobs where id = :fork \gset
select is((select finished from queue.begin_step(:fork, :claim, 'b')), true, 'so that they do not run again');
select queue.finish_step(:fork, :claim, 'c', '"forked"') \g /dev/null
select is(pg_temp.steps(:id), 'a b c c#2', 'the job keeps its own');
select queue.succeed(:fork, :claim) \g /dev/null
select claim, steps is null as none from queue.fetch(:worker) \gset
select ok(:'none', 'the other comes without any');
select queue.succeed(:first, :claim) \g /dev/null
select queue.defer('plain') as plain \gset
select claim from queue.fetch(:worker) \gset
select queue.finish_step(:plain, :claim, 'x', '1') \g /dev/null
select queue.finish_step(:plain, :claim, 'y', '1') \g /dev/null
select queue.fork(:plain, 'y') as forked \gset
select results_eq(format('select id, steps from queue.fetch(%s)', :worker), format('values (%s::bigint, ''{"x": 1}''::jsonb)', :forked), 'a plain job''s fork comes with its steps, as a newcomer');
select queue.wait(:forked, (select claim from queue.jobs where id = :forked), 'w', 's') \g /dev/null
select is(test.refusal(format('select queue.fork(%s, ''w'')', :forked)), 'QJ009', 'a step that is not finished is none');
select is(test.refusal('select queue.fork(999999, ''a'')'), 'QJ001', 'no such job');
select is_empty('select * from queue.check()', 'all is sound');

-- A copy finds the jobs that the job has awaited, however they ended, and waits for none of them.
select queue.defer('parent') as parent, queue.defer('good') as good, queue.defer('bad') as bad \gset
create function pg_temp.claim(worker bigint, job bigint) returns bigint language sql as $$
  select f.claim from queue.fetch(worker, options => jsonb_build_object('ids', array[job])) f
$$;
select pg_temp.claim(:worker, :parent) as claim \gset
select queue.finish_step(:parent, :claim, 'gather', jsonb_build_array(:good, :bad)) \g /dev/null
select queue.await_jobs(:parent, :claim, 'ended', array[:good, :bad]) \g /dev/null
select queue.succeed(:good, pg_temp.claim(:worker, :good), '"fine"') \g /dev/null
select queue.fail(:bad, pg_temp.claim(:worker, :bad), 'no') \g /dev/null
select pg_temp.claim(:worker, :parent) as claim \gset
select is(queue.fail_step(:parent, :claim, 'shaky', 'no', null, '{"retry": {"max_attempts": 2}}'), 'ready', 'a step fails once');
select pg_temp.claim(:worker, :parent) as claim \gset
select queue.finish_step(:parent, :claim, 'then') \g /dev/null
select queue.fork(:parent, 'then') as fork, queue.copy(:parent) as copy \gset
select queue.fork(queue.fork(:parent, 'then'), 'ended') as second \gset
select queue.tick() \g /dev/null
select is((select string_agg(j.state, ' ' order by j.id) from queue.jobs j where j.id in (:fork, :copy, :second)), 'ready ready ready', 'copies of a job of which a child has failed are ready');
select results_eq(format('select need_id, state, result, error from queue.needs(%s)', :fork), format('values (%s::bigint, ''succeeded''::text, ''"fine"''::jsonb, null::text), (%s, ''failed'', null, ''no'')', :good, :bad), 'a fork finds what became of the children');
select results_eq(format('select need_id from queue.needs(%s)', :second), format('values (%s::bigint), (%s)', :good, :bad), 'so does a fork of a fork');
select is_empty(format('select * from queue.needs(%s)', :copy), 'a copy begins anew');
select is(pg_temp.steps(:fork), 'gather ended', 'with the finished steps before the one');
select is_empty(format('select * from queue.step where job_id = %s and name = ''shaky''', :fork), 'but without failures of another');
select queue.cancel(j.id) from queue.jobs j where j.id in (:fork, :copy, :second) or j.state = 'ready' \g /dev/null
select queue.succeed(:parent, :claim) \g /dev/null

-- Retries
select results_eq(format('select * from queue.retry(array[%s, %s, 999999], from_step => ''c'')', :id, :plain),
                  format('values (%s::bigint, ''ready''::text, null::text), (999999, null, ''QJ001''), (%s, ''running'', ''QJ009'')', :id, :plain), 'a retry from a step');
select is(pg_temp.steps(:id), 'a b', 'forgets it and those after it');
select claim, steps::text as steps from queue.fetch(:worker, options => format('{"ids": [%s]}', :id)::jsonb) \gset
select is(:'steps'::jsonb, '{"a": 1, "b": 2}', 'and continues there');
select is((select error from queue.retry(array[:id], true, 'a')), null, 'with force one that runs too');
select is(pg_temp.steps(:id), null, 'from the first');
select is(test.refusal(format('select queue.finish_step(%s, %s, ''late'')', :id, :claim)), 'QJ002', 'the run before can no longer finish a step');
select claim, coalesce(steps::text, 'none') as steps from queue.fetch(:worker, options => format('{"ids": [%s]}', :id)::jsonb) \gset
select is(:'steps'::text, 'none', 'it begins again');
select queue.sleep(:id, :claim, 'nap', now() + interval '1 day') \g /dev/null
select is((select outcome from queue.retry(array[:id])), 'ready', 'one that sleeps is woken');
select claim, steps ? 'nap' as slept from queue.fetch(:worker, options => format('{"ids": [%s]}', :id)::jsonb) \gset
select ok(:'slept', 'and has slept');
select queue.wait(:id, :claim, 'w', 's') \g /dev/null
select is_empty(format('select * from queue.fetch(%s)', :worker), 'one that waits');
select is((select outcome from queue.retry(array[:id])), 'ready', 'continues');
select claim, steps ? 'w' as waited from queue.fetch(:worker, options => format('{"ids": [%s]}', :id)::jsonb) \gset
select ok(not :'waited', 'and comes to its wait again');
select is_empty('select * from queue.suspended where job_id = ' || :id, 'it waits no longer');
select is_empty('select * from queue.check()', 'all is sound');
select queue.delete(array(select id from queue.jobs), true) \g /dev/null
select is((select count(*) from queue.step), 0::bigint, 'deleted jobs leave nothing');

select * from finish();
