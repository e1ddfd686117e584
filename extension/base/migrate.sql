-- Migrating: the tables follow the code, step by step, beside running workers and producers.
-- Tests: base/install.sql, ../py/compat/test_upgrade.py.

-- Locks: queue.access, against others that install, migrate, grant or revoke (a table that only the owner can
-- lock); queue.active_job, as workers' calls do first; those of a step's DDL; queue.installation, to set the
-- version. It waits for these for 100 ms at a time, so that defer waits behind it no longer than that, and a
-- hundred times. It does not build a missing large index, but warns of it.
-- Raises: QJ090 if there is no step from the version of the tables, or there are no tables; 55P03 if a
-- transaction that has used them stays open too long; 55000 while they are being restored.
create or replace function queue.migrate()
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_version text;
  v_next text;
  v_index record;
  v_timeout text := current_setting('lock_timeout');
begin
  {{installed}}
  perform queue._check_restored(false);  -- a subscriber migrates before its publisher
  if to_regclass('queue.access') is not null then
    lock table queue.access in share row exclusive mode;
  end if;
  perform queue._fill_tables();
  loop
    v_version := queue._tables_version();
    if not v_version = any (queue._versions()) then
      perform queue._incompatible('there is no migration from the tables to this code', v_version);
    end if;
    exit when v_version = '@VERSION@';
    for v_try in 1 .. 100 loop
      begin
        perform set_config('lock_timeout', '100ms', true);
        -- This table comes first, as in workers' calls. A session that has it and waits for queue.log would
        -- otherwise be waited for in turn.
        lock table queue.active_job in access exclusive mode;
        v_next := queue._migrate_tables(v_version);
        perform queue._set_version(v_next);
        perform set_config('lock_timeout', v_timeout, true);
        exit;
      exception when lock_not_available then
        if v_try = 100 then
          raise exception using errcode = '55P03',
            message = 'the tables are in use by a transaction that stays open',
            detail = format('tables: %s, code: %s', v_version, '@VERSION@'),
            hint = 'Nothing was changed. End the transactions that have been open for long (see'
              ' pg_stat_activity), and call it again.';
        end if;
      end;
    end loop;
  end loop;
  for v_index in select i.statement, i.is_large from queue._missing_indexes() i loop
    if v_index.is_large then
      raise warning using message = 'a large index is missing: ' || v_index.statement,
        hint = 'Run each statement that queue.migration() returns, outside a transaction. psql runs them all'
          ' by its gexec.';
    else
      execute replace(v_index.statement, ' concurrently', '');
    end if;
  end loop;
  perform queue._restore_grants();
  return v_version;
end $$;
comment on function queue.migrate() is
  'Migrates the tables to the version of the code, which it returns, and repeats all grants of'
    ' grant_access, including those on new functions. defer waits for it only for a moment. It leaves large'
    ' indexes to queue.migration, with a warning. Raises QJ090 if there is no migration to that version.';

-- Raises: QJ090 without tables.
create or replace function queue.migration()
returns table (statement text) language plpgsql stable parallel safe security definer rows 5
set search_path = pg_catalog, pg_temp as $$
begin
  {{installed}}
  return query
    select x.statement
    from queue._missing_indexes() i
    cross join lateral (
      select format('drop index concurrently queue.%I', i.name) as statement, 1 as place where i.is_broken
      union all select i.statement, 2) x
    order by i.name, x.place;
end $$;
comment on function queue.migration() is
  'Returns the statements that queue.migrate() leaves to be run, each on its own and outside a'
    ' transaction: large indexes, built concurrently. No rows: there are none. In psql, run them by select *'
    ' from queue.migration() with gexec in place of the semicolon.';

-- Indexes of migrations that are missing or invalid. is_large: to build the index at once would stop
-- producers for a noticeable time.
create or replace function queue._missing_indexes()
returns table (name text, statement text, is_large boolean, is_broken boolean)
language plpgsql stable parallel safe security invoker rows 5 as $$
begin
  return query
    select p.parts[1], s.statement, pg_relation_size(t.id) > 16777216
      or x.indisvalid is not null, x.indisvalid is not null
    from unnest(queue._versions()) with ordinality v (version, n)
    cross join lateral unnest(queue._step_indexes(v.version)) s (statement)
    cross join lateral (
      select regexp_match(s.statement, 'concurrently ([a-z0-9_]+) on queue[.]([a-z0-9_]+)') as parts) p
    cross join lateral (select to_regclass('queue.' || p.parts[2])::oid as id) t
    left join pg_index x on x.indexrelid = to_regclass('queue.' || p.parts[1])
    where x.indisvalid is not true and t.id is not null
      and v.n < array_position(queue._versions(), queue._tables_version());
