-- Fetching: order, patterns, options, refusals, and plans on a large, skewed table.

select plan(109);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- The tasks that a fetch returns, in the order of the claims. They are finished afterwards.
create function pg_temp.run(max_jobs integer default 100, queues text[] default null, options jsonb default null) returns text language plpgsql as $$
declare
  v_text text;
begin
  select string_agg(f.task, ' ' order by f.n) into v_text
  from queue.fetch((select w.id from queue.workers w where w.name = 'w'), run.queues, run.max_jobs, run.options) with ordinality
    f (id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, timeout, headers, parent, n);
  perform queue.finish_many(jsonb_agg(jsonb_build_object('id', v.id, 'claim', v.claim, 'outcome', 'succeeded')))
  from queue.active_job v where v.claim is not null having count(*) > 0;
  return v_text;
end $$;

-- The columns of a claim
select queue.register_worker('other', array['what*'], '{"host": "h", "dead_after": "1 day"}') as other \gset
select queue.defer('t', '{"a": 1}', queue => 'what', priority => 3, lock => 'l', deadline => '2999-01-02Z', scheduled_at => '1999-01-01Z',
                   options => '{"timeout": "5 min", "headers": {"h": 1}}') as id \gset
select queue.defer('child', queue => 'what', options => jsonb_build_object('parent', :id)) as child \gset
create temp table claims as select f.* from queue.fetch(:other, array['what'], 1) f;
select is((select row (c.id, c.task, c.args, c.queue, c.priority, c.lock, c.attempt, c.scheduled_at = '1999-01-01Z', c.deadline = '2999-01-02Z', c.timeout, c.headers, c.parent)::text from claims c),
          format('(%s,t,"{""a"": 1}",what,3,l,1,t,t,00:05:00,"{""h"": 1}",)', :id), 'every column of a claim');
select is((select row (j.state, j.attempts, j.claims, j.claim = c.claim, j.worker_id, j.started_at between now() - interval '1 min' and clock_timestamp())::text
           from queue.jobs j join claims c using (id)), format('(running,1,1,t,%s,t)', :other), 'and what the view says of a running job');
select is((select row (w.name, w.queues, w.running, w.is_alive, w.info)::text from queue.workers w where w.id = :other), '(other,{what*},1,t,"{""host"": ""h"", ""dead_after"": ""1 day""}")', 'and of its worker');
select is((select f.parent from queue.fetch(:other) f), :id::bigint, 'a child has its parent');
select queue.release(c.id, c.claim) from claims c;
select cmp_ok((select f.claim from queue.fetch(:worker) f), '>', (select c.claim from claims c), 'claims rise');
select is((select j.attempts from queue.jobs j where j.id = :id), 1, 'a released attempt is not counted');
select pg_temp.run() \g /dev/null

-- Order: priority, then deadline, then id
select queue.defer_many('[{"task": "e"}, {"task": "c", "deadline": "2998-01-01Z"}, {"task": "f"}, {"task": "b", "deadline": "2997-01-01Z"},
                          {"task": "a", "priority": 1}, {"task": "h", "priority": -1, "deadline": "2001-01-01Z"}, {"task": "d", "deadline": "2998-01-01Z"}, {"task": "g", "deadline": "infinity"}]') \g /dev/null
select is(pg_temp.run(), 'a b c d e f g h', 'priority, then deadline, then id');
select queue.defer('t', deadline => 'infinity') from generate_series(1, 3) \g /dev/null
select results_eq(format('select f.attempt, f.deadline from queue.fetch(%s, null, 3) f', :worker), 'select 1, null::timestamptz from generate_series(1, 3)', 'infinity is no deadline');
select pg_temp.run() \g /dev/null

