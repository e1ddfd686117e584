-- Copying a job, and claiming the next one without a worker.

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
    ' id. The copy has its own history. It gets no queueing_lock, no idempotency_key, no group, no expires_at'
    ' that has passed, and only needs that still exist; it is held if the job is.';

-- Locks: as fetch. It needs a transaction of its own. The claim depends only on its lease: its worker is
-- removed at once.
-- Raises: 22023, QJ008.
create or replace function queue.next(queues text[] default null, ack boolean default false,
  lease interval default '20 minutes')
returns table (id bigint, claim bigint, task text, args jsonb, queue text, priority integer, lock text,
  attempt integer, scheduled_at timestamptz, deadline timestamptz, headers jsonb, expires_at timestamptz)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_worker bigint;
  v_found record;
begin
  {{if_restricted}}
    queues := queue._narrow_queues('{operator}', queues);
  end if;
  perform queue._check_isolation();
  if next.ack is not true and (next.lease is null or next.lease <= interval '0') then
    perform queue._invalid('lease must be longer than 0', 'Pass an interval such as ''20 minutes''.');
  end if;
  perform queue._check_interval('lease', next.lease) where next.ack is not true;
  v_worker := queue._register_worker('operator', queues, '{"listen": false}');
  select queue._claim_by_options(v_worker, queues, 1, '{}', true, true) as ids into v_found;
  select c.id, c.claim,
    c.task, case when x.size <= 65536 then queue._cut(queue._hidden_paths() -> c.task, c.args) end,
    c.queue, c.priority, c.lock, c.attempt, c.scheduled_at,
    c.deadline,
    case when x.size <= 65536 then c.headers end
  into id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, headers
  from queue.claimed_job c
  cross join lateral (
    select coalesce(j.size, 0) as size from queue.job_now j where j.id = c.id) x
  where c.id = v_found.ids[1];
  if id is null or next.ack then
    delete from queue.worker w where w.id = v_worker;
    if id is null then
      return;
    end if;
    perform queue._succeed(array[id], array[claim], null);
    update queue.finished f set reason = 'operator' where f.id = next.id;
  else
    expires_at := queue._extend(id, claim, next.lease);
    update queue.worker w set gone_at = clock_timestamp(), is_clear = true where w.id = v_worker;
  end if;
  perform queue._audit_jobs('next', jsonb_build_object('queues', queues, 'ack', ack, 'lease', lease),
    array[id], jsonb_build_array(jsonb_build_object('id', id, 'state', 'ready', 'queue', queue)));
  return next;
end $$;
comment on function queue.next(text[], boolean, interval) is
  'Claims the next job of queues (names, prefix*, *; NULL: all) by hand, for queue.succeed, fail or'
    ' release with its id and claim. The claim has its own lease, and counts as crashed when that ends'
    ' (expires_at); queue.extend renews it. With ack => true the job is marked succeeded immediately, reason'
    ' operator. No row: there is no job. Args of more than 64 kB are left out: read them in queue.jobs.'
    ' Sensitive args read *** for all but the owner.';

-- Appends a copy of a job, with further flags, and returns its id. It wakes nobody. The copy does not need
-- the jobs that the original awaits. But a copy that continues with the steps of the original (flag
-- overridden) awaits those of them that have ended, because its handler may ask for their results.
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
      | case when w.id is not null then {{held}} else 0 end
      | case when x.is_expiring then {{expires}} else 0 end
      | case when x.size > 2000 then {{large}} else 0 end | p_flags,
    x.scheduled_at, d.deadline, j.lock, null, nullif(v_needs, '{}'), j.keys, j.limits,
    nullif(coalesce(j.options, '{}') - '{idempotency_key,group,awaited}'::text[]
      - case when x.is_expiring then '' else 'expires_at' end
      || jsonb_strip_nulls(jsonb_build_object('awaited', v_awaited)), '{}'),
      x.size)::queue.job_options
  from queue.job_now j
  join queue.job d on d.id = j.id  -- as it was deferred
  left join queue.waiting w on w.id = j.id and w.reason = 'held'
  cross join lateral (select queue._replacement(j.id, j.flags) as job) r
  cross join lateral (
    select case when r.job is not null then (r.job ->> 'scheduled_at')::timestamptz
        when j.claims = 0 then j.scheduled_at
        when d.scheduled_at <= v_now then nullif(d.scheduled_at, '-infinity') end as scheduled_at,
      coalesce((j.options ->> 'expires_at')::timestamptz > v_now, false) as is_expiring,
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
