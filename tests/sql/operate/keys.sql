-- Limits and rates of keys by configure_key: what applies once they are removed. More in admit/rates.sql.

select plan(30);

set pgdefer.notify = off;

select queue.register_worker('w', info => '{"dead_after": "1 day"}') \g /dev/null

create function pg_temp.claim(n integer default 10) returns text language plpgsql as $$
begin
  return (select string_agg(f.args ->> 'name', ' ' order by f.n) from queue.fetch((select max(w.id) from queue.workers w), null, claim.n) with ordinality
    f (id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, timeout, headers, parent, n));
end $$;
create function pg_temp.defer(names text, concurrency jsonb, more jsonb default '{}') returns void language plpgsql as $$
begin
  perform queue.defer_many((
    select jsonb_agg(jsonb_build_object('task', 't', 'args', jsonb_build_object('name', u.name),
      'options', jsonb_build_object('concurrency', defer.concurrency, 'retain', '0 s')) || defer.more order by u.n)
    from regexp_split_to_table(defer.names, ' ') with ordinality u (name, n)));
end $$;
create function pg_temp.finish(name text default null) returns void language plpgsql as $$
begin
  perform queue.succeed(v.id, v.claim) from queue.jobs v where v.state = 'running' and v.args ->> 'name' = coalesce(finish.name, v.args ->> 'name');
  perform queue.tick();
end $$;
create function pg_temp.end_all() returns void language plpgsql as $$
begin
  perform queue.delete(array(select j.id from queue.jobs j where j.state not in ('running', 'succeeded')));
  perform pg_temp.finish();
end $$;
create function pg_temp.terms(key text) returns text language sql as $$
  select concat_ws(' ', s."limit", s.rate_limit, s.rate_per) from queue.semaphores s where s.key = terms.key
$$;
\set hourly '{"limit": 1, "rate": {"limit": 1, "per": "1 hour"}}'
\set nothing '{"limit": null, "rate": null}'

-- The key's newest job is gone: what the newest of the others says applies.
select pg_temp.defer('a b c', '[{"key": "k", "limit": 5}]'), pg_temp.defer('d', '[{"key": "k", "limit": 4}]', '{"priority": -1}'), pg_temp.defer('first', '[{"key": "k", "limit": 5}]', '{"priority": 9}');
select queue.configure_key('k', :'hourly');
select is(pg_temp.claim(), 'first', 'one an hour, the newest');
select pg_temp.finish();
select queue.prune() \g /dev/null
select is((select count(*) from queue.job j where j.args ->> 'name' = 'first'), 0::bigint, 'which is gone');
select is(pg_temp.claim(), null, 'no more');
select queue.configure_key('k', :'nothing');
select is(pg_temp.terms('k'), '4', 'the terms of the newest that waits');
select is(pg_temp.claim(), 'a b c d', 'the limit and the rate are removed');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.defer('e', '[{"key": "k", "limit": 6}]');
select is(pg_temp.claim() || ' ' || pg_temp.terms('k'), 'e 6', 'the next job''s terms count');
select pg_temp.end_all();
select queue.prune() \g /dev/null

-- All of the others are ready, in several lanes, and the newest of them sets the rate.
select pg_temp.defer('y', '[{"key": "r", "rate": {"limit": 3, "per": "1 day"}}]'), pg_temp.defer('z', '[{"key": "r", "rate": {"limit": 2, "per": "1 day"}}]', '{"priority": -1}'), pg_temp.defer('first', '[{"key": "r", "limit": 5}]', '{"priority": 9}');
select queue.configure_key('r', '{"rate": {"limit": 2, "per": "1 hour"}}');
select is(pg_temp.claim(1), 'first', 'one of two an hour');
select pg_temp.finish();
select queue.prune() \g /dev/null
select is((select count(*) from queue.jobs j where j.state = 'ready'), 2::bigint, 'the others are ready');
select queue.configure_key('r', '{"rate": null}');
select is(pg_temp.terms('r'), '2 1 day', 'their rate');
select is(pg_temp.claim(), 'y', 'counts the start before');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();
select queue.prune() \g /dev/null

