-- Results: what became of a job, and how to wait for it. That the notification comes: tests/py/races/test_results.py.

select plan(41);

select queue.register_worker('w') as worker \gset

create function pg_temp.refusal(call text) returns text language plpgsql as $$
begin
  execute call;
  return 'accepted';
exception when others then
  return sqlstate;
end $$;
create function pg_temp.result(id bigint) returns text language sql as $$
  select concat_ws(' | ', r.state, r.result, r.error) from queue.result(result.id) r
$$;
create function pg_temp.await(id bigint) returns text language sql as $$
  select concat_ws(' | ', r.state, r.result, r.error, r.channel, r.wait_for) from queue.await_result(await.id) r
$$;
-- Whether its end will be told.
create function pg_temp.is_marked(id bigint) returns boolean language sql as $$
  select v.flags & 4096 <> 0 from queue.live v where v.id = is_marked.id
$$;

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
select is(pg_temp.refusal('select queue.result(123456)'), 'QJ001', 'that is not there');
select is(pg_temp.refusal('select queue.result(null)'), 'QJ001', 'no job');
select queue.defer('t') as id \gset
select claim from queue.fetch(:worker) \gset
select queue.succeed(:id, :claim, 'null') \g /dev/null
select results_eq(format('select r.state, r.result, r.error from queue.result(%s) r', :id), $$values ('succeeded'::text, 'null'::jsonb, null::text)$$, 'a result of JSON null is one');

-- await_result
select is(pg_temp.await(:id), 'succeeded | null', 'a job that has ended: nothing to wait for');
select is_empty('select from queue.awaited', 'and nothing is noted');
select is(pg_temp.refusal('select queue.await_result(123456)'), 'QJ001', 'a job that is not there');
select queue.defer('t') as id \gset
select is(pg_temp.await(:id), format('ready | pgdefer_result_%s | 00:00:00.02', :id), 'not admitted yet: ask again soon');
select queue.tick() \g /dev/null
select is(pg_temp.is_marked(:id), true, 'admission marks it');
select is(pg_temp.await(:id), format('ready | pgdefer_result_%s | 00:00:05', :id), 'so that its end is told');
select is(pg_temp.await(:id), format('ready | pgdefer_result_%s | 00:00:05', :id), 'another may wait, too');
select claim from queue.fetch(:worker) \gset
select is(pg_temp.is_marked(:id), true, 'the mark stays while it runs');
select queue.fail(:id, :claim, 'no luck', options => '{"retry_in": 0}') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.is_marked(:id), true, 'and when it is retried');
select claim from queue.fetch(:worker) \gset
select queue.succeed(:id, :claim, '1') \g /dev/null
select is(pg_temp.await(:id), 'succeeded | 1', 'it ends');
select is_empty('select from queue.awaited', 'and whoever waited is forgotten');

-- in a gate
select queue.defer('t', scheduled_at => clock_timestamp() + interval '1 hour') as id \gset
select queue.tick() \g /dev/null
select is(pg_temp.await(:id), format('scheduled | pgdefer_result_%s | 00:00:00.02', :id), 'a job in a gate');
select is(pg_temp.await(:id), format('scheduled | pgdefer_result_%s | 00:00:05', :id), 'from the second call on it can''t be missed');
select queue.reschedule(:id) \g /dev/null
select is(pg_temp.is_marked(:id), true, 'is marked when it becomes ready');
select queue.cancel(:id) \g /dev/null
select is(pg_temp.await(:id), 'cancelled', 'a cancel ends it');
select is_empty('select from queue.awaited', 'and tells');
select queue.defer('t', lock => 'l') as first, queue.defer('t', lock => 'l') as id \gset
select queue.tick() \g /dev/null
select is(pg_temp.await(:id), format('blocked | pgdefer_result_%s | 00:00:00.02', :id), 'one that waits for its lock');
select is(pg_temp.await(:id), format('blocked | pgdefer_result_%s | 00:00:05', :id), 'the same');
select claim from queue.fetch(:worker) \gset
select queue.succeed(:first, :claim) \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.is_marked(:id), true, 'its turn marks it');
select is((select r.outcome from queue.delete(array[:id::bigint]) r), 'deleted', 'it is deleted');
select is(pg_temp.refusal(format('select queue.await_result(%s)', :id)), 'QJ001', 'which whoever waits learns by an error');
select is_empty('select from queue.awaited', 'and forgotten');

-- needed and awaited at once, finished in a batch, and in the handler's own transaction
select queue.defer('t') as id \gset
select queue.tick() \g /dev/null
select queue.await_result(:id) \g /dev/null
select queue.defer('d', needs => array[:id::bigint]) as dependent \gset
select claim from queue.fetch(:worker) \gset
select queue.finish_many(jsonb_build_array(jsonb_build_object('id', :id, 'claim', :claim, 'outcome', 'succeeded'))) \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.result(:dependent), 'ready', 'its dependent goes');
select is_empty('select from queue.awaited', 'and its waiter is told');
select claim from queue.fetch(:worker) \gset
select queue.await_result(:dependent) \g /dev/null
begin;
select queue.succeed(:dependent, :claim) \g /dev/null
rollback;
select is((select count(*) from queue.awaited), 1::bigint, 'an end that is rolled back tells nobody');
begin;
select queue.succeed(:dependent, :claim) \g /dev/null
commit;
select is_empty('select from queue.awaited', 'one that commits does');

-- Without notifications
set pgdefer.notify = off;
select queue.defer('t') as id \gset
select queue.tick() \g /dev/null
select is(pg_temp.await(:id), 'ready | 00:00:01', 'where they are switched off there is no channel, and polling is all');
reset pgdefer.notify;
select is(pg_temp.await(:id), format('ready | pgdefer_result_%s | 00:00:05', :id), 'and elsewhere there is');

-- Who may
select is((select array_agg(k order by k) from unnest('{producer,worker,operator,reader}'::text[]) k, queue._grants(k) g where 'result' = any (g.functions)),
          '{operator,producer,reader,worker}', 'everybody may see results');
select is((select array_agg(k order by k) from unnest('{producer,worker,operator,reader}'::text[]) k, queue._grants(k) g where 'await_result' = any (g.functions)),
          '{producer,worker}', 'those who defer may wait for them');

-- A waiter that nobody could tell is forgotten with the job
select queue.defer('t', options => '{"retain": "0 s"}') as id \gset
select queue.await_result(:id) \g /dev/null
select claim from queue.fetch(:worker, options => jsonb_build_object('ids', jsonb_build_array(:id))) \gset
update queue.live set flags = flags & ~4096 where id = :id;
select queue.succeed(:id, :claim) \g /dev/null
select is((select count(*) from queue.awaited a where a.id = :id), 1::bigint, 'it ended before it was marked');
select queue.prune() \g /dev/null
select is_empty(format('select from queue.awaited a where a.id = %s', :id), 'and is pruned');

select * from finish();
