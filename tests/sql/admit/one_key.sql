-- Batches whose jobs have one and the same key: their slots are passed on in few statements, as the general
-- way would. Where a batch is not of this kind, the general way decides.

select plan(120);

select test.change('queue._claim_loop', '100 ms', '1 hour'), test.change('queue._claim_by_options', '100 ms', '1 hour'),
  test.change('queue._runs_nothing', '0.005', '3600') \g /dev/null
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

\ir one_key.helpers.psql

-- limit, used, ready and waiting of a key; and how many problems queue.check() finds
create function pg_temp.counts(key text) returns text language plpgsql as $$
begin
  return (select concat_ws(' ', s."limit", s.used, s.ready, s.waiting) from queue.semaphores s where s.key = counts.key)
    || coalesce((select string_agg(', ' || c.problem, '') from queue.check() c), '');
end $$;

-- One batch follows the other.
select min(d) as a from (select queue.defer('t', concurrency_key => 'K', concurrency_limit => 4) as d from generate_series(1, 9)) x \gset
select is(pg_temp.claim(2), array[:a, :a + 1]::bigint[], 'the oldest first');
select is(pg_temp.counts('K'), '4 2 2 5', 'two are claimed, two ready');
select pg_temp.succeed(:a, :a + 1);
select is(pg_temp.counts('K'), '4 0 4 3', 'as many become ready as there is room for');
select is(pg_temp.claim(10), array[:a + 2, :a + 3, :a + 4, :a + 5]::bigint[], 'at most the limit');
select is(pg_temp.claim(10), null, 'and no more');
select is(pg_temp.counts('K'), '4 4 0 3', 'a full key');
select pg_temp.succeed(:a + 3);
select is(pg_temp.claim(10), array[:a + 6]::bigint[], 'one slot, one job');
select pg_temp.succeed(:a + 2, :a + 4, :a + 5, :a + 6);
select is(pg_temp.claim(10), array[:a + 7, :a + 8]::bigint[], 'the last ones');
select is(pg_temp.counts('K'), '4 2 0 0', 'none waits');
select pg_temp.succeed(:a + 7, :a + 8);
select is(pg_temp.counts('K'), '4 0 0 0', 'none is left');

-- A limit that was lowered while jobs ran: nothing becomes ready until there is room.
select min(d) as a from (select queue.defer('t', concurrency_key => 'L', concurrency_limit => 4) as d from generate_series(1, 9)) x \gset
select pg_temp.claim(4) \g /dev/null
select queue.configure_key('L', '{"limit": 2}') \g /dev/null
select pg_temp.succeed(:a, :a + 1);
select is(pg_temp.counts('L'), '2 2 0 5', 'two slots fewer');
select pg_temp.succeed(:a + 2);
select is(pg_temp.claim(10), array[:a + 4]::bigint[], 'then as the new limit says');
select pg_temp.succeed(:a + 3, :a + 4);
select is(pg_temp.claim(1), array[:a + 5]::bigint[], 'one of two that are ready');
select queue.cancel(j.id) from queue.jobs j where j.state in ('ready', 'blocked') \g /dev/null
select pg_temp.succeed(:a + 5);
select is(pg_temp.counts('L'), '2 0 0 0', 'the end of it');

