-- Changes of jobs after they were deferred.
-- Tests: operate/change.sql.

-- Overrides settings that jobs were deferred with, and sends the jobs through the gates again. Running and
-- finished jobs keep their place; the change applies to their next run. Returns the jobs that it has changed:
-- all but those whose row another transaction holds. All leave their places before any goes through the
-- gates, so that keys and locks are looked at once for all of them. p_ids: each job once.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._override(
  p_ids bigint[], p_queue text default null, p_priority integer default null,
  p_deadline timestamptz default null,
  p_scheduled_at timestamptz default null, p_args jsonb default null)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_id bigint;
  v_taken record;
  v_done bigint[] := '{}'::bigint[];
  v_places text[] := '{}'::text[];
  v_keys text[];
  v_parked bigint[];
  v_arrived bigint[];
begin
  foreach v_id in array p_ids loop
    v_taken := queue._dequeue(v_id);
    if v_taken.place is null then
      -- While its claim is being ended, its row of queue.job_override must not be waited for.
      perform from queue.active_job aj where aj.id = v_id for update skip locked;
      continue when not found and exists (select from queue.active_job aj where aj.id = v_id);
    end if;
    v_done := v_done || v_id;
    v_places := v_places || coalesce(v_taken.place, '');
    v_keys := v_keys || v_taken.keys;
  end loop;
  perform queue._return_tags(array(
    select u.id from unnest(v_done) u (id)
    cross join lateral (
      select j.queue, j.priority, j.tag from queue.job_now j where j.id = u.id offset 0) j
    where j.tag is not null and (p_queue <> j.queue or p_priority <> j.priority)))
  where num_nonnulls(p_queue, p_priority) > 0;
  insert into queue.job_override as s (id, queue, priority, deadline, scheduled_at, args, size, extra_flags)
  select u.id, p_queue, p_priority, p_deadline, p_scheduled_at, p_args,
    x.size, case when x.size > 2000 then {{large}} else 0 end
  from unnest(v_done) u (id)
  cross join lateral (
    select octet_length(p_args::text)
        + coalesce(octet_length((select j.options -> 'headers' from queue.job j where j.id = u.id)::text), 0)
          as size) x
  on conflict on constraint job_override_pkey do update
    set (queue, priority, deadline, scheduled_at, args, size, extra_flags)
      = (coalesce(excluded.queue, s.queue), coalesce(excluded.priority, s.priority),
        coalesce(excluded.deadline, s.deadline),
         coalesce(excluded.scheduled_at, s.scheduled_at), coalesce(excluded.args, s.args),
         coalesce(excluded.size, s.size),
         s.extra_flags | excluded.extra_flags);
  insert into queue.waiting (id, reason)
  select u.id, u.place from unnest(v_done, v_places) u (id, place) where u.place in ('held', 'moving');
  select array_agg(u.id) filter (where u.place = 'parked'),
    array_agg(u.id) filter (where u.place not in ('parked', 'held', 'moving', 'log', ''))
  into v_parked, v_arrived
  from unnest(v_done, v_places) u (id, place);
  if v_parked is not null then
    perform queue._park(v_parked);
  end if;
  if v_arrived is not null then
    perform queue._advance(p_arrived => v_arrived, p_keys => v_keys);
  end if;
  return v_done;
end $$;

