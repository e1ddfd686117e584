-- Limits: roles that may act on some queues only.
--
-- queue.access says what grant_access gave to whom. Where no role is limited there is the view
-- queue.unlimited, and public functions look no further than for its name, which costs as much as the look
-- for queue.installation that it takes the place of. Without it everybody needs a row of queue.access, his
-- own or of a role whose privileges he has, or those of the owner.
--
-- Who calls: a security definer function can't see current_user of its caller. It is the role that SET ROLE
-- set, else the one that logged in (_caller). That is the role whose EXECUTE was checked, unless the call
-- came through another security definer function; then the caller of that one needs rights himself.
-- Views filter by current_user, which is exact.

create or replace function queue._caller()
returns name language plpgsql stable parallel safe security invoker as $$
begin
  return case when current_setting('role') = 'none' then session_user else current_setting('role')::name end;
end $$;

-- The view queue.unlimited, NULL without it: to_regclass for the calls that every job makes, at no cost. It is called
-- immutable, which it is not, so that the planner works it out once and puts the view into the plan; and a plan that
-- holds a relation is made anew when that is dropped. Use it as coalesce(v_none, queue._unlimited()) with a v_none that is
-- NULL, or the planner works out more and the relation is not in the plan. A plan made without the view keeps its NULL, so
-- NULL means: look yourself. All in it is qualified, as defer is planned with it, which has no search_path.
-- Why no limit is overlooked: a plan that was just being made when the view went may not hear of that; but every
-- grant_access changes the rights on the schema, too (_regrant), after which PostgreSQL has all plans made anew, also those.
create or replace function queue._unlimited()
returns pg_catalog.regclass language plpgsql immutable parallel safe security invoker as $$
begin
  return pg_catalog.to_regclass('queue.unlimited');
end $$;

-- The queues, names and patterns, on which a role (NULL: the caller) may act in one of the kinds; NULL is all.
create or replace function queue._limits(p_kinds text[], p_role name default null)
returns text[] language plpgsql stable parallel safe security invoker as $$
declare
  v_role name := coalesce(p_role, queue._caller());
  v_is_unlimited boolean;
  v_limits text[];
begin
  if to_regclass('queue.unlimited') is not null or to_regclass('queue.access') is null or pg_has_role(v_role, current_user, 'usage') then
    return null;
  end if;
  select bool_or(a.queues is null), coalesce(array_agg(distinct q) filter (where q is not null), '{}') into v_is_unlimited, v_limits
  from queue.access a join pg_roles r on r.rolname = a.role left join lateral unnest(a.queues) q on true
  where a.kind = any (p_kinds) and pg_has_role(v_role, r.oid, 'usage') and queue._may_enter(r.oid);
  return case when v_is_unlimited then null else v_limits end;
end $$;

-- Whether a role was given USAGE of the schema itself, as grant_access does. If not, its rows of queue.access are those of
-- another role of its name, that was dropped.
create or replace function queue._may_enter(p_role oid)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (
    select from pg_namespace n cross join lateral aclexplode(n.nspacl) x
    where n.nspname = 'queue' and x.grantee = p_role and x.privilege_type = 'USAGE');
end $$;

-- Whether limits hold all that a name or pattern selects.
create or replace function queue._covers(p_limits text[], p_pattern text)
returns boolean language plpgsql immutable parallel safe security invoker as $$
begin
  return p_limits is null
    or exists (select from unnest(p_limits) l where l = p_pattern or right(l, 1) = '*' and starts_with(p_pattern, left(l, -1)));
end $$;

-- Raises: 42501 unless the caller may act on all that a name or pattern selects (NULL: on every queue).
create or replace function queue._bound_queue(p_kinds text[], p_queue text)
returns void language plpgsql stable parallel safe security invoker as $$
declare
  v_limits text[] := queue._limits(p_kinds);
begin
  if v_limits is not null and queue._covers(v_limits, coalesce(p_queue, '*')) is not true then
    perform queue._beyond_limits(p_queue, v_limits);
  end if;
end $$;

-- Raises: 42501, always.
create or replace function queue._beyond_limits(queue text, limits text[])
returns void language plpgsql stable parallel safe security invoker as $$
begin
  raise exception using errcode = '42501', message = 'the queue is not among those of this role',
    detail = format('queue: %s, role: %s', coalesce(left(queue, 200), 'all'), queue._caller()),
    hint = case when limits = '{}' then 'Have the owner call queue.grant_access for the role.'
                else format('It may use these: %s.', array_to_string(limits, ', ')) end;
end $$;

-- Of a list of names and patterns (NULL: all) what the caller may act on, in its order.
-- Raises: 42501 when that is nothing.
create or replace function queue._bound_queues(p_kinds text[], p_queues text[])
returns text[] language plpgsql stable parallel safe security invoker as $$
declare
  v_limits text[] := queue._limits(p_kinds);
  v_queues text[];
begin
  if v_limits is null or p_queues is null and v_limits <> '{}' then
    return coalesce(v_limits, p_queues);
  elsif p_queues = '{}' or array_ndims(p_queues) > 1 or array_position(p_queues, null) is not null or '' = any (p_queues) then
    return p_queues;  -- which the function refuses
  end if;
  select array_agg(x.queue order by x.n, x.queue) into v_queues
  from (
    select min(q.n) as n, case when queue._covers(array[l], q.queue) then q.queue else l end as queue
    from unnest(p_queues) with ordinality q (queue, n) cross join unnest(v_limits) l
    where queue._covers(array[l], q.queue) or queue._covers(array[q.queue], l) group by 2) x;
  if v_queues is null then
    perform queue._beyond_limits(p_queues[1], v_limits);
  end if;
  return v_queues;
