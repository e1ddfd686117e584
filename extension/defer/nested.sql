-- Jobs as JSON, whose options may stand beside their other keys or in `options`.
-- Tests: defer/defer.sql, defer/tasks.sql.

-- Returns an object with its options beside its other keys.
-- Raises: 22023 for an unknown option, and for one that is given twice.
create or replace function queue._flat(what text, object jsonb)
returns jsonb language plpgsql immutable parallel safe security invoker as $$
declare
  v_options jsonb := nullif(object -> 'options', 'null');
  v_key text;
begin
  if jsonb_typeof(object) <> 'object' or not object ? 'options' then
    return object;
  end if;
  perform queue._check_keys('options', v_options, queue._option_keys());
  select k into v_key from jsonb_object_keys(v_options) k where object ? k limit 1;
  if found then
    perform queue._invalid(format('%s has an option twice', what),
      'Give it beside the other keys or in options, not in both.', 'key: ' || v_key);
  end if;
  return object - 'options' || coalesce(v_options, '{}');
end $$;

-- Returns an object with its options in `options`, and its other keys, which must be in `known`.
-- Raises: 22023 if it is not an object, for an unknown key, and for an option that is given twice.
create or replace function queue._nested(what text, object jsonb, known text[])
returns jsonb language plpgsql immutable parallel safe security invoker as $$
declare
  v_flat jsonb;
begin
  if jsonb_typeof(object) = 'object' and object - known - 'options' = '{}' then
    return object;
  end if;
  v_flat := queue._flat(what, object);
  perform queue._check_keys(what, v_flat, known || '{options}'::text[] || queue._option_keys());
  return v_flat - queue._option_keys() || jsonb_build_object('options', v_flat - known);
end $$;

-- Returns jobs, as defer_many takes them, with all options in `options`.
-- Raises: 22023.
create or replace function queue._nested_jobs(p_jobs jsonb)
returns jsonb language plpgsql immutable parallel safe security invoker as $$
begin
  return (
    select coalesce(jsonb_agg(queue._nested('a job', e.job, {{job_keys}}) order by e.n), '[]')
    from jsonb_array_elements(p_jobs) with ordinality e (job, n));
end $$;
