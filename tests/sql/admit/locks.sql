-- Locks: ordered, mutex, and both on one lock; every way out passes the turn on.

select plan(74);

\ir gates.helpers.psql
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- ordered: one at a time, in creation order, whatever the priorities
select queue.defer('a', lock => 'L') as a \gset
select queue.defer('b', lock => 'L', priority => 9) as b \gset
select queue.defer('c', lock => 'L', deadline => '2001-01-01Z') as c \gset
select queue.defer('d', lock => 'other') as d \gset
select is(pg_temp.claim(), array[:a, :d]::bigint[], 'the oldest of each lock');
select is((select j.state || ' ' || j.reason from queue.jobs j where j.id = :b), 'blocked lock', 'the next is blocked');
select is(queue.why(:b), format('its lock L is held by job %s (running)', :a), 'and why says by which job');
select is((select row (l.job_id, l.running, l.waiting, l.has_mutex)::text from queue.locks l where l.lock = 'L'), format('(%s,1,2,f)', :a), 'as does the view');
select pg_temp.succeed(:a);
select is(pg_temp.claim(), array[:b]::bigint[], 'then the second');
select is(queue.fail(:b, j.claim, 'x'), 'failed', 'which fails') from queue.jobs j where j.id = :b;
select is(pg_temp.claim(), array[:c]::bigint[], 'a failure passes the turn on as well');
select pg_temp.finish_all();
select is((select count(*) from queue.locks), 0::bigint, 'a lock without unfinished jobs is no more');

-- The oldest blocks the others while it is scheduled, held, retried or on a queue that is not served.
select queue.defer('a', lock => 'L', options => '{"delay": "1 hour"}') as a \gset
select queue.defer('b', lock => 'L') as b \gset
select is(pg_temp.claim(), null, 'while it is scheduled');
select is((select string_agg(j.state, ' ' order by j.id) from queue.jobs j where j.id >= :a), 'scheduled blocked', 'as the states say');
select is(queue.cancel(:a), 'cancelled', 'until it is cancelled');
select is(pg_temp.claim(), array[:b]::bigint[], 'which lets the next one in');
select pg_temp.finish_all();
select queue.defer('a', lock => 'L', options => '{"held": true}') as a \gset
select queue.defer('b', lock => 'L') as b \gset
select is(pg_temp.claim(), null, 'while it is held');
select is(queue.unhold(:a), 'ready', 'until it is let go');
select is(pg_temp.claim(), array[:a]::bigint[], 'it comes first');
select is(queue.fail(:a, j.claim, 'x', null, '{"retryable": false}'), 'failed', 'when it fails for good') from queue.jobs j where j.id = :a;
select is(pg_temp.claim(), array[:b]::bigint[], 'then the other');
select pg_temp.finish_all();
select queue.defer('a', lock => 'L', options => '{"retry": {"max_attempts": 2, "base": "1 hour"}}') as a \gset
select queue.defer('b', lock => 'L') as b \gset
select pg_temp.claim() \g /dev/null
select is(queue.fail(:a, j.claim, 'x'), 'scheduled', 'a failure with attempts left') from queue.jobs j where j.id = :a;
select is(pg_temp.claim(), null, 'keeps the turn during its backoff');
select queue.cancel(:a) \g /dev/null
select is(pg_temp.claim(), array[:b]::bigint[], 'and passes it on when cancelled');
select queue.release(:b, j.claim) from queue.jobs j where j.id = :b;
select is(pg_temp.claim(), array[:b]::bigint[], 'a released job keeps its turn');
select pg_temp.finish_all();
select queue.defer('a', lock => 'L', queue => 'elsewhere') as a \gset
select queue.defer('b', lock => 'L') as b \gset
select is(pg_temp.claim(10, array['default']), null, 'while it waits on a queue that this worker does not serve');
select is(pg_temp.claim(10, array['elsewhere', 'default']), array[:a]::bigint[], 'it comes first');
select pg_temp.finish_all();
select pg_temp.claim() \g /dev/null
select pg_temp.finish_all();

