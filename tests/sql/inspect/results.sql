-- Results: the outcome of a job, and how to wait for it. The notification is tested in tests/py/races/test_results.py.

select plan(38);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

create function pg_temp.result(id bigint) returns text language sql as $$
  select concat_ws(' | ', r.state, r.result, r.error) from queue.result(result.id) r
$$;
-- The job's row of await_result; the time in steps: soon, later, 5 s.
create function pg_temp.await(id bigint) returns text language sql as $$
  select concat_ws(' | ', r.state, r.result, r.error, r.channel,
    case when r.wait_for = '20 ms' then 'soon' when r.wait_for between '20 ms' and '4.9 s' then 'later' when r.wait_for = '5 s' then '5 s' end)
  from queue.await_result(await.id) r
$$;
-- Moves the beginning of a wait for a job a minute back.
create procedure pg_temp.age(id bigint) language sql as $$
  update queue.awaited a set since = a.since - interval '1 minute' where a.id = age.id
$$;

-- needs
select queue.defer('ok') as ok, queue.defer('bad') as bad, queue.defer('open', scheduled_at => now() + interval '1 hour') as open \gset
select queue.defer('t', needs => array[:open, :bad, :ok], options => '{"needs_mode": "any", "on_need_failure": "proceed"}') as id \gset
select results_eq(format('select task, state, result, error from queue.needs(%s)', :id),
                  $$values ('ok', 'ready', null::jsonb, null), ('bad', 'ready', null, null), ('open', 'scheduled', null, null)$$, 'needs of a job that was not admitted');
select max(claim) as claim from queue.fetch(:worker, null, 2) \gset
select queue.succeed(:ok, claim, '{"n": 1}'), null from queue.jobs where id = :ok \g /dev/null
select queue.fail(:bad, claim, 'no luck') from queue.jobs where id = :bad \g /dev/null
select results_eq(format('select need_id, task, state, result, error from queue.needs(%s)', :id),
                  format($$values (%s::bigint, 'ok', 'succeeded', '{"n": 1}'::jsonb, null), (%s, 'bad', 'failed', null, 'no luck'), (%s, 'open', 'scheduled', null, null)$$, :ok, :bad, :open),
                  'results and errors, by id');
select queue.delete(array[:bad], force => true) \g /dev/null
select results_eq(format('select state from queue.needs(%s)', :id), $$values ('succeeded'), ('deleted'), ('scheduled')$$, 'one that was deleted by force');
select is_empty(format('select * from queue.needs(%s)', :ok), 'a job without needs');
select is(test.refusal('select * from queue.needs(424242)'), 'QJ001', 'no such job');
select is(test.refusal('select * from queue.needs(null)'), 'QJ001', 'nor NULL');
select queue.cancel(:open), queue.cancel(:id) \g /dev/null

-- result
select queue.defer('t') as id \gset
select is(pg_temp.result(:id), 'ready', 'a job that waits');
select claim from queue.fetch(:worker) \gset
select is(pg_temp.result(:id), 'running', 'that runs');
select queue.fail(:id, :claim, 'no luck', options => '{"retry_in": 0}') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.result(:id), 'ready | no luck', 'that waits for its retry: with its last error');
select claim from queue.fetch(:worker) \gset
select queue.succeed(:id, :claim, '{"answer": 42}') \g /dev/null
select is(pg_temp.result(:id), 'succeeded | {"answer": 42}', 'that has succeeded');
select queue.defer('t') as id \gset
select claim from queue.fetch(:worker) \gset
select queue.fail(:id, :claim, 'no luck') \g /dev/null
select is(pg_temp.result(:id), 'failed | no luck', 'that has failed');
select queue.defer('t') as id \gset
select queue.cancel(:id) \g /dev/null
select is(pg_temp.result(:id), 'cancelled', 'that was cancelled');
select is(test.refusal('select queue.result(123456)'), 'QJ001', 'that is not there');
select is(test.refusal('select queue.result(null)'), 'QJ001', 'no job');
select queue.defer('t') as id \gset
select claim from queue.fetch(:worker) \gset
select queue.succeed(:id, :claim, 'null') \g /dev/null
select results_eq(format('select r.state, r.result, r.error from queue.result(%s) r', :id), $$values ('succeeded'::text, 'null'::jsonb, null::text)$$, 'a result of JSON null is one');

