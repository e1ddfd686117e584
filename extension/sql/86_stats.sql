-- Figures: what there is and how it goes, what is wrong with the database, how many jobs should run at once.

-- Cost: it reads what is unfinished and what ended within the hour, not the rest.
create or replace function queue.stats()
returns table (
  queue text, task text, scheduled bigint, waiting bigint, upstream_failed bigint, blocked bigint, ready bigint, running bigint, held bigint,
  failed bigint, oldest_ready_for interval,
  succeeded_5m bigint, failed_5m bigint, cancelled_5m bigint, failures_5m bigint, per_second_5m numeric,
  wait_p50_5m interval, wait_p95_5m interval, wait_p99_5m interval, run_p50_5m interval, run_p95_5m interval, run_p99_5m interval,
  succeeded_1h bigint, failed_1h bigint, cancelled_1h bigint, failures_1h bigint, per_second_1h numeric,
  wait_p50_1h interval, wait_p95_1h interval, wait_p99_1h interval, run_p50_1h interval, run_p95_1h interval, run_p99_1h interval)
language plpgsql stable parallel safe security definer rows 50
set search_path = pg_catalog, pg_temp set jit = off as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_hour timestamptz := v_now - interval '1 hour';
  v_5m timestamptz := v_now - interval '5 minutes';
  v_limits text[] := queue._limits('{operator,reader}');
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  return query
    select k.queue, k.task, coalesce(u.scheduled, 0), coalesce(u.waiting, 0), coalesce(u.upstream_failed, 0), coalesce(u.blocked, 0),
      coalesce(u.ready, 0), coalesce(u.running, 0), coalesce(u.held, 0), coalesce(b.failed, 0), v_now - u.oldest_ready_at,
      coalesce(d.succeeded_5m, 0), coalesce(d.failed_5m, 0), coalesce(d.cancelled_5m, 0), coalesce(a.failures_5m, 0),
      round(coalesce(d.n_5m, 0) / 300.0, 3),
      d.wait_5m[1], d.wait_5m[2], d.wait_5m[3], d.run_5m[1], d.run_5m[2], d.run_5m[3],
      coalesce(d.succeeded_1h, 0), coalesce(d.failed_1h, 0), coalesce(d.cancelled_1h, 0), coalesce(a.failures_1h, 0),
      round(coalesce(d.n_1h, 0) / 3600.0, 3),
      d.wait_1h[1], d.wait_1h[2], d.wait_1h[3], d.run_1h[1], d.run_1h[2], d.run_1h[3]
    from (
      select u.queue, u.task, count(*) filter (where u.state = 'scheduled') as scheduled, count(*) filter (where u.state = 'waiting') as waiting,
        count(*) filter (where u.state = 'upstream_failed') as upstream_failed, count(*) filter (where u.state = 'blocked') as blocked,
        count(*) filter (where u.state = 'ready') as ready, count(*) filter (where u.state = 'running') as running,
        count(*) filter (where u.state = 'held') as held, min(u.due_at) filter (where u.state = 'ready') as oldest_ready_at
      from queue.unfinished u group by u.queue, u.task) u
    full join (
      select coalesce(s.queue, j.queue) as queue, j.task, count(*) as failed
      from queue.finished f join queue.job j on j.id = f.id left join queue.job_state s on s.id = f.id
      where f.state = 'failed' group by 1, 2) b on (b.queue, b.task) = (u.queue, u.task)
    full join (
      select x.queue, x.task, count(*) filter (where x.is_5m) as n_5m, count(*) as n_1h,
        count(*) filter (where x.state = 'succeeded' and x.is_5m) as succeeded_5m, count(*) filter (where x.state = 'succeeded') as succeeded_1h,
        count(*) filter (where x.state = 'failed' and x.is_5m) as failed_5m, count(*) filter (where x.state = 'failed') as failed_1h,
        count(*) filter (where x.state = 'cancelled' and x.is_5m) as cancelled_5m, count(*) filter (where x.state = 'cancelled') as cancelled_1h,
        percentile_cont('{0.5,0.95,0.99}'::double precision[]) within group (order by x.wait) filter (where x.is_5m) as wait_5m,
        percentile_cont('{0.5,0.95,0.99}'::double precision[]) within group (order by x.wait) as wait_1h,
        percentile_cont('{0.5,0.95,0.99}'::double precision[]) within group (order by x.run) filter (where x.is_5m) as run_5m,
        percentile_cont('{0.5,0.95,0.99}'::double precision[]) within group (order by x.run) as run_1h
      from (
        select coalesce(s.queue, j.queue) as queue, j.task, f.state, f.finished_at > v_5m as is_5m, f.finished_at - f.started_at as run,
          greatest(f.started_at - coalesce(nullif(coalesce(s.scheduled_at, j.scheduled_at), '-infinity'), j.created_at), '0') as wait
        from queue.finished f join queue.job j on j.id = f.id left join queue.job_state s on s.id = f.id
        where f.finished_at > v_hour) x
      group by x.queue, x.task) d on (d.queue, d.task) = (coalesce(u.queue, b.queue), coalesce(u.task, b.task))
    full join (
      select coalesce(s.queue, j.queue) as queue, j.task, count(*) as failures_1h, count(*) filter (where a.finished_at > v_5m) as failures_5m
      from queue.attempt a join queue.job j on j.id = a.job_id left join queue.job_state s on s.id = a.job_id
      where a.finished_at > v_hour and a.outcome in ('failed', 'crashed', 'timed_out') group by 1, 2) a
      on (a.queue, a.task) = (coalesce(u.queue, b.queue, d.queue), coalesce(u.task, b.task, d.task))
    cross join lateral (select coalesce(u.queue, b.queue, d.queue, a.queue) as queue, coalesce(u.task, b.task, d.task, a.task) as task) k
    where v_limits is null or queue._covers(v_limits, k.queue)
    order by k.queue, k.task;
