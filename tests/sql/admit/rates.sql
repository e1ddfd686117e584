-- Rates and weights of concurrency keys, and settings by configure_key.

select plan(208);

set pgdefer.notify = off;

\ir slots.helpers.psql
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

create function pg_temp.claim(n integer default 10, options jsonb default null) returns text language plpgsql as $$
begin
  return (select string_agg(f.args ->> 'name', ' ' order by f.n) from queue.fetch((select max(w.id) from queue.workers w), null, claim.n, claim.options) with ordinality
    f (id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, timeout, headers, parent, n));
end $$;
create function pg_temp.finish(name text) returns text language sql as $$
  select queue.succeed(j.id, j.claim) from queue.jobs j where j.state = 'running' and j.args ->> 'name' = finish.name;
  select null::text
$$;
create function pg_temp.defer(names text, concurrency jsonb, more jsonb default '{}') returns bigint language plpgsql as $$
declare
  v_id bigint;
begin
  select min(d) into v_id from queue.defer_many((
    select jsonb_agg(jsonb_build_object('task', 't', 'args', jsonb_build_object('name', u.name),
      'options', jsonb_build_object('concurrency', defer.concurrency)) || defer.more order by u.n)
    from regexp_split_to_table(defer.names, ' ') with ordinality u (name, n))) d;
  return v_id;
end $$;
-- Lets time pass for rates.
create function pg_temp.pass(way interval) returns void language sql as $$
  update queue.rate_start r set at = r.at - way;
  update queue.waiting w set at = w.at - way where w.reason = 'slot';
  update queue.cursor k set due_at = k.due_at - way;
$$;
create function pg_temp.end_all() returns void language plpgsql as $$
begin
  perform pg_temp.finish_all();
  perform queue.delete(array(select j.id from queue.jobs j where j.finished_at is null));
end $$;

-- A rate instead of a limit
select pg_temp.defer('a b c d e', '[{"key": "R", "rate": {"limit": 2, "per": "1 hour"}}]') as a \gset
select is(pg_temp.claim(), 'a b', 'as many as the rate');
select is(pg_temp.claim(), null, 'and no more');
select pg_temp.finish_all();
select is(pg_temp.claim(), null, 'though none runs');
select is((select row (s.kind, s."limit", s.used, s.ready, s.waiting, s.rate_limit, s.rate_per)::text from queue.semaphores s where s.key = 'R'), '(concurrency_key,,0,0,3,2,01:00:00)', 'the view shows it');
select is((select string_agg(j.state || ' ' || j.reason, ', ' order by j.id) from queue.jobs j where j.id > :a + 1), 'blocked limit, blocked limit, blocked limit', 'the others wait');
select is(queue.why(:a + 2), format('its concurrency key R has used up its rate of 2 per 01:00:00; it may start at %s at the earliest', min(f.started_at) + interval '1 hour'), 'why says until when')
from queue.finished f;
select is((select t.next_due - now() between interval '59 minutes' and interval '61 minutes' from queue.tick() t), true, 'something is due then');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.pass('59 minutes');
select is(pg_temp.claim(), null, 'not before');
select pg_temp.pass('2 minutes');
select is(pg_temp.claim(), 'c d', 'then by itself');
select pg_temp.finish_all('failed');
select queue.cancel(:a + 4) \g /dev/null
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();

-- The job that knows when the rate opens is removed: the next one knows.
select pg_temp.defer('a b c d', '[{"key": "M", "rate": {"limit": 1, "per": "1 hour"}}]') as a \gset
select is(pg_temp.claim(), 'a', 'one starts');
select queue.cancel(:a + 1) \g /dev/null
select is((select count(*) from queue.waiting w where w.at is not null and w.id = :a + 2), 1::bigint, 'the first is cancelled');
select queue.set_deadline(array[:a + 3], now()) \g /dev/null
select pg_temp.pass('61 minutes');
select is(pg_temp.claim(), 'd', 'the nearest deadline is next');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();

-- A heavy job of a higher priority: light ones do not use up the rate that it waits for.
select pg_temp.defer('a', '[{"key": "U", "rate": {"limit": 2, "per": "1 hour"}}]') \g /dev/null
select pg_temp.claim() \g /dev/null
select pg_temp.pass('30 minutes');
select pg_temp.defer('b', '[{"key": "U", "rate": {"limit": 2, "per": "1 hour"}}]') \g /dev/null
select pg_temp.claim() \g /dev/null
select pg_temp.defer('light', '[{"key": "U", "rate": {"limit": 2, "per": "1 hour"}}]') as light \gset
select pg_temp.defer('heavy', '[{"key": "U", "weight": 2, "rate": {"limit": 2, "per": "1 hour"}}]', '{"priority": 5}') as heavy \gset
select queue.tick() \g /dev/null
select pg_temp.pass('31 minutes');
select is(pg_temp.claim(), null, 'a light job does not take the start that the heavy one needs');
select queue.tick() \g /dev/null
select is((select array_agg(w.id) from queue.waiting w where w.at is not null), array[:heavy]::bigint[], 'only the heavy one waits for a time');
select is_empty('select * from queue.check()', 'that is in order');
select pg_temp.pass('30 minutes');
select is(pg_temp.claim(), 'heavy', 'it starts first');
select pg_temp.pass('61 minutes');
select is(pg_temp.claim(), 'light', 'then the light one');
select pg_temp.end_all();
select pg_temp.defer('a', '[{"key": "U2", "weight": 2, "rate": {"limit": 2, "per": "1 hour"}}]') \g /dev/null
select pg_temp.claim() \g /dev/null
select pg_temp.defer('before', '[{"key": "U2", "rate": {"limit": 2, "per": "1 hour"}}]', '{"priority": 5}'),
  pg_temp.defer('heavy', '[{"key": "U2", "weight": 2, "rate": {"limit": 2, "per": "1 hour"}}]', '{"priority": 5}'),
  pg_temp.defer('light', '[{"key": "U2", "rate": {"limit": 2, "per": "1 hour"}}]') \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.pass('61 minutes');
