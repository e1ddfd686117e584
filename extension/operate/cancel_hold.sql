-- Cancelling, holding and unholding one job.
--
-- Why no wake-up is lost: _advance sends on the jobs that a call releases, by a slot, a turn or a need, and
-- each call that may make a job ready ends with _announce.

-- Locks: those of _lock_for_change, which does not wait for a transaction that has finished a step: a job can
-- be told to stop meanwhile.
-- Raises: QJ001, QJ003 (finished, or running without abort), QJ008.
create or replace function queue.cancel(id bigint, abort boolean default false)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_before jsonb;
  v_active record;
  v_taken record;
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator}', array[cancel.id]);
  end if;
  perform queue._lock_for_change(cancel.id);
  v_before := queue._jobs_before(array[cancel.id]);
  -- A job that was claimed while this waited for the admission lock may be about to end, in a transaction
  -- that holds its row.
  select aj.claim, aj.worker_id into v_active from queue.active_job aj
  where aj.id = cancel.id for no key update skip locked;
  if v_active.claim is not null then
    if cancel.abort is not true then
      perform queue._invalid_state(cancel.id, 'running',
        'Call queue.cancel(id, abort => true) to have its worker stop it.');
    end if;
    update queue.active_job aj set flags = aj.flags | {{aborting}} where aj.id = cancel.id;
    perform queue._notify_abort(cancel.id, v_active.claim, v_active.worker_id, 'cancelled');
    perform queue._audit_jobs('cancel', jsonb_build_object('abort', cancel.abort), array[cancel.id],
      v_before);
    return 'running';
  end if;
  v_taken := queue._dequeue(cancel.id);
  if coalesce(v_taken.place, 'log') = 'log' then
    perform queue._invalid_state(cancel.id, queue._state(cancel.id),
      'Only a job that is not finished, and whose defer has committed, can be cancelled.');
  end if;
  perform queue._finish_unclaimed(array[cancel.id], 'cancelled', 'cancelled', null);
  perform queue._advance(p_ended => array[cancel.id], p_keys => v_taken.keys);
  perform queue._announce();
  perform queue._audit_jobs('cancel', jsonb_build_object('abort', cancel.abort), array[cancel.id], v_before);
  return 'cancelled';
end $$;
comment on function queue.cancel(bigint, boolean) is
  'Cancels a job that has not started and returns cancelled. If the job is running, it is refused (QJ003)'
    ' without abort; with abort its worker is told to stop it, and the function returns running.';

-- Locks: those of _lock_for_change. Raises: QJ001, QJ003 (running or finished), QJ008.
create or replace function queue.hold(id bigint)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_before jsonb;
  v_taken record;
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator}', array[hold.id]);
  end if;
  perform queue._lock_for_change(hold.id);
  v_before := queue._jobs_before(array[hold.id]);
  v_taken := queue._dequeue(hold.id);
  if coalesce(v_taken.place, 'log') = 'log' then
    perform queue._invalid_state(hold.id, queue._state(hold.id),
      'Only a job that has not started can be held, and only after the transaction that deferred it has'
      ' committed; cancel a running one with abort.');
  end if;
  insert into queue.waiting (id, reason) values (hold.id, 'held');
  perform queue._advance(p_keys => v_taken.keys, p_changed => array[hold.id]);
  perform queue._announce();
  perform queue._audit_jobs('hold', '{}', array[hold.id], v_before);
  return 'held';
end $$;
comment on function queue.hold(bigint) is
  'Puts a job that is not running on hold until queue.unhold. It keeps its place at its lock. Meanwhile it'
    ' counts as failed for the jobs that need it: they wait, but those with on_need_failure proceed start.'
    ' Returns held.';

-- Locks and errors: as hold; QJ003 if the job is not held.
create or replace function queue.unhold(id bigint)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_before jsonb;
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator}', array[unhold.id]);
  end if;
  perform queue._lock_for_change(unhold.id);
  v_before := queue._jobs_before(array[unhold.id]);
  delete from queue.waiting w where w.id = unhold.id and w.reason = 'held';
  if not found then
    perform queue._invalid_state(unhold.id, queue._state(unhold.id), 'Only a held job can be unheld.');
  end if;
  perform queue._advance(p_arrived => array[unhold.id], p_changed => array[unhold.id]);
  perform queue._announce();
  perform queue._audit_jobs('unhold', '{}', array[unhold.id], v_before);
  return queue._state(unhold.id);
end $$;
comment on function queue.unhold(bigint) is 'Releases a held job. Returns its new state.';
