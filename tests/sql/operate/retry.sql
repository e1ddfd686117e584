-- Manual retries: from every state, with locks, needs, counts and history.

select plan(114);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

\ir ../work/workers.helpers.psql
\ir retry.helpers.psql

-- The result of retry, without its order.
create function pg_temp.retry(ids bigint[], force boolean default false) returns text language sql as $$
  select string_agg(concat_ws(' ', r.outcome, r.error), ', ') from queue.retry(ids, force) r
$$;

-- A failed job
select queue.defer('t', '{"n": 1}', priority => 3, options => '{"retry": {"max_attempts": 2}}') as id \gset
select pg_temp.run(:id, 'failed', '{"error": "one"}'), pg_temp.run(:id, 'failed', '{"error": "two"}') \g /dev/null
select is(pg_temp.job(:id), 'failed attempts 2 2 0 2', 'a job that has failed');
select results_eq(format('select * from queue.retry(array[%s])', :id), format('values (%s::bigint, ''ready'', null::text)', :id), 'is ready again');
select is(pg_temp.job(:id), 'ready 2 0 0 2', 'failures are reset, attempts continue');
select results_eq(format('select args, priority, error, finished_at, result from queue.jobs where id = %s', :id), $$values ('{"n": 1}'::jsonb, 3, 'two', null::timestamptz, null::jsonb)$$, 'with its args, priority and last error');
select is(pg_temp.run(:id, 'failed', '{"error": "three"}'), 'ready', 'it has all its attempts again');
select is(pg_temp.run(:id, 'failed', '{"error": "four"}'), 'failed', 'and no more');
select is(pg_temp.job(:id), 'failed attempts 4 2 0 4', 'its attempts are numbered on');
select results_eq(format('select attempt, error from queue.attempts where job_id = %s order by claim', :id), $$values (1, 'one'), (2, 'two'), (3, 'three'), (4, 'four')$$, 'the history is whole');
select is(pg_temp.retry(array[:id]), 'ready', 'as often as you like');
select is(pg_temp.run(:id, 'succeeded', '{"result": 1}'), 'succeeded', 'it may succeed');

-- Succeeded and cancelled jobs
select is(pg_temp.retry(array[:id]), 'ready', 'one that has succeeded runs again');
select is((select result from queue.jobs where id = :id), null, 'without a result');
select is(pg_temp.job(:id), 'ready 5 0 0 5', 'its claims are counted on');
select is(pg_temp.run(:id, 'succeeded'), 'succeeded', 'to its end');
select is(pg_temp.job(:id), 'succeeded 6 0 0 6', 'one more');
select queue.defer('t') as plain \gset
select pg_temp.run(:plain, 'succeeded') \g /dev/null
select is(pg_temp.retry(array[:plain]), 'ready', 'a plain job too');
select is(pg_temp.job(:plain), 'ready 1 0 0 1', 'with what it has counted');
select queue.cancel(:plain) \g /dev/null
select is(pg_temp.retry(array[:plain]), 'ready', 'a cancelled one');
select pg_temp.run(:plain, 'succeeded') \g /dev/null
select queue.defer('t', scheduled_at => '2999-01-01') as id \gset
select queue.cancel(:id) \g /dev/null
select is(pg_temp.retry(array[:id]), 'scheduled', 'a job cancelled before its time waits for it');
select queue.cancel(:id) \g /dev/null

-- Every other state is refused
select queue.defer('running') as running, queue.defer('running', lock => 'l') as running2 \gset
select max(claim) as claim from queue.fetch(:worker, null, 2) \gset
select queue.defer('ready') as ready, queue.defer('scheduled', scheduled_at => '2999-01-01') as scheduled, queue.defer('blocked', lock => 'l') as blocked,
  queue.defer('waiting', needs => array[:running]) as waiting, queue.defer('held', options => '{"held": true}') as held \gset
select is(pg_temp.retry(array[:running, :ready, :scheduled, :blocked, :waiting, :held, 424242]),
          'running QJ003, ready QJ003, scheduled QJ003, blocked QJ003, waiting QJ003, held QJ003, QJ001', 'a row for each id: what state does not allow it, what is not there');
select is((select claim from queue.jobs where id = :running), :claim::bigint, 'nothing has changed');
select results_eq(format('select id, outcome, error from queue.retry(array[%s, 424242, %s, %s])', :held, :ready, :held),
                  format('values (%s::bigint, ''held'', ''QJ003''), (424242, null, ''QJ001''), (%s, ''ready'', ''QJ003'')', :held, :ready), 'in the order in which they were given, each once');
