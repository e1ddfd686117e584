-- peek shows jobs whose last claim has just ended, in their places. The rest of its tests: why.sql.

select plan(9);

set pgdefer.notify = off;

select queue.register_worker('w', info => '{"dead_after": "30 min"}') as worker \gset

create function pg_temp.peeked(queues text[] default null, n integer default 10) returns text language sql as $$
  select string_agg(p.task, ' ' order by p.ordinality) from queue.peek(queues, n) with ordinality p
$$;
create function pg_temp.claim(task text) returns text language sql as $$
  select format('%s, %s', f.id, f.claim) from queue.fetch((select w.id from queue.workers w), options => jsonb_build_object('tasks', array[task])) f
$$;

select queue.defer('a'), queue.defer('b'), queue.defer('c', queue => 'other'), queue.defer('d') \g /dev/null
select pg_temp.claim('a') as a \gset
select is(pg_temp.peeked(), 'b d c', 'a job that runs is not shown');
select queue.release(:a) \g /dev/null
select is(pg_temp.peeked(), 'a b d c', 'a job that was released is the next one again');
select is(pg_temp.peeked(n => 1), 'a', 'the first ones only');
select is(pg_temp.peeked('{other}'), 'c', 'of the queues');

select pg_temp.claim('a') as a \gset
select queue.fail(:a, 'e', options => '{"retry_in": 0, "queue": "other", "priority": -1}') \g /dev/null
select is(pg_temp.peeked(), 'b d c a', 'a retry has its new queue and priority');
select is(pg_temp.peeked('{other}'), 'c a', 'there it is found');

-- not those that can't start
select pg_temp.claim('b') as b \gset
select queue.fail(:b, 'e', options => '{"retry_in": "1 hour"}') \g /dev/null
select pg_temp.claim('d') as d \gset
select queue.retry_later(:d, needs => array[(select j.id from queue.jobs j where j.task = 'c')]) \g /dev/null
select is(pg_temp.peeked(), 'c a', 'not one whose time or needs hold it');
select string_agg(f.task, ' ') as fetched from queue.fetch(:worker, max_jobs => 10) f \gset
select is(:'fetched'::text, 'c a', 'as fetch gives them');

select pg_temp.claim('a') as a \gset
select queue.pause('paused'), queue.defer('p', queue => 'paused'), queue.defer('q') \g /dev/null
select pg_temp.claim('q') as q \gset
select queue.fail(:q, 'e', options => '{"retry_in": 0, "queue": "paused"}') \g /dev/null
select is(pg_temp.peeked(), null, 'nor one of a paused queue');
select * from finish();
