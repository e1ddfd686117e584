-- check finds planted errors; why tells what a job waits for; peek shows the next jobs.

select plan(119);

set pgdefer.notify = off;

select queue.register_worker('w', info => '{"dead_after": "30 min"}') as worker \gset

-- One job of every kind; ids by their tasks.
select queue.defer('done') \g /dev/null
select queue.succeed(f.id, f.claim) from queue.fetch(:worker) f \g /dev/null
select queue.defer('runs', lock => 'l', priority => 100, concurrency_key => 'k', concurrency_limit => 1),
  queue.defer('has a lease', priority => 100, options => '{"timeout": "1 hour"}') \g /dev/null
select count(*) as running from queue.fetch(:worker, null, 2) \gset
select queue.defer('waits its turn', lock => 'l'), queue.defer('waits too', lock => 'l'), queue.defer('waits for a slot', concurrency_key => 'k', concurrency_limit => 1),
  queue.defer('ready'), queue.defer('ready with lock', lock => 'r'), queue.defer('ready with key', concurrency_key => 'f', concurrency_limit => 5),
  queue.defer('late', deadline => '2999-01-01Z', priority => 1), queue.defer('scheduled', scheduled_at => '2999-01-01Z'), queue.defer('held', options => '{"held": true}'),
  queue.defer('unique', queueing_lock => 'u'), queue.defer('paused', queue => 'p') \g /dev/null
select queue.defer('needs', needs => array[(select j.id from queue.jobs j where j.task = 'scheduled')]) \g /dev/null
select queue.pause('p') \g /dev/null
select queue.defer('not admitted') \g /dev/null
create function pg_temp.id(task text) returns bigint language sql as $$select j.id from queue.job j where j.task = id.task$$;

select is((select string_agg(format('%s %s', j.state, j.reason), ', ' order by j.id) from queue.jobs j),
          'succeeded , running , running , blocked lock, blocked lock, blocked limit, ready , ready , ready , ready , scheduled , held , ready , ready paused, waiting , ready ',
          'every job has its state');
select is_empty('select * from queue.check()', 'and every invariant holds');

-- Damage, the report of check, and the job it names
create function pg_temp.said() returns text language sql as $$
  select coalesce(string_agg(distinct c.problem || coalesce(': ' || j.task, ''), ', '), 'nothing') from queue.check() c left join queue.job j on j.id = c.id
$$;
create function pg_temp.found(statement text) returns text language plpgsql as $$
declare
  v_said text;
begin
  begin
    execute statement;
    v_said := pg_temp.said();
    raise exception using errcode = 'P0999';
  exception when sqlstate 'P0999' then
    return v_said;
  end;
end $$;

