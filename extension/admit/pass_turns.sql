-- The common case of locks, in one statement: nothing but their turn counts for the next jobs.
-- Tests: admit/pass_turns.sql; compared with the general way, in tests/py/races/test_fast_paths.py. Two
-- sessions: admit/locks.late_defer.spec.

-- Claims of jobs with ordered locks have ended. Removes the jobs from their locks and makes the next ones
-- ready, as _leave_locks and _enter_slots do together. Returns whether it did; if not, nothing has changed.
-- It does so if no lock is mixed or has a late member. The next jobs must wait for nothing but their turn,
-- must not have started or been changed before, and must go to one lane, which exists and has no shares. With
-- p_unless_news it looks at nothing if there may be jobs that are not admitted yet (_has_news).
-- Locks: the caller holds the admission lock, so that the rows do not move meanwhile.
-- Why no wake-up is lost: in each lock the first member that has not ended becomes ready.
-- One statement, because set-up is most of what a statement costs (ADR 1).
create or replace function queue._pass_turns_on(p_ids bigint[], p_unless_news boolean default false)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_high_need_id bigint := coalesce(pg_sequence_last_value('queue.needed_seq'), 0);
  v_next record;
begin
  with next as materialized (
    select g.tid, n.id, n.deadline, n.flags, n.queue, n.priority,
      -- If the job has no row, it has got another lock since.
      (g.tid is not null and (n.id is null or n.is_simple)
        and (select m.id from queue.lock_member m where m.lock = j.lock and m.is_mutex limit 1) is null
        and (select m.id from queue.lock_member m where m.lock = j.lock and m.is_late limit 1) is null)
        is true as is_simple
    from unnest(p_ids) u (id)
    cross join lateral (select j.lock from queue.job j where j.id = u.id offset 0) j
    left join lateral (select m.ctid as tid from queue.lock_member m
      where m.lock = j.lock and m.id = u.id offset 0) g on true
    left join lateral (
      select m.id, k.queue, k.priority, coalesce(k.deadline, 'infinity') as deadline,
        k.flags & ({{ordered}} | {{lease}} | {{retain}} | {{needed}} | {{large}})
          | case when m.id <= v_high_need_id and (select d.job_id from queue.need d
            where d.need_id = m.id limit 1) is not null then {{needed}} else 0 end as flags,
        m.is_passed and k.options ? 'share' is not true
          and k.flags & ({{mutex}} | {{keys}} | {{needs}} | {{expires}} | {{queueing_lock}}) = 0
          and (select f.id from queue.finished f where f.id = m.id) is null
          and (select s.id from queue.job_override s where s.id = m.id) is null as is_simple
      from (
        select m.id, m.is_passed from queue.lock_member m
        where m.lock = j.lock and m.id > u.id
        order by m.id limit 1) m
      cross join lateral (
        select k.queue, k.priority, k.flags, k.deadline, k.options
        from queue.job k where k.id = m.id offset 0) k) n on true
    where (p_unless_news and (select {{has_news}} from queue.cursor_now k)) is not true),
  place as materialized (
    select a.tids, a.id, a.deadline, l.lane, l.extra_flags,
      l.is_idle or (a.deadline, a.id) < (l.low_deadline, l.low_id) as is_low,
      a.are_simple and (a.id is null or l.lane is not null and l.tag_base is null) as are_simple
    from (
      select array_agg(n.tid) as tids, min(n.id) as id, min(n.deadline) as deadline, min(n.queue) as queue,
        min(n.priority) as priority,
        bool_and(n.is_simple)
          and (min(n.queue) = max(n.queue) and min(n.priority) = max(n.priority)) is not false as are_simple
      from next n) a
    left join lateral (
      select l.lane, l.extra_flags, l.is_idle, l.low_deadline, l.low_id, l.tag_base
      from queue.lane l
      -- A queue with a limit has no such lane.
      where l.queue = a.queue and l.priority = a.priority and l.kind = {{lane_plain}} limit 1) l on true),
  gone as (
    delete from queue.lock_member m
    where m.ctid = any ((select p.tids from place p where p.are_simple)::tid[])),
  ready as (
    insert into queue.active_job (id, deadline, lane, attempt, flags)
    select n.id, n.deadline, p.lane, 0, (n.flags | p.extra_flags)::smallint
    from place p cross join next n
    where p.are_simple and n.id is not null)
  select p.are_simple, p.is_low, p.lane, p.id, p.deadline into v_next from place p;
  if v_next.are_simple and v_next.is_low then
    perform queue._lower_marks(array[v_next.lane], array[v_next.deadline], array[v_next.id]);
  end if;
  return coalesce(v_next.are_simple, false);
end $$;
