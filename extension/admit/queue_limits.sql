-- A queue's own limits: how many of its jobs run at once (max_running), and how many start in an interval
-- (rate).
-- Two sessions: admit/queue_limits.recount.spec.

-- Turns the lanes of a queue with limits into limited ones, and counts its running jobs for max_running.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
-- Why no start stays uncounted: if a claim is made while the limit is being set, its row is locked and
-- skipped here, or not yet visible. So _recount_limited counts again.
create or replace function queue._limit_queue(p_queue text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_config record;
  v_running bigint[];
  v_counted bigint[];
begin
  select c.max_running, c.rate_limit into v_config from queue.queue_config c where c.queue = p_queue;
  if v_config.rate_limit is null then
    delete from queue.rate_start r where r.key = 'q' || p_queue;
  else
    perform queue._forget_rate_starts('q' || p_queue, 0, max(r.no) - v_config.rate_limit)
    from queue.rate_start r where r.key = 'q' || p_queue having count(*) > 0;
  end if;
  if v_config.max_running is not null or v_config.rate_limit is not null then
    update queue.lane l set kind = {{lane_limited}} where l.queue = p_queue and l.kind = {{lane_plain}};
  end if;
  if v_config.max_running is not null then
    v_running := array(
      select aj.id from queue._active_jobs_of(p_queue) q join queue.active_job aj on aj.id = q.id
      where aj.claim is not null and aj.flags & {{queue_slot}} = 0);
    v_counted := array(select aj.id from queue.active_job aj
      where aj.id = any (v_running) and aj.claim is not null for update skip locked);
    update queue.active_job aj set flags = aj.flags | {{queue_slot}} where aj.id = any (v_counted);
    perform queue._add_slots(array['q' || p_queue], null, array[cardinality(v_counted)], null, null, null);
    if cardinality(v_counted) < cardinality(v_running) then
      update queue.queue_config c set limited_at = clock_timestamp(), waits_for = null
      where c.queue = p_queue;
    end if;
  end if;
end $$;

-- Counts the running jobs for max_running again after a limit was set. It does so once the new limit is
-- committed, and every transaction has ended that may have seen the old lanes; or after a minute. It does not
-- count each time, because counting reads everything that is ready in the queue. Nobody gets jobs meanwhile,
-- so it counts for a tenth of a second; the next call goes on.
-- Locks: the caller holds the admission lock, as does a session that sets limits until its transaction ends;
-- rows of queue.active_job by skip locked.
create or replace function queue._recount_limited()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_start timestamptz := clock_timestamp();
  v_config record;
begin
  for v_config in
    select c.queue, c.waits_for, c.limited_at from queue.queue_config c
    where c.limited_at is not null and c.xmin <> pg_current_xact_id()::xid
    order by c.waits_for is not null, c.limited_at
  loop
    exit when clock_timestamp() > v_start + interval '100 ms';
    if v_config.waits_for is null then
      update queue.queue_config c
      set waits_for = queue._virtual_transactions() where c.queue = v_config.queue;
    elsif v_config.limited_at > clock_timestamp() - interval '1 minute'
      and exists (select from pg_locks l where l.locktype = 'virtualxid'
        and l.virtualtransaction = any (v_config.waits_for)) then
      continue;
    else
      update queue.queue_config c set limited_at = null, waits_for = null where c.queue = v_config.queue;
    end if;
    perform queue._limit_queue(v_config.queue);
  end loop;
end $$;

-- Whether a queue's max_running or rate allows no start now.
create or replace function queue._is_queue_full(p_queue text)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (select from queue.queue_config c where c.queue = p_queue and {{has_limit}})
    and queue._queue_room(p_queue, 1, clock_timestamp()) = 0;
end $$;

-- How many jobs, at most p_n, a queue's max_running and rate allow to start at p_now.
create or replace function queue._queue_room(p_queue text, p_n integer, p_now timestamptz)
returns integer language plpgsql stable parallel safe security invoker as $$
declare
  v_config record;
  v_room integer := p_n;
begin
  select c.max_running, c.rate_limit, c.rate_per into v_config from queue.queue_config c
  where c.queue = p_queue;
  if v_config.max_running is not null then
    v_room := least(v_room, v_config.max_running
      - coalesce((select s.used from queue.semaphore s where s.key = 'q' || p_queue
        order by s.tick desc limit 1), 0));
  end if;
  if v_config.rate_limit is not null then
    v_room := queue._rate_room('q' || p_queue, v_config.rate_limit, v_config.rate_per, v_room, p_now);
  end if;
  return greatest(v_room, 0);
end $$;

-- When a queue's rate allows the next start; NULL for at once.
create or replace function queue._next_start(p_queue text)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_at timestamptz;
begin
  select queue._rate_opens_at('q' || p_queue, c.rate_limit, c.rate_per) into v_at
  from queue.queue_config c where c.queue = p_queue and c.rate_limit is not null;
  return v_at;
end $$;

-- Records starts of a queue's jobs: in its rate, at p_now, and in its max_running. Returns the jobs that
-- count in its max_running.
-- Locks: the caller holds the admission lock.
create or replace function queue._count_starts(p_queue text, p_ids bigint[], p_now timestamptz)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_config record;
begin
  select c.max_running, c.rate_limit into v_config from queue.queue_config c where c.queue = p_queue;
  if v_config.rate_limit is not null then
    perform queue._count_rate_starts('q' || p_queue, v_config.rate_limit, cardinality(p_ids), p_now);
  end if;
  if v_config.max_running is null then
    return '{}'::bigint[];
  end if;
  perform queue._add_slots(array['q' || p_queue], null, array[cardinality(p_ids)], null, null, null);
  return p_ids;
end $$;