-- The steps in which jobs sleep now. A sleep is over once its time has come, or once a later claim of its job
-- has begun: then a run has seen its value.
-- Locks: none.
create or replace function queue._sleeping_steps(p_ids bigint[])
returns table (step_row tid, name text, no integer) language plpgsql stable parallel safe security invoker
rows 10 as $$
begin
  return query
    select s.ctid, s.name, s.no from queue.step s
    where s.job_id = any (p_ids) and s.is_sleep and (s.value #>> '{}')::timestamptz > clock_timestamp()
      and not exists (select from queue.active_job aj where aj.id = s.job_id and aj.claim is not null)
      and not exists (select from queue.attempt a where a.job_id = s.job_id and a.claim > s.claim);
end $$;

-- Lets jobs that sleep continue at another time (NULL: now), which becomes the value of the step.
-- Locks: the caller holds the admission lock, under which alone the jobs can continue.
-- Why no wake-up is lost: the caller gives the jobs their new time.
create or replace function queue._change_sleep(p_ids bigint[], p_at timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.step s set value = to_jsonb(queue._utc(greatest(p_at, clock_timestamp())))
  where s.ctid = any (array(select n.step_row from queue._sleeping_steps(p_ids) n));
end $$;

-- Puts a replacement's args, priority and time into the job that holds the key. If that job sleeps, it now
-- sleeps until this time. If another transaction holds the job's row (an operation that waits for the
-- admission lock), the replacement is handed over again; the mark keeps the job from starting until then. A
-- later replacement makes it void, also while it waits: the key's row names the last one (replacing).
-- Locks: the caller holds the admission lock; the job's row of queue.active_job by skip locked; the key's row
-- by skip locked: while another replacement holds it, that one clears the mark. Two sessions:
-- defer/queueing_locks.replace_fetch.spec, defer/queueing_locks.replace_late.spec.
create or replace function queue._apply_replacement(p_id bigint, p_payload jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if exists (select from queue.finished f where f.id = p_id)
    or not exists (select from queue.job j where j.id = p_id) then
    return;
  end if;
  if queue._override(array[p_id], p_args => p_payload -> 'args',
    p_priority => (p_payload ->> 'priority')::integer,
    p_scheduled_at => coalesce((p_payload ->> 'scheduled_at')::timestamptz, '-infinity')) <> '{}' then
    perform queue._change_sleep(array[p_id], (p_payload ->> 'scheduled_at')::timestamptz);
    perform queue._clear_replacing(p_payload ->> 'key', (p_payload ->> 'seq')::bigint);
  else
    insert into queue.pending_settlement (job_id, kind, flags, payload)
    values (p_id, 'replace', 0, p_payload);
  end if;
end $$;

-- Changes a job's lock as a retry demands (empty: to none). The job passes its turn on, joins the other lock,
-- in the mode that it was deferred with, and goes through the gates again.
-- Locks: the caller holds the admission lock; the job is not running, and no other transaction can see its
-- row of queue.active_job yet.
create or replace function queue._change_lock(p_id bigint, p_lock text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_keys text[];
  v_passed bigint[];
  v_joined record;
begin
  if p_lock = (select coalesce(j.lock, '') from queue.job_now j where j.id = p_id) then
    return;
  end if;
  v_keys := (select t.keys from queue._dequeue(p_id) t);
  v_passed := queue._leave_locks(array[p_id], false);  -- has_turn shows whether it has the turn
  perform queue._write_lock(array[p_id], p_lock);
  v_joined := queue._join_locks(array[p_id]);
  perform queue._advance(
    p_arrived => p_id || v_joined.displaced, p_turned => v_passed || v_joined.passed,
    p_keys => v_keys || v_joined.keys);
end $$;

-- Writes the lock of jobs that are in no lock: another one, or none ('').
-- Locks: the caller holds the admission lock. Why no wake-up is lost: the caller lets the jobs join the lock.
create or replace function queue._write_lock(p_ids bigint[], p_lock text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.job_override s
  set lock = p_lock, extra_flags = s.extra_flags
    | case when p_lock = '' or j.flags & {{lock}} <> 0 then 0
      when j.options ->> 'lock_mode' = 'mutex' then {{mutex}} else {{ordered}} end
  from queue.job j where s.id = any (p_ids) and j.id = s.id;
end $$;

-- Writes the changes that a retry makes: queue and priority. _change_lock changes the lock once the job is in
-- a gate.
-- Locks: the caller holds the admission lock; the jobs are in no gate.
create or replace function queue._change_on_retry(p_ids bigint[], p_change jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._return_tags(p_ids);
  update queue.job_override s
  set queue = coalesce(p_change ->> 'queue', s.queue),
    priority = coalesce((p_change ->> 'priority')::integer, s.priority)
  where s.id = any (p_ids);
end $$;
