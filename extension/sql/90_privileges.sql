-- Privileges: PUBLIC can do nothing; roles get whole functions, never tables.

do $$
declare
  v_function record;
begin
  for v_function in
    select p.oid::regprocedure as signature from pg_proc p where p.pronamespace = 'queue'::regnamespace
  loop
    execute format('revoke all on function %s from public', v_function.signature);
  end loop;
end $$;

-- What each kind of role may call and read.
create or replace function queue._grants(kind text, out functions text[], out views text[])
language plpgsql immutable parallel safe security invoker as $$
begin
  case kind
    when 'producer' then
      functions := '{register_task,defer,defer_many,defer_trigger,defer_group,defer_chain,result,await_result,version}';
      views := '{}';
    when 'worker' then
      functions := '{register_task,register_worker,claims,fetch,heartbeat,extend,deregister_worker,worker_died,before_sleep,after_sleep,succeed,fail,retry_later,release,finish_many,finish_and_fetch,reap,tick,result,needs,await_result,peek,version,backoff,next_runs,schedule,unschedule}';
      views := '{schedules}';
    when 'operator' then
      functions := '{register_task,next,extend,succeed,fail,retry_later,release,move,copy,delete,fail_jobs,done,set_priority,reschedule,set_args,delete_queue,search,get,stats,health,autoscale_hint,cancel,hold,unhold,retry,retry_failed,pause,resume,configure,configure_queue,create_queue,prune,unblock,reap,tick,result,needs,graph,why,check,peek,version,backoff,next_runs,schedule,unschedule,enable_schedule,run_now}';
      views := '{jobs,attempts,queues,workers,tasks,locks,semaphores,metrics,schedules,schedule_runs}';
    when 'reader' then
      functions := '{search,get,stats,health,autoscale_hint,result,needs,graph,why,check,peek,version,backoff,next_runs}';
      views := '{jobs,attempts,queues,workers,tasks,locks,semaphores,metrics,schedules,schedule_runs}';
    else
      perform queue._invalid('kind is not one of its values', 'Allowed: producer, worker, operator, reader.', 'kind: ' || coalesce(kind, 'NULL'));
  end case;
end $$;

-- What a role that is limited to some queues does not get: it concerns more than their jobs.
create or replace function queue._unlimited_only()
returns text[] language plpgsql immutable parallel safe security invoker as $$
begin
  return '{configure,register_task,schedule,unschedule,enable_schedule,run_now,prune,unblock,check,health,tasks,locks,semaphores,schedules,schedule_runs}'::text[];
end $$;

-- Locks: queue.access, as migrate, and those of _switch_limits. Raises: 22023, 55P03.
create or replace function queue.grant_access(role text, kind text, queues text[] default null)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  perform queue._check_role(grant_access.role);
  perform queue._grants(grant_access.kind);
  perform queue._check_list('queues', grant_access.queues);
  if grant_access.queues = '{}' then
    perform queue._invalid('queues holds no name, or NULL', 'Name queues or prefix* patterns; NULL instead of a list is all.');
  end if;
  perform queue._check_name('queue', q) from unnest(grant_access.queues) q;
  lock table queue.access in share row exclusive mode;
  -- what another role of this name had, that was dropped, does not come back
  delete from queue.access a using pg_roles r
  where a.role = grant_access.role and r.rolname = a.role and not queue._may_enter(r.oid);
  insert into queue.access (role, kind, queues)
  values (grant_access.role, grant_access.kind, case when '*' = any (grant_access.queues) then null else grant_access.queues end)
  on conflict on constraint access_pkey do update set queues = excluded.queues;
  perform queue._regrant(grant_access.role);
  perform queue._switch_limits();
end $$;
comment on function queue.grant_access(text, text, text[]) is
  'Lets a role act as producer, worker, operator or reader: of all queues, or of some (names, prefix*). The kinds are siblings: a role that needs two gets both; the same kind again replaces its queues.';

-- Locks: as grant_access. Raises: 22023, 55P03.
create or replace function queue.revoke_access(role text)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  lock table queue.access in share row exclusive mode;
  delete from queue.access a where a.role = revoke_access.role;
  if not found or exists (select from pg_roles r where r.rolname = revoke_access.role) then
    perform queue._check_role(revoke_access.role);
    perform queue._take_all(revoke_access.role);
  end if;
  perform queue._switch_limits();
end $$;
comment on function queue.revoke_access(text) is 'Takes back everything that grant_access gave a role; of one that was dropped, too.';

