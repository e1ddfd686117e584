-- A move that another copy of the map knows to be over: the last step is missing, the source has given it up,
-- or this database, shard a with slots 0 to 511, was restored. b exists by name only.

select plan(13);

create or replace function queue._shard_piece() returns integer language sql as $$ select 1 $$;
create temp table k as select 'key ' || n as key, queue._shard_part_of('key ' || n) as part
  from generate_series(1, 20000) n where queue.shard_of('key ' || n) = 7 limit 1;
create function pg_temp.told(slot integer, shard text, version integer) returns integer language sql as $$
  select queue.shard_learn(jsonb_set(queue.shard_map(), array['slots', slot::text], jsonb_build_array(shard, version)))
$$;
create function pg_temp.noted(slot integer) returns bigint language sql as $$
  select (select count(*) from queue.shard_move m where m.slot = noted.slot) + (select count(*) from queue.shard_part p where p.slot = noted.slot)
    + (select count(*) from queue.shard_job j where j.slot = noted.slot) + (select count(*) from queue.shard_sent s where s.slot = noted.slot)
$$;

-- The source: of three jobs one has left, the others are held; nothing of another part
select queue.shard_defer(k.key, 'work', jsonb_build_object('n', n)) from k, generate_series(1, 3) n \g /dev/null
select queue.shard_leave(7, 'b'), queue.shard_list(7);
select queue.shard_part_leave(7, k.part) from k;
select is(pg_temp.told(7, 'b', 1), 0, 'an earlier version says nothing');
select ok(pg_temp.noted(7) > 4096, 'the move goes on');
select is(pg_temp.told(7, 'b', 2), 1, 'its own version ends it');
select is(queue.shard_find(k.key), 'b', 'the slot is there') from k;
select is((select string_agg(state, ' ') from queue.jobs), 'ready ready', 'what it has held goes on here');
select is(pg_temp.noted(7), 0::bigint, 'nothing is left of it');
select results_eq($$select args from queue.audit where call = 'shard_learn' order by at$$, $$values ('{"slot": 7, "ended": 2}'::jsonb), ('{"slots": 1}')$$, 'the audit says so');

-- The target: one that comes back after all has arrived, and one whose source has given up
select queue.shard_receive(n, 'b', 2, queue.shard_format()) from generate_series(700, 701) n;
select is(pg_temp.told(700, 'a', 1) + pg_temp.told(701, 'b', 1), 0, 'an earlier version says nothing here either');
select is(pg_temp.told(700, 'a', 2), 1, 'its own version gives the slot');
select ok((select is_plain from queue.shard_slot where slot = 700), 'which takes its keys');
select is(pg_temp.told(701, 'b', 2), 1, 'or leaves it where it was');
select is(pg_temp.noted(700) + pg_temp.noted(701), 0::bigint, 'nothing is left of both');
select is_empty('select * from queue.check()', 'and all is consistent');

select * from finish();
