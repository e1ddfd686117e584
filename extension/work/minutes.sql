-- Figures of each minute: how many jobs ended, and how long they waited and ran, by queue and task.
--
-- Maintenance counts the ends of jobs and attempts from their tables, in the order of finished_at, so that
-- workers do nothing for it. queue.minute_cursor says up to which time it has counted.
--
-- Why none is missed, and none counted twice: a session that ends a job reads the clock for finished_at late.
-- By then it has an xid and a writer's lock on queue.active_job, or it holds the admission lock. The count
-- holds the admission lock, reads the clock, and then looks for sessions with both of the former. If there
-- are none, all ends before that time are visible to the next statement. Otherwise it waits for just these.
-- Rows are removed only under the admission lock, and are counted before that if they have not been. If the
-- clock is set back, the minutes from then on are counted again; ends are missed only if it reaches the time
-- of the last count again before the next count.

-- Counts what has ended, for about p_budget, if 10 s have passed since it last looked, or if not all could be
-- counted then; and removes minutes older than 7 days.
-- Locks: the caller holds the admission lock, as do all writers of these tables.
-- Why no wake-up is lost: it wakes nobody; what is left stays uncounted, and the next call finds it.
create or replace function queue._count_minutes(p_budget interval, p_interval interval default '10 s')
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_start timestamptz := clock_timestamp();
  v_cursor record;
  v_to timestamptz;
  v_step interval := interval '1 minute';
  v_ends integer;
begin
  select k.counted_to, k.safe_at, k.looked_at into v_cursor from queue.minute_cursor k;
  if not found or v_cursor.counted_to >= v_cursor.safe_at and v_cursor.looked_at <= v_start
    and v_cursor.looked_at > v_start - p_interval then
    return;
  end if;
  v_cursor.safe_at := queue._look_for_ends();
  select k.counted_to into v_cursor.counted_to from queue.minute_cursor k;
  while v_cursor.counted_to < v_cursor.safe_at and clock_timestamp() <= v_start + p_budget loop
    v_to := least(v_cursor.counted_to + v_step, v_cursor.safe_at);
    v_ends := queue._number_of_ends(v_cursor.counted_to, v_to);
    if v_ends > 5000 and v_step > interval '1 ms' then
      v_step := v_step / 4;
      continue;
    elsif v_ends > 0 then
      perform queue._count_ends(v_cursor.counted_to, v_to);
    end if;
    v_cursor.counted_to := v_to;
    v_step := v_step * case when v_ends < 1000 then 2 else 1 end;
  end loop;
  update queue.minute_cursor k set counted_to = v_cursor.counted_to;
  delete from queue.minute m
  where m.ctid = any (array(
    select m.ctid from queue.minute m where m.minute < v_start - interval '7 days'
    order by m.minute limit 5000));
end $$;

-- Counts the ends of these jobs that are not counted yet, before their rows are removed. p_is_whole: their
-- attempts are removed, too.
-- Locks: the caller holds the admission lock.
create or replace function queue._count_ends_of(p_ids bigint[], p_is_whole boolean)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_from timestamptz;
begin
  select k.counted_to into v_from from queue.minute_cursor k;
  if exists (select from queue.finished f where f.id = any (p_ids) and f.finished_at >= v_from)
    or p_is_whole
    and exists (select from queue.attempt a where a.job_id = any (p_ids) and a.finished_at >= v_from) then
    perform queue._count_ends(v_from, 'infinity', p_ids, p_is_whole);
  end if;
end $$;

-- Returns the time before which every end of a job is visible to the next statement.
-- Locks: the caller holds the admission lock.
create or replace function queue._look_for_ends()
returns timestamptz language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now constant timestamptz := clock_timestamp();
  v_cursor record;
  v_open xid[];
begin
  select k.counted_to, k.safe_at, k.looked_at, k.open_xids into v_cursor from queue.minute_cursor k;
  if greatest(v_cursor.counted_to, v_cursor.safe_at, v_cursor.looked_at) > v_now then
    -- The clock was set back.
    delete from queue.minute m where m.minute >= date_trunc('minute', v_now, 'UTC');
    v_cursor.counted_to := least(v_cursor.counted_to, date_trunc('minute', v_now, 'UTC'));
    v_cursor.safe_at := '-infinity';
    v_cursor.looked_at := '-infinity';
    v_cursor.open_xids := '{}';
  end if;
  with l as materialized (
    select l.locktype, l.database, l.relation, l.transactionid, l.virtualtransaction, l.mode
    from pg_locks l
    where l.granted and l.pid is distinct from pg_backend_pid()
      and (l.locktype = 'transactionid' and l.mode = 'ExclusiveLock'
        or l.locktype = 'relation' and l.mode = 'RowExclusiveLock'))
  select coalesce(array_agg(x.transactionid), '{}') into v_open
  from l r join l x on x.virtualtransaction = r.virtualtransaction and x.locktype = 'transactionid'
  where r.locktype = 'relation' and r.relation = 'queue.active_job'::regclass
    and r.database = (select d.oid from pg_database d where d.datname = current_database());
  if v_open = '{}' then
    v_cursor.safe_at := v_now;
    v_cursor.looked_at := v_now;
  elsif not (v_cursor.open_xids && v_open) then
    -- All that were open at the last look have ended.
    v_cursor.safe_at := v_cursor.looked_at;
    v_cursor.looked_at := v_now;
  else
    v_open := v_cursor.open_xids;
  end if;
  update queue.minute_cursor k
  set (counted_to, safe_at, looked_at, open_xids)
    = (v_cursor.counted_to, v_cursor.safe_at, v_cursor.looked_at, v_open);
  return v_cursor.safe_at;
end $$;

