-- Checks of queue.health() for the sessions, the tables and the server.

-- A number with its noun: 1 job, 2 jobs.
create or replace function queue._count_of(p_number bigint, p_noun text)
returns text language plpgsql immutable parallel safe security invoker as $$
begin
  return p_number || ' ' || p_noun || case when p_number = 1 then '' else 's' end;
end $$;

-- Failures, and transactions that stay open.
create or replace function queue._health_of_sessions(p_now timestamptz)
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 4 as $$
declare
  v_facts record;
  v_hidden bigint;
begin
  name := 'failures';
  select count(*) filter (where f.state = 'failed') as failed, count(*) as n into v_facts
  from (select f.state from queue.finished f where f.finished_at > p_now - interval '1 hour' limit 100000) f;
  status := case when v_facts.failed >= 20 and v_facts.failed > v_facts.n * 0.1
    or v_facts.failed >= 5 and v_facts.failed > v_facts.n * 0.5 then 'warn' else 'ok' end;
  detail := format('%s of %s that ended within the hour failed', v_facts.failed,
    queue._count_of(v_facts.n, 'job'));
  fix := case when status <> 'ok'
    then 'select * from queue.jobs where state = ''failed'' order by id desc limit 20; once the cause is'
    ' fixed: select queue.retry_failed()' end;
  return next;

  name := 'transactions';
  select count(*) into v_hidden
  from pg_stat_activity a
  where a.usesysid is not null and a.query = '<insufficient privilege>' and a.pid <> pg_backend_pid()
    and a.datname = current_database();
  select h.since, h.what, h.fix into v_facts
  from (
    select coalesce(a.xact_start, a.query_start) as since,
      format('session %s of %s (%s)', a.pid, a.usename, coalesce(a.state, a.backend_type)) as what,
      format('select pg_terminate_backend(%s)', a.pid) as fix
    from pg_stat_activity a where a.backend_xmin is not null and a.pid <> pg_backend_pid()
      and a.usesysid is not null and a.datname = current_database()
      and a.query <> '<insufficient privilege>'  -- it hides the times, but not backend_xmin
    union all
    select p.prepared, format('prepared transaction %L', p.gid),
      format('commit prepared %L, or rollback prepared %L', p.gid, p.gid)
    from pg_prepared_xacts p where p.database = current_database()
    union all
    select null, format('replication slot %s', r.slot_name),
      format('Let its consumer catch up, or select pg_drop_replication_slot(%L)', r.slot_name)
    from pg_replication_slots r where age(coalesce(r.xmin, r.catalog_xmin)) > 10000000) h
  where h.since is null or h.since <= p_now - interval '5 minutes'
  order by h.since nulls first limit 1;
  if v_facts.what is not null then
    status := case when v_facts.since > p_now - interval '1 hour' then 'warn' else 'fail' end;
    detail := case when v_facts.since is null then v_facts.what || ' keeps old row versions'
      else format('%s has had a transaction open for %s: dead rows can''t be removed meanwhile', v_facts.what,
        date_trunc('second', p_now - v_facts.since)) end;
    fix := v_facts.fix;
  elsif v_hidden > 0 then
    status := 'warn';
    detail := format('%s of other roles can''t be seen', queue._count_of(v_hidden, 'session'));
    fix := format('grant pg_read_all_stats to %I', current_user);
  else
    status := 'ok';
    detail := 'no transaction has been open for 5 minutes';
    fix := null;
  end if;
  return next;
end $$;

-- Dead rows, and the vacuum that should remove them.
create or replace function queue._health_of_tables(p_now timestamptz)
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 4 as $$
declare
  v_facts record;
