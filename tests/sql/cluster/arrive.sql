-- A part with more jobs than a call of the queue's functions may name.

select plan(3);

create temp table k as select 'key ' || n as key from generate_series(1, 20000) n where queue.shard_of('key ' || n) = 7 limit 1;
select count(queue.shard_defer(k.key, 'many', '{}', '{"lock": "many"}')) from k, generate_series(1, 1100);
select queue.shard_leave(7, 'b'), queue.shard_list(7);
select ok(queue.shard_part_leave(7, queue._shard_part_of(k.key)), 'it leaves') from k;
select is((select count(*) from queue.shard_sent), 1100::bigint, 'with all of them');
create temp table sent as select s.part, jsonb_agg(s.job order by s.id) as jobs from queue.shard_sent s group by 1;
delete from queue.shard_sent; delete from queue.shard_part; delete from queue.shard_move; delete from queue.shard_job;
update queue.shard_slot set shard = 'b' where slot = 7;
select queue.shard_receive(7, 'b', 2);
select is(queue.shard_part_arrive(7, part, jobs), 1100, 'and arrives') from sent;

select * from finish();
