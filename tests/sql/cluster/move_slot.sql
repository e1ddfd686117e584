-- Shards: who accepts which key, and the steps of a move, each alone (extension/cluster/). This database is
-- shard a, with slots 0 to 511; b exists by name only.

select plan(90);

create temp table k as
  select 'key ' || n as key, queue.shard_of('key ' || n) as slot, queue._shard_part_of('key ' || n) as part from generate_series(1, 20000) n;
delete from k where slot not in (5, 6, 7, 700);
create function pg_temp.key_of(slot integer, n integer default 1) returns text language sql stable as $$
  select key from (select k.key, row_number() over (order by k.key) as n from k where k.slot = key_of.slot) x where x.n = key_of.n
$$;
create function pg_temp.is_in(key text) returns text language sql as $$ select coalesce(queue.shard_find(key), 'nowhere') $$;
create function pg_temp.unfinished() returns bigint language sql as $$ select count(*) from queue.jobs where finished_at is null $$;

-- The map
select is(queue.shard_of('a'), (('x' || 'ca978112')::bit(32)::bigint >> 22)::integer, 'a slot is the first 10 bits of SHA-256');
select is(queue._shard_part_of('a'), (('x' || 'ca978112')::bit(32)::bigint >> 10)::integer & 4095, 'a part is the next 12');
select is(queue.shard_map() ->> 'self', 'a', 'the map knows this shard');
select results_eq($$select s ->> 0, count(*) from jsonb_array_elements(queue.shard_map() -> 'slots') s group by 1 order by 1$$,
                  $$values ('a', 512::bigint), ('b', 512)$$, 'and divides the slots');
select is(test.refusal($$select queue.shard_start('a', '{"a": "x"}')$$), '22023', 'there is one map');
select lives_ok($$select queue.shard_start('a', '{"a": "dbname=a", "b": "dbname=b"}')$$, 'the same may be made again');
select is(array(select test.refusal(format('select queue.shard_start(%L, %L)', s, m)) from (values ('b', '{"a": "dbname=a", "b": "dbname=b"}'), ('a', '{"a": "dbname=a", "b": "dbname=c"}')) x (s, m)), '{22023,22023}', 'not another one');
select is(array(select test.refusal(format('select queue.shard_learn(%L)', m))
            from unnest('{null,"[]","{\"shards\": {}}","{\"shards\": {\"a\": \"\"}, \"slots\": [1]}"}'::jsonb[]) m),
          '{22023,22023,22023,22023}', 'what is no map is refused');
select is(queue.shard_learn(jsonb_set(queue.shard_map(), '{slots,1000}', '["a", 1]')), 0, 'the same version teaches nothing');
select is(queue.shard_learn(jsonb_set(queue.shard_map(), '{slots,1000}', '["a", 2]')), 1, 'a higher one does');
select is(queue.shard_learn(jsonb_set(queue.shard_map(), '{slots,1000}', '["b", 1]')), 0, 'a lower one does not');
select queue.shard_learn(queue.shard_map() || '{"shards": {"a": "dbname=a", "b": "dbname=new"}, "versions": {"b": 2}}');
select is((select dsn from queue.shard where name = 'b'), 'dbname=new', 'a DSN with a higher one does too');
select queue.shard_learn(queue.shard_map() || '{"shards": {"a": "dbname=a", "b": "dbname=old"}}');
select queue.shard_learn(queue.shard_map() - 'versions' || '{"shards": {"a": "dbname=a", "b": "dbname=old"}}');
select is((select dsn from queue.shard where name = 'b'), 'dbname=new', 'the same, or none, does not');
select is(queue.shard_learn(queue.shard_map(), 'a'), 0, 'its own name may be said again');
select throws_ok($$select queue.shard_learn(queue.shard_map(), 'b')$$, '22023', 'this database has a map, with another name for itself', 'not another one');
select results_eq($$select call, args from queue.audit order by at, call$$,
                  $$values ('shard_start', '{"self": "a", "shards": ["a", "b"]}'::jsonb), ('shard_learn', '{"slots": 1}')$$, 'the audit has both');

-- Keys of jobs
select is(queue.shard_key('{"lock": "l", "options": {"share": "s"}}'), 'l', 'the lock is the key');
select is(queue.shard_key('{"options": {"share": "s", "headers": {"tenant": "t"}}}'), 's', 'else the share');
select is(queue.shard_key('{"options": {"headers": {"tenant": "t"}}}'), 't', 'else the tenant');
select is(queue.shard_key('{"share": "s"}') || queue.shard_key('{"headers": {"tenant": "t"}}'), 'st', 'also beside the other keys');
select is(array(select test.refusal(format('select queue.shard_key(%L)', j))
            from unnest('{null,5,"{}","{\"lock\": \"a {b}\"}","{\"lock\": \"a}}\"}","{\"lock\": \"{{a\"}","{\"options\": 5}","{\"options\": {\"headers\": []}}","{\"headers\": []}"}'::jsonb[]) j),
          '{22023,22023,22023,22023,22023,22023,22023,22023,22023}', 'jobs without one are refused');

