-- Health: problems, and their remedies.

create or replace function queue.health()
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel unsafe security definer rows 20
set search_path = pg_catalog, pg_temp set jit = off as $$
begin
  {{installed}}
  return query select h.name, h.status, h.detail, h.fix from queue._health(clock_timestamp()) h;
end $$;
comment on function queue.health() is
  'Checks for causes that stop or slow down queues. Returns a row for each check: status ok, warn or'
    ' fail, the finding in detail, and the remedy in fix. For the invariants of the tables see'
    ' queue.check().';

-- Each check reads a bounded number of jobs, but all workers, lanes and schedules.
create or replace function queue._health(p_now timestamptz)
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel unsafe security invoker rows 20 as $$
begin
  return query
    select h.name, h.status, h.detail, h.fix from queue._health_of_version() h
    union all
    select h.name, h.status, h.detail, h.fix from queue._health_of_workers(p_now) h
    union all
    select h.name, h.status, h.detail, h.fix from queue._health_of_pauses(p_now) h
    union all
    select h.name, h.status, h.detail, h.fix from queue._health_of_work(p_now) h
    union all
    select h.name, h.status, h.detail, h.fix from queue._health_of_deadlocks() h
    union all
    select h.name, h.status, h.detail, h.fix from queue._health_of_claims(p_now) h
    union all
    select h.name, h.status, h.detail, h.fix from queue._health_of_sessions(p_now) h
    union all
    select h.name, h.status, h.detail, h.fix from queue._health_of_tables(p_now) h
    union all
    select h.name, h.status, h.detail, h.fix from queue._health_of_triggers() h
    union all
    select h.name, h.status, h.detail, h.fix from queue._health_of_server(p_now) h;
end $$;

-- Checks whether the code fits the tables, and whether anybody else fills these.
create or replace function queue._health_of_version()
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 1 as $$
declare
  v_facts record;
  v_unrestored record := queue._unrestored(true);
begin
  name := 'version';
  select t.code, t.tables into v_facts from queue.version() t;
  status := case when v_facts.code = v_facts.tables and v_unrestored.what is null then 'ok' else 'fail' end;
  detail := format('code %s, tables %s', v_facts.code, coalesce(v_facts.tables, 'without their rows'))
    || coalesce('; ' || v_unrestored.what, '');
  fix := case when v_unrestored.what is not null then v_unrestored.fix
    when v_facts.code is distinct from v_facts.tables then queue._how_to_fit(v_facts.tables) end;
  return next;
end $$;

-- Checks whether all ready jobs find a worker.
create or replace function queue._health_of_workers(p_now timestamptz)
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 4 as $$
declare
  v_facts record;
  -- Workers that have been silent since before it count as dead only dead_after after it, as for reap.
  v_up_since timestamptz := queue._up_since();
  v_is_waiting boolean;
  v_holder record;
  v_unadmitted constant text[] := array(select u.queue from queue._overdue_unadmitted(p_now) u);
