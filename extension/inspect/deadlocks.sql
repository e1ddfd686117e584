-- Jobs that wait for each other. A yield after which they would is refused (admit/cycles.sql), but a job may
-- get another lock afterwards.

-- Checks whether jobs wait for each other. From each of the 100 oldest jobs that have a lock and wait for a
-- need, it goes on to the awaited one, at most 100 times.
create or replace function queue._health_of_deadlocks()
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 1 as $$
declare
  v_facts record;
begin
  name := 'deadlocks';
  with recursive start as materialized (
    select w.id
    from (select w.id, w.reason from queue.waiting w order by w.id limit 10000) w
    cross join lateral (
      select from queue.job_now j where j.id = w.id and j.lock is not null offset 0) j
    where w.reason = 'needs' limit 100),
  walk (path) as (
    select array[s.id] from start s
    union all
    select w.path || n.id
    from walk w
    cross join lateral (select queue._awaited_job(w.path[cardinality(w.path)]) as id) n
    where n.id <> all (w.path[2:]) and cardinality(w.path) < 100
      and (cardinality(w.path) = 1 or w.path[1] <> w.path[cardinality(w.path)]))
  select count(*) as n, min(array_to_string(w.path, ' -> ')) as path into v_facts
  from walk w
  where cardinality(w.path) > 1 and w.path[1] = w.path[cardinality(w.path)]
    and w.path[1] = (select min(u.id) from unnest(w.path) u (id));
  status := case when v_facts.n > 0 then 'fail' else 'ok' end;
  detail := case when v_facts.n > 0 then format('jobs that wait for each other: %s%s', v_facts.path,
    case when v_facts.n > 1 then format(', and %s more', v_facts.n - 1) else '' end)
    else 'no jobs wait for each other' end;
  fix := case when v_facts.n > 0 then 'Cancel one of them: select queue.cancel(id)' end;
  return next;
end $$;

-- The job for which another one waits now: a need, or the one that has the turn at its lock; or NULL.
create or replace function queue._awaited_job(p_id bigint)
returns bigint language plpgsql stable parallel safe security invoker as $$
declare
  v_id bigint;
begin
  select w.need_id into v_id from queue.waiting w where w.id = p_id and w.reason = 'needs';
  if found then
    return v_id;
  end if;
  return (
    select queue._turn_of(m.lock, m.id)
    from queue.job_now j join queue.lock_member m on m.lock = j.lock and m.id = j.id
    where j.id = p_id and m.is_passed and not exists (select from queue.active_job aj where aj.id = p_id));
end $$;