-- A changed deadline, priority or queue of a job that waits, and jobs that others need.
select min(d) as a from (select queue.defer('t', concurrency_key => 'M', concurrency_limit => 2) as d from generate_series(1, 8)) x \gset
select pg_temp.claim(2) \g /dev/null
select queue.defer('after', needs => array[:a + 2]::bigint[]) as after \gset
select queue.set_deadline(array[:a + 4]::bigint[], '2990-01-01Z') \g /dev/null
select pg_temp.succeed(:a, :a + 1);
select is(pg_temp.claim(2), array[:a + 4, :a + 2]::bigint[], 'the nearest deadline, then the oldest');
select is(pg_temp.counts('M'), '2 2 0 4', 'both count');
select pg_temp.succeed(:a + 2, :a + 4);
select is((select j.state from queue.jobs j where j.id = :after), 'ready', 'the job that needed one of them is ready');
select queue.set_priority(array[:a + 3]::bigint[], 9) \g /dev/null
select is(pg_temp.claim(1), array[:a + 3]::bigint[], 'a second lane: the priority decides');
select is((select count(*)::integer from queue.check()), 0, 'all counts are right');
select is(cardinality(pg_temp.claim(5)), 2, 'the slot that is left, and the job without a key');
select pg_temp.succeed(:a + 3, :a + 5);
select is(pg_temp.claim(5), array[:a + 6, :a + 7]::bigint[], 'the last two');
select pg_temp.succeed(:a + 6, :a + 7, :after);
select is(pg_temp.counts('M'), '2 0 0 0', 'the end of two lanes');

-- What else counts: a second key, a weight, a rate, a lock, the queue's own limit.
select queue.defer('t', options => '{"concurrency": [{"key": "N", "limit": 2}, {"key": "O", "limit": 1}]}') as two,
  queue.defer('t', concurrency_key => 'N', concurrency_limit => 2) as one \gset
select is(pg_temp.claim(2), array[:two, :one]::bigint[], 'jobs with one key and with two');
select queue.defer('t', options => '{"concurrency": [{"key": "N", "limit": 2}, {"key": "O", "limit": 1}]}') as third,
  queue.defer('t', concurrency_key => 'N', concurrency_limit => 2) as fourth \gset
select queue.tick() \g /dev/null
select pg_temp.succeed(:one);
select is(pg_temp.claim(2), array[:fourth]::bigint[], 'a job that waits for another key holds up none');
select pg_temp.succeed(:two, :fourth);
select is(pg_temp.claim(2), array[:third]::bigint[], 'then its turn comes');
select is((select count(*)::integer from queue.check()), 0, 'and both keys are right');
select pg_temp.succeed(:third);
select min(d) as a from (select queue.defer('t', options => '{"concurrency": [{"key": "W", "limit": 4, "weight": 2}]}') as d from generate_series(1, 5)) x \gset
select is(pg_temp.claim(5), array[:a, :a + 1]::bigint[], 'a weight counts');
select pg_temp.succeed(:a, :a + 1);
select is(pg_temp.counts('W'), '4 0 4 1', 'when it comes back too');
select pg_temp.claim(5) \g /dev/null
select queue.configure_queue('default', '{"max_running": 3}') \g /dev/null
select pg_temp.succeed(:a + 2, :a + 3);
select min(d) as b from (select queue.defer('t', concurrency_key => 'Q', concurrency_limit => 5) as d from generate_series(1, 7)) x \gset
select is(cardinality(pg_temp.claim(5)), 3, 'a queue''s own limit');
select queue.configure_queue('default', '{"max_running": null}') \g /dev/null
select is(cardinality(pg_temp.claim(5)), 3, 'and without it the limit of the key');
select is((select count(*)::integer from queue.check()), 0, 'nothing is wrong so far');
select queue.delete_queue('default', force => true) \g /dev/null

-- Two keys that end in one batch, and weights that end with nothing behind them
select queue.defer('t', concurrency_key => 'A', concurrency_limit => 5) as a, queue.defer('t', concurrency_key => 'B', concurrency_limit => 5) as b \gset
select pg_temp.claim(2) \g /dev/null
select is(pg_temp.counts('A') || ', ' || pg_temp.counts('B'), '5 1 0 0, 5 1 0 0', 'each key has its own slots');
select pg_temp.succeed(:a, :b);
select is(pg_temp.counts('A') || ', ' || pg_temp.counts('B'), '5 0 0 0, 5 0 0 0', 'and gets them back');
select queue.defer('t', options => '{"concurrency": [{"key": "A", "limit": 4, "weight": 2}]}') as a, queue.defer('t', options => '{"concurrency": [{"key": "A", "limit": 4, "weight": 2}]}') as b \gset
select pg_temp.claim(2) \g /dev/null
select pg_temp.succeed(:a, :b);
select is(pg_temp.counts('A'), '4 0 0 0', 'weights end');

