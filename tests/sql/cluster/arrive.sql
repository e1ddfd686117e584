-- Parts that arrive: more jobs than a call of the queue's functions may name, and keys that are taken.

select plan(17);

create or replace function queue._shard_piece() returns integer language sql as $$ select 2000 $$;

create temp table k as select 'key ' || n as key from generate_series(1, 20000) n where queue.shard_of('key ' || n) = 7 limit 1;
select count(queue.shard_defer(k.key, 'many', '{}', '{"lock": "many"}')) from k, generate_series(1, 1100);
select queue.shard_leave(7, 'b'), queue.shard_list(7);
select ok(queue.shard_part_leave(7, queue._shard_part_of(k.key)), 'it leaves') from k;
select is((select count(*) from queue.shard_sent), 1100::bigint, 'with all of them');
create temp table sent as select queue.shard_part_jobs(7, part) as carried from (select distinct part from queue.shard_sent) s;
delete from queue.shard_sent; delete from queue.shard_part; delete from queue.shard_move; delete from queue.shard_job;
update queue.shard_slot set shard = 'b' where slot = 7;
select queue.shard_receive(7, 'b', 2, queue.shard_format());
select is((queue.shard_part_arrive(carried)).deferred, 1100, 'and arrives') from sent;

-- A job with a key that a job of this shard has is not taken for that one, which would lose it.
select queue.defer('here', queueing_lock => 'q') > 0 as deferred, queue.defer('moved', options => '{"idempotency_key": "i"}') > 0 as deferred_too;
update queue.shard_slot set shard = 'b' where slot = 8;
select queue.shard_receive(8, 'b', 2, queue.shard_format());
select is((queue.shard_part_arrive(jsonb_build_object('format', queue.shard_format(), 'slot', 8, 'part', 0, 'version', 2, 'receipt', gen_random_uuid(), 'piece', 1, 'is_last', true, 'jobs', jsonb_agg(jsonb_build_object('id', n, 'task', 'moved', 'args', jsonb_build_object('n', n), 'queueing_lock', q,
  'options', jsonb_build_object('on_conflict', 'ignore', 'idempotency_key', i)))))).deferred, 6, 'jobs with keys arrive')
from (values (1, 'q', ''), (2, 'q', ''), (3, '', 'i'), (4, 'new', 'j'), (5, 'new', ''), (6, '', 'j')) j (n, q, i);
select results_eq($$select (j.args ->> 'n')::integer, j.queueing_lock collate "default" from queue.jobs j where j.task = 'moved' and j.args ? 'n' order by 1$$,
                  $$values (1, null::text), (2, null), (3, null), (4, 'new'), (5, null), (6, null)$$, 'each as a job of its own; the first keeps its key');

-- Locks and keys with braces are carried as they are.
create temp table b as select 'key ' || n as key from generate_series(1, 20000) n where queue.shard_of('key ' || n) = 6 limit 1;
select queue.shard_defer(b.key, 'braces', '{"x": 1}', '{"lock": "{{x}}", "queueing_lock": "}}{{x}}{{", "options": {"share": "{{{{x}}}}", "idempotency_key": "{x}{{i}}", "concurrency": [{"key": "{{k", "limit": 2}]}}') > 0 as deferred from b;
select queue.shard_defer(b.key, 'many braces', jsonb_build_object('x', repeat('{', 501)), '{"options": {"concurrency": [{"key": "{x}", "limit": 2}]}}') as too_many from b \gset
create function pg_temp.braces() returns text language sql as $$
  select concat_ws(' ', j.lock, j.queueing_lock, j.keys, j.options ->> 'share', j.options ->> 'idempotency_key') from queue.job j where j.task = 'braces'
