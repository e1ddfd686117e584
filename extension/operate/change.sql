-- Changing jobs: their queues, priorities, deadlines, times and args.
--
-- Each call is one transaction and takes its locks in the order of operate/lock_jobs.sql: claimed rows of
-- queue.active_job and rows of queue.finished, each sorted and waited for, then the admission lock. Under the
-- admission lock it locks other rows by skip locked (_try_lock_job): a job whose row another transaction
-- holds is refused like one whose state does not allow the call. If a running job's claim is taken away, the
-- claim is lost: its worker is told to abort, and its late outcome gets QJ002.
--
-- (NOT) IN (SELECT unnest(...)) checks whether an id is one of many, because the planner hashes it: = ANY
-- (array) reads the array for each row.

-- Locks: as above. Raises: 22023, QJ008.
create or replace function queue.move(ids bigint[], queue text, force boolean default false)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_before jsonb;
  v_job record;
  v_running bigint[];
  v_done bigint[] := '{}'::bigint[];
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator}', move.ids);
    perform queue._require_queue('{operator}', move.queue);
  end if;
  perform queue._check_queue(move.queue);
  perform queue._lock_all_for_change(move.ids);
  v_before := queue._jobs_before(move.ids);
  for v_job in select g.* from queue._try_lock_jobs(move.ids) g loop
    continue when v_job.situation = 'running' and move.force is not true;
    if v_job.situation = 'running' then
      perform queue._end_attempt('{"outcome": "released", "error": "taken back by a move with force"}',
        v_job.id, v_job.claim, false);
      perform queue._notify_abort(v_job.id, v_job.claim, v_job.worker_id, 'moved');
      v_running := v_running || v_job.id;
    end if;
    v_done := v_done || v_job.id;
  end loop;
  if v_running is not null then
    -- The slots of the old queue must be free before the jobs have the new one. If one job can't be settled,
    -- it alone stays where it is.
    perform queue._settle_own(v_running);
    perform queue._settle_own(array[u.id]) from unnest(v_running) u (id) where queue._is_unsettled(u.id);
    v_done := array(select u.id from unnest(v_done) u (id) where not queue._is_unsettled(u.id));
  end if;
  perform queue._override(v_done, p_queue => move.queue);
  perform queue._set_purge_at(u.id) from unnest(v_done) u (id);
  perform queue._announce();
  perform queue._audit_jobs('move', jsonb_build_object('queue', move.queue, 'force', move.force), v_done,
    v_before, move.queue);
  return query select t.id, t.outcome, t.error from queue._change_results(move.ids, v_done) t;
end $$;
comment on function queue.move(bigint[], text, boolean) is
  'Moves jobs to another queue, with their ids, args, attempts and history; finished ones run there if they'
    ' are retried. A running job is refused (QJ003) without force; with force its claim is lost, and the job'
    ' is ready again in that queue. Returns a row for each id: its state in outcome, or an error.';

-- Locks: as above. Raises: 22023, QJ008.
create or replace function queue.set_priority(ids bigint[], priority integer)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_before jsonb;
  v_done bigint[];
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator}', set_priority.ids);
  end if;
  if set_priority.priority is null then
    perform queue._invalid('priority is missing', 'Give a whole number; higher runs first.');
  end if;
  perform queue._lock_all_for_change(set_priority.ids);
  v_before := queue._jobs_before(set_priority.ids, 'priority');
  v_done := queue._override(array(select g.id from queue._try_lock_jobs(set_priority.ids) g),
    p_priority => set_priority.priority);
  perform queue._announce();
  perform queue._audit_jobs('set_priority', jsonb_build_object('priority', set_priority.priority), v_done,
    v_before);
  return query select t.id, t.outcome, t.error from queue._change_results(set_priority.ids, v_done) t;
end $$;
comment on function queue.set_priority(bigint[], integer) is
  'Changes the priority of jobs; for running and finished ones it applies to their next run. Returns a'
    ' row for each id: its state in outcome, or an error.';

-- Locks: as above. Raises: 22023, QJ008.
-- Why no wake-up is lost: each job goes through the gates again, and it ends with _announce.
create or replace function queue.set_deadline(ids bigint[], at timestamptz)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_before jsonb;
  v_done bigint[];
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator}', set_deadline.ids);
  end if;
  perform queue._check_moment('at', set_deadline.at, true);
  perform queue._lock_all_for_change(set_deadline.ids);
  v_before := queue._jobs_before(set_deadline.ids, 'deadline');
  v_done := queue._override(array(select g.id from queue._try_lock_jobs(set_deadline.ids) g),
    p_deadline => coalesce(set_deadline.at, 'infinity'));
  perform queue._propagate_deadline(v_done);
  perform queue._announce();
  perform queue._audit_jobs('set_deadline', jsonb_build_object('at', set_deadline.at), v_done, v_before);
  return query select t.id, t.outcome, t.error from queue._change_results(set_deadline.ids, v_done) t;
