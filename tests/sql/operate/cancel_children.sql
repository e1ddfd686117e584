-- Cancelling the children of a job: which they are, in which states, how many at a time; audited, within a role's queues.

select plan(34);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- States of jobs, in the order of ids.
create function pg_temp.states(variadic ids bigint[]) returns text language sql as $$
  select string_agg(j.state, ' ' order by j.id) from queue.jobs j where j.id = any (ids)
$$;

-- A durable parent with children, one of which has a child of its own; beside them a job that it only deferred, and one that it
-- waits for but has not deferred.
select queue.defer('other') as other, queue.defer('parent') as parent \gset
select claim from queue.fetch(:worker, options => jsonb_build_object('ids', array[:parent])) \gset
select queue.defer('child', options => jsonb_build_object('parent', :parent)) as a, queue.defer('child', options => jsonb_build_object('parent', :parent)) as b,
  queue.defer('child', options => jsonb_build_object('parent', :parent, 'held', true)) as c, queue.defer('child', scheduled_at => now() + interval '1 day', options => jsonb_build_object('parent', :parent)) as d,
  queue.defer('loose', options => jsonb_build_object('parent', :parent)) as loose \gset
select queue.await_jobs(:parent, :claim, 'gather', array[:a, :b, :c, :d, :other]) \g /dev/null
select claim as bclaim from queue.fetch(:worker, options => jsonb_build_object('ids', array[:b])) \gset
select queue.defer('grandchild', options => jsonb_build_object('parent', :b)) as e \gset
select queue.await_jobs(:b, :bclaim, 'gather', array[:e]) \g /dev/null
select claim as aclaim from queue.fetch(:worker, options => jsonb_build_object('ids', array[:a])) \gset
select is(pg_temp.states(:parent, :a, :b, :c, :d, :e), 'waiting running waiting held scheduled ready', 'a parent waits for its children');
select is(queue.cancel(:parent), 'cancelled', 'it is cancelled');
select is(pg_temp.states(:a, :b, :c, :d, :e), 'running waiting held scheduled ready', 'they are not');
select results_eq(format('select * from queue.cancel_children(%s)', :parent), format('values (%s::bigint, ''cancelled'', null), (%s, ''cancelled'', null), (%s, ''cancelled'', null), (%s, ''cancelled'', null)', :b, :c, :d, :e),
                  'its children are cancelled, and theirs, in whatever place they wait');
select is(pg_temp.states(:a, :b, :c, :d, :e), 'running cancelled cancelled cancelled cancelled', 'but none that runs');
select is(pg_temp.states(:other, :loose), 'ready ready', 'nor a job that it does not wait for, or has not deferred');
select is((select string_agg(distinct reason, ' ') from queue.jobs where state = 'cancelled'), 'cancelled', 'the reason is that of cancel');
select results_eq('select call, args, ids, (select array_agg((b ->> ''state'') order by b ->> ''id'') from jsonb_array_elements(before) b) from queue.audit where call = ''cancel_children''',
                  format('values (''cancel_children'', ''{"job": %s, "abort": false}''::jsonb, array[%s, %s, %s, %s]::bigint[], array[''waiting'', ''held'', ''scheduled'', ''ready''])', :parent, :b, :c, :d, :e), 'one row of the audit tells it');
select is_empty(format('select * from queue.cancel_children(%s)', :parent), 'again there is none');
select is((select ids from queue.audit where call = 'cancel_children' order by id desc limit 1), '{}', 'as the audit says');
select results_eq(format('select * from queue.cancel_children(%s, abort => true)', :parent), format('values (%s::bigint, ''running'', null)', :a), 'with abort a running one is told to stop');
select results_eq(format('select id, reason from queue.heartbeat(%s)', :worker), format('values (%s::bigint, ''cancelled'')', :a), 'as its worker learns');
select is_empty(format('select * from queue.cancel_children(%s, abort => true)', :parent), 'once');
select is((select state from queue.finish_many(jsonb_build_array(jsonb_build_object('id', :a, 'claim', :aclaim, 'outcome', 'aborted', 'error', 'stopped')))), 'cancelled', 'it ends cancelled');
select is_empty('select * from queue.check()', 'all is sound');

-- A parent that goes on when its children are cancelled; a child that waits at a lock, with a key
select queue.defer('parent') as parent \gset
select claim from queue.fetch(:worker, options => jsonb_build_object('ids', array[:parent])) \gset
select queue.defer('child', lock => 'l', options => jsonb_build_object('parent', :parent)) as a, queue.defer('child', lock => 'l', concurrency_key => 'k', concurrency_limit => 1, options => jsonb_build_object('parent', :parent)) as b,
  queue.defer('next', lock => 'l', concurrency_key => 'k', concurrency_limit => 1) as next \gset
