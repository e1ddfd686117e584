-- The last gate: jobs become ready if their concurrency keys have free slots.
-- Tests: admit/slots.sql, admit/enter_slots.sql, admit/shares.slots.sql.

-- Sends jobs that have passed every other gate to queue.active_job, or lets them wait for a slot. p_from,
-- p_places, p_moves: the key in whose line each job had come to the front, its place there (_refill), and
-- how often it has changed lines. grown: keys whose limit has grown, or for which a job waits that would
-- fit. passed: keys for which a job waits that may come before a ready one. discarded: jobs in no gate that
-- would have to wait, and must be discarded instead (on_limit).
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._enter_slots(p_ids bigint[], p_from text[] default null,
  p_places timestamptz[] default null, p_moves smallint[] default null, out discarded bigint[],
  out grown text[], out passed text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_entries record;
  v_froms record;
  v_turns record;
  v_taken record;
begin
  v_entries := queue._queue_entries(p_ids);
  if v_entries.all_flags & {{mutex}} <> 0 and exists (select from unnest(v_entries.flags) f
    where f & {{lock}} = {{mutex}}) then
    v_turns := queue._ask_for_slots(v_entries.ids, v_entries.flags);
    if v_turns.asked is not null then
      grown := v_turns.keys || (
        select s.grown from queue._queue_entries(v_turns.asked) a
        cross join lateral queue._take_slots(a.ids, a.lanes, a.deadlines, a.flags, a.attempts, true) s);
    end if;
    if v_turns.postponed is not null then
      v_entries := queue._queue_entries(array(select u.id from unnest(v_entries.ids) u (id)
        where u.id <> all (v_turns.postponed)));
      if v_entries.ids is null then
        return;
      end if;
    end if;
  end if;
  if v_entries.all_flags & {{slots}} = 0 then
    perform queue._make_ready(v_entries.ids, v_entries.lanes, v_entries.deadlines, v_entries.flags,
      v_entries.attempts, v_entries.is_low, v_entries.has_tags);
    return;
  end if;
  if p_from is not null or (select min(d) < 'infinity' from unnest(v_entries.deadlines) d) then
    -- They come in the order in which they waited for their keys, or of their deadlines.
    select array_agg(x.id) as ids, array_agg(x.lane) as lanes, array_agg(x.deadline) as deadlines,
      array_agg(x.flags) as flags, array_agg(x.attempt) as attempts, array_agg(p_from[x.n]) as keys,
      array_agg(x.place) as places, array_agg(p_moves[x.n]) as moves
    into v_froms
    from (
      select e.*, x.n, coalesce(p_places[x.n], e.deadline) as place
      from unnest(v_entries.ids, v_entries.lanes, v_entries.deadlines, v_entries.flags, v_entries.attempts)
        e (id, lane, deadline, flags, attempt)
      cross join lateral (select array_position(p_ids, e.id) as n offset 0) x
      order by coalesce(p_places[x.n], e.deadline), e.id) x;
    v_taken := queue._take_slots(v_froms.ids, v_froms.lanes, v_froms.deadlines, v_froms.flags,
      v_froms.attempts, p_from is not null, case when p_from is not null then v_froms.keys end,
      v_froms.places, v_froms.moves, v_entries.has_tags and p_from is null);
  else
    v_taken := queue._take_slots(v_entries.ids, v_entries.lanes, v_entries.deadlines, v_entries.flags,
      v_entries.attempts, false, p_by_turns => v_entries.has_tags);
  end if;
  discarded := v_taken.discarded;
  grown := grown || v_taken.grown;
  passed := v_taken.passed;
end $$;

-- Like _enter_slots, for jobs whose places are known (_queue_entries). A key's line, here: the jobs of a lane
-- that wait for it, in their order. p_is_refill: the jobs need not queue up behind those that wait. But a job
-- from another key's line does so if the first job in this key's line comes before it, by deadline and id;
-- where shares take turns, by id. So a heavy job that has become the first is passed only by jobs that come
-- before it, and not for ever by jobs that wait for another key.
--
-- Why this ends: suppose that no claim ends, and that some jobs change lines for ever. Reserved slots of a
-- key become free only if a job arrives, leaves the line of a later key, or gives them back there, once each
-- time (admit/reserve.sql). So room for the last key only shrinks, and jobs leave its line only so often.
-- Hence room for the key before it grows only so often, and so on.
-- Look at the time after that, and of these jobs at the first one by that order, m. Room only shrinks, so a
-- job that goes to a line because it does not fit, or because a heavy one does not (_heavy_waiting), stays in
-- it. So m goes to a line because the first job there, h, comes before it, and h changes lines no more. There
-- m stands behind h: by the same order, or by tag, because a job from another line gets a new tag (p_moved of
-- _tags) or that of a later job (_own_place), and none comes before the first one. _refill takes jobs out in
-- the line's order, so it takes out m only with h. As h stays, it went back because it did not fit, or behind
-- one that did not (v_back). That one is not taken out again, nor are h and m behind it.
-- (While _retag gives new tags, m may stand before h. _refill hands over what takes long, and _retag ends.)
-- Why no job waits in vain: jobs that wait hold no slot that they have not reserved. One that queues up
-- although it would fit names the key in grown, and _refill looks at the line. So in the end the first job of
-- each line does not fit.
-- p_by_turns: shares take turns at slots for which no job waits yet, and the jobs that get them count as
-- turns in the line that begins.
-- Locks: the caller holds the admission lock; rows of queue.queueing_lock by skip locked.
-- With a function of its own for the loop, 50 jobs with a key would take 0.1 % more instructions.
-- In one piece, because the loop shares its arrays: that function would take 11 arguments and return 9.
create or replace function queue._take_slots(
  p_ids bigint[], p_lanes integer[], p_deadlines timestamptz[], p_flags smallint[], p_attempts smallint[],
  p_is_refill boolean, p_from text[] default null, p_places timestamptz[] default null,
  p_moves smallint[] default null, p_by_turns boolean default false,
  out discarded bigint[], out grown text[], out passed text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  -- ns, pairs: which job has which (key, lane); keys, lanes: the distinct ones
  v_keys record;
  v_counts record;                                   -- the counts of each (key, lane)
  v_row integer := 1;
  v_first integer;
  v_pair integer;
  v_shut integer;
  v_ready integer[];                          -- the counts to add to it
  v_waiting integer[];
  v_lows bigint[];
  v_low_deadlines timestamptz[];
  v_pass integer[] := '{}'::integer[];
  v_wait integer[] := '{}'::integer[];
  v_wait_pairs integer[] := '{}'::integer[];
  v_wait_weights integer[] := '{}'::integer[];
  v_weight integer;
  v_fits boolean;
  v_is_behind boolean;                        -- the first job of the line comes before it
  v_wait_keys text[] := '{}'::text[];
  v_moves smallint;
  v_wait_moves smallint[] := '{}'::smallint[];
  v_reserved integer[];                       -- the counts to add to it
  v_reserved_ids bigint[];                    -- the jobs that reserve slots of v_reserved_keys
  v_reserved_keys text[];
  v_places timestamptz[];
  v_head_places timestamptz[];                -- the first waiting job of each (key, lane)
  v_head_ids bigint[];
  v_behind_heavy integer[];                   -- lines that wait for a heavy job (_heavy_waiting)
  v_back integer[] := '{}'::integer[];        -- lines to which one of their jobs goes back
  v_turns integer[];                          -- the order of p_ids, if not that
  v_n integer;
  v_had integer[];                            -- jobs that have had their turns, at v_had_keys
  v_had_keys text[];
begin
  select array_agg(x.n order by x.n, x.pair) as ns, array_agg(x.pair order by x.n, x.pair) as pairs,
    array_agg(x.key) as set_keys, array_agg(x.slots) as set_slots, array_agg(x.id) as set_ids,
    array_agg(x.rate_limit) as set_rate_limits, array_agg(x.rate_per) as set_rate_pers,
    array_agg(x.weight order by x.n, x.pair) as weights,
    array_agg(x.key order by x.pair) filter (where x.is_first) as keys,
    array_agg(x.lane order by x.pair) filter (where x.is_first) as lanes,
    array_agg(x.newest order by x.pair) filter (where x.is_first) as newest,
    array_agg(x.id) filter (where x.discards and not p_is_refill and queue._try_lock_queueing_lock(x.id))
      as discards
  into v_keys
  from (
    select x.n, x.id, x.key, x.slots, x.discards, x.lane, x.weight, x.rate_limit, x.rate_per,
      dense_rank() over (order by x.key, x.lane)::integer as pair,
      row_number() over (partition by x.key, x.lane) = 1 as is_first,
      max(x.id) over (partition by x.key, x.lane) as newest
    from (select x.n, x.id, x.key, x.slots, x.discards, x.weight, x.rate_limit, x.rate_per,
        p_lanes[x.n] as lane
      from queue._keys_of(p_ids, p_flags) x) x) x;
  grown := queue._set_slots(v_keys.set_keys, v_keys.set_slots, v_keys.set_ids, v_keys.set_rate_limits,
    v_keys.set_rate_pers);
  if not p_is_refill and exists (select from queue.waiting w where w.reserved is not null) then
    grown := grown || queue._pass_reserved_on(p_ids, p_lanes, p_deadlines, p_flags);
  end if;
  select array_agg(s.slots order by u.n) as slots, array_agg(s.rate_limit order by u.n) as rates,
    array_agg({{free_slots}} order by u.n) as free,
    array_agg(queue._rate_room(u.key, s.rate_limit, s.rate_per, s.rate_limit, clock_timestamp())
      order by u.n) as rate_room,
    bool_or(s.rate_limit is not null) as have_rates,
    -- The newest job of a key, 0 if that is not known.
    array_agg(s.limit_id order by u.n) as newest,
    array_agg(coalesce(s.ready[s.at], 0) order by u.n) as ready,
    array_agg(coalesce(s.waiting[s.at], 0) order by u.n) as waiting,
    bool_or(s.lanes not in ('{}', array[u.lane])) as have_other_lanes
  into v_counts
  from unnest(v_keys.keys, v_keys.lanes) with ordinality u (key, lane, n)
  cross join lateral (
    select s.slots, s.used, s.rate_limit, s.rate_per, s.limit_id, s.lanes, s.ready, s.waiting,
      array_position(s.lanes, u.lane) as at
    from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) s;
  if v_counts.have_other_lanes then
    v_behind_heavy := array(
      select u.n
      from queue._heavy_waiting(v_keys.keys) h
      join unnest(v_keys.keys, v_keys.lanes) with ordinality u (key, lane, n) on u.key = h.key
      join queue.lane l on l.lane = u.lane
      where l.queue = h.queue and l.priority < h.priority);
  end if;
  if p_from is not null then
    select array_agg(h.deadline order by u.n), array_agg(h.id order by u.n) into v_head_places, v_head_ids
    from unnest(v_keys.keys, v_keys.lanes) with ordinality u (key, lane, n)
    cross join lateral (
      select s.lows, s.low_deadlines, array_position(s.lanes, u.lane) as at
      from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) s
    left join lateral (
      select w.deadline, w.id from queue.waiting w
      where w.reason = 'slot' and w.key = u.key and w.lane = u.lane
        and (w.deadline, w.id) >= (s.low_deadlines[s.at], s.lows[s.at])
      order by w.deadline, w.id limit 1) h on true;
  end if;
  if p_by_turns and exists (
    select from unnest(v_keys.pairs, v_keys.weights) u (pair, weight)
    group by u.pair
    having v_counts.waiting[u.pair] = 0 and least(v_counts.free[u.pair], v_counts.rate_room[u.pair])
      - v_counts.ready[u.pair] between 1 and sum(u.weight) - 1)
  then
    v_turns := queue._turns(p_ids, p_lanes, p_deadlines, v_keys.ns, v_keys.pairs);
  end if;
  v_ready := array_fill(0, array[cardinality(v_keys.keys)]);
  v_waiting := v_ready;
  v_reserved := v_ready;
  v_lows := array_fill(null::bigint, array[cardinality(v_keys.keys)]);
  v_low_deadlines := array_fill(null::timestamptz, array[cardinality(v_keys.keys)]);
  for i in 1 .. cardinality(p_ids) loop
    v_n := i;
    if v_turns is not null then
      v_n := v_turns[i];
      v_row := coalesce(array_position(v_keys.ns, v_n), 0);
    end if;
    v_first := v_row;
    v_shut := null;
    while v_keys.ns[v_row] = v_n loop
      v_pair := v_keys.pairs[v_row];
      if v_shut is null then
        v_weight := v_keys.weights[v_row];
        v_fits := v_counts.ready[v_pair] + v_ready[v_pair]
          <= least(v_counts.free[v_pair] - least(v_weight, v_counts.slots[v_pair]),
            v_counts.rate_room[v_pair] - least(v_weight, v_counts.rates[v_pair]));
        v_is_behind := v_head_ids[v_pair] is not null
          and (greatest(v_head_places[v_pair], '{{end_of_tags}}'), v_head_ids[v_pair])
            < (greatest(p_places[v_n], '{{end_of_tags}}'), p_ids[v_n]);
        if not v_fits or v_pair = any (v_behind_heavy)
          or v_counts.waiting[v_pair] + v_waiting[v_pair] > 0 and not p_is_refill
          or v_keys.keys[v_pair] = p_from[v_n] and v_pair = any (v_back)
          or v_keys.keys[v_pair] <> p_from[v_n] and v_is_behind then
          v_shut := v_pair;
        end if;
      end if;
      v_row := v_row + 1;
    end loop;
    if v_shut is null then
      v_pass := v_pass || v_n;
      for i in v_first .. v_row - 1 loop
        v_pair := v_keys.pairs[i];
        v_ready[v_pair] := v_ready[v_pair] + v_keys.weights[i];
      end loop;
    elsif p_ids[v_n] = any (v_keys.discards) then
      discarded := discarded || p_ids[v_n];
    else
      if not p_is_refill and v_counts.ready[v_shut] > 0
        and (p_deadlines[v_n] < 'infinity' or v_counts.newest[v_shut] not between 1 and p_ids[v_n]) then
        passed := array_remove(passed, v_keys.keys[v_shut]) || v_keys.keys[v_shut];
      end if;
      if v_fits then
        -- The jobs that wait are too heavy, or this job comes before them.
        grown := array_remove(grown, v_keys.keys[v_shut]) || v_keys.keys[v_shut];
      end if;
      v_waiting[v_shut] := v_waiting[v_shut] + 1;
      v_wait := v_wait || v_n;
      v_wait_pairs := v_wait_pairs || v_shut;
      v_wait_weights := v_wait_weights || nullif(v_weight, 1);
      v_wait_keys := v_wait_keys || v_keys.keys[v_shut];
      v_moves := case when v_row - v_first > 1 then least({{patience}},
        coalesce(p_moves[v_n] + (v_keys.keys[v_shut] <> p_from[v_n])::integer, 0)) end;
      v_wait_moves := v_wait_moves || v_moves;
      if v_moves = {{patience}} and v_reserved_ids is null and v_waiting[v_shut] = 1 and not v_is_behind
        and v_counts.free[v_shut] < least(v_weight, v_counts.slots[v_shut])
        and queue._may_reserve(p_lanes[v_n], array(select v_keys.keys[k]
          from unnest(v_keys.pairs[v_first : v_row - 1]) k)) then
        while v_keys.pairs[v_first] < v_shut loop
          v_pair := v_keys.pairs[v_first];
          v_reserved[v_pair] := v_reserved[v_pair] + v_keys.weights[v_first];
          v_reserved_ids := v_reserved_ids || p_ids[v_n];
          v_reserved_keys := v_reserved_keys || v_keys.keys[v_pair];
          -- In all lanes.
          v_counts.free := array(select u.free
              - case when u.key = v_keys.keys[v_pair] then v_keys.weights[v_first] else 0 end
            from unnest(v_counts.free, v_keys.keys) with ordinality u (free, key, n) order by u.n);
          v_first := v_first + 1;
        end loop;
      end if;
      if v_keys.keys[v_shut] = p_from[v_n] then
        v_back := v_back || v_shut;
      end if;
    end if;
  end loop;
  perform queue._make_ready(array_agg(p_ids[n]), array_agg(p_lanes[n]), array_agg(p_deadlines[n]),
    array_agg(p_flags[n]), array_agg(p_attempts[n]))
  from unnest(v_pass) n having count(*) > 0;
  if v_wait <> '{}' then
    if p_by_turns then
      -- The jobs that have got slots where a line begins.
      select array_agg(k.n), array_agg(v_keys.keys[k.pair]) into v_had, v_had_keys
      from unnest(v_keys.ns, v_keys.pairs) k (n, pair)
      where v_counts.waiting[k.pair] = 0 and v_waiting[k.pair] > 0
        and (k.n in (select unnest(v_pass))) is true;  -- by a hash
    end if;
    v_places := (queue._tags(array(select p_ids[n] from unnest(v_wait || v_had) n),
      array(select p_lanes[n] from unnest(v_wait || v_had) n),
      array(select p_deadlines[n] from unnest(v_wait || v_had) n), v_wait_keys || v_had_keys,
      array(select p_from[u.n] <> u.key from unnest(v_wait, v_wait_keys) u (n, key))))[:cardinality(v_wait)];
    if p_from is not null then
      v_places := array(
        select case when u.moves is not null and u.place < '{{end_of_tags}}'
          then queue._own_place(p_ids[u.n], p_lanes[u.n], u.key, u.place) else u.place end
        from unnest(v_wait, v_wait_keys, v_places, v_wait_moves) with ordinality u (n, key, place, moves, nth)
        order by u.nth);
    end if;
    insert into queue.waiting (id, reason, key, lane, deadline, flags, attempt, moves, weight, task,
      reserved, reserved_at)
    select p_ids[u.n], 'slot', u.key, p_lanes[u.n], u.place, p_flags[u.n], p_attempts[u.n], u.moves,
      u.weight, (select j.task from queue.job j where j.id = p_ids[u.n]),
      (select array_agg(r.key) from unnest(v_reserved_ids, v_reserved_keys) r (id, key)
        where r.id = p_ids[u.n]), case when p_ids[u.n] = any (v_reserved_ids) then clock_timestamp() end
    from unnest(v_wait, v_wait_keys, v_places, v_wait_moves, v_wait_weights)
      u (n, key, place, moves, weight);
    for i in 1 .. cardinality(v_wait) loop
      v_pair := v_wait_pairs[i];
      v_lows[v_pair] := least(v_lows[v_pair], p_ids[v_wait[i]]);
      v_low_deadlines[v_pair] := least(v_low_deadlines[v_pair], v_places[i]);
    end loop;
    perform queue._keep_turns(array_agg(p_ids[n])) from unnest(v_wait) n where p_flags[n] & {{ordered}} <> 0
      having count(*) > 0;
  end if;
  perform queue._add_slots(v_keys.keys, v_keys.lanes, v_reserved, v_ready, v_waiting, v_lows,
    v_low_deadlines, v_keys.newest);
  if v_counts.have_rates and v_wait <> '{}' then
    perform queue._set_next_starts(v_wait_keys);
  end if;
  if discarded is not null then
    perform queue._keep_turns(discarded);
  end if;
end $$;
