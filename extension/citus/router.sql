-- A coordinator of Citus that routes: its queue.defer defers in the shard of the job's key, in the caller's
-- transaction. Each shard is a complete queue in a node of Citus. It is installed on demand, by a superuser,
-- after cluster/cluster.sql and queue.shard_start(NULL, shards), both with citus.enable_ddl_propagation off;
-- then comes queue.citus_start (docs/scaling.md).
--
-- A distributed function takes the jobs to their node. It is forcefully delegated: only then does Citus call
-- it inside a transaction, and count the call as a change, so that it commits with the caller. If no other
-- node was changed, the node's own commit does that; otherwise the commit has two phases.
--
-- PREPARE TRANSACTION refuses notifications, so the nodes send none: sleeping workers look every 5 seconds,
-- or are woken by queue.wake after the commit.
-- Tests (where Citus is installed): tests/scale/test_citus.py.
begin;
set local citus.enable_ddl_propagation = off;

-- A number that Citus places on the node of a shard.
create table if not exists queue.citus_place (
  shard text collate "C" not null,
  place integer not null,
  constraint citus_place_pkey primary key (shard)
);

-- Prepares the nodes, {shard: "host:port"}, or learns where they are now. In the nodes it creates schema
-- queue_citus, with the function that defers and the one that wakes. Call it again when Citus has moved
-- shards of queue_citus.place. Locks: as Citus's own functions.
-- Raises: 22023 if a shard has no node.
create or replace function queue.citus_start(nodes jsonb)
returns void language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp as $$
declare
  v_shard text;
  v_node text;
  v_place integer;
begin
  if to_regclass('queue_citus.place') is null then
    execute 'create schema if not exists queue_citus';
    execute 'create table queue_citus.place (place integer primary key)';
    execute $q$select create_distributed_table('queue_citus.place', 'place', colocate_with => 'none',
      shard_count => (select 4 * count(*)::integer from pg_dist_node where noderole = 'primary'))$q$;
  end if;
  execute $q$
    create or replace function queue_citus.defer_many(place integer, jobs jsonb)
    returns setof bigint language plpgsql volatile security invoker
    set search_path = pg_catalog, pg_temp set pgdefer.notify = off as
    'begin return query select d from queue.shard_defer_many(jobs) d; end'$q$;
  execute $q$
    create or replace function queue_citus.wake()
    returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as
    'begin perform queue._announce(); end'$q$;
  execute 'grant usage on schema queue_citus to public';  -- each shard decides who may defer
  execute $q$select create_distributed_function('queue_citus.defer_many(integer, jsonb)', 'place',
    colocate_with => 'queue_citus.place', force_delegation => true),
    create_distributed_function('queue_citus.wake()')$q$;
  for v_shard, v_node in select s.name, nodes ->> s.name from queue.shard s loop
    execute $q$
      select n from generate_series(0, 9999) n
      join pg_dist_placement p on p.shardid = get_shard_id_for_distribution_column('queue_citus.place', n)
      join pg_dist_node d on d.groupid = p.groupid and d.noderole = 'primary'
      where format('%s:%s', d.nodename, d.nodeport) = $1 limit 1$q$ into v_place using v_node;
    if v_place is null then
      perform queue._shard_invalid('a shard has no node',
        'Pass {shard: "host:port"}, as citus_get_active_worker_nodes() says.',
        format('shard: %s, node: %s', v_shard, left(v_node, 1000)));
    end if;
    insert into queue.citus_place (shard, place) values (v_shard, v_place)
    on conflict on constraint citus_place_pkey do update set place = excluded.place;
  end loop;
end $$;
comment on function queue.citus_start(jsonb) is
  'Creates in the nodes what the router calls, and learns in which node each shard is: {"a": "host:5432"}.';

-- The number for the node of the shard that has a slot.
create or replace function queue._citus_place(p_slot integer)
returns integer language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select p.place from queue.shard_slot m join queue.citus_place p on p.shard = m.shard where m.slot = p_slot
$$;

-- Defers in one node. The statement has constants, without which Citus does not delegate it.
create or replace function queue._route(p_slot integer, p_jobs jsonb)
returns setof bigint language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp as $$
declare
  v_place integer := queue._citus_place(p_slot);
begin
  if v_place is null then
    perform queue._shard_invalid('the router does not know this slot''s node', 'Call queue.citus_start.',
      format('slot: %s', p_slot));
  end if;
  return query execute format('select d from queue_citus.defer_many(%s, %L::jsonb) d', v_place, p_jobs);
end $$;

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
  'Defers a job in the shard of its key: shard_key, else lock, share or the header tenant. It commits with'
    ' the caller, or is undone with it.';

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
  'Defers jobs in the shards of their keys, in the caller''s transaction: all or none. Returns the ids in'
    ' input order; each id is that of the job''s shard.';

-- Call it after the commit: in the transaction it is useless, because the jobs are not there yet. Locks:
-- none.
create or replace function queue.wake()
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  execute $q$select run_command_on_workers('select queue_citus.wake()')$q$;
end $$;
comment on function queue.wake() is
  'Wakes the workers that sleep in the nodes. Without it they look every 5 seconds.';

revoke all on function queue.citus_start(jsonb), queue._citus_place(integer), queue._route(integer, jsonb),
  queue.defer_many(jsonb), queue.defer(text, jsonb, text, integer, text, text, timestamptz, timestamptz,
  bigint[], text, integer, jsonb, text), queue.wake() from public;
commit;
