-- Unblocking admission: the admission lock, and how to end a session that keeps it.
-- Tests: admit/admission.sql.

-- Locks: the admission lock by try. Raises: 42501 if the owner may not end that session.
create or replace function queue.unblock()
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_holder record;
begin
  {{installed}}
  if queue._lock_admission(false) then
    perform queue._audit('unblock', '{}');
    return null;  -- no session holds it
  end if;
  v_holder := queue._admission_holder();
  if v_holder.pid is not null then
    begin
      perform pg_terminate_backend(v_holder.pid);
    exception when insufficient_privilege then
      raise exception using errcode = '42501', message = 'the owner of the queue may not end this session',
        detail = format('pid: %s, role: %s', v_holder.pid, v_holder.role),
        hint = format('As that role, as a superuser or as a member of pg_signal_backend: select'
          ' pg_terminate_backend(%s).', v_holder.pid);
    end;
  end if;
  perform queue._audit('unblock', '{}', p_before => to_jsonb(v_holder));
  return v_holder.pid;
end $$;
comment on function queue.unblock() is
  'Ends the session that now holds the admission lock and so keeps others from fetching: see the check'
    ' admission of queue.health(). Its transaction is rolled back. Returns its process id, NULL if no'
    ' session holds the lock. A worker whose session is ended reconnects.';

-- Sets lock_timeout for the rest of the transaction, unless it is lower; returns what it was.
create or replace function queue._cap_lock_timeout(p_most text)
returns text language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_timeout constant text := current_setting('lock_timeout');
begin
  if v_timeout = '0' or v_timeout::interval > p_most::interval then
    perform set_config('lock_timeout', p_most, true);
  end if;
  return v_timeout;
end $$;

-- Takes the admission lock. Without p_wait it gives up at once if another session has it.
-- Locks: the admission lock.
-- The holder must not idle: the server ends a session that stays idle in this transaction for 10 s, or sooner
-- if its idle_in_transaction_session_timeout is lower. Nor may it wait long for others: with p_wait, which
-- operations use, lock_timeout is at most 10 s for the rest of the transaction. The setting pgdefer.admits
-- tells later calls of the transaction that it holds the lock (_has_admission).
-- It waits in parts of 2 s. If the holder took the lock in a savepoint that it has released, PostgreSQL lets
-- a session wait for the holder's whole transaction. That is so even if the holder then rolls back an outer
-- savepoint. Others wait behind that session. If that holder then waits for the lock again, they wait for
-- each other. Such a deadlock is over with this part, so only a second one is raised. 2 s is longer than
-- deadlock_timeout's default; with a longer deadlock_timeout only the holder finds a deadlock.
-- The server counts a session as idle only once its client has closed the pipeline, and never while it sends.
-- So a waiter looks after each part, and ends a holder that it has found waiting for its client five times.
-- Raises: 55P03 at the end of the part in which lock_timeout passes; 40P01.
-- Two sessions: operate/change.savepoint.spec, tests/py/races/test_lock_jobs.py and test_frozen.py.
create or replace function queue._lock_admission(p_wait boolean)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_timeout text;
  v_since timestamptz;
  v_seen text;
  v_times integer;
  v_has_deadlock boolean := false;
begin
  loop
    perform from queue.admission for update skip locked;
    exit when found;
    if not p_wait then
      return false;
    end if;
    v_since := coalesce(v_since, clock_timestamp());
    begin
      v_timeout := queue._cap_lock_timeout('2s');
      perform from queue.admission for update;
      perform set_config('lock_timeout', v_timeout, true);
      exit;
    exception when lock_not_available then
      v_timeout := current_setting('lock_timeout');
      if v_timeout = '0' or v_timeout::interval >= interval '10 s' then
        select e.seen, e.times into v_seen, v_times from queue._end_stalled(v_seen, v_times) e;
      end if;
      if v_timeout <> '0' and v_timeout::interval <= clock_timestamp() - v_since then
        raise;
      end if;
    when deadlock_detected then
      if v_has_deadlock then
        raise;
      end if;
      v_has_deadlock := true;
    end;
  end loop;
  perform pg_try_advisory_xact_lock_shared({{holder_lock}}), set_config('pgdefer.admits', 'on', true);
  v_timeout := current_setting('idle_in_transaction_session_timeout');
  if v_timeout = '0' or v_timeout::interval > interval '10 s' then
    v_timeout := set_config('idle_in_transaction_session_timeout', '10s', true);
  end if;
  if p_wait then
    perform queue._cap_lock_timeout('10s');
  end if;
  return true;
