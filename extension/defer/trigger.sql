-- Deferring by a trigger on a table.
-- Tests: defer/defer.sql.

-- Settings: a row is written in the same way, whatever the session's output formats for bytea, floating point
-- numbers and intervals. With the generic plan, PostgreSQL plans the query about the columns once, not for
-- each row.
-- Locks and errors: as defer.
create or replace function queue.defer_trigger()
returns trigger language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set bytea_output = hex set extra_float_digits = 1
set intervalstyle = postgres set plan_cache_mode = force_generic_plan as $$
declare
  v_keys jsonb := '{}'::jsonb;
  v_columns record;
  v_row jsonb;
begin
  {{installed}}
  if tg_level <> 'ROW' or tg_nargs <> 1 then
    v_keys := queue._trigger_keys(tg_name, tg_level = 'ROW', tg_argv);
  end if;
  -- PostgreSQL never computes virtual columns for a trigger, and stored ones only after BEFORE triggers.
  select bool_or(a.atttypid >= 16384) as has_own_types, array_agg(a.attname::text) filter
    (where a.attgenerated = 'v' or a.attgenerated = 's' and tg_when = 'BEFORE' and tg_op <> 'DELETE') as unset
  into v_columns
  from pg_attribute a where a.attrelid = tg_relid and a.attnum > 0
    and (a.atttypid >= 16384 or a.attgenerated <> '');
  if v_columns.has_own_types then
    perform queue._check_casts(tg_relid);
  end if;
  v_row := case when tg_op = 'DELETE' then to_jsonb(old) else to_jsonb(new) end
    - coalesce(v_columns.unset, '{}');
  if to_regclass('queue.unrestricted') is not null and v_keys - '{queue,priority}'::text[] = '{}' then
    perform queue.defer(tg_argv[0], v_row, v_keys ->> 'queue', (v_keys ->> 'priority')::integer);
  else
    perform queue._defer_json(v_keys || jsonb_build_object('task', tg_argv[0], 'args', v_row), tg_relid);
    perform queue._announce();
  end if;
  return case when tg_op = 'DELETE' then old else new end;
end $$;
comment on function queue.defer_trigger() is
  'Row trigger that defers a job: defer_trigger(task [, defer''s keys as JSON]). The args are the NEW'
    ' row, or the OLD row on DELETE, without generated columns that PostgreSQL has not computed: virtual'
    ' ones, and in a BEFORE trigger stored ones.';

-- Returns the keys of defer, besides task and args, that a trigger has been given.
-- Raises: 22023.
create or replace function queue._trigger_keys(p_trigger text, p_is_row boolean, p_args text[])
returns jsonb language plpgsql immutable parallel unsafe security invoker as $$
declare
  v_keys jsonb := '{}'::jsonb;
begin
  if not p_is_row then
    perform queue._invalid('defer_trigger is for row triggers', 'Create the trigger FOR EACH ROW.',
      'trigger: ' || p_trigger);
  elsif coalesce(cardinality(p_args), 0) not between 1 and 2 then
    perform queue._invalid('defer_trigger takes a task and, optionally, defer''s keys',
      'EXECUTE FUNCTION queue.defer_trigger(''task'', ''{"queue": "..."}'').', 'trigger: ' || p_trigger);
  elsif cardinality(p_args) = 2 then
    begin
      v_keys := p_args[array_upper(p_args, 1)]::jsonb;
    exception when data_exception or program_limit_exceeded then
      perform queue._invalid('defer_trigger''s second argument is not JSON',
        'Pass an object of defer''s keys.', format('trigger: %s, error: %s', p_trigger, sqlerrm));
    end;
    v_keys := queue._nested('defer_trigger''s second argument', v_keys,
      {{argument_keys}} || '{scheduled_at,needs}'::text[]);
    perform queue._check_types('defer_trigger''s second argument', v_keys);
  end if;
  return v_keys;
end $$;

-- to_jsonb calls a type's cast to json with the rights of the queue's owner. So the cast must belong to a
-- superuser or the owner.
-- Raises: 22023 if a column's type, or a type inside it, has another cast.
create or replace function queue._check_casts(p_table oid)
returns void language plpgsql stable parallel safe security invoker as $$
declare
  v_type regtype;
begin
  with recursive part as (
    select a.atttypid as type from pg_attribute a where a.attrelid = p_table and a.attnum > 0
      and not a.attisdropped
    union
    select x.type
    from part p
    join pg_type t on t.oid = p.type
    cross join lateral (
      select t.typbasetype union all select t.typelem union all
      select a.atttypid from pg_attribute a where a.attrelid = t.typrelid and a.attnum > 0
        and not a.attisdropped) x (type)
    where x.type <> 0)
  select p.type into v_type
  from part p
  join pg_cast c on c.castsource = p.type and c.casttarget = 'json'::regtype
  join pg_proc f on f.oid = c.castfunc
  join pg_roles r on r.oid = f.proowner
  where not r.rolsuper and r.rolname <> current_user
  limit 1;
  if found then
    perform queue._invalid('a column has a type whose cast to json can''t be trusted',
      'Let a superuser own the cast''s function, or drop the cast.', format('type: %s', v_type));
  end if;
end $$;
