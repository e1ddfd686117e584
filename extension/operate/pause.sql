-- Pausing and resuming queues and tasks. A paused task is a gate, at which its jobs wait. The jobs of a
-- paused queue stay in their lanes, from which no worker claims them (queue.lane, paused_until;
-- work/claim.sql). base/queue_names.sql says which call applies. A pause that ends by time wakes workers by
-- _next_due (work/maintenance.sql).

-- Locks: the admission lock, waited for. Raises: 22023, QJ008.
create or replace function queue.pause(queue text default null, until timestamptz default null,
  task text default null)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_before jsonb;
  v_affected integer;
begin
  {{if_restricted}}
    perform queue._require_queue('{operator}', pause.queue);
  end if;
  perform queue._check_moment('until', pause.until, true);
  if pause.until <= clock_timestamp() then
    perform queue._invalid('until is in the past', 'Pass a later time. queue.resume ends a pause.',
      format('value: %s', pause.until));
  end if;
  perform queue._check_isolation();
  perform queue._lock_admission(true);
  v_before := queue._pauses_before(pause.queue, pause.task);
  v_affected := queue._add_pause(pause.queue, pause.task, pause.until);
  perform queue._audit('pause', jsonb_build_object('queue', pause.queue, 'task', pause.task, 'until',
    pause.until), array[coalesce(pause.queue, '*')], v_before);
  return v_affected;
end $$;
comment on function queue.pause(text, timestamptz, text) is
  'Stops jobs in the queue (a name, prefix* or *; NULL: all) or of the task from starting until resumed,'
    ' or until a time (22023 if it is past). Running jobs continue. Jobs keep their state, and ready ones'
    ' have the reason paused; those of a paused task that waited for a lock or a limit are ready meanwhile.'
    ' Returns the number of affected jobs, not counting running ones.';

-- Locks: the admission lock, waited for. Raises: 22023, QJ008.
create or replace function queue.resume(queue text default null, task text default null)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_before jsonb;
  v_affected integer;
begin
  {{if_restricted}}
    perform queue._require_queue('{operator}', resume.queue);
  end if;
  perform queue._check_isolation();
  perform queue._lock_admission(true);
  v_before := queue._pauses_before(resume.queue, resume.task);
  v_affected := queue._end_pause(resume.queue, resume.task);
  perform queue._audit('resume', jsonb_build_object('queue', resume.queue, 'task', resume.task),
    array[coalesce(resume.queue, '*')], v_before);
  return v_affected;
end $$;
comment on function queue.resume(text, text) is
  'Without a task it ends the pause of the queue, and the pauses of all tasks in it. With a task it ends only'
    ' the pauses of that task: a paused queue stays paused. The latest call of pause or resume that matches a'
    ' queue wins. Returns the number of affected jobs, not counting running ones.';

-- Records and applies a call of pause, and deletes earlier calls that it covers. While a task is paused, an
-- earlier resume of the queue stays: it ended the task's pauses before it. A pause whose time came while the
-- call waited for the lock counts as ended: jobs that an earlier pause stopped can start.
-- Locks: the admission lock, waited for; rows of queue.active_job by skip locked. Raises: 22023, QJ008; the
-- caller has checked the isolation level.
-- Why no job is missed: a ready job whose row another transaction holds is handed over (_readmit) until the
-- row is free. A call that waits for the admission lock first admits new jobs, and so stops them itself. Jobs
-- that a fetch has claimed start; if the claim is rolled back, the next admission finds them.
create or replace function queue._add_pause(p_queue text, p_task text, p_until timestamptz)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_queue text := nullif(p_queue, '*');
  v_is_over boolean;
begin
  perform queue._check_pause(p_queue, p_task);
  perform queue._admit_all('{}');
  delete from queue.pause p
  where (v_queue is null or queue._matches(p.queue, v_queue)) and p.task is not distinct from p_task
    and (p.is_paused or p_task is not null
      or not exists (select from queue.pause t where t.task is not null));
  insert into queue.pause (queue, task, is_paused, until) values (v_queue, p_task, true, p_until);
  v_is_over := coalesce(p_until <= clock_timestamp(), false);
  if p_task is null then
    perform queue._mark_paused_lanes(v_queue);
  elsif v_is_over then
    perform queue._end_task_pause(p_task, v_queue);
  else
    perform queue._pause_task(p_task, v_queue, nullif(p_until, 'infinity'));
  end if;
  perform queue._resume_schedules();
  perform queue._announce();
  if not v_is_over then
    perform queue._notify_pause();
  end if;
  return queue._count_open(v_queue, p_task);
