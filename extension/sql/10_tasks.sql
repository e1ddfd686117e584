-- Tasks: names with defaults. Nothing needs a registration; it only fills what a call leaves NULL.

-- Locks: where something changes, the task's row. Raises: 22023.
create or replace function queue.register_task(name text, defaults jsonb default '{}')
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_defaults jsonb := coalesce(defaults, '{}');
  v_options jsonb;
  v_keys text[];
  v_limits integer[];
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  perform queue._check_name('task', register_task.name);
  perform queue._check_keys('defaults', v_defaults, array['queue', 'priority', 'lock', 'queueing_lock', 'deadline',
    'concurrency_key', 'concurrency_limit'] || queue._option_keys());
  if exists (select from queue.task t where t.name = register_task.name and t.defaults = v_defaults) then
    return;
  end if;
  perform queue._check_types('defaults', v_defaults);
  if v_defaults ->> 'queue' <> '' then
    perform queue._check_queue(v_defaults ->> 'queue');
  end if;
  if octet_length(v_defaults ->> 'lock') > 1000 then
    perform queue._check_name('lock', v_defaults ->> 'lock');
  elsif octet_length(v_defaults ->> 'queueing_lock') > 1000 then
    perform queue._check_name('queueing_lock', v_defaults ->> 'queueing_lock');
  end if;
  v_options := queue._check_options(v_defaults - '{queue,priority,lock,queueing_lock,deadline,concurrency_key,concurrency_limit}'::text[]);
  select k.keys, k.limits into v_keys, v_limits
  from queue._check_concurrency(v_defaults ->> 'concurrency_key', (v_defaults ->> 'concurrency_limit')::integer,
                                v_options -> 'concurrency') k;
  insert into queue.task as t (name, queue, priority, lock, queueing_lock, deadline, keys, limits, options, defaults, is_plain)
  values (register_task.name, nullif(v_defaults ->> 'queue', ''), (v_defaults ->> 'priority')::integer, nullif(v_defaults ->> 'lock', ''),
          nullif(v_defaults ->> 'queueing_lock', ''), queue._interval('deadline', v_defaults -> 'deadline'), v_keys, v_limits,
          nullif(v_options - '{retry,concurrency}'::text[], '{}'), v_defaults,
          not v_defaults ?| '{lock,queueing_lock,deadline,concurrency_key}'::text[] and v_options - 'retry' = '{}')
  on conflict on constraint task_pkey do update
    set (queue, priority, lock, queueing_lock, deadline, keys, limits, options, defaults, is_plain)
      = (excluded.queue, excluded.priority, excluded.lock, excluded.queueing_lock, excluded.deadline, excluded.keys,
         excluded.limits, excluded.options, excluded.defaults, excluded.is_plain)
    where t.defaults <> excluded.defaults;
end $$;
comment on function queue.register_task(text, jsonb) is
  'Sets what defer uses where a call leaves an argument NULL: queue, priority, lock, queueing_lock, deadline (an interval from the time of deferring), concurrency_key, concurrency_limit and every key of options. The same defaults again change nothing; jobs already deferred keep theirs, the retry policy excepted, which is read when an attempt ends.';

-- Raises: 22023 unless what defer takes as text, integer or array is a JSON string, whole number or array, or null.
create or replace function queue._check_types(what text, object jsonb)
returns void language plpgsql immutable parallel safe security invoker as $$
declare
  v_bad text;
begin
  select e.key into v_bad from jsonb_each(object) e
  where e.key in ('task', 'queue', 'lock', 'queueing_lock', 'concurrency_key', 'scheduled_at') and jsonb_typeof(e.value) not in ('string', 'null')
    or e.key = 'needs' and jsonb_typeof(e.value) not in ('array', 'null')
    or e.key = 'deadline' and jsonb_typeof(e.value) not in ('string', 'number', 'null')
    or e.key in ('priority', 'concurrency_limit')
      and not (e.value = 'null' or jsonb_typeof(e.value) = 'number' and e.value between '-2147483648' and '2147483647' and e.value::text ~ '^-?[0-9]+$')
  limit 1;
  if found then
    perform queue._invalid(format('%s has a value of a wrong type', what), 'Names, keys and times are JSON strings, priority and concurrency_limit whole numbers, needs a list.',
                           format('key: %s, value: %s', v_bad, left(object ->> v_bad, 200)));
  end if;
