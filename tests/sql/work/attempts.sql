-- Retry policies and their tables, options of fail, crashes, and the size limits of errors.

select plan(197);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

create function pg_temp.job(id bigint) returns text language sql as $$
  select concat_ws(' ', j.state, j.reason, j.attempts, j.failures, j.crashes) from queue.jobs j where j.id = job.id
$$;

-- The delays after the failures 1 to n, in seconds.
create function pg_temp.delays(policy jsonb, n integer) returns text language sql as $$
  select string_agg(round(extract(epoch from queue.backoff(policy, f)), 3)::float8::text, ' ' order by f) from generate_series(1, n) f
$$;

-- The seeds' tables. Procrastinate: wait + linear_wait * n + exponential_wait ^ (n + 1), n failures before.
select is(pg_temp.delays(policy, 6), expected, policy::text) from (values
  ('{"max_attempts": 10, "wait": 5}'::jsonb, '5 5 5 5 5 5'),
  ('{"linear_wait": 5}', '0 5 10 15 20 25'),
  ('{"exponential_wait": 5}', '5 25 125 625 3125 15625'),
  ('{"exponential_wait": 1}', '1 1 1 1 1 1'),
  ('{"exponential_wait": 0}', '0 0 0 0 0 0'),
  ('{"wait": 7, "linear_wait": 3, "exponential_wait": 2}', '9 14 21 32 51 86'),
  ('{"wait": 0.5, "linear_wait": 0.25}', '0.5 0.75 1 1.25 1.5 1.75'),
  ('{"wait": 1, "jitter": 0}', '1 1 1 1 1 1')) v (policy, expected);
select results_eq(
  $$select extract(epoch from queue.backoff(jsonb_build_object('wait', w, 'linear_wait', l, 'exponential_wait', e), n + 1))::numeric
    from generate_series(0, 4) w, generate_series(0, 4) l, generate_series(0, 4) e, generate_series(0, 7) n order by w, l, e, n$$,
  $$select (w + l * n + e ^ (n + 1))::numeric from generate_series(0, 4) w, generate_series(0, 4) l, generate_series(0, 4) e, generate_series(0, 7) n order by w, l, e, n$$,
  'Procrastinate''s formula, over a thousand points');
-- Goals, postmodern, the article, and the meaning of an empty policy
select is(pg_temp.delays(policy, 8), expected, policy::text) from (values
  ('{"max_attempts": 4, "backoff": "exponential", "base": 10}'::jsonb, '10 20 40 80 160 320 640 1280'),
  ('{"max_attempts": 9, "backoff": "exponential", "first": 0, "base": "25 minutes"}', '0 1500 3000 6000 12000 24000 48000 96000'),
  ('{"max_attempts": 3}', '0 0 0 0 0 0 0 0'),
  ('{}', '0 0 0 0 0 0 0 0'),
  (null, '0 0 0 0 0 0 0 0'),
  ('{"base": "30 s"}', '30 30 30 30 30 30 30 30'),
  ('{"backoff": "constant", "base": "00:00:01.5"}', '1.5 1.5 1.5 1.5 1.5 1.5 1.5 1.5'),
  ('{"backoff": "linear", "base": 60}', '60 120 180 240 300 360 420 480'),
  ('{"backoff": "linear", "base": 60, "first": 1}', '1 60 120 180 240 300 360 420'),
  ('{"backoff": "exponential", "base": 1, "factor": 3}', '1 3 9 27 81 243 729 2187'),
  ('{"backoff": "exponential", "base": 8, "factor": 0.5}', '8 4 2 1 0.5 0.25 0.125 0.063'),
  ('{"backoff": "exponential", "base": 8, "factor": 1}', '8 8 8 8 8 8 8 8'),
  ('{"backoff": "exponential", "base": 8, "factor": 0}', '8 0 0 0 0 0 0 0'),
  ('{"backoff": "exponential", "base": 0, "factor": 9}', '0 0 0 0 0 0 0 0'),
  ('{"backoff": "exponential", "base": 10, "cap": "1 minute"}', '10 20 40 60 60 60 60 60'),
  ('{"backoff": "linear", "base": 10, "cap": 25, "first": "1 hour"}', '25 10 20 25 25 25 25 25'),
  ('{"base": 5, "cap": null, "first": null, "jitter": null, "factor": null}', '5 5 5 5 5 5 5 5')) v (policy, expected);
