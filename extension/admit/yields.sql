-- Yields: needs that a job adds while it runs.
-- Tests: admit/yields.sql, admit/cycles.sql.

-- The payload that retry_later hands over: the needs to add. JSON null: run again whatever the needs are.
-- Raises: 22023, QJ001, QJ005.
create or replace function queue._check_yield(p_id bigint, p_needs jsonb)
returns jsonb language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_needs bigint[];
begin
  if p_needs is null then
    p_needs := '[]'::jsonb;
  elsif jsonb_typeof(p_needs) = 'null' then
    return '{"ignore": true}'::jsonb;
  end if;
  begin
    v_needs := array(select n::bigint from jsonb_array_elements_text(p_needs) n);
  exception when data_exception then
    perform queue._invalid('needs must be a list of ids', 'Pass ids of jobs, or null.');
  end;
  v_needs := queue._check_needs(v_needs);
  perform queue._refuse_cycle(p_id, v_needs);
  if (select queue._needs_mode(j.options) from queue.job j where j.id = p_id) & {{any}} = 0 then
    perform queue._refuse_blocked_need(p_id, v_needs);
  end if;
  return jsonb_build_object('needs', to_jsonb(v_needs));
end $$;

-- Returns the payload that await_jobs hands over. A job that has ended may be awaited even if its retention
-- is over. One that no longer exists counts as ended if the job has awaited it before, or if a finished step
-- has its id in a list. In the latter case it did exist, because the job deferred it in that step.
-- Raises: QJ001, QJ005.
create or replace function queue._check_awaited(p_id bigint, p_claim bigint, p_ids jsonb)
returns jsonb language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[] := array(select distinct n::bigint from jsonb_array_elements_text(p_ids) n order by 1);
  v_missing bigint[];
  v_unknown bigint;
begin
  perform pg_current_xact_id();  -- as in _check_needs
  v_missing := array(
    select u.id from unnest(v_ids) u (id)
    left join lateral (select j.id from queue.job j where j.id = u.id offset 0) j on true
    where j.id is null);
  if v_missing <> '{}' then
    select u.id into v_unknown from unnest(v_missing) u (id)
    where not exists (select from queue.need d where d.job_id = p_id and d.need_id = u.id)
      and u.id not in (
        select x.id::bigint
        from queue.step s
        cross join lateral jsonb_array_elements(
          case when jsonb_typeof(s.value) = 'array' then s.value end) e
        cross join lateral (select case when e::text ~ '^[0-9]{1,18}$' then e::text end as id) x
        where s.job_id = p_id and x.id is not null)
    limit 1;
    perform queue._job_not_found(v_unknown) where v_unknown is not null;
  end if;
  perform queue._refuse_cycle(p_id, v_ids);
  perform queue._refuse_blocked_need(p_id, v_ids);
  return jsonb_build_object('needs', to_jsonb(v_ids), 'awaits', p_claim, 'state', 'waiting');
end $$;

-- How its needs hold a job that yields, as far as its transaction can see: waiting or upstream_failed, NULL
-- if they don't. It is like _needs_states, which sees the yield only after it has settled (_add_yield_needs).
-- The needs have no rows yet, so queue.need_now can't tell their states. Awaited jobs need only end.
create or replace function queue._yield_state(p_id bigint, p_payload jsonb)
returns text language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_mode smallint := (select queue._needs_mode(j.options) from queue.job j where j.id = p_id);
  v_now bigint := pg_current_xact_id()::text::bigint;
  v_began bigint := (select s.began_xid::text::bigint from queue.job_override s where s.id = p_id);
  v_needs record;
begin
  if p_payload ? 'ignore' then
    return null;
  end if;
  select count(*) filter (where not d.is_awaited) as total,
    count(*) filter (where c.class = 'f' and not d.is_awaited) as failed,
    count(*) filter (where x.is_satisfied and not d.is_awaited) as satisfied,
    count(*) filter (where o.is_open and not d.is_awaited and d.deleted_state is distinct from 'failed')
      as open,
    count(*) filter (where x.is_satisfied and o.is_open and not d.is_awaited) as satisfied_open,
    count(*) filter (where d.claim is not null and coalesce(f.state, d.deleted_state) is null) as awaited
  into v_needs
  from (
    select d.need_id as id, d.is_open, d.deleted_state, d.mode & {{ended}} <> 0 as is_awaited,
      d.claim
    from queue.need d where d.job_id = p_id
    union all
    select n.id, null, null, false, null
    from (select n::bigint as id from jsonb_array_elements_text(p_payload -> 'needs') n offset 0) n
    left join lateral (
      select d.need_id from queue.need d where d.job_id = p_id and d.need_id = n.id offset 0) k on true
    where k.need_id is null) d
  left join lateral (
    select f.state, age(f.xmin) as age
    from queue.finished f
    where f.id = d.id offset 0) f on true
  left join lateral (
    select w.reason, age(w.xmin) as age
    from queue.waiting w
    where w.id = d.id and f.state is null offset 0) w on true
  cross join lateral (
    select case when coalesce(f.state, d.deleted_state) = 'succeeded' then 's'
      when coalesce(f.state, d.deleted_state) is not null or w.reason in ('held', 'upstream_failed') then 'f'
      else 'p' end as class) c
  cross join lateral (select c.class = 's' or c.class = 'f' and v_mode & {{proceed}} <> 0 as is_satisfied) x
  cross join lateral (
    select coalesce(d.is_open,
      not coalesce(x.is_satisfied and v_now - coalesce(f.age, w.age) < v_began, false)) as is_open) o;
  return case
    when v_needs.satisfied = v_needs.total or v_mode & {{any}} <> 0
      and (v_needs.open = 0 or v_needs.satisfied_open > 0)
      then case when v_needs.awaited > 0 then 'waiting' end
    when v_mode & {{proceed}} = 0
      and case when v_mode & {{any}} <> 0 then v_needs.failed = v_needs.total else v_needs.failed > 0 end
      then 'upstream_failed'
    else 'waiting' end;
