-- Errors: every one has a stable SQLSTATE, a fixed message, the ids in DETAIL and what to do in HINT.

-- Raises: 22023, always. A detail may hold what a caller gave, so it is cut.
create or replace function queue._invalid(message text, hint text, detail text default '')
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  if detail = '' then
    raise exception using errcode = '22023', message = message, hint = hint;
  end if;
  raise exception using errcode = '22023', message = message, detail = left(detail, 2000), hint = hint;
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

-- Raises: 22023 unless ids is a list of ids, without NULL, and no longer than one call may work on: its answer travels with ADM
-- held, and 1,000 rows fit into what the sockets' buffers take in any case (41_deliver.sql).
create or replace function queue._check_ids(ids bigint[])
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if ids is null or array_ndims(ids) > 1 or array_position(ids, null) is not null then
    perform queue._invalid('ids must be a list of ids', 'Pass ids of jobs, without NULL.');
  elsif cardinality(ids) > 1000 then
    perform queue._invalid('ids holds more than 1,000', 'Call again for each further 1,000.', 'ids: ' || cardinality(ids));
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

-- What any moment can be moved by, forth and back: no part of it lies below zero (a month less and 40 days more is a
-- positive interval, and may lead out of the calendar all the same), and it is at most 4,000 years.
create or replace function queue._is_bounded(value interval)
returns boolean language plpgsql immutable parallel safe security invoker as $$
begin
  return value between interval '0' and interval '4000 years'
    and least(extract(year from value), extract(month from value), extract(day from value),
              extract(hour from value), extract(minute from value), extract(second from value)) >= 0;
end $$;

-- Raises: 22023 unless the interval, which may be NULL, is one that any moment can be moved by.
create or replace function queue._check_interval(what text, value interval)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if not queue._is_bounded(value) then
    perform queue._invalid(what || ' is out of range', 'Pass an interval such as ''5 minutes'', from 0 to 4,000 years.',
                           format('value: %s', value));
  end if;
end $$;

-- The interval that a JSON value gives, as text or as a number of seconds. One that begins with a minus means
-- different things under different settings of IntervalStyle, and is none.
-- Raises: 22023 when it gives none, or one that not every moment can be moved by.
create or replace function queue._interval(what text, value jsonb)
returns interval language plpgsql stable parallel unsafe security invoker as $$
declare
  v_interval interval;
begin
  if value is null or jsonb_typeof(value) = 'null' then
    return null;
  end if;
  begin
    if jsonb_typeof(value) = 'number' then
      v_interval := make_interval(secs => value::text::double precision);
    elsif jsonb_typeof(value) = 'string' and value #>> '{}' !~ '^[^0-9A-Za-z+]*-' then
      v_interval := (value #>> '{}')::interval;
    end if;
  exception when others then
    v_interval := null;
  end;
  if queue._is_bounded(v_interval) is not true then
    perform queue._invalid(what || ' is not an interval', 'Give an interval such as "5 minutes", or seconds as a number; from 0 to 4,000 years.',
                           'value: ' || left(value::text, 200));
  end if;
  return v_interval;
end $$;

-- Raises: 22023 unless the moment, which may be NULL, lies in the years 1 to 9999, where every client has a value for
-- it and any interval may be added; or, with may_be_never, is infinity.
create or replace function queue._check_moment(what text, value timestamptz, may_be_never boolean default false)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if not (value >= '0001-01-03 00:00+00' and value < '10000-01-01 00:00+00' or may_be_never and value = 'infinity') then
    if not isfinite(value) then
      perform queue._invalid(what || ' must be finite', 'Give a moment. To put a job aside without one, use queue.hold.');
    end if;
    perform queue._invalid(what || ' is out of range', 'Give a moment in the years 1 to 9999.', format('value: %s', value));
  end if;
end $$;

-- How many bytes JSON takes as text, or some number above p_most as soon as it is known to be that many. A number of 10
-- bytes may print 131,072 digits (1e131071): so large ones are counted first, one by one, and no text is made of all of
-- them.
create or replace function queue._text_size(p_value jsonb, p_most integer)
returns bigint language plpgsql immutable parallel unsafe security invoker as $$
declare
  v_number jsonb;
  v_size bigint := 0;
begin
  for v_number in select n from jsonb_path_query(p_value, 'strict $.** ? (@ > 1e400 || @ < -1e400)') n loop
    v_size := v_size + octet_length(v_number::text);
    if v_size > p_most then
      return v_size;
    end if;
  end loop;
  return octet_length(p_value::text);
exception when program_limit_exceeded or out_of_memory then
  -- a text of 1 GB, or so deep that its size can't be told
  return greatest(v_size, p_most + 1::bigint);
end $$;

-- Raises: 22023 when JSON takes more bytes as text than queue.configure lets it, else it is true. What is stored in less
-- than 2,000 bytes is not looked at: no JSON prints more than 8,193 bytes for each of them. A value from a table may be
-- compressed, and shows its size only when it is looked at.
create or replace function queue._check_size(what text, value jsonb)
returns boolean language plpgsql stable parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_most integer;
  v_size bigint;
begin
  if pg_column_size(value) < 2000 and pg_column_compression(value) is null then
    return true;
  end if;
  select i.max_size into v_most from queue.installation i;
  -- a digit, three bytes in a list, is stored in twelve
  v_size := case when pg_column_size(value) / 5 > v_most then pg_column_size(value) / 5 else queue._text_size(value, v_most) end;
  if v_size > v_most then
    perform queue._invalid(format('the JSON of %s is too large', what), 'Keep large data elsewhere and pass a reference to it. The owner may raise the limit: queue.configure.',
                           format('bytes as text: at least %s, allowed: %s', v_size, v_most));
  end if;
  return true;
end $$;

-- How many bytes args and headers take as text, where args take more than 2,000, else NULL: what fetch counts with.
-- Raises: 22023 when they are larger than queue.configure lets them be.
create or replace function queue._size_of(args jsonb, headers jsonb)
returns integer language plpgsql stable parallel unsafe security invoker as $$
declare
  v_size integer;
begin
  if pg_column_size(args) >= 2000 or pg_column_compression(args) is not null then
    perform queue._check_size('args', args);
  end if;
  v_size := octet_length(args::text);
  if v_size > 2000 or pg_column_size(headers) > 500 then
    return v_size + coalesce(octet_length(headers::text), 0);
  end if;
  return null;
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