select is(pg_temp.delays('{"max_attempts": 9, "backoff": "exponential", "first": 0, "base": "25 minutes"}', 8),
          '0 1500 3000 6000 12000 24000 48000 96000', 'postmodern''s eight retries');

-- Nothing over- or underflows: ten years at most
select is(queue.backoff(policy, failures), make_interval(secs => seconds), format('%s after %s', policy, failures)) from (values
  ('{"backoff": "exponential", "base": 1}'::jsonb, 29, 268435456::float8),
  ('{"backoff": "exponential", "base": 1}', 30, 315360000),
  ('{"backoff": "exponential", "base": 1}', 2147483647, 315360000),
  ('{"backoff": "exponential", "base": 1, "factor": 1e300}', 2, 315360000),
  ('{"backoff": "exponential", "base": 1, "factor": 1e1000}', 2147483647, 315360000),
  ('{"backoff": "exponential", "base": 1, "factor": 1e-1000}', 2147483647, 0),
  ('{"backoff": "exponential", "base": 1, "factor": 0.5}', 2147483647, 0),
  ('{"backoff": "exponential", "base": "3999 years", "factor": 1}', 2147483647, 315360000),
  ('{"backoff": "exponential", "base": 1, "factor": 1.0000000001}', 2147483647, exp(2147483646 * ln(1.0000000001::float8))),
  ('{"backoff": "linear", "base": "1 year"}', 2147483647, 315360000),
  ('{"backoff": "constant", "base": "3999 years"}', 1, 315360000),
  ('{"first": "3999 years"}', 1, 315360000),
  ('{"exponential_wait": 10}', 2147483647, 315360000),
  ('{"exponential_wait": 1e1000}', 2147483647, 315360000),
  ('{"exponential_wait": 0.1}', 2147483647, 0),
  ('{"exponential_wait": 1e-1000}', 1, 0),
  ('{"linear_wait": 1e1000}', 2147483647, 315360000),
  ('{"wait": 1e1000, "linear_wait": 1e1000, "exponential_wait": 1e1000}', 2147483647, 315360000)) v (policy, failures, seconds);

-- jitter shortens a delay by up to its share
create temp table jittered as
select extract(epoch from queue.backoff('{"base": 100, "jitter": 0.25}', 1)) as s from generate_series(1, 2000);
select ok((select min(s) >= 75 and max(s) <= 100 from jittered), 'with jitter a delay stays within its bounds');
select ok((select min(s) < 77 and max(s) > 98 and avg(s) between 86 and 89 from jittered), 'and makes use of them');
select ok((select min(s) >= 0 and max(s) <= 100 from (select extract(epoch from queue.backoff('{"base": 100, "jitter": 1}', 1)) as s from generate_series(1, 1000)) x), 'a jitter of 1');
select ok((select max(s) <= 315360000 from (select extract(epoch from queue.backoff('{"backoff": "exponential", "base": 100, "jitter": 0.5}', 500)) as s from generate_series(1, 100)) x), 'at most ten years with jitter too');

-- Invalid policies
select is(test.refusal(format('select queue.backoff(%L, 1)', policy)), '22023', 'no policy: ' || policy) from (values
  ('1'), ('[]'), ('"exponential"'), ('null'), ('{"attempts": 3}'), ('{"max_attempts": 0}'), ('{"max_attempts": -1}'), ('{"max_attempts": 1.5}'), ('{"max_attempts": "3"}'),
  ('{"max_attempts": 10000000000}'), ('{"backoff": "random"}'), ('{"backoff": 1}'), ('{"base": -1}'), ('{"base": "soon"}'), ('{"base": []}'), ('{"base": true}'), ('{"cap": -1}'),
  ('{"first": "x"}'), ('{"base": "20000 years"}'), ('{"factor": -1}'), ('{"factor": "2"}'), ('{"jitter": 1.01}'), ('{"jitter": -0.1}'), ('{"jitter": true}'), ('{"on_crash": "ignore"}'),
  ('{"on_crash": 1}'), ('{"max_crashes": 0}'), ('{"max_crashes": 2.5}'), ('{"wait": -1}'), ('{"wait": "1 s"}'), ('{"linear_wait": []}'), ('{"exponential_wait": {}}'),
  ('{"wait": 1, "base": 1}'), ('{"exponential_wait": 2, "backoff": "exponential"}'), ('{"linear_wait": 2, "cap": 3}'), ('{"wait": 1, "first": 0}')) v (policy);
