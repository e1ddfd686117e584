-- One row. It has the version that created the tables, the cluster of the stored transaction ids, the era in
-- which claims and workers were last numbered (base/era.sql), and the settings of queue.configure: max_size,
-- the limit in bytes of JSON as text; unknown_task_grace, how long a job waits for a worker that knows its
-- task. written: the row's own xmin, which differs in a copy of the row. up_since: since when workers can
-- reach the server, so that their silence counts (base/era.sql).
create table queue.installation (
  is_only boolean not null default true,
  version text not null,
  system_identifier bigint not null default 0,
  era text not null default '',
  written xid,
  up_since timestamptz not null default '-infinity',
  installed_at timestamptz not null default now(),
  max_size integer not null default 16777216,
  unknown_task_grace interval not null default '10 minutes',
  constraint installation_pkey primary key (is_only),
  constraint installation_only_check check (is_only)
);

-- The grants of grant_access, so that an upgrade can repeat them. queues: names and patterns, NULL for all.
-- Roles are stored by name, because a dump may be restored on a server where they have other numbers.
create table queue.access (
  role text collate "C" not null,
  kind text not null,
  queues text[],
  constraint access_pkey primary key (role, kind),
  constraint access_kind_check check (kind in ('producer', 'worker', 'operator', 'reader'))
);

-- This view exists while no role is restricted to some queues. Functions only check whether its name exists,
-- so restrictions cost nothing while there are none (base/queue_access.sql). Private.
create view queue.unrestricted as select true as is_unrestricted;

-- Whether the reader of a view may see all jobs. If not, it has the allowed queues as patterns for LIKE. In a
-- function the reader is the owner. Private.
create view queue.visible_queues as
select x.is_all, array(
    select replace(replace(replace(case when right(q, 1) = '*' then left(q, -1) else q end, chr(92),
      repeat(chr(92), 2)), '%', chr(92) || '%'), '_', chr(92) || '_')
      || case when right(q, 1) = '*' then '%' else '' end
    from queue.access a
    join pg_roles r on r.rolname = a.role
    cross join unnest(a.queues) q
    where not x.is_all and a.kind in ('operator', 'reader') and pg_has_role(current_user, r.oid, 'usage'))
      as queues
from (
  select not exists (select from queue.access a where a.queues is not null)
    or pg_has_role(current_user, (select c.relowner from pg_class c where c.oid = 'queue.access'::regclass),
      'usage')
    or exists (select from queue.access a join pg_roles r on r.rolname = a.role
               where a.queues is null and a.kind in ('operator', 'reader')
                 and pg_has_role(current_user, r.oid, 'usage')) as is_all) x;