select is_empty('select * from queue.check()', 'nor is it out of order if one before it waits for the time');
select is(pg_temp.claim(), 'before', 'which starts alone');
select pg_temp.end_all();

-- With a limit as well, and a weight that counts in both.
select pg_temp.defer('a b c d', '[{"key": "B", "limit": 2, "rate": {"limit": 3, "per": "1 hour"}}]') \g /dev/null
select is(pg_temp.claim(), 'a b', 'the limit');
select pg_temp.finish_all();
select is(pg_temp.claim(), 'c', 'the rate');
select pg_temp.finish_all();
select is(pg_temp.claim(), null, 'no more');
select pg_temp.end_all();
select pg_temp.defer('light', '[{"key": "W", "limit": 5}]'), pg_temp.defer('heavy', '[{"key": "W", "limit": 5, "weight": 3}]'),
  pg_temp.defer('light2 light3 light4', '[{"key": "W", "limit": 5}]') \g /dev/null
select is(pg_temp.claim(), 'light heavy light2', 'a weight takes so many');
select is((select row (s."limit", s.used, s.waiting)::text from queue.semaphores s where s.key = 'W'), '(5,5,2)', 'as the view shows');
select pg_temp.defer('heavy2', '[{"key": "W", "limit": 5, "weight": 4}]', '{"deadline": "2000-01-01Z"}') \g /dev/null
select queue.tick() \g /dev/null
select is_empty('select * from queue.check()', 'in order');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.state = 'running' and j.args ->> 'name' = 'heavy' \g /dev/null
select is(pg_temp.claim(), null, 'a first job that does not fit yet is not overtaken');
select is_empty('select * from queue.check()', 'in order');
select queue.release(j.id, j.claim) from queue.jobs j where j.state = 'running' and j.args ->> 'name' = 'light' \g /dev/null
select is(pg_temp.claim(), 'heavy2', 'then it starts');
select pg_temp.finish_all();
select is(pg_temp.claim(), 'light light3 light4', 'then the others');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();
select pg_temp.defer('a b c', '[{"key": "WR", "rate": {"limit": 5, "per": "1 hour"}, "weight": 2}]') \g /dev/null
select is(pg_temp.claim(), 'a b', 'in a rate too');
select pg_temp.finish_all();
select is(pg_temp.claim(), null, 'as it has no room for a third');
select is((select t.next_due - now() > interval '55 minutes' from queue.tick() t), true, 'nobody looks again before there is room for all of its weight');
select matches(queue.why(max(j.id)), 'has used up its rate of 5 per 01:00:00; it may start at .* at the earliest', 'why says until when') from queue.jobs j;
select pg_temp.pass('61 minutes');
select is(pg_temp.claim(), 'c', 'until later');
select pg_temp.end_all();

-- A weight above the rate counts in the limit as it is, and the other way round.
create function pg_temp.room_of(key text) returns text language sql as $$ select row (s.used, s.ready, s.waiting)::text from queue.semaphores s where s.key = room_of.key $$;
select pg_temp.defer('a b c', '[{"key": "two", "limit": 12, "weight": 4}]') \g /dev/null
select is(pg_temp.claim(2), 'a b', 'a limit for three');
select queue.configure_key('two', '{"limit": 10, "rate": {"limit": 1, "per": "1 hour"}}');
select is(queue.why(max(j.id)), 'no slot is free: concurrency key two', 'why says so') from queue.jobs j where j.state = 'ready';
select is(pg_temp.claim(), null, 'the third was ready, but has no slots now, whatever its rate');
select pg_temp.defer('d', '[{"key": "two", "limit": 10, "weight": 4}]', '{"priority": 1}') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.room_of('two'), '(8,0,2)', 'another one waits at once');
select pg_temp.pass('61 minutes');
select queue.tick() \g /dev/null
select is(pg_temp.room_of('two'), '(8,0,2)', 'as long as two run');
select is((select count(w.at) from queue.waiting w where w.key = 'ktwo'), 0::bigint, 'and time alone changes nothing');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.finish_all();
select is(pg_temp.claim(), 'd', 'then by the rate');
select queue.configure_key('two', '{"limit": null, "rate": null}');
select pg_temp.end_all();
select pg_temp.defer('a b', '[{"key": "two", "limit": 5, "rate": {"limit": 5, "per": "1 hour"}}]'), pg_temp.defer('c', '[{"key": "two", "limit": 5, "rate": {"limit": 5, "per": "1 hour"}, "weight": 3}]') \g /dev/null
select is(pg_temp.claim(2), 'a b', 'a rate for all three');
select pg_temp.finish_all();
select queue.configure_key('two', '{"limit": 1, "rate": {"limit": 3, "per": "1 hour"}}');
select is(queue.why(max(j.id)), 'no slot is free: concurrency key two', 'why says so') from queue.jobs j where j.state = 'ready';
select is(pg_temp.claim(), null, 'the third was ready, but its rate has no room now, whatever its limit');
select pg_temp.defer('d', '[{"key": "two", "limit": 5, "weight": 3}]', '{"priority": 1}') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.room_of('two'), '(0,0,2)', 'another one waits at once');
select queue.configure_key('two', '{"limit": 2}');
select is(pg_temp.room_of('two'), '(0,0,2)', 'also with more slots');
select is((select t.next_due - now() > interval '55 minutes' from queue.tick() t), true, 'until the rate has room for all of its weight');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.pass('61 minutes');
select is(pg_temp.claim(), 'd', 'then one starts');
select queue.configure_key('two', '{"limit": null, "rate": null}');
select pg_temp.end_all();

