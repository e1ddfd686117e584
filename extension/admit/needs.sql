-- Needs: the current state of the needed jobs decides, never a counter.
--
-- A need is succeeded, failed (failed, cancelled, held, upstream_failed), or pending. Whenever that changes,
-- _needs_changed checks the jobs that need it. Everything here runs under the admission lock. A session that
-- ends a claim need not hold that; _mark_needed explains why no end is missed.
--
-- To count all needs of a job whenever one of them ends would be quadratic. So queue.waiting names one need
-- that holds the job (need_id): a pending one, or under upstream_failed a failed one. While that need does
-- not change, the ends of others change nothing, unless they decide alone: a failed need under all and block,
-- a satisfied or deleted one under any. When it changes, the next one below it is looked for. So a job's
-- needs are read about twice, whatever the order in which they end. need_id is only a hint: a job passes only
-- after a check of all its needs.

-- Writes the needs of new jobs, and the jobs that a fork has awaited (_copy). A need may have been deleted
-- before its dependent's transaction committed.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._join_needs(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_needs bigint[];
  v_jobs bigint[];
begin
  with added as (
    insert into queue.need (job_id, need_id, mode, deleted_state)
    select j.id, n.id, n.mode, case when o.id is null then queue._deleted_state(n.id) end
    from unnest(p_ids) u (id)
    cross join lateral (
      select j.id, j.needs, queue._needs_mode(j.options) as mode, j.options -> 'awaited' as awaited
      from queue.job j
      where j.id = u.id and j.flags & {{needs}} <> 0 offset 0) j
    cross join lateral (
      select n as id, j.mode from unnest(j.needs) n
      union all
      select n::bigint, {{ended}} from jsonb_array_elements_text(j.awaited) n) n
    left join lateral (select o.id from queue.job o where o.id = n.id offset 0) o on true
    on conflict on constraint need_pkey do nothing
    returning job_id, need_id)
  select array_agg(distinct a.need_id), array_agg(distinct a.job_id) into v_needs, v_jobs from added a;
  if v_needs is not null then
    perform queue._raise_needed_mark(v_needs[cardinality(v_needs)]);
    perform queue._mark_needed(v_needs);
    perform queue._propagate_deadline(v_jobs);
  end if;
end $$;

