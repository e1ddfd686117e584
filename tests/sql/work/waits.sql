-- Sleeps and waits: the claim ends, and the job continues with a new one when its time or its signal has come.

select plan(126);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- State, reason, attempts, failures, claims, progress.
create function pg_temp.job(id bigint) returns text language sql as $$
  select concat_ws(' ', j.state, j.reason, j.attempts, j.failures, j.claims, j.progress) from queue.jobs j where j.id = job.id
$$;

-- Lets an hour pass for everything that waits for a time. Nothing else here depends on the clock.
create function pg_temp.pass() returns void language sql as $$
  update queue.waiting set at = at - interval '1 hour';
  update queue.suspended set until = until - interval '1 hour';
  update queue.job_override set scheduled_at = scheduled_at - interval '1 hour' where isfinite(scheduled_at);
  update queue.cursor set due_at = '-infinity';
$$;

-- The view shows a wait at once, before the claim is settled.
select queue.defer('t') as id \gset
select claim from queue.fetch(:worker) \gset
select queue.wait(:id, :claim, 'w', signal => 's') \g /dev/null
select is(pg_temp.job(:id), 'waiting signal 1 0 1 0', 'a job waits for a signal');
select is((select s.waiting from queue.stats() s where s.task = 't'), 1::bigint, 'the figures show it');
select queue.cancel(:id) \g /dev/null

-- Sleeping
select queue.defer('t', lock => 'l', concurrency_key => 'k', concurrency_limit => 1) as id \gset
select queue.defer('t', lock => 'l') as behind, queue.defer('t', concurrency_key => 'k', concurrency_limit => 1) as other \gset
select claim from queue.fetch(:worker) \gset
select lives_ok(format('select queue.sleep(%s, %s, ''nap'', now() + interval ''30 minutes'')', :id, :claim), 'a job goes to sleep');
select is(test.refusal(format('select queue.succeed(%s, %s)', :id, :claim)), 'QJ002', 'by which its claim ends');
select is(array(select id from queue.fetch(:worker, max_jobs => 5)), array[:other::bigint], 'its slot is free, and its turn at an ordered lock its own');
select is(pg_temp.job(:id), 'scheduled 1 0 1 0', 'it waits for its time; that is neither a failure nor progress');
select alike(queue.why(:behind), '%held by job ' || :id || ' (scheduled)%', 'the job behind it names it');
select is_empty('select * from queue.check()', 'all is sound');
select pg_temp.pass() \g /dev/null
select is_empty(format('select * from queue.fetch(%s)', :worker), 'when its time has come the slot is taken');
select queue.succeed(:other, (select claim from queue.jobs where id = :other)) \g /dev/null
select claim, attempt, steps ->> 'nap' as nap from queue.fetch(:worker) \gset
select is(:attempt, 2, 'it continues once that is free');
select ok((:'nap')::timestamptz > now(), 'with the time of its waking');
select lives_ok(format('select queue.sleep(%s, %s, ''nap#2'', now() - interval ''1 day'')', :id, :claim), 'a time that has passed');
select claim, (steps ->> 'nap#2')::timestamptz > now() - interval '1 minute' as is_now from queue.fetch(:worker) \gset
select ok(:'is_now', 'is now');
select is(test.refusal(format('select queue.sleep(%s, %s, ''nap'', now())', :id, :claim)), 'QJ003', 'a sleep that is over is not slept again');
select is(test.refusal(format('select queue.sleep(%s, %s, ''x'', ''infinity'')', :id, :claim)), '22023', 'nor forever');
select is(test.refusal(format('select queue.sleep(%s, %s, ''x'', null)', :id, :claim)), '22023', 'nor until nothing');
select is(test.refusal(format('select queue.sleep(%s, %s, ''nap'', now())', :id, :claim - 1)), 'QJ002', 'nor by an old claim');
select queue.succeed(:id, :claim) \g /dev/null
select id, claim from queue.fetch(:worker) \gset
select is(:id, :behind, 'the lock passes to the next');