-- Jobs that wait become ready as far as their weights have room together.
select pg_temp.defer('a b c', '[{"key": "two", "limit": 3, "weight": 2}]') \g /dev/null
select is(pg_temp.claim(), 'a', 'one at a time');
select pg_temp.finish_all();
select queue.tick() \g /dev/null
select is(pg_temp.room_of('two'), '(0,2,1)', 'then the next, but not both');
select pg_temp.end_all();

-- A worker with tasks takes no more than fits, however many wait, and lets none pass a heavier one.
select pg_temp.defer('a b c d e f g h i j k', '[{"key": "two", "limit": 900000000, "weight": 400000000}]') as a \gset
select queue.tick() \g /dev/null
select is(pg_temp.claim(20, '{"tasks": ["t"]}'), 'a b', 'two of eleven');
select is(pg_temp.claim(20, '{"tasks": ["t"]}'), null, 'no sum exceeds an integer');
select pg_temp.finish_all();
select queue.tick() \g /dev/null
select is(pg_temp.claim(20, jsonb_build_object('ids', (select jsonb_agg(n) from generate_series(:a + 3, :a + 10) n))), 'd e', 'nor of those that are named');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();
select pg_temp.defer('ready', '[{"key": "two", "limit": 999999999, "weight": 999999999}]', '{"task": "other"}'),
  pg_temp.defer('a b c', '[{"key": "two", "limit": 999999999, "weight": 800000000}]') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.claim(20, '{"tasks": ["t"]}'), 'a', 'nor beside a ready job of another task');
select pg_temp.end_all();
select pg_temp.defer('ready', '[{"key": "two", "limit": 999999999, "weight": 999999999}]', '{"task": "other"}'),
  pg_temp.defer('a b c d e f', '[{"key": "two", "limit": 999999999, "weight": 400000000}]') as a \gset
select queue.tick() \g /dev/null
create function pg_temp.claim_one_of(a bigint, b bigint) returns text language sql
return pg_temp.claim(1, jsonb_build_object('ids', jsonb_build_array(a, b)));
select is(pg_temp.claim_one_of(:a, :a + 1), 'a', 'one of two that become ready, beside a ready job');
select pg_temp.finish_all();
select is(pg_temp.claim_one_of(:a + 2, :a + 3), 'c', 'and of two more');
select pg_temp.finish_all();
select is(pg_temp.claim_one_of(:a + 4, :a + 5), 'e', 'as far as an integer can count them');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();
-- weight above the rate but not above the limit: each room cuts it by itself
select queue.configure_key('two', '{"rate": {"limit": 2, "per": "1 hour"}}');
select pg_temp.defer('ready', '[{"key": "two", "limit": 4}]', '{"task": "other"}'), pg_temp.defer('a b', '[{"key": "two", "limit": 4, "weight": 4}]') as a \gset
select queue.tick() \g /dev/null
select is(pg_temp.claim_one_of(:a, :a + 1), 'a', 'a job that weighs more than the rate starts alone');
select is(pg_temp.room_of('two'), '(4,1,1)', 'and counts in the limit with all of its weight');
select queue.configure_key('two', '{"rate": null}');
select pg_temp.end_all();
select pg_temp.defer('used', '[{"key": "two", "limit": 4, "weight": 2}]') \g /dev/null
select is(pg_temp.claim(), 'used', 'half of the slots');
select pg_temp.defer('heavy', '[{"key": "two", "limit": 4, "weight": 4}]', '{"task": "other"}'), pg_temp.defer('light', '[{"key": "two", "limit": 4}]') \g /dev/null
select is(pg_temp.claim(10, '{"tasks": ["t"]}'), null, 'the light one does not pass the heavy one');
select pg_temp.end_all();
select queue.defer('t', queue => 'w' || n, options => '{"concurrency": [{"key": "wide", "limit": 900000000, "weight": 800000000}]}') from generate_series(1, 3) n \g /dev/null
select queue.tick() \g /dev/null
select is((select s.ready from queue.semaphores s where s.key = 'wide'), 2147483647, 'the view says at least as many as an integer can');
select pg_temp.end_all();

-- A queue whose rate or max_running is full counts no start when a job of another queue starts.
select queue.configure_queue('shut', '{"rate": {"limit": 2, "per": "1 hour"}, "max_running": 1}');
select pg_temp.defer('a', '[{"key": "two", "limit": 5}]', '{"queue": "shut"}') \g /dev/null
select is(pg_temp.claim(), 'a', 'its first start');
select pg_temp.defer('b', '[{"key": "two", "limit": 5}]', '{"queue": "shut"}') as b \gset
select pg_temp.defer('c', '[{"key": "two", "limit": 5}]') as c \gset
select queue.tick() \g /dev/null
select is(pg_temp.claim(10, jsonb_build_object('ids', jsonb_build_array(:b, :c))), 'c', 'the other starts');
select is((select count(*) from queue.rate_start r where r.key = 'qshut'), 1::bigint, 'and one start is counted');
select pg_temp.end_all();
select queue.configure_queue('shut', '{"rate": null, "max_running": null}');

