-- Deferring: only appends to the log. What needs agreement is decided after commit (30_admission.sql).
--
-- The flags of a job say which gates and duties it has, so that a job without any costs nothing more:
--   1 ordered lock      2 mutex lock       4 concurrency keys    8 needs          16 scheduled_at
--  32 held             64 expires_at     128 timeout           256 queueing_lock 512 retain of its own
-- 1024 has crashed    2048 has a job_state row   4096 is needed   8192 queueing_lock until finish
-- The sign stands for large: args and headers have a size of their own (queue.given).
-- In queue.job_state 32 stands for never to be discarded (on_limit).
-- In queue.live 128 stands for a lease too, 16384 for a slot of its queue, and while it runs 16 for claimed
-- alone and 32 for told to abort.

-- Locks: none but the latch (57_sleep.sql), shared and by try; with queueing_lock, its row.
-- It has no search_path of its own, for speed: so every name and operator in it is qualified, and the general way has one.
-- Raises: 22023, QJ001 (a need or parent that isn't visible), QJ004.
create or replace function queue.defer(
  task text, args jsonb default '{}', queue text default null, priority integer default null,
  lock text default null, queueing_lock text default null, scheduled_at timestamptz default null,
  deadline timestamptz default null, needs bigint[] default null,
  concurrency_key text default null, concurrency_limit integer default null, options jsonb default null)
returns bigint language plpgsql volatile parallel unsafe security definer as $$
#variable_conflict use_column
declare
  v_id bigint;
  v_is_awake boolean;
  v_none pg_catalog.regclass;
begin
  -- Few functions and one statement for most calls, as each is set up anew in every transaction: for a task and small args, where
  -- no role is limited, if the task is registered and has no more than a queue and a priority.
  if coalesce(v_none, queue._unlimited()) is not null then
    if pg_catalog.num_nonnulls(defer.queue, defer.priority, defer.lock, defer.queueing_lock, defer.scheduled_at, defer.deadline, defer.needs,
                               defer.concurrency_key, defer.concurrency_limit, defer.options) operator(pg_catalog.=) 0
      and pg_catalog.jsonb_contains(defer.args, '{}')
      and pg_catalog.pg_column_size(defer.args) operator(pg_catalog.<) 2000
      and pg_catalog.octet_length(cast(defer.args as pg_catalog.text)) operator(pg_catalog.<=) 2000
    then
      insert into queue.log (task, args, given)
      select t.name, defer.args, t.given from queue.task t where t.name operator(pg_catalog.=) defer.task and t.is_plain
      returning id, pg_catalog.pg_try_advisory_xact_lock_shared(1885824102, 1) into v_id, v_is_awake;
      if v_is_awake then
        return v_id;
      end if;
    end if;
  end if;
  if v_id is not null then
    perform queue._wake();
    return v_id;
  end if;
  return queue._defer_any(defer.task, defer.args, defer.queue, defer.priority, defer.lock, defer.queueing_lock, defer.scheduled_at,
                          defer.deadline, defer.needs, defer.concurrency_key, defer.concurrency_limit, defer.options);
end $$;
comment on function queue.defer(text, jsonb, text, integer, text, text, timestamptz, timestamptz, bigint[], text, integer, jsonb) is
  'Defers a job and returns its id. Workers see it if and only if the transaction commits. NULL takes the task''s registered default, then the system''s (queue default, priority 0); empty text means none. lock, queueing_lock and concurrency_key may hold {field}, filled from args.';

-- defer, whatever is given. The first statement is for a task that has no more than a queue and a priority, of its own or the
-- call's, or is not registered.
-- Locks and errors: as defer.
create or replace function queue._defer_any(
  p_task text, p_args jsonb, p_queue text, p_priority integer, p_lock text, p_queueing_lock text, p_scheduled_at timestamptz,
  p_deadline timestamptz, p_needs bigint[], p_concurrency_key text, p_concurrency_limit integer, p_options jsonb)
returns bigint language plpgsql volatile parallel unsafe security invoker
set search_path = pg_catalog, pg_temp as $$
declare
  v_id bigint;
  v_is_awake boolean;
  v_none regclass;
begin
  if num_nonnulls(p_lock, p_queueing_lock, p_scheduled_at, p_deadline, p_needs, p_concurrency_key, p_concurrency_limit, p_options) = 0 then
    if coalesce(v_none, queue._unlimited()) is not null and p_args @> '{}' and (right(p_queue, 1) = '*' or octet_length(p_queue) > 1000) is not true
      and pg_column_size(p_args) < 2000 and octet_length(p_args::text) <= 2000 then
      insert into queue.log (task, args, given)
      select p_task, p_args,
        case when num_nonnulls(p_queue, p_priority) = 0 then t.given
             else row(nullif(coalesce(p_queue, t.queue), ''), coalesce(p_priority, t.priority), null, null, null, null, null, null, null, null, null, null)::queue.given end
      from (select) one left join queue.task t on t.name = p_task
      where coalesce(t.is_plain, p_task <> '' and octet_length(p_task) <= 1000)
      returning id, pg_try_advisory_xact_lock_shared(1885824102, 1) into v_id, v_is_awake;
    end if;
  end if;
  if v_id is null then
    v_id := queue._defer_checked(p_task, coalesce(p_args, '{}'), p_queue, p_priority, p_lock, p_queueing_lock, p_scheduled_at,
                                 p_deadline, p_needs, p_concurrency_key, p_concurrency_limit, p_options);
    v_is_awake := pg_try_advisory_xact_lock_shared(1885824102, 1);
  end if;
  if not v_is_awake then
    perform queue._wake();
  end if;
  return v_id;
end $$;

-- defer with everything that a job can have, by whoever may. It wakes nobody.
-- p_table: the table whose trigger defers, where roles are limited.
-- Locks and errors: as defer.
create or replace function queue._defer_checked(
  p_task text, p_args jsonb, p_queue text, p_priority integer, p_lock text, p_queueing_lock text, p_scheduled_at timestamptz,
  p_deadline timestamptz, p_needs bigint[], p_concurrency_key text, p_concurrency_limit integer, p_options jsonb,
  p_table oid default null)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_id bigint;
  v_is_limited boolean := to_regclass('queue.unlimited') is null;
begin
  if v_is_limited then
    perform queue._not_installed();
  end if;
  if jsonb_typeof(p_args) <> 'object' then
    perform queue._invalid('args must be a JSON object', 'Pass the arguments by name: {"name": value}.', 'type: ' || jsonb_typeof(p_args));
  end if;
  v_id := queue._defer_full(p_task, p_args, p_queue, p_priority, p_lock, p_queueing_lock, p_scheduled_at, p_deadline, p_needs,
                            p_concurrency_key, p_concurrency_limit, p_options);
  if v_is_limited then
    perform queue._bound_deferred(v_id, p_table);
  end if;
  return v_id;
end $$;

-- Fills in defaults, checks, and appends. What a job does not have costs it no expression: each is set up anew in every transaction.
-- Locks and errors: as defer.
create or replace function queue._defer_full(
  p_task text, p_args jsonb, p_queue text, p_priority integer, p_lock text, p_queueing_lock text, p_scheduled_at timestamptz,
  p_deadline timestamptz, p_needs bigint[], p_concurrency_key text, p_concurrency_limit integer, p_options jsonb)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_task record;
  v_id bigint;
  v_flags integer := 0;
  v_lock text;
  v_queueing_lock text;
  v_given jsonb := '{}'::jsonb;
  v_options jsonb;
  v_scheduled_at timestamptz := p_scheduled_at;
  v_deadline timestamptz := p_deadline;
  v_keys text[];
  v_limits integer[];
  v_needs bigint[];
  v_size integer;
begin
  if pg_column_size(p_args) >= 2000 or octet_length(p_args::text) > 2000 or p_options ? 'headers' then
    v_size := queue._size_of(p_args, p_options -> 'headers');
  end if;
  select t.* into v_task from queue.task t where t.name = p_task;
  if not found then
    perform queue._check_name('task', p_task);
  end if;
  if p_queue <> '' then
    perform queue._check_queue(p_queue);
  end if;
  if p_options is not null and jsonb_typeof(p_options) <> 'null' then
    v_given := queue._check_options(p_options);
  end if;
  v_options := coalesce(v_task.options || v_given, v_given);
  v_lock := nullif(coalesce(p_lock, v_task.lock), '');
  if v_lock is not null then
    v_lock := queue._fill('lock', v_lock, p_args);
    v_flags := case when v_options ->> 'lock_mode' = 'mutex' then 2 else 1 end;
  end if;
  if num_nonnulls(p_concurrency_key, p_concurrency_limit, v_task.keys) > 0 or v_given ? 'concurrency' then
    -- what the call names takes the place of the task's keys
    if coalesce(p_concurrency_key, '') <> '' or v_given ? 'concurrency' then
      select c.keys, c.limits into v_keys, v_limits
      from queue._check_concurrency(p_concurrency_key, coalesce(p_concurrency_limit, v_task.limits[1]), v_given -> 'concurrency') c;
    elsif p_concurrency_key is null then
      perform queue._check_concurrency(null, p_concurrency_limit, null);
      v_keys := v_task.keys;
      v_limits := v_task.limits;
      if p_concurrency_limit is not null and v_limits is not null then
        v_limits[1] := p_concurrency_limit;
      end if;
    end if;
    if v_keys is not null then
      for i in 1 .. cardinality(v_keys) loop
        v_keys[i] := queue._fill('concurrency_key', v_keys[i], p_args);
      end loop;
      if cardinality(v_keys) > 1 and (select count(distinct k) from unnest(v_keys) k) < cardinality(v_keys) then
        perform queue._invalid('a concurrency key is named twice', 'Name each key once.', 'keys: ' || v_keys::text);
      end if;
      v_flags := v_flags | 4;
    end if;
  end if;
  if p_deadline is not null or v_task.deadline is not null then
    if p_deadline is null then
      v_deadline := clock_timestamp() + v_task.deadline;
    else
      perform queue._check_moment('deadline', p_deadline, true);
    end if;
  end if;
  if v_options <> '{}' then
    if v_given ? 'delay' or (p_scheduled_at is null and v_options ? 'delay') then
      if p_scheduled_at is not null then
        perform queue._invalid('scheduled_at and delay exclude each other', 'Give one of the two.');
      end if;
      v_scheduled_at := clock_timestamp() + queue._interval('delay', v_options -> 'delay');
    end if;
    if p_deadline is null and v_options ? 'parent' then
      v_deadline := coalesce(queue._parent_deadline((v_options ->> 'parent')::bigint), v_deadline);
    end if;
    -- needs_mode any: a yield may add some needs, and must know what was satisfied when the run began
    v_flags := v_flags
      | case when v_options ->> 'needs_mode' = 'any' then 8 else 0 end
      | case when (v_options ->> 'held')::boolean then 32 else 0 end
      | case when v_options ? 'expires_at' then 64 else 0 end
      | case when v_options ? 'timeout' then 128 else 0 end
      | case when v_options ? 'retain' then 512 else 0 end;
  end if;
  if v_scheduled_at is not null then
    if not isfinite(v_scheduled_at) then
      perform queue._invalid('scheduled_at must be finite', 'Use options {"held": true} for a job without a time.');
    end if;
    perform queue._check_moment('scheduled_at', v_scheduled_at);
    v_flags := v_flags | 16;
  end if;
  if cardinality(p_needs) > 0 then
    v_needs := queue._check_needs(p_needs);
    v_flags := v_flags | 8;
  end if;
  if v_size is not null then
    v_flags := v_flags | -32768;
  end if;
  v_queueing_lock := nullif(coalesce(p_queueing_lock, v_task.queueing_lock), '');
  if v_queueing_lock is not null then
    v_queueing_lock := queue._fill('queueing_lock', v_queueing_lock, p_args);
    v_id := queue._take_queueing_lock(v_queueing_lock, coalesce(v_options ->> 'on_conflict', 'raise'), p_args,
                                      coalesce(p_priority, v_task.priority, 0), v_scheduled_at);
    if v_id < 0 then
      return -v_id;
    end if;
    v_flags := v_flags | case when v_options ->> 'unique_until' = 'finish' then 8192 else 256 end;
  end if;
  insert into queue.log (id, task, args, given)
  values (coalesce(v_id, nextval('queue.job_id_seq')), p_task, p_args, row(
    nullif(coalesce(p_queue, v_task.queue), ''), coalesce(p_priority, v_task.priority), v_flags, v_scheduled_at, v_deadline, v_lock,
    v_queueing_lock, v_needs, v_keys, v_limits, nullif(v_options - '{delay,held,on_conflict,concurrency}'::text[], '{}'), v_size)::queue.given)
  returning id into v_id;
  return v_id;
end $$;

-- All or nothing; a job of the plain kind (task, args, queue, priority) costs about 3 us.
-- Locks and errors: as defer.
create or replace function queue.defer_many(jobs jsonb)
returns setof bigint language plpgsql volatile parallel unsafe security definer rows 1000
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_job jsonb;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  if jsonb_typeof(defer_many.jobs) is distinct from 'array' then
    perform queue._invalid('jobs must be a JSON array', 'Pass [{"task": text, "args": object, ...}, ...].');
  end if;
  if to_regclass('queue.unlimited') is not null and not exists (
    select from jsonb_array_elements(defer_many.jobs) e
    where jsonb_typeof(e) <> 'object' or e - '{task,args,queue,priority}'::text[] <> '{}'
      or jsonb_typeof(e -> 'task') is distinct from 'string' or coalesce(jsonb_typeof(e -> 'args'), 'object') <> 'object'
      or coalesce(jsonb_typeof(e -> 'queue'), 'string') <> 'string' or coalesce(jsonb_typeof(e -> 'priority'), 'number') <> 'number'
      or length(e ->> 'priority') > 9 or strpos(e ->> 'priority', '.') > 0
      or pg_column_size(e -> 'args') >= 2000 or octet_length((e -> 'args')::text) > 2000)
    and not exists (
      select from (select distinct e ->> 'task' as task from jsonb_array_elements(defer_many.jobs) e) e
      left join queue.task t on t.name = e.task
      where not t.is_plain or e.task = '' or octet_length(e.task) > 1000)
    and not exists (
      select from (select distinct e ->> 'queue' as queue from jsonb_array_elements(defer_many.jobs) e) e
      where octet_length(e.queue) > 1000 or right(e.queue, 1) = '*')
  then
    return query
      with appended as (
        insert into queue.log (task, args, given)
        select j.task, coalesce(j.args, '{}'),
          case when num_nonnulls(j.queue, j.priority) = 0 then t.given
               else row(nullif(coalesce(j.queue, t.queue), ''), coalesce(j.priority, t.priority), null, null, null, null, null, null, null, null, null, null)::queue.given end
        from rows from (jsonb_to_recordset(defer_many.jobs) as (task text, args jsonb, queue text, priority integer))
          with ordinality j (task, args, queue, priority, n)
        left join queue.task t on t.name = j.task
        order by j.n
        returning id)
      select a.id from appended a;
  else
    for v_job in select jsonb_array_elements(defer_many.jobs) loop
      perform queue._check_keys('a job', v_job, array['task', 'args', 'queue', 'priority', 'lock', 'queueing_lock', 'scheduled_at',
        'deadline', 'needs', 'concurrency_key', 'concurrency_limit', 'options']);
      return next queue._defer_json(v_job);
    end loop;
  end if;
  perform queue._announce();
end $$;
comment on function queue.defer_many(jsonb) is
  'Defers an array of jobs, each an object with the names of defer''s arguments. Returns the ids in input order; all or nothing.';

-- p_table: as _defer_checked, which wakes nobody.
-- Raises: as defer; 22023 for values of a wrong type.
create or replace function queue._defer_json(p_job jsonb, p_table oid default null)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_job record;
begin
  perform queue._check_types('a job', p_job);
  if coalesce(jsonb_typeof(p_job -> 'deadline'), 'null') not in ('string', 'null') then
    perform queue._invalid('deadline is not a timestamp', 'Give a timestamp with a time zone, such as 2030-01-31T09:00:00Z.');
  end if;
  begin
    select j.* into v_job from jsonb_to_record(p_job) j (
      task text, queue text, priority integer, lock text, queueing_lock text, scheduled_at timestamptz, deadline timestamptz,
      needs bigint[], concurrency_key text, concurrency_limit integer);
  exception when data_exception or invalid_text_representation or datetime_field_overflow or numeric_value_out_of_range then
    perform queue._invalid('a job has a value of a wrong type', 'Pass each key as defer''s argument of that name takes it.', sqlerrm);
  end;
  return queue._defer_checked(v_job.task, coalesce(nullif(p_job -> 'args', 'null'), '{}'), v_job.queue, v_job.priority, v_job.lock, v_job.queueing_lock,
                              v_job.scheduled_at, v_job.deadline, v_job.needs, v_job.concurrency_key, v_job.concurrency_limit, p_job -> 'options', p_table);
end $$;

-- to_jsonb calls a type's cast to json, with the rights of the queue's owner: so it must be a superuser's
-- or the owner's own.
-- Raises: 22023 when a column's type, or one inside it, has another.
create or replace function queue._check_casts(p_table oid)
returns void language plpgsql stable parallel safe security invoker as $$
declare
  v_type regtype;
begin
  with recursive part as (
    select a.atttypid as type from pg_attribute a where a.attrelid = p_table and a.attnum > 0 and not a.attisdropped
    union
    select x.type
    from part p
    join pg_type t on t.oid = p.type
    cross join lateral (
      select t.typbasetype union all select t.typelem union all
      select a.atttypid from pg_attribute a where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped) x (type)
    where x.type <> 0)
  select p.type into v_type
  from part p
  join pg_cast c on c.castsource = p.type and c.casttarget = 'json'::regtype
  join pg_proc f on f.oid = c.castfunc
  join pg_roles r on r.oid = f.proowner
  where not r.rolsuper and r.rolname <> current_user
  limit 1;
  if found then
    perform queue._invalid('a column has a type whose cast to json is not to be trusted', 'Let a superuser own the cast''s function, or drop the cast.',
                           format('type: %s', v_type));
  end if;
end $$;

-- Settings: a row is written the same way whatever its session writes bytea, floating point numbers and intervals like.
-- Locks and errors: as defer.
create or replace function queue.defer_trigger()
returns trigger language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set bytea_output = hex set extra_float_digits = 1 set intervalstyle = postgres as $$
declare
  v_keys jsonb := '{}'::jsonb;
  v_row jsonb;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  if tg_level <> 'ROW' then
    perform queue._invalid('defer_trigger is for row triggers', 'Create the trigger FOR EACH ROW.', 'trigger: ' || tg_name);
  elsif tg_nargs not between 1 and 2 then
    perform queue._invalid('defer_trigger takes a task and, at will, defer''s keys',
                           'EXECUTE FUNCTION queue.defer_trigger(''task'', ''{"queue": "..."}'').', 'trigger: ' || tg_name);
  elsif tg_nargs = 2 then
    begin
      v_keys := tg_argv[1]::jsonb;
    exception when invalid_text_representation then
      perform queue._invalid('defer_trigger''s second argument is not JSON', 'Pass an object of defer''s keys.', 'trigger: ' || tg_name);
    end;
    perform queue._check_keys('defer_trigger''s second argument', v_keys, array['queue', 'priority', 'lock', 'queueing_lock',
      'scheduled_at', 'deadline', 'needs', 'concurrency_key', 'concurrency_limit', 'options']);
    perform queue._check_types('defer_trigger''s second argument', v_keys);
  end if;
  if exists (select from pg_attribute a where a.attrelid = tg_relid and a.attnum > 0 and a.atttypid >= 16384) then
    perform queue._check_casts(tg_relid);
  end if;
  v_row := case when tg_op = 'DELETE' then to_jsonb(old) else to_jsonb(new) end;
  if to_regclass('queue.unlimited') is not null and v_keys - '{queue,priority}'::text[] = '{}' then
    perform queue.defer(tg_argv[0], v_row, v_keys ->> 'queue', (v_keys ->> 'priority')::integer);
  else
    perform queue._defer_json(v_keys || jsonb_build_object('task', tg_argv[0], 'args', v_row), tg_relid);
    perform queue._announce();
  end if;
  return case when tg_op = 'DELETE' then old else new end;
end $$;
comment on function queue.defer_trigger() is
  'Row trigger that defers a job: defer_trigger(task [, defer''s keys as JSON]). The args are the NEW row, OLD on DELETE.';
