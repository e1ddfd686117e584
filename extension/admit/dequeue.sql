-- Leaving the gates: takes jobs out of the places where they wait, and ends those that no claim holds.
-- Tests: operate/change.sql, operate/delete.sql.

-- Takes an unfinished job that does not run out of the place where it waits or is ready. Its slot and ready
-- counts go with it; it stays in its lock. place: where it was (ready, or a reason of queue.waiting, turn,
-- again, or log: it is not admitted yet and stays there, so that only queue.job_override can change it). NULL
-- if it runs, is finished, another transaction holds its row, or the end of its claim is not settled yet.
-- keys: semaphores that have room now, for _advance.
-- Locks: the caller holds the admission lock; the row of queue.active_job by skip locked.
create or replace function queue._dequeue(p_id bigint, out place text, out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ready record := queue._dequeue_ready(array[p_id]);
  v_waiting record;
begin
  if v_ready.ids is not null then
    place := 'ready';
    keys := v_ready.keys;
    return;
  elsif exists (select from queue.active_job aj where aj.id = p_id)
    or exists (select from queue.finished f where f.id = p_id) then
    return;
  end if;
  delete from queue.waiting w where w.id = p_id
  returning w.reason, w.key, w.lane, w.at, w.weight, w.reserved into v_waiting;
  if found then
    if v_waiting.reason = 'slot' then
      perform queue._count_unwaiting(v_waiting.key, v_waiting.lane);
      -- If it was the first, the next one may fit where it did not, or must wait for the key's rate.
      keys := case when v_waiting.lane is not null and num_nonnulls(v_waiting.at, v_waiting.weight) > 0
        then array[v_waiting.key] end || v_waiting.reserved;
      perform queue._free_reserved(array[p_id], v_waiting.reserved);
      perform queue._never_discard(array[p_id]);
    end if;
    place := v_waiting.reason;
    return;
  end if;
  -- A job that _advance has handed over is in no gate, and holds nothing.
  delete from queue.pending_settlement h
  where h.xid = any (array(select u.xid from queue.unsettled u where u.job_id = p_id)) and h.job_id = p_id
    and h.kind = 'again' and h.flags = 0 and h.payload is null;
  if found then
    place := 'again';
    return;
  elsif exists (select from queue.unsettled h where h.job_id = p_id and h.kind in ('ended', 'again')) then
    return;
  end if;
  update queue.lock_member m set is_passed = false
  where m.id = p_id and m.lock = (select j.lock from queue.job_now j where j.id = p_id);
  place := case when found then 'turn' else 'log' end;
end $$;

-- The part of _dequeue for ready jobs. ids: those that were taken out; NULL: none.
-- Locks: as there.
create or replace function queue._dequeue_ready(p_ids bigint[], out ids bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_taken record;
begin
  with taken as (
    delete from queue.active_job aj
    where aj.id = any (array(
      select w.id from queue.active_job w
      where w.id = any (p_ids) and w.claim is null for update skip locked))
    returning aj.id, aj.lane, aj.flags, aj.deadline)
  select array_agg(t.id) as ids, array_agg(t.deadline) as places,
    array_agg(t.id) filter (where t.flags & {{ordered}} <> 0) as ordered,
    array_agg(t.id) filter (where t.flags & {{slots}} <> 0) as slotted,
    array_agg(t.lane) filter (where t.flags & {{slots}} <> 0) as slot_lanes,
    array_agg(t.flags) filter (where t.flags & {{slots}} <> 0) as slot_flags
  into v_taken from taken t;
  ids := v_taken.ids;
  perform queue._keep_tag(u.id, u.place) from unnest(ids, v_taken.places) u (id, place);
  if v_taken.ordered is not null then
    perform queue._keep_turns(v_taken.ordered);
  end if;
  if v_taken.slotted is not null then
    keys := queue._count_unready(v_taken.slotted, v_taken.slot_lanes, v_taken.slot_flags);
    perform queue._never_discard(v_taken.slotted);
  end if;
end $$;

-- _dequeue for several jobs. ids: those that were taken out, in the order of p_ids.
-- Locks: as there.
create or replace function queue._dequeue_all(p_ids bigint[], out ids bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ready record := queue._dequeue_ready(p_ids);
  v_id bigint;
  v_taken record;
begin
  ids := v_ready.ids;
  keys := v_ready.keys;
  foreach v_id in array array(
    select u.id from unnest(p_ids) u (id) where u.id not in (select unnest(v_ready.ids)))
  loop
    v_taken := queue._dequeue(v_id);
    if v_taken.place is not null then
      ids := ids || v_id;
      keys := keys || v_taken.keys;
    end if;
  end loop;
  select array_agg(u.id order by u.n) into ids from unnest(p_ids) with ordinality u (id, n)
  where not u.id not in (select unnest(_dequeue_all.ids));
end $$;

-- Whether no transaction is replacing a job now. If so, none can before this transaction ends.
-- Locks: the caller holds the admission lock; the row of its queueing lock by skip locked.
create or replace function queue._try_lock_queueing_lock(p_id bigint)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
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

-- The transaction that must end before a row of queue.active_job can be read. It is the one that has locked
-- the row, according to xmax, if that is in progress; else this one. Used as the xid of a pending settlement,
-- it lets the first admission after that end read the settlement, and none before. xmax may also be the
-- number of a savepoint, or of a multixact, if the row was locked before a savepoint and deleted in it.
-- Neither is a transaction's number, so every admission reads the settlement. Multixacts are numbered
-- separately, so a number may be both a multixact and a transaction. To wait for that transaction could be
-- wrong, so it is not waited for while any member of the multixact is in progress.
create or replace function queue._row_locker(p_xmax xid)
returns xid8 language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_own constant xid8 := pg_current_xact_id();
  v_snapshot constant pg_snapshot := pg_current_snapshot();
  v_until constant xid8 := (select x from pg_snapshot_xip(v_snapshot) x where x::xid = p_xmax);
begin
  if v_until is null then
    return v_own;
  elsif mxid_age(p_xmax) between 1 and (select mxid_age(d.datminmxid) from pg_database d
    where d.datname = current_database()) then
    if exists (
      select from pg_get_multixact_members(p_xmax) m
      -- A member has only the low 32 bits of its number.
      where pg_xact_status((v_own::text::bigint + age(v_own::xid) - age(m.xid))::text::xid8) = 'in progress')
    then
      return v_own;
    end if;
  end if;
  return v_until;
end $$;

-- Puts jobs that were taken out into their final state. The caller passes them to _advance as p_ended, so
-- that their locks and dependents learn of it.
-- Locks: the caller holds the admission lock and the jobs' rows of queue.queueing_lock.
create or replace function queue._finish_unclaimed(p_ids bigint[], p_state text, p_reason text, p_error text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_jobs record;
  v_now timestamptz := clock_timestamp();
begin
  insert into queue.finished (id, finished_at, attempts, state, reason, error)
  select u.id, v_now, j.attempts, p_state, p_reason, p_error
  from unnest(p_ids) u (id)
  cross join lateral (select j.attempts from queue.job_now j where j.id = u.id offset 0) j;
  select array_agg(j.id) as ids, array_agg(j.flags) as flags into v_jobs
  from (
    select j.id, (j.flags | case when c.retain is not null then {{retain}} else 0 end)::smallint as flags
    from unnest(p_ids) u (id)
    cross join lateral (
      select j.id, j.flags, j.queue from queue.job_now j where j.id = u.id offset 0) j
    left join lateral (select c.retain from queue.queue_config c
      where c.queue = j.queue offset 0) c on true) j;
  delete from queue.suspended w where w.job_id = any (p_ids);
  perform queue._return_tags(p_ids);
  perform queue._clean_up(v_jobs.ids, v_jobs.flags);
  perform queue._notify_waiters(p_ids);
end $$;

-- Cleans up after jobs that have finished: leases, aborts, queueing locks, retention.
-- Locks: rows of queue.abort by skip locked; the jobs' rows of queue.queueing_lock. The caller holds the
-- latter, unless the jobs ran. Then only a call that is about to be refused may hold one, because no job
-- starts that is being replaced.
create or replace function queue._clean_up(p_ids bigint[], p_flags smallint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_all smallint;
begin
  select bit_or(f) into v_all from unnest(p_flags) f;
  if v_all & {{lease}} <> 0 then
    delete from queue.lease l where l.id = any (p_ids);
  end if;
  if v_all & {{aborting}} <> 0 then
    -- heartbeat deletes a row that it has locked.
    delete from queue.abort a
    where a.ctid = any (array(select a.ctid from queue.abort a
      where a.id = any (p_ids) for update skip locked));
  end if;
  if v_all & {{queueing_lock}} <> 0 then
    perform queue._drop_queueing_locks(p_ids, {{queueing_lock}});
  end if;
  if v_all & {{expires}} <> 0 then
    delete from queue.expiry e where e.id = any (p_ids);
  end if;
  if v_all & {{retain}} <> 0 then
    update queue.finished f set purge_at = f.finished_at + queue._retention(f.id) where f.id = any (p_ids);
  end if;
end $$;