end $$;

-- Every key that defer's options may have.
create or replace function queue._option_keys()
returns text[] language plpgsql immutable parallel safe security invoker as $$
begin
  return array['delay', 'on_conflict', 'unique_until', 'lock_mode', 'needs_mode', 'on_need_failure', 'on_limit', 'retry',
    'timeout', 'expires_at', 'held', 'description', 'headers', 'parent', 'retain', 'concurrency', 'max_progress'];
end $$;

-- Returns the options without those that are JSON null, max_progress excepted, and expires_at as the moment
-- that it means now, in UTC.
-- Raises: 22023 for an unknown key or a value that it can't have.
create or replace function queue._check_options(options jsonb)
returns jsonb language plpgsql stable parallel unsafe security invoker as $$
declare
  v_option record;
  v_options jsonb := '{}'::jsonb;
  v_allowed text[];
begin
  if jsonb_typeof(options) <> 'object' or options - queue._option_keys() <> '{}'::jsonb then
    perform queue._check_keys('options', options, queue._option_keys());
  end if;
  perform queue._check_size('options', options);
  for v_option in
    select e.key, e.value, jsonb_typeof(e.value) as type, e.value #>> '{}' as text
    from jsonb_each(options) e where e.value <> 'null' or e.key = 'max_progress'
  loop
    v_options := v_options || jsonb_build_object(v_option.key, v_option.value);
    v_allowed := case v_option.key
      when 'on_conflict' then '{raise,ignore,replace}'::text[]
      when 'unique_until' then '{start,finish}'::text[]
      when 'lock_mode' then '{ordered,mutex}'::text[]
      when 'needs_mode' then '{all,any}'::text[]
      when 'on_need_failure' then '{block,proceed}'::text[]
      when 'on_limit' then '{block,discard}'::text[]
    end;
    if v_allowed is not null then
      if v_option.type <> 'string' or not v_option.text = any (v_allowed) then
        perform queue._invalid(format('%s is not one of its values', v_option.key),
                               format('Allowed: %s.', array_to_string(v_allowed, ', ')), 'value: ' || left(v_option.text, 200));
      end if;
    elsif v_option.key in ('delay', 'timeout', 'retain') then
      perform queue._interval(v_option.key, v_option.value);
      if v_option.key = 'timeout' and queue._interval(v_option.key, v_option.value) = interval '0' then
        perform queue._invalid('timeout must be longer than 0', 'Leave timeout out for no limit.');
      elsif v_option.type = 'number' then
        -- as its text is read as an interval where it is used, which may not have too many digits
        v_options := v_options || jsonb_build_object(v_option.key, trim_scale(round(v_option.text::numeric, 6)));
      end if;
    elsif v_option.key = 'expires_at' then
      perform queue._check_moment('expires_at', queue._timestamp('expires_at', v_option.value));
      v_options := v_options || jsonb_build_object('expires_at', queue._utc(queue._timestamp('expires_at', v_option.value)));
    elsif v_option.key = 'held' and v_option.type <> 'boolean' then
      perform queue._invalid('held must be true or false', 'Pass a JSON boolean.');
    elsif v_option.key = 'description' and v_option.type <> 'string' then
      perform queue._invalid('description must be text', 'Pass a JSON string.');
    elsif v_option.key = 'headers' and v_option.type <> 'object' then
      perform queue._invalid('headers must be a JSON object', 'Pass an object such as {"traceparent": "00-..."}.');
    elsif v_option.key = 'parent' and (v_option.type <> 'number' or v_option.text !~ '^[0-9]{1,18}$')
      or v_option.key = 'max_progress' and v_option.type <> 'null' and (v_option.type <> 'number' or v_option.text !~ '^[0-9]{1,9}$') then
      perform queue._invalid(format('%s must be a whole number', v_option.key), 'Pass a number that is not negative.');
    elsif v_option.key = 'concurrency' then
      perform queue._check_concurrency(null, null, v_option.value);
    elsif v_option.key = 'retry' then
      perform queue._check_retry(v_option.value);
    end if;
  end loop;
  return v_options;
end $$;

