-- Ending jobs by hand.

-- Locks: as in operate/change.sql. Raises: 22023, QJ008.
create or replace function queue.fail_jobs(ids bigint[], message text default null)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_before jsonb;
  v_job record;
  v_open bigint[] := '{}'::bigint[];
  v_running bigint[];
  v_done bigint[];
  v_message text := left(fail_jobs.message, 10000);
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator}', fail_jobs.ids);
  end if;
  perform queue._lock_all_for_change(fail_jobs.ids);
  v_before := queue._jobs_before(fail_jobs.ids);
  for v_job in select g.* from queue._try_lock_jobs(fail_jobs.ids) g loop
    if v_job.situation = 'running' then
      -- It fails, even if its worker was told to abort it.
      update queue.active_job aj set flags = aj.flags & ~{{aborting}} where aj.id = v_job.id;
      perform queue._end_attempt(
        jsonb_build_object('outcome', 'failed', 'error', v_message, 'options',
          '{"retryable": false, "reason": "operator"}'::jsonb),
        v_job.id, v_job.claim, false);
      perform queue._notify_abort(v_job.id, v_job.claim, v_job.worker_id, 'failed');
      v_running := v_running || v_job.id;
    elsif v_job.situation = 'open' then
      v_open := v_open || v_job.id;
    end if;
  end loop;
  v_done := queue._end_open(v_open, 'failed', v_message) || v_running;
  if v_running is not null then
    perform queue._settle_own(v_running);
  end if;
  v_done := array(select u.id from unnest(v_done) u (id) order by u.id);
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
  v_open bigint[] := '{}'::bigint[];
  v_running bigint[];
  v_claims bigint[];
  v_workers bigint[];
  v_finished bigint[];
  v_done bigint[];
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator}', done.ids);
  end if;
  perform queue._lock_all_for_change(done.ids);
  v_before := queue._jobs_before(done.ids);
  for v_job in select g.* from queue._try_lock_jobs(done.ids) g loop
    if v_job.situation = 'running' then
      v_running := v_running || v_job.id;
      v_claims := v_claims || v_job.claim;
      v_workers := v_workers || v_job.worker_id;
    elsif v_job.situation = 'open' then
      v_open := v_open || v_job.id;
    else
      v_finished := v_finished || v_job.id;
    end if;
  end loop;
  v_done := queue._end_open(v_open, 'succeeded', null) || v_running;
  if v_running is not null then
    perform queue._succeed(v_running, v_claims, null);
    update queue.finished f set reason = 'operator' where f.id = any (v_running);
    -- After the ends, which delete earlier aborts of these jobs.
    perform queue._notify_abort(u.id, u.claim, u.worker_id, 'done')
    from unnest(v_running, v_claims, v_workers) u (id, claim, worker_id);
  end if;
  -- A job that has succeeded stays as it is. A failure is counted before it disappears.
  v_finished := array(
    select f.id from queue.finished f where f.id = any (v_finished) and f.state <> 'succeeded' order by f.id);
  perform queue._count_ends_of(v_finished, false);
  update queue.finished f
  set state = 'succeeded', reason = 'operator', finished_at = clock_timestamp(), worker_id = null
  where f.id = any (v_finished);
  perform queue._set_purge_at(u.id) from unnest(v_finished) u (id);
  perform queue._advance(p_changed => v_finished);
  v_done := array(select u.id from unnest(v_done || v_finished) u (id) order by u.id);
  perform queue._announce();
  perform queue._audit_jobs('done', '{}', v_done, v_before);
  return query select t.id, t.outcome, t.error from queue._change_results(done.ids, v_done) t;
end $$;
comment on function queue.done(bigint[]) is
  'Marks jobs as succeeded, reason operator, without running them: unfinished, failed and cancelled ones.'
    ' Jobs that need them can then run. The claims of running ones are lost. Jobs that have succeeded are'
    ' refused (QJ003). Returns a row for each id: succeeded, or an error with its state.';

-- Ends jobs that are neither running nor finished, and returns them. All leave their places before any turn
-- is passed on, so that none of them gets the turn.
-- Locks: the caller holds the admission lock and the jobs' rows.
-- Why no wake-up is lost: _advance passes on what they held.
create or replace function queue._end_open(p_ids bigint[], p_state text, p_error text)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_taken record;
begin
  if p_ids = '{}' then
    return p_ids;
  end if;
  v_taken := queue._dequeue_all(p_ids);
  perform queue._finish_unclaimed(v_taken.ids, p_state, 'operator', p_error);
  perform queue._advance(p_ended => v_taken.ids, p_keys => v_taken.keys);
  return v_taken.ids;
end $$;
