-- Needs: what counts is the state of the needed jobs now, never a counter.
--
-- A need is succeeded, failed (failed, cancelled, held, upstream_failed), or pending. Whenever that changes,
-- _needs_changed looks at the jobs that need it. Everything here but _check_needs and _check_yield runs
-- under ADM, and whoever ends a claim can't hold ADM: why no end is missed stands at _mark_needed.
--
-- So that a job with many needs is not counted through each time one of them ends, queue.waiting names one
-- that holds it (need_id): a pending one, or under upstream_failed a failed one. While that one stands as it
-- does, the ends of others change nothing, but for those that decide by themselves: a failed need under
-- all and block, a satisfied one under any. When it changes, the next below it is looked for (all), so that
-- a job's needs are read through about twice, whatever the order in which they end. That is a hint where to
-- look, and no more: a job passes only after a look at all its needs.

-- Needs as a sorted set. An xid is taken first, so that _safe_at waits for this transaction.
-- Settings: a plan that was made while the log was empty would read all of it; one that knows how many needs there are is
-- never given up for the generic one, so that each call would plan, which takes three times as long as all the rest.
-- Raises: 22023, QJ001 when one can't be seen, or is kept no longer.
create or replace function queue._check_needs(p_needs bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off as $$
#variable_conflict use_column
declare
  v_now timestamptz;
  v_missing bigint;
begin
  if array_ndims(p_needs) > 1 or array_position(p_needs, null) is not null then
    perform queue._check_list('needs', p_needs::text[]);
  end if;
  perform pg_current_xact_id();
  v_now := clock_timestamp();
  select u.n into v_missing
  from unnest(p_needs) u (n)
  left join lateral (select j.id from queue.job j where j.id = u.n offset 0) j on true
  left join lateral (select f.state, f.finished_at, f.purge_at from queue.finished f where f.id = u.n offset 0) f on true
  where j.id is null or f.purge_at <= v_now
    or f.purge_at is null and f.state = 'succeeded' and f.finished_at < v_now - interval '7 days'
  limit 1;
  if found then
    perform queue._job_not_found(v_missing);
  end if;
  if cardinality(p_needs) = 1 then
    return p_needs;
  end if;
  return array(select distinct n from unnest(p_needs) n order by n);
end $$;

-- The deadline that a child takes from its parent. Settings: as _check_needs.
-- Raises: QJ001.
create or replace function queue._parent_deadline(p_parent bigint)
returns timestamptz language plpgsql stable parallel safe security invoker set enable_seqscan = off as $$
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

-- Writes the needs of new jobs. One may have been deleted before its dependent's transaction committed.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._join_needs(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_needs bigint[];
  v_jobs bigint[];
begin
  with added as (
    insert into queue.need (job_id, need_id, mode, deleted_state)
    select j.id, n.id, j.mode, case when o.id is null then queue._deleted_state(n.id) end
    from unnest(p_ids) u (id)
    cross join lateral (
      select j.id, j.needs, queue._needs_mode(j.options) as mode from queue.job j where j.id = u.id and j.flags & 8 <> 0 offset 0) j
    cross join lateral unnest(j.needs) n (id)
    left join lateral (select o.id from queue.job o where o.id = n.id offset 0) o on true
    on conflict on constraint need_pkey do nothing
    returning job_id, need_id)
  select array_agg(distinct a.need_id), array_agg(distinct a.job_id) into v_needs, v_jobs from added a;
  if v_needs is not null then
    perform queue._note_needed(v_needs[cardinality(v_needs)]);
    perform queue._mark_needed(v_needs);
    perform queue._spread_deadline(v_jobs);
  end if;
end $$;

-- How a job's needs are combined: 1 any, 2 proceed.
create or replace function queue._needs_mode(p_options jsonb)
returns smallint language plpgsql immutable parallel safe security invoker as $$
begin
  return coalesce((p_options ->> 'needs_mode' = 'any')::integer, 0) | coalesce((p_options ->> 'on_need_failure' = 'proceed')::integer, 0) * 2;
end $$;

-- Notes the largest id that was ever needed: admission need not ask whether a newer job is.
-- Locks: the caller holds ADM. Not undone by a rollback, which does no harm.
create or replace function queue._note_needed(p_id bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_id > (select s.last_value from queue.needed_seq s) then
    perform setval('queue.needed_seq', p_id);
  end if;
end $$;

-- Marks jobs so that whoever ends their claim hands them over to their dependents.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
-- Why no end is missed: a row that is locked here carries the mark before its finisher, who waits for the
-- lock, deletes it. A row that its finisher (or a claimer) has locked can't be waited for under ADM: then a
-- recheck is appended for the next admission, until the row is free or gone. A job in a gate gets the mark
-- when it enters queue.live (_places), and so does one that is not admitted yet, as it goes through the gates
-- (_admit_range); one that is finished already was seen by whoever asks next.
create or replace function queue._mark_needed(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_locked bigint[];
begin
  v_locked := array(select v.id from queue.live v where v.id = any (p_ids) and v.flags & 4096 = 0 order by v.id for update skip locked);
  update queue.live v set flags = v.flags | 4096 where v.id = any (v_locked);
  insert into queue.handover (xid, job_id, kind, flags)
  select queue._until(v.xmax), v.id, 'recheck', 4096 from queue.live v where v.id = any (p_ids) and v.flags & 4096 = 0;
end $$;

-- Rechecks: marks again, asks the dependents of those that have ended, and passes deadlines on.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._recheck_needs(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  perform queue._mark_needed(p_ids);
  perform queue._advance(p_changed => p_ids);
  perform queue._spread_deadline(array(
    select distinct d.job_id from unnest(p_ids) u (id)
    cross join lateral (select d.job_id from queue.need d where d.need_id = u.id offset 0) d));
end $$;

-- How the needs of jobs stand, counted through: satisfied, waiting or failed. holder: the one that holds the
-- job, NULL when every change matters.
create or replace function queue._needs_states(p_ids bigint[])
returns table (id bigint, standing text, holder bigint) language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select u.id, x.standing,
      case when x.standing = 'waiting' then n.last_pending when x.standing = 'failed' and n.mode & 1 = 0 then n.last_failed end
    from unnest(p_ids) u (id)
    left join lateral (select s.ignores_needs, s.is_yielded from queue.job_state s where s.id = u.id offset 0) s on true
    cross join lateral (
      select count(*) as total, coalesce(max(d.mode), 0) as mode,
        count(*) filter (where d.is_open) as open, count(*) filter (where d.class = 'f') as failed,
        count(*) filter (where d.is_satisfied) as satisfied, count(*) filter (where d.is_satisfied and d.is_open) as satisfied_open,
        max(d.need_id) filter (where d.class = 'p') as last_pending, max(d.need_id) filter (where d.class = 'f') as last_failed
      from (
        select d.need_id, d.mode, d.is_open, c.class, c.class = 's' or c.class = 'f' and d.mode & 2 <> 0 as is_satisfied
        from queue.need d
        left join lateral (select f.state from queue.finished f where f.id = d.need_id offset 0) f on true
        left join lateral (select w.reason from queue.waiting w where w.id = d.need_id and f.state is null offset 0) w on true
        cross join lateral (select case
          when coalesce(f.state, d.deleted_state) = 'succeeded' then 's'
          when coalesce(f.state, d.deleted_state) is not null or w.reason in ('held', 'upstream_failed') then 'f'
          else 'p' end as class) c
        where d.job_id = u.id offset 0) d) n
    cross join lateral (select case
      when n.total = 0 or s.ignores_needs then 'satisfied'
      when n.mode & 1 <> 0 then
        case
          when s.is_yielded and n.open = 0 then 'satisfied'
          when case when s.is_yielded then n.satisfied_open else n.satisfied end > 0 then 'satisfied'
          when n.failed = n.total then 'failed'
          else 'waiting'
        end
      when n.satisfied = n.total then 'satisfied'
      when n.failed > 0 and n.mode & 2 = 0 then 'failed'
      else 'waiting'
    end as standing) x;
end $$;

-- passed: of jobs those whose needs let them go; the others wait. failed: those of them that wait as a need has failed.
-- Locks: the caller holds ADM.
create or replace function queue._wait_for_needs(p_ids bigint[], out passed bigint[], out failed bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  with stand as materialized (select s.id, s.standing, s.holder from queue._needs_states(p_ids) s),
  wait as (
    insert into queue.waiting (id, reason, need_id)
    select s.id, case s.standing when 'failed' then 'upstream_failed' else 'needs' end, s.holder from stand s where s.standing <> 'satisfied')
  select array_agg(s.id order by s.id) filter (where s.standing = 'satisfied'), array_agg(s.id) filter (where s.standing = 'failed')
  into passed, failed from stand s;
end $$;

-- The state of jobs has changed: looks at those that need them. met: those that wait no longer, and are in no gate now;
-- changed: those that thereby fail or can be hoped for again, whose dependents have to look in turn. One that has passed and
-- has not started goes back to wait when a need that let it go is pending again, or has failed: one that succeeded may be
-- retried while what it needs has failed. keys: semaphores in which that left room.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
-- Invariant: state decides, so that looking once too often does no harm.
create or replace function queue._needs_changed(p_ids bigint[], out met bigint[], out changed bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
  v_taken record;
  v_back bigint[];
  v_next bigint[];
  v_next_at bigint[];
  v_ask bigint[];
  v_left bigint[];
  v_standings text[];
  v_holders bigint[];
begin
  -- v_ask: to be counted through; v_next: held by a need that is now satisfied
  with edge as materialized (
    select d.job_id, d.need_id, d.mode, w.reason, w.need_id as holder, c.class, c.class = 's' or c.class = 'f' and d.mode & 2 <> 0 as is_satisfied
    from unnest(p_ids) u (id)
    left join lateral (select f.state from queue.finished f where f.id = u.id offset 0) f on true
    left join lateral (select w.reason from queue.waiting w where w.id = u.id and f.state is null offset 0) n on true
    cross join lateral (select d.job_id, d.need_id, d.mode, d.deleted_state from queue.need d where d.need_id = u.id offset 0) d
    left join lateral (select w.reason, w.need_id from queue.waiting w where w.id = d.job_id offset 0) w on true
    cross join lateral (select case
      when coalesce(f.state, d.deleted_state) = 'succeeded' then 's'
      when coalesce(f.state, d.deleted_state) is not null or n.reason in ('held', 'upstream_failed') then 'f'
      else 'p' end as class) c
    where w.reason in ('needs', 'upstream_failed') or c.class = 'p' or c.class = 'f' and d.mode & 2 = 0),
  found as materialized (
    select e.job_id, max(e.need_id) filter (where x.is_next) as at, bool_or(x.is_asked) as is_asked, bool_or(x.is_back) as is_back
    from edge e
    cross join lateral (select
      case
        when e.reason is null or e.reason not in ('needs', 'upstream_failed') then false
        when e.holder is null then true
        when e.mode & 1 <> 0 then e.is_satisfied or e.reason = 'upstream_failed' or e.holder = e.need_id and e.class = 'f'
        when e.reason = 'needs' then e.class = 'f' and not e.is_satisfied
        else e.holder = e.need_id and e.class <> 'f'
      end as is_asked,
      e.mode & 1 = 0 and e.reason = 'needs' and e.holder = e.need_id and e.is_satisfied as is_next,
      not e.is_satisfied and e.reason is distinct from 'needs' and e.reason is distinct from 'upstream_failed' as is_back) x
    group by e.job_id)
  select array_agg(f.job_id) filter (where f.is_asked), array_agg(f.job_id) filter (where f.at is not null and not f.is_asked),
    array_agg(f.at) filter (where f.at is not null and not f.is_asked), array_agg(f.job_id) filter (where f.is_back)
  into v_ask, v_next, v_next_at, v_back
  from found f;
  if v_next is not null then
    select array_agg(b.id order by b.id) filter (where b.need_id is not null and not b.is_failed),
      array_agg(b.need_id order by b.id) filter (where b.need_id is not null and not b.is_failed),
      array_agg(b.id) filter (where b.need_id is null or b.is_failed)
    into v_ids, v_holders, v_left
    from (
      select u.id, b.need_id, b.is_failed
      from unnest(v_next, v_next_at) u (id, at)
      left join lateral (
        select d.need_id, c.is_failed
        from queue.need d
        left join lateral (select f.state from queue.finished f where f.id = d.need_id offset 0) f on true
        left join lateral (select w.reason from queue.waiting w where w.id = d.need_id and f.state is null offset 0) w on true
        cross join lateral (
          select coalesce(f.state, d.deleted_state) is not null or coalesce(w.reason in ('held', 'upstream_failed'), false) as is_failed) c
        where (d.job_id, d.need_id) < (u.id, u.at) and d.job_id >= u.id
          and coalesce(f.state, d.deleted_state) is distinct from 'succeeded' and not (c.is_failed and d.mode & 2 <> 0)
        order by d.job_id desc, d.need_id desc limit 1) b on true) b;
    update queue.waiting w set need_id = v_holders[width_bucket(w.id, v_ids)] where w.id = any (v_ids);
    v_ask := v_ask || v_left;
  end if;
  if v_ask is not null then
    select array_agg(s.id order by s.id) filter (where s.standing = 'satisfied'),
      array_agg(s.id order by s.id) filter (where x.is_turned and s.standing <> 'satisfied' or x.is_held_by_another),
      array_agg(s.standing order by s.id) filter (where x.is_turned and s.standing <> 'satisfied' or x.is_held_by_another),
      array_agg(s.holder order by s.id) filter (where x.is_turned and s.standing <> 'satisfied' or x.is_held_by_another),
      array_agg(s.id) filter (where x.is_turned)
    into met, v_ids, v_standings, v_holders, changed
    from queue._needs_states(v_ask) s
    cross join lateral (select w.reason, w.need_id from queue.waiting w where w.id = s.id offset 0) w
    cross join lateral (
      select (w.reason = 'needs') = (s.standing = 'failed') as is_turned, s.standing <> 'satisfied' and w.need_id is distinct from s.holder as is_held_by_another) x;
    update queue.waiting w
    set reason = case v_standings[width_bucket(w.id, v_ids)] when 'failed' then 'upstream_failed' else 'needs' end,
      need_id = v_holders[width_bucket(w.id, v_ids)]
    where w.id = any (v_ids);
    delete from queue.waiting w where w.id = any (met);
  end if;
  if v_back is not null then
    v_taken := queue._take_back(v_back);
    changed := changed || v_taken.failed;
    keys := v_taken.keys;
  end if;
end $$;

-- Jobs that have passed the gate of needs and would not pass it now go back to wait, unless they run.
-- failed: those that have failed by it; keys: semaphores in which that left room.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._take_back(p_ids bigint[], out failed bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_job record;
  v_taken record;
begin
  for v_job in
    select s.id, s.standing, s.holder from queue._needs_states(p_ids) s where s.standing <> 'satisfied' order by s.id
  loop
    v_taken := queue._take_out_dependent(v_job.id);
    if v_taken.is_out then
      keys := keys || v_taken.keys;
      insert into queue.waiting (id, reason, need_id)
      values (v_job.id, case v_job.standing when 'failed' then 'upstream_failed' else 'needs' end, v_job.holder);
      failed := failed || array(select v_job.id where v_job.standing = 'failed');
    elsif exists (select from queue.live v where v.id = v_job.id and v.claim is null) then
      -- its row is locked by a claim, which may be rolled back
      insert into queue.handover (xid, job_id, kind, flags)
      select queue._until(v.xmax), coalesce(v_job.holder, (select d.need_id from queue.need d where d.job_id = v_job.id limit 1)), 'recheck', 4096
      from queue.live v where v.id = v_job.id;
    end if;
  end loop;
end $$;

-- Takes a job that has passed the gate of needs out of wherever it waits (_take_out). Not is_out: it runs, is finished, is
-- held, or waits for its needs.
-- Locks: the caller holds ADM; the row of queue.live by skip locked.
create or replace function queue._take_out_dependent(p_id bigint, out is_out boolean, out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  is_out := false;
  if not exists (select from queue.waiting w where w.id = p_id and w.reason in ('held', 'needs', 'upstream_failed', 'parked')) then
    select coalesce(t.place <> 'log', false), t.keys into is_out, keys from queue._take_out(p_id) t;
  end if;
end $$;

-- Passes deadlines on to what the jobs need and is not finished, recursively, only ever earlier. Stops at
-- jobs whose deadline is earlier: theirs was passed on when they got it.
-- Locks: the caller holds ADM; rows of queue.live by skip locked. Whose row another has locked may be
-- written by him in a transaction that takes long (queue.job_state): these come back as a recheck.
create or replace function queue._spread_deadline(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
  v_deadlines timestamptz[];
  v_locked bigint[];
  v_shut bigint[];
  v_lanes integer[];
  v_low_deadlines timestamptz[];
  v_low_ids bigint[];
begin
  with recursive spread (id, deadline) as (
    select u.id, j.deadline
    from unnest(p_ids) u (id)
    cross join lateral (
      select coalesce(s.deadline, j.deadline) as deadline from queue.job j left join queue.job_state s on s.id = j.id where j.id = u.id offset 0) j
    where j.deadline < 'infinity'
    union
    select d.need_id, x.deadline
    from spread x
    cross join lateral (select d.need_id from queue.need d where d.job_id = x.id offset 0) d
    cross join lateral (
      select coalesce(s.deadline, j.deadline, 'infinity') as deadline
      from queue.job j left join queue.job_state s on s.id = j.id where j.id = d.need_id offset 0) n
    left join lateral (select f.id from queue.finished f where f.id = d.need_id offset 0) f on true
    where n.deadline > x.deadline and f.id is null)
  select array_agg(x.id order by x.id), array_agg(x.deadline order by x.id) into v_ids, v_deadlines
  from (
    select x.id, min(x.deadline) as deadline from spread x
    group by x.id) x
  cross join lateral (
    select coalesce(s.deadline, j.deadline, 'infinity') as deadline
    from queue.job j left join queue.job_state s on s.id = j.id where j.id = x.id offset 0) j
  where x.deadline < j.deadline;
  if v_ids is null then
    return;
  end if;
  v_locked := array(select v.id from queue.live v where v.id = any (v_ids) order by v.id for update skip locked);
  v_shut := array(select v.id from queue.live v where v.id = any (v_ids) except select u.id from unnest(v_locked) u (id));
  insert into queue.handover (xid, job_id, kind, flags)
  select queue._until(v.xmax), u.id, 'recheck', 4096 from unnest(v_shut) u (id) left join queue.live v on v.id = u.id;
  insert into queue.job_state as s (id, deadline)
  select u.id, u.deadline
  from unnest(v_ids, v_deadlines) u (id, deadline)
  left join lateral (select f.id from queue.finished f where f.id = u.id offset 0) f on true
  where f.id is null and u.id <> all (v_shut)
  on conflict on constraint job_state_pkey do update set deadline = excluded.deadline;
  with moved as (
    update queue.live v set deadline = v_deadlines[width_bucket(v.id, v_ids)], flags = v.flags | 2048
    where v.id = any (v_locked) and v.claim is null
    returning v.lane, v.deadline, v.id)
  select array_agg(m.lane), array_agg(m.deadline), array_agg(m.id) into v_lanes, v_low_deadlines, v_low_ids from moved m;
  if v_lanes is not null then
    perform queue._lower(v_lanes, v_low_deadlines, v_low_ids);
  end if;
  -- or the planner may read all that wait for slots
  update queue.waiting w set deadline = v_deadlines[array_position(v_ids, w.id)], flags = w.flags | 2048
  where w.id = any (v_ids) and w.reason || '' = 'slot';
end $$;

-- Jobs are claimed: under any, which of their needs are satisfied now.
-- Locks: the caller holds ADM and the rows of queue.live. Why exact: whoever ends a claim and whose
-- transaction has committed is visible here, and the handler does not start before this one commits.
create or replace function queue._begin_any(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_any bigint[];
begin
  v_any := array(
    select u.id from unnest(p_ids) u (id)
    cross join lateral (select j.options from queue.job j where j.id = u.id offset 0) j
    where queue._needs_mode(j.options) & 1 <> 0);
  if v_any = '{}' then
    return;
  end if;
  update queue.need d set is_open = not d.is_open
  where d.ctid = any (array(
    select d.ctid
    from unnest(v_any) u (id)
    cross join lateral (select d.ctid, d.need_id, d.is_open, d.mode, d.deleted_state from queue.need d where d.job_id = u.id offset 0) d
    left join lateral (select f.state from queue.finished f where f.id = d.need_id offset 0) f on true
    left join lateral (select w.reason from queue.waiting w where w.id = d.need_id and f.state is null offset 0) w on true
    where d.is_open = coalesce(
      coalesce(f.state, d.deleted_state) = 'succeeded'
      or d.mode & 2 <> 0 and (coalesce(f.state, d.deleted_state) is not null or w.reason in ('held', 'upstream_failed')), false)));
  insert into queue.job_state as s (id, began_xid)
  select u.id, pg_snapshot_xmin(pg_current_snapshot()) from unnest(v_any) u (id)
  on conflict on constraint job_state_pkey do update set began_xid = excluded.began_xid, is_yielded = false;
end $$;

-- What retry_later hands over: the needs to add. JSON null: run again whatever the needs are.
-- Raises: 22023, QJ001, QJ005.
create or replace function queue._check_yield(p_id bigint, p_needs jsonb)
returns jsonb language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_needs bigint[];
  v_pending record;
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
  if v_needs <> '{}' then
    select y.jobs, y.needs into v_pending from queue._pending_yields() y;
    if queue._closes_circle(p_id, v_needs, v_pending.jobs, v_pending.needs) then
      raise exception using errcode = 'QJ005', message = 'the new need would close a circle',
        detail = 'path: ' || array_to_string(queue._circle(p_id, v_needs, v_pending.jobs, v_pending.needs), ' -> '),
        hint = 'A job can''t need one that, at last, needs it.';
    end if;
  end if;
  return jsonb_build_object('needs', to_jsonb(v_needs));
end $$;

-- Yields that are committed and not settled yet: jobs[i] is to need needs[i].
create or replace function queue._pending_yields(out jobs bigint[], out needs bigint[])
language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
begin
  select array_agg(h.job_id), array_agg(n.id::bigint) into jobs, needs
  from queue.handover h cross join lateral jsonb_array_elements_text(h.payload -> 'needs') n (id)
  where h.kind = 'again'
    and h.xid >= (select least(k.next_xid, k.in_flight[1]) from queue.cursor k order by k.tick desc limit 1);
end $$;

-- Whether one of p_needs at last needs p_id. Needs that have succeeded count: they may be retried.
-- p_jobs, p_more: needs beside those that are written.
create or replace function queue._closes_circle(p_id bigint, p_needs bigint[], p_jobs bigint[], p_more bigint[])
returns boolean language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
begin
  if p_needs = '{}' then
    return false;
  end if;
  return exists (
    with recursive walk (id) as (
      select n from unnest(p_needs) n
      union
      select d.id
      from walk w
      cross join lateral (
        (select d.need_id as id from queue.need d where d.job_id = w.id offset 0)
        union all
        (select y.need_id from unnest(p_jobs, p_more) y (job_id, need_id) where y.job_id = w.id)
        union all
        (select n from (select j.needs from queue.job j where j.id = w.id offset 0) j cross join lateral unnest(j.needs) n)) d
      where w.id <> p_id)
    select from walk w where w.id = p_id);
end $$;

-- What a job needs, admitted or not.
create or replace function queue._direct_needs(p_id bigint)
returns table (id bigint) language plpgsql stable parallel safe security invoker rows 5 as $$
#variable_conflict use_column
begin
  return query
    select d.need_id from queue.need d where d.job_id = p_id
    union
    select n from queue.job j cross join lateral unnest(j.needs) n where j.id = p_id;
end $$;

-- The shortest circle that p_needs would close: p_id, what it would need, and so on to p_id.
create or replace function queue._circle(p_id bigint, p_needs bigint[], p_jobs bigint[], p_more bigint[])
returns bigint[] language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
  v_depths integer[];
  v_path bigint[] := array[p_id];
  v_depth integer;
begin
  with recursive walk (id, depth) as (
    select n, 1 from unnest(p_needs) n
    union
    select d.id, w.depth + 1
    from walk w
    cross join lateral (
      select d.id from queue._direct_needs(w.id) d
      union
      select y.need_id from unnest(p_jobs, p_more) y (job_id, need_id) where y.job_id = w.id) d
    where w.id <> p_id and w.depth < 100000)
  select array_agg(w.id), array_agg(w.depth), min(w.depth) filter (where w.id = p_id) into v_ids, v_depths, v_depth from walk w;
  while v_depth > 1 loop
    v_depth := v_depth - 1;
    select w.id || v_path into v_path from unnest(v_ids, v_depths) w (id, depth)
    where w.depth = v_depth
      and (exists (select from queue._direct_needs(w.id) d where d.id = v_path[1])
           or exists (select from unnest(p_jobs, p_more) y (job_id, need_id) where y.job_id = w.id and y.need_id = v_path[1]))
    limit 1;
  end loop;
  return p_id || v_path;
end $$;

-- How the needs of a job that yields hold it, as far as its transaction can see: waiting or upstream_failed, NULL if they don't.
-- As _needs_states, which knows the yield only once it has settled (_add_yield_needs).
create or replace function queue._yield_state(p_id bigint, p_payload jsonb)
returns text language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_mode smallint := (select queue._needs_mode(j.options) from queue.job j where j.id = p_id);
  v_now bigint := pg_current_xact_id()::text::bigint;
  v_began bigint := (select s.began_xid::text::bigint from queue.job_state s where s.id = p_id);
  v record;
begin
  if p_payload ? 'ignore' then
    return null;
  end if;
  select count(*) as total, count(*) filter (where c.class = 'f') as failed, count(*) filter (where x.is_satisfied) as satisfied,
    count(*) filter (where o.is_open) as open, count(*) filter (where x.is_satisfied and o.is_open) as satisfied_open
  into v
  from (
    select d.need_id as id, d.is_open, d.deleted_state from queue.need d where d.job_id = p_id
    union all
    select n::bigint, null, null from jsonb_array_elements_text(p_payload -> 'needs') n
    where not exists (select from queue.need d where d.job_id = p_id and d.need_id = n::bigint)) d
  left join lateral (select f.state, age(f.xmin) as age from queue.finished f where f.id = d.id offset 0) f on true
  left join lateral (select w.reason, age(w.xmin) as age from queue.waiting w where w.id = d.id and f.state is null offset 0) w on true
  cross join lateral (select case
    when coalesce(f.state, d.deleted_state) = 'succeeded' then 's'
    when coalesce(f.state, d.deleted_state) is not null or w.reason in ('held', 'upstream_failed') then 'f'
    else 'p' end as class) c
  cross join lateral (select c.class = 's' or c.class = 'f' and v_mode & 2 <> 0 as is_satisfied) x
  cross join lateral (
    select coalesce(d.is_open, not coalesce(x.is_satisfied and v_now - coalesce(f.age, w.age) < v_began, false)) as is_open) o;
  return case
    when v.satisfied = v.total or v_mode & 1 <> 0 and (v.open = 0 or v.satisfied_open > 0) then null
    when v_mode & 2 = 0 and case when v_mode & 1 <> 0 then v.failed = v.total else v.failed > 0 end then 'upstream_failed'
    else 'waiting' end;
end $$;

-- Adds the needs of a yield. False, with nothing done: two yields at once closed a circle.
-- Under any, one that it did not have before counts as satisfied when the run began if its end had settled
-- then for certain (began_xid).
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._add_yield_needs(p_id bigint, p_payload jsonb)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_needs bigint[];
  v_now bigint := pg_current_xact_id()::text::bigint;
begin
  update queue.job_state s
  set ignores_needs = p_payload ? 'ignore', is_yielded = not p_payload ? 'ignore',
    extra_flags = s.extra_flags | case when p_payload -> 'needs' <> '[]' then 8 else 0 end
  where s.id = p_id;
  if coalesce(p_payload -> 'needs', '[]') = '[]' then
    return true;
  end if;
  v_needs := array(select n::bigint from jsonb_array_elements_text(p_payload -> 'needs') n order by 1);
  if queue._closes_circle(p_id, v_needs, null, null) then
    return false;
  end if;
  insert into queue.need (job_id, need_id, mode, is_open, deleted_state)
  select p_id, u.id, j.mode, not coalesce(
      (f.state = 'succeeded' or j.mode & 2 <> 0 and (f.state is not null or w.reason in ('held', 'upstream_failed')))
      and v_now - coalesce(f.age, w.age) < j.began, false),
    case when o.id is null then queue._deleted_state(u.id) end
  from unnest(v_needs) u (id)
  cross join lateral (
    select queue._needs_mode(j.options) as mode, s.began_xid::text::bigint as began
    from queue.job j join queue.job_state s on s.id = j.id where j.id = p_id offset 0) j
  left join lateral (select o.id from queue.job o where o.id = u.id offset 0) o on true
  left join lateral (select f.state, age(f.xmin) as age from queue.finished f where f.id = u.id offset 0) f on true
  left join lateral (select w.reason, age(w.xmin) as age from queue.waiting w where w.id = u.id and f.state is null offset 0) w on true
  on conflict on constraint need_pkey do nothing;
  perform queue._note_needed(v_needs[cardinality(v_needs)]);
  perform queue._mark_needed(v_needs);
  perform queue._spread_deadline(array[p_id]);
  return true;
end $$;

-- Which needs a job waits for, or which have failed, the first 20 of them; for queue.why(). Of queues that are not the
-- caller's only the ids, of all that it needs there.
create or replace function queue._why_needs(p_id bigint, p_failed boolean)
returns text language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_texts text[];
  v_limits text[] := queue._limits('{operator,reader}');
begin
  v_texts := array(
    select format('job %s', d.id) || case when queue._covers(v_limits, j.queue) is not false then format(' (%s)', coalesce(j.state, 'deleted')) else '' end
    from (select n.id, d.deleted_state
          from queue._direct_needs(p_id) n
          left join lateral (select d.deleted_state from queue.need d where d.job_id = p_id and d.need_id = n.id) d on true
          order by n.id) d
    left join lateral (select j.state, j.queue from queue.jobs j where j.id = d.id offset 0) j on true
    where queue._covers(v_limits, j.queue) is false or case when p_failed then coalesce(j.state, d.deleted_state, 'failed') in ('failed', 'cancelled', 'held', 'upstream_failed')
               else coalesce(j.state, d.deleted_state, 'failed') <> 'succeeded' end
    limit 21);
  return nullif(array_to_string(v_texts[:20], ', '), '') || case when cardinality(v_texts) > 20 then ' and more' else '' end;
end $$;

-- Whether what a job waits for at its needs is about to change: it or one of them is handed over.
create or replace function queue._is_handed_over(p_id bigint)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (
    select from queue.handover h
    where h.job_id = p_id or h.job_id in (select d.need_id from queue.need d where d.job_id = p_id));
end $$;

-- Invariants, for queue.check().
create or replace function queue._check_need_rows()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select 'waits for needs that do not hold it'::text, w.id, format('%s: %s', w.reason, n.standing)
    from (select array_agg(w.id) as ids from queue.waiting w where w.reason in ('needs', 'upstream_failed')) a
    cross join lateral queue._needs_states(a.ids) n
    join queue.waiting w on w.id = n.id
    where n.standing <> case w.reason when 'needs' then 'waiting' else 'failed' end
      and not queue._is_handed_over(w.id);
  return query
    select 'is held by a need that does not hold it'::text, w.id, format('%s: %s', w.reason, w.need_id)
    from queue.waiting w
    left join queue.need d on d.job_id = w.id and d.need_id = w.need_id
    left join queue.finished f on f.id = d.need_id
    left join queue.waiting n on n.id = d.need_id
    where w.reason in ('needs', 'upstream_failed') and w.need_id is not null
      and (d.need_id is null
           or (w.reason = 'needs') <> (coalesce(f.state, d.deleted_state) is null and coalesce(n.reason not in ('held', 'upstream_failed'), true))
           or coalesce(f.state, d.deleted_state) = 'succeeded')
      and not queue._is_handed_over(w.id);
  return query
    select 'ready though its needs do not let it'::text, n.id, n.standing
    from (select array_agg(v.id) as ids from queue.live v where v.claim is null and v.flags & 8 <> 0) a
    cross join lateral queue._needs_states(a.ids) n
    where n.standing <> 'satisfied' and not queue._is_handed_over(n.id);
  return query
    select 'needed, and its end would not be handed over'::text, v.id, format('needed by %s', min(d.job_id))
    from queue.live v join queue.need d on d.need_id = v.id
    where v.flags & 4096 = 0 and not exists (select from queue.finished f where f.id = d.job_id)
      and not exists (select from queue.handover h where h.job_id = v.id)
    group by v.id;
  return query
    select 'a need that is no job'::text, d.need_id, format('of %s', d.job_id)
    from queue.need d
    where not exists (select from queue.job j where j.id = d.job_id)
      or d.deleted_state is null and not exists (select from queue.job j where j.id = d.need_id);
end $$;