end $$;
comment on function queue.stats() is
  'A row for each queue and task: its unfinished jobs by state, the failed ones that are kept, for how long the oldest ready one has been due; and of the last 5 minutes and the last hour the jobs that ended, attempts that failed (failures), jobs per second, and the percentiles of waiting (from when it was due to its last start) and running.';

-- What ended in the last 5 minutes says how many slots it kept busy in them, and how long a job takes; what
-- runs may be the one job of hours among many of seconds, so it says that only where nothing has ended.
-- Raises: 22023.
create or replace function queue.autoscale_hint(within interval default '1 minute')
returns table (queue text, ready bigint, running bigint, workers bigint, per_second numeric, run_for interval, slots integer)
language plpgsql stable parallel safe security definer rows 10
set search_path = pg_catalog, pg_temp set jit = off as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_5m timestamptz := v_now - interval '5 minutes';
  v_limits text[] := queue._limits('{operator,reader}');
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  if autoscale_hint.within is null or autoscale_hint.within < interval '1 second' then
    perform queue._invalid('within must be at least a second', 'Say in which time what is ready should have been started.');
  end if;
  perform queue._check_interval('within', autoscale_hint.within);
  return query
    with u as materialized (
      select u.queue, count(*) filter (where u.state <> 'running') as ready, count(*) filter (where u.state = 'running') as running
      from queue.unfinished u
      where u.state in ('ready', 'running') or u.state = 'scheduled' and u.due_at <= v_now + autoscale_hint.within
      group by u.queue),
    r as (
      select l.queue, avg(v_now - v.claimed_at) as run_for
      from queue.live v join queue.lane l on l.lane = v.lane where v.claim is not null group by l.queue),
    d as (
      select coalesce(s.queue, j.queue) as queue, count(*) / 300.0 as rate, avg(f.finished_at - f.started_at) as run_for,
        sum(extract(epoch from f.finished_at - greatest(f.started_at, v_5m))) / 300.0 as busy
      from queue.finished f join queue.job j on j.id = f.id left join queue.job_state s on s.id = f.id
      where f.finished_at > v_5m and f.started_at is not null group by 1)
    select q.name, coalesce(u.ready, 0), coalesce(u.running, 0), w.n, round(coalesce(d.rate, 0), 3), x.run_for,
      least(c.max_running, 2147483647, ceil(
        greatest(coalesce(u.running, 0), d.busy)
        + coalesce(u.ready, 0) * least(1, extract(epoch from x.run_for) / extract(epoch from autoscale_hint.within))))::integer
    from (select u.queue as name from u union select d.queue from d union select c.queue from queue.queue_config c) q
    left join u on u.queue = q.name
    left join r on r.queue = q.name
    left join d on d.queue = q.name
    left join queue.queue_config c on c.queue = q.name
    cross join lateral (select coalesce(d.run_for, r.run_for, interval '1 second') as run_for) x
    cross join lateral (
      select count(*) as n from queue.worker w
      where w.gone_at is null and w.last_seen_at + w.dead_after >= v_now
        and (w.queues is null or exists (select from unnest(w.queues) p where queue._matches(q.name, p)))) w
    where coalesce(queue._paused_until(q.name) <= v_now, true) and (v_limits is null or queue._covers(v_limits, q.name))
    order by q.name;
