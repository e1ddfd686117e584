-- Locks: who has the turn. queue.lock_member holds every unfinished job that has a lock. Everything here runs
-- under the admission lock. join_locks.sql shows that some member always has the turn.
--
-- ordered: the first member by id has the turn, and keeps it until it has ended, even while it waits. The
-- search for the next member starts after the id of the one that ended, so that dead rows before it cost
-- nothing. Two searches have no id to start after, and read all dead rows of a lock. _join_locks looks for
-- the last member, once in each admission that finds the lock empty. _next_mixed looks for the first member
-- of a mixed lock whenever a member ends.
-- A job is late if it joins when a member with a greater id exists: its transaction committed late, it is
-- retried, or the other took the lock on a retry. It comes before the members that wait, and takes the turn
-- of a younger one unless that one runs (_give_turn_to_older). is_late lets searches find it until it has had
-- its turn.
-- mutex: a member that never waits for its turn. It takes the semaphore 'm' || lock (admit/slots.sql). So do
-- ordered jobs of a mixed lock, which is a lock with mutex members. An ordered job waits for every older
-- member, so in a mixed lock only the first of all members can have the turn.
-- A subquery with limit 1 finds out whether a lock is mixed, because an EXISTS may be planned as a hash of
-- all mutex members of all locks.
-- In a mixed lock has_turn says which ordered job has the turn. In other locks it is written only if the
-- job's place does not show it: a job in queue.active_job has the turn.
-- job's place does not show it: a job in queue.active_job has the turn.

