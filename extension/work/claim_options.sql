-- Claiming by the options of fetch.
-- Tests: work/fetch.sql.

-- fetch with options: ids, order, tasks, functions, deadline_within, max_running. p_by_hand: from any lane,
-- whatever the worker runs (queue.next).
-- Locks and errors: as fetch. It claims under the admission lock, so that one function can serve every order
-- and filter.
create or replace function queue._claim_by_options(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_options jsonb, p_may_wait boolean,
  p_by_hand boolean default false)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_is_listed boolean := coalesce(p_options ->> 'order' = 'listed', false);
  v_tasks text[];
  v_only bigint[];
  v_before timestamptz;
  v_limits jsonb := jsonb_strip_nulls(p_options) -> 'max_running';
  v_lanes integer[];
  v_quarantined integer[];  -- lanes of quarantined jobs, each claimed alone
  v_turn text;
  v_ids bigint[] := '{}'::bigint[];
  v_more boolean;
begin
  select o.tasks, o.ids, v_now + o.deadline_within into v_tasks, v_only, v_before
  from queue._selection(p_options) o;
  if p_max_jobs < 1 then
    return null;  -- all were to be claimed ahead
  end if;
  perform queue._check_worker_limits(v_limits);
  perform queue._check_asked(p_queues);
  if not queue._lock_admission(p_may_wait) then
    return null;
  elsif not exists (select from queue.worker w where w.id = p_worker and w.gone_at is null) then
    perform queue._worker_gone(p_worker);  -- the worker has gone while this waited
  elsif v_limits is not null then
    perform queue._forget_ended_claims(p_worker);
  end if;
  loop
    select a.has_more into v_more from queue._admit(1000) a;
    select array_agg(l.lane order by l.place, l.priority desc, l.first_id, l.lane)
      filter (where l.kind < {{lane_crashed}} or p_by_hand),
      queue._quarantined_lanes(array_agg(l.lane) filter (where l.kind = {{lane_crashed}} and not p_by_hand))
    into v_lanes, v_quarantined
    from (
      select l.lane, l.kind, l.priority, case when v_is_listed then m.place end as place,
        first_value(f.id) over (partition by l.queue, l.priority order by f.deadline, f.id) as first_id
      from queue._places_of(
        case when v_is_listed or '*' = any (p_queues) is not true then p_queues end, true) m
      join queue.lane l on l.lane = m.lane
      left join lateral (
        select aj.deadline, aj.id from queue.active_job aj
        where {{is_ready}}
        order by aj.deadline, aj.id limit 1) f on true
      where (l.paused_until is null or l.paused_until <= v_now)
        and (v_limits is null or queue._worker_room(p_worker, v_limits, l.queue, 1) is distinct from 0)) l;
    if v_turn is null and not p_by_hand then
      v_turn := nullif(queue._may_claim(p_worker, v_quarantined, true, v_tasks, v_before, v_only),
        case when v_quarantined is null then 'others' end);
      if v_turn = 'nothing' then
        return null;
      elsif v_turn = 'alone' then
        v_ids := coalesce(queue._claim_alone(p_worker, v_quarantined, v_tasks, v_before, v_only), v_ids);
        exit when v_ids <> '{}';
      end if;
    end if;
    if v_tasks is not null or v_before is not null or v_only is not null then
      v_ids := v_ids || queue._claim_filtered(p_worker, v_lanes, p_max_jobs - cardinality(v_ids), v_tasks,
        v_before, v_only, v_limits);
    else
      v_ids := v_ids || queue._claim_limited(p_worker, v_lanes, p_max_jobs - cardinality(v_ids),
        p_limits => v_limits);
    end if;
    exit when cardinality(v_ids) >= p_max_jobs or not v_more or clock_timestamp() > v_now + interval '100 ms';
  end loop;
  if v_ids = '{}' and v_turn in ('alone', 'either') then
    v_ids := coalesce(queue._claim_alone(p_worker, v_quarantined, v_tasks, v_before, v_only), v_ids);
  end if;
  if random() * 300 < least(cardinality(v_ids), 20) then
    perform queue._raise_marks(v_lanes);
  end if;
  return v_ids;
