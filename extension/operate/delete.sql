-- Deleting jobs and queues.

-- Locks: as in operate/change.sql. Raises: 22023, QJ008.
create or replace function queue.delete(ids bigint[], force boolean default false)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_before jsonb;
  v_done bigint[];
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator}', delete.ids);
  end if;
  perform queue._lock_all_for_change(delete.ids, p_dependents => queue._new_dependents(delete.ids));
  v_before := queue._jobs_before(delete.ids, 'task');
  v_done := queue._delete(delete.ids, coalesce(delete.force, false));
  perform queue._announce();
  perform queue._audit_jobs('delete', jsonb_build_object('force', delete.force), v_done, v_before);
  return query
    select t.id, case when t.id in (select unnest(v_done)) then 'deleted'
      else t.outcome || coalesce(', needed by job ' || n.id, '') end,
      case when t.id not in (select unnest(v_done)) then t.error end
    from queue._change_results(delete.ids, v_done) t
    left join lateral (
      select d.job_id as id
      from queue.need d
      where d.need_id = t.id and t.outcome is distinct from 'running'
        and not exists (select from queue.finished f where f.id = d.job_id)
      order by d.job_id limit 1) n on true;
end $$;
comment on function queue.delete(bigint[], boolean) is
  'Removes jobs and every trace of them. A running job, or one that an unfinished job outside the list'
    ' needs, is refused (QJ003) without force. With force its claim is lost, and jobs that need it count it'
    ' as failed unless it had succeeded. Returns a row for each id: deleted, or an error with its state.';

-- Locks: as in operate/change.sql. It reads the whole log to find the queue's jobs.
-- Raises: 22023 (no such queue), QJ006, QJ008.
create or replace function queue.delete_queue(name text, force boolean default false)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_later bigint[];
  v_ids bigint[];
  v_done bigint[];
  v_deleted bigint[] := '{}'::bigint[];
  v_open bigint;
  v_running bigint;
  v_need record;
  v_before jsonb;
begin
  {{if_restricted}}
    perform queue._require_queue('{operator}', delete_queue.name);
  end if;
  perform queue._check_isolation();
  perform queue._check_queue(delete_queue.name);
  perform queue._lock_rows(array(select q.id from queue._active_jobs_of(delete_queue.name) q), null);
  if not exists (select from queue.queue_config c where c.queue = delete_queue.name)
    and not exists (select from queue.lane l where l.queue = delete_queue.name)
    and not exists (select from queue.pause p where p.queue = delete_queue.name and p.is_paused)
    and not exists (select from queue.job_now j where j.queue = delete_queue.name) then
    perform queue._invalid('no such queue', 'queue.queues lists them.', 'queue: ' || delete_queue.name);
  end if;
  -- It looks again, because the end of a claim admits what was committed meanwhile
  -- (operate/delete.queue_defer.spec). This ends, because no job that is admitted under this admission lock
  -- can run.
  loop
    v_later := array(select u.id from queue.unadmitted u);  -- jobs committed since count as deferred later
    v_ids := array(
      select j.id from queue.job_now j
      where j.queue = delete_queue.name and j.id <> all (v_later) order by j.id);
    exit when v_ids = '{}';
    if delete_queue.force is not true then
      select count(*), count(*) filter (where aj.claim is not null) into v_open, v_running
      from unnest(v_ids) u (id) left join queue.finished f on f.id = u.id
      left join queue.active_job aj on aj.id = u.id where f.id is null;
      if v_open > 0 then
        perform queue._queue_not_empty(delete_queue.name,
          format('unfinished jobs: %s, of these running: %s', v_open, v_running));
      end if;
      select d.job_id, d.need_id into v_need
      from queue.need d
      where d.need_id = any (v_ids) and not exists (select from queue.finished f where f.id = d.job_id)
        limit 1;
      if found then
        perform queue._queue_not_empty(delete_queue.name,
          format('job %s of another queue needs job %s', v_need.job_id, v_need.need_id));
      end if;
    end if;
    v_done := queue._delete(v_ids, true);
    if cardinality(v_done) < cardinality(v_ids) then
      perform queue._queue_not_empty(delete_queue.name,
        format('jobs that another transaction is changing: %s', cardinality(v_ids) - cardinality(v_done)),
        'Call it again once that transaction has ended.');
    end if;
    v_deleted := v_deleted || v_done;
  end loop;
  delete from queue.lane l where l.queue = delete_queue.name;
  delete from queue.share_tag t where t.queue = delete_queue.name;
  v_before := queue._queue_before(delete_queue.name) || jsonb_build_object('jobs', cardinality(v_deleted));
  delete from queue.queue_config c where c.queue = delete_queue.name;
  delete from queue.pause p where p.queue = delete_queue.name;
  delete from queue.rate_start r where r.key = 'q' || delete_queue.name;
  delete from queue.semaphore s where s.key = 'q' || delete_queue.name;
  perform queue._resume_schedules();
  perform queue._announce();
  perform queue._audit('delete_queue', jsonb_build_object('name', delete_queue.name, 'force',
    delete_queue.force), array[delete_queue.name], v_before, array(select unnest(v_deleted) order by 1));
  return cardinality(v_deleted);