-- await_result
select is(pg_temp.await(:id), 'succeeded | null', 'a job that has ended: nothing to wait for');
select is_empty('select from queue.awaited', 'and nothing is noted');
select is(test.refusal('select queue.await_result(123456)'), 'QJ001', 'a job that is not there');
select queue.defer('t') as id \gset
select is(pg_temp.await(:id), format('ready | pgdefer_result_%s | soon', :id), 'one that has not: ask again soon, an end may be in flight');
select is((select s.last_value from queue.awaited_seq s), :id::bigint, 'from now on ends look whether somebody waits');
call pg_temp.age(:id);
select is(pg_temp.await(:id), format('ready | pgdefer_result_%s | 5 s', :id), 'then seldom');
select is((select count(*) from queue.awaited), 1::bigint, 'it is noted once');
select claim from queue.fetch(:worker) \gset
select queue.fail(:id, :claim, 'no luck', options => '{"retry_in": 0}') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.await(:id), format('ready | no luck | pgdefer_result_%s | 5 s', :id), 'a failure that is retried is not the end');
select claim from queue.fetch(:worker) \gset
begin;
select queue.succeed(:id, :claim, '1') \g /dev/null
rollback;
select is((select count(*) from queue.awaited), 1::bigint, 'nor is one that is rolled back');
select queue.succeed(:id, :claim, '1') \g /dev/null
select is(pg_temp.await(:id), 'succeeded | 1', 'success is');
select is_empty('select from queue.awaited', 'and the waiting client is notified');
create function pg_temp.awaited() returns bigint language sql as $$ select queue.defer('t', scheduled_at => clock_timestamp() + interval '1 hour') $$;
select pg_temp.awaited() as id \gset
select pg_temp.await(:id) \g /dev/null
select queue.cancel(:id) \g /dev/null
select is_empty('select from queue.awaited', 'of a cancel');
select pg_temp.awaited() as id \gset
select pg_temp.await(:id) \g /dev/null
select is((select r.outcome from queue.fail_jobs(array[:id::bigint]) r), 'failed', 'a job is failed by hand');
select is_empty('select from queue.awaited', 'of that');
select pg_temp.awaited() as id \gset
select pg_temp.await(:id) \g /dev/null
select is((select r.outcome from queue.delete(array[:id::bigint]) r), 'deleted', 'one is deleted');
select is_empty('select from queue.awaited', 'of that');
select is(test.refusal(format('select queue.await_result(%s)', :id)), 'QJ001', 'a waiting client gets an error');
select queue.defer('t') as a, queue.defer('t') as b, queue.defer('t') as c \gset
select pg_temp.await(:b) \g /dev/null
select queue.fetch(:worker, max_jobs => 3) \g /dev/null
select count(*) from queue.finish_many((select jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'succeeded')) from queue.jobs j where j.claim is not null)) \g /dev/null
select is_empty('select from queue.awaited', 'of a batch');

-- Without notifications
set pgdefer.notify = off;
select queue.defer('t') as id \gset
select is(pg_temp.await(:id), 'ready | soon', 'if they are switched off there is no channel');
call pg_temp.age(:id);
select is((select r.wait_for from queue.await_result(:id) r), interval '1 s', 'and polling is all');
reset pgdefer.notify;

-- A row that was missed at the job's end is removed with the job
update queue.log set job_options.options = '{"retain": "0 s"}', job_options.flags = 512 where id = :id;
select setval('queue.awaited_seq', 1) \g /dev/null
select claim from queue.fetch(:worker) \gset
select queue.succeed(:id, :claim) \g /dev/null
select is((select count(*) from queue.awaited a where a.id = :id), 1::bigint, 'an end that did not look');
select queue.prune() \g /dev/null
select is_empty('select from queue.awaited', 'leaves a row until the job is pruned');

-- Access
select is((select string_agg(k || ' ' || f, ', ' order by k, f) from unnest('{producer,worker,operator,reader}'::text[]) k, queue._grants(k) g, unnest(g.functions) f where f in ('result', 'await_result')),
          'operator result, producer await_result, producer result, reader result, worker await_result, worker result', 'a role that may defer may wait');

select * from finish();
