-- Cancelling the children of a job: the jobs that it has deferred and waits for, and their children.

-- Locks: as in operate/change.sql, for at most 1,000 jobs, which are looked up first. Then rows of
-- queue.active_job and queue.queueing_lock by skip locked, for the jobs that one of these has begun to wait
-- for meanwhile.
-- Why no wake-up is lost: as for cancel; the parent's wait ends with its children.
-- Two sessions: operate/cancel_children.claim.spec.
-- Raises: 22023, QJ001, QJ008.
create or replace function queue.cancel_children(job bigint, abort boolean default false)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_allowed text[] := queue._allowed_queues('{operator}');
  v_ids bigint[];
  v_before jsonb;
  v_child record;
  v_active record;
  v_taken record;
  v_keys text[];
  v_ended bigint[];
  v_done bigint[] := '{}'::bigint[];
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator}', array[cancel_children.job]);
  end if;
  perform queue._check_isolation();
  if cancel_children.job is null
    or not exists (select from queue.job j where j.id = cancel_children.job) then
    perform queue._job_not_found(cancel_children.job);
  end if;
  v_ids := queue._unfinished_children(cancel_children.job, cancel_children.abort is true, v_allowed);
  perform queue._lock_all_for_change(v_ids);
  v_ids := v_ids || array(
    select u.id
    from unnest(queue._unfinished_children(
      cancel_children.job, cancel_children.abort is true, v_allowed)) u (id)
    where u.id <> all (v_ids));
  v_before := queue._jobs_before(v_ids);
  for v_child in select u.id from unnest(v_ids) u (id) order by u.id loop
    select aj.claim, aj.worker_id into v_active from queue.active_job aj
    where aj.id = v_child.id and aj.claim is not null for no key update skip locked;
    if v_active.claim is not null and cancel_children.abort then
      update queue.active_job aj set flags = aj.flags | {{aborting}} where aj.id = v_child.id;
      perform queue._notify_abort(v_child.id, v_active.claim, v_active.worker_id, 'cancelled');
    elsif (select g.situation from queue._try_lock_job(v_child.id) g) = 'open' then
      v_taken := queue._dequeue(v_child.id);
      v_keys := v_keys || v_taken.keys;
      v_ended := v_ended || v_child.id;
    else
      continue;
    end if;
    v_done := v_done || v_child.id;
  end loop;
  if v_ended is not null then
    perform queue._finish_unclaimed(v_ended, 'cancelled', 'cancelled', null);
    perform queue._advance(p_ended => v_ended, p_keys => v_keys);
  end if;
  perform queue._announce();
  perform queue._audit_jobs('cancel_children',
    jsonb_build_object('job', cancel_children.job, 'abort', cancel_children.abort), v_done, v_before,
    (select j.queue from queue.job_now j where j.id = cancel_children.job));
  return query select t.id, t.outcome, t.error from queue._change_results(v_ids, v_done) t;
end $$;
comment on function queue.cancel_children(bigint, boolean) is
  'Cancels the children of a job, which are the jobs that it has deferred and waits for, and their children,'
    ' recursively: those that have not started. With abort, the workers of running ones are told to stop'
    ' them. To cancel a job with its children, cancel the job first. It handles at most 1,000 jobs: call it'
    ' again while it returns that many rows. Returns a row for each: cancelled, running (its worker was told'
    ' to stop it), or an error with its state.';

-- The first 1,000 jobs below a job that have not ended. Without p_abort, only those that do not run; with it,
-- also those that run and whose workers were not told to stop them. Each job has one parent, which is older,
-- so this ends.
create or replace function queue._unfinished_children(p_job bigint, p_abort boolean, p_allowed text[])
returns bigint[] language plpgsql stable parallel safe security invoker as $$
declare
  v_pending record := queue._pending_yields();
  v_generation bigint[] := array[p_job];
  v_ids bigint[] := '{}'::bigint[];
begin
  while cardinality(v_generation) > 0 loop
    v_generation := array(
      select c.id
      from (select u.id as job_id, n.id as need_id
            from unnest(v_generation) u (id) cross join lateral queue._direct_needs(u.id) n
            union
            select y.job_id, y.need_id from unnest(v_pending.jobs, v_pending.needs) y (job_id, need_id)
            where y.job_id = any (v_generation)) d
      cross join lateral (
        select j.id from queue.job j
        where j.id = d.need_id and (j.options ->> 'parent')::bigint = d.job_id offset 0) c);
    v_ids := v_ids || v_generation;
  end loop;
  return array(
    select u.id from unnest(v_ids) u (id)
    left join lateral (
      select aj.claim, aj.flags from queue.active_job aj where aj.id = u.id offset 0) a on true
    where not exists (select from queue.finished f where f.id = u.id)
      and (a.claim is null or p_abort and a.flags & {{aborting}} = 0)
      and queue._allows(p_allowed, (select j.queue from queue.job_now j where j.id = u.id))
    order by u.id limit 1000);
end $$;
