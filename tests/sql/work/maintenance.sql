-- tick: everything that is due, each duty separately; expires_at.

select plan(39);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

create function pg_temp.job(id bigint) returns text language sql as $$
  select concat_ws(' ', j.state, j.reason, j.attempts, j.failures) from queue.jobs j where j.id = job.id
$$;

-- Time passes for a job's expires_at.
create function pg_temp.expire(id bigint) returns void language sql as $$
  update queue.expiry e set at = clock_timestamp() where e.id = expire.id
$$;

select results_eq('select admitted, reaped, pruned, next_due from queue.tick()', 'values (0, 0, 0, null::timestamptz)', 'with nothing to do tick does nothing');
begin isolation level repeatable read;
select throws_ok('select * from queue.tick()', 'QJ008', 'wrong isolation level', 'it wants READ COMMITTED');
rollback;

-- Admission
select queue.defer('t', scheduled_at => now() + interval '1 hour') as later, queue.defer('t', lock => 'l') as first, queue.defer('t', lock => 'l') as second \gset
select results_eq('select admitted, next_due > now() + interval ''59 minutes'' from queue.tick()', 'values (3, true)', 'it admits new jobs, and says when more is due');
select results_eq(format('select id, task from queue.peek()'), format('values (%s::bigint, ''t'')', :first), 'a job is ready without any fetch');
update queue.waiting set at = now() where id = :later;
update queue.log set job_options.scheduled_at = now() where id = :later;
select queue.tick() \g /dev/null
select is((select count(*) from queue.peek()), 2::bigint, 'a time that has come');

-- Reaping, and everything that the crashed job held
select id, claim from queue.fetch(:worker) \gset
select queue.register_worker('victim', info => '{"dead_after": "1 day"}') as victim \gset
select queue.release(:id, :claim) \g /dev/null
select count(*) from queue.fetch(:victim, null, 5) \g /dev/null
update queue.worker set last_seen_at = last_seen_at - interval '1 hour', dead_after = '0' where id = :victim;
select results_eq('select admitted >= 0, reaped, next_due from queue.tick()', 'values (true, 2, null::timestamptz)', 'it reaps');
select queue.cancel(id) from queue.jobs where state in ('ready', 'blocked', 'scheduled') order by id \g /dev/null

-- next_due: leases, expiries, schedules
select queue.defer('leased') as id \gset
select id, claim from queue.fetch(:worker) \gset
select queue.extend(:id, :claim, '10 minutes') as lease_end \gset
select is((select next_due from queue.tick()), :'lease_end'::timestamptz, 'the end of a lease is when something is due');
select queue.succeed(:id, :claim) \g /dev/null

-- expires_at: never started after it
select queue.defer('e', options => '{"expires_at": "2999-01-01T00:00:00Z"}') as id \gset
select is((select next_due from queue.tick()), '2999-01-01T00:00:00Z'::timestamptz, 'so is expires_at');
select pg_temp.expire(:id);
select queue.tick() \g /dev/null
select is(pg_temp.job(:id), 'cancelled expired 0 0', 'a job that has not started by then is cancelled');
select is((select expires_at from queue.jobs where id = :id), '2999-01-01T00:00:00Z'::timestamptz, 'it shows when it would have expired');
select is_empty('select * from queue.expiry', 'nothing is left to expire');
select queue.defer('e', options => jsonb_build_object('expires_at', now() - interval '1 s')) as id \gset
select is_empty(format('select * from queue.fetch(%s)', :worker), 'fetch starts no job after its expires_at');
select queue.tick() \g /dev/null
select is(pg_temp.job(:id), 'cancelled expired 0 0', 'though no tick came before it');
-- wherever it waits; locks and slots are passed on
select queue.defer('e', lock => 'l', concurrency_key => 'k', concurrency_limit => 1, options => '{"expires_at": "2999-01-01T00:00:00Z"}') as ready,
  queue.defer('e', lock => 'l', concurrency_key => 'k', concurrency_limit => 1, options => '{"expires_at": "2999-01-01T00:00:00Z"}') as behind,
  queue.defer('e', lock => 'l', concurrency_key => 'k', concurrency_limit => 1) as last \gset
