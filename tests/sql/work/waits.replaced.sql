-- A replacement of a job that sleeps ends the sleep, whose value is then that time, in all later runs.

select plan(14);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- Defers the job of the key, or replaces it.
create function pg_temp.defer(at timestamptz default null) returns bigint language sql as $$
  select queue.defer('t', queueing_lock => 'Q', scheduled_at => at,
    options => '{"unique_until": "finish", "on_conflict": "replace", "retry": {"max_attempts": 9, "base": "10 minutes"}}')
$$;
create function pg_temp.nap(id bigint) returns timestamptz language sql as $$
  select (s.value #>> '{}')::timestamptz from queue.steps s where s.job_id = nap.id and s.name = 'nap'
$$;

select pg_temp.defer() as id \gset
select claim from queue.fetch(:worker) \gset
select queue.sleep(:id, :claim, 'nap', now() + interval '1 hour') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.defer('2999-01-01Z'), :id::bigint, 'a job that sleeps is replaced by one for a later time');
select queue.tick() \g /dev/null
select is(pg_temp.nap(:id), '2999-01-01Z', 'at which its sleep will end');
select alike(queue.why(:id), 'its time has not come: 2999-01-01%; it sleeps at its step nap', 'why says so');
select is(pg_temp.defer(), :id::bigint, 'then by one for now');
select claim, (steps ->> 'nap')::timestamptz as nap from queue.fetch(:worker) \gset
select ok((:'nap')::timestamptz between now() - interval '1 minute' and clock_timestamp(), 'so it has ended now');
begin;
update queue.step set value = '"2998-01-01T00:00:00Z"' where job_id = :id;
select queue._change_sleep(array[:id], '2997-01-01Z') \g /dev/null
select is(pg_temp.nap(:id), '2998-01-01Z', 'a run has seen its value, which stays');
rollback;
select queue.fail(:id, :claim, 'no luck') \g /dev/null
select alike(queue.why(:id), '%; its attempt 2 failed: no luck', 'after a failure it does not sleep');
select is((select r.outcome from queue.retry(array[:id]) r), 'ready', 'an operator retries it');
select claim, (steps ->> 'nap')::timestamptz as again from queue.fetch(:worker) \gset
select is((:'again')::timestamptz, (:'nap')::timestamptz, 'and its value is what it was');

-- Even if the clock goes back to before the end of a sleep, a value that a run has seen stays.
update queue.step set value = '"2998-01-01T00:00:00Z"' where job_id = :id;
select queue.fail(:id, :claim, 'no luck') \g /dev/null
select unalike(queue.why(:id), '%sleeps%', 'nor does why tell a sleep');
select is((select r.outcome from queue.retry(array[:id], changes => '{"retry_at": "2996-01-01"}') r), 'scheduled', 'a retry at a time');
select is(pg_temp.nap(:id), '2998-01-01Z', 'keep it');
select is(queue.reschedule(:id, '2995-01-01'), 'scheduled', 'and another time');
select is(pg_temp.nap(:id), '2998-01-01Z', 'too');

select * from finish();
