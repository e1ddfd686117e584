-- Installing: the extension contains only code; the tables are ordinary objects, which install() creates.

-- Locks: if there are tables, as migrate, and then exclusive locks on tables that were restored from another
-- encoding (_require_utf8). If there are none, only the owner's sessions can hold it up: it waits for another
-- installer at the first table, whose name both want, and then finds the tables.
create or replace function queue.install()
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_version text;
begin
  if to_regclass('queue.installation') is null then
    begin
      perform queue._create_tables();
      perform queue._set_version('@VERSION@');
    exception when duplicate_table or unique_violation then
      if to_regclass('queue.installation') is null then
        raise;
      end if;
    end;
  end if;
  v_version := queue.migrate();
  if getdatabaseencoding() = 'SQL_ASCII' and not exists (select from pg_constraint c
    where c.connamespace = 'queue'::regnamespace and c.conname = 'log_utf8_check') then
    perform queue._require_utf8();
  end if;
  return v_version;
end $$;
comment on function queue.install() is
  'Creates the tables and views of the queue in schema queue, or migrates existing ones. Returns the'
    ' version; a second call changes nothing.';

create or replace function queue.version()
returns table (code text, tables text) language plpgsql stable parallel safe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  return query select '@VERSION@'::text, queue._tables_version();
end $$;
comment on function queue.version() is
  'Returns the version of the functions, and of the tables (NULL before queue.install()).';

-- Drops every ordinary object that install made.
-- Locks: exclusive locks on all tables and views, the admission lock's table first. Running sessions lock
-- them in other orders. So it waits for them for 100 ms at a time, a hundred times, and a failed try releases
-- all, before the deadlock check runs (deadlock_timeout).
-- Raises: 22023 without force, and if force is NULL and there are jobs; QJ008 if force is NULL: an older
-- snapshot would not show all jobs; 55P03.
create or replace function queue.uninstall(force boolean default false)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_timeout text := current_setting('lock_timeout');
begin
  if not force then
    perform queue._refuse_to_uninstall();
  elsif force is null then
    perform queue._check_isolation();
  end if;
  for v_try in 1 .. 100 loop
    begin
      perform set_config('lock_timeout', '100ms', true);
      perform queue._drop_tables(p_if_empty => force is null);
      perform set_config('lock_timeout', v_timeout, true);
      exit;
    exception when lock_not_available or deadlock_detected then
      if v_try = 100 then
        raise exception using errcode = '55P03', message = 'the tables are in use',
          hint = 'Nothing was removed. Stop the workers, end the transactions that have been open for long'
            ' (see pg_stat_activity), and call it again.';
      end if;
    end;
  end loop;
end $$;
comment on function queue.uninstall(boolean) is
  'Removes the tables, the views and every job, and revokes what grant_access granted. Objects that depend'
    ' on the views are dropped, too; everything else in the schema stays. Needs force => true; NULL is'
    ' enough if there are no jobs. Waits for running sessions (55P03 if that takes too long); later calls'
    ' get QJ090.';

create or replace function queue._refuse_to_uninstall()
returns void language plpgsql stable parallel safe security invoker as $$
begin
  perform queue._invalid('uninstall removes every job', 'Call queue.uninstall(force => true) to proceed.');
end $$;

-- SQL_ASCII stores any bytes, but workers read UTF-8: one job with other bytes would make every fetch fail.
-- So the tables that jobs come from refuse them (22021), at the call and not at its admission.
create or replace function queue._require_utf8()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_table text;
begin
  foreach v_table in array '{log,job_override,task,schedule,job_group,pending_settlement,step,received_signal,
    event}'::text[] loop
    execute format('alter table queue.%1$I add constraint %1$s_utf8_check'
      ' check (convert_from(convert_to(%1$I::text, ''SQL_ASCII''), ''UTF8'') is not null)', v_table);
  end loop;
end $$;

-- Whether clients or tables of a release work with this code: they do if the release is of the same series
-- (first two numbers) or the one before.
create or replace function queue._is_compatible(p_version text)
returns boolean language plpgsql immutable parallel safe security invoker as $$
declare
  v_series text[];
begin
  select array_agg(s.series order by s.n) into v_series
  from (select substring(v.version from '^[0-9]+[.][0-9]+') as series, min(v.n) as n
        from unnest(queue._versions()) with ordinality v (version, n) group by 1) s;
  return coalesce(substring(p_version
    from '^[0-9]+[.][0-9]+') = any (v_series[greatest(cardinality(v_series) - 1, 1):]), false);
end $$;

-- Checks the versions when a worker registers: its own, and that of the tables, must be compatible with the
-- code.
-- Raises: QJ090, 55000.
create or replace function queue._check_versions(p_client text)
returns void language plpgsql stable parallel safe security invoker as $$
declare
  v_tables text := queue._tables_version();
begin
  if not queue._is_compatible(v_tables) then
    perform queue._check_restored();
    perform queue._incompatible('the tables and the code of the queue are incompatible', v_tables);
  elsif p_client ~ '^pgdefer [0-9]+[.][0-9]+' and not queue._is_compatible(substr(p_client, 9)) then
    raise exception using errcode = 'QJ090', message = 'client and schema are incompatible',
      detail = format('client: %s, code: %s', p_client, '@VERSION@'),
      hint = 'Upgrade the older of the two: the schema first (pgdefer upgrade); clients may be one release'
        ' behind it.';
  end if;
end $$;

-- Drops the relations of the queue; what an application has put into the schema stays. p_if_empty: it refuses
-- if there are jobs.
-- Locks: those of uninstall.
create or replace function queue._drop_tables(p_if_empty boolean)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ours text[] := queue._own_relations();
  v_objects text[];
  v_object text;
  v_has_jobs boolean;
begin
  select array_agg(x.name order by x.place, x.oid) into v_objects
  from (
    select format('queue.%I', c.relname) as name, c.oid, case c.relname when 'admission' then 0 else 1 end
      as place
    from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r' and c.relname = any (v_ours)) x;
  if v_objects is not null then
    execute format('lock table %s in access exclusive mode', array_to_string(v_objects, ', '));
  end if;
  if p_if_empty and to_regclass('queue.all_jobs') is not null then
    execute 'select exists (select from queue.all_jobs)' into v_has_jobs;
    if v_has_jobs then
      perform queue._refuse_to_uninstall();
    end if;
  end if;
  if to_regclass('queue.access') is not null then
    -- Otherwise roles that were restricted to some queues could do everything once there are tables again.
    perform queue._revoke_all(x.role)
      from (select distinct a.role from queue.access a join pg_roles r on r.rolname = a.role) x;
  end if;
  for v_object in
    select format('%s if exists queue.%I', case c.relkind when 'v' then 'view' when 'S' then 'sequence'
      else 'table' end, c.relname)
    from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relkind in ('r', 'v', 'S') and c.relname = any (v_ours)
      and not exists (select from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = c.oid
        and d.deptype in ('e', 'i', 'a'))
    order by case c.relkind when 'v' then 0 when 'r' then 1 else 2 end
  loop
    execute format('drop %s cascade', v_object);
  end loop;
  drop type if exists queue.job_options;
end $$;
