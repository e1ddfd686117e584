-- A large part leaves in pieces (extension/cluster/leave.sql): its oldest jobs first, which the target runs while
-- the others are held, each by itself, in the source. This database is shard a, and b exists by name only.

select plan(30);

create or replace function queue._shard_piece() returns integer language sql as $$ select 3 $$;
create temp table k as select 'key ' || n as key, queue._shard_part_of('key ' || n) as part
  from generate_series(1, 20000) n where queue.shard_of('key ' || n) = 7 limit 1;
select part, key from k \gset
create function pg_temp.unheld() returns text language sql as $$
  select string_agg(args ->> 'n', ' ' order by id) from queue.jobs where finished_at is null and reason is distinct from 'moving' and state <> 'held'
$$;
create function pg_temp.numbers(carried jsonb) returns text language sql as $$
  select concat_ws(' ', 'piece ' || (carried ->> 'piece') || ':', (select string_agg(j -> 'args' ->> 'n', ' ') from jsonb_array_elements(carried -> 'jobs') j), case when (carried ->> 'is_last')::boolean then '(last)' end)
$$;

-- Ten jobs of an ordered lock, the first of which runs; two of them need an older one
select queue.shard_defer(:'key', 'work', jsonb_build_object('n', n), '{"lock": "l"}') from generate_series(1, 8) n \g /dev/null
select queue.shard_defer(:'key', 'needy', '{"n": 9}', '{"needs": [2, 8]}'), queue.shard_defer(:'key', 'expires', '{"n": 10}', '{"lock": "l", "options": {"expires_at": "2100-01-01T00:00:00Z"}}') \g /dev/null
select queue.register_worker('w') as worker \gset
select id, claim from queue.fetch(:worker) \gset
select queue.shard_leave(7, 'b'), queue.shard_list(7);
select is(queue.shard_hold_ahead(7, :part), 7, 'all but the oldest are held before the pause');
select is(pg_temp.unheld(), '1 2 3', 'which go on');
select is(queue.shard_hold_ahead(7, :part), 0, 'once');
select ok(not queue.shard_part_leave(7, :part), 'nothing leaves while one runs');
select queue.shard_unhold(7, :part);
select is(pg_temp.unheld(), '1 2 3 4 5 6 7 8 9 10', 'if the part must stay, all are given back');
select is((select state from queue.jobs where id = 9), 'waiting', 'to what they waited for');
select queue.hold(7);
select is(queue.shard_hold_ahead(7, :part), 7, 'and held again');
select queue.succeed(:id, :claim);
select is(queue.shard_hold_ahead(7, :part), 0, 'the oldest are those that are left: one less waits');
select queue.shard_defer(:'key', 'work', '{"n": 11}', '{"lock": "l"}'), queue.shard_defer(:'key', 'work', '{"n": 12}') \g /dev/null
select results_eq(format('select to_hold, waits_for from queue.shard_hold(7, %s)', :part), 'values (0::bigint, null::bigint)', 'what could start is held too');

-- The first piece
select ok(queue.shard_part_leave(7, :part), 'the oldest leave');
select is(pg_temp.unheld(), null, 'of the others none can start, also of those that came late');
select queue.shard_part_jobs(7, :part) as one \gset
select is(pg_temp.numbers(:'one'), 'piece 1: 2 3 4', 'in their order');
select throws_ok(format($$select queue.shard_defer(%L, 'work')$$, :'key'), '55P03', null, 'the part is on its way');
select queue.cancel(5);
select queue.fetch(:worker, max_jobs => 10) \g /dev/null
select is((select count(*) from queue.jobs where state = 'running'), 0::bigint, 'the end of one lets no other start');
select queue.shard_unhold(7), queue.shard_unhold(7, :part);
select is(pg_temp.unheld(), null, 'nor does a new mover, which gives back what the last one held');

-- A plain job comes to need one of the next: that waits, and nothing is lost
select queue.defer('plain', needs => '{6}') as plain \gset
select throws_ok(format('select queue.shard_part_gone(7, %s, %L)', :part, :'one'::jsonb ->> 'receipt'), '55000', 'a job of this part can''t leave', 'what another job needs does not leave');
select is(queue.shard_part_jobs(7, :part), :'one'::jsonb, 'the piece is still there');
select queue.delete(array[:plain]);
select ok(queue.shard_part_gone(7, :part, (:'one'::jsonb ->> 'receipt')::uuid), 'then it is forgotten, and the next one leaves');
select queue.shard_part_jobs(7, :part) as two \gset
select is(pg_temp.numbers(:'two'), 'piece 2: 6 7 8', 'in their order');
select is((select string_agg(j #>> '{options,held}', ' ') from jsonb_array_elements(:'two'::jsonb -> 'jobs') j), 'false true false', 'with the hold of an operator');
select ok(queue.shard_part_gone(7, :part, (:'two'::jsonb ->> 'receipt')::uuid), 'there is one more');
select queue.shard_part_jobs(7, :part) as three \gset
select is(pg_temp.numbers(:'three'), 'piece 3: 9 10 11', 'in their order');
select queue.hold(id), queue.unhold(id), id as last from queue.jobs where args ->> 'n' = '12' \gset
select claim from queue.fetch(:worker, max_jobs => 10) \gset
select throws_ok(format('select queue.shard_part_gone(7, %s, %L)', :part, :'three'::jsonb ->> 'receipt'), '55000', 'a job of this part can''t leave', 'one that an operator has let go does not leave while it runs');
select queue.succeed(:last, :claim);
select ok(queue.shard_part_gone(7, :part, (:'three'::jsonb ->> 'receipt')::uuid), 'there is one more, also if its jobs have ended meanwhile');
select queue.shard_part_jobs(7, :part) as four \gset
select is(pg_temp.numbers(:'four'), 'piece 4: (last)', 'the last');
select ok(not queue.shard_part_gone(7, :part, (:'four'::jsonb ->> 'receipt')::uuid), 'after which the part is gone');

-- The other side, played by this database
delete from queue.shard_part; delete from queue.shard_move;
update queue.shard_slot set shard = 'b', is_plain = false where slot = 7;
select queue.shard_receive(7, 'b', 2, queue.shard_format());
select throws_ok(format('select queue.shard_part_arrive(%L)', :'two'), '22023', 'a piece before this one has not arrived', 'pieces come in their order');
create function pg_temp.come(p_carried jsonb, p_key text) returns text language plpgsql as $$
declare
  v_n integer := (queue.shard_part_arrive(p_carried)).deferred;
begin
  return v_n || ' ' || coalesce(queue.shard_find(p_key), 'nowhere');
end $$;
select is((select string_agg(pg_temp.come(c, :'key'), ', ' order by n) from unnest(array[:'one', :'one', :'two', :'one', :'three', :'four', :'four']::jsonb[]) with ordinality u (c, n)), '3 nowhere, 0 nowhere, 3 nowhere, 0 nowhere, 3 nowhere, 0 a, 0 a', 'each once; the key is here after the last');
select is((select string_agg(concat(n.args ->> 'n', ' needs ', o.args ->> 'n'), ', ' order by o.id) from queue.jobs n, unnest(n.needs) u join queue.jobs o on o.id = u where n.args ->> 'n' = '9'),
  '9 needs 2, 9 needs 8', 'what is needed is found in the pieces before');
select is_empty('select * from queue.check()', 'and all is consistent');

select * from finish();
