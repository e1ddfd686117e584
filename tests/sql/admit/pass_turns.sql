-- Batches of jobs with ordered locks: the turns are passed on in one statement, as the general way would. Where
-- a batch is not of this kind, the general way decides.

select plan(47);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

\ir one_key.helpers.psql

-- Ends all that runs, until nothing is left; returns how many problems queue.check() has found.
create function pg_temp.drain() returns integer language plpgsql as $$
begin
  loop
    perform pg_temp.succeed(variadic array(select j.id from queue.jobs j where j.state = 'running'));
    exit when pg_temp.claim() is null;
  end loop;
  return (select count(*) from queue.check());
end $$;
create function pg_temp.states(variadic ids bigint[]) returns text language plpgsql as $$
begin
  return (select string_agg(j.state, ' ' order by j.id) from queue.jobs j where j.id = any (states.ids));
end $$;

-- One batch follows the other, in each lock in the order of ids.
select min(d) as a from (select queue.defer('t', lock => 'L' || g % 3) as d from generate_series(0, 8) g) x \gset
select is(pg_temp.claim(), array[:a, :a + 1, :a + 2]::bigint[], 'the first of each lock');
select pg_temp.succeed(:a, :a + 2);
select is(pg_temp.states(:a + 3, :a + 4, :a + 5, :a + 6), 'ready blocked ready blocked', 'the next of those that have ended');
select is((select string_agg(m.lock || ' ' || m.id - :a, ', ' order by m.id) from queue.lock_member m), 'L1 1, L0 3, L1 4, L2 5, L0 6, L1 7, L2 8', 'which are members no more');
select is(pg_temp.claim(), array[:a + 3, :a + 5]::bigint[], 'they can be claimed');
select pg_temp.succeed(:a + 1, :a + 3, :a + 5);
select is(pg_temp.claim(), array[:a + 4, :a + 6, :a + 8]::bigint[], 'then the next ones');
select pg_temp.succeed(:a + 4, :a + 6, :a + 8);
select is(pg_temp.claim(), array[:a + 7]::bigint[], 'the last one');
select is(pg_temp.drain(), 0, 'nothing is left');
select is((select count(*)::integer from queue.lock_member), 0, 'in no lock either');

-- What the next job brings along: a timeout, a retention, dependents, a deadline.
select queue.defer('t', lock => 'L') as a, queue.defer('t', lock => 'M') as other, queue.defer('t') as plain,
  queue.defer('t', lock => 'L', deadline => '2990-01-01Z', options => '{"timeout": "1 hour", "retain": "1 day"}') as b \gset
select queue.defer('t', needs => array[:b]) as after \gset
select is(pg_temp.claim(2), array[:a, :other]::bigint[], 'two of three');
select pg_temp.succeed(:a);
select is(pg_temp.claim(), array[:b, :plain]::bigint[], 'its deadline comes before the older job');
select is((select count(*)::integer from queue.lease e where e.id = :b), 1, 'its timeout counts');
select pg_temp.succeed(:b);
select is((select f.purge_at - f.finished_at from queue.finished f where f.id = :b), interval '1 day', 'so does its retention');
select is(pg_temp.states(:after), 'ready', 'what needs it can start');
select is(pg_temp.drain(), 0, 'all of it');
select queue.configure_queue('default', '{"retain": "2 days"}') \g /dev/null
select queue.defer('t', lock => 'L') as a, queue.defer('t', lock => 'L') as b \gset
select pg_temp.claim() \g /dev/null
select pg_temp.succeed(:a);
select is(pg_temp.drain(), 0, 'two more');
select is((select f.purge_at - f.finished_at from queue.finished f where f.id = :b), interval '2 days', 'the retention of the queue');