select is_empty('select * from queue.retry(''{}'')', 'no ids, no rows');
select is(test.refusal(call), '22023', call) from (values
  ('select queue.retry(null)'), ('select queue.retry(array[1, null])'), ('select queue.retry_failed('''')'), ('select queue.retry_failed(null, '''')'), ('select queue.retry_failed(max_jobs => 0)'),
  ('select queue.retry_failed(max_jobs => -1)'), ('select queue.retry_failed(max_jobs => 1001)'),
  ('select queue.retry(array(select generate_series(1, 1001))::bigint[])')) v (call);
select is((select count(*) from queue.retry(array(select generate_series(1000001, 1001000))::bigint[])), 1000::bigint, 'a call takes 1,000 ids');
begin isolation level repeatable read;
select is(test.refusal('select queue.retry(''{1}'')'), 'QJ008', 'retry in REPEATABLE READ');
select is(test.refusal('select queue.retry_failed()'), 'QJ008', 'retry_failed too');
rollback;

-- Running, with force: the claim is lost
select is(pg_temp.retry(array[:running], force => true), 'ready', 'with force a running job is ready again');
select is(pg_temp.job(:running), 'ready 1 0 0 1', 'its attempt counts');
select results_eq(format('select outcome, error from queue.attempts where job_id = %s', :running), $$values ('aborted', 'taken back by a retry with force')$$, 'as aborted');
select is(test.refusal(format('select queue.succeed(%s, %s)', :running, :claim)), 'QJ002', 'the old claim is lost');
select results_eq(format('select id, claim, reason from queue.heartbeat(%s)', :worker), format('values (%s::bigint, %s::bigint, ''retried'')', :running, :claim), 'its worker is told to stop');
select is_empty(format('select * from queue.heartbeat(%s)', :worker), 'once');
select id, claim as claim2 from queue.fetch(:worker) \gset
select is(:id::bigint, :running::bigint, 'another claim');
select is(test.refusal(format('select queue.fail(%s, %s, ''late'')', :running, :claim)), 'QJ002', 'the old one stays lost');
select queue.succeed(:id, :claim2) \g /dev/null
select is(pg_temp.retry(array[:running2], force => true), 'ready', 'with a lock');
select is((select state from queue.jobs where id = :blocked), 'blocked', 'it keeps its turn');
select is_empty('select * from queue.check()', 'everything is in order');
select is(pg_temp.retry(array[:ready, :held], force => true), 'ready QJ003, held QJ003', 'force does not make the rest sensible');
select queue.cancel(id) from queue.jobs where state not in ('succeeded', 'failed', 'cancelled') order by id desc \g /dev/null

-- A job that waits for its retry: at once
select queue.defer('t', options => '{"retry": {"max_attempts": 2, "base": "1 day"}}') as id \gset
select is(pg_temp.run(:id, 'failed'), 'scheduled', 'a job that waits for its retry');
select is(pg_temp.retry(array[:id]), 'ready', 'runs at once');
select is(pg_temp.run(:id, 'failed'), 'scheduled', 'its failures reset');
select queue.cancel(:id) \g /dev/null
select queue.defer('t', lock => 'turn', options => '{"retry": {"max_attempts": 2, "base": "1 day"}}') as id, queue.defer('t', lock => 'turn') as next \gset
select pg_temp.run(:id, 'failed') \g /dev/null
select is(pg_temp.retry(array[:id]), 'ready', 'with its turn');
select is((select state from queue.jobs where id = :next), 'blocked', 'that the next waits for');
select is(pg_temp.run(:id, 'succeeded'), 'succeeded', 'to its end');
select is(pg_temp.run(:next, 'succeeded'), 'succeeded', 'and the next');

-- The counters of crashes and yields are reset
select queue.defer('crashed', options => '{"retry": {"max_crashes": 2}, "max_progress": 1}') as id \gset
create function pg_temp.crash() returns text language plpgsql as $$
declare
  v_worker bigint := queue.register_worker('victim', info => '{"dead_after": "1 day"}');
  v_id bigint;
begin
  select f.id into v_id from queue.fetch(v_worker, null, 1) f;
  update queue.worker w set last_seen_at = w.last_seen_at - interval '1 hour', dead_after = '0' where w.id = v_worker;
  perform queue.reap();
  return pg_temp.job(v_id);