-- A sleep that an operator ends early or late: its value is when it ended.
create function pg_temp.nap(worker bigint) returns void language sql as $$
  with f as materialized (select f.id, f.claim, queue.finish_step(f.id, f.claim, 'tells the future', to_jsonb(now() + interval '1 day')) from queue.fetch(worker) f)
  select queue.sleep(f.id, f.claim, 'nap', '2999-01-01') from f
$$;
-- The values of its steps: whether the one that is no sleep is kept, and how long the sleep took.
create function pg_temp.naps(id bigint) returns text language sql as $$
  select string_agg(case when s.name <> 'nap' then (s.value > to_jsonb(now()))::text
    when (s.value #>> '{}')::timestamptz <= now() then 'until now' else 'until ' || (s.value #>> '{}')::date end, ' ' order by s.name desc)
  from queue.steps s where s.job_id = naps.id
$$;
select queue.succeed(:id, :claim) \g /dev/null
select queue.defer('t') as id \gset
select pg_temp.nap(:worker) \g /dev/null
select is(pg_temp.naps(:id), 'true until 2999-01-01', 'a job sleeps long');
select alike(queue.why(:id), 'its time has not come: 2999-01-01%; it sleeps at its step nap', 'why says so');
select is(queue.reschedule(:id, '2998-01-01'), 'scheduled', 'an operator lets it end sooner');
select is(pg_temp.naps(:id), 'true until 2998-01-01', 'so its value is that time');
select alike(queue.why(:id), 'its time has not come: 2998-01-01%; it sleeps at its step nap', 'it still sleeps');
select is((select r.outcome from queue.retry(array[:id], changes => '{"retry_at": "2997-01-01"}') r), 'scheduled', 'by a retry at a time');
select is(pg_temp.naps(:id), 'true until 2997-01-01', 'too');
select is((select r.outcome from queue.retry(array[:id]) r), 'ready', 'or at once');
select is(pg_temp.naps(:id), 'true until now', 'then it has ended now');
select is(queue.reschedule(:id, '2999-01-01'), 'scheduled', 'a job whose sleep is over can still be given another time');
select is(pg_temp.naps(:id), 'true until now', 'which is not that of the sleep');
select alike(queue.why(:id), 'its time has not come: 2999-01-01%; its attempt 1 yielded', 'nor does it sleep');
select queue.defer('t') as other \gset
select pg_temp.nap(:worker) \g /dev/null
select is(queue.reschedule(:other), 'ready', 'NULL');
select is(pg_temp.naps(:other), 'true until now', 'is now as well');
select queue.fail(f.id, f.claim, 'no luck', null, '{"retryable": true, "retry_at": "2999-01-01"}') from queue.fetch(:worker) f \g /dev/null
select alike(queue.why(:other), 'its time has not come: 2999-01-01%; its attempt 2 failed: no luck', 'why tells a retry from a sleep');
select queue.defer('t') as over \gset
select claim from queue.fetch(:worker) \gset
select queue.sleep(:over, :claim, 'nap', now()) \g /dev/null
select is(queue.reschedule(:over, '2999-01-01'), 'scheduled', 'a sleep that is over, before a worker has continued the job,');
select is(pg_temp.naps(:over), 'until now', 'keeps its value');
-- A step whose value happens to be the time of a retry is no sleep.
select queue.defer('t') as id \gset
select claim from queue.fetch(:worker) \gset
select queue.finish_step(:id, :claim, 'when', '"2999-01-01T00:00:00+00:00"'), queue.retry_later(:id, :claim, '2999-01-01Z') \g /dev/null
select unalike(queue.why(:id), '%sleeps%', 'a step that has the time of a retry as its value is no sleep');
select is((select r.outcome from queue.retry(array[:id]) r), 'ready', 'an operator retries it');
select is((select s.value from queue.steps s where s.job_id = :id), '"2999-01-01T00:00:00+00:00"', 'and its value stays');
select queue.cancel(:id) \g /dev/null
-- The sleep of a job that has ended meanwhile
select queue.defer('t') as ended \gset
select pg_temp.nap(:worker), queue.cancel(:ended) \g /dev/null
select is((select r.outcome from queue.retry(array[:ended]) r), 'ready', 'a job that was cancelled in its sleep runs again');
select is(pg_temp.naps(:ended), 'true until now', 'and the sleep has ended with the retry');
select queue.cancel(:ended) \g /dev/null
select queue.defer('t', scheduled_at => '2999-01-01') as later \gset
select ok(queue.why(:later) !~ ';', 'and both from a job that has not started');
select queue.cancel(j.id) from queue.jobs j where j.finished_at is null and j.id <> :behind \g /dev/null
select queue.defer('t') as id \gset
select id, claim from queue.fetch(:worker) \gset

-- Waiting for a signal: before it comes, and after
select is(test.refusal(format('select queue.wait(%s, %s, ''w'')', :id, :claim)), '22023', 'a wait for nothing');
select is(test.refusal(format('select queue.wait(%s, %s, ''w'', ''s'', ''e'')', :id, :claim)), '22023', 'or for both');
select is(test.refusal(format('select queue.wait(%s, %s, ''w'', ''s'', timeout => ''-1 s'')', :id, :claim)), '22023', 'or for less than no time');
select is(test.refusal(format('select queue.wait(%s, %s, ''w'', '''')', :id, :claim)), '22023', 'or for no name');
select is(test.refusal('select * from queue.waits_for(999999)'), 'QJ001', 'no job waits for nothing');
select is_empty(format('select * from queue.waits_for(%s)', :id), 'it runs');
select lives_ok(format('select queue.wait(%s, %s, ''ask'', ''approved'')', :id, :claim), 'a job waits for a signal');
select is_empty(format('select * from queue.fetch(%s)', :worker), 'without one it does not continue');
select is(pg_temp.job(:id), 'waiting signal 1 0 1 0', 'it waits');
select is(queue.why(:id), 'at its step ask it waits for signal approved', 'for that');
select results_eq(format('select step, signal, event, until from queue.waits_for(%s)', :id), 'values (''ask'', ''approved'', null::text, null::timestamptz)', 'in columns');
select is(array(select s.id from queue.search(state => 'waiting') s), array[:id::bigint], 'a search finds it');
select is_empty(format('select * from queue.steps where job_id = %s', :id), 'its step is not finished');
select lives_ok(format('select queue.signal(%s, ''other'', ''0'')', :id), 'another signal');
select is_empty(format('select * from queue.fetch(%s)', :worker), 'is not what it waits for');
select lives_ok(format('select queue.signal(%s, ''approved'', ''{"by": "a"}''), queue.signal(%s, ''approved'', ''{"by": "b"}'')', :id, :id), 'two come');
select claim, steps::text as steps from queue.fetch(:worker) \gset
select is(:'steps'::jsonb, '{"ask": {"by": "a"}}', 'it continues with the first');
select lives_ok(format('select queue.wait(%s, %s, ''ask#2'', ''approved'', timeout => ''1 hour'')', :id, :claim), 'and waits for another');
select is((select step from queue.waits_for(:id)), 'ask#2', 'with its number');
select claim, steps::text as steps from queue.fetch(:worker) \gset
select is(:'steps'::jsonb, '{"ask": {"by": "a"}, "ask#2": {"by": "b"}}', 'which is there');
select is((select count(*) from queue.received_signal where name = 'approved'), 0::bigint, 'each was delivered once');
select is_empty('select * from queue.check()', 'all is sound');

-- A timeout
select queue.wait(:id, :claim, 'late', 'never', timeout => '30 minutes') \g /dev/null
select ok((select step = 'late' and signal = 'never' and until > now() from queue.waits_for(:id)), 'it waits until the timeout');
select is_empty(format('select * from queue.fetch(%s)', :worker), 'a wait with a timeout');
select alike(queue.why(:id), '%signal never until%', 'of which why tells');
select pg_temp.pass() \g /dev/null
select claim, steps -> 'late' = 'null' as is_null from queue.fetch(:worker) \gset
select ok(:'is_null', 'ends by it with null');
select queue.signal(:id, 'never', '1') \g /dev/null
select queue.wait(:id, :claim, 'late#2', 'never') \g /dev/null
select claim, steps -> 'late#2' as late from queue.fetch(:worker) \gset
select is(:'late'::jsonb, '1', 'a later signal is for the next wait');

-- Operators
select queue.wait(:id, :claim, 'held', 's') \g /dev/null
select is(queue.hold(:id), 'held', 'one that waits may be held');
select queue.signal(:id, 's', '"while held"') \g /dev/null
select is_empty(format('select * from queue.fetch(%s)', :worker), 'then a signal does not make it continue');
select is(queue.unhold(:id), 'ready', 'before it is unheld');
select claim, steps ->> 'held' as held from queue.fetch(:worker) \gset
select is(:'held'::text, 'while held', 'with the signal');
select queue.wait(:id, :claim, 'cancelled', 's') \g /dev/null
select is(queue.cancel(:id), 'cancelled', 'or cancelled');
select is_empty('select * from queue.suspended', 'then it waits no longer');
select queue.signal(:id, 's', '"after its end"') \g /dev/null
select is_empty(format('select * from queue.fetch(%s)', :worker), 'nor does it hear signals');
select is((select outcome from queue.retry(array[:id])), 'ready', 'retried');
select claim, steps ? 'cancelled' as is_there from queue.fetch(:worker) \gset
select ok(not :'is_there', 'it comes to its wait again');
select queue.wait(:id, :claim, 'cancelled', 's') \g /dev/null
select claim, steps ->> 'cancelled' as value from queue.fetch(:worker) \gset
select is(:'value'::text, 'after its end', 'and takes what has come');
select is_empty('select * from queue.check()', 'all is sound');
select is(queue.cancel(:id, abort => true), 'running', 'one that is told to abort');
select queue.wait(:id, :claim, 'aborted', 's') \g /dev/null
select matches(pg_temp.job(:id), '^cancelled aborted', 'ends instead of waiting');
select is_empty('select * from queue.suspended', 'and leaves nothing');

-- In the handler's own transaction
select queue.defer('t') as id \gset
select claim from queue.fetch(:worker) \gset
begin;
select queue.wait(:id, :claim, 'w', 's') \g /dev/null
rollback;
select is((select state from queue.jobs where id = :id), 'running', 'rolled back a wait is none');
begin;
select queue.wait(:id, :claim, 'w', 's') \g /dev/null
select queue.signal(:id, 's', '"own"') \g /dev/null
commit;
select claim, steps ->> 'w' as value from queue.fetch(:worker) \gset
select is(:'value'::text, 'own', 'committed with a signal to itself, it takes that');
begin isolation level repeatable read;
select is(test.refusal(format('select queue.wait(%s, %s, ''x'', ''s'')', :id, :claim)), 'QJ008', 'the wrong isolation level');
select is(test.refusal(format('select queue.sleep(%s, %s, ''x'', now())', :id, :claim)), 'QJ008', 'for a sleep too');
select lives_ok(format('select queue.signal(%s, ''s'')', :id), 'which a signal does not mind');
rollback;

-- Workers that sleep are told: both ask whether there are any, as defer does (work/worker_sleep.sql).
create function pg_temp.asks() returns bigint language sql as $$
  select count(*) from pg_locks l
  where l.locktype = 'advisory' and l.pid = pg_backend_pid() and l.classid = 1885824102 and l.objid = 1
$$;
begin;
select queue.signal(:id, 's') \g /dev/null
select is(pg_temp.asks(), 1::bigint, 'a signal wakes who sleeps');
rollback;
begin;
select queue.publish('e') \g /dev/null
select is(pg_temp.asks(), 1::bigint, 'an event too');
rollback;
select queue.succeed(:id, :claim) \g /dev/null

-- Events
select queue.defer('t') as one, queue.defer('t') as two, queue.defer('t') as three \gset
select queue.wait(f.id, f.claim, 'w', event => 'ready ' || case f.id when :three then 'never' else 'now' end, timeout => '1 day') from queue.fetch(:worker, max_jobs => 3) f \g /dev/null
select is(queue.publish('ready now', '{"n": 1}'), true, 'an event is published');
select is(queue.publish('ready now', '{"n": 2}'), false, 'the first stands');
select results_eq(format('select id, steps from queue.fetch(%s, max_jobs => 5)', :worker), format('values (%s::bigint, ''{"w": {"n": 1}}''::jsonb), (%s, ''{"w": {"n": 1}}'')', :one, :two), 'all that wait for it continue with it');
select queue.wait(:one, (select claim from queue.jobs where id = :one), 'w#2', event => 'ready now') \g /dev/null
select results_eq(format('select id, steps -> ''w#2'' from queue.fetch(%s, max_jobs => 5)', :worker), format('values (%s::bigint, ''{"n": 1}''::jsonb)', :one), 'those who come later too');
select queue.wait(:two, (select claim from queue.jobs where id = :two), 'gone', event => 'soon gone') \g /dev/null
select is_empty(format('select * from queue.fetch(%s)', :worker), 'none of these is there');
select is(queue.publish('soon gone', retain => '0'), true, 'an event that is not kept');
select results_eq(format('select id, steps -> ''gone'' from queue.fetch(%s)', :worker), format('values (%s::bigint, ''{}''::jsonb)', :two), 'is given to who waits for it');
select is(queue.publish('soon gone', '{"n": 2}', '0'), true, 'does not stand');
select queue.tick() \g /dev/null
select queue.wait(:two, (select claim from queue.jobs where id = :two), 'gone#2', event => 'soon gone') \g /dev/null
select is_empty(format('select * from queue.fetch(%s)', :worker), 'nor is it for those who come later');
select queue.cancel(:two) \g /dev/null
select queue.prune() \g /dev/null
select is((select string_agg(distinct name, ', ') from queue.event), 'ready now', 'and is forgotten');
select queue.wait(:one, (select claim from queue.jobs where id = :one), 'while held', event => 'brief') \g /dev/null
select queue.hold(:one) \g /dev/null
select queue.publish('brief', '"b"', '0') \g /dev/null
select queue.tick() \g /dev/null
select is((select value from queue.steps where job_id = :one and name = 'while held'), '"b"', 'a job that waits for it gets it even if it is held');
select is(queue.unhold(:one), 'ready', 'and continues later');
select is_empty('select * from queue.check()', 'all is sound');
select steps -> 'while held' as held from queue.fetch(:worker) \gset
select is(:'held'::jsonb, '"b"', 'with the payload');
select is(test.refusal('select queue.publish('''')'), '22023', 'an event without a name');
select is(test.refusal('select queue.signal(999999, ''s'')'), 'QJ001', 'a signal to no job');

-- Other jobs, on the same queue, however they end
select queue.finish_many(jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'succeeded'))) from queue.jobs j where j.state = 'running' \g /dev/null
select queue.cancel(:three) \g /dev/null
select queue.defer('parent', options => '{"needs_mode": "any"}') as any, queue.defer('parent') as parent \gset
select queue.defer('c') as good, queue.defer('c') as bad, queue.defer('c', options => '{"held": true}') as held \gset
select queue.await_jobs(f.id, f.claim, 'children', array[:good, :bad, :held]::bigint[]) from queue.fetch(:worker, max_jobs => 2) f \g /dev/null
select is(array(select id from queue.fetch(:worker, max_jobs => 9) order by id), array[:good, :bad]::bigint[], 'those that a job awaits run');
select is(pg_temp.job(:parent), 'waiting 1 0 1 0', 'while it waits, which is no progress');
select alike(queue.why(:parent), 'it needs job ' || :good || '%', 'for them');
select queue.succeed(:good, (select claim from queue.jobs where id = :good), '"fine"') \g /dev/null
select queue.fail(:bad, (select claim from queue.jobs where id = :bad), 'no') \g /dev/null
select is_empty(format('select * from queue.fetch(%s)', :worker), 'one that is held has not ended');
select is_empty('select * from queue.check()', 'all is sound');
select queue.unhold(:held) \g /dev/null
select queue.cancel(:held) \g /dev/null
select is(array(select f.id from queue.fetch(:worker, max_jobs => 9) f where f.steps ? 'children' order by 1), array[:any, :parent]::bigint[], 'when all have ended it continues, however they did');
select results_eq(format('select need_id, state, result, error from queue.needs(%s)', :parent),
                  format('values (%s::bigint, ''succeeded''::text, ''"fine"''::jsonb, null::text), (%s, ''failed'', null, ''no''), (%s, ''cancelled'', null, null)', :good, :bad, :held), 'and finds what became of them');
select queue.await_jobs(:parent, (select claim from queue.jobs where id = :parent), 'again', array[:good]) \g /dev/null
select claim from queue.fetch(:worker) \gset
select is(pg_temp.job(:parent), 'running 3 0 3 0', 'of one that has ended before it continues at once');
select is(test.refusal(format('select queue.await_jobs(%s, %s, ''x'', ''{}'')', :parent, :claim)), '22023', 'nothing to await');
select is(test.refusal(format('select queue.await_jobs(%s, %s, ''x'', array[999999])', :parent, :claim)), 'QJ001', 'no such job');
select is(test.refusal(format('select queue.await_jobs(%s, %s, ''x'', array[%s])', :parent, :claim, :parent)), 'QJ005', 'itself');
select queue.defer('needing', needs => array[:parent]) as needing \gset
select is(test.refusal(format('select queue.await_jobs(%s, %s, ''x'', array[%s])', :parent, :claim, :needing)), 'QJ005', 'or one that needs it');

-- One that has ended may be awaited as long as it exists, whatever its retention; a need under any, too.
select queue.configure_queue('brief', '{"retain": "0"}'), queue.defer('c', queue => 'brief') as brief \gset
select queue.succeed(:brief, (select claim from queue.fetch(:worker, '{brief}'))) \g /dev/null
select lives_ok(format('select queue.await_jobs(%s, %s, ''brief'', array[%s])', :parent, :claim, :brief), 'one that is not kept any longer');
select claim from queue.fetch(:worker) \gset
select queue.defer('a') as a, queue.defer('b') as b \gset
select queue.defer('needing', needs => array[:a, :b], options => '{"needs_mode": "any"}') as needing \gset
create function pg_temp.claim(worker bigint, job bigint) returns bigint language sql as $$
  select f.claim from queue.fetch(worker, options => jsonb_build_object('ids', array[job])) f
$$;
select queue.succeed(:a, pg_temp.claim(:worker, :a)) \g /dev/null
select queue.await_jobs(:needing, pg_temp.claim(:worker, :needing), 'b', array[:b]) \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.job(:needing), 'waiting 1 0 1 0', 'a need that did not hold the job holds it when awaited');
select queue.fail(:b, pg_temp.claim(:worker, :b), 'no') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.job(:needing), 'ready 1 0 1 0', 'until it has ended');

