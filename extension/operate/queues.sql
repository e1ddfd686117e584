-- Queues: their limits, pauses and retention.

-- Locks: the queue's row, which a session that creates it may hold (not under the admission lock, so that no
-- other session waits for it); then the admission lock, waited for. Raises: 22023, QJ008; 40001 if the queue
-- is deleted at the same time. Two sessions: operate/queues.create_configure.spec. Running jobs count at
-- once; a lower limit lets them end.
create or replace function queue.configure_queue(name text, options jsonb)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_max_running integer;
  v_rate jsonb;
  v_rate_limit integer;
  v_rate_per interval;
  v_retain interval;
  v_before jsonb;
begin
  {{if_restricted}}
    perform queue._require_queue('{operator}', configure_queue.name);
  end if;
  perform queue._check_isolation();
  perform queue._check_queue(configure_queue.name);
  perform queue._check_keys('options', configure_queue.options,
    array['max_running', 'paused', 'retain', 'rate']);
  v_rate := nullif(configure_queue.options -> 'rate', 'null');
  perform queue._check_rate(v_rate);
  if coalesce(jsonb_typeof(configure_queue.options -> 'max_running'), 'null') not in ('null', 'number')
    or configure_queue.options ->> 'max_running' !~ '^[1-9][0-9]{0,8}$' then
    perform queue._invalid('max_running must be a whole number from 1 to 999,999,999, or null',
      'To stop the queue, pause it.');
  elsif coalesce(jsonb_typeof(configure_queue.options -> 'paused'), 'boolean') <> 'boolean' then
    perform queue._invalid('paused must be true or false', 'Pass a JSON boolean.');
  end if;
  v_max_running := (configure_queue.options ->> 'max_running')::integer;
  v_rate_limit := (v_rate ->> 'limit')::integer;
  v_rate_per := queue._interval('per', v_rate -> 'per');
  v_retain := queue._interval('retain', configure_queue.options -> 'retain');
  insert into queue.queue_config (queue) values (configure_queue.name)
  on conflict on constraint queue_config_pkey do nothing;
  perform queue._admit_all('{}');
  v_before := queue._queue_before(configure_queue.name);
  update queue.queue_config c
  set max_running = case when configure_queue.options ? 'max_running' then v_max_running
    else c.max_running end,
    rate_limit = case when configure_queue.options ? 'rate' then v_rate_limit else c.rate_limit end,
    rate_per = case when configure_queue.options ? 'rate' then v_rate_per else c.rate_per end,
    retain = case when configure_queue.options ? 'retain' then v_retain else c.retain end,
    limited_at = clock_timestamp(), waits_for = null
  where c.queue = configure_queue.name
  returning c.retain into v_retain;
  if not found then
    raise exception using errcode = '40001', message = 'the queue was deleted meanwhile',
      detail = 'queue: ' || configure_queue.name,
      hint = 'Call queue.configure_queue again.';
  end if;
  update queue.lane l set extra_flags = case when v_retain is null then l.extra_flags & ~{{retain}}
    else l.extra_flags | {{retain}} end
  where l.queue = configure_queue.name;
  if v_retain is not null then
    update queue.active_job aj set flags = aj.flags | {{retain}}
    where aj.id = any (array(
      select aj.id from queue._active_jobs_of(configure_queue.name) q join queue.active_job aj on aj.id = q.id
      where aj.flags & {{retain}} = 0 for update of aj skip locked));
    update queue.waiting w set flags = w.flags | {{retain}}
    where w.reason = 'slot'
      and w.lane = any (array(select l.lane from queue.lane l where l.queue = configure_queue.name));
  end if;
  perform queue._limit_queue(configure_queue.name);
  if configure_queue.options -> 'paused' = 'true' then
    perform queue._add_pause(configure_queue.name, null, null);
  elsif configure_queue.options ? 'paused' then
    perform queue._end_pause(configure_queue.name, null);
  end if;
  perform queue._announce();
  perform queue._audit('configure_queue', jsonb_build_object('name', configure_queue.name, 'options',
    configure_queue.options), array[configure_queue.name], v_before);
end $$;
comment on function queue.configure_queue(text, jsonb) is
  'Sets a queue''s own limits: max_running, rate {"limit", "per"} (never more starts in any window of that'
    ' length), retain, paused. Absent keys keep their value; null removes a limit.';

-- Locks: the queue's row, which another session that creates it may hold; if the queue is new and paused,
-- then the admission lock, waited for. Raises: 22023, QJ008.
create or replace function queue.create_queue(name text, paused boolean default false)
returns boolean language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_is_new boolean;
begin
  {{if_restricted}}
    perform queue._require_queue('{operator}', create_queue.name);
  end if;
  perform queue._check_isolation();
  perform queue._check_queue(create_queue.name);
  insert into queue.queue_config (queue) values (create_queue.name)
  on conflict on constraint queue_config_pkey do nothing;
  v_is_new := found;
  if v_is_new and create_queue.paused then
    perform queue._add_pause(create_queue.name, null, null);
  end if;
  perform queue._audit('create_queue', jsonb_build_object('name', create_queue.name, 'paused',
    create_queue.paused), array[create_queue.name], jsonb_build_object('exists', not v_is_new));
  return v_is_new;
end $$;
comment on function queue.create_queue(text, boolean) is
  'Creates a queue without jobs, paused if asked. Returns whether it is new. Deferring does not need it.';