-- Takes from a role everything in the schema. Locks: the caller's, which are those of migrate.
create or replace function queue._take_all(p_role text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  execute format('revoke all on all functions in schema queue from %I', p_role);
  execute format('revoke all on all tables in schema queue from %I', p_role);
  execute format('revoke usage on schema queue from %I', p_role);
end $$;

-- Raises: 22023 unless there is such a role.
create or replace function queue._check_role(p_role text)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if not exists (select from pg_roles r where r.rolname = p_role) or p_role is null then
    perform queue._invalid('no such role', 'CREATE ROLE it first.', 'role: ' || coalesce(left(p_role, 200), 'NULL'));
  end if;
end $$;

-- Gives a role what its rows of queue.access say, and takes what only unlimited roles get from one that is limited.
create or replace function queue._regrant(p_role text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_object record;
begin
  -- even where the role has it: afterwards all plans are made anew (queue._unlimited)
  execute format('grant usage on schema queue to %I', p_role);
  for v_object in
    with wanted as (
      select n.name, bool_or(a.queues is null or n.name <> all (queue._unlimited_only())) as is_given
      from queue.access a
      cross join lateral queue._grants(a.kind) g
      cross join lateral unnest(g.functions || g.views) n (name)
      where a.role = p_role group by n.name)
    select w.is_given, case when p.oid is not null then 'execute on function ' || p.oid::regprocedure else 'select on ' || c.oid::regclass end as what
    from wanted w
    left join pg_proc p on p.pronamespace = 'queue'::regnamespace and p.proname = w.name
    left join pg_class c on c.relnamespace = 'queue'::regnamespace and c.relname = w.name and c.relkind = 'v'
    where p.oid is not null or c.oid is not null
  loop
    execute format(case when v_object.is_given then 'grant %s to %I' else 'revoke %s from %I' end, v_object.what, p_role);
  end loop;
end $$;

-- After an upgrade, or where the extension was dropped and made again. What a role had that was dropped does not come back
-- to another of its name; but where no role may enter the tables alone were restored, and all get what they had.
-- Locks: the caller's, which are those of migrate; those of _switch_limits.
create or replace function queue._restore_grants()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if exists (select from queue.access a join pg_roles r on r.rolname = a.role where queue._may_enter(r.oid)) then
    delete from queue.access a using pg_roles r where r.rolname = a.role and not queue._may_enter(r.oid);
  end if;
  perform queue._regrant(x.role)
  from (select distinct a.role from queue.access a join pg_roles r on r.rolname = a.role) x;
  perform queue._switch_limits();
end $$;

-- Turns checking on when a role is limited, and off when none is. Views that filter must not show a condition
-- of the reader's own what they filter out, which a barrier prevents, at the cost of some plans.
-- Locks: of those views, for which it waits 100 ms at a time, a hundred times: a transaction that has read one may stay open,
-- and whoever comes to read one meanwhile, as operations do that hold ADM, waits no longer than that.
-- Raises: 55P03.
create or replace function queue._switch_limits()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_is_limited boolean := exists (select from queue.access a where a.queues is not null);
  v_timeout text := current_setting('lock_timeout');
  v_view text;
begin
  if v_is_limited and to_regclass('queue.unlimited') is not null then
    drop view queue.unlimited;
  elsif not v_is_limited and to_regclass('queue.unlimited') is null then
    create view queue.unlimited as select true as is_unlimited;
  end if;
  for v_try in 1 .. 100 loop
    -- a try that fails keeps none of them locked
    begin
      perform set_config('lock_timeout', '100ms', true);
      -- one that an upgrade has replaced has lost its barrier
      for v_view in
        select c.relname from pg_class c
        where c.relnamespace = 'queue'::regnamespace and c.relname in ('jobs', 'attempts', 'queues', 'workers', 'metrics') and c.relkind = 'v'
          and coalesce('security_barrier=true' = any (c.reloptions), false) <> v_is_limited
      loop
        execute format(case when v_is_limited then 'alter view queue.%I set (security_barrier = true)' else 'alter view queue.%I reset (security_barrier)' end, v_view);
      end loop;
      perform set_config('lock_timeout', v_timeout, true);
      exit;
    exception when lock_not_available then
      if v_try = 100 then
        raise exception using errcode = '55P03', message = 'a view is in use by a transaction that stays open', detail = 'view: queue.' || v_view,
          hint = 'Nothing was changed. End the transactions that have been open for long (see pg_stat_activity), and call it again.';
      end if;
    end;
  end loop;
end $$;

revoke all on function queue._grants(text), queue._unlimited_only(), queue.grant_access(text, text, text[]), queue.revoke_access(text),
  queue._take_all(text), queue._check_role(text), queue._regrant(text), queue._restore_grants(), queue._switch_limits() from public;
