-- The line of sleepers: of the sleeping workers that serve the same queues, a notification wakes only the
-- first.
--
-- A worker that asks for it (before_sleep's option in_line) stands in the line by a row in queue.sleeper.
-- Workers that run no jobs come before those that do, and then place decides. The first fetches at once when
-- it is notified. The second, the deputy, fetches 80 ms later: if the first is dead or frozen, the deputy
-- finds the job, and both leave the line. The rest do not listen for jobs. A worker that leaves the line
-- wakes the next two, by a message to each ('sleep' on its own channel). A worker that gets no job now,
-- because of a quarantine, stands in no line. No decision about a job depends on a place: if two workers both
-- take themselves for the first, that costs a fetch.
-- Two sessions: work/line.races.spec.

-- Joins the line, or keeps its place. Returns how many workers are ahead: at most 60, and at most 1 in the
-- first 100 ms.
-- Locks: its own row; rows of sessions that have gone, by skip locked.
-- Why no wake-up is lost: see _leave_line.
create or replace function queue._join_line(p_worker bigint, p_queues text[], p_options jsonb)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_queues text[] := p_queues;
  v_served bigint;
  v_is_busy boolean := p_options -> 'busy' is not distinct from 'true';
  v_own record;
  v_ahead record;
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    return 0;  -- an old snapshot would not show who comes and goes
  end if;
  if cardinality(p_queues) > 1 then
    v_queues := array(select distinct q from unnest(p_queues) q order by q);
  end if;
  v_served := hashtextextended(format('%s %s', p_options - 'busy', v_queues), 0);
  select s.place, s.is_busy, s.joined_at < clock_timestamp() - interval '100 ms' as may_rest into v_own
  from queue.sleeper s where s.worker_id = p_worker and s.served = v_served and s.pid = pg_backend_pid();
  if v_own.is_busy and not v_is_busy then
    update queue.sleeper s set is_busy = false where s.worker_id = p_worker;
    v_own.is_busy := false;
  elsif v_own.place is null or v_own.is_busy <> v_is_busy then
    perform queue._leave_line(p_worker, false);
    insert into queue.sleeper as s (worker_id, is_busy, served, pid)
    values (p_worker, v_is_busy, v_served, pg_backend_pid())
    on conflict on constraint sleeper_pkey do nothing
    returning s.place, s.is_busy, false as may_rest into v_own;
    if not found then
      return 0;  -- another session is deleting its row
    end if;
  end if;
  loop
    select count(*)::integer as n,
      array_agg(s.worker_id) filter (where s.nth < 3 and not queue._is_asleep(s.worker_id, s.pid)) as gone
    into v_ahead
    from (
      select s.worker_id, s.pid, row_number() over (order by s.is_busy, s.place) as nth from queue.sleeper s
      where s.served = v_served and (s.is_busy, s.place) < (v_own.is_busy, v_own.place)
      order by s.is_busy, s.place limit 60) s;
    exit when v_ahead.gone is null;
    delete from queue.sleeper s
    where s.worker_id in (select d.worker_id from queue.sleeper d where d.worker_id = any (v_ahead.gone)
      for update skip locked);
    if not found then
      v_own.may_rest := false;  -- another session is deleting them
      exit;
    end if;
  end loop;
  return case when v_own.may_rest then v_ahead.n else least(v_ahead.n, 1) end;
end $$;

-- Leaves the line, and wakes the two who come next. p_has_found: if it is the deputy, it has found a job that
-- the first did not take; so the first leaves, too.
-- Locks: the rows of both, by skip locked; another session deletes those that it has locked.
-- Why no wake-up is lost: a worker stops listening for jobs only if a call sees two ahead of it, and an
-- earlier call, at least 100 ms before, has written its row. Suppose that one of these two leaves. If its
-- transaction commits before the later call, that call does not count it. Otherwise, if its transaction takes
-- less than 100 ms, it began after the row became visible: it sees the row, and wakes that worker, which
-- listens on its own channel by then. One that leaves in a longer transaction is like a frozen one: the
-- deputy takes its place. If the first two die or freeze together, the third looks every 2 s, the others
-- every 10 to 30 s, each at its own time. Then before_sleep passes over sessions that have ended and workers
-- that reap has given up.
create or replace function queue._leave_line(p_worker bigint, p_has_found boolean)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_own record;
  v_ahead bigint[];
begin
  select s.is_busy, s.place, s.served into v_own from queue.sleeper s where s.worker_id = p_worker;
  if not found then
    return;
  end if;
  v_ahead := array(
    select s.worker_id from queue.sleeper s
    where s.served = v_own.served and (s.is_busy, s.place) < (v_own.is_busy, v_own.place)
    order by s.is_busy, s.place limit 2);
  delete from queue.sleeper s
  where s.worker_id in (
    select d.worker_id from queue.sleeper d
    where d.worker_id = p_worker or p_has_found and cardinality(v_ahead) = 1 and d.worker_id = v_ahead[1]
    for update skip locked);
  if cardinality(v_ahead) < 2 and queue._may_notify() then
    perform pg_notify('pgdefer_worker_' || n.worker_id, 'sleep')
    from (
      select d.worker_id
      from (select s.worker_id, s.pid, s.is_busy, s.place from queue.sleeper s
        where s.served = v_own.served and s.worker_id <> p_worker order by s.is_busy, s.place limit 10) d
      where queue._is_asleep(d.worker_id, d.pid)
      order by d.is_busy, d.place limit 2) n;
  end if;
end $$;

-- Whether a row of the line is that of a worker that lives, in a session that does.
create or replace function queue._is_asleep(p_worker bigint, p_pid integer)
returns boolean language plpgsql stable parallel restricted security invoker as $$
begin
  return exists (select from pg_stat_get_activity(p_pid) a where a.pid is not null)
    and exists (select from queue.worker w where w.id = p_worker and w.gone_at is null);
end $$;
