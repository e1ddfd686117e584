-- Makes jobs that wait for a slot ready before their turn, for a claim that passes over the jobs before them.
-- Tests: admit/rates.sql, work/fetch.sql.

-- Moves jobs that wait for slots to queue.active_job, although others come before them: the caller claims
-- them. Returns their ids. Of each key and lane it moves the first ones for whose weights together there is
-- room. It also sees to it that the sum of the weights of all ready jobs stays an integer.
-- Locks: the caller holds the admission lock.
-- Why no wake-up is lost: the others stay in queue.waiting, where _refill finds them. The next admission
-- refills keys of which this frees slots, or of which a heavy job is gone.
-- Two sessions: defer/queueing_locks.replace_fetch.spec.
create or replace function queue._make_ready_early(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_moved record;
begin
  with asked as materialized (
    select w.id, w.key, w.lane, w.deadline, coalesce(w.weight, 1) as weight
    from queue.waiting w where w.id = any (p_ids)),
  room as materialized (
    select s.key, a.lane, s.slots, s.rate_limit, {{free_slots}} as free,
      queue._rate_room(s.key, s.rate_limit, s.rate_per, s.rate_limit, clock_timestamp()) as rate_room,
      2147483647 - coalesce(s.ready[array_position(s.lanes, a.lane)], 0) as countable
    from (select distinct a.key, a.lane from asked a) a
    cross join lateral (
      select s.key, s.slots, s.used, s.rate_limit, s.rate_per, s.lanes, s.ready from queue.semaphore s
      where s.key = a.key order by s.tick desc limit 1) s),
  gone as (
    delete from queue.waiting w
    where w.id = any (array(
      select x.id
      from (
        select a.id, sum(least(a.weight, r.slots)) over w <= r.free
            and (sum(least(a.weight, r.rate_limit)) over w <= r.rate_room) is not false
            and sum(a.weight) over w <= r.countable as fits
        from asked a join room r on r.key = a.key and r.lane = a.lane
        window w as (partition by a.key, a.lane order by a.deadline, a.id)) x
      where x.fits))
    returning w.id, w.key, w.lane, w.at, w.weight, w.reserved)
  select array_agg(g.id) as ids, array_agg(g.key) as keys, array_agg(g.lane) as lanes,
    array_agg(g.key) filter (where g.at is not null) as rated,
    array_agg(g.key) filter (where g.weight is not null) as heavy_keys,
    (select array_agg(g.id) from gone g cross join unnest(g.reserved) k) as reserved_ids,
    (select array_agg(k) from gone g cross join unnest(g.reserved) k) as reserved_keys
  into v_moved
  from gone g;
  if v_moved.ids is null then
    return null;
  end if;
  perform queue._add_slots(v_moved.keys, v_moved.lanes, null, null,
    array_fill(-1, array[cardinality(v_moved.ids)]), null);
  perform queue._set_next_starts(v_moved.rated);
  perform queue._free_reserved(v_moved.reserved_ids, v_moved.reserved_keys);
  if v_moved.heavy_keys || v_moved.reserved_keys is not null then
    -- Other jobs waited for these.
    insert into queue.pending_settlement (job_id, kind, flags, payload)
    values (v_moved.ids[1], 'refill', 0, to_jsonb(v_moved.heavy_keys || v_moved.reserved_keys));
  end if;
  select x.* into v_moved from queue._queue_entries(v_moved.ids) x;
  perform queue._add_slots(array_agg(k.key), array_agg(v_moved.lanes[k.n]), null, array_agg(k.weight), null,
    null)
    from queue._keys_of(v_moved.ids, v_moved.flags) k;
  perform queue._make_ready(v_moved.ids, v_moved.lanes, v_moved.deadlines, v_moved.flags, v_moved.attempts);
  return v_moved.ids;
end $$;
