-- Checks of arguments. Each raises 22023 with the name of the argument.

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

-- Raises: 22023 unless value, which may be NULL, is a plain list without NULL. A nested array is refused,
-- because array_position can't search it.
create or replace function queue._check_list(what text, value text[])
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if array_ndims(value) > 1 then
    perform queue._invalid(what || ' must be a plain list', 'Pass an array of one dimension.');
  elsif array_position(value, null) is not null then
    perform queue._invalid(what || ' holds NULL', 'Pass a list without NULL.');
  end if;
end $$;

-- Raises: 22023 unless ids is a list of ids, without NULL, and not too long for one call. The answer travels
-- with the admission lock held, and 1,000 rows always fit into the sockets' buffers (work/deliver.sql).
create or replace function queue._check_ids(ids bigint[])
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if ids is null or array_ndims(ids) > 1 or array_position(ids, null) is not null then
    perform queue._invalid('ids must be a list of ids', 'Pass ids of jobs, without NULL.');
  elsif cardinality(ids) > 1000 then
    perform queue._invalid('ids holds more than 1,000', 'Call again for each further 1,000.',
      'ids: ' || cardinality(ids));
  end if;
end $$;

-- Raises: 22023 unless value is a queue's name: a name (_check_name) that does not end in an asterisk.
create or replace function queue._check_queue(value text)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  perform queue._check_name('queue', value);
  if right(value, 1) = '*' then
    perform queue._invalid('a queue''s name may not end in *',
      'Patterns such as prefix* select queues; a queue needs a plain name.', 'queue: ' || value);
  end if;
end $$;

-- Raises: 22023 if the object has a key that is not in `known`, or is not an object.
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

-- Raises: 22023 unless each value that defer takes as text, integer or array is a JSON string, whole number
-- or array, or null.
create or replace function queue._check_types(what text, object jsonb)
returns void language plpgsql immutable parallel safe security invoker as $$
declare
  v_bad text;
begin
  select e.key into v_bad from jsonb_each(object) e
  where e.key in ('task', 'queue', 'lock', 'queueing_lock', 'concurrency_key', 'scheduled_at')
    and jsonb_typeof(e.value) not in ('string', 'null')
    or e.key = 'needs' and (jsonb_typeof(e.value) not in ('array', 'null')
      or jsonb_path_exists(e.value, '$[*] ? (@.type() == "string")'))
    or e.key = 'deadline' and jsonb_typeof(e.value) not in ('string', 'number', 'null')
    or e.key in ('priority', 'concurrency_limit')
      and not (e.value = 'null' or jsonb_typeof(e.value) = 'number'
        and e.value between '-2147483648' and '2147483647' and e.value::text ~ '^-?[0-9]+$')
  limit 1;
  if found then
    perform queue._invalid(format('%s has a value of a wrong type', what),
      'Names, keys and times are JSON strings, priority and concurrency_limit whole numbers, needs a list.',
      format('key: %s, value: %s', v_bad, left(object ->> v_bad, 200)));
  end if;
end $$;

-- Raises: 22023 unless the interval, which may be NULL, can be added to any time.
create or replace function queue._check_interval(what text, value interval)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if not queue._is_bounded(value) then
    perform queue._invalid(what || ' is out of range',
      'Pass an interval such as ''5 minutes'', from 0 to 4,000 years.', format('value: %s', value));
  end if;
end $$;

-- The interval of a JSON value, given as text or as a number of seconds. It refuses text that begins with a
-- minus, because its meaning depends on the setting IntervalStyle.
-- Raises: 22023 if it is not an interval, or one that can't be added to every time.
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
    perform queue._invalid(what || ' is not an interval',
      'Give an interval such as "5 minutes", or seconds as a number; from 0 to 4,000 years.',
      'value: ' || left(value::text, 200));
  end if;
  return v_interval;
end $$;

-- Whether an interval can be added to and subtracted from any time. No part of it may be negative: a month
-- less and 40 days more is a positive interval, but may still lead out of the calendar. And it must be at
-- most 4,000 years.
create or replace function queue._is_bounded(value interval)
returns boolean language plpgsql immutable parallel safe security invoker as $$
begin
  return value between interval '0' and interval '4000 years'
    and least(extract(year from value), extract(month from value), extract(day from value),
              extract(hour from value), extract(minute from value), extract(second from value)) >= 0;
end $$;

-- Raises: 22023 unless the time, which may be NULL, lies in the years 1 to 9999; or, with may_be_never, is
-- infinity. Every client can represent these years, and any interval may be added to them.
create or replace function queue._check_moment(what text, value timestamptz,
  may_be_never boolean default false)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if not (value >= '0001-01-03 00:00+00' and value < '10000-01-01 00:00+00' or may_be_never
    and value = 'infinity') then
    perform queue._invalid(what || case when value = 'infinity' then ' must be finite'
        else ' is out of range' end,
      'Pass a time in the years 1 to 9999' || case when may_be_never then ', or infinity.' else '.' end,
      format('value: %s', value));
  end if;
end $$;