-- A job with a deadline comes below the low mark of its lane, from which on jobs are looked for.
select queue.defer('n', queue => 'marks') \g /dev/null
select is(pg_temp.run(), 'n', 'a job without a deadline');
select queue._raise_marks(array(select l.lane from queue.lane l where l.queue = 'marks'));
select queue.defer('soon', queue => 'marks', deadline => '2998-01-01Z') \g /dev/null
select is(pg_temp.run(), 'soon', 'the mark is lowered for it');
select queue.defer_many('[{"task": "e"}, {"task": "c", "deadline": "2998-01-01Z"}, {"task": "f"}, {"task": "b", "deadline": "2997-01-01Z"}, {"task": "a", "priority": 1}]') \g /dev/null
select is(concat_ws(' ', pg_temp.run(1), pg_temp.run(1), pg_temp.run(1), pg_temp.run(1), pg_temp.run(1)), 'a b c e f', 'one by one as well');
select pg_temp.run() \g /dev/null

-- A claim raises the marks of the lanes that it claimed from, in one of 300 jobs, even if it gets less than it asks
-- for, and claims again once more are admitted: a snapshot that another session holds keeps all rows below.
create function pg_temp.raise_next() returns void language plpgsql as $$
begin
  for n in 1 .. 100000 loop
    perform setseed(n / 100000.0);
    if random() < 0.001 then
      perform setseed(n / 100000.0);
      exit;
    end if;
  end loop;
end $$;
create function pg_temp.are_raised(queue text) returns boolean language sql as $$
  select min(l.low_id) > max(j.id) from queue.lane l, queue.jobs j where l.queue = are_raised.queue and j.queue = l.queue
$$;
select set_config('pgdefer.was_dry', 'off', false), queue.defer('a', queue => 'one lane') \g /dev/null
select queue.tick(), set_config('pgdefer.looked_at', '', false), pg_temp.raise_next() \g /dev/null
select is(pg_temp.run(20, '{one lane}'), 'a', 'one of twenty that could be');
select ok(pg_temp.are_raised('one lane'), 'raises the mark');
select queue.defer('a', queue => 'two lanes') \g /dev/null
select queue.tick() \g /dev/null
select queue.defer('b', queue => 'two lanes', priority => -1) \g /dev/null
select set_config('pgdefer.was_dry', 'off', false), pg_temp.raise_next() \g /dev/null
select is((select pg_temp.run(20, '{two lanes}') where set_config('pgdefer.looked_at', extract(epoch from clock_timestamp())::text, false) > ''), 'a b', 'one, and another that it admits');
select ok(pg_temp.are_raised('two lanes'), 'raise both marks');
select pg_temp.run() \g /dev/null

-- Newcomers are claimed as they are admitted, if nothing else is ready and they are few. The session
-- has pgdefer.was_dry on if its last fetch found only newcomers.
create function pg_temp.is_dry() returns boolean language sql as $$ select current_setting('pgdefer.was_dry') = 'on' $$;
select is(pg_temp.run(), null, 'nothing is left');
select ok(pg_temp.is_dry(), 'and newcomers are all that is expected');
select queue.defer('n') as newcomer \gset
create temp table newcomers as select f.* from queue.fetch(:worker) f;
select is((select row (n.id, n.task, n.attempt)::text from newcomers n), format('(%s,n,1)', :newcomer), 'a newcomer is claimed');
select is((select row (j.state, j.attempts, j.claim = n.claim, j.worker_id, j.started_at <= clock_timestamp())::text from queue.jobs j join newcomers n using (id)),
          format('(running,1,t,%s,t)', :worker), 'and runs');
