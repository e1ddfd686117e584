-- Locks. queue.lock_member holds every unfinished job that has a lock; everything here runs under ADM.
--
-- ordered: the first member by id has the turn, and keeps it until it has ended, whatever it waits for.
-- The next is found by looking past the id of the one that ended, so that the dead rows before it cost
-- nothing. A job that is admitted after one with a greater id (its transaction committed late) is late:
-- it joins before those that wait, but never displaces the one that has the turn; is_late keeps it
-- findable until it has had its turn.
-- mutex: a member that never waits for its turn; it takes the semaphore 'm' || lock (33_semaphores.sql),
-- as ordered jobs of a lock with mutex members do. An ordered job waits for every older member.

-- Adds new jobs. The turn goes to the first of a lock that had no member.
create or replace function queue._join_locks(p_ids bigint[], p_high_id bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_mixed text[];
begin
  with joining as materialized (
    select j.id, j.lock, j.flags & 2 <> 0 as is_mutex, j.flags & (8 | 16 | 32) = 0 as is_passed,
      row_number() over (partition by j.lock order by j.id) as n
    from unnest(p_ids) u (id)
    cross join lateral (select j.id, j.flags | coalesce(s.extra_flags, 0) as flags, coalesce(s.lock, j.lock) as lock
                        from queue.job j left join queue.job_state s on s.id = j.id where j.id = u.id offset 0) j
    where j.flags & 3 <> 0 and j.lock <> ''),
  joined as (
    insert into queue.lock_member (lock, id, is_mutex, is_late, is_passed, has_turn)
    select x.lock, x.id, x.is_mutex, x.id <= p_high_id and not x.is_mutex and (x.n > 1 or o.lock is not null),
      x.is_passed, not x.is_mutex and x.n = 1 and o.lock is null
    from joining x
    left join lateral (select m.lock from queue.lock_member m where m.lock = x.lock order by m.id desc limit 1) o on true)
  select array_agg(distinct x.lock) filter (where x.is_mutex) into v_mixed from joining x;
  if v_mixed is not null then
    perform queue._mix_locks(v_mixed);
  end if;
end $$;

-- Of jobs that nothing but their lock can hold up, those that have the turn; the rest is marked.
create or replace function queue._wait_for_turn(p_ids bigint[], p_has_turn boolean)
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
  cross join lateral (select j.flags, coalesce(s.lock, j.lock) as lock from queue.job j left join queue.job_state s on s.id = j.id
                      where j.id = u.id offset 0) j
  left join lateral (select m.id, m.has_turn, m.is_passed from queue.lock_member m
                     where m.lock = j.lock and m.id = u.id and not m.is_mutex offset 0) m on true;
  if v_mark is not null then
    update queue.lock_member m set is_passed = true
    from (select j.id, coalesce(s.lock, j.lock) as lock from unnest(v_mark) u (id)
          cross join lateral (select j.id, j.lock from queue.job j where j.id = u.id offset 0) j
          left join queue.job_state s on s.id = j.id offset 0) x
    where m.lock = x.lock and m.id = x.id;
  end if;
  return v_pass;
end $$;

-- Notes that jobs which leave queue.live unfinished keep their turn.
create or replace function queue._keep_turns(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  update queue.lock_member m set has_turn = not m.is_mutex, is_late = false
  from (select j.id, coalesce(s.lock, j.lock) as lock from unnest(p_ids) u (id)
        cross join lateral (select j.id, j.lock from queue.job j where j.id = u.id offset 0) j
        left join queue.job_state s on s.id = j.id offset 0) x
  where m.lock = x.lock and m.id = x.id and (not m.has_turn or m.is_late);
end $$;

-- Takes ended jobs out of their locks and gives the turn to the next. p_had_turn: they had it.
create or replace function queue._leave_locks(p_ids bigint[], p_had_turn boolean)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_pass bigint[];
  v_wait bigint[];
  v_mixed text[];
begin
  with gone as (
    delete from queue.lock_member m
    where m.ctid = any (array(
      select m.ctid from unnest(p_ids) u (id)
      cross join lateral (select coalesce(s.lock, j.lock) as lock from queue.job j left join queue.job_state s on s.id = j.id
                          where j.id = u.id offset 0) j
      cross join lateral (select m.ctid from queue.lock_member m where m.lock = j.lock and m.id = u.id offset 0) m))
    returning m.lock, m.id, m.is_mutex, m.has_turn),
  next as materialized (
    select g.lock, n.id, n.is_passed, n.is_late, x.is_mixed
    from gone g
    cross join lateral (select exists (select from queue.lock_member m where m.lock = g.lock and m.is_mutex) or g.is_mutex as is_mixed) x
    left join lateral (
      select m.id, m.is_passed, m.is_late from (
        (select m.id, m.is_passed, m.is_late from queue.lock_member m where m.lock = g.lock and m.id > g.id order by m.id limit 1)
        union all
        (select m.id, m.is_passed, m.is_late from queue.lock_member m where m.lock = g.lock and m.is_late and m.id <> g.id order by m.id limit 1)) m
      order by m.id limit 1) n on true
    where p_had_turn or g.has_turn or x.is_mixed)
  select array_agg(n.id order by n.id) filter (where not n.is_mixed and n.is_passed),
    array_agg(n.id) filter (where not n.is_mixed and (n.is_late or not n.is_passed)),
    array_agg(distinct n.lock) filter (where n.is_mixed)
  into v_pass, v_wait, v_mixed
  from next n;
  if v_wait is not null then
    perform queue._keep_turns(v_wait);
  end if;
  if v_mixed is not null then
    v_pass := v_pass || queue._next_mixed(v_mixed);
  end if;
  if v_pass is not null then
    perform queue._to_slots(v_pass);
  end if;
end $$;

-- Locks that have ordered and mutex members: the turn is always written down.
-- Marks who has it when the first mutex member joins, and moves that job, if it is ready, to where the
-- semaphore 'm' || lock is asked; if it runs, it is counted there.
create or replace function queue._mix_locks(p_locks text[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_member record;
begin
  for v_member in
    select h.lock, h.id
    from unnest(p_locks) u (lock)
    cross join lateral (select m.lock, m.id, m.is_mutex, m.has_turn from queue.lock_member m
                        where m.lock = u.lock and not m.is_late order by m.id limit 1) h
    where not h.is_mutex
  loop
    update queue.lock_member m set has_turn = true where m.lock = v_member.lock and m.id = v_member.id and not m.has_turn;
    if exists (select from queue.live v join queue.lane l on l.lane = v.lane where v.id = v_member.id and l.kind = 0) then
      delete from queue.live v
      where v.id = (select w.id from queue.live w where w.id = v_member.id and w.claim is null for update skip locked);
      if found then
        perform queue._to_slots(array[v_member.id]);
      else
        perform queue._count_running_ordered(v_member.lock, v_member.id);
      end if;
    end if;
  end loop;
end $$;

-- The ordered jobs that get the turn of locks with mutex members, those that can go on at once.
create or replace function queue._next_mixed(p_locks text[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_pass bigint[];
begin
  with next as materialized (
    select f.lock, f.id, f.is_passed
    from unnest(p_locks) u (lock)
    cross join lateral (select m.lock, m.id, m.is_mutex, m.is_passed from queue.lock_member m where m.lock = u.lock order by m.id limit 1) f
    where not f.is_mutex
      and not exists (select from queue.lock_member m where m.lock = u.lock and m.has_turn)),
  turned as (
    update queue.lock_member m set has_turn = true, is_late = false from next n where m.lock = n.lock and m.id = n.id)
  select array_agg(n.id order by n.id) filter (where n.is_passed) into v_pass from next n;
  return v_pass;
end $$;

-- A retry changes a job's lock (empty: to none): it gives its turn away and joins the other lock, in the
-- mode that it has.
create or replace function queue._change_lock(p_id bigint, p_lock text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  perform queue._leave_locks(array[p_id], true);
  update queue.job_state s
  set lock = p_lock, extra_flags = s.extra_flags | case when p_lock <> '' and j.flags & 3 = 0 then 1 else 0 end
  from queue.job j where s.id = p_id and j.id = p_id;
  perform queue._join_locks(array[p_id], (select k.high_lock_id from queue.cursor k order by k.tick desc limit 1));
end $$;
