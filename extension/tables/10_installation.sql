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
