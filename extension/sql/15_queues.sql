-- Queues: names of jobs' lanes, with limits of their own, pausing, retention.

-- Until when a queue is paused: NULL when it is not.
create or replace function queue._paused_until(p_queue text)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_until timestamptz;
begin
  select case when p.is_paused then coalesce(p.until, 'infinity') end into v_until
  from queue.pause p
  where p.task is null and (p.queue is null or queue._matches(p_queue, p.queue))
  order by p.no desc limit 1;
  return v_until;
end $$;

-- Locks: the queue's row, which one who creates it may hold (not under ADM, so that nobody else waits for him); then ADM,
-- waited for. Raises: 22023, QJ008; 40001 where the queue is deleted at the same time. Two sessions: create_configure.spec.
-- Running jobs count at once; a lower limit lets them end.
create or replace function queue.configure_queue(name text, options jsonb)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_max_running integer;
  v_rate jsonb;
  v_rate_limit integer;
  v_rate_per interval;
  v_retain interval;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_queue('{operator}', configure_queue.name);
  end if;
  perform queue._check_isolation();
  perform queue._check_queue(configure_queue.name);
  perform queue._check_keys('options', configure_queue.options, array['max_running', 'paused', 'retain', 'rate']);
  v_rate := nullif(configure_queue.options -> 'rate', 'null');
  perform queue._check_keys('rate', v_rate, array['limit', 'per']);
  if coalesce(jsonb_typeof(configure_queue.options -> 'max_running'), 'null') not in ('null', 'number')
    or configure_queue.options ->> 'max_running' !~ '^[1-9][0-9]{0,8}$' then
    perform queue._invalid('max_running must be a whole number of at least 1, or null', 'To start nothing, pause the queue.');
  elsif coalesce(jsonb_typeof(configure_queue.options -> 'paused'), 'boolean') <> 'boolean' then
    perform queue._invalid('paused must be true or false', 'Pass a JSON boolean.');
  elsif v_rate is not null and (coalesce(v_rate ->> 'limit', '') !~ '^[1-9][0-9]{0,8}$' or coalesce(queue._interval('per', v_rate -> 'per'), '0') = '0') then
    perform queue._invalid('rate needs a limit of at least 1 and an interval', 'Pass {"limit": 10, "per": "1 minute"}.');
  end if;
  v_max_running := (configure_queue.options ->> 'max_running')::integer;
  v_rate_limit := (v_rate ->> 'limit')::integer;
  v_rate_per := queue._interval('per', v_rate -> 'per');
  v_retain := queue._interval('retain', configure_queue.options -> 'retain');
  insert into queue.queue_config (queue) values (configure_queue.name) on conflict on constraint queue_config_pkey do nothing;
  perform queue._admit_all();
  update queue.queue_config c
  set max_running = case when configure_queue.options ? 'max_running' then v_max_running else c.max_running end,
    rate_limit = case when configure_queue.options ? 'rate' then v_rate_limit else c.rate_limit end,
    rate_per = case when configure_queue.options ? 'rate' then v_rate_per else c.rate_per end,
    retain = case when configure_queue.options ? 'retain' then v_retain else c.retain end,
    limited_at = clock_timestamp()
  where c.queue = configure_queue.name
  returning c.retain into v_retain;
  if not found then
    raise exception using errcode = '40001', message = 'the queue was deleted meanwhile', detail = 'queue: ' || configure_queue.name,
      hint = 'Call queue.configure_queue again.';
  end if;
  update queue.lane l set extra_flags = case when v_retain is null then l.extra_flags & ~512 else l.extra_flags | 512 end
  where l.queue = configure_queue.name;
  if v_retain is not null then
    update queue.live v set flags = v.flags | 512
    where v.id = any (array(select v.id from queue.lane l join queue.live v on v.lane = l.lane
                            where l.queue = configure_queue.name and v.flags & 512 = 0 for update of v skip locked));
    update queue.waiting w set flags = w.flags | 512
    where w.reason = 'slot' and w.lane = any (array(select l.lane from queue.lane l where l.queue = configure_queue.name));
  end if;
  perform queue._limit_queue(configure_queue.name);
  if configure_queue.options ? 'paused' then
    perform queue._set_pause(configure_queue.name, null, (configure_queue.options ->> 'paused')::boolean, null);
  end if;
  perform queue._announce();
