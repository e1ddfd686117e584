-- Claiming jobs that the options of fetch select.
-- Tests: work/claim_filtered.sql, work/fetch.sql.

-- Claims up to p_n jobs of lanes. Where given, they are of p_tasks, have a deadline before p_before, and are
-- among p_only. p_limits: as for _claim_limited.
-- Because the ready jobs of a lane may not match, it also looks at jobs that wait for a slot where slots are
-- free, except in queues that may start no more. Those that it makes ready and does not claim go back to
-- wait, so that they start in their order. A job that gets a slot may only begin to wait for another key. If
-- it meets many of these, it hands the rest over to the next fetch: after 100 ms and 20 rounds, so that a few
-- never depend on the clock.
-- Locks: as _claim_limited.
-- Why no wake-up is lost: the settlement that it leaves keeps workers awake. Each of these fetches moves jobs
-- on to wait at full keys, and does not look at them again while those are full.
-- Two sessions: defer/queueing_locks.replace_fetch.spec.
create or replace function queue._claim_filtered(
  p_worker bigint, p_lanes integer[], p_n integer, p_tasks text[], p_before timestamptz, p_only bigint[],
  p_limits jsonb default null)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_until constant timestamptz := clock_timestamp() + interval '100 ms';
  v_won bigint[] := '{}'::bigint[];
  v_look integer := p_n;
  v_rounds integer := 0;
  v_full text[] := '{}'::text[];
  v_lanes integer[];  -- of queues that may start more
  v_ids bigint[];
  v_left bigint[];  -- still waiting: there was no room for them beside the others
  v_early bigint[] := '{}'::bigint[];
  v_round record;
begin
  loop
    if p_only is null then
      v_won := v_won || queue._claim_limited(p_worker, p_lanes, p_n - cardinality(v_won), p_tasks, p_before,
        p_limits);
      exit when cardinality(v_won) >= p_n;
    end if;
    v_lanes := coalesce(v_lanes, array(
      select u.lane
      from unnest(p_lanes) with ordinality u (lane, n)
      cross join lateral (select l.kind, l.queue from queue.lane l where l.lane = u.lane offset 0) l
      where l.queue <> all (v_full) and (l.kind = {{lane_plain}} or not queue._is_queue_full(l.queue))
      order by u.n));
    v_ids := queue._find_selected(v_lanes, v_look, p_tasks, p_before, p_only);
    exit when v_ids = '{}';
    v_early := v_early || queue._make_ready_early(v_ids);
    v_left := array(select w.id from queue.waiting w where w.id = any (v_ids));
    select c.won, c.full_queues into v_round
    from queue._claim_ids(p_worker, v_ids, p_n - cardinality(v_won), p_limits) c;
    v_won := v_won || v_round.won;
    exit when cardinality(v_won) >= p_n or cardinality(v_left) = cardinality(v_ids);
    v_rounds := v_rounds + 1;
    if v_rounds >= 20 and clock_timestamp() > v_until then
      -- This settlement refills nothing, but no worker sleeps while there is one.
      insert into queue.pending_settlement (job_id, kind, flags, payload)
      values (v_ids[1], 'refill', 0, '[]');
      exit;
    end if;
    v_look := greatest(p_n - cardinality(v_won),
      case when v_round.won = '{}' then least(2 * v_look::bigint, 1000) end);
    if v_round.full_queues <> '{}' then
      v_full := v_full || v_round.full_queues;
      v_lanes := null;
    end if;
    p_only := case when p_only is not null
      then array(select u.id from unnest(p_only) u (id) where u.id not in (
        select i.id from unnest(v_ids) i (id) where i.id <> all (v_left))) end;
  end loop;
  v_ids := array(select aj.id from queue.active_job aj where aj.id = any (v_early) and aj.claim is null);
  if v_ids <> '{}' then
    perform queue._readmit(v_ids);
  end if;
  return v_won;
end $$;

-- The first jobs of lanes, at most p_n in the order of p_lanes, that a fetch may make ready: they wait for a
-- slot where slots are free. With p_only: the jobs in it that are ready, or wait for slots and fit; a job
-- that is named may pass a heavier one. They match p_tasks and p_before as for _claim_filtered.
create or replace function queue._find_selected(
  p_lanes integer[], p_n integer, p_tasks text[], p_before timestamptz, p_only bigint[])