select queue.defer('e', scheduled_at => '2998-01-01', options => '{"expires_at": "2999-01-01T00:00:00Z"}') as scheduled,
  queue.defer('e', needs => array[:last], options => '{"expires_at": "2999-01-01T00:00:00Z"}') as waiting,
  queue.defer('e', options => '{"expires_at": "2999-01-01T00:00:00Z", "held": true}') as held,
  queue.defer('e', concurrency_key => 'k', concurrency_limit => 1, options => '{"expires_at": "2999-01-01T00:00:00Z"}') as slotless \gset
select queue.tick() \g /dev/null
select pg_temp.expire(id) from unnest(array[:ready, :behind, :scheduled, :waiting, :held, :slotless]) id \g /dev/null
select queue.tick() \g /dev/null
select is((select string_agg(distinct pg_temp.job(id), ', ') from unnest(array[:ready, :behind, :scheduled, :waiting, :held, :slotless]) id), 'cancelled expired 0 0', 'ready, blocked, scheduled, waiting, held');
select is(pg_temp.job(:last), 'ready 0 0', 'the next job gets what they held');
select is_empty('select * from queue.check()', 'everything is in order');
select id, claim from queue.fetch(:worker) \gset
select queue.succeed(:id, :claim) \g /dev/null
-- a running job continues; it is not run again
select queue.defer('e', options => '{"expires_at": "2999-01-01T00:00:00Z", "retry": {"max_attempts": 9}}') from generate_series(1, 6) \g /dev/null
select min(id) as e, max(claim) as claim from queue.fetch(:worker, null, 6) \gset
select pg_temp.expire(id) from queue.jobs where state = 'running' \g /dev/null
select is((select next_due from queue.tick()), null, 'that a running job expires is nothing that is due');
select is((select count(*) from queue.jobs where state = 'running'), 6::bigint, 'it runs on');
select results_eq(
  format($$select id - %1$s, state from queue.finish_many((select jsonb_agg(jsonb_build_object('id', %1$s + n, 'claim', %2$s, 'outcome', o)) from unnest('{succeeded,failed,retry_later,released,aborted}'::text[]) with ordinality u (o, m) cross join lateral (select m - 1) x (n))) order by id$$, :e, :claim),
  $$values (0::bigint, 'succeeded'), (1, 'cancelled'), (2, 'cancelled'), (3, 'cancelled'), (4, 'cancelled')$$, 'and may succeed; in any other case it is not run again');
select is((select string_agg(reason, ' ' order by id) from queue.jobs where id between :e + 1 and :e + 4), 'expired expired expired aborted', 'with that reason');
update queue.worker set last_seen_at = last_seen_at - interval '1 hour', dead_after = '0' where id = :worker;
select is((select reaped from queue.tick()), 1, 'nor when it crashes');
select is(pg_temp.job(:e + 5), 'cancelled expired 1 0', 'cancelled as well');
select is_empty('select * from queue.expiry', 'nothing is left to expire');
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
select queue.defer('e', options => '{"expires_at": "2999-01-01T00:00:00Z", "retry": {"max_attempts": 1}}') as id \gset
select id, claim from queue.fetch(:worker) \gset
select pg_temp.expire(:id);
select is(queue.fail(:id, :claim, 'e'), 'failed', 'its last failure is a failure, not an expiry');
-- running jobs, however many, do not keep others from expiring
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'e', 'queue', 'many', 'options', '{"expires_at": "2999-01-01T00:00:00Z"}'::jsonb)) from generate_series(1, 1000))) \g /dev/null
select queue.register_worker('many', info => '{"dead_after": "1 day"}') as many \gset
select count(*) from queue.fetch(:many, '{many}', 1000) \g /dev/null
select pg_temp.expire(id) from queue.jobs where queue = 'many' and state = 'running' \g /dev/null
select queue.defer('e', options => '{"expires_at": "2999-01-01T00:00:00Z"}') as id \gset
select queue.tick() \g /dev/null
select pg_temp.expire(:id);
select queue.tick() \g /dev/null
select results_eq(format('select (select count(*) from queue.jobs where queue = %L and state = %L), pg_temp.job(%s)', 'many', 'running', :id),
  $$values (1000::bigint, 'cancelled expired 0 0')$$, 'one expires behind a thousand that run');
select count(*) from queue.finish_many((select jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'succeeded')) from queue.jobs j where j.queue = 'many')) \g /dev/null
select queue.deregister_worker(:many) \g /dev/null