-- A next job below the low mark of its lane.
select queue.defer('t', lock => 'L') as a, queue.defer('t', lock => 'L') as b \gset
select pg_temp.claim() \g /dev/null
select count(queue.defer('t')) from generate_series(1, 300) \g /dev/null
select cardinality(pg_temp.claim(300)) \g /dev/null
select queue._raise_marks(array(select l.lane from queue.lane l)) \g /dev/null
select cmp_ok((select max(l.low_id) from queue.lane l), '>', :b::bigint, 'the lane was emptied beyond it');
select pg_temp.succeed(:a);
select is(pg_temp.claim(), array[:b]::bigint[], 'it is found nevertheless');
select is(pg_temp.drain(), 0, 'and all others');

-- Next jobs of two priorities, and of two queues; a lane that does not exist yet.
select queue.defer('t', lock => 'L') as a, queue.defer('t', lock => 'M') as b, queue.defer('t', lock => 'L') as c,
  queue.defer('t', lock => 'M', priority => 7) as d \gset
select pg_temp.claim() \g /dev/null
select pg_temp.succeed(:a, :b);
select is(pg_temp.claim(), array[:d, :c]::bigint[], 'the greater priority first');
select queue.defer('t', lock => 'L') as e, queue.defer('t', '{}', 'other', lock => 'M') as f, queue.defer('t', lock => 'N') as g,
  queue.defer('t', '{}', 'new', lock => 'N') as h \gset
select pg_temp.succeed(:c, :d);
select pg_temp.claim() \g /dev/null
select pg_temp.succeed(:g);
select is(pg_temp.claim(), array[:h]::bigint[], 'the first job of its queue');
select queue.defer('t', '{}', 'other', lock => 'L') as i, queue.defer('t', lock => 'M') as j \gset
select queue.tick() \g /dev/null
select pg_temp.succeed(:e, :f);
select is((select string_agg(l.queue, ' ' order by aj.id) from queue.active_job aj join queue.lane l on l.lane = aj.lane
  where aj.id in (:i, :j)), 'other default', 'two queues at once');
select is(pg_temp.drain(), 0, 'all lanes are empty');
select queue.defer('t', lock => 'L') as a, queue.defer('t', lock => 'L') as b \gset
select pg_temp.claim() \g /dev/null
update queue.lane l set is_idle = true, low_id = 0;  -- as if there were many lanes
select pg_temp.succeed(:a);
select is(pg_temp.claim(), array[:b]::bigint[], 'a lane that had no ready job');
select is(pg_temp.drain(), 0, 'nor has one now');

-- What holds the next job up: it is held or scheduled, a key, a need, a limit of its queue.
select queue.defer('t', lock => 'L') as a, queue.defer('t', lock => 'L', options => '{"held": true}') as b \gset
select pg_temp.claim() \g /dev/null
select pg_temp.succeed(:a);
select is(pg_temp.states(:b), 'held', 'a held job');
select queue.unhold(:b), pg_temp.claim() \g /dev/null
select queue.defer('t', concurrency_key => 'K', concurrency_limit => 1) as k,
  queue.defer('t', lock => 'L', concurrency_key => 'K', concurrency_limit => 1) as c \gset
select pg_temp.claim() \g /dev/null
select pg_temp.succeed(:b);
select is(pg_temp.states(:c), 'blocked', 'a key without a free slot');
select is(pg_temp.drain(), 0, 'both have run');
select queue.defer('t', '{}', 'limited', lock => 'L') as a, queue.defer('t', '{}', 'limited', lock => 'M') as b,
  queue.defer('t', '{}', 'limited', lock => 'L') as c \gset
select pg_temp.claim() \g /dev/null
select queue.configure_queue('limited', '{"max_running": 1}') \g /dev/null
select pg_temp.succeed(:a);
select is(pg_temp.claim(), null, 'the limit of its queue');
select pg_temp.succeed(:b);
select is(pg_temp.claim(), array[:c]::bigint[], 'until the other has ended');
select is(pg_temp.drain(), 0, 'no more');

-- What its claim must see to: a queueing lock, an expiry.
select queue.defer('t', lock => 'L') as a, queue.defer('t', lock => 'L', queueing_lock => 'Q') as b,
  queue.defer('t', lock => 'M') as c, queue.defer('t', lock => 'M', options => '{"expires_at": "2999-01-01Z"}') as d \gset
