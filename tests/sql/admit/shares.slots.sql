-- Shares also take turns at the first slots of a key, which jobs get as they are admitted.

select plan(17);

set pgdefer.notify = off;

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- Defers one job for each letter, its share, in the order of the letters. key: the concurrency of all of them.
create function pg_temp.defer(shares text, concurrency jsonb, more jsonb default '{}', queue text default 'default') returns bigint language sql as $$
  select min(d) from queue.defer_many((
    select jsonb_agg(jsonb_build_object('task', 't', 'queue', defer.queue, 'args', jsonb_build_object('name', x),
      'options', defer.more || jsonb_strip_nulls(jsonb_build_object('share', nullif(x, '-'), 'concurrency', defer.concurrency))) order by n)
    from regexp_split_to_table(defer.shares, '') with ordinality u (x, n))) d;
$$;
create function pg_temp.key(key text, slots integer) returns jsonb language sql as $$
  select jsonb_build_array(jsonb_build_object('key', key, 'limit', slots));
$$;
\ir slots.helpers.psql
-- The names of the jobs that start in each of some rounds, sorted; all of a round end before the next.
create function pg_temp.starts(rounds integer, queues text[] default null) returns text language plpgsql as $$
declare
  v_shares text := '';
begin
  for i in 1 .. starts.rounds loop
    v_shares := v_shares || coalesce((
      select string_agg(f.args ->> 'name', '' order by f.args ->> 'name')
      from queue.fetch((select max(w.id) from queue.workers w), starts.queues, 100) f), '');
    perform pg_temp.finish_all();
  end loop;
  return v_shares;
end $$;

-- One share has many jobs, others one each.
select pg_temp.defer(repeat('A', 100) || 'BCDEFGHIJK', pg_temp.key('many', 10)) \g /dev/null
select is(pg_temp.starts(1), 'ABCDEFGHIJ', 'one of each share gets a slot');
select is(pg_temp.starts(1), 'AAAAAAAAAK', 'then the one that is left');
select is_empty('select * from queue.check()', 'in order');
select is(length(pg_temp.starts(9)), 90, 'and all others');

-- A share that got slots has had these turns when the line begins.
select pg_temp.defer('AAAAABBBBB', pg_temp.key('line', 1)) \g /dev/null
select is(pg_temp.starts(10), 'ABABABABAB', 'one after the other');
select pg_temp.defer('AAAAABBBBBCC', pg_temp.key('line', 3)) \g /dev/null
select is(pg_temp.starts(4), 'ABCABCAABABB', 'with more slots too');

-- By weight
select queue.configure_share('A', '{"weight": 2}');
select pg_temp.defer('BBBBBBAAAAAA', pg_temp.key('weighed', 3)) \g /dev/null
select is(pg_temp.starts(4), 'AABAABAABBBB', 'two turns for one');
select queue.configure_share('A', '{"weight": null}');

-- Jobs without a share are one share; a deadline counts within a share.
select pg_temp.defer('AAA---', pg_temp.key('none', 2)) \g /dev/null
select is(pg_temp.starts(3), '-A-A-A', 'no share is a share');
select queue.defer('t', jsonb_build_object('name', u.name), deadline => now() + u.within, options => jsonb_build_object('share', left(u.name, 1), 'concurrency', pg_temp.key('deadline', 1)))
from (values ('A2', null::interval), ('A1', '1 hour'), ('B2', '2 hours'), ('B1', '1 hour')) u (name, within) \g /dev/null
select is(pg_temp.starts(4), 'A1B1A2B2', 'deadlines count within a share');

-- Under a rate
select pg_temp.defer(repeat('A', 20) || 'BBC', '[{"key": "rate", "rate": {"limit": 6, "per": "1 hour"}}]') \g /dev/null
select is(pg_temp.starts(1), 'AAABBC', 'the starts of a window go in turns');
select is_empty('select * from queue.check()', 'sound');

-- Several keys: turns are counted at each.
select pg_temp.defer('A', pg_temp.key('own' || n, 5) || pg_temp.key('both', 2), queue => 'several') from generate_series(1, 4) n \g /dev/null
select pg_temp.defer('BB', pg_temp.key('own', 5) || pg_temp.key('both', 2), queue => 'several') \g /dev/null
select is(pg_temp.starts(3, '{several}'), 'ABABAA', 'also at the second key');
select pg_temp.defer(repeat('A', 9), pg_temp.key('other', 1), queue => 'several'), pg_temp.defer('AAABBB', pg_temp.key('one', 1), queue => 'several') \g /dev/null
select is(pg_temp.starts(3, '{several}'), 'AAABAA', 'turns at one key do not count at another');
select is_empty('select * from queue.check()', 'sound too');

-- What the limit discards comes last in the order of turns.
select pg_temp.defer('AAAABC', pg_temp.key('drops', 3), '{"on_limit": "discard"}', 'drops') \g /dev/null
select is(pg_temp.starts(1, '{drops}'), 'ABC', 'one of each share is kept');

-- Lanes without shares go by id.
select pg_temp.defer('------', pg_temp.key('plain', 2), queue => 'plain'), pg_temp.defer('AAAB', pg_temp.key('plain', 2)) \g /dev/null
select is(pg_temp.starts(2, '{plain}'), '----', 'those without shares');
select is_empty('select * from queue.check()', 'sound as well');
select * from finish();
