-- What grant_access has given, so that an upgrade can give it again. queues: names and patterns, NULL for all.
-- By name, as a dump may be restored where roles have other numbers.
create table queue.access (
  role text collate "C" not null,
  kind text not null,
  queues text[],
  constraint access_pkey primary key (role, kind),
  constraint access_kind_check check (kind in ('producer', 'worker', 'operator', 'reader'))
);

-- It is there as long as no role is limited to some queues: functions look for its name only, so that limits
-- cost nothing where there are none (06_limits.sql). Private.
create view queue.unlimited as select true as is_unlimited;

-- Whether whoever reads a view may see all jobs, or else the queues whose, as patterns for LIKE. In a function
-- the reader is the owner. Private.
create view queue.visible as
select x.is_all, array(
    select replace(replace(replace(case when right(q, 1) = '*' then left(q, -1) else q end, chr(92), repeat(chr(92), 2)), '%', chr(92) || '%'), '_', chr(92) || '_')
      || case when right(q, 1) = '*' then '%' else '' end
    from queue.access a
    join pg_roles r on r.rolname = a.role
    cross join unnest(a.queues) q
    where not x.is_all and a.kind in ('operator', 'reader') and pg_has_role(current_user, r.oid, 'usage')) as queues
from (
  select not exists (select from queue.access a where a.queues is not null)
    or pg_has_role(current_user, (select c.relowner from pg_class c where c.oid = 'queue.access'::regclass), 'usage')
    or exists (select from queue.access a join pg_roles r on r.rolname = a.role
               where a.queues is null and a.kind in ('operator', 'reader') and pg_has_role(current_user, r.oid, 'usage')) as is_all) x;
