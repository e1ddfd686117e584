-- Tasks: names with defaults. Registration is optional: it only fills arguments that a call leaves NULL.

-- Locks: the task's row if something changes. Raises: 22023; 42501 if a role other than the owner sets or
-- changes a function.
-- Why only the owner can drop a sensitive path: the old paths are read from the row that the insert has
-- locked.
create or replace function queue.register_task(name text, defaults jsonb default '{}')
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_defaults jsonb := queue._flat('defaults', coalesce(defaults, '{}'));
  v_before jsonb;
  v_options jsonb;
  v_keys text[];
  v_limits integer[];
  v_terms jsonb;
  v_function text;
  v_sensitive jsonb;
  v_is_owner boolean := pg_has_role(queue._caller(), current_user, 'usage');
begin
  {{installed}}
  perform queue._check_name('task', register_task.name);
  perform queue._check_keys('defaults', v_defaults,
    {{argument_keys}} || '{function,sensitive}'::text[] || queue._option_keys());
  if exists (select from queue.task t where t.name = register_task.name and t.defaults = v_defaults) then
    return;
  end if;
  perform queue._check_types('defaults', v_defaults);
  v_sensitive := queue._sensitive_paths(v_defaults -> 'sensitive');
  v_function := queue._task_function(register_task.name, v_defaults -> 'function');
  if v_defaults ->> 'queue' <> '' then
    perform queue._check_queue(v_defaults ->> 'queue');
  end if;
  perform queue._check_name(t.key, v_defaults ->> t.key), queue._check_template(t.key, v_defaults ->> t.key)
  from unnest('{lock,queueing_lock}'::text[]) t (key) where v_defaults ->> t.key <> '';
  v_options := queue._check_options(v_defaults - ({{argument_keys}} || '{function,sensitive}'::text[]));
  perform queue._check_no_parent(v_options);
  select k.keys, k.limits, k.terms into v_keys, v_limits, v_terms
  from queue._check_concurrency(v_defaults ->> 'concurrency_key',
    (v_defaults ->> 'concurrency_limit')::integer, v_options -> 'concurrency') k;
  if v_keys is null and v_defaults ->> 'concurrency_limit' is not null then
    v_limits := array[(v_defaults ->> 'concurrency_limit')::integer];  -- for calls that give a key
  end if;
  select t.defaults into v_before from queue.task t
  where t.name = register_task.name for no key update;
  insert into queue.task as t (name, queue, priority, lock, queueing_lock, deadline, keys, limits, options,
    function, sensitive, defaults, is_plain)
  values (register_task.name, nullif(v_defaults ->> 'queue', ''), (v_defaults ->> 'priority')::integer,
    nullif(v_defaults ->> 'lock', ''), nullif(v_defaults ->> 'queueing_lock', ''),
    queue._interval('deadline', v_defaults -> 'deadline'), v_keys, v_limits,
    nullif(v_options - '{retry,concurrency}'::text[]
      || case when v_terms is not null then jsonb_build_object('terms', v_terms) else '{}' end, '{}'),
    v_function, v_sensitive, v_defaults,
    not v_defaults ?| '{lock,queueing_lock,deadline,concurrency_key}'::text[] and v_options - 'retry' = '{}')
  on conflict on constraint task_pkey do update
    set (queue, priority, lock, queueing_lock, deadline, keys, limits, options, function, sensitive, defaults,
         is_plain)
      = (excluded.queue, excluded.priority, excluded.lock, excluded.queueing_lock, excluded.deadline,
         excluded.keys, excluded.limits, excluded.options, excluded.function,
         case when v_is_owner then excluded.sensitive
           else queue._sensitive_paths(queue._keep_paths(t.defaults, excluded.defaults) -> 'sensitive') end,
         case when v_is_owner then excluded.defaults
           else queue._keep_paths(t.defaults, excluded.defaults) end, excluded.is_plain)
    where t.defaults <> case when v_is_owner then excluded.defaults
      else queue._keep_paths(t.defaults, excluded.defaults) end
  returning t.sensitive into v_sensitive;
  if found then
    perform queue._refuse_sensitive_templates(v_sensitive, v_defaults);
    perform queue._audit('register_task', jsonb_build_object('name', register_task.name, 'defaults',
      v_defaults), p_before => v_before);
  end if;
end $$;
comment on function queue.register_task(text, jsonb) is
  'Sets the task''s defaults, which defer uses for arguments that are NULL: queue, priority, lock,'
    ' queueing_lock, deadline (an interval from the time of deferring), concurrency_key, concurrency_limit'
    ' and every key of options but parent. function: the schema.name of a database function that takes the'
    ' args as one jsonb and runs the task (queue.work, queue.run_function); only the owner of the queue may'
    ' set it. sensitive: a list of paths to args, such as card.number or cards[*].number, that only the'
    ' owner and workers can read. Other roles read ***, also in jobs already deferred; they may add paths,'
    ' but not remove any. Calling it again with the same defaults has no effect. Jobs already deferred keep'
    ' their defaults, except for the retry policy, which is read when an attempt ends.';

-- Returns the function that a task's defaults name, with its schema; NULL for none. Workers run it with their
-- own rights, so a role that could set a function could act with these rights. Therefore only a role with the
-- owner's rights may set, change or remove one.
-- Raises: 22023, 42501.
create or replace function queue._task_function(p_task text, p_value jsonb)
returns text language plpgsql stable parallel unsafe security invoker as $$
declare
  v_parts text[];
  v_function text;
  v_old text := (select t.function from queue.task t where t.name = p_task);
begin
  if jsonb_typeof(p_value) <> 'null' then
    begin
      v_parts := parse_ident(case when jsonb_typeof(p_value) = 'string' then p_value #>> '{}' end);
    exception when invalid_parameter_value then
      null;
    end;
    select format('%I.%I', n.nspname, p.proname) into v_function
    from pg_proc p join pg_namespace n on n.oid = p.pronamespace
    where cardinality(v_parts) = 2 and p.oid = to_regprocedure(format('%I.%I(jsonb)', v_parts[1], v_parts[2]))
      and n.nspname !~ '^pg_temp'
      and p.prokind = 'f' and not p.proretset and p.prorettype <> 'trigger'::regtype;
    if v_function is null then
      perform queue._invalid('function does not name a function that takes one jsonb',
        'Pass schema.name of a function that takes the args as jsonb and returns one value, or void.',
        'value: ' || left(p_value::text, 200));
    end if;
  end if;
  if v_function is distinct from v_old and not pg_has_role(queue._caller(), current_user, 'usage') then
    raise exception using errcode = '42501',
      message = 'only the owner of the queue may set a task''s function',
      detail = format('task: %s, function: %s', left(p_task, 200), coalesce(v_function, v_old)),
      hint = 'Have the owner call queue.register_task.';
  end if;
  return v_function;
end $$;
