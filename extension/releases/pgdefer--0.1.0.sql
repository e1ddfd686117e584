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
      hint = 'Their functions could run with the rights of this role. REVOKE CREATE ON SCHEMA queue'
        ' FROM them, drop their objects there, and install again.';
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

-- base/errors.sql
-- Errors: each has a stable SQLSTATE and a fixed message. DETAIL has the ids, HINT the remedy.
-- Tests: base/checks.sql, base/permissions.sql.

-- Raises: 22023, always. A detail may contain the caller's values, so it is cut.
create or replace function queue._invalid(message text, hint text, detail text default '')
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  if detail = '' then
    raise exception using errcode = '22023', message = message, hint = hint;
  end if;
  raise exception using errcode = '22023', message = message, detail = left(detail, 2000), hint = hint;
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
  raise exception using errcode = 'QJ002', message = 'claim lost',
    detail = format('id: %s, claim: %s', id, claim),
    hint = 'The job was finished, reaped or taken over. Drop the result.';
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
  raise exception using errcode = 'QJ004', message = 'already queued',
    detail = format('id: %s, queueing_lock: %s', id, queueing_lock),
    hint = 'Another job with this queueing_lock waits. Pass options {"on_conflict": "ignore"} or "replace",'
      ' or continue without it.';
end $$;

-- Raises: QJ004, always. It does not name the job, which is in a queue that the caller may not use.
create or replace function queue._key_taken(p_key text)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ004', message = 'already queued',
    detail = format('idempotency_key: %s', p_key),
    hint = 'A job in a queue that you may not use was deferred with this idempotency_key. Pass another one.';
end $$;

-- Raises: QJ007, always.
create or replace function queue._worker_gone(worker bigint)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ007', message = 'worker gone', detail = format('worker: %s', worker),
    hint = 'The worker was reaped or deregistered: abort its jobs and call queue.register_worker again.';
end $$;

-- Raises: QJ090 if there are no tables: public functions check this first (0.65 us).
create or replace function queue._not_installed()
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  if to_regclass('queue.installation') is null then
    raise exception using errcode = 'QJ090', message = 'the tables of the queue are missing',
      hint = 'Run SELECT queue.install().';
  end if;
end $$;

-- Raises: QJ008 outside READ COMMITTED: every proof in these files relies on a new snapshot per statement.
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
-- tables/base/installation.sql
-- One row: the version that created the tables, the cluster of the stored transaction ids, the era in which
-- claims and workers were last numbered (base/era.sql), and the settings of queue.configure: max_size, the
-- limit in bytes of JSON as text; unknown_task_grace, how long a job waits for a worker that knows its task.
-- written: the row's own xmin, which a copy of it lacks. up_since: since when workers can reach the server.
create table queue.installation (
  is_only boolean not null default true,
  version text not null,
  system_identifier bigint not null,
  era text not null,
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

-- Whether the reader of a view may see all jobs; if not, the allowed queues as patterns for LIKE. In a
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

-- tables/base/audit.sql
-- Who changed what. base/audit.sql appends the rows; only queue.prune with an age removes them. login: the
-- role that logged in; role: the role that it acted as. ids: the jobs that the call changed. queues: all
-- queues that it affected, as names and patterns; NULL if it affected more than queues.
create table queue.audit_log (
  id bigint generated by default as identity,
  at timestamptz not null default clock_timestamp(),
  role text not null,
  login text not null default session_user,
  call text not null,
  args jsonb not null,
  ids bigint[],
  queues text[],
  before jsonb,
  constraint audit_log_pkey primary key (id)
);
create index audit_log_at_idx on queue.audit_log (at);
create index audit_log_ids_idx on queue.audit_log using gin (ids);

-- tables/defer/job.sql
-- The options of a job besides its task and args. NULL in queue, priority and flags stands for their
-- defaults. size: the bytes of args and headers as text, if args have more than 2,000.
create type queue.job_options as (
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

-- The log of deferred jobs. defer appends rows; they never change, and retention removes them. The table is
-- narrow, because each column makes an insert 1 % slower and most jobs have only a task and args.
create table queue.log (
  id bigint generated by default as identity (sequence name queue.job_id_seq),
  xid xid8 not null default pg_current_xact_id(),
  created_at timestamptz not null default current_timestamp,
  task text not null,
  args jsonb not null default '{}',
  job_options queue.job_options,
  constraint log_pkey primary key (id)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);

-- The conditions of this index and of active_job_lane_idx keep plans that were made while the table was empty
-- from using these indexes to look up an id.
create index log_xid_idx on queue.log (xid, id) where xid is not null;

-- The log in plain columns.
create view queue.job as
select l.id, l.xid, l.created_at, l.task, l.args, coalesce((l.job_options).queue, 'default') as queue,
  coalesce((l.job_options).priority, 0) as priority,
  coalesce((l.job_options).flags, 0::smallint) as flags, (l.job_options).scheduled_at,
  (l.job_options).deadline, (l.job_options).lock, (l.job_options).queueing_lock,
  (l.job_options).needs, (l.job_options).keys, (l.job_options).limits, (l.job_options).options,
  (l.job_options).size
from queue.log l;

-- Changes of a job since it was deferred, and the counters of its ended claims. Most jobs have no row. size:
-- the bytes of args and headers as text, set together with args. is_kept: the job has waited for a slot, or
-- was taken from one, so on_limit no longer discards it. tag: the job has left a lane with shares unclaimed,
-- or was released, and gets this place when it comes back (admit/shares.sql). has_steps: it may have rows in
-- queue.step. is_suspended: it may have a row in queue.suspended. percent, message: set by set_progress. For
-- jobs with needs: ignores_needs: the last yield passed NULL as needs. is_yielded: the job waits for an open
-- need (mode any). began_xid: all transactions below it had ended when the last run began (mode any).
create table queue.job_override (
  id bigint not null,
  attempts integer not null default 0,
  claims integer not null default 0,
  failures integer not null default 0,
  crashes integer not null default 0,
  progress integer not null default 0,
  ignores_needs boolean not null default false,
  is_yielded boolean not null default false,
  is_kept boolean not null default false,
  has_steps boolean not null default false,
  is_suspended boolean not null default false,
  extra_flags smallint not null default 0,
  priority integer,
  started_at timestamptz,
  scheduled_at timestamptz,
  deadline timestamptz,
  began_xid xid8,
  tag timestamptz,
  queue text,
  lock text collate "C",
  args jsonb,
  size integer,
  percent numeric,
  message text,
  error text,
  constraint job_override_pkey primary key (id)
) with (fillfactor = 70);

-- The job as it is now: as it was deferred, with later changes. A query that reads no column of the override
-- does not look for it. Private.
create view queue.job_now as
select j.id, j.xid, j.created_at, j.task, coalesce(s.args, j.args) as args,
  coalesce(s.queue, j.queue) as queue, coalesce(s.priority, j.priority) as priority,
  j.flags | coalesce(s.extra_flags, 0::smallint) as flags,
  nullif(coalesce(s.scheduled_at, j.scheduled_at), '-infinity') as scheduled_at,
  nullif(coalesce(s.deadline, j.deadline), 'infinity') as deadline,
  nullif(coalesce(s.lock, j.lock), '') as lock,
  j.queueing_lock, j.needs, j.keys, j.limits, j.options, coalesce(s.size, j.size) as size,
  s.id is not null as is_overridden, coalesce(s.attempts, 0) as attempts, coalesce(s.claims, 0) as claims,
  coalesce(s.failures, 0) as failures, coalesce(s.crashes, 0) as crashes,
  coalesce(s.progress, 0) as progress, coalesce(s.ignores_needs, false) as ignores_needs,
  coalesce(s.is_yielded, false) as is_yielded, coalesce(s.is_kept, false) as is_kept,
  coalesce(s.has_steps, false) as has_steps, coalesce(s.is_suspended, false) as is_suspended, s.percent,
  s.message, s.began_xid, s.started_at, s.error, s.tag
from queue.job j
left join queue.job_override s on s.id = j.id;

-- Registered tasks. is_plain: the task has at most a queue and a priority. function: the database function
-- that runs it, as schema.name. sensitive: the steps of each path to args that only the owner and workers see
-- (base/sensitive.sql). job_options: queue and priority as options of a job.
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
  function text,
  sensitive jsonb,
  defaults jsonb not null,
  job_options queue.job_options generated always as (
    case when num_nonnulls(queue, priority) > 0
         then row(queue, priority, null, null, null, null, null, null, null, null, null,
           null)::queue.job_options end) stored,
  constraint task_pkey primary key (name)
);

create index task_sensitive_idx on queue.task (name) where sensitive is not null;

-- The holder of each queueing lock. replacing: set while a committed replacement has not been applied yet.
create table queue.queueing_lock (
  key text collate "C" not null,
  job_id bigint not null,
  replacing bigint,
  constraint queueing_lock_pkey primary key (key)
);

create index queueing_lock_replacing_idx on queue.queueing_lock (key) where replacing is not null;

-- The job that was deferred first with each idempotency key of a task, and the queue it was deferred to. A
-- row may outlive its job. From expires_at on the key is free, and maintenance deletes the row.
create table queue.idempotency_key (
  task text collate "C" not null,
  key text collate "C" not null,
  job_id bigint not null,
  expires_at timestamptz not null,
  queue text not null,
  constraint idempotency_key_pkey primary key (task, key)
);

create index idempotency_key_expires_idx on queue.idempotency_key (expires_at);

-- tables/admit/cursor.sql
-- The admission lock: only the session that locks this row admits. It is a row, not an advisory lock, so that
-- only roles with rights on the table can take it.
create table queue.admission (
  is_only boolean not null default true,
  constraint admission_pkey primary key (is_only),
  constraint admission_only_check check (is_only)
);
insert into queue.admission default values;

-- How far the log has been read: all rows that are visible in the snapshot (next_xid, in_flight) were read.
-- A newer row replaces the row, and reads begin with the newest, so that dead rows cost nothing while a
-- transaction that stays open holds them.
create table queue.cursor (
  tick bigint not null,
  next_xid xid8 not null,
  in_flight xid8[] not null,
  high_id bigint not null,
  has_backlog boolean not null,
  due_at timestamptz not null,
  constraint cursor_pkey primary key (tick)
);

-- The newest row. Private.
create view queue.cursor_now as
select k.tick, k.next_xid, k.in_flight, k.high_id, k.has_backlog, k.due_at
from queue.cursor k order by k.tick desc limit 1;

-- Ranges of the log that have not been scanned yet: rows with (xid, id) > (from_xid, from_id) and xid <=
-- to_xid that are visible in the snapshot upto, except rows of the transaction own. is_first: there was no
-- older range.
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

-- Parts of such ranges that have been scanned, one slice each; they are read by priority. Rows with a
-- priority between tops[i] and bottoms[i] are not admitted yet; priority is the first of tops. is_mixed: the
-- part had several of these bands.
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

-- Tests that rehearse (work/rehearse.sql). upto: the last job of the transaction that has been admitted. Each
-- transaction inserts two rows with the same number, which the key refuses at COMMIT; so no other transaction
-- ever sees a row.
create table queue.rehearsal (
  n integer not null,
  upto bigint not null,
  constraint rehearsal_pkey primary key (n) deferrable initially deferred
);

-- tables/admit/run_queue.sql
-- Ready and running jobs. The rows are narrow: a claim is a HOT update (48 bytes before, 72 after). deadline:
-- it orders the jobs of a lane, before their ids; infinity without a deadline, a tag if there are shares
-- (admit/shares.sql).
create table queue.active_job (
  id bigint not null,
  deadline timestamptz not null,
  lane integer not null,
  attempt smallint not null,
  flags smallint not null,
  claim bigint,
  claimed_at timestamptz,
  worker_id bigint,
  constraint active_job_pkey primary key (id)
) with (fillfactor = 38, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
        autovacuum_vacuum_cost_delay = 0);

create index active_job_lane_idx on queue.active_job (lane, deadline, id) where lane is not null;

-- Lanes: fetch reads the jobs of a lane in order. A lane has one queue, one priority and one kind:
-- lane_plain; lane_limited, claimed only under the admission lock; lane_crashed: the jobs have crashed
-- before, and are claimed alone. No ready job lies below the low mark; an idle lane has no ready job.
-- tag_base: the least tag of its jobs (admit/shares.sql), NULL without shares. retag_from: jobs from this
-- place on still have to get tags.
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
  tag_base timestamptz,
  retag_from timestamptz,
  constraint lane_pkey primary key (lane)
) with (fillfactor = 20);

create index lane_queue_idx on queue.lane (queue, priority, kind);

create index lane_busy_idx on queue.lane (lane) where not is_idle;

create index lane_retag_idx on queue.lane (lane) where retag_from is not null;

create sequence queue.lane_seq as integer cycle;

-- How far each share has come in a queue and priority: the tag of its next job. key: the key for whose slots
-- its jobs wait, empty for ready jobs. share: empty for jobs without one. A newer row, with the greatest tag,
-- replaces the row.
create table queue.share_tag (
  queue text collate "C" not null,
  priority integer not null,
  key text collate "C" not null,
  share text collate "C" not null,
  tag timestamptz not null,
  constraint share_tag_pkey primary key (queue, priority, key, share, tag)
);

create index share_tag_old_idx on queue.share_tag (queue, priority, key, tag);

-- Weights of shares; a pattern is a name or prefix*.
create table queue.share_config (
  pattern text collate "C" not null,
  weight double precision not null,
  constraint share_config_pkey primary key (pattern)
);

create index share_config_prefix_idx on queue.share_config (pattern) where right(pattern, 1) = '*';

-- limited_at: when its limits were set; NULL again once all running jobs are known to count in max_running.
-- waits_for: the virtual transactions that may have claimed without being counted.
create table queue.queue_config (
  queue text collate "C" not null,
  created_at timestamptz not null default now(),
  limited_at timestamptz,
  waits_for text[],
  max_running integer,
  rate_limit integer,
  rate_per interval,
  retain interval,
  constraint queue_config_pkey primary key (queue)
);

-- Limits and rates of concurrency keys that override those of the jobs; a pattern is a key or prefix*.
create table queue.key_config (
  pattern text collate "C" not null,
  slots integer,
  rate_limit integer,
  rate_per interval,
  constraint key_config_pkey primary key (pattern)
);

-- Calls of pause and resume: the latest that matches a queue and a task wins.
create table queue.pause (
  no bigint generated by default as identity,
  queue text collate "C",
  task text collate "C",
  is_paused boolean not null,
  until timestamptz,
  constraint pause_pkey primary key (no)
);

-- The last starts under each rate, numbered: as many as the rate's limit; of several at one time the first
-- and the last (admit/rates.sql). key: as in queue.semaphore.
create table queue.rate_start (
  key text collate "C" not null,
  no bigint not null,
  at timestamptz not null,
  constraint rate_start_pkey primary key (key, no)
);

-- tables/admit/gates.sql
-- Admitted jobs that wait for something other than their turn at a lock. need_id: the job waits until this
-- need changes (admit/needs.sql). For a job that waits for a slot, the row has the columns of
-- queue.active_job (deadline: its place among the waiting jobs, a tag if there are shares), and: at, set for
-- one of the jobs that wait for a key's rate: when the rate allows more starts; weight: how many slots of the
-- key it takes, NULL for 1; has_several: the job has several keys, and key is the first full one.
create table queue.waiting (
  id bigint not null,
  at timestamptz,
  need_id bigint,
  deadline timestamptz,
  lane integer,
  flags smallint,
  attempt smallint,
  has_several boolean,
  weight integer,
  reason text not null,
  key text collate "C",
  constraint waiting_pkey primary key (id),
  constraint waiting_reason_check check (reason in ('schedule', 'needs', 'upstream_failed', 'slot', 'held',
    'signal', 'task_paused', 'parked', 'moving'))
);

create index waiting_due_idx on queue.waiting (at, id) where at is not null;

create index waiting_slot_idx on queue.waiting (key, lane, deadline, id) where reason = 'slot';

create index waiting_parked_idx on queue.waiting (id) where reason = 'parked';

-- All unfinished jobs that have a lock. The first by id has the turn (has_turn is set only if the job's
-- position does not show this, see admit/locks.sql). is_passed: the job waits for nothing but its turn.
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

-- For each key: how many claims use its slots (used, of slots), and for each of its lanes how many jobs are
-- ready and how many wait for a slot; no waiting job has a (deadline, id) below (low_deadlines, lows). A
-- newer row replaces the row, and reads begin with the newest (see queue.cursor). used, ready: a job with a
-- weight counts that many times. slots: 2147483647 means no limit. The key's first letter is its kind: k for
-- a concurrency key, m for a lock with mutex jobs, q for a queue. limit_id: the newest of the key's jobs,
-- whose limits apply unless others are configured.
create table queue.semaphore (
  key text collate "C" not null,
  tick bigint not null,
  limit_id bigint not null,
  slots integer not null,
  rate_limit integer,
  rate_per interval,
  used integer not null,
  lanes integer[] not null,
  ready integer[] not null,
  waiting integer[] not null,
  lows bigint[] not null,
  low_deadlines timestamptz[] not null,
  constraint semaphore_pkey primary key (key, tick)
);

create index semaphore_idle_idx on queue.semaphore (tick) where used = 0 and lanes = '{}';

-- The needs of admitted jobs. mode: the bits any, proceed and ended. claim: under ended, the claim that
-- awaited the needed job; NULL: it holds the job no longer, because a retry has forgotten that step, or the
-- job is a fork. is_open: the need was not satisfied when the job's last run began (mode any).
-- deleted_state: the needed job's state when it was pruned, or deleted by force.
create table queue.need (
  job_id bigint not null,
  need_id bigint not null,
  claim bigint,
  is_open boolean not null default true,
  mode smallint not null,
  deleted_state text,
  constraint need_pkey primary key (job_id, need_id),
  constraint need_deleted_check check (deleted_state in ('succeeded', 'failed'))
);

-- The condition keeps plans from using this index to look up a job_id.
create index need_id_idx on queue.need (need_id, job_id) where need_id is not null;

-- Its last value is the largest id that any job has ever needed. It is a sequence, so that reading it meets
-- no dead rows.
create sequence queue.needed_seq minvalue 0 start 0;

-- Jobs that must not start after a time.
create table queue.expiry (
  id bigint not null,
  at timestamptz not null,
  constraint expiry_pkey primary key (id)
);

create index expiry_at_idx on queue.expiry (at, id);

-- Succeeded jobs that an operator has deleted. They are kept while an open transaction may name them as
-- needs, which ends when all transactions below until have ended.
create table queue.deleted (
  id bigint not null,
  until xid8,
  constraint deleted_pkey primary key (id)
);

-- Ended claims for the next admission to settle: appended like the log, and read with the same cursor. Also
-- signals (job_id: the job that got one), events and groups (job_id: the negative number of one).
create table queue.pending_settlement (
  xid xid8 not null default pg_current_xact_id(),
  seq bigint generated by default as identity,
  job_id bigint not null,
  kind text not null,
  flags smallint not null,
  payload jsonb,
  constraint pending_settlement_pkey primary key (xid, seq)
);

create sequence queue.tick_seq;

-- tables/admit/groups.sql
-- Groups that have been opened. Rows never change. callbacks: the jobs to defer, by what happens: on_end,
-- on_success, on_failure.
create table queue.job_group (
  no bigint generated by default as identity,
  opened_at timestamptz not null default clock_timestamp(),
  name text collate "C" not null,
  callbacks jsonb not null,
  constraint job_group_pkey primary key (no),
  constraint job_group_name_key unique (name)
);

-- Calls that closed groups, appended like the log: from the first that commits on, no job joins the group.
create table queue.group_close (
  group_no bigint not null,
  no bigint generated by default as identity,
  closed_at timestamptz not null default clock_timestamp(),
  constraint group_close_pkey primary key (group_no, no)
);

-- How far a group has come. standing: open; closing: transactions that may still add jobs are waited for;
-- closed: all its jobs are counted; ended: none of them is unfinished. jobs: how many have been admitted;
-- succeeded, failed, cancelled: how many of them ended so. on_end_id and so on: the jobs that its callbacks
-- deferred. error: why a callback could not be deferred. A newer row replaces the row, and reads begin with
-- the newest (see queue.cursor).
create table queue.group_state (
  group_no bigint not null,
  tick bigint not null default 0,
  jobs integer not null default 0,
  succeeded integer not null default 0,
  failed integer not null default 0,
  cancelled integer not null default 0,
  on_end_id bigint,
  on_success_id bigint,
  on_failure_id bigint,
  ended_at timestamptz,
  standing text not null default 'open',
  error text,
  constraint group_state_pkey primary key (group_no, tick),
  constraint group_state_check check (standing in ('open', 'closing', 'closed', 'ended'))
);

create index group_state_ended_idx on queue.group_state (ended_at) where ended_at is not null;

-- The admitted jobs of groups, each with the final state as which it was counted; NULL: as unfinished.
create table queue.group_member (
  job_id bigint not null,
  group_no bigint not null,
  state text,
  constraint group_member_pkey primary key (job_id)
) with (fillfactor = 80);

create index group_member_group_idx on queue.group_member (group_no, job_id);

create view queue.groups as
select g.name,
  case when s.standing = 'open' and c.closed_at is not null then 'closing' else s.standing end as state,
  s.jobs, s.jobs - s.succeeded - s.failed - s.cancelled as unfinished, s.succeeded, s.failed, s.cancelled,
  s.on_end_id, s.on_success_id, s.on_failure_id, s.error, g.opened_at, c.closed_at, s.ended_at
from queue.job_group g
cross join lateral (
  select s.* from queue.group_state s where s.group_no = g.no order by s.tick desc limit 1) s
cross join lateral (select min(c.closed_at) as closed_at from queue.group_close c where c.group_no = g.no) c;
comment on view queue.groups is
  'Groups, with their jobs by state. state: open; closing: transactions that began before the group was'
    ' closed may still add jobs; closed: all jobs have been added; ended: all of them have ended. jobs: those'
    ' that have been admitted. on_end_id, on_success_id, on_failure_id: the jobs that the callbacks have'
    ' deferred. error: why one could not be deferred; queue.close_group tries it again.';

-- tables/work/claims.sql
create sequence queue.claim_seq;

-- When claims expire: by their own lease (is_own), or some time after their timeout. reap ends claims that
-- have expired and those of dead workers. given_at: when the lease was set.
create table queue.lease (
  id bigint not null,
  claim bigint not null,
  expires_at timestamptz not null,
  is_own boolean not null,
  given_at timestamptz not null default clock_timestamp(),
  constraint lease_pkey primary key (id)
);

create index lease_expires_idx on queue.lease (expires_at);

-- Claims that their worker must abort, or that were taken from it.
create table queue.abort (
  id bigint not null,
  claim bigint not null,
  worker_id bigint not null,
  reason text not null,
  constraint abort_pkey primary key (id, claim)
);

create index abort_worker_idx on queue.abort (worker_id);

-- Claims that a fetch has made but not returned, because its answer would have been too long
-- (work/deliver.sql).
create table queue.undelivered (
  worker_id bigint not null,
  no bigint generated by default as identity,
  id bigint not null,
  claim bigint not null,
  size integer not null,
  constraint undelivered_pkey primary key (worker_id, no)
);

-- Claims that count in a limit of their worker, and some that have ended (work/worker_limits.sql).
create table queue.worker_claim (
  worker_id bigint not null,
  queue text collate "C" not null,
  id bigint not null,
  claim bigint not null,
  constraint worker_claim_pkey primary key (worker_id, queue, id, claim)
);

-- Workers. has_left: it has deregistered. is_clear: it is gone, and its claims have ended. waits_for: the
-- virtual transactions that may have seen it alive. is_over: these have ended, and so have the claims that
-- they made. apart_since: fetch returns nothing besides the quarantined job apart_id with the claim
-- apart_claim, or, until apart_until, nothing at all (work/quarantine.sql). memory: the resident bytes that
-- its last heartbeat told.
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
  apart_since timestamptz,
  apart_until timestamptz,
  apart_id bigint,
  apart_claim bigint,
  memory bigint,
  constraint worker_pkey primary key (id)
) with (fillfactor = 50);

-- The columns that fetch returns for a claimed job: as it was deferred, with later changes. The view does not
-- use job_now, because the flags of most claims say that there is no override to look up. Private.
create view queue.claimed_job as
select aj.id, aj.claim, j.task, coalesce(s.args, j.args) as args, coalesce(s.queue, j.queue) as queue,
  coalesce(s.priority, j.priority) as priority, nullif(coalesce(s.lock, j.lock), '') as lock,
  aj.attempt::integer as attempt,
  nullif(coalesce(s.scheduled_at, j.scheduled_at), '-infinity') as scheduled_at,
  nullif(coalesce(s.deadline, j.deadline), 'infinity') as deadline,
  (j.options ->> 'timeout')::interval as timeout, j.options -> 'headers' as headers,
  (j.options ->> 'parent')::bigint as parent, s.has_steps
from queue.active_job aj
cross join lateral (
  select j.task, j.args, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.options
  from queue.job j where j.id = aj.id offset 0) j
left join lateral (
  select s.args, s.queue, s.priority, s.lock, s.scheduled_at, s.deadline, s.has_steps
  from queue.job_override s where s.id = aj.id and aj.flags & 2048/* overridden */ <> 0 offset 0) s on true;

-- The columns that fetch returns for an unchanged job that starts for the first time. Private.
create view queue.first_run as
select j.id, j.task, j.args, j.queue, j.priority, nullif(j.lock, '') as lock, 1 as attempt,
  nullif(j.scheduled_at, '-infinity') as scheduled_at,
  j.deadline, (j.options ->> 'timeout')::interval as timeout, j.options -> 'headers' as headers,
  (j.options ->> 'parent')::bigint as parent
from queue.job j;

-- tables/work/sleepers.sql
-- Workers that stand in the line of sleepers (work/line.sql). is_busy: it runs jobs; served: a hash of what
-- it serves; pid: the session that listens. These are hints: a lost row costs time.
create table queue.sleeper (
  worker_id bigint not null,
  is_busy boolean not null,
  place bigint generated by default as identity,
  joined_at timestamptz not null default clock_timestamp(),
  served bigint not null,
  pid integer not null,
  constraint sleeper_pkey primary key (worker_id)
);

create index sleeper_served_idx on queue.sleeper (served, is_busy, place);

-- tables/work/finished.sql
-- Ended jobs. state: succeeded, failed or cancelled. check() verifies this, not a constraint: PostgreSQL
-- would set up a constraint again in every transaction, which takes as long as writing the row. The same
-- applies to the kinds of queue.pending_settlement: ended, again, replace, recheck, readmit, refill, signal,
-- event, group.
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

-- Rows are appended in the order of time, so an index of page ranges suffices.
create index finished_at_idx on queue.finished using brin (finished_at) with (pages_per_range = 32,
  autosummarize = on);

create index finished_failed_idx on queue.finished (id) where state = 'failed';

create index finished_purge_idx on queue.finished (purge_at) where purge_at is not null;

-- All attempts that did not succeed.
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
  constraint attempt_outcome_check check (outcome in ('failed', 'crashed', 'timed_out', 'aborted', 'yielded',
    'released'))
);

-- Jobs whose end clients wait for. The last value of awaited_seq is about the largest id among them
-- (inspect/results.sql).
create table queue.awaited (
  id bigint not null,
  no bigint generated by default as identity,
  since timestamptz not null,
  constraint awaited_pkey primary key (id, no)
);

-- Needs, and the present state of each. class: s: succeeded (ended, if the job only awaits it; in any state,
-- if it no longer does); f: failed (or cancelled, held, upstream_failed); p: pending. is_satisfied: the need
-- no longer holds the job. Private.
create view queue.need_now as
select d.ctid, d.job_id, d.need_id, d.mode, d.is_open, d.deleted_state, c.class,
  c.class = 's' or c.class = 'f' and d.mode & 2/* proceed */ <> 0 as is_satisfied
from queue.need d
left join lateral (select f.state from queue.finished f where f.id = d.need_id offset 0) f on true
left join lateral (
  select w.reason from queue.waiting w where w.id = d.need_id and f.state is null offset 0) w on true
cross join lateral (
  select case when coalesce(f.state, d.deleted_state) = 'succeeded' then 's'
    when d.mode & 4/* ended */ <> 0
      then case when coalesce(f.state, d.deleted_state) is null and d.claim is not null then 'p' else 's' end
    when coalesce(f.state, d.deleted_state) is not null or w.reason in ('held', 'upstream_failed') then 'f'
    else 'p' end as class) c;

create sequence queue.awaited_seq minvalue 0 start 0;

-- The time up to which retention counts (work/retention.sql): safe_at; or looked_at, once all transactions up
-- to looked_xid have ended.
create table queue.horizon (
  is_only boolean not null default true,
  looked_at timestamptz not null default '-infinity',
  looked_xid xid8 not null default '0',
  safe_at timestamptz not null default '-infinity',
  constraint horizon_pkey primary key (is_only),
  constraint horizon_only_check check (is_only)
) with (fillfactor = 20);
insert into queue.horizon default values;

-- Attempts that ended because the worker did not know the task.
create index attempt_unknown_idx on queue.attempt (claim) where outcome = 'released'
  and details ? 'unknown_task';

-- tables/work/minutes.sql
-- How many jobs ended in each minute, by queue and task (work/minutes.sql). waits, runs: how many of them
-- waited and ran for how long. The n-th number counts times in the n-th class (queue._class_of).
create table queue.minute (
  minute timestamptz not null,
  queue text collate "C" not null,
  task text collate "C" not null,
  succeeded integer not null,
  failed integer not null,
  cancelled integer not null,
  failures integer not null,
  waits integer[] not null,
  runs integer[] not null,
  constraint minute_pkey primary key (minute, queue, task)
);

-- Up to which time ends have been counted. All transactions that may have ended a job before safe_at have
-- ended; when looked_at was read, those in open_xids had not.
create table queue.minute_cursor (
  is_only boolean not null default true,
  counted_to timestamptz not null default clock_timestamp(),
  safe_at timestamptz not null default '-infinity',
  looked_at timestamptz not null default '-infinity',
  open_xids xid[] not null default '{}',
  constraint minute_cursor_pkey primary key (is_only),
  constraint minute_cursor_only_check check (is_only)
) with (fillfactor = 20);
insert into queue.minute_cursor default values;

create view queue.minutes as
select m.minute, m.queue collate "default" as queue, m.task collate "default" as task, m.succeeded, m.failed,
  m.cancelled, m.failures
from queue.minute m
where (select x.is_all from queue.visible_queues x)
  or m.queue like any ((select x.queues from queue.visible_queues x)::text[]);
comment on view queue.minutes is
  'How many jobs of each queue and task ended in each minute of the last 7 days: succeeded, failed,'
    ' cancelled; failures: their attempts that failed, crashed or timed out. Counted by maintenance, about 10'
    ' seconds later. The times are in queue.series and queue.task_stats.';

-- tables/work/durable.sql
-- Steps of durable jobs. no: which use of the name in a run this is. claim: the claim that finished the step,
-- or, while finished_at is null, began it. run: the claim that used it last. A sleep and a wait for jobs are
-- written as finished when they begin: by the time the job runs again, they are over. failures: how often
-- it has failed (work/step_failures.sql), first at failed_at; error: its last error, until it succeeds. A
-- finished step with an error has failed for good.
create table queue.step (
  job_id bigint not null,
  claim bigint not null,
  run bigint not null,
  finished_at timestamptz,
  no integer not null,
  name text collate "C" not null,
  fingerprint text,
  value jsonb,
  failures integer,
  failed_at timestamptz,
  error text,
  constraint step_pkey primary key (job_id, name, no)
);

-- Jobs that wait for a signal or an event, at the gate of signals or at one before it. step, no: the step
-- that waits. until: the end of the timeout. While a job has a row here, is_suspended is set in
-- queue.job_override.
create table queue.suspended (
  job_id bigint not null,
  no integer not null,
  step text not null,
  signal text collate "C",
  event text collate "C",
  until timestamptz,
  constraint suspended_pkey primary key (job_id),
  constraint suspended_check check (num_nonnulls(signal, event) = 1)
);

create index suspended_event_idx on queue.suspended (event, job_id) where event is not null;

-- Signals that no wait has taken yet: appended like the log, taken under the admission lock.
create table queue.received_signal (
  job_id bigint not null,
  no bigint generated by default as identity,
  name text collate "C" not null,
  received_at timestamptz not null default clock_timestamp(),
  payload jsonb not null,
  constraint received_signal_pkey primary key (job_id, name, no)
);

-- Published events: appended like the log. Of the events of one name, the first that admission reads counts
-- until it expires (is_standing); admission deletes the others.
create table queue.event (
  no bigint generated by default as identity,
  name text collate "C" not null,
  is_standing boolean not null default false,
  published_at timestamptz not null default clock_timestamp(),
  expires_at timestamptz not null,
  payload jsonb not null,
  constraint event_pkey primary key (no)
);

create index event_name_idx on queue.event (name);

create unique index event_standing_idx on queue.event (name) where is_standing;

create index event_expires_idx on queue.event (expires_at);

-- Values that jobs have emitted, numbered within each stream.
create table queue.stream_item (
  job_id bigint not null,
  stream text collate "C" not null,
  no bigint not null,
  emitted_at timestamptz not null default clock_timestamp(),
  value jsonb not null,
  constraint stream_item_pkey primary key (job_id, stream, no)
);

-- tables/recur/schedule.sql
-- Schedules. next_run_at is the first run that has not been handled, so no run can be handled twice, whatever
-- the clock does. due_at is the time at which admission checks the row again: next_run_at, or later with a
-- reason. Both are NULL while the schedule is disabled.
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

-- No schedule is due before the cursor's due_at, so scans begin there and meet no dead rows.
create index schedule_due_idx on queue.schedule (due_at) where due_at is not null;

-- The history of runs: the job of each, or why there is none.
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

create index schedule_run_decided_idx on queue.schedule_run
  using brin (decided_at) with (pages_per_range = 32, autosummarize = on);

-- tables/inspect/hidden.sql
-- The sensitive paths of all tasks that have some (base/sensitive.sql), for a reader who may not see what
-- they lead to; NULL for the owner, unless pgdefer.hide_sensitive is set and not off, and if there are none.
-- In a function the reader is the owner. Private.
create view queue.hidden_paths as
select jsonb_object_agg(t.name, t.sensitive) as paths
from queue.task t
where t.sensitive is not null
  and (coalesce(current_setting('pgdefer.hide_sensitive', true), '') not in ('', 'off')
    or not pg_has_role(current_user,
      (select c.relowner from pg_class c where c.oid = 'queue.access'::regclass), 'usage'));

-- The args of set_args are those of the task in before; those of schedule name their task beside them.
create view queue.audit as
select a.id, a.at, a.role, a.login, a.call,
  case when a.args ? 'args' and (select h.paths from queue.hidden_paths h)
      ? coalesce(a.args ->> 'task', a.before -> 0 ->> 'task')
    then a.args || jsonb_build_object('args', (
      select c.args
      from (select a.args -> 'args' as args, (select h.paths from queue.hidden_paths h)
        -> coalesce(a.args ->> 'task', a.before -> 0 ->> 'task') as paths) x
      cross join lateral (with recursive walk (rest, value, path) as (
    select p.value, x.args, '{}'::text[] from jsonb_array_elements(x.paths) p where jsonb_typeof(p.value) = 'array'
    union all
    select s.rest, s.value, w.path || s.key
    from walk w
    cross join lateral (
      select w.rest - 0 as rest, w.value -> (w.rest ->> 0) as value, array[w.rest ->> 0] as key
      where jsonb_typeof(w.rest -> 0) = 'string' and jsonb_typeof(w.value) = 'object'
        and w.value ? (w.rest ->> 0) and (not w.value ? '__pgdefer__' or w.rest ->> 0 = 'value')
      union all
      select case when t.is_whole then '[]' else w.rest end,
        case when t.is_whole then w.value else w.value -> 'value' end,
        case when t.is_whole then '{}'::text[] else '{value}' end
      from (
        select w.value ->> '__pgdefer__' = 'dict'
          or coalesce(jsonb_typeof(w.value -> 'value') not in ('object', 'array'), true) as is_whole
        where jsonb_typeof(w.value) = 'object' and w.value ? '__pgdefer__') t
      union all
      select case jsonb_typeof(w.rest -> 0) when 'string' then w.rest else w.rest - 0 end, e.value,
        array[(e.n - 1)::text]
      from jsonb_array_elements(case when jsonb_typeof(w.value) = 'array' then w.value end)
        with ordinality e (value, n)
      where jsonb_typeof(w.rest -> 0) <> 'number' or w.rest ->> 0 = (e.n - 1)::text
      union all
      select w.rest - 0, w.value, '{}'::text[]
      where jsonb_typeof(w.rest -> 0) <> 'string' and jsonb_typeof(w.value) <> 'array'
        and coalesce(w.rest ->> 0, '0') = '0'
        and not coalesce(jsonb_typeof(w.value) = 'object' and w.value ? '__pgdefer__', false)) s
    where w.rest <> '[]'),
  place as materialized (
    select row_number() over (order by cardinality(p.path) desc, p.path) as n, p.path
    from (select distinct l.path
      from (select w.path from walk w where w.rest = '[]' limit 101) l) p),
  done (n, args) as (
    select 0::bigint, x.args
    union all
    select p.n, jsonb_set(d.args, p.path, '"***"') from done d join place p on p.n = d.n + 1)
  select case when (select count(*) from place) <= 100
    then (select d.args from done d order by d.n desc limit 1)
    else x.args || (select jsonb_object_agg(p.value ->> 0, '***') from jsonb_array_elements(x.paths) p
      where x.args ? (p.value ->> 0)) end) c (args)))
    else a.args end as args,
  a.ids, a.queues,
  case when a.before ? 'args' and (select h.paths from queue.hidden_paths h) ? (a.before ->> 'task')
    then a.before || jsonb_build_object('args', (
      select c.args
      from (select a.before -> 'args' as args, (select h.paths from queue.hidden_paths h)
        -> (a.before ->> 'task') as paths) x
      cross join lateral (with recursive walk (rest, value, path) as (
    select p.value, x.args, '{}'::text[] from jsonb_array_elements(x.paths) p where jsonb_typeof(p.value) = 'array'
    union all
    select s.rest, s.value, w.path || s.key
    from walk w
    cross join lateral (
      select w.rest - 0 as rest, w.value -> (w.rest ->> 0) as value, array[w.rest ->> 0] as key
      where jsonb_typeof(w.rest -> 0) = 'string' and jsonb_typeof(w.value) = 'object'
        and w.value ? (w.rest ->> 0) and (not w.value ? '__pgdefer__' or w.rest ->> 0 = 'value')
      union all
      select case when t.is_whole then '[]' else w.rest end,
        case when t.is_whole then w.value else w.value -> 'value' end,
        case when t.is_whole then '{}'::text[] else '{value}' end
      from (
        select w.value ->> '__pgdefer__' = 'dict'
          or coalesce(jsonb_typeof(w.value -> 'value') not in ('object', 'array'), true) as is_whole
        where jsonb_typeof(w.value) = 'object' and w.value ? '__pgdefer__') t
      union all
      select case jsonb_typeof(w.rest -> 0) when 'string' then w.rest else w.rest - 0 end, e.value,
        array[(e.n - 1)::text]
      from jsonb_array_elements(case when jsonb_typeof(w.value) = 'array' then w.value end)
        with ordinality e (value, n)
      where jsonb_typeof(w.rest -> 0) <> 'number' or w.rest ->> 0 = (e.n - 1)::text
      union all
      select w.rest - 0, w.value, '{}'::text[]
      where jsonb_typeof(w.rest -> 0) <> 'string' and jsonb_typeof(w.value) <> 'array'
        and coalesce(w.rest ->> 0, '0') = '0'
        and not coalesce(jsonb_typeof(w.value) = 'object' and w.value ? '__pgdefer__', false)) s
    where w.rest <> '[]'),
  place as materialized (
    select row_number() over (order by cardinality(p.path) desc, p.path) as n, p.path
    from (select distinct l.path
      from (select w.path from walk w where w.rest = '[]' limit 101) l) p),
  done (n, args) as (
    select 0::bigint, x.args
    union all
    select p.n, jsonb_set(d.args, p.path, '"***"') from done d join place p on p.n = d.n + 1)
  select case when (select count(*) from place) <= 100
    then (select d.args from done d order by d.n desc limit 1)
    else x.args || (select jsonb_object_agg(p.value ->> 0, '***') from jsonb_array_elements(x.paths) p
      where x.args ? (p.value ->> 0)) end) c (args)))
    when a.before -> 0 ? 'args' and (select h.paths from queue.hidden_paths h) ? (a.before -> 0 ->> 'task')
    then jsonb_set(a.before, '{0,args}', (
      select c.args
      from (select a.before -> 0 -> 'args' as args, (select h.paths from queue.hidden_paths h)
        -> (a.before -> 0 ->> 'task') as paths) x
      cross join lateral (with recursive walk (rest, value, path) as (
    select p.value, x.args, '{}'::text[] from jsonb_array_elements(x.paths) p where jsonb_typeof(p.value) = 'array'
    union all
    select s.rest, s.value, w.path || s.key
    from walk w
    cross join lateral (
      select w.rest - 0 as rest, w.value -> (w.rest ->> 0) as value, array[w.rest ->> 0] as key
      where jsonb_typeof(w.rest -> 0) = 'string' and jsonb_typeof(w.value) = 'object'
        and w.value ? (w.rest ->> 0) and (not w.value ? '__pgdefer__' or w.rest ->> 0 = 'value')
      union all
      select case when t.is_whole then '[]' else w.rest end,
        case when t.is_whole then w.value else w.value -> 'value' end,
        case when t.is_whole then '{}'::text[] else '{value}' end
      from (
        select w.value ->> '__pgdefer__' = 'dict'
          or coalesce(jsonb_typeof(w.value -> 'value') not in ('object', 'array'), true) as is_whole
        where jsonb_typeof(w.value) = 'object' and w.value ? '__pgdefer__') t
      union all
      select case jsonb_typeof(w.rest -> 0) when 'string' then w.rest else w.rest - 0 end, e.value,
        array[(e.n - 1)::text]
      from jsonb_array_elements(case when jsonb_typeof(w.value) = 'array' then w.value end)
        with ordinality e (value, n)
      where jsonb_typeof(w.rest -> 0) <> 'number' or w.rest ->> 0 = (e.n - 1)::text
      union all
      select w.rest - 0, w.value, '{}'::text[]
      where jsonb_typeof(w.rest -> 0) <> 'string' and jsonb_typeof(w.value) <> 'array'
        and coalesce(w.rest ->> 0, '0') = '0'
        and not coalesce(jsonb_typeof(w.value) = 'object' and w.value ? '__pgdefer__', false)) s
    where w.rest <> '[]'),
  place as materialized (
    select row_number() over (order by cardinality(p.path) desc, p.path) as n, p.path
    from (select distinct l.path
      from (select w.path from walk w where w.rest = '[]' limit 101) l) p),
  done (n, args) as (
    select 0::bigint, x.args
    union all
    select p.n, jsonb_set(d.args, p.path, '"***"') from done d join place p on p.n = d.n + 1)
  select case when (select count(*) from place) <= 100
    then (select d.args from done d order by d.n desc limit 1)
    else x.args || (select jsonb_object_agg(p.value ->> 0, '***') from jsonb_array_elements(x.paths) p
      where x.args ? (p.value ->> 0)) end) c (args)))
    else a.before end as before
from queue.audit_log a
where (select x.is_all from queue.visible_queues x)
  or a.queues <> '{}' and not exists (select from unnest(a.queues) q
    where q like any ((select x.queues from queue.visible_queues x)::text[]) is not true);
comment on view queue.audit is
  'Calls by which operators changed jobs, queues, schedules, tasks, settings or access: the time, the role,'
    ' the call with its arguments, the jobs that it changed, and the values before. In args of a task that'
    ' has sensitive ones, the owner alone sees these.';

-- tables/inspect/views.sql
-- Views call no function of the extension, so that it can be dropped without them. So they repeat rules that
-- functions have: _matches, _paused_until, _virtual_time and _tag_step.

-- Committed jobs that admission has not read yet. Private.
create view queue.unadmitted as
select j.id, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs
from queue.cursor_now k
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
  where not exists (select from queue.active_job aj where aj.id = j.id)
    and not exists (select from queue.waiting w where w.id = j.id)
    and not exists (select from queue.finished f where f.id = j.id)
    and not exists (select from queue.lock_member m where m.lock = j.lock and m.id = j.id)
  offset 0) j;

create view queue.jobs as
select j.id, j.task, j.queue,
  case
    when f.id is not null then f.state
    when aj.claim is not null then 'running'
    when aj.id is not null and coalesce(r.scheduled_at <= statement_timestamp(), true) then 'ready'
    when w.reason = 'held' then 'held'
    when w.reason = 'schedule' and coalesce(r.scheduled_at > statement_timestamp(), true) then 'scheduled'
    when w.reason in ('needs', 'signal') then 'waiting'
    when w.reason = 'upstream_failed' then 'upstream_failed'
    when w.reason in ('slot', 'parked', 'moving') then 'blocked'
    when w.reason = 'task_paused' then 'ready'
    when m.id is not null and m.is_passed
      and not (j.claims > 0 and exists (select from queue.pending_settlement h
        where h.job_id = j.id and h.kind = 'again')) then 'blocked'
    when j.is_suspended then 'waiting'
    when j.claims > 0 and exists (select from queue.pending_settlement h
      where h.job_id = j.id and h.kind = 'again' and h.payload ->> 'state' = 'waiting') then 'waiting'
    when j.claims > 0 and exists (select from queue.pending_settlement h
      where h.job_id = j.id and h.kind = 'again' and h.payload ->> 'state' = 'upstream_failed')
      then 'upstream_failed'
    when j.flags & 32/* held */ <> 0 and not j.is_overridden then 'held'
    when coalesce(r.scheduled_at, j.scheduled_at) > statement_timestamp() then 'scheduled'
    when j.needs is not null and not j.is_overridden then 'waiting'
    else 'ready'
  end as state,
  case
    when f.id is not null then f.reason
    when aj.claim is not null then a.reason
    when w.reason = 'task_paused' or aj.id is not null and l.paused_until > statement_timestamp()
      then 'paused'
    when w.reason = 'slot' then case left(w.key, 1) when 'm' then 'lock' else 'limit' end
    when w.reason = 'parked' then 'backlog'
    when w.reason in ('signal', 'moving') then w.reason
    when w.id is null and aj.id is null and m.is_passed
      and not (j.claims > 0 and exists (select from queue.pending_settlement h
        where h.job_id = j.id and h.kind = 'again')) then 'lock'
    when w.id is null and aj.id is null and j.is_suspended then 'signal'
  end as reason,
  case when (select h.paths from queue.hidden_paths h) ? j.task
    then (select c.args
      from (select coalesce(r.args, j.args) as args,
        (select h.paths from queue.hidden_paths h) -> j.task as paths) x
      cross join lateral (with recursive walk (rest, value, path) as (
    select p.value, x.args, '{}'::text[] from jsonb_array_elements(x.paths) p where jsonb_typeof(p.value) = 'array'
    union all
    select s.rest, s.value, w.path || s.key
    from walk w
    cross join lateral (
      select w.rest - 0 as rest, w.value -> (w.rest ->> 0) as value, array[w.rest ->> 0] as key
      where jsonb_typeof(w.rest -> 0) = 'string' and jsonb_typeof(w.value) = 'object'
        and w.value ? (w.rest ->> 0) and (not w.value ? '__pgdefer__' or w.rest ->> 0 = 'value')
      union all
      select case when t.is_whole then '[]' else w.rest end,
        case when t.is_whole then w.value else w.value -> 'value' end,
        case when t.is_whole then '{}'::text[] else '{value}' end
      from (
        select w.value ->> '__pgdefer__' = 'dict'
          or coalesce(jsonb_typeof(w.value -> 'value') not in ('object', 'array'), true) as is_whole
        where jsonb_typeof(w.value) = 'object' and w.value ? '__pgdefer__') t
      union all
      select case jsonb_typeof(w.rest -> 0) when 'string' then w.rest else w.rest - 0 end, e.value,
        array[(e.n - 1)::text]
      from jsonb_array_elements(case when jsonb_typeof(w.value) = 'array' then w.value end)
        with ordinality e (value, n)
      where jsonb_typeof(w.rest -> 0) <> 'number' or w.rest ->> 0 = (e.n - 1)::text
      union all
      select w.rest - 0, w.value, '{}'::text[]
      where jsonb_typeof(w.rest -> 0) <> 'string' and jsonb_typeof(w.value) <> 'array'
        and coalesce(w.rest ->> 0, '0') = '0'
        and not coalesce(jsonb_typeof(w.value) = 'object' and w.value ? '__pgdefer__', false)) s
    where w.rest <> '[]'),
  place as materialized (
    select row_number() over (order by cardinality(p.path) desc, p.path) as n, p.path
    from (select distinct l.path
      from (select w.path from walk w where w.rest = '[]' limit 101) l) p),
  done (n, args) as (
    select 0::bigint, x.args
    union all
    select p.n, jsonb_set(d.args, p.path, '"***"') from done d join place p on p.n = d.n + 1)
  select case when (select count(*) from place) <= 100
    then (select d.args from done d order by d.n desc limit 1)
    else x.args || (select jsonb_object_agg(p.value ->> 0, '***') from jsonb_array_elements(x.paths) p
      where x.args ? (p.value ->> 0)) end) c (args))
    else coalesce(r.args, j.args) end as args, coalesce(r.priority, j.priority) as priority, j.lock,
  j.queueing_lock, j.keys[1] as concurrency_key, coalesce(n.needs, j.needs) as needs,
  j.deadline, nullif(coalesce(r.scheduled_at, j.scheduled_at), '-infinity') as scheduled_at,
  (j.options ->> 'expires_at')::timestamptz as expires_at,
  j.created_at, coalesce(aj.claimed_at, f.started_at, j.started_at) as started_at, f.finished_at,
  coalesce(f.attempts, aj.attempt, j.attempts)::integer as attempts, j.failures, j.crashes,
  j.claims + case when aj.claim is not null or f.state = 'succeeded'
    and f.worker_id is not null then 1 else 0 end as claims,
  aj.claim, coalesce(aj.worker_id, f.worker_id) as worker_id,
  coalesce(f.error, case when f.id is null then j.error end) as error, f.result,
  j.options ->> 'description' as description, j.options -> 'headers' as headers,
  (j.options ->> 'parent')::bigint as parent, j.options ->> 'idempotency_key' as idempotency_key,
  j.progress, j.percent, j.message
from queue.job_now j
left join queue.active_job aj on aj.id = j.id
left join queue.lane l on l.lane = aj.lane
left join queue.abort a on a.id = aj.id and a.claim = aj.claim
left join queue.finished f on f.id = j.id
left join queue.waiting w on w.id = j.id
left join queue.lock_member m on m.lock = j.lock and m.id = j.id
left join lateral (
  -- the last committed replacement of the job that has not been applied yet
  select h.payload -> 'args' as args, (h.payload ->> 'priority')::integer as priority,
    coalesce((h.payload ->> 'scheduled_at')::timestamptz, '-infinity') as scheduled_at
  from queue.pending_settlement h
  where j.flags & 8448/* queueing_lock */ <> 0 and h.job_id = j.id and h.kind = 'replace' and f.id is null
    and aj.claim is null
  order by h.seq desc limit 1) r on true
left join lateral (
  select array_agg(d.need_id order by d.need_id) as needs
  from queue.need d
  where j.flags & 8/* needs */ <> 0 and d.job_id = j.id) n on true
where (select x.is_all from queue.visible_queues x)
  or j.queue like any ((select x.queues from queue.visible_queues x)::text[]);
comment on view queue.jobs is
  'All jobs, until they are removed. The state is the one that the database knows so far: admission may'
    ' change that of a new job. Sensitive args (register_task) read *** for all but the owner.';

create view queue.attempts as
select a.job_id, a.attempt, a.claim, a.worker_id, a.started_at, a.finished_at, a.outcome, a.error, a.details
from queue.attempt a
where (select x.is_all from queue.visible_queues x)
  or exists (select from queue.job_now j
             where j.id = a.job_id
               and j.queue like any ((select x.queues from queue.visible_queues x)::text[]));
comment on view queue.attempts is 'All attempts that did not succeed.';

create view queue.steps as
select s.job_id, (s.name || case when s.no > 1 then '#' || s.no else '' end) collate "default" as name,
  s.value, s.fingerprint, s.claim, s.finished_at, coalesce(s.failures, 0) as failures, s.error
from queue.step s
where s.finished_at is not null
  and ((select x.is_all from queue.visible_queues x)
    or exists (select from queue.job_now j
               where j.id = s.job_id
                 and j.queue like any ((select x.queues from queue.visible_queues x)::text[])));
comment on view queue.steps is
  'The finished steps of durable jobs: their values, and the claims that finished them. A sleep appears when'
    ' it begins, with the time of its end as its value. failures: how often it failed before it finished;'
    ' error: if it has failed for good.';

create view queue.workers as
select w.id, w.name, w.queues, w.info, w.registered_at, w.last_seen_at, w.dead_after,
  w.gone_at is null and w.last_seen_at + w.dead_after >= statement_timestamp() as is_alive,
  coalesce(aj.running, 0)::integer as running, w.memory
from queue.worker w
left join (select aj.worker_id, count(*) as running from queue.active_job aj where aj.claim is not null
  group by aj.worker_id) aj on aj.worker_id = w.id
where (select x.is_all from queue.visible_queues x)
  or exists (select from unnest(w.queues) q
    where q like any ((select x.queues from queue.visible_queues x)::text[]));
comment on view queue.workers is
  'Registered workers, and those that have gone within the last minute. memory: the resident bytes that the'
    ' last heartbeat told, or NULL.';

create view queue.tasks as
select t.name, t.defaults from queue.task t;
comment on view queue.tasks is 'Registered tasks and their defaults.';

create view queue.queues as
select q.queue as name, q.created_at, c.max_running, c.rate_limit, c.rate_per, c.retain,
  coalesce(x.ready, 0) as ready,
  coalesce(x.running, 0) as running,
  nullif(greatest(p.paused_until, statement_timestamp()), statement_timestamp()) as paused_until
from (select c.queue, c.created_at from queue.queue_config c
      union all
      select u.queue, null as created_at
      from (select l.queue from queue.lane l union select a.queue from queue.unadmitted a) u
      where not exists (select from queue.queue_config c where c.queue = u.queue)) q
left join queue.queue_config c on c.queue = q.queue
left join lateral (
  select case when p.is_paused then coalesce(p.until, 'infinity') end as paused_until
  from queue.pause p
  where p.task is null
    and (p.queue is null or p.queue = q.queue or right(p.queue, 1) = '*'
    and starts_with(q.queue, left(p.queue, -1)))
  order by p.no desc limit 1) p on true
left join (select l.queue, sum(a.jobs - a.running)::bigint as ready, sum(a.running)::bigint as running
           from queue.lane l
           -- counted before the join, because after it a million jobs take three times as long
           join (select aj.lane, count(*) as jobs, count(aj.claim) as running
                 from queue.active_job aj group by aj.lane) a on a.lane = l.lane
           group by l.queue) x on x.queue = q.queue
where (select vis.is_all from queue.visible_queues vis)
  or q.queue like any ((select vis.queues from queue.visible_queues vis)::text[]);
comment on view queue.queues is
  'Queues that are configured, have had ready jobs, or have jobs that are not admitted yet.';

create view queue.locks as
select m.lock,
  -- by aggregates, because sorting a million members takes three times as long
  coalesce(min(m.id) filter (where aj.claim is not null), min(m.id) filter (where m.has_turn), min(m.id))
    as job_id,
  count(aj.claim)::integer as running,
  (count(*) - count(aj.claim))::integer as waiting,
  bool_or(m.is_mutex) as has_mutex
from queue.lock_member m
left join (select aj.id, aj.claim from queue.active_job aj where aj.claim is not null) aj on aj.id = m.id
group by m.lock;
comment on view queue.locks is
  'Locks with unfinished jobs: the job that runs or comes next, how many run (at most one) and how many'
    ' wait.';

create view queue.semaphores as
select case left(s.key, 1) when 'k' then 'concurrency_key' when 'm' then 'lock' else 'queue' end as kind,
  substr(s.key, 2) as key, nullif(s.slots, 2147483647) as "limit", s.used,
  (select coalesce(sum(r), 0) from unnest(s.ready) r)::integer as ready,
  (select coalesce(sum(w), 0) from unnest(s.waiting) w)::integer as waiting, s.rate_limit, s.rate_per
from (select distinct on (s.key) s.key, s.slots, s.used, s.ready, s.waiting, s.rate_limit, s.rate_per
  from queue.semaphore s order by s.key, s.tick desc) s;
comment on view queue.semaphores is
  'Concurrency keys, mutex locks and the max_running of queues: the limit, how much of it running jobs use'
    ' and ready jobs ask for, and how many jobs wait. The rate is rate_limit starts per rate_per.';

-- waiting: how far a share's next tag lies ahead of the first ready (or waiting) job, in turns.
create view queue.shares as
with first as (
  select g.queue, g.priority, g.key, min(f.deadline) as tag
  from (select distinct t.queue, t.priority, t.key from queue.share_tag t) g
  join queue.lane l on l.queue = g.queue and l.priority = g.priority and l.tag_base is not null
  cross join lateral (
    (select aj.deadline from queue.active_job aj
     where g.key = '' and not l.is_idle and aj.lane = l.lane
       and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id) and aj.deadline >= l.tag_base
       and aj.deadline < coalesce(l.retag_from, '0001-01-01 00:00+00') and aj.claim is null
     order by aj.deadline, aj.id limit 1)
    union all
    (select w.deadline from queue.waiting w
     where g.key <> '' and w.reason = 'slot' and w.key = g.key and w.lane = l.lane
       and w.deadline >= l.tag_base and w.deadline < coalesce(l.retag_from, '0001-01-01 00:00+00')
     order by w.deadline, w.id limit 1)) f
  group by g.queue, g.priority, g.key),
ahead as (
  select t.queue, t.priority, t.share, greatest(extract(epoch from t.tag - f.tag), 0) * 1000000 as ahead,
    0 as started
  from queue.share_tag t
  left join first f on f.queue = t.queue and f.priority = t.priority and f.key = t.key
  union all
  select j.queue, j.priority, coalesce(j.options ->> 'share', ''), 0, 1
  from (
    (select aj.id from queue.active_job aj
     where aj.claimed_at > statement_timestamp() - interval '1 minute' limit 10000)
    union all
    (select f.id from queue.finished f
     where f.finished_at > statement_timestamp() - interval '1 minute'
       and f.started_at > statement_timestamp() - interval '1 minute' limit 10000)) x
  cross join lateral (
    select j.queue, j.priority, j.options from queue.job_now j where j.id = x.id offset 0) j
  where exists (select from queue.lane l
    where l.queue = j.queue and l.priority = j.priority and l.tag_base is not null))
select a.queue, a.priority, a.share, w.weight,
  sum(coalesce(floor(a.ahead / round(100000 / w.weight)::numeric), 0))::bigint as waiting,
  sum(a.started) as started
from ahead a
cross join lateral (
  select coalesce(
    (select c.weight from queue.share_config c where c.pattern = a.share),
    (select c.weight from queue.share_config c
     where right(c.pattern, 1) = '*' and starts_with(a.share, left(c.pattern, -1)) and a.share <> ''
     order by length(c.pattern) desc limit 1),
    1) as weight offset 0) w
group by a.queue, a.priority, a.share, w.weight;
comment on view queue.shares is
  'Shares with ready jobs, or jobs that wait for slots, or that started within the last minute, by queue and'
    ' priority; an empty share is that of the jobs without one. waiting: about how many such jobs it has, as'
    ' far as its turns show. started: its starts in the last minute, among at most 10,000 that run and'
    ' 10,000 that have ended.';

create view queue.schedules as
select s.name, s.cron, s.timezone, s.task,
  case when (select h.paths from queue.hidden_paths h) ? s.task
    then (select c.args
      from (select s.args, (select h.paths from queue.hidden_paths h) -> s.task as paths) x
      cross join lateral (with recursive walk (rest, value, path) as (
    select p.value, x.args, '{}'::text[] from jsonb_array_elements(x.paths) p where jsonb_typeof(p.value) = 'array'
    union all
    select s.rest, s.value, w.path || s.key
    from walk w
    cross join lateral (
      select w.rest - 0 as rest, w.value -> (w.rest ->> 0) as value, array[w.rest ->> 0] as key
      where jsonb_typeof(w.rest -> 0) = 'string' and jsonb_typeof(w.value) = 'object'
        and w.value ? (w.rest ->> 0) and (not w.value ? '__pgdefer__' or w.rest ->> 0 = 'value')
      union all
      select case when t.is_whole then '[]' else w.rest end,
        case when t.is_whole then w.value else w.value -> 'value' end,
        case when t.is_whole then '{}'::text[] else '{value}' end
      from (
        select w.value ->> '__pgdefer__' = 'dict'
          or coalesce(jsonb_typeof(w.value -> 'value') not in ('object', 'array'), true) as is_whole
        where jsonb_typeof(w.value) = 'object' and w.value ? '__pgdefer__') t
      union all
      select case jsonb_typeof(w.rest -> 0) when 'string' then w.rest else w.rest - 0 end, e.value,
        array[(e.n - 1)::text]
      from jsonb_array_elements(case when jsonb_typeof(w.value) = 'array' then w.value end)
        with ordinality e (value, n)
      where jsonb_typeof(w.rest -> 0) <> 'number' or w.rest ->> 0 = (e.n - 1)::text
      union all
      select w.rest - 0, w.value, '{}'::text[]
      where jsonb_typeof(w.rest -> 0) <> 'string' and jsonb_typeof(w.value) <> 'array'
        and coalesce(w.rest ->> 0, '0') = '0'
        and not coalesce(jsonb_typeof(w.value) = 'object' and w.value ? '__pgdefer__', false)) s
    where w.rest <> '[]'),
  place as materialized (
    select row_number() over (order by cardinality(p.path) desc, p.path) as n, p.path
    from (select distinct l.path
      from (select w.path from walk w where w.rest = '[]' limit 101) l) p),
  done (n, args) as (
    select 0::bigint, x.args
    union all
    select p.n, jsonb_set(d.args, p.path, '"***"') from done d join place p on p.n = d.n + 1)
  select case when (select count(*) from place) <= 100
    then (select d.args from done d order by d.n desc limit 1)
    else x.args || (select jsonb_object_agg(p.value ->> 0, '***') from jsonb_array_elements(x.paths) p
      where x.args ? (p.value ->> 0)) end) c (args))
    else s.args end as args, s.options, s.is_enabled as enabled,
  s.next_run_at, s.last_run_at, s.last_job_id, case when s.is_enabled then s.reason else 'disabled' end
    as reason,
  s.catch_up, s.max_delay, case when s.skips_overlap then 'skip' else 'allow' end as overlap,
  s.options ->> 'source' as source,
  s.created_at, s.changed_at
from queue.schedule s;
comment on view queue.schedules is
  'Schedules, each with its next run and the last run that was handled. reason: why it does not run although'
    ' it is due: disabled, paused, queueing_lock, or the error of the last run.';

create view queue.schedule_runs as
select r.name, r.run_at, r.job_id, r.skipped, r.detail, r.is_manual as manual, r.decided_at
from queue.schedule_run r;
comment on view queue.schedule_runs is
  'The history of runs, at least the last 100 of each schedule: the job, or why the run was skipped (missed,'
    ' max_delay, overlap, queueing_lock, changed, error); detail says more. manual: the run was started by'
    ' run_now.';

-- tables/inspect/lists.sql
create index finished_cancelled_idx on queue.finished (id) where state = 'cancelled';

-- For lists of these jobs, however many other jobs wait for their time or for a slot.
create index waiting_list_idx on queue.waiting (reason, id)
  where reason in ('held', 'upstream_failed', 'needs', 'signal', 'task_paused', 'moving');

create index attempt_at_idx on queue.attempt using brin (finished_at) with (pages_per_range = 32,
  autosummarize = on);

-- Unfinished jobs, read without the finished ones. due_at: the time from which the job could have run, if no
-- gate had held it. Private.
create view queue.unfinished as
select j.id, j.task, j.queue,
  coalesce(u.state, case when j.is_suspended then 'waiting'
    when j.scheduled_at > statement_timestamp() then 'scheduled' else 'ready' end) as state,
  coalesce(j.scheduled_at, j.created_at) as due_at
from (
  select aj.id, case when aj.claim is null then 'ready' else 'running' end as state from queue.active_job aj
  union all
  select w.id, case w.reason when 'schedule' then 'scheduled' when 'needs' then 'waiting'
    when 'signal' then 'waiting'
    when 'slot' then 'blocked' when 'parked' then 'blocked' when 'moving' then 'blocked'
    when 'task_paused' then 'ready' else w.reason end
  from queue.waiting w
  union all
  select m.id, 'blocked' as state
  from queue.lock_member m
  where not exists (select from queue.active_job aj where aj.id = m.id)
    and not exists (select from queue.waiting w where w.id = m.id)
    and not exists (select from queue.finished f where f.id = m.id)
    and not exists (select from queue.pending_settlement h where h.job_id = m.id and h.kind = 'again')
  union all
  -- by its wait or its time, as in queue.jobs
  select h.job_id, h.payload ->> 'state' as state from queue.pending_settlement h where h.kind = 'again'
  union all
  select a.id, case when a.flags & 32/* held */ <> 0 then 'held'
    when a.scheduled_at > statement_timestamp() then 'scheduled' when a.needs is not null then 'waiting'
    else 'ready' end
  from queue.unadmitted a) u
join queue.job_now j on j.id = u.id;

create view queue.metrics as
with u as materialized (
  select u.queue, count(*) filter (where u.state = 'scheduled') as scheduled,
    count(*) filter (where u.state = 'waiting') as waiting,
    count(*) filter (where u.state = 'upstream_failed') as upstream_failed,
    count(*) filter (where u.state = 'blocked') as blocked,
    count(*) filter (where u.state = 'ready') as ready, count(*)
      filter (where u.state = 'running') as running,
    count(*) filter (where u.state = 'held') as held, min(u.due_at)
      filter (where u.state = 'ready') as oldest_ready_at
  from queue.unfinished u group by u.queue)
select q.name as queue,
  coalesce((select p.is_paused and coalesce(p.until > statement_timestamp(), true) from queue.pause p
            where p.task is null
              and (p.queue is null or p.queue = q.name or right(p.queue, 1) = '*'
              and starts_with(q.name, left(p.queue, -1)))
            order by p.no desc limit 1), false)::integer as paused,
  coalesce(u.scheduled, 0) as scheduled, coalesce(u.waiting, 0) as waiting,
  coalesce(u.upstream_failed, 0) as upstream_failed, coalesce(u.blocked, 0) as blocked,
  coalesce(u.ready, 0) as ready,
  coalesce(u.running, 0) as running, coalesce(u.held, 0) as held, coalesce(f.failed, 0) as failed,
  coalesce(extract(epoch from statement_timestamp() - u.oldest_ready_at), 0)::double precision
    as oldest_ready_seconds,
  coalesce(d.succeeded, 0) as succeeded_5m, coalesce(d.failed, 0) as failed_5m,
  coalesce(d.cancelled, 0) as cancelled_5m,
  (select count(*) from queue.worker w
   where w.gone_at is null and w.last_seen_at + w.dead_after >= statement_timestamp()
     and (w.queues is null or exists (
     select from unnest(w.queues) p where p = q.name or right(p, 1) = '*'
       and starts_with(q.name, left(p, -1))))) as workers
from (select c.queue as name from queue.queue_config c union select l.queue
  from queue.lane l union select u.queue from u) q
left join u on u.queue = q.name
left join (
  select j.queue, count(*) as failed
  from queue.finished f join queue.job_now j on j.id = f.id
  where f.state = 'failed' group by 1) f on f.queue = q.name
left join (
  select j.queue, count(*) filter (where f.state = 'succeeded') as succeeded,
    count(*) filter (where f.state = 'failed') as failed, count(*)
      filter (where f.state = 'cancelled') as cancelled
  from queue.finished f join queue.job_now j on j.id = f.id
  where f.finished_at > statement_timestamp() - interval '5 minutes' group by 1) d on d.queue = q.name
where (select vis.is_all from queue.visible_queues vis)
  or q.name like any ((select vis.queues from queue.visible_queues vis)::text[]);
comment on view queue.metrics is
  'A row for each queue with its figures, for postgres_exporter: queue is a label, the others are gauges.'
    ' Jobs by state; jobs that ended in the last 5 minutes; live workers that serve the queue.';
end
$pgdefer_tables$;

-- The tables, views and sequences that a release makes. Others in the schema are an application's.
create or replace function queue._own_relations()
returns text[]
language plpgsql
immutable
parallel safe
security invoker
as $$
begin
  return array[
    'abort', 'access', 'active_job', 'admission', 'attempt', 'attempts', 'audit', 'audit_log', 'awaited',
    'awaited_seq', 'backlog', 'backlog_part', 'citus_place', 'claim_seq', 'claimed_job', 'cursor',
    'cursor_now', 'deleted', 'event', 'expiry', 'finished', 'first_run', 'group_close', 'group_member',
    'group_state', 'groups', 'hidden_paths', 'horizon', 'idempotency_key', 'installation', 'job',
    'job_group', 'job_now', 'job_override', 'jobs', 'key_config', 'lane', 'lane_seq', 'lease',
    'lock_member', 'locks', 'log', 'metrics', 'minute', 'minute_cursor', 'minutes', 'need', 'need_now',
    'needed_seq', 'pause', 'pending_settlement', 'queue_config', 'queueing_lock', 'queues', 'rate_start',
    'received_signal', 'rehearsal', 'schedule', 'schedule_run', 'schedule_runs', 'schedules', 'semaphore',
    'semaphores', 'shard', 'shard_job', 'shard_move', 'shard_part', 'shard_sent', 'shard_slot',
    'share_config', 'share_tag', 'shares', 'sleeper', 'step', 'steps', 'stream_item', 'suspended', 'task',
    'tasks', 'tick_seq', 'unadmitted', 'undelivered', 'unfinished', 'unrestricted', 'visible_queues',
    'waiting', 'worker', 'worker_claim', 'workers']::text[];
end $$;

-- The releases whose tables can be migrated, oldest first, then this one.
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

-- The indexes of large tables that the step from a release adds.
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

-- Migrates the tables to the next release, and returns that; NULL if there is no further step.
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

-- base/checks.sql
-- Checks of arguments. Each raises 22023 with the name of the argument.

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

-- Raises: 22023 unless value, which may be NULL, is a list without NULL: array_position can't search nested
-- arrays.
create or replace function queue._check_list(what text, value text[])
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if array_ndims(value) > 1 then
    perform queue._invalid(what || ' must be a plain list', 'Pass an array of one dimension.');
  elsif array_position(value, null) is not null then
    perform queue._invalid(what || ' holds NULL', 'Pass a list without NULL.');
  end if;
end $$;

-- Raises: 22023 unless ids is a list of ids, without NULL, and not too long for one call: its answer travels
-- with the admission lock held, and 1,000 rows always fit into the sockets' buffers (work/deliver.sql).
create or replace function queue._check_ids(ids bigint[])
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if ids is null or array_ndims(ids) > 1 or array_position(ids, null) is not null then
    perform queue._invalid('ids must be a list of ids', 'Pass ids of jobs, without NULL.');
  elsif cardinality(ids) > 1000 then
    perform queue._invalid('ids holds more than 1,000', 'Call again for each further 1,000.',
      'ids: ' || cardinality(ids));
  end if;
end $$;

-- Raises: 22023 unless value is a queue's name: a name (_check_name) that does not end in an asterisk.
create or replace function queue._check_queue(value text)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  perform queue._check_name('queue', value);
  if right(value, 1) = '*' then
    perform queue._invalid('a queue''s name may not end in *',
      'Patterns such as prefix* select queues; a queue needs a plain name.', 'queue: ' || value);
  end if;
end $$;

-- Raises: 22023 if the object has a key that is not in `known`, or is not an object.
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

-- Raises: 22023 unless each value that defer takes as text, integer or array is a JSON string, whole number
-- or array, or null.
create or replace function queue._check_types(what text, object jsonb)
returns void language plpgsql immutable parallel safe security invoker as $$
declare
  v_bad text;
begin
  select e.key into v_bad from jsonb_each(object) e
  where e.key in ('task', 'queue', 'lock', 'queueing_lock', 'concurrency_key', 'scheduled_at')
    and jsonb_typeof(e.value) not in ('string', 'null')
    or e.key = 'needs' and jsonb_typeof(e.value) not in ('array', 'null')
    or e.key = 'deadline' and jsonb_typeof(e.value) not in ('string', 'number', 'null')
    or e.key in ('priority', 'concurrency_limit')
      and not (e.value = 'null' or jsonb_typeof(e.value) = 'number'
        and e.value between '-2147483648' and '2147483647' and e.value::text ~ '^-?[0-9]+$')
  limit 1;
  if found then
    perform queue._invalid(format('%s has a value of a wrong type', what),
      'Names, keys and times are JSON strings, priority and concurrency_limit whole numbers, needs a list.',
      format('key: %s, value: %s', v_bad, left(object ->> v_bad, 200)));
  end if;
end $$;

-- Raises: 22023 unless the interval, which may be NULL, can be added to any time.
create or replace function queue._check_interval(what text, value interval)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if not queue._is_bounded(value) then
    perform queue._invalid(what || ' is out of range',
      'Pass an interval such as ''5 minutes'', from 0 to 4,000 years.', format('value: %s', value));
  end if;
end $$;

-- The interval of a JSON value, given as text or as a number of seconds. Text that begins with a minus is
-- refused, because its meaning depends on the setting IntervalStyle.
-- Raises: 22023 if it is not an interval, or one that can't be added to every time.
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
    perform queue._invalid(what || ' is not an interval',
      'Give an interval such as "5 minutes", or seconds as a number; from 0 to 4,000 years.',
      'value: ' || left(value::text, 200));
  end if;
  return v_interval;
end $$;

-- An interval that can be added to and subtracted from any time: no part is negative (a month less and 40
-- days more is a positive interval, but may still lead out of the calendar), and it is at most 4,000 years.
create or replace function queue._is_bounded(value interval)
returns boolean language plpgsql immutable parallel safe security invoker as $$
begin
  return value between interval '0' and interval '4000 years'
    and least(extract(year from value), extract(month from value), extract(day from value),
              extract(hour from value), extract(minute from value), extract(second from value)) >= 0;
end $$;

-- Raises: 22023 unless the time, which may be NULL, lies in the years 1 to 9999, which every client can
-- represent and to which any interval may be added; or, with may_be_never, is infinity.
create or replace function queue._check_moment(what text, value timestamptz,
  may_be_never boolean default false)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if not (value >= '0001-01-03 00:00+00' and value < '10000-01-01 00:00+00' or may_be_never
    and value = 'infinity') then
    if not isfinite(value) then
      perform queue._invalid(what || ' must be finite',
        'Pass a time. To put a job on hold without one, use queue.hold.');
    end if;
    perform queue._invalid(what || ' is out of range', 'Pass a time in the years 1 to 9999.',
      format('value: %s', value));
  end if;
end $$;

-- Raises: 22023 unless the JSON value is a timestamp.
create or replace function queue._timestamp(what text, value jsonb)
returns timestamptz language plpgsql stable parallel unsafe security invoker as $$
begin
  if value is null or jsonb_typeof(value) = 'null' then
    return null;
  end if;
  if jsonb_typeof(value) = 'string' then
    begin
      return (value #>> '{}')::timestamptz;
    exception when others then
      null;  -- as any other value
    end;
  end if;
  perform queue._invalid(what || ' is not a timestamp',
    'Give a timestamp with a time zone, such as 2030-01-31T09:00:00Z.', 'value: ' || left(value::text, 200));
  return null;
end $$;

-- A time as text, independent of the session's time zone.
create or replace function queue._utc(p_at timestamptz)
returns text language plpgsql immutable parallel safe security invoker as $$
begin
  return (to_jsonb(p_at at time zone 'UTC') #>> '{}') || case when isfinite(p_at) then '+00:00' else '' end;
end $$;

-- Raises: 22023 if JSON takes more bytes as text than queue.configure allows; returns true otherwise. Values
-- stored in less than 2,000 bytes are not checked: no JSON prints more than 8,193 bytes for each stored byte.
-- A value from a table may be compressed, and shows its size only when it is read.
create or replace function queue._check_size(what text, value jsonb)
returns boolean language plpgsql stable parallel unsafe security invoker as $$
declare
  v_most integer;
  v_size bigint;
begin
  if pg_column_size(value) < 2000 and pg_column_compression(value) is null then
    return true;
  end if;
  select i.max_size into v_most from queue.installation i;
  -- a digit, three bytes in a list, is stored in twelve bytes
  v_size := case when pg_column_size(value) / 5 > v_most then pg_column_size(value) / 5
    else queue._text_size(value, v_most) end;
  if v_size > v_most then
    perform queue._invalid(format('the JSON of %s is too large', what),
      'Keep large data elsewhere and pass a reference to it. The owner may raise the limit: queue.configure.',
      format('bytes as text: at least %s, allowed: %s', v_size, v_most));
  end if;
  return true;
end $$;

-- The number of bytes of args and headers as text, if args take more than 2,000, else NULL: fetch counts with
-- this.
-- Raises: 22023 if they are larger than queue.configure allows.
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

-- The number of bytes of JSON as text, or some number above p_most as soon as it is known to exceed that. A
-- number of 10 bytes may print 131,072 digits (1e131071). So large numbers are measured first, one by one,
-- and never all made text together.
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
  -- a text of 1 GB, or nested too deeply to measure
  return greatest(v_size, p_most + 1::bigint);
end $$;

-- Raises: 22023 unless it is a valid number of jobs.
create or replace function queue._check_max_jobs(p_max_jobs integer)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if p_max_jobs is null or p_max_jobs < 1 then
    perform queue._invalid('max_jobs must be at least 1', 'Ask for 1 job or more.',
      format('max_jobs: %s', coalesce(p_max_jobs::text, 'NULL')));
  end if;
end $$;

-- Raises: 22023 unless it is a rate, {"limit", "per"}, or NULL.
create or replace function queue._check_rate(what text, value jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
begin
  if value is null or jsonb_typeof(value) = 'null' then
    return;
  end if;
  perform queue._check_keys(what, value, array['limit', 'per']);
  if jsonb_typeof(value -> 'limit') is distinct from 'number'
    or value ->> 'limit' !~ '^[1-9][0-9]{0,8}$'
    or coalesce(queue._interval('per', value -> 'per'), '0') = '0' then
    perform queue._invalid(what || ' needs a limit of at least 1 and an interval',
      'Pass {"limit": 10, "per": "1 minute"}.');
  end if;
end $$;

-- Raises: 22023 unless it is a jsonpath without variables.
create or replace function queue._jsonpath(p_path text)
returns jsonpath language plpgsql immutable parallel unsafe security invoker as $$
declare
  v_path jsonpath;
begin
  begin
    v_path := p_path::jsonpath;
    -- a template is read only if it is text
    perform jsonb_path_query('"x"', ('$.datetime(' || t[1] || ')')::jsonpath, '{}', true)
    from regexp_matches(v_path::text, replace('[.]datetime[(]("(?:~~.|[^"~~])*")[)]', '~', chr(92)), 'g') t;
  exception when syntax_error or data_exception or feature_not_supported or program_limit_exceeded then
    perform queue._invalid('not a jsonpath',
      'Write it as in $.items[*] ? (@.price > 3); quote odd names: $."a b".', sqlerrm);
  end;
  -- it is shown with quotes around all names and texts
  if strpos(regexp_replace(v_path::text, replace('"(?:~~.|[^"~~])*"', '~', chr(92)), '""', 'g'), '$""') > 0
    then
    perform queue._invalid('a jsonpath may not contain variables',
      'Write the value itself; $ alone stands for the args.', 'path: ' || left(p_path, 200));
  end if;
  return v_path;
end $$;

-- base/queue_names.sql
-- Names of queues and patterns, and the queues that are paused.
-- Tests: operate/pause.sql, work/fetch.sql.

-- Whether a queue's name is selected by a name, prefix* or *.
create or replace function queue._matches(p_queue text, p_pattern text)
returns boolean language plpgsql immutable parallel safe security invoker as $$
begin
  return p_queue = p_pattern or right(p_pattern, 1) = '*' and starts_with(p_queue, left(p_pattern, -1));
end $$;

-- The queues that a list of names and patterns selects among those that may have ready jobs; NULL means all.
-- Raises: 22023.
create or replace function queue._match_queues(p_queues text[])
returns text[] language plpgsql stable parallel safe security invoker as $$
begin
  if '*' = any (p_queues) then
    return null;
  elsif p_queues = '{}' or array_ndims(p_queues) > 1 or array_position(p_queues, null) is not null
    or '' = any (p_queues) then
    perform queue._invalid('queues is empty or contains NULL',
      'Name queues, prefix* patterns or *; pass NULL for all.');
  elsif not exists (select from unnest(p_queues) q where right(q, 1) = '*') then
    return p_queues;
  end if;
  return array(select distinct l.queue from queue.lane l
               where not l.is_idle and exists (select from unnest(p_queues) q
                 where queue._matches(l.queue, q)));
end $$;

-- Whether one of the names is that of a queue that is asked for. A list of 1,000 names was cut, so it counts
-- as if it had one.
create or replace function queue._has_any_of(p_queues text[], p_names text[])
returns boolean language plpgsql immutable parallel safe security invoker as $$
begin
  return cardinality(p_names) > 0
    and (p_queues is null or cardinality(p_names) >= 1000
         or exists (select from unnest(p_names) n join unnest(p_queues) q on queue._matches(n, q)));
end $$;

-- The end of a queue's pause: NULL if it is not paused.
create or replace function queue._paused_until(p_queue text)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_until timestamptz;
begin
  select case when p.is_paused then coalesce(p.until, 'infinity') end into v_until
  from queue.pause p
  where p.task is null and (p.queue is null or queue._matches(p_queue, p.queue))
  order by p.no desc limit 1;
  return v_until;
end $$;

-- The end of a task's pause on a queue: NULL if it is not paused.
create or replace function queue._task_paused_until(p_task text, p_queue text)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_until timestamptz;
begin
  select case when p.is_paused then coalesce(p.until, 'infinity') end into v_until
  from queue.pause p
  where (p.task = p_task or p.task is null and not p.is_paused)
    and (p.queue is null or queue._matches(p_queue, p.queue))
  order by p.no desc limit 1;
  return v_until;
end $$;

-- base/queue_access.sql
-- Restrictions: roles that may use only some queues.
--
-- queue.access records what grant_access granted. While no role is restricted, the view queue.unrestricted
-- exists, and public functions check only for its name, which costs as much as the check for
-- queue.installation that it replaces. Without the view, every caller needs the owner's rights or a row of
-- queue.access, its own or that of a role whose privileges it has.
--
-- The caller: a security definer function can't see current_user of its caller. The caller is the role set by
-- SET ROLE, else the role that logged in (_caller). This is the role whose EXECUTE was checked, unless the
-- call came through another security definer function; then that function's caller needs rights too. Views
-- filter by current_user, which is exact.
-- Tests: base/permissions.sql.

-- Raises: 42501 unless the caller may use all queues that a name or pattern selects (NULL: every queue).
create or replace function queue._require_queue(p_kinds text[], p_queue text)
returns void language plpgsql stable parallel safe security invoker as $$
declare
  v_allowed text[] := queue._allowed_queues(p_kinds);
begin
  if v_allowed is not null and queue._allows(v_allowed, coalesce(p_queue, '*')) is not true then
    perform queue._queue_not_allowed(p_queue, v_allowed);
  end if;
end $$;

-- Returns those of a list of names and patterns (NULL: all) that the caller may use, in the same order.
-- Raises: 42501 if there are none.
create or replace function queue._narrow_queues(p_kinds text[], p_queues text[])
returns text[] language plpgsql stable parallel safe security invoker as $$
declare
  v_allowed text[] := queue._allowed_queues(p_kinds);
  v_queues text[];
begin
  if v_allowed is null or p_queues is null and v_allowed <> '{}' then
    return coalesce(v_allowed, p_queues);
  elsif p_queues = '{}' or array_ndims(p_queues) > 1 or array_position(p_queues, null) is not null
    or '' = any (p_queues) then
    return p_queues;  -- which the function rejects
  end if;
  select array_agg(x.queue order by x.n, x.queue) into v_queues
  from (
    select min(q.n) as n, case when queue._allows(array[l], q.queue) then q.queue else l end as queue
    from unnest(p_queues) with ordinality q (queue, n) cross join unnest(v_allowed) l
    where queue._allows(array[l], q.queue) or queue._allows(array[q.queue], l) group by 2) x;
  if v_queues is null then
    perform queue._queue_not_allowed(p_queues[1], v_allowed);
  end if;
  return v_queues;
end $$;

-- Raises: QJ001 for a job of another queue, as if it did not exist.
create or replace function queue._require_jobs(p_kinds text[], p_ids bigint[])
returns void language plpgsql volatile parallel safe security invoker as $$
declare
  v_allowed text[] := queue._allowed_queues(p_kinds);
  v_id bigint;
begin
  if v_allowed is null then
    return;
  end if;
  v_id := queue._job_not_allowed(v_allowed, p_ids);
  if v_id is not null then
    perform queue._job_not_found(v_id);
  end if;
end $$;

-- Raises: QJ007 if the worker serves queues that the caller may not use, as if it did not exist.
create or replace function queue._require_worker(p_worker bigint)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if not queue._serves_allowed(queue._allowed_queues('{worker}'), p_worker) then
    perform queue._worker_gone(p_worker);
  end if;
end $$;

-- Raises: QJ002 for a claim on a job of another queue, held by a worker of other queues.
create or replace function queue._require_claims(p_ids bigint[], p_claims bigint[])
returns void language plpgsql volatile parallel safe security invoker as $$
declare
  v_allowed text[] := queue._allowed_queues('{worker,operator}');
  v_lost record;
begin
  if v_allowed is null then
    return;
  end if;
  select aj.id, aj.claim into v_lost
  from unnest(p_ids, p_claims) u (id, claim)
  join queue.active_job aj on aj.id = u.id and aj.claim = u.claim
  join queue.job_now j on j.id = u.id
  where not queue._allows(v_allowed, j.queue)
    and queue._serves_allowed(v_allowed, aj.worker_id) is not true limit 1;
  if found then
    perform queue._claim_lost(v_lost.id, v_lost.claim);
  end if;
end $$;

-- The same for a list of outcomes, and for the queues and needs that they name. _finish checks malformed
-- lists.
-- Raises: QJ001, QJ002, 42501.
create or replace function queue._require_outcomes(p_outcomes jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_claims record;
begin
  if queue._allowed_queues('{worker,operator}') is null or jsonb_typeof(p_outcomes) is distinct from 'array'
    then
    return;
  end if;
  begin
    select array_agg(o.id) as ids, array_agg(o.claim) as claims into v_claims
    from jsonb_to_recordset(p_outcomes) o (id bigint, claim bigint);
  exception when data_exception then
    return;
  end;
  perform queue._require_claims(v_claims.ids, v_claims.claims);
  perform queue._require_jobs('{worker,operator}', array[n::text::bigint])
  from jsonb_array_elements(p_outcomes) o
  cross join jsonb_array_elements(case when jsonb_typeof(o -> 'needs') = 'array' then o -> 'needs' end) n
  where n::text ~ '^[0-9]{1,18}$';
  perform queue._require_queue('{worker,operator}', o -> 'options' ->> 'queue')
  from jsonb_array_elements(p_outcomes) o where o -> 'options' ->> 'queue' <> '';
end $$;

-- Raises: 42501 if a job that was just deferred is in another queue, QJ004 if it is an existing job of
-- another queue that holds the queueing lock or was deferred first with the idempotency key, QJ001 if its
-- needs or parent are in another queue.
-- p_key, p_key_queue: the result of _used_idempotency_key. A removed job counts as being in that queue.
-- p_table: the table whose trigger deferred it. Its owner's rights suffice, if the owner may defer by
-- triggers.
create or replace function queue._require_deferred(p_id bigint, p_table oid, p_key text, p_key_queue text)
returns void language plpgsql volatile parallel safe security invoker as $$
declare
  v_allowed text[] := queue._allowed_queues('{producer}');
  v_owner name;
  v_other bigint;
  v_job record;
begin
  -- for a job that existed before, only the queue counts
  select coalesce(j.queue, p_key_queue) as queue, x.is_new, j.queueing_lock,
    case when x.is_new then array_remove(j.needs || (j.options ->> 'parent')::bigint, null) end as others
      into v_job
  from (select) one
  left join lateral (select j.* from queue.job_now j where j.id = p_id offset 0) j on true
  cross join lateral (
    select coalesce(j.xid = pg_current_xact_id_if_assigned(), false) as is_new) x;
  v_other := case when v_job.others <> '{}' then queue._job_not_allowed(v_allowed, v_job.others) end;
  if p_table is not null and (v_other is not null or not queue._allows(v_allowed, v_job.queue)) then
    select r.rolname into v_owner from pg_class c join pg_roles r on r.oid = c.relowner where c.oid = p_table;
    if has_function_privilege(v_owner, 'queue.defer_trigger()', 'execute') then
      v_allowed := queue._allowed_queues('{producer}', v_owner);
      v_other := case when v_job.others <> '{}' then queue._job_not_allowed(v_allowed, v_job.others) end;
    end if;
  end if;
  if v_other is not null then
    perform queue._job_not_found(v_other);
  elsif not queue._allows(v_allowed, v_job.queue) then
    if not v_job.is_new and p_key <> '' then
      perform queue._key_taken(p_key);
    elsif not v_job.is_new then
      perform queue._already_queued(p_id, v_job.queueing_lock);
    end if;
    perform queue._queue_not_allowed(v_job.queue, v_allowed);
  end if;
end $$;

-- The queues, names and patterns, that a role (NULL: the caller) may use in one of the kinds; NULL means all.
create or replace function queue._allowed_queues(p_kinds text[], p_role name default null)
returns text[] language plpgsql stable parallel safe security invoker as $$
declare
  v_role name := coalesce(p_role, queue._caller());
  v_is_unrestricted boolean;
  v_allowed text[];
begin
  if to_regclass('queue.unrestricted') is not null or to_regclass('queue.access') is null
    or pg_has_role(v_role, current_user, 'usage') then
    return null;
  end if;
  select bool_or(a.queues is null), coalesce(array_agg(distinct q) filter (where q is not null), '{}')
  into v_is_unrestricted, v_allowed
  from queue.access a join pg_roles r on r.rolname = a.role left join lateral unnest(a.queues) q on true
  where a.kind = any (p_kinds) and pg_has_role(v_role, r.oid, 'usage') and queue._has_usage(r.oid);
  return case when v_is_unrestricted then null else v_allowed end;
end $$;

create or replace function queue._caller()
returns name language plpgsql stable parallel safe security invoker as $$
begin
  return case when current_setting('role') = 'none' then session_user else current_setting('role')::name end;
end $$;

-- The view queue.unrestricted, NULL without it: to_regclass at no cost, for functions that every job calls.
-- It is declared immutable, which it is not, so that the planner evaluates it once and puts the view into the
-- plan; a plan that contains a relation is remade when that is dropped. Use it as coalesce(v_none,
-- queue._unrestricted()) with a v_none that is NULL; otherwise the planner evaluates more, and the relation
-- is not in the plan. A plan made without the view keeps its NULL, so NULL means: check yourself. Everything
-- in it is qualified, because defer, which has no search_path, is planned with it.
-- Why no restriction is missed: a plan that was being made when the view was dropped may not notice; but
-- every grant_access also changes the rights on the schema (_regrant), after which PostgreSQL remakes all
-- plans, including those.
create or replace function queue._unrestricted()
returns pg_catalog.regclass language plpgsql immutable parallel safe security invoker as $$
begin
  return pg_catalog.to_regclass('queue.unrestricted');
end $$;

-- Whether a role itself was granted USAGE on the schema, as grant_access does. If not, its rows of
-- queue.access belong to a dropped role of the same name.
create or replace function queue._has_usage(p_role oid)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (
    select from pg_namespace n cross join lateral aclexplode(n.nspacl) x
    where n.nspname = 'queue' and x.grantee = p_role and x.privilege_type = 'USAGE');
end $$;

-- Whether the allowed queues include all that a name or pattern selects.
create or replace function queue._allows(p_limits text[], p_pattern text)
returns boolean language plpgsql immutable parallel safe security invoker as $$
begin
  return p_limits is null
    or exists (select from unnest(p_limits) l where l = p_pattern or right(l, 1) = '*'
      and starts_with(p_pattern, left(l, -1)));
end $$;

-- Raises: 42501, always.
create or replace function queue._queue_not_allowed(queue text, limits text[])
returns void language plpgsql stable parallel safe security invoker as $$
begin
  raise exception using errcode = '42501', message = 'this role may not use the queue',
    detail = format('queue: %s, role: %s', coalesce(left(queue, 200), 'all'), queue._caller()),
    hint = case when limits = '{}' then 'Have the owner call queue.grant_access for the role.'
                else format('It may use these: %s.', array_to_string(limits, ', ')) end;
end $$;

-- One of these jobs whose queue is not allowed, if there is one. Settings: as _check_needs.
create or replace function queue._job_not_allowed(p_limits text[], p_ids bigint[])
returns bigint language plpgsql stable parallel safe security invoker
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off
set enable_mergejoin = off set enable_bitmapscan = off as $$
begin
  return (
    select j.id
    from unnest(p_ids) u (id)
    cross join lateral (
      select j.id, j.queue from queue.job_now j where j.id = u.id offset 0) j
    where not queue._allows(p_limits, j.queue) limit 1);
end $$;

-- Whether all queues of a worker are allowed; NULL if the worker no longer exists.
create or replace function queue._serves_allowed(p_limits text[], p_worker bigint)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select p_limits is null or w.queues is not null and not exists (select from unnest(w.queues) q
      where not queue._allows(p_limits, q))
    from queue.worker w where w.id = p_worker);
end $$;

-- base/sensitive.sql
-- Sensitive args: values that nobody reads but the owner of the queue, and workers in the jobs that they
-- claim. register_task names them by paths. Everything that shows args puts *** in their place: the views by
-- queue.hidden_paths and the macro cut, functions by _hidden_paths and _cut. The paths are read as the args
-- are shown, so a change of a task's paths applies to all its jobs at once. A task without paths costs
-- nothing: whether any task has some is looked up once per query that shows args.

-- The steps of each path, from a list of texts; NULL if there are none. A name is a text, an element [2] its
-- number, all elements [*] null.
-- Raises: 22023.
create or replace function queue._sensitive_paths(p_paths jsonb)
returns jsonb language plpgsql immutable parallel unsafe security invoker as $$
declare
  v_item jsonb;
  v_text text;
  v_path text;
  v_steps jsonb;
  v_found jsonb := '[]'::jsonb;
begin
  if coalesce(jsonb_typeof(p_paths), 'null') = 'null' then
    return null;
  elsif jsonb_typeof(p_paths) <> 'array' then
    perform queue._invalid('sensitive must be a list of paths',
      'Pass ["card.number", "password"].', 'type: ' || jsonb_typeof(p_paths));
  elsif jsonb_array_length(p_paths) > 100 then
    perform queue._invalid('sensitive has too many paths', 'Pass at most 100.',
      format('paths: %s', jsonb_array_length(p_paths)));
  end if;
  for v_item in select e.value from jsonb_array_elements(p_paths) e loop
    v_text := case when jsonb_typeof(v_item) = 'string' then v_item #>> '{}' end;
    if v_text is null or v_text = '' or octet_length(v_text) > 1000 then
      perform queue._invalid('a sensitive path must be a text of 1 to 1,000 bytes',
        'Write it as in card.number or cards[*].number.', 'value: ' || left(v_item::text, 200));
    end if;
    -- as PostgreSQL writes it: each name in quotes
    v_path := queue._jsonpath(case when v_text ~ '^[[:space:]]*([$]|(lax|strict)[[:space:]])' then v_text
      else '$.' || v_text end)::text;
    if v_path !~ replace('^[$][.]"(~~.|[^"~~])*"([.]"(~~.|[^"~~])*"|[[][*][]]|[[][0-9]{1,9}[]])*$', '~',
      chr(92)) then
      perform queue._invalid('a sensitive path may only have names, [*] and numbers of elements',
        'Write it as in card.number, cards[*].number or items[0].price; quote odd names: "a b".c.',
        'path: ' || left(v_text, 200));
    end if;
    v_steps := (
      select jsonb_agg(case when s.part[1] is not null then s.part[1]::jsonb when s.part[2] <> '*'
        then to_jsonb(s.part[2]::integer) else 'null' end order by s.n)
      from regexp_matches(v_path, replace('[.]("(?:~~.|[^"~~])*")|[[]([*]|[0-9]+)[]]', '~', chr(92)), 'g')
        with ordinality s (part, n));
    if jsonb_array_length(v_steps) > 20 then
      perform queue._invalid('a sensitive path has too many steps', 'Use at most 20.',
        'path: ' || left(v_text, 200));
    elsif not exists (select from jsonb_array_elements(v_found) f where f.value = v_steps) then
      v_found := v_found || jsonb_build_array(v_steps);
    end if;
  end loop;
  return nullif(v_found, '[]');
end $$;

-- Raises: 22023 if a template among options names a sensitive arg: names of locks and keys are shown to all.
create or replace function queue._check_templates(p_paths jsonb, p_options jsonb)
returns void language plpgsql immutable parallel safe security invoker as $$
declare
  v_found record;
begin
  select o.key, p.value ->> 0 as field into v_found
  from (
    select e.key, e.value #>> '{}' as template from jsonb_each(p_options) e
    where e.key in ('lock', 'queueing_lock', 'concurrency_key', 'share', 'group', 'idempotency_key')
    union all
    select 'concurrency', c.value ->> 'key'
    from jsonb_array_elements(case jsonb_typeof(p_options -> 'concurrency') when 'array'
      then p_options -> 'concurrency' end) c) o
  cross join jsonb_array_elements(p_paths) p
  where strpos(o.template, format('{%s}', p.value ->> 0)) > 0
  limit 1;
  if found then
    perform queue._invalid(v_found.key || ' names a sensitive field',
      'Names of locks and keys are shown to everybody: fill them from another field.',
      'field: ' || left(v_found.field, 200));
  end if;
end $$;

-- The defaults of a task, with the sensitive paths among its old defaults that they lack.
create or replace function queue._keep_paths(p_old jsonb, p_new jsonb)
returns jsonb language plpgsql immutable parallel unsafe security invoker as $$
declare
  v_old jsonb := nullif(p_old -> 'sensitive', 'null');
  v_added jsonb;
begin
  if v_old is null or v_old = '[]' then
    return p_new;
  end if;
  select coalesce(jsonb_agg(e.value order by e.n), '[]') into v_added
  from jsonb_array_elements(nullif(p_new -> 'sensitive', 'null')) with ordinality e (value, n)
  where not exists (
    select from jsonb_array_elements(queue._sensitive_paths(v_old)) o
    where jsonb_build_array(o.value) = queue._sensitive_paths(jsonb_build_array(e.value)));
  return p_new || jsonb_build_object('sensitive', v_old || v_added);
end $$;

-- The sensitive paths of all tasks that have some, if the caller may not see what they lead to, else NULL. An
-- application that connects as the owner sets pgdefer.hide_sensitive for users who may not.
create or replace function queue._hidden_paths()
returns jsonb language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select jsonb_object_agg(t.name, t.sensitive) from queue.task t
    where t.sensitive is not null
      and (coalesce(current_setting('pgdefer.hide_sensitive', true), '') not in ('', 'off')
        or not pg_has_role(queue._caller(), current_user, 'usage')));
end $$;

-- Args with *** in place of what paths lead to; as they are without paths.
create or replace function queue._cut(p_paths jsonb, p_args jsonb)
returns jsonb language plpgsql immutable parallel safe security invoker as $$
begin
  if p_paths is null or p_args is null then
    return p_args;
  end if;
  return (
    select c.args from (select p_args as args, p_paths as paths) x
    cross join lateral (with recursive walk (rest, value, path) as (
    select p.value, x.args, '{}'::text[] from jsonb_array_elements(x.paths) p where jsonb_typeof(p.value) = 'array'
    union all
    select s.rest, s.value, w.path || s.key
    from walk w
    cross join lateral (
      select w.rest - 0 as rest, w.value -> (w.rest ->> 0) as value, array[w.rest ->> 0] as key
      where jsonb_typeof(w.rest -> 0) = 'string' and jsonb_typeof(w.value) = 'object'
        and w.value ? (w.rest ->> 0) and (not w.value ? '__pgdefer__' or w.rest ->> 0 = 'value')
      union all
      select case when t.is_whole then '[]' else w.rest end,
        case when t.is_whole then w.value else w.value -> 'value' end,
        case when t.is_whole then '{}'::text[] else '{value}' end
      from (
        select w.value ->> '__pgdefer__' = 'dict'
          or coalesce(jsonb_typeof(w.value -> 'value') not in ('object', 'array'), true) as is_whole
        where jsonb_typeof(w.value) = 'object' and w.value ? '__pgdefer__') t
      union all
      select case jsonb_typeof(w.rest -> 0) when 'string' then w.rest else w.rest - 0 end, e.value,
        array[(e.n - 1)::text]
      from jsonb_array_elements(case when jsonb_typeof(w.value) = 'array' then w.value end)
        with ordinality e (value, n)
      where jsonb_typeof(w.rest -> 0) <> 'number' or w.rest ->> 0 = (e.n - 1)::text
      union all
      select w.rest - 0, w.value, '{}'::text[]
      where jsonb_typeof(w.rest -> 0) <> 'string' and jsonb_typeof(w.value) <> 'array'
        and coalesce(w.rest ->> 0, '0') = '0'
        and not coalesce(jsonb_typeof(w.value) = 'object' and w.value ? '__pgdefer__', false)) s
    where w.rest <> '[]'),
  place as materialized (
    select row_number() over (order by cardinality(p.path) desc, p.path) as n, p.path
    from (select distinct l.path
      from (select w.path from walk w where w.rest = '[]' limit 101) l) p),
  done (n, args) as (
    select 0::bigint, x.args
    union all
    select p.n, jsonb_set(d.args, p.path, '"***"') from done d join place p on p.n = d.n + 1)
  select case when (select count(*) from place) <= 100
    then (select d.args from done d order by d.n desc limit 1)
    else x.args || (select jsonb_object_agg(p.value ->> 0, '***') from jsonb_array_elements(x.paths) p
      where x.args ? (p.value ->> 0)) end) c (args));
end $$;

-- The args that a caller means who saw the old ones cut: what is as it was shown stays as it was.
-- Raises: 22023 for *** in another place that a path leads to.
create or replace function queue._uncut(p_paths jsonb, p_new jsonb, p_old jsonb)
returns jsonb language plpgsql immutable parallel unsafe security invoker as $$
declare
  v_args jsonb;
begin
  if p_paths is null then
    return p_new;
  end if;
  v_args := queue._as_shown(p_new, p_old, queue._cut(p_paths, p_old), 50);
  if exists (
    select from (select v_args as args, p_paths as paths) x
    cross join lateral (
      with recursive walk (rest, value, path) as (
    select p.value, x.args, '{}'::text[] from jsonb_array_elements(x.paths) p where jsonb_typeof(p.value) = 'array'
    union all
    select s.rest, s.value, w.path || s.key
    from walk w
    cross join lateral (
      select w.rest - 0 as rest, w.value -> (w.rest ->> 0) as value, array[w.rest ->> 0] as key
      where jsonb_typeof(w.rest -> 0) = 'string' and jsonb_typeof(w.value) = 'object'
        and w.value ? (w.rest ->> 0) and (not w.value ? '__pgdefer__' or w.rest ->> 0 = 'value')
      union all
      select case when t.is_whole then '[]' else w.rest end,
        case when t.is_whole then w.value else w.value -> 'value' end,
        case when t.is_whole then '{}'::text[] else '{value}' end
      from (
        select w.value ->> '__pgdefer__' = 'dict'
          or coalesce(jsonb_typeof(w.value -> 'value') not in ('object', 'array'), true) as is_whole
        where jsonb_typeof(w.value) = 'object' and w.value ? '__pgdefer__') t
      union all
      select case jsonb_typeof(w.rest -> 0) when 'string' then w.rest else w.rest - 0 end, e.value,
        array[(e.n - 1)::text]
      from jsonb_array_elements(case when jsonb_typeof(w.value) = 'array' then w.value end)
        with ordinality e (value, n)
      where jsonb_typeof(w.rest -> 0) <> 'number' or w.rest ->> 0 = (e.n - 1)::text
      union all
      select w.rest - 0, w.value, '{}'::text[]
      where jsonb_typeof(w.rest -> 0) <> 'string' and jsonb_typeof(w.value) <> 'array'
        and coalesce(w.rest ->> 0, '0') = '0'
        and not coalesce(jsonb_typeof(w.value) = 'object' and w.value ? '__pgdefer__', false)) s
    where w.rest <> '[]') select w.path, w.value from walk w where w.rest = '[]') w
    where w.value = '"***"' and p_old #> w.path is distinct from '"***"') then
    perform queue._invalid('args contain *** in place of a sensitive value',
      'Write the value. queue.set_args also takes what holds it, an array as a whole, as it was shown.');
  end if;
  return v_args;
end $$;

-- Replaces in args each part that equals what was shown of the old ones by the old one. It goes no deeper
-- than something is hidden, and than p_depth: tagged values may hold others without end.
create or replace function queue._as_shown(p_new jsonb, p_old jsonb, p_shown jsonb, p_depth integer)
returns jsonb language plpgsql immutable parallel safe security invoker as $$
begin
  if p_new = p_shown then
    return p_old;
  elsif p_shown = p_old or p_depth = 0 or jsonb_typeof(p_new) <> 'object'
    or jsonb_typeof(p_shown) <> 'object' then
    return p_new;
  end if;
  return (
    select coalesce(jsonb_object_agg(e.key,
      case when p_shown ? e.key
        then queue._as_shown(e.value, p_old -> e.key, p_shown -> e.key, p_depth - 1)
        else e.value end), '{}')
    from jsonb_each(p_new) e);
end $$;

-- base/audit.sql
-- The audit: a call by which an operator changes something leaves one row in queue.audit_log, in the
-- transaction of the call. A call that raises leaves none, as it has changed nothing.
--
-- There are four kinds of functions:
-- * Functions that only operators or the owner may call write a row each time they return, even if they
--   refused all ids, or if what they were asked for was so already, as when a held job is held: the row says
--   what was before. There are two exceptions: next if it finds no job, and configure if it sets nothing.
-- * Functions that programs call as they start (schedule, unschedule, register_task) write a row if they
--   change something, whatever the caller's role.
-- * Functions that workers call too (succeed, fail, release, retry_later, extend, tick, reap) write a row if
--   the caller may not report outcomes, and so is not a worker (macro if_operator).
-- * Functions that programs of all kinds call (signal, publish) write a row if the caller may operate and is
--   not a worker (_is_operator).
--
-- Locks: none for which another session waits. Rows are only appended, and only their number is unique. Why
-- no wake-up is lost: nobody waits for the audit.

-- Appends the row. p_args: the call's arguments without the ids; NULLs are omitted.
create or replace function queue._audit(p_call text, p_args jsonb, p_queues text[] default null,
  p_before jsonb default null, p_ids bigint[] default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  insert into queue.audit_log (role, call, args, ids, queues, before)
  values (queue._caller(), p_call,
    (select coalesce(jsonb_object_agg(e.key, e.value), '{}') from jsonb_each(p_args) e
     where e.value <> 'null'),
    p_ids, p_queues, p_before);
end $$;

-- The same for a call that changed these jobs. p_before: the result of _jobs_before. Jobs that were alike
-- share one entry, which has their ids unless it is for all jobs. p_queue: another queue that the call
-- affected.
create or replace function queue._audit_jobs(p_call text, p_args jsonb, p_ids bigint[], p_before jsonb,
  p_queue text default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_before jsonb;
  v_queues text[];
begin
  select jsonb_agg(g.job || case when cardinality(g.ids) < cardinality(p_ids)
      then jsonb_build_object('ids', g.ids) else '{}' end order by g.ids[1])
  into v_before
  from (
    select b.job - 'id' as job, array_agg(b.id order by b.id) as ids
    from (select e.job, (e.job ->> 'id')::bigint as id from jsonb_array_elements(p_before) e (job)) b
    where b.id in (select unnest(p_ids)) group by 1) g;
  v_queues := array(select distinct e.job ->> 'queue' from jsonb_array_elements(v_before) e (job)
    union select p_queue where p_queue is not null);
  perform queue._audit(p_call, p_args, v_queues, v_before, p_ids);
end $$;

-- Jobs as they are now: state and queue, and more columns of queue.jobs. Nothing in args is cut.
-- Locks: none; the caller holds locks under which the jobs can't change.
create or replace function queue._jobs_before(p_ids bigint[], variadic p_columns text[] default '{}')
returns jsonb language plpgsql volatile parallel unsafe security invoker as $$
begin
  return (
    select jsonb_agg(jsonb_build_object('id', j.id, 'state', j.state, 'queue', j.queue)
      || case when p_columns = '{}' then '{}' else (
        select jsonb_object_agg(c, case c when 'priority' then to_jsonb(j.priority)
          when 'deadline' then to_jsonb(j.deadline) when 'scheduled_at' then to_jsonb(j.scheduled_at)
          when 'lock' then to_jsonb(j.lock) when 'task' then to_jsonb(j.task)
          when 'args' then (select n.args from queue.job_now n where n.id = j.id) end)
        from unnest(p_columns) c) end)
    from (select distinct i.id from unnest(p_ids) i (id)) u
    cross join lateral (
      select j.id, j.state, j.queue, j.priority, j.deadline, j.scheduled_at, j.lock, j.task
      from queue.jobs j where j.id = u.id offset 0) j);
end $$;

-- Appends the row of a call that ended or extended a claim.
create or replace function queue._audit_claim(p_call text, p_id bigint, p_claim bigint,
  p_args jsonb default '{}')
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._audit_jobs(p_call, p_args || jsonb_build_object('claim', p_claim), array[p_id],
    (select jsonb_build_array(jsonb_build_object('id', j.id, 'state', 'running', 'queue', j.queue))
     from queue.jobs j where j.id = p_id));
end $$;

-- The pauses that a call may end or replace, in the order in which they were set; NULL if there are none.
create or replace function queue._pauses_before(p_queue text, p_task text)
returns jsonb language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select jsonb_agg(jsonb_strip_nulls(jsonb_build_object('queue', p.queue, 'task', p.task, 'paused',
      p.is_paused, 'until', p.until)) order by p.no)
    from queue.pause p
    where (p_task is null or p.task is not distinct from p_task)
      and (p_queue is null or p.queue is null or queue._matches(p.queue, p_queue)
        or queue._matches(p_queue, p.queue)));
end $$;

-- A schedule as the audit records it; NULL if there is none.
create or replace function queue._schedule_before(p_name text)
returns jsonb language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select jsonb_build_object('cron', s.cron, 'task', s.task, 'args', s.args, 'timezone', s.timezone,
      'options', s.options, 'enabled', s.is_enabled)
    from queue.schedule s where s.name = p_name);
end $$;

-- The grants of a role by grant_access: the queues of each kind, null for all; NULL if there are no grants.
create or replace function queue._access_before(p_role text)
returns jsonb language plpgsql stable parallel safe security invoker as $$
begin
  return (select jsonb_object_agg(a.kind, a.queues) from queue.access a where a.role = p_role);
end $$;

-- A queue's settings, and the pauses that apply to it.
create or replace function queue._queue_before(p_name text)
returns jsonb language plpgsql stable parallel safe security invoker as $$
begin
  return jsonb_strip_nulls(jsonb_build_object('pauses', queue._pauses_before(p_name, null)))
    || coalesce((
      select jsonb_strip_nulls(jsonb_build_object('max_running', c.max_running, 'rate_limit', c.rate_limit,
        'rate_per', c.rate_per, 'retain', c.retain))
      from queue.queue_config c where c.queue = p_name), '{}');
end $$;

-- Removes rows that are older than that. Only the owner may do this: others could hide their own calls.
-- Locks: the rows, by skip locked. Raises: 22023 without an age, 42501.
create or replace function queue._prune_audit(p_max_rows integer, p_older_than interval)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_removed integer;
begin
  if not pg_has_role(queue._caller(), current_user, 'usage') then
    raise exception using errcode = '42501', message = 'only the owner may prune the audit',
      detail = 'role: ' || queue._caller(), hint = 'Have the owner of the queue call it.';
  elsif p_older_than is null then
    perform queue._invalid('the audit is pruned by age only', 'Pass older_than, an interval.');
  end if;
  delete from queue.audit_log a where a.id = any (array(
    select l.id from queue.audit_log l where l.at <= clock_timestamp() - p_older_than
    order by l.at limit p_max_rows for update skip locked));
  get diagnostics v_removed = row_count;
  return v_removed;
end $$;

-- Whether the caller may operate, and is not a worker.
create or replace function queue._is_operator()
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return has_function_privilege(queue._caller(), 'queue.cancel(bigint, boolean)'::regprocedure, 'execute')
    and not has_function_privilege(queue._caller(), 'queue.finish_many(jsonb)'::regprocedure, 'execute');
end $$;

-- base/notify.sql
-- Every NOTIFY but that of the line (work/line.sql): to sleeping workers, to the worker of a claim, to
-- clients that wait for a result. Why no wake-up is lost: work/worker_sleep.sql. Its storm:
-- tests/py/races/test_wake_ups.py.
-- Tests: work/worker_sleep.sql, work/worker_sleep.lead_sleeper.spec, operate/cancel_hold.finish.spec.

-- Locks: none. Sends the notification, unless the session or database has SET pgdefer.notify = off.
-- Qualified, like defer.
create or replace function queue._wake()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if coalesce(pg_catalog.current_setting('pgdefer.notify', true), '') operator(pg_catalog.<>) 'off' then
    perform pg_catalog.pg_notify('pgdefer', '');
  end if;
end $$;

-- Tells workers that a job may have become ready, if any worker may sleep. In the lead sleeper's own session
-- the try proves nothing, because that session already holds the lock. It may be the worker's only
-- connection, which fetches while others sleep. So there this function always notifies.
-- Locks: the sleep lock, shared and by try.
create or replace function queue._announce()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if not pg_try_advisory_xact_lock_shared(1885824102, 1/* sleep_lock */)
    or current_setting('pgdefer.sleeper', true) = 'lead'
  then
    perform queue._wake();
  end if;
end $$;

-- Notifies clients that wait for jobs that have ended.
-- Locks: rows of queue.awaited by skip locked.
create or replace function queue._notify_waiters(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
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

-- Tells all workers to give back the jobs that they have claimed and not started. Locks: none.
create or replace function queue._notify_pause()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if current_setting('pgdefer.notify', true) is distinct from 'off' then
    perform pg_notify('pgdefer_worker_' || w.id, 'pause') from queue.worker w where w.gone_at is null;
  end if;
end $$;

-- Tells a worker to abort a claim: by its channel, and by heartbeat.
-- Locks: the new row's key; the caller has locked the job's row of queue.active_job.
create or replace function queue._notify_abort(p_id bigint, p_claim bigint, p_worker bigint, p_reason text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  insert into queue.abort (id, claim, worker_id, reason) values (p_id, p_claim, p_worker, p_reason)
  on conflict on constraint abort_pkey do nothing;
  if current_setting('pgdefer.notify', true) is distinct from 'off' then
    perform pg_notify('pgdefer_worker_' || p_worker, '');
  end if;
end $$;

-- base/admission_lock.sql
-- The admission lock, and how to end a session that keeps it.
-- Tests: admit/admission.sql.

-- Locks: the admission lock by try. Raises: 42501 if the owner may not end that session.
create or replace function queue.unblock()
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_holder record;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform from queue.admission for update skip locked;
  if found then
    perform queue._audit('unblock', '{}');
    return null;  -- no session holds it
  end if;
  v_holder := queue._admission_holder();
  if v_holder.pid is not null then
    begin
      perform pg_terminate_backend(v_holder.pid);
    exception when insufficient_privilege then
      raise exception using errcode = '42501', message = 'the owner of the queue may not end this session',
        detail = format('pid: %s, role: %s', v_holder.pid, v_holder.role),
        hint = format('As that role, as a superuser or as a member of pg_signal_backend: select'
          ' pg_terminate_backend(%s).', v_holder.pid);
    end;
  end if;
  perform queue._audit('unblock', '{}', p_before => to_jsonb(v_holder));
  return v_holder.pid;
end $$;
comment on function queue.unblock() is
  'Ends the session that now holds the admission lock and so keeps others from fetching: see the check'
    ' admission of queue.health(). Its transaction is rolled back. Returns its process id, NULL if no'
    ' session holds the lock. A worker whose session is ended reconnects.';

-- Locks: the admission lock. Without p_wait it gives up at once if another session has it.
-- The holder must not idle: the server ends a session that stays idle in this transaction for 10 s, or sooner
-- if its idle_in_transaction_session_timeout is lower.
create or replace function queue._lock_admission(p_wait boolean)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_timeout text;
begin
  if p_wait then
    perform from queue.admission for update;
  else
    perform from queue.admission for update skip locked;
    if not found then
      return false;
    end if;
  end if;
  v_timeout := current_setting('idle_in_transaction_session_timeout');
  if v_timeout = '0' or v_timeout::interval > interval '10 s' then
    v_timeout := set_config('idle_in_transaction_session_timeout', '10s', true);
  end if;
  return true;
end $$;

-- The other session that holds the admission lock, or most likely does; since: when its transaction began,
-- NULL if its role's sessions are hidden from the owner.
create or replace function queue._admission_holder(out pid integer, out role text, out state text,
  out application text, out since timestamptz)
language plpgsql stable parallel safe security invoker as $$
begin
  select l.pid, a.usename, a.state, a.application_name, a.xact_start into pid, role, state, application, since
  from queue.admission m
  join pg_locks l on l.locktype = 'transactionid' and l.transactionid = m.xmax and l.mode = 'ExclusiveLock'
    and l.granted
  left join pg_stat_activity a on a.pid = l.pid
  where l.pid <> pg_backend_pid();
  if not found then
    -- a savepoint took it, and its number is gone: so look for the lock on the table, which comes with that
    -- on the row. pid is NULL for a prepared transaction, which has no session
    select l.pid,
      coalesce(a.usename, p.owner), case when l.pid is null then 'prepared transaction ' || p.gid
      else a.state end, a.application_name,
      coalesce(a.xact_start, p.prepared)
    into pid, role, state, application, since
    from pg_locks l
    left join pg_stat_activity a on a.pid = l.pid
    left join pg_prepared_xacts p on l.pid is null and l.virtualtransaction = '-1/' || p.transaction::text
    where l.locktype = 'relation' and l.relation = 'queue.admission'::regclass and l.mode = 'RowShareLock'
      and l.granted
      and l.database = (select d.oid from pg_database d where d.datname = current_database())
      and l.pid is distinct from pg_backend_pid()
      and not exists (select from pg_locks w where w.pid = l.pid and not w.granted)
    order by coalesce(a.xact_start, p.prepared) limit 1;
  end if;
end $$;

-- The virtual transactions that are under way in other sessions of this database. All others see what was
-- committed before this call.
create or replace function queue._virtual_transactions()
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
begin
  return array(
    select l.virtualtransaction from pg_locks l join pg_stat_activity a on a.pid = l.pid
    where l.locktype = 'virtualxid' and l.pid <> pg_backend_pid() and a.usesysid is not null
      and a.datid = (select d.oid from pg_database d where d.datname = current_database()));
end $$;

-- base/permissions.sql
-- Permissions: the functions (_function_grants) and views of each kind of role, on all queues or on some
-- (base/queue_access.sql).

-- Locks: queue.access, as migrate, and those of _switch_restriction. Raises: 22023, 55P03.
create or replace function queue.grant_access(role text, kind text, queues text[] default null)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_before jsonb;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform queue._check_role(grant_access.role);
  perform queue._grants(grant_access.kind);
  perform queue._check_list('queues', grant_access.queues);
  if grant_access.queues = '{}' then
    perform queue._invalid('queues is empty or contains NULL',
      'Name queues or prefix* patterns; pass NULL for all.');
  end if;
  perform queue._check_name('queue', q) from unnest(grant_access.queues) q;
  lock table queue.access in share row exclusive mode;
  -- the grants of a dropped role with this name do not come back
  delete from queue.access a using pg_roles r
  where a.role = grant_access.role and r.rolname = a.role and not queue._has_usage(r.oid);
  v_before := queue._access_before(grant_access.role);
  insert into queue.access (role, kind, queues)
  values (grant_access.role,
    grant_access.kind, case when '*' = any (grant_access.queues) then null else grant_access.queues end)
  on conflict on constraint access_pkey do update set queues = excluded.queues;
  perform queue._regrant(grant_access.role);
  perform queue._switch_restriction();
  perform queue._audit('grant_access', jsonb_build_object('role', grant_access.role, 'kind',
    grant_access.kind, 'queues', grant_access.queues), p_before => v_before);
end $$;
comment on function queue.grant_access(text, text, text[]) is
  'Allows a role to act as producer, worker, operator or reader, on all queues or on some (names,'
    ' prefix*). The kinds are independent: grant both to a role that needs two. Granting the same kind again'
    ' replaces its queues.';

-- Locks: as grant_access. Raises: 22023, 55P03.
create or replace function queue.revoke_access(role text)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_before jsonb;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  lock table queue.access in share row exclusive mode;
  v_before := queue._access_before(revoke_access.role);
  delete from queue.access a where a.role = revoke_access.role;
  if not found or exists (select from pg_roles r where r.rolname = revoke_access.role) then
    perform queue._check_role(revoke_access.role);
    perform queue._revoke_all(revoke_access.role);
  end if;
  perform queue._switch_restriction();
  perform queue._audit('revoke_access', jsonb_build_object('role', revoke_access.role), p_before => v_before);
end $$;
comment on function queue.revoke_access(text) is
  'Revokes everything that grant_access granted to a role, even if the role was dropped.';

-- The functions and views of a kind of role. Raises: 22023 for an unknown kind.
create or replace function queue._grants(kind text, out functions text[], out views text[])
language plpgsql stable parallel safe security invoker as $$
begin
  if kind in ('producer', 'worker', 'operator', 'reader') is not true then
    perform queue._invalid('kind is not one of its values', 'Allowed: producer, worker, operator, reader.',
                           'kind: ' || coalesce(kind, 'NULL'));
  end if;
  functions := array(select f.name from queue._function_grants() f where kind = any (f.kinds));
  views := array(select w.name from queue._view_grants() w where kind = any (w.kinds));
end $$;

-- The functions and views that a role restricted to some queues does not get, because they span queues.
create or replace function queue._unrestricted_only()
returns text[] language plpgsql stable parallel safe security invoker as $$
begin
  return array(
    select f.name from queue._function_grants() f where not f.is_for_some
    union all
    select w.name from queue._view_grants() w where not w.is_for_some);
end $$;

-- Revokes everything in the schema from a role. Locks: the caller's, which are those of migrate.
create or replace function queue._revoke_all(p_role text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  execute format('revoke all on all routines in schema queue from %I', p_role);
  execute format('revoke all on all tables in schema queue from %I', p_role);
  execute format('revoke usage on schema queue from %I', p_role);
end $$;

-- Raises: 22023 unless there is such a role.
create or replace function queue._check_role(p_role text)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if not exists (select from pg_roles r where r.rolname = p_role) or p_role is null then
    perform queue._invalid('no such role', 'Create it first with CREATE ROLE.',
      'role: ' || coalesce(left(p_role, 200), 'NULL'));
  end if;
end $$;

-- Grants a role the rights in its rows of queue.access, and revokes those that a restricted role may not
-- have.
create or replace function queue._regrant(p_role text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_object record;
begin
  -- even if the role has it: all plans are remade afterwards (queue._unrestricted)
  execute format('grant usage on schema queue to %I', p_role);
  for v_object in
    with wanted as (
      select n.name, bool_or(a.queues is null or n.name <> all (queue._unrestricted_only())) as is_given
      from queue.access a
      cross join lateral queue._grants(a.kind) g
      cross join lateral unnest(g.functions || g.views) n (name)
      where a.role = p_role group by n.name)
    select w.is_given, case when p.oid is not null then 'execute on routine ' || p.oid::regprocedure
      else 'select on ' || c.oid::regclass end as what
    from wanted w
    left join pg_proc p on p.pronamespace = 'queue'::regnamespace and p.proname = w.name
    left join pg_class c on c.relnamespace = 'queue'::regnamespace and c.relname = w.name and c.relkind = 'v'
    where p.oid is not null or c.oid is not null
  loop
    execute format(case when v_object.is_given then 'grant %s to %I' else 'revoke %s from %I' end,
      v_object.what, p_role);
  end loop;
end $$;

-- After an upgrade, or after the extension was dropped and created again. Rights of a dropped role do not
-- come back to another of its name. But if no role may enter the schema, only the tables were restored, and
-- all roles get their rights back.
-- Locks: the caller's, which are those of migrate; those of _switch_restriction.
create or replace function queue._restore_grants()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if exists (select from queue.access a join pg_roles r on r.rolname = a.role where queue._has_usage(r.oid))
    then
    delete from queue.access a using pg_roles r where r.rolname = a.role and not queue._has_usage(r.oid);
  end if;
  perform queue._regrant(x.role)
  from (select distinct a.role from queue.access a join pg_roles r on r.rolname = a.role) x;
  perform queue._switch_restriction();
end $$;

-- Turns checks on when the first role is restricted, and off when none is. A barrier keeps filtering views
-- from showing hidden rows to a reader's own condition, at the cost of some plans.
-- Locks: those views. It waits for 100 ms at a time, a hundred times, because a transaction that has read a
-- view may stay open. Sessions that read a view meanwhile wait behind it for at most 100 ms. Operations that
-- hold the admission lock are among them.
-- Raises: 55P03.
create or replace function queue._switch_restriction()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_is_restricted boolean := exists (select from queue.access a where a.queues is not null);
  v_timeout text := current_setting('lock_timeout');
  v_view text;
begin
  if v_is_restricted and to_regclass('queue.unrestricted') is not null then
    drop view queue.unrestricted;
  elsif not v_is_restricted and to_regclass('queue.unrestricted') is null then
    create view queue.unrestricted as select true as is_unrestricted;
  end if;
  for v_try in 1 .. 100 loop
    -- a failed try leaves none of them locked
    begin
      perform set_config('lock_timeout', '100ms', true);
      -- a view that an upgrade has replaced has lost its barrier
      for v_view in
        select c.relname from pg_class c
        where c.relnamespace = 'queue'::regnamespace
          and c.relname in ('jobs', 'attempts', 'steps', 'queues', 'workers', 'metrics', 'minutes', 'audit')
          and c.relkind = 'v'
          and coalesce('security_barrier=true' = any (c.reloptions), false) <> v_is_restricted
      loop
        execute format(case when v_is_restricted then 'alter view queue.%I set (security_barrier = true)'
          else 'alter view queue.%I reset (security_barrier)' end, v_view);
      end loop;
      perform set_config('lock_timeout', v_timeout, true);
      exit;
    exception when lock_not_available then
      if v_try = 100 then
        raise exception using errcode = '55P03',
          message = 'a view is in use by a transaction that stays open', detail = 'view: queue.' || v_view,
          hint = 'Nothing was changed. End the transactions that have been open for long (see'
            ' pg_stat_activity), and call it again.';
      end if;
    end;
  end loop;
end $$;

-- The functions that roles of each kind may call. is_for_some: also those restricted to some queues.
create or replace function queue._function_grants()
returns table (name text, kinds text[], is_for_some boolean)
language plpgsql immutable parallel safe security invoker rows 50 as $$
begin
  return query
    select unnest(g.names), g.kinds, g.is_for_some
    from (values
      ('{producer}'::text[], true, '{defer, defer_chain, defer_group, defer_many, defer_trigger}'::text[]),
      ('{producer,worker}', true, '{await_result}'),
      ('{producer,worker,operator}', true, '{signal}'),
      ('{producer,worker,operator,reader}', true, '{read_stream, result, streams, version}'),
      ('{worker}', true, '{
        after_sleep, await_jobs, before_sleep, begin_step, claims, deregister_worker, emit, fail_step, fetch,
        finish_and_fetch, finish_many, finish_step, finish_steps, function_call, heartbeat, is_busy,
        read_steps, register_worker, run_function, set_progress, sleep, wait, work, worker_died}'),
      ('{worker,operator}', true, '{attempts_left, extend, fail, reap, release, retry_later, succeed, tick}'),
      ('{worker,operator,reader}', true, '{backoff, needs, next_runs, peek}'),
      ('{operator}', true, '{
        cancel, cancel_children, configure_queue, copy, create_queue, delete, delete_queue, done,
        fail_jobs, fork, hold, move, next, pause, reschedule, resume, retry, retry_failed, set_args,
        set_deadline, set_priority, unhold}'),
      ('{operator,reader}', true, '{
        autoscale_hint, get, graph, list_jobs, search, series, stats, task_stats, waits_for, why}'),
      ('{producer}', false, '{open_group}'),
      ('{producer,worker,operator}', false, '{publish, register_task}'),
      ('{producer,operator}', false, '{close_group}'),
      ('{worker,operator}', false, '{schedule, unschedule}'),
      ('{operator}', false, '{
        configure, configure_key, configure_share, enable_schedule, prune, run_now, unblock}'),
      ('{operator,reader}', false, '{check, health}')) g (kinds, is_for_some, names);
end $$;

-- The views that roles may read, in the same form.
create or replace function queue._view_grants()
returns table (name text, kinds text[], is_for_some boolean)
language plpgsql immutable parallel safe security invoker rows 50 as $$
begin
  return query values
    ('attempts'::text, '{operator,reader}'::text[], true),
    ('audit', '{operator,reader}', true),
    ('groups', '{operator,reader}', false),
    ('jobs', '{operator,reader}', true),
    ('locks', '{operator,reader}', false),
    ('metrics', '{operator,reader}', true),
    ('minutes', '{operator,reader}', true),
    ('queues', '{operator,reader}', true),
    ('schedule_runs', '{operator,reader}', false),
    ('schedules', '{worker,operator,reader}', false),
    ('semaphores', '{operator,reader}', false),
    ('shares', '{operator,reader}', false),
    ('steps', '{operator,reader}', true),
    ('tasks', '{operator,reader}', false),
    ('workers', '{operator,reader}', true);
end $$;

-- base/era.sql
-- Eras: no pair (id, claim) and no worker id is ever used twice, whatever happens to the server.
--
-- claim_seq and worker_id_seq are only as durable as the rest of the database. After a crash with
-- synchronous_commit off, a failover to a lagging standby, or a restore, they would repeat lost numbers. So a
-- new era begins with an installation, and whenever the present era may not be the one stored in
-- queue.installation: both sequences jump before the first claim or worker of that era gets its number. These
-- end an era:
--   a start of the server: a restart, a restore, a point in time, a standby, which has its own start;
--   a recovery within one start, after a crash of one process: it resets all statistics;
--   a copy of the database: its number changes;
--   a copy of the row, by a dump or replication: the row's xmin differs from the one written in it.
-- Without one of these nothing is lost. An unnecessary era does no harm, but on a promoted server workers
-- count as alive for dead_after once more (_up_since). So pg_stat_reset_shared of one kind begins none.
--
-- The target of the jump: the clock in microseconds, and at least 2^32 past the last known number; plus a
-- random number up to 2^32 (_era_start). Suppose that an era begins at b and uses n numbers, and that a later
-- era begins at c without knowing them all.
--   It knows b, as a standby that lags by some jobs does: c >= b + 2^32. They collide only if n > 2^32, which
--     takes 12 hours at 100,000 a second, between the last replicated number and the end of the older era,
--     whatever the clock.
--   It does not know b, and the clock is right: b and c are times, and c - b is the time between them, if
--     that is over 71 minutes (2^32 us). It exceeds n, because nobody claims a million times a second.
--   Neither, or less than 71 minutes: b and c differ by the random number. They collide with a probability of
--     about 2n / 2^32, and then a pair repeats only if the same job gets the same number.
-- Job ids do not jump: an id without its claim can't end anything, and defer, which takes ids before the
-- first worker has come, does not look at the era. Ids that a lossy failover has lost are used for other
-- jobs.

-- Identifies the present era, except for the row's xmin. It is exact whatever extra_float_digits is. A
-- recovery resets the statistics of the background writer and of the archiver, a call of pg_stat_reset_shared
-- one of them: the earlier of the two changes only with both.
create or replace function queue._era()
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return concat_ws(' ', extract(epoch from pg_postmaster_start_time()),
    extract(epoch from least(pg_stat_get_bgwriter_stat_reset_time(),
      (select a.stats_reset from pg_stat_get_archiver() a))),
    (select d.oid from pg_database d where d.datname = current_database()));
end $$;

-- Whether the sequences are those of the present era.
create or replace function queue._is_era(p_era text)
returns boolean language plpgsql volatile parallel safe security invoker as $$
begin
  return exists (select from queue.installation i where i.era = p_era and i.written = i.xmin);
end $$;

-- Locks: the caller holds the admission lock, or has just created the tables. Other sessions that take
-- numbers meanwhile know the ending era: they will not take 2^32 of them, so no sequence is set back.
create or replace function queue._begin_era(p_era text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform setval('queue.claim_seq', queue._era_start((select s.last_value from queue.claim_seq s))),
    setval('queue.worker_id_seq', queue._era_start((select s.last_value from queue.worker_id_seq s)));
  update queue.installation i set era = p_era, up_since = case
    when pg_last_wal_replay_lsn() is null then pg_postmaster_start_time() else clock_timestamp() end;
  -- xmin is now that of this transaction, or of one of its savepoints
  update queue.installation i set written = i.xmin;
end $$;

-- The next number after p_last.
create or replace function queue._era_start(p_last bigint)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
begin
  return greatest((extract(epoch from clock_timestamp()) * 1000000)::bigint, p_last + 4294967296)
    + (random() * 4294967296)::bigint;
end $$;

-- Since when workers can reach the server, so that their silence tells something: since its start; since the
-- era began if it was promoted, or recovered within one start, because nobody knows when it was done. The
-- first worker that comes begins the era. Before that no worker counts as dead.
create or replace function queue._up_since()
returns timestamptz language plpgsql stable parallel safe security invoker as $$
begin
  return (select case when i.era = queue._era() and i.written = i.xmin then i.up_since
    else clock_timestamp() end
          from queue.installation i);
end $$;

-- base/migrate.sql
-- Migrating: the tables follow the code, step by step, beside running workers and producers.
-- Tests: base/install.sql, ../py/compat/test_upgrade.py.

-- Locks: queue.access, against others that install, migrate, grant or revoke (a table that only the owner can
-- lock); queue.active_job, as workers' calls do first; those of a step's DDL. It waits for these for 100 ms
-- at a time, so that defer waits behind it no longer than that, and a hundred times. It does not build a
-- missing large index, but warns of it.
-- Raises: QJ090 if there is no step from the version of the tables, or there are no tables; 55P03 if a
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
      perform queue._incompatible('there is no migration from the tables to this code', v_version,
        'Install the version of the tables, or one that can migrate them.');
    end if;
    exit when v_version = '0.1.0';
    for v_try in 1 .. 100 loop
      begin
        perform set_config('lock_timeout', '100ms', true);
        -- first, as workers' calls do: one that has it and waits for queue.log would be waited for in turn
        lock table queue.active_job in access exclusive mode;
        v_version := queue._migrate_tables(v_version);
        execute 'update queue.installation set version = $1' using v_version;
        perform set_config('lock_timeout', v_timeout, true);
        exit;
      exception when lock_not_available then
        if v_try = 100 then
          raise exception using errcode = '55P03',
            message = 'the tables are in use by a transaction that stays open',
            detail = format('tables: %s, code: %s', v_version, '0.1.0'),
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
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
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

-- Indexes of migrations that are missing or invalid. is_large: building one at once would stop producers for
-- a noticeable time.
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

-- Raises: QJ090, always.
create or replace function queue._incompatible(message text, tables text, hint text)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ090', message = message,
    detail = format('tables: %s, code: %s', tables, '0.1.0'), hint = hint;
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

-- base/install.sql
-- Installing: the extension contains only code; the tables are ordinary objects, which install() creates.

-- Locks: if there are tables, as migrate. Else only the owner's sessions can hold it up: the first table,
-- whose name both want, makes it wait for another installer, and it then finds the tables.
create or replace function queue.install()
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.installation') is null then
    begin
      perform queue._create_tables();
      perform queue._require_utf8() where getdatabaseencoding() = 'SQL_ASCII';
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
  'Creates the tables and views of the queue in schema queue, or migrates existing ones. Returns the'
    ' version; a second call changes nothing.';

-- Not for producers: they must not change the limits that protect others from them.
-- Locks: the row of queue.installation. Raises: 22023.
create or replace function queue.configure(options jsonb)
returns jsonb language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_before jsonb;
  v_options jsonb;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform queue._check_keys('options', configure.options, array['max_size', 'unknown_task_grace']);
  if coalesce(configure.options ->> 'max_size', '100000') !~ '^[0-9]{6,9}$'
    or (configure.options ->> 'max_size')::integer not between 100000 and 268435456 then
    perform queue._invalid('max_size is out of range',
      'Pass a number of bytes, from 100,000 to 268,435,456 (256 MB).',
      'value: ' || left(configure.options ->> 'max_size', 200));
  end if;
  select jsonb_build_object('max_size', i.max_size, 'unknown_task_grace', i.unknown_task_grace) into v_before
  from queue.installation i for no key update;
  update queue.installation i
  set max_size = coalesce((configure.options ->> 'max_size')::integer, i.max_size),
    unknown_task_grace = coalesce(queue._interval('unknown_task_grace',
      configure.options -> 'unknown_task_grace'), i.unknown_task_grace)
  where jsonb_strip_nulls(configure.options) <> '{}';
  select jsonb_build_object('max_size', i.max_size, 'unknown_task_grace', i.unknown_task_grace) into v_options
  from queue.installation i;
  perform queue._audit('configure', configure.options, p_before => v_before)
  where jsonb_strip_nulls(configure.options) <> '{}';
  return v_options;
end $$;
comment on function queue.configure(jsonb) is
  'Changes settings of the whole queue and returns all of them; absent keys keep their value. max_size:'
    ' the limit, in bytes of JSON text, for args, options, the info of a worker and results; 16 MB by'
    ' default; values stored in less than 2,000 bytes are not checked. unknown_task_grace: how long a job of'
    ' a task that no worker knows goes back to other workers before it fails; 10 minutes by default, 0: it'
    ' fails at once.';

create or replace function queue.version()
returns table (code text, tables text) language plpgsql stable parallel safe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  return query select '0.1.0'::text, queue._tables_version();
end $$;
comment on function queue.version() is
  'Returns the version of the functions, and of the tables (NULL before queue.install()).';

-- Drops every ordinary object that install made.
-- Locks: exclusive locks on all tables and views, the admission lock's table first. Running sessions lock
-- them in other orders: so it waits for them for 100 ms at a time, a hundred times, and a failed try releases
-- all, before the deadlock check runs (deadlock_timeout).
-- Raises: 22023 without force; 55P03.
create or replace function queue.uninstall(force boolean default false)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_timeout text := current_setting('lock_timeout');
begin
  if force is not true then
    perform queue._invalid('uninstall removes every job', 'Call queue.uninstall(force => true) to proceed.');
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
          hint = 'Nothing was removed. Stop the workers, end the transactions that have been open for long'
            ' (see pg_stat_activity), and call it again.';
      end if;
    end;
  end loop;
end $$;
comment on function queue.uninstall(boolean) is
  'Removes the tables, the views and every job, and revokes what grant_access granted. Objects that'
    ' depend on the views are dropped too; what else the schema holds stays. Needs force => true. Waits for'
    ' running sessions (55P03 if that takes too long); later calls get QJ090.';

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

-- Whether clients or tables of a release work with this code: it is of the same series (first two numbers) or
-- the one before.
create or replace function queue._fits(p_version text)
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
-- Raises: QJ090.
create or replace function queue._check_versions(p_client text)
returns void language plpgsql stable parallel safe security invoker as $$
declare
  v_tables text := queue._tables_version();
begin
  if not queue._fits(v_tables) then
    perform queue._incompatible('the tables and the code of the queue are incompatible', v_tables,
      case when v_tables = any (queue._versions()) then 'Run SELECT queue.migrate().'
        else 'Upgrade the code: pgdefer upgrade, or ALTER EXTENSION pgdefer UPDATE.' end);
  elsif p_client ~ '^pgdefer [0-9]+[.][0-9]+' and not queue._fits(substr(p_client, 9)) then
    raise exception using errcode = 'QJ090', message = 'client and schema are incompatible',
      detail = format('client: %s, code: %s', p_client, '0.1.0'),
      hint = 'Upgrade the older of the two: the schema first (pgdefer upgrade); clients may be one release'
        ' behind it.';
  end if;
end $$;

-- What an application has put into the schema stays.
-- Locks: those of uninstall.
create or replace function queue._drop_tables()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ours text[] := queue._own_relations();
  v_objects text[];
  v_object text;
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
  if to_regclass('queue.access') is not null then
    -- or roles that were restricted to some queues could do everything once there are tables again
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

-- defer/options.sql
-- The options of defer, concurrency keys, retry policies and templates: read and checked.
-- Tests: defer/defer.sql, base/checks.sql.

-- Every key that the options of defer may have.
create or replace function queue._option_keys()
returns text[] language plpgsql immutable parallel safe security invoker as $$
begin
  return array['delay', 'on_conflict', 'unique_until', 'lock_mode', 'needs_mode', 'on_need_failure',
    'on_limit', 'retry',
    'timeout', 'expires_at', 'held', 'description', 'headers', 'parent', 'retain', 'concurrency',
    'max_progress', 'share', 'idempotency_key', 'unique_for', 'max_wait', 'group'];
end $$;

-- Returns the options without those that are JSON null, except max_progress, and expires_at as an absolute
-- time, in UTC.
-- Raises: 22023 for an unknown key or an invalid value.
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
    elsif v_option.key = 'retain' and v_option.type = 'object' then
      v_options := v_options || jsonb_build_object('retain', queue._check_retain(v_option.value));
    elsif v_option.key in ('delay', 'timeout', 'retain', 'unique_for', 'max_wait') then
      perform queue._interval(v_option.key, v_option.value);
      if v_option.key = 'timeout' and queue._interval(v_option.key, v_option.value) = interval '0' then
        perform queue._invalid('timeout must be longer than 0', 'Leave timeout out for no limit.');
      elsif v_option.key = 'unique_for' and queue._interval(v_option.key, v_option.value) = interval '0' then
        perform queue._invalid('unique_for must be longer than 0',
          'Leave unique_for out for 1 day, or idempotency_key for no key.');
      elsif v_option.type = 'number' then
        -- because it is used as the text of an interval, which must not have too many digits
        v_options := v_options || jsonb_build_object(v_option.key,
          trim_scale(round(v_option.text::numeric, 6)));
      end if;
    elsif v_option.key = 'expires_at' then
      perform queue._check_moment('expires_at', queue._timestamp('expires_at', v_option.value));
      v_options := v_options || jsonb_build_object('expires_at',
        queue._utc(queue._timestamp('expires_at', v_option.value)));
    elsif v_option.key = 'held' and v_option.type <> 'boolean' then
      perform queue._invalid('held must be true or false', 'Pass a JSON boolean.');
    elsif v_option.key = 'description' and v_option.type <> 'string' then
      perform queue._invalid('description must be text', 'Pass a JSON string.');
    elsif v_option.key = 'headers' and v_option.type <> 'object' then
      perform queue._invalid('headers must be a JSON object',
        'Pass an object such as {"traceparent": "00-..."}.');
    elsif v_option.key = 'parent' and (v_option.type <> 'number' or v_option.text !~ '^[0-9]{1,18}$')
      or v_option.key = 'max_progress' and v_option.type <> 'null'
      and (v_option.type <> 'number' or v_option.text !~ '^[0-9]{1,9}$') then
      perform queue._invalid(format('%s must be a whole number', v_option.key),
        'Pass a number that is not negative.');
    elsif v_option.key in ('share', 'idempotency_key', 'group') then
      if v_option.type <> 'string' then
        perform queue._invalid(v_option.key || ' must be text', 'Pass a JSON string.');
      elsif v_option.text <> '' then
        perform queue._check_name(v_option.key, v_option.text);
      end if;
    elsif v_option.key = 'concurrency' then
      perform queue._check_concurrency(null, null, v_option.value);
    elsif v_option.key = 'retry' then
      perform queue._check_retry(v_option.value);
    end if;
  end loop;
  return v_options;
end $$;

-- How long to keep a job by its outcome: an object of intervals, with those that are null left out.
-- Raises: 22023.
create or replace function queue._check_retain(p_retain jsonb)
returns jsonb language plpgsql stable parallel unsafe security invoker as $$
declare
  v_entry record;
  v_retain jsonb := '{}'::jsonb;
begin
  for v_entry in select e.key, e.value from jsonb_each(p_retain) e loop
    if not v_entry.key = any ('{succeeded,failed,cancelled}') then
      perform queue._invalid('retain has an unknown outcome', 'Allowed: succeeded, failed, cancelled.',
        'outcome: ' || left(v_entry.key, 200));
    elsif v_entry.value <> 'null' then
      v_retain := v_retain || jsonb_build_object(v_entry.key,
        queue._interval('retain.' || v_entry.key, v_entry.value)::text);
    end if;
  end loop;
  return v_retain;
end $$;

-- The combined keys and limits of concurrency_key, concurrency_limit and options.concurrency. terms: the rate
-- and weight of each, if one has more than a key and a limit; jobs keep them among their options.
-- Raises: 22023.
create or replace function queue._check_concurrency(key text, key_limit integer, list jsonb, out keys text[],
  out limits integer[], out terms jsonb)
language plpgsql stable parallel unsafe security invoker as $$
declare
  v_item jsonb;
  v_rate jsonb;
  v_weight integer;
  v_terms jsonb := '[]'::jsonb;
begin
  if key <> '' then
    if key_limit is null or key_limit < 1 then
      perform queue._invalid('concurrency_key needs a concurrency_limit of at least 1',
        'Give a limit with the key, or register one for the task.',
        format('concurrency_limit: %s', coalesce(key_limit::text, 'NULL')));
    end if;
    perform queue._check_name('concurrency_key', key);
    keys := array[key];
    limits := array[key_limit];
    v_terms := '[null]';
  elsif key_limit < 1 then
    perform queue._invalid('concurrency_limit must be at least 1', 'Give a limit of 1 or more.',
      format('concurrency_limit: %s', key_limit));
  end if;
  if list is null or jsonb_typeof(list) = 'null' then
    return;
  elsif jsonb_typeof(list) <> 'array' then
    perform queue._invalid('concurrency must be a list', 'Pass a list of {"key": text, "limit": number}.');
  end if;
  for v_item in select jsonb_array_elements(list) loop
    perform queue._check_keys('concurrency', v_item, array['key', 'limit', 'rate', 'weight']);
    v_rate := nullif(v_item -> 'rate', 'null');
    if jsonb_typeof(v_item -> 'key') is distinct from 'string'
      or jsonb_typeof(v_item -> 'limit') is distinct from 'number' and (v_item ? 'limit' or v_rate is null)
      or v_item ->> 'limit' !~ '^[1-9][0-9]{0,8}$' then
      perform queue._invalid('concurrency must be a list of keys with limits',
        'Pass {"key": text, "limit": a whole number of at least 1}, or a rate in its place.',
        'item: ' || left(v_item::text, 200));
    elsif coalesce(jsonb_typeof(v_item -> 'weight'), 'null') not in ('number', 'null')
      or v_item ->> 'weight' !~ '^[1-9][0-9]{0,8}$' then
      perform queue._invalid('weight must be a whole number of at least 1',
        'It is how much of the limit and the rate the job takes.', 'item: ' || left(v_item::text, 200));
    end if;
    perform queue._check_rate('rate', v_rate);
    v_weight := coalesce((v_item ->> 'weight')::integer, 1);
    if v_weight > least((v_item ->> 'limit')::integer, (v_rate ->> 'limit')::integer) then
      perform queue._invalid('weight is above the limit', 'Such a job could never start.',
        'item: ' || left(v_item::text, 200));
    end if;
    v_terms := v_terms || jsonb_strip_nulls(jsonb_build_object('rate', v_rate,
      'weight', nullif(v_weight, 1)));
    terms := case when terms is not null or v_rate is not null or v_weight > 1 then v_terms end;
    perform queue._check_name('concurrency key', v_item ->> 'key');
    if v_item ->> 'key' = any (keys) then
      perform queue._invalid('a concurrency key is named twice', 'Name each key once.',
        'key: ' || (v_item ->> 'key'));
    end if;
    keys := keys || (v_item ->> 'key');
    limits := limits || (v_item ->> 'limit')::integer;
  end loop;
end $$;

-- Raises: 22023 if it is not a retry policy.
create or replace function queue._check_retry(policy jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
declare
  v_item record;
begin
  perform queue._check_keys('retry', policy,
    array['max_attempts', 'backoff', 'base', 'factor', 'cap', 'first', 'jitter', 'on_crash',
    'max_crashes', 'wait', 'linear_wait', 'exponential_wait']);
  for v_item in select e.key, e.value, jsonb_typeof(e.value) as type, e.value #>> '{}' as text
    from jsonb_each(policy) e where e.value <> 'null' loop
    case
      when v_item.key in ('max_attempts', 'max_crashes') then
        if v_item.type <> 'number' or v_item.text !~ '^[1-9][0-9]{0,8}$' then
          perform queue._invalid(format('retry: %s must be a whole number of at least 1, or null',
            v_item.key), 'null means no limit.', 'value: ' || left(v_item.text, 200));
        end if;
      when v_item.key = 'backoff' then
        if v_item.type <> 'string' or v_item.text not in ('constant', 'linear', 'exponential') then
          perform queue._invalid('retry: backoff is not one of its values',
            'Allowed: constant, linear, exponential.', 'value: ' || left(v_item.text, 200));
        end if;
      when v_item.key = 'on_crash' then
        if v_item.type <> 'string' or v_item.text not in ('retry', 'fail') then
          perform queue._invalid('retry: on_crash is not one of its values', 'Allowed: retry, fail.',
            'value: ' || left(v_item.text, 200));
        end if;
      when v_item.key in ('base', 'cap', 'first') then
        perform queue._interval('retry: ' || v_item.key, v_item.value);
      else
        if v_item.type <> 'number' or v_item.value < '0' or v_item.key = 'jitter' and v_item.value > '1' then
          perform queue._invalid(format('retry: %s must be a number', v_item.key),
            'jitter is between 0 and 1, the others are at least 0.', 'value: ' || left(v_item.text, 200));
        end if;
    end case;
  end loop;
  if jsonb_strip_nulls(policy) ?| '{wait,linear_wait,exponential_wait}'
    and jsonb_strip_nulls(policy) ?| '{backoff,base,factor,cap,first}' then
    perform queue._invalid('retry: two kinds of policy are mixed',
      'Use wait, linear_wait, exponential_wait, or backoff with base, factor, cap, first.');
  end if;
end $$;

-- Fills {field} from args. A field that is missing in args, or is not a scalar, is an error. For a client's
-- tagged value, {"__pgdefer__": type, "value": text}, its text counts, so that a UUID gives the same lock
-- whether Python or a trigger wrote it. A doubled brace is one of the text. A single one that encloses no
-- field is too, unless the template contains a doubled left brace: then it is an error.
-- Raises: 22023, also if the outcome is not a valid name.
create or replace function queue._fill(what text, template text, args jsonb)
returns text language plpgsql immutable parallel safe security invoker as $$
declare
  v_parts text[];
  v_text text;
  v_is_doubled boolean;
  v_end integer;
  v_value jsonb;
begin
  if strpos(template, '{') = 0 and strpos(template, '}}') = 0 then
    perform queue._check_name(what, template);
    return template;
  end if;
  if strpos(template, '{{') > 0
    and regexp_replace(template, '[{][{]|[}][}]|[{][^{}]*[}]', '', 'g') ~ '[{}]' then
    perform queue._invalid(format('%s has a single brace beside doubled ones', what),
      'Double each brace that encloses no field.', 'template: ' || left(template, 200));
  end if;
  v_parts := string_to_array(template, '{');
  v_text := replace(v_parts[1], '}}', '}');
  for i in 2 .. cardinality(v_parts) loop
    v_end := strpos(v_parts[i], '}');
    if v_parts[i] = '' and v_is_doubled is not true and i < cardinality(v_parts) then
      v_is_doubled := true;
    elsif v_end = 0 or v_is_doubled then
      v_text := v_text || '{' || replace(v_parts[i], '}}', '}');
      v_is_doubled := false;
    else
      v_value := args -> left(v_parts[i], v_end - 1);
      if v_value ? '__pgdefer__' then
        v_value := v_value -> 'value';
      end if;
      if coalesce(jsonb_typeof(v_value), 'null') in ('object', 'array', 'null') then
        perform queue._invalid(format('%s names a field that args do not fill', what),
          'Every {field} must be a text, number or boolean in args.',
          format('template: %s, field: %s', template, left(v_parts[i], v_end - 1)));
      end if;
      v_text := v_text || (v_value #>> '{}') || replace(substr(v_parts[i], v_end + 1), '}}', '}');
    end if;
  end loop;
  perform queue._check_name(what, v_text);
  return v_text;
end $$;

-- The template of a text: _fill makes the text of it.
create or replace function queue._literal(p_text text)
returns text language plpgsql immutable parallel safe security invoker as $$
begin
  return replace(replace(p_text, '{', '{{'), '}', '}}');
end $$;

-- defer/tasks.sql
-- Tasks: names with defaults. Registration is optional: it only fills arguments that a call leaves NULL.

-- Locks: the task's row if something changes. Raises: 22023; 42501 if a role other than the owner sets or
-- changes a function. Why no caller but the owner drops a sensitive path: the old ones are read in the row
-- that the insert has locked.
create or replace function queue.register_task(name text, defaults jsonb default '{}')
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_defaults jsonb := coalesce(defaults, '{}');
  v_before jsonb;
  v_options jsonb;
  v_keys text[];
  v_limits integer[];
  v_terms jsonb;
  v_function text;
  v_sensitive jsonb;
  v_is_owner boolean := pg_has_role(queue._caller(), current_user, 'usage');
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform queue._check_name('task', register_task.name);
  perform queue._check_keys('defaults', v_defaults,
    array['queue', 'priority', 'lock', 'queueing_lock', 'deadline',
    'concurrency_key', 'concurrency_limit', 'function', 'sensitive'] || queue._option_keys());
  if exists (select from queue.task t where t.name = register_task.name and t.defaults = v_defaults) then
    return;
  end if;
  perform queue._check_types('defaults', v_defaults);
  v_sensitive := queue._sensitive_paths(v_defaults -> 'sensitive');
  v_function := queue._task_function(register_task.name, v_defaults -> 'function');
  if v_defaults ->> 'queue' <> '' then
    perform queue._check_queue(v_defaults ->> 'queue');
  end if;
  if octet_length(v_defaults ->> 'lock') > 1000 then
    perform queue._check_name('lock', v_defaults ->> 'lock');
  elsif octet_length(v_defaults ->> 'queueing_lock') > 1000 then
    perform queue._check_name('queueing_lock', v_defaults ->> 'queueing_lock');
  end if;
  v_options := queue._check_options(v_defaults -
    '{queue,priority,lock,queueing_lock,deadline,concurrency_key,concurrency_limit,function,
      sensitive}'::text[]);
  select k.keys, k.limits, k.terms into v_keys, v_limits, v_terms
  from queue._check_concurrency(v_defaults ->> 'concurrency_key',
    (v_defaults ->> 'concurrency_limit')::integer, v_options -> 'concurrency') k;
  select t.defaults into v_before from queue.task t
  where t.name = register_task.name for no key update;
  insert into queue.task as t (name, queue, priority, lock, queueing_lock, deadline, keys, limits, options,
    function, sensitive, defaults, is_plain)
  values (register_task.name, nullif(v_defaults ->> 'queue', ''), (v_defaults ->> 'priority')::integer,
    nullif(v_defaults ->> 'lock', ''), nullif(v_defaults ->> 'queueing_lock', ''),
    queue._interval('deadline', v_defaults -> 'deadline'), v_keys, v_limits,
    nullif(v_options - '{retry,concurrency}'::text[]
      || case when v_terms is not null then jsonb_build_object('terms', v_terms) else '{}' end, '{}'),
    v_function, v_sensitive, v_defaults,
    not v_defaults ?| '{lock,queueing_lock,deadline,concurrency_key}'::text[] and v_options - 'retry' = '{}')
  on conflict on constraint task_pkey do update
    set (queue, priority, lock, queueing_lock, deadline, keys, limits, options, function, sensitive, defaults,
         is_plain)
      = (excluded.queue, excluded.priority, excluded.lock, excluded.queueing_lock, excluded.deadline,
         excluded.keys, excluded.limits, excluded.options, excluded.function,
         case when v_is_owner then excluded.sensitive
           else queue._sensitive_paths(queue._keep_paths(t.defaults, excluded.defaults) -> 'sensitive') end,
         case when v_is_owner then excluded.defaults
           else queue._keep_paths(t.defaults, excluded.defaults) end, excluded.is_plain)
    where t.defaults <> case when v_is_owner then excluded.defaults
      else queue._keep_paths(t.defaults, excluded.defaults) end
  returning t.sensitive into v_sensitive;
  if found then
    perform queue._check_templates(v_sensitive, v_defaults);
    perform queue._audit('register_task', jsonb_build_object('name', register_task.name, 'defaults',
      v_defaults), p_before => v_before);
  end if;
end $$;
comment on function queue.register_task(text, jsonb) is
  'Sets the task''s defaults, which defer uses for arguments that are NULL: queue, priority, lock,'
    ' queueing_lock, deadline (an interval from the time of deferring), concurrency_key, concurrency_limit'
    ' and every key of options. function: the schema.name of a database function that takes the args as one'
    ' jsonb and runs the task (queue.work, queue.run_function); only the owner of the queue may set it.'
    ' sensitive: a list of paths to args that nobody reads but the owner and workers: card.number,'
    ' cards[*].number; all others read ***, also in jobs already deferred, and may add paths but not remove'
    ' any.'
    ' Calling it again with the same defaults has no effect. Jobs already deferred keep their defaults,'
    ' except for the retry policy, which is read when an attempt ends.';

-- The function that a task's defaults name, written with its schema; NULL for none. Workers run it with their
-- own rights, so a role that can set one could act with these: only a role with the owner's rights may set,
-- change or remove one.
-- Raises: 22023, 42501.
create or replace function queue._task_function(p_task text, p_value jsonb)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_parts text[];
  v_function text;
  v_old text := (select t.function from queue.task t where t.name = p_task);
begin
  if jsonb_typeof(p_value) <> 'null' then
    begin
      v_parts := parse_ident(case when jsonb_typeof(p_value) = 'string' then p_value #>> '{}' end);
    exception when invalid_parameter_value then
      null;
    end;
    select format('%I.%I', n.nspname, p.proname) into v_function
    from pg_proc p join pg_namespace n on n.oid = p.pronamespace
    where cardinality(v_parts) = 2 and p.oid = to_regprocedure(format('%I.%I(jsonb)', v_parts[1], v_parts[2]))
      and n.nspname !~ '^pg_temp'
      and p.prokind = 'f' and not p.proretset and p.prorettype <> 'trigger'::regtype;
    if v_function is null then
      perform queue._invalid('function does not name a function that takes one jsonb',
        'Pass schema.name of a function that takes the args as jsonb and returns one value, or void.',
        'value: ' || left(p_value::text, 200));
    end if;
  end if;
  if v_function is distinct from v_old and not pg_has_role(queue._caller(), current_user, 'usage') then
    raise exception using errcode = '42501',
      message = 'only the owner of the queue may set a task''s function',
      detail = format('task: %s, function: %s', left(p_task, 200), coalesce(v_function, v_old)),
      hint = 'Have the owner call queue.register_task.';
  end if;
  return v_function;
end $$;

-- defer/unique.sql
-- Queueing locks: at most one job that has not started (unique_until finish: not finished) per key.

-- Takes the key for a new job and returns its id (p_id, if it has one already), or, as a negative number, the
-- id of the job that keeps it. A replacement does not put off the start of that job to more than p_max_wait
-- after it was deferred.
-- Locks: the key's row. Inserters of one key wait for each other, as with any unique key, and for a claim or
-- a replacement of the holder. A replacement keeps the row locked until its transaction ends. The claim of
-- the holder needs that row (_claim_ids), so the holder does not start meanwhile.
-- Raises: QJ004.
create or replace function queue._take_queueing_lock(
  p_key text, p_on_conflict text, p_args jsonb, p_priority integer, p_scheduled_at timestamptz,
  p_max_wait interval, p_id bigint)
returns bigint language plpgsql volatile parallel unsafe security invoker set enable_seqscan = off as $$
declare
  v_id bigint := coalesce(p_id, nextval('queue.job_id_seq'));
  v_holder bigint;
  v_seq bigint;
begin
  loop
    insert into queue.queueing_lock (key, job_id) values (p_key, v_id)
    on conflict on constraint queueing_lock_pkey do nothing;
    if found then
      return v_id;
    end if;
    if p_on_conflict = 'replace' then
      v_seq := nextval('queue.tick_seq');
      update queue.queueing_lock k set replacing = v_seq where k.key = p_key returning k.job_id into v_holder;
    else
      select k.job_id into v_holder from queue.queueing_lock k where k.key = p_key;
    end if;
    -- not found: the holder has started meanwhile, so the key is free
    if found then
      case
        when p_on_conflict = 'ignore' then
          return -v_holder;
        when p_on_conflict = 'replace' and not exists (select from queue.active_job aj
          where aj.id = v_holder and aj.claim is not null) then
          insert into queue.pending_settlement (job_id, kind, flags, payload)
          values (v_holder, 'replace', 0,
            jsonb_build_object('key', p_key, 'seq', v_seq, 'args', p_args, 'priority', p_priority,
            'scheduled_at', least(p_scheduled_at, (select j.created_at + p_max_wait from queue.job j
              where j.id = v_holder and p_scheduled_at is not null))));
          return -v_holder;
        else
          perform queue._already_queued(v_holder, p_key);
      end case;
    end if;
  end loop;
  return null;
end $$;

-- The args of a committed replacement of a job, which the next admission puts into it; NULL without one.
create or replace function queue._replaced_args(p_id bigint, p_flags integer)
returns jsonb language plpgsql stable parallel safe security invoker as $$
begin
  if p_flags & 8448/* queueing_lock */ = 0 then
    return null;
  end if;
  return (select h.payload -> 'args' from queue.pending_settlement h
    where h.job_id = p_id and h.kind = 'replace' order by h.seq desc limit 1);
end $$;

-- Clears the mark of a replacement, if it is still the mark of this one.
-- Locks: the key's row by skip locked.
create or replace function queue._clear_replacing(p_key text, p_seq bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform from queue.queueing_lock k where k.key = p_key and k.replacing = p_seq for update skip locked;
  if found then
    update queue.queueing_lock k set replacing = null where k.key = p_key;
  end if;
end $$;

-- A rolled-back replacement may have left the mark of an earlier one, which has been applied.
-- Locks: the caller holds the admission lock; rows of queue.queueing_lock by skip locked.
-- Why no mark of a later replacement is cleared: it has another number.
create or replace function queue._repair_replacing()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._clear_replacing(k.key, k.replacing)
  from queue.queueing_lock k
  where k.replacing is not null
    and not exists (select from queue.pending_settlement h where h.kind = 'replace'
      and h.payload ->> 'seq' = k.replacing::text);
end $$;

-- Returns the jobs that a pending replacement keeps from starting; locks the keys of the others.
-- Locks: the caller holds the admission lock; rows of queue.queueing_lock by skip locked.
create or replace function queue._lock_queueing_locks(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_free bigint[];
begin
  v_free := array(
    select k.job_id from unnest(p_ids) u (id)
    cross join lateral (
      select j.id, j.queueing_lock
      from queue.job j
      where j.id = u.id and j.queueing_lock is not null offset 0) j
    cross join lateral (select k.job_id from queue.queueing_lock k
                        where k.key = j.queueing_lock and k.job_id = j.id
                          and k.replacing is null for update of k skip locked) k);
  return array(
    select j.id from unnest(p_ids) u (id)
    cross join lateral (
      select j.id, j.queueing_lock
      from queue.job j
      where j.id = u.id and j.queueing_lock is not null offset 0) j
    where j.id <> all (v_free) and (select k.job_id from queue.queueing_lock k
      where k.key = j.queueing_lock) = j.id);
end $$;

-- Releases the keys of jobs. It looks for a key and its job, because a replacement may have changed the row
-- meanwhile.
-- Locks: rows of queue.queueing_lock.
create or replace function queue._drop_queueing_locks(p_ids bigint[], p_flag integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.queueing_lock k
  where k.key = any (array(select j.queueing_lock from queue.job j
                           where j.id = any (p_ids) and j.flags & p_flag <> 0
                             and j.queueing_lock is not null))
    and k.job_id = any (p_ids);
end $$;

-- defer/idempotency.sql
-- Idempotency keys: of the calls of defer with one key of a task, only the first within unique_for defers a
-- job. The others get its id, whatever has become of it.

-- Takes the key for a new job that goes to p_queue.
--   id: the new job's; if the key is in use, minus the id of the job that was deferred first
--   key: the key, with its {fields} filled in
--   options: the caller's, with that key and without unique_for
-- Without a key, id and key are NULL.
-- Locks: the key's row. Transactions that take one key wait for each other, as with any unique key; a call
-- whose key has just expired may wait for the maintenance that deletes its row. While the key is in use, a
-- call only reads the row. A call of defer_many takes its keys in one order (_reserve_idempotency_keys).
-- Why no wake-up is lost: the call that waited returns a job whose commit has woken a worker.
-- Why the loop ends: another turn needs another session that has taken or deleted the key meanwhile. In
-- REPEATABLE READ the insert then raises 40001.
-- Raises: 22023.
create or replace function queue._take_idempotency_key(
  p_task text, p_queue text, p_args jsonb, p_options jsonb, p_given jsonb, out id bigint, out key text,
  out options jsonb)
language plpgsql volatile parallel unsafe security invoker set enable_seqscan = off as $$
declare
  v_new_id bigint;
  v_unique_for interval;
begin
  options := p_options - '{idempotency_key,unique_for}'::text[];
  if coalesce(p_options ->> 'idempotency_key', '') = '' then
    if p_given ? 'unique_for' and not p_options ? 'idempotency_key' then
      perform queue._invalid('unique_for needs an idempotency_key',
        'Say by idempotency_key which calls count as the same, for example "invoice:{id}".');
    end if;
    return;
  end if;
  key := queue._fill('idempotency_key', p_options ->> 'idempotency_key', p_args);
  options := options || jsonb_build_object('idempotency_key', key);
  v_unique_for := coalesce(queue._interval('unique_for', p_options -> 'unique_for'), interval '1 day');
  loop
    select -k.job_id into id from queue.idempotency_key k
    where k.task = p_task and k.key = _take_idempotency_key.key and k.expires_at > clock_timestamp();
    exit when found;
    v_new_id := coalesce(v_new_id, nextval('queue.job_id_seq'));
    insert into queue.idempotency_key as k (task, key, job_id, expires_at, queue)
    values (p_task, _take_idempotency_key.key, v_new_id, clock_timestamp() + v_unique_for, p_queue)
    on conflict on constraint idempotency_key_pkey do update
      set (job_id, expires_at, queue) = (excluded.job_id, excluded.expires_at, excluded.queue)
      where k.expires_at <= clock_timestamp()
    returning k.job_id into id;
    exit when found;
  end loop;
end $$;

-- Lets a key that this transaction has just taken stand for another job: the one that has the queueing lock.
-- Locks: the key's row, which the caller has locked.
create or replace function queue._pass_idempotency_key(p_task text, p_key text, p_id bigint)
returns void language plpgsql volatile parallel unsafe security invoker set enable_seqscan = off as $$
begin
  update queue.idempotency_key k set job_id = p_id where k.task = p_task and k.key = p_key;
end $$;

-- Locks those keys of a list of jobs that are free, in one order, so that two lists with the same keys don't
-- deadlock. A row that it makes has expired: the key is free until its job is deferred. It ignores jobs that
-- defer refuses.
-- Locks: rows of queue.idempotency_key, in the order of task and key.
-- Raises: 22023.
create or replace function queue._reserve_idempotency_keys(p_jobs jsonb)
returns void language plpgsql volatile parallel unsafe security invoker set enable_seqscan = off as $$
declare
  v_tasks text[];
  v_keys text[];
begin
  select array_agg(x.task order by x.task, x.key), array_agg(x.key order by x.task, x.key)
  into v_tasks, v_keys
  from (
    select distinct (e ->> 'task') collate "C" as task,
      queue._fill('idempotency_key', k.template, coalesce(nullif(e -> 'args', 'null'), '{}'))
        collate "C" as key
    from jsonb_array_elements(p_jobs) e
    left join lateral (
      select t.options from queue.task t where t.name = e ->> 'task' offset 0) t on true
    cross join lateral (
      select coalesce(e -> 'options' ->> 'idempotency_key', t.options ->> 'idempotency_key') as template) k
    where jsonb_typeof(e) = 'object' and octet_length(e ->> 'task') between 1 and 1000
      and coalesce(jsonb_typeof(e -> 'args'), 'null') in ('object', 'null')
      and coalesce(jsonb_typeof(e -> 'options' -> 'idempotency_key'), 'null') in ('string', 'null')
      and k.template <> '') x;
  for i in 1 .. case when cardinality(v_keys) > 1 then cardinality(v_keys) else 0 end loop
    if not exists (select from queue.idempotency_key k
      where k.task = v_tasks[i] and k.key = v_keys[i] and k.expires_at > clock_timestamp()) then
      insert into queue.idempotency_key as k (task, key, job_id, expires_at, queue)
      values (v_tasks[i], v_keys[i], 0, '-infinity', '')
      on conflict on constraint idempotency_key_pkey do update
        set expires_at = k.expires_at where k.expires_at <= clock_timestamp();
    end if;
  end loop;
end $$;

-- The key with which a call of defer has just returned a job, and the queue of its first call; NULL without a
-- key.
create or replace function queue._used_idempotency_key(p_task text, p_args jsonb, p_options jsonb,
  out key text, out queue text)
language plpgsql stable parallel safe security invoker set enable_seqscan = off as $$
begin
  key := coalesce(p_options ->> 'idempotency_key',
    (select t.options ->> 'idempotency_key' from queue.task t where t.name = p_task));
  if key <> '' then
    key := queue._fill('idempotency_key', key, p_args);
    select k.queue into queue from queue.idempotency_key k
    where k.task = p_task and k.key = _used_idempotency_key.key;
  end if;
end $$;

-- Deletes rows whose keys have expired.
-- Locks: rows of queue.idempotency_key by skip locked.
create or replace function queue._prune_idempotency_keys(p_max integer)
returns void language plpgsql volatile parallel unsafe security invoker set enable_seqscan = off as $$
declare
  v_now timestamptz := clock_timestamp();
begin
  delete from queue.idempotency_key k
  where k.ctid = any (array(
    select e.ctid from queue.idempotency_key e where e.expires_at <= v_now
    order by e.expires_at limit p_max for update skip locked));
end $$;

-- defer/needs.sql
-- Needs of a job that is being deferred: checks that they exist, and how they are combined.
-- Tests: admit/needs.sql, admit/deadlines.sql.

-- Needs as a sorted set. An xid is assigned first, so that _safe_at waits for this transaction.
-- Settings: a plan made while the log was empty would read all of it. A plan that knows the number of needs
-- is never replaced by the generic one, so each call would plan, which takes three times as long as the rest.
-- Raises: 22023, QJ001 if a need can't be seen, or is no longer kept.
create or replace function queue._check_needs(p_needs bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off
set enable_mergejoin = off set enable_bitmapscan = off as $$
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
  left join lateral (
    select f.state, f.finished_at, f.purge_at
    from queue.finished f
    where f.id = u.n offset 0) f on true
  where j.id is null or (f.purge_at <= v_now or f.purge_at is null and f.state = 'succeeded' and f.finished_at < v_now - interval '7 days')
  limit 1;
  if found then
    perform queue._job_not_found(v_missing);
  end if;
  if cardinality(p_needs) = 1 then
    return p_needs;
  end if;
  return array(select distinct n from unnest(p_needs) n order by n);
end $$;

-- The deadline that a child inherits from its parent. Settings: a plan made while the log was empty would
-- read all of it.
-- Raises: QJ001.
create or replace function queue._parent_deadline(p_parent bigint)
returns timestamptz language plpgsql stable parallel safe security invoker set enable_seqscan = off as $$
declare
  v_deadline timestamptz;
begin
  select j.deadline into v_deadline from queue.job_now j where j.id = p_parent;
  if not found then
    perform queue._job_not_found(p_parent);
  end if;
  return v_deadline;
end $$;

-- How a job's needs are combined, as bits: any, proceed.
create or replace function queue._needs_mode(p_options jsonb)
returns smallint language plpgsql immutable parallel safe security invoker as $$
begin
  return coalesce((p_options ->> 'needs_mode' = 'any')::integer * 1/* any */, 0)
    | coalesce((p_options ->> 'on_need_failure' = 'proceed')::integer * 2/* proceed */, 0);
end $$;

-- The needs of a job, admitted or not.
create or replace function queue._direct_needs(p_id bigint)
returns table (id bigint) language plpgsql stable parallel safe security invoker rows 5 as $$
begin
  return query
    select d.need_id from queue.need d where d.job_id = p_id
    union
    select n from queue.job j cross join lateral unnest(j.needs) n where j.id = p_id;
end $$;

-- defer/group_option.sql
-- The option group of defer: the job joins an open group.
-- Tests: defer/open_groups.sql, admit/groups.adding.spec.

-- The options of a job with the group's name filled in from args; without it if the name is empty.
-- Until the transaction ends, it holds the table queue.job_group in mode ROW SHARE, which conflicts with
-- nothing that others do to it. Nobody else uses this mode there, so it shows which transactions may have
-- added jobs.
-- Locks: that table, in this mode; no other session waits for it.
-- Why no job is missed: the lock comes first, then the look whether the group is open. A transaction that
-- admission does not find with the lock, after the group was closed (admit/groups.sql), looks later, and sees
-- that it is closed. In REPEATABLE READ it may see an older state: its job is then counted late.
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

-- defer/append.sql
-- Deferring with any options: fills in defaults, checks, and appends the job to the log.
-- Tests: defer/defer.sql.

-- defer with everything that a job can have, if the role may. It wakes no worker.
-- p_table: the table whose trigger defers, if roles are restricted.
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
    perform queue._not_installed();
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

-- Fills in defaults, checks, and appends. Unused options add no expressions to evaluate: each would be set up
-- again in every transaction.
-- Locks and errors: as defer.
-- If the keys and the options had functions of their own, a job with a key would take 9 % more instructions,
-- and one with an option 10 % more.
-- In one piece: set-up of calls is most of the cost of such a job (ADR 1).
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
    v_flags := case when v_options ->> 'lock_mode' = 'mutex' then 2/* mutex */
      else 1/* ordered */ end;
  end if;
  if num_nonnulls(p_concurrency_key, p_concurrency_limit, v_task.keys) > 0 or v_given ? 'concurrency' then
    -- values of the call replace the task's keys
    v_terms := v_options -> 'terms';
    v_options := v_options - 'terms';
    if coalesce(p_concurrency_key, '') <> '' or v_given ? 'concurrency' then
      select c.keys, c.limits, c.terms into v_keys, v_limits, v_terms
      from queue._check_concurrency(p_concurrency_key, coalesce(p_concurrency_limit, v_task.limits[1]),
        v_given -> 'concurrency') c;
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
      if cardinality(v_keys) > 1 and (select count(distinct k) from unnest(v_keys) k) < cardinality(v_keys)
        then
        perform queue._invalid('a concurrency key is named twice', 'Name each key once.',
          'keys: ' || v_keys::text);
      end if;
      v_flags := v_flags | 4/* keys */;
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
      -- before needs and parent, which may have been removed since the first call
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
    -- needs_mode any: a yield may add needs, and must know which needs were met when the run began
    v_flags := v_flags
      | case when v_options ->> 'needs_mode' = 'any' then 8/* needs */ else 0 end
      | case when (v_options ->> 'held')::boolean then 32/* held */ else 0 end
      | case when v_options ? 'expires_at' then 64/* expires */ else 0 end
      | case when v_options ? 'timeout' then 128/* lease */ else 0 end
      | case when v_options ? 'retain' then 512/* retain */ else 0 end;
    if v_options ? 'share' then
      v_options := v_options - 'share' || case when v_options ->> 'share' = '' then '{}'
        else jsonb_build_object('share', queue._fill('share', v_options ->> 'share', p_args)) end;
    end if;
  end if;
  if v_options ? 'group' then
    v_options := queue._join_open_group(v_options, p_args);
    v_flags := v_flags | case when v_options ? 'group' then 4096/* needed */ else 0 end;
  end if;
  if v_scheduled_at is not null then
    if not isfinite(v_scheduled_at) then
      perform queue._invalid('scheduled_at must be finite',
        'Use options {"held": true} for a job without a time.');
    end if;
    perform queue._check_moment('scheduled_at', v_scheduled_at);
    v_flags := v_flags | 16/* scheduled */;
  end if;
  if cardinality(p_needs) > 0 then
    v_needs := queue._check_needs(p_needs);
    v_flags := v_flags | 8/* needs */;
  end if;
  if v_size is not null then
    v_flags := v_flags | -32768/* large */;
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
    v_flags := v_flags | case when v_options ->> 'unique_until' = 'finish' then 8192/* until_finish */
      else 256/* until_start */ end;
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

-- p_table: as _defer_checked, which wakes no worker.
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

-- defer/defer.sql
-- Deferring: only appends to the log. Decisions that need agreement are made after the commit
-- (admit/admission.sql).
-- extension/macros names the bits of flags.

-- Locks: only the sleep lock (work/worker_sleep.sql), shared and by try; with queueing_lock, its row. For
-- speed it has no search_path of its own, so every name and operator in it is qualified; _defer_any has one.
-- Raises: 22023, QJ001 (a need or parent that isn't visible), QJ004.
create or replace function queue.defer(
  task text, args jsonb default '{}', queue text default null, priority integer default null,
  lock text default null, queueing_lock text default null, scheduled_at timestamptz default null,
  deadline timestamptz default null, needs bigint[] default null,
  concurrency_key text default null, concurrency_limit integer default null, options jsonb default null)
returns bigint language plpgsql volatile parallel unsafe security definer as $$
declare
  v_id bigint;
  v_is_awake boolean;
  v_none pg_catalog.regclass;
begin
  -- Most calls take few functions and one statement, because each is set up again in every transaction: those
  -- for a task and small args, without restricted roles, if the task is registered with at most a queue and a
  -- priority.
  if coalesce(v_none, queue._unrestricted()) is not null
    and pg_catalog.num_nonnulls(defer.queue, defer.priority, defer.lock, defer.queueing_lock,
      defer.scheduled_at, defer.deadline, defer.needs, defer.concurrency_key, defer.concurrency_limit,
      defer.options) operator(pg_catalog.=) 0
  then
    if pg_catalog.jsonb_contains(defer.args, '{}')
      and pg_catalog.pg_column_size(defer.args) operator(pg_catalog.<) 2000
      and pg_catalog.octet_length(cast(defer.args as pg_catalog.text)) operator(pg_catalog.<=) 2000
    then
      insert into queue.log (task, args, job_options)
      select t.name, defer.args, t.job_options from queue.task t
      where t.name operator(pg_catalog.=) defer.task and t.is_plain
      returning id, pg_catalog.pg_try_advisory_xact_lock_shared(1885824102, 1/* sleep_lock */) into v_id, v_is_awake;
      if v_is_awake then
        return v_id;
      end if;
    end if;
  end if;
  if v_id is not null then
    perform queue._wake();
    return v_id;
  end if;
  return queue._defer_any(defer.task, defer.args, defer.queue, defer.priority, defer.lock,
    defer.queueing_lock, defer.scheduled_at, defer.deadline, defer.needs, defer.concurrency_key,
    defer.concurrency_limit, defer.options);
end $$;
comment on function queue.defer(text, jsonb, text, integer, text, text, timestamptz, timestamptz, bigint[],
  text, integer, jsonb) is
  'Defers a job and returns its id. Workers see it if and only if the transaction commits. For NULL the'
    ' task''s registered default applies, else the system''s (queue default, priority 0); empty text means'
    ' none. lock, queueing_lock and concurrency_key may contain {field}, filled from args; {{ and }} are'
    ' braces.';

-- All or nothing. A plain job (task, args, queue, priority) costs about 3 us.
-- Locks and errors: as defer.
create or replace function queue.defer_many(jobs jsonb)
returns setof bigint language plpgsql volatile parallel unsafe security definer rows 1000
set search_path = pg_catalog, pg_temp as $$
declare
  v_job jsonb;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  if jsonb_typeof(defer_many.jobs) is distinct from 'array' then
    perform queue._invalid('jobs must be a JSON array', 'Pass [{"task": text, "args": object, ...}, ...].');
  end if;
  if to_regclass('queue.unrestricted') is not null and not exists (
    select from jsonb_array_elements(defer_many.jobs) e
    where jsonb_typeof(e) <> 'object' or e - '{task,args,queue,priority}'::text[] <> '{}'
      or jsonb_typeof(e -> 'task') is distinct from 'string'
      or coalesce(jsonb_typeof(e -> 'args'), 'object') <> 'object'
      or coalesce(jsonb_typeof(e -> 'queue'), 'string') <> 'string'
      or coalesce(jsonb_typeof(e -> 'priority'), 'number') <> 'number'
      or length(e ->> 'priority') > 9 or strpos(e ->> 'priority', '.') > 0
      or pg_column_size(e) >= 4000 or octet_length(e ->> 'args') > 2000)
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
        insert into queue.log (task, args, job_options)
        select j.task, coalesce(j.args, '{}'),
          case when num_nonnulls(j.queue, j.priority) = 0 then t.job_options
               else row(nullif(coalesce(j.queue, t.queue), ''), coalesce(j.priority, t.priority), null, null,
                 null, null, null, null, null, null, null, null)::queue.job_options end
        from rows from (jsonb_to_recordset(defer_many.jobs) as (task text, args jsonb, queue text,
          priority integer))
          with ordinality j (task, args, queue, priority, n)
        left join queue.task t on t.name = j.task
        order by j.n
        returning id)
      select a.id from appended a;
  else
    perform queue._reserve_idempotency_keys(defer_many.jobs);
    for v_job in select jsonb_array_elements(defer_many.jobs) loop
      perform queue._check_keys('a job', v_job,
        array['task', 'args', 'queue', 'priority', 'lock', 'queueing_lock', 'scheduled_at',
        'deadline', 'needs', 'concurrency_key', 'concurrency_limit', 'options']);
      return next queue._defer_json(v_job);
    end loop;
  end if;
  perform queue._announce();
end $$;
comment on function queue.defer_many(jsonb) is
  'Defers an array of jobs, each an object with the names of defer''s arguments. Returns the ids in input'
    ' order. Defers all jobs or none.';

-- defer with any arguments. The first statement is for a task that has only a queue and a priority, its own
-- or the call's, or is not registered.
-- Locks and errors: as defer.
create or replace function queue._defer_any(
  p_task text, p_args jsonb, p_queue text, p_priority integer, p_lock text, p_queueing_lock text,
  p_scheduled_at timestamptz,
  p_deadline timestamptz, p_needs bigint[], p_concurrency_key text, p_concurrency_limit integer,
  p_options jsonb)
returns bigint language plpgsql volatile parallel unsafe security invoker
set search_path = pg_catalog, pg_temp as $$
declare
  v_id bigint;
  v_is_awake boolean;
  v_none regclass;
begin
  if num_nonnulls(p_lock, p_queueing_lock, p_scheduled_at, p_deadline, p_needs, p_concurrency_key,
    p_concurrency_limit, p_options) = 0 then
    if coalesce(v_none, queue._unrestricted()) is not null and p_args @> '{}'
      and (right(p_queue, 1) = '*' or octet_length(p_queue) > 1000) is not true
      and pg_column_size(p_args) < 2000 and octet_length(p_args::text) <= 2000 then
      insert into queue.log (task, args, job_options)
      select p_task, p_args,
        case when num_nonnulls(p_queue, p_priority) = 0 then t.job_options
             else row(nullif(coalesce(p_queue, t.queue), ''), coalesce(p_priority, t.priority), null, null,
               null, null, null, null, null, null, null, null)::queue.job_options end
      from (select) one left join queue.task t on t.name = p_task
      where coalesce(t.is_plain, p_task <> '' and octet_length(p_task) <= 1000)
      returning id, pg_try_advisory_xact_lock_shared(1885824102, 1/* sleep_lock */) into v_id, v_is_awake;
    end if;
  end if;
  if v_id is null then
    v_id := queue._defer_checked(p_task, coalesce(p_args, '{}'), p_queue, p_priority, p_lock, p_queueing_lock,
      p_scheduled_at, p_deadline, p_needs, p_concurrency_key, p_concurrency_limit, p_options);
    v_is_awake := pg_try_advisory_xact_lock_shared(1885824102, 1/* sleep_lock */);
  end if;
  if not v_is_awake then
    perform queue._wake();
  end if;
  return v_id;
end $$;

-- defer/open_groups.sql
-- Groups: opened under a name, open for jobs until closed, with callbacks: jobs that are deferred when all
-- jobs of the group have ended, when all have succeeded, or when one has failed.

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
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform queue._check_name('name', open_group.name);
  perform queue._check_size('callbacks', v_callbacks);
  perform queue._check_callback(e.key, e.value) from jsonb_each(v_callbacks) e where e.value <> 'null';
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
  'Opens a group of jobs, and returns true; false if it is open already, and then nothing changes. Jobs'
    ' join by defer''s option group, until close_group. Each callback is a job, {"task": text, "args":'
    ' object, ...}, and is deferred once: on_end when the group is closed and all its jobs have ended,'
    ' on_success when all of them have succeeded, on_failure as soon as one has failed or was cancelled. A'
    ' group is kept for 7 days after its end, and for as long as any of its jobs; until then its name stays'
    ' in use.';

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
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
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
  'Closes a group: no more jobs join it, and its callbacks are deferred when their time has come, which may'
    ' be at once. Jobs of transactions that have already deferred them, and are still open, belong to the'
    ' group, which waits for these transactions. Returns false if the group was closed before. The call only'
    ' appends, as defer does, so it may be part of any transaction; it takes effect at the commit.';

-- Raises: 22023 if it is not a job that a group can defer.
create or replace function queue._check_callback(p_what text, p_callback jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._check_keys(p_what, p_callback, array['task', 'args', 'queue', 'priority', 'lock',
    'concurrency_key', 'concurrency_limit', 'options']);
  perform queue._check_types(p_what, p_callback);
  if jsonb_typeof(p_callback -> 'options') = 'object'
    and p_callback -> 'options' ?| '{idempotency_key,unique_for,group}' then
    perform queue._invalid('a callback has an option that is not for it',
      'Leave out idempotency_key, unique_for and group: a callback is deferred once, by its group.');
  end if;
  -- whatever defer refuses is refused now
  begin
    perform queue._defer_callback(p_callback);
    raise exception using errcode = 'P0999', message = 'rolled back',
      hint = 'It never reaches the caller.';
  exception when sqlstate 'P0999' then
    null;
  end;
end $$;

-- Defers the job of a callback. It takes no queueing lock and no idempotency key, for which it might have to
-- wait, and joins no group, even if its task's defaults have them. It has no parent: that may
-- be gone by then.
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

-- defer/trigger.sql
-- Deferring by a trigger on a table.
-- Tests: defer/defer.sql.

-- Settings: a row is written in the same way, whatever the session's output formats for bytea, floating point
-- numbers and intervals.
-- Locks and errors: as defer.
create or replace function queue.defer_trigger()
returns trigger language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set bytea_output = hex set extra_float_digits = 1
set intervalstyle = postgres as $$
declare
  v_keys jsonb := '{}'::jsonb;
  v_row jsonb;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  if tg_level <> 'ROW' then
    perform queue._invalid('defer_trigger is for row triggers', 'Create the trigger FOR EACH ROW.',
      'trigger: ' || tg_name);
  elsif tg_nargs not between 1 and 2 then
    perform queue._invalid('defer_trigger takes a task and, optionally, defer''s keys',
      'EXECUTE FUNCTION queue.defer_trigger(''task'', ''{"queue": "..."}'').', 'trigger: ' || tg_name);
  elsif tg_nargs = 2 then
    begin
      v_keys := tg_argv[1]::jsonb;
    exception when invalid_text_representation then
      perform queue._invalid('defer_trigger''s second argument is not JSON',
        'Pass an object of defer''s keys.', 'trigger: ' || tg_name);
    end;
    perform queue._check_keys('defer_trigger''s second argument', v_keys,
      array['queue', 'priority', 'lock', 'queueing_lock',
      'scheduled_at', 'deadline', 'needs', 'concurrency_key', 'concurrency_limit', 'options']);
    perform queue._check_types('defer_trigger''s second argument', v_keys);
  end if;
  if exists (select from pg_attribute a where a.attrelid = tg_relid and a.attnum > 0 and a.atttypid >= 16384)
    then
    perform queue._check_casts(tg_relid);
  end if;
  v_row := case when tg_op = 'DELETE' then to_jsonb(old) else to_jsonb(new) end;
  if to_regclass('queue.unrestricted') is not null and v_keys - '{queue,priority}'::text[] = '{}' then
    perform queue.defer(tg_argv[0], v_row, v_keys ->> 'queue', (v_keys ->> 'priority')::integer);
  else
    perform queue._defer_json(v_keys || jsonb_build_object('task', tg_argv[0], 'args', v_row), tg_relid);
    perform queue._announce();
  end if;
  return case when tg_op = 'DELETE' then old else new end;
end $$;
comment on function queue.defer_trigger() is
  'Row trigger that defers a job: defer_trigger(task [, defer''s keys as JSON]). The args are the NEW'
    ' row, or the OLD row on DELETE.';

-- to_jsonb calls a type's cast to json with the rights of the queue's owner. So the cast must belong to a
-- superuser or the owner.
-- Raises: 22023 if a column's type, or a type inside it, has another cast.
create or replace function queue._check_casts(p_table oid)
returns void language plpgsql stable parallel safe security invoker as $$
declare
  v_type regtype;
begin
  with recursive part as (
    select a.atttypid as type from pg_attribute a where a.attrelid = p_table and a.attnum > 0
      and not a.attisdropped
    union
    select x.type
    from part p
    join pg_type t on t.oid = p.type
    cross join lateral (
      select t.typbasetype union all select t.typelem union all
      select a.atttypid from pg_attribute a where a.attrelid = t.typrelid and a.attnum > 0
        and not a.attisdropped) x (type)
    where x.type <> 0)
  select p.type into v_type
  from part p
  join pg_cast c on c.castsource = p.type and c.casttarget = 'json'::regtype
  join pg_proc f on f.oid = c.castfunc
  join pg_roles r on r.oid = f.proowner
  where not r.rolsuper and r.rolname <> current_user
  limit 1;
  if found then
    perform queue._invalid('a column has a type whose cast to json can''t be trusted',
      'Let a superuser own the cast''s function, or drop the cast.', format('type: %s', v_type));
  end if;
end $$;

-- defer/defer_group.sql
-- Groups, chains and graphs: jobs deferred with their needs in one call.

-- Locks and errors: as defer_many.
create or replace function queue.defer_group(jobs jsonb, "then" jsonb)
returns table (then_id bigint, ids bigint[])
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp as $$
declare
  v_needs jsonb := defer_group."then" -> 'needs';
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  if jsonb_typeof(defer_group."then") is distinct from 'object' then
    perform queue._invalid('then must be a JSON object',
      'Pass the job that follows as {"task": text, "args": object, ...}.');
  elsif coalesce(jsonb_typeof(v_needs), 'null') not in ('array', 'null') then
    perform queue._invalid('needs must be a list of ids', 'Pass ids of jobs, or leave needs out.');
  end if;
  ids := array(select d.id from queue.defer_many(defer_group.jobs) with ordinality d (id, n) order by d.n);
  select d.id into then_id
  from queue.defer_many(jsonb_build_array(
    defer_group."then"
      || jsonb_build_object('needs', to_jsonb(ids) || coalesce(nullif(v_needs, 'null'), '[]')))) d (id);
  return next;
end $$;
comment on function queue.defer_group(jsonb, jsonb) is
  'Defers jobs (as defer_many) and one more, "then", that needs them all, in addition to the needs that'
    ' it names. Its options needs_mode and on_need_failure work as in defer. Returns its id and theirs, in'
    ' input order.';

-- Locks and errors: as defer_many.
create or replace function queue.defer_chain(jobs jsonb)
returns setof bigint language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp as $$
declare
  v_job jsonb;
  v_id bigint;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  if jsonb_typeof(defer_chain.jobs) is distinct from 'array' then
    perform queue._invalid('jobs must be a JSON array', 'Pass [{"task": text, "args": object, ...}, ...].');
  end if;
  for v_job in select e from jsonb_array_elements(defer_chain.jobs) e loop
    if v_id is not null and jsonb_typeof(v_job) = 'object' then
      perform queue._check_types('a job', v_job);
      v_job := v_job
        || jsonb_build_object('needs', jsonb_build_array(v_id)
        || coalesce(nullif(v_job -> 'needs', 'null'), '[]'));
    end if;
    v_id := queue.defer_many(jsonb_build_array(v_job));
    return next v_id;
  end loop;
end $$;
comment on function queue.defer_chain(jsonb) is
  'Defers jobs (as defer_many), each of which needs the one before it, in addition to the needs that it'
    ' names. Returns the ids in input order.';

-- admit/cursor.sql
-- The cursor: how far the log has been read, and the due mark, before which nothing is due.
-- Tests: admit/admission.sql, admit/admission.two.spec, recur/schedules.sql.

-- Records that everything visible in p_upto has been read, except the transaction p_own.
-- An update that changes the key is read newest first, like a new row.
-- Locks: the caller holds the admission lock.
create or replace function queue._move_cursor(
  p_tick bigint, p_upto pg_snapshot, p_own xid8, p_high_id bigint, p_has_backlog boolean,
  p_due_at timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.cursor k
  set tick = p_tick + 1, next_xid = pg_snapshot_xmax(p_upto), in_flight = queue._in_flight(p_upto, p_own),
    high_id = p_high_id,
    has_backlog = p_has_backlog, due_at = p_due_at
  where k.tick = p_tick;
end $$;

-- The transactions that were in flight in a snapshot, including p_own.
create or replace function queue._in_flight(p_upto pg_snapshot, p_own xid8)
returns xid8[] language plpgsql immutable parallel safe security invoker as $$
begin
  if pg_snapshot_xmin(p_upto) = pg_snapshot_xmax(p_upto) then
    return '{}'::xid8[];
  end if;
  return array(select x from pg_snapshot_xip(p_upto) x union select p_own
    where p_own < pg_snapshot_xmax(p_upto) order by 1);
end $$;

-- Whether the log may contain rows that have not been admitted: reads only its end, for callers that need
-- nothing else of _admit.
-- Locks: the caller holds the admission lock.
create or replace function queue._has_news()
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  return (
    select k.has_backlog or k.in_flight <> '{}' or (select j.id from queue.job j
      where j.xid >= k.next_xid limit 1) is not null
    from queue.cursor_now k);
end $$;

-- If the clock was set back past the due mark, moves the mark back too. Otherwise the next admission might
-- begin at the mark, and miss a new timer before it.
-- Locks: the caller holds the admission lock, which protects the cursor.
create or replace function queue._rewind_due_mark()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_tick bigint;
  v_due_at timestamptz;
begin
  select k.tick, k.due_at into v_tick, v_due_at from queue.cursor_now k;
  if v_due_at > clock_timestamp() then
    update queue.cursor k set due_at = '-infinity' where k.tick = v_tick;
  end if;
end $$;

-- recur/cron_next.sql
-- The next run of a cron expression: the next matching time in a time zone.

-- The first run later than `after`. NULL if there is none in a hundred years, which happens only for
-- expressions that follow elapsed time, if daylight saving skips every time that they name.
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

-- The first run later than the whole second `after` of an expression with fixed times: each matching local
-- time runs once, at the first instant at which clocks have reached it. For every time in a gap that is the
-- first instant after the gap; for a repeated time it is its first pass. So a local time is still to come if
-- it is later than any that clocks have shown up to `after`; if clocks were set back just before, that is not
-- the time that they show at `after`.
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

  -- PostgreSQL reads a repeated time as the second one, and a time in a gap by the old offset
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

-- The first instant later than the whole second `after` whose local time matches; NULL as in _cron_next.
-- The search goes from one stretch of constant offset to the next. A change of offset matters only in the 24
-- hours after the point reached (clocks set back show earlier times again) and in those before the match
-- (clocks set forward get there sooner): the search skips the time between.
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

-- The first matching local time not before the given whole second, ignoring daylight saving.
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

-- The matching days in the month that begins on `first`: bit 0 is the 1st.
create or replace function queue._cron_days(cron bigint[], first date)
returns bigint language plpgsql immutable parallel safe security invoker as $$
declare
  v_length int := 33 - pg_catalog.date_part('day', first + 32)::int;
  v_weekday int := pg_catalog.date_part('dow', first)::int;
  v_by_month bigint := cron[5] & 2147483647;
  v_by_week bigint := cron[7] & 127;
  v_week bigint;
begin
  -- the mask's week, rotated to begin on the weekday of the 1st, five times
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

-- recur/cron.sql
-- Cron expressions: their meaning, and their next runs, which _cron_next (recur/cron_next.sql) computes.
--
-- _cron_parse turns the text into eight numbers, which may be stored and passed to _cron_next later:
--   [1]     seconds between the runs of `every ...`; 0 for cron fields, which follow as bit masks:
--   [2]-[4] second, minute, hour: bit n is the value n
--   [5]     day of month: bits 0-30 are the days 1-31, bits 31-61 are L to L-30, bit 62 is LW
--   [6]     month: bits 0-11
--   [7]     day of week: bits 0-6 are Sunday to Saturday in every week of the month,
--           bits 7n to 7n+6 the n-th such day of it (n is 1-5), bits 42-48 the last one
--   [8]     1: both day fields must match; 2: the expression follows elapsed time
--
-- Daylight saving relies on two facts about time zone data: changes of a zone's offset are more than 48 hours
-- apart, and none is larger than 24 hours. In these functions a timestamptz is an instant, and a timestamp is
-- the local time in the zone.

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
  'Returns the next n runs of a cron expression in a time zone, ascending, later than after.';

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
    pg_catalog.btrim(pg_catalog.regexp_replace(pg_catalog.translate(cron, v_blanks, '   '), ' +', ' ',
      'g')) collate "C");
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

  -- 28 years contain every month with every weekday as its first day, leap years included
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
      perform queue._cron_refuse(cron, field, v_item, 'A range must ascend: write ' || case
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

-- Raises: 22023, for an invalid expression. Without its own hint it says what is allowed.
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

-- Refuses unknown time zones, and names that PostgreSQL accepts as zones but that are not: abbreviations,
-- which mean one offset all year (CET would have no summer time), and POSIX rules (UTC+3 would be three hours
-- behind UTC).
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
    'Name a zone of pg_timezone_names, such as UTC or Europe/Paris, not an abbreviation or offset.',
    pg_catalog.format('timezone: %s', coalesce(pg_catalog.left(timezone, 200), 'NULL')));
end $$;

-- recur/plan.sql
-- Planning: the due runs of a schedule, and what happens to each: also to those that were missed while no
-- worker or server was up. What makes sure that each run happens at most once: recur/schedules.sql.

-- What to do at p_now with the runs from p_first on: those to skip and why (the first 10; the last of these
-- stands for all up to skipped_to), those to run (at most 100), and the next one after that.
create or replace function queue._plan_runs(
  p_parsed bigint[], p_timezone text, p_first timestamptz, p_now timestamptz, p_catch_up text,
  p_max_delay interval,
  out skips timestamptz[], out skipped text, out skipped_to timestamptz, out runs timestamptz[],
  out next_run_at timestamptz)
language plpgsql stable parallel safe security invoker as $$
declare
  -- with catch_up none a run still counts as in time if a busy worker may not have reached it
  v_limit constant timestamptz := p_now - coalesce(p_max_delay,
    case when p_catch_up = 'none' then interval '15 s' end);
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
  -- runs before v_run_at are skipped
  if p_catch_up <> 'all' and next_run_at <= p_now then
    skipped := 'missed';
    v_run_at := queue._last_run(p_parsed, p_timezone, next_run_at, p_now);
    next_run_at := queue._cron_next(p_parsed, p_timezone, v_run_at);
  end if;
  if v_run_at < v_limit then
    skipped := case when p_max_delay is null then 'missed' else 'max_delay' end;
    v_run_at := case when p_catch_up = 'all' then queue._cron_next(p_parsed, p_timezone,
      v_limit - interval '1 us') else next_run_at end;
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

-- The last run up to p_to; p_from is a run.
-- Each round halves the remaining time, so that it takes no longer for a year of runs each second.
create or replace function queue._last_run(p_parsed bigint[], p_timezone text, p_from timestamptz,
  p_to timestamptz)
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

-- An instant in RFC 3339 format, in a zone's local time with its offset.
create or replace function queue._rfc3339(p_at timestamptz, p_timezone text)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_local timestamp := p_at at time zone p_timezone;
  v_offset interval := v_local - (p_at at time zone 'UTC');
begin
  return to_char(v_local, case when date_trunc('second', v_local) = v_local then 'YYYY-MM-DD"T"HH24:MI:SS'
    else 'YYYY-MM-DD"T"HH24:MI:SS.US' end)
    || case when v_offset < interval '0' then '-' else '+' end
      || to_char(greatest(v_offset, -v_offset), 'HH24:MI');
end $$;

-- The keys of a schedule's options that defer does not have.
create or replace function queue._schedule_keys()
returns text[] language plpgsql immutable parallel safe security invoker as $$
begin
  return array['catch_up', 'max_delay', 'overlap', 'enabled', 'source'];
end $$;

-- Defers the job of one run.
-- Locks and errors: as defer.
create or replace function queue._defer_run(p_task text, p_args jsonb, p_options jsonb, p_run_at timestamptz,
  p_timezone text)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
begin
  return queue._defer_full(
    p_task, p_args || jsonb_build_object('scheduled_for', queue._rfc3339(p_run_at, p_timezone)),
    p_options ->> 'queue', (p_options ->> 'priority')::integer,
    p_options ->> 'lock', p_options ->> 'queueing_lock', null,
    p_run_at + queue._interval('deadline', p_options -> 'deadline'), null,
    p_options ->> 'concurrency_key', (p_options ->> 'concurrency_limit')::integer,
    nullif(p_options - (array['queue', 'priority', 'lock', 'queueing_lock', 'deadline', 'concurrency_key',
      'concurrency_limit'] || queue._schedule_keys()), '{}'));
end $$;

-- Deletes all but the last 100 runs of a schedule.
create or replace function queue._prune_runs(p_name text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.schedule_run r
  where r.name = p_name
    and r.run_at < (select k.run_at from queue.schedule_run k where k.name = p_name
      order by k.run_at desc offset 99 limit 1);
end $$;

-- Deletes runs of removed schedules, after 7 days.
-- Locks: the caller holds the admission lock.
create or replace function queue._prune_old_runs(p_max integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.schedule_run r
  where r.ctid = any (array(
    select k.ctid from queue.schedule_run k
    where k.decided_at < clock_timestamp() - interval '7 days'
      and not exists (select from queue.schedule s where s.name = k.name)
    limit p_max));
end $$;

-- recur/runs.sql
-- Running due schedules: which runs happen, which are skipped, and what is recorded about them.

-- Runs due schedules, at most about p_slice runs. Returns the new due mark: no schedule is due before it.
-- Locks: the caller holds the admission lock.
create or replace function queue._run_due_schedules(p_mark timestamptz, p_slice integer, out mark timestamptz,
  out runs integer, out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
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
    -- one of them can't run at all: it must not stop the others
    foreach v_row in array v_rows loop
      begin
        v_done := queue._run_schedules(array[v_row], v_now, p_slice);
        runs := runs + v_done.runs;
        has_more := has_more or v_done.has_more;
      exception when others then
        v_error := format('error: %s (%s)', left(sqlerrm, 1000), sqlstate);
        update queue.schedule s set due_at = v_now + interval '1 minute', reason = v_error
        where s.ctid = v_row;
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

-- Runs the schedules in the rows, until p_budget jobs are deferred; looked_at: how many rows it reached.
-- It writes plain jobs and all records at the end, in one statement each.
-- Locks: the caller holds the admission lock. Queueing locks are waited for 5 ms, then the run is postponed.
-- In one piece: a version with a call for each schedule took 28 % longer for 1,000 due ones.
create or replace function queue._run_schedules(
  p_rows tid[], p_now timestamptz, p_budget integer, out looked_at integer, out runs integer,
  out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_found record;
  v_has_pause boolean := exists (select from queue.pause p where p.is_paused
    and (p.until is null or p.until > p_now));
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
  -- records
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
  select null::bigint[] as parsed, null::text as timezone, null::timestamptz as run_at,
    null::text as catch_up, null::interval as max_delay into v_plan_of;
  select null::text as timezone, null::timestamptz as run_at into v_text_of;
  for v_found in
    select s.name, s.next_run_at, s.last_run_at, s.last_job_id, s.is_plain, s.skips_overlap, s.catch_up,
      s.max_delay, s.parsed, s.timezone,
      s.task, s.args, s.options, t.is_plain as task_is_plain, t.queue as task_queue,
      t.priority as task_priority
    from unnest(p_rows) with ordinality u (row_id, n)
    cross join lateral (select s.* from queue.schedule s where s.ctid = u.row_id offset 0) s
    left join lateral (
      select t.is_plain, t.queue, t.priority
      from queue.task t
      where t.name = s.task offset 0) t on true
    order by u.n
  loop
    exit when runs >= p_budget;
    looked_at := looked_at + 1;
    v_queue := coalesce(nullif(coalesce(v_found.options ->> 'queue', v_found.task_queue), ''), 'default');
    if v_has_pause then
      v_until := greatest(queue._paused_until(v_queue), queue._task_paused_until(v_found.task, v_queue));
      if v_until > p_now then
        -- once a minute, as the task's queue may change
        v_dues := v_dues || least(v_until, p_now + interval '1 minute');
        v_nexts := v_nexts || v_found.next_run_at;
        v_lasts := v_lasts || v_found.last_run_at;
        v_last_jobs := v_last_jobs || v_found.last_job_id;
        v_reasons := v_reasons || 'paused'::text;
        continue;
      end if;
    end if;
    -- many schedules have the same runs
    if (v_found.next_run_at, v_found.parsed, v_found.timezone, v_found.catch_up) = (v_plan_of.run_at,
      v_plan_of.parsed, v_plan_of.timezone, v_plan_of.catch_up)
      and v_found.max_delay is not distinct from v_plan_of.max_delay
    then
      null;
    else
      select * into v_plan
      from queue._plan_runs(v_found.parsed, v_found.timezone, v_found.next_run_at, p_now, v_found.catch_up,
        v_found.max_delay);
      select v_found.next_run_at as run_at, v_found.parsed, v_found.timezone, v_found.catch_up,
        v_found.max_delay into v_plan_of;
    end if;
    for i in 1 .. cardinality(v_plan.skips) loop
      v_names := v_names || v_found.name;
      v_run_ats := v_run_ats || v_plan.skips[i];
      v_job_ids := v_job_ids || null::bigint;
      v_skips := v_skips || v_plan.skipped;
      v_details := v_details || case when i = cardinality(v_plan.skips)
        and v_plan.skipped_to > v_plan.skips[i]
                                     then format('and every run up to %s',
                                       queue._rfc3339(v_plan.skipped_to, v_found.timezone)) end;
      v_found.last_run_at := v_plan.skipped_to;
    end loop;
    v_next_run_at := v_plan.next_run_at;
    v_overlaps := 0;
    v_is_new := false;
    v_is_busy := false;
    v_error := null;
    foreach v_run_at in array v_plan.runs loop
      continue when exists (select from queue.schedule_run r
        where r.name = v_found.name and r.run_at = v_run_at);
      v_id := null;
      v_skipped := null;
      v_detail := null;
      v_error := null;
      if v_found.skips_overlap and (
        v_is_new or exists (select from queue.job j where j.id = v_found.last_job_id
          and not exists (select from queue.finished f where f.id = j.id)))
      then
        v_skipped := 'overlap';
        v_detail := format('job %s is unfinished', v_found.last_job_id);
        v_overlaps := v_overlaps + 1;
        if v_overlaps = 10 then
          -- nor will it have ended for the following runs
          v_found.last_run_at := queue._last_run(v_found.parsed, v_found.timezone, v_run_at, p_now);
          v_next_run_at := queue._cron_next(v_found.parsed, v_found.timezone, v_found.last_run_at);
          if v_found.last_run_at > v_run_at then
            v_detail := v_detail || format(', for every run up to %s',
              queue._rfc3339(v_found.last_run_at, v_found.timezone));
          end if;
        end if;
      elsif v_found.is_plain and v_found.task_is_plain is not false then
        if (v_run_at, v_found.timezone) = (v_text_of.run_at, v_text_of.timezone) then
          null;
        else
          v_text := queue._rfc3339(v_run_at, v_found.timezone);
          select v_found.timezone as timezone, v_run_at as run_at into v_text_of;
        end if;
        v_id := nextval('queue.job_id_seq');
        v_ids := v_ids || v_id;
        v_tasks := v_tasks || v_found.task;
        v_args := v_args || (v_found.args || jsonb_build_object('scheduled_for', v_text));
        v_queues := v_queues || v_queue;
        v_priorities := v_priorities || coalesce((v_found.options ->> 'priority')::integer,
          v_found.task_priority, 0);
      else
        begin
          perform set_config('lock_timeout', '5ms', true);
          v_id := queue._defer_run(v_found.task, v_found.args, v_found.options, v_run_at, v_found.timezone);
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
      v_names := v_names || v_found.name;
      v_run_ats := v_run_ats || v_run_at;
      v_job_ids := v_job_ids || v_id;
      v_skips := v_skips || v_skipped;
      v_details := v_details || v_detail;
      exit when v_overlaps = 10;
      v_found.last_run_at := v_run_at;
      if v_id is not null then
        runs := runs + 1;
        v_is_new := true;
        v_found.last_job_id := v_id;
      end if;
    end loop;
    if v_is_busy then
      -- another session is deferring with this queueing lock: the longer that takes, the later the next try
      v_dues := v_dues || p_now + greatest(interval '100 ms',
        least(interval '10 s', (p_now - v_run_at) / 10));
      v_nexts := v_nexts || v_run_at;
      v_reasons := v_reasons || 'queueing_lock'::text;
    else
      v_dues := v_dues || greatest(v_next_run_at, case when v_next_run_at is not null then p_now end);
      v_nexts := v_nexts || v_next_run_at;
      v_reasons := v_reasons || v_error;
      has_more := has_more or coalesce(v_next_run_at <= p_now, false);
    end if;
    v_lasts := v_lasts || v_found.last_run_at;
    v_last_jobs := v_last_jobs || v_found.last_job_id;
    if random() < 0.02 then
      v_prune := v_prune || v_found.name;
    end if;
  end loop;

  insert into queue.log (id, task, args, job_options)
  select u.id, u.task, u.args,
    row(u.queue, u.priority, null, null, null, null, null, null, null, null, null, null)::queue.job_options
  from unnest(v_ids, v_tasks, v_args, v_queues, v_priorities) u (id, task, args, queue, priority);
  insert into queue.schedule_run (name, run_at, decided_at, job_id, is_manual, skipped, detail)
  select u.name, u.run_at, p_now, u.job_id, false, u.skipped, u.detail
  from unnest(v_names, v_run_ats, v_job_ids, v_skips, v_details) u (name, run_at, job_id, skipped, detail)
  on conflict on constraint schedule_run_pkey do nothing;
  update queue.schedule s
  set due_at = u.due_at, next_run_at = u.next_run_at, last_run_at = u.last_run_at,
    last_job_id = u.last_job_id, reason = u.reason
  from unnest(p_rows[:looked_at], v_dues, v_nexts, v_lasts, v_last_jobs, v_reasons) u (row_id, due_at,
    next_run_at, last_run_at, last_job_id, reason)
  where s.ctid = u.row_id;
  perform queue._prune_runs(n) from unnest(v_prune) n;
end $$;

-- recur/schedules.sql
-- Recurring runs: schedules, and the jobs that they defer.
--
-- A schedule's row says which run is the next that has not been handled (next_run_at). Admission
-- (admit/admission.sql) finds the row when it is due, defers the job or records why not, and sets next_run_at
-- to a later run, all in one transaction under the admission lock (recur/runs.sql). next_run_at only ever
-- rises. So there is at most one job for (name, run_at), however often schedules are checked, and whatever
-- the clock does. Rows of queue.schedule are written only under the admission lock; queue.schedule_run is
-- append-only.

-- Locks: the admission lock, waited for, only if something changes. Raises: 22023, QJ008.
create or replace function queue.schedule(
  name text, cron text, task text, args jsonb default '{}', timezone text default 'UTC',
  options jsonb default null)
returns timestamptz language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_args jsonb := coalesce(schedule.args, '{}');
  v_options jsonb;
  v_parsed bigint[];
  v_old record;
  v_now timestamptz;
  v_is_enabled boolean;
  v_next_run_at timestamptz;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform queue._check_isolation();
  perform queue._check_name('name', schedule.name);
  perform queue._check_name('task', schedule.task);
  if jsonb_typeof(v_args) <> 'object' then
    perform queue._invalid('args must be a JSON object', 'Pass the arguments by name: {"name": value}.',
      'type: ' || jsonb_typeof(v_args));
  elsif v_args ? 'scheduled_for' then
    perform queue._invalid('args may not contain scheduled_for',
      'Each run adds it: the time of the run.');
  end if;
  perform queue._check_size('args', v_args);
  perform queue._uncut(queue._hidden_paths() -> schedule.task, v_args, '{}');
  v_options := queue._check_schedule_options(schedule.options, v_args);
  perform queue._check_templates(t.sensitive, v_options) from queue.task t where t.name = schedule.task;
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
  if v_is_enabled and v_old.next_run_at is not null
    and (v_old.cron, v_old.timezone) = (schedule.cron, schedule.timezone) then
    v_next_run_at := v_old.next_run_at;
  else
    if v_old.next_run_at <= v_now then
      perform queue._note_skipped(schedule.name, v_old.next_run_at, 'changed',
        format('the schedule was changed at %s', v_now));
    end if;
    if v_is_enabled then
      v_next_run_at := queue._cron_next(v_parsed, schedule.timezone, greatest(v_now, v_old.last_run_at));
    end if;
  end if;
  perform queue._audit('schedule', jsonb_build_object('name', schedule.name, 'cron', schedule.cron, 'task',
    schedule.task, 'args', v_args, 'timezone', schedule.timezone, 'options', v_options),
    p_before => queue._schedule_before(schedule.name));
  insert into queue.schedule as s (name, due_at, next_run_at, is_enabled, is_plain, skips_overlap, catch_up,
    max_delay, created_at, changed_at, cron, parsed, timezone, task, args, options)
  values (schedule.name,
    greatest(v_next_run_at, case when v_next_run_at is not null then v_now end), v_next_run_at, v_is_enabled,
    v_options - (array['queue', 'priority'] || queue._schedule_keys()) = '{}'
      and octet_length(v_args::text) <= 1900, coalesce(v_options ->> 'overlap' = 'skip', false),
      coalesce(v_options ->> 'catch_up', 'latest'), queue._interval('max_delay', v_options -> 'max_delay'),
      v_now, v_now, schedule.cron, v_parsed, schedule.timezone, schedule.task, v_args, v_options)
  on conflict on constraint schedule_pkey do update
    set (due_at, next_run_at, is_enabled, is_plain, skips_overlap, catch_up, max_delay, changed_at, cron,
      parsed, timezone, task, args, options, reason)
      = (excluded.due_at, excluded.next_run_at, excluded.is_enabled, excluded.is_plain,
        excluded.skips_overlap, excluded.catch_up,
         excluded.max_delay, excluded.changed_at, excluded.cron, excluded.parsed, excluded.timezone,
         excluded.task, excluded.args,
         excluded.options, null);
  perform queue._announce();
  return v_next_run_at;
end $$;
comment on function queue.schedule(text, text, text, jsonb, text, jsonb) is
  'Defers a job at each run of a cron expression in a time zone, with scheduled_for in its args. Calling'
    ' it again with the same arguments has no effect; others take effect at once. Returns the next run, NULL'
    ' if disabled. options: those of defer, queue, priority, lock, queueing_lock, concurrency_key,'
    ' concurrency_limit, deadline (an interval from the time of the run), and catch_up (none | latest |'
    ' all), max_delay (1 second to 4,000 years), overlap (allow | skip), enabled, source.';

-- Locks: the admission lock, waited for. Raises: 22023, QJ008.
create or replace function queue.unschedule(name text)
returns boolean language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform queue._check_isolation();
  perform queue._check_name('name', unschedule.name);
  perform queue._lock_admission(true);
  perform queue._audit('unschedule', jsonb_build_object('name', unschedule.name), p_before => b.before)
  from queue._schedule_before(unschedule.name) b (before) where b.before is not null;
  delete from queue.schedule s where s.name = unschedule.name;
  return found;
end $$;
comment on function queue.unschedule(text) is
  'Removes a schedule. Jobs that it has deferred stay, and its runs stay for 7 days. Returns whether it'
    ' existed.';

-- Locks: the admission lock, waited for. Raises: 22023 (no such schedule too), QJ008.
create or replace function queue.enable_schedule(name text, enabled boolean default true)
returns timestamptz language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_old record;
  v_now timestamptz;
  v_next_run_at timestamptz;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform queue._check_isolation();
  perform queue._check_name('name', enable_schedule.name);
  if enable_schedule.enabled is null then
    perform queue._invalid('enabled must be true or false', 'Leave it out to enable the schedule.');
  end if;
  perform queue._lock_schedules();
  select s.is_enabled, s.next_run_at, s.last_run_at, s.parsed, s.timezone into v_old from queue.schedule s
  where s.name = enable_schedule.name;
  if not found then
    perform queue._no_schedule(enable_schedule.name);
  end if;
  perform queue._audit('enable_schedule', jsonb_build_object('name', enable_schedule.name, 'enabled',
    enable_schedule.enabled), p_before => jsonb_build_object('enabled', v_old.is_enabled));
  if v_old.is_enabled = enable_schedule.enabled then
    return v_old.next_run_at;
  end if;
  v_now := clock_timestamp();
  if enable_schedule.enabled then
    v_next_run_at := queue._cron_next(v_old.parsed, v_old.timezone, greatest(v_now, v_old.last_run_at));
  elsif v_old.next_run_at <= v_now then
    perform queue._note_skipped(enable_schedule.name, v_old.next_run_at, 'changed',
      format('the schedule was disabled at %s', v_now));
  end if;
  update queue.schedule s
  set is_enabled = enable_schedule.enabled, next_run_at = v_next_run_at, due_at = v_next_run_at,
    reason = null, changed_at = v_now
  where s.name = enable_schedule.name;
  perform queue._announce();
  return v_next_run_at;
end $$;
comment on function queue.enable_schedule(text, boolean) is
  'Enables or disables a schedule, until queue.schedule changes it. It runs from now on; missed runs are'
    ' not made up for. Returns the next run, NULL if disabled.';

-- Locks: as defer; then the admission lock, waited for. Raises: as defer; 22023 if there is no such schedule;
-- QJ008.
create or replace function queue.run_now(name text)
returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_schedule record;
  v_run_at timestamptz := clock_timestamp();
  v_id bigint;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform queue._check_isolation();
  perform queue._check_name('name', run_now.name);
  select s.* into v_schedule from queue.schedule s where s.name = run_now.name;
  if not found then
    perform queue._no_schedule(run_now.name);
  end if;
  v_id := queue._defer_run(v_schedule.task, v_schedule.args, v_schedule.options, v_run_at,
    v_schedule.timezone);
  perform queue._lock_admission(true);
  insert into queue.schedule_run (name, run_at, decided_at, job_id, is_manual)
  values (run_now.name, v_run_at, clock_timestamp(), v_id, true)
  on conflict on constraint schedule_run_pkey do nothing;
  update queue.schedule s set last_job_id = v_id where s.name = run_now.name;
  perform queue._audit('run_now', jsonb_build_object('name', run_now.name), p_ids => array[v_id]);
  perform queue._announce();
  return v_id;
end $$;
comment on function queue.run_now(text) is
  'Defers a schedule''s job now, in addition to its runs, even if it is disabled or its last job is'
    ' unfinished. Returns the job''s id.';

-- Returns the options without those that are JSON null, and checks that args fill every {field} in them.
-- Raises: 22023.
create or replace function queue._check_schedule_options(p_options jsonb, p_args jsonb)
returns jsonb language plpgsql stable parallel unsafe security invoker as $$
declare
  v_options jsonb := '{}'::jsonb;
  v_args jsonb := p_args || '{"scheduled_for": "2000-01-01T00:00:00+00:00"}';
  v_names constant text[] := array['queue', 'priority', 'lock', 'queueing_lock', 'deadline',
    'concurrency_key', 'concurrency_limit'];
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
      or not v_options ->> v_key = any (case v_key when 'overlap' then '{allow,skip}'::text[]
        else '{none,latest,all}'::text[] end))
    then
      perform queue._invalid(v_key || ' is not one of its values',
        'Allowed: ' || case v_key when 'overlap' then 'allow, skip.' else 'none, latest, all.' end,
        'value: ' || left((v_options -> v_key)::text, 200));
    end if;
  end loop;
  if coalesce(jsonb_typeof(v_options -> 'enabled'), 'boolean') <> 'boolean' then
    perform queue._invalid('enabled must be true or false', 'Pass a JSON boolean.');
  elsif queue._interval('max_delay', v_options -> 'max_delay') < interval '1 s' then
    perform queue._invalid('max_delay is too short',
      'Pass an interval of at least 1 second.');
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
  foreach v_key in array array['lock', 'queueing_lock', 'concurrency_key', 'idempotency_key'] loop
    if v_options ->> v_key <> '' then
      perform queue._fill(v_key, v_options ->> v_key, v_args);
    end if;
  end loop;
  -- the task may have a limit by the time of a run
  perform queue._check_concurrency(v_options ->> 'concurrency_key',
    coalesce((v_options ->> 'concurrency_limit')::integer, 1), v_options -> 'concurrency');
  perform queue._fill('concurrency_key', c ->> 'key', v_args)
    from jsonb_array_elements(v_options -> 'concurrency') c;
  return v_options || queue._check_options(v_options - (v_names || queue._schedule_keys()));
end $$;

-- Raises: 22023, always.
create or replace function queue._no_schedule(name text)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  perform queue._invalid('no such schedule', 'queue.schedules lists them.', 'name: ' || left(name, 200));
end $$;

-- Records that a run was skipped, and why.
-- Locks: the caller holds the admission lock.
create or replace function queue._note_skipped(p_name text, p_run_at timestamptz, p_skipped text,
  p_detail text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  insert into queue.schedule_run (name, run_at, decided_at, is_manual, skipped, detail)
  values (p_name, p_run_at, clock_timestamp(), false, p_skipped, p_detail)
  on conflict on constraint schedule_run_pkey do nothing;
end $$;

-- Prepares a change of a schedule. Its due_at may not lie before the cursor's, as it could after the clock
-- was set back.
-- Locks: the admission lock, waited for.
create or replace function queue._lock_schedules()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._lock_admission(true);
  perform queue._rewind_due_mark();
end $$;

-- Makes admission check paused schedules again.
-- Locks: the caller holds the admission lock.
create or replace function queue._resume_schedules()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.schedule s set due_at = clock_timestamp() where s.reason = 'paused' and s.due_at is not null;
end $$;

-- Invariants of schedules, for queue.check().
create or replace function queue._check_schedules()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'a schedule that is never checked'::text, null::bigint, format('%s: due %s', s.name, s.due_at)
    from queue.schedule s cross join queue.cursor_now k
    where s.is_enabled and (s.due_at is null or s.due_at < least(k.due_at, clock_timestamp()));
  return query
    select 'a schedule whose next run has been'::text, null::bigint, format('%s: %s', s.name, s.next_run_at)
    from queue.schedule s where s.next_run_at <= s.last_run_at;
end $$;

-- admit/shares.sql
-- Shares take turns by weight within a queue and priority (start-time fair queueing).
--
-- A ready job of a share has a tag, and jobs are claimed in the order of tags, then of ids. The tag is the
-- later of two: how far its share has come (queue.share_tag), and the virtual time, which is the tag of the
-- first ready job. Each job advances its share by 1 / weight. So a share with few jobs gets its turn at once,
-- a share with many jobs waits only behind its own jobs, and fetch just reads its index: the tag is stored in
-- queue.active_job.deadline, which determines the order in a lane. Tags are times before the year 1, which no
-- deadline can be; 0.1 s of them is one job of weight 1.
--
-- A queue and priority has tags from its first job with a share on; its lanes then have tag_base. Jobs
-- without a share form one share, ''. Jobs that were ready before get their tags slice by slice (_retag).
-- Jobs that wait for a slot of a key have tags of this key, by the same rule: so shares also take turns at
-- slots, and a share whose jobs wait at one key does not fall behind elsewhere.
-- A job that leaves its lane unclaimed keeps its tag (queue.job_override) for its return, or gives it back to
-- its share (_return_tags).
-- Everything here runs under the admission lock.

-- Returns the tags of jobs that become ready in lanes, or, with p_keys, begin to wait for a slot of a key; in
-- a lane without tags the places that were passed. p_places: the order of jobs within a share, before that of
-- ids. It looks up the first job of each share and computes the tags of the others, so it costs as much as a
-- sort. Of the lanes of a queue and priority only some may have jobs that still have to get new tags (_retag
-- takes one lane after the other), but their shares have the same tags.
-- Locks: the caller holds the admission lock. No wake-up can be lost: the caller makes the jobs ready.
create or replace function queue._tags(p_ids bigint[], p_lanes integer[], p_places timestamptz[],
  p_keys text[] default null)
returns timestamptz[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_groups record;
  v_tags timestamptz[];
begin
  select array_agg(g.queue) as queues, array_agg(g.priority) as priorities, array_agg(g.key) as keys,
    array_agg(queue._virtual_time(g.queue, g.priority, g.key)) as times,
    array_agg(g.until - interval '1 microsecond') as ends
  into v_groups
  from (
    select l.queue, l.priority, coalesce(u.key, '') as key,
      min(coalesce(l.retag_from, '0001-01-01 00:00+00')) as until
    from unnest(p_lanes, p_keys) u (lane, key) join queue.lane l on l.lane = u.lane
    where l.tag_base is not null
    group by 1, 2, 3) g;
  if v_groups.queues is null then
    return p_places;
  end if;
  perform queue._forget_tags(g.queue, g.priority, g.key, g.at, 2 * cardinality(p_ids) + 10)
  from unnest(v_groups.queues, v_groups.priorities, v_groups.keys, v_groups.times)
    g (queue, priority, key, at);
  with jobs as materialized (
    select u.n, u.id, u.place, g.queue, g.priority, g.key, g.at, g.last as end,
      coalesce(j.share, '') as share, j.tag
    from unnest(p_ids, p_lanes, p_places, p_keys) with ordinality u (id, lane, place, key, n)
    cross join lateral (
      select l.queue, l.priority, l.tag_base is not null as has_tags from queue.lane l
      where l.lane = u.lane offset 0) l
    left join lateral (
      select g.*
      from unnest(v_groups.queues, v_groups.priorities, v_groups.keys, v_groups.times, v_groups.ends)
        g (queue, priority, key, at, last)
      where l.has_tags and g.queue = l.queue and g.priority = l.priority
        and g.key = coalesce(u.key, '')) g on true
    cross join lateral (
      select j.options ->> 'share' as share, case when p_keys is null then j.tag end as tag
      from queue.job_now j where j.id = u.id offset 0) j),
  numbered as (
    select j.*, row_number() over w as no,
      count(*) over (partition by j.queue, j.priority, j.key, j.share) as n_of_share
    from jobs j where j.queue is not null and j.tag is null
    window w as (partition by j.queue, j.priority, j.key, j.share order by j.place, j.id)),
  first as (
    select n.*, case when n.no = 1 then queue._tag_step(n.share) end as step, o.tid, o.last
    from numbered n
    left join lateral (
      select t.ctid as tid, t.tag as last from queue.share_tag t
      where n.no = 1 and t.queue = n.queue and t.priority = n.priority and t.key = n.key and t.share = n.share
      order by t.tag desc limit 1) o on true),
  tagged as materialized (
    select f.*, greatest(f.at, max(f.last) over s) as start, max(f.step) over s as step_of_share
    from first f window s as (partition by f.queue, f.priority, f.key, f.share)),
  gone as (
    delete from queue.share_tag t
    where t.ctid = any (array(select t.tid from tagged t where t.tid is not null))),
  kept as (
    insert into queue.share_tag (queue, priority, key, share, tag)
    select t.queue, t.priority, t.key, t.share,
      least(t.start + t.n_of_share * t.step_of_share * interval '1 microsecond', t.end)
    from tagged t where t.no = 1)
  select array_agg(x.tag order by x.n) into v_tags
  from (
    select t.n, least(t.start + (t.no - 1) * t.step_of_share * interval '1 microsecond', t.end) as tag
    from tagged t
    union all
    -- at most a hundred turns before the virtual time, so that this does not go back further
    select j.n, least(greatest(j.tag, j.at - interval '10 s'), j.last)
    from (
      select j.*, coalesce((
        select t.tag from queue.share_tag t
        where t.queue = j.queue and t.priority = j.priority and t.key = j.key and t.share = j.share
        order by t.tag desc limit 1), j.at) as last
      from jobs j where j.queue is not null and j.tag is not null) j
    union all
    select j.n, j.place from jobs j where j.queue is null) x;
  return v_tags;
end $$;

-- Deletes tags of shares before the virtual time, which no longer have an effect. Each call of _tags deletes
-- up to twice as many as it can add.
-- Locks: the caller holds the admission lock. No wake-up can be lost: no job changes.
create or replace function queue._forget_tags(p_queue text, p_priority integer, p_key text, p_at timestamptz,
  p_most integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.share_tag t
  where t.ctid = any (array(
    select t.ctid from queue.share_tag t
    where t.queue = p_queue and t.priority = p_priority and t.key = p_key and t.tag < p_at
    order by t.tag limit p_most));
end $$;

-- The tag of the first job that is ready in a queue and priority, or that waits for a slot of a key there. If
-- there is no such job, the greatest tag of any of its shares, so that all shares start again together.
create or replace function queue._virtual_time(p_queue text, p_priority integer, p_key text)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_at timestamptz;
begin
  select greatest(max(l.tag_base), coalesce(min(f.deadline), (
      select t.tag from queue.share_tag t
      where t.queue = p_queue and t.priority = p_priority and t.key = p_key order by t.tag desc limit 1)))
  into v_at
  from queue.lane l
  left join lateral (
    select f.deadline
    from (
      (select aj.deadline from queue.active_job aj
       where p_key = '' and not l.is_idle and aj.lane = l.lane
         and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id) and aj.deadline >= l.tag_base
         and aj.claim is null
       order by aj.deadline, aj.id limit 1)
      union all
      (select w.deadline from queue.waiting w
       where p_key <> '' and w.reason = 'slot' and w.key = p_key and w.lane = l.lane
         and w.deadline >= l.tag_base
       order by w.deadline, w.id limit 1)) f
    where f.deadline < coalesce(l.retag_from, '0001-01-01 00:00+00')) f on true
  where l.queue = p_queue and l.priority = p_priority and l.tag_base is not null;
  return v_at;
end $$;

-- How far one job advances a share, in microseconds of tags. The longest pattern that matches the share gives
-- the weight.
create or replace function queue._tag_step(p_share text)
returns double precision language plpgsql stable parallel safe security invoker as $$
declare
  v_weight double precision;
begin
  select c.weight into v_weight from queue.share_config c where c.pattern = p_share;
  if v_weight is null then
    select c.weight into v_weight from queue.share_config c
    where right(c.pattern, 1) = '*' and starts_with(p_share, left(c.pattern, -1)) and p_share <> ''
    order by length(c.pattern) desc limit 1;
  end if;
  return round(100000 / coalesce(v_weight, 1));
end $$;

-- The tag that puts a job first among the jobs that wait for a slot of a key in a lane, because it was ready
-- before them; in a lane without tags the place that was passed.
create or replace function queue._front_tag(p_key text, p_lane integer, p_place timestamptz)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
begin
  if p_place >= '0001-01-01 00:00+00' then
    return p_place;
  end if;
  return (
    select least(
      (select w.deadline from queue.waiting w
       where w.reason = 'slot' and w.key = p_key and w.lane = p_lane order by w.deadline, w.id limit 1)
        - interval '1 microsecond',
      queue._virtual_time(l.queue, l.priority, p_key))
    from queue.lane l where l.lane = p_lane);
end $$;

-- Keeps the tag of a job that leaves its lane unclaimed, so that it keeps its place.
-- Locks: the caller holds the admission lock and the job's row of queue.active_job. No wake-up can be lost:
-- no job becomes ready.
create or replace function queue._keep_tag(p_id bigint, p_place timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_place < '0001-01-01 00:00+00' then
    insert into queue.job_override as s (id, tag) values (p_id, p_place)
    on conflict on constraint job_override_pkey do update set tag = excluded.tag;
  end if;
end $$;

-- Moves shares back for jobs that will not start there: they have ended, or go to another queue or priority.
-- Locks: the caller holds the admission lock; the jobs are in no lane. No wake-up can be lost: no job becomes
-- ready.
create or replace function queue._return_tags(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_share record;
begin
  for v_share in
    select x.queue, x.priority, x.share, count(*) * queue._tag_step(x.share) as way
    from (
      select j.queue, j.priority, coalesce(j.options ->> 'share', '') as share
      from unnest(p_ids) u (id)
      cross join lateral (
        select j.queue, j.priority, j.options, j.tag from queue.job_now j where j.id = u.id offset 0) j
      where j.tag is not null) x
    group by x.queue, x.priority, x.share
  loop
    update queue.share_tag t set tag = greatest(t.tag - v_share.way * interval '1 microsecond',
        queue._virtual_time(v_share.queue, v_share.priority, ''))
    where t.ctid = any (array(
      select t.ctid from queue.share_tag t
      where t.queue = v_share.queue and t.priority = v_share.priority and t.key = ''
        and t.share = v_share.share
      order by t.tag desc limit 1));
  end loop;
  update queue.job_override s set tag = null where s.id = any (p_ids) and s.tag is not null;
end $$;

-- Starts tags in the lanes of a queue and priority, or, after a change of weights, new tags that lie before
-- the old ones. _retag gives them to the jobs that are ready there; the cursor says that there is more to do.
-- (After 2,700 changes no room is left before the old tags; then a change applies only to new jobs.)
-- Locks: the caller holds the admission lock. No wake-up can be lost: jobs with old tags stay ready.
create or replace function queue._begin_tags(p_queue text, p_priority integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.lane l set tag_base = coalesce(l.tag_base - interval '1 year', '2000-01-01 00:00+00 BC'),
    retag_from = coalesce(l.tag_base, '0001-01-01 00:00+00')
  where l.queue = p_queue and l.priority = p_priority and l.kind < 2/* lane_crashed */
    and (l.tag_base is null or l.tag_base > '4700-01-01 00:00+00 BC');
  if found then
    delete from queue.share_tag t
    where t.queue = p_queue and t.priority = p_priority;
    update queue.cursor k set has_backlog = true
    where k.tick = (select max(m.tick) from queue.cursor m) and not k.has_backlog;
  end if;
end $$;

-- The deadline of a job with this place in a lane.
create or replace function queue._deadline_of(p_id bigint, p_place timestamptz)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
begin
  if p_place >= '0001-01-01 00:00+00' then
    return p_place;
  end if;
  return (
    select coalesce(j.deadline, 'infinity') from queue.job_now j where j.id = p_id);
end $$;

-- admit/lanes.sql
-- Lanes: the place of a ready job in queue.active_job. Everything here runs under the admission lock.
-- Tests: admit/admission.sql, work/fetch.sql.

-- Computes the place of jobs in queue.active_job: lane, order key, flags and attempts so far, in the order of
-- ids. Creates missing lanes. all_flags: the flags that any of them has; is_low: one lies below its lane's
-- low mark; has_tags: one goes to a lane with tags, where the deadline is not its place (admit/shares.sql).
-- The flag mutex stands for the semaphore 'm' || lock, which ordered jobs of a mixed lock use too.
-- offset 0 keeps the planner from repeating a look-up at each use of its result.
create or replace function queue._queue_entries(
  p_ids bigint[], out ids bigint[], out lanes integer[], out deadlines timestamptz[], out flags smallint[],
  out attempts smallint[],
  out all_flags integer, out is_low boolean, out has_tags boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_queues text[];
  v_priorities integer[];
  v_kinds smallint[];
  v_high_need_id bigint := coalesce(pg_sequence_last_value('queue.needed_seq'), 0);
  v_is_complete boolean;
  v_begins boolean[];  -- it has a share, and its lanes have no tags yet
begin
  for v_pass in 1 .. 2 loop
    select array_agg(x.id), array_agg(x.deadline), array_agg(x.flags), array_agg(x.attempts),
      array_agg(x.queue), array_agg(x.priority), array_agg(x.kind), array_agg(x.lane),
      bool_and(x.lane is not null and not x.begins_tags), bit_or(x.flags), bool_or(x.is_low),
      array_agg(x.begins_tags), bool_or(x.tag_base is not null)
    into ids, deadlines, flags, attempts, v_queues, v_priorities, v_kinds, lanes, v_is_complete, all_flags,
      is_low, v_begins, has_tags
    from (
      select x.id, x.deadline, (x.flags | coalesce(l.extra_flags, 0))::smallint as flags, x.attempts, x.queue,
        x.priority, x.kind, l.lane, l.tag_base,
        x.has_share and l.tag_base is null and x.kind < 2/* lane_crashed */ as begins_tags,
        l.is_idle or (x.deadline, x.id) < (l.low_deadline, l.low_id) as is_low
      from (
        select y.id, y.deadline, y.queue, y.priority, y.attempts, y.flags | y.mixed as flags,
          y.options is not null and y.options ? 'share' as has_share,
          (case when y.has_crashed then 2/* lane_crashed */
                when (y.flags | y.mixed) & (2/* mutex */ | 4/* keys */ | 64/* expires */ | 256/* until_start */
                  | 8192/* until_finish */) <> 0 or y.flags & 8/* needs */ <> 0
                  and queue._needs_mode(y.options) & 1/* any */ <> 0
                  or exists (select from queue.queue_config c
                    where c.queue = y.queue and (c.max_running is not null or c.rate_limit is not null))
                then 1/* lane_limited */ else 0/* lane_plain */ end)::smallint as kind
        from (
          select j.id, coalesce(j.deadline, 'infinity') as deadline, j.queue, j.priority,
            least(j.attempts, 32766)::smallint as attempts,
            j.flags & (case when j.lock is null then 0 else 3/* lock */ end
              | 4/* keys */ | 8/* needs */ | 64/* expires */ | 128/* lease */ | 256/* until_start */ | 512/* retain */
              | 4096/* needed */ | 8192/* until_finish */ | -32768/* large */)
              | case when j.is_overridden then 2048/* overridden */ else 0 end
              | case when j.id <= v_high_need_id and (select d.job_id from queue.need d
                where d.need_id = j.id limit 1) is not null then 4096/* needed */ else 0 end as flags,
            j.options, j.crashes > 0 as has_crashed,
            case when j.flags & 1/* ordered */ <> 0
                   and (select m.id from queue.lock_member m
                     where m.lock = j.lock and m.is_mutex limit 1) is not null
                 then 2/* mutex */ else 0 end as mixed
          from (select distinct u.id from unnest(p_ids) u (id)) u
          cross join lateral (
            select j.id, j.deadline, j.queue, j.priority, j.attempts, j.flags, j.lock, j.is_overridden,
              j.options, j.crashes
            from queue.job_now j where j.id = u.id offset 0) j offset 0) y offset 0) x
      left join lateral (
        select l.lane, l.extra_flags, l.is_idle, l.low_deadline, l.low_id, l.tag_base
        from queue.lane l
        where l.queue = x.queue and l.priority = x.priority and l.kind = x.kind limit 1) l on true
      order by x.id) x;
    exit when v_is_complete is not false;
    perform queue._begin_tags(u.queue, u.priority)
    from (select distinct u.queue, u.priority from unnest(v_queues, v_priorities, v_begins)
            u (queue, priority, begins) where u.begins) u
    where not exists (select from queue.lane l
      where l.queue = u.queue and l.priority = u.priority and l.tag_base is not null);
    insert into queue.lane (lane, queue, priority, kind, paused_until, extra_flags, tag_base)
    select queue._new_lane(), u.queue, u.priority, u.kind, queue._paused_until(u.queue),
      case when exists (select from queue.queue_config c where c.queue = u.queue and c.retain is not null)
        then 512/* retain */ else 0 end,
      case when u.kind < 2/* lane_crashed */ then coalesce((select max(l.tag_base) from queue.lane l
        where l.queue = u.queue and l.priority = u.priority),
        case when u.begins then '2000-01-01 00:00+00 BC'::timestamptz end) end
    from (select u.queue, u.priority, u.kind,
            bool_or(bool_or(u.begins)) over (partition by u.queue, u.priority) as begins
          from unnest(v_queues, v_priorities, v_kinds, lanes, v_begins)
            u (queue, priority, kind, lane, begins)
          group by u.queue, u.priority, u.kind having bool_or(u.lane is null)) u;
  end loop;
end $$;

-- A number for a new lane; numbers of dropped lanes are used again.
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

-- Inserts jobs with their places into queue.active_job and lowers low marks; p_is_low: some of them need
-- that. p_has_tags: has_tags of _queue_entries; NULL: not known.
create or replace function queue._make_ready(
  p_ids bigint[], p_lanes integer[], p_deadlines timestamptz[], p_flags smallint[], p_attempts smallint[],
  p_is_low boolean default true, p_has_tags boolean default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if coalesce(p_has_tags,
    exists (select from queue.lane l where l.lane = any (p_lanes) and l.tag_base is not null)) then
    p_deadlines := queue._tags(p_ids, p_lanes, p_deadlines);
    p_is_low := true;
  end if;
  insert into queue.active_job (id, deadline, lane, attempt, flags)
  select u.id, u.deadline, u.lane, u.attempt, u.flags
  from unnest(p_ids, p_deadlines, p_lanes, p_attempts, p_flags) u (id, deadline, lane, attempt, flags);
  if p_is_low then
    perform queue._lower_marks(p_lanes, p_deadlines, p_ids);
  end if;
end $$;

-- Lowers the low marks of lanes for keys that were inserted below them, (p_deadlines[i], p_ids[i]).
-- Locks: the caller holds the admission lock.
create or replace function queue._lower_marks(p_lanes integer[], p_deadlines timestamptz[], p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.lane l
  set low_deadline = least(u.deadline, l.low_deadline), is_idle = false,
    low_id = case when (u.deadline, u.id) < (l.low_deadline, l.low_id) then u.id else l.low_id end
  from (select distinct on (u.lane) u.lane, u.deadline, u.id
        from unnest(p_lanes, p_deadlines, p_ids) u (lane, deadline, id) order by u.lane, u.deadline, u.id) u
  where l.lane = u.lane and ((u.deadline, u.id) < (l.low_deadline, l.low_id) or l.is_idle);
end $$;

-- Raises the low marks of lanes past rows that are claimed or gone.
-- Locks: the caller holds the admission lock, so that no job is made ready meanwhile. The mark must not pass
-- a row whose claim another transaction rolls back. So it stops at the first row that is unclaimed in this
-- snapshot, as such a row is.
create or replace function queue._raise_marks(p_lanes integer[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_lane record;
begin
  for v_lane in
    select l.lane, l.low_deadline, l.low_id, f.deadline, f.id, k.high_id
    from queue.lane l
    cross join queue.cursor_now k
    left join lateral (
      select aj.deadline, aj.id from queue.active_job aj
      where aj.lane = l.lane and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id) and aj.claim is null
      order by aj.deadline, aj.id limit 1) f on true
    where l.lane = any (p_lanes)
  loop
    if v_lane.id is not null then
      if v_lane.id > v_lane.low_id + 100 or v_lane.deadline > v_lane.low_deadline then
        update queue.lane l set low_deadline = v_lane.deadline, low_id = v_lane.id where l.lane = v_lane.lane;
      end if;
    elsif v_lane.high_id > v_lane.low_id + 100 or v_lane.low_deadline < 'infinity' then
      update queue.lane l set low_deadline = 'infinity', low_id = v_lane.high_id + 1
      where l.lane = v_lane.lane;
    end if;
  end loop;
end $$;

-- If there are many lanes, marks those without ready jobs, so that fetch skips them, and removes empty ones.
-- Empty lanes of quarantined jobs are always removed, because fetch is slower while one exists.
-- Locks: the caller holds the admission lock, so that no job is made ready meanwhile. Jobs whose claim is
-- uncommitted count as ready, because the claim may be rolled back.
create or replace function queue._mark_idle_lanes()
returns void language plpgsql volatile parallel unsafe security invoker set enable_bitmapscan = off as $$
declare
  v_idle integer[];
  v_are_many boolean := (select count(*) from (select from queue.lane l where not l.is_idle limit 51) l) > 50;
begin
  if v_are_many or exists (select from queue.lane l where not l.is_idle and l.kind = 2/* lane_crashed */) then
    update queue.lane l set is_idle = true
    where l.lane = any (array(
      select l.lane from queue.lane l
      where not l.is_idle and (v_are_many or l.kind = 2/* lane_crashed */)
        and (select aj.id from queue.active_job aj
             where aj.lane = l.lane and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id)
               and aj.claim is null
             order by aj.deadline, aj.id limit 1) is null
      limit 10000));
  end if;
  if (select count(*) from (select from queue.lane l where l.is_idle limit 1001) l) > 1000 then
    v_idle := array(
      select l.lane from queue.lane l
      where l.is_idle and (select aj.id from queue.active_job aj where aj.lane = l.lane limit 1) is null
        limit 10000);
    delete from queue.lane l
    where l.lane = any (v_idle)
      and l.lane <> all (array(select distinct s.lane
        from (select unnest(s.lanes) as lane from queue.semaphore s where s.lanes <> '{}') s
                               where s.lane = any (v_idle)));
  end if;
end $$;

-- admit/rates.sql
-- Rates: no window contains more starts of a key than its rate allows. Starts are numbered: k more jobs may
-- start if the start that is limit places before the k-th of them lies outside the window. A job of weight w
-- counts as w starts. Starts at one time have two rows in queue.rate_start, the first and the last of them,
-- however many they are, so that a heavy job costs no more than another. A key's first letter is its kind, as
-- in queue.semaphore.

-- When a key's start of this number was; NULL: there was none, or none that counts. A number between two rows
-- has the time of both.
create or replace function queue._rate_start_at(p_key text, p_no bigint)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_next record;
begin
  if p_no <= 0 then
    return null;
  end if;
  select r.no, r.at into v_next from queue.rate_start r
  where r.key = p_key and r.no >= p_no order by r.no limit 1;
  if v_next.no > p_no and (select r.no from queue.rate_start r
    where r.key = p_key and r.no < p_no order by r.no desc limit 1) is null then
    return null;
  end if;
  return v_next.at;
end $$;

-- How many more jobs may start at p_now under a key's rate: at most p_n. NULL: the key has no rate.
create or replace function queue._rate_room(p_key text, p_limit integer, p_per interval, p_n integer,
  p_now timestamptz)
returns integer language plpgsql stable strict parallel safe security invoker as $$
declare
  v_last record;
  v_room integer := least(p_n, p_limit);
  v_low integer := 0;
  v_middle integer;
begin
  select r.no, greatest(r.at, p_now) - p_per as horizon into v_last
  from queue.rate_start r where r.key = p_key order by r.no desc limit 1;
  while v_low < v_room loop
    v_middle := (v_low::bigint + v_room + 1) / 2;
    if queue._rate_start_at(p_key, v_last.no + v_middle - p_limit) >= v_last.horizon then
      v_room := v_middle - 1;
    else
      v_low := v_middle;
    end if;
  end loop;
  return greatest(v_room, 0);
end $$;

-- The time from which p_n more jobs may start under a key's rate; NULL for at once.
create or replace function queue._rate_opens_at(p_key text, p_limit integer, p_per interval,
  p_n integer default 1)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_at timestamptz;
begin
  select queue._rate_start_at(p_key, l.no + least(p_n, p_limit) - p_limit) + p_per into v_at
  from (select r.no from queue.rate_start r where r.key = p_key order by r.no desc limit 1) l;
  return case when v_at >= clock_timestamp() then v_at end;
end $$;

-- Records p_n starts under a key's rate, and deletes those that no window can contain any more. It keeps all of
-- the new ones, also if a heavy job counts more often than the rate allows: a greater rate may come.
-- Locks: the caller holds the admission lock. No wake-up can be lost: jobs that the rate holds back wait for
-- a time (_rate_opens_at).
create or replace function queue._count_rate_starts(p_key text, p_limit integer, p_n integer,
  p_now timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_no bigint;
  v_at timestamptz;
begin
  select r.no, r.at into v_no, v_at from queue.rate_start r where r.key = p_key order by r.no desc limit 1;
  v_no := coalesce(v_no, 0);
  insert into queue.rate_start (key, no, at)
  select p_key, n, greatest(v_at, p_now) from (select v_no + 1 union select v_no + p_n) n (n);
  perform queue._forget_rate_starts(p_key, v_no - p_limit, v_no + p_n - greatest(p_limit, p_n));
end $$;

-- Deletes a key's starts up to a number. Of several at one time it keeps the first row while the last remains
-- (_rate_start_at). The search begins after p_from, up to which all are gone, so it reads no dead rows.
-- Locks: the caller holds the admission lock. No wake-up can be lost: no window contains these starts.
create or replace function queue._forget_rate_starts(p_key text, p_from bigint, p_upto bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_upto <= 0 then
    return;
  end if;
  delete from queue.rate_start r
  where r.key = p_key and r.no >= coalesce(queue._first_rate_start(p_key, p_from), p_from)
    and r.no < queue._first_rate_start(p_key, p_upto);
end $$;

-- The row that remains as the first if a key's starts up to a number are forgotten; NULL: all remain.
create or replace function queue._first_rate_start(p_key text, p_upto bigint)
returns bigint language plpgsql stable parallel safe security invoker as $$
begin
  return coalesce(
    (select r.no from queue.rate_start r where r.key = p_key and r.no = p_upto + 1),
    (select r.no from queue.rate_start r where r.key = p_key and r.no <= p_upto order by r.no desc limit 1));
end $$;

-- The settings of configure_key for a concurrency key: by its name, else by the longest prefix*; else no row.
create or replace function queue._key_config(p_key text)
returns table (slots integer, rate_limit integer, rate_per interval)
language plpgsql stable parallel safe security invoker rows 1 as $$
begin
  return query
    select c.slots, c.rate_limit, c.rate_per from queue.key_config c
    where c.pattern = p_key
      or right(c.pattern, 1) = '*' and starts_with(p_key, left(c.pattern, -1))
    order by c.pattern = p_key desc, length(c.pattern) desc limit 1;
end $$;

-- admit/slots.sql
-- Semaphores. _refill (admit/enter_slots.sql) gives a slot that becomes free to the next job.
-- A slot is a live claim: `used` counts the claims that run under a key. It is written only under
-- the admission lock, in the transaction that makes or settles the claim. Limited lanes are claimed only
-- under the admission lock, so that the limit is hard.
--
-- Slots are taken at the claim, not before, so that a job which no worker starts holds none. For each key and
-- lane, at most as many unclaimed jobs are in queue.active_job (`ready`) as the key has free slots, so that
-- fetch does not read jobs that can't start. The others wait in queue.waiting. If fetch meets a ready job
-- whose key is full, the job goes back there. A job with several keys waits for the first full one, and holds
-- none meanwhile. Rows are replaced by newer ones and read newest first.

-- The keys of jobs by their flags: 'm' || lock and 'k' || concurrency key. n: the job's place in p_ids.
create or replace function queue._keys_of(p_ids bigint[], p_flags smallint[])
returns table (n integer, id bigint, key text, slots integer, discards boolean, weight integer,
  rate_limit integer, rate_per interval)
language plpgsql stable parallel safe security invoker rows 50 as $$
begin
  return query
    select u.n::integer, u.id, k.key, k.slots, j.discards, coalesce((k.terms ->> 'weight')::integer, 1),
      (k.terms #>> '{rate,limit}')::integer,
      case when k.terms ? 'rate' then queue._interval('per', k.terms #> '{rate,per}') end
    from unnest(p_ids, p_flags) with ordinality u (id, flags, n)
    cross join lateral (
      select j.keys, j.limits, j.lock, j.options -> 'terms' as terms,
        u.flags & 4/* keys */ <> 0 and j.options ->> 'on_limit' = 'discard' and j.claims = 0
          and not j.is_kept as discards
      from queue.job_now j where j.id = u.id offset 0) j
    cross join lateral (
      select 'm' || j.lock, 1, null::jsonb where u.flags & 2/* mutex */ <> 0 and j.lock is not null
      union all
      select 'k' || k.key, coalesce(k.slots, 2147483647), j.terms -> (k.n - 1)::integer
      from unnest(j.keys, j.limits) with ordinality k (key, slots, n)
      where u.flags & 4/* keys */ <> 0) k (key, slots, terms)
    where u.flags & 6/* slots */ <> 0;
end $$;

-- Creates missing semaphores and sets limits and rates: configure_key decides, else the newest of the jobs
-- with one key. Returns the keys that jobs may wait for and whose limit has grown, or whose rate has changed.
-- Locks: the caller holds the admission lock.
create or replace function queue._set_slots(p_keys text[], p_slots integer[], p_ids bigint[],
  p_rate_limits integer[] default null, p_rate_pers interval[] default null)
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_changed text[];
  v_is_configured boolean := exists (select from queue.key_config);
begin
  with asked as materialized (
    select distinct on (u.key) u.key, coalesce(c.slots, u.slots) as slots, u.id,
      coalesce(c.rate_limit, u.rate_limit) as rate_limit, coalesce(c.rate_per, u.rate_per) as rate_per
    from unnest(p_keys, p_slots, p_ids, p_rate_limits, p_rate_pers) u (key, slots, id, rate_limit, rate_per)
    left join lateral (
      select c.* from queue._key_config(substr(u.key, 2)) c
      where v_is_configured and left(u.key, 1) = 'k') c on true
    order by u.key, u.id desc),
  old as materialized (
    select a.key, a.slots, a.rate_limit, a.rate_per, a.id, o.tid, o.slots as old_slots, o.used, o.lanes,
      o.ready, o.waiting, o.lows, o.low_deadlines,
      (o.rate_limit, o.rate_per) is distinct from (a.rate_limit, a.rate_per) as has_other_rate
    from asked a
    left join lateral (
      select s.ctid as tid, s.slots, s.rate_limit, s.rate_per, s.limit_id, s.used, s.lanes, s.ready,
        s.waiting, s.lows, s.low_deadlines
      from queue.semaphore s where s.key = a.key order by s.tick desc limit 1) o on true
    where o.slots is null or o.limit_id <= a.id
      and (o.slots <> a.slots or o.rate_limit is distinct from a.rate_limit
           or o.rate_per is distinct from a.rate_per)),
  gone as (
    delete from queue.semaphore s where s.ctid = any (array(select o.tid from old o))),
  made as (
    insert into queue.semaphore (key, tick, slots, rate_limit, rate_per, limit_id, used, lanes, ready,
      waiting, lows, low_deadlines)
    select o.key, nextval('queue.tick_seq'), o.slots, o.rate_limit, o.rate_per, o.id, coalesce(o.used, 0),
      coalesce(o.lanes, '{}'), coalesce(o.ready, '{}'), coalesce(o.waiting, '{}'), coalesce(o.lows, '{}'),
      coalesce(o.low_deadlines, '{}')
    from old o)
  select array_agg(o.key) into v_changed from old o
  where o.lanes <> '{}' and (o.slots > o.old_slots or o.has_other_rate);
  return v_changed;
end $$;

-- How many jobs with a key could start at p_now, at most: by its free slots, and by its rate. A heavy job needs
-- room in both by itself: its weight counts as at most the limit in one, and at most the rate in the other.
create or replace function queue._key_room(p_key text, p_free integer, p_rate_limit integer,
  p_rate_per interval, p_now timestamptz)
returns integer language plpgsql stable parallel safe security invoker as $$
begin
  if p_rate_limit is null or p_free <= 0 then
    return p_free;
  end if;
  return queue._rate_room(p_key, p_rate_limit, p_rate_per, p_free, p_now);
end $$;

-- If jobs wait for keys whose rate allows no more starts now, writes the time of the next start into the row
-- of the first job of each lane; _admit_due then gives them their slots. If the rate allows one again since
-- the caller looked, that time is now.
-- Locks: the caller holds the admission lock.
-- Why no wake-up is lost: a function that takes this job out of queue.waiting returns the key for _refill,
-- which calls this function again.
create or replace function queue._await_rates(p_keys text[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  with shut as materialized (
    select w.id, coalesce(
        queue._rate_opens_at(s.key, s.rate_limit, s.rate_per, l.ready + coalesce(w.weight, 1)),
        case when l.ready + least(coalesce(w.weight, 1), s.slots)
            <= least(s.slots, 1000000000/* most_slots */) - s.used
          then clock_timestamp() end) as at
    from (select distinct u.key from unnest(p_keys) u (key)) u
    cross join lateral (
      select s.key, s.slots, s.used, s.rate_limit, s.rate_per, s.lanes, s.ready, s.waiting, s.lows,
        s.low_deadlines
      from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) s
    cross join lateral unnest(s.lanes, s.ready, s.waiting, s.lows, s.low_deadlines)
      l (lane, ready, waiting, low, low_deadline)
    cross join lateral (
      select w.id, w.weight from queue.waiting w
      where w.reason = 'slot' and w.key = s.key and w.lane = l.lane
        and (w.deadline, w.id) >= (l.low_deadline, l.low)
      order by w.deadline, w.id limit 1) w
    where s.rate_limit is not null and l.waiting > 0)
  update queue.waiting w set at = s.at + interval '1 microsecond' from shut s
  where w.id = s.id and s.at is not null;
  if found then
    perform queue._rewind_due_mark();
  end if;
end $$;

-- Adds to the counts of keys: slots in use, and per lane ready and waiting jobs. Keys and lanes may repeat;
-- an array that is NULL adds nothing. (p_low_deadlines, p_lows): for lanes with fewer waiting jobs,
-- the point below which none waits (one for each lane); for others, a job that has begun to wait.
-- p_newest: the newest jobs with these keys whose limits have been read (_set_slots).
-- Locks: the caller holds the admission lock.
create or replace function queue._add_slots(
  p_keys text[], p_lanes integer[], p_used integer[], p_ready integer[], p_waiting integer[], p_lows bigint[],
  p_low_deadlines timestamptz[] default null, p_newest bigint[] default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  with added as (
    select u.key, coalesce(sum(u.used), 0)::integer as used, array_agg(u.lane) as lanes,
      array_agg(u.ready) as ready,
      array_agg(u.waiting) as waiting, array_agg(u.low) as lows, array_agg(u.low_deadline) as low_deadlines,
      max(u.newest) as newest,
      count(*) filter (where u.used <> 0 or u.ready <> 0 or u.waiting <> 0 or u.low is not null) > 0
        as has_counts
    from unnest(p_keys, p_lanes, p_used, p_ready, p_waiting, p_lows, p_low_deadlines, p_newest)
      u (key, lane, used, ready, waiting, low, low_deadline, newest)
    group by u.key),
  old as materialized (
    select a.key, a.used, a.lanes, a.ready, a.waiting, a.lows, a.low_deadlines, o.tid, o.slots,
      greatest(o.limit_id, a.newest) as limit_id, o.rate_limit, o.rate_per,
      o.used as old_used, o.lanes as old_lanes, o.ready as old_ready, o.waiting as old_waiting,
      o.lows as old_lows, o.low_deadlines as old_low_deadlines
    from added a
    left join lateral (
      select s.ctid as tid, s.slots, s.limit_id, s.rate_limit, s.rate_per, s.used, s.lanes, s.ready,
        s.waiting, s.lows, s.low_deadlines
      from queue.semaphore s where s.key = a.key order by s.tick desc limit 1) o on true
    where a.has_counts or a.newest > o.limit_id),
  gone as (
    delete from queue.semaphore s where s.ctid = any (array(select o.tid from old o)))
  insert into queue.semaphore (key, tick, slots, limit_id, rate_limit, rate_per, used, lanes, ready, waiting,
    lows, low_deadlines)
  select o.key, nextval('queue.tick_seq'), coalesce(o.slots, 0), coalesce(o.limit_id, 0), o.rate_limit,
    o.rate_per,
    coalesce(o.old_used, 0) + o.used,
    coalesce(l.lanes, '{}'), coalesce(l.ready, '{}'), coalesce(l.waiting, '{}'), coalesce(l.lows, '{}'),
    coalesce(l.low_deadlines, '{}')
  from old o
  cross join lateral (
    select array_agg(x.lane) as lanes, array_agg(x.ready) as ready, array_agg(x.waiting) as waiting,
      array_agg(x.low) as lows, array_agg(x.low_deadline) as low_deadlines
    from (
      select x.lane, sum(x.ready)::integer as ready, sum(x.waiting)::integer as waiting,
        case when sum(x.waiting) < sum(x.old_waiting)
          then coalesce(max(x.low) filter (where x.is_new), max(x.low)) else min(x.low) end as low,
        case when sum(x.waiting) < sum(x.old_waiting)
          then coalesce(max(x.low_deadline) filter (where x.is_new), max(x.low_deadline))
          else min(x.low_deadline) end as low_deadline
      from (
        select u.lane, u.ready, u.waiting, u.waiting as old_waiting, false as is_new,
          case when u.waiting > 0 then u.low end as low,
          case when u.waiting > 0 then u.low_deadline end as low_deadline
        from unnest(o.old_lanes, o.old_ready, o.old_waiting, o.old_lows, o.old_low_deadlines)
          u (lane, ready, waiting, low, low_deadline)
        union all
        select u.lane, coalesce(u.ready, 0), coalesce(u.waiting, 0), 0, true, u.low, u.low_deadline
        from unnest(o.lanes, o.ready, o.waiting, o.lows, o.low_deadlines)
          u (lane, ready, waiting, low, low_deadline)
        where u.lane is not null) x
      group by x.lane) x
    where x.ready <> 0 or x.waiting <> 0) l;
end $$;

-- Claims have ended: frees their slots and returns the keys, for _advance.
-- p_flags as in queue.active_job: queue_slot counts in its queue's max_running.
-- Locks: the caller holds the admission lock.
-- Why no wake-up is lost: each caller passes the returned keys to _advance (admit/gates.sql), which calls
-- _refill.
create or replace function queue._release_slots(p_ids bigint[], p_flags smallint[])
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_keys text[];
  v_used integer[];
begin
  select coalesce(array_agg(k.key), '{}'), coalesce(array_agg(-k.weight), '{}') into v_keys, v_used
  from queue._keys_of(p_ids, p_flags) k;
  if (select bit_or(f) from unnest(p_flags) f) & 16384/* queue_slot */ <> 0 then
    v_keys := v_keys || array(
      select 'q' || j.queue
      from unnest(p_ids, p_flags) u (id, flags)
      cross join lateral (select j.queue from queue.job_now j where j.id = u.id offset 0) j
      where u.flags & 16384/* queue_slot */ <> 0);
  end if;
  perform queue._add_slots(v_keys, null,
    v_used || array_fill(-1, array[cardinality(v_keys) - cardinality(v_used)]), null, null, null);
  return v_keys;
end $$;

-- Jobs have left queue.active_job unclaimed: reduces the ready counts of their keys. Returns the keys, for
-- _advance.
-- Locks: the caller holds the admission lock.
create or replace function queue._count_unready(p_ids bigint[], p_lanes integer[], p_flags smallint[])
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_keys record;
begin
  select array_agg(k.key) as keys, array_agg(p_lanes[k.n]) as lanes, array_agg(-k.weight) as ready into v_keys
  from queue._keys_of(p_ids, p_flags) k;
  perform queue._add_slots(v_keys.keys, v_keys.lanes, null, v_keys.ready, null, null);
  return v_keys.keys;
end $$;

-- A job has left queue.waiting, where it waited for a slot.
-- Locks: the caller holds the admission lock.
create or replace function queue._count_unwaiting(p_key text, p_lane integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_lane is not null then
    perform queue._add_slots(array[p_key], array[p_lane], null, null, array[-1], null);
  end if;
end $$;

-- Marks jobs that are taken from their slots: on_limit no longer discards them, because they return to their
-- slots, but are not admitted again.
create or replace function queue._never_discard(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  insert into queue.job_override as s (id, is_kept)
  select j.id, true from queue.job j where j.id = any (p_ids) and j.options ->> 'on_limit' = 'discard'
  on conflict on constraint job_override_pkey do update set is_kept = true;
end $$;

-- Removes unused semaphores that nobody has used since a million others were written, at most 1,000.
-- Locks: the caller holds the admission lock.
create or replace function queue._forget_semaphores()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  with gone as (
    delete from queue.semaphore s
    where s.ctid = any (array(
      select s.ctid from queue.semaphore s
      where s.used = 0 and s.lanes = '{}' and s.tick < (select q.last_value - 1000000 from queue.tick_seq q)
        and (s.rate_limit is null or not exists (select from queue.rate_start r where r.key = s.key))
      order by s.tick limit 1000))
    returning s.key)
  -- they had a rate before
  delete from queue.rate_start r using gone g where r.key = g.key;
  -- starts that no window can contain any more
  delete from queue.rate_start r
  where r.key = any (array(
    select s.key from queue.semaphore s
    where s.used = 0 and s.lanes = '{}' and s.rate_limit is not null
      and (select r.at from queue.rate_start r where r.key = s.key order by r.no desc limit 1)
        < clock_timestamp() - s.rate_per
    order by s.tick limit 100));
end $$;

-- The invariants of semaphores, for queue.check().
create or replace function queue._check_semaphores()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'slots in use without a claim'::text, null::bigint,
      format('%s: used %s, claims %s', coalesce(s.key, c.key), s.used, c.n)
    from (select distinct on (s.key) s.key, s.used from queue.semaphore s order by s.key, s.tick desc) s
    full join (
      select k.key, sum(k.weight) as n
      from (
        select k.key, k.weight
        from (select array_agg(aj.id) as ids, array_agg(aj.flags) as flags
              from (select aj.id, aj.flags from queue.active_job aj
                where aj.claim is not null and aj.flags & 6/* slots */ <> 0
                    union all
                    select h.job_id, h.flags from queue.pending_settlement h
                    where h.kind in ('ended', 'again') and h.flags & 6/* slots */ <> 0) aj) a
        cross join lateral queue._keys_of(a.ids, a.flags) k
        union all
        select 'q' || l.queue, 1 from queue.active_job aj join queue.lane l on l.lane = aj.lane
        where aj.claim is not null and aj.flags & 16384/* queue_slot */ <> 0
        union all
        select 'q' || j.queue, 1 from queue.pending_settlement h join queue.job_now j on j.id = h.job_id
        where h.kind in ('ended', 'again') and h.flags & 16384/* queue_slot */ <> 0) k
      group by k.key) c on c.key = s.key
    where coalesce(s.used, 0) <> coalesce(c.n, 0) or left(s.key, 1) = 'm' and s.used > 1;
  return query
    select x.problem, null::bigint,
      format('%s, lane %s: slots %s, used %s, ready %s (%s), waiting %s (%s), low %s (%s)', x.key, x.lane,
      x.slots, x.used, x.ready, x.is_ready, x.waiting, x.is_waiting, x.low, x.least_id)
    from (
      select case when s.ready is distinct from coalesce(aj.n, 0)
        or s.waiting is distinct from coalesce(w.n, 0) then 'counts of a key are wrong'
                  when w.n > 0 and (s.low_deadline, s.low) > (w.deadline, w.id)
                    then 'waits for a slot below the low mark'
                  when s.waiting > 0
                    and s.ready + least(coalesce(w.weight, 1), s.slots)
                      <= least(s.slots, 1000000000/* most_slots */) - s.used
                    and (queue._rate_room(s.key, s.rate_limit, s.rate_per, s.rate_limit, clock_timestamp())
                      >= s.ready + least(coalesce(w.weight, 1), s.rate_limit)) is not false
                    and not w.is_marked
                    and not exists (select from queue.pending_settlement h
                    where h.kind = 'refill' and h.payload ? s.key)
                    then 'a job waits although a slot is free' end as problem,
        coalesce(s.key, w.key, aj.key) as key, coalesce(s.lane, w.lane, aj.lane) as lane, s.slots, s.used,
        s.ready, aj.n as is_ready,
        s.waiting, w.n as is_waiting, s.low, w.id as least_id
      from (
        select s.key, s.slots, s.rate_limit, s.rate_per, s.used, l.lane, l.ready, l.waiting, l.low,
          l.low_deadline
        from (select distinct on (s.key) s.* from queue.semaphore s order by s.key, s.tick desc) s
        cross join lateral unnest(s.lanes, s.ready, s.waiting, s.lows, s.low_deadlines)
          l (lane, ready, waiting, low, low_deadline)) s
      full join (
        select w.key, w.lane, count(*) as n, (array_agg(w.id order by w.deadline, w.id))[1] as id,
          min(w.deadline) as deadline, (array_agg(w.weight order by w.deadline, w.id))[1] as weight,
          count(w.at) > 0 as is_marked
        from queue.waiting w
        where w.reason = 'slot' and w.lane is not null group by w.key, w.lane) w on w.key = s.key
          and w.lane = s.lane
      full join (
        select k.key, a.lanes[k.n] as lane, sum(k.weight) as n
        from (select array_agg(aj.id) as ids, array_agg(aj.flags) as flags, array_agg(aj.lane) as lanes
              from queue.active_job aj where aj.claim is null and aj.flags & 6/* slots */ <> 0) a
        cross join lateral queue._keys_of(a.ids, a.flags) k
        group by 1, 2) aj on aj.key = coalesce(s.key, w.key) and aj.lane = coalesce(s.lane, w.lane)) x
    where x.problem is not null;
end $$;

-- admit/retag.sql
-- Tags for jobs that were ready before the first job with a share came, or before a weight was changed.
-- Tests: admit/shares.sql, admit/shares.retag.spec.

-- Gives tags to ready jobs, and to jobs that wait for a slot, if they have no tag or one from before a change
-- of weights: to at most p_slice jobs of one lane. Returns false if no lane has such jobs.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked: the session that holds
-- a row claims the job. If it rolls back, the job stays ready, behind jobs with a tag. Keys whose waiting
-- jobs have another order now are handed over to the next admission. So no wake-up is lost.
create or replace function queue._retag(p_slice integer)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_lane record;
  v_old record;
  v_tags timestamptz[];
begin
  select l.lane, l.retag_from into v_lane from queue.lane l where l.retag_from is not null
  order by l.lane limit 1;
  if not found then
    return false;
  end if;
  select array_agg(x.id) as ids, array_agg(x.deadline) as places, array_agg(x.lane) as lanes into v_old
  from (
    select aj.id, aj.lane, aj.deadline from queue.active_job aj
    where aj.lane = v_lane.lane and aj.deadline >= v_lane.retag_from and aj.claim is null
    order by aj.deadline, aj.id limit p_slice for update skip locked) x;
  if v_old.ids is not null then
    v_tags := queue._tags(v_old.ids, v_old.lanes, v_old.places);
    update queue.active_job aj set deadline = u.tag from unnest(v_old.ids, v_tags) u (id, tag)
    where aj.id = u.id;
    perform queue._lower_marks(v_old.lanes, v_tags, v_old.ids);
    return true;
  end if;
  select array_agg(x.id) as ids, array_agg(x.deadline) as places, array_agg(x.lane) as lanes,
    array_agg(x.key) as keys
  into v_old
  from (
    select w.id, w.lane, w.deadline, w.key
    from (select distinct s.key from queue.semaphore s where v_lane.lane = any (s.lanes)) s
    cross join lateral (
      select w.id, w.lane, w.deadline, w.key from queue.waiting w
      where w.reason = 'slot' and w.key = s.key and w.lane = v_lane.lane
        and w.deadline >= v_lane.retag_from
      order by w.deadline, w.id limit p_slice) w
    limit p_slice) x;
  if v_old.ids is not null then
    v_tags := queue._tags(v_old.ids, v_old.lanes, v_old.places, v_old.keys);
    update queue.waiting w set deadline = u.tag from unnest(v_old.ids, v_tags) u (id, tag)
    where w.id = u.id and w.reason || '' = 'slot';
    perform queue._add_slots(v_old.keys, v_old.lanes, null, null, null, v_old.ids, v_tags);
    -- a lighter job may be the first now, and fit
    insert into queue.pending_settlement (job_id, kind, flags, payload)
    values (0, 'refill', 0, to_jsonb(array(select distinct k from unnest(v_old.keys) k)));
    return true;
  end if;
  update queue.lane l set retag_from = null where l.lane = v_lane.lane;
  return true;
end $$;

-- The invariants of tags, for queue.check().
create or replace function queue._check_shares()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'only some lanes of a queue and priority have tags'::text, null::bigint,
      format('%s, priority %s', l.queue, l.priority)
    from queue.lane l where l.kind < 2/* lane_crashed */
    group by l.queue, l.priority having count(distinct l.tag_base) + bool_or(l.tag_base is null)::integer > 1;
  return query
    select 'a job with a share in a lane without tags'::text, aj.id, j.options ->> 'share'
    from queue.active_job aj
    join queue.lane l on l.lane = aj.lane and l.tag_base is null and l.kind < 2/* lane_crashed */
    join queue.job j on j.id = aj.id
    where aj.claim is null and j.options ? 'share';
  return query
    select 'a tag in a lane without tags'::text, aj.id, format('lane %s', aj.lane)
    from queue.active_job aj join queue.lane l on l.lane = aj.lane
    where aj.claim is null and l.tag_base is null and aj.deadline < '0001-01-01 00:00+00';
  return query
    select 'a job with a tag whose share has none'::text, aj.id, coalesce(j.options ->> 'share', '')
    from queue.active_job aj
    join queue.lane l on l.lane = aj.lane
    join queue.job_now j on j.id = aj.id
    -- later ones are from before a change of weights, which has forgotten the tags of shares
    where aj.claim is null and aj.deadline >= l.tag_base and aj.deadline < l.tag_base + interval '1 year'
      and j.tag is null
      and not exists (
        select from queue.share_tag t
        where t.queue = l.queue and t.priority = l.priority and t.key = ''
          and t.share = coalesce(j.options ->> 'share', ''));
  return query
    select 'a share with two tags'::text, null::bigint,
      format('%s, priority %s, key %s, share %s', t.queue, t.priority, t.key, t.share)
    from queue.share_tag t group by t.queue, t.priority, t.key, t.share having count(*) > 1;
end $$;

-- admit/queue_limits.sql
-- A queue's own limits: how many of its jobs run at once, and how many start in an interval.

-- Turns the lanes of a queue with limits into limited ones, and counts its running jobs for max_running.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
-- Why no start stays uncounted: if a claim is made while the limit is being set, its row is locked and
-- skipped here, or not yet visible. So _recount_limited counts again.
create or replace function queue._limit_queue(p_queue text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_config record;
  v_running bigint[];
  v_counted bigint[];
begin
  select c.max_running, c.rate_limit into v_config from queue.queue_config c where c.queue = p_queue;
  if v_config.rate_limit is null then
    delete from queue.rate_start r where r.key = 'q' || p_queue;
  else
    perform queue._forget_rate_starts('q' || p_queue, 0, max(r.no) - v_config.rate_limit)
    from queue.rate_start r where r.key = 'q' || p_queue having count(*) > 0;
  end if;
  if v_config.max_running is not null or v_config.rate_limit is not null then
    update queue.lane l set kind = 1/* lane_limited */ where l.queue = p_queue and l.kind = 0/* lane_plain */;
  end if;
  if v_config.max_running is not null then
    v_running := array(
      select aj.id from queue.lane l join queue.active_job aj on aj.lane = l.lane
      where l.queue = p_queue and aj.claim is not null and aj.flags & 16384/* queue_slot */ = 0);
    v_counted := array(select aj.id from queue.active_job aj
      where aj.id = any (v_running) and aj.claim is not null for update skip locked);
    update queue.active_job aj set flags = aj.flags | 16384/* queue_slot */ where aj.id = any (v_counted);
    perform queue._add_slots(array['q' || p_queue], null, array[cardinality(v_counted)], null, null, null);
    if cardinality(v_counted) < cardinality(v_running) then
      update queue.queue_config c set limited_at = clock_timestamp(), waits_for = null
      where c.queue = p_queue;
    end if;
  end if;
end $$;

-- Counts the running jobs for max_running again after a limit was set: once that is committed, and once every
-- transaction has ended that may have seen the old lanes, or after a minute. It does not count each time,
-- because counting reads everything that is ready in the queue.
-- Locks: the caller holds the admission lock, as does a session that sets limits until its transaction ends;
-- rows of queue.active_job by skip locked.
create or replace function queue._recount_limited()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_config record;
begin
  for v_config in
    select c.queue, c.waits_for, c.limited_at from queue.queue_config c
    where c.limited_at is not null and c.xmin <> pg_current_xact_id()::xid
  loop
    if v_config.waits_for is null then
      update queue.queue_config c
      set waits_for = queue._virtual_transactions() where c.queue = v_config.queue;
    elsif v_config.limited_at > clock_timestamp() - interval '1 minute'
      and exists (select from pg_locks l where l.locktype = 'virtualxid'
        and l.virtualtransaction = any (v_config.waits_for)) then
      continue;
    else
      update queue.queue_config c set limited_at = null, waits_for = null where c.queue = v_config.queue;
    end if;
    perform queue._limit_queue(v_config.queue);
  end loop;
end $$;

-- Whether a queue's max_running or rate allows no start now.
create or replace function queue._is_queue_full(p_queue text)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (select from queue.queue_config c where c.queue = p_queue
    and (c.max_running is not null or c.rate_limit is not null))
    and queue._queue_room(p_queue, 1, clock_timestamp()) = 0;
end $$;

-- How many jobs, at most p_n, a queue's max_running and rate allow to start at p_now.
create or replace function queue._queue_room(p_queue text, p_n integer, p_now timestamptz)
returns integer language plpgsql stable parallel safe security invoker as $$
declare
  v_config record;
  v_room integer := p_n;
begin
  select c.max_running, c.rate_limit, c.rate_per into v_config from queue.queue_config c
  where c.queue = p_queue;
  if v_config.max_running is not null then
    v_room := least(v_room, v_config.max_running
      - coalesce((select s.used from queue.semaphore s where s.key = 'q' || p_queue
        order by s.tick desc limit 1), 0));
  end if;
  if v_config.rate_limit is not null then
    v_room := queue._rate_room('q' || p_queue, v_config.rate_limit, v_config.rate_per, v_room, p_now);
  end if;
  return greatest(v_room, 0);
end $$;

-- When a queue's rate allows the next start; NULL for at once.
create or replace function queue._next_start(p_queue text)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_at timestamptz;
begin
  select queue._rate_opens_at('q' || p_queue, c.rate_limit, c.rate_per) into v_at
  from queue.queue_config c where c.queue = p_queue and c.rate_limit is not null;
  return v_at;
end $$;

-- Records starts of a queue's jobs: in its rate, at p_now, and in its max_running. Returns the jobs that
-- count in the latter.
-- Locks: the caller holds the admission lock.
create or replace function queue._count_starts(p_queue text, p_ids bigint[], p_now timestamptz)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_config record;
begin
  select c.max_running, c.rate_limit into v_config from queue.queue_config c where c.queue = p_queue;
  if v_config.rate_limit is not null then
    perform queue._count_rate_starts('q' || p_queue, v_config.rate_limit, cardinality(p_ids), p_now);
  end if;
  if v_config.max_running is null then
    return '{}'::bigint[];
  end if;
  perform queue._add_slots(array['q' || p_queue], null, array[cardinality(p_ids)], null, null, null);
  return p_ids;
end $$;

-- admit/locks.sql
-- Locks: who has the turn. queue.lock_member holds every unfinished job that has a lock. Everything here runs
-- under the admission lock. join_locks.sql shows that some member always has the turn.
--
-- ordered: the first member by id has the turn, and keeps it until it has ended, even while it waits. The
-- search for the next member starts after the id of the one that ended, so that dead rows before it cost
-- nothing. A job is late if it joins when a member with a greater id exists (its transaction committed late,
-- it is retried, or the other took the lock on a retry). It comes before the members that wait, and takes the
-- turn of a younger one unless that one runs (_give_turn_to_older). is_late keeps it findable until it has
-- had its turn.
-- mutex: a member that never waits for its turn. It takes the semaphore 'm' || lock (admit/slots.sql), and so
-- do ordered jobs of a mixed lock, which is a lock with mutex members. An ordered job waits for every older
-- member, so in a mixed lock only the first of all members can have the turn.
-- A subquery with limit 1 finds out whether a lock is mixed: an EXISTS may be planned as a hash of all mutex
-- members of all locks.
-- In a mixed lock has_turn says which ordered job has the turn. In other locks it is written only if the
-- job's place does not show it: a job in queue.active_job has the turn.

-- Takes jobs that only their lock holds up. Returns those that have the turn, and marks the others as passed.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: _leave_locks sends a passed member on
-- when its turn comes.
create or replace function queue._wait_for_turn(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_pass bigint[];
  v_mark bigint[];
begin
  select array_agg(u.id order by u.id) filter (where m.id is null or m.has_turn),
    array_agg(u.id) filter (where not m.has_turn and not m.is_passed)
  into v_pass, v_mark
  from unnest(p_ids) u (id)
  cross join lateral (
    select j.lock from queue.job_now j where j.id = u.id offset 0) j
  left join lateral (
    select m.id, m.has_turn, m.is_passed
    from queue.lock_member m
    where m.lock = j.lock and m.id = u.id and not m.is_mutex offset 0) m on true;
  if v_mark is not null then
    update queue.lock_member m set is_passed = true where m.ctid = any (queue._members(v_mark));
  end if;
  return v_pass;
end $$;

-- Records that jobs which leave queue.active_job unfinished keep their turn.
create or replace function queue._keep_turns(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.lock_member m set has_turn = true, is_late = false
  where m.ctid = any (queue._members(p_ids)) and not m.is_mutex and (not m.has_turn or m.is_late);
end $$;

-- Removes ended jobs from their locks and gives the turn to the next. p_had_turn: they had it. Returns the
-- jobs that have the turn now, and that nothing else holds up.
-- Locks: the caller holds the admission lock. Other members may have ended at the same time: these are in
-- queue.finished, and are skipped.
-- Why no wake-up is lost: each caller passes the returned jobs to _advance, which sends them on.
create or replace function queue._leave_locks(p_ids bigint[], p_had_turn boolean)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
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
  -- offset 0 and the conditions inside: look for the next of a lock once, from the one that had the turn
  turned as materialized (
    select g.lock, g.id, x.is_mixed
    from gone g
    cross join lateral (
      select g.is_mutex or (select m.id from queue.lock_member m
        where m.lock = g.lock and m.is_mutex limit 1) is not null as is_mixed offset 0) x
    where p_had_turn or g.has_turn or x.is_mixed),
  next as materialized (
    select t.lock, n.id, n.is_passed, n.is_late, t.is_mixed, case when l.id < n.id
      or n.id is null then l.id end as late_id
    from turned t
    left join lateral (
      select m.id from queue.lock_member m
      where not t.is_mixed and m.lock = t.lock and m.is_late and m.id <> t.id
        and (select f.id from queue.finished f where f.id = m.id) is null
      order by m.id limit 1) l on true
    left join lateral (
      select m.id, m.is_passed, m.is_late from queue.lock_member m
      where not t.is_mixed and m.lock = t.lock and m.id > t.id
        and (select f.id from queue.finished f where f.id = m.id) is null
      order by m.id limit 1) n on true)
  select array_agg(n.id) filter (where n.is_passed and n.late_id is null),
    array_agg(n.id) filter (where (n.is_late or not n.is_passed) and n.late_id is null),
    array_agg(n.lock) filter (where n.is_mixed), array_agg(n.lock) filter (where n.late_id is not null),
    array_agg(n.late_id) filter (where n.late_id is not null)
  into v_pass, v_wait, v_mixed, v_late_locks, v_late_ids
  from next n;
  if v_late_ids is not null then
    v_wait := v_wait || v_late_ids;
    v_pass := v_pass || array(
      select u.id from unnest(v_late_locks, v_late_ids) u (lock, id)
      cross join lateral (select m.is_passed from queue.lock_member m
        where m.lock = u.lock and m.id = u.id offset 0) m where m.is_passed);
  end if;
  if v_wait is not null then
    perform queue._keep_turns(v_wait);
  end if;
  if v_mixed is not null then
    v_pass := v_pass || queue._next_mixed(array(select distinct u.lock from unnest(v_mixed) u (lock)));
  end if;
  return v_pass;
end $$;

-- In mixed locks where no job has the turn, gives it to the first member if that is an ordered job. Returns
-- those that can proceed at once.
create or replace function queue._next_mixed(p_locks text[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_pass bigint[];
begin
  with next as materialized (
    select f.ctid, f.id, f.is_passed
    from unnest(p_locks) u (lock)
    cross join lateral (
      select m.ctid, m.id, m.is_mutex, m.is_passed
      from queue.lock_member m
      where m.lock = u.lock
      order by m.id limit 1) f
    where not f.is_mutex
      and (select m.lock from queue.lock_member m where m.lock = u.lock and m.has_turn limit 1) is null),
  turned as (
    update queue.lock_member m set has_turn = true, is_late = false
    where m.ctid = any (array(select n.ctid from next n)))
  select array_agg(n.id order by n.id) filter (where n.is_passed) into v_pass from next n;
  return v_pass;
end $$;

-- The ctids of jobs' rows in queue.lock_member: with these the planner can read the rows only in one way.
-- Locks: none; the caller holds the admission lock, so that the rows do not move meanwhile.
create or replace function queue._members(p_ids bigint[])
returns tid[] language plpgsql stable parallel safe security invoker as $$
begin
  return array(
    select m.ctid from unnest(p_ids) u (id)
    cross join lateral (
      select j.lock from queue.job_now j where j.id = u.id offset 0) j
    cross join lateral (select m.ctid from queue.lock_member m
      where m.lock = j.lock and m.id = u.id offset 0) m);
end $$;

-- The current locks of jobs.
create or replace function queue._locks_of(p_ids bigint[])
returns text[] language plpgsql stable parallel safe security invoker as $$
begin
  return array(
    select distinct j.lock from unnest(p_ids) u (id)
    cross join lateral (select j.lock from queue.job_now j where j.id = u.id offset 0) j
    where j.lock is not null);
end $$;

-- The invariants of locks, for queue.check().
create or replace function queue._check_locks()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'finished, but still a member of a lock'::text, m.id, m.lock
    from queue.lock_member m join queue.finished f on f.id = m.id
    where not exists (select from queue.pending_settlement h where h.job_id = m.id);
  return query
    select 'a lock that runs two jobs'::text, min(aj.id), j.lock
    from queue.active_job aj join queue.job_now j on j.id = aj.id
    where aj.claim is not null and j.lock is not null group by j.lock having count(*) > 1;
  -- no job may have the turn of a mixed lock while its first member is a mutex job
  return query
    select case when x.turns > 1 then 'a lock with more than one job at its turn'
      else 'a free lock with a job that waits for its turn' end,
      x.first_id, x.lock
    from (
      select m.lock, min(m.id) as first_id, count(*) filter (where not m.is_mutex) as ordered,
        bool_or(m.is_mutex) as is_mixed,
        (array_agg(m.is_mutex order by m.id))[1] as mutex_is_first,
        count(*) filter (where not m.is_mutex and (m.has_turn or aj.id is not null or w.reason = 'slot'))
          as turns,
        count(h.job_id) as unsettled
      from queue.lock_member m
      left join queue.active_job aj on aj.id = m.id
      left join queue.waiting w on w.id = m.id
      left join (select distinct h.job_id from queue.pending_settlement h
        where h.kind in ('ended', 'again')) h on h.job_id = m.id
      group by m.lock) x
    where x.turns > 1 or x.turns = 0 and x.ordered > 0 and not x.mutex_is_first and x.unsettled = 0;
end $$;

-- admit/dequeue.sql
-- Leaving the gates: takes jobs out of the places where they wait, and ends those that no claim holds.
-- Tests: operate/change.sql, operate/delete.sql, work/retention.sql.

-- Takes an unfinished job that does not run out of its place, with its slot and ready counts, but not out of
-- its lock. place: where it was (ready, or a reason of queue.waiting, turn, again, or log: it is not admitted
-- yet and stays there, so that only queue.job_override can change it); NULL if it runs, is finished, another
-- transaction holds its row, or the end of its claim is not settled yet. keys: semaphores in which that left
-- room, for _advance.
-- Locks: the caller holds the admission lock; the row of queue.active_job by skip locked.
create or replace function queue._dequeue(p_id bigint, out place text, out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_active record;
  v_waiting record;
begin
  delete from queue.active_job aj
  where aj.id = (select w.id from queue.active_job w where w.id = p_id
    and w.claim is null for update skip locked)
  returning aj.id, aj.lane, aj.flags, aj.deadline into v_active;
  if found then
    perform queue._keep_tag(p_id, v_active.deadline);
    if v_active.flags & 1/* ordered */ <> 0 then
      perform queue._keep_turns(array[p_id]);
    end if;
    if v_active.flags & 6/* slots */ <> 0 then
      keys := queue._count_unready(array[p_id], array[v_active.lane], array[v_active.flags]);
      perform queue._never_discard(array[p_id]);
    end if;
    place := 'ready';
    return;
  elsif exists (select from queue.active_job aj where aj.id = p_id)
    or exists (select from queue.finished f where f.id = p_id) then
    return;
  end if;
  delete from queue.waiting w where w.id = p_id
  returning w.reason, w.key, w.lane, w.at, w.weight into v_waiting;
  if found then
    if v_waiting.reason = 'slot' then
      perform queue._count_unwaiting(v_waiting.key, v_waiting.lane);
      -- if it was the first, the next one may fit where its weight did not, or wait for the key's rate
      keys := case when v_waiting.lane is not null and num_nonnulls(v_waiting.at, v_waiting.weight) > 0
        then array[v_waiting.key] end;
      perform queue._never_discard(array[p_id]);
    end if;
    place := v_waiting.reason;
    return;
  end if;
  -- a job that _advance has handed over is in no gate, and holds nothing
  delete from queue.pending_settlement h where h.job_id = p_id and h.kind = 'again' and h.flags = 0
    and h.payload is null;
  if found then
    place := 'again';
    return;
  elsif exists (select from queue.pending_settlement h where h.job_id = p_id and h.kind in ('ended', 'again'))
    then
    return;
  end if;
  update queue.lock_member m set is_passed = false
  where m.id = p_id and m.lock = (select j.lock from queue.job_now j where j.id = p_id);
  place := case when found then 'turn' else 'log' end;
end $$;

-- _dequeue for several jobs. ids: those that were taken out.
-- Locks: as there.
create or replace function queue._dequeue_all(p_ids bigint[], out ids bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_id bigint;
  v_taken record;
begin
  foreach v_id in array p_ids loop
    v_taken := queue._dequeue(v_id);
    if v_taken.place is not null then
      ids := ids || v_id;
      keys := keys || v_taken.keys;
    end if;
  end loop;
end $$;

-- Whether no transaction is replacing a job now; if so, none can before this transaction ends.
-- Locks: the caller holds the admission lock; the row of its queueing lock by skip locked.
create or replace function queue._try_lock_queueing_lock(p_id bigint)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
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

-- The transaction whose end must come before a row of queue.active_job can be read: the one that has locked
-- it, according to the row's xmax, if that is in progress; else this one. Used as the xid of a pending
-- settlement, it lets the first admission after that end read the settlement, and none before. xmax may
-- also be the number of a savepoint, or of a multixact, if the row was locked before a savepoint and deleted
-- in it. Neither is a transaction's number, so every admission reads the settlement. Multixacts are numbered
-- separately, so a number may be both a multixact and a transaction. Waiting for that transaction could be
-- wrong, so it is not waited for while any member of the multixact is in progress.
create or replace function queue._row_locker(p_xmax xid)
returns xid8 language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_own constant xid8 := pg_current_xact_id();
  v_snapshot constant pg_snapshot := pg_current_snapshot();
  v_until constant xid8 := (select x from pg_snapshot_xip(v_snapshot) x where x::xid = p_xmax);
begin
  if v_until is null then
    return v_own;
  elsif mxid_age(p_xmax) between 1 and (select mxid_age(d.datminmxid) from pg_database d
    where d.datname = current_database()) then
    if exists (
      select from pg_get_multixact_members(p_xmax) m
      -- a member has only the low 32 bits of its number
      where pg_xact_status((v_own::text::bigint + age(v_own::xid) - age(m.xid))::text::xid8) = 'in progress')
    then
      return v_own;
    end if;
  end if;
  return v_until;
end $$;

-- Puts jobs that were taken out into their final state. _advance tells their locks and dependents, by
-- p_ended.
-- Locks: the caller holds the admission lock.
create or replace function queue._finish_unclaimed(p_ids bigint[], p_state text, p_reason text, p_error text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_jobs record;
  v_now timestamptz := clock_timestamp();
begin
  insert into queue.finished (id, finished_at, attempts, state, reason, error)
  select u.id, v_now, j.attempts, p_state, p_reason, p_error
  from unnest(p_ids) u (id)
  cross join lateral (select j.attempts from queue.job_now j where j.id = u.id offset 0) j;
  select array_agg(j.id) as ids, array_agg(j.flags) as flags into v_jobs
  from (
    select j.id, (j.flags | case when c.retain is not null then 512/* retain */ else 0 end)::smallint as flags
    from unnest(p_ids) u (id)
    cross join lateral (
      select j.id, j.flags, j.queue from queue.job_now j where j.id = u.id offset 0) j
    left join lateral (select c.retain from queue.queue_config c
      where c.queue = j.queue offset 0) c on true) j;
  delete from queue.suspended w where w.job_id = any (p_ids);
  perform queue._return_tags(p_ids);
  perform queue._clean_up(v_jobs.ids, v_jobs.flags);
  perform queue._notify_waiters(p_ids);
end $$;

-- Cleans up after jobs that have finished: leases, aborts, queueing locks, retention.
create or replace function queue._clean_up(p_ids bigint[], p_flags smallint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_all smallint;
begin
  select bit_or(f) into v_all from unnest(p_flags) f;
  if v_all & 128/* lease */ <> 0 then
    delete from queue.lease l where l.id = any (p_ids);
  end if;
  if v_all & 1024/* aborting */ <> 0 then
    -- heartbeat deletes a row that it has locked
    delete from queue.abort a
    where a.ctid = any (array(select a.ctid from queue.abort a
      where a.id = any (p_ids) for update skip locked));
  end if;
  if v_all & 8448/* queueing_lock */ <> 0 then
    perform queue._drop_queueing_locks(p_ids, 8448/* queueing_lock */);
  end if;
  if v_all & 64/* expires */ <> 0 then
    delete from queue.expiry e where e.id = any (p_ids);
  end if;
  if v_all & 512/* retain */ <> 0 then
    update queue.finished f set purge_at = f.finished_at + queue._retention(f.id) where f.id = any (p_ids);
  end if;
end $$;

-- How long a finished job is kept: by the job, its queue, or the default for succeeded ones; NULL means for
-- ever.
create or replace function queue._retention(p_id bigint, p_default interval default '7 days')
returns interval language plpgsql stable parallel safe security invoker as $$
declare
  v_retain interval;
begin
  select coalesce(queue._retain(j.options -> 'retain', f.state), c.retain,
    case when f.state = 'succeeded' then p_default end) into v_retain
  from queue.job_now j
  join queue.finished f on f.id = j.id
  left join queue.queue_config c on c.queue = j.queue
  where j.id = p_id;
  return v_retain;
end $$;

-- The interval of the option retain for a state: the option is one for all, or an object of them by outcome.
create or replace function queue._retain(p_retain jsonb, p_state text)
returns interval language plpgsql stable parallel safe security invoker as $$
begin
  return (case when jsonb_typeof(p_retain) = 'object' then p_retain ->> p_state
    else p_retain #>> '{}' end)::interval;
end $$;

-- admit/join_locks.sql
-- Joining locks, and giving the turn to an older member that came late.
-- Tests: admit/locks.sql, admit/locks.late_defer.spec.

-- Adds new jobs to their locks. In a lock that had no member, the first gets the turn. While any task is
-- paused, a member counts as passed only once it has been at that gate; _wait_for_turn then notes it. free:
-- new jobs that nothing here holds up, because they have the turn or need none. passed, displaced and keys:
-- other jobs that this releases, as returned by _give_turn_to_older.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._join_locks(
  p_ids bigint[], out free bigint[], out passed bigint[], out displaced bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_changes record;
begin
  with joining as materialized (
    select x.lock, x.id, x.is_mutex, x.is_passed, x.n, o.id is not null as has_others,
      coalesce(o.id > x.id, false) as is_late
    from (
      select j.id, j.lock, j.flags & 2/* mutex */ <> 0 as is_mutex,
        j.flags & (8/* needs */ | 16/* scheduled */ | 32/* held */) = 0 and not j.is_later
          and (select p.no from queue.pause p where p.task is not null limit 1) is null as is_passed,
        row_number() over (partition by j.lock order by j.id) as n
      from unnest(p_ids) u (id)
      cross join lateral (
        select j.id, j.flags, j.lock, coalesce(j.scheduled_at > clock_timestamp(), false) as is_later
        from queue.job_now j where j.id = u.id offset 0) j
      where j.flags & 3/* lock */ <> 0 and j.lock is not null) x
    left join lateral (select m.id from queue.lock_member m where m.lock = x.lock
      order by m.id desc limit 1) o on true),
  joined as (
    insert into queue.lock_member (lock, id, is_mutex, is_late, is_passed, has_turn)
    select x.lock, x.id, x.is_mutex, x.is_late and not x.is_mutex,
      x.is_passed, not x.is_mutex and x.n = 1 and not x.has_others
    from joining x)
  select array_agg(distinct x.lock) filter (where x.is_mutex and x.has_others and not m.is_mixed) as mixed,
    array_agg(distinct x.lock) filter (where not x.is_mutex and m.is_mixed) as ordered,
    array_agg(x.id order by x.id) filter (where x.is_mutex or x.n = 1 and not x.has_others) as free,
    array_agg(x.lock) filter (where x.is_late) as late
  into v_changes
  from joining x
  left join lateral (
    select (select m.id from queue.lock_member m where m.lock = x.lock and m.is_mutex limit 1) is not null
      as is_mixed offset 0) m on x.has_others;
  if v_changes.mixed is not null then
    -- from now on has_turn is valid
    update queue.lock_member m set has_turn = true
    where m.ctid = any (array(
      select h.ctid from unnest(v_changes.mixed) u (lock)
      cross join lateral (
        select m.ctid, m.has_turn
        from queue.lock_member m
        where m.lock = u.lock and not m.is_late and not m.is_mutex
        order by m.id limit 1) h
      where not h.has_turn));
  end if;
  free := v_changes.free;
  if v_changes.ordered is not null then
    free := free || queue._next_mixed(v_changes.ordered);
  end if;
  if v_changes.late is not null then
    v_changes := queue._give_turn_to_older(v_changes.late, p_ids);
    free := free || v_changes.joined;
    passed := v_changes.passed;
    displaced := v_changes.displaced;
    keys := v_changes.keys;
  end if;
end $$;

-- If a member that came late, or a mutex member, is older than the one that has the turn, and that one does
-- not run, the turn goes to the first. Otherwise the older job would wait for the younger, which may itself
-- wait for the older.
-- passed: jobs that have the turn now, and that nothing else holds up; joined: those of them that are in
-- p_joining, jobs in no gate yet; displaced: jobs that had the turn, and are now in no gate; keys: semaphores
-- in which that left room.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked. If another transaction
-- holds the row of a job, the job is starting, or comes back (_readmit) when that ends.
-- Why no wake-up is lost: some member always has the turn, except in a mixed lock while its first member is a
-- mutex job, whose end passes the turn on. Two sessions: admit/locks.late_defer.spec,
-- operate/pause.late.spec.
create or replace function queue._give_turn_to_older(
  p_locks text[], p_joining bigint[], out passed bigint[], out joined bigint[], out displaced bigint[],
  out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_lock record;
  v_reason text;
  v_taken record;
  v_pass bigint[];
begin
  for v_lock in
    select u.lock, l.id as late_id, l.is_passed, h.id, x.id is not null as is_mixed
    from (select distinct u.lock from unnest(p_locks) u (lock)) u
    left join lateral (
      select m.id, m.is_passed
      from queue.lock_member m
      where m.lock = u.lock and m.is_late
      order by m.id limit 1) l on true
    left join lateral (
      select m.id
      from queue.lock_member m
      where m.lock = u.lock and m.is_mutex
      order by m.id limit 1) x on true
    -- the one that has the turn, unless that is even older: without mutex members it is the next one, read
    -- without passing dead rows
    cross join lateral (
      (select m.id, m.has_turn from queue.lock_member m where x.id is null and m.lock = u.lock and m.id > l.id
        and not m.is_late order by m.id limit 1)
      union all
      select m.id, true from queue.lock_member m where x.id is not null and m.lock = u.lock and m.has_turn
        and m.id + 0 > least(l.id, x.id)) h
    where h.has_turn or (select aj.id from queue.active_job aj where aj.id = h.id) is not null
      or (select w.reason from queue.waiting w where w.id = h.id) = 'slot'
  loop
    select w.reason into v_reason from queue.waiting w where w.id = v_lock.id;
    if found and v_reason <> 'slot' then
      null;  -- it gets its turn after that gate
    elsif found or exists (select from queue.active_job aj where aj.id = v_lock.id)
      or exists (select from queue.pending_settlement h where h.job_id = v_lock.id and h.kind = 'again'
        and h.flags = 0 and h.payload is null)
    then
      v_taken := queue._dequeue(v_lock.id);
      if v_taken.place is null then
        insert into queue.pending_settlement (xid, job_id, kind, flags)
        select queue._row_locker(aj.xmax), aj.id, 'readmit', 0 from queue.active_job aj
        where aj.id = v_lock.id and aj.claim is null;
        continue;
      end if;
      displaced := displaced || v_lock.id;
      keys := keys || v_taken.keys;
    else
      continue;  -- the end of its claim is not settled yet
    end if;
    update queue.lock_member m set has_turn = false, is_passed = false
    where m.lock = v_lock.lock and m.id = v_lock.id;
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

-- admit/enter_slots.sql
-- The last gate: jobs become ready if their concurrency keys have free slots.
-- Tests: admit/slots.sql.

-- Sends jobs that have passed every other gate to queue.active_job, or lets them wait for a slot.
-- p_is_refill: they come from the waiting jobs, so they need not queue up behind those. grown: keys whose
-- limit has grown, or for which a job waits that would fit; discarded: jobs in no gate that would have to
-- wait, and must be discarded instead (on_limit).
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._enter_slots(p_ids bigint[], p_is_refill boolean, out discarded bigint[],
  out grown text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_entries record;
  v_turns record;
  v_taken record;
begin
  v_entries := queue._queue_entries(p_ids);
  if v_entries.all_flags & 2/* mutex */ <> 0 and exists (select from unnest(v_entries.flags) f
    where f & 3/* lock */ = 2/* mutex */) then
    v_turns := queue._await_turns(v_entries.ids, v_entries.flags);
    if v_turns.asked is not null then
      grown := v_turns.keys || (
        select s.grown from queue._queue_entries(v_turns.asked) a
        cross join lateral queue._take_slots(a.ids, a.lanes, a.deadlines, a.flags, a.attempts, true) s);
    end if;
    if v_turns.late is not null then
      v_entries := queue._queue_entries(array(select u.id from unnest(v_entries.ids) u (id)
        where u.id <> all (v_turns.late)));
      if v_entries.ids is null then
        return;
      end if;
    end if;
  end if;
  if v_entries.all_flags & 6/* slots */ = 0 then
    perform queue._make_ready(v_entries.ids, v_entries.lanes, v_entries.deadlines, v_entries.flags,
      v_entries.attempts, v_entries.is_low, v_entries.has_tags);
    return;
  end if;
  v_taken := queue._take_slots(v_entries.ids, v_entries.lanes, v_entries.deadlines, v_entries.flags,
    v_entries.attempts, p_is_refill);
  discarded := v_taken.discarded;
  grown := grown || v_taken.grown;
end $$;

-- Like _enter_slots, for jobs whose places are known (_queue_entries).
-- With a function of its own for the loop, 50 jobs with a key take 0.1 % more instructions.
-- In one piece: the loop shares its arrays, so that function would take 11 arguments and return 9.
create or replace function queue._take_slots(
  p_ids bigint[], p_lanes integer[], p_deadlines timestamptz[], p_flags smallint[], p_attempts smallint[],
  p_is_refill boolean,
  out discarded bigint[], out grown text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  -- ns, pairs: which job has which (key, lane); keys, lanes: the distinct ones
  v_keys record;
  v_counts record;                                   -- the counts of each (key, lane)
  v_row integer := 1;
  v_first integer;
  v_pair integer;
  v_shut integer;
  v_ready integer[];                          -- the counts to add to it
  v_waiting integer[];
  v_lows bigint[];
  v_low_deadlines timestamptz[];
  v_pass integer[] := '{}'::integer[];
  v_wait integer[] := '{}'::integer[];
  v_wait_pairs integer[] := '{}'::integer[];
  v_wait_weights integer[] := '{}'::integer[];
  v_weight integer;
  v_wait_keys text[] := '{}'::text[];
  v_wait_several boolean[] := '{}'::boolean[];
  v_places timestamptz[];
begin
  select array_agg(x.n order by x.n) as ns, array_agg(x.pair order by x.n) as pairs,
    array_agg(x.key) as set_keys, array_agg(x.slots) as set_slots, array_agg(x.id) as set_ids,
    array_agg(x.rate_limit) as set_rate_limits, array_agg(x.rate_per) as set_rate_pers,
    array_agg(x.weight order by x.n) as weights,
    array_agg(x.key order by x.pair) filter (where x.is_first) as keys,
    array_agg(x.lane order by x.pair) filter (where x.is_first) as lanes,
    array_agg(x.newest order by x.pair) filter (where x.is_first) as newest,
    array_agg(x.id) filter (where x.discards and not p_is_refill and queue._try_lock_queueing_lock(x.id))
      as discards
  into v_keys
  from (
    select x.n, x.id, x.key, x.slots, x.discards, x.lane, x.weight, x.rate_limit, x.rate_per,
      dense_rank() over (order by x.key, x.lane)::integer as pair,
      row_number() over (partition by x.key, x.lane) = 1 as is_first,
      max(x.id) over (partition by x.key, x.lane) as newest
    from (select x.n, x.id, x.key, x.slots, x.discards, x.weight, x.rate_limit, x.rate_per,
        p_lanes[x.n] as lane
      from queue._keys_of(p_ids, p_flags) x) x) x;
  grown := queue._set_slots(v_keys.set_keys, v_keys.set_slots, v_keys.set_ids, v_keys.set_rate_limits,
    v_keys.set_rate_pers);
  select array_agg(s.slots order by u.n) as slots, array_agg(s.rate_limit order by u.n) as rates,
    array_agg(least(s.slots, 1000000000/* most_slots */) - s.used order by u.n) as free,
    array_agg(queue._rate_room(u.key, s.rate_limit, s.rate_per, s.rate_limit, clock_timestamp())
      order by u.n) as rate_room,
    bool_or(s.rate_limit is not null) as have_rates,
    array_agg(coalesce(s.ready[s.at], 0) order by u.n) as ready,
    array_agg(coalesce(s.waiting[s.at], 0) order by u.n) as waiting
  into v_counts
  from unnest(v_keys.keys, v_keys.lanes) with ordinality u (key, lane, n)
  cross join lateral (
    select s.slots, s.used, s.rate_limit, s.rate_per, s.ready, s.waiting,
      array_position(s.lanes, u.lane) as at
    from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) s;
  v_ready := array_fill(0, array[cardinality(v_keys.keys)]);
  v_waiting := v_ready;
  v_lows := array_fill(null::bigint, array[cardinality(v_keys.keys)]);
  v_low_deadlines := array_fill(null::timestamptz, array[cardinality(v_keys.keys)]);
  for n in 1 .. cardinality(p_ids) loop
    v_first := v_row;
    v_shut := null;
    while v_keys.ns[v_row] = n loop
      v_pair := v_keys.pairs[v_row];
      if v_shut is null and (v_counts.ready[v_pair] + v_ready[v_pair]
                               > least(v_counts.free[v_pair]
                                   - least(v_keys.weights[v_row], v_counts.slots[v_pair]),
                                 v_counts.rate_room[v_pair]
                                   - least(v_keys.weights[v_row], v_counts.rates[v_pair]))
                             or v_counts.waiting[v_pair] + v_waiting[v_pair] > 0 and not p_is_refill) then
        v_shut := v_pair;
        v_weight := v_keys.weights[v_row];
      end if;
      v_row := v_row + 1;
    end loop;
    if v_shut is null then
      v_pass := v_pass || n;
      for i in v_first .. v_row - 1 loop
        v_pair := v_keys.pairs[i];
        v_ready[v_pair] := v_ready[v_pair] + v_keys.weights[i];
      end loop;
    elsif p_ids[n] = any (v_keys.discards) then
      discarded := discarded || p_ids[n];
    else
      if v_counts.ready[v_shut] + v_ready[v_shut]
        <= least(v_counts.free[v_shut] - least(v_weight, v_counts.slots[v_shut]),
          v_counts.rate_room[v_shut] - least(v_weight, v_counts.rates[v_shut])) then
        -- those that wait are too heavy, or this job comes before them
        grown := array_remove(grown, v_keys.keys[v_shut]) || v_keys.keys[v_shut];
      end if;
      v_waiting[v_shut] := v_waiting[v_shut] + 1;
      v_wait := v_wait || n;
      v_wait_pairs := v_wait_pairs || v_shut;
      v_wait_weights := v_wait_weights || nullif(v_weight, 1);
      v_wait_keys := v_wait_keys || v_keys.keys[v_shut];
      v_wait_several := v_wait_several || (v_row - v_first > 1);
    end if;
  end loop;
  perform queue._make_ready(array_agg(p_ids[n]), array_agg(p_lanes[n]), array_agg(p_deadlines[n]),
    array_agg(p_flags[n]), array_agg(p_attempts[n]))
  from unnest(v_pass) n having count(*) > 0;
  if v_wait <> '{}' then
    v_places := queue._tags(array(select p_ids[n] from unnest(v_wait) n),
      array(select p_lanes[n] from unnest(v_wait) n), array(select p_deadlines[n] from unnest(v_wait) n),
      v_wait_keys);
    insert into queue.waiting (id, reason, key, lane, deadline, flags, attempt, has_several, weight)
    select p_ids[u.n], 'slot', u.key, p_lanes[u.n], u.place, p_flags[u.n], p_attempts[u.n], u.several,
      u.weight
    from unnest(v_wait, v_wait_keys, v_places, v_wait_several, v_wait_weights)
      u (n, key, place, several, weight);
    for i in 1 .. cardinality(v_wait) loop
      v_pair := v_wait_pairs[i];
      v_lows[v_pair] := least(v_lows[v_pair], p_ids[v_wait[i]]);
      v_low_deadlines[v_pair] := least(v_low_deadlines[v_pair], v_places[i]);
    end loop;
    perform queue._keep_turns(array_agg(p_ids[n])) from unnest(v_wait) n where p_flags[n] & 1/* ordered */ <> 0
      having count(*) > 0;
  end if;
  perform queue._add_slots(v_keys.keys, v_keys.lanes, null, v_ready, v_waiting, v_lows,
    v_low_deadlines, v_keys.newest);
  if v_counts.have_rates and v_wait <> '{}' then
    perform queue._await_rates(v_wait_keys);
  end if;
  if discarded is not null then
    perform queue._keep_turns(discarded);
  end if;
end $$;

-- Gives free slots of keys to waiting jobs, in each lane by deadline and id. Jobs with several keys may have
-- to wait for another key, so it looks at more jobs, up to some hundreds; the next admission continues.
-- Returns keys whose limit has grown by that.
-- Why no wake-up is lost: it is called in the admission that frees the slots.
-- Locks: the caller holds the admission lock.
create or replace function queue._refill(p_keys text[])
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_moved record;
  v_extra integer := 0;
  v_grown text[];
begin
  loop
    with room as materialized (
      select s.key, l.lane, l.low, l.low_deadline, s.slots, s.rate_limit,
        s.free - l.ready as room, s.rate_room - l.ready as rate_room,
        greatest(least(s.free - l.ready, s.rate_room - l.ready, l.waiting), v_extra) as look
      from (select distinct u.key from unnest(p_keys) u (key)) u
      cross join lateral (
        select s.key, s.slots, s.rate_limit, s.lanes, s.ready, s.waiting, s.lows, s.low_deadlines,
          least(s.slots, 1000000000/* most_slots */) - s.used as free,
          queue._rate_room(u.key, s.rate_limit, s.rate_per, s.rate_limit, clock_timestamp()) as rate_room
        from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) s
      cross join lateral unnest(s.lanes, s.ready, s.waiting, s.lows, s.low_deadlines)
        l (lane, ready, waiting, low, low_deadline)
      where l.waiting > 0 and least(s.free, s.rate_room) > l.ready),
    let as (
      delete from queue.waiting w
      where w.ctid = any (array(
        select w.ctid from room r
        cross join lateral (
          -- in order: a job whose weight does not fit holds up the jobs behind it
          select w.ctid
          from (
            select w.tid as ctid,
              greatest(sum(w.weight) over o - r.room, sum(w.rate_weight) over o - r.rate_room) > 0
                as is_beyond,
              bool_or(greatest(w.weight - r.room, w.rate_weight - r.rate_room) > 0) over o as is_stopped
            from (
              select w.ctid as tid, w.deadline, w.id, least(coalesce(w.weight, 1), r.slots) as weight,
                least(coalesce(w.weight, 1), r.rate_limit) as rate_weight
              from queue.waiting w
              where w.reason = 'slot' and w.key = r.key and w.lane = r.lane
                and (w.deadline, w.id) >= (r.low_deadline, r.low)
              order by w.deadline, w.id limit r.look) w
            window o as (order by w.deadline, w.id rows unbounded preceding)) w
          where not w.is_stopped and (v_extra > 0 or not w.is_beyond)) w))
      returning w.id, w.key, w.lane, w.deadline, w.flags, w.attempt, w.has_several, w.weight)
    select array_agg(l.key) as keys, array_agg(l.lane) as lanes, array_agg(l.id) as ids,
      array_agg(case when l.is_last then l.id + 1 end) as lows,
      array_agg(case when l.is_last then l.deadline end) as low_deadlines,
      array_agg(case when l.deadline < '0001-01-01 00:00+00' then l.deadline
        else coalesce(n.deadline, l.deadline) end) as deadlines, array_agg(n.flags) as flags,
      array_agg(l.attempt) as attempts, array_agg(coalesce(l.weight, 1)) as weights,
      bool_or(l.has_several) as has_several
    into v_moved
    from (select l.*, row_number() over (partition by l.key, l.lane order by l.deadline desc, l.id desc) = 1
        as is_last from let l) l
    cross join lateral (
      -- may have changed since
      select (select s.deadline from queue.job_override s where s.id = l.id) as deadline,
        (l.flags | case when exists (select from queue.job_override s where s.id = l.id) then 2048/* overridden */
          else 0 end
          | case when (select d.job_id from queue.need d where d.need_id = l.id limit 1) is not null
            then 4096/* needed */ else 0 end)::smallint as flags) n;
    exit when v_moved.keys is null;
    if v_extra > 0 or v_moved.has_several then
      perform queue._add_slots(v_moved.keys, v_moved.lanes, null, null,
        array_fill(-1, array[cardinality(v_moved.ids)]), v_moved.lows, v_moved.low_deadlines);
      v_grown := v_grown || (select e.grown from queue._enter_slots(v_moved.ids, true) e);
      v_extra := greatest(2 * v_extra, 10);
      if v_extra > 300 then
        insert into queue.pending_settlement (job_id, kind, flags, payload) select v_moved.ids[1], 'refill',
          0, to_jsonb(p_keys);
        exit;
      end if;
    else
      perform queue._add_slots(v_moved.keys, v_moved.lanes, null,
        v_moved.weights, array_fill(-1, array[cardinality(v_moved.ids)]),
        v_moved.lows, v_moved.low_deadlines);
      perform queue._make_ready(v_moved.ids, v_moved.lanes, v_moved.deadlines, v_moved.flags,
        v_moved.attempts);
      exit;
    end if;
  end loop;
  perform queue._await_rates(p_keys);
  return v_grown;
end $$;

-- The ordered job that had the turn when its lock became mixed may be ready, running or waiting for another
-- slot without having used the semaphore. Before a mutex job can become ready, that job must go through the
-- semaphore, or be counted.
-- asked: ordered jobs that were taken out for that; keys: semaphores in which that left room; late: mutex
-- jobs that must come back later, because another transaction holds the row of the ordered one.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._await_turns(p_ids bigint[], p_flags smallint[], out asked bigint[],
  out keys text[], out late bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_turn record;
  v_job record;
begin
  for v_turn in
    select k.key, m.id, array_agg(k.id) as mutex_ids
    from queue._keys_of(p_ids, p_flags) k
    cross join lateral (
      select m.id
      from queue.lock_member m
      where m.lock = substr(k.key, 2) and m.has_turn offset 0) m
    where p_flags[k.n] & 3/* lock */ = 2/* mutex */ and left(k.key, 1) = 'm'
      and ((select aj.flags & 2/* mutex */ from queue.active_job aj where aj.id = m.id) = 0
        or (select w.flags & 2/* mutex */ from queue.waiting w where w.id = m.id) = 0)
    group by k.key, m.id
  loop
    delete from queue.waiting w where w.id = v_turn.id returning w.key, w.lane, w.at, w.weight into v_job;
    if found then
      perform queue._count_unwaiting(v_job.key, v_job.lane);
      keys := keys || case when num_nonnulls(v_job.at, v_job.weight) > 0 then array[v_job.key] end;
      asked := asked || v_turn.id;
      continue;
    end if;
    select aj.claim, aj.lane, aj.flags, aj.deadline into v_job from queue.active_job aj
    where aj.id = v_turn.id for update skip locked;
    if not found then
      if exists (select from queue.active_job aj where aj.id = v_turn.id) then
        late := late || v_turn.mutex_ids;
      end if;
    elsif v_job.claim is not null then
      perform queue._set_slots(array[v_turn.key], array[1], array[v_turn.id]);
      perform queue._add_slots(array[v_turn.key], null, array[1], null, null, null);
      update queue.active_job aj set flags = aj.flags | 2/* mutex */ where aj.id = v_turn.id;
    else
      delete from queue.active_job aj where aj.id = v_turn.id;
      perform queue._keep_tag(v_turn.id, v_job.deadline);
      if v_job.flags & 4/* keys */ <> 0 then
        keys := keys || queue._count_unready(array[v_turn.id], array[v_job.lane], array[v_job.flags]);
      end if;
      asked := asked || v_turn.id;
    end if;
  end loop;
  insert into queue.waiting (id, reason, at, key)
  select k.id, 'slot', clock_timestamp() + interval '20 ms', k.key
  from queue._keys_of(p_ids, p_flags) k where k.id = any (late) and left(k.key, 1) = 'm';
end $$;

-- admit/deadlines.sql
-- Deadlines: a job passes its deadline on to the jobs that it needs.

-- Passes deadlines on to the unfinished needs of jobs, recursively, only ever to make them earlier. Stops at
-- jobs whose deadline is already earlier, because they have passed it on.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked. If another transaction
-- has locked a row, it may hold queue.job_override for long: such jobs are returned for a recheck.
-- Why no wake-up is lost: keys whose waiting jobs have another order now, in which a lighter one may come
-- first, are handed over to the next admission.
create or replace function queue._propagate_deadline(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
  v_deadlines timestamptz[];
  v_locked bigint[];
  v_shut bigint[];
  v_lanes integer[];
  v_low_deadlines timestamptz[];
  v_low_ids bigint[];
  v_moved record;
begin
  with recursive spread (id, deadline) as (
    select u.id, j.deadline
    from unnest(p_ids) u (id)
    cross join lateral (
      select j.deadline from queue.job_now j where j.id = u.id offset 0) j
    where j.deadline < 'infinity'
    union
    select d.need_id, x.deadline
    from spread x
    cross join lateral (select d.need_id from queue.need d where d.job_id = x.id offset 0) d
    cross join lateral (
      select coalesce(j.deadline, 'infinity') as deadline
      from queue.job_now j where j.id = d.need_id offset 0) n
    left join lateral (select f.id from queue.finished f where f.id = d.need_id offset 0) f on true
    where n.deadline > x.deadline and f.id is null)
  select array_agg(x.id order by x.id), array_agg(x.deadline order by x.id) into v_ids, v_deadlines
  from (
    select x.id, min(x.deadline) as deadline from spread x
    group by x.id) x
  cross join lateral (
    select coalesce(j.deadline, 'infinity') as deadline
    from queue.job_now j where j.id = x.id offset 0) j
  where x.deadline < j.deadline;
  if v_ids is null then
    return;
  end if;
  v_locked := array(select aj.id from queue.active_job aj where aj.id = any (v_ids)
    order by aj.id for update skip locked);
  v_shut := array(select aj.id from queue.active_job aj where aj.id = any (v_ids) except select u.id
    from unnest(v_locked) u (id));
  insert into queue.pending_settlement (xid, job_id, kind, flags)
  select queue._row_locker(aj.xmax), u.id, 'recheck', 4096/* needed */ from unnest(v_shut) u (id)
  left join queue.active_job aj on aj.id = u.id;
  insert into queue.job_override as s (id, deadline)
  select u.id, u.deadline
  from unnest(v_ids, v_deadlines) u (id, deadline)
  left join lateral (select f.id from queue.finished f where f.id = u.id offset 0) f on true
  where f.id is null and u.id <> all (v_shut)
  on conflict on constraint job_override_pkey do update set deadline = excluded.deadline;
  with moved as (
    update queue.active_job aj
    set deadline = case when aj.deadline < '0001-01-01 00:00+00' then aj.deadline
        else v_deadlines[width_bucket(aj.id, v_ids)] end,
      flags = aj.flags | 2048/* overridden */
    where aj.id = any (v_locked) and aj.claim is null
    returning aj.lane, aj.deadline, aj.id)
  select array_agg(m.lane), array_agg(m.deadline), array_agg(m.id) into v_lanes, v_low_deadlines, v_low_ids
  from moved m;
  if v_lanes is not null then
    perform queue._lower_marks(v_lanes, v_low_deadlines, v_low_ids);
  end if;
  -- or the planner may read all jobs that wait for slots
  with moved as (
    update queue.waiting w
    set deadline = case when w.deadline < '0001-01-01 00:00+00' then w.deadline
        else v_deadlines[array_position(v_ids, w.id)] end,
      flags = w.flags | 2048/* overridden */
    where w.id = any (v_ids) and w.reason || '' = 'slot'
    returning w.key, w.lane, w.id, w.deadline)
  select array_agg(m.key) as keys, array_agg(m.lane) as lanes, array_agg(m.id) as ids,
    array_agg(m.deadline) as deadlines
  into v_moved from moved m where m.lane is not null;
  if v_moved.keys is not null then
    perform queue._add_slots(v_moved.keys, v_moved.lanes, null, null, null, v_moved.ids, v_moved.deadlines);
    insert into queue.pending_settlement (job_id, kind, flags, payload)
    values (0, 'refill', 0, to_jsonb(v_moved.keys));
  end if;
end $$;

-- admit/needs.sql
-- Needs: the current state of the needed jobs decides, never a counter.
--
-- A need is succeeded, failed (failed, cancelled, held, upstream_failed), or pending. Whenever that changes,
-- _needs_changed checks the jobs that need it. Everything here runs under the admission lock. A session that
-- ends a claim need not hold that; _mark_needed explains why no end is missed.
--
-- Counting all needs of a job whenever one of them ends would be quadratic. So queue.waiting names one need
-- that holds the job (need_id): a pending one, or under upstream_failed a failed one. While that need does
-- not change, the ends of others change nothing, unless they decide alone: a failed need under all and block,
-- or a satisfied one under any. When it changes, the next one below it is sought (all), so a job's needs are
-- read about twice, whatever the order in which they end. need_id is only a hint: a job passes only after a
-- check of all its needs.

-- Writes the needs of new jobs, and the jobs that a fork has awaited (_copy). A need may have been deleted
-- before its dependent's transaction committed.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._join_needs(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_needs bigint[];
  v_jobs bigint[];
begin
  with added as (
    insert into queue.need (job_id, need_id, mode, deleted_state)
    select j.id, n.id, n.mode, case when o.id is null then queue._deleted_state(n.id) end
    from unnest(p_ids) u (id)
    cross join lateral (
      select j.id, j.needs, queue._needs_mode(j.options) as mode, j.options -> 'awaited' as awaited
      from queue.job j
      where j.id = u.id and j.flags & 8/* needs */ <> 0 offset 0) j
    cross join lateral (
      select n as id, j.mode from unnest(j.needs) n
      union all
      select n::bigint, 4/* ended */ from jsonb_array_elements_text(j.awaited) n) n
    left join lateral (select o.id from queue.job o where o.id = n.id offset 0) o on true
    on conflict on constraint need_pkey do nothing
    returning job_id, need_id)
  select array_agg(distinct a.need_id), array_agg(distinct a.job_id) into v_needs, v_jobs from added a;
  if v_needs is not null then
    perform queue._raise_needed_mark(v_needs[cardinality(v_needs)]);
    perform queue._mark_needed(v_needs);
    perform queue._propagate_deadline(v_jobs);
  end if;
end $$;

-- passed: the jobs whose needs are met; the others wait. failed: those of the waiting ones with a failed
-- need.
-- Locks: the caller holds the admission lock.
create or replace function queue._wait_for_needs(p_ids bigint[], out passed bigint[], out failed bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
begin
  with stand as materialized (select s.id, s.standing, s.holder from queue._needs_states(p_ids) s),
  wait as (
    insert into queue.waiting (id, reason, need_id)
    select s.id, case s.standing when 'failed' then 'upstream_failed' else 'needs' end, s.holder from stand s
      where s.standing <> 'satisfied')
  select array_agg(s.id order by s.id) filter (where s.standing = 'satisfied'),
    array_agg(s.id) filter (where s.standing = 'failed')
  into passed, failed from stand s;
end $$;

-- The state of jobs has changed: checks the jobs that need them. met: jobs that no longer wait, and are in no
-- gate now; changed: jobs that fail because of this, or that may succeed again, so that their own dependents
-- must be checked. A job that has passed but not started goes back to wait if one of its needs is pending
-- again or has failed: a succeeded job may be retried while its needs have failed. keys: semaphores in which
-- that left room.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
-- Invariant: only the state decides, so checking once too often does no harm.
create or replace function queue._needs_changed(p_ids bigint[], out met bigint[], out changed bigint[],
  out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_found record;
  v_ask bigint[];
  v_taken record;
begin
  v_found := queue._dependents_to_check(p_ids);
  v_ask := v_found.ask;
  if v_found.freed is not null then
    v_ask := v_ask || queue._find_next_need(v_found.freed, v_found.freed_at);
  end if;
  if v_ask is not null then
    select r.met, r.changed into met, changed from queue._recount_needs(v_ask) r;
  end if;
  if v_found.back is not null then
    v_taken := queue._return_to_needs(v_found.back);
    changed := changed || v_taken.failed;
    keys := v_taken.keys;
  end if;
end $$;

-- The jobs that a change of needs may affect. ask: their needs must be counted; freed: a need (freed_at) held
-- them, and is now satisfied; back: they have passed the gate, and may have to return.
create or replace function queue._dependents_to_check(p_needs bigint[], out ask bigint[], out freed bigint[],
  out freed_at bigint[], out back bigint[])
language plpgsql stable parallel safe security invoker as $$
begin
  with edge as materialized (
    select d.job_id, d.need_id, d.mode, w.reason, w.need_id as holder, d.class, d.is_satisfied
    from unnest(p_needs) u (id)
    cross join lateral (
      select d.job_id, d.need_id, d.mode, d.class, d.is_satisfied
      from queue.need_now d where d.need_id = u.id offset 0) d
    left join lateral (
      select w.reason, w.need_id
      from queue.waiting w
      where w.id = d.job_id offset 0) w on true
    where w.reason in ('needs', 'upstream_failed') or d.class = 'p' or d.class = 'f'
      and d.mode & 2/* proceed */ = 0),
  found as materialized (
    select e.job_id, max(e.need_id) filter (where x.is_next) as at, bool_or(x.is_asked) as is_asked,
      bool_or(x.is_back) as is_back
    from edge e
    cross join lateral (select
      case
        when e.reason is null or e.reason not in ('needs', 'upstream_failed') then false
        when e.holder is null then true
        when e.mode & 1/* any */ <> 0 then e.is_satisfied or e.reason = 'upstream_failed' or e.holder = e.need_id
          and e.class = 'f'
        when e.reason = 'needs' then e.class = 'f' and not e.is_satisfied
        else e.holder = e.need_id and e.class <> 'f'
      end as is_asked,
      e.mode & 1/* any */ = 0 and e.reason = 'needs' and e.holder = e.need_id and e.is_satisfied as is_next,
      not e.is_satisfied and e.reason is distinct from 'needs'
        and e.reason is distinct from 'upstream_failed' as is_back) x
    group by e.job_id)
  select array_agg(f.job_id) filter (where f.is_asked), array_agg(f.job_id)
    filter (where f.at is not null and not f.is_asked),
    array_agg(f.at) filter (where f.at is not null and not f.is_asked),
    array_agg(f.job_id) filter (where f.is_back)
  into ask, freed, freed_at, back
  from found f;
end $$;

-- Jobs whose need was the greatest that held them, and is satisfied: the next one below holds them. Returns
-- the jobs without one, and those whose next one has failed: their needs must be counted.
-- Locks: the caller holds the admission lock.
create or replace function queue._find_next_need(p_ids bigint[], p_needs bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
  v_holders bigint[];
  v_left bigint[];
begin
  select array_agg(b.id order by b.id) filter (where b.need_id is not null and not b.is_failed),
    array_agg(b.need_id order by b.id) filter (where b.need_id is not null and not b.is_failed),
    array_agg(b.id) filter (where b.need_id is null or b.is_failed)
  into v_ids, v_holders, v_left
  from (
    select u.id, b.need_id, b.is_failed
    from unnest(p_ids, p_needs) u (id, at)
    left join lateral (
      select d.need_id, d.class = 'f' as is_failed
      from queue.need_now d
      where (d.job_id, d.need_id) < (u.id, u.at) and d.job_id >= u.id and not d.is_satisfied
      order by d.job_id desc, d.need_id desc limit 1) b on true) b;
  update queue.waiting w set need_id = v_holders[width_bucket(w.id, v_ids)] where w.id = any (v_ids);
  return v_left;
end $$;

-- Counts the needs of waiting jobs. met: all are met, and they wait no longer; changed: they fail now, or no
-- longer. The others get the need that holds them.
-- Locks: the caller holds the admission lock.
create or replace function queue._recount_needs(p_ids bigint[], out met bigint[], out changed bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
  v_standings text[];
  v_holders bigint[];
begin
  select array_agg(s.id order by s.id) filter (where s.standing = 'satisfied'),
    array_agg(s.id order by s.id) filter (where x.is_turned and s.standing <> 'satisfied'
      or x.is_held_by_another),
    array_agg(s.standing order by s.id) filter (where x.is_turned and s.standing <> 'satisfied'
      or x.is_held_by_another),
    array_agg(s.holder order by s.id) filter (where x.is_turned and s.standing <> 'satisfied'
      or x.is_held_by_another),
    array_agg(s.id) filter (where x.is_turned)
  into met, v_ids, v_standings, v_holders, changed
  from queue._needs_states(p_ids) s
  cross join lateral (select w.reason, w.need_id from queue.waiting w where w.id = s.id offset 0) w
  cross join lateral (
    select (w.reason = 'needs') = (s.standing = 'failed') as is_turned, s.standing <> 'satisfied'
      and w.need_id is distinct from s.holder as is_held_by_another) x;
  update queue.waiting w
  set reason = case v_standings[width_bucket(w.id, v_ids)] when 'failed' then 'upstream_failed'
    else 'needs' end,
    need_id = v_holders[width_bucket(w.id, v_ids)]
  where w.id = any (v_ids);
  delete from queue.waiting w where w.id = any (met);
end $$;

-- The state of the needs of jobs, by counting: satisfied, waiting or failed. Awaited jobs need only end, but
-- all of them. After a yield, a job under any waits for one of its open needs. A need that was deleted
-- without success is not open, because it will never be satisfied. holder: the need that holds the job, NULL
-- if every change matters.
create or replace function queue._needs_states(p_ids bigint[])
returns table (id bigint, standing text,
  holder bigint) language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select u.id, x.standing,
      case when x.standing = 'waiting' and not (n.mode & 1/* any */ <> 0 and n.awaited > 0) then n.last_pending
        when x.standing = 'failed' and n.mode & 1/* any */ = 0 then n.last_failed end
    from unnest(p_ids) u (id)
    left join lateral (
      select s.ignores_needs, s.is_yielded
      from queue.job_override s
      where s.id = u.id offset 0) s on true
    cross join lateral (
      select count(*) filter (where not d.is_awaited) as total,
        coalesce(max(d.mode) filter (where not d.is_awaited), 0) as mode,
        count(*) filter (where d.is_open and not d.is_awaited and d.deleted_state is distinct from 'failed')
          as open,
        count(*) filter (where d.class = 'f') as failed,
        count(*) filter (where d.is_satisfied and not d.is_awaited) as satisfied,
        count(*) filter (where d.is_satisfied and d.is_open and not d.is_awaited) as satisfied_open,
        count(*) filter (where d.is_awaited and d.class = 'p') as awaited,
        max(d.need_id) filter (where d.class = 'p') as last_pending,
        max(d.need_id) filter (where d.class = 'f') as last_failed
      from (
        select d.need_id, d.mode, d.is_open, d.deleted_state, d.mode & 4/* ended */ <> 0 as is_awaited, d.class,
          d.is_satisfied
        from queue.need_now d where d.job_id = u.id offset 0) d) n
    cross join lateral (
      select case when n.total = 0 or s.ignores_needs then 'satisfied'
        when n.mode & 1/* any */ <> 0 then case when s.is_yielded
        and n.open = 0 then 'satisfied'
          when case when s.is_yielded then n.satisfied_open else n.satisfied end > 0 then 'satisfied'
          when n.failed = n.total then 'failed' else 'waiting' end when n.satisfied = n.total then 'satisfied'
            when n.failed > 0 and n.mode & 2/* proceed */ = 0 then 'failed' else 'waiting' end as base) b
    cross join lateral (
      select case when b.base = 'satisfied' and n.awaited > 0 then 'waiting' else b.base end as standing) x;
end $$;

-- Records the largest id that was ever needed, so that admission need not ask whether a newer job is needed.
-- Locks: the caller holds the admission lock. A rollback does not undo it, which does no harm.
create or replace function queue._raise_needed_mark(p_id bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_id > (select s.last_value from queue.needed_seq s) then
    perform setval('queue.needed_seq', p_id);
  end if;
end $$;

-- Marks jobs so that the end of their claim is handed over to their dependents.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
-- Why no end is missed: a row that is locked here gets the mark before its finisher, which waits for the
-- lock, deletes it. A row that its finisher (or a claimer) has locked can't be waited for under the admission
-- lock: a recheck is appended for the next admission, until the row is free or gone. A job in a gate gets the
-- mark when it enters queue.active_job (_queue_entries). A job that is not admitted yet gets it when it goes
-- through the gates (_admit_range). The next check sees jobs that have already finished.
create or replace function queue._mark_needed(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_locked bigint[];
begin
  v_locked := array(select aj.id from queue.active_job aj where aj.id = any (p_ids)
    and aj.flags & 4096/* needed */ = 0 order by aj.id for update skip locked);
  update queue.active_job aj set flags = aj.flags | 4096/* needed */ where aj.id = any (v_locked);
  insert into queue.pending_settlement (xid, job_id, kind, flags)
  select queue._row_locker(aj.xmax), aj.id, 'recheck', 4096/* needed */ from queue.active_job aj
  where aj.id = any (p_ids) and aj.flags & 4096/* needed */ = 0;
end $$;

-- Jobs that have passed the gate of needs, but would not pass it now, go back to wait unless they run.
-- failed: jobs that fail because of that; keys: semaphores in which that left room.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._return_to_needs(p_ids bigint[], out failed bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_job record;
  v_taken record;
begin
  for v_job in
    select s.id, s.standing, s.holder from queue._needs_states(p_ids) s where s.standing <> 'satisfied'
    order by s.id
  loop
    v_taken := queue._dequeue_dependent(v_job.id);
    if v_taken.is_out then
      keys := keys || v_taken.keys;
      insert into queue.waiting (id, reason, need_id)
      values (v_job.id, case v_job.standing when 'failed' then 'upstream_failed' else 'needs' end,
        v_job.holder);
      failed := failed || array(select v_job.id where v_job.standing = 'failed');
    elsif exists (select from queue.active_job aj where aj.id = v_job.id and aj.claim is null) then
      -- a claim has locked its row, and may be rolled back
      insert into queue.pending_settlement (xid, job_id, kind, flags)
      select queue._row_locker(aj.xmax),
        coalesce(v_job.holder, (select d.need_id from queue.need d where d.job_id = v_job.id limit 1)),
        'recheck', 4096/* needed */
      from queue.active_job aj where aj.id = v_job.id;
    end if;
  end loop;
end $$;

-- Takes a job that has passed the gate of needs out of the place where it waits (_dequeue). Not is_out: it
-- runs, is finished, is held, moves, or waits for its needs.
-- Locks: the caller holds the admission lock; the row of queue.active_job by skip locked.
create or replace function queue._dequeue_dependent(p_id bigint, out is_out boolean, out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
begin
  is_out := false;
  if not exists (select from queue.waiting w where w.id = p_id
    and w.reason in ('held', 'needs', 'upstream_failed', 'parked', 'moving')) then
    select coalesce(t.place <> 'log', false), t.keys into is_out, keys from queue._dequeue(p_id) t;
  end if;
end $$;

-- The state of a deleted job, for jobs that come to need it.
create or replace function queue._deleted_state(p_id bigint)
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return case when exists (select from queue.deleted d where d.id = p_id) then 'succeeded' else 'failed' end;
end $$;

-- admit/yields.sql
-- Yields: needs that a job adds while it runs.

-- The payload that retry_later hands over: the needs to add. JSON null: run again whatever the needs are.
-- Raises: 22023, QJ001, QJ005.
create or replace function queue._check_yield(p_id bigint, p_needs jsonb)
returns jsonb language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_needs bigint[];
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
  perform queue._refuse_cycle(p_id, v_needs);
  return jsonb_build_object('needs', to_jsonb(v_needs));
end $$;

-- The payload that await_jobs hands over. A job that has ended may be awaited also when its retention is
-- over. One that no longer exists counts as ended, if the job has awaited it before, or if a finished step
-- has its id in a list: then it did exist, because the job has deferred it in that step.
-- Raises: QJ001, QJ005.
create or replace function queue._check_awaited(p_id bigint, p_claim bigint, p_ids jsonb)
returns jsonb language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[] := array(select distinct n::bigint from jsonb_array_elements_text(p_ids) n order by 1);
  v_missing bigint[];
  v_unknown bigint;
begin
  perform pg_current_xact_id();  -- as in _check_needs
  v_missing := array(
    select u.id from unnest(v_ids) u (id)
    left join lateral (select j.id from queue.job j where j.id = u.id offset 0) j on true
    where j.id is null);
  if v_missing <> '{}' then
    select u.id into v_unknown from unnest(v_missing) u (id)
    where not exists (select from queue.need d where d.job_id = p_id and d.need_id = u.id)
      and u.id not in (
        select x.id::bigint
        from queue.step s
        cross join lateral jsonb_array_elements(
          case when jsonb_typeof(s.value) = 'array' then s.value end) e
        cross join lateral (select case when e::text ~ '^[0-9]{1,18}$' then e::text end as id) x
        where s.job_id = p_id and x.id is not null)
    limit 1;
    perform queue._job_not_found(v_unknown) where v_unknown is not null;
  end if;
  perform queue._refuse_cycle(p_id, v_ids);
  return jsonb_build_object('needs', to_jsonb(v_ids), 'awaits', p_claim, 'state', 'waiting');
end $$;

-- Raises: QJ005 if one of p_needs needs p_id.
create or replace function queue._refuse_cycle(p_id bigint, p_needs bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_pending record;
begin
  if p_needs = '{}' then
    return;
  end if;
  select y.jobs, y.needs into v_pending from queue._pending_yields() y;
  if queue._closes_cycle(p_id, p_needs, v_pending.jobs, v_pending.needs) then
    raise exception using errcode = 'QJ005', message = 'the new need would create a dependency cycle',
      detail = 'path: '
        || array_to_string(queue._cycle_path(p_id, p_needs, v_pending.jobs, v_pending.needs), ' -> '),
      hint = 'A job can''t need a job that needs it, directly or through others.';
  end if;
end $$;

-- Yields that are committed and not settled yet: jobs[i] will need needs[i].
create or replace function queue._pending_yields(out jobs bigint[], out needs bigint[])
language plpgsql stable parallel safe security invoker as $$
begin
  select array_agg(h.job_id), array_agg(n.id::bigint) into jobs, needs
  from queue.pending_settlement h cross join lateral jsonb_array_elements_text(h.payload -> 'needs') n (id)
  where h.kind = 'again'
    and h.xid >= (select least(k.next_xid, k.in_flight[1]) from queue.cursor_now k);
end $$;

-- Whether one of p_needs needs p_id, directly or indirectly. Needs that have succeeded count: they may be
-- retried.
-- p_jobs, p_more: additional needs that are not written yet.
create or replace function queue._closes_cycle(p_id bigint, p_needs bigint[], p_jobs bigint[],
  p_more bigint[])
returns boolean language plpgsql stable parallel safe security invoker as $$
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
        (select n from (select j.needs from queue.job j where j.id = w.id offset 0) j
          cross join lateral unnest(j.needs) n)) d
      where w.id <> p_id)
    select from walk w where w.id = p_id);
end $$;

-- The shortest cycle that p_needs would create: p_id, its need, and so on to p_id.
create or replace function queue._cycle_path(p_id bigint, p_needs bigint[], p_jobs bigint[], p_more bigint[])
returns bigint[] language plpgsql stable parallel safe security invoker as $$
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
  select array_agg(w.id), array_agg(w.depth), min(w.depth) filter (where w.id = p_id)
  into v_ids, v_depths, v_depth from walk w;
  while v_depth > 1 loop
    v_depth := v_depth - 1;
    select w.id || v_path into v_path from unnest(v_ids, v_depths) w (id, depth)
    where w.depth = v_depth
      and (exists (select from queue._direct_needs(w.id) d where d.id = v_path[1])
           or exists (select from unnest(p_jobs, p_more) y (job_id, need_id)
             where y.job_id = w.id and y.need_id = v_path[1]))
    limit 1;
  end loop;
  return p_id || v_path;
end $$;

-- How its needs hold a job that yields, as far as its transaction can see: waiting or upstream_failed, NULL
-- if they don't. Like _needs_states, which sees the yield only after it has settled (_add_yield_needs). The
-- needs have no rows yet, so queue.need_now can't tell their states. Awaited jobs need only end.
create or replace function queue._yield_state(p_id bigint, p_payload jsonb)
returns text language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_mode smallint := (select queue._needs_mode(j.options) from queue.job j where j.id = p_id);
  v_now bigint := pg_current_xact_id()::text::bigint;
  v_began bigint := (select s.began_xid::text::bigint from queue.job_override s where s.id = p_id);
  v_needs record;
begin
  if p_payload ? 'ignore' then
    return null;
  end if;
  select count(*) filter (where not d.is_awaited) as total,
    count(*) filter (where c.class = 'f' and not d.is_awaited) as failed,
    count(*) filter (where x.is_satisfied and not d.is_awaited) as satisfied,
    count(*) filter (where o.is_open and not d.is_awaited and d.deleted_state is distinct from 'failed')
      as open,
    count(*) filter (where x.is_satisfied and o.is_open and not d.is_awaited) as satisfied_open,
    count(*) filter (where d.claim is not null and coalesce(f.state, d.deleted_state) is null) as awaited
  into v_needs
  from (
    select d.need_id as id, d.is_open, d.deleted_state, d.mode & 4/* ended */ <> 0 as is_awaited,
      d.claim
    from queue.need d where d.job_id = p_id
    union all
    select n::bigint, null, null, false, null from jsonb_array_elements_text(p_payload -> 'needs') n
    where not exists (select from queue.need d where d.job_id = p_id and d.need_id = n::bigint)) d
  left join lateral (
    select f.state, age(f.xmin) as age
    from queue.finished f
    where f.id = d.id offset 0) f on true
  left join lateral (
    select w.reason, age(w.xmin) as age
    from queue.waiting w
    where w.id = d.id and f.state is null offset 0) w on true
  cross join lateral (
    select case when coalesce(f.state, d.deleted_state) = 'succeeded' then 's'
      when coalesce(f.state, d.deleted_state) is not null or w.reason in ('held', 'upstream_failed') then 'f'
      else 'p' end as class) c
  cross join lateral (select c.class = 's' or c.class = 'f' and v_mode & 2/* proceed */ <> 0 as is_satisfied) x
  cross join lateral (
    select coalesce(d.is_open,
      not coalesce(x.is_satisfied and v_now - coalesce(f.age, w.age) < v_began, false)) as is_open) o;
  return case
    when v_needs.satisfied = v_needs.total or v_mode & 1/* any */ <> 0
      and (v_needs.open = 0 or v_needs.satisfied_open > 0)
      then case when v_needs.awaited > 0 then 'waiting' end
    when v_mode & 2/* proceed */ = 0
      and case when v_mode & 1/* any */ <> 0 then v_needs.failed = v_needs.total else v_needs.failed > 0 end
      then 'upstream_failed'
    else 'waiting' end;
end $$;

-- Adds the needs of a yield. With the key awaits, which has the claim, these are jobs that it awaits, even if
-- it needs them already: under any, a need alone might not hold it. If two concurrent yields have created a
-- cycle, it adds none and returns false. Under any, a need that the job did not have before counts as
-- satisfied at the start of the run if its end had certainly settled by then (began_xid).
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._add_yield_needs(p_id bigint, p_payload jsonb)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_needs bigint[];
  v_now bigint := pg_current_xact_id()::text::bigint;
begin
  update queue.job_override s
  set ignores_needs = case when p_payload ? 'awaits' then s.ignores_needs else p_payload ? 'ignore' end,
    is_yielded = case when p_payload ? 'awaits' then s.is_yielded else not p_payload ? 'ignore' end,
    extra_flags = s.extra_flags | case when p_payload -> 'needs' <> '[]' then 8/* needs */ else 0 end
  where s.id = p_id;
  if coalesce(p_payload -> 'needs', '[]') = '[]' then
    return true;
  end if;
  v_needs := array(select n::bigint from jsonb_array_elements_text(p_payload -> 'needs') n order by 1);
  if queue._closes_cycle(p_id, v_needs, null, null) then
    return false;
  end if;
  insert into queue.need as t (job_id, need_id, claim, mode, is_open, deleted_state)
  select p_id, u.id, (p_payload ->> 'awaits')::bigint, j.mode, not coalesce(
      (f.state = 'succeeded' or j.mode & 2/* proceed */ <> 0
        and (f.state is not null or w.reason in ('held', 'upstream_failed')))
      and v_now - coalesce(f.age, w.age) < j.began, false),
    case when o.id is null then queue._deleted_state(u.id) end
  from unnest(v_needs) u (id)
  cross join lateral (
    select case when p_payload ? 'awaits' then 4/* ended */ else queue._needs_mode(j.options) end as mode,
      j.began_xid::text::bigint as began
    from queue.job_now j where j.id = p_id offset 0) j
  left join lateral (select o.id from queue.job o where o.id = u.id offset 0) o on true
  left join lateral (
    select f.state, age(f.xmin) as age
    from queue.finished f
    where f.id = u.id offset 0) f on true
  left join lateral (
    select w.reason, age(w.xmin) as age
    from queue.waiting w
    where w.id = u.id and f.state is null offset 0) w on true
  on conflict on constraint need_pkey do update set mode = t.mode | 4/* ended */,
    claim = coalesce(t.claim, excluded.claim)
    where p_payload ? 'awaits';
  perform queue._raise_needed_mark(v_needs[cardinality(v_needs)]);
  perform queue._mark_needed(v_needs);
  perform queue._propagate_deadline(array[p_id]);
  return true;
end $$;

-- Records for claimed jobs under any which of their needs are satisfied now.
-- Locks: the caller holds the admission lock and the rows of queue.active_job. Why it is exact: committed
-- ends of claims are visible here, and the handler does not start before this transaction commits.
create or replace function queue._begin_any(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_any bigint[];
begin
  v_any := array(
    select u.id from unnest(p_ids) u (id)
    cross join lateral (select j.options from queue.job j where j.id = u.id offset 0) j
    where queue._needs_mode(j.options) & 1/* any */ <> 0);
  if v_any = '{}' then
    return;
  end if;
  update queue.need d set is_open = not d.is_open
  where d.ctid = any (array(
    select d.ctid
    from unnest(v_any) u (id)
    cross join lateral (
      select d.ctid, d.is_open, d.is_satisfied from queue.need_now d where d.job_id = u.id offset 0) d
    where d.is_open = d.is_satisfied));
  insert into queue.job_override as s (id, began_xid)
  select u.id, pg_snapshot_xmin(pg_current_snapshot()) from unnest(v_any) u (id)
  on conflict on constraint job_override_pkey do update set began_xid = excluded.began_xid,
    is_yielded = false;
end $$;

-- admit/suspended.sql
-- The gate of signals: a suspended job waits here until its signal or event comes, or its wait times out.
--
-- signal and publish only append: the signal or event, and a row of queue.pending_settlement, which admission
-- reads by the same snapshots as the log. Everything else is decided here, under the admission lock: which
-- wait takes a signal, which of several events with the same name counts, and whether a wait has timed out
-- first. So a signal is delivered once and a wait ends once, whatever happens at the same time.
-- Why no wake-up is lost: a job that reaches this gate sees every signal whose settlement has been read,
-- because that signal was committed. A later admission reads the settlement of a signal that commits later,
-- and finds the job waiting here. A job that is elsewhere then (it is held, or needs another job) looks for
-- its signals when it comes back; an event ends its wait at once, because it may not be kept for so long.
-- Two sessions: work/signals.wait.spec, work/signals.timeout.spec.
-- Tests: admit/suspended.sql, work/waits.sql, work/signals.wait.spec.

-- Sends jobs through the gate. passed: the jobs that wait for nothing, have taken their signal or event, or
-- have timed out. The others wait; is_timed: at least one of them has a timeout.
-- Locks: the caller holds the admission lock; the jobs are in no gate, so no other session changes their
-- rows.
create or replace function queue._wait_for_signals(p_ids bigint[], out passed bigint[], out is_timed boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_job record;
  v_payload jsonb;
  v_is_over boolean;
begin
  is_timed := false;
  for v_job in
    select u.id, s.is_suspended, w.job_id, w.signal, w.event, w.until
    from unnest(p_ids) u (id)
    left join lateral (select s.is_suspended from queue.job_override s where s.id = u.id offset 0) s on true
    left join lateral (
      select w.job_id, w.signal, w.event, w.until from queue.suspended w
      where s.is_suspended and w.job_id = u.id offset 0) w on true
    order by u.id
  loop
    v_payload := null;
    v_is_over := v_job.job_id is null;
    if v_job.signal is not null then
      delete from queue.received_signal r
      where r.ctid = (select o.ctid from queue.received_signal o
                      where o.job_id = v_job.id and o.name = v_job.signal order by o.no limit 1)
      returning r.payload into v_payload;
      v_is_over := found;
    elsif v_job.event is not null then
      select e.payload into v_payload from queue.event e
      where e.name = v_job.event and e.is_standing and e.expires_at > v_now;
      v_is_over := found;
    end if;
    if not v_is_over and v_job.until <= v_now is not true then
      insert into queue.waiting (id, reason, at) values (v_job.id, 'signal', v_job.until);
      is_timed := is_timed or v_job.until is not null;
      continue;
    elsif v_job.is_suspended then
      perform queue._end_waits(array[v_job.id], v_payload);
    end if;
    passed := passed || v_job.id;
  end loop;
end $$;

-- Makes signalled jobs ready whose signal ends their wait at this gate, and for which no later gate can be
-- closed: jobs of a plain lane, which a queue with limits does not have. The others are returned, for
-- _take_signals. With a worker it claims them at once, as _claim_newcomer does with new jobs: only from
-- lanes that the worker serves (p_queues; NULL: all) and that are not paused, no job with a timeout, and none
-- if from p_from on several settlements are pending.
-- Its statements are few and short: their set-up is most of the time from a signal to its job's start.
-- is_suspended stays set in queue.job_override, until the end of an attempt or this gate sets it anew.
-- Locks: the caller holds the admission lock, which protects all rows that change here. No wake-up can be
-- lost: a signal that is not taken here is left to _take_signals.
create or replace function queue._resume_signalled(
  p_ids bigint[], p_worker bigint default null, p_queues text[] default null, p_from xid8 default null)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_id bigint;
  v_others bigint[];
  v_step text;
  v_no integer;
  v_signal tid;
  v_payload jsonb;
  v_attempt smallint;
  v_lane integer;
  v_deadline timestamptz;
  v_flags smallint;
  v_is_low boolean;
begin
  foreach v_id in array p_ids loop
    select w.step, w.no, r.ctid, r.payload, least(s.attempts, 32766), l.lane,
      coalesce(s.deadline, j.deadline, 'infinity'),
      (j.flags | s.extra_flags) & (128/* lease */ | 512/* retain */ | 4096/* needed */ | -32768/* large */) | 2048/* overridden */
        | l.extra_flags
        | case when (select d.job_id from queue.need d where d.need_id = v_id limit 1) is not null
          then 4096/* needed */ else 0 end,
      l.is_idle or (coalesce(s.deadline, j.deadline, 'infinity'), v_id) < (l.low_deadline, l.low_id)
    into v_step, v_no, v_signal, v_payload, v_attempt, v_lane, v_deadline, v_flags, v_is_low
    from queue.suspended w
    cross join lateral (
      select r.ctid, r.payload from queue.received_signal r
      where r.job_id = v_id and r.name = w.signal order by r.no limit 1) r
    join queue.job_override s on s.id = v_id
    join queue.job j on j.id = v_id
    join queue.lane l on l.queue = coalesce(s.queue, j.queue)
      and l.priority = coalesce(s.priority, j.priority) and l.kind = 0/* lane_plain */
    where w.job_id = v_id and l.tag_base is null and (j.options ? 'share') is not true and s.crashes = 0
      and (j.flags | s.extra_flags) & (7/* lock_or_keys */ | 8/* needs */ | 64/* expires */ | 8448/* queueing_lock */) = 0
      and coalesce(s.scheduled_at, j.scheduled_at) > clock_timestamp() is not true
      and (select p.no from queue.pause p where p.task is not null limit 1) is null
      and (p_worker is null or (j.flags | s.extra_flags) & 128/* lease */ = 0 and l.paused_until is null
        and not l.is_idle and (p_queues is null or l.queue = any (p_queues))
        and (select h.xid from queue.pending_settlement h where h.xid >= p_from limit 1 offset 1) is null);
    if v_step is not null then
      delete from queue.waiting w where w.id = v_id and w.reason || '' = 'signal';
    end if;
    if v_step is null or not found then
      v_others := v_others || v_id;
      continue;
    end if;
    delete from queue.received_signal r where r.ctid = v_signal;
    delete from queue.suspended w where w.job_id = v_id;
    update queue.step s set finished_at = clock_timestamp(), value = v_payload
    where s.job_id = v_id and s.name = v_step and s.no = v_no;
    if p_worker is null then
      insert into queue.active_job (id, deadline, lane, attempt, flags)
      values (v_id, v_deadline, v_lane, v_attempt, v_flags);
      if v_is_low then
        perform queue._lower_marks(array[v_lane], array[v_deadline], array[v_id]);
      end if;
    else
      insert into queue.active_job (id, deadline, lane, attempt, flags, claim, claimed_at, worker_id)
      values (v_id, v_deadline, v_lane, v_attempt + 1, v_flags, nextval('queue.claim_seq'), clock_timestamp(),
        p_worker);
    end if;
  end loop;
  return v_others;
end $$;

-- Ends the waits for these events, and takes the jobs that got a signal out of the gate. Returns the jobs
-- that have left it, which are in no gate now; they check their waits when they come back. The first event of
-- a name counts until it expires. If many jobs wait for an event, this ends the waits of 500 of them; later
-- admissions end those of the others.
-- Locks: the caller holds the admission lock, which protects all rows that change here. Why no wake-up is
-- lost: if there may be more jobs, the event is appended again for the next admission.
create or replace function queue._take_signals(p_ids bigint[], p_events bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
  v_event record;
  v_more bigint[];
begin
  if p_ids is not null then
    with gone as (
      delete from queue.waiting w
      where w.ctid = any (array(
        select w.ctid from unnest(p_ids) u (id)
        cross join lateral (
          select w.ctid from queue.waiting w where w.id = u.id and w.reason || '' = 'signal' offset 0) w))
      returning w.id)
    select array_agg(g.id) into v_ids from gone g;
    -- signals to jobs that were deleted meanwhile
    delete from queue.received_signal r
    where r.job_id = any (array(select u.id from unnest(p_ids) u (id)
      where not exists (select from queue.job j where j.id = u.id)));
  end if;
  for v_event in
    select e.no, e.name, e.is_standing, e.payload from queue.event e
    where e.no = any (p_events) order by e.no
  loop
    if not v_event.is_standing then
      delete from queue.event e
      where e.name = v_event.name and e.is_standing and e.expires_at <= clock_timestamp();
      if exists (select from queue.event e where e.name = v_event.name and e.is_standing) then
        delete from queue.event e where e.no = v_event.no;
        continue;
      end if;
      update queue.event e set is_standing = true where e.no = v_event.no;
    end if;
    v_more := array(select w.job_id from queue.suspended w where w.event = v_event.name limit 500);
    with gone as (
      delete from queue.waiting w
      where w.ctid = any (array(
        select w.ctid from unnest(v_more) s (job_id)
        cross join lateral (
          select w.ctid from queue.waiting w where w.id = s.job_id and w.reason || '' = 'signal' offset 0) w))
      returning w.id)
    select v_ids || array_agg(g.id) into v_ids from gone g;
    perform queue._end_waits(v_more, v_event.payload);
    if cardinality(v_more) = 500 then
      insert into queue.pending_settlement (job_id, kind, flags) values (-v_event.no, 'event', 0);
    end if;
  end loop;
  return v_ids;
end $$;

-- Ends the waits of jobs: the step of each is finished, and the payload is its value.
-- Locks: the caller holds the admission lock; the jobs are in no gate. No wake-up can be lost: the caller
-- sends the jobs on.
create or replace function queue._end_waits(p_ids bigint[], p_payload jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.step s set finished_at = clock_timestamp(), value = p_payload
  where s.ctid = any (array(
    select s.ctid from unnest(p_ids) u (id)
    cross join lateral (
      select w.job_id, w.step, w.no from queue.suspended w where w.job_id = u.id offset 0) w
    cross join lateral (
      select s.ctid from queue.step s
      where s.job_id = w.job_id and s.name = w.step and s.no = w.no offset 0) s));
  delete from queue.suspended w where w.job_id = any (p_ids);
  update queue.job_override s set is_suspended = false where s.id = any (p_ids);
end $$;

-- Deletes expired events, except those that a later admission must still deliver.
-- Locks: the caller holds the admission lock. No wake-up can be lost: every job that waits for one of these
-- events has got it.
create or replace function queue._prune_events(p_max integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.event e
  where e.ctid = any (array(
    select e.ctid from queue.event e
    where e.expires_at <= clock_timestamp()
      and not exists (select from queue.pending_settlement h where h.kind = 'event' and h.job_id = -e.no)
    limit p_max));
end $$;

-- admit/groups.sql
-- Groups: counting their jobs, and deferring their callbacks.
--
-- Everything here runs under the admission lock. A job joins its group when it is admitted. The flag needed,
-- which defer sets for it, hands its end over to admission, as that of a job that others need. Each change is
-- counted by comparing a member's row with queue.finished, so it does not matter how often, or why, a job is
-- looked at: when it ends, is retried, or is marked as done.
--
-- A settlement of kind group (job_id: the group's number, negative) makes an admission decide what follows:
-- close_group appends one, and so does the count of the last unfinished job or the first failed one.
-- Why no callback is lost, or comes too early: that settlement is read like the log, so an admission that
-- reads it has read all jobs that were committed before it, or has left them in the backlog, and then it is
-- appended again. When a group was closed, admission first looks which transactions may still add jobs (see
-- defer/group_option.sql), and appends one settlement for each, which is read when that transaction has
-- ended, and one for itself. Once none of them is left, no other job can join.
-- Why a callback is deferred once: its job's id is stored in the group's state, by the same transaction.
-- Two sessions: admit/groups.*.spec.

-- Lets new jobs join their groups. A job whose group is gone joins none.
-- Locks: the caller holds the admission lock.
create or replace function queue._join_groups(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_group record;
begin
  for v_group in
    with joined as (
      insert into queue.group_member (job_id, group_no)
      select u.id, g.no
      from unnest(p_ids) u (id)
      cross join lateral (
        select j.options ->> 'group' as name from queue.job j
        where j.id = u.id and j.options ? 'group' offset 0) j
      cross join lateral (select g.no from queue.job_group g where g.name = j.name offset 0) g
      on conflict on constraint group_member_pkey do nothing
      returning group_no)
    select j.group_no as no, count(*)::integer as jobs from joined j group by 1
  loop
    perform queue._add_to_group(v_group.no, v_group.jobs, 0, 0, 0);
  end loop;
end $$;

-- Counts jobs as they are now: those that have ended, or run again.
-- Locks: the caller holds the admission lock.
create or replace function queue._count_in_groups(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_group record;
begin
  if not exists (select from queue.job_group) then
    return;
  end if;
  for v_group in
    with changed as materialized (
      select m.ctid as tid, m.group_no, m.state as old, f.state
      from (select distinct u.id from unnest(p_ids) u (id)) u
      cross join lateral (
        select m.ctid, m.group_no, m.state from queue.group_member m where m.job_id = u.id offset 0) m
      left join lateral (select f.state from queue.finished f where f.id = u.id offset 0) f on true
      where m.state is distinct from f.state),
    counted as (
      update queue.group_member m set state = (select f.state from queue.finished f where f.id = m.job_id)
      where m.ctid = any (array(select c.tid from changed c)))
    select c.group_no as no,
      count(*) filter (where c.state = 'succeeded')
        - count(*) filter (where c.old = 'succeeded') as succeeded,
      count(*) filter (where c.state = 'failed') - count(*) filter (where c.old = 'failed') as failed,
      count(*) filter (where c.state = 'cancelled') - count(*) filter (where c.old = 'cancelled') as cancelled
    from changed c group by 1
  loop
    perform queue._add_to_group(v_group.no, 0, v_group.succeeded::integer, v_group.failed::integer,
      v_group.cancelled::integer);
  end loop;
end $$;

-- Adds to a group's counts. If a callback may be due, the next admission looks.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: see the top.
create or replace function queue._add_to_group(p_no bigint, p_jobs integer, p_succeeded integer,
  p_failed integer, p_cancelled integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_state record;
begin
  update queue.group_state s
  set tick = s.tick + 1, jobs = s.jobs + p_jobs, succeeded = s.succeeded + p_succeeded,
    failed = s.failed + p_failed, cancelled = s.cancelled + p_cancelled
  where s.group_no = p_no
    and s.tick = (select n.tick from queue.group_state n where n.group_no = p_no order by n.tick desc limit 1)
  returning s.standing, s.jobs - s.succeeded - s.failed - s.cancelled as unfinished,
    s.failed + s.cancelled > 0 and s.on_failure_id is null and s.error is null as may_fail into v_state;
  if v_state.standing = 'closed' and v_state.unfinished = 0 or v_state.standing = 'ended'
    or v_state.may_fail and exists (select from queue.job_group g
      where g.no = p_no and g.callbacks -> 'on_failure' <> 'null')
  then
    insert into queue.pending_settlement (job_id, kind, flags) values (-p_no, 'group', 0);
    perform queue._announce();
  end if;
end $$;

-- Decides what follows in these groups: closes them, ends them, and defers their callbacks. All groups in one
-- statement, because thousands may be closed at once, or wait for one backlog.
-- Locks: the caller holds the admission lock; it waits for nobody. Why no wake-up is lost: see the top.
create or replace function queue._settle_groups(p_nos bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_is_read constant boolean := not (exists (select from queue.backlog)
    or exists (select from queue.backlog_part)
    or exists (select from queue.waiting w where w.reason = 'parked'));
begin
  if p_nos is null then
    return;
  end if;
  with seen as materialized (
    select g.no, s.tick, s.standing as old,
      case when s.standing = 'open' and exists (select from queue.group_close c where c.group_no = g.no)
          then 'closing'
        when s.standing in ('closed', 'ended') or s.standing = 'closing' and v_is_read
          and -g.no not in (select h.job_id from queue.pending_settlement h where h.kind = 'group')
          then case when s.jobs = s.succeeded + s.failed + s.cancelled then 'ended' else 'closed' end
        else s.standing end as standing
    from unnest(p_nos) u (no)
    cross join lateral (select g.no from queue.job_group g where g.no = u.no offset 0) g
    cross join lateral (
      select s.* from queue.group_state s where s.group_no = g.no order by s.tick desc limit 1) s),
  -- Not those that have ended: a settlement of one that the cursor has passed would never be read.
  adding as materialized (select a.xid from queue._adding_transactions() a
    where not pg_visible_in_snapshot(a.xid, pg_current_snapshot())),
  again as (
    insert into queue.pending_settlement (xid, job_id, kind, flags)
    select a.xid, -x.no, 'group', 0 from seen x cross join adding a
    where x.old = 'open' and x.standing = 'closing'
    union all
    select pg_current_xact_id(), -x.no, 'group', 0 from seen x
    where x.standing = 'closing' and (x.old = 'open' or not v_is_read))
  update queue.group_state s
  set tick = s.tick + 1, standing = x.standing,
    ended_at = case when x.standing = 'ended' then coalesce(s.ended_at, clock_timestamp()) end
  from seen x
  where s.group_no = x.no and s.tick = x.tick and x.standing <> x.old;
  perform queue._defer_callbacks(p_nos);
end $$;

-- Other transactions that may have added jobs to groups and have not released their locks. Some may have
-- ended: a commit makes its jobs visible first, and releases the locks last. pg_locks has the low 32 bits of
-- their numbers, and those of their savepoints, which are greater.
create or replace function queue._adding_transactions()
returns table (xid xid8) language plpgsql volatile parallel unsafe security invoker rows 5 as $$
declare
  v_own constant xid8 := pg_current_xact_id();
begin
  return query
    select min(v_own::text::bigint + age(v_own::xid) - age(t.transactionid))::text::xid8
    from pg_locks l
    join pg_locks t on t.virtualtransaction = l.virtualtransaction and t.locktype = 'transactionid'
      and t.mode = 'ExclusiveLock' and t.granted
    where l.locktype = 'relation' and l.relation = 'queue.job_group'::regclass and l.mode = 'RowShareLock'
      and l.database = (select d.oid from pg_database d where d.datname = current_database())
      and l.pid is distinct from pg_backend_pid()
    group by l.virtualtransaction;
end $$;

-- Defers the callbacks of groups that are due and have not been deferred: those of 200 groups, so that nobody
-- waits long for the admission lock; the next admission goes on with the others.
-- Locks: the caller holds the admission lock. An error is recorded, and keeps nothing from going on.
create or replace function queue._defer_callbacks(p_nos bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_due record;
  v_id bigint;
  v_error text;  -- of this call, for this group
  v_no bigint;
  v_groups integer := 0;
  v_rest bigint[];
begin
  for v_due in
    select s.group_no as no, s.tick, c.key, c.value
    from unnest(p_nos) u (no)
    cross join lateral (
      select s.* from queue.group_state s where s.group_no = u.no order by s.tick desc limit 1) s
    cross join lateral (select g.callbacks from queue.job_group g where g.no = s.group_no offset 0) g
    cross join lateral (values
      ('on_end', s.on_end_id, s.standing = 'ended'),
      ('on_success', s.on_success_id, s.standing = 'ended' and s.succeeded = s.jobs),
      ('on_failure', s.on_failure_id, s.failed + s.cancelled > 0)) x (key, id, is_due)
    cross join lateral jsonb_each(g.callbacks) c
    where c.key = x.key and c.value <> 'null' and x.is_due and x.id is null
    order by s.group_no, c.key
  loop
    if v_due.no is distinct from v_no then
      v_no := v_due.no;
      v_groups := v_groups + 1;
      v_error := null;
    end if;
    if v_groups > 200 then
      v_rest := v_rest || v_due.no;
      continue;
    end if;
    v_id := null;
    begin
      v_id := queue._defer_callback(v_due.value);
    exception when others then
      v_error := concat_ws('; ', v_error, format('%s: %s (%s)', v_due.key, left(sqlerrm, 1000), sqlstate));
      raise warning 'pgdefer: a group''s callback can''t be deferred: %', v_error;
    end;
    update queue.group_state s
    set on_end_id = case v_due.key when 'on_end' then v_id else s.on_end_id end,
      on_success_id = case v_due.key when 'on_success' then v_id else s.on_success_id end,
      on_failure_id = case v_due.key when 'on_failure' then v_id else s.on_failure_id end, error = v_error
    where s.group_no = v_due.no and s.tick = v_due.tick;
  end loop;
  insert into queue.pending_settlement (job_id, kind, flags)
  select distinct -u.no, 'group', 0 from unnest(v_rest) u (no);
  if v_groups > 0 then
    perform queue._announce();
  end if;
end $$;

-- Removes groups that ended long ago and have no jobs any more.
-- Locks: the caller holds the admission lock. No wake-up can be lost: all callbacks have been deferred, or
-- can't be due any more.
create or replace function queue._prune_groups(p_max integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_nos bigint[];
begin
  v_nos := array(
    select s.group_no from queue.group_state s
    where s.ended_at < clock_timestamp() - interval '7 days'
      and not exists (select from queue.group_member m where m.group_no = s.group_no)
    order by s.ended_at limit p_max);
  delete from queue.group_state s where s.group_no = any (v_nos);
  delete from queue.group_close c where c.group_no = any (v_nos);
  delete from queue.job_group g where g.no = any (v_nos);
end $$;

-- Invariants of groups, for queue.check().
create or replace function queue._check_groups()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'a group without one state'::text, null::bigint, g.name::text
    from queue.job_group g
    where (select count(*) from queue.group_state s where s.group_no = g.no) <> 1;
  return query
    select 'a job of a group counted in another state'::text, m.job_id, format('%s: %s', m.group_no, m.state)
    from queue.group_member m left join queue.finished f on f.id = m.job_id
    where m.state is distinct from f.state
      and not exists (select from queue.pending_settlement h where h.job_id = m.job_id);
  return query
    select 'a job of a group whose end is not handed over'::text, m.job_id, m.group_no::text
    from queue.group_member m join queue.active_job aj on aj.id = m.job_id
    where aj.flags & 4096/* needed */ = 0;
  return query
    select 'a group that counts other jobs'::text, null::bigint, format('%s: %s', s.group_no, m.unfinished)
    from queue.group_state s
    left join (
      select m.group_no, count(*) filter (where m.state is null) as unfinished,
        count(*) filter (where m.state = 'succeeded') as succeeded,
        count(*) filter (where m.state = 'failed') as failed,
        count(*) filter (where m.state = 'cancelled') as cancelled
      from queue.group_member m group by 1) m on m.group_no = s.group_no
    where s.jobs - s.succeeded - s.failed - s.cancelled <> coalesce(m.unfinished, 0)
      or s.succeeded < m.succeeded or s.failed < m.failed or s.cancelled < m.cancelled;
  return query
    select 'a group that nobody will end'::text, null::bigint, s.group_no::text
    from queue.group_state s
    where (s.standing = 'open' and exists (select from queue.group_close c where c.group_no = s.group_no)
        or s.standing = 'closing'
        or s.standing = 'closed' and s.jobs = s.succeeded + s.failed + s.cancelled
        or s.standing = 'ended' and s.jobs <> s.succeeded + s.failed + s.cancelled)
      and not exists (select from queue.pending_settlement h
        where h.kind = 'group' and h.job_id = -s.group_no);
end $$;

-- admit/one_key.sql
-- The common case of a limit, in few statements: all ended claims of a batch have the same one key.
-- Tests: admit/one_key.sql.

-- Gives the slots of ended claims to the jobs that wait for them, as _release_slots and _refill do together,
-- if all of these claims have one and the same key, the key has no rate, and its jobs that are ready or wait
-- are in one lane without shares. Returns whether it did; if not, nothing has changed.
-- Locks: the caller holds the admission lock.
-- Why no wake-up is lost: as many jobs become ready as _refill would take.
create or replace function queue._pass_slots_on(p_ids bigint[], p_flags smallint[])
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_key text;
  v_is_only boolean;
  v_count record;
  v_room integer;
  v_next record;
begin
  select 'k' || min(j.keys[1]),
    bool_and(cardinality(j.keys) = 1 and (j.options ? 'terms') is not true
      and u.flags & 16390/* counted */ = 4/* keys */)
      and min(j.keys[1]) = max(j.keys[1])
  into v_key, v_is_only
  from unnest(p_ids, p_flags) u (id, flags)
  cross join lateral (select j.keys, j.options from queue.job j where j.id = u.id offset 0) j;
  if not v_is_only then
    return false;
  end if;
  select s.ctid as tid, s.slots, s.limit_id, s.used - cardinality(p_ids) as used, s.lanes, s.ready, s.waiting,
    s.lows, s.low_deadlines, l.low_deadline, l.low_id, l.is_idle,
    s.rate_limit is null and cardinality(s.lanes) <= 1 and l.tag_base is null as is_plain
  into v_count
  from queue.semaphore s
  left join lateral (select l.low_deadline, l.low_id, l.is_idle, l.tag_base from queue.lane l
    where l.lane = s.lanes[1] offset 0) l on true
  where s.key = v_key order by s.tick desc limit 1;
  v_room := least(v_count.slots - v_count.used - v_count.ready[1], v_count.waiting[1]);
  if v_count.is_plain is not true then
    return false;
  elsif v_room > 0 then
    select array_agg(w.tid) as tids, array_agg(w.id) as ids, array_agg(w.attempt) as attempts,
      array_agg(coalesce(s.deadline, w.deadline)) as deadlines,
      -- may have changed since
      array_agg((w.flags | case when s.id is not null then 2048/* overridden */ else 0 end
        | case when (select d.job_id from queue.need d where d.need_id = w.id limit 1) is not null
          then 4096/* needed */ else 0 end)::smallint) as flags,
      max(w.deadline) as last_deadline, (array_agg(w.id order by w.deadline desc, w.id desc))[1] as last_id,
      bool_or(num_nonnulls(w.weight, w.at) > 0 or w.has_several or w.deadline < '0001-01-01 00:00+00')
        as are_special,
      bool_or((coalesce(s.deadline, w.deadline), w.id) < (v_count.low_deadline, v_count.low_id)) as is_low
    into v_next
    from (
      select w.ctid as tid, w.id, w.deadline, w.attempt, w.flags, w.weight, w.at, w.has_several
      from queue.waiting w
      where w.reason = 'slot' and w.key = v_key and w.lane = v_count.lanes[1]
        and (w.deadline, w.id) >= (v_count.low_deadlines[1], v_count.lows[1])
      order by w.deadline, w.id limit v_room) w
    left join lateral (select s.id, s.deadline from queue.job_override s where s.id = w.id offset 0) s
      on true;
    if v_next.are_special is not false then
      return false;
    end if;
    delete from queue.waiting w where w.ctid = any (v_next.tids);
    insert into queue.active_job (id, deadline, lane, attempt, flags)
    select u.id, u.deadline, v_count.lanes[1], u.attempt, u.flags
    from unnest(v_next.ids, v_next.deadlines, v_next.attempts, v_next.flags) u (id, deadline, attempt, flags);
    if v_next.is_low or v_count.is_idle then
      perform queue._lower_marks(array_fill(v_count.lanes[1], array[cardinality(v_next.ids)]),
        v_next.deadlines, v_next.ids);
    end if;
    v_count.ready[1] := v_count.ready[1] + cardinality(v_next.ids);
    v_count.waiting[1] := v_count.waiting[1] - cardinality(v_next.ids);
    v_count.lows[1] := v_next.last_id + 1;
    v_count.low_deadlines[1] := v_next.last_deadline;
  end if;
  with gone as (
    delete from queue.semaphore s where s.ctid = v_count.tid)
  insert into queue.semaphore (key, tick, slots, limit_id, used, lanes, ready, waiting, lows, low_deadlines)
  values (v_key, nextval('queue.tick_seq'), v_count.slots, v_count.limit_id, v_count.used, v_count.lanes,
    v_count.ready, v_count.waiting, v_count.lows, v_count.low_deadlines);
  return true;
end $$;

-- admit/gates.sql
-- The gates, in their order: held, needs, signals, schedule, a paused task, the lock's turn, slots. Each gate
-- checks a job once, and has its own place for waiting jobs. Everything here runs under the admission lock.
--
-- A gate that opens for one job may open another one: the next job of a lock may be discarded at a full key,
-- and so pass its turn on at once. So no gate calls another. Each returns the jobs that it releases, and
-- _advance, the only function that calls them all, continues until none is left.
-- Tests: admit/admission.sql, admit/backlog.sql.

-- Sends jobs through the gates, and continues with the jobs that these release, until nothing moves.
--   p_arrived: in no gate; they have to pass all of them
--   p_turned: in no gate; they have passed all but the last, slots
--   p_ended: finished, but their locks and dependents do not know yet
--   p_keys: semaphores that may have room for waiting jobs
--   p_locks: locks whose job at its turn may have to give way to an older one
--   p_changed: jobs whose dependents must check their needs again
-- The order matters: no function may look for a job that is in no gate, so these come first.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
-- Duration: each link of a chain takes one round of the loop. After 20 rounds and 50 ms the rest is handed
-- over to the next admission, so that nobody waits long for the admission lock. The first 20 rounds run
-- however long they take, so that a short chain ends in the same way on a busy machine.
-- Why no wake-up is lost: the rest is handed over like ended claims (admit/admission.sql), by kind: jobs in
-- no gate (again, with flags 0 because they hold nothing), keys (refill), dependents (recheck), locks
-- (readmit).
create or replace function queue._advance(
  p_arrived bigint[] default null, p_turned bigint[] default null, p_ended bigint[] default null,
  p_keys text[] default null, p_locks text[] default null, p_changed bigint[] default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_until constant timestamptz := clock_timestamp() + interval '50 ms';
  v_arrived bigint[] := p_arrived;
  v_met bigint[];  -- arrived jobs whose needs are met
  v_turned bigint[] := p_turned;
  v_ended bigint[] := p_ended;
  v_keys text[] := p_keys;
  v_locks text[] := p_locks;
  v_changed bigint[] := p_changed;
  v_turns integer := 0;
  v_step record;
begin
  perform queue._count_in_groups(p_changed) where p_changed <> '{}';
  loop
    v_turns := v_turns + 1;
    if v_arrived <> '{}' or v_met <> '{}' then
      v_step := queue._pass_gates(v_arrived, v_met);
      v_arrived := null;
      v_met := null;
      v_turned := v_turned || v_step.passed;
      v_changed := v_changed || v_step.failed;
    end if;
    if v_turned <> '{}' then
      v_step := queue._enter_slots(v_turned, false);
      v_turned := null;
      v_keys := v_keys || v_step.grown;
      if v_step.discarded is not null then
        perform queue._finish_unclaimed(v_step.discarded, 'cancelled', 'limit', null);
        v_ended := v_ended || v_step.discarded;
      end if;
    end if;
    if v_ended <> '{}' then
      perform queue._count_in_groups(v_ended);
      v_turned := queue._leave_locks(v_ended, false);
      v_changed := v_changed || array(
        select u.id from unnest(v_ended) u (id)
        where (select d.job_id from queue.need d where d.need_id = u.id limit 1) is not null);
      v_ended := null;
    end if;
    if v_turned <> '{}' then
      null;
    elsif v_keys <> '{}' then
      v_keys := queue._refill(v_keys);
    elsif v_locks <> '{}' then
      v_step := queue._give_turn_to_older(v_locks, '{}');
      v_locks := null;
      v_arrived := v_step.displaced;
      v_turned := v_step.passed;
      v_keys := v_step.keys;
    elsif v_changed <> '{}' then
      v_step := queue._needs_changed(v_changed);
      v_met := v_step.met;
      v_keys := v_step.keys;
      v_changed := v_step.changed;
    else
      return;
    end if;
    exit when v_turns > 20 and clock_timestamp() > v_until;
  end loop;
  if v_turned <> '{}' then
    perform queue._keep_turns(v_turned);
  end if;
  insert into queue.pending_settlement (job_id, kind, flags, payload)
  select u.id, 'again', 0, null::jsonb from unnest(v_arrived || v_met || v_turned) u (id)
  union all
  select u.id, 'recheck', 4096/* needed */, null from unnest(v_changed) u (id)
  union all
  select m.id, 'readmit', 0, null
  from unnest(v_locks) u (lock)
  cross join lateral (select m.id from queue.lock_member m where m.lock = u.lock order by m.id limit 1) m
  union all
  select 0, 'refill', 0, to_jsonb(v_keys) where v_keys <> '{}';
end $$;

-- Continues with the rest that _advance has handed over in this transaction, which the transaction's own
-- admissions do not read: an operation must find every job in its place.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._advance_own()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_own record;
begin
  loop
    with gone as (
      delete from queue.pending_settlement h
      where h.xid = pg_current_xact_id_if_assigned()
        and (h.kind = 'again' and h.flags = 0 and h.payload is null or h.kind = 'refill')
      returning h.job_id, h.kind, h.payload)
    select count(*) as n, array_agg(g.job_id) filter (where g.kind = 'again') as ids,
      array_agg(k.key) filter (where g.kind = 'refill') as keys
    into v_own
    from gone g left join lateral jsonb_array_elements_text(g.payload) k (key) on g.kind = 'refill';
    exit when v_own.n = 0;
    perform queue._advance(p_arrived => v_own.ids, p_keys => v_own.keys);
  end loop;
end $$;

-- Admits new jobs that are not plain: joins locks, writes needs, and sends them to their first gate.
create or replace function queue._admit_gated(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
  v_joined record;
  v_held bigint[];
  v_flags integer;
  v_only_locks boolean;
begin
  select array_agg(j.id order by j.id), bit_or(j.flags), bool_and(j.flags & 3/* lock */ <> 0
    and j.flags & (8/* needs */ | 16/* scheduled */ | 32/* held */ | 64/* expires */) = 0 and not j.is_overridden)
  into v_ids, v_flags, v_only_locks
  from unnest(p_ids) u (id)
  cross join lateral (
    select j.id, j.flags, j.is_overridden from queue.job_now j where j.id = u.id offset 0) j;
  if v_flags & 4096/* needed */ <> 0 then
    perform queue._join_groups(v_ids);
  end if;
  if v_flags & 3/* lock */ <> 0 then
    v_joined := queue._join_locks(v_ids);
    if v_only_locks and not exists (select from queue.pause p where p.task is not null) then
      -- jobs that wait for their turn need no other check
      perform queue._advance(
        p_arrived => v_joined.displaced, p_turned => v_joined.free || v_joined.passed,
        p_keys => v_joined.keys);
      return;
    end if;
  else
    select null::bigint[] as passed, null::bigint[] as displaced, null::text[] as keys into v_joined;
  end if;
  if v_flags & 8/* needs */ <> 0 then
    perform queue._join_needs(v_ids);
  end if;
  if v_flags & 64/* expires */ <> 0 then
    insert into queue.expiry (id, at)
    select j.id, (j.options ->> 'expires_at')::timestamptz from queue.job j
    where j.id = any (v_ids) and j.flags & 64/* expires */ <> 0;
  end if;
  if v_flags & 32/* held */ <> 0 then
    with held as (
      insert into queue.waiting (id, reason) select j.id, 'held' from queue.job j
      where j.id = any (v_ids) and j.flags & 32/* held */ <> 0
      returning id)
    select array_agg(h.id) into v_held from held h;
    v_ids := array(select u.id from unnest(v_ids) u (id) where u.id not in (select unnest(v_held)));
  end if;
  perform queue._advance(
    p_arrived => v_ids || v_joined.displaced, p_turned => v_joined.passed, p_keys => v_joined.keys,
    p_changed => v_held);
end $$;

-- Sends jobs that are in no gate to the first gate that is closed for them. p_met: jobs that have passed the
-- gate of needs. passed: jobs for which all gates were open, so that only slots are left; failed: jobs that
-- wait because one of their needs has failed.
-- Locks: the caller holds the admission lock.
create or replace function queue._pass_gates(p_ids bigint[], p_met bigint[], out passed bigint[],
  out failed bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_flags integer;
  v_is_later boolean;
  v_is_suspended boolean;
  v_waiting record;
begin
  select bit_or(j.flags), bool_or(j.scheduled_at > v_now), bool_or(j.is_suspended)
  into v_flags, v_is_later, v_is_suspended
  from unnest(p_ids || p_met) u (id)
  cross join lateral (
    select j.flags, j.scheduled_at, j.is_suspended from queue.job_now j where j.id = u.id offset 0) j;
  passed := p_ids;
  if v_flags & 8/* needs */ <> 0 and p_ids <> '{}' then
    v_waiting := queue._wait_for_needs(p_ids);
    passed := v_waiting.passed;
    failed := v_waiting.failed;
  end if;
  passed := passed || p_met;
  if v_is_suspended and passed is not null then
    v_waiting := queue._wait_for_signals(passed);
    passed := v_waiting.passed;
    if v_waiting.is_timed then
      perform queue._rewind_due_mark();
    end if;
  end if;
  if v_is_later then
    with seen as materialized (
      select u.id, j.scheduled_at as at
      from unnest(passed) u (id)
      cross join lateral (select j.scheduled_at from queue.job_now j where j.id = u.id offset 0) j),
    later as (
      insert into queue.waiting (id, reason, at) select x.id, 'schedule', x.at from seen x where x.at > v_now)
    select array_agg(x.id order by x.id) into passed from seen x where x.at is null or x.at <= v_now;
    perform queue._rewind_due_mark();
  end if;
  if passed is not null and exists (select from queue.pause p where p.task is not null) then
    passed := queue._wait_for_task(passed);
  end if;
  if passed is not null and v_flags & 1/* ordered */ <> 0 then
    passed := queue._wait_for_turn(passed);
  end if;
end $$;

-- Returns the jobs whose task is not paused; the others wait.
-- Locks: the caller holds the admission lock.
create or replace function queue._wait_for_task(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_pass bigint[];
  v_waits boolean;
begin
  with seen as materialized (
    select u.id, queue._task_paused_until(j.task, j.queue) as until
    from unnest(p_ids) u (id)
    cross join lateral (select j.task, j.queue from queue.job_now j where j.id = u.id offset 0) j),
  wait as (
    insert into queue.waiting (id, reason, at) select s.id, 'task_paused', nullif(s.until, 'infinity')
    from seen s where s.until > v_now)
  select array_agg(s.id order by s.id) filter (where s.until is null or s.until <= v_now),
    bool_or(s.until > v_now) into v_pass, v_waits from seen s;
  if v_waits then
    perform queue._rewind_due_mark();
  end if;
  return v_pass;
end $$;

-- Moves jobs whose time has come. Returns the new due mark: no waiting job lies before it.
create or replace function queue._admit_due(p_due_at timestamptz, p_slice integer)
returns timestamptz language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_ids bigint[];
  v_keys text[];
  v_at timestamptz;
  v_n integer;
begin
  with due as materialized (
    select d.ctid as tid, d.at, d.key, d.reason = 'slot' and d.lane is not null as is_mark
    from queue.waiting d
    where d.at >= p_due_at and d.at <= v_now order by d.at, d.id limit p_slice),
  gone as (
    delete from queue.waiting w
    where w.ctid = any (array(select d.tid from due d where not d.is_mark))
    returning w.id),
  opened as (
    -- the rates of their keys let more start (_await_rates)
    update queue.waiting w set at = null
    where w.ctid = any (array(select d.tid from due d where d.is_mark))
    returning w.key)
  select (select array_agg(g.id order by g.id) from gone g), (select array_agg(o.key) from opened o),
    (select max(d.at) from due d), (select count(*) from due d)
  into v_ids, v_keys, v_at, v_n;
  perform queue._advance(p_arrived => v_ids, p_keys => v_keys);
  return case when v_n >= p_slice then v_at else v_now end;
end $$;

-- Admits jobs that were parked while there was a backlog, in the order of ids, and returns their number.
create or replace function queue._admit_parked(p_slice integer)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
begin
  with parked as (
    delete from queue.waiting w
    where w.ctid = any (array(select p.ctid from queue.waiting p where p.reason = 'parked'
      order by p.id limit p_slice))
    returning w.id)
  select array_agg(p.id) into v_ids from parked p;
  if v_ids is not null then
    perform queue._admit_gated(v_ids);
  end if;
  return coalesce(cardinality(v_ids), 0);
end $$;

-- admit/override.sql
-- Changes of jobs after they were deferred.
-- Tests: operate/change.sql.

-- Overrides settings that a job was deferred with, and sends the job through the gates again. Running and
-- finished jobs keep their place; the change applies to their next run. Returns false, having changed
-- nothing, if another transaction holds the job's row.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._override(
  p_id bigint, p_queue text default null, p_priority integer default null,
  p_deadline timestamptz default null,
  p_scheduled_at timestamptz default null, p_args jsonb default null)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_taken record := queue._dequeue(p_id);
begin
  if v_taken.place is null then
    -- while its claim is being ended its row of queue.job_override must not be waited for
    perform from queue.active_job aj where aj.id = p_id for update skip locked;
    if not found and exists (select from queue.active_job aj where aj.id = p_id) then
      return false;
    end if;
  end if;
  if exists (
    select from queue.job_now j
    where j.id = p_id and j.tag is not null and (p_queue <> j.queue or p_priority <> j.priority)) then
    perform queue._return_tags(array[p_id]);
  end if;
  insert into queue.job_override as s (id, queue, priority, deadline, scheduled_at, args, size, extra_flags)
  select p_id, p_queue, p_priority, p_deadline, p_scheduled_at, p_args,
    x.size, case when x.size > 2000 then -32768/* large */ else 0 end
  from (
    select octet_length(p_args::text)
        + coalesce(octet_length((select j.options -> 'headers' from queue.job j where j.id = p_id)::text), 0)
          as size) x
  on conflict on constraint job_override_pkey do update
    set (queue, priority, deadline, scheduled_at, args, size, extra_flags)
      = (coalesce(excluded.queue, s.queue), coalesce(excluded.priority, s.priority),
        coalesce(excluded.deadline, s.deadline),
         coalesce(excluded.scheduled_at, s.scheduled_at), coalesce(excluded.args, s.args),
         coalesce(excluded.size, s.size),
         s.extra_flags | excluded.extra_flags);
  if v_taken.place in ('held', 'parked', 'moving') then
    insert into queue.waiting (id, reason) values (p_id, v_taken.place);
  elsif v_taken.place <> 'log' then
    perform queue._advance(p_arrived => array[p_id], p_keys => v_taken.keys);
  end if;
  return true;
end $$;

-- Puts a replacement's args, priority and time into the job that holds the key. While another transaction
-- holds the job's row, which is an operation that waits for the admission lock, the replacement is handed
-- over again; the mark keeps the job from starting until then.
-- Locks: the caller holds the admission lock; the job's row of queue.active_job by skip locked; the key's row
-- by skip locked: while another replacement holds it, that one clears the mark. Two sessions:
-- defer/unique.replace_fetch.spec.
create or replace function queue._apply_replacement(p_id bigint, p_payload jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if exists (select from queue.finished f where f.id = p_id)
    or not exists (select from queue.job j where j.id = p_id) then
    return;
  end if;
  if queue._override(p_id, p_args => p_payload -> 'args', p_priority => (p_payload ->> 'priority')::integer,
                   p_scheduled_at => coalesce((p_payload ->> 'scheduled_at')::timestamptz, '-infinity')) then
    perform queue._clear_replacing(p_payload ->> 'key', (p_payload ->> 'seq')::bigint);
  else
    insert into queue.pending_settlement (job_id, kind, flags, payload)
    values (p_id, 'replace', 0, p_payload);
  end if;
end $$;

-- A retry changes a job's lock (empty: to none): the job passes its turn on, joins the other lock, in the
-- mode that it was deferred with, and goes through the gates again.
-- Locks: the caller holds the admission lock; the job is not running, and no other transaction can see its
-- row of queue.active_job yet.
create or replace function queue._change_lock(p_id bigint, p_lock text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_keys text[];
  v_passed bigint[];
  v_joined record;
begin
  if p_lock = (select coalesce(j.lock, '') from queue.job_now j where j.id = p_id) then
    return;
  end if;
  v_keys := (select t.keys from queue._dequeue(p_id) t);
  v_passed := queue._leave_locks(array[p_id], false);  -- has_turn shows whether it has the turn
  perform queue._write_lock(array[p_id], p_lock);
  v_joined := queue._join_locks(array[p_id]);
  perform queue._advance(
    p_arrived => p_id || v_joined.displaced, p_turned => v_passed || v_joined.passed,
    p_keys => v_keys || v_joined.keys);
end $$;

-- Writes the lock of jobs that are in no lock: another one, or none ('').
-- Locks: the caller holds the admission lock. Why no wake-up is lost: the caller lets the jobs join the lock.
create or replace function queue._write_lock(p_ids bigint[], p_lock text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.job_override s
  set lock = p_lock, extra_flags = s.extra_flags
    | case when p_lock = '' or j.flags & 3/* lock */ <> 0 then 0
      when j.options ->> 'lock_mode' = 'mutex' then 2/* mutex */ else 1/* ordered */ end
  from queue.job j where s.id = any (p_ids) and j.id = s.id;
end $$;

-- Writes the changes that a retry makes: queue and priority. _change_lock changes the lock once the job is in
-- a gate.
-- Locks: the caller holds the admission lock; the jobs are in no gate.
create or replace function queue._change_on_retry(p_ids bigint[], p_change jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._return_tags(p_ids);
  update queue.job_override s
  set queue = coalesce(p_change ->> 'queue', s.queue),
    priority = coalesce((p_change ->> 'priority')::integer, s.priority)
  where s.id = any (p_ids);
end $$;

-- admit/settle.sql
-- Settling: releases what ended claims held and passes it on, under the admission lock.
-- Tests: admit/admission.sql.

-- Frees the slots of ended claims. Sends those jobs that run again through the gates, together with jobs that
-- are in no gate for another reason (flags 0: they did not run, and have no turn to keep). Then gives the
-- slots to the first jobs that wait for them. Only after that may anything take jobs out of their places:
-- before it, a job that runs again is in no gate, and only looks as if it waited for its turn.
-- Locks: the caller holds the admission lock.
create or replace function queue._settle_slots(p_ids bigint[], p_kinds text[], p_flags smallint[],
  p_payloads jsonb[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ended record;
  v_keys text[];
  v_item record;
  v_cyclic bigint[];
begin
  if p_kinds <@ '{signal}' then
    return;
  end if;
  select array_agg(u.id) filter (where u.kind = 'again') as again,
    array_agg(u.id) filter (where u.kind = 'again' and u.flags & 3/* lock */ <> 0) as locked,
    array_agg(u.id) filter (where u.kind in ('ended', 'again') and u.flags & 16390/* counted */ <> 0) as ids,
    array_agg(u.flags) filter (where u.kind in ('ended', 'again') and u.flags & 16390/* counted */ <> 0) as flags,
    bool_or(u.kind = 'again' or u.payload is not null) as has_more
  into v_ended
  from unnest(p_ids, p_kinds, p_flags, p_payloads) u (id, kind, flags, payload);
  if v_ended.ids is not null
    and (v_ended.has_more or not queue._pass_slots_on(v_ended.ids, v_ended.flags)) then
    v_keys := queue._release_slots(v_ended.ids, v_ended.flags);
  end if;
  for v_item in
    select u.id, u.kind, u.payload from unnest(p_ids, p_kinds, p_payloads) u (id, kind, payload)
    where p_payloads is not null and u.payload is not null
  loop
    if v_item.kind = 'refill' then
      v_keys := v_keys || array(select k from jsonb_array_elements_text(v_item.payload) k);
    elsif v_item.payload ? 'change' then
      perform queue._change_on_retry(array[v_item.id], v_item.payload -> 'change');
    elsif v_item.kind = 'again' and not queue._add_yield_needs(v_item.id, v_item.payload) then
      v_cyclic := v_cyclic || v_item.id;
    end if;
  end loop;
  if v_ended.locked is not null then
    perform queue._keep_turns(v_ended.locked);
  end if;
  if v_ended.again is not null then
    perform queue._advance(p_arrived => v_ended.again,
      p_locks => case when v_ended.locked is not null then queue._locks_of(v_ended.locked) end);
  end if;
  for v_item in
    select u.id, u.kind, u.flags, u.payload
    from (
      select u.id, u.kind, u.flags, u.payload, u.n, row_number() over (partition by u.id, u.kind
        order by u.n desc) as from_last
      from unnest(p_ids, p_kinds, p_flags, p_payloads) with ordinality u (id, kind, flags, payload, n)
      where p_payloads is not null and u.payload is not null) u
    -- of several replacements of a job only the last remains
    where u.kind = 'replace' and u.from_last = 1 or u.kind = 'again'
      and (u.payload -> 'change' ? 'lock' or u.id = any (v_cyclic))
    order by u.n
  loop
    if v_item.kind = 'replace' then
      perform queue._apply_replacement(v_item.id, v_item.payload);
    elsif v_item.id = any (v_cyclic) then
      v_keys := v_keys || (select t.keys from queue._dequeue(v_item.id) t);
      if not queue._try_lock_queueing_lock(v_item.id) then
        -- a defer is replacing it, and holds its key
        insert into queue.pending_settlement (job_id, kind, flags, payload)
        values (v_item.id, 'again', v_item.flags & ~16390/* counted */, v_item.payload);
        continue;
      end if;
      perform queue._finish_unclaimed(array[v_item.id], 'failed', 'dependency_cycle',
        'the needs of two jobs form a cycle');
      perform queue._advance(p_ended => array[v_item.id]);
    else
      perform queue._change_lock(v_item.id, v_item.payload #>> '{change,lock}');
    end if;
  end loop;
  if v_keys is not null then
    perform queue._advance(p_keys => v_keys);
  end if;
end $$;

-- Passes on what ended claims release, except their slots: turns and dependents. Delivers signals and events.
-- Locks: the caller holds the admission lock.
create or replace function queue._settle(p_ids bigint[], p_kinds text[], p_flags smallint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ended record;
  v_gated bigint[];  -- jobs with a signal that have to pass the gates
begin
  if cardinality(p_ids) > 500 and 'signal' = any (p_kinds) then
    select k.ids, k.kinds, k.flags into p_ids, p_kinds, p_flags
    from queue._hand_signals_over(p_ids, p_kinds, p_flags) k;
  end if;
  if p_kinds <@ '{signal}' then
    v_gated := queue._resume_signalled(p_ids);
    if v_gated is not null then
      perform queue._advance(p_arrived => queue._take_signals(v_gated, null));
    end if;
    return;
  end if;
  select array_agg(u.id) filter (where u.kind = 'ended' and u.flags & 3/* lock */ <> 0) as locked,
    array_agg(u.id) filter (where u.kind = 'ended' and u.flags & 4096/* needed */ <> 0) as needed,
    array_agg(distinct u.id) filter (where u.kind = 'recheck') as recheck,
    array_agg(distinct u.id) filter (where u.kind = 'readmit') as readmit,
    array_agg(distinct u.id) filter (where u.kind = 'signal') as signalled,
    array_agg(distinct -u.id) filter (where u.kind = 'event') as events,
    array_agg(distinct -u.id) filter (where u.kind = 'group') as groups
  into v_ended
  from unnest(p_ids, p_kinds, p_flags) u (id, kind, flags);
  if v_ended.locked is not null or v_ended.needed is not null then
    perform queue._advance(
      p_turned => case when v_ended.locked is not null then queue._leave_locks(v_ended.locked, true) end,
        p_changed => v_ended.needed);
  end if;
  if v_ended.recheck is not null then
    perform queue._recheck_needs(v_ended.recheck);
  end if;
  if v_ended.readmit is not null then
    perform queue._readmit(v_ended.readmit);
  end if;
  if v_ended.signalled is not null or v_ended.events is not null then
    perform queue._advance(p_arrived => queue._take_signals(v_ended.signalled, v_ended.events));
  end if;
  if v_ended.groups is not null then
    perform queue._settle_groups(v_ended.groups);
  end if;
end $$;

-- Leaves an eighth of the signals among the settlements, but at least 500, and hands the others over to later
-- admissions, so that nobody waits long for the admission lock. A fixed number would have each signal handed
-- over as often as there are such numbers. Returns what is left, in its order.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: the signals are appended again, and
-- their jobs wait at their gate until then.
create or replace function queue._hand_signals_over(p_ids bigint[], p_kinds text[], p_flags smallint[],
  out ids bigint[], out kinds text[], out flags smallint[])
language plpgsql volatile parallel unsafe security invoker as $$
begin
  with seen as materialized (
    select u.id, u.kind, u.flags, u.n, u.kind = 'signal'
      and row_number() over (partition by u.kind = 'signal' order by u.n)
        > greatest(500, count(*) over (partition by u.kind = 'signal') / 8) as is_later
    from unnest(p_ids, p_kinds, p_flags) with ordinality u (id, kind, flags, n)),
  later as (
    insert into queue.pending_settlement (job_id, kind, flags)
    select s.id, 'signal', 0 from seen s where s.is_later order by s.n)
  select array_agg(s.id order by s.n), array_agg(s.kind order by s.n), array_agg(s.flags order by s.n)
  into ids, kinds, flags from seen s where not s.is_later;
end $$;

-- Sends ready jobs through the gates again; jobs whose rows another transaction holds follow once that ends.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
-- Why none is forgotten: a row that is not taken out is handed over again, each time, until it is free,
-- claimed or gone.
-- Two sessions: operate/pause.fetch.spec, operate/pause.late.spec.
create or replace function queue._readmit(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_taken record;
begin
  v_taken := queue._dequeue_all(array(select aj.id from queue.active_job aj
    where aj.id = any (p_ids) and aj.claim is null));
  insert into queue.pending_settlement (xid, job_id, kind, flags)
  select queue._row_locker(aj.xmax), aj.id, 'readmit', 0 from queue.active_job aj
  where aj.id = any (p_ids) and aj.claim is null;
  -- jobs that have left queue.active_job since may also keep the turn from an older job
  perform queue._advance(p_arrived => v_taken.ids, p_keys => v_taken.keys, p_locks => queue._locks_of(p_ids));
end $$;

-- Rechecks: sets marks again, checks the dependents of ended jobs, and passes deadlines on.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._recheck_needs(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._mark_needed(p_ids);
  perform queue._advance(p_changed => p_ids);
  perform queue._propagate_deadline(array(
    select distinct d.job_id from unnest(p_ids) u (id)
    cross join lateral (select d.job_id from queue.need d where d.need_id = u.id offset 0) d));
end $$;

-- Reads new pending settlements by the same snapshots as the log.
-- Locks: the caller holds the admission lock.
create or replace function queue._take_settlements(
  p_xmax xid8, p_ended xid8[], p_upto pg_snapshot, p_own xid8, out ids bigint[], out kinds text[],
  out flags smallint[], out payloads jsonb[])
language plpgsql volatile parallel unsafe security invoker as $$
begin
  with gone as (
    delete from queue.pending_settlement h
    where h.ctid = any (array(
      select h.ctid from unnest(p_ended) e (x)
      cross join lateral (select h.ctid from queue.pending_settlement h where h.xid = e.x offset 0) h
      union all
      select h.ctid from queue.pending_settlement h
      where h.xid >= p_xmax and h.xid < pg_snapshot_xmax(p_upto) and pg_visible_in_snapshot(h.xid, p_upto)
        and h.xid is distinct from p_own))
    returning h.job_id, h.kind, h.flags, h.payload, h.seq)
  select array_agg(g.job_id order by g.seq), array_agg(g.kind order by g.seq),
    array_agg(g.flags order by g.seq), array_agg(g.payload order by g.seq)
  into ids, kinds, flags, payloads from gone g;
end $$;

-- Committed pending settlements that the cursor has passed, so that no admission would ever read them. There
-- are none, except after a bug or half a restore. Those that are in flight, or have ended since the cursor
-- moved, do not count (admit/admission.sql).
create or replace function queue._orphaned_settlements()
returns table (xid xid8, seq bigint, job_id bigint, kind text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select h.xid, h.seq, h.job_id, h.kind
    from queue.cursor_now k
    join queue.pending_settlement h on h.xid < k.next_xid and h.xid <> all (k.in_flight);
end $$;

-- Hands them over to the next admission again.
-- Locks: the caller holds the admission lock, so that neither the cursor nor the settlements move meanwhile.
create or replace function queue._repair_settlements()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.pending_settlement h set xid = pg_current_xact_id()
  where (h.xid, h.seq) in (select o.xid, o.seq from queue._orphaned_settlements() o);
end $$;

-- admit/backlog.sql
-- The backlog: parts of the log that are too large for one slice, read by priority.

-- Scans the backlog for priorities, part by part, for at most 50 ms, so that the most urgent jobs can be read
-- first, wherever they are. The first 20 parts are scanned however long that takes: on a busy machine 50 ms
-- may pass without any work. If a part has more than 8 priorities, neighbouring ones form a band, which is
-- read as one.
-- Locks: the caller holds the admission lock.
create or replace function queue._scan_backlog(p_slice integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_until constant timestamptz := clock_timestamp() + interval '50 ms';
  v_turns integer := 0;
  v_range record;
  v_seen record;
  v_bands record;
begin
  loop
    select b.* into v_range from queue.backlog b order by b.no limit 1;
    exit when not found;
    select count(*) as n, max(s.priority) as high, min(s.priority) as low,
      (array_agg(s.xid))[count(*)] as to_xid, (array_agg(s.id))[count(*)] as to_id
    into v_seen
    from (
      select l.xid, l.id, coalesce((l.job_options).priority, 0) as priority
      from queue.log l
      where (l.xid, l.id) > (v_range.from_xid, v_range.from_id) and l.xid <= v_range.to_xid
        and pg_visible_in_snapshot(l.xid, v_range.upto) and l.xid is distinct from v_range.own
      order by l.xid, l.id limit p_slice) s;
    if v_seen.n > 0 then
      if v_seen.low = v_seen.high then
        select array[v_seen.high] as tops, array[v_seen.low] as bottoms into v_bands;
      else
        select array_agg(b.top order by b.top desc) as tops,
          array_agg(b.bottom order by b.top desc) as bottoms into v_bands
        from (
          select max(r.priority) as top, min(r.priority) as bottom
          from (
            select p.priority, row_number() over (order by p.priority desc) - 1 as n,
              count(*) over () as total
            from (
              select distinct coalesce((l.job_options).priority, 0) as priority from queue.log l
              where (l.xid, l.id) > (v_range.from_xid, v_range.from_id)
                and (l.xid, l.id) <= (v_seen.to_xid, v_seen.to_id)
                and pg_visible_in_snapshot(l.xid, v_range.upto) and l.xid is distinct from v_range.own) p) r
          group by r.n * 8 / greatest(r.total, 8)) b;
      end if;
      insert into queue.backlog_part (no, priority, is_first, is_mixed, from_xid, from_id, to_xid, to_id,
        upto, own, tops, bottoms)
      values (nextval('queue.tick_seq'), v_bands.tops[1], v_range.is_first, v_seen.low < v_seen.high,
        v_range.from_xid, v_range.from_id, v_seen.to_xid, v_seen.to_id, v_range.upto, v_range.own,
        v_bands.tops, v_bands.bottoms);
    end if;
    if v_seen.n < p_slice then
      delete from queue.backlog b where b.no = v_range.no;
    else
      update queue.backlog b set from_xid = v_seen.to_xid, from_id = v_seen.to_id where b.no = v_range.no;
    end if;
    v_turns := v_turns + 1;
    exit when v_turns >= 20 and clock_timestamp() > v_until;
  end loop;
end $$;

-- Removes the most urgent band from the backlog, the oldest of equally urgent ones, and returns it: rows of
-- the log from (from_xid, from_id), which has been read already, to (to_xid, to_id), with priorities from
-- bottom to top. upto NULL: there is none. must_park: older jobs of a lock may be left behind or parked, so
-- jobs with an ordered lock must be parked too (_admit_range).
-- Locks: the caller holds the admission lock.
create or replace function queue._next_backlog_part(
  out from_xid xid8, out from_id bigint, out to_xid xid8, out to_id bigint, out upto pg_snapshot,
  out own xid8,
  out top integer, out bottom integer, out must_park boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_no bigint;
  v_is_last boolean;
begin
  select p.no, p.from_xid, p.from_id, p.to_xid, p.to_id, p.upto, p.own, p.tops[1], p.bottoms[1],
    cardinality(p.tops) = 1,
    not p.is_first or p.is_mixed or exists (select from queue.backlog_part o where o.no < p.no)
      or exists (select from queue.waiting w where w.reason = 'parked')
  into v_no, from_xid, from_id, to_xid, to_id, upto, own, top, bottom, v_is_last, must_park
  from queue.backlog_part p order by p.priority desc, p.no limit 1;
  if v_is_last then
    delete from queue.backlog_part p where p.no = v_no;
  else
    update queue.backlog_part p set priority = p.tops[2], tops = p.tops[2:], bottoms = p.bottoms[2:]
    where p.no = v_no;
  end if;
end $$;

-- admit/log.sql
-- Reading the log: the new rows. How far it has been read: admit/cursor.sql.
-- Tests: admit/admission.sql, admit/admission.two.spec.

-- Admits at most p_slice jobs of a range of the log, with priorities from p_bottom to p_top if given. The
-- rest goes to queue.backlog (is_cut). Plain jobs go to queue.active_job here; the others go through the
-- gates, and so do jobs that may be needed, as their ids are at most p_high_need_id. With p_park, jobs with
-- an ordered lock are parked until all backlog has been read, and are then admitted in the order of ids,
-- because the backlog may contain older jobs of the same lock.
-- Locks: the caller holds the admission lock.
create or replace function queue._admit_range(
  p_from_xid xid8, p_from_id bigint, p_to_xid xid8, p_to_id bigint, p_upto pg_snapshot, p_own xid8,
  p_slice integer,
  p_high_id bigint, p_high_need_id bigint, p_has_task_pause boolean, p_park boolean,
  p_top integer default null, p_bottom integer default null,
  out n integer, out high_id bigint, out is_cut boolean, out gated bigint[], out parked bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_low bigint[];
begin
  with fresh as materialized (
    select j.id, j.flags, coalesce(j.deadline, 'infinity') as deadline, l.lane, l.extra_flags,
      (coalesce(j.deadline, 'infinity'), j.id) < (l.low_deadline, l.low_id) or l.is_idle as is_low,
      j.flags & (8575/* gated */ | 4096/* needed */) = 0 and j.id > p_high_need_id and l.lane is not null
        and not p_has_task_pause and l.tag_base is null and (j.options ? 'share') is not true as is_plain
    from (select j.id, j.flags, j.deadline, j.queue, j.priority, j.options from queue.job j
          where (j.xid, j.id) > (p_from_xid, p_from_id) and (j.xid, j.id) <= (p_to_xid, p_to_id)
            and (p_top is null or j.priority between p_bottom and p_top)
            and pg_visible_in_snapshot(j.xid, p_upto) and j.xid is distinct from p_own
          order by j.xid, j.id limit p_slice) j
    left join lateral (select l.lane, l.low_deadline, l.low_id, l.is_idle, l.extra_flags, l.tag_base
                       from queue.lane l
                       where l.queue = j.queue and l.priority = j.priority
                         and l.kind = 0/* lane_plain */ limit 1) l on true),
  plain as (
    insert into queue.active_job (id, deadline, lane, attempt, flags)
    select x.id, x.deadline, x.lane, 0, x.flags | x.extra_flags from fresh x where x.is_plain)
  select count(*), greatest(p_high_id, max(x.id)),
    array_agg(x.id) filter (where not x.is_plain and not (p_park and x.flags & 1/* ordered */ <> 0)),
    array_agg(x.id) filter (where p_park and x.flags & 1/* ordered */ <> 0),
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
    perform queue._lower_marks(array_agg(aj.lane), array_agg(aj.deadline), array_agg(aj.id))
      from queue.active_job aj where aj.id = any (v_low);
  end if;
end $$;

-- admit/restore.sql
-- After a restore or a copy: stored transaction ids and numbers are no longer valid.

-- Begins a new era if one is due, and after a restore into another cluster admits again the jobs whose stored
-- transaction ids are no longer valid.
-- Locks: if a new era is due, the admission lock, waited for: the caller holds nothing. Then the row of
-- queue.installation, which no other session locks for long. For why no number of an ended era is used again
-- see _ensure_era.
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
    return;  -- another session has begun it meanwhile
  end if;
  if exists (select from queue.installation i
    where i.system_identifier <> (select c.system_identifier from pg_control_system() c)) then
    perform queue._restart_cursor();
  end if;
  perform queue._begin_era(v_era);
end $$;

-- Called by a session before its first claim. Once is enough, because an era ends together with all sessions
-- that could claim: with the server or its recovery; a session of a standby could not claim, so it has not
-- called this; or with the tables, when they are created again. Other cases lose nothing. A rolled-back
-- transaction forgets the call.
-- Locks: as _check_era: the caller holds nothing.
create or replace function queue._ensure_era()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_installation text := to_regclass('queue.installation')::oid::text;
begin
  if current_setting('pgdefer.era', true) is distinct from v_installation then
    perform queue._check_era();
    perform set_config('pgdefer.era', v_installation, false);
  end if;
end $$;

-- After a restore into another cluster the stored transaction ids mean nothing, or lie in the future: admits
-- again all jobs that have not been admitted, and gives every row an xid that this cluster has seen.
-- Locks: the caller holds the admission lock.
create or replace function queue._restart_cursor()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_snapshot pg_snapshot := pg_current_snapshot();
begin
  delete from queue.backlog;
  delete from queue.backlog_part;
  delete from queue.deleted;
  -- also where a stored id happens to be that of a transaction in progress, this one included
  update queue.job j set xid = '3'
  where j.xid >= least(pg_snapshot_xmin(v_snapshot), pg_current_xact_id());
  update queue.job j set xid = pg_current_xact_id()
  where not exists (select from queue.active_job aj where aj.id = j.id)
    and not exists (select from queue.finished f where f.id = j.id)
    and not exists (select from queue.waiting w where w.id = j.id)
    and not exists (select from queue.job_now n join queue.lock_member m on m.lock = n.lock and m.id = n.id
                    where n.id = j.id)
    and not exists (select from queue.pending_settlement h where h.job_id = j.id
      and h.kind in ('ended', 'again'));
  update queue.pending_settlement h set xid = pg_current_xact_id();
  update queue.horizon h set looked_at = '-infinity', looked_xid = '0';
  perform queue._raise_needed_mark((select max(d.need_id) from queue.need d));
  insert into queue.cursor (tick, next_xid, in_flight, high_id, has_backlog, due_at)
  select k.tick + 1, pg_snapshot_xmax(v_snapshot),
    queue._in_flight(v_snapshot, pg_current_xact_id()), k.high_id,
    exists (select from queue.waiting w where w.reason = 'parked'), '-infinity'
  from queue.cursor_now k;
  delete from queue.cursor k where k.tick < (select max(m.tick) from queue.cursor m);
  update queue.installation i set system_identifier = (select c.system_identifier from pg_control_system() c)
  where i.system_identifier <> (select c.system_identifier from pg_control_system() c);
end $$;

-- If a dump's data is restored over an installed queue, which is not supported, there is a second row of
-- queue.cursor, and there are jobs that the newer row has passed: admits all of them again, as after any
-- restore. This does not run each time, because it reads rows that others have replaced. (A unique constraint
-- would too, with each move of the cursor.)
-- Locks: the caller holds the admission lock.
create or replace function queue._repair_cursor()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if (select count(*) from (select from queue.cursor k limit 2) k) > 1 then
    perform queue._restart_cursor();
    raise warning 'pgdefer: data was restored over an installed queue; its jobs are admitted again';
  end if;
end $$;

-- admit/admission.sql
-- Admission: one session at a time reads new rows of the log and moves their jobs through the gates.
--
-- The log is read by snapshots, not by ids. The cursor holds the snapshot up to which it was read (next_xid,
-- and the transactions in flight then). A row is new if it is visible now and its xid is at or above
-- next_xid, or was in flight then. So neither a late commit nor a small id is ever missed, and no row is
-- admitted twice. A range too large for one slice goes to queue.backlog. There it is first scanned for
-- priorities, and then read by priority (queue.backlog_part); later commits are read before it.
--
-- Lock order of the whole package, each class once and sorted:
--   own claimed rows of queue.active_job  <  the admission lock (queue.admission)  <  everything else.
-- The holder of the admission lock never waits for a row of queue.active_job (it uses SKIP LOCKED), so a
-- process that holds claimed rows may safely wait for the admission lock. The tables of tables/admit and of
-- tables/recur are written only under the admission lock, by one process at a time, so there are no races
-- there. The exceptions: queue.active_job; queue.pending_settlement, to which all append; queue.expiry, from
-- which the end of a claim deletes its job; and queue.queue_config, to which configure_queue adds a queue
-- first.
--
-- Why no wake-up is lost: a process that ends a claim takes the admission lock by try and settles in the same
-- transaction, or appends to queue.pending_settlement. That table is read with the same cursor as the log, so
-- the argument for new jobs (work/worker_sleep.sql) holds for it.

-- Admits in this order: pending settlements, a slice of each new range, a slice of the most urgent part of
-- the backlog, jobs that are due.
-- Locks: the caller holds the admission lock. has_more: another call will find more.
create or replace function queue._admit(p_slice integer, out admitted integer, out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_start timestamptz := clock_timestamp();
  v_new record;
  v_ended record;
  v_range record;
  v_due timestamptz;
  v_xid xid8;
  v_high_id bigint;
  v_has_backlog boolean;
  v_is_read boolean := false;  -- the whole backlog has been read, so no job need stay parked
  v_retags boolean;
  v_gated bigint[];
  v_parked bigint[];
  v_move boolean;
begin
  admitted := 0;
  v_new := queue._look_for_rows();
  has_more := pg_snapshot_xmax(v_new.upto) < v_new.next_xid;
  if has_more then
    perform queue._restart_cursor();
    return;
  end if;
  v_high_id := v_new.high_id;
  v_has_backlog := v_new.has_backlog;
  -- a slow read met many rows that are not visible yet: let the cursor pass them
  v_move := v_new.has_pending or v_new.ranges <> '{}' or clock_timestamp() - v_start > interval '2 ms';
  if v_new.has_pending then
    v_ended := queue._take_settlements(v_new.next_xid, v_new.ended_xids, v_new.upto, v_new.own);
    perform queue._settle_slots(v_ended.ids, v_ended.kinds, v_ended.flags, v_ended.payloads);
    -- a yield may need a job that is admitted below
    v_new.high_need_id := coalesce(pg_sequence_last_value('queue.needed_seq'), 0);
    admitted := 1;
  end if;
  foreach v_xid in array v_new.ranges loop
    v_range := queue._admit_range(
      v_xid, -9223372036854775808, case when v_xid < v_new.next_xid then v_xid
        else pg_snapshot_xmax(v_new.upto) end, 9223372036854775807,
      v_new.upto, v_new.own, p_slice, v_high_id, v_new.high_need_id, v_new.has_task_pause, v_has_backlog);
    v_high_id := v_range.high_id;
    v_has_backlog := v_has_backlog or v_range.is_cut;
    admitted := admitted + v_range.n;
    v_gated := v_gated || v_range.gated;
    v_parked := v_parked || v_range.parked;
  end loop;
  if v_has_backlog then
    select b.high_id, admitted + b.n, v_gated || b.gated, v_parked || b.parked, b.is_read, b.retags
    into v_high_id, admitted, v_gated, v_parked, v_is_read, v_retags
    from queue._admit_backlog(p_slice, v_high_id, v_new.high_need_id, v_new.has_task_pause) b;
    v_move := true;
  end if;
  -- all at once, so that jobs of one lock come in the order of ids; before turns are passed on
  if v_gated is not null then
    perform queue._admit_gated(v_gated);
  end if;
  if v_parked is not null then
    insert into queue.waiting (id, reason) select u.id, 'parked' from unnest(v_parked) u (id);
  end if;
  if v_new.has_pending then
    perform queue._settle(v_ended.ids, v_ended.kinds, v_ended.flags);
  end if;
  if v_is_read then
    v_has_backlog := queue._admit_parked(p_slice) > 0 or exists (select from queue.backlog)
      or exists (select from queue.backlog_part) or v_retags;
  end if;
  v_due := v_new.due_at;
  if v_new.due_at > v_start or v_new.next_due <= v_start or v_new.next_run <= v_start then
    select d.mark, admitted + d.n, d.has_more into v_due, admitted, has_more
    from queue._admit_all_due(v_start, v_new.due_at, v_new.next_due, v_new.next_run, p_slice) d;
    v_move := true;
  end if;
  if not v_has_backlog and (v_gated is not null or v_new.has_pending or v_due <> v_new.due_at) then
    v_has_backlog := exists (select from queue.lane l where l.retag_from is not null);
  end if;
  if v_move then
    perform queue._move_cursor(v_new.tick, v_new.upto, v_new.own, v_high_id, v_has_backlog, v_due);
  end if;
  has_more := has_more or v_has_backlog;
end $$;

-- The cursor, and what it has not passed yet: the xids where ranges of new jobs begin; the transactions in
-- flight then that have committed since (ended_xids); whether there are settlements; when the next waiting
-- job and the next schedule are due. All of it by one snapshot, upto.
create or replace function queue._look_for_rows(
  out tick bigint, out next_xid xid8, out high_id bigint, out has_backlog boolean, out due_at timestamptz,
  out upto pg_snapshot, out own xid8, out has_pending boolean, out high_need_id bigint,
  out has_task_pause boolean, out next_due timestamptz, out next_run timestamptz, out ended_xids xid8[],
  out ranges xid8[])
language plpgsql stable parallel unsafe security invoker as $$
declare
  v_in_flight xid8[];
  v_has_jobs boolean;
begin
  select k.tick, k.next_xid, k.high_id, k.has_backlog, k.due_at, k.in_flight,
    pg_current_snapshot(), pg_current_xact_id_if_assigned(),
    exists (select from queue.job j where j.xid >= k.next_xid),
    exists (select from queue.pending_settlement h where h.xid >= k.next_xid),
    coalesce(pg_sequence_last_value('queue.needed_seq'), 0),
    exists (select from queue.pause p where p.task is not null),
    (select w.at from queue.waiting w where w.at >= k.due_at order by w.at limit 1),
    (select s.due_at from queue.schedule s where s.due_at >= k.due_at order by s.due_at limit 1)
  into tick, next_xid, high_id, has_backlog, due_at, v_in_flight, upto, own, v_has_jobs, has_pending,
    high_need_id, has_task_pause, next_due, next_run
  from queue.cursor_now k;
  ended_xids := '{}'::xid8[];
  ranges := '{}'::xid8[];
  if v_in_flight <> '{}' then
    ended_xids := array(select x from unnest(v_in_flight) x
      where pg_visible_in_snapshot(x, upto) and x is distinct from own order by x);
    ranges := array(select x from unnest(ended_xids) x
      where exists (select from queue.job j where j.xid = x) order by x);
    has_pending := has_pending or exists (select from queue.pending_settlement h
      where h.xid = any (ended_xids));
  end if;
  if v_has_jobs then
    ranges := ranges || next_xid;
  end if;
end $$;

-- Admits a slice of the most urgent parts of the backlog. gated, parked: as _admit_range; is_read: all of it
-- has been read; retags: lanes are left whose jobs need new tags.
-- Locks: the caller holds the admission lock.
create or replace function queue._admit_backlog(
  p_slice integer, p_high_id bigint, p_high_need_id bigint, p_has_task_pause boolean,
  out n integer, out high_id bigint, out gated bigint[], out parked bigint[], out is_read boolean,
  out retags boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_part record;
  v_range record;
begin
  retags := queue._retag(p_slice);
  perform queue._scan_backlog(p_slice);
  n := 0;
  high_id := p_high_id;
  is_read := true;
  while n < p_slice loop
    v_part := queue._next_backlog_part();
    exit when v_part.upto is null;
    v_range := queue._admit_range(
      v_part.from_xid, v_part.from_id, v_part.to_xid, v_part.to_id, v_part.upto, v_part.own,
      null, high_id, p_high_need_id, p_has_task_pause, v_part.must_park, v_part.top, v_part.bottom);
    high_id := v_range.high_id;
    n := n + v_range.n;
    gated := gated || v_range.gated;
    parked := parked || v_range.parked;
    is_read := false;
  end loop;
end $$;

-- Admits jobs and runs schedules that are due by p_now. p_due_at: none is due before it; mark: the same from
-- now on; p_next_due, p_next_run: the first of each.
-- Locks: the caller holds the admission lock.
create or replace function queue._admit_all_due(
  p_now timestamptz, p_due_at timestamptz, p_next_due timestamptz, p_next_run timestamptz, p_slice integer,
  out mark timestamptz, out n integer, out has_more boolean)
language plpgsql volatile parallel unsafe security invoker as $$
begin
  n := 0;
  has_more := false;
  mark := p_now;
  if p_due_at > p_now then
    -- the clock was set back
    has_more := true;
    mark := '-infinity';
    return;
  end if;
  if p_next_due <= p_now then
    mark := least(mark, queue._admit_due(p_due_at, p_slice));
    n := 1;
    has_more := mark < p_now;
  end if;
  if p_next_run <= p_now then
    select least(_admit_all_due.mark, r.mark), n + r.runs, _admit_all_due.has_more or r.has_more
    into mark, n, has_more
    from queue._run_due_schedules(p_due_at, p_slice) r;
  end if;
end $$;

-- Admits everything that is visible, so that an operator finds every job behind the gates.
-- Locks: the admission lock, waited for.
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

-- admit/expiry.sql
-- Jobs that must not start after a time.
-- Tests: work/maintenance.sql.

-- Cancels jobs with reason expired, unless they run.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
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
    if queue._try_lock_queueing_lock(v_id) then
      select t.place, t.keys into v_place, v_left from queue._dequeue(v_id) t;
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

-- Cancels jobs whose expires_at has passed. A running job may continue, but does not run again
-- (_end_attempt).
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._expire_due()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_id bigint;
begin
  for v_id in
    select e.id from queue.expiry e
    where e.at <= v_now and (select aj.claim from queue.active_job aj where aj.id = e.id) is null
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

-- work/settle.sql
-- Ends claims that have succeeded; and what follows the end of any claim: it is settled (admit/settle.sql) at
-- once if the admission lock is free, else by the next admission, which reads queue.pending_settlement.
-- Tests: work/finish.sql, admit/locks.late_defer.spec.

-- Settles ended claims at once if the admission lock is free (p_settle), or appends a pending settlement.
-- Locks: the admission lock by try, after the claims' rows. Why no wake-up is lost: see admit/admission.sql.
create or replace function queue._settle_or_append(p_ids bigint[], p_flags smallint[], p_kind text,
  p_settle boolean, p_payload jsonb default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[] := p_ids;
  v_flags smallint[] := p_flags;
  v_all_flags smallint;
begin
  if p_kind = 'ended' then
    select array_agg(u.id), array_agg(u.flags), bit_or(u.flags) into v_ids, v_flags, v_all_flags
    from unnest(p_ids, p_flags) u (id, flags)
    where u.flags & (1/* ordered */ | 2/* mutex */ | 4/* keys */ | 4096/* needed */ | 16384/* queue_slot */) <> 0;
    if v_ids is null then
      return;
    end if;
  end if;
  if not p_settle or not queue._lock_admission(false) then
    insert into queue.pending_settlement (job_id, kind, flags, payload)
    select u.id, p_kind, u.flags, p_payload from unnest(v_ids, v_flags) u (id, flags);
  elsif v_all_flags & (2/* mutex */ | 4/* keys */ | 4096/* needed */ | 16384/* queue_slot */) = 0 then
    -- the same as _settle_now for claims that have only an ordered lock
    if queue._has_news() then
      perform queue._admit(1000);
    end if;
    perform queue._advance(p_turned => queue._leave_locks(v_ids, true));
  elsif p_kind = 'ended' and v_all_flags & (3/* lock */ | 4096/* needed */) = 0
    and queue._pass_slots_on(v_ids, v_flags) then
    null;  -- the claims held nothing else
  else
    perform queue._settle_now(v_ids, array_fill(p_kind, array[cardinality(v_ids)]),
      v_flags, case when p_payload is not null then array[p_payload] end);
  end if;
  perform queue._announce();
end $$;

-- Settles the pending settlements of this transaction for claims on p_ids, as one set, if the admission lock
-- is free.
create or replace function queue._settle_own(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_found record;
begin
  -- for more, the answer may be too long to hold the admission lock while it travels (work/deliver.sql)
  if cardinality(p_ids) > 1000 or not queue._lock_admission(false) then
    return;
  end if;
  with gone as (
    delete from queue.pending_settlement h
    where h.xid = pg_current_xact_id() and h.job_id = any (p_ids) and h.kind in ('ended', 'again')
    returning h.job_id, h.kind, h.flags, h.payload, h.seq)
  select array_agg(g.job_id order by g.seq) as ids, array_agg(g.kind order by g.seq) as kinds,
    array_agg(g.flags order by g.seq) as flags,
    array_agg(g.payload order by g.seq) as payloads
  into v_found from gone g;
  if v_found.ids is not null then
    perform queue._settle_now(v_found.ids, v_found.kinds, v_found.flags, v_found.payloads);
  end if;
end $$;

-- Settles claims that this transaction has ended. Everything visible is admitted before turns are passed on,
-- so that the turn goes to the oldest.
-- Locks: the caller holds the admission lock.
create or replace function queue._settle_now(p_ids bigint[], p_kinds text[], p_flags smallint[],
  p_payloads jsonb[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._settle_slots(p_ids, p_kinds, p_flags, p_payloads);
  if 'ended' = any (p_kinds) and exists (select from unnest(p_flags) f where f & 3/* lock */ <> 0)
    and queue._has_news() then
    perform queue._admit(1000);
  end if;
  perform queue._settle(p_ids, p_kinds, p_flags);
end $$;

-- Cleans up after jobs that have succeeded, according to their flags; p_all_flags: the flags that any of them
-- has.
-- Locks: those of _clean_up, on rows of these jobs alone, then as _settle_or_append, which says why no
-- wake-up is lost.
create or replace function queue._clean_up_succeeded(p_ids bigint[], p_flags smallint[], p_all_flags smallint,
  p_settle boolean)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_all_flags & (1024/* aborting */ | 64/* expires */ | 128/* lease */ | 256/* until_start */ | 512/* retain */
    | 8192/* until_finish */) <> 0 then
    perform queue._clean_up(p_ids, p_flags);
  end if;
  perform queue._settle_or_append(p_ids, p_flags, 'ended', p_settle);
end $$;

-- Ends claims as succeeded. Returns the ids whose claim was the current one, NULL for none. p_ids ascend, so
-- that width_bucket finds an id's place in them; p_results NULL: there are no results.
create or replace function queue._succeed(p_ids bigint[], p_claims bigint[], p_results jsonb[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_done bigint[];
  v_special bigint[];
  v_flags smallint[];
  v_all_flags smallint;
  v_may_be_awaited boolean;
begin
  with gone as (
    delete from queue.active_job aj
    where aj.id = any (p_ids) and aj.claim = p_claims[width_bucket(aj.id, p_ids)]
    returning aj.id, aj.attempt, aj.flags, aj.claimed_at, aj.worker_id),
  kept as (
    insert into queue.finished (id, finished_at, started_at, worker_id, attempts, state, result)
    select g.id, clock_timestamp(), g.claimed_at, g.worker_id, g.attempt,
      'succeeded', case when p_results is not null then p_results[width_bucket(g.id, p_ids)] end from gone g)
  select array_agg(g.id), array_agg(g.id) filter (where g.flags <> 0),
    array_agg(g.flags) filter (where g.flags <> 0), bit_or(g.flags),
    min(g.id) <= coalesce(pg_sequence_last_value('queue.awaited_seq'), 0)
  into v_done, v_special, v_flags, v_all_flags, v_may_be_awaited
  from gone g;
  if v_may_be_awaited then
    perform queue._notify_waiters(v_done);
  end if;
  if v_all_flags <> 0 then
    -- for more, the answer may be too long to hold the admission lock while it travels (work/deliver.sql)
    perform queue._clean_up_succeeded(v_special, v_flags, v_all_flags, cardinality(p_ids) <= 1000);
  end if;
  return v_done;
end $$;

-- Raises: QJ001 or QJ002, always: says why a claim is refused. A job that no longer exists was deleted or
-- pruned.
create or replace function queue._raise_claim_error(p_id bigint, p_claim bigint)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if p_id is null or p_claim is null then
    perform queue._invalid('id and claim are needed', 'Pass the pair that fetch returned.');
  elsif p_id not between 1 and (select s.last_value from queue.job_id_seq s) then
    perform queue._job_not_found(p_id);
  end if;
  perform queue._claim_lost(p_id, p_claim);
end $$;

-- work/rehearse.sql
-- Rehearsing: a test's own transaction, which is rolled back, sees its jobs admitted, run and retried.

-- Admits the jobs that the caller's transaction has deferred, and settles the claims that it has ended, as
-- admission would after its COMMIT. From now on its COMMIT is refused, because the next admission would do
-- all of this a second time.
-- Locks: the admission lock, waited for and held until ROLLBACK, even while the client is waited for. It is
-- meant for databases of tests; therefore only the owner may call it. Why no wake-up is lost: other sessions
-- see nothing of this transaction.
-- Raises: QJ008.
create or replace function queue.rehearse()
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_own xid8 := pg_current_xact_id();
  v_upto bigint;
  v_ids bigint[];
  v_sent record;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform queue._check_isolation();
  perform queue._lock_admission(true);
  select max(r.upto) into v_upto from queue.rehearsal r;
  if v_upto is null then
    insert into queue.rehearsal (n, upto) values (1, 0), (1, 0);
  end if;
  perform queue._settle_own(array(
    select h.job_id from queue.pending_settlement h where h.xid = v_own and h.kind in ('ended', 'again')));
  -- within one transaction, ids rise
  select array_agg(j.id order by j.id) into v_ids
  from queue.job j where j.xid = v_own and j.id > coalesce(v_upto, 0);
  if v_ids is not null then
    perform queue._admit_gated(v_ids);
    update queue.rehearsal r set upto = v_ids[cardinality(v_ids)];
  end if;
  with gone as (
    delete from queue.pending_settlement h where h.xid = v_own and h.kind in ('signal', 'event', 'group')
    returning h.job_id, h.kind)
  select array_agg(distinct g.job_id) filter (where g.kind = 'signal') as signals,
    array_agg(distinct -g.job_id) filter (where g.kind = 'event') as events,
    array_agg(distinct -g.job_id) filter (where g.kind = 'group') as groups
  into v_sent from gone g;
  perform queue._advance(p_arrived => queue._take_signals(v_sent.signals, v_sent.events));
  perform queue._advance_own();
  perform queue._settle_groups(v_sent.groups);
  -- the test may be stopped in a debugger
  perform set_config('idle_in_transaction_session_timeout', '0', true);
  return coalesce(cardinality(v_ids), 0);
end $$;
comment on function queue.rehearse() is
  'For tests: admits the jobs that the caller''s own transaction has deferred, so that they can be fetched'
    ' and finished there as if they were committed. Returns their number. Call it again after deferring more,'
    ' after signal and publish, and after succeed, fail, retry_later, release, sleep and wait. The'
    ' transaction can''t be committed afterwards. Until it ends, no other session can fetch, so only the'
    ' owner of the queue may call this function.';

-- work/backoff.sql
-- How long a failed job waits for its next attempt. Whether it has one, and when: _judge_attempt
-- (work/attempts.sql).
-- Tests: work/attempts.sql.

-- With n failures before this one (n = failures - 1):
--   wait + linear_wait * n + exponential_wait ^ (n + 1) seconds (as Procrastinate's RetryStrategy), or
--   constant: base; linear: base * k; exponential: base * factor ^ (k - 1), where k counts the failures, or
--     with `first` the failures after the first. cap limits every delay.
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
      + case when v_policy ? 'exponential_wait' then queue._grow(1,
        queue._number(v_policy -> 'exponential_wait'), v_k) else 0 end;
  elsif v_policy ? 'first' and v_k = 1 then
    v_seconds := queue._seconds(v_policy -> 'first');
  else
    v_k := v_k - case when v_policy ? 'first' then 1 else 0 end;
    v_seconds := case coalesce(v_policy ->> 'backoff', 'constant')
      when 'constant' then queue._seconds(v_policy -> 'base')
      when 'linear' then queue._seconds(v_policy -> 'base') * v_k
      else queue._grow(queue._seconds(v_policy -> 'base'), case
        when v_policy ? 'factor' then queue._number(v_policy -> 'factor') else 2 end, v_k - 1) end;
  end if;
  v_seconds := least(v_seconds, case when v_policy ? 'cap' then queue._seconds(v_policy -> 'cap') end,
    315360000);
  if v_policy ? 'jitter' then
    v_seconds := v_seconds * (1 - queue._number(v_policy -> 'jitter') * random());
  end if;
  return make_interval(secs => v_seconds);
end $$;
comment on function queue.backoff(jsonb, integer) is
  'Returns the delay that a retry policy sets after the failures-th failure, at most 10 years. jitter'
    ' shortens it by up to that share.';

-- The number of failures at which a job fails; NULL for never. Without a policy it is the first, unless the
-- handler says when to run the job again.
create or replace function queue._max_attempts(p_policy jsonb, p_options jsonb)
returns integer language plpgsql immutable parallel safe security invoker as $$
begin
  return case
    when p_options -> 'retryable' = 'true' then null
    when p_policy ? 'max_attempts' then (p_policy ->> 'max_attempts')::integer
    when p_policy ?| '{backoff,base,factor,cap,first,wait,linear_wait,exponential_wait}'::text[]
      or p_options ?| '{retry_at,retry_in}'::text[] then null
    else 1 end;
end $$;

-- A policy's interval in seconds, 0 if it has none.
create or replace function queue._seconds(p_value jsonb)
returns double precision language plpgsql stable parallel unsafe security invoker as $$
begin
  return least(coalesce(extract(epoch from queue._interval('interval', p_value)), 0),
    315360000)::double precision;
end $$;

-- A policy's number within useful bounds: 0 if below a billionth, at most ten years of seconds.
create or replace function queue._number(p_value jsonb)
returns double precision language plpgsql immutable parallel safe security invoker as $$
begin
  return case when p_value > '0.000000001' then least(p_value::numeric, 315360000)::double precision
    else 0 end;
end $$;

-- base * factor ^ n, at most ten years in seconds, and 0 below a nanosecond: neither overflows nor
-- underflows.
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

-- work/unknown_tasks.sql
-- Unknown tasks: jobs whose worker does not know their task, as happens during a rolling deploy.
--
-- The worker reports this (finish_many, outcome unknown_task), and the job goes back, with no attempt
-- counted, for a worker that knows the task. A worker does the same with args in a version that it does not
-- know (args ->> '__version__'). The delay keeps the other workers from claiming it again and again: 1 s,
-- 2 s, 4 s, 8 s, at most 10 s. If no worker knows the task for the grace period (queue.configure,
-- unknown_task_grace), the job fails. The attempts record all of this: those that ended so are released, with
-- the task in their details; any other end of an attempt shows that a worker has known it.
--
-- The first worker that asks gets the job, so a single new worker among many old ones gets it by chance. With
-- 11 workers the 63 offers of ten minutes miss it once in 400 cases.

-- When a job whose task a worker did not know at p_now goes to others; NULL: no worker has known it for the
-- grace period, so it fails. error: the text to record for this attempt.
create or replace function queue._unknown_task(p_id bigint, p_task text, p_worker bigint, p_now timestamptz,
  out at timestamptz, out error text)
language plpgsql stable parallel safe security invoker as $$
declare
  v_unknown record;
  v_task text := left(p_task, 200)
    || coalesce(' in version ' || left((select j.args ->> '__version__' from queue.job_now j
                                        where j.id = p_id), 20), '');
  v_grace interval := (select i.unknown_task_grace from queue.installation i);
  v_worker text := format('%s%s', p_worker,
    coalesce((select ' (' || left(w.name, 200) || ')' from queue.worker w where w.id = p_worker), ''));
begin
  v_unknown := queue._unknown_since(p_id);
  if p_now >= coalesce(v_unknown.since, p_now) + v_grace then
    error := format('no worker knows the task %s: %s', v_task,
                    case when v_worker = any (string_to_array(v_unknown.workers, ', ')) then v_unknown.workers
                         else concat_ws(', ', v_unknown.workers, v_worker) end);
    return;
  end if;
  at := least(p_now + least(2 ^ least(v_unknown.times, 4), 10) * interval '1 s',
    coalesce(v_unknown.since, p_now) + v_grace);
  error := format('worker %s does not know the task %s', v_worker, v_task);
end $$;

-- Since when, in how many successive claims, and by which workers, a job's task was not known. If it was
-- known, times is 0.
-- Locks: none; the caller has the job's row, so that there is no other end of an attempt meanwhile.
create or replace function queue._unknown_since(p_id bigint, out since timestamptz, out times integer,
  out workers text)
language plpgsql stable parallel safe security invoker as $$
begin
  select min(a.finished_at), count(*),
    string_agg(distinct format('%s%s', a.worker_id, coalesce(' (' || left(w.name, 200) || ')', '')), ', ')
  into since, times, workers
  from queue.attempt a left join queue.worker w on w.id = a.worker_id
  where a.job_id = p_id and a.outcome = 'released' and a.details ? 'unknown_task'
    and a.claim > coalesce((select max(k.claim) from queue.attempt k
                            where k.job_id = p_id
                              and (k.outcome = 'released' and k.details ? 'unknown_task') is not true), 0);
end $$;

-- The tasks of unfinished jobs whose last claim, within an hour, was by a worker that did not know them, and
-- those workers. Reads the last 1,000 such claims.
create or replace function queue._unknown_tasks(p_now timestamptz)
returns table (task text, jobs bigint,
  workers text) language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select a.details ->> 'unknown_task', count(distinct a.job_id),
      string_agg(distinct format('%s%s', a.worker_id, coalesce(' (' || left(w.name, 200) || ')', '')), ', ')
    from (select a.* from queue.attempt a
          where a.outcome = 'released' and a.details ? 'unknown_task' order by a.claim desc limit 1000) a
    left join queue.worker w on w.id = a.worker_id
    where a.finished_at > p_now - interval '1 hour' and not exists (select from queue.finished f
      where f.id = a.job_id)
      and (select x.times from queue._unknown_since(a.job_id) x) > 0
    group by 1 order by 1;
end $$;

-- work/line.sql
-- The line of sleepers: of the workers that sleep and serve the same, a notification wakes the first.
--
-- A worker stands in it if it asks to (before_sleep's option in_line), by a row in queue.sleeper: workers
-- that run jobs behind those that run none, else by place. The first fetches at once when it is notified. The
-- second, the deputy, fetches 80 ms later: if the first is dead or frozen, it finds the job, and both leave
-- the line. The rest do not listen for jobs. One that leaves the line wakes the next two, by a message to
-- each ('sleep' on its own channel). A worker that gets no job now, because of a quarantine, stands in no
-- line. No decision about a job depends on a place: two workers that both believe to be first cost a fetch.
-- Two sessions: work/line.races.spec.

-- Joins the line, or keeps its place; returns how many are ahead: 0, 1, or 2 for more; at most 1 in the first
-- 100 ms.
-- Locks: its own row; rows of sessions that have gone, by skip locked.
-- Why no wake-up is lost: see _leave_line.
create or replace function queue._join_line(p_worker bigint, p_queues text[], p_options jsonb)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_served bigint := hashtextextended(format('%s %s', p_options - 'busy',
    (select array_agg(distinct q order by q) from unnest(p_queues) q)), 0);
  v_is_busy boolean := p_options -> 'busy' is not distinct from 'true';
  v_own record;
  v_ahead record;
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    return 0;  -- it would not see who comes and goes
  elsif exists (select from queue.worker w where w.id = p_worker and w.apart_since is not null) then
    perform queue._leave_line(p_worker, false);
    return 0;  -- it gets no job now (work/quarantine.sql), so it keeps nobody else asleep
  end if;
  select s.place, s.is_busy, s.joined_at < clock_timestamp() - interval '100 ms' as may_rest into v_own
  from queue.sleeper s where s.worker_id = p_worker and s.served = v_served and s.pid = pg_backend_pid();
  if v_own.is_busy and not v_is_busy then
    update queue.sleeper s set is_busy = false where s.worker_id = p_worker;
    v_own.is_busy := false;
  elsif v_own.place is null or v_own.is_busy <> v_is_busy then
    perform queue._leave_line(p_worker, false);
    insert into queue.sleeper as s (worker_id, is_busy, served, pid)
    values (p_worker, v_is_busy, v_served, pg_backend_pid())
    on conflict on constraint sleeper_pkey do nothing
    returning s.place, s.is_busy, false as may_rest into v_own;
    if not found then
      return 0;  -- somebody else deletes its row just now
    end if;
  end if;
  loop
    select count(*)::integer as n,
      array_agg(s.worker_id) filter (where not queue._is_asleep(s.worker_id, s.pid)) as gone
    into v_ahead
    from (
      select s.worker_id, s.pid from queue.sleeper s
      where s.served = v_served and (s.is_busy, s.place) < (v_own.is_busy, v_own.place)
      order by s.is_busy, s.place limit 2) s;
    exit when v_ahead.gone is null;
    delete from queue.sleeper s
    where s.worker_id in (select d.worker_id from queue.sleeper d where d.worker_id = any (v_ahead.gone)
      for update skip locked);
    if not found then
      v_own.may_rest := false;  -- somebody else deletes them
      exit;
    end if;
  end loop;
  return least(v_ahead.n, case when v_own.may_rest then 2 else 1 end);
end $$;

-- Leaves the line, and wakes the two who come next. p_has_found: if it is the deputy, it has found a job that
-- the first did not take; so the first leaves, too.
-- Locks: the rows of both, by skip locked; another session deletes those that it has locked.
-- Why no wake-up is lost: a worker stops listening for jobs only if a call sees two ahead of it, and an
-- earlier one, at least 100 ms before, has written its row. Suppose that one of these two leaves. If its
-- transaction commits before the later call, that call does not count it. Otherwise, if its transaction takes
-- less than 100 ms, it began after the row became visible: it sees the row, and wakes that worker, which
-- listens on its own channel by then. One that leaves in a longer transaction is like a frozen one: the
-- deputy takes its place. If the first two die or freeze together, the rest look every 10 s, each at its own
-- time; then before_sleep passes over sessions that have ended and workers that reap has given up.
create or replace function queue._leave_line(p_worker bigint, p_has_found boolean)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_own record;
  v_ahead bigint[];
begin
  select s.is_busy, s.place, s.served into v_own from queue.sleeper s where s.worker_id = p_worker;
  if not found then
    return;
  end if;
  v_ahead := array(
    select s.worker_id from queue.sleeper s
    where s.served = v_own.served and (s.is_busy, s.place) < (v_own.is_busy, v_own.place)
    order by s.is_busy, s.place limit 2);
  delete from queue.sleeper s
  where s.worker_id in (
    select d.worker_id from queue.sleeper d
    where d.worker_id = p_worker or p_has_found and cardinality(v_ahead) = 1 and d.worker_id = v_ahead[1]
    for update skip locked);
  if cardinality(v_ahead) < 2 and current_setting('pgdefer.notify', true) is distinct from 'off' then
    perform pg_notify('pgdefer_worker_' || n.worker_id, 'sleep')
    from (
      select d.worker_id
      from (select s.worker_id, s.pid, s.is_busy, s.place from queue.sleeper s
        where s.served = v_own.served and s.worker_id <> p_worker order by s.is_busy, s.place limit 10) d
      where queue._is_asleep(d.worker_id, d.pid)
      order by d.is_busy, d.place limit 2) n;
  end if;
end $$;

-- Whether a row of the line is that of a worker that lives, in a session that does.
create or replace function queue._is_asleep(p_worker bigint, p_pid integer)
returns boolean language plpgsql stable parallel restricted security invoker as $$
begin
  return exists (select from pg_stat_get_activity(p_pid) a where a.pid is not null)
    and exists (select from queue.worker w where w.id = p_worker and w.gone_at is null);
end $$;

-- work/attempts.sql
-- The end of an attempt that did not succeed: retry policies, yields, releases, aborts, crashes.

-- Locks: none. Raises: QJ001, QJ002.
create or replace function queue.attempts_left(id bigint, claim bigint)
returns table (max_attempts integer, failures integer, is_last boolean)
language plpgsql stable parallel safe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_claims(array[attempts_left.id], array[attempts_left.claim]);
  end if;
  if not exists (select from queue.active_job aj
                 where aj.id = attempts_left.id and aj.claim = attempts_left.claim) then
    perform queue._raise_claim_error(attempts_left.id, attempts_left.claim);
  end if;
  return query
    select x.max_attempts, x.failures, coalesce(x.failures + 1 >= x.max_attempts, false)
    from (
      select queue._max_attempts(coalesce(nullif(j.options -> 'retry', 'null'),
          nullif(t.defaults -> 'retry', 'null'), '{}'), '{}') as max_attempts,
        coalesce((select s.failures from queue.job_override s where s.id = j.id), 0)::integer as failures
      from queue.job j left join queue.task t on t.name = j.task where j.id = attempts_left.id) x;
end $$;
comment on function queue.attempts_left(bigint, bigint) is
  'For a handler: at which failure its job fails for good by its retry policy (NULL: never), how often it'
    ' has failed since the last manual retry, and whether a failure of this run would be the last.';

-- Ends the claim with an outcome other than succeeded and returns the job's new state. In addition to the
-- outcomes of _check_outcome there are two internal ones: retried (by queue.retry with force; at and change:
-- the time and the changes) and suspended (work/waits.sql, work/step_failures.sql; is_open: its wait has not
-- ended yet; label: the attempt's outcome, if not yielded). crashed comes from reap or, with a claim, from a
-- live worker whose process ran only this job and died. Changes for a retry (queue, priority, lock) are
-- handed over, not written here: settling first releases what the claim held under the old names.
-- Locks: the claim's row of queue.active_job, which protects the job's row of queue.job_override; with
-- p_settle also the admission lock, by try; for an unknown task those of _leave_line. Why no wake-up is lost:
-- the claim is settled, here or by the next admission.
-- Raises: QJ001, QJ002, QJ005; the outcome has been checked.
create or replace function queue._end_attempt(p_outcome jsonb, p_id bigint, p_claim bigint, p_settle boolean)
returns text language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz;  -- read under the lock of the claim's row, as work/minutes.sql asks for
  v_kind text := p_outcome ->> 'outcome';
  v_label text;
  v_active record;
  v_end record;
  v_state text;  -- after a yield
  v_at timestamptz;
begin
  delete from queue.active_job aj where aj.id = p_id and aj.claim = p_claim
  returning aj.attempt, aj.lane, aj.flags, aj.claimed_at, aj.worker_id, aj.deadline into v_active;
  v_now := clock_timestamp();
  if not found then
    perform queue._raise_claim_error(p_id, p_claim);
  end if;
  v_label := case v_kind when 'retry_later' then 'yielded'
    when 'suspended' then coalesce(p_outcome ->> 'label', 'yielded') when 'retried' then 'aborted'
    when 'unknown_task' then 'released' else coalesce(p_outcome -> 'options' ->> 'outcome', v_kind) end;
  if v_kind <> 'retried' and v_active.flags & 1024/* aborting */ <> 0
    and exists (select from queue.abort a where a.id = p_id and a.claim = p_claim) then
    v_label := case v_kind when 'crashed' then 'crashed' else 'aborted' end;
    v_kind := 'aborted';
  end if;
  v_end := queue._judge_attempt(p_outcome, v_kind, p_id, p_claim, v_active.lane, v_active.worker_id, v_now);
  if v_kind = 'unknown_task' then
    perform queue._leave_line(v_active.worker_id, false);
    v_label := coalesce(v_end.final, v_label);
  end if;
  if v_end.final is null and v_kind <> 'retried' and v_active.flags & 64/* expires */ <> 0
    and exists (select from queue.expiry e where e.id = p_id and e.at <= v_now) then
    v_end.final := 'cancelled';
    v_end.reason := 'expired';
  end if;
  -- a job that was rescheduled to a time before its own does not go back to that
  v_at := coalesce(v_end.at, case when (select j.scheduled_at from queue.job j where j.id = p_id) > v_now
    then '-infinity'::timestamptz end);
  insert into queue.attempt (job_id, claim, attempt, worker_id, started_at, finished_at, outcome, error,
    details)
  values (p_id, p_claim, v_active.attempt, v_active.worker_id, v_active.claimed_at, v_now, v_label,
          v_end.error, case when v_kind = 'unknown_task' then jsonb_build_object('unknown_task', v_end.task)
               else queue._truncate_details(nullif(p_outcome -> 'details', 'null')) end);
  insert into queue.job_override as s (id, attempts, claims, failures, crashes, progress, scheduled_at,
    started_at, error, has_steps, is_suspended, tag)
  values (p_id, v_active.attempt - case when v_kind in ('released', 'unknown_task') then 1 else 0 end,
    1, case when v_kind = 'failed' then 1 else 0 end, case when v_label = 'crashed' then 1 else 0 end,
    case when v_kind = 'retry_later' then 1 else 0 end, v_at,
    case when v_kind not in ('released', 'unknown_task') then v_active.claimed_at end,
    case when v_kind not in ('retry_later', 'released', 'retried') then v_end.error end,
    v_kind = 'suspended' or exists (select from queue.step t where t.job_id = p_id),
    v_kind = 'suspended' and p_outcome ? 'is_open',
    case when v_kind = 'released' and v_active.deadline < '0001-01-01 00:00+00' then v_active.deadline end)
  on conflict on constraint job_override_pkey do update
    set (attempts, claims, failures, crashes, progress, scheduled_at, started_at, error, has_steps,
        is_suspended, tag)
      = (excluded.attempts, s.claims + 1, s.failures + excluded.failures, s.crashes + excluded.crashes,
        s.progress + excluded.progress, case when v_kind = 'released' then s.scheduled_at
          else excluded.scheduled_at end, coalesce(excluded.started_at, s.started_at),
        coalesce(excluded.error, s.error), excluded.has_steps, excluded.is_suspended, excluded.tag);
  if v_end.final is not null then
    insert into queue.finished (id, finished_at, started_at, worker_id, attempts, state, reason, error)
    values (p_id, v_now, v_active.claimed_at, v_active.worker_id, v_active.attempt, v_end.final, v_end.reason,
      v_end.error);
    perform queue._clean_up(array[p_id], array[v_active.flags]);
    perform queue._notify_waiters(array[p_id]);
    perform queue._settle_or_append(array[p_id], array[v_active.flags], 'ended', p_settle);
    return v_end.final;
  end if;
  if v_active.flags & 128/* lease */ <> 0 then
    delete from queue.lease l where l.id = p_id;
  end if;
  if v_kind = 'retried' then
    perform queue._reset_counters(array[p_id], v_end.at);
  end if;
  v_state := case when v_kind = 'retry_later' then queue._yield_state(p_id, v_end.payload) end;
  perform queue._settle_or_append(array[p_id], array[v_active.flags], 'again', p_settle,
    jsonb_build_object('state', v_state) || v_end.payload);  -- queue.jobs shows it until then
  return coalesce(v_state, case when v_at > v_now then 'scheduled' else 'ready' end);
end $$;

-- What an outcome means for its job. final: the state in which it ends, with its reason; else it runs again,
-- at a time if given, with payload as its changes. task: the job's. p_kind: the outcome, or aborted.
-- Raises: as _end_attempt.
create or replace function queue._judge_attempt(
  p_outcome jsonb, p_kind text, p_id bigint, p_claim bigint, p_lane integer, p_worker bigint,
  p_now timestamptz, out final text, out reason text, out at timestamptz, out payload jsonb, out error text,
  out task text)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_options jsonb := jsonb_strip_nulls(coalesce(nullif(p_outcome -> 'options', 'null'), '{}'));
  v_job record;
  v_state record;
  v_is_alone boolean;
  v_limit integer;
begin
  error := left(coalesce(p_outcome ->> 'error', p_outcome ->> 'message'), 10000);
  select j.task, j.options,
    coalesce(nullif(j.options -> 'retry', 'null'), nullif(t.defaults -> 'retry', 'null'), '{}') as policy
  into v_job
  from queue.job j left join queue.task t on t.name = j.task where j.id = p_id;
  select coalesce(max(s.failures), 0) as failures, coalesce(max(s.crashes), 0) as crashes,
    coalesce(max(s.progress), 0) as progress
  into v_state from queue.job_override s where s.id = p_id;
  task := v_job.task;
  case p_kind
    when 'failed' then
      v_limit := queue._max_attempts(v_job.policy, v_options);
      if v_options -> 'retryable' = 'false' or v_state.failures + 1 >= v_limit then
        final := 'failed';
        reason := coalesce(v_options ->> 'reason', case when v_options -> 'retryable' = 'false'
          then 'not_retryable' else 'attempts' end);
      else
        at := coalesce(queue._timestamp('retry_at', v_options -> 'retry_at'),
          p_now + coalesce(queue._interval('retry_in', v_options -> 'retry_in'),
          queue.backoff(v_job.policy, v_state.failures + 1)));
        payload := nullif(jsonb_build_object('change',
          v_options - '{retryable,retry_at,retry_in,reason,outcome}'::text[]), '{"change": {}}');
      end if;
    when 'retry_later' then
      if v_state.progress + 1 > (case when v_job.options -> 'max_progress' = 'null' then null
        else coalesce((v_job.options ->> 'max_progress')::integer, 100) end) then
        final := 'failed';
        reason := 'max_progress';
      else
        at := queue._timestamp('at', p_outcome -> 'at');
        payload := queue._check_yield(p_id, p_outcome -> 'needs');
      end if;
    when 'retried' then
      at := (p_outcome ->> 'at')::timestamptz;
      payload := case when p_outcome ? 'change' then jsonb_build_object('change', p_outcome -> 'change') end;
    when 'suspended' then
      at := queue._timestamp('at', p_outcome -> 'at');
      payload := case when p_outcome ? 'needs'
        then queue._check_awaited(p_id, p_claim, p_outcome -> 'needs') end;
    when 'unknown_task' then
      select u.at, u.error into at, error from queue._unknown_task(p_id, v_job.task, p_worker, p_now) u;
      if at is null then
        final := 'failed';
        reason := 'unknown_task';
      end if;
    when 'aborted' then
      final := 'cancelled';
      reason := 'aborted';
    when 'crashed' then
      v_is_alone := p_outcome ? 'claim'
        or exists (select from queue.lane l where l.lane = p_lane and l.kind = 2/* lane_crashed */)
        or exists (select from queue.lease l where l.id = p_id and l.claim = p_claim and l.is_own);
      v_limit := case when v_job.policy -> 'max_crashes' <> 'null' is not false
        then coalesce((v_job.policy ->> 'max_crashes')::integer, 3) end;
      final := case when v_job.policy ->> 'on_crash' = 'fail'
        or v_is_alone and v_state.crashes + 1 >= v_limit then 'failed' end;
      reason := case when v_job.policy ->> 'on_crash' = 'fail' then 'crashed' else 'crash_loop' end;
    else null;
  end case;
end $$;

-- Raises: 22023 if they are not options of queue.fail.
create or replace function queue._check_fail_options(options jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
declare
  v_options jsonb := jsonb_strip_nulls(options);
begin
  perform queue._check_keys('options', options,
    array['retryable', 'retry_at', 'retry_in', 'priority', 'queue', 'lock', 'reason', 'outcome']);
  if v_options ? 'retryable' and jsonb_typeof(v_options -> 'retryable') <> 'boolean' then
    perform queue._invalid('retryable must be true or false', 'Pass a JSON boolean.');
  elsif v_options -> 'retryable' = 'false' and v_options ?| '{retry_at,retry_in}'::text[] then
    perform queue._invalid('a failure that is not retryable can''t have a retry time',
      'Leave out retryable, or the time.');
  elsif v_options ? 'outcome' and v_options -> 'outcome' <> '"timed_out"' then
    perform queue._invalid('outcome is not one of its values',
      'Allowed: timed_out. Leave it out for any other failure.',
      'outcome: ' || left(v_options ->> 'outcome', 200));
  elsif v_options ? 'reason'
    and (jsonb_typeof(v_options -> 'reason') <> 'string' or octet_length(v_options ->> 'reason') > 1000) then
    perform queue._invalid('reason must be text', 'Pass a JSON string of at most 1,000 bytes.');
  end if;
  perform queue._check_changes('options', v_options - '{retryable,reason,outcome}'::text[]);
end $$;

-- Returns the changes that a retry makes (retry_at or retry_in, priority, queue, lock), without nulls.
-- Raises: 22023 for an unknown key or an invalid value.
create or replace function queue._check_changes(what text, changes jsonb)
returns jsonb language plpgsql stable parallel unsafe security invoker as $$
declare
  v_changes jsonb := jsonb_strip_nulls(changes);
begin
  perform queue._check_keys(what, changes, array['retry_at', 'retry_in', 'priority', 'queue', 'lock']);
  if v_changes ?& '{retry_at,retry_in}'::text[] then
    perform queue._invalid('retry_at and retry_in exclude each other', 'Give one of the two.');
  end if;
  perform queue._check_types(what, v_changes);
  if v_changes -> 'lock' <> '""' then
    perform queue._check_name('lock', v_changes ->> 'lock');
  end if;
  if v_changes ? 'queue' then
    perform queue._check_queue(v_changes ->> 'queue');
  end if;
  perform queue._interval('retry_in', v_changes -> 'retry_in');
  perform queue._check_moment('retry_at', queue._timestamp('retry_at', v_changes -> 'retry_at'));
  return v_changes;
end $$;

-- Keeps details of an attempt up to 100 kB; of larger ones the size and the beginning, of huge ones (more
-- than 16 MB) only a size.
create or replace function queue._truncate_details(p_details jsonb)
returns jsonb language plpgsql immutable parallel unsafe security invoker as $$
declare
  v_size bigint;
begin
  if pg_column_size(p_details) > 16 then
    v_size := queue._text_size(p_details, 16777216);
  end if;
  if v_size > 100000 then
    return jsonb_strip_nulls(jsonb_build_object('truncated', v_size,
      'begins', case when v_size <= 16777216 then left(p_details::text, 10000) end));
  end if;
  return p_details;
end $$;

-- Resets jobs' counters, and those of their steps, for a manual retry at a time (NULL: at once; a job that
-- has never started keeps its own).
-- Locks: the caller holds the rows of queue.active_job, or the admission lock if there are none.
create or replace function queue._reset_counters(p_ids bigint[], p_at timestamptz default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.job_override s
  set failures = 0, crashes = 0, progress = 0, ignores_needs = false, is_yielded = false,
    scheduled_at = coalesce(p_at, case when s.claims = 0 then s.scheduled_at
      when j.scheduled_at > clock_timestamp() then '-infinity' end)
  from queue.job j
  where s.id = any (p_ids) and j.id = s.id;
  update queue.step s set failures = null, failed_at = null, error = null
  where s.job_id = any (p_ids) and s.failures is not null and s.finished_at is null;
end $$;

-- work/steps.sql
-- Steps of durable jobs: the next run of a job continues after its last finished step.
--
-- Each step has a name. If a run uses a name again, the use gets a number: a, a#2, a#3. SQL applies this
-- rule, so that all clients behave alike: begin_step gives a name the number of its use in this run, and
-- finish_step, as all calls that end a step (_step_to_end), means the use that was begun. A client that
-- counts the uses itself passes a#2, and needs no begin_step.
-- Locks: the claim's row of queue.active_job, FOR KEY SHARE; then the step's row of queue.step. The
-- worker's own end of the claim waits for a transaction that has finished a step; reap and operators
-- (retry with force) skip the row. After the end of the claim a step finds no row (QJ002). So a worker
-- that was declared dead writes nothing, while two connections of one handler, or its heartbeat, do not
-- wait for each other. Only the claim's holder writes the rows of queue.step while the job runs. Why no
-- wake-up is lost: nobody waits for a step.
-- Two sessions: work/steps.fenced.spec.

-- Locks: none; if it records a use or a fingerprint, those named above.
-- Raises: 22023, QJ001, QJ002, QJ008, QJ009.
create or replace function queue.begin_step(id bigint, claim bigint, name text, fingerprint text default null)
returns table (finished boolean, value jsonb)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_key record;
  v_step record;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_claims(array[begin_step.id], array[begin_step.claim]);
  end if;
  perform queue._check_isolation();
  v_key := queue._step_key(begin_step.name);
  perform queue._check_name('fingerprint', begin_step.fingerprint) where begin_step.fingerprint is not null;
  perform from queue.active_job aj where aj.id = begin_step.id and aj.claim = begin_step.claim;
  if not found then
    perform queue._raise_claim_error(begin_step.id, begin_step.claim);
  end if;
  v_step := queue._step_in_run(begin_step.id, begin_step.claim, v_key.name, v_key.no);
  finished := v_step.finished_at is not null;
  if finished and v_step.fingerprint <> begin_step.fingerprint then
    perform queue._step_changed(begin_step.id, begin_step.name, v_step.fingerprint, begin_step.fingerprint);
  elsif finished and v_step.run <> begin_step.claim then
    perform queue._lock_claim(begin_step.id, begin_step.claim);
    update queue.step s set run = begin_step.claim
    where s.job_id = begin_step.id and s.name = v_key.name and s.no = v_step.no;
  elsif not finished and (v_step.fingerprint is distinct from begin_step.fingerprint
    or v_key.no is null and v_step.no > 1) then
    perform queue._lock_claim(begin_step.id, begin_step.claim);
    insert into queue.step as s (job_id, claim, run, no, name, fingerprint)
    values (begin_step.id, begin_step.claim, begin_step.claim, v_step.no, v_key.name, begin_step.fingerprint)
    on conflict on constraint step_pkey do update set claim = excluded.claim, run = excluded.run,
      fingerprint = excluded.fingerprint;
  end if;
  value := v_step.value;
  return next;
end $$;
comment on function queue.begin_step(bigint, bigint, text, text) is
  'Returns whether a step of a job is finished, and its value. A finished step must not run again. If this'
    ' run has finished a step of this name before, the name means its next use: a, a#2, a#3; a name with a'
    ' number from 2 on means that use. A fingerprint is a text of up to 1,000 bytes that identifies the code'
    ' of the step: if that was finished with a different one, the call is refused (QJ009). Steps that fetch'
    ' has returned need no call.';

-- Locks: see the top. Raises: 22023, QJ001, QJ002, QJ003 (the step is already finished), QJ008.
create or replace function queue.finish_step(id bigint, claim bigint, name text, value jsonb default null)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_key record;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_claims(array[finish_step.id], array[finish_step.claim]);
  end if;
  perform queue._check_isolation();
  perform queue._check_size('value', finish_step.value);
  v_key := queue._step_key(finish_step.name);
  perform queue._lock_claim(finish_step.id, finish_step.claim);
  insert into queue.step (job_id, claim, run, finished_at, no, name, value)
  values (finish_step.id, finish_step.claim, finish_step.claim, clock_timestamp(), coalesce(v_key.no, 1),
    v_key.name, finish_step.value)
  on conflict on constraint step_pkey do nothing;
  if found then
    return;
  end if;
  update queue.step s
  set claim = finish_step.claim, run = finish_step.claim, finished_at = clock_timestamp(),
    value = finish_step.value, error = null
  where s.job_id = finish_step.id and s.name = v_key.name and s.finished_at is null
    and s.no = coalesce(v_key.no, (
      select min(b.no) from queue.step b
      where b.job_id = finish_step.id and b.name = v_key.name and b.finished_at is null));
  if not found then
    perform queue._step_is_finished(finish_step.id, finish_step.name);
  end if;
end $$;
comment on function queue.finish_step(bigint, bigint, text, jsonb) is
  'Finishes a step with a value, for this and all later runs of the job. It may be part of the handler''s own'
    ' transaction: the handler''s writes and the step then commit together or not at all, and a lost claim'
    ' rolls both back (QJ002). A step that is already finished is refused (QJ003), also if the first call''s'
    ' answer was lost: then ask begin_step. For a name that is used again in one run, see begin_step.';

-- Locks: none. Raises: 22023, QJ001, QJ002.
create or replace function queue.read_steps(id bigint, claim bigint, after text default null)
returns table (name text, value jsonb)
language plpgsql stable parallel unsafe security definer rows 100
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_after record;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_claims(array[read_steps.id], array[read_steps.claim]);
  end if;
  perform from queue.active_job aj where aj.id = read_steps.id and aj.claim = read_steps.claim;
  if not found then
    perform queue._raise_claim_error(read_steps.id, read_steps.claim);
  end if;
  if read_steps.after is not null then
    v_after := queue._step_key(read_steps.after);
  else
    select '' as name, 0 as no into v_after;
  end if;
  return query
    select queue._step_name(x.name, x.no), x.value
    from (
      select s.name, s.no, s.value, row_number() over (order by s.name, s.no) as n,
        sum(coalesce(pg_column_size(s.value), 0) + octet_length(s.name)) over (order by s.name, s.no) as total
      from queue.step s
      where s.job_id = read_steps.id and s.finished_at is not null
        and (s.name, s.no) > (v_after.name, coalesce(v_after.no, 1))) x
    where x.n = 1 or x.total <= 65536 and x.n <= 1000
    order by x.name, x.no;
end $$;
comment on function queue.read_steps(bigint, bigint, text) is
  'Returns the finished steps of a job that the caller runs, if fetch returned an empty object because they'
    ' take more than 64 kB: by name, as many as fit into one answer. Call it again with the last name as'
    ' after, until it returns no row.';

-- Splits a step's name into the name and the number of its use, NULL if the name has none. The first use
-- has no number, so a#1 is a name of its own, and _step_name returns each name as it was given. A name may
-- have 1,000 bytes, apart from its number.
-- Raises: 22023.
create or replace function queue._step_key(p_name text, out name text, out no integer)
language plpgsql immutable parallel safe security invoker as $$
declare
  v_parts text[];
begin
  name := p_name;
  if strpos(p_name, '#') > 0 and octet_length(p_name) <= 1010 then
    v_parts := regexp_match(p_name, '^(.+)#([2-9]|[1-9][0-9]{1,8})$');
    if v_parts is not null then
      name := v_parts[1];
      no := v_parts[2]::integer;
    end if;
  end if;
  perform queue._check_name('name', name);
end $$;

-- A step's name as clients and people see it.
create or replace function queue._step_name(p_name text, p_no integer)
returns text language plpgsql immutable parallel safe security invoker as $$
begin
  return p_name || case when p_no > 1 then '#' || p_no else '' end;
end $$;

-- The use of a name that is meant in a run of a job: without a number (p_no) the first one that is not
-- finished or that this run has not reached yet. If it has no row, only its number is returned.
create or replace function queue._step_in_run(p_id bigint, p_claim bigint, p_name text, p_no integer,
  out no integer, out run bigint, out finished_at timestamptz, out fingerprint text, out value jsonb)
language plpgsql stable parallel safe security invoker as $$
begin
  select s.no, s.run, s.finished_at, s.fingerprint, s.value into no, run, finished_at, fingerprint, value
  from queue.step s
  where s.job_id = p_id and s.name = p_name
    and (s.no = p_no or p_no is null and (s.run <> p_claim or s.finished_at is null))
  order by s.no limit 1;
  if no is null then
    no := coalesce(p_no,
      (select max(s.no) from queue.step s where s.job_id = p_id and s.name = p_name) + 1, 1);
  end if;
end $$;

-- The use of a name that a call ends which gives no number (p_no), and whether that is finished: the first
-- one if it has no row, because it was begun without one; else the first that was begun and has not finished;
-- else the next one. Of uses that run at once, any may end first.
create or replace function queue._step_to_end(p_id bigint, p_claim bigint, p_name text, p_no integer,
  out no integer, out is_finished boolean)
language plpgsql stable parallel safe security invoker as $$
begin
  no := p_no;
  if no is null and not exists (
    select from queue.step s where s.job_id = p_id and s.name = p_name and s.no = 1) then
    no := 1;
  elsif no is null then
    select s.no into no from queue.step s
    where s.job_id = p_id and s.name = p_name and s.finished_at is null order by s.no limit 1;
    if not found then
      no := (queue._step_in_run(p_id, p_claim, p_name, null)).no;
    end if;
  end if;
  is_finished := queue._has_step(p_id, p_name, no);
end $$;

-- Whether a job has finished a step.
create or replace function queue._has_step(p_id bigint, p_name text, p_no integer)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (select from queue.step s
    where s.job_id = p_id and s.name = p_name and s.no = coalesce(p_no, 1) and s.finished_at is not null);
end $$;

-- Keeps a claim from ending before this transaction ends. p_may_end: this transaction may end it; two such
-- transactions wait for each other here, as they would be deadlocked where they end it.
-- Locks: see the top. Raises: QJ001, QJ002.
create or replace function queue._lock_claim(p_id bigint, p_claim bigint, p_may_end boolean default false)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_may_end then
    perform from queue.active_job aj where aj.id = p_id and aj.claim = p_claim for no key update;
  else
    perform from queue.active_job aj where aj.id = p_id and aj.claim = p_claim for key share;
  end if;
  if not found then
    perform queue._raise_claim_error(p_id, p_claim);
  end if;
end $$;

-- Raises: QJ009, always.
create or replace function queue._step_changed(id bigint, step text, was text, fingerprint text)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ009', message = 'step changed',
    detail = format('id: %s, step: %s, finished with fingerprint: %s, now: %s', id, left(step, 200), was,
      fingerprint),
    hint = 'The step has run with other code. Give the new step another name, pass the old fingerprint,'
      ' or let the step run again by queue.retry with from_step.';
end $$;

-- Raises: QJ003, always.
create or replace function queue._step_is_finished(p_id bigint, p_name text)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  perform queue._invalid_state(p_id, format('running, step %s is finished', left(p_name, 200)),
    'Call queue.begin_step before a step runs. If a run uses a name again, call it for each use, or add a'
      ' number: name#2.');
end $$;

-- The finished steps of a job for fetch: an object by name, empty if they are too long for an answer.
create or replace function queue._steps(p_id bigint)
returns jsonb language plpgsql stable parallel safe security invoker as $$
declare
  v_steps jsonb;
begin
  select case when x.total <= 65536 then (
    select jsonb_object_agg(queue._step_name(s.name, s.no), s.value)
    from queue.step s where s.job_id = p_id and s.finished_at is not null)
    when x.total > 65536 then '{}' end into v_steps
  from (
    select sum(coalesce(pg_column_size(s.value), 0) + octet_length(s.name)) as total
    from queue.step s where s.job_id = p_id and s.finished_at is not null) x;
  return case when octet_length(v_steps::text) > 65536 then '{}'::jsonb else v_steps end;
end $$;

-- work/step_lists.sql
-- Lists of steps: several steps are finished by one call, or together with the outcome of their run.
--
-- A client that need not store a step at once keeps it for its next call. If the client dies before that,
-- these steps run again. A client that passes a list has counted the uses of each name: a, a#2, a#3.
-- Locks and wake-ups: see work/steps.sql. Two sessions: work/step_lists.outcome.spec.

-- Locks: see the top.
-- Raises: 22023, QJ001, QJ002, QJ003 (one is already finished), QJ008; then none is stored.
create or replace function queue.finish_steps(id bigint, claim bigint, steps jsonb)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_finished text;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_claims(array[finish_steps.id], array[finish_steps.claim]);
  end if;
  perform queue._check_isolation();
  perform queue._check_steps(finish_steps.steps);
  perform queue._lock_claim(finish_steps.id, finish_steps.claim);
  v_finished := queue._store_steps(finish_steps.id, finish_steps.claim, finish_steps.steps);
  if v_finished is not null then
    perform queue._step_is_finished(finish_steps.id, v_finished);
  end if;
end $$;
comment on function queue.finish_steps(bigint, bigint, jsonb) is
  'Finishes several steps of a job, in the order of the list: all or none. steps is an array of {"name",'
    ' "value", "fingerprint"}, of at most 1,000; without a value it is null. A name that is used again in one'
    ' run has the number of its use: a, a#2. As finish_step, it may be part of the handler''s own'
    ' transaction, and refuses a lost claim (QJ002) and a step that is already finished (QJ003).';

-- Raises: 22023 unless it is a list of steps.
create or replace function queue._check_steps(p_steps jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
declare
  v_step jsonb;
  v_twice text;
begin
  if jsonb_typeof(p_steps) is distinct from 'array' then
    perform queue._invalid('steps must be a JSON array',
      'Pass [{"name": text, "value": any JSON, "fingerprint": text}, ...].');
  elsif jsonb_array_length(p_steps) > 1000 then
    perform queue._invalid('steps holds more than 1,000', 'Call queue.finish_steps for each further 1,000.',
      'steps: ' || jsonb_array_length(p_steps));
  end if;
  for v_step in select jsonb_array_elements(p_steps) loop
    perform queue._check_keys('a step', v_step, array['name', 'value', 'fingerprint']);
    if jsonb_typeof(v_step -> 'name') is distinct from 'string'
      or coalesce(jsonb_typeof(v_step -> 'fingerprint'), 'null') not in ('string', 'null') then
      perform queue._invalid('a step is malformed', 'name and fingerprint are text; a name is needed.',
        'step: ' || left(v_step::text, 200));
    end if;
    perform queue._check_name('fingerprint', v_step ->> 'fingerprint')
    where jsonb_typeof(v_step -> 'fingerprint') = 'string';
    perform queue._check_size('value', v_step -> 'value');
  end loop;
  select min(queue._step_name(s.name, s.no)) into v_twice
  from (select k.name, coalesce(k.no, 1) as no from jsonb_array_elements(p_steps) e
        cross join lateral queue._step_key(e ->> 'name') k
        group by 1, 2 having count(*) > 1) s;
  if v_twice is not null then
    perform queue._invalid('a step is named twice', 'Add the number of its use in the run: a, a#2.',
      'step: ' || left(v_twice, 200));
  end if;
end $$;

-- Finishes steps with the times of their order, except those that are finished already; returns the name of
-- the first of these.
-- Locks: the caller holds the claim's row of queue.active_job; the steps' rows, which only its holder writes.
create or replace function queue._store_steps(p_id bigint, p_claim bigint, p_steps jsonb)
returns text language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_finished text;
begin
  with given as (
    select k.name, coalesce(k.no, 1) as no, s.value, s.fingerprint, s.n
    from rows from (jsonb_to_recordset(p_steps) as (name text, value jsonb, fingerprint text))
      with ordinality s (name, value, fingerprint, n)
    cross join lateral queue._step_key(s.name) k),
  stored as (
    insert into queue.step as t (job_id, claim, run, finished_at, no, name, fingerprint, value)
    select p_id, p_claim, p_claim, v_now - (jsonb_array_length(p_steps) - g.n) * interval '1 us', g.no,
      g.name, g.fingerprint, g.value
    from given g order by g.n
    on conflict on constraint step_pkey do update set claim = excluded.claim, run = excluded.run,
      finished_at = excluded.finished_at, fingerprint = coalesce(excluded.fingerprint, t.fingerprint),
      value = excluded.value, error = null
    where t.finished_at is null
    returning t.name, t.no)
  select queue._step_name(g.name, g.no) into v_finished from given g
  where not exists (select from stored s where s.name = g.name and s.no = g.no)
  order by g.n limit 1;
  return v_finished;
end $$;

-- Stores the steps that come with outcomes, before these end their claims. An outcome whose claim is lost
-- stores none; a step that is finished already stays as it is, because an outcome may be sent twice.
-- Locks: the claims' rows of queue.active_job, which the caller holds, so that nobody else ends them.
create or replace function queue._store_steps_of(p_outcomes jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._store_steps(o.id, o.claim, o.steps)
  from jsonb_to_recordset(p_outcomes) o (id bigint, claim bigint, steps jsonb)
  where o.steps is not null
    and exists (select from queue.active_job aj where aj.id = o.id and aj.claim = o.claim);
end $$;

-- work/finish.sql
-- Ending claims: in succeed, in _succeed (work/settle.sql) or in _end_attempt (work/attempts.sql). No claim
-- number comes twice: base/era.sql.
--
-- Each of them takes the pair (id, claim) and deletes the row of queue.active_job that has both, so a claim
-- ends exactly once. In the same transaction, the job goes to queue.finished or back to the gates.
-- Locks: the claims' rows of queue.active_job, in the order of ids. finish_many and finish_and_fetch then try
-- the admission lock and settle. succeed, fail, retry_later and release may be part of a handler's own long
-- transaction, so they never take the admission lock: they append a pending settlement.

-- Locks: the claim's row in queue.active_job. Raises: QJ001, QJ002, QJ008.
create or replace function queue.succeed(id bigint, claim bigint, result jsonb default null)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_attempt smallint;
  v_flags smallint;
  v_claimed_at timestamptz;
  v_worker_id bigint;
  v_none regclass;
begin
  if coalesce(v_none, queue._unrestricted()) is null
    or current_setting('transaction_isolation') <> 'read committed' then
    perform queue._check_isolation();
    if to_regclass('queue.unrestricted') is null then
      perform queue._not_installed();
      perform queue._require_claims(array[succeed.id], array[succeed.claim]);
    end if;
  end if;
  -- Conditions are nested so that the usual case evaluates few: each is set up anew in a transaction (ADR 1).
  if succeed.result is not null then
    if pg_column_size(succeed.result) >= 2000 or pg_column_compression(succeed.result) is not null then
      perform queue._check_size('result', succeed.result);
    end if;
  end if;
  -- as _succeed for one job, in short statements
  delete from queue.active_job aj where aj.id = succeed.id and aj.claim = succeed.claim
  returning aj.attempt, aj.flags, aj.claimed_at, aj.worker_id
  into v_attempt, v_flags, v_claimed_at, v_worker_id;
  if v_flags is null then
    perform queue._raise_claim_error(succeed.id, succeed.claim);
  end if;
  insert into queue.finished (id, finished_at, started_at, worker_id, attempts, state, result)
  values (succeed.id, clock_timestamp(), v_claimed_at, v_worker_id, v_attempt, 'succeeded', succeed.result);
  if succeed.id <= pg_sequence_last_value('queue.awaited_seq') then
    perform queue._notify_waiters(array[succeed.id]);
  end if;
  if v_flags <> 0 then
    perform queue._clean_up_succeeded(array[succeed.id], array[v_flags], v_flags, false);
  end if;
  if not has_function_privilege(case current_setting('role') when 'none' then session_user else current_setting('role')::name end, 'queue.finish_many(jsonb)'::regprocedure, 'execute') then
    perform queue._audit_claim('succeed', succeed.id, succeed.claim);
  end if;
end $$;
comment on function queue.succeed(bigint, bigint, jsonb) is
  'Ends the claim: the job has succeeded, with the result if given. It may be the last statement of the'
    ' handler''s own transaction: then its writes and the outcome commit together or not at all. A'
    ' transaction that ends several jobs must do so in the order of their ids, or by one finish_many, which'
    ' sorts them; any other order could deadlock with operators. queue.configure limits the size of results'
    ' (22023).';

-- Raises: 22023, QJ001, QJ002, QJ008.
create or replace function queue.fail(id bigint, claim bigint, error text, details jsonb default null,
  options jsonb default null)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_state text;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_outcomes(jsonb_build_array(jsonb_build_object('id', fail.id, 'claim', fail.claim,
      'options', fail.options)));
  end if;
  perform queue._check_isolation();
  if fail.options is not null then
    perform queue._check_fail_options(fail.options);
  end if;
  v_state := queue._end_attempt(jsonb_build_object('outcome', 'failed', 'error', left(fail.error, 10000),
    'details', fail.details, 'options', fail.options), fail.id, fail.claim, false);
  if not has_function_privilege(case current_setting('role') when 'none' then session_user else current_setting('role')::name end, 'queue.finish_many(jsonb)'::regprocedure, 'execute') then
    perform queue._audit_claim('fail', fail.id, fail.claim, jsonb_build_object('error',
      left(fail.error, 1000), 'options', fail.options));
  end if;
  return v_state;
end $$;
comment on function queue.fail(bigint, bigint, text, jsonb, jsonb) is
  'Ends the claim: the attempt failed. Returns the new state: scheduled or ready (it will be retried),'
    ' failed, or cancelled (it was told to abort, or has expired). It stores up to 10,000 characters of'
    ' error and 100 kB of details; of larger details, the size and the beginning. options: retryable (false:'
    ' fail at once; true: retry, whatever the policy), retry_at or retry_in (the time; without a policy they'
    ' also cause the retry), and priority, queue, lock to change on retry (lock: empty text for none),'
    ' reason (stored with a failed job), outcome (timed_out, if the worker ended the attempt for that). For'
    ' several in one transaction see succeed.';

-- Raises: 22023, QJ001, QJ002, QJ005, QJ008.
create or replace function queue.retry_later(id bigint, claim bigint, at timestamptz default null,
  needs bigint[] default '{}', message text default null)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_outcome jsonb := jsonb_build_object('outcome', 'retry_later', 'at', retry_later.at, 'message',
    left(retry_later.message, 10000), 'needs', retry_later.needs);
  v_state text;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_outcomes(jsonb_build_array(v_outcome
      || jsonb_build_object('id', retry_later.id, 'claim', retry_later.claim)));
  end if;
  perform queue._check_isolation();
  perform queue._check_outcome(v_outcome);
  v_state := queue._end_attempt(v_outcome, retry_later.id, retry_later.claim, false);
  if not has_function_privilege(case current_setting('role') when 'none' then session_user else current_setting('role')::name end, 'queue.finish_many(jsonb)'::regprocedure, 'execute') then
    perform queue._audit_claim('retry_later', retry_later.id, retry_later.claim, jsonb_build_object('at',
      retry_later.at, 'needs', retry_later.needs, 'message', left(retry_later.message, 1000)));
  end if;
  return v_state;
end $$;
comment on function queue.retry_later(bigint, bigint, timestamptz, bigint[], text) is
  'The job yields: it is called again, not before `at`, and after its needs, to which `needs` are added'
    ' (NULL: without waiting for any needs). This is not a failure, but a job with more than max_progress'
    ' yields fails. Returns the new state.';

-- Raises: QJ001, QJ002, QJ008.
create or replace function queue.release(id bigint, claim bigint)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_claims(array[release.id], array[release.claim]);
  end if;
  perform queue._check_isolation();
  perform queue._end_attempt('{"outcome": "released"}', release.id, release.claim, false);
  if not has_function_privilege(case current_setting('role') when 'none' then session_user else current_setting('role')::name end, 'queue.finish_many(jsonb)'::regprocedure, 'execute') then
    perform queue._audit_claim('release', release.id, release.claim);
  end if;
end $$;
comment on function queue.release(bigint, bigint) is
  'Gives the job back as if it had never been claimed; no attempt is counted.';

-- Locks: the claims' rows of queue.active_job; then the admission lock by try.
-- Raises: 22023 for invalid outcomes (then nothing is done), QJ008.
create or replace function queue.finish_many(outcomes jsonb)
returns table (id bigint, claim bigint, state text, error text)
language plpgsql volatile parallel unsafe security definer rows 50
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_ended record;
  v_none regclass;
begin
  if coalesce(v_none, queue._unrestricted()) is null
    or current_setting('transaction_isolation') <> 'read committed' then
    perform queue._check_isolation();
    if to_regclass('queue.unrestricted') is null then
      perform queue._not_installed();
      perform queue._require_outcomes(finish_many.outcomes);
    end if;
  end if;
  v_ended := queue._finish(finish_many.outcomes);
  return query
    select f.id, f.claim, case when v_ended.states is null then 'succeeded' else f.state end, f.error
    from unnest(v_ended.ids, v_ended.claims, v_ended.states, v_ended.errors) f (id, claim, state, error);
end $$;
comment on function queue.finish_many(jsonb) is
  'Ends many claims: an array of {"id", "claim", "outcome": succeeded | failed | retry_later | released |'
    ' aborted | crashed | unknown_task, ...} with the named arguments of the single calls. crashed: the'
    ' process in which the worker ran the job died. unknown_task: the worker does not know the task; the job'
    ' goes back for others, with no attempt counted, after a delay that grows from 1 s to 10 s, and fails if'
    ' no worker knows the task for unknown_task_grace (see queue.configure). Returns a row for each; a lost'
    ' claim is reported there (error QJ002) and does not stop the others. steps: finished steps of the run'
    ' (see finish_steps), stored with its outcome; one that was stored before stays as it is. Claims are'
    ' ended in the order of ids, whatever their order in the array. If a result is too large (see'
    ' queue.configure), a note is stored in its place, because the job''s work is done.';

-- Ends the claims of a list of outcomes and returns their new states; those that succeeded are ended as one
-- set. Nothing is done unless the whole list is well formed. states and errors stay NULL if all have
-- succeeded. If not all have, or steps come with them, all rows are locked first, in the order of ids: the
-- first settlement takes the admission lock, and from then on no row may be waited for.
create or replace function queue._finish(
  p_outcomes jsonb, out ids bigint[], out claims bigint[], out states text[], out errors text[],
  out has_refused boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_outcomes text[];
  v_results jsonb[];
  v_result_size integer;  -- the largest size, NULL if there are no results
  v_has_others boolean;  -- an outcome is no success, or comes with steps
  v_is_bad boolean;
  v_done bigint[];
begin
  begin
    select array_agg(o.id), array_agg(o.claim), array_agg(o.outcome), array_agg(o.result),
      max(pg_column_size(o.result)), bool_or(o.outcome <> 'succeeded' or o.steps is not null),
      bool_or(o.id is null or o.claim is null or o.outcome is null)
    into ids, claims, v_outcomes, v_results, v_result_size, v_has_others, v_is_bad
    from (select o.id, o.claim, o.result, o.steps, o.outcome
          from jsonb_to_recordset(p_outcomes)
            o (id bigint, claim bigint, outcome text, result jsonb, steps jsonb)
          order by o.id, o.claim) o;
  exception when data_exception then
    perform queue._check_is_list(p_outcomes);
    perform queue._invalid('an outcome is malformed', 'id and claim are numbers, outcome is text.', sqlerrm);
  end;
  -- a key that is not known: loops make lists, so of the succeeded outcomes only the first is checked
  if v_is_bad or v_has_others or v_result_size >= 2000
    or (p_outcomes -> 0) - '{id,claim,outcome,result}'::text[] = '{}' is not true then
    perform queue._check_is_list(p_outcomes);
    if v_is_bad then
      perform queue._invalid('an outcome lacks id, claim or outcome',
        'Each needs {"id", "claim", "outcome"}.');
    end if;
    perform queue._check_outcome(o) from jsonb_array_elements(p_outcomes) o;
    if v_result_size >= 2000 then
      v_results := array(select queue._truncate_result(r.result)
        from unnest(v_results) with ordinality r (result, n) order by r.n);
    end if;
  end if;
  has_refused := false;
  if v_has_others then
    perform from queue.active_job l where l.id = any (ids) and l.claim = any (claims)
    order by l.id for update;
    perform queue._store_steps_of(p_outcomes);
    select array_agg(o.id order by o.n), array_agg(o.claim order by o.n), array_agg(o.result order by o.n)
    into ids, claims, v_results
    from unnest(ids, claims, v_results, v_outcomes) with ordinality o (id, claim, result, outcome, n)
    where o.outcome = 'succeeded';
  end if;
  if ids is not null then
    v_done := queue._succeed(ids, claims, case when v_result_size is not null then v_results end);
    if v_has_others then
      states := array_fill('succeeded'::text, array[cardinality(ids)]);
      errors := array_fill(null::text, array[cardinality(ids)]);
    end if;
    if cardinality(v_done) is distinct from cardinality(ids) then
      has_refused := true;
      select array_agg(case when r.ok then 'succeeded' end order by u.n),
        array_agg(case when not r.ok then 'QJ002' end order by u.n)
      into states, errors
      from unnest(ids) with ordinality u (id, n)
      cross join lateral (
        select coalesce(u.id = any (v_done), false) and ids[u.n + 1] is distinct from u.id as ok) r;
    end if;
  end if;
  if v_has_others then
    select e.ids, e.claims, e.states, e.errors, _finish.has_refused or e.has_refused
    into ids, claims, states, errors, has_refused
    from queue._end_others(p_outcomes, ids, claims, states, errors) e;
  end if;
end $$;

-- Ends the claims of the outcomes that are not succeeded, appends how that went to the lists, and settles.
-- Locks: the caller holds the rows of all claims; then as _settle_own, which says why no wake-up is lost.
create or replace function queue._end_others(
  p_outcomes jsonb, inout ids bigint[], inout claims bigint[], inout states text[], inout errors text[],
  out has_refused boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_outcome jsonb;
  v_state text;
  v_error text;
begin
  has_refused := false;
  for v_outcome in select o from jsonb_array_elements(p_outcomes) o where o ->> 'outcome' <> 'succeeded'
    order by (o ->> 'id')::bigint loop
    v_state := null;
    v_error := null;
    begin
      v_state := queue._end_attempt(v_outcome, (v_outcome ->> 'id')::bigint,
        (v_outcome ->> 'claim')::bigint, false);
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
end $$;

-- Replaces a result that is too large by a note that clients know: the job has done its work, and running it
-- again would be wrong. The limit is that of _check_size.
create or replace function queue._truncate_result(p_result jsonb)
returns jsonb language plpgsql stable parallel unsafe security invoker as $$
begin
  perform queue._check_size('result', p_result);
  return p_result;
exception when invalid_parameter_value then
  return jsonb_build_object('__pgdefer__', 'unencodable', 'value', 'JSON that is too large');
end $$;

-- Raises: 22023 if it is not a list.
create or replace function queue._check_is_list(p_outcomes jsonb)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if jsonb_typeof(p_outcomes) is distinct from 'array' then
    perform queue._invalid('outcomes must be a JSON array',
      'Pass [{"id": number, "claim": number, "outcome": text, ...}, ...].');
  end if;
end $$;

-- Raises: 22023 if it is not an outcome.
create or replace function queue._check_outcome(p_outcome jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
declare
  v_bad text;
begin
  perform queue._check_keys('an outcome', p_outcome,
    array['id', 'claim', 'outcome', 'result', 'error', 'details', 'options', 'at', 'needs', 'message',
    'steps']);
  if not p_outcome ->> 'outcome' = any (
    '{succeeded,failed,retry_later,released,aborted,crashed,unknown_task}'::text[]) then
    perform queue._invalid('unknown outcome',
      'Outcomes: succeeded, failed, retry_later, released, aborted, crashed, unknown_task.',
      'outcome: ' || left(p_outcome ->> 'outcome', 200));
  end if;
  select e.key into v_bad from jsonb_each(p_outcome) e
  where e.key in ('error', 'message') and jsonb_typeof(e.value) not in ('string', 'null') limit 1;
  if found then
    perform queue._invalid(v_bad || ' must be text',
      'Pass a JSON string; put structured data into details.');
  elsif jsonb_typeof(p_outcome -> 'options') <> 'null' then
    perform queue._check_fail_options(p_outcome -> 'options');
  end if;
  if jsonb_typeof(p_outcome -> 'steps') <> 'null' then
    perform queue._check_steps(p_outcome -> 'steps');
  end if;
  perform queue._check_moment('at', queue._timestamp('at', p_outcome -> 'at'));
  if jsonb_typeof(p_outcome -> 'needs') = 'array' then
    select n::text into v_bad from jsonb_array_elements(p_outcome -> 'needs') n
    where n::text !~ '^[0-9]{1,18}$' limit 1;
  elsif jsonb_typeof(p_outcome -> 'needs') <> 'null' then
    v_bad := p_outcome ->> 'needs';
  end if;
  if v_bad is not null then
    perform queue._invalid('needs must be a list of ids', 'Pass ids of jobs, or null.',
      'value: ' || left(v_bad, 200));
  end if;
end $$;

-- work/waits.sql
-- Sleeps and waits: a durable job gives its claim back, and continues later with a new one.
--
-- Each function here ends the claim as a yield does, but counts no progress. So the job holds no slot and
-- no worker meanwhile; at an ordered lock it keeps its turn, as a job that waits for a retry does.
-- Locks: the claim's row of queue.active_job, which is deleted; it protects the job's rows of
-- queue.job_override, queue.step and queue.suspended, which are written next. Never the admission lock,
-- because a handler's own transaction may be long.
-- Why no wake-up is lost: see admit/suspended.sql.

-- Locks: see the top. Raises: 22023, QJ001, QJ002, QJ003 (the step is finished), QJ008.
create or replace function queue.sleep(id bigint, claim bigint, name text, until timestamptz)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_until timestamptz := greatest(sleep.until, clock_timestamp());
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_claims(array[sleep.id], array[sleep.claim]);
  end if;
  perform queue._check_isolation();
  if sleep.until is null then
    perform queue._invalid('until is missing', 'Pass the time at which the job continues.');
  end if;
  perform queue._check_moment('until', sleep.until);
  perform queue._suspend(sleep.id, sleep.claim, sleep.name,
    jsonb_build_object('outcome', 'suspended', 'at', v_until), to_jsonb(queue._utc(v_until)));
end $$;
comment on function queue.sleep(bigint, bigint, text, timestamptz) is
  'Ends the claim. The job continues with a new claim at the given time, or at once if that has passed. It'
    ' holds no slot and no worker meanwhile; at an ordered lock it keeps its turn. In its next run the step'
    ' of this name is finished; its value is the time at which the sleep ended. A sleep counts neither as a'
    ' failure nor as progress.';

-- Locks: see the top. Raises: 22023, QJ001, QJ002, QJ003 (the step is finished), QJ008.
create or replace function queue.wait(id bigint, claim bigint, name text, signal text default null,
  event text default null, timeout interval default null)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_no integer;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_claims(array[wait.id], array[wait.claim]);
  end if;
  perform queue._check_isolation();
  if num_nonnulls(wait.signal, wait.event) <> 1 then
    perform queue._invalid('wait takes either a signal or an event', 'Give one of the two.');
  end if;
  perform queue._check_name(case when wait.signal is null then 'event' else 'signal' end,
    coalesce(wait.signal, wait.event));
  perform queue._check_interval('timeout', wait.timeout);
  v_no := queue._suspend(wait.id, wait.claim, wait.name, '{"outcome": "suspended", "is_open": true}', null);
  if v_no is not null then
    insert into queue.suspended (job_id, no, step, signal, event, until)
    values (wait.id, v_no, (queue._step_key(wait.name)).name, wait.signal, wait.event,
      clock_timestamp() + wait.timeout);
  end if;
end $$;
comment on function queue.wait(bigint, bigint, text, text, text, interval) is
  'Ends the claim. The job continues with a new claim once the signal was sent to it or the event was'
    ' published, before or after this call. A signal ends one wait; the oldest signal is taken first. In the'
    ' job''s next run the step of this name is finished; its value is the payload, or null if the timeout'
    ' passed first. The job holds no slot and no worker meanwhile; at an ordered lock it keeps its turn.';

-- Locks: see the top. Raises: 22023, QJ001, QJ002, QJ003 (the step is finished), QJ005, QJ008.
create or replace function queue.await_jobs(id bigint, claim bigint, name text, ids bigint[])
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_claims(array[await_jobs.id], array[await_jobs.claim]);
    perform queue._require_jobs('{worker,operator}', await_jobs.ids);
  end if;
  perform queue._check_isolation();
  if array_ndims(await_jobs.ids) = 1 is not true or array_position(await_jobs.ids, null) is not null then
    perform queue._invalid('ids must be a list of jobs', 'Pass the id of at least one job, and no NULL.');
  end if;
  perform queue._suspend(await_jobs.id, await_jobs.claim, await_jobs.name,
    jsonb_build_object('outcome', 'suspended', 'needs', to_jsonb(await_jobs.ids)), null);
end $$;
comment on function queue.await_jobs(bigint, bigint, text, bigint[]) is
  'Ends the claim. The job continues with a new claim once all these jobs have ended, whether or not they'
    ' succeeded; queue.needs returns their states, results and errors. In its next run the step of this name'
    ' is finished. A job that no longer exists counts as ended, if a finished step has its id in a list. The'
    ' jobs count as needs (for deadlines, retention, queue.graph), but their failure does'
    ' not hold the job. The job holds no slot and no worker meanwhile, so they may run in the same queue; at'
    ' an ordered lock it keeps its turn.';

-- Locks: none. Raises: QJ001.
create or replace function queue.waits_for(id bigint)
returns table (step text, signal text, event text, until timestamptz)
language plpgsql stable parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator,reader}', array[waits_for.id]);
  end if;
  if not exists (select from queue.job j where j.id = waits_for.id) then
    perform queue._job_not_found(waits_for.id);
  end if;
  return query
    select queue._step_name(w.step, w.no), w.signal collate "default", w.event collate "default", w.until
    from queue.suspended w where w.job_id = waits_for.id;
end $$;
comment on function queue.waits_for(bigint) is
  'Returns the signal (queue.signal) or the event (queue.publish) that a durable job waits for, the step that'
    ' waits, and the end of its timeout; no row if it waits for neither.';

-- Ends a claim, and writes the step after which the job continues: finished with a value, or unfinished if
-- the outcome says is_open. Returns the number of the step's use; NULL if the job has ended instead (it was
-- told to abort, or has expired).
-- Locks and errors: those of the functions above.
create or replace function queue._suspend(p_id bigint, p_claim bigint, p_name text, p_outcome jsonb,
  p_value jsonb)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_key record := queue._step_key(p_name);
  v_step record;
begin
  perform queue._lock_claim(p_id, p_claim, true);
  v_step := queue._step_to_end(p_id, p_claim, v_key.name, v_key.no);
  if v_step.is_finished then
    perform queue._step_is_finished(p_id, p_name);
  elsif queue._end_attempt(p_outcome, p_id, p_claim, false) in ('failed', 'cancelled') then
    return null;
  end if;
  insert into queue.step (job_id, claim, run, finished_at, no, name, value)
  values (p_id, p_claim, p_claim, case when not p_outcome ? 'is_open' then clock_timestamp() end, v_step.no,
    v_key.name, p_value)
  on conflict on constraint step_pkey do update set claim = excluded.claim, run = excluded.run,
    finished_at = excluded.finished_at, value = excluded.value, error = null;
  return v_step.no;
end $$;

-- work/step_failures.sql
-- Failures of steps: a step's own retry policy, apart from that of its job.
--
-- After a failure that is not the last, the run ends as by a sleep, and the next one continues at the step.
-- It counts for the step, neither for the job nor as progress. After the last failure the step is finished,
-- with a note of the error as its value, and the claim goes on: the handler may do something else instead.
-- So later runs take the same path, and do not try the step again.
-- Locks: the claim's row of queue.active_job, which protects the job's rows of queue.step and
-- queue.job_override. Never the admission lock, because a handler's own transaction may be long.
-- Why no wake-up is lost: as in work/waits.sql, the end of the claim is handed over to the next admission.

-- Locks: see the top. Raises: 22023, QJ001, QJ002, QJ003 (the step is finished), QJ008.
create or replace function queue.fail_step(id bigint, claim bigint, name text, error text,
  details jsonb default null, options jsonb default null)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_key record;
  v_step record;
  v_failed record;
  v_at timestamptz;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_claims(array[fail_step.id], array[fail_step.claim]);
  end if;
  perform queue._check_isolation();
  perform queue._check_step_options(fail_step.options);
  v_key := queue._step_key(fail_step.name);
  perform queue._lock_claim(fail_step.id, fail_step.claim, true);
  v_step := queue._step_to_end(fail_step.id, fail_step.claim, v_key.name, v_key.no);
  if v_key.no is null and v_step.no > 1 and not exists (
    select from queue.step s where s.job_id = fail_step.id and s.no = v_step.no and s.name = v_key.name) then
    -- no other use was begun: the call means the last one
    v_step.no := v_step.no - 1;
    v_step.is_finished := true;
  end if;
  if v_step.is_finished then
    perform from queue.step s
    where s.job_id = fail_step.id and s.no = v_step.no and s.name = v_key.name and s.error is not null
      and s.claim = fail_step.claim;
    perform queue._step_is_finished(fail_step.id, fail_step.name) where not found;
    return null;
  end if;
  insert into queue.step as s (job_id, claim, run, no, name, fingerprint, failures, failed_at, error)
  values (fail_step.id, fail_step.claim, fail_step.claim, v_step.no, v_key.name,
    fail_step.options ->> 'fingerprint', 1, clock_timestamp(), left(coalesce(fail_step.error, ''), 10000))
  on conflict on constraint step_pkey do update set claim = excluded.claim, run = excluded.run,
    fingerprint = coalesce(excluded.fingerprint, s.fingerprint), failures = coalesce(s.failures, 0) + 1,
    failed_at = coalesce(s.failed_at, excluded.failed_at), error = excluded.error
  returning s.failures, s.failed_at into v_failed;
  v_at := queue._next_try(fail_step.options, v_failed.failures, v_failed.failed_at);
  if v_at is null then
    update queue.step s
    set finished_at = clock_timestamp(),
      value = jsonb_build_object('__pgdefer__', 'step_failed', 'value', left(s.error, 1000))
    where s.job_id = fail_step.id and s.name = v_key.name and s.no = v_step.no;
    return null;
  end if;
  return queue._end_attempt(jsonb_build_object('outcome', 'suspended', 'label',
    coalesce(fail_step.options ->> 'outcome', 'failed'), 'at', v_at, 'error', left(fail_step.error, 10000),
    'details', fail_step.details), fail_step.id, fail_step.claim, false);
end $$;
comment on function queue.fail_step(bigint, bigint, text, text, jsonb, jsonb) is
  'Records that a step failed. If it is to be tried again, this ends the claim: the job continues with'
    ' a new claim when the step''s retry policy says so, and the call returns the job''s new state, as'
    ' fail does. The failure counts for the step, not for the job. Otherwise the call returns NULL and the'
    ' run goes on: the step has failed for good. It is finished, with the value {"__pgdefer__":'
    ' "step_failed", "value": the error}. If that answer is lost, the same run may repeat the call, which'
    ' counts once; for a name that is used again in one run, see begin_step. options: retry (the policy,'
    ' as of a task; without one there is one attempt), retryable (false: it fails for good; true: it is'
    ' tried again, whatever the policy), retry_at or retry_in (the time), deadline (a time) or deadline_in'
    ' (an interval after the step''s first failure): a try that would begin later is not made; fingerprint'
    ' (see begin_step), outcome (timed_out, if it ended for that).';

-- Raises: 22023 if they are not options of queue.fail_step.
create or replace function queue._check_step_options(options jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
declare
  v_options jsonb := jsonb_strip_nulls(options);
begin
  if options is null then
    return;
  end if;
  perform queue._check_keys('options', options,
    array['retry', 'retryable', 'retry_at', 'retry_in', 'deadline', 'deadline_in', 'fingerprint',
    'outcome']);
  if v_options ?& '{deadline,deadline_in}'::text[] then
    perform queue._invalid('deadline and deadline_in exclude each other', 'Give one of the two.');
  elsif v_options ? 'fingerprint' and jsonb_typeof(v_options -> 'fingerprint') <> 'string' then
    perform queue._invalid('fingerprint must be text', 'Pass a JSON string of at most 1,000 bytes.');
  end if;
  perform queue._check_retry(options -> 'retry') where v_options ? 'retry';
  perform queue._check_name('fingerprint', v_options ->> 'fingerprint') where v_options ? 'fingerprint';
  perform queue._timestamp('deadline', v_options -> 'deadline');
  perform queue._interval('deadline_in', v_options -> 'deadline_in');
  perform queue._check_fail_options(v_options - '{retry,deadline,deadline_in,fingerprint}'::text[]);
end $$;

-- When a step runs again after a failure, its p_failures-th; the first was at p_first. NULL: never.
create or replace function queue._next_try(p_options jsonb, p_failures integer, p_first timestamptz)
returns timestamptz language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_options jsonb := jsonb_strip_nulls(coalesce(p_options, '{}'));
  v_policy jsonb := coalesce(nullif(p_options -> 'retry', 'null'), '{}');
  v_at timestamptz;
begin
  if v_options -> 'retryable' = 'false' or p_failures >= queue._max_attempts(v_policy, v_options) then
    return null;
  end if;
  v_at := coalesce(queue._timestamp('retry_at', v_options -> 'retry_at'),
    clock_timestamp() + coalesce(queue._interval('retry_in', v_options -> 'retry_in'),
      queue.backoff(v_policy, p_failures)));
  if v_at > coalesce(queue._timestamp('deadline', v_options -> 'deadline'),
    p_first + queue._interval('deadline_in', v_options -> 'deadline_in')) then
    return null;
  end if;
  return v_at;
end $$;

-- work/signals.sql
-- Signals and events, for which durable jobs wait.
--
-- Both functions only append, as defer does: they may be called from triggers, in any isolation level, and at
-- the same time as anything else. They take no lock except the sleep lock, shared and by try. Admission
-- applies the appended rows under the admission lock; admit/suspended.sql says why no wake-up is lost.

-- Locks: see the top. Raises: 22023, QJ001.
create or replace function queue.signal(job bigint, name text, payload jsonb default '{}')
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{producer,worker,operator}', array[signal.job]);
  end if;
  perform queue._check_name('name', signal.name);
  perform queue._check_size('payload', signal.payload);
  insert into queue.received_signal (job_id, name, payload)
  select j.id, signal.name, coalesce(signal.payload, '{}') from queue.job j where j.id = signal.job;
  if not found then
    perform queue._job_not_found(signal.job);
  end if;
  insert into queue.pending_settlement (job_id, kind, flags) values (signal.job, 'signal', 0);
  perform queue._announce();
  if queue._is_operator() then
    perform queue._audit_jobs('signal', jsonb_build_object('name', signal.name), array[signal.job],
      queue._jobs_before(array[signal.job]));
  end if;
end $$;
comment on function queue.signal(bigint, text, jsonb) is
  'Sends a signal with a payload to a job. Each wait of the job for this name takes one signal, the oldest'
    ' first. A signal that comes early is kept for as long as the job. The call only appends, as defer does,'
    ' so it may be part of any transaction, also from triggers; it takes effect at the commit. A finished job'
    ' can take the signal only after it was retried.';

-- Locks: see the top. Raises: 22023.
create or replace function queue.publish(event text, payload jsonb default '{}', retain interval default null)
returns boolean language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_no bigint;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform queue._check_name('event', publish.event);
  perform queue._check_size('payload', publish.payload);
  perform queue._check_interval('retain', publish.retain);
  if exists (select from queue.event e where e.name = publish.event and e.expires_at > clock_timestamp()) then
    return false;
  end if;
  insert into queue.event (name, payload, expires_at)
  values (publish.event, coalesce(publish.payload, '{}'),
    clock_timestamp() + coalesce(publish.retain, interval '30 days'))
  returning no into v_no;
  insert into queue.pending_settlement (job_id, kind, flags) values (-v_no, 'event', 0);
  perform queue._announce();
  if queue._is_operator() then
    perform queue._audit('publish', jsonb_build_object('event', publish.event));
  end if;
  return true;
end $$;
comment on function queue.publish(text, jsonb, interval) is
  'Publishes an event with a payload to all jobs that wait for it now, or while it is kept: for retain,'
    ' 30 days by default. During that time the first event of a name counts; if there is one, the call'
    ' returns false and does nothing. The call only appends, as defer does: if two transactions publish the'
    ' same event at once, both may get true, and one of the two events counts.';

-- work/streams.sql
-- Streams and progress: a job reports them while it runs.

-- The numbers have no gaps: a call waits for any other transaction that is emitting to the stream, which can
-- only belong to the same run of the job. So a reader that continues after the last number misses nothing.
-- Locks: the claim's row of queue.active_job, FOR KEY SHARE, as finish_step; then the new row. Why no wake-up
-- is lost: clients that wait are notified as at the end of a job, and also poll (inspect/results.sql).
-- Raises: 22023, QJ001, QJ002, QJ008.
create or replace function queue.emit(id bigint, claim bigint, stream text, value jsonb)
returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_no bigint;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_claims(array[emit.id], array[emit.claim]);
  end if;
  perform queue._check_isolation();
  perform queue._check_name('stream', emit.stream);
  perform queue._check_size('value', emit.value);
  perform queue._lock_claim(emit.id, emit.claim);
  while v_no is null loop
    insert into queue.stream_item (job_id, stream, no, value)
    values (emit.id, emit.stream,
      coalesce((select max(i.no) from queue.stream_item i
                where i.job_id = emit.id and i.stream = emit.stream), 0) + 1,
      coalesce(emit.value, 'null'))
    on conflict on constraint stream_item_pkey do nothing
    returning no into v_no;
  end loop;
  perform queue._notify_waiters(array[emit.id]);
  return v_no;
end $$;
comment on function queue.emit(bigint, bigint, text, jsonb) is
  'Appends a value to a stream of a running job, and returns its number there: 1, 2, 3. In a transaction that'
    ' finishes a step, the value is emitted exactly once. Readers are notified on the channel of'
    ' queue.await_result.';

-- Locks: none. Raises: 22023, QJ001.
create or replace function queue.read_stream(id bigint, stream text, after bigint default 0)
returns table (no bigint, value jsonb, emitted_at timestamptz)
language plpgsql stable parallel unsafe security definer rows 100
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{producer,worker,operator,reader}', array[read_stream.id]);
  end if;
  perform queue._check_name('stream', read_stream.stream);
  if not exists (select from queue.job j where j.id = read_stream.id) then
    perform queue._job_not_found(read_stream.id);
  end if;
  return query
    select x.no, x.value, x.emitted_at
    from (
      select i.no, i.value, i.emitted_at, sum(pg_column_size(i.value)) over (order by i.no) as total,
        row_number() over (order by i.no) as n
      from (select i.no, i.value, i.emitted_at from queue.stream_item i
            where i.job_id = read_stream.id and i.stream = read_stream.stream
              and i.no > coalesce(read_stream.after, 0)
            order by i.no limit 1000) i) x
    where x.n = 1 or x.total <= 1000000
    order by x.no;
end $$;
comment on function queue.read_stream(bigint, text, bigint) is
  'Returns the values that a job has emitted to a stream, in order, after a number: at most 1,000 values, and'
    ' 1 MB as stored. Call it again with the last number. No rows means that there are no more yet, or none'
    ' at all if the job has finished; queue.await_result tells which, and how to wait.';

-- The names are found by the index, one after the other, so the cost does not depend on the number of values.
-- Locks: none. Raises: QJ001.
create or replace function queue.streams(id bigint)
returns table (stream text, items bigint, last_at timestamptz)
language plpgsql stable parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{producer,worker,operator,reader}', array[streams.id]);
  end if;
  if not exists (select from queue.job j where j.id = streams.id) then
    perform queue._job_not_found(streams.id);
  end if;
  return query
    with recursive found (name, n) as (
      select (select min(i.stream) from queue.stream_item i where i.job_id = streams.id), 1
      union all
      select (select min(i.stream) from queue.stream_item i
              where i.job_id = streams.id and i.stream > f.name), f.n + 1
      from found f where f.name is not null and f.n < 1000)
    select f.name collate "default", l.no, l.emitted_at
    from found f
    cross join lateral (
      select i.no, i.emitted_at from queue.stream_item i
      where i.job_id = streams.id and i.stream = f.name order by i.no desc limit 1) l
    order by f.n;
end $$;
comment on function queue.streams(bigint) is
  'Returns the streams to which a job has emitted values, in the order of their names, at most 1,000: the'
    ' number of values in each, and when it got the last one. queue.read_stream returns the values.';

-- Locks: the claim's row of queue.active_job, FOR KEY SHARE, as finish_step; then the job's row of
-- queue.job_override. Why no wake-up is lost: nobody waits for progress.
-- Raises: 22023, QJ001, QJ002, QJ008.
create or replace function queue.set_progress(id bigint, claim bigint, percent numeric,
  message text default null)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_claims(array[set_progress.id], array[set_progress.claim]);
  end if;
  perform queue._check_isolation();
  if set_progress.percent between 0 and 100 is false then
    perform queue._invalid('percent must be 0 to 100', 'Pass how much of the work is done, or NULL.');
  end if;
  perform queue._lock_claim(set_progress.id, set_progress.claim);
  insert into queue.job_override as s (id, percent, message)
  values (set_progress.id, round(set_progress.percent, 2), left(set_progress.message, 1000))
  on conflict on constraint job_override_pkey do update
    set (percent, message) = (excluded.percent, coalesce(excluded.message, s.message));
end $$;
comment on function queue.set_progress(bigint, bigint, numeric, text) is
  'Sets the progress of a running job, which queue.jobs shows: percent, and a message of which 1,000'
    ' characters are kept. NULL as the message keeps the last one.';

-- work/leases.sql
-- Leases: when the next one ends, and which are renewed while their handler lives. reap.sql ends the others.
-- Tests: work/reap.sql.

-- The earliest end of leases and timeouts that were set before workers could reach the server (_up_since).
create or replace function queue._grace_until()
returns timestamptz language plpgsql stable parallel safe security invoker as $$
begin
  return queue._up_since() + interval '30 s';
end $$;

-- When the next lease or timeout ends, for reap.
create or replace function queue._next_lease_end()
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_first timestamptz := (select l.expires_at from queue.lease l order by l.expires_at limit 1);
  v_grace_until timestamptz := case when v_first is not null then queue._grace_until() end;
  v_up_since timestamptz;
begin
  if v_first is null or v_grace_until <= clock_timestamp() then
    return v_first;
  end if;
  v_up_since := queue._up_since();
  return (select min(case when l.given_at < v_up_since
    then greatest(l.expires_at, v_grace_until) else l.expires_at end)
          from queue.lease l);
end $$;

-- Whether a worker of queue.work is in a transaction, as it is while a handler runs (work/sql_worker.sql). If
-- another session has been given the pid of one that died, the claim stays until that ends a transaction.
create or replace function queue._is_in_handler(p_info jsonb)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (
    select from pg_locks l where l.locktype = 'virtualxid' and l.pid::text = p_info ->> 'session');
end $$;

-- Whether a claim is run by a worker of queue.work that is in its handler's transaction. No other session can
-- end that, and the attempt ends together with it. So this renews the lease, and no second run starts beside
-- it.
-- Locks: the lease's row by skip locked.
create or replace function queue._renew_in_handler(p_id bigint, p_claim bigint)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  if not exists (select from queue.active_job aj join queue.worker w on w.id = aj.worker_id
    where aj.id = p_id and aj.claim = p_claim and w.info ? 'session' and queue._is_in_handler(w.info))
  then
    return false;
  end if;
  update queue.lease l set expires_at = clock_timestamp() + interval '10 s'
  where l.ctid = any (array(select l.ctid from queue.lease l
    where l.id = p_id and l.claim = p_claim for update skip locked));
  return true;
end $$;

-- work/reap.sql
-- Reaping: ends the claims of workers that died (_mark_dead_workers) and of leases that have expired.

-- Locks: the worker's row; as _check_era; then as reap. The row comes first: a frozen client may hold it, and
-- must not be waited for under the admission lock. reap skips locked rows and tries the admission lock, so no
-- two of these functions wait for each other. Two calls for one worker: work/reap.two.spec; a frozen client:
-- work/reap.frozen.spec.
-- Raises: QJ007 (a restricted role), QJ008.
-- Jobs that a dead worker's claims held up can proceed when reap has ended these, or with the tick after it.
-- A fetch of the dead process may still be running in the server: reap looks for its claims as for those of
-- any other gone worker.
create or replace function queue.worker_died(worker bigint)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_worker(worker_died.worker);
  end if;
  perform queue._check_isolation();
  perform from queue.worker w where w.id = worker_died.worker for no key update;
  perform queue._check_era();
  update queue.worker w set gone_at = clock_timestamp() where w.id = worker_died.worker and w.gone_at is null;
  return (select r.reaped from queue._reap(interval '1 s') r);
end $$;
comment on function queue.worker_died(bigint) is
  'Reports that a worker process died without deregistering: its claims end as crashed now, not after'
    ' dead_after, except those with their own lease. For process supervisors. Returns the number of ended'
    ' claims, including those of other dead workers. It is not an error if the worker is already gone.';

-- Locks: as _check_era; rows of queue.worker and queue.active_job by skip locked, each row separately; the
-- admission lock by try. With two reapers at once, a claim ends exactly once, no matter which deletes its row
-- first.
-- A fetch that was running when its worker went may still create claims. So a worker's claims are looked for
-- at once, and again when every transaction that could have seen it alive has ended. After that no more
-- claims can appear (is_over). waits_for lists these transactions: the ones in flight after the worker's end
-- was committed. It leaves out those without a role, which are vacuum's: an owner who is not a superuser
-- can't see what kind of process they are.
-- A late claim of a worker that has deregistered is released, like its others; that of a dead worker has
-- crashed. While the server was down no heartbeat could arrive, nor between the primary's death and the
-- promotion of its standby. So if the last sign of life was before workers could reach the server
-- (_up_since), a worker counts as dead dead_after past that at the earliest, and a lease or a timeout ends
-- 30 s past it.
-- A session looks for claims of removed workers once in 10 s. It stops after a second (_reap: p_budget); the
-- next call continues.
create or replace function queue.reap()
returns table (reaped integer, next_expiry timestamptz)
language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform queue._check_isolation();
  perform queue._check_era();
  select r.reaped, r.next_expiry into reaped, next_expiry from queue._reap(interval '1 s') r;
  if not has_function_privilege(case current_setting('role') when 'none' then session_user else current_setting('role')::name end, 'queue.finish_many(jsonb)'::regprocedure, 'execute') then
    perform queue._audit('reap', '{}', p_before => jsonb_build_object('reaped', reaped));
  end if;
  return next;
end $$;
comment on function queue.reap() is
  'Ends dead claims: those of workers without a heartbeat for dead_after (counted from the'
    ' server''s start or promotion at the earliest), and those whose lease or timeout has passed. Returns'
    ' their number, and when the next may expire.';

-- reap for p_budget, but at least one claim, so that each call makes progress. Locks, in this order: as
-- _mark_dead_workers, _reap_gone, _reap_forgotten, _forget_workers and _reap_leases; none is waited for.
create or replace function queue._reap(p_budget interval)
returns table (reaped integer, next_expiry timestamptz)
language plpgsql volatile parallel unsafe security invoker rows 1 as $$
declare
  v_now timestamptz := clock_timestamp();
  v_up_since timestamptz := queue._up_since();
begin
  perform queue._mark_dead_workers(v_now, v_up_since);
  reaped := queue._reap_gone(v_now, v_now + p_budget);
  if abs(date_part('epoch', v_now)
    - coalesce(nullif(current_setting('pgdefer.reviewed_at', true), '')::double precision, 0)) >= 10 then
    reaped := reaped + queue._reap_forgotten();
    perform set_config('pgdefer.reviewed_at', date_part('epoch', v_now)::text, false);
  end if;
  perform queue._forget_workers(v_now);
  reaped := queue._reap_leases(v_now, v_now + p_budget, reaped);
  next_expiry := least((select min(greatest(w.last_seen_at, v_up_since) + w.dead_after)
    from queue.worker w where w.gone_at is null), queue._next_lease_end());
  return next;
end $$;

-- Marks workers as gone whose last heartbeat is too long ago, and notes for those that went before which
-- transactions may still create claims of theirs (waits_for).
-- Locks: rows of queue.worker by skip locked.
create or replace function queue._mark_dead_workers(p_now timestamptz, p_up_since timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.worker w set gone_at = p_now
  where w.id = any (array(select w.id from queue.worker w where w.gone_at is null
    and greatest(w.last_seen_at, p_up_since) + w.dead_after < p_now
    and not (w.info ? 'session' and queue._is_in_handler(w.info)) for update skip locked));
  update queue.worker w
  set waits_for = queue._virtual_transactions()
  where w.id = any (array(select w.id from queue.worker w
                          where w.gone_at < p_now and w.waits_for is null
                            and w.xmin <> pg_current_xact_id()::xid for update skip locked));
end $$;

-- Ends the claims of gone workers until p_until, but at least one; returns their number. A worker of which
-- none is left is clear, and it is over if none can appear any more.
-- Locks: rows of queue.worker by skip locked; each claim as _reap_claim; rows of queue.worker as before.
create or replace function queue._reap_gone(p_now timestamptz, p_until timestamptz)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_last bigint[];
  v_gone bigint[];
  v_left bigint[] := '{}'::bigint[];
  v_claim record;
  v_ended integer;
  v_reaped integer := 0;
begin
  v_last := array(
    select w.id from queue.worker w
    where w.waits_for is not null and not w.is_over
      and not exists (select from pg_locks l where l.locktype = 'virtualxid'
        and l.virtualtransaction = any (w.waits_for))
    for update skip locked);
  v_gone := v_last || array(select w.id from queue.worker w where w.gone_at is not null and not w.is_clear
    and w.id <> all (v_last));
  if v_gone = '{}' then
    return 0;
  end if;
  for v_claim in
    select aj.id, aj.claim, aj.worker_id, w.name, w.last_seen_at, w.has_left from queue.active_job aj
    join queue.worker w on w.id = aj.worker_id
    where aj.worker_id = any (v_gone) and not exists (select from queue.lease l
      where l.id = aj.id and l.claim = aj.claim and l.is_own)
    order by aj.id
  loop
    v_ended := 0;
    if v_reaped = 0 or clock_timestamp() < p_until then
      v_ended := queue._reap_claim(v_claim.id,
        v_claim.claim, case when v_claim.has_left then 'released' else 'crashed' end,
        format('worker %s (%s) died: its last heartbeat was at %s', v_claim.worker_id,
          left(v_claim.name, 200), v_claim.last_seen_at));
    end if;
    v_reaped := v_reaped + v_ended;
    if v_ended = 0 then
      v_left := v_left || v_claim.worker_id;
    end if;
  end loop;
  update queue.worker w set is_clear = true
  where w.id = any (array(select w.id from queue.worker w where w.id = any (v_gone) and not w.is_clear
    and w.id <> all (v_left) for update skip locked));
  update queue.worker w set is_over = true where w.id = any (v_last) and w.id <> all (v_left);
  return v_reaped;
end $$;

-- Deletes workers that are over and went a minute ago, with what was meant for them.
-- Locks: rows of queue.worker, queue.abort, queue.undelivered and queue.sleeper by skip locked.
create or replace function queue._forget_workers(p_now timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_over bigint[] := array(select w.id from queue.worker w where w.is_over
    and w.gone_at < p_now - interval '1 minute' for update skip locked);
begin
  if v_over <> '{}' then
    delete from queue.abort a
    where a.ctid = any (array(select a.ctid from queue.abort a
      where a.worker_id = any (v_over) for update skip locked));
    delete from queue.undelivered u
    where u.ctid = any (array(select u.ctid from queue.undelivered u
      where u.worker_id = any (v_over) for update skip locked));
    delete from queue.sleeper s where s.worker_id in (
      select d.worker_id from queue.sleeper d where d.worker_id = any (v_over) for update skip locked);
    delete from queue.worker w where w.id = any (v_over);
  end if;
end $$;

-- Ends claims whose lease or timeout has passed until p_until, but at least one with those that the caller
-- has ended (p_reaped). Returns the number of both.
-- Locks: for each claim as _renew_in_handler, _reap_claim.
create or replace function queue._reap_leases(p_now timestamptz, p_until timestamptz, p_reaped integer)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_up_since timestamptz := queue._up_since();
  v_grace_until timestamptz := queue._grace_until();
  v_claim record;
  v_reaped integer := p_reaped;
begin
  for v_claim in
    select l.id, l.claim, j.options ->> 'timeout' as timeout, l.is_own,
      coalesce(aj.claimed_at + (j.options ->> 'timeout')::interval + interval '10 s' <= p_now, false)
        as is_timed_out, l.expires_at
    from queue.lease l
    cross join lateral (select j.options from queue.job j where j.id = l.id offset 0) j
    left join lateral (
      select aj.claimed_at
      from queue.active_job aj
      where aj.id = l.id and aj.claim = l.claim offset 0) aj on true
    where l.expires_at <= p_now and (v_grace_until <= p_now or l.given_at >= v_up_since) order by l.expires_at
  loop
    exit when v_reaped > 0 and clock_timestamp() > p_until;
    continue when not v_claim.is_own and queue._renew_in_handler(v_claim.id, v_claim.claim);
    v_reaped := v_reaped + queue._reap_claim(
      v_claim.id, v_claim.claim, case when v_claim.is_timed_out then 'timed_out' else 'crashed' end,
      case when v_claim.is_timed_out then format('not done within its timeout of %s', v_claim.timeout)
           else format('its lease ended at %s', v_claim.expires_at) end);
  end loop;
  return v_reaped;
end $$;

-- Ends claims whose worker was removed, unless they have a lease of their own, as crashed: how they ended is
-- unknown. A fetch leaves such a claim only if it was prepared (PREPARE TRANSACTION) and committed long
-- after; other causes are half a restore and a bug. Reads 5,000 rows of queue.active_job from the least id
-- on, and if there are more, as many from a random one.
-- Locks: as reap.
create or replace function queue._reap_forgotten()
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_claim record;
  v_reaped integer := 0;
begin
  for v_claim in
    with least as materialized (
      select aj.id, aj.claim, aj.worker_id from queue.active_job aj order by aj.id limit 5000),
    chosen as materialized (
      select aj.id, aj.claim, aj.worker_id
      from (select min(l.id)
        + (random() * ((select aj.id from queue.active_job aj
        order by aj.id desc limit 1) - min(l.id)))::bigint as id
            from least l having count(*) = 5000) x
      cross join lateral (select aj.id, aj.claim, aj.worker_id from queue.active_job aj where aj.id >= x.id
        order by aj.id limit 5000) aj)
    select x.id, x.claim, x.worker_id
    from (select l.* from least l union select c.* from chosen c) x
    where x.claim is not null and not exists (select from queue.worker w where w.id = x.worker_id)
      and not exists (select from queue.lease l where l.id = x.id and l.claim = x.claim and l.is_own)
    order by x.id limit 1000
  loop
    v_reaped := v_reaped + queue._reap_claim(v_claim.id, v_claim.claim, 'crashed',
      format('worker %s was removed', v_claim.worker_id));
  end loop;
  return v_reaped;
end $$;

-- Ends one dead claim; returns 0 if another session has ended it or holds it, or if it can't be ended now. A
-- claim that was never handed out (work/deliver.sql) is released.
-- Locks, and why no wake-up is lost: as _end_attempt.
create or replace function queue._reap_claim(p_id bigint, p_claim bigint, p_outcome text, p_error text)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform from queue.active_job aj where aj.id = p_id and aj.claim = p_claim for update skip locked;
  if not found then
    if not exists (select from queue.active_job aj where aj.id = p_id and aj.claim = p_claim) then
      -- two reapers may meet it, one of them with the admission lock: neither waits
      delete from queue.lease l
      where l.ctid = any (array(select l.ctid from queue.lease l
        where l.id = p_id and l.claim = p_claim for update skip locked));
    end if;
    return 0;
  elsif exists (select from queue.lease l where l.id = p_id and l.claim = p_claim and l.is_own
    and l.expires_at > clock_timestamp()) then
    return 0;  -- it was extended since the caller looked
  end if;
  perform queue._end_attempt(
    case
      case when exists (select from queue.active_job aj join queue.undelivered u on u.worker_id = aj.worker_id
        and u.id = aj.id and u.claim = aj.claim
                        where aj.id = p_id) then 'released' else p_outcome end
      when 'timed_out' then jsonb_build_object('outcome', 'failed', 'error', p_error, 'options',
        '{"outcome": "timed_out"}'::jsonb)
      when 'crashed' then jsonb_build_object('outcome', 'crashed', 'error', p_error)
      else '{"outcome": "released"}' end,
    p_id, p_claim, true);
  return 1;
exception when others then
  -- one bad row must not keep the others from being reaped, nor keep every worker awake
  update queue.lease l set expires_at = clock_timestamp() + interval '1 minute'
  where l.ctid = any (array(select l.ctid from queue.lease l
    where l.id = p_id and l.claim = p_claim for update skip locked));
  raise warning 'pgdefer: job % can''t be reaped: % (%)', p_id, sqlerrm, sqlstate;
  return 0;
end $$;

-- Invariants, for queue.check().
create or replace function queue._check_claim_rows()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'claimed by a removed worker'::text, aj.id, format('worker %s', aj.worker_id)
    from queue.active_job aj
    where aj.claim is not null and not exists (select from queue.worker w where w.id = aj.worker_id)
      and not exists (select from queue.lease l where l.id = aj.id and l.claim = aj.claim and l.is_own);
  return query
    select 'running, but its attempt has ended'::text, aj.id, format('claim %s', aj.claim)
    from queue.active_job aj join queue.attempt a on a.job_id = aj.id and a.claim = aj.claim;
  return query
    select 'a lease without its claim'::text, l.id, format('claim %s', l.claim)
    from queue.lease l
    where not exists (select from queue.active_job aj where aj.id = l.id and aj.claim = l.claim
      and aj.flags & 128/* lease */ <> 0);
  return query
    select 'told to abort, but not marked so'::text, aj.id, format('claim %s', aj.claim)
    from queue.active_job aj join queue.abort a on a.id = aj.id and a.claim = aj.claim
    where aj.flags & 1024/* aborting */ = 0;
  return query
    select 'crashed before, but not quarantined'::text, aj.id, format('lane %s', aj.lane)
    from queue.active_job aj join queue.lane l on l.lane = aj.lane join queue.job_override s on s.id = aj.id
    where aj.claim is null and s.crashes > 0 and l.kind <> 2/* lane_crashed */;
  return query
    select 'finished, but still set to expire'::text, e.id, e.at::text
    from queue.expiry e join queue.finished f on f.id = e.id;
end $$;

-- work/minutes.sql
-- Figures of each minute: how many jobs ended, and how long they waited and ran, by queue and task.
--
-- Maintenance counts the ends of jobs and attempts from their tables, in the order of finished_at, so that
-- workers do nothing for it. queue.minute_cursor says up to which time it has counted.
--
-- Why none is missed, and none counted twice: a session that ends a job reads the clock for finished_at only
-- when it has an xid and a writer's lock on queue.active_job, or when it holds the admission lock. The count
-- holds the admission lock, reads the clock, and then looks for sessions with both of the former. If there
-- are none, all ends before that time are visible to the next statement. Otherwise it waits for just these.
-- Rows are removed only under the admission lock, and are counted before that if they have not been. If the
-- clock is set back, the minutes from then on are counted again; ends are missed only if it reaches the time
-- of the last count again before the next count.

-- Counts what has ended, for about p_budget, if 10 s have passed since it last looked, or if not all could be
-- counted then; and removes minutes older than 7 days.
-- Locks: the caller holds the admission lock, as do all writers of these tables.
-- Why no wake-up is lost: it wakes nobody; what is left stays uncounted, and the next call finds it.
create or replace function queue._count_minutes(p_budget interval, p_interval interval default '10 s')
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_start timestamptz := clock_timestamp();
  v_cursor record;
  v_to timestamptz;
  v_step interval := interval '1 minute';
  v_ends integer;
begin
  select k.counted_to, k.safe_at, k.looked_at into v_cursor from queue.minute_cursor k;
  if not found or v_cursor.counted_to >= v_cursor.safe_at and v_cursor.looked_at <= v_start
    and v_cursor.looked_at > v_start - p_interval then
    return;
  end if;
  v_cursor.safe_at := queue._look_for_ends();
  select k.counted_to into v_cursor.counted_to from queue.minute_cursor k;
  while v_cursor.counted_to < v_cursor.safe_at and clock_timestamp() <= v_start + p_budget loop
    v_to := least(v_cursor.counted_to + v_step, v_cursor.safe_at);
    v_ends := queue._number_of_ends(v_cursor.counted_to, v_to);
    if v_ends > 5000 and v_step > interval '1 ms' then
      v_step := v_step / 4;
      continue;
    elsif v_ends > 0 then
      perform queue._count_ends(v_cursor.counted_to, v_to);
    end if;
    v_cursor.counted_to := v_to;
    v_step := v_step * case when v_ends < 1000 then 2 else 1 end;
  end loop;
  update queue.minute_cursor k set counted_to = v_cursor.counted_to;
  delete from queue.minute m
  where m.ctid = any (array(
    select m.ctid from queue.minute m where m.minute < v_start - interval '7 days'
    order by m.minute limit 5000));
end $$;

-- Counts the ends of these jobs that are not counted yet, before they disappear. p_is_whole: their attempts
-- disappear too.
-- Locks: the caller holds the admission lock.
create or replace function queue._count_ends_of(p_ids bigint[], p_is_whole boolean)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_from timestamptz;
begin
  select k.counted_to into v_from from queue.minute_cursor k;
  if exists (select from queue.finished f where f.id = any (p_ids) and f.finished_at >= v_from)
    or p_is_whole
    and exists (select from queue.attempt a where a.job_id = any (p_ids) and a.finished_at >= v_from) then
    perform queue._count_ends(v_from, 'infinity', p_ids, p_is_whole);
  end if;
end $$;

-- Returns the time before which every end of a job is visible to the next statement.
-- Locks: the caller holds the admission lock.
create or replace function queue._look_for_ends()
returns timestamptz language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now constant timestamptz := clock_timestamp();
  v_cursor record;
  v_open xid[];
begin
  select k.counted_to, k.safe_at, k.looked_at, k.open_xids into v_cursor from queue.minute_cursor k;
  if greatest(v_cursor.counted_to, v_cursor.safe_at, v_cursor.looked_at) > v_now then
    -- the clock was set back
    delete from queue.minute m where m.minute >= date_trunc('minute', v_now, 'UTC');
    v_cursor.counted_to := least(v_cursor.counted_to, date_trunc('minute', v_now, 'UTC'));
    v_cursor.safe_at := '-infinity';
    v_cursor.looked_at := '-infinity';
    v_cursor.open_xids := '{}';
  end if;
  with l as materialized (
    select l.locktype, l.database, l.relation, l.transactionid, l.virtualtransaction, l.mode
    from pg_locks l
    where l.granted and l.pid is distinct from pg_backend_pid()
      and (l.locktype = 'transactionid' and l.mode = 'ExclusiveLock'
        or l.locktype = 'relation' and l.mode = 'RowExclusiveLock'))
  select coalesce(array_agg(x.transactionid), '{}') into v_open
  from l r join l x on x.virtualtransaction = r.virtualtransaction and x.locktype = 'transactionid'
  where r.locktype = 'relation' and r.relation = 'queue.active_job'::regclass
    and r.database = (select d.oid from pg_database d where d.datname = current_database());
  if v_open = '{}' then
    v_cursor.safe_at := v_now;
    v_cursor.looked_at := v_now;
  elsif not v_cursor.open_xids && v_open then
    v_cursor.safe_at := v_cursor.looked_at;
    v_cursor.looked_at := v_now;
  else
    v_open := v_cursor.open_xids;
  end if;
  update queue.minute_cursor k
  set (counted_to, safe_at, looked_at, open_xids)
    = (v_cursor.counted_to, v_cursor.safe_at, v_cursor.looked_at, v_open);
  return v_cursor.safe_at;
end $$;

-- How many jobs and attempts ended in this time, up to 5,001 of each.
create or replace function queue._number_of_ends(p_from timestamptz, p_to timestamptz)
returns integer language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select count(*)
    from (
      (select from queue.finished f where f.finished_at >= p_from and f.finished_at < p_to limit 5001)
      union all
      (select from queue.attempt a where a.finished_at >= p_from and a.finished_at < p_to limit 5001)) x);
end $$;

-- Adds to the minutes what ended in this time; with p_ids, only of these jobs.
-- Locks: the caller holds the admission lock.
create or replace function queue._count_ends(p_from timestamptz, p_to timestamptz,
  p_ids bigint[] default null, p_is_whole boolean default true)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  with ended as materialized (
    -- a job that is deleted before its end is cancelled for an instant
    select f.id, f.finished_at, case when f.worker_id is not null then f.started_at end as started_at,
      f.state, true as is_job
    from queue.finished f
    where p_ids is null and f.finished_at >= p_from and f.finished_at < p_to
      and f.reason is distinct from 'deleted'
    union all
    select a.job_id, a.finished_at, null, a.outcome, false from queue.attempt a
    where p_ids is null and a.finished_at >= p_from and a.finished_at < p_to
    union all
    select f.id, f.finished_at, case when f.worker_id is not null then f.started_at end, f.state, true
    from unnest(p_ids) u (id)
    cross join lateral (
      select f.id, f.finished_at, f.worker_id, f.started_at, f.state, f.reason from queue.finished f
      where f.id = u.id offset 0) f
    where f.finished_at >= p_from and f.reason is distinct from 'deleted'
    union all
    select a.job_id, a.finished_at, null, a.outcome, false
    from unnest(p_ids) u (id)
    cross join lateral (
      select a.job_id, a.finished_at, a.outcome from queue.attempt a where a.job_id = u.id offset 0) a
    where p_is_whole and a.finished_at >= p_from),
  -- many have the same of all these, so that few are left to be sorted
  alike as (
    select date_trunc('minute', e.finished_at, 'UTC') as minute, j.queue collate "C" as queue,
      j.task collate "C" as task, e.state, e.is_job,
      case when e.started_at is not null
        then queue._class_of(e.started_at - coalesce(j.scheduled_at, j.created_at)) end as wait,
      queue._class_of(e.finished_at - e.started_at) as run, count(*) as n
    from ended e
    cross join lateral (
      select j.queue, j.task, j.scheduled_at, j.created_at from queue.job_now j where j.id = e.id offset 0) j
    where e.is_job or e.state in ('failed', 'crashed', 'timed_out')
    group by 1, 2, 3, 4, 5, 6, 7)
  insert into queue.minute as m (minute, queue, task, succeeded, failed, cancelled, failures, waits, runs)
  select a.minute, a.queue, a.task, coalesce(sum(a.n) filter (where a.is_job and a.state = 'succeeded'), 0),
    coalesce(sum(a.n) filter (where a.is_job and a.state = 'failed'), 0),
    coalesce(sum(a.n) filter (where a.is_job and a.state = 'cancelled'), 0),
    coalesce(sum(a.n) filter (where not a.is_job), 0),
    queue._counts(array_agg(a.wait), array_agg(a.n)), queue._counts(array_agg(a.run), array_agg(a.n))
  from alike a group by a.minute, a.queue, a.task
  on conflict on constraint minute_pkey do update
  set (succeeded, failed, cancelled, failures, waits, runs) = (m.succeeded + excluded.succeeded,
    m.failed + excluded.failed, m.cancelled + excluded.cancelled, m.failures + excluded.failures,
    queue._add_counts(m.waits, excluded.waits), queue._add_counts(m.runs, excluded.runs));
end $$;

-- The class of a time. There are ten classes for each power of ten, from 1 ms: the n-th begins at
-- 10 ** ((n - 1) / 10) ms, and its middle is at most 12.2 % away from each of its times. Shorter times are in
-- class 1, and times over 11 days in class 90.
create or replace function queue._class_of(p_time interval)
returns integer language plpgsql immutable parallel safe security invoker as $$
begin
  return least(90, 1 + floor(10 * log(greatest(date_part('epoch', p_time) * 1000, 1))));
end $$;

-- How many times are in each class, up to the last class that has any. p_classes[i]: the class of
-- p_numbers[i] times.
create or replace function queue._counts(p_classes integer[], p_numbers bigint[])
returns integer[] language plpgsql immutable parallel safe security invoker as $$
declare
  v_last integer := 0;
  v_counts integer[];
begin
  for v_place in 1 .. cardinality(p_classes) loop
    v_last := greatest(v_last, p_classes[v_place]);
  end loop;
  v_counts := array_fill(0, array[v_last]);
  for v_place in 1 .. cardinality(p_classes) loop
    if p_classes[v_place] is not null then
      v_counts[p_classes[v_place]] := v_counts[p_classes[v_place]] + p_numbers[v_place];
    end if;
  end loop;
  return v_counts;
end $$;

create or replace function queue._add_counts(p_counts integer[], p_others integer[])
returns integer[] language plpgsql immutable parallel safe security invoker as $$
declare
  v_sums integer[] := p_counts
    || array_fill(0, array[greatest(cardinality(p_others) - cardinality(p_counts), 0)]);
begin
  for v_class in 1 .. cardinality(p_others) loop
    if p_others[v_class] <> 0 then
      v_sums[v_class] := v_sums[v_class] + p_others[v_class];
    end if;
  end loop;
  return v_sums;
end $$;

-- work/retention.sql
-- Retention: finished jobs are removed when their time has passed, unless an unfinished job needs them. A job
-- with steps may still await the jobs that it has deferred, so it keeps them until it has ended.
-- How long a job is kept: _retention (admit/dequeue.sql).

-- Locks: the admission lock, waited for, so that no new job needs a removed one; rows of finished jobs by
-- skip locked.
-- Raises: 22023, 42501 (for the audit, if the caller lacks the owner's rights), QJ008.
create or replace function queue.prune(max_jobs integer default 10000, state text default null,
  older_than interval default null)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
declare
  v_safe_at timestamptz;
  v_pruned integer;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform queue._check_isolation();
  if prune.max_jobs is null or prune.max_jobs < 1 then
    perform queue._invalid('max_jobs must be at least 1', 'Pass the maximum number of jobs to remove.');
  elsif not prune.state = any ('{succeeded,failed,cancelled,audit}'::text[]) then
    perform queue._invalid('state is not one of its values', 'Allowed: succeeded, failed, cancelled, audit.',
      'state: ' || left(prune.state, 200));
  elsif prune.older_than is not null and prune.state is null then
    perform queue._invalid('older_than needs a state', 'Say which: succeeded, failed or cancelled.');
  end if;
  perform queue._check_interval('older_than', prune.older_than);
  if prune.state = 'audit' then
    v_pruned := queue._prune_audit(prune.max_jobs, prune.older_than);
  else
    perform queue._lock_admission(true);
    v_safe_at := queue._safe_at();
    perform queue._admit_all();
    perform queue._forget_deleted();
    perform queue._prune_events(prune.max_jobs);
    perform queue._prune_groups(prune.max_jobs);
    perform queue._prune_idempotency_keys(prune.max_jobs);
    v_pruned := queue._prune(prune.max_jobs, v_safe_at, prune.state, coalesce(prune.older_than,
      interval '0'));
  end if;
  perform queue._audit('prune', jsonb_build_object('max_jobs', prune.max_jobs, 'state', prune.state,
    'older_than', prune.older_than), p_before => jsonb_build_object('pruned', v_pruned));
  return v_pruned;
end $$;
comment on function queue.prune(integer, text, interval) is
  'Removes finished jobs whose retention has passed, at most max_jobs, and returns their number. With a'
    ' state it removes jobs in that state that finished at least older_than ago, whatever their retention.'
    ' Jobs that unfinished jobs need are kept, and those that an unfinished job with steps has deferred. If'
    ' an uncommitted job names a removed one as a need, the old state counts. State audit: it removes rows of'
    ' queue.audit of at least that age; only the owner may do this.';

-- p_safe_at: the result of _safe_at, called before everything visible was admitted. A job whose end has been
-- handed over since then is not settled yet, and is kept.
-- Locks: the caller holds the admission lock; rows of queue.finished by skip locked.
create or replace function queue._prune(p_max_jobs integer, p_safe_at timestamptz, p_state text default null,
  p_older_than interval default null)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
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
        and f.id <> all (array(select h.job_id from queue.pending_settlement h))
      limit p_max_jobs for update skip locked);
    -- a transaction that names one as a need may not have committed yet
    insert into queue.deleted (id) select u.id from unnest(v_ids) u (id) where p_state = 'succeeded';
  else
    with due as materialized (
      select f.id, f.purge_at from queue.finished f where f.purge_at <= v_until
      order by f.purge_at limit p_max_jobs::bigint + 1000 for update skip locked),
    old as materialized (
      select f.id from queue.finished f
      where f.purge_at is null and f.state = 'succeeded'
        and f.finished_at < v_until - interval '7 days'
      limit p_max_jobs::bigint + 1000 for update skip locked),
    asked as materialized (
      select a.id, a.purge_at, queue._is_needed(a.id)
        or a.id = any (array(select h.job_id from queue.pending_settlement h)) as is_needed
      from (select d.id, d.purge_at from due d union all select o.id, null from old o) a)
    select array(select a.id from asked a where not a.is_needed order by a.purge_at limit p_max_jobs),
      array(select a.id from asked a where a.is_needed)
    into v_ids, v_kept;
    if cardinality(v_kept) >= 1000 then
      -- so many that reading them each time would cost too much
      update queue.finished f set purge_at = v_now + interval '1 minute' where f.id = any (v_kept);
    end if;
    -- a queue's retention may have been set since, or the time above stands in its place
    with kept as (
      update queue.finished f set purge_at = f.finished_at + queue._retention(f.id)
      where f.id = any (v_ids) and (f.finished_at + queue._retention(f.id) <= v_now) is not true
      returning f.id)
    select array(select u.id from unnest(v_ids) u (id) where u.id not in (select k.id from kept k))
    into v_ids;
  end if;
  perform queue._delete_rows(v_ids);
  return cardinality(v_ids);
end $$;

-- Whether an unfinished job needs this one, or may await it: as the child of a job with steps.
create or replace function queue._is_needed(p_id bigint)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  perform from queue.need d
  left join lateral (select f.id from queue.finished f where f.id = d.job_id offset 0) f on true
  where d.need_id = p_id and f.id is null limit 1;
  return found or exists (
    select from queue.job j
    cross join lateral (select (j.options ->> 'parent')::bigint as id) p
    where j.id = p_id and p.id is not null and exists (select from queue.step s where s.job_id = p.id)
      and not exists (select from queue.finished f where f.id = p.id));
end $$;

-- The time up to which retention may count. Every transaction that named a job as a need before that time
-- (_check_needs refuses it afterwards) has ended, and if it committed, its job is visible, so that _prune
-- sees the need once everything visible is admitted. If no other transaction has an xid, this is now; else
-- the recorded time before the last one up to which every transaction has ended.
-- Locks: the caller holds the admission lock.
create or replace function queue._safe_at()
returns timestamptz language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_old record;
  v_safe_at timestamptz;
begin
  select h.looked_at, h.looked_xid, h.safe_at, h.looked_xid < pg_snapshot_xmin(pg_current_snapshot())
    as is_over,
    greatest(h.looked_at, h.safe_at) > v_now as is_ahead into v_old
  from queue.horizon h;
  -- ahead: the clock was set back, and its earlier times do not count
  v_safe_at := case when v_old.is_ahead then '-infinity' when v_old.is_over then v_old.looked_at
    else v_old.safe_at end;
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
  where l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and l.granted
    and l.pid is distinct from pg_backend_pid()
    and (a.datname = current_database() and a.backend_type is distinct from 'autovacuum worker'
      or p.database = current_database())
  limit 1;
  return case when found then v_safe_at else v_now end;
end $$;

-- Removes every trace of jobs that are finished and in no gate. Finished jobs that needed them and may be
-- retried keep a record of their state.
-- Locks: the caller holds the admission lock and the rows of queue.finished.
create or replace function queue._delete_rows(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._count_ends_of(p_ids, true);
  update queue.need d
  set deleted_state = (select case f.state when 'succeeded' then 'succeeded' else 'failed' end
    from queue.finished f where f.id = d.need_id)
  where d.ctid = any (array(
    select d.ctid from unnest(p_ids) u (id)
    cross join lateral (select f.id from queue.finished f where f.id = u.id offset 0) f
    cross join lateral (select d.ctid, d.job_id from queue.need d where d.need_id = f.id offset 0) d
    where d.job_id not in (select unnest(p_ids))));
  delete from queue.need d where d.job_id = any (p_ids);
  delete from queue.awaited a
  where a.ctid = any (array(select a.ctid from queue.awaited a
    where a.id = any (p_ids) for update skip locked));
  delete from queue.finished f where f.id = any (p_ids);
  delete from queue.attempt a where a.job_id = any (p_ids);
  delete from queue.job_override s where s.id = any (p_ids);
  delete from queue.step s where s.job_id = any (p_ids);
  delete from queue.suspended s where s.job_id = any (p_ids);
  delete from queue.received_signal r where r.job_id = any (p_ids);
  delete from queue.stream_item i where i.job_id = any (p_ids);
  delete from queue.group_member m where m.job_id = any (p_ids);
  delete from queue.log l where l.id = any (p_ids);
end $$;

-- queue.deleted tells jobs whose transaction began before a need of theirs was deleted that the need had
-- succeeded. A row is removed once every such transaction has ended and its jobs have been admitted.
-- Locks: the caller holds the admission lock.
create or replace function queue._forget_deleted()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.deleted d
  where d.until <= (select least(k.next_xid, k.in_flight[1]) from queue.cursor_now k)
    and not exists (select from queue.backlog) and not exists (select from queue.backlog_part);
  update queue.deleted d set until = pg_current_xact_id() where d.until is null;
end $$;

-- work/worker_limits.sql
-- How many jobs of a queue one worker runs at once: the option max_running of fetch.
--
-- queue.worker_claim has a row for each claim that such a fetch makes in a queue with a limit. A row counts
-- while its claim is current. The worker's next fetch removes the others, so the end of a claim costs nothing
-- more, and a fetch reads at most as many rows as its worker may have claims there.

-- Forgets claims of a worker that have ended.
-- Locks: the caller holds the admission lock.
create or replace function queue._forget_ended_claims(p_worker bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.worker_claim c
  where c.worker_id = p_worker and not exists (
    select from queue.active_job aj where aj.id = c.id and aj.claim = c.claim);
end $$;

-- Raises: 22023 unless p_limits is an object of at most 100 names or patterns of queues, with numbers.
create or replace function queue._check_worker_limits(p_limits jsonb)
returns void language plpgsql immutable parallel safe security invoker as $$
declare
  v_limit record;
begin
  if jsonb_typeof(p_limits) <> 'object' then
    perform queue._invalid('max_running must be an object', 'Pass {"queue or prefix*": number}.');
  elsif (select count(*) from jsonb_object_keys(p_limits)) > 100 then
    perform queue._invalid('max_running has more than 100 queues', 'Use prefix* patterns.');
  end if;
  for v_limit in select l.key, l.value from jsonb_each(p_limits) l loop
    perform queue._check_name('queue', v_limit.key);
    if jsonb_typeof(v_limit.value) <> 'number' or v_limit.value #>> '{}' !~ '^[1-9][0-9]*$'
      or v_limit.value > '2147483647' then
      perform queue._invalid('max_running must be whole numbers of at least 1',
        'To take no job of a queue, leave it out of queues.',
        format('%s: %s', v_limit.key, left(v_limit.value::text, 200)));
    end if;
  end loop;
end $$;

-- How many more jobs of a queue, at most p_n, a worker may start: by the limit of the queue's name, else of
-- the longest prefix*; NULL for no limit.
create or replace function queue._worker_room(p_worker bigint, p_limits jsonb, p_queue text, p_n integer)
returns integer language plpgsql stable parallel safe security invoker as $$
declare
  v_limit integer := (
    select l.value::integer from jsonb_each(p_limits) l
    where queue._matches(p_queue, l.key) order by l.key = p_queue desc, length(l.key) desc limit 1);
begin
  return greatest(least(v_limit - (
    select count(*) from queue.worker_claim c where c.worker_id = p_worker and c.queue = p_queue), p_n), 0);
end $$;

-- Counts claims of jobs of a queue in their worker's limit.
-- Locks: the caller holds the admission lock.
create or replace function queue._count_worker_claims(
  p_worker bigint, p_limits jsonb, p_queue text, p_ids bigint[], p_claim bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  insert into queue.worker_claim (worker_id, queue, id, claim)
  select p_worker, p_queue, u.id, p_claim from unnest(p_ids) u (id)
  where queue._worker_room(p_worker, p_limits, p_queue, 1) is not null;
end $$;

-- Forgets the claims of workers that are gone.
-- Locks: the caller holds the admission lock.
create or replace function queue._forget_worker_claims()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.worker_claim c
  where not exists (select from queue.worker w where w.id = c.worker_id);
end $$;

-- work/maintenance.sql
-- Maintenance by workers: heartbeat, and a fetch that finds nothing, run what is due, so that no worker needs
-- tick.

-- Locks: as _check_era; as reap; then the admission lock, waited for while nothing is held. It needs a
-- transaction of its own.
-- Raises: QJ008. An error in one of the later steps is a warning, and undoes no other step.
create or replace function queue.tick()
returns table (admitted integer, reaped integer, pruned integer, next_due timestamptz)
language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform queue._check_isolation();
  perform queue._check_era();
  select r.reaped into reaped from queue._reap(interval '1 s') r;
  -- the admission lock is not waited for while rows that reap has locked are held; its holder admits, and the
  -- next tick does the rest
  if not queue._lock_admission(pg_current_xact_id_if_assigned() is null) then
    admitted := 0;
    pruned := 0;
  else
    select d.admitted, d.pruned into admitted, pruned from queue._do_duties(interval '1 s') d;
  end if;
  next_due := queue._next_due();
  if not has_function_privilege(case current_setting('role') when 'none' then session_user else current_setting('role')::name end, 'queue.finish_many(jsonb)'::regprocedure, 'execute') then
    perform queue._audit('tick', '{}', p_before => jsonb_build_object('admitted', admitted, 'reaped', reaped,
      'pruned', pruned));
  end if;
  return next;
end $$;
comment on function queue.tick() is
  'Does everything that is due: admission, expiry, reaping, repair, recurring runs, pruning. Workers do'
    ' this by heartbeat and fetch; without workers, call it from pg_cron.';

-- Ends dead claims, admits, expires, repairs and prunes, as far as p_budget roughly allows. An error is a
-- warning, and undoes what was done here, but nothing that the caller did.
-- Locks: as reap; then the admission lock by try. It waits for nothing, so a caller may hold its worker's
-- row, or the admission lock.
-- Why no wake-up is lost: work that is left stays due, and the next call of any worker finds it.
create or replace function queue._maintain(p_budget interval)
returns void language plpgsql volatile parallel unsafe security invoker set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
begin
  if not queue._is_era(queue._era()) then
    return;  -- the next fetch of a new session begins it, and may wait for the admission lock
  end if;
  perform from queue._reap(p_budget);
  if queue._lock_admission(false) then
    perform from queue._do_duties(p_budget);
  end if;
exception when others then
  raise warning 'pgdefer: maintenance failed: % (%)', sqlerrm, sqlstate;
end $$;

-- The same after a fetch that found nothing: every 10 s in a session; when a lease has ended or a job has
-- expired, because a sleeper was told to come back then; and if an earlier call has not reached all claims of
-- a dead worker. The first call only records the time, because heartbeats do most of the due work.
create or replace function queue._maintain_idle()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_epoch double precision := date_part('epoch', v_now);
  v_last double precision := nullif(current_setting('pgdefer.maintained_at', true), '')::double precision;
begin
  if v_last is null or abs(v_epoch - v_last) >= 10 then
    perform set_config('pgdefer.maintained_at', v_epoch::text, false);
  end if;
  if abs(v_epoch - v_last) >= 10
    or (select l.expires_at from queue.lease l order by l.expires_at limit 1) <= v_now
    or (select e.at from queue.expiry e
      where (select aj.claim from queue.active_job aj where aj.id = e.id) is null
      order by e.at limit 1) <= v_now
    or exists (select from queue.worker w where w.gone_at is not null and not w.is_clear and not w.has_left)
  then
    perform queue._maintain(interval '100 ms');
  end if;
end $$;

-- Work that is due besides reaping, for tick and _maintain: admission for p_budget, expiry, repair,
-- counting what ended, pruning.
-- Locks: the caller holds the admission lock.
create or replace function queue._do_duties(p_budget interval, out admitted integer, out pruned integer)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_admit record;
  v_start timestamptz := clock_timestamp();
  v_safe_at timestamptz := queue._safe_at();
begin
  admitted := 0;
  loop
    select a.* into v_admit from queue._admit(1000) a;
    admitted := admitted + v_admit.admitted;
    exit when not v_admit.has_more or clock_timestamp() > v_start + p_budget;
  end loop;
  perform queue._expire_due();
  begin
    perform queue._repair();
  exception when others then
    raise warning 'pgdefer: repair failed: % (%)', sqlerrm, sqlstate;
  end;
  begin
    perform queue._count_minutes(p_budget);
  exception when others then
    raise warning 'pgdefer: counting what ended failed: % (%)', sqlerrm, sqlstate;
  end;
  pruned := 0;
  begin
    if not v_admit.has_more then
      pruned := queue._prune(1000, v_safe_at);
      perform queue._prune_idempotency_keys(5000);
      if random() < 0.01 then
        perform queue._prune_old_runs(1000);
        perform queue._forget_deleted();
        perform queue._prune_events(1000);
        perform queue._prune_groups(1000);
      end if;
    end if;
  exception when others then
    raise warning 'pgdefer: pruning failed: % (%)', sqlerrm, sqlstate;
  end;
end $$;

-- Occasionally repairs states that only a bug or an interrupted repair can cause, counts again jobs that
-- started while a queue's limit was being set, and removes lanes and semaphores that have not been used for
-- long.
-- Locks: the caller holds the admission lock; rows of queue.active_job and queue.queueing_lock by skip
-- locked.
create or replace function queue._repair()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if random() < 0.02 then
    perform queue._advance(p_keys => array_agg(s.key)) from queue.semaphore s
      where s.lanes <> '{}' and s.used < s.slots having count(*) > 0;
  end if;
  if random() < 0.1 then
    perform queue._repair_cursor();
  end if;
  perform queue._recount_limited();
  perform queue._repair_replacing();
  perform queue._repair_settlements();
  perform queue._mark_idle_lanes();
  perform queue._forget_semaphores();
  perform queue._forget_worker_claims();
end $$;

-- When something is due that no commit announces: a schedule, a lease, a recurring run. now() if jobs are
-- already there and not admitted.
create or replace function queue._next_due()
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_due timestamptz;
begin
  select least(
    case when c.has_backlog or exists (select from queue.job j where j.xid >= c.next_xid)
           or exists (select from queue.job j
             where j.xid = any (array(select x from unnest(c.in_flight) x
             where pg_visible_in_snapshot(x, pg_current_snapshot()))))
         then clock_timestamp() end,
    case when exists (select from queue.pending_settlement h
      where pg_visible_in_snapshot(h.xid, pg_current_snapshot())) then clock_timestamp() + interval '10 ms'
    -- a settlement that waits for the end of a transaction (_row_locker), which wakes no worker
         when exists (select from queue.pending_settlement h where h.kind <> 'group')
           then clock_timestamp() + interval '100 ms'
    -- a transaction that adds jobs to a group may be long, and its commit wakes a worker
         when exists (select from queue.pending_settlement) then clock_timestamp() + interval '1 s' end,
    (select w.at from queue.waiting w where w.at >= c.due_at order by w.at limit 1),
    (select s.due_at from queue.schedule s where s.due_at >= c.due_at order by s.due_at limit 1),
    case when c.due_at > clock_timestamp() then clock_timestamp() end,  -- the clock was set back
    (select min(p.until) from queue.pause p where p.is_paused and p.until > clock_timestamp()
      and isfinite(p.until)),
    -- work that only tick can do, and that may fail at once, is due after a moment, so that no caller spins
    (select greatest(e.at, clock_timestamp() + interval '10 ms') from queue.expiry e
     where (select aj.claim from queue.active_job aj where aj.id = e.id) is null order by e.at limit 1),
    (select greatest(x.at, clock_timestamp() + interval '10 ms') from queue._next_lease_end() x (at)
      where x.at is not null),
    (select min(queue._next_start(c.queue)) from queue.queue_config c where c.rate_limit is not null))
  into v_due
  from queue.cursor_now c;
  return v_due;
end $$;

-- work/workers.sql
-- Workers: a worker lives as long as it calls heartbeat, and its claims with it. When it does not, reap ends
-- them (work/reap.sql). heartbeat also tells it which claims to abort; who asks for that: _notify_abort
-- (base/notify.sql).

-- Locks: none, except as _check_era if a new era is due. Raises: 22023.
create or replace function queue.register_worker(name text, queues text[] default null,
  info jsonb default '{}')
returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    queues := queue._narrow_queues('{worker}', queues);
  end if;
  return queue._register_worker(name, queues, info);
end $$;
comment on function queue.register_worker(text, text[], jsonb) is
  'Registers a worker that serves the queues (names, prefix*, *; NULL: all) and returns its id.'
    ' queue.workers shows info; its keys dead_after (interval, 30 s), listen (false: the worker only polls,'
    ' as behind a transaction pooler) and session (true: see queue.work) have a meaning.';

-- Locks: the worker's row; its rows of queue.abort; then as _maintain, which waits for nothing: the answer is
-- complete by then.
-- Raises: 22023, QJ007.
create or replace function queue.heartbeat(worker bigint, memory bigint default null)
returns table (id bigint, claim bigint, reason text)
language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  -- maintenance might keep others waiting for locks that another part of the transaction holds
  v_may_maintain boolean := current_setting('transaction_isolation') = 'read committed'
    and pg_current_xact_id_if_assigned() is null;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_worker(heartbeat.worker);
  end if;
  if heartbeat.memory < 0 then
    perform queue._invalid('memory must not be negative',
      'Pass how many bytes the worker''s processes have in memory, or NULL if that is unknown.');
  end if;
  update queue.worker w set last_seen_at = clock_timestamp(), memory = heartbeat.memory
  where w.id = heartbeat.worker and w.gone_at is null;
  if not found then
    perform queue._worker_gone(heartbeat.worker);
  end if;
  return query select a.id, a.claim, a.reason from queue.abort a where a.worker_id = heartbeat.worker
    order by a.id, a.claim;
  -- a claim that was taken away is reported once
  delete from queue.abort a
  where a.worker_id = heartbeat.worker and not exists (select from queue.active_job aj
    where aj.id = a.id and aj.claim = a.claim);
  if v_may_maintain then
    perform queue._maintain(interval '200 ms');
  end if;
end $$;
comment on function queue.heartbeat(bigint, bigint) is
  'Reports that the worker is alive; call it every 10 s. memory: the resident bytes of its processes, which'
    ' queue.workers shows (NULL: unknown). Returns the jobs that it must abort: cancelled'
    ' ones, and those taken from it (retried). Then it runs due maintenance, as tick, but only briefly and'
    ' without waiting; it does not if the transaction has already written, or is not READ COMMITTED. Raises'
    ' QJ007 if the worker was reaped or deregistered.';

create or replace function queue.claims(worker bigint)
returns table (id bigint, claim bigint)
language plpgsql stable parallel safe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_worker(claims.worker);
  end if;
  return query
    select aj.id, aj.claim from queue.active_job aj
    where aj.worker_id = claims.worker and aj.claim is not null
      and not exists (select from queue.undelivered u where u.worker_id = aj.worker_id and u.id = aj.id
        and u.claim = aj.claim)
    order by aj.id;
end $$;
comment on function queue.claims(bigint) is
  'Returns the claims that a worker holds, so that after a lost connection it can give back those that it'
    ' never received.';

-- It runs with the caller's rights, because PostgreSQL shows a session's state to its own role, and to few
-- others. A session that waits for its client is none that still works: it may have no client any more.
-- Locks: none.
create or replace function queue.is_busy(session integer)
returns boolean language plpgsql stable parallel restricted security invoker
set search_path = pg_catalog, pg_temp as $$
begin
  return exists (select from pg_stat_activity a
    where a.pid = is_busy.session and a.usename = session_user and a.backend_type = 'client backend'
      and a.state = 'active' and a.wait_event_type is distinct from 'Client');
end $$;
comment on function queue.is_busy(integer) is
  'Whether a session of the calling role (its number is pg_backend_pid) still works, or waits, for a call. A'
    ' worker that has given up a call asks before it calls again: while no synchronous standby answers, each'
    ' commit waits, however long its client has been gone, and so many sessions would use up'
    ' max_connections.';

-- Until the timeout has passed, it limits the lease: the attempt ends 10 s after it, however often it is
-- extended. An extension after that means that the handler could not be ended and still runs, as the live
-- worker reports: then only the lease counts, so that no second run, and no other holder of its lock or slot,
-- starts beside it.
-- Locks: the claim's row. Raises: 22023, QJ001, QJ002.
create or replace function queue.extend(id bigint, claim bigint, lease interval)
returns timestamptz language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_expires_at timestamptz;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_claims(array[extend.id], array[extend.claim]);
  end if;
  if extend.lease is null or extend.lease <= interval '0' then
    perform queue._invalid('lease must be longer than 0', 'Pass an interval such as ''20 minutes''.');
  end if;
  perform queue._check_interval('lease', extend.lease);
  v_expires_at := queue._extend(extend.id, extend.claim, extend.lease);
  if not has_function_privilege(case current_setting('role') when 'none' then session_user else current_setting('role')::name end, 'queue.finish_many(jsonb)'::regprocedure, 'execute') then
    perform queue._audit_claim('extend', extend.id, extend.claim, jsonb_build_object('lease', extend.lease));
  end if;
  return v_expires_at;
end $$;
comment on function queue.extend(bigint, bigint, interval) is
  'Gives the claim its own lease from now on. Only the lease then decides when the claim is dead,'
    ' whatever happens to its worker. Returns the end of the lease. A timeout still limits the attempt; but'
    ' a claim that is extended after its timeout lives as long as the lease: so a live worker reports that'
    ' it could not end the handler.';

-- Locks: the worker's row; the claims' rows of queue.active_job, all before the admission lock, which is then
-- taken by try.
create or replace function queue.deregister_worker(worker bigint)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_claim record;
  v_ids bigint[] := '{}'::bigint[];
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_worker(deregister_worker.worker);
  end if;
  perform queue._check_isolation();
  update queue.worker w set gone_at = clock_timestamp(), has_left = true
  where w.id = deregister_worker.worker and w.gone_at is null;
  perform from queue.active_job aj where aj.worker_id = deregister_worker.worker order by aj.id for update;
  for v_claim in
    select aj.id, aj.claim from queue.active_job aj where aj.worker_id = deregister_worker.worker
      and aj.claim is not null order by aj.id
  loop
    perform queue._end_attempt('{"outcome": "released"}', v_claim.id, v_claim.claim, false);
    v_ids := v_ids || v_claim.id;
  end loop;
  perform queue._settle_own(v_ids);
  return cardinality(v_ids);
end $$;
comment on function queue.deregister_worker(bigint) is
  'Removes the worker; its running jobs go back to ready. Returns their number. It is not an error if the'
    ' worker is already gone.';

-- Gives the claim a lease. Locks and errors: as extend.
create or replace function queue._extend(p_id bigint, p_claim bigint, p_lease interval)
returns timestamptz language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_claimed_at timestamptz;
  v_expires_at timestamptz;
begin
  update queue.active_job aj set flags = aj.flags | 128/* lease */
  where aj.id = p_id and aj.claim = p_claim returning aj.claimed_at into v_claimed_at;
  if not found then
    perform queue._raise_claim_error(p_id, p_claim);
  end if;
  select case when v_claimed_at + t.timeout <= v_now then v_now + p_lease
              else least(v_now + p_lease, v_claimed_at + t.timeout + interval '10 s') end
  into v_expires_at
  from queue.job j cross join lateral (select (j.options ->> 'timeout')::interval as timeout) t
  where j.id = p_id;
  insert into queue.lease as l (id, claim, expires_at, is_own)
  values (p_id, p_claim, v_expires_at, true)
  on conflict on constraint lease_pkey do update
    set claim = excluded.claim, expires_at = excluded.expires_at, is_own = true, given_at = excluded.given_at;
  return v_expires_at;
end $$;

-- register_worker without the check of rights. Locks and errors: as there.
create or replace function queue._register_worker(p_name text, p_queues text[], p_info jsonb)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_id bigint;
  v_dead_after interval := coalesce(queue._interval('dead_after', p_info -> 'dead_after'), interval '30 s');
begin
  perform queue._check_name('name', p_name);
  perform queue._check_list('queues', p_queues);
  if p_info is null or jsonb_typeof(p_info) <> 'object' then
    perform queue._invalid('info must be a JSON object', 'Pass an object such as {"host": "a"}.');
  elsif v_dead_after < interval '1 s' then
    perform queue._invalid('dead_after is too short',
      'Pass an interval of at least 1 second.');
  elsif cardinality(p_queues) = 0 then
    perform queue._invalid('queues is empty', 'Name queues or patterns, or pass NULL for all.');
  end if;
  perform queue._check_name('queue', q) from unnest(p_queues) q;
  perform queue._check_size('info', p_info);
  if p_info ? 'session' then
    if p_info -> 'session' <> 'true' then
      perform queue._invalid('session must be true',
        'Leave it out, except for a worker that runs its jobs in the session that registers it.');
    end if;
    p_info := jsonb_set(p_info, '{session}', to_jsonb(pg_backend_pid()));
  end if;
  perform queue._check_versions(p_info ->> 'client');
  perform queue._check_era();
  insert into queue.worker (name, queues, info, registered_at, last_seen_at, dead_after)
  values (p_name, p_queues, p_info, clock_timestamp(), clock_timestamp(), v_dead_after)
  returning id into v_id;
  return v_id;
end $$;

-- How many workers that are alive serve a queue. One last seen before p_up_since counts as seen then.
create or replace function queue._live_workers(
  p_queue text, p_now timestamptz, p_up_since timestamptz default '-infinity')
returns bigint language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select count(*) from queue.worker w
    where w.gone_at is null and greatest(w.last_seen_at, p_up_since) + w.dead_after >= p_now
      and (w.queues is null or exists (select from unnest(w.queues) q where queue._matches(p_queue, q))));
end $$;

-- work/claim_lanes.sql
-- Claiming from lanes without limits.
-- Tests: work/fetch.sql.

-- Claims up to p_n jobs of plain lanes, in the order of p_lanes. first_claim: as for _claim_newcomer.
-- Locks: rows of queue.active_job by skip locked.
-- Why no job starts that was paused before, and no limited job uncounted: the claiming statement reads the
-- lanes again.
-- Why a job's claims rise: a row that this statement sees was made ready by a transaction that already had
-- its number.
-- Why it starts after the end of jobs that it needed or followed: the clock is read after the snapshot.
create or replace function queue._claim_plain(
  p_worker bigint, p_lanes integer[], p_n integer, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_flags integer;
  v_is_mixed boolean;
begin
  with claimed as (
    update queue.active_job aj
    set claim = (select nextval('queue.claim_seq')), worker_id = p_worker,
      claimed_at = (select clock_timestamp()), attempt = aj.attempt + 1
    where aj.ctid = any (array(
      select c.ctid
      from unnest(p_lanes) u (lane)
      cross join lateral (
        select l.lane, l.low_deadline, l.low_id from queue.lane l
        where l.lane = u.lane and l.kind = 0/* lane_plain */
          and (l.paused_until is null or l.paused_until <= (select clock_timestamp())) offset 0) l
      cross join lateral (
        select aj.ctid from queue.active_job aj
        where aj.lane = l.lane and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id) and aj.claim is null
        order by aj.deadline, aj.id limit p_n for update of aj skip locked) c
      limit p_n))
    returning aj.id, aj.claim, aj.lane, aj.deadline, aj.attempt, aj.flags)
  select array_agg(c.id order by c.id), max(c.claim),
    bit_or(c.flags | case when c.attempt > 1 then 2048/* overridden */ else 0 end),
    bool_or(c.deadline < 'infinity' or c.lane <> p_lanes[1])
  into ids, first_claim, v_flags, v_is_mixed
  from claimed c;
  if v_flags & (128/* lease */ | 2048/* overridden */) <> 0 or v_flags < 0 or v_is_mixed then
    if v_flags & 128/* lease */ <> 0 then
      perform queue._lease_timeouts(ids, first_claim, (select aj.claimed_at from queue.active_job aj
        where aj.id = ids[1]));
    end if;
    if cardinality(ids) > 1 then
      ids := array(select aj.id from queue.active_job aj where aj.id = any (ids)
        order by array_position(p_lanes, aj.lane), aj.deadline, aj.id);
    end if;
    if v_is_mixed or v_flags & 2048/* overridden */ <> 0 or v_flags < 0 then
      first_claim := null;
    end if;
  end if;
end $$;

-- Returns those of the lanes that hold a ready job which may start, in the order in which they are read: by
-- priority, then the lane whose first job is oldest. plain_lanes: those that can be claimed from without the
-- admission lock, because no limited lane has a higher priority.
create or replace function queue._probe_lanes(
  p_lanes integer[], out lanes integer[], out kind smallint, out plain_lanes integer[])
language plpgsql stable parallel safe security invoker as $$
begin
  with ready as (
    select l.lane, l.kind, l.priority,
      row_number() over (order by l.priority desc, f.id, l.lane) as n,
      max(l.priority) filter (where l.kind = 1/* lane_limited */) over () as limited_priority
    from unnest(p_lanes) u (lane)
    cross join lateral (
      select l.lane, l.priority, l.kind, l.queue, l.low_deadline, l.low_id from queue.lane l
      where l.lane = u.lane offset 0) l
    cross join lateral (
      select aj.id from queue.active_job aj
      where aj.lane = l.lane and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id) and aj.claim is null
      order by aj.deadline, aj.id limit 1) f
    where l.kind = 0/* lane_plain */
      or not exists (select from queue.queue_config c where c.queue = l.queue
        and (c.max_running is not null or c.rate_limit is not null))
      or queue._queue_room(l.queue, 1, clock_timestamp()) > 0)
  select array_agg(r.lane order by r.n), max(r.kind),
    array_agg(r.lane order by r.n) filter (where r.is_plain)
  into lanes, kind, plain_lanes
  from (select r.*, r.kind = 0/* lane_plain */
    and (r.limited_priority is null or r.priority >= r.limited_priority) as is_plain from ready r) r;
end $$;

-- Records when reap must end claims of jobs with a timeout: 10 s after it.
create or replace function queue._lease_timeouts(p_ids bigint[], p_claim bigint, p_now timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  insert into queue.lease (id, claim, expires_at, is_own)
  select j.id, p_claim, p_now + (j.options ->> 'timeout')::interval + interval '10 s', false
  from queue.job j where j.id = any (p_ids) and j.flags & 128/* lease */ <> 0;
end $$;

-- work/claim_limited.sql
-- Claiming under limits: slots, max_running and rate, expires_at, queueing locks.
-- Tests: admit/rates.sql, admit/slots.sql.

-- Claims up to p_n jobs of lanes, in the order of p_lanes, subject to limits: semaphores, a queue's
-- max_running and rate, expires_at, and queueing locks that a defer is replacing. Lanes of one queue and
-- priority are read as one. Only jobs of p_tasks, and with a deadline before p_before, if given. p_limits:
-- those of the worker (work/worker_limits.sql).
-- Locks: the caller holds the admission lock; rows of queue.active_job and queue.queueing_lock by skip
-- locked.
create or replace function queue._claim_limited(
  p_worker bigint, p_lanes integer[], p_n integer, p_tasks text[] default null,
  p_before timestamptz default null, p_limits jsonb default null)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_start timestamptz := clock_timestamp();
  v_won bigint[] := '{}'::bigint[];
  v_left bigint[] := '{}'::bigint[];
  v_full text[] := '{}'::text[];
  v_take integer := p_n;
  v_ids bigint[];
  v_round record;
begin
  loop
    v_ids := array(
      select c.id
      from (
        select min(u.n) as rank, array_agg(l.lane) as lanes, array_agg(l.low_deadline) as deadlines,
          array_agg(l.low_id) as ids
        from unnest(p_lanes) with ordinality u (lane, n)
        cross join lateral (
          select l.lane, l.queue, l.priority, l.kind, l.low_deadline, l.low_id from queue.lane l
          where l.lane = u.lane offset 0) l
        where l.queue <> all (v_full) and (l.kind = 0/* lane_plain */ or not queue._is_queue_full(l.queue))
        group by l.queue, l.priority order by 1 limit 100) g
      cross join lateral (
        select aj.id
        from unnest(g.lanes, g.deadlines, g.ids) l (lane, deadline, id)
        cross join lateral (
          select aj.id, aj.deadline from queue.active_job aj
          where aj.lane = l.lane and (aj.deadline, aj.id) >= (l.deadline, l.id) and aj.claim is null
            and aj.id <> all (v_left)
            and (p_before is null or queue._deadline_of(aj.id, aj.deadline) < p_before)
            and (p_tasks is null or exists (select from queue.job j
              where j.id = aj.id and j.task = any (p_tasks)))
          order by aj.deadline, aj.id limit v_take) aj
        order by aj.deadline, aj.id limit v_take) c
      -- if the jobs of the first lanes can't start, however many they are, the next round also reads the
      -- first jobs of the others
      limit case when v_left = '{}' then v_take end);
    exit when v_ids = '{}';
    select c.won, c.rest, c.full_queues into v_round
    from queue._claim_ids(p_worker, v_ids, p_n - cardinality(v_won), p_limits) c;
    v_won := v_won || v_round.won;
    v_left := v_left || v_round.rest;
    v_full := v_full || v_round.full_queues;
    exit when cardinality(v_won) >= p_n or clock_timestamp() > v_start + interval '100 ms';
    if v_round.rest <> '{}' then
      perform queue._fill_behind_replaced(v_left);
    end if;
    v_take := greatest(p_n - cardinality(v_won), least(2 * v_take::bigint, 1000));
  end loop;
  return v_won;
end $$;

-- Claims those of p_ids, at most p_n, that limits allow to start. Ready jobs that meet a full key go to wait;
-- rest: jobs that stay where they are; full_queues: queues whose own limits allow no more starts.
-- Locks: as _claim_limited.
-- With a function of its own for the loop, 50 jobs with a key take 0.3 % more instructions.
-- In one piece: the loop shares its arrays, so that function would take 19 arguments and return 16.
create or replace function queue._claim_ids(
  p_worker bigint, p_ids bigint[], p_n integer, p_limits jsonb,
  out won bigint[], out rest bigint[], out full_queues text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  -- under the admission lock, so that earlier claims have lesser ones
  v_claim bigint := nextval('queue.claim_seq');
  v_jobs record;                                   -- the jobs whose rows could be locked
  v_keys record;                                   -- ns, nos: which job has which key; keys, free: all keys
  v_due bigint[] := '{}'::bigint[];           -- expired jobs
  v_fixed bigint[] := '{}'::bigint[];         -- jobs whose queueing lock is being replaced
  v_queues text[] := '{}'::text[];            -- with limits, and how many jobs they allow to start
  v_room integer[] := '{}'::integer[];
  v_queue integer;
  v_row integer := 1;
  v_first integer;
  v_shut integer;
  v_taken integer[];
  v_counted bigint[] := '{}'::bigint[];       -- jobs that count in max_running
  v_started bigint[];
  v_add_keys text[] := '{}'::text[];          -- the counts to add to semaphores
  v_add_lanes integer[] := '{}'::integer[];
  v_add_used integer[] := '{}'::integer[];
  v_add_ready integer[] := '{}'::integer[];
  v_add_waiting integer[] := '{}'::integer[];
  v_add_lows bigint[] := '{}'::bigint[];
  v_add_low_deadlines timestamptz[] := '{}'::timestamptz[];
  v_wait integer[] := '{}'::integer[];
  v_wait_keys text[] := '{}'::text[];
  v_wait_weights integer[] := '{}'::integer[];
  v_weight integer;
  v_wait_several boolean[] := '{}'::boolean[];
begin
  won := '{}'::bigint[];
  rest := '{}'::bigint[];
  full_queues := '{}'::text[];
  select array_agg(aj.id order by u.n) as ids, array_agg(aj.flags order by u.n) as flags,
    array_agg(aj.lane order by u.n) as lanes, array_agg(aj.deadline order by u.n) as deadlines,
    array_agg(l.queue order by u.n) as queues, array_agg(l.kind > 0/* lane_plain */ and l.is_limited
      or p_limits is not null order by u.n) as are_limited, bit_or(aj.flags) as all_flags
  into v_jobs
  from unnest(p_ids) with ordinality u (id, n)
  cross join lateral (
    select aj.id, aj.flags, aj.lane, aj.deadline from queue.active_job aj
    where aj.id = u.id and aj.claim is null for update of aj skip locked) aj
  cross join lateral (
    select l.queue, l.kind,
      exists (select from queue.queue_config c where c.queue = l.queue
        and (c.max_running is not null or c.rate_limit is not null)) as is_limited
    from queue.lane l where l.lane = aj.lane offset 0) l;
  if v_jobs.ids is null then
    rest := p_ids;
    return;
  elsif cardinality(v_jobs.ids) < cardinality(p_ids) then
    rest := array(select u.id from unnest(p_ids) u (id) where u.id <> all (v_jobs.ids));
  end if;
  if v_jobs.all_flags & 64/* expires */ <> 0 then
    v_due := array(select e.id from queue.expiry e where e.id = any (v_jobs.ids) and e.at <= v_now);
  end if;
  if v_jobs.all_flags & 8448/* queueing_lock */ <> 0 then
    v_fixed := queue._lock_queueing_locks(v_jobs.ids);
  end if;
  if v_jobs.all_flags & 6/* slots */ <> 0 then
    select array_agg(x.n order by x.n) as ns, array_agg(x.no order by x.n) as nos,
      array_agg(x.weight order by x.n) as weights,
      array_agg(x.slots order by x.no) filter (where x.is_first) as slots,
      array_agg(x.rate_limit order by x.no) filter (where x.is_first) as rates,
      array_agg(x.key order by x.no) filter (where x.is_first) as keys,
      array_agg(x.free order by x.no) filter (where x.is_first) as free,
      array_agg(x.rate_room order by x.no) filter (where x.is_first) as rate_room
    into v_keys
    from (
      select x.n, x.key, x.no, x.is_first, x.weight, s.slots, s.rate_limit,
        least(s.slots, 1000000000/* most_slots */) - s.used as free,
        queue._rate_room(x.key, s.rate_limit, s.rate_per, s.rate_limit, v_now) as rate_room
      from (
        select x.n, x.key, x.weight, dense_rank() over (order by x.key)::integer as no,
          row_number() over (partition by x.key) = 1 as is_first
        from queue._keys_of(v_jobs.ids, v_jobs.flags) x) x
      left join lateral (
        select s.slots, s.used, s.rate_limit, s.rate_per from queue.semaphore s where s.key = x.key
        order by s.tick desc limit 1) s on x.is_first) x;
    v_taken := array_fill(0, array[cardinality(v_keys.keys)]);
  end if;
  for n in 1 .. cardinality(v_jobs.ids) loop
    exit when cardinality(won) >= p_n;
    v_first := v_row;
    v_shut := null;
    v_queue := null;
    if v_jobs.flags[n] & 6/* slots */ <> 0 then
      while v_keys.ns[v_row] = n loop
        if v_taken[v_keys.nos[v_row]]
          > least(v_keys.free[v_keys.nos[v_row]]
              - least(v_keys.weights[v_row], v_keys.slots[v_keys.nos[v_row]]),
            v_keys.rate_room[v_keys.nos[v_row]]
              - least(v_keys.weights[v_row], v_keys.rates[v_keys.nos[v_row]])) then
          v_weight := case when v_shut is null then v_keys.weights[v_row] else v_weight end;
          v_shut := coalesce(v_shut, v_keys.nos[v_row]);
        end if;
        v_row := v_row + 1;
      end loop;
    end if;
    if v_jobs.ids[n] = any (v_due) then
      rest := rest || v_jobs.ids[n];
      continue;
    elsif v_jobs.ids[n] = any (v_fixed) then
      rest := rest || v_jobs.ids[n];
      continue;
    elsif v_shut is not null then
      v_wait := v_wait || n;
      v_wait_keys := v_wait_keys || v_keys.keys[v_shut];
      v_wait_weights := v_wait_weights || nullif(v_weight, 1);
      v_wait_several := v_wait_several || (v_row - v_first > 1);
      for i in v_first .. v_row - 1 loop
        v_add_keys := v_add_keys || v_keys.keys[v_keys.nos[i]];
        v_add_lanes := v_add_lanes || v_jobs.lanes[n];
        v_add_used := v_add_used || 0;
        v_add_ready := v_add_ready || -v_keys.weights[i];
        v_add_waiting := v_add_waiting || (v_keys.nos[i] = v_shut)::integer;
        v_add_lows := v_add_lows || case when v_keys.nos[i] = v_shut then v_jobs.ids[n] end;
        v_add_low_deadlines := v_add_low_deadlines
          || case when v_keys.nos[i] = v_shut
            then queue._front_tag(v_keys.keys[v_shut], v_jobs.lanes[n], v_jobs.deadlines[n]) end;
      end loop;
      continue;
    end if;
    if v_jobs.are_limited[n] then
      v_queue := array_position(v_queues, v_jobs.queues[n]);
      if v_queue is null then
        v_queues := v_queues || v_jobs.queues[n];
        v_room := v_room || least(queue._queue_room(v_jobs.queues[n], p_n, v_now),
          case when p_limits is not null
            then queue._worker_room(p_worker, p_limits, v_jobs.queues[n], p_n) end);
        v_queue := cardinality(v_queues);
      end if;
      if v_room[v_queue] <= 0 then
        rest := rest || v_jobs.ids[n];
        continue;
      end if;
      v_room[v_queue] := v_room[v_queue] - 1;
    end if;
    for i in v_first .. v_row - 1 loop
      v_taken[v_keys.nos[i]] := v_taken[v_keys.nos[i]] + v_keys.weights[i];
      v_add_keys := v_add_keys || v_keys.keys[v_keys.nos[i]];
      v_add_lanes := v_add_lanes || v_jobs.lanes[n];
      v_add_used := v_add_used || v_keys.weights[i];
      v_add_ready := v_add_ready || -v_keys.weights[i];
      v_add_waiting := v_add_waiting || 0;
      v_add_lows := v_add_lows || null::bigint;
      v_add_low_deadlines := v_add_low_deadlines || null::timestamptz;
    end loop;
    won := won || v_jobs.ids[n];
  end loop;
  if won <> '{}' then
    for i in 1 .. cardinality(v_queues) loop
      v_started := array(select v_jobs.ids[n] from generate_series(1, cardinality(v_jobs.ids)) n
                         where v_jobs.are_limited[n] and v_jobs.queues[n] = v_queues[i]
                           and v_jobs.ids[n] = any (won));
      v_counted := v_counted || queue._count_starts(v_queues[i], v_started, v_now);
      if p_limits is not null then
        perform queue._count_worker_claims(p_worker, p_limits, v_queues[i], v_started, v_claim);
      end if;
      if v_room[i] <= 0 then
        full_queues := full_queues || v_queues[i];
      end if;
    end loop;
    update queue.active_job aj
    set claim = v_claim, worker_id = p_worker, claimed_at = v_now, attempt = aj.attempt + 1,
      flags = aj.flags | case when aj.id = any (v_counted) then 16384/* queue_slot */ else 0 end
    where aj.id = any (won);
    if v_jobs.all_flags & 256/* until_start */ <> 0 then
      perform queue._drop_queueing_locks(won, 256/* until_start */);
    end if;
    if v_jobs.all_flags & 8/* needs */ <> 0 then
      perform queue._begin_any(array_agg(v_jobs.ids[n])) from generate_series(1, cardinality(v_jobs.ids)) n
      where v_jobs.flags[n] & 8/* needs */ <> 0 and v_jobs.ids[n] = any (won) having count(*) > 0;
    end if;
    if v_jobs.all_flags & 128/* lease */ <> 0 then
      perform queue._lease_timeouts(won, v_claim, v_now);
    end if;
  else
    full_queues := v_queues;
  end if;
  if v_wait <> '{}' then
    perform queue._keep_tag(v_jobs.ids[n], v_jobs.deadlines[n]) from unnest(v_wait) n;
    with gone as (
      delete from queue.active_job aj where aj.id = any (array(select v_jobs.ids[n] from unnest(v_wait) n))
      returning aj.id, aj.lane, aj.deadline, aj.flags, aj.attempt)
    insert into queue.waiting (id, reason, key, lane, deadline, flags, attempt, has_several, weight)
    select g.id, 'slot', v_wait_keys[u.i], g.lane, queue._front_tag(v_wait_keys[u.i], g.lane, g.deadline),
      g.flags, g.attempt, v_wait_several[u.i], v_wait_weights[u.i]
    from gone g cross join lateral (select array_position(v_wait, array_position(v_jobs.ids, g.id)) as i) u;
    perform queue._keep_turns(array_agg(v_jobs.ids[n])) from unnest(v_wait) n
      where v_jobs.flags[n] & 1/* ordered */ <> 0 having count(*) > 0;
  end if;
  if v_add_keys <> '{}' then
    perform queue._add_slots(v_add_keys, v_add_lanes, v_add_used, v_add_ready, v_add_waiting, v_add_lows,
      v_add_low_deadlines);
  end if;
  for i in 1 .. coalesce(cardinality(v_taken), 0) loop
    if v_taken[i] > 0 and v_keys.rates[i] is not null then
      perform queue._count_rate_starts(v_keys.keys[i], v_keys.rates[i], v_taken[i], v_now);
    end if;
  end loop;
  if true = any (v_wait_several) or array_remove(v_wait_weights, null) <> '{}' then
    perform queue._advance(p_keys => v_add_keys);
  elsif v_add_keys <> '{}' then
    if array_remove(v_keys.rates, null) <> '{}' then
      perform queue._await_rates(v_keys.keys);
    end if;
  end if;
  if v_due <> '{}' then
    perform queue._expire(v_due);
  end if;
end $$;

-- Moves jobs that wait for slots to queue.active_job, although others are ready before them: the caller
-- claims them.
-- Locks: the caller holds the admission lock.
create or replace function queue._make_ready_early(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_moved record;
begin
  with gone as (
    delete from queue.waiting w where w.id = any (p_ids) returning w.id, w.key, w.lane, w.at)
  select array_agg(g.id) as ids, array_agg(g.key) as keys, array_agg(g.lane) as lanes,
    array_agg(g.key) filter (where g.at is not null) as rated
  into v_moved
  from gone g;
  if v_moved.ids is null then
    return;
  end if;
  perform queue._add_slots(v_moved.keys, v_moved.lanes, null, null,
    array_fill(-1, array[cardinality(v_moved.ids)]), null);
  perform queue._await_rates(v_moved.rated);
  select x.* into v_moved from queue._queue_entries(v_moved.ids) x;
  perform queue._add_slots(array_agg(k.key), array_agg(v_moved.lanes[k.n]), null, array_agg(k.weight), null,
    null)
    from queue._keys_of(v_moved.ids, v_moved.flags) k;
  perform queue._make_ready(v_moved.ids, v_moved.lanes, v_moved.deadlines, v_moved.flags, v_moved.attempts);
end $$;

-- A ready job may be blocked for long by an uncommitted replacement. Admits other waiting jobs of the same
-- key and lane into the slots that it would leave idle.
-- Locks: the caller holds the admission lock; rows of queue.queueing_lock by skip locked.
-- Why no wake-up is lost: the admitted jobs are ready for the loop's next round, and a job that is being
-- replaced stays ready; each claim checks the limits again.
-- Two sessions: defer/unique.replace_fetch.spec.
create or replace function queue._fill_behind_replaced(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
  v_jobs record;
begin
  v_ids := array(
    select aj.id from queue.active_job aj where aj.id = any (p_ids) and aj.claim is null
      and aj.flags & 6/* slots */ <> 0 and aj.flags & 8448/* queueing_lock */ <> 0);
  if v_ids <> '{}' then
    v_ids := queue._lock_queueing_locks(v_ids);
  end if;
  if v_ids = '{}' then
    return;
  end if;
  select array_agg(aj.id) as ids, array_agg(aj.flags) as flags, array_agg(aj.lane) as lanes into v_jobs
  from queue.active_job aj where aj.id = any (v_ids);
  perform queue._make_ready_early(array(
    select w.id
    from (select k.key, v_jobs.lanes[k.n] as lane, sum(k.weight) as n
      from queue._keys_of(v_jobs.ids, v_jobs.flags) k group by 1, 2) k
    cross join lateral (
      select queue._key_room(s.key, least(s.slots, 1000000000/* most_slots */) - s.used, s.rate_limit, s.rate_per,
          clock_timestamp()) as free,
        s.lanes, s.ready, s.lows, s.low_deadlines
      from queue.semaphore s where s.key = k.key order by s.tick desc limit 1) s
    cross join lateral unnest(s.lanes, s.ready, s.lows, s.low_deadlines) l (lane, ready, low, low_deadline)
    cross join lateral (
      select w.id from queue.waiting w
      where w.reason = 'slot' and w.key = k.key and w.lane = k.lane
        and (w.deadline, w.id) >= (l.low_deadline, l.low)
      order by w.deadline, w.id limit greatest(s.free - (l.ready - k.n), 0)) w
    where l.lane = k.lane));
end $$;

-- work/claim_one_key.sql
-- Claiming under the common limit, in few statements: all jobs at hand have the same one key.
-- Tests: admit/one_key.sql.

-- Claims up to p_n jobs, as _claim_limited does, if the lanes have one queue and priority, and those of the
-- jobs that have a limit have one and the same key with room for all of them, and no other limit. If not, it
-- changes nothing and ids is NULL. Paused lanes are left out. first_claim: as for _claim_newcomer.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._claim_one_key(
  p_worker bigint, p_lanes integer[], p_n integer, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_jobs record;
  v_now timestamptz;
begin
  if cardinality(p_lanes) > 1 and (
    select min(l.queue) < max(l.queue) or min(l.priority) < max(l.priority)
    from queue.lane l where l.lane = any (p_lanes)) then
    return;
  end if;
  select array_agg(x.tid) as tids, array_agg(x.id order by x.deadline, x.id) as ids, bit_or(x.flags) as flags,
    bit_or(x.flags) filter (where x.is_limited) as limits, bool_or(x.deadline < 'infinity') as have_deadlines,
    'k' || min(x.keys[1]) as key, count(*) filter (where x.is_limited)::integer as n,
    min(x.lane) filter (where x.is_limited) as lane,
    bool_and(not x.is_limited or coalesce(cardinality(x.keys), 0) = 1 and (x.options ? 'terms') is not true)
      and (min(x.keys[1]) = max(x.keys[1])) is not false as has_one_key
  into v_jobs
  from (
    select aj.tid, aj.id, aj.lane, aj.deadline, aj.flags, c.is_limited, j.keys, j.options
    from (
      select c.id, l.kind > 0/* lane_plain */ as is_limited
      from unnest(p_lanes) u (lane)
      cross join lateral (
        select l.lane, l.kind, l.low_deadline, l.low_id from queue.lane l
        where l.lane = u.lane and (l.paused_until is null or l.paused_until <= clock_timestamp())
          and not exists (select from queue.queue_config c where c.queue = l.queue
          and (c.max_running is not null or c.rate_limit is not null)) offset 0) l
      cross join lateral (
        select aj.id, aj.deadline from queue.active_job aj
        where aj.lane = l.lane and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id) and aj.claim is null
        order by aj.deadline, aj.id limit p_n) c
      order by c.deadline, c.id limit p_n) c
    cross join lateral (
      select aj.ctid as tid, aj.id, aj.lane, aj.deadline, aj.flags from queue.active_job aj
      where aj.id = c.id and aj.claim is null for update of aj skip locked) aj
    left join lateral (
      select j.keys, j.options from queue.job j where j.id = aj.id and aj.flags & 4/* keys */ <> 0 offset 0) j
      on c.is_limited) x;
  if v_jobs.has_one_key is not true
    or v_jobs.limits & (2/* mutex */ | 8/* needs */ | 64/* expires */ | 8448/* queueing_lock */) <> 0 then
    return;
  end if;
  if v_jobs.n > 0 then
    with gone as (
      delete from queue.semaphore s
      where s.ctid = (select s.ctid from queue.semaphore s where s.key = v_jobs.key
          order by s.tick desc limit 1)
        and s.rate_limit is null and s.lanes = array[v_jobs.lane] and s.slots - s.used >= v_jobs.n
      returning s.slots, s.limit_id, s.used, s.lanes, s.ready[1] - v_jobs.n as ready, s.waiting,
        s.lows, s.low_deadlines)
    insert into queue.semaphore (key, tick, slots, limit_id, used, lanes, ready, waiting, lows, low_deadlines)
    select v_jobs.key, nextval('queue.tick_seq'), g.slots, g.limit_id, g.used + v_jobs.n,
      case when x.stays then g.lanes else '{}' end, case when x.stays then array[g.ready] else '{}' end,
      case when x.stays then g.waiting else '{}' end, case when x.stays then g.lows else '{}' end,
      case when x.stays then g.low_deadlines else '{}' end
    from gone g cross join lateral (select g.ready > 0 or g.waiting[1] > 0 as stays) x;
    if not found then
      return;
    end if;
  end if;
  ids := v_jobs.ids;
  v_now := clock_timestamp();  -- after the snapshot that shows the jobs ready
  first_claim := nextval('queue.claim_seq');
  update queue.active_job aj
  set claim = first_claim, worker_id = p_worker, claimed_at = v_now, attempt = aj.attempt + 1
  where aj.ctid = any (v_jobs.tids);
  if v_jobs.flags & 128/* lease */ <> 0 then
    perform queue._lease_timeouts(ids, first_claim, v_now);
  end if;
  if v_jobs.have_deadlines or v_jobs.flags & 2048/* overridden */ <> 0 or v_jobs.flags < 0 then
    first_claim := null;
  end if;
end $$;

-- work/claim_filtered.sql
-- Claiming jobs that the options of fetch select.
-- Tests: work/fetch.sql.

-- Claims up to p_n jobs of lanes. Where given, they are of p_tasks, have a deadline before p_before, and are
-- among p_only. p_limits: as for _claim_limited.
-- It also looks at jobs that wait for a slot where slots are free, because the ready jobs of the lane may not
-- match: at the first 200 of each key and lane.
-- Locks: as _claim_limited.
create or replace function queue._claim_filtered(
  p_worker bigint, p_lanes integer[], p_n integer, p_tasks text[], p_before timestamptz, p_only bigint[],
  p_limits jsonb default null)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_won bigint[] := '{}'::bigint[];
  v_ids bigint[];
begin
  if p_only is null then
    v_won := queue._claim_limited(p_worker, p_lanes, p_n, p_tasks, p_before, p_limits);
    if cardinality(v_won) >= p_n then
      return v_won;
    end if;
    v_ids := array(
      select w.id
      from (
        select s.key, l.lane, l.low, l.low_deadline, s.free
        from (select distinct on (s.key) s.key, s.lanes, s.waiting, s.lows, s.low_deadlines,
            queue._key_room(s.key, least(s.slots, 1000000000/* most_slots */) - s.used, s.rate_limit, s.rate_per,
              clock_timestamp()) as free
          from queue.semaphore s
              where s.lanes <> '{}' order by s.key, s.tick desc) s
        cross join lateral unnest(s.lanes, s.waiting, s.lows, s.low_deadlines)
          l (lane, waiting, low, low_deadline)
        where s.free > 0 and l.waiting > 0 and l.lane = any (p_lanes) offset 0) s
      cross join lateral (
        select w.id
        from (select w.id, w.deadline from queue.waiting w
              where w.reason = 'slot' and w.key = s.key and w.lane = s.lane
                and (w.deadline, w.id) >= (s.low_deadline, s.low)
              order by w.deadline, w.id limit 200) w
        where (p_before is null or queue._deadline_of(w.id, w.deadline) < p_before)
          and (p_tasks is null or exists (select from queue.job j
            where j.id = w.id and j.task = any (p_tasks)))
        limit s.free) w);
  else
    v_ids := array(
      select w.id from unnest(p_only) u (id)
      cross join lateral (
        select w.id, w.key from queue.waiting w where w.id = u.id and w.reason || '' = 'slot'
          and w.lane = any (p_lanes) offset 0) w
      cross join lateral (
        select queue._key_room(s.key, least(s.slots, 1000000000/* most_slots */) - s.used, s.rate_limit, s.rate_per,
          clock_timestamp()) as free
        from queue.semaphore s
        where s.key = w.key
        order by s.tick desc limit 1) s
      where s.free > 0);
  end if;
  perform queue._make_ready_early(v_ids);
  if p_only is not null then
    v_ids := array(select distinct u.id from unnest(p_only) u (id));
  end if;
  v_ids := array(
    select aj.id
    from unnest(v_ids) u (id)
    cross join lateral (
      select aj.id, aj.lane, aj.deadline from queue.active_job aj
      where aj.id = u.id and aj.claim is null and aj.lane = any (p_lanes)
        and (p_before is null or queue._deadline_of(aj.id, aj.deadline) < p_before) offset 0) aj
    where p_tasks is null or exists (select from queue.job j where j.id = aj.id and j.task = any (p_tasks))
    order by array_position(p_lanes, aj.lane), aj.deadline, aj.id);
  if v_ids = '{}' then
    return v_won;
  end if;
  return v_won || (select c.won
    from queue._claim_ids(p_worker, v_ids, p_n - cardinality(v_won), p_limits) c);
end $$;

-- work/quarantine.sql
-- Quarantine: a job that has crashed before runs alone, because it may have killed its worker.
--
-- Such a job is ready in a lane of kind lane_crashed. fetch hands it out alone, to a worker that runs
-- nothing, and gives that worker no other job until it has ended. queue.worker records this in apart_since
-- and the columns after it. If apart_since is NULL and no lane of this kind is in sight, fetch takes the
-- ordinary paths, at no extra cost.
--
-- Why no job starves. A worker that runs nothing gets a quarantined job first, and the next time the others
-- first; so both get their turn while both are ready. A worker that always runs something would never take a
-- quarantined job. So if one has waited for 5 s since its crash, one worker that may run it gets no more jobs
-- (it runs dry) until its own have ended, for a quarter of the time that the job has waited by then, at least
-- 30 s. If that was too short, the worker takes jobs again for four times as long, while another one may run
-- dry. The job has waited longer by then, so that worker runs dry for longer. So the job's turn comes within
-- a small multiple of the duration of the longest jobs. At most one worker of a queue runs dry at a time, for
-- a fifth of its time.
--
-- To find out what a worker runs, queue.active_job is read: there is no index from a worker to its claims,
-- because each claim would pay for it. This is done only if a quarantined job is ready, and if it takes long,
-- for at most a twentieth of the time.
--
-- A worker must call fetch and finish_and_fetch one after another: two concurrent calls may give it a second
-- job.

-- What a worker may get: nothing; alone (a quarantined job of p_ready, quarantine lanes with ready jobs,
-- before others); either (others first, then a quarantined one); others only.
-- p_has_lock: without it no quarantined job can be claimed, and no worker begins to run dry.
-- p_tasks, p_before, p_only: as _claim_filtered, to see whether a worker that runs dry would get the job.
-- Locks: the worker's row by skip locked, because the holder of the admission lock never waits. If another
-- session has it (heartbeat), nothing changes until the next call.
-- Raises: QJ007.
create or replace function queue._worker_turn(
  p_worker bigint, p_ready integer[], p_has_lock boolean, p_tasks text[] default null,
  p_before timestamptz default null, p_only bigint[] default null)
returns text language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_worker record;
  v_waited interval;
begin
  select w.apart_since, w.apart_until, w.apart_id, w.apart_claim into v_worker
  from queue.worker w where w.id = p_worker and w.gone_at is null;
  if not found then
    perform queue._worker_gone(p_worker);
  elsif v_worker.apart_claim is not null then
    if exists (select from queue.active_job aj where aj.id = v_worker.apart_id
      and aj.claim = v_worker.apart_claim) then
      return 'nothing';
    end if;
    perform queue._set_isolation(p_worker, null, null);
    return case when p_ready is null then 'others' else 'either' end;
  elsif v_worker.apart_since is not null
    and v_now > v_worker.apart_until + 4 * (v_worker.apart_until - v_worker.apart_since) then
    perform queue._set_isolation(p_worker, null, null);
    v_worker.apart_since := null;
  end if;
  if p_ready is null then
    if v_worker.apart_since is not null then
      perform queue._set_isolation(p_worker, null, null);
    end if;
    return 'others';
  elsif p_has_lock and queue._runs_nothing(p_worker) then
    return 'alone';
  elsif v_now <= v_worker.apart_until then
    return 'nothing';
  elsif v_worker.apart_since is not null or not p_has_lock then
    return 'others';
  end if;
  v_waited := v_now - queue._crashed_waits_since(p_worker, p_ready, p_tasks, p_before, p_only);
  if v_waited > interval '5 s' then
    return case when queue._set_isolation(p_worker, v_now, v_now + greatest(v_waited / 4, interval '30 s'))
      then 'nothing' else 'others' end;
  end if;
  return 'others';
end $$;

-- The crash time of the quarantined job that has waited longest, among those that are ready for this worker
-- and in a queue for which no other worker runs dry. Reads the first 100 of a lane.
create or replace function queue._crashed_waits_since(
  p_worker bigint, p_lanes integer[], p_tasks text[], p_before timestamptz, p_only bigint[])
returns timestamptz language plpgsql volatile parallel unsafe security invoker as $$
begin
  return (
    select min((select a.finished_at from queue.attempt a where a.job_id = aj.id
      order by a.claim desc limit 1))
    from unnest(p_lanes) u (lane)
    cross join lateral (
      select l.lane, l.queue, l.low_deadline, l.low_id from queue.lane l where l.lane = u.lane offset 0) l
    cross join lateral (
      select aj.id, aj.deadline from queue.active_job aj
      where aj.lane = l.lane and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id) and aj.claim is null
      order by aj.deadline, aj.id limit 100) aj
    where (p_before is null or aj.deadline < p_before) and (p_only is null or aj.id = any (p_only))
      and (p_tasks is null or exists (select from queue.job j where j.id = aj.id and j.task = any (p_tasks)))
      and not exists (
        select from queue.worker w
        where w.apart_until >= clock_timestamp() and w.gone_at is null and w.id <> p_worker
          and (w.queues is null or exists (select from unnest(w.queues) q
            where queue._matches(l.queue, q)))));
end $$;

-- Whether a worker has no claim. If the search took long, it is not repeated too soon: until then the answer
-- is false. The first search of a session does not count, because it fills the session's caches.
create or replace function queue._runs_nothing(p_worker bigint)
returns boolean language plpgsql volatile parallel unsafe security invoker set enable_seqscan = on as $$
declare
  v_start double precision := date_part('epoch', clock_timestamp());
  v_after double precision := nullif(current_setting('pgdefer.look_after', true), '')::double precision;
  v_took double precision;
  v_is_idle boolean;
begin
  if v_after between v_start and v_start + 60 then
    return false;
  end if;
  v_is_idle := not exists (select from queue.active_job aj where aj.worker_id = p_worker
    and aj.claim is not null);
  v_took := date_part('epoch', clock_timestamp()) - v_start;
  if v_after is null then
    perform set_config('pgdefer.look_after', '0', false);
  elsif v_took > 0.005 then
    perform set_config('pgdefer.look_after', (v_start + 20 * v_took)::text, false);
  end if;
  return v_is_idle;
end $$;

-- Claims one quarantined job, from lanes in the given order, which then runs alone. NULL: there is none.
-- p_tasks, p_before, p_only: as _claim_filtered.
-- Locks: as _claim_limited; before it the worker's row by skip locked, so that no job runs alone without a
-- record of it.
create or replace function queue._claim_alone(
  p_worker bigint, p_lanes integer[], p_tasks text[] default null, p_before timestamptz default null,
  p_only bigint[] default null)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
begin
  if p_lanes is null or not queue._set_isolation(p_worker, null, null) then
    return null;
  elsif num_nonnulls(p_tasks, p_before, p_only) > 0 then
    v_ids := queue._claim_filtered(p_worker, p_lanes, 1, p_tasks, p_before, p_only);
  else
    v_ids := queue._claim_limited(p_worker, p_lanes, 1);
  end if;
  if v_ids = '{}' then
    return null;
  end if;
  update queue.worker w set apart_since = aj.claimed_at, apart_id = aj.id, apart_claim = aj.claim
  from queue.active_job aj where w.id = p_worker and aj.id = v_ids[1];
  return v_ids;
end $$;

-- Records that a worker runs dry, or no longer does (NULL); false: another session has its row locked now.
-- Locks: the worker's row by skip locked.
create or replace function queue._set_isolation(p_worker bigint, p_since timestamptz, p_until timestamptz)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.worker w set apart_since = p_since, apart_until = p_until, apart_id = null, apart_claim = null
  where w.ctid = any (array(select w.ctid from queue.worker w where w.id = p_worker for update skip locked));
  return found;
end $$;

-- Returns the quarantine lanes that hold a ready job which its queue allows to start, in the order of fetch;
-- NULL: none.
-- Locks: none.
create or replace function queue._quarantined_lanes(p_lanes integer[])
returns integer[] language plpgsql stable parallel safe security invoker as $$
begin
  return (select p.lanes
    from queue._probe_lanes(array(select l.lane from queue.lane l
    where l.lane = any (p_lanes) and l.kind = 2/* lane_crashed */)) p);
end $$;

-- work/claim_options.sql
-- Claiming by the options of fetch.
-- Tests: work/fetch.sql.

-- fetch with options: ids, order, tasks, functions, deadline_within, max_running. p_by_hand: from any lane,
-- whatever the worker runs (queue.next).
-- Locks and errors: as fetch. It claims under the admission lock, so that one function can serve every order
-- and filter.
create or replace function queue._claim_by_options(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_options jsonb, p_may_wait boolean,
  p_by_hand boolean default false)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_tasks text[];
  v_only bigint[];
  v_before timestamptz;
  v_limits jsonb := jsonb_strip_nulls(p_options) -> 'max_running';
  v_lanes integer[];
  v_ready integer[];  -- of quarantined jobs
  v_turn text;
  v_ids bigint[] := '{}'::bigint[];
  v_more boolean;
begin
  select o.tasks, o.ids, v_now + o.deadline_within into v_tasks, v_only, v_before
  from queue._selection(p_options) o;
  if p_max_jobs < 1 then
    return null;  -- all were to be claimed ahead
  end if;
  perform queue._check_worker_limits(v_limits);
  if not queue._lock_admission(p_may_wait) then
    return null;
  elsif not exists (select from queue.worker w where w.id = p_worker and w.gone_at is null) then
    perform queue._worker_gone(p_worker);  -- the worker has gone while this waited
  elsif v_limits is not null then
    perform queue._forget_ended_claims(p_worker);
  end if;
  loop
    select a.has_more into v_more from queue._admit(greatest(1000, p_max_jobs)) a;
    select array_agg(l.lane order by l.place, l.priority desc, l.first_id, l.lane)
      filter (where l.kind < 2/* lane_crashed */ or p_by_hand),
      queue._quarantined_lanes(array_agg(l.lane) filter (where l.kind = 2/* lane_crashed */ and not p_by_hand))
    into v_lanes, v_ready
    from (
      select l.lane, l.kind, l.priority, m.place, min(f.id) over (partition by l.queue, l.priority)
        as first_id
      from queue.lane l
      cross join lateral (
        select case when p_options ->> 'order' = 'listed' then min(q.n) else min(0) end as place
        from unnest(coalesce(p_queues, '{*}')) with ordinality q (pattern, n)
        where queue._matches(l.queue, q.pattern)) m
      left join lateral (
        select aj.id from queue.active_job aj
        where aj.lane = l.lane and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id) and aj.claim is null
        order by aj.deadline, aj.id limit 1) f on true
      where m.place is not null and (l.paused_until is null or l.paused_until <= v_now)
        and (v_limits is null or queue._worker_room(p_worker, v_limits, l.queue, 1) is distinct from 0)) l;
    if v_turn is null and not p_by_hand then
      v_turn := nullif(queue._worker_turn(p_worker, v_ready, true, v_tasks, v_before, v_only),
        case when v_ready is null then 'others' end);
      if v_turn = 'nothing' then
        return null;
      elsif v_turn = 'alone' then
        v_ids := coalesce(queue._claim_alone(p_worker, v_ready, v_tasks, v_before, v_only), v_ids);
        exit when v_ids <> '{}';
      end if;
    end if;
    if v_tasks is not null or v_before is not null or v_only is not null then
      v_ids := v_ids || queue._claim_filtered(p_worker, v_lanes, p_max_jobs - cardinality(v_ids), v_tasks,
        v_before, v_only, v_limits);
    else
      v_ids := v_ids || queue._claim_limited(p_worker, v_lanes, p_max_jobs - cardinality(v_ids),
        p_limits => v_limits);
    end if;
    exit when cardinality(v_ids) >= p_max_jobs or not v_more or clock_timestamp() > v_now + interval '100 ms';
  end loop;
  if v_ids = '{}' and v_turn in ('alone', 'either') then
    v_ids := coalesce(queue._claim_alone(p_worker, v_ready, v_tasks, v_before, v_only), v_ids);
  end if;
  if random() * 300 < least(cardinality(v_ids), 20) then
    perform queue._raise_marks(v_lanes);
  end if;
  return v_ids;
end $$;

-- Which jobs the options of fetch select; NULL: any. It checks the options.
-- Raises: 22023.
create or replace function queue._selection(p_options jsonb, out tasks text[], out ids bigint[],
  out deadline_within interval)
language plpgsql stable parallel unsafe security invoker as $$
declare
  v_options jsonb := jsonb_strip_nulls(p_options);
begin
  perform queue._check_keys('options', p_options,
    array['ids', 'order', 'tasks', 'functions', 'deadline_within', 'max_running']);
  if coalesce(v_options -> 'order', '"mixed"') not in ('"mixed"', '"listed"') then
    perform queue._invalid('order is not one of its values', 'Allowed: mixed, listed.',
      'order: ' || (v_options ->> 'order'));
  elsif coalesce(jsonb_typeof(v_options -> 'tasks'), 'array') <> 'array'
    or coalesce(jsonb_typeof(v_options -> 'ids'), 'array') <> 'array' then
    perform queue._invalid('tasks and ids must be lists', 'Pass JSON arrays.');
  end if;
  tasks := case when v_options ? 'tasks' then array(select t
    from jsonb_array_elements_text(v_options -> 'tasks') t) end;
  if v_options -> 'functions' = 'true' then
    tasks := array(select t.name from queue.task t where t.function is not null
      and (tasks is null or t.name = any (tasks)));
  elsif coalesce(v_options -> 'functions', 'false') <> 'false' then
    perform queue._invalid('functions must be true or false', 'Pass a JSON boolean.');
  end if;
  deadline_within := queue._interval('deadline_within', v_options -> 'deadline_within');
  begin
    ids := case when v_options ? 'ids' then array(select i::bigint
      from jsonb_array_elements_text(v_options -> 'ids') i) end;
  exception when data_exception then
    perform queue._invalid('ids must be numbers', 'Pass ids of jobs.');
  end;
end $$;

-- How many jobs to claim if a worker asks for many: as many as fitted into this session's last full answer,
-- and an eighth more each time that an answer leaves room. Putting jobs aside costs more than another call.
create or replace function queue._fitting(p_max_jobs integer)
returns integer language plpgsql stable parallel safe security invoker as $$
begin
  return least(p_max_jobs, nullif(current_setting('pgdefer.fitting', true), '')::integer);
end $$;

-- How many of p_max_jobs a worker starts at once: all but those that the option ahead of fetch counts.
-- Raises: 22023.
create or replace function queue._start_at_once(p_max_jobs integer, p_options jsonb)
returns integer language plpgsql immutable parallel safe security invoker as $$
begin
  if jsonb_typeof(p_options -> 'ahead') = 'null' then
    return p_max_jobs;
  end if;
  if (jsonb_typeof(p_options -> 'ahead') = 'number' and p_options ->> 'ahead' ~ '^[0-9]{1,9}$'
    and (p_options ->> 'ahead')::integer <= p_max_jobs) is not true then
    perform queue._invalid('ahead must be a whole number from 0 to max_jobs',
      'Pass how many of max_jobs start later.', 'options: ' || left(p_options::text, 1000));
  end if;
  return p_max_jobs - (p_options ->> 'ahead')::integer;
end $$;

-- work/claim.sql
-- Claiming: one lane, or the full loop; a newcomer: claim_newcomer.sql. finish.sql fences claims; their
-- numbers: base/era.sql.
-- Tests: work/fetch.sql, work/claim.two.spec.

-- Claims ready jobs, and admits if that is due: every 10 ms, because newcomers may have a higher priority, or
-- if the admission lock is already held (p_has_lock). This function handles the most common case, one plain
-- lane with enough jobs; the rest is left to _claim_loop.
-- Locks: the admission lock by try; rows of queue.active_job by skip locked; the admission lock by try.
-- For why claims rise, and come after the jobs that they follow, see _claim_plain.
-- In one piece: with a function that claims one job, defer, fetch and succeed of it cost 1.1 % more.
create or replace function queue._claim_one_lane(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_options jsonb, p_may_wait boolean,
  p_has_lock boolean, p_at_once integer, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_queues text[];
  v_now timestamptz := clock_timestamp();
  v_has_lock boolean := p_has_lock;
  v_has_more boolean := false;
  v_admitted integer;
  v_is_claimed boolean := false;
  v_max_jobs integer := p_max_jobs;
  v_claimed record;
  v_choice record;
  v_attempt smallint;
  v_flags smallint;
  v_claimed_at timestamptz;
begin
  if p_max_jobs is null or p_max_jobs < 1 then
    perform queue._check_max_jobs(p_max_jobs);
  elsif p_options <> '{}' then
    ids := queue._claim_by_options(p_worker, p_queues, coalesce(p_at_once, p_max_jobs), p_options,
      p_may_wait);
    return;
  end if;
  if v_has_lock
    or abs(date_part('epoch',
      v_now) - coalesce(nullif(current_setting('pgdefer.looked_at', true), '')::double precision, 0)) >= 0.01
      and queue._lock_admission(false)
  then
    v_has_lock := true;
    select a.has_more, a.admitted into v_has_more, v_admitted from queue._admit(greatest(1000, p_max_jobs)) a;
    perform set_config('pgdefer.looked_at', date_part('epoch', v_now)::text, false);
  end if;
  if p_queues is not null then
    v_queues := queue._match_queues(p_queues);  -- admission may have found a new queue
  end if;
  select array_agg(l.lane) as lanes, max(l.kind) as kind into v_choice
  from queue.lane l
  where not l.is_idle and (v_queues is null or l.queue = any (v_queues))
    and (l.paused_until is null or l.paused_until <= v_now)
    and exists (select from queue.worker w where w.id = p_worker and w.gone_at is null
      and w.apart_since is null) is true;
  if v_choice.kind = 1/* lane_limited */ then
    v_max_jobs := least(p_max_jobs, p_at_once);
    if v_has_lock or queue._lock_admission(false) then
      select c.ids, c.first_claim into ids, first_claim
      from queue._claim_one_key(p_worker, v_choice.lanes, v_max_jobs) c;
    elsif not p_may_wait and cardinality(v_choice.lanes) = 1 then
      return;  -- nothing else is ready, and whoever holds the lock admits
    end if;  -- else _claim_loop waits, and then looks which lanes it may claim from
  elsif v_choice.kind = 0/* lane_plain */ and cardinality(v_choice.lanes) = 1 then
    v_is_claimed := true;
    if p_max_jobs = 1 then
      -- as _claim_plain, for one job
      update queue.active_job aj
      set claim = nextval('queue.claim_seq'), worker_id = p_worker, claimed_at = clock_timestamp(),
        attempt = aj.attempt + 1
      where aj.ctid = (
        select c.ctid
        from queue.lane l
        cross join lateral (
          select aj.ctid from queue.active_job aj
          where aj.lane = l.lane and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id) and aj.claim is null
          order by aj.deadline, aj.id limit 1 for update of aj skip locked) c
        where l.lane = v_choice.lanes[1] and l.kind = 0/* lane_plain */
          and (l.paused_until is null or l.paused_until <= v_now))
      returning array[aj.id], aj.claim, aj.attempt, aj.flags, aj.claimed_at
      into ids, first_claim, v_attempt, v_flags, v_claimed_at;
      if v_flags & 128/* lease */ <> 0 then
        perform queue._lease_timeouts(ids, first_claim, v_claimed_at);
      end if;
      if v_attempt > 1 or v_flags & 2048/* overridden */ <> 0 or v_flags < 0 then
        first_claim := null;
      end if;
    else
      v_claimed := queue._claim_plain(p_worker, v_choice.lanes, p_max_jobs);
      ids := v_claimed.ids;
      first_claim := v_claimed.first_claim;
    end if;
  end if;
  if cardinality(ids) = v_max_jobs then
    if v_has_lock then
      perform set_config('pgdefer.was_dry', case when v_admitted between 1 and p_max_jobs then 'on'
        else 'off' end, false);
    end if;
    if random() * 300 < least(v_max_jobs, 20) and queue._lock_admission(false) then
      perform queue._raise_marks(v_choice.lanes);
    end if;
    return;
  end if;
  select c.ids, c.first_claim into ids, first_claim
  from queue._claim_loop(p_worker, p_queues, p_max_jobs, p_may_wait, v_now, ids, first_claim, v_is_claimed,
    v_has_lock, v_has_more, v_admitted <= p_max_jobs is true, p_at_once) c;
end $$;

-- Continues what _claim_one_lane has begun. p_ids: claimed so far; p_is_claimed: these were all ready jobs,
-- so that more must be admitted first; p_has_lock: the admission lock is held and was used; p_has_more:
-- another admission would find more; p_is_dry: there were only newcomers.
-- While a limited job is ready, at most p_at_once are claimed: it would hold its slot while it waits.
-- Locks: as fetch.
-- Why no wake-up is lost: a call that finds nothing has looked under the admission lock, or another session
-- holds that lock and looks. Rows that others hold are theirs to finish or to hand over.
-- In one piece: each round of the loop passes all its variables to the next.
create or replace function queue._claim_loop(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_may_wait boolean, p_now timestamptz, p_ids bigint[],
  p_first_claim bigint, p_is_claimed boolean, p_has_lock boolean, p_has_more boolean, p_is_dry boolean,
  p_at_once integer, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_queues text[] := p_queues;
  v_has_lock boolean := p_has_lock;
  v_has_more boolean := p_has_more;
  v_is_dry boolean := p_is_dry;
  v_max_jobs integer := p_max_jobs;
  v_admit record;
  v_choice record;
  v_lanes integer[];  -- the lanes claimed from
  v_ready integer[];  -- of quarantined jobs
  v_turn text;
  v_claimed record;
begin
  ids := p_ids;
  first_claim := p_first_claim;
  if p_queues is not null then
    v_queues := queue._match_queues(p_queues);
  end if;
  for v_pass in 1 .. 100 loop
    if v_pass > 1 or not p_is_claimed then
      select array_agg(l.lane) as lanes, max(l.kind) as kind, array_agg(l.lane) as plain_lanes,
        exists (select from queue.worker w where w.id = p_worker and w.gone_at is null
          and w.apart_since is null) as is_free
      into v_choice
      from queue.lane l
      where not l.is_idle and (v_queues is null or l.queue = any (v_queues))
        and (l.paused_until is null or l.paused_until <= p_now);
      if not v_choice.is_free or v_choice.kind = 2/* lane_crashed */ then
        if not v_has_lock and v_turn is null and queue._lock_admission(ids is null and p_may_wait) then
          v_has_lock := true;
          v_admit := queue._admit(greatest(1000, p_max_jobs));
          v_has_more := v_admit.has_more;
          if v_queues is distinct from p_queues then
            v_queues := queue._match_queues(p_queues);
          end if;
          continue;
        end if;
        v_ready := case when v_choice.kind = 2/* lane_crashed */
          then queue._quarantined_lanes(v_choice.lanes) end;
        if v_turn is null then
          v_turn := nullif(queue._worker_turn(p_worker, v_ready, v_has_lock),
            case when v_ready is null then 'others' end);
          if v_turn = 'alone' then
            ids := queue._claim_alone(p_worker, v_ready);
            first_claim := null;
          end if;
        end if;
        if v_turn = 'nothing' or v_turn = 'alone' and ids is not null then
          return;
        end if;
        select array_agg(l.lane) as lanes, max(l.kind) as kind, array_agg(l.lane) as plain_lanes into v_choice
        from queue.lane l where l.lane = any (v_choice.lanes) and l.kind < 2/* lane_crashed */;
      end if;
      if cardinality(v_choice.lanes) > 1 or v_choice.kind = 1/* lane_limited */ then
        v_choice := queue._probe_lanes(v_choice.lanes);
        if v_choice.kind = 1/* lane_limited */ then
          v_max_jobs := least(p_max_jobs, p_at_once);
          exit when coalesce(cardinality(ids), 0) >= v_max_jobs;
        end if;
      end if;
      v_lanes := coalesce(v_choice.lanes, v_lanes);
      if v_choice.kind = 1/* lane_limited */ and not v_has_lock then
        v_has_lock := queue._lock_admission(ids is null and p_may_wait);
        if v_has_lock then
          v_admit := queue._admit(greatest(1000, p_max_jobs));
          v_has_more := v_admit.has_more;
          if v_queues is distinct from p_queues then
            v_queues := queue._match_queues(p_queues);
          end if;
          continue;
        end if;
      end if;
      if v_choice.kind = 1/* lane_limited */ and v_has_lock then
        v_claimed := queue._claim_one_key(p_worker, v_choice.lanes,
          v_max_jobs - coalesce(cardinality(ids), 0));
        ids := ids || coalesce(v_claimed.ids, nullif(queue._claim_limited(p_worker, v_choice.lanes,
          v_max_jobs - coalesce(cardinality(ids), 0)), '{}'));
        if coalesce(cardinality(ids), 0) < v_max_jobs then
          -- it may have used its time on many jobs that can't start
          ids := ids || (select c.ids
            from queue._claim_plain(p_worker, v_choice.lanes, v_max_jobs - coalesce(cardinality(ids), 0)) c);
        end if;
        first_claim := null;
      elsif v_choice.plain_lanes is not null then
        v_claimed := queue._claim_plain(p_worker, v_choice.plain_lanes,
          v_max_jobs - coalesce(cardinality(ids), 0));
        if v_claimed.ids is not null then
          first_claim := case when ids is null then v_claimed.first_claim end;
          ids := ids || v_claimed.ids;
        end if;
      end if;
    end if;
    exit when cardinality(ids) >= v_max_jobs;
    exit when v_has_lock and (not v_has_more or clock_timestamp() > p_now + interval '100 ms');
    if not v_has_lock then
      -- the admission lock is not waited for while rows are held
      v_has_lock := queue._lock_admission(ids is null and p_may_wait);
      exit when not v_has_lock;
    end if;
    v_admit := queue._admit(greatest(1000, p_max_jobs));
    v_has_more := v_admit.has_more;
    v_is_dry := v_admit.admitted <= p_max_jobs;
    if v_queues is distinct from p_queues then
      v_queues := queue._match_queues(p_queues);  -- admission may have found a new queue
    end if;
  end loop;
  if ids is null and v_has_lock and v_turn in ('alone', 'either') then
    ids := queue._claim_alone(p_worker, v_ready);
    first_claim := null;
  end if;
  if v_is_dry is distinct from (current_setting('pgdefer.was_dry', true) = 'on') then
    perform set_config('pgdefer.was_dry', case when v_is_dry then 'on' else 'off' end, false);
  end if;
  if random() * 300 < least(cardinality(ids), 20) and v_lanes is not null
    and (v_has_lock or queue._lock_admission(false)) then
    perform queue._raise_marks(v_lanes);
  end if;
end $$;

-- work/claim_newcomer.sql
-- Claiming in the moment of admission: a job that is new or got its signal, if nothing else is to be done.
-- Tests: work/claim_newcomer.sql, work/claim.newcomers.spec, work/signals.wait.spec.

-- Claims jobs: their ids in claim order, NULL for none. first_claim: the number of their claim, if that order
-- is the order of ids, none is large and all of them start for the first time, so that queue.first_run
-- describes them. p_may_wait: the transaction holds no row that the holder of the admission lock could need.
-- p_at_once: how many of p_max_jobs the worker starts at once, as _start_at_once; NULL: all.
-- Fast path for a mostly idle worker: at most one new job and no other work pending. No lane has a ready job,
-- nothing is due, handed over or left from before, no task is paused, and the newcomer is plain, without a
-- timeout or a deadline. It is claimed as it is admitted, in three short statements: most of the cost of a
-- single job is set-up of statements, in every transaction (ADR 1). A job whose signal is all that is pending
-- is claimed as shortly (_resume_signalled). All else is left to _claim_one_lane.
-- Locks: the admission lock by try, if this session's last fetch took only newcomers (the hint was_dry); then
-- as _claim_one_lane.
-- Why the newcomer can be claimed as it is inserted: under the admission lock no other job becomes ready, so
-- the first statement's findings hold for the others. Claim and cursor commit together: if they are rolled
-- back, the next admission finds the job again. A row that another session is claiming counts as ready,
-- because the claim may be rolled back. The clock of the claim is read after the snapshot.
-- Why no wake-up is lost: rows that are not new, or not visible yet, stay ahead of the cursor or among its
-- in_flight. A signal that was taken leaves no settlement, and the cursor where it was. If the job gets
-- another one meanwhile, that settlement goes too: the signal is kept, and the job's next wait finds it.
-- With a function of its own for the look, a job takes 3.7 % more instructions; for the claim, 1.0 % more.
-- In one piece (ADR 1): set-up of statements and calls is most of the cost of a single job.
create or replace function queue._claim_newcomer(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_options jsonb, p_may_wait boolean,
  p_at_once integer, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz;
  v_has_lock boolean := false;
  v_queues text[];
  v_tick bigint;
  v_in_flight xid8[];
  v_upto pg_snapshot;
  v_own xid8;
  v_from xid8;
  v_pending bigint;  -- the job of a pending settlement, if that is a signal; 0: of another kind
  v_claimed record;
begin
  if current_setting('pgdefer.was_dry', true) = 'on' and p_max_jobs > 0 and p_options is null
    and queue._lock_admission(false) then
    v_has_lock := true;
    v_now := clock_timestamp();
    if p_queues is not null then
      v_queues := queue._match_queues(p_queues);
    end if;
    -- "is true" and "is false" keep the probes subplans; otherwise joins would be set up
    select k.tick, k.in_flight, pg_current_snapshot(), pg_current_xact_id_if_assigned(),
      array(
        select j.id from queue.job j
        where (j.xid, j.id) > (k.next_xid, -9223372036854775808)
          and j.xid <= pg_snapshot_xmax(pg_current_snapshot())
          and pg_visible_in_snapshot(j.xid, pg_current_snapshot())
          and j.xid is distinct from pg_current_xact_id_if_assigned()
        limit 2),
      (select case h.kind when 'signal' then h.job_id else 0 end
       from queue.pending_settlement h where h.xid >= coalesce(k.in_flight[1], k.next_xid) limit 1)
    into v_tick, v_in_flight, v_upto, v_own, ids, v_pending
    from queue.cursor k
    where not k.has_backlog and k.due_at <= v_now and pg_snapshot_xmax(pg_current_snapshot()) >= k.next_xid
      and exists (select from queue.worker w where w.id = p_worker and w.gone_at is null
        and w.apart_since is null) is true
      and exists (select from queue.waiting w where w.at >= k.due_at and w.at <= v_now) is false
      and exists (select from queue.schedule c where c.due_at >= k.due_at and c.due_at <= v_now) is false
      and exists (select from queue.pause p where p.task is not null) is false
      and exists (
        select from queue.lane l
        cross join lateral (
          select from queue.active_job aj
          where aj.lane = l.lane and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id)
            and aj.claim is null limit 1) r
        where not l.is_idle and (v_queues is null or l.queue = any (v_queues))
          and (l.paused_until is null or l.paused_until <= v_now)) is false
    order by k.tick desc limit 1;
    if v_in_flight <> '{}' then
      if exists (select from unnest(v_in_flight) x (xid)
                 where pg_visible_in_snapshot(x.xid, v_upto) and x.xid is distinct from v_own
                   and exists (select from queue.job j where j.xid = x.xid)) then
        ids := null;  -- jobs deferred in a transaction that was in flight are new too
      end if;
    end if;
    if cardinality(ids) = 1 and v_pending is null then
      insert into queue.active_job (id, deadline, lane, attempt, flags, claim, claimed_at, worker_id)
      select j.id, 'infinity', l.lane, 1, j.flags | l.extra_flags, nextval('queue.claim_seq'),
        clock_timestamp(), p_worker
      from queue.job j
      cross join lateral (
        select l.lane, l.extra_flags from queue.lane l
        where l.queue = j.queue and l.priority = j.priority and l.kind = 0/* lane_plain */ and not l.is_idle
          and l.paused_until is null and l.tag_base is null
          and (v_queues is null or l.queue = any (v_queues))
          and ('infinity', j.id) >= (l.low_deadline, l.low_id) limit 1) l
      where j.id = ids[1] and j.flags & (8575/* gated */ | 4096/* needed */ | 128/* lease */ | -32768/* large */ | 2048/* overridden */) = 0
        and j.deadline is null and (j.options ? 'share') is not true
        and j.id > coalesce(pg_sequence_last_value('queue.needed_seq'), 0)
      returning claim into first_claim;
      if first_claim is not null then
        update queue.cursor k
        set tick = v_tick + 1, next_xid = pg_snapshot_xmax(v_upto), high_id = greatest(k.high_id, ids[1]),
          in_flight = case when pg_snapshot_xmin(v_upto) < pg_snapshot_xmax(v_upto)
            then queue._in_flight(v_upto, v_own) else '{}' end
        where k.tick = v_tick;
        if first_claim % 300 = 0 then  -- once in a while
          perform queue._raise_marks(array(select l.lane from queue.lane l
            where not l.is_idle and l.kind = 0/* lane_plain */));
        end if;
        return;
      end if;
    elsif v_pending is not null then
      v_from := (select coalesce(k.in_flight[1], k.next_xid) from queue.cursor k where k.tick = v_tick);
      -- once in a while _admit lets the cursor pass the settlements that were taken here
      if ids = '{}' and v_pending > 0 and random() > 0.01
        and queue._resume_signalled(array[v_pending], p_worker, v_queues, v_from) is null then
        delete from queue.pending_settlement h
        where h.xid >= v_from and h.job_id = v_pending and h.kind = 'signal';
        ids := array[v_pending];
        return;
      end if;
    elsif ids = '{}' and clock_timestamp() - v_now < interval '2 ms' then
      -- a slow read met many rows that are not visible yet: _admit lets the cursor pass them
      ids := null;
      return;
    end if;
  end if;
  v_claimed := queue._claim_one_lane(p_worker, p_queues,
    case when p_max_jobs > 30 then queue._fitting(p_max_jobs) else p_max_jobs end, p_options, p_may_wait,
    v_has_lock, p_at_once);
  ids := v_claimed.ids;
  first_claim := v_claimed.first_claim;
end $$;

-- work/deliver.sql
-- Delivering: claimed jobs are returned to their worker.
--
-- The rows of an answer travel before its transaction ends. A client that stops reading (frozen, or on a
-- stalled network) keeps the transaction open, with all its locks, for as long as TCP takes. So an answer is
-- never larger than what the sockets' buffers always take: 64 kB. Further claims are put aside in
-- queue.undelivered. The next fetch of the worker hands them out, in a transaction that holds only these
-- rows: neither the admission lock nor claims, so that a worker which freezes meanwhile is declared dead like
-- any other. A claim that was never handed out counts as released, whatever happens to the worker.
--
-- pgdefer.undelivered, a setting of the session, names the worker that has claims aside, so that other
-- fetches need not look for them. A new session looks once, and whenever it finds nothing to claim (behind a
-- transaction pooler).

-- Locks, here and in callers: a fetch that puts claims aside holds the rows of queue.active_job that it has
-- claimed, and the admission lock if it took it; its rows of queue.undelivered are new, so nobody waits for
-- them. A fetch that hands out holds only rows of queue.undelivered, which reap and before_sleep skip. A
-- fetch that meets expired claims ends these, and hands out nothing.
-- Why nothing is lost: a claim and its row here commit together, so each claim is either handed out by the
-- fetch that made it or has a row. The transaction that hands the claim out deletes the row; if it fails, the
-- row is still there. If the claim ends meanwhile (reap, abort, retry with force), its row of
-- queue.active_job goes and the row here stays: its pair is no longer current, so it is skipped.
-- Two sessions: work/deliver.reap.spec.

-- Whether a claimed job may start: it has not expired, and neither its queue nor its task is paused.
create or replace function queue._may_start(p_id bigint)
returns boolean language plpgsql volatile parallel safe security invoker as $$
begin
  if exists (select from queue.expiry e where e.id = p_id and e.at <= clock_timestamp()) then
    return false;
  end if;
  return not exists (select from queue.pause p where p.is_paused) or (
    select greatest(queue._paused_until(j.queue), queue._task_paused_until(j.task, j.queue))
             > clock_timestamp() is not true
    from queue.job_now j where j.id = p_id);
end $$;

-- Releases claims that are aside for a worker and may no longer start; an expired job is cancelled by that.
-- Returns whether there was any. A claim whose row another transaction holds stays aside and is not handed
-- out; the next call finds out whether it has ended.
-- Locks: rows of queue.undelivered, then of queue.active_job, by skip locked.
create or replace function queue._give_back_undelivered(p_worker bigint)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_claim record;
  v_has_any boolean := false;
begin
  for v_claim in
    select u.no, u.id, u.claim from queue.undelivered u
    where u.worker_id = p_worker and not queue._may_start(u.id)
    order by u.id for update skip locked
  loop
    perform from queue.active_job aj where aj.id = v_claim.id
      and aj.claim = v_claim.claim for update skip locked;
    if found then
      perform queue._end_attempt('{"outcome": "released"}', v_claim.id, v_claim.claim, false);
      v_has_any := true;
    end if;
    delete from queue.undelivered u
    where u.worker_id = p_worker and u.no = v_claim.no
      and not exists (select from queue.active_job aj where aj.id = v_claim.id and aj.claim = v_claim.claim);
  end loop;
  if v_has_any then
    perform queue._announce();
  end if;
  return v_has_any;
end $$;

-- Makes the next fetch of this session hand out claims that are aside for a worker, if there are any.
-- Locks: none. Why nothing is missed: a session looks at its first fetch, and whenever it finds nothing to
-- claim.
create or replace function queue._look_for_undelivered(p_worker bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if exists (select from queue.undelivered u where u.worker_id = p_worker) then
    perform set_config('pgdefer.undelivered', p_worker::text, false);
  end if;
end $$;

-- Returns those of the claimed jobs, in claim order, that fit into one answer, and puts the others aside.
-- Each takes about 120 bytes in addition to its args, headers and steps. p_are_first: as first_claim of
-- _claim_newcomer, so that usually one sum shows that all fit.
-- Locks: none that another transaction waits for; the transaction holds the rows of queue.active_job, and
-- maybe the admission lock.
-- Why no wake-up is lost: a worker that gets none of the claimed jobs may be about to sleep, and is told to
-- fetch again.
create or replace function queue._keep_undelivered(p_worker bigint, p_ids bigint[], p_are_first boolean)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_fit record;
  v_total bigint;
begin
  if p_ids is null or p_ids = '{}' then
    perform queue._look_for_undelivered(p_worker);
    return null;
  elsif p_are_first then
    select sum(octet_length(l.args::text) + octet_length(l.task) + coalesce(pg_column_size(l.job_options), 0)
      + 120) into v_total
    from queue.log l where l.id = any (p_ids);
    if v_total <= 65536 then
      if v_total <= 57344
        and cardinality(p_ids) >= nullif(current_setting('pgdefer.fitting', true), '')::integer then
        perform set_config('pgdefer.fitting', (cardinality(p_ids) + cardinality(p_ids) / 8)::text, false);
      end if;
      return p_ids;
    end if;
  end if;
  select array_agg(x.id order by x.n) filter (where x.total <= 65536) as ids,
    array_agg(x.id order by x.n) filter (where x.total > 65536) as rest,
    array_agg(x.size order by x.n) filter (where x.total > 65536) as sizes
  into v_fit
  from (
    select u.id, u.n, j.size, sum(j.size + 120) over (order by u.n) as total
    from unnest(p_ids) with ordinality u (id, n)
    cross join lateral (
      select coalesce(j.size, octet_length(j.args::text)) + octet_length(j.task)
        + octet_length(j.queue) + coalesce(octet_length(j.lock), 0)
        + case when j.has_steps then coalesce(octet_length(queue._steps(j.id)::text), 0) else 0 end as size
      from queue.job_now j where j.id = u.id offset 0) j) x;
  if v_fit.rest is not null then
    insert into queue.undelivered (worker_id, id, claim, size)
    select p_worker, u.id, aj.claim, u.size
    from unnest(v_fit.rest, v_fit.sizes) with ordinality u (id, size, n)
    cross join lateral (select aj.claim from queue.active_job aj where aj.id = u.id offset 0) aj
    order by u.n;
    perform set_config('pgdefer.undelivered', p_worker::text, false),
      set_config('pgdefer.fitting', greatest(cardinality(v_fit.ids), 30)::text, false);
    if v_fit.ids is null then
      perform queue._announce();
    end if;
  end if;
  return v_fit.ids;
end $$;

-- Returns claims that are aside for a worker, in claim order: at most p_n jobs, up to 4 MB, or one job. They
-- are no longer aside; some may have ended meanwhile. NULL: there are none.
-- If some may no longer start, these are given back instead, and none is handed out (ids is empty): large
-- rows must not travel while a claim's row is held.
-- Locks: rows of queue.undelivered by skip locked; if some may no longer start, then rows of queue.active_job
-- by skip locked, never the admission lock.
-- Why no wake-up is lost: the end of a claim is handed over as by succeed. before_sleep sees claims that are
-- still aside, and a worker about to sleep is told to fetch again.
-- Raises: 22023, QJ007.
create or replace function queue._deliver(p_worker bigint, p_n integer, out ids bigint[], out claims bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._check_max_jobs(p_n);
  if not exists (select from queue.worker w where w.id = p_worker and w.gone_at is null) then
    perform queue._worker_gone(p_worker);
  elsif queue._give_back_undelivered(p_worker) then
    ids := '{}'::bigint[];
  else
    with aside as (
      select u.no, u.size from queue.undelivered u
      where u.worker_id = p_worker and queue._may_start(u.id)
      order by u.no for update skip locked),
    gone as (
      delete from queue.undelivered u
      where u.worker_id = p_worker and u.no in (
        select a.no from (select a.no, sum(a.size) over (order by a.no) as total,
          row_number() over (order by a.no) as n from aside a) a
        where a.n = 1 or a.total <= 4000000 and a.n <= p_n)
      returning u.no, u.id, u.claim)
    select array_agg(g.id order by g.no), array_agg(g.claim order by g.no) into ids, claims from gone g;
  end if;
  if not exists (select from queue.undelivered u where u.worker_id = p_worker) then
    perform set_config('pgdefer.undelivered', '', false);
  end if;
end $$;

-- work/fetch.sql
-- Fetching: claims ready jobs, and admits if there are too few.

-- Locks: rows of queue.active_job by skip locked; the admission lock, waited for only while nothing is held.
-- If it finds nothing, as _maintain.
-- Raises: 22023, QJ007, QJ008.
-- Why nothing is claimed twice: the claim is an update of a row that this transaction has locked, and found
-- unclaimed in its newest version. Why no limit is exceeded: rows of limited lanes are claimed only under the
-- admission lock (_claim_limited).
create or replace function queue.fetch(
  worker bigint, queues text[] default null, max_jobs integer default 1, options jsonb default null)
returns table (id bigint, claim bigint, task text, args jsonb, queue text, priority integer, lock text,
  attempt integer, scheduled_at timestamptz, deadline timestamptz, timeout interval, headers jsonb,
  parent bigint, steps jsonb)
language plpgsql volatile parallel unsafe security definer rows 50
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_claimed record;
  v_at_once integer;
  v_none regclass;
begin
  if coalesce(v_none, queue._unrestricted()) is null
    or current_setting('transaction_isolation') <> 'read committed'
    or current_setting('pgdefer.era', true) is distinct from to_regclass('queue.installation')::oid::text
  then
    perform queue._check_isolation();
    if to_regclass('queue.unrestricted') is null then
      perform queue._not_installed();
      perform queue._require_worker(worker);
      queues := queue._narrow_queues('{worker}', queues);
    end if;
    perform queue._ensure_era();
    -- once per session: claims that another session of the worker has put aside
    perform queue._look_for_undelivered(worker);
  end if;
  if current_setting('pgdefer.undelivered', true) = worker::text then
    v_claimed := queue._deliver(worker, max_jobs);
    return query
      select c.id, c.claim, c.task, c.args, c.queue, c.priority, c.lock, c.attempt, c.scheduled_at, c.deadline, c.timeout, c.headers, c.parent, case when c.has_steps then queue._steps(c.id) end
      from unnest(v_claimed.ids, v_claimed.claims) with ordinality u (id, claim, n)
      cross join lateral (
        select c.*
        from queue.claimed_job c
        where c.id = u.id and c.claim = u.claim offset 0) c
      order by u.n;
    if v_claimed.ids is not null then
      return;
    end if;
  end if;
  if options ? 'ahead' then
    v_at_once := queue._start_at_once(max_jobs, options);
    options := nullif(options - 'ahead', '{}');
  end if;
  v_claimed := queue._claim_newcomer(worker, queues, max_jobs, options, true, v_at_once);
  if v_claimed.first_claim is null and cardinality(v_claimed.ids) = 1 then
    -- its row is read once, for its length (_keep_undelivered) and for the answer
    select c.id, c.claim, c.task, c.args, c.queue, c.priority, c.lock, c.attempt, c.scheduled_at, c.deadline, c.timeout, c.headers, c.parent, case when c.has_steps then queue._steps(c.id) end
    into id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, timeout, headers,
      parent, steps
    from queue.claimed_job c where c.id = v_claimed.ids[1];
    if found and octet_length(concat(task, args, queue, lock, headers, steps)) <= 65536 - 120 then
      return next;
      return;
    end if;
  end if;
  if v_claimed.first_claim is null or cardinality(v_claimed.ids) > 30 then
    v_claimed.ids := queue._keep_undelivered(worker, v_claimed.ids, v_claimed.first_claim is not null);
  end if;
  if v_claimed.ids is null then
    perform queue._maintain_idle();
    return;
  end if;
  -- a separate statement: only a new snapshot shows the claims
  if v_claimed.first_claim is not null then
    return query
      select f.id, v_claimed.first_claim, f.task, f.args, f.queue, f.priority, f.lock, f.attempt,
        f.scheduled_at, f.deadline, f.timeout, f.headers, f.parent, null::jsonb
      from queue.first_run f where f.id = any (v_claimed.ids) order by f.id;
  else
    return query
      select c.id, c.claim, c.task, c.args, c.queue, c.priority, c.lock, c.attempt, c.scheduled_at, c.deadline, c.timeout, c.headers, c.parent, case when c.has_steps then queue._steps(c.id) end
      from unnest(v_claimed.ids) with ordinality u (id, n)
      cross join lateral (select c.* from queue.claimed_job c where c.id = u.id offset 0) c
      order by u.n;
  end if;
end $$;
comment on function queue.fetch(bigint, text[], integer, jsonb) is
  'Claims up to max_jobs jobs for a worker and returns them in claim order. It needs a transaction of its'
    ' own, in READ COMMITTED. If it finds nothing, it runs the maintenance that is due. A job that has'
    ' crashed before goes only to a worker that runs nothing, and that worker gets no other job until it has'
    ' ended; so a worker makes these calls one after another. steps: the finished steps of a job, by name;'
    ' NULL if there are none, an empty object if they take more than 64 kB (queue.read_steps). options: ids,'
    ' order (mixed | listed), tasks, functions (true: tasks that are database functions), deadline_within,'
    ' max_running ({"queue or prefix*": n}: of each such queue this worker runs at most n jobs at once; the'
    ' longest pattern applies);'
    ' ahead: how many of max_jobs the worker starts a moment later; they are claimed only where no option'
    ' selects jobs and no ready job is under a limit.';

-- Locks: as finish_many, then as fetch; the admission lock is waited for only if there are no outcomes.
-- Raises: as finish_many and fetch.
create or replace function queue.finish_and_fetch(worker bigint, outcomes jsonb, queues text[] default null,
  max_jobs integer default 1, options jsonb default null)
returns table (id bigint, claim bigint, task text, args jsonb, queue text, priority integer, lock text,
  attempt integer, scheduled_at timestamptz, deadline timestamptz, timeout interval, headers jsonb,
  parent bigint, steps jsonb, error text)
language plpgsql volatile parallel unsafe security definer rows 50
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_ended record;
  v_claimed record;
  v_may_wait boolean := coalesce(finish_and_fetch.outcomes, '[]') = '[]';
  v_at_once integer;
  v_none regclass;
begin
  if coalesce(v_none, queue._unrestricted()) is null
    or current_setting('transaction_isolation') <> 'read committed'
    or current_setting('pgdefer.era', true) is distinct from to_regclass('queue.installation')::oid::text
  then
    perform queue._check_isolation();
    if to_regclass('queue.unrestricted') is null then
      perform queue._not_installed();
      perform queue._require_worker(worker);
      perform queue._require_outcomes(finish_and_fetch.outcomes);
      queues := queue._narrow_queues('{worker}', queues);
    end if;
    perform queue._ensure_era();
    -- once per session: claims that another session of the worker has put aside
    perform queue._look_for_undelivered(finish_and_fetch.worker);
  end if;
  if not v_may_wait then
    v_ended := queue._finish(finish_and_fetch.outcomes);
    if v_ended.has_refused then
      return query
        select f.id, f.claim, null::text, null::jsonb, null::text, null::integer, null::text, null::integer,
          null::timestamptz,
          null::timestamptz, null::interval, null::jsonb, null::bigint, null::jsonb, f.error
        from unnest(v_ended.ids, v_ended.claims, v_ended.errors) f (id, claim, error)
        where f.error is not null;
      if cardinality(v_ended.ids) > 500 then
        return;  -- such a long answer must not travel with the admission lock held, which a claim may take
      end if;
    end if;
  end if;
  if current_setting('pgdefer.undelivered', true) = worker::text then
    -- large answers must not travel while outcomes hold locks: they are returned alone, by a call without
    -- outcomes
    if v_may_wait then
      v_claimed := queue._deliver(worker, max_jobs);
      return query
        select c.id, c.claim, c.task, c.args, c.queue, c.priority, c.lock, c.attempt, c.scheduled_at, c.deadline, c.timeout, c.headers, c.parent, case when c.has_steps then queue._steps(c.id) end, null::text
        from unnest(v_claimed.ids, v_claimed.claims) with ordinality u (id, claim, n)
        cross join lateral (
          select c.*
          from queue.claimed_job c
          where c.id = u.id and c.claim = u.claim offset 0) c
        order by u.n;
    end if;
    return;
  end if;
  if options ? 'ahead' then
    v_at_once := queue._start_at_once(max_jobs, options);
    options := nullif(options - 'ahead', '{}');
  end if;
  v_claimed := queue._claim_newcomer(
    finish_and_fetch.worker, finish_and_fetch.queues, finish_and_fetch.max_jobs, finish_and_fetch.options,
    v_may_wait, v_at_once);
  if v_claimed.first_claim is null or cardinality(v_claimed.ids) > 30 then
    v_claimed.ids := queue._keep_undelivered(finish_and_fetch.worker, v_claimed.ids,
      v_claimed.first_claim is not null);
  end if;
  if v_claimed.ids is null then
    perform queue._maintain_idle();
    return;
  end if;
  -- a function's statements have a new snapshot, and only that shows the claims
  return query select r.* from queue._claimed_rows(v_claimed.ids, v_claimed.first_claim) r;
end $$;
comment on function queue.finish_and_fetch(bigint, jsonb, text[], integer, jsonb) is
  'Runs finish_many and fetch in one round trip and one commit. Rows with error report refused outcomes,'
    ' the others are claimed jobs.';

-- Claimed jobs, as finish_and_fetch returns them. p_first_claim: the number of the first claim, if all are
-- first runs and numbered in the order of their ids.
create or replace function queue._claimed_rows(p_ids bigint[], p_first_claim bigint)
returns table (id bigint, claim bigint, task text, args jsonb, queue text, priority integer, lock text,
  attempt integer, scheduled_at timestamptz, deadline timestamptz, timeout interval, headers jsonb,
  parent bigint, steps jsonb, error text)
language plpgsql volatile parallel unsafe security invoker rows 50 as $$
begin
  if p_first_claim is not null then
    return query
      select f.id, p_first_claim, f.task, f.args, f.queue, f.priority, f.lock, f.attempt,
        f.scheduled_at, f.deadline, f.timeout, f.headers, f.parent, null::jsonb, null::text
      from queue.first_run f where f.id = any (p_ids) order by f.id;
  else
    return query
      select c.id, c.claim, c.task, c.args, c.queue, c.priority, c.lock, c.attempt, c.scheduled_at, c.deadline, c.timeout, c.headers, c.parent, case when c.has_steps then queue._steps(c.id) end, null::text
      from unnest(p_ids) with ordinality u (id, n)
      cross join lateral (select c.* from queue.claimed_job c where c.id = u.id offset 0) c
      order by u.n;
  end if;
end $$;

-- work/sql_worker.sql
-- Tasks that are database functions, and a worker in SQL alone.
--
-- register_task names the function (defer/tasks.sql). Only the owner may do so, because workers call it with
-- their own rights: run_function and work are security invoker. So everything in them is qualified, they have
-- no search_path of their own, and they call only public functions.
--
-- A claim of work lives as long as the transaction of its handler: reap sees in pg_locks that the session
-- which registered (info.session) is in one, although no heartbeat is visible before that ends.
--
-- statement_timeout set within CALL has no effect on the CALL itself; transaction_timeout ends the session.
-- So a job's timeout can't end its handler: the attempt ends as timed_out when the handler returns, and its
-- writes are undone. Until then the claim stays, because reap renews its lease, and no second run starts
-- beside it. A statement_timeout set before the CALL, or a cancel, ends the handler: that job ends as
-- timed_out, and so does work.
--
-- The settings of one handler do not reach the next: role and search_path are reset, and chained transactions
-- keep their characteristics, whatever the defaults have become.

-- Locks: none between its transactions: fetch, run_function and heartbeat each have their own.
-- Raises: as register_worker and fetch; 2D000 within a transaction; 57014 if it is cancelled.
create or replace procedure queue.work(queues text[] default null, max_jobs integer default null)
language plpgsql security invoker as $$
declare
  v_worker bigint;
  v_id bigint;
  v_claim bigint;
  v_is_cancelled boolean := false;
  v_role text := pg_catalog.current_setting('role');
  v_path text := pg_catalog.current_setting('search_path');
begin
  if pg_catalog.int4lt(work.max_jobs, 1) then
    raise exception using errcode := '22023', message := 'max_jobs must be at least 1',
      detail := pg_catalog.format('max_jobs: %s', work.max_jobs), hint := 'Pass NULL to run all there are.';
  end if;
  v_worker := queue.register_worker('queue.work', work.queues, '{"listen": false, "session": true}');
  commit and chain;
  for v_n in 1 .. coalesce(work.max_jobs, 2147483647) loop
    perform from queue.heartbeat(v_worker);
    commit and chain;
    for v_look in 1 .. 2 loop  -- what is too large for the answer of one fetch comes with the next
      select f.id, f.claim into v_id, v_claim
      from queue.fetch(v_worker, work.queues, 1, '{"functions": true}') f;
      commit and chain;
      exit when v_id is not null;
    end loop;
    exit when v_id is null;
    begin
      perform queue.run_function(v_id, v_claim);
    exception
      when sqlstate 'QJ001' or sqlstate 'QJ002' then
        null;  -- the claim was taken away meanwhile, and everything is undone
      when query_canceled then
        v_is_cancelled := true;
    end;
    perform pg_catalog.set_config('role', v_role, false),
      pg_catalog.set_config('search_path', v_path, false);
    if v_is_cancelled then
      begin
        perform queue.fail(v_id, v_claim, 'it was cancelled, or statement_timeout has passed', null,
          '{"outcome": "timed_out"}');
      exception when sqlstate 'QJ001' or sqlstate 'QJ002' then
        null;
      end;
    end if;
    perform from queue.heartbeat(v_worker);  -- in the handler's transaction, which has shown that it lives
    commit and chain;
    exit when v_is_cancelled;
  end loop;
  perform queue.deregister_worker(v_worker);
  commit;
  if v_is_cancelled then
    raise exception using errcode := '57014', message := 'queue.work was cancelled',
      detail := pg_catalog.format('job: %s', v_id),
      hint := 'Its job has failed as timed_out. Call it again, with a longer statement_timeout if that has'
        ' passed.';
  end if;
end $$;
comment on procedure queue.work(text[], integer) is
  'A worker in SQL: runs jobs of the queues whose tasks are database functions, one after another, until'
    ' none is left or max_jobs have run. It claims each job in one transaction, and runs it in another'
    ' together with its outcome. For psql, pg_cron or a loop; call it outside a transaction. A'
    ' statement_timeout set before limits the whole call; the job that it ends has timed out. A job''s own'
    ' timeout can''t end its function, but undoes it when it returns.';

-- The statement that calls the function of a claim's task, with $1 for the args, and the args. NULL: the task
-- has no function, or no longer. late_at: when its timeout has passed.
-- Raises: QJ001, QJ002.
create or replace function queue.function_call(id bigint, claim bigint)
returns table (statement text, args jsonb, timeout interval, late_at timestamptz)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_task text;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_claims(array[function_call.id], array[function_call.claim]);
  end if;
  select c.task, c.args, c.timeout,
    (select aj.claimed_at from queue.active_job aj where aj.id = c.id) + c.timeout
  into v_task, args, timeout, late_at
  from queue.claimed_job c where c.id = function_call.id and c.claim = function_call.claim;
  if not found then
    perform queue._raise_claim_error(function_call.id, function_call.claim);
  end if;
  select case when p.prorettype = 'void'::regtype
    then format('select cast(null as pg_catalog.jsonb) from %s($1)', t.function)
              else format('select pg_catalog.to_jsonb(%s($1))', t.function) end
  into statement
  from queue.task t join pg_proc p on p.oid = to_regprocedure(t.function || '(jsonb)')
  where t.name = v_task;
  return next;
end $$;
comment on function queue.function_call(bigint, bigint) is
  'Returns the statement that queue.run_function runs for a claim: it calls the function of the task,'
    ' with the args for $1. NULL if the task has none. late_at: when the job''s timeout has passed.';

-- Locks: those of the handler; then the claim's row, as succeed, fail and finish_many.
-- Why it takes effect exactly once: it commits or is undone together with the outcome. If the claim is lost,
-- succeed raises, then fail does, and everything is undone. If the function itself has ended the claim, only
-- succeed raises: by then that end is undone, too, and the job fails.
-- Raises: QJ001, QJ002, QJ008. An error of the function is the job's failure, except a cancel (57014), which
-- the caller handles.
create or replace function queue.run_function(id bigint, claim bigint)
returns text language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_call record;
  v_result pg_catalog.jsonb;
  v_has_returned boolean := false;
  v_options pg_catalog.jsonb;
  v_state text;
  v_message text;
  v_context text;
begin
  select c.statement, c.args, c.timeout, c.late_at into v_call
  from queue.function_call(run_function.id, run_function.claim) c;
  if v_call.statement is null then
    select f.state into v_state
    from queue.finish_many(pg_catalog.jsonb_build_array(pg_catalog.jsonb_build_object(
      'id', run_function.id, 'claim', run_function.claim, 'outcome', 'unknown_task'))) f;
    return v_state;
  end if;
  begin
    execute v_call.statement into v_result using v_call.args;
    set constraints all immediate;
    if pg_catalog.timestamptz_ge(pg_catalog.clock_timestamp(), v_call.late_at) then
      v_options := '{"outcome": "timed_out"}';
      raise exception using
        message := pg_catalog.format('not done within its timeout of %s', v_call.timeout),
        hint := 'Its writes are undone.';
    end if;
    v_has_returned := true;
    perform queue.succeed(run_function.id, run_function.claim, v_result);
    return 'succeeded';
  exception when others or assert_failure then
    get stacked diagnostics v_state := returned_sqlstate, v_message := message_text,
      v_context := pg_exception_context;
    if v_has_returned and pg_catalog.starts_with(v_state, 'QJ') then
      v_message := pg_catalog.concat('the claim had ended when the function returned: ', v_message);
    end if;
  end;
  return queue.fail(run_function.id, run_function.claim, v_message, pg_catalog.jsonb_build_object(
    'type', v_state, 'message', pg_catalog.left(v_message, 2000), 'traceback',
    pg_catalog.right(v_context, 16000)), v_options);
end $$;
comment on function queue.run_function(bigint, bigint) is
  'Runs the database function of a claim''s task, as the calling role, and ends the claim in the same'
    ' transaction: succeeded, with the return value; or failed, with the error and its context, and without'
    ' any of the function''s writes, also if it has ended the claim itself or its timeout has passed. Use it'
    ' for claims whose task a client does not know: without a function the claim ends as unknown_task.'
    ' Returns the new state. Raises QJ002 if the claim is lost; then everything is undone. It needs a'
    ' transaction of its own, in READ COMMITTED, with statement_timeout set to the job''s timeout.';

-- work/worker_sleep.sql
-- Waking at no cost: producers send a NOTIFY only while a worker sleeps.
--
-- The sleep lock and the sleepers' lock are advisory (sleep_lock and sleeper_lock in extension/macros). defer
-- takes the sleep lock shared, by try, until its transaction ends.
-- If it gets the lock, no worker sleeps on it now, and none can before this transaction ends, so none needs
-- waking. If it does not, a sleeper holds the lock exclusively, and defer sends a NOTIFY.
-- A worker about to sleep tries to take the lock exclusively, in its listening session (the lead sleeper). If
-- that fails, there are two cases. Another worker is the lead sleeper: then every producer notifies, all
-- listeners receive it, and this worker may sleep too; it holds the sleepers' lock shared to show this. Or
-- producers that will not notify are in flight: then it polls, from 20 ms doubling to 1 s, until they have
-- ended. When the lead sleeper becomes busy, it releases the sleep lock and wakes the others, one of which
-- takes it. A worker in the line of sleepers (work/line.sql) that is behind two others holds neither of the
-- two. A session that takes these locks in bad faith costs others notifications or polling, never a job.

-- Locks: the sleep lock or the sleepers' lock by try, kept until after_sleep or the session's end; those of
-- _join_line. A frozen lead sleeper makes producers notify, which all other listeners hear.
-- Two sessions: work/worker_sleep.lead_sleeper.spec, work/line.races.spec.
-- Raises: 22023, QJ007.
create or replace function queue.before_sleep(worker bigint, queues text[] default null,
  options jsonb default null)
returns table (may_sleep boolean, wait_for interval, channels text[], is_drained boolean,
  look_after interval)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_worker record;
  v_state text := coalesce(current_setting('pgdefer.sleeper', true), '');
  v_wait interval := interval '5 s';
  v_poll integer;
  v_due timestamptz;
  v_ahead integer := 0;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_worker(before_sleep.worker);
    queues := queue._narrow_queues('{worker}', queues);
  end if;
  select w.id, w.info into v_worker from queue.worker w where w.id = before_sleep.worker
    and w.gone_at is null;
  if not found then
    perform queue._worker_gone(before_sleep.worker);
  end if;
  may_sleep := true;
  look_after := interval '0';
  if v_worker.info -> 'listen' = 'false' or current_setting('pgdefer.notify', true) = 'off' then
    channels := '{}';
    v_wait := interval '1 s';
  else
    channels := array['pgdefer', 'pgdefer_worker_' || v_worker.id];
    if options -> 'in_line' = 'true' then
      v_ahead := queue._join_line(v_worker.id, queues, options);
    end if;
    v_state := case when v_state = 'rest' then '' else v_state end;
    if v_ahead > 1 then
      channels := channels[2:];
      v_wait := interval '10 s';
      perform queue._leave_sleep_lock(v_state);
      v_state := 'rest';
    elsif v_ahead = 1 then
      v_wait := interval '1 s';  -- in which it notices that the first has died, asleep or awake
      look_after := interval '80 ms';
    end if;
    if v_state = 'listener' and pg_try_advisory_lock_shared(1885824102, 1/* sleep_lock */) then
      -- the lead sleeper has gone
      perform pg_advisory_unlock_shared(1885824102, 1/* sleep_lock */), pg_advisory_unlock_shared(1885824102, 2/* sleeper_lock */);
      v_state := '';
    end if;
    if v_state not in ('lead', 'listener', 'rest') then
      if pg_try_advisory_lock(1885824102, 1/* sleep_lock */) then
        v_state := 'lead';
      elsif queue._joins_lead_sleeper() then
        v_state := 'listener';
      else
        v_poll := least(coalesce(nullif(substring(v_state from '^poll ([0-9]+)$'), '')::integer, 10) * 2,
          1000);
        v_state := 'poll ' || v_poll;
        v_wait := make_interval(secs => v_poll / 1000.0);
        may_sleep := false;
      end if;
    end if;
    perform set_config('pgdefer.sleeper', v_state, false);
  end if;
  v_due := queue._next_due();
  if v_due is not null and v_ahead < 2 then
    v_wait := least(v_wait, greatest(v_due - clock_timestamp() + look_after, interval '0'));
  end if;
  -- not claims on their way to another session of the worker
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
  'Tells, in the session that listens, whether a worker may sleep: LISTEN on the channels, fetch once'
    ' more, then wait for a notification for at most wait_for. may_sleep false: notifications may not'
    ' arrive; just fetch again after wait_for. is_drained: no job of these queues is ready, due or still to'
    ' be admitted, so none starts until somebody commits, ends, resumes or retries something, or a time'
    ' comes; options: tasks and deadline_within, as in fetch, for ready jobs; in_line: of the workers that'
    ' serve the same, only the first two are notified of jobs; busy: it runs jobs, so it stands behind'
    ' workers that do not. look_after: how long to wait after a notification on pgdefer, because another'
    ' worker, which is likely to take the job, heard it too.';

-- Locks: releases those that before_sleep took in this session; those of _leave_line.
create or replace function queue.after_sleep(worker bigint)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_state text := coalesce(current_setting('pgdefer.sleeper', true), '');
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_worker(after_sleep.worker);
  end if;
  perform queue._leave_sleep_lock(v_state), queue._leave_line(after_sleep.worker, true);
  if v_state <> '' then
    perform set_config('pgdefer.sleeper', '', false);
  end if;
end $$;
comment on function queue.after_sleep(bigint) is
  'Call it in the session that listens when a worker that slept is busy again. It releases the sleep'
    ' lock, so that producers need not notify, and wakes another sleeper instead.';

-- Releases the lock of a session in this state, and wakes the others if it was the lead sleeper's.
create or replace function queue._leave_sleep_lock(p_state text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_state = 'lead' then
    perform pg_advisory_unlock(1885824102, 1/* sleep_lock */);
    if pg_try_advisory_lock(1885824102, 2/* sleeper_lock */) then
      perform pg_advisory_unlock(1885824102, 2/* sleeper_lock */);
    else
      perform queue._wake();
    end if;
  elsif p_state = 'listener' then
    perform pg_advisory_unlock_shared(1885824102, 2/* sleeper_lock */);
  end if;
end $$;

-- Whether there is a lead sleeper, which then knows of this listener.
-- Locks: the sleepers' lock, shared and by try, kept if so.
-- Why none is forgotten: a lead sleeper that leaves releases the sleep lock, and looks at the sleepers' lock
-- afterwards; this function takes the latter, and looks at the former afterwards. So one of them sees the
-- other.
create or replace function queue._joins_lead_sleeper()
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  if not pg_try_advisory_lock_shared(1885824102, 2/* sleeper_lock */) then
    return false;
  elsif pg_try_advisory_lock_shared(1885824102, 1/* sleep_lock */) then
    perform pg_advisory_unlock_shared(1885824102, 1/* sleep_lock */), pg_advisory_unlock_shared(1885824102, 2/* sleeper_lock */);
    return false;
  end if;
  return true;
end $$;

-- Whether no job of these queues can start by itself: none is ready (which includes jobs that a rate,
-- max_running or a key holds back, and crashed ones that must run alone), nothing is due, no committed job is
-- still to be admitted, and no claim is still to be reaped. p_due: the last result of _next_due. If that is
-- now, it checks whose jobs are due, so that steady commits to other queues do not keep a worker: it reads
-- the first 1,000, and if there are more the queues are not drained, because fetch admits them.
-- p_options: those of before_sleep.
-- Locks: none. Raises: 22023.
create or replace function queue._is_drained(p_queues text[], p_options jsonb, p_due timestamptz)
returns boolean language plpgsql stable parallel safe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_queues text[];
  v_tasks text[];
  v_before timestamptz;
begin
  if p_options is not null then
    perform queue._check_keys('options', p_options, array['tasks', 'deadline_within', 'in_line', 'busy']);
    if coalesce(jsonb_typeof(p_options -> 'tasks'), 'array') not in ('array', 'null') then
      perform queue._invalid('tasks must be a list', 'Pass a JSON array.');
    elsif jsonb_typeof(p_options -> 'tasks') = 'array' then
      v_tasks := array(select t from jsonb_array_elements_text(p_options -> 'tasks') t);
    end if;
    if jsonb_typeof(p_options -> 'in_line') <> 'boolean'
      or jsonb_typeof(p_options -> 'busy') <> 'boolean'
    then
      perform queue._invalid('in_line and busy must be true or false', 'Pass a JSON boolean.');
    end if;
    v_before := v_now + queue._interval('deadline_within', p_options -> 'deadline_within');
  end if;
  if p_queues is not null then
    v_queues := queue._match_queues(p_queues);
  end if;
  if exists (
      select from queue.lane l
      cross join lateral (
        select from queue.active_job aj
        where aj.lane = l.lane and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id) and aj.claim is null
          and (v_before is null or queue._deadline_of(aj.id, aj.deadline) < v_before)
          and (v_tasks is null or exists (select from queue.job j
            where j.id = aj.id and j.task = any (v_tasks)))
        limit 1) r
      where not l.is_idle and (v_queues is null or l.queue = any (v_queues))
        and (l.paused_until is null or l.paused_until <= v_now))
    or exists (
      select from queue.worker w
      where w.gone_at is null and w.last_seen_at + w.dead_after < v_now
          and queue._up_since() + w.dead_after < v_now
        or w.gone_at is not null and not w.is_clear and not w.has_left)
  then
    return false;
  elsif p_due > v_now + interval '20 ms' is not false then
    return true;
  end if;
  return (
    select not (k.has_backlog or k.due_at > v_now
      or exists (select from queue.pending_settlement)
      or coalesce(queue._next_lease_end() <= v_now, false)
      or exists (select from queue.schedule s where s.due_at >= k.due_at and s.due_at <= v_now)
      or exists (
        select from queue.expiry e
        where e.at <= v_now and (select aj.claim from queue.active_job aj where aj.id = e.id) is null)
      or queue._has_any_of(p_queues, array(select j.queue from queue.job j
        where j.xid >= k.next_xid limit 1000))
      or queue._has_any_of(p_queues, array(select j.queue from queue.job j
        where j.xid = any (k.in_flight) limit 1000))
      or queue._has_any_of(p_queues, array(
           select j.queue
           from (select w.id from queue.waiting w where w.at >= k.due_at and w.at <= v_now
             order by w.at limit 1000) w
           cross join lateral (select j.queue from queue.job_now j where j.id = w.id offset 0) j)))
    from queue.cursor_now k);
end $$;

-- operate/lock_jobs.sql
-- Finding and locking jobs wherever they are.
--
-- Lock order: first the job's row in queue.active_job (waiting for a session that ends or claims it),
-- then its queueing lock's row (waiting for a session that replaces it), then the admission lock, then
-- the rest. Once the admission lock is held, only a claim can move the job, and claims skip the locked
-- row. Under the admission lock it waits for nothing that another transaction could hold long: not for
-- these rows, nor for queue.job_override of a job that is being finished. The first lock is FOR NO KEY
-- UPDATE: a transaction that has only finished a step (work/steps.sql) may last, and is not waited for;
-- _try_lock_job then finds the job busy. Whether the caller may use the jobs' queues is checked again under
-- the admission lock, because they may have moved while this waited.
-- Tests: operate/change.claim.spec.

-- Prepares a call that changes one job: checks that it exists and takes the locks in their order.
-- Locks, each waited for: the job's row of queue.active_job, that of its queueing lock, the admission lock.
-- Raises: QJ001, QJ008.
create or replace function queue._lock_for_change(p_id bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._check_isolation();
  if p_id is null or not exists (select from queue.job j where j.id = p_id) then
    perform queue._job_not_found(p_id);
  end if;
  perform from queue.active_job aj where aj.id = p_id for no key update;
  perform from queue.queueing_lock k
  where k.job_id = p_id and k.key = (select j.queueing_lock from queue.job j where j.id = p_id) for update;
  perform queue._admit_all();
  perform queue._require_jobs('{operator}', array[p_id]);
end $$;

-- Prepares a call that changes many jobs: takes the locks in their order.
-- Locks: see the top. Raises: 22023, QJ008.
create or replace function queue._lock_all_for_change(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._check_isolation();
  perform queue._check_ids(p_ids);
  perform from queue.active_job aj where aj.id = any (p_ids) order by aj.id for no key update;
  perform from queue.queueing_lock k
  where k.key = any (array(select j.queueing_lock from queue.job j
    where j.id = any (p_ids) and j.queueing_lock is not null)) and k.job_id = any (p_ids)
  order by k.key for update;
  perform from queue.finished f where f.id = any (p_ids) order by f.id for update;
  perform queue._admit_all();
  perform queue._require_jobs('{operator}', p_ids);
end $$;

-- The situation of a job: missing, running, finished, open (neither), or busy: another transaction holds it,
-- the end of its claim is not settled, or it is not admitted yet. All but missing and busy jobs are locked.
-- Locks: the caller holds the admission lock; the job's rows by skip locked.
create or replace function queue._try_lock_job(p_id bigint, out standing text, out claim bigint,
  out worker_id bigint)
language plpgsql volatile parallel unsafe security invoker as $$
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
      and p_id > coalesce((select max(r.upto) from queue.rehearsal r), 0)
    or exists (select from queue.pending_settlement h where h.job_id = p_id and h.kind in ('ended', 'again')
                 and not (h.kind = 'again' and h.flags = 0 and h.payload is null))
    or not queue._try_lock_queueing_lock(p_id)
  then
    return;
  end if;
  select aj.claim, aj.worker_id into claim, worker_id from queue.active_job aj
  where aj.id = p_id for update skip locked;
  if found then
    standing := case when claim is null then 'open' else 'running' end;
    return;
  elsif exists (select from queue.active_job aj where aj.id = p_id) then
    return;
  end if;
  perform from queue.finished f where f.id = p_id for update skip locked;
  if found then
    standing := 'finished';
  elsif not exists (select from queue.finished f where f.id = p_id) and queue._is_gated(p_id) then
    standing := 'open';
  end if;
end $$;

-- Whether a job waits in a gate: other jobs that are neither in queue.active_job nor in queue.finished are
-- not admitted yet.
-- Locks: the caller holds the admission lock.
create or replace function queue._is_gated(p_id bigint)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (select from queue.waiting w where w.id = p_id)
    or exists (select from queue.pending_settlement h where h.job_id = p_id and h.kind = 'again')
    or exists (select from queue.job_now j join queue.lock_member m on m.lock = j.lock and m.id = j.id
               where j.id = p_id);
end $$;

-- A job's state as queue.jobs shows it.
create or replace function queue._state(p_id bigint)
returns text language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_state text;
begin
  select j.state into v_state from queue.jobs j where j.id = p_id;
  return v_state;
end $$;

-- The outcome for each id, in the given order, each once. p_unkeyed: jobs whose queueing lock another job
-- has.
create or replace function queue._change_results(p_ids bigint[], p_done bigint[],
  p_unkeyed bigint[] default null)
returns table (id bigint, outcome text, error text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select u.id, j.state, case when j.id is null then 'QJ001'
      when u.id in (select unnest(p_unkeyed)) then 'QJ004'
      when u.id not in (select unnest(p_done)) then 'QJ003' end
    from (select u.id, min(u.n) as n from unnest(p_ids) with ordinality u (id, n) group by u.id) u
    left join lateral (select j.id, j.state from queue.jobs j where j.id = u.id offset 0) j on true
    order by u.n;
end $$;

-- Sets the retention of a finished job again after a change of its queue or state.
create or replace function queue._set_purge_at(p_id bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  -- not before now: a job whose transaction names this one as a need may not have committed yet (_safe_at)
  update queue.finished f
  set purge_at = greatest(f.finished_at + x.retain, case when x.retain is not null then clock_timestamp() end)
  from (select queue._retention(p_id, null) as retain) x
  where f.id = p_id;
end $$;

-- operate/cancel_hold.sql
-- Cancelling, holding and unholding one job.
--
-- Why no wake-up is lost: _advance sends on the jobs that a call releases, by a slot, a turn or a need, and
-- each call that may leave one ready ends with _announce.

-- Locks: the job's row of queue.active_job, waited for, but not for a transaction that has finished a step: a
-- job can be told to stop meanwhile; the admission lock, waited for.
-- Raises: QJ001, QJ003 (finished, or running without abort), QJ008.
create or replace function queue.cancel(id bigint, abort boolean default false)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_before jsonb;
  v_active record;
  v_taken record;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator}', array[cancel.id]);
  end if;
  perform queue._lock_for_change(cancel.id);
  v_before := queue._jobs_before(array[cancel.id]);
  -- a job that was claimed while this waited for the admission lock may be about to end in a transaction that
  -- holds its row
  select aj.claim, aj.worker_id into v_active from queue.active_job aj
  where aj.id = cancel.id for no key update skip locked;
  if v_active.claim is not null then
    if cancel.abort is not true then
      perform queue._invalid_state(cancel.id, 'running',
        'Call queue.cancel(id, abort => true) to have its worker stop it.');
    end if;
    update queue.active_job aj set flags = aj.flags | 1024/* aborting */ where aj.id = cancel.id;
    perform queue._notify_abort(cancel.id, v_active.claim, v_active.worker_id, 'cancelled');
    perform queue._audit_jobs('cancel', jsonb_build_object('abort', cancel.abort), array[cancel.id],
      v_before);
    return 'running';
  end if;
  v_taken := queue._dequeue(cancel.id);
  if coalesce(v_taken.place, 'log') = 'log' then
    perform queue._invalid_state(cancel.id, queue._state(cancel.id),
      'Only a job that is not finished, and whose defer has committed, can be cancelled.');
  end if;
  perform queue._finish_unclaimed(array[cancel.id], 'cancelled', 'cancelled', null);
  perform queue._advance(p_ended => array[cancel.id], p_keys => v_taken.keys);
  perform queue._announce();
  perform queue._audit_jobs('cancel', jsonb_build_object('abort', cancel.abort), array[cancel.id], v_before);
  return 'cancelled';
end $$;
comment on function queue.cancel(bigint, boolean) is
  'Cancels a job that has not started and returns cancelled. If the job is running, abort tells its'
    ' worker to stop it, and the function returns running.';

-- Locks: the job's row of queue.active_job, waited for; the admission lock, waited for.
-- Raises: QJ001, QJ003 (running or finished), QJ008.
create or replace function queue.hold(id bigint)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_before jsonb;
  v_taken record;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator}', array[hold.id]);
  end if;
  perform queue._lock_for_change(hold.id);
  v_before := queue._jobs_before(array[hold.id]);
  v_taken := queue._dequeue(hold.id);
  if coalesce(v_taken.place, 'log') = 'log' then
    perform queue._invalid_state(hold.id, queue._state(hold.id),
      'Only a job that has not started can be held, and only after the transaction that deferred it has'
      ' committed; cancel a running one with abort.');
  end if;
  insert into queue.waiting (id, reason) values (hold.id, 'held');
  perform queue._advance(p_keys => v_taken.keys, p_changed => array[hold.id]);
  perform queue._announce();
  perform queue._audit_jobs('hold', '{}', array[hold.id], v_before);
  return 'held';
end $$;
comment on function queue.hold(bigint) is
  'Puts a job that is not running on hold until queue.unhold. It keeps its place at its lock. Returns'
    ' held.';

-- Locks and errors: as hold; QJ003 if the job is not held.
create or replace function queue.unhold(id bigint)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_before jsonb;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator}', array[unhold.id]);
  end if;
  perform queue._lock_for_change(unhold.id);
  v_before := queue._jobs_before(array[unhold.id]);
  delete from queue.waiting w where w.id = unhold.id and w.reason = 'held';
  if not found then
    perform queue._invalid_state(unhold.id, queue._state(unhold.id), 'Only a held job can be unheld.');
  end if;
  perform queue._advance(p_arrived => array[unhold.id], p_changed => array[unhold.id]);
  perform queue._announce();
  perform queue._audit_jobs('unhold', '{}', array[unhold.id], v_before);
  return queue._state(unhold.id);
end $$;
comment on function queue.unhold(bigint) is 'Releases a held job. Returns its new state.';

-- operate/cancel_children.sql
-- Cancelling the children of a job: the jobs that it has deferred and waits for, and theirs.

-- Locks: as in operate/change.sql, for at most 1,000 jobs, which are looked up first. A child that is
-- deferred meanwhile is not among them. Why no wake-up is lost: as for cancel; the parent's wait ends
-- with its children.
-- Two sessions: operate/cancel_children.claim.spec.
-- Raises: 22023, QJ001, QJ008.
create or replace function queue.cancel_children(job bigint, abort boolean default false)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_allowed text[] := queue._allowed_queues('{operator}');
  v_ids bigint[];
  v_before jsonb;
  v_child record;
  v_active record;
  v_taken record;
  v_keys text[];
  v_ended bigint[];
  v_done bigint[] := '{}'::bigint[];
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator}', array[cancel_children.job]);
  end if;
  perform queue._check_isolation();
  if cancel_children.job is null
    or not exists (select from queue.job j where j.id = cancel_children.job) then
    perform queue._job_not_found(cancel_children.job);
  end if;
  v_ids := queue._unfinished_children(cancel_children.job, cancel_children.abort is true, v_allowed);
  perform queue._lock_all_for_change(v_ids);
  v_before := queue._jobs_before(v_ids);
  for v_child in select u.id from unnest(v_ids) u (id) order by u.id loop
    select aj.claim, aj.worker_id into v_active from queue.active_job aj
    where aj.id = v_child.id and aj.claim is not null for no key update skip locked;
    if v_active.claim is not null and cancel_children.abort then
      update queue.active_job aj set flags = aj.flags | 1024/* aborting */ where aj.id = v_child.id;
      perform queue._notify_abort(v_child.id, v_active.claim, v_active.worker_id, 'cancelled');
    elsif (select g.standing from queue._try_lock_job(v_child.id) g) = 'open' then
      v_taken := queue._dequeue(v_child.id);
      v_keys := v_keys || v_taken.keys;
      v_ended := v_ended || v_child.id;
    else
      continue;
    end if;
    v_done := v_done || v_child.id;
  end loop;
  if v_ended is not null then
    perform queue._finish_unclaimed(v_ended, 'cancelled', 'cancelled', null);
    perform queue._advance(p_ended => v_ended, p_keys => v_keys);
  end if;
  perform queue._announce();
  perform queue._audit_jobs('cancel_children',
    jsonb_build_object('job', cancel_children.job, 'abort', cancel_children.abort), v_done, v_before,
    (select j.queue from queue.job_now j where j.id = cancel_children.job));
  return query select t.id, t.outcome, t.error from queue._change_results(v_ids, v_done) t;
end $$;
comment on function queue.cancel_children(bigint, boolean) is
  'Cancels the jobs that a job has deferred and waits for, and theirs, recursively: those that have not'
    ' started; with abort, the workers of running ones are told to stop them. To cancel a job with its'
    ' children, cancel the job first. At most 1,000 at a time: call it again while it returns so many.'
    ' Returns a row for each: cancelled, running (it was told to stop), or an error with its state.';

-- The first 1,000 jobs below a job that have not ended; without p_abort only those that do not run, with it
-- also those that run and were not told to stop. Each job has one parent, which is older, so this ends.
create or replace function queue._unfinished_children(p_job bigint, p_abort boolean, p_allowed text[])
returns bigint[] language plpgsql stable parallel safe security invoker as $$
declare
  v_pending record := queue._pending_yields();
  v_generation bigint[] := array[p_job];
  v_ids bigint[] := '{}'::bigint[];
begin
  while cardinality(v_generation) > 0 loop
    v_generation := array(
      select c.id
      from (select u.id as job_id, n.id as need_id
            from unnest(v_generation) u (id) cross join lateral queue._direct_needs(u.id) n
            union
            select y.job_id, y.need_id from unnest(v_pending.jobs, v_pending.needs) y (job_id, need_id)
            where y.job_id = any (v_generation)) d
      cross join lateral (
        select j.id from queue.job j
        where j.id = d.need_id and (j.options ->> 'parent')::bigint = d.job_id offset 0) c);
    v_ids := v_ids || v_generation;
  end loop;
  return array(
    select u.id from unnest(v_ids) u (id)
    left join lateral (
      select aj.claim, aj.flags from queue.active_job aj where aj.id = u.id offset 0) a on true
    where not exists (select from queue.finished f where f.id = u.id)
      and (a.claim is null or p_abort and a.flags & 1024/* aborting */ = 0)
      and queue._allows(p_allowed, (select j.queue from queue.job_now j where j.id = u.id))
    order by u.id limit 1000);
end $$;

-- operate/change.sql
-- Changing jobs: moving them, other priorities, deadlines, times and args.
--
-- Each call is one transaction and takes its locks in the order of operate/lock_jobs.sql: rows of
-- queue.active_job, queueing locks and rows of queue.finished, each sorted and waited for, then the admission
-- lock. Rows that it finds only under the admission lock, it locks by skip locked (_try_lock_job): if another
-- transaction holds such a job, it is refused like one whose state does not allow the call. If the claim of a
-- running job is taken away, it is lost: its worker is told to abort, and its late outcome gets QJ002.
--
-- (NOT) IN (SELECT unnest(...)) checks whether an id is one of many, because the planner hashes it: = ANY
-- (array) reads the array for each row.

-- Locks: as above. Raises: 22023, QJ008.
create or replace function queue.move(ids bigint[], queue text, force boolean default false)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_before jsonb;
  v_job record;
  v_done bigint[] := '{}'::bigint[];
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator}', move.ids);
    perform queue._require_queue('{operator}', move.queue);
  end if;
  perform queue._check_queue(move.queue);
  perform queue._lock_all_for_change(move.ids);
  v_before := queue._jobs_before(move.ids);
  for v_job in select distinct u.id from unnest(move.ids) u (id) order by u.id loop
    select v_job.id, g.* into v_job from queue._try_lock_job(v_job.id) g;
    continue when v_job.standing in ('missing', 'busy') or v_job.standing = 'running'
      and move.force is not true;
    if v_job.standing = 'running' then
      perform queue._end_attempt('{"outcome": "released", "error": "taken back by a move with force"}',
        v_job.id, v_job.claim, true);
      perform queue._notify_abort(v_job.id, v_job.claim, v_job.worker_id, 'moved');
    end if;
    perform queue._override(v_job.id, p_queue => move.queue);
    perform queue._set_purge_at(v_job.id);
    v_done := v_done || v_job.id;
  end loop;
  perform queue._announce();
  perform queue._audit_jobs('move', jsonb_build_object('queue', move.queue, 'force', move.force), v_done,
    v_before, move.queue);
  return query select t.id, t.outcome, t.error from queue._change_results(move.ids, v_done) t;
end $$;
comment on function queue.move(bigint[], text, boolean) is
  'Moves jobs to another queue, with their ids, args, attempts and history; finished ones run there if'
    ' they are retried. A running job is refused (QJ003) without force; with force its claim is lost and it'
    ' is ready again there. Returns a row for each id: its state in outcome, or an error.';

-- Locks: as above. Raises: 22023, QJ008.
create or replace function queue.set_priority(ids bigint[], priority integer)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_before jsonb;
  v_job record;
  v_done bigint[] := '{}'::bigint[];
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator}', set_priority.ids);
  end if;
  if set_priority.priority is null then
    perform queue._invalid('priority is missing', 'Give a whole number; higher runs first.');
  end if;
  perform queue._lock_all_for_change(set_priority.ids);
  v_before := queue._jobs_before(set_priority.ids, 'priority');
  for v_job in select distinct u.id from unnest(set_priority.ids) u (id) order by u.id loop
    select v_job.id, g.* into v_job from queue._try_lock_job(v_job.id) g;
    continue when v_job.standing in ('missing', 'busy');
    perform queue._override(v_job.id, p_priority => set_priority.priority);
    v_done := v_done || v_job.id;
  end loop;
  perform queue._announce();
  perform queue._audit_jobs('set_priority', jsonb_build_object('priority', set_priority.priority), v_done,
    v_before);
  return query select t.id, t.outcome, t.error from queue._change_results(set_priority.ids, v_done) t;
end $$;
comment on function queue.set_priority(bigint[], integer) is
  'Changes the priority of jobs; for running and finished ones it applies to their next run. Returns a'
    ' row for each id: its state in outcome, or an error.';

-- Locks: as above. Raises: 22023, QJ008.
-- Why no wake-up is lost: each job goes through the gates again, and it ends with _announce.
create or replace function queue.set_deadline(ids bigint[], at timestamptz)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_before jsonb;
  v_job record;
  v_done bigint[] := '{}'::bigint[];
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator}', set_deadline.ids);
  end if;
  perform queue._check_moment('at', set_deadline.at, true);
  perform queue._lock_all_for_change(set_deadline.ids);
  v_before := queue._jobs_before(set_deadline.ids, 'deadline');
  for v_job in select distinct u.id from unnest(set_deadline.ids) u (id) order by u.id loop
    select v_job.id, g.* into v_job from queue._try_lock_job(v_job.id) g;
    continue when v_job.standing in ('missing', 'busy');
    perform queue._override(v_job.id, p_deadline => coalesce(set_deadline.at, 'infinity'));
    v_done := v_done || v_job.id;
  end loop;
  perform queue._propagate_deadline(v_done);
  perform queue._announce();
  perform queue._audit_jobs('set_deadline', jsonb_build_object('at', set_deadline.at), v_done, v_before);
  return query select t.id, t.outcome, t.error from queue._change_results(set_deadline.ids, v_done) t;
end $$;
comment on function queue.set_deadline(bigint[], timestamptz) is
  'Changes the deadline of jobs; NULL removes it. For running and finished ones it applies to their next run.'
    ' An earlier deadline spreads to the jobs that a job needs; a later one does not undo this. Returns a row'
    ' for each id: its state in outcome, or an error.';

-- Locks: the job's row of queue.active_job, waited for; the admission lock, waited for.
-- Raises: 22023, QJ001, QJ003 (running or finished), QJ008.
create or replace function queue.reschedule(id bigint, at timestamptz default null)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_before jsonb;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator}', array[reschedule.id]);
  end if;
  if not isfinite(reschedule.at) then
    perform queue._invalid('at must be finite',
      'Pass a time, or NULL for now. To put a job on hold without one, use queue.hold.');
  end if;
  perform queue._check_moment('at', reschedule.at);
  perform queue._lock_for_change(reschedule.id);
  v_before := queue._jobs_before(array[reschedule.id], 'scheduled_at');
  if (select g.standing from queue._try_lock_job(reschedule.id) g) <> 'open' then
    perform queue._invalid_state(reschedule.id, queue._state(reschedule.id),
      'Only a job that is neither running nor finished can be rescheduled; queue.retry runs a finished one'
      ' again.');
  end if;
  perform queue._override(reschedule.id, p_scheduled_at => coalesce(reschedule.at, '-infinity'));
  perform queue._announce();
  perform queue._audit_jobs('reschedule', jsonb_build_object('at', reschedule.at), array[reschedule.id],
    v_before);
  return queue._state(reschedule.id);
end $$;
comment on function queue.reschedule(bigint, timestamptz) is
  'Changes the time of a job that is neither running nor finished; NULL: now. This includes jobs that'
    ' wait for a retry. Returns its new state.';

-- Locks: as _lock_for_change; then, under the admission lock, the job's row of queue.finished by skip locked.
-- Why no run sees other args than it started with: if a fetch holds the job's row, this waits for it, and the
-- job is then running; a later fetch skips that row; and jobs without a row of queue.active_job are admitted
-- only under the admission lock. Two sessions: operate/change.claim.spec.
-- Why no wake-up is lost: it ends with _announce, like every call that may leave a job ready.
-- Raises: 22023, QJ001, QJ003 (running or succeeded), QJ008.
create or replace function queue.set_args(id bigint, args jsonb)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_before jsonb;
  v_args jsonb;
  v_standing text;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator}', array[set_args.id]);
  end if;
  if jsonb_typeof(set_args.args) is distinct from 'object' then
    perform queue._invalid('args must be a JSON object', 'Pass the arguments by name: {"name": value}.',
      'type: ' || coalesce(jsonb_typeof(set_args.args), 'NULL'));
  end if;
  perform queue._check_size('args', set_args.args);
  perform queue._lock_for_change(set_args.id);
  v_before := queue._jobs_before(array[set_args.id], 'task', 'args');
  select g.standing into v_standing from queue._try_lock_job(set_args.id) g;
  if v_standing not in ('open', 'finished') or exists (select from queue.finished f
    where f.id = set_args.id and f.state = 'succeeded') then
    perform queue._invalid_state(set_args.id, queue._state(set_args.id),
      'Only a job that neither runs nor has succeeded can get other args, and only after the transaction'
      ' that deferred it has committed. If another transaction may be changing it, try again.');
  end if;
  v_args := queue._uncut(queue._hidden_paths() -> (v_before -> 0 ->> 'task'), set_args.args,
    v_before -> 0 -> 'args');
  perform queue._check_size('args', v_args);
  perform queue._override(set_args.id, p_args => v_args);
  perform queue._announce();
  perform queue._audit_jobs('set_args', jsonb_build_object('args', v_args), array[set_args.id], v_before);
  return queue._state(set_args.id);
end $$;
comment on function queue.set_args(bigint, jsonb) is
  'Replaces all args of a job that neither runs nor has succeeded by another object; a failed or'
    ' cancelled job uses them for its retry. Its lock and keys stay as they were filled from the old args.'
    ' Whatever a role that may not see sensitive args leaves as it was shown, with ***, keeps its old value;'
    ' a new *** in place of a sensitive value is refused. Returns its state.';

-- operate/copy.sql
-- Copying a job, and claiming the next one without a worker.

-- Locks: none but the sleep lock, shared and by try: it only appends, as defer does. Raises: 22023, QJ001.
create or replace function queue.copy(id bigint, queue text default null)
returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_id bigint;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator}', array[copy.id]);
    perform queue._require_queue('{operator}', copy.queue) where copy.queue is not null;
  end if;
  if copy.queue is not null then
    perform queue._check_queue(copy.queue);
  end if;
  v_id := queue._copy(copy.id, copy.queue, 0);
  perform queue._announce();
  perform queue._audit_jobs('copy', jsonb_build_object('queue', copy.queue), array[copy.id, v_id],
    queue._jobs_before(array[copy.id]), copy.queue);
  return v_id;
end $$;
comment on function queue.copy(bigint, text) is
  'Defers a new job with the same task, args and options, in a queue (NULL: the same), and returns its'
    ' id. The copy has its own history. It gets no queueing_lock, no idempotency_key, no group, no expires_at'
    ' that has passed, and only needs that still exist; it is held if the job is.';

-- Locks: as fetch. It needs a transaction of its own. The claim depends only on its lease: its worker is
-- removed at once.
-- Raises: 22023, QJ008.
create or replace function queue.next(queues text[] default null, ack boolean default false,
  lease interval default '20 minutes')
returns table (id bigint, claim bigint, task text, args jsonb, queue text, priority integer, lock text,
  attempt integer, scheduled_at timestamptz, deadline timestamptz, headers jsonb, expires_at timestamptz)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_worker bigint;
  v_found record;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    queues := queue._narrow_queues('{operator}', queues);
  end if;
  perform queue._check_isolation();
  if next.ack is not true and (next.lease is null or next.lease <= interval '0') then
    perform queue._invalid('lease must be longer than 0', 'Pass an interval such as ''20 minutes''.');
  end if;
  perform queue._check_interval('lease', next.lease) where next.ack is not true;
  v_worker := queue._register_worker('operator', queues, '{"listen": false}');
  select queue._claim_by_options(v_worker, queues, 1, '{}', true, true) as ids into v_found;
  select c.id, c.claim,
    c.task, case when x.size <= 65536 then queue._cut(queue._hidden_paths() -> c.task, c.args) end,
    c.queue, c.priority, c.lock, c.attempt, c.scheduled_at,
    c.deadline,
    case when x.size <= 65536 then c.headers end
  into id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, headers
  from queue.claimed_job c
  cross join lateral (
    select coalesce(j.size, 0) as size from queue.job_now j where j.id = c.id) x
  where c.id = v_found.ids[1];
  if id is null or next.ack then
    delete from queue.worker w where w.id = v_worker;
    if id is null then
      return;
    end if;
    perform queue._succeed(array[id], array[claim], null);
    update queue.finished f set reason = 'operator' where f.id = next.id;
  else
    expires_at := queue._extend(id, claim, next.lease);
    update queue.worker w set gone_at = clock_timestamp(), is_clear = true where w.id = v_worker;
  end if;
  perform queue._audit_jobs('next', jsonb_build_object('queues', queues, 'ack', ack, 'lease', lease),
    array[id], jsonb_build_array(jsonb_build_object('id', id, 'state', 'ready', 'queue', queue)));
  return next;
end $$;
comment on function queue.next(text[], boolean, interval) is
  'Claims the next job of queues (names, prefix*, *; NULL: all) by hand, for queue.succeed, fail or'
    ' release with its id and claim. The claim has its own lease, and counts as crashed when that ends'
    ' (expires_at); queue.extend renews it. With ack => true the job is marked succeeded immediately, reason'
    ' operator. No row: there is no job. Args of more than 64 kB are left out: read them in queue.jobs.'
    ' Sensitive args read *** for all but the owner.';

-- Appends a copy of a job, with further flags, and returns its id. It wakes nobody. The copy does not need
-- the jobs that the original awaits. But a copy that continues with the steps of the original (flag
-- overridden) awaits those of them that have ended, because its handler may ask for their results.
-- Locks: none. Raises: QJ001.
create or replace function queue._copy(p_id bigint, p_queue text, p_flags integer)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz;
  v_needs bigint[];
  v_awaited jsonb;
  v_id bigint;
begin
  perform pg_current_xact_id();  -- as in _check_needs
  v_now := clock_timestamp();
  if p_flags & 2048/* overridden */ <> 0 then
    select jsonb_agg(d.need_id order by d.need_id) into v_awaited
    from queue.need d left join queue.finished f on f.id = d.need_id
    where d.job_id = p_id and d.mode & 4/* ended */ <> 0
      and (d.claim is null or coalesce(f.state, d.deleted_state) is not null);
    v_awaited := coalesce(v_awaited, (select j.options -> 'awaited' from queue.job j where j.id = p_id));
  end if;
  v_needs := array(
    select n.id from queue._direct_needs(p_id) n
    cross join lateral (select o.id from queue.job o where o.id = n.id offset 0) o
    left join lateral (
      select f.purge_at, f.finished_at, f.state
      from queue.finished f
      where f.id = n.id offset 0) f on true
    where (f.purge_at <= v_now or f.purge_at is null and f.state = 'succeeded' and f.finished_at < v_now - interval '7 days') is not true
      and not exists (select from queue.need d
        where d.job_id = p_id and d.need_id = n.id and d.mode & 4/* ended */ <> 0)
    order by n.id);
  insert into queue.log (task, args, job_options)
  select j.task, j.args, row(
    coalesce(p_queue, j.queue), j.priority,
    j.flags & ~(8/* needs */ | 16/* scheduled */ | 32/* held */ | 64/* expires */
      | 4096/* needed */ | 256/* until_start */ | 8192/* until_finish */) & case when j.lock is null then ~3/* lock */ else -1 end
      | case when v_needs <> '{}' or v_awaited is not null or j.options ->> 'needs_mode' = 'any'
        then 8/* needs */ else 0 end
      | case when x.scheduled_at is not null then 16/* scheduled */ else 0 end
      | case when w.id is not null then 32/* held */ else 0 end
      | case when x.is_expiring then 64/* expires */ else 0 end | p_flags,
    x.scheduled_at, d.deadline, j.lock, null, nullif(v_needs, '{}'), j.keys, j.limits,
    nullif(coalesce(j.options, '{}') - '{idempotency_key,group,awaited}'::text[]
      - case when x.is_expiring then '' else 'expires_at' end
      || jsonb_strip_nulls(jsonb_build_object('awaited', v_awaited)), '{}'),
      j.size)::queue.job_options
  from queue.job_now j
  join queue.job d on d.id = j.id  -- as it was deferred
  left join queue.waiting w on w.id = j.id and w.reason = 'held'
  cross join lateral (
    select case when j.claims = 0 then j.scheduled_at
        when d.scheduled_at <= v_now then nullif(d.scheduled_at, '-infinity') end as scheduled_at,
      coalesce((j.options ->> 'expires_at')::timestamptz > v_now, false) as is_expiring) x
  where j.id = p_id
  returning id into v_id;
  if v_id is null then
    perform queue._job_not_found(p_id);
  end if;
  return v_id;
end $$;

-- operate/fork.sql
-- Going back: a job, or a copy of it, continues from one of its steps.

-- Locks: none, as copy: it only appends. Why no wake-up is lost: the copy is a new job of the log; see defer.
-- Raises: 22023, QJ001. Two sessions: operate/fork.retry.spec.
create or replace function queue.fork(id bigint, from_step text)
returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_key record;
  v_id bigint;
  v_is_found boolean;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator}', array[fork.id]);
  end if;
  v_key := queue._step_key(fork.from_step);
  v_id := queue._copy(fork.id, null, 2048/* overridden */);
  insert into queue.job_override (id, has_steps) values (v_id, true);
  -- in one statement, because a retry may forget the step meanwhile
  with point as materialized (
    select f.claim, f.finished_at from queue.step f
    where f.job_id = fork.id and f.name = v_key.name and f.no = coalesce(v_key.no, 1)
      and f.finished_at is not null),
  kept as (
    insert into queue.step (job_id, claim, run, finished_at, no, name, fingerprint, value, failures,
      failed_at, error)
    select v_id, s.claim, s.run, s.finished_at, s.no, s.name, s.fingerprint, s.value, s.failures, s.failed_at,
      s.error
    from queue.step s join point f on (s.claim, s.finished_at) < (f.claim, f.finished_at)
    where s.job_id = fork.id and s.finished_at is not null)
  select exists (select from point) into v_is_found;
  if not v_is_found then
    perform queue._invalid('the job has finished no such step', 'queue.steps lists the finished steps.',
      format('id: %s, step: %s', fork.id, left(fork.from_step, 200)));
  end if;
  perform queue._announce();
  perform queue._audit_jobs('fork', jsonb_build_object('from_step', fork.from_step), array[fork.id, v_id],
    queue._jobs_before(array[fork.id]));
  return v_id;
end $$;
comment on function queue.fork(bigint, text) is
  'Defers a copy of a job (queue.copy) that continues from one of its finished steps: the copy has the steps'
    ' that were finished before that one, and finds the jobs that it awaited, as far as these have ended.'
    ' Returns the id of the copy.';

-- operate/end.sql
-- Ending jobs by hand.

-- Locks: as in operate/change.sql. Raises: 22023, QJ008.
create or replace function queue.fail_jobs(ids bigint[], message text default null)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_before jsonb;
  v_job record;
  v_done bigint[] := '{}'::bigint[];
  v_taken record;
  v_message text := left(fail_jobs.message, 10000);
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator}', fail_jobs.ids);
  end if;
  perform queue._lock_all_for_change(fail_jobs.ids);
  v_before := queue._jobs_before(fail_jobs.ids);
  for v_job in select distinct u.id from unnest(fail_jobs.ids) u (id) order by u.id loop
    select v_job.id, g.* into v_job from queue._try_lock_job(v_job.id) g;
    if v_job.standing = 'running' then
      -- it fails, even if it was told to abort
      update queue.active_job aj set flags = aj.flags & ~1024/* aborting */ where aj.id = v_job.id;
      perform queue._end_attempt(
        jsonb_build_object('outcome', 'failed', 'error', v_message, 'options',
          '{"retryable": false, "reason": "operator"}'::jsonb),
        v_job.id, v_job.claim, true);
      perform queue._notify_abort(v_job.id, v_job.claim, v_job.worker_id, 'failed');
    elsif v_job.standing = 'open' then
      v_taken := queue._dequeue(v_job.id);
      perform queue._finish_unclaimed(array[v_job.id], 'failed', 'operator', v_message);
      perform queue._advance(p_ended => array[v_job.id], p_keys => v_taken.keys);
    else
      continue;
    end if;
    v_done := v_done || v_job.id;
  end loop;
  perform queue._announce();
  perform queue._audit_jobs('fail_jobs', jsonb_build_object('message', left(v_message, 1000)), v_done,
    v_before);
  return query select t.id, t.outcome, t.error from queue._change_results(fail_jobs.ids, v_done) t;
end $$;
comment on function queue.fail_jobs(bigint[], text) is
  'Ends unfinished jobs as failed, reason operator, with message as their error; they are not retried.'
    ' The claims of running ones are lost. Finished ones are refused (QJ003). Returns a row for each id:'
    ' failed, or an error with its state.';

-- Locks: as in operate/change.sql. Raises: 22023, QJ008.
create or replace function queue.done(ids bigint[])
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_before jsonb;
  v_job record;
  v_done bigint[] := '{}'::bigint[];
  v_taken record;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator}', done.ids);
  end if;
  perform queue._lock_all_for_change(done.ids);
  v_before := queue._jobs_before(done.ids);
  for v_job in select distinct u.id from unnest(done.ids) u (id) order by u.id loop
    select v_job.id, g.* into v_job from queue._try_lock_job(v_job.id) g;
    if v_job.standing = 'running' then
      perform queue._succeed(array[v_job.id], array[v_job.claim], null);
      update queue.finished f set reason = 'operator' where f.id = v_job.id;
      perform queue._notify_abort(v_job.id, v_job.claim, v_job.worker_id, 'done');
    elsif v_job.standing = 'open' then
      v_taken := queue._dequeue(v_job.id);
      perform queue._finish_unclaimed(array[v_job.id], 'succeeded', 'operator', null);
      perform queue._advance(p_ended => array[v_job.id], p_keys => v_taken.keys);
    elsif v_job.standing = 'finished' then
      -- the failure is counted before it disappears; a job that has succeeded stays as it is
      perform queue._count_ends_of(array[f.id], false) from queue.finished f
      where f.id = v_job.id and f.state <> 'succeeded';
      update queue.finished f
      set state = 'succeeded', reason = 'operator', finished_at = clock_timestamp(), worker_id = null
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
  perform queue._audit_jobs('done', '{}', v_done, v_before);
  return query select t.id, t.outcome, t.error from queue._change_results(done.ids, v_done) t;
end $$;
comment on function queue.done(bigint[]) is
  'Marks jobs as succeeded, reason operator, without running them: unfinished, failed and cancelled ones.'
    ' Jobs that need them can then run. The claims of running ones are lost. Jobs that have succeeded are'
    ' refused (QJ003). Returns a row for each id: succeeded, or an error with its state.';

-- operate/delete.sql
-- Deleting jobs and queues.

-- Locks: as in operate/change.sql. Raises: 22023, QJ008.
create or replace function queue.delete(ids bigint[], force boolean default false)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_before jsonb;
  v_done bigint[];
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator}', delete.ids);
  end if;
  perform queue._lock_all_for_change(delete.ids);
  v_before := queue._jobs_before(delete.ids, 'task');
  v_done := queue._delete(delete.ids, coalesce(delete.force, false));
  perform queue._announce();
  perform queue._audit_jobs('delete', jsonb_build_object('force', delete.force), v_done, v_before);
  return query
    select t.id, case when t.id in (select unnest(v_done)) then 'deleted'
      else t.outcome || coalesce(', needed by job ' || n.id, '') end,
      case when t.id not in (select unnest(v_done)) then t.error end
    from queue._change_results(delete.ids, v_done) t
    left join lateral (
      select d.job_id as id
      from queue.need d
      where d.need_id = t.id and t.outcome is distinct from 'running'
        and not exists (select from queue.finished f where f.id = d.job_id)
      order by d.job_id limit 1) n on true;
end $$;
comment on function queue.delete(bigint[], boolean) is
  'Removes jobs and every trace of them. A running job, or one that an unfinished job outside the list'
    ' needs, is refused (QJ003) without force. With force its claim is lost, and jobs that need it count it'
    ' as failed unless it had succeeded. Returns a row for each id: deleted, or an error with its state.';

-- Locks: as in operate/change.sql. It reads the whole log to find the queue's jobs.
-- Raises: 22023 (no such queue), QJ006, QJ008.
create or replace function queue.delete_queue(name text, force boolean default false)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_later bigint[];
  v_ids bigint[];
  v_done bigint[];
  v_deleted integer := 0;
  v_open bigint;
  v_running bigint;
  v_need record;
  v_before jsonb;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_queue('{operator}', delete_queue.name);
  end if;
  perform queue._check_isolation();
  perform queue._check_queue(delete_queue.name);
  perform from queue.active_job aj
  where aj.lane = any (array(select l.lane from queue.lane l where l.queue = delete_queue.name))
  order by aj.id for no key update;
  perform queue._admit_all();
  if not exists (select from queue.queue_config c where c.queue = delete_queue.name)
    and not exists (select from queue.lane l where l.queue = delete_queue.name)
    and not exists (select from queue.job_now j where j.queue = delete_queue.name) then
    perform queue._invalid('no such queue', 'queue.queues lists them.', 'queue: ' || delete_queue.name);
  end if;
  -- again, because the end of a claim admits what was committed meanwhile (operate/delete.queue_defer.spec);
  -- this ends, because no job that is admitted under this admission lock can run
  loop
    v_later := array(select u.id from queue.unadmitted u);  -- jobs committed since count as deferred later
    v_ids := array(
      select j.id from queue.job_now j
      where j.queue = delete_queue.name and j.id <> all (v_later) order by j.id);
    exit when v_ids = '{}';
    if delete_queue.force is not true then
      select count(*), count(*) filter (where aj.claim is not null) into v_open, v_running
      from unnest(v_ids) u (id) left join queue.finished f on f.id = u.id
      left join queue.active_job aj on aj.id = u.id where f.id is null;
      if v_open > 0 then
        perform queue._queue_not_empty(delete_queue.name,
          format('unfinished jobs: %s, of these running: %s', v_open, v_running));
      end if;
      select d.job_id, d.need_id into v_need
      from queue.need d
      where d.need_id = any (v_ids) and not exists (select from queue.finished f where f.id = d.job_id)
        limit 1;
      if found then
        perform queue._queue_not_empty(delete_queue.name,
          format('job %s of another queue needs job %s', v_need.job_id, v_need.need_id));
      end if;
    end if;
    v_done := queue._delete(v_ids, true);
    if cardinality(v_done) < cardinality(v_ids) then
      perform queue._queue_not_empty(delete_queue.name,
        format('jobs that another transaction is changing: %s', cardinality(v_ids) - cardinality(v_done)));
    end if;
    v_deleted := v_deleted + cardinality(v_done);
  end loop;
  delete from queue.lane l where l.queue = delete_queue.name;
  delete from queue.share_tag t where t.queue = delete_queue.name;
  v_before := queue._queue_before(delete_queue.name) || jsonb_build_object('jobs', v_deleted);
  delete from queue.queue_config c where c.queue = delete_queue.name;
  delete from queue.pause p where p.queue = delete_queue.name;
  delete from queue.rate_start r where r.key = 'q' || delete_queue.name;
  delete from queue.semaphore s where s.key = 'q' || delete_queue.name;
  perform queue._announce();
  perform queue._audit('delete_queue', jsonb_build_object('name', delete_queue.name, 'force',
    delete_queue.force), array[delete_queue.name], v_before);
  return v_deleted;
end $$;
comment on function queue.delete_queue(text, boolean) is
  'Removes a queue with its settings and all its finished jobs. It is refused (QJ006) without force if'
    ' the queue has unfinished jobs, or jobs that an unfinished job of another queue needs; with force these'
    ' are removed as by queue.delete. Returns the number of removed jobs. A job deferred later creates the'
    ' queue again, without settings.';

-- Raises: QJ006, always.
create or replace function queue._queue_not_empty(p_queue text, p_detail text)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ006', message = 'queue not empty',
    detail = format('queue: %s, %s', p_queue, p_detail),
    hint = 'Let them end or move them, or pass force => true to remove them.';
end $$;

-- Deletes those of the jobs that may be deleted, and returns their ids. Finished jobs, and ready ones that
-- hold nothing, are deleted as sets. The others are first ended, which releases what they held.
-- Locks: the caller holds the admission lock; the jobs' rows by skip locked.
create or replace function queue._delete(p_ids bigint[], p_force boolean)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_job record;
  v_finished bigint[];
  v_plain bigint[];
  v_open bigint[] := '{}'::bigint[];
  v_claims bigint[] := '{}'::bigint[];
  v_workers bigint[] := '{}'::bigint[];
  v_all bigint[];
  v_needed bigint[];
  v_waiting bigint[];
  v_taken record;
begin
  perform queue._forget_deleted();
  v_finished := array(
    select f.id from queue.finished f
    where f.id = any (p_ids) and not exists (select from queue.pending_settlement h
      where h.job_id = f.id and h.kind in ('ended', 'again'))
    for update skip locked);
  v_plain := array(
    select aj.id from queue.active_job aj
    where aj.id = any (p_ids) and aj.claim is null
      and aj.flags & ~(128/* lease */ | 512/* retain */ | 2048/* overridden */ | -32768/* large */) = 0
      and aj.deadline >= '0001-01-01 00:00+00'
      and (select d.need_id from queue.need d where d.need_id = aj.id limit 1) is null
    for update skip locked);
  for v_job in
    select u.id, g.standing, g.claim, g.worker_id
    from (select distinct u.id from unnest(p_ids) u (id)
      where u.id not in (select unnest(v_finished || v_plain)) order by u.id desc) u
    cross join lateral queue._try_lock_job(u.id) g
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
      where d.need_id = any (v_all) and d.job_id not in (select unnest(v_all))
        and (select f.id from queue.finished f where f.id = d.job_id) is null);
    exit when v_needed = '{}';
    v_all := array(select u.id from unnest(v_all) u (id) where u.id not in (select unnest(v_needed)));
  end loop;
  insert into queue.deleted (id)
  select f.id from queue.finished f where f.id = any (v_all) and f.state = 'succeeded';
  -- not (not in): in alone would become a join, and these settings have only the slowest kind for it
  v_waiting := array(
    select u.id from unnest(v_open, v_claims) u (id, claim)
    where u.claim is null and not u.id not in (select unnest(v_all)));
  -- all out of their places before any turn is passed on, so that none of them gets it
  v_taken := queue._dequeue_all(v_waiting);
  if cardinality(v_taken.ids) > 0 then
    perform queue._finish_unclaimed(v_taken.ids, 'cancelled', 'deleted', null);
    perform queue._advance(p_ended => v_taken.ids, p_keys => v_taken.keys);
  end if;
  v_all := array(select u.id from unnest(v_all) u (id)
    where u.id not in (select unnest(v_waiting)) or not u.id not in (select unnest(v_taken.ids)));
  for v_job in select u.id, u.claim, u.worker_id
    from unnest(v_open, v_claims, v_workers) u (id, claim, worker_id)
    where u.claim is not null and not u.id not in (select unnest(v_all)) loop
    perform queue._end_attempt('{"outcome": "aborted"}', v_job.id, v_job.claim, true);
    perform queue._notify_abort(v_job.id, v_job.claim, v_job.worker_id, 'deleted');
  end loop;
  delete from queue.active_job aj where aj.id = any (v_plain);
  perform queue._delete_rows(v_all);
  -- a job that waits for one of several, of which none is left, need not wait
  perform queue._advance(p_changed => v_all);
  return v_all;
end $$;

-- operate/retry.sql
-- Manual retries: finished jobs become unfinished again, under their old ids and with their history.

-- Locks: the jobs' rows of queue.active_job and queue.finished, waited for in the order of ids; the admission
-- lock, waited for.
-- Raises: 22023, QJ008.
create or replace function queue.retry(ids bigint[], force boolean default false,
  from_step text default null, changes jsonb default null)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_changes jsonb;
  v_step text;
  v_no integer;
  v_without bigint[] := '{}'::bigint[];
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator}', retry.ids);
    perform queue._require_queue('{operator}', retry.changes ->> 'queue')
    where retry.changes ->> 'queue' <> '';
  end if;
  perform queue._check_isolation();
  perform queue._check_ids(retry.ids);
  v_changes := queue._check_changes('changes', retry.changes);
  if retry.from_step is not null then
    select k.name, k.no into v_step, v_no from queue._step_key(retry.from_step) k;
    v_without := array(
      select distinct j.id from queue.job j
      where j.id = any (retry.ids) and not queue._has_step(j.id, v_step, v_no));
  end if;
  return query select r.id, r.outcome, r.error
    from queue._retry(array(select u.id from unnest(retry.ids) u (id) where u.id <> all (v_without)),
      coalesce(retry.force, false), 'retry', jsonb_build_object('force', retry.force, 'from_step',
      retry.from_step, 'changes', nullif(v_changes, '{}')), v_step, v_no, v_changes) r;
  return query
    select j.id, j.state, 'QJ009'::text from queue.jobs j where j.id = any (v_without) order by j.id;
end $$;
comment on function queue.retry(bigint[], boolean, text, jsonb) is
  'Runs jobs again: finished ones (failed, cancelled, succeeded), and at once those that wait for a'
    ' retry, sleep, or wait for a signal or event. The counters of failures, crashes and yields are reset; a'
    ' step that has failed for good runs again, unless the handler has gone on to another since. A'
    ' running job, or one whose expires_at has passed, is refused (QJ003) without force; with force the'
    ' running claim is lost. A job that has never started is refused (QJ004) while another job holds its'
    ' queueing lock. from_step: a finished step, from which the job continues; that step and those that'
    ' finished later are forgotten. A job without that step is refused (QJ009). changes: as in the'
    ' options of fail, retry_at or retry_in (the time, in place of at once), and priority, queue and lock'
    ' (as it is, not a template; empty text for none). In its new lock the job has the place of its id. A'
    ' job that is refused does not change. Returns a row for each id: the new state in outcome, or an error'
    ' with its state.';

-- Locks and errors: as retry.
create or replace function queue.retry_failed(task text default null, queue text default null,
  max_jobs integer default 1000, after_id bigint default null)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_queue('{operator}', retry_failed.queue);
  end if;
  perform queue._check_isolation();
  if retry_failed.task is not null then
    perform queue._check_name('task', retry_failed.task);
  end if;
  if retry_failed.queue is not null then
    perform queue._check_name('queue', retry_failed.queue);
  end if;
  if retry_failed.max_jobs not between 1 and 1000 then
    perform queue._invalid('max_jobs must be 1 to 1000',
      'Retry at most 1,000, then call again with the last id as after_id.',
      'max_jobs: ' || retry_failed.max_jobs);
  end if;
  return query
    select r.id, r.outcome, r.error
    from queue._retry(array(
      select f.id from queue.finished f
      join queue.job_now j on j.id = f.id
      where f.state = 'failed' and (retry_failed.after_id is null or f.id > retry_failed.after_id)
        and (retry_failed.task is null or j.task = retry_failed.task)
        and (retry_failed.queue is null or queue._matches(j.queue, retry_failed.queue))
      order by f.id limit coalesce(retry_failed.max_jobs, 1000)), false, 'retry_failed',
      jsonb_build_object('task', retry_failed.task, 'queue', retry_failed.queue, 'max_jobs',
        retry_failed.max_jobs, 'after_id', retry_failed.after_id)) r;
end $$;
comment on function queue.retry_failed(text, text, integer, bigint) is
  'Runs queue.retry on failed jobs, oldest first: those of a task, of queues (a name, prefix* or *), or'
    ' NULL: of all. It retries at most max_jobs, which is at most 1,000; if it returns that many rows, call'
    ' it again with the last id as after_id.';

-- The outcome for each id, in the given order. If a step is given (p_step, p_no), a job that runs again
-- forgets it and those after it, before it goes through its gates. p_changes: the result of _check_changes,
-- also written before it does; a finished job is in no lock, so it just joins the other one. A job that has
-- never started takes its queueing lock again, and is refused (QJ004) if another job holds it.
-- Locks: first of all the queueing locks' rows (_retake_queueing_locks); then as retry.
-- Why no job comes back without its key: jobs that ended while this waited for the admission lock are checked
-- again under it. What else others may change meanwhile is looked at under it, too: whether a job has still
-- failed, and whether the caller may still use its queue.
-- Two sessions: operate/retry.cancel_key.spec, operate/retry.lock.spec, operate/retry.twice.spec.
create or replace function queue._retry(p_ids bigint[], p_force boolean, p_call text, p_args jsonb,
  p_step text default null, p_no integer default null, p_changes jsonb default null)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security invoker rows 10 as $$
declare
  v_before jsonb;
  v_job record;
  v_at constant timestamptz := queue._retry_time(p_changes);
  v_change constant jsonb := nullif(p_changes - '{retry_at,retry_in}'::text[], '{}');
  v_done bigint[] := '{}'::bigint[];
  v_back bigint[] := '{}'::bigint[];
  v_keyed bigint[];
  v_unkeyed bigint[];
begin
  v_keyed := queue._retake_queueing_locks(p_ids);
  perform from queue.active_job aj where aj.id = any (p_ids) order by aj.id for no key update;
  perform from queue.finished f where f.id = any (p_ids) order by f.id for update;
  perform queue._admit_all();
  perform queue._require_jobs('{operator}', p_ids);  -- they may have moved while this waited
  v_before := queue._jobs_before(p_ids, variadic array(
    select k from jsonb_object_keys(v_change - 'queue') k
    union all select 'scheduled_at' where v_at is not null));
  for v_job in
    select j.id, aj.claim, aj.worker_id, f.id is not null as is_finished, f.state, w.reason,
      j.claims,
      j.flags & 64/* expires */ <> 0
        and (j.options ->> 'expires_at')::timestamptz <= clock_timestamp() as is_expired,
      exists (select from queue.pending_settlement h where h.job_id = j.id and h.kind in ('ended', 'again'))
        as is_ending,
      f.id is not null and j.queueing_lock is not null and j.claims = 0
        and not (f.state = 'succeeded' and f.worker_id is not null)
        and (select k.job_id from queue.queueing_lock k where k.key = j.queueing_lock) is distinct from j.id
          as lacks_key
    from (select distinct u.id from unnest(p_ids) u (id)) u
    join queue.job_now j on j.id = u.id
    left join queue.active_job aj on aj.id = j.id
    left join queue.finished f on f.id = j.id
    left join queue.waiting w on w.id = j.id
    order by j.id
  loop
    if v_job.is_expired and not p_force or v_job.is_ending
      or p_call = 'retry_failed' and v_job.state is distinct from 'failed' then
      continue;
    elsif v_job.lacks_key then
      v_unkeyed := v_unkeyed || v_job.id;
    elsif v_job.is_finished then
      -- it may have ended meanwhile, and another call may hold its row and wait for the admission lock
      perform from queue.finished f where f.id = v_job.id for update skip locked;
      continue when not found;
      perform queue._forget_steps(v_job.id, p_step, p_no);
      v_back := v_back || v_job.id;
      v_done := v_done || v_job.id;
    elsif v_job.claim is not null then
      if p_force and queue._take_back(v_job.id, v_job.claim, v_job.worker_id, v_job.is_expired, p_step, p_no,
        v_at, v_change) then
        v_done := v_done || v_job.id;
      end if;
    elsif v_job.reason in ('schedule', 'signal') and v_job.claims > 0 then
      continue when (select t.place from queue._dequeue(v_job.id) t) is null;
      delete from queue.suspended w where w.job_id = v_job.id;
      delete from queue.expiry e where v_job.is_expired and e.id = v_job.id;
      perform queue._forget_steps(v_job.id, p_step, p_no);
      perform queue._reset_counters(array[v_job.id], v_at);
      perform queue._change_on_retry(array[v_job.id], v_change) where v_change is not null;
      perform queue._advance(p_arrived => array[v_job.id]);
      perform queue._change_lock(v_job.id, v_change ->> 'lock') where v_change ? 'lock';
      v_done := v_done || v_job.id;
    end if;
  end loop;
  perform queue._drop_queueing_locks(array(select u.id from unnest(v_keyed) u (id)
    where u.id not in (select unnest(v_done))), 8448/* queueing_lock */)
  where v_keyed is not null;
  perform queue._requeue_finished(v_back, v_at, v_change);
  perform queue._announce();
  perform queue._audit_jobs(p_call, p_args, v_done, v_before, v_change ->> 'queue');
  return query select r.id, r.outcome, r.error from queue._change_results(p_ids, v_done, v_unkeyed) r;
end $$;

-- The time of a retry by its changes; NULL: at once.
create or replace function queue._retry_time(p_changes jsonb)
returns timestamptz language plpgsql volatile parallel unsafe security invoker as $$
begin
  return coalesce(queue._timestamp('retry_at', p_changes -> 'retry_at'),
    clock_timestamp() + queue._interval('retry_in', p_changes -> 'retry_in'));
end $$;

-- Takes the free queueing locks of finished jobs that have never started, and returns the jobs that got one:
-- not those for which another call took it while this one waited.
-- Locks: the locks' rows, in their order, before anything else: a session that defers such a job may hold
-- them long.
create or replace function queue._retake_queueing_locks(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_keyed bigint[];
begin
  v_keyed := array(
    select f.id from unnest(p_ids) u (id)
    cross join lateral (
      select f.id from queue.finished f join queue.job_now j on j.id = f.id
      where f.id = u.id and j.queueing_lock is not null and j.claims = 0
        and not (f.state = 'succeeded' and f.worker_id is not null)
      offset 0) f);
  with taken as (
    insert into queue.queueing_lock (key, job_id)
    select j.queueing_lock, j.id from queue.job j where j.id = any (v_keyed) order by j.queueing_lock, j.id
    on conflict on constraint queueing_lock_pkey do nothing
    returning job_id)
  select array_agg(t.job_id) into v_keyed from taken t;
  return v_keyed;
end $$;

-- Ends the claim of a running job that is to run again, and tells its worker; false: another session is
-- ending it. With a step (p_step, p_no) the job forgets it, and those after it. Settling makes the changes
-- (p_change), after it has released what the claim held under the old names.
-- Locks: the caller holds the admission lock; the claim's row of queue.active_job by skip locked.
create or replace function queue._take_back(p_id bigint, p_claim bigint, p_worker bigint,
  p_is_expired boolean, p_step text, p_no integer, p_at timestamptz, p_change jsonb)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform from queue.active_job aj where aj.id = p_id and aj.claim = p_claim for update skip locked;
  if not found then
    return false;
  end if;
  delete from queue.expiry e where p_is_expired and e.id = p_id;
  perform queue._forget_steps(p_id, p_step, p_no);
  perform queue._end_attempt(jsonb_strip_nulls(jsonb_build_object('outcome', 'retried', 'error',
    'taken back by a retry with force', 'at', p_at, 'change', p_change)), p_id, p_claim, true);
  perform queue._notify_abort(p_id, p_claim, p_worker, 'retried');
  return true;
end $$;

-- Deletes a step of a job, and all that were finished later or only begun. The jobs that these steps awaited
-- hold the job no longer. A wait for jobs ends its claim, so it is the last step of that. Without a step
-- (p_name is NULL) a step that has failed for good runs again, unless the handler has gone on to another one.
-- Locks: the caller holds the admission lock, and the job's row of queue.active_job or queue.finished, if
-- there is one. Why no wake-up is lost: nobody waits for a step, and the caller sends the job through its
-- gates afterwards.
create or replace function queue._forget_steps(p_id bigint, p_name text, p_no integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_from record;
begin
  if p_name is null then
    delete from queue.step s
    where s.job_id = p_id and s.error is not null and s.finished_at is not null and not exists (
      select from queue.step t
      where t.job_id = s.job_id
        and (t.claim, coalesce(t.finished_at, 'infinity')) > (s.claim, s.finished_at));
    return;
  end if;
  select f.claim, f.finished_at into v_from from queue.step f
  where f.job_id = p_id and f.name = p_name and f.no = coalesce(p_no, 1);
  if found then
    update queue.need d set claim = null where d.job_id = p_id and d.claim >= v_from.claim;
    delete from queue.step s
    where s.job_id = p_id
      and ((s.claim, s.finished_at) < (v_from.claim, v_from.finished_at)) is not true;
  end if;
end $$;

-- Makes finished jobs unfinished: they join their locks by their old ids, and go through the gates; jobs that
-- need them and have passed that gate go back to wait. p_at, p_change: as in _take_back; they are in no lock
-- yet, so the changes come first.
-- Locks: the caller holds the admission lock and the rows of queue.finished; rows of queue.active_job by skip
-- locked.
create or replace function queue._requeue_finished(p_ids bigint[], p_at timestamptz, p_change jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_joined record;
begin
  if p_ids = '{}' then
    return;
  end if;
  perform queue._count_ends_of(p_ids, false);
  with gone as (
    delete from queue.finished f where f.id = any (p_ids)
    returning f.id, f.attempts, f.started_at, f.state = 'succeeded'
      and f.worker_id is not null as was_claimed)
  insert into queue.job_override as s (id, attempts, claims, started_at, has_steps)
  select g.id, g.attempts, g.was_claimed::integer, g.started_at,
    exists (select from queue.step t where t.job_id = g.id)
  from gone g
  on conflict on constraint job_override_pkey do update
    set (attempts, claims, started_at, has_steps) = (excluded.attempts, s.claims + excluded.claims,
      coalesce(excluded.started_at, s.started_at), excluded.has_steps);
  perform queue._reset_counters(p_ids, p_at);
  perform queue._change_on_retry(p_ids, p_change) where p_change is not null;
  perform queue._write_lock(p_ids, p_change ->> 'lock') where p_change ? 'lock';
  insert into queue.expiry (id, at)
  select j.id, (j.options ->> 'expires_at')::timestamptz from queue.job j
  where j.id = any (p_ids) and j.flags & 64/* expires */ <> 0
    and (j.options ->> 'expires_at')::timestamptz > clock_timestamp();
  v_joined := queue._join_locks(p_ids);
  perform queue._advance(
    p_arrived => p_ids || v_joined.displaced, p_turned => v_joined.passed, p_keys => v_joined.keys,
    p_changed => p_ids);
end $$;

-- operate/pause.sql
-- Pausing and resuming queues and tasks. A paused task is a gate: its jobs wait there. The jobs of a paused
-- queue stay in their lanes, from which no worker claims them (queue.lane, paused_until; work/claim.sql).
-- Which call applies: base/queue_names.sql. A pause that ends by time wakes workers by _next_due
-- (work/maintenance.sql).

-- Locks: the admission lock, waited for. Raises: 22023, QJ008.
create or replace function queue.pause(queue text default null, until timestamptz default null,
  task text default null)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_before jsonb;
  v_affected integer;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_queue('{operator}', pause.queue);
  end if;
  perform queue._check_isolation();
  perform queue._lock_admission(true);
  v_before := queue._pauses_before(pause.queue, pause.task);
  v_affected := queue._set_pause(pause.queue, pause.task, true, pause.until);
  perform queue._audit('pause', jsonb_build_object('queue', pause.queue, 'task', pause.task, 'until',
    pause.until), array[coalesce(pause.queue, '*')], v_before);
  return v_affected;
end $$;
comment on function queue.pause(text, timestamptz, text) is
  'Stops jobs in the queue (a name, prefix* or *; NULL: all) or of the task from starting until resumed,'
    ' or until a time. Running jobs continue. Jobs keep their state, with reason paused; those of a paused'
    ' task that waited for a lock or a limit are ready meanwhile. Returns the number of affected jobs, not'
    ' counting running ones.';

-- Locks: the admission lock, waited for. Raises: 22023, QJ008.
create or replace function queue.resume(queue text default null, task text default null)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_before jsonb;
  v_affected integer;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_queue('{operator}', resume.queue);
  end if;
  perform queue._check_isolation();
  perform queue._lock_admission(true);
  v_before := queue._pauses_before(resume.queue, resume.task);
  v_affected := queue._set_pause(resume.queue, resume.task, false, null);
  perform queue._audit('resume', jsonb_build_object('queue', resume.queue, 'task', resume.task),
    array[coalesce(resume.queue, '*')], v_before);
  return v_affected;
end $$;
comment on function queue.resume(text, text) is
  'Ends a pause of the queue or task; the latest call of pause or resume that matches a queue wins.'
    ' Without a task it also ends the pauses of tasks on those queues; with a task, a pause of the queue'
    ' stays. Returns the number of affected jobs, not counting running ones.';

-- Records and applies a call of pause or resume, and deletes earlier calls that it covers. A pause whose time
-- is over counts as ended: jobs that an earlier pause stopped can start.
-- Locks: the admission lock, waited for; rows of queue.active_job by skip locked. Raises: 22023, QJ008.
-- Why no job is missed: a ready job whose row another transaction holds is handed over (_readmit) until the
-- row is free. A call that waits for the admission lock first admits new jobs, and so stops them itself. Jobs
-- that a fetch has claimed start; if the claim is rolled back, the next admission finds them.
create or replace function queue._set_pause(p_queue text, p_task text, p_is_paused boolean,
  p_until timestamptz)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
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
  where (v_queue is null or p.queue = v_queue or right(v_queue, 1) = '*'
    and starts_with(p.queue, left(v_queue, -1)))
    and (p.task is not distinct from p_task or p_task is null and not p_is_paused)
    and (p.is_paused or not p_is_paused or p_task is not null
      or not exists (select from queue.pause t where t.task is not null));
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
      and exists (select from queue.job_now j
                  where j.id = w.id and j.task = p_task
                    and (v_queue is null or queue._matches(j.queue, v_queue)));
    perform queue._return_to_pause(p_task, v_queue, nullif(p_until, 'infinity'));
    -- ready jobs of the task leave queue.active_job, so that fetch does not meet them
    v_ids := array(
      select aj.id from queue.active_job aj join queue.job_now j on j.id = aj.id
      where j.task = p_task and aj.claim is null
        and (v_queue is null or queue._matches(j.queue, v_queue)));
    with gone as (
      delete from queue.active_job aj
      where aj.id = any (array(select aj.id from queue.active_job aj
        where aj.id = any (v_ids) and aj.claim is null
        and aj.flags & 7/* lock_or_keys */ = 0 and aj.deadline >= '0001-01-01 00:00+00' for update skip locked))
      returning aj.id)
    insert into queue.waiting (id, reason, at) select g.id, 'task_paused', nullif(p_until, 'infinity')
    from gone g;
    perform queue._readmit(array(select aj.id from queue.active_job aj
      where aj.id = any (v_ids) and aj.claim is null));
    perform queue._rewind_due_mark();
  elsif p_task is not null or not p_is_paused then
    with gone as (
      delete from queue.waiting w
      where w.reason = 'task_paused'
        and exists (select from queue.job_now j
                    where j.id = w.id and (p_task is null or j.task = p_task)
                      and (v_queue is null or queue._matches(j.queue, v_queue)))
      returning w.id)
    select array_agg(g.id order by g.id) into v_ids from gone g;
    perform queue._advance(p_arrived => v_ids);
  end if;
  perform queue._resume_schedules();
  perform queue._announce();
  if not v_is_over then
    perform queue._notify_pause();
  end if;
  return queue._count_open(v_queue, p_task);
end $$;

-- Moves jobs that wait behind the gate of paused tasks, for a slot or for their turn, back before that gate.
-- Reads whole tables.
-- Locks: the caller holds the admission lock.
-- Why no job is missed: jobs behind the gate can proceed only under the admission lock; a job whose claim has
-- ended and is not settled yet (pending settlement) reaches the gate itself (_pass_gates).
-- Why no wake-up is lost: other tasks' jobs that waited behind these for a slot of a key get it, or wait for
-- the key's rate, here.
-- Why none is forgotten: resume finds rows of queue.waiting, and _admit_due finds them at their time. Two
-- sessions: operate/pause.fetch.spec.
create or replace function queue._return_to_pause(p_task text, p_queue text, p_until timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker
set plan_cache_mode = force_custom_plan set enable_seqscan = on set enable_hashjoin = on as $$
declare
  v_slots record;
begin
  select array_agg(w.id) as ids, array_agg(w.key) filter (where w.lane is not null) as keys,
    array_agg(w.lane) filter (where w.lane is not null) as lanes,
    array_agg(-1) filter (where w.lane is not null) as fewer
  into v_slots
  from queue.waiting w join queue.job_now j on j.id = w.id
  where w.reason = 'slot' and j.task = p_task
    and (p_queue is null or queue._matches(j.queue, p_queue));
  if v_slots.ids is not null then
    update queue.waiting w
    set reason = 'task_paused', at = p_until, key = null, lane = null, deadline = null, flags = null,
      attempt = null, has_several = null, weight = null
    where w.id = any (v_slots.ids);
    perform queue._never_discard(v_slots.ids);
  end if;
  if v_slots.keys is not null then
    perform queue._add_slots(v_slots.keys, v_slots.lanes, null, null, v_slots.fewer, null);
  end if;
  with recalled as (
    update queue.lock_member m set is_passed = false
    from queue.job_now j
    where j.id = m.id and m.is_passed and m.lock = j.lock and j.task = p_task
      and (p_queue is null or queue._matches(j.queue, p_queue))
      and not exists (select from queue.active_job aj where aj.id = m.id)
      and not exists (select from queue.waiting w where w.id = m.id)
      and not exists (select from queue.pending_settlement h
        where h.job_id = m.id and h.kind in ('ended', 'again'))
    returning m.id)
  insert into queue.waiting (id, reason, at) select r.id, 'task_paused', p_until from recalled r;
  if v_slots.keys is not null then
    perform queue._advance(p_keys => v_slots.keys);
  end if;
end $$;

-- The number of jobs of queues and of a task that are unfinished and not running. Reads whole tables.
create or replace function queue._count_open(p_queue text, p_task text)
returns integer language plpgsql stable parallel safe security invoker
set plan_cache_mode = force_custom_plan set enable_seqscan = on set enable_hashjoin = on as $$
begin
  return (
    select count(*)
    from (select aj.id from queue.active_job aj where aj.claim is null
          union all select w.id from queue.waiting w
          union all select m.id from queue.lock_member m
          where not exists (select from queue.active_job aj where aj.id = m.id)
            and not exists (select from queue.waiting w where w.id = m.id)) u
    join queue.job_now j on j.id = u.id
    where (p_queue is null or queue._matches(j.queue, p_queue))
      and (p_task is null or j.task = p_task)
      and not exists (select from queue.pending_settlement h where h.job_id = u.id and h.kind = 'ended'));
end $$;

-- operate/queues.sql
-- Queues, with their own limits, pauses and retention.

-- Locks: the queue's row, which a session that creates it may hold (not under the admission lock, so that no
-- other session waits for it); then the admission lock, waited for. Raises: 22023, QJ008; 40001 if the queue
-- is deleted at the same time. Two sessions: operate/queues.create_configure.spec. Running jobs count at
-- once; a lower limit lets them end.
create or replace function queue.configure_queue(name text, options jsonb)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_max_running integer;
  v_rate jsonb;
  v_rate_limit integer;
  v_rate_per interval;
  v_retain interval;
  v_before jsonb;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_queue('{operator}', configure_queue.name);
  end if;
  perform queue._check_isolation();
  perform queue._check_queue(configure_queue.name);
  perform queue._check_keys('options', configure_queue.options,
    array['max_running', 'paused', 'retain', 'rate']);
  v_rate := nullif(configure_queue.options -> 'rate', 'null');
  perform queue._check_rate('rate', v_rate);
  if coalesce(jsonb_typeof(configure_queue.options -> 'max_running'), 'null') not in ('null', 'number')
    or configure_queue.options ->> 'max_running' !~ '^[1-9][0-9]{0,8}$' then
    perform queue._invalid('max_running must be a whole number of at least 1, or null',
      'To stop the queue, pause it.');
  elsif coalesce(jsonb_typeof(configure_queue.options -> 'paused'), 'boolean') <> 'boolean' then
    perform queue._invalid('paused must be true or false', 'Pass a JSON boolean.');
  end if;
  v_max_running := (configure_queue.options ->> 'max_running')::integer;
  v_rate_limit := (v_rate ->> 'limit')::integer;
  v_rate_per := queue._interval('per', v_rate -> 'per');
  v_retain := queue._interval('retain', configure_queue.options -> 'retain');
  insert into queue.queue_config (queue) values (configure_queue.name)
  on conflict on constraint queue_config_pkey do nothing;
  perform queue._admit_all();
  v_before := queue._queue_before(configure_queue.name);
  update queue.queue_config c
  set max_running = case when configure_queue.options ? 'max_running' then v_max_running
    else c.max_running end,
    rate_limit = case when configure_queue.options ? 'rate' then v_rate_limit else c.rate_limit end,
    rate_per = case when configure_queue.options ? 'rate' then v_rate_per else c.rate_per end,
    retain = case when configure_queue.options ? 'retain' then v_retain else c.retain end,
    limited_at = clock_timestamp(), waits_for = null
  where c.queue = configure_queue.name
  returning c.retain into v_retain;
  if not found then
    raise exception using errcode = '40001', message = 'the queue was deleted meanwhile',
      detail = 'queue: ' || configure_queue.name,
      hint = 'Call queue.configure_queue again.';
  end if;
  update queue.lane l set extra_flags = case when v_retain is null then l.extra_flags & ~512/* retain */
    else l.extra_flags | 512/* retain */ end
  where l.queue = configure_queue.name;
  if v_retain is not null then
    update queue.active_job aj set flags = aj.flags | 512/* retain */
    where aj.id = any (array(select aj.id from queue.lane l join queue.active_job aj on aj.lane = l.lane
                            where l.queue = configure_queue.name
                              and aj.flags & 512/* retain */ = 0 for update of aj skip locked));
    update queue.waiting w set flags = w.flags | 512/* retain */
    where w.reason = 'slot'
      and w.lane = any (array(select l.lane from queue.lane l where l.queue = configure_queue.name));
  end if;
  perform queue._limit_queue(configure_queue.name);
  if configure_queue.options ? 'paused' then
    perform queue._set_pause(configure_queue.name, null, (configure_queue.options ->> 'paused')::boolean,
      null);
  end if;
  perform queue._announce();
  perform queue._audit('configure_queue', jsonb_build_object('name', configure_queue.name, 'options',
    configure_queue.options), array[configure_queue.name], v_before);
end $$;
comment on function queue.configure_queue(text, jsonb) is
  'Sets a queue''s own limits: max_running, rate {"limit", "per"} (never more starts in any window of that'
    ' length), retain, paused. Absent keys keep their value; null removes a limit.';

-- Locks: the queue's row, which another session that creates it may hold; if the queue is new and paused,
-- then the admission lock, waited for. Raises: 22023, QJ008.
create or replace function queue.create_queue(name text, paused boolean default false)
returns boolean language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_is_new boolean;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_queue('{operator}', create_queue.name);
  end if;
  perform queue._check_isolation();
  perform queue._check_queue(create_queue.name);
  insert into queue.queue_config (queue) values (create_queue.name)
  on conflict on constraint queue_config_pkey do nothing;
  v_is_new := found;
  if v_is_new and create_queue.paused then
    perform queue._set_pause(create_queue.name, null, true, null);
  end if;
  perform queue._audit('create_queue', jsonb_build_object('name', create_queue.name, 'paused',
    create_queue.paused), array[create_queue.name], jsonb_build_object('exists', not v_is_new));
  return v_is_new;
end $$;
comment on function queue.create_queue(text, boolean) is
  'Creates a queue without jobs, paused if asked. Returns whether it is new. Deferring does not need it.';

-- operate/shares.sql
-- Weights of shares.
-- Tests: admit/shares.sql.

-- Locks: the admission lock, waited for. Raises: 22023, QJ008.
-- Why it takes effect at once: ready jobs get tags by the new weight, which lie before the old ones: one
-- slice here, and one with each admission (admit/retag.sql).
-- Why no wake-up is lost: it makes no job ready; the cursor tells the next admission that there is more to
-- do.
create or replace function queue.configure_share(pattern text, options jsonb)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_weight jsonb;
  v_before jsonb;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform queue._check_isolation();
  perform queue._check_name('pattern', configure_share.pattern);
  perform queue._check_keys('options', configure_share.options, array['weight']);
  v_weight := configure_share.options -> 'weight';
  if v_weight is null then
    perform queue._invalid('weight is missing', 'Pass {"weight": 2}, or null for the default of 1.');
  elsif v_weight <> 'null' and (jsonb_typeof(v_weight) <> 'number' or not v_weight between '0.001' and '1000')
    then
    perform queue._invalid('weight must be a number from 0.001 to 1,000, or null',
      'A share of weight 3 gets three turns for each of a share of weight 1.',
      'weight: ' || left(v_weight::text, 200));
  end if;
  perform queue._lock_admission(true);
  v_before := (select jsonb_build_object('weight', c.weight) from queue.share_config c
    where c.pattern = configure_share.pattern);
  if v_weight = 'null' then
    delete from queue.share_config c where c.pattern = configure_share.pattern;
  else
    insert into queue.share_config as c (pattern, weight)
    values (configure_share.pattern, (v_weight #>> '{}')::double precision)
    on conflict on constraint share_config_pkey do update set weight = excluded.weight;
  end if;
  perform queue._begin_tags(t.queue, t.priority)
  from (
    select distinct t.queue, t.priority from queue.share_tag t
    where t.share <> '' and queue._matches(t.share, configure_share.pattern)) t;
  perform queue._retag(1000);
  perform queue._announce();
  perform queue._audit('configure_share', jsonb_build_object('pattern', configure_share.pattern, 'options',
    configure_share.options), null, v_before);
end $$;
comment on function queue.configure_share(text, jsonb) is
  'Sets the weight of the shares that match a name or prefix*; the longest pattern applies. A share of weight'
    ' 3 gets three turns for each turn of a share of weight 1, the default (null). The weight takes effect at'
    ' once, also for ready jobs.';

-- operate/keys.sql
-- Limits and rates of concurrency keys, changed while jobs run.
-- Tests: operate/keys.sql, operate/keys.fetch.spec, admit/rates.sql.

-- Locks: the admission lock, waited for. Raises: 22023, QJ008.
-- Why it takes effect at its commit: jobs with keys are claimed only under the admission lock, and the claim
-- reads limits and rates then; a ready job whose key is full goes back to queue.waiting. Running jobs count;
-- a lower limit lets them end. Starts before the key had a rate do not count.
-- Why no wake-up is lost: jobs that wait for keys with more room get their slots here.
create or replace function queue.configure_key(pattern text, options jsonb)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_old record;
  v_before jsonb;
  v_rate jsonb;
  v_keeps_rate boolean;
  v_others bigint[];  -- jobs that may set limits in place of those that are gone
  v_keys record;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform queue._check_isolation();
  perform queue._check_name('pattern', configure_key.pattern);
  perform queue._check_keys('options', coalesce(configure_key.options, 'null'), array['limit', 'rate']);
  if coalesce(jsonb_typeof(configure_key.options -> 'limit'), 'null') not in ('null', 'number')
    or configure_key.options ->> 'limit' !~ '^[1-9][0-9]{0,8}$' then
    perform queue._invalid('limit must be a whole number of at least 1, or null',
      'To start nothing, pause the queue or the task.');
  end if;
  v_rate := nullif(configure_key.options -> 'rate', 'null');
  perform queue._check_rate('rate', v_rate);
  perform queue._admit_all();
  select c.slots, c.rate_limit, c.rate_per into v_old from queue.key_config c
  where c.pattern = configure_key.pattern;
  v_before := jsonb_strip_nulls(jsonb_build_object('limit', v_old.slots, 'rate_limit', v_old.rate_limit,
    'rate_per', v_old.rate_per));
  if configure_key.options ? 'limit' then
    v_old.slots := (configure_key.options ->> 'limit')::integer;
  end if;
  if configure_key.options ? 'rate' then
    v_old.rate_limit := (v_rate ->> 'limit')::integer;
    v_old.rate_per := queue._interval('per', v_rate -> 'per');
  end if;
  v_keeps_rate := v_old.rate_limit is not null or not v_before ? 'rate_limit';
  delete from queue.key_config c where c.pattern = configure_key.pattern;
  insert into queue.key_config (pattern, slots, rate_limit, rate_per)
  select configure_key.pattern, v_old.slots, v_old.rate_limit, v_old.rate_per
  where num_nonnulls(v_old.slots, v_old.rate_limit) > 0;
  -- the terms of the last job that set a limit; _set_slots lets the configured ones override them
  v_others := queue._forget_gone_limits(configure_key.pattern);
  select array_agg(x.key) as keys, array_agg(x.slots) as slots, array_agg(x.id) as ids,
    array_agg(x.rate_limit) as rate_limits, array_agg(x.rate_per) as rate_pers
  into v_keys
  from (
    select s.key, s.limit_id as id, k.slots, k.rate_limit, k.rate_per
    from (select distinct on (s.key) s.key, s.rate_limit, s.rate_per, s.limit_id
          from queue.semaphore s
          where left(s.key, 1) = 'k' and queue._matches(substr(s.key, 2), configure_key.pattern)
          order by s.key, s.tick desc) s
    cross join lateral (
      -- without such a job only a rate that this call removes ends: the next jobs may have the same one
      select coalesce(min(k.slots), 2147483647) as slots,
        case when count(*) = 0 and v_keeps_rate then s.rate_limit else min(k.rate_limit) end as rate_limit,
        case when count(*) = 0 and v_keeps_rate then s.rate_per else min(k.rate_per) end as rate_per
      from queue._keys_of(array[s.limit_id], array[4/* keys */::smallint]) k where k.key = s.key) k
    union all
    select k.key, k.id, k.slots, k.rate_limit, k.rate_per
    from queue._keys_of(v_others, array_fill(4/* keys */::smallint, array[cardinality(v_others)])) k
    where exists (select from queue.semaphore s where s.key = k.key and s.limit_id = 0)) x;
  if v_keys.keys is not null then
    perform queue._set_slots(v_keys.keys, v_keys.slots, v_keys.ids, v_keys.rate_limits, v_keys.rate_pers);
    delete from queue.rate_start r
    where r.key = any (array(
      select s.key from unnest(v_keys.keys) u (key) join queue.semaphore s on s.key = u.key
      where s.rate_limit is null));
    perform queue._advance(p_keys => v_keys.keys);
    perform queue._advance_own();
  end if;
  perform queue._announce();
  perform queue._audit('configure_key', jsonb_build_object('pattern', configure_key.pattern, 'options',
    configure_key.options), null, v_before);
end $$;
comment on function queue.configure_key(text, jsonb) is
  'Sets the limit and the rate {"limit", "per"} of the concurrency keys that match a name or prefix*; the'
    ' longest pattern applies. They override the limits and rates of jobs at once, also for running and'
    ' waiting jobs. Absent options keep their value; null removes a limit or rate. To remove a rate and set'
    ' it again forgets earlier starts, unless the jobs have a rate of their own. See queue.semaphores.';

-- Forgets which job has set the limit and the rate of a key, if that job is gone: any other may set them.
-- Returns jobs that may do so at once: of each such key the newest that waits for a slot, and all that are
-- ready in the key's lanes. The others set them when they come to the slots.
-- Locks: the caller holds the admission lock.
create or replace function queue._forget_gone_limits(p_pattern text)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_gone record;
begin
  with gone as (
    update queue.semaphore s set limit_id = 0
    where left(s.key, 1) = 'k' and queue._matches(substr(s.key, 2), p_pattern)
      and not exists (select from queue.job j where j.id = s.limit_id)
    returning s.key, s.lanes)
  select array_agg(g.key) as keys, array(select distinct l from gone g cross join unnest(g.lanes) l) as lanes
  into v_gone from gone g;
  return array(
    select max(w.id) from unnest(v_gone.keys) u (key)
    join queue.waiting w on w.reason = 'slot' and w.key = u.key group by u.key
    union
    select aj.id from unnest(v_gone.lanes) u (lane)
    join queue.active_job aj on aj.lane = u.lane
    where aj.claim is null and aj.flags & 4/* keys */ <> 0);
end $$;

-- inspect/results.sql
-- Results: the outcome of a job, and waiting for it. succeed stores a result (work/finish.sql); it is kept as
-- long as its job (work/retention.sql).
--
-- A waiting client appends a row to queue.awaited and raises queue.awaited_seq to the job's id. A session
-- that ends a job looks for such rows only if its id is at most the sequence's last value: an end that nobody
-- waits for costs only that read. Neither waits for the other. Some ends may be missed, and polling covers
-- them: an end that is in progress while the row is appended, and a second client that raises the sequence at
-- the same time.

-- Raises: QJ001.
create or replace function queue.result(id bigint)
returns table (state text, result jsonb, error text)
language plpgsql stable parallel safe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{producer,worker,operator,reader}', array[result.id]);
  end if;
  return query select j.state, j.result, j.error from queue.jobs j where j.id = result.id;
  if not found then
    perform queue._job_not_found(result.id);
  end if;
end $$;
comment on function queue.result(bigint) is
  'Returns the job''s state and, once it has finished, its result or error. error: the last one, also'
    ' while the job waits for a retry.';

-- Raises: QJ001.
create or replace function queue.needs(id bigint)
returns table (need_id bigint, task text, state text, result jsonb, error text)
language plpgsql stable parallel safe security definer rows 5
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_allowed text[];
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{worker,operator,reader}', array[needs.id]);
    v_allowed := queue._allowed_queues('{worker,operator,reader}');
  end if;
  if not exists (select from queue.job j where j.id = needs.id) then
    perform queue._job_not_found(needs.id);
  end if;
  return query
    select d.id,
      j.task, case when j.id is null then 'deleted' when j.is_seen then j.state end, j.result, j.error
    from queue._direct_needs(needs.id) d
    left join lateral (
      select j.id, x.is_seen, j.state, case when x.is_seen then j.task end
        as task, case when x.is_seen then j.result end as result,
        case when x.is_seen then j.error end as error
      from queue.jobs j cross join lateral (select queue._allows(v_allowed, j.queue) as is_seen) x
      where j.id = d.id offset 0) j on true
    order by d.id;
end $$;
comment on function queue.needs(bigint) is
  'Returns the needs of a job, by id, with their tasks, states, results and last errors, for handlers'
    ' that depend on them. State deleted: deleted by force. For jobs in queues that the caller may not use,'
    ' it returns only the ids.';

-- Locks: none. Raises: QJ001.
create or replace function queue.await_result(id bigint)
returns table (state text, result jsonb, error text, channel text, wait_for interval)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_now timestamptz := clock_timestamp();
  v_since timestamptz;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  select r.state, r.result, r.error into state, result, error from queue.result(await_result.id) r;
  if not state in ('succeeded', 'failed', 'cancelled') then
    select min(a.since) into v_since from queue.awaited a where a.id = await_result.id;
    if v_since is null then
      insert into queue.awaited (id, since) values (await_result.id, v_now);
    end if;
    if await_result.id > (select s.last_value from queue.awaited_seq s) then
      perform setval('queue.awaited_seq', await_result.id);
    end if;
    -- often at first, because an end may be in progress
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
  'Returns the same as result, and how to wait for a job that has not finished: LISTEN on channel (NULL:'
    ' no notification will come) and call again; if the job still has not finished, wait for a notification'
    ' for at most wait_for and call again. Both are NULL once the job has finished.';

-- inspect/graph.sql
-- The graph of jobs that need each other.
-- Tests: defer/defer_group.sql.

-- Raises: QJ001.
create or replace function queue.graph(id bigint)
returns table (job_id bigint, need_id bigint, depth integer, task text, state text)
language plpgsql stable parallel safe security definer rows 20
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_ids bigint[];
  v_depths integer[];
  v_allowed text[] := queue._allowed_queues('{operator,reader}');
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator,reader}', array[graph.id]);
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
    left join lateral (
      select j.id, case when x.is_seen then j.task end as task, case when x.is_seen then j.state end as state
      from queue.jobs j
      cross join lateral (select queue._allows(v_allowed, j.queue) as is_seen) x
      where j.id = u.id offset 0) j on true
    left join lateral (
      select n.id, n.id in (select x from unnest(v_ids) x) as is_in
      from queue._neighbours(u.id, false) n (id) offset 0) n on n.is_in
    order by u.depth, u.id, n.id;
end $$;
comment on function queue.graph(bigint) is
  'Returns the jobs that a job needs and those that need it, recursively: a row for each need of each job'
    ' (need_id NULL: it has none), with the job''s task and state. depth: 0 for the job itself, -1 for its'
    ' needs, -2 for their needs, 1 for jobs that need it, and so on, by the shortest path.';

-- Every job that a job needs, or that needs it, recursively, itself included, and its distance. A walk that
-- carried the distance would reach a job once per path. So it carries only ids, and reaches them nearest
-- first: then a job is one step farther than the first job that led to it.
create or replace function queue._walk(p_id bigint, p_dependents boolean)
returns table (id bigint, depth integer) language plpgsql stable parallel safe security invoker rows 20 as $$
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
        select n.id, null, u.n from unnest(v_ids) with ordinality u (id, n)
        cross join lateral queue._neighbours(u.id, p_dependents) n (id)) y) x
    where x.n is not null
    order by x.n);
  for i in 2 .. cardinality(v_ids) loop
    v_depths[i] := v_depths[v_from[i]] + 1;
  end loop;
  return query select u.id, u.depth from unnest(v_ids, v_depths) u (id, depth);
end $$;

-- The jobs that a job needs, or that need it: for admitted jobs; for the job itself also before it is
-- admitted.
create or replace function queue._neighbours(p_id bigint, p_dependents boolean)
returns table (id bigint) language plpgsql stable parallel safe security invoker rows 5 as $$
begin
  if p_dependents then
    return query select d.job_id from queue.need d where d.need_id = p_id;
  else
    return query select d.id from queue._direct_needs(p_id) d;
  end if;
end $$;

-- inspect/why.sql
-- Explanations: why a job is not running, and which jobs come next.

-- Raises: QJ001.
create or replace function queue.why(id bigint)
returns text language plpgsql stable parallel safe security definer
set search_path = pg_catalog, pg_temp set jit = off as $$
declare
  v_job record;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator,reader}', array[why.id]);
  end if;
  select j.id, j.state, j.reason, j.queue, j.task, j.lock, j.scheduled_at, j.worker_id, j.claim, j.started_at,
    j.finished_at, j.error, w.reason as gate, w.key, w.at, l.paused_until, l.kind, aj.id as active_id
  into v_job
  from queue.jobs j
  left join queue.waiting w on w.id = j.id
  left join queue.active_job aj on aj.id = j.id
  left join queue.lane l on l.lane = aj.lane
  where j.id = why.id;
  if not found then
    perform queue._job_not_found(why.id);
  end if;
  case v_job.state
    when 'succeeded' then return format('it succeeded at %s', v_job.finished_at);
    when 'failed' then return format('it failed at %s: %s%s', v_job.finished_at, coalesce(v_job.reason, ''),
      coalesce(' (' || v_job.error || ')', ''));
    when 'cancelled' then return format('it was cancelled at %s: %s', v_job.finished_at, v_job.reason);
    when 'running' then
      return format('it has been running since %s on worker %s, claim %s%s%s', v_job.started_at,
        v_job.worker_id, v_job.claim, queue._why_running(why.id, v_job.claim),
        '; its worker has been told to abort it: ' || v_job.reason);
    when 'held' then return 'it is held; queue.unhold releases it';
    when 'scheduled' then
      return format('its time has not come: %s', v_job.scheduled_at) || queue._why_step_failed(v_job.id)
        || coalesce((select format('; its task %s is not known to worker %s', v_job.task, u.workers)
          from queue._unknown_since(why.id) u where u.times > 0), '');
    when 'waiting', 'upstream_failed' then
      if v_job.gate = 'signal' or exists (select from queue.suspended w where w.job_id = why.id) then
        return queue._why_suspended(why.id);
      end if;
      return case v_job.state when 'waiting' then 'it needs ' else 'a need failed; retry it: ' end
        || coalesce(queue._why_needs(why.id, v_job.state = 'upstream_failed'),
          'jobs that are being checked');
    else null;
  end case;
  if v_job.gate = 'task_paused' then
    return format('its task %s is paused%s', v_job.task, queue._why_until(v_job.at));
  elsif v_job.gate = 'parked' then
    return 'a large backlog is being admitted, which may contain older jobs of its lock';
  elsif v_job.gate = 'moving' then
    return 'its key is moving to another shard';
  elsif v_job.gate = 'slot' then
    return queue._why_no_slot(why.id, v_job.key);
  elsif v_job.state = 'blocked' then
    return queue._why_no_turn(why.id, v_job.lock);
  elsif v_job.active_id is null then
    v_job.paused_until := queue._paused_until(v_job.queue);
    v_job.at := queue._task_paused_until(v_job.task, v_job.queue);
  end if;
  if v_job.at > clock_timestamp() then
    return format('its task %s is paused%s', v_job.task, queue._why_until(v_job.at));
  elsif v_job.paused_until > clock_timestamp() then
    return format('its queue %s is paused%s', v_job.queue, queue._why_until(v_job.paused_until));
  elsif queue._live_workers(v_job.queue, clock_timestamp()) = 0 then
    return format('no live worker serves its queue %s', v_job.queue);
  elsif v_job.active_id is null then
    return case when exists (select from queue.pending_settlement h
      where h.job_id = why.id and h.kind = 'again')
      then 'its last run has just ended; the next fetch or tick admits it again'
      else 'it has not been admitted yet; the next fetch or tick admits it' end;
  elsif queue._is_queue_full(v_job.queue) then
    return queue._why_full(v_job.queue);
  elsif v_job.kind = 2/* lane_crashed */ then
    return 'it crashed before, so it runs alone, on a worker that runs nothing else';
  end if;
  return coalesce('no slot is free: ' || queue._why_no_slot_left(why.id),
    'it is ready: the next worker with a free slot claims it when its turn comes' || queue._why_share(why.id)
    || coalesce((select format('; its task %s was not known to worker %s', v_job.task, u.workers)
      from queue._unknown_since(why.id) u where u.times > 0), ''));
end $$;
comment on function queue.why(bigint) is
  'Explains why a job is not running: the job that holds its lock, the jobs that use its key, its needs,'
    ' how long it is paused or scheduled, or that no live worker serves its queue.';

create or replace function queue.peek(queues text[] default null, n integer default 10)
returns table (id bigint, task text, args jsonb, queue text, priority integer, lock text, attempts integer,
  scheduled_at timestamptz, deadline timestamptz)
language plpgsql stable parallel safe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_hidden jsonb;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    queues := queue._narrow_queues('{worker,operator,reader}', queues);
  end if;
  if peek.n is null or peek.n < 1 then
    perform queue._invalid('n must be at least 1', 'Pass how many jobs to show.');
  end if;
  v_hidden := queue._hidden_paths();
  return query
    select j.id, j.task, queue._cut(v_hidden -> j.task, j.args), j.queue,
      j.priority, j.lock, j.attempts, j.scheduled_at, j.deadline
    from (
      select c.id, g.priority, c.deadline, c.first_id
      from (
        select l.queue, l.priority, array_agg(l.lane) as lanes, array_agg(l.low_deadline) as deadlines,
          array_agg(l.low_id) as ids
        from queue.lane l
        where not l.is_idle and (l.paused_until is null or l.paused_until <= clock_timestamp())
          and (peek.queues is null or exists (select from unnest(peek.queues) q
            where queue._matches(l.queue, q)))
          and (l.kind = 0/* lane_plain */ or not queue._is_queue_full(l.queue))
        group by l.queue, l.priority) g
      cross join lateral (
        select aj.id, aj.deadline, first_value(aj.id) over (order by aj.deadline, aj.id) as first_id
        from unnest(g.lanes, g.deadlines, g.ids) l (lane, deadline, id)
        cross join lateral (
          select aj.id, aj.deadline from queue.active_job aj
          where aj.lane = l.lane and (aj.deadline, aj.id) >= (l.deadline, l.id) and aj.claim is null
          order by aj.deadline, aj.id limit peek.n) aj
        order by aj.deadline, aj.id limit peek.n) c
      union all
      (select a.id, a.priority, coalesce(a.deadline, 'infinity'),
        min(a.id) over (partition by a.queue, a.priority)
       from queue.unadmitted a
       where a.flags & 32/* held */ = 0 and a.needs is null
         and coalesce(a.scheduled_at <= clock_timestamp(), true)
         and (a.lock is null or not exists (select from queue.lock_member m where m.lock = a.lock))
         and (peek.queues is null or exists (select from unnest(peek.queues) q
           where queue._matches(a.queue, q)))
         and coalesce(queue._paused_until(a.queue) <= clock_timestamp(), true)
       order by a.priority desc, coalesce(a.deadline, 'infinity'), a.id limit peek.n)
      order by priority desc, first_id, deadline, id limit peek.n) c
    cross join lateral (select j.* from queue.jobs j where j.id = c.id offset 0) j
    order by c.priority desc, c.first_id, c.deadline, c.id;
end $$;
comment on function queue.peek(text[], integer) is
  'Returns the jobs that fetch would claim next, in order. Changes nothing. Sensitive args read *** for all'
    ' but the owner.';

-- When the timeout or lease of a claim ends, or that its timeout has passed; empty text without either.
create or replace function queue._why_running(p_id bigint, p_claim bigint)
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return coalesce((
      select format('; its timeout passed at %s; its handler could not be ended and still runs', o.timeout_at)
      from queue._overdue() o where o.id = p_id), '')
    || coalesce((
      select case when l.is_own then format('; its lease ends at %s', l.expires_at)
        else format('; its timeout ends at %s', l.expires_at - interval '10 s') end
      from queue.lease l where l.id = p_id and l.claim = p_claim), '');
end $$;

-- The end of a pause; empty text if it has none.
create or replace function queue._why_until(p_at timestamptz)
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return case when isfinite(p_at) then format(' until %s', p_at) else '' end;
end $$;

-- The locks and concurrency keys of a ready job that have no room for it now; NULL if there are none.
create or replace function queue._why_no_slot_left(p_id bigint)
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select string_agg(distinct format('%s %s', case left(k.key, 1) when 'm' then 'lock'
      else 'concurrency key' end, substr(k.key, 2)), ', ')
    from queue.active_job aj
    cross join lateral queue._keys_of(array[aj.id], array[aj.flags]) k
    cross join lateral (
      select s.slots, s.rate_limit, least(s.slots, 1000000000/* most_slots */) - s.used as free,
        queue._rate_room(s.key, s.rate_limit, s.rate_per, s.rate_limit, clock_timestamp()) as rate_room
      from queue.semaphore s
      where s.key = k.key
      order by s.tick desc limit 1) s
    where aj.id = p_id
      and least(s.free - least(k.weight, s.slots), s.rate_room - least(k.weight, s.rate_limit)) < 0);
end $$;

-- How many of the starts in its queue and priority a job's share has had, for queue.why(): of at most 10,000
-- running jobs and 10,000 that have ended.
create or replace function queue._why_share(p_id bigint)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_job record;
  v_starts record;
begin
  select l.queue, l.priority, j.options ->> 'share' as share into v_job
  from queue.active_job aj join queue.lane l on l.lane = aj.lane join queue.job j on j.id = aj.id
  where aj.id = p_id and l.tag_base is not null;
  if v_job.share is null then
    return '';
  end if;
  select count(*) as n, count(*) filter (where j.options ->> 'share' = v_job.share) as of_share into v_starts
  from (
    (select aj.id from queue.active_job aj
     where aj.claimed_at > clock_timestamp() - interval '1 minute' limit 10000)
    union all
    (select f.id from queue.finished f
     where f.finished_at > clock_timestamp() - interval '1 minute'
       and f.started_at > clock_timestamp() - interval '1 minute' limit 10000)) x
  join queue.job_now j on j.id = x.id
  where j.queue = v_job.queue and j.priority = v_job.priority;
  return format('; its share %s has had %s of %s starts in the last minute', v_job.share, v_starts.of_share,
    v_starts.n);
end $$;

-- The needs that a job waits for, or that have failed, at most 20; for queue.why(). If some are in queues
-- that the caller may not use, only the ids of all its needs there.
create or replace function queue._why_needs(p_id bigint, p_failed boolean)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_texts text[];
  v_allowed text[] := queue._allowed_queues('{operator,reader}');
begin
  v_texts := array(
    select format('job %s', d.id)
      || case when queue._allows(v_allowed, j.queue) is not false
      then format(' (%s)', coalesce(j.state, 'deleted')) else '' end
    from (select n.id, d.deleted_state
          from queue._direct_needs(p_id) n
          left join lateral (
            select d.deleted_state
            from queue.need d
            where d.job_id = p_id and d.need_id = n.id) d on true
          order by n.id) d
    left join lateral (select j.state, j.queue from queue.jobs j where j.id = d.id offset 0) j on true
    where queue._allows(v_allowed, j.queue) is false
      or case when p_failed then coalesce(j.state, d.deleted_state, 'failed') in ('failed', 'cancelled',
      'held', 'upstream_failed')
               else coalesce(j.state, d.deleted_state, 'failed') <> 'succeeded' end
    limit 21);
  return nullif(array_to_string(v_texts[:20], ', '), '') || case
    when cardinality(v_texts) > 20 then ' and more' else '' end;
end $$;

create or replace function queue._why_full(p_queue text)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_found record;
begin
  select c.max_running, c.rate_limit, c.rate_per,
    coalesce((select s.used from queue.semaphore s where s.key = 'q' || p_queue order by s.tick desc limit 1),
      0) as used
  into v_found from queue.queue_config c where c.queue = p_queue;
  if v_found.used >= v_found.max_running then
    return format('its queue %s has reached max_running %s', p_queue, v_found.max_running);
  end if;
  return format('its queue %s has used up its rate of %s per %s; the next start is at %s', p_queue,
    v_found.rate_limit, v_found.rate_per, queue._next_start(p_queue));
end $$;

-- What a suspended job waits for, for queue.why().
create or replace function queue._why_suspended(p_id bigint)
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return coalesce(
    (select format('at its step %s it waits for %s %s%s', queue._step_name(w.step, w.no),
       case when w.signal is null then 'event' else 'signal' end, coalesce(w.signal, w.event),
       coalesce(' until ' || w.until, ''))
     from queue.suspended w where w.job_id = p_id),
    'the next fetch or tick continues it');
end $$;

-- The step whose failure a job's next run is to make up for, for queue.why(); empty text if there is none.
create or replace function queue._why_step_failed(p_id bigint)
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return coalesce((
    select format('; its step %s has failed %s: %s', queue._step_name(s.name, s.no),
      case s.failures when 1 then 'once' else s.failures || ' times' end, left(s.error, 200))
    from queue.step s
    where s.job_id = p_id and s.finished_at is null and s.error is not null
    order by s.claim desc, s.failed_at desc limit 1), '');
end $$;

-- Claims whose timeout has passed, and which their worker has extended since because it could not end the
-- handler.
create or replace function queue._overdue()
returns table (id bigint,
  timeout_at timestamptz) language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select l.id, t.at
    from (select l.id, l.claim, l.expires_at from queue.lease l where l.is_own
      order by l.expires_at desc limit 10000) l
    cross join lateral (
      select aj.claimed_at
      from queue.active_job aj
      where aj.id = l.id and aj.claim = l.claim offset 0) aj
    cross join lateral (
      select aj.claimed_at + (j.options ->> 'timeout')::interval as at from queue.job j
      where j.id = l.id offset 0) t
    where l.expires_at > t.at + interval '10 s';
end $$;

-- The jobs that keep a key full, or its rate, for queue.why() of a job that waits for it.
create or replace function queue._why_no_slot(p_id bigint, p_key text)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_key constant text := substr(p_key, 2);
  v_text text;
  v_rate record;
begin
  select s.rate_limit, s.rate_per, queue._rate_opens_at(s.key, s.rate_limit, s.rate_per,
      coalesce((select w.weight from queue.waiting w where w.id = p_id), 1)) as at
  into v_rate
  from queue.semaphore s where s.key = p_key order by s.tick desc limit 1;
  if v_rate.rate_limit is not null and v_rate.at is not null then
    return format('its concurrency key %s has used up its rate of %s per %s; it may start at %s at the'
      ' earliest', v_key, v_rate.rate_limit, v_rate.rate_per, v_rate.at);
  end if;
  select string_agg(r.id::text, ', ' order by r.id) into v_text
  from (select j.id from queue.active_job l join queue.job_now j on j.id = l.id
        where l.claim is not null
          and case left(p_key, 1) when 'm' then j.lock = v_key
            else v_key = any (j.keys) end
        order by j.id limit 20) r;
  return case left(p_key, 1)
    when 'm' then format('its lock %s is held by %s', v_key,
      coalesce('job ' || v_text, 'a job that is about to start'))
    else format('its concurrency key %s is full: %s', v_key,
      coalesce('job ' || v_text, 'a job is about to start')) end;
end $$;

-- The job that has the turn at a lock, for queue.why().
create or replace function queue._why_no_turn(p_id bigint, p_lock text)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_id bigint;
begin
  select m.id into v_id
  from (select m.id, 0 as n from queue.lock_member m where m.lock = p_lock and m.has_turn
        union all (select m.id, 1 from queue.lock_member m where m.lock = p_lock and not m.is_late
          order by m.id limit 1)
        union all (select m.id, 2 from queue.lock_member m where m.lock = p_lock
          order by m.id limit 1)) m
  where m.id <> p_id order by m.n limit 1;
  return coalesce(
    (select format('its lock %s is held by job %s', p_lock, j.id)
       || case when not queue._allows(queue._allowed_queues('{operator,reader}'), j.queue) then ''
               else format(' (%s)', j.state)
                 || case when j.finished_at is not null then '; the next fetch or tick passes it on'
                 else '' end end
     from queue.jobs j where j.id = v_id),
    format('its lock %s is free; the next fetch or tick passes it on', p_lock));
end $$;

-- inspect/check.sql
-- Invariants: queue.check() checks whether the tables agree with each other.
-- Tests: admit/restore.sql, operate/change.sql.

-- Every violated invariant. It reads one snapshot; a sound database gives no row.
create or replace function queue.check()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security definer rows 10
set search_path = pg_catalog, pg_temp set enable_nestloop = off set jit = off as $$
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  return query select c.problem, c.id, c.detail from queue._check_places() c;
  return query select c.problem, c.id, c.detail from queue._check_locks() c;
  return query select c.problem, c.id, c.detail from queue._check_semaphores() c;
  return query select c.problem, c.id, c.detail from queue._check_shares() c;
  return query select c.problem, c.id, c.detail from queue._check_need_rows() c;
  return query select c.problem, c.id, c.detail from queue._check_claim_rows() c;
  return query select c.problem, c.id, c.detail from queue._check_schedules() c;
  return query select c.problem, c.id, c.detail from queue._check_suspended() c;
  return query select c.problem, c.id, c.detail from queue._check_groups() c;
  return query
    select 'a queueing lock whose job has started'::text, k.job_id, k.key
    from queue.queueing_lock k join queue.job j on j.id = k.job_id
    where exists (select from queue.finished f where f.id = j.id)
      or j.queueing_lock is distinct from k.key
      or j.flags & 256/* until_start */ <> 0 and exists (select from queue.active_job aj
        where aj.id = j.id and aj.claim is not null);
  return query
    select 'a job without its queueing lock'::text, j.id, j.queueing_lock
    from queue.job_now j
    where j.queueing_lock is not null and j.claims = 0
      and not exists (select from queue.finished f where f.id = j.id)
      and not exists (select from queue.active_job aj where aj.id = j.id and aj.claim is not null)
      and not exists (select from queue.pending_settlement h where h.job_id = j.id)
      and not exists (select from queue.queueing_lock k where k.key = j.queueing_lock and k.job_id = j.id);
  return query
    select 'not one row'::text, null::bigint, x.name
    from (select 'admission'::text as name, count(*) as n from queue.admission union all
          select 'cursor', count(*) from queue.cursor union all
          select 'minute_cursor', count(*) from queue.minute_cursor union all
          select 'horizon', count(*) from queue.horizon union all
          select 'installation', count(*) from queue.installation) x
    where x.n <> 1;
  return query
    select 'claimed without a worker'::text, aj.id, format('worker %s', aj.worker_id)
    from queue.active_job aj where aj.claim is not null and aj.worker_id is null;
  return query
    select 'restrictions that are not enforced'::text, null::bigint, c.relname::text
    from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relname = 'unrestricted'
      and exists (select from queue.access a where a.queues is not null);
end $$;
comment on function queue.check() is
  'Returns every violated invariant of the tables: problem, the job if it concerns one, detail. A sound'
    ' database has none.';

-- Whether every job is in exactly one place, and in the right one.
create or replace function queue._check_places()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'in two places'::text, x.id, string_agg(x.place, ', ' order by x.place)
    from (select aj.id, 'active_job'::text as place from queue.active_job aj union all
          select f.id, 'finished' from queue.finished f union all
          select w.id, 'waiting ' || w.reason from queue.waiting w) x
    group by x.id having count(*) > 1;
  return query
    select 'no such job'::text, x.id, x.place
    from (select aj.id, 'active_job'::text as place from queue.active_job aj union all
          select f.id, 'finished' from queue.finished f union all
          select w.id, 'waiting' from queue.waiting w union all
          select m.id, 'lock_member' from queue.lock_member m union all
          select k.job_id, 'queueing_lock' from queue.queueing_lock k union all
          select l.id, 'lease' from queue.lease l union all
          select s.id, 'job_override' from queue.job_override s union all
          select a.job_id, 'attempt' from queue.attempt a) x
    where not exists (select from queue.job j where j.id = x.id);
  return query
    select 'unknown state or kind'::text, f.id, f.state from queue.finished f
    where f.state not in ('succeeded', 'failed', 'cancelled')
    union all
    select 'unknown state or kind', h.job_id, h.kind from queue.pending_settlement h
    where h.kind not in ('ended', 'again', 'replace', 'recheck', 'readmit', 'refill', 'signal', 'event',
      'group');
  return query
    select 'admitted, but in no table'::text, j.id, format('flags %s', j.flags)
    from queue.job j
    cross join queue.cursor_now c
    where j.xid < c.next_xid and j.xid <> all (c.in_flight)
      and not exists (select from queue.active_job aj where aj.id = j.id)
      and not exists (select from queue.finished f where f.id = j.id)
      and not exists (select from queue.waiting w where w.id = j.id)
      and not exists (select from queue.lock_member m where m.id = j.id)
      and not exists (select from queue.pending_settlement h where h.job_id = j.id)
      and not exists (select from queue.backlog b where (j.xid, j.id) > (b.from_xid, b.from_id)
        and j.xid <= b.to_xid)
      and not exists (select from queue.backlog_part b
                      where (j.xid, j.id) > (b.from_xid, b.from_id) and (j.xid, j.id) <= (b.to_xid, b.to_id)
                        and j.priority <= b.priority);
  return query
    select 'a settlement that the cursor has passed'::text, o.job_id, o.kind
    from queue._orphaned_settlements() o;
  return query
    select 'due before the due mark'::text, w.id,
      format('at %s, mark %s', w.at, k.due_at)
    from queue.waiting w
    cross join queue.cursor_now k
    where w.at < k.due_at;
  return query
    select 'ready below the low mark'::text, aj.id, format('lane %s', aj.lane)
    from queue.active_job aj join queue.lane l on l.lane = aj.lane
    where aj.claim is null and ((aj.deadline, aj.id) < (l.low_deadline, l.low_id) or l.is_idle);
  return query
    select 'in a missing lane'::text, aj.id, format('lane %s', aj.lane)
    from queue.active_job aj where not exists (select from queue.lane l where l.lane = aj.lane)
    union all
    select 'waits for a slot in a missing lane', w.id, format('lane %s', w.lane)
    from queue.waiting w
    where w.lane is not null and not exists (select from queue.lane l where l.lane = w.lane);
  return query
    select 'in the wrong lane for its queue and priority'::text, aj.id, format('lane %s', aj.lane)
    from queue.active_job aj join queue.lane l on l.lane = aj.lane
    join queue.job_now j on j.id = aj.id
    where aj.claim is null
      and ((l.queue, l.priority) <> (j.queue, j.priority) or aj.deadline <> coalesce(j.deadline, 'infinity')
        and aj.deadline >= '0001-01-01 00:00+00');
  return query
    select 'a job with a lock that it has not joined'::text, j.id, j.lock
    from (select aj.id from queue.active_job aj union all select w.id from queue.waiting w
      where w.reason <> 'parked') x
    join queue.job_now j on j.id = x.id
    where j.lock is not null and not exists (select from queue.lock_member m
      where m.id = j.id and m.lock = j.lock);
end $$;

-- Invariants, for queue.check().
create or replace function queue._check_need_rows()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'waits for needs although they do not hold it'::text, w.id, format('%s: %s', w.reason, n.standing)
    from (select array_agg(w.id) as ids from queue.waiting w where w.reason in ('needs', 'upstream_failed')) a
    cross join lateral queue._needs_states(a.ids) n
    join queue.waiting w on w.id = n.id
    where n.standing <> case w.reason when 'needs' then 'waiting' else 'failed' end
      and not queue._has_pending_settlement(w.id);
  return query
    select 'names a need that does not hold it'::text, w.id, format('%s: %s', w.reason, w.need_id)
    from queue.waiting w
    left join queue.need d on d.job_id = w.id and d.need_id = w.need_id
    left join queue.finished f on f.id = d.need_id
    left join queue.waiting n on n.id = d.need_id
    where w.reason in ('needs', 'upstream_failed') and w.need_id is not null
      and (d.need_id is null
           or (w.reason = 'needs') <> (coalesce(f.state, d.deleted_state) is null
             and (d.mode & 4/* ended */ <> 0 or coalesce(n.reason not in ('held', 'upstream_failed'), true)))
           or coalesce(f.state, d.deleted_state) = 'succeeded')
      and not queue._has_pending_settlement(w.id);
  return query
    select 'ready although its needs are not met'::text, n.id, n.standing
    from (select array_agg(aj.id) as ids from queue.active_job aj
      where aj.claim is null and aj.flags & 8/* needs */ <> 0) a
    cross join lateral queue._needs_states(a.ids) n
    where n.standing <> 'satisfied' and not queue._has_pending_settlement(n.id);
  return query
    select 'needed, but not marked as needed'::text, aj.id, format('needed by %s', min(d.job_id))
    from queue.active_job aj join queue.need d on d.need_id = aj.id
    where aj.flags & 4096/* needed */ = 0 and not exists (select from queue.finished f where f.id = d.job_id)
      and not exists (select from queue.pending_settlement h where h.job_id = aj.id)
    group by aj.id;
  return query
    select 'a need that is not a job'::text, d.need_id, format('of %s', d.job_id)
    from queue.need d
    where not exists (select from queue.job j where j.id = d.job_id)
      or d.deleted_state is null and not exists (select from queue.job j where j.id = d.need_id);
end $$;

-- Whether a job's wait for its needs is about to change: the job or one of its needs is handed over.
create or replace function queue._has_pending_settlement(p_id bigint)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (
    select from queue.pending_settlement h
    where h.job_id = p_id or h.job_id in (select d.need_id from queue.need d where d.job_id = p_id));
end $$;

-- Invariants of steps and waits, for queue.check().
create or replace function queue._check_suspended()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'no such job'::text, x.id, x.place
    from (select s.job_id as id, 'step'::text as place from queue.step s union
          select w.job_id, 'suspended' from queue.suspended w union
          select i.job_id, 'stream_item' from queue.stream_item i) x
    where not exists (select from queue.job j where j.id = x.id);
  return query
    select 'suspended, and runs or is finished'::text, w.job_id, w.step
    from queue.suspended w
    where exists (select from queue.active_job aj where aj.id = w.job_id)
      or exists (select from queue.finished f where f.id = w.job_id);
  return query
    select 'waits for nothing'::text, w.id, w.reason
    from queue.waiting w
    where w.reason = 'signal' and not exists (select from queue.suspended s where s.job_id = w.id);
  return query
    select 'waits for something that has come'::text, w.id, coalesce(s.signal, s.event)
    from queue.waiting w join queue.suspended s on s.job_id = w.id
    where w.reason = 'signal'
      and (exists (select from queue.received_signal r where r.job_id = w.id and r.name = s.signal)
        and not exists (select from queue.pending_settlement h where h.job_id = w.id and h.kind = 'signal')
        or exists (select from queue.event e where e.name = s.event and e.is_standing
          and e.expires_at > clock_timestamp()
          and not exists (select from queue.pending_settlement h
            where h.job_id = -e.no and h.kind = 'event')));
  return query
    select 'steps that fetch would not return'::text, j.id, null::text
    from (select distinct s.job_id as id from queue.step s) j
    join queue.active_job aj on aj.id = j.id and aj.claim is null
    left join queue.job_override o on o.id = j.id
    where o.has_steps is not true or aj.flags & 2048/* overridden */ = 0;
end $$;

-- inspect/candidates.sql
-- The jobs that a search may find: by an index if there is one.
-- Tests: inspect/search.sql.

-- The newest jobs below an id that may be in a state (NULL: any), newest first: from the table of jobs in
-- that state, and from jobs that are not admitted yet.
create or replace function queue._candidates(p_state text, p_before bigint, p_n integer)
returns bigint[] language plpgsql stable parallel safe security invoker as $$
declare
  v_reason text := case p_state when 'ready' then 'task_paused' when 'waiting' then 'needs' else p_state end;
begin
  case
    when p_state is null then
      return array(select j.id from queue.job j where j.id < p_before order by j.id desc limit p_n);
    when p_state = 'failed' then
      return array(select f.id from queue.finished f where f.state = 'failed' and f.id < p_before
        order by f.id desc limit p_n);
    when p_state = 'cancelled' then
      return array(select f.id from queue.finished f where f.state = 'cancelled' and f.id < p_before
        order by f.id desc limit p_n);
    when p_state = 'succeeded' then
      return array(select f.id from queue.finished f where f.state = 'succeeded' and f.id < p_before
        order by f.id desc limit p_n);
    when p_state = 'running' then
      return queue._running(p_before, p_n);
    when p_state = 'blocked' then
      return queue._blocked(p_before, p_n);
    else null;
  end case;
  return array(
    select c.id
    from (
      (select aj.id from queue.active_job aj
        where p_state = 'ready' and aj.claim is null and aj.id < p_before order by aj.id desc limit p_n)
      union
      (select w.id from queue.waiting w where p_state = 'scheduled' and w.reason = 'schedule'
        and w.id < p_before order by w.id desc limit p_n)
      union
      (select w.id from queue.waiting w
       where w.reason = v_reason and w.id < p_before
         and w.reason in ('held', 'upstream_failed', 'needs', 'signal', 'task_paused')
       order by w.reason desc, w.id desc limit p_n)
      union
      (select w.id from queue.waiting w
       where p_state = 'waiting' and w.reason = 'signal' and w.id < p_before order by w.id desc limit p_n)
      union
      (select h.job_id from queue.pending_settlement h where h.kind = 'again' and h.job_id < p_before
        order by h.job_id desc limit p_n)
      union
      select u.id from unnest(queue._unadmitted(p_state, p_before, p_n)) u (id)) c
    order by c.id desc limit p_n);
end $$;

-- The newest blocked jobs below an id. Members of locks can't be read by id; if there are many, enough of
-- them are among the newest jobs.
create or replace function queue._blocked(p_before bigint, p_n integer)
returns bigint[] language plpgsql stable parallel safe security invoker as $$
declare
  v_ids bigint[];
begin
  v_ids := array(
    select j.id
    -- not by job_now, which would look each of them up in the log again
    from (select j.id, j.lock from queue.job j where j.id < p_before order by j.id desc limit 20000) j
    left join lateral (select s.lock from queue.job_override s where s.id = j.id offset 0) s on true
    left join lateral (
      select m.id from queue.lock_member m
      where m.lock = coalesce(s.lock, j.lock) and m.id = j.id and m.is_passed offset 0) m on true
    left join lateral (select w.reason from queue.waiting w where w.id = j.id offset 0) w on true
    where w.reason in ('slot', 'parked', 'moving') or w.reason is null and m.id is not null
      and not exists (select from queue.active_job aj where aj.id = j.id)
      and not exists (select from queue.finished f where f.id = j.id)
    order by j.id desc limit p_n);
  if cardinality(v_ids) = p_n then
    return v_ids;
  end if;
  return array(
    select c.id
    from (
      (select w.id from queue.waiting w
        where w.reason = 'slot' and w.id < p_before order by w.id desc limit p_n)
      union
      (select w.id from queue.waiting w
        where w.reason = 'parked' and w.id < p_before order by w.id desc limit p_n)
      union
      (select w.id from queue.waiting w
        where w.reason = 'moving' and w.id < p_before order by w.id desc limit p_n)
      union
      (select m.id from queue.lock_member m
       where m.is_passed and m.id < p_before
         and not exists (select from queue.waiting w where w.id = m.id)
         and not exists (select from queue.active_job aj where aj.id = m.id)
         and not exists (select from queue.finished f where f.id = m.id)
       order by m.id desc limit p_n)) c
    order by c.id desc limit p_n);
end $$;

-- The newest running jobs below an id. Their only index is that of all ready and running jobs, because
-- another one would make each claim cost more.
create or replace function queue._running(p_before bigint, p_n integer)
returns bigint[] language plpgsql stable parallel safe security invoker as $$
declare
  v_ids bigint[];
begin
  -- if there are many, enough of them are among the newest
  v_ids := array(
    select aj.id
    from (select aj.id, aj.claim from queue.active_job aj where aj.id < p_before
      order by aj.id desc limit 20000) aj
    where aj.claim is not null
    order by aj.id desc limit p_n);
  return case when cardinality(v_ids) = p_n then v_ids else queue._all_running(p_before, p_n) end;
end $$;

-- The same by reading the whole table in its own order: a million ready jobs take half the time that they
-- take by id.
create or replace function queue._all_running(p_before bigint, p_n integer)
returns bigint[] language plpgsql stable parallel safe security invoker
set enable_seqscan = on set enable_indexscan = off as $$
begin
  return array(select aj.id from queue.active_job aj where aj.claim is not null and aj.id < p_before
    order by aj.id desc limit p_n);
end $$;

-- The newest jobs below an id that have not been admitted and may be in a state.
create or replace function queue._unadmitted(p_state text, p_before bigint, p_n integer)
returns bigint[] language plpgsql stable parallel safe security invoker as $$
declare
  v_found record;
  v_ids bigint[];
begin
  -- they can't be read by id; if there are many, enough of them are among the newest jobs
  if (select count(*) from (select from queue.unadmitted a limit 1001) a) > 1000 then
    select k.next_xid, k.in_flight into v_found from queue.cursor_now k;
    v_ids := array(
      select j.id
      from (select j.id, j.xid, j.flags, j.scheduled_at, j.needs from queue.job j where j.id < p_before
        order by j.id desc limit 20000) j
      where queue._may_be(p_state, j.id, j.flags, j.scheduled_at, j.needs)
        and (j.xid >= v_found.next_xid or j.xid = any (v_found.in_flight)
             or (select true from queue.backlog b where (j.xid, j.id) > (b.from_xid, b.from_id)
               and j.xid <= b.to_xid limit 1)
             or (select true from queue.backlog_part b
                 where (j.xid, j.id) > (b.from_xid, b.from_id)
                   and (j.xid, j.id) <= (b.to_xid, b.to_id) limit 1))
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

-- Whether a job that is not admitted yet may be in a state. A replaced job may be in another state than the
-- one it was deferred in.
create or replace function queue._may_be(p_state text, p_id bigint, p_flags smallint,
  p_scheduled_at timestamptz, p_needs bigint[])
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return p_state = case when p_flags & 32/* held */ <> 0 then 'held'
    when p_scheduled_at > statement_timestamp() then 'scheduled'
                        when p_needs is not null then 'waiting' else 'ready' end
    or p_state <> 'upstream_failed' and exists (select from queue.job_override s where s.id = p_id);
end $$;

-- inspect/search.sql
-- Searching and listing jobs, newest first, in pages: the cost of a call is bounded, however many jobs there
-- are.

-- Reads jobs from the newest that is older than `before` until max_jobs are found or max_bytes are read. Then
-- the last row has no id, and next_id is the next value of `before`. Each job counts as the bytes that were
-- read of it, at least 100 (1,000 if only its state did not match), so that a call ends soon even if nothing
-- matches.
-- Raises: 22023.
create or replace function queue.search(
  pattern text default null, queue text default null, state text default null,
  max_bytes bigint default 50000000,
  by text default 'text', task text default null, before bigint default null, max_jobs integer default 100)
returns table (id bigint, queue_name text, task_name text, job_state text, reason text, priority integer,
  attempts integer, created_at timestamptz, description text, bytes integer, excerpt text, next_id bigint)
language plpgsql stable parallel unsafe security definer rows 100
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_path jsonpath := queue._check_search(search.pattern, search.queue, search.state, search.max_bytes,
    search.by, search.task, search.max_jobs);
  v_before bigint := coalesce(search.before, 9223372036854775807);
  v_ids bigint[];
  v_n integer := case when search.pattern is null then least(search.max_jobs, 500) else 10 end;
  v_job record;
  v_bytes integer;
  v_looked bigint := 0;
  v_found integer := 0;
  v_allowed text[] := queue._allowed_queues('{operator,reader}');
  v_hidden jsonb;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  v_hidden := queue._hidden_paths();
  loop
    v_ids := queue._candidates(search.state, v_before, v_n);
    for v_job in
      select u.id, x.is_asked,
        case when x.is_asked and search.pattern is not null
          then queue._match(search.pattern, search.by, v_path, x.args, j.options ->> 'description',
            array[j.lock, j.queueing_lock, j.options ->> 'idempotency_key'] || j.keys) end as match
      from unnest(v_ids) with ordinality u (id, n)
      cross join lateral (
        select j.task, j.queue, j.lock, j.queueing_lock, j.keys, j.args, j.options, j.flags
        from queue.job_now j
        where j.id = u.id offset 0) j
      cross join lateral (
        -- cut before the pattern is compared, so that nobody finds out by it what is hidden
        select case when v_hidden ? j.task
            then queue._cut(v_hidden -> j.task, coalesce(queue._replaced_args(u.id, j.flags), j.args))
            else coalesce(queue._replaced_args(u.id, j.flags), j.args) end as args,
          (search.queue is null or queue._matches(j.queue, search.queue))
            and (search.task is null or j.task = search.task)
            and (v_allowed is null or queue._allows(v_allowed, j.queue)) as is_asked) x
      order by u.n
    loop
      v_before := v_job.id;
      v_bytes := abs(v_job.match);
      v_looked := v_looked + greatest(100, v_bytes);
      if v_job.is_asked and (search.pattern is null or v_job.match > 0) then
        select job.id, job.queue, job.task, job.state, job.reason, job.priority, job.attempts, job.created_at,
          job.description, v_bytes,
          queue._excerpt(search.pattern, search.by, v_path,
            queue._cut(v_hidden -> job.task, job.args))
        into id, queue_name, task_name, job_state, reason, priority, attempts, created_at, description, bytes,
          excerpt
        from queue.jobs job where job.id = v_job.id;
        if search.state is null or job_state = search.state then
          return next;
          v_found := v_found + 1;
        else
          v_looked := v_looked + 1000;
        end if;
      end if;
      exit when v_found >= search.max_jobs or v_looked >= search.max_bytes;
    end loop;
    -- fewer than it asked for: there are no others
    exit when cardinality(v_ids) < v_n or v_found >= search.max_jobs or v_looked >= search.max_bytes;
    v_n := case when v_bytes > 10000 then 10 else least(v_n * 2, 500) end;
  end loop;
  if v_before > v_ids[cardinality(v_ids)]
    or cardinality(v_ids) = v_n and queue._candidates(search.state, v_before, 1) <> '{}' then
    return query
      select null::bigint, null::text, null::text, null::text, null::text, null::integer, null::integer,
        null::timestamptz, null::text, null::integer,
        format('stopped at %s %s, %s bytes; continue with before => %s', v_found,
          case v_found when 1 then 'job' else 'jobs' end, v_looked, v_before),
        v_before;
  end if;
end $$;
comment on function queue.search(text, text, text, bigint, text, text, bigint, integer) is
  'Returns jobs, newest first, whose args (or description) match pattern; sensitive args count as'
    ' ***. by: text (a substring of the args as JSON text), path (a jsonpath that finds something, or a'
    ' predicate that is true; without variables), key (a whole lock, queueing lock, idempotency key or'
    ' concurrency key). Without a pattern it returns all jobs of a queue (a name, prefix* or *), task and'
    ' state. If it stops at max_jobs or after max_bytes (NULL: no limit), the last row has no id,'
    ' excerpt says so, and next_id is the value of before for the next call.';

-- Raises: 22023, QJ001.
create or replace function queue.get(id bigint, path text)
returns setof jsonb language plpgsql stable parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp as $$
declare
  v_args jsonb;
begin
  if to_regclass('queue.unrestricted') is null then perform queue._not_installed();
    perform queue._require_jobs('{operator,reader}', array[get.id]);
  end if;
  if get.path is null or get.path = '' then
    perform queue._invalid('path is missing',
      'Write it as in items[0].price, or as a jsonpath: $.items[*].price.');
  end if;
  select queue._cut(queue._hidden_paths() -> j.task, coalesce(queue._replaced_args(j.id, j.flags), j.args))
  into v_args
  from queue.job_now j where j.id = get.id;
  if not found then
    perform queue._job_not_found(get.id);
  end if;
  return query
    select jsonb_path_query_tz(v_args,
      queue._jsonpath(case when get.path ~ '^[[:space:]]*([$]|(lax|strict)[[:space:]])' then get.path
      when starts_with(get.path, '[') then '$' || get.path else '$.' || get.path end), '{}', true);
end $$;
comment on function queue.get(bigint, text) is
  'Returns the values that a path finds in a job''s args, a row for each: items[0].price, or any'
    ' jsonpath, such as $.items[*].price. JSON null gives a row with null; a missing value gives no row. A'
    ' sensitive value (register_task) gives *** to all but the owner.';

-- Returns the pattern as a jsonpath if it is one.
-- Raises: 22023.
create or replace function queue._check_search(p_pattern text, p_queue text, p_state text, p_max_bytes bigint,
  p_by text, p_task text, p_max_jobs integer)
returns jsonpath language plpgsql immutable parallel unsafe security invoker as $$
begin
  if p_by is null or p_by not in ('text', 'path', 'key') then
    perform queue._invalid('by is not one of its values', 'Allowed: text, path, key.',
      'by: ' || coalesce(left(p_by, 200), 'NULL'));
  elsif p_pattern = '' then
    perform queue._invalid('pattern is empty', 'Pass what to look for, or NULL to list every job.');
  elsif not p_state = any (
    '{scheduled,waiting,upstream_failed,blocked,ready,running,held,succeeded,failed,cancelled}'::text[]) then
    perform queue._invalid('state is not one of its values',
      'Allowed: scheduled, waiting, upstream_failed, blocked, ready, running, held, succeeded, failed,'
      ' cancelled.', 'state: ' || left(p_state, 200));
  elsif p_max_bytes < 1 then
    perform queue._invalid('max_bytes must be at least 1',
      'Pass how many bytes to read, or NULL for no limit.');
  elsif p_max_jobs < 1 or p_max_jobs is null then
    perform queue._invalid('max_jobs must be at least 1', 'Pass the maximum number of jobs to return.');
  end if;
  if p_queue is not null then
    perform queue._check_name('queue', p_queue);
  end if;
  if p_task is not null then
    perform queue._check_name('task', p_task);
  end if;
  return case when p_by = 'path' then queue._jsonpath(p_pattern) end;
end $$;

-- The number of bytes read of a job, negative if it does not match. A path is a predicate if it gives a truth
-- value for an empty object; then it must be true.
create or replace function queue._match(p_pattern text, p_by text, p_path jsonpath, p_args jsonb,
  p_description text, p_keys text[])
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
    if v_item = 'true' or v_item is not null
      and coalesce(jsonb_typeof(jsonb_path_query_first_tz('{}', p_path, '{}', true)), '') not in ('boolean',
      'null') then
      return octet_length(v_text);
    end if;
  elsif strpos(v_text, p_pattern) > 0 or strpos(p_description, p_pattern) > 0
    or strpos(v_text, queue._escaped(p_pattern)) > 0 then
    return octet_length(v_text);
  end if;
  return -octet_length(v_text);
end $$;

-- The text shown for a matching job.
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

-- inspect/list_jobs.sql
-- Listing jobs, oldest first. To plan the view queue.jobs takes milliseconds; a function's plan is kept for
-- the session, also where statements can't be prepared: behind a pooler, or where transactions roll back.

-- Raises: 22023.
create or replace function queue.list_jobs(after bigint default 0, max_jobs integer default 100)
returns table (id bigint, task text, queue text, state text, reason text, args jsonb, priority integer,
  lock text, queueing_lock text, concurrency_key text, scheduled_at timestamptz, deadline timestamptz,
  created_at timestamptz, started_at timestamptz, finished_at timestamptz, attempts integer, error text,
  result jsonb, description text, headers jsonb, parent bigint)
language plpgsql stable parallel unsafe security definer rows 100
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_allowed text[];
  v_hidden jsonb;
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  if list_jobs.max_jobs < 1 or list_jobs.max_jobs is null then
    perform queue._invalid('max_jobs must be at least 1', 'Pass the maximum number of jobs to return.');
  end if;
  v_allowed := queue._allowed_queues('{operator,reader}');
  v_hidden := queue._hidden_paths();
  return query
    select j.id, j.task, j.queue, j.state, j.reason, queue._cut(v_hidden -> j.task, j.args), j.priority,
      j.lock, j.queueing_lock, j.concurrency_key, j.scheduled_at, j.deadline, j.created_at, j.started_at,
      j.finished_at, j.attempts, j.error, j.result, j.description, j.headers, j.parent
    from queue.jobs j
    where j.id > coalesce(list_jobs.after, 0) and (v_allowed is null or queue._allows(v_allowed, j.queue))
    order by j.id limit list_jobs.max_jobs;
end $$;
comment on function queue.list_jobs(bigint, integer) is
  'Returns jobs as in queue.jobs, oldest first, from the one that follows after: the last id of a page'
    ' gives the next page. To plan a query of queue.jobs takes milliseconds; this keeps its plan. A'
    ' transaction that deferred earlier may commit later, so a job with a smaller id may still appear.'
    ' Sensitive args (register_task) read *** for all but the owner.';

-- inspect/stats.sql
-- Figures: how many jobs there are, how fast they run, how many should run at once.

-- Cost: it reads unfinished jobs and those that ended within the hour, not the rest.
create or replace function queue.stats()
returns table (
  queue text, task text, scheduled bigint, waiting bigint, upstream_failed bigint, blocked bigint,
  ready bigint, running bigint, held bigint,
  failed bigint, oldest_ready_for interval,
  succeeded_5m bigint, failed_5m bigint, cancelled_5m bigint, failures_5m bigint, per_second_5m numeric,
  wait_p50_5m interval, wait_p95_5m interval, wait_p99_5m interval, run_p50_5m interval, run_p95_5m interval,
  run_p99_5m interval,
  succeeded_1h bigint, failed_1h bigint, cancelled_1h bigint, failures_1h bigint, per_second_1h numeric,
  wait_p50_1h interval, wait_p95_1h interval, wait_p99_1h interval, run_p50_1h interval, run_p95_1h interval,
  run_p99_1h interval)
language plpgsql stable parallel safe security definer rows 50
set search_path = pg_catalog, pg_temp set jit = off as $$
declare
  v_now timestamptz := clock_timestamp();
  v_hour timestamptz := v_now - interval '1 hour';
  v_5m timestamptz := v_now - interval '5 minutes';
  v_allowed text[] := queue._allowed_queues('{operator,reader}');
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  return query
    select k.queue, k.task, coalesce(u.scheduled, 0), coalesce(u.waiting, 0), coalesce(u.upstream_failed, 0),
      coalesce(u.blocked, 0),
      coalesce(u.ready, 0), coalesce(u.running, 0), coalesce(u.held, 0), coalesce(b.failed, 0),
      v_now - u.oldest_ready_at, coalesce(d.succeeded_5m, 0), coalesce(d.failed_5m, 0),
      coalesce(d.cancelled_5m, 0), coalesce(a.failures_5m, 0), round(coalesce(d.n_5m, 0) / 300.0, 3),
      d.wait_5m[1], d.wait_5m[2], d.wait_5m[3], d.run_5m[1], d.run_5m[2], d.run_5m[3],
      coalesce(d.succeeded_1h, 0), coalesce(d.failed_1h, 0), coalesce(d.cancelled_1h, 0),
      coalesce(a.failures_1h, 0),
      round(coalesce(d.n_1h, 0) / 3600.0, 3),
      d.wait_1h[1], d.wait_1h[2], d.wait_1h[3], d.run_1h[1], d.run_1h[2], d.run_1h[3]
    from (
      select u.queue, u.task, count(*) filter (where u.state = 'scheduled') as scheduled,
        count(*) filter (where u.state = 'waiting') as waiting,
        count(*) filter (where u.state = 'upstream_failed') as upstream_failed,
        count(*) filter (where u.state = 'blocked') as blocked,
        count(*) filter (where u.state = 'ready') as ready, count(*)
          filter (where u.state = 'running') as running,
        count(*) filter (where u.state = 'held') as held, min(u.due_at)
          filter (where u.state = 'ready') as oldest_ready_at
      from queue.unfinished u group by u.queue, u.task) u
    full join (
      select j.queue, j.task, count(*) as failed
      from queue.finished f join queue.job_now j on j.id = f.id
      where f.state = 'failed' group by 1, 2) b on (b.queue, b.task) = (u.queue, u.task)
    full join (
      select x.queue, x.task, count(*) filter (where x.is_5m) as n_5m, count(*) as n_1h,
        count(*) filter (where x.state = 'succeeded' and x.is_5m) as succeeded_5m,
        count(*) filter (where x.state = 'succeeded') as succeeded_1h,
        count(*) filter (where x.state = 'failed' and x.is_5m) as failed_5m,
        count(*) filter (where x.state = 'failed') as failed_1h,
        count(*) filter (where x.state = 'cancelled' and x.is_5m) as cancelled_5m,
        count(*) filter (where x.state = 'cancelled') as cancelled_1h,
        percentile_cont('{0.5,0.95,0.99}'::double precision[]) within group (order by x.wait)
          filter (where x.is_5m) as wait_5m,
        percentile_cont('{0.5,0.95,0.99}'::double precision[]) within group (order by x.wait) as wait_1h,
        percentile_cont('{0.5,0.95,0.99}'::double precision[]) within group (order by x.run)
          filter (where x.is_5m) as run_5m,
        percentile_cont('{0.5,0.95,0.99}'::double precision[]) within group (order by x.run) as run_1h
      from (
        select j.queue, j.task, f.state, f.finished_at > v_5m as is_5m,
          f.finished_at - f.started_at as run,
          greatest(f.started_at - coalesce(j.scheduled_at, j.created_at), '0') as wait
        from queue.finished f join queue.job_now j on j.id = f.id
        where f.finished_at > v_hour) x
      group by x.queue, x.task) d on (d.queue, d.task) = (coalesce(u.queue, b.queue),
        coalesce(u.task, b.task))
    full join (
      select j.queue, j.task, count(*) as failures_1h,
        count(*) filter (where a.finished_at > v_5m) as failures_5m
      from queue.attempt a join queue.job_now j on j.id = a.job_id
      where a.finished_at > v_hour and a.outcome in ('failed', 'crashed', 'timed_out') group by 1, 2) a
      on (a.queue, a.task) = (coalesce(u.queue, b.queue, d.queue), coalesce(u.task, b.task, d.task))
    cross join lateral (
      select coalesce(u.queue, b.queue, d.queue, a.queue) as queue,
        coalesce(u.task, b.task, d.task, a.task) as task) k
    where v_allowed is null or queue._allows(v_allowed, k.queue)
    order by k.queue, k.task;
end $$;
comment on function queue.stats() is
  'Returns a row for each queue and task: its unfinished jobs by state, the failed jobs that are kept,'
    ' and how long the oldest ready job has been due; for the last 5 minutes and the last hour, the jobs'
    ' that ended, failed attempts (failures), jobs per second, and the percentiles of waiting (from due to'
    ' the last start) and running.';

-- The jobs that ended in the last 5 minutes tell how many slots they kept busy, and how long a job takes.
-- Running jobs may be one of hours among many of seconds, so they count only if none has ended.
-- Raises: 22023.
create or replace function queue.autoscale_hint(within interval default '1 minute')
returns table (queue text, ready bigint, running bigint, workers bigint, per_second numeric, run_for interval,
  slots integer)
language plpgsql stable parallel safe security definer rows 10
set search_path = pg_catalog, pg_temp set jit = off as $$
declare
  v_now timestamptz := clock_timestamp();
  v_5m timestamptz := v_now - interval '5 minutes';
  v_allowed text[] := queue._allowed_queues('{operator,reader}');
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  if autoscale_hint.within is null or autoscale_hint.within < interval '1 second' then
    perform queue._invalid('within must be at least a second',
      'Pass the time within which ready jobs should start.');
  end if;
  perform queue._check_interval('within', autoscale_hint.within);
  return query
    with u as materialized (
      select u.queue, count(*) filter (where u.state <> 'running') as ready,
        count(*) filter (where u.state = 'running') as running
      from queue.unfinished u
      where u.state in ('ready', 'running') or u.state = 'scheduled'
        and u.due_at <= v_now + autoscale_hint.within
      group by u.queue),
    r as (
      select l.queue, avg(v_now - aj.claimed_at) as run_for
      from queue.active_job aj join queue.lane l on l.lane = aj.lane where aj.claim is not null
      group by l.queue),
    d as (
      select j.queue, count(*) / 300.0 as rate,
        avg(f.finished_at - f.started_at) as run_for,
        sum(extract(epoch from f.finished_at - greatest(f.started_at, v_5m))) / 300.0 as busy
      from queue.finished f join queue.job_now j on j.id = f.id
      where f.finished_at > v_5m and f.started_at is not null group by 1)
    select q.name, coalesce(u.ready, 0), coalesce(u.running, 0), w.n, round(coalesce(d.rate, 0), 3),
      x.run_for,
      least(c.max_running, 2147483647, ceil(
        greatest(coalesce(u.running, 0), d.busy)
        + coalesce(u.ready, 0) * least(1, extract(epoch from x.run_for) / extract(epoch
          from autoscale_hint.within))))::integer
    from (select u.queue as name from u union select d.queue from d union select c.queue
      from queue.queue_config c) q
    left join u on u.queue = q.name
    left join r on r.queue = q.name
    left join d on d.queue = q.name
    left join queue.queue_config c on c.queue = q.name
    cross join lateral (select coalesce(d.run_for, r.run_for, interval '1 second') as run_for) x
    cross join lateral (select queue._live_workers(q.name, v_now) as n) w
    where coalesce(queue._paused_until(q.name) <= v_now, true)
      and (v_allowed is null or queue._allows(v_allowed, q.name))
    order by q.name;
end $$;
comment on function queue.autoscale_hint(interval) is
  'Returns for each queue that is not paused how many jobs should run at once (slots), so that all jobs that'
    ' are ready, or become due within that time, start within it. slots is the number of running jobs, or the'
    ' average number of slots that the jobs which ended in the last 5 minutes kept busy, whichever is'
    ' greater; plus at most one for each ready job, according to how long jobs ran in these 5 minutes (if'
    ' none ended, how long the running ones have run; 1 second if none run).';

-- inspect/minutes.sql
-- What happened in the last hours, from the figures of each minute (work/minutes.sql).
-- Tests: work/minutes.sql.

-- Cost: it reads a row for each minute in which jobs of a queue and task ended.
-- Raises: 22023.
create or replace function queue.series(within interval default '6 hours', step interval default '5 minutes',
  queue text default null, task text default null)
returns table (at timestamptz, succeeded bigint, failed bigint, cancelled bigint, failures bigint,
  wait_p50 interval, wait_p95 interval, run_p50 interval, run_p95 interval)
language plpgsql stable parallel safe security definer rows 100
set search_path = pg_catalog, pg_temp set jit = off as $$
declare
  v_step interval;
  v_from timestamptz;
  v_to timestamptz;
  v_allowed text[] := queue._allowed_queues('{operator,reader}');
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform queue._check_within(series.within);
  if (extract(epoch from series.step) between 60 and extract(epoch from series.within)
    and mod(extract(epoch from series.step), 60) = 0) is not true then
    perform queue._invalid('step is out of range', 'Pass whole minutes, at least one, at most within.',
      'step: ' || coalesce(series.step::text, 'NULL'));
  end if;
  v_step := make_interval(secs => extract(epoch from series.step)::double precision);
  v_from := date_bin(v_step, clock_timestamp() - series.within, '2001-01-01Z') + v_step;
  select k.counted_to into v_to from queue.minute_cursor k;
  return query
    with m as materialized (
      select date_bin(v_step, m.minute, '2001-01-01Z') as at, m.succeeded, m.failed, m.cancelled, m.failures,
        m.waits, m.runs
      from queue.minute m
      where m.minute >= v_from and m.minute < v_to
        and (series.queue is null or m.queue = series.queue
          or right(series.queue, 1) = '*' and starts_with(m.queue, left(series.queue, -1)))
        and (series.task is null or m.task = series.task)
        and (v_allowed is null or queue._allows(v_allowed, m.queue))),
    sums as (
      select m.at, sum(m.succeeded) as succeeded, sum(m.failed) as failed, sum(m.cancelled) as cancelled,
        sum(m.failures) as failures
      from m group by m.at),
    times as (
      select c.at, c.what, array_agg(c.class order by c.class) as classes,
        array_agg(c.n order by c.class) as counts
      from (select m.at, x.what, u.class, sum(u.n) as n
            from m cross join lateral (values ('wait', m.waits), ('run', m.runs)) x (what, counts)
            cross join lateral unnest(x.counts) with ordinality u (n, class)
            where u.n > 0 group by 1, 2, 3) c
      group by c.at, c.what)
    select s.at, coalesce(x.succeeded, 0), coalesce(x.failed, 0), coalesce(x.cancelled, 0),
      coalesce(x.failures, 0),
      queue._percentile(w.classes, w.counts, 0.5), queue._percentile(w.classes, w.counts, 0.95),
      queue._percentile(r.classes, r.counts, 0.5), queue._percentile(r.classes, r.counts, 0.95)
    from generate_series(v_from, v_to, v_step) s (at)
    left join sums x on x.at = s.at
    left join times w on w.at = s.at and w.what = 'wait'
    left join times r on r.at = s.at and r.what = 'run'
    where s.at < v_to order by s.at;
end $$;
comment on function queue.series(interval, interval, text, text) is
  'Returns what happened within a time (at most 7 days), a row for each step (whole minutes, in UTC): the'
    ' jobs that ended, by state; their attempts that failed, crashed or timed out (failures); the'
    ' percentiles of waiting (from due to the last start) and of the last runs, which are off by 12 % at most'
    ' (times below 1.3 ms count as 1.1 ms). queue: a name or prefix*; task: a name. Maintenance counts ends'
    ' about 10 seconds later, and the last step may not be over.';

-- Cost: as series. Raises: 22023.
create or replace function queue.task_stats(within interval default '1 day')
returns table (task text, succeeded bigint, failed bigint, cancelled bigint, failures bigint,
  failure_rate numeric, wait_p50 interval, wait_p95 interval, run_p50 interval, run_p95 interval)
language plpgsql stable parallel safe security definer rows 50
set search_path = pg_catalog, pg_temp set jit = off as $$
declare
  v_from timestamptz;
  v_allowed text[] := queue._allowed_queues('{operator,reader}');
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  perform queue._check_within(task_stats.within);
  v_from := clock_timestamp() - task_stats.within;
  return query
    with m as materialized (
      select m.task, m.succeeded, m.failed, m.cancelled, m.failures, m.waits, m.runs
      from queue.minute m
      where m.minute >= v_from and (v_allowed is null or queue._allows(v_allowed, m.queue))),
    times as (
      select c.task, c.what, array_agg(c.class order by c.class) as classes,
        array_agg(c.n order by c.class) as counts
      from (select m.task, x.what, u.class, sum(u.n) as n
            from m cross join lateral (values ('wait', m.waits), ('run', m.runs)) x (what, counts)
            cross join lateral unnest(x.counts) with ordinality u (n, class)
            where u.n > 0 group by 1, 2, 3) c
      group by c.task, c.what)
    select x.task collate "default", x.succeeded, x.failed, x.cancelled, x.failures,
      round(x.failures::numeric / nullif(x.failures + x.succeeded, 0), 4),
      queue._percentile(w.classes, w.counts, 0.5), queue._percentile(w.classes, w.counts, 0.95),
      queue._percentile(r.classes, r.counts, 0.5), queue._percentile(r.classes, r.counts, 0.95)
    from (
      select m.task, sum(m.succeeded) as succeeded, sum(m.failed) as failed, sum(m.cancelled) as cancelled,
        sum(m.failures) as failures
      from m group by m.task) x
    left join times w on w.task = x.task and w.what = 'wait'
    left join times r on r.task = x.task and r.what = 'run'
    order by x.task;
end $$;
comment on function queue.task_stats(interval) is
  'Returns for each task what happened within a time (at most 7 days), as queue.series. failure_rate: the'
    ' share of failures among failures and successes.';

-- Raises: 22023.
create or replace function queue._check_within(p_within interval)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if (extract(epoch from p_within) between 60 and 604800 and queue._is_bounded(p_within)) is not true then
    perform queue._invalid('within is out of range', 'Pass an interval from 1 minute to 7 days.',
      'within: ' || coalesce(p_within::text, 'NULL'));
  end if;
end $$;

-- The middle of the class in which this share of the times is reached; NULL if there are none. p_classes: the
-- classes that have times, ascending; p_counts: how many.
create or replace function queue._percentile(p_classes bigint[], p_counts bigint[],
  p_share double precision)
returns interval language plpgsql immutable parallel safe security invoker as $$
declare
  v_left bigint := ceil(p_share * (select sum(n) from unnest(p_counts) n));
begin
  for v_place in 1 .. coalesce(cardinality(p_counts), 0) loop
    v_left := v_left - p_counts[v_place];
    if v_left <= 0 then
      return make_interval(
        secs => round(power(10, (p_classes[v_place] - 0.5) / 10), 3)::double precision / 1000);
    end if;
  end loop;
  return null;
end $$;

-- inspect/health_of_server.sql
-- Checks of queue.health() for the sessions, the tables and the server.
-- Tests: inspect/stats.sql.

-- A number with its noun: 1 job, 2 jobs.
create or replace function queue._count_of(p_number bigint, p_noun text)
returns text language plpgsql immutable parallel safe security invoker as $$
begin
  return p_number || ' ' || p_noun || case when p_number = 1 then '' else 's' end;
end $$;

-- Failures, and transactions that stay open.
create or replace function queue._health_of_sessions(p_now timestamptz)
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 4 as $$
declare
  v_facts record;
  v_hidden bigint;
begin
  name := 'failures';
  select count(*) filter (where f.state = 'failed') as failed, count(*) as n into v_facts
  from (select f.state from queue.finished f where f.finished_at > p_now - interval '1 hour' limit 100000) f;
  status := case when v_facts.failed >= 20 and v_facts.failed > v_facts.n * 0.1 then 'warn' else 'ok' end;
  detail := format('%s of %s that ended within the hour failed', v_facts.failed,
    queue._count_of(v_facts.n, 'job'));
  fix := case when status <> 'ok'
    then 'select * from queue.jobs where state = ''failed'' order by id desc limit 20; once the cause is'
    ' fixed: select queue.retry_failed()' end;
  return next;

  name := 'transactions';
  select count(*) into v_hidden
  from pg_stat_activity a
  where a.usesysid is not null and a.query = '<insufficient privilege>' and a.pid <> pg_backend_pid()
    and a.datname = current_database();
  select h.since, h.what, h.fix into v_facts
  from (
    select coalesce(a.xact_start, a.query_start) as since,
      format('session %s of %s (%s)', a.pid, a.usename, coalesce(a.state, a.backend_type)) as what,
      format('select pg_terminate_backend(%s)', a.pid) as fix
    from pg_stat_activity a where a.backend_xmin is not null and a.pid <> pg_backend_pid()
      and a.usesysid is not null and a.datname = current_database()
    union all
    select p.prepared, format('prepared transaction %L', p.gid),
      format('commit prepared %L, or rollback prepared %L', p.gid, p.gid)
    from pg_prepared_xacts p where p.database = current_database()
    union all
    select null, format('replication slot %s', r.slot_name),
      format('Let its consumer catch up, or select pg_drop_replication_slot(%L)', r.slot_name)
    from pg_replication_slots r where age(coalesce(r.xmin, r.catalog_xmin)) > 10000000) h
  order by h.since nulls first limit 1;
  status := case when v_facts.what is null or v_facts.since > p_now - interval '5 minutes'
    then case when v_hidden > 0 then 'warn' else 'ok' end
                 when v_facts.since > p_now - interval '1 hour' then 'warn' else 'fail' end;
  detail := case when status = 'ok' or v_facts.what is null or v_facts.since > p_now - interval '5 minutes'
      then case when v_hidden > 0 then format('%s of other roles can''t be seen',
          queue._count_of(v_hidden, 'session'))
        else 'no transaction has been open for 5 minutes' end
    when v_facts.since is null then v_facts.what || ' keeps old row versions'
    else format('%s has had a transaction open for %s: dead rows can''t be removed meanwhile', v_facts.what,
      date_trunc('second', p_now - v_facts.since)) end;
  fix := case when status = 'ok' then null
              when v_facts.what is null or v_facts.since > p_now - interval '5 minutes'
                then format('grant pg_read_all_stats to %I', current_user) else v_facts.fix end;
  return next;
end $$;

-- Dead rows, and the vacuum that should remove them.
create or replace function queue._health_of_tables(p_now timestamptz)
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 4 as $$
declare
  v_facts record;
begin
  name := 'bloat';
  select string_agg(format('%s: %s dead rows, %s live, %s', t.relname, t.dead, t.live,
    pg_size_pretty(t.size)), '; ' order by t.dead desc) as what,
    string_agg(format('vacuum queue.%I', t.relname), '; ' order by t.dead desc) as fix,
    bool_or(t.dead > 1000000) as is_bad
  into v_facts
  from (
    select c.relname, pg_stat_get_dead_tuples(c.oid) as dead, pg_stat_get_live_tuples(c.oid) as live,
      pg_relation_size(c.oid) as size
    from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r'
      and c.relname in ('active_job', 'cursor', 'lane', 'semaphore', 'lock_member', 'waiting',
        'pending_settlement', 'job_override', 'rate_start', 'queueing_lock', 'idempotency_key',
        'worker')) t
  where t.dead > 100000 and t.dead > 2 * t.live;
  status := case when v_facts.is_bad then 'fail' when v_facts.what is not null then 'warn' else 'ok' end;
  detail := coalesce(v_facts.what, 'the hot tables hold few dead rows');
  fix := v_facts.fix
    || case when v_facts.fix is not null then '; see the check transactions for what keeps dead rows' end;
  return next;

  name := 'autovacuum';
  select string_agg(x.what, '; ') as what, bool_or(x.is_bad) as is_bad into v_facts
  from (
    select format('%s is off', s.setting) as what, true as is_bad
    from unnest('{autovacuum,track_counts}'::text[]) s (setting) where current_setting(s.setting) <> 'on'
    union all
    select format('%s: %s dead rows, last vacuumed %s', c.relname, t.dead,
      coalesce(date_trunc('second', t.last)::text, 'never')), t.dead > 10 * t.threshold
    from pg_class c
    cross join lateral (
      select pg_stat_get_dead_tuples(c.oid) as dead,
        greatest(pg_stat_get_last_autovacuum_time(c.oid), pg_stat_get_last_vacuum_time(c.oid)) as last,
        coalesce((select o.option_value::double precision from pg_options_to_table(c.reloptions) o
          where o.option_name = 'autovacuum_vacuum_threshold'),
          current_setting('autovacuum_vacuum_threshold')::double precision)
        + greatest(c.reltuples, 0) * coalesce((select o.option_value::double precision
          from pg_options_to_table(c.reloptions) o where o.option_name = 'autovacuum_vacuum_scale_factor'),
          current_setting('autovacuum_vacuum_scale_factor')::double precision) as threshold) t
    where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r'
      and t.dead > greatest(3 * t.threshold, 10000) and coalesce(t.last < p_now - interval '5 minutes', true)
    union all
    select format('%s: its oldest transaction id is %s old', c.relname, age(c.relfrozenxid)),
      age(c.relfrozenxid) > 1500000000
    from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r'
      and age(c.relfrozenxid) > 1.5 * current_setting('autovacuum_freeze_max_age')::integer) x;
  status := case when v_facts.is_bad then 'fail' when v_facts.what is not null then 'warn' else 'ok' end;
  detail := coalesce(v_facts.what, 'it keeps up');
  fix := case when v_facts.what is not null
    then 'Turn it on, or give it more resources: autovacuum_max_workers, autovacuum_naptime,'
    ' autovacuum_vacuum_cost_limit. Now: vacuum' end;
  return next;
end $$;

-- The clock and the queue of notifications.
create or replace function queue._health_of_server(p_now timestamptz)
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 4 as $$
declare
  v_facts record;
begin
  name := 'clock';
  select greatest((select max(w.last_seen_at) from queue.worker w),
    (select j.created_at from queue.job j order by j.id desc limit 1),
    (select max(aj.claimed_at)
      from (select l.claimed_at from queue.active_job l order by l.id desc limit 1000) aj)) - p_now as ahead
      into v_facts;
  status := case when v_facts.ahead > interval '1 minute' then 'fail'
    when v_facts.ahead > interval '5 seconds' then 'warn' else 'ok' end;
  detail := case when status = 'ok' then 'it has not been set back'
    else format('it has been set back by %s or more', date_trunc('second', v_facts.ahead)) end;
  fix := case when status <> 'ok'
    then 'Let NTP adjust the server''s clock; it does so gradually. Until the clock has caught up, schedules'
    ' are late.' end;
  return next;

  name := 'notifications';
  select pg_notification_queue_usage() as usage, current_setting('pgdefer.notify', true) = 'off' as is_off
  into v_facts;
  status := case when v_facts.usage > 0.9 then 'fail' when v_facts.usage > 0.5 then 'warn' else 'ok' end;
  detail := format('%s%% of their queue is in use', round((v_facts.usage * 100)::numeric))
    || case when v_facts.is_off then '; switched off here (pgdefer.notify): workers poll' else '' end;
  fix := case when status <> 'ok'
    then 'A session that listens has had a transaction open for long: see pg_stat_activity, and end it.' end;
  return next;
end $$;

-- inspect/health.sql
-- Health: problems, and their remedies.
-- Tests: inspect/stats.sql.

create or replace function queue.health()
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security definer rows 12
set search_path = pg_catalog, pg_temp set jit = off as $$
begin
  if to_regclass('queue.installation') is null then perform queue._not_installed(); end if;
  return query select h.name, h.status, h.detail, h.fix from queue._health(clock_timestamp()) h;
end $$;
comment on function queue.health() is
  'Checks for causes that stop or slow down queues. Returns a row for each check: status ok, warn or'
    ' fail, the finding in detail, and the remedy in fix. For the invariants of the tables see'
    ' queue.check().';

-- Every check reads a bounded number of rows.
create or replace function queue._health(p_now timestamptz)
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 12 as $$
begin
  return query
    select h.name, h.status, h.detail, h.fix from queue._health_of_version() h
    union all
    select h.name, h.status, h.detail, h.fix from queue._health_of_workers(p_now) h
    union all
    select h.name, h.status, h.detail, h.fix from queue._health_of_work(p_now) h
    union all
    select h.name, h.status, h.detail, h.fix from queue._health_of_claims(p_now) h
    union all
    select h.name, h.status, h.detail, h.fix from queue._health_of_sessions(p_now) h
    union all
    select h.name, h.status, h.detail, h.fix from queue._health_of_tables(p_now) h
    union all
    select h.name, h.status, h.detail, h.fix from queue._health_of_server(p_now) h;
end $$;

-- Checks whether the code fits the tables.
create or replace function queue._health_of_version()
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 1 as $$
declare
  v_facts record;
begin
  name := 'version';
  select t.code, t.tables into v_facts from queue.version() t;
  status := case when v_facts.code = v_facts.tables then 'ok' else 'fail' end;
  detail := format('code %s, tables %s', v_facts.code, v_facts.tables);
  fix := case when v_facts.code <> v_facts.tables then 'select queue.migrate()' end;
  return next;
end $$;

-- Checks whether all ready jobs find a worker.
create or replace function queue._health_of_workers(p_now timestamptz)
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 4 as $$
declare
  v_facts record;
  -- workers that have been silent since before it count as dead only dead_after later, as for reap
  v_up_since timestamptz := queue._up_since();
  v_is_waiting boolean;
begin
  name := 'workers';
  select count(*) filter (where w.gone_at is null and w.last_seen_at + w.dead_after >= p_now) as alive,
    count(*) filter (where w.gone_at is null
                       and greatest(w.last_seen_at, v_up_since) + w.dead_after < p_now - interval '10 s'
                       or not w.is_clear and w.gone_at < p_now - interval '1 minute') as dead,
    count(*) filter (where w.is_awaited) as awaited,
    max(w.dead_after) filter (where w.is_awaited) as patience,
    (select count(*) from (select from queue.active_job l limit 100001) l) as live
  into v_facts
  from (select w.*, w.gone_at is null and w.last_seen_at + w.dead_after < p_now
          and w.last_seen_at < v_up_since and v_up_since + w.dead_after >= p_now as is_awaited
        from queue.worker w) w;
  -- before the era has begun no worker has come at all (_up_since)
  v_is_waiting := v_facts.awaited > 0 and v_up_since < p_now;
  status := case
    when v_facts.dead > 0 or v_facts.alive = 0 and v_facts.live > 0 and not v_is_waiting then 'fail'
    when v_facts.alive = 0 then 'warn' else 'ok' end;
  detail := format('%s alive', v_facts.alive)
    || case when v_facts.dead > 0 then format(', %s dead and not reaped', v_facts.dead) else '' end
    || case when v_facts.awaited > 0
      then format(', %s silent since before the server started or was promoted', v_facts.awaited) else '' end
    || case when v_facts.alive = 0
      and v_facts.live > 0
      then format(', %s ready or running', case when v_facts.live > 100000 then 'more than 100000 jobs'
        else queue._count_of(v_facts.live, 'job') end) else '' end;
  fix := case when v_facts.dead > 0
    then 'Start a worker, or call queue.tick() from pg_cron. For now: select * from queue.tick()'
              when v_facts.alive = 0 and v_is_waiting
                then format('Wait: they have %s from then on to come back. If none does, start a worker:'
                  ' pgdefer worker', v_facts.patience)
              when v_facts.alive = 0 then 'Start a worker: pgdefer worker' end;
  return next;

  name := 'queues';
  select count(*) as n, string_agg(l.queue, ', ' order by l.queue) filter (where l.no <= 10) as names
  into v_facts
  from (
    select l.queue, row_number() over (order by l.queue) as no
    from (select distinct l.queue from queue.lane l
          where (l.paused_until is null or l.paused_until <= p_now)
            and exists (select from queue.active_job aj where aj.lane = l.lane
              and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id) and aj.claim is null)
            and queue._live_workers(l.queue, p_now, v_up_since) = 0) l) l;
  status := case when v_facts.n > 0 then 'fail' else 'ok' end;
  detail := case when v_facts.n > 0 then format('ready jobs in %s that no live worker serves: %s',
    queue._count_of(v_facts.n, 'queue'), v_facts.names)
    else 'every queue with ready jobs is served, or paused' end;
  fix := case when v_facts.n > 0 then 'Start a worker for them: pgdefer worker --queues NAME' end;
  return next;

  name := 'paused';
  select count(*) as n, string_agg(l.queue, ', ' order by l.queue) filter (where l.no <= 10) as names
  into v_facts
  from (
    select l.queue, row_number() over (order by l.queue) as no
    from (select distinct l.queue from queue.lane l
          where l.paused_until > p_now
            and exists (select from queue.active_job aj where aj.lane = l.lane
              and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id) and aj.claim is null)) l) l;
  status := case when v_facts.n > 0 then 'warn' else 'ok' end;
  detail := case when v_facts.n > 0 then format('ready jobs in %s: %s',
    queue._count_of(v_facts.n, 'paused queue'), v_facts.names) else 'no paused queue holds ready jobs' end;
  fix := case when v_facts.n > 0 then 'select queue.resume(name)' end;
  return next;
end $$;

-- Checks whether due work is done.
create or replace function queue._health_of_work(p_now timestamptz)
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 4 as $$
declare
  v_facts record;
begin
  name := 'due';
  select least(
      (select w.at from queue.waiting w where w.at >= k.due_at order by w.at limit 1),
      (select j.created_at from queue.job j where j.xid >= k.next_xid order by j.xid, j.id limit 1),
      (select e.at from queue.expiry e
        where not exists (select from queue.active_job l where l.id = e.id and l.claim is not null)
        order by e.at limit 1),
      queue._next_lease_end()) as at
  into v_facts from queue.cursor_now k;
  status := case when v_facts.at < p_now - interval '10 minutes' then 'fail'
    when v_facts.at < p_now - interval '1 minute' then 'warn' else 'ok' end;
  detail := case when status = 'ok' then 'nothing is overdue'
    else format('overdue for %s', date_trunc('second', p_now - v_facts.at)) end;
  fix := case when status <> 'ok'
    then 'Start a worker, or call queue.tick() from pg_cron. For now: select * from'
    ' queue.tick()' end;
  return next;

  name := 'schedules';
  select count(*) filter (where s.due_at < p_now - interval '1 minute') as late,
    count(*) filter (where s.reason is not null and s.reason <> 'paused') as broken,
    string_agg(format('%s%s', left(s.name, 100), coalesce(': ' || left(s.reason, 200), '')), '; '
      order by s.name) filter (where s.no <= 5) as names
  into v_facts
  from (select s.name, s.due_at, s.reason, row_number() over (order by s.name) as no from queue.schedule s
        where s.is_enabled
          and (s.due_at < p_now - interval '1 minute' or s.reason is not null and s.reason <> 'paused')) s;
  status := case when v_facts.late > 0 then 'fail' when v_facts.broken > 0 then 'warn' else 'ok' end;
  detail := case when status = 'ok' then 'no recurring run is late'
    else format('%s late, %s with an error: %s', v_facts.late, v_facts.broken, v_facts.names) end;
  fix := case when v_facts.late > 0
    then 'Start a worker, or call queue.tick() from pg_cron. For now: select * from queue.tick()'
              when v_facts.broken > 0
                then 'See reason in queue.schedules, and correct the defaults of the task or the options of'
                ' the schedule.' end;
  return next;
end $$;

-- Checks for sessions that hold up admission, and handlers that do not end.
create or replace function queue._health_of_claims(p_now timestamptz)
returns table (name text, status text, detail text, fix text)
language plpgsql stable parallel safe security invoker rows 4 as $$
declare
  v_facts record;
begin
  name := 'tasks';
  select count(*) as n,
    string_agg(format('%s (%s) to worker %s', left(u.task, 200), queue._count_of(u.jobs, 'job'),
      u.workers), '; ')
    filter (where u.no <= 5) as names into v_facts
  from (select u.*, row_number() over () as no from queue._unknown_tasks(p_now) u) u;
  status := case when v_facts.n > 0 then 'warn' else 'ok' end;
  detail := case when v_facts.n > 0 then format('unknown tasks: %s', v_facts.names)
    else 'all recently claimed tasks were known' end;
  fix := case when v_facts.n > 0
    then 'Start a worker that knows them, or register a function for them; during a deployment, wait'
    ' until it is complete' end;
  return next;

  name := 'admission';
  v_facts := queue._admission_holder();
  status := case when v_facts.pid is null and v_facts.state is null
    or v_facts.since > p_now - interval '5 s' then 'ok' when v_facts.since > p_now - interval '15 s'
    then 'warn'
                 when v_facts.since is null then 'warn' else 'fail' end;
  detail := case when status = 'ok' then 'no session holds the admission lock for long'
                 else format('%s%s holds the admission lock%s; no other session can fetch new jobs',
                   coalesce('process ' || v_facts.pid, 'a prepared transaction'),
                   coalesce(' of role ' || v_facts.role, ''),
                   coalesce(', in a transaction that has been open since '
                     || date_trunc('second', v_facts.since), '')
                     || coalesce(' (' || v_facts.state || ')', '')) end;
  fix := case when status <> 'ok'
    then 'Look again in a moment; if it is the same process, select queue.unblock() ends it; a prepared'
    ' transaction is ended by ROLLBACK PREPARED' end;
  return next;

  name := 'timeouts';
  select count(*) as n, string_agg(format('job %s at %s', o.id, date_trunc('second', o.timeout_at)), ', '
    order by o.timeout_at) filter (where o.no <= 10) as jobs into v_facts
  from (select o.*, row_number() over (order by o.timeout_at) as no from queue._overdue() o) o;
  status := case when v_facts.n > 0 then 'warn' else 'ok' end;
  detail := case
    when v_facts.n > 0
    then format('%s running past the timeout, as the handler could not be ended: %s',
      queue._count_of(v_facts.n, 'job'), v_facts.jobs)
                 else 'no handler outlives its timeout' end;
  fix := case when v_facts.n > 0
    then 'Each keeps its slot and its lock until it ends. Restart its worker (queue.why says which); run'
    ' such tasks in processes, which can be killed' end;
  return next;
end $$;

-- privileges.sql
-- Privileges: PUBLIC has no rights.

revoke all on all routines in schema queue from public;
