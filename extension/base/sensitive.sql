-- Sensitive args: values that only the owner of the queue can read, and workers in the jobs that they claim.
-- register_task names them by paths. Everything that shows args puts *** in their place: views use
-- queue.hidden_paths and the macro masked, functions use _hidden_paths and _mask_args. They read the paths
-- when they show the args, so a change of a task's paths applies to all its jobs at once. A task without
-- paths costs nothing: a query that shows args looks once whether any task has paths.

-- Parses a list of texts into the steps of each path; NULL if there are none. A name is a text, an element
-- [2] its number, all elements [*] null.
-- Raises: 22023.
create or replace function queue._sensitive_paths(p_paths jsonb)
returns jsonb language plpgsql immutable parallel unsafe security invoker as $$
declare
  v_item jsonb;
  v_text text;
  v_path text;
  v_steps jsonb;
  v_found jsonb := '[]'::jsonb;
begin
  if coalesce(jsonb_typeof(p_paths), 'null') = 'null' then
    return null;
  elsif jsonb_typeof(p_paths) <> 'array' then
    perform queue._invalid('sensitive must be a list of paths',
      'Pass ["card.number", "password"].', 'type: ' || jsonb_typeof(p_paths));
  elsif jsonb_array_length(p_paths) > 100 then
    perform queue._invalid('sensitive has too many paths', 'Pass at most 100.',
      format('paths: %s', jsonb_array_length(p_paths)));
  end if;
  for v_item in select e.value from jsonb_array_elements(p_paths) e loop
    v_text := case when jsonb_typeof(v_item) = 'string' then v_item #>> '{}' end;
    if v_text is null or v_text = '' or octet_length(v_text) > 1000 then
      perform queue._invalid('a sensitive path must be a text of 1 to 1,000 bytes',
        'Write it as in card.number or cards[*].number.', 'value: ' || left(v_item::text, 200));
    end if;
    -- Path as PostgreSQL writes it: each name in quotes.
    v_path := queue._jsonpath(case when v_text ~ '^[[:space:]]*([$]|(lax|strict)[[:space:]])' then v_text
      else '$.' || v_text end)::text;
    if v_path !~ replace('^[$][.]"(~~.|[^"~~])*"([.]"(~~.|[^"~~])*"|[[][*][]]|[[][0-9]{1,9}[]])*$', '~',
      chr(92)) then
      perform queue._invalid('a sensitive path may only have names, [*] and numbers of elements',
        'Write it as in card.number, cards[*].number or items[0].price; quote odd names: "a b".c.',
        'path: ' || left(v_text, 200));
    end if;
    v_steps := (
      select jsonb_agg(case when s.part[1] is not null then s.part[1]::jsonb when s.part[2] <> '*'
        then to_jsonb(s.part[2]::integer) else 'null' end order by s.n)
      from regexp_matches(v_path, replace('[.]("(?:~~.|[^"~~])*")|[[]([*]|[0-9]+)[]]', '~', chr(92)), 'g')
        with ordinality s (part, n));
    if jsonb_array_length(v_steps) > 20 then
      perform queue._invalid('a sensitive path has too many steps', 'Use at most 20.',
        'path: ' || left(v_text, 200));
    elsif not exists (select from jsonb_array_elements(v_found) f where f.value = v_steps) then
      v_found := v_found || jsonb_build_array(v_steps);
    end if;
  end loop;
  return nullif(v_found, '[]');
end $$;

-- Raises: 22023 if a template among options names a sensitive arg: names of locks and keys are shown to all.
create or replace function queue._refuse_sensitive_templates(p_paths jsonb, p_options jsonb)
returns void language plpgsql immutable parallel safe security invoker as $$
declare
  v_found record;
begin
  select o.key, p.value ->> 0 as field into v_found
  from (
    select e.key, e.value #>> '{}' as template from jsonb_each(p_options) e
    where e.key in ('lock', 'queueing_lock', 'concurrency_key', 'share', 'group', 'idempotency_key')
    union all
    select 'concurrency', c.value ->> 'key'
    from jsonb_array_elements(case jsonb_typeof(p_options -> 'concurrency') when 'array'
      then p_options -> 'concurrency' end) c) o
  cross join jsonb_array_elements(p_paths) p
  where strpos(o.template, format('{%s}', p.value ->> 0)) > 0
  limit 1;
  if found then
    perform queue._invalid(v_found.key || ' names a sensitive field',
      'Names of locks and keys are shown to everybody: fill them from another field.',
      'field: ' || left(v_found.field, 200));
  end if;
