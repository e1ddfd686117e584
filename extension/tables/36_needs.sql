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
create sequence queue.needed_seq;

-- Jobs that a client waits for.
create table queue.awaited (
  id bigint not null,
  constraint awaited_pkey primary key (id)
);
create sequence queue.awaited_seq;

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
