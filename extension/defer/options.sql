-- Reads and checks the options of defer, concurrency keys, retry policies and templates.
-- Tests: defer/defer.sql, base/checks.sql.

-- Every key that the options of defer may have.
create or replace function queue._option_keys()
returns text[] language plpgsql immutable parallel safe security invoker as $$
begin
  return array['delay', 'on_conflict', 'unique_until', 'lock_mode', 'needs_mode', 'on_need_failure',
    'on_limit', 'retry',
    'timeout', 'expires_at', 'held', 'description', 'headers', 'parent', 'retain', 'concurrency',
    'max_progress', 'share', 'idempotency_key', 'unique_for', 'max_wait', 'group'];
end $$;

-- Returns the options with expires_at as an absolute time in UTC, and without those that are JSON null,
-- except max_progress: there null means no limit.
-- Raises: 22023 for an unknown key or an invalid value.
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
    elsif v_option.key = 'retain' and v_option.type = 'object' then
      v_options := v_options || jsonb_build_object('retain', queue._check_retain(v_option.value));
    elsif v_option.key in ('delay', 'timeout', 'retain', 'unique_for', 'max_wait') then
      perform queue._interval(v_option.key, v_option.value);
      if v_option.key = 'timeout' and queue._interval(v_option.key, v_option.value) = interval '0' then
        perform queue._invalid('timeout must be longer than 0', 'Leave timeout out for no limit.');
      elsif v_option.key = 'unique_for' and queue._interval(v_option.key, v_option.value) = interval '0' then
        perform queue._invalid('unique_for must be longer than 0',
          'Leave out unique_for for 1 day, or leave out idempotency_key.');
      elsif v_option.type = 'number' then
        -- It is used as the text of an interval, which must not have too many digits.
        v_options := v_options || jsonb_build_object(v_option.key,
          trim_scale(round(v_option.text::numeric, 6)));
      end if;
    elsif v_option.key = 'expires_at' then
      perform queue._check_moment('expires_at', queue._timestamp('expires_at', v_option.value));
      v_options := v_options || jsonb_build_object('expires_at',
        queue._utc(queue._timestamp('expires_at', v_option.value)));
    elsif v_option.key = 'held' and v_option.type <> 'boolean' then
      perform queue._invalid('held must be true or false', 'Pass a JSON boolean.');
    elsif v_option.key = 'description' and v_option.type <> 'string' then
      perform queue._invalid('description must be text', 'Pass a JSON string.');
    elsif v_option.key = 'headers' and v_option.type <> 'object' then
      perform queue._invalid('headers must be a JSON object',
        'Pass an object such as {"traceparent": "00-..."}.');
    elsif v_option.key = 'parent' and (v_option.type <> 'number' or v_option.text !~ '^[0-9]{1,18}$')
      or v_option.key = 'max_progress' and v_option.type <> 'null'
      and (v_option.type <> 'number' or v_option.text !~ '^[0-9]{1,9}$') then
      perform queue._invalid(format('%s must be a whole number', v_option.key),
        'Pass a number that is not negative.');
    elsif v_option.key in ('share', 'idempotency_key', 'group') then
      if v_option.type <> 'string' then
        perform queue._invalid(v_option.key || ' must be text', 'Pass a JSON string.');
      elsif v_option.text <> '' then
        perform queue._check_name(v_option.key, v_option.text);
        perform queue._check_template(v_option.key, v_option.text);
      end if;
    elsif v_option.key = 'concurrency' then
      perform queue._check_concurrency(null, null, v_option.value);
    elsif v_option.key = 'retry' then
      perform queue._check_retry(v_option.value);
    end if;
  end loop;
  return v_options;
end $$;

