-- Claiming under limits: slots, max_running and rate, expires_at, queueing locks.
-- Tests: admit/rates.sql, admit/slots.sql.

-- Claims up to p_n jobs of lanes, in the order of p_lanes, subject to limits: semaphores, a queue's
-- max_running and rate, expires_at, and queueing locks that a defer is replacing. Lanes of one queue and
-- priority are read as one. Only jobs of p_tasks, and with a deadline before p_before, if given. p_limits:
-- those of the worker (work/worker_limits.sql). It looks on for 100 ms, and for five rounds however busy the
-- machine is.
-- Locks: the caller holds the admission lock; rows of queue.active_job and queue.queueing_lock by skip
-- locked.
create or replace function queue._claim_limited(
  p_worker bigint, p_lanes integer[], p_n integer, p_tasks text[] default null,
  p_before timestamptz default null, p_limits jsonb default null)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_start timestamptz := clock_timestamp();
  v_won bigint[] := '{}'::bigint[];
  v_left bigint[] := '{}'::bigint[];
  v_full text[] := '{}'::text[];
  v_take integer := p_n;
  v_rounds integer := 0;
  v_ids bigint[];
  v_round record;
begin
  loop
    v_ids := array(
      select c.id
      from (
        select min(u.n) as rank, array_agg(l.lane) as lanes, array_agg(l.low_deadline) as deadlines,
          array_agg(l.low_id) as ids
        from unnest(p_lanes) with ordinality u (lane, n)
        cross join lateral (
          select l.lane, l.queue, l.priority, l.kind, l.low_deadline, l.low_id from queue.lane l
          where l.lane = u.lane offset 0) l
        where l.queue <> all (v_full) and (l.kind = {{lane_plain}} or not queue._is_queue_full(l.queue))
        group by l.queue, l.priority order by 1) g
      cross join lateral (
        select aj.id
        from unnest(g.lanes, g.deadlines, g.ids) l (lane, deadline, id)
        cross join lateral (
          select aj.id, aj.deadline from queue.active_job aj
          where aj.lane = l.lane and (aj.deadline, aj.id) >= (l.deadline, l.id) and aj.claim is null
            and aj.id <> all (v_left)
            and (p_before is null or queue._deadline_of(aj.id, aj.deadline) < p_before)
            and (p_tasks is null or exists (select from queue.job j
              where j.id = aj.id and j.task = any (p_tasks)))
          order by aj.deadline, aj.id limit v_take) aj
        order by aj.deadline, aj.id limit v_take) c
      -- If the jobs of the first lanes can't start, however many they are, the next round also reads the
      -- first jobs of the other lanes: of at least a hundred lanes that have any.
      limit case when v_left = '{}' then v_take else 100 * v_take::bigint end);
    exit when v_ids = '{}';
    select c.won, c.rest, c.full_queues into v_round
    from queue._claim_ids(p_worker, v_ids, p_n - cardinality(v_won), p_limits,
      num_nonnulls(p_tasks, p_before) = 0) c;
    v_won := v_won || v_round.won;
    v_left := v_left || v_round.rest;
    v_full := v_full || v_round.full_queues;
    v_rounds := v_rounds + 1;
    exit when cardinality(v_won) >= p_n
      or v_rounds >= 5 and clock_timestamp() > v_start + interval '100 ms';
    if v_round.rest <> '{}' then
      perform queue._fill_behind_replaced(v_left);
    end if;
    v_take := greatest(p_n - cardinality(v_won), least(2 * v_take::bigint, 1000));
  end loop;
  return v_won;
end $$;

