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

-- Like _enter_slots, for jobs whose places are known (_queue_entries). p_is_refill: the jobs need not queue
-- up behind those that wait. But a job from another key's line does so if the first job in this key's line
-- comes before it, by deadline and id; where shares take turns, by id. So a heavy job that has become the
-- first is passed only by jobs that come before it, and not for ever by jobs that wait for another key.
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
-- In one piece, because a function for the loop would take 11 arguments and return 9.
create or replace function queue._take_slots(
  p_ids bigint[], p_lanes integer[], p_deadlines timestamptz[], p_flags smallint[], p_attempts smallint[],
  p_is_refill boolean, p_from text[] default null, p_places timestamptz[] default null,
  p_moves smallint[] default null, p_by_turns boolean default false,
  out discarded bigint[], out grown text[], out passed text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_asked record;                             -- _slot_requests
  v_lines record;                             -- _slot_lines; a line's number is that of its (key, lane)
  v_heads record;                             -- _line_heads
  v_turns integer[];                          -- the order of p_ids, if not that
  v_n integer;
  v_row integer := 1;
  v_first integer;
  v_pair integer;
  v_shut integer;                             -- the first line of a job that it can't pass
  v_weight integer;
  v_fits boolean;
  v_is_behind boolean;                        -- the first job of the line comes before it
  v_pass integer[] := '{}'::integer[];        -- places of jobs in p_ids
  v_wait integer[] := '{}'::integer[];
  v_wait_pairs integer[] := '{}'::integer[];
  v_wait_keys text[] := '{}'::text[];
  v_wait_weights integer[] := '{}'::integer[];
  v_moves smallint;
  v_wait_moves smallint[] := '{}'::smallint[];
  v_places timestamptz[];
  v_back integer[] := '{}'::integer[];        -- lines to which one of their jobs goes back
  v_reserved_ids bigint[];                    -- the jobs that reserve slots of v_reserved_keys
  v_reserved_keys text[];
  v_had integer[];                            -- jobs that have had their turns, at v_had_keys
  v_had_keys text[];
  v_ready integer[];                          -- the counts to add to each line
  v_waiting integer[];
  v_reserved integer[];
  v_lows bigint[];
  v_low_deadlines timestamptz[];
begin
  v_asked := queue._slot_requests(p_ids, p_lanes, p_flags, p_is_refill);
  grown := v_asked.grown;
  if not p_is_refill and exists (select from queue.waiting w where w.reserved is not null) then
    grown := grown || queue._pass_reserved_on(p_ids, p_lanes, p_deadlines, p_flags);
  end if;
  v_lines := queue._slot_lines(v_asked.keys, v_asked.lanes);
  if p_from is not null then
    v_heads := queue._line_heads(v_asked.keys, v_asked.lanes);
  else
    select null::bigint[] as ids, null::timestamptz[] as places into v_heads;
  end if;
  if p_by_turns and exists (
    select from unnest(v_asked.pairs, v_asked.weights) u (pair, weight)
    group by u.pair
    having v_lines.waiting[u.pair] = 0 and least(v_lines.free[u.pair], v_lines.rate_room[u.pair])
      - v_lines.ready[u.pair] between 1 and sum(u.weight) - 1)
  then
    v_turns := queue._turns(p_ids, p_lanes, p_deadlines, v_asked.ns, v_asked.pairs);
  end if;
  v_ready := array_fill(0, array[cardinality(v_asked.keys)]);
  v_waiting := v_ready;
  v_reserved := v_ready;
  v_lows := array_fill(null::bigint, array[cardinality(v_asked.keys)]);
  v_low_deadlines := array_fill(null::timestamptz, array[cardinality(v_asked.keys)]);
  for i in 1 .. cardinality(p_ids) loop
    v_n := i;
    if v_turns is not null then
      v_n := v_turns[i];
      v_row := coalesce(array_position(v_asked.ns, v_n), 0);
    end if;
    v_first := v_row;
    v_shut := null;
    while v_asked.ns[v_row] = v_n loop
      v_pair := v_asked.pairs[v_row];
      if v_shut is null then
        v_weight := v_asked.weights[v_row];
        v_fits := v_lines.ready[v_pair] + v_ready[v_pair]
          <= least(v_lines.free[v_pair] - least(v_weight, v_lines.slots[v_pair]),
            v_lines.rate_room[v_pair] - least(v_weight, v_lines.rates[v_pair]));
        v_is_behind := v_heads.ids[v_pair] is not null
          and (greatest(v_heads.places[v_pair], '{{end_of_tags}}'), v_heads.ids[v_pair])
            < (greatest(p_places[v_n], '{{end_of_tags}}'), p_ids[v_n]);
        if not v_fits or v_pair = any (v_lines.behind_heavy)
          or v_lines.waiting[v_pair] + v_waiting[v_pair] > 0 and not p_is_refill
          or v_asked.keys[v_pair] = p_from[v_n] and v_pair = any (v_back)
          or v_asked.keys[v_pair] <> p_from[v_n] and v_is_behind then
          v_shut := v_pair;
        end if;
      end if;
      v_row := v_row + 1;
    end loop;
    if v_shut is null then
      v_pass := v_pass || v_n;
      for i in v_first .. v_row - 1 loop
        v_pair := v_asked.pairs[i];
        v_ready[v_pair] := v_ready[v_pair] + v_asked.weights[i];
      end loop;
    elsif p_ids[v_n] = any (v_asked.discards) then
      discarded := discarded || p_ids[v_n];
    else
      if not p_is_refill and v_lines.ready[v_shut] > 0
        and (p_deadlines[v_n] < 'infinity' or v_lines.newest[v_shut] not between 1 and p_ids[v_n]) then
        passed := array_remove(passed, v_asked.keys[v_shut]) || v_asked.keys[v_shut];
      end if;
      if v_fits then
        -- The jobs that wait are too heavy, or this job comes before them.
        grown := array_remove(grown, v_asked.keys[v_shut]) || v_asked.keys[v_shut];
      end if;
      v_waiting[v_shut] := v_waiting[v_shut] + 1;
      v_wait := v_wait || v_n;
      v_wait_pairs := v_wait_pairs || v_shut;
      v_wait_weights := v_wait_weights || nullif(v_weight, 1);
      v_wait_keys := v_wait_keys || v_asked.keys[v_shut];
      v_moves := case when v_row - v_first > 1 then least({{patience}},
        coalesce(p_moves[v_n] + (v_asked.keys[v_shut] <> p_from[v_n])::integer, 0)) end;
      v_wait_moves := v_wait_moves || v_moves;
      if v_moves = {{patience}} and v_reserved_ids is null and v_waiting[v_shut] = 1 and not v_is_behind
        and v_lines.free[v_shut] < least(v_weight, v_lines.slots[v_shut])
        and queue._may_reserve(p_lanes[v_n], array(select v_asked.keys[k]
          from unnest(v_asked.pairs[v_first : v_row - 1]) k)) then
        while v_asked.pairs[v_first] < v_shut loop
          v_pair := v_asked.pairs[v_first];
          v_reserved[v_pair] := v_reserved[v_pair] + v_asked.weights[v_first];
          v_reserved_ids := v_reserved_ids || p_ids[v_n];
          v_reserved_keys := v_reserved_keys || v_asked.keys[v_pair];
          -- In all lanes.
          v_lines.free := array(select u.free
              - case when u.key = v_asked.keys[v_pair] then v_asked.weights[v_first] else 0 end
            from unnest(v_lines.free, v_asked.keys) with ordinality u (free, key, n) order by u.n);
          v_first := v_first + 1;
        end loop;
      end if;
      if v_asked.keys[v_shut] = p_from[v_n] then
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
      select array_agg(k.n), array_agg(v_asked.keys[k.pair]) into v_had, v_had_keys
      from unnest(v_asked.ns, v_asked.pairs) k (n, pair)
      where v_lines.waiting[k.pair] = 0 and v_waiting[k.pair] > 0
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
  perform queue._add_slots(v_asked.keys, v_asked.lanes, v_reserved, v_ready, v_waiting, v_lows,
    v_low_deadlines, v_asked.newest);
  if v_lines.have_rates and v_wait <> '{}' then
    perform queue._set_next_starts(v_wait_keys);
  end if;
  if discarded is not null then
    perform queue._keep_turns(discarded);
  end if;
end $$;