-- Several keys by one pattern: the newest job of one runs still, that of another is gone; jobs with several keys and weights.
select pg_temp.defer('a', '[{"key": "p1", "limit": 2}]', '{"priority": 9}'), pg_temp.defer('b', '[{"key": "p2", "limit": 3}]'),
  pg_temp.defer('c', '[{"key": "p2", "limit": 7, "weight": 4}, {"key": "p1", "limit": 6, "weight": 2}]'), pg_temp.defer('d', '[{"key": "p2", "limit": 9}]', '{"priority": 9}');
select queue.configure_key('p*', '{"limit": 1}');
select is(pg_temp.claim(), 'a d', 'one each');
select pg_temp.finish('d');
select queue.prune() \g /dev/null
select is(pg_temp.claim(), 'b', 'the next');
select queue.configure_key('p*', '{"limit": null}');
select is(pg_temp.terms('p1') || ', ' || pg_temp.terms('p2'), '6, 7', 'the newest of the others, at each of its keys');
select is(pg_temp.claim() || ' ' || pg_temp.terms('p1'), 'c 6', 'which fits beside those that run');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();
select queue.prune() \g /dev/null

-- Nobody has come to the slots: the next that comes sets them, although it is older.
select pg_temp.defer('held', '[{"key": "n", "limit": 2}]', '{"priority": 1}'), pg_temp.defer('first', '[{"key": "n", "limit": 5}]');
select queue.hold(j.id) from queue.jobs j where j.args ->> 'name' = 'held' \g /dev/null
select queue.configure_key('n', :'hourly');
select is(pg_temp.claim(), 'first', 'one an hour');
select pg_temp.finish();
select queue.prune() \g /dev/null
select queue.configure_key('n', :'nothing');
select is(pg_temp.terms('n'), '', 'none');
select queue.unhold(j.id) from queue.jobs j where j.args ->> 'name' = 'held' \g /dev/null
select is(pg_temp.claim() || ' ' || pg_temp.terms('n'), 'held 2', 'then its terms');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.end_all();
select queue.prune() \g /dev/null

-- A rate that is removed and set again forgets its starts, so that a clock that was ahead shuts it no longer.
select pg_temp.defer('a b c', '[{"key": "z", "limit": 9}]'), pg_temp.defer('x', '[{"key": "z2", "limit": 9}]');
select queue.configure_key('z*', '{"rate": {"limit": 1, "per": "1 s"}}');
select is(pg_temp.claim(), 'a x', 'one each');
update queue.rate_start set at = at + interval '30 days';
select is(pg_temp.claim(), null, 'shut');
select queue.configure_key('z', '{"rate": {"limit": 1, "per": "1 hour"}}'), queue.configure_key('z', '{"rate": null}');
select is((select count(*) from queue.rate_start r where r.key like 'kz%'), 2::bigint, 'the pattern''s rate keeps them');
select queue.configure_key('z*', '{"rate": null}');
select queue.configure_key('z*', '{"rate": {"limit": 1, "per": "1 s"}}');
select is(pg_temp.claim(), 'b', 'open again');
select is_empty('select * from queue.check()', 'in order');
select queue.configure_key('z*', '{"rate": null}');
select pg_temp.end_all();
select queue.prune() \g /dev/null

-- The jobs' own rate keeps its starts, also if its jobs are gone.
select pg_temp.defer('a b c', '[{"key": "o", "rate": {"limit": 2, "per": "1 hour"}}]');
select queue.configure_key('o', '{"rate": {"limit": 1, "per": "1 s"}}');
select is(pg_temp.claim(), 'a', 'one a second');
select queue.configure_key('o', '{"rate": null}');
select is(pg_temp.claim(), 'b', 'of two an hour one was left');
select pg_temp.end_all();
select queue.prune() \g /dev/null
select queue.configure_key('o', '{"limit": 5}'), queue.configure_key('o', '{"limit": null}');
select pg_temp.defer('d', '[{"key": "o", "rate": {"limit": 2, "per": "1 hour"}}]');
select is(pg_temp.claim(), null, 'the limit that is set and removed changes nothing');
select is_empty('select * from queue.check()', 'in order');
select * from finish();