-- Claims those of p_ids, at most p_n, that limits allow to start. Ready jobs that meet a full key go to wait;
-- rest: jobs that stay where they are; full_queues: queues whose own limits allow no more starts.
-- p_in_order: a job also goes to wait if a heavy one of its queue and key, with a higher priority, waits
-- (_heavy_waiting).
-- Locks: as _claim_limited. Why no wake-up is lost: the heavy one gives the key to _refill.
-- In one piece, because a function for the loop would take 19 arguments and return 16.
create or replace function queue._claim_ids(
  p_worker bigint, p_ids bigint[], p_n integer, p_limits jsonb, p_in_order boolean default false,
  out won bigint[], out rest bigint[], out full_queues text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  -- Taken under the admission lock, so that earlier claims have lower numbers.
  v_claim bigint := nextval('queue.claim_seq');
  v_jobs record;                              -- _lock_ready_jobs
  v_keys record;                              -- _keys_to_claim
  v_due bigint[] := '{}'::bigint[];           -- expired jobs
  v_fixed bigint[];                           -- these, and jobs whose queueing lock is being replaced
  v_queues text[] := '{}'::text[];            -- with limits, and how many jobs they allow to start
  v_room integer[] := '{}'::integer[];
  v_queue integer;
  v_row integer := 1;
  v_first integer;
  v_key integer;
  v_shut integer;
  v_behind integer[] := '{}'::integer[];      -- entries of v_keys.ns whose job a heavy one comes before
  v_taken integer[];
  v_counted bigint[] := '{}'::bigint[];       -- jobs that count in max_running
  v_started record;                           -- a queue with limits, and its jobs that start
  v_add_keys text[] := '{}'::text[];          -- the counts to add to semaphores
  v_add_lanes integer[] := '{}'::integer[];
  v_add_used integer[] := '{}'::integer[];
  v_add_ready integer[] := '{}'::integer[];
  v_add_waiting integer[] := '{}'::integer[];
  v_add_lows bigint[] := '{}'::bigint[];
  v_add_low_deadlines timestamptz[] := '{}'::timestamptz[];
  v_wait integer[] := '{}'::integer[];
  v_wait_keys text[] := '{}'::text[];
  v_wait_weights integer[] := '{}'::integer[];
  v_weight integer;
  v_wait_several boolean[] := '{}'::boolean[];
begin
  won := '{}'::bigint[];
  rest := '{}'::bigint[];
  full_queues := '{}'::text[];
  v_jobs := queue._lock_ready_jobs(p_ids, p_limits is not null);
  if v_jobs.ids is null then
    rest := p_ids;
    return;
  elsif cardinality(v_jobs.ids) < cardinality(p_ids) then
    rest := array(select u.id from unnest(p_ids) u (id) where u.id <> all (v_jobs.ids));
  end if;
  if v_jobs.all_flags & {{expires}} <> 0 then
    v_due := array(select e.id from queue.expiry e where e.id = any (v_jobs.ids) and e.at <= v_now);
  end if;
  v_fixed := v_due;
  if v_jobs.all_flags & {{queueing_lock}} <> 0 then
    v_fixed := v_fixed || queue._try_lock_queueing_locks(v_jobs.ids);
  end if;
  if v_jobs.all_flags & {{slots}} <> 0 then
    v_keys := queue._keys_to_claim(v_jobs.ids, v_jobs.flags, v_now);
    v_taken := array_fill(0, array[cardinality(v_keys.keys)]);
    if p_in_order then
      v_behind := array(
        select u.n::integer from queue._heavy_waiting(v_keys.keys) h
        cross join unnest(v_keys.ns, v_keys.nos) with ordinality u (job, key, n)
        join queue.lane l on l.lane = v_jobs.lanes[u.job]
        where h.key = v_keys.keys[u.key] and h.queue = l.queue and h.priority > l.priority);
    end if;
  end if;
  for n in 1 .. cardinality(v_jobs.ids) loop
    exit when cardinality(won) >= p_n;
    v_first := v_row;
    v_shut := null;
    v_queue := null;
    if v_jobs.flags[n] & {{slots}} <> 0 then
      while v_keys.ns[v_row] = n loop
        v_key := v_keys.nos[v_row];
        if v_shut is null and (v_row = any (v_behind) or v_taken[v_key]
          > least(v_keys.free[v_key] - least(v_keys.weights[v_row], v_keys.slots[v_key]),
            v_keys.rate_room[v_key] - least(v_keys.weights[v_row], v_keys.rates[v_key]))) then
          v_weight := v_keys.weights[v_row];
          v_shut := v_key;
        end if;
        v_row := v_row + 1;
      end loop;
    end if;
    if v_jobs.ids[n] = any (v_fixed) then
      rest := rest || v_jobs.ids[n];
      continue;
    elsif v_shut is not null then
      v_wait := v_wait || n;
      v_wait_keys := v_wait_keys || v_keys.keys[v_shut];
      v_wait_weights := v_wait_weights || nullif(v_weight, 1);
      v_wait_several := v_wait_several || (v_row - v_first > 1);
      for i in v_first .. v_row - 1 loop
        v_add_keys := v_add_keys || v_keys.keys[v_keys.nos[i]];
        v_add_lanes := v_add_lanes || v_jobs.lanes[n];
        v_add_used := v_add_used || 0;
        v_add_ready := v_add_ready || -v_keys.weights[i];
        v_add_waiting := v_add_waiting || (v_keys.nos[i] = v_shut)::integer;
        v_add_lows := v_add_lows || case when v_keys.nos[i] = v_shut then v_jobs.ids[n] end;
        v_add_low_deadlines := v_add_low_deadlines
          || case when v_keys.nos[i] = v_shut
            then queue._front_tag(v_keys.keys[v_shut], v_jobs.lanes[n], v_jobs.deadlines[n]) end;
      end loop;
      continue;
    end if;
    if v_jobs.are_limited[n] then
      v_queue := array_position(v_queues, v_jobs.queues[n]);
      if v_queue is null then
        v_queues := v_queues || v_jobs.queues[n];
        v_room := v_room || least(queue._queue_room(v_jobs.queues[n], p_n, v_now),
          case when p_limits is not null
            then queue._worker_room(p_worker, p_limits, v_jobs.queues[n], p_n) end);
        v_queue := cardinality(v_queues);
      end if;
      if v_room[v_queue] <= 0 then
        rest := rest || v_jobs.ids[n];
        continue;
      end if;
      v_room[v_queue] := v_room[v_queue] - 1;
    end if;
    for i in v_first .. v_row - 1 loop
      v_taken[v_keys.nos[i]] := v_taken[v_keys.nos[i]] + v_keys.weights[i];
      v_add_keys := v_add_keys || v_keys.keys[v_keys.nos[i]];
      v_add_lanes := v_add_lanes || v_jobs.lanes[n];
      v_add_used := v_add_used || v_keys.weights[i];
      v_add_ready := v_add_ready || -v_keys.weights[i];
      v_add_waiting := v_add_waiting || 0;
      v_add_lows := v_add_lows || null::bigint;
      v_add_low_deadlines := v_add_low_deadlines || null::timestamptz;
    end loop;
    won := won || v_jobs.ids[n];
  end loop;
  if won <> '{}' then
    if v_queues <> '{}' then
      for v_started in
        select u.queue, array_agg(u.id) as ids
        from unnest(v_jobs.ids, v_jobs.queues, v_jobs.are_limited) u (id, queue, is_limited)
        where u.is_limited and u.id = any (won) group by u.queue
      loop
        v_counted := v_counted || queue._count_starts(v_started.queue, v_started.ids, v_now);
        if p_limits is not null then
          perform queue._count_worker_claims(p_worker, p_limits, v_started.queue, v_started.ids, v_claim);
        end if;
      end loop;
      full_queues := array(
        select u.queue from unnest(v_queues, v_room) u (queue, room) where u.room <= 0);
    end if;
    update queue.active_job aj
    set claim = v_claim, worker_id = p_worker, claimed_at = v_now, attempt = aj.attempt + 1,
      flags = aj.flags | case when aj.id = any (v_counted) then {{queue_slot}} else 0 end
    where aj.id = any (won);
    if v_jobs.all_flags & {{until_start}} <> 0 then
      perform queue._drop_queueing_locks(won, {{until_start}});
    end if;
    if v_jobs.all_flags & {{until_finish}} <> 0 then
      perform queue._renew_queueing_locks(won);
    end if;
    if v_jobs.all_flags & {{needs}} <> 0 then
      perform queue._begin_any(array_agg(v_jobs.ids[n])) from generate_series(1, cardinality(v_jobs.ids)) n
      where v_jobs.flags[n] & {{needs}} <> 0 and v_jobs.ids[n] = any (won) having count(*) > 0;
    end if;
    if v_jobs.all_flags & {{lease}} <> 0 then
      perform queue._lease_timeouts(won, v_claim, v_now);
    end if;
  else
    full_queues := v_queues;
  end if;
  if v_wait <> '{}' then
    perform queue._leave_for_lines(array_agg(v_jobs.ids[n]), array_agg(v_jobs.deadlines[n]),
      array_agg(v_jobs.flags[n]), v_wait_keys, v_wait_weights, v_wait_several)
    from unnest(v_wait) n;
  end if;
  if v_add_keys <> '{}' then
    perform queue._add_slots(v_add_keys, v_add_lanes, v_add_used, v_add_ready, v_add_waiting, v_add_lows,
      v_add_low_deadlines);
  end if;
  for i in 1 .. coalesce(cardinality(v_taken), 0) loop
    if v_taken[i] > 0 and v_keys.rates[i] is not null then
      perform queue._count_rate_starts(v_keys.keys[i], v_keys.rates[i], v_taken[i], v_now);
    end if;
  end loop;
  if true = any (v_wait_several) or array_remove(v_wait_weights, null) <> '{}' then
    perform queue._advance(p_keys => v_add_keys);
  elsif v_add_keys <> '{}' then
    if array_remove(v_keys.rates, null) <> '{}' then
      perform queue._set_next_starts(v_keys.keys);
    end if;
  end if;
  if v_due <> '{}' then
    perform queue._expire(v_due);
  end if;
end $$;

-- A ready job may be blocked for long by an uncommitted replacement. This admits other waiting jobs of the
-- same key and lane into the slots that would stay idle. It admits none if a heavy job goes before them,
-- because _claim_ids would send them back each time.
-- Locks: the caller holds the admission lock; rows of queue.queueing_lock by skip locked.
-- Why no wake-up is lost: the admitted jobs are ready for the loop's next round, and a job that is being
-- replaced stays ready; each claim checks the limits again.
-- Two sessions: defer/queueing_locks.replace_fetch.spec.
create or replace function queue._fill_behind_replaced(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
  v_jobs record;
begin
  v_ids := array(
    select aj.id from queue.active_job aj where aj.id = any (p_ids) and aj.claim is null
      and aj.flags & {{slots}} <> 0 and aj.flags & {{queueing_lock}} <> 0);
  if v_ids <> '{}' then
    v_ids := queue._try_lock_queueing_locks(v_ids);
  end if;
  if v_ids = '{}' then
    return;
  end if;
  select array_agg(aj.id) as ids, array_agg(aj.flags) as flags, array_agg(aj.lane) as lanes into v_jobs
  from queue.active_job aj where aj.id = any (v_ids);
  perform queue._make_ready_early(array(
    select w.id
    from (select k.key, v_jobs.lanes[k.n] as lane, sum(k.weight) as n
      from queue._keys_of(v_jobs.ids, v_jobs.flags) k group by 1, 2) k
    cross join lateral (
      select least({{free_slots}},
          queue._rate_room(s.key, s.rate_limit, s.rate_per, s.rate_limit, clock_timestamp())) as free,
        s.lanes, s.ready, s.lows, s.low_deadlines
      from queue.semaphore s where s.key = k.key order by s.tick desc limit 1) s
    cross join lateral unnest(s.lanes, s.ready, s.lows, s.low_deadlines) l (lane, ready, low, low_deadline)
    cross join lateral (
      select w.id from queue.waiting w
      where w.reason = 'slot' and w.key = k.key and w.lane = k.lane
        and (w.deadline, w.id) >= (l.low_deadline, l.low)
      order by w.deadline, w.id limit greatest(s.free - (l.ready - k.n), 0)) w
    where l.lane = k.lane and queue._heavy_before(k.key, k.lane) is null));
end $$;
