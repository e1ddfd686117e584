-- Needs: modes, failures and their retries, yields, cycles, deadlines, retention.
-- The full table is in tests/py/races/test_needs_oracle.py, the races are in admit/needs.*.spec.

select plan(193);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

create function pg_temp.refusal(call text) returns text language plpgsql as $$
declare
  v_detail text;
  v_hint text;
begin
  execute call;
  return 'accepted';
exception when others then
  get stacked diagnostics v_hint = pg_exception_hint, v_detail = pg_exception_detail;
  return concat_ws(' ', sqlstate, case when sqlstate <> '22023' then nullif(v_detail, '') end, case when v_hint = '' then 'without a hint' end);
end $$;

-- Defers a job whose needs are named by their tasks.
create function pg_temp.defer(task text, needs text default '', mode text default 'all', failure text default 'block', more jsonb default '{}')
returns bigint language sql as $$
  select queue.defer(defer.task, needs => (select array_agg(j.id) from queue.jobs j where j.task = any (string_to_array(defer.needs, ' '))),
    options => jsonb_build_object('needs_mode', mode, 'on_need_failure', failure) || more)
$$;
create function pg_temp.id(task text) returns bigint language sql as $$
  select j.id from queue.jobs j where j.task = id.task
$$;
-- Claims a job and ends it with this outcome.
create function pg_temp.run(task text, outcome text default 'succeeded', more jsonb default '{}') returns text language plpgsql as $$
declare
  v_claim bigint;
  v_said text;
begin
  select f.claim into v_claim
  from queue.fetch((select max(w.id) from queue.workers w), options => jsonb_build_object('ids', jsonb_build_array(pg_temp.id(run.task)))) f;
  if v_claim is null then
    return 'not ready';
  end if;
  if run.outcome = 'none' then
    return 'running';
  end if;
  select coalesce(f.error, f.state) into v_said
  from queue.finish_many(jsonb_build_array(jsonb_build_object('id', pg_temp.id(run.task), 'claim', v_claim, 'outcome', run.outcome) || run.more)) f;
  return v_said;