select matches(pg_temp.found(statement), expected, expected || ' <- ' || left(regexp_replace(statement, 'pg_temp\.id\(''([^'']*)''\)', '\1'), 90))
from (values
  ($$insert into queue.waiting (id, reason) values (pg_temp.id('ready'), 'held')$$, 'in two places: ready'),
  ($$insert into queue.finished (id, finished_at, attempts, state) values (pg_temp.id('runs'), now(), 1, 'failed')$$, 'in two places: runs'),
  ($$insert into queue.active_job (id, deadline, lane, attempt, flags) values (999999, 'infinity', 1, 0, 0)$$, 'no such job'),
  ($$insert into queue.finished (id, finished_at, attempts, state) values (999999, now(), 1, 'failed')$$, 'no such job'),
  ($$insert into queue.waiting (id, reason) values (999999, 'held')$$, 'no such job'),
  ($$insert into queue.lock_member (lock, id, is_mutex, is_late, is_passed, has_turn) values ('x', 999999, false, false, true, false)$$, 'no such job'),
  ($$insert into queue.queueing_lock (key, job_id) values ('x', 999999)$$, 'no such job'),
  ($$insert into queue.lease values (999999, 1, now(), true)$$, 'no such job'),
  ($$insert into queue.job_override (id) values (999999)$$, 'no such job'),
  ($$insert into queue.attempt values (999999, 1, 1, 1, now(), now(), 'failed')$$, 'no such job'),
  ($$delete from queue.job j where j.task = 'done'$$, 'no such job'),
  ($$delete from queue.active_job v where v.id = pg_temp.id('ready')$$, 'admitted, but in no table: ready'),
  ($$delete from queue.finished v where v.id = pg_temp.id('done')$$, 'admitted, but in no table: done'),
  ($$delete from queue.waiting v where v.id = pg_temp.id('scheduled')$$, 'admitted, but in no table: scheduled'),
  ($$delete from queue.lock_member m where m.id = pg_temp.id('waits its turn')$$, 'admitted, but in no table: waits its turn'),
  ($$update queue.lane set low_id = 1000000, low_deadline = 'infinity'$$, 'ready below the low mark: late'),
  ($$delete from queue.lane l where l.priority = 1$$, 'in a missing lane: late'),
  ($$update queue.lane l set priority = 2 where l.priority = 1$$, 'in the wrong lane for its queue and priority: late'),
  ($$update queue.active_job v set deadline = 'infinity' where v.id = pg_temp.id('late')$$, 'in the wrong lane for its queue and priority: late'),
  ($$update queue.job_override s set queue = 'x'; insert into queue.job_override (id, queue) values (pg_temp.id('ready'), 'x')$$, 'in the wrong lane for its queue and priority: ready'),
  ($$delete from queue.lock_member m where m.id = pg_temp.id('runs')$$, 'a job with a lock that it has not joined: runs'),
  ($$insert into queue.lock_member values ('l', pg_temp.id('done'), false, false, true, false)$$, 'finished, but still a member of a lock: done'),
  ($$insert into queue.active_job (id, deadline, lane, attempt, flags) select pg_temp.id('waits its turn'), 'infinity', v.lane, 0, 1 from queue.active_job v where v.id = pg_temp.id('ready')$$, 'a lock with more than one job at its turn: runs'),
  ($$insert into queue.active_job (id, deadline, lane, attempt, flags, claim, worker_id, claimed_at) select pg_temp.id('waits its turn'), 'infinity', v.lane, 0, 1, 99, 1, now() from queue.active_job v where v.id = pg_temp.id('ready')$$, 'a lock that runs two jobs: runs'),
  ($$delete from queue.lock_member m where m.id = pg_temp.id('runs')$$, 'a free lock with a job that waits for its turn: waits its turn'),
  ($$update queue.semaphore s set used = 2 where s.key = 'kk'$$, 'slots in use without a claim'),
  ($$update queue.semaphore s set used = 0 where s.key = 'kk'$$, 'slots in use without a claim'),
  ($$delete from queue.active_job v where v.id = pg_temp.id('runs')$$, 'slots in use without a claim'),
  ($$update queue.semaphore s set slots = 2 where s.key = 'kk'$$, 'a job waits although a slot is free'),
  ($$delete from queue.waiting w where w.id = pg_temp.id('waits for a slot')$$, 'counts of a key are wrong'),
  ($$update queue.semaphore s set ready = array_fill(0, array[cardinality(s.ready)]) where s.key = 'kf'$$, 'counts of a key are wrong'),
  ($$delete from queue.active_job v where v.id = pg_temp.id('ready with key')$$, 'counts of a key are wrong'),
  ($$delete from queue.waiting w where w.id = pg_temp.id('scheduled'); insert into queue.finished (id, finished_at, attempts, state) values (pg_temp.id('scheduled'), now(), 1, 'succeeded')$$, 'waits for needs although they do not hold it: needs'),
  ($$delete from queue.waiting w where w.id = pg_temp.id('scheduled'); insert into queue.finished (id, finished_at, attempts, state) values (pg_temp.id('scheduled'), now(), 1, 'failed')$$, 'waits for needs although they do not hold it: needs'),
  ($$update queue.active_job v set claim = 99, worker_id = 1, claimed_at = now() where v.id = pg_temp.id('unique')$$, 'a queueing lock whose job has started: unique'),
  ($$delete from queue.queueing_lock k where k.job_id = pg_temp.id('unique')$$, 'a job without its queueing lock: unique'),
  ($$update queue.queueing_lock k set job_id = pg_temp.id('done')$$, 'a queueing lock whose job has started: done'),
  ($$update queue.active_job v set worker_id = null where v.id = pg_temp.id('has a lease')$$, 'claimed without a worker: has a lease'),
  ($$insert into queue.pending_settlement (xid, job_id, kind, flags) values ('3', pg_temp.id('runs'), 'ended', 1)$$, 'a settlement that the cursor has passed: runs'),
  ($$delete from queue.admission$$, 'not one row'),
  ($$delete from queue.cursor$$, 'not one row'),
  ($$insert into queue.cursor select k.tick + 1, k.next_xid, k.in_flight, k.high_id, k.has_backlog, k.due_at from queue.cursor k$$, 'not one row'),
  ($$delete from queue.installation$$, 'not one row'),
  ($$delete from queue.horizon$$, 'not one row'),
  ($$insert into queue.access (role, kind, queues) values ('x', 'producer', '{q}')$$, 'restrictions that are not enforced')
) v (statement, expected);
select is_empty('select * from queue.check()', 'and nothing of it is left');