select lives_ok(format('select queue.release(%s, (select n.claim from newcomers n))', :newcomer), 'it can be given back');
select cmp_ok((select f.claim from queue.fetch(:worker) f), '>', (select n.claim from newcomers n), 'claims rise');
select pg_temp.run(), pg_temp.run() \g /dev/null
select queue.defer('low'), queue.defer('high', priority => 5) \g /dev/null
select is(concat_ws(' ', pg_temp.run(1), pg_temp.run(1), pg_temp.run(1)), 'high low', 'of two newcomers the one of higher priority comes first');
select queue.defer('1'), queue.defer('2'), queue.defer('3') \g /dev/null
select is(concat_ws(' ', pg_temp.run(2), pg_temp.run(2), pg_temp.run(2)), '1 2 3', 'of three the oldest');
select queue.defer('late'), queue.defer('soon', deadline => '2999-01-01Z') \g /dev/null
select is(pg_temp.run(), 'soon late', 'or the one with a deadline');
select queue.defer('1'), queue.defer('2', lock => 'n'), queue.defer('3') \g /dev/null
select is(pg_temp.run(), '1 2 3', 'newcomers with a lock are in the same order');
select pg_temp.run() \g /dev/null
select queue.pause('default') \g /dev/null
select queue.defer('paused') \g /dev/null
select is(pg_temp.run(), null, 'none of a paused queue');
select queue.resume('default') \g /dev/null
select is(pg_temp.run(queues => '{other,else*}'), null, 'none of another queue');
select is(pg_temp.run(), 'paused', 'until it is asked for');
select pg_temp.run() \g /dev/null
select queue.defer('first', queue => 'new') \g /dev/null
select pg_temp.run() \g /dev/null
select pg_temp.run() \g /dev/null
select queue.defer('of a pattern', queue => 'new') \g /dev/null
select ok(pg_temp.is_dry(), 'newcomers are expected');
select is(pg_temp.run(queues => '{ne*,other}'), 'of a pattern', 'a pattern finds them too');
select queue.defer('t', options => '{"timeout": "5 min"}') as timed \gset
select f.id from queue.fetch(:worker) f \g /dev/null
select is((select count(*) from queue.lease l where l.id = :timed), 1::bigint, 'one with a timeout has a lease');
select pg_temp.run(), pg_temp.run() \g /dev/null
select queue.register_worker('gone', info => '{"dead_after": "1 day"}') as gone \gset
select queue.deregister_worker(:gone) \g /dev/null
select queue.defer('n') \g /dev/null
select ok(pg_temp.is_dry(), 'newcomers are expected');
select is(test.refusal(format('select queue.fetch(%s)', :gone)), 'QJ007', 'a worker that is gone gets none');
select is(pg_temp.run(), 'n', 'which another gets');
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'n')) from generate_series(1, 5))) \g /dev/null
select is(pg_temp.run(2), 'n n', 'more than it asks for');
select ok(not pg_temp.is_dry(), 'are no newcomers only');
select pg_temp.run(), pg_temp.run() \g /dev/null

-- Jobs of every kind are in one order.
select queue.defer('1'), queue.defer('2', concurrency_key => 'k', concurrency_limit => 9), queue.defer('3', lock => 'a'), queue.defer('4', queueing_lock => 'q'),
  queue.defer('5'), queue.defer('6', options => '{"expires_at": "2999-01-01Z"}'), queue.defer('7', lock => 'b', options => '{"lock_mode": "mutex"}'),
  queue.defer('8', options => '{"timeout": 60}'), queue.defer('9', concurrency_key => 'k', concurrency_limit => 9) \g /dev/null
select is(pg_temp.run(), '1 2 3 4 5 6 7 8 9', 'jobs with and without keys and locks are in one order');
select queue.defer('1'), queue.defer('2', concurrency_key => 'k', concurrency_limit => 9), queue.defer('3'), queue.defer('4', concurrency_key => 'k', concurrency_limit => 9) \g /dev/null
select is(concat_ws(' ', pg_temp.run(2), pg_temp.run(1), pg_temp.run(1)), '1 2 3 4', 'in small batches too');

select queue.defer('1'), queue.defer('2', concurrency_key => 'k', concurrency_limit => 9), queue.defer('3'), queue.defer('4', concurrency_key => 'k', concurrency_limit => 9) \g /dev/null
select is(pg_temp.run(options => '{"order": "mixed"}'), '1 2 3 4', 'and with options');
select queue.defer('1'), queue.defer('2', concurrency_key => 'k', concurrency_limit => 9), queue.defer('3'), queue.defer('4', concurrency_key => 'k', concurrency_limit => 9) \g /dev/null
select is(concat_ws(' ', pg_temp.run(3, null, o), pg_temp.run(3, null, o)), '1 2 3 4', 'and with ids') from (select jsonb_build_object('ids', jsonb_agg(j.id order by j.id desc)) from queue.jobs j where j.state = 'ready') s (o);