end $$;
comment on function queue.configure_queue(text, jsonb) is
  'Sets a queue''s own limits: max_running, rate {"limit", "per"} (never more starts in any window of that length), retain, paused. Keys that are absent keep their value, null removes a limit.';

-- Makes a queue's lanes limited ones when it has limits, and counts what runs in max_running.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
-- Why no start stays uncounted: whoever claimed while the limit was set holds a row that is skipped here, or
-- can't be seen yet. _repair counts again for a minute, and as long as rows are skipped.
create or replace function queue._limit_queue(p_queue text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_config record;
  v_running bigint[];
  v_counted bigint[];
begin
  select c.max_running, c.rate_limit into v_config from queue.queue_config c where c.queue = p_queue;
  if v_config.rate_limit is null then
    delete from queue.rate_start r where r.queue = p_queue;
  else
    delete from queue.rate_start r
    where r.queue = p_queue and r.no <= (select max(x.no) - v_config.rate_limit from queue.rate_start x where x.queue = p_queue);
  end if;
  if v_config.max_running is not null or v_config.rate_limit is not null then
    update queue.lane l set kind = 1 where l.queue = p_queue and l.kind = 0;
  end if;
  if v_config.max_running is not null then
    v_running := array(
      select v.id from queue.lane l join queue.live v on v.lane = l.lane
      where l.queue = p_queue and v.claim is not null and v.flags & 16384 = 0);
    v_counted := array(select v.id from queue.live v where v.id = any (v_running) and v.claim is not null for update skip locked);
    update queue.live v set flags = v.flags | 16384 where v.id = any (v_counted);
    perform queue._add_slots(array['q' || p_queue], null, array[cardinality(v_counted)], null, null, null);
    if cardinality(v_counted) < cardinality(v_running) then
      update queue.queue_config c set limited_at = clock_timestamp() where c.queue = p_queue;
    end if;
  end if;
end $$;

-- Locks: ADM, waited for. Raises: 22023, QJ008.
create or replace function queue.create_queue(name text, paused boolean default false)
returns boolean language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_is_new boolean;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_queue('{operator}', create_queue.name);
  end if;
  perform queue._check_isolation();
  perform queue._check_queue(create_queue.name);
  insert into queue.queue_config (queue) values (create_queue.name) on conflict on constraint queue_config_pkey do nothing;
  v_is_new := found;
  if v_is_new and create_queue.paused then
    perform queue._set_pause(create_queue.name, null, true, null);
  end if;
  return v_is_new;
end $$;
comment on function queue.create_queue(text, boolean) is
  'Makes a queue known, and paused if asked. Returns whether it was new. Not needed before deferring.';

-- Locks: ADM, waited for. Raises: 22023, QJ008.
create or replace function queue.pause(queue text default null, until timestamptz default null, task text default null)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_queue('{operator}', pause.queue);
  end if;
  return queue._set_pause(pause.queue, pause.task, true, pause.until);
end $$;
comment on function queue.pause(text, timestamptz, text) is
  'Lets no job of the queue (a name, prefix* or *; NULL: all) or of the task start until resumed, or until a time. Running jobs go on. Jobs keep their state, with reason paused; those of a paused task that waited for a lock or a limit are ready meanwhile. Returns how many unfinished, not running jobs it concerns.';

-- Locks: ADM, waited for. Raises: 22023, QJ008.
create or replace function queue.resume(queue text default null, task text default null)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_queue('{operator}', resume.queue);
  end if;
  return queue._set_pause(resume.queue, resume.task, false, null);
end $$;
comment on function queue.resume(text, text) is
  'Ends a pause of the queue or task; the latest call of pause and resume that matches a queue wins. Without a task it ends the pauses of tasks on those queues too; with one, a pause of the queue stays. Returns how many unfinished, not running jobs it concerns.';

-- The calls whose queues and tasks a later one covers need not be kept. A pause whose time is over is one that has ended:
-- what an earlier one set aside goes on.
-- Locks: ADM, waited for; rows of queue.live by skip locked. Raises: 22023, QJ008.
-- Why nothing slips by: a ready job whose row another transaction holds is handed over (_regate) until the row is free. A
-- call that waits for ADM admits what is new first, and so sets it aside itself; what a fetch has claimed starts, and if
-- that is taken back the next admission finds it.
create or replace function queue._set_pause(p_queue text, p_task text, p_is_paused boolean, p_until timestamptz)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_queue text := nullif(p_queue, '*');
  v_ids bigint[];
  v_is_over boolean;
begin
  perform queue._check_isolation();
  if p_queue is not null then
    perform queue._check_name('queue', p_queue);
  end if;
  if p_task is not null then
    perform queue._check_name('task', p_task);
  end if;
  perform queue._check_moment('until', p_until, true);
  perform queue._admit_all();
  delete from queue.pause p
  where (v_queue is null or p.queue = v_queue or right(v_queue, 1) = '*' and starts_with(p.queue, left(v_queue, -1)))
    and (p.task is not distinct from p_task or p_task is null and not p_is_paused)
    and (p.is_paused or not p_is_paused or p_task is not null or not exists (select from queue.pause t where t.task is not null));
  insert into queue.pause (queue, task, is_paused, until)
  select v_queue, p_task, p_is_paused, p_until where p_is_paused or exists (select from queue.pause);
  if p_task is null then
    update queue.lane l set paused_until = queue._paused_until(l.queue)
    where v_queue is null or queue._matches(l.queue, v_queue);
  end if;
  v_is_over := not p_is_paused or coalesce(p_until <= clock_timestamp(), false);
  if p_task is not null and not v_is_over then
    update queue.waiting w set at = nullif(p_until, 'infinity')
    where w.reason = 'task_paused'
      and exists (select from queue.job j left join queue.job_state s on s.id = j.id
                  where j.id = w.id and j.task = p_task and (v_queue is null or queue._matches(coalesce(s.queue, j.queue), v_queue)));
    perform queue._recall(p_task, v_queue, nullif(p_until, 'infinity'));
    -- what is ready of the task leaves queue.live, so that fetch does not meet it
    v_ids := array(
      select v.id from queue.live v join queue.job j on j.id = v.id left join queue.job_state s on s.id = v.id
      where j.task = p_task and v.claim is null and (v_queue is null or queue._matches(coalesce(s.queue, j.queue), v_queue)));
    with gone as (
      delete from queue.live v
      where v.id = any (array(select v.id from queue.live v where v.id = any (v_ids) and v.claim is null and v.flags & 7 = 0 for update skip locked))
      returning v.id)
    insert into queue.waiting (id, reason, at) select g.id, 'task_paused', nullif(p_until, 'infinity') from gone g;
    perform queue._regate(array(select v.id from queue.live v where v.id = any (v_ids) and v.claim is null));
    perform queue._heed_clock();
  elsif p_task is not null or not p_is_paused then
    with gone as (
      delete from queue.waiting w
      where w.reason = 'task_paused'
        and exists (select from queue.job j left join queue.job_state s on s.id = j.id
                    where j.id = w.id and (p_task is null or j.task = p_task)
                      and (v_queue is null or queue._matches(coalesce(s.queue, j.queue), v_queue)))
      returning w.id)
    select array_agg(g.id order by g.id) into v_ids from gone g;
    perform queue._advance(p_arrived => v_ids);
  end if;
  perform queue._resume_schedules();
  perform queue._announce();
  return queue._count_open(v_queue, p_task);
end $$;

-- Sends ready jobs through the gates again, those whose rows another transaction holds once that is over.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
-- Why none is forgotten: a row that is not taken out is handed over again, by each look until it is free, claimed or gone.
-- Two sessions: pause_fetch.spec, late_pause.spec.
create or replace function queue._regate(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_taken record;
begin
  v_taken := queue._take_out_all(array(select v.id from queue.live v where v.id = any (p_ids) and v.claim is null));
  insert into queue.handover (xid, job_id, kind, flags)
  select queue._until(v.xmax), v.id, 'regate', 0 from queue.live v where v.id = any (p_ids) and v.claim is null;
  -- also those that have left queue.live since may keep the turn from an older job
  perform queue._advance(p_arrived => v_taken.ids, p_keys => v_taken.keys, p_locks => queue._locks_of(p_ids));
end $$;

-- Puts what waits behind the gate of paused tasks, for a slot or for its turn, before that gate again. Reads whole tables.
-- Locks: the caller holds ADM. Why nothing slips by: who waits behind the gate can be let on under ADM only; a job whose
-- claim has ended and is not settled yet (handover) comes to the gate itself, by _route. Why nothing is forgotten: a row of
-- queue.waiting is found by resume, or at its time by _admit_due. Two sessions: pause_fetch.spec.
create or replace function queue._recall(p_task text, p_queue text, p_until timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker
set plan_cache_mode = force_custom_plan set enable_seqscan = on set enable_hashjoin = on as $$
#variable_conflict use_column
declare
  v record;
begin
  select array_agg(w.id) as ids, array_agg(w.key) filter (where w.lane is not null) as keys, array_agg(w.lane) filter (where w.lane is not null) as lanes,
    array_agg(-1) filter (where w.lane is not null) as fewer
  into v
  from queue.waiting w join queue.job j on j.id = w.id left join queue.job_state s on s.id = w.id
  where w.reason = 'slot' and j.task = p_task and (p_queue is null or queue._matches(coalesce(s.queue, j.queue), p_queue));
  if v.ids is not null then
    update queue.waiting w
    set reason = 'task_paused', at = p_until, key = null, lane = null, deadline = null, flags = null, attempt = null, has_several = null
    where w.id = any (v.ids);
    perform queue._never_discard(v.ids);
  end if;
  if v.keys is not null then
    perform queue._add_slots(v.keys, v.lanes, null, null, v.fewer, null);
  end if;
  with recalled as (
    update queue.lock_member m set is_passed = false
    from queue.job j left join queue.job_state s on s.id = j.id
    where j.id = m.id and m.is_passed and m.lock = coalesce(s.lock, j.lock) and j.task = p_task
      and (p_queue is null or queue._matches(coalesce(s.queue, j.queue), p_queue))
      and not exists (select from queue.live v where v.id = m.id) and not exists (select from queue.waiting w where w.id = m.id)
      and not exists (select from queue.handover h where h.job_id = m.id and h.kind in ('ended', 'again'))
    returning m.id)
  insert into queue.waiting (id, reason, at) select r.id, 'task_paused', p_until from recalled r;
end $$;

-- How many jobs of queues and of a task are unfinished and not running. Reads whole tables.
create or replace function queue._count_open(p_queue text, p_task text)
returns integer language plpgsql stable parallel safe security invoker
set plan_cache_mode = force_custom_plan set enable_seqscan = on set enable_hashjoin = on as $$
#variable_conflict use_column
begin
  return (
    select count(*)
    from (select v.id from queue.live v where v.claim is null
          union all select w.id from queue.waiting w
          union all select m.id from queue.lock_member m
          where not exists (select from queue.live v where v.id = m.id) and not exists (select from queue.waiting w where w.id = m.id)) u
    join queue.job j on j.id = u.id
    left join queue.job_state s on s.id = u.id
    where (p_queue is null or queue._matches(coalesce(s.queue, j.queue), p_queue)) and (p_task is null or j.task = p_task)
      and not exists (select from queue.handover h where h.job_id = u.id and h.kind = 'ended'));
end $$;

-- Of jobs those whose task is not paused; the others wait.
-- Locks: the caller holds ADM.
create or replace function queue._wait_for_task(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_pass bigint[];
  v_waits boolean;
begin
  with seen as materialized (
    select u.id, queue._task_paused_until(j.task, j.queue) as until
    from unnest(p_ids) u (id)
    cross join lateral (select j.task, coalesce(s.queue, j.queue) as queue from queue.job j left join queue.job_state s on s.id = j.id
                        where j.id = u.id offset 0) j),
  wait as (
    insert into queue.waiting (id, reason, at) select s.id, 'task_paused', nullif(s.until, 'infinity') from seen s where s.until > v_now)
  select array_agg(s.id order by s.id) filter (where s.until is null or s.until <= v_now), bool_or(s.until > v_now) into v_pass, v_waits from seen s;
  if v_waits then
    perform queue._heed_clock();
  end if;
  return v_pass;
end $$;

-- Until when a task is paused on a queue: NULL when it is not.
create or replace function queue._task_paused_until(p_task text, p_queue text)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_until timestamptz;
begin
  select case when p.is_paused then coalesce(p.until, 'infinity') end into v_until
  from queue.pause p
  where (p.task = p_task or p.task is null and not p.is_paused) and (p.queue is null or queue._matches(p_queue, p.queue))
  order by p.no desc limit 1;
  return v_until;
end $$;
