-- Installing and migrating: the extension holds code only, the tables are ordinary objects.

-- Locks: an advisory lock for the whole transaction, so that two installers do not meet.
create or replace function queue.install()
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  perform pg_advisory_xact_lock(1885824102, 3);
  if to_regclass('queue.installation') is null then
    perform queue._create_tables();
    execute format('insert into queue.installation (version, system_identifier) values (%L, %s)',
                   '@VERSION@', (select system_identifier from pg_control_system()));
    execute 'insert into queue.cursor values (0, ''3'', ''{}'', 0, 0, false, ''-infinity'')';
    return '@VERSION@';
  end if;
  return queue.migrate();
end $$;
comment on function queue.install() is
  'Makes the tables and views of the queue in schema queue, or migrates those that are there. Returns the version; a second call changes nothing.';

-- Locks: as install.
-- Raises: QJ090 when the tables are of a later version than the code, or there are none.
create or replace function queue.migrate()
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_version text;
begin
  perform pg_advisory_xact_lock(1885824102, 3);
  v_version := queue._tables_version();
  if v_version is null then
    perform queue._not_installed();
  elsif v_version <> '@VERSION@' then
    raise exception using errcode = 'QJ090', message = 'no migration leads from the tables to this code',
      detail = format('tables: %s, code: %s', v_version, '@VERSION@'),
      hint = 'Install the code of the version that the tables have, or one that follows it.';
  end if;
  return v_version;
end $$;
comment on function queue.migrate() is
  'Brings the tables to the version of the code. Raises QJ090 when no migration leads there.';

create or replace function queue._tables_version()
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_version text;
begin
  if to_regclass('queue.installation') is null then
    return null;
  end if;
  execute 'select i.version from queue.installation i' into v_version;
  return v_version;
end $$;

create or replace function queue.version()
returns table (code text, tables text) language plpgsql stable parallel safe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  return query select '@VERSION@'::text, queue._tables_version();
end $$;
comment on function queue.version() is
  'The version of the functions, and of the tables (NULL before queue.install()).';

-- Raises: 22023 without force; drops every ordinary object that install made.
create or replace function queue.uninstall(force boolean default false)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_object record;
begin
  if force is not true then
    perform queue._invalid('uninstall removes every job', 'Call queue.uninstall(force => true) to go ahead.');
  end if;
  for v_object in
    select c.relname, case c.relkind when 'v' then 'view' when 'S' then 'sequence' else 'table' end as kind
    from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relkind in ('r', 'v', 'S')
      and not exists (select from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype in ('e', 'i', 'a'))
    order by case c.relkind when 'v' then 0 when 'r' then 1 else 2 end
  loop
    execute format('drop %s if exists queue.%I cascade', v_object.kind, v_object.relname);
  end loop;
end $$;
comment on function queue.uninstall(boolean) is
  'Removes the tables, the views and with them every job. Needs force => true.';