begin
  name := 'workers';
  select count(*) filter (where w.gone_at is null and w.last_seen_at + w.dead_after >= p_now) as alive,
    count(*) filter (where w.gone_at is null
                       and greatest(w.last_seen_at, v_up_since) + w.dead_after < p_now - interval '10 s'
                       or not w.is_clear and w.gone_at < p_now - interval '1 minute'
                         and (not w.has_left or exists (select from queue.active_job aj
                                                        where aj.worker_id = w.id))) as dead,
    count(*) filter (where w.is_awaited) as awaited,
    max(w.dead_after) filter (where w.is_awaited) as patience,
    (select count(*) from (select from queue.active_job aj limit 10001) aj)
      + cardinality(v_unadmitted) as jobs
  into v_facts
  from (select w.*, w.gone_at is null and w.last_seen_at + w.dead_after < p_now
          and w.last_seen_at < v_up_since and v_up_since + w.dead_after >= p_now as is_awaited
        from queue.worker w) w;
  select h.holder, h.fix into v_holder
  from queue._claim_holders(array(select aj.id from queue.active_job aj join queue.worker w
    on w.id = aj.worker_id where v_facts.dead > 0 and w.gone_at is not null)) h limit 1;
  -- Before the era has begun, no worker has come at all (_up_since).
  v_is_waiting := v_facts.awaited > 0 and v_up_since < p_now;
  status := case
    when v_facts.dead > 0 or v_facts.alive = 0 and v_facts.jobs > 0 and not v_is_waiting then 'fail'
    when v_facts.alive = 0 then 'warn' else 'ok' end;
  detail := format('%s alive', v_facts.alive)
    || case when v_facts.dead > 0 then format(', %s dead and not reaped', v_facts.dead) else '' end
    || coalesce(': ' || v_holder.holder || ' has locked a claim', '')
    || case when v_facts.awaited > 0
      then format(', %s silent since before the server started or was promoted', v_facts.awaited) else '' end
    || case when v_facts.alive = 0 and v_facts.jobs > 0
      then format(', %s ready or running', case when v_facts.jobs > 10000 then 'more than 10000 jobs'
        else queue._count_of(v_facts.jobs, 'job') end) else '' end;
  fix := case when v_holder.fix is not null then v_holder.fix
              when v_facts.dead > 0 then {{do_due_work}}
              when v_facts.alive = 0 and v_is_waiting
                then format('Wait: they have %s from then on to come back. If none does, start a worker:'
                  ' pgdefer worker -A MODULE', v_facts.patience)
              when v_facts.alive = 0 then 'Start a worker: pgdefer worker -A MODULE' end;
  return next;

  name := 'queues';
  select count(*) as n, string_agg(l.queue, ', ' order by l.queue) filter (where l.no <= 10) as names
  into v_facts
  from (
    select l.queue, row_number() over (order by l.queue) as no
    from (select u.queue
          from (select l.queue from queue.lane l
                where (l.paused_until is null or l.paused_until <= p_now)
                  and exists (select from queue.active_job aj where {{is_ready}})
                union
                select n.queue from (select distinct n.queue from unnest(v_unadmitted) n (queue)) n
                where coalesce(queue._paused_until(n.queue) <= p_now, true)) u
          where queue._live_workers(u.queue, p_now, v_up_since) = 0) l) l;
  status := case when v_facts.n > 0 then 'fail' else 'ok' end;
  detail := case when v_facts.n > 0 then format('ready jobs in %s that no live worker serves: %s',
    queue._count_of(v_facts.n, 'queue'), v_facts.names)
    else 'every queue with ready jobs is served, or paused' end;
  fix := case when v_facts.n > 0 then 'Start a worker for them: pgdefer worker -A MODULE --queues NAME' end;
  return next;
end $$;

-- The queues of ready jobs that nobody has admitted for 5 seconds, one row for each job, among the first
-- 20,000 new jobs. It leaves out the backlog, which is being admitted: with that, as in the view
-- queue.unadmitted, it took seconds beside 170 parts.
create or replace function queue._overdue_unadmitted(p_now timestamptz)
returns table (queue text)
language plpgsql stable parallel safe security invoker rows 1000 as $$
begin
  return query
    select j.queue
    from (
      select j.queue, j.flags, j.created_at, j.scheduled_at, j.needs
      from queue.cursor_now k
      cross join lateral (
        (select j.queue, j.flags, j.created_at, j.scheduled_at, j.needs from queue.job j
         where j.xid >= k.next_xid order by j.xid, j.id limit 20000)
        union all
        select j.queue, j.flags, j.created_at, j.scheduled_at, j.needs
        from unnest(k.in_flight) x cross join lateral (
          select j.queue, j.flags, j.created_at, j.scheduled_at, j.needs
          from queue.job j where j.xid = x order by j.xid, j.id limit 20000) j) j
      limit 20000) j
    where j.created_at < p_now - interval '5 s' and j.flags & {{held}} = 0
      and coalesce(j.scheduled_at <= p_now, true) and j.needs is null;
