-- The graph of jobs that need each other.
-- Tests: defer/defer_group.sql.

-- Raises: QJ001.
create or replace function queue.graph(id bigint)
returns table (job_id bigint, need_id bigint, depth integer, task text, state text)
language plpgsql stable parallel safe security definer rows 20
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_ids bigint[];
  v_depths integer[];
  v_allowed text[] := queue._allowed_queues('{operator,reader}');
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator,reader}', array[graph.id]);
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
    left join lateral (
      select j.id, case when x.is_seen then j.task end as task, case when x.is_seen then j.state end as state
      from queue.all_jobs j
      cross join lateral (select queue._allows(v_allowed, j.queue) as is_seen) x
      where j.id = u.id offset 0) j on true
    left join lateral (
      select n.id, n.id in (select x from unnest(v_ids) x) as is_in
      from queue._neighbours(u.id, false) n (id) offset 0) n on n.is_in
    order by u.depth, u.id, n.id;
end $$;
comment on function queue.graph(bigint) is
  'Returns the jobs that a job needs and those that need it, recursively: a row for each need of each job'
    ' (need_id NULL: it has none), with the job''s task and state. depth: 0 for the job itself, -1 for its'
    ' needs, -2 for their needs, 1 for jobs that need it, and so on, by the shortest path.';

-- Every job that a job needs, or that needs it, recursively, itself included, and its distance. A walk that
-- carried the distance would reach a job once per path. So it carries only ids, and reaches the nearest jobs
-- first: then a job is one step farther than the first job that led to it.
create or replace function queue._walk(p_id bigint, p_dependents boolean)
returns table (id bigint, depth integer) language plpgsql stable parallel safe security invoker rows 20 as $$
declare
  v_ids bigint[];
  v_edges record;
  v_from integer[];
  v_depths integer[] := array[0];
begin
  v_ids := array(
    with recursive walk (id) as (
      select p_id
      union
      select n.id from walk w cross join lateral queue._neighbours(w.id, p_dependents) n (id))
    select w.id from walk w);
  select array_agg(u.n) as places, array_agg(n.id) as ids into v_edges
  from unnest(v_ids) with ordinality u (id, n)
  cross join lateral queue._neighbours(u.id, p_dependents) n (id);
  v_from := queue._first_places(v_ids, v_edges.places, v_edges.ids);
  for i in 2 .. cardinality(v_ids) loop
    v_depths[i] := v_depths[v_from[i]] + 1;
  end loop;
  return query select u.id, u.depth from unnest(v_ids, v_depths) u (id, depth);
end $$;

-- The jobs that a job needs, or that need it: for admitted jobs; for the job itself also before it is
-- admitted.
create or replace function queue._neighbours(p_id bigint, p_dependents boolean)
returns table (id bigint) language plpgsql stable parallel safe security invoker rows 5 as $$
begin
  if p_dependents then
    return query select d.job_id from queue.need d where d.need_id = p_id;
  else
    return query select d.id from queue._direct_needs(p_id) d;
  end if;
end $$;