returns bigint[] language plpgsql stable parallel safe security invoker as $$
begin
  if p_only is not null then
    return array(
      with named as materialized (
        select c.id, c.lane, c.deadline, c.key, c.weight
        from (select distinct u.id from unnest(p_only) u (id)) u
        cross join lateral (
          select w.id, w.lane, w.deadline, w.key, coalesce(w.weight, 1) as weight from queue.waiting w
          -- || '' keeps the planner from an index whose condition is on reason.
          where w.id = u.id and w.reason || '' = 'slot' and w.lane = any (p_lanes)
          union all
          select aj.id, aj.lane, aj.deadline, null, null from queue.active_job aj
          where aj.id = u.id and aj.claim is null and aj.lane = any (p_lanes) offset 0) c),
      room as materialized (
        select k.key, s.slots, s.rate_limit, {{free_slots}} as free,
          queue._rate_room(k.key, s.rate_limit, s.rate_per, s.rate_limit, clock_timestamp()) as rate_room
        from (select distinct n.key from named n) k
        cross join lateral (
          select s.slots, s.used, s.rate_limit, s.rate_per from queue.semaphore s where s.key = k.key
          order by s.tick desc limit 1) s)
      select c.id
      from named c
      join queue.lane l on l.lane = c.lane
      left join room r on r.key = c.key
      where (least(c.weight, r.slots) <= r.free) is not false
        and (least(c.weight, r.rate_limit) <= r.rate_room) is not false
        and (p_before is null or queue._deadline_of(c.id, c.deadline) < p_before)
        and (p_tasks is null or exists (select from queue.job j where j.id = c.id and j.task = any (p_tasks)))
      order by min(array_position(p_lanes, c.lane)) over (partition by l.queue, l.priority), c.deadline, c.id
      limit p_n);
  end if;
  return array(
    select w.id
    from (
      select s.key, l.lane, l.low, l.low_deadline, least(s.free, s.rate_room) as free,
        least(case when s.free < s.slots then s.free end,
          case when s.rate_room < s.rate_limit then s.rate_room end) as heaviest
      from (
        select distinct on (s.key) s.key, s.lanes, s.waiting, s.lows, s.low_deadlines, s.slots,
          s.rate_limit, {{free_slots}} as free,
          queue._rate_room(s.key, s.rate_limit, s.rate_per, s.rate_limit, clock_timestamp()) as rate_room
        from queue.semaphore s where s.lanes <> '{}' order by s.key, s.tick desc) s
      cross join lateral unnest(s.lanes, s.waiting, s.lows, s.low_deadlines)
        l (lane, waiting, low, low_deadline)
      where least(s.free, s.rate_room) > 0 and l.waiting > 0 and l.lane = any (p_lanes) offset 0) s
    cross join lateral queue._find_waiting(s.key, s.lane, s.low_deadline, s.low, s.heaviest,
      least(s.free, p_n), p_tasks, p_before) w (id, deadline)
    order by array_position(p_lanes, s.lane), w.deadline, w.id limit p_n);
end $$;

-- The first jobs that wait for a slot of a key in a lane and match, at most p_n and at most 200: they are of
-- p_tasks, and have a deadline before p_before, if given. None of them is behind a job that weighs more than
-- p_heaviest (NULL: every weight fits). No job waits below (p_low_deadline, p_low).
-- However many others wait, it reads few rows. One index has the tasks, and another one the weights; it reads
-- the first job of each weight. For p_before it looks at the first 200 jobs of each task: in a lane they are
-- those with the nearest deadlines, except where shares take turns.
create or replace function queue._find_waiting(
  p_key text, p_lane integer, p_low_deadline timestamptz, p_low bigint, p_heaviest integer, p_n integer,
  p_tasks text[], p_before timestamptz)
returns table (id bigint, deadline timestamptz)
language plpgsql stable parallel safe security invoker rows 10 as $$
declare
  v_end_deadline timestamptz := timestamptz 'infinity';
  v_end bigint := 9223372036854775807;
  v_weight integer := p_heaviest;
  v_heavy record;
begin
  while v_weight is not null loop  -- once for each weight, as the next one is greater
    select w.weight, w.deadline, w.id into v_heavy from queue.waiting w
    where left(w.reason, 4) = 'slot' and w.key = p_key and w.lane = p_lane and w.weight > v_weight
      and (w.deadline, w.id) >= (p_low_deadline, p_low)
    order by w.weight, w.deadline, w.id limit 1;
    exit when not found;
    if (v_heavy.deadline, v_heavy.id) < (v_end_deadline, v_end) then
      v_end_deadline := v_heavy.deadline;
      v_end := v_heavy.id;
    end if;
    v_weight := v_heavy.weight;
  end loop;
  if p_tasks is null then
    return query
      select w.id, w.deadline
      from (
        select w.id, w.deadline from queue.waiting w
        where w.reason = 'slot' and w.key = p_key and w.lane = p_lane
          and (w.deadline, w.id) >= (p_low_deadline, p_low) and (w.deadline, w.id) < (v_end_deadline, v_end)
          and w.deadline <= coalesce(p_before, 'infinity')
        order by w.deadline, w.id limit 200) w
      where p_before is null or queue._deadline_of(w.id, w.deadline) < p_before
      order by w.deadline, w.id limit p_n;
    return;
  end if;
  return query
    select w.id, w.deadline
    from (select distinct u.task from unnest(p_tasks) u (task)) u
    cross join lateral (
      select w.id, w.deadline
      from (
        select w.id, w.deadline from queue.waiting w
        where left(w.reason, 4) = 'slot' and w.key = p_key and w.lane = p_lane and w.task = u.task
          and (w.deadline, w.id) >= (p_low_deadline, p_low) and (w.deadline, w.id) < (v_end_deadline, v_end)
          and w.deadline <= coalesce(p_before, 'infinity')
        order by w.deadline, w.id limit 200) w
      where p_before is null or queue._deadline_of(w.id, w.deadline) < p_before
      order by w.deadline, w.id limit p_n) w
    order by w.deadline, w.id limit p_n;
end $$;