-- mutex: one at a time; jobs that can't run block nobody
select queue.defer('a', lock => 'M', options => '{"lock_mode": "mutex", "delay": "1 hour"}') as a \gset
select queue.defer('b', lock => 'M', options => '{"lock_mode": "mutex"}') as b \gset
select queue.defer('c', lock => 'M', options => '{"lock_mode": "mutex"}') as c \gset
select is(pg_temp.claim(), array[:b]::bigint[], 'mutex: one, although an older one is scheduled');
select is(pg_temp.claim(), null, 'and only one');
select is(queue.why(:c), format('its lock M is held by job %s', :b), 'why names it');
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:c]::bigint[], 'then the next');
select pg_temp.finish_all();
select queue.cancel(:a) \g /dev/null

-- Mixed: an ordered job waits for every older unfinished one, a mutex job only for the running one.
select queue.defer('a', lock => 'X', options => '{"lock_mode": "mutex", "delay": "1 hour"}') as a \gset
select queue.defer('b', lock => 'X') as b \gset
select queue.defer('c', lock => 'X', options => '{"lock_mode": "mutex"}') as c \gset
select is(pg_temp.claim(), array[:c]::bigint[], 'mixed: the mutex job goes');
select is(pg_temp.claim(), null, 'the ordered one waits for the older mutex job');
select pg_temp.finish_all();
select queue.cancel(:a) \g /dev/null
select is(pg_temp.claim(), array[:b]::bigint[], 'and goes when that is gone');
select queue.defer('d', lock => 'X', options => '{"lock_mode": "mutex"}') as d \gset
select is(pg_temp.claim(), null, 'a mutex job waits for the running ordered one');
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:d]::bigint[], 'and goes then');
select pg_temp.finish_all();

-- An older job that commits late takes the turn from one that has not started, wherever that one waits.
select queue.defer('a', lock => 'L') as a \gset
select pg_temp.claim() \g /dev/null
select pg_temp.finish_all();
select queue.defer('b', lock => 'L', needs => array[:a::bigint], options => '{"on_need_failure": "proceed"}') as b \gset
select queue.tick() \g /dev/null
select queue.retry(array[:a::bigint]) \g /dev/null
select is(pg_temp.claim(), array[:a]::bigint[], 'a retried job runs, although the next of its lock had the turn and needs it');
select is((select j.state from queue.jobs j where j.id = :b), 'waiting', 'which waits');
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:b]::bigint[], 'and comes then');
select queue.fail(:b, j.claim, 'x', null, '{"retry_in": "1 hour"}') from queue.jobs j where j.id = :b \g /dev/null
select queue.tick(), queue.retry(array[:a::bigint]) \g /dev/null
select is(pg_temp.claim(), array[:a]::bigint[], 'it comes before one that waits for its retry');
select is(queue.retry_later(:a, j.claim, now() + interval '1 hour'), 'scheduled', 'yields') from queue.jobs j where j.id = :a;
select queue.reschedule(:b, null) \g /dev/null
select is(pg_temp.claim(), null, 'and keeps its turn');
select queue.defer('c', lock => 'N', queue => 'n') as c \gset
select pg_temp.claim(1, array['n']) \g /dev/null
select queue.fail(:c, j.claim, 'x', null, '{"lock": "L", "retry_in": "0"}') from queue.jobs j where j.id = :c \g /dev/null
select queue.done(array[:a::bigint]) \g /dev/null
select is(pg_temp.claim(), array[:b]::bigint[], 'then the next by id, also if one came from another lock');
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:c]::bigint[], 'and that one');
select pg_temp.finish_all();
select is_empty('select * from queue.check()', 'in order');

-- While the younger one runs the older waits. It is next even if the younger one is to run again.
select queue.defer('a', lock => 'L') as a \gset
select pg_temp.claim() \g /dev/null
select queue.fail(:a, j.claim, 'x') from queue.jobs j where j.id = :a \g /dev/null
select queue.defer('b', lock => 'L') as b \gset
select pg_temp.claim() \g /dev/null
select queue.retry(array[:a::bigint]) \g /dev/null
select is(pg_temp.claim(), null, 'nobody displaces a job that runs');
select queue.release(:b, j.claim) from queue.jobs j where j.id = :b;
select is(pg_temp.claim(), array[:a]::bigint[], 'released, it waits for the older');
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:b]::bigint[], 'and runs then');
select pg_temp.finish_all();

