-- What comes too late for a wait, or has gone before it, does not end it, also if no session ticks in between.

select plan(24);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

create function pg_temp.state(id bigint) returns text language sql as $$
  select concat_ws(' ', j.state, j.reason) from queue.jobs j where j.id = state.id
$$;
create function pg_temp.claim(id bigint) returns bigint language sql as $$select j.claim from queue.jobs j where j.id = claim.id$$;
-- The end of the timeout has come: nobody has looked since.
create function pg_temp.time_out(id bigint) returns void language sql as $$
  update queue.suspended set until = clock_timestamp() where job_id = time_out.id;
  update queue.waiting w set at = clock_timestamp() where w.id = time_out.id and w.reason = 'signal';
  update queue.cursor set due_at = '-infinity';
$$;

-- A signal after the timeout
select queue.defer('t') as id \gset
select queue.wait(f.id, f.claim, 'w', 's', timeout => '1 hour') from queue.fetch(:worker) f \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.time_out(:id), queue.signal(:id, 's', '"late"') \g /dev/null
select claim, steps::text as steps from queue.fetch(:worker) \gset
select is(:'steps'::jsonb, '{"w": null}', 'a signal that comes after the timeout does not end the wait');
select queue.wait(:id, :claim, 'w#2', 's') \g /dev/null
select claim, steps ->> 'w#2' as steps from queue.fetch(:worker) \gset
select is(:'steps'::text, 'late', 'it is there for the next one');

-- A signal before the timeout, and another after it
select queue.wait(:id, :claim, 'w#3', 's', timeout => '1 hour') \g /dev/null
select queue.tick() \g /dev/null
select queue.signal(:id, 's', '"in time"') \g /dev/null
select pg_temp.time_out(:id), queue.signal(:id, 's', '"late"') \g /dev/null
select claim, steps ->> 'w#3' as steps from queue.fetch(:worker) \gset
select is(:'steps'::text, 'in time', 'one that has come before ends it, though the timeout has passed');

-- The same at the gate itself, which such a job passes when it is unheld
select queue.wait(:id, :claim, 'w#4', 'x', timeout => '1 hour') \g /dev/null
select is(queue.hold(:id), 'held', 'a job that waits is held');
select pg_temp.time_out(:id), queue.signal(:id, 'x', '"late"') \g /dev/null
select is(queue.unhold(:id), 'ready', 'until after its timeout');
select claim, steps -> 'w#4' = 'null' as is_null from queue.fetch(:worker) \gset
select ok(:'is_null', 'a signal came later');
select queue.succeed(:id, :claim) \g /dev/null

-- Events
select queue.defer('t') as id, queue.defer('t') as held \gset
select queue.wait(f.id, f.claim, 'w', event => 'e', timeout => '1 hour') from queue.fetch(:worker, max_jobs => 2) f \g /dev/null
select queue.hold(:held) \g /dev/null
select pg_temp.time_out(:id), pg_temp.time_out(:held), queue.publish('e', '"late"') \g /dev/null
select queue.unhold(:held) \g /dev/null
select results_eq(format('select f.id, f.steps from queue.fetch(%s, max_jobs => 5) f', :worker), format('values (%s::bigint, ''{"w": null}''::jsonb), (%s, ''{"w": null}'')', :id, :held), 'an event after the timeout does not end the wait');
select queue.wait(:id, pg_temp.claim(:id), 'w#2', event => 'e') \g /dev/null
select is((select f.steps ->> 'w#2' from queue.fetch(:worker) f), 'late', 'but the next one');
select queue.wait(:id, pg_temp.claim(:id), 'w#3', event => 'f', timeout => '1 hour') \g /dev/null
select queue.tick() \g /dev/null
select queue.publish('f', '"in time"'), pg_temp.time_out(:id) \g /dev/null
select is((select f.steps ->> 'w#3' from queue.fetch(:worker) f), 'in time', 'one that was published before it does');
select queue.wait(:id, pg_temp.claim(:id), 'w#4', event => 'f', timeout => '0') \g /dev/null
select is((select f.steps ->> 'w#4' from queue.fetch(:worker) f), 'in time', 'also for a wait without patience');

