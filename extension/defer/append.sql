-- Deferring with any options: fills in defaults, checks, and appends the job to the log.
-- Tests: defer/defer.sql.

-- defer with any arguments and options, if the role may. It wakes no worker. p_table: the table whose trigger
-- defers; it matters only if roles are restricted.
-- Locks and errors: as defer.
create or replace function queue._defer_checked(
  p_task text, p_args jsonb, p_queue text, p_priority integer, p_lock text, p_queueing_lock text,
  p_scheduled_at timestamptz,
  p_deadline timestamptz, p_needs bigint[], p_concurrency_key text, p_concurrency_limit integer,
  p_options jsonb,
  p_table oid default null)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_id bigint;
  v_is_restricted boolean := to_regclass('queue.unrestricted') is null;
  v_used record;
begin
  if v_is_restricted then
    perform queue._check_installed();
  end if;
  if jsonb_typeof(p_args) <> 'object' then
    perform queue._invalid('args must be a JSON object', 'Pass the arguments by name: {"name": value}.',
      'type: ' || jsonb_typeof(p_args));
  end if;
  v_id := queue._defer_full(p_task, p_args, p_queue, p_priority, p_lock, p_queueing_lock, p_scheduled_at,
    p_deadline, p_needs, p_concurrency_key, p_concurrency_limit, p_options);
  if v_is_restricted then
    select k.key, k.queue into v_used from queue._used_idempotency_key(p_task, p_args, p_options) k;
    perform queue._require_deferred(v_id, p_table, v_used.key, v_used.queue);
  end if;
  return v_id;
end $$;

-- Fills in defaults, checks, and appends. It evaluates no expression for an option that is not used, because
-- each expression is set up again in every transaction.
-- Locks and errors: as defer.
-- With functions of their own for keys and options, a job with a key would take 9 % more instructions, one
-- with an option 10 % more.
-- In one piece, because set-up of calls is most of the cost of such a job (ADR 1).
create or replace function queue._defer_full(
  p_task text, p_args jsonb, p_queue text, p_priority integer, p_lock text, p_queueing_lock text,
  p_scheduled_at timestamptz,
  p_deadline timestamptz, p_needs bigint[], p_concurrency_key text, p_concurrency_limit integer,
  p_options jsonb)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_task record;
  v_id bigint;
  v_flags integer := 0;
  v_lock text;
  v_queueing_lock text;
  v_key text;
  v_given jsonb := '{}'::jsonb;
  v_options jsonb;
  v_scheduled_at timestamptz := p_scheduled_at;
  v_deadline timestamptz := p_deadline;
  v_keys text[];
  v_limits integer[];
  v_terms jsonb;
  v_needs bigint[];
  v_size integer;