end $$;

-- Raises: QJ001 for a job of another queue, as if there were none.
create or replace function queue._bound_jobs(p_kinds text[], p_ids bigint[])
returns void language plpgsql volatile parallel safe security invoker as $$
declare
  v_limits text[] := queue._limits(p_kinds);
  v_id bigint;
begin
  if v_limits is null then
    return;
  end if;
  v_id := queue._job_beyond(v_limits, p_ids);
  if v_id is not null then
    perform queue._job_not_found(v_id);
  end if;
end $$;

-- One of these jobs that is of a queue which limits do not hold, if there is one. Settings: as _check_needs.
create or replace function queue._job_beyond(p_limits text[], p_ids bigint[])
returns bigint language plpgsql stable parallel safe security invoker
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off as $$
begin
  return (
    select j.id
    from unnest(p_ids) u (id)
    cross join lateral (
      select j.id, coalesce(s.queue, j.queue) as queue
      from queue.job j left join queue.job_state s on s.id = j.id where j.id = u.id offset 0) j
    where not queue._covers(p_limits, j.queue) limit 1);
end $$;

-- Raises: 42501 when a job that was just deferred is of another queue, QJ004 when it is one of another queue that keeps the
-- queueing lock, QJ001 when its needs or parent are of another.
-- p_table: the table whose trigger deferred it; its owner's rights suffice, if he may defer by triggers.
create or replace function queue._bound_deferred(p_id bigint, p_table oid default null)
returns void language plpgsql volatile parallel safe security invoker as $$
declare
  v_limits text[] := queue._limits('{producer}');
  v_owner name;
  v_other bigint;
  v record;
begin
  -- of one that was there before only the queue counts
  select coalesce(s.queue, j.queue) as queue, x.is_new, j.queueing_lock,
    case when x.is_new then array_remove(j.needs || (j.options ->> 'parent')::bigint, null) end as others into v
  from queue.job j
  left join queue.job_state s on s.id = j.id
  cross join lateral (select j.xid is not distinct from pg_current_xact_id_if_assigned() as is_new) x
  where j.id = p_id;
  v_other := case when v.others <> '{}' then queue._job_beyond(v_limits, v.others) end;
  if p_table is not null and (v_other is not null or not queue._covers(v_limits, v.queue)) then
    select r.rolname into v_owner from pg_class c join pg_roles r on r.oid = c.relowner where c.oid = p_table;
    if has_function_privilege(v_owner, 'queue.defer_trigger()', 'execute') then
      v_limits := queue._limits('{producer}', v_owner);
      v_other := case when v.others <> '{}' then queue._job_beyond(v_limits, v.others) end;
    end if;
  end if;
  if v_other is not null then
    perform queue._job_not_found(v_other);
  elsif not queue._covers(v_limits, v.queue) then
    if not v.is_new then
      perform queue._already_queued(p_id, v.queueing_lock);
    end if;
    perform queue._beyond_limits(v.queue, v_limits);
  end if;
end $$;

-- Raises: QJ007 when the worker serves more than the caller may, as if there were none.
create or replace function queue._bound_worker(p_worker bigint)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if not queue._is_within(queue._limits('{worker}'), p_worker) then
    perform queue._worker_gone(p_worker);
  end if;
end $$;

-- Whether all that a worker serves lies within limits; NULL when it is forgotten.
create or replace function queue._is_within(p_limits text[], p_worker bigint)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select p_limits is null or w.queues is not null and not exists (select from unnest(w.queues) q where not queue._covers(p_limits, q))
    from queue.worker w where w.id = p_worker);
end $$;

-- Raises: QJ002 for a claim on a job of another queue that a worker of other queues holds.
create or replace function queue._bound_claims(p_ids bigint[], p_claims bigint[])
returns void language plpgsql volatile parallel safe security invoker as $$
declare
  v_limits text[] := queue._limits('{worker,operator}');
  v_lost record;
begin
  if v_limits is null then
    return;
  end if;
  select v.id, v.claim into v_lost
  from unnest(p_ids, p_claims) u (id, claim)
  join queue.live v on v.id = u.id and v.claim = u.claim
  join queue.job j on j.id = u.id
  left join queue.job_state s on s.id = u.id
  where not queue._covers(v_limits, coalesce(s.queue, j.queue)) and queue._is_within(v_limits, v.worker_id) is not true limit 1;
  if found then
    perform queue._claim_lost(v_lost.id, v_lost.claim);
  end if;
end $$;

-- The same for a list of outcomes, and for what they name beside it. A malformed list is left to _finish.
-- Raises: QJ001, QJ002, 42501.
create or replace function queue._bound_outcomes(p_outcomes jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v record;
begin
  if queue._limits('{worker,operator}') is null or jsonb_typeof(p_outcomes) is distinct from 'array' then
    return;
  end if;
  begin
    select array_agg(o.id) as ids, array_agg(o.claim) as claims into v
    from jsonb_to_recordset(p_outcomes) o (id bigint, claim bigint);
  exception when data_exception then
    return;
  end;
  perform queue._bound_claims(v.ids, v.claims);
  perform queue._bound_jobs('{worker,operator}', array[n::text::bigint])
  from jsonb_array_elements(p_outcomes) o
  cross join jsonb_array_elements(case when jsonb_typeof(o -> 'needs') = 'array' then o -> 'needs' end) n where n::text ~ '^[0-9]{1,18}$';
  perform queue._bound_queue('{worker,operator}', o -> 'options' ->> 'queue')
  from jsonb_array_elements(p_outcomes) o where o -> 'options' ->> 'queue' <> '';
end $$;