end $$;

-- Checks whether ready jobs wait for the end of a pause.
create or replace function queue._health_of_pauses(p_now timestamptz)
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 1 as $$
declare
  v_queues record;
  v_tasks text;
begin
  name := 'paused';
  select count(*) as n, string_agg(l.queue, ', ' order by l.queue) filter (where l.no <= 10) as names
  into v_queues
  from (
    select l.queue, row_number() over (order by l.queue) as no
    from (select distinct l.queue from queue.lane l
          where l.paused_until > p_now
            and exists (select from queue.active_job aj where {{is_ready}})) l) l;
  select string_agg(distinct j.task, ', ' order by j.task) into v_tasks
  from (select w.id from queue.waiting w where w.reason = 'task_paused' order by w.id desc limit 1000) w
  join queue.job j on j.id = w.id;
  status := case when v_queues.n > 0 or v_tasks is not null then 'warn' else 'ok' end;
  detail := coalesce(nullif(concat_ws('; ',
    case when v_queues.n > 0 then format('ready jobs in %s: %s', queue._count_of(v_queues.n, 'paused queue'),
      v_queues.names) end,
    'ready jobs of paused tasks: ' || left(v_tasks, 1000)), ''),
    'no paused queue or task holds ready jobs');
  fix := nullif(concat_ws('; ', case when v_queues.n > 0 then 'select queue.resume(name)' end,
    case when v_tasks is not null then 'select queue.resume(task => name)' end), '');
  return next;
end $$;

-- Checks whether due work is done.
create or replace function queue._health_of_work(p_now timestamptz)
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 4 as $$
declare
  v_facts record;
begin
  name := 'due';
  select least(
      (select w.at from queue.waiting w where w.at >= k.due_at order by w.at limit 1),
      (select j.created_at from queue.job j where j.xid >= k.next_xid order by j.xid, j.id limit 1),
      (select e.at from queue.expiry e
        where not exists (select from queue.active_job aj where aj.id = e.id and aj.claim is not null)
        order by e.at limit 1),
      queue._next_lease_end(), queue._removal_overdue_since(p_now)) as at
  into v_facts from queue.cursor_now k;
  status := case when v_facts.at < p_now - interval '10 minutes' then 'fail'
    when v_facts.at < p_now - interval '1 minute' then 'warn' else 'ok' end;
  detail := case when status = 'ok' then 'nothing is overdue'
    else format('overdue for %s', date_trunc('second', p_now - v_facts.at)) end;
  fix := case when status <> 'ok' then {{do_due_work}} end;
  return next;

  name := 'schedules';
  select count(*) filter (where s.due_at < p_now - interval '1 minute') as late,
    count(*) filter (where s.reason is not null and s.reason <> 'paused') as broken,
    string_agg(format('%s%s', left(s.name, 100), coalesce(': ' || left(s.reason, 200), '')), '; '
      order by s.name) filter (where s.no <= 5) as names
  into v_facts
  from (select s.name, s.due_at, s.reason, row_number() over (order by s.name) as no from queue.schedule s
        where s.is_enabled
          and (s.due_at < p_now - interval '1 minute' or s.reason is not null and s.reason <> 'paused')) s;
  status := case when v_facts.late > 0 then 'fail' when v_facts.broken > 0 then 'warn' else 'ok' end;
  detail := case when status = 'ok' then 'no recurring run is late'
    else format('%s late, %s with an error: %s', v_facts.late, v_facts.broken, v_facts.names) end;
  fix := case when v_facts.late > 0 then {{do_due_work}}
              when v_facts.broken > 0
                then 'See reason in queue.schedules, and correct the defaults of the task or the options of'
                ' the schedule.' end;
  return next;
end $$;

-- Checks for tasks that workers did not know, sessions that hold up admission, handlers that do not end, and
-- handlers that wait for jobs which find no slot.
create or replace function queue._health_of_claims(p_now timestamptz)
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 4 as $$
declare
  v_facts record;