-- Takes jobs that only their lock holds up. Returns those that have the turn, and marks the others as passed.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: _leave_locks sends a passed member on
-- when its turn comes.
create or replace function queue._wait_for_turn(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_pass bigint[];
  v_mark bigint[];
begin
  select array_agg(u.id order by u.id) filter (where m.id is null or m.has_turn),
    array_agg(u.id) filter (where not m.has_turn and not m.is_passed)
  into v_pass, v_mark
  from unnest(p_ids) u (id)
  cross join lateral (
    select j.lock from queue.job_now j where j.id = u.id offset 0) j
  left join lateral (
    select m.id, m.has_turn, m.is_passed
    from queue.lock_member m
    where m.lock = j.lock and m.id = u.id and not m.is_mutex offset 0) m on true;
  if v_mark is not null then
    update queue.lock_member m set is_passed = true where m.ctid = any (queue._members(v_mark));
  end if;
  return v_pass;
end $$;

-- Records that jobs which leave queue.active_job unfinished keep their turn.
create or replace function queue._keep_turns(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.lock_member m set has_turn = true, is_late = false
  where m.ctid = any (queue._members(p_ids)) and not m.is_mutex and (not m.has_turn or m.is_late);
end $$;

-- Removes ended jobs from their locks and gives the turn to the next. p_had_turn: the ended jobs had it.
-- Returns the jobs that have the turn now, and that nothing else holds up.
-- Locks: the caller holds the admission lock. Other members may have ended at the same time: these are in
-- queue.finished, and are skipped.
-- Why no wake-up is lost: each caller passes the returned jobs to _advance, which sends them on.
create or replace function queue._leave_locks(p_ids bigint[], p_had_turn boolean)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
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
  -- offset 0 and the conditions inside: this looks for the next of a lock once, from the one that had the
  -- turn.
  turned as materialized (
    select g.lock, g.id, x.is_mixed
    from gone g
    cross join lateral (
      select g.is_mutex or (select m.id from queue.lock_member m
        where m.lock = g.lock and m.is_mutex limit 1) is not null as is_mixed offset 0) x
    where p_had_turn or g.has_turn or x.is_mixed),
  next as materialized (
    select t.lock, n.id, n.is_passed, n.is_late, t.is_mixed, case when l.id < n.id
      or n.id is null then l.id end as late_id
    from turned t
    left join lateral (
      select m.id from queue.lock_member m
      where not t.is_mixed and m.lock = t.lock and m.is_late and m.id <> t.id
        and (select f.id from queue.finished f where f.id = m.id) is null
      order by m.id limit 1) l on true
    left join lateral (
      select m.id, m.is_passed, m.is_late from queue.lock_member m
      where not t.is_mixed and m.lock = t.lock and m.id > t.id
        and (select f.id from queue.finished f where f.id = m.id) is null
      order by m.id limit 1) n on true)
  select array_agg(n.id) filter (where n.is_passed and n.late_id is null),
    array_agg(n.id) filter (where (n.is_late or not n.is_passed) and n.late_id is null),
    array_agg(n.lock) filter (where n.is_mixed), array_agg(n.lock) filter (where n.late_id is not null),
    array_agg(n.late_id) filter (where n.late_id is not null)
  into v_pass, v_wait, v_mixed, v_late_locks, v_late_ids
  from next n;
  if v_late_ids is not null then
    v_wait := v_wait || v_late_ids;
    v_pass := v_pass || array(
      select u.id from unnest(v_late_locks, v_late_ids) u (lock, id)
      cross join lateral (select m.is_passed from queue.lock_member m
        where m.lock = u.lock and m.id = u.id offset 0) m where m.is_passed);
  end if;
  if v_wait is not null then
    perform queue._keep_turns(v_wait);
  end if;
  if v_mixed is not null then
    v_pass := v_pass || queue._next_mixed(array(select distinct u.lock from unnest(v_mixed) u (lock)));
  end if;
  return v_pass;
end $$;

-- In mixed locks where no job has the turn, gives it to the first member if that is an ordered job. Returns
-- those that can proceed at once.
create or replace function queue._next_mixed(p_locks text[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_pass bigint[];
begin
  with next as materialized (
    select f.ctid, f.id, f.is_passed
    from unnest(p_locks) u (lock)
    cross join lateral (
      select m.ctid, m.id, m.is_mutex, m.is_passed
      from queue.lock_member m
      where m.lock = u.lock
      order by m.id limit 1) f
    where not f.is_mutex
      and (select m.lock from queue.lock_member m where m.lock = u.lock and m.has_turn limit 1) is null),
  turned as (
    update queue.lock_member m set has_turn = true, is_late = false
    where m.ctid = any (array(select n.ctid from next n)))
  select array_agg(n.id order by n.id) filter (where n.is_passed) into v_pass from next n;
  return v_pass;
end $$;

-- The ctids of jobs' rows in queue.lock_member. With these the planner can read the rows only in one way.
-- Locks: none; the caller holds the admission lock, so that the rows do not move meanwhile.
create or replace function queue._members(p_ids bigint[])
returns tid[] language plpgsql stable parallel safe security invoker as $$
begin
  return array(
    select m.ctid from unnest(p_ids) u (id)
    cross join lateral (
      select j.lock from queue.job_now j where j.id = u.id offset 0) j
    cross join lateral (select m.ctid from queue.lock_member m
      where m.lock = j.lock and m.id = u.id offset 0) m);
end $$;

-- The current locks of jobs.
create or replace function queue._locks_of(p_ids bigint[])
returns text[] language plpgsql stable parallel safe security invoker as $$
begin
  return array(
    select distinct j.lock from unnest(p_ids) u (id)
    cross join lateral (select j.lock from queue.job_now j where j.id = u.id offset 0) j
    where j.lock is not null);
end $$;

-- The invariants of locks, for queue.check().
create or replace function queue._check_locks()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'finished, but still a member of a lock'::text, m.id, m.lock
    from queue.lock_member m join queue.finished f on f.id = m.id
    where not exists (select from queue.pending_settlement h where h.job_id = m.id);
  return query
    select 'a lock that runs two jobs'::text, min(aj.id), j.lock
    from queue.active_job aj join queue.job_now j on j.id = aj.id
    where aj.claim is not null and j.lock is not null group by j.lock having count(*) > 1;
  -- No job may have the turn of a mixed lock while its first member is a mutex job.
  return query
    select case when x.turns > 1 then 'a lock with more than one job at its turn'
      else 'a free lock with a job that waits for its turn' end,
      x.first_id, x.lock
    from (
      select m.lock, min(m.id) as first_id, count(*) filter (where not m.is_mutex) as ordered,
        bool_or(m.is_mutex) as is_mixed,
        (array_agg(m.is_mutex order by m.id))[1] as mutex_is_first,
        count(*) filter (where not m.is_mutex and (m.has_turn or aj.id is not null or w.reason = 'slot'))
          as turns,
        count(h.job_id) as unsettled
      from queue.lock_member m
      left join queue.active_job aj on aj.id = m.id
      left join queue.waiting w on w.id = m.id
      left join (select distinct h.job_id from queue.pending_settlement h
        where h.kind in ('ended', 'again')) h on h.job_id = m.id
      group by m.lock) x
    where x.turns > 1 or x.turns = 0 and x.ordered > 0 and not x.mutex_is_first and x.unsettled = 0;
end $$;
