-- Deadlines: a job passes its deadline on to the jobs that it needs.

-- Passes deadlines on to the unfinished needs of jobs, recursively, only ever to make them earlier. Stops at
-- jobs whose deadline is already earlier, because they have passed it on.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked. If another transaction
-- has locked a row, it may hold queue.job_override for long: such jobs are returned for a recheck.
-- Why no wake-up is lost: keys whose waiting jobs have another order now, in which a lighter one may come
-- first, are handed over to the next admission.
create or replace function queue._propagate_deadline(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
  v_deadlines timestamptz[];
  v_locked bigint[];
  v_shut bigint[];
  v_lanes integer[];
  v_low_deadlines timestamptz[];
  v_low_ids bigint[];
  v_moved record;
begin
  with recursive spread (id, deadline) as (
    select u.id, j.deadline
    from unnest(p_ids) u (id)
    cross join lateral (
      select j.deadline from queue.job_now j where j.id = u.id offset 0) j
    where j.deadline < 'infinity'
    union
    select d.need_id, x.deadline
    from spread x
    cross join lateral (select d.need_id from queue.need d where d.job_id = x.id offset 0) d
    cross join lateral (
      select coalesce(j.deadline, 'infinity') as deadline
      from queue.job_now j where j.id = d.need_id offset 0) n
    left join lateral (select f.id from queue.finished f where f.id = d.need_id offset 0) f on true
    where n.deadline > x.deadline and f.id is null)
  select array_agg(x.id order by x.id), array_agg(x.deadline order by x.id) into v_ids, v_deadlines
  from (
    select x.id, min(x.deadline) as deadline from spread x
    group by x.id) x
  cross join lateral (
    select coalesce(j.deadline, 'infinity') as deadline
    from queue.job_now j where j.id = x.id offset 0) j
  where x.deadline < j.deadline;
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
  -- or the planner may read all jobs that wait for slots
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
    insert into queue.pending_settlement (job_id, kind, flags, payload)
    values (0, 'refill', 0, to_jsonb(v_moved.keys));
  end if;
end $$;
