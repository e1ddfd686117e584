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
    if v_id is not null and jsonb_typeof(v_job) = 'object' then
      perform queue._check_types('a job', v_job);
      v_job := v_job || jsonb_build_object('needs', jsonb_build_array(v_id) || coalesce(nullif(v_job -> 'needs', 'null'), '[]'));
    end if;
    v_id := queue.defer_many(jsonb_build_array(v_job));
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
  v_ids bigint[];
  v_depths integer[];
  v_limits text[] := queue._limits('{operator,reader}');
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator,reader}', array[graph.id]);
  end if;
  if not exists (select from queue.job j where j.id = graph.id) then
    perform queue._job_not_found(graph.id);
  end if;
  select array_agg(u.id), array_agg(u.depth) into v_ids, v_depths
  from (select w.id, -w.depth as depth from queue._walk(graph.id, false) w
        union all
        select w.id, w.depth from queue._walk(graph.id, true) w where w.depth > 0) u;
  return query
    select u.id, n.id, u.depth, j.task, case when j.id is null then 'deleted' else j.state end
    from unnest(v_ids, v_depths) u (id, depth)
    left join lateral (select j.id, case when x.is_seen then j.task end as task, case when x.is_seen then j.state end as state
                       from queue.jobs j cross join lateral (select queue._covers(v_limits, j.queue) as is_seen) x where j.id = u.id offset 0) j on true
    left join lateral (select n.id, n.id in (select x from unnest(v_ids) x) as is_in from queue._neighbours(u.id, false) n (id) offset 0) n on n.is_in
    order by u.depth, u.id, n.id;
end $$;
comment on function queue.graph(bigint) is
  'The jobs that a job needs and those that need it, recursively: a row for each need of each job (need_id NULL: it has none), with the job''s task and state. depth: 0 the job itself, -1 what it needs, -2 what these need, 1 what needs it, and so on, by the shortest way.';

-- Every job that a job needs, or that needs it, recursively, itself too, and how many steps away it is.
-- A walk that carried its steps would come to a job by each way that leads there. So it carries ids alone, and comes
-- to them nearest first: then a job is one step farther than the first of those that it was found from.
create or replace function queue._walk(p_id bigint, p_dependents boolean)
returns table (id bigint, depth integer) language plpgsql stable parallel safe security invoker rows 20 as $$
#variable_conflict use_column
declare
  v_ids bigint[];
  v_from integer[];
  v_depths integer[] := array[0];
begin
  v_ids := array(
    with recursive walk (id) as (
      select p_id
      union
      select n.id from walk w cross join lateral queue._neighbours(w.id, p_dependents) n (id))
    select w.id from walk w);
  v_from := array(
    select x.first_from
    from (
      select y.n, min(y.from_n) over (partition by y.id) as first_from
      from (
        select u.id, u.n, null::bigint as from_n from unnest(v_ids) with ordinality u (id, n)
        union all
        select n.id, null, u.n from unnest(v_ids) with ordinality u (id, n) cross join lateral queue._neighbours(u.id, p_dependents) n (id)) y) x
    where x.n is not null
    order by x.n);
  for i in 2 .. cardinality(v_ids) loop
    v_depths[i] := v_depths[v_from[i]] + 1;
  end loop;
  return query select u.id, u.depth from unnest(v_ids, v_depths) u (id, depth);
end $$;

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