end $$;

-- Returns the new defaults of a task, with the sensitive paths that only its old defaults have.
create or replace function queue._keep_paths(p_old jsonb, p_new jsonb)
returns jsonb language plpgsql immutable parallel unsafe security invoker as $$
declare
  v_old jsonb := nullif(p_old -> 'sensitive', 'null');
  v_added jsonb;
begin
  if v_old is null or v_old = '[]' then
    return p_new;
  end if;
  select coalesce(jsonb_agg(e.value order by e.n), '[]') into v_added
  from jsonb_array_elements(nullif(p_new -> 'sensitive', 'null')) with ordinality e (value, n)
  where not exists (
    select from jsonb_array_elements(queue._sensitive_paths(v_old)) o
    where jsonb_build_array(o.value) = queue._sensitive_paths(jsonb_build_array(e.value)));
  return p_new || jsonb_build_object('sensitive', v_old || v_added);
end $$;

-- The sensitive paths of all tasks that have some, if the caller may not see the args there, else NULL. An
-- application that connects as the owner sets pgdefer.hide_sensitive for users who may not see them.
create or replace function queue._hidden_paths()
returns jsonb language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select jsonb_object_agg(t.name, t.sensitive) from queue.task t
    where t.sensitive is not null
      and (coalesce(current_setting('pgdefer.hide_sensitive', true), '') not in ('', 'off')
        or not pg_has_role(queue._caller(), current_user, 'usage')));
end $$;

-- Returns args with *** in place of what the paths lead to; without paths it returns them unchanged.
create or replace function queue._mask_args(p_paths jsonb, p_args jsonb)
returns jsonb language plpgsql immutable parallel safe security invoker as $$
begin
  if p_paths is null or p_args is null then
    return p_args;
  end if;
  return (
    select c.args from (select p_args as args, p_paths as paths) x
    cross join lateral ({{masked}}) c (args));
end $$;

-- The new args of a caller who saw the old ones masked: each part that equals what was shown keeps its old
-- value.
-- Raises: 22023 for *** in another place that a path leads to.
create or replace function queue._unmask_args(p_paths jsonb, p_new jsonb, p_old jsonb)
returns jsonb language plpgsql immutable parallel unsafe security invoker as $$
declare
  v_args jsonb;
begin
  if p_paths is null then
    return p_new;
  end if;
  v_args := queue._restore_masked(p_new, p_old, queue._mask_args(p_paths, p_old), 50);
  if exists (
    select from (select v_args as args, p_paths as paths) x
    cross join lateral (
      with recursive {{walk}} select w.path, w.value from walk w where w.rest = '[]') w
    where w.value = '"***"' and p_old #> w.path is distinct from '"***"') then
    perform queue._invalid('args contain *** in place of a sensitive value',
      'Write the value itself, or leave the object or the whole array that holds it as it was shown.');
  end if;
  return v_args;
end $$;

-- Replaces each part of the new args that equals what was shown by its old value. It goes only as deep as
-- something is hidden, and at most p_depth levels, because tagged values may be nested without end.
create or replace function queue._restore_masked(p_new jsonb, p_old jsonb, p_shown jsonb, p_depth integer)
returns jsonb language plpgsql immutable parallel safe security invoker as $$
begin
  if p_new = p_shown then
    return p_old;
  elsif p_shown = p_old or p_depth = 0 or jsonb_typeof(p_new) <> 'object'
    or jsonb_typeof(p_shown) <> 'object' then
    return p_new;
  end if;
  return (
    select coalesce(jsonb_object_agg(e.key,
      case when p_shown ? e.key
        then queue._restore_masked(e.value, p_old -> e.key, p_shown -> e.key, p_depth - 1)
        else e.value end), '{}')
    from jsonb_each(p_new) e);
end $$;
