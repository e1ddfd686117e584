-- Deadlines: a job passes its deadline on to the jobs that it needs.

-- Passes deadlines on to the unfinished needs of jobs, recursively, only ever to make them earlier. Stops at
-- jobs whose deadline is already earlier, because they have passed it on. What takes longer than 50 ms is
-- left to the next admission. p_takes: first these jobs take the earliest deadline of those that need them.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked. If another transaction
-- has locked a row, it may hold queue.job_override for long: such jobs are returned for a recheck.
-- Why no wake-up is lost: if a key's waiting jobs have another order now, a lighter one may come first. So
-- the key is handed over to the next admission. Jobs that make way are handed over, too.
create or replace function queue._propagate_deadline(p_ids bigint[], p_takes boolean default false)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_earlier record := queue._earlier_deadlines(p_ids, p_takes);
  v_ids constant bigint[] := v_earlier.ids;
  v_deadlines constant timestamptz[] := v_earlier.deadlines;
  v_locked bigint[];
  v_shut bigint[];
  v_lanes integer[];
  v_low_deadlines timestamptz[];
  v_low_ids bigint[];
  v_moved record;
  v_way record;
begin
  insert into queue.pending_settlement (job_id, kind, flags)
  select u.id, 'recheck', {{needed}} from unnest(v_earlier.rest) u (id);
  if v_ids is null then
    return;
  end if;
  v_locked := array(select aj.id from queue.active_job aj where aj.id = any (v_ids)
    order by aj.id for update skip locked);
  v_shut := array(select aj.id from queue.active_job aj where aj.id = any (v_ids) except select u.id
    from unnest(v_locked) u (id));
  insert into queue.pending_settlement (xid, job_id, kind, flags)
  select queue._row_locker(aj.xmax), u.id, 'recheck', {{needed}} from unnest(v_shut) u (id)
  left join queue.active_job aj on aj.id = u.id;
  insert into queue.job_override as s (id, deadline)
  select u.id, u.deadline
  from unnest(v_ids, v_deadlines) u (id, deadline)
  left join lateral (select f.id from queue.finished f where f.id = u.id offset 0) f on true
  where f.id is null and u.id <> all (v_shut)
  on conflict on constraint job_override_pkey do update set deadline = excluded.deadline;
  with moved as (
    update queue.active_job aj
    set deadline = case when aj.deadline < '{{end_of_tags}}' then aj.deadline
        else v_deadlines[width_bucket(aj.id, v_ids)] end,
      flags = aj.flags | {{overridden}}
    where aj.id = any (v_locked) and aj.claim is null
    returning aj.lane, aj.deadline, aj.id)
  select array_agg(m.lane), array_agg(m.deadline), array_agg(m.id) into v_lanes, v_low_deadlines, v_low_ids
  from moved m;
  if v_lanes is not null then
    perform queue._lower_marks(v_lanes, v_low_deadlines, v_low_ids);
  end if;
  -- || '' keeps the planner from an index whose condition is on reason.
  with moved as (
    update queue.waiting w
    set deadline = case when w.deadline < '{{end_of_tags}}' then w.deadline
        else v_deadlines[array_position(v_ids, w.id)] end,
      flags = w.flags | {{overridden}}
    where w.id = any (v_ids) and w.reason || '' = 'slot'
    returning w.key, w.lane, w.id, w.deadline)
  select array_agg(m.key) as keys, array_agg(m.lane) as lanes, array_agg(m.id) as ids,
    array_agg(m.deadline) as deadlines
  into v_moved from moved m where m.lane is not null;
  if v_moved.keys is not null then
    perform queue._add_slots(v_moved.keys, v_moved.lanes, null, null, null, v_moved.ids, v_moved.deadlines);
    v_way := queue._make_way(v_moved.keys);
    insert into queue.pending_settlement (job_id, kind, flags, payload)
    select 0, 'refill', 0, to_jsonb(v_moved.keys || v_way.keys)
    union all
    select u.id, 'again', 0, null from unnest(v_way.ids) u (id);
  end if;
end $$;

-- The earliest deadline of the unfinished jobs that need a job; NULL without one.
create or replace function queue._deadline_of_dependents(p_id bigint)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select min(j.deadline)
    from (select d.job_id from queue.need d where d.need_id = p_id offset 0) d
    cross join lateral (select j.deadline from queue.job_now j where j.id = d.job_id offset 0) j
    left join lateral (select f.id from queue.finished f where f.id = d.job_id offset 0) f on true
    where f.id is null);
end $$;

-- The jobs that unfinished jobs need, directly or not, and that get an earlier deadline from them. It goes
-- from all jobs to all their needs at once, so that a job passes on only the earliest of many deadlines, and
-- later only an earlier one. rest: those that it has come to after 20 rounds and 50 ms. p_takes: as for
-- _propagate_deadline.
create or replace function queue._earlier_deadlines(p_ids bigint[], p_takes boolean, out ids bigint[],
  out deadlines timestamptz[], out rest bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_until constant timestamptz := clock_timestamp() + interval '50 ms';
  v_rounds integer := 0;
  v_next record;
  v_found bigint[];
  v_found_deadlines timestamptz[];
begin
  select array_agg(u.id) as ids, array_agg(x.deadline) as deadlines into v_next
  from unnest(p_ids) u (id)
  cross join lateral (select j.deadline from queue.job_now j where j.id = u.id offset 0) j
  left join lateral (select f.id from queue.finished f where f.id = u.id offset 0) f on true
  cross join lateral (
    select least(j.deadline, case when p_takes then queue._deadline_of_dependents(u.id) end) as deadline) x
  where x.deadline < 'infinity' and f.id is null;
  if p_takes then
    select array_agg(u.id), array_agg(u.deadline) into v_found, v_found_deadlines
    from unnest(v_next.ids, v_next.deadlines) u (id, deadline)
    cross join lateral (select j.deadline from queue.job_now j where j.id = u.id offset 0) j
    where u.deadline < coalesce(j.deadline, 'infinity');
  end if;
  while v_next.ids is not null loop
    select array_agg(x.id) as ids, array_agg(x.deadline) as deadlines into v_next
    from (
      select y.id, min(y.deadline) filter (where y.is_new) as deadline,
        min(y.deadline) filter (where not y.is_new) as old_deadline
      from (
        select d.need_id as id, u.deadline, true as is_new
        from unnest(v_next.ids, v_next.deadlines) u (id, deadline)
        cross join lateral (select d.need_id from queue.need d where d.job_id = u.id offset 0) d
        cross join lateral (
          select coalesce(j.deadline, 'infinity') as deadline
          from queue.job_now j where j.id = d.need_id offset 0) n
        left join lateral (select f.id from queue.finished f where f.id = d.need_id offset 0) f on true
        where n.deadline > u.deadline and f.id is null
        union all
        select u.id, u.deadline, false from unnest(v_found, v_found_deadlines) u (id, deadline)) y
      group by y.id) x
    where x.deadline < coalesce(x.old_deadline, 'infinity');
    v_rounds := v_rounds + 1;
    if v_rounds > 20 and clock_timestamp() > v_until then
      rest := v_next.ids;
      exit;
    end if;
    v_found := v_found || v_next.ids;
    v_found_deadlines := v_found_deadlines || v_next.deadlines;
  end loop;
  select array_agg(x.id order by x.id), array_agg(x.deadline order by x.id) into ids, deadlines
  from (
    select u.id, min(u.deadline) as deadline
    from unnest(v_found, v_found_deadlines) u (id, deadline) group by u.id) x;
end $$;