-- why
select matches(queue.why(pg_temp.id(task)), expected, task || ': ' || expected)
from (values
  ('done', '^it succeeded at '), ('runs', '^it has been running since .* on worker \d+, claim \d+$'), ('has a lease', '^it has been running since .* on worker \d+, claim \d+; its timeout ends at \d{4}-'), ('waits its turn', '^its lock l is held by job \d+ \(running\)$'),
  ('waits for a slot', '^its concurrency key k is full: job \d+$'), ('ready', '^it is ready'), ('scheduled', '^its time has not come: 2999-01-01'), ('held', '^it is held'),
  ('paused', '^its queue p is paused$'), ('needs', '^it needs job \d+ \(scheduled\)$'), ('not admitted', '^it has not been admitted yet')
) v (task, expected);
select is(queue.why(pg_temp.id('waits too')), queue.why(pg_temp.id('waits its turn')), 'every job of a lock waits for the one that has it');
select matches(queue.why(pg_temp.id('waits its turn')), format('job %s ', pg_temp.id('runs')), 'by its id');
select matches(queue.why(pg_temp.id('waits for a slot')), format('job %s$', pg_temp.id('runs')), 'jobs that fill a key too');
select matches(queue.why(pg_temp.id('needs')), format('job %s ', pg_temp.id('scheduled')), 'and what is needed');
begin;
select queue.fail(j.id, j.claim, 'again', options => '{"retry_in": 0}') from queue.jobs j where j.task = 'runs' \g /dev/null
select is(queue.why(pg_temp.id('runs')), 'its last run has just ended; the next fetch or tick admits it again', 'one that has failed and runs again at once');
select matches(queue.why(pg_temp.id('waits its turn')), '^its lock l is held by job \d+ \(ready\)$', 'still has its lock');
update queue.worker set last_seen_at = now() - interval '1 hour';
select is(queue.why(pg_temp.id('runs')), 'no live worker serves its queue default', 'and needs a worker');
rollback;
begin;
select queue.succeed(j.id, j.claim) from queue.jobs j where j.task = 'runs' \g /dev/null
select matches(queue.why(pg_temp.id('waits its turn')), '^its lock l is held by job \d+ \(succeeded\); the next fetch or tick passes it on$', 'one that has ended does not keep it');
rollback;
select queue.defer('extended') as extended \gset
select f.claim from queue.fetch((select max(w.id) from queue.workers w), options => jsonb_build_object('ids', jsonb_build_array(:extended))) f \gset
select queue.extend(:extended, :claim, interval '1 hour') as ends \gset
select is(queue.why(:extended), format('it has been running since %s on worker %s, claim %s; its lease ends at %s', j.started_at, j.worker_id, :claim, :'ends'), 'a lease of its own')
from queue.jobs j where j.id = :extended;
begin;
update queue.lease set expires_at = now() where id = :extended;
update queue.worker set last_seen_at = now() - interval '31 min', dead_after = '1 us';
select matches(queue.why(:extended), '; its lease ended at [^;]*: the next tick ends the claim$', 'or that it has ended, whatever the worker does');
delete from queue.lease where id = :extended;
select matches(queue.why(:extended), '; its worker was last seen at [^;]* and counts as dead: the next tick ends the claim$', 'a worker that is dead');
rollback;
select queue.succeed(:extended, :claim) \g /dev/null
select queue.pause('p', '2999-01-01Z') \g /dev/null
select matches(queue.why(pg_temp.id('paused')), '^its queue p is paused until 2999-01-01', 'a pause with an end');
select queue.resume('p') \g /dev/null
select queue.pause(task => 'ready') \g /dev/null
select matches(queue.why(pg_temp.id('ready')), '^its task ready is paused', 'a paused task');
select queue.resume(task => 'ready') \g /dev/null
select queue.configure_queue('default', '{"max_running": 1}') \g /dev/null
select matches(queue.why(pg_temp.id('ready')), 'its queue default has reached max_running 1', 'a queue''s limit');
select queue.configure_queue('default', '{"max_running": null}') \g /dev/null
select queue.cancel(pg_temp.id('held')) \g /dev/null
select matches(queue.why(pg_temp.id('held')), '^it was cancelled at ', 'a cancelled one');
update queue.worker set last_seen_at = now() - interval '1 hour';
select is(queue.why(pg_temp.id('ready')), 'no live worker serves its queue default', 'no worker');
update queue.worker set last_seen_at = now(), queues = '{other*}';
select is(queue.why(pg_temp.id('ready')), 'no live worker serves its queue default', 'none that serves the queue');
update queue.worker set queues = null;
select queue.pause('p') \g /dev/null
begin;
select queue.defer('new', queue => 'p') as new_p, queue.defer('new') as new \gset
select is(queue.why(:new_p), 'its queue p is paused', 'a job that is not admitted yet: its queue is paused');
update queue.worker set last_seen_at = now() - interval '1 hour';
select is(queue.why(:new), 'no live worker serves its queue default', 'nobody serves it');
rollback;
select queue.pause(task => 'new') \g /dev/null
begin;
select queue.defer('new') as new \gset
select is(queue.why(:new), 'its task new is paused', 'its task is paused');
rollback;
select queue.resume() \g /dev/null
select queue.defer('to abort') as id \gset
select claim from queue.fetch((select max(w.id) from queue.worker w), null, 1, jsonb_build_object('ids', jsonb_build_array(:id))) \gset
select queue.cancel(:id, abort => true) \g /dev/null
select matches(queue.why(:id), '; its worker has been told to abort it: cancelled$', 'one that is to be aborted');
select queue.fail(:id, :claim, 'aborted') \g /dev/null
select is(test.refusal('select queue.why(999999)'), 'QJ001', 'no such job');
select is(test.refusal('select queue.why(null)'), 'QJ001', 'nor is NULL one');

