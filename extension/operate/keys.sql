-- Limits and rates of concurrency keys: changed while jobs run.
-- Tests: operate/keys.sql, operate/keys.fetch.spec, admit/rates.sql.

-- Locks: the admission lock, waited for. Raises: 22023, QJ008.
-- Why it takes effect at its commit: jobs with keys are claimed only under the admission lock, and the claim
-- reads limits and rates then. A ready job whose key is full goes back to queue.waiting. Running jobs count;
-- a lower limit lets them end. Starts before the key had a rate do not count.
-- Why no wake-up is lost: jobs that wait for keys with more room get their slots here.
create or replace function queue.configure_key(pattern text, options jsonb)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_old record;
  v_before jsonb;
  v_rate jsonb;
  v_keeps_rate boolean;
  v_others bigint[];  -- jobs that may set limits in place of deleted ones
  v_keys record;
begin
  {{installed}}
  perform queue._check_isolation();
  perform queue._check_name('pattern', configure_key.pattern);
  perform queue._check_keys('options', coalesce(configure_key.options, 'null'), array['limit', 'rate']);
  if coalesce(jsonb_typeof(configure_key.options -> 'limit'), 'null') not in ('null', 'number')
    or configure_key.options ->> 'limit' !~ '^[1-9][0-9]{0,8}$' then
    perform queue._invalid('limit must be a whole number from 1 to 999,999,999, or null',
      'To start nothing, pause the queue or the task.');
  end if;
  v_rate := nullif(configure_key.options -> 'rate', 'null');
  perform queue._check_rate(v_rate);
  perform queue._admit_all('{}');
  select c.slots, c.rate_limit, c.rate_per into v_old from queue.key_config c
  where c.pattern = configure_key.pattern;
  v_before := jsonb_strip_nulls(jsonb_build_object('limit', v_old.slots, 'rate_limit', v_old.rate_limit,
    'rate_per', v_old.rate_per));
  if configure_key.options ? 'limit' then
    v_old.slots := (configure_key.options ->> 'limit')::integer;
  end if;
  if configure_key.options ? 'rate' then
    v_old.rate_limit := (v_rate ->> 'limit')::integer;
    v_old.rate_per := queue._interval('per', v_rate -> 'per');
  end if;
  v_keeps_rate := v_old.rate_limit is not null or not v_before ? 'rate_limit';
  delete from queue.key_config c where c.pattern = configure_key.pattern;
  insert into queue.key_config (pattern, slots, rate_limit, rate_per)
  select configure_key.pattern, v_old.slots, v_old.rate_limit, v_old.rate_per
  where num_nonnulls(v_old.slots, v_old.rate_limit) > 0;
  -- These are the terms of the last job that set a limit; _set_slots lets the configured ones override them.
  v_others := queue._forget_gone_limits(configure_key.pattern);
  select array_agg(x.key) as keys, array_agg(x.slots) as slots, array_agg(x.id) as ids,
    array_agg(x.rate_limit) as rate_limits, array_agg(x.rate_per) as rate_pers
  into v_keys
  from (
    select s.key, s.limit_id as id, k.slots, k.rate_limit, k.rate_per
    from (select distinct on (s.key) s.key, s.rate_limit, s.rate_per, s.limit_id
          from queue.semaphore s
          where left(s.key, 1) = 'k' and queue._matches(substr(s.key, 2), configure_key.pattern)
          order by s.key, s.tick desc) s
    cross join lateral (
      -- Without such a job, a rate ends only if this call removes it: the next jobs may have the same one.
      select coalesce(min(k.slots), 2147483647) as slots,
        case when count(*) = 0 and v_keeps_rate then s.rate_limit else min(k.rate_limit) end as rate_limit,
        case when count(*) = 0 and v_keeps_rate then s.rate_per else min(k.rate_per) end as rate_per
      from queue._keys_of(array[s.limit_id], array[{{keys}}::smallint]) k where k.key = s.key) k
    union all
    select k.key, k.id, k.slots, k.rate_limit, k.rate_per
    from queue._keys_of(v_others, array_fill({{keys}}::smallint, array[cardinality(v_others)])) k
    where exists (select from queue.semaphore s where s.key = k.key and s.limit_id = 0)) x;
  if v_keys.keys is not null then
    perform queue._set_slots(v_keys.keys, v_keys.slots, v_keys.ids, v_keys.rate_limits, v_keys.rate_pers);
    delete from queue.rate_start r
    where r.key = any (array(
      select s.key from unnest(v_keys.keys) u (key) join queue.semaphore s on s.key = u.key
      where s.rate_limit is null));
    perform queue._advance(p_keys => v_keys.keys);
    perform queue._advance_own();
  end if;
  perform queue._announce();
  perform queue._audit('configure_key', jsonb_build_object('pattern', configure_key.pattern, 'options',
    configure_key.options), null, v_before);
end $$;
comment on function queue.configure_key(text, jsonb) is
  'Sets the limit and the rate {"limit", "per"} of the concurrency keys that match a name or prefix*; the'
    ' longest pattern applies. They override the limits and rates of jobs at once, also for running and'
    ' waiting jobs. Absent options keep their value; null removes a limit or rate. Removing a rate and'
    ' setting it again forgets earlier starts, unless the jobs have a rate of their own. See'
    ' queue.semaphores.';

-- Forgets which job has set the limit and the rate of a key, if that job was deleted: any other may set them.
-- Returns jobs that may do so at once: of each such key the newest that waits for a slot, and all that are
-- ready in the key's lanes. The others set them when they come to the slots.
-- Locks: the caller holds the admission lock.
create or replace function queue._forget_gone_limits(p_pattern text)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_gone record;
begin
  with gone as (
    update queue.semaphore s set limit_id = 0
    where left(s.key, 1) = 'k' and queue._matches(substr(s.key, 2), p_pattern)
      and not exists (select from queue.job j where j.id = s.limit_id)
    returning s.key, s.lanes)
  select array_agg(g.key) as keys, array(select distinct l from gone g cross join unnest(g.lanes) l) as lanes
  into v_gone from gone g;
  return array(
    select max(w.id) from unnest(v_gone.keys) u (key)
    join queue.waiting w on w.reason = 'slot' and w.key = u.key group by u.key
    union
    select aj.id from unnest(v_gone.lanes) u (lane)
    join queue.active_job aj on aj.lane = u.lane
    where aj.claim is null and aj.flags & {{keys}} <> 0);
end $$;
