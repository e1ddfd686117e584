-- Queueing locks: at most one job that has not started (unique_until finish: not finished) per key.

-- Takes the key for a new job and returns that job's id (p_id, if it has one already). If another job keeps
-- the key, it returns minus that job's id. The time of a replacement is at most p_max_wait after that job was
-- deferred.
-- Locks: the key's row. Inserters of one key wait for each other, as with any unique key, and for a claim or
-- a replacement of the holder. A replacement keeps the row locked until its transaction ends. The claim of
-- the holder needs that row (_claim_ids), so the holder does not start meanwhile.
-- Raises: QJ004.
create or replace function queue._take_queueing_lock(
  p_key text, p_on_conflict text, p_args jsonb, p_priority integer, p_scheduled_at timestamptz,
  p_max_wait interval, p_id bigint)
returns bigint language plpgsql volatile parallel unsafe security invoker set enable_seqscan = off as $$
declare
  v_id bigint := coalesce(p_id, nextval('queue.job_id_seq'));
  v_holder bigint;
  v_seq bigint;
begin
  loop
    insert into queue.queueing_lock (key, job_id) values (p_key, v_id)
    on conflict on constraint queueing_lock_pkey do nothing;
    if found then
      return v_id;
    end if;
    if p_on_conflict = 'replace' then
      v_seq := nextval('queue.tick_seq');
      update queue.queueing_lock k set replacing = v_seq where k.key = p_key returning k.job_id into v_holder;
    else
      select k.job_id into v_holder from queue.queueing_lock k where k.key = p_key;
    end if;
    -- If not found, the holder has started meanwhile, so the key is free.
    if found then
      case
        when p_on_conflict = 'ignore' then
          return -v_holder;
        when p_on_conflict = 'replace' and not exists (select from queue.active_job aj
          where aj.id = v_holder and aj.claim is not null) then
          insert into queue.pending_settlement (job_id, kind, flags, payload)
          values (v_holder, 'replace', 0,
            jsonb_build_object('key', p_key, 'seq', v_seq, 'args', p_args, 'priority', p_priority,
            'scheduled_at', least(p_scheduled_at, (select j.created_at + p_max_wait from queue.job j
              where j.id = v_holder and p_scheduled_at is not null))));
          return -v_holder;
        else
          perform queue._already_queued(v_holder, p_key, case p_on_conflict
            when 'replace' then 'The job with this queueing_lock runs, and "replace" changes only one that'
              ' waits. Pass options {"on_conflict": "ignore"}, or call again when it has ended.'
            else 'Another job has this queueing_lock. Pass options {"on_conflict": "ignore"}, or "replace" to'
              ' change it while it waits, or continue without it.' end);
      end case;
    end if;
  end loop;
  return null;
end $$;

-- The last committed replacement of a job, which the next admission applies: an object with args, priority
-- and scheduled_at, as in _take_queueing_lock. NULL without one.
create or replace function queue._replacement(p_id bigint, p_flags integer)
returns jsonb language plpgsql stable parallel safe security invoker as $$
begin
  if p_flags & {{queueing_lock}} = 0 then
    return null;
  end if;
  return (select h.payload
    from queue.unsettled h
    join queue.queueing_lock k on k.key = h.payload ->> 'key' and k.replacing = (h.payload ->> 'seq')::bigint
    where h.job_id = p_id and h.kind = 'replace'
      and not exists (select from queue.finished f where f.id = p_id));
end $$;

-- Clears the mark of a replacement, unless a later one has put its own mark there.
-- Locks: the key's row by skip locked.
create or replace function queue._clear_replacing(p_key text, p_seq bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform from queue.queueing_lock k where k.key = p_key and k.replacing = p_seq for update skip locked;
  if found then
    update queue.queueing_lock k set replacing = null where k.key = p_key;
  end if;
end $$;

-- Clears marks of replacements that were applied: one that rolls back may leave the mark of an earlier one.
-- Locks: the caller holds the admission lock; rows of queue.queueing_lock by skip locked.
-- Why it clears no mark that counts: a later replacement has another number, and an orphaned settlement,
-- which _repair_settlements finds later, is still a row of queue.pending_settlement. All rows of that table,
-- with the dead ones, are read only if there is such a mark.
create or replace function queue._repair_replacing()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._clear_replacing(l.key, l.replacing)
  from (
    select k.key, k.replacing from queue.queueing_lock k
    where k.replacing is not null and not exists (
      select from queue.unsettled h where h.kind = 'replace' and h.payload ->> 'seq' = k.replacing::text)
    offset 0) l
  where not exists (select from queue.pending_settlement h
    where h.kind = 'replace' and h.payload ->> 'seq' = l.replacing::text);
end $$;

-- Returns the jobs that a pending replacement keeps from starting. Locks the keys of the others.
-- Locks: the caller holds the admission lock; rows of queue.queueing_lock by skip locked.
create or replace function queue._try_lock_queueing_locks(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_free bigint[];
begin
  v_free := array(
    select k.job_id from unnest(p_ids) u (id)
    cross join lateral (
      select j.id, j.queueing_lock
      from queue.job j
      where j.id = u.id and j.queueing_lock is not null offset 0) j
    cross join lateral (select k.job_id from queue.queueing_lock k
                        where k.key = j.queueing_lock and k.job_id = j.id
                          and k.replacing is null for update of k skip locked) k);
  return array(
    select j.id from unnest(p_ids) u (id)
    cross join lateral (
      select j.id, j.queueing_lock
      from queue.job j
      where j.id = u.id and j.queueing_lock is not null offset 0) j
    where j.id <> all (v_free) and (select k.job_id from queue.queueing_lock k
      where k.key = j.queueing_lock) = j.id);
end $$;

-- Releases the keys of those jobs that have p_flag. It looks for key and job together, because the key may be
-- held by another of these jobs, one without p_flag.
-- Locks: rows of queue.queueing_lock.
create or replace function queue._drop_queueing_locks(p_ids bigint[], p_flag integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids constant bigint[] := array(
    select j.id from queue.job j
    where j.id = any (p_ids) and j.flags & p_flag <> 0 and j.queueing_lock is not null);
begin
  delete from queue.queueing_lock k
  where k.key = any (array(select j.queueing_lock from queue.job j where j.id = any (v_ids)))
    and k.job_id = any (v_ids);
end $$;

-- Writes new versions of the keys of jobs that are being claimed. So a replacement in REPEATABLE READ raises
-- 40001 if its snapshot is older than the claim. Otherwise it would take the job for unclaimed, and would
-- never be applied.
-- Locks: rows of queue.queueing_lock, which _try_lock_queueing_locks has locked: none of them is being
-- replaced.
-- Two sessions: defer/queueing_locks.repeatable.spec.
create or replace function queue._renew_queueing_locks(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.queueing_lock k set replacing = null
  where k.key = any (array(select j.queueing_lock from queue.job j
                           where j.id = any (p_ids) and j.queueing_lock is not null))
    and k.job_id = any (p_ids);
end $$;
