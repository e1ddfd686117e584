-- Triggers that defer jobs. PostgreSQL does not call a trigger when it is created, so without these checks
-- its faults would show only at the rows of an application.

-- Raises: 22023.
create or replace function queue.check_triggers(of_table regclass default null)
returns void language plpgsql stable parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_fault record;
begin
  {{installed}}
  select * into v_fault from queue._faulty_triggers(check_triggers.of_table) limit 1;
  if found then
    perform queue._invalid('a trigger would refuse each row: ' || v_fault.fault,
      'Drop it, and create it with other arguments.', 'trigger: ' || v_fault.name);
  end if;
end $$;
comment on function queue.check_triggers(regclass) is
  'Raises 22023 if a trigger with queue.defer_trigger, of this table or of any, has arguments that defer'
    ' would refuse at each row, such as an unknown option or a {field} that is no column. Call it after'
    ' create trigger.';

-- The triggers that would refuse each row, with the first fault of each. It can't foresee what rows contain.
create or replace function queue._faulty_triggers(p_table regclass)
returns table (name text, fault text)
language plpgsql stable parallel unsafe security invoker rows 1 as $$
declare
  v_trigger record;
  v_detail text;
begin
  for v_trigger in
    select format('%I on %s', t.tgname, t.tgrelid::regclass) as name, t.tgrelid, t.tgname,
      {{trigger_of_rows}} as is_row, {{trigger_before}} as is_early,
      queue._trigger_args(t.tgnargs, t.tgargs) as args
    from pg_trigger t
    where t.tgfoid = 'queue.defer_trigger()'::regprocedure and t.tgparentid = 0
      and t.tgenabled in ('O', 'A') and coalesce(t.tgrelid = p_table, true)
    order by 1
  loop
    begin
      perform queue._check_trigger(v_trigger.tgrelid, v_trigger.tgname, v_trigger.is_row, v_trigger.is_early,
        v_trigger.args);
    exception when data_exception or program_limit_exceeded then
      get stacked diagnostics v_detail = pg_exception_detail;
      name := v_trigger.name;
      fault := concat_ws(', ', sqlerrm, nullif(v_detail, ''));
      return next;
    end;
  end loop;
end $$;

-- The arguments of a trigger: in pg_trigger each one ends with a zero byte.
create or replace function queue._trigger_args(p_n integer, p_args bytea)
returns text[] language plpgsql stable parallel safe security invoker as $$
declare
  v_args text[] := '{}'::text[];
  v_rest bytea := p_args;
  v_end integer;
begin
  for i in 1 .. p_n loop
    v_end := position(decode('00', 'hex') in v_rest);
    v_args := v_args || convert_from(substr(v_rest, 1, v_end - 1), getdatabaseencoding());
    v_rest := substr(v_rest, v_end + 1);
  end loop;
  return v_args;
end $$;

-- p_is_early: the trigger only sees rows whose stored generated columns are not computed yet.
-- Raises: 22023 if defer would refuse each row of the table.
create or replace function queue._check_trigger(p_table oid, p_name text, p_is_row boolean,
  p_is_early boolean, p_args text[])
returns void language plpgsql stable parallel unsafe security invoker as $$
declare
  v_given jsonb := queue._trigger_keys(p_name, p_is_row, p_args);
  v_options jsonb := queue._check_options(coalesce(nullif(v_given -> 'options', 'null'), '{}'));
  v_task record;
  v_all jsonb;
  v_keys text[];
  v_row jsonb;
begin
  select t.* into v_task from queue.task t where t.name = p_args[1];
  v_all := coalesce(v_task.defaults, '{}') || jsonb_strip_nulls(v_given - 'options') || v_options;
  perform queue._check_name('task', p_args[1]);
  if v_all ->> 'queue' <> '' then
    perform queue._check_queue(v_all ->> 'queue');
  end if;
  perform queue._check_moment('scheduled_at', queue._timestamp('scheduled_at', v_given -> 'scheduled_at'));
  if v_given ->> 'scheduled_at' is not null and v_options ? 'delay' then
    perform queue._invalid('scheduled_at and delay exclude each other', 'Give one of the two.');
  end if;
  if v_options ? 'unique_for' and v_all ->> 'idempotency_key' is null then
    perform queue._invalid('unique_for needs an idempotency_key',
      'Pass an idempotency_key that says which calls count as the same, such as "invoice:{id}".');
  end if;
  perform queue._check_moment('deadline', queue._timestamp('deadline', v_given -> 'deadline'), true);
  -- Keys of the trigger replace the task's.
  v_keys := (queue._check_concurrency(v_given ->> 'concurrency_key',
    coalesce((v_given ->> 'concurrency_limit')::integer,
      case when v_given ->> 'concurrency_key' <> '' then v_task.limits[1] end),
    v_options -> 'concurrency')).keys;
  if v_given ->> 'concurrency_key' is null and not v_options ? 'concurrency' then
    v_keys := v_task.keys;
  end if;
  select jsonb_object_agg(a.attname, 1) into v_row
  from pg_attribute a where a.attrelid = p_table and a.attnum > 0 and not a.attisdropped
    and a.attgenerated <> 'v' and not (a.attgenerated = 's' and p_is_early);
  perform queue._fill(t.name, t.template, v_row)
  from (
    select e.key as name, e.value #>> '{}' as template
    from jsonb_each(v_all) e
    where e.key in ('lock', 'queueing_lock', 'share', 'idempotency_key', 'group')
    union all
    select 'concurrency_key', k from unnest(v_keys) k) t
  where t.template <> '';
end $$;

-- Checks whether each trigger was given what defer accepts.
create or replace function queue._health_of_triggers()
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel unsafe security invoker rows 1 as $$
declare
  v_faults text[] := array(
    select format('%s: %s', t.name, t.fault) from queue._faulty_triggers(null) t limit 3);
begin
  name := 'triggers';
  status := case when v_faults = '{}' then 'ok' else 'fail' end;
  detail := case when v_faults = '{}' then 'no trigger refuses each row'
    else 'triggers that refuse each row: ' || array_to_string(v_faults, '; ') end;
  fix := case when v_faults <> '{}' then 'Drop them, and create them with other arguments' end;
  return next;
end $$;