end $$;
-- Ends a running job with this outcome.
create function pg_temp.finish(task text, outcome text default 'succeeded', more jsonb default '{}') returns text language sql as $$
  select coalesce(f.error, f.state)
  from queue.finish_many((select jsonb_build_array(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', finish.outcome) || finish.more)
                          from queue.jobs j where j.task = finish.task)) f
$$;
create function pg_temp.ids(variadic tasks text[]) returns jsonb language sql as $$
  select jsonb_agg(j.id) from queue.jobs j where j.task = any (tasks)
$$;
-- The states of all jobs: "task:state ...".
create function pg_temp.states() returns text language plpgsql as $$
begin
  perform from queue.tick();
  return (select string_agg(j.task || ':' || j.state, ' ' order by j.id) from queue.jobs j);
end $$;
create procedure pg_temp.clear() language plpgsql as $$
begin
  perform queue.delete(array_agg(j.id), true) from (select j.id, row_number() over (order by j.id) / 1000 as n from queue.jobs j) j group by j.n;
end $$;

-- Arguments
select is(pg_temp.refusal('select queue.defer(''t'', needs => array[null]::bigint[])'), '22023', 'NULL is no need');
select is(pg_temp.refusal('select queue.defer(''t'', needs => ''{{1},{2}}'')'), '22023', 'nor is a list of lists one');
select is(pg_temp.refusal('select queue.defer(''t'', needs => array[123456])'), 'QJ001 id: 123456', 'a need must be there');
select is(pg_temp.refusal('select queue.defer_many(''[{"task": "t", "needs": [123456]}]'')'), 'QJ001 id: 123456', 'in a batch too');
select is(pg_temp.refusal('select queue.defer(''t'', options => ''{"needs_mode": "some"}'')'), '22023', 'an unknown mode');
select is(pg_temp.refusal('select queue.defer(''t'', options => ''{"on_need_failure": "stop"}'')'), '22023', 'an unknown behaviour');
select is_empty('select from queue.job', 'nothing of that was deferred');
select pg_temp.defer('a') \g /dev/null
select queue.defer('d', needs => array[pg_temp.id('a'), pg_temp.id('a')]) \g /dev/null
select is((select j.needs from queue.jobs j where j.task = 'd'), array[pg_temp.id('a')], 'a need counts once');
select is(pg_temp.states(), 'a:ready d:waiting', 'it waits');
select is(queue.why(pg_temp.id('d')), format('it needs job %s (ready)', pg_temp.id('a')), 'and why says for what');
select is((select count(*) from queue.fetch(:worker, max_jobs => 10)), 1::bigint, 'fetch gives the need alone');
select is(pg_temp.finish('a'), 'succeeded', 'which succeeds');
select is(pg_temp.run('d'), 'succeeded', 'then the dependent runs');
call pg_temp.clear();

-- A need in the same transaction, also if it runs, ends or is held before it is admitted
begin;
select pg_temp.defer('a'), pg_temp.defer('b', 'a'), pg_temp.defer('c', 'a b') \g /dev/null
commit;
select is(pg_temp.states(), 'a:ready b:waiting c:waiting', 'jobs of one transaction');
select is(pg_temp.run('a'), 'succeeded', 'a');
select is(pg_temp.states(), 'a:succeeded b:ready c:waiting', 'one need of two is not enough');
select is(pg_temp.run('b'), 'succeeded', 'b');
select is(pg_temp.run('c'), 'succeeded', 'c');
select pg_temp.defer('d', 'a b') \g /dev/null
select is(pg_temp.states(), 'a:succeeded b:succeeded c:succeeded d:ready', 'succeeded needs block nothing');
call pg_temp.clear();

-- Modes and failures
select pg_temp.defer(t) from unnest('{a,b}'::text[]) t \g /dev/null
select pg_temp.defer(m || '_' || f, 'a b', m, f) from unnest('{all,any}'::text[]) m, unnest('{block,proceed}'::text[]) f \g /dev/null
select is(pg_temp.states(), 'a:ready b:ready all_block:waiting all_proceed:waiting any_block:waiting any_proceed:waiting', 'all wait');
select is(pg_temp.run('a', 'failed', '{"error": "e"}'), 'failed', 'one need fails');
select is(pg_temp.states(), 'a:failed b:ready all_block:upstream_failed all_proceed:waiting any_block:waiting any_proceed:ready',
          'under any and block one failure dooms nothing; under any and proceed it lets go');
select is(queue.why(pg_temp.id('all_block')), format('a need failed; retry it: job %s (failed)', pg_temp.id('a')), 'why says which failed');
select is(queue.cancel(pg_temp.id('b')), 'cancelled', 'the other is cancelled');
select is(pg_temp.states(), 'a:failed b:cancelled all_block:upstream_failed all_proceed:ready any_block:upstream_failed any_proceed:ready', 'all have failed');
select is((select r.outcome from queue.retry(array[pg_temp.id('b')]) r), 'ready', 'it is retried');
select is(pg_temp.states(), 'a:failed b:ready all_block:upstream_failed all_proceed:waiting any_block:waiting any_proceed:ready',
          'its dependents wait again, also one that it had let go and that has not started');
select is(pg_temp.run('b'), 'succeeded', 'and succeeds');
select is(pg_temp.states(), 'a:failed b:succeeded all_block:upstream_failed all_proceed:ready any_block:ready any_proceed:ready', 'one has succeeded');
select is(queue.hold(pg_temp.id('any_block')), 'held', 'a dependent is held');
select is((select r.outcome from queue.retry(array[pg_temp.id('a')]) r), 'ready', 'the first is retried');
select is(pg_temp.run('a'), 'succeeded', 'and succeeds');
select is(pg_temp.states(), 'a:succeeded b:succeeded all_block:ready all_proceed:ready any_block:held any_proceed:ready', 'all go');
call pg_temp.clear();

-- A succeeded job is retried while its needs have failed
select pg_temp.defer('a'), pg_temp.defer('b', 'a') \g /dev/null
select is(pg_temp.run('a', 'failed'), 'failed', 'a need fails');
select is((select d.outcome from queue.done(array[pg_temp.id('b')]) d), 'succeeded', 'its dependent is done by hand');
select pg_temp.defer(m || '_' || f, 'b', m, f) from unnest('{all,any}'::text[]) m, unnest('{block,proceed}'::text[]) f \g /dev/null
select is(pg_temp.states(), 'a:failed b:succeeded all_block:ready all_proceed:ready any_block:ready any_proceed:ready', 'which lets others go');
select is((select r.outcome from queue.retry(array[pg_temp.id('b')]) r), 'upstream_failed', 'retried, it can not run');
select is(pg_temp.states(), 'a:failed b:upstream_failed all_block:upstream_failed all_proceed:ready any_block:upstream_failed any_proceed:ready',
          'nor can those that it had let go');
select is((select r.outcome from queue.retry(array[pg_temp.id('a')]) r), 'ready', 'the need is retried');
select is(pg_temp.states(), 'a:ready b:waiting all_block:waiting all_proceed:waiting any_block:waiting any_proceed:waiting', 'all wait again');
call pg_temp.clear();

-- held counts as failed, but only while it lasts
select pg_temp.defer('a', more => '{"held": true}'), pg_temp.defer('b') \g /dev/null
select pg_temp.defer('d', 'a b'), pg_temp.defer('p', 'a', failure => 'proceed'), pg_temp.defer('e', 'd') \g /dev/null
select is(pg_temp.states(), 'a:held b:ready d:upstream_failed p:ready e:upstream_failed', 'a held need has failed');
select is(queue.unhold(pg_temp.id('a')), 'ready', 'let go');
select is(pg_temp.states(), 'a:ready b:ready d:waiting p:waiting e:waiting', 'it is pending again');
select is(queue.hold(pg_temp.id('b')), 'held', 'the other is held');
select is(pg_temp.states(), 'a:ready b:held d:upstream_failed p:waiting e:upstream_failed', 'and failure spreads recursively');
select is(queue.cancel(pg_temp.id('e')), 'cancelled', 'a dependent may be cancelled meanwhile');
select is(queue.unhold(pg_temp.id('b')), 'ready', 'let go');
select is(pg_temp.states(), 'a:ready b:ready d:waiting p:waiting e:cancelled', 'and stays so');
call pg_temp.clear();

-- Deferred together with its dependent
select pg_temp.defer('a', more => '{"held": true}') as a \gset
select queue.defer('d', lock => 'l', needs => array[:a]), queue.defer('any', lock => 'l', needs => array[:a], options => '{"needs_mode": "any"}') \g /dev/null
select is(pg_temp.states(), 'a:held d:upstream_failed any:upstream_failed', 'a held need counts as failed also for jobs with a lock');
call pg_temp.clear();

-- The state decides, never counters: failed, retried, succeeded is one success
select pg_temp.defer(t) from unnest('{a,b}'::text[]) t \g /dev/null
select pg_temp.defer('d', 'a b') \g /dev/null
select is(pg_temp.run('a', 'failed', '{"options": {"retry_in": 0}}'), 'ready', 'a need fails and is retried');
select is(pg_temp.run('a', 'failed', '{"options": {"retryable": false}}'), 'failed', 'fails for good');
select is((select r.outcome from queue.retry(array[pg_temp.id('a')]) r), 'ready', 'is retried by hand');
select is(pg_temp.run('a'), 'succeeded', 'and succeeds');
select is((select r.outcome from queue.retry(array[pg_temp.id('a')], true) r), 'ready', 'and once more');
select is(pg_temp.run('a'), 'succeeded', 'and succeeds');
select is(pg_temp.states(), 'a:succeeded b:ready d:waiting', 'the other need is still needed');
select is((select r.outcome from queue.done(array[pg_temp.id('b')]) r), 'succeeded', 'an operator marks it as done');
select is(pg_temp.states(), 'a:succeeded b:succeeded d:ready', 'that counts');
select is((select r.outcome from queue.retry(array[pg_temp.id('b')], true) r), 'ready', 'it is run again');
select is(pg_temp.states(), 'a:succeeded b:ready d:waiting', 'the dependent has not started: it waits again');
select is(pg_temp.run('b', 'none'), 'running', 'it runs');
select is(pg_temp.run('d', 'none'), 'not ready', 'and the dependent does not');
call pg_temp.clear();

-- Many needs, ending in any order
select pg_temp.defer('n' || n) from generate_series(1, 40) n \g /dev/null
select queue.defer('d', needs => array(select j.id from queue.jobs j)) \g /dev/null
select queue.defer('p', needs => array(select j.id from queue.jobs j where j.task <> 'd'), options => '{"on_need_failure": "proceed"}') \g /dev/null
select pg_temp.states() \g /dev/null
select results_eq('select w.need_id from queue.waiting w', $$select pg_temp.id('n40') from generate_series(1, 2)$$, 'a job is held by its last need');
select is(length(queue.why(pg_temp.id('d'))) between 300 and 500 and queue.why(pg_temp.id('d')) like 'it needs job % and more', true, 'why names the first twenty');
select is((select count(*) from (select pg_temp.run('n' || n) as said from generate_series(1, 40) n where n % 7 <> 5 order by n * 17 % 41) r where r.said = 'succeeded'), 34::bigint, '34 succeed, in disorder');
select is((select string_agg(j.state, ' ') from queue.jobs j where j.task in ('d', 'p')), 'waiting waiting', 'they wait for six more');
select is_empty('select * from queue.check()', 'held by one that holds them');
select is((select count(*) from (select pg_temp.run('n' || n, 'failed') as said from generate_series(1, 40) n where n % 7 = 5 order by n * 17 % 41) r where r.said = 'failed'), 6::bigint, 'these fail');
select is((select string_agg(j.state, ' ' order by j.id) from queue.jobs j where j.task in ('d', 'p')), 'upstream_failed ready', 'which decides both');
select is((select count(*) from queue.retry(array(select j.id from queue.jobs j where j.state = 'failed' order by j.id limit 5)) r where r.error is null), 5::bigint, 'five are retried');
select is((select string_agg(j.state, ' ' order by j.id) from queue.jobs j where j.task in ('d', 'p')), 'upstream_failed waiting', 'one failure is enough');
select is((select count(*) from queue.retry_failed() r where r.error is null), 1::bigint, 'the last too');
select is((select string_agg(j.state, ' ' order by j.id) from queue.jobs j where j.task in ('d', 'p')), 'waiting waiting', 'that leaves none');
select is((select count(*) from (select pg_temp.run(j.task) as said from queue.jobs j where j.state = 'ready') r where r.said = 'succeeded'), 6::bigint, 'they succeed');
select is((select string_agg(j.state, ' ' order by j.id) from queue.jobs j where j.task in ('d', 'p')), 'ready ready', 'and both go');
call pg_temp.clear();

-- retry_later, all: waits for all of its needs
select pg_temp.defer(t) from unnest('{a,b,j}'::text[]) t \g /dev/null
select is(pg_temp.run('j', 'retry_later', jsonb_build_object('needs', pg_temp.ids('a'))), 'waiting', 'a running job adds a need');
select is(pg_temp.states(), 'a:ready b:ready j:waiting', 'and waits');
select is(pg_temp.run('a'), 'succeeded', 'it ends');
select is(pg_temp.run('j', 'retry_later', jsonb_build_object('needs', pg_temp.ids('b'))), 'waiting', 'called again, it adds another');
select is((select j.needs from queue.jobs j where j.task = 'j'), array[pg_temp.id('a'), pg_temp.id('b')], 'they add up');
select is(pg_temp.run('b'), 'succeeded', 'it ends');
select is(pg_temp.run('j', 'retry_later', '{"needs": []}'), 'ready', 'without needs it is called again at once');
select is(pg_temp.run('j', 'retry_later'), 'ready', 'the same');
select is(pg_temp.run('j', 'retry_later', jsonb_build_object('at', clock_timestamp() + interval '1 hour')), 'scheduled', 'or later');
select is((select concat_ws(' ', j.state, j.attempts, j.failures, j.progress) from queue.jobs j where j.task = 'j'), 'scheduled 5 0 5', 'a yield is progress, not a failure');
call pg_temp.clear();

-- retry_later after a failure waits nevertheless; needs => NULL does not
select pg_temp.defer(t) from unnest('{a,j}'::text[]) t \g /dev/null
select is(pg_temp.run('j', 'failed', '{"options": {"retry_in": 0}}'), 'ready', 'a job fails and is retried');
select is(pg_temp.run('j', 'retry_later', jsonb_build_object('needs', pg_temp.ids('a'))), 'waiting', 'then adds a need');
select is(pg_temp.states(), 'a:ready j:waiting', 'and waits for it');
select is((select r.outcome from queue.retry(array[pg_temp.id('j')]) r), 'waiting', 'a retry by hand does not free it');
select is(queue.cancel(pg_temp.id('j')), 'cancelled', 'it is cancelled');
select is((select r.outcome from queue.retry(array[pg_temp.id('j')]) r), 'waiting', 'nor when it has ended');
select is(pg_temp.run('a', 'failed'), 'failed', 'the need fails');
select is(pg_temp.states(), 'a:failed j:upstream_failed', 'as for any need');
select is((select r.outcome from queue.retry(array[pg_temp.id('a')]) r), 'ready', 'it is retried');
select is(pg_temp.run('a'), 'succeeded', 'and succeeds');
select is(pg_temp.run('j'), 'succeeded', 'so it continues');
call pg_temp.clear();
select pg_temp.defer('a'), pg_temp.defer('b') \g /dev/null
select pg_temp.defer('j', 'a b', 'any') \g /dev/null
select is(pg_temp.run('a'), 'succeeded', 'one of two');
select is(pg_temp.run('j', 'retry_later', '{"needs": null}'), 'ready', 'NULL: whatever its needs are');
select is(pg_temp.run('j', 'failed', '{"options": {"retry_in": 0}}'), 'ready', 'a failure repeats the run');
select is(pg_temp.run('j', 'retry_later', '{"needs": []}'), 'waiting', 'an empty list waits for the remaining needs');
select is(pg_temp.run('j', 'none'), 'not ready', 'the other');
select is(pg_temp.run('b'), 'succeeded', 'which ends');
select is(pg_temp.run('j', 'retry_later', '{"needs": []}'), 'ready', 'none is left: at once');
call pg_temp.clear();

-- any: waits for a need that was not satisfied when the run began
select pg_temp.defer(t) from unnest('{a,b,c}'::text[]) t \g /dev/null
select pg_temp.defer('j', 'a b c', 'any') \g /dev/null
select is(pg_temp.run('a'), 'succeeded', 'a need');
select is(pg_temp.run('j', 'none'), 'running', 'lets it run');
select is(pg_temp.run('b'), 'succeeded', 'one that ends meanwhile');
select is(pg_temp.finish('j', 'retry_later', '{"needs": []}'), 'ready', 'has it called again at once');
select is(pg_temp.run('j', 'retry_later', '{"needs": []}'), 'waiting', 'then it waits for the last');
select is(pg_temp.run('c', 'failed'), 'failed', 'which fails');
select is(pg_temp.states(), 'a:succeeded b:succeeded c:failed j:waiting', 'not all have failed, so it is not doomed');
select is((select r.outcome from queue.retry(array[pg_temp.id('c')]) r), 'ready', 'which is retried');
select is(pg_temp.run('c'), 'succeeded', 'and succeeds');
select is(pg_temp.run('j'), 'succeeded', 'so that it can end');
call pg_temp.clear();
select pg_temp.defer('j', mode => 'any') \g /dev/null
select is(pg_temp.run('j', 'none'), 'running', 'a job without needs begins');
select pg_temp.defer('new') \g /dev/null
select is(pg_temp.finish('j', 'retry_later', jsonb_build_object('needs', pg_temp.ids('new'))), 'waiting', 'and names one that it has deferred');
select is(pg_temp.states(), 'j:waiting new:ready', 'it waits');
select is(pg_temp.run('new'), 'succeeded', 'it ends');
select is(pg_temp.run('j', 'released'), 'ready', 'a release undoes the run');
select is(pg_temp.run('j'), 'succeeded', 'and it is called again');
call pg_temp.clear();
select pg_temp.defer('h', more => '{"held": true}'), pg_temp.defer('b') \g /dev/null
select pg_temp.defer('j', 'h b', 'any', 'proceed') \g /dev/null
select is(pg_temp.run('j', 'retry_later', '{"needs": []}'), 'waiting', 'under proceed a held need was satisfied when the run began');
select is(pg_temp.states(), 'h:held b:ready j:waiting', 'so it is not called again for that');
select is(queue.unhold(pg_temp.id('h')), 'ready', 'let go');
select is(pg_temp.run('h'), 'succeeded', 'it may end');
select is(pg_temp.states(), 'h:succeeded b:ready j:waiting', 'the other is waited for');
call pg_temp.clear();

-- retry_later returns the state that the job then has, whatever happened to its needs while it ran
create temp table said (mode text, failure text, a text, b text, is_late boolean, said text, state text);
create procedure pg_temp.become(task text, state text) language plpgsql as $$
declare
  v_id bigint := pg_temp.id(become.task);
  v_is_over boolean := (select j.state = 'succeeded' from queue.jobs j where j.id = v_id);
begin
  if v_is_over and become.state not in ('succeeded', 'deleted') then
    perform queue.retry(array[v_id]);
    commit;
  end if;
  case
    when become.state = 'held' then
      perform queue.hold(v_id);
    when become.state = 'deleted' then
      perform queue.delete(array[v_id], true);
    when become.state = 'failed' or become.state = 'succeeded' and not v_is_over then
      perform pg_temp.run(become.task, become.state);
    else
  end case;
  commit;
end $$;
create procedure pg_temp.try_yields() language plpgsql as $$
declare
  v record;
  v_said text;
begin
  for v in
    select m.mode, f.failure, a.state as a, b.state as b, l.is_late
    from unnest('{all,any}'::text[]) m (mode) cross join unnest('{block,proceed}'::text[]) f (failure)
    cross join unnest('{succeeded,failed,held,ready,deleted}'::text[]) a (state) cross join unnest('{succeeded,failed,held,ready,deleted}'::text[]) b (state)
    cross join unnest('{f,t}'::boolean[]) l (is_late)
    where m.mode = 'any' or not l.is_late
  loop
    call pg_temp.clear();
    commit;
    perform pg_temp.defer('a'), pg_temp.defer('b');
    commit;
    perform pg_temp.run('a'), case when not v.is_late then pg_temp.run('b') end;
    commit;
    perform pg_temp.defer('j', 'a b', v.mode, v.failure);
    commit;
    perform pg_temp.run('j', 'none');
    commit;
    call pg_temp.become('a', v.a);
    call pg_temp.become('b', v.b);
    v_said := pg_temp.finish('j', 'retry_later', '{"needs": []}');
    commit;
    perform queue.tick();
    commit;
    insert into said select v.mode, v.failure, v.a, v.b, v.is_late, v_said, j.state from queue.jobs j where j.task = 'j';
  end loop;
  call pg_temp.clear();
end $$;
call pg_temp.try_yields();
select is((select string_agg(distinct s.state, ' ') || ' ' || count(*) from said s), 'ready upstream_failed waiting 150', 'all ends of two needs');
select is_empty('select * from said s where s.said <> s.state', 'retry_later has reported');

-- max_progress
select pg_temp.defer('j', more => '{"max_progress": 1}') \g /dev/null
select is(pg_temp.run('j', 'retry_later'), 'ready', 'one yield is allowed');
select is(pg_temp.run('j', 'retry_later'), 'failed', 'the second is too much');
select is((select j.reason from queue.jobs j where j.task = 'j'), 'max_progress', 'and says so');
call pg_temp.clear();

-- A job that is needed, by such a yield, before it is admitted: a session that expects only newcomers claims it.
select pg_temp.defer('j') \g /dev/null
select is(pg_temp.run('j', 'none'), 'running', 'a job runs');
select pg_temp.defer('a') \g /dev/null
select pg_temp.finish('j', 'retry_later', jsonb_build_object('needs', pg_temp.ids('a'))) \g /dev/null
set pgdefer.was_dry = on;
select is((select string_agg(f.task, ' ') from queue.fetch(:worker) f), 'a', 'the needed one starts');
select pg_temp.finish('a') \g /dev/null
select is((select string_agg(f.task, ' ') from queue.fetch(:worker) f), 'j', 'and its end lets the other one continue');
select pg_temp.finish('j') \g /dev/null
call pg_temp.clear();

-- Cycles
select pg_temp.defer('a') \g /dev/null
select pg_temp.defer('b', 'a') \g /dev/null
select pg_temp.defer('c', 'b') \g /dev/null
select is(pg_temp.run('a', 'none'), 'running', 'a job runs');
select is(pg_temp.refusal(format('select queue.retry_later(%s, %s, needs => array[%s])', j.id, j.claim, j.id)), format('QJ005 path: %s -> %s', j.id, j.id), 'it can''t need itself')
from queue.jobs j where j.task = 'a';
select is(pg_temp.refusal(format('select queue.retry_later(%s, %s, needs => array[%s])', j.id, j.claim, pg_temp.id('c'))),
          format('QJ005 path: %s -> %s -> %s -> %s', j.id, pg_temp.id('c'), pg_temp.id('b'), j.id), 'nor one that, at last, needs it: the path is told')
from queue.jobs j where j.task = 'a';
select is(pg_temp.refusal(format('select queue.retry_later(%s, %s, needs => array[123456])', j.id, j.claim)), 'QJ001 id: 123456', 'nor one that is not there')
from queue.jobs j where j.task = 'a';
select is(pg_temp.refusal(format('select queue.retry_later(%s, %s, needs => array[null]::bigint[])', j.id, j.claim)), '22023', 'nor NULL')
from queue.jobs j where j.task = 'a';
select is(pg_temp.states(), 'a:running b:waiting c:waiting', 'it runs on');
select is(pg_temp.finish('a', 'retry_later', jsonb_build_object('needs', pg_temp.ids('c'))), 'QJ005', 'finish_many reports it in its row');
select is(pg_temp.finish('a'), 'succeeded', 'and it can succeed');
call pg_temp.clear();
-- two at once, neither of which sees a cycle: the second fails, and its lock and dependents continue
select pg_temp.defer('a', more => '{"max_progress": null}') \g /dev/null
select queue.defer('b', lock => 'l'), queue.defer('next', lock => 'l') \g /dev/null
select pg_temp.defer('d', 'b', failure => 'proceed') \g /dev/null
select is(pg_temp.run('a', 'none') || pg_temp.run('b', 'none'), 'runningrunning', 'two jobs run');
insert into queue.pending_settlement (job_id, kind, flags, payload)
  select j.id, 'recheck', 4096, null from queue.jobs j where j.task = 'a';
do $$
declare
  v record;
begin
  -- what the races in admit/yields.cycle.spec come to: both have passed _check_yield
  for v in select j.id, j.claim, o.id as other from queue.jobs j join queue.jobs o on o.task in ('a', 'b') and o.id <> j.id where j.task in ('a', 'b') order by j.id loop
    delete from queue.active_job l where l.id = v.id;
    insert into queue.job_override (id, attempts, claims, progress) values (v.id, 1, 1, 1);
    insert into queue.pending_settlement (job_id, kind, flags, payload)
    select j.id, 'again', j.flags | 2048, jsonb_build_object('needs', jsonb_build_array(v.other)) from queue.job j where j.id = v.id;
  end loop;
end $$;
select is(pg_temp.states(), 'a:upstream_failed b:failed next:ready d:ready', 'one of them fails');
select is((select j.reason || ': ' || j.error from queue.jobs j where j.task = 'b'), 'dependency_cycle: the needs of two jobs form a cycle', 'and says why');
select is_empty('select * from queue.check()', 'in good order');
call pg_temp.clear();

-- A need that holds a lock, and a dependent that holds its lock while it waits
select pg_temp.defer('a') \g /dev/null
select queue.defer('d', lock => 'l', needs => array[pg_temp.id('a')]), queue.defer('e', lock => 'l') \g /dev/null
select is(pg_temp.states(), 'a:ready d:waiting e:blocked', 'an ordered lock keeps the order while its first job waits for needs');
select is(pg_temp.run('a'), 'succeeded', 'the need ends');
select is(pg_temp.states(), 'a:succeeded d:ready e:blocked', 'the first goes');
select is((select r.outcome from queue.retry(array[pg_temp.id('a')], true) r), 'ready', 'the need is run again');
select is(pg_temp.states(), 'a:ready d:waiting e:blocked', 'the first waits again');
select is(pg_temp.run('a') || pg_temp.run('d'), 'succeededsucceeded', 'both end');
select is(pg_temp.states(), 'a:succeeded d:succeeded e:ready', 'and the second goes');
call pg_temp.clear();

-- A time, a slot and needs
select pg_temp.defer('a') \g /dev/null
select queue.defer('d', needs => array[pg_temp.id('a')], scheduled_at => clock_timestamp() + interval '1 hour') \g /dev/null
select queue.defer('k1', concurrency_key => 'k', concurrency_limit => 1), queue.defer('k2', needs => array[pg_temp.id('a')], concurrency_key => 'k', concurrency_limit => 1) \g /dev/null
select is(pg_temp.states(), 'a:ready d:waiting k1:ready k2:waiting', 'needs come first');
select is(pg_temp.run('a'), 'succeeded', 'the need ends');
select is(pg_temp.states(), 'a:succeeded d:scheduled k1:ready k2:blocked', 'then the time and the slot');
select is((select r.outcome from queue.retry(array[pg_temp.id('a')], true) r), 'ready', 'the need is run again');
select is(pg_temp.states(), 'a:ready d:waiting k1:ready k2:waiting', 'out of every gate they go back to wait');
select is(pg_temp.run('a', 'failed'), 'failed', 'the need fails');
select is(pg_temp.states(), 'a:failed d:upstream_failed k1:ready k2:upstream_failed', 'and they with it');
select is(pg_temp.run('k1'), 'succeeded', 'the slot is free');
call pg_temp.clear();

-- Deadlines spread to needs, recursively, only ever earlier
select queue.defer('a'), queue.defer('b', deadline => '2099-01-02 00:00Z'), queue.defer('early', deadline => '2099-01-01 00:00Z'), queue.defer('z', deadline => '2099-03-01 00:00Z') \g /dev/null
select queue.defer('m', needs => array[pg_temp.id('a'), pg_temp.id('b'), pg_temp.id('early')]) \g /dev/null
select is(pg_temp.states(), 'a:ready b:ready early:ready z:ready m:waiting', 'a graph');
select queue.defer('d', needs => array[pg_temp.id('m')], deadline => '2099-01-01 12:00Z') \g /dev/null
select pg_temp.states() \g /dev/null
select is((select string_agg(j.task || ' ' || to_char(j.deadline at time zone 'UTC', 'MM-DD HH24'), ', ' order by j.id) from queue.jobs j),
          'a 01-01 12, b 01-01 12, early 01-01 00, z 03-01 00, m 01-01 12, d 01-01 12', 'all that it needs is due as early');
select is((select string_agg(f.task, ' ') from queue.fetch(:worker, max_jobs => 3) f), 'early a b', 'which is the order in which they are fetched');
select is((select count(*) from queue.finish_many((select jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'succeeded')) from queue.jobs j where j.claim is not null))), 3::bigint, 'they end');
select queue.defer('last', needs => array[pg_temp.id('d'), pg_temp.id('a')], deadline => '2099-01-01 06:00Z') \g /dev/null
select pg_temp.states() \g /dev/null
select is((select string_agg(j.task || ' ' || to_char(j.deadline at time zone 'UTC', 'MM-DD HH24'), ', ' order by j.id) from queue.jobs j),
          'a 01-01 12, b 01-01 12, early 01-01 00, z 03-01 00, m 01-01 06, d 01-01 06, last 01-01 06', 'finished ones keep theirs');