-- The newest job decides, also if it waits for another key, or is discarded.
select pg_temp.defer('a', '[{"key": "A", "limit": 1}]'), pg_temp.defer('b', '[{"key": "B", "limit": 4}]') \g /dev/null
select is(pg_temp.claim(), 'a b', 'both start');
select pg_temp.defer('c', '[{"key": "B", "limit": 2}]'), pg_temp.defer('d', '[{"key": "A", "limit": 1}, {"key": "B", "limit": 2}]') \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.defer('e', '[{"key": "A", "limit": 1}, {"key": "B", "limit": 2}]') as newest \gset
select queue.tick() \g /dev/null
select is((select s.limit_id from queue.semaphore s where s.key = 'kB' order by s.tick desc limit 1), :newest::bigint, 'the queue knows it by both keys');
select pg_temp.defer('f', '[{"key": "A", "limit": 1}]', '{"options": {"on_limit": "discard", "concurrency": [{"key": "A", "limit": 1}]}}') as newest \gset
select queue.tick() \g /dev/null
select is((select s.limit_id from queue.semaphore s where s.key = 'kA' order by s.tick desc limit 1), :newest::bigint, 'and by the key at which it is discarded');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();

-- A heavy job that waits first holds the others up for as long as it is the first: until it leaves, or another comes before it.
\set begin_heavy 'do $$ begin perform pg_temp.defer(''used'', ''[{"key": "W", "limit": 4, "weight": 3}]''); end $$; do $$ begin perform pg_temp.claim(); end $$; do $$ begin perform pg_temp.defer(''heavy'', ''[{"key": "W", "limit": 4, "weight": 2}]'', ''{"deadline": "2990-01-01Z"}''); end $$; do $$ begin perform queue.tick(); end $$;'
create function pg_temp.id_of(name text) returns bigint language sql as $$ select max(j.id) from queue.job j where j.args ->> 'name' = id_of.name $$;
:begin_heavy
select pg_temp.defer('light', '[{"key": "W", "limit": 4}]') \g /dev/null
select is(pg_temp.claim(), null, 'it does not fit');
select queue.cancel(pg_temp.id_of('heavy')) \g /dev/null
select is(pg_temp.claim(), 'light', 'it is cancelled');
select pg_temp.end_all();
:begin_heavy
select pg_temp.defer('light', '[{"key": "W", "limit": 4}]', '{"task": "other"}') \g /dev/null
select is(pg_temp.claim(), null, 'it does not fit');
select queue.pause(task => 't') \g /dev/null
select is(pg_temp.claim(), 'light', 'its task is paused');
select queue.resume(task => 't') \g /dev/null
select pg_temp.end_all();
:begin_heavy
select pg_temp.defer('light', '[{"key": "W", "limit": 4}]', '{"deadline": "2980-01-01Z"}') \g /dev/null
select is(pg_temp.claim(), 'light', 'one comes that is more urgent');
select pg_temp.end_all();
:begin_heavy
select pg_temp.defer('light', '[{"key": "W", "limit": 4}]') \g /dev/null
select is(pg_temp.claim(), null, 'it does not fit');
select queue.set_deadline(array[pg_temp.id_of('light')], '2980-01-01Z') \g /dev/null
select is(pg_temp.claim(), 'light', 'one becomes more urgent');
select pg_temp.end_all();
:begin_heavy
select pg_temp.defer('light', '[{"key": "W", "limit": 4}]') \g /dev/null
select is(pg_temp.claim(), null, 'it does not fit');
select queue.defer('t', deadline => '2980-01-01Z', needs => array[pg_temp.id_of('light')]) \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.claim(), 'light', 'an urgent job needs one');
select pg_temp.end_all();
select pg_temp.defer('used', '[{"key": "W", "limit": 4}]') \g /dev/null
select pg_temp.claim() \g /dev/null
select pg_temp.defer('light', '[{"key": "W", "limit": 4}]', '{"scheduled_at": "2990-01-01Z"}'),
  pg_temp.defer('heavy', '[{"key": "W", "limit": 4, "weight": 3}]', '{"queue": "later"}') \g /dev/null
select queue.tick(), queue.move(array[pg_temp.id_of('light')], 'later') \g /dev/null
select queue.reschedule(pg_temp.id_of('light')), queue.configure_key('W', '{"limit": 3}') \g /dev/null
select is(pg_temp.claim(), 'light', 'a ready one has to wait, as its key has a lower limit now, and one was before it');
select queue.configure_key('W', '{"limit": null}');
select pg_temp.end_all();
select is_empty('select * from queue.check()', 'in order');
create function pg_temp.defer_shares(names text[], weights integer[]) returns setof bigint language sql as $$
  select queue.defer('t', jsonb_build_object('name', n), options => jsonb_build_object('share', left(n, 1), 'concurrency', jsonb_build_array(jsonb_build_object('key', 'S', 'limit', 4, 'weight', w))))
  from unnest(names, weights) v (n, w);
