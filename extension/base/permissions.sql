-- Permissions: which functions (_function_grants) and views each kind of role may use, on all queues or on
-- some (base/queue_access.sql).

-- Locks: queue.access, as migrate, and those of _switch_restriction. Raises: 22023, 55P03.
create or replace function queue.grant_access(role text, kind text, queues text[] default null)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_before jsonb;
begin
  {{installed}}
  perform queue._check_role(grant_access.role);
  perform queue._grants(grant_access.kind);
  perform queue._check_list('queues', grant_access.queues);
  perform queue._check_are_few(grant_access.queues);
  if grant_access.queues = '{}' then
    perform queue._invalid('queues is empty',
      'Name queues or prefix* patterns; pass NULL for all.');
  end if;
  perform queue._check_name('queue', q) from unnest(grant_access.queues) q;
  lock table queue.access in share row exclusive mode;
  -- The grants of a dropped role with this name do not come back.
  delete from queue.access a using pg_roles r
  where a.role = grant_access.role and r.rolname = a.role and not queue._has_usage(r.oid);
  perform queue._revoke_nameless() where found;
  v_before := queue._access_before(grant_access.role);
  insert into queue.access (role, kind, queues)
  values (grant_access.role,
    grant_access.kind, case when '*' = any (grant_access.queues) then null else grant_access.queues end)
  on conflict on constraint access_pkey do update set queues = excluded.queues;
  perform queue._revoke_public();
  perform queue._regrant(grant_access.role);
  perform queue._switch_restriction();
  perform queue._audit('grant_access', jsonb_build_object('role', grant_access.role, 'kind',
    grant_access.kind, 'queues', grant_access.queues), p_before => v_before);
end $$;
comment on function queue.grant_access(text, text, text[]) is
  'Allows a role to act as producer, worker, operator or reader, on all queues or on some (names,'
    ' prefix*). The kinds are independent: grant both to a role that needs two. Granting the same kind again'
    ' replaces its queues.';

-- Locks: as grant_access. Raises: 22023, 55P03.
create or replace function queue.revoke_access(role text)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_before jsonb;
begin
  {{installed}}
  lock table queue.access in share row exclusive mode;
  v_before := queue._access_before(revoke_access.role);
  delete from queue.access a where a.role = revoke_access.role;
  if not found or exists (select from pg_roles r where r.rolname = revoke_access.role) then
    perform queue._check_role(revoke_access.role);
    perform queue._revoke_all(revoke_access.role);
  else
    perform queue._revoke_nameless();
  end if;
  perform queue._switch_restriction();
  perform queue._audit('revoke_access', jsonb_build_object('role', revoke_access.role), p_before => v_before);
end $$;
comment on function queue.revoke_access(text) is
  'Revokes everything that grant_access granted to a role, even if the role was dropped.';

-- The functions and views of a kind of role. Raises: 22023 for an unknown kind.
create or replace function queue._grants(kind text, out functions text[], out views text[])
language plpgsql stable parallel safe security invoker as $$
begin
  if kind in ('producer', 'worker', 'operator', 'reader') is not true then
    perform queue._invalid('kind is not one of its values', 'Allowed: producer, worker, operator, reader.',
                           'kind: ' || coalesce(kind, 'NULL'));
  end if;
  functions := array(select f.name from queue._function_grants() f where kind = any (f.kinds));
  views := array(select w.name from queue._view_grants() w where kind = any (w.kinds));
end $$;

-- The functions and views that span queues, so a role restricted to some queues does not get them.
create or replace function queue._unrestricted_only()
returns text[] language plpgsql stable parallel safe security invoker as $$
begin
  return array(
    select f.name from queue._function_grants() f where not f.is_for_some
    union all
    select w.name from queue._view_grants() w where not w.is_for_some);
end $$;

-- Whether a role owns the schema or the tables: then its rights are its own, not those of grant_access.
create or replace function queue._is_owner(p_role text)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return p_role in (
    select pg_get_userbyid(n.nspowner) from pg_namespace n where n.nspname = 'queue'
    union all
    select pg_get_userbyid(c.relowner) from pg_class c where c.oid = 'queue.access'::regclass);
end $$;

