-- Open groups: they have a name, and jobs join them until they are closed. Their callbacks are jobs that are
-- deferred when all jobs of the group have ended, when all have succeeded, or when one has failed.

-- Locks: the group's row. Transactions that open one name wait for each other, as with any unique key.
-- Why no wake-up is lost: nobody waits for an open group.
-- Raises: 22023.
create or replace function queue.open_group(name text, on_end jsonb default null,
  on_success jsonb default null, on_failure jsonb default null)
returns boolean language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
declare
  v_callbacks jsonb := jsonb_build_object('on_end', open_group.on_end, 'on_success', open_group.on_success,
    'on_failure', open_group.on_failure);
  v_no bigint;
begin
  {{installed}}
  perform queue._check_name('name', open_group.name);
  perform queue._check_size('callbacks', v_callbacks);
  select coalesce(jsonb_object_agg(e.key, queue._check_callback(e.key, e.value)), '{}') into v_callbacks
  from jsonb_each(v_callbacks) e where e.value <> 'null';
  insert into queue.job_group (name, callbacks) values (open_group.name, v_callbacks)
  on conflict on constraint job_group_name_key do nothing
  returning no into v_no;
  if v_no is not null then
    insert into queue.group_state (group_no) values (v_no);
    return true;
  elsif exists (select from queue.job_group g join queue.group_close c on c.group_no = g.no
    where g.name = open_group.name) then
    perform queue._invalid('the group is closed',
      'Choose a name that is used once, such as one with a date or a number.',
      'name: ' || left(open_group.name, 200));
  end if;
  return false;
end $$;
comment on function queue.open_group(text, jsonb, jsonb, jsonb) is
  'Opens a group of jobs and returns true. If it is already open, the call changes nothing and returns'
    ' false. Jobs join by defer''s option group, until close_group. Each callback is a job, {"task": text,'
    ' "args": object, ...}, and is deferred once: on_end when the group is closed and all its jobs have'
    ' ended, on_success when all of them have succeeded, on_failure as soon as one has failed or was'
    ' cancelled. A group is kept for 7 days after its end, and at least as long as its jobs; until then its'
    ' name stays in use.';

-- Only appends, as defer does. Locks: none but the sleep lock, shared and by try.
-- Why no wake-up is lost: the settlement is appended by the same transaction as the row that closes the
-- group, and admission reads it as it does the log.
-- Raises: 22023.
create or replace function queue.close_group(name text)
returns boolean language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
declare
  v_group record;
begin
  {{installed}}
  perform queue._check_name('name', close_group.name);
  select g.no, exists (select from queue.group_close c where c.group_no = g.no) as is_closed into v_group
  from queue.job_group g where g.name = close_group.name;
  if not found then
    perform queue._no_group(close_group.name);
  end if;
  if not v_group.is_closed then
    insert into queue.group_close (group_no) values (v_group.no);
  end if;
  insert into queue.pending_settlement (job_id, kind, flags) values (-v_group.no, 'group', 0);
  perform queue._announce();
  if queue._is_operator() then
    perform queue._audit('close_group', jsonb_build_object('name', close_group.name));
  end if;
  return not v_group.is_closed;
end $$;
comment on function queue.close_group(text) is
  'Closes a group: no more jobs join it, and each callback is deferred as soon as its condition is met. Jobs'
    ' that open transactions have already deferred belong to the group, which waits for these transactions.'
    ' Returns false if the group was closed before. The call only appends, as defer does, so it may be part'
    ' of any transaction; it takes effect at the commit.';

-- Returns the callback with all options in `options`.
-- Raises: 22023 if it is not a job that a group can defer.
create or replace function queue._check_callback(p_what text, p_callback jsonb)
returns jsonb language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_callback constant jsonb := queue._nested(p_what, p_callback, array['task', 'args', 'queue', 'priority',
    'lock', 'concurrency_key', 'concurrency_limit']);
begin
  perform queue._check_types(p_what, v_callback);
  if jsonb_typeof(v_callback -> 'options') = 'object'
    and v_callback -> 'options' ?| '{idempotency_key,unique_for,group}' then
    perform queue._invalid('a callback has an option that is not for it',
      'Leave out idempotency_key, unique_for and group: a callback is deferred once, by its group.');
  end if;
  -- What defer would refuse later is refused now.
  begin
    perform queue._defer_callback(v_callback);
    {{roll_back}}
  end;
  return v_callback;
end $$;

-- Defers the job of a callback. Even if its task's defaults have them, it takes no queueing lock and no
-- idempotency key, for which it might have to wait, and it joins no group. It has no parent, which may have
-- been removed by then.
-- Locks: none. Raises: 22023.
create or replace function queue._defer_callback(p_callback jsonb)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_args jsonb := coalesce(nullif(p_callback -> 'args', 'null'), '{}');
begin
  if jsonb_typeof(v_args) <> 'object' then
    perform queue._invalid('args must be a JSON object', 'Pass the arguments by name: {"name": value}.',
      'type: ' || jsonb_typeof(v_args));
  elsif jsonb_typeof(p_callback -> 'options') not in ('object', 'null') then
    perform queue._check_keys('options', p_callback -> 'options', queue._option_keys());
  end if;
  return queue._defer_full(p_callback ->> 'task', v_args, p_callback ->> 'queue',
    (p_callback ->> 'priority')::integer, p_callback ->> 'lock', '', null, null, null,
    p_callback ->> 'concurrency_key', (p_callback ->> 'concurrency_limit')::integer,
    coalesce(nullif(p_callback -> 'options', 'null'), '{}') - 'parent'
      || '{"idempotency_key": "", "group": ""}');
end $$;
