-- Progress: how much of its work a running job has done.

-- Locks: the claim's row of queue.active_job, FOR KEY SHARE, as finish_step; then the job's row of
-- queue.job_override. Why no wake-up is lost: nobody waits for progress.
-- Raises: 22023, QJ001, QJ002, QJ008.
create or replace function queue.set_progress(id bigint, claim bigint, percent numeric,
  message text default null)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_percent constant numeric := round(set_progress.percent, 2);
begin
  {{if_restricted}}
    perform queue._require_claims(array[set_progress.id], array[set_progress.claim]);
  end if;
  perform queue._check_isolation();
  if v_percent between 0 and 100 is false then
    perform queue._invalid('percent must be 0 to 100', 'Pass how much of the work is done, or NULL.');
  end if;
  perform queue._lock_claim(set_progress.id, set_progress.claim);
  insert into queue.job_override as s (id, percent, message)
  values (set_progress.id, v_percent, left(set_progress.message, 1000))
  on conflict on constraint job_override_pkey do update
    set (percent, message) = (excluded.percent, coalesce(excluded.message, s.message));
end $$;
comment on function queue.set_progress(bigint, bigint, numeric, text) is
  'Sets the progress of a running job, which queue.jobs shows: percent, rounded to two digits, and a message'
    ' of which 1,000 characters are kept. NULL as the message keeps the last one.';