end $$;

-- The other session or prepared transaction that holds the admission lock. since: when its transaction began,
-- NULL if its role's sessions are hidden from the owner. The row names the transaction that took the lock. If
-- a savepoint took it and was released, the row names only that savepoint. Then the holder is the session
-- with holder_lock, which comes with the admission lock and goes with it. Any role may take holder_lock, but
-- not the lock on the table, which all who try to get the row have.
create or replace function queue._admission_holder(out pid integer, out role text, out state text,
  out application text, out since timestamptz)
language plpgsql stable parallel safe security invoker as $$
begin
  select l.pid, coalesce(a.usename, p.owner), coalesce(a.state, 'prepared transaction ' || p.gid),
    a.application_name, coalesce(a.xact_start, p.prepared)
  into pid, role, state, application, since
  from queue.admission m
  cross join pg_locks l
  left join pg_stat_activity a on a.pid = l.pid
  left join pg_prepared_xacts p on l.pid is null and exists (select from pg_locks x
    where x.locktype = 'transactionid' and x.transactionid = p.transaction and x.granted
      and x.virtualtransaction = l.virtualtransaction)
  where l.granted and l.pid is distinct from pg_backend_pid()
    and (l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and l.transactionid = m.xmax
      or l.locktype = 'advisory' and l.mode = 'ShareLock'
        and (l.classid::bigint, l.objid::bigint) = ({{holder_lock}})
        and l.database = (select d.oid from pg_database d where d.datname = current_database())
        and exists (select from pg_locks t where t.virtualtransaction = l.virtualtransaction
          and t.locktype = 'relation' and t.relation = 'queue.admission'::regclass))
  order by l.locktype desc limit 1;
end $$;

-- Ends the session that holds the admission lock if five looks in a row have found the same: it is not idle,
-- waits for its client, and has got no message since. (A client that reads a long answer slowly looks the
-- same; one that copies does not.) p_seen, p_times: what the last look has found, and how often. If the owner
-- may not see that session, nothing is found; if the owner may not end it, health names it.
-- Locks: none. Why no wake-up is lost: the transaction of the session that it ends is rolled back as a whole.
-- Two sessions: tests/py/races/test_frozen.py.
create or replace function queue._end_stalled(p_seen text, p_times integer, out seen text, out times integer)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_pid integer;
begin
  perform pg_stat_clear_snapshot();  -- otherwise all looks of a transaction show what the first one saw
  select a.pid, concat_ws(' ', a.pid, a.backend_start, a.state_change, c.bytes_processed) into v_pid, seen
  from queue._admission_holder() h
  join pg_stat_activity a on a.pid = h.pid
  left join pg_stat_progress_copy c on c.pid = a.pid
  where a.state = 'active' and a.wait_event_type = 'Client';
  times := case when seen = p_seen then p_times + 1 else 1 end;
  if times = 5 then
    perform pg_terminate_backend(v_pid);
  end if;
exception when insufficient_privilege then
  null;
end $$;

-- Whether this transaction holds the admission lock. The setting is undone with the savepoint that took it.
create or replace function queue._has_admission()
returns boolean language plpgsql stable parallel unsafe security invoker as $$
begin
  return current_setting('pgdefer.admits', true) is not distinct from 'on';
end $$;

-- Locks: the admission lock, waited for up to 50 ms, or less if lock_timeout is less. The caller may hold
-- rows of claims: see admit/admission.sql. Returns whether it got the lock.
create or replace function queue._wait_for_admission()
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_timeout text;
begin
  if queue._lock_admission(false) then
    return true;
  end if;
  v_timeout := queue._cap_lock_timeout('50ms');
  begin
    perform from queue.admission for update;
  exception when lock_not_available or deadlock_detected then
    null;  -- a deadlock with an operator who waits for one of our claims, if deadlock_timeout is below 50 ms
  end;
  perform set_config('lock_timeout', v_timeout, true);
  return queue._lock_admission(false);  -- even if it has the row: this notes who holds the lock
end $$;

-- The virtual transactions that are under way in other sessions of this database. All others see what was
-- committed before this call.
create or replace function queue._virtual_transactions()
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
begin
  return array(
    select l.virtualtransaction from pg_locks l join pg_stat_activity a on a.pid = l.pid
    where l.locktype = 'virtualxid' and l.pid <> pg_backend_pid() and a.usesysid is not null
      and a.datid = (select d.oid from pg_database d where d.datname = current_database()));
end $$;