begin
  name := 'tasks';
  select count(*) as n,
    string_agg(format('%s (%s) to worker %s', u.task, queue._count_of(u.jobs, 'job'),
      u.workers), '; ')
    filter (where u.no <= 5) as names into v_facts
  from (select u.*, row_number() over () as no from queue._unknown_tasks(p_now) u) u;
  status := case when v_facts.n > 0 then 'warn' else 'ok' end;
  detail := case when v_facts.n > 0 then format('unknown tasks: %s', v_facts.names)
    else 'all recently claimed tasks were known' end;
  fix := case when v_facts.n > 0
    then 'Start a worker that knows them, or register a function for them; during a deployment, wait'
    ' until it is complete' end;
  return next;

  name := 'admission';
  v_facts := queue._admission_holder();
  status := case
    when v_facts.pid is null and v_facts.state is null or v_facts.since > p_now - interval '5 s' then 'ok'
    when v_facts.since is null or v_facts.since > p_now - interval '15 s' then 'warn' else 'fail' end;
  detail := case when status = 'ok' then 'no session holds the admission lock for long'
    else format('%s%s holds the admission lock%s%s; no other session can fetch new jobs',
      coalesce('process ' || v_facts.pid, 'a prepared transaction'), ' of role ' || v_facts.role,
      ', in a transaction that has been open since ' || date_trunc('second', v_facts.since),
      ' (' || v_facts.state || ')') end;
  fix := case when status <> 'ok'
    then 'Look again in a moment; if it is the same process, select queue.unblock() ends it; a prepared'
    ' transaction is ended by ROLLBACK PREPARED' end;
  return next;

  name := 'timeouts';
  select count(*) as n, string_agg(format('job %s at %s', o.id, date_trunc('second', o.timeout_at)), ', '
    order by o.timeout_at) filter (where o.no <= 10) as jobs into v_facts
  from (select o.*, row_number() over (order by o.timeout_at) as no from queue._overdue() o) o;
  status := case when v_facts.n > 0 then 'warn' else 'ok' end;
  detail := case when v_facts.n > 0
    then format('%s running past the timeout, as the handler could not be ended: %s',
      queue._count_of(v_facts.n, 'job'), v_facts.jobs)
    else 'no handler outlives its timeout' end;
  fix := case when v_facts.n > 0
    then 'Each keeps its slot and its lock until it ends. Restart its worker (queue.why says which); run'
    ' such tasks in processes, which can be killed' end;
  return next;

  name := 'results';
  select count(*) as n, string_agg(format('job %s of job %s', w.id, w.parent), ', ' order by w.id)
    filter (where w.no <= 5) as jobs into v_facts
  from (
    select a.id, p.id as parent, row_number() over (order by a.id) as no
    from (select distinct a.id from queue.awaited a where a.since < p_now - interval '30 s' limit 1000) a
    cross join lateral (
      select (j.options ->> 'parent')::bigint as parent
      from queue.active_job aj join queue.job j on j.id = aj.id join queue.lane l on l.lane = aj.lane
      where aj.id = a.id and aj.claim is null and (l.paused_until is null or l.paused_until <= p_now)
      offset 0) c
    cross join lateral (
      select p.id from queue.active_job p where p.id = c.parent and p.claim is not null offset 0) p) w;
  status := case when v_facts.n > 0 then 'warn' else 'ok' end;
  detail := case when v_facts.n > 0
    then format('%s awaited and ready, but not started, while the jobs that deferred them run: %s',
      queue._count_of(v_facts.n, 'job'), v_facts.jobs)
    else 'no job that a running one may wait for finds no worker' end;
  fix := case when v_facts.n > 0
    then 'See select queue.why(id). If waiting handlers fill all slots, start another worker; or let them'
    ' wait by queue.await_jobs (call and gather in Python), which frees their slots' end;
  return next;
end $$;