$$;
select pg_temp.defer_shares('{used,u2}', '{3,1}') \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.defer_shares('{v1,v2,heavy}', '{1,1,2}') \g /dev/null
select is(pg_temp.claim(), 'used u2', 'all is taken');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.args ->> 'name' = 'u2' \g /dev/null
select is(pg_temp.claim(), 'v1', 'a slot is free');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.args ->> 'name' = 'v1' \g /dev/null
select is(pg_temp.claim(), null, 'it is the turn of a heavy one');
select queue.configure_share('v', '{"weight": 5}');
select queue.tick() from generate_series(1, 3) \g /dev/null
select is(pg_temp.claim(), 'v2', 'shares have other weights, and a lighter job comes before it');
select queue.configure_share('v', '{"weight": null}');
select pg_temp.end_all();
select is_empty('select * from queue.check()', 'in order');
-- With a rate, the first that waits says when the next may start.
select pg_temp.defer('a', '[{"key": "PR", "rate": {"limit": 1, "per": "1 hour"}}]') \g /dev/null
select pg_temp.claim() \g /dev/null
select pg_temp.defer('b', '[{"key": "PR", "rate": {"limit": 1, "per": "1 hour"}}]'), pg_temp.defer('c', '[{"key": "PR", "rate": {"limit": 1, "per": "1 hour"}}]', '{"task": "other"}') \g /dev/null
select queue.tick() \g /dev/null
select queue.pause(task => 't') \g /dev/null
select pg_temp.pass('61 minutes');
select is(pg_temp.claim(), 'c', 'its task is paused: then the next');
select pg_temp.finish_all();
select pg_temp.defer('d', '[{"key": "PR", "rate": {"limit": 1, "per": "1 hour"}}]', '{"task": "other"}') \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.pass('61 minutes');
update queue.waiting w set at = null where w.key = 'kPR';
-- as if the window had ended since the admission looked at it
select queue._set_next_starts('{kPR}');
select is(pg_temp.claim(), 'd', 'a window that ends while jobs go to wait for it is no longer waited for');
select queue.resume(task => 't') \g /dev/null
select pg_temp.end_all();

-- What is ready will start before what waits: the time for the next counts it.
select pg_temp.defer('a b c d', '[{"key": "N", "rate": {"limit": 3, "per": "1 hour"}}]') \g /dev/null
select is(pg_temp.claim(1), 'a', 'one of three starts, two are ready');
select is((select t.next_due - now() > interval '55 minutes' from queue.tick() t), true, 'nobody looks again before there is room for the fourth');
select pg_temp.pass('61 minutes');
select is(pg_temp.claim(), 'b c d', 'then three in its time');
select pg_temp.end_all();
-- A job that brings another rate changes it for those that wait.
select pg_temp.defer('a b', '[{"key": "C", "rate": {"limit": 1, "per": "1 hour"}}]') \g /dev/null
select is(pg_temp.claim(), 'a', 'one an hour');
select pg_temp.defer('c', '[{"key": "C", "rate": {"limit": 5, "per": "1 hour"}}]') \g /dev/null
select is(pg_temp.claim(), 'b c', 'five an hour');
select pg_temp.end_all();
select pg_temp.defer('a b', '[{"key": "D", "rate": {"limit": 1, "per": "1 hour"}}]') \g /dev/null
select is(pg_temp.claim(), 'a', 'one an hour');
select pg_temp.defer('c', '[{"key": "D", "limit": 9}]', '{"queue": "other"}') \g /dev/null
select is(pg_temp.claim(), 'b c', 'as many as come, also if the other job need not wait itself');
select pg_temp.end_all();
-- A heavy job is not passed by either after one that goes on to another key.
select pg_temp.defer('r', '[{"key": "H", "limit": 5, "weight": 3}]'), pg_temp.defer('r2', '[{"key": "H", "limit": 5, "weight": 2}]') \g /dev/null
select is(pg_temp.claim(), 'r r2', 'all is taken');
select pg_temp.defer('several', '[{"key": "H", "limit": 5}, {"key": "I", "limit": 1}]'), pg_temp.defer('heavy', '[{"key": "H", "limit": 5, "weight": 4}]'), pg_temp.defer('light', '[{"key": "H", "limit": 5}]') \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.defer('x', '[{"key": "I", "limit": 1}]') \g /dev/null
select is(pg_temp.claim(), 'x', 'the other key too');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.state = 'running' and j.args ->> 'name' = 'r2' \g /dev/null
select is(pg_temp.claim(), null, 'the heavy one does not fit, nor pass its turn on');
select is_empty('select * from queue.check()', 'in order');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.state = 'running' and j.args ->> 'name' = 'r' \g /dev/null
select is(pg_temp.claim(), 'heavy light', 'then both start');
select pg_temp.end_all();

