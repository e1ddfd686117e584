-- Restrictions: roles that may use only some queues.
--
-- queue.access records what grant_access granted. While no role is restricted, the view queue.unrestricted
-- exists, and public functions check only for its name, which costs as much as the check for
-- queue.installation that it replaces. Without the view, every caller needs the owner's rights or a row of
-- queue.access, its own or that of a role whose privileges it has.
--
-- The caller: a security definer function can't see current_user of its caller. The caller is the role set by
-- SET ROLE, else the role that logged in (_caller). This is the role whose EXECUTE was checked, unless the
-- call came through another security definer function; then that function's caller needs rights too. Views
-- filter by current_user, which is exact.
-- Tests: base/permissions.sql.

-- Raises: 42501 unless the caller may use all queues that a name or pattern selects (NULL: every queue).
create or replace function queue._require_queue(p_kinds text[], p_queue text)
returns void language plpgsql stable parallel safe security invoker as $$
declare
  v_allowed text[] := queue._allowed_queues(p_kinds);
begin
  if v_allowed is not null and queue._allows(v_allowed, coalesce(p_queue, '*')) is not true then
    perform queue._queue_not_allowed(p_queue, v_allowed);
  end if;
end $$;

-- Returns those of a list of names and patterns (NULL: all) that the caller may use, in the same order.
-- Raises: 42501 if there are none.
create or replace function queue._narrow_queues(p_kinds text[], p_queues text[])
returns text[] language plpgsql stable parallel safe security invoker as $$
declare
  v_allowed text[] := queue._allowed_queues(p_kinds);
  v_queues text[];
begin
  if v_allowed is null or p_queues is null and v_allowed <> '{}' then
    return coalesce(v_allowed, p_queues);
  elsif p_queues = '{}' or array_ndims(p_queues) > 1 or array_position(p_queues, null) is not null
    or '' = any (p_queues) then
    return p_queues;  -- the function rejects these
  end if;
  select array_agg(x.queue order by x.n, x.queue) into v_queues
  from (
    select min(q.n) as n, case when queue._allows(array[l], q.queue) then q.queue else l end as queue
    from unnest(p_queues) with ordinality q (queue, n) cross join unnest(v_allowed) l
    where queue._allows(array[l], q.queue) or queue._allows(array[q.queue], l) group by 2) x;
  if v_queues is null then
    perform queue._queue_not_allowed(p_queues[1], v_allowed);
  end if;
  return v_queues;
end $$;

-- Raises: QJ001 for a job of another queue, as if the job did not exist.
create or replace function queue._require_jobs(p_kinds text[], p_ids bigint[])
returns void language plpgsql volatile parallel safe security invoker as $$
declare
  v_allowed text[] := queue._allowed_queues(p_kinds);
  v_id bigint;
begin
  if v_allowed is null then
    return;
  end if;
  v_id := queue._job_not_allowed(v_allowed, p_ids);
  if v_id is not null then
    perform queue._job_not_found(v_id);
  end if;
end $$;

-- Raises: QJ007 if the worker serves queues that the caller may not use, as if the worker did not exist.
create or replace function queue._require_worker(p_worker bigint)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if not queue._serves_allowed(queue._allowed_queues('{worker}'), p_worker) then
    perform queue._worker_gone(p_worker);
  end if;
end $$;

-- Raises: QJ002 for a claim on a job of another queue, held by a worker of other queues.
create or replace function queue._require_claims(p_ids bigint[], p_claims bigint[])
returns void language plpgsql volatile parallel safe security invoker as $$
declare
  v_allowed text[] := queue._allowed_queues('{worker,operator}');
  v_lost record;
begin
  if v_allowed is null then
    return;
  end if;
  select aj.id, aj.claim into v_lost
  from unnest(p_ids, p_claims) u (id, claim)
  join queue.active_job aj on aj.id = u.id and aj.claim = u.claim
  join queue.job_now j on j.id = u.id
  where not queue._allows(v_allowed, j.queue)
    and queue._serves_allowed(v_allowed, aj.worker_id) is not true limit 1;
  if found then
    perform queue._claim_lost(v_lost.id, v_lost.claim);
  end if;