-- Deadlines of jobs that wait: the search goes on where the last one stood.
select min(d) as a from (select queue.defer('t', deadline => '2990-01-01Z'::timestamptz + make_interval(days => n), concurrency_key => 'D', concurrency_limit => 1) as d from generate_series(1, 4) n) x \gset
select pg_temp.claim(1) \g /dev/null
select pg_temp.succeed(:a);
select pg_temp.claim(1) \g /dev/null
select pg_temp.succeed(:a + 1);
select is(pg_temp.claim(1), array[:a + 2]::bigint[], 'the third deadline');
select queue._raise_marks(array(select l.lane from queue.lane l)) \g /dev/null
select pg_temp.succeed(:a + 2);
select is(pg_temp.claim(1), array[:a + 3]::bigint[], 'a job below the low mark of its lane');
select pg_temp.succeed(:a + 3);

-- Two priorities, and two queues, whose jobs wait for one key
select min(d) as a from (select queue.defer('t', concurrency_key => 'P', concurrency_limit => 1) as d from generate_series(1, 3)) x \gset
select pg_temp.claim(1) \g /dev/null
select queue.defer('t', priority => 5, concurrency_key => 'P', concurrency_limit => 1) as high \gset
select queue.tick() \g /dev/null
select pg_temp.succeed(:a);
select is(pg_temp.claim(1), array[:high]::bigint[], 'the higher priority');
select pg_temp.succeed(:high);
select pg_temp.claim(1) \g /dev/null
select pg_temp.succeed(:a + 1);
select pg_temp.claim(1) \g /dev/null
select pg_temp.succeed(:a + 2);
select queue.defer('t', queue => 'q' || n, concurrency_key => 'P', concurrency_limit => 3) from generate_series(1, 3) n \g /dev/null
select queue.tick() \g /dev/null
select is((select count(*)::integer from queue.fetch(:worker, '{q2}', 1)), 1, 'one queue of three');
select is(pg_temp.counts('P'), '3 1 2 0', 'the others are still ready');
select is((select count(*)::integer from queue.fetch(:worker, '{q1,q3}', 5)), 2, 'and start');

-- A limit that was lowered while jobs were ready; a rate that came meanwhile
select min(d) as a from (select queue.defer('t', queue => 'low', concurrency_key => 'S', concurrency_limit => 4) as d from generate_series(1, 4)) x \gset
select queue.tick() \g /dev/null
select queue.configure_key('S', '{"limit": 2}') \g /dev/null
select is((select count(*)::integer from queue.fetch(:worker, '{low}', 4)), 2, 'no more than the new limit');
select queue.configure_key('S', '{"limit": 4, "rate": {"limit": 3, "per": "1 day"}}') \g /dev/null
select is((select count(*)::integer from queue.fetch(:worker, '{low}', 4)), 2, 'the limit is raised again');
select min(d) as b from (select queue.defer('t', queue => 'low', concurrency_key => 'S', concurrency_limit => 4) as d from generate_series(1, 4)) x \gset
select queue.tick() \g /dev/null
select pg_temp.succeed(:a, :a + 1, :a + 2, :a + 3);
select is((select count(*)::integer from queue.fetch(:worker, '{low}', 4)), 1, 'two starts count in the rate, and one is left');
select is((select count(*)::integer from queue.check()), 0, 'the counts of rates are right');

