-- Admission one by one (p_singly), after an admission of all together has failed. If admission can't deal
-- with a job, or with the end of one, this must not stop the others. No such fault is known: this is for
-- unknown ones. A new job fails, or is parked for another try. Anything else is shelved: it lies behind the
-- cursor, where check() shows it, and maintenance tries it again (_retry_shelved).
-- Locks, of all functions here: the caller holds the admission lock; else as those that they call.
-- Why no wake-up is lost: what is shelved wakes nobody until it is settled.
-- Tests: admit/admission.poison.sql, admit/settle.fault.spec.

-- Admits new jobs one by one; one that can't be admitted fails. Returns the jobs that must be tried again:
-- those that another transaction is replacing, and, after a hundred failures, all that follow, because the
-- fault may be mended meanwhile.
-- Locks: as _admit_gated; the row of a queueing lock by skip locked. Why no wake-up is lost: _advance tells
-- those that need the job, and its group. Two sessions: admit/admission.fault.spec.
create or replace function queue._admit_singly(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_id bigint;
  v_failed integer := 0;
  v_left bigint[];
begin
  foreach v_id in array array(select u.id from unnest(p_ids) u (id) order by u.id) loop
    if v_failed = 100 then
      v_left := v_left || v_id;
      continue;
    end if;
    begin
      perform queue._admit_gated(array[v_id]);
    exception when {{fault}} then
      if not queue._try_lock_queueing_lock(v_id) then
        v_left := v_left || v_id;
        continue;
      end if;
      v_failed := v_failed + 1;
      raise warning 'pgdefer: job % can''t be admitted: % (%)', v_id, sqlerrm, sqlstate;
      perform queue._join_groups(array[v_id]), queue._join_needs(array[v_id]);
      perform queue._finish_unclaimed(array[v_id], 'failed', 'admission',
        format('%s (%s)', sqlerrm, sqlstate));
      perform queue._advance(p_ended => array[v_id]);
    end;
  end loop;
  return v_left;
end $$;

-- _admit_gated, for all together or one by one. Returns the jobs that must be tried again, as _admit_singly
-- does. It also returns the least urgent of many jobs with keys and needs, which would keep the admission
-- lock for too long. Jobs with an ordered lock come first, by id, because their locks require that order.
create or replace function queue._admit_all_gated(p_ids bigint[], p_singly boolean)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[] := p_ids;
  v_left bigint[];
begin
  if p_singly then
    return queue._admit_singly(p_ids);
  end if;
  if cardinality(p_ids) > 1 then
    select array_agg(x.id) filter (where x.n = 1 or x.load <= {{gated_at_once}}),
      array_agg(x.id) filter (where x.n > 1 and x.load > {{gated_at_once}})
    into v_ids, v_left
    from (
      select u.id, row_number() over by_place as n,
        sum(1 + coalesce(cardinality(j.keys), 0) + coalesce(cardinality(j.needs), 0)) over by_place as load
      from unnest(p_ids) u (id)
      cross join lateral (
        select j.keys, j.needs, case when j.flags & {{ordered}} = 0 then -j.priority::bigint end as place,
          coalesce(j.deadline, 'infinity') as deadline
        from queue.job_now j where j.id = u.id offset 0) j
      window by_place as (
        order by j.place nulls first, case when j.place is not null then j.deadline end, u.id
        rows unbounded preceding)) x;
  end if;
  perform queue._admit_gated(v_ids);
  return v_left;
end $$;

-- _settle_slots, for all together or one by one. Returns the settlements that were not shelved.
create or replace function queue._settle_all_slots(p_ids bigint[], p_kinds text[], p_flags smallint[],
  p_payloads jsonb[], p_singly boolean, out ids bigint[], out kinds text[], out flags smallint[])
language plpgsql volatile parallel unsafe security invoker as $$
begin
  if not p_singly then
    perform queue._settle_slots(p_ids, p_kinds, p_flags, p_payloads);
    ids := p_ids;
    kinds := p_kinds;
    flags := p_flags;
    return;
  end if;
  for n in 1 .. coalesce(cardinality(p_ids), 0) loop  -- NULL if all are this transaction's own
    begin
      perform queue._settle_slots(p_ids[n:n], p_kinds[n:n], p_flags[n:n],
        case when p_payloads[n] is not null then p_payloads[n:n] end);
      ids := ids || p_ids[n];
      kinds := kinds || p_kinds[n];
      flags := flags || p_flags[n];
    exception when {{fault}} then
      perform queue._shelve(p_ids[n], p_kinds[n], p_flags[n], p_payloads[n], sqlerrm, sqlstate);
    end;
  end loop;
end $$;

-- _settle, for all together or one by one.
create or replace function queue._settle_all(p_ids bigint[], p_kinds text[], p_flags smallint[],
  p_singly boolean)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if not p_singly then
    perform queue._settle(p_ids, p_kinds, p_flags);
    return;
  end if;
  for n in 1 .. coalesce(cardinality(p_ids), 0) loop
    begin
      perform queue._settle(p_ids[n:n], p_kinds[n:n], p_flags[n:n]);
    exception when {{fault}} then
      -- Its slots are free already.
      perform queue._shelve(p_ids[n], p_kinds[n], (p_flags[n] & ~{{counted}})::smallint, null, sqlerrm,
        sqlstate);
    end;
  end loop;
end $$;

-- _advance, for jobs that are in no gate, one by one.
create or replace function queue._advance_singly(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_id bigint;
begin
  foreach v_id in array coalesce(p_ids, '{}'::bigint[]) loop
    begin
      perform queue._advance(p_arrived => array[v_id]);
    exception when {{fault}} then
      perform queue._shelve(v_id, 'again', 0::smallint, null, sqlerrm, sqlstate);
    end;
  end loop;
end $$;

create or replace function queue._shelve(p_id bigint, p_kind text, p_flags smallint, p_payload jsonb,
  p_error text, p_sqlstate text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  raise warning 'pgdefer: job % can''t be settled (%), and is shelved: % (%)', p_id, p_kind, p_error,
    p_sqlstate;
  insert into queue.pending_settlement (xid, job_id, kind, flags, payload)
  values ({{shelved}}, p_id, p_kind, p_flags, p_payload);
end $$;

-- Tries to settle one settlement alone, and rolls that back. Returns the error, or NULL.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: nothing of it remains.
create or replace function queue._settling_error(p_id bigint, p_kind text, p_flags smallint, p_payload jsonb)
returns text language plpgsql volatile parallel unsafe security invoker as $$
begin
  begin
    perform queue._settle_slots(array[p_id], array[p_kind], array[p_flags],
      case when p_payload is not null then array[p_payload] end);
    perform queue._settle(array[p_id], array[p_kind], array[p_flags]);
    {{roll_back}}
    when {{fault}} then
      return format('%s (%s)', sqlerrm, sqlstate);
  end;
  return null;
end $$;

-- Hands up to a hundred shelved settlements to the next admission, if they can be settled now.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: they get the xid of this transaction,
-- which the cursor has not passed. Two sessions: admit/settle.fault.spec.
create or replace function queue._retry_shelved()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.pending_settlement h set xid = pg_current_xact_id()
  where h.xid = {{shelved}} and h.seq = any (array(
    select a.seq
    from (
      select s.seq, s.job_id, s.kind, s.flags, s.payload
      from queue.pending_settlement s
      where s.xid = {{shelved}} order by random() limit 100) a
    where queue._settling_error(a.job_id, a.kind, a.flags, a.payload) is null));
end $$;