select is(queue.retry_later(:parent, :claim), 'ready', 'after a later yield the awaited jobs no longer matter');
select is(pg_temp.job(:parent), 'ready 4 0 4 1', 'and the one that failed does not block it');
select queue.delete(array(select id from queue.jobs), true) \g /dev/null
select is((select count(*) from (select from queue.step union all select from queue.suspended union all select from queue.received_signal) x), 0::bigint, 'deleted jobs leave nothing');

-- More jobs wait for one event than one admission lets go: it is kept for the rest, though it has expired.
select queue.defer_many((select jsonb_agg('{"task": "many"}'::jsonb) from generate_series(1, 501))) \g /dev/null
select queue.tick() \g /dev/null
select queue.wait(f.id, f.claim, 'w', event => 'for many') from queue.fetch(:worker, max_jobs => 501) f \g /dev/null
select queue.tick() \g /dev/null
select queue.publish('for many', '1', '0') \g /dev/null
select queue.tick() \g /dev/null
select queue._prune_events(10, 'infinity') \g /dev/null
select queue.tick() from generate_series(1, 2) \g /dev/null
select is((select count(*) from queue.jobs where state = 'ready'), 501::bigint, 'an event reaches all who wait for it');
select is((select count(*) from queue.step where value = '1'), 501::bigint, 'with its payload');
select is_empty('select * from queue.check()', 'all is sound');

select * from finish();
