-- Retention: how long a finished job is kept. work/retention.sql deletes it after that.
-- Tests: work/retention.sql.

-- How long a finished job is kept: by the job, its queue, or the default for succeeded ones; NULL means for
-- ever.
create or replace function queue._retention(p_id bigint, p_default interval default '{{keep_succeeded}}')
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