-- Jobs with the key and without, in one queue; and a second key, queue or priority beside them
select min(d) as a from (select queue.defer('t', queue => 'mixed', options => case when n % 2 = 0 then '{"concurrency": [{"key": "Y", "limit": 3}]}' else '{}' end::jsonb) as d from generate_series(1, 9) n) x \gset
select queue.tick() \g /dev/null
select is((select array_agg(f.id - :a + 1) from queue.fetch(:worker, '{mixed}', 3) f), '{1,2,3}', 'the oldest, with the key or without');
select is(pg_temp.counts('Y'), '3 1 2 1', 'one counts');
select is((select array_agg(f.id - :a + 1) from queue.fetch(:worker, '{mixed}', 6) f), '{4,5,6,7,9}', 'a job that waits for a slot holds up none');
select pg_temp.succeed(:a, :a + 1, :a + 2, :a + 3);
select queue.defer('t', queue => 'other', concurrency_key => 'Z', concurrency_limit => 2) as other, queue.defer('t', queue => 'mixed', priority => 7) as high \gset
select queue.tick() \g /dev/null
select is((select array_agg(f.id) from queue.fetch(:worker, '{mixed}', 2) f), array[:high, :a + 7]::bigint[], 'the priority first');
select is((select array_agg(f.id order by f.id) from queue.fetch(:worker, '{mixed,other}', 3) f), array[:other]::bigint[], 'another queue with a key');
select is(pg_temp.counts('Y') || ', ' || pg_temp.counts('Z'), '3 2 0 0, 2 1 0 0', 'each key counts its own');
select queue.defer('t', queue => 'mixed') as last \gset
select is((select array_agg(f.id) from queue.fetch(:worker, '{mixed}', 3) f), array[:last]::bigint[], 'a full key leaves the others alone');

-- A queue's limit, a timeout, an expired job, a retry
select queue.configure_queue('own', '{"max_running": 1}') \g /dev/null
select queue.defer('t', queue => 'own', concurrency_key => 'T', concurrency_limit => 9) from generate_series(1, 3) \g /dev/null
select is((select count(*)::integer from queue.fetch(:worker, '{own}', 3)), 1, 'as many as the queue may run');
select queue.defer('t', queue => 'timed', options => '{"timeout": "1 hour"}', concurrency_key => 'U', concurrency_limit => 9) as a \gset
select is((select f.timeout::text from queue.fetch(:worker, '{timed}', 1) f), '01:00:00', 'a job with a timeout');
select is((select count(*)::integer from queue.lease l where l.id = :a), 1, 'has a lease');
select queue.defer('t', queue => 'late', options => '{"expires_at": "2990-01-01Z"}', concurrency_key => 'V', concurrency_limit => 9) as a \gset
select queue.tick() \g /dev/null
update queue.expiry e set at = now() where e.id = :a;
select is((select count(*)::integer from queue.fetch(:worker, '{late}', 1)), 0, 'an expired job does not start');
select queue.defer('t', queue => 'again', options => '{"retry": {"max_attempts": 3, "base": 0}}', concurrency_key => 'X', concurrency_limit => 9) as a \gset
select queue.fail(f.id, f.claim, 'x') from queue.fetch(:worker, '{again}', 1) f \g /dev/null
select is((select f.attempt from queue.fetch(:worker, '{again}', 1) f), 2, 'the second attempt');

-- A pause that came between the choice of the lane and the admission lock
select queue.defer('t', queue => 'shut', concurrency_key => 'Y', concurrency_limit => 9) as a \gset
select queue.tick() \g /dev/null
select l.lane from queue.lane l where l.queue = 'shut' \gset
select queue.pause('shut') \g /dev/null
select is((queue._claim_one_key(:worker, array[:lane], 1)).ids, null, 'nothing is claimed from a lane that is paused');
select queue.resume('shut') \g /dev/null
select is((queue._claim_one_key(:worker, array[:lane], 1)).ids, array[:a]::bigint[], 'until it is resumed');
select is((select count(*)::integer from queue.check()), 0, 'nothing is wrong at the end');

-- Outcomes and the next jobs in one call (_settle_and_claim): it claims what the next fetch would claim. A job
-- that was claimed as it got its slot has no lane.
create function pg_temp.turn(n integer, queues text[], variadic ids bigint[] default '{}') returns text language plpgsql as $$
declare
  v_ids bigint[];
