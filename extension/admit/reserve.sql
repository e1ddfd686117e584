-- Reserved slots, so that a job with several keys starts in the end.
-- Tests: admit/reserve.sql.
--
-- A job with several keys waits for the first full one. When that has a slot for it, another key may be full,
-- and later jobs take the slot. For as long as such jobs keep both keys full, it could go from line to line.
-- So after some changes of line (macro patience) it reserves slots: when it goes on to a full key and is the
-- first in that line, it keeps its slots of the keys before that one. `used` counts them. For the reasons and
-- the cost see docs/adr/0012-reserved-slots.md.
--
-- Only the first job of a line reserves: one at a time of the jobs that have a key, and one in 10 s of a lane
-- (_may_reserve). So a hundred jobs do not take all slots of a key, or wait for one another while slots are
-- idle. And a job that waits for a long claim does not keep the others from the key.
-- Why nothing stops: a job has reserved slots only while claims and reserved slots fill the key that it waits
-- for, and only of keys that come before that one, in the order of _take_slots. So of the jobs that have
-- reserved slots, the one that waits for the last key waits only for claims to end. If it waits for a ready
-- job, or for a rate, it gives its slots back (_give_up_reserved): others with the same keys could start,
-- while perhaps no worker serves the queue of the ready job. It also gives them back if others go before it
-- for long, and when it leaves its line: a ready job has no reserved slots.

-- Whether jobs of a higher priority in the queue of a lane wait for one of these keys. It does not see those
-- that _take_slots just sends there.
create or replace function queue._is_outranked(p_lane integer, p_keys text[])
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (
    select from unnest(p_keys) u (key)
    cross join lateral (
      select s.lanes, s.waiting from queue.semaphore s where s.key = u.key order by s.tick desc limit 1) s
    cross join lateral unnest(s.lanes, s.waiting) o (lane, waiting)
    join queue.lane l on l.lane = o.lane
    join queue.lane own on own.lane = p_lane
    where o.waiting > 0 and l.queue = own.queue and l.priority > own.priority);
end $$;

-- Whether a job of a lane may reserve slots of some of its keys. It may if it is not outranked, if no other
-- job has reserved slots of these keys or for them, and if no job of the lane has reserved any in the last 10
-- s.
create or replace function queue._may_reserve(p_lane integer, p_keys text[])
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return not queue._is_outranked(p_lane, p_keys)
    and not exists (select from queue.waiting w
      where w.reserved is not null and ((w.reserved || w.key) && p_keys
        or w.lane = p_lane and w.reserved_at > clock_timestamp() - interval '10 s'));
end $$;

-- Frees the reserved slots of jobs that leave queue.waiting. p_ids: the job of each key, or one job of all.
-- Locks: the caller holds the admission lock.
-- Why no wake-up is lost: the caller passes the keys to _refill, or hands them over.
create or replace function queue._free_reserved(p_ids bigint[], p_keys text[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_keys is null then
    return;
  end if;
  perform queue._add_slots(array_agg(k.key), null, array_agg(-k.weight), null, null, null)
  from unnest(p_ids, p_keys) u (id, key)
  cross join lateral queue._keys_of(array[coalesce(u.id, p_ids[1])], array[{{keys}}]::smallint[]) k
  where k.key = u.key;
end $$;

-- Frees the reserved slots of jobs that wait for one of these keys in three cases. A job is outranked. Claims
-- leave room for it, so it waits for a ready job, or for a rate. Or others go before it: the key was looked
-- at twice as often as the job has weight. Returns the keys of these slots.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: _refill returns these keys, and is
-- called for them.
create or replace function queue._give_up_reserved(p_keys text[])
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_jobs record;
begin
  select array_agg(w.id) as ids, array_agg(r.key) as keys into v_jobs
  from queue.waiting w
  cross join lateral (select s.slots, s.used from queue.semaphore s where s.key = w.key
    order by s.tick desc limit 1) s
  cross join lateral (select coalesce(w.weight, 1) as weight) x
  cross join lateral unnest(w.reserved) r (key)
  where w.reserved is not null and w.key = any (p_keys)
    and (least(x.weight, s.slots) <= {{free_slots}}
      or w.moves >= {{patience}} + 2 * least(x.weight, 10000)
      or queue._is_outranked(w.lane, w.reserved || w.key));
  if v_jobs.ids is not null then
    update queue.waiting w set reserved = null where w.id = any (v_jobs.ids);
    perform queue._free_reserved(v_jobs.ids, v_jobs.keys);
  end if;
  update queue.waiting w set moves = w.moves + 1 where w.reserved is not null and w.key = any (p_keys);
  return v_jobs.keys;
end $$;

-- Frees the reserved slots of jobs that come after arriving ones of their queue: of a lower priority, or of
-- the same with a later deadline. Returns their keys.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: the arriving jobs get these slots, and
-- the caller names the keys in grown.
create or replace function queue._pass_reserved_on(p_ids bigint[], p_lanes integer[],
  p_deadlines timestamptz[], p_flags smallint[])
returns text[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_jobs record;
begin
  select array_agg(w.id) as ids, array_agg(r.key) as keys into v_jobs
  from queue.waiting w
  join queue.lane own on own.lane = w.lane
  cross join lateral unnest(w.reserved) r (key)
  where w.reserved is not null and exists (
    select from queue._keys_of(p_ids, p_flags) k
    join queue.lane l on l.lane = p_lanes[k.n]
    where k.key = any (w.reserved) and l.queue = own.queue and (l.priority > own.priority
      or l.priority = own.priority and p_deadlines[k.n] < w.deadline and w.deadline >= '{{end_of_tags}}'));
  if v_jobs.ids is not null then
    update queue.waiting w set reserved = null where w.id = any (v_jobs.ids);
    perform queue._free_reserved(v_jobs.ids, v_jobs.keys);
  end if;
  return v_jobs.keys;
end $$;
