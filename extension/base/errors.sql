-- Errors: each has a stable SQLSTATE and a fixed message. DETAIL has the ids, HINT says what to do.
-- Tests: base/checks.sql, base/permissions.sql.

-- Raises: 22023, always. A detail may contain the caller's values, so it is cut.
create or replace function queue._invalid(message text, hint text, detail text default '')
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  if detail = '' then
    raise exception using errcode = '22023', message = message, hint = hint;
  end if;
  raise exception using errcode = '22023', message = message, detail = left(detail, 2000), hint = hint;
end $$;

-- Raises: QJ001, always.
create or replace function queue._job_not_found(id bigint)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ001', message = 'job not found', detail = format('id: %s', id),
    hint = 'The id is wrong, its transaction has not committed, or the job was pruned or deleted.';
end $$;

-- Raises: QJ002, always.
create or replace function queue._claim_lost(id bigint, claim bigint)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ002', message = 'claim lost',
    detail = format('id: %s, claim: %s', id, claim),
    hint = 'The job was finished, reaped or taken over. Drop the result.';
end $$;

-- Raises: QJ003, always.
create or replace function queue._invalid_state(id bigint, state text, hint text)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ003', message = 'the job''s state does not allow this',
    detail = format('id: %s, state: %s', id, state), hint = hint;
end $$;

-- Raises: QJ004, always.
create or replace function queue._already_queued(id bigint, queueing_lock text, hint text)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ004', message = 'already queued',
    detail = format('id: %s, queueing_lock: %s', id, queueing_lock), hint = hint;
end $$;

-- Raises: QJ004, always. It does not name the job, which is in a queue that the caller may not use.
create or replace function queue._key_taken(p_key text)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ004', message = 'already queued',
    detail = format('idempotency_key: %s', p_key),
    hint = 'A job in a queue that you may not use was deferred with this idempotency_key. Pass another one.';
end $$;

-- Raises: QJ007, always.
create or replace function queue._worker_gone(worker bigint)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ007', message = 'worker gone', detail = format('worker: %s', worker),
    hint = 'The worker was reaped or deregistered: abort its jobs and call queue.register_worker again.';
end $$;

-- Raises: QJ090 if there are no tables: public functions check this first (0.65 us).
create or replace function queue._check_installed()
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  if to_regclass('queue.installation') is null then
    raise exception using errcode = 'QJ090', message = 'the tables of the queue are missing',
      hint = 'Run SELECT queue.install().';
  end if;
end $$;

-- Raises: QJ008 outside READ COMMITTED: every proof in these files relies on a new snapshot per statement.
create or replace function queue._check_isolation()
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception using errcode = 'QJ008', message = 'wrong isolation level',
      detail = format('transaction_isolation: %s', current_setting('transaction_isolation')),
      hint = 'Call this in a READ COMMITTED transaction.';
  end if;
end $$;
