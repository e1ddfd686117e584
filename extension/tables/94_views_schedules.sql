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
