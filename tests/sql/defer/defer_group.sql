-- Groups, chains and graphs.

select plan(48);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- Runs all jobs, however long it takes
create procedure pg_temp.admit() language plpgsql as $$
begin
  while (select t.admitted from queue.tick() t) > 0 loop
    commit;
  end loop;
end $$;

\ir ../admit/needs.helpers.psql

-- The graph with tasks as ids: "depth task>need:state ...".
create function pg_temp.graph(task text) returns text language sql as $$
  select string_agg(g.depth || ' ' || coalesce(g.task, '?') || case when g.need_id is null then '' else '>' || coalesce(n.task, '?') end || ':' || g.state, ', ' order by g.depth, g.job_id, g.need_id)
  from queue.graph(pg_temp.id(graph.task)) g left join queue.jobs n on n.id = g.need_id
$$;

-- defer_group
select then_id, ids from queue.defer_group('[{"task": "a"}, {"task": "b", "args": {"x": 1}, "priority": 3}, {"task": "c"}]', '{"task": "sum", "args": {"y": 2}}') \gset
select is((select string_agg(j.task, ' ' order by u.n) from unnest(:'ids'::bigint[]) with ordinality u (id, n) join queue.jobs j on j.id = u.id), 'a b c', 'ids come in input order');
select is((select j.needs from queue.jobs j where j.id = :then_id), :'ids'::bigint[], 'the last job needs them all');
select is(pg_temp.states(), 'a:ready b:ready c:ready sum:waiting', 'and waits');
select is((select string_agg(f.task || f.args::text, ' ') from queue.fetch(:worker, max_jobs => 10) f), 'b{"x": 1} a{} c{}', 'the others are as given');
select count(*) from queue.finish_many((select jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'succeeded')) from queue.jobs j where j.claim is not null)) \g /dev/null
select is((select string_agg(f.task || f.args::text, ' ') from queue.fetch(:worker, max_jobs => 10) f), 'sum{"y": 2}', 'it follows');
call pg_temp.clear();
select queue.defer('before') as before \gset
select is((select cardinality(ids) from queue.defer_group('[{"task": "a"}, {"task": "a2", "needs": null}]',
            jsonb_build_object('task', 'sum', 'needs', jsonb_build_array(:before), 'options', '{"on_need_failure": "proceed"}'::jsonb))), 2, 'more needs and options');
select is((select cardinality(j.needs) from queue.jobs j where j.task = 'sum'), 3, 'count beside those of the group');
select is(queue.cancel(pg_temp.id('a')), 'cancelled', 'a job of the group is cancelled');
select is(pg_temp.states(), 'before:ready a:cancelled a2:ready sum:waiting', 'under proceed that does not doom the last');
select is((select string_agg(r.outcome, ' ') from queue.done(array[pg_temp.id('before'), pg_temp.id('a2')]) r), 'succeeded succeeded', 'the others end');
select is(pg_temp.states(), 'before:succeeded a:cancelled a2:succeeded sum:ready', 'and it goes');
call pg_temp.clear();
select results_eq($$select ids, then_id is not null from queue.defer_group('[]', '{"task": "sum"}')$$, $$values ('{}'::bigint[], true)$$, 'an empty group');
select is(pg_temp.states(), 'sum:ready', 'lets the last go at once');
call pg_temp.clear();
select is(test.refusal($$select queue.defer_group('[{"task": "a"}]', null)$$), '22023', 'nothing follows');
select is(test.refusal($$select queue.defer_group('[{"task": "a"}]', '[]')$$), '22023', 'the following call is not a job');
select is(test.refusal($$select queue.defer_group('[{"task": "a"}]', '{"task": "b", "x": 1}')$$), '22023', 'it has an unknown key');
select is(test.refusal($$select queue.defer_group('[{"task": "a"}]', '{"task": "b", "needs": 1}')$$), '22023', 'its needs are no list');
select is(test.refusal($$select queue.defer_group('[{"task": "a"}]', '{"task": "b", "needs": [123456]}')$$), 'QJ001', 'or not there');
select is(test.refusal($$select queue.defer_group('[{"task": "a"}, {}]', '{"task": "b"}')$$), '22023', 'a job of the group is none');
select is(test.refusal($$select queue.defer_group(null, '{"task": "b"}')$$), '22023', 'there is no group');
select is_empty('select from queue.job', 'nothing of that was deferred');