end $$;

-- As _require_claims, for a list of outcomes, and for the queues and needs that they name. _finish checks
-- malformed lists.
-- Raises: QJ001, QJ002, 42501.
create or replace function queue._require_outcomes(p_outcomes jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_claims record;
begin
  if queue._allowed_queues('{worker,operator}') is null or jsonb_typeof(p_outcomes) is distinct from 'array'
    then
    return;
  end if;
  begin
    select array_agg(o.id) as ids, array_agg(o.claim) as claims into v_claims
    from jsonb_to_recordset(p_outcomes) o (id bigint, claim bigint);
  exception when data_exception then
    return;
  end;
  perform queue._require_claims(v_claims.ids, v_claims.claims);
  perform queue._require_jobs('{worker,operator}', array[n::text::bigint])
  from jsonb_array_elements(p_outcomes) o
  cross join jsonb_array_elements(case when jsonb_typeof(o -> 'needs') = 'array' then o -> 'needs' end) n
  where n::text ~ '^[0-9]{1,18}$';
  perform queue._require_queue('{worker,operator}', o -> 'options' ->> 'queue')
  from jsonb_array_elements(p_outcomes) o where o -> 'options' ->> 'queue' <> '';
end $$;

-- Checks a job that was just deferred. Raises: 42501 if it is in another queue; QJ004 if it is an existing
-- job of another queue, which holds the queueing lock or was deferred first with the idempotency key; QJ001
-- if its needs or parent are in another queue.
-- p_key, p_key_queue: the result of _used_idempotency_key. A removed job counts as being in that queue.
-- p_table: the table whose trigger deferred it. Its owner's rights suffice, if the owner may defer by
-- triggers.
create or replace function queue._require_deferred(p_id bigint, p_table oid, p_key text, p_key_queue text)
returns void language plpgsql volatile parallel safe security invoker as $$
declare
  v_allowed text[] := queue._allowed_queues('{producer}');
  v_owner name;
  v_other bigint;
  v_job record;
begin
  -- This comes first: reading the log would make SERIALIZABLE transactions fail that defer at the same time.
  if v_allowed is null then
    return;
  end if;
  -- For a job that existed before, only the queue counts.
  select coalesce(j.queue, p_key_queue) as queue, x.is_new, j.queueing_lock,
    case when x.is_new then array_remove(j.needs || (j.options ->> 'parent')::bigint, null) end as others
      into v_job
  from (select) one
  left join lateral (select j.* from queue.job_now j where j.id = p_id offset 0) j on true
  cross join lateral (
    select coalesce(j.xid = pg_current_xact_id_if_assigned(), false) as is_new) x;
  v_other := case when v_job.others <> '{}' then queue._job_not_allowed(v_allowed, v_job.others) end;
  if p_table is not null and (v_other is not null or not queue._allows(v_allowed, v_job.queue)) then
    select r.rolname into v_owner from pg_class c join pg_roles r on r.oid = c.relowner where c.oid = p_table;
    if has_function_privilege(v_owner, 'queue.defer_trigger()', 'execute') then
      v_allowed := queue._allowed_queues('{producer}', v_owner);
      v_other := case when v_job.others <> '{}' then queue._job_not_allowed(v_allowed, v_job.others) end;
    end if;
  end if;
  if v_other is not null then
    perform queue._job_not_found(v_other);
  elsif not queue._allows(v_allowed, v_job.queue) then
    if not v_job.is_new and p_key <> '' then
      perform queue._key_taken(p_key);
    elsif not v_job.is_new then
      perform queue._already_queued(p_id, v_job.queueing_lock,
        'A job in a queue that you may not use has this queueing_lock. Pass another one.');
    end if;
    perform queue._queue_not_allowed(v_job.queue, v_allowed);
  end if;
end $$;

-- The queues, names and patterns, that a role (NULL: the caller) may use in one of the kinds; NULL means all.
create or replace function queue._allowed_queues(p_kinds text[], p_role name default null)
returns text[] language plpgsql stable parallel safe security invoker as $$
declare
  v_role name := coalesce(p_role, queue._caller());
  v_is_unrestricted boolean;
  v_allowed text[];
begin
  if to_regclass('queue.unrestricted') is not null or to_regclass('queue.access') is null
    or pg_has_role(v_role, current_user, 'usage') then
    return null;
  end if;
  select bool_or(a.queues is null), coalesce(array_agg(distinct q) filter (where q is not null), '{}')
  into v_is_unrestricted, v_allowed
  from queue.access a join pg_roles r on r.rolname = a.role left join lateral unnest(a.queues) q on true
  where a.kind = any (p_kinds) and pg_has_role(v_role, r.oid, 'usage') and queue._has_usage(r.oid);
  return case when v_is_unrestricted then null else v_allowed end;
end $$;

create or replace function queue._caller()
returns name language plpgsql stable parallel safe security invoker as $$
begin
  return case when current_setting('role') = 'none' then session_user else current_setting('role')::name end;
end $$;

-- The view queue.unrestricted, NULL without it: to_regclass at no cost, for functions that every job calls.
-- It is declared immutable although it is not, so that the planner evaluates it once and puts the view into
-- the plan. PostgreSQL remakes a plan that contains a relation when that relation is dropped. Use it as
-- coalesce(v_none, queue._unrestricted()) with a v_none that is NULL; otherwise the planner evaluates more,
-- and the relation is not in the plan. A plan made without the view keeps its NULL, so NULL means: check
-- yourself. Every name in it is qualified, because defer, which has no search_path, is planned with it.
-- Why no restriction is missed: a plan that was being made when the view was dropped may not notice this. But
-- every grant_access also changes the rights on the schema (_regrant), after which PostgreSQL remakes all
-- plans, including such ones.
create or replace function queue._unrestricted()
returns pg_catalog.regclass language plpgsql immutable parallel safe security invoker as $$
begin
  return pg_catalog.to_regclass('queue.unrestricted');
end $$;

-- Whether a role itself was granted USAGE on the schema, as grant_access does. If not, its rows of
-- queue.access belong to a dropped role of the same name.
create or replace function queue._has_usage(p_role oid)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (
    select from pg_namespace n cross join lateral aclexplode(n.nspacl) x
    where n.nspname = 'queue' and x.grantee = p_role and x.privilege_type = 'USAGE');
end $$;

-- Whether the allowed queues include all that a name or pattern selects.
create or replace function queue._allows(p_limits text[], p_pattern text)
returns boolean language plpgsql immutable parallel safe security invoker as $$
begin
  return p_limits is null
    or exists (select from unnest(p_limits) l where l = p_pattern or right(l, 1) = '*'
      and starts_with(p_pattern, left(l, -1)));
end $$;

-- Raises: 42501, always.
create or replace function queue._queue_not_allowed(queue text, limits text[])
returns void language plpgsql stable parallel safe security invoker as $$
begin
  raise exception using errcode = '42501', message = 'this role may not use the queue',
    detail = format('queue: %s, role: %s', coalesce(left(queue, 200), 'all'), queue._caller()),
    hint = case when limits = '{}' then 'Have the owner call queue.grant_access for the role.'
                else format('It may use these: %s.', array_to_string(limits, ', ')) end;
end $$;

-- Returns one of these jobs whose queue is not allowed, if there is one. Settings: as _check_needs.
create or replace function queue._job_not_allowed(p_limits text[], p_ids bigint[])
returns bigint language plpgsql stable parallel safe security invoker
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off
set enable_mergejoin = off set enable_bitmapscan = off as $$
begin
  return (
    select j.id
    from unnest(p_ids) u (id)
    cross join lateral (
      select j.id, j.queue from queue.job_now j where j.id = u.id offset 0) j
    where not queue._allows(p_limits, j.queue) limit 1);
end $$;

-- Whether all queues of a worker are allowed; NULL if the worker no longer exists.
create or replace function queue._serves_allowed(p_limits text[], p_worker bigint)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select p_limits is null or w.queues is not null and not exists (select from unnest(w.queues) q
      where not queue._allows(p_limits, q))
    from queue.worker w where w.id = p_worker);
end $$;