-- of what waits for a slot, also what keeps its whole queue from starting, and the job before it
create function pg_temp.slot(task text, weight integer default 1, limits integer default 3) returns bigint language sql as $$
  select queue.defer(slot.task, queue => 's', options => jsonb_build_object('concurrency', jsonb_build_array(jsonb_build_object('key', 'W', 'limit', slot.limits, 'weight', slot.weight))))
$$;
select max(w.id) as w from queue.workers w \gset
select pg_temp.slot('one', 2) as one \gset
select pg_temp.slot('two', 2) as two \gset
select pg_temp.slot('three') as three \gset
select queue.tick() \g /dev/null
select is(queue.why(:three), format('its concurrency key W goes first to job %s (ready)', :one), 'a ready job takes the slots first');
select queue.fetch(:w, '{s}', 1) \g /dev/null
select is(queue.why(:two), format('its concurrency key W has too few free slots for its weight 2: job %s', :one), 'a slot is free, but not two');
select is(queue.why(:three), format('its concurrency key W goes first to job %s (weight 2)', :two), 'the one before it needs more than are free');
select queue.pause('s', '2999-01-01Z') \g /dev/null
select matches(queue.why(:two), '^its queue s is paused until 2999-01-01[^;]*; its concurrency key W has too few ', 'its queue is paused as well');
select queue.defer('t', queue => 's', lock => 'of s') as holder, queue.defer('t', queue => 's', lock => 'of s') as next \gset
select queue.tick() \g /dev/null
select matches(queue.why(:next), format('^its queue s is paused until 2999-01-01[^;]*; its lock of s .*job %s', :holder), 'that of a job that waits for a lock, too');
select queue.cancel(:holder), queue.cancel(:next) \g /dev/null
select queue.resume('s') \g /dev/null
select queue.configure_queue('s', '{"max_running": 1}') \g /dev/null
select alike(queue.why(:two), 'its queue s has reached max_running 1; its concurrency key W has%', 'or full');
select queue.configure_queue('s', '{"max_running": null}') \g /dev/null
begin;
update queue.worker set queues = '{other}';
select alike(queue.why(:three), 'no live worker serves its queue s; its concurrency key W goes%', 'or nobody serves it');
rollback;
begin;
select queue.succeed(j.id, j.claim) from queue.jobs j where j.id = :one \g /dev/null
select is(queue.why(:two), 'its concurrency key W is free; the next fetch or tick passes it on', 'one that has ended uses none');
rollback;
select queue.defer('m', queue => 's', lock => 'M', options => '{"lock_mode": "mutex"}') as m1, queue.defer('m', queue => 's', lock => 'M', options => '{"lock_mode": "mutex"}') as m2 \gset
select queue.tick() \g /dev/null
select is(queue.why(:m2), format('its lock M goes first to job %s (ready)', :m1), 'a mutex lock likewise');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.id = :one \g /dev/null
select queue.cancel(id) from unnest(array[:two, :three, :m1, :m2]) id \g /dev/null