begin
  perform set_config('pgdefer.looked_at', '', false);  -- new jobs are admitted first
  v_ids := array(select f.id from queue.finish_and_fetch((select min(w.id) from queue.workers w),
    (select jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'succeeded'))
     from queue.active_job j where j.id = any (turn.ids)), turn.queues, turn.n) f);
  return (select string_agg(concat_ws(' ', u.id - current_setting('test.a')::bigint + 1,
      case when aj.lane is null then 'direct' end), ', ' order by u.n)
    from unnest(v_ids) with ordinality u (id, n) join queue.active_job aj using (id));
end $$;
create function pg_temp.ready(queue text, n integer, key text default 'E', "limit" integer default 3, priority integer default 0)
returns text language plpgsql as $$
begin
  return (select set_config('test.a', min(d)::text, false) from queue.defer_many(
    (select jsonb_agg(jsonb_build_object('task', 't', 'queue', ready.queue, 'priority', ready.priority,
      'concurrency_key', ready.key, 'concurrency_limit', ready."limit")) from generate_series(1, ready.n))) d);
end $$;

select pg_temp.ready('full', 10) as a \gset
select pg_temp.turn(3, '{full}') \g /dev/null
select is(pg_temp.turn(3, '{full}', :a, :a + 1, :a + 2), '4 direct, 5 direct, 6 direct', 'a full key: three ends, three starts');
select is(pg_temp.counts('E'), '3 3 0 4', 'no job was made ready');
select is(pg_temp.turn(1, '{full}', :a + 3), '7 direct', 'one for one');
select is(pg_temp.turn(1, '{full}', :a + 4, :a + 5), '8', 'fewer than may start: one of those that are ready now');
select is(pg_temp.counts('E'), '3 2 1 1', 'the other is ready');
select is(pg_temp.turn(2, '{full}', :a + 6), '9, 10', 'more than are ready: the others are made ready first');
select is(pg_temp.turn(2, '{full}', :a + 7, :a + 8, :a + 9), null, 'the end');
select is(pg_temp.counts('E'), '3 0 0 0', 'nothing is left of them');

select pg_temp.ready('spare', 10) as a \gset
select pg_temp.turn(1, '{spare}') \g /dev/null
select is(pg_temp.counts('E'), '3 1 2 7', 'slots to spare: two are ready');
select is(pg_temp.turn(1, '{spare}', :a), '2', 'the oldest ready one');
select is(pg_temp.counts('E'), '3 1 2 6', 'and one more is ready');
select is(pg_temp.turn(2, '{spare}', :a + 1), '3, 4', 'all that are ready');
select is(pg_temp.turn(3, '{spare}', :a + 2, :a + 3), '5, 6, 7', 'more than are ready');
select is(pg_temp.turn(9, '{spare}', :a + 4, :a + 5, :a + 6), '8 direct, 9 direct, 10 direct', 'the last ones, of nine asked for');
select is((select s.lanes from queue.semaphore s where s.key = 'kE' order by s.tick desc limit 1), '{}', 'no lane is left');
select pg_temp.turn(1, '{spare}', :a + 7, :a + 8, :a + 9) \g /dev/null

-- What comes first: a higher priority, an older job without a key, another key. And what comes after.
select pg_temp.ready('first', 9) as a \gset
select pg_temp.turn(3, '{first}') \g /dev/null
select queue.defer('t', queue => 'first', priority => 5, concurrency_key => 'F', concurrency_limit => 3) as high \gset
select is(pg_temp.turn(1, '{first}', :a), '10', 'a higher priority');
select is(pg_temp.turn(1, '{first,other}', :high), '4', 'then the job that became ready');
select queue.defer('t', queue => 'first', concurrency_key => 'F', concurrency_limit => 3) as other \gset
select is(pg_temp.turn(1, '{first}', :a + 1), '5', 'the older one of two keys');
select is(pg_temp.turn(2, '{first}', :a + 2), '6, 11', 'and both');
select queue.defer('t', queue => 'first', priority => -5) as low \gset
select is(pg_temp.turn(1, '{first}', :a + 3), '7', 'a lower priority comes after');
select is(pg_temp.turn(2, '{first}', :a + 4), '8, 12', 'but fills what was asked for');
select pg_temp.turn(1, '{none}', :a + 5, :a + 6, :a + 7, :other, :low) \g /dev/null
select is(pg_temp.turn(1, '{first}'), '9', 'the last');
select is(pg_temp.turn(1, '{first}', :a + 8), null, 'is done');