-- Deferring
select lives_ok(format($$select queue.shard_defer(%L, 'work', '{"n": 1}', '{"lock": "l"}')$$, pg_temp.key_of(5)), 'a shard accepts its keys');
select throws_ok(format($$select queue.shard_defer(%L, 'work')$$, pg_temp.key_of(700)), '55000', 'the key belongs to another shard', 'and no others');
select throws_ok(format($$select queue.shard_defer_many('[{"task": "t", "shard_key": "%s"}, {"task": "t", "shard_key": "%s"}]')$$, pg_temp.key_of(5), pg_temp.key_of(700)),
                 '55000', null, 'of several all or none');
select is(test.refusal(format('select queue.shard_defer_many(%L)', j)), '22023', 'refused: ' || j)
from unnest('{"{}","5","[5]","[{\"shard_key\": \"a\", \"options\": {\"group\": \"g\"}}]"}'::text[]) j;
select is((select headers ->> 'shard_key' from queue.jobs), pg_temp.key_of(5), 'the key is a header');
select lives_ok(format($$select queue.shard_defer(%L, 'needy', '{"n": 2}', '{"needs": [1], "lock": "l"}')$$, pg_temp.key_of(5)), 'needs of the same key are accepted');
select throws_ok(format($$select queue.shard_defer(%L, 'needy', '{}', '{"needs": [1]}')$$, pg_temp.key_of(5, 2)), '22023', 'a need has another shard key', 'others are not');
select is(array(select test.refusal(format($$select queue.shard_defer(%L, 'needy', '{}', '{"needs": %s}')$$, pg_temp.key_of(5, 2), n)) from unnest('{"[\"+1\"]","[\" 1 \"]","[\"00000000000000000001\"]","[\"0x1\"]","[1.0]","[[1]]","[\"x\"]","[null]","[1, null]","[99999999999999999999]"}'::text[]) n),
          array_fill('22023'::text, array[10]), 'in whatever form, or they are no ids');

create role shard_limited;
select queue.grant_access('shard_limited', 'producer', '{own}');
set session authorization shard_limited;
select throws_ok($$select queue._shard_check_needs('x', '[1]')$$, 'QJ001', 'job not found', 'of a job of others nobody learns its key');
select throws_ok($$select queue.shard_leave(5, 'b')$$, '42501', null, 'producers move nothing');
select throws_ok($$select from queue.shard_slot for update$$, '42501', null, 'and hold no row for update');
reset session authorization;
select queue.revoke_access('shard_limited');
drop role shard_limited;

select is(array(select test.refusal(format('select queue._shard_check(%L, %L)', s, p)) from (values (9999, 0), (-1, 0), (null, 0), (0, 4096), (0, -1), (0, null), (0, 0), (1023, 4095)) x (s, p)),
          '{22023,22023,22023,22023,22023,22023,accepted,accepted}', 'there are 1,024 slots of 4,096 parts');

-- A slot begins to leave: job 1 and 2 were there before
select is(array(select test.refusal(call) from unnest(array[$$select queue.shard_leave(700, 'b')$$, $$select queue.shard_leave(5, 'a')$$, $$select queue.shard_leave(5, 'c')$$,
            $$select queue.shard_leave(null, 'b')$$, $$select queue.shard_leave(5000, 'b')$$, $$select queue.shard_part_leave(5, 1)$$]) call),
          '{22023,22023,22023,22023,22023,22023}', 'a slot goes from its shard to another one');