-- a durable job that waits, and that needs other jobs: what holds it now
create function pg_temp.start(id bigint) returns bigint language sql as $$
  select f.claim from queue.fetch((select max(w.id) from queue.workers w), options => jsonb_build_object('ids', array[id])) f
$$;
select queue.defer('need') as need \gset
select queue.succeed(:need, pg_temp.start(:need)) \g /dev/null
select queue.defer('waits', needs => array[:need]) as waits \gset
select pg_temp.start(:waits) as claim \gset
begin;
select queue.wait(:waits, :claim, 'w', 's') \g /dev/null
select is(queue.why(:waits), 'at its step w it waits for signal s', 'a wait that has just begun');
commit;
select queue.tick() \g /dev/null
select is(queue.why(:waits), 'at its step w it waits for signal s', 'a wait for a signal');
select queue.signal(:waits, 'S'), queue.signal(:waits, 'S'), queue.signal(:waits, 'a') \g /dev/null
select is(queue.why(:waits), 'at its step w it waits for signal s; it has not taken these signals: S, a', 'and signals of other names');
select queue.retry(array[:need]) \g /dev/null
select is(queue.why(:waits), format('it needs job %s (ready)', :need), 'its need is retried, and holds it first');
select queue.cancel(:need) \g /dev/null
select is(queue.why(:waits), format('a need failed: job %s (cancelled: retry it)', :need), 'or fails');
select queue.cancel(:waits) \g /dev/null
select queue.defer('a') as a, queue.defer('b', scheduled_at => '2999-01-01Z') as b \gset
select queue.succeed(:a, pg_temp.start(:a)) \g /dev/null
select queue.defer('any', needs => array[:a, :b], options => '{"needs_mode": "any"}') as any, queue.defer('child') as one, queue.defer('child') as two \gset
select queue.await_jobs(:any, pg_temp.start(:any), 'children', array[:one, :two]) \g /dev/null
select queue.tick() \g /dev/null
select is(queue.why(:any), format('it needs job %s (ready), job %s (ready)', :one, :two), 'a job with one of its needs waits only for those that it awaits');
select queue.fail(:one, pg_temp.start(:one), 'no', null, '{"retryable": false}') \g /dev/null
select is(queue.why(:any), format('it needs job %s (ready)', :two), 'as long as they have not ended');
select queue.cancel(id) from unnest(array[:any, :two, :b]) id \g /dev/null

-- peek
select is(test.refusal(format('select queue.peek(%L)', q)), '22023', 'no queues: ' || q) from unnest(array['{}', '{NULL}', '{{a},{b}}', '{""}']) q;
select queue.fetch(:worker, array['none']) \g /dev/null
select string_agg(p.task, ', ') as peeked from queue.peek(n => 100) p \gset
select is((select string_agg(p.task, ', ') from queue.peek(n => 100) p), :'peeked'::text, 'peek changes nothing');
select is((select string_agg(p.task, ', ') from queue.peek(n => 3) p), 'late, ready, ready with lock', 'the first ones');
select is((select string_agg(p.task, ', ') from queue.peek(array['p*']) p), 'paused', 'by pattern');
select queue.pause('p') \g /dev/null
select is((select string_agg(p.task, ', ') from queue.peek(array['p*']) p), null, 'paused queues give nothing');
select queue.resume('p') \g /dev/null
select is((select string_agg(f.task, ', ' order by f.n) from queue.fetch(:worker, null, 100) with ordinality
           f (id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, timeout, headers, parent, n)), :'peeked'::text, 'fetch gives what peek has shown, in its order');
