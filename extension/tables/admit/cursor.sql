-- The admission lock: only the session that locks this row admits. It is a row, not an advisory lock, so that
-- only roles with rights on the table can take it.
create table queue.admission (
  is_only boolean not null default true,
  constraint admission_pkey primary key (is_only),
  constraint admission_only_check check (is_only)
);

-- How far the log has been read: all rows that are visible in the snapshot (next_xid, in_flight) have been
-- read. A newer row replaces the row, and reads begin with the newest. So dead rows cost nothing while a
-- transaction that stays open keeps them.
create table queue.cursor (
  tick bigint not null default 0,
  next_xid xid8 not null default '3',
  in_flight xid8[] not null default '{}',
  high_id bigint not null default 0,
  has_backlog boolean not null default false,
  due_at timestamptz not null default '-infinity',
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
-- part had several of these bands. queue: the queue of all its jobs, if they are plain, have no deadline and
-- no share, are of one queue and priority, and come in the order of ids.
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
  queue text collate "C",
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
  constraint rehearsal_is_never_committed_pkey primary key (n) deferrable initially deferred
);