end $$;

-- Records and applies a call of resume, and deletes earlier calls that it covers: without a task, also those
-- of tasks. A call of resume is kept only while it is an exception to a pause of more queues. Otherwise each
-- queue that was ever resumed beside a pause would slow down admission for ever.
-- Locks: the admission lock, waited for. Raises: 22023, QJ008; the caller has checked the isolation level.
create or replace function queue._end_pause(p_queue text, p_task text)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_queue text := nullif(p_queue, '*');
  v_covered integer;
  v_no bigint;
begin
  perform queue._check_pause(p_queue, p_task);
  perform queue._admit_all('{}');
  delete from queue.pause p
  where (v_queue is null or queue._matches(p.queue, v_queue)) and (p_task is null or p.task = p_task);
  get diagnostics v_covered = row_count;
  insert into queue.pause (queue, task, is_paused) values (v_queue, p_task, false) returning no into v_no;
  delete from queue.pause r
  where not r.is_paused and (v_covered > 0 or r.no = v_no) and not exists (
    select from queue.pause p
    where p.is_paused and p.no < r.no and (r.task is null or p.task = r.task)
      and (p.queue is null or queue._matches(r.queue, p.queue)));
  if p_task is null then
    perform queue._mark_paused_lanes(v_queue);
  end if;
  perform queue._end_task_pause(p_task, v_queue);
  perform queue._resume_schedules();
  perform queue._announce();
  return queue._count_open(v_queue, p_task);
end $$;

-- Raises: 22023.
create or replace function queue._check_pause(p_queue text, p_task text)
returns void language plpgsql stable parallel unsafe security invoker as $$
begin
  if p_queue is not null then
    perform queue._check_name('queue', p_queue);
  end if;
  if p_task is not null then
    perform queue._check_name('task', p_task);
  end if;
end $$;