-- The older one also takes the turn if it has to wait for its time.
select queue.defer('a', lock => 'T', options => '{"retry": {"max_attempts": 9}}') as a \gset
select pg_temp.claim() \g /dev/null
select queue.fail(:a, j.claim, 'x', null, '{"retryable": false}') from queue.jobs j where j.id = :a \g /dev/null
select queue.defer('b', lock => 'T') as b \gset
select pg_temp.claim() \g /dev/null
select queue.retry(array[:a::bigint]) \g /dev/null
select queue.reschedule(:a, now() + interval '1 hour') \g /dev/null
select queue.release(:b, j.claim) from queue.jobs j where j.id = :b \g /dev/null
select is(pg_temp.claim(), null, 'the released one waits for it');
select queue.reschedule(:a, null) \g /dev/null
select is(pg_temp.claim(), array[:a]::bigint[], 'until it has run');
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:b]::bigint[], 'and comes then');
select pg_temp.finish_all();

-- A job that joins a lock and has to wait for its time does so, also when its turn comes.
select queue.defer('a', lock => 'T') as a \gset
select queue.defer('b', lock => 'U') as b \gset
select pg_temp.claim() \g /dev/null
select queue.fail(:b, j.claim, 'x', null, '{"lock": "T", "retry_in": "1 hour"}') from queue.jobs j where j.id = :b \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.finish_all();
select is(pg_temp.claim(), null, 'a retry with another lock waits for its time');
select is_empty('select * from queue.check()', 'in one place');
select queue.cancel(:b) \g /dev/null

-- A job that leaves a lock after an older one has arrived passes its turn to that one alone.
select queue.defer('a', lock => 'T') as a \gset
select pg_temp.claim() \g /dev/null
select queue.fail(:a, j.claim, 'x') from queue.jobs j where j.id = :a \g /dev/null
select queue.defer('b', lock => 'T') as b, queue.defer('c', lock => 'T') as c \gset
select pg_temp.claim() \g /dev/null
select queue.retry(array[:a::bigint]) \g /dev/null
select queue.fail(:b, j.claim, 'x', null, '{"lock": "U", "retry_in": "0"}') from queue.jobs j where j.id = :b \g /dev/null
select is(pg_temp.claim(), array[:a, :b]::bigint[], 'the older of the lock, and the job that left it');
select is_empty('select * from queue.check()', 'a lock runs one');
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:c]::bigint[], 'then the next');
select pg_temp.finish_all();

-- In a mixed lock too.
select queue.defer('a', lock => 'Y') as a \gset
select pg_temp.claim() \g /dev/null
select queue.fail(:a, j.claim, 'x') from queue.jobs j where j.id = :a \g /dev/null
select queue.defer('b', lock => 'Y', options => '{"delay": "1 hour"}') as b, queue.defer('c', lock => 'Y', options => '{"lock_mode": "mutex", "delay": "1 hour"}') as c \gset
select queue.tick(), queue.retry(array[:a::bigint]) \g /dev/null
select is(pg_temp.claim(), array[:a]::bigint[], 'mixed: the older takes the turn of a scheduled one');
select pg_temp.finish_all();
select queue.reschedule(:b, null), queue.reschedule(:c, null) \g /dev/null
select is(pg_temp.claim(1), array[:b]::bigint[], 'which is next');
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:c]::bigint[], 'before the mutex job');
select pg_temp.finish_all();
select queue.defer('a', lock => 'Y', options => '{"lock_mode": "mutex"}') as a \gset
select pg_temp.claim() \g /dev/null
select queue.fail(:a, j.claim, 'x') from queue.jobs j where j.id = :a \g /dev/null
select queue.defer('b', lock => 'Y') as b \gset
select queue.tick(), queue.retry(array[:a::bigint]) \g /dev/null
select is(pg_temp.claim(), array[:a]::bigint[], 'an ordered job that has not started waits for an older mutex one');
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:b]::bigint[], 'and comes then');
select pg_temp.finish_all();
begin;
select queue.defer('a', lock => 'Y', options => '{"lock_mode": "mutex"}') as a, queue.defer('b', lock => 'Y') as b \gset
prepare transaction 'Y';
select queue.defer('c', lock => 'Y') as c \gset
select queue.tick() \g /dev/null
commit prepared 'Y';
select is(pg_temp.claim(), array[:a]::bigint[], 'also of a batch that commits late');
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:b]::bigint[], 'in the order of ids');
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:c]::bigint[], 'to the last');
select pg_temp.finish_all();
select is_empty('select * from queue.check()', 'in order');

