-- Admission for operators: of all jobs, or until some are admitted.
-- Tests: admit/admit_all.sql, operate/change.again.spec.

-- Admits everything that is visible, so that an operator finds every job behind the gates; with p_ids only
-- until these jobs are. So after a large import others need not wait until all of it is admitted. But a call
-- that passes on the turn of an ordered lock must know its older jobs.
-- Locks: the admission lock, waited for.
-- Why no wake-up is lost: the cursor says that there is more, and the next admission goes on.
create or replace function queue._admit_all(p_ids bigint[] default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_admit record;
begin
  perform queue._lock_admission(true);
  loop
    select a.* into v_admit from queue._admit(1000) a;
    exit when not v_admit.has_more or queue._are_admitted(p_ids);
  end loop;
  if p_ids is null then
    perform queue._advance_own();  -- a job that was handed over is found by its id
  end if;
end $$;

-- New jobs that need one of these, or any job (NULL): they are not admitted yet, or parked, so queue.need
-- does not show it. A fork may need the jobs that its original awaited.
create or replace function queue._new_dependents(p_ids bigint[] default null)
returns bigint[] language plpgsql stable parallel safe security invoker {{planner}} as $$
begin
  return array(
    select n.id
    from (select u.id, u.needs, u.flags from queue.unadmitted u
      union all
      select j.id, j.needs, j.flags from queue.waiting w join queue.job j on j.id = w.id
      where w.reason = 'parked') n
    where n.flags & {{needs}} <> 0 and (p_ids is null or n.needs && p_ids
      or exists (select from queue.job j where j.id = n.id and j.options ? 'awaited')));
end $$;

-- Whether these jobs are admitted, none is parked, and none has an ordered lock. False for NULL.
-- Locks: the caller holds the admission lock.
create or replace function queue._are_admitted(p_ids bigint[])
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  return p_ids is not null
    and not exists (select from queue.waiting w where w.id = any (p_ids) and w.reason = 'parked')
    and not exists (
      select from unnest(p_ids) u (id)
      cross join lateral (select j.flags from queue.job_now j where j.id = u.id offset 0) j
      where j.flags & {{ordered}} <> 0
        or not exists (select from queue.active_job aj where aj.id = u.id)
        and not exists (select from queue.finished f where f.id = u.id)
        and not queue._is_gated(u.id));
end $$;

-- Whether a job waits in a gate. A job that does not, and is neither in queue.active_job nor in
-- queue.finished, is not admitted yet.
-- Locks: the caller holds the admission lock.
create or replace function queue._is_gated(p_id bigint)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (select from queue.waiting w where w.id = p_id)
    or exists (select from queue.unsettled h where h.job_id = p_id and h.kind = 'again')
    or exists (select from queue.job_now j join queue.lock_member m on m.lock = j.lock and m.id = j.id
               where j.id = p_id);
end $$;
