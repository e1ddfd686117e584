-- Listing jobs, oldest first. To plan a query of the view queue.jobs takes milliseconds. A function's plan is
-- kept for the session, even where statements can't be prepared: behind a pooler, or where transactions roll
-- back.

-- Raises: 22023.
create or replace function queue.list_jobs(after bigint default 0, max_jobs integer default 100)
returns table (id bigint, task text, queue text, state text, reason text, args jsonb, priority integer,
  lock text, queueing_lock text, concurrency_key text, scheduled_at timestamptz, deadline timestamptz,
  created_at timestamptz, started_at timestamptz, finished_at timestamptz, attempts integer, error text,
  result jsonb, description text, headers jsonb, parent bigint)
language plpgsql stable parallel unsafe security definer rows 100
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_allowed text[];
  v_hidden jsonb;
begin
  {{installed}}
  perform queue._check_max_jobs(list_jobs.max_jobs);
  v_allowed := queue._allowed_queues('{operator,reader}');
  v_hidden := queue._hidden_paths();
  return query
    select j.id, j.task, j.queue, j.state, j.reason, queue._mask_args(v_hidden -> j.task, j.args), j.priority,
      j.lock, j.queueing_lock, j.concurrency_key, j.scheduled_at, j.deadline, j.created_at, j.started_at,
      j.finished_at, j.attempts, j.error, j.result, j.description, j.headers, j.parent
    from queue.all_jobs j
    where j.id > coalesce(list_jobs.after, 0) and (v_allowed is null or queue._allows(v_allowed, j.queue))
    order by j.id limit list_jobs.max_jobs;
end $$;
comment on function queue.list_jobs(bigint, integer) is
  'Returns jobs as in queue.jobs, oldest first, with ids above after: pass the last id of a page to get the'
    ' next page. To plan a query of queue.jobs takes milliseconds; this keeps its plan. A transaction that'
    ' deferred earlier may commit later, so a job with a smaller id may still appear. Sensitive args'
    ' (register_task) read *** for all but the owner.';
