-- Cycles that the needs of a yield would close, also through a lock.
-- Tests: admit/cycles.sql, admit/cycles.two_yields.spec, admit/cycles.pending_yields.spec,
-- admit/cycles.lock.spec.

-- Raises: QJ005 if one of p_needs needs p_id.
create or replace function queue._refuse_cycle(p_id bigint, p_needs bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_pending record;
  v_path bigint[];
begin
  if p_needs = '{}' then
    return;
  end if;
  select y.jobs, y.needs into v_pending from queue._pending_yields() y;
  if queue._closes_cycle(p_id, p_needs, v_pending.jobs, v_pending.needs) then
    v_path := queue._cycle_path(p_id, p_needs, v_pending.jobs, v_pending.needs);
    raise exception using errcode = 'QJ005', message = 'the new need would create a dependency cycle',
      detail = 'path: ' || case when cardinality(v_path) <= 20 then array_to_string(v_path, ' -> ')
        else format('%s -> ... (%s more) -> %s', array_to_string(v_path[:10], ' -> '),
          cardinality(v_path) - 20, array_to_string(v_path[cardinality(v_path) - 9:], ' -> ')) end,
      hint = 'A job can''t need a job that needs it, directly or through others.';
  end if;
end $$;

-- A job keeps its place in its lock while it waits. So neither this job nor a job that needs it may wait for
-- a younger ordered job of its lock, or for a job that needs such a one.
-- Raises: QJ005 if they would by p_needs.
create or replace function queue._refuse_blocked_need(p_id bigint, p_needs bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_pending record;
  v_blocked record;
begin
  if p_needs = '{}' then
    return;
  end if;
  select y.jobs, y.needs, y.awaits into v_pending from queue._pending_yields() y;
  v_blocked := queue._blocked_need(p_id, p_needs, v_pending.jobs, v_pending.needs, v_pending.awaits);
  if v_blocked.id is not null then
    raise exception using errcode = 'QJ005', message = 'the new need would create a dependency cycle',
      detail = format('job %s waits behind job %s for lock %s', v_blocked.id, v_blocked.holder,
        v_blocked.lock),
      hint = 'A job keeps its place in its lock while it waits. Give the other job another lock, or none.';
  end if;
end $$;

-- The place in the sorted p_ids of the first that is not below p_id, or the place after the last.
-- width_bucket would copy the whole array each time.
create or replace function queue._place_in(p_ids bigint[], p_id bigint)
returns integer language plpgsql immutable parallel safe security invoker as $$
declare
  v_low integer := 1;
  v_high integer := cardinality(p_ids) + 1;
  v_middle integer;
begin
  while v_low < v_high loop
    v_middle := (v_low + v_high) / 2;
    if p_ids[v_middle] < p_id then
      v_low := v_middle + 1;
    else
      v_high := v_middle;
    end if;
  end loop;
  return v_low;
end $$;

-- For a job below p_needs (one of them, or needed by one) that waits in an ordered lock behind p_id or behind
-- a job that needs p_id: the holder. NULL if there is none. A mutex job waits for no place, and slots are
-- free meanwhile. Under any, a need does not hold its job up, but an awaited job does. The holder is an older
-- member of that lock. So if there is no older member, it does not walk over the jobs that need p_id, which
-- may be many.
-- p_jobs, p_more, p_awaits: additional needs that are not written yet, as _pending_yields returns them.
create or replace function queue._blocked_need(p_id bigint, p_needs bigint[], p_jobs bigint[],
  p_more bigint[], p_awaits boolean[], out id bigint, out holder bigint, out lock text)
language plpgsql stable parallel safe security invoker as $$
declare
  v_needed bigint[];
  v_needing bigint[];
  v_awaits boolean[];
begin
  if p_needs = '{}' or p_id > coalesce(pg_sequence_last_value('queue.needed_seq'), 0)
    and p_id = any (p_more) is not true
    and (select j.lock from queue.job_now j where j.id = p_id) is null then
    return;
  end if;
  select array_agg(y.need_id), array_agg(y.job_id), array_agg(y.awaits) into v_needed, v_needing, v_awaits
  from (
    select y.* from unnest(p_jobs, p_more, p_awaits) y (job_id, need_id, awaits) order by y.need_id) y;
  with recursive below (id) as (
    select n from unnest(p_needs) n
    union
    select d.id
    from below w
    cross join lateral (
      select j.needs, not j.ignores_needs and queue._needs_mode(j.options) & {{any}} = 0 as needs_all
      from queue.job_now j
      where j.id = w.id and not exists (select from queue.finished f where f.id = w.id) offset 0) j
    cross join lateral (
      (select d.need_id as id from queue.need d
       where d.job_id = w.id and case when d.mode & {{ended}} <> 0 then d.claim is not null
         else j.needs_all end offset 0)
      union all
      select n from unnest(j.needs) n where j.needs_all
      union all
      {{pending_needs}} and (j.needs_all or p_awaits[i])) d),
  blocked as materialized (
    select j.lock, max(j.id) as id
    from below b cross join lateral (
      select j.id, j.lock from queue.job_now j
      where j.id = b.id and j.lock is not null and j.flags & {{mutex}} = 0
        and not exists (select from queue.finished f where f.id = b.id) offset 0) j
    group by j.lock
    having (select m.id from queue.lock_member m where m.lock = j.lock and m.id < max(j.id)
      order by m.id desc limit 1) is not null),
  above (id) as (
    select p_id where exists (select from blocked)
    union
    select d.job_id
    from above a
    cross join lateral (
      select d.job_id, d.mode & {{ended}} <> 0 as awaits from queue.need d
      where d.need_id = a.id and (d.mode & {{ended}} = 0 or d.claim is not null)
      union all
      select v_needing[i], v_awaits[i] from generate_series(
        queue._place_in(v_needed, a.id), queue._place_in(v_needed, a.id + 1) - 1) i
      where v_needed is not null) d
    cross join lateral (select from queue.job_now j
      where j.id = d.job_id
        and (d.awaits or not j.ignores_needs and queue._needs_mode(j.options) & {{any}} = 0)
        and not exists (select from queue.finished f where f.id = d.job_id) offset 0) j)
  select b.id, j.id, b.lock into id, holder, lock
  from above a
  cross join lateral (
    select j.id, j.lock from queue.job_now j where j.id = a.id and j.lock is not null offset 0) j
  join blocked b on b.lock = j.lock and b.id > j.id
  order by b.id limit 1;
end $$;

-- Yields that are committed and not settled yet: jobs[i] will need needs[i], or await it (awaits[i]). Sorted
-- by jobs, because a walk looks for the needs of each job that it reaches.
create or replace function queue._pending_yields(out jobs bigint[], out needs bigint[], out awaits boolean[])
language plpgsql stable parallel safe security invoker as $$
begin
  select array_agg(h.job_id order by h.job_id, n.id::bigint),
    array_agg(n.id::bigint order by h.job_id, n.id::bigint),
    array_agg(h.payload ? 'awaits' order by h.job_id, n.id::bigint)
  into jobs, needs, awaits
  from queue.unsettled h cross join lateral jsonb_array_elements_text(h.payload -> 'needs') n (id)
  where h.kind = 'again' and h.xid > {{shelved}};
end $$;

-- Whether one of p_needs needs p_id, directly or indirectly. Needs that have succeeded count: they may be
-- retried.
-- p_jobs, p_more: additional needs that are not written yet, as _pending_yields returns them.
create or replace function queue._closes_cycle(p_id bigint, p_needs bigint[], p_jobs bigint[],
  p_more bigint[])
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  if p_needs = '{}' then
    return false;
  end if;
  return exists (
    with recursive walk (id) as (
      select n from unnest(p_needs) n
      union
      select d.id
      from walk w cross join lateral ({{all_needs}}) d
      where w.id <> p_id)
    select from walk w where w.id = p_id);
end $$;

-- The shortest cycle that p_needs would create: p_id, its need, and so on to p_id. A walk that carried the
-- distance would reach a job once for each distance. So it carries only ids, and reaches the nearest first:
-- then the first job that led to an id is on a shortest path to it. The walk ends when it reaches p_id.
create or replace function queue._cycle_path(p_id bigint, p_needs bigint[], p_jobs bigint[], p_more bigint[])
returns bigint[] language plpgsql stable parallel safe security invoker as $$
declare
  v_id bigint;
  v_ids bigint[];
  v_edges record;
  v_from integer[];
  v_place integer;
  v_back bigint[] := array[p_id];
begin
  for v_id in
    with recursive walk (id) as (
      select n from unnest(p_needs) n
      union
      select d.id from walk w cross join lateral ({{all_needs}}) d)
    select w.id from walk w
  loop
    v_ids := v_ids || v_id;
    exit when v_id = p_id;
  end loop;
  select array_agg(w.n) as places, array_agg(d.id) as ids into v_edges
  from unnest(v_ids) with ordinality w (id, n) cross join lateral ({{all_needs}}) d;
  v_from := queue._first_places(v_ids, v_edges.places, v_edges.ids);
  v_place := cardinality(v_ids);
  while v_place > cardinality(p_needs) loop
    v_place := v_from[v_place];
    v_back := v_back || v_ids[v_place];
  end loop;
  return p_id || array(select v_back[i] from generate_series(cardinality(v_back), 1, -1) i);
end $$;

-- For each id of a walk that reaches the nearest first, the place of the first that led to it; NULL for those
-- where it began. The id at p_from[i] led to p_to[i].
create or replace function queue._first_places(p_ids bigint[], p_from bigint[], p_to bigint[])
returns integer[] language plpgsql stable parallel safe security invoker as $$
begin
  return array(
    select x.first_from
    from (
      select y.n, min(y.from_n) over (partition by y.id) as first_from
      from (
        select u.id, u.n, null::bigint as from_n from unnest(p_ids) with ordinality u (id, n)
        union all
        select e.id, null, e.n from unnest(p_to, p_from) e (id, n)) y) x
    where x.n is not null
    order by x.n);
end $$;