end $$;

-- Which jobs the options of fetch select; NULL: any. It checks the options.
-- Raises: 22023.
create or replace function queue._selection(p_options jsonb, out tasks text[], out ids bigint[],
  out deadline_within interval)
language plpgsql stable parallel unsafe security invoker as $$
declare
  v_options jsonb := jsonb_strip_nulls(p_options);
begin
  perform queue._check_keys('options', p_options,
    array['ids', 'order', 'tasks', 'functions', 'deadline_within', 'max_running', 'ahead']);
  if coalesce(v_options -> 'order', '"mixed"') not in ('"mixed"', '"listed"') then
    perform queue._invalid('order is not one of its values', 'Allowed: mixed, listed.',
      'order: ' || (v_options ->> 'order'));
  elsif coalesce(jsonb_typeof(v_options -> 'tasks'), 'array') <> 'array' then
    perform queue._invalid('tasks must be a list', 'Pass a JSON array.');
  elsif coalesce(jsonb_typeof(v_options -> 'ids'), 'array') <> 'array' then
    perform queue._invalid('ids must be a list', 'Pass a JSON array.');
  elsif exists (select from jsonb_array_elements(v_options -> 'tasks') t
    where jsonb_typeof(t) <> 'string') then
    perform queue._invalid('tasks must be names', 'Pass JSON strings.');
  elsif exists (select from jsonb_array_elements(v_options -> 'ids') i
    where jsonb_typeof(i) <> 'number') then
    perform queue._invalid('ids must be numbers', 'Pass ids of jobs.');
  elsif jsonb_array_length(v_options -> 'tasks') > 1000 or jsonb_array_length(v_options -> 'ids') > 1000 then
    -- Each name or id is compared with each job, while others wait for the admission lock.
    perform queue._invalid('tasks or ids holds more than 1,000', 'Call again for the others.');
  end if;
  tasks := case when v_options ? 'tasks' then array(select t
    from jsonb_array_elements_text(v_options -> 'tasks') t) end;
  if v_options -> 'functions' = 'true' then
    tasks := array(select t.name from queue.task t where t.function is not null
      and (tasks is null or t.name = any (tasks)));
  elsif coalesce(v_options -> 'functions', 'false') <> 'false' then
    perform queue._invalid('functions must be true or false', 'Pass a JSON boolean.');
  end if;
  deadline_within := queue._interval('deadline_within', v_options -> 'deadline_within');
  begin
    ids := case when v_options ? 'ids' then array(select i::bigint
      from jsonb_array_elements_text(v_options -> 'ids') i) end;
  exception when data_exception then
    perform queue._invalid('ids must be numbers', 'Pass ids of jobs.');
  end;
end $$;

-- How many jobs to claim if a worker asks for many: as many as fitted into this session's last full answer,
-- and an eighth more each time that an answer leaves room. An undelivered claim costs more than another
-- call.
create or replace function queue._fitting(p_max_jobs integer)
returns integer language plpgsql stable parallel safe security invoker as $$
begin
  return least(p_max_jobs, nullif(current_setting('pgdefer.fitting', true), '')::integer);
end $$;

-- How many of p_max_jobs a worker starts at once: all but those that the option ahead of fetch counts.
-- Raises: 22023.
create or replace function queue._start_at_once(p_max_jobs integer, p_options jsonb)
returns integer language plpgsql immutable parallel safe security invoker as $$
begin
  if jsonb_typeof(p_options -> 'ahead') = 'null' then
    return p_max_jobs;
  end if;
  if (jsonb_typeof(p_options -> 'ahead') = 'number' and p_options ->> 'ahead' ~ '^[0-9]{1,9}$'
    and (p_options ->> 'ahead')::integer <= p_max_jobs) is not true then
    perform queue._invalid('ahead must be a whole number from 0 to max_jobs',
      'Pass how many of max_jobs start later.', 'options: ' || left(p_options::text, 1000));
  end if;
  return p_max_jobs - (p_options ->> 'ahead')::integer;
end $$;