-- Lets jobs wait for their needs. passed: the jobs whose needs are met; the others wait. failed: the waiting
-- ones with a failed need.
-- Locks: the caller holds the admission lock.
create or replace function queue._wait_for_needs(p_ids bigint[], out passed bigint[], out failed bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
begin
  with state as materialized (select s.id, s.reason, s.holder from queue._needs_states(p_ids) s),
  wait as (
    insert into queue.waiting (id, reason, need_id)
    select s.id, s.reason, s.holder from state s where s.reason is not null)
  select array_agg(s.id order by s.id) filter (where s.reason is null),
    array_agg(s.id) filter (where s.reason = 'upstream_failed')
  into passed, failed from state s;
end $$;

-- Checks the jobs that need jobs whose state has changed. met: jobs that no longer wait, and are in no gate
-- now. changed: jobs that fail because of this, or that may succeed again, so that their own dependents must
-- be checked. A job that has passed but not started goes back to wait if one of its needs is pending again or
-- has failed. A need can fail after it succeeded: a succeeded job may be retried while its own needs have
-- failed. keys: semaphores that have room now.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
-- Invariant: only the state decides, so checking once too often does no harm.
create or replace function queue._needs_changed(p_ids bigint[], out met bigint[], out changed bigint[],
  out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_found record;
  v_ask bigint[];
  v_taken record;
begin
  v_found := queue._dependents_to_check(p_ids);
  v_ask := v_found.ask;
  if v_found.freed is not null then
    v_ask := v_ask || queue._find_next_need(v_found.freed, v_found.freed_at);
  end if;
  if v_ask is not null then
    select r.met, r.changed into met, changed from queue._recount_needs(v_ask) r;
  end if;
  if v_found.back is not null then
    v_taken := queue._return_to_needs(v_found.back);
    changed := changed || v_taken.failed;
    keys := v_taken.keys;
  end if;
end $$;

-- The jobs that a change of needs may affect. ask: their needs must be counted; freed: a need (freed_at) held
-- them, and is now satisfied, or under any has failed; back: they have passed the gate, and may have to
-- return.
create or replace function queue._dependents_to_check(p_needs bigint[], out ask bigint[], out freed bigint[],
  out freed_at bigint[], out back bigint[])
language plpgsql stable parallel safe security invoker as $$
begin
  with edge as materialized (
    select d.job_id, d.need_id, d.mode, w.reason, w.need_id as holder, d.class, d.is_satisfied,
      d.deleted_state = 'failed' is true as is_deleted
    from unnest(p_needs) u (id)
    cross join lateral (
      select d.job_id, d.need_id, d.mode, d.class, d.is_satisfied, d.deleted_state
      from queue.need_now d where d.need_id = u.id offset 0) d
    left join lateral (
      select w.reason, w.need_id
      from queue.waiting w
      where w.id = d.job_id offset 0) w on true
    where w.reason in ('needs', 'upstream_failed') or d.class = 'p' or d.class = 'f'
      and d.mode & {{proceed}} = 0),
  found as materialized (
    select e.job_id, max(e.need_id) filter (where x.is_next) as at, bool_or(x.is_asked) as is_asked,
      bool_or(x.is_back) as is_back
    from edge e
    cross join lateral (select
      case
        when e.reason is null or e.reason not in ('needs', 'upstream_failed') then false
        when e.holder is null then true
        when e.mode & {{any}} <> 0 then e.is_satisfied or e.is_deleted or e.reason = 'upstream_failed'
        when e.reason = 'needs' then e.class = 'f' and not e.is_satisfied
        else e.holder = e.need_id and e.class <> 'f'
      end as is_asked,
      e.reason = 'needs' and e.holder = e.need_id
        and case when e.mode & {{any}} <> 0 then e.class = 'f' else e.is_satisfied end as is_next,
      not e.is_satisfied and e.reason is distinct from 'needs'
        and e.reason is distinct from 'upstream_failed' as is_back) x
    group by e.job_id)
  select array_agg(f.job_id) filter (where f.is_asked), array_agg(f.job_id)
    filter (where f.at is not null and not f.is_asked),
    array_agg(f.at) filter (where f.at is not null and not f.is_asked),
    array_agg(f.job_id) filter (where f.is_back)
  into ask, freed, freed_at, back
  from found f;
end $$;

-- Finds the next need for jobs whose need was the greatest that held them, and holds them no longer: the next
-- one below, under any the next pending one. Returns the jobs without one, and those whose next one has
-- failed: their needs must be counted.
-- Locks: the caller holds the admission lock.
create or replace function queue._find_next_need(p_ids bigint[], p_needs bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
  v_holders bigint[];
  v_left bigint[];
begin
  select array_agg(b.id order by b.id) filter (where b.need_id is not null and not b.is_failed),
    array_agg(b.need_id order by b.id) filter (where b.need_id is not null and not b.is_failed),
    array_agg(b.id) filter (where b.need_id is null or b.is_failed)
  into v_ids, v_holders, v_left
  from (
    select u.id, b.need_id, b.is_failed
    from unnest(p_ids, p_needs) u (id, at)
    left join lateral (
      select d.need_id, d.class = 'f' as is_failed
      from queue.need_now d
      where (d.job_id, d.need_id) < (u.id, u.at) and d.job_id >= u.id
        and case when d.mode & {{any}} <> 0 then d.class = 'p' else not d.is_satisfied end
      order by d.job_id desc, d.need_id desc limit 1) b on true) b;
  update queue.waiting w set need_id = v_holders[width_bucket(w.id, v_ids)] where w.id = any (v_ids);
  return v_left;
end $$;

-- Counts the needs of waiting jobs. met: all are met, and they wait no longer; changed: they fail now, or no
-- longer. The others get the need that holds them.
-- Locks: the caller holds the admission lock.
create or replace function queue._recount_needs(p_ids bigint[], out met bigint[], out changed bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
  v_reasons text[];
  v_holders bigint[];
begin
  select array_agg(s.id order by s.id) filter (where s.reason is null),
    array_agg(s.id order by s.id) filter (where x.waits_otherwise),
    array_agg(s.reason order by s.id) filter (where x.waits_otherwise),
    array_agg(s.holder order by s.id) filter (where x.waits_otherwise),
    array_agg(s.id) filter (where t.is_turned)
  into met, v_ids, v_reasons, v_holders, changed
  from queue._needs_states(p_ids) s
  cross join lateral (select w.reason, w.need_id from queue.waiting w where w.id = s.id offset 0) w
  cross join lateral (select w.reason <> coalesce(s.reason, 'needs') as is_turned) t
  cross join lateral (
    select s.reason is not null and (t.is_turned or w.need_id is distinct from s.holder)
      as waits_otherwise) x;
  update queue.waiting w
  set reason = v_reasons[width_bucket(w.id, v_ids)], need_id = v_holders[width_bucket(w.id, v_ids)]
  where w.id = any (v_ids);
  delete from queue.waiting w where w.id = any (met);
end $$;

-- The state of the needs of jobs, by counting. reason: why the job waits (queue.waiting): needs, or
-- upstream_failed if they have failed; NULL if they are met. Awaited jobs need only end, but all of them.
-- After a yield, a job under any waits for one of its open needs. A need that was deleted without success is
-- not open, because it will never be satisfied. holder: the need that holds the job, NULL if every change
-- matters.
create or replace function queue._needs_states(p_ids bigint[])
returns table (id bigint, reason text, holder bigint)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select u.id, x.reason,
      case when x.reason = 'needs' and not (n.mode & {{any}} <> 0 and n.awaited > 0) then n.last_pending
        when x.reason = 'upstream_failed' and n.mode & {{any}} = 0 then n.last_failed end
    from unnest(p_ids) u (id)
    left join lateral (
      select s.ignores_needs, s.is_yielded
      from queue.job_override s
      where s.id = u.id offset 0) s on true
    cross join lateral (
      select count(*) filter (where not d.is_awaited) as total,
        coalesce(max(d.mode) filter (where not d.is_awaited), 0) as mode,
        count(*) filter (where d.is_open and not d.is_awaited and d.deleted_state is distinct from 'failed')
          as open,
        count(*) filter (where d.class = 'f') as failed,
        count(*) filter (where d.is_satisfied and not d.is_awaited) as satisfied,
        count(*) filter (where d.is_satisfied and d.is_open and not d.is_awaited) as satisfied_open,
        count(*) filter (where d.is_awaited and d.class = 'p') as awaited,
        max(d.need_id) filter (where d.class = 'p') as last_pending,
        max(d.need_id) filter (where d.class = 'f') as last_failed
      from (
        select d.need_id, d.mode, d.is_open, d.deleted_state, d.mode & {{ended}} <> 0 as is_awaited, d.class,
          d.is_satisfied
        from queue.need_now d where d.job_id = u.id offset 0) d) n
    cross join lateral (
      select case
        when n.total = 0 or s.ignores_needs then null
        when n.mode & {{any}} <> 0 then case
          when s.is_yielded and n.open = 0 then null
          when case when s.is_yielded then n.satisfied_open else n.satisfied end > 0 then null
          when n.failed = n.total then 'upstream_failed'
          else 'needs' end
        when n.satisfied = n.total then null
        when n.failed > 0 and n.mode & {{proceed}} = 0 then 'upstream_failed'
        else 'needs' end as reason) b
    cross join lateral (select coalesce(b.reason, case when n.awaited > 0 then 'needs' end) as reason) x;
end $$;

-- Records the largest id that was ever needed, so that admission need not ask whether a newer job is needed.
-- Locks: the caller holds the admission lock. A rollback does not undo it, which does no harm.
create or replace function queue._raise_needed_mark(p_id bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_id > (select s.last_value from queue.needed_seq s) then
    perform setval('queue.needed_seq', p_id);
  end if;
end $$;

-- Marks jobs so that the end of their claim is handed over to their dependents.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
-- Why no end is missed: a row that is locked here gets the mark before its finisher, which waits for the
-- lock, deletes it. A row that its finisher (or a claimer) has locked can't be waited for under the admission
-- lock: a recheck is appended for the next admission, until the row is free or gone. A job in a gate gets the
-- mark when it enters queue.active_job (_queue_entries). A job that is not admitted yet gets it when it goes
-- through the gates (_admit_range). The next check sees jobs that have already finished.
create or replace function queue._mark_needed(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_locked bigint[];
begin
  v_locked := array(select aj.id from queue.active_job aj where aj.id = any (p_ids)
    and aj.flags & {{needed}} = 0 order by aj.id for update skip locked);
  update queue.active_job aj set flags = aj.flags | {{needed}} where aj.id = any (v_locked);
  insert into queue.pending_settlement (xid, job_id, kind, flags)
  select queue._row_locker(aj.xmax), aj.id, 'recheck', {{needed}} from queue.active_job aj
  where aj.id = any (p_ids) and aj.flags & {{needed}} = 0;
end $$;

-- Jobs that have passed the gate of needs, but would not pass it now, go back to wait unless they run.
-- failed: jobs that fail because of that. keys: semaphores that have room now.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._return_to_needs(p_ids bigint[], out failed bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_job record;
  v_taken record;
begin
  for v_job in
    select s.id, s.reason, s.holder from queue._needs_states(p_ids) s where s.reason is not null
    order by s.id
  loop
    v_taken := queue._dequeue_dependent(v_job.id);
    if v_taken.is_out then
      keys := keys || v_taken.keys;
      insert into queue.waiting (id, reason, need_id) values (v_job.id, v_job.reason, v_job.holder);
      failed := failed || array(select v_job.id where v_job.reason = 'upstream_failed');
    elsif exists (select from queue.active_job aj where aj.id = v_job.id and aj.claim is null) then
      -- A claim has locked its row, and may be rolled back.
      insert into queue.pending_settlement (xid, job_id, kind, flags)
      select queue._row_locker(aj.xmax),
        coalesce(v_job.holder, (select d.need_id from queue.need d where d.job_id = v_job.id limit 1)),
        'recheck', {{needed}}
      from queue.active_job aj where aj.id = v_job.id;
    end if;
  end loop;
end $$;

-- Takes a job that has passed the gate of needs out of the place where it waits (_dequeue). Not is_out: it
-- runs, is finished, is held, moves, or waits for its needs.
-- Locks: the caller holds the admission lock; the row of queue.active_job by skip locked.
create or replace function queue._dequeue_dependent(p_id bigint, out is_out boolean, out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
begin
  is_out := false;
  if not exists (select from queue.waiting w where w.id = p_id
    and w.reason in ('held', 'needs', 'upstream_failed', 'parked', 'moving')) then
    select coalesce(t.place <> 'log', false), t.keys into is_out, keys from queue._dequeue(p_id) t;
  end if;
end $$;

-- The state of a deleted job, for jobs that come to need it.
create or replace function queue._deleted_state(p_id bigint)
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return case when exists (select from queue.deleted d where d.id = p_id) then 'succeeded' else 'failed' end;
end $$;

-- The jobs that need these.
create or replace function queue._dependents(p_ids bigint[])
returns bigint[] language plpgsql stable parallel safe security invoker as $$
begin
  return array(
    select distinct d.job_id from unnest(p_ids) u (id)
    cross join lateral (select d.job_id from queue.need d where d.need_id = u.id offset 0) d);
end $$;
