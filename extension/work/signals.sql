-- Signals and events: what durable jobs wait for.
--
-- Both functions only append, as defer does, so they may be called from triggers, in any isolation level, and
-- at the same time as anything else. They take no lock except the sleep lock, shared and by try. Admission
-- applies the appended rows under the admission lock; admit/suspended.sql says why no wake-up is lost.
-- Tests: work/waits.sql, work/signals.wait.spec, work/signals.timeout.spec.

-- Locks: see the top. Raises: 22023, QJ001.
create or replace function queue.signal(job bigint, name text, payload jsonb default '{}')
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
begin
  {{if_restricted}}
    perform queue._require_jobs('{producer,worker,operator}', array[signal.job]);
  end if;
  perform queue._check_name('name', signal.name);
  perform queue._check_size('payload', signal.payload);
  insert into queue.received_signal (job_id, name, payload)
  select j.id, signal.name, coalesce(signal.payload, '{}') from queue.job j where j.id = signal.job;
  if not found then
    perform queue._job_not_found(signal.job);
  end if;
  insert into queue.pending_settlement (job_id, kind, flags) values (signal.job, 'signal', 0);
  perform queue._announce();
  if queue._is_operator() then
    perform queue._audit_jobs('signal', jsonb_build_object('name', signal.name), array[signal.job],
      queue._jobs_before(array[signal.job]));
  end if;
end $$;
comment on function queue.signal(bigint, text, jsonb) is
  'Sends a signal with a payload to a job. Each wait of the job for this name takes one signal, the oldest'
    ' first. A signal that comes early is kept for as long as the job. The call only appends, as defer does,'
    ' so it may be part of any transaction, also from triggers; it takes effect at the commit. A finished job'
    ' can take the signal only after it was retried.';

-- Locks: see the top. Raises: 22023.
create or replace function queue.publish(event text, payload jsonb default '{}', retain interval default null)
returns boolean language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_no bigint;
begin
  {{installed}}
  perform queue._check_name('event', publish.event);
  perform queue._check_size('payload', publish.payload);
  perform queue._check_interval('retain', publish.retain);
  if exists (select from queue.event e where e.name = publish.event and e.expires_at > clock_timestamp()) then
    perform queue._audit('publish', jsonb_build_object('event', publish.event)) where queue._is_operator();
    return false;
  end if;
  insert into queue.event (name, payload, expires_at)
  values (publish.event, coalesce(publish.payload, '{}'),
    clock_timestamp() + coalesce(publish.retain, interval '30 days'))
  returning no into v_no;
  insert into queue.pending_settlement (job_id, kind, flags) values (-v_no, 'event', 0);
  perform queue._announce();
  if queue._is_operator() then
    perform queue._audit('publish', jsonb_build_object('event', publish.event));
  end if;
  return true;
end $$;
comment on function queue.publish(text, jsonb, interval) is
  'Publishes an event with a payload to all jobs that wait for it now, or while it is kept: for retain,'
    ' 30 days by default. During that time the first event of a name counts; if there is one, the call'
    ' returns false and does nothing. The call only appends, as defer does: if two transactions publish the'
    ' same event at once, both may get true, and one of the two events counts.';
