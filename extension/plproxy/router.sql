-- A database that only routes: its queue.defer defers in the shard of the job's key, by PL/Proxy. It is
-- installed on demand, by a superuser, after cluster/cluster.sql and queue.shard_start(NULL, shards).
--
-- PL/Proxy has connections of its own, in autocommit. So a job is deferred even if the caller's transaction
-- is rolled back later, and defer_many over several shards may defer for some of them only.
-- Tests: tests/py/cluster/test_plproxy.py.
begin;

create extension if not exists plproxy;
create schema if not exists plproxy;

-- One partition for each slot; PL/Proxy has one connection for each DSN.
create or replace function plproxy.get_cluster_partitions(cluster_name text)
returns setof text language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select s.dsn from queue.shard_slot m join queue.shard s on s.name = m.shard order by m.slot
$$;

-- The version changes with the map: a shard that gives a slot away raises its version.
create or replace function plproxy.get_cluster_version(cluster_name text)
returns integer language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select ((select sum(m.version) from queue.shard_slot m)
    + (select sum(abs(hashtext(s.name || ' ' || s.dsn)::bigint)) from queue.shard s)) % 2147483647
$$;

create or replace function plproxy.get_cluster_config(in cluster_name text, out key text, out val text)
returns setof record language sql stable set search_path = pg_catalog, pg_temp as $$
  values ('connection_lifetime', '1800')
$$;

create or replace function queue._route(p_slot integer, p_jobs jsonb)
returns setof bigint language plproxy as $$
  cluster 'pgdefer';
  run on p_slot;
  select * from queue.shard_defer_many(p_jobs);
$$;

-- Raises: as queue.shard_defer_many, with the same SQLSTATE.
create or replace function queue.defer(
  task text, args jsonb default '{}', queue text default null, priority integer default null,
  lock text default null, queueing_lock text default null, scheduled_at timestamptz default null,
  deadline timestamptz default null, needs bigint[] default null,
  concurrency_key text default null, concurrency_limit integer default null, options jsonb default null,
  shard_key text default null)
returns bigint language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp as $$
declare
  v_id bigint;
begin
  select d into v_id from queue.defer_many(jsonb_build_array(jsonb_strip_nulls(jsonb_build_object(
    'queue', queue, 'priority', priority, 'lock', lock, 'queueing_lock', queueing_lock,
    'scheduled_at', scheduled_at, 'deadline', deadline, 'needs', to_jsonb(needs),
    'concurrency_key', concurrency_key, 'concurrency_limit', concurrency_limit, 'shard_key', shard_key))
    || jsonb_build_object('task', task, 'args', args, 'options', options))) d;
  return v_id;
end $$;
comment on function queue.defer(text, jsonb, text, integer, text, text, timestamptz, timestamptz, bigint[],
  text, integer, jsonb, text) is
  'Defers a job in the shard of its key: shard_key, else lock, share or the header tenant. It is not undone'
    ' with the caller.';

-- One call for each shard. Raises: as queue.shard_defer_many.
create or replace function queue.defer_many(jobs jsonb)
returns setof bigint language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp as $$
declare
  v_part record;
  v_done jsonb := '{}'::jsonb;  -- the id of each place
begin
  if jsonb_typeof(jobs) is distinct from 'array' then
    perform queue._shard_invalid('jobs must be a JSON array',
      'Pass [{"task": text, "args": object, ...}, ...].');
  end if;
  for v_part in
    select min(queue.shard_of(queue.shard_key(j.job))) as slot, jsonb_agg(j.job order by j.n) as jobs,
      array_agg(j.n order by j.n) as places
    from jsonb_array_elements(jobs) with ordinality j (job, n)
    group by queue.shard_find(queue.shard_key(j.job)) order by 1
  loop
    v_done := v_done || (select jsonb_object_agg(v_part.places[r.n], r.id)
      from queue._route(v_part.slot, v_part.jobs) with ordinality r (id, n));
  end loop;
  return query select (v_done ->> n::text)::bigint from generate_series(1, jsonb_array_length(jobs)) n;
end $$;
comment on function queue.defer_many(jsonb) is
  'Defers jobs in the shards of their keys: of the jobs of each shard all or none. Returns the ids in input'
    ' order; each id is that of the job''s shard.';

revoke all on function queue._route(integer, jsonb), queue.defer_many(jsonb), queue.defer(text, jsonb, text,
  integer, text, text, timestamptz, timestamptz, bigint[], text, integer, jsonb, text) from public;
commit;