select queue.configure_queue('full', '{"max_running": 1}');
select queue.pause(task => 'stopped', queue => 'new');
select queue.defer('fills', queue => 'full') \g /dev/null
select count(*) from queue.fetch(:worker, array['full']) \g /dev/null
select queue.defer('waits', queue => 'full'), queue.defer('stopped', queue => 'new'), queue.defer('starts', queue => 'new') \g /dev/null
select is((select string_agg(p.task, ', ') from queue.peek(array['full', 'new']) p), 'starts', 'new jobs of full queues and paused tasks are not shown');
select queue.tick() \g /dev/null
select is((select string_agg(p.task, ', ') from queue.peek(array['full', 'new']) p), 'starts', 'nor when they are admitted');
select queue.configure_queue('full', '{"max_running": 3}');
select queue.defer('waits', queue => 'full') from generate_series(1, 3) \g /dev/null
select is((select string_agg(p.task, ', ') from queue.peek(array['full', 'new']) p), 'waits, waits, starts', 'of a queue with a limit as many as may start, new ones too');
select queue.tick() \g /dev/null
select is((select string_agg(p.task, ', ') from queue.peek(array['full', 'new']) p), 'waits, waits, starts', 'and when they are admitted');
-- of each queue both admitted and new jobs
select queue.defer('a1', queue => 'mixed-a') \g /dev/null
select queue.tick() \g /dev/null
select queue.defer('b1', queue => 'mixed-b') \g /dev/null
select queue.tick() \g /dev/null
select queue.defer('b2', queue => 'mixed-b', deadline => '2999-01-01Z'), queue.defer('a2', queue => 'mixed-a'), queue.defer('a3', queue => 'mixed-a') \g /dev/null
select string_agg(p.task, ' ') as peeked from queue.peek('{mixed*}', 3) p \gset
select is(:'peeked'::text, 'a1 a2 a3', 'admitted and new jobs of a queue are in one order');
select is((select string_agg(f.task, ' ' order by f.n) from queue.fetch(:worker, '{mixed*}', 3) with ordinality
           f (id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, timeout, headers, parent, n)), :'peeked'::text, 'as fetch gives them');
-- a ready job whose key has filled up since
create function pg_temp.keyed(task text, keys text[], priority integer default 0) returns bigint language sql as $$
  select queue.defer(keyed.task, queue => 'keyed', priority => keyed.priority, options => jsonb_build_object('concurrency',
    (select jsonb_agg(jsonb_build_object('key', k, 'limit', 1)) from unnest(keys) k)))
$$;
select pg_temp.keyed('stopped', '{KA,KB}') as stopped \gset
select queue.tick() \g /dev/null
select pg_temp.keyed('behind', '{KB}') as behind, pg_temp.keyed('fills', '{KA}', 1) \gset
select queue.fetch(:w, '{keyed}', 1) \g /dev/null
select queue.defer('free', queue => 'keyed') \g /dev/null
select queue.tick() \g /dev/null
select is(queue.why(:behind), format('its concurrency key KB goes first to job %s (no slot is free: concurrency key KA)', :stopped), 'why: the job that comes first can''t start itself');
select queue.cancel(:behind) \g /dev/null
select is((select string_agg(p.task, ' ') from queue.peek('{keyed}', 1) p), 'free', 'a ready job whose key is full does not hide the next one');
select queue.configure_queue('keyed', '{"max_running": 2}');
select is((select string_agg(p.task, ' ') from queue.peek('{keyed}') p), 'free', 'nor takes room of its queue');
select is((select string_agg(f.task, ' ') from queue.fetch(:w, '{keyed}', 1) f), 'free', 'as fetch gives them');
select is(test.refusal('select queue.peek(n => 0)'), '22023', 'n is at least 1');
select is(test.refusal('select queue.peek(n => null)'), '22023', 'and not NULL');

select * from finish();
