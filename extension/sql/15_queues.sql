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

-- Locks: ADM, waited for. Raises: 22023, QJ008.
-- Running jobs count at once; a lower limit lets them end.
create or replace function queue.configure_queue(name text, options jsonb)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_max_running integer;
  v_rate jsonb;
  v_rate_limit integer;
  v_rate_per interval;
  v_retain interval;
begin
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
  perform queue._admit_all();
  insert into queue.queue_config as c (queue, max_running, rate_limit, rate_per, retain)
  values (configure_queue.name, v_max_running, v_rate_limit, v_rate_per, v_retain)
  on conflict on constraint queue_config_pkey do update
    set (max_running, rate_limit, rate_per, retain)
      = (case when configure_queue.options ? 'max_running' then excluded.max_running else c.max_running end,
         case when configure_queue.options ? 'rate' then excluded.rate_limit else c.rate_limit end,
         case when configure_queue.options ? 'rate' then excluded.rate_per else c.rate_per end,
         case when configure_queue.options ? 'retain' then excluded.retain else c.retain end)
  returning c.max_running, c.retain into v_max_running, v_retain;
  update queue.lane l set extra_flags = case when v_retain is null then l.extra_flags & ~512 else l.extra_flags | 512 end
  where l.queue = configure_queue.name;
  if v_retain is not null then
    update queue.live v set flags = v.flags | 512
    where v.id = any (array(select v.id from queue.lane l join queue.live v on v.lane = l.lane
                            where l.queue = configure_queue.name and v.flags & 512 = 0 for update of v skip locked));
  end if;
  perform queue._limit_queue(configure_queue.name, v_max_running);
  if configure_queue.options ? 'paused' then
    if (configure_queue.options ->> 'paused')::boolean then
      perform queue.pause(configure_queue.name);
    else
      perform queue.resume(configure_queue.name);
    end if;
  end if;
  perform queue._announce();
end $$;
comment on function queue.configure_queue(text, jsonb) is
  'Sets a queue''s own limits: max_running, rate {"limit", "per"} (never more starts in any window of that length), retain, paused. Keys that are absent keep their value, null removes a limit.';