select is((select string_agg(f.task || ' ' || to_char(f.deadline at time zone 'UTC', 'HH24'), ' ') from queue.fetch(:worker) f), 'm 06', 'fetch tells it');
call pg_temp.clear();
-- a running need gets it for its next run, a yielding one passes it on, also to a dependent within one batch
select queue.defer('a'), queue.defer('b') \g /dev/null
select is(pg_temp.run('a', 'none'), 'running', 'a job runs');
begin;
select queue.defer('d', needs => array[pg_temp.id('a')]) \g /dev/null
select queue.defer('e', needs => array[pg_temp.id('d')], deadline => '2099-01-01 00:00Z') \g /dev/null
commit;
select pg_temp.states() \g /dev/null
select is(pg_temp.finish('a', 'retry_later', jsonb_build_object('needs', pg_temp.ids('b'))), 'waiting', 'and comes to need another');
select is((select count(*) from queue.jobs j where j.deadline = '2099-01-01 00:00Z'), 4::bigint, 'so that all are due');
call pg_temp.clear();

-- A child's deadline
create function pg_temp.child(parent bigint, deadline timestamptz default null) returns bigint language sql as $$
  select queue.defer('t', deadline => child.deadline, options => jsonb_build_object('parent', child.parent))
$$;
select queue.defer('p', deadline => '2099-01-01 00:00Z') as parent \gset
select queue.register_task('t', '{"deadline": "1 day"}') \g /dev/null
select pg_temp.child(:parent) as child \gset
select is((select j.deadline from queue.jobs j where j.id = :child), '2099-01-01 00:00Z'::timestamptz, 'a child inherits its parent''s deadline');
select pg_temp.child(:parent, '2099-02-01 00:00Z') as child \gset
select is((select j.deadline from queue.jobs j where j.id = :child), '2099-02-01 00:00Z'::timestamptz, 'unless one is given');
select queue.defer('q', needs => array[:parent], deadline => '2098-01-01 00:00Z') \g /dev/null
select pg_temp.states() \g /dev/null
select pg_temp.child(:parent) as child \gset
select is((select j.deadline from queue.jobs j where j.id = :child), '2098-01-01 00:00Z'::timestamptz, 'the one that it has now');
select is(pg_temp.refusal('select queue.defer(''t'', options => ''{"parent": 123456}'')'), 'QJ001 id: 123456', 'a parent must be there');
call pg_temp.clear();

