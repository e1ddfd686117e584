-- Claiming jobs that the options of fetch select.
-- Tests: work/claim_filtered.sql, work/fetch.sql.

-- Claims up to p_n jobs of lanes. Where given, they are of p_tasks, have a deadline before p_before, and are
-- among p_only. p_limits: as for _claim_limited.
-- It also looks at jobs that wait for a slot where slots are free, because the ready jobs of the lane may not
-- match. Not in queues that may start no more: there these jobs would become ready and stay so.
-- Locks: as _claim_limited.
create or replace function queue._claim_filtered(
  p_worker bigint, p_lanes integer[], p_n integer, p_tasks text[], p_before timestamptz, p_only bigint[],
  p_limits jsonb default null)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_won bigint[] := '{}'::bigint[];
  v_ids bigint[];
begin
  if p_only is null then
    v_won := queue._claim_limited(p_worker, p_lanes, p_n, p_tasks, p_before, p_limits);
    if cardinality(v_won) >= p_n then
      return v_won;
    end if;
  end if;
  p_lanes := array(
    select u.lane
    from unnest(p_lanes) with ordinality u (lane, n)
    cross join lateral (select l.kind, l.queue from queue.lane l where l.lane = u.lane offset 0) l
    where l.kind = {{lane_plain}} or not queue._is_queue_full(l.queue)
    order by u.n);
  if p_only is null then
    v_ids := array(
      select w.id
      from (
        select s.key, l.lane, l.low, l.low_deadline, least(s.free, s.rate_room) as free,
          least(case when s.free < s.slots then s.free end,
            case when s.rate_room < s.rate_limit then s.rate_room end) as heaviest
        from (
          select distinct on (s.key) s.key, s.lanes, s.waiting, s.lows, s.low_deadlines, s.slots,
            s.rate_limit, least(s.slots, {{most_slots}}) - s.used as free,
            queue._rate_room(s.key, s.rate_limit, s.rate_per, s.rate_limit, clock_timestamp()) as rate_room
          from queue.semaphore s where s.lanes <> '{}' order by s.key, s.tick desc) s
        cross join lateral unnest(s.lanes, s.waiting, s.lows, s.low_deadlines)
          l (lane, waiting, low, low_deadline)
        where least(s.free, s.rate_room) > 0 and l.waiting > 0 and l.lane = any (p_lanes) offset 0) s
      cross join lateral queue._find_in_line(s.key, s.lane, s.low_deadline, s.low, s.heaviest, s.free,
        p_tasks, p_before) w (id));
  else
    v_ids := array(
      select w.id from unnest(p_only) u (id)
      cross join lateral (
        select w.id from queue.waiting w where w.id = u.id and w.reason || '' = 'slot'
          and w.lane = any (p_lanes) offset 0) w);
  end if;
  perform queue._make_ready_early(v_ids);
  if p_only is not null then
    v_ids := array(select distinct u.id from unnest(p_only) u (id));
  end if;
  v_ids := array(
    select aj.id
    from unnest(v_ids) u (id)
    cross join lateral (
      select aj.id, aj.lane, aj.deadline from queue.active_job aj
      where aj.id = u.id and aj.claim is null and aj.lane = any (p_lanes)
        and (p_before is null or queue._deadline_of(aj.id, aj.deadline) < p_before) offset 0) aj
    where p_tasks is null or exists (select from queue.job j where j.id = aj.id and j.task = any (p_tasks))
    order by array_position(p_lanes, aj.lane), aj.deadline, aj.id);
  if v_ids = '{}' then
    return v_won;
  end if;
  return v_won || (select c.won
    from queue._claim_ids(p_worker, v_ids, p_n - cardinality(v_won), p_limits) c);
end $$;

-- The first jobs that wait for a slot of a key in a lane and match, at most p_n and at most 200: they are of
-- p_tasks, and have a deadline before p_before, if given. None of them is behind a job that weighs more than
-- p_heaviest (NULL: every weight fits). No job waits below (p_low_deadline, p_low).
-- However many others wait, it reads few rows: one index has the tasks, and another one the weights; it reads
-- the first job of each weight. For p_before it looks at the first 200 jobs of each task: in a lane they are
-- those with the nearest deadlines, except where shares take turns.
create or replace function queue._find_in_line(
  p_key text, p_lane integer, p_low_deadline timestamptz, p_low bigint, p_heaviest integer, p_n integer,
  p_tasks text[], p_before timestamptz)
returns setof bigint language plpgsql stable parallel safe security invoker rows 10 as $$
declare
  v_end_deadline timestamptz := timestamptz 'infinity';
  v_end bigint := 9223372036854775807;
  v_heavy record;
begin
  while p_heaviest is not null loop
    select w.weight, w.deadline, w.id into v_heavy from queue.waiting w
    where w.reason = 'slot' and w.key = p_key and w.lane = p_lane and w.weight > p_heaviest
      and (w.deadline, w.id) >= (p_low_deadline, p_low)
    order by w.weight, w.deadline, w.id limit 1;
    exit when not found;
    if (v_heavy.deadline, v_heavy.id) < (v_end_deadline, v_end) then
      v_end_deadline := v_heavy.deadline;
      v_end := v_heavy.id;
    end if;
    p_heaviest := v_heavy.weight;
  end loop;
  if p_tasks is null then
    return query
      select w.id
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
    select w.id
    from (select distinct u.task from unnest(p_tasks) u (task)) u
    cross join lateral (
      select w.id, w.deadline
      from (
        select w.id, w.deadline from queue.waiting w
        where w.reason = 'slot' and w.key = p_key and w.lane = p_lane and w.task = u.task
          and (w.deadline, w.id) >= (p_low_deadline, p_low) and (w.deadline, w.id) < (v_end_deadline, v_end)
          and w.deadline <= coalesce(p_before, 'infinity')
        order by w.deadline, w.id limit 200) w
      where p_before is null or queue._deadline_of(w.id, w.deadline) < p_before
      order by w.deadline, w.id limit p_n) w
    order by w.deadline, w.id limit p_n;
end $$;
