-- Queueing locks: at most one job that has not started (unique_until finish: not finished) per key.

-- Takes the key for a new job and returns its id, or below zero that of the job that keeps it.
-- Locks: the key's row: inserters of one key wait for each other, as with any unique key, and for a claim
-- or a replacement of the holder. A replacement keeps the row locked until its transaction ends, so that
-- the holder, whose claim needs it (_claim_ids), is not started meanwhile.
-- Raises: QJ004.
create or replace function queue._take_queueing_lock(
  p_key text, p_on_conflict text, p_args jsonb, p_priority integer, p_scheduled_at timestamptz)
returns bigint language plpgsql volatile parallel unsafe security invoker set enable_seqscan = off as $$
#variable_conflict use_column
declare
  v_id bigint := nextval('queue.job_id_seq');
  v_holder bigint;
  v_seq bigint;
begin
  loop
    insert into queue.queueing_lock (key, job_id) values (p_key, v_id) on conflict on constraint queueing_lock_pkey do nothing;
    if found then
      return v_id;
    end if;
    if p_on_conflict = 'replace' then
      v_seq := nextval('queue.tick_seq');
      update queue.queueing_lock k set replacing = v_seq where k.key = p_key returning k.job_id into v_holder;
    else
      select k.job_id into v_holder from queue.queueing_lock k where k.key = p_key;
    end if;
    -- not found: the holder has started meanwhile, so that the key is free
    if found then
      case
        when p_on_conflict = 'ignore' then
          return -v_holder;
        when p_on_conflict = 'replace' and not exists (select from queue.live v where v.id = v_holder and v.claim is not null) then
          insert into queue.handover (job_id, kind, flags, payload)
          values (v_holder, 'replace', 0, jsonb_build_object('key', p_key, 'seq', v_seq, 'args', p_args, 'priority', p_priority, 'scheduled_at', p_scheduled_at));
          return -v_holder;
        else
          perform queue._already_queued(v_holder, p_key);
      end case;
    end if;
  end loop;
  return null;
end $$;

-- Puts a replacement's args, priority and time into the job that keeps the key. While another transaction holds the job's
-- row, an operation that waits for ADM, it is handed over again; the mark keeps the job from starting until then.
-- Locks: the caller holds ADM; the job's row of queue.live by skip locked; the key's row by skip locked: while another
-- replacement holds it, that one clears the mark. Two sessions: replace_fetch.spec.
create or replace function queue._apply_replacement(p_id bigint, p_payload jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  if exists (select from queue.finished f where f.id = p_id) or not exists (select from queue.job j where j.id = p_id) then
    return;
  end if;
  if queue._amend(p_id, p_args => p_payload -> 'args', p_priority => (p_payload ->> 'priority')::integer,
                   p_scheduled_at => coalesce((p_payload ->> 'scheduled_at')::timestamptz, '-infinity')) then
    perform queue._clear_replacing(p_payload ->> 'key', (p_payload ->> 'seq')::bigint);
  else
    insert into queue.handover (job_id, kind, flags, payload) values (p_id, 'replace', 0, p_payload);
  end if;
end $$;

-- The args that a committed replacement brings to a job, which the next admission puts into it; NULL without one.
create or replace function queue._replaced_args(p_id bigint, p_flags integer)
returns jsonb language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
begin
  if p_flags & (256 | 8192) = 0 then
    return null;
  end if;
  return (select h.payload -> 'args' from queue.handover h where h.job_id = p_id and h.kind = 'replace' order by h.seq desc limit 1);
end $$;

-- Clears the mark of a replacement, if it is still that one's.
-- Locks: the key's row by skip locked.
create or replace function queue._clear_replacing(p_key text, p_seq bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  perform from queue.queueing_lock k where k.key = p_key and k.replacing = p_seq for update skip locked;
  if found then
    update queue.queueing_lock k set replacing = null where k.key = p_key;
  end if;
end $$;

-- A replacement that was rolled back may have left the mark of the one before, which has been applied.
-- Locks: the caller holds ADM; rows of queue.queueing_lock by skip locked.
-- Why no mark of a later one is cleared: it has another number.
create or replace function queue._repair_replacing()
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  perform queue._clear_replacing(k.key, k.replacing)
  from queue.queueing_lock k
  where k.replacing is not null
    and not exists (select from queue.handover h where h.kind = 'replace' and h.payload ->> 'seq' = k.replacing::text);
end $$;

-- Of jobs those that may not start, because a defer is replacing them. The keys of the others stay locked.
-- Locks: the caller holds ADM; rows of queue.queueing_lock by skip locked.
create or replace function queue._lock_queueing_locks(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_free bigint[];
begin
  v_free := array(
    select k.job_id from unnest(p_ids) u (id)
    cross join lateral (select j.id, j.queueing_lock from queue.job j where j.id = u.id and j.queueing_lock is not null offset 0) j
    cross join lateral (select k.job_id from queue.queueing_lock k
                        where k.key = j.queueing_lock and k.job_id = j.id and k.replacing is null for update of k skip locked) k);
  return array(
    select j.id from unnest(p_ids) u (id)
    cross join lateral (select j.id, j.queueing_lock from queue.job j where j.id = u.id and j.queueing_lock is not null offset 0) j
    where j.id <> all (v_free) and (select k.job_id from queue.queueing_lock k where k.key = j.queueing_lock) = j.id);
end $$;

-- Gives the keys of jobs back. Found by key and job, so that one is deleted too that a replacement changed meanwhile.
-- Locks: rows of queue.queueing_lock.
create or replace function queue._drop_queueing_locks(p_ids bigint[], p_flag integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  delete from queue.queueing_lock k
  where k.key = any (array(select j.queueing_lock from queue.job j
                           where j.id = any (p_ids) and j.flags & p_flag <> 0 and j.queueing_lock is not null))
    and k.job_id = any (p_ids);
end $$;