select is(queue.shard_leave(5, 'b'), 2::bigint, 'it gets the next version');
select is(queue.shard_leave(5, 'b'), 2::bigint, 'once');
select is((select count(*) from queue.audit where call = 'shard_leave'), 1::bigint, 'which the audit says once');
select ok(queue.shard_mover(5), 'this session moves it');
select ok(queue.shard_mover(5), 'still');
update queue.shard_move set mover = (select pid from pg_stat_activity where backend_type = 'checkpointer');
select ok(queue.shard_mover(5), 'what is no session of this database moves nothing');
select queue.shard_defer(pg_temp.key_of(5, 2), 'work', '{"n": 3}', '{"lock": "m"}');
select queue.shard_defer(pg_temp.key_of(5, 2), 'work', '{"n": 4}', '{"lock": "m"}');
select results_eq('select id from queue.shard_job order by 1', $$values (3::bigint), (4)$$, 'from then on each defer notes its job');
select queue._shard_note(array[pg_temp.key_of(5)], '{1}');
select is((select count(*) from queue.shard_job), 2::bigint, 'only those of its own transaction');
select queue.shard_defer(pg_temp.key_of(6), 'ended');
select queue.shard_defer(pg_temp.key_of(5, 3), 'ended');
delete from queue.shard_job where id = 6;
select queue.cancel(6);
select queue.shard_list(5), queue.shard_list(5);
select results_eq('select id from queue.shard_job order by 1', $$values (1::bigint), (2), (3), (4)$$, 'the list has the unfinished ones from before');
select ok(not queue.shard_catch_up(), 'all of them are admitted');

-- Parts without jobs
select is((select count(*) from queue.shard_leave_empty(5)), 4094::bigint, 'parts without jobs leave at once');
select is((select count(*) from queue.shard_leave_empty(5)), 0::bigint, 'once');
select throws_ok(format($$select queue.shard_defer(%L, 'work')$$, pg_temp.key_of(5, 3)), '55P03', 'the key is on its way', 'they are on their way');
select is(pg_temp.is_in(pg_temp.key_of(5, 3)), 'nowhere', 'and nowhere yet');
select queue.shard_part_gone(5, p.part, p.receipt) from queue.shard_part p where p.state = 'leaving';
select is((select count(*) from queue.shard_part where state = 'gone'), 4094::bigint, 'only what has left is gone');
select throws_ok(format($$select queue.shard_defer(%L, 'work')$$, pg_temp.key_of(5, 3)), '55000', null, 'then the target has them');
select throws_ok($$select queue.shard_moved(5, 2)$$, '22023', 'parts of this slot have not moved yet', 'the slot is not there before all parts are');

-- A part whose job runs: what could start next is held
select queue.register_worker('w');
create temp table claimed as select * from queue.fetch((select max(id) from queue.workers), max_jobs => 1);
select is((select id from claimed), 1::bigint, 'job 1 runs');
create function pg_temp.part(n integer) returns integer language sql stable as $$ select k.part from k where k.key = pg_temp.key_of(5, n) $$;
select ok(not queue.shard_part_leave(5, pg_temp.part(1)), 'its part stays');
select results_eq('select to_hold, waits_for, why from queue.shard_hold(5, pg_temp.part(1))', $$values (0::bigint, 1::bigint, 'it runs')$$, 'and waits for it');
select results_eq('select state, reason from queue.jobs where id = 2', $$values ('blocked', 'moving')$$, 'the next one is held');
select is(queue.why(2), 'its key is moving to another shard', 'which why says');
select queue.set_priority('{2}', 3);
select is((select reason from queue.jobs where id = 2), 'moving', 'also after a change');
select is(test.refusal('select queue.unhold(2)'), 'QJ003', 'no operator gives it back');
select queue.shard_unhold(5, pg_temp.part(1));
select isnt((select reason from queue.jobs where id = 2), 'moving', 'until it is given back');
select queue.shard_hold(5, pg_temp.part(1)), queue.hold(2);
select queue.shard_hold(5, pg_temp.part(1)), queue.shard_unhold(5, pg_temp.part(1));
select is((select state from queue.jobs where id = 2), 'held', 'what an operator has held meanwhile stays held');
select queue.unhold(2);
select queue.shard_hold(5, pg_temp.part(2));
select results_eq('select id from queue.jobs where reason = ''moving''', $$values (3::bigint)$$, 'of an ordered lock only the next one is held');
select queue.defer('needy', needs => '{3}') as needy, queue.defer('needy', needs => '{3}', options => '{"on_need_failure": "proceed"}') as proceeds \gset
select queue.shard_catch_up();
select is(array(select state from queue.jobs where id in (:needy, :proceeds)), '{waiting,waiting}', 'jobs that need it wait as before');
select queue.delete(array[:needy, :proceeds]);
select queue.shard_unhold(5);
select is((select count(*) from queue.jobs where reason = 'moving'), 0::bigint, 'all are given back at once');
select queue.shard_close(5, pg_temp.part(2));
update queue.shard_part set closed_until = closed_until + interval '1 hour';  -- the machine may be slow
select throws_ok(format($$select queue.shard_defer(%L, 'work')$$, pg_temp.key_of(5, 2)), '55P03', null, 'nobody enters a closed part');
select queue.shard_unhold(5, pg_temp.part(2));
select lives_ok(format($$select queue.shard_defer(%L, 'work', '{"n": 5}', '{"options": {"lock_mode": "mutex"}, "lock": "m"}')$$, pg_temp.key_of(5, 2)), 'until it is given back');
select queue.shard_hold(5, pg_temp.part(2));
select is((select count(*) from queue.jobs where reason = 'moving'), 2::bigint, 'each mutex job is held, as it could start');
select queue.shard_unhold(5);

