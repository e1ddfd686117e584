-- Jobs join locks, and an older member that came late gets the turn.
-- Tests: admit/locks.sql, admit/locks.dead_rows.sql, admit/locks.late_defer.spec.

-- Adds new jobs to their locks. In a lock that had no member, the first gets the turn. While any task is
-- paused, a member counts as passed only once it has been at that gate; _wait_for_turn then notes it. free:
-- new jobs that nothing here holds up, because they have the turn or need none. passed, displaced, keys: what
-- this releases besides, as _give_turn_to_older returns it.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._join_locks(
  p_ids bigint[], out free bigint[], out passed bigint[], out displaced bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_changes record;
begin
  with joining as materialized (
    -- The last of the other members is looked for once per lock, beside its first new job: all dead rows of
    -- the lock may be in the way.
    select x.lock, x.id, x.is_mutex, x.is_passed, x.n,
      first_value(o.id) over (partition by x.lock order by x.id) as last_id,
      first_value(o.is_mixed) over (partition by x.lock order by x.id) as is_mixed
    from (
      select j.id, j.lock, j.flags & {{mutex}} <> 0 as is_mutex,
        j.flags & ({{needs}} | {{scheduled}} | {{held}}) = 0 and not j.is_later
          and (select p.no from queue.pause p where p.task is not null limit 1) is null as is_passed,
        row_number() over (partition by j.lock order by j.id) as n
      from unnest(p_ids) u (id)
      cross join lateral (
        select j.id, j.flags, j.lock, coalesce(j.scheduled_at > clock_timestamp(), false) as is_later
        from queue.job_now j where j.id = u.id offset 0) j
      where j.flags & {{lock}} <> 0 and j.lock is not null) x
    left join lateral (
      select m.id, (select h.id from queue.lock_member h where h.lock = x.lock and h.is_mutex limit 1)
        is not null as is_mixed
      from queue.lock_member m where m.lock = x.lock and x.n = 1
      order by m.id desc limit 1) o on true),
  joined as (
    insert into queue.lock_member (lock, id, is_mutex, is_late, is_passed, has_turn)
    select x.lock, x.id, x.is_mutex, x.last_id > x.id is true and not x.is_mutex,
      x.is_passed, not x.is_mutex and x.n = 1 and x.last_id is null
    from joining x)
  select array_agg(distinct x.lock) filter (where x.is_mutex and not x.is_mixed) as mixed,
    array_agg(distinct x.lock) filter (where not x.is_mutex and x.is_mixed) as ordered,
    array_agg(x.id order by x.id) filter (where x.is_mutex or x.n = 1 and x.last_id is null) as free,
    array_agg(x.lock) filter (where x.last_id > x.id) as late
  into v_changes
  from joining x;
  if v_changes.mixed is not null then
    -- From now on has_turn is valid.
    update queue.lock_member m set has_turn = true
    where m.ctid = any (array(
      select h.ctid from unnest(v_changes.mixed) u (lock)
      cross join lateral (
        select m.ctid, m.has_turn
        from queue.lock_member m
        where m.lock = u.lock and not m.is_late and not m.is_mutex
        order by m.id limit 1) h
      where not h.has_turn));
  end if;
  free := v_changes.free;
  if v_changes.ordered is not null then
    free := free || queue._next_mixed(v_changes.ordered);
  end if;
  if v_changes.late is not null then
    v_changes := queue._give_turn_to_older(v_changes.late, p_ids);
    free := free || v_changes.joined;
    passed := v_changes.passed;
    displaced := v_changes.displaced;
    keys := v_changes.keys;
  end if;
end $$;

-- Gives the turn to a member that came late, or to a mutex member, if it is older than the member that has
-- the turn, and that one does not run. Otherwise the older job would wait for the younger, which may itself
-- wait for the older.
-- passed: jobs that have the turn now, and that nothing else holds up. joined: those of them that are in
-- p_joining, jobs in no gate yet. displaced: jobs that had the turn, and are now in no gate. keys: semaphores
-- that have room now.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked. If another transaction
-- holds the row of a job, the job is starting, or comes back (_readmit) when that ends.
-- Why no wake-up is lost: some member always has the turn, except in a mixed lock while its first member is a
-- mutex job, whose end passes the turn on. Two sessions: admit/locks.late_defer.spec,
-- operate/pause.late.spec.
create or replace function queue._give_turn_to_older(
  p_locks text[], p_joining bigint[], out passed bigint[], out joined bigint[], out displaced bigint[],
  out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_lock record;
  v_reason text;
  v_taken record;
  v_pass bigint[];
begin
  for v_lock in
    select u.lock, l.id as late_id, l.is_passed, h.id, x.id is not null as is_mixed
    from (select distinct u.lock from unnest(p_locks) u (lock)) u
    left join lateral (
      select m.id, m.is_passed
      from queue.lock_member m
      where m.lock = u.lock and m.is_late
      order by m.id limit 1) l on true
    left join lateral (
      select m.id
      from queue.lock_member m
      where m.lock = u.lock and m.is_mutex
      order by m.id limit 1) x on true
    -- The member that has the turn, unless it is even older. Without mutex members it is the next one, read
    -- without passing dead rows.
    cross join lateral (
      (select m.id, m.has_turn from queue.lock_member m where x.id is null and m.lock = u.lock and m.id > l.id
        and not m.is_late order by m.id limit 1)
      union all
      select m.id, true from queue.lock_member m where x.id is not null and m.lock = u.lock and m.has_turn
        and m.id + 0 > least(l.id, x.id)) h
    where h.has_turn or (select aj.id from queue.active_job aj where aj.id = h.id) is not null
      or (select w.reason from queue.waiting w where w.id = h.id) = 'slot'
  loop
    select w.reason into v_reason from queue.waiting w where w.id = v_lock.id;
    if found and v_reason <> 'slot' then
      null;  -- it gets its turn after that gate
    elsif found or exists (select from queue.active_job aj where aj.id = v_lock.id)
      or exists (select from queue.unsettled h where h.job_id = v_lock.id and h.kind = 'again'
        and h.flags = 0 and h.payload is null)
    then
      v_taken := queue._dequeue(v_lock.id);
      if v_taken.place is null then
        insert into queue.pending_settlement (xid, job_id, kind, flags)
        select queue._row_locker(aj.xmax), aj.id, 'readmit', 0 from queue.active_job aj
        where aj.id = v_lock.id and aj.claim is null;
        continue;
      end if;
      displaced := displaced || v_lock.id;
      keys := keys || v_taken.keys;
    else
      continue;  -- the end of its claim is not settled yet
    end if;
    update queue.lock_member m set has_turn = false, is_passed = false
    where m.lock = v_lock.lock and m.id = v_lock.id;
    if v_lock.is_mixed then
      v_pass := v_pass || queue._next_mixed(array[v_lock.lock]);
    else
      perform queue._keep_turns(array[v_lock.late_id]);
      v_pass := v_pass || array(select v_lock.late_id where v_lock.is_passed);
    end if;
  end loop;
  passed := array(select u.id from unnest(v_pass) u (id) where u.id <> all (p_joining));
  joined := array(select u.id from unnest(v_pass) u (id) where u.id = any (p_joining));
end $$;
