-- Leases: how a claim gets its own lease, when the next lease ends, and which leases are renewed while their
-- handler lives. reap.sql ends the claims whose lease has ended.
-- Tests: work/reap.sql.

-- Until the timeout has passed, it limits the lease: the attempt ends 10 s after the timeout, however often
-- it is extended. An extension after the timeout means that the handler could not be ended and still runs, as
-- the live worker reports. Then only the lease counts, so that no second run, and no other holder of its lock
-- or slot, starts beside it.
-- Locks: the claim's row, then that of its lease. Raises: 22023, QJ001, QJ002.
create or replace function queue.extend(id bigint, claim bigint, lease interval)
returns timestamptz language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_expires_at timestamptz;
begin
  {{if_restricted}}
    perform queue._require_claims(array[extend.id], array[extend.claim]);
  end if;
  if extend.lease is null or extend.lease <= interval '0' then
    perform queue._invalid('lease must be longer than 0', 'Pass an interval such as ''20 minutes''.');
  end if;
  perform queue._check_interval('lease', extend.lease);
  v_expires_at := queue._extend(extend.id, extend.claim, extend.lease);
  {{if_operator}}
    perform queue._audit_claim('extend', extend.id, extend.claim, jsonb_build_object('lease', extend.lease));
  end if;
  return v_expires_at;
end $$;
comment on function queue.extend(bigint, bigint, interval) is
  'Gives the claim its own lease from now on. Only the lease then decides when the claim is dead, whatever'
    ' happens to its worker. Returns the end of the lease. A timeout still limits the attempt. But a claim'
    ' that is extended after its timeout lives as long as the lease: in this way a live worker reports that'
    ' it could not end the handler.';

-- The earliest end of leases and timeouts that were set before workers could reach the server (_up_since).
create or replace function queue._grace_until()
returns timestamptz language plpgsql stable parallel safe security invoker as $$
begin
  return queue._up_since() + interval '30 s';
end $$;

-- When the next lease or timeout ends, for reap.
create or replace function queue._next_lease_end()
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_first timestamptz := (select l.expires_at from queue.lease l order by l.expires_at limit 1);
  v_grace_until timestamptz := case when v_first is not null then queue._grace_until() end;
  v_up_since timestamptz;
begin
  if v_first is null or v_grace_until <= clock_timestamp() then
    return v_first;
  end if;
  v_up_since := queue._up_since();
  return (select min(case when l.given_at < v_up_since
    then greatest(l.expires_at, v_grace_until) else l.expires_at end)
          from queue.lease l);
end $$;

-- Whether a worker of queue.work is in a transaction, as it is while a handler runs (work/sql_worker.sql). If
-- the worker has died and another session has got its pid, the claim stays until that session ends a
-- transaction.
create or replace function queue._is_in_handler(p_info jsonb)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (
    select from pg_locks l where l.locktype = 'virtualxid' and l.pid::text = p_info ->> 'session');
end $$;

-- Whether a claim is run by a worker of queue.work that is in its handler's transaction. If so, it renews the
-- lease, so that no second run starts beside it: no other session can end that transaction, with which the
-- attempt ends.
-- Locks: the lease's row by skip locked.
create or replace function queue._renew_in_handler(p_id bigint, p_claim bigint)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  if not exists (select from queue.active_job aj join queue.worker w on w.id = aj.worker_id
    where aj.id = p_id and aj.claim = p_claim and w.info ? 'session' and queue._is_in_handler(w.info))
  then
    return false;
  end if;
  update queue.lease l set expires_at = clock_timestamp() + interval '10 s'
  where l.ctid = any (array(select l.ctid from queue.lease l
    where l.id = p_id and l.claim = p_claim for update skip locked));
  return true;
end $$;

-- Gives the claim a lease. Locks and errors: as extend.
create or replace function queue._extend(p_id bigint, p_claim bigint, p_lease interval)
returns timestamptz language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_claimed_at timestamptz;
  v_expires_at timestamptz;
begin
  update queue.active_job aj set flags = aj.flags | {{lease}}
  where aj.id = p_id and aj.claim = p_claim returning aj.claimed_at into v_claimed_at;
  if not found then
    perform queue._raise_claim_error(p_id, p_claim);
  end if;
  select case when v_claimed_at + t.timeout <= v_now then v_now + p_lease
              else least(v_now + p_lease, v_claimed_at + t.timeout + {{timeout_grace}}) end
  into v_expires_at
  from queue.job j cross join lateral (select (j.options ->> 'timeout')::interval as timeout) t
  where j.id = p_id;
  insert into queue.lease as l (id, claim, expires_at, is_own)
  values (p_id, p_claim, v_expires_at, true)
  on conflict on constraint lease_pkey do update
    set claim = excluded.claim, expires_at = excluded.expires_at, is_own = true, given_at = excluded.given_at;
  return v_expires_at;
end $$;
