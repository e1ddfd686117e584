-- Claiming the next job without a worker.

-- Locks, and why no wake-up is lost: as fetch. It needs a transaction of its own. The claim depends only on
-- its lease, because its worker is removed at once.
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
  perform queue._check_are_few(queues);
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
    c.task,
    case when x.size <= {{answer_bytes}} then queue._mask_args(queue._hidden_paths() -> c.task, c.args) end,
    c.queue, c.priority, c.lock, c.attempt, c.scheduled_at,
    c.deadline,
    case when x.size <= {{answer_bytes}} then c.headers end
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