end $$;

-- The sign that others still fill the tables, and what to do about it; NULL if there is none. pg_restore, and
-- the script of pg_dump, add a table's primary key after its rows. A subscription (p_also_subscribed) brings
-- rows of its publisher.
create or replace function queue._unrestored(p_also_subscribed boolean, out what text, out fix text)
language plpgsql stable parallel safe security invoker as $$
declare
  v_tables oid[] := array(
    select c.oid from pg_class c where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r'
      and c.relname = any (queue._own_relations()));
begin
  select 'tables without their primary key: ' || string_agg(c.relname, ', ' order by c.relname),
    'Wait until the restore has ended. If it failed, drop the database, and restore it in one transaction'
    ' (pg_restore --single-transaction).'
  into what, fix
  from pg_class c
  where c.oid = any (v_tables)
    and not exists (select from pg_index x where x.indrelid = c.oid and x.indisprimary)
  having count(*) > 0;
  if what is null and p_also_subscribed then
    select format('subscription %I fills the tables', s.subname), 'Use the publisher. To move here, stop its'
      ' workers and producers, and drop the subscription when it has brought everything.'
    into what, fix
    from pg_subscription_rel r
    join pg_subscription s on s.oid = r.srsubid and s.subenabled
    where r.srrelid = any (v_tables)
    limit 1;
  end if;
end $$;

-- Refuses the first caller that comes to a database whose tables are still being filled. During the restore
-- of a dump, a worker would run jobs of which parts are missing, and never admit those that come later; in a
-- subscriber, it would run those of the publisher.
-- Raises: 55000, after which workers try again.
create or replace function queue._check_restored(p_also_subscribed boolean default true)
returns void language plpgsql stable parallel safe security invoker as $$
declare
  v_unrestored record := queue._unrestored(p_also_subscribed);
begin
  if v_unrestored.what is not null then
    raise exception using errcode = '55000', message = 'the queue is not restored completely',
      detail = v_unrestored.what, hint = v_unrestored.fix;
  end if;
end $$;

-- Raises: QJ090, always.
create or replace function queue._incompatible(message text, tables text)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ090', message = message,
    detail = format('tables: %s, code: %s', coalesce(tables, 'without their rows'), '@VERSION@'),
    hint = queue._how_to_fit(tables);
end $$;

-- What to run so that the code fits tables of this version.
create or replace function queue._how_to_fit(tables text)
returns text language plpgsql immutable parallel safe security invoker as $$
begin
  return case when tables is null then 'Run SELECT queue.install().'
    when tables = any (queue._versions()) then 'Run SELECT queue.migrate().'
    when string_to_array(substring(tables from '^[0-9.]*[0-9]'), '.')::numeric[]
      > string_to_array(substring('@VERSION@' from '^[0-9.]*[0-9]'), '.')::numeric[]
      then 'Upgrade the code: pgdefer upgrade, or ALTER EXTENSION pgdefer UPDATE.'
    else 'Install a release in between first, one that can migrate these tables.' end;
end $$;

-- Inserts the rows of the tables that have one row each, where they are missing: in new tables, and after a
-- restore without data. If there are jobs already, the new cursor has passed them all, so that none is
-- admitted twice. The era then ends as after a restore into another cluster (admit/restore.sql), which admits
-- the other jobs.
-- Locks: the caller holds queue.access, against others that do this.
create or replace function queue._fill_tables()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_table text;
  v_is_empty boolean;
  v_is_filled boolean := false;
begin
  foreach v_table in array '{installation,cursor,admission,horizon,minute_cursor}'::text[] loop
    execute format('select not exists (select from queue.%I)', v_table) into v_is_empty;
    if v_is_empty then
      execute format('insert into queue.%I default values', v_table);
      v_is_filled := true;
    end if;
  end loop;
  if v_is_filled and exists (select from queue.log) then
    update queue.cursor k set next_xid = pg_snapshot_xmax(pg_current_snapshot()) where k.next_xid = '3';
    update queue.installation i set system_identifier = 0, era = '';
  elsif v_is_filled then
    update queue.installation i
    set system_identifier = (select c.system_identifier from pg_control_system() c);
    perform queue._begin_era(queue._era());
  end if;
end $$;

-- Records the version of the tables: in the row, and as the column's default, which is also in a dump without
-- data.
create or replace function queue._set_version(p_version text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  execute format('alter table queue.installation alter column version set default %L', p_version);
  execute 'update queue.installation set version = $1' using p_version;
end $$;

-- The version of the tables; NULL if there are none, or if a restore without data has left them empty.
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