-- Retention keeps the needs of unfinished jobs, and their states are known afterwards
select pg_temp.defer('a', more => '{"retain": "1 hour"}'), pg_temp.defer('f', more => '{"retain": "1 hour"}'), pg_temp.defer('x', more => '{"retain": "1 hour"}') \g /dev/null
select pg_temp.defer('d', 'a') \g /dev/null
select pg_temp.defer('e', 'f') \g /dev/null
select is(pg_temp.run('a') || pg_temp.run('x') || pg_temp.run('f', 'failed'), 'succeededsucceededfailed', 'three end');
update queue.finished set purge_at = clock_timestamp() - interval '1 second', finished_at = finished_at - interval '1 hour 1 second';
select is(queue.prune(), 1, 'the one that nobody needs is pruned');
select is(pg_temp.states(), 'a:succeeded f:failed d:ready e:upstream_failed', 'the others are kept');
select is(pg_temp.refusal(format('select queue.defer(''t'', needs => array[%s])', pg_temp.id('a'))), format('QJ001 id: %s', pg_temp.id('a')),
          'but they can''t be needed again: their time has passed');
select is(pg_temp.run('d', 'failed') || queue.cancel(pg_temp.id('e')), 'failedcancelled', 'the dependents end');
select is(queue.prune(), 2, 'now they go');
select is((select count(*) from queue.retry(array[pg_temp.id('d'), pg_temp.id('e')]) r where r.error is null), 2::bigint, 'the dependents are retried');
select is(pg_temp.states(), 'd:ready e:upstream_failed', 'their needs are still known');
call pg_temp.clear();
select is_empty('select from queue.need', 'and forgotten with them');

