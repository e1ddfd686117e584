-- How many jobs ended in each minute, by queue and task (work/minutes.sql). waits, runs: how many of them
-- waited, and ran, for how long: the n-th number counts times in the n-th class (queue._class_of).
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

-- The time up to which ends have been counted. All transactions that may have ended a job before safe_at have
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

create view queue.minutes as
select m.minute, m.queue collate "default" as queue, m.task collate "default" as task, m.succeeded, m.failed,
  m.cancelled, m.failures
from queue.minute m cross join (select) read_only
where (select x.is_all from queue.visible_queues x)
  or m.queue like any ((select x.queues from queue.visible_queues x)::text[]);
comment on view queue.minutes is
  'How many jobs of each queue and task ended in each minute of the last 7 days: succeeded, failed,'
    ' cancelled. failures: their attempts that failed, crashed or timed out. Maintenance counts them about'
    ' 10 seconds later. queue.series and queue.task_stats have the times.';
