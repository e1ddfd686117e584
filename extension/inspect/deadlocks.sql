-- Jobs that wait for each other. A yield that would cause this is refused (admit/cycles.sql), unless the
-- cycle leads over several locks. A job may also get another lock afterwards.

-- Checks whether jobs wait for each other. Each job waits for one other at a time, so a job from which enough
-- steps lead to no end is on a cycle, or waits for one. Each round below doubles the steps. It reads the
-- 10,000 oldest jobs that wait, of these 1,000 that have a lock and wait for a need, and from there 5,000
-- jobs.
create or replace function queue._health_of_deadlocks()
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 1 as $$
declare
  v_ids bigint[];
  v_awaited bigint[];
  v_begins bigint[];
  v_ends bigint[];
  v_path bigint[];
  v_n integer;
begin
  with recursive start as materialized (
    select w.id
    from (select w.id, w.reason from queue.waiting w order by w.id limit 10000) w
    cross join lateral (
      select from queue.job_now j where j.id = w.id and j.lock is not null offset 0) j
    where w.reason = 'needs' limit 1000),
  walk (id, awaited) as (
    select s.id, queue._awaited_job(s.id) from start s
    union
    select w.awaited, queue._awaited_job(w.awaited) from walk w where w.awaited is not null)
  select array_agg(w.id), array_agg(w.awaited) into v_ids, v_awaited
  from (select w.id, w.awaited from walk w where w.awaited is not null limit 5000) w;
  v_begins := v_ids;
  v_ends := v_awaited;
  for v_round in 1 .. 13 loop
    exit when v_begins is null;
    select array_agg(a.id), array_agg(b.awaited) into v_begins, v_ends
    from unnest(v_begins, v_ends) a (id, awaited) join unnest(v_begins, v_ends) b (id, awaited)
      on b.id = a.awaited;
  end loop;
  select count(distinct u.id), array[min(u.id)] into v_n, v_path from unnest(v_ends) u (id);
  while v_n > 0 and (cardinality(v_path) = 1 or v_path[cardinality(v_path)] <> v_path[1]) loop
    v_path := v_path || v_awaited[array_position(v_ids, v_path[cardinality(v_path)])];
  end loop;
  name := 'deadlocks';
  status := case when v_n > 0 then 'fail' else 'ok' end;
  detail := case
    when v_n > 0 then format('%s wait for each other: %s%s', queue._count_of(v_n, 'job'),
      array_to_string(v_path[:20], ' -> '),
      case when cardinality(v_path) > 20 then ' -> ...' when cardinality(v_path) <= v_n then ', ...'
        else '' end)
    when cardinality(v_ids) >= 1000
      or (select count(*) from (select from queue.waiting limit 10000) w) = 10000
      then 'none of the oldest jobs wait for each other'
    else 'no jobs wait for each other' end;
  fix := case when v_n > 0 then 'Cancel one of them: select queue.cancel(id)' end;
  return next;
end $$;

-- The job for which another one waits now: a need, or the one that has the turn at its lock; or NULL.
create or replace function queue._awaited_job(p_id bigint)
returns bigint language plpgsql stable parallel safe security invoker as $$
declare
  v_id bigint;
begin
  select case w.reason when 'needs' then coalesce(w.need_id, (
      select d.need_id from queue.need_now d
      where d.job_id = p_id and d.mode & {{ended}} <> 0 and d.class = 'p' limit 1)) end
  into v_id from queue.waiting w where w.id = p_id;
  if found or exists (
    select from queue.unsettled h where h.job_id = p_id and h.kind in ('ended', 'again')) then
    return v_id;
  end if;
  return (
    select queue._turn_of(m.lock, m.id)
    from queue.job_now j join queue.lock_member m on m.lock = j.lock and m.id = j.id
    where j.id = p_id and m.is_passed and not exists (select from queue.active_job aj where aj.id = p_id));
end $$;
