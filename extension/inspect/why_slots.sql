-- Explanations of queue.why() for jobs that wait for slots: of a concurrency key, a mutex lock, or a queue.
-- Tests: inspect/why.sql.

-- The end of a pause; empty text if it has none.
create or replace function queue._why_until(p_at timestamptz)
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return case when isfinite(p_at) then format(' until %s', p_at) else '' end;
end $$;

create or replace function queue._why_full(p_queue text)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_found record;
begin
  select c.max_running, c.rate_limit, c.rate_per,
    coalesce((select s.used from queue.semaphore s where s.key = 'q' || p_queue order by s.tick desc limit 1),
      0) as used
  into v_found from queue.queue_config c where c.queue = p_queue;
  if v_found.used >= v_found.max_running then
    return format('its queue %s has reached max_running %s', p_queue, v_found.max_running);
  end if;
  return format('its queue %s has used up its rate of %s per %s; the next start is at %s', p_queue,
    v_found.rate_limit, v_found.rate_per, queue._next_start(p_queue));
end $$;

-- Why no job of a queue starts, whatever it waits for itself; NULL: some may.
create or replace function queue._why_queue(p_queue text)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_now constant timestamptz := clock_timestamp();
  v_paused_until constant timestamptz := queue._paused_until(p_queue);
begin
  return case
    when v_paused_until > v_now then
      format('its queue %s is paused%s', p_queue, queue._why_until(v_paused_until))
    when queue._live_workers(p_queue, v_now) = 0 then format('no live worker serves its queue %s', p_queue)
    when queue._is_queue_full(p_queue) then queue._why_full(p_queue) end;
end $$;

-- The locks and concurrency keys of a ready job that have no room for it now; NULL if there are none.
create or replace function queue._why_no_slot_left(p_id bigint)
returns text language plpgsql stable parallel unsafe security invoker as $$
begin
  return (
    select string_agg(distinct format('%s %s', case left(k.key, 1) when 'm' then 'lock'
      else 'concurrency key' end, substr(k.key, 2)), ', ')
    from queue.active_job aj
    cross join lateral queue._keys_of(array[aj.id], array[aj.flags]) k
    cross join lateral (
      select s.slots, s.rate_limit, {{free_slots}} as free,
        queue._rate_room(s.key, s.rate_limit, s.rate_per, s.rate_limit, clock_timestamp()) as rate_room
      from queue.semaphore s
      where s.key = k.key
      order by s.tick desc limit 1) s
    where aj.id = p_id
      and least(s.free - least(k.weight, s.slots), s.rate_room - least(k.weight, s.rate_limit)) < 0);
end $$;

-- What a waiting job's key lacks: its rate, or slots that running jobs use, that waiting jobs have reserved,
-- or that a job before it gets first. It finds a ready job before it only among the first 10,000 of the lane.
create or replace function queue._why_no_slot(p_id bigint, p_key text)
returns text language plpgsql stable parallel unsafe security invoker as $$
declare
  v_is_lock constant boolean := left(p_key, 1) = 'm';
  v_name constant text := substr(p_key, 2);
  v_key record;
  v_text text;
begin
  select s.rate_limit, s.rate_per, {{free_slots}} as free, w.weight, w.lane,
    w.deadline, queue._rate_opens_at(s.key, s.rate_limit, s.rate_per, w.weight) as opens_at
  into v_key
  from (select coalesce(w.weight, 1) as weight, w.lane, w.deadline from queue.waiting w where w.id = p_id) w
  cross join lateral (select s.* from queue.semaphore s where s.key = p_key order by s.tick desc limit 1) s;
  if v_key.rate_limit is not null and v_key.opens_at is not null then
    return format('its concurrency key %s has used up its rate of %s per %s; it may start at %s at the'
      ' earliest', v_name, v_key.rate_limit, v_key.rate_per, v_key.opens_at);
  end if;
  if v_key.free > 0 then
    select f.text into v_text
    from (
      (select 1 as n, format('job %s (%s)', aj.id,
         coalesce('no slot is free: ' || queue._why_no_slot_left(aj.id), 'ready')) as text
       from (select aj.id, aj.deadline from queue.active_job aj
             where aj.lane = v_key.lane and aj.claim is null
             order by aj.deadline, aj.id limit 10000) aj
       cross join lateral (select j.lock, j.keys from queue.job_now j where j.id = aj.id offset 0) j
       where case when v_is_lock then j.lock = v_name else v_name = any (j.keys) end
       order by aj.deadline, aj.id limit 1)
      union all
      (select 2, format('job %s (weight %s)', w.id, coalesce(w.weight, 1))
       from queue.waiting w
       where w.reason = 'slot' and w.key = p_key and w.lane = v_key.lane
         and (w.deadline, w.id) < (v_key.deadline, p_id)
       order by w.deadline, w.id limit 1)
      union all
      (select 0, format('job %s (weight %s)', w.id, w.weight) from queue.waiting w
       where w.id = queue._heavy_before(p_key, v_key.lane))) f
    order by f.n limit 1;
    if v_text is not null then
      return format(case when v_is_lock then 'its lock %s goes first to %s'
        else 'its concurrency key %s goes first to %s' end, v_name, v_text);
    end if;
  end if;
  select string_agg(r.text, ', ' order by r.id) into v_text
  from (
    select x.id, x.text
    from (
      select j.id, j.id::text as text from queue.active_job aj join queue.job_now j on j.id = aj.id
      where aj.claim is not null
        and case when v_is_lock then j.lock = v_name else v_name = any (j.keys) end
      union all
      select w.id, w.id || ' (reserved)' from queue.waiting w
      where w.reserved is not null and p_key = any (w.reserved)) x
    order by x.id limit 20) r;
  if v_text is null then
    return format(case when v_is_lock then 'its lock %s is free; the next fetch or tick passes it on'
      else 'its concurrency key %s is free; the next fetch or tick passes it on' end, v_name);
  elsif v_key.free > 0 and not v_is_lock then
    return format('its concurrency key %s has too few free slots for its weight %s: job %s', v_name,
      v_key.weight, v_text);
  end if;
  return format(case when v_is_lock then 'its lock %s is held by job %s'
    else 'its concurrency key %s is full: job %s' end, v_name, v_text);
end $$;
