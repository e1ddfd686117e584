-- Sizing: how many jobs of a queue should run at once.
-- Tests: inspect/stats.sql.

-- The jobs that ended in the last 5 minutes tell how many slots they kept busy, and how long a job takes.
-- Running jobs count only if none has ended, because one of hours may run among many of seconds.
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
    ' are ready, or become due within that time, start within it. slots is the number of running jobs or, if'
    ' that is greater, the average number of slots that the jobs which ended in the last 5 minutes kept'
    ' busy. At most one is added for each ready job, according to how long jobs ran in these 5 minutes (if'
    ' none ended, how long the running ones have run; 1 second if none run).';