-- Nor by jobs that have waited for another key, unless they come before it: those wait for its key behind it.
\set jk '[{"key": "J", "limit": 1}, {"key": "K", "limit": 3}]'
select pg_temp.defer('one', '[{"key": "K", "limit": 3}]', '{"queue": "q"}'), pg_temp.defer('x', :'jk', '{"queue": "q"}') \g /dev/null
select is(pg_temp.claim(), 'one x', 'two of three slots are taken');
select pg_temp.defer('early', :'jk', '{"queue": "q", "deadline": "2980-01-01Z"}'), pg_temp.defer('a b c', :'jk', '{"queue": "q"}') \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.defer('heavy', '[{"key": "K", "limit": 3, "weight": 3}]', '{"queue": "q", "deadline": "2990-01-01Z"}') \g /dev/null
select is(pg_temp.claim(), null, 'no slot of J, and too few of K');
select pg_temp.finish('x');
select is(pg_temp.claim(), 'early', 'one that comes before the heavy one starts');
select pg_temp.finish('early');
select is(pg_temp.claim(), null, 'none behind it');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.defer('other', '[{"key": "J", "limit": 1}]', '{"queue": "q"}') \g /dev/null
select is(pg_temp.claim(), 'other', 'the slot of J is free for others');
select pg_temp.defer('urgent', :'jk', '{"queue": "q", "deadline": "2970-01-01Z"}') \g /dev/null
select is(pg_temp.claim(), null, 'which others have to wait for');
select pg_temp.finish('other');
select is(pg_temp.claim(), 'urgent', 'one that is more urgent than the heavy one starts');
select pg_temp.finish('urgent'), pg_temp.finish('one');
select is(pg_temp.claim(), 'heavy', 'when all slots are free, the heavy one');
select pg_temp.finish('heavy');
select is(pg_temp.claim(), 'a', 'then the others, one by one');
select pg_temp.finish('a');
select is(pg_temp.claim(), 'b', 'the next');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();
-- Where shares take turns, the ids say which comes before.
select pg_temp.defer('one', '[{"key": "K", "limit": 3}]'), pg_temp.defer('x', :'jk') \g /dev/null
select is(pg_temp.claim(), 'one x', 'two of three slots are taken again');
select pg_temp.defer('a', :'jk') \g /dev/null
select pg_temp.defer('heavy', '[{"key": "K", "limit": 3, "weight": 3}]', '{"options": {"held": true, "concurrency": [{"key": "K", "limit": 3, "weight": 3}]}}') as heavy \gset
select pg_temp.defer('b', :'jk') \g /dev/null
select queue.tick() \g /dev/null
select queue.unhold(:heavy) \g /dev/null
select is(pg_temp.claim(), null, 'it is blocked');
select pg_temp.finish('x');
select is(pg_temp.claim(), 'a', 'one that was deferred before');
select pg_temp.finish('a');
select is(pg_temp.claim(), null, 'none that was deferred later');
select pg_temp.finish('one');
select is(pg_temp.claim(), 'heavy', 'the heavy one');
select pg_temp.finish('heavy');
select is(pg_temp.claim(), 'b', 'the last');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();

-- However heavy, a job is claimed at once, and no sum exceeds an integer. A fault would stop every worker.
select pg_temp.defer('x y', '[{"key": "huge", "rate": {"limit": 999999999, "per": "1 hour"}, "weight": 999999998}]'), pg_temp.defer('z', '[{"key": "huge", "rate": {"limit": 999999999, "per": "1 hour"}}]') \g /dev/null
set statement_timeout = '100 s';
select is(pg_temp.claim(), 'x', 'a start may count almost a billion times');
select is((select count(*) from queue.rate_start r where r.key = 'khuge'), 2::bigint, 'in two rows');
reset statement_timeout;
select pg_temp.pass('61 minutes');
select pg_temp.finish_all();
select is(pg_temp.claim(), 'y z', 'and leaves the window');
select pg_temp.end_all();
select pg_temp.defer('a b c', '[{"key": "sum", "limit": 999999999, "weight": 999999999}]') \g /dev/null
select queue.tick() \g /dev/null
select queue.defer('t', '{"name": "d"}', concurrency_key => 'sum', concurrency_limit => 2147483647) \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.defer('e', '[{"key": "sum", "rate": {"limit": 5, "per": "0.000001"}}]') \g /dev/null
select lives_ok('select queue._admit(100)', 'three wait for slots, then for a rate');
select is_empty('select * from queue.check()', 'in order');
do $$
begin
  for i in 1 .. 3 loop
    perform pg_temp.claim();
    commit;
    perform queue.tick();
    commit;
  end loop;
end $$;
select is((select s.used from queue.semaphores s where s.key = 'sum') between 999999999 and 1999999998, true, 'as many start as an integer can count');
select pg_temp.end_all();
select is_empty('select * from queue.check()', 'in order');
-- Starts of several weights: forgotten with the window, not before.
create function pg_temp.opens(weights integer[]) returns text language plpgsql as $$
begin
  delete from queue.rate_start r where r.key = 'R0';
  for i in 1 .. cardinality(weights) loop
    perform queue._count_rate_starts('R0', 10, weights[i], '2000-01-01Z'::timestamptz + i * interval '1 minute');
  end loop;
  return (select string_agg(coalesce(to_char(queue._rate_start_at('R0', m.no - 10 + n), 'MI'), '-'), ' ' order by n) || ', rows: ' || (select count(*) from queue.rate_start r where r.key = 'R0')
    from generate_series(1, 10) n, (select max(r.no) as no from queue.rate_start r where r.key = 'R0') m);
end $$;
select is(pg_temp.opens(weights), expected, weights::text) from (values
  ('{3}'::integer[], '- - - - - - - 01 01 01, rows: 2'), ('{3,1,4}', '- - 01 01 01 02 03 03 03 03, rows: 5'), ('{3,1,4,5}', '02 03 03 03 03 04 04 04 04 04, rows: 5'),
  ('{3,1,4,5,1}', '03 03 03 03 04 04 04 04 04 05, rows: 5'), ('{3,1,4,5,1,2}', '03 03 04 04 04 04 04 05 06 06, rows: 7'), ('{10,10,2}', '02 02 02 02 02 02 02 02 03 03, rows: 4'),
  ('{1,1,1,1,1,1,1,1,1,1,1,1}', '03 04 05 06 07 08 09 10 11 12, rows: 10'), ('{10,1,1,1}', '01 01 01 01 01 01 01 02 03 04, rows: 5'), ('{1,5,6}', '02 02 02 02 03 03 03 03 03 03, rows: 4'), ('{9,9,9}', '02 03 03 03 03 03 03 03 03 03, rows: 3')) v (weights, expected);

