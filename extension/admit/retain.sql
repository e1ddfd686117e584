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

-- Sets the retention of a finished job again after a change of its queue or state.
create or replace function queue._set_purge_at(p_id bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  -- Not before now: a job whose transaction names this one as a need may not have committed yet (_safe_at).
  update queue.finished f
  set purge_at = greatest(f.finished_at + x.retain, case when x.retain is not null then clock_timestamp() end)
  from (select queue._retention(p_id, null) as retain) x
  where f.id = p_id;
end $$;