end $$;
select pg_temp.crash() \g /dev/null
select is(pg_temp.crash(), 'failed crash_loop 2 0 2 2', 'a crash loop');
select is(pg_temp.retry(array[:id]), 'ready', 'retried');
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
select is(pg_temp.run(:id, 'retry_later'), 'ready', 'may run beside others again, and yield');
select is(pg_temp.run(:id, 'retry_later'), 'failed', 'as often as before');
select is(pg_temp.retry(array[:id]), 'ready', 'retried after too many yields');
select is(pg_temp.run(:id, 'retry_later'), 'ready', 'it may yield again');
select is(pg_temp.crash(), 'ready 6 0 1 6', 'and crash');
select queue.cancel(:id) \g /dev/null
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- Locks: it joins again by its old id
select queue.defer('l1', lock => 'ordered') as l1, queue.defer('l2', lock => 'ordered') as l2, queue.defer('l3', lock => 'ordered') as l3 \gset
select pg_temp.run(:l1, 'failed') \g /dev/null
select claim from queue.fetch(:worker) \gset
select is(pg_temp.retry(array[:l1]), 'blocked', 'while another has the turn it waits');
select is((select state from queue.jobs where id = :l2), 'running', 'and displaces nobody');
select queue.succeed(:l2, :claim) \g /dev/null
select id, claim from queue.fetch(:worker) \gset
select is(:id::bigint, :l1::bigint, 'then it comes before younger ones');
select queue.succeed(:id, :claim) \g /dev/null
select is(pg_temp.run(:l3, 'succeeded'), 'succeeded', 'which follow');
select is(pg_temp.retry(array[:l3, :l1, :l2]), 'blocked, ready, blocked', 'several at once: in the order of ids');
select is((select string_agg(pg_temp.run(id, 'succeeded'), ' ' order by n) from unnest(array[:l1, :l2, :l3]) with ordinality u (id, n)), 'succeeded succeeded succeeded', 'one after the other');
select queue.defer('m1', lock => 'mutex', options => '{"lock_mode": "mutex"}') as m1, queue.defer('m2', lock => 'mutex', options => '{"lock_mode": "mutex"}') as m2 \gset
select pg_temp.run(:m1, 'failed') \g /dev/null
select id, claim from queue.fetch(:worker) \gset
select is(pg_temp.retry(array[:m1]), 'blocked', 'a mutex lock that another job holds');
select queue.succeed(:id, :claim) \g /dev/null
select is(pg_temp.run(:m1, 'succeeded'), 'succeeded', 'is free then');
-- slots, queueing locks, pauses
select queue.defer('k1', concurrency_key => 'k', concurrency_limit => 1) as k1, queue.defer('k2', concurrency_key => 'k', concurrency_limit => 1) as k2 \gset
select pg_temp.run(:k1, 'failed') \g /dev/null
select id, claim from queue.fetch(:worker) \gset
select is(pg_temp.retry(array[:k1]), 'blocked', 'a full key');
select queue.succeed(:id, :claim) \g /dev/null
select is(pg_temp.run(:k1, 'succeeded'), 'succeeded', 'has a slot then');
select queue.defer('d1', concurrency_key => 'k', concurrency_limit => 1, options => '{"on_limit": "discard"}') as d1, queue.defer('d2', concurrency_key => 'k', concurrency_limit => 1, options => '{"on_limit": "discard"}') as d2 \gset
select queue.tick() \g /dev/null
select is(pg_temp.job(:d2), 'cancelled limit 0 0 0 0', 'one that was discarded');
select pg_temp.run(:d1, 'succeeded') \g /dev/null
select is(pg_temp.retry(array[:d2]), 'ready', 'has a slot now');
select pg_temp.run(:d2, 'succeeded') \g /dev/null
select queue.defer('q1', queueing_lock => 'q', options => '{"unique_until": "finish"}') as q1 \gset
select pg_temp.run(:q1, 'failed') \g /dev/null
select queue.defer('q2', queueing_lock => 'q') as q2 \gset
select is(pg_temp.retry(array[:q1]), 'ready', 'a queueing lock that another has taken since does not matter');
select is(pg_temp.run(:q1, 'succeeded') || ' ' || pg_temp.run(:q2, 'succeeded'), 'succeeded succeeded', 'both run');
select queue.defer('p', queue => 'paused') as p \gset
select pg_temp.run(:p, 'failed') \g /dev/null
select queue.pause('paused') \g /dev/null
select is(pg_temp.retry(array[:p]), 'ready', 'on a paused queue');
select is((select reason from queue.jobs where id = :p), 'paused', 'it is paused');
select queue.cancel(:p) \g /dev/null
-- needs
select queue.defer('need') as need \gset
select queue.defer('dependent', needs => array[:need]) as dependent, queue.defer('proceeds', needs => array[:need], options => '{"on_need_failure": "proceed"}') as proceeds \gset
select queue.defer('second', needs => array[:dependent]) as second \gset
select pg_temp.run(:need, 'failed') \g /dev/null
select is((select string_agg(state, ' ' order by id) from queue.jobs where id in (:dependent, :proceeds, :second)), 'upstream_failed ready upstream_failed', 'a need has failed');
select is(pg_temp.retry(array[:dependent]), 'upstream_failed QJ003', 'its dependent is not retried');
select is(pg_temp.retry(array[:need]), 'ready', 'it is');
select is((select string_agg(state, ' ' order by id) from queue.jobs where id in (:dependent, :proceeds, :second)), 'waiting waiting waiting', 'dependents wait again, recursively');
select is(pg_temp.run(:need, 'succeeded'), 'succeeded', 'until it has succeeded');
select is((select string_agg(state, ' ' order by id) from queue.jobs where id in (:dependent, :proceeds, :second)), 'ready ready waiting', 'then they continue');
select is(pg_temp.run(:dependent, 'failed'), 'failed', 'a dependent that fails');
select is(pg_temp.retry(array[:need, :dependent]), 'ready, waiting', 'retried with its need waits for it');
select pg_temp.run(:need, 'succeeded'), pg_temp.run(:dependent, 'succeeded'), pg_temp.run(:second, 'succeeded'), pg_temp.run(:proceeds, 'succeeded') \g /dev/null
select is((select count(*) from queue.jobs where state not in ('succeeded', 'failed', 'cancelled')), 0::bigint, 'all have ended');
-- expires_at
select queue.defer('e', options => jsonb_build_object('expires_at', now() - interval '1 s')) as id \gset
select queue.tick() \g /dev/null
select is(pg_temp.retry(array[:id]), 'cancelled QJ003', 'a job whose expires_at has passed is not started');
select is(pg_temp.retry(array[:id], force => true), 'ready', 'but with force');
select is(pg_temp.run(:id, 'failed', '{"options": {"retryable": true}}'), 'ready', 'and then as often as it may');
select is(pg_temp.run(:id, 'succeeded'), 'succeeded', 'to its end');
select queue.defer('e', options => '{"expires_at": "2999-01-01T00:00:00Z"}') as id \gset
select queue.cancel(:id) \g /dev/null
select is(pg_temp.retry(array[:id]), 'ready', 'one whose expires_at is in the future');
select is((select count(*) from queue.expiry where id = :id), 1::bigint, 'expires then');
select queue.cancel(:id) \g /dev/null
select is_empty('select * from queue.check()', 'everything is in order');