-- Between queues of equal priority the one whose first job is oldest comes first.
select queue.defer('y2', queue => 'y'), queue.defer('z1', queue => 'z'), queue.defer('y1', queue => 'y', deadline => '2030-01-01Z', lock => 'm', options => '{"lock_mode": "mutex"}') \g /dev/null
select is((select string_agg(p.task, ' ') from queue.peek() p), 'z1 y1 y2', 'the first job of a queue may have the greatest id');
select is(concat_ws(' ', pg_temp.run(1), pg_temp.run(1), pg_temp.run(1)), 'z1 y1 y2', 'in all its lanes');
select queue.defer('y2', queue => 'y'), queue.defer('z1', queue => 'z'), queue.defer('y1', queue => 'y', deadline => '2030-01-01Z', lock => 'm', options => '{"lock_mode": "mutex"}') \g /dev/null
select is(concat_ws(' ', pg_temp.run(1, null, '{"order": "mixed"}'), pg_temp.run(1, null, '{"order": "mixed"}'), pg_temp.run(1)), 'z1 y1 y2', 'with options too');
select queue.defer('z1', queue => 'z'), queue.defer('a1', queue => 'a'), queue.defer('z2', queue => 'z'), queue.defer('a2', queue => 'a'), queue.defer('m1', queue => 'm', priority => 1) \g /dev/null
select is(pg_temp.run(), 'm1 z1 z2 a1 a2', 'between queues: priority, then whose first job is oldest');
select queue.defer('z1', queue => 'z'), queue.defer('a1', queue => 'a'), queue.defer('z2', queue => 'z'), queue.defer('a2', queue => 'a') \g /dev/null
select is(concat_ws(' ', pg_temp.run(1), pg_temp.run(1), pg_temp.run(1), pg_temp.run(1)), 'z1 a1 z2 a2', 'so that none starves');
select queue.defer('z1', queue => 'z'), queue.defer('a1', queue => 'a'), queue.defer('z2', queue => 'z', priority => 1) \g /dev/null
select is(pg_temp.run(2), 'z2 z1', 'a queue with several priorities');
select pg_temp.run() \g /dev/null

-- max_jobs
select test.change('queue._claim_loop', '100 ms', '1 hour') \g /dev/null
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 't')) from generate_series(1, 1500) n)) \g /dev/null
select is((select count(*) from queue.fetch(:worker, max_jobs => 7)), 7::bigint, 'max_jobs is the most');
select count(*) as fetched from queue.fetch(:worker, max_jobs => 2000) \gset
select is(:fetched + (select count(*) from queue.fetch(:worker, max_jobs => 2000)), 1493::bigint, 'more than there are returns all, in two answers (work/deliver)');
select is((select count(*) from queue.fetch(:worker, max_jobs => 2147483647)), 0::bigint, 'and no row when there are none');
select pg_temp.run() \g /dev/null