$$;
select is(pg_temp.braces(), '{x} }{x}{ {"{k"} {{x}} 1{i}', 'a job with braces in its lock and keys');
select queue.shard_leave(6, 'b'), queue.shard_list(6);
select is((queue.shard_hold(6, queue._shard_part_of(b.key))).why, 'a key has too many braces', 'another has more than a template can hold') from b;
select queue.delete(array[:too_many]::bigint[]);
select queue.shard_part_leave(6, queue._shard_part_of(b.key)) as leaves from b;
truncate sent;
delete from queue.idempotency_key;
insert into sent select queue.shard_part_jobs(6, part) from (select distinct part from queue.shard_sent) s;
delete from queue.shard_sent; delete from queue.shard_part; delete from queue.shard_move; delete from queue.shard_job;
update queue.shard_slot set shard = 'b' where slot = 6;
select queue.shard_receive(6, 'b', 2, queue.shard_format());
select is((queue.shard_part_arrive(carried)).deferred, 1, 'it arrives') from sent;
select is(pg_temp.braces(), '{x} }{x}{ {"{k"} {{x}} 1{i}', 'with the same');
-- Its idempotency key is still in use here, by a job that is no longer there.
delete from queue.shard_part where slot = 6;
select queue.delete(array(select id from queue.jobs where task = 'braces'));
select is((queue.shard_part_arrive(carried)).deferred, 1, 'one whose key a deleted job has used arrives too') from sent;
select is(pg_temp.braces(), '{x} {"{k"} {{x}}', 'and does without its keys');

-- Signals that came before the job waits for them come with it.
create temp table g as select 'key ' || n as key, queue._shard_part_of('key ' || n) as part from generate_series(1, 20000) n where queue.shard_of('key ' || n) = 5 limit 1;
select queue.shard_defer(g.key, 'signalled', jsonb_build_object('n', n)) from g, generate_series(1, 2) n \g /dev/null
select queue.signal(j.id, s.name, s.payload) from queue.jobs j, (values ('b', '1'::jsonb), ('a', '[2]'), ('b', 'null')) s (name, payload) where j.task = 'signalled' and j.args = '{"n": 2}';
update queue.received_signal set received_at = '2020-01-02T03:04:05.678901Z';
select queue.shard_leave(5, 'b'), queue.shard_list(5);
select ok(queue.shard_part_leave(5, g.part), 'a job with signals leaves') from g;
select is_empty('select * from queue.received_signal', 'with them');
truncate sent;
insert into sent select queue.shard_part_jobs(5, g.part) from g;
delete from queue.shard_sent; delete from queue.shard_part; delete from queue.shard_move; delete from queue.shard_job;
update queue.shard_slot set shard = 'b' where slot = 5;
select queue.shard_receive(5, 'b', 2, queue.shard_format());
select queue.shard_part_arrive(carried) from sent;
select results_eq($$select j.args ->> 'n', r.name collate "default", r.payload, r.received_at from queue.received_signal r join queue.jobs j on j.id = r.job_id order by r.no$$,
                  $$select '2', s.name, s.payload, timestamptz '2020-01-02T03:04:05.678901Z' from (values ('b', '1'::jsonb), ('a', '[2]'), ('b', 'null')) s (name, payload)$$, 'they arrive in their order');

-- on_limit goes with jobs that may still be discarded, not with those that have had their slots, which wait in the target.
create temp table o as select 'key ' || n as key, queue._shard_part_of('key ' || n) as part from generate_series(1, 20000) n where queue.shard_of('key ' || n) = 4 limit 1;
select queue.shard_defer(o.key, 'limited', jsonb_build_object('n', x.n), jsonb_build_object('queue', x.n, 'concurrency_key', x.key, 'concurrency_limit', 1, 'scheduled_at', x.at, 'options', '{"on_limit": "discard"}'::jsonb))
from o, (values ('ready', 'one', null), ('held', 'two', null), ('started', 'three', null), ('later', 'one', '2099-01-01')) x (n, key, at) \g /dev/null
select queue.register_worker('w') as worker \gset
select queue.shard_catch_up(), queue.hold(id) from queue.jobs where task = 'limited' and args ->> 'n' = 'held';
select queue.retry_later(f.id, f.claim, now() + interval '1 hour') from queue.fetch(:worker, '{started}') f;
select queue.shard_leave(4, 'b'), queue.shard_list(4);
select ok(queue.shard_part_leave(4, o.part, true), 'jobs with on_limit leave') from o;
select is((select string_agg(concat_ws(' ', s.job -> 'args' ->> 'n', s.job #>> '{options,on_limit}'), ', ' order by s.id) from queue.shard_sent s), 'ready, held, started, later discard', 'only one that has not had its slots may still be discarded');
delete from queue.shard_sent; delete from queue.shard_part; delete from queue.shard_move; delete from queue.shard_job;
select is_empty('select * from queue.check()', 'and all is consistent');

select * from finish();