-- Locks: the caller holds the admission lock.
create or replace function queue._mark_paused_lanes(p_queue text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.lane l set paused_until = queue._paused_until(l.queue)
  where p_queue is null or queue._matches(l.queue, p_queue);
end $$;

-- Puts jobs of a paused task before its gate. Those that wait there already get the new time.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked. Why no job is missed:
-- as _add_pause. Why no wake-up is lost: as _return_to_pause.
create or replace function queue._pause_task(p_task text, p_queue text, p_until timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
begin
  update queue.waiting w set at = p_until
  where w.reason = 'task_paused'
    and exists (select from queue.job_now j
                where j.id = w.id and j.task = p_task
                  and (p_queue is null or queue._matches(j.queue, p_queue)));
  perform queue._return_to_pause(p_task, p_queue, p_until);
  -- Ready jobs of the task leave queue.active_job, so that fetch does not meet them.
  v_ids := array(
    select aj.id from queue.active_job aj join queue.job_now j on j.id = aj.id
    where j.task = p_task and aj.claim is null
      and (p_queue is null or queue._matches(j.queue, p_queue)));
  with gone as (
    delete from queue.active_job aj
    where aj.id = any (array(select aj.id from queue.active_job aj
      where aj.id = any (v_ids) and aj.claim is null
      and aj.flags & {{lock_or_keys}} = 0 and aj.deadline >= '{{end_of_tags}}' for update skip locked))
    returning aj.id)
  insert into queue.waiting (id, reason, at) select g.id, 'task_paused', p_until from gone g;
  perform queue._readmit(array(select aj.id from queue.active_job aj
    where aj.id = any (v_ids) and aj.claim is null));
  perform queue._rewind_due_mark();
end $$;

-- Lets jobs go on that wait at the gate of a paused task; NULL: of all tasks.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: the caller announces what is ready.
create or replace function queue._end_task_pause(p_task text, p_queue text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
begin
  with gone as (
    delete from queue.waiting w
    where w.reason = 'task_paused'
      and exists (select from queue.job_now j
                  where j.id = w.id and (p_task is null or j.task = p_task)
                    and (p_queue is null or queue._matches(j.queue, p_queue)))
    returning w.id)
  select array_agg(g.id order by g.id) into v_ids from gone g;
  perform queue._advance(p_arrived => v_ids);
end $$;

-- Moves jobs that wait behind the gate of paused tasks, for a slot or for their turn, back before that gate.
-- Reads whole tables.
-- It finds the jobs of locks first, and inserts them into queue.waiting afterwards: a single statement would
-- look for each job among those that it has inserted.
-- Locks: the caller holds the admission lock.
-- Why no job is missed: jobs behind the gate can proceed only under the admission lock. A job whose claim has
-- ended and is not settled yet (pending settlement) reaches the gate itself (_pass_gates).
-- Why no wake-up is lost: other tasks' jobs that waited behind these for a slot of a key get it, or wait for
-- the key's rate, here.
-- Why no job is forgotten: resume finds rows of queue.waiting, and _admit_due finds them at their time. Two
-- sessions: operate/pause.fetch.spec.
create or replace function queue._return_to_pause(p_task text, p_queue text, p_until timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker
set plan_cache_mode = force_custom_plan set enable_seqscan = on set enable_hashjoin = on as $$
declare
  v_slots record;
  v_reserved record;
  v_recalled bigint[];
begin
  select array_agg(w.id) as ids, array_agg(w.key) filter (where w.lane is not null) as keys,
    array_agg(w.lane) filter (where w.lane is not null) as lanes,
    array_agg(-1) filter (where w.lane is not null) as fewer
  into v_slots
  from queue.waiting w join queue.job_now j on j.id = w.id
  where w.reason = 'slot' and j.task = p_task
    and (p_queue is null or queue._matches(j.queue, p_queue));
  if v_slots.ids is not null then
    select array_agg(w.id) as ids, array_agg(k.key) as keys into v_reserved
    from queue.waiting w cross join unnest(w.reserved) k (key) where w.id = any (v_slots.ids);
    perform queue._free_reserved(v_reserved.ids, v_reserved.keys);
    update queue.waiting w
    set reason = 'task_paused', at = p_until, key = null, lane = null, deadline = null, flags = null,
      attempt = null, moves = null, weight = null, reserved = null
    where w.id = any (v_slots.ids);
    perform queue._never_discard(v_slots.ids);
  end if;
  if v_slots.keys is not null then
    perform queue._add_slots(v_slots.keys, v_slots.lanes, null, null, v_slots.fewer, null);
  end if;
  with recalled as (
    update queue.lock_member m set is_passed = false
    from queue.job_now j
    where j.id = m.id and m.is_passed and m.lock = j.lock and j.task = p_task
      and (p_queue is null or queue._matches(j.queue, p_queue))
      and not exists (select from queue.active_job aj where aj.id = m.id)
      and not exists (select from queue.waiting w where w.id = m.id)
      and not exists (select from queue.unsettled h
        where h.job_id = m.id and h.kind in ('ended', 'again'))
    returning m.id)
  select array_agg(r.id) into v_recalled from recalled r;
  insert into queue.waiting (id, reason, at)
  select u.id, 'task_paused', p_until from unnest(v_recalled) u (id);
  if v_slots.keys is not null then
    perform queue._advance(p_keys => v_slots.keys || v_reserved.keys);
  end if;
end $$;

-- The number of jobs of queues and of a task that are unfinished and not running. Reads whole tables.
-- Settlements are looked up in arrays, which are hashed: a plan that expects few would read all for each job.
create or replace function queue._count_open(p_queue text, p_task text)
returns integer language plpgsql stable parallel safe security invoker
set plan_cache_mode = force_custom_plan set enable_seqscan = on set enable_hashjoin = on as $$
declare
  v_again bigint[] := array(select h.job_id from queue.unsettled h where h.kind = 'again');
  v_ended bigint[] := array(select h.job_id from queue.unsettled h where h.kind = 'ended');
begin
  return (
    select count(*)
    from (select aj.id from queue.active_job aj where aj.claim is null
          union all select w.id from queue.waiting w
          union all select m.id from queue.lock_member m
          where not exists (select from queue.active_job aj where aj.id = m.id)
            and not exists (select from queue.waiting w where w.id = m.id)
            and m.id <> all (v_again)
          union all select unnest(v_again)
          union all select u.id from queue.unadmitted u) u
    join queue.job_now j on j.id = u.id
    where (p_queue is null or queue._matches(j.queue, p_queue))
      and (p_task is null or j.task = p_task)
      and u.id <> all (v_ended));
end $$;
