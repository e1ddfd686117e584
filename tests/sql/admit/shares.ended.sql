-- Turns end where no job names a share any more.

select plan(10);

set pgdefer.notify = off;

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

create function pg_temp.defer(name text, share text default null, more jsonb default '{}', queue text default 'once') returns bigint language sql as $$
  select queue.defer('t', jsonb_build_object('name', name), queue => defer.queue, deadline => (defer.more ->> 'deadline')::timestamptz,
    options => jsonb_strip_nulls(jsonb_build_object('share', share, 'concurrency', defer.more -> 'concurrency')));
$$;
create function pg_temp.start(queue text default 'once') returns text language sql as $$
  select f.args ->> 'name' from queue.fetch((select max(w.id) from queue.workers w), array[start.queue], 1) f;
$$;
\ir slots.helpers.psql
create function pg_temp.has_turns() returns boolean language plpgsql as $$
begin
  perform queue._end_tags();
  return bool_or(l.tag_base is not null) from queue.lane l where l.queue = 'once';
end $$;

select pg_temp.defer('a', 'A') \g /dev/null
select pg_temp.start() \g /dev/null
select pg_temp.finish_all();
select is(pg_temp.has_turns(), true, 'a share has just been used');
-- so long that the share is forgotten
select pg_temp.defer('n') \g /dev/null
select pg_temp.start() \g /dev/null
select pg_temp.finish_all();
select pg_temp.defer('n') \g /dev/null
select is(pg_temp.start(), 'n', 'others have come');
select is(pg_temp.has_turns(), true, 'and one runs');
select pg_temp.finish_all();
select pg_temp.defer('holds', null, '{"concurrency": [{"key": "k", "limit": 1}]}', 'other') \g /dev/null
select pg_temp.start('other') \g /dev/null
select pg_temp.defer('waits', null, '{"concurrency": [{"key": "k", "limit": 1}]}') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.has_turns(), true, 'or waits for a slot');
select pg_temp.finish_all();
select is(pg_temp.start(), 'waits', 'until it is free');
select pg_temp.finish_all();
select is(pg_temp.has_turns(), false, 'then turns end');
select pg_temp.defer('later') \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.defer('sooner', null, jsonb_build_object('deadline', now() + interval '1 hour')) \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.start(), 'sooner', 'and a deadline goes before what was there');
select pg_temp.defer('A1', 'A'), pg_temp.defer('A2', 'A'), pg_temp.defer('B1', 'B') \g /dev/null
select queue.tick() \g /dev/null
select is(concat_ws(' ', pg_temp.start(), pg_temp.start(), pg_temp.start(), pg_temp.start()), 'later A1 B1 A2', 'until another share comes');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.finish_all();
select is_empty('select * from queue.check()', 'sound');
select * from finish();