-- A worker of other queues, a paused queue, a limited queue, a worker that is apart or gone
select pg_temp.ready('kept', 20) as a \gset
select pg_temp.turn(3, '{kept}') \g /dev/null
select is(pg_temp.turn(1, '{none}', :a), null, 'not for a worker of another queue');
select is(pg_temp.turn(1, '{k*}', :a + 1), '4', 'but for one of a pattern');
select queue.pause('kept') \g /dev/null
select is(pg_temp.turn(1, '{kept}', :a + 2), null, 'not while the queue is paused');
select queue.resume('kept') \g /dev/null
select queue.configure_queue('kept', '{"max_running": 1}') \g /dev/null
select is(pg_temp.turn(3, '{kept}', :a + 3), '5', 'no more than the queue may run');
select queue.configure_queue('kept', '{"max_running": null}') \g /dev/null
select pg_temp.turn(3, '{kept}', :a + 4) \g /dev/null
select is(pg_temp.counts('E'), '3 3 0 12', 'a full key again');
select throws_ok(format('select pg_temp.turn(0, %L, %s)', '{kept}', :a + 5), '22023', null, 'max_jobs is checked');
update queue.worker w set gone_at = now() where w.id = :worker;
select throws_ok(format('select pg_temp.turn(1, %L, %s)', '{kept}', :a + 5), 'QJ007', null, 'a worker that is gone gets none');
update queue.worker w set gone_at = null where w.id = :worker;
select is(pg_temp.turn(1, '{kept}', :a + 5), '9 direct', 'nothing of that was kept');

select pg_temp.turn(1, '{none}', :a + 6, :a + 7, :a + 8) \g /dev/null
select queue.cancel(j.id) from queue.jobs j where j.queue = 'kept' and j.state in ('ready', 'blocked') \g /dev/null
select pg_temp.ready('capped', 5) as a \gset
select pg_temp.turn(3, '{capped}') \g /dev/null
select queue.configure_queue('capped', '{"rate": {"limit": 1, "per": "1 day"}}') \g /dev/null
select is(pg_temp.turn(1, '{capped}', :a), '4', 'a rate of the queue allows one start');
select is(pg_temp.turn(1, '{capped}', :a + 1), null, 'and not another');
select pg_temp.turn(1, '{none}', :a + 2, :a + 3) \g /dev/null
select queue.cancel(j.id) from queue.jobs j where j.queue = 'capped' and j.state in ('ready', 'blocked') \g /dev/null

-- What is ready with a higher priority comes first.
select pg_temp.ready('urgent', 5) as a \gset
select pg_temp.turn(3, '{urgent}') \g /dev/null
select pg_temp.ready('urgent', 1, 'F', 3, 5) \g /dev/null
select queue.tick() \g /dev/null
select set_config('test.a', :'a', false) \g /dev/null
select is(pg_temp.turn(1, '{urgent}', :a), '6', 'a ready job with a higher priority comes first');
select pg_temp.turn(3, '{none}', :a + 1, :a + 2, :a + 5) \g /dev/null
select is(pg_temp.turn(3, '{urgent}'), '4, 5', 'then the others');
select pg_temp.turn(1, '{none}', :a + 3, :a + 4) \g /dev/null