-- The window, to the microsecond: a start that is as old as the window is long still lies in it.
create function pg_temp.room(key text, at timestamptz) returns integer language sql as $$ select queue._rate_room(room.key, 2, '1 hour', 5, room.at) $$;
select is(pg_temp.room('R1', '2000-01-01Z'), 2, 'all of it at first');
select queue._count_rate_starts('R1', 2, 1, '2000-01-01 00:00Z'), queue._count_rate_starts('R1', 2, 1, '2000-01-01 00:30Z');
select is(array[pg_temp.room('R1', '2000-01-01 01:00Z'), pg_temp.room('R1', '2000-01-01 01:00:00.000001Z'), pg_temp.room('R1', '2000-01-01 01:30:00.000001Z')], '{0,1,2}', 'one start after the other leaves the window');
select queue._count_rate_starts('R1', 2, 1, '2000-01-01 00:10Z');
select is((select array_agg(r.at order by r.no) from queue.rate_start r where r.key = 'R1'), '{2000-01-01 00:30Z,2000-01-01 00:30Z}'::timestamptz[], 'if the clock was set back a start is as late as the last; as many are kept as a window may hold');
select queue._count_rate_starts('R2', 2, 1, '1999-12-31 23:15Z'), queue._count_rate_starts('R2', 2, 1, '2000-01-01 00:30Z');
select is(pg_temp.room('R2', '2000-01-01 00:10Z'), 1, 'and its window ends there');
select now() as now \gset
select queue._count_rate_starts('R3', 2, 1, :'now'::timestamptz - interval '30 minutes'), queue._count_rate_starts('R3', 2, 1, :'now');
select is(array(select queue._rate_opens_at('R3', 2, '1 hour', n) - :'now' from generate_series(1, 3) n), '{30 minutes,1 hour,1 hour}', 'when there is room for one, for two, and for more than ever');
select queue._count_rate_starts('R4', 1, 2, '2000-01-01 00:00Z');
select is(pg_temp.room('R4', '2000-01-01 00:10Z'), 0, 'all starts of a job that is heavier than its rate count in a greater one that comes');
delete from queue.rate_start;

-- Several keys
select pg_temp.defer('a b c', '[{"key": "K1", "limit": 2}, {"key": "K2", "rate": {"limit": 1, "per": "1 hour"}}]'), pg_temp.defer('d', '[{"key": "K1", "limit": 2}]') \g /dev/null
select is(pg_temp.claim(), 'a d', 'a job that waits for a rate takes no slot elsewhere');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.finish_all();
select pg_temp.pass('61 minutes');
select is(pg_temp.claim(), 'b', 'the next in its time');
select is(pg_temp.claim(10, '{"tasks": ["t"]}'), null, 'a filter changes nothing');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();

-- configure_key overrides what jobs say, at once.
select pg_temp.defer('a b c d e f', '[{"key": "api 1", "limit": 1}]') \g /dev/null
select is(pg_temp.claim(), 'a', 'one at a time');
select queue.configure_key('api*', '{"limit": 3}');
select is((select s."limit" from queue.semaphores s where s.key = 'api 1'), 3, 'the view shows it');
select is(pg_temp.claim(), 'b c', 'two more at once');
select is_empty('select * from queue.check()', 'in order');
select queue.configure_key('api 1', '{"limit": 2, "rate": {"limit": 1, "per": "1 hour"}}');
select pg_temp.defer('g', '[{"key": "api 1", "limit": 9}]') \g /dev/null
select is(pg_temp.claim(), null, 'a job does not change it');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.state = 'running' order by j.id limit 2 \g /dev/null
select is(pg_temp.claim(), 'd', 'one of two');
select pg_temp.finish_all();
select is(pg_temp.claim(), null, 'and of one an hour');
select queue.configure_key('api 1', '{"rate": null}');
select is(pg_temp.claim(), 'e f', 'until it is taken away');
select queue.configure_key('api 1', '{"limit": null}');
select is((select s."limit" from queue.semaphores s where s.key = 'api 1'), 3, 'then the pattern''s');
select queue.configure_key('api*', '{"limit": null}');
select is((select s."limit" from queue.semaphores s where s.key = 'api 1'), 9, 'then the limit of the newest job');
select is(pg_temp.claim(), 'g', 'at once');
select is_empty('select * from queue.check()', 'in order');
select is((select count(*) from queue.key_config), 0::bigint, 'nothing is left of it');
select queue.configure_key('ab*', '{"limit": 1}'), queue.configure_key('abc*', '{"limit": 2}'), queue.configure_key('abcd', '{"limit": 3}'), queue.configure_key('abcd*', '{"limit": 4}');
select is(array(select (queue._key_config(k)).slots from unnest('{ab,abcx,abcd,abcde}'::text[]) k), '{1,2,3,4}', 'the longest pattern, but before all the name itself');
select queue.configure_key(p, '{"limit": null}') from unnest('{ab*,abc*,abcd,abcd*}'::text[]) p \g /dev/null
select queue.configure_key('later', '{"rate": {"limit": 1, "per": "1 hour"}}');
select pg_temp.defer('x y', '[{"key": "later", "limit": 5}]') \g /dev/null
select is(pg_temp.claim(), 'x', 'keys that appear later, too');
select pg_temp.end_all();

