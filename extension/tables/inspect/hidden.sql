-- The sensitive paths of all tasks that have some (base/sensitive.sql), for a reader who may not see the args
-- there. NULL if there are none; and for the owner, unless pgdefer.hide_sensitive is set and not off. In a
-- function the reader is the owner. Private.
create view queue.hidden_paths as
select jsonb_object_agg(t.name, t.sensitive) as paths
from queue.task t
where t.sensitive is not null
  and (coalesce(current_setting('pgdefer.hide_sensitive', true), '') not in ('', 'off')
    or not pg_has_role(current_user,
      (select c.relowner from pg_class c where c.oid = 'queue.access'::regclass), 'usage'));

-- A row of set_args has its task in before, with the args; one of schedule has it beside the args.
create view queue.audit as
select a.id, a.at, a.role, a.login, a.call,
  case when a.args ? 'args' and (select h.paths from queue.hidden_paths h)
      ? coalesce(a.args ->> 'task', a.before -> 0 ->> 'task')
    then a.args || jsonb_build_object('args', (
      select c.args
      from (select a.args -> 'args' as args, (select h.paths from queue.hidden_paths h)
        -> coalesce(a.args ->> 'task', a.before -> 0 ->> 'task') as paths) x
      cross join lateral ({{masked}}) c (args)))
    else a.args end as args,
  a.ids, a.queues,
  case when a.before ? 'args' and (select h.paths from queue.hidden_paths h) ? (a.before ->> 'task')
    then a.before || jsonb_build_object('args', (
      select c.args
      from (select a.before -> 'args' as args, (select h.paths from queue.hidden_paths h)
        -> (a.before ->> 'task') as paths) x
      cross join lateral ({{masked}}) c (args)))
    when a.before -> 0 ? 'args' and (select h.paths from queue.hidden_paths h) ? (a.before -> 0 ->> 'task')
    then jsonb_set(a.before, '{0,args}', (
      select c.args
      from (select a.before -> 0 -> 'args' as args, (select h.paths from queue.hidden_paths h)
        -> (a.before -> 0 ->> 'task') as paths) x
      cross join lateral ({{masked}}) c (args)))
    else a.before end as before
from queue.audit_log a cross join (select) read_only
where (select x.is_all from queue.visible_queues x)
  or a.queues <> '{}' and not exists (select from unnest(a.queues) q
    where q like any ((select x.queues from queue.visible_queues x)::text[]) is not true);
comment on view queue.audit is
  'Calls by which operators changed jobs, queues, schedules, tasks, settings or access: the time, the role,'
    ' the call with its arguments, the jobs that it changed, and the values before. Sensitive args'
    ' (register_task) read *** for all but the owner.';
