-- Claiming jobs that the options of fetch select.
-- Tests: work/fetch.sql.

-- Claims up to p_n jobs of lanes. Where given, they are of p_tasks, have a deadline before p_before, and are
-- among p_only. p_limits: as for _claim_limited.
-- It also looks at jobs that wait for a slot where slots are free, because the ready jobs of the lane may not
-- match: at the first 200 of each key and lane; none passes a job that is too heavy now.
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
    v_ids := array(
      select w.id
      from (
        select s.key, l.lane, l.low, l.low_deadline, s.free, s.most
        from (select distinct on (s.key) s.key, s.lanes, s.waiting, s.lows, s.low_deadlines,
            least(s.slots, s.rate_limit) as most,
            queue._key_room(s.key, least(s.slots, {{most_slots}}) - s.used, s.rate_limit, s.rate_per,
              clock_timestamp()) as free
          from queue.semaphore s
              where s.lanes <> '{}' order by s.key, s.tick desc) s
        cross join lateral unnest(s.lanes, s.waiting, s.lows, s.low_deadlines)
          l (lane, waiting, low, low_deadline)
        where s.free > 0 and l.waiting > 0 and l.lane = any (p_lanes) offset 0) s
      cross join lateral (
        select w.id
        from (
          select w.id, w.deadline,
            max(w.weight) over (order by w.deadline, w.id rows unbounded preceding) as heaviest
          from (
            select w.id, w.deadline, least(coalesce(w.weight, 1), s.most) as weight from queue.waiting w
            where w.reason = 'slot' and w.key = s.key and w.lane = s.lane
              and (w.deadline, w.id) >= (s.low_deadline, s.low)
            order by w.deadline, w.id limit 200) w) w
        where w.heaviest <= s.free
          and (p_before is null or queue._deadline_of(w.id, w.deadline) < p_before)
          and (p_tasks is null or exists (select from queue.job j
            where j.id = w.id and j.task = any (p_tasks)))
        limit s.free) w);
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