-- Refuses a parent in checked options that serve many jobs (a task's defaults, a schedule): once the parent
-- was removed, every use of them would fail.
-- Raises: 22023.
create or replace function queue._check_no_parent(options jsonb)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if options ? 'parent' then
    perform queue._invalid('parent belongs to a single job',
      'Pass it in the options of queue.defer, with each job.', 'parent: ' || (options ->> 'parent'));
  end if;
end $$;

-- Checks how long to keep a job by its outcome, and returns the intervals as they were given, without those
-- that are null. They are not rewritten: the text of an interval depends on the setting IntervalStyle, and
-- schedule compares options.
-- Raises: 22023.
create or replace function queue._check_retain(p_retain jsonb)
returns jsonb language plpgsql stable parallel unsafe security invoker as $$
declare
  v_entry record;
  v_retain jsonb := '{}'::jsonb;
begin
  for v_entry in select e.key, e.value from jsonb_each(p_retain) e loop
    if not v_entry.key = any ('{succeeded,failed,cancelled}') then
      perform queue._invalid('retain has an unknown outcome', 'Allowed: succeeded, failed, cancelled.',
        'outcome: ' || left(v_entry.key, 200));
    elsif v_entry.value <> 'null' then
      perform queue._interval('retain.' || v_entry.key, v_entry.value);
      v_retain := v_retain || jsonb_build_object(v_entry.key,
        case when jsonb_typeof(v_entry.value) = 'number'
          then to_jsonb(trim_scale(round(v_entry.value::numeric, 6))) else v_entry.value end);
    end if;
  end loop;
  return v_retain;
end $$;

-- Combines the keys and limits of concurrency_key, concurrency_limit and options.concurrency. terms: the rate
-- and weight of each key, if any key has more than a limit; jobs keep them among their options.
-- Raises: 22023.
create or replace function queue._check_concurrency(key text, key_limit integer, list jsonb, out keys text[],
  out limits integer[], out terms jsonb)
language plpgsql stable parallel unsafe security invoker as $$
declare
  v_item jsonb;
  v_rate jsonb;
  v_weight integer;
  v_terms jsonb := '[]'::jsonb;
begin
  if key <> '' then
    if key_limit is null or key_limit < 1 then
      perform queue._invalid('concurrency_key needs a concurrency_limit of at least 1',
        'Give a limit with the key, or register one for the task.',
        format('concurrency_limit: %s', coalesce(key_limit::text, 'NULL')));
    end if;
    perform queue._check_name('concurrency_key', key);
    perform queue._check_template('concurrency_key', key);
    keys := array[key];
    limits := array[key_limit];
    v_terms := '[null]';
  elsif key_limit < 1 then
    perform queue._invalid('concurrency_limit must be at least 1', 'Give a limit of 1 or more.',
      format('concurrency_limit: %s', key_limit));
  end if;
  if list is null or jsonb_typeof(list) = 'null' then
    return;
  elsif jsonb_typeof(list) <> 'array' then
    perform queue._invalid('concurrency must be a list', 'Pass a list of {"key": text, "limit": number}.');
  end if;
  if jsonb_array_length(list) + coalesce(cardinality(keys), 0) > {{most_keys}} then
    perform queue._invalid(format('a job has at most %s concurrency keys', {{most_keys}}), 'Name fewer keys.',
      format('keys: %s', jsonb_array_length(list) + coalesce(cardinality(keys), 0)));
  end if;
  for v_item in select jsonb_array_elements(list) loop
    perform queue._check_keys('concurrency', v_item, array['key', 'limit', 'rate', 'weight']);
    v_rate := nullif(v_item -> 'rate', 'null');
    if jsonb_typeof(v_item -> 'key') is distinct from 'string'
      or jsonb_typeof(v_item -> 'limit') is distinct from 'number'
        and (v_item ->> 'limit' is not null or v_rate is null)
      or v_item ->> 'limit' !~ '^[1-9][0-9]{0,8}$' then
      perform queue._invalid('concurrency must be a list of keys with limits',
        'Pass {"key": text, "limit": a whole number from 1 to 999,999,999}, or a rate in its place.',
        'item: ' || left(v_item::text, 200));
    elsif coalesce(jsonb_typeof(v_item -> 'weight'), 'null') not in ('number', 'null')
      or v_item ->> 'weight' !~ '^[1-9][0-9]{0,8}$' then
      perform queue._invalid('weight must be a whole number from 1 to 999,999,999',
        'It is how much of the limit and the rate the job takes.', 'item: ' || left(v_item::text, 200));
    end if;
    perform queue._check_rate(v_rate);
    v_weight := coalesce((v_item ->> 'weight')::integer, 1);
    if v_weight > least((v_item ->> 'limit')::integer, (v_rate ->> 'limit')::integer) then
      perform queue._invalid('weight is above the limit',
        'Pass a weight of at most the limit and the rate.', 'item: ' || left(v_item::text, 200));
    end if;
    v_terms := v_terms || jsonb_strip_nulls(jsonb_build_object('rate', v_rate,
      'weight', nullif(v_weight, 1)));
    terms := case when terms is not null or v_rate is not null or v_weight > 1 then v_terms end;
    perform queue._check_name('concurrency key', v_item ->> 'key');
    perform queue._check_template('concurrency_key', v_item ->> 'key');
    if v_item ->> 'key' = any (keys) then
      perform queue._invalid('a concurrency key is named twice', 'Name each key once.',
        'key: ' || (v_item ->> 'key'));
    end if;
    keys := keys || (v_item ->> 'key');
    limits := limits || (v_item ->> 'limit')::integer;
  end loop;
end $$;

-- Raises: 22023 if it is not a retry policy.
create or replace function queue._check_retry(policy jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
declare
  v_item record;
begin
  perform queue._check_keys('retry', policy,
    array['max_attempts', 'backoff', 'base', 'factor', 'cap', 'first', 'jitter', 'on_crash',
    'max_crashes', 'wait', 'linear_wait', 'exponential_wait']);
  for v_item in select e.key, e.value, jsonb_typeof(e.value) as type, e.value #>> '{}' as text
    from jsonb_each(policy) e where e.value <> 'null' loop
    case
      when v_item.key in ('max_attempts', 'max_crashes') then
        if v_item.type <> 'number' or v_item.text !~ '^[1-9][0-9]{0,8}$' then
          perform queue._invalid(format('retry: %s must be a whole number from 1 to 999,999,999, or null',
            v_item.key), 'null means no limit.', 'value: ' || left(v_item.text, 200));
        end if;
      when v_item.key = 'backoff' then
        if v_item.type <> 'string' or v_item.text not in ('constant', 'linear', 'exponential') then
          perform queue._invalid('retry: backoff is not one of its values',
            'Allowed: constant, linear, exponential.', 'value: ' || left(v_item.text, 200));
        end if;
      when v_item.key = 'on_crash' then
        if v_item.type <> 'string' or v_item.text not in ('retry', 'fail') then
          perform queue._invalid('retry: on_crash is not one of its values', 'Allowed: retry, fail.',
            'value: ' || left(v_item.text, 200));
        end if;
      when v_item.key in ('base', 'cap', 'first') then
        perform queue._interval('retry: ' || v_item.key, v_item.value);
      else
        if v_item.type <> 'number' or v_item.value < '0' or v_item.key = 'jitter' and v_item.value > '1' then
          perform queue._invalid(format('retry: %s must be a number %s', v_item.key,
            case when v_item.key = 'jitter' then 'from 0 to 1' else 'of at least 0' end),
            'Pass a JSON number.', 'value: ' || left(v_item.text, 200));
        end if;
    end case;
  end loop;
  if jsonb_strip_nulls(policy) ?| '{wait,linear_wait,exponential_wait}'
    and jsonb_strip_nulls(policy) ?| '{backoff,base,factor,cap,first}' then
    perform queue._invalid('retry: two kinds of policy are mixed',
      'Use wait, linear_wait, exponential_wait, or backoff with base, factor, cap, first.');
  end if;
end $$;

-- Raises: 22023 if _fill would refuse the template with any args.
create or replace function queue._check_template(what text, template text)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if strpos(template, '{{') > 0
    and regexp_replace(template, '[{][{]|[}][}]|[{][^{}]*[}]', '', 'g') ~ '[{}]' then
    perform queue._invalid(format('%s has a single brace beside doubled ones', what),
      'Double each brace that encloses no field.', 'template: ' || left(template, 200));
  end if;
end $$;

-- Fills {field} from args. It is an error if args lack the field, or if its value is not a scalar. Of a
-- client's tagged value, {"__pgdefer__": type, "value": text}, the text counts, so that a UUID gives the same
-- lock whether Python or a trigger wrote it. A doubled brace stands for one brace. A single brace that
-- encloses no field stands for itself, but is an error if the template contains a doubled left brace.
-- Raises: 22023, also if the filled text is not a valid name.
create or replace function queue._fill(what text, template text, args jsonb)
returns text language plpgsql immutable parallel safe security invoker as $$
declare
  v_parts text[];
  v_text text;
  v_is_doubled boolean;
  v_end integer;
  v_value jsonb;
begin
  if strpos(template, '{') = 0 and strpos(template, '}}') = 0 then
    perform queue._check_name(what, template);
    return template;
  end if;
  perform queue._check_template(what, template);
  v_parts := string_to_array(template, '{');
  v_text := replace(v_parts[1], '}}', '}');
  for i in 2 .. cardinality(v_parts) loop
    v_end := strpos(v_parts[i], '}');
    if v_parts[i] = '' and v_is_doubled is not true and i < cardinality(v_parts) then
      v_is_doubled := true;
    elsif v_end = 0 or v_is_doubled then
      v_text := v_text || '{' || replace(v_parts[i], '}}', '}');
      v_is_doubled := false;
    else
      v_value := args -> left(v_parts[i], v_end - 1);
      if v_value ? '__pgdefer__' then
        v_value := v_value -> 'value';
      end if;
      if coalesce(jsonb_typeof(v_value), 'null') in ('object', 'array', 'null') then
        perform queue._invalid(format('%s names a field that args do not fill', what),
          'Pass each {field} in args as a text, number or boolean. Defaults of the handler do not count.',
          format('template: %s, field: %s', template, left(v_parts[i], v_end - 1)));
      end if;
      v_text := v_text || (v_value #>> '{}') || replace(substr(v_parts[i], v_end + 1), '}}', '}');
    end if;
  end loop;
  if v_text = '' then
    perform queue._invalid(format('%s is empty with these args', what),
      'At least one {field} must not be an empty text.', 'template: ' || template);
  end if;
  perform queue._check_name(what, v_text);
  return v_text;
end $$;

-- Returns the template that _fill turns back into this text.
create or replace function queue._literal(p_text text)
returns text language plpgsql immutable parallel safe security invoker as $$
begin
  return replace(replace(p_text, '{', '{{'), '}', '}}');
end $$;