begin
  name := 'bloat';
  select string_agg(format('%s: %s dead rows, %s live, %s', t.relname, t.dead, t.live,
    pg_size_pretty(t.size)), '; ' order by t.dead desc) as what,
    string_agg(format('vacuum queue.%I', t.relname), '; ' order by t.dead desc) as fix,
    bool_or(t.dead > 1000000) as is_bad
  into v_facts
  from (
    select c.relname, pg_stat_get_dead_tuples(c.oid) as dead, pg_stat_get_live_tuples(c.oid) as live,
      pg_relation_size(c.oid) as size
    from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r'
      and c.relname in ('active_job', 'cursor', 'lane', 'semaphore', 'lock_member', 'waiting',
        'pending_settlement', 'job_override', 'rate_start', 'queueing_lock', 'idempotency_key',
        'worker')) t
  where t.dead > 100000 and t.dead > 2 * t.live;
  status := case when v_facts.is_bad then 'fail' when v_facts.what is not null then 'warn' else 'ok' end;
  detail := coalesce(v_facts.what, 'the hot tables hold few dead rows');
  fix := v_facts.fix
    || case when v_facts.fix is not null then '; see the check transactions for what keeps dead rows' end;
  return next;

  name := 'autovacuum';
  select string_agg(x.what, '; ') as what, bool_or(x.is_bad) as is_bad into v_facts
  from (
    select format('%s is off', s.setting) as what, true as is_bad
    from unnest('{autovacuum,track_counts}'::text[]) s (setting) where current_setting(s.setting) <> 'on'
    union all
    select format('%s: %s dead rows, last vacuumed %s', c.relname, t.dead,
      coalesce(date_trunc('second', t.last)::text, 'never')), t.dead > 10 * t.threshold
    from pg_class c
    cross join lateral (
      select pg_stat_get_dead_tuples(c.oid) as dead,
        greatest(pg_stat_get_last_autovacuum_time(c.oid), pg_stat_get_last_vacuum_time(c.oid)) as last,
        coalesce((select o.option_value::double precision from pg_options_to_table(c.reloptions) o
          where o.option_name = 'autovacuum_vacuum_threshold'),
          current_setting('autovacuum_vacuum_threshold')::double precision)
        + greatest(c.reltuples, 0) * coalesce((select o.option_value::double precision
          from pg_options_to_table(c.reloptions) o where o.option_name = 'autovacuum_vacuum_scale_factor'),
          current_setting('autovacuum_vacuum_scale_factor')::double precision) as threshold) t
    where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r'
      and t.dead > greatest(3 * t.threshold, 10000) and coalesce(t.last < p_now - interval '5 minutes', true)
    union all
    select format('%s: its oldest transaction id is %s old', c.relname, age(c.relfrozenxid)),
      age(c.relfrozenxid) > 1500000000
    from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r'
      and age(c.relfrozenxid) > 1.5 * current_setting('autovacuum_freeze_max_age')::integer) x;
  status := case when v_facts.is_bad then 'fail' when v_facts.what is not null then 'warn' else 'ok' end;
  detail := coalesce(v_facts.what, 'it keeps up');
  fix := case when v_facts.what is not null
    then 'Turn it on, or give it more resources: autovacuum_max_workers, autovacuum_naptime,'
    ' autovacuum_vacuum_cost_limit. Now: vacuum' end;
  return next;
end $$;

-- The clock and the queue of notifications.
create or replace function queue._health_of_server(p_now timestamptz)
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 4 as $$
declare
  v_facts record;
begin
  name := 'clock';
  select greatest((select max(w.last_seen_at) from queue.worker w),
    (select j.created_at from queue.job j order by j.id desc limit 1),
    (select max(aj.claimed_at)
      from (select aj.claimed_at from queue.active_job aj order by aj.id desc limit 1000) aj),
    -- The others follow the clock within seconds, but schedules wait.
    (select max(s.last_run_at) from queue.schedule s where s.is_enabled)) - p_now as ahead
      into v_facts;
  status := case when v_facts.ahead > interval '1 minute' then 'fail'
    when v_facts.ahead > interval '5 seconds' then 'warn' else 'ok' end;
  detail := case when status = 'ok' then 'it has not been set back'
    else format('it has been set back by %s or more', date_trunc('second', v_facts.ahead)) end;
  fix := case when status <> 'ok'
    then 'Let NTP adjust the server''s clock; it does so gradually. Until the clock has caught up, schedules'
    ' wait: those that should not, unschedule and schedule again.' end;
  return next;

  name := 'notifications';
  select pg_notification_queue_usage() as usage, current_setting('pgdefer.notify', true) = 'off' as is_off
  into v_facts;
  status := case when v_facts.usage > 0.9 then 'fail' when v_facts.usage > 0.5 then 'warn' else 'ok' end;
  detail := format('%s%% of their queue is in use', round((v_facts.usage * 100)::numeric))
    || case when v_facts.is_off then '; switched off here (pgdefer.notify): workers poll' else '' end;
  fix := case when status <> 'ok'
    then 'A session that listens keeps a transaction open: find it in pg_stat_activity, and end it.' end;
  return next;
end $$;
