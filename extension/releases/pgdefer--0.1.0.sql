-- pgdefer 0.1.0, the extension: code only. Next: select queue.install().
\echo Use "CREATE EXTENSION pgdefer" to load this file. \quit

do $pgdefer_guard$
declare
  v_owner oid := (
    select n.nspowner from pg_catalog.pg_namespace n
    where n.nspname operator(pg_catalog.=) 'queue');
  v_schema oid := 'queue'::pg_catalog.regnamespace;
  v_others text;
  v_is_ours boolean := (
    select v_owner operator(pg_catalog.=) r.oid
      or (not r.rolsuper and pg_catalog.pg_has_role(r.oid, v_owner, 'USAGE'))
    from pg_catalog.pg_roles r where r.rolname operator(pg_catalog.=) current_user);
begin
  if not v_is_ours then
    raise exception using
      errcode = '42501',
      message = 'schema queue belongs to another role',
      detail = pg_catalog.format(
        'It belongs to %s, and this is %s.', pg_catalog.pg_get_userbyid(v_owner), current_user),
      hint = 'Install as its owner (SET ROLE), or into another database.';
  end if;
  select pg_catalog.string_agg(x.name, ', ' order by x.name) into v_others
  from (
    select distinct case x.role when 0 then 'PUBLIC' else pg_catalog.pg_get_userbyid(x.role) end
    from (
      select a.grantee
      from pg_catalog.pg_namespace n
      cross join lateral pg_catalog.aclexplode(n.nspacl) a
      where n.nspname operator(pg_catalog.=) 'queue'
        and a.privilege_type operator(pg_catalog.=) 'CREATE'
      union all
      select p.proowner from pg_catalog.pg_proc p
      where p.pronamespace operator(pg_catalog.=) v_schema
      union all
      select c.relowner from pg_catalog.pg_class c
      where c.relnamespace operator(pg_catalog.=) v_schema
      union all
      select t.typowner from pg_catalog.pg_type t
      where t.typnamespace operator(pg_catalog.=) v_schema
      union all
      select o.oprowner from pg_catalog.pg_operator o
      where o.oprnamespace operator(pg_catalog.=) v_schema) x (role)
    where x.role operator(pg_catalog.=) 0 or not pg_catalog.pg_has_role(x.role, v_owner, 'USAGE')
    ) x (name);
  if v_others is not null then
    raise exception using
      errcode = '42501',
      message = 'others may create in schema queue, or have objects there',
      detail = pg_catalog.format('Roles: %s.', v_others),
      hint = 'They could have functions of theirs run with the rights of this one. REVOKE CREATE ON'
        ' SCHEMA queue FROM them, drop what is theirs there, and install again.';
  end if;
end
$pgdefer_guard$;
do $pgdefer_guard$
begin
  if exists (
    select from pg_catalog.pg_proc p
    where p.pronamespace operator(pg_catalog.=) 'queue'::pg_catalog.regnamespace
      and p.proname operator(pg_catalog.=) 'install'
      and not exists (
        select from pg_catalog.pg_depend d
        where d.classid operator(pg_catalog.=) 'pg_catalog.pg_proc'::pg_catalog.regclass
          and d.objid operator(pg_catalog.=) p.oid and d.deptype operator(pg_catalog.=) 'e'))
  then
    raise exception using
      errcode = '55000',
      message = 'pgdefer is installed in the plain form here',
      hint = 'Run its newer pgdefer.sql to upgrade it. To have the extension in its place, drop the'
        ' functions in schema queue first (docs/installing.md); tables and jobs stay.';
  end if;
end
$pgdefer_guard$;

-- sql/00_errors.sql
-- Errors: every one has a stable SQLSTATE, a fixed message, the ids in DETAIL and what to do in HINT.

-- Raises: 22023, always. A detail may hold what a caller gave, so it is cut.
create or replace function queue._invalid(message text, hint text, detail text default '')
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  if detail = '' then
    raise exception using errcode = '22023', message = message, hint = hint;
  end if;
  raise exception using errcode = '22023', message = message, detail = left(detail, 2000), hint = hint;
end $$;

-- Raises: 22023 unless value is a name: 1 to 1,000 bytes. `what` is the argument's name.
create or replace function queue._check_name(what text, value text)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if value is null or value = '' then
    perform queue._invalid(what || ' is missing', 'Give a name of 1 to 1,000 bytes.');
  elsif octet_length(value) > 1000 then
    perform queue._invalid(what || ' is too long', 'Names are at most 1,000 bytes.',
                           octet_length(value) || ' bytes');
  end if;
end $$;

-- Raises: 22023 unless value, which may be NULL, is a list without NULL: array_position can't look into arrays of arrays.
create or replace function queue._check_list(what text, value text[])
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if array_ndims(value) > 1 then
    perform queue._invalid(what || ' must be a plain list', 'Pass an array of one dimension.');
  elsif array_position(value, null) is not null then
    perform queue._invalid(what || ' holds NULL', 'Pass a list without NULL.');
  end if;
end $$;

-- Raises: 22023 unless ids is a list of ids, without NULL, and no longer than one call may work on: its answer travels with ADM
-- held, and 1,000 rows fit into what the sockets' buffers take in any case (41_deliver.sql).
create or replace function queue._check_ids(ids bigint[])
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if ids is null or array_ndims(ids) > 1 or array_position(ids, null) is not null then
    perform queue._invalid('ids must be a list of ids', 'Pass ids of jobs, without NULL.');
  elsif cardinality(ids) > 1000 then
    perform queue._invalid('ids holds more than 1,000', 'Call again for each further 1,000.', 'ids: ' || cardinality(ids));
  end if;
end $$;

-- Raises: 22023 unless value is a queue's name: as _check_name, and not ending in an asterisk.
create or replace function queue._check_queue(value text)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  perform queue._check_name('queue', value);
  if right(value, 1) = '*' then
    perform queue._invalid('a queue''s name may not end in *', 'Patterns such as prefix* select queues; a queue needs a plain name.',
                           'queue: ' || value);
  end if;
end $$;

-- Raises: 22023 when the object holds a key that is not among `known`, or is no object.
create or replace function queue._check_keys(what text, object jsonb, known text[])
returns void language plpgsql immutable parallel safe security invoker as $$
declare
  v_key text;
begin
  if object is null then
    return;
  end if;
  if jsonb_typeof(object) <> 'object' then
    perform queue._invalid(what || ' must be a JSON object', 'Pass an object such as {"key": "value"}.');
  end if;
  if object - known <> '{}'::jsonb then
    select k into v_key from jsonb_object_keys(object - known) k order by k limit 1;
    perform queue._invalid(format('%s has an unknown key', what),
                           format('Known keys: %s.', array_to_string(known, ', ')), format('key: %s', v_key));
  end if;
end $$;

-- What any moment can be moved by, forth and back: no part of it lies below zero (a month less and 40 days more is a
-- positive interval, and may lead out of the calendar all the same), and it is at most 4,000 years.
create or replace function queue._is_bounded(value interval)
returns boolean language plpgsql immutable parallel safe security invoker as $$
begin
  return value between interval '0' and interval '4000 years'
    and least(extract(year from value), extract(month from value), extract(day from value),
              extract(hour from value), extract(minute from value), extract(second from value)) >= 0;
end $$;

-- Raises: 22023 unless the interval, which may be NULL, is one that any moment can be moved by.
create or replace function queue._check_interval(what text, value interval)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if not queue._is_bounded(value) then
    perform queue._invalid(what || ' is out of range', 'Pass an interval such as ''5 minutes'', from 0 to 4,000 years.',
                           format('value: %s', value));
  end if;
end $$;

-- The interval that a JSON value gives, as text or as a number of seconds. One that begins with a minus means
-- different things under different settings of IntervalStyle, and is none.
-- Raises: 22023 when it gives none, or one that not every moment can be moved by.
create or replace function queue._interval(what text, value jsonb)
returns interval language plpgsql stable parallel unsafe security invoker as $$
declare
  v_interval interval;
begin
  if value is null or jsonb_typeof(value) = 'null' then
    return null;
  end if;
  begin
    if jsonb_typeof(value) = 'number' then
      v_interval := make_interval(secs => value::text::double precision);
    elsif jsonb_typeof(value) = 'string' and value #>> '{}' !~ '^[^0-9A-Za-z+]*-' then
      v_interval := (value #>> '{}')::interval;
    end if;
  exception when others then
    v_interval := null;
  end;
  if queue._is_bounded(v_interval) is not true then
    perform queue._invalid(what || ' is not an interval', 'Give an interval such as "5 minutes", or seconds as a number; from 0 to 4,000 years.',
                           'value: ' || left(value::text, 200));
  end if;
  return v_interval;
end $$;

-- Raises: 22023 unless the moment, which may be NULL, lies in the years 1 to 9999, where every client has a value for
-- it and any interval may be added; or, with may_be_never, is infinity.
create or replace function queue._check_moment(what text, value timestamptz, may_be_never boolean default false)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if not (value >= '0001-01-03 00:00+00' and value < '10000-01-01 00:00+00' or may_be_never and value = 'infinity') then
    if not isfinite(value) then
      perform queue._invalid(what || ' must be finite', 'Give a moment. To put a job aside without one, use queue.hold.');
    end if;
    perform queue._invalid(what || ' is out of range', 'Give a moment in the years 1 to 9999.', format('value: %s', value));
  end if;
end $$;

-- How many bytes JSON takes as text, or some number above p_most as soon as it is known to be that many. A number of 10
-- bytes may print 131,072 digits (1e131071): so large ones are counted first, one by one, and no text is made of all of
-- them.
create or replace function queue._text_size(p_value jsonb, p_most integer)
returns bigint language plpgsql immutable parallel unsafe security invoker as $$
declare
  v_number jsonb;
  v_size bigint := 0;
begin
  for v_number in select n from jsonb_path_query(p_value, 'strict $.** ? (@ > 1e400 || @ < -1e400)') n loop
    v_size := v_size + octet_length(v_number::text);
    if v_size > p_most then
      return v_size;
    end if;
  end loop;
  return octet_length(p_value::text);
exception when program_limit_exceeded or out_of_memory then
  -- a text of 1 GB, or so deep that its size can't be told
  return greatest(v_size, p_most + 1::bigint);
end $$;

-- Raises: 22023 when JSON takes more bytes as text than queue.configure lets it, else it is true. What is stored in less
-- than 2,000 bytes is not looked at: no JSON prints more than 8,193 bytes for each of them. A value from a table may be
-- compressed, and shows its size only when it is looked at.
create or replace function queue._check_size(what text, value jsonb)
returns boolean language plpgsql stable parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_most integer;
  v_size bigint;
begin
  if pg_column_size(value) < 2000 and pg_column_compression(value) is null then
    return true;
  end if;
  select i.max_size into v_most from queue.installation i;
  -- a digit, three bytes in a list, is stored in twelve
  v_size := case when pg_column_size(value) / 5 > v_most then pg_column_size(value) / 5 else queue._text_size(value, v_most) end;
  if v_size > v_most then
    perform queue._invalid(format('the JSON of %s is too large', what), 'Keep large data elsewhere and pass a reference to it. The owner may raise the limit: queue.configure.',
                           format('bytes as text: at least %s, allowed: %s', v_size, v_most));
  end if;
  return true;
end $$;

-- How many bytes args and headers take as text, where args take more than 2,000, else NULL: what fetch counts with.
-- Raises: 22023 when they are larger than queue.configure lets them be.
create or replace function queue._size_of(args jsonb, headers jsonb)
returns integer language plpgsql stable parallel unsafe security invoker as $$
declare
  v_size integer;
begin
  if pg_column_size(args) >= 2000 or pg_column_compression(args) is not null then
    perform queue._check_size('args', args);
  end if;
  v_size := octet_length(args::text);
  if v_size > 2000 or pg_column_size(headers) > 500 then
    return v_size + coalesce(octet_length(headers::text), 0);
  end if;
  return null;
end $$;

-- Raises: QJ001, always.
create or replace function queue._job_not_found(id bigint)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ001', message = 'job not found', detail = format('id: %s', id),
    hint = 'The id is wrong, its transaction has not committed, or the job was pruned or deleted.';
end $$;

-- Raises: QJ002, always.
create or replace function queue._claim_lost(id bigint, claim bigint)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ002', message = 'claim lost', detail = format('id: %s, claim: %s', id, claim),
    hint = 'The job was finished, reaped or taken over. Drop the result: another claim decides now.';
end $$;

-- Raises: QJ003, always.
create or replace function queue._invalid_state(id bigint, state text, hint text)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ003', message = 'the job''s state does not allow this',
    detail = format('id: %s, state: %s', id, state), hint = hint;
end $$;

-- Raises: QJ004, always.
create or replace function queue._already_queued(id bigint, queueing_lock text)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ004', message = 'already queued', detail = format('id: %s, queueing_lock: %s', id, queueing_lock),
    hint = 'Another job with this queueing_lock waits. Pass options {"on_conflict": "ignore"} or "replace", or carry on without it.';
end $$;

-- Raises: QJ007, always.
create or replace function queue._worker_gone(worker bigint)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ007', message = 'worker gone', detail = format('worker: %s', worker),
    hint = 'The worker was reaped or deregistered: abort its jobs and call queue.register_worker again.';
end $$;

-- Raises: QJ090 where there are no tables: public functions ask first (0.65 us).
create or replace function queue._not_installed()
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  if to_regclass('queue.installation') is null then
    raise exception using errcode = 'QJ090', message = 'the tables of the queue are missing', hint = 'Run SELECT queue.install().';
  end if;
end $$;

-- Raises: QJ008 outside READ COMMITTED: every proof in these files counts on a new snapshot per statement.
create or replace function queue._check_isolation()
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception using errcode = 'QJ008', message = 'wrong isolation level',
      detail = format('transaction_isolation: %s', current_setting('transaction_isolation')),
      hint = 'Call this in a READ COMMITTED transaction.';
  end if;
end $$;

create or replace function queue._create_tables()
returns void
language plpgsql
volatile
parallel unsafe
security invoker
as $pgdefer_tables$
begin
-- tables/10_installation.sql
-- One row: which version made the tables, for which cluster the stored transaction ids count, in which
-- era claims and workers were last numbered (54_eras.sql), and what queue.configure has set: max_size, how many
-- bytes JSON may take as text. written: the row's own xmin, which a copy of it lacks.
create table queue.installation (
  is_only boolean not null default true,
  version text not null,
  system_identifier bigint not null,
  era text not null,
  written xid,
  installed_at timestamptz not null default now(),
  max_size integer not null default 16777216,
  constraint installation_pkey primary key (is_only),
  constraint installation_only_check check (is_only)
);

-- ADM: whoever holds this row's lock is the one admitter. A row, not an advisory lock: only roles
-- with rights on the table can take it.
create table queue.admission (
  is_only boolean not null default true,
  constraint admission_pkey primary key (is_only),
  constraint admission_only_check check (is_only)
);
insert into queue.admission default values;

-- How far the log has been read: everything that was visible in the snapshot (next_xid, in_flight).
-- Replaced by a newer row, never updated, and read newest first, so that a held xmin costs nothing.
create table queue.cursor (
  tick bigint not null,
  next_xid xid8 not null,
  in_flight xid8[] not null,
  high_id bigint not null,
  has_backlog boolean not null,
  due_at timestamptz not null,
  constraint cursor_pkey primary key (tick)
);

-- Ranges of the log that nobody has looked through yet: rows with (xid, id) > (from_xid, from_id) and xid <= to_xid
-- that are visible in the snapshot upto, those of the transaction own excepted. is_first: none was older.
create table queue.backlog (
  no bigint not null,
  from_xid xid8 not null,
  from_id bigint not null,
  to_xid xid8 not null,
  upto pg_snapshot not null,
  own xid8,
  is_first boolean not null,
  constraint backlog_pkey primary key (no)
);

-- Parts of such ranges, a slice each, that have been looked through: read by priority. Rows whose priority lies between tops[i]
-- and bottoms[i] have yet to be admitted; priority is the first of tops. is_mixed: there were several of these bands.
create table queue.backlog_part (
  no bigint not null,
  priority integer not null,
  is_first boolean not null,
  is_mixed boolean not null,
  from_xid xid8 not null,
  from_id bigint not null,
  to_xid xid8 not null,
  to_id bigint not null,
  upto pg_snapshot not null,
  own xid8,
  tops integer[] not null,
  bottoms integer[] not null,
  constraint backlog_part_pkey primary key (no)
);
create index backlog_part_priority_idx on queue.backlog_part (priority desc, no);

-- tables/12_access.sql
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

-- tables/20_job.sql
-- What a job was given beside its task and args. NULL in queue, priority and flags stands for their defaults. size: the bytes of
-- args and headers as text, where args have more than 2,000.
create type queue.given as (
  queue text,
  priority integer,
  flags smallint,
  scheduled_at timestamptz,
  deadline timestamptz,
  lock text collate "C",
  queueing_lock text collate "C",
  needs bigint[],
  keys text[] collate "C",
  limits integer[],
  options jsonb,
  size integer
);

-- The log: what was deferred. Rows are appended by defer, and never changed until pruned. Narrow, as each column
-- costs an insert 1 %: most jobs are given nothing beside their task and args.
create table queue.log (
  id bigint generated by default as identity (sequence name queue.job_id_seq),
  xid xid8 not null default pg_current_xact_id(),
  created_at timestamptz not null default current_timestamp,
  task text not null,
  args jsonb not null default '{}',
  given queue.given,
  constraint log_pkey primary key (id)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);
-- The conditions of this index and of live_lane_idx keep a plan that was made while the table was empty
-- from looking for an id in them.
create index log_xid_idx on queue.log (xid, id) where xid is not null;

-- The log as it is read.
create view queue.job as
select l.id, l.xid, l.created_at, l.task, l.args, coalesce((l.given).queue, 'default') as queue, coalesce((l.given).priority, 0) as priority,
  coalesce((l.given).flags, 0::smallint) as flags, (l.given).scheduled_at, (l.given).deadline, (l.given).lock, (l.given).queueing_lock,
  (l.given).needs, (l.given).keys, (l.given).limits, (l.given).options, (l.given).size
from queue.log l;

-- What has changed since a job was deferred, and what its ended claims count. Most jobs have no row.
-- size: the bytes of args and headers as text, with args.
-- For jobs with needs: ignores_needs: its last yield said needs => NULL. is_yielded: it waits for one that
-- is open (mode any). began_xid: every transaction below it had ended when the last run began (mode any).
create table queue.job_state (
  id bigint not null,
  attempts integer not null default 0,
  claims integer not null default 0,
  failures integer not null default 0,
  crashes integer not null default 0,
  progress integer not null default 0,
  ignores_needs boolean not null default false,
  is_yielded boolean not null default false,
  extra_flags smallint not null default 0,
  priority integer,
  started_at timestamptz,
  scheduled_at timestamptz,
  deadline timestamptz,
  began_xid xid8,
  queue text,
  lock text collate "C",
  args jsonb,
  size integer,
  error text,
  constraint job_state_pkey primary key (id)
) with (fillfactor = 70);

-- Ready and running jobs. Narrow: a claim is a HOT update (48 bytes before, 72 after).
create table queue.live (
  id bigint not null,
  deadline timestamptz not null,
  lane integer not null,
  attempt smallint not null,
  flags smallint not null,
  claim bigint,
  claimed_at timestamptz,
  worker_id bigint,
  constraint live_pkey primary key (id)
) with (fillfactor = 38, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
        autovacuum_vacuum_cost_delay = 0);
create index live_lane_idx on queue.live (lane, deadline, id) where lane is not null;

-- A lane is what fetch reads in order: one (queue, priority), and of that one kind
-- (0 plain, 1 limited: claimed by the admitter only, 2 suspect: crashed before, claimed alone).
-- Nothing ready lies below its low mark; in an idle one nothing at all is ready.
create table queue.lane (
  lane integer not null,
  priority integer not null,
  kind smallint not null,
  extra_flags smallint not null default 0,
  queue text collate "C" not null,
  low_deadline timestamptz not null default '-infinity',
  low_id bigint not null default 0,
  paused_until timestamptz,
  is_idle boolean not null default false,
  constraint lane_pkey primary key (lane)
) with (fillfactor = 20);
create index lane_queue_idx on queue.lane (queue, priority, kind);
create index lane_busy_idx on queue.lane (lane) where not is_idle;

-- Admitted jobs that wait for something other than their turn at a lock. need_id: while this need stands
-- as it does, the job waits (34_needs.sql). One that waits for a slot holds what goes into queue.live;
-- has_several: of its keys, key is the first that was shut.
create table queue.waiting (
  id bigint not null,
  at timestamptz,
  need_id bigint,
  deadline timestamptz,
  lane integer,
  flags smallint,
  attempt smallint,
  has_several boolean,
  reason text not null,
  key text collate "C",
  constraint waiting_pkey primary key (id),
  constraint waiting_reason_check check (reason in ('schedule', 'needs', 'upstream_failed', 'slot', 'held', 'task_paused', 'parked'))
);
create index waiting_due_idx on queue.waiting (at, id) where at is not null;
create index waiting_slot_idx on queue.waiting (key, lane, id) where reason = 'slot';
create index waiting_parked_idx on queue.waiting (id) where reason = 'parked';

-- state: succeeded, failed or cancelled, in which check() believes no table: a constraint would be read anew
-- in every transaction, which takes as long as writing the row. The same holds for the kinds of queue.handover:
-- ended, again, replace, recheck, regate, refill.
create table queue.finished (
  id bigint not null,
  finished_at timestamptz not null,
  started_at timestamptz,
  purge_at timestamptz,
  worker_id bigint,
  attempts integer not null,
  state text not null,
  reason text,
  error text,
  result jsonb,
  constraint finished_pkey primary key (id)
);
-- Rows come in the order of time, so that a few pages of summaries do.
create index finished_at_idx on queue.finished using brin (finished_at) with (pages_per_range = 32, autosummarize = on);
create index finished_failed_idx on queue.finished (id) where state = 'failed';
create index finished_purge_idx on queue.finished (purge_at) where purge_at is not null;

-- Every attempt that did not succeed.
create table queue.attempt (
  job_id bigint not null,
  claim bigint not null,
  attempt integer not null,
  worker_id bigint,
  started_at timestamptz not null,
  finished_at timestamptz not null,
  outcome text not null,
  error text,
  details jsonb,
  constraint attempt_pkey primary key (job_id, claim),
  constraint attempt_outcome_check check (outcome in ('failed', 'crashed', 'timed_out', 'aborted', 'yielded', 'released'))
);

-- What ended claims leave for the next admitter: appended like the log, read with the same cursor.
create table queue.handover (
  xid xid8 not null default pg_current_xact_id(),
  seq bigint generated by default as identity,
  job_id bigint not null,
  kind text not null,
  flags smallint not null,
  payload jsonb,
  constraint handover_pkey primary key (xid, seq)
);

-- A claim's own lease, or the end of its timeout: what reap looks at beside dead workers. given_at: the last sign of life by which it was
-- set.
create table queue.lease (
  id bigint not null,
  claim bigint not null,
  expires_at timestamptz not null,
  is_own boolean not null,
  given_at timestamptz not null default clock_timestamp(),
  constraint lease_pkey primary key (id)
);
create index lease_expires_idx on queue.lease (expires_at);

-- Claims that their worker is told to abort, or that were taken from it.
create table queue.abort (
  id bigint not null,
  claim bigint not null,
  worker_id bigint not null,
  reason text not null,
  constraint abort_pkey primary key (id, claim)
);
create index abort_worker_idx on queue.abort (worker_id);

-- Claims that a fetch has made and not handed out, as its answer would have become too long (41_deliver.sql). is_alone: nothing may
-- run beside them.
create table queue.undelivered (
  worker_id bigint not null,
  no bigint generated by default as identity,
  id bigint not null,
  claim bigint not null,
  size integer not null,
  is_alone boolean not null,
  constraint undelivered_pkey primary key (worker_id, no)
);

create sequence queue.claim_seq;
create sequence queue.lane_seq as integer cycle;
create sequence queue.tick_seq;

-- tables/30_gates.sql
-- Every unfinished job that has a lock. The first by id has the turn (has_turn is written only where
-- it can't be told from the job's place, see 32_locks.sql); is_passed: nothing else holds it up.
create table queue.lock_member (
  lock text collate "C" not null,
  id bigint not null,
  is_mutex boolean not null,
  is_late boolean not null,
  is_passed boolean not null,
  has_turn boolean not null,
  constraint lock_member_pkey primary key (lock, id)
) with (fillfactor = 80);
create index lock_member_late_idx on queue.lock_member (lock, id) where is_late;
create index lock_member_mutex_idx on queue.lock_member (lock, id) where is_mutex;
create index lock_member_turn_idx on queue.lock_member (lock) where has_turn;

-- How many claims run under a key (used, of slots), and per lane how many of its jobs are ready and how many
-- wait for a slot, none with an id below low. Replaced by a newer row, read newest first (see queue.cursor).
-- The key's first letter is its kind: k a concurrency key, m a lock with mutex jobs, q a queue. limit_id:
-- the job that has set slots.
create table queue.semaphore (
  key text collate "C" not null,
  tick bigint not null,
  limit_id bigint not null,
  slots integer not null,
  used integer not null,
  lanes integer[] not null,
  ready integer[] not null,
  waiting integer[] not null,
  lows bigint[] not null,
  constraint semaphore_pkey primary key (key, tick)
);
create index semaphore_idle_idx on queue.semaphore (tick) where used = 0 and lanes = '{}';

-- Who holds a queueing lock. replacing: a replacement is committed and not yet applied.
create table queue.queueing_lock (
  key text collate "C" not null,
  job_id bigint not null,
  replacing bigint,
  constraint queueing_lock_pkey primary key (key)
);
create index queueing_lock_replacing_idx on queue.queueing_lock (key) where replacing is not null;

-- Starts under a queue's rate, as many as its limit, numbered.
create table queue.rate_start (
  queue text collate "C" not null,
  no bigint not null,
  at timestamptz not null,
  constraint rate_start_pkey primary key (queue, no)
);

-- tables/35_expiry.sql
-- Jobs that must not start after a time.
create table queue.expiry (
  id bigint not null,
  at timestamptz not null,
  constraint expiry_pkey primary key (id)
);
create index expiry_at_idx on queue.expiry (at, id);

-- tables/36_needs.sql
-- Who needs whom, for admitted jobs. mode: 1 any, 2 proceed. is_open: not satisfied when the job's last
-- run began (mode any). deleted_state: what the needed job was when it was pruned, or deleted by force.
create table queue.need (
  job_id bigint not null,
  need_id bigint not null,
  is_open boolean not null default true,
  mode smallint not null,
  deleted_state text,
  constraint need_pkey primary key (job_id, need_id),
  constraint need_deleted_check check (deleted_state in ('succeeded', 'failed'))
);
-- The condition keeps a plan from looking for a job_id in it.
create index need_id_idx on queue.need (need_id, job_id) where need_id is not null;

-- Its last value is the largest id that was ever needed: a sequence, so that reading it meets no dead rows.
create sequence queue.needed_seq minvalue 0 start 0;

-- Jobs that clients wait for. The sequence's last value is about the largest id among them (36_results.sql).
create table queue.awaited (
  id bigint not null,
  no bigint generated by default as identity,
  since timestamptz not null,
  constraint awaited_pkey primary key (id, no)
);
create sequence queue.awaited_seq minvalue 0 start 0;

-- Up to when retention counts (62_retention.sql): safe_at, or looked_at once every transaction up to
-- looked_xid has ended.
create table queue.horizon (
  is_only boolean not null default true,
  looked_at timestamptz not null default '-infinity',
  looked_xid xid8 not null default '0',
  safe_at timestamptz not null default '-infinity',
  constraint horizon_pkey primary key (is_only),
  constraint horizon_only_check check (is_only)
) with (fillfactor = 20);
insert into queue.horizon default values;

-- tables/38_deleted.sql
-- Succeeded jobs that an operator has deleted, as long as a transaction may be under way that names them as
-- needs. until: once every transaction below it has ended none can be.
create table queue.deleted (
  id bigint not null,
  until xid8,
  constraint deleted_pkey primary key (id)
);

-- tables/40_registry.sql
-- is_plain: it has no more than a queue and a priority. given: these, as a job of such a task has them.
create table queue.task (
  name text collate "C" not null,
  priority integer,
  deadline interval,
  is_plain boolean not null,
  queue text,
  lock text,
  queueing_lock text,
  keys text[],
  limits integer[],
  options jsonb,
  defaults jsonb not null,
  given queue.given generated always as (
    case when num_nonnulls(queue, priority) > 0
         then row(queue, priority, null, null, null, null, null, null, null, null, null, null)::queue.given end) stored,
  constraint task_pkey primary key (name)
);

-- limited_at: when its limits were set.
create table queue.queue_config (
  queue text collate "C" not null,
  created_at timestamptz not null default now(),
  limited_at timestamptz,
  max_running integer,
  rate_limit integer,
  rate_per interval,
  retain interval,
  constraint queue_config_pkey primary key (queue)
);

-- Calls of pause and resume, newest first: the latest that matches a queue and a task wins.
create table queue.pause (
  no bigint generated by default as identity,
  queue text collate "C",
  task text collate "C",
  is_paused boolean not null,
  until timestamptz,
  constraint pause_pkey primary key (no)
);

-- has_left: it said good-bye (deregister_worker). is_clear: gone, and its claims have ended. waits_for: the virtual transactions that may have seen it alive.
-- is_over: those have ended, and what they claimed too.
create table queue.worker (
  id bigint generated by default as identity,
  name text not null,
  queues text[],
  info jsonb not null,
  registered_at timestamptz not null,
  last_seen_at timestamptz not null,
  dead_after interval not null,
  gone_at timestamptz,
  has_left boolean not null default false,
  is_clear boolean not null default false,
  waits_for text[],
  is_over boolean not null default false,
  constraint worker_pkey primary key (id)
) with (fillfactor = 50);

-- tables/50_schedules.sql
-- Recurring runs: what is to run when. next_run_at is the first run that has not been dealt with, so
-- that no run can be dealt with twice, whatever the clock does. due_at is when admission looks at the row
-- again: at next_run_at, or later where reason says why. Null: disabled.
create table queue.schedule (
  name text collate "C" not null,
  due_at timestamptz,
  next_run_at timestamptz,
  last_run_at timestamptz,
  last_job_id bigint,
  is_enabled boolean not null,
  is_plain boolean not null,
  skips_overlap boolean not null,
  catch_up text not null,
  max_delay interval,
  created_at timestamptz not null,
  changed_at timestamptz not null,
  cron text not null,
  parsed bigint[] not null,
  timezone text not null,
  task text not null,
  args jsonb not null,
  options jsonb not null,
  reason text,
  constraint schedule_pkey primary key (name),
  constraint schedule_catch_up_check check (catch_up in ('none', 'latest', 'all')),
  constraint schedule_due_check check ((due_at is null) = (next_run_at is null))
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
-- Nothing lies before the cursor's due_at, so that dead rows are not met.
create index schedule_due_idx on queue.schedule (due_at) where due_at is not null;

-- What became of each run: the job, or why there is none.
create table queue.schedule_run (
  name text collate "C" not null,
  run_at timestamptz not null,
  decided_at timestamptz not null,
  job_id bigint,
  is_manual boolean not null,
  skipped text,
  detail text,
  constraint schedule_run_pkey primary key (name, run_at),
  constraint schedule_run_outcome_check check ((job_id is null) <> (skipped is null))
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 20000);
create index schedule_run_decided_idx on queue.schedule_run using brin (decided_at) with (pages_per_range = 32, autosummarize = on);

-- tables/88_unadmitted.sql
-- Jobs that are committed and that admission has not read yet. Private.
create view queue.unadmitted as
select j.id, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs
from (select k.next_xid, k.in_flight from queue.cursor k order by k.tick desc limit 1) k
cross join lateral (
  select j.id, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs
  from queue.job j where j.xid >= k.next_xid
  union all
  select j.id, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs
  from unnest(k.in_flight) x cross join lateral (
    select j.id, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs from queue.job j
    where j.xid = x offset 0) j
  union all
  select j.id, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs
  from (select b.from_xid, b.from_id, b.to_xid, 9223372036854775807 as to_id from queue.backlog b
        union all select p.from_xid, p.from_id, p.to_xid, p.to_id from queue.backlog_part p) b
  cross join lateral (
    select j.id, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs from queue.job j
    where (j.xid, j.id) > (b.from_xid, b.from_id) and (j.xid, j.id) <= (b.to_xid, b.to_id) offset 0) j
  where not exists (select from queue.live v where v.id = j.id) and not exists (select from queue.waiting w where w.id = j.id)
    and not exists (select from queue.finished f where f.id = j.id)
    and not exists (select from queue.lock_member m where m.lock = j.lock and m.id = j.id)
  offset 0) j;

-- tables/90_views.sql
-- What fetch returns of a claimed job: as it was deferred, but for what has changed since. Private.
create view queue.claimed as
select v.id, v.claim, j.task, coalesce(s.args, j.args) as args, coalesce(s.queue, j.queue) as queue,
  coalesce(s.priority, j.priority) as priority, nullif(coalesce(s.lock, j.lock), '') as lock, v.attempt::integer as attempt,
  nullif(coalesce(s.scheduled_at, j.scheduled_at), '-infinity') as scheduled_at, coalesce(s.deadline, j.deadline) as deadline,
  (j.options ->> 'timeout')::interval as timeout, j.options -> 'headers' as headers, (j.options ->> 'parent')::bigint as parent
from queue.live v
cross join lateral (
  select j.task, j.args, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.options
  from queue.job j where j.id = v.id offset 0) j
left join lateral (
  select s.args, s.queue, s.priority, s.lock, s.scheduled_at, s.deadline
  from queue.job_state s where s.id = v.id and v.flags & 2048 <> 0 offset 0) s on true;

-- What fetch says of a job that nothing has changed since it was deferred, when it starts for the first time.
create view queue.first_run as
select j.id, j.task, j.args, j.queue, j.priority, nullif(j.lock, '') as lock, 1 as attempt, nullif(j.scheduled_at, '-infinity') as scheduled_at,
  j.deadline, (j.options ->> 'timeout')::interval as timeout, j.options -> 'headers' as headers, (j.options ->> 'parent')::bigint as parent
from queue.job j;

create view queue.jobs as
select j.id, j.task, coalesce(s.queue, j.queue) as queue,
  case
    when f.id is not null then f.state
    when v.claim is not null then 'running'
    when v.id is not null and coalesce(r.scheduled_at <= statement_timestamp(), true) then 'ready'
    when w.reason = 'held' then 'held'
    when w.reason = 'schedule' and coalesce(r.scheduled_at > statement_timestamp(), true) then 'scheduled'
    when w.reason = 'needs' then 'waiting'
    when w.reason = 'upstream_failed' then 'upstream_failed'
    when w.reason in ('slot', 'parked') then 'blocked'
    when w.reason = 'task_paused' then 'ready'
    when m.id is not null and m.is_passed
      and not (s.claims > 0 and exists (select from queue.handover h where h.job_id = j.id and h.kind = 'again')) then 'blocked'
    when j.flags & 32 <> 0 and s.id is null then 'held'
    when coalesce(r.scheduled_at, s.scheduled_at, j.scheduled_at) > statement_timestamp() then 'scheduled'
    when j.needs is not null and s.id is null then 'waiting'
    else 'ready'
  end as state,
  case
    when f.id is not null then f.reason
    when v.claim is not null then a.reason
    when w.reason = 'task_paused' or v.id is not null and l.paused_until > statement_timestamp() then 'paused'
    when w.reason = 'slot' then case left(w.key, 1) when 'm' then 'lock' else 'limit' end
    when w.reason = 'parked' then 'backlog'
    when w.id is null and v.id is null and m.is_passed
      and not (s.claims > 0 and exists (select from queue.handover h where h.job_id = j.id and h.kind = 'again')) then 'lock'
  end as reason,
  coalesce(r.args, s.args, j.args) as args, coalesce(r.priority, s.priority, j.priority) as priority, nullif(coalesce(s.lock, j.lock), '') as lock,
  j.queueing_lock, j.keys[1] as concurrency_key, coalesce(n.needs, j.needs) as needs, coalesce(s.deadline, j.deadline) as deadline,
  nullif(coalesce(r.scheduled_at, s.scheduled_at, j.scheduled_at), '-infinity') as scheduled_at, (j.options ->> 'expires_at')::timestamptz as expires_at,
  j.created_at, coalesce(v.claimed_at, f.started_at, s.started_at) as started_at, f.finished_at,
  coalesce(f.attempts, v.attempt, s.attempts, 0)::integer as attempts, coalesce(s.failures, 0) as failures,
  coalesce(s.crashes, 0) as crashes,
  coalesce(s.claims, 0) + case when v.claim is not null or f.state = 'succeeded' and f.worker_id is not null then 1 else 0 end as claims,
  v.claim, coalesce(v.worker_id, f.worker_id) as worker_id, coalesce(f.error, case when f.id is null then s.error end) as error, f.result,
  j.options ->> 'description' as description, j.options -> 'headers' as headers, (j.options ->> 'parent')::bigint as parent,
  coalesce(s.progress, 0) as progress
from queue.job j
left join queue.job_state s on s.id = j.id
left join queue.live v on v.id = j.id
left join queue.lane l on l.lane = v.lane
left join queue.abort a on a.id = v.id and a.claim = v.claim
left join queue.finished f on f.id = j.id
left join queue.waiting w on w.id = j.id
left join queue.lock_member m on m.lock = coalesce(s.lock, j.lock) and m.id = j.id
left join lateral (
  -- a replacement that is committed and not admitted yet: of those of a key the last
  select h.payload -> 'args' as args, (h.payload ->> 'priority')::integer as priority,
    coalesce((h.payload ->> 'scheduled_at')::timestamptz, '-infinity') as scheduled_at
  from queue.handover h
  where j.flags & (256 | 8192) <> 0 and h.job_id = j.id and h.kind = 'replace' and f.id is null and v.claim is null
  order by h.seq desc limit 1) r on true
left join lateral (select array_agg(d.need_id order by d.need_id) as needs from queue.need d where (j.flags | coalesce(s.extra_flags, 0)) & 8 <> 0 and d.job_id = j.id) n on true
where (select x.is_all from queue.visible x) or coalesce(s.queue, j.queue) like any ((select x.queues from queue.visible x)::text[]);

create view queue.attempts as
select a.job_id, a.attempt, a.claim, a.worker_id, a.started_at, a.finished_at, a.outcome, a.error, a.details
from queue.attempt a
where (select x.is_all from queue.visible x)
  or exists (select from queue.job j left join queue.job_state s on s.id = j.id
             where j.id = a.job_id and coalesce(s.queue, j.queue) like any ((select x.queues from queue.visible x)::text[]));

create view queue.workers as
select w.id, w.name, w.queues, w.info, w.registered_at, w.last_seen_at, w.dead_after,
  w.gone_at is null and w.last_seen_at + w.dead_after >= statement_timestamp() as is_alive,
  coalesce(v.running, 0)::integer as running
from queue.worker w
left join (select v.worker_id, count(*) as running from queue.live v where v.claim is not null group by v.worker_id) v on v.worker_id = w.id
where (select x.is_all from queue.visible x)
  or exists (select from unnest(w.queues) q where q like any ((select x.queues from queue.visible x)::text[]));

create view queue.tasks as
select t.name, t.defaults from queue.task t;

create view queue.queues as
select q.queue as name, q.created_at, c.max_running, c.rate_limit, c.rate_per, c.retain, coalesce(x.ready, 0) as ready,
  coalesce(x.running, 0) as running, nullif(greatest(p.paused_until, statement_timestamp()), statement_timestamp()) as paused_until
from (select c.queue, c.created_at from queue.queue_config c
      union all
      select u.queue, null as created_at
      from (select l.queue from queue.lane l union select a.queue from queue.unadmitted a) u
      where not exists (select from queue.queue_config c where c.queue = u.queue)) q
left join queue.queue_config c on c.queue = q.queue
left join lateral (
  select case when p.is_paused then coalesce(p.until, 'infinity') end as paused_until
  from queue.pause p
  where p.task is null and (p.queue is null or p.queue = q.queue or right(p.queue, 1) = '*' and starts_with(q.queue, left(p.queue, -1)))
  order by p.no desc limit 1) p on true
left join (select l.queue, count(v.id) filter (where v.claim is null) as ready,
             count(v.id) filter (where v.claim is not null) as running
           from queue.lane l left join queue.live v on v.lane = l.lane group by l.queue) x on x.queue = q.queue
where (select v.is_all from queue.visible v) or q.queue like any ((select v.queues from queue.visible v)::text[]);

comment on view queue.jobs is 'Every job that is kept, in its state as far as it is known.';
comment on view queue.attempts is 'Every attempt that did not succeed.';
comment on view queue.workers is 'Registered workers, and those that have gone within the last minute.';
comment on view queue.tasks is 'Registered tasks and their defaults.';
comment on view queue.queues is 'Queues that are configured, or that have had jobs which were ready.';

-- tables/92_views_gates.sql
create view queue.locks as
select m.lock,
  (array_agg(m.id order by v.claim is not null desc, m.has_turn desc, m.id))[1] as job_id,
  count(v.claim)::integer as running,
  (count(*) - count(v.claim))::integer as waiting,
  bool_or(m.is_mutex) as has_mutex
from queue.lock_member m
left join queue.live v on v.id = m.id
group by m.lock;

create view queue.semaphores as
select case left(s.key, 1) when 'k' then 'concurrency_key' when 'm' then 'lock' else 'queue' end as kind,
  substr(s.key, 2) as key, s.slots as "limit", s.used,
  (select coalesce(sum(r), 0) from unnest(s.ready) r)::integer as ready,
  (select coalesce(sum(w), 0) from unnest(s.waiting) w)::integer as waiting
from (select distinct on (s.key) s.key, s.slots, s.used, s.ready, s.waiting from queue.semaphore s order by s.key, s.tick desc) s;

comment on view queue.locks is 'Locks with unfinished jobs: the job that runs or comes first, how many run (one at most) and wait.';
comment on view queue.semaphores is
  'Concurrency keys, mutex locks and max_running of queues: the limit, how many claims use it, how many jobs are ready for it and wait.';

-- tables/94_views_schedules.sql
create view queue.schedules as
select s.name, s.cron, s.timezone, s.task, s.args, s.options, s.is_enabled as enabled,
  s.next_run_at, s.last_run_at, s.last_job_id, case when s.is_enabled then s.reason else 'disabled' end as reason,
  s.catch_up, s.max_delay, case when s.skips_overlap then 'skip' else 'allow' end as overlap, s.options ->> 'source' as source,
  s.created_at, s.changed_at
from queue.schedule s;

create view queue.schedule_runs as
select r.name, r.run_at, r.job_id, r.skipped, r.detail, r.is_manual as manual, r.decided_at
from queue.schedule_run r;

comment on view queue.schedules is
  'Recurring runs: when each runs next, and the last run that was dealt with. reason: why nothing runs, though it should: disabled, paused, queueing_lock, or the error of the last run.';
comment on view queue.schedule_runs is
  'What became of each run, for the last 100 of each schedule at least: its job, or why it was skipped: missed, max_delay, overlap, queueing_lock, changed, error; detail says more. manual: by run_now.';

-- tables/96_views_operations.sql
create index finished_cancelled_idx on queue.finished (id) where state = 'cancelled';
-- Lists of these, however many others wait for their time or for a slot.
create index waiting_list_idx on queue.waiting (reason, id) where reason in ('held', 'upstream_failed', 'needs', 'task_paused');
create index attempt_at_idx on queue.attempt using brin (finished_at) with (pages_per_range = 32, autosummarize = on);

-- Jobs that are not finished, without a look at those that are. due_at: since when it could have run, but for
-- its gates. Private.
create view queue.unfinished as
select j.id, j.task, coalesce(s.queue, j.queue) as queue,
  coalesce(u.state, case when coalesce(s.scheduled_at, j.scheduled_at) > statement_timestamp() then 'scheduled' else 'ready' end) as state,
  coalesce(nullif(coalesce(s.scheduled_at, j.scheduled_at), '-infinity'), j.created_at) as due_at
from (
  select v.id, case when v.claim is null then 'ready' else 'running' end as state from queue.live v
  union all
  select w.id, case w.reason when 'schedule' then 'scheduled' when 'needs' then 'waiting' when 'slot' then 'blocked' when 'parked' then 'blocked'
    when 'task_paused' then 'ready' else w.reason end
  from queue.waiting w
  union all
  select m.id, 'blocked' as state
  from queue.lock_member m
  where not exists (select from queue.live v where v.id = m.id) and not exists (select from queue.waiting w where w.id = m.id)
    and not exists (select from queue.finished f where f.id = m.id)
    and not exists (select from queue.handover h where h.job_id = m.id and h.kind = 'again')
  union all
  -- by its time, as in queue.jobs
  select h.job_id, null as state from queue.handover h where h.kind = 'again'
  union all
  select a.id, case when a.flags & 32 <> 0 then 'held' when a.scheduled_at > statement_timestamp() then 'scheduled' when a.needs is not null then 'waiting' else 'ready' end
  from queue.unadmitted a) u
join queue.job j on j.id = u.id
left join queue.job_state s on s.id = u.id;

create view queue.metrics as
with u as materialized (
  select u.queue, count(*) filter (where u.state = 'scheduled') as scheduled, count(*) filter (where u.state = 'waiting') as waiting,
    count(*) filter (where u.state = 'upstream_failed') as upstream_failed, count(*) filter (where u.state = 'blocked') as blocked,
    count(*) filter (where u.state = 'ready') as ready, count(*) filter (where u.state = 'running') as running,
    count(*) filter (where u.state = 'held') as held, min(u.due_at) filter (where u.state = 'ready') as oldest_ready_at
  from queue.unfinished u group by u.queue)
select q.name as queue,
  coalesce((select p.is_paused and coalesce(p.until > statement_timestamp(), true) from queue.pause p
            where p.task is null and (p.queue is null or p.queue = q.name or right(p.queue, 1) = '*' and starts_with(q.name, left(p.queue, -1)))
            order by p.no desc limit 1), false)::integer as paused,
  coalesce(u.scheduled, 0) as scheduled, coalesce(u.waiting, 0) as waiting,
  coalesce(u.upstream_failed, 0) as upstream_failed, coalesce(u.blocked, 0) as blocked, coalesce(u.ready, 0) as ready,
  coalesce(u.running, 0) as running, coalesce(u.held, 0) as held, coalesce(f.failed, 0) as failed,
  coalesce(extract(epoch from statement_timestamp() - u.oldest_ready_at), 0)::double precision as oldest_ready_seconds,
  coalesce(d.succeeded, 0) as succeeded_5m, coalesce(d.failed, 0) as failed_5m, coalesce(d.cancelled, 0) as cancelled_5m,
  (select count(*) from queue.worker w
   where w.gone_at is null and w.last_seen_at + w.dead_after >= statement_timestamp() and (w.queues is null or exists (
     select from unnest(w.queues) p where p = q.name or right(p, 1) = '*' and starts_with(q.name, left(p, -1))))) as workers
from (select c.queue as name from queue.queue_config c union select l.queue from queue.lane l union select u.queue from u) q
left join u on u.queue = q.name
left join (
  select coalesce(s.queue, j.queue) as queue, count(*) as failed
  from queue.finished f join queue.job j on j.id = f.id left join queue.job_state s on s.id = f.id
  where f.state = 'failed' group by 1) f on f.queue = q.name
left join (
  select coalesce(s.queue, j.queue) as queue, count(*) filter (where f.state = 'succeeded') as succeeded,
    count(*) filter (where f.state = 'failed') as failed, count(*) filter (where f.state = 'cancelled') as cancelled
  from queue.finished f join queue.job j on j.id = f.id left join queue.job_state s on s.id = f.id
  where f.finished_at > statement_timestamp() - interval '5 minutes' group by 1) d on d.queue = q.name
where (select v.is_all from queue.visible v) or q.name like any ((select v.queues from queue.visible v)::text[]);

comment on view queue.metrics is
  'A row for each queue with its figures, for postgres_exporter: queue is a label, the others are gauges. By state the jobs there are; those that ended in the last 5 minutes; live workers that serve it.';
end
$pgdefer_tables$;

-- The releases whose tables can be migrated, oldest first, and this one.
create or replace function queue._versions()
returns text[]
language plpgsql
immutable
parallel safe
security invoker
as $$
begin
  return array['0.1.0']::text[];
end $$;

-- The indexes of large tables that the step from a release brings.
create or replace function queue._step_indexes(p_from text)
returns text[]
language plpgsql
immutable
parallel safe
security invoker
as $$
begin
  return '{}'::text[];
end $$;

-- Takes the tables of one release to the next, which it returns; NULL where no step leads on.
create or replace function queue._migrate_tables(p_from text)
returns text
language plpgsql
volatile
parallel unsafe
security invoker
as $pgdefer_tables$
begin
  return null;
end
$pgdefer_tables$;

-- sql/05_install.sql
-- Installing and migrating: the extension holds code only, the tables are ordinary objects.

-- Locks: where there are tables, as migrate. Else no role but the owner can hold up who makes them: another installer is waited
-- for by the first table, whose name both want, and is then found to have made it.
create or replace function queue.install()
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.installation') is null then
    begin
      perform queue._create_tables();
      execute format('insert into queue.installation (version, system_identifier, era) values (%L, %s, '''')',
                     '0.1.0', (select system_identifier from pg_control_system()));
      execute 'insert into queue.cursor values (0, ''3'', ''{}'', 0, false, ''-infinity'')';
      perform queue._begin_era(queue._era());
      return '0.1.0';
    exception when duplicate_table or unique_violation then
      if to_regclass('queue.installation') is null then
        raise;
      end if;
    end;
  end if;
  return queue.migrate();
end $$;
comment on function queue.install() is
  'Makes the tables and views of the queue in schema queue, or migrates those that are there. Returns the version; a second call changes nothing.';

-- Locks: queue.access against others who install, migrate, grant or revoke (a table, which no role but the owner can
-- lock against us); those of a step's DDL, for which it waits 100 ms at a time, so that whoever defers waits
-- no longer behind it, and a hundred times. A large index that is missing is not built here, but told of.
-- Raises: QJ090 when the tables are of a version that no step leads from, or there are none; 55P03 when a
-- transaction that has used the tables stays open too long.
create or replace function queue.migrate()
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_version text;
  v_index record;
  v_timeout text := current_setting('lock_timeout');
begin
  if to_regclass('queue.access') is not null then
    lock table queue.access in share row exclusive mode;
  end if;
  loop
    v_version := queue._tables_version();
    if v_version is null then
      perform queue._not_installed();
    elsif not v_version = any (queue._versions()) then
      perform queue._incompatible('no migration leads from the tables to this code', v_version,
                                  'Install the code of the version that the tables have, or one that follows it.');
    end if;
    exit when v_version = '0.1.0';
    for v_try in 1 .. 100 loop
      begin
        perform set_config('lock_timeout', '100ms', true);
        v_version := queue._migrate_tables(v_version);
        execute 'update queue.installation set version = $1' using v_version;
        perform set_config('lock_timeout', v_timeout, true);
        exit;
      exception when lock_not_available then
        if v_try = 100 then
          raise exception using errcode = '55P03', message = 'the tables are in use by a transaction that stays open',
            detail = format('tables: %s, code: %s', v_version, '0.1.0'),
            hint = 'Nothing was changed. End the transactions that have been open for long (see pg_stat_activity), and call it again.';
        end if;
      end;
    end loop;
  end loop;
  for v_index in select i.statement, i.is_large from queue._missing_indexes() i loop
    if v_index.is_large then
      raise warning using message = 'a large index is missing: ' || v_index.statement,
        hint = 'Run each statement that queue.migration() returns, outside a transaction. psql runs them all by its gexec.';
    else
      execute replace(v_index.statement, ' concurrently', '');
    end if;
  end loop;
  perform queue._restore_grants();
  return v_version;
end $$;
comment on function queue.migrate() is
  'Brings the tables to the version of the code, which it returns, and gives every role what grant_access gave it, new functions included. Nobody who defers waits for it longer than a moment. Large indexes it leaves to queue.migration, with a warning. Raises QJ090 when no migration leads there.';

-- Raises: QJ090 without tables.
create or replace function queue.migration()
returns table (statement text) language plpgsql stable parallel safe security definer rows 5
set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  return query
    select x.statement
    from queue._missing_indexes() i
    cross join lateral (
      select format('drop index concurrently queue.%I', i.name) as statement, 1 as place where i.is_broken
      union all select i.statement, 2) x
    order by i.name, x.place;
end $$;
comment on function queue.migration() is
  'What queue.migrate() leaves to be run, each statement on its own and outside a transaction: large indexes, built without stopping anybody. No rows: nothing. psql runs them by select * from queue.migration() with its gexec in place of the semicolon.';

-- Of the indexes that migrations bring those that are not there, or were left broken. is_large: building one
-- at once would stop those who defer for a moment that counts.
create or replace function queue._missing_indexes()
returns table (name text, statement text, is_large boolean, is_broken boolean)
language plpgsql stable parallel safe security invoker rows 5 as $$
begin
  return query
    select p.parts[1], s.statement, pg_relation_size(t.id) > 16777216 or x.indisvalid is not null, x.indisvalid is not null
    from unnest(queue._versions()) with ordinality v (version, n)
    cross join lateral unnest(queue._step_indexes(v.version)) s (statement)
    cross join lateral (select regexp_match(s.statement, 'concurrently ([a-z0-9_]+) on queue[.]([a-z0-9_]+)') as parts) p
    cross join lateral (select to_regclass('queue.' || p.parts[2])::oid as id) t
    left join pg_index x on x.indexrelid = to_regclass('queue.' || p.parts[1])
    where x.indisvalid is not true and t.id is not null
      and v.n < array_position(queue._versions(), queue._tables_version());
end $$;

-- Whether what a release left works with this code: it is of the same series (two first numbers) or the one before.
create or replace function queue._fits(p_version text)
returns boolean language plpgsql immutable parallel safe security invoker as $$
declare
  v_series text[];
begin
  select array_agg(s.series order by s.n) into v_series
  from (select substring(v.version from '^[0-9]+[.][0-9]+') as series, min(v.n) as n
        from unnest(queue._versions()) with ordinality v (version, n) group by 1) s;
  return coalesce(substring(p_version from '^[0-9]+[.][0-9]+') = any (v_series[greatest(cardinality(v_series) - 1, 1):]), false);
end $$;

-- A worker that begins is told when its own version, or that of the tables, does not fit the code.
-- Raises: QJ090.
create or replace function queue._check_versions(p_client text)
returns void language plpgsql stable parallel safe security invoker as $$
declare
  v_tables text := queue._tables_version();
begin
  if not queue._fits(v_tables) then
    perform queue._incompatible('the tables and the code of the queue do not fit', v_tables,
      case when v_tables = any (queue._versions()) then 'Run SELECT queue.migrate().' else 'Upgrade the code: pgdefer upgrade, or ALTER EXTENSION pgdefer UPDATE.' end);
  elsif p_client ~ '^pgdefer [0-9]+[.][0-9]+' and not queue._fits(substr(p_client, 9)) then
    raise exception using errcode = 'QJ090', message = 'client and schema do not fit', detail = format('client: %s, code: %s', p_client, '0.1.0'),
      hint = 'Upgrade the older of the two: the schema first (pgdefer upgrade); clients may be one release behind it.';
  end if;
end $$;

-- Raises: QJ090, always.
create or replace function queue._incompatible(message text, tables text, hint text)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ090', message = message, detail = format('tables: %s, code: %s', tables, '0.1.0'), hint = hint;
end $$;

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
  return query select '0.1.0'::text, queue._tables_version();
end $$;
comment on function queue.version() is
  'The version of the functions, and of the tables (NULL before queue.install()).';

-- Not for producers: what protects others from them is not theirs to change.
-- Locks: the row of queue.installation. Raises: 22023.
create or replace function queue.configure(options jsonb)
returns jsonb language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_options jsonb;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  perform queue._check_keys('options', configure.options, array['max_size']);
  if coalesce(configure.options ->> 'max_size', '100000') !~ '^[0-9]{6,9}$'
    or (configure.options ->> 'max_size')::integer not between 100000 and 268435456 then
    perform queue._invalid('max_size is out of range', 'It is a number of bytes, from 100,000 to 268,435,456 (256 MB).',
                           'value: ' || left(configure.options ->> 'max_size', 200));
  end if;
  update queue.installation i set max_size = (configure.options ->> 'max_size')::integer where configure.options ->> 'max_size' is not null;
  select jsonb_build_object('max_size', i.max_size) into v_options from queue.installation i;
  return v_options;
end $$;
comment on function queue.configure(jsonb) is
  'Settings of the whole queue, which it returns; keys that are absent keep their value. max_size: how many bytes of JSON text args, options, the info of a worker or a result may take, 16 MB by default; not looked at where they are stored in less than 2,000 bytes.';

-- Drops every ordinary object that install made.
-- Locks: exclusive ones of all tables and views, ADM's first. Sessions at work lock them in orders of their own: so they are waited
-- for 100 ms at a time, a hundred times, and a try that fails keeps none, before anybody looks for a deadlock (deadlock_timeout).
-- Raises: 22023 without force; 55P03.
create or replace function queue.uninstall(force boolean default false)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_timeout text := current_setting('lock_timeout');
begin
  if force is not true then
    perform queue._invalid('uninstall removes every job', 'Call queue.uninstall(force => true) to go ahead.');
  end if;
  for v_try in 1 .. 100 loop
    begin
      perform set_config('lock_timeout', '100ms', true);
      perform queue._drop_tables();
      perform set_config('lock_timeout', v_timeout, true);
      exit;
    exception when lock_not_available or deadlock_detected then
      if v_try = 100 then
        raise exception using errcode = '55P03', message = 'the tables are in use',
          hint = 'Nothing was removed. Stop the workers, end the transactions that have been open for long (see pg_stat_activity), and call it again.';
      end if;
    end;
  end loop;
end $$;
comment on function queue.uninstall(boolean) is
  'Removes the tables, the views and with them every job, and takes back what grant_access gave. What depends on the views goes with them. Needs force => true. Sessions at work are waited for (55P03 if that takes long); those that come later get QJ090.';

-- Locks: those of uninstall.
create or replace function queue._drop_tables()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_objects text[];
  v_object text;
begin
  select array_agg(x.name order by x.place, x.oid) into v_objects
  from (
    select format('queue.%I', c.relname) as name, c.oid, case c.relname when 'admission' then 0 else 1 end as place
    from pg_class c where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r') x;
  if v_objects is not null then
    execute format('lock table %s in access exclusive mode', array_to_string(v_objects, ', '));
  end if;
  if to_regclass('queue.access') is not null then
    -- or those that were limited to some queues could do everything once there are tables again
    perform queue._take_all(x.role) from (select distinct a.role from queue.access a join pg_roles r on r.rolname = a.role) x;
  end if;
  for v_object in
    select format('%s if exists queue.%I', case c.relkind when 'v' then 'view' when 'S' then 'sequence' else 'table' end, c.relname)
    from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relkind in ('r', 'v', 'S')
      and not exists (select from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype in ('e', 'i', 'a'))
    order by case c.relkind when 'v' then 0 when 'r' then 1 else 2 end
  loop
    execute format('drop %s cascade', v_object);
  end loop;
  drop type if exists queue.given;
end $$;

-- sql/06_limits.sql
-- Limits: roles that may act on some queues only.
--
-- queue.access says what grant_access gave to whom. Where no role is limited there is the view
-- queue.unlimited, and public functions look no further than for its name, which costs as much as the look
-- for queue.installation that it takes the place of. Without it everybody needs a row of queue.access, his
-- own or of a role whose privileges he has, or those of the owner.
--
-- Who calls: a security definer function can't see current_user of its caller. It is the role that SET ROLE
-- set, else the one that logged in (_caller). That is the role whose EXECUTE was checked, unless the call
-- came through another security definer function; then the caller of that one needs rights himself.
-- Views filter by current_user, which is exact.

create or replace function queue._caller()
returns name language plpgsql stable parallel safe security invoker as $$
begin
  return case when current_setting('role') = 'none' then session_user else current_setting('role')::name end;
end $$;

-- The view queue.unlimited, NULL without it: to_regclass for the calls that every job makes, at no cost. It is called
-- immutable, which it is not, so that the planner works it out once and puts the view into the plan; and a plan that
-- holds a relation is made anew when that is dropped. Use it as coalesce(v_none, queue._unlimited()) with a v_none that is
-- NULL, or the planner works out more and the relation is not in the plan. A plan made without the view keeps its NULL, so
-- NULL means: look yourself. All in it is qualified, as defer is planned with it, which has no search_path.
-- Why no limit is overlooked: a plan that was just being made when the view went may not hear of that; but every
-- grant_access changes the rights on the schema, too (_regrant), after which PostgreSQL has all plans made anew, also those.
create or replace function queue._unlimited()
returns pg_catalog.regclass language plpgsql immutable parallel safe security invoker as $$
begin
  return pg_catalog.to_regclass('queue.unlimited');
end $$;

-- The queues, names and patterns, on which a role (NULL: the caller) may act in one of the kinds; NULL is all.
create or replace function queue._limits(p_kinds text[], p_role name default null)
returns text[] language plpgsql stable parallel safe security invoker as $$
declare
  v_role name := coalesce(p_role, queue._caller());
  v_is_unlimited boolean;
  v_limits text[];
begin
  if to_regclass('queue.unlimited') is not null or to_regclass('queue.access') is null or pg_has_role(v_role, current_user, 'usage') then
    return null;
  end if;
  select bool_or(a.queues is null), coalesce(array_agg(distinct q) filter (where q is not null), '{}') into v_is_unlimited, v_limits
  from queue.access a join pg_roles r on r.rolname = a.role left join lateral unnest(a.queues) q on true
  where a.kind = any (p_kinds) and pg_has_role(v_role, r.oid, 'usage') and queue._may_enter(r.oid);
  return case when v_is_unlimited then null else v_limits end;
end $$;

-- Whether a role was given USAGE of the schema itself, as grant_access does. If not, its rows of queue.access are those of
-- another role of its name, that was dropped.
create or replace function queue._may_enter(p_role oid)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (
    select from pg_namespace n cross join lateral aclexplode(n.nspacl) x
    where n.nspname = 'queue' and x.grantee = p_role and x.privilege_type = 'USAGE');
end $$;

-- Whether limits hold all that a name or pattern selects.
create or replace function queue._covers(p_limits text[], p_pattern text)
returns boolean language plpgsql immutable parallel safe security invoker as $$
begin
  return p_limits is null
    or exists (select from unnest(p_limits) l where l = p_pattern or right(l, 1) = '*' and starts_with(p_pattern, left(l, -1)));
end $$;

-- Raises: 42501 unless the caller may act on all that a name or pattern selects (NULL: on every queue).
create or replace function queue._bound_queue(p_kinds text[], p_queue text)
returns void language plpgsql stable parallel safe security invoker as $$
declare
  v_limits text[] := queue._limits(p_kinds);
begin
  if v_limits is not null and queue._covers(v_limits, coalesce(p_queue, '*')) is not true then
    perform queue._beyond_limits(p_queue, v_limits);
  end if;
end $$;

-- Raises: 42501, always.
create or replace function queue._beyond_limits(queue text, limits text[])
returns void language plpgsql stable parallel safe security invoker as $$
begin
  raise exception using errcode = '42501', message = 'the queue is not among those of this role',
    detail = format('queue: %s, role: %s', coalesce(left(queue, 200), 'all'), queue._caller()),
    hint = case when limits = '{}' then 'Have the owner call queue.grant_access for the role.'
                else format('It may use these: %s.', array_to_string(limits, ', ')) end;
end $$;

-- Of a list of names and patterns (NULL: all) what the caller may act on, in its order.
-- Raises: 42501 when that is nothing.
create or replace function queue._bound_queues(p_kinds text[], p_queues text[])
returns text[] language plpgsql stable parallel safe security invoker as $$
declare
  v_limits text[] := queue._limits(p_kinds);
  v_queues text[];
begin
  if v_limits is null or p_queues is null and v_limits <> '{}' then
    return coalesce(v_limits, p_queues);
  elsif p_queues = '{}' or array_ndims(p_queues) > 1 or array_position(p_queues, null) is not null or '' = any (p_queues) then
    return p_queues;  -- which the function refuses
  end if;
  select array_agg(x.queue order by x.n, x.queue) into v_queues
  from (
    select min(q.n) as n, case when queue._covers(array[l], q.queue) then q.queue else l end as queue
    from unnest(p_queues) with ordinality q (queue, n) cross join unnest(v_limits) l
    where queue._covers(array[l], q.queue) or queue._covers(array[q.queue], l) group by 2) x;
  if v_queues is null then
    perform queue._beyond_limits(p_queues[1], v_limits);
  end if;
  return v_queues;
end $$;

-- Raises: QJ001 for a job of another queue, as if there were none.
create or replace function queue._bound_jobs(p_kinds text[], p_ids bigint[])
returns void language plpgsql volatile parallel safe security invoker as $$
declare
  v_limits text[] := queue._limits(p_kinds);
  v_id bigint;
begin
  if v_limits is null then
    return;
  end if;
  v_id := queue._job_beyond(v_limits, p_ids);
  if v_id is not null then
    perform queue._job_not_found(v_id);
  end if;
end $$;

-- One of these jobs that is of a queue which limits do not hold, if there is one. Settings: as _check_needs.
create or replace function queue._job_beyond(p_limits text[], p_ids bigint[])
returns bigint language plpgsql stable parallel safe security invoker
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off as $$
begin
  return (
    select j.id
    from unnest(p_ids) u (id)
    cross join lateral (
      select j.id, coalesce(s.queue, j.queue) as queue
      from queue.job j left join queue.job_state s on s.id = j.id where j.id = u.id offset 0) j
    where not queue._covers(p_limits, j.queue) limit 1);
end $$;

-- Raises: 42501 when a job that was just deferred is of another queue, QJ004 when it is one of another queue that keeps the
-- queueing lock, QJ001 when its needs or parent are of another.
-- p_table: the table whose trigger deferred it; its owner's rights suffice, if he may defer by triggers.
create or replace function queue._bound_deferred(p_id bigint, p_table oid default null)
returns void language plpgsql volatile parallel safe security invoker as $$
declare
  v_limits text[] := queue._limits('{producer}');
  v_owner name;
  v_other bigint;
  v record;
begin
  -- of one that was there before only the queue counts
  select coalesce(s.queue, j.queue) as queue, x.is_new, j.queueing_lock,
    case when x.is_new then array_remove(j.needs || (j.options ->> 'parent')::bigint, null) end as others into v
  from queue.job j
  left join queue.job_state s on s.id = j.id
  cross join lateral (select j.xid is not distinct from pg_current_xact_id_if_assigned() as is_new) x
  where j.id = p_id;
  v_other := case when v.others <> '{}' then queue._job_beyond(v_limits, v.others) end;
  if p_table is not null and (v_other is not null or not queue._covers(v_limits, v.queue)) then
    select r.rolname into v_owner from pg_class c join pg_roles r on r.oid = c.relowner where c.oid = p_table;
    if has_function_privilege(v_owner, 'queue.defer_trigger()', 'execute') then
      v_limits := queue._limits('{producer}', v_owner);
      v_other := case when v.others <> '{}' then queue._job_beyond(v_limits, v.others) end;
    end if;
  end if;
  if v_other is not null then
    perform queue._job_not_found(v_other);
  elsif not queue._covers(v_limits, v.queue) then
    if not v.is_new then
      perform queue._already_queued(p_id, v.queueing_lock);
    end if;
    perform queue._beyond_limits(v.queue, v_limits);
  end if;
end $$;

-- Raises: QJ007 when the worker serves more than the caller may, as if there were none.
create or replace function queue._bound_worker(p_worker bigint)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if not queue._is_within(queue._limits('{worker}'), p_worker) then
    perform queue._worker_gone(p_worker);
  end if;
end $$;

-- Whether all that a worker serves lies within limits; NULL when it is forgotten.
create or replace function queue._is_within(p_limits text[], p_worker bigint)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select p_limits is null or w.queues is not null and not exists (select from unnest(w.queues) q where not queue._covers(p_limits, q))
    from queue.worker w where w.id = p_worker);
end $$;

-- Raises: QJ002 for a claim on a job of another queue that a worker of other queues holds.
create or replace function queue._bound_claims(p_ids bigint[], p_claims bigint[])
returns void language plpgsql volatile parallel safe security invoker as $$
declare
  v_limits text[] := queue._limits('{worker,operator}');
  v_lost record;
begin
  if v_limits is null then
    return;
  end if;
  select v.id, v.claim into v_lost
  from unnest(p_ids, p_claims) u (id, claim)
  join queue.live v on v.id = u.id and v.claim = u.claim
  join queue.job j on j.id = u.id
  left join queue.job_state s on s.id = u.id
  where not queue._covers(v_limits, coalesce(s.queue, j.queue)) and queue._is_within(v_limits, v.worker_id) is not true limit 1;
  if found then
    perform queue._claim_lost(v_lost.id, v_lost.claim);
  end if;
end $$;

-- The same for a list of outcomes, and for what they name beside it. A malformed list is left to _finish.
-- Raises: QJ001, QJ002, 42501.
create or replace function queue._bound_outcomes(p_outcomes jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v record;
begin
  if queue._limits('{worker,operator}') is null or jsonb_typeof(p_outcomes) is distinct from 'array' then
    return;
  end if;
  begin
    select array_agg(o.id) as ids, array_agg(o.claim) as claims into v
    from jsonb_to_recordset(p_outcomes) o (id bigint, claim bigint);
  exception when data_exception then
    return;
  end;
  perform queue._bound_claims(v.ids, v.claims);
  perform queue._bound_jobs('{worker,operator}', array[n::text::bigint])
  from jsonb_array_elements(p_outcomes) o
  cross join jsonb_array_elements(case when jsonb_typeof(o -> 'needs') = 'array' then o -> 'needs' end) n where n::text ~ '^[0-9]{1,18}$';
  perform queue._bound_queue('{worker,operator}', o -> 'options' ->> 'queue')
  from jsonb_array_elements(p_outcomes) o where o -> 'options' ->> 'queue' <> '';
end $$;

-- sql/10_tasks.sql
-- Tasks: names with defaults. Nothing needs a registration; it only fills what a call leaves NULL.

-- Locks: where something changes, the task's row. Raises: 22023.
create or replace function queue.register_task(name text, defaults jsonb default '{}')
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_defaults jsonb := coalesce(defaults, '{}');
  v_options jsonb;
  v_keys text[];
  v_limits integer[];
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  perform queue._check_name('task', register_task.name);
  perform queue._check_keys('defaults', v_defaults, array['queue', 'priority', 'lock', 'queueing_lock', 'deadline',
    'concurrency_key', 'concurrency_limit'] || queue._option_keys());
  if exists (select from queue.task t where t.name = register_task.name and t.defaults = v_defaults) then
    return;
  end if;
  perform queue._check_types('defaults', v_defaults);
  if v_defaults ->> 'queue' <> '' then
    perform queue._check_queue(v_defaults ->> 'queue');
  end if;
  if octet_length(v_defaults ->> 'lock') > 1000 then
    perform queue._check_name('lock', v_defaults ->> 'lock');
  elsif octet_length(v_defaults ->> 'queueing_lock') > 1000 then
    perform queue._check_name('queueing_lock', v_defaults ->> 'queueing_lock');
  end if;
  v_options := queue._check_options(v_defaults - '{queue,priority,lock,queueing_lock,deadline,concurrency_key,concurrency_limit}'::text[]);
  select k.keys, k.limits into v_keys, v_limits
  from queue._check_concurrency(v_defaults ->> 'concurrency_key', (v_defaults ->> 'concurrency_limit')::integer,
                                v_options -> 'concurrency') k;
  insert into queue.task as t (name, queue, priority, lock, queueing_lock, deadline, keys, limits, options, defaults, is_plain)
  values (register_task.name, nullif(v_defaults ->> 'queue', ''), (v_defaults ->> 'priority')::integer, nullif(v_defaults ->> 'lock', ''),
          nullif(v_defaults ->> 'queueing_lock', ''), queue._interval('deadline', v_defaults -> 'deadline'), v_keys, v_limits,
          nullif(v_options - '{retry,concurrency}'::text[], '{}'), v_defaults,
          not v_defaults ?| '{lock,queueing_lock,deadline,concurrency_key}'::text[] and v_options - 'retry' = '{}')
  on conflict on constraint task_pkey do update
    set (queue, priority, lock, queueing_lock, deadline, keys, limits, options, defaults, is_plain)
      = (excluded.queue, excluded.priority, excluded.lock, excluded.queueing_lock, excluded.deadline, excluded.keys,
         excluded.limits, excluded.options, excluded.defaults, excluded.is_plain)
    where t.defaults <> excluded.defaults;
end $$;
comment on function queue.register_task(text, jsonb) is
  'Sets what defer uses where a call leaves an argument NULL: queue, priority, lock, queueing_lock, deadline (an interval from the time of deferring), concurrency_key, concurrency_limit and every key of options. The same defaults again change nothing; jobs already deferred keep theirs, the retry policy excepted, which is read when an attempt ends.';

-- Raises: 22023 unless what defer takes as text, integer or array is a JSON string, whole number or array, or null.
create or replace function queue._check_types(what text, object jsonb)
returns void language plpgsql immutable parallel safe security invoker as $$
declare
  v_bad text;
begin
  select e.key into v_bad from jsonb_each(object) e
  where e.key in ('task', 'queue', 'lock', 'queueing_lock', 'concurrency_key', 'scheduled_at') and jsonb_typeof(e.value) not in ('string', 'null')
    or e.key = 'needs' and jsonb_typeof(e.value) not in ('array', 'null')
    or e.key = 'deadline' and jsonb_typeof(e.value) not in ('string', 'number', 'null')
    or e.key in ('priority', 'concurrency_limit')
      and not (e.value = 'null' or jsonb_typeof(e.value) = 'number' and e.value between '-2147483648' and '2147483647' and e.value::text ~ '^-?[0-9]+$')
  limit 1;
  if found then
    perform queue._invalid(format('%s has a value of a wrong type', what), 'Names, keys and times are JSON strings, priority and concurrency_limit whole numbers, needs a list.',
                           format('key: %s, value: %s', v_bad, left(object ->> v_bad, 200)));
  end if;
end $$;

-- Every key that defer's options may have.
create or replace function queue._option_keys()
returns text[] language plpgsql immutable parallel safe security invoker as $$
begin
  return array['delay', 'on_conflict', 'unique_until', 'lock_mode', 'needs_mode', 'on_need_failure', 'on_limit', 'retry',
    'timeout', 'expires_at', 'held', 'description', 'headers', 'parent', 'retain', 'concurrency', 'max_progress'];
end $$;

-- Returns the options without those that are JSON null, max_progress excepted, and expires_at as the moment
-- that it means now, in UTC.
-- Raises: 22023 for an unknown key or a value that it can't have.
create or replace function queue._check_options(options jsonb)
returns jsonb language plpgsql stable parallel unsafe security invoker as $$
declare
  v_option record;
  v_options jsonb := '{}'::jsonb;
  v_allowed text[];
begin
  if jsonb_typeof(options) <> 'object' or options - queue._option_keys() <> '{}'::jsonb then
    perform queue._check_keys('options', options, queue._option_keys());
  end if;
  perform queue._check_size('options', options);
  for v_option in
    select e.key, e.value, jsonb_typeof(e.value) as type, e.value #>> '{}' as text
    from jsonb_each(options) e where e.value <> 'null' or e.key = 'max_progress'
  loop
    v_options := v_options || jsonb_build_object(v_option.key, v_option.value);
    v_allowed := case v_option.key
      when 'on_conflict' then '{raise,ignore,replace}'::text[]
      when 'unique_until' then '{start,finish}'::text[]
      when 'lock_mode' then '{ordered,mutex}'::text[]
      when 'needs_mode' then '{all,any}'::text[]
      when 'on_need_failure' then '{block,proceed}'::text[]
      when 'on_limit' then '{block,discard}'::text[]
    end;
    if v_allowed is not null then
      if v_option.type <> 'string' or not v_option.text = any (v_allowed) then
        perform queue._invalid(format('%s is not one of its values', v_option.key),
                               format('Allowed: %s.', array_to_string(v_allowed, ', ')), 'value: ' || left(v_option.text, 200));
      end if;
    elsif v_option.key in ('delay', 'timeout', 'retain') then
      perform queue._interval(v_option.key, v_option.value);
      if v_option.key = 'timeout' and queue._interval(v_option.key, v_option.value) = interval '0' then
        perform queue._invalid('timeout must be longer than 0', 'Leave timeout out for no limit.');
      elsif v_option.type = 'number' then
        -- as its text is read as an interval where it is used, which may not have too many digits
        v_options := v_options || jsonb_build_object(v_option.key, trim_scale(round(v_option.text::numeric, 6)));
      end if;
    elsif v_option.key = 'expires_at' then
      perform queue._check_moment('expires_at', queue._timestamp('expires_at', v_option.value));
      v_options := v_options || jsonb_build_object('expires_at', queue._utc(queue._timestamp('expires_at', v_option.value)));
    elsif v_option.key = 'held' and v_option.type <> 'boolean' then
      perform queue._invalid('held must be true or false', 'Pass a JSON boolean.');
    elsif v_option.key = 'description' and v_option.type <> 'string' then
      perform queue._invalid('description must be text', 'Pass a JSON string.');
    elsif v_option.key = 'headers' and v_option.type <> 'object' then
      perform queue._invalid('headers must be a JSON object', 'Pass an object such as {"traceparent": "00-..."}.');
    elsif v_option.key = 'parent' and (v_option.type <> 'number' or v_option.text !~ '^[0-9]{1,18}$')
      or v_option.key = 'max_progress' and v_option.type <> 'null' and (v_option.type <> 'number' or v_option.text !~ '^[0-9]{1,9}$') then
      perform queue._invalid(format('%s must be a whole number', v_option.key), 'Pass a number that is not negative.');
    elsif v_option.key = 'concurrency' then
      perform queue._check_concurrency(null, null, v_option.value);
    elsif v_option.key = 'retry' then
      perform queue._check_retry(v_option.value);
    end if;
  end loop;
  return v_options;
end $$;

-- Raises: 22023 unless the JSON value is a timestamp.
create or replace function queue._timestamp(what text, value jsonb)
returns timestamptz language plpgsql stable parallel unsafe security invoker as $$
begin
  if value is null or jsonb_typeof(value) = 'null' then
    return null;
  end if;
  return (value #>> '{}')::timestamptz;
exception when others then
  perform queue._invalid(what || ' is not a timestamp', 'Give a timestamp with a time zone, such as 2030-01-31T09:00:00Z.',
                         'value: ' || left(value::text, 200));
  return null;
end $$;

-- A moment as it is written down, the same whatever the session's time zone.
create or replace function queue._utc(p_at timestamptz)
returns text language plpgsql immutable parallel safe security invoker as $$
begin
  return (to_jsonb(p_at at time zone 'UTC') #>> '{}') || case when isfinite(p_at) then '+00:00' else '' end;
end $$;

-- The keys and limits that concurrency_key, concurrency_limit and options.concurrency give together.
-- Raises: 22023.
create or replace function queue._check_concurrency(key text, key_limit integer, list jsonb, out keys text[], out limits integer[])
language plpgsql stable parallel safe security invoker as $$
declare
  v_item jsonb;
begin
  if key <> '' then
    if key_limit is null or key_limit < 1 then
      perform queue._invalid('concurrency_key needs a concurrency_limit of at least 1', 'Give a limit with the key, or register one for the task.',
                             format('concurrency_limit: %s', coalesce(key_limit::text, 'NULL')));
    end if;
    perform queue._check_name('concurrency_key', key);
    keys := array[key];
    limits := array[key_limit];
  elsif key_limit < 1 then
    perform queue._invalid('concurrency_limit must be at least 1', 'Give a limit of 1 or more.', format('concurrency_limit: %s', key_limit));
  end if;
  if list is null or jsonb_typeof(list) = 'null' then
    return;
  elsif jsonb_typeof(list) <> 'array' then
    perform queue._invalid('concurrency must be a list', 'Pass a list of {"key": text, "limit": number}.');
  end if;
  for v_item in select jsonb_array_elements(list) loop
    perform queue._check_keys('concurrency', v_item, array['key', 'limit']);
    if jsonb_typeof(v_item -> 'key') is distinct from 'string' or jsonb_typeof(v_item -> 'limit') is distinct from 'number'
      or v_item ->> 'limit' !~ '^[1-9][0-9]{0,8}$' then
      perform queue._invalid('concurrency must be a list of keys with limits', 'Pass {"key": text, "limit": a whole number of at least 1}.',
                             'item: ' || v_item::text);
    end if;
    perform queue._check_name('concurrency key', v_item ->> 'key');
    if v_item ->> 'key' = any (keys) then
      perform queue._invalid('a concurrency key is named twice', 'Name each key once.', 'key: ' || (v_item ->> 'key'));
    end if;
    keys := keys || (v_item ->> 'key');
    limits := limits || (v_item ->> 'limit')::integer;
  end loop;
end $$;

-- Fills {field} from args. A field that args lack, or that is no scalar, is an error. A client's tagged
-- value, {"__pgdefer__": type, "value": text}, counts as its text, so that a UUID names the same lock
-- whether Python or a trigger wrote it.
-- Raises: 22023; also where the outcome is no name.
create or replace function queue._fill(what text, template text, args jsonb)
returns text language plpgsql immutable parallel safe security invoker as $$
declare
  v_parts text[] := string_to_array(template, '{');
  v_text text := v_parts[1];
  v_end integer;
  v_value jsonb;
begin
  for i in 2 .. cardinality(v_parts) loop
    v_end := strpos(v_parts[i], '}');
    if v_end = 0 then
      v_text := v_text || '{' || v_parts[i];
    else
      v_value := args -> left(v_parts[i], v_end - 1);
      if v_value ? '__pgdefer__' then
        v_value := v_value -> 'value';
      end if;
      if coalesce(jsonb_typeof(v_value), 'null') in ('object', 'array', 'null') then
        perform queue._invalid(format('%s names a field that args do not fill', what), 'Every {field} must be a text, number or boolean in args.',
                               format('template: %s, field: %s', template, left(v_parts[i], v_end - 1)));
      end if;
      v_text := v_text || (v_value #>> '{}') || substr(v_parts[i], v_end + 1);
    end if;
  end loop;
  perform queue._check_name(what, v_text);
  return v_text;
end $$;

-- sql/15_queues.sql
-- Queues: names of jobs' lanes, with limits of their own, pausing, retention.

-- Until when a queue is paused: NULL when it is not.
create or replace function queue._paused_until(p_queue text)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_until timestamptz;
begin
  select case when p.is_paused then coalesce(p.until, 'infinity') end into v_until
  from queue.pause p
  where p.task is null and (p.queue is null or queue._matches(p_queue, p.queue))
  order by p.no desc limit 1;
  return v_until;
end $$;

-- Locks: the queue's row, which one who creates it may hold (not under ADM, so that nobody else waits for him); then ADM,
-- waited for. Raises: 22023, QJ008; 40001 where the queue is deleted at the same time. Two sessions: create_configure.spec.
-- Running jobs count at once; a lower limit lets them end.
create or replace function queue.configure_queue(name text, options jsonb)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_max_running integer;
  v_rate jsonb;
  v_rate_limit integer;
  v_rate_per interval;
  v_retain interval;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_queue('{operator}', configure_queue.name);
  end if;
  perform queue._check_isolation();
  perform queue._check_queue(configure_queue.name);
  perform queue._check_keys('options', configure_queue.options, array['max_running', 'paused', 'retain', 'rate']);
  v_rate := nullif(configure_queue.options -> 'rate', 'null');
  perform queue._check_keys('rate', v_rate, array['limit', 'per']);
  if coalesce(jsonb_typeof(configure_queue.options -> 'max_running'), 'null') not in ('null', 'number')
    or configure_queue.options ->> 'max_running' !~ '^[1-9][0-9]{0,8}$' then
    perform queue._invalid('max_running must be a whole number of at least 1, or null', 'To start nothing, pause the queue.');
  elsif coalesce(jsonb_typeof(configure_queue.options -> 'paused'), 'boolean') <> 'boolean' then
    perform queue._invalid('paused must be true or false', 'Pass a JSON boolean.');
  elsif v_rate is not null and (coalesce(v_rate ->> 'limit', '') !~ '^[1-9][0-9]{0,8}$' or coalesce(queue._interval('per', v_rate -> 'per'), '0') = '0') then
    perform queue._invalid('rate needs a limit of at least 1 and an interval', 'Pass {"limit": 10, "per": "1 minute"}.');
  end if;
  v_max_running := (configure_queue.options ->> 'max_running')::integer;
  v_rate_limit := (v_rate ->> 'limit')::integer;
  v_rate_per := queue._interval('per', v_rate -> 'per');
  v_retain := queue._interval('retain', configure_queue.options -> 'retain');
  insert into queue.queue_config (queue) values (configure_queue.name) on conflict on constraint queue_config_pkey do nothing;
  perform queue._admit_all();
  update queue.queue_config c
  set max_running = case when configure_queue.options ? 'max_running' then v_max_running else c.max_running end,
    rate_limit = case when configure_queue.options ? 'rate' then v_rate_limit else c.rate_limit end,
    rate_per = case when configure_queue.options ? 'rate' then v_rate_per else c.rate_per end,
    retain = case when configure_queue.options ? 'retain' then v_retain else c.retain end,
    limited_at = clock_timestamp()
  where c.queue = configure_queue.name
  returning c.retain into v_retain;
  if not found then
    raise exception using errcode = '40001', message = 'the queue was deleted meanwhile', detail = 'queue: ' || configure_queue.name,
      hint = 'Call queue.configure_queue again.';
  end if;
  update queue.lane l set extra_flags = case when v_retain is null then l.extra_flags & ~512 else l.extra_flags | 512 end
  where l.queue = configure_queue.name;
  if v_retain is not null then
    update queue.live v set flags = v.flags | 512
    where v.id = any (array(select v.id from queue.lane l join queue.live v on v.lane = l.lane
                            where l.queue = configure_queue.name and v.flags & 512 = 0 for update of v skip locked));
    update queue.waiting w set flags = w.flags | 512
    where w.reason = 'slot' and w.lane = any (array(select l.lane from queue.lane l where l.queue = configure_queue.name));
  end if;
  perform queue._limit_queue(configure_queue.name);
  if configure_queue.options ? 'paused' then
    perform queue._set_pause(configure_queue.name, null, (configure_queue.options ->> 'paused')::boolean, null);
  end if;
  perform queue._announce();
end $$;
comment on function queue.configure_queue(text, jsonb) is
  'Sets a queue''s own limits: max_running, rate {"limit", "per"} (never more starts in any window of that length), retain, paused. Keys that are absent keep their value, null removes a limit.';

-- Makes a queue's lanes limited ones when it has limits, and counts what runs in max_running.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
-- Why no start stays uncounted: whoever claimed while the limit was set holds a row that is skipped here, or
-- can't be seen yet. _repair counts again for a minute, and as long as rows are skipped.
create or replace function queue._limit_queue(p_queue text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_config record;
  v_running bigint[];
  v_counted bigint[];
begin
  select c.max_running, c.rate_limit into v_config from queue.queue_config c where c.queue = p_queue;
  if v_config.rate_limit is null then
    delete from queue.rate_start r where r.queue = p_queue;
  else
    delete from queue.rate_start r
    where r.queue = p_queue and r.no <= (select max(x.no) - v_config.rate_limit from queue.rate_start x where x.queue = p_queue);
  end if;
  if v_config.max_running is not null or v_config.rate_limit is not null then
    update queue.lane l set kind = 1 where l.queue = p_queue and l.kind = 0;
  end if;
  if v_config.max_running is not null then
    v_running := array(
      select v.id from queue.lane l join queue.live v on v.lane = l.lane
      where l.queue = p_queue and v.claim is not null and v.flags & 16384 = 0);
    v_counted := array(select v.id from queue.live v where v.id = any (v_running) and v.claim is not null for update skip locked);
    update queue.live v set flags = v.flags | 16384 where v.id = any (v_counted);
    perform queue._add_slots(array['q' || p_queue], null, array[cardinality(v_counted)], null, null, null);
    if cardinality(v_counted) < cardinality(v_running) then
      update queue.queue_config c set limited_at = clock_timestamp() where c.queue = p_queue;
    end if;
  end if;
end $$;

-- Locks: ADM, waited for. Raises: 22023, QJ008.
create or replace function queue.create_queue(name text, paused boolean default false)
returns boolean language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_is_new boolean;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_queue('{operator}', create_queue.name);
  end if;
  perform queue._check_isolation();
  perform queue._check_queue(create_queue.name);
  insert into queue.queue_config (queue) values (create_queue.name) on conflict on constraint queue_config_pkey do nothing;
  v_is_new := found;
  if v_is_new and create_queue.paused then
    perform queue._set_pause(create_queue.name, null, true, null);
  end if;
  return v_is_new;
end $$;
comment on function queue.create_queue(text, boolean) is
  'Makes a queue known, and paused if asked. Returns whether it was new. Not needed before deferring.';

-- Locks: ADM, waited for. Raises: 22023, QJ008.
create or replace function queue.pause(queue text default null, until timestamptz default null, task text default null)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_queue('{operator}', pause.queue);
  end if;
  return queue._set_pause(pause.queue, pause.task, true, pause.until);
end $$;
comment on function queue.pause(text, timestamptz, text) is
  'Lets no job of the queue (a name, prefix* or *; NULL: all) or of the task start until resumed, or until a time. Running jobs go on. Jobs keep their state, with reason paused; those of a paused task that waited for a lock or a limit are ready meanwhile. Returns how many unfinished, not running jobs it concerns.';

-- Locks: ADM, waited for. Raises: 22023, QJ008.
create or replace function queue.resume(queue text default null, task text default null)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_queue('{operator}', resume.queue);
  end if;
  return queue._set_pause(resume.queue, resume.task, false, null);
end $$;
comment on function queue.resume(text, text) is
  'Ends a pause of the queue or task; the latest call of pause and resume that matches a queue wins. Without a task it ends the pauses of tasks on those queues too; with one, a pause of the queue stays. Returns how many unfinished, not running jobs it concerns.';

-- The calls whose queues and tasks a later one covers need not be kept. A pause whose time is over is one that has ended:
-- what an earlier one set aside goes on.
-- Locks: ADM, waited for; rows of queue.live by skip locked. Raises: 22023, QJ008.
-- Why nothing slips by: a ready job whose row another transaction holds is handed over (_regate) until the row is free. A
-- call that waits for ADM admits what is new first, and so sets it aside itself; what a fetch has claimed starts, and if
-- that is taken back the next admission finds it.
create or replace function queue._set_pause(p_queue text, p_task text, p_is_paused boolean, p_until timestamptz)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_queue text := nullif(p_queue, '*');
  v_ids bigint[];
  v_is_over boolean;
begin
  perform queue._check_isolation();
  if p_queue is not null then
    perform queue._check_name('queue', p_queue);
  end if;
  if p_task is not null then
    perform queue._check_name('task', p_task);
  end if;
  perform queue._check_moment('until', p_until, true);
  perform queue._admit_all();
  delete from queue.pause p
  where (v_queue is null or p.queue = v_queue or right(v_queue, 1) = '*' and starts_with(p.queue, left(v_queue, -1)))
    and (p.task is not distinct from p_task or p_task is null and not p_is_paused)
    and (p.is_paused or not p_is_paused or p_task is not null or not exists (select from queue.pause t where t.task is not null));
  insert into queue.pause (queue, task, is_paused, until)
  select v_queue, p_task, p_is_paused, p_until where p_is_paused or exists (select from queue.pause);
  if p_task is null then
    update queue.lane l set paused_until = queue._paused_until(l.queue)
    where v_queue is null or queue._matches(l.queue, v_queue);
  end if;
  v_is_over := not p_is_paused or coalesce(p_until <= clock_timestamp(), false);
  if p_task is not null and not v_is_over then
    update queue.waiting w set at = nullif(p_until, 'infinity')
    where w.reason = 'task_paused'
      and exists (select from queue.job j left join queue.job_state s on s.id = j.id
                  where j.id = w.id and j.task = p_task and (v_queue is null or queue._matches(coalesce(s.queue, j.queue), v_queue)));
    perform queue._recall(p_task, v_queue, nullif(p_until, 'infinity'));
    -- what is ready of the task leaves queue.live, so that fetch does not meet it
    v_ids := array(
      select v.id from queue.live v join queue.job j on j.id = v.id left join queue.job_state s on s.id = v.id
      where j.task = p_task and v.claim is null and (v_queue is null or queue._matches(coalesce(s.queue, j.queue), v_queue)));
    with gone as (
      delete from queue.live v
      where v.id = any (array(select v.id from queue.live v where v.id = any (v_ids) and v.claim is null and v.flags & 7 = 0 for update skip locked))
      returning v.id)
    insert into queue.waiting (id, reason, at) select g.id, 'task_paused', nullif(p_until, 'infinity') from gone g;
    perform queue._regate(array(select v.id from queue.live v where v.id = any (v_ids) and v.claim is null));
    perform queue._heed_clock();
  elsif p_task is not null or not p_is_paused then
    with gone as (
      delete from queue.waiting w
      where w.reason = 'task_paused'
        and exists (select from queue.job j left join queue.job_state s on s.id = j.id
                    where j.id = w.id and (p_task is null or j.task = p_task)
                      and (v_queue is null or queue._matches(coalesce(s.queue, j.queue), v_queue)))
      returning w.id)
    select array_agg(g.id order by g.id) into v_ids from gone g;
    perform queue._advance(p_arrived => v_ids);
  end if;
  perform queue._resume_schedules();
  perform queue._announce();
  return queue._count_open(v_queue, p_task);
end $$;

-- Sends ready jobs through the gates again, those whose rows another transaction holds once that is over.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
-- Why none is forgotten: a row that is not taken out is handed over again, by each look until it is free, claimed or gone.
-- Two sessions: pause_fetch.spec, late_pause.spec.
create or replace function queue._regate(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_taken record;
begin
  v_taken := queue._take_out_all(array(select v.id from queue.live v where v.id = any (p_ids) and v.claim is null));
  insert into queue.handover (xid, job_id, kind, flags)
  select queue._until(v.xmax), v.id, 'regate', 0 from queue.live v where v.id = any (p_ids) and v.claim is null;
  -- also those that have left queue.live since may keep the turn from an older job
  perform queue._advance(p_arrived => v_taken.ids, p_keys => v_taken.keys, p_locks => queue._locks_of(p_ids));
end $$;

-- Puts what waits behind the gate of paused tasks, for a slot or for its turn, before that gate again. Reads whole tables.
-- Locks: the caller holds ADM. Why nothing slips by: who waits behind the gate can be let on under ADM only; a job whose
-- claim has ended and is not settled yet (handover) comes to the gate itself, by _route. Why nothing is forgotten: a row of
-- queue.waiting is found by resume, or at its time by _admit_due. Two sessions: pause_fetch.spec.
create or replace function queue._recall(p_task text, p_queue text, p_until timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker
set plan_cache_mode = force_custom_plan set enable_seqscan = on set enable_hashjoin = on as $$
#variable_conflict use_column
declare
  v record;
begin
  select array_agg(w.id) as ids, array_agg(w.key) filter (where w.lane is not null) as keys, array_agg(w.lane) filter (where w.lane is not null) as lanes,
    array_agg(-1) filter (where w.lane is not null) as fewer
  into v
  from queue.waiting w join queue.job j on j.id = w.id left join queue.job_state s on s.id = w.id
  where w.reason = 'slot' and j.task = p_task and (p_queue is null or queue._matches(coalesce(s.queue, j.queue), p_queue));
  if v.ids is not null then
    update queue.waiting w
    set reason = 'task_paused', at = p_until, key = null, lane = null, deadline = null, flags = null, attempt = null, has_several = null
    where w.id = any (v.ids);
    perform queue._never_discard(v.ids);
  end if;
  if v.keys is not null then
    perform queue._add_slots(v.keys, v.lanes, null, null, v.fewer, null);
  end if;
  with recalled as (
    update queue.lock_member m set is_passed = false
    from queue.job j left join queue.job_state s on s.id = j.id
    where j.id = m.id and m.is_passed and m.lock = coalesce(s.lock, j.lock) and j.task = p_task
      and (p_queue is null or queue._matches(coalesce(s.queue, j.queue), p_queue))
      and not exists (select from queue.live v where v.id = m.id) and not exists (select from queue.waiting w where w.id = m.id)
      and not exists (select from queue.handover h where h.job_id = m.id and h.kind in ('ended', 'again'))
    returning m.id)
  insert into queue.waiting (id, reason, at) select r.id, 'task_paused', p_until from recalled r;
end $$;

-- How many jobs of queues and of a task are unfinished and not running. Reads whole tables.
create or replace function queue._count_open(p_queue text, p_task text)
returns integer language plpgsql stable parallel safe security invoker
set plan_cache_mode = force_custom_plan set enable_seqscan = on set enable_hashjoin = on as $$
#variable_conflict use_column
begin
  return (
    select count(*)
    from (select v.id from queue.live v where v.claim is null
          union all select w.id from queue.waiting w
          union all select m.id from queue.lock_member m
          where not exists (select from queue.live v where v.id = m.id) and not exists (select from queue.waiting w where w.id = m.id)) u
    join queue.job j on j.id = u.id
    left join queue.job_state s on s.id = u.id
    where (p_queue is null or queue._matches(coalesce(s.queue, j.queue), p_queue)) and (p_task is null or j.task = p_task)
      and not exists (select from queue.handover h where h.job_id = u.id and h.kind = 'ended'));
end $$;

-- Of jobs those whose task is not paused; the others wait.
-- Locks: the caller holds ADM.
create or replace function queue._wait_for_task(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_pass bigint[];
  v_waits boolean;
begin
  with seen as materialized (
    select u.id, queue._task_paused_until(j.task, j.queue) as until
    from unnest(p_ids) u (id)
    cross join lateral (select j.task, coalesce(s.queue, j.queue) as queue from queue.job j left join queue.job_state s on s.id = j.id
                        where j.id = u.id offset 0) j),
  wait as (
    insert into queue.waiting (id, reason, at) select s.id, 'task_paused', nullif(s.until, 'infinity') from seen s where s.until > v_now)
  select array_agg(s.id order by s.id) filter (where s.until is null or s.until <= v_now), bool_or(s.until > v_now) into v_pass, v_waits from seen s;
  if v_waits then
    perform queue._heed_clock();
  end if;
  return v_pass;
end $$;

-- Until when a task is paused on a queue: NULL when it is not.
create or replace function queue._task_paused_until(p_task text, p_queue text)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_until timestamptz;
begin
  select case when p.is_paused then coalesce(p.until, 'infinity') end into v_until
  from queue.pause p
  where (p.task = p_task or p.task is null and not p.is_paused) and (p.queue is null or queue._matches(p_queue, p.queue))
  order by p.no desc limit 1;
  return v_until;
end $$;

-- sql/20_defer.sql
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

-- sql/25_queueing_locks.sql
-- Queueing locks: at most one job that has not started (unique_until finish: not finished) per key.

-- Takes the key for a new job and returns its id, or below zero that of the job that keeps it.
-- Locks: the key's row: inserters of one key wait for each other, as with any unique key, and for a claim
-- or a replacement of the holder. A replacement keeps the row locked until its transaction ends, so that
-- the holder, whose claim needs it (_claim_ids), is not started meanwhile.
-- Raises: QJ004.
create or replace function queue._take_queueing_lock(
  p_key text, p_on_conflict text, p_args jsonb, p_priority integer, p_scheduled_at timestamptz)
returns bigint language plpgsql volatile parallel unsafe security invoker set enable_seqscan = off as $$
#variable_conflict use_column
declare
  v_id bigint := nextval('queue.job_id_seq');
  v_holder bigint;
  v_seq bigint;
begin
  loop
    insert into queue.queueing_lock (key, job_id) values (p_key, v_id) on conflict on constraint queueing_lock_pkey do nothing;
    if found then
      return v_id;
    end if;
    if p_on_conflict = 'replace' then
      v_seq := nextval('queue.tick_seq');
      update queue.queueing_lock k set replacing = v_seq where k.key = p_key returning k.job_id into v_holder;
    else
      select k.job_id into v_holder from queue.queueing_lock k where k.key = p_key;
    end if;
    -- not found: the holder has started meanwhile, so that the key is free
    if found then
      case
        when p_on_conflict = 'ignore' then
          return -v_holder;
        when p_on_conflict = 'replace' and not exists (select from queue.live v where v.id = v_holder and v.claim is not null) then
          insert into queue.handover (job_id, kind, flags, payload)
          values (v_holder, 'replace', 0, jsonb_build_object('key', p_key, 'seq', v_seq, 'args', p_args, 'priority', p_priority, 'scheduled_at', p_scheduled_at));
          return -v_holder;
        else
          perform queue._already_queued(v_holder, p_key);
      end case;
    end if;
  end loop;
  return null;
end $$;

-- Puts a replacement's args, priority and time into the job that keeps the key. While another transaction holds the job's
-- row, an operation that waits for ADM, it is handed over again; the mark keeps the job from starting until then.
-- Locks: the caller holds ADM; the job's row of queue.live by skip locked; the key's row by skip locked: while another
-- replacement holds it, that one clears the mark. Two sessions: replace_fetch.spec.
create or replace function queue._apply_replacement(p_id bigint, p_payload jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  if exists (select from queue.finished f where f.id = p_id) or not exists (select from queue.job j where j.id = p_id) then
    return;
  end if;
  if queue._amend(p_id, p_args => p_payload -> 'args', p_priority => (p_payload ->> 'priority')::integer,
                   p_scheduled_at => coalesce((p_payload ->> 'scheduled_at')::timestamptz, '-infinity')) then
    perform queue._clear_replacing(p_payload ->> 'key', (p_payload ->> 'seq')::bigint);
  else
    insert into queue.handover (job_id, kind, flags, payload) values (p_id, 'replace', 0, p_payload);
  end if;
end $$;

-- The args that a committed replacement brings to a job, which the next admission puts into it; NULL without one.
create or replace function queue._replaced_args(p_id bigint, p_flags integer)
returns jsonb language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
begin
  if p_flags & (256 | 8192) = 0 then
    return null;
  end if;
  return (select h.payload -> 'args' from queue.handover h where h.job_id = p_id and h.kind = 'replace' order by h.seq desc limit 1);
end $$;

-- Clears the mark of a replacement, if it is still that one's.
-- Locks: the key's row by skip locked.
create or replace function queue._clear_replacing(p_key text, p_seq bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  perform from queue.queueing_lock k where k.key = p_key and k.replacing = p_seq for update skip locked;
  if found then
    update queue.queueing_lock k set replacing = null where k.key = p_key;
  end if;
end $$;

-- A replacement that was rolled back may have left the mark of the one before, which has been applied.
-- Locks: the caller holds ADM; rows of queue.queueing_lock by skip locked.
-- Why no mark of a later one is cleared: it has another number.
create or replace function queue._repair_replacing()
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  perform queue._clear_replacing(k.key, k.replacing)
  from queue.queueing_lock k
  where k.replacing is not null
    and not exists (select from queue.handover h where h.kind = 'replace' and h.payload ->> 'seq' = k.replacing::text);
end $$;

-- Of jobs those that may not start, because a defer is replacing them. The keys of the others stay locked.
-- Locks: the caller holds ADM; rows of queue.queueing_lock by skip locked.
create or replace function queue._lock_queueing_locks(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_free bigint[];
begin
  v_free := array(
    select k.job_id from unnest(p_ids) u (id)
    cross join lateral (select j.id, j.queueing_lock from queue.job j where j.id = u.id and j.queueing_lock is not null offset 0) j
    cross join lateral (select k.job_id from queue.queueing_lock k
                        where k.key = j.queueing_lock and k.job_id = j.id and k.replacing is null for update of k skip locked) k);
  return array(
    select j.id from unnest(p_ids) u (id)
    cross join lateral (select j.id, j.queueing_lock from queue.job j where j.id = u.id and j.queueing_lock is not null offset 0) j
    where j.id <> all (v_free) and (select k.job_id from queue.queueing_lock k where k.key = j.queueing_lock) = j.id);
end $$;

-- Gives the keys of jobs back. Found by key and job, so that one is deleted too that a replacement changed meanwhile.
-- Locks: rows of queue.queueing_lock.
create or replace function queue._drop_queueing_locks(p_ids bigint[], p_flag integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  delete from queue.queueing_lock k
  where k.key = any (array(select j.queueing_lock from queue.job j
                           where j.id = any (p_ids) and j.flags & p_flag <> 0 and j.queueing_lock is not null))
    and k.job_id = any (p_ids);
end $$;

-- sql/30_admission.sql
-- Admission: the one admitter reads what is new in the log and moves it through the gates.
--
-- The log is read by snapshots, not by ids. The cursor holds the snapshot up to which it was read
-- (next_xid, and the transactions in flight then). A row is new when its xid is at or above it, or
-- among those in flight then, and is visible in the present snapshot. So neither a late commit nor a
-- small id is ever missed, nor a row admitted twice. A range too large for one slice goes to
-- queue.backlog. It is looked through there for the priorities that it holds, and then read by priority
-- (queue.backlog_part), while what is committed later is read first.
--
-- Lock order of the whole package, each class once and sorted:
--   own claimed rows of queue.live  <  ADM (queue.admission)  <  everything else.
-- The holder of ADM never waits for a row of queue.live (it takes them by skip locked), so whoever
-- holds claimed rows may wait for ADM. Everything that is not queue.job, queue.live, queue.finished,
-- queue.attempt, queue.handover or queue.queueing_lock is written under ADM only, by one process at a
-- time: there is no race in there to reason about.
--
-- Why no wake-up is lost: whoever ends a claim takes ADM by try and settles in the same transaction,
-- or appends to queue.handover, which is read with the same cursor as the log, so that the argument
-- for new jobs (57_sleep.sql) holds for it.

-- Locks: ADM. Without p_wait it gives up at once when another has it.
-- Whoever has it must not keep it while nobody works: the server ends a session that stays idle in this transaction for 10 s,
-- or for less where that is its setting.
create or replace function queue._lock_admission(p_wait boolean)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_wait then
    perform from queue.admission for update;
  else
    perform from queue.admission for update skip locked;
    if not found then
      return false;
    end if;
  end if;
  if current_setting('idle_in_transaction_session_timeout') = '0'
    or current_setting('idle_in_transaction_session_timeout')::interval > interval '10 s'
  then
    perform set_config('idle_in_transaction_session_timeout', '10s', true);
  end if;
  return true;
end $$;

-- Which other session holds ADM, or most likely does; since: when its transaction began, NULL where its role's sessions are hidden from the owner.
create or replace function queue._admission_holder(out pid integer, out role text, out state text, out application text, out since timestamptz)
language plpgsql stable parallel safe security invoker as $$
begin
  select l.pid, a.usename, a.state, a.application_name, a.xact_start into pid, role, state, application, since
  from queue.admission m
  join pg_locks l on l.locktype = 'transactionid' and l.transactionid = m.xmax and l.mode = 'ExclusiveLock' and l.granted
  left join pg_stat_activity a on a.pid = l.pid
  where l.pid <> pg_backend_pid();
  if not found then
    -- a savepoint took it, whose own number is gone: then by the lock of the table, of which the row's is part. NULL for a
    -- prepared transaction, which has no session
    select l.pid, coalesce(a.usename, p.owner), case when l.pid is null then 'prepared transaction ' || p.gid else a.state end, a.application_name,
      coalesce(a.xact_start, p.prepared)
    into pid, role, state, application, since
    from pg_locks l
    left join pg_stat_activity a on a.pid = l.pid
    left join pg_prepared_xacts p on l.pid is null and l.virtualtransaction = '-1/' || p.transaction::text
    where l.locktype = 'relation' and l.relation = 'queue.admission'::regclass and l.mode = 'RowShareLock' and l.granted
      and l.database = (select d.oid from pg_database d where d.datname = current_database()) and l.pid is distinct from pg_backend_pid()
      and not exists (select from pg_locks w where w.pid = l.pid and not w.granted)
    order by coalesce(a.xact_start, p.prepared) limit 1;
  end if;
end $$;

-- Locks: ADM by try. Raises: 42501 where the owner may not end that session.
create or replace function queue.unblock()
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v record;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  perform from queue.admission for update skip locked;
  if found then
    return null;  -- nobody holds it
  end if;
  v := queue._admission_holder();
  if v.pid is not null then
    begin
      perform pg_terminate_backend(v.pid);
    exception when insufficient_privilege then
      raise exception using errcode = '42501', message = 'the owner of the queue may not end this session',
        detail = format('pid: %s, role: %s', v.pid, v.role),
        hint = format('As that role, as a superuser or as a member of pg_signal_backend: select pg_terminate_backend(%s).', v.pid);
    end;
  end if;
  return v.pid;
end $$;
comment on function queue.unblock() is
  'Ends the session that holds the admission lock just now, and with it keeps others from fetching: see the check admission of queue.health(). Its transaction is rolled back. Returns its process id, NULL if nobody holds the lock. A worker that is ended so connects again.';

-- Admits what is new: handovers, a slice of each range that is new, a slice of the most urgent of the backlog, what is due.
-- Locks: the caller holds ADM. has_more: another call will find more.
create or replace function queue._admit(p_slice integer, out admitted integer, out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  c record;
  v_part record;
  v_ended record;
  v_range record;
  v_xid xid8;
  v_start timestamptz := clock_timestamp();
  v_high_id bigint;
  v_has_backlog boolean;
  v_has_handover boolean;
  v_ended_xids xid8[] := '{}'::xid8[];  -- those in flight then that have committed since
  v_ranges xid8[] := '{}'::xid8[];      -- the xids from which there is something to admit
  v_gated bigint[];
  v_parked bigint[];
  v_is_read boolean := false;           -- the whole backlog, so that nothing need be parked any longer
  v_read integer;
  v_move boolean;
  v_due timestamptz;
begin
  select k.*, pg_current_snapshot() as upto, pg_current_xact_id_if_assigned() as own,
    exists (select from queue.job j where j.xid >= k.next_xid) as has_jobs,
    exists (select from queue.handover h where h.xid >= k.next_xid) as has_handover,
    coalesce(pg_sequence_last_value('queue.needed_seq'), 0) as high_need_id,
    exists (select from queue.pause p where p.task is not null) as has_task_pause,
    (select w.at from queue.waiting w where w.at >= k.due_at order by w.at limit 1) as next_due,
    (select s.due_at from queue.schedule s where s.due_at >= k.due_at order by s.due_at limit 1) as next_run
  into c
  from queue.cursor k order by k.tick desc limit 1;
  if pg_snapshot_xmax(c.upto) < c.next_xid then
    perform queue._restart_cursor();
    admitted := 0;
    has_more := true;
    return;
  end if;
  admitted := 0;
  has_more := false;
  v_high_id := c.high_id;
  v_has_backlog := c.has_backlog;
  v_has_handover := c.has_handover;
  if c.in_flight <> '{}' then
    v_ended_xids := array(select x from unnest(c.in_flight) x where pg_visible_in_snapshot(x, c.upto) and x is distinct from c.own order by x);
    v_ranges := array(select x from unnest(v_ended_xids) x where exists (select from queue.job j where j.xid = x) order by x);
    v_has_handover := v_has_handover or exists (select from queue.handover h where h.xid = any (v_ended_xids));
  end if;
  if c.has_jobs then
    v_ranges := v_ranges || c.next_xid;
  end if;
  -- a look that took long met many rows that are not visible yet: let the cursor pass them
  v_move := v_has_handover or v_ranges <> '{}' or clock_timestamp() - v_start > interval '2 ms';
  if v_has_handover then
    v_ended := queue._take_handovers(c.next_xid, v_ended_xids, c.upto, c.own);
    perform queue._settle_slots(v_ended.ids, v_ended.kinds, v_ended.flags, v_ended.payloads);
    c.high_need_id := coalesce(pg_sequence_last_value('queue.needed_seq'), 0);  -- a yield may need what is admitted below
    admitted := 1;
  end if;
  foreach v_xid in array v_ranges loop
    v_range := queue._admit_range(
      v_xid, -9223372036854775808, case when v_xid < c.next_xid then v_xid else pg_snapshot_xmax(c.upto) end, 9223372036854775807,
      c.upto, c.own, p_slice, v_high_id, c.high_need_id, c.has_task_pause, v_has_backlog);
    v_high_id := v_range.high_id;
    v_has_backlog := v_has_backlog or v_range.is_cut;
    admitted := admitted + v_range.n;
    v_gated := v_gated || v_range.gated;
    v_parked := v_parked || v_range.parked;
  end loop;
  if v_has_backlog then
    perform queue._look_through(p_slice);
    v_is_read := true;
    v_read := 0;
    while v_read < p_slice loop
      v_part := queue._next_part();
      exit when v_part.upto is null;
      v_range := queue._admit_range(
        v_part.from_xid, v_part.from_id, v_part.to_xid, v_part.to_id, v_part.upto, v_part.own,
        null, v_high_id, c.high_need_id, c.has_task_pause, v_part.must_park, v_part.top, v_part.bottom);
      v_high_id := v_range.high_id;
      v_read := v_read + v_range.n;
      v_gated := v_gated || v_range.gated;
      v_parked := v_parked || v_range.parked;
      v_is_read := false;
    end loop;
    admitted := admitted + v_read;
    v_move := true;
  end if;
  -- all at once, so that those of one lock come in the order of ids; before turns are given on
  if v_gated is not null then
    perform queue._admit_gated(v_gated);
  end if;
  if v_parked is not null then
    insert into queue.waiting (id, reason) select u.id, 'parked' from unnest(v_parked) u (id);
  end if;
  if v_has_handover then
    perform queue._settle(v_ended.ids, v_ended.kinds, v_ended.flags);
  end if;
  if v_is_read then
    v_has_backlog := queue._unpark(p_slice) > 0 or exists (select from queue.backlog) or exists (select from queue.backlog_part);
  end if;
  v_due := c.due_at;
  if c.due_at > v_start then
    -- the clock was set back
    v_due := '-infinity';
    v_move := true;
    has_more := true;
  elsif c.next_due <= v_start or c.next_run <= v_start then
    v_due := v_start;
    if c.next_due <= v_start then
      v_due := least(v_due, queue._admit_due(c.due_at, p_slice));
      admitted := admitted + 1;
      has_more := v_due < v_start;
    end if;
    if c.next_run <= v_start then
      select least(v_due, r.mark), admitted + r.runs, has_more or r.has_more into v_due, admitted, has_more
      from queue._run_due_schedules(c.due_at, p_slice) r;
    end if;
    v_move := true;
  end if;
  if v_move then
    perform queue._move_cursor(c.tick, c.upto, c.own, v_high_id, v_has_backlog, v_due);
  end if;
  has_more := has_more or v_has_backlog;
end $$;

-- Notes that everything that is visible in p_upto has been read, the transaction p_own excepted.
-- An update that changes the key is read newest first like a row of its own.
-- Locks: the caller holds ADM.
create or replace function queue._move_cursor(
  p_tick bigint, p_upto pg_snapshot, p_own xid8, p_high_id bigint, p_has_backlog boolean, p_due_at timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  update queue.cursor k
  set tick = p_tick + 1, next_xid = pg_snapshot_xmax(p_upto), in_flight = queue._in_flight(p_upto, p_own), high_id = p_high_id,
    has_backlog = p_has_backlog, due_at = p_due_at
  where k.tick = p_tick;
end $$;

-- The transactions that a snapshot saw in flight, p_own among them.
create or replace function queue._in_flight(p_upto pg_snapshot, p_own xid8)
returns xid8[] language plpgsql immutable parallel safe security invoker as $$
begin
  if pg_snapshot_xmin(p_upto) = pg_snapshot_xmax(p_upto) then
    return '{}'::xid8[];
  end if;
  return array(select x from pg_snapshot_xip(p_upto) x union select p_own where p_own < pg_snapshot_xmax(p_upto) order by 1);
end $$;

-- The transaction whose end a look at a row of queue.live has to wait for: the one that has it locked, by the row's xmax, where that
-- is under way, else this one. As the xid of a handover it has the next admission after that end take it, and none before.
-- A savepoint's own number is no transaction's, nor is that of a multixact, which a row has that was locked before a savepoint and
-- deleted in it: then each admission looks. Multixacts are counted apart, so a number may be one's and a transaction's: who waited for
-- that transaction could wait for the wrong one, so he does not while any member of the multixact is under way.
create or replace function queue._until(p_xmax xid)
returns xid8 language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_own constant xid8 := pg_current_xact_id();
  v_snapshot constant pg_snapshot := pg_current_snapshot();
  v_until constant xid8 := (select x from pg_snapshot_xip(v_snapshot) x where x::xid = p_xmax);
begin
  if v_until is null then
    return v_own;
  elsif mxid_age(p_xmax) between 1 and (select mxid_age(d.datminmxid) from pg_database d where d.datname = current_database()) then
    if exists (
      select from pg_get_multixact_members(p_xmax) m
      -- a member has but the low 32 bits of its number
      where pg_xact_status((v_own::text::bigint + age(v_own::xid) - age(m.xid))::text::xid8) = 'in progress')
    then
      return v_own;
    end if;
  end if;
  return v_until;
end $$;

-- Whether the log may hold what has not been admitted: a look at its end, for those who need nothing else of _admit.
-- Locks: the caller holds ADM.
create or replace function queue._has_news()
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  return (
    select k.has_backlog or k.in_flight <> '{}' or (select j.id from queue.job j where j.xid >= k.next_xid limit 1) is not null
    from queue.cursor k order by k.tick desc limit 1);
end $$;

-- Looks what priorities the backlog holds, part by part, for at most 50 ms: so the most urgent of it can be read first,
-- wherever it is. Of more than 8 priorities in one part neighbours make a band, which is read as one.
-- Locks: the caller holds ADM.
create or replace function queue._look_through(p_slice integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_until constant timestamptz := clock_timestamp() + interval '50 ms';
  v_range record;
  v_seen record;
  v_bands record;
begin
  loop
    select b.* into v_range from queue.backlog b order by b.no limit 1;
    exit when not found;
    select count(*) as n, max(s.priority) as high, min(s.priority) as low, (array_agg(s.xid))[count(*)] as to_xid, (array_agg(s.id))[count(*)] as to_id
    into v_seen
    from (
      select l.xid, l.id, coalesce((l.given).priority, 0) as priority
      from queue.log l
      where (l.xid, l.id) > (v_range.from_xid, v_range.from_id) and l.xid <= v_range.to_xid
        and pg_visible_in_snapshot(l.xid, v_range.upto) and l.xid is distinct from v_range.own
      order by l.xid, l.id limit p_slice) s;
    if v_seen.n > 0 then
      if v_seen.low = v_seen.high then
        select array[v_seen.high] as tops, array[v_seen.low] as bottoms into v_bands;
      else
        select array_agg(b.top order by b.top desc) as tops, array_agg(b.bottom order by b.top desc) as bottoms into v_bands
        from (
          select max(r.priority) as top, min(r.priority) as bottom
          from (
            select p.priority, row_number() over (order by p.priority desc) - 1 as n, count(*) over () as total
            from (
              select distinct coalesce((l.given).priority, 0) as priority from queue.log l
              where (l.xid, l.id) > (v_range.from_xid, v_range.from_id) and (l.xid, l.id) <= (v_seen.to_xid, v_seen.to_id)
                and pg_visible_in_snapshot(l.xid, v_range.upto) and l.xid is distinct from v_range.own) p) r
          group by r.n * 8 / greatest(r.total, 8)) b;
      end if;
      insert into queue.backlog_part (no, priority, is_first, is_mixed, from_xid, from_id, to_xid, to_id, upto, own, tops, bottoms)
      values (nextval('queue.tick_seq'), v_bands.tops[1], v_range.is_first, v_seen.low < v_seen.high, v_range.from_xid,
              v_range.from_id, v_seen.to_xid, v_seen.to_id, v_range.upto, v_range.own, v_bands.tops, v_bands.bottoms);
    end if;
    if v_seen.n < p_slice then
      delete from queue.backlog b where b.no = v_range.no;
    else
      update queue.backlog b set from_xid = v_seen.to_xid, from_id = v_seen.to_id where b.no = v_range.no;
    end if;
    exit when clock_timestamp() > v_until;
  end loop;
end $$;

-- The most urgent band of the backlog, the oldest of those, which is then out of it: rows of the log from (from_xid, from_id),
-- which is read already, to (to_xid, to_id), of a priority from bottom to top. upto NULL: there is none. must_park: older jobs of a
-- lock may be left behind, or put aside already, so that those with an ordered lock are put aside (_admit_range).
-- Locks: the caller holds ADM.
create or replace function queue._next_part(
  out from_xid xid8, out from_id bigint, out to_xid xid8, out to_id bigint, out upto pg_snapshot, out own xid8,
  out top integer, out bottom integer, out must_park boolean)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_no bigint;
  v_is_last boolean;
begin
  select p.no, p.from_xid, p.from_id, p.to_xid, p.to_id, p.upto, p.own, p.tops[1], p.bottoms[1], cardinality(p.tops) = 1,
    not p.is_first or p.is_mixed or exists (select from queue.backlog_part o where o.no < p.no)
      or exists (select from queue.waiting w where w.reason = 'parked')
  into v_no, from_xid, from_id, to_xid, to_id, upto, own, top, bottom, v_is_last, must_park
  from queue.backlog_part p order by p.priority desc, p.no limit 1;
  if v_is_last then
    delete from queue.backlog_part p where p.no = v_no;
  else
    update queue.backlog_part p set priority = p.tops[2], tops = p.tops[2:], bottoms = p.bottoms[2:] where p.no = v_no;
  end if;
end $$;

-- Admits at most p_slice jobs of a range of the log, those of a priority from p_bottom to p_top if given. The rest goes to
-- queue.backlog (is_cut). Plain ones go to queue.live here, the others through the gates: also those that may be needed, as
-- jobs were with ids up to p_high_need_id. With p_park, jobs with an ordered lock are put aside until all backlog has
-- been read, and then admitted in the order of ids: older ones of the same lock may be in there.
-- Locks: the caller holds ADM.
create or replace function queue._admit_range(
  p_from_xid xid8, p_from_id bigint, p_to_xid xid8, p_to_id bigint, p_upto pg_snapshot, p_own xid8, p_slice integer,
  p_high_id bigint, p_high_need_id bigint, p_has_task_pause boolean, p_park boolean, p_top integer default null, p_bottom integer default null,
  out n integer, out high_id bigint, out is_cut boolean, out gated bigint[], out parked bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_low bigint[];
begin
  with fresh as materialized (
    select j.id, j.flags, coalesce(j.deadline, 'infinity') as deadline, l.lane, l.extra_flags,
      (coalesce(j.deadline, 'infinity'), j.id) < (l.low_deadline, l.low_id) or l.is_idle as is_low,
      j.flags & (1 | 2 | 4 | 8 | 16 | 32 | 64 | 256 | 8192) = 0 and j.id > p_high_need_id and l.lane is not null and not p_has_task_pause as is_plain
    from (select j.id, j.flags, j.deadline, j.queue, j.priority from queue.job j
          where (j.xid, j.id) > (p_from_xid, p_from_id) and (j.xid, j.id) <= (p_to_xid, p_to_id)
            and (p_top is null or j.priority between p_bottom and p_top)
            and pg_visible_in_snapshot(j.xid, p_upto) and j.xid is distinct from p_own
          order by j.xid, j.id limit p_slice) j
    left join lateral (select l.lane, l.low_deadline, l.low_id, l.is_idle, l.extra_flags from queue.lane l
                       where l.queue = j.queue and l.priority = j.priority and l.kind = 0 limit 1) l on true),
  plain as (
    insert into queue.live (id, deadline, lane, attempt, flags)
    select x.id, x.deadline, x.lane, 0, x.flags | x.extra_flags from fresh x where x.is_plain)
  select count(*), greatest(p_high_id, max(x.id)),
    array_agg(x.id) filter (where not x.is_plain and not (p_park and x.flags & 1 <> 0)),
    array_agg(x.id) filter (where p_park and x.flags & 1 <> 0),
    array_agg(x.id) filter (where x.is_plain and x.is_low)
  into n, high_id, gated, parked, v_low
  from fresh x;
  is_cut := coalesce(n >= p_slice, false);
  if is_cut then
    insert into queue.backlog (no, from_xid, from_id, to_xid, upto, own, is_first)
    select nextval('queue.tick_seq'), x.xid, x.id, p_to_xid, p_upto, p_own, not p_park
    from (select j.xid, j.id from queue.job j
          where (j.xid, j.id) > (p_from_xid, p_from_id) and (j.xid, j.id) <= (p_to_xid, p_to_id)
            and pg_visible_in_snapshot(j.xid, p_upto) and j.xid is distinct from p_own
          order by j.xid, j.id offset p_slice - 1 limit 1) x;
  end if;
  if v_low is not null then
    perform queue._lower(array_agg(v.lane), array_agg(v.deadline), array_agg(v.id)) from queue.live v where v.id = any (v_low);
  end if;
end $$;

-- Lowers the low marks of lanes to keys that were inserted below them, (p_deadlines[i], p_ids[i]).
-- Locks: the caller holds ADM.
create or replace function queue._lower(p_lanes integer[], p_deadlines timestamptz[], p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  update queue.lane l
  set low_deadline = least(u.deadline, l.low_deadline), is_idle = false,
    low_id = case when (u.deadline, u.id) < (l.low_deadline, l.low_id) then u.id else l.low_id end
  from (select distinct on (u.lane) u.lane, u.deadline, u.id
        from unnest(p_lanes, p_deadlines, p_ids) u (lane, deadline, id) order by u.lane, u.deadline, u.id) u
  where l.lane = u.lane and ((u.deadline, u.id) < (l.low_deadline, l.low_id) or l.is_idle);
end $$;

-- Raises the low marks of lanes past what is claimed or gone.
-- Locks: the caller holds ADM, so that nothing is made ready meanwhile. A row that another claims and
-- gives up again by rollback would be passed by: so the mark stops at the first row that is unclaimed
-- in this snapshot, which such a row is.
create or replace function queue._raise_low_marks(p_lanes integer[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_lane record;
begin
  for v_lane in
    select l.lane, l.low_deadline, l.low_id, f.deadline, f.id, k.high_id
    from queue.lane l
    cross join (select k.high_id from queue.cursor k order by k.tick desc limit 1) k
    left join lateral (
      select v.deadline, v.id from queue.live v
      where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null
      order by v.deadline, v.id limit 1) f on true
    where l.lane = any (p_lanes)
  loop
    if v_lane.id is not null then
      if v_lane.id > v_lane.low_id + 100 or v_lane.deadline > v_lane.low_deadline then
        update queue.lane l set low_deadline = v_lane.deadline, low_id = v_lane.id where l.lane = v_lane.lane;
      end if;
    elsif v_lane.high_id > v_lane.low_id + 100 or v_lane.low_deadline < 'infinity' then
      update queue.lane l set low_deadline = 'infinity', low_id = v_lane.high_id + 1 where l.lane = v_lane.lane;
    end if;
  end loop;
end $$;

-- Where there are many lanes, marks those that hold nothing ready, so that fetch passes them by, and removes
-- those that hold nothing at all.
-- Locks: the caller holds ADM, so that nothing is made ready meanwhile. What is claimed just now counts as
-- ready until that transaction ends, as it may be given up.
create or replace function queue._rest_lanes()
returns void language plpgsql volatile parallel unsafe security invoker set enable_bitmapscan = off as $$
#variable_conflict use_column
declare
  v_idle integer[];
begin
  if (select count(*) from (select from queue.lane l where not l.is_idle limit 51) l) > 50 then
    update queue.lane l set is_idle = true
    where l.lane = any (array(
      select l.lane from queue.lane l
      where not l.is_idle
        and (select v.id from queue.live v
             where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null
             order by v.deadline, v.id limit 1) is null
      limit 10000));
  end if;
  if (select count(*) from (select from queue.lane l where l.is_idle limit 1001) l) > 1000 then
    v_idle := array(
      select l.lane from queue.lane l
      where l.is_idle and (select v.id from queue.live v where v.lane = l.lane limit 1) is null limit 10000);
    delete from queue.lane l
    where l.lane = any (v_idle)
      and l.lane <> all (array(select distinct s.lane from (select unnest(s.lanes) as lane from queue.semaphore s where s.lanes <> '{}') s
                               where s.lane = any (v_idle)));
  end if;
end $$;

-- After a restore into another cluster the stored transaction ids mean nothing, or lie ahead: admit
-- again whatever has not been admitted, and give every row an xid that this cluster has seen.
-- Locks: the caller holds ADM.
create or replace function queue._restart_cursor()
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_snapshot pg_snapshot := pg_current_snapshot();
begin
  delete from queue.backlog;
  delete from queue.backlog_part;
  delete from queue.deleted;
  update queue.job j set xid = pg_current_xact_id()
  where not exists (select from queue.live v where v.id = j.id)
    and not exists (select from queue.finished f where f.id = j.id)
    and not exists (select from queue.waiting w where w.id = j.id)
    and not exists (select from queue.lock_member m left join queue.job_state s on s.id = j.id
                    where m.lock = coalesce(s.lock, j.lock) and m.id = j.id)
    and not exists (select from queue.handover h where h.job_id = j.id and h.kind in ('ended', 'again'));
  update queue.job j set xid = '3' where j.xid >= pg_snapshot_xmax(v_snapshot) and j.xid <> pg_current_xact_id();
  update queue.handover h set xid = pg_current_xact_id();
  update queue.horizon h set looked_at = '-infinity', looked_xid = '0';
  perform queue._note_needed((select max(d.need_id) from queue.need d));
  insert into queue.cursor (tick, next_xid, in_flight, high_id, has_backlog, due_at)
  select k.tick + 1, pg_snapshot_xmax(v_snapshot),
    array(select x from pg_snapshot_xip(v_snapshot) x union select pg_current_xact_id() where pg_current_xact_id() < pg_snapshot_xmax(v_snapshot) order by 1),
    k.high_id, exists (select from queue.waiting w where w.reason = 'parked'), '-infinity'
  from queue.cursor k order by k.tick desc limit 1;
  delete from queue.cursor k where k.tick < (select max(m.tick) from queue.cursor m);
  update queue.installation i set system_identifier = (select c.system_identifier from pg_control_system() c)
  where i.system_identifier <> (select c.system_identifier from pg_control_system() c);
end $$;

-- sql/31_gates.sql
-- The gates, in their order: held, needs, schedule, a paused task, the lock's turn, slots. A job is
-- looked at once per gate, and waits in that gate's own place. Everything here runs under ADM.
--
-- A gate that opens for one job may open another: a lock's next job may end at a full key, and so give
-- its turn on at once. So no gate calls another. Each returns what it lets go, and _advance, the one
-- function that calls them all, goes on until nothing is left.

-- New jobs that are not plain: joins locks, writes needs, and sends them to their first gate.
create or replace function queue._admit_gated(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
  v_joined record;
  v_held bigint[];
  v_flags integer;
  v_only_locks boolean;
begin
  select array_agg(j.id order by j.id), bit_or(j.flags), bool_and(j.flags & 3 <> 0 and j.flags & (8 | 16 | 32 | 64) = 0 and s.id is null)
  into v_ids, v_flags, v_only_locks
  from unnest(p_ids) u (id)
  cross join lateral (select j.id, j.flags from queue.job j where j.id = u.id offset 0) j
  left join lateral (select s.id from queue.job_state s where s.id = u.id offset 0) s on true;
  if v_flags & 3 <> 0 then
    v_joined := queue._join_locks(v_ids);
    if v_only_locks and not exists (select from queue.pause p where p.task is not null) then
      -- those that wait for their turn need not be looked at again
      perform queue._advance(
        p_arrived => v_joined.displaced, p_turned => v_joined.free || v_joined.passed, p_keys => v_joined.keys);
      return;
    end if;
  else
    select null::bigint[] as passed, null::bigint[] as displaced, null::text[] as keys into v_joined;
  end if;
  if v_flags & 8 <> 0 then
    perform queue._join_needs(v_ids);
  end if;
  if v_flags & 64 <> 0 then
    insert into queue.expiry (id, at)
    select j.id, (j.options ->> 'expires_at')::timestamptz from queue.job j where j.id = any (v_ids) and j.flags & 64 <> 0;
  end if;
  if v_flags & 32 <> 0 then
    with held as (
      insert into queue.waiting (id, reason) select j.id, 'held' from queue.job j where j.id = any (v_ids) and j.flags & 32 <> 0
      returning id)
    select array_agg(h.id) into v_held from held h;
    v_ids := array(select u.id from unnest(v_ids) u (id) where u.id not in (select unnest(v_held)));
  end if;
  perform queue._advance(
    p_arrived => v_ids || v_joined.displaced, p_turned => v_joined.passed, p_keys => v_joined.keys, p_changed => v_held);
end $$;

-- Sends jobs through the gates, and on from each job that this moves to those that it lets go, until nothing moves.
--   p_arrived: in no gate; to go through all of them
--   p_turned: in no gate; they have passed all but the last, slots
--   p_ended: finished, and their locks and dependents do not know yet
--   p_keys: semaphores that may have room for those that wait
--   p_locks: the job that has the turn may have to give it to an older one
--   p_changed: jobs whose dependents have to look at their needs again
-- The order matters: as long as a job is in no gate nobody may look where it is, so these come first.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
-- How long: a chain of any length takes one turn of the loop for each link. After 20 turns and 50 ms the rest is handed over to
-- the next admission, so that nobody waits long for ADM. The first 20 turns are taken however long they last, so that a short
-- chain ends in the same way on a busy machine.
-- Why no wake-up is lost: what is handed over is read as what ended claims hand over (30_admission.sql): jobs in no gate (again, with flags 0: they hold nothing), keys (refill), dependents (recheck), locks
-- (regate).
create or replace function queue._advance(
  p_arrived bigint[] default null, p_turned bigint[] default null, p_ended bigint[] default null,
  p_keys text[] default null, p_locks text[] default null, p_changed bigint[] default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_until constant timestamptz := clock_timestamp() + interval '50 ms';
  v_arrived bigint[] := p_arrived;
  v_met bigint[];  -- as arrived, with their needs met
  v_turned bigint[] := p_turned;
  v_ended bigint[] := p_ended;
  v_keys text[] := p_keys;
  v_locks text[] := p_locks;
  v_changed bigint[] := p_changed;
  v_turns integer := 0;
  v record;
begin
  loop
    v_turns := v_turns + 1;
    if v_arrived <> '{}' or v_met <> '{}' then
      v := queue._pass_gates(v_arrived, v_met);
      v_arrived := null;
      v_met := null;
      v_turned := v_turned || v.passed;
      v_changed := v_changed || v.failed;
    end if;
    if v_turned <> '{}' then
      v := queue._enter_slots(v_turned, false);
      v_turned := null;
      v_keys := v_keys || v.grown;
      if v.discarded is not null then
        perform queue._finish_unclaimed(v.discarded, 'cancelled', 'limit', null);
        v_ended := v_ended || v.discarded;
      end if;
    end if;
    if v_ended <> '{}' then
      v_turned := queue._leave_locks(v_ended, false);
      v_changed := v_changed || array(
        select u.id from unnest(v_ended) u (id) where (select d.job_id from queue.need d where d.need_id = u.id limit 1) is not null);
      v_ended := null;
    end if;
    if v_turned <> '{}' then
      null;
    elsif v_keys <> '{}' then
      v_keys := queue._refill(v_keys);
    elsif v_locks <> '{}' then
      v := queue._displace(v_locks, '{}');
      v_locks := null;
      v_arrived := v.displaced;
      v_turned := v.passed;
      v_keys := v.keys;
    elsif v_changed <> '{}' then
      v := queue._needs_changed(v_changed);
      v_met := v.met;
      v_keys := v.keys;
      v_changed := v.changed;
    else
      return;
    end if;
    exit when v_turns > 20 and clock_timestamp() > v_until;
  end loop;
  if v_turned <> '{}' then
    perform queue._keep_turns(v_turned);
  end if;
  insert into queue.handover (job_id, kind, flags, payload)
  select u.id, 'again', 0, null::jsonb from unnest(v_arrived || v_met || v_turned) u (id)
  union all
  select u.id, 'recheck', 4096, null from unnest(v_changed) u (id)
  union all
  select m.id, 'regate', 0, null
  from unnest(v_locks) u (lock) cross join lateral (select m.id from queue.lock_member m where m.lock = u.lock order by m.id limit 1) m
  union all
  select 0, 'refill', 0, to_jsonb(v_keys) where v_keys <> '{}';
end $$;

-- Goes on with what _advance has handed over in this very transaction, which its own admissions do not read: an operation must
-- find every job in its place.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._advance_own()
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
begin
  loop
    with gone as (
      delete from queue.handover h
      where h.xid = pg_current_xact_id_if_assigned() and (h.kind = 'again' and h.flags = 0 and h.payload is null or h.kind = 'refill')
      returning h.job_id, h.kind, h.payload)
    select count(*) as n, array_agg(g.job_id) filter (where g.kind = 'again') as ids,
      array_agg(k.key) filter (where g.kind = 'refill') as keys
    into v
    from gone g left join lateral jsonb_array_elements_text(g.payload) k (key) on g.kind = 'refill';
    exit when v.n = 0;
    perform queue._advance(p_arrived => v.ids, p_keys => v.keys);
  end loop;
end $$;

-- Sends jobs that are in no gate to the first that is shut for them. p_met: likewise, from the gate of needs. passed: those
-- for whom all were open, so that only slots are left; failed: those that wait, as a need of theirs has failed.
-- Locks: the caller holds ADM.
create or replace function queue._pass_gates(p_ids bigint[], p_met bigint[], out passed bigint[], out failed bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_flags integer;
  v_is_later boolean;
  v_waiting record;
begin
  select bit_or(j.flags | coalesce(s.extra_flags, 0)), bool_or(coalesce(s.scheduled_at, j.scheduled_at) > v_now) into v_flags, v_is_later
  from unnest(p_ids || p_met) u (id)
  cross join lateral (select j.flags, j.scheduled_at from queue.job j where j.id = u.id offset 0) j
  left join lateral (select s.scheduled_at, s.extra_flags from queue.job_state s where s.id = u.id offset 0) s on true;
  passed := p_ids;
  if v_flags & 8 <> 0 and p_ids <> '{}' then
    v_waiting := queue._wait_for_needs(p_ids);
    passed := v_waiting.passed;
    failed := v_waiting.failed;
  end if;
  passed := passed || p_met;
  if v_is_later then
    with seen as materialized (
      select u.id, coalesce(s.scheduled_at, j.scheduled_at) as at
      from unnest(passed) u (id)
      cross join lateral (select j.scheduled_at from queue.job j where j.id = u.id offset 0) j
      left join lateral (select s.scheduled_at from queue.job_state s where s.id = u.id offset 0) s on true),
    later as (
      insert into queue.waiting (id, reason, at) select x.id, 'schedule', x.at from seen x where x.at > v_now)
    select array_agg(x.id order by x.id) into passed from seen x where x.at is null or x.at <= v_now;
    perform queue._heed_clock();
  end if;
  if passed is not null and exists (select from queue.pause p where p.task is not null) then
    passed := queue._wait_for_task(passed);
  end if;
  if passed is not null and v_flags & 1 <> 0 then
    passed := queue._wait_for_turn(passed);
  end if;
end $$;

-- Something waits for a time to come: while the clock stands before the mark of what is due, as it was set back since, the
-- mark goes back with it, or the next admission, should it be after the mark, would begin there.
-- Locks: the caller holds ADM.
create or replace function queue._heed_clock()
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_tick bigint;
  v_due_at timestamptz;
begin
  select k.tick, k.due_at into v_tick, v_due_at from queue.cursor k order by k.tick desc limit 1;
  if v_due_at > clock_timestamp() then
    update queue.cursor k set due_at = '-infinity' where k.tick = v_tick;
  end if;
end $$;

-- Moves jobs whose time has come on. Returns the new mark: nothing that waits lies before it.
create or replace function queue._admit_due(p_due_at timestamptz, p_slice integer)
returns timestamptz language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_ids bigint[];
  v_at timestamptz;
begin
  with due as (
    delete from queue.waiting w
    where w.ctid = any (array(select d.ctid from queue.waiting d
                              where d.at >= p_due_at and d.at <= v_now order by d.at, d.id limit p_slice))
    returning w.id, w.at)
  select array_agg(d.id order by d.id), max(d.at) into v_ids, v_at from due d;
  perform queue._advance(p_arrived => v_ids);
  return case when cardinality(v_ids) >= p_slice then v_at else v_now end;
end $$;

-- Admits jobs that were put aside while there was a backlog, in the order of ids, and returns how many.
create or replace function queue._unpark(p_slice integer)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
begin
  with parked as (
    delete from queue.waiting w
    where w.ctid = any (array(select p.ctid from queue.waiting p where p.reason = 'parked' order by p.id limit p_slice))
    returning w.id)
  select array_agg(p.id) into v_ids from parked p;
  if v_ids is not null then
    perform queue._admit_gated(v_ids);
  end if;
  return coalesce(cardinality(v_ids), 0);
end $$;

-- Where jobs go in queue.live: lane, order key, flags and attempts so far, in the order of ids. Makes lanes that are
-- missing. all_flags: what any of them has; is_low: one lies below its lane's low mark.
-- The flag 2 stands for the semaphore 'm' || lock, which ordered jobs of a lock with mutex members ask too.
-- offset 0 keeps what is looked up for a job from being looked up again wherever it is named.
create or replace function queue._places(
  p_ids bigint[], out ids bigint[], out lanes integer[], out deadlines timestamptz[], out flags smallint[], out attempts smallint[],
  out all_flags integer, out is_low boolean)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_queues text[];
  v_priorities integer[];
  v_kinds smallint[];
  v_high_need_id bigint := coalesce(pg_sequence_last_value('queue.needed_seq'), 0);
  v_is_complete boolean;
begin
  for v_pass in 1 .. 2 loop
    select array_agg(x.id), array_agg(x.deadline), array_agg(x.flags), array_agg(x.attempts),
      array_agg(x.queue), array_agg(x.priority), array_agg(x.kind), array_agg(x.lane), bool_and(x.lane is not null), bit_or(x.flags), bool_or(x.is_low)
    into ids, deadlines, flags, attempts, v_queues, v_priorities, v_kinds, lanes, v_is_complete, all_flags, is_low
    from (
      select x.id, x.deadline, (x.flags | coalesce(l.extra_flags, 0))::smallint as flags, x.attempts, x.queue, x.priority, x.kind, l.lane,
        l.is_idle or (x.deadline, x.id) < (l.low_deadline, l.low_id) as is_low
      from (
        select y.id, y.deadline, y.queue, y.priority, y.attempts, y.flags | y.mixed as flags,
          (case when y.flags & 1024 <> 0 then 2
                when (y.flags | y.mixed) & (2 | 4 | 64 | 256 | 8192) <> 0 or y.flags & 8 <> 0 and queue._needs_mode(y.options) & 1 <> 0
                  or exists (select from queue.queue_config c where c.queue = y.queue and (c.max_running is not null or c.rate_limit is not null))
                then 1 else 0 end)::smallint as kind
        from (
          select j.id, coalesce(s.deadline, j.deadline, 'infinity') as deadline, coalesce(s.queue, j.queue) as queue,
            coalesce(s.priority, j.priority) as priority, least(coalesce(s.attempts, 0), 32766)::smallint as attempts,
            (j.flags | coalesce(s.extra_flags, 0)) & (case when s.lock = '' then 0 else 3 end | 4 | 8 | 64 | 128 | 256 | 512 | 8192 | -32768)
              | case when s.crashes > 0 then 1024 else 0 end
              | case when s.id is not null then 2048 else 0 end
              | case when j.id <= v_high_need_id and (select d.job_id from queue.need d where d.need_id = j.id limit 1) is not null then 4096 else 0 end as flags,
            j.options,
            case when (j.flags | coalesce(s.extra_flags, 0)) & 1 <> 0
                   and (select m.id from queue.lock_member m where m.lock = coalesce(s.lock, j.lock) and m.is_mutex limit 1) is not null
                 then 2 else 0 end as mixed
          from queue.job j left join lateral (select s.* from queue.job_state s where s.id = j.id offset 0) s on true
          where j.id = any (p_ids) order by j.id offset 0) y offset 0) x
      left join lateral (select l.lane, l.extra_flags, l.is_idle, l.low_deadline, l.low_id from queue.lane l
                         where l.queue = x.queue and l.priority = x.priority and l.kind = x.kind limit 1) l on true
      order by x.id) x;
    exit when v_is_complete is not false;
    insert into queue.lane (lane, queue, priority, kind, paused_until, extra_flags)
    select queue._new_lane(), u.queue, u.priority, u.kind, queue._paused_until(u.queue),
      case when exists (select from queue.queue_config c where c.queue = u.queue and c.retain is not null) then 512 else 0 end
    from (select distinct u.queue, u.priority, u.kind
          from unnest(v_queues, v_priorities, v_kinds, lanes) u (queue, priority, kind, lane) where u.lane is null) u;
  end loop;
end $$;

-- A number for a new lane: those of dropped ones come again.
create or replace function queue._new_lane()
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_lane integer;
begin
  loop
    v_lane := nextval('queue.lane_seq');
    exit when not exists (select from queue.lane l where l.lane = v_lane);
  end loop;
  return v_lane;
end $$;

-- Puts placed jobs into queue.live and lowers low marks; p_is_low: some of them need it.
create or replace function queue._to_live(
  p_ids bigint[], p_lanes integer[], p_deadlines timestamptz[], p_flags smallint[], p_attempts smallint[], p_is_low boolean default true)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  insert into queue.live (id, deadline, lane, attempt, flags)
  select u.id, u.deadline, u.lane, u.attempt, u.flags
  from unnest(p_ids, p_deadlines, p_lanes, p_attempts, p_flags) u (id, deadline, lane, attempt, flags);
  if p_is_low then
    perform queue._lower(p_lanes, p_deadlines, p_ids);
  end if;
end $$;

-- sql/32_locks.sql
-- Locks. queue.lock_member holds every unfinished job that has a lock; everything here runs under ADM.
--
-- ordered: the first member by id has the turn, and keeps it until it has ended, whatever it waits for.
-- The next is found by looking past the id of the one that ended, so that the dead rows before it cost
-- nothing. A job that joins where one with a greater id is a member (its transaction committed late, it is
-- retried, or that one took the lock on a retry) is late: it goes before those that wait, and takes the turn of
-- a younger one unless that one runs (_displace); is_late keeps it findable until it has had its turn.
-- mutex: a member that never waits for its turn; it takes the semaphore 'm' || lock (33_semaphores.sql),
-- as ordered jobs of a mixed lock do, one that has mutex members. An ordered job waits for every older
-- member, so that in a mixed lock the turn is only given to the first of all.
-- Whether a lock is mixed is asked by a subquery with limit 1: an EXISTS may be planned as a hash of all mutex
-- members of all locks.
-- In a mixed lock has_turn says which ordered job has the turn; else it is written only where it can't be
-- told from the job's place: a job in queue.live has it.

-- Adds new jobs. The turn goes to the first of a lock that had no member. While any task is paused none counts as passed
-- before it has been at that gate, after which _wait_for_turn notes it. free: those of them that nothing here holds
-- up: that have the turn, or need none. passed, displaced and keys: what others this lets go, as _displace returns it.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._join_locks(
  p_ids bigint[], out free bigint[], out passed bigint[], out displaced bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
begin
  with joining as materialized (
    select x.lock, x.id, x.is_mutex, x.is_passed, x.n, o.id is not null as has_others, coalesce(o.id > x.id, false) as is_late
    from (
      select j.id, j.lock, j.flags & 2 <> 0 as is_mutex,
        j.flags & (8 | 16 | 32) = 0 and not j.is_later and (select p.no from queue.pause p where p.task is not null limit 1) is null as is_passed,
        row_number() over (partition by j.lock order by j.id) as n
      from unnest(p_ids) u (id)
      cross join lateral (select j.id, j.flags | coalesce(s.extra_flags, 0) as flags, coalesce(s.lock, j.lock) as lock,
                            coalesce(s.scheduled_at > clock_timestamp(), false) as is_later
                          from queue.job j left join queue.job_state s on s.id = j.id where j.id = u.id offset 0) j
      where j.flags & 3 <> 0 and j.lock <> '') x
    left join lateral (select m.id from queue.lock_member m where m.lock = x.lock order by m.id desc limit 1) o on true),
  joined as (
    insert into queue.lock_member (lock, id, is_mutex, is_late, is_passed, has_turn)
    select x.lock, x.id, x.is_mutex, x.is_late and not x.is_mutex,
      x.is_passed, not x.is_mutex and x.n = 1 and not x.has_others
    from joining x)
  select array_agg(distinct x.lock) filter (where x.is_mutex and x.has_others and not m.is_mixed) as mixed,
    array_agg(distinct x.lock) filter (where not x.is_mutex and m.is_mixed) as ordered,
    array_agg(x.id order by x.id) filter (where x.is_mutex or x.n = 1 and not x.has_others) as free,
    array_agg(x.lock) filter (where x.is_late) as late
  into v
  from joining x
  left join lateral (
    select (select m.id from queue.lock_member m where m.lock = x.lock and m.is_mutex limit 1) is not null as is_mixed offset 0) m on x.has_others;
  if v.mixed is not null then
    -- from now on has_turn counts
    update queue.lock_member m set has_turn = true
    where m.ctid = any (array(
      select h.ctid from unnest(v.mixed) u (lock)
      cross join lateral (select m.ctid, m.has_turn from queue.lock_member m
                          where m.lock = u.lock and not m.is_late and not m.is_mutex order by m.id limit 1) h
      where not h.has_turn));
  end if;
  free := v.free;
  if v.ordered is not null then
    free := free || queue._next_mixed(v.ordered);
  end if;
  if v.late is not null then
    v := queue._displace(v.late, p_ids);
    free := free || v.joined;
    passed := v.passed;
    displaced := v.displaced;
    keys := v.keys;
  end if;
end $$;

-- Where a member that came late, or a mutex one, is older than the one that has the turn, and that one does not run, the
-- turn goes to the first: else the older would wait for what the younger waits for, which may be the older.
-- passed: who has the turn now, and nothing else holds him up; joined: those of them that are among p_joining, jobs that
-- are in no gate yet. displaced: who had it, and is in no gate now; keys: semaphores in which that left room.
-- Locks: the caller holds ADM; rows of queue.live by skip locked. Whose row another transaction holds is starting, or
-- comes back (_regate) once that is over. Why no wake-up is lost: the turn is never nobody's, but in a mixed lock while its
-- first member is a mutex job, whose end gives it on. Two sessions: lock_late_defer.spec, late_pause.spec.
create or replace function queue._displace(
  p_locks text[], p_joining bigint[], out passed bigint[], out joined bigint[], out displaced bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_lock record;
  v_reason text;
  v_taken record;
  v_pass bigint[];
begin
  for v_lock in
    select u.lock, l.id as late_id, l.is_passed, h.id, x.id is not null as is_mixed
    from (select distinct u.lock from unnest(p_locks) u (lock)) u
    left join lateral (select m.id, m.is_passed from queue.lock_member m where m.lock = u.lock and m.is_late order by m.id limit 1) l on true
    left join lateral (select m.id from queue.lock_member m where m.lock = u.lock and m.is_mutex order by m.id limit 1) x on true
    -- the one that has the turn, unless that is older yet: without mutex members the next, read past no dead rows
    cross join lateral (
      (select m.id, m.has_turn from queue.lock_member m where x.id is null and m.lock = u.lock and m.id > l.id and not m.is_late order by m.id limit 1)
      union all
      select m.id, true from queue.lock_member m where x.id is not null and m.lock = u.lock and m.has_turn and m.id + 0 > least(l.id, x.id)) h
    where h.has_turn or (select v.id from queue.live v where v.id = h.id) is not null
      or (select w.reason from queue.waiting w where w.id = h.id) = 'slot'
  loop
    select w.reason into v_reason from queue.waiting w where w.id = v_lock.id;
    if found and v_reason <> 'slot' then
      null;  -- it comes to its turn after that gate
    elsif found or exists (select from queue.live v where v.id = v_lock.id)
      or exists (select from queue.handover h where h.job_id = v_lock.id and h.kind = 'again' and h.flags = 0 and h.payload is null)
    then
      v_taken := queue._take_out(v_lock.id);
      if v_taken.place is null then
        insert into queue.handover (xid, job_id, kind, flags)
        select queue._until(v.xmax), v.id, 'regate', 0 from queue.live v where v.id = v_lock.id and v.claim is null;
        continue;
      end if;
      displaced := displaced || v_lock.id;
      keys := keys || v_taken.keys;
    else
      continue;  -- the end of its claim is not settled yet
    end if;
    update queue.lock_member m set has_turn = false, is_passed = false where m.lock = v_lock.lock and m.id = v_lock.id;
    if v_lock.is_mixed then
      v_pass := v_pass || queue._next_mixed(array[v_lock.lock]);
    else
      perform queue._keep_turns(array[v_lock.late_id]);
      v_pass := v_pass || array(select v_lock.late_id where v_lock.is_passed);
    end if;
  end loop;
  passed := array(select u.id from unnest(v_pass) u (id) where u.id <> all (p_joining));
  joined := array(select u.id from unnest(v_pass) u (id) where u.id = any (p_joining));
end $$;

-- The locks that jobs have now.
create or replace function queue._locks_of(p_ids bigint[])
returns text[] language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
begin
  return array(
    select distinct coalesce(s.lock, j.lock) from unnest(p_ids) u (id)
    cross join lateral (select j.id, j.lock from queue.job j where j.id = u.id offset 0) j
    left join lateral (select s.lock from queue.job_state s where s.id = u.id offset 0) s on true
    where coalesce(s.lock, j.lock) <> '');
end $$;

-- Their rows among the members: statements that work on them leave the planner no way but by these.
-- Locks: none; the caller holds ADM, so that nobody moves the rows meanwhile.
create or replace function queue._members(p_ids bigint[])
returns tid[] language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
begin
  return array(
    select m.ctid from unnest(p_ids) u (id)
    cross join lateral (select coalesce(s.lock, j.lock) as lock from queue.job j left join queue.job_state s on s.id = j.id where j.id = u.id offset 0) j
    cross join lateral (select m.ctid from queue.lock_member m where m.lock = j.lock and m.id = u.id offset 0) m);
end $$;

-- Of jobs that nothing but their lock can hold up, those that have the turn; the rest is marked.
create or replace function queue._wait_for_turn(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_pass bigint[];
  v_mark bigint[];
begin
  select array_agg(u.id order by u.id) filter (where m.id is null or m.has_turn),
    array_agg(u.id) filter (where not m.has_turn and not m.is_passed)
  into v_pass, v_mark
  from unnest(p_ids) u (id)
  cross join lateral (select coalesce(s.lock, j.lock) as lock from queue.job j left join queue.job_state s on s.id = j.id
                      where j.id = u.id offset 0) j
  left join lateral (select m.id, m.has_turn, m.is_passed from queue.lock_member m
                     where m.lock = j.lock and m.id = u.id and not m.is_mutex offset 0) m on true;
  if v_mark is not null then
    update queue.lock_member m set is_passed = true where m.ctid = any (queue._members(v_mark));
  end if;
  return v_pass;
end $$;

-- Notes that jobs which leave queue.live unfinished keep their turn.
create or replace function queue._keep_turns(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  update queue.lock_member m set has_turn = true, is_late = false
  where m.ctid = any (queue._members(p_ids)) and not m.is_mutex and (not m.has_turn or m.is_late);
end $$;

-- Takes ended jobs out of their locks and gives the turn to the next. p_had_turn: they had it. Returns those that have the
-- turn now, and that nothing else holds up.
-- Locks: the caller holds ADM. Others of a lock may have ended with them: these are in queue.finished, and passed over.
create or replace function queue._leave_locks(p_ids bigint[], p_had_turn boolean)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_pass bigint[];
  v_wait bigint[];
  v_mixed text[];
  v_late_locks text[];
  v_late_ids bigint[];
begin
  with gone as (
    delete from queue.lock_member m where m.ctid = any (queue._members(p_ids))
    returning m.lock, m.id, m.is_mutex, m.has_turn),
  -- offset 0 and the conditions inside: the next of a lock is looked for once, from the one that had the turn
  turned as materialized (
    select g.lock, g.id, x.is_mixed
    from gone g
    cross join lateral (
      select g.is_mutex or (select m.id from queue.lock_member m where m.lock = g.lock and m.is_mutex limit 1) is not null as is_mixed offset 0) x
    where p_had_turn or g.has_turn or x.is_mixed),
  next as materialized (
    select t.lock, n.id, n.is_passed, n.is_late, t.is_mixed, case when l.id < n.id or n.id is null then l.id end as late_id
    from turned t
    left join lateral (
      select m.id from queue.lock_member m
      where not t.is_mixed and m.lock = t.lock and m.is_late and m.id <> t.id and (select f.id from queue.finished f where f.id = m.id) is null
      order by m.id limit 1) l on true
    left join lateral (
      select m.id, m.is_passed, m.is_late from queue.lock_member m
      where not t.is_mixed and m.lock = t.lock and m.id > t.id and (select f.id from queue.finished f where f.id = m.id) is null
      order by m.id limit 1) n on true)
  select array_agg(n.id) filter (where n.is_passed and n.late_id is null),
    array_agg(n.id) filter (where (n.is_late or not n.is_passed) and n.late_id is null),
    array_agg(n.lock) filter (where n.is_mixed), array_agg(n.lock) filter (where n.late_id is not null), array_agg(n.late_id) filter (where n.late_id is not null)
  into v_pass, v_wait, v_mixed, v_late_locks, v_late_ids
  from next n;
  if v_late_ids is not null then
    v_wait := v_wait || v_late_ids;
    v_pass := v_pass || array(
      select u.id from unnest(v_late_locks, v_late_ids) u (lock, id)
      cross join lateral (select m.is_passed from queue.lock_member m where m.lock = u.lock and m.id = u.id offset 0) m where m.is_passed);
  end if;
  if v_wait is not null then
    perform queue._keep_turns(v_wait);
  end if;
  if v_mixed is not null then
    v_pass := v_pass || queue._next_mixed(array(select distinct u.lock from unnest(v_mixed) u (lock)));
  end if;
  return v_pass;
end $$;

-- Gives the turn in mixed locks where nobody has it to the first member, if that one is ordered. Returns
-- those that can go on at once.
create or replace function queue._next_mixed(p_locks text[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_pass bigint[];
begin
  with next as materialized (
    select f.ctid, f.id, f.is_passed
    from unnest(p_locks) u (lock)
    cross join lateral (select m.ctid, m.id, m.is_mutex, m.is_passed from queue.lock_member m where m.lock = u.lock order by m.id limit 1) f
    where not f.is_mutex
      and (select m.lock from queue.lock_member m where m.lock = u.lock and m.has_turn limit 1) is null),
  turned as (
    update queue.lock_member m set has_turn = true, is_late = false where m.ctid = any (array(select n.ctid from next n)))
  select array_agg(n.id order by n.id) filter (where n.is_passed) into v_pass from next n;
  return v_pass;
end $$;

-- The ordered job that had the turn when its lock became mixed may be ready, running or waiting for another
-- slot without having asked for the semaphore. Before a mutex job goes there, that one has to ask, or is counted.
-- asked: those that were taken out for that; keys: semaphores in which that left room. late: those mutex jobs that have to
-- come back in a moment, because another transaction holds its row.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._await_turns(p_ids bigint[], p_flags smallint[], out asked bigint[], out keys text[], out late bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_turn record;
  v_job record;
begin
  for v_turn in
    select k.key, m.id, array_agg(k.id) as mutex_ids
    from queue._keys_of(p_ids, p_flags) k
    cross join lateral (select m.id from queue.lock_member m where m.lock = substr(k.key, 2) and m.has_turn offset 0) m
    where p_flags[k.n] & 3 = 2 and left(k.key, 1) = 'm'
      and ((select v.flags & 2 from queue.live v where v.id = m.id) = 0 or (select w.flags & 2 from queue.waiting w where w.id = m.id) = 0)
    group by k.key, m.id
  loop
    delete from queue.waiting w where w.id = v_turn.id returning w.key, w.lane into v_job;
    if found then
      perform queue._unwait(v_job.key, v_job.lane);
      asked := asked || v_turn.id;
      continue;
    end if;
    select v.claim, v.lane, v.flags into v_job from queue.live v where v.id = v_turn.id for update skip locked;
    if not found then
      if exists (select from queue.live v where v.id = v_turn.id) then
        late := late || v_turn.mutex_ids;
      end if;
    elsif v_job.claim is not null then
      perform queue._set_slots(array[v_turn.key], array[1], array[v_turn.id]);
      perform queue._add_slots(array[v_turn.key], null, array[1], null, null, null);
      update queue.live v set flags = v.flags | 2 where v.id = v_turn.id;
    else
      delete from queue.live v where v.id = v_turn.id;
      if v_job.flags & 4 <> 0 then
        keys := keys || queue._unready(array[v_turn.id], array[v_job.lane], array[v_job.flags]);
      end if;
      asked := asked || v_turn.id;
    end if;
  end loop;
  insert into queue.waiting (id, reason, at, key)
  select k.id, 'slot', clock_timestamp() + interval '20 ms', k.key
  from queue._keys_of(p_ids, p_flags) k where k.id = any (late) and left(k.key, 1) = 'm';
end $$;

-- A retry changes a job's lock (empty: to none): it gives its turn away and joins the other lock, in the
-- mode that it was deferred with, and goes through the gates again.
-- Locks: the caller holds ADM; the job runs nowhere, and no other transaction knows its row of queue.live yet.
create or replace function queue._change_lock(p_id bigint, p_lock text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_keys text[];
  v_passed bigint[];
  v_joined record;
begin
  if p_lock = (select coalesce(s.lock, j.lock, '') from queue.job j join queue.job_state s on s.id = j.id where j.id = p_id) then
    return;
  end if;
  v_keys := (select t.keys from queue._take_out(p_id) t);
  v_passed := queue._leave_locks(array[p_id], false);  -- has_turn says whether it has it
  update queue.job_state s
  set lock = p_lock, extra_flags = s.extra_flags
    | case when p_lock = '' or j.flags & 3 <> 0 then 0 when j.options ->> 'lock_mode' = 'mutex' then 2 else 1 end
  from queue.job j where s.id = p_id and j.id = p_id;
  v_joined := queue._join_locks(array[p_id]);
  perform queue._advance(
    p_arrived => p_id || v_joined.displaced, p_turned => v_passed || v_joined.passed, p_keys => v_keys || v_joined.keys);
end $$;

-- What of check() concerns locks.
create or replace function queue._check_locks()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select 'member of a lock though finished'::text, m.id, m.lock
    from queue.lock_member m join queue.finished f on f.id = m.id
    where not exists (select from queue.handover h where h.job_id = m.id);
  return query
    select 'a lock that runs two jobs'::text, min(v.id), coalesce(s.lock, j.lock)
    from queue.live v join queue.job j on j.id = v.id left join queue.job_state s on s.id = v.id
    where v.claim is not null and coalesce(s.lock, j.lock) <> '' group by coalesce(s.lock, j.lock) having count(*) > 1;
  -- the turn of a mixed lock may be nobody's while its first member is a mutex job
  return query
    select case when x.turns > 1 then 'a lock with more than one job at its turn' else 'a free lock with a job that waits for its turn' end,
      x.first_id, x.lock
    from (
      select m.lock, min(m.id) as first_id, count(*) filter (where not m.is_mutex) as ordered, bool_or(m.is_mutex) as is_mixed,
        (array_agg(m.is_mutex order by m.id))[1] as mutex_is_first,
        count(*) filter (where not m.is_mutex and (m.has_turn or v.id is not null or w.reason = 'slot')) as turns,
        count(h.job_id) as unsettled
      from queue.lock_member m
      left join queue.live v on v.id = m.id
      left join queue.waiting w on w.id = m.id
      left join (select distinct h.job_id from queue.handover h where h.kind in ('ended', 'again')) h on h.job_id = m.id
      group by m.lock) x
    where x.turns > 1 or x.turns = 0 and x.ordered > 0 and not x.mutex_is_first and x.unsettled = 0;
end $$;

-- sql/33_semaphores.sql
-- Semaphores. A slot is a live claim: `used` counts the claims that run under a key, and is written under
-- ADM only, in the transaction that makes or settles the claim. Limited lanes are claimed under ADM only,
-- so that the limit is a hard one.
--
-- So that a job which nobody will start holds no slot, slots are given at the claim, not before. So that
-- fetch does not look at jobs that can't start, at most as many jobs of a key and lane are in queue.live,
-- unclaimed, as the key has free slots (`ready`); the others wait in queue.waiting. A ready job that is
-- met while its key is full goes back there. A job with several keys waits for the first that is shut, and
-- holds none meanwhile. Rows are replaced by newer ones and read newest first.

-- The keys of jobs by their flags: 'm' || lock and 'k' || concurrency key. n: the job's place in p_ids.
create or replace function queue._keys_of(p_ids bigint[], p_flags smallint[])
returns table (n integer, id bigint, key text, slots integer, discards boolean)
language plpgsql stable parallel safe security invoker rows 50 as $$
#variable_conflict use_column
begin
  return query
    select u.n::integer, u.id, k.key, k.slots, j.discards
    from unnest(p_ids, p_flags) with ordinality u (id, flags, n)
    cross join lateral (
      select j.keys, j.limits, coalesce(s.lock, j.lock) as lock,
        u.flags & 4 <> 0 and j.options ->> 'on_limit' = 'discard' and coalesce(s.claims, 0) = 0
          and coalesce(s.extra_flags, 0) & 32 = 0 as discards
      from queue.job j left join queue.job_state s on s.id = j.id where j.id = u.id offset 0) j
    cross join lateral (
      select 'm' || j.lock, 1 where u.flags & 2 <> 0 and j.lock <> ''
      union all
      select 'k' || k.key, k.slots from unnest(j.keys, j.limits) k (key, slots) where u.flags & 4 <> 0) k (key, slots)
    where u.flags & 6 <> 0;
end $$;

-- Sends jobs that have passed every other gate to queue.live, or to wait for a slot. p_is_refill: they were taken
-- from the waiting, whom they need not queue up behind. grown: keys whose limit has grown; discarded: jobs in no gate
-- that would have to wait, and are to be discarded instead (on_limit).
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._enter_slots(p_ids bigint[], p_is_refill boolean, out discarded bigint[], out grown text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
  v_turns record;
  v_taken record;
begin
  v := queue._places(p_ids);
  if v.all_flags & 6 = 0 then
    perform queue._to_live(v.ids, v.lanes, v.deadlines, v.flags, v.attempts, v.is_low);
    return;
  elsif v.all_flags & 2 <> 0 and exists (select from unnest(v.flags) f where f & 3 = 2) then
    v_turns := queue._await_turns(v.ids, v.flags);
    if v_turns.asked is not null then
      select s.grown into v_taken
      from queue._places(v_turns.asked) a
      cross join lateral queue._take_slots(a.ids, a.lanes, a.deadlines, a.flags, a.attempts, true) s;
      grown := v_turns.keys || v_taken.grown;
    end if;
    if v_turns.late is not null then
      v := queue._places(array(select u.id from unnest(v.ids) u (id) where u.id <> all (v_turns.late)));
      if v.ids is null then
        return;
      end if;
    end if;
  end if;
  v_taken := queue._take_slots(v.ids, v.lanes, v.deadlines, v.flags, v.attempts, p_is_refill);
  discarded := v_taken.discarded;
  grown := grown || v_taken.grown;
end $$;

-- As _enter_slots, of jobs whose places are known (_places).
create or replace function queue._take_slots(
  p_ids bigint[], p_lanes integer[], p_deadlines timestamptz[], p_flags smallint[], p_attempts smallint[], p_is_refill boolean,
  out discarded bigint[], out grown text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  k record;                                   -- ns, pairs: which job has which (key, lane); keys, lanes: those
  p record;                                   -- what each (key, lane) has
  v_row integer := 1;
  v_first integer;
  v_pair integer;
  v_shut integer;
  v_ready integer[];                          -- what is added to it
  v_waiting integer[];
  v_lows bigint[];
  v_pass integer[] := '{}'::integer[];
  v_wait integer[] := '{}'::integer[];
  v_wait_keys text[] := '{}'::text[];
  v_wait_several boolean[] := '{}'::boolean[];
begin
  select array_agg(x.n order by x.n) as ns, array_agg(x.pair order by x.n) as pairs,
    array_agg(x.key) as set_keys, array_agg(x.slots) as set_slots, array_agg(x.id) as set_ids,
    array_agg(x.key order by x.pair) filter (where x.is_first) as keys,
    array_agg(x.lane order by x.pair) filter (where x.is_first) as lanes,
    array_agg(x.id) filter (where x.discards and not p_is_refill and queue._is_settled(x.id)) as discards
  into k
  from (
    select x.n, x.id, x.key, x.slots, x.discards, x.lane, dense_rank() over (order by x.key, x.lane)::integer as pair,
      row_number() over (partition by x.key, x.lane) = 1 as is_first
    from (select x.n, x.id, x.key, x.slots, x.discards, p_lanes[x.n] as lane from queue._keys_of(p_ids, p_flags) x) x) x;
  grown := queue._set_slots(k.set_keys, k.set_slots, k.set_ids);
  select array_agg(s.slots - s.used order by u.n) as free, array_agg(coalesce(s.ready[s.at], 0) order by u.n) as ready,
    array_agg(coalesce(s.waiting[s.at], 0) order by u.n) as waiting
  into p
  from unnest(k.keys, k.lanes) with ordinality u (key, lane, n)
  cross join lateral (
    select s.slots, s.used, s.ready, s.waiting, array_position(s.lanes, u.lane) as at
    from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) s;
  v_ready := array_fill(0, array[cardinality(k.keys)]);
  v_waiting := v_ready;
  v_lows := array_fill(null::bigint, array[cardinality(k.keys)]);
  for n in 1 .. cardinality(p_ids) loop
    v_first := v_row;
    v_shut := null;
    while k.ns[v_row] = n loop
      v_pair := k.pairs[v_row];
      if v_shut is null and (p.ready[v_pair] + v_ready[v_pair] >= p.free[v_pair]
                             or p.waiting[v_pair] + v_waiting[v_pair] > 0 and not p_is_refill) then
        v_shut := v_pair;
      end if;
      v_row := v_row + 1;
    end loop;
    if v_shut is null then
      v_pass := v_pass || n;
      for i in v_first .. v_row - 1 loop
        v_pair := k.pairs[i];
        v_ready[v_pair] := v_ready[v_pair] + 1;
      end loop;
    elsif p_ids[n] = any (k.discards) then
      discarded := discarded || p_ids[n];
    else
      v_waiting[v_shut] := v_waiting[v_shut] + 1;
      v_lows[v_shut] := least(v_lows[v_shut], p_ids[n]);
      v_wait := v_wait || n;
      v_wait_keys := v_wait_keys || k.keys[v_shut];
      v_wait_several := v_wait_several || (v_row - v_first > 1);
    end if;
  end loop;
  perform queue._to_live(array_agg(p_ids[n]), array_agg(p_lanes[n]), array_agg(p_deadlines[n]), array_agg(p_flags[n]), array_agg(p_attempts[n]))
  from unnest(v_pass) n having count(*) > 0;
  if v_wait <> '{}' then
    insert into queue.waiting (id, reason, key, lane, deadline, flags, attempt, has_several)
    select p_ids[u.n], 'slot', u.key, p_lanes[u.n], p_deadlines[u.n], p_flags[u.n], p_attempts[u.n], u.several
    from unnest(v_wait, v_wait_keys, v_wait_several) u (n, key, several);
    perform queue._keep_turns(array_agg(p_ids[n])) from unnest(v_wait) n where p_flags[n] & 1 <> 0 having count(*) > 0;
  end if;
  perform queue._add_slots(k.keys, k.lanes, null, v_ready, v_waiting, v_lows);
  if discarded is not null then
    perform queue._keep_turns(discarded);
  end if;
end $$;

-- Makes semaphores that are missing and sets limits: of jobs with one key the newest decides. Returns the
-- keys whose limit has grown and that jobs may wait for.
-- Locks: the caller holds ADM.
create or replace function queue._set_slots(p_keys text[], p_slots integer[], p_ids bigint[])
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_grown text[];
begin
  with asked as materialized (
    select distinct on (u.key) u.key, u.slots, u.id from unnest(p_keys, p_slots, p_ids) u (key, slots, id) order by u.key, u.id desc),
  old as materialized (
    select a.key, a.slots, a.id, o.tid, o.slots as old_slots, o.used, o.lanes, o.ready, o.waiting, o.lows
    from asked a
    left join lateral (
      select s.ctid as tid, s.slots, s.limit_id, s.used, s.lanes, s.ready, s.waiting, s.lows
      from queue.semaphore s where s.key = a.key order by s.tick desc limit 1) o on true
    where o.slots is null or o.slots <> a.slots and o.limit_id <= a.id),
  gone as (
    delete from queue.semaphore s where s.ctid = any (array(select o.tid from old o))),
  made as (
    insert into queue.semaphore (key, tick, slots, limit_id, used, lanes, ready, waiting, lows)
    select o.key, nextval('queue.tick_seq'), o.slots, o.id, coalesce(o.used, 0), coalesce(o.lanes, '{}'), coalesce(o.ready, '{}'),
      coalesce(o.waiting, '{}'), coalesce(o.lows, '{}')
    from old o)
  select array_agg(o.key) into v_grown from old o where o.slots > o.old_slots and o.lanes <> '{}';
  return v_grown;
end $$;

-- Adds to the counts of keys: slots in use, and per lane ready and waiting jobs. Keys and lanes may repeat;
-- an array that is NULL adds nothing. p_lows: below it nothing waits in that lane, in which the waiting
-- have become fewer; else the least id that has begun to wait.
-- Locks: the caller holds ADM.
create or replace function queue._add_slots(
  p_keys text[], p_lanes integer[], p_used integer[], p_ready integer[], p_waiting integer[], p_lows bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  with added as (
    select u.key, coalesce(sum(u.used), 0)::integer as used, array_agg(u.lane) as lanes, array_agg(u.ready) as ready,
      array_agg(u.waiting) as waiting, array_agg(u.low) as lows
    from unnest(p_keys, p_lanes, p_used, p_ready, p_waiting, p_lows) u (key, lane, used, ready, waiting, low)
    group by u.key
    having count(*) filter (where u.used <> 0 or u.ready <> 0 or u.waiting <> 0) > 0),
  old as materialized (
    select a.key, a.used, a.lanes, a.ready, a.waiting, a.lows, o.tid, o.slots, o.limit_id, o.used as old_used,
      o.lanes as old_lanes, o.ready as old_ready, o.waiting as old_waiting, o.lows as old_lows
    from added a
    left join lateral (
      select s.ctid as tid, s.slots, s.limit_id, s.used, s.lanes, s.ready, s.waiting, s.lows
      from queue.semaphore s where s.key = a.key order by s.tick desc limit 1) o on true),
  gone as (
    delete from queue.semaphore s where s.ctid = any (array(select o.tid from old o)))
  insert into queue.semaphore (key, tick, slots, limit_id, used, lanes, ready, waiting, lows)
  select o.key, nextval('queue.tick_seq'), coalesce(o.slots, 0), coalesce(o.limit_id, 0), coalesce(o.old_used, 0) + o.used,
    coalesce(l.lanes, '{}'), coalesce(l.ready, '{}'), coalesce(l.waiting, '{}'), coalesce(l.lows, '{}')
  from old o
  cross join lateral (
    select array_agg(x.lane) as lanes, array_agg(x.ready) as ready, array_agg(x.waiting) as waiting, array_agg(x.low) as lows
    from (
      select x.lane, sum(x.ready)::integer as ready, sum(x.waiting)::integer as waiting,
        case when sum(x.waiting) < sum(x.old_waiting) then max(x.low) else min(x.low) end as low
      from (
        select u.lane, u.ready, u.waiting, u.waiting as old_waiting, case when u.waiting > 0 then u.low end as low
        from unnest(o.old_lanes, o.old_ready, o.old_waiting, o.old_lows) u (lane, ready, waiting, low)
        union all
        select u.lane, coalesce(u.ready, 0), coalesce(u.waiting, 0), 0, u.low
        from unnest(o.lanes, o.ready, o.waiting, o.lows) u (lane, ready, waiting, low) where u.lane is not null) x
      group by x.lane) x
    where x.ready <> 0 or x.waiting <> 0) l;
end $$;

-- Claims have ended: gives their slots back and returns the keys, for _advance.
-- p_flags as in queue.live: 16384 counts in its queue's max_running.
-- Locks: the caller holds ADM.
create or replace function queue._release_slots(p_ids bigint[], p_flags smallint[])
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_keys text[];
begin
  v_keys := array(select k.key from queue._keys_of(p_ids, p_flags) k);
  if (select bit_or(f) from unnest(p_flags) f) & 16384 <> 0 then
    v_keys := v_keys || array(
      select 'q' || j.queue
      from unnest(p_ids, p_flags) u (id, flags)
      cross join lateral (select coalesce(s.queue, j.queue) as queue from queue.job j left join queue.job_state s on s.id = j.id
                          where j.id = u.id offset 0) j
      where u.flags & 16384 <> 0);
  end if;
  perform queue._add_slots(v_keys, null, array_fill(-1, array[cardinality(v_keys)]), null, null, null);
  return v_keys;
end $$;

-- Lets waiting jobs of keys with free slots in, first by id in each lane. Those with several keys may have
-- to wait for another one, so that it looks at more, up to some hundreds; the next admission goes on. Returns keys whose
-- limit has grown by that.
-- Locks: the caller holds ADM.
create or replace function queue._refill(p_keys text[])
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
  v_extra integer := 0;
  v_grown text[];
begin
  loop
    with room as materialized (
      select s.key, l.lane, l.low, greatest(least(s.slots - s.used - l.ready, l.waiting), v_extra) as room
      from (select distinct u.key from unnest(p_keys) u (key)) u
      cross join lateral (
        select s.key, s.slots, s.used, s.lanes, s.ready, s.waiting, s.lows
        from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) s
      cross join lateral unnest(s.lanes, s.ready, s.waiting, s.lows) l (lane, ready, waiting, low)
      where l.waiting > 0 and s.slots - s.used > l.ready),
    let as (
      delete from queue.waiting w
      where w.ctid = any (array(
        select w.ctid from room r
        cross join lateral (
          select w.ctid from queue.waiting w
          where w.reason = 'slot' and w.key = r.key and w.lane = r.lane and w.id >= r.low order by w.id limit r.room) w))
      returning w.id, w.key, w.lane, w.deadline, w.flags, w.attempt, w.has_several)
    select array_agg(l.key) as keys, array_agg(l.lane) as lanes, array_agg(l.id) as ids, array_agg(l.id + 1) as lows,
      array_agg(coalesce(n.deadline, l.deadline)) as deadlines, array_agg(n.flags) as flags, array_agg(l.attempt) as attempts,
      bool_or(l.has_several) as has_several
    into v
    from let l
    cross join lateral (
      -- what may have changed since
      select (select s.deadline from queue.job_state s where s.id = l.id) as deadline,
        (l.flags | case when exists (select from queue.job_state s where s.id = l.id) then 2048 else 0 end
          | case when (select d.job_id from queue.need d where d.need_id = l.id limit 1) is not null then 4096 else 0 end)::smallint as flags) n;
    exit when v.keys is null;
    if v_extra > 0 or v.has_several then
      perform queue._add_slots(v.keys, v.lanes, null, null, array_fill(-1, array[cardinality(v.ids)]), v.lows);
      v_grown := v_grown || (select e.grown from queue._enter_slots(v.ids, true) e);
      v_extra := greatest(2 * v_extra, 10);
      if v_extra > 300 then
        insert into queue.handover (job_id, kind, flags, payload) select v.ids[1], 'refill', 0, to_jsonb(p_keys);
        exit;
      end if;
    else
      perform queue._add_slots(v.keys, v.lanes, null, array_fill(1, array[cardinality(v.ids)]), array_fill(-1, array[cardinality(v.ids)]), v.lows);
      perform queue._to_live(v.ids, v.lanes, v.deadlines, v.flags, v.attempts);
      exit;
    end if;
  end loop;
  return v_grown;
end $$;

-- Jobs have left queue.live unclaimed: their keys have fewer ready ones. Returns the keys, for _advance.
-- Locks: the caller holds ADM.
create or replace function queue._unready(p_ids bigint[], p_lanes integer[], p_flags smallint[])
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
begin
  select array_agg(k.key) as keys, array_agg(p_lanes[k.n]) as lanes, array_agg(-1) as ready into v
  from queue._keys_of(p_ids, p_flags) k;
  perform queue._add_slots(v.keys, v.lanes, null, v.ready, null, null);
  return v.keys;
end $$;

-- Notes of jobs that are taken from their slots, and that would have been discarded there (on_limit), that they
-- were not: they come back to them, but are not admitted again.
create or replace function queue._never_discard(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  insert into queue.job_state as s (id, extra_flags)
  select j.id, 32 from queue.job j where j.id = any (p_ids) and j.options ->> 'on_limit' = 'discard'
  on conflict on constraint job_state_pkey do update set extra_flags = s.extra_flags | 32;
end $$;

-- A job has left queue.waiting, where it waited for a slot.
-- Locks: the caller holds ADM.
create or replace function queue._unwait(p_key text, p_lane integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_lane is not null then
    perform queue._add_slots(array[p_key], array[p_lane], null, null, array[-1], null);
  end if;
end $$;

-- Claims up to p_n jobs of lanes, in the order of p_lanes, where limits are asked: semaphores, a queue's
-- max_running and rate, expires_at, and queueing locks that a defer is replacing. Lanes of one queue and
-- priority are read as one. Only jobs of p_tasks, and with a deadline before p_before, if given.
-- Locks: the caller holds ADM; rows of queue.live and queue.queueing_lock by skip locked.
create or replace function queue._claim_limited(
  p_worker bigint, p_lanes integer[], p_n integer, p_tasks text[] default null, p_before timestamptz default null)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_start timestamptz := clock_timestamp();
  v_won bigint[] := '{}'::bigint[];
  v_left bigint[] := '{}'::bigint[];
  v_full text[] := '{}'::text[];
  v_take integer := p_n;
  v_ids bigint[];
  v record;
begin
  loop
    v_ids := array(
      select c.id
      from (
        select min(u.n) as rank, array_agg(l.lane) as lanes, array_agg(l.low_deadline) as deadlines, array_agg(l.low_id) as ids
        from unnest(p_lanes) with ordinality u (lane, n)
        cross join lateral (
          select l.lane, l.queue, l.priority, l.kind, l.low_deadline, l.low_id from queue.lane l where l.lane = u.lane offset 0) l
        where l.queue <> all (v_full) and (l.kind = 0 or not queue._is_queue_full(l.queue))
        group by l.queue, l.priority order by 1 limit 100) g
      cross join lateral (
        select v.id
        from unnest(g.lanes, g.deadlines, g.ids) l (lane, deadline, id)
        cross join lateral (
          select v.id, v.deadline from queue.live v
          where v.lane = l.lane and (v.deadline, v.id) >= (l.deadline, l.id) and v.claim is null
            and v.id <> all (v_left) and (p_before is null or v.deadline < p_before)
            and (p_tasks is null or exists (select from queue.job j where j.id = v.id and j.task = any (p_tasks)))
          order by v.deadline, v.id limit v_take) v
        order by v.deadline, v.id limit v_take) c
      -- where those of the first lanes can't start, however many they are, the next round looks at the others' first, too
      limit case when v_left = '{}' then v_take end);
    exit when v_ids = '{}';
    select c.won, c.rest, c.full_queues into v from queue._claim_ids(p_worker, v_ids, p_n - cardinality(v_won)) c;
    v_won := v_won || v.won;
    v_left := v_left || v.rest;
    v_full := v_full || v.full_queues;
    exit when cardinality(v_won) >= p_n or clock_timestamp() > v_start + interval '100 ms';
    if v.rest <> '{}' then
      perform queue._pass_by(v_left);
    end if;
    v_take := greatest(p_n - cardinality(v_won), least(2 * v_take::bigint, 1000));
  end loop;
  return v_won;
end $$;

-- Claims up to p_n jobs of lanes that are of p_tasks, have a deadline before p_before, and are among p_only, as
-- far as given.
-- Among those that wait for a slot it looks where slots are free, which others of their lane are ready for,
-- but nobody may want: at the first 200 of each key and lane.
-- Locks: as _claim_limited.
create or replace function queue._claim_chosen(
  p_worker bigint, p_lanes integer[], p_n integer, p_tasks text[], p_before timestamptz, p_only bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_won bigint[] := '{}'::bigint[];
  v_ids bigint[];
begin
  if p_only is null then
    v_won := queue._claim_limited(p_worker, p_lanes, p_n, p_tasks, p_before);
    if cardinality(v_won) >= p_n then
      return v_won;
    end if;
    v_ids := array(
      select w.id
      from (
        select s.key, l.lane, l.low, s.slots - s.used as free
        from (select distinct on (s.key) s.key, s.slots, s.used, s.lanes, s.waiting, s.lows from queue.semaphore s
              where s.lanes <> '{}' order by s.key, s.tick desc) s
        cross join lateral unnest(s.lanes, s.waiting, s.lows) l (lane, waiting, low)
        where s.used < s.slots and l.waiting > 0 and l.lane = any (p_lanes) offset 0) s
      cross join lateral (
        select w.id
        from (select w.id, w.deadline from queue.waiting w
              where w.reason = 'slot' and w.key = s.key and w.lane = s.lane and w.id >= s.low order by w.id limit 200) w
        where (p_before is null or w.deadline < p_before)
          and (p_tasks is null or exists (select from queue.job j where j.id = w.id and j.task = any (p_tasks)))
        limit s.free) w);
  else
    v_ids := array(
      select w.id from unnest(p_only) u (id)
      cross join lateral (
        select w.id, w.key from queue.waiting w where w.id = u.id and w.reason || '' = 'slot' and w.lane = any (p_lanes) offset 0) w
      cross join lateral (select s.slots, s.used from queue.semaphore s where s.key = w.key order by s.tick desc limit 1) s
      where s.used < s.slots);
  end if;
  perform queue._bring_forward(v_ids);
  if p_only is not null then
    v_ids := array(select distinct u.id from unnest(p_only) u (id));
  end if;
  v_ids := array(
    select v.id
    from unnest(v_ids) u (id)
    cross join lateral (
      select v.id, v.lane, v.deadline from queue.live v
      where v.id = u.id and v.claim is null and v.lane = any (p_lanes) and (p_before is null or v.deadline < p_before) offset 0) v
    where p_tasks is null or exists (select from queue.job j where j.id = v.id and j.task = any (p_tasks))
    order by array_position(p_lanes, v.lane), v.deadline, v.id);
  if v_ids = '{}' then
    return v_won;
  end if;
  return v_won || (select c.won from queue._claim_ids(p_worker, v_ids, p_n - cardinality(v_won)) c);
end $$;

-- Moves jobs that wait for slots to queue.live, though others are ready before them: the caller claims them.
-- Locks: the caller holds ADM.
create or replace function queue._bring_forward(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
begin
  with gone as (
    delete from queue.waiting w where w.id = any (p_ids) returning w.id, w.key, w.lane)
  select array_agg(g.id) as ids, array_agg(g.key) as keys, array_agg(g.lane) as lanes into v from gone g;
  if v.ids is null then
    return;
  end if;
  perform queue._add_slots(v.keys, v.lanes, null, null, array_fill(-1, array[cardinality(v.ids)]), null);
  select x.* into v from queue._places(v.ids) x;
  perform queue._add_slots(array_agg(k.key), array_agg(v.lanes[k.n]), null, array_agg(1), null, null) from queue._keys_of(v.ids, v.flags) k;
  perform queue._to_live(v.ids, v.lanes, v.deadlines, v.flags, v.attempts);
end $$;

-- Where a defer is replacing ready jobs of p_ids, which may take long: lets as many others of their keys and lanes in
-- as there are free slots that no other ready job is there for.
-- Locks: the caller holds ADM; rows of queue.queueing_lock by skip locked. Why no wake-up is lost: who is let in is ready for
-- this loop's next turn, and one that is replaced stays ready; limits are looked at again as each is claimed.
-- Two sessions: replace_fetch.spec.
create or replace function queue._pass_by(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
  v record;
begin
  v_ids := array(
    select v.id from queue.live v where v.id = any (p_ids) and v.claim is null and v.flags & 6 <> 0 and v.flags & (256 | 8192) <> 0);
  if v_ids <> '{}' then
    v_ids := queue._lock_queueing_locks(v_ids);
  end if;
  if v_ids = '{}' then
    return;
  end if;
  select array_agg(v.id) as ids, array_agg(v.flags) as flags, array_agg(v.lane) as lanes into v from queue.live v where v.id = any (v_ids);
  perform queue._bring_forward(array(
    select w.id
    from (select k.key, v.lanes[k.n] as lane, count(*) as n from queue._keys_of(v.ids, v.flags) k group by 1, 2) k
    cross join lateral (
      select s.slots, s.used, s.lanes, s.ready, s.lows from queue.semaphore s where s.key = k.key order by s.tick desc limit 1) s
    cross join lateral unnest(s.lanes, s.ready, s.lows) l (lane, ready, low)
    cross join lateral (
      select w.id from queue.waiting w
      where w.reason = 'slot' and w.key = k.key and w.lane = k.lane and w.id >= l.low
      order by w.id limit greatest(s.slots - s.used - (l.ready - k.n), 0)) w
    where l.lane = k.lane));
end $$;

-- Claims those of p_ids, at most p_n, that limits let start. Ready jobs that meet a full key go to wait;
-- rest: those that stay where they are; full_queues: queues whose own limits let no more start.
-- Locks: as _claim_limited.
create or replace function queue._claim_ids(
  p_worker bigint, p_ids bigint[], p_n integer, out won bigint[], out rest bigint[], out full_queues text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_claim bigint := nextval('queue.claim_seq');  -- under ADM, so that the claims before have lesser ones
  v record;                                   -- the jobs whose rows could be locked
  k record;                                   -- ns, nos: which job has which key; keys, free: those
  v_due bigint[] := '{}'::bigint[];           -- have expired
  v_fixed bigint[] := '{}'::bigint[];         -- their queueing lock is being replaced
  v_queues text[] := '{}'::text[];            -- with limits, and how many jobs they let start
  v_room integer[] := '{}'::integer[];
  v_queue integer;
  v_row integer := 1;
  v_first integer;
  v_shut integer;
  v_taken integer[];
  v_counted bigint[] := '{}'::bigint[];       -- count in max_running
  v_add_keys text[] := '{}'::text[];          -- what is added to semaphores
  v_add_lanes integer[] := '{}'::integer[];
  v_add_used integer[] := '{}'::integer[];
  v_add_ready integer[] := '{}'::integer[];
  v_add_waiting integer[] := '{}'::integer[];
  v_add_lows bigint[] := '{}'::bigint[];
  v_wait integer[] := '{}'::integer[];
  v_wait_keys text[] := '{}'::text[];
  v_wait_several boolean[] := '{}'::boolean[];
begin
  won := '{}'::bigint[];
  rest := '{}'::bigint[];
  full_queues := '{}'::text[];
  select array_agg(v.id order by u.n) as ids, array_agg(v.flags order by u.n) as flags, array_agg(v.lane order by u.n) as lanes,
    array_agg(l.queue order by u.n) as queues, array_agg(l.kind > 0 and l.is_limited order by u.n) as are_limited, bit_or(v.flags) as all_flags
  into v
  from unnest(p_ids) with ordinality u (id, n)
  cross join lateral (
    select v.id, v.flags, v.lane from queue.live v where v.id = u.id and v.claim is null for update of v skip locked) v
  cross join lateral (
    select l.queue, l.kind,
      exists (select from queue.queue_config c where c.queue = l.queue and (c.max_running is not null or c.rate_limit is not null)) as is_limited
    from queue.lane l where l.lane = v.lane offset 0) l;
  if v.ids is null then
    rest := p_ids;
    return;
  elsif cardinality(v.ids) < cardinality(p_ids) then
    rest := array(select u.id from unnest(p_ids) u (id) where u.id <> all (v.ids));
  end if;
  if v.all_flags & 64 <> 0 then
    v_due := array(select e.id from queue.expiry e where e.id = any (v.ids) and e.at <= v_now);
  end if;
  if v.all_flags & (256 | 8192) <> 0 then
    v_fixed := queue._lock_queueing_locks(v.ids);
  end if;
  if v.all_flags & 6 <> 0 then
    select array_agg(x.n order by x.n) as ns, array_agg(x.no order by x.n) as nos,
      array_agg(x.key order by x.no) filter (where x.is_first) as keys,
      array_agg(x.free order by x.no) filter (where x.is_first) as free
    into k
    from (
      select x.n, x.key, x.no, x.is_first, s.slots - s.used as free
      from (
        select x.n, x.key, dense_rank() over (order by x.key)::integer as no, row_number() over (partition by x.key) = 1 as is_first
        from queue._keys_of(v.ids, v.flags) x) x
      left join lateral (
        select s.slots, s.used from queue.semaphore s where s.key = x.key order by s.tick desc limit 1) s on x.is_first) x;
    v_taken := array_fill(0, array[cardinality(k.keys)]);
  end if;
  for n in 1 .. cardinality(v.ids) loop
    exit when cardinality(won) >= p_n;
    v_first := v_row;
    v_shut := null;
    v_queue := null;
    if v.flags[n] & 6 <> 0 then
      while k.ns[v_row] = n loop
        if v_taken[k.nos[v_row]] >= k.free[k.nos[v_row]] then
          v_shut := coalesce(v_shut, k.nos[v_row]);
        end if;
        v_row := v_row + 1;
      end loop;
    end if;
    if v.ids[n] = any (v_due) then
      rest := rest || v.ids[n];
      continue;
    elsif v.ids[n] = any (v_fixed) then
      rest := rest || v.ids[n];
      continue;
    elsif v_shut is not null then
      v_wait := v_wait || n;
      v_wait_keys := v_wait_keys || k.keys[v_shut];
      v_wait_several := v_wait_several || (v_row - v_first > 1);
      for i in v_first .. v_row - 1 loop
        v_add_keys := v_add_keys || k.keys[k.nos[i]];
        v_add_lanes := v_add_lanes || v.lanes[n];
        v_add_used := v_add_used || 0;
        v_add_ready := v_add_ready || -1;
        v_add_waiting := v_add_waiting || (k.nos[i] = v_shut)::integer;
        v_add_lows := v_add_lows || case when k.nos[i] = v_shut then v.ids[n] end;
      end loop;
      continue;
    end if;
    if v.are_limited[n] then
      v_queue := array_position(v_queues, v.queues[n]);
      if v_queue is null then
        v_queues := v_queues || v.queues[n];
        v_room := v_room || queue._queue_room(v.queues[n], p_n, v_now);
        v_queue := cardinality(v_queues);
      end if;
      if v_room[v_queue] <= 0 then
        rest := rest || v.ids[n];
        continue;
      end if;
      v_room[v_queue] := v_room[v_queue] - 1;
    end if;
    for i in v_first .. v_row - 1 loop
      v_taken[k.nos[i]] := v_taken[k.nos[i]] + 1;
      v_add_keys := v_add_keys || k.keys[k.nos[i]];
      v_add_lanes := v_add_lanes || v.lanes[n];
      v_add_used := v_add_used || 1;
      v_add_ready := v_add_ready || -1;
      v_add_waiting := v_add_waiting || 0;
      v_add_lows := v_add_lows || null::bigint;
    end loop;
    won := won || v.ids[n];
  end loop;
  if won <> '{}' then
    for i in 1 .. cardinality(v_queues) loop
      v_counted := v_counted || queue._count_starts(
        v_queues[i], array(select v.ids[n] from generate_series(1, cardinality(v.ids)) n
                           where v.are_limited[n] and v.queues[n] = v_queues[i] and v.ids[n] = any (won)), v_now);
      if v_room[i] <= 0 then
        full_queues := full_queues || v_queues[i];
      end if;
    end loop;
    update queue.live v
    set claim = v_claim, worker_id = p_worker, claimed_at = v_now, attempt = v.attempt + 1,
      flags = v.flags | case when v.id = any (v_counted) then 16384 else 0 end
    where v.id = any (won);
    if v.all_flags & 256 <> 0 then
      perform queue._drop_queueing_locks(won, 256);
    end if;
    if v.all_flags & 8 <> 0 then
      perform queue._begin_any(array_agg(v.ids[n])) from generate_series(1, cardinality(v.ids)) n
      where v.flags[n] & 8 <> 0 and v.ids[n] = any (won) having count(*) > 0;
    end if;
    if v.all_flags & 128 <> 0 then
      perform queue._lease_timeouts(won, v_claim, v_now);
    end if;
  else
    full_queues := v_queues;
  end if;
  if v_wait <> '{}' then
    with gone as (
      delete from queue.live v where v.id = any (array(select v.ids[n] from unnest(v_wait) n)) returning v.id, v.lane, v.deadline, v.flags, v.attempt)
    insert into queue.waiting (id, reason, key, lane, deadline, flags, attempt, has_several)
    select g.id, 'slot', v_wait_keys[u.i], g.lane, g.deadline, g.flags, g.attempt, v_wait_several[u.i]
    from gone g cross join lateral (select array_position(v_wait, array_position(v.ids, g.id)) as i) u;
    perform queue._keep_turns(array_agg(v.ids[n])) from unnest(v_wait) n where v.flags[n] & 1 <> 0 having count(*) > 0;
  end if;
  if v_add_keys <> '{}' then
    perform queue._add_slots(v_add_keys, v_add_lanes, v_add_used, v_add_ready, v_add_waiting, v_add_lows);
  end if;
  if true = any (v_wait_several) then
    perform queue._advance(p_keys => v_add_keys);
  end if;
  if v_due <> '{}' then
    perform queue._expire(v_due);
  end if;
end $$;

-- Whether a queue's max_running or rate lets no job start now.
create or replace function queue._is_queue_full(p_queue text)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (select from queue.queue_config c where c.queue = p_queue and (c.max_running is not null or c.rate_limit is not null))
    and queue._queue_room(p_queue, 1, clock_timestamp()) = 0;
end $$;

-- How many jobs, at most p_n, a queue's max_running and rate let start at p_now.
create or replace function queue._queue_room(p_queue text, p_n integer, p_now timestamptz)
returns integer language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_config record;
  v_last record;
  v_room integer := p_n;
  v_low integer := 0;
  v_middle integer;
begin
  select c.max_running, c.rate_limit, c.rate_per into v_config from queue.queue_config c where c.queue = p_queue;
  if v_config.max_running is not null then
    v_room := least(v_room, v_config.max_running
      - coalesce((select s.used from queue.semaphore s where s.key = 'q' || p_queue order by s.tick desc limit 1), 0));
  end if;
  if v_config.rate_limit is not null then
    select r.no, greatest(r.at, p_now) - v_config.rate_per as horizon into v_last
    from queue.rate_start r where r.queue = p_queue order by r.no desc limit 1;
    -- k more may start when the one that comes limit starts before the k-th of them lies outside the window
    v_room := least(v_room, v_config.rate_limit);
    while v_low < v_room loop
      v_middle := (v_low + v_room + 1) / 2;
      if exists (select from queue.rate_start r
                 where r.queue = p_queue and r.no = v_last.no + v_middle - v_config.rate_limit and r.at >= v_last.horizon) then
        v_room := v_middle - 1;
      else
        v_low := v_middle;
      end if;
    end loop;
  end if;
  return greatest(v_room, 0);
end $$;

-- When a queue's rate lets the next job start; NULL for at once.
create or replace function queue._next_start(p_queue text)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_at timestamptz;
begin
  select r.at + c.rate_per into v_at
  from queue.queue_config c
  cross join lateral (select r.no from queue.rate_start r where r.queue = c.queue order by r.no desc limit 1) l
  cross join lateral (select r.at from queue.rate_start r where r.queue = c.queue and r.no = l.no + 1 - c.rate_limit) r
  where c.queue = p_queue and c.rate_limit is not null and r.at + c.rate_per >= clock_timestamp();
  return v_at;
end $$;

-- Notes starts of a queue's jobs: in its rate, at p_now, and in its max_running. Returns the jobs that count
-- in the latter.
-- Locks: the caller holds ADM.
create or replace function queue._count_starts(p_queue text, p_ids bigint[], p_now timestamptz)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_config record;
  v_no bigint;
  v_at timestamptz;
begin
  select c.max_running, c.rate_limit into v_config from queue.queue_config c where c.queue = p_queue;
  if v_config.rate_limit is not null then
    select r.no, r.at into v_no, v_at from queue.rate_start r where r.queue = p_queue order by r.no desc limit 1;
    v_no := coalesce(v_no, 0);
    insert into queue.rate_start (queue, no, at)
    select p_queue, v_no + n, greatest(v_at, p_now) from generate_series(1, cardinality(p_ids)) n;
    delete from queue.rate_start r
    where r.queue = p_queue and r.no > v_no - v_config.rate_limit and r.no <= v_no + cardinality(p_ids) - v_config.rate_limit;
  end if;
  if v_config.max_running is null then
    return '{}'::bigint[];
  end if;
  perform queue._add_slots(array['q' || p_queue], null, array[cardinality(p_ids)], null, null, null);
  return p_ids;
end $$;

-- Removes semaphores that nobody has used since a million others were written. At most 1,000.
-- Locks: the caller holds ADM.
create or replace function queue._forget_semaphores()
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  delete from queue.semaphore s
  where s.ctid = any (array(
    select s.ctid from queue.semaphore s
    where s.used = 0 and s.lanes = '{}' and s.tick < (select q.last_value - 1000000 from queue.tick_seq q)
    order by s.tick limit 1000));
end $$;

-- What of check() concerns semaphores.
create or replace function queue._check_semaphores()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select 'slots in use that no claim has'::text, null::bigint, format('%s: used %s, claims %s', coalesce(s.key, c.key), s.used, c.n)
    from (select distinct on (s.key) s.key, s.used from queue.semaphore s order by s.key, s.tick desc) s
    full join (
      select k.key, count(*) as n
      from (
        select k.key
        from (select array_agg(v.id) as ids, array_agg(v.flags) as flags
              from (select v.id, v.flags from queue.live v where v.claim is not null and v.flags & 6 <> 0
                    union all
                    select h.job_id, h.flags from queue.handover h where h.kind in ('ended', 'again') and h.flags & 6 <> 0) v) a
        cross join lateral queue._keys_of(a.ids, a.flags) k
        union all
        select 'q' || l.queue from queue.live v join queue.lane l on l.lane = v.lane where v.claim is not null and v.flags & 16384 <> 0
        union all
        select 'q' || coalesce(t.queue, j.queue) from queue.handover h join queue.job j on j.id = h.job_id
        left join queue.job_state t on t.id = j.id where h.kind in ('ended', 'again') and h.flags & 16384 <> 0) k
      group by k.key) c on c.key = s.key
    where coalesce(s.used, 0) <> coalesce(c.n, 0) or left(s.key, 1) = 'm' and s.used > 1;
  return query
    select x.problem, null::bigint, format('%s, lane %s: slots %s, used %s, ready %s (%s), waiting %s (%s), low %s (%s)', x.key, x.lane, x.slots, x.used,
                                           x.ready, x.is_ready, x.waiting, x.is_waiting, x.low, x.least_id)
    from (
      select case when s.ready is distinct from coalesce(v.n, 0) or s.waiting is distinct from coalesce(w.n, 0) then 'counts of a key are wrong'
                  when w.n > 0 and s.low > w.id then 'waits for a slot below the low mark'
                  when s.waiting > 0 and s.ready < s.slots - s.used and not exists (select from queue.handover h where h.kind = 'refill' and h.payload ? s.key)
                    then 'a free slot and a job that waits for it' end as problem,
        coalesce(s.key, w.key, v.key) as key, coalesce(s.lane, w.lane, v.lane) as lane, s.slots, s.used, s.ready, v.n as is_ready,
        s.waiting, w.n as is_waiting, s.low, w.id as least_id
      from (
        select s.key, s.slots, s.used, l.lane, l.ready, l.waiting, l.low
        from (select distinct on (s.key) s.* from queue.semaphore s order by s.key, s.tick desc) s
        cross join lateral unnest(s.lanes, s.ready, s.waiting, s.lows) l (lane, ready, waiting, low)) s
      full join (
        select w.key, w.lane, count(*) as n, min(w.id) as id from queue.waiting w
        where w.reason = 'slot' and w.lane is not null group by w.key, w.lane) w on w.key = s.key and w.lane = s.lane
      full join (
        select k.key, a.lanes[k.n] as lane, count(*) as n
        from (select array_agg(v.id) as ids, array_agg(v.flags) as flags, array_agg(v.lane) as lanes
              from queue.live v where v.claim is null and v.flags & 6 <> 0) a
        cross join lateral queue._keys_of(a.ids, a.flags) k
        group by 1, 2) v on v.key = coalesce(s.key, w.key) and v.lane = coalesce(s.lane, w.lane)) x
    where x.problem is not null;
end $$;

-- sql/34_needs.sql
-- Needs: what counts is the state of the needed jobs now, never a counter.
--
-- A need is succeeded, failed (failed, cancelled, held, upstream_failed), or pending. Whenever that changes,
-- _needs_changed looks at the jobs that need it. Everything here but _check_needs and _check_yield runs
-- under ADM, and whoever ends a claim can't hold ADM: why no end is missed stands at _mark_needed.
--
-- So that a job with many needs is not counted through each time one of them ends, queue.waiting names one
-- that holds it (need_id): a pending one, or under upstream_failed a failed one. While that one stands as it
-- does, the ends of others change nothing, but for those that decide by themselves: a failed need under
-- all and block, a satisfied one under any. When it changes, the next below it is looked for (all), so that
-- a job's needs are read through about twice, whatever the order in which they end. That is a hint where to
-- look, and no more: a job passes only after a look at all its needs.

-- Needs as a sorted set. An xid is taken first, so that _safe_at waits for this transaction.
-- Settings: a plan that was made while the log was empty would read all of it; one that knows how many needs there are is
-- never given up for the generic one, so that each call would plan, which takes three times as long as all the rest.
-- Raises: 22023, QJ001 when one can't be seen, or is kept no longer.
create or replace function queue._check_needs(p_needs bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off as $$
#variable_conflict use_column
declare
  v_now timestamptz;
  v_missing bigint;
begin
  if array_ndims(p_needs) > 1 or array_position(p_needs, null) is not null then
    perform queue._check_list('needs', p_needs::text[]);
  end if;
  perform pg_current_xact_id();
  v_now := clock_timestamp();
  select u.n into v_missing
  from unnest(p_needs) u (n)
  left join lateral (select j.id from queue.job j where j.id = u.n offset 0) j on true
  left join lateral (select f.state, f.finished_at, f.purge_at from queue.finished f where f.id = u.n offset 0) f on true
  where j.id is null or f.purge_at <= v_now
    or f.purge_at is null and f.state = 'succeeded' and f.finished_at < v_now - interval '7 days'
  limit 1;
  if found then
    perform queue._job_not_found(v_missing);
  end if;
  if cardinality(p_needs) = 1 then
    return p_needs;
  end if;
  return array(select distinct n from unnest(p_needs) n order by n);
end $$;

-- The deadline that a child takes from its parent. Settings: as _check_needs.
-- Raises: QJ001.
create or replace function queue._parent_deadline(p_parent bigint)
returns timestamptz language plpgsql stable parallel safe security invoker set enable_seqscan = off as $$
#variable_conflict use_column
declare
  v_deadline timestamptz;
begin
  select coalesce(s.deadline, j.deadline) into v_deadline
  from queue.job j left join queue.job_state s on s.id = j.id where j.id = p_parent;
  if not found then
    perform queue._job_not_found(p_parent);
  end if;
  return v_deadline;
end $$;

-- Writes the needs of new jobs. One may have been deleted before its dependent's transaction committed.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._join_needs(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_needs bigint[];
  v_jobs bigint[];
begin
  with added as (
    insert into queue.need (job_id, need_id, mode, deleted_state)
    select j.id, n.id, j.mode, case when o.id is null then queue._deleted_state(n.id) end
    from unnest(p_ids) u (id)
    cross join lateral (
      select j.id, j.needs, queue._needs_mode(j.options) as mode from queue.job j where j.id = u.id and j.flags & 8 <> 0 offset 0) j
    cross join lateral unnest(j.needs) n (id)
    left join lateral (select o.id from queue.job o where o.id = n.id offset 0) o on true
    on conflict on constraint need_pkey do nothing
    returning job_id, need_id)
  select array_agg(distinct a.need_id), array_agg(distinct a.job_id) into v_needs, v_jobs from added a;
  if v_needs is not null then
    perform queue._note_needed(v_needs[cardinality(v_needs)]);
    perform queue._mark_needed(v_needs);
    perform queue._spread_deadline(v_jobs);
  end if;
end $$;

-- How a job's needs are combined: 1 any, 2 proceed.
create or replace function queue._needs_mode(p_options jsonb)
returns smallint language plpgsql immutable parallel safe security invoker as $$
begin
  return coalesce((p_options ->> 'needs_mode' = 'any')::integer, 0) | coalesce((p_options ->> 'on_need_failure' = 'proceed')::integer, 0) * 2;
end $$;

-- Notes the largest id that was ever needed: admission need not ask whether a newer job is.
-- Locks: the caller holds ADM. Not undone by a rollback, which does no harm.
create or replace function queue._note_needed(p_id bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_id > (select s.last_value from queue.needed_seq s) then
    perform setval('queue.needed_seq', p_id);
  end if;
end $$;

-- Marks jobs so that whoever ends their claim hands them over to their dependents.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
-- Why no end is missed: a row that is locked here carries the mark before its finisher, who waits for the
-- lock, deletes it. A row that its finisher (or a claimer) has locked can't be waited for under ADM: then a
-- recheck is appended for the next admission, until the row is free or gone. A job in a gate gets the mark
-- when it enters queue.live (_places), and so does one that is not admitted yet, as it goes through the gates
-- (_admit_range); one that is finished already was seen by whoever asks next.
create or replace function queue._mark_needed(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_locked bigint[];
begin
  v_locked := array(select v.id from queue.live v where v.id = any (p_ids) and v.flags & 4096 = 0 order by v.id for update skip locked);
  update queue.live v set flags = v.flags | 4096 where v.id = any (v_locked);
  insert into queue.handover (xid, job_id, kind, flags)
  select queue._until(v.xmax), v.id, 'recheck', 4096 from queue.live v where v.id = any (p_ids) and v.flags & 4096 = 0;
end $$;

-- Rechecks: marks again, asks the dependents of those that have ended, and passes deadlines on.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._recheck_needs(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  perform queue._mark_needed(p_ids);
  perform queue._advance(p_changed => p_ids);
  perform queue._spread_deadline(array(
    select distinct d.job_id from unnest(p_ids) u (id)
    cross join lateral (select d.job_id from queue.need d where d.need_id = u.id offset 0) d));
end $$;

-- How the needs of jobs stand, counted through: satisfied, waiting or failed. holder: the one that holds the
-- job, NULL when every change matters.
create or replace function queue._needs_states(p_ids bigint[])
returns table (id bigint, standing text, holder bigint) language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select u.id, x.standing,
      case when x.standing = 'waiting' then n.last_pending when x.standing = 'failed' and n.mode & 1 = 0 then n.last_failed end
    from unnest(p_ids) u (id)
    left join lateral (select s.ignores_needs, s.is_yielded from queue.job_state s where s.id = u.id offset 0) s on true
    cross join lateral (
      select count(*) as total, coalesce(max(d.mode), 0) as mode,
        count(*) filter (where d.is_open) as open, count(*) filter (where d.class = 'f') as failed,
        count(*) filter (where d.is_satisfied) as satisfied, count(*) filter (where d.is_satisfied and d.is_open) as satisfied_open,
        max(d.need_id) filter (where d.class = 'p') as last_pending, max(d.need_id) filter (where d.class = 'f') as last_failed
      from (
        select d.need_id, d.mode, d.is_open, c.class, c.class = 's' or c.class = 'f' and d.mode & 2 <> 0 as is_satisfied
        from queue.need d
        left join lateral (select f.state from queue.finished f where f.id = d.need_id offset 0) f on true
        left join lateral (select w.reason from queue.waiting w where w.id = d.need_id and f.state is null offset 0) w on true
        cross join lateral (select case
          when coalesce(f.state, d.deleted_state) = 'succeeded' then 's'
          when coalesce(f.state, d.deleted_state) is not null or w.reason in ('held', 'upstream_failed') then 'f'
          else 'p' end as class) c
        where d.job_id = u.id offset 0) d) n
    cross join lateral (select case
      when n.total = 0 or s.ignores_needs then 'satisfied'
      when n.mode & 1 <> 0 then
        case
          when s.is_yielded and n.open = 0 then 'satisfied'
          when case when s.is_yielded then n.satisfied_open else n.satisfied end > 0 then 'satisfied'
          when n.failed = n.total then 'failed'
          else 'waiting'
        end
      when n.satisfied = n.total then 'satisfied'
      when n.failed > 0 and n.mode & 2 = 0 then 'failed'
      else 'waiting'
    end as standing) x;
end $$;

-- passed: of jobs those whose needs let them go; the others wait. failed: those of them that wait as a need has failed.
-- Locks: the caller holds ADM.
create or replace function queue._wait_for_needs(p_ids bigint[], out passed bigint[], out failed bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  with stand as materialized (select s.id, s.standing, s.holder from queue._needs_states(p_ids) s),
  wait as (
    insert into queue.waiting (id, reason, need_id)
    select s.id, case s.standing when 'failed' then 'upstream_failed' else 'needs' end, s.holder from stand s where s.standing <> 'satisfied')
  select array_agg(s.id order by s.id) filter (where s.standing = 'satisfied'), array_agg(s.id) filter (where s.standing = 'failed')
  into passed, failed from stand s;
end $$;

-- The state of jobs has changed: looks at those that need them. met: those that wait no longer, and are in no gate now;
-- changed: those that thereby fail or can be hoped for again, whose dependents have to look in turn. One that has passed and
-- has not started goes back to wait when a need that let it go is pending again, or has failed: one that succeeded may be
-- retried while what it needs has failed. keys: semaphores in which that left room.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
-- Invariant: state decides, so that looking once too often does no harm.
create or replace function queue._needs_changed(p_ids bigint[], out met bigint[], out changed bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
  v_taken record;
  v_back bigint[];
  v_next bigint[];
  v_next_at bigint[];
  v_ask bigint[];
  v_left bigint[];
  v_standings text[];
  v_holders bigint[];
begin
  -- v_ask: to be counted through; v_next: held by a need that is now satisfied
  with edge as materialized (
    select d.job_id, d.need_id, d.mode, w.reason, w.need_id as holder, c.class, c.class = 's' or c.class = 'f' and d.mode & 2 <> 0 as is_satisfied
    from unnest(p_ids) u (id)
    left join lateral (select f.state from queue.finished f where f.id = u.id offset 0) f on true
    left join lateral (select w.reason from queue.waiting w where w.id = u.id and f.state is null offset 0) n on true
    cross join lateral (select d.job_id, d.need_id, d.mode, d.deleted_state from queue.need d where d.need_id = u.id offset 0) d
    left join lateral (select w.reason, w.need_id from queue.waiting w where w.id = d.job_id offset 0) w on true
    cross join lateral (select case
      when coalesce(f.state, d.deleted_state) = 'succeeded' then 's'
      when coalesce(f.state, d.deleted_state) is not null or n.reason in ('held', 'upstream_failed') then 'f'
      else 'p' end as class) c
    where w.reason in ('needs', 'upstream_failed') or c.class = 'p' or c.class = 'f' and d.mode & 2 = 0),
  found as materialized (
    select e.job_id, max(e.need_id) filter (where x.is_next) as at, bool_or(x.is_asked) as is_asked, bool_or(x.is_back) as is_back
    from edge e
    cross join lateral (select
      case
        when e.reason is null or e.reason not in ('needs', 'upstream_failed') then false
        when e.holder is null then true
        when e.mode & 1 <> 0 then e.is_satisfied or e.reason = 'upstream_failed' or e.holder = e.need_id and e.class = 'f'
        when e.reason = 'needs' then e.class = 'f' and not e.is_satisfied
        else e.holder = e.need_id and e.class <> 'f'
      end as is_asked,
      e.mode & 1 = 0 and e.reason = 'needs' and e.holder = e.need_id and e.is_satisfied as is_next,
      not e.is_satisfied and e.reason is distinct from 'needs' and e.reason is distinct from 'upstream_failed' as is_back) x
    group by e.job_id)
  select array_agg(f.job_id) filter (where f.is_asked), array_agg(f.job_id) filter (where f.at is not null and not f.is_asked),
    array_agg(f.at) filter (where f.at is not null and not f.is_asked), array_agg(f.job_id) filter (where f.is_back)
  into v_ask, v_next, v_next_at, v_back
  from found f;
  if v_next is not null then
    select array_agg(b.id order by b.id) filter (where b.need_id is not null and not b.is_failed),
      array_agg(b.need_id order by b.id) filter (where b.need_id is not null and not b.is_failed),
      array_agg(b.id) filter (where b.need_id is null or b.is_failed)
    into v_ids, v_holders, v_left
    from (
      select u.id, b.need_id, b.is_failed
      from unnest(v_next, v_next_at) u (id, at)
      left join lateral (
        select d.need_id, c.is_failed
        from queue.need d
        left join lateral (select f.state from queue.finished f where f.id = d.need_id offset 0) f on true
        left join lateral (select w.reason from queue.waiting w where w.id = d.need_id and f.state is null offset 0) w on true
        cross join lateral (
          select coalesce(f.state, d.deleted_state) is not null or coalesce(w.reason in ('held', 'upstream_failed'), false) as is_failed) c
        where (d.job_id, d.need_id) < (u.id, u.at) and d.job_id >= u.id
          and coalesce(f.state, d.deleted_state) is distinct from 'succeeded' and not (c.is_failed and d.mode & 2 <> 0)
        order by d.job_id desc, d.need_id desc limit 1) b on true) b;
    update queue.waiting w set need_id = v_holders[width_bucket(w.id, v_ids)] where w.id = any (v_ids);
    v_ask := v_ask || v_left;
  end if;
  if v_ask is not null then
    select array_agg(s.id order by s.id) filter (where s.standing = 'satisfied'),
      array_agg(s.id order by s.id) filter (where x.is_turned and s.standing <> 'satisfied' or x.is_held_by_another),
      array_agg(s.standing order by s.id) filter (where x.is_turned and s.standing <> 'satisfied' or x.is_held_by_another),
      array_agg(s.holder order by s.id) filter (where x.is_turned and s.standing <> 'satisfied' or x.is_held_by_another),
      array_agg(s.id) filter (where x.is_turned)
    into met, v_ids, v_standings, v_holders, changed
    from queue._needs_states(v_ask) s
    cross join lateral (select w.reason, w.need_id from queue.waiting w where w.id = s.id offset 0) w
    cross join lateral (
      select (w.reason = 'needs') = (s.standing = 'failed') as is_turned, s.standing <> 'satisfied' and w.need_id is distinct from s.holder as is_held_by_another) x;
    update queue.waiting w
    set reason = case v_standings[width_bucket(w.id, v_ids)] when 'failed' then 'upstream_failed' else 'needs' end,
      need_id = v_holders[width_bucket(w.id, v_ids)]
    where w.id = any (v_ids);
    delete from queue.waiting w where w.id = any (met);
  end if;
  if v_back is not null then
    v_taken := queue._take_back(v_back);
    changed := changed || v_taken.failed;
    keys := v_taken.keys;
  end if;
end $$;

-- Jobs that have passed the gate of needs and would not pass it now go back to wait, unless they run.
-- failed: those that have failed by it; keys: semaphores in which that left room.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._take_back(p_ids bigint[], out failed bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_job record;
  v_taken record;
begin
  for v_job in
    select s.id, s.standing, s.holder from queue._needs_states(p_ids) s where s.standing <> 'satisfied' order by s.id
  loop
    v_taken := queue._take_out_dependent(v_job.id);
    if v_taken.is_out then
      keys := keys || v_taken.keys;
      insert into queue.waiting (id, reason, need_id)
      values (v_job.id, case v_job.standing when 'failed' then 'upstream_failed' else 'needs' end, v_job.holder);
      failed := failed || array(select v_job.id where v_job.standing = 'failed');
    elsif exists (select from queue.live v where v.id = v_job.id and v.claim is null) then
      -- its row is locked by a claim, which may be rolled back
      insert into queue.handover (xid, job_id, kind, flags)
      select queue._until(v.xmax), coalesce(v_job.holder, (select d.need_id from queue.need d where d.job_id = v_job.id limit 1)), 'recheck', 4096
      from queue.live v where v.id = v_job.id;
    end if;
  end loop;
end $$;

-- Takes a job that has passed the gate of needs out of wherever it waits (_take_out). Not is_out: it runs, is finished, is
-- held, or waits for its needs.
-- Locks: the caller holds ADM; the row of queue.live by skip locked.
create or replace function queue._take_out_dependent(p_id bigint, out is_out boolean, out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  is_out := false;
  if not exists (select from queue.waiting w where w.id = p_id and w.reason in ('held', 'needs', 'upstream_failed', 'parked')) then
    select coalesce(t.place <> 'log', false), t.keys into is_out, keys from queue._take_out(p_id) t;
  end if;
end $$;

-- Passes deadlines on to what the jobs need and is not finished, recursively, only ever earlier. Stops at
-- jobs whose deadline is earlier: theirs was passed on when they got it.
-- Locks: the caller holds ADM; rows of queue.live by skip locked. Whose row another has locked may be
-- written by him in a transaction that takes long (queue.job_state): these come back as a recheck.
create or replace function queue._spread_deadline(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
  v_deadlines timestamptz[];
  v_locked bigint[];
  v_shut bigint[];
  v_lanes integer[];
  v_low_deadlines timestamptz[];
  v_low_ids bigint[];
begin
  with recursive spread (id, deadline) as (
    select u.id, j.deadline
    from unnest(p_ids) u (id)
    cross join lateral (
      select coalesce(s.deadline, j.deadline) as deadline from queue.job j left join queue.job_state s on s.id = j.id where j.id = u.id offset 0) j
    where j.deadline < 'infinity'
    union
    select d.need_id, x.deadline
    from spread x
    cross join lateral (select d.need_id from queue.need d where d.job_id = x.id offset 0) d
    cross join lateral (
      select coalesce(s.deadline, j.deadline, 'infinity') as deadline
      from queue.job j left join queue.job_state s on s.id = j.id where j.id = d.need_id offset 0) n
    left join lateral (select f.id from queue.finished f where f.id = d.need_id offset 0) f on true
    where n.deadline > x.deadline and f.id is null)
  select array_agg(x.id order by x.id), array_agg(x.deadline order by x.id) into v_ids, v_deadlines
  from (
    select x.id, min(x.deadline) as deadline from spread x
    group by x.id) x
  cross join lateral (
    select coalesce(s.deadline, j.deadline, 'infinity') as deadline
    from queue.job j left join queue.job_state s on s.id = j.id where j.id = x.id offset 0) j
  where x.deadline < j.deadline;
  if v_ids is null then
    return;
  end if;
  v_locked := array(select v.id from queue.live v where v.id = any (v_ids) order by v.id for update skip locked);
  v_shut := array(select v.id from queue.live v where v.id = any (v_ids) except select u.id from unnest(v_locked) u (id));
  insert into queue.handover (xid, job_id, kind, flags)
  select queue._until(v.xmax), u.id, 'recheck', 4096 from unnest(v_shut) u (id) left join queue.live v on v.id = u.id;
  insert into queue.job_state as s (id, deadline)
  select u.id, u.deadline
  from unnest(v_ids, v_deadlines) u (id, deadline)
  left join lateral (select f.id from queue.finished f where f.id = u.id offset 0) f on true
  where f.id is null and u.id <> all (v_shut)
  on conflict on constraint job_state_pkey do update set deadline = excluded.deadline;
  with moved as (
    update queue.live v set deadline = v_deadlines[width_bucket(v.id, v_ids)], flags = v.flags | 2048
    where v.id = any (v_locked) and v.claim is null
    returning v.lane, v.deadline, v.id)
  select array_agg(m.lane), array_agg(m.deadline), array_agg(m.id) into v_lanes, v_low_deadlines, v_low_ids from moved m;
  if v_lanes is not null then
    perform queue._lower(v_lanes, v_low_deadlines, v_low_ids);
  end if;
  -- or the planner may read all that wait for slots
  update queue.waiting w set deadline = v_deadlines[array_position(v_ids, w.id)], flags = w.flags | 2048
  where w.id = any (v_ids) and w.reason || '' = 'slot';
end $$;

-- Jobs are claimed: under any, which of their needs are satisfied now.
-- Locks: the caller holds ADM and the rows of queue.live. Why exact: whoever ends a claim and whose
-- transaction has committed is visible here, and the handler does not start before this one commits.
create or replace function queue._begin_any(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_any bigint[];
begin
  v_any := array(
    select u.id from unnest(p_ids) u (id)
    cross join lateral (select j.options from queue.job j where j.id = u.id offset 0) j
    where queue._needs_mode(j.options) & 1 <> 0);
  if v_any = '{}' then
    return;
  end if;
  update queue.need d set is_open = not d.is_open
  where d.ctid = any (array(
    select d.ctid
    from unnest(v_any) u (id)
    cross join lateral (select d.ctid, d.need_id, d.is_open, d.mode, d.deleted_state from queue.need d where d.job_id = u.id offset 0) d
    left join lateral (select f.state from queue.finished f where f.id = d.need_id offset 0) f on true
    left join lateral (select w.reason from queue.waiting w where w.id = d.need_id and f.state is null offset 0) w on true
    where d.is_open = coalesce(
      coalesce(f.state, d.deleted_state) = 'succeeded'
      or d.mode & 2 <> 0 and (coalesce(f.state, d.deleted_state) is not null or w.reason in ('held', 'upstream_failed')), false)));
  insert into queue.job_state as s (id, began_xid)
  select u.id, pg_snapshot_xmin(pg_current_snapshot()) from unnest(v_any) u (id)
  on conflict on constraint job_state_pkey do update set began_xid = excluded.began_xid, is_yielded = false;
end $$;

-- What retry_later hands over: the needs to add. JSON null: run again whatever the needs are.
-- Raises: 22023, QJ001, QJ005.
create or replace function queue._check_yield(p_id bigint, p_needs jsonb)
returns jsonb language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_needs bigint[];
  v_pending record;
begin
  if p_needs is null then
    p_needs := '[]'::jsonb;
  elsif jsonb_typeof(p_needs) = 'null' then
    return '{"ignore": true}'::jsonb;
  end if;
  begin
    v_needs := array(select n::bigint from jsonb_array_elements_text(p_needs) n);
  exception when data_exception then
    perform queue._invalid('needs must be a list of ids', 'Pass ids of jobs, or null.');
  end;
  v_needs := queue._check_needs(v_needs);
  if v_needs <> '{}' then
    select y.jobs, y.needs into v_pending from queue._pending_yields() y;
    if queue._closes_circle(p_id, v_needs, v_pending.jobs, v_pending.needs) then
      raise exception using errcode = 'QJ005', message = 'the new need would close a circle',
        detail = 'path: ' || array_to_string(queue._circle(p_id, v_needs, v_pending.jobs, v_pending.needs), ' -> '),
        hint = 'A job can''t need one that, at last, needs it.';
    end if;
  end if;
  return jsonb_build_object('needs', to_jsonb(v_needs));
end $$;

-- Yields that are committed and not settled yet: jobs[i] is to need needs[i].
create or replace function queue._pending_yields(out jobs bigint[], out needs bigint[])
language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
begin
  select array_agg(h.job_id), array_agg(n.id::bigint) into jobs, needs
  from queue.handover h cross join lateral jsonb_array_elements_text(h.payload -> 'needs') n (id)
  where h.kind = 'again'
    and h.xid >= (select least(k.next_xid, k.in_flight[1]) from queue.cursor k order by k.tick desc limit 1);
end $$;

-- Whether one of p_needs at last needs p_id. Needs that have succeeded count: they may be retried.
-- p_jobs, p_more: needs beside those that are written.
create or replace function queue._closes_circle(p_id bigint, p_needs bigint[], p_jobs bigint[], p_more bigint[])
returns boolean language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
begin
  if p_needs = '{}' then
    return false;
  end if;
  return exists (
    with recursive walk (id) as (
      select n from unnest(p_needs) n
      union
      select d.id
      from walk w
      cross join lateral (
        (select d.need_id as id from queue.need d where d.job_id = w.id offset 0)
        union all
        (select y.need_id from unnest(p_jobs, p_more) y (job_id, need_id) where y.job_id = w.id)
        union all
        (select n from (select j.needs from queue.job j where j.id = w.id offset 0) j cross join lateral unnest(j.needs) n)) d
      where w.id <> p_id)
    select from walk w where w.id = p_id);
end $$;

-- What a job needs, admitted or not.
create or replace function queue._direct_needs(p_id bigint)
returns table (id bigint) language plpgsql stable parallel safe security invoker rows 5 as $$
#variable_conflict use_column
begin
  return query
    select d.need_id from queue.need d where d.job_id = p_id
    union
    select n from queue.job j cross join lateral unnest(j.needs) n where j.id = p_id;
end $$;

-- The shortest circle that p_needs would close: p_id, what it would need, and so on to p_id.
create or replace function queue._circle(p_id bigint, p_needs bigint[], p_jobs bigint[], p_more bigint[])
returns bigint[] language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
  v_depths integer[];
  v_path bigint[] := array[p_id];
  v_depth integer;
begin
  with recursive walk (id, depth) as (
    select n, 1 from unnest(p_needs) n
    union
    select d.id, w.depth + 1
    from walk w
    cross join lateral (
      select d.id from queue._direct_needs(w.id) d
      union
      select y.need_id from unnest(p_jobs, p_more) y (job_id, need_id) where y.job_id = w.id) d
    where w.id <> p_id and w.depth < 100000)
  select array_agg(w.id), array_agg(w.depth), min(w.depth) filter (where w.id = p_id) into v_ids, v_depths, v_depth from walk w;
  while v_depth > 1 loop
    v_depth := v_depth - 1;
    select w.id || v_path into v_path from unnest(v_ids, v_depths) w (id, depth)
    where w.depth = v_depth
      and (exists (select from queue._direct_needs(w.id) d where d.id = v_path[1])
           or exists (select from unnest(p_jobs, p_more) y (job_id, need_id) where y.job_id = w.id and y.need_id = v_path[1]))
    limit 1;
  end loop;
  return p_id || v_path;
end $$;

-- How the needs of a job that yields hold it, as far as its transaction can see: waiting or upstream_failed, NULL if they don't.
-- As _needs_states, which knows the yield only once it has settled (_add_yield_needs).
create or replace function queue._yield_state(p_id bigint, p_payload jsonb)
returns text language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_mode smallint := (select queue._needs_mode(j.options) from queue.job j where j.id = p_id);
  v_now bigint := pg_current_xact_id()::text::bigint;
  v_began bigint := (select s.began_xid::text::bigint from queue.job_state s where s.id = p_id);
  v record;
begin
  if p_payload ? 'ignore' then
    return null;
  end if;
  select count(*) as total, count(*) filter (where c.class = 'f') as failed, count(*) filter (where x.is_satisfied) as satisfied,
    count(*) filter (where o.is_open) as open, count(*) filter (where x.is_satisfied and o.is_open) as satisfied_open
  into v
  from (
    select d.need_id as id, d.is_open, d.deleted_state from queue.need d where d.job_id = p_id
    union all
    select n::bigint, null, null from jsonb_array_elements_text(p_payload -> 'needs') n
    where not exists (select from queue.need d where d.job_id = p_id and d.need_id = n::bigint)) d
  left join lateral (select f.state, age(f.xmin) as age from queue.finished f where f.id = d.id offset 0) f on true
  left join lateral (select w.reason, age(w.xmin) as age from queue.waiting w where w.id = d.id and f.state is null offset 0) w on true
  cross join lateral (select case
    when coalesce(f.state, d.deleted_state) = 'succeeded' then 's'
    when coalesce(f.state, d.deleted_state) is not null or w.reason in ('held', 'upstream_failed') then 'f'
    else 'p' end as class) c
  cross join lateral (select c.class = 's' or c.class = 'f' and v_mode & 2 <> 0 as is_satisfied) x
  cross join lateral (
    select coalesce(d.is_open, not coalesce(x.is_satisfied and v_now - coalesce(f.age, w.age) < v_began, false)) as is_open) o;
  return case
    when v.satisfied = v.total or v_mode & 1 <> 0 and (v.open = 0 or v.satisfied_open > 0) then null
    when v_mode & 2 = 0 and case when v_mode & 1 <> 0 then v.failed = v.total else v.failed > 0 end then 'upstream_failed'
    else 'waiting' end;
end $$;

-- Adds the needs of a yield. False, with nothing done: two yields at once closed a circle.
-- Under any, one that it did not have before counts as satisfied when the run began if its end had settled
-- then for certain (began_xid).
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._add_yield_needs(p_id bigint, p_payload jsonb)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_needs bigint[];
  v_now bigint := pg_current_xact_id()::text::bigint;
begin
  update queue.job_state s
  set ignores_needs = p_payload ? 'ignore', is_yielded = not p_payload ? 'ignore',
    extra_flags = s.extra_flags | case when p_payload -> 'needs' <> '[]' then 8 else 0 end
  where s.id = p_id;
  if coalesce(p_payload -> 'needs', '[]') = '[]' then
    return true;
  end if;
  v_needs := array(select n::bigint from jsonb_array_elements_text(p_payload -> 'needs') n order by 1);
  if queue._closes_circle(p_id, v_needs, null, null) then
    return false;
  end if;
  insert into queue.need (job_id, need_id, mode, is_open, deleted_state)
  select p_id, u.id, j.mode, not coalesce(
      (f.state = 'succeeded' or j.mode & 2 <> 0 and (f.state is not null or w.reason in ('held', 'upstream_failed')))
      and v_now - coalesce(f.age, w.age) < j.began, false),
    case when o.id is null then queue._deleted_state(u.id) end
  from unnest(v_needs) u (id)
  cross join lateral (
    select queue._needs_mode(j.options) as mode, s.began_xid::text::bigint as began
    from queue.job j join queue.job_state s on s.id = j.id where j.id = p_id offset 0) j
  left join lateral (select o.id from queue.job o where o.id = u.id offset 0) o on true
  left join lateral (select f.state, age(f.xmin) as age from queue.finished f where f.id = u.id offset 0) f on true
  left join lateral (select w.reason, age(w.xmin) as age from queue.waiting w where w.id = u.id and f.state is null offset 0) w on true
  on conflict on constraint need_pkey do nothing;
  perform queue._note_needed(v_needs[cardinality(v_needs)]);
  perform queue._mark_needed(v_needs);
  perform queue._spread_deadline(array[p_id]);
  return true;
end $$;

-- Which needs a job waits for, or which have failed, the first 20 of them; for queue.why(). Of queues that are not the
-- caller's only the ids, of all that it needs there.
create or replace function queue._why_needs(p_id bigint, p_failed boolean)
returns text language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_texts text[];
  v_limits text[] := queue._limits('{operator,reader}');
begin
  v_texts := array(
    select format('job %s', d.id) || case when queue._covers(v_limits, j.queue) is not false then format(' (%s)', coalesce(j.state, 'deleted')) else '' end
    from (select n.id, d.deleted_state
          from queue._direct_needs(p_id) n
          left join lateral (select d.deleted_state from queue.need d where d.job_id = p_id and d.need_id = n.id) d on true
          order by n.id) d
    left join lateral (select j.state, j.queue from queue.jobs j where j.id = d.id offset 0) j on true
    where queue._covers(v_limits, j.queue) is false or case when p_failed then coalesce(j.state, d.deleted_state, 'failed') in ('failed', 'cancelled', 'held', 'upstream_failed')
               else coalesce(j.state, d.deleted_state, 'failed') <> 'succeeded' end
    limit 21);
  return nullif(array_to_string(v_texts[:20], ', '), '') || case when cardinality(v_texts) > 20 then ' and more' else '' end;
end $$;

-- Whether what a job waits for at its needs is about to change: it or one of them is handed over.
create or replace function queue._is_handed_over(p_id bigint)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (
    select from queue.handover h
    where h.job_id = p_id or h.job_id in (select d.need_id from queue.need d where d.job_id = p_id));
end $$;

-- Invariants, for queue.check().
create or replace function queue._check_need_rows()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select 'waits for needs that do not hold it'::text, w.id, format('%s: %s', w.reason, n.standing)
    from (select array_agg(w.id) as ids from queue.waiting w where w.reason in ('needs', 'upstream_failed')) a
    cross join lateral queue._needs_states(a.ids) n
    join queue.waiting w on w.id = n.id
    where n.standing <> case w.reason when 'needs' then 'waiting' else 'failed' end
      and not queue._is_handed_over(w.id);
  return query
    select 'is held by a need that does not hold it'::text, w.id, format('%s: %s', w.reason, w.need_id)
    from queue.waiting w
    left join queue.need d on d.job_id = w.id and d.need_id = w.need_id
    left join queue.finished f on f.id = d.need_id
    left join queue.waiting n on n.id = d.need_id
    where w.reason in ('needs', 'upstream_failed') and w.need_id is not null
      and (d.need_id is null
           or (w.reason = 'needs') <> (coalesce(f.state, d.deleted_state) is null and coalesce(n.reason not in ('held', 'upstream_failed'), true))
           or coalesce(f.state, d.deleted_state) = 'succeeded')
      and not queue._is_handed_over(w.id);
  return query
    select 'ready though its needs do not let it'::text, n.id, n.standing
    from (select array_agg(v.id) as ids from queue.live v where v.claim is null and v.flags & 8 <> 0) a
    cross join lateral queue._needs_states(a.ids) n
    where n.standing <> 'satisfied' and not queue._is_handed_over(n.id);
  return query
    select 'needed, and its end would not be handed over'::text, v.id, format('needed by %s', min(d.job_id))
    from queue.live v join queue.need d on d.need_id = v.id
    where v.flags & 4096 = 0 and not exists (select from queue.finished f where f.id = d.job_id)
      and not exists (select from queue.handover h where h.job_id = v.id)
    group by v.id;
  return query
    select 'a need that is no job'::text, d.need_id, format('of %s', d.job_id)
    from queue.need d
    where not exists (select from queue.job j where j.id = d.job_id)
      or d.deleted_state is null and not exists (select from queue.job j where j.id = d.need_id);
end $$;

-- sql/36_results.sql
-- Results: what became of a job, and waiting for it.
--
-- Who waits appends a row to queue.awaited and raises queue.awaited_seq to the job's id. Whoever ends a job
-- looks for such rows only if its id is at most the sequence's last value: an end that nobody waits for costs
-- the reading of that. Neither waits for the other. What may be missed, as polling is the net: an end that is
-- under way while the row is appended, and where two raise the sequence at once.

-- Raises: QJ001.
create or replace function queue.result(id bigint)
returns table (state text, result jsonb, error text)
language plpgsql stable parallel safe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{producer,worker,operator,reader}', array[result.id]);
  end if;
  return query select j.state, j.result, j.error from queue.jobs j where j.id = result.id;
  if not found then
    perform queue._job_not_found(result.id);
  end if;
end $$;
comment on function queue.result(bigint) is
  'The job''s state, and once it has finished its result or error. error: the last one, also while it waits for a retry.';

-- Raises: QJ001.
create or replace function queue.needs(id bigint)
returns table (need_id bigint, task text, state text, result jsonb, error text)
language plpgsql stable parallel safe security definer rows 5
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_limits text[];
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{worker,operator,reader}', array[needs.id]);
    v_limits := queue._limits('{worker,operator,reader}');
  end if;
  if not exists (select from queue.job j where j.id = needs.id) then
    perform queue._job_not_found(needs.id);
  end if;
  return query
    select d.id, j.task, case when j.id is null then 'deleted' when j.is_seen then j.state end, j.result, j.error
    from queue._direct_needs(needs.id) d
    left join lateral (
      select j.id, x.is_seen, j.state, case when x.is_seen then j.task end as task, case when x.is_seen then j.result end as result,
        case when x.is_seen then j.error end as error
      from queue.jobs j cross join lateral (select queue._covers(v_limits, j.queue) as is_seen) x where j.id = d.id offset 0) j on true
    order by d.id;
end $$;
comment on function queue.needs(bigint) is
  'What a job needs, by id: their tasks, states, results and last errors, for a handler that decides by them. State deleted: by force. Of jobs of queues that are not the caller''s only the ids.';

-- Locks: none. Raises: QJ001.
create or replace function queue.await_result(id bigint)
returns table (state text, result jsonb, error text, channel text, wait_for interval)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_since timestamptz;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  select r.state, r.result, r.error into state, result, error from queue.result(await_result.id) r;
  if not state in ('succeeded', 'failed', 'cancelled') then
    select min(a.since) into v_since from queue.awaited a where a.id = await_result.id;
    if v_since is null then
      insert into queue.awaited (id, since) values (await_result.id, v_now);
    end if;
    if await_result.id > (select s.last_value from queue.awaited_seq s) then
      perform setval('queue.awaited_seq', await_result.id);
    end if;
    -- often at first, as an end may just be under way
    wait_for := least(greatest(v_now - coalesce(v_since, v_now), interval '20 ms'), interval '5 s');
    if current_setting('pgdefer.notify', true) is not distinct from 'off' then
      wait_for := least(wait_for, interval '1 s');
    else
      channel := 'pgdefer_result_' || await_result.id;
    end if;
  end if;
  return next;
end $$;
comment on function queue.await_result(bigint) is
  'As result, and says how to wait when the job has not finished: LISTEN on channel (NULL: no notification will come), call again, and unless it has finished now wait for a notification for at most wait_for and call again. Both are NULL once it has finished.';

-- Tells those who wait for jobs that have ended.
-- Locks: rows of queue.awaited by skip locked.
create or replace function queue._tell_waiters(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
begin
  if p_ids[1] > (select s.last_value from queue.awaited_seq s) and cardinality(p_ids) = 1 then
    return;
  end if;
  with gone as (
    delete from queue.awaited a
    where a.ctid = any (array(
      select a.ctid from unnest(p_ids) u (id)
      cross join lateral (select a.ctid from queue.awaited a where a.id = u.id for update skip locked) a))
    returning a.id)
  select array_agg(distinct g.id) into v_ids from gone g;
  if v_ids is not null and current_setting('pgdefer.notify', true) is distinct from 'off' then
    perform pg_notify('pgdefer_result_' || u.id, '') from unnest(v_ids) u (id);
  end if;
end $$;

-- sql/37_groups.sql
-- Groups, chains and graphs: jobs deferred with their needs in one call, and how jobs hang together.

-- Locks and errors: as defer_many.
create or replace function queue.defer_group(jobs jsonb, "then" jsonb)
returns table (then_id bigint, ids bigint[])
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_needs jsonb := defer_group."then" -> 'needs';
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  if jsonb_typeof(defer_group."then") is distinct from 'object' then
    perform queue._invalid('then must be a JSON object', 'Pass the job that follows as {"task": text, "args": object, ...}.');
  elsif coalesce(jsonb_typeof(v_needs), 'null') not in ('array', 'null') then
    perform queue._invalid('needs must be a list of ids', 'Pass ids of jobs, or leave needs out.');
  end if;
  ids := array(select d.id from queue.defer_many(defer_group.jobs) with ordinality d (id, n) order by d.n);
  select d.id into then_id
  from queue.defer_many(jsonb_build_array(
    defer_group."then" || jsonb_build_object('needs', to_jsonb(ids) || coalesce(nullif(v_needs, 'null'), '[]')))) d (id);
  return next;
end $$;
comment on function queue.defer_group(jsonb, jsonb) is
  'Defers jobs (as defer_many) and one more, "then", that needs them all, beside the needs that it names. Its options needs_mode and on_need_failure hold as in defer. Returns its id and theirs, in input order.';

-- Locks and errors: as defer_many.
create or replace function queue.defer_chain(jobs jsonb)
returns setof bigint language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_job jsonb;
  v_id bigint;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  if jsonb_typeof(defer_chain.jobs) is distinct from 'array' then
    perform queue._invalid('jobs must be a JSON array', 'Pass [{"task": text, "args": object, ...}, ...].');
  end if;
  for v_job in select e from jsonb_array_elements(defer_chain.jobs) e loop
    if v_id is not null and jsonb_typeof(v_job) = 'object' then
      perform queue._check_types('a job', v_job);
      v_job := v_job || jsonb_build_object('needs', jsonb_build_array(v_id) || coalesce(nullif(v_job -> 'needs', 'null'), '[]'));
    end if;
    v_id := queue.defer_many(jsonb_build_array(v_job));
    return next v_id;
  end loop;
end $$;
comment on function queue.defer_chain(jsonb) is
  'Defers jobs (as defer_many) of which each needs the one before it, beside the needs that it names. Returns the ids in input order.';

-- Raises: QJ001.
create or replace function queue.graph(id bigint)
returns table (job_id bigint, need_id bigint, depth integer, task text, state text)
language plpgsql stable parallel safe security definer rows 20
set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_ids bigint[];
  v_depths integer[];
  v_limits text[] := queue._limits('{operator,reader}');
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator,reader}', array[graph.id]);
  end if;
  if not exists (select from queue.job j where j.id = graph.id) then
    perform queue._job_not_found(graph.id);
  end if;
  select array_agg(u.id), array_agg(u.depth) into v_ids, v_depths
  from (select w.id, -w.depth as depth from queue._walk(graph.id, false) w
        union all
        select w.id, w.depth from queue._walk(graph.id, true) w where w.depth > 0) u;
  return query
    select u.id, n.id, u.depth, j.task, case when j.id is null then 'deleted' else j.state end
    from unnest(v_ids, v_depths) u (id, depth)
    left join lateral (select j.id, case when x.is_seen then j.task end as task, case when x.is_seen then j.state end as state
                       from queue.jobs j cross join lateral (select queue._covers(v_limits, j.queue) as is_seen) x where j.id = u.id offset 0) j on true
    left join lateral (select n.id, n.id in (select x from unnest(v_ids) x) as is_in from queue._neighbours(u.id, false) n (id) offset 0) n on n.is_in
    order by u.depth, u.id, n.id;
end $$;
comment on function queue.graph(bigint) is
  'The jobs that a job needs and those that need it, recursively: a row for each need of each job (need_id NULL: it has none), with the job''s task and state. depth: 0 the job itself, -1 what it needs, -2 what these need, 1 what needs it, and so on, by the shortest way.';

-- Every job that a job needs, or that needs it, recursively, itself too, and how many steps away it is.
-- A walk that carried its steps would come to a job by each way that leads there. So it carries ids alone, and comes
-- to them nearest first: then a job is one step farther than the first of those that it was found from.
create or replace function queue._walk(p_id bigint, p_dependents boolean)
returns table (id bigint, depth integer) language plpgsql stable parallel safe security invoker rows 20 as $$
#variable_conflict use_column
declare
  v_ids bigint[];
  v_from integer[];
  v_depths integer[] := array[0];
begin
  v_ids := array(
    with recursive walk (id) as (
      select p_id
      union
      select n.id from walk w cross join lateral queue._neighbours(w.id, p_dependents) n (id))
    select w.id from walk w);
  v_from := array(
    select x.first_from
    from (
      select y.n, min(y.from_n) over (partition by y.id) as first_from
      from (
        select u.id, u.n, null::bigint as from_n from unnest(v_ids) with ordinality u (id, n)
        union all
        select n.id, null, u.n from unnest(v_ids) with ordinality u (id, n) cross join lateral queue._neighbours(u.id, p_dependents) n (id)) y) x
    where x.n is not null
    order by x.n);
  for i in 2 .. cardinality(v_ids) loop
    v_depths[i] := v_depths[v_from[i]] + 1;
  end loop;
  return query select u.id, u.depth from unnest(v_ids, v_depths) u (id, depth);
end $$;

-- What a job needs, or what needs it, of admitted jobs; of the job itself also before it is admitted.
create or replace function queue._neighbours(p_id bigint, p_dependents boolean)
returns table (id bigint) language plpgsql stable parallel safe security invoker rows 5 as $$
#variable_conflict use_column
begin
  if p_dependents then
    return query select d.job_id from queue.need d where d.need_id = p_id;
  else
    return query select d.id from queue._direct_needs(p_id) d;
  end if;
end $$;

-- sql/40_fetch.sql
-- Fetching: claims what is ready, and admits when there is too little.

-- Locks: rows of queue.live by skip locked; ADM, waited for only while nothing is held.
-- Raises: 22023, QJ007, QJ008.
-- Why nothing is claimed twice: the claim is an update of a row that this transaction has locked, found
-- unclaimed in its newest version. Why no limit is exceeded: rows of limited lanes are claimed under ADM
-- only (_claim_limited).
create or replace function queue.fetch(
  worker bigint, queues text[] default null, max_jobs integer default 1, options jsonb default null)
returns table (id bigint, claim bigint, task text, args jsonb, queue text, priority integer, lock text, attempt integer,
               scheduled_at timestamptz, deadline timestamptz, timeout interval, headers jsonb, parent bigint)
language plpgsql volatile parallel unsafe security definer rows 50
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v record;
  v_none regclass;
begin
  if coalesce(v_none, queue._unlimited()) is null or current_setting('transaction_isolation') <> 'read committed'
    or current_setting('pgdefer.era', true) is distinct from queue._installation()
  then
    perform queue._check_isolation();
    if to_regclass('queue.unlimited') is null then
      perform queue._not_installed();
      perform queue._bound_worker(worker);
      queues := queue._bound_queues('{worker}', queues);
    end if;
    perform queue._know_era();
    -- once a session: what another one of the worker's has put aside
    perform queue._look_aside(worker);
  end if;
  if current_setting('pgdefer.undelivered', true) = worker::text then
    v := queue._deliver(worker, max_jobs, options);
    return query
      select c.id, c.claim, c.task, c.args, c.queue, c.priority, c.lock, c.attempt, c.scheduled_at, c.deadline, c.timeout, c.headers, c.parent
      from unnest(v.ids, v.claims) with ordinality u (id, claim, n)
      cross join lateral (select c.* from queue.claimed c where c.id = u.id and c.claim = u.claim offset 0) c
      order by u.n;
    if v.ids is not null then
      return;
    end if;
  end if;
  v := queue._claim(worker, queues, case when max_jobs > 30 then queue._fitting(max_jobs) else max_jobs end, options, true);
  if v.first_claim is null or cardinality(v.ids) > 30 then
    v.ids := queue._put_aside(worker, v.ids, v.first_claim is not null);
  end if;
  -- a statement of its own: only a new snapshot shows the claims
  if v.first_claim is not null then
    return query
      select f.id, v.first_claim, f.task, f.args, f.queue, f.priority, f.lock, f.attempt, f.scheduled_at, f.deadline, f.timeout, f.headers, f.parent
      from queue.first_run f where f.id = any (v.ids) order by f.id;
  else
    return query
      select c.id, c.claim, c.task, c.args, c.queue, c.priority, c.lock, c.attempt, c.scheduled_at, c.deadline, c.timeout, c.headers, c.parent
      from unnest(v.ids) with ordinality u (id, n)
      cross join lateral (select c.* from queue.claimed c where c.id = u.id offset 0) c
      order by u.n;
  end if;
end $$;
comment on function queue.fetch(bigint, text[], integer, jsonb) is
  'Claims up to max_jobs jobs for a worker and returns them in claim order. A transaction of its own, in READ COMMITTED. options: ids, alone (true: one job, which nothing may run beside, those that have crashed among them; crashed: one of these only), order (mixed | listed), tasks, deadline_within.';

-- Claims jobs: their ids in claim order, NULL for none. first_claim: the number of their claim, where that order is
-- the order of ids, none is large and all of them start for the first time, so that queue.first_run tells what they are. p_may_wait:
-- the transaction holds no row that the holder of ADM could need.
-- Here is what a worker meets that is mostly idle: one newcomer, or none, and nothing else to be done: no lane holds anything
-- ready, nothing is due, handed over or left from before, no task is paused, and the newcomer is plain, without a timeout or
-- a deadline. It is claimed as it is admitted, in three short statements: to set up statements and expressions, anew in every
-- transaction, is most of what a single job costs, and a WITH makes it more (ADR 1). All else is up to _claim_ready.
-- Locks: ADM by try, where this session's last look took newcomers only (the hint was_dry); then as _claim_ready.
-- Why the newcomer can be claimed as it is inserted: under ADM nothing becomes ready beside it, so that what the first
-- statement sees holds for the others. Claim and cursor commit together: taken back, the next admitter finds it new. A row
-- that another is just claiming counts as ready, as it may be given up. The clock of the claim is read after the snapshot.
-- Why no wake-up is lost: what is not new, or not visible yet, stays in front of the cursor or among its in_flight.
-- Two sessions: newcomers.spec.
create or replace function queue._claim(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_options jsonb, p_may_wait boolean, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz;
  v_has_adm boolean := false;
  v_queues text[];
  v_tick bigint;
  v_in_flight xid8[];
  v_upto pg_snapshot;
  v_own xid8;
  v_claimed record;
begin
  if current_setting('pgdefer.was_dry', true) = 'on' and p_max_jobs > 0 and p_options is null and queue._lock_admission(false) then
    v_has_adm := true;
    v_now := clock_timestamp();
    if p_queues is not null then
      v_queues := queue._match_queues(p_queues);
    end if;
    -- "is true" and "is false" leave the probes subplans, where joins would be set up
    select k.tick, k.in_flight, pg_current_snapshot(), pg_current_xact_id_if_assigned(),
      array(
        select j.id from queue.job j
        where (j.xid, j.id) > (k.next_xid, -9223372036854775808) and j.xid <= pg_snapshot_xmax(pg_current_snapshot())
          and pg_visible_in_snapshot(j.xid, pg_current_snapshot()) and j.xid is distinct from pg_current_xact_id_if_assigned()
        limit 2)
    into v_tick, v_in_flight, v_upto, v_own, ids
    from queue.cursor k
    where not k.has_backlog and k.due_at <= v_now and pg_snapshot_xmax(pg_current_snapshot()) >= k.next_xid
      and exists (select from queue.worker w where w.id = p_worker and w.gone_at is null) is true
      and exists (select from queue.handover h where h.xid >= coalesce(k.in_flight[1], k.next_xid)) is false
      and exists (select from queue.waiting w where w.at >= k.due_at and w.at <= v_now) is false
      and exists (select from queue.schedule c where c.due_at >= k.due_at and c.due_at <= v_now) is false
      and exists (select from queue.pause p where p.task is not null) is false
      and exists (
        select from queue.lane l
        cross join lateral (
          select from queue.live v
          where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null limit 1) r
        where not l.is_idle and (v_queues is null or l.queue = any (v_queues)) and (l.paused_until is null or l.paused_until <= v_now) and l.kind < 2) is false
    order by k.tick desc limit 1;
    if v_in_flight <> '{}' then
      if exists (select from unnest(v_in_flight) x (xid)
                 where pg_visible_in_snapshot(x.xid, v_upto) and x.xid is distinct from v_own and exists (select from queue.job j where j.xid = x.xid)) then
        ids := null;  -- what was deferred in a transaction that was in flight is new too
      end if;
    end if;
    if cardinality(ids) = 1 then
      insert into queue.live (id, deadline, lane, attempt, flags, claim, claimed_at, worker_id)
      select j.id, 'infinity', l.lane, 1, j.flags | l.extra_flags, nextval('queue.claim_seq'), clock_timestamp(), p_worker
      from queue.job j
      cross join lateral (
        select l.lane, l.extra_flags from queue.lane l
        where l.queue = j.queue and l.priority = j.priority and l.kind = 0 and not l.is_idle and l.paused_until is null
          and (v_queues is null or l.queue = any (v_queues)) and ('infinity', j.id) >= (l.low_deadline, l.low_id) limit 1) l
      where j.id = ids[1] and j.flags & (1 | 2 | 4 | 8 | 16 | 32 | 64 | 128 | 256 | 8192 | -32768) = 0 and j.deadline is null
        and j.id > coalesce(pg_sequence_last_value('queue.needed_seq'), 0)
      returning claim into first_claim;
      if first_claim is not null then
        update queue.cursor k
        set tick = v_tick + 1, next_xid = pg_snapshot_xmax(v_upto), high_id = greatest(k.high_id, ids[1]),
          in_flight = case when pg_snapshot_xmin(v_upto) < pg_snapshot_xmax(v_upto) then queue._in_flight(v_upto, v_own) else '{}' end
        where k.tick = v_tick;
        if first_claim % 300 = 0 then  -- now and then
          perform queue._raise_low_marks(array(select l.lane from queue.lane l where not l.is_idle and l.kind = 0));
        end if;
        return;
      end if;
    elsif ids = '{}' and clock_timestamp() - v_now < interval '2 ms' then
      -- a look that took longer met many rows that are not visible yet: _admit lets the cursor pass them
      ids := null;
      return;
    end if;
  end if;
  v_claimed := queue._claim_ready(p_worker, p_queues, p_max_jobs, p_options, p_may_wait, v_has_adm);
  ids := v_claimed.ids;
  first_claim := v_claimed.first_claim;
end $$;

-- Claims what is ready, and admits where that is due: every 10 ms, as newcomers may be of higher priority, or with ADM held
-- already (p_has_adm). Here is the case that most calls meet, one plain lane that holds enough; the rest is up to _claim_on.
-- Locks: ADM by try; then rows of queue.live by skip locked, then ADM by try.
-- Why claims rise, and come after what they follow: as in _claim_plain.
create or replace function queue._claim_ready(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_options jsonb, p_may_wait boolean, p_has_adm boolean, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_queues text[];
  v_now timestamptz := clock_timestamp();
  v_has_adm boolean := p_has_adm;
  v_has_more boolean := false;
  v_admitted integer;
  v_is_claimed boolean := false;
  v_claimed record;
  v_lane integer;
  v_attempt smallint;
  v_flags smallint;
  v_claimed_at timestamptz;
begin
  if p_max_jobs is null or p_max_jobs < 1 then
    perform queue._check_max_jobs(p_max_jobs);
  elsif p_options <> '{}' then
    ids := queue._claim_special(p_worker, p_queues, p_max_jobs, p_options, p_may_wait);
    return;
  end if;
  if v_has_adm
    or abs(date_part('epoch', v_now) - coalesce(nullif(current_setting('pgdefer.looked_at', true), '')::double precision, 0)) >= 0.01
      and queue._lock_admission(false)
  then
    v_has_adm := true;
    select a.has_more, a.admitted into v_has_more, v_admitted from queue._admit(greatest(1000, p_max_jobs)) a;
    perform set_config('pgdefer.looked_at', date_part('epoch', v_now)::text, false);
  end if;
  if p_queues is not null then
    v_queues := queue._match_queues(p_queues);  -- admission may have met a new queue
  end if;
  select l.lane into v_lane
  from queue.lane l
  where not l.is_idle and (v_queues is null or l.queue = any (v_queues)) and (l.paused_until is null or l.paused_until <= v_now) and l.kind = 0
    and exists (select from queue.worker w where w.id = p_worker and w.gone_at is null) is true
    and exists (
      select from queue.lane o
      where not o.is_idle and (v_queues is null or o.queue = any (v_queues)) and (o.paused_until is null or o.paused_until <= v_now) and o.kind < 2
        and o.lane <> l.lane) is false
  limit 1;
  if v_lane is not null then
    v_is_claimed := true;
    if p_max_jobs = 1 then
      -- as _claim_plain for one
      update queue.live v
      set claim = nextval('queue.claim_seq'), worker_id = p_worker, claimed_at = clock_timestamp(), attempt = v.attempt + 1
      where v.ctid = (
        select c.ctid
        from queue.lane l
        cross join lateral (
          select v.ctid from queue.live v
          where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null
          order by v.deadline, v.id limit 1 for update of v skip locked) c
        where l.lane = v_lane and l.kind = 0 and (l.paused_until is null or l.paused_until <= v_now))
      returning array[v.id], v.claim, v.attempt, v.flags, v.claimed_at into ids, first_claim, v_attempt, v_flags, v_claimed_at;
      if v_flags & 128 <> 0 then
        perform queue._lease_timeouts(ids, first_claim, v_claimed_at);
      end if;
      if v_attempt > 1 or v_flags & 2048 <> 0 or v_flags < 0 then
        first_claim := null;
      end if;
    else
      v_claimed := queue._claim_plain(p_worker, array[v_lane], p_max_jobs);
      ids := v_claimed.ids;
      first_claim := v_claimed.first_claim;
    end if;
    if cardinality(ids) = p_max_jobs then
      if v_has_adm then
        perform set_config('pgdefer.was_dry', case when v_admitted between 1 and p_max_jobs then 'on' else 'off' end, false);
      end if;
      if random() * 300 < least(p_max_jobs, 20) and queue._lock_admission(false) then
        perform queue._raise_low_marks(array[v_lane]);
      end if;
      return;
    end if;
  end if;
  select c.ids, c.first_claim into ids, first_claim
  from queue._claim_on(p_worker, p_queues, p_max_jobs, p_may_wait, v_now, ids, first_claim, v_is_claimed, v_has_adm, v_has_more, v_admitted <= p_max_jobs is true) c;
end $$;

-- Goes on with what _claim_ready has begun: p_ids are claimed so far, p_is_claimed: all that was ready, so that more has to
-- be admitted first; p_has_adm: ADM is held and was used, p_has_more: and would find more, p_is_dry: there were
-- newcomers only.
-- Locks: as fetch. Why no wake-up is lost: one that finds nothing has looked under ADM, or was refused ADM by one
-- who looks, and rows that others hold are theirs to finish or to hand over.
create or replace function queue._claim_on(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_may_wait boolean, p_now timestamptz, p_ids bigint[], p_first_claim bigint,
  p_is_claimed boolean, p_has_adm boolean, p_has_more boolean, p_is_dry boolean, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_queues text[] := p_queues;
  v_has_adm boolean := p_has_adm;
  v_has_more boolean := p_has_more;
  v_is_dry boolean := p_is_dry;
  v_admit record;
  v record;
  v_lanes integer[];  -- those claimed from
  v_claimed record;
begin
  ids := p_ids;
  first_claim := p_first_claim;
  if p_queues is not null then
    v_queues := queue._match_queues(p_queues);
  end if;
  for v_pass in 1 .. 100 loop
    if v_pass > 1 or not p_is_claimed then
      select array_agg(l.lane) as lanes, max(l.kind) as kind, array_agg(l.lane) as plain_lanes, exists (select from queue.worker w where w.id = p_worker and w.gone_at is null) as is_registered
      into v
      from queue.lane l
      where not l.is_idle and (v_queues is null or l.queue = any (v_queues)) and (l.paused_until is null or l.paused_until <= p_now) and l.kind < 2;
      if not v.is_registered then
        perform queue._worker_gone(p_worker);
      elsif cardinality(v.lanes) > 1 or v.kind = 1 then
        v := queue._probe_lanes(v.lanes);
      end if;
      v_lanes := coalesce(v.lanes, v_lanes);
      if v.kind = 1 and not v_has_adm then
        v_has_adm := queue._lock_admission(ids is null and p_may_wait);
        if v_has_adm then
          v_admit := queue._admit(greatest(1000, p_max_jobs));
          v_has_more := v_admit.has_more;
          if v_queues is distinct from p_queues then
            v_queues := queue._match_queues(p_queues);
          end if;
          continue;
        end if;
      end if;
      if v.kind = 1 and v_has_adm then
        ids := ids || nullif(queue._claim_limited(p_worker, v.lanes, p_max_jobs - coalesce(cardinality(ids), 0)), '{}');
        if coalesce(cardinality(ids), 0) < p_max_jobs then
          -- it may have looked at so many that can't start that its time was over
          ids := ids || (select c.ids from queue._claim_plain(p_worker, v.lanes, p_max_jobs - coalesce(cardinality(ids), 0)) c);
        end if;
        first_claim := null;
      elsif v.plain_lanes is not null then
        v_claimed := queue._claim_plain(p_worker, v.plain_lanes, p_max_jobs - coalesce(cardinality(ids), 0));
        if v_claimed.ids is not null then
          first_claim := case when ids is null then v_claimed.first_claim end;
          ids := ids || v_claimed.ids;
        end if;
      end if;
    end if;
    exit when cardinality(ids) >= p_max_jobs;
    exit when v_has_adm and not v_has_more or clock_timestamp() > p_now + interval '100 ms';
    if not v_has_adm then
      -- while rows are held ADM is not waited for
      v_has_adm := queue._lock_admission(ids is null and p_may_wait);
      exit when not v_has_adm;
    end if;
    v_admit := queue._admit(greatest(1000, p_max_jobs));
    v_has_more := v_admit.has_more;
    v_is_dry := v_admit.admitted <= p_max_jobs;
    if v_queues is distinct from p_queues then
      v_queues := queue._match_queues(p_queues);  -- admission may have met a new queue
    end if;
  end loop;
  if v_is_dry is distinct from (current_setting('pgdefer.was_dry', true) = 'on') then
    perform set_config('pgdefer.was_dry', case when v_is_dry then 'on' else 'off' end, false);
  end if;
  if random() * 300 < least(cardinality(ids), 20) and v_lanes is not null and (v_has_adm or queue._lock_admission(false)) then
    perform queue._raise_low_marks(v_lanes);
  end if;
end $$;

-- fetch with options: ids, alone, order, tasks, deadline_within.
-- Locks and errors: as fetch. Claims under ADM, so that every order and filter can be had of one function.
create or replace function queue._claim_special(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_options jsonb, p_may_wait boolean)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_options jsonb := jsonb_strip_nulls(p_options);
  v_alone boolean;
  v_crashed boolean;
  v_tasks text[];
  v_before timestamptz;
  v_only bigint[];
  v_max integer := p_max_jobs;
  v_lanes integer[];
  v_ids bigint[] := '{}'::bigint[];
  v_more boolean;
begin
  perform queue._check_keys('options', p_options, array['ids', 'alone', 'order', 'tasks', 'deadline_within']);
  if coalesce(v_options -> 'order', '"mixed"') not in ('"mixed"', '"listed"') then
    perform queue._invalid('order is not one of its values', 'Allowed: mixed, listed.', 'order: ' || (v_options ->> 'order'));
  elsif coalesce(jsonb_typeof(v_options -> 'alone'), 'boolean') <> 'boolean' and v_options -> 'alone' <> '"crashed"' then
    perform queue._invalid('alone must be true, false or crashed', 'Pass a JSON boolean, or "crashed" for a job that has crashed only.');
  elsif coalesce(jsonb_typeof(v_options -> 'tasks'), 'array') <> 'array' or coalesce(jsonb_typeof(v_options -> 'ids'), 'array') <> 'array' then
    perform queue._invalid('tasks and ids must be lists', 'Pass JSON arrays.');
  end if;
  v_crashed := coalesce(v_options -> 'alone' = '"crashed"', false);
  v_alone := v_crashed or coalesce(v_options -> 'alone' = 'true', false);
  v_tasks := case when v_options ? 'tasks' then array(select t from jsonb_array_elements_text(v_options -> 'tasks') t) end;
  v_before := v_now + queue._interval('deadline_within', v_options -> 'deadline_within');
  begin
    v_only := case when v_options ? 'ids' then array(select i::bigint from jsonb_array_elements_text(v_options -> 'ids') i) end;
  exception when data_exception then
    perform queue._invalid('ids must be numbers', 'Pass ids of jobs.');
  end;
  if v_alone then
    v_max := 1;
  end if;
  if not queue._lock_admission(p_may_wait) then
    return null;
  elsif not exists (select from queue.worker w where w.id = p_worker and w.gone_at is null) then
    perform queue._worker_gone(p_worker);  -- it went while this waited
  end if;
  loop
    select a.has_more into v_more from queue._admit(greatest(1000, p_max_jobs)) a;
    select array_agg(l.lane order by case when v_options ->> 'order' = 'listed' then l.place end, l.priority desc, l.first_id, l.lane) into v_lanes
    from (
      select l.lane, l.priority, m.place, min(f.id) over (partition by l.queue, l.priority) as first_id
      from queue.lane l
      cross join lateral (
        select min(q.n) as place from unnest(coalesce(p_queues, '{*}')) with ordinality q (pattern, n)
        where queue._matches(l.queue, q.pattern)) m
      left join lateral (
        select v.id from queue.live v
        where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null
        order by v.deadline, v.id limit 1) f on true
      where m.place is not null and (l.paused_until is null or l.paused_until <= v_now) and (l.kind < 2 or v_alone) and (l.kind = 2 or not v_crashed)) l;
    if v_tasks is not null or v_before is not null or v_only is not null then
      v_ids := v_ids || queue._claim_chosen(p_worker, v_lanes, v_max - cardinality(v_ids), v_tasks, v_before, v_only);
    else
      v_ids := v_ids || queue._claim_limited(p_worker, v_lanes, v_max - cardinality(v_ids));
    end if;
    exit when cardinality(v_ids) >= v_max or not v_more or clock_timestamp() > v_now + interval '100 ms';
  end loop;
  if v_alone then
    update queue.live v set flags = v.flags | 16 where v.id = any (v_ids);
  end if;
  if random() * 300 < least(cardinality(v_ids), 20) then
    perform queue._raise_low_marks(v_lanes);
  end if;
  return v_ids;
end $$;

-- Of lanes those that hold something ready that may start, in the order in which they are read: by priority,
-- then the one whose first job is oldest. plain_lanes: those that can be claimed from without ADM, as no limited one has a
-- higher priority.
create or replace function queue._probe_lanes(
  p_lanes integer[], out lanes integer[], out kind smallint, out plain_lanes integer[], out is_registered boolean)
language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
begin
  is_registered := true;
  with ready as (
    select l.lane, l.kind, l.priority,
      row_number() over (order by l.priority desc, f.id, l.lane) as n, max(l.priority) filter (where l.kind = 1) over () as limited_priority
    from unnest(p_lanes) u (lane)
    cross join lateral (
      select l.lane, l.priority, l.kind, l.queue, l.low_deadline, l.low_id from queue.lane l where l.lane = u.lane offset 0) l
    cross join lateral (
      select v.id from queue.live v
      where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null
      order by v.deadline, v.id limit 1) f
    where l.kind = 0
      or not exists (select from queue.queue_config c where c.queue = l.queue and (c.max_running is not null or c.rate_limit is not null))
      or queue._queue_room(l.queue, 1, clock_timestamp()) > 0)
  select array_agg(r.lane order by r.n), max(r.kind),
    array_agg(r.lane order by r.n) filter (where r.is_plain)
  into lanes, kind, plain_lanes
  from (select r.*, r.kind = 0 and (r.limited_priority is null or r.priority >= r.limited_priority) as is_plain from ready r) r;
end $$;

-- Claims up to p_n jobs of plain lanes, in the order of p_lanes. first_claim: as of _claim.
-- Locks: rows of queue.live by skip locked.
-- Why nothing starts that was paused, or uncounted that was limited, before: the statement that claims reads the lanes again.
-- Why a job's claims rise: a row that this statement sees was made ready by one that had its number before.
-- Why it starts after what it needed or followed has ended: the clock is read after the snapshot.
create or replace function queue._claim_plain(
  p_worker bigint, p_lanes integer[], p_n integer, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_flags integer;
  v_is_mixed boolean;
begin
  with claimed as (
    update queue.live v
    set claim = (select nextval('queue.claim_seq')), worker_id = p_worker, claimed_at = (select clock_timestamp()), attempt = v.attempt + 1
    where v.ctid = any (array(
      select c.ctid
      from unnest(p_lanes) u (lane)
      cross join lateral (
        select l.lane, l.low_deadline, l.low_id from queue.lane l
        where l.lane = u.lane and l.kind = 0 and (l.paused_until is null or l.paused_until <= (select clock_timestamp())) offset 0) l
      cross join lateral (
        select v.ctid from queue.live v
        where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null
        order by v.deadline, v.id limit p_n for update of v skip locked) c
      limit p_n))
    returning v.id, v.claim, v.lane, v.deadline, v.attempt, v.flags)
  select array_agg(c.id order by c.id), max(c.claim), bit_or(c.flags | case when c.attempt > 1 then 2048 else 0 end),
    bool_or(c.deadline < 'infinity' or c.lane <> p_lanes[1])
  into ids, first_claim, v_flags, v_is_mixed
  from claimed c;
  if v_flags & (128 | 2048) <> 0 or v_flags < 0 or v_is_mixed then
    if v_flags & 128 <> 0 then
      perform queue._lease_timeouts(ids, first_claim, (select v.claimed_at from queue.live v where v.id = ids[1]));
    end if;
    ids := array(select v.id from queue.live v where v.id = any (ids) order by array_position(p_lanes, v.lane), v.deadline, v.id);
    if v_is_mixed or v_flags & 2048 <> 0 or v_flags < 0 then
      first_claim := null;
    end if;
  end if;
end $$;

-- Raises: 22023 unless it is a number of jobs to ask for.
create or replace function queue._check_max_jobs(p_max_jobs integer)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if p_max_jobs is null or p_max_jobs < 1 then
    perform queue._invalid('max_jobs must be at least 1', 'Ask for 1 job or more.', format('max_jobs: %s', coalesce(p_max_jobs::text, 'NULL')));
  end if;
end $$;

-- Notes when reap must end claims of jobs with a timeout: 10 s past it.
create or replace function queue._lease_timeouts(p_ids bigint[], p_claim bigint, p_now timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  insert into queue.lease (id, claim, expires_at, is_own)
  select j.id, p_claim, p_now + (j.options ->> 'timeout')::interval + interval '10 s', false
  from queue.job j where j.id = any (p_ids) and j.flags & 128 <> 0;
end $$;

-- The queues that a list of names and patterns selects among those that may hold something ready; NULL is all.
-- Raises: 22023.
create or replace function queue._match_queues(p_queues text[])
returns text[] language plpgsql stable parallel safe security invoker as $$
begin
  if '*' = any (p_queues) then
    return null;
  elsif p_queues = '{}' or array_ndims(p_queues) > 1 or array_position(p_queues, null) is not null or '' = any (p_queues) then
    perform queue._invalid('queues holds no name, or NULL', 'Name queues, prefix* patterns or *; NULL instead of a list is all.');
  elsif not exists (select from unnest(p_queues) q where right(q, 1) = '*') then
    return p_queues;
  end if;
  return array(select distinct l.queue from queue.lane l
               where not l.is_idle and exists (select from unnest(p_queues) q where queue._matches(l.queue, q)));
end $$;

-- Whether a queue's name is selected by a name, prefix* or *.
create or replace function queue._matches(p_queue text, p_pattern text)
returns boolean language plpgsql immutable parallel safe security invoker as $$
begin
  return p_queue = p_pattern or right(p_pattern, 1) = '*' and starts_with(p_queue, left(p_pattern, -1));
end $$;

-- sql/41_deliver.sql
-- Delivering: what is claimed gets to its worker.
--
-- The rows of an answer travel before its transaction ends: a client that stops reading (frozen, a stalled network) keeps the
-- transaction open, with all its locks, for as long as TCP takes. So an answer is never larger than what the sockets' buffers take
-- in any case: 64 kB. What is claimed beyond that is put aside in queue.undelivered, and the next fetch of the worker hands it out, in
-- a transaction that holds nothing but the rows that say so: neither ADM nor claims, so that a worker which freezes over them is
-- given up as any other. A claim that was never handed out counts as released, whatever becomes of the worker.
--
-- pgdefer.undelivered, a setting of the session, names the worker for whom something is aside, so that other fetches need not look
-- for it. Another session looks once, and when it finds nothing to claim (behind a transaction pooler).

-- Locks, here and in who calls this: a fetch that puts aside holds the rows of queue.live that it has claimed, and ADM if it took it; its
-- rows of queue.undelivered are new, so that nobody waits for them. A fetch that hands out holds rows of queue.undelivered alone, which
-- reap and before_sleep pass by. A fetch that meets expired claims ends these, and hands out nothing.
-- Why nothing is lost: a claim and its row here commit together, so each claim is handed out by the fetch that made it or has a row. The
-- row goes in the transaction that hands the claim out, and comes back with it where that fails. What ends a claim meanwhile (reap, abort,
-- retry with force) takes its row of queue.live and leaves the one here: the pair is no longer the current one, and is passed by.
-- Two sessions: deliver_reap.spec.

-- Has the next fetch of this session hand out what is aside for a worker, if anything is.
-- Locks: none. Why nothing is overlooked: a session looks at its first fetch, and whenever it finds nothing to claim.
create or replace function queue._look_aside(p_worker bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if exists (select from queue.undelivered u where u.worker_id = p_worker) then
    perform set_config('pgdefer.undelivered', p_worker::text, false);
  end if;
end $$;

-- How many jobs to claim where a worker asks for many: as many as fitted into this session's last answer that was full, and an
-- eighth more each time that these left room for it, as it costs more to put jobs aside than to ask again.
create or replace function queue._fitting(p_max_jobs integer)
returns integer language plpgsql stable parallel safe security invoker as $$
begin
  return least(p_max_jobs, nullif(current_setting('pgdefer.fitting', true), '')::integer);
end $$;

-- Of claimed jobs, in claim order, those that fit into one answer, of which each takes about 120 bytes beside its args and headers;
-- the others are put aside. p_are_first: as first_claim of _claim, so that most often one sum tells that all fit.
-- Locks: none that another waits for; the transaction holds the rows of queue.live, maybe ADM.
-- Why no wake-up is lost: a worker that gets none of what was claimed may be on its way to sleep, and is told to fetch again.
create or replace function queue._put_aside(p_worker bigint, p_ids bigint[], p_are_first boolean)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
  v_total bigint;
begin
  if p_ids is null or p_ids = '{}' then
    perform queue._look_aside(p_worker);
    return p_ids;
  elsif p_are_first then
    select sum(octet_length(l.args::text) + octet_length(l.task) + coalesce(pg_column_size(l.given), 0) + 120) into v_total
    from queue.log l where l.id = any (p_ids);
    if v_total <= 65536 then
      if v_total <= 57344 and cardinality(p_ids) >= nullif(current_setting('pgdefer.fitting', true), '')::integer then
        perform set_config('pgdefer.fitting', (cardinality(p_ids) + cardinality(p_ids) / 8)::text, false);
      end if;
      return p_ids;
    end if;
  end if;
  select array_agg(x.id order by x.n) filter (where x.total <= 65536) as ids, array_agg(x.id order by x.n) filter (where x.total > 65536) as rest,
    array_agg(x.size order by x.n) filter (where x.total > 65536) as sizes
  into v
  from (
    select u.id, u.n, j.size, sum(j.size + 120) over (order by u.n) as total
    from unnest(p_ids) with ordinality u (id, n)
    cross join lateral (
      select coalesce(s.size, j.size, octet_length(j.args::text)) + octet_length(j.task) + octet_length(coalesce(s.queue, j.queue))
        + coalesce(octet_length(coalesce(s.lock, j.lock)), 0) as size
      from queue.job j left join queue.job_state s on s.id = j.id where j.id = u.id offset 0) j) x;
  if v.rest is not null then
    insert into queue.undelivered (worker_id, id, claim, size, is_alone)
    select p_worker, u.id, v.claim, u.size, v.flags & 16 <> 0
    from unnest(v.rest, v.sizes) with ordinality u (id, size, n)
    cross join lateral (select v.claim, v.flags from queue.live v where v.id = u.id offset 0) v
    order by u.n;
    perform set_config('pgdefer.undelivered', p_worker::text, false), set_config('pgdefer.fitting', greatest(cardinality(v.ids), 30)::text, false);
    if v.ids is null then
      perform queue._announce();
    end if;
  end if;
  return v.ids;
end $$;

-- What is aside for a worker, in claim order: at most p_n jobs, up to 4 MB, or one job; what must run alone goes to a fetch that asks
-- for that. It is no longer aside; some claims may have ended meanwhile. NULL: there is none.
-- Where some may start no longer, these are given back instead, and none is handed out (ids is empty): large rows must not travel
-- while a claim's row is held.
-- Locks: rows of queue.undelivered by skip locked; if any may start no longer, then rows of queue.live by skip locked, never ADM.
-- Why no wake-up is lost: the end of a claim is handed over as by succeed; what is left aside before_sleep sees, and who is on
-- its way to sleep is told to fetch again.
-- Raises: 22023, QJ007.
create or replace function queue._deliver(p_worker bigint, p_n integer, p_options jsonb, out ids bigint[], out claims bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_is_alone constant boolean := coalesce(p_options -> 'alone' <> 'false', false);
begin
  perform queue._check_max_jobs(p_n);
  if not exists (select from queue.worker w where w.id = p_worker and w.gone_at is null) then
    perform queue._worker_gone(p_worker);
  elsif queue._give_back_aside(p_worker) then
    ids := '{}'::bigint[];
  else
    with aside as (
      select u.no, u.size from queue.undelivered u
      where u.worker_id = p_worker and u.is_alone = v_is_alone and queue._may_start(u.id)
      order by u.no for update skip locked),
    gone as (
      delete from queue.undelivered u
      where u.worker_id = p_worker and u.no in (
        select a.no from (select a.no, sum(a.size) over (order by a.no) as total, row_number() over (order by a.no) as n from aside a) a
        where a.n = 1 or a.total <= 4000000 and a.n <= p_n)
      returning u.no, u.id, u.claim)
    select array_agg(g.id order by g.no), array_agg(g.claim order by g.no) into ids, claims from gone g;
  end if;
  if not exists (select from queue.undelivered u where u.worker_id = p_worker) then
    perform set_config('pgdefer.undelivered', '', false);
  end if;
end $$;

-- Whether a claimed job may start: it has not expired, and neither its queue nor its task is paused.
create or replace function queue._may_start(p_id bigint)
returns boolean language plpgsql volatile parallel safe security invoker as $$
#variable_conflict use_column
begin
  if exists (select from queue.expiry e where e.id = p_id and e.at <= clock_timestamp()) then
    return false;
  end if;
  return not exists (select from queue.pause p where p.is_paused) or (
    select greatest(queue._paused_until(coalesce(s.queue, j.queue)), queue._task_paused_until(j.task, coalesce(s.queue, j.queue)))
             > clock_timestamp() is not true
    from queue.job j left join queue.job_state s on s.id = j.id where j.id = p_id);
end $$;

-- Releases what is aside for a worker and may start no longer: one that has expired is cancelled by that. Returns whether there was
-- any. A claim that another transaction is at stays aside and is not handed out: the next look finds whether it has ended.
-- Locks: rows of queue.undelivered, then of queue.live, by skip locked.
create or replace function queue._give_back_aside(p_worker bigint)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_claim record;
  v_has_any boolean := false;
begin
  for v_claim in
    select u.no, u.id, u.claim from queue.undelivered u
    where u.worker_id = p_worker and not queue._may_start(u.id)
    order by u.id for update skip locked
  loop
    perform from queue.live v where v.id = v_claim.id and v.claim = v_claim.claim for update skip locked;
    if found then
      perform queue._end_attempt('{"outcome": "released"}', v_claim.id, v_claim.claim, false);
      v_has_any := true;
    end if;
    delete from queue.undelivered u
    where u.worker_id = p_worker and u.no = v_claim.no
      and not exists (select from queue.live v where v.id = v_claim.id and v.claim = v_claim.claim);
  end loop;
  if v_has_any then
    perform queue._announce();
  end if;
  return v_has_any;
end $$;

-- sql/50_finish.sql
-- Ending claims.
--
-- Each function here takes the pair (id, claim) and deletes the row of queue.live that has both, so a
-- claim ends once. What ends goes, in the same transaction, to queue.finished or back to the gates.
-- Locks: the claims' rows of queue.live, in the order of ids. finish_many and finish_and_fetch then try
-- ADM and settle; succeed, fail, retry_later and release may stand in a handler's own long transaction,
-- so they never take ADM: they append a handover.

-- Locks: the claim's row in queue.live. Raises: QJ001, QJ002, QJ008.
create or replace function queue.succeed(id bigint, claim bigint, result jsonb default null)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_attempt smallint;
  v_flags smallint;
  v_claimed_at timestamptz;
  v_worker_id bigint;
  v_none regclass;
begin
  if coalesce(v_none, queue._unlimited()) is null or current_setting('transaction_isolation') <> 'read committed'
    or pg_column_size(succeed.result) >= 2000 or pg_column_compression(succeed.result) is not null then
    perform queue._check_isolation();
    if to_regclass('queue.unlimited') is null then
      perform queue._not_installed();
      perform queue._bound_claims(array[succeed.id], array[succeed.claim]);
    end if;
    perform queue._check_size('result', succeed.result);
  end if;
  -- as _succeed for one, in short statements (ADR 1)
  delete from queue.live v where v.id = succeed.id and v.claim = succeed.claim
  returning v.attempt, v.flags, v.claimed_at, v.worker_id into v_attempt, v_flags, v_claimed_at, v_worker_id;
  if v_flags is null then
    perform queue._refuse(succeed.id, succeed.claim);
  end if;
  insert into queue.finished (id, finished_at, started_at, worker_id, attempts, state, result)
  values (succeed.id, clock_timestamp(), v_claimed_at, v_worker_id, v_attempt, 'succeeded', succeed.result);
  if succeed.id <= pg_sequence_last_value('queue.awaited_seq') then
    perform queue._tell_waiters(array[succeed.id]);
  end if;
  if v_flags <> 0 then
    perform queue._leave(array[succeed.id], array[v_flags], v_flags, false);
  end if;
end $$;
comment on function queue.succeed(bigint, bigint, jsonb) is
  'The claim ends, the job has succeeded, with a result if given. May be the last statement of the handler''s own transaction: then its writes and the outcome commit together or not at all. A transaction that ends several jobs does so in the order of their ids, or by one finish_many, which sorts them: operators take them in that order, and would deadlock with another. A result may take as many bytes of JSON text as queue.configure says (22023).';

-- Raises: 22023, QJ001, QJ002, QJ008.
create or replace function queue.fail(id bigint, claim bigint, error text, details jsonb default null, options jsonb default null)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_outcomes(jsonb_build_array(jsonb_build_object('id', fail.id, 'claim', fail.claim, 'options', fail.options)));
  end if;
  perform queue._check_isolation();
  if fail.options is not null then
    perform queue._check_fail_options(fail.options);
  end if;
  return queue._end_attempt(jsonb_build_object('outcome', 'failed', 'error', left(fail.error, 10000), 'details', fail.details, 'options', fail.options),
                            fail.id, fail.claim, false);
end $$;
comment on function queue.fail(bigint, bigint, text, jsonb, jsonb) is
  'The attempt failed: returns the new state, scheduled or ready (it will be retried), failed, or cancelled (it was told to abort, or has expired). Of error 10,000 characters are kept, details up to 100 kB, of larger ones their size and how they begin. options: retryable (false: failed at once; true: retried, whatever the policy), retry_at or retry_in (when; without a policy they also make it retried), and priority, queue, lock to change on retry (lock: empty text for none), reason (of a job that has failed), outcome (timed_out, of an attempt that its worker ended for that). Several in one transaction: as succeed.';

-- Raises: 22023, QJ001, QJ002, QJ005, QJ008.
create or replace function queue.retry_later(id bigint, claim bigint, at timestamptz default null, needs bigint[] default '{}', message text default null)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_outcome jsonb := jsonb_build_object('outcome', 'retry_later', 'at', retry_later.at, 'message', left(retry_later.message, 10000), 'needs', retry_later.needs);
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_outcomes(jsonb_build_array(v_outcome || jsonb_build_object('id', retry_later.id, 'claim', retry_later.claim)));
  end if;
  perform queue._check_isolation();
  perform queue._check_outcome(v_outcome);
  return queue._end_attempt(v_outcome, retry_later.id, retry_later.claim, false);
end $$;
comment on function queue.retry_later(bigint, bigint, timestamptz, bigint[], text) is
  'The job yields: it is called again, not before `at`, and after its needs, to which `needs` are added (NULL: whatever its needs are). No failure; a job with more than max_progress yields fails. Returns the new state.';

-- Raises: QJ001, QJ002, QJ008.
create or replace function queue.release(id bigint, claim bigint)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_claims(array[release.id], array[release.claim]);
  end if;
  perform queue._check_isolation();
  perform queue._end_attempt('{"outcome": "released"}', release.id, release.claim, false);
end $$;
comment on function queue.release(bigint, bigint) is
  'Gives the job back as if it had never been claimed: no attempt is counted.';

-- Locks: the claims' rows of queue.live; then ADM by try.
-- Raises: 22023 for what is no outcome (then nothing is done), QJ008.
create or replace function queue.finish_many(outcomes jsonb)
returns table (id bigint, claim bigint, state text, error text)
language plpgsql volatile parallel unsafe security definer rows 50
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_ended record;
  v_none regclass;
begin
  if coalesce(v_none, queue._unlimited()) is null or current_setting('transaction_isolation') <> 'read committed' then
    perform queue._check_isolation();
    if to_regclass('queue.unlimited') is null then
      perform queue._not_installed();
      perform queue._bound_outcomes(finish_many.outcomes);
    end if;
  end if;
  v_ended := queue._finish(finish_many.outcomes);
  return query
    select f.id, f.claim, case when v_ended.states is null then 'succeeded' else f.state end, f.error
    from unnest(v_ended.ids, v_ended.claims, v_ended.states, v_ended.errors) f (id, claim, state, error);
end $$;
comment on function queue.finish_many(jsonb) is
  'Ends many claims: an array of {"id", "claim", "outcome": succeeded | failed | retry_later | released | aborted | crashed, ...} with the named arguments of the single calls. crashed: the process of its own in which the worker ran the job died. A row for each; a lost claim is reported there (error QJ002) and the rest goes on. They are ended in the order of ids, whatever their order in the array. In place of a result that is too large (see queue.configure) a note is kept, as the job''s work is done.';

-- Locks: as finish_many, then as fetch; ADM is waited for only when there are no outcomes.
-- Raises: as finish_many and fetch.
create or replace function queue.finish_and_fetch(worker bigint, outcomes jsonb, queues text[] default null, max_jobs integer default 1, options jsonb default null)
returns table (id bigint, claim bigint, task text, args jsonb, queue text, priority integer, lock text, attempt integer,
               scheduled_at timestamptz, deadline timestamptz, timeout interval, headers jsonb, parent bigint, error text)
language plpgsql volatile parallel unsafe security definer rows 50
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_ended record;
  v record;
  v_may_wait boolean := coalesce(finish_and_fetch.outcomes, '[]') = '[]';
  v_none regclass;
begin
  if coalesce(v_none, queue._unlimited()) is null or current_setting('transaction_isolation') <> 'read committed'
    or current_setting('pgdefer.era', true) is distinct from queue._installation()
  then
    perform queue._check_isolation();
    if to_regclass('queue.unlimited') is null then
      perform queue._not_installed();
      perform queue._bound_worker(worker);
      perform queue._bound_outcomes(finish_and_fetch.outcomes);
      queues := queue._bound_queues('{worker}', queues);
    end if;
    perform queue._know_era();
    -- once a session: what another one of the worker's has put aside
    perform queue._look_aside(finish_and_fetch.worker);
  end if;
  if not v_may_wait then
    v_ended := queue._finish(finish_and_fetch.outcomes);
    if v_ended.has_refused then
      return query
        select f.id, f.claim, null::text, null::jsonb, null::text, null::integer, null::text, null::integer, null::timestamptz,
          null::timestamptz, null::interval, null::jsonb, null::bigint, f.error
        from unnest(v_ended.ids, v_ended.claims, v_ended.errors) f (id, claim, error) where f.error is not null;
      if cardinality(v_ended.ids) > 500 then
        return;  -- so long an answer must not travel with ADM held, which a claim may take
      end if;
    end if;
  end if;
  if current_setting('pgdefer.undelivered', true) = worker::text then
    -- what outcomes hold must not wait for large answers to travel: these come alone, once no outcomes come
    if v_may_wait then
      v := queue._deliver(worker, max_jobs, options);
      return query
        select c.id, c.claim, c.task, c.args, c.queue, c.priority, c.lock, c.attempt, c.scheduled_at, c.deadline, c.timeout, c.headers, c.parent,
          null::text
        from unnest(v.ids, v.claims) with ordinality u (id, claim, n)
        cross join lateral (select c.* from queue.claimed c where c.id = u.id and c.claim = u.claim offset 0) c
        order by u.n;
    end if;
    return;
  end if;
  v := queue._claim(
    finish_and_fetch.worker, finish_and_fetch.queues,
    case when finish_and_fetch.max_jobs > 30 then queue._fitting(finish_and_fetch.max_jobs) else finish_and_fetch.max_jobs end,
    finish_and_fetch.options, v_may_wait);
  if v.first_claim is null or cardinality(v.ids) > 30 then
    v.ids := queue._put_aside(finish_and_fetch.worker, v.ids, v.first_claim is not null);
  end if;
  if v.first_claim is not null then
    return query
      select f.id, v.first_claim, f.task, f.args, f.queue, f.priority, f.lock, f.attempt, f.scheduled_at, f.deadline, f.timeout, f.headers, f.parent,
        null::text
      from queue.first_run f where f.id = any (v.ids) order by f.id;
  else
    return query
      select c.id, c.claim, c.task, c.args, c.queue, c.priority, c.lock, c.attempt, c.scheduled_at, c.deadline, c.timeout, c.headers, c.parent,
        null::text
      from unnest(v.ids) with ordinality u (id, n)
      cross join lateral (select c.* from queue.claimed c where c.id = u.id offset 0) c
      order by u.n;
  end if;
end $$;
comment on function queue.finish_and_fetch(bigint, jsonb, text[], integer, jsonb) is
  'finish_many and fetch in one round trip and one commit. A row with error reports a refused outcome, the others are claimed jobs.';

-- Ends the claims of a list of outcomes: what became of each, with those that succeeded as one set. Nothing
-- is done unless all of it is well formed. states and errors stay NULL where all have succeeded. With others
-- all rows are locked first, in the order of ids: the first that is settled takes ADM, and from then on no row
-- may be waited for.
create or replace function queue._finish(
  p_outcomes jsonb, out ids bigint[], out claims bigint[], out states text[], out errors text[], out has_refused boolean)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_outcomes text[];
  v_results jsonb[];
  v_result_size integer;  -- of the largest, NULL where none has any
  v_has_others boolean;
  v_is_bad boolean;
  v_done bigint[];
  v_outcome jsonb;
  v_state text;
  v_error text;
begin
  begin
    select array_agg(o.id), array_agg(o.claim), array_agg(o.outcome), array_agg(o.result), max(pg_column_size(o.result)),
      bool_or(o.outcome <> 'succeeded'), bool_or(o.id is null or o.claim is null or o.outcome is null)
    into ids, claims, v_outcomes, v_results, v_result_size, v_has_others, v_is_bad
    from (select o.id, o.claim, o.result, o.outcome
          from jsonb_to_recordset(p_outcomes) o (id bigint, claim bigint, outcome text, result jsonb) order by o.id, o.claim) o;
  exception when data_exception then
    perform queue._check_is_list(p_outcomes);
    perform queue._invalid('an outcome is malformed', 'id and claim are numbers, outcome is text.', sqlerrm);
  end;
  -- a key that is not known: lists are made by a loop, so of those that succeeded the first is looked at
  if v_is_bad or v_has_others or v_result_size >= 2000 or (p_outcomes -> 0) - '{id,claim,outcome,result}'::text[] = '{}' is not true then
    perform queue._check_is_list(p_outcomes);
    if v_is_bad then
      perform queue._invalid('an outcome lacks id, claim or outcome', 'Each needs {"id", "claim", "outcome"}.');
    end if;
    perform queue._check_outcome(o) from jsonb_array_elements(p_outcomes) o;
    if v_result_size >= 2000 then
      v_results := array(select queue._cut_result(r.result) from unnest(v_results) with ordinality r (result, n) order by r.n);
    end if;
  end if;
  has_refused := false;
  if v_has_others then
    select array_agg(o.id order by o.n), array_agg(o.claim order by o.n), array_agg(o.result order by o.n) into ids, claims, v_results
    from unnest(ids, claims, v_results, v_outcomes) with ordinality o (id, claim, result, outcome, n) where o.outcome = 'succeeded';
    perform from queue.live l
    where l.id = any (array(select (o ->> 'id')::bigint from jsonb_array_elements(p_outcomes) o))
      and l.claim = any (array(select (o ->> 'claim')::bigint from jsonb_array_elements(p_outcomes) o))
    order by l.id for update;
  end if;
  if ids is not null then
    v_done := queue._succeed(ids, claims, case when v_result_size is not null then v_results end);
    if v_has_others then
      states := array_fill('succeeded'::text, array[cardinality(ids)]);
      errors := array_fill(null::text, array[cardinality(ids)]);
    end if;
    if cardinality(v_done) is distinct from cardinality(ids) then
      has_refused := true;
      select array_agg(case when r.ok then 'succeeded' end order by u.n), array_agg(case when not r.ok then 'QJ002' end order by u.n)
      into states, errors
      from unnest(ids) with ordinality u (id, n)
      cross join lateral (select coalesce(u.id = any (v_done), false) and ids[u.n + 1] is distinct from u.id as ok) r;
    end if;
  end if;
  if v_has_others then
    for v_outcome in select o from jsonb_array_elements(p_outcomes) o where o ->> 'outcome' <> 'succeeded' order by (o ->> 'id')::bigint loop
      v_state := null;
      v_error := null;
      begin
        v_state := queue._end_attempt(v_outcome, (v_outcome ->> 'id')::bigint, (v_outcome ->> 'claim')::bigint, false);
      exception when sqlstate 'QJ001' or sqlstate 'QJ002' or sqlstate 'QJ005' then
        v_error := sqlstate;
        has_refused := true;
      end;
      ids := ids || (v_outcome ->> 'id')::bigint;
      claims := claims || (v_outcome ->> 'claim')::bigint;
      states := states || v_state;
      errors := errors || v_error;
    end loop;
    perform queue._settle_own(ids);
  end if;
end $$;

-- A result that is too large as the note of that which clients know: the job has done its work, and to have it done again
-- would be wrong. It is as _check_size says.
create or replace function queue._cut_result(p_result jsonb)
returns jsonb language plpgsql stable parallel unsafe security invoker as $$
begin
  perform queue._check_size('result', p_result);
  return p_result;
exception when invalid_parameter_value then
  return jsonb_build_object('__pgdefer__', 'unencodable', 'value', 'JSON that is too large');
end $$;

-- Raises: 22023 unless it is a list.
create or replace function queue._check_is_list(p_outcomes jsonb)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if jsonb_typeof(p_outcomes) is distinct from 'array' then
    perform queue._invalid('outcomes must be a JSON array', 'Pass [{"id": number, "claim": number, "outcome": text, ...}, ...].');
  end if;
end $$;

-- Raises: 22023 unless it is an outcome.
create or replace function queue._check_outcome(p_outcome jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
declare
  v_bad text;
begin
  perform queue._check_keys('an outcome', p_outcome, array['id', 'claim', 'outcome', 'result', 'error', 'details', 'options', 'at', 'needs', 'message']);
  if not p_outcome ->> 'outcome' = any ('{succeeded,failed,retry_later,released,aborted,crashed}'::text[]) then
    perform queue._invalid('unknown outcome', 'Outcomes: succeeded, failed, retry_later, released, aborted, crashed.', 'outcome: ' || left(p_outcome ->> 'outcome', 200));
  end if;
  select e.key into v_bad from jsonb_each(p_outcome) e
  where e.key in ('error', 'message') and jsonb_typeof(e.value) not in ('string', 'null') limit 1;
  if found then
    perform queue._invalid(v_bad || ' must be text', 'Pass a JSON string; what has a structure goes into details.');
  elsif jsonb_typeof(p_outcome -> 'options') <> 'null' then
    perform queue._check_fail_options(p_outcome -> 'options');
  end if;
  perform queue._check_moment('at', queue._timestamp('at', p_outcome -> 'at'));
  if jsonb_typeof(p_outcome -> 'needs') = 'array' then
    select n::text into v_bad from jsonb_array_elements(p_outcome -> 'needs') n where n::text !~ '^[0-9]{1,18}$' limit 1;
  elsif jsonb_typeof(p_outcome -> 'needs') <> 'null' then
    v_bad := p_outcome ->> 'needs';
  end if;
  if v_bad is not null then
    perform queue._invalid('needs must be a list of ids', 'Pass ids of jobs, or null.', 'value: ' || left(v_bad, 200));
  end if;
end $$;

-- Ends claims as succeeded. Returns the ids whose claim was the current one, NULL for none. p_ids ascend,
-- so that width_bucket finds an id's place in them; p_results NULL: none has one.
create or replace function queue._succeed(p_ids bigint[], p_claims bigint[], p_results jsonb[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_done bigint[];
  v_special bigint[];
  v_flags smallint[];
  v_all_flags smallint;
  v_may_be_awaited boolean;
begin
  with gone as (
    delete from queue.live v
    where v.id = any (p_ids) and v.claim = p_claims[width_bucket(v.id, p_ids)]
    returning v.id, v.attempt, v.flags, v.claimed_at, v.worker_id),
  kept as (
    insert into queue.finished (id, finished_at, started_at, worker_id, attempts, state, result)
    select g.id, clock_timestamp(), g.claimed_at, g.worker_id, g.attempt, 'succeeded', case when p_results is not null then p_results[width_bucket(g.id, p_ids)] end from gone g)
  select array_agg(g.id), array_agg(g.id) filter (where g.flags <> 0), array_agg(g.flags) filter (where g.flags <> 0), bit_or(g.flags),
    min(g.id) <= coalesce(pg_sequence_last_value('queue.awaited_seq'), 0)
  into v_done, v_special, v_flags, v_all_flags, v_may_be_awaited
  from gone g;
  if v_may_be_awaited then
    perform queue._tell_waiters(v_done);
  end if;
  if v_all_flags <> 0 then
    -- of more the answer may be too long to hold ADM while it travels (41_deliver.sql)
    perform queue._leave(v_special, v_flags, v_all_flags, cardinality(p_ids) <= 1000);
  end if;
  return v_done;
end $$;

-- What jobs that have succeeded leave, by their flags, of which p_all_flags has each.
-- Locks: those of _close, on rows of these jobs alone, then as _hand_over, which says why no wake-up is lost.
create or replace function queue._leave(p_ids bigint[], p_flags smallint[], p_all_flags smallint, p_settle boolean)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_all_flags & (32 | 64 | 128 | 256 | 512 | 8192) <> 0 then
    perform queue._close(p_ids, p_flags);
  end if;
  perform queue._hand_over(p_ids, p_flags, 'ended', p_settle);
end $$;

-- What jobs that have reached their end leave beside the gates: leases, aborts, queueing locks, retention.
create or replace function queue._close(p_ids bigint[], p_flags smallint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_all smallint;
begin
  select bit_or(f) into v_all from unnest(p_flags) f;
  if v_all & 128 <> 0 then
    delete from queue.lease l where l.id = any (p_ids);
  end if;
  if v_all & 32 <> 0 then
    -- one that heartbeat holds it deletes
    delete from queue.abort a where a.ctid = any (array(select a.ctid from queue.abort a where a.id = any (p_ids) for update skip locked));
  end if;
  if v_all & (256 | 8192) <> 0 then
    perform queue._drop_queueing_locks(p_ids, 256 | 8192);
  end if;
  if v_all & 64 <> 0 then
    delete from queue.expiry e where e.id = any (p_ids);
  end if;
  if v_all & 512 <> 0 then
    update queue.finished f set purge_at = f.finished_at + queue._retention(f.id) where f.id = any (p_ids);
  end if;
end $$;

-- Passes ended claims on: settles them at once where ADM is free (p_settle), or appends a handover.
-- Locks: ADM by try, after the claims' rows. Why no wake-up is lost: see 30_admission.sql.
create or replace function queue._hand_over(p_ids bigint[], p_flags smallint[], p_kind text, p_settle boolean, p_payload jsonb default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[] := p_ids;
  v_flags smallint[] := p_flags;
  v_all_flags smallint;
begin
  if p_kind = 'ended' then
    select array_agg(u.id), array_agg(u.flags), bit_or(u.flags) into v_ids, v_flags, v_all_flags
    from unnest(p_ids, p_flags) u (id, flags) where u.flags & (1 | 2 | 4 | 4096 | 16384) <> 0;
    if v_ids is null then
      return;
    end if;
  end if;
  if not p_settle or not queue._lock_admission(false) then
    insert into queue.handover (job_id, kind, flags, payload)
    select u.id, p_kind, u.flags, p_payload from unnest(v_ids, v_flags) u (id, flags);
  elsif v_all_flags & (2 | 4 | 4096 | 16384) = 0 then
    -- what _settle_here does for those that have nothing but an ordered lock
    if queue._has_news() then
      perform queue._admit(1000);
    end if;
    perform queue._advance(p_turned => queue._leave_locks(v_ids, true));
  else
    perform queue._settle_here(v_ids, array_fill(p_kind, array[cardinality(v_ids)]), v_flags, case when p_payload is not null then array[p_payload] end);
  end if;
  if not pg_try_advisory_xact_lock_shared(1885824102, 1) then
    perform queue._wake();
  end if;
end $$;

-- Settles what this transaction has handed over of the claims on p_ids, as one set, where ADM is free.
create or replace function queue._settle_own(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
begin
  -- of more the answer may be too long to hold ADM while it travels (41_deliver.sql)
  if cardinality(p_ids) > 1000 or not queue._lock_admission(false) then
    return;
  end if;
  with gone as (
    delete from queue.handover h
    where h.xid = pg_current_xact_id() and h.job_id = any (p_ids) and h.kind in ('ended', 'again')
    returning h.job_id, h.kind, h.flags, h.payload, h.seq)
  select array_agg(g.job_id order by g.seq) as ids, array_agg(g.kind order by g.seq) as kinds, array_agg(g.flags order by g.seq) as flags,
    array_agg(g.payload order by g.seq) as payloads
  into v from gone g;
  if v.ids is not null then
    perform queue._settle_here(v.ids, v.kinds, v.flags, v.payloads);
  end if;
end $$;

-- Settles claims that this transaction has ended. What is visible by now is admitted before turns are given
-- on, so that the turn goes to the oldest.
-- Locks: the caller holds ADM.
create or replace function queue._settle_here(p_ids bigint[], p_kinds text[], p_flags smallint[], p_payloads jsonb[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._settle_slots(p_ids, p_kinds, p_flags, p_payloads);
  if 'ended' = any (p_kinds) and exists (select from unnest(p_flags) f where f & 3 <> 0) and queue._has_news() then
    perform queue._admit(1000);
  end if;
  perform queue._settle(p_ids, p_kinds, p_flags);
end $$;

-- Reads the handovers that are new by the same snapshots as the log.
-- Locks: the caller holds ADM.
create or replace function queue._take_handovers(
  p_xmax xid8, p_ended xid8[], p_upto pg_snapshot, p_own xid8, out ids bigint[], out kinds text[], out flags smallint[], out payloads jsonb[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  with gone as (
    delete from queue.handover h
    where h.ctid = any (array(
      select h.ctid from unnest(p_ended) e (x) cross join lateral (select h.ctid from queue.handover h where h.xid = e.x offset 0) h
      union all
      select h.ctid from queue.handover h
      where h.xid >= p_xmax and h.xid < pg_snapshot_xmax(p_upto) and pg_visible_in_snapshot(h.xid, p_upto) and h.xid is distinct from p_own))
    returning h.job_id, h.kind, h.flags, h.payload, h.seq)
  select array_agg(g.job_id order by g.seq), array_agg(g.kind order by g.seq), array_agg(g.flags order by g.seq), array_agg(g.payload order by g.seq)
  into ids, kinds, flags, payloads from gone g;
end $$;

-- Handovers that are committed and that the cursor has passed: nobody would ever take them. None, but for a bug or half a
-- restore. What is in flight, or has ended since the cursor moved, is not among them (30_admission.sql).
create or replace function queue._orphaned_handovers()
returns table (xid xid8, seq bigint, job_id bigint, kind text)
language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select h.xid, h.seq, h.job_id, h.kind
    from (select k.next_xid, k.in_flight from queue.cursor k order by k.tick desc limit 1) k
    join queue.handover h on h.xid < k.next_xid and h.xid <> all (k.in_flight);
end $$;

-- Hands them over anew, to the next admission.
-- Locks: the caller holds ADM, so that neither the cursor nor they move meanwhile.
create or replace function queue._repair_handovers()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.handover h set xid = pg_current_xact_id()
  where (h.xid, h.seq) in (select o.xid, o.seq from queue._orphaned_handovers() o);
end $$;

-- Gives back the slots of ended claims and sends those of them that run again through the gates, with those that are in no
-- gate for another reason (flags 0: they did not run, and have no turn to keep); then lets in whoever is first for these slots.
-- What takes a job out of where it waits comes after that: before it, a job that runs again is in no gate, and only looks as if it
-- waited for its turn.
-- Locks: the caller holds ADM.
create or replace function queue._settle_slots(p_ids bigint[], p_kinds text[], p_flags smallint[], p_payloads jsonb[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
  v_keys text[];
  v_item record;
  v_circular bigint[];
begin
  select array_agg(u.id) filter (where u.kind = 'again') as again,
    array_agg(u.id) filter (where u.kind = 'again' and u.flags & 3 <> 0) as locked,
    array_agg(u.id) filter (where u.kind in ('ended', 'again') and u.flags & (2 | 4 | 16384) <> 0) as ids,
    array_agg(u.flags) filter (where u.kind in ('ended', 'again') and u.flags & (2 | 4 | 16384) <> 0) as flags
  into v
  from unnest(p_ids, p_kinds, p_flags) u (id, kind, flags);
  if v.ids is not null then
    v_keys := queue._release_slots(v.ids, v.flags);
  end if;
  for v_item in
    select u.id, u.kind, u.payload from unnest(p_ids, p_kinds, p_payloads) u (id, kind, payload)
    where p_payloads is not null and u.payload is not null
  loop
    if v_item.kind = 'refill' then
      v_keys := v_keys || array(select k from jsonb_array_elements_text(v_item.payload) k);
    elsif v_item.payload ? 'change' then
      perform queue._change_on_retry(v_item.id, v_item.payload -> 'change');
    elsif v_item.kind = 'again' and not queue._add_yield_needs(v_item.id, v_item.payload) then
      v_circular := v_circular || v_item.id;
    end if;
  end loop;
  if v.locked is not null then
    perform queue._keep_turns(v.locked);
  end if;
  if v.again is not null then
    perform queue._advance(p_arrived => v.again, p_locks => case when v.locked is not null then queue._locks_of(v.locked) end);
  end if;
  for v_item in
    select u.id, u.kind, u.flags, u.payload
    from (
      select u.id, u.kind, u.flags, u.payload, u.n, row_number() over (partition by u.id, u.kind order by u.n desc) as from_last
      from unnest(p_ids, p_kinds, p_flags, p_payloads) with ordinality u (id, kind, flags, payload, n)
      where p_payloads is not null and u.payload is not null) u
    -- of replacements of one job the last is what is left of it
    where u.kind = 'replace' and u.from_last = 1 or u.kind = 'again' and (u.payload -> 'change' ? 'lock' or u.id = any (v_circular))
    order by u.n
  loop
    if v_item.kind = 'replace' then
      perform queue._apply_replacement(v_item.id, v_item.payload);
    elsif v_item.id = any (v_circular) then
      v_keys := v_keys || (select t.keys from queue._take_out(v_item.id) t);
      if not queue._is_settled(v_item.id) then
        -- a defer is replacing it, and holds its key
        insert into queue.handover (job_id, kind, flags, payload)
        values (v_item.id, 'again', v_item.flags & ~(2 | 4 | 16384), v_item.payload);
        continue;
      end if;
      perform queue._finish_unclaimed(array[v_item.id], 'failed', 'dependency_cycle', 'two jobs came to need each other');
      perform queue._advance(p_ended => array[v_item.id]);
    else
      perform queue._change_lock(v_item.id, v_item.payload #>> '{change,lock}');
    end if;
  end loop;
  if v_keys is not null then
    perform queue._advance(p_keys => v_keys);
  end if;
end $$;

-- Moves on what ended claims let go, their slots excepted: turns and dependents.
-- Locks: the caller holds ADM.
create or replace function queue._settle(p_ids bigint[], p_kinds text[], p_flags smallint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
begin
  select array_agg(u.id) filter (where u.kind = 'ended' and u.flags & 3 <> 0) as locked,
    array_agg(u.id) filter (where u.kind = 'ended' and u.flags & 4096 <> 0) as needed,
    array_agg(distinct u.id) filter (where u.kind = 'recheck') as recheck,
    array_agg(distinct u.id) filter (where u.kind = 'regate') as regate
  into v
  from unnest(p_ids, p_kinds, p_flags) u (id, kind, flags);
  if v.locked is not null or v.needed is not null then
    perform queue._advance(
      p_turned => case when v.locked is not null then queue._leave_locks(v.locked, true) end, p_changed => v.needed);
  end if;
  if v.recheck is not null then
    perform queue._recheck_needs(v.recheck);
  end if;
  if v.regate is not null then
    perform queue._regate(v.regate);
  end if;
end $$;

-- Raises: QJ001 or QJ002, always: says why a claim is refused. A job that is gone was deleted or pruned.
create or replace function queue._refuse(p_id bigint, p_claim bigint)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if p_id is null or p_claim is null then
    perform queue._invalid('id and claim are needed', 'Pass the pair that fetch returned.');
  elsif p_id not between 1 and (select s.last_value from queue.job_id_seq s) then
    perform queue._job_not_found(p_id);
  end if;
  perform queue._claim_lost(p_id, p_claim);
end $$;

-- sql/52_retry.sql
-- What becomes of an attempt that did not succeed: retry policies, yields, releases, aborts, crashes.

-- Ends the claim with an outcome other than succeeded and returns the job's new state. Beside the
-- outcomes of _check_outcome there is one of our own: retried (by queue.retry with force). crashed comes
-- from reap, or, then with a claim, from a worker that lives: what died there ran this job only.
-- What a retry changes (queue, priority, lock) is handed over, not written here: whoever settles gives
-- back first what the claim held under the old names.
-- Locks: the claim's row of queue.live, and by it the job's row of queue.job_state; ADM by try with p_settle.
-- Raises: QJ001, QJ002, QJ005; the outcome has been checked.
create or replace function queue._end_attempt(p_outcome jsonb, p_id bigint, p_claim bigint, p_settle boolean)
returns text language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_kind text := p_outcome ->> 'outcome';
  v_label text;
  v_error text := left(coalesce(p_outcome ->> 'error', p_outcome ->> 'message'), 10000);
  v_options jsonb := jsonb_strip_nulls(coalesce(nullif(p_outcome -> 'options', 'null'), '{}'));
  v_live record;
  v_job record;
  v_state record;
  v_is_alone boolean;
  v_limit integer;
  v_at timestamptz;
  v_payload jsonb;
  v_final text;
  v_reason text;
begin
  delete from queue.live v where v.id = p_id and v.claim = p_claim
  returning v.attempt, v.flags, v.claimed_at, v.worker_id into v_live;
  if not found then
    perform queue._refuse(p_id, p_claim);
  end if;
  select j.options, j.scheduled_at, coalesce(nullif(j.options -> 'retry', 'null'), nullif(t.defaults -> 'retry', 'null'), '{}') as policy into v_job
  from queue.job j left join queue.task t on t.name = j.task where j.id = p_id;
  select coalesce(max(s.failures), 0) as failures, coalesce(max(s.crashes), 0) as crashes, coalesce(max(s.progress), 0) as progress
  into v_state from queue.job_state s where s.id = p_id;
  v_label := case v_kind when 'retry_later' then 'yielded' when 'retried' then 'aborted' else coalesce(v_options ->> 'outcome', v_kind) end;
  if v_kind <> 'retried' and v_live.flags & 32 <> 0 and exists (select from queue.abort a where a.id = p_id and a.claim = p_claim) then
    v_label := case v_kind when 'crashed' then 'crashed' else 'aborted' end;
    v_kind := 'aborted';
  end if;
  case v_kind
    when 'failed' then
      v_limit := queue._max_attempts(v_job.policy, v_options);
      if v_options -> 'retryable' = 'false' or v_state.failures + 1 >= v_limit then
        v_final := 'failed';
        v_reason := coalesce(v_options ->> 'reason', case when v_options -> 'retryable' = 'false' then 'not_retryable' else 'attempts' end);
      else
        v_at := coalesce(queue._timestamp('retry_at', v_options -> 'retry_at'),
                         v_now + coalesce(queue._interval('retry_in', v_options -> 'retry_in'), queue.backoff(v_job.policy, v_state.failures + 1)));
        v_payload := nullif(jsonb_build_object('change', v_options - '{retryable,retry_at,retry_in,reason,outcome}'::text[]), '{"change": {}}');
      end if;
    when 'retry_later' then
      if v_state.progress + 1 > (case when v_job.options -> 'max_progress' = 'null' then null
                                      else coalesce((v_job.options ->> 'max_progress')::integer, 100) end) then
        v_final := 'failed';
        v_reason := 'max_progress';
      else
        v_at := queue._timestamp('at', p_outcome -> 'at');
        v_payload := queue._check_yield(p_id, p_outcome -> 'needs');
      end if;
    when 'aborted' then
      v_final := 'cancelled';
      v_reason := 'aborted';
    when 'crashed' then
      v_is_alone := p_outcome ? 'claim' or v_live.flags & (16 | 1024) <> 0 or exists (select from queue.lease l where l.id = p_id and l.claim = p_claim and l.is_own);
      v_final := case when v_job.policy ->> 'on_crash' = 'fail'
                        or v_is_alone and v_state.crashes + 1 >= case when v_job.policy -> 'max_crashes' = 'null' then null
                                                                      else coalesce((v_job.policy ->> 'max_crashes')::integer, 3) end
                      then 'failed' end;
      v_reason := case when v_job.policy ->> 'on_crash' = 'fail' then 'crashed' else 'crash_loop' end;
    else null;
  end case;
  if v_final is null and v_kind <> 'retried' and v_live.flags & 64 <> 0
    and exists (select from queue.expiry e where e.id = p_id and e.at <= v_now) then
    v_final := 'cancelled';
    v_reason := 'expired';
  end if;
  -- one that was rescheduled to a time before its own does not go back to that
  v_at := coalesce(v_at, case when v_job.scheduled_at > v_now then '-infinity'::timestamptz end);
  insert into queue.attempt (job_id, claim, attempt, worker_id, started_at, finished_at, outcome, error, details)
  values (p_id, p_claim, v_live.attempt, v_live.worker_id, v_live.claimed_at, v_now, v_label, v_error,
          queue._cut_details(nullif(p_outcome -> 'details', 'null')));
  insert into queue.job_state as s (id, attempts, claims, failures, crashes, progress, scheduled_at, started_at, error)
  values (p_id, v_live.attempt - case when v_kind = 'released' then 1 else 0 end, 1, case when v_kind = 'failed' then 1 else 0 end,
          case when v_label = 'crashed' then 1 else 0 end, case when v_kind = 'retry_later' then 1 else 0 end, v_at,
          case when v_kind <> 'released' then v_live.claimed_at end, case when v_kind not in ('retry_later', 'released', 'retried') then v_error end)
  on conflict on constraint job_state_pkey do update
    set (attempts, claims, failures, crashes, progress, scheduled_at, started_at, error)
      = (excluded.attempts, s.claims + 1, s.failures + excluded.failures, s.crashes + excluded.crashes, s.progress + excluded.progress,
         case when v_kind = 'released' then s.scheduled_at else excluded.scheduled_at end, coalesce(excluded.started_at, s.started_at),
         coalesce(excluded.error, s.error));
  if v_final is not null then
    insert into queue.finished (id, finished_at, started_at, worker_id, attempts, state, reason, error)
    values (p_id, v_now, v_live.claimed_at, v_live.worker_id, v_live.attempt, v_final, v_reason, v_error);
    perform queue._close(array[p_id], array[v_live.flags]);
    perform queue._tell_waiters(array[p_id]);
    perform queue._hand_over(array[p_id], array[v_live.flags], 'ended', p_settle);
    return v_final;
  end if;
  if v_live.flags & 128 <> 0 then
    delete from queue.lease l where l.id = p_id;
  end if;
  if v_kind = 'retried' then
    perform queue._start_over(array[p_id]);
  end if;
  perform queue._hand_over(array[p_id], array[v_live.flags], 'again', p_settle, v_payload);
  return coalesce(case when v_kind = 'retry_later' then queue._yield_state(p_id, v_payload) end,
                  case when v_at > v_now then 'scheduled' else 'ready' end);
end $$;

-- After how many failures a job has failed; NULL for never. Without a policy after the first, unless the
-- handler says when to run it again.
create or replace function queue._max_attempts(p_policy jsonb, p_options jsonb)
returns integer language plpgsql immutable parallel safe security invoker as $$
begin
  return case
    when p_options -> 'retryable' = 'true' then null
    when p_policy ? 'max_attempts' then (p_policy ->> 'max_attempts')::integer
    when p_policy ?| '{backoff,base,factor,cap,first,wait,linear_wait,exponential_wait}'::text[] or p_options ?| '{retry_at,retry_in}'::text[] then null
    else 1 end;
end $$;

-- Details of an attempt up to 100 kB; of larger ones their size and how they begin, of huge ones (16 MB) that they were.
create or replace function queue._cut_details(p_details jsonb)
returns jsonb language plpgsql immutable parallel unsafe security invoker as $$
declare
  v_size bigint;
begin
  if pg_column_size(p_details) > 16 then
    v_size := queue._text_size(p_details, 16777216);
  end if;
  if v_size > 100000 then
    return jsonb_strip_nulls(jsonb_build_object('truncated', v_size, 'begins', case when v_size <= 16777216 then left(p_details::text, 10000) end));
  end if;
  return p_details;
end $$;

-- Counts anew what has been counted of jobs: a manual retry.
-- Locks: the caller holds the rows of queue.live, or ADM where there are none.
create or replace function queue._start_over(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  update queue.job_state s
  set failures = 0, crashes = 0, progress = 0, ignores_needs = false, is_yielded = false,
    scheduled_at = case when s.claims = 0 then s.scheduled_at when j.scheduled_at > clock_timestamp() then '-infinity' end
  from queue.job j
  where s.id = any (p_ids) and j.id = s.id;
end $$;

-- Writes what fail changed on retry: queue and priority. _change_lock changes the lock, once the job is in a gate.
-- Locks: the caller holds ADM; the job is in no gate.
create or replace function queue._change_on_retry(p_id bigint, p_change jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  update queue.job_state s
  set queue = coalesce(p_change ->> 'queue', s.queue), priority = coalesce((p_change ->> 'priority')::integer, s.priority)
  where s.id = p_id;
end $$;

-- Raises: 22023 unless they are options of queue.fail.
create or replace function queue._check_fail_options(options jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
declare
  v_options jsonb := jsonb_strip_nulls(options);
begin
  perform queue._check_keys('options', options, array['retryable', 'retry_at', 'retry_in', 'priority', 'queue', 'lock', 'reason', 'outcome']);
  if v_options ? 'retryable' and jsonb_typeof(v_options -> 'retryable') <> 'boolean' then
    perform queue._invalid('retryable must be true or false', 'Pass a JSON boolean.');
  elsif v_options ?& '{retry_at,retry_in}'::text[] then
    perform queue._invalid('retry_at and retry_in exclude each other', 'Give one of the two.');
  elsif v_options -> 'retryable' = 'false' and v_options ?| '{retry_at,retry_in}'::text[] then
    perform queue._invalid('a failure that is not retryable has no time of a retry', 'Leave out retryable, or the time.');
  elsif v_options ? 'outcome' and v_options -> 'outcome' <> '"timed_out"' then
    perform queue._invalid('outcome is not one of its values', 'Allowed: timed_out. Leave it out for any other failure.',
                           'outcome: ' || left(v_options ->> 'outcome', 200));
  elsif v_options ? 'reason' and (jsonb_typeof(v_options -> 'reason') <> 'string' or octet_length(v_options ->> 'reason') > 1000) then
    perform queue._invalid('reason must be text', 'Pass a JSON string of at most 1,000 bytes.');
  elsif v_options ? 'lock' and v_options -> 'lock' <> '""' then
    perform queue._check_name('lock', v_options ->> 'lock');
  end if;
  perform queue._check_types('options', v_options);
  if v_options ? 'queue' then
    perform queue._check_queue(v_options ->> 'queue');
  end if;
  perform queue._interval('retry_in', v_options -> 'retry_in');
  perform queue._check_moment('retry_at', queue._timestamp('retry_at', v_options -> 'retry_at'));
end $$;

-- Raises: 22023 unless it is a retry policy.
create or replace function queue._check_retry(policy jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
declare
  v_item record;
begin
  perform queue._check_keys('retry', policy, array['max_attempts', 'backoff', 'base', 'factor', 'cap', 'first', 'jitter', 'on_crash',
    'max_crashes', 'wait', 'linear_wait', 'exponential_wait']);
  for v_item in select e.key, e.value, jsonb_typeof(e.value) as type, e.value #>> '{}' as text from jsonb_each(policy) e where e.value <> 'null' loop
    case
      when v_item.key in ('max_attempts', 'max_crashes') then
        if v_item.type <> 'number' or v_item.text !~ '^[1-9][0-9]{0,8}$' then
          perform queue._invalid(format('retry: %s must be a whole number of at least 1, or null', v_item.key), 'null stands for no limit.',
                                 'value: ' || left(v_item.text, 200));
        end if;
      when v_item.key = 'backoff' then
        if v_item.type <> 'string' or v_item.text not in ('constant', 'linear', 'exponential') then
          perform queue._invalid('retry: backoff is not one of its values', 'Allowed: constant, linear, exponential.', 'value: ' || left(v_item.text, 200));
        end if;
      when v_item.key = 'on_crash' then
        if v_item.type <> 'string' or v_item.text not in ('retry', 'fail') then
          perform queue._invalid('retry: on_crash is not one of its values', 'Allowed: retry, fail.', 'value: ' || left(v_item.text, 200));
        end if;
      when v_item.key in ('base', 'cap', 'first') then
        perform queue._interval('retry: ' || v_item.key, v_item.value);
      else
        if v_item.type <> 'number' or v_item.value < '0' or v_item.key = 'jitter' and v_item.value > '1' then
          perform queue._invalid(format('retry: %s must be a number', v_item.key), 'jitter lies between 0 and 1, the others at or above 0.',
                                 'value: ' || left(v_item.text, 200));
        end if;
    end case;
  end loop;
  if jsonb_strip_nulls(policy) ?| '{wait,linear_wait,exponential_wait}' and jsonb_strip_nulls(policy) ?| '{backoff,base,factor,cap,first}' then
    perform queue._invalid('retry: two kinds of policy are mixed', 'Use wait, linear_wait, exponential_wait, or backoff with base, factor, cap, first.');
  end if;
end $$;

-- With n failures before this one (n = failures - 1):
--   wait + linear_wait * n + exponential_wait ^ (n + 1) seconds (as Procrastinate's RetryStrategy), or
--   constant: base; linear: base * k; exponential: base * factor ^ (k - 1), where k counts the failures,
--   or with `first` those after the first. cap bounds every delay.
-- Raises: 22023.
create or replace function queue.backoff(policy jsonb, failures integer)
returns interval language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_policy jsonb := jsonb_strip_nulls(coalesce(backoff.policy, '{}'));
  v_seconds double precision;
  v_k integer := backoff.failures;
begin
  perform queue._check_retry(v_policy);
  if backoff.failures is null or backoff.failures < 1 then
    perform queue._invalid('failures must be at least 1', 'It counts the failure that the delay follows.');
  end if;
  if v_policy ?| '{wait,linear_wait,exponential_wait}' then
    v_seconds := queue._number(v_policy -> 'wait') + queue._number(v_policy -> 'linear_wait') * (v_k - 1)
      + case when v_policy ? 'exponential_wait' then queue._grow(1, queue._number(v_policy -> 'exponential_wait'), v_k) else 0 end;
  elsif v_policy ? 'first' and v_k = 1 then
    v_seconds := queue._seconds(v_policy -> 'first');
  else
    v_k := v_k - case when v_policy ? 'first' then 1 else 0 end;
    v_seconds := case coalesce(v_policy ->> 'backoff', 'constant')
      when 'constant' then queue._seconds(v_policy -> 'base')
      when 'linear' then queue._seconds(v_policy -> 'base') * v_k
      else queue._grow(queue._seconds(v_policy -> 'base'), case when v_policy ? 'factor' then queue._number(v_policy -> 'factor') else 2 end, v_k - 1) end;
  end if;
  v_seconds := least(v_seconds, case when v_policy ? 'cap' then queue._seconds(v_policy -> 'cap') end, 315360000);
  if v_policy ? 'jitter' then
    v_seconds := v_seconds * (1 - queue._number(v_policy -> 'jitter') * random());
  end if;
  return make_interval(secs => v_seconds);
end $$;
comment on function queue.backoff(jsonb, integer) is
  'The delay that a retry policy puts after the failures-th failure. jitter shortens it by up to that share. At most 10 years.';

-- A policy's number as far as it matters: below a billionth 0, at most ten years of seconds.
create or replace function queue._number(p_value jsonb)
returns double precision language plpgsql immutable parallel safe security invoker as $$
begin
  return case when p_value > '0.000000001' then least(p_value::numeric, 315360000)::double precision else 0 end;
end $$;

-- A policy's interval in seconds, 0 when there is none.
create or replace function queue._seconds(p_value jsonb)
returns double precision language plpgsql stable parallel unsafe security invoker as $$
begin
  return least(coalesce(extract(epoch from queue._interval('interval', p_value)), 0), 315360000)::double precision;
end $$;

-- base * factor ^ n, at most ten years in seconds, and 0 below a nanosecond: nothing over- or underflows.
create or replace function queue._grow(p_base double precision, p_factor double precision, p_n integer)
returns double precision language plpgsql immutable parallel safe security invoker as $$
declare
  v_log double precision;
begin
  if p_base = 0 or p_n = 0 then
    return p_base;
  elsif p_factor = 0 then
    return 0;
  end if;
  v_log := ln(p_base) + p_n * ln(p_factor);
  return case when v_log > 20 then 315360000 when v_log < -20 then 0 else p_base * p_factor ^ p_n end;
end $$;

-- sql/54_eras.sql
-- Eras: no pair (id, claim) is given out twice, and no id of a worker, whatever happens to the server.
--
-- claim_seq and worker_id_seq are as safe as the rest of the database: what a crash with synchronous_commit off, a standby
-- that was behind, or a backup has forgotten, they would give out again. So a new era begins with an installation, and
-- whenever the present one can't be told to be the one that is stored in queue.installation: both sequences jump, before
-- the first claim or worker of that era gets its number. An era ends with
--   a start of the server: a restart, a restore, a point in time, a standby, which was started by itself;
--   a recovery within one start, after a crash of one process: all statistics begin anew with it;
--   a copy of the database: its number;
--   a copy of the row, by a dump or replication: the row's xmin is another than the one written in it.
-- Nothing is lost without one of these. One too many, as by pg_stat_reset_shared, does no harm.
--
-- Where the jump leads: to the clock in microseconds, and at least 2^32 past the last number that is known; on from there
-- by chance, up to 2^32 (_era_start). Let an era begin at b and give out n numbers, and a later one begin at c without
-- knowing them all.
--   It knows b, as a standby that is some jobs behind does: c >= b + 2^32. They meet only if n > 2^32, which takes 12 hours
--   at 100,000 a second, between what was replicated last and the end of the older one: however the clock was set.
--   It does not know b, and the clock is right: b and c are moments, and c - b their distance, if that is over 71 minutes
--   (2^32 us). It outruns n, as nobody claims a million times a second.
--   Neither, or less than 71 minutes: b and c differ by chance. They meet with a probability of about 2n / 2^32, and then a
--   pair repeats only if the same job gets the same number.
-- The ids of jobs do not jump, so that they stay short: without its claim an id ends nothing. Those that a lossy failover
-- has forgotten are given to other jobs.

-- What tells the present era from others, but for the row's xmin. Exact, whatever extra_float_digits is.
create or replace function queue._era()
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return concat_ws(' ', extract(epoch from pg_postmaster_start_time()), extract(epoch from pg_stat_get_bgwriter_stat_reset_time()),
                   (select d.oid from pg_database d where d.datname = current_database()));
end $$;

-- Whether the numbers are those of the present era.
create or replace function queue._is_era(p_era text)
returns boolean language plpgsql volatile parallel safe security invoker as $$
begin
  return exists (select from queue.installation i where i.era = p_era and i.written = i.xmin);
end $$;

-- Begins a new era where that is due, and admits anew what stored transaction ids no longer tell, after a restore into
-- another cluster.
-- Locks: ADM, waited for, where a new era is due: the caller holds nothing. Then the row of queue.installation, which
-- nobody else locks for long. Why none gets a number of an era that has ended: as _know_era.
create or replace function queue._check_era()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_era text := queue._era();
begin
  if queue._is_era(v_era) then
    return;
  end if;
  perform queue._lock_admission(true);
  if queue._is_era(v_era) then
    return;  -- another has begun it meanwhile
  end if;
  if exists (select from queue.installation i where i.system_identifier <> (select c.system_identifier from pg_control_system() c)) then
    perform queue._restart_cursor();
  end if;
  perform queue._begin_era(v_era);
end $$;

-- Locks: the caller holds ADM, or has just made the tables. Others who take numbers meanwhile know the era that ends:
-- they will not take 2^32 of them, so that no sequence is set back.
create or replace function queue._begin_era(p_era text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform setval('queue.claim_seq', queue._era_start((select s.last_value from queue.claim_seq s))),
    setval('queue.worker_id_seq', queue._era_start((select s.last_value from queue.worker_id_seq s)));
  update queue.installation i set era = p_era;
  update queue.installation i set written = i.xmin;  -- which that of this transaction, or of a part of it, is by now
end $$;

-- Where numbers go on, of which p_last was the last.
create or replace function queue._era_start(p_last bigint)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
begin
  return greatest((extract(epoch from clock_timestamp()) * 1000000)::bigint, p_last + 4294967296) + (random() * 4294967296)::bigint;
end $$;

-- What pgdefer.era says in a session that knows the era: which installation it was of. It is called immutable as
-- _unlimited is, and used beside that in one expression only: the plan that holds the view is made anew when the tables are.
create or replace function queue._installation()
returns text language plpgsql immutable parallel safe security invoker as $$
begin
  return to_regclass('queue.installation')::oid::text;
end $$;

-- Asked by a session before its first claim. It is enough to ask once, as an era ends with all sessions that could claim:
-- with the server or its recovery; a session of a standby could not claim, so it has not asked; with the tables, when they
-- are made anew. What is left is no loss. A transaction that is rolled back forgets that it has asked.
-- Locks: as _check_era: the caller holds nothing.
create or replace function queue._know_era()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_installation text := to_regclass('queue.installation')::oid::text;
begin
  if current_setting('pgdefer.era', true) is distinct from v_installation then
    perform queue._check_era();
    perform set_config('pgdefer.era', v_installation, false);
  end if;
end $$;

-- sql/55_workers.sql
-- Workers: a worker lives as long as it calls heartbeat, and its claims with it.

-- Locks: none, but as _check_era where a new era is due. Raises: 22023.
create or replace function queue.register_worker(name text, queues text[] default null, info jsonb default '{}')
returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    queues := queue._bound_queues('{worker}', queues);
  end if;
  return queue._register_worker(name, queues, info);
end $$;
comment on function queue.register_worker(text, text[], jsonb) is
  'Registers a worker that serves the queues (names, prefix*, *; NULL: all) and returns its id. info is shown in queue.workers; its keys dead_after (interval, 30 s) and listen (false: the worker only polls, as behind a transaction pooler) have a meaning.';

-- register_worker by whoever may. Locks and errors: as there.
create or replace function queue._register_worker(p_name text, p_queues text[], p_info jsonb)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_id bigint;
  v_dead_after interval := coalesce(queue._interval('dead_after', p_info -> 'dead_after'), interval '30 s');
begin
  perform queue._check_name('name', p_name);
  perform queue._check_list('queues', p_queues);
  if p_info is null or jsonb_typeof(p_info) <> 'object' then
    perform queue._invalid('info must be a JSON object', 'Pass an object such as {"host": "a"}.');
  elsif v_dead_after < interval '1 s' then
    perform queue._invalid('dead_after is too short', 'A worker is dead after 1 second without a heartbeat or more.');
  elsif cardinality(p_queues) = 0 then
    perform queue._invalid('queues is empty', 'Name queues or patterns, or pass NULL for all.');
  end if;
  perform queue._check_name('queue', q) from unnest(p_queues) q;
  perform queue._check_size('info', p_info);
  perform queue._check_versions(p_info ->> 'client');
  perform queue._check_era();
  insert into queue.worker (name, queues, info, registered_at, last_seen_at, dead_after)
  values (p_name, p_queues, p_info, clock_timestamp(), clock_timestamp(), v_dead_after)
  returning id into v_id;
  return v_id;
end $$;

-- Locks: the worker's row. Raises: QJ007.
create or replace function queue.heartbeat(worker bigint)
returns table (id bigint, claim bigint, reason text)
language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_worker(heartbeat.worker);
  end if;
  update queue.worker w set last_seen_at = clock_timestamp() where w.id = heartbeat.worker and w.gone_at is null;
  if not found then
    perform queue._worker_gone(heartbeat.worker);
  end if;
  return query select a.id, a.claim, a.reason from queue.abort a where a.worker_id = heartbeat.worker order by a.id, a.claim;
  -- a claim that was taken away is told once
  delete from queue.abort a
  where a.worker_id = heartbeat.worker and not exists (select from queue.live v where v.id = a.id and v.claim = a.claim);
end $$;
comment on function queue.heartbeat(bigint) is
  'Says that the worker lives; to be called each 10 s. Returns its jobs that it must abort: told to (cancelled), or taken from it (retried). Raises QJ007 when it was reaped or deregistered.';

create or replace function queue.claims(worker bigint)
returns table (id bigint, claim bigint)
language plpgsql stable parallel safe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_worker(claims.worker);
  end if;
  return query
    select v.id, v.claim from queue.live v
    where v.worker_id = claims.worker and v.claim is not null
      and not exists (select from queue.undelivered u where u.worker_id = v.worker_id and u.id = v.id and u.claim = v.claim)
    order by v.id;
end $$;
comment on function queue.claims(bigint) is
  'The claims that a worker holds: after a lost connection it gives back those that it never heard of.';

-- Until the timeout has passed it bounds the lease: the attempt ends 10 s past it, however often it is extended. Extended after
-- that, the handler could not be ended and still runs, as the live worker says by this: then the lease alone decides, so that
-- no second run, nor another holder of its lock or slot, starts beside it.
-- Locks: the claim's row. Raises: 22023, QJ001, QJ002.
create or replace function queue.extend(id bigint, claim bigint, lease interval)
returns timestamptz language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_claimed_at timestamptz;
  v_expires_at timestamptz;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_claims(array[extend.id], array[extend.claim]);
  end if;
  if extend.lease is null or extend.lease <= interval '0' then
    perform queue._invalid('lease must be longer than 0', 'Pass an interval such as ''20 minutes''.');
  end if;
  perform queue._check_interval('lease', extend.lease);
  update queue.live v set flags = v.flags | 128 where v.id = extend.id and v.claim = extend.claim returning v.claimed_at into v_claimed_at;
  if not found then
    perform queue._refuse(extend.id, extend.claim);
  end if;
  select case when v_claimed_at + t.timeout <= v_now then v_now + extend.lease
              else least(v_now + extend.lease, v_claimed_at + t.timeout + interval '10 s') end
  into v_expires_at
  from queue.job j cross join lateral (select (j.options ->> 'timeout')::interval as timeout) t where j.id = extend.id;
  insert into queue.lease as l (id, claim, expires_at, is_own) values (extend.id, extend.claim, v_expires_at, true)
  on conflict on constraint lease_pkey do update
    set claim = excluded.claim, expires_at = excluded.expires_at, is_own = true, given_at = excluded.given_at;
  return v_expires_at;
end $$;
comment on function queue.extend(bigint, bigint, interval) is
  'Gives the claim a lease of its own from now on, which then alone decides when it is dead, whatever becomes of its worker; returns its end. A timeout still bounds the attempt; but extended after it has passed, a claim stays for as long as it is: so a live worker says that the handler could not be ended and still runs.';

-- Locks: the worker's row; the claims' rows of queue.live, all before ADM, which is then taken by try.
create or replace function queue.deregister_worker(worker bigint)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_claim record;
  v_ids bigint[] := '{}'::bigint[];
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_worker(deregister_worker.worker);
  end if;
  perform queue._check_isolation();
  update queue.worker w set gone_at = clock_timestamp(), has_left = true where w.id = deregister_worker.worker and w.gone_at is null;
  perform from queue.live v where v.worker_id = deregister_worker.worker order by v.id for update;
  for v_claim in
    select v.id, v.claim from queue.live v where v.worker_id = deregister_worker.worker and v.claim is not null order by v.id
  loop
    perform queue._end_attempt('{"outcome": "released"}', v_claim.id, v_claim.claim, false);
    v_ids := v_ids || v_claim.id;
  end loop;
  perform queue._settle_own(v_ids);
  return cardinality(v_ids);
end $$;
comment on function queue.deregister_worker(bigint) is
  'Removes the worker; its running jobs go back to ready. Returns how many. No error if it is gone already.';

-- Locks: the worker's row, then as reap. It waits for that row alone, the first that it takes, as reap skips rows that are
-- locked and tries ADM: so no two of these, nor of reap, wait for each other. Two for one worker: two_reapers.spec.
-- Raises: QJ007 (a limited role), QJ008.
-- What a dead worker's claims held up goes on as reap ends them, or with the tick after it. A fetch of the dead process may be under way in the server: reap looks for its claims as for those of any worker that went.
create or replace function queue.worker_died(worker bigint)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_worker(worker_died.worker);
  end if;
  perform queue._check_isolation();
  update queue.worker w set gone_at = clock_timestamp() where w.id = worker_died.worker and w.gone_at is null;
  return (select r.reaped from queue.reap() r);
end $$;
comment on function queue.worker_died(bigint) is
  'Says that a worker''s process has ended without deregistering it: its claims end as crashed now, not after dead_after, but for those with a lease of their own. For whoever watches processes. Returns how many claims were ended, those of other dead workers included. No error if the worker is gone already.';

-- Locks: rows of queue.worker and queue.live by skip locked, each row on its own; ADM by try.
-- Two reapers at once: a claim ends once, whoever deletes its row.
-- A fetch that was under way when its worker went may still bring claims: so a worker's claims are looked
-- for at once, and again when every transaction has ended that could have seen it alive (waits_for: those
-- that were under way after its end had been committed; of a role, as vacuum's workers are not: their kind is hidden
-- from an owner who is no superuser). Then nothing can come any more (is_over).
-- The late claim of a worker that has said good-bye is released, as its others were; that of a dead one has crashed.
-- Nobody could be heard while the server was down: what was last heard of before its start counts as dead dead_after past that at
-- the earliest, a lease or a timeout 30 s.
-- Claims of forgotten workers a session looks for once in 10 s. Stops after a second: the next call goes on.
create or replace function queue.reap()
returns table (reaped integer, next_expiry timestamptz)
language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_up_since timestamptz := pg_postmaster_start_time();
  v_grace_until timestamptz := queue._grace_until();
  v_last bigint[];
  v_gone bigint[];
  v_left bigint[] := '{}'::bigint[];
  v_claim record;
  v_ended integer;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  perform queue._check_isolation();
  reaped := 0;
  update queue.worker w set gone_at = v_now
  where w.id = any (array(select w.id from queue.worker w where w.gone_at is null and greatest(w.last_seen_at, v_up_since) + w.dead_after < v_now for update skip locked));
  update queue.worker w
  set waits_for = array(
    select l.virtualtransaction from pg_locks l join pg_stat_activity a on a.pid = l.pid
    where l.locktype = 'virtualxid' and l.pid <> pg_backend_pid() and a.usesysid is not null
      and a.datid = (select d.oid from pg_database d where d.datname = current_database()))
  where w.id = any (array(select w.id from queue.worker w
                          where w.gone_at < v_now and w.waits_for is null and w.xmin <> pg_current_xact_id()::xid for update skip locked));
  v_last := array(
    select w.id from queue.worker w
    where w.waits_for is not null and not w.is_over
      and not exists (select from pg_locks l where l.locktype = 'virtualxid' and l.virtualtransaction = any (w.waits_for))
    for update skip locked);
  v_gone := v_last || array(select w.id from queue.worker w where w.gone_at is not null and not w.is_clear and w.id <> all (v_last));
  if v_gone <> '{}' then
    for v_claim in
      select v.id, v.claim, v.worker_id, w.name, w.last_seen_at, w.has_left from queue.live v join queue.worker w on w.id = v.worker_id
      where v.worker_id = any (v_gone) and not exists (select from queue.lease l where l.id = v.id and l.claim = v.claim and l.is_own)
      order by v.id
    loop
      v_ended := 0;
      if clock_timestamp() < v_now + interval '1 s' then
        v_ended := queue._reap_claim(v_claim.id, v_claim.claim, case when v_claim.has_left then 'released' else 'crashed' end,
          format('worker %s (%s) died: its last heartbeat was at %s', v_claim.worker_id, left(v_claim.name, 200), v_claim.last_seen_at));
      end if;
      reaped := reaped + v_ended;
      if v_ended = 0 then
        v_left := v_left || v_claim.worker_id;
      end if;
    end loop;
    update queue.worker w set is_clear = true
    where w.id = any (array(select w.id from queue.worker w where w.id = any (v_gone) and not w.is_clear and w.id <> all (v_left) for update skip locked));
    update queue.worker w set is_over = true where w.id = any (v_last) and w.id <> all (v_left);
  end if;
  if abs(date_part('epoch', v_now) - coalesce(nullif(current_setting('pgdefer.reviewed_at', true), '')::double precision, 0)) >= 10 then
    reaped := reaped + queue._reap_forgotten();
    perform set_config('pgdefer.reviewed_at', date_part('epoch', v_now)::text, false);
  end if;
  v_last := array(select w.id from queue.worker w where w.is_over and w.gone_at < v_now - interval '1 minute' for update skip locked);
  if v_last <> '{}' then
    delete from queue.abort a
    where a.ctid = any (array(select a.ctid from queue.abort a where a.worker_id = any (v_last) for update skip locked));
    delete from queue.undelivered u
    where u.ctid = any (array(select u.ctid from queue.undelivered u where u.worker_id = any (v_last) for update skip locked));
    delete from queue.worker w where w.id = any (v_last);
  end if;
  for v_claim in
    select l.id, l.claim, j.options ->> 'timeout' as timeout, l.is_own,
      coalesce(v.claimed_at + (j.options ->> 'timeout')::interval + interval '10 s' <= v_now, false) as is_timed_out, l.expires_at
    from queue.lease l
    cross join lateral (select j.options from queue.job j where j.id = l.id offset 0) j
    left join lateral (select v.claimed_at from queue.live v where v.id = l.id and v.claim = l.claim offset 0) v on true
    where l.expires_at <= v_now and (v_grace_until <= v_now or l.given_at >= v_up_since) order by l.expires_at
  loop
    exit when clock_timestamp() > v_now + interval '1 s';
    reaped := reaped + queue._reap_claim(
      v_claim.id, v_claim.claim, case when v_claim.is_timed_out then 'timed_out' else 'crashed' end,
      case when v_claim.is_timed_out then format('not done within its timeout of %s', v_claim.timeout)
           else format('its lease ended at %s', v_claim.expires_at) end);
  end loop;
  next_expiry := least((select min(greatest(w.last_seen_at, v_up_since) + w.dead_after) from queue.worker w where w.gone_at is null),
                       queue._next_lease_end());
  return next;
end $$;
comment on function queue.reap() is
  'Ends what is dead: claims of workers without a heartbeat for dead_after, since the server was started at the earliest, and leases and timeouts that have passed. Returns how many, and when the next may expire.';

-- Until when leases and timeouts that were set before the server's start last at least.
create or replace function queue._grace_until()
returns timestamptz language plpgsql stable parallel safe security invoker as $$
begin
  return pg_postmaster_start_time() + interval '30 s';
end $$;

-- When the next lease or timeout ends, as reap counts.
create or replace function queue._next_lease_end()
returns timestamptz language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
begin
  if queue._grace_until() <= clock_timestamp() then
    return (select l.expires_at from queue.lease l order by l.expires_at limit 1);
  end if;
  return (select min(case when l.given_at < pg_postmaster_start_time() then greatest(l.expires_at, queue._grace_until()) else l.expires_at end)
          from queue.lease l);
end $$;

-- Ends claims without a lease of their own whose worker is forgotten, as crashed: how it ended nobody can tell. No fetch
-- leaves such a claim, but one that was prepared (PREPARE TRANSACTION) and committed long after; nor do half a restore and
-- a bug. Looks at 5,000 rows of queue.live from the least id on, and at as many from one by chance where there are more.
-- Locks: as reap.
create or replace function queue._reap_forgotten()
returns integer language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_claim record;
  v_reaped integer := 0;
begin
  for v_claim in
    with least as materialized (
      select v.id, v.claim, v.worker_id from queue.live v order by v.id limit 5000),
    chosen as materialized (
      select v.id, v.claim, v.worker_id
      from (select min(l.id) + (random() * ((select v.id from queue.live v order by v.id desc limit 1) - min(l.id)))::bigint as id
            from least l having count(*) = 5000) x
      cross join lateral (select v.id, v.claim, v.worker_id from queue.live v where v.id >= x.id order by v.id limit 5000) v)
    select x.id, x.claim, x.worker_id
    from (select l.* from least l union select c.* from chosen c) x
    where x.claim is not null and not exists (select from queue.worker w where w.id = x.worker_id)
      and not exists (select from queue.lease l where l.id = x.id and l.claim = x.claim and l.is_own)
    order by x.id limit 1000
  loop
    v_reaped := v_reaped + queue._reap_claim(v_claim.id, v_claim.claim, 'crashed', format('worker %s is forgotten', v_claim.worker_id));
  end loop;
  return v_reaped;
end $$;

-- Ends one dead claim; 0 when another has ended it, holds it, or it can't be ended now. One that was never handed out
-- (41_deliver.sql) is released.
create or replace function queue._reap_claim(p_id bigint, p_claim bigint, p_outcome text, p_error text)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  perform from queue.live v where v.id = p_id and v.claim = p_claim for update skip locked;
  if not found then
    if not exists (select from queue.live v where v.id = p_id and v.claim = p_claim) then
      -- two reapers may meet it, one of them with ADM: neither waits
      delete from queue.lease l
      where l.ctid = any (array(select l.ctid from queue.lease l where l.id = p_id and l.claim = p_claim for update skip locked));
    end if;
    return 0;
  elsif exists (select from queue.lease l where l.id = p_id and l.claim = p_claim and l.is_own and l.expires_at > clock_timestamp()) then
    return 0;  -- it was extended since the caller looked
  end if;
  perform queue._end_attempt(
    case
      case when exists (select from queue.live v join queue.undelivered u on u.worker_id = v.worker_id and u.id = v.id and u.claim = v.claim
                        where v.id = p_id) then 'released' else p_outcome end
      when 'timed_out' then jsonb_build_object('outcome', 'failed', 'error', p_error, 'options', '{"outcome": "timed_out"}'::jsonb)
      when 'crashed' then jsonb_build_object('outcome', 'crashed', 'error', p_error)
      else '{"outcome": "released"}' end,
    p_id, p_claim, true);
  return 1;
exception when others then
  -- one poisoned row must not keep the others from being reaped, nor every worker awake
  update queue.lease l set expires_at = clock_timestamp() + interval '1 minute'
  where l.ctid = any (array(select l.ctid from queue.lease l where l.id = p_id and l.claim = p_claim for update skip locked));
  raise warning 'pgdefer: job % can''t be reaped: % (%)', p_id, sqlerrm, sqlstate;
  return 0;
end $$;

-- Invariants, for queue.check().
create or replace function queue._check_claim_rows()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select 'claimed by a worker that is forgotten'::text, v.id, format('worker %s', v.worker_id)
    from queue.live v
    where v.claim is not null and not exists (select from queue.worker w where w.id = v.worker_id)
      and not exists (select from queue.lease l where l.id = v.id and l.claim = v.claim and l.is_own);
  return query
    select 'running, and its attempt has ended'::text, v.id, format('claim %s', v.claim)
    from queue.live v join queue.attempt a on a.job_id = v.id and a.claim = v.claim;
  return query
    select 'a lease without its claim'::text, l.id, format('claim %s', l.claim)
    from queue.lease l where not exists (select from queue.live v where v.id = l.id and v.claim = l.claim and v.flags & 128 <> 0);
  return query
    select 'told to abort, and its end would not heed it'::text, v.id, format('claim %s', v.claim)
    from queue.live v join queue.abort a on a.id = v.id and a.claim = v.claim where v.flags & 32 = 0;
  return query
    select 'crashed before, and ready beside others'::text, v.id, format('lane %s', v.lane)
    from queue.live v join queue.lane l on l.lane = v.lane join queue.job_state s on s.id = v.id
    where v.claim is null and s.crashes > 0 and l.kind <> 2;
  return query
    select 'finished, and expires'::text, e.id, e.at::text
    from queue.expiry e join queue.finished f on f.id = e.id;
end $$;

-- sql/57_sleep.sql
-- Waking without paying: producers send a NOTIFY only while somebody sleeps.
--
-- The latch is advisory lock (1885824102, 1). defer takes it shared, by try, until its transaction
-- ends. Got: nobody sleeps on it now, and nobody can before this transaction ends, so that nobody
-- needs waking. Not got: a sleeper holds it exclusively: NOTIFY.
-- A worker about to sleep tries it exclusively, in its listening session (the sentinel). When that
-- fails, either another is the sentinel (then every producer notifies, and all listeners hear it: it
-- may sleep too, and holds lock 2 shared to say so), or producers are in flight that will not notify
-- (then it polls, from 20 ms doubling to 1 s, until they have ended).
-- The sentinel that becomes busy gives the latch back and wakes the others, of which one takes it.
-- Whoever takes these locks in bad faith costs others notifications or polling, never a job.

-- Locks: none. Sends the notification, unless the session or database has SET pgdefer.notify = off. Qualified, as defer.
create or replace function queue._wake()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if coalesce(pg_catalog.current_setting('pgdefer.notify', true), '') operator(pg_catalog.<>) 'off' then
    perform pg_catalog.pg_notify('pgdefer', '');
  end if;
end $$;

-- When something is due that no commit announces: a schedule, a lease, a recurring run. now() for what
-- is already there and not admitted.
create or replace function queue._next_due()
returns timestamptz language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_due timestamptz;
begin
  select least(
    case when c.has_backlog or exists (select from queue.job j where j.xid >= c.next_xid)
           or exists (select from queue.job j where j.xid = any (array(select x from unnest(c.in_flight) x where pg_visible_in_snapshot(x, pg_current_snapshot()))))
         then clock_timestamp() end,
    case when exists (select from queue.handover h where pg_visible_in_snapshot(h.xid, pg_current_snapshot())) then clock_timestamp() + interval '10 ms'
    -- one that waits for the end of a transaction (_until), which wakes nobody
         when exists (select from queue.handover) then clock_timestamp() + interval '100 ms' end,
    (select w.at from queue.waiting w where w.at >= c.due_at order by w.at limit 1),
    (select s.due_at from queue.schedule s where s.due_at >= c.due_at order by s.due_at limit 1),
    case when c.due_at > clock_timestamp() then clock_timestamp() end,  -- the clock was set back
    (select min(p.until) from queue.pause p where p.is_paused and p.until > clock_timestamp() and isfinite(p.until)),
    -- what only tick can do, and may fail to do at once, is due in a moment, so that nobody spins
    (select greatest(e.at, clock_timestamp() + interval '10 ms') from queue.expiry e
     where (select v.claim from queue.live v where v.id = e.id) is null order by e.at limit 1),
    (select greatest(x.at, clock_timestamp() + interval '10 ms') from queue._next_lease_end() x (at) where x.at is not null),
    (select min(queue._next_start(c.queue)) from queue.queue_config c where c.rate_limit is not null))
  into v_due
  from (select k.* from queue.cursor k order by k.tick desc limit 1) c;
  return v_due;
end $$;

-- Whether there is a sentinel, which then knows of this listener.
-- Locks: session-level advisory (1885824102, 2), shared, kept if so.
-- Why none is forgotten: a sentinel that leaves gives lock 1 back and looks at 2 afterwards; this takes 2
-- and looks at 1 afterwards. So one of them sees the other.
create or replace function queue._joins_sentinel()
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  if not pg_try_advisory_lock_shared(1885824102, 2) then
    return false;
  elsif pg_try_advisory_lock_shared(1885824102, 1) then
    perform pg_advisory_unlock_shared(1885824102, 1), pg_advisory_unlock_shared(1885824102, 2);
    return false;
  end if;
  return true;
end $$;

-- Whether nothing of these queues is left that starts without anybody's help: nothing is ready (what a rate, max_running or a key
-- holds back, or has crashed and is to be claimed alone, is), nothing is due, nothing that is committed has yet to be admitted,
-- no claim has yet to be reaped. p_due: what _next_due has just said. Where that is now it looks whose it is, so that what others
-- commit all the time keeps nobody: the first 1,000, and where there are more it is not drained, as fetch admits them.
-- p_options: tasks and deadline_within of fetch, for what is ready.
-- Locks: none. Raises: 22023.
create or replace function queue._is_drained(p_queues text[], p_options jsonb, p_due timestamptz)
returns boolean language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_queues text[];
  v_tasks text[];
  v_before timestamptz;
begin
  if p_options is not null then
    perform queue._check_keys('options', p_options, array['tasks', 'deadline_within']);
    if coalesce(jsonb_typeof(p_options -> 'tasks'), 'array') not in ('array', 'null') then
      perform queue._invalid('tasks must be a list', 'Pass a JSON array.');
    elsif jsonb_typeof(p_options -> 'tasks') = 'array' then
      v_tasks := array(select t from jsonb_array_elements_text(p_options -> 'tasks') t);
    end if;
    v_before := v_now + queue._interval('deadline_within', p_options -> 'deadline_within');
  end if;
  if p_queues is not null then
    v_queues := queue._match_queues(p_queues);
  end if;
  if exists (
      select from queue.lane l
      cross join lateral (
        select from queue.live v
        where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null
          and (v_before is null or v.deadline < v_before)
          and (v_tasks is null or exists (select from queue.job j where j.id = v.id and j.task = any (v_tasks)))
        limit 1) r
      where not l.is_idle and (v_queues is null or l.queue = any (v_queues)) and (l.paused_until is null or l.paused_until <= v_now))
    or exists (
      select from queue.worker w
      where w.gone_at is null and greatest(w.last_seen_at, pg_postmaster_start_time()) + w.dead_after < v_now)
  then
    return false;
  elsif p_due > v_now + interval '20 ms' is not false then
    return true;
  end if;
  return (
    select not (k.has_backlog or k.due_at > v_now
      or exists (select from queue.handover)
      or coalesce(queue._next_lease_end() <= v_now, false)
      or exists (select from queue.schedule s where s.due_at >= k.due_at and s.due_at <= v_now)
      or exists (
        select from queue.expiry e
        where e.at <= v_now and (select v.claim from queue.live v where v.id = e.id) is null)
      or queue._has_any_of(p_queues, array(select j.queue from queue.job j where j.xid >= k.next_xid limit 1000))
      or queue._has_any_of(p_queues, array(select j.queue from queue.job j where j.xid = any (k.in_flight) limit 1000))
      or queue._has_any_of(p_queues, array(
           select coalesce(s.queue, j.queue)
           from (select w.id from queue.waiting w where w.at >= k.due_at and w.at <= v_now order by w.at limit 1000) w
           cross join lateral (select j.queue from queue.job j where j.id = w.id offset 0) j
           left join lateral (select s.queue from queue.job_state s where s.id = w.id offset 0) s on true)))
    from (select k.* from queue.cursor k order by k.tick desc limit 1) k);
end $$;

-- Whether a list of queues' names holds one that is asked for; or 1,000, as there may be more behind them.
create or replace function queue._has_any_of(p_queues text[], p_names text[])
returns boolean language plpgsql immutable parallel safe security invoker as $$
begin
  return cardinality(p_names) > 0
    and (p_queues is null or cardinality(p_names) >= 1000
         or exists (select from unnest(p_names) n join unnest(p_queues) q on queue._matches(n, q)));
end $$;

-- Locks: session-level advisory (1885824102, 1) or (1885824102, 2) by try, kept until after_sleep or
-- the session's end. A frozen sentinel keeps producers notifying, which all other listeners hear.
-- Raises: 22023, QJ007.
create or replace function queue.before_sleep(worker bigint, queues text[] default null, options jsonb default null)
returns table (may_sleep boolean, wait_for interval, channels text[], is_drained boolean)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_worker record;
  v_state text := coalesce(current_setting('pgdefer.sleeper', true), '');
  v_wait interval := interval '5 s';
  v_poll integer;
  v_due timestamptz;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_worker(before_sleep.worker);
    queues := queue._bound_queues('{worker}', queues);
  end if;
  select w.id, w.info into v_worker from queue.worker w where w.id = before_sleep.worker and w.gone_at is null;
  if not found then
    perform queue._worker_gone(before_sleep.worker);
  end if;
  may_sleep := true;
  if v_worker.info -> 'listen' = 'false' or current_setting('pgdefer.notify', true) = 'off' then
    channels := '{}';
    v_wait := interval '1 s';
  else
    channels := array['pgdefer', 'pgdefer_worker_' || v_worker.id];
    if v_state = 'listener' and pg_try_advisory_lock_shared(1885824102, 1) then
      -- the sentinel has gone
      perform pg_advisory_unlock_shared(1885824102, 1), pg_advisory_unlock_shared(1885824102, 2);
      v_state := '';
    end if;
    if v_state not in ('sentinel', 'listener') then
      if pg_try_advisory_lock(1885824102, 1) then
        v_state := 'sentinel';
      elsif queue._joins_sentinel() then
        v_state := 'listener';
      else
        v_poll := least(coalesce(nullif(substring(v_state from '^poll ([0-9]+)$'), '')::integer, 10) * 2, 1000);
        v_state := 'poll ' || v_poll;
        v_wait := make_interval(secs => v_poll / 1000.0);
        may_sleep := false;
      end if;
    end if;
    perform set_config('pgdefer.sleeper', v_state, false);
  end if;
  v_due := queue._next_due();
  if v_due is not null then
    v_wait := least(v_wait, greatest(v_due - clock_timestamp(), interval '0'));
  end if;
  -- not what is on its way to another session of the worker's
  perform from queue.undelivered u where u.worker_id = before_sleep.worker limit 1 for update skip locked;
  if found then
    wait_for := interval '0';
    is_drained := false;
  else
    wait_for := v_wait;
    is_drained := queue._is_drained(queues, options, v_due);
  end if;
  return next;
end $$;
comment on function queue.before_sleep(bigint, text[], jsonb) is
  'Decides, in the session that listens, whether a worker may sleep: LISTEN on the channels, fetch once more, then wait for a notification for at most wait_for. may_sleep false: notifications may fail to come, just fetch again after wait_for. is_drained: nothing of these queues is ready or due, or has yet to be admitted, so that nothing starts until somebody commits, ends, resumes or retries something, or a time comes; options: tasks and deadline_within, as of fetch, for what is ready.';

-- Locks: gives back what before_sleep took in this session.
create or replace function queue.after_sleep(worker bigint)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_state text := coalesce(current_setting('pgdefer.sleeper', true), '');
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_worker(after_sleep.worker);
  end if;
  if v_state = 'sentinel' then
    perform pg_advisory_unlock(1885824102, 1);
    if pg_try_advisory_lock(1885824102, 2) then
      perform pg_advisory_unlock(1885824102, 2);
    else
      perform queue._wake();
    end if;
  elsif v_state = 'listener' then
    perform pg_advisory_unlock_shared(1885824102, 2);
  end if;
  if v_state <> '' then
    perform set_config('pgdefer.sleeper', '', false);
  end if;
end $$;
comment on function queue.after_sleep(bigint) is
  'To be called in the session that listens when a worker that slept has become busy: gives the latch back, so that producers need not notify, and wakes another sleeper in its place.';

-- sql/60_tick.sql
-- tick: everything that is due. Any worker calls it; pg_cron or psql may call it instead.

-- Locks: as _check_era; as reap; then ADM, waited for while nothing is held. A transaction of its own.
-- Raises: QJ008. What fails in one of its later duties is a warning, and undoes no other duty.
create or replace function queue.tick()
returns table (admitted integer, reaped integer, pruned integer, next_due timestamptz, suspects integer)
language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
#variable_conflict use_column
declare
  v_admit record;
  v_start timestamptz := clock_timestamp();
  v_safe_at timestamptz;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  perform queue._check_isolation();
  perform queue._check_era();
  select r.reaped into reaped from queue.reap() r;
  -- with rows that reap has locked ADM is not waited for; whoever has it admits, and the next tick does the rest
  if not queue._lock_admission(pg_current_xact_id_if_assigned() is null) then
    admitted := 0;
    pruned := 0;
    suspects := 0;
    next_due := queue._next_due();
    return next;
    return;
  end if;
  v_safe_at := queue._safe_at();
  admitted := 0;
  loop
    select a.* into v_admit from queue._admit(1000) a;
    admitted := admitted + v_admit.admitted;
    exit when not v_admit.has_more or clock_timestamp() > v_start + interval '1 s';
  end loop;
  perform queue._expire_due();
  begin
    perform queue._repair();
  exception when others then
    raise warning 'pgdefer: repair failed: % (%)', sqlerrm, sqlstate;
  end;
  pruned := 0;
  begin
    if not v_admit.has_more then
      pruned := queue._prune(1000, v_safe_at);
      if random() < 0.01 then
        perform queue._prune_old_runs(1000);
        perform queue._forget_deleted();
      end if;
    end if;
  exception when others then
    raise warning 'pgdefer: pruning failed: % (%)', sqlerrm, sqlstate;
  end;
  next_due := queue._next_due();
  select count(*) into suspects
  from (select from queue.lane l
        cross join lateral (select from queue.live v where v.lane = l.lane and v.claim is null limit 100) v
        where l.kind = 2 limit 100) x;
  return next;
end $$;
comment on function queue.tick() is
  'Does everything that is due: admission, expiry, reaping, repair, recurring runs, pruning. Any worker calls it; pg_cron can. suspects: how many jobs (100 at most) have crashed and wait to be claimed alone, so that a worker that is never idle should run dry and fetch with {"alone": "crashed"}.';

-- Cancels jobs whose expires_at has passed. One that runs may go on, but is not run again (_end_attempt).
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._expire_due()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_id bigint;
begin
  for v_id in
    select e.id from queue.expiry e
    where e.at <= v_now and (select v.claim from queue.live v where v.id = e.id) is null
    order by e.at limit 1000
  loop
    begin
      perform queue._expire(array[v_id]);
    exception when others then
      update queue.expiry e set at = clock_timestamp() + interval '1 minute' where e.id = v_id;
      raise warning 'pgdefer: job % can''t expire: % (%)', v_id, sqlerrm, sqlstate;
    end;
  end loop;
end $$;

-- Cancels jobs with reason expired, if they do not run.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._expire(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_id bigint;
  v_place text;
  v_left text[];
  v_keys text[];
  v_ended bigint[];
begin
  foreach v_id in array p_ids loop
    if queue._is_settled(v_id) then
      select t.place, t.keys into v_place, v_left from queue._take_out(v_id) t;
      if v_place <> 'log' then
        v_keys := v_keys || v_left;
        v_ended := v_ended || v_id;
        continue;
      end if;
    end if;
    delete from queue.expiry e where e.id = v_id and exists (select from queue.finished f where f.id = v_id);
  end loop;
  if v_ended is not null then
    perform queue._finish_unclaimed(v_ended, 'cancelled', 'expired', null);
    perform queue._advance(p_ended => v_ended, p_keys => v_keys);
  end if;
end $$;

-- Mends what can only be wrong after a bug or an aborted repair, now and then; counts again what has begun to
-- run while a queue's limit was set; forgets lanes and semaphores that have not been used for long.
-- Locks: the caller holds ADM; rows of queue.live and queue.queueing_lock by skip locked.
create or replace function queue._repair()
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  if random() < 0.02 then
    perform queue._advance(p_keys => array_agg(s.key)) from queue.semaphore s where s.lanes <> '{}' and s.used < s.slots having count(*) > 0;
  end if;
  if random() < 0.1 then
    perform queue._mend_cursor();
  end if;
  perform queue._limit_queue(c.queue) from queue.queue_config c where c.limited_at > clock_timestamp() - interval '1 minute';
  perform queue._repair_replacing();
  perform queue._repair_handovers();
  perform queue._rest_lanes();
  perform queue._forget_semaphores();
end $$;

-- A dump's data restored over an installed queue, against all advice, leaves a second row of queue.cursor, and jobs that
-- the newer one has passed: all of them are admitted again as after any restore. Not each time, as it reads what others
-- have replaced. (A unique constraint would, with each move of the cursor.)
-- Locks: the caller holds ADM.
create or replace function queue._mend_cursor()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if (select count(*) from (select from queue.cursor k limit 2) k) > 1 then
    perform queue._restart_cursor();
    raise warning 'pgdefer: data was restored over an installed queue; its jobs are admitted anew';
  end if;
end $$;

-- sql/62_retention.sql
-- Retention: finished jobs go when their time since completion is over, unless an unfinished job needs them.

-- How long a finished job is kept: by the job, its queue, or the default of its state; NULL for ever.
create or replace function queue._retention(p_id bigint)
returns interval language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_retain interval;
begin
  select coalesce((j.options ->> 'retain')::interval, c.retain, case when f.state = 'succeeded' then interval '7 days' end) into v_retain
  from queue.job j
  join queue.finished f on f.id = j.id
  left join queue.job_state s on s.id = j.id
  left join queue.queue_config c on c.queue = coalesce(s.queue, j.queue)
  where j.id = p_id;
  return v_retain;
end $$;

-- Locks: ADM, waited for, so that no job comes to need what is removed; rows of finished jobs by skip locked.
-- Raises: 22023, QJ008.
create or replace function queue.prune(max_jobs integer default 10000, state text default null, older_than interval default null)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
#variable_conflict use_column
declare
  v_safe_at timestamptz;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  perform queue._check_isolation();
  if prune.max_jobs is null or prune.max_jobs < 1 then
    perform queue._invalid('max_jobs must be at least 1', 'Say how many jobs to remove at most.');
  elsif not prune.state = any ('{succeeded,failed,cancelled}'::text[]) then
    perform queue._invalid('state is not one of its values', 'Allowed: succeeded, failed, cancelled.', 'state: ' || left(prune.state, 200));
  elsif prune.older_than is not null and prune.state is null then
    perform queue._invalid('older_than needs a state', 'Say which: succeeded, failed or cancelled.');
  end if;
  perform queue._check_interval('older_than', prune.older_than);
  perform queue._lock_admission(true);
  v_safe_at := queue._safe_at();
  perform queue._admit_all();
  perform queue._forget_deleted();
  return queue._prune(prune.max_jobs, v_safe_at, prune.state, coalesce(prune.older_than, interval '0'));
end $$;
comment on function queue.prune(integer, text, interval) is
  'Removes finished jobs whose retention has passed, at most max_jobs, and returns how many. With a state: those of that state that finished older_than ago or before, whatever their retention. Those that unfinished jobs need are kept; to a job whose transaction names one and has yet to commit it counts as what it was.';

-- p_safe_at: what _safe_at returned, before everything visible was admitted. A job whose end has been
-- handed over since then is not settled yet, and kept.
-- Locks: the caller holds ADM; rows of queue.finished by skip locked.
create or replace function queue._prune(p_max_jobs integer, p_safe_at timestamptz, p_state text default null, p_older_than interval default null)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_until timestamptz := least(v_now, p_safe_at);
  v_ids bigint[];
  v_kept bigint[];
begin
  if p_state is not null then
    v_ids := array(
      select f.id from queue.finished f
      where f.state = p_state and f.finished_at <= v_now - p_older_than and not queue._is_needed(f.id)
        and f.id <> all (array(select h.job_id from queue.handover h))
      limit p_max_jobs for update skip locked);
    -- whoever names one as a need may have yet to commit
    insert into queue.deleted (id) select u.id from unnest(v_ids) u (id) where p_state = 'succeeded';
  else
    with due as materialized (
      select f.id, f.purge_at from queue.finished f where f.purge_at <= v_until
      order by f.purge_at limit p_max_jobs::bigint + 1000 for update skip locked),
    old as materialized (
      select f.id from queue.finished f
      where f.purge_at is null and f.state = 'succeeded' and f.finished_at < v_until - interval '7 days'
      limit p_max_jobs::bigint + 1000 for update skip locked),
    asked as materialized (
      select a.id, a.purge_at, queue._is_needed(a.id) or a.id = any (array(select h.job_id from queue.handover h)) as is_needed
      from (select d.id, d.purge_at from due d union all select o.id, null from old o) a)
    select array(select a.id from asked a where not a.is_needed order by a.purge_at limit p_max_jobs),
      array(select a.id from asked a where a.is_needed)
    into v_ids, v_kept;
    if cardinality(v_kept) >= 1000 then
      -- so many that looking at them each time would cost
      update queue.finished f set purge_at = v_now + interval '1 minute' where f.id = any (v_kept);
    end if;
    -- a queue's retention may have been set since, or a minute put in its place above
    with kept as (
      update queue.finished f set purge_at = f.finished_at + queue._retention(f.id)
      where f.id = any (v_ids) and (f.finished_at + queue._retention(f.id) <= v_now) is not true
      returning f.id)
    select array(select u.id from unnest(v_ids) u (id) where u.id not in (select k.id from kept k)) into v_ids;
  end if;
  perform queue._erase(v_ids);
  return cardinality(v_ids);
end $$;

-- Whether an unfinished job needs this one.
create or replace function queue._is_needed(p_id bigint)
returns boolean language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
begin
  perform from queue.need d
  left join lateral (select f.id from queue.finished f where f.id = d.job_id offset 0) f on true
  where d.need_id = p_id and f.id is null limit 1;
  return found;
end $$;

-- Up to when retention may count: whoever named a job as a need before that (_check_needs refuses it from
-- then on) has ended, and if he committed his job is visible, so that _prune sees the need once everything
-- visible is admitted. Where no other transaction has an xid that is now; else the moment before the last
-- up to which every transaction has ended.
-- Locks: the caller holds ADM.
create or replace function queue._safe_at()
returns timestamptz language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_old record;
  v_safe_at timestamptz;
begin
  select h.looked_at, h.looked_xid, h.safe_at, h.looked_xid < pg_snapshot_xmin(pg_current_snapshot()) as is_over,
    greatest(h.looked_at, h.safe_at) > v_now as is_ahead into v_old
  from queue.horizon h;
  -- ahead: the clock was set back, and what it told before counts for nothing
  v_safe_at := case when v_old.is_ahead then '-infinity' when v_old.is_over then v_old.looked_at else v_old.safe_at end;
  if v_old.is_ahead or v_old.is_over and v_old.looked_at < now() - interval '1 s' then
    update queue.horizon h set looked_at = now(), looked_xid = pg_current_xact_id(), safe_at = v_safe_at;
  end if;
  if v_safe_at > v_now - interval '1 minute'
    and not exists (select from queue.finished f where f.purge_at > v_safe_at and f.purge_at <= v_now) then
    return v_safe_at;
  end if;
  perform from pg_locks l
  left join pg_stat_activity a on a.pid = l.pid
  left join pg_prepared_xacts p on l.pid is null and p.transaction = l.transactionid
  where l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and l.granted and l.pid is distinct from pg_backend_pid()
    and (a.datname = current_database() and a.backend_type is distinct from 'autovacuum worker' or p.database = current_database())
  limit 1;
  return case when found then v_safe_at else v_now end;
end $$;

-- Removes every trace of jobs that are finished and in no gate. What was known of them stays with those
-- finished jobs that needed them and may be retried.
-- Locks: the caller holds ADM and the rows of queue.finished.
create or replace function queue._erase(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.need d
  set deleted_state = (select case f.state when 'succeeded' then 'succeeded' else 'failed' end from queue.finished f where f.id = d.need_id)
  where d.ctid = any (array(
    select d.ctid from unnest(p_ids) u (id)
    cross join lateral (select f.id from queue.finished f where f.id = u.id offset 0) f
    cross join lateral (select d.ctid, d.job_id from queue.need d where d.need_id = f.id offset 0) d
    where d.job_id not in (select unnest(p_ids))));
  delete from queue.need d where d.job_id = any (p_ids);
  delete from queue.awaited a where a.ctid = any (array(select a.ctid from queue.awaited a where a.id = any (p_ids) for update skip locked));
  delete from queue.finished f where f.id = any (p_ids);
  delete from queue.attempt a where a.job_id = any (p_ids);
  delete from queue.job_state s where s.id = any (p_ids);
  delete from queue.log l where l.id = any (p_ids);
end $$;

-- sql/70_cron.sql
-- Cron expressions: what they mean, and when they run next.
--
-- _cron_parse turns the text into eight numbers, which may be kept and given to _cron_next again:
--   [1]     seconds between the runs of `every ...`; 0 for cron fields, which follow as bit masks:
--   [2]-[4] second, minute, hour: bit n is the value n
--   [5]     day of month: bits 0-30 are the days 1-31, bits 31-61 are L to L-30, bit 62 is LW
--   [6]     month: bits 0-11
--   [7]     day of week: bits 0-6 are Sunday to Saturday in every week of the month,
--           bits 7n to 7n+6 the n-th such day of it (n is 1-5), bits 42-48 the last one
--   [8]     1: both day fields must match; 2: the expression follows elapsed time
--
-- Daylight saving is settled by two facts about time zone data: changes of one zone's offset are
-- more than 48 hours apart, and none is larger than 24 hours. In these functions a timestamptz is
-- an instant and a timestamp the local time that clocks in the zone show.

create or replace function queue.next_runs(
  cron text, timezone text default 'UTC', after timestamptz default pg_catalog.now(),
  n int default 5)
returns setof timestamptz language plpgsql stable parallel unsafe rows 5 security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_cron bigint[];
  v_run timestamptz := next_runs.after;
begin
  if next_runs.n is null or next_runs.n not between 1 and 10000 then
    perform queue._invalid('n is out of range', 'n is 1 to 10,000.',
      pg_catalog.format('n: %s', coalesce(next_runs.n::text, 'NULL')));
  elsif next_runs.after is null
    or not (next_runs.after >= '0001-01-03 00:00+00' and next_runs.after < '10000-01-01 00:00+00')
  then
    perform queue._invalid('after is out of range', 'after is a time in the years 1 to 9999.',
      pg_catalog.format('after: %s', coalesce(next_runs.after::text, 'NULL')));
  end if;
  v_cron := queue._cron_parse(next_runs.cron);
  perform queue._check_timezone(next_runs.timezone);
  for v_i in 1..next_runs.n loop
    v_run := queue._cron_next(v_cron, next_runs.timezone, v_run);
    if v_run is null and v_i = 1 then
      perform queue._cron_never(next_runs.cron, next_runs.timezone);
    end if;
    exit when v_run is null;
    return next v_run;
  end loop;
end $$;

comment on function queue.next_runs(text, text, timestamptz, int) is
  'The next n times at which a cron expression runs in a time zone, ascending, later than after.';

-- Parses an expression.
-- Raises: 22023, naming the field and what is allowed there.
-- Invariant: some date matches the result, so every search for one ends.
create or replace function queue._cron_parse(cron text)
returns bigint[] language plpgsql immutable parallel safe security invoker as $$
declare
  v_blanks constant text := pg_catalog.chr(9) || pg_catalog.chr(10) || pg_catalog.chr(13);
  v_text text;
  v_every text[];
  v_fields text[];
  v_cron bigint[];
begin
  if cron is null or pg_catalog.octet_length(cron) > 1000 then
    perform queue._cron_refuse(cron, null, null, null);
  end if;
  v_text := pg_catalog.upper(
    pg_catalog.btrim(pg_catalog.regexp_replace(pg_catalog.translate(cron, v_blanks, '   '), ' +', ' ', 'g')) collate "C");
  v_every := pg_catalog.regexp_match(
    v_text, '^EVERY (?:([0-9]{1,9}) )?(SECOND|MINUTE|HOUR|DAY)S?$');
  if v_every is not null then
    v_cron := array[
      coalesce(v_every[1], '1')::bigint * case v_every[2]
        when 'SECOND' then 1 when 'MINUTE' then 60 when 'HOUR' then 3600 else 86400 end,
      0, 0, 0, 0, 0, 0, 0];
    if v_cron[1] not between 1 and 315360000 then
      perform queue._cron_refuse(cron, null, null, 'An interval is 1 second to 3,650 days.');
    end if;
    return v_cron;
  end if;

  v_fields := pg_catalog.string_to_array(case v_text
    when '@HOURLY' then '0 * * * *'
    when '@DAILY' then '0 0 * * *'
    when '@MIDNIGHT' then '0 0 * * *'
    when '@WEEKLY' then '0 0 * * 0'
    when '@MONTHLY' then '0 0 1 * *'
    when '@YEARLY' then '0 0 1 1 *'
    when '@ANNUALLY' then '0 0 1 1 *'
    else v_text end, ' ');
  if pg_catalog.cardinality(v_fields) = 5 then
    v_fields := array['0'] || v_fields;
  end if;
  if pg_catalog.cardinality(v_fields) <> 6 then
    perform queue._cron_refuse(cron, null, null, null);
  end if;

  v_cron := array[
    0,
    queue._cron_field(cron, 1, v_fields[1]),
    queue._cron_field(cron, 2, v_fields[2]),
    queue._cron_field(cron, 3, v_fields[3]),
    queue._cron_field(cron, 4, v_fields[4]),
    queue._cron_field(cron, 5, v_fields[5]),
    queue._cron_field(cron, 6, v_fields[6]),
    case when v_fields[4] like '*%' or v_fields[6] like '*%' then 1 else 0 end
    + case when v_fields[2] like '*%' or v_fields[3] like '*%' then 2 else 0 end];

  -- 28 years hold every month with every weekday as its first, leap years included
  for v_month in 0..335 loop
    if (v_cron[6] >> (v_month % 12)) & 1 = 1
      and queue._cron_days(
        v_cron, pg_catalog.make_date(2000 + v_month / 12, v_month % 12 + 1, 1)) <> 0
    then
      return v_cron;
    end if;
  end loop;
  perform queue._cron_refuse(cron, null, pg_catalog.concat_ws(' ', variadic v_fields[4:6]),
    'No such date exists in any year: change day of month, month or day of week.');
  return null;
end $$;

-- The bit mask of a field, 1 (second) to 6 (day of week), as _cron_parse keeps it.
-- Raises: 22023.
create or replace function queue._cron_field(cron text, field int, spec text)
returns bigint language plpgsql immutable parallel safe security invoker as $$
declare
  v_low constant int := (array[0, 0, 0, 1, 1, 0])[field];
  v_high constant int := (array[59, 59, 23, 31, 12, 7])[field];
  v_names constant text[] := case field
    when 5 then array['JAN', 'FEB', 'MAR', 'APR', 'MAY', 'JUN',
                      'JUL', 'AUG', 'SEP', 'OCT', 'NOV', 'DEC']
    when 6 then array['SUN', 'MON', 'TUE', 'WED', 'THU', 'FRI', 'SAT'] end;
  v_item text;
  v_suffix text;
  v_match text[];
  v_from int;
  v_to int;
  v_step int;
  v_shift int := -v_low;
  v_mask bigint := 0::bigint;
begin
  foreach v_item in array pg_catalog.string_to_array(spec, ',') loop
    if field = 4 and v_item like 'L%' then
      v_match := pg_catalog.regexp_match(v_item, '^L-([1-9]|[12][0-9]|30)$');
      v_mask := v_mask | (1::bigint << case
        when v_match is not null then 31 + v_match[1]::int
        when v_item = 'L' then 31
        when v_item = 'LW' then 62
        else queue._cron_refuse(cron, field, v_item, null) end);
      continue;
    elsif field = 6 then
      v_suffix := coalesce(pg_catalog.substring(v_item, '^(?:[0-7]|[A-Z]{3})(L|#[1-5])$'), '');
      v_shift := case v_suffix
        when '' then 0 when 'L' then 42 else 7 * pg_catalog.right(v_suffix, 1)::int end;
    end if;

    v_match := pg_catalog.regexp_match(
      pg_catalog.left(v_item, pg_catalog.length(v_item) - coalesce(pg_catalog.length(v_suffix), 0)),
      '^(?:([*])|([0-9]{1,4}|[A-Z]{3})(?:-([0-9]{1,4}|[A-Z]{3}))?)(?:/([0-9]{1,4}))?$');
    v_from := case
      when v_match[1] = '*' then v_low
      when v_match[2] ~ '^[0-9]' then v_match[2]::int
      else pg_catalog.array_position(v_names, v_match[2]) - 1 + v_low end;
    v_to := case
      when v_match[1] = '*' then v_high
      when v_match[3] ~ '^[0-9]' then v_match[3]::int
      when v_match[3] = 'SUN' and v_from > 0 then 7
      when v_match[3] is not null then
        pg_catalog.array_position(v_names, v_match[3]) - 1 + v_low
      when v_match[4] is not null then v_high
      else v_from end;
    v_step := coalesce(v_match[4], '1')::int;
    if v_from is null or v_to is null or v_step = 0
      or v_from not between v_low and v_high or v_to not between v_low and v_high
    then
      perform queue._cron_refuse(cron, field, v_item, null);
    elsif v_from > v_to then
      perform queue._cron_refuse(cron, field, v_item, 'A range goes upwards: write ' || case
        when field = 6 and v_from = 7 then ''
        when field = 6 then v_from || '-6,'
        else v_from || '-' || v_high || ',' end || v_low || '-' || v_to || ' instead.');
    end if;

    for v_value in v_from..v_to by v_step loop
      v_mask := v_mask
        | (1::bigint << (v_shift + case field when 6 then v_value % 7 else v_value end));
    end loop;
  end loop;
  if v_mask = 0 then
    perform queue._cron_refuse(cron, field, spec, null);
  end if;
  return v_mask;
end $$;

-- The first run later than `after`. Null if there is none in a hundred years: only where daylight
-- saving skips every time that an expression which follows elapsed time names.
-- Invariant: a run is a whole second.
create or replace function queue._cron_next(cron bigint[], timezone text, after timestamptz)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_after timestamptz := pg_catalog.date_trunc('second', after);
  v_epoch bigint;
begin
  if cron[1] > 0 then
    v_epoch := pg_catalog.date_part('epoch', v_after)::bigint;
    return pg_catalog.to_timestamp(
      (v_epoch - (v_epoch % cron[1] + cron[1]) % cron[1] + cron[1])::double precision);
  elsif timezone = 'UTC' then
    return queue._cron_local(cron, (v_after at time zone 'UTC') + interval '1 second')
      at time zone 'UTC';
  elsif cron[8] & 2 = 0 then
    return queue._cron_next_fixed(cron, timezone, v_after);
  else
    return queue._cron_next_elapsed(cron, timezone, v_after);
  end if;
end $$;

-- The first run later than the whole second `after` of an expression with fixed times: each
-- matching local time runs once, at the first instant at which clocks have reached it.
-- For every time in a gap that is the first instant after the gap, and for one that comes twice
-- its first pass. So a local time is still to come if it is later than any that clocks have shown
-- up to `after`; that is not what they show at `after` if they were set back just before.
create or replace function queue._cron_next_fixed(cron bigint[], timezone text, after timestamptz)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_local timestamp := after at time zone timezone;
  v_offset interval := v_local - (after at time zone 'UTC');
  v_earlier timestamptz := after - interval '24 hours';
  v_old_offset interval := (v_earlier at time zone timezone) - (v_earlier at time zone 'UTC');
  v_run timestamptz;
  v_first timestamptz;
begin
  if v_old_offset > v_offset then
    v_local := greatest(v_local, (queue._cron_change(timezone, v_earlier, after)
      at time zone 'UTC') + v_old_offset - interval '1 second');
  end if;
  v_local := queue._cron_local(cron, v_local + interval '1 second');

  -- PostgreSQL reads a time that comes twice as the second one, a time in a gap by the old offset
  v_run := v_local at time zone timezone;
  v_offset := (v_run at time zone timezone) - (v_run at time zone 'UTC');
  v_earlier := v_run - interval '24 hours';
  v_old_offset := (v_earlier at time zone timezone) - (v_earlier at time zone 'UTC');
  if v_old_offset > v_offset then
    v_first := (v_local - v_old_offset) at time zone 'UTC';
    if v_first at time zone timezone = v_local then
      return v_first;
    end if;
  elsif v_old_offset < v_offset and v_run at time zone timezone <> v_local then
    return queue._cron_change(timezone, v_earlier, v_run);
  end if;
  return v_run;
end $$;

-- The first instant later than the whole second `after` whose local time matches; null as in
-- _cron_next.
-- The search goes from one stretch of constant offset to the next. A change of offset matters only
-- in the 24 hours after the point reached (clocks set back show earlier times again) and in those
-- before the match (clocks set forward get there sooner): what lies between is jumped over.
create or replace function queue._cron_next_elapsed(
  cron bigint[], timezone text, after timestamptz)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_at timestamptz := after + interval '1 second';
  v_local timestamp;
  v_offset interval;
  v_run timestamptz;
  v_until timestamptz;
begin
  while v_at < after + interval '876600 hours' loop
    v_local := v_at at time zone timezone;
    v_offset := v_local - (v_at at time zone 'UTC');
    v_run := (queue._cron_local(cron, v_local) - v_offset) at time zone 'UTC';
    v_until := least(v_run, v_at + interval '24 hours');
    if (v_until at time zone timezone) - (v_until at time zone 'UTC') <> v_offset then
      v_at := queue._cron_change(timezone, v_at, v_until);
    elsif v_until = v_run then
      return v_run;
    else
      v_at := greatest(v_until, v_run - interval '25 hours');
    end if;
  end loop;
  return null;
end $$;

-- The instant after `low`, up to `high`, at which the zone's offset changes.
-- Invariant: both are whole seconds, at most 24 hours apart, and differ in offset.
create or replace function queue._cron_change(timezone text, low timestamptz, high timestamptz)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_offset constant interval := (low at time zone timezone) - (low at time zone 'UTC');
  v_low timestamptz := low;
  v_high timestamptz := high;
  v_middle timestamptz;
begin
  while v_high > v_low + interval '1 second' loop
    v_middle := v_low + pg_catalog.date_trunc('second', (v_high - v_low) / 2);
    if (v_middle at time zone timezone) - (v_middle at time zone 'UTC') = v_offset then
      v_low := v_middle;
    else
      v_high := v_middle;
    end if;
  end loop;
  return v_high;
end $$;

-- The first matching local time not before the given whole second, daylight saving left aside.
-- Ends because some date matches (_cron_parse), and dates repeat every 400 years.
create or replace function queue._cron_local(cron bigint[], not_before timestamp)
returns timestamp language plpgsql immutable parallel safe security invoker as $$
declare
  v_year int := pg_catalog.date_part('year', not_before)::int;
  v_month int := pg_catalog.date_part('month', not_before)::int;
  v_day int := pg_catalog.date_part('day', not_before)::int;
  v_hour int;
  v_minute int;
  v_next int;
  v_days bigint;
begin
  if (cron[6] >> (v_month - 1)) & 1 = 1 then
    v_days := queue._cron_days(cron, pg_catalog.make_date(v_year, v_month, 1));
    if (v_days >> (v_day - 1)) & 1 = 1 then
      v_hour := pg_catalog.date_part('hour', not_before)::int;
      if (cron[4] >> v_hour) & 1 = 1 then
        v_minute := pg_catalog.date_part('minute', not_before)::int;
        if (cron[3] >> v_minute) & 1 = 1 then
          v_next := queue._cron_bit(cron[2], pg_catalog.date_part('second', not_before)::int);
          if v_next is not null then
            return pg_catalog.make_timestamp(v_year, v_month, v_day, v_hour, v_minute, v_next);
          end if;
        end if;
        v_next := queue._cron_bit(cron[3], v_minute + 1);
        if v_next is not null then
          return pg_catalog.make_timestamp(
            v_year, v_month, v_day, v_hour, v_next, queue._cron_bit(cron[2], 0));
        end if;
      end if;
      v_next := queue._cron_bit(cron[4], v_hour + 1);
      if v_next is not null then
        return pg_catalog.make_timestamp(v_year, v_month, v_day,
          v_next, queue._cron_bit(cron[3], 0), queue._cron_bit(cron[2], 0));
      end if;
    end if;
    v_next := queue._cron_bit(v_days, v_day);
  end if;
  while v_next is null loop
    v_month := queue._cron_bit(cron[6], v_month) + 1;
    if v_month is null then
      v_year := v_year + 1;
      v_month := queue._cron_bit(cron[6], 0) + 1;
    end if;
    v_next := queue._cron_bit(
      queue._cron_days(cron, pg_catalog.make_date(v_year, v_month, 1)), 0);
  end loop;
  return pg_catalog.make_timestamp(v_year, v_month, v_next + 1,
    queue._cron_bit(cron[4], 0), queue._cron_bit(cron[3], 0), queue._cron_bit(cron[2], 0));
end $$;

-- The days that match in the month beginning on `first`: bit 0 is the 1st.
create or replace function queue._cron_days(cron bigint[], first date)
returns bigint language plpgsql immutable parallel safe security invoker as $$
declare
  v_length int := 33 - pg_catalog.date_part('day', first + 32)::int;
  v_weekday int := pg_catalog.date_part('dow', first)::int;
  v_by_month bigint := cron[5] & 2147483647;
  v_by_week bigint := cron[7] & 127;
  v_week bigint;
begin
  -- the mask's week, turned to begin on the weekday of the 1st, five times
  v_by_week := (((v_by_week | (v_by_week << 7)) >> v_weekday) & 127) * 270549121;
  if cron[7] > 127 then
    for v_nth in 1..5 loop
      v_week := (cron[7] >> (7 * v_nth)) & 127;
      v_by_week := v_by_week
        | ((((v_week | (v_week << 7)) >> v_weekday) & 127) << (7 * (v_nth - 1)));
    end loop;
    v_week := cron[7] >> 42;
    v_by_week := v_by_week
      | ((((v_week | (v_week << 7)) >> ((v_weekday + v_length) % 7)) & 127) << (v_length - 7));
  end if;
  if cron[5] > 2147483647 then
    for v_back in 0..v_length - 1 loop
      if (cron[5] >> (31 + v_back)) & 1 = 1 then
        v_by_month := v_by_month | (1::bigint << (v_length - 1 - v_back));
      end if;
    end loop;
    if cron[5] >> 62 = 1 then
      v_by_month := v_by_month | (1::bigint << (v_length - 1
        - greatest(pg_catalog.date_part('isodow', first + v_length - 1)::int - 5, 0)));
    end if;
  end if;
  return case when cron[8] & 1 = 1 then v_by_month & v_by_week else v_by_month | v_by_week end
    & ((1::bigint << v_length) - 1);
end $$;

-- The lowest bit set in the mask from bit `low` on; null if there is none.
create or replace function queue._cron_bit(mask bigint, low int)
returns int language plpgsql immutable parallel safe security invoker as $$
declare
  v_rest bigint := mask >> low;
begin
  if v_rest = 0 then
    return null;
  end if;
  return low + 64 - pg_catalog.length(pg_catalog.rtrim(v_rest::bit(64)::text, '0'));
end $$;

-- Refuses a time zone that PostgreSQL does not know, and what only looks like one to it:
-- abbreviations, one offset all year (CET would have no summer time), and POSIX rules (UTC+3 would
-- be three hours behind UTC).
-- Raises: 22023.
create or replace function queue._check_timezone(timezone text)
returns void language plpgsql stable parallel unsafe security invoker as $$
begin
  if pg_catalog.upper(timezone) in ('UTC', 'GMT', 'ETC/UTC') then
    return;
  end if;
  if timezone !~ '[0-9]' and not exists (
      select from pg_catalog.pg_timezone_abbrevs a where a.abbrev = pg_catalog.upper(timezone))
    or timezone ~* '^Etc/GMT(0|[+-]0|[+]([1-9]|1[0-2])|-([1-9]|1[0-4]))$'
    or timezone ~* '^(EST5E|CST6C|MST7M|PST8P)DT$'
  then
    begin
      perform pg_catalog.now() at time zone timezone;
      return;
    exception when invalid_parameter_value then
      null;
    end;
  end if;
  perform queue._invalid('unknown time zone',
    'Name a zone of pg_timezone_names, such as UTC or Europe/Paris: no abbreviation, no offset.',
    pg_catalog.format('timezone: %s', coalesce(pg_catalog.left(timezone, 200), 'NULL')));
end $$;

-- Raises: 22023, for a bad expression. Without a hint of its own it says what is allowed.
create or replace function queue._cron_refuse(cron text, field int, part text, hint text)
returns int language plpgsql immutable parallel safe security invoker as $$
begin
  perform queue._invalid('invalid cron expression',
    coalesce(hint, case
      when field is null then
        'Give minute, hour, day of month, month and day of week, or these with seconds before '
        'them; or @hourly, @daily, @midnight, @weekly, @monthly, @yearly or @annually; '
        'or every N seconds, minutes, hours or days.'
      else 'Allowed are ' || (array[
        '0-59', '0-59', '0-23', '1-31, L (the last day), L-1 to L-30 and LW (the last weekday)',
        '1-12 and JAN to DEC',
        '0-7 (0 and 7 are Sunday), SUN to SAT, FRI#2 (the second) and FRIL (the last)'])[field]
        || '; *; ranges 1-5; steps */2, 1-5/2 and 1/2; and lists of these, with commas.'
      end),
    pg_catalog.concat_ws(', ',
      'cron: ' || coalesce(pg_catalog.quote_literal(pg_catalog.left(cron, 200)), 'NULL'),
      coalesce((array['second', 'minute', 'hour', 'day of month', 'month', 'day of week'])[field],
        'dates') || ': ' || pg_catalog.quote_literal(pg_catalog.left(part, 100))));
  return null;
end $$;

-- Raises: 22023, for an expression that matches dates but no time that exists in the zone.
create or replace function queue._cron_never(cron text, timezone text)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  perform queue._cron_refuse(cron, null, null, pg_catalog.format(
    'It never runs: in %s the clocks skip every time that it names.', timezone));
end $$;

-- sql/75_schedules.sql
-- Recurring runs: schedules, and the jobs that they defer.
--
-- A schedule's row says which run is the next that nobody has dealt with (next_run_at). Admission
-- (30_admission.sql) finds the row when it is due, defers the job or notes why it doesn't, and sets
-- next_run_at to a later run, all in one transaction under ADM (76_runs.sql). next_run_at only ever rises,
-- so there is at most one job for (name, run_at), whoever looks how often, and wherever the clock was set
-- to. Rows of queue.schedule are written under ADM only; queue.schedule_run is appended to.

-- Locks: ADM, waited for, only where something changes. Raises: 22023, QJ008.
create or replace function queue.schedule(
  name text, cron text, task text, args jsonb default '{}', timezone text default 'UTC', options jsonb default null)
returns timestamptz language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_args jsonb := coalesce(schedule.args, '{}');
  v_options jsonb;
  v_parsed bigint[];
  v_old record;
  v_now timestamptz;
  v_is_enabled boolean;
  v_next_run_at timestamptz;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  perform queue._check_isolation();
  perform queue._check_name('name', schedule.name);
  perform queue._check_name('task', schedule.task);
  if jsonb_typeof(v_args) <> 'object' then
    perform queue._invalid('args must be a JSON object', 'Pass the arguments by name: {"name": value}.', 'type: ' || jsonb_typeof(v_args));
  elsif v_args ? 'scheduled_for' then
    perform queue._invalid('args may not hold scheduled_for', 'Each run adds it: the time that the run is for.');
  end if;
  perform queue._check_size('args', v_args);
  v_options := queue._check_schedule_options(schedule.options, v_args);
  v_parsed := queue._cron_parse(schedule.cron);
  perform queue._check_timezone(schedule.timezone);
  if queue._cron_next(v_parsed, schedule.timezone, clock_timestamp()) is null then
    perform queue._cron_never(schedule.cron, schedule.timezone);
  end if;
  for v_look in 1 .. 2 loop
    select s.* into v_old from queue.schedule s where s.name = schedule.name;
    if (v_old.cron, v_old.timezone, v_old.task, v_old.args, v_old.options)
       = (schedule.cron, schedule.timezone, schedule.task, v_args, v_options) then
      return v_old.next_run_at;
    elsif v_look = 1 then
      perform queue._lock_schedules();
    end if;
  end loop;
  v_now := clock_timestamp();
  v_is_enabled := coalesce((v_options ->> 'enabled')::boolean, true);
  if v_is_enabled and v_old.next_run_at is not null and (v_old.cron, v_old.timezone) = (schedule.cron, schedule.timezone) then
    v_next_run_at := v_old.next_run_at;
  else
    if v_old.next_run_at <= v_now then
      perform queue._note_skipped(schedule.name, v_old.next_run_at, 'changed', format('the schedule was changed at %s', v_now));
    end if;
    if v_is_enabled then
      v_next_run_at := queue._cron_next(v_parsed, schedule.timezone, greatest(v_now, v_old.last_run_at));
    end if;
  end if;
  insert into queue.schedule as s (name, due_at, next_run_at, is_enabled, is_plain, skips_overlap, catch_up, max_delay, created_at, changed_at,
                                   cron, parsed, timezone, task, args, options)
  values (schedule.name, greatest(v_next_run_at, case when v_next_run_at is not null then v_now end), v_next_run_at, v_is_enabled,
          v_options - (array['queue', 'priority'] || queue._schedule_keys()) = '{}' and octet_length(v_args::text) <= 1900, coalesce(v_options ->> 'overlap' = 'skip', false),
          coalesce(v_options ->> 'catch_up', 'latest'), queue._interval('max_delay', v_options -> 'max_delay'), v_now, v_now,
          schedule.cron, v_parsed, schedule.timezone, schedule.task, v_args, v_options)
  on conflict on constraint schedule_pkey do update
    set (due_at, next_run_at, is_enabled, is_plain, skips_overlap, catch_up, max_delay, changed_at, cron, parsed, timezone, task, args, options, reason)
      = (excluded.due_at, excluded.next_run_at, excluded.is_enabled, excluded.is_plain, excluded.skips_overlap, excluded.catch_up,
         excluded.max_delay, excluded.changed_at, excluded.cron, excluded.parsed, excluded.timezone, excluded.task, excluded.args,
         excluded.options, null);
  perform queue._announce();
  return v_next_run_at;
end $$;
comment on function queue.schedule(text, text, text, jsonb, text, jsonb) is
  'Defers a job at each run of a cron expression in a time zone, its args with scheduled_for. The same arguments again change nothing, others take effect at once. Returns the next run, NULL if disabled. options: those of defer, queue, priority, lock, queueing_lock, concurrency_key, concurrency_limit, deadline (an interval from the run''s time), and catch_up (none | latest | all), max_delay (1 second to 4,000 years), overlap (allow | skip), enabled, source.';

-- Locks: ADM, waited for. Raises: 22023, QJ008.
create or replace function queue.unschedule(name text)
returns boolean language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  perform queue._check_isolation();
  perform queue._check_name('name', unschedule.name);
  perform queue._lock_admission(true);
  delete from queue.schedule s where s.name = unschedule.name;
  return found;
end $$;
comment on function queue.unschedule(text) is
  'Removes a schedule. Jobs that it has deferred stay, and for 7 days its runs. Returns whether there was one.';

-- Locks: ADM, waited for. Raises: 22023 (no such schedule too), QJ008.
create or replace function queue.enable_schedule(name text, enabled boolean default true)
returns timestamptz language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_old record;
  v_now timestamptz;
  v_next_run_at timestamptz;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  perform queue._check_isolation();
  perform queue._check_name('name', enable_schedule.name);
  if enable_schedule.enabled is null then
    perform queue._invalid('enabled must be true or false', 'Leave it out to enable the schedule.');
  end if;
  perform queue._lock_schedules();
  select s.is_enabled, s.next_run_at, s.last_run_at, s.parsed, s.timezone into v_old from queue.schedule s where s.name = enable_schedule.name;
  if not found then
    perform queue._no_schedule(enable_schedule.name);
  elsif v_old.is_enabled = enable_schedule.enabled then
    return v_old.next_run_at;
  end if;
  v_now := clock_timestamp();
  if enable_schedule.enabled then
    v_next_run_at := queue._cron_next(v_old.parsed, v_old.timezone, greatest(v_now, v_old.last_run_at));
  elsif v_old.next_run_at <= v_now then
    perform queue._note_skipped(enable_schedule.name, v_old.next_run_at, 'changed', format('the schedule was disabled at %s', v_now));
  end if;
  update queue.schedule s
  set is_enabled = enable_schedule.enabled, next_run_at = v_next_run_at, due_at = v_next_run_at, reason = null, changed_at = v_now
  where s.name = enable_schedule.name;
  perform queue._announce();
  return v_next_run_at;
end $$;
comment on function queue.enable_schedule(text, boolean) is
  'Enables a schedule, or disables it, until queue.schedule changes it. Runs from now on; nothing is made up for. Returns the next run, NULL if disabled.';

-- Locks: as defer; then ADM, waited for. Raises: as defer; 22023 where there is no such schedule; QJ008.
create or replace function queue.run_now(name text)
returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_schedule record;
  v_run_at timestamptz := clock_timestamp();
  v_id bigint;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  perform queue._check_isolation();
  perform queue._check_name('name', run_now.name);
  select s.* into v_schedule from queue.schedule s where s.name = run_now.name;
  if not found then
    perform queue._no_schedule(run_now.name);
  end if;
  v_id := queue._defer_run(v_schedule.task, v_schedule.args, v_schedule.options, v_run_at, v_schedule.timezone);
  perform queue._lock_admission(true);
  insert into queue.schedule_run (name, run_at, decided_at, job_id, is_manual)
  values (run_now.name, v_run_at, clock_timestamp(), v_id, true)
  on conflict on constraint schedule_run_pkey do nothing;
  update queue.schedule s set last_job_id = v_id where s.name = run_now.name;
  perform queue._announce();
  return v_id;
end $$;
comment on function queue.run_now(text) is
  'Defers a schedule''s job now, beside its runs, even if it is disabled or its last job is unfinished. Returns the job''s id.';

-- The keys of a schedule's options that are not defer's.
create or replace function queue._schedule_keys()
returns text[] language plpgsql immutable parallel safe security invoker as $$
begin
  return array['catch_up', 'max_delay', 'overlap', 'enabled', 'source'];
end $$;

-- Returns the options without those that are JSON null, and checks that args fill every {field} in them.
-- Raises: 22023.
create or replace function queue._check_schedule_options(p_options jsonb, p_args jsonb)
returns jsonb language plpgsql stable parallel unsafe security invoker as $$
declare
  v_options jsonb := '{}'::jsonb;
  v_args jsonb := p_args || '{"scheduled_for": "2000-01-01T00:00:00+00:00"}';
  v_names constant text[] := array['queue', 'priority', 'lock', 'queueing_lock', 'deadline', 'concurrency_key', 'concurrency_limit'];
  v_key text;
begin
  if p_options is null or jsonb_typeof(p_options) = 'null' then
    return v_options;
  end if;
  perform queue._check_keys('options', p_options, queue._schedule_keys() || v_names || queue._option_keys());
  select coalesce(jsonb_object_agg(e.key, e.value), '{}') into v_options
  from jsonb_each(p_options) e where e.value <> 'null' or e.key = 'max_progress';
  perform queue._check_types('options', v_options);
  foreach v_key in array array['catch_up', 'overlap'] loop
    if v_options ? v_key and (
      jsonb_typeof(v_options -> v_key) <> 'string'
      or not v_options ->> v_key = any (case v_key when 'overlap' then '{allow,skip}'::text[] else '{none,latest,all}'::text[] end))
    then
      perform queue._invalid(v_key || ' is not one of its values', 'Allowed: ' || case v_key when 'overlap' then 'allow, skip.' else 'none, latest, all.' end,
                             'value: ' || left((v_options -> v_key)::text, 200));
    end if;
  end loop;
  if coalesce(jsonb_typeof(v_options -> 'enabled'), 'boolean') <> 'boolean' then
    perform queue._invalid('enabled must be true or false', 'Pass a JSON boolean.');
  elsif queue._interval('max_delay', v_options -> 'max_delay') < interval '1 s' then
    perform queue._invalid('max_delay is too short', 'A run is skipped when it is later than 1 second or more.');
  elsif v_options ? 'source' then
    if jsonb_typeof(v_options -> 'source') <> 'string' then
      perform queue._invalid('source must be text', 'Name the program that registers this schedule.');
    end if;
    perform queue._check_name('source', v_options ->> 'source');
  end if;
  perform queue._interval('deadline', v_options -> 'deadline');
  if v_options ->> 'queue' <> '' then
    perform queue._check_queue(v_options ->> 'queue');
  end if;
  foreach v_key in array array['lock', 'queueing_lock', 'concurrency_key'] loop
    if v_options ->> v_key <> '' then
      perform queue._fill(v_key, v_options ->> v_key, v_args);
    end if;
  end loop;
  -- the task may have a limit by the time of a run
  perform queue._check_concurrency(v_options ->> 'concurrency_key', coalesce((v_options ->> 'concurrency_limit')::integer, 1), v_options -> 'concurrency');
  perform queue._fill('concurrency_key', c ->> 'key', v_args) from jsonb_array_elements(v_options -> 'concurrency') c;
  return v_options || queue._check_options(v_options - (v_names || queue._schedule_keys()));
end $$;

-- Raises: 22023, always.
create or replace function queue._no_schedule(name text)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  perform queue._invalid('no such schedule', 'queue.schedules lists them.', 'name: ' || left(name, 200));
end $$;

-- Locks: the caller holds ADM.
create or replace function queue._note_skipped(p_name text, p_run_at timestamptz, p_skipped text, p_detail text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  insert into queue.schedule_run (name, run_at, decided_at, is_manual, skipped, detail)
  values (p_name, p_run_at, clock_timestamp(), false, p_skipped, p_detail)
  on conflict on constraint schedule_run_pkey do nothing;
end $$;

-- Takes ADM for a change of a schedule, whose due_at may not lie before the cursor's: it could after the
-- clock was set back.
create or replace function queue._lock_schedules()
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  perform queue._lock_admission(true);
  with gone as (
    delete from queue.cursor k where k.due_at > clock_timestamp()
    returning k.tick, k.next_xid, k.in_flight, k.high_id, k.has_backlog)
  insert into queue.cursor (tick, next_xid, in_flight, high_id, has_backlog, due_at)
  select g.tick + 1, g.next_xid, g.in_flight, g.high_id, g.has_backlog, '-infinity' from gone g;
end $$;

-- Has paused schedules looked at again.
-- Locks: the caller holds ADM.
create or replace function queue._resume_schedules()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.schedule s set due_at = clock_timestamp() where s.reason = 'paused' and s.due_at is not null;
end $$;

-- What check() says of schedules.
create or replace function queue._check_schedules()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select 'a schedule that nobody looks at'::text, null::bigint, format('%s: due %s', s.name, s.due_at)
    from queue.schedule s cross join (select k.due_at from queue.cursor k order by k.tick desc limit 1) k
    where s.is_enabled and (s.due_at is null or s.due_at < least(k.due_at, clock_timestamp()));
  return query
    select 'a schedule whose next run has been'::text, null::bigint, format('%s: %s', s.name, s.next_run_at)
    from queue.schedule s where s.next_run_at <= s.last_run_at;
end $$;

-- sql/76_runs.sql
-- Running schedules that are due: which runs happen, which are skipped, and what is noted of them.

-- Runs what is due, at most about p_slice runs. Returns the new mark: nothing lies before it.
-- Locks: the caller holds ADM.
create or replace function queue._run_due_schedules(p_mark timestamptz, p_slice integer, out mark timestamptz, out runs integer, out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_rows tid[];
  v_dues timestamptz[];
  v_done record;
  v_is_done boolean;
  v_row tid;
  v_error text;
begin
  select array_agg(d.row_id order by d.due_at, d.timezone, d.parsed), array_agg(d.due_at order by d.due_at)
  into v_rows, v_dues
  from (select s.ctid as row_id, s.due_at, s.timezone, s.parsed from queue.schedule s
        where s.due_at >= p_mark and s.due_at <= v_now order by s.due_at limit p_slice) d;
  mark := v_now;
  runs := 0;
  has_more := false;
  if v_rows is null then
    return;
  end if;
  begin
    v_done := queue._run_schedules(v_rows, v_now, p_slice);
    v_is_done := true;
  exception when others then
    v_is_done := false;
  end;
  if v_is_done then
    runs := v_done.runs;
    has_more := v_done.has_more;
    if v_done.looked_at < cardinality(v_rows) then
      mark := v_dues[v_done.looked_at + 1];
    end if;
  else
    -- one of them can't be run at all: it must not stop the others
    foreach v_row in array v_rows loop
      begin
        v_done := queue._run_schedules(array[v_row], v_now, p_slice);
        runs := runs + v_done.runs;
        has_more := has_more or v_done.has_more;
      exception when others then
        v_error := format('error: %s (%s)', left(sqlerrm, 1000), sqlstate);
        update queue.schedule s set due_at = v_now + interval '1 minute', reason = v_error where s.ctid = v_row;
        raise warning 'pgdefer: a schedule can''t be run: %', v_error;
      end;
    end loop;
  end if;
  if mark = v_now and cardinality(v_rows) >= p_slice then
    mark := v_dues[cardinality(v_dues)];
  end if;
  has_more := has_more or mark < v_now;
  if runs > 0 then
    perform queue._announce();
  end if;
end $$;

-- Runs the schedules in the rows, until p_budget jobs are deferred; looked_at: how many rows it came to.
-- Plain jobs and all notes are written at the end, in one statement each.
-- Locks: the caller holds ADM. Queueing locks are waited for 5 ms, then the run is put off.
create or replace function queue._run_schedules(
  p_rows tid[], p_now timestamptz, p_budget integer, out looked_at integer, out runs integer, out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
  v_has_pause boolean := exists (select from queue.pause p where p.is_paused and (p.until is null or p.until > p_now));
  v_lock_timeout text := current_setting('lock_timeout');
  v_plan record;
  v_plan_of record;
  v_run_at timestamptz;
  v_next_run_at timestamptz;
  v_overlaps integer;
  v_is_new boolean;
  v_is_busy boolean;
  v_until timestamptz;
  v_queue text;
  v_id bigint;
  v_skipped text;
  v_detail text;
  v_error text;
  v_text text;
  v_text_of record;
  v_prune text[] := '{}'::text[];
  -- plain jobs
  v_ids bigint[] := '{}'::bigint[];
  v_tasks text[] := '{}'::text[];
  v_args jsonb[] := '{}'::jsonb[];
  v_queues text[] := '{}'::text[];
  v_priorities integer[] := '{}'::integer[];
  -- notes
  v_names text[] := '{}'::text[];
  v_run_ats timestamptz[] := '{}'::timestamptz[];
  v_job_ids bigint[] := '{}'::bigint[];
  v_skips text[] := '{}'::text[];
  v_details text[] := '{}'::text[];
  -- schedules
  v_dues timestamptz[] := '{}'::timestamptz[];
  v_nexts timestamptz[] := '{}'::timestamptz[];
  v_lasts timestamptz[] := '{}'::timestamptz[];
  v_last_jobs bigint[] := '{}'::bigint[];
  v_reasons text[] := '{}'::text[];
begin
  looked_at := 0;
  runs := 0;
  has_more := false;
  select null::bigint[] as parsed, null::text as timezone, null::timestamptz as run_at, null::text as catch_up, null::interval as max_delay into v_plan_of;
  select null::text as timezone, null::timestamptz as run_at into v_text_of;
  for v in
    select s.name, s.next_run_at, s.last_run_at, s.last_job_id, s.is_plain, s.skips_overlap, s.catch_up, s.max_delay, s.parsed, s.timezone,
      s.task, s.args, s.options, t.is_plain as task_is_plain, t.queue as task_queue, t.priority as task_priority
    from unnest(p_rows) with ordinality u (row_id, n)
    cross join lateral (select s.* from queue.schedule s where s.ctid = u.row_id offset 0) s
    left join lateral (select t.is_plain, t.queue, t.priority from queue.task t where t.name = s.task offset 0) t on true
    order by u.n
  loop
    exit when runs >= p_budget;
    looked_at := looked_at + 1;
    v_queue := coalesce(nullif(coalesce(v.options ->> 'queue', v.task_queue), ''), 'default');
    if v_has_pause then
      v_until := greatest(queue._paused_until(v_queue), queue._task_paused_until(v.task, v_queue));
      if v_until > p_now then
        -- once a minute, as the task's queue may change
        v_dues := v_dues || least(v_until, p_now + interval '1 minute');
        v_nexts := v_nexts || v.next_run_at;
        v_lasts := v_lasts || v.last_run_at;
        v_last_jobs := v_last_jobs || v.last_job_id;
        v_reasons := v_reasons || 'paused'::text;
        continue;
      end if;
    end if;
    -- many have the same runs
    if (v.next_run_at, v.parsed, v.timezone, v.catch_up) = (v_plan_of.run_at, v_plan_of.parsed, v_plan_of.timezone, v_plan_of.catch_up)
      and v.max_delay is not distinct from v_plan_of.max_delay
    then
      null;
    else
      select * into v_plan from queue._plan_runs(v.parsed, v.timezone, v.next_run_at, p_now, v.catch_up, v.max_delay);
      select v.next_run_at as run_at, v.parsed, v.timezone, v.catch_up, v.max_delay into v_plan_of;
    end if;
    for i in 1 .. cardinality(v_plan.skips) loop
      v_names := v_names || v.name;
      v_run_ats := v_run_ats || v_plan.skips[i];
      v_job_ids := v_job_ids || null::bigint;
      v_skips := v_skips || v_plan.skipped;
      v_details := v_details || case when i = cardinality(v_plan.skips) and v_plan.skipped_to > v_plan.skips[i]
                                     then format('and every run up to %s', queue._rfc3339(v_plan.skipped_to, v.timezone)) end;
      v.last_run_at := v_plan.skipped_to;
    end loop;
    v_next_run_at := v_plan.next_run_at;
    v_overlaps := 0;
    v_is_new := false;
    v_is_busy := false;
    v_error := null;
    foreach v_run_at in array v_plan.runs loop
      continue when exists (select from queue.schedule_run r where r.name = v.name and r.run_at = v_run_at);
      v_id := null;
      v_skipped := null;
      v_detail := null;
      v_error := null;
      if v.skips_overlap and (
        v_is_new or exists (select from queue.job j where j.id = v.last_job_id and not exists (select from queue.finished f where f.id = j.id)))
      then
        v_skipped := 'overlap';
        v_detail := format('job %s is unfinished', v.last_job_id);
        v_overlaps := v_overlaps + 1;
        if v_overlaps = 10 then
          -- nor will it have ended for the runs that follow
          v.last_run_at := queue._last_run(v.parsed, v.timezone, v_run_at, p_now);
          v_next_run_at := queue._cron_next(v.parsed, v.timezone, v.last_run_at);
          if v.last_run_at > v_run_at then
            v_detail := v_detail || format(', for every run up to %s', queue._rfc3339(v.last_run_at, v.timezone));
          end if;
        end if;
      elsif v.is_plain and v.task_is_plain is not false then
        if (v_run_at, v.timezone) = (v_text_of.run_at, v_text_of.timezone) then
          null;
        else
          v_text := queue._rfc3339(v_run_at, v.timezone);
          select v.timezone as timezone, v_run_at as run_at into v_text_of;
        end if;
        v_id := nextval('queue.job_id_seq');
        v_ids := v_ids || v_id;
        v_tasks := v_tasks || v.task;
        v_args := v_args || (v.args || jsonb_build_object('scheduled_for', v_text));
        v_queues := v_queues || v_queue;
        v_priorities := v_priorities || coalesce((v.options ->> 'priority')::integer, v.task_priority, 0);
      else
        begin
          perform set_config('lock_timeout', '5ms', true);
          v_id := queue._defer_run(v.task, v.args, v.options, v_run_at, v.timezone);
          perform set_config('lock_timeout', v_lock_timeout, true);
        exception
          when lock_not_available then
            v_is_busy := true;
          when sqlstate 'QJ004' then
            v_skipped := 'queueing_lock';
            get stacked diagnostics v_detail = pg_exception_detail;
          when others then
            v_skipped := 'error';
            get stacked diagnostics v_detail = pg_exception_detail;
            v_detail := left(concat_ws(': ', sqlerrm, nullif(v_detail, '')), 1000);
            v_error := format('error: %s (%s)', v_detail, sqlstate);
        end;
      end if;
      exit when v_is_busy;
      v_names := v_names || v.name;
      v_run_ats := v_run_ats || v_run_at;
      v_job_ids := v_job_ids || v_id;
      v_skips := v_skips || v_skipped;
      v_details := v_details || v_detail;
      exit when v_overlaps = 10;
      v.last_run_at := v_run_at;
      if v_id is not null then
        runs := runs + 1;
        v_is_new := true;
        v.last_job_id := v_id;
      end if;
    end loop;
    if v_is_busy then
      -- somebody else is deferring with this queueing lock: the longer that takes, the later another look
      v_dues := v_dues || p_now + greatest(interval '100 ms', least(interval '10 s', (p_now - v_run_at) / 10));
      v_nexts := v_nexts || v_run_at;
      v_reasons := v_reasons || 'queueing_lock'::text;
    else
      v_dues := v_dues || greatest(v_next_run_at, case when v_next_run_at is not null then p_now end);
      v_nexts := v_nexts || v_next_run_at;
      v_reasons := v_reasons || v_error;
      has_more := has_more or coalesce(v_next_run_at <= p_now, false);
    end if;
    v_lasts := v_lasts || v.last_run_at;
    v_last_jobs := v_last_jobs || v.last_job_id;
    if random() < 0.02 then
      v_prune := v_prune || v.name;
    end if;
  end loop;

  insert into queue.log (id, task, args, given)
  select u.id, u.task, u.args, row(u.queue, u.priority, null, null, null, null, null, null, null, null, null, null)::queue.given
  from unnest(v_ids, v_tasks, v_args, v_queues, v_priorities) u (id, task, args, queue, priority);
  insert into queue.schedule_run (name, run_at, decided_at, job_id, is_manual, skipped, detail)
  select u.name, u.run_at, p_now, u.job_id, false, u.skipped, u.detail
  from unnest(v_names, v_run_ats, v_job_ids, v_skips, v_details) u (name, run_at, job_id, skipped, detail)
  on conflict on constraint schedule_run_pkey do nothing;
  update queue.schedule s
  set due_at = u.due_at, next_run_at = u.next_run_at, last_run_at = u.last_run_at, last_job_id = u.last_job_id, reason = u.reason
  from unnest(p_rows[:looked_at], v_dues, v_nexts, v_lasts, v_last_jobs, v_reasons) u (row_id, due_at, next_run_at, last_run_at, last_job_id, reason)
  where s.ctid = u.row_id;
  perform queue._prune_runs(n) from unnest(v_prune) n;
end $$;

-- Defers the job of one run.
-- Locks and errors: as defer.
create or replace function queue._defer_run(p_task text, p_args jsonb, p_options jsonb, p_run_at timestamptz, p_timezone text)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
begin
  return queue._defer_full(
    p_task, p_args || jsonb_build_object('scheduled_for', queue._rfc3339(p_run_at, p_timezone)), p_options ->> 'queue', (p_options ->> 'priority')::integer,
    p_options ->> 'lock', p_options ->> 'queueing_lock', null, p_run_at + queue._interval('deadline', p_options -> 'deadline'), null,
    p_options ->> 'concurrency_key', (p_options ->> 'concurrency_limit')::integer,
    nullif(p_options - (array['queue', 'priority', 'lock', 'queueing_lock', 'deadline', 'concurrency_key', 'concurrency_limit']
                        || queue._schedule_keys()), '{}'));
end $$;

-- What to do at p_now about the runs from p_first on: those to skip and why (the first 10; the
-- last of these stands for all up to skipped_to), those to make (100 at most), and the next one then.
create or replace function queue._plan_runs(
  p_parsed bigint[], p_timezone text, p_first timestamptz, p_now timestamptz, p_catch_up text, p_max_delay interval,
  out skips timestamptz[], out skipped text, out skipped_to timestamptz, out runs timestamptz[], out next_run_at timestamptz)
language plpgsql stable parallel safe security invoker as $$
declare
  -- with catch_up none a run still counts as in time while a busy worker may not have come to it
  v_limit constant timestamptz := p_now - coalesce(p_max_delay, case when p_catch_up = 'none' then interval '15 s' end);
  v_run_at timestamptz := p_first;
  v_end timestamptz;
begin
  skips := '{}';
  runs := '{}';
  if p_first > p_now then
    -- the clock was set back
    next_run_at := p_first;
    return;
  end if;
  next_run_at := queue._cron_next(p_parsed, p_timezone, p_first);
  if coalesce(next_run_at, 'infinity') > p_now and coalesce(v_limit, '-infinity') <= p_first then
    runs := array[p_first];
    return;
  end if;
  -- what lies before v_run_at is skipped
  if p_catch_up <> 'all' and next_run_at <= p_now then
    skipped := 'missed';
    v_run_at := queue._last_run(p_parsed, p_timezone, next_run_at, p_now);
    next_run_at := queue._cron_next(p_parsed, p_timezone, v_run_at);
  end if;
  if v_run_at < v_limit then
    skipped := case when p_max_delay is null then 'missed' else 'max_delay' end;
    v_run_at := case when p_catch_up = 'all' then queue._cron_next(p_parsed, p_timezone, v_limit - interval '1 us') else next_run_at end;
  end if;
  v_end := coalesce(v_run_at, 'infinity');
  v_run_at := p_first;
  while v_run_at < v_end and v_run_at <= p_now loop
    skipped_to := v_run_at;
    if cardinality(skips) = 10 then
      skipped_to := queue._last_run(p_parsed, p_timezone, v_run_at, least(v_end - interval '1 us', p_now));
      v_run_at := v_end;
      exit;
    end if;
    skips := skips || v_run_at;
    v_run_at := queue._cron_next(p_parsed, p_timezone, v_run_at);
  end loop;
  while v_run_at <= p_now and cardinality(runs) < 100 loop
    runs := runs || v_run_at;
    v_run_at := queue._cron_next(p_parsed, p_timezone, v_run_at);
  end loop;
  next_run_at := nullif(v_run_at, 'infinity');
end $$;

-- The last run up to p_to; p_from is one.
-- Each turn halves what is left of the time, so that it takes no longer for runs each second of a year.
create or replace function queue._last_run(p_parsed bigint[], p_timezone text, p_from timestamptz, p_to timestamptz)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_last timestamptz := p_from;
  v_to timestamptz := p_to;
  v_next timestamptz;
begin
  loop
    v_next := queue._cron_next(p_parsed, p_timezone, v_last + (v_to - v_last) / 2);
    if v_next <= p_to then
      v_last := v_next;
    else
      exit when v_to - v_last <= interval '1 s';
      v_to := v_last + (v_to - v_last) / 2;
    end if;
  end loop;
  return v_last;
end $$;

-- An instant as RFC 3339 has it, in a zone's local time with its offset.
create or replace function queue._rfc3339(p_at timestamptz, p_timezone text)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_local timestamp := p_at at time zone p_timezone;
  v_offset interval := v_local - (p_at at time zone 'UTC');
begin
  return to_char(v_local, case when date_trunc('second', v_local) = v_local then 'YYYY-MM-DD"T"HH24:MI:SS' else 'YYYY-MM-DD"T"HH24:MI:SS.US' end)
    || case when v_offset < interval '0' then '-' else '+' end || to_char(greatest(v_offset, -v_offset), 'HH24:MI');
end $$;

-- Forgets all but the last 100 runs of a schedule.
create or replace function queue._prune_runs(p_name text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.schedule_run r
  where r.name = p_name
    and r.run_at < (select k.run_at from queue.schedule_run k where k.name = p_name order by k.run_at desc offset 99 limit 1);
end $$;

-- Forgets runs of schedules that are gone, after 7 days.
-- Locks: the caller holds ADM.
create or replace function queue._prune_old_runs(p_max integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.schedule_run r
  where r.ctid = any (array(
    select k.ctid from queue.schedule_run k
    where k.decided_at < clock_timestamp() - interval '7 days' and not exists (select from queue.schedule s where s.name = k.name)
    limit p_max));
end $$;

-- sql/80_operate.sql
-- Operating on jobs that may be anywhere.
--
-- Lock order: the job's row in queue.live first (waiting for whoever ends or claims it), and its queueing
-- lock's (waiting for whoever replaces it), then ADM, then the rest. Once ADM is held the job can only move
-- by a claim, which skips the locked row. Under ADM nothing is waited for that another transaction could
-- hold long: not these rows, nor queue.job_state of a job that is being finished.

-- Takes an unfinished, not running job out of wherever it is, with its slot and ready counts, but not out
-- of its lock. place: where it was (live, or a reason of queue.waiting, turn, again, or log: it has yet to be
-- admitted and stays there, so that it can only be written about, in queue.job_state), NULL when it runs, is finished,
-- another holds its row, or the end of its claim is not settled yet. keys: semaphores in which that left room, for _advance.
-- Locks: the caller holds ADM; the row of queue.live by skip locked.
create or replace function queue._take_out(p_id bigint, out place text, out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_live record;
  v_waiting record;
begin
  delete from queue.live v
  where v.id = (select w.id from queue.live w where w.id = p_id and w.claim is null for update skip locked)
  returning v.id, v.lane, v.flags into v_live;
  if found then
    if v_live.flags & 1 <> 0 then
      perform queue._keep_turns(array[p_id]);
    end if;
    if v_live.flags & 6 <> 0 then
      keys := queue._unready(array[p_id], array[v_live.lane], array[v_live.flags]);
      perform queue._never_discard(array[p_id]);
    end if;
    place := 'live';
    return;
  elsif exists (select from queue.live v where v.id = p_id) or exists (select from queue.finished f where f.id = p_id) then
    return;
  end if;
  delete from queue.waiting w where w.id = p_id returning w.reason, w.key, w.lane into v_waiting;
  if found then
    if v_waiting.reason = 'slot' then
      perform queue._unwait(v_waiting.key, v_waiting.lane);
      perform queue._never_discard(array[p_id]);
    end if;
    place := v_waiting.reason;
    return;
  end if;
  -- one that _advance has handed over is in no gate, and holds nothing
  delete from queue.handover h where h.job_id = p_id and h.kind = 'again' and h.flags = 0 and h.payload is null;
  if found then
    place := 'again';
    return;
  elsif exists (select from queue.handover h where h.job_id = p_id and h.kind in ('ended', 'again')) then
    return;
  end if;
  if exists (select from queue.job j left join queue.job_state s on s.id = j.id
             join queue.lock_member m on m.lock = coalesce(s.lock, j.lock) and m.id = j.id where j.id = p_id) then
    update queue.lock_member m set is_passed = false where m.id = p_id
      and m.lock = (select coalesce(s.lock, j.lock) from queue.job j left join queue.job_state s on s.id = j.id where j.id = p_id);
    place := 'turn';
    return;
  end if;
  place := 'log';
end $$;

-- _take_out for several. ids: those that were taken out.
-- Locks: as there.
create or replace function queue._take_out_all(p_ids bigint[], out ids bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_id bigint;
  v_taken record;
begin
  foreach v_id in array p_ids loop
    v_taken := queue._take_out(v_id);
    if v_taken.place is not null then
      ids := ids || v_id;
      keys := keys || v_taken.keys;
    end if;
  end loop;
end $$;

-- Puts jobs that were taken out into their final state. Their locks and dependents do not know yet: that is up to _advance,
-- by p_ended.
-- Locks: the caller holds ADM.
create or replace function queue._finish_unclaimed(p_ids bigint[], p_state text, p_reason text, p_error text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
  v_now timestamptz := clock_timestamp();
begin
  insert into queue.finished (id, finished_at, attempts, state, reason, error)
  select u.id, v_now, coalesce(s.attempts, 0), p_state, p_reason, p_error
  from unnest(p_ids) u (id)
  left join lateral (select s.attempts from queue.job_state s where s.id = u.id offset 0) s on true;
  select array_agg(j.id) as ids, array_agg(j.flags) as flags into v
  from (
    select j.id, (j.flags | case when c.retain is not null then 512 else 0 end)::smallint as flags
    from unnest(p_ids) u (id)
    cross join lateral (
      select j.id, j.flags | coalesce(s.extra_flags, 0) as flags, coalesce(s.queue, j.queue) as queue
      from queue.job j left join queue.job_state s on s.id = j.id where j.id = u.id offset 0) j
    left join lateral (select c.retain from queue.queue_config c where c.queue = j.queue offset 0) c on true) j;
  perform queue._close(v.ids, v.flags);
  perform queue._tell_waiters(p_ids);
end $$;

-- Whether nobody is replacing a job just now; if so, nobody can before this transaction ends.
-- Locks: the caller holds ADM; the row of its queueing lock by skip locked.
create or replace function queue._is_settled(p_id bigint)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_key text;
begin
  select j.queueing_lock into v_key from queue.job j where j.id = p_id;
  if v_key is null then
    return true;
  end if;
  perform from queue.queueing_lock k where k.key = v_key and k.job_id = p_id for update skip locked;
  return found or not exists (select from queue.queueing_lock k where k.key = v_key and k.job_id = p_id);
end $$;

-- Admits whatever is visible, so that an operator finds every job behind the gates.
-- Locks: ADM, waited for.
create or replace function queue._admit_all()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_admit record;
begin
  perform queue._lock_admission(true);
  loop
    select a.* into v_admit from queue._admit(1000) a;
    exit when not v_admit.has_more;
  end loop;
  perform queue._advance_own();
end $$;

-- Locks: the job's row of queue.live, waited for; ADM, waited for.
-- Raises: QJ001, QJ003 (finished, or running without abort), QJ008.
create or replace function queue.cancel(id bigint, abort boolean default false)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_live record;
  v_taken record;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', array[cancel.id]);
  end if;
  perform queue._reach(cancel.id);
  -- one that was claimed while this waited for ADM may be about to end in a transaction that holds its row
  select v.claim, v.worker_id into v_live from queue.live v where v.id = cancel.id for update skip locked;
  if v_live.claim is not null then
    if cancel.abort is not true then
      perform queue._invalid_state(cancel.id, 'running', 'Call queue.cancel(id, abort => true) to have its worker stop it.');
    end if;
    update queue.live v set flags = v.flags | 32 where v.id = cancel.id;
    perform queue._tell_abort(cancel.id, v_live.claim, v_live.worker_id, 'cancelled');
    return 'running';
  end if;
  v_taken := queue._take_out(cancel.id);
  if coalesce(v_taken.place, 'log') = 'log' then
    perform queue._invalid_state(cancel.id, queue._state(cancel.id), 'Only a job that is not finished, and whose defer has committed, can be cancelled.');
  end if;
  perform queue._finish_unclaimed(array[cancel.id], 'cancelled', 'cancelled', null);
  perform queue._advance(p_ended => array[cancel.id], p_keys => v_taken.keys);
  perform queue._announce();
  return 'cancelled';
end $$;
comment on function queue.cancel(bigint, boolean) is
  'Cancels a job that has not started: returns cancelled. A running one with abort: its worker is told, returns running.';

-- Tells a worker to abort a claim: by its channel, and by heartbeat.
create or replace function queue._tell_abort(p_id bigint, p_claim bigint, p_worker bigint, p_reason text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  insert into queue.abort (id, claim, worker_id, reason) values (p_id, p_claim, p_worker, p_reason)
  on conflict on constraint abort_pkey do nothing;
  if current_setting('pgdefer.notify', true) is distinct from 'off' then
    perform pg_notify('pgdefer_worker_' || p_worker, '');
  end if;
end $$;

-- Writes what is given over what the job was deferred with, and sends the job through the gates again.
-- Running and finished jobs keep their place; the change counts from their next run. False, with nothing done: another
-- transaction holds the job's row.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._amend(
  p_id bigint, p_queue text default null, p_priority integer default null, p_deadline timestamptz default null,
  p_scheduled_at timestamptz default null, p_args jsonb default null)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_taken record := queue._take_out(p_id);
begin
  if v_taken.place is null then
    -- while its claim is being ended its row of queue.job_state may not be waited for
    perform from queue.live v where v.id = p_id for update skip locked;
    if not found and exists (select from queue.live v where v.id = p_id) then
      return false;
    end if;
  end if;
  insert into queue.job_state as s (id, queue, priority, deadline, scheduled_at, args, size, extra_flags)
  select p_id, p_queue, p_priority, p_deadline, p_scheduled_at, p_args, x.size, case when x.size > 2000 then -32768 else 0 end
  from (
    select octet_length(p_args::text)
        + coalesce(octet_length((select j.options -> 'headers' from queue.job j where j.id = p_id)::text), 0) as size) x
  on conflict on constraint job_state_pkey do update
    set (queue, priority, deadline, scheduled_at, args, size, extra_flags)
      = (coalesce(excluded.queue, s.queue), coalesce(excluded.priority, s.priority), coalesce(excluded.deadline, s.deadline),
         coalesce(excluded.scheduled_at, s.scheduled_at), coalesce(excluded.args, s.args), coalesce(excluded.size, s.size),
         s.extra_flags | excluded.extra_flags);
  if v_taken.place in ('held', 'parked') then
    insert into queue.waiting (id, reason) values (p_id, v_taken.place);
  elsif v_taken.place <> 'log' then
    perform queue._advance(p_arrived => array[p_id], p_keys => v_taken.keys);
  end if;
  return true;
end $$;

-- Locks: the job's row of queue.live, waited for; ADM, waited for.
-- Raises: QJ001, QJ003 (running or finished), QJ008.
create or replace function queue.hold(id bigint)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_taken record;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', array[hold.id]);
  end if;
  perform queue._reach(hold.id);
  v_taken := queue._take_out(hold.id);
  if coalesce(v_taken.place, 'log') = 'log' then
    perform queue._invalid_state(hold.id, queue._state(hold.id), 'Only a job that has not started can be held, and not before the transaction that deferred it has committed; cancel a running one with abort.');
  end if;
  insert into queue.waiting (id, reason) values (hold.id, 'held');
  perform queue._advance(p_keys => v_taken.keys, p_changed => array[hold.id]);
  return 'held';
end $$;
comment on function queue.hold(bigint) is
  'Puts a job that is not running aside until queue.unhold. It keeps its place at its lock. Returns held.';

-- Locks and errors: as hold; QJ003 when the job is not held.
create or replace function queue.unhold(id bigint)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', array[unhold.id]);
  end if;
  perform queue._reach(unhold.id);
  delete from queue.waiting w where w.id = unhold.id and w.reason = 'held';
  if not found then
    perform queue._invalid_state(unhold.id, queue._state(unhold.id), 'Only a held job can be unheld.');
  end if;
  perform queue._advance(p_arrived => array[unhold.id], p_changed => array[unhold.id]);
  perform queue._announce();
  return queue._state(unhold.id);
end $$;
comment on function queue.unhold(bigint) is 'Lets a held job go on. Returns its new state.';

-- Readies a call that changes one job: checks that it exists and takes the locks in their order.
-- Locks, each waited for: the job's row of queue.live, that of its queueing lock, ADM. Raises: QJ001, QJ008.
create or replace function queue._reach(p_id bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  perform queue._check_isolation();
  if p_id is null or not exists (select from queue.job j where j.id = p_id) then
    perform queue._job_not_found(p_id);
  end if;
  perform from queue.live v where v.id = p_id for update;
  perform from queue.queueing_lock k
  where k.job_id = p_id and k.key = (select j.queueing_lock from queue.job j where j.id = p_id) for update;
  perform queue._admit_all();
end $$;

-- A job's state as queue.jobs shows it.
create or replace function queue._state(p_id bigint)
returns text language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_state text;
begin
  select j.state into v_state from queue.jobs j where j.id = p_id;
  return v_state;
end $$;

-- Tells workers that something may have become ready, if any may sleep.
create or replace function queue._announce()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if not pg_try_advisory_xact_lock_shared(1885824102, 1) then
    perform queue._wake();
  end if;
end $$;

-- sql/81_operations.sql
-- Operating on many jobs: moving, copying, deleting, ending them by hand.
--
-- Each call is one transaction and takes its locks in the order of 80_operate.sql: rows of queue.live,
-- queueing locks and rows of queue.finished, each sorted and waited for, then ADM. What it meets under ADM
-- it locks by skip locked (_grasp): a job that got there meanwhile, and that another transaction is at, is
-- refused like one whose state does not allow the call. The claim of a running job that is taken away is
-- lost: its worker is told to abort, and its late outcome gets QJ002.
--
-- Whether an id is one of many is asked by (NOT) IN (SELECT unnest(...)), which the planner hashes: = ANY (array)
-- reads the array through for each row.

-- Locks: as above. Raises: 22023, QJ008.
create or replace function queue.move(ids bigint[], queue text, force boolean default false)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_job record;
  v_done bigint[] := '{}'::bigint[];
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', move.ids);
    perform queue._bound_queue('{operator}', move.queue);
  end if;
  perform queue._check_queue(move.queue);
  perform queue._reach_all(move.ids);
  for v_job in select distinct u.id from unnest(move.ids) u (id) order by u.id loop
    select v_job.id, g.* into v_job from queue._grasp(v_job.id) g;
    continue when v_job.standing in ('missing', 'busy') or v_job.standing = 'running' and move.force is not true;
    if v_job.standing = 'running' then
      perform queue._end_attempt('{"outcome": "released", "error": "taken back by a move with force"}', v_job.id, v_job.claim, true);
      perform queue._tell_abort(v_job.id, v_job.claim, v_job.worker_id, 'moved');
    end if;
    perform queue._amend(v_job.id, p_queue => move.queue);
    perform queue._set_purge_at(v_job.id);
    v_done := v_done || v_job.id;
  end loop;
  perform queue._announce();
  return query select t.id, t.outcome, t.error from queue._told(move.ids, v_done) t;
end $$;
comment on function queue.move(bigint[], text, boolean) is
  'Puts jobs into another queue, with their ids, args, attempts and history; finished ones run there if they are retried. A running job is refused (QJ003) without force; with force its claim is lost and it is ready again there. A row for each id: its state in outcome, or an error.';

-- Locks: none but the latch, shared and by try: it only appends, as defer does. Raises: 22023, QJ001.
create or replace function queue.copy(id bigint, queue text default null)
returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_now timestamptz;
  v_needs bigint[];
  v_id bigint;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', array[copy.id]);
    perform queue._bound_queue('{operator}', copy.queue) where copy.queue is not null;
  end if;
  if copy.queue is not null then
    perform queue._check_queue(copy.queue);
  end if;
  perform pg_current_xact_id();  -- as in _check_needs
  v_now := clock_timestamp();
  v_needs := array(
    select n.id from queue._direct_needs(copy.id) n
    cross join lateral (select o.id from queue.job o where o.id = n.id offset 0) o
    left join lateral (select f.purge_at, f.finished_at, f.state from queue.finished f where f.id = n.id offset 0) f on true
    where not coalesce(f.purge_at <= v_now or f.purge_at is null and f.state = 'succeeded' and f.finished_at < v_now - interval '7 days', false)
    order by n.id);
  insert into queue.log (task, args, given)
  select j.task, coalesce(s.args, j.args), row(
    coalesce(copy.queue, s.queue, j.queue), coalesce(s.priority, j.priority),
    (j.flags | coalesce(s.extra_flags, 0)) & ~(8 | 16 | 32 | 64 | 256 | 8192) & case when x.lock is null then ~3 else -1 end
      | case when v_needs <> '{}' or j.options ->> 'needs_mode' = 'any' then 8 else 0 end
      | case when x.scheduled_at is not null then 16 else 0 end
      | case when w.id is not null then 32 else 0 end
      | case when x.is_expiring then 64 else 0 end,
    x.scheduled_at, j.deadline, x.lock, null, nullif(v_needs, '{}'), j.keys, j.limits,
    case when x.is_expiring then j.options else nullif(j.options - 'expires_at', '{}') end, coalesce(s.size, j.size))::queue.given
  from queue.job j
  left join queue.job_state s on s.id = j.id
  left join queue.waiting w on w.id = j.id and w.reason = 'held'
  cross join lateral (
    select nullif(coalesce(s.lock, j.lock), '') as lock,
      nullif(case when s.claims > 0 then case when j.scheduled_at <= v_now then j.scheduled_at end
                  else coalesce(s.scheduled_at, j.scheduled_at) end, '-infinity') as scheduled_at,
      coalesce((j.options ->> 'expires_at')::timestamptz > v_now, false) as is_expiring) x
  where j.id = copy.id
  returning id into v_id;
  if v_id is null then
    perform queue._job_not_found(copy.id);
  end if;
  perform queue._announce();
  return v_id;
end $$;
comment on function queue.copy(bigint, text) is
  'Defers a job with the same task, args and options once more, into a queue (NULL: the same), and returns its id. The copy has a history of its own. It takes no queueing_lock, no expires_at that has passed, and of the needs those that are still there; it is held if the job is.';

-- Locks: as above. Raises: 22023, QJ008.
create or replace function queue.delete(ids bigint[], force boolean default false)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_done bigint[];
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', delete.ids);
  end if;
  perform queue._reach_all(delete.ids);
  v_done := queue._delete(delete.ids, coalesce(delete.force, false));
  perform queue._announce();
  return query
    select t.id, case when t.id in (select unnest(v_done)) then 'deleted' else t.outcome || coalesce(', needed by job ' || n.id, '') end,
      case when t.id not in (select unnest(v_done)) then t.error end
    from queue._told(delete.ids, v_done) t
    left join lateral (select d.job_id as id from queue.need d where d.need_id = t.id and t.outcome is distinct from 'running'
                         and not exists (select from queue.finished f where f.id = d.job_id) order by d.job_id limit 1) n on true;
end $$;
comment on function queue.delete(bigint[], boolean) is
  'Removes jobs and every trace of them. One that runs, or that an unfinished job needs which is not removed with it, is refused (QJ003) without force; with force the claim is lost, and those that need it count it as failed unless it had succeeded. A row for each id: deleted, or an error with its state.';

-- Locks: as above. Raises: 22023, QJ008.
create or replace function queue.fail_jobs(ids bigint[], message text default null)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_job record;
  v_done bigint[] := '{}'::bigint[];
  v_taken record;
  v_message text := left(fail_jobs.message, 10000);
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', fail_jobs.ids);
  end if;
  perform queue._reach_all(fail_jobs.ids);
  for v_job in select distinct u.id from unnest(fail_jobs.ids) u (id) order by u.id loop
    select v_job.id, g.* into v_job from queue._grasp(v_job.id) g;
    if v_job.standing = 'running' then
      -- it fails, whether it was told to abort or not
      update queue.live v set flags = v.flags & ~32 where v.id = v_job.id;
      perform queue._end_attempt(
        jsonb_build_object('outcome', 'failed', 'error', v_message, 'options', '{"retryable": false, "reason": "operator"}'::jsonb),
        v_job.id, v_job.claim, true);
      perform queue._tell_abort(v_job.id, v_job.claim, v_job.worker_id, 'failed');
    elsif v_job.standing = 'open' then
      v_taken := queue._take_out(v_job.id);
      perform queue._finish_unclaimed(array[v_job.id], 'failed', 'operator', v_message);
      perform queue._advance(p_ended => array[v_job.id], p_keys => v_taken.keys);
    else
      continue;
    end if;
    v_done := v_done || v_job.id;
  end loop;
  perform queue._announce();
  return query select t.id, t.outcome, t.error from queue._told(fail_jobs.ids, v_done) t;
end $$;
comment on function queue.fail_jobs(bigint[], text) is
  'Ends unfinished jobs as failed, reason operator, with message as their error; they are not retried. A running one''s claim is lost. Finished ones are refused (QJ003). A row for each id: failed, or an error with its state.';

-- Locks: as above. Raises: 22023, QJ008.
create or replace function queue.done(ids bigint[])
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_job record;
  v_now timestamptz := clock_timestamp();
  v_done bigint[] := '{}'::bigint[];
  v_taken record;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', done.ids);
  end if;
  perform queue._reach_all(done.ids);
  for v_job in select distinct u.id from unnest(done.ids) u (id) order by u.id loop
    select v_job.id, g.* into v_job from queue._grasp(v_job.id) g;
    if v_job.standing = 'running' then
      perform queue._succeed(array[v_job.id], array[v_job.claim], null);
      update queue.finished f set reason = 'operator' where f.id = v_job.id;
      perform queue._tell_abort(v_job.id, v_job.claim, v_job.worker_id, 'done');
    elsif v_job.standing = 'open' then
      v_taken := queue._take_out(v_job.id);
      perform queue._finish_unclaimed(array[v_job.id], 'succeeded', 'operator', null);
      perform queue._advance(p_ended => array[v_job.id], p_keys => v_taken.keys);
    elsif v_job.standing = 'finished' then
      update queue.finished f set state = 'succeeded', reason = 'operator', finished_at = v_now, worker_id = null
      where f.id = v_job.id and f.state <> 'succeeded';
      continue when not found;
      perform queue._set_purge_at(v_job.id);
      perform queue._advance(p_changed => array[v_job.id]);
    else
      continue;
    end if;
    v_done := v_done || v_job.id;
  end loop;
  perform queue._announce();
  return query select t.id, t.outcome, t.error from queue._told(done.ids, v_done) t;
end $$;
comment on function queue.done(bigint[]) is
  'Marks jobs as succeeded, reason operator, without running them: unfinished ones, failed and cancelled ones too, so that what needs them goes on. A running one''s claim is lost. One that has succeeded is refused (QJ003). A row for each id: succeeded, or an error with its state.';

-- Locks: as above. Raises: 22023, QJ008.
create or replace function queue.set_priority(ids bigint[], priority integer)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_job record;
  v_done bigint[] := '{}'::bigint[];
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', set_priority.ids);
  end if;
  if set_priority.priority is null then
    perform queue._invalid('priority is missing', 'Give a whole number; higher runs first.');
  end if;
  perform queue._reach_all(set_priority.ids);
  for v_job in select distinct u.id from unnest(set_priority.ids) u (id) order by u.id loop
    select v_job.id, g.* into v_job from queue._grasp(v_job.id) g;
    continue when v_job.standing in ('missing', 'busy');
    perform queue._amend(v_job.id, p_priority => set_priority.priority);
    v_done := v_done || v_job.id;
  end loop;
  perform queue._announce();
  return query select t.id, t.outcome, t.error from queue._told(set_priority.ids, v_done) t;
end $$;
comment on function queue.set_priority(bigint[], integer) is
  'Changes the priority of jobs; of running and finished ones for their next run. A row for each id: its state in outcome, or an error.';

-- Locks: the job's row of queue.live, waited for; ADM, waited for.
-- Raises: 22023, QJ001, QJ003 (running or finished), QJ008.
create or replace function queue.reschedule(id bigint, at timestamptz default null)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', array[reschedule.id]);
  end if;
  if not isfinite(reschedule.at) then
    perform queue._invalid('at must be finite', 'Give a moment, or NULL for now. To put a job aside without one, use queue.hold.');
  end if;
  perform queue._check_moment('at', reschedule.at);
  perform queue._reach(reschedule.id);
  if (select g.standing from queue._grasp(reschedule.id) g) <> 'open' then
    perform queue._invalid_state(reschedule.id, queue._state(reschedule.id), 'Only a job that is neither running nor finished has a time to come; queue.retry runs a finished one again.');
  end if;
  perform queue._amend(reschedule.id, p_scheduled_at => coalesce(reschedule.at, '-infinity'));
  perform queue._announce();
  return queue._state(reschedule.id);
end $$;
comment on function queue.reschedule(bigint, timestamptz) is
  'Gives a job that is neither running nor finished another time, NULL: now; one that waits for a retry too. Returns its new state.';

-- Locks: as _reach; then, under ADM, the job's row of queue.finished by skip locked.
-- Why no run has other args than it was given: a fetch that has the job's row is waited for, and the job is then running; one that
-- comes later skips that row, and what is in no row of queue.live is let in under ADM. Two sessions: operate_claim.spec.
-- Why no wake-up is lost: it ends with _announce, as all that may leave a job ready.
-- Raises: 22023, QJ001, QJ003 (running or succeeded), QJ008.
create or replace function queue.set_args(id bigint, args jsonb)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_standing text;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', array[set_args.id]);
  end if;
  if jsonb_typeof(set_args.args) is distinct from 'object' then
    perform queue._invalid('args must be a JSON object', 'Pass the arguments by name: {"name": value}.', 'type: ' || coalesce(jsonb_typeof(set_args.args), 'NULL'));
  end if;
  perform queue._check_size('args', set_args.args);
  perform queue._reach(set_args.id);
  select g.standing into v_standing from queue._grasp(set_args.id) g;
  if v_standing not in ('open', 'finished') or exists (select from queue.finished f where f.id = set_args.id and f.state = 'succeeded') then
    perform queue._invalid_state(set_args.id, queue._state(set_args.id), 'Only a job that neither runs nor has succeeded can get other args, and not before the transaction that deferred it has committed. Where another transaction may be at it, try again.');
  end if;
  perform queue._amend(set_args.id, p_args => set_args.args);
  perform queue._announce();
  return queue._state(set_args.id);
end $$;
comment on function queue.set_args(bigint, jsonb) is
  'Gives a job that neither runs nor has succeeded other args, an object, in place of all it had: a failed or cancelled one for its retry. Its lock and keys stay as they were filled from the old ones. Returns its state.';

-- Locks: as fetch. A transaction of its own. The claim hangs on its lease alone: the worker that it was made
-- with is gone at once.
-- Raises: 22023, QJ008.
create or replace function queue.next(queues text[] default null, ack boolean default false, lease interval default '20 minutes')
returns table (id bigint, claim bigint, task text, args jsonb, queue text, priority integer, lock text, attempt integer,
               scheduled_at timestamptz, deadline timestamptz, headers jsonb, expires_at timestamptz)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_worker bigint;
  v record;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    queues := queue._bound_queues('{operator}', queues);
  end if;
  perform queue._check_isolation();
  if next.ack is not true and (next.lease is null or next.lease <= interval '0') then
    perform queue._invalid('lease must be longer than 0', 'Pass an interval such as ''20 minutes''.');
  end if;
  perform queue._check_interval('lease', next.lease) where next.ack is not true;
  v_worker := queue._register_worker('operator', queues, '{"listen": false}');
  v := queue._claim(v_worker, queues, 1, '{"alone": true}', true);
  select c.id, c.claim, c.task, case when x.size <= 65536 then c.args end, c.queue, c.priority, c.lock, c.attempt, c.scheduled_at, c.deadline,
    case when x.size <= 65536 then c.headers end
  into id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, headers
  from queue.claimed c
  cross join lateral (select coalesce(s.size, j.size, 0) as size from queue.job j left join queue.job_state s on s.id = j.id where j.id = c.id) x
  where c.id = v.ids[1];
  if id is null or next.ack then
    delete from queue.worker w where w.id = v_worker;
    if id is null then
      return;
    end if;
    perform queue._succeed(array[id], array[claim], null);
    update queue.finished f set reason = 'operator' where f.id = next.id;
  else
    expires_at := queue.extend(id, claim, next.lease);
    update queue.worker w set gone_at = clock_timestamp(), is_clear = true where w.id = v_worker;
  end if;
  return next;
end $$;
comment on function queue.next(text[], boolean, interval) is
  'Claims the next job of queues (names, prefix*, *; NULL: all) by hand, for queue.succeed, fail or release with its id and claim. It has a lease of its own, at whose end (expires_at) it counts as crashed; queue.extend renews it. With ack it is done with at once: it has succeeded, reason operator. No row: there is none. Args of more than 64 kB are left out: read them in queue.jobs.';

-- Locks: as above. The whole log is read to find the queue's jobs.
-- Raises: 22023 (no such queue), QJ006, QJ008.
create or replace function queue.delete_queue(name text, force boolean default false)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_later bigint[];
  v_ids bigint[];
  v_done bigint[];
  v_deleted integer := 0;
  v_open bigint;
  v_running bigint;
  v_need record;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_queue('{operator}', delete_queue.name);
  end if;
  perform queue._check_isolation();
  perform queue._check_queue(delete_queue.name);
  perform from queue.live v
  where v.lane = any (array(select l.lane from queue.lane l where l.queue = delete_queue.name)) order by v.id for update;
  perform queue._admit_all();
  if not exists (select from queue.queue_config c where c.queue = delete_queue.name)
    and not exists (select from queue.lane l where l.queue = delete_queue.name)
    and not exists (select from queue.job j left join queue.job_state s on s.id = j.id where coalesce(s.queue, j.queue) = delete_queue.name) then
    perform queue._invalid('no such queue', 'queue.queues lists them.', 'queue: ' || delete_queue.name);
  end if;
  -- again, as the end of a claim admits what was committed meanwhile (delete_queue_defer.spec); that ends, as nothing
  -- that is admitted under this ADM can run
  loop
    v_later := array(select u.id from queue.unadmitted u);  -- what was committed since is deferred later
    v_ids := array(
      select j.id from queue.job j left join queue.job_state s on s.id = j.id
      where coalesce(s.queue, j.queue) = delete_queue.name and j.id <> all (v_later) order by j.id);
    exit when v_ids = '{}';
    if delete_queue.force is not true then
      select count(*), count(*) filter (where v.claim is not null) into v_open, v_running
      from unnest(v_ids) u (id) left join queue.finished f on f.id = u.id left join queue.live v on v.id = u.id where f.id is null;
      if v_open > 0 then
        perform queue._queue_not_empty(delete_queue.name, format('unfinished jobs: %s, of these running: %s', v_open, v_running));
      end if;
      select d.job_id, d.need_id into v_need
      from queue.need d
      where d.need_id = any (v_ids) and not exists (select from queue.finished f where f.id = d.job_id) limit 1;
      if found then
        perform queue._queue_not_empty(delete_queue.name, format('job %s of another queue needs job %s', v_need.job_id, v_need.need_id));
      end if;
    end if;
    v_done := queue._delete(v_ids, true);
    if cardinality(v_done) < cardinality(v_ids) then
      perform queue._queue_not_empty(delete_queue.name, format('jobs that another transaction is at just now: %s', cardinality(v_ids) - cardinality(v_done)));
    end if;
    v_deleted := v_deleted + cardinality(v_done);
  end loop;
  delete from queue.lane l where l.queue = delete_queue.name;
  delete from queue.queue_config c where c.queue = delete_queue.name;
  delete from queue.pause p where p.queue = delete_queue.name;
  delete from queue.rate_start r where r.queue = delete_queue.name;
  delete from queue.semaphore s where s.key = 'q' || delete_queue.name;
  perform queue._announce();
  return v_deleted;
end $$;
comment on function queue.delete_queue(text, boolean) is
  'Removes a queue with its settings and all its finished jobs. With unfinished jobs in it, or one that another queue''s needs, it is refused (QJ006) without force, which removes them as queue.delete does. Returns how many jobs. A job deferred later makes the queue anew, without settings.';

-- Raises: QJ006, always.
create or replace function queue._queue_not_empty(p_queue text, p_detail text)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ006', message = 'queue not empty', detail = format('queue: %s, %s', p_queue, p_detail),
    hint = 'Let them end or move them, or pass force => true to remove them.';
end $$;

-- Readies a call that changes many jobs: takes the locks in their order.
-- Locks: see the top. Raises: 22023, QJ008.
create or replace function queue._reach_all(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  perform queue._check_isolation();
  perform queue._check_ids(p_ids);
  perform from queue.live v where v.id = any (p_ids) order by v.id for update;
  perform from queue.queueing_lock k
  where k.key = any (array(select j.queueing_lock from queue.job j where j.id = any (p_ids) and j.queueing_lock is not null)) and k.job_id = any (p_ids)
  order by k.key for update;
  perform from queue.finished f where f.id = any (p_ids) order by f.id for update;
  perform queue._admit_all();
end $$;

-- How a job stands: missing, running, finished, open (neither), or busy: another transaction is at it, its
-- claim's end is not settled, or it has yet to be admitted. All but missing and busy are locked.
-- Locks: the caller holds ADM; the job's rows by skip locked.
create or replace function queue._grasp(p_id bigint, out standing text, out claim bigint, out worker_id bigint)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_xid xid8;
begin
  select j.xid into v_xid from queue.job j where j.id = p_id;
  if not found then
    standing := 'missing';
    return;
  end if;
  standing := 'busy';
  if v_xid is not distinct from pg_current_xact_id_if_assigned()
    or exists (select from queue.handover h where h.job_id = p_id and h.kind in ('ended', 'again')
                 and not (h.kind = 'again' and h.flags = 0 and h.payload is null))
    or not queue._is_settled(p_id)
  then
    return;
  end if;
  select v.claim, v.worker_id into claim, worker_id from queue.live v where v.id = p_id for update skip locked;
  if found then
    standing := case when claim is null then 'open' else 'running' end;
    return;
  elsif exists (select from queue.live v where v.id = p_id) then
    return;
  end if;
  perform from queue.finished f where f.id = p_id for update skip locked;
  if found then
    standing := 'finished';
  elsif not exists (select from queue.finished f where f.id = p_id) and queue._is_gated(p_id) then
    standing := 'open';
  end if;
end $$;

-- Whether a job waits in a gate: one that is in neither queue.live nor queue.finished has else yet to be admitted.
-- Locks: the caller holds ADM.
create or replace function queue._is_gated(p_id bigint)
returns boolean language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
begin
  return exists (select from queue.waiting w where w.id = p_id)
    or exists (select from queue.handover h where h.job_id = p_id and h.kind = 'again')
    or exists (select from queue.job j left join queue.job_state s on s.id = j.id
               join queue.lock_member m on m.lock = coalesce(s.lock, j.lock) and m.id = j.id where j.id = p_id);
end $$;

-- Sets until when a finished job is kept, which its queue or its state has changed.
create or replace function queue._set_purge_at(p_id bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  -- not before now: a job whose transaction names this one as a need may have yet to commit (_safe_at)
  update queue.finished f set purge_at = greatest(f.finished_at + x.retain, case when x.retain is not null then clock_timestamp() end)
  from (select coalesce((j.options ->> 'retain')::interval, c.retain) as retain
        from queue.job j left join queue.job_state s on s.id = j.id
        left join queue.queue_config c on c.queue = coalesce(s.queue, j.queue) where j.id = p_id) x
  where f.id = p_id;
end $$;

-- What became of each id, in the order in which they were given, each once.
create or replace function queue._told(p_ids bigint[], p_done bigint[])
returns table (id bigint, outcome text, error text)
language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select u.id, j.state, case when u.id in (select unnest(p_done)) then null when j.id is null then 'QJ001' else 'QJ003' end
    from (select u.id, min(u.n) as n from unnest(p_ids) with ordinality u (id, n) group by u.id) u
    left join lateral (select j.id, j.state from queue.jobs j where j.id = u.id offset 0) j on true
    order by u.n;
end $$;

-- Deletes those jobs that may be, and returns their ids. Finished ones, and ready ones that hold nothing,
-- as sets; the others are ended one by one first, and so let go what they held.
-- Locks: the caller holds ADM; the jobs' rows by skip locked.
create or replace function queue._delete(p_ids bigint[], p_force boolean)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_job record;
  v_finished bigint[];
  v_plain bigint[];
  v_open bigint[] := '{}'::bigint[];
  v_claims bigint[] := '{}'::bigint[];
  v_workers bigint[] := '{}'::bigint[];
  v_all bigint[];
  v_needed bigint[];
  v_taken record;
begin
  perform queue._forget_deleted();
  v_finished := array(
    select f.id from queue.finished f
    where f.id = any (p_ids) and not exists (select from queue.handover h where h.job_id = f.id and h.kind in ('ended', 'again'))
    for update skip locked);
  v_plain := array(
    select v.id from queue.live v
    where v.id = any (p_ids) and v.claim is null and v.flags & ~(128 | 512 | 2048 | -32768) = 0
      and (select d.need_id from queue.need d where d.need_id = v.id limit 1) is null
    for update skip locked);
  for v_job in
    select u.id, g.standing, g.claim, g.worker_id
    from (select distinct u.id from unnest(p_ids) u (id) where u.id not in (select unnest(v_finished || v_plain)) order by u.id desc) u
    cross join lateral queue._grasp(u.id) g
  loop
    if v_job.standing = 'open' or v_job.standing = 'running' and p_force then
      v_open := v_open || v_job.id;
      v_claims := v_claims || v_job.claim;
      v_workers := v_workers || v_job.worker_id;
    end if;
  end loop;
  v_all := v_finished || v_plain || v_open;
  while not p_force loop
    v_needed := array(
      select distinct d.need_id from queue.need d
      where d.need_id = any (v_all) and d.job_id not in (select unnest(v_all)) and (select f.id from queue.finished f where f.id = d.job_id) is null);
    exit when v_needed = '{}';
    v_all := array(select u.id from unnest(v_all) u (id) where u.id not in (select unnest(v_needed)));
  end loop;
  insert into queue.deleted (id)
  select f.id from queue.finished f where f.id = any (v_all) and f.state = 'succeeded';
  for v_job in select u.id, u.claim, u.worker_id from unnest(v_open, v_claims, v_workers) u (id, claim, worker_id)
    where not u.id not in (select unnest(v_all)) loop
    if v_job.claim is not null then
      perform queue._end_attempt('{"outcome": "aborted"}', v_job.id, v_job.claim, true);
      perform queue._tell_abort(v_job.id, v_job.claim, v_job.worker_id, 'deleted');
    else
      v_taken := queue._take_out(v_job.id);
      if v_taken.place is null then
        v_all := array_remove(v_all, v_job.id);
      else
        perform queue._finish_unclaimed(array[v_job.id], 'cancelled', 'deleted', null);
        perform queue._advance(p_ended => array[v_job.id], p_keys => v_taken.keys);
      end if;
    end if;
  end loop;
  delete from queue.live v where v.id = any (v_plain);
  perform queue._erase(v_all);
  return v_all;
end $$;

-- queue.deleted tells jobs whose transaction began before a need of theirs was deleted that it had
-- succeeded: a row goes once every such transaction has ended and its jobs have been admitted.
-- Locks: the caller holds ADM.
create or replace function queue._forget_deleted()
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  delete from queue.deleted d
  where d.until <= (select least(k.next_xid, k.in_flight[1]) from queue.cursor k order by k.tick desc limit 1)
    and not exists (select from queue.backlog) and not exists (select from queue.backlog_part);
  update queue.deleted d set until = pg_current_xact_id() where d.until is null;
end $$;

-- What a job that is gone was, for one that comes to need it.
create or replace function queue._deleted_state(p_id bigint)
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return case when exists (select from queue.deleted d where d.id = p_id) then 'succeeded' else 'failed' end;
end $$;

-- sql/82_retry_jobs.sql
-- Manual retries: finished jobs become unfinished again, under their old ids and with their history.

-- Locks: the jobs' rows of queue.live and queue.finished, waited for in the order of ids; ADM, waited for.
-- Raises: 22023, QJ008.
create or replace function queue.retry(ids bigint[], force boolean default false)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', retry.ids);
  end if;
  perform queue._check_isolation();
  perform queue._check_ids(retry.ids);
  return query select r.id, r.outcome, r.error from queue._retry(retry.ids, coalesce(retry.force, false)) r;
end $$;
comment on function queue.retry(bigint[], boolean) is
  'Runs jobs again: finished ones (failed, cancelled, succeeded), and those that wait for a retry at once. Failures, crashes and yields are counted anew. A running job, or one whose expires_at has passed, is refused (QJ003) without force; with force the running claim is lost. One that has never started is refused (QJ004) while another job has its queueing lock. A row for each id: the new state in outcome, or an error with the state that it has.';

-- Locks and errors: as retry.
create or replace function queue.retry_failed(task text default null, queue text default null, max_jobs integer default 1000, after_id bigint default null)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_queue('{operator}', retry_failed.queue);
  end if;
  perform queue._check_isolation();
  if retry_failed.task is not null then
    perform queue._check_name('task', retry_failed.task);
  end if;
  if retry_failed.queue is not null then
    perform queue._check_name('queue', retry_failed.queue);
  end if;
  if retry_failed.max_jobs not between 1 and 1000 then
    perform queue._invalid('max_jobs must be 1 to 1000', 'Retry at most 1,000, then call again with the last id as after_id.', 'max_jobs: ' || retry_failed.max_jobs);
  end if;
  return query
    select r.id, r.outcome, r.error
    from queue._retry(array(
      select f.id from queue.finished f
      join queue.job j on j.id = f.id
      left join queue.job_state s on s.id = f.id
      where f.state = 'failed' and (retry_failed.after_id is null or f.id > retry_failed.after_id) and (retry_failed.task is null or j.task = retry_failed.task)
        and (retry_failed.queue is null or queue._matches(coalesce(s.queue, j.queue), retry_failed.queue))
      order by f.id limit coalesce(retry_failed.max_jobs, 1000)), false) r;
end $$;
comment on function queue.retry_failed(text, text, integer, bigint) is
  'queue.retry for jobs that have failed, oldest first: of a task, of queues (a name, prefix* or *), NULL: of all. At most max_jobs, which is 1,000 at most; where as many rows come there may be more: call again with the id of the last as after_id.';

-- What became of each id, in the order in which they were given. A job that has never started takes its queueing lock again,
-- and is refused (QJ004) where another has it.
-- Locks: first of all the queueing locks' rows, in their order: whoever defers such a job may hold them long; then as retry.
-- Why no job comes back without its key: what came to its end while this waited for ADM is looked at again under it.
-- Two sessions: retry_cancel_key.spec.
create or replace function queue._retry(p_ids bigint[], p_force boolean)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security invoker rows 10 as $$
#variable_conflict use_column
declare
  v_job record;
  v_done bigint[] := '{}'::bigint[];
  v_back bigint[] := '{}'::bigint[];
  v_keyed bigint[];
  v_unkeyed bigint[];
begin
  v_keyed := array(
    select f.id from unnest(p_ids) u (id)
    cross join lateral (
      select f.id from queue.finished f join queue.job j on j.id = f.id left join queue.job_state s on s.id = f.id
      where f.id = u.id and j.queueing_lock is not null and coalesce(s.claims, 0) = 0 and not (f.state = 'succeeded' and f.worker_id is not null)
      offset 0) f);
  if v_keyed <> '{}' then
    insert into queue.queueing_lock (key, job_id)
    select j.queueing_lock, j.id from queue.job j where j.id = any (v_keyed) order by j.queueing_lock, j.id
    on conflict on constraint queueing_lock_pkey do nothing;
  end if;
  perform from queue.live v where v.id = any (p_ids) order by v.id for update;
  perform from queue.finished f where f.id = any (p_ids) order by f.id for update;
  perform queue._admit_all();
  for v_job in
    select j.id, v.claim, v.worker_id, f.id is not null as is_finished, w.reason, coalesce(s.claims, 0) as claims,
      j.flags & 64 <> 0 and (j.options ->> 'expires_at')::timestamptz <= clock_timestamp() as is_expired,
      exists (select from queue.handover h where h.job_id = j.id and h.kind in ('ended', 'again')) as is_ending,
      f.id is not null and j.queueing_lock is not null and coalesce(s.claims, 0) = 0 and not (f.state = 'succeeded' and f.worker_id is not null)
        and (select k.job_id from queue.queueing_lock k where k.key = j.queueing_lock) is distinct from j.id as lacks_key
    from (select distinct u.id from unnest(p_ids) u (id)) u
    join queue.job j on j.id = u.id
    left join queue.job_state s on s.id = j.id
    left join queue.live v on v.id = j.id
    left join queue.finished f on f.id = j.id
    left join queue.waiting w on w.id = j.id
    order by j.id
  loop
    if v_job.is_expired and not p_force or v_job.is_ending then
      continue;
    elsif v_job.lacks_key then
      v_unkeyed := v_unkeyed || v_job.id;
    elsif v_job.is_finished then
      -- it may have come to its end meanwhile, and another call hold its row, and wait for ADM
      perform from queue.finished f where f.id = v_job.id for update skip locked;
      continue when not found;
      v_back := v_back || v_job.id;
      v_done := v_done || v_job.id;
    elsif v_job.claim is not null then
      perform from queue.live v where v.id = v_job.id and v.claim = v_job.claim for update skip locked;
      continue when not p_force or not found;
      delete from queue.expiry e where v_job.is_expired and e.id = v_job.id;
      perform queue._end_attempt('{"outcome": "retried", "error": "taken back by a retry with force"}', v_job.id, v_job.claim, true);
      perform queue._tell_abort(v_job.id, v_job.claim, v_job.worker_id, 'retried');
      v_done := v_done || v_job.id;
    elsif v_job.reason = 'schedule' and v_job.claims > 0 then
      continue when (select t.place from queue._take_out(v_job.id) t) is null;
      perform queue._start_over(array[v_job.id]);
      perform queue._advance(p_arrived => array[v_job.id]);
      v_done := v_done || v_job.id;
    end if;
  end loop;
  perform queue._drop_queueing_locks(array(select u.id from unnest(v_keyed) u (id) where u.id not in (select unnest(v_done))), 256 | 8192)
  where v_keyed <> '{}';
  perform queue._bring_back(v_back);
  perform queue._announce();
  return query
    select u.id, j.state, case when j.id is null then 'QJ001' when u.id in (select unnest(v_unkeyed)) then 'QJ004' when u.id not in (select unnest(v_done)) then 'QJ003' end
    from (select u.id, min(u.n) as n from unnest(p_ids) with ordinality u (id, n) group by u.id) u
    left join lateral (select j.id, j.state from queue.jobs j where j.id = u.id offset 0) j on true
    order by u.n;
end $$;

-- Makes finished jobs unfinished: they join their locks by their old ids, and go through the gates; those
-- that need them and have passed that gate go back to wait.
-- Locks: the caller holds ADM and the rows of queue.finished; rows of queue.live by skip locked.
create or replace function queue._bring_back(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_joined record;
begin
  if p_ids = '{}' then
    return;
  end if;
  with gone as (
    delete from queue.finished f where f.id = any (p_ids)
    returning f.id, f.attempts, f.started_at, f.state = 'succeeded' and f.worker_id is not null as was_claimed)
  insert into queue.job_state as s (id, attempts, claims, started_at)
  select g.id, g.attempts, g.was_claimed::integer, g.started_at from gone g
  on conflict on constraint job_state_pkey do update
    set (attempts, claims, started_at) = (excluded.attempts, s.claims + excluded.claims, coalesce(excluded.started_at, s.started_at));
  perform queue._start_over(p_ids);
  insert into queue.expiry (id, at)
  select j.id, (j.options ->> 'expires_at')::timestamptz from queue.job j
  where j.id = any (p_ids) and j.flags & 64 <> 0 and (j.options ->> 'expires_at')::timestamptz > clock_timestamp();
  v_joined := queue._join_locks(p_ids);
  perform queue._advance(
    p_arrived => p_ids || v_joined.displaced, p_turned => v_joined.passed, p_keys => v_joined.keys, p_changed => p_ids);
end $$;

-- sql/83_search.sql
-- Searching and listing jobs, newest first, in pages: what a call costs is bounded, however many jobs there are.

-- Reads jobs from the newest that is older than `before` until max_jobs have been found or max_bytes been
-- looked through. Then the last row has no id, and next_id is the `before` to go on with. Each job counts
-- as the bytes that were read of it, at least 100 (1,000 where only its state turned out to be another), so
-- that a call ends soon also where nothing matches.
-- Raises: 22023.
create or replace function queue.search(
  pattern text default null, queue text default null, state text default null, max_bytes bigint default 50000000,
  by text default 'text', task text default null, before bigint default null, max_jobs integer default 100)
returns table (id bigint, queue_name text, task_name text, job_state text, reason text, priority integer, attempts integer,
               created_at timestamptz, description text, bytes integer, excerpt text, next_id bigint)
language plpgsql stable parallel unsafe security definer rows 100
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_path jsonpath := queue._check_search(search.pattern, search.queue, search.state, search.max_bytes, search.by, search.task, search.max_jobs);
  v_before bigint := coalesce(search.before, 9223372036854775807);
  v_ids bigint[];
  v_n integer := case when search.pattern is null then least(search.max_jobs, 500) else 10 end;
  v_job record;
  v_bytes integer;
  v_looked bigint := 0;
  v_found integer := 0;
  v_limits text[] := queue._limits('{operator,reader}');
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  loop
    v_ids := queue._candidates(search.state, v_before, v_n);
    exit when v_ids = '{}';
    for v_job in
      select u.id, x.is_asked,
        case when x.is_asked and search.pattern is not null
          then queue._match(search.pattern, search.by, v_path, x.args, j.options ->> 'description', array[x.lock, j.queueing_lock] || j.keys) end as match
      from unnest(v_ids) with ordinality u (id, n)
      cross join lateral (select j.task, j.queue, j.lock, j.queueing_lock, j.keys, j.args, j.options, j.flags from queue.job j where j.id = u.id offset 0) j
      left join lateral (select s.queue, s.lock, s.args from queue.job_state s where s.id = u.id offset 0) s on true
      cross join lateral (
        select coalesce(queue._replaced_args(u.id, j.flags), s.args, j.args) as args, coalesce(s.lock, j.lock) as lock,
          (search.queue is null or queue._matches(coalesce(s.queue, j.queue), search.queue)) and (search.task is null or j.task = search.task)
            and (v_limits is null or queue._covers(v_limits, coalesce(s.queue, j.queue))) as is_asked) x
      order by u.n
    loop
      v_before := v_job.id;
      v_bytes := abs(v_job.match);
      v_looked := v_looked + greatest(100, v_bytes);
      if v_job.is_asked and (search.pattern is null or v_job.match > 0) then
        select v.id, v.queue, v.task, v.state, v.reason, v.priority, v.attempts, v.created_at, v.description, v_bytes,
          queue._excerpt(search.pattern, search.by, v_path, v.args)
        into id, queue_name, task_name, job_state, reason, priority, attempts, created_at, description, bytes, excerpt
        from queue.jobs v where v.id = v_job.id;
        if search.state is null or job_state = search.state then
          return next;
          v_found := v_found + 1;
        else
          v_looked := v_looked + 1000;
        end if;
      end if;
      exit when v_found >= search.max_jobs or v_looked >= search.max_bytes;
    end loop;
    exit when v_found >= search.max_jobs or v_looked >= search.max_bytes;
    v_n := case when v_bytes > 10000 then 10 else least(v_n * 2, 500) end;
  end loop;
  if v_ids <> '{}' and queue._candidates(search.state, v_before, 1) <> '{}' then
    return query
      select null::bigint, null::text, null::text, null::text, null::text, null::integer, null::integer, null::timestamptz, null::text, null::integer,
        format('stopped at %s jobs, %s bytes; go on with before => %s', v_found, v_looked, v_before), v_before;
  end if;
end $$;
comment on function queue.search(text, text, text, bigint, text, text, bigint, integer) is
  'Jobs, newest first, whose args hold pattern (or whose description does). by: text (a substring of the args as JSON text), path (a jsonpath that finds something, or a predicate that is true; without variables), key (the whole of a lock, queueing_lock or concurrency key). Without a pattern all, of a queue (a name, prefix* or *), task and state. When it stops at max_jobs or after max_bytes (NULL: no limit), the last row says so in excerpt, has no id, and next_id is the before to go on with.';

-- Raises: 22023, QJ001.
create or replace function queue.get(id bigint, path text)
returns setof jsonb language plpgsql stable parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_args jsonb;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator,reader}', array[get.id]);
  end if;
  if get.path is null or get.path = '' then
    perform queue._invalid('path is missing', 'Write it as in items[0].price, or as a jsonpath: $.items[*].price.');
  end if;
  select coalesce(queue._replaced_args(j.id, j.flags), s.args, j.args) into v_args from queue.job j left join queue.job_state s on s.id = j.id where j.id = get.id;
  if not found then
    perform queue._job_not_found(get.id);
  end if;
  return query
    select jsonb_path_query_tz(v_args, queue._jsonpath(case when get.path ~ '^[[:space:]]*([$]|(lax|strict)[[:space:]])' then get.path
                                                            when starts_with(get.path, '[') then '$' || get.path else '$.' || get.path end), '{}', true);
end $$;
comment on function queue.get(bigint, text) is
  'What a path finds in a job''s args, a row for each: items[0].price, or any jsonpath, as $.items[*].price. JSON null is a row with null in it, what is missing no row.';

-- Returns the pattern as a jsonpath where it is one.
-- Raises: 22023.
create or replace function queue._check_search(p_pattern text, p_queue text, p_state text, p_max_bytes bigint, p_by text, p_task text, p_max_jobs integer)
returns jsonpath language plpgsql immutable parallel unsafe security invoker as $$
begin
  if p_by is null or p_by not in ('text', 'path', 'key') then
    perform queue._invalid('by is not one of its values', 'Allowed: text, path, key.', 'by: ' || coalesce(left(p_by, 200), 'NULL'));
  elsif p_pattern = '' then
    perform queue._invalid('pattern is empty', 'Pass what to look for, or NULL to list every job.');
  elsif not p_state = any ('{scheduled,waiting,upstream_failed,blocked,ready,running,held,succeeded,failed,cancelled}'::text[]) then
    perform queue._invalid('state is not one of its values', 'Allowed: scheduled, waiting, upstream_failed, blocked, ready, running, held, succeeded, failed, cancelled.',
                           'state: ' || left(p_state, 200));
  elsif p_max_bytes < 1 then
    perform queue._invalid('max_bytes must be at least 1', 'Pass how many bytes to look through, or NULL for no limit.');
  elsif p_max_jobs < 1 or p_max_jobs is null then
    perform queue._invalid('max_jobs must be at least 1', 'Say how many jobs to return at most.');
  end if;
  if p_queue is not null then
    perform queue._check_name('queue', p_queue);
  end if;
  if p_task is not null then
    perform queue._check_name('task', p_task);
  end if;
  return case when p_by = 'path' then queue._jsonpath(p_pattern) end;
end $$;

-- Raises: 22023 unless it is a jsonpath without variables.
create or replace function queue._jsonpath(p_path text)
returns jsonpath language plpgsql immutable parallel unsafe security invoker as $$
declare
  v_path jsonpath;
begin
  begin
    v_path := p_path::jsonpath;
    -- a template is read only when a text is
    perform jsonb_path_query('"x"', ('$.datetime(' || t[1] || ')')::jsonpath, '{}', true)
    from regexp_matches(v_path::text, replace('[.]datetime[(]("(?:~~.|[^"~~])*")[)]', '~', chr(92)), 'g') t;
  exception when syntax_error or data_exception or feature_not_supported or program_limit_exceeded then
    perform queue._invalid('not a jsonpath', 'Write it as in $.items[*] ? (@.price > 3); quote odd names: $."a b".', sqlerrm);
  end;
  -- it is shown with every name and text in quotes
  if strpos(regexp_replace(v_path::text, replace('"(?:~~.|[^"~~])*"', '~', chr(92)), '""', 'g'), '$""') > 0 then
    perform queue._invalid('a jsonpath may not hold variables', 'Write the value itself; $ alone stands for the args.', 'path: ' || left(p_path, 200));
  end if;
  return v_path;
end $$;

-- How many bytes of a job were read, below zero if they do not match. A path is a predicate if it gives an
-- empty object a truth value; then it must be true.
create or replace function queue._match(p_pattern text, p_by text, p_path jsonpath, p_args jsonb, p_description text, p_keys text[])
returns integer language plpgsql stable parallel safe security invoker as $$
declare
  v_text text;
  v_item jsonb;
begin
  if p_by = 'key' then
    return case when p_pattern = any (p_keys) then 1 else -1 end;
  end if;
  v_text := p_args::text;
  if p_by = 'path' then
    v_item := jsonb_path_query_first_tz(p_args, p_path, '{}', true);
    if v_item = 'true' or v_item is not null and coalesce(jsonb_typeof(jsonb_path_query_first_tz('{}', p_path, '{}', true)), '') not in ('boolean', 'null') then
      return octet_length(v_text);
    end if;
  elsif strpos(v_text, p_pattern) > 0 or strpos(p_description, p_pattern) > 0 or strpos(v_text, queue._escaped(p_pattern)) > 0 then
    return octet_length(v_text);
  end if;
  return -octet_length(v_text);
end $$;

-- What is shown of a job that matches.
create or replace function queue._excerpt(p_pattern text, p_by text, p_path jsonpath, p_args jsonb)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_text text;
  v_at integer;
begin
  if p_pattern is null or p_by = 'key' then
    return null;
  elsif p_by = 'path' then
    return left(jsonb_path_query_first_tz(p_args, p_path, '{}', true)::text, 200);
  end if;
  v_text := p_args::text;
  v_at := coalesce(nullif(strpos(v_text, p_pattern), 0), strpos(v_text, queue._escaped(p_pattern)));
  return case when v_at > 0 then substr(v_text, greatest(v_at - 60, 1), 200) end;
end $$;

-- A text as it stands in JSON, without its quotes.
create or replace function queue._escaped(p_text text)
returns text language plpgsql immutable parallel safe security invoker as $$
begin
  return substr(to_json(p_text)::text, 2, length(to_json(p_text)::text) - 2);
end $$;

-- The newest jobs below an id that may be in a state (NULL: any), newest first: by the table that holds
-- those of that state, and what has not been admitted yet.
create or replace function queue._candidates(p_state text, p_before bigint, p_n integer)
returns bigint[] language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_reason text := case p_state when 'ready' then 'task_paused' when 'waiting' then 'needs' else p_state end;
  v_ids bigint[];
begin
  case
    when p_state is null then
      return array(select j.id from queue.job j where j.id < p_before order by j.id desc limit p_n);
    when p_state = 'failed' then
      return array(select f.id from queue.finished f where f.state = 'failed' and f.id < p_before order by f.id desc limit p_n);
    when p_state = 'cancelled' then
      return array(select f.id from queue.finished f where f.state = 'cancelled' and f.id < p_before order by f.id desc limit p_n);
    when p_state = 'succeeded' then
      return array(select f.id from queue.finished f where f.state = 'succeeded' and f.id < p_before order by f.id desc limit p_n);
    when p_state = 'running' then
      return array(select v.id from queue.live v where v.claim is not null and v.id < p_before order by v.id desc limit p_n);
    when p_state = 'blocked' then
      -- members of locks can't be read by id: where they abound, enough are among the newest jobs
      v_ids := array(
        select j.id
        from (select j.id, j.lock from queue.job j where j.id < p_before order by j.id desc limit 20000) j
        left join lateral (select s.lock from queue.job_state s where s.id = j.id offset 0) s on true
        left join lateral (select m.id from queue.lock_member m where m.lock = coalesce(s.lock, j.lock) and m.id = j.id and m.is_passed offset 0) m on true
        left join lateral (select w.reason from queue.waiting w where w.id = j.id offset 0) w on true
        where w.reason in ('slot', 'parked') or w.reason is null and m.id is not null
          and not exists (select from queue.live v where v.id = j.id) and not exists (select from queue.finished f where f.id = j.id)
        order by j.id desc limit p_n);
      if cardinality(v_ids) = p_n then
        return v_ids;
      end if;
      return array(
        select c.id
        from (
          (select w.id from queue.waiting w where w.reason = 'slot' and w.id < p_before order by w.id desc limit p_n)
          union
          (select w.id from queue.waiting w where w.reason = 'parked' and w.id < p_before order by w.id desc limit p_n)
          union
          (select m.id from queue.lock_member m
           where m.is_passed and m.id < p_before and not exists (select from queue.waiting w where w.id = m.id)
             and not exists (select from queue.live v where v.id = m.id) and not exists (select from queue.finished f where f.id = m.id)
           order by m.id desc limit p_n)) c
        order by c.id desc limit p_n);
    else null;
  end case;
  return array(
    select c.id
    from (
      (select v.id from queue.live v where p_state = 'ready' and v.claim is null and v.id < p_before order by v.id desc limit p_n)
      union
      (select w.id from queue.waiting w where p_state = 'scheduled' and w.reason = 'schedule' and w.id < p_before order by w.id desc limit p_n)
      union
      (select w.id from queue.waiting w
       where w.reason = v_reason and w.reason in ('held', 'upstream_failed', 'needs', 'task_paused') and w.id < p_before
       order by w.reason desc, w.id desc limit p_n)
      union
      (select h.job_id from queue.handover h where h.kind = 'again' and h.job_id < p_before order by h.job_id desc limit p_n)
      union
      select u.id from unnest(queue._unadmitted(p_state, p_before, p_n)) u (id)) c
    order by c.id desc limit p_n);
end $$;

-- The newest jobs below an id that have not been admitted and may be in a state.
create or replace function queue._unadmitted(p_state text, p_before bigint, p_n integer)
returns bigint[] language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  c record;
  v_ids bigint[];
begin
  -- they can't be read by id: where they abound, enough are among the newest jobs
  if (select count(*) from (select from queue.unadmitted a limit 1001) a) > 1000 then
    select k.next_xid, k.in_flight into c from queue.cursor k order by k.tick desc limit 1;
    v_ids := array(
      select j.id
      from (select j.id, j.xid, j.flags, j.scheduled_at, j.needs from queue.job j where j.id < p_before order by j.id desc limit 20000) j
      where queue._may_be(p_state, j.id, j.flags, j.scheduled_at, j.needs)
        and (j.xid >= c.next_xid or j.xid = any (c.in_flight)
             or (select true from queue.backlog b where (j.xid, j.id) > (b.from_xid, b.from_id) and j.xid <= b.to_xid limit 1)
             or (select true from queue.backlog_part b
                 where (j.xid, j.id) > (b.from_xid, b.from_id) and (j.xid, j.id) <= (b.to_xid, b.to_id) limit 1))
      order by j.id desc limit p_n);
    if cardinality(v_ids) = p_n then
      return v_ids;
    end if;
  end if;
  return array(
    select a.id
    from (select a.id, a.flags, a.scheduled_at, a.needs from queue.unadmitted a offset 0) a
    where a.id < p_before and queue._may_be(p_state, a.id, a.flags, a.scheduled_at, a.needs)
    order by a.id desc limit p_n);
end $$;

-- Whether a job that has not been admitted may be in a state. One that was replaced may be in another than
-- it was deferred in.
create or replace function queue._may_be(p_state text, p_id bigint, p_flags smallint, p_scheduled_at timestamptz, p_needs bigint[])
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return p_state = case when p_flags & 32 <> 0 then 'held' when p_scheduled_at > statement_timestamp() then 'scheduled'
                        when p_needs is not null then 'waiting' else 'ready' end
    or p_state <> 'upstream_failed' and exists (select from queue.job_state s where s.id = p_id);
end $$;

-- sql/85_inspect.sql
-- Asking: why a job is not running, what would come next, and whether the invariants hold.

-- Raises: QJ001.
create or replace function queue.why(id bigint)
returns text language plpgsql stable parallel safe security definer
set search_path = pg_catalog, pg_temp set jit = off as $$
#variable_conflict use_column
declare
  v record;
  v_text text;
  v_key text;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator,reader}', array[why.id]);
  end if;
  select j.id, j.state, j.reason, j.queue, j.task, j.lock, j.scheduled_at, j.worker_id, j.claim, j.started_at, j.finished_at, j.error,
    w.reason as gate, w.key, w.at, l.paused_until, l.kind, v.id is not null as is_live
  into v
  from queue.jobs j
  left join queue.waiting w on w.id = j.id
  left join queue.live v on v.id = j.id
  left join queue.lane l on l.lane = v.lane
  where j.id = why.id;
  if not found then
    perform queue._job_not_found(why.id);
  end if;
  case v.state
    when 'succeeded' then return format('it succeeded at %s', v.finished_at);
    when 'failed' then return format('it failed at %s: %s%s', v.finished_at, coalesce(v.reason, ''), coalesce(' (' || v.error || ')', ''));
    when 'cancelled' then return format('it was cancelled at %s: %s', v.finished_at, v.reason);
    when 'running' then
      return format('it runs since %s on worker %s, claim %s', v.started_at, v.worker_id, v.claim)
        || coalesce((select format('; its timeout passed at %s; its handler could not be ended and still runs', o.timeout_at)
                     from queue._overdue() o where o.id = v.id), '')
        || coalesce((select case when l.is_own then format('; its lease ends at %s', l.expires_at) else format('; its timeout ends at %s', l.expires_at - interval '10 s') end
                     from queue.lease l where l.id = v.id and l.claim = v.claim), '')
        || case when v.reason is not null then format('; its worker has been told to abort it: %s', v.reason) else '' end;
    when 'held' then return 'it is held; queue.unhold lets it go on';
    when 'scheduled' then return format('its time has not come: %s', v.scheduled_at);
    when 'waiting', 'upstream_failed' then
      return case v.state when 'waiting' then 'it needs ' else 'a need failed; retry it: ' end
        || coalesce(queue._why_needs(why.id, v.state = 'upstream_failed'), 'jobs that are being looked at');
    else null;
  end case;
  if v.gate = 'task_paused' then
    return format('its task %s is paused%s', v.task, coalesce(' until ' || v.at, ''));
  elsif v.gate = 'parked' then
    return 'a large backlog is being admitted, in which older jobs of its lock may be';
  elsif v.gate = 'slot' then
    v_key := substr(v.key, 2);
    select string_agg(r.id::text, ', ' order by r.id) into v_text
    from (select j.id from queue.live l join queue.job j on j.id = l.id left join queue.job_state s on s.id = j.id
          where l.claim is not null
            and case left(v.key, 1) when 'm' then coalesce(s.lock, j.lock) = v_key else v_key = any (j.keys) end
          order by j.id limit 20) r;
    return case left(v.key, 1)
      when 'm' then format('its lock %s is held by job %s', v_key, coalesce(v_text, 'that is about to start'))
      else format('its concurrency key %s is full: job %s', v_key, coalesce(v_text, 'that is about to start')) end;
  elsif v.state = 'blocked' then
    select m.id into v_text
    from (select m.id, 0 as n from queue.lock_member m where m.lock = v.lock and m.has_turn
          union all (select m.id, 1 from queue.lock_member m where m.lock = v.lock and not m.is_late order by m.id limit 1)
          union all (select m.id, 2 from queue.lock_member m where m.lock = v.lock order by m.id limit 1)) m
    where m.id <> why.id order by m.n limit 1;
    return coalesce(
      (select format('its lock %s is held by job %s', v.lock, j.id)
         || case when not queue._covers(queue._limits('{operator,reader}'), j.queue) then ''
                 else format(' (%s)', j.state) || case when j.finished_at is not null then '; the next fetch or tick passes it on' else '' end end
       from queue.jobs j where j.id = v_text::bigint),
      format('its lock %s is free; the next fetch or tick passes it on', v.lock));
  elsif not v.is_live then
    v.paused_until := queue._paused_until(v.queue);
    v.at := queue._task_paused_until(v.task, v.queue);
  end if;
  if v.at > clock_timestamp() then
    return format('its task %s is paused%s', v.task, case when isfinite(v.at) then format(' until %s', v.at) else '' end);
  elsif v.paused_until > clock_timestamp() then
    return format('its queue %s is paused%s', v.queue, case when isfinite(v.paused_until) then format(' until %s', v.paused_until) else '' end);
  elsif not exists (
    select from queue.worker w where w.gone_at is null and w.last_seen_at + w.dead_after >= clock_timestamp()
      and (w.queues is null or exists (select from unnest(w.queues) q where queue._matches(v.queue, q)))) then
    return format('no live worker serves its queue %s', v.queue);
  elsif not v.is_live then
    return case when exists (select from queue.handover h where h.job_id = why.id and h.kind = 'again')
      then 'its last run has just ended; the next fetch or tick admits it again'
      else 'it has not been admitted yet; the next fetch or tick does that' end;
  elsif queue._is_queue_full(v.queue) then
    return queue._why_full(v.queue);
  elsif v.kind = 2 then
    return 'it crashed before, so it is claimed alone, by a worker that runs nothing else';
  end if;
  select string_agg(distinct format('%s %s', case left(k.key, 1) when 'm' then 'lock' else 'concurrency key' end, substr(k.key, 2)), ', ') into v_text
  from queue.live l
  cross join lateral queue._keys_of(array[l.id], array[l.flags]) k
  cross join lateral (select s.slots, s.used from queue.semaphore s where s.key = k.key order by s.tick desc limit 1) s
  where l.id = why.id and s.used >= s.slots;
  if v_text is not null then
    return format('no slot is free: %s', v_text);
  end if;
  return 'it is ready: the next worker with a free slot takes it in its order';
end $$;
comment on function queue.why(bigint) is
  'Says why a job is not running: which job holds its lock or which fill its key, what it needs, until when it is paused or scheduled, whether any live worker serves its queue.';

-- Claims whose timeout has passed, and which their worker has extended since, as it could not end the handler.
create or replace function queue._overdue()
returns table (id bigint, timeout_at timestamptz) language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select l.id, t.at
    from (select l.id, l.claim, l.expires_at from queue.lease l where l.is_own order by l.expires_at desc limit 10000) l
    cross join lateral (select v.claimed_at from queue.live v where v.id = l.id and v.claim = l.claim offset 0) v
    cross join lateral (
      select v.claimed_at + (j.options ->> 'timeout')::interval as at from queue.job j where j.id = l.id offset 0) t
    where l.expires_at > t.at + interval '10 s';
end $$;

create or replace function queue._why_full(p_queue text)
returns text language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v record;
begin
  select c.max_running, c.rate_limit, c.rate_per,
    coalesce((select s.used from queue.semaphore s where s.key = 'q' || p_queue order by s.tick desc limit 1), 0) as used
  into v from queue.queue_config c where c.queue = p_queue;
  if v.used >= v.max_running then
    return format('its queue %s has reached max_running %s', p_queue, v.max_running);
  end if;
  return format('its queue %s has used up its rate of %s per %s; the next start is at %s', p_queue, v.rate_limit, v.rate_per, queue._next_start(p_queue));
end $$;

create or replace function queue.peek(queues text[] default null, n integer default 10)
returns table (id bigint, task text, args jsonb, queue text, priority integer, lock text, attempts integer, scheduled_at timestamptz, deadline timestamptz)
language plpgsql stable parallel safe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    queues := queue._bound_queues('{worker,operator,reader}', queues);
  end if;
  if peek.n is null or peek.n < 1 then
    perform queue._invalid('n must be at least 1', 'Say how many jobs to show.');
  end if;
  return query
    select j.id, j.task, j.args, j.queue, j.priority, j.lock, j.attempts, j.scheduled_at, j.deadline
    from (
      select c.id, g.priority, c.deadline, c.first_id
      from (
        select l.queue, l.priority, array_agg(l.lane) as lanes, array_agg(l.low_deadline) as deadlines, array_agg(l.low_id) as ids
        from queue.lane l
        where not l.is_idle and (l.paused_until is null or l.paused_until <= clock_timestamp())
          and (peek.queues is null or exists (select from unnest(peek.queues) q where queue._matches(l.queue, q)))
          and (l.kind = 0 or not queue._is_queue_full(l.queue))
        group by l.queue, l.priority) g
      cross join lateral (
        select v.id, v.deadline, first_value(v.id) over (order by v.deadline, v.id) as first_id
        from unnest(g.lanes, g.deadlines, g.ids) l (lane, deadline, id)
        cross join lateral (
          select v.id, v.deadline from queue.live v
          where v.lane = l.lane and (v.deadline, v.id) >= (l.deadline, l.id) and v.claim is null
          order by v.deadline, v.id limit peek.n) v
        order by v.deadline, v.id limit peek.n) c
      union all
      (select a.id, a.priority, coalesce(a.deadline, 'infinity'), min(a.id) over (partition by a.queue, a.priority)
       from queue.unadmitted a
       where a.flags & 32 = 0 and a.needs is null and coalesce(a.scheduled_at <= clock_timestamp(), true)
         and (a.lock is null or not exists (select from queue.lock_member m where m.lock = a.lock))
         and (peek.queues is null or exists (select from unnest(peek.queues) q where queue._matches(a.queue, q)))
         and coalesce(queue._paused_until(a.queue) <= clock_timestamp(), true)
       order by a.priority desc, coalesce(a.deadline, 'infinity'), a.id limit peek.n)
      order by priority desc, first_id, deadline, id limit peek.n) c
    cross join lateral (select j.* from queue.jobs j where j.id = c.id offset 0) j
    order by c.priority desc, c.first_id, c.deadline, c.id;
end $$;
comment on function queue.peek(text[], integer) is
  'The jobs that fetch would take next, in order. Changes nothing.';

-- Every invariant that does not hold. Reads one snapshot; a sound database gives no row.
create or replace function queue.check()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security definer rows 10
set search_path = pg_catalog, pg_temp set enable_nestloop = off set jit = off as $$
#variable_conflict use_column
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  return query
    select 'in two places'::text, x.id, string_agg(x.place, ', ' order by x.place)
    from (select v.id, 'live'::text as place from queue.live v union all
          select f.id, 'finished' from queue.finished f union all
          select w.id, 'waiting ' || w.reason from queue.waiting w) x
    group by x.id having count(*) > 1;
  return query
    select 'no such job'::text, x.id, x.place
    from (select v.id, 'live'::text as place from queue.live v union all
          select f.id, 'finished' from queue.finished f union all
          select w.id, 'waiting' from queue.waiting w union all
          select m.id, 'lock_member' from queue.lock_member m union all
          select k.job_id, 'queueing_lock' from queue.queueing_lock k union all
          select l.id, 'lease' from queue.lease l union all
          select s.id, 'job_state' from queue.job_state s union all
          select a.job_id, 'attempt' from queue.attempt a) x
    where not exists (select from queue.job j where j.id = x.id);
  return query
    select 'of no known state or kind'::text, f.id, f.state from queue.finished f where f.state not in ('succeeded', 'failed', 'cancelled')
    union all
    select 'of no known state or kind', h.job_id, h.kind from queue.handover h where h.kind not in ('ended', 'again', 'replace', 'recheck', 'regate', 'refill');
  return query
    select 'admitted and nowhere'::text, j.id, format('flags %s', j.flags)
    from queue.job j
    cross join (select c.next_xid, c.in_flight from queue.cursor c order by c.tick desc limit 1) c
    where j.xid < c.next_xid and j.xid <> all (c.in_flight)
      and not exists (select from queue.live v where v.id = j.id) and not exists (select from queue.finished f where f.id = j.id)
      and not exists (select from queue.waiting w where w.id = j.id)
      and not exists (select from queue.lock_member m where m.id = j.id)
      and not exists (select from queue.handover h where h.job_id = j.id)
      and not exists (select from queue.backlog b where (j.xid, j.id) > (b.from_xid, b.from_id) and j.xid <= b.to_xid)
      and not exists (select from queue.backlog_part b
                      where (j.xid, j.id) > (b.from_xid, b.from_id) and (j.xid, j.id) <= (b.to_xid, b.to_id) and j.priority <= b.priority);
  return query
    select 'handed over, and the cursor has passed it'::text, o.job_id, o.kind from queue._orphaned_handovers() o;
  return query
    select 'waits for a time before the mark of what is due'::text, w.id, format('at %s, mark %s', w.at, k.due_at)
    from queue.waiting w
    cross join (select c.due_at from queue.cursor c order by c.tick desc limit 1) k
    where w.at < k.due_at;
  return query
    select 'ready below the low mark'::text, v.id, format('lane %s', v.lane)
    from queue.live v join queue.lane l on l.lane = v.lane
    where v.claim is null and ((v.deadline, v.id) < (l.low_deadline, l.low_id) or l.is_idle);
  return query
    select 'in a lane that is missing'::text, v.id, format('lane %s', v.lane)
    from queue.live v where not exists (select from queue.lane l where l.lane = v.lane)
    union all
    select 'waits for a slot in a lane that is missing', w.id, format('lane %s', w.lane)
    from queue.waiting w where w.lane is not null and not exists (select from queue.lane l where l.lane = w.lane);
  return query
    select 'in another lane than its queue and priority have'::text, v.id, format('lane %s', v.lane)
    from queue.live v join queue.lane l on l.lane = v.lane
    join queue.job j on j.id = v.id left join queue.job_state s on s.id = v.id
    where v.claim is null
      and ((l.queue, l.priority) <> (coalesce(s.queue, j.queue), coalesce(s.priority, j.priority))
           or v.deadline <> coalesce(s.deadline, j.deadline, 'infinity'));
  return query
    select 'a job with a lock that it has not joined'::text, j.id, coalesce(s.lock, j.lock)
    from (select v.id from queue.live v union all select w.id from queue.waiting w where w.reason <> 'parked') x
    join queue.job j on j.id = x.id left join queue.job_state s on s.id = x.id
    where coalesce(s.lock, j.lock) <> '' and not exists (select from queue.lock_member m where m.id = j.id and m.lock = coalesce(s.lock, j.lock));
  return query select c.problem, c.id, c.detail from queue._check_locks() c;
  return query select c.problem, c.id, c.detail from queue._check_semaphores() c;
  return query select c.problem, c.id, c.detail from queue._check_need_rows() c;
  return query select c.problem, c.id, c.detail from queue._check_claim_rows() c;
  return query select c.problem, c.id, c.detail from queue._check_schedules() c;
  return query
    select 'a queueing lock whose job has started'::text, k.job_id, k.key
    from queue.queueing_lock k join queue.job j on j.id = k.job_id
    where exists (select from queue.finished f where f.id = j.id)
      or j.queueing_lock is distinct from k.key
      or j.flags & 256 <> 0 and exists (select from queue.live v where v.id = j.id and v.claim is not null);
  return query
    select 'not one row'::text, null::bigint, x.name
    from (select 'admission'::text as name, count(*) as n from queue.admission union all
          select 'cursor', count(*) from queue.cursor union all
          select 'installation', count(*) from queue.installation) x
    where x.n <> 1;
  return query
    select 'claimed by a worker that never was'::text, v.id, format('worker %s', v.worker_id)
    from queue.live v where v.claim is not null and v.worker_id is null;
  return query
    select 'limits that nobody looks for'::text, null::bigint, c.relname::text
    from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relname = 'unlimited' and exists (select from queue.access a where a.queues is not null);
end $$;
comment on function queue.check() is
  'Every invariant of the tables that does not hold: problem, the job if it is one, detail. No rows on a sound database.';

-- sql/86_stats.sql
-- Figures: what there is and how it goes, what is wrong with the database, how many jobs should run at once.

-- Cost: it reads what is unfinished and what ended within the hour, not the rest.
create or replace function queue.stats()
returns table (
  queue text, task text, scheduled bigint, waiting bigint, upstream_failed bigint, blocked bigint, ready bigint, running bigint, held bigint,
  failed bigint, oldest_ready_for interval,
  succeeded_5m bigint, failed_5m bigint, cancelled_5m bigint, failures_5m bigint, per_second_5m numeric,
  wait_p50_5m interval, wait_p95_5m interval, wait_p99_5m interval, run_p50_5m interval, run_p95_5m interval, run_p99_5m interval,
  succeeded_1h bigint, failed_1h bigint, cancelled_1h bigint, failures_1h bigint, per_second_1h numeric,
  wait_p50_1h interval, wait_p95_1h interval, wait_p99_1h interval, run_p50_1h interval, run_p95_1h interval, run_p99_1h interval)
language plpgsql stable parallel safe security definer rows 50
set search_path = pg_catalog, pg_temp set jit = off as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_hour timestamptz := v_now - interval '1 hour';
  v_5m timestamptz := v_now - interval '5 minutes';
  v_limits text[] := queue._limits('{operator,reader}');
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  return query
    select k.queue, k.task, coalesce(u.scheduled, 0), coalesce(u.waiting, 0), coalesce(u.upstream_failed, 0), coalesce(u.blocked, 0),
      coalesce(u.ready, 0), coalesce(u.running, 0), coalesce(u.held, 0), coalesce(b.failed, 0), v_now - u.oldest_ready_at,
      coalesce(d.succeeded_5m, 0), coalesce(d.failed_5m, 0), coalesce(d.cancelled_5m, 0), coalesce(a.failures_5m, 0),
      round(coalesce(d.n_5m, 0) / 300.0, 3),
      d.wait_5m[1], d.wait_5m[2], d.wait_5m[3], d.run_5m[1], d.run_5m[2], d.run_5m[3],
      coalesce(d.succeeded_1h, 0), coalesce(d.failed_1h, 0), coalesce(d.cancelled_1h, 0), coalesce(a.failures_1h, 0),
      round(coalesce(d.n_1h, 0) / 3600.0, 3),
      d.wait_1h[1], d.wait_1h[2], d.wait_1h[3], d.run_1h[1], d.run_1h[2], d.run_1h[3]
    from (
      select u.queue, u.task, count(*) filter (where u.state = 'scheduled') as scheduled, count(*) filter (where u.state = 'waiting') as waiting,
        count(*) filter (where u.state = 'upstream_failed') as upstream_failed, count(*) filter (where u.state = 'blocked') as blocked,
        count(*) filter (where u.state = 'ready') as ready, count(*) filter (where u.state = 'running') as running,
        count(*) filter (where u.state = 'held') as held, min(u.due_at) filter (where u.state = 'ready') as oldest_ready_at
      from queue.unfinished u group by u.queue, u.task) u
    full join (
      select coalesce(s.queue, j.queue) as queue, j.task, count(*) as failed
      from queue.finished f join queue.job j on j.id = f.id left join queue.job_state s on s.id = f.id
      where f.state = 'failed' group by 1, 2) b on (b.queue, b.task) = (u.queue, u.task)
    full join (
      select x.queue, x.task, count(*) filter (where x.is_5m) as n_5m, count(*) as n_1h,
        count(*) filter (where x.state = 'succeeded' and x.is_5m) as succeeded_5m, count(*) filter (where x.state = 'succeeded') as succeeded_1h,
        count(*) filter (where x.state = 'failed' and x.is_5m) as failed_5m, count(*) filter (where x.state = 'failed') as failed_1h,
        count(*) filter (where x.state = 'cancelled' and x.is_5m) as cancelled_5m, count(*) filter (where x.state = 'cancelled') as cancelled_1h,
        percentile_cont('{0.5,0.95,0.99}'::double precision[]) within group (order by x.wait) filter (where x.is_5m) as wait_5m,
        percentile_cont('{0.5,0.95,0.99}'::double precision[]) within group (order by x.wait) as wait_1h,
        percentile_cont('{0.5,0.95,0.99}'::double precision[]) within group (order by x.run) filter (where x.is_5m) as run_5m,
        percentile_cont('{0.5,0.95,0.99}'::double precision[]) within group (order by x.run) as run_1h
      from (
        select coalesce(s.queue, j.queue) as queue, j.task, f.state, f.finished_at > v_5m as is_5m, f.finished_at - f.started_at as run,
          greatest(f.started_at - coalesce(nullif(coalesce(s.scheduled_at, j.scheduled_at), '-infinity'), j.created_at), '0') as wait
        from queue.finished f join queue.job j on j.id = f.id left join queue.job_state s on s.id = f.id
        where f.finished_at > v_hour) x
      group by x.queue, x.task) d on (d.queue, d.task) = (coalesce(u.queue, b.queue), coalesce(u.task, b.task))
    full join (
      select coalesce(s.queue, j.queue) as queue, j.task, count(*) as failures_1h, count(*) filter (where a.finished_at > v_5m) as failures_5m
      from queue.attempt a join queue.job j on j.id = a.job_id left join queue.job_state s on s.id = a.job_id
      where a.finished_at > v_hour and a.outcome in ('failed', 'crashed', 'timed_out') group by 1, 2) a
      on (a.queue, a.task) = (coalesce(u.queue, b.queue, d.queue), coalesce(u.task, b.task, d.task))
    cross join lateral (select coalesce(u.queue, b.queue, d.queue, a.queue) as queue, coalesce(u.task, b.task, d.task, a.task) as task) k
    where v_limits is null or queue._covers(v_limits, k.queue)
    order by k.queue, k.task;
end $$;
comment on function queue.stats() is
  'A row for each queue and task: its unfinished jobs by state, the failed ones that are kept, for how long the oldest ready one has been due; and of the last 5 minutes and the last hour the jobs that ended, attempts that failed (failures), jobs per second, and the percentiles of waiting (from when it was due to its last start) and running.';

-- What ended in the last 5 minutes says how many slots it kept busy in them, and how long a job takes; what
-- runs may be the one job of hours among many of seconds, so it says that only where nothing has ended.
-- Raises: 22023.
create or replace function queue.autoscale_hint(within interval default '1 minute')
returns table (queue text, ready bigint, running bigint, workers bigint, per_second numeric, run_for interval, slots integer)
language plpgsql stable parallel safe security definer rows 10
set search_path = pg_catalog, pg_temp set jit = off as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_5m timestamptz := v_now - interval '5 minutes';
  v_limits text[] := queue._limits('{operator,reader}');
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  if autoscale_hint.within is null or autoscale_hint.within < interval '1 second' then
    perform queue._invalid('within must be at least a second', 'Say in which time what is ready should have been started.');
  end if;
  perform queue._check_interval('within', autoscale_hint.within);
  return query
    with u as materialized (
      select u.queue, count(*) filter (where u.state <> 'running') as ready, count(*) filter (where u.state = 'running') as running
      from queue.unfinished u
      where u.state in ('ready', 'running') or u.state = 'scheduled' and u.due_at <= v_now + autoscale_hint.within
      group by u.queue),
    r as (
      select l.queue, avg(v_now - v.claimed_at) as run_for
      from queue.live v join queue.lane l on l.lane = v.lane where v.claim is not null group by l.queue),
    d as (
      select coalesce(s.queue, j.queue) as queue, count(*) / 300.0 as rate, avg(f.finished_at - f.started_at) as run_for,
        sum(extract(epoch from f.finished_at - greatest(f.started_at, v_5m))) / 300.0 as busy
      from queue.finished f join queue.job j on j.id = f.id left join queue.job_state s on s.id = f.id
      where f.finished_at > v_5m and f.started_at is not null group by 1)
    select q.name, coalesce(u.ready, 0), coalesce(u.running, 0), w.n, round(coalesce(d.rate, 0), 3), x.run_for,
      least(c.max_running, 2147483647, ceil(
        greatest(coalesce(u.running, 0), d.busy)
        + coalesce(u.ready, 0) * least(1, extract(epoch from x.run_for) / extract(epoch from autoscale_hint.within))))::integer
    from (select u.queue as name from u union select d.queue from d union select c.queue from queue.queue_config c) q
    left join u on u.queue = q.name
    left join r on r.queue = q.name
    left join d on d.queue = q.name
    left join queue.queue_config c on c.queue = q.name
    cross join lateral (select coalesce(d.run_for, r.run_for, interval '1 second') as run_for) x
    cross join lateral (
      select count(*) as n from queue.worker w
      where w.gone_at is null and w.last_seen_at + w.dead_after >= v_now
        and (w.queues is null or exists (select from unnest(w.queues) p where queue._matches(q.name, p)))) w
    where coalesce(queue._paused_until(q.name) <= v_now, true) and (v_limits is null or queue._covers(v_limits, q.name))
    order by q.name;
end $$;
comment on function queue.autoscale_hint(interval) is
  'For each queue that is not paused: slots, how many jobs should run at once so that what is ready, or due within that time, starts within it: at least those that run, and those that what ended in the last 5 minutes kept busy; and more for what is ready, at most one each, by how long a job took in these 5 minutes (where none ended, by how long those that run have run; 1 second where none does).';

create or replace function queue.health()
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security definer rows 12
set search_path = pg_catalog, pg_temp set jit = off as $$
#variable_conflict use_column
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  return query select h.name, h.status, h.detail, h.fix from queue._health(clock_timestamp()) h;
end $$;
comment on function queue.health() is
  'A row for each check of what makes queues stop or slow down: status ok, warn or fail, what was found in detail, and what to do in fix. For the invariants of the tables see queue.check().';

-- Every check looks at a bounded number of rows.
create or replace function queue._health(p_now timestamptz)
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 12 as $$
#variable_conflict use_column
declare
  v record;
  v_hidden bigint;
begin
  name := 'version';
  select t.code, t.tables into v from queue.version() t;
  status := case when v.code = v.tables then 'ok' else 'fail' end;
  detail := format('code %s, tables %s', v.code, v.tables);
  fix := case when v.code <> v.tables then 'select queue.migrate()' end;
  return next;

  name := 'workers';
  select count(*) filter (where w.gone_at is null and w.last_seen_at + w.dead_after >= p_now) as alive,
    count(*) filter (where w.gone_at is null and w.last_seen_at + w.dead_after < p_now - interval '10 s'
                       or not w.is_clear and w.gone_at < p_now - interval '1 minute') as dead,
    (select count(*) from (select from queue.live l limit 100001) l) as live
  into v from queue.worker w;
  status := case when v.dead > 0 or v.alive = 0 and v.live > 0 then 'fail' when v.alive = 0 then 'warn' else 'ok' end;
  detail := format('%s alive', v.alive)
    || case when v.dead > 0 then format(', %s dead and not reaped', v.dead) else '' end
    || case when v.alive = 0 and v.live > 0 then format(', %s jobs ready or running', case when v.live > 100000 then 'more than 100000' else v.live::text end) else '' end;
  fix := case when v.dead > 0 then 'Nobody calls queue.tick(): start a worker, or run it by pg_cron. Now: select * from queue.tick()'
              when v.alive = 0 then 'Start a worker: pgdefer worker' end;
  return next;

  name := 'queues';
  select count(*) as n, string_agg(l.queue, ', ' order by l.queue) filter (where l.no <= 10) as names into v
  from (
    select l.queue, row_number() over (order by l.queue) as no
    from (select distinct l.queue from queue.lane l
          where (l.paused_until is null or l.paused_until <= p_now)
            and exists (select from queue.live v where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null)
            and not exists (
              select from queue.worker w
              where w.gone_at is null and w.last_seen_at + w.dead_after >= p_now
                and (w.queues is null or exists (select from unnest(w.queues) q where queue._matches(l.queue, q))))) l) l;
  status := case when v.n > 0 then 'fail' else 'ok' end;
  detail := case when v.n > 0 then format('ready jobs in %s queues that no live worker serves: %s', v.n, v.names) else 'every queue with ready jobs is served, or paused' end;
  fix := case when v.n > 0 then 'Start a worker for them: pgdefer worker --queues NAME' end;
  return next;

  name := 'paused';
  select count(*) as n, string_agg(l.queue, ', ' order by l.queue) filter (where l.no <= 10) as names into v
  from (
    select l.queue, row_number() over (order by l.queue) as no
    from (select distinct l.queue from queue.lane l
          where l.paused_until > p_now
            and exists (select from queue.live v where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null)) l) l;
  status := case when v.n > 0 then 'warn' else 'ok' end;
  detail := case when v.n > 0 then format('ready jobs in %s paused queues: %s', v.n, v.names) else 'no paused queue holds ready jobs' end;
  fix := case when v.n > 0 then 'select queue.resume(name)' end;
  return next;

  name := 'due';
  select least(
      (select w.at from queue.waiting w where w.at >= k.due_at order by w.at limit 1),
      (select j.created_at from queue.job j where j.xid >= k.next_xid order by j.xid, j.id limit 1),
      (select e.at from queue.expiry e where not exists (select from queue.live l where l.id = e.id and l.claim is not null) order by e.at limit 1),
      queue._next_lease_end()) as at
  into v from queue.cursor k order by k.tick desc limit 1;
  status := case when v.at < p_now - interval '10 minutes' then 'fail' when v.at < p_now - interval '1 minute' then 'warn' else 'ok' end;
  detail := case when status = 'ok' then 'nothing is overdue' else format('something has been due for %s', date_trunc('second', p_now - v.at)) end;
  fix := case when status <> 'ok' then 'Nobody calls queue.tick(): start a worker, or run it by pg_cron. Now: select * from queue.tick()' end;
  return next;

  name := 'schedules';
  select count(*) filter (where s.due_at < p_now - interval '1 minute') as late, count(*) filter (where s.reason is not null and s.reason <> 'paused') as broken,
    string_agg(format('%s%s', left(s.name, 100), coalesce(': ' || left(s.reason, 200), '')), '; ' order by s.name) filter (where s.no <= 5) as names
  into v
  from (select s.name, s.due_at, s.reason, row_number() over (order by s.name) as no from queue.schedule s
        where s.is_enabled and (s.due_at < p_now - interval '1 minute' or s.reason is not null and s.reason <> 'paused')) s;
  status := case when v.late > 0 then 'fail' when v.broken > 0 then 'warn' else 'ok' end;
  detail := case when status = 'ok' then 'no recurring run is late' else format('%s late, %s with an error: %s', v.late, v.broken, v.names) end;
  fix := case when v.late > 0 then 'Nobody calls queue.tick(): start a worker, or run it by pg_cron. Now: select * from queue.tick()'
              when v.broken > 0 then 'See reason in queue.schedules, and mend the task''s defaults or the schedule''s options.' end;
  return next;

  name := 'admission';
  v := queue._admission_holder();
  status := case when v.pid is null and v.state is null or v.since > p_now - interval '5 s' then 'ok' when v.since > p_now - interval '15 s' then 'warn'
                 when v.since is null then 'warn' else 'fail' end;
  detail := case when status = 'ok' then 'no session keeps the admission lock'
                 else format('%s%s holds the admission lock%s; nobody else can fetch what is new', coalesce('process ' || v.pid, 'no process'), coalesce(' of role ' || v.role, ''),
                             coalesce(', in a transaction that is open since ' || date_trunc('second', v.since), '')
                             || coalesce(' (' || v.state || ')', '')) end;
  fix := case when status <> 'ok' then 'Look again in a moment; if it is the same process, select queue.unblock() ends it; a prepared transaction is ended by ROLLBACK PREPARED' end;
  return next;

  name := 'timeouts';
  select count(*) as n, string_agg(format('job %s at %s', o.id, date_trunc('second', o.timeout_at)), ', ' order by o.timeout_at) filter (where o.no <= 10) as jobs into v
  from (select o.*, row_number() over (order by o.timeout_at) as no from queue._overdue() o) o;
  status := case when v.n > 0 then 'warn' else 'ok' end;
  detail := case when v.n > 0 then format('the timeout of %s jobs has passed; their handlers could not be ended and still run: %s', v.n, v.jobs)
                 else 'no handler outlives its timeout' end;
  fix := case when v.n > 0 then 'Each keeps its slot and its lock until it ends. Restart its worker (queue.why says which); run such tasks in processes, which can be killed' end;
  return next;

  name := 'failures';
  select count(*) filter (where f.state = 'failed') as failed, count(*) as n into v
  from (select f.state from queue.finished f where f.finished_at > p_now - interval '1 hour' limit 100000) f;
  status := case when v.failed >= 20 and v.failed > v.n * 0.1 then 'warn' else 'ok' end;
  detail := format('%s of %s jobs that ended within the hour have failed', v.failed, v.n);
  fix := case when status <> 'ok' then 'select * from queue.jobs where state = ''failed'' order by id desc limit 20; once mended: select queue.retry_failed()' end;
  return next;

  name := 'transactions';
  select count(*) into v_hidden
  from pg_stat_activity a
  where a.usesysid is not null and a.query = '<insufficient privilege>' and a.pid <> pg_backend_pid() and a.datname = current_database();
  select h.since, h.what, h.fix into v
  from (
    select coalesce(a.xact_start, a.query_start) as since, format('session %s of %s (%s)', a.pid, a.usename, coalesce(a.state, a.backend_type)) as what,
      format('select pg_terminate_backend(%s)', a.pid) as fix
    from pg_stat_activity a where a.backend_xmin is not null and a.pid <> pg_backend_pid() and a.usesysid is not null and a.datname = current_database()
    union all
    select p.prepared, format('prepared transaction %L', p.gid), format('commit prepared %L, or rollback prepared %L', p.gid, p.gid)
    from pg_prepared_xacts p where p.database = current_database()
    union all
    select null, format('replication slot %s', r.slot_name), format('Let its consumer catch up, or select pg_drop_replication_slot(%L)', r.slot_name)
    from pg_replication_slots r where age(coalesce(r.xmin, r.catalog_xmin)) > 10000000) h
  order by h.since nulls first limit 1;
  status := case when v.what is null or v.since > p_now - interval '5 minutes' then case when v_hidden > 0 then 'warn' else 'ok' end
                 when v.since > p_now - interval '1 hour' then 'warn' else 'fail' end;
  detail := case when status = 'ok' or v.what is null or v.since > p_now - interval '5 minutes'
      then case when v_hidden > 0 then format('%s sessions of other roles can''t be seen', v_hidden) else 'no transaction has been open for 5 minutes' end
    when v.since is null then v.what || ' keeps old row versions'
    else format('%s has had a transaction open for %s: dead rows stay as long', v.what, date_trunc('second', p_now - v.since)) end;
  fix := case when status = 'ok' then null
              when v.what is null or v.since > p_now - interval '5 minutes' then format('grant pg_read_all_stats to %I', current_user) else v.fix end;
  return next;

  name := 'bloat';
  select string_agg(format('%s: %s dead rows, %s live, %s', t.relname, t.dead, t.live, pg_size_pretty(t.size)), '; ' order by t.dead desc) as what,
    string_agg(format('vacuum queue.%I', t.relname), '; ' order by t.dead desc) as fix, bool_or(t.dead > 1000000) as is_bad
  into v
  from (
    select c.relname, pg_stat_get_dead_tuples(c.oid) as dead, pg_stat_get_live_tuples(c.oid) as live, pg_relation_size(c.oid) as size
    from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r'
      and c.relname in ('live', 'cursor', 'lane', 'semaphore', 'key_lane', 'lock_member', 'waiting', 'handover', 'job_state', 'rate_start', 'queueing_lock', 'worker')) t
  where t.dead > 100000 and t.dead > 2 * t.live;
  status := case when v.is_bad then 'fail' when v.what is not null then 'warn' else 'ok' end;
  detail := coalesce(v.what, 'the hot tables hold few dead rows');
  fix := v.fix || case when v.fix is not null then '; see the check transactions for what keeps dead rows' end;
  return next;

  name := 'autovacuum';
  select string_agg(x.what, '; ') as what, bool_or(x.is_bad) as is_bad into v
  from (
    select format('%s is off', s.setting) as what, true as is_bad
    from unnest('{autovacuum,track_counts}'::text[]) s (setting) where current_setting(s.setting) <> 'on'
    union all
    select format('%s: %s dead rows, last vacuumed %s', c.relname, t.dead, coalesce(date_trunc('second', t.last)::text, 'never')), t.dead > 10 * t.threshold
    from pg_class c
    cross join lateral (
      select pg_stat_get_dead_tuples(c.oid) as dead, greatest(pg_stat_get_last_autovacuum_time(c.oid), pg_stat_get_last_vacuum_time(c.oid)) as last,
        coalesce((select o.option_value::double precision from pg_options_to_table(c.reloptions) o where o.option_name = 'autovacuum_vacuum_threshold'),
                 current_setting('autovacuum_vacuum_threshold')::double precision)
        + greatest(c.reltuples, 0) * coalesce((select o.option_value::double precision from pg_options_to_table(c.reloptions) o where o.option_name = 'autovacuum_vacuum_scale_factor'),
                               current_setting('autovacuum_vacuum_scale_factor')::double precision) as threshold) t
    where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r' and t.dead > greatest(3 * t.threshold, 10000) and coalesce(t.last < p_now - interval '5 minutes', true)
    union all
    select format('%s: its oldest transaction id is %s old', c.relname, age(c.relfrozenxid)), age(c.relfrozenxid) > 1500000000
    from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r' and age(c.relfrozenxid) > 1.5 * current_setting('autovacuum_freeze_max_age')::integer) x;
  status := case when v.is_bad then 'fail' when v.what is not null then 'warn' else 'ok' end;
  detail := coalesce(v.what, 'it keeps up');
  fix := case when v.what is not null then 'Turn it on, give it more: autovacuum_max_workers, autovacuum_naptime, autovacuum_vacuum_cost_limit. Now: vacuum' end;
  return next;

  name := 'clock';
  select greatest((select max(w.last_seen_at) from queue.worker w), (select j.created_at from queue.job j order by j.id desc limit 1),
                  (select max(v.claimed_at) from (select l.claimed_at from queue.live l order by l.id desc limit 1000) v)) - p_now as ahead into v;
  status := case when v.ahead > interval '1 minute' then 'fail' when v.ahead > interval '5 seconds' then 'warn' else 'ok' end;
  detail := case when status = 'ok' then 'it has not been set back' else format('it has been set back by %s or more', date_trunc('second', v.ahead)) end;
  fix := case when status <> 'ok' then 'Have the server''s clock kept by NTP, which slews it. Until it has caught up, schedules are late.' end;
  return next;

  name := 'notifications';
  select pg_notification_queue_usage() as usage, current_setting('pgdefer.notify', true) = 'off' as is_off into v;
  status := case when v.usage > 0.9 then 'fail' when v.usage > 0.5 then 'warn' else 'ok' end;
  detail := format('%s%% of their queue is in use', round((v.usage * 100)::numeric)) || case when v.is_off then '; switched off here (pgdefer.notify): workers poll' else '' end;
  fix := case when status <> 'ok' then 'A session that listens has had a transaction open for long: see pg_stat_activity, and end it.' end;
  return next;
end $$;

-- sql/90_privileges.sql
-- Privileges: PUBLIC can do nothing; roles get whole functions, never tables.

do $$
declare
  v_function record;
begin
  for v_function in
    select p.oid::regprocedure as signature from pg_proc p where p.pronamespace = 'queue'::regnamespace
  loop
    execute format('revoke all on function %s from public', v_function.signature);
  end loop;
end $$;

-- What each kind of role may call and read.
create or replace function queue._grants(kind text, out functions text[], out views text[])
language plpgsql immutable parallel safe security invoker as $$
begin
  case kind
    when 'producer' then
      functions := '{register_task,defer,defer_many,defer_trigger,defer_group,defer_chain,result,await_result,version}';
      views := '{}';
    when 'worker' then
      functions := '{register_task,register_worker,claims,fetch,heartbeat,extend,deregister_worker,worker_died,before_sleep,after_sleep,succeed,fail,retry_later,release,finish_many,finish_and_fetch,reap,tick,result,needs,await_result,peek,version,backoff,next_runs,schedule,unschedule}';
      views := '{schedules}';
    when 'operator' then
      functions := '{register_task,next,extend,succeed,fail,retry_later,release,move,copy,delete,fail_jobs,done,set_priority,reschedule,set_args,delete_queue,search,get,stats,health,autoscale_hint,cancel,hold,unhold,retry,retry_failed,pause,resume,configure,configure_queue,create_queue,prune,unblock,reap,tick,result,needs,graph,why,check,peek,version,backoff,next_runs,schedule,unschedule,enable_schedule,run_now}';
      views := '{jobs,attempts,queues,workers,tasks,locks,semaphores,metrics,schedules,schedule_runs}';
    when 'reader' then
      functions := '{search,get,stats,health,autoscale_hint,result,needs,graph,why,check,peek,version,backoff,next_runs}';
      views := '{jobs,attempts,queues,workers,tasks,locks,semaphores,metrics,schedules,schedule_runs}';
    else
      perform queue._invalid('kind is not one of its values', 'Allowed: producer, worker, operator, reader.', 'kind: ' || coalesce(kind, 'NULL'));
  end case;
end $$;

-- What a role that is limited to some queues does not get: it concerns more than their jobs.
create or replace function queue._unlimited_only()
returns text[] language plpgsql immutable parallel safe security invoker as $$
begin
  return '{configure,register_task,schedule,unschedule,enable_schedule,run_now,prune,unblock,check,health,tasks,locks,semaphores,schedules,schedule_runs}'::text[];
end $$;

-- Locks: queue.access, as migrate, and those of _switch_limits. Raises: 22023, 55P03.
create or replace function queue.grant_access(role text, kind text, queues text[] default null)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  perform queue._check_role(grant_access.role);
  perform queue._grants(grant_access.kind);
  perform queue._check_list('queues', grant_access.queues);
  if grant_access.queues = '{}' then
    perform queue._invalid('queues holds no name, or NULL', 'Name queues or prefix* patterns; NULL instead of a list is all.');
  end if;
  perform queue._check_name('queue', q) from unnest(grant_access.queues) q;
  lock table queue.access in share row exclusive mode;
  -- what another role of this name had, that was dropped, does not come back
  delete from queue.access a using pg_roles r
  where a.role = grant_access.role and r.rolname = a.role and not queue._may_enter(r.oid);
  insert into queue.access (role, kind, queues)
  values (grant_access.role, grant_access.kind, case when '*' = any (grant_access.queues) then null else grant_access.queues end)
  on conflict on constraint access_pkey do update set queues = excluded.queues;
  perform queue._regrant(grant_access.role);
  perform queue._switch_limits();
end $$;
comment on function queue.grant_access(text, text, text[]) is
  'Lets a role act as producer, worker, operator or reader: of all queues, or of some (names, prefix*). The kinds are siblings: a role that needs two gets both; the same kind again replaces its queues.';

-- Locks: as grant_access. Raises: 22023, 55P03.
create or replace function queue.revoke_access(role text)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  lock table queue.access in share row exclusive mode;
  delete from queue.access a where a.role = revoke_access.role;
  if not found or exists (select from pg_roles r where r.rolname = revoke_access.role) then
    perform queue._check_role(revoke_access.role);
    perform queue._take_all(revoke_access.role);
  end if;
  perform queue._switch_limits();
end $$;
comment on function queue.revoke_access(text) is 'Takes back everything that grant_access gave a role; of one that was dropped, too.';

-- Takes from a role everything in the schema. Locks: the caller's, which are those of migrate.
create or replace function queue._take_all(p_role text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  execute format('revoke all on all functions in schema queue from %I', p_role);
  execute format('revoke all on all tables in schema queue from %I', p_role);
  execute format('revoke usage on schema queue from %I', p_role);
end $$;

-- Raises: 22023 unless there is such a role.
create or replace function queue._check_role(p_role text)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if not exists (select from pg_roles r where r.rolname = p_role) or p_role is null then
    perform queue._invalid('no such role', 'CREATE ROLE it first.', 'role: ' || coalesce(left(p_role, 200), 'NULL'));
  end if;
end $$;

-- Gives a role what its rows of queue.access say, and takes what only unlimited roles get from one that is limited.
create or replace function queue._regrant(p_role text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_object record;
begin
  -- even where the role has it: afterwards all plans are made anew (queue._unlimited)
  execute format('grant usage on schema queue to %I', p_role);
  for v_object in
    with wanted as (
      select n.name, bool_or(a.queues is null or n.name <> all (queue._unlimited_only())) as is_given
      from queue.access a
      cross join lateral queue._grants(a.kind) g
      cross join lateral unnest(g.functions || g.views) n (name)
      where a.role = p_role group by n.name)
    select w.is_given, case when p.oid is not null then 'execute on function ' || p.oid::regprocedure else 'select on ' || c.oid::regclass end as what
    from wanted w
    left join pg_proc p on p.pronamespace = 'queue'::regnamespace and p.proname = w.name
    left join pg_class c on c.relnamespace = 'queue'::regnamespace and c.relname = w.name and c.relkind = 'v'
    where p.oid is not null or c.oid is not null
  loop
    execute format(case when v_object.is_given then 'grant %s to %I' else 'revoke %s from %I' end, v_object.what, p_role);
  end loop;
end $$;

-- After an upgrade, or where the extension was dropped and made again. What a role had that was dropped does not come back
-- to another of its name; but where no role may enter the tables alone were restored, and all get what they had.
-- Locks: the caller's, which are those of migrate; those of _switch_limits.
create or replace function queue._restore_grants()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if exists (select from queue.access a join pg_roles r on r.rolname = a.role where queue._may_enter(r.oid)) then
    delete from queue.access a using pg_roles r where r.rolname = a.role and not queue._may_enter(r.oid);
  end if;
  perform queue._regrant(x.role)
  from (select distinct a.role from queue.access a join pg_roles r on r.rolname = a.role) x;
  perform queue._switch_limits();
end $$;

-- Turns checking on when a role is limited, and off when none is. Views that filter must not show a condition
-- of the reader's own what they filter out, which a barrier prevents, at the cost of some plans.
-- Locks: of those views, for which it waits 100 ms at a time, a hundred times: a transaction that has read one may stay open,
-- and whoever comes to read one meanwhile, as operations do that hold ADM, waits no longer than that.
-- Raises: 55P03.
create or replace function queue._switch_limits()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_is_limited boolean := exists (select from queue.access a where a.queues is not null);
  v_timeout text := current_setting('lock_timeout');
  v_view text;
begin
  if v_is_limited and to_regclass('queue.unlimited') is not null then
    drop view queue.unlimited;
  elsif not v_is_limited and to_regclass('queue.unlimited') is null then
    create view queue.unlimited as select true as is_unlimited;
  end if;
  for v_try in 1 .. 100 loop
    -- a try that fails keeps none of them locked
    begin
      perform set_config('lock_timeout', '100ms', true);
      -- one that an upgrade has replaced has lost its barrier
      for v_view in
        select c.relname from pg_class c
        where c.relnamespace = 'queue'::regnamespace and c.relname in ('jobs', 'attempts', 'queues', 'workers', 'metrics') and c.relkind = 'v'
          and coalesce('security_barrier=true' = any (c.reloptions), false) <> v_is_limited
      loop
        execute format(case when v_is_limited then 'alter view queue.%I set (security_barrier = true)' else 'alter view queue.%I reset (security_barrier)' end, v_view);
      end loop;
      perform set_config('lock_timeout', v_timeout, true);
      exit;
    exception when lock_not_available then
      if v_try = 100 then
        raise exception using errcode = '55P03', message = 'a view is in use by a transaction that stays open', detail = 'view: queue.' || v_view,
          hint = 'Nothing was changed. End the transactions that have been open for long (see pg_stat_activity), and call it again.';
      end if;
    end;
  end loop;
end $$;

revoke all on function queue._grants(text), queue._unlimited_only(), queue.grant_access(text, text, text[]), queue.revoke_access(text),
  queue._take_all(text), queue._check_role(text), queue._regrant(text), queue._restore_grants(), queue._switch_limits() from public;
