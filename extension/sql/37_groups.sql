-- Groups, chains and graphs: jobs deferred with their needs in one call, and how jobs hang together.

-- Locks and errors: as defer_many.
create or replace function queue.defer_group(jobs jsonb, "then" jsonb)
returns table (then_id bigint, ids bigint[])
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_needs jsonb := defer_group."then" -> 'needs';
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  if jsonb_typeof(defer_group."then") is distinct from 'object' then
    perform queue._invalid('then must be a JSON object', 'Pass the job that follows as {"task": text, "args": object, ...}.');
  elsif coalesce(jsonb_typeof(v_needs), 'null') not in ('array', 'null') then
    perform queue._invalid('needs must be a list of ids', 'Pass ids of jobs, or leave needs out.');
  end if;
  ids := array(select d.id from queue.defer_many(defer_group.jobs) with ordinality d (id, n) order by d.n);
  select d.id into then_id
  from queue.defer_many(jsonb_build_array(
    defer_group."then" || jsonb_build_object('needs', to_jsonb(ids) || coalesce(nullif(v_needs, 'null'), '[]')))) d (id);
  return next;
end $$;
comment on function queue.defer_group(jsonb, jsonb) is
  'Defers jobs (as defer_many) and one more, "then", that needs them all, beside the needs that it names. Its options needs_mode and on_need_failure hold as in defer. Returns its id and theirs, in input order.';

-- Locks and errors: as defer_many.
create or replace function queue.defer_chain(jobs jsonb)
returns setof bigint language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_job jsonb;
  v_id bigint;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  if jsonb_typeof(defer_chain.jobs) is distinct from 'array' then
    perform queue._invalid('jobs must be a JSON array', 'Pass [{"task": text, "args": object, ...}, ...].');
  end if;
  for v_job in select e from jsonb_array_elements(defer_chain.jobs) e loop
    if v_id is null then
      v_id := queue.defer_many(jsonb_build_array(v_job));
    else
      select g.then_id into v_id from queue.defer_group('[]', v_job || case when jsonb_typeof(v_job) = 'object'
        then jsonb_build_object('needs', jsonb_build_array(v_id) || coalesce(nullif(v_job -> 'needs', 'null'), '[]')) else '[]' end) g;
    end if;
    return next v_id;
  end loop;
end $$;
comment on function queue.defer_chain(jsonb) is
  'Defers jobs (as defer_many) of which each needs the one before it, beside the needs that it names. Returns the ids in input order.';

-- Raises: QJ001.
create or replace function queue.graph(id bigint)
returns table (job_id bigint, need_id bigint, depth integer, task text, state text)
language plpgsql stable parallel safe security definer rows 20
set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_ids bigint[] := array[graph.id];
  v_depths integer[] := array[0];
  v_level bigint[];
  v_depth integer;
  v_limits text[] := queue._limits('{operator,reader}');
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator,reader}', array[graph.id]);
  end if;
  if not exists (select from queue.job j where j.id = graph.id) then
    perform queue._job_not_found(graph.id);
  end if;
  foreach v_depth in array array[-1, 1] loop
    v_level := array[graph.id];
    loop
      v_level := array(
        select distinct n.id from unnest(v_level) u (id) cross join lateral queue._neighbours(u.id, v_depth > 0) n (id)
        except select u.id from unnest(v_ids) u (id));
      exit when v_level = '{}';
      v_ids := v_ids || v_level;
      v_depths := v_depths || array_fill(v_depth, array[cardinality(v_level)]);
      v_depth := v_depth + sign(v_depth)::integer;
    end loop;
  end loop;
  v_level := array(select u.id from unnest(v_ids) u (id) order by u.id);
  return query
    select u.id, n.id, u.depth, j.task, case when j.id is null then 'deleted' else j.state end
    from unnest(v_ids, v_depths) u (id, depth)
    left join lateral (select j.id, case when x.is_seen then j.task end as task, case when x.is_seen then j.state end as state
                       from queue.jobs j cross join lateral (select queue._covers(v_limits, j.queue) as is_seen) x where j.id = u.id offset 0) j on true
    left join lateral (select n.id from queue._neighbours(u.id, false) n (id) where v_level[width_bucket(n.id, v_level)] = n.id) n on true
    order by u.depth, u.id, n.id;
end $$;
comment on function queue.graph(bigint) is
  'The jobs that a job needs and those that need it, recursively: a row for each need of each job (need_id NULL: it has none), with the job''s task and state. depth: 0 the job itself, -1 what it needs, -2 what these need, 1 what needs it, and so on, by the shortest way.';

-- What a job needs, or what needs it, of admitted jobs; of the job itself also before it is admitted.
create or replace function queue._neighbours(p_id bigint, p_dependents boolean)
returns table (id bigint) language plpgsql stable parallel safe security invoker rows 5 as $$
#variable_conflict use_column
begin
  if p_dependents then
    return query select d.job_id from queue.need d where d.need_id = p_id;
  else
    return query select d.id from queue._direct_needs(p_id) d;
  end if;
end $$;
