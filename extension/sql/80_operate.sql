-- Operating on jobs that may be anywhere.
--
-- Lock order: the job's row in queue.live first (waiting for whoever ends or claims it), and its queueing
-- lock's (waiting for whoever replaces it), then ADM, then the rest. Once ADM is held the job can only move
-- by a claim, which skips the locked row. Under ADM nothing is waited for that another transaction could
-- hold long: not these rows, nor queue.job_state of a job that is being finished.

-- Takes an unfinished, not running job out of wherever it is, with its slot and ready counts, but not out
-- of its lock. place: where it was (live, or a reason of queue.waiting, turn, again, or log: it has yet to be
-- admitted and stays there, so that it can only be written about, in queue.job_state), NULL when it runs, is finished,
-- another holds its row, or the end of its claim is not settled yet. keys: semaphores in which that left room, for _advance.
-- Locks: the caller holds ADM; the row of queue.live by skip locked.
create or replace function queue._take_out(p_id bigint, out place text, out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_live record;
  v_waiting record;
begin
  delete from queue.live v
  where v.id = (select w.id from queue.live w where w.id = p_id and w.claim is null for update skip locked)
  returning v.id, v.lane, v.flags into v_live;
  if found then
    if v_live.flags & 1 <> 0 then
      perform queue._keep_turns(array[p_id]);
    end if;
    if v_live.flags & 6 <> 0 then
      keys := queue._unready(array[p_id], array[v_live.lane], array[v_live.flags]);
      perform queue._never_discard(array[p_id]);
    end if;
    place := 'live';
    return;
  elsif exists (select from queue.live v where v.id = p_id) or exists (select from queue.finished f where f.id = p_id) then
    return;
  end if;
  delete from queue.waiting w where w.id = p_id returning w.reason, w.key, w.lane into v_waiting;
  if found then
    if v_waiting.reason = 'slot' then
      perform queue._unwait(v_waiting.key, v_waiting.lane);
      perform queue._never_discard(array[p_id]);
    end if;
    place := v_waiting.reason;
    return;
  end if;
  -- one that _advance has handed over is in no gate, and holds nothing
  delete from queue.handover h where h.job_id = p_id and h.kind = 'again' and h.flags = 0 and h.payload is null;
  if found then
    place := 'again';
    return;
  elsif exists (select from queue.handover h where h.job_id = p_id and h.kind in ('ended', 'again')) then
    return;
  end if;
  if exists (select from queue.job j left join queue.job_state s on s.id = j.id
             join queue.lock_member m on m.lock = coalesce(s.lock, j.lock) and m.id = j.id where j.id = p_id) then
    update queue.lock_member m set is_passed = false where m.id = p_id
      and m.lock = (select coalesce(s.lock, j.lock) from queue.job j left join queue.job_state s on s.id = j.id where j.id = p_id);
    place := 'turn';
    return;
  end if;
  place := 'log';
end $$;

-- _take_out for several. ids: those that were taken out.
-- Locks: as there.
create or replace function queue._take_out_all(p_ids bigint[], out ids bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_id bigint;
  v_taken record;
begin
  foreach v_id in array p_ids loop
    v_taken := queue._take_out(v_id);
    if v_taken.place is not null then
      ids := ids || v_id;
      keys := keys || v_taken.keys;
    end if;
  end loop;
end $$;

-- Puts jobs that were taken out into their final state. Their locks and dependents do not know yet: that is up to _advance,
-- by p_ended.
-- Locks: the caller holds ADM.
create or replace function queue._finish_unclaimed(p_ids bigint[], p_state text, p_reason text, p_error text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
  v_now timestamptz := clock_timestamp();
begin
  insert into queue.finished (id, finished_at, attempts, state, reason, error)
  select u.id, v_now, coalesce(s.attempts, 0), p_state, p_reason, p_error
  from unnest(p_ids) u (id)
  left join lateral (select s.attempts from queue.job_state s where s.id = u.id offset 0) s on true;
  select array_agg(j.id) as ids, array_agg(j.flags) as flags into v
  from (
    select j.id, (j.flags | case when c.retain is not null then 512 else 0 end)::smallint as flags
    from unnest(p_ids) u (id)
    cross join lateral (
      select j.id, j.flags | coalesce(s.extra_flags, 0) as flags, coalesce(s.queue, j.queue) as queue
      from queue.job j left join queue.job_state s on s.id = j.id where j.id = u.id offset 0) j
    left join lateral (select c.retain from queue.queue_config c where c.queue = j.queue offset 0) c on true) j;
  perform queue._close(v.ids, v.flags);
  perform queue._tell_waiters(p_ids);
end $$;

-- Whether nobody is replacing a job just now; if so, nobody can before this transaction ends.
-- Locks: the caller holds ADM; the row of its queueing lock by skip locked.
create or replace function queue._is_settled(p_id bigint)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_key text;
begin
  select j.queueing_lock into v_key from queue.job j where j.id = p_id;
  if v_key is null then
    return true;
  end if;
  perform from queue.queueing_lock k where k.key = v_key and k.job_id = p_id for update skip locked;
  return found or not exists (select from queue.queueing_lock k where k.key = v_key and k.job_id = p_id);
end $$;

-- Admits whatever is visible, so that an operator finds every job behind the gates.
-- Locks: ADM, waited for.
create or replace function queue._admit_all()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_admit record;
begin
  perform queue._lock_admission(true);
  loop
    select a.* into v_admit from queue._admit(1000) a;
    exit when not v_admit.has_more;
  end loop;
  perform queue._advance_own();
end $$;

-- Locks: the job's row of queue.live, waited for; ADM, waited for.
-- Raises: QJ001, QJ003 (finished, or running without abort), QJ008.
create or replace function queue.cancel(id bigint, abort boolean default false)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_live record;
  v_taken record;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', array[cancel.id]);
  end if;
  perform queue._reach(cancel.id);
  -- one that was claimed while this waited for ADM may be about to end in a transaction that holds its row
  select v.claim, v.worker_id into v_live from queue.live v where v.id = cancel.id for update skip locked;
  if v_live.claim is not null then
    if cancel.abort is not true then
      perform queue._invalid_state(cancel.id, 'running', 'Call queue.cancel(id, abort => true) to have its worker stop it.');
    end if;
    update queue.live v set flags = v.flags | 32 where v.id = cancel.id;
    perform queue._tell_abort(cancel.id, v_live.claim, v_live.worker_id, 'cancelled');
    return 'running';
  end if;
  v_taken := queue._take_out(cancel.id);
  if coalesce(v_taken.place, 'log') = 'log' then
    perform queue._invalid_state(cancel.id, queue._state(cancel.id), 'Only a job that is not finished, and whose defer has committed, can be cancelled.');
  end if;
  perform queue._finish_unclaimed(array[cancel.id], 'cancelled', 'cancelled', null);
  perform queue._advance(p_ended => array[cancel.id], p_keys => v_taken.keys);
  perform queue._announce();
  return 'cancelled';
end $$;
comment on function queue.cancel(bigint, boolean) is
  'Cancels a job that has not started: returns cancelled. A running one with abort: its worker is told, returns running.';

-- Tells a worker to abort a claim: by its channel, and by heartbeat.
create or replace function queue._tell_abort(p_id bigint, p_claim bigint, p_worker bigint, p_reason text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  insert into queue.abort (id, claim, worker_id, reason) values (p_id, p_claim, p_worker, p_reason)
  on conflict on constraint abort_pkey do nothing;
  if current_setting('pgdefer.notify', true) is distinct from 'off' then
    perform pg_notify('pgdefer_worker_' || p_worker, '');
  end if;
end $$;

-- Writes what is given over what the job was deferred with, and sends the job through the gates again.
-- Running and finished jobs keep their place; the change counts from their next run. False, with nothing done: another
-- transaction holds the job's row.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._amend(
  p_id bigint, p_queue text default null, p_priority integer default null, p_deadline timestamptz default null,
  p_scheduled_at timestamptz default null, p_args jsonb default null)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_taken record := queue._take_out(p_id);
begin
  if v_taken.place is null then
    -- while its claim is being ended its row of queue.job_state may not be waited for
    perform from queue.live v where v.id = p_id for update skip locked;
    if not found and exists (select from queue.live v where v.id = p_id) then
      return false;
    end if;
  end if;
  insert into queue.job_state as s (id, queue, priority, deadline, scheduled_at, args, size, extra_flags)
  select p_id, p_queue, p_priority, p_deadline, p_scheduled_at, p_args, x.size, case when x.size > 2000 then -32768 else 0 end
  from (
    select octet_length(p_args::text)
        + coalesce(octet_length((select j.options -> 'headers' from queue.job j where j.id = p_id)::text), 0) as size) x
  on conflict on constraint job_state_pkey do update
    set (queue, priority, deadline, scheduled_at, args, size, extra_flags)
      = (coalesce(excluded.queue, s.queue), coalesce(excluded.priority, s.priority), coalesce(excluded.deadline, s.deadline),
         coalesce(excluded.scheduled_at, s.scheduled_at), coalesce(excluded.args, s.args), coalesce(excluded.size, s.size),
         s.extra_flags | excluded.extra_flags);
  if v_taken.place in ('held', 'parked') then
    insert into queue.waiting (id, reason) values (p_id, v_taken.place);
  elsif v_taken.place <> 'log' then
    perform queue._advance(p_arrived => array[p_id], p_keys => v_taken.keys);
  end if;
  return true;
end $$;

-- Locks: the job's row of queue.live, waited for; ADM, waited for.
-- Raises: QJ001, QJ003 (running or finished), QJ008.
create or replace function queue.hold(id bigint)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_taken record;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', array[hold.id]);
  end if;
  perform queue._reach(hold.id);
  v_taken := queue._take_out(hold.id);
  if coalesce(v_taken.place, 'log') = 'log' then
    perform queue._invalid_state(hold.id, queue._state(hold.id), 'Only a job that has not started can be held, and not before the transaction that deferred it has committed; cancel a running one with abort.');
  end if;
  insert into queue.waiting (id, reason) values (hold.id, 'held');
  perform queue._advance(p_keys => v_taken.keys, p_changed => array[hold.id]);
  return 'held';
end $$;
comment on function queue.hold(bigint) is
  'Puts a job that is not running aside until queue.unhold. It keeps its place at its lock. Returns held.';

-- Locks and errors: as hold; QJ003 when the job is not held.
create or replace function queue.unhold(id bigint)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', array[unhold.id]);
  end if;
  perform queue._reach(unhold.id);
  delete from queue.waiting w where w.id = unhold.id and w.reason = 'held';
  if not found then
    perform queue._invalid_state(unhold.id, queue._state(unhold.id), 'Only a held job can be unheld.');
  end if;
  perform queue._advance(p_arrived => array[unhold.id], p_changed => array[unhold.id]);
  perform queue._announce();
  return queue._state(unhold.id);
end $$;
comment on function queue.unhold(bigint) is 'Lets a held job go on. Returns its new state.';

-- Readies a call that changes one job: checks that it exists and takes the locks in their order.
-- Locks, each waited for: the job's row of queue.live, that of its queueing lock, ADM. Raises: QJ001, QJ008.
create or replace function queue._reach(p_id bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  perform queue._check_isolation();
  if p_id is null or not exists (select from queue.job j where j.id = p_id) then
    perform queue._job_not_found(p_id);
  end if;
  perform from queue.live v where v.id = p_id for update;
  perform from queue.queueing_lock k
  where k.job_id = p_id and k.key = (select j.queueing_lock from queue.job j where j.id = p_id) for update;
  perform queue._admit_all();
end $$;

-- A job's state as queue.jobs shows it.
create or replace function queue._state(p_id bigint)
returns text language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_state text;
begin
  select j.state into v_state from queue.jobs j where j.id = p_id;
  return v_state;
end $$;

-- Tells workers that something may have become ready, if any may sleep.
create or replace function queue._announce()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if not pg_try_advisory_xact_lock_shared(1885824102, 1) then
    perform queue._wake();
  end if;
end $$;