end $$;

-- Adds the needs of a yield. With the key awaits, which has the claim, these are jobs that it awaits, even if
-- it needs them already: under any, a need alone might not hold it. If two concurrent yields have created a
-- cycle, also through a lock, it adds none and returns false. Under any, a need that the job did not have
-- before counts as satisfied at the start of the run if its end had certainly settled by then (began_xid).
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._add_yield_needs(p_id bigint, p_payload jsonb)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_needs bigint[];
  v_now bigint := pg_current_xact_id()::text::bigint;
begin
  update queue.job_override s
  set ignores_needs = case when p_payload ? 'awaits' then s.ignores_needs else p_payload ? 'ignore' end,
    is_yielded = case when p_payload ? 'awaits' then s.is_yielded else not p_payload ? 'ignore' end,
    extra_flags = s.extra_flags | case when p_payload -> 'needs' <> '[]' then {{needs}} else 0 end
  where s.id = p_id;
  if coalesce(p_payload -> 'needs', '[]') = '[]' then
    return true;
  end if;
  v_needs := array(select n::bigint from jsonb_array_elements_text(p_payload -> 'needs') n order by 1);
  if queue._closes_cycle(p_id, v_needs, null, null)
    or (p_payload ? 'awaits'
        or (select queue._needs_mode(j.options) from queue.job j where j.id = p_id) & {{any}} = 0)
      and (queue._blocked_need(p_id, v_needs, null, null, null)).id is not null then
    return false;
  end if;
  insert into queue.need as t (job_id, need_id, claim, mode, is_open, deleted_state)
  select p_id, u.id, (p_payload ->> 'awaits')::bigint, j.mode, not coalesce(
      (f.state = 'succeeded' or j.mode & {{proceed}} <> 0
        and (f.state is not null or w.reason in ('held', 'upstream_failed')))
      and v_now - coalesce(f.age, w.age) < j.began, false),
    case when o.id is null then queue._deleted_state(u.id) end
  from unnest(v_needs) u (id)
  cross join lateral (
    select case when p_payload ? 'awaits' then {{ended}} else queue._needs_mode(j.options) end as mode,
      j.began_xid::text::bigint as began
    from queue.job_now j where j.id = p_id offset 0) j
  left join lateral (select o.id from queue.job o where o.id = u.id offset 0) o on true
  left join lateral (
    select f.state, age(f.xmin) as age
    from queue.finished f
    where f.id = u.id offset 0) f on true
  left join lateral (
    select w.reason, age(w.xmin) as age
    from queue.waiting w
    where w.id = u.id and f.state is null offset 0) w on true
  on conflict on constraint need_pkey do update set mode = t.mode | {{ended}},
    claim = coalesce(t.claim, excluded.claim)
    where p_payload ? 'awaits';
  perform queue._raise_needed_mark(v_needs[cardinality(v_needs)]);
  perform queue._mark_needed(v_needs);
  perform queue._propagate_deadline(array[p_id]);
  return true;
end $$;

-- Records for claimed jobs under any which of their needs are satisfied now.
-- Locks: the caller holds the admission lock and the rows of queue.active_job. Why it is exact: committed
-- ends of claims are visible here, and the handler does not start before this transaction commits.
create or replace function queue._begin_any(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_any bigint[];
begin
  v_any := array(
    select u.id from unnest(p_ids) u (id)
    cross join lateral (select j.options from queue.job j where j.id = u.id offset 0) j
    where queue._needs_mode(j.options) & {{any}} <> 0);
  if v_any = '{}' then
    return;
  end if;
  update queue.need d set is_open = not d.is_open
  where d.ctid = any (array(
    select d.ctid
    from unnest(v_any) u (id)
    cross join lateral (
      select d.ctid, d.is_open, d.is_satisfied from queue.need_now d where d.job_id = u.id offset 0) d
    where d.is_open = d.is_satisfied));
  insert into queue.job_override as s (id, began_xid)
  select u.id, pg_snapshot_xmin(pg_current_snapshot()) from unnest(v_any) u (id)
  on conflict on constraint job_override_pkey do update set began_xid = excluded.began_xid,
    is_yielded = false;
end $$;