end $$;
comment on function queue.autoscale_hint(interval) is
  'For each queue that is not paused: slots, how many jobs should run at once so that what is ready, or due within that time, starts within it: at least those that run, and those that what ended in the last 5 minutes kept busy; and more for what is ready, at most one each, by how long a job took in these 5 minutes (where none ended, by how long those that run have run; 1 second where none does).';

create or replace function queue.health()
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security definer rows 12
set search_path = pg_catalog, pg_temp set jit = off as $$
#variable_conflict use_column
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  return query select h.name, h.status, h.detail, h.fix from queue._health(clock_timestamp()) h;
end $$;
comment on function queue.health() is
  'A row for each check of what makes queues stop or slow down: status ok, warn or fail, what was found in detail, and what to do in fix. For the invariants of the tables see queue.check().';

-- Every check looks at a bounded number of rows.
create or replace function queue._health(p_now timestamptz)
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 12 as $$
#variable_conflict use_column
declare
  v record;
  v_hidden bigint;
begin
  name := 'version';
  select t.code, t.tables into v from queue.version() t;
  status := case when v.code = v.tables then 'ok' else 'fail' end;
  detail := format('code %s, tables %s', v.code, v.tables);
  fix := case when v.code <> v.tables then 'select queue.migrate()' end;
  return next;

  name := 'workers';
  select count(*) filter (where w.gone_at is null and w.last_seen_at + w.dead_after >= p_now) as alive,
    count(*) filter (where w.gone_at is null and w.last_seen_at + w.dead_after < p_now - interval '10 s'
                       or not w.is_clear and w.gone_at < p_now - interval '1 minute') as dead,
    (select count(*) from (select from queue.live l limit 100001) l) as live
  into v from queue.worker w;
  status := case when v.dead > 0 or v.alive = 0 and v.live > 0 then 'fail' when v.alive = 0 then 'warn' else 'ok' end;
  detail := format('%s alive', v.alive)
    || case when v.dead > 0 then format(', %s dead and not reaped', v.dead) else '' end
    || case when v.alive = 0 and v.live > 0 then format(', %s jobs ready or running', case when v.live > 100000 then 'more than 100000' else v.live::text end) else '' end;
  fix := case when v.dead > 0 then 'Nobody calls queue.tick(): start a worker, or run it by pg_cron. Now: select * from queue.tick()'
              when v.alive = 0 then 'Start a worker: pgdefer worker' end;
  return next;

  name := 'queues';
  select count(*) as n, string_agg(l.queue, ', ' order by l.queue) filter (where l.no <= 10) as names into v
  from (
    select l.queue, row_number() over (order by l.queue) as no
    from (select distinct l.queue from queue.lane l
          where (l.paused_until is null or l.paused_until <= p_now)
            and exists (select from queue.live v where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null)
            and not exists (
              select from queue.worker w
              where w.gone_at is null and w.last_seen_at + w.dead_after >= p_now
                and (w.queues is null or exists (select from unnest(w.queues) q where queue._matches(l.queue, q))))) l) l;
  status := case when v.n > 0 then 'fail' else 'ok' end;
  detail := case when v.n > 0 then format('ready jobs in %s queues that no live worker serves: %s', v.n, v.names) else 'every queue with ready jobs is served, or paused' end;
  fix := case when v.n > 0 then 'Start a worker for them: pgdefer worker --queues NAME' end;
  return next;

  name := 'paused';
  select count(*) as n, string_agg(l.queue, ', ' order by l.queue) filter (where l.no <= 10) as names into v
  from (
    select l.queue, row_number() over (order by l.queue) as no
    from (select distinct l.queue from queue.lane l
          where l.paused_until > p_now
            and exists (select from queue.live v where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null)) l) l;
  status := case when v.n > 0 then 'warn' else 'ok' end;
  detail := case when v.n > 0 then format('ready jobs in %s paused queues: %s', v.n, v.names) else 'no paused queue holds ready jobs' end;
  fix := case when v.n > 0 then 'select queue.resume(name)' end;
  return next;

  name := 'due';
  select least(
      (select w.at from queue.waiting w where w.at >= k.due_at order by w.at limit 1),
      (select j.created_at from queue.job j where j.xid >= k.next_xid order by j.xid, j.id limit 1),
      (select e.at from queue.expiry e where not exists (select from queue.live l where l.id = e.id and l.claim is not null) order by e.at limit 1),
      queue._next_lease_end()) as at
  into v from queue.cursor k order by k.tick desc limit 1;
  status := case when v.at < p_now - interval '10 minutes' then 'fail' when v.at < p_now - interval '1 minute' then 'warn' else 'ok' end;
  detail := case when status = 'ok' then 'nothing is overdue' else format('something has been due for %s', date_trunc('second', p_now - v.at)) end;
  fix := case when status <> 'ok' then 'Nobody calls queue.tick(): start a worker, or run it by pg_cron. Now: select * from queue.tick()' end;
  return next;

  name := 'schedules';
  select count(*) filter (where s.due_at < p_now - interval '1 minute') as late, count(*) filter (where s.reason is not null and s.reason <> 'paused') as broken,
    string_agg(format('%s%s', left(s.name, 100), coalesce(': ' || left(s.reason, 200), '')), '; ' order by s.name) filter (where s.no <= 5) as names
  into v
  from (select s.name, s.due_at, s.reason, row_number() over (order by s.name) as no from queue.schedule s
        where s.is_enabled and (s.due_at < p_now - interval '1 minute' or s.reason is not null and s.reason <> 'paused')) s;
  status := case when v.late > 0 then 'fail' when v.broken > 0 then 'warn' else 'ok' end;
  detail := case when status = 'ok' then 'no recurring run is late' else format('%s late, %s with an error: %s', v.late, v.broken, v.names) end;
  fix := case when v.late > 0 then 'Nobody calls queue.tick(): start a worker, or run it by pg_cron. Now: select * from queue.tick()'
              when v.broken > 0 then 'See reason in queue.schedules, and mend the task''s defaults or the schedule''s options.' end;
  return next;

  name := 'admission';
  v := queue._admission_holder();
  status := case when v.pid is null and v.state is null or v.since > p_now - interval '5 s' then 'ok' when v.since > p_now - interval '15 s' then 'warn'
                 when v.since is null then 'warn' else 'fail' end;
  detail := case when status = 'ok' then 'no session keeps the admission lock'
                 else format('%s%s holds the admission lock%s; nobody else can fetch what is new', coalesce('process ' || v.pid, 'no process'), coalesce(' of role ' || v.role, ''),
                             coalesce(', in a transaction that is open since ' || date_trunc('second', v.since), '')
                             || coalesce(' (' || v.state || ')', '')) end;
  fix := case when status <> 'ok' then 'Look again in a moment; if it is the same process, select queue.unblock() ends it; a prepared transaction is ended by ROLLBACK PREPARED' end;
  return next;

  name := 'timeouts';
  select count(*) as n, string_agg(format('job %s at %s', o.id, date_trunc('second', o.timeout_at)), ', ' order by o.timeout_at) filter (where o.no <= 10) as jobs into v
  from (select o.*, row_number() over (order by o.timeout_at) as no from queue._overdue() o) o;
  status := case when v.n > 0 then 'warn' else 'ok' end;
  detail := case when v.n > 0 then format('the timeout of %s jobs has passed; their handlers could not be ended and still run: %s', v.n, v.jobs)
                 else 'no handler outlives its timeout' end;
  fix := case when v.n > 0 then 'Each keeps its slot and its lock until it ends. Restart its worker (queue.why says which); run such tasks in processes, which can be killed' end;
  return next;

  name := 'failures';
  select count(*) filter (where f.state = 'failed') as failed, count(*) as n into v
  from (select f.state from queue.finished f where f.finished_at > p_now - interval '1 hour' limit 100000) f;
  status := case when v.failed >= 20 and v.failed > v.n * 0.1 then 'warn' else 'ok' end;
  detail := format('%s of %s jobs that ended within the hour have failed', v.failed, v.n);
  fix := case when status <> 'ok' then 'select * from queue.jobs where state = ''failed'' order by id desc limit 20; once mended: select queue.retry_failed()' end;
  return next;

  name := 'transactions';
  select count(*) into v_hidden
  from pg_stat_activity a
  where a.usesysid is not null and a.query = '<insufficient privilege>' and a.pid <> pg_backend_pid() and a.datname = current_database();
  select h.since, h.what, h.fix into v
  from (
    select coalesce(a.xact_start, a.query_start) as since, format('session %s of %s (%s)', a.pid, a.usename, coalesce(a.state, a.backend_type)) as what,
      format('select pg_terminate_backend(%s)', a.pid) as fix
    from pg_stat_activity a where a.backend_xmin is not null and a.pid <> pg_backend_pid() and a.usesysid is not null and a.datname = current_database()
    union all
    select p.prepared, format('prepared transaction %L', p.gid), format('commit prepared %L, or rollback prepared %L', p.gid, p.gid)
    from pg_prepared_xacts p where p.database = current_database()
    union all
    select null, format('replication slot %s', r.slot_name), format('Let its consumer catch up, or select pg_drop_replication_slot(%L)', r.slot_name)
    from pg_replication_slots r where age(coalesce(r.xmin, r.catalog_xmin)) > 10000000) h
  order by h.since nulls first limit 1;
  status := case when v.what is null or v.since > p_now - interval '5 minutes' then case when v_hidden > 0 then 'warn' else 'ok' end
                 when v.since > p_now - interval '1 hour' then 'warn' else 'fail' end;
  detail := case when status = 'ok' or v.what is null or v.since > p_now - interval '5 minutes'
      then case when v_hidden > 0 then format('%s sessions of other roles can''t be seen', v_hidden) else 'no transaction has been open for 5 minutes' end
    when v.since is null then v.what || ' keeps old row versions'
    else format('%s has had a transaction open for %s: dead rows stay as long', v.what, date_trunc('second', p_now - v.since)) end;
  fix := case when status = 'ok' then null
              when v.what is null or v.since > p_now - interval '5 minutes' then format('grant pg_read_all_stats to %I', current_user) else v.fix end;
  return next;

  name := 'bloat';
  select string_agg(format('%s: %s dead rows, %s live, %s', t.relname, t.dead, t.live, pg_size_pretty(t.size)), '; ' order by t.dead desc) as what,
    string_agg(format('vacuum queue.%I', t.relname), '; ' order by t.dead desc) as fix, bool_or(t.dead > 1000000) as is_bad
  into v
  from (
    select c.relname, pg_stat_get_dead_tuples(c.oid) as dead, pg_stat_get_live_tuples(c.oid) as live, pg_relation_size(c.oid) as size
    from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r'
      and c.relname in ('live', 'cursor', 'lane', 'semaphore', 'key_lane', 'lock_member', 'waiting', 'handover', 'job_state', 'rate_start', 'queueing_lock', 'worker')) t
  where t.dead > 100000 and t.dead > 2 * t.live;
  status := case when v.is_bad then 'fail' when v.what is not null then 'warn' else 'ok' end;
  detail := coalesce(v.what, 'the hot tables hold few dead rows');
  fix := v.fix || case when v.fix is not null then '; see the check transactions for what keeps dead rows' end;
  return next;

  name := 'autovacuum';
  select string_agg(x.what, '; ') as what, bool_or(x.is_bad) as is_bad into v
  from (
    select format('%s is off', s.setting) as what, true as is_bad
    from unnest('{autovacuum,track_counts}'::text[]) s (setting) where current_setting(s.setting) <> 'on'
    union all
    select format('%s: %s dead rows, last vacuumed %s', c.relname, t.dead, coalesce(date_trunc('second', t.last)::text, 'never')), t.dead > 10 * t.threshold
    from pg_class c
    cross join lateral (
      select pg_stat_get_dead_tuples(c.oid) as dead, greatest(pg_stat_get_last_autovacuum_time(c.oid), pg_stat_get_last_vacuum_time(c.oid)) as last,
        coalesce((select o.option_value::double precision from pg_options_to_table(c.reloptions) o where o.option_name = 'autovacuum_vacuum_threshold'),
                 current_setting('autovacuum_vacuum_threshold')::double precision)
        + greatest(c.reltuples, 0) * coalesce((select o.option_value::double precision from pg_options_to_table(c.reloptions) o where o.option_name = 'autovacuum_vacuum_scale_factor'),
                               current_setting('autovacuum_vacuum_scale_factor')::double precision) as threshold) t
    where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r' and t.dead > greatest(3 * t.threshold, 10000) and coalesce(t.last < p_now - interval '5 minutes', true)
    union all
    select format('%s: its oldest transaction id is %s old', c.relname, age(c.relfrozenxid)), age(c.relfrozenxid) > 1500000000
    from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r' and age(c.relfrozenxid) > 1.5 * current_setting('autovacuum_freeze_max_age')::integer) x;
  status := case when v.is_bad then 'fail' when v.what is not null then 'warn' else 'ok' end;
  detail := coalesce(v.what, 'it keeps up');
  fix := case when v.what is not null then 'Turn it on, give it more: autovacuum_max_workers, autovacuum_naptime, autovacuum_vacuum_cost_limit. Now: vacuum' end;
  return next;

  name := 'clock';
  select greatest((select max(w.last_seen_at) from queue.worker w), (select j.created_at from queue.job j order by j.id desc limit 1),
                  (select max(v.claimed_at) from (select l.claimed_at from queue.live l order by l.id desc limit 1000) v)) - p_now as ahead into v;
  status := case when v.ahead > interval '1 minute' then 'fail' when v.ahead > interval '5 seconds' then 'warn' else 'ok' end;
  detail := case when status = 'ok' then 'it has not been set back' else format('it has been set back by %s or more', date_trunc('second', v.ahead)) end;
  fix := case when status <> 'ok' then 'Have the server''s clock kept by NTP, which slews it. Until it has caught up, schedules are late.' end;
  return next;

  name := 'notifications';
  select pg_notification_queue_usage() as usage, current_setting('pgdefer.notify', true) = 'off' as is_off into v;
  status := case when v.usage > 0.9 then 'fail' when v.usage > 0.5 then 'warn' else 'ok' end;
  detail := format('%s%% of their queue is in use', round((v.usage * 100)::numeric)) || case when v.is_off then '; switched off here (pgdefer.notify): workers poll' else '' end;
  fix := case when status <> 'ok' then 'A session that listens has had a transaction open for long: see pg_stat_activity, and end it.' end;
  return next;
end $$;
