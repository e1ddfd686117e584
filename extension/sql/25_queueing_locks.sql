-- Queueing locks: at most one job that has not started (unique_until finish: not finished) per key.

-- Takes the key for a new job and returns its id, or below zero that of the job that keeps it.
-- Locks: the key's row: inserters of one key wait for each other, as with any unique key, and for a claim
-- or a replacement of the holder. A replacement keeps the row locked until its transaction ends, so that
-- the holder, whose claim needs it (_claim_limited), is not started meanwhile.
-- Raises: QJ004.
create or replace function queue._take_queueing_lock(p_key text, p_on_conflict text, p_args jsonb, p_priority integer, p_scheduled_at timestamptz)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
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
      if found and (exists (select from queue.live v where v.id = v_holder and v.claim is not null)
                    or exists (select from queue.job_state s where s.id = v_holder and s.claims > 0)) then
        p_on_conflict := 'raise';
      elsif found then
        insert into queue.handover (job_id, kind, flags, payload)
        values (v_holder, 'replace', 0, jsonb_build_object('key', p_key, 'seq', v_seq, 'args', p_args, 'priority', p_priority, 'scheduled_at', p_scheduled_at));
        return -v_holder;
      end if;
    else
      select k.job_id into v_holder from queue.queueing_lock k where k.key = p_key;
      if found and p_on_conflict = 'ignore' then
        return -v_holder;
      end if;
    end if;
    if v_holder is not null and p_on_conflict = 'raise' then
      raise exception using errcode = 'QJ004', message = 'already queued', detail = format('id: %s, queueing_lock: %s', v_holder, p_key),
        hint = 'Another job with this queueing_lock waits. Pass options {"on_conflict": "ignore"} or "replace", or carry on without it.';
    end if;
    v_holder := null;  -- the holder has started meanwhile: try again
  end loop;
  return null;
end $$;

-- Puts a replacement's args, priority and time into the job that keeps the key.
-- Locks: the caller holds ADM; the key's row by skip locked: while another replacement holds it, that one
-- clears the mark.
create or replace function queue._apply_replacement(p_id bigint, p_payload jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_at timestamptz := (p_payload ->> 'scheduled_at')::timestamptz;
begin
  perform queue._change(p_id, p_args => p_payload -> 'args', p_priority => (p_payload ->> 'priority')::integer,
                        p_scheduled_at => coalesce(v_at, '-infinity'));
  update queue.queueing_lock k set replacing = null
  where k.key = any (array(select q.key from queue.queueing_lock q
                           where q.key = p_payload ->> 'key' and q.replacing = (p_payload ->> 'seq')::bigint for update skip locked));
end $$;