end $$;
comment on function queue.set_deadline(bigint[], timestamptz) is
  'Changes the deadline of jobs; NULL removes it. For running and finished ones it applies to their next'
    ' run. An earlier deadline also applies to the jobs that a job needs; a later one does not undo that.'
    ' Returns a row for each id: its state in outcome, or an error.';

-- Locks: those of _lock_for_change. Raises: 22023, QJ001, QJ003 (running or finished), QJ008.
create or replace function queue.reschedule(id bigint, at timestamptz default null)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_before jsonb;
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator}', array[reschedule.id]);
  end if;
  if not isfinite(reschedule.at) then
    perform queue._invalid('at must be finite',
      'Pass a time, or NULL for now. To put a job on hold without one, use queue.hold.');
  end if;
  perform queue._check_moment('at', reschedule.at);
  perform queue._lock_for_change(reschedule.id);
  v_before := queue._jobs_before(array[reschedule.id], 'scheduled_at');
  if (select g.situation from queue._try_lock_job(reschedule.id) g) <> 'open' then
    perform queue._invalid_state(reschedule.id, queue._state(reschedule.id),
      'Only a job that is neither running nor finished can be rescheduled; queue.retry runs a finished one'
      ' again.');
  end if;
  perform queue._change_sleep(array[reschedule.id], reschedule.at);
  perform queue._override(array[reschedule.id], p_scheduled_at => coalesce(reschedule.at, '-infinity'));
  perform queue._announce();
  perform queue._audit_jobs('reschedule', jsonb_build_object('at', reschedule.at), array[reschedule.id],
    v_before);
  return queue._state(reschedule.id);
end $$;
comment on function queue.reschedule(bigint, timestamptz) is
  'Changes the time of a job that is neither running nor finished; NULL: now. This includes jobs that'
    ' wait for a retry, or sleep. Returns its new state.';

-- Locks: as _lock_for_change; then, under the admission lock, the job's row of queue.finished by skip locked.
-- Why no run sees other args than it started with: if a fetch holds the job's row, this waits for it, and the
-- job is then running. A later fetch skips that row. Jobs without a row of queue.active_job are admitted only
-- under the admission lock. Two sessions: operate/change.claim.spec.
-- Why no wake-up is lost: it ends with _announce, like every call that may leave a job ready.
-- Raises: 22023, QJ001, QJ003 (running or succeeded), QJ008.
create or replace function queue.set_args(id bigint, args jsonb)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_before jsonb;
  v_args jsonb;
  v_situation text;
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator}', array[set_args.id]);
  end if;
  if jsonb_typeof(set_args.args) is distinct from 'object' then
    perform queue._invalid('args must be a JSON object', 'Pass the arguments by name: {"name": value}.',
      'type: ' || coalesce(jsonb_typeof(set_args.args), 'NULL'));
  end if;
  perform queue._check_size('args', set_args.args);
  perform queue._lock_for_change(set_args.id);
  v_before := queue._jobs_before(array[set_args.id], 'task', 'args');
  select g.situation into v_situation from queue._try_lock_job(set_args.id) g;
  if v_situation not in ('open', 'finished') or exists (select from queue.finished f
    where f.id = set_args.id and f.state = 'succeeded') then
    perform queue._invalid_state(set_args.id, queue._state(set_args.id),
      'Only a job that neither runs nor has succeeded can get other args, and only after the transaction'
      ' that deferred it has committed. If another transaction may be changing it, try again.');
  end if;
  v_args := queue._unmask_args(queue._hidden_paths() -> (v_before -> 0 ->> 'task'), set_args.args,
    v_before -> 0 -> 'args');
  perform queue._check_size('args', v_args);
  perform queue._override(array[set_args.id], p_args => v_args);
  perform queue._announce();
  perform queue._audit_jobs('set_args', jsonb_build_object('args', v_args), array[set_args.id], v_before);
  return queue._state(set_args.id);
end $$;
comment on function queue.set_args(bigint, jsonb) is
  'Replaces all args of a job that neither runs nor has succeeded by another object; a failed or cancelled'
    ' job uses them for its retry. Its lock and keys stay as they were filled from the old args. A role that'
    ' may not see sensitive args may pass them as they were shown, with ***: then they keep their old'
    ' values. A new *** in place of a sensitive value is refused. Returns its state.';