-- Every way out of a state passes the turn on, in the same transaction.
call pg_temp.leave('ready: cancel', '{"lock": "W"}');
call pg_temp.leave('ready: delete', '{"lock": "W"}');
call pg_temp.leave('ready: done', '{"lock": "W"}');
call pg_temp.leave('ready: fail_jobs', '{"lock": "W"}');
call pg_temp.leave('running: succeeded', '{"lock": "W"}');
call pg_temp.leave('running: failed', '{"lock": "W"}');
call pg_temp.leave('running: delete', '{"lock": "W"}');
call pg_temp.leave('running: done', '{"lock": "W"}');
call pg_temp.leave('running: fail_jobs', '{"lock": "W"}');
call pg_temp.leave('running: reap', '{"lock": "W"}');
select is_empty($$select * from told where state <> 'ready'$$, 'the next one is ready');
select is((select count(*) from told), 10::bigint, 'each way');

-- A job that crashed keeps its turn, although it is only claimed alone.
select queue.defer('a', lock => 'L') as a \gset
select queue.defer('b', lock => 'L') as b \gset
select pg_temp.claim() \g /dev/null
select queue.extend(:a, j.claim, '1 microsecond') from queue.jobs j where j.id = :a \g /dev/null
select is((select r.reaped from queue.reap() r), 1, 'the first of a lock crashes');
select is(pg_temp.claim(), array[:a]::bigint[], 'it runs again, alone: the next one does not overtake it');
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:b]::bigint[], 'and then the next');
select pg_temp.finish_all();

-- Jobs that join a lock by a retry, the younger first: the older one comes first, although none that was deferred with the
-- lock has a greater id.
select queue.defer('plain') as a, queue.defer('plain') as b \gset
select pg_temp.claim() \g /dev/null
select queue.fail(j.id, j.claim, 'x', options => '{"lock": "R", "retry_in": "1 hour"}') from queue.jobs j where j.id = :b \g /dev/null
select from queue.tick() \g /dev/null
select queue.fail(j.id, j.claim, 'x', options => '{"lock": "R", "retry_in": "0 s"}') from queue.jobs j where j.id = :a \g /dev/null
select is(pg_temp.claim(), array[:a]::bigint[], 'the older one runs while the younger waits for its time');
select queue.reschedule(:b, now()) \g /dev/null
select is(pg_temp.claim(), null, 'the younger one waits for it');
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:b]::bigint[], 'and is next');
select pg_temp.finish_all();
select is_empty($$select * from queue.lock_member m where m.lock = 'R'$$, 'nobody is left behind');

-- The same with mutex: a job that was deferred without a lock joins in the mode that it was deferred with
select queue.defer('plain', options => '{"lock_mode": "mutex"}') as a, queue.defer('plain', options => '{"lock_mode": "mutex"}') as b \gset
select pg_temp.claim() \g /dev/null
select queue.fail(j.id, j.claim, 'x', options => '{"lock": "S", "retry_in": "1 hour"}') from queue.jobs j where j.id = :a \g /dev/null
select queue.fail(j.id, j.claim, 'x', options => '{"lock": "S", "retry_in": "0 s"}') from queue.jobs j where j.id = :b \g /dev/null
select is(pg_temp.claim(), array[:b]::bigint[], 'the younger does not wait for the older one''s time');
select queue.reschedule(:a, now()) \g /dev/null
select is(pg_temp.claim(), null, 'but only one runs at a time');
select pg_temp.finish_all();
select is(pg_temp.claim(), array[:a]::bigint[], 'then the other');
select pg_temp.finish_all();

select is_empty('select * from queue.check()', 'sound');
select * from finish();
