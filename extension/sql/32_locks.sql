-- Locks. queue.lock_member holds every unfinished job that has a lock; everything here runs under ADM.
--
-- ordered: the first member by id has the turn, and keeps it until it has ended, whatever it waits for.
-- The next is found by looking past the id of the one that ended, so that the dead rows before it cost
-- nothing. A job that joins where one with a greater id is a member (its transaction committed late, it is
-- retried, or that one took the lock on a retry) is late: it goes before those that wait, and takes the turn of
-- a younger one unless that one runs (_displace); is_late keeps it findable until it has had its turn.
-- mutex: a member that never waits for its turn; it takes the semaphore 'm' || lock (33_semaphores.sql),
-- as ordered jobs of a mixed lock do, one that has mutex members. An ordered job waits for every older
-- member, so that in a mixed lock the turn is only given to the first of all.
-- Whether a lock is mixed is asked by a subquery with limit 1: an EXISTS may be planned as a hash of all mutex
-- members of all locks.
-- In a mixed lock has_turn says which ordered job has the turn; else it is written only where it can't be
-- told from the job's place: a job in queue.live has it.

-- Adds new jobs. The turn goes to the first of a lock that had no member. While any task is paused none counts as passed
-- before it has been at that gate, after which _wait_for_turn notes it. free: those of them that nothing here holds
-- up: that have the turn, or need none. passed, displaced and keys: what others this lets go, as _displace returns it.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._join_locks(
  p_ids bigint[], out free bigint[], out passed bigint[], out displaced bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
begin
  with joining as materialized (
    select x.lock, x.id, x.is_mutex, x.is_passed, x.n, o.id is not null as has_others, coalesce(o.id > x.id, false) as is_late
    from (
      select j.id, j.lock, j.flags & 2 <> 0 as is_mutex,
        j.flags & (8 | 16 | 32) = 0 and not j.is_later and (select p.no from queue.pause p where p.task is not null limit 1) is null as is_passed,
        row_number() over (partition by j.lock order by j.id) as n
      from unnest(p_ids) u (id)
      cross join lateral (select j.id, j.flags | coalesce(s.extra_flags, 0) as flags, coalesce(s.lock, j.lock) as lock,
                            coalesce(s.scheduled_at > clock_timestamp(), false) as is_later
                          from queue.job j left join queue.job_state s on s.id = j.id where j.id = u.id offset 0) j
      where j.flags & 3 <> 0 and j.lock <> '') x
    left join lateral (select m.id from queue.lock_member m where m.lock = x.lock order by m.id desc limit 1) o on true),
  joined as (
    insert into queue.lock_member (lock, id, is_mutex, is_late, is_passed, has_turn)
    select x.lock, x.id, x.is_mutex, x.is_late and not x.is_mutex,
      x.is_passed, not x.is_mutex and x.n = 1 and not x.has_others
    from joining x)
  select array_agg(distinct x.lock) filter (where x.is_mutex and x.has_others and not m.is_mixed) as mixed,
    array_agg(distinct x.lock) filter (where not x.is_mutex and m.is_mixed) as ordered,
    array_agg(x.id order by x.id) filter (where x.is_mutex or x.n = 1 and not x.has_others) as free,
    array_agg(x.lock) filter (where x.is_late) as late
  into v
  from joining x
  left join lateral (
    select (select m.id from queue.lock_member m where m.lock = x.lock and m.is_mutex limit 1) is not null as is_mixed offset 0) m on x.has_others;
  if v.mixed is not null then
    -- from now on has_turn counts
    update queue.lock_member m set has_turn = true
    where m.ctid = any (array(
      select h.ctid from unnest(v.mixed) u (lock)
      cross join lateral (select m.ctid, m.has_turn from queue.lock_member m
                          where m.lock = u.lock and not m.is_late and not m.is_mutex order by m.id limit 1) h
      where not h.has_turn));
  end if;
  free := v.free;
  if v.ordered is not null then
    free := free || queue._next_mixed(v.ordered);
  end if;
  if v.late is not null then
    v := queue._displace(v.late, p_ids);
    free := free || v.joined;
    passed := v.passed;
    displaced := v.displaced;
    keys := v.keys;
  end if;
end $$;

-- Where a member that came late, or a mutex one, is older than the one that has the turn, and that one does not run, the
-- turn goes to the first: else the older would wait for what the younger waits for, which may be the older.
-- passed: who has the turn now, and nothing else holds him up; joined: those of them that are among p_joining, jobs that
-- are in no gate yet. displaced: who had it, and is in no gate now; keys: semaphores in which that left room.
-- Locks: the caller holds ADM; rows of queue.live by skip locked. Whose row another transaction holds is starting, or
-- comes back (_regate) once that is over. Why no wake-up is lost: the turn is never nobody's, but in a mixed lock while its
-- first member is a mutex job, whose end gives it on. Two sessions: lock_late_defer.spec, late_pause.spec.
create or replace function queue._displace(
  p_locks text[], p_joining bigint[], out passed bigint[], out joined bigint[], out displaced bigint[], out keys text[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_lock record;
  v_reason text;
  v_taken record;
  v_pass bigint[];
begin
  for v_lock in
    select u.lock, l.id as late_id, l.is_passed, h.id, x.id is not null as is_mixed
    from (select distinct u.lock from unnest(p_locks) u (lock)) u
    left join lateral (select m.id, m.is_passed from queue.lock_member m where m.lock = u.lock and m.is_late order by m.id limit 1) l on true
    left join lateral (select m.id from queue.lock_member m where m.lock = u.lock and m.is_mutex order by m.id limit 1) x on true
    -- the one that has the turn, unless that is older yet: without mutex members the next, read past no dead rows
    cross join lateral (
      (select m.id, m.has_turn from queue.lock_member m where x.id is null and m.lock = u.lock and m.id > l.id and not m.is_late order by m.id limit 1)
      union all
      select m.id, true from queue.lock_member m where x.id is not null and m.lock = u.lock and m.has_turn and m.id + 0 > least(l.id, x.id)) h
    where h.has_turn or (select v.id from queue.live v where v.id = h.id) is not null
      or (select w.reason from queue.waiting w where w.id = h.id) = 'slot'
  loop
    select w.reason into v_reason from queue.waiting w where w.id = v_lock.id;
    if found and v_reason <> 'slot' then
      null;  -- it comes to its turn after that gate
    elsif found or exists (select from queue.live v where v.id = v_lock.id)
      or exists (select from queue.handover h where h.job_id = v_lock.id and h.kind = 'again' and h.flags = 0 and h.payload is null)
    then
      v_taken := queue._take_out(v_lock.id);
      if v_taken.place is null then
        insert into queue.handover (xid, job_id, kind, flags)
        select queue._until(v.xmax), v.id, 'regate', 0 from queue.live v where v.id = v_lock.id and v.claim is null;
        continue;
      end if;
      displaced := displaced || v_lock.id;
      keys := keys || v_taken.keys;
    else
      continue;  -- the end of its claim is not settled yet
    end if;
    update queue.lock_member m set has_turn = false, is_passed = false where m.lock = v_lock.lock and m.id = v_lock.id;
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

-- The locks that jobs have now.
create or replace function queue._locks_of(p_ids bigint[])
returns text[] language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
begin
  return array(
    select distinct coalesce(s.lock, j.lock) from unnest(p_ids) u (id)
    cross join lateral (select j.id, j.lock from queue.job j where j.id = u.id offset 0) j
    left join lateral (select s.lock from queue.job_state s where s.id = u.id offset 0) s on true
    where coalesce(s.lock, j.lock) <> '');
end $$;

-- Their rows among the members: statements that work on them leave the planner no way but by these.
-- Locks: none; the caller holds ADM, so that nobody moves the rows meanwhile.
create or replace function queue._members(p_ids bigint[])
returns tid[] language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
begin
  return array(
    select m.ctid from unnest(p_ids) u (id)
    cross join lateral (select coalesce(s.lock, j.lock) as lock from queue.job j left join queue.job_state s on s.id = j.id where j.id = u.id offset 0) j
    cross join lateral (select m.ctid from queue.lock_member m where m.lock = j.lock and m.id = u.id offset 0) m);
end $$;

-- Of jobs that nothing but their lock can hold up, those that have the turn; the rest is marked.
create or replace function queue._wait_for_turn(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_pass bigint[];
  v_mark bigint[];
begin
  select array_agg(u.id order by u.id) filter (where m.id is null or m.has_turn),
    array_agg(u.id) filter (where not m.has_turn and not m.is_passed)
  into v_pass, v_mark
  from unnest(p_ids) u (id)
  cross join lateral (select coalesce(s.lock, j.lock) as lock from queue.job j left join queue.job_state s on s.id = j.id
                      where j.id = u.id offset 0) j
  left join lateral (select m.id, m.has_turn, m.is_passed from queue.lock_member m
                     where m.lock = j.lock and m.id = u.id and not m.is_mutex offset 0) m on true;
  if v_mark is not null then
    update queue.lock_member m set is_passed = true where m.ctid = any (queue._members(v_mark));
  end if;
  return v_pass;
end $$;

-- Notes that jobs which leave queue.live unfinished keep their turn.
create or replace function queue._keep_turns(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  update queue.lock_member m set has_turn = true, is_late = false
  where m.ctid = any (queue._members(p_ids)) and not m.is_mutex and (not m.has_turn or m.is_late);
end $$;

-- Takes ended jobs out of their locks and gives the turn to the next. p_had_turn: they had it. Returns those that have the
-- turn now, and that nothing else holds up.
-- Locks: the caller holds ADM. Others of a lock may have ended with them: these are in queue.finished, and passed over.
create or replace function queue._leave_locks(p_ids bigint[], p_had_turn boolean)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_pass bigint[];
  v_wait bigint[];
  v_mixed text[];
  v_late_locks text[];
  v_late_ids bigint[];
begin
  with gone as (
    delete from queue.lock_member m where m.ctid = any (queue._members(p_ids))
    returning m.lock, m.id, m.is_mutex, m.has_turn),
  -- offset 0 and the conditions inside: the next of a lock is looked for once, from the one that had the turn
  turned as materialized (
    select g.lock, g.id, x.is_mixed
    from gone g
    cross join lateral (
      select g.is_mutex or (select m.id from queue.lock_member m where m.lock = g.lock and m.is_mutex limit 1) is not null as is_mixed offset 0) x
    where p_had_turn or g.has_turn or x.is_mixed),
  next as materialized (
    select t.lock, n.id, n.is_passed, n.is_late, t.is_mixed, case when l.id < n.id or n.id is null then l.id end as late_id
    from turned t
    left join lateral (
      select m.id from queue.lock_member m
      where not t.is_mixed and m.lock = t.lock and m.is_late and m.id <> t.id and (select f.id from queue.finished f where f.id = m.id) is null
      order by m.id limit 1) l on true
    left join lateral (
      select m.id, m.is_passed, m.is_late from queue.lock_member m
      where not t.is_mixed and m.lock = t.lock and m.id > t.id and (select f.id from queue.finished f where f.id = m.id) is null
      order by m.id limit 1) n on true)
  select array_agg(n.id) filter (where n.is_passed and n.late_id is null),
    array_agg(n.id) filter (where (n.is_late or not n.is_passed) and n.late_id is null),
    array_agg(n.lock) filter (where n.is_mixed), array_agg(n.lock) filter (where n.late_id is not null), array_agg(n.late_id) filter (where n.late_id is not null)
  into v_pass, v_wait, v_mixed, v_late_locks, v_late_ids
  from next n;
  if v_late_ids is not null then
    v_wait := v_wait || v_late_ids;
    v_pass := v_pass || array(
      select u.id from unnest(v_late_locks, v_late_ids) u (lock, id)
      cross join lateral (select m.is_passed from queue.lock_member m where m.lock = u.lock and m.id = u.id offset 0) m where m.is_passed);
  end if;
  if v_wait is not null then
    perform queue._keep_turns(v_wait);
  end if;
  if v_mixed is not null then
    v_pass := v_pass || queue._next_mixed(array(select distinct u.lock from unnest(v_mixed) u (lock)));
  end if;
  return v_pass;
end $$;

-- Gives the turn in mixed locks where nobody has it to the first member, if that one is ordered. Returns
-- those that can go on at once.
create or replace function queue._next_mixed(p_locks text[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_pass bigint[];
begin
  with next as materialized (
    select f.ctid, f.id, f.is_passed
    from unnest(p_locks) u (lock)
    cross join lateral (select m.ctid, m.id, m.is_mutex, m.is_passed from queue.lock_member m where m.lock = u.lock order by m.id limit 1) f
    where not f.is_mutex
      and (select m.lock from queue.lock_member m where m.lock = u.lock and m.has_turn limit 1) is null),
  turned as (
    update queue.lock_member m set has_turn = true, is_late = false where m.ctid = any (array(select n.ctid from next n)))
  select array_agg(n.id order by n.id) filter (where n.is_passed) into v_pass from next n;
  return v_pass;
end $$;

-- The ordered job that had the turn when its lock became mixed may be ready, running or waiting for another
-- slot without having asked for the semaphore. Before a mutex job goes there, that one has to ask, or is counted.
-- asked: those that were taken out for that; keys: semaphores in which that left room. late: those mutex jobs that have to
-- come back in a moment, because another transaction holds its row.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._await_turns(p_ids bigint[], p_flags smallint[], out asked bigint[], out keys text[], out late bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_turn record;
  v_job record;
begin
  for v_turn in
    select k.key, m.id, array_agg(k.id) as mutex_ids
    from queue._keys_of(p_ids, p_flags) k
    cross join lateral (select m.id from queue.lock_member m where m.lock = substr(k.key, 2) and m.has_turn offset 0) m
    where p_flags[k.n] & 3 = 2 and left(k.key, 1) = 'm'
      and ((select v.flags & 2 from queue.live v where v.id = m.id) = 0 or (select w.flags & 2 from queue.waiting w where w.id = m.id) = 0)
    group by k.key, m.id
  loop
    delete from queue.waiting w where w.id = v_turn.id returning w.key, w.lane into v_job;
    if found then
      perform queue._unwait(v_job.key, v_job.lane);
      asked := asked || v_turn.id;
      continue;
    end if;
    select v.claim, v.lane, v.flags into v_job from queue.live v where v.id = v_turn.id for update skip locked;
    if not found then
      if exists (select from queue.live v where v.id = v_turn.id) then
        late := late || v_turn.mutex_ids;
      end if;
    elsif v_job.claim is not null then
      perform queue._set_slots(array[v_turn.key], array[1], array[v_turn.id]);
      perform queue._add_slots(array[v_turn.key], null, array[1], null, null, null);
      update queue.live v set flags = v.flags | 2 where v.id = v_turn.id;
    else
      delete from queue.live v where v.id = v_turn.id;
      if v_job.flags & 4 <> 0 then
        keys := keys || queue._unready(array[v_turn.id], array[v_job.lane], array[v_job.flags]);
      end if;
      asked := asked || v_turn.id;
    end if;
  end loop;
  insert into queue.waiting (id, reason, at, key)
  select k.id, 'slot', clock_timestamp() + interval '20 ms', k.key
  from queue._keys_of(p_ids, p_flags) k where k.id = any (late) and left(k.key, 1) = 'm';
end $$;

-- A retry changes a job's lock (empty: to none): it gives its turn away and joins the other lock, in the
-- mode that it was deferred with, and goes through the gates again.
-- Locks: the caller holds ADM; the job runs nowhere, and no other transaction knows its row of queue.live yet.
create or replace function queue._change_lock(p_id bigint, p_lock text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_keys text[];
  v_passed bigint[];
  v_joined record;
begin
  if p_lock = (select coalesce(s.lock, j.lock, '') from queue.job j join queue.job_state s on s.id = j.id where j.id = p_id) then
    return;
  end if;
  v_keys := (select t.keys from queue._take_out(p_id) t);
  v_passed := queue._leave_locks(array[p_id], false);  -- has_turn says whether it has it
  update queue.job_state s
  set lock = p_lock, extra_flags = s.extra_flags
    | case when p_lock = '' or j.flags & 3 <> 0 then 0 when j.options ->> 'lock_mode' = 'mutex' then 2 else 1 end
  from queue.job j where s.id = p_id and j.id = p_id;
  v_joined := queue._join_locks(array[p_id]);
  perform queue._advance(
    p_arrived => p_id || v_joined.displaced, p_turned => v_passed || v_joined.passed, p_keys => v_keys || v_joined.keys);
end $$;

-- What of check() concerns locks.
create or replace function queue._check_locks()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select 'member of a lock though finished'::text, m.id, m.lock
    from queue.lock_member m join queue.finished f on f.id = m.id
    where not exists (select from queue.handover h where h.job_id = m.id);
  return query
    select 'a lock that runs two jobs'::text, min(v.id), coalesce(s.lock, j.lock)
    from queue.live v join queue.job j on j.id = v.id left join queue.job_state s on s.id = v.id
    where v.claim is not null and coalesce(s.lock, j.lock) <> '' group by coalesce(s.lock, j.lock) having count(*) > 1;
  -- the turn of a mixed lock may be nobody's while its first member is a mutex job
  return query
    select case when x.turns > 1 then 'a lock with more than one job at its turn' else 'a free lock with a job that waits for its turn' end,
      x.first_id, x.lock
    from (
      select m.lock, min(m.id) as first_id, count(*) filter (where not m.is_mutex) as ordered, bool_or(m.is_mutex) as is_mixed,
        (array_agg(m.is_mutex order by m.id))[1] as mutex_is_first,
        count(*) filter (where not m.is_mutex and (m.has_turn or v.id is not null or w.reason = 'slot')) as turns,
        count(h.job_id) as unsettled
      from queue.lock_member m
      left join queue.live v on v.id = m.id
      left join queue.waiting w on w.id = m.id
      left join (select distinct h.job_id from queue.handover h where h.kind in ('ended', 'again')) h on h.job_id = m.id
      group by m.lock) x
    where x.turns > 1 or x.turns = 0 and x.ordered > 0 and not x.mutex_is_first and x.unsettled = 0;
end $$;