select queue.await_jobs(:parent, :claim, 'gather', array[:a, :b]) \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.states(:parent, :a, :b, :next), 'waiting ready blocked blocked', 'two children hold a lock');
select is((select count(*) from queue.cancel_children(:parent)), 2::bigint, 'they are cancelled');
select is(pg_temp.states(:parent, :a, :b, :next), 'ready cancelled cancelled ready', 'the parent goes on, and the lock is passed on');

-- A ready child with a key
select queue.defer('parent') as parent \gset
select claim from queue.fetch(:worker, options => jsonb_build_object('ids', array[:parent])) \gset
select queue.defer('child', concurrency_key => 'k2', concurrency_limit => 1, options => jsonb_build_object('parent', :parent)) as a, queue.defer('next', concurrency_key => 'k2', concurrency_limit => 1) as next \gset
select queue.await_jobs(:parent, :claim, 'gather', array[:a]) \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.states(:a, :next), 'ready blocked', 'a child has the room of a key');
select queue.cancel_children(:parent) \g /dev/null
select is(pg_temp.states(:a, :next), 'cancelled ready', 'cancelled, it leaves that to the next');

-- Needs at the time of deferring, before they are admitted
begin;
select queue.defer('parent', options => '{"held": true}') as parent \gset
commit;
select queue.defer('child', options => jsonb_build_object('parent', :parent)) as a \gset
select queue.defer('both', needs => array[:a], options => jsonb_build_object('parent', :parent)) as b \gset
select is_empty(format('select * from queue.cancel_children(%s)', :parent), 'a job that it does not wait for is none of its children');
select queue.defer('chain', needs => array[:b]) as chain \gset
select is_empty(format('select * from queue.cancel_children(%s)', :chain), 'nor is a job that another has deferred');

-- Refusals
select throws_ok('select * from queue.cancel_children(999999)', 'QJ001', null, 'no such job');
select throws_ok('select * from queue.cancel_children(null)', 'QJ001', null, 'no job');
begin isolation level repeatable read;
select throws_ok(format('select * from queue.cancel_children(%s)', :parent), 'QJ008', null, 'the wrong isolation level');
rollback;

-- At most 1,000 at a time, and deep trees
select queue.defer('parent') as parent \gset
select claim from queue.fetch(:worker, options => jsonb_build_object('ids', array[:parent])) \gset
create temp table many as select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'child', 'queue', 'many', 'options', jsonb_build_object('parent', :parent))) from generate_series(1, 1100))) as id;
select queue.await_jobs(:parent, :claim, 'gather', array(select id from many)) \g /dev/null
select queue.cancel(:parent) \g /dev/null
select is((select count(*) from queue.cancel_children(:parent)), 1000::bigint, 'a thousand at a time');
select is((select count(*) from queue.cancel_children(:parent)), 100::bigint, 'then the others');
select is((select count(*) from queue.cancel_children(:parent)), 0::bigint, 'then none');
select is((select count(*) from queue.jobs j join many m on m.id = j.id where j.state = 'cancelled'), 1100::bigint, 'all are cancelled');
select queue.defer('deep') as deep \gset
do $$
declare
  v_worker bigint := (select min(id) from queue.workers);
  v_id bigint := (select max(id) from queue.jobs);
  v_claim bigint;
  v_child bigint;
begin
  for n in 1 .. 30 loop
    select f.claim into strict v_claim from queue.fetch(v_worker, options => jsonb_build_object('ids', array[v_id])) f;
    v_child := queue.defer('deep', options => jsonb_build_object('parent', v_id));
    perform queue.await_jobs(v_id, v_claim, 'call', array[v_child]);
    commit;
    v_id := v_child;
  end loop;
end $$;
select queue.cancel(:deep) \g /dev/null
select is((select count(*) from queue.cancel_children(:deep)), 30::bigint, 'thirty generations');

-- Restricted operators
select queue.defer('parent', queue => 'mine') as parent \gset
select claim from queue.fetch(:worker, options => jsonb_build_object('ids', array[:parent])) \gset
select queue.defer('child', queue => 'mine', options => jsonb_build_object('parent', :parent)) as a, queue.defer('child', queue => 'theirs', options => jsonb_build_object('parent', :parent)) as b \gset
select queue.await_jobs(:parent, :claim, 'gather', array[:a, :b]) \g /dev/null
create role pgdefer_children_operator;
select queue.grant_access('pgdefer_children_operator', 'operator', '{mine}') \g /dev/null
set role pgdefer_children_operator;
select throws_ok(format('select * from queue.cancel_children(%s)', :other), 'QJ001', null, 'a job of another queue is not there');
select results_eq(format('select id, outcome from queue.cancel_children(%s)', :parent), format('values (%s::bigint, ''cancelled'')', :a), 'children in other queues are left alone');
reset role;
select is(pg_temp.states(:parent, :a, :b), 'waiting cancelled ready', 'and the parent waits for them');
select queue.revoke_access('pgdefer_children_operator') \g /dev/null
drop role pgdefer_children_operator;

select is_empty('select * from queue.check()', 'all is sound at the end');
select * from finish();
