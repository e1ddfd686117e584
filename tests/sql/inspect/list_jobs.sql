-- list_jobs: the view queue.jobs, oldest first, in pages.

select plan(18);

set pgdefer.notify = off;

select is_empty('select * from queue.list_jobs()', 'nothing in an empty queue');
select is(test.refusal('select queue.list_jobs(' || arguments || ')'), '22023', 'list_jobs(' || arguments || ')')
from (values ('max_jobs => 0'), ('max_jobs => -1'), ('max_jobs => null')) v (arguments);

select queue.defer('a', '{"n": 1}', queue => 'q1', lock => 'l', priority => 3, options => '{"description": "one", "headers": {"h": 1}}') as a,
  queue.defer('b', queue => 'q2', queueing_lock => 'u', concurrency_key => 'k', concurrency_limit => 1, deadline => '2999-01-01') as b,
  queue.defer('c', queue => 'q1', scheduled_at => '2999-01-01') as c \gset
select queue.defer('d', queue => 'q2', options => format('{"parent": %s}', :a)::jsonb) as d \gset
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
select queue.succeed(id, claim, '{"r": 1}') from queue.fetch(:worker, '{q1}');
select queue.fail(id, claim, 'no') from queue.fetch(:worker, '{q2}');

select set_eq('select to_jsonb(l) from queue.list_jobs() l',
  'select jsonb_object_agg(e.key, e.value) from queue.jobs j cross join lateral jsonb_each(to_jsonb(j)) e
   where e.key in (''id'', ''task'', ''queue'', ''state'', ''reason'', ''args'', ''priority'', ''lock'', ''queueing_lock'', ''concurrency_key'', ''scheduled_at'', ''deadline'', ''created_at'', ''started_at'', ''finished_at'', ''attempts'', ''error'', ''result'', ''description'', ''headers'', ''parent'')
   group by j.id', 'each column as in the view');
select results_eq('select task, state from queue.list_jobs()', $$values ('a', 'succeeded'), ('b', 'failed'), ('c', 'scheduled'), ('d', 'ready')$$, 'oldest first');
select results_eq('select task from queue.list_jobs(max_jobs => 2)', $$values ('a'), ('b')$$, 'a page');
select results_eq(format('select task from queue.list_jobs(%s, 2)', :b), $$values ('c'), ('d')$$, 'the next');
select is_empty(format('select * from queue.list_jobs(%s)', :d), 'after the last');
select is((select count(*) from queue.list_jobs(null)), 4::bigint, 'after NULL: from the first');
select is((select count(*) from queue.list_jobs(-9223372036854775808, 2147483647)), 4::bigint, 'extremes');

-- Restricted and other roles
select queue.register_task('a', '{"sensitive": ["n"]}');
create role list_jobs_some;
create role list_jobs_all;
create role list_jobs_none;
select queue.grant_access('list_jobs_some', 'reader', '{q2}'), queue.grant_access('list_jobs_all', 'reader'), queue.grant_access('list_jobs_none', 'producer');
select is((select args ->> 'n' from queue.list_jobs(max_jobs => 1)), '1', 'the owner sees sensitive args');
set role list_jobs_all;
select is((select args ->> 'n' from queue.list_jobs(max_jobs => 1)), '***', 'a reader does not');
select is((select count(*) from queue.list_jobs()), 4::bigint, 'nor is anything else hidden');
set role list_jobs_some;
select results_eq('select task from queue.list_jobs()', $$values ('b'), ('d')$$, 'a reader of one queue sees its jobs');
select results_eq('select task from queue.list_jobs(max_jobs => 1)', $$values ('b')$$, 'and pages of these');
set role list_jobs_none;
select is(test.refusal('select queue.list_jobs()'), '42501 without a hint', 'a producer may not call it');
reset role;
drop owned by list_jobs_some, list_jobs_all, list_jobs_none;
drop role list_jobs_some, list_jobs_all, list_jobs_none;
select is_empty('select * from queue.check()', 'sound');

select finish();
