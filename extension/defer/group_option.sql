-- The option group of defer: the job joins an open group.
-- Tests: defer/open_groups.sql, admit/groups.adding.spec.

-- Returns a job's options with the group's name filled in from args, or without the group if its name is
-- empty. Until the transaction ends, it holds the table queue.job_group in mode ROW SHARE. That conflicts
-- with nothing that others do to the table. Nobody else uses this mode there, so it shows which transactions
-- may have added jobs.
-- Locks: that table, in this mode; no other session waits for it.
-- Why no job is missed: this function takes the lock, and then looks whether the group is open. Admission
-- looks for the lock after the group was closed (admit/groups.sql). A transaction that does not have the lock
-- by then looks later, and sees the closed group. In REPEATABLE READ it may see an older state; then its job
-- is counted late.
-- Raises: 22023 if the group is not open, 42501 for a role that is restricted to some queues.
create or replace function queue._join_open_group(p_options jsonb, p_args jsonb)
returns jsonb language plpgsql volatile parallel unsafe security invoker set enable_seqscan = off as $$
declare
  v_name text;
  v_group record;
  v_allowed text[];
begin
  if p_options ->> 'group' = '' then
    return p_options - 'group';
  end if;
  v_name := queue._fill('group', p_options ->> 'group', p_args);
  v_allowed := queue._allowed_queues('{producer}');
  if v_allowed is not null then
    perform queue._queue_not_allowed(null, v_allowed);
  end if;
  perform pg_current_xact_id();  -- admission waits for it by its number
  lock table queue.job_group in row share mode;
  select g.no, exists (select from queue.group_close c where c.group_no = g.no) as is_closed into v_group
  from queue.job_group g where g.name = v_name;
  if not found then
    perform queue._no_group(v_name);
  elsif v_group.is_closed then
    perform queue._invalid('the group is closed', 'Add jobs before queue.close_group is called.',
      'name: ' || left(v_name, 200));
  end if;
  return p_options || jsonb_build_object('group', v_name);
end $$;

-- Raises: 22023, always.
create or replace function queue._no_group(p_name text)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  perform queue._invalid('no such group', 'Open it first by queue.open_group; queue.groups lists them.',
    'name: ' || left(p_name, 200));
end $$;
