-- Sends every NOTIFY except that of the line (work/line.sql): to sleeping workers, to the worker of a claim,
-- and to clients that wait for a result. Why no wake-up is lost: work/worker_sleep.sql. Many wake-ups at
-- once: tests/py/races/test_wake_ups.py.
-- Tests: work/worker_sleep.sql, work/worker_sleep.lead_sleeper.spec, operate/cancel_hold.finish.spec.

-- Whether to notify. Not if the session or database has SET pgdefer.notify = off. Nor if a session that
-- listens, but stays in a transaction, has let the server's queue of notifications fill up. Then each COMMIT
-- that notifies fails, until somebody calls pg_notification_queue_usage, which removes what all have read.
-- Locks: none. Qualified, like defer.
create or replace function queue._may_notify()
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  return coalesce(pg_catalog.current_setting('pgdefer.notify', true), '') operator(pg_catalog.<>) 'off'
    and pg_catalog.pg_notification_queue_usage() operator(pg_catalog.<) 0.9;
end $$;

-- Locks: none. Sends the notification, if that is possible. Qualified, like defer.
create or replace function queue._wake()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if queue._may_notify() then
    perform pg_catalog.pg_notify('pgdefer', '');
  end if;
end $$;

-- Tells workers that a job may have become ready, if any worker may sleep. In the lead sleeper's own session
-- the try proves nothing, because that session already holds the lock. It may be the worker's only
-- connection, which fetches while others sleep. So there it always notifies.
-- Locks: the sleep lock, shared and by try.
create or replace function queue._announce()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if not pg_try_advisory_xact_lock_shared({{sleep_lock}})
    or current_setting('pgdefer.sleeper', true) = 'lead'
  then
    perform queue._wake();
  end if;
end $$;

-- Notifies clients that wait for jobs that have ended.
-- Locks: rows of queue.awaited by skip locked.
create or replace function queue._notify_waiters(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
begin
  if p_ids[1] > (select s.last_value from queue.awaited_seq s) and cardinality(p_ids) = 1 then
    return;
  end if;
  with gone as (
    delete from queue.awaited a
    where a.ctid = any (array(
      select a.ctid from unnest(p_ids) u (id)
      cross join lateral (select a.ctid from queue.awaited a where a.id = u.id for update skip locked) a))
    returning a.id)
  select array_agg(distinct g.id) into v_ids from gone g;
  if v_ids is not null and queue._may_notify() then
    perform pg_notify('pgdefer_result_' || u.id, '') from unnest(v_ids) u (id);
  end if;
end $$;

-- Tells all workers to give back the jobs that they have claimed and not started. Locks: none.
create or replace function queue._notify_pause()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if queue._may_notify() then
    perform pg_notify('pgdefer_worker_' || w.id, 'pause') from queue.worker w where w.gone_at is null;
  end if;
end $$;

-- Tells a worker to abort a claim: by its channel, and by heartbeat.
-- Locks: the new row's key; the caller has locked the job's row of queue.active_job.
create or replace function queue._notify_abort(p_id bigint, p_claim bigint, p_worker bigint, p_reason text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  insert into queue.abort (id, claim, worker_id, reason) values (p_id, p_claim, p_worker, p_reason)
  on conflict on constraint abort_pkey do nothing;
  if queue._may_notify() then
    perform pg_notify('pgdefer_worker_' || p_worker, '');
  end if;
end $$;