-- What fills up: a job of lesser priority with another key. What comes first: an older job with another key.
select pg_temp.ready('fill', 5) as a \gset
select pg_temp.turn(3, '{fill}') \g /dev/null
select pg_temp.ready('fill', 1, 'F', 3, -5) \g /dev/null
select queue.tick() \g /dev/null
select set_config('test.a', :'a', false) \g /dev/null
select is(pg_temp.turn(2, '{fill}', :a), '4, 6', 'a lesser priority fills up');
select pg_temp.turn(3, '{none}', :a + 1, :a + 2, :a + 3, :a + 5) \g /dev/null
select is(pg_temp.turn(3, '{fill}'), '5', 'one is left');
select pg_temp.ready('keys', 1) as a \gset
select pg_temp.ready('keys', 1, 'F') \g /dev/null
select pg_temp.ready('keys', 4) \g /dev/null
select set_config('test.a', :'a', false) \g /dev/null
select is(pg_temp.turn(1, '{keys}'), '1', 'the first of two keys');
select is(pg_temp.turn(1, '{keys}', :a), '2', 'an older job with the other key');
select is(pg_temp.counts('E') || ', ' || pg_temp.counts('F'), '3 1 2 2, 3 1 0 0', 'each key counts its own in a turn');

-- A job whose turn in its lock came late is before the ready ones.
select queue.defer('t', queue => 'elsewhere', lock => 'l') as first \gset
select pg_temp.ready('late turn', 1, 'H') as a \gset
select queue.defer('t', queue => 'late turn', lock => 'l', concurrency_key => 'H', concurrency_limit => 3) \g /dev/null
select pg_temp.ready('late turn', 6, 'H') \g /dev/null
select set_config('test.a', :'a', false) \g /dev/null
select is(pg_temp.turn(2, '{elsewhere,late turn}'), '0, 1', 'the holder of a lock, and one with a key');
select pg_temp.turn(1, '{none}', :first) \g /dev/null
select is(pg_temp.counts('H'), '3 1 2 5', 'two others are ready when the turn is passed on');
select is(pg_temp.turn(1, '{late turn}', :a), '2', 'a turn that came late');

-- So is one that gets a nearer deadline while it waits.
select pg_temp.ready('nearer', 6, 'near') as a \gset
select pg_temp.turn(1, '{nearer}') \g /dev/null
select is(pg_temp.counts('near'), '3 1 2 3', 'two are ready');
select queue.set_deadline(array[:a + 4]::bigint[], '2990-01-01Z') \g /dev/null
select is(pg_temp.turn(1, '{nearer}', :a), '5', 'it comes before the ready ones');
select is(pg_temp.turn(3, '{nearer}', :a + 4), '2, 3, 4', 'which follow');
select pg_temp.turn(3, '{nearer}', :a + 1, :a + 2, :a + 3) \g /dev/null
select pg_temp.turn(1, '{none}', :a + 5) \g /dev/null

-- A job that is discarded if there is no slot finds the one that is freed in the same call.
select pg_temp.ready('discard', 1, 'I', 1) as a \gset
select pg_temp.turn(1, '{discard}') \g /dev/null
select queue.defer('t', queue => 'discard', concurrency_key => 'I', concurrency_limit => 1, options => '{"on_limit": "discard"}') \g /dev/null
select is(pg_temp.turn(1, '{discard}', :a), '2', 'slots are freed before new jobs are admitted');
select pg_temp.turn(1, '{none}', :a + 1) \g /dev/null

-- So does one that becomes due, and it comes first by its priority.
select pg_temp.ready('due', 3, 'J', 1) as a \gset
select pg_temp.turn(1, '{due}') \g /dev/null
select queue.defer('t', queue => 'due', priority => 3, concurrency_key => 'J', concurrency_limit => 1, scheduled_at => clock_timestamp() + interval '200 ms') as due \gset
select queue.tick() \g /dev/null
select pg_sleep_until(j.scheduled_at) from queue.job j where j.id = :due \g /dev/null
select is(pg_temp.turn(1, '{due}', :a), '4', 'a job that has become due');
select queue.cancel(j.id) from queue.jobs j where j.queue = 'due' and j.state in ('ready', 'blocked') \g /dev/null
select pg_temp.turn(1, '{none}', :due) \g /dev/null

