-- Ends claims that have succeeded, and settles claims that have ended in any way (admit/settle.sql): at once
-- if the admission lock is free, else by the next admission, which reads queue.pending_settlement.
-- Tests: work/finish.sql, work/ends.sql, admit/locks.late_defer.spec.

-- Settles ended claims at once if p_settle is true and the admission lock is free. Otherwise, or if a fault
-- stops that, it appends pending settlements: the outcomes stand, and maintenance finds the job at fault
-- (admit/singly.sql). p_all_flags: the flags that any of them has.
-- Locks: the admission lock by try, after the claims' rows. Why no wake-up is lost: see admit/admission.sql.
create or replace function queue._settle_or_append(p_ids bigint[], p_flags smallint[], p_all_flags smallint,
  p_kind text, p_settle boolean, p_payload jsonb default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[] := p_ids;
  v_flags smallint[] := p_flags;
  v_is_settled boolean := false;
begin
  if p_kind = 'ended' and p_all_flags & {{binding}} = 0 then
    return;
  elsif p_kind = 'ended' and p_all_flags & ~{{binding}} <> 0 then
    -- Some may hold nothing that others wait for.
    select array_agg(u.id), array_agg(u.flags) into v_ids, v_flags
    from unnest(p_ids, p_flags) u (id, flags)
    where u.flags & {{binding}} <> 0;
  end if;
  if p_settle and queue._lock_admission(false) then
    begin
      perform queue._settle_ended(v_ids, v_flags, p_all_flags, p_kind, p_payload);
      v_is_settled := true;
    exception when {{fault}} then
      raise warning 'pgdefer: the ends of the jobs % are settled later: % (%)', v_ids, sqlerrm, sqlstate;
    end;
  end if;
  if not v_is_settled then
    insert into queue.pending_settlement (job_id, kind, flags, payload)
    select u.id, p_kind, u.flags, p_payload from unnest(v_ids, v_flags) u (id, flags);
  end if;
  perform queue._announce();
end $$;

-- Settles claims that this transaction has ended in one way, by the shortest way that their flags allow.
-- Locks: the caller holds the admission lock.
create or replace function queue._settle_ended(p_ids bigint[], p_flags smallint[], p_all_flags smallint,
  p_kind text, p_payload jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_has_news boolean;
begin
  if p_kind = 'ended' and p_all_flags & ({{counted}} | {{needed}}) = 0 then
    -- The same as _settle_now for claims that have only an ordered lock.
    if not queue._pass_turns_on(p_ids, true) then
      v_has_news := queue._has_news();
      if v_has_news then
        perform queue._admit_or_singly(1000);
      end if;
      if not v_has_news or not queue._pass_turns_on(p_ids) then
        perform queue._advance(p_turned => queue._leave_locks(p_ids, true));
      end if;
    end if;
  elsif p_kind = 'ended' and p_all_flags & ({{lock}} | {{needed}}) = 0
    and (queue._pass_slots_on(queue._only_key(p_ids, p_flags), cardinality(p_ids))).is_done then
    null;  -- the claims held nothing else
  else
    perform queue._settle_now(p_ids, array_fill(p_kind, array[cardinality(p_ids)]),
      p_flags, case when p_payload is not null then array[p_payload] end);
  end if;
end $$;

-- Settles the pending settlements of this transaction for claims on p_ids as one set, if the admission lock
-- is free. After a fault they stay pending, as in _settle_or_append.
-- Locks: the admission lock by try, given back after a fault.
create or replace function queue._settle_own(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_found record;
begin
  -- With more jobs, the answer may be too long to travel while the admission lock is held (work/deliver.sql).
  if cardinality(p_ids) > 1000 or not queue._lock_admission(false) then
    return;
  end if;
  with gone as (
    delete from queue.pending_settlement h
    where h.xid = pg_current_xact_id() and h.job_id = any (p_ids) and h.kind in ('ended', 'again')
    returning h.job_id, h.kind, h.flags, h.payload, h.seq)
  select array_agg(g.job_id order by g.seq) as ids, array_agg(g.kind order by g.seq) as kinds,
    array_agg(g.flags order by g.seq) as flags,
    array_agg(g.payload order by g.seq) as payloads
  into v_found from gone g;
  if v_found.ids is not null then
    perform queue._settle_now(v_found.ids, v_found.kinds, v_found.flags, v_found.payloads);
  end if;
exception when {{fault}} then
  raise warning 'pgdefer: the ends of the jobs % are settled later: % (%)', p_ids, sqlerrm, sqlstate;
end $$;

-- Settles claims that this transaction has ended. Everything visible is admitted before turns are passed on,
-- so that the turn goes to the oldest.
-- Locks: the caller holds the admission lock.
create or replace function queue._settle_now(p_ids bigint[], p_kinds text[], p_flags smallint[],
  p_payloads jsonb[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._settle_slots(p_ids, p_kinds, p_flags, p_payloads);
  if 'ended' = any (p_kinds) and exists (select from unnest(p_flags) f where f & {{lock}} <> 0)
    and queue._has_news() then
    perform queue._admit_or_singly(1000);
  end if;
  perform queue._settle(p_ids, p_kinds, p_flags);
end $$;

-- Cleans up after jobs that have succeeded, according to their flags; p_all_flags: the flags that any of them
-- has.
-- Locks: those of _clean_up, on rows of these jobs alone.
create or replace function queue._clean_up_succeeded(p_ids bigint[], p_flags smallint[], p_all_flags smallint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_all_flags & ({{aborting}} | {{expires}} | {{lease}} | {{until_start}} | {{retain}}
    | {{until_finish}}) <> 0 then
    perform queue._clean_up(p_ids, p_flags);
  end if;
end $$;

-- Ends claims as succeeded. done: the ids whose claim was the current one, NULL for none. p_ids ascend, so
-- that width_bucket finds an id's place in them; p_results is NULL if there are no results. p_keeps: claims
-- that hold nothing but slots of keys are not settled; the caller must settle kept_ids with kept_flags
-- (_settle_and_claim).
create or replace function queue._succeed(p_ids bigint[], p_claims bigint[], p_results jsonb[],
  p_keeps boolean default false, out done bigint[], out kept_ids bigint[], out kept_flags smallint[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_special bigint[];
  v_flags smallint[];
  v_all_flags smallint;
  v_may_be_awaited boolean;
begin
  with gone as (
    delete from queue.active_job aj
    where aj.id = any (p_ids) and aj.claim = p_claims[width_bucket(aj.id, p_ids)]
    returning aj.id, aj.attempt, aj.flags, aj.claimed_at, aj.worker_id),
  kept as (
    insert into queue.finished (id, finished_at, started_at, worker_id, attempts, state, result)
    select g.id, clock_timestamp(), g.claimed_at, g.worker_id, g.attempt,
      'succeeded', case when p_results is not null then p_results[width_bucket(g.id, p_ids)] end from gone g)
  select array_agg(g.id), array_agg(g.id) filter (where g.flags <> 0),
    array_agg(g.flags) filter (where g.flags <> 0), bit_or(g.flags),
    min(g.id) <= coalesce(pg_sequence_last_value('queue.awaited_seq'), 0)
  into done, v_special, v_flags, v_all_flags, v_may_be_awaited
  from gone g;
  if v_may_be_awaited then
    perform queue._notify_waiters(done);
  end if;
  if v_all_flags <> 0 then
    perform queue._clean_up_succeeded(v_special, v_flags, v_all_flags);
    if p_keeps and v_all_flags & {{keys}} <> 0
      and v_all_flags & ({{lock}} | {{needed}} | {{queue_slot}}) = 0
      and cardinality(done) = cardinality(p_ids) and cardinality(p_ids) <= 1000 then
      kept_ids := v_special;
      kept_flags := v_flags;
    else
      -- With more jobs, the answer may be too long to travel while the admission lock is held.
      perform queue._settle_or_append(v_special, v_flags, v_all_flags, 'ended', cardinality(p_ids) <= 1000);
    end if;
  end if;
end $$;

-- Says why a claim is refused. A job that no longer exists was deleted or pruned.
-- Raises: QJ001 or QJ002, always.
create or replace function queue._raise_claim_error(p_id bigint, p_claim bigint)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if p_id is null or p_claim is null then
    perform queue._invalid('id and claim are needed', 'Pass the pair that fetch returned.');
  elsif p_id not between 1 and (select s.last_value from queue.job_id_seq s) then
    perform queue._job_not_found(p_id);
  end if;
  perform queue._claim_lost(p_id, p_claim);
end $$;