-- Deleting
select pg_temp.defer('a'), pg_temp.defer('b') \g /dev/null
select pg_temp.defer('d', 'a'), pg_temp.defer('e', 'b'), pg_temp.defer('p', 'a', failure => 'proceed') \g /dev/null
select is(pg_temp.run('b'), 'succeeded', 'a need ends');
select is((select string_agg(coalesce(r.error, r.outcome), ' ') from queue.delete(array[pg_temp.id('a'), pg_temp.id('b')]) r), 'QJ003 QJ003', 'a needed job is not deleted');
select is((select string_agg(coalesce(r.error, r.outcome), ' ') from queue.delete(array[pg_temp.id('a'), pg_temp.id('b')], true) r), 'deleted deleted', 'but by force');
select is(pg_temp.states(), 'd:upstream_failed e:ready p:ready', 'one that had not succeeded counts as failed');
select is(queue.why(pg_temp.id('d')) like 'a need failed; retry it: job % (deleted)', true, 'why says so');
call pg_temp.clear();

-- check() finds errors
select pg_temp.defer('a') \g /dev/null
select pg_temp.defer('d', 'a'), pg_temp.defer('e') \g /dev/null
select pg_temp.states() \g /dev/null
update queue.waiting set need_id = pg_temp.id('e');
select is((select problem from queue.check()), 'names a need that does not hold it', 'a wrong hint');
update queue.waiting set need_id = pg_temp.id('a'), reason = 'upstream_failed';
select results_eq('select problem from queue.check() order by 1', $$values ('names a need that does not hold it'), ('waits for needs although they do not hold it')$$, 'a wrong state');
update queue.waiting set reason = 'needs';
update queue.active_job set flags = flags & ~4096 where id = pg_temp.id('a');
select is((select problem from queue.check()), 'needed, but not marked as needed', 'a mark that is missing');
update queue.active_job set flags = flags | 4096 where id = pg_temp.id('a');
select is_empty('select * from queue.check()', 'sound again');
call pg_temp.clear();