-- Queues and patterns
create temp table named (queue text);
insert into named values ('a'), ('ab'), ('abc'), ('b'), ('A'), ('a%'), ('a_'), ('*x'), ('a\'), ('ü "q"'), (repeat('é', 500));
select queue.defer(s.queue, queue => s.queue) from named s \g /dev/null
select is(pg_temp.run(queues => array['new *']), null, 'no queue of that pattern');
select queue.defer('new', queue => 'new 1') \g /dev/null
select is(pg_temp.run(queues => array['new *']), 'new', 'a pattern finds a queue that this fetch admits first');
select is(pg_temp.run(queues => array['a']), 'a', 'a name is that queue');
select is(pg_temp.run(queues => array['A']), 'A', 'case counts');
select is(pg_temp.run(queues => array['a%*']), 'a%', 'the characters of LIKE are characters');
select is(pg_temp.run(queues => array['a_*']), 'a_', 'the other as well');
select is(pg_temp.run(queues => array['a\*']), 'a\', 'the escape too');
select is(pg_temp.run(queues => array['ab*']), 'ab abc', 'prefix* is every queue that begins so, itself included');
select is(pg_temp.run(queues => array['**']), '*x', 'an asterisk in a prefix is a character');
select is(pg_temp.run(queues => array['x', 'b']), 'b', 'names that have no queue are none');
select is(pg_temp.run(queues => array['ü*', repeat('é', 500)]), 'ü "q" ' || repeat('é', 500), 'patterns and names together');
select queue.defer('1', queue => 'x'), queue.defer('2', queue => 'y') \g /dev/null
select is(pg_temp.run(queues => array['x', '*']), '1 2', '* is every queue');
select queue.defer('1', queue => 'x'), queue.defer('2', queue => 'y') \g /dev/null
select is(pg_temp.run(), '1 2', 'and so is NULL');
select queue.defer('y', queue => 'y1', priority => 5), queue.defer('x1', queue => 'x1'), queue.defer('x2', queue => 'x2', priority => 1), queue.defer('z', queue => 'z', priority => 9) \g /dev/null
select is(pg_temp.run(queues => array['x*', 'y*'], options => '{"order": "listed"}'), 'x2 x1 y', 'listed: the order of the list beats priority');
select pg_temp.run() \g /dev/null

-- Options
select queue.defer('a', deadline => now() + interval '1 hour'), queue.defer('b', deadline => now() + interval '1 minute'), queue.defer('c') \g /dev/null
select is(pg_temp.run(options => '{"deadline_within": "5 minutes"}'), 'b', 'deadline_within');
select is(pg_temp.run(options => '{"tasks": ["c", "x"]}'), 'c', 'tasks');
select queue.defer('d') as id \gset
select is(pg_temp.run(options => jsonb_build_object('ids', jsonb_build_array(:id))), 'd', 'ids');
select queue.defer('e') \g /dev/null
select is(pg_temp.run(options => '{"order": null, "tasks": null, "ids": null, "deadline_within": null}'), 'a e', 'null is not given');
select is(pg_temp.run(options => '{}'), null, 'no options');

-- Filters find jobs behind others that can't start.
select queue.configure_queue('full', '{"max_running": 1}') \g /dev/null
select queue.defer('f' || n, queue => 'full', priority => 5) from generate_series(1, 5) n \g /dev/null
select queue.defer('free', queue => 'free') \g /dev/null
select f.id, f.claim from queue.fetch(:worker, array['full']) f \gset
select is((select string_agg(f.task, ' ') from queue.fetch(:worker, array['full', 'free'], 2, '{"order": "listed"}') f), 'free', 'a full queue does not hide another, listed');
select queue.defer('free', queue => 'free') \g /dev/null
select is((select string_agg(f.task, ' ') from queue.fetch(:worker, null, 2, '{"tasks": ["f1", "f2", "f3", "f4", "free"]}') f), 'free', 'nor for tasks');
select queue.succeed(:id, :claim) \g /dev/null
select is(concat_ws(' ', pg_temp.run(1), pg_temp.run(1), pg_temp.run(1), pg_temp.run(1)), 'f2 f3 f4 f5', 'which runs when there is room');

-- All jobs, also in lanes with limits
select queue.defer('all', queue => 'all', concurrency_key => 'all', concurrency_limit => 3) from generate_series(1, 5) \g /dev/null
select is((select count(*) from queue.fetch(:worker, '{all}', 2147483647)), 3::bigint, 'max_jobs may be as large as an integer can');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.queue = 'all' and j.state = 'running' \g /dev/null
select queue.cancel(j.id) from queue.jobs j where j.queue = 'all' and j.state <> 'succeeded' \g /dev/null

-- Refusals
select queue.defer('kept') \g /dev/null
select is(test.refusal(format(call, :worker)), '22023', call)
from (values
  ('select queue.fetch(%s, max_jobs => 0)'), ('select queue.fetch(%s, max_jobs => -1)'), ('select queue.fetch(%s, max_jobs => null)'),
  ('select queue.fetch(%s, array[null]::text[])'), ('select queue.fetch(%s, array[''a'', null])'), ('select queue.fetch(%s, array[''''])'), ('select queue.fetch(%s, ''{}'')'), ('select queue.fetch(%s, ''{{a},{b}}'')'),
  ('select queue.fetch(%s, options => ''[]'')'), ('select queue.fetch(%s, options => ''{"unknown": 1}'')'), ('select queue.fetch(%s, options => ''{"order": "random"}'')'),
  ('select queue.fetch(%s, options => ''{"alone": true}'')'), ('select queue.fetch(%s, options => ''{"tasks": "t"}'')'), ('select queue.fetch(%s, options => ''{"ids": ["x"]}'')'),
  ('select queue.fetch(%s, options => ''{"ids": [null]}'')'), ('select queue.fetch(%s, options => ''{"ids": ["1"]}'')'), ('select queue.fetch(%s, options => ''{"tasks": [1]}'')'),
  ('select queue.fetch(%s, options => ''{"ids": {}}'')'), ('select queue.fetch(%s, options => ''{"deadline_within": "soon"}'')'), ('select queue.fetch(%s, options => ''{"deadline_within": "-1 s"}'')')
) v (call);
select is(test.refusal('select queue.fetch(null)'), 'QJ007', 'no worker');
select is(test.refusal('select queue.fetch(999999)'), 'QJ007', 'a worker that never was');
select queue.deregister_worker(:other) \g /dev/null
select is(test.refusal(format('select queue.fetch(%s)', :other)), 'QJ007', 'a worker that is gone');
select is(test.refusal(format('select queue.finish_and_fetch(%s, ''[]'')', :other)), 'QJ007', 'in finish_and_fetch too');
begin isolation level repeatable read;
select is(test.refusal(format('select queue.fetch(%s)', :worker)), 'QJ008', 'REPEATABLE READ');
select is(test.refusal(format('select queue.finish_and_fetch(%s, ''[]'')', :worker)), 'QJ008', 'in finish_and_fetch too');
commit;
begin isolation level serializable;
select is(test.refusal(format('select queue.fetch(%s)', :worker)), 'QJ008', 'SERIALIZABLE');
select is(test.refusal('select queue.succeed(1, 1)'), 'QJ008', 'for succeed as well');
commit;
select is(pg_temp.run(), 'kept', 'and nothing was claimed');
select is_empty('select * from queue.check()', 'every invariant holds');

-- Plans: statistics of empty tables, then a large, skewed queue. No statement of the hot path reads a table, or
-- a long range of an index; the counters show it.
analyze;
set plan_cache_mode = force_generic_plan;
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 't', 'queue', case when n % 20 = 0 then 'small ' || n % 5 else 'large' end, 'priority', n % 3)) from generate_series(1, 30000) n)) \g /dev/null
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'locked', 'lock', 'l' || least(n % 400, 100), 'queue', 'large')) from generate_series(1, 4000) n)) \g /dev/null
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'keyed', 'concurrency_key', 'k', 'concurrency_limit', 5, 'queue', 'large')) from generate_series(1, 3000) n)) \g /dev/null
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'later', 'scheduled_at', '2999-01-01Z')) from generate_series(1, 3000) n)) \g /dev/null
select queue.fetch(:worker, array['none']), queue.fetch(:worker, array['none']), queue.fetch(:worker, array['none']) \g /dev/null
do $$ begin
  loop
    perform queue._lock_admission(true);
    exit when not (select a.has_more from queue._admit(1000) a);
    commit;
  end loop;
end $$;

-- What this session has read and not reported yet: a commit within a procedure reports nothing.
create function pg_temp.reads() returns table (name text, seq bigint, idx bigint) language sql volatile as $$
  select c.relname::text, pg_stat_get_xact_tuples_returned(c.oid),
    (select coalesce(sum(pg_stat_get_xact_tuples_returned(i.indexrelid)), 0)::bigint from pg_index i where i.indrelid = c.oid)
  from pg_class c where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r'
$$;
create temp table before as select * from pg_temp.reads() limit 0;
create temp table heavy (tables text);
-- Calls this many times, and says of which tables more rows than this were read: whole, or by an index. The entry of a
-- row that has ended stays in an index for as long as another session may see it. So it waits first until autovacuum,
-- and each transaction that has written in any database, has ended. It calls again, up to five times, while there are
-- any.
create procedure pg_temp.measure(call text, times integer, seq bigint, idx bigint) language plpgsql as $$
declare
  v_xid xid8;
begin
  for n in 1 .. 5 loop
    v_xid := pg_current_xact_id();
    commit;
    while pg_snapshot_xmin(pg_current_snapshot()) <= v_xid or exists (select from pg_stat_activity a
      where a.datname = current_database() and a.pid <> pg_backend_pid()
        and (a.backend_xmin is not null or a.backend_type = 'autovacuum worker'))
    loop
      commit;
      perform pg_sleep(0.01);
    end loop;
    truncate before, heavy;
    insert into before select * from pg_temp.reads();
    for i in 1 .. times loop
      execute call;
      commit;
    end loop;
    insert into heavy
    select string_agg(format('%s: %s whole, %s by index', r.name, r.seq - b.seq, r.idx - b.idx), ', ' order by r.name)
    from pg_temp.reads() r join before b on b.name = r.name
    where r.seq - b.seq > measure.seq or r.idx - b.idx > measure.idx;
    exit when exists (select from heavy h where h.tables is null);
  end loop;
end $$;
call pg_temp.measure('select count(*) from queue.job', 1, 1000, 1000);
select matches((select tables from heavy), '^log: [0-9]+ whole, 0 by index$', 'a table that is read whole is noticed');
create function pg_temp.cycle(max_jobs integer) returns void language plpgsql as $$
begin
  perform queue.finish_many(jsonb_agg(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', 'succeeded')))
  from queue.fetch((select w.id from queue.workers w where w.name = 'w'), null, cycle.max_jobs) f having count(*) > 0;
end $$;

select pg_temp.cycle(50) \g /dev/null
call pg_temp.measure('select pg_temp.cycle(50)', 20, 1000, 40000);
select is((select tables from heavy), null, '20 x fetch(50) and finish read no table, and no long stretch of an index');
call pg_temp.measure('select pg_temp.cycle(1)', 50, 2000, 20000);
select is((select tables from heavy), null, '50 x fetch(1) and finish too');
call pg_temp.measure('select queue.defer(''t'') from generate_series(1, 50)', 1, 200, 1000);
select is((select tables from heavy), null, '50 x defer too');
call pg_temp.measure($$select queue.fail(f.id, f.claim, 'x') from queue.fetch((select w.id from queue.workers w where w.name = 'w'), null, 20) f$$, 5, 1000, 20000);
select is((select tables from heavy), null, 'fail too');
-- running jobs are counted twice more after a limit was set; claims of a worker that has gone are looked for once more
select from queue.tick() \g /dev/null
select from queue.tick() \g /dev/null
call pg_temp.measure($$select queue.heartbeat((select w.id from queue.workers w where w.name = 'w'))$$, 20, 1000, 45000);
select is((select tables from heavy), null, 'heartbeat too');
call pg_temp.measure($$select queue.before_sleep(w.id), queue.after_sleep(w.id) from queue.worker w where w.name = 'w'$$, 20, 2000, 1000);
select is((select tables from heavy), null, 'before_sleep too');

select * from finish();