end $$;
comment on function queue.delete_queue(text, boolean) is
  'Removes a queue with its settings, its pause and all its finished jobs. It is refused (QJ006) without'
    ' force if the queue has unfinished jobs, or jobs that an unfinished job of another queue needs; with'
    ' force these are removed as by queue.delete. It is refused (QJ006) even with force while another'
    ' transaction is changing one of its jobs; then call it again. No worker gets jobs until the call has'
    ' removed all: if there are many thousands, first remove them by queue.delete, 1,000 at a time. Returns'
    ' the number of removed jobs. A job deferred later creates the queue again, without settings.';

-- Raises: QJ006, always.
create or replace function queue._queue_not_empty(p_queue text, p_detail text, p_hint text
  default 'Let them end or move them, or pass force => true to remove them.')
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ006', message = 'queue not empty',
    detail = format('queue: %s, %s', p_queue, p_detail),
    hint = p_hint;
end $$;

-- Deletes those of the jobs that may be deleted, and returns their ids. Finished jobs, and ready ones that
-- hold nothing, are deleted as sets. The others are first ended, which releases what they held.
-- Locks: the caller holds the admission lock; the jobs' rows by skip locked.
create or replace function queue._delete(p_ids bigint[], p_force boolean)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_job record;
  v_finished bigint[];
  v_plain bigint[];
  v_open bigint[] := '{}'::bigint[];
  v_claims bigint[] := '{}'::bigint[];
  v_workers bigint[] := '{}'::bigint[];
  v_all bigint[];
  v_needed bigint[];
  v_waiting bigint[];
  v_taken record;
begin
  perform queue._forget_deleted();
  v_finished := array(
    select f.id from queue.finished f
    where f.id = any (p_ids) and not exists (select from queue.unsettled h
      where h.job_id = f.id and h.kind in ('ended', 'again'))
    for update skip locked);
  v_plain := array(
    select aj.id from queue.active_job aj
    where aj.id = any (p_ids) and aj.claim is null
      and aj.flags & ~({{lease}} | {{retain}} | {{overridden}} | {{large}}) = 0
      and aj.deadline >= '{{end_of_tags}}'
      and (select d.need_id from queue.need d where d.need_id = aj.id limit 1) is null
    for update skip locked);
  for v_job in
    select u.id, g.situation, g.claim, g.worker_id
    from (select distinct u.id from unnest(p_ids) u (id)
      where u.id not in (select unnest(v_finished || v_plain)) order by u.id desc) u
    cross join lateral queue._try_lock_job(u.id) g
  loop
    if v_job.situation = 'open' or v_job.situation = 'running' and p_force then
      v_open := v_open || v_job.id;
      v_claims := v_claims || v_job.claim;
      v_workers := v_workers || v_job.worker_id;
    end if;
  end loop;
  v_all := v_finished || v_plain || v_open;
  while not p_force loop
    v_needed := array(
      select distinct d.need_id from queue.need d
      where d.need_id = any (v_all) and d.job_id not in (select unnest(v_all))
        and (select f.id from queue.finished f where f.id = d.job_id) is null);
    exit when v_needed = '{}';
    v_all := array(select u.id from unnest(v_all) u (id) where u.id not in (select unnest(v_needed)));
  end loop;
  insert into queue.deleted (id)
  select f.id from queue.finished f where f.id = any (v_all) and f.state = 'succeeded';
  -- not (not in): in alone would become a join, and with these settings only of the slowest kind.
  v_waiting := array(
    select u.id from unnest(v_open, v_claims) u (id, claim)
    where u.claim is null and not u.id not in (select unnest(v_all)));
  -- All leave their places before any turn is passed on, so that none of them gets the turn.
  v_taken := queue._dequeue_all(v_waiting);
  if cardinality(v_taken.ids) > 0 then
    perform queue._finish_unclaimed(v_taken.ids, 'cancelled', 'deleted', null);
    perform queue._advance(p_ended => v_taken.ids, p_keys => v_taken.keys);
  end if;
  v_all := array(select u.id from unnest(v_all) u (id)
    where u.id not in (select unnest(v_waiting)) or not u.id not in (select unnest(v_taken.ids)));
  for v_job in select u.id, u.claim, u.worker_id
    from unnest(v_open, v_claims, v_workers) u (id, claim, worker_id)
    where u.claim is not null and not u.id not in (select unnest(v_all)) loop
    perform queue._end_attempt('{"outcome": "aborted"}', v_job.id, v_job.claim, true);
    perform queue._notify_abort(v_job.id, v_job.claim, v_job.worker_id, 'deleted');
  end loop;
  delete from queue.active_job aj where aj.id = any (v_plain);
  perform queue._delete_rows(v_all);
  -- A job that waited for any one of several needs no longer waits if none of them is left.
  perform queue._advance(p_changed => v_all);
  return v_all;
end $$;