-- Raises: 22023 unless the JSON value is a timestamp.
create or replace function queue._timestamp(what text, value jsonb)
returns timestamptz language plpgsql stable parallel unsafe security invoker as $$
begin
  if value is null or jsonb_typeof(value) = 'null' then
    return null;
  end if;
  return (value #>> '{}')::timestamptz;
exception when others then
  perform queue._invalid(what || ' is not a timestamp', 'Give a timestamp with a time zone, such as 2030-01-31T09:00:00Z.',
                         'value: ' || left(value::text, 200));
  return null;
end $$;

-- A moment as it is written down, the same whatever the session's time zone.
create or replace function queue._utc(p_at timestamptz)
returns text language plpgsql immutable parallel safe security invoker as $$
begin
  return (to_jsonb(p_at at time zone 'UTC') #>> '{}') || case when isfinite(p_at) then '+00:00' else '' end;
end $$;

-- The keys and limits that concurrency_key, concurrency_limit and options.concurrency give together.
-- Raises: 22023.
create or replace function queue._check_concurrency(key text, key_limit integer, list jsonb, out keys text[], out limits integer[])
language plpgsql stable parallel safe security invoker as $$
declare
  v_item jsonb;
begin
  if key <> '' then
    if key_limit is null or key_limit < 1 then
      perform queue._invalid('concurrency_key needs a concurrency_limit of at least 1', 'Give a limit with the key, or register one for the task.',
                             format('concurrency_limit: %s', coalesce(key_limit::text, 'NULL')));
    end if;
    perform queue._check_name('concurrency_key', key);
    keys := array[key];
    limits := array[key_limit];
  elsif key_limit < 1 then
    perform queue._invalid('concurrency_limit must be at least 1', 'Give a limit of 1 or more.', format('concurrency_limit: %s', key_limit));
  end if;
  if list is null or jsonb_typeof(list) = 'null' then
    return;
  elsif jsonb_typeof(list) <> 'array' then
    perform queue._invalid('concurrency must be a list', 'Pass a list of {"key": text, "limit": number}.');
  end if;
  for v_item in select jsonb_array_elements(list) loop
    perform queue._check_keys('concurrency', v_item, array['key', 'limit']);
    if jsonb_typeof(v_item -> 'key') is distinct from 'string' or jsonb_typeof(v_item -> 'limit') is distinct from 'number'
      or v_item ->> 'limit' !~ '^[1-9][0-9]{0,8}$' then
      perform queue._invalid('concurrency must be a list of keys with limits', 'Pass {"key": text, "limit": a whole number of at least 1}.',
                             'item: ' || v_item::text);
    end if;
    perform queue._check_name('concurrency key', v_item ->> 'key');
    if v_item ->> 'key' = any (keys) then
      perform queue._invalid('a concurrency key is named twice', 'Name each key once.', 'key: ' || (v_item ->> 'key'));
    end if;
    keys := keys || (v_item ->> 'key');
    limits := limits || (v_item ->> 'limit')::integer;
  end loop;
end $$;

-- Fills {field} from args. A field that args lack, or that is no scalar, is an error. A client's tagged
-- value, {"__pgdefer__": type, "value": text}, counts as its text, so that a UUID names the same lock
-- whether Python or a trigger wrote it.
-- Raises: 22023; also where the outcome is no name.
create or replace function queue._fill(what text, template text, args jsonb)
returns text language plpgsql immutable parallel safe security invoker as $$
declare
  v_parts text[] := string_to_array(template, '{');
  v_text text := v_parts[1];
  v_end integer;
  v_value jsonb;
begin
  for i in 2 .. cardinality(v_parts) loop
    v_end := strpos(v_parts[i], '}');
    if v_end = 0 then
      v_text := v_text || '{' || v_parts[i];
    else
      v_value := args -> left(v_parts[i], v_end - 1);
      if v_value ? '__pgdefer__' then
        v_value := v_value -> 'value';
      end if;
      if coalesce(jsonb_typeof(v_value), 'null') in ('object', 'array', 'null') then
        perform queue._invalid(format('%s names a field that args do not fill', what), 'Every {field} must be a text, number or boolean in args.',
                               format('template: %s, field: %s', template, left(v_parts[i], v_end - 1)));
      end if;
      v_text := v_text || (v_value #>> '{}') || substr(v_parts[i], v_end + 1);
    end if;
  end loop;
  perform queue._check_name(what, v_text);
  return v_text;
end $$;
