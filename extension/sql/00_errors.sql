-- Errors: every one has a stable SQLSTATE, a fixed message, the ids in DETAIL and what to do in HINT.

-- Raises: 22023, always.
create or replace function queue._invalid(message text, hint text, detail text default '')
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  if detail = '' then
    raise exception using errcode = '22023', message = message, hint = hint;
  end if;
  raise exception using errcode = '22023', message = message, detail = detail, hint = hint;
end $$;

-- Raises: 22023 unless value is a name: 1 to 1,000 bytes. `what` is the argument's name.
create or replace function queue._check_name(what text, value text)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if value is null or value = '' then
    perform queue._invalid(what || ' is missing', 'Give a name of 1 to 1,000 bytes.');
  elsif octet_length(value) > 1000 then
    perform queue._invalid(what || ' is too long', 'Names are at most 1,000 bytes.',
                           octet_length(value) || ' bytes');
  end if;
end $$;

-- Raises: 22023 unless value, which may be NULL, is a list without NULL: array_position can't look into arrays of arrays.
create or replace function queue._check_list(what text, value text[])
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if array_ndims(value) > 1 then
    perform queue._invalid(what || ' must be a plain list', 'Pass an array of one dimension.');
  elsif array_position(value, null) is not null then
    perform queue._invalid(what || ' holds NULL', 'Pass a list without NULL.');
  end if;
end $$;

-- Raises: 22023 unless ids is a list of ids, without NULL.
create or replace function queue._check_ids(ids bigint[])
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if ids is null or array_ndims(ids) > 1 or array_position(ids, null) is not null then
    perform queue._invalid('ids must be a list of ids', 'Pass ids of jobs, without NULL.');
  end if;
end $$;

-- Raises: 22023 unless value is a queue's name: as _check_name, and not ending in an asterisk.
create or replace function queue._check_queue(value text)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  perform queue._check_name('queue', value);
  if right(value, 1) = '*' then
    perform queue._invalid('a queue''s name may not end in *', 'Patterns such as prefix* select queues; a queue needs a plain name.',
                           'queue: ' || value);
  end if;
end $$;

-- Raises: 22023 when the object holds a key that is not among `known`, or is no object.
create or replace function queue._check_keys(what text, object jsonb, known text[])
returns void language plpgsql immutable parallel safe security invoker as $$
declare
  v_key text;
begin
  if object is null then
    return;
  end if;
  if jsonb_typeof(object) <> 'object' then
    perform queue._invalid(what || ' must be a JSON object', 'Pass an object such as {"key": "value"}.');
  end if;
  if object - known <> '{}'::jsonb then
    select k into v_key from jsonb_object_keys(object - known) k order by k limit 1;
    perform queue._invalid(format('%s has an unknown key', what),
                           format('Known keys: %s.', array_to_string(known, ', ')), format('key: %s', v_key));
  end if;
end $$;

-- The interval that a JSON value gives, as text or as a number of seconds.
-- Raises: 22023 when it gives none, one below zero, or one that no timestamp can be moved by.
create or replace function queue._interval(what text, value jsonb)
returns interval language plpgsql stable parallel safe security invoker as $$
declare
  v_interval interval;
begin
  if value is null or jsonb_typeof(value) = 'null' then
    return null;
  end if;
  begin
    if jsonb_typeof(value) = 'number' then
      v_interval := make_interval(secs => value::text::double precision);
    elsif jsonb_typeof(value) = 'string' then
      v_interval := (value #>> '{}')::interval;
    end if;
  exception when others then
    v_interval := null;
  end;
  if v_interval is null or v_interval < interval '0' or v_interval > interval '10000 years' then
    perform queue._invalid(what || ' is not an interval', 'Give an interval such as "5 minutes", or seconds as a number; from 0 to 10,000 years.',
                           'value: ' || left(value::text, 200));
  end if;
  return v_interval;
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
  raise exception using errcode = 'QJ002', message = 'claim lost', detail = format('id: %s, claim: %s', id, claim),
    hint = 'The job was finished, reaped or taken over. Drop the result: another claim decides now.';
end $$;

-- Raises: QJ003, always.
create or replace function queue._invalid_state(id bigint, state text, hint text)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ003', message = 'the job''s state does not allow this',
    detail = format('id: %s, state: %s', id, state), hint = hint;
end $$;

-- Raises: QJ004, always.
create or replace function queue._already_queued(id bigint, queueing_lock text)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ004', message = 'already queued', detail = format('id: %s, queueing_lock: %s', id, queueing_lock),
    hint = 'Another job with this queueing_lock waits. Pass options {"on_conflict": "ignore"} or "replace", or carry on without it.';
end $$;

-- Raises: QJ007, always.
create or replace function queue._worker_gone(worker bigint)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ007', message = 'worker gone', detail = format('worker: %s', worker),
    hint = 'The worker was reaped or deregistered: abort its jobs and call queue.register_worker again.';
end $$;

-- Raises: QJ090 where there are no tables: public functions ask first (0.65 us).
create or replace function queue._not_installed()
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  if to_regclass('queue.installation') is null then
    raise exception using errcode = 'QJ090', message = 'the tables of the queue are missing', hint = 'Run SELECT queue.install().';
  end if;
end $$;

-- Raises: QJ008 outside READ COMMITTED: every proof in these files counts on a new snapshot per statement.
create or replace function queue._check_isolation()
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception using errcode = 'QJ008', message = 'wrong isolation level',
      detail = format('transaction_isolation: %s', current_setting('transaction_isolation')),
      hint = 'Call this in a READ COMMITTED transaction.';
  end if;
end $$;
