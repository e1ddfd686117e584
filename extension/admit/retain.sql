-- Retention: how long a finished job is kept. work/retention.sql deletes it after that.
-- Tests: work/retention.sql.

-- How long a finished job is kept: by its own option, else by its queue, else by the default for succeeded
-- jobs; NULL means for ever. The job's option is one interval, or an object of intervals by outcome.
create or replace function queue._retention(p_id bigint, p_default interval default '{{keep_succeeded}}')
returns interval language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select coalesce((case jsonb_typeof(o.retain) when 'object' then o.retain ->> f.state
        else o.retain #>> '{}' end)::interval,
      c.retain, case when f.state = 'succeeded' then p_default end)
    from queue.job_now j
    cross join lateral (select j.options -> 'retain' as retain) o
    join queue.finished f on f.id = j.id
    left join queue.queue_config c on c.queue = j.queue
    where j.id = p_id);
end $$;
