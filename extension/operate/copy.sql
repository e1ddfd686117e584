-- Copying a job.

-- Locks: none but the sleep lock, shared and by try: it only appends, as defer does. Raises: 22023, QJ001.
create or replace function queue.copy(id bigint, queue text default null)
returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_id bigint;
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator}', array[copy.id]);
    perform queue._require_queue('{operator}', copy.queue) where copy.queue is not null;
  end if;
  if copy.queue is not null then
    perform queue._check_queue(copy.queue);
  end if;
  v_id := queue._copy(copy.id, copy.queue, 0);
  perform queue._announce();
  perform queue._audit_jobs('copy', jsonb_build_object('queue', copy.queue), array[copy.id, v_id],
    queue._jobs_before(array[copy.id]), copy.queue);
  return v_id;
end $$;
comment on function queue.copy(bigint, text) is
  'Defers a new job with the same task, args and options, in a queue (NULL: the same), and returns its'
    ' id. The copy has its own history, and the deadline that the job was deferred with. It gets no'
    ' queueing_lock, no idempotency_key, no group, no expires_at that has passed, and only needs that still'
    ' exist; it is held if the job is.';

-- Appends a copy of a job, with further flags, and returns its id. It wakes nobody. The copy does not need
-- the jobs that the original awaits. But a copy that continues with the steps of the original (flag
-- overridden) awaits those of these jobs that have ended, because its handler may ask for their results.
-- Locks: none. Raises: QJ001.
create or replace function queue._copy(p_id bigint, p_queue text, p_flags integer)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz;
  v_needs bigint[];
  v_awaited jsonb;
  v_id bigint;
begin
  perform pg_current_xact_id();  -- as in _check_needs
  v_now := clock_timestamp();
  if p_flags & {{overridden}} <> 0 then
    select jsonb_agg(d.need_id order by d.need_id) into v_awaited
    from queue.need d left join queue.finished f on f.id = d.need_id
    where d.job_id = p_id and d.mode & {{ended}} <> 0
      and (d.claim is null or coalesce(f.state, d.deleted_state) is not null);
    v_awaited := coalesce(v_awaited, (select j.options -> 'awaited' from queue.job j where j.id = p_id));
  end if;
  v_needs := array(
    select n.id from queue._direct_needs(p_id) n
    cross join lateral (select o.id from queue.job o where o.id = n.id offset 0) o
    left join lateral (
      select f.purge_at, f.finished_at, f.state
      from queue.finished f
      where f.id = n.id offset 0) f on true
    where {{is_past}} is not true
      and not exists (select from queue.need d
        where d.job_id = p_id and d.need_id = n.id and d.mode & {{ended}} <> 0)
    order by n.id);
  insert into queue.log (task, args, job_options)
  select j.task, coalesce(r.job -> 'args', j.args), row(
    coalesce(p_queue, j.queue), coalesce((r.job ->> 'priority')::integer, j.priority),
    j.flags & ~({{needs}} | {{scheduled}} | {{held}} | {{expires}}
      | {{needed}} | {{until_start}} | {{until_finish}}) & case when j.lock is null then ~{{lock}} else -1 end
      | case when v_needs <> '{}' or v_awaited is not null or j.options ->> 'needs_mode' = 'any'
        then {{needs}} else 0 end
      | case when x.scheduled_at is not null then {{scheduled}} else 0 end
      | case when x.is_held then {{held}} else 0 end
      | case when x.is_expiring then {{expires}} else 0 end
      | case when x.size > 2000 then {{large}} else 0 end | p_flags,
    x.scheduled_at, d.deadline, j.lock, null, nullif(v_needs, '{}'), j.keys, j.limits,
    nullif(coalesce(j.options, '{}') - '{idempotency_key,group,awaited}'::text[]
      - case when x.is_expiring then '' else 'expires_at' end
      || jsonb_strip_nulls(jsonb_build_object('awaited', v_awaited)), '{}'),
      x.size)::queue.job_options
  from queue.job_now j
  join queue.job d on d.id = j.id  -- as it was deferred
  cross join lateral (select queue._replacement(j.id, j.flags) as job) r
  cross join lateral (
    select case when r.job is not null then (r.job ->> 'scheduled_at')::timestamptz
        when j.claims = 0 then j.scheduled_at
        when d.scheduled_at <= v_now then nullif(d.scheduled_at, '-infinity') end as scheduled_at,
      coalesce((j.options ->> 'expires_at')::timestamptz > v_now, false) as is_expiring,
      (select s.state = 'held' from queue.all_jobs s where s.id = p_id) as is_held,
      case when r.job is null then j.size
        else octet_length(r.job ->> 'args') + coalesce(octet_length((j.options -> 'headers')::text), 0)
      end as size) x
  where j.id = p_id
  returning id into v_id;
  if v_id is null then
    perform queue._job_not_found(p_id);
  end if;
  return v_id;
end $$;