select pg_temp.claim() \g /dev/null
select pg_temp.succeed(:a);
select pg_temp.claim() \g /dev/null
select lives_ok($$ select queue.defer('t', queueing_lock => 'Q') $$, 'a queueing lock is free when its job has started');
select queue.tick() \g /dev/null
select pg_temp.succeed(:c);
select is(pg_temp.drain(), 0, 'all have run');
select is((select count(*)::integer from queue.expiry), 0, 'a job that has ended does not expire');

-- A next job that was changed, or has run before.
select queue.defer('t', lock => 'L') as a, queue.defer('t', lock => 'M') as b, queue.defer('t', lock => 'L') as c,
  queue.defer('t', lock => 'M') as d \gset
select pg_temp.claim() \g /dev/null
select queue.set_priority(array[:d]::bigint[], 5) \g /dev/null
select pg_temp.succeed(:a, :b);
select is(pg_temp.claim(), array[:d, :c]::bigint[], 'its priority as it is now');
select is(pg_temp.drain(), 0, 'both');

-- A lock that an ended job no longer has.
select queue.defer('t', lock => 'L', options => '{"retry": {"max_attempts": 2, "base": 0}}') as a, queue.defer('t', lock => 'L') as b,
  queue.defer('t', lock => 'L') as c \gset
select pg_temp.claim() \g /dev/null
select queue.fail(:a, j.claim, 'x', options => '{"lock": "M"}') from queue.jobs j where j.id = :a \g /dev/null
select is(pg_temp.claim(), array[:a, :b]::bigint[], 'the job with another lock, and the next');
select pg_temp.succeed(:a);
select is(pg_temp.states(:b, :c), 'running blocked', 'its first lock has nothing from its end');
select is(pg_temp.drain(), 0, 'each in its turn');

-- Late and mutex members.
select queue.defer('t', lock => 'L') as a, queue.defer('t', lock => 'L') as b, queue.defer('t', lock => 'L') as c \gset
select pg_temp.claim() \g /dev/null
select queue.fail(:a, j.claim, 'x') from queue.jobs j where j.id = :a \g /dev/null
select is(pg_temp.claim(), array[:b]::bigint[], 'the second');
select queue.retry(array[:a]::bigint[]) \g /dev/null
select pg_temp.succeed(:b);
select is(pg_temp.claim(), array[:a]::bigint[], 'an older job that came back goes first');
select is(pg_temp.drain(), 0, 'then the third');
select queue.defer('t', lock => 'L') as a, queue.defer('t', lock => 'L') as b,
  queue.defer('t', lock => 'L', options => '{"lock_mode": "mutex"}') as c \gset
select pg_temp.claim() \g /dev/null
select pg_temp.succeed(:a);
select is(cardinality(pg_temp.claim()), 1, 'an ordered job takes the slot of a mixed lock');
select is(pg_temp.drain(), 0, 'then the mutex job');

-- Shares: the next job takes the turn of its share.
select queue.defer('t', lock => 'L') as a, queue.defer('t', lock => 'L', options => '{"share": "x"}') as b \gset
select pg_temp.claim() \g /dev/null
select pg_temp.succeed(:a);
select isnt((select l.tag_base from queue.lane l join queue.active_job aj on aj.lane = l.lane where aj.id = :b), null, 'the first job with a share');
select queue.defer('t', options => '{"share": "y"}') as c, queue.defer('t', options => '{"share": "y"}') as d,
  queue.defer('t', lock => 'M', options => '{"share": "z"}') as e, queue.defer('t', lock => 'M') as f \gset
select pg_temp.claim() \g /dev/null
select pg_temp.succeed(:e);
select is((select aj.deadline < 'infinity' from queue.active_job aj where aj.id = :f), true, 'a job without one has a place among them');
select is(pg_temp.drain(), 0, 'shares and locks together');
select * from finish();
