-- Settings of the whole queue: the limit of sizes, and the grace period of unknown tasks.
-- Tests: base/checks.sql, work/unknown_tasks.sql.

-- Not for producers: they must not change the limits that protect others from them.
-- Locks: the row of queue.installation. Raises: 22023.
create or replace function queue.configure(options jsonb)
returns jsonb language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_before jsonb;
  v_options jsonb;
  v_is_of_era boolean;
begin
  {{installed}}
  perform queue._check_keys('options', configure.options, array['max_size', 'unknown_task_grace']);
  if coalesce(configure.options ->> 'max_size', '100000') !~ '^[0-9]{6,9}$'
    or (configure.options ->> 'max_size')::integer not between 100000 and 268435456 then
    perform queue._invalid('max_size is out of range',
      'Pass a number of bytes, from 100,000 to 268,435,456 (256 MB).',
      'value: ' || left(configure.options ->> 'max_size', 200));
  end if;
  select jsonb_build_object('max_size', i.max_size, 'unknown_task_grace', i.unknown_task_grace),
    i.written = i.xmin
  into v_before, v_is_of_era
  from queue.installation i for no key update;
  update queue.installation i
  set max_size = coalesce((configure.options ->> 'max_size')::integer, i.max_size),
    unknown_task_grace = coalesce(queue._interval('unknown_task_grace',
      configure.options -> 'unknown_task_grace'), i.unknown_task_grace)
  where jsonb_strip_nulls(configure.options) <> '{}';
  update queue.installation i set written = i.xmin
  where v_is_of_era and i.written <> i.xmin;  -- this begins no era
  select jsonb_build_object('max_size', i.max_size, 'unknown_task_grace', i.unknown_task_grace) into v_options
  from queue.installation i;
  perform queue._audit('configure', configure.options, p_before => v_before)
  where jsonb_strip_nulls(configure.options) <> '{}';
  return v_options;
end $$;
comment on function queue.configure(jsonb) is
  'Changes settings of the whole queue and returns all of them; absent keys keep their value. max_size: the'
    ' limit, in bytes of JSON text, for args, options, the info of a worker and results; 16 MB by default;'
    ' values stored in less than 2,000 bytes are not checked. unknown_task_grace: for how long a job whose'
    ' task no worker knows goes back to other workers before it fails; 10 minutes by default, 0: it fails at'
    ' once.';
