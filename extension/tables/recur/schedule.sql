-- Schedules. next_run_at is the first run that has not been handled, so no run can be handled twice, whatever
-- the clock does. due_at is the time at which admission checks the row again: next_run_at, or a later time,
-- for which reason says why. Both are NULL while the schedule is disabled.
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
