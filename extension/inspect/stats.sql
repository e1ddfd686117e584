-- Statistics: how many jobs there are, and how fast they run.

-- Cost: it reads unfinished jobs, failed ones, and those that ended within the hour.
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
  'Returns a row for each queue and task: its unfinished jobs by state, the failed jobs that are kept, and'
    ' how long the oldest ready job has been due. For the last 5 minutes and the last hour it adds the jobs'
    ' that ended, failed attempts (failures), jobs per second, and the percentiles of waiting (from due to'
    ' the last start) and running.';
