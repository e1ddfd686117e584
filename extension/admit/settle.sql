-- Settling: releases what ended claims held and passes it on, under the admission lock.
-- Tests: admit/admission.sql.

-- Fails a job whose yield would close a cycle, and removes the step of its wait, because it has waited for
-- nobody.
-- Locks: the caller holds the admission lock; the row of the job's queueing lock by skip locked. If a defer
-- that replaces the job holds this row, the yield stays for the next admission.
create or replace function queue._fail_for_cycle(p_id bigint, p_flags smallint, p_payload jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if not queue._try_lock_queueing_lock(p_id) then
    insert into queue.pending_settlement (job_id, kind, flags, payload)
    values (p_id, 'again', p_flags & ~{{counted}}, p_payload);
    return;
  end if;
  -- A wait is the last step of its claim.
  delete from queue.step s
  where s.ctid = (select o.ctid from queue.step o
    where o.job_id = p_id and o.claim = (p_payload ->> 'awaits')::bigint
    order by o.finished_at desc nulls last limit 1);
  perform queue._finish_unclaimed(array[p_id], 'failed', 'dependency_cycle',
    'the needs of two jobs form a cycle');
  perform queue._advance(p_ended => array[p_id]);
end $$;

-- Frees the slots of ended claims. Sends those jobs that run again through the gates, together with jobs that
-- are in no gate for another reason (flags 0: they did not run, and have no turn to keep). Then gives the
-- slots to the first jobs that wait for them. Only after that may anything take jobs out of their places:
-- before it, a job that runs again is in no gate, and only looks as if it waited for its turn.
-- Locks: the caller holds the admission lock.
create or replace function queue._settle_slots(p_ids bigint[], p_kinds text[], p_flags smallint[],
  p_payloads jsonb[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ended record;
  v_keys text[];
  v_item record;
  v_cyclic bigint[];
begin
  if p_kinds <@ '{signal}' then
    return;
  end if;
  select array_agg(u.id) filter (where u.kind = 'again') as again,
    array_agg(u.id) filter (where u.kind = 'again' and u.flags & {{lock}} <> 0) as locked,
    array_agg(u.id) filter (where u.kind in ('ended', 'again') and u.flags & {{counted}} <> 0) as ids,
    array_agg(u.flags) filter (where u.kind in ('ended', 'again') and u.flags & {{counted}} <> 0) as flags,
    bool_or(u.kind = 'again' or u.payload is not null) as has_more
  into v_ended
  from unnest(p_ids, p_kinds, p_flags, p_payloads) u (id, kind, flags, payload);
  if v_ended.ids is not null
    and (v_ended.has_more or not (queue._pass_slots_on(
      queue._only_key(v_ended.ids, v_ended.flags), cardinality(v_ended.ids))).is_done) then
    v_keys := queue._release_slots(v_ended.ids, v_ended.flags);
  end if;
  for v_item in
    select u.id, u.kind, u.payload from unnest(p_ids, p_kinds, p_payloads) u (id, kind, payload)
    where p_payloads is not null and u.payload is not null
  loop
    if v_item.kind = 'refill' then
      v_keys := v_keys || array(select k from jsonb_array_elements_text(v_item.payload) k);
    elsif v_item.payload ? 'change' then
      perform queue._change_on_retry(array[v_item.id], v_item.payload -> 'change');
    elsif v_item.kind = 'again' and not queue._add_yield_needs(v_item.id, v_item.payload) then
      v_cyclic := v_cyclic || v_item.id;
    end if;
  end loop;
  if v_ended.locked is not null then
    perform queue._keep_turns(v_ended.locked);
  end if;
  if v_ended.again is not null then
    perform queue._advance(p_arrived => v_ended.again,
      p_locks => case when v_ended.locked is not null then queue._locks_of(v_ended.locked) end);
  end if;
  for v_item in
    select u.id, u.kind, u.flags, u.payload
    from unnest(p_ids, p_kinds, p_flags, p_payloads) with ordinality u (id, kind, flags, payload, n)
    left join lateral (
      select k.replacing from queue.queueing_lock k
      where u.kind = 'replace' and k.key = u.payload ->> 'key' and k.job_id = u.id offset 0) k on true
    where p_payloads is not null and u.payload is not null
      -- Only the last replacement of a job counts: the one that the key names.
      and (k.replacing = (u.payload ->> 'seq')::bigint
        or u.kind = 'again' and (u.payload -> 'change' ? 'lock' or u.id = any (v_cyclic)))
    order by u.n
  loop
    if v_item.kind = 'replace' then
      perform queue._apply_replacement(v_item.id, v_item.payload);
    elsif v_item.id = any (v_cyclic) then
      v_keys := v_keys || (select t.keys from queue._dequeue(v_item.id) t);
      perform queue._fail_for_cycle(v_item.id, v_item.flags, v_item.payload);
    else
      perform queue._change_lock(v_item.id, v_item.payload #>> '{change,lock}');
    end if;
  end loop;
  if v_keys is not null then
    perform queue._advance(p_keys => v_keys);
  end if;
end $$;

-- Passes on what ended claims release, except their slots: turns and dependents. Delivers signals and events.
-- Locks: the caller holds the admission lock.
create or replace function queue._settle(p_ids bigint[], p_kinds text[], p_flags smallint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ended record;
  v_gated bigint[];  -- jobs with a signal that have to pass the gates
begin
  if cardinality(p_ids) > 500 and 'signal' = any (p_kinds) then
    select k.ids, k.kinds, k.flags into p_ids, p_kinds, p_flags
    from queue._hand_signals_over(p_ids, p_kinds, p_flags) k;
  end if;
  if p_kinds <@ '{signal}' then
    v_gated := queue._resume_signalled(p_ids);
    if v_gated is not null then
      perform queue._advance(p_arrived => queue._take_signals(v_gated, null));
    end if;
    return;
  end if;
  select array_agg(u.id) filter (where u.kind = 'ended' and u.flags & {{lock}} <> 0) as locked,
    array_agg(u.id) filter (where u.kind = 'ended' and u.flags & {{needed}} <> 0) as needed,
    array_agg(distinct u.id) filter (where u.kind = 'recheck') as recheck,
    array_agg(distinct u.id) filter (where u.kind = 'readmit') as readmit,
    array_agg(distinct u.id) filter (where u.kind = 'signal') as signalled,
    array_agg(distinct -u.id) filter (where u.kind = 'event') as events,
    array_agg(distinct -u.id) filter (where u.kind = 'group') as groups
  into v_ended
  from unnest(p_ids, p_kinds, p_flags) u (id, kind, flags);
  if v_ended.needed is not null
    or v_ended.locked is not null and not queue._pass_turns_on(v_ended.locked) then
    perform queue._advance(
      p_turned => case when v_ended.locked is not null then queue._leave_locks(v_ended.locked, true) end,
        p_changed => v_ended.needed);
  end if;
  if v_ended.recheck is not null then
    perform queue._mark_needed(v_ended.recheck);
    perform queue._advance(p_changed => v_ended.recheck);
    perform queue._propagate_deadline(queue._dependents(v_ended.recheck));
  end if;
  if v_ended.readmit is not null then
    perform queue._readmit(v_ended.readmit);
  end if;
  if v_ended.signalled is not null or v_ended.events is not null then
    perform queue._advance(p_arrived => queue._take_signals(v_ended.signalled, v_ended.events));
  end if;
  if v_ended.groups is not null then
    perform queue._settle_groups(v_ended.groups);
  end if;
end $$;

-- Leaves an eighth of the signals among the settlements, but at least 500, and hands the others over to
-- later admissions, so that nobody waits long for the admission lock. If it left a fixed number, the last
-- of n times that number of signals would be handed over n times. Returns what is left, in its order.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: the signals are appended again, and
-- their jobs wait at their gate until then.
create or replace function queue._hand_signals_over(p_ids bigint[], p_kinds text[], p_flags smallint[],
  out ids bigint[], out kinds text[], out flags smallint[])
language plpgsql volatile parallel unsafe security invoker as $$
begin
  with seen as materialized (
    select u.id, u.kind, u.flags, u.n, u.kind = 'signal'
      and row_number() over (partition by u.kind = 'signal' order by u.n)
        > greatest(500, count(*) over (partition by u.kind = 'signal') / 8) as is_later
    from unnest(p_ids, p_kinds, p_flags) with ordinality u (id, kind, flags, n)),
  later as (
    insert into queue.pending_settlement (job_id, kind, flags)
    select s.id, 'signal', 0 from seen s where s.is_later order by s.n)
  select array_agg(s.id order by s.n), array_agg(s.kind order by s.n), array_agg(s.flags order by s.n)
  into ids, kinds, flags from seen s where not s.is_later;
end $$;

-- Sends ready jobs through the gates again; jobs whose rows another transaction holds follow once that ends.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
-- Why no job is forgotten: a row that is not taken out is handed over again, each time, until it is free,
-- claimed or gone.
-- Two sessions: operate/pause.fetch.spec, operate/pause.late.spec.
create or replace function queue._readmit(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_taken record;
begin
  v_taken := queue._dequeue_all(array(select aj.id from queue.active_job aj
    where aj.id = any (p_ids) and aj.claim is null));
  insert into queue.pending_settlement (xid, job_id, kind, flags)
  select queue._row_locker(aj.xmax), aj.id, 'readmit', 0 from queue.active_job aj
  where aj.id = any (p_ids) and aj.claim is null;
  -- Jobs that have left queue.active_job since may also keep the turn from an older job.
  perform queue._advance(p_arrived => v_taken.ids, p_keys => v_taken.keys, p_locks => queue._locks_of(p_ids));
end $$;

-- Reads new pending settlements by the same snapshots as the log.
-- Locks: the caller holds the admission lock.
create or replace function queue._take_settlements(
  p_xmax xid8, p_ended xid8[], p_upto pg_snapshot, p_own xid8, out ids bigint[],
  out kinds text[], out flags smallint[], out payloads jsonb[])
language plpgsql volatile parallel unsafe security invoker as $$
begin
  with gone as (
    delete from queue.pending_settlement h
    where h.ctid = any (array(
      select h.ctid from unnest(p_ended) e (x)
      cross join lateral (select h.ctid from queue.pending_settlement h where h.xid = e.x offset 0) h
      union all
      select h.ctid from queue.pending_settlement h
      where h.xid >= p_xmax and h.xid < pg_snapshot_xmax(p_upto) and pg_visible_in_snapshot(h.xid, p_upto)
        and h.xid is distinct from p_own))
    returning h.job_id, h.kind, h.flags, h.payload, h.seq)
  select array_agg(g.job_id order by g.seq), array_agg(g.kind order by g.seq),
    array_agg(g.flags order by g.seq), array_agg(g.payload order by g.seq)
  into ids, kinds, flags, payloads from gone g;
end $$;

-- Committed pending settlements that the cursor has passed, so that no admission would ever read them. Only a
-- bug or an incomplete restore can leave any. Those that are in flight, or have ended since the cursor moved,
-- do not count (admit/admission.sql).
create or replace function queue._orphaned_settlements()
returns table (xid xid8, seq bigint, job_id bigint, kind text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select h.xid, h.seq, h.job_id, h.kind
    from queue.cursor_now k
    join queue.pending_settlement h on h.xid < k.next_xid and h.xid <> all (k.in_flight);
end $$;

-- Hands orphaned settlements to the next admission, except those that were shelved. It runs rarely, because
-- it reads all settlements, with the dead rows that an open transaction keeps.
-- Locks: the caller holds the admission lock, so that neither the cursor nor the settlements move meanwhile.
create or replace function queue._repair_settlements()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.pending_settlement h set xid = pg_current_xact_id()
  where (h.xid, h.seq) in (select o.xid, o.seq from queue._orphaned_settlements() o
    where o.xid <> {{shelved}});
end $$;