begin
  if pg_column_size(p_args) >= 2000 or octet_length(p_args::text) > 2000 then
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
    if v_given ? 'headers' and v_size is null then
      v_size := queue._size_of(p_args, v_given -> 'headers');
    end if;
  end if;
  v_options := coalesce(v_task.options || v_given, v_given);
  v_lock := nullif(coalesce(p_lock, v_task.lock), '');
  if v_lock is not null then
    v_lock := queue._fill('lock', v_lock, p_args);
    v_flags := case when v_options ->> 'lock_mode' = 'mutex' then {{mutex}}
      else {{ordered}} end;
  end if;
  if num_nonnulls(p_concurrency_key, p_concurrency_limit, v_task.keys) > 0 or v_given ? 'concurrency' then
    -- The call's values replace the task's keys.
    v_terms := v_options -> 'terms';
    v_options := v_options - 'terms';
    if coalesce(p_concurrency_key, '') <> '' or v_given ? 'concurrency' then
      select c.keys, c.limits, c.terms into v_keys, v_limits, v_terms
      from queue._check_concurrency(p_concurrency_key, coalesce(p_concurrency_limit, v_task.limits[1]),
        v_given -> 'concurrency') c;
    elsif p_concurrency_key is null then
      perform queue._check_concurrency(null, p_concurrency_limit, null);
      v_keys := v_task.keys;
      v_limits := case when v_keys is not null then v_task.limits end;
      if p_concurrency_limit is not null and v_limits is not null then
        v_limits[1] := p_concurrency_limit;
      end if;
    end if;
    if v_keys is not null then
      for i in 1 .. cardinality(v_keys) loop
        v_keys[i] := queue._fill('concurrency_key', v_keys[i], p_args);
      end loop;
      if cardinality(v_keys) > 1 and (select count(distinct k) from unnest(v_keys) k) < cardinality(v_keys)
        then
        perform queue._invalid('a concurrency key is named twice', 'Name each key once.',
          'keys: ' || v_keys::text);
      end if;
      v_flags := v_flags | {{keys}};
      if v_terms is not null then
        v_options := v_options || jsonb_build_object('terms', v_terms);
      end if;
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
    if v_options ?| '{idempotency_key,unique_for}' then
      -- This comes before needs and parent, which may have been removed since the first call.
      select t.id, t.key, t.options into v_id, v_key, v_options
      from queue._take_idempotency_key(p_task, coalesce(nullif(coalesce(p_queue, v_task.queue), ''),
        'default'), p_args, v_options, v_given) t;
      if v_id < 0 then
        return -v_id;
      end if;
    end if;
    if v_given ? 'delay' or (p_scheduled_at is null and v_options ? 'delay') then
      if p_scheduled_at is not null then
        perform queue._invalid('scheduled_at and delay exclude each other', 'Give one of the two.');
      end if;
      v_scheduled_at := clock_timestamp() + queue._interval('delay', v_options -> 'delay');
    end if;
    if p_deadline is null and v_options ? 'parent' then
      v_deadline := coalesce(queue._parent_deadline((v_options ->> 'parent')::bigint), v_deadline);
    end if;
    -- needs_mode any: a yield may add needs, and must know which needs were met when the run began.
    v_flags := v_flags
      | case when v_options ->> 'needs_mode' = 'any' then {{needs}} else 0 end
      | case when (v_options ->> 'held')::boolean then {{held}} else 0 end
      | case when v_options ? 'expires_at' then {{expires}} else 0 end
      | case when v_options ? 'timeout' then {{lease}} else 0 end
      | case when v_options ? 'retain' then {{retain}} else 0 end;
    if v_options ? 'share' then
      v_options := v_options - 'share' || case when v_options ->> 'share' = '' then '{}'
        else jsonb_build_object('share', queue._fill('share', v_options ->> 'share', p_args)) end;
    end if;
  end if;
  if v_options ? 'group' then
    v_options := queue._join_open_group(v_options, p_args);
    v_flags := v_flags | case when v_options ? 'group' then {{needed}} else 0 end;
  end if;
  if v_scheduled_at is not null then
    if not isfinite(v_scheduled_at) then
      perform queue._invalid('scheduled_at must be finite',
        'Use options {"held": true} for a job without a time.');
    end if;
    perform queue._check_moment('scheduled_at', v_scheduled_at);
    v_flags := v_flags | {{scheduled}};
  end if;
  if cardinality(p_needs) > 0 then
    v_needs := queue._check_needs(p_needs);
    v_flags := v_flags | {{needs}};
  end if;
  if v_size is not null then
    v_flags := v_flags | {{large}};
  end if;
  v_queueing_lock := nullif(coalesce(p_queueing_lock, v_task.queueing_lock), '');
  if v_queueing_lock is not null then
    v_queueing_lock := queue._fill('queueing_lock', v_queueing_lock, p_args);
    v_id := queue._take_queueing_lock(v_queueing_lock, coalesce(v_options ->> 'on_conflict', 'raise'), p_args,
                                      coalesce(p_priority, v_task.priority, 0), v_scheduled_at,
                                      case when v_options ? 'max_wait'
                                        then queue._interval('max_wait', v_options -> 'max_wait') end, v_id);
    if v_id < 0 then
      if v_key is not null then
        perform queue._pass_idempotency_key(p_task, v_key, -v_id);
      end if;
      return -v_id;
    end if;
    v_flags := v_flags | case when v_options ->> 'unique_until' = 'finish' then {{until_finish}}
      else {{until_start}} end;
  end if;
  insert into queue.log (id, task, args, job_options)
  values (coalesce(v_id, nextval('queue.job_id_seq')), p_task, p_args, row(
    nullif(coalesce(p_queue, v_task.queue), ''), coalesce(p_priority, v_task.priority), v_flags,
    v_scheduled_at, v_deadline, v_lock,
    v_queueing_lock, v_needs, v_keys, v_limits,
      nullif(v_options - '{delay,held,on_conflict,max_wait,concurrency}'::text[], '{}'),
      v_size)::queue.job_options)
  returning id into v_id;
  return v_id;
end $$;

-- _defer_checked for a job given as JSON. p_table: as there.
-- Raises: as defer; 22023 for values of a wrong type.
create or replace function queue._defer_json(p_job jsonb, p_table oid default null)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_job record;
begin
  perform queue._check_types('a job', p_job);
  if coalesce(jsonb_typeof(p_job -> 'deadline'), 'null') not in ('string', 'null') then
    perform queue._invalid('deadline is not a timestamp',
      'Give a timestamp with a time zone, such as 2030-01-31T09:00:00Z.');
  end if;
  begin
    select j.* into v_job from jsonb_to_record(p_job) j (
      task text, queue text, priority integer, lock text, queueing_lock text, scheduled_at timestamptz,
      deadline timestamptz,
      needs bigint[], concurrency_key text, concurrency_limit integer);
  exception when data_exception or invalid_text_representation or datetime_field_overflow
    or numeric_value_out_of_range then
    perform queue._invalid('a job has a value of a wrong type',
      'Pass each key with the type of defer''s argument of that name.', sqlerrm);
  end;
  return queue._defer_checked(v_job.task, coalesce(nullif(p_job -> 'args', 'null'), '{}'), v_job.queue,
    v_job.priority, v_job.lock, v_job.queueing_lock, v_job.scheduled_at, v_job.deadline, v_job.needs,
    v_job.concurrency_key, v_job.concurrency_limit, p_job -> 'options', p_table);
end $$;