-- Moves what is ready in a queue to limited lanes when it has limits, and counts what runs.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._limit_queue(p_queue text, p_max_running integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_key text := 'q' || p_queue;
  v_ids bigint[];
  v_is_limited boolean;
begin
  v_is_limited := exists (select from queue.queue_config c where c.queue = p_queue and (c.max_running is not null or c.rate_limit is not null));
  if v_is_limited then
    with gone as (
      delete from queue.live v
      where v.id = any (array(select v.id from queue.lane l join queue.live v on v.lane = l.lane
                              where l.queue = p_queue and l.kind = 0 and v.claim is null for update of v skip locked))
      returning v.id)
    select array_agg(g.id) into v_ids from gone g;
    if v_ids is not null then
      perform queue._keep_turns(v_ids);
      perform queue._to_slots(v_ids);
    end if;
  end if;
  update queue.lane l set is_closed = v_is_limited where l.queue = p_queue and l.kind = 0;
  if p_max_running is not null then
    perform queue._set_slots(array[v_key], array[p_max_running]);
    with counted as (
      update queue.live v set flags = v.flags | 16384
      where v.id = any (array(select v.id from queue.lane l join queue.live v on v.lane = l.lane
                              where l.queue = p_queue and v.claim is not null and v.flags & 16384 = 0 for update of v skip locked))
      returning v.id)
    select array_agg(c.id) into v_ids from counted c;
    if v_ids is not null then
      perform queue._add_used(array[v_key], array[cardinality(v_ids)]);
    end if;
  end if;
end $$;

-- Locks: ADM, waited for. Raises: 22023, QJ008.
create or replace function queue.create_queue(name text, paused boolean default false)
returns boolean language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_is_new boolean;
begin
  perform queue._check_isolation();
  perform queue._check_queue(create_queue.name);
  insert into queue.queue_config (queue) values (create_queue.name) on conflict on constraint queue_config_pkey do nothing;
  v_is_new := found;
  if v_is_new and create_queue.paused then
    perform queue.pause(create_queue.name);
  end if;
  return v_is_new;
end $$;
comment on function queue.create_queue(text, boolean) is
  'Makes a queue known, and paused if asked. Returns whether it was new. Not needed before deferring.';

-- Locks: ADM, waited for. Raises: 22023, QJ008.
create or replace function queue.pause(queue text default null, until timestamptz default null, task text default null)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  return queue._set_pause(pause.queue, pause.task, true, pause.until);
end $$;
comment on function queue.pause(text, timestamptz, text) is
  'Lets no job of the queue (a name, prefix* or *; NULL: all) or of the task start until resumed, or until a time. Running jobs go on. Jobs keep their state, with reason paused. Returns how many unfinished, not running jobs it concerns.';

-- Locks: ADM, waited for. Raises: 22023, QJ008.
create or replace function queue.resume(queue text default null, task text default null)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  return queue._set_pause(resume.queue, resume.task, false, null);
end $$;
comment on function queue.resume(text, text) is
  'Ends a pause of the queue or task; the latest call of pause and resume that matches a queue wins. Returns how many unfinished, not running jobs it concerns.';

create or replace function queue._set_pause(p_queue text, p_task text, p_is_paused boolean, p_until timestamptz)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[];
begin
  perform queue._check_isolation();
  if p_queue is not null then
    perform queue._check_name('queue', p_queue);
  end if;
  if p_task is not null then
    perform queue._check_name('task', p_task);
  end if;
  perform queue._admit_all();
  delete from queue.pause p where p.queue is not distinct from p_queue and p.task is not distinct from p_task;
  insert into queue.pause (queue, task, is_paused, until) values (p_queue, p_task, p_is_paused, p_until);
  if p_task is null then
    update queue.lane l set paused_until = queue._paused_until(l.queue)
    where p_queue is null or queue._matches(l.queue, p_queue);
  elsif p_is_paused then
    -- what is ready of the task leaves queue.live, so that fetch does not meet it
    with gone as (
      select v.id, queue._take_out(v.id) as place from queue.live v join queue.job j on j.id = v.id
      where j.task = p_task and v.claim is null and (p_queue is null or queue._matches(j.queue, p_queue)))
    select array_agg(g.id) into v_ids from gone g where g.place is not null;
    perform queue._route(v_ids, false);
  else
    with gone as (
      delete from queue.waiting w where w.reason = 'task_paused'
        and exists (select from queue.job j where j.id = w.id and j.task = p_task) returning w.id)
    select array_agg(g.id order by g.id) into v_ids from gone g;
    perform queue._route(v_ids, false);
  end if;
  perform queue._announce();
  return (select count(*) from queue.jobs j
          where j.state in ('ready', 'blocked', 'scheduled', 'waiting', 'upstream_failed', 'held')
            and (p_queue is null or queue._matches(j.queue, p_queue)) and (p_task is null or j.task = p_task));
end $$;

-- Of jobs those whose task is not paused; the others wait.
-- Locks: the caller holds ADM.
create or replace function queue._wait_for_task(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_pass bigint[];
begin
  with seen as materialized (
    select u.id, queue._task_paused_until(j.task, j.queue) as until
    from unnest(p_ids) u (id)
    cross join lateral (select j.task, coalesce(s.queue, j.queue) as queue from queue.job j left join queue.job_state s on s.id = j.id
                        where j.id = u.id offset 0) j),
  wait as (
    insert into queue.waiting (id, reason, at) select s.id, 'task_paused', nullif(s.until, 'infinity') from seen s where s.until > clock_timestamp())
  select array_agg(s.id order by s.id) into v_pass from seen s where s.until is null or s.until <= clock_timestamp();
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
  where p.task = p_task and (p.queue is null or queue._matches(p_queue, p.queue))
  order by p.no desc limit 1;
  return v_until;
end $$;
