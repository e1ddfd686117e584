-- Ending jobs by hand.

-- Locks: as in operate/change.sql. Raises: 22023, QJ008.
create or replace function queue.fail_jobs(ids bigint[], message text default null)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_before jsonb;
  v_job record;
  v_done bigint[] := '{}'::bigint[];
  v_taken record;
  v_message text := left(fail_jobs.message, 10000);
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator}', fail_jobs.ids);
  end if;
  perform queue._lock_all_for_change(fail_jobs.ids);
  v_before := queue._jobs_before(fail_jobs.ids);
  for v_job in select distinct u.id from unnest(fail_jobs.ids) u (id) order by u.id loop
    select v_job.id, g.* into v_job from queue._try_lock_job(v_job.id) g;
    if v_job.situation = 'running' then
      -- It fails, even if its worker was told to abort it.
      update queue.active_job aj set flags = aj.flags & ~{{aborting}} where aj.id = v_job.id;
      perform queue._end_attempt(
        jsonb_build_object('outcome', 'failed', 'error', v_message, 'options',
          '{"retryable": false, "reason": "operator"}'::jsonb),
        v_job.id, v_job.claim, true);
      perform queue._notify_abort(v_job.id, v_job.claim, v_job.worker_id, 'failed');
    elsif v_job.situation = 'open' then
      v_taken := queue._dequeue(v_job.id);
      perform queue._finish_unclaimed(array[v_job.id], 'failed', 'operator', v_message);
      perform queue._advance(p_ended => array[v_job.id], p_keys => v_taken.keys);
    else
      continue;
    end if;
    v_done := v_done || v_job.id;
  end loop;
  perform queue._announce();
  perform queue._audit_jobs('fail_jobs', jsonb_build_object('message', left(v_message, 1000)), v_done,
    v_before);
  return query select t.id, t.outcome, t.error from queue._change_results(fail_jobs.ids, v_done) t;
end $$;
comment on function queue.fail_jobs(bigint[], text) is
  'Ends unfinished jobs as failed, reason operator, with message as their error; they are not retried.'
    ' The claims of running ones are lost. Finished ones are refused (QJ003). Returns a row for each id:'
    ' failed, or an error with its state.';

-- Locks: as in operate/change.sql. Raises: 22023, QJ008.
create or replace function queue.done(ids bigint[])
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_before jsonb;
  v_job record;
  v_done bigint[] := '{}'::bigint[];
  v_taken record;
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator}', done.ids);
  end if;
  perform queue._lock_all_for_change(done.ids);
  v_before := queue._jobs_before(done.ids);
  for v_job in select distinct u.id from unnest(done.ids) u (id) order by u.id loop
    select v_job.id, g.* into v_job from queue._try_lock_job(v_job.id) g;
    if v_job.situation = 'running' then
      perform queue._succeed(array[v_job.id], array[v_job.claim], null);
      update queue.finished f set reason = 'operator' where f.id = v_job.id;
      perform queue._notify_abort(v_job.id, v_job.claim, v_job.worker_id, 'done');
    elsif v_job.situation = 'open' then
      v_taken := queue._dequeue(v_job.id);
      perform queue._finish_unclaimed(array[v_job.id], 'succeeded', 'operator', null);
      perform queue._advance(p_ended => array[v_job.id], p_keys => v_taken.keys);
    elsif v_job.situation = 'finished' then
      -- The failure is counted before it disappears. A job that has succeeded stays as it is.
      perform queue._count_ends_of(array[f.id], false) from queue.finished f
      where f.id = v_job.id and f.state <> 'succeeded';
      update queue.finished f
      set state = 'succeeded', reason = 'operator', finished_at = clock_timestamp(), worker_id = null
      where f.id = v_job.id and f.state <> 'succeeded';
      continue when not found;
      perform queue._set_purge_at(v_job.id);
      perform queue._advance(p_changed => array[v_job.id]);
    else
      continue;
    end if;
    v_done := v_done || v_job.id;
  end loop;
  perform queue._announce();
  perform queue._audit_jobs('done', '{}', v_done, v_before);
  return query select t.id, t.outcome, t.error from queue._change_results(done.ids, v_done) t;
end $$;
comment on function queue.done(bigint[]) is
  'Marks jobs as succeeded, reason operator, without running them: unfinished, failed and cancelled ones.'
    ' Jobs that need them can then run. The claims of running ones are lost. Jobs that have succeeded are'
    ' refused (QJ003). Returns a row for each id: succeeded, or an error with its state.';