-- Revokes everything in the schema from a role, unless it is the owner, who would be locked out.
-- Locks: the caller's, which are those of migrate.
create or replace function queue._revoke_all(p_role text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if queue._is_owner(p_role) then
    return;
  end if;
  execute format('revoke all on all routines in schema queue from %I', p_role);
  execute format('revoke all on all tables in schema queue from %I', p_role);
  execute format('revoke all on all sequences in schema queue from %I', p_role);
  execute format('revoke usage on schema queue from %I', p_role);
end $$;

-- Revokes what ALTER DEFAULT PRIVILEGES of the owner gives to other roles or PUBLIC: rights to its tables,
-- and to functions that no kind of role may call. It does so for everything that the owner has in the schema.
-- Locks: the caller's, which are those of migrate.
create or replace function queue._revoke_defaults()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_revoke text;
begin
  for v_revoke in
    with given as (
      select distinct d.defaclobjtype as kind, coalesce(quote_ident(r.rolname), 'public') as grantee
      from pg_default_acl d
      cross join lateral aclexplode(d.defaclacl) a
      left join pg_roles r on r.oid = a.grantee
      where pg_get_userbyid(d.defaclrole) = current_user and a.grantee <> d.defaclrole
        and d.defaclnamespace in (0, 'queue'::regnamespace)),
    own as (
      select case c.relkind when 'S' then 'S' else 'r' end as kind, 'table' as word,
        c.oid::regclass::text as name
      from pg_class c
      where c.relnamespace = 'queue'::regnamespace and c.relkind in ('r', 'v', 'S')
        and pg_get_userbyid(c.relowner) = current_user
      union all
      select 'f', 'routine', p.oid::regprocedure::text
      from pg_proc p
      where p.pronamespace = 'queue'::regnamespace and pg_get_userbyid(p.proowner) = current_user)
    select format('revoke all on %s %s from %s cascade', o.word, string_agg(o.name, ', '), g.grantee)
    from given g join own o on o.kind = g.kind::text
    group by o.word, o.kind, g.grantee
  loop
    execute v_revoke;
  end loop;
end $$;

-- Revokes what PUBLIC has after a restore without privileges (pg_restore --no-privileges): every role that
-- may enter the schema could call every function.
-- Locks: rows of pg_proc, if there is anything to revoke.
create or replace function queue._revoke_public()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_routines text := (
    select string_agg(p.oid::regprocedure::text, ', ')
    from pg_proc p
    cross join lateral aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
    where p.pronamespace = 'queue'::regnamespace and pg_get_userbyid(p.proowner) = current_user
      and a.grantee = 0);
begin
  if v_routines is not null then
    execute format('revoke all on routine %s from public cascade', v_routines);
  end if;
end $$;

-- Revokes everything from roles without a row of queue.access. It runs after the rows of a role that no
-- longer exists were deleted, because that role may just have another name now.
-- Locks: the caller's, which are those of migrate.
create or replace function queue._revoke_nameless()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._revoke_all(r.rolname)
  from pg_roles r
  where queue._has_usage(r.oid)
    and not exists (select from queue.access a where a.role = r.rolname);
end $$;

-- Raises: 22023 unless there is such a role.
create or replace function queue._check_role(p_role text)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if not exists (select from pg_roles r where r.rolname = p_role) or p_role is null then
    perform queue._invalid('no such role', 'Create it first with CREATE ROLE.',
      'role: ' || coalesce(left(p_role, 200), 'NULL'));
  end if;
end $$;

-- Grants a role the rights in its rows of queue.access, and revokes those that a restricted role may not
-- have. It revokes nothing from the owner.
create or replace function queue._regrant(p_role text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_object record;
begin
  -- Even if the role has it already: this makes PostgreSQL remake all plans (queue._unrestricted).
  execute format('grant usage on schema queue to %I', p_role);
  for v_object in
    with wanted as (
      select n.name, queue._is_owner(p_role)
          or bool_or(a.queues is null or n.name <> all (queue._unrestricted_only())) as is_given
      from queue.access a
      cross join lateral queue._grants(a.kind) g
      cross join lateral unnest(g.functions || g.views) n (name)
      where a.role = p_role group by n.name)
    select w.is_given, case when p.oid is not null then 'execute on routine ' || p.oid::regprocedure
      else 'select on ' || c.oid::regclass end as what
    from wanted w
    left join pg_proc p on p.pronamespace = 'queue'::regnamespace and p.proname = w.name
    left join pg_class c on c.relnamespace = 'queue'::regnamespace and c.relname = w.name and c.relkind = 'v'
    where p.oid is not null or c.oid is not null
  loop
    execute format(case when v_object.is_given then 'grant %s to %I' else 'revoke %s from %I' end,
      v_object.what, p_role);
  end loop;
end $$;

-- Restores the grants after an upgrade, or after the extension was dropped and created again. Rights of a
-- dropped role do not come back to another role of its name. But if no role may enter the schema, only the
-- tables were restored, and all roles get their rights back.
-- Locks: the caller's, which are those of migrate; those of _switch_restriction.
create or replace function queue._restore_grants()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if exists (select from queue.access a join pg_roles r on r.rolname = a.role where queue._has_usage(r.oid))
    then
    delete from queue.access a using pg_roles r where r.rolname = a.role and not queue._has_usage(r.oid);
  end if;
  perform queue._revoke_public(), queue._revoke_defaults();
  perform queue._regrant(x.role)
  from (select distinct a.role from queue.access a join pg_roles r on r.rolname = a.role) x;
  perform queue._switch_restriction();
end $$;

-- Switches the checks on when the first role is restricted, and off when none is. A barrier keeps filtering
-- views from showing hidden rows to a reader's own condition, at the cost of some plans.
-- Locks: those views. It waits for 100 ms at a time, a hundred times, because a transaction that has read a
-- view may stay open. Sessions that read a view meanwhile, among them operations that hold the admission
-- lock, wait behind it for at most 100 ms.
-- Raises: 55P03.
create or replace function queue._switch_restriction()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_is_restricted boolean := exists (select from queue.access a where a.queues is not null);
  v_timeout text := current_setting('lock_timeout');
  v_view text;
begin
  if v_is_restricted and to_regclass('queue.unrestricted') is not null then
    drop view queue.unrestricted;
  elsif not v_is_restricted and to_regclass('queue.unrestricted') is null then
    create view queue.unrestricted as select true as is_unrestricted;
  end if;
  for v_try in 1 .. 100 loop
    -- A failed try leaves none of them locked.
    begin
      perform set_config('lock_timeout', '100ms', true);
      -- A view that an upgrade has replaced has lost its barrier.
      for v_view in
        select c.relname from pg_class c
        where c.relnamespace = 'queue'::regnamespace
          and c.relname in ('jobs', 'attempts', 'steps', 'queues', 'workers', 'metrics', 'minutes', 'audit')
          and c.relkind = 'v'
          and coalesce('security_barrier=true' = any (c.reloptions), false) <> v_is_restricted
      loop
        execute format(case when v_is_restricted then 'alter view queue.%I set (security_barrier = true)'
          else 'alter view queue.%I reset (security_barrier)' end, v_view);
      end loop;
      perform set_config('lock_timeout', v_timeout, true);
      exit;
    exception when lock_not_available then
      if v_try = 100 then
        raise exception using errcode = '55P03',
          message = 'a view is in use by a transaction that stays open', detail = 'view: queue.' || v_view,
          hint = 'Nothing was changed. End the transactions that have been open for long (see'
            ' pg_stat_activity), and call it again.';
      end if;
    end;
  end loop;
end $$;

-- The functions that roles of each kind may call. is_for_some: also roles restricted to some queues. The
-- functions of shards exist only in a shard (cluster/defer.sql).
create or replace function queue._function_grants()
returns table (name text, kinds text[], is_for_some boolean)
language plpgsql immutable parallel safe security invoker rows 50 as $$
begin
  return query
    select unnest(g.names), g.kinds, g.is_for_some
    from (values
      ('{producer}'::text[], true, '{
        check_triggers, defer, defer_chain, defer_group, defer_many, defer_trigger}'::text[]),
      ('{producer}', true, '{
        shard_defer, shard_defer_many, shard_key, _shard_check_needs, _shard_enter, _shard_invalid,
        _shard_nested_jobs, _shard_note, _shard_tagged}'),
      ('{producer,worker,operator,reader}', true, '{
        shard_find, shard_map, shard_of, shard_stopped, shard_under_way}'),
      ('{producer,worker}', true, '{await_result}'),
      ('{producer,worker,operator}', true, '{signal}'),
      ('{producer,worker,operator,reader}', true, '{read_stream, result, streams, version}'),
      ('{worker}', true, '{
        after_sleep, await_jobs, before_sleep, begin_step, claims, deregister_worker, emit, fail_step, fetch,
        finish_and_fetch, finish_many, finish_step, finish_steps, function_call, heartbeat, is_busy,
        read_steps, register_worker, run_function, set_progress, sleep, wait, work, worker_died}'),
      ('{worker,operator}', true, '{attempt_outcome, attempts_left, extend, fail, reap, release, retry_later,
        succeed, tick}'),
      ('{worker,operator,reader}', true, '{backoff, needs, next_runs, peek}'),
      ('{operator}', true, '{
        cancel, cancel_children, configure_queue, copy, create_queue, delete, delete_queue, done,
        fail_jobs, fork, hold, move, next, pause, reschedule, resume, retry, retry_failed, set_args,
        set_deadline, set_priority, unhold}'),
      ('{operator,reader}', true, '{
        autoscale_hint, get, graph, list_jobs, search, series, stats, task_stats, waits_for, why}'),
      ('{producer}', false, '{open_group}'),
      ('{producer,worker,operator}', false, '{publish, register_task}'),
      ('{producer,operator}', false, '{close_group}'),
      ('{worker,operator}', false, '{schedule, unschedule}'),
      ('{operator}', false, '{
        configure, configure_key, configure_share, enable_schedule, prune, run_now, unblock}'),
      ('{operator,reader}', false, '{check, health}')) g (kinds, is_for_some, names);
end $$;

-- The views that roles may read, in the same form.
create or replace function queue._view_grants()
returns table (name text, kinds text[], is_for_some boolean)
language plpgsql immutable parallel safe security invoker rows 50 as $$
begin
  return query values
    ('attempts'::text, '{operator,reader}'::text[], true),
    ('audit', '{operator,reader}', true),
    ('groups', '{operator,reader}', false),
    ('jobs', '{operator,reader}', true),
    ('locks', '{operator,reader}', false),
    ('metrics', '{operator,reader}', true),
    ('minutes', '{operator,reader}', true),
    ('queues', '{operator,reader}', true),
    ('schedule_runs', '{operator,reader}', false),
    ('schedules', '{worker,operator,reader}', false),
    ('semaphores', '{operator,reader}', false),
    ('shares', '{operator,reader}', false),
    ('steps', '{operator,reader}', true),
    ('tasks', '{operator,reader}', false),
    ('workers', '{operator,reader}', true);
end $$;