-- Bad input
select throws_ok(format($f$select queue.defer('t', options => '{"concurrency": [%s]}')$f$, item), '22023', null, item) from (values
  ('{"key": "k", "weight": 1}'), ('{"key": "k", "limit": 5, "weight": 0}'), ('{"key": "k", "limit": 5, "weight": -1}'), ('{"key": "k", "limit": 5, "weight": 1.5}'),
  ('{"key": "k", "limit": 5, "weight": 6}'), ('{"key": "k", "limit": 5, "weight": "Infinity"}'), ('{"key": "k", "rate": {"limit": 2, "per": "1 s"}, "weight": 3}'),
  ('{"key": "k", "rate": {"limit": 0, "per": "1 s"}}'), ('{"key": "k", "rate": {"limit": -1, "per": "1 s"}}'), ('{"key": "k", "rate": {"limit": 1, "per": "0"}}'),
  ('{"key": "k", "rate": {"limit": 1, "per": "4001 years"}}'), ('{"key": "k", "rate": {"limit": 1}}'), ('{"key": "k", "rate": {"limit": "1", "per": "1 s"}}'),
  ('{"key": "k", "rate": 1}'), ('{"key": "k", "rate": {"limit": 1, "per": "infinity"}}'), ('{"key": "k", "limit": null}')) v (item);
select throws_ok(format('select queue.configure_key(%s)', call), '22023', null, call) from (values
  ($$null, '{}'$$), ($$'', '{}'$$), ($$repeat('x', 1001), '{}'$$), ($$'k', null$$), ($$'k', '{"limit": 0}'$$), ($$'k', '{"limit": 1.5}'$$),
  ($$'k', '{"rate": {"limit": 1, "per": "4001 years"}}'$$), ($$'k', '{"rate": {"limit": "NaN", "per": "1 s"}}'$$), ($$'k', '{"weight": 1}'$$)) v (call);

-- In real time: no window holds more than the rate.
select queue.defer('t', '{"name": "x"}', options => '{"concurrency": [{"key": "fast", "rate": {"limit": 4, "per": "0.1 s"}}]}') from generate_series(1, 30) \g /dev/null
do $$
begin
  -- a fetch is a transaction of its own
  for i in 1 .. 10000 loop
    perform pg_temp.claim(7);
    commit;
    perform pg_temp.finish_all();
    commit;
    exit when not exists (select from queue.jobs j where j.finished_at is null);
  end loop;
end $$;
select is((select count(*) from queue.jobs j where j.finished_at is null), 0::bigint, 'all have run');
select is((select max(n) from (select count(*) over (order by f.started_at range between interval '0.1 s' preceding and current row) as n
  from queue.finished f join queue.job j on j.id = f.id where j.keys = '{fast}') x), 4::bigint, 'never more than four in a window');
select is_empty('select * from queue.check()', 'sound');

-- A key that nobody uses is forgotten, with the starts of a rate that it had before.
select pg_temp.defer('a', '[{"key": "old", "rate": {"limit": 1, "per": "1 hour"}}]') \g /dev/null
select pg_temp.claim() \g /dev/null
select pg_temp.finish_all();
select pg_temp.defer('b', '[{"key": "old", "limit": 1}]') \g /dev/null
select pg_temp.claim() \g /dev/null
select pg_temp.finish_all();
select queue.tick() \g /dev/null
select is((select count(*) from queue.rate_start r where r.key = 'kold'), 1::bigint, 'the start is known still');
select setval('queue.tick_seq', q.last_value + 1000001) from queue.tick_seq q \g /dev/null
select queue._forget_semaphores();
select is((select count(*) from queue.rate_start r where r.key = 'kold'), 0::bigint, 'then no more');

-- While a ready job of a queue that nobody serves uses up the rate, workers of other queues sleep.
select pg_temp.defer('a b', '[{"key": "unserved", "rate": {"limit": 1, "per": "1 hour"}}]', '{"queue": "unserved"}') \g /dev/null
select queue.tick(), queue.tick() \g /dev/null
select is((select s.wait_for from queue.before_sleep(:worker, array['other']) s), '1 s', 'no time is set for the job behind it');
select is((select f.args ->> 'name' from queue.fetch(:worker, array['unserved']) f), 'a', 'it starts');
select is((select w.at > clock_timestamp() from queue.waiting w join queue.job j on j.id = w.id where j.queue = 'unserved'), true, 'then a time is set');
select pg_temp.pass('1 hour');
select is((select f.args ->> 'name' from queue.fetch(:worker, array['unserved']) f), 'b', 'at which the next one starts');
select pg_temp.finish_all();
-- A weight above the limit of its own entry is refused; a job that is heavier than the limit which applies runs alone.
create function pg_temp.hint(call text) returns text language plpgsql as $$
declare
  v_hint text;
begin
  execute call;
  return null;
exception when invalid_parameter_value then
  get stacked diagnostics v_hint = pg_exception_hint;
  return v_hint;
end $$;
select is(pg_temp.hint($$select queue.defer('t', options => '{"concurrency": [{"key": "alone", "limit": 1, "weight": 2}]}')$$),
  'Pass a weight of at most the limit and the rate.', 'too heavy for its own entry');
select pg_temp.defer('a b', '[{"key": "alone", "limit": 2, "weight": 2}]'), queue.configure_key('alone', '{"limit": 1}') \g /dev/null
select is(pg_temp.claim(), 'a', 'too heavy for the limit of configure_key: it starts');
select is(pg_temp.claim(), null, 'and the next one waits');
select pg_temp.finish_all();
select is(pg_temp.claim(), 'b', 'until no other runs');
select pg_temp.finish_all();
-- JSON null counts as absent, here too.
select isnt(queue.defer('t', options => '{"concurrency": [{"key": "null", "limit": null, "rate": {"limit": 1, "per": "1 day"}}]}'), null, 'a rate, and null as the limit');

select * from finish();
