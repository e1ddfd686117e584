-- Defaults of the target's tasks: they do not apply again to jobs that arrive, which have had those of the source
-- (extension/cluster/arrive.sql). A default group is refused as any other. This database is shard a; b exists by name only.

select plan(11);

select 'key ' || n as key, queue._shard_part_of('key ' || n) as part from generate_series(1, 20000) n where queue.shard_of('key ' || n) = 700 limit 1 \gset
select queue.register_task('other', '{"delay": "1 day", "deadline": "1 day", "unique_until": "finish", "lock_mode": "mutex", "needs_mode": "any", "on_need_failure": "proceed", "on_limit": "discard", "group": "g", "held": true, "lock": "l", "queueing_lock": "q", "concurrency_key": "k", "concurrency_limit": 1}');
create function pg_temp.arrive(piece integer, job jsonb) returns integer language sql as $$
  select (queue.shard_part_arrive(jsonb_build_object('format', queue.shard_format(), 'slot', 700, 'part', 1, 'version', 2, 'receipt', gen_random_uuid(), 'piece', piece, 'is_last', false,
    'jobs', jsonb_build_array(jsonb_build_object('id', piece) || '{"task": "other", "args": {}, "queue": "default", "priority": 0, "lock": "", "queueing_lock": "", "concurrency_key": ""}' || job)))).deferred
$$;
select queue.shard_receive(700, 'b', 2, queue.shard_format());
select is(pg_temp.arrive(1, '{"options": {"held": false, "share": "", "idempotency_key": ""}}'), 1, 'a job without any arrives');
select is(pg_temp.arrive(2, '{"options": {"held": false, "on_limit": "discard", "lock_mode": "mutex"}, "deadline": "2100-01-01T00:00:00Z", "scheduled_at": "2099-01-01T00:00:00Z"}'), 1, 'one with some arrives');
select results_eq($$select j.scheduled_at <= clock_timestamp(), j.deadline, j.options from queue.job_now j where j.task = 'other' order by j.id$$,
                  $$values (true, null::timestamptz, '{"lock_mode": "ordered", "needs_mode": "all", "on_limit": "block", "on_need_failure": "block", "unique_until": "start"}'::jsonb),
                    (false, '2100-01-01T00:00:00Z', '{"lock_mode": "mutex", "needs_mode": "all", "on_limit": "discard", "on_need_failure": "block", "unique_until": "start"}')$$,
                  'each with what it was deferred with, and no more');
select results_eq('select num_nonnulls(lock, queueing_lock, keys) from queue.job', 'values (0), (0)', 'without the keys of the task');
select queue.tick() \g /dev/null
select is((select string_agg(state, ' ' order by id) from queue.jobs), 'ready scheduled', 'the first runs at once');

-- Deferring
select queue.open_group('g') \g /dev/null
select 'key ' || n as mine from generate_series(1, 20000) n where queue.shard_of('key ' || n) = 7 limit 1 \gset
select throws_ok(format($$select queue.shard_defer(%L, 'other')$$, :'mine'), '22023', 'a group has no shard key', 'a default group is refused');
select throws_ok(format($$select queue.shard_defer(%L, 'other', '{}', '{"options": {"group": null}}')$$, :'mine'), '22023', 'a group has no shard key', 'also beside null, which means the default');
select throws_ok(format($$select queue.shard_defer(%L, 'any', '{}', '{"options": {"group": "g"}}')$$, :'mine'), '22023', 'a group has no shard key', 'one of its own is');
select throws_ok(format($$select queue.shard_defer(%L, 'any', '{}', '{"group": "g"}')$$, :'mine'), '22023', 'a group has no shard key', 'beside the other keys too');
select lives_ok(format($$select queue.shard_defer(%L, 'other', '{}', '{"options": {"group": ""}}')$$, :'mine'), 'not the empty text, which means none');
select is((select string_agg(j.options ->> 'group', ' ') from queue.job j), null, 'no job is in the group');

select * from finish();
