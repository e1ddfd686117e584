-- Large jobs leave in pieces of so many bytes (extension/cluster/move_slot.sql), since jsonb has a limit. This database is
-- shard a; b exists by name only.

select plan(7);

create or replace function queue._shard_piece_size() returns integer language sql as $$ select 50000 $$;
select 'key ' || n as key, queue._shard_part_of('key ' || n) as part from generate_series(1, 20000) n where queue.shard_of('key ' || n) = 7 limit 1 \gset
create function pg_temp.sent() returns text language sql as $$ select string_agg(s.job -> 'args' ->> 'n', ' ' order by s.id) from queue.shard_sent s $$;
create function pg_temp.next() returns boolean language sql as $$
  select queue.shard_part_gone(p.slot, p.part, p.receipt) from queue.shard_part p where p.state = 'leaving'
$$;
select queue.shard_defer(:'key', 'large', jsonb_build_object('n', n, 'x', repeat('x', bytes)), jsonb_build_object('options', jsonb_build_object('description', repeat('y', more))))
from (values (1, 90000, 0), (2, 100, 0), (3, 30000, 0), (4, 100, 30000), (5, 100, 0)) x (n, bytes, more) \g /dev/null
select queue.shard_leave(7, 'b'), queue.shard_list(7);
select ok(queue.shard_part_leave(7, :part), 'the first leaves');
select is(pg_temp.sent(), '1', 'alone, as it is larger than a piece may be');
select ok(pg_temp.next(), 'others follow');
select is(pg_temp.sent(), '2 3', 'as many as a piece may have');

-- Signals are large, too
select queue.signal(5, 's', to_jsonb(repeat('x', 60000)));
select is(pg_temp.next()::text || ' ' || pg_temp.sent(), 'true 4', 'a job with large signals does not keep the one before it');
select throws_ok('select pg_temp.next()', '55000', 'a job of this part can''t leave', 'with more than a piece may have it stays');
delete from queue.received_signal;
select is(pg_temp.next()::text || ' ' || pg_temp.sent(), 'true 5', 'and leaves without them');

select * from finish();
