-- History: what happened in the last hours, from the figures of each minute (work/minutes.sql).
-- Tests: work/minutes.sql.

-- Cost: it reads a row for each minute in which jobs of a queue and task ended.
-- Raises: 22023.
create or replace function queue.series(within interval default '6 hours', step interval default '5 minutes',
  queue text default null, task text default null)
returns table (at timestamptz, succeeded bigint, failed bigint, cancelled bigint, failures bigint,
  wait_p50 interval, wait_p95 interval, run_p50 interval, run_p95 interval)
language plpgsql stable parallel safe security definer rows 100
set search_path = pg_catalog, pg_temp set jit = off as $$
declare
  v_step interval;
  v_from timestamptz;
  v_to timestamptz;
  v_allowed text[] := queue._allowed_queues('{operator,reader}');
begin
  {{installed}}
  perform queue._check_within(series.within);
  if (extract(epoch from series.step) between 60 and extract(epoch from series.within)
    and mod(extract(epoch from series.step), 60) = 0) is not true then
    perform queue._invalid('step is out of range', 'Pass whole minutes, at least one, at most within.',
      'step: ' || coalesce(series.step::text, 'NULL'));
  end if;
  v_step := make_interval(secs => extract(epoch from series.step)::double precision);
  v_from := date_bin(v_step, clock_timestamp() - series.within, '2001-01-01Z') + v_step;
  select k.counted_to into v_to from queue.minute_cursor k;
  return query
    with m as materialized (
      select date_bin(v_step, m.minute, '2001-01-01Z') as at, m.succeeded, m.failed, m.cancelled, m.failures,
        m.waits, m.runs
      from queue.minute m
      where m.minute >= v_from and m.minute < v_to
        and (series.queue is null or m.queue = series.queue
          or right(series.queue, 1) = '*' and starts_with(m.queue, left(series.queue, -1)))
        and (series.task is null or m.task = series.task)
        and (v_allowed is null or queue._allows(v_allowed, m.queue))),
    sums as (
      select m.at, sum(m.succeeded) as succeeded, sum(m.failed) as failed, sum(m.cancelled) as cancelled,
        sum(m.failures) as failures
      from m group by m.at),
    times as (
      select c.at, c.what, array_agg(c.class order by c.class) as classes,
        array_agg(c.n order by c.class) as counts
      from (select m.at, x.what, u.class, sum(u.n) as n
            from m cross join lateral (values ('wait', m.waits), ('run', m.runs)) x (what, counts)
            cross join lateral unnest(x.counts) with ordinality u (n, class)
            where u.n > 0 group by 1, 2, 3) c
      group by c.at, c.what)
    select s.at, coalesce(x.succeeded, 0), coalesce(x.failed, 0), coalesce(x.cancelled, 0),
      coalesce(x.failures, 0),
      queue._percentile(w.classes, w.counts, 0.5), queue._percentile(w.classes, w.counts, 0.95),
      queue._percentile(r.classes, r.counts, 0.5), queue._percentile(r.classes, r.counts, 0.95)
    from generate_series(v_from, v_to, v_step) s (at)
    left join sums x on x.at = s.at
    left join times w on w.at = s.at and w.what = 'wait'
    left join times r on r.at = s.at and r.what = 'run'
    where s.at < v_to order by s.at;
end $$;
comment on function queue.series(interval, interval, text, text) is
  'Returns what happened within a time (at most 7 days), a row for each step (whole minutes, in UTC): the'
    ' jobs that ended, by state; their attempts that failed, crashed or timed out (failures); and the'
    ' percentiles of waiting (from due to the last start) and of the last runs. The percentiles are off by'
    ' 12 % at most; times below 1.3 ms count as 1.1 ms. queue: a name or prefix*; task: a name. Maintenance'
    ' counts ends about 10 seconds later, and the last step may not be over.';

-- Cost: as series. Raises: 22023.
create or replace function queue.task_stats(within interval default '1 day')
returns table (task text, succeeded bigint, failed bigint, cancelled bigint, failures bigint,
  failure_rate numeric, wait_p50 interval, wait_p95 interval, run_p50 interval, run_p95 interval)
language plpgsql stable parallel safe security definer rows 50
set search_path = pg_catalog, pg_temp set jit = off as $$
declare
  v_from timestamptz;
  v_allowed text[] := queue._allowed_queues('{operator,reader}');
begin
  {{installed}}
  perform queue._check_within(task_stats.within);
  v_from := clock_timestamp() - task_stats.within;
  return query
    with m as materialized (
      select m.task, m.succeeded, m.failed, m.cancelled, m.failures, m.waits, m.runs
      from queue.minute m
      where m.minute >= v_from and (v_allowed is null or queue._allows(v_allowed, m.queue))),
    times as (
      select c.task, c.what, array_agg(c.class order by c.class) as classes,
        array_agg(c.n order by c.class) as counts
      from (select m.task, x.what, u.class, sum(u.n) as n
            from m cross join lateral (values ('wait', m.waits), ('run', m.runs)) x (what, counts)
            cross join lateral unnest(x.counts) with ordinality u (n, class)
            where u.n > 0 group by 1, 2, 3) c
      group by c.task, c.what)
    select x.task collate "default", x.succeeded, x.failed, x.cancelled, x.failures,
      round(x.failures::numeric / nullif(x.failures + x.succeeded, 0), 4),
      queue._percentile(w.classes, w.counts, 0.5), queue._percentile(w.classes, w.counts, 0.95),
      queue._percentile(r.classes, r.counts, 0.5), queue._percentile(r.classes, r.counts, 0.95)
    from (
      select m.task, sum(m.succeeded) as succeeded, sum(m.failed) as failed, sum(m.cancelled) as cancelled,
        sum(m.failures) as failures
      from m group by m.task) x
    left join times w on w.task = x.task and w.what = 'wait'
    left join times r on r.task = x.task and r.what = 'run'
    order by x.task;
end $$;
comment on function queue.task_stats(interval) is
  'Returns for each task what happened within a time (at most 7 days), as queue.series. failure_rate: the'
    ' share of failures among failures and successes.';

-- Raises: 22023.
create or replace function queue._check_within(p_within interval)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if (extract(epoch from p_within) between 60 and 604800 and queue._is_bounded(p_within)) is not true then
    perform queue._invalid('within is out of range', 'Pass an interval from 1 minute to 7 days.',
      'within: ' || coalesce(p_within::text, 'NULL'));
  end if;
end $$;

-- The middle of the class at which this share of the times is reached; NULL if there are none. p_classes: the
-- classes that have times, ascending; p_counts: how many times each has.
create or replace function queue._percentile(p_classes bigint[], p_counts bigint[],
  p_share double precision)
returns interval language plpgsql immutable parallel safe security invoker as $$
declare
  v_left bigint := ceil(p_share * (select sum(n) from unnest(p_counts) n));
begin
  for v_place in 1 .. coalesce(cardinality(p_counts), 0) loop
    v_left := v_left - p_counts[v_place];
    if v_left <= 0 then
      return make_interval(
        secs => round(power(10, (p_classes[v_place] - 0.5) / 10), 3)::double precision / 1000);
    end if;
  end loop;
  return null;
end $$;
