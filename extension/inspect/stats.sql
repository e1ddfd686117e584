-- Figures: how many jobs there are, how fast they run, how many should run at once.

-- Cost: it reads unfinished jobs and those that ended within the hour, not the rest.
create or replace function queue.stats()
returns table (
  queue text, task text, scheduled bigint, waiting bigint, upstream_failed bigint, blocked bigint,
  ready bigint, running bigint, held bigint,
  failed bigint, oldest_ready_for interval,
  succeeded_5m bigint, failed_5m bigint, cancelled_5m bigint, failures_5m bigint, per_second_5m numeric,
  wait_p50_5m interval, wait_p95_5m interval, wait_p99_5m interval, run_p50_5m interval, run_p95_5m interval,
  run_p99_5m interval,
  succeeded_1h bigint, failed_1h bigint, cancelled_1h bigint, failures_1h bigint, per_second_1h numeric,
  wait_p50_1h interval, wait_p95_1h interval, wait_p99_1h interval, run_p50_1h interval, run_p95_1h interval,
  run_p99_1h interval)
language plpgsql stable parallel safe security definer rows 50
set search_path = pg_catalog, pg_temp set jit = off as $$
declare
  v_now timestamptz := clock_timestamp();
  v_hour timestamptz := v_now - interval '1 hour';
  v_5m timestamptz := v_now - interval '5 minutes';
  v_allowed text[] := queue._allowed_queues('{operator,reader}');
begin
  {{installed}}
  return query
    select k.queue, k.task, coalesce(u.scheduled, 0), coalesce(u.waiting, 0), coalesce(u.upstream_failed, 0),
      coalesce(u.blocked, 0),
      coalesce(u.ready, 0), coalesce(u.running, 0), coalesce(u.held, 0), coalesce(b.failed, 0),
      v_now - u.oldest_ready_at, coalesce(d.succeeded_5m, 0), coalesce(d.failed_5m, 0),
      coalesce(d.cancelled_5m, 0), coalesce(a.failures_5m, 0), round(coalesce(d.n_5m, 0) / 300.0, 3),
      d.wait_5m[1], d.wait_5m[2], d.wait_5m[3], d.run_5m[1], d.run_5m[2], d.run_5m[3],
      coalesce(d.succeeded_1h, 0), coalesce(d.failed_1h, 0), coalesce(d.cancelled_1h, 0),
      coalesce(a.failures_1h, 0),
      round(coalesce(d.n_1h, 0) / 3600.0, 3),
      d.wait_1h[1], d.wait_1h[2], d.wait_1h[3], d.run_1h[1], d.run_1h[2], d.run_1h[3]
    from (
      select u.queue, u.task, count(*) filter (where u.state = 'scheduled') as scheduled,
        count(*) filter (where u.state = 'waiting') as waiting,
        count(*) filter (where u.state = 'upstream_failed') as upstream_failed,
        count(*) filter (where u.state = 'blocked') as blocked,
        count(*) filter (where u.state = 'ready') as ready, count(*)
          filter (where u.state = 'running') as running,
        count(*) filter (where u.state = 'held') as held, min(u.due_at)
          filter (where u.state = 'ready') as oldest_ready_at
      from queue.unfinished u group by u.queue, u.task) u
    full join (
      select j.queue, j.task, count(*) as failed
      from queue.finished f join queue.job_now j on j.id = f.id
      where f.state = 'failed' group by 1, 2) b on (b.queue, b.task) = (u.queue, u.task)
    full join (
      select x.queue, x.task, count(*) filter (where x.is_5m) as n_5m, count(*) as n_1h,
        count(*) filter (where x.state = 'succeeded' and x.is_5m) as succeeded_5m,
        count(*) filter (where x.state = 'succeeded') as succeeded_1h,
        count(*) filter (where x.state = 'failed' and x.is_5m) as failed_5m,
        count(*) filter (where x.state = 'failed') as failed_1h,
        count(*) filter (where x.state = 'cancelled' and x.is_5m) as cancelled_5m,
        count(*) filter (where x.state = 'cancelled') as cancelled_1h,
        percentile_cont('{0.5,0.95,0.99}'::double precision[]) within group (order by x.wait)
          filter (where x.is_5m) as wait_5m,
        percentile_cont('{0.5,0.95,0.99}'::double precision[]) within group (order by x.wait) as wait_1h,
        percentile_cont('{0.5,0.95,0.99}'::double precision[]) within group (order by x.run)
          filter (where x.is_5m) as run_5m,
        percentile_cont('{0.5,0.95,0.99}'::double precision[]) within group (order by x.run) as run_1h
      from (
        select j.queue, j.task, f.state, f.finished_at > v_5m as is_5m,
          f.finished_at - f.started_at as run,
          greatest(f.started_at - coalesce(j.scheduled_at, j.created_at), '0') as wait
        from queue.finished f join queue.job_now j on j.id = f.id
        where f.finished_at > v_hour) x
      group by x.queue, x.task) d on (d.queue, d.task) = (coalesce(u.queue, b.queue),
        coalesce(u.task, b.task))
    full join (
      select j.queue, j.task, count(*) as failures_1h,
        count(*) filter (where a.finished_at > v_5m) as failures_5m
      from queue.attempt a join queue.job_now j on j.id = a.job_id
      where a.finished_at > v_hour and a.outcome in ('failed', 'crashed', 'timed_out') group by 1, 2) a
      on (a.queue, a.task) = (coalesce(u.queue, b.queue, d.queue), coalesce(u.task, b.task, d.task))
    cross join lateral (
      select coalesce(u.queue, b.queue, d.queue, a.queue) as queue,
        coalesce(u.task, b.task, d.task, a.task) as task) k
    where v_allowed is null or queue._allows(v_allowed, k.queue)
    order by k.queue, k.task;