-- How many jobs and attempts ended in this time, up to 5,001 of each.
create or replace function queue._number_of_ends(p_from timestamptz, p_to timestamptz)
returns integer language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select count(*)
    from (
      (select from queue.finished f where f.finished_at >= p_from and f.finished_at < p_to limit 5001)
      union all
      (select from queue.attempt a where a.finished_at >= p_from and a.finished_at < p_to limit 5001)) x);
end $$;

-- Adds to the minutes what ended in this time; with p_ids, only of these jobs. Its plan serves both, also if
-- an operation is the first to call it in a session.
-- Locks: the caller holds the admission lock.
create or replace function queue._count_ends(p_from timestamptz, p_to timestamptz,
  p_ids bigint[] default null, p_is_whole boolean default true)
returns void language plpgsql volatile parallel unsafe security invoker {{planner_brin}} as $$
begin
  with ended as materialized (
    -- A job that is deleted before its end is cancelled for an instant.
    select f.id, f.finished_at, case when f.worker_id is not null then f.started_at end as started_at,
      f.state, true as is_job
    from queue.finished f
    where p_ids is null and f.finished_at >= p_from and f.finished_at < p_to
      and f.reason is distinct from 'deleted'
    union all
    select a.job_id, a.finished_at, null, a.outcome, false from queue.attempt a
    where p_ids is null and a.finished_at >= p_from and a.finished_at < p_to
    union all
    select f.id, f.finished_at, case when f.worker_id is not null then f.started_at end, f.state, true
    from unnest(p_ids) u (id)
    cross join lateral (
      select f.id, f.finished_at, f.worker_id, f.started_at, f.state, f.reason from queue.finished f
      where f.id = u.id offset 0) f
    where f.finished_at >= p_from and f.reason is distinct from 'deleted'
    union all
    select a.job_id, a.finished_at, null, a.outcome, false
    from unnest(p_ids) u (id)
    cross join lateral (
      select a.job_id, a.finished_at, a.outcome from queue.attempt a where a.job_id = u.id offset 0) a
    where p_is_whole and a.finished_at >= p_from),
  -- Many rows are alike in all of these columns. Counting them first leaves few rows to sort.
  alike as (
    select date_trunc('minute', e.finished_at, 'UTC') as minute, j.queue collate "C" as queue,
      j.task collate "C" as task, e.state, e.is_job,
      case when e.started_at is not null
        then queue._class_of(e.started_at - coalesce(j.scheduled_at, j.created_at)) end as wait,
      queue._class_of(e.finished_at - e.started_at) as run, count(*) as n
    from ended e
    cross join lateral (
      select j.queue, j.task, j.scheduled_at, j.created_at from queue.job_now j where j.id = e.id offset 0) j
    where e.is_job or e.state in ('failed', 'crashed', 'timed_out')
    group by 1, 2, 3, 4, 5, 6, 7)
  insert into queue.minute as m (minute, queue, task, succeeded, failed, cancelled, failures, waits, runs)
  select a.minute, a.queue, a.task, coalesce(sum(a.n) filter (where a.is_job and a.state = 'succeeded'), 0),
    coalesce(sum(a.n) filter (where a.is_job and a.state = 'failed'), 0),
    coalesce(sum(a.n) filter (where a.is_job and a.state = 'cancelled'), 0),
    coalesce(sum(a.n) filter (where not a.is_job), 0),
    queue._counts_by_class(array_agg(a.wait), array_agg(a.n)),
    queue._counts_by_class(array_agg(a.run), array_agg(a.n))
  from alike a group by a.minute, a.queue, a.task
  on conflict on constraint minute_pkey do update
  set (succeeded, failed, cancelled, failures, waits, runs) = (m.succeeded + excluded.succeeded,
    m.failed + excluded.failed, m.cancelled + excluded.cancelled, m.failures + excluded.failures,
    queue._add_counts(m.waits, excluded.waits), queue._add_counts(m.runs, excluded.runs));
end $$;

-- The class of a time. There are ten classes for each power of ten, from 1 ms: the n-th begins at
-- 10 ** ((n - 1) / 10) ms, and its middle is at most 12.2 % away from each of its times. Shorter times are in
-- class 1, and times over 11 days in class 90.
create or replace function queue._class_of(p_time interval)
returns integer language plpgsql immutable parallel safe security invoker as $$
begin
  return least(90, 1 + floor(10 * log(greatest(date_part('epoch', p_time) * 1000, 1))));
end $$;

-- How many times are in each class, up to the last class that has any. p_classes[i]: the class of
-- p_numbers[i] times.
create or replace function queue._counts_by_class(p_classes integer[], p_numbers bigint[])
returns integer[] language plpgsql immutable parallel safe security invoker as $$
declare
  v_last integer := 0;
  v_counts integer[];
begin
  for v_place in 1 .. cardinality(p_classes) loop
    v_last := greatest(v_last, p_classes[v_place]);
  end loop;
  v_counts := array_fill(0, array[v_last]);
  for v_place in 1 .. cardinality(p_classes) loop
    if p_classes[v_place] is not null then
      v_counts[p_classes[v_place]] := v_counts[p_classes[v_place]] + p_numbers[v_place];
    end if;
  end loop;
  return v_counts;
end $$;

create or replace function queue._add_counts(p_counts integer[], p_others integer[])
returns integer[] language plpgsql immutable parallel safe security invoker as $$
declare
  v_sums integer[] := p_counts
    || array_fill(0, array[greatest(cardinality(p_others) - cardinality(p_counts), 0)]);
begin
  for v_class in 1 .. cardinality(p_others) loop
    if p_others[v_class] <> 0 then
      v_sums[v_class] := v_sums[v_class] + p_others[v_class];
    end if;
  end loop;
  return v_sums;
end $$;
