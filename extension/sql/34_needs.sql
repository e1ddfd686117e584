-- Needs: what counts is the state of the needed jobs now, never a counter.

-- Raises: 22023, QJ001 when a need can't be seen.
create or replace function queue._check_needs(p_needs bigint[])
returns bigint[] language plpgsql stable parallel safe security invoker as $$
declare
  v_missing bigint;
begin
  if array_position(p_needs, null) is not null then
    perform queue._invalid('needs holds NULL', 'Pass ids of jobs.');
  end if;
  select n into v_missing from unnest(p_needs) n where not exists (select from queue.job j where j.id = n) limit 1;
  if found then
    perform queue._job_not_found(v_missing);
  end if;
  return array(select distinct n from unnest(p_needs) n order by n);
end $$;

-- The deadline that a child takes from its parent.
-- Raises: QJ001.
create or replace function queue._parent_deadline(p_parent bigint)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_deadline timestamptz;
begin
  select coalesce(s.deadline, j.deadline) into v_deadline
  from queue.job j left join queue.job_state s on s.id = j.id where j.id = p_parent;
  if not found then
    perform queue._job_not_found(p_parent);
  end if;
  return v_deadline;
end $$;

-- Writes the needs of new jobs.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._join_needs(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_needs bigint[];
begin
  with added as (
    insert into queue.need (job_id, need_id)
    select j.id, n from unnest(p_ids) u (id)
    cross join lateral (select j.id, j.needs from queue.job j where j.id = u.id and j.flags & 8 <> 0 offset 0) j
    cross join lateral unnest(j.needs) n
    on conflict on constraint need_pkey do nothing
    returning need_id)
  select array_agg(distinct a.need_id) into v_needs from added a;
  perform queue._mark_needed(v_needs);
  perform queue._spread_deadline(p_ids);
end $$;

-- Marks jobs so that whoever ends their claim hands them over to their dependents.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
-- Why no end is missed: a row that is locked here carries the mark before its finisher, who waits for the
-- lock, deletes it. A row that its finisher (or a claimer) has locked can't be waited for under ADM: then a
-- recheck is appended for the next admission, until the row is free or gone. A job in a gate gets the mark
-- when it enters queue.live (_place), and one that is finished already was seen by whoever asks next.
create or replace function queue._mark_needed(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_locked bigint[];
begin
  v_locked := array(select v.id from queue.live v where v.id = any (p_ids) and v.flags & 4096 = 0 order by v.id for update skip locked);
  update queue.live v set flags = v.flags | 4096 where v.id = any (v_locked);
  insert into queue.handover (job_id, kind, flags)
  select v.id, 'recheck', 4096 from queue.live v where v.id = any (p_ids) and v.flags & 4096 = 0;
end $$;

-- Rechecks of _mark_needed: marks again, and asks the dependents of those that have ended.
-- Locks: the caller holds ADM.
create or replace function queue._recheck_needs(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._mark_needed(p_ids);
  perform queue._needs_changed(p_ids);
end $$;

-- How the needs of jobs stand: satisfied, waiting or failed.
create or replace function queue._needs_states(p_ids bigint[])
returns table (id bigint, standing text) language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select u.id,
      case
        when s.ignores_needs or n.total = 0 then 'satisfied'
        when j.mode = 'any' then
          case when n.open = 0 or n.satisfied_open > 0 then 'satisfied' when n.failed = n.total and not j.proceeds then 'failed' else 'waiting' end
        when n.satisfied = n.total then 'satisfied'
        when n.failed > 0 and not j.proceeds then 'failed'
        else 'waiting'
      end
    from unnest(p_ids) u (id)
    cross join lateral (
      select coalesce(j.options ->> 'needs_mode', 'all') as mode, coalesce(j.options ->> 'on_need_failure', 'block') = 'proceed' as proceeds
      from queue.job j where j.id = u.id offset 0) j
    left join lateral (select s.ignores_needs from queue.job_state s where s.id = u.id offset 0) s on true
    cross join lateral (
      select count(*) as total, count(*) filter (where d.is_open) as open, count(*) filter (where d.is_failed) as failed,
        count(*) filter (where d.is_succeeded or d.is_failed and j.proceeds) as satisfied,
        count(*) filter (where d.is_open and (d.is_succeeded or d.is_failed and j.proceeds)) as satisfied_open
      from (
        select d.is_open, coalesce(f.state, d.deleted_state) = 'succeeded' as is_succeeded,
          coalesce(f.state in ('failed', 'cancelled') or w.reason in ('held', 'upstream_failed') or d.deleted_state = 'failed', false) as is_failed
        from queue.need d
        left join lateral (select f.state from queue.finished f where f.id = d.need_id offset 0) f on true
        left join lateral (select w.reason from queue.waiting w where w.id = d.need_id offset 0) w on true
        where d.job_id = u.id offset 0) d) n;
end $$;

-- Of jobs those whose needs let them go; the others wait.
-- Locks: the caller holds ADM.
create or replace function queue._wait_for_needs(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_pass bigint[];
  v_failed bigint[];
begin
  with stand as materialized (select s.id, s.standing from queue._needs_states(p_ids) s),
  wait as (
    insert into queue.waiting (id, reason)
    select s.id, case s.standing when 'failed' then 'upstream_failed' else 'needs' end from stand s where s.standing <> 'satisfied')
  select array_agg(s.id order by s.id) filter (where s.standing = 'satisfied'), array_agg(s.id) filter (where s.standing = 'failed')
  into v_pass, v_failed from stand s;
  if v_failed is not null then
    perform queue._needs_changed(v_failed);
  end if;
  return v_pass;
end $$;

-- The state of jobs has changed: looks at those that need them, and on from those that thereby fail or
-- can be hoped for again.
-- Locks: the caller holds ADM. Invariant: state decides, so that looking once too often does no harm.
create or replace function queue._needs_changed(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[] := p_ids;
  v_pass bigint[];
  v_turned bigint[];
begin
  while v_ids <> '{}' loop
    with stand as materialized (
      select s.id, s.standing, d.reason
      from (select array_agg(x.job_id) as ids
            from (select distinct d.job_id from unnest(v_ids) u (id) cross join lateral (select d.job_id from queue.need d where d.need_id = u.id offset 0) d) x) a
      cross join lateral queue._needs_states(a.ids) s
      cross join lateral (select w.reason from queue.waiting w where w.id = s.id and w.reason in ('needs', 'upstream_failed') offset 0) d),
    gone as (
      delete from queue.waiting w where w.id = any (array(select s.id from stand s where s.standing = 'satisfied'))),
    turned as (
      update queue.waiting w set reason = case when w.reason = 'needs' then 'upstream_failed' else 'needs' end
      where w.id = any (array(select s.id from stand s where s.reason = 'needs' and s.standing = 'failed'
                                                          or s.reason = 'upstream_failed' and s.standing = 'waiting')))
    select array_agg(s.id order by s.id) filter (where s.standing = 'satisfied'),
      array_agg(s.id) filter (where s.reason = 'needs' and s.standing = 'failed' or s.reason = 'upstream_failed' and s.standing <> 'failed')
    into v_pass, v_turned
    from stand s;
    perform queue._route(v_pass, false);
    v_ids := coalesce(v_turned, '{}');
  end loop;
end $$;

-- Passes deadlines on to what the jobs need, recursively, only ever earlier.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._spread_deadline(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_item record;
begin
  for v_item in
    with recursive spread (id, deadline) as (
      select j.id, coalesce(s.deadline, j.deadline) from queue.job j left join queue.job_state s on s.id = j.id
      where j.id = any (p_ids) and coalesce(s.deadline, j.deadline) is not null
      union
      select d.need_id, x.deadline from spread x join queue.need d on d.job_id = x.id)
    select x.id, min(x.deadline) as deadline
    from spread x join queue.job j on j.id = x.id left join queue.job_state s on s.id = x.id
    where not exists (select from queue.finished f where f.id = x.id)
    group by x.id, s.deadline, j.deadline
    having min(x.deadline) < coalesce(s.deadline, j.deadline, 'infinity')
  loop
    perform queue._change(v_item.id, p_deadline => v_item.deadline);
  end loop;
end $$;

-- What retry_later hands over: which needs are added, and which of them all were not satisfied when the
-- run began. needs null: run again whatever they are.
-- Raises: 22023, QJ001, QJ005.
create or replace function queue._check_yield(p_id bigint, p_needs jsonb, p_claimed_at timestamptz)
returns jsonb language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_needs bigint[];
  v_path bigint[];
begin
  if p_needs is null then
    p_needs := '[]';
  elsif jsonb_typeof(p_needs) = 'null' then
    return jsonb_build_object('ignore', true);
  end if;
  begin
    v_needs := array(select n::bigint from jsonb_array_elements_text(p_needs) n);
  exception when data_exception or invalid_parameter_value then
    perform queue._invalid('needs must be a list of ids', 'Pass ids of jobs, or null.');
  end;
  v_needs := queue._check_needs(v_needs);
  v_path := queue._cycle(p_id, v_needs);
  if v_path is not null then
    raise exception using errcode = 'QJ005', message = 'the new need would close a circle',
      detail = 'path: ' || array_to_string(v_path, ' -> '), hint = 'A job can''t need one that, at last, needs it.';
  end if;
  return jsonb_build_object('needs', to_jsonb(v_needs), 'began_at', p_claimed_at);
end $$;

-- A path of needs from one of p_needs back to p_id, NULL when there is none.
create or replace function queue._cycle(p_id bigint, p_needs bigint[])
returns bigint[] language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_path bigint[];
begin
  if p_needs = '{}' then
    return null;
  elsif p_id = any (p_needs) then
    return array[p_id, p_id];
  end if;
  with recursive walk (id) as (
    select n from unnest(p_needs) n
    union
    select d.need_id from walk w
    cross join lateral (
      select d.need_id from queue.need d where d.job_id = w.id
      union all
      select n from queue.job j cross join lateral unnest(j.needs) n where j.id = w.id) d)
  select array[p_id] into v_path from walk w where w.id = p_id limit 1;
  if v_path is null then
    return null;
  end if;
  -- there is a circle: look for the shortest path to report
  with recursive walk (id, path) as (
    select n, array[p_id, n] from unnest(p_needs) n
    union all
    select d.need_id, w.path || d.need_id from walk w
    cross join lateral (
      select d.need_id from queue.need d where d.job_id = w.id
      union
      select n from queue.job j cross join lateral unnest(j.needs) n where j.id = w.id) d
    where w.id <> p_id and d.need_id <> all (w.path[2:]) and cardinality(w.path) < 50)
  select w.path into v_path from walk w where w.id = p_id limit 1;
  return coalesce(v_path, array[p_id]);
end $$;

-- Adds the needs of a yield. False: two yields at once closed a circle, and the job has failed for it.
-- Locks: the caller holds ADM.
create or replace function queue._add_yield_needs(p_id bigint, p_payload jsonb)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_needs bigint[];
begin
  update queue.job_state s set ignores_needs = coalesce((p_payload ->> 'ignore')::boolean, false) where s.id = p_id;
  if p_payload ? 'ignore' then
    return true;
  end if;
  v_needs := array(select n::bigint from jsonb_array_elements_text(p_payload -> 'needs') n);
  if queue._cycle(p_id, v_needs) is not null then
    perform queue._conclude(p_id, 'failed', 'dependency_cycle', 'two jobs came to need each other');
    return false;
  end if;
  insert into queue.need (job_id, need_id) select p_id, n from unnest(v_needs) n on conflict on constraint need_pkey do nothing;
  update queue.job_state s set extra_flags = s.extra_flags | 8 where s.id = p_id and v_needs <> '{}';
  update queue.need d
  set is_open = not exists (select from queue.finished f where f.id = d.need_id and f.finished_at <= (p_payload ->> 'began_at')::timestamptz
                              and (f.state = 'succeeded' or (select j.options ->> 'on_need_failure' = 'proceed' from queue.job j where j.id = p_id)))
  where d.job_id = p_id;
  perform queue._mark_needed(v_needs);
  perform queue._spread_deadline(array[p_id]);
  return true;
end $$;
