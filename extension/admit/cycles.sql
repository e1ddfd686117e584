-- Cycles that the needs of a yield would close, also by way of a lock.
-- Tests: admit/cycles.sql, admit/cycles.two_yields.spec, admit/cycles.lock.spec.

-- Raises: QJ005 if one of p_needs needs p_id.
create or replace function queue._refuse_cycle(p_id bigint, p_needs bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_pending record;
begin
  if p_needs = '{}' then
    return;
  end if;
  select y.jobs, y.needs into v_pending from queue._pending_yields() y;
  if queue._closes_cycle(p_id, p_needs, v_pending.jobs, v_pending.needs) then
    raise exception using errcode = 'QJ005', message = 'the new need would create a dependency cycle',
      detail = 'path: '
        || array_to_string(queue._cycle_path(p_id, p_needs, v_pending.jobs, v_pending.needs), ' -> '),
      hint = 'A job can''t need a job that needs it, directly or through others.';
  end if;
end $$;

-- A job keeps its place in its lock while it waits. So neither it nor a job that needs it may wait for a
-- younger ordered job of its lock, nor for a job that needs one.
-- Raises: QJ005 if p_needs would have it so.
create or replace function queue._refuse_blocked_need(p_id bigint, p_needs bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_pending record;
  v_blocked record;
begin
  select y.jobs, y.needs into v_pending from queue._pending_yields() y;
  v_blocked := queue._blocked_need(p_id, p_needs, v_pending.jobs, v_pending.needs);
  if v_blocked.id is not null then
    raise exception using errcode = 'QJ005', message = 'the new need would create a dependency cycle',
      detail = format('job %s waits behind job %s for lock %s', v_blocked.id, v_blocked.holder,
        v_blocked.lock),
      hint = 'A job keeps its place in its lock while it waits. Give the other job another lock, or none.';
  end if;
end $$;

-- A job below p_needs (one of them, or needed by one) that waits in an ordered lock behind p_id or behind a
-- job that needs p_id: the holder. NULL if there is none. A mutex job waits for no place, and slots are free
-- meanwhile. Under any, a need does not hold its job up.
-- p_jobs, p_more: additional needs that are not written yet.
create or replace function queue._blocked_need(p_id bigint, p_needs bigint[], p_jobs bigint[],
  p_more bigint[], out id bigint, out holder bigint, out lock text)
language plpgsql stable parallel safe security invoker as $$
begin
  if p_needs = '{}' or p_id > coalesce(pg_sequence_last_value('queue.needed_seq'), 0)
    and p_id = any (p_more) is not true
    and (select j.lock from queue.job_now j where j.id = p_id) is null then
    return;
  end if;
  with recursive below (id) as (
    select n from unnest(p_needs) n
    union
    select d.id
    from below b
    cross join lateral (
      select j.options, j.needs from queue.job_now j where j.id = b.id and not j.ignores_needs
        and not exists (select from queue.finished f where f.id = b.id) offset 0) j
    cross join lateral (
      (select d.need_id as id from queue.need d where d.job_id = b.id offset 0)
      union all
      select n from unnest(j.needs) n
      union all
      select y.need_id from unnest(p_jobs, p_more) y (job_id, need_id) where y.job_id = b.id) d
    where queue._needs_mode(j.options) & {{any}} = 0),
  blocked as materialized (
    select j.lock, max(j.id) as id
    from below b cross join lateral (
      select j.id, j.lock from queue.job_now j
      where j.id = b.id and j.lock is not null and j.flags & {{mutex}} = 0
        and not exists (select from queue.finished f where f.id = b.id) offset 0) j
    group by j.lock),
  above (id) as (
    select p_id where exists (select from blocked)
    union
    select d.job_id
    from above a
    cross join lateral (
      select d.job_id from queue.need d
      where d.need_id = a.id and (d.mode & {{ended}} = 0 or d.claim is not null)
      union all
      select y.job_id from unnest(p_jobs, p_more) y (job_id, need_id) where y.need_id = a.id) d
    cross join lateral (select from queue.job_now j
      where j.id = d.job_id and not j.ignores_needs and queue._needs_mode(j.options) & {{any}} = 0
        and not exists (select from queue.finished f where f.id = d.job_id) offset 0) j)
  select b.id, j.id, b.lock into id, holder, lock
  from above a
  cross join lateral (
    select j.id, j.lock from queue.job_now j where j.id = a.id and j.lock is not null offset 0) j
  join blocked b on b.lock = j.lock and b.id > j.id
  order by b.id limit 1;
end $$;

-- Yields that are committed and not settled yet: jobs[i] will need needs[i].
create or replace function queue._pending_yields(out jobs bigint[], out needs bigint[])
language plpgsql stable parallel safe security invoker as $$
begin
  select array_agg(h.job_id), array_agg(n.id::bigint) into jobs, needs
  from queue.pending_settlement h cross join lateral jsonb_array_elements_text(h.payload -> 'needs') n (id)
  where h.kind = 'again'
    and h.xid >= (select least(k.next_xid, k.in_flight[1]) from queue.cursor_now k);
end $$;

-- Whether one of p_needs needs p_id, directly or indirectly. Needs that have succeeded count: they may be
-- retried.
-- p_jobs, p_more: additional needs that are not written yet.
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
      from walk w
      cross join lateral (
        (select d.need_id as id from queue.need d where d.job_id = w.id offset 0)
        union all
        (select y.need_id from unnest(p_jobs, p_more) y (job_id, need_id) where y.job_id = w.id)
        union all
        (select n from (select j.needs from queue.job j where j.id = w.id offset 0) j
          cross join lateral unnest(j.needs) n)) d
      where w.id <> p_id)
    select from walk w where w.id = p_id);
end $$;

-- The shortest cycle that p_needs would create: p_id, its need, and so on to p_id.
create or replace function queue._cycle_path(p_id bigint, p_needs bigint[], p_jobs bigint[], p_more bigint[])
returns bigint[] language plpgsql stable parallel safe security invoker as $$
declare
  v_ids bigint[];
  v_depths integer[];
  v_path bigint[] := array[p_id];
  v_depth integer;
begin
  with recursive walk (id, depth) as (
    select n, 1 from unnest(p_needs) n
    union
    select d.id, w.depth + 1
    from walk w
    cross join lateral (
      select d.id from queue._direct_needs(w.id) d
      union
      select y.need_id from unnest(p_jobs, p_more) y (job_id, need_id) where y.job_id = w.id) d
    where w.id <> p_id and w.depth < 100000)
  select array_agg(w.id), array_agg(w.depth), min(w.depth) filter (where w.id = p_id)
  into v_ids, v_depths, v_depth from walk w;
  while v_depth > 1 loop
    v_depth := v_depth - 1;
    select w.id || v_path into v_path from unnest(v_ids, v_depths) w (id, depth)
    where w.depth = v_depth
      and (exists (select from queue._direct_needs(w.id) d where d.id = v_path[1])
           or exists (select from unnest(p_jobs, p_more) y (job_id, need_id)
             where y.job_id = w.id and y.need_id = v_path[1]))
    limit 1;
  end loop;
  return p_id || v_path;
end $$;