-- An event that expired before the wait began, of which no session has heard until then
select queue.publish('brief', '"b"', '0') \g /dev/null
select pg_sleep(0.001) \g /dev/null
select queue.wait(:id, pg_temp.claim(:id), 'w#5', event => 'brief') \g /dev/null
select is_empty(format('select * from queue.fetch(%s)', :worker), 'an event that is kept no longer does not end a new wait');
select is(pg_temp.state(:id), 'waiting signal', 'which goes on');
select is(queue.publish('brief', '"c"'), true, 'until it is published again');
select is((select f.steps ->> 'w#5' from queue.fetch(:worker) f), 'c', 'then it ends');
select queue.wait(:id, pg_temp.claim(:id), 'w#6', event => 'gone') \g /dev/null
select queue.publish('gone', '"g"', '0') \g /dev/null
select pg_sleep(0.001) \g /dev/null
select is((select f.steps ->> 'w#6' from queue.fetch(:worker) f), 'g', 'one that expired after the wait began ends it');
select queue.wait(:id, pg_temp.claim(:id), 'w#7', event => 'moved') \g /dev/null
select queue.tick() \g /dev/null
delete from queue.attempt where job_id = :id;
select queue.publish('moved', '"m"', '0') \g /dev/null
select is((select f.steps ->> 'w#7' from queue.fetch(:worker) f), 'm', 'also for a job that came from another shard, without its attempts');
select queue.publish('short', '"b"', '1 hour') \g /dev/null
select queue.tick() \g /dev/null
select queue.wait(:id, pg_temp.claim(:id), 'w#8', event => 'short') \g /dev/null
update queue.event set expires_at = clock_timestamp() where name = 'short';
select is((select f.steps ->> 'w#8' from queue.fetch(:worker) f), 'b', 'one that expired between the wait and its admission ends it');

-- A wait that needs another job again when it comes back, and is not at its gate when the event expires
select queue.succeed(:id, pg_temp.claim(:id)) \g /dev/null
select queue.defer('need') as need \gset
select queue.succeed(f.id, f.claim) from queue.fetch(:worker) f \g /dev/null
select queue.defer('t', needs => array[:need]) as id \gset
select claim from queue.fetch(:worker) \gset
select queue.retry(array[:need], force => true), queue.publish('kept', '"k"', '1 hour') \g /dev/null
select queue.tick() \g /dev/null
select queue.wait(:id, :claim, 'w', event => 'kept') \g /dev/null
select queue.tick() \g /dev/null
update queue.event set expires_at = clock_timestamp() where name = 'kept';
select queue.prune() \g /dev/null
select is(pg_temp.state(:id), 'waiting', 'it waits for the job first');
select queue.succeed(f.id, f.claim) from queue.fetch(:worker) f \g /dev/null
select is((select f.steps ->> 'w' from queue.fetch(:worker) f), 'k', 'then it finds the event');
select queue.prune() \g /dev/null
select is((select count(*) from queue.event where name = 'kept'), 0::bigint, 'which is then forgotten');

-- An event of which no session has heard before the wait comes to its gate
select queue.succeed(:id, pg_temp.claim(:id)), queue.defer('t') as id \gset
select claim from queue.fetch(:worker) \gset
select queue.publish('both', '"x"') \g /dev/null
select queue.wait(:id, :claim, 'w', event => 'both', timeout => '0') \g /dev/null
select is((select f.steps ->> 'w' from queue.fetch(:worker) f), 'x', 'an event that comes with a wait without patience ends it');
select queue.succeed(:id, pg_temp.claim(:id)) \g /dev/null

-- More waits than admissions have ended when the event has expired and the next one comes
select count(queue.defer('many')) from generate_series(1, 1100) \g /dev/null
select count(queue.wait(f.id, f.claim, 'w', event => 'm')) from generate_series(1, 3) n, queue.fetch(:worker, max_jobs => 499 + n) f \g /dev/null
select queue.tick() \g /dev/null
select queue.publish('m', '1', '0') \g /dev/null
select queue.tick() \g /dev/null
select queue.publish('m', '2', '1 hour') \g /dev/null
select queue.tick(), queue.tick(), queue.tick() \g /dev/null
select results_eq($$select s.value::text, count(*) from queue.step s join queue.jobs j on j.id = s.job_id where j.task = 'many' group by 1$$, $$values ('1', 1100::bigint)$$, 'the expired one ends all that began before it expired');
select is((select e.payload::text from queue.event e where e.name = 'm' and e.is_standing), '2', 'and makes room for the next');
select is_empty('select * from queue.check()', 'all is sound');

select * from finish();
