-- Deadlines: from dependents to their needs, from parents to children.

select plan(24);

\ir needs.helpers.psql

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

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
-- a need that had ended gets it when it is retried, and passes it on
select queue.defer('a') \g /dev/null
select pg_temp.defer('b', 'a') \g /dev/null
select pg_temp.states() \g /dev/null
select queue.done(array[pg_temp.id('b')]) \g /dev/null
select pg_temp.defer('c', 'b', more => '{}') \g /dev/null
select pg_temp.states() \g /dev/null
select queue.set_deadline(array[pg_temp.id('c')], '2099-01-01 00:00Z') \g /dev/null
select is((select count(*) from queue.jobs j where j.deadline is not null), 1::bigint, 'a finished need gets no deadline');
select queue.retry(array[pg_temp.id('b')]) \g /dev/null
select is((select count(*) from queue.jobs j where j.deadline = '2099-01-01 00:00Z'), 3::bigint, 'but with its retry, as do its own needs');
select queue.done(array[pg_temp.id('a')]), queue.done(array[pg_temp.id('b')]), queue.done(array[pg_temp.id('c')]) \g /dev/null
select queue.set_deadline(array[pg_temp.id('c')], '2098-01-01 00:00Z'), queue.retry(array[pg_temp.id('b')]) \g /dev/null
select is((select count(*) from queue.jobs j where j.deadline = '2098-01-01 00:00Z'), 1::bigint, 'not that of a job that has ended');
select queue.retry(array[pg_temp.id('c')]) \g /dev/null
select is((select string_agg(j.task, ' ' order by j.id) from queue.jobs j where j.deadline = '2098-01-01 00:00Z'), 'b c', 'until that is retried as well');
call pg_temp.clear();

-- How often a tick looks for the needs of a job.
create function pg_temp.lookups_of_tick() returns bigint language plpgsql as $$
declare
  v_before bigint := pg_stat_get_xact_numscans('queue.need_pkey'::regclass);
begin
  perform queue.tick();
  return pg_stat_get_xact_numscans('queue.need_pkey'::regclass) - v_before;
end $$;

-- Many dependents with different deadlines: each job of a chain takes the earliest of them once, and a chain that
-- takes long is left to later admissions.
select test.change('queue._earlier_deadlines', '+ interval ''50 ms''', '+ interval ''1 hour''') \g /dev/null
select queue.defer_chain((select jsonb_agg(jsonb_build_object('task', 'c' || n)) from generate_series(1, 40) n)) \g /dev/null
select pg_temp.states() \g /dev/null
select queue.defer('d', needs => array[pg_temp.id('c40')], deadline => '2099-01-01 00:00Z'::timestamptz + (n * 17 % 41) * interval '1 hour') from generate_series(1, 40) n \g /dev/null
select cmp_ok(pg_temp.lookups_of_tick(), '<', 500::bigint, 'each is asked for its needs once, not for each deadline');
select is((select count(*) from queue.jobs j where j.task like 'c%' and j.deadline = '2099-01-01 01:00Z'), 40::bigint, 'and all get the earliest');
call pg_temp.clear();
select queue.defer_chain((select jsonb_agg(jsonb_build_object('task', 'c' || n)) from generate_series(1, 40) n)) \g /dev/null
select pg_temp.states() \g /dev/null
-- as if the time were up after the twentieth round
select test.change('queue._earlier_deadlines', '+ interval ''1 hour''', '- interval ''50 ms''') \g /dev/null
select queue.defer('d', needs => array[pg_temp.id('c40')], deadline => '2099-01-01 00:00Z') \g /dev/null
select queue.tick() \g /dev/null
select is((select count(*) from queue.jobs j where j.task like 'c%' and j.deadline is not null), 20::bigint, 'a long chain is left');
select queue.tick() \g /dev/null
select queue.tick() \g /dev/null
select is((select count(*) from queue.jobs j where j.task like 'c%' and j.deadline = '2099-01-01 00:00Z'), 40::bigint, 'to later admissions');
call pg_temp.clear();
select test.change('queue._earlier_deadlines', '- interval ''50 ms''', '+ interval ''1 hour''') \g /dev/null

-- Each of 40 jobs needs all before it: there are many ways to each, and it passes a deadline on once.
do $$
declare
  v_ids bigint[] := '{}'::bigint[];
begin
  for n in 1 .. 40 loop
    v_ids := v_ids || queue.defer('c' || n, needs => v_ids);
  end loop;
end $$;
select pg_temp.states() \g /dev/null
select queue.defer('d', needs => array[pg_temp.id('c40')], deadline => '2099-01-01 00:00Z') \g /dev/null
select cmp_ok(pg_temp.lookups_of_tick(), '<', 400::bigint, 'each is asked for its needs once, not for each way');
select is((select count(*) from queue.jobs j where j.task like 'c%' and j.deadline = '2099-01-01 00:00Z'), 40::bigint, 'and gets the deadline');
call pg_temp.clear();

-- nor does one that has been cancelled pass one on
select queue.defer('needed') as needed \gset
select queue.defer('gone', needs => array[:needed]::bigint[]) as gone \gset
select queue.tick() \g /dev/null
begin;
select queue.cancel(:gone) \g /dev/null
select queue.set_deadline(array[:gone]::bigint[], '2099-01-01 00:00Z') \g /dev/null
commit;
select queue.tick() \g /dev/null
select is((select j.deadline from queue.jobs j where j.id = :needed), null, 'a cancelled job passes on no deadline');
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

select * from finish();