-- It leaves
select queue.hold(4);
select ok(queue.shard_part_leave(5, pg_temp.part(2)), 'a part without running jobs leaves');
select ok(queue.shard_part_leave(5, pg_temp.part(2)), 'once');
select is((select array_agg(j ->> 'task' || coalesce(j -> 'args' ->> 'n', '') || ' ' || (j #>> '{options,held}')) from jsonb_array_elements(queue.shard_part_jobs(5, pg_temp.part(2)) -> 'jobs') j),
          '{"work3 false","work4 true","work5 false"}', 'its jobs are on their way, in their order, and one of them held');
select is((select count(*) from queue.jobs where id in (3, 4)), 0::bigint, 'and in no queue');
select ok(3 = all (select cardinality(ids) from queue.audit where call = 'shard_part_leave'), 'the audit has their ids');
select queue.retry_later(id, claim, now() + interval '1 hour') from claimed;
select ok(not queue.shard_part_leave(5, pg_temp.part(1)), 'a job that was started before keeps its part');
select is((queue.shard_hold(5, pg_temp.part(1))).why, 'it has been started before', 'and says so');
select ok(queue.shard_part_leave(5, pg_temp.part(1), true), 'unless such jobs may move');
select is(pg_temp.unfinished(), 1::bigint, 'only the job of another slot is left');

-- The other side, played by this database
create temp table sent as select part, queue.shard_part_jobs(5, part) as carried from (select distinct part from queue.shard_sent) s;
select queue.shard_part_gone(5, part, (carried ->> 'receipt')::uuid) from sent;
update sent set carried = jsonb_set(carried, '{version}', '3');
select queue.shard_moved(5, 9);
select is((select version from queue.shard_slot where slot = 5), 2::bigint, 'a later version ends the move too: the slot has moved on');
select is(queue.shard_find(pg_temp.key_of(5)), 'b', 'the slot has moved');
select throws_ok(format('select queue.shard_part_arrive(%L)', carried), '22023', 'this slot does not come here', 'nothing arrives unless it is awaited') from sent limit 1;
select throws_ok($$select queue.shard_receive(5, 'b', 3, queue.shard_format() + 1)$$, '22023', 'the shards have different releases', 'nothing comes in another format');
select queue.shard_receive(5, 'b', 3, queue.shard_format());
select throws_ok(format('select queue.shard_part_arrive(%L)', carried || jsonb_build_object('format', queue.shard_format() + 1)), '22023', 'the shards have different releases', 'neither does a part') from sent limit 1;
select is((select sum((queue.shard_part_arrive(carried)).deferred) from sent), 5::bigint, 'jobs arrive');
select is((select sum((queue.shard_part_arrive(carried)).deferred) from sent), 0::bigint, 'once');
select results_eq($$select args ->> 'n', needs = array[(select max(id) from queue.jobs where args @> '{"n": 1}')] from queue.jobs where args ? 'n' and finished_at is null order by id$$,
                  $$select n, case when n = '2' then true end from jsonb_array_elements_text((select jsonb_path_query_array(jsonb_agg(carried -> 'jobs' order by part), '$[*][*].args.n') from sent)) n$$,
                  'in their order, and what they need is the new job');
select lives_ok(format($$select queue.shard_defer(%L, 'work')$$, pg_temp.key_of(5, 2)), 'an arrived part accepts its keys');
select throws_ok(format($$select queue.shard_defer(%L, 'work')$$, pg_temp.key_of(5, 3)), '55000', null, 'others do not yet');
select queue.shard_part_arrive(carried || jsonb_build_object('part', n, 'jobs', '[]'::jsonb)) from (select carried from sent limit 1) s, generate_series(0, 4095) n;
select queue.shard_moved(5, 3);
select is((select count(*) from queue.shard_move) + (select count(*) from queue.shard_part) + (select count(*) from queue.shard_job) + (select count(*) from queue.shard_sent),
          0::bigint, 'a move leaves nothing behind');
select is(queue.shard_find(pg_temp.key_of(5, 3)), 'a', 'and the slot is here');

select * from finish();