select is(test.refusal('select queue.backoff(''{}'', ' || failures || ')'), '22023', 'failures: ' || failures) from (values ('0'), ('-1'), ('null')) v (failures);
select is(test.refusal(format('select queue.defer(''t'', options => jsonb_build_object(''retry'', %L::jsonb))', policy)), '22023', 'not at defer either: ' || policy)
from (values ('{"max_attempts": 0}'), ('{"jitter": 2}'), ('{"wait": 1, "cap": 1}'), ('3'), ('[]')) v (policy);
select is((select count(*) from queue.job), 0::bigint, 'and no job came of it');

-- Runs a job until it ends, letting time pass; returns the result of each failure.
create function pg_temp.life(fail_options jsonb default null) returns text language plpgsql as $$
declare
  v_text text := '';
  v_delay numeric;
  v_failed record;
begin
  for i in 1 .. 20 loop
    select f.id, d.state into v_failed
    from queue.fetch((select max(w.id) from queue.workers w)) f
    cross join lateral queue.finish_many(jsonb_build_array(
      jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', 'failed', 'error', 'e' || f.attempt, 'options', fail_options))) d;
    exit when not found;
    select round(extract(epoch from j.scheduled_at - a.finished_at), 1) into v_delay
    from queue.jobs j join lateral (select max(a.finished_at) as finished_at from queue.attempts a where a.job_id = j.id) a on true where j.id = v_failed.id;
    v_text := concat_ws(' ', v_text, v_failed.state, case when v_failed.state <> 'failed' then v_delay::float8 end);
    update queue.job_override s set scheduled_at = clock_timestamp() where s.id = v_failed.id;
    update queue.waiting w set at = clock_timestamp() where w.id = v_failed.id;
    update queue.cursor c set due_at = '-infinity';
  end loop;
  return trim(v_text);
end $$;

select queue.defer('goals', options => '{"retry": {"max_attempts": 4, "backoff": "exponential", "base": 10}}') as id \gset
select is(pg_temp.life(), 'scheduled 10 scheduled 20 scheduled 40 failed', 'Goals: 10, 20, 40 seconds, failed at the 4th failure');
select is(pg_temp.job(:id), 'failed attempts 4 4 0', 'with its counts');
select results_eq(format('select attempt, error from queue.attempts where job_id = %s order by attempt', :id), $$values (1, 'e1'), (2, 'e2'), (3, 'e3'), (4, 'e4')$$, 'and its history');
select queue.defer('postmodern', options => '{"retry": {"max_attempts": 9, "backoff": "exponential", "first": 0, "base": "25 minutes"}}') \g /dev/null
select is(pg_temp.life(), 'ready 0 scheduled 1500 scheduled 3000 scheduled 6000 scheduled 12000 scheduled 24000 scheduled 48000 scheduled 96000 failed', 'postmodern: at once, 25 min, 50, 100 ..., failed after 8 retries');
select queue.defer('article', options => '{"retry": {"max_attempts": 3}}') \g /dev/null
select is(pg_temp.life(), 'ready 0 ready 0 failed', 'the article: at once, 3 tries');
select queue.defer('none') \g /dev/null
select is(pg_temp.life(), 'failed', 'the default: 1 attempt');
select queue.defer('none', options => '{"retry": {}}') \g /dev/null
select is(pg_temp.life(), 'failed', 'a policy that says nothing is the default');
select queue.defer('none', options => '{"retry": {"on_crash": "fail", "max_crashes": 5, "jitter": 0.1}}') \g /dev/null
select is(pg_temp.life(), 'failed', 'so is one of crashes only');
select queue.defer('endless', options => '{"retry": {"max_attempts": null}}') as id \gset
select is(length(pg_temp.life()), length(repeat(' ready 0', 20)) - 1, 'null is no limit');
select queue.cancel(:id) \g /dev/null
select queue.defer('endless', options => '{"retry": {"base": 0}}') as id \gset
select is(length(pg_temp.life()), length(repeat(' ready 0', 20)) - 1, 'nor does a policy with a delay, unless it sets one');
select queue.cancel(:id) \g /dev/null
-- The task's policy, unless the job has its own, is read when the attempt ends
select queue.register_task('with policy', '{"retry": {"max_attempts": 2}}');
select queue.defer('with policy') \g /dev/null
select is(pg_temp.life(), 'ready 0 failed', 'the task''s policy');
select queue.defer('with policy', options => '{"retry": {"max_attempts": 3, "base": 1}}') \g /dev/null
select is(pg_temp.life(), 'scheduled 1 scheduled 1 failed', 'the job''s own overrides it');
select queue.defer('with policy') \g /dev/null
select queue.register_task('with policy', '{"retry": {"max_attempts": 2, "base": 7}}');
select is(pg_temp.life(), 'scheduled 7 failed', 'a task''s changed policy counts at once');
select queue.register_task('with policy', '{"retry": null}');
select queue.defer('with policy') \g /dev/null
select is(pg_temp.life(), 'failed', 'null is none');

-- Options of fail
create function pg_temp.first_failure(fail_options jsonb, policy jsonb default null) returns text language plpgsql as $$
declare
  v_id bigint;
  v_text text;
begin
  select f.id, queue.fail(f.id, f.claim, 'e', null, fail_options) into v_id, v_text from queue.fetch((select max(w.id) from queue.workers w)) f;
  return v_text;
end $$;
select queue.defer('t', options => '{"retry": {"max_attempts": 5}}') as id \gset
select is(pg_temp.first_failure('{"retryable": false}'), 'failed', 'retryable false: failed at once');
select is(pg_temp.job(:id), 'failed not_retryable 1 1 0', 'with that reason');
select queue.defer('t') \g /dev/null
select is(pg_temp.life('{"retryable": true, "retry_in": 3}'), trim(repeat('scheduled 3 ', 20)), 'retryable true: retried whatever the policy');
select queue.cancel(max(id)) from queue.jobs \g /dev/null
select queue.defer('t') as id \gset
select is(pg_temp.first_failure('{"retry_in": "1 hour"}'), 'scheduled', 'without a policy retry_in decides');
select ok((select scheduled_at between now() + interval '59 minutes' and now() + interval '61 minutes' from queue.jobs where id = :id), 'and says when');
select queue.defer('t', options => '{"retry": {"max_attempts": 2, "base": "1 day"}}') as id \gset
select is(pg_temp.life('{"retry_in": 5}'), 'scheduled 5 failed', 'with a policy, its max_attempts still counts');
select queue.defer('t', options => '{"retry": {"max_attempts": 2}}') as id \gset
select is(pg_temp.first_failure('{"retry_at": "2999-01-01T00:00:00Z"}'), 'scheduled', 'retry_at');
select is((select scheduled_at from queue.jobs where id = :id), '2999-01-01T00:00:00Z'::timestamptz, 'says when too');
select queue.defer('t', options => '{"retry": {"max_attempts": 2}}') as id \gset
select is(pg_temp.first_failure('{"retry_at": "2000-01-01T00:00:00Z"}'), 'ready', 'a time in the past means at once');
select id, attempt from queue.fetch(:worker) \gset
select is(:attempt, 2, 'it is run');
select queue.release(:id, claim) from queue.jobs where id = :id \g /dev/null
select queue.cancel(:id) \g /dev/null
-- changes on retry
select queue.defer('t', options => '{"retry": {"max_attempts": 5}}') as id \gset
select is(pg_temp.first_failure('{"priority": 7, "queue": "q2", "lock": "{l} 1"}'), 'ready', 'priority, queue and lock may change on retry');
select is_empty(format('select * from queue.fetch(%s, ''{default}'')', :worker), 'it has left its queue');
select results_eq(format('select id, queue, priority, lock, attempt from queue.fetch(%s, ''{q2}'')', :worker), format('values (%s::bigint, ''q2'', 7, ''{l} 1'', 2)', :id), 'and runs in the other, with this lock');
select results_eq(format('select queue, priority, lock collate "default" from queue.jobs where id = %s', :id), $$values ('q2', 7, '{l} 1')$$, 'as it shows');
select queue.fail(:id, claim, 'e', null, '{"lock": ""}') from queue.jobs where id = :id \g /dev/null
select results_eq(format('select queue, priority, lock from queue.fetch(%s)', :worker), $$values ('q2', 7, null::text)$$, 'empty text removes the lock, and the rest stays');
select queue.succeed(:id, claim) from queue.jobs where id = :id \g /dev/null
select is_empty('select * from queue.lock_member', 'no lock has a member left');
select queue.defer('t') as id \gset
select is(pg_temp.first_failure('{"reason": "memory", "priority": 3}'), 'failed', 'a reason of the handler''s');
select is(pg_temp.job(:id), 'failed memory 1 1 0', 'is the job''s when it has failed');
select is((select priority from queue.jobs where id = :id), 0, 'options for a retry change nothing then');
select queue.defer('t', options => '{"retry": {"max_attempts": 2}}') as id \gset
select is(pg_temp.first_failure('{"outcome": "timed_out"}'), 'ready', 'a timeout that the worker saw');
select is((select outcome from queue.attempts where job_id = :id), 'timed_out', 'has its name in the history');
select is(pg_temp.life(), 'failed', 'and counted as a failure');
select queue.defer('bad options', options => '{"retry": {"max_attempts": 2}}') as id \gset
select id, claim from queue.fetch(:worker) \gset
select is(test.refusal(format('select queue.fail(%s, %s, ''e'', null, %L)', :id, :claim, options)), '22023', 'no option of fail: ' || left(options, 60)) from (values
  ('1'), ('[]'), ('"x"'), ('{"retries": 1}'), ('{"retryable": "no"}'), ('{"retryable": 0}'), ('{"retry_at": "soon"}'), ('{"retry_at": "infinity"}'), ('{"retry_at": "-infinity"}'), ('{"retry_at": 1}'), ('{"retry_at": 20300101}'),
  ('{"retry_in": "soon"}'), ('{"retry_in": -1}'), ('{"retry_in": "-1 s"}'), ('{"retry_in": "20000 years"}'), ('{"retry_in": []}'), ('{"retry_in": 1, "retry_at": "2030-01-01"}'),
  ('{"retryable": false, "retry_in": 1}'), ('{"priority": "high"}'), ('{"priority": 1.5}'), ('{"priority": 3000000000}'), ('{"queue": 1}'), ('{"queue": ""}'), ('{"queue": "x*"}'),
  (jsonb_build_object('queue', repeat('x', 1001))::text), ('{"lock": 1}'), (jsonb_build_object('lock', repeat('x', 1001))::text), ('{"reason": 1}'), ('{"outcome": "crashed"}'), ('{"outcome": "succeeded"}'), ('{"outcome": 1}')) v (options);
select is((select state from queue.jobs where id = :id), 'running', 'none of which has ended the claim');
select is(queue.fail(:id, :claim, 'e', null, '{"retryable": null, "retry_at": null, "retry_in": null, "priority": null, "queue": null, "lock": null, "reason": null, "outcome": null}'), 'ready', 'null is not given');
select id, claim from queue.fetch(:worker) \gset
select results_eq(format('select queue, priority, lock collate "default" from queue.jobs where id = %s', :id), $$values ('default', 0, null::text)$$, 'and changes nothing');
select queue.succeed(:id, :claim) \g /dev/null

-- Slots held under the old names are released under these
select queue.configure_queue('narrow', '{"max_running": 1}');
select queue.configure_queue('narrow too', '{"max_running": 1}');
select queue.defer('t', queue => 'narrow', lock => 'm1', concurrency_key => 'k', concurrency_limit => 1, options => '{"lock_mode": "mutex", "retry": {"max_attempts": 9}}') as id \gset
select id, claim from queue.fetch(:worker) \gset
select is(queue.fail(:id, :claim, 'e', null, '{"queue": "narrow too", "lock": "m2"}'), 'ready', 'a job with a mutex lock, a key and a full queue goes elsewhere');
select queue.tick() \g /dev/null
select is_empty('select * from queue.check()', 'every slot was released where it was taken');
select queue.defer('t', queue => 'narrow', lock => 'm1', options => '{"lock_mode": "mutex"}') as id2 \gset
select is((select count(*) from queue.fetch(:worker, null, 5)), 2::bigint, 'both queues and both locks are free again');
select is_empty('select * from queue.check()', 'as many are taken as there are claims');
select * from queue.finish_many((select jsonb_agg(jsonb_build_object('id', id, 'claim', claim, 'outcome', 'failed', 'error', 'e', 'options', '{"lock": "", "retry_in": 0}'::jsonb)) from queue.jobs where state = 'running')) \g /dev/null
select is((select count(*) from queue.fetch(:worker, null, 5)), 2::bigint, 'without a lock they do not wait for each other');
select is_empty('select * from queue.check()', 'and hold no lock''s slot');
select * from queue.finish_many((select jsonb_agg(jsonb_build_object('id', id, 'claim', claim, 'outcome', 'succeeded')) from queue.jobs where state = 'running')) \g /dev/null

-- A lock that is left passes to its next job; a lock that is joined keeps its order
select queue.defer('o1', lock => 'left', options => '{"retry": {"max_attempts": 9}}') as o1, queue.defer('o2', lock => 'left') as o2, queue.defer('o3', lock => 'joined') as o3 \gset
select claim from queue.fetch(:worker, null, 2, jsonb_build_object('ids', jsonb_build_array(:o1, :o3))) where id = :o1 \gset
select * from queue.finish_many(jsonb_build_array(jsonb_build_object('id', :o1, 'claim', :claim, 'outcome', 'failed', 'error', 'e', 'options', '{"lock": "joined"}'::jsonb))) \g /dev/null
select results_eq(format('select id from queue.fetch(%s, null, 5) order by id', :worker), format('values (%s::bigint)', :o2), 'the next of the old lock runs, of the new one another');
select is((select state || ' ' || reason from queue.jobs where id = :o1), 'blocked lock', 'for which the job waits');
select is_empty('select * from queue.check()', 'in order');
select * from queue.finish_many((select jsonb_agg(jsonb_build_object('id', id, 'claim', claim, 'outcome', 'succeeded')) from queue.jobs where state = 'running')) \g /dev/null
select results_eq(format('select id from queue.fetch(%s, null, 5) order by id', :worker), format('values (%s::bigint)', :o1), 'until it is its turn');
select queue.succeed(:o1, claim) from queue.jobs where id = :o1 \g /dev/null

-- A retry keeps its turn
select queue.defer('o1', lock => 'kept', options => '{"retry": {"max_attempts": 9, "base": 0}}') as o1, queue.defer('o2', lock => 'kept') as o2 \gset
select claim from queue.fetch(:worker, null, 5) \gset
select queue.fail(:o1, :claim, 'e', null, '{"retry_in": "1 hour"}') \g /dev/null
select is_empty(format('select id from queue.fetch(%s, null, 5)', :worker), 'while the first of a lock waits for its retry the next waits too');
select queue.cancel(:o1) \g /dev/null
select id, claim from queue.fetch(:worker, null, 5) \gset
select is(:id::bigint, :o2::bigint, 'cancelled, it lets it go');
select queue.succeed(:id, :claim) \g /dev/null

-- Attempts are counted to 32,767, and the job continues
select queue.defer('many', options => '{"retry": {"max_attempts": null}}') as id \gset
select id, claim from queue.fetch(:worker) \gset
select queue.fail(:id, :claim, 'e') \g /dev/null
update queue.job_override set attempts = 32766 where id = :id;
select claim, attempt from queue.fetch(:worker) \gset
select is(:attempt, 32767, 'the last attempt that is counted');
select is(queue.fail(:id, :claim, 'e'), 'ready', 'is not the last');
select claim, attempt from queue.fetch(:worker) \gset
select is(:attempt, 32767, 'the next one has the same number');
select queue.release(:id, :claim) \g /dev/null
select claim, attempt from queue.fetch(:worker) \gset
select queue.succeed(:id, :claim) \g /dev/null
select is((select state from queue.jobs where id = :id), 'succeeded', 'and ends as any other');

-- Size limits
select queue.defer('large') \g /dev/null
select id, claim from queue.fetch(:worker) \gset
select queue.fail(:id, :claim, repeat('ä', 20000), jsonb_build_object('a', repeat('x', 200000))) \g /dev/null
select results_eq(format('select length(error), error ~ ''^ä+$'', details ->> ''truncated'', length(details ->> ''begins'') from queue.attempts where job_id = %s', :id),
                  $$values (10000, true, '200009', 10000)$$, 'an error is kept up to 10,000 characters, details up to 100 kB');
select is((select length(error) from queue.jobs where id = :id), 10000, 'the job''s too');
select queue.defer('large') \g /dev/null
select id, claim from queue.fetch(:worker) \gset
select queue.fail(:id, :claim, 'e', jsonb_build_object('a', repeat('x', 99990 - 9))) \g /dev/null
select is((select length(details ->> 'a') from queue.attempts where job_id = :id), 99981, 'smaller values are kept unchanged');
select queue.defer('large') \g /dev/null
select id, claim from queue.fetch(:worker) \gset
select queue.retry_later(:id, :claim, message => repeat('x', 20000)) \g /dev/null
select is((select length(error) from queue.attempts where job_id = :id), 10000, 'a message too');
select id, claim from queue.fetch(:worker) \gset
select queue.succeed(:id, :claim) \g /dev/null

-- A job that was rescheduled to a time before its own keeps that time when it yields.
select queue.defer('early', scheduled_at => '2999-01-01Z') as id \gset
select queue.reschedule(:id) \g /dev/null
select f.claim from queue.fetch(:worker) f where f.id = :id \gset
select is(queue.retry_later(:id, :claim), 'ready', 'one that was rescheduled and yields');
select is((select row (f.id, f.attempt)::text from queue.fetch(:worker) f), format('(%s,2)', :id), 'runs again at once');

-- attempts_left, for handlers
select queue.defer('left', options => '{"retry": {"max_attempts": 2}}') as id \gset
select claim from queue.fetch(:worker) \gset
select is(queue.attempts_left(:id, :claim)::text, '(2,0,f)', 'the first of two');
select queue.fail(:id, :claim, 'x') \g /dev/null
select throws_ok(format('select queue.attempts_left(%s, %s)', :id, :claim), 'QJ002', null, 'not after the claim');
select claim from queue.fetch(:worker) \gset
select is(queue.attempts_left(:id, :claim)::text, '(2,1,t)', 'the last');
select queue.succeed(:id, :claim) \g /dev/null
select queue.defer('left') as id \gset
select claim from queue.fetch(:worker) \gset
select is(queue.attempts_left(:id, :claim)::text, '(1,0,t)', 'without a policy there is one');
select queue.succeed(:id, :claim) \g /dev/null
select queue.register_task('left', '{"retry": {"max_attempts": null}}') \g /dev/null
select queue.defer('left') as id \gset
select claim from queue.fetch(:worker) \gset
select is(queue.attempts_left(:id, :claim)::text, '(,0,f)', 'a registered one, without a limit');
select queue.succeed(:id, :claim) \g /dev/null
select throws_ok('select queue.attempts_left(0, 0)', 'QJ001', null, 'no such job');

-- attempt_outcome, for the worker whose handler has ended its claim
select queue.defer('slept') as id \gset
select claim from queue.fetch(:worker) \gset
select is(queue.attempt_outcome(:id, :claim), null, 'it has not ended');
select is((select queue.attempt_outcome(:id, :claim) from (select queue.sleep(:id, :claim, 'nap', now())) s), 'yielded', 'the same statement sees it');
select claim from queue.fetch(:worker) \gset
select queue.cancel(:id, abort => true) \g /dev/null
select is((select queue.attempt_outcome(:id, :claim) from (select queue.wait(:id, :claim, 'w', signal => 's')) s), 'aborted', 'a job that was told to abort has not slept');
select queue.defer('slept') as id \gset
select claim from queue.fetch(:worker) \gset
select is((select queue.attempt_outcome(:id, :claim) from (select queue.fail_step(:id, :claim, 'a', 'late', options => '{"retry": {"max_attempts": 2}, "outcome": "timed_out"}')) s), 'timed_out', 'a step that was too late');
select claim from queue.fetch(:worker) \gset
select queue.succeed(:id, :claim) \g /dev/null
select is(queue.attempt_outcome(:id, :claim), null, 'a success is no attempt there');
select * from finish();
