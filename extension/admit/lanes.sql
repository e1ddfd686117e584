-- Lanes: the place of a ready job in queue.active_job. Everything here runs under the admission lock.
-- Tests: admit/admission.sql, work/fetch.sql.

-- Computes the place of jobs in queue.active_job: lane, order key, flags and attempts so far, in the order of
-- ids. Creates missing lanes. all_flags: the flags that any of the jobs has. is_low: one of them lies below
-- its lane's low mark. has_tags: one of them goes to a lane with tags, where the deadline is not its place
-- (admit/shares.sql). The flag mutex stands for the semaphore 'm' || lock, which ordered jobs of a mixed lock
-- use, too.
-- offset 0 keeps the planner from repeating a look-up at each use of its result.
create or replace function queue._queue_entries(
  p_ids bigint[], out ids bigint[], out lanes integer[], out deadlines timestamptz[], out flags smallint[],
  out attempts smallint[],
  out all_flags integer, out is_low boolean, out has_tags boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_queues text[];
  v_priorities integer[];
  v_kinds smallint[];
  v_high_need_id bigint := coalesce(pg_sequence_last_value('queue.needed_seq'), 0);
  v_is_complete boolean;
  v_begins boolean[];  -- the job has a share, and its lanes have no tags yet
begin
  for v_pass in 1 .. 2 loop
    select array_agg(x.id), array_agg(x.deadline), array_agg(x.flags), array_agg(x.attempts),
      array_agg(x.queue), array_agg(x.priority), array_agg(x.kind), array_agg(x.lane),
      bool_and(x.lane is not null and not x.begins_tags), bit_or(x.flags), bool_or(x.is_low),
      array_agg(x.begins_tags), bool_or(x.tag_base is not null)
    into ids, deadlines, flags, attempts, v_queues, v_priorities, v_kinds, lanes, v_is_complete, all_flags,
      is_low, v_begins, has_tags
    from (
      select x.id, x.deadline, (x.flags | coalesce(l.extra_flags, 0))::smallint as flags, x.attempts, x.queue,
        x.priority, x.kind, l.lane, l.tag_base,
        x.has_share and l.tag_base is null and x.kind < {{lane_crashed}} as begins_tags,
        l.is_idle or (x.deadline, x.id) < (l.low_deadline, l.low_id) as is_low
      from (
        select y.id, y.deadline, y.queue, y.priority, y.attempts, y.flags | y.mixed as flags,
          y.options is not null and y.options ? 'share' as has_share,
          (case when y.has_crashed then {{lane_crashed}}
                when (y.flags | y.mixed) & ({{mutex}} | {{keys}} | {{expires}} | {{until_start}}
                  | {{until_finish}}) <> 0 or y.flags & {{needs}} <> 0
                  and queue._needs_mode(y.options) & {{any}} <> 0
                  or exists (select from queue.queue_config c
                    where c.queue = y.queue and {{has_limit}})
                then {{lane_limited}} else {{lane_plain}} end)::smallint as kind
        from (
          select j.id, coalesce(j.deadline, 'infinity') as deadline, j.queue, j.priority,
            least(j.attempts, 32766)::smallint as attempts,
            j.flags & (case when j.lock is null then 0 else {{lock}} end
              | {{keys}} | {{needs}} | {{expires}} | {{lease}} | {{until_start}} | {{retain}}
              | {{needed}} | {{until_finish}} | {{large}})
              | case when j.is_overridden then {{overridden}} else 0 end
              | case when j.id <= v_high_need_id and (select d.job_id from queue.need d
                where d.need_id = j.id limit 1) is not null then {{needed}} else 0 end as flags,
            j.options, j.crashes > 0 as has_crashed,
            case when j.flags & {{ordered}} <> 0
                   and (select m.id from queue.lock_member m
                     where m.lock = j.lock and m.is_mutex limit 1) is not null
                 then {{mutex}} else 0 end as mixed
          from (select distinct u.id from unnest(p_ids) u (id)) u
          cross join lateral (
            select j.id, j.deadline, j.queue, j.priority, j.attempts, j.flags, j.lock, j.is_overridden,
              j.options, j.crashes
            from queue.job_now j where j.id = u.id offset 0) j offset 0) y offset 0) x
      left join lateral (
        select l.lane, l.extra_flags, l.is_idle, l.low_deadline, l.low_id, l.tag_base
        from queue.lane l
        where l.queue = x.queue and l.priority = x.priority and l.kind = x.kind limit 1) l on true
      order by x.id) x;
    exit when v_is_complete is not false;
    perform queue._begin_tags(u.queue, u.priority)
    from (select distinct u.queue, u.priority from unnest(v_queues, v_priorities, v_begins)
            u (queue, priority, begins) where u.begins) u
    where not exists (select from queue.lane l
      where l.queue = u.queue and l.priority = u.priority and l.tag_base is not null);
    insert into queue.lane (lane, queue, priority, kind, paused_until, extra_flags, tag_base)
    select queue._new_lane(), u.queue, u.priority, u.kind, queue._paused_until(u.queue),
      case when exists (select from queue.queue_config c where c.queue = u.queue and c.retain is not null)
        then {{retain}} else 0 end,
      case when u.kind < {{lane_crashed}} then coalesce((select max(l.tag_base) from queue.lane l
        where l.queue = u.queue and l.priority = u.priority),
        case when u.begins then '{{first_tag}}'::timestamptz end) end
    from (select u.queue, u.priority, u.kind,
            bool_or(bool_or(u.begins)) over (partition by u.queue, u.priority) as begins
          from unnest(v_queues, v_priorities, v_kinds, lanes, v_begins)
            u (queue, priority, kind, lane, begins)
          group by u.queue, u.priority, u.kind having bool_or(u.lane is null)) u;
  end loop;
end $$;

-- A number for a new lane; numbers of dropped lanes are used again.
create or replace function queue._new_lane()
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_lane integer;
begin
  loop
    v_lane := nextval('queue.lane_seq');
    exit when not exists (select from queue.lane l where l.lane = v_lane);
  end loop;
  return v_lane;
end $$;

-- The ready and running jobs of a queue.
create or replace function queue._active_jobs_of(p_queue text)
returns table (id bigint) language plpgsql stable parallel safe security invoker as $$
begin
  return query
    select aj.id from queue.lane l join queue.active_job aj on aj.lane = l.lane where l.queue = p_queue
    union all
    select aj.id from queue.active_job aj
    where aj.lane is null and (select j.queue from queue.job_now j where j.id = aj.id) = p_queue;
end $$;

-- Inserts jobs with their places into queue.active_job and lowers low marks. p_is_low: some of the jobs need
-- that. p_has_tags: has_tags of _queue_entries; NULL: not known.
create or replace function queue._make_ready(
  p_ids bigint[], p_lanes integer[], p_deadlines timestamptz[], p_flags smallint[], p_attempts smallint[],
  p_is_low boolean default true, p_has_tags boolean default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if coalesce(p_has_tags,
    exists (select from queue.lane l where l.lane = any (p_lanes) and l.tag_base is not null)) then
    p_deadlines := queue._tags(p_ids, p_lanes, p_deadlines);
    p_is_low := true;
  end if;
  insert into queue.active_job (id, deadline, lane, attempt, flags)
  select u.id, u.deadline, u.lane, u.attempt, u.flags
  from unnest(p_ids, p_deadlines, p_lanes, p_attempts, p_flags) u (id, deadline, lane, attempt, flags);
  if p_is_low then
    perform queue._lower_marks(p_lanes, p_deadlines, p_ids);
  end if;
end $$;

-- Lowers the low marks of lanes for keys that were inserted below them, (p_deadlines[i], p_ids[i]).
-- Locks: the caller holds the admission lock.
create or replace function queue._lower_marks(p_lanes integer[], p_deadlines timestamptz[], p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.lane l
  set low_deadline = least(u.deadline, l.low_deadline), is_idle = false,
    low_id = case when (u.deadline, u.id) < (l.low_deadline, l.low_id) then u.id else l.low_id end
  from (select distinct on (u.lane) u.lane, u.deadline, u.id
        from unnest(p_lanes, p_deadlines, p_ids) u (lane, deadline, id) order by u.lane, u.deadline, u.id) u
  where l.lane = u.lane and ((u.deadline, u.id) < (l.low_deadline, l.low_id) or l.is_idle);
end $$;

-- Raises the low marks of lanes past rows that are claimed or gone.
-- Locks: the caller holds the admission lock, so that no job is made ready meanwhile. The mark must not pass
-- a row whose claim another transaction rolls back. So it stops at the first row that is unclaimed in this
-- snapshot, as such a row is.
create or replace function queue._raise_marks(p_lanes integer[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_lane record;
begin
  for v_lane in
    select l.lane, l.low_deadline, l.low_id, f.deadline, f.id, k.high_id
    from queue.lane l
    cross join queue.cursor_now k
    left join lateral (
      select aj.deadline, aj.id from queue.active_job aj
      where {{is_ready}}
      order by aj.deadline, aj.id limit 1) f on true
    where l.lane = any (p_lanes)
  loop
    if v_lane.id is not null then
      if v_lane.id > v_lane.low_id + 100 or v_lane.deadline > v_lane.low_deadline then
        update queue.lane l set low_deadline = v_lane.deadline, low_id = v_lane.id where l.lane = v_lane.lane;
      end if;
    elsif v_lane.high_id > v_lane.low_id + 100 or v_lane.low_deadline < 'infinity' then
      update queue.lane l set low_deadline = 'infinity', low_id = v_lane.high_id + 1
      where l.lane = v_lane.lane;
    end if;
  end loop;
end $$;

-- If there are many lanes, marks those without ready jobs, so that fetch skips them, and removes empty ones.
-- Empty lanes of quarantined jobs are always removed, because fetch is slower while one exists.
-- Locks: the caller holds the admission lock, so that no job is made ready meanwhile. Jobs whose claim is
-- uncommitted count as ready, because the claim may be rolled back.
create or replace function queue._mark_idle_lanes()
returns void language plpgsql volatile parallel unsafe security invoker set enable_bitmapscan = off as $$
declare
  v_idle integer[];
  v_are_many boolean := (select count(*) from (select from queue.lane l where not l.is_idle limit 51) l) > 50;
begin
  if v_are_many or exists (select from queue.lane l where not l.is_idle and l.kind = {{lane_crashed}}) then
    update queue.lane l set is_idle = true
    where l.lane = any (array(
      select l.lane from queue.lane l
      where not l.is_idle and (v_are_many or l.kind = {{lane_crashed}})
        and (select aj.id from queue.active_job aj
             where {{is_ready}}
             order by aj.deadline, aj.id limit 1) is null
      limit 10000));
  end if;
  if (select count(*) from (select from queue.lane l where l.is_idle limit 1001) l) > 1000 then
    v_idle := array(
      select l.lane from queue.lane l
      where l.is_idle and (select aj.id from queue.active_job aj where aj.lane = l.lane limit 1) is null
        limit 10000);
    delete from queue.lane l
    where l.lane = any (v_idle)
      and l.lane <> all (array(select distinct s.lane
        from (select unnest(s.lanes) as lane from queue.semaphore s where s.lanes <> '{}') s
                               where s.lane = any (v_idle)));
  end if;
end $$;