-- Plans that were made while the tables were empty
vacuum analyze queue.job, queue.need, queue.active_job, queue.finished, queue.waiting, queue.job_override;
discard plans;
select count(queue.defer('n')) from generate_series(1, 3000) \g /dev/null
select max(j.id) as some from queue.jobs j \gset
select queue.defer('w', needs => array[:some]) \g /dev/null
select pg_temp.states() is null as warmed \g /dev/null
select queue.defer('d', needs => array[j.id]) from queue.jobs j where j.task = 'n' \g /dev/null
select pg_temp.states() is null as warmed \g /dev/null
-- The numbers of index entries and table rows that a call reads.
create function pg_temp.read() returns bigint language sql as $$
  select sum(coalesce(pg_stat_get_xact_tuples_returned(c.oid), 0)) from pg_class c where c.relnamespace = 'queue'::regnamespace and c.relkind in ('r', 'i')
$$;
create function pg_temp.reads(call text) returns bigint language plpgsql as $$
declare
  v_before bigint := pg_temp.read();
begin
  execute call;
  return pg_temp.read() - v_before;
end $$;
select queue.tick() \g /dev/null  -- it looks for forgotten claims every 10 s
select cmp_ok(pg_temp.reads(format('select queue.defer(''e'', needs => array[%s, %s])', :some, :some - 1)), '<', 100::bigint, 'a defer with needs reads only these');
select cmp_ok(pg_temp.reads('select from queue.tick()'), '<', 100::bigint, 'so does its admission');
select cmp_ok(pg_temp.reads(format('select from queue.hold(%s)', :some)), '<', 100::bigint, 'and the change of a need');
call pg_temp.clear();

select * from finish();