-- Raises: 22023 unless the JSON value is a timestamp.
create or replace function queue._timestamp(what text, value jsonb)
returns timestamptz language plpgsql stable parallel unsafe security invoker as $$
begin
  if value is null or jsonb_typeof(value) = 'null' then
    return null;
  end if;
  if jsonb_typeof(value) = 'string' then
    begin
      return (value #>> '{}')::timestamptz;
    exception when others then
      null;  -- refused below, as any other value
    end;
  end if;
  perform queue._invalid(what || ' is not a timestamp',
    'Give a timestamp with a time zone, such as 2030-01-31T09:00:00Z.', 'value: ' || left(value::text, 200));
  return null;
end $$;

-- A time as text, independent of the session's time zone.
create or replace function queue._utc(p_at timestamptz)
returns text language plpgsql immutable parallel safe security invoker as $$
begin
  return (to_jsonb(p_at at time zone 'UTC') #>> '{}') || case when isfinite(p_at) then '+00:00' else '' end;
end $$;

-- Raises: 22023 if JSON takes more bytes as text than queue.configure allows; returns true otherwise. Values
-- stored in less than 2,000 bytes are not checked: no JSON prints more than 8,193 bytes for each stored byte.
-- A value from a table may be compressed, and shows its size only when it is read.
create or replace function queue._check_size(what text, value jsonb)
returns boolean language plpgsql stable parallel unsafe security invoker as $$
declare
  v_most integer;
  v_size bigint;
begin
  if pg_column_size(value) < 2000 and pg_column_compression(value) is null then
    return true;
  end if;
  select i.max_size into v_most from queue.installation i;
  -- A list of one-digit numbers takes twelve stored bytes for each three bytes of text.
  v_size := case when pg_column_size(value) / 5 > v_most then pg_column_size(value) / 5
    else queue._text_size(value, v_most) end;
  if v_size > v_most then
    perform queue._invalid(format('the JSON of %s is too large', what),
      'Keep large data elsewhere and pass a reference to it. The owner may raise the limit: queue.configure.',
      format('bytes as text: at least %s, allowed: %s', v_size, v_most));
  end if;
  return true;
end $$;

-- The number of bytes of args and headers as text, if args take more than 2,000, else NULL. fetch uses it to
-- count the size of its answer.
-- Raises: 22023 if they are larger than queue.configure allows.
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

-- The number of bytes of JSON as text. As soon as this is known to exceed p_most, it returns some number
-- above that. A number of 10 bytes may print 131,072 digits (1e131071). So large numbers are measured first,
-- one by one, and never turned into text all together.
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
  -- The text would take 1 GB, or is nested too deeply to measure.
  return greatest(v_size, p_most + 1::bigint);
end $$;

-- Raises: 22023 unless it is a valid number of jobs.
create or replace function queue._check_max_jobs(p_max_jobs integer)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if p_max_jobs is null or p_max_jobs < 1 then
    perform queue._invalid('max_jobs must be at least 1', 'Pass 1 or more.',
      format('max_jobs: %s', coalesce(p_max_jobs::text, 'NULL')));
  end if;
end $$;

-- Raises: 22023 unless it is a rate, {"limit", "per"}, or NULL.
create or replace function queue._check_rate(value jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
begin
  if value is null or jsonb_typeof(value) = 'null' then
    return;
  end if;
  perform queue._check_keys('rate', value, array['limit', 'per']);
  if jsonb_typeof(value -> 'limit') is distinct from 'number'
    or value ->> 'limit' !~ '^[1-9][0-9]{0,8}$'
    or coalesce(queue._interval('per', value -> 'per'), '0') = '0' then
    perform queue._invalid('rate needs a limit of at least 1 and an interval',
      'Pass {"limit": 10, "per": "1 minute"}.');
  end if;
end $$;

-- Raises: 22023 unless it is a jsonpath without variables.
create or replace function queue._jsonpath(p_path text)
returns jsonpath language plpgsql immutable parallel unsafe security invoker as $$
declare
  v_path jsonpath;
begin
  begin
    v_path := p_path::jsonpath;
    -- A template of datetime is read only if its input is text.
    perform jsonb_path_query('"x"', ('$.datetime(' || t[1] || ')')::jsonpath, '{}', true)
    from regexp_matches(v_path::text, replace('[.]datetime[(]("(?:~~.|[^"~~])*")[)]', '~', chr(92)), 'g') t;
  exception when syntax_error or data_exception or feature_not_supported or program_limit_exceeded then
    perform queue._invalid('not a jsonpath',
      'Write it as in $.items[*] ? (@.price > 3); quote odd names: $."a b".', sqlerrm);
  end;
  -- As text, a jsonpath has quotes around all names and texts.
  if strpos(regexp_replace(v_path::text, replace('"(?:~~.|[^"~~])*"', '~', chr(92)), '""', 'g'), '$""') > 0
    then
    perform queue._invalid('a jsonpath may not contain variables',
      'Write the value itself; $ alone stands for the args.', 'path: ' || left(p_path, 200));
  end if;
  return v_path;
end $$;
