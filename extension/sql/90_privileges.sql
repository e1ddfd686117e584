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
      functions := '{register_task,register_worker,claims,fetch,heartbeat,extend,deregister_worker,before_sleep,after_sleep,succeed,fail,retry_later,release,finish_many,finish_and_fetch,reap,tick,result,await_result,peek,version,backoff,next_runs,schedule,unschedule}';
      views := '{schedules}';
    when 'operator' then
      functions := '{register_task,next,move,copy,delete,fail_jobs,done,set_priority,reschedule,delete_queue,search,get,stats,health,autoscale_hint,cancel,hold,unhold,retry,retry_failed,pause,resume,configure_queue,create_queue,prune,reap,tick,result,graph,why,check,peek,version,backoff,next_runs,schedule,unschedule,enable_schedule,run_now}';
      views := '{jobs,attempts,queues,workers,tasks,locks,semaphores,metrics,schedules,schedule_runs}';
    when 'reader' then
      functions := '{search,get,stats,health,autoscale_hint,result,graph,why,check,peek,version,backoff,next_runs}';
      views := '{jobs,attempts,queues,workers,tasks,locks,semaphores,metrics,schedules,schedule_runs}';
    else
      perform queue._invalid('kind is not one of its values', 'Allowed: producer, worker, operator, reader.', 'kind: ' || coalesce(kind, 'NULL'));
  end case;
end $$;

-- Raises: 22023.
create or replace function queue.grant_access(role text, kind text)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_grants record;
  v_object record;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  if not exists (select from pg_roles r where r.rolname = grant_access.role) then
    perform queue._invalid('no such role', 'CREATE ROLE it first.', 'role: ' || coalesce(grant_access.role, 'NULL'));
  end if;
  select g.functions, g.views into v_grants from queue._grants(grant_access.kind) g;
  execute format('grant usage on schema queue to %I', grant_access.role);
  for v_object in
    select p.oid::regprocedure::text as signature from pg_proc p where p.pronamespace = 'queue'::regnamespace and p.proname = any (v_grants.functions)
  loop
    execute format('grant execute on function %s to %I', v_object.signature, grant_access.role);
  end loop;
  for v_object in select v from unnest(v_grants.views) v loop
    execute format('grant select on queue.%I to %I', v_object.v, grant_access.role);
  end loop;
end $$;
comment on function queue.grant_access(text, text) is
  'Lets a role act as producer, worker, operator or reader. The kinds are siblings: a role that needs two gets both.';

-- Raises: 22023.
create or replace function queue.revoke_access(role text)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  if not exists (select from pg_roles r where r.rolname = revoke_access.role) then
    perform queue._invalid('no such role', 'Name an existing role.', 'role: ' || coalesce(revoke_access.role, 'NULL'));
  end if;
  execute format('revoke all on all functions in schema queue from %I', revoke_access.role);
  execute format('revoke all on all tables in schema queue from %I', revoke_access.role);
  execute format('revoke usage on schema queue from %I', revoke_access.role);
end $$;
comment on function queue.revoke_access(text) is 'Takes back everything that grant_access gave a role.';

revoke all on function queue._grants(text), queue.grant_access(text, text), queue.revoke_access(text) from public;