-- defer_chain
select array_agg(c.id order by c.n) as ids from queue.defer_chain('[{"task": "a"}, {"task": "b"}, {"task": "c"}]') with ordinality c (id, n) \gset
select is(:'ids'::bigint[], array[pg_temp.id('a'), pg_temp.id('b'), pg_temp.id('c')], 'a chain');
select is(pg_temp.states(), 'a:ready b:waiting c:waiting', 'each needs the one before it');
select is(pg_temp.graph('c'), '-2 a:ready, -1 b>a:waiting, 0 c>b:waiting', 'as its graph shows');
select is((select r.outcome from queue.done(array[pg_temp.id('a')]) r), 'succeeded', 'the first ends');
select is(pg_temp.states(), 'a:succeeded b:ready c:waiting', 'the second goes');
call pg_temp.clear();
select is((select count(*) from queue.defer_chain('[]')), 0::bigint, 'an empty chain');
select is(test.refusal($$select queue.defer_chain('{}')$$), '22023', 'no chain');
select is(test.refusal($$select queue.defer_chain('[{"task": "a"}, 1]')$$), '22023', 'a link that is no job');
select is(test.refusal($$select queue.defer_chain('[1]')$$), '22023', 'the first');
select is(test.refusal($$select queue.defer_chain(null)$$), '22023', 'none');
select queue.defer('first') as first \gset
select is(test.refusal(format('select queue.defer_chain(%L)', jsonb_build_array('{"task": "a"}'::jsonb, jsonb_build_object('task', 'b', 'needs', needs)))), '22023', 'needs that are no list: ' || needs::text)
from (values (to_jsonb(:first)), (to_jsonb(:'first'::text)), (jsonb_build_object('id', :first))) v (needs);
call pg_temp.clear();
select is_empty('select from queue.job', 'nothing of that was deferred');

-- graph
begin;
select queue.defer('a'), queue.defer('b') \g /dev/null
select queue.defer('c', needs => array[pg_temp.id('a'), pg_temp.id('b')]) \g /dev/null
select queue.defer('d', needs => array[pg_temp.id('a'), pg_temp.id('c')]) \g /dev/null
select queue.defer('e', needs => array[pg_temp.id('b')]), queue.defer('alone') \g /dev/null
commit;
select is(pg_temp.graph('d'), '-2 b:ready, -1 a:ready, -1 c>a:waiting, -1 c>b:waiting, 0 d>a:waiting, 0 d>c:waiting', 'before it is admitted a job''s needs are seen');
select is(pg_temp.states(), 'a:ready b:ready c:waiting d:waiting e:waiting alone:ready', 'then');
select is(pg_temp.graph('c'), '-1 a:ready, -1 b:ready, 0 c>a:waiting, 0 c>b:waiting, 1 d>a:waiting, 1 d>c:waiting', 'also those that need it; the depth is the shortest');
select is(pg_temp.graph('b'), '0 b:ready, 1 c>b:waiting, 1 e>b:waiting, 2 d>c:waiting', 'needs of its dependents that it does not need are left out');
select is(pg_temp.graph('alone'), '0 alone:ready', 'a job without any');
select is((select count(*) from queue.delete(array[pg_temp.id('a')], true) r where r.outcome = 'deleted'), 1::bigint, 'a need is deleted by force');
select is(pg_temp.graph('d'), '-2 b:ready, -1 ?:deleted, -1 c>?:upstream_failed, -1 c>b:upstream_failed, 0 d>?:upstream_failed, 0 d>c:upstream_failed', 'and stays in the graph');
select is(test.refusal('select * from queue.graph(123456)'), 'QJ001', 'a job that is not there');
select is(test.refusal('select * from queue.graph(null)'), 'QJ001', 'none');
call pg_temp.clear();
-- a large one: 2,000 jobs, each of which needs the two before it
do $$
declare
  v_ids bigint[] := '{}';
begin
  for i in 1 .. 2000 loop
    v_ids := v_ids || queue.defer('n', needs => v_ids[i - 2 : i - 1]);
  end loop;
end $$;
call pg_temp.admit();
select results_eq('select count(distinct g.job_id), min(g.depth), max(g.depth) from queue.graph((select min(j.id) + 1000 from queue.job j)) g', 'values (2000::bigint, -500, 500)', 'the way is the shortest');
call pg_temp.clear();
-- a long one, in which each job of a chain is a separate step
select count(*) from queue.defer_chain((select jsonb_agg('{"task": "n"}'::jsonb) from generate_series(1, 12000))) \g /dev/null
call pg_temp.admit();
set statement_timeout = '60 s';
select results_eq('select count(*), min(g.depth), max(g.depth), count(distinct g.depth) from queue.graph((select min(j.id) from queue.job j)) g', 'values (12000::bigint, 0, 11999, 12000::bigint)', 'from its begin');
select results_eq('select count(*), min(g.depth), max(g.depth) from queue.graph((select max(j.id) from queue.job j)) g', 'values (12000::bigint, -11999, 0)', 'from its end');
reset statement_timeout;
call pg_temp.clear();
-- paths of many lengths
begin;
select queue.defer('a'), queue.defer('x') \g /dev/null
select queue.defer('b', needs => array[pg_temp.id('a')]) \g /dev/null
select queue.defer('c', needs => array[pg_temp.id('b')]) \g /dev/null
select queue.defer('d', needs => array[pg_temp.id('a'), pg_temp.id('c'), pg_temp.id('x')]), queue.defer('e', needs => array[pg_temp.id('c')]) \g /dev/null
select queue.defer('f', needs => array[pg_temp.id('d'), pg_temp.id('e'), pg_temp.id('b')]) \g /dev/null
commit;
select queue.tick() \g /dev/null
select is(pg_temp.graph('a'), '0 a:ready, 1 b>a:waiting, 1 d>a:waiting, 1 d>c:waiting, 2 c>b:waiting, 2 f>b:waiting, 2 f>d:waiting, 2 f>e:waiting, 3 e>c:waiting', 'each by the shortest');
call pg_temp.clear();

select * from finish();