-- A retry that would come too late waits, and expires
select queue.defer('e', options => '{"expires_at": "2999-01-01T00:00:00Z", "retry": {"max_attempts": 9, "base": "1 hour"}}') as id \gset
select id, claim from queue.fetch(:worker) \gset
select is(queue.fail(:id, :claim, 'e'), 'scheduled', 'a retry before expires_at');
select queue.tick() \g /dev/null
select pg_temp.expire(:id);
select queue.tick() \g /dev/null
select is(pg_temp.job(:id), 'cancelled expired 1 1', 'expires when that has come');

-- An error in one duty undoes no other
create function public.refuse_finished() returns trigger language plpgsql as $$
begin
  if new.reason = 'expired' and exists (select from queue.job j where j.id = new.id and j.task = 'poisoned') then
    raise exception 'an audit trigger of the owner''s that fails';
  end if;
  return new;
end $$;
create trigger audit before insert on queue.finished for each row execute function public.refuse_finished();
select queue.defer('poisoned', options => '{"expires_at": "2999-01-01T00:00:00Z"}') as bad, queue.defer('e', options => '{"expires_at": "2999-01-01T00:00:00Z"}') as good,
  queue.defer('victim') as other \gset
select queue.register_worker('victim', info => '{"dead_after": "1 day"}') as victim \gset
select claim from queue.fetch(:victim, options => jsonb_build_object('ids', jsonb_build_array(:other))) \gset
update queue.worker set last_seen_at = last_seen_at - interval '1 hour', dead_after = '0' where id = :victim;
select pg_temp.expire(:bad);
select pg_temp.expire(:good);
set client_min_messages = error;
select is((select reaped from queue.tick()), 1, 'a poisoned expiry keeps no claim from being reaped');
reset client_min_messages;
select is(pg_temp.job(:good), 'cancelled expired 0 0', 'nor another from expiring');
select is(pg_temp.job(:bad), 'ready 0 0', 'it stays as it was');
select ok((select at > now() + interval '50 s' from queue.expiry where id = :bad), 'and is tried again in a minute');
drop trigger audit on queue.finished;
select queue.cancel(:bad), queue.cancel(:other) \g /dev/null
create function public.refuse_deletion() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$;
create trigger audit before delete on queue.finished for each row execute function public.refuse_deletion();
update queue.finished set finished_at = now() - interval '8 days' where state = 'succeeded';
set client_min_messages = error;
select is((select pruned from queue.tick()), 0, 'nothing is pruned while that fails');
reset client_min_messages;
drop trigger audit on queue.finished;
select cmp_ok((select pruned from queue.tick()), '>', 0, 'it prunes');

-- A backlog is admitted in slices, over several ticks if it is large
select queue.defer_many(jsonb_agg('{"task": "bulk"}'::jsonb)) from generate_series(1, 5000) \g /dev/null
select test.change('queue.tick', '_do_duties(interval ''1 s''', '_do_duties(interval ''1 hour''') \g /dev/null
select is((select admitted from queue.tick()), 5000, 'a tick admits all jobs, as far as it gets in a second');
select queue.finish_many((select jsonb_agg(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', 'succeeded')) from queue.fetch(:worker, null, 5000) f)) \g /dev/null
select is_empty('select * from queue.check()', 'everything is in order');

-- A pending settlement that the cursor has passed: repair appends it again, which tick does rarely
select queue.register_worker('orphan') as orphan \gset
select queue.defer('o', queue => 'orphan', lock => 'orphan') as first, queue.defer('o', queue => 'orphan', lock => 'orphan') as next \gset
select f.claim from queue.fetch(:orphan, '{orphan}') f \gset
select queue.succeed(:first, :claim) \g /dev/null
update queue.pending_settlement set xid = '3';
-- maintenance was just now, so that the next fetch leaves it
select set_config('pgdefer.maintained_at', extract(epoch from clock_timestamp())::text, false) \g /dev/null
select is((select count(*) from queue.fetch(:orphan, '{orphan}')), 0::bigint, 'nobody takes it');
select results_eq('select c.problem, c.id from queue.check() c', format('values (%L, %s::bigint)', 'a settlement that the cursor has passed', :first), 'check knows it');
do $$ begin perform queue._lock_admission(true), queue._repair_settlements(); end $$;
select is((select f.id from queue.fetch(:orphan, '{orphan}') f), :next::bigint, 'once repaired, the next of the lock goes');
select is_empty('select * from queue.check()', 'and it is sound');

select * from finish();