-- In the transaction that ended it: refused, because the end is not settled
select queue.defer('t', lock => 'own') as id \gset
select id, claim from queue.fetch(:worker) \gset
begin;
select queue.fail(:id, :claim, 'e') \g /dev/null
select is(pg_temp.retry(array[:id]), 'failed QJ003', 'a job that this transaction has ended can''t be retried in it');
commit;
select is(pg_temp.retry(array[:id]), 'ready', 'afterwards it can');
select pg_temp.run(:id, 'succeeded') \g /dev/null

-- retry_failed
select queue.defer('a', queue => 'x1') as a1, queue.defer('a', queue => 'x2') as a2, queue.defer('b', queue => 'x1') as b1, queue.defer('b', queue => 'y') as b2, queue.defer('b', queue => 'y') as b3 \gset
select count(pg_temp.run(id, case when id = :b3 then 'succeeded' else 'failed' end)) from unnest(array[:a1, :a2, :b1, :b2, :b3]) id \g /dev/null
select is((select count(*) from queue.retry_failed('none')), 0::bigint, 'retry_failed: a task that has none');
select results_eq('select * from queue.retry_failed(''a'')', format('values (%s::bigint, ''ready'', null::text), (%s, ''ready'', null)', :a1, :a2), 'a task''s');
select count(pg_temp.run(id, 'failed')) from unnest(array[:a1, :a2]) id \g /dev/null
select results_eq('select id from queue.retry_failed(queue => ''x*'', max_jobs => 2)', format('values (%s::bigint), (%s)', :a1, :a2), 'of queues by a pattern, at most this many, oldest first');
select results_eq('select id from queue.retry_failed(''b'', ''y'')', format('values (%s::bigint)', :b2), 'of a task on a queue; only failed ones');
select is_empty(format('select id from queue.retry_failed(after_id => %s)', :b1), 'none after the last');
select results_eq(format('select id from queue.retry_failed(max_jobs => null, after_id => %s)', :a2), format('values (%s::bigint)', :b1), 'all after one');
select is_empty('select * from queue.retry_failed()', 'none is left');
select count(pg_temp.run(id, 'succeeded')) from unnest(array[:a1, :a2, :b1, :b2]) id \g /dev/null
select queue.defer_many(jsonb_agg(jsonb_build_object('task', 'bulk', 'lock', 'lock ' || n % 50))) from generate_series(1, 1000) n \g /dev/null
select queue.tick() \g /dev/null
do $$
begin
  for i in 1 .. 20 loop
    perform queue.fail(f.id, f.claim, 'e') from queue.fetch((select max(w.id) from queue.workers w), null, 50) f;
    commit;
  end loop;
