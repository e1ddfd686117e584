-- The steps of a move, called in a wrong order: each says what is wrong and what to do, and changes nothing
-- (extension/cluster/move.sql, arrive.sql). This database is shard a, with slots 0 to 511; b exists by name only.

select plan(25);

create temp table k as select 'key ' || n as key, queue._shard_part_of('key ' || n) as part
  from generate_series(1, 20000) n where queue.shard_of('key ' || n) = 7 limit 1;
create function pg_temp.all_rows() returns text language sql as $$
  select concat((select jsonb_agg(to_jsonb(m) order by m.slot) from queue.shard_move m), (select jsonb_agg(to_jsonb(p) order by p.slot, p.part) from queue.shard_part p),
    (select jsonb_agg(to_jsonb(s)) from queue.shard_slot s where s.slot in (7, 700)), (select jsonb_agg(to_jsonb(j) order by j.id) from queue.shard_job j),
    (select jsonb_agg(to_jsonb(t) order by t.id) from queue.shard_sent t), (select count(*) from queue.audit), (select jsonb_agg(to_jsonb(j) order by j.id) from queue.jobs j))
$$;
create function pg_temp.refused(call text, message text) returns text language plpgsql as $$
declare
  v_part integer := (select part from k);
  v_before text := pg_temp.all_rows();
  v_hint text;
begin
  execute replace(call, 'PART', v_part::text);
  return fail(call || ' is refused');
exception when sqlstate '22023' then
  get stacked diagnostics v_hint = pg_exception_hint;
  return is(sqlerrm || case when v_hint = '' then ', and no hint' else '' end || case when pg_temp.all_rows() <> v_before then ', but something changed' else '' end,
    message, call || ' is refused');
end $$;
select queue.shard_defer(k.key, 'first') from k;

-- Before anything
select pg_temp.refused(call, 'this slot does not leave') from unnest(array['select queue.shard_mover(7)', 'select queue.shard_list(7)', 'select queue.shard_close(7, PART)',
  'select queue.shard_hold(7, PART)', 'select queue.shard_unhold(7)', 'select queue.shard_part_leave(7, PART)', 'select queue.shard_leave_empty(7)',
  'select queue.shard_part_jobs(7, PART)', 'select queue.shard_part_gone(7, PART, gen_random_uuid())']) call;
select pg_temp.refused('select queue.shard_moved(7, 2)', 'this slot is not on this move');
select pg_temp.refused('select queue.shard_close(700)', 'this slot is another shard''s');
select pg_temp.refused('select queue.shard_part_arrive(''{"format": 2, "slot": 700, "part": 1, "version": 2, "jobs": [], "piece": 1, "is_last": true, "receipt": "00000000-0000-0000-0000-000000000000"}'')', 'this slot does not come here');
select pg_temp.refused('select queue.shard_part_arrive(''[]'')', 'the shards have different releases');

-- It leaves, and its jobs are not listed
select queue.shard_leave(7, 'b');
select pg_temp.refused(call, 'the jobs of this slot are not listed') from unnest(array['select queue.shard_hold(7, PART)', 'select queue.shard_part_leave(7, PART)',
  'select queue.shard_leave_empty(7)']) call;
select queue.shard_list(7);
select pg_temp.refused('select queue.shard_part_jobs(7, PART)', 'this part is not leaving');
select pg_temp.refused('select queue.shard_part_gone(7, PART, gen_random_uuid())', 'this part has not arrived');

-- The part leaves, and has not arrived
select ok(queue.shard_part_leave(7, part), 'the part leaves') from k;
select pg_temp.refused('select queue.shard_hold(7, PART)', 'this part has left');
select pg_temp.refused('select queue.shard_part_gone(7, PART, gen_random_uuid())', 'this part has not arrived');
select queue.shard_part_gone(7, part, (queue.shard_part_jobs(7, part) ->> 'receipt')::uuid) from k;
create temp table gone as select pg_temp.all_rows() as rows;
select ok(not queue.shard_part_gone(7, part, gen_random_uuid()), 'what is gone already is not refused') from k;
select is(pg_temp.all_rows(), rows, 'and nothing changes') from gone;
select pg_temp.refused('select queue.shard_part_jobs(7, PART)', 'this part is not leaving');
select pg_temp.refused('select queue.shard_moved(7, 2)', 'parts of this slot have not moved yet');

select * from finish();
