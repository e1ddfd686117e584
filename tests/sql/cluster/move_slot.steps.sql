-- The steps of a move, called in a wrong order: each says what is wrong and what to do, and changes nothing
-- (extension/cluster/move_slot.sql, arrive.sql). This database is shard a, with slots 0 to 511; b exists by name only.

select plan(39);

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
  'select queue.shard_part_jobs(7, PART)', 'select queue.shard_part_gone(7, PART, gen_random_uuid())', 'select queue.shard_stay(7)']) call;
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
select pg_temp.refused('select queue.shard_stay(7)', 'parts of this slot have left');

-- A move is given up before a part has left: at once, and with its jobs held
create temp table l as select 'key ' || n as key, queue._shard_part_of('key ' || n) as part
  from generate_series(1, 20000) n where queue.shard_of('key ' || n) = 8 limit 1;
select queue.shard_defer(l.key, 'stays') from l;
select queue.shard_leave(8, 'b'), queue.shard_stay(8);
select is((select version from queue.shard_slot where slot = 8), 2::bigint, 'the slot stays, with the version of the move');
select is(queue.shard_leave(8, 'b'), 3::bigint, 'the next move gets the next one');
select queue.shard_list(8), queue.shard_hold(8, l.part) from l;
select is((select reason from queue.jobs where task = 'stays'), 'moving', 'its job is held');
select results_eq('select * from queue.shard_stopped() where slot = 8', $$values (8, 'b', 1::bigint)$$, 'nobody makes the move');
select queue.shard_mover(8);
select is_empty('select * from queue.shard_stopped() where slot = 8', 'until this session does');
select queue.shard_stay(8);
select is((select state from queue.jobs where task = 'stays'), 'ready', 'it is given back');
select is((select count(*) from queue.shard_move where slot = 8) + (select count(*) from queue.shard_part where slot = 8) + (select count(*) from queue.shard_job where slot = 8), 0::bigint, 'nothing is left of the move');
select ok((select is_plain from queue.shard_slot where slot = 8), 'its keys are deferred as before');
select is((select count(*) from queue.audit where call = 'shard_stay'), 2::bigint, 'the audit has both');

-- The target is asked before: of slot 9 it has all, slot 10 may come, slot 11 is on another move
update queue.shard_slot set shard = 'b', is_plain = false where slot in (10, 11);
select queue.shard_receive(11, 'b', 2, queue.shard_format());
select is(array(select queue.shard_may_receive(s, 'b', v, queue.shard_format()) from (values (9, 1), (10, 2), (11, 2)) x (s, v)), '{f,t,t}', 'a slot may come that it has not');
select pg_temp.refused('select queue.shard_may_receive(11, ''b'', 3, queue.shard_format())', 'this slot can''t come from there');
select pg_temp.refused('select queue.shard_may_receive(10, ''b'', 2, 0)', 'the shards have different releases');

select * from finish();