end $$;
select is((select count(*) from queue.retry_failed('bulk') r where r.error is null), 1000::bigint, 'a thousand at once');
select is((select count(*) from queue.jobs where task = 'bulk' and state = 'ready'), 50::bigint, 'one of each lock has the turn');
select is_empty('select * from queue.check()', 'everything is in order');

-- A job that has never started takes its queueing lock again
select queue.defer('one', queueing_lock => 'again') as one \gset
select queue.cancel(:one) \g /dev/null
select queue.defer('two', queueing_lock => 'again') as two \gset
select queue.fail_jobs(array[:two::bigint]) \g /dev/null
select results_eq(format('select outcome, error from queue.retry(array[%s, %s])', :one, :two), $$values ('ready', null), ('failed', 'QJ004')$$, 'of two that have never started the first takes the key');
select throws_ok($$select queue.defer('three', queueing_lock => 'again')$$, 'QJ004', null, 'and keeps it');
select claim from queue.fetch(:worker, null, 1, jsonb_build_object('ids', jsonb_build_array(:one))) \gset
select queue.fail(:one, :claim, 'e') \g /dev/null
select results_eq(format('select outcome, error from queue.retry(array[%s, %s])', :one, :two), $$values ('ready', null), ('ready', null)$$, 'one that has started needs none');
select queue.cancel(:one), queue.cancel(:two) \g /dev/null
select is_empty($$select * from queue.queueing_lock k where k.key = 'again'$$, 'the key is free when they end');
select queue.defer('late', queueing_lock => 'again', options => '{"expires_at": "2001-01-01Z"}') as late \gset
select queue.tick() \g /dev/null
select is((select error from queue.retry(array[:late::bigint])), 'QJ003', 'a job that has expired is refused');
select is_empty($$select * from queue.queueing_lock k where k.key = 'again'$$, 'and takes no key');
-- Expired while it waited for a retry, and nobody has taken note of that yet
select queue.defer('soon', options => '{"expires_at": "2999-01-01T00:00:00Z"}') as soon \gset
select queue.fail(f.id, f.claim, 'e', options => '{"retry_in": "1 hour"}') from queue.fetch(:worker, null, 1, jsonb_build_object('ids', jsonb_build_array(:soon))) f \g /dev/null
select queue.tick() \g /dev/null
update queue.log l set job_options.options = (l.job_options).options || '{"expires_at": "2001-01-01T00:00:00Z"}' where l.id = :soon;
update queue.expiry e set at = '2001-01-01Z' where e.id = :soon;
select is(pg_temp.retry(array[:soon]), 'scheduled QJ003', 'a job that expires in this moment is refused');
select is(pg_temp.retry(array[:soon], true), 'ready', 'with force it runs');
select queue.tick() \g /dev/null
select is(pg_temp.job(:soon), 'ready 1 0 0 1', 'and does not expire any more');
select is_empty('select * from queue.check()', 'sound');

select * from finish();
