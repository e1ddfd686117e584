-- Leases: when the next one ends, and which are renewed while their handler lives. reap.sql ends the others.
-- Tests: work/reap.sql.

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
-- another session has been given the pid of one that died, the claim stays until that ends a transaction.
create or replace function queue._is_in_handler(p_info jsonb)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (
    select from pg_locks l where l.locktype = 'virtualxid' and l.pid::text = p_info ->> 'session');
end $$;

-- Whether a claim is run by a worker of queue.work that is in its handler's transaction. No other session can
-- end that, and the attempt ends together with it. So this renews the lease, and no second run starts beside
-- it.
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