-- A job that has crashed goes to a worker that runs nothing, also if it waited for its slot.
create function pg_temp.start(job bigint, worker bigint) returns bigint language sql as
$$select f.claim from queue.fetch(start.worker, null, 1, jsonb_build_object('ids', jsonb_build_array(start.job))) f$$;
select pg_temp.ready('crashed', 1, 'crash', 1) as a \gset
select queue.register_worker('u', info => '{"dead_after": "1 day"}') as u, queue.register_worker('v', info => '{"dead_after": "1 day"}') as v \gset
select pg_temp.start(:a, :u) as claim \gset
select queue.finish_many(jsonb_build_array(jsonb_build_object('id', :a, 'claim', :claim, 'outcome', 'crashed'))) \g /dev/null
select queue.defer('t', queue => 'crashed', priority => 5, concurrency_key => 'crash', concurrency_limit => 1) as second,
  queue.defer('t', queue => 'crashed', concurrency_key => 'calm', concurrency_limit => 9) as third \gset
select pg_temp.start(:second, :v) as claim2, pg_temp.start(:third, :v) as claim3 \gset
select is((select count(*)::integer from queue.fetch(:u, '{crashed}', 1)), 0, 'the key is full');
select queue.tick(), queue.tick(), queue.tick() \g /dev/null
select is((select l.is_idle from queue.lane l where l.queue = 'crashed' and l.kind = 2), true, 'its lane has no ready job');
select is((select count(*)::integer from queue.finish_and_fetch(:v, jsonb_build_array(jsonb_build_object('id', :second, 'claim', :claim2, 'outcome', 'succeeded')), '{crashed}', 1)), 0, 'it is no job for a worker that runs another');
select queue.finish_many(jsonb_build_array(jsonb_build_object('id', :third, 'claim', :claim3, 'outcome', 'succeeded'))) \g /dev/null
select is((select f.id from queue.fetch(:v, '{crashed}', 1) f), :a::bigint, 'but for one that runs nothing');
select queue.worker_died(:v) \g /dev/null
select queue.cancel(:a) \g /dev/null

-- A timeout
select queue.defer_many((select jsonb_agg('{"task": "t", "queue": "leased", "concurrency_key": "G", "concurrency_limit": 1,
  "options": {"timeout": "1 hour"}}'::jsonb) from generate_series(1, 3))) \g /dev/null
select set_config('test.a', min(j.id)::text, false) as a from queue.jobs j where j.queue = 'leased' \gset
select pg_temp.turn(1, '{leased}') \g /dev/null
select is(pg_temp.turn(1, '{leased}', :a), '2 direct', 'jobs with a timeout');
select is((select array_agg(l.id - :a + 1) from queue.lease l join queue.job j on j.id = l.id where j.queue = 'leased'), '{2}', 'have a lease as long as they run');
select is((select count(*)::integer from queue.check()), 0, 'all is right at the end of turns');

-- Sleepers are told if more jobs are ready than before.
create sequence public.announced;
create or replace function queue._announce() returns void language plpgsql as $$begin perform nextval('public.announced'); end$$;
select pg_temp.ready('told', 12, 'told', 5) as a \gset
select pg_temp.turn(3, '{told}') \g /dev/null
select setval('public.announced', 1) \g /dev/null
select is(pg_temp.turn(1, '{told}', :a, :a + 1, :a + 2), '4', 'three ends, one start');
select is(nextval('public.announced'), 3::bigint, 'more are ready: that is announced');
select is(pg_temp.turn(1, '{told}', :a + 3), '5', 'one end, one start');
select is(nextval('public.announced'), 4::bigint, 'as many are ready: nobody need know');
select is(pg_temp.turn(1, '{none}', :a + 4), null, 'one end, no start');
select is(nextval('public.announced'), 6::bigint, 'is announced');

select * from finish();