end $$;
comment on function queue.stats() is
  'Returns a row for each queue and task: its unfinished jobs by state, the failed jobs that are kept,'
    ' and how long the oldest ready job has been due; for the last 5 minutes and the last hour, the jobs'
    ' that ended, failed attempts (failures), jobs per second, and the percentiles of waiting (from due to'
    ' the last start) and running.';

-- The jobs that ended in the last 5 minutes tell how many slots they kept busy, and how long a job takes.
-- Running jobs may be one of hours among many of seconds, so they count only if none has ended.
-- Raises: 22023.
create or replace function queue.autoscale_hint(within interval default '1 minute')
returns table (queue text, ready bigint, running bigint, workers bigint, per_second numeric, run_for interval,
  slots integer)
language plpgsql stable parallel safe security definer rows 10
set search_path = pg_catalog, pg_temp set jit = off as $$
declare
  v_now timestamptz := clock_timestamp();
  v_5m timestamptz := v_now - interval '5 minutes';
  v_allowed text[] := queue._allowed_queues('{operator,reader}');
begin
  {{installed}}
  if autoscale_hint.within is null or autoscale_hint.within < interval '1 second' then
    perform queue._invalid('within must be at least a second',
      'Pass the time within which ready jobs should start.');
  end if;
  perform queue._check_interval('within', autoscale_hint.within);
  return query
    with u as materialized (
      select u.queue, count(*) filter (where u.state <> 'running') as ready,
        count(*) filter (where u.state = 'running') as running
      from queue.unfinished u
      where u.state in ('ready', 'running') or u.state = 'scheduled'
        and u.due_at <= v_now + autoscale_hint.within
      group by u.queue),
    r as (
      select j.queue, avg(v_now - aj.claimed_at) as run_for
      from queue.active_job aj join queue.job_now j on j.id = aj.id where aj.claim is not null
      group by j.queue),
    d as (
      select j.queue, count(*) / 300.0 as rate,
        avg(f.finished_at - f.started_at) as run_for,
        sum(extract(epoch from f.finished_at - greatest(f.started_at, v_5m))) / 300.0 as busy
      from queue.finished f join queue.job_now j on j.id = f.id
      where f.finished_at > v_5m and f.started_at is not null group by 1)
    select q.name, coalesce(u.ready, 0), coalesce(u.running, 0), w.n, round(coalesce(d.rate, 0), 3),
      x.run_for,
      least(c.max_running, 2147483647, ceil(
        greatest(coalesce(u.running, 0), d.busy)
        + coalesce(u.ready, 0) * least(1, extract(epoch from x.run_for) / extract(epoch
          from autoscale_hint.within))))::integer
    from (select u.queue as name from u union select d.queue from d union select c.queue
      from queue.queue_config c) q
    left join u on u.queue = q.name
    left join r on r.queue = q.name
    left join d on d.queue = q.name
    left join queue.queue_config c on c.queue = q.name
    cross join lateral (select coalesce(d.run_for, r.run_for, interval '1 second') as run_for) x
    cross join lateral (select queue._live_workers(q.name, v_now) as n) w
    where coalesce(queue._paused_until(q.name) <= v_now, true)
      and (v_allowed is null or queue._allows(v_allowed, q.name))
    order by q.name;
end $$;
comment on function queue.autoscale_hint(interval) is
  'Returns for each queue that is not paused how many jobs should run at once (slots), so that all jobs that'
    ' are ready, or become due within that time, start within it. slots is the number of running jobs, or the'
    ' average number of slots that the jobs which ended in the last 5 minutes kept busy, whichever is'
    ' greater; plus at most one for each ready job, according to how long jobs ran in these 5 minutes (if'
    ' none ended, how long the running ones have run; 1 second if none run).';
