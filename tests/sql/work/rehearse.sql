-- Rehearsing: one transaction defers, admits, fetches and finishes, and is rolled back.

select plan(34);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
select queue.register_task('flaky', '{"retry": {"max_attempts": 2}}') \g /dev/null

-- The claims of a worker, and their outcomes.
create function pg_temp.run(worker bigint, outcome text default 'succeeded') returns text language plpgsql as $$
declare
  v_job record;
  v_state text;
begin
  perform queue.rehearse();
  select f.id, f.claim, f.task into v_job from queue.fetch(worker) f;
  if not found then
    return 'nothing';
  end if;
  select f.state into v_state from queue.finish_many(jsonb_build_array(
    jsonb_build_object('id', v_job.id, 'claim', v_job.claim, 'outcome', outcome))) f;
  return v_job.task || ' ' || v_state;
end $$;

-- Operators' views count each job once.
begin;
select queue.defer('first') \g /dev/null
select is((select q.ready from queue.queues q), 1::bigint, 'a job that is not admitted yet');
select queue.rehearse() \g /dev/null
select queue.defer('second') \g /dev/null
select is((select q.ready from queue.queues q), 2::bigint, 'one that is, and one that is not');
rollback;

begin;
select queue.defer('durable') as durable \gset
select queue.rehearse() \g /dev/null
select queue.wait(:durable, (select claim from queue.fetch(:worker)), 'a', signal => 'go') \g /dev/null
select is(pg_temp.run(:worker), 'nothing', 'a job waits for a signal');
select queue.signal(:durable, 'go') \g /dev/null
select queue.rehearse() \g /dev/null
select queue.wait(:durable, (select claim from queue.fetch(:worker)), 'b', event => 'open') \g /dev/null
select is(pg_temp.run(:worker), 'nothing', 'takes it, and waits for an event');
select queue.publish('open', '{"by": "Ann"}') \g /dev/null
select is(pg_temp.run(:worker), 'durable succeeded', 'and takes that');
select is((select value ->> 'by' from queue.steps where job_id = :durable and name = 'b'), 'Ann', 'with its payload');
select is_empty('select * from queue.check()', 'all is sound');
rollback;

begin;
select queue.defer('plain') as plain \gset
select is((select count(*) from queue.fetch(:worker)), 0::bigint, 'without it a transaction fetches none of its own jobs');
select is(queue.rehearse(), 1, 'it admits what was deferred');
select is(queue.rehearse(), 0, 'once');
select is(pg_temp.run(:worker), 'plain succeeded', 'which is fetched and finished');
select is(pg_temp.run(:worker), 'nothing', 'once');
select is((select state from queue.jobs where id = :plain), 'succeeded', 'and has ended');

select queue.defer('first', lock => 'l') \g /dev/null
select queue.defer('second', lock => 'l') \g /dev/null
select queue.rehearse() \g /dev/null
select is((select array_agg(task) from queue.fetch(:worker, max_jobs => 5)), '{first}'::text[], 'locks hold');
select queue.release(id, claim) from queue.jobs where task = 'first' \g /dev/null
select is(pg_temp.run(:worker), 'first succeeded', 'a released job comes again');
select is(pg_temp.run(:worker), 'second succeeded', 'then comes its turn');

select queue.defer('need') as need \gset
select queue.defer('dependent', needs => array[:need]) \g /dev/null
select is(pg_temp.run(:worker), 'need succeeded', 'needs come first');
select is(pg_temp.run(:worker), 'dependent succeeded', 'then what needs them');

select queue.defer('flaky') \g /dev/null
select is(pg_temp.run(:worker, 'failed'), 'flaky ready', 'a retry');
select is(pg_temp.run(:worker, 'failed'), 'flaky failed', 'is the last one');

select queue.defer('later', options => '{"delay": "1 hour"}') as later \gset
select is(pg_temp.run(:worker), 'nothing', 'one that is scheduled waits');
select is(queue.reschedule(:later, now()), 'ready', 'and can be rescheduled');
select is(pg_temp.run(:worker), 'later succeeded', 'when it runs');

-- ended in the handler's transaction
select queue.defer('a', lock => 'm') \g /dev/null
select queue.defer('b', lock => 'm') \g /dev/null
select queue.rehearse() \g /dev/null
select id, claim from queue.fetch(:worker) \gset
select queue.succeed(:id, :claim);
select is(pg_temp.run(:worker), 'b succeeded', 'the settlement that succeed appends is settled');

select queue.defer('debounced', format('{"n": %s}', n)::jsonb, queueing_lock => 'q', options => '{"on_conflict": "replace"}')
from generate_series(1, 3) n \g /dev/null
select queue.rehearse() \g /dev/null
select is((select f.args::text from queue.fetch(:worker) f), '{"n": 3}', 'a job that was replaced twice runs once, with the last args');
select queue.defer('debounced', '{}', queueing_lock => 'r'), queue.rehearse() \g /dev/null
select queue.defer('debounced', '{"n": 5}', queueing_lock => 'r', options => '{"on_conflict": "replace"}') \g /dev/null
savepoint s;
select queue.defer('debounced', '{"n": 6}', queueing_lock => 'r', options => '{"on_conflict": "replace"}') \g /dev/null
rollback to savepoint s;
select queue.rehearse() \g /dev/null
select is((select f.args::text from queue.fetch(:worker) f), '{"n": 5}', 'also one that was admitted before');
select is(pg_temp.run(:worker), 'nothing', 'and neither runs again');

savepoint s;
select queue.defer('undone') \g /dev/null
select queue.rehearse() \g /dev/null
rollback to savepoint s;
select is(pg_temp.run(:worker), 'nothing', 'a savepoint takes it back');
select queue.defer('done') \g /dev/null
select is(pg_temp.run(:worker), 'done succeeded', 'and the rest continues');
select queue.rehearse() \g /dev/null
select is(current_setting('idle_in_transaction_session_timeout'), '0', 'the test may take its time');
select is_empty('select * from queue.check()', 'the queue is sound within');
rollback;

select is_empty('select * from queue.jobs', 'nothing is left');
select throws_ok($$
do $do$
begin
  perform queue.rehearse();
  set constraints all immediate;
end $do$ $$, '23505', 'duplicate key value violates unique constraint "rehearsal_is_never_committed_pkey"', 'a commit is refused');
select ok(not has_function_privilege('public', 'queue.rehearse()', 'execute'), 'nobody else may');
select * from finish();
