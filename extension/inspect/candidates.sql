-- The jobs that a search may find: by an index if there is one.
-- Tests: inspect/search.sql.

-- The newest jobs below an id that may be in a state (NULL: any), newest first. It reads the table of jobs in
-- that state, and jobs that are not admitted yet.
create or replace function queue._candidates(p_state text, p_before bigint, p_n integer)
returns bigint[] language plpgsql stable parallel safe security invoker as $$
declare
  v_reason text := case p_state when 'ready' then 'task_paused' when 'waiting' then 'needs' else p_state end;
begin
  case
    when p_state is null then
      return array(select j.id from queue.job j where j.id < p_before order by j.id desc limit p_n);
    when p_state = 'failed' then
      return array(select f.id from queue.finished f where f.state = 'failed' and f.id < p_before
        order by f.id desc limit p_n);
    when p_state = 'cancelled' then
      return array(select f.id from queue.finished f where f.state = 'cancelled' and f.id < p_before
        order by f.id desc limit p_n);
    when p_state = 'succeeded' then
      return array(select f.id from queue.finished f where f.state = 'succeeded' and f.id < p_before
        order by f.id desc limit p_n);
    when p_state = 'running' then
      return queue._running(p_before, p_n);
    when p_state = 'blocked' then
      return queue._blocked(p_before, p_n);
    else null;
  end case;
  return array(
    select c.id
    from (
      (select aj.id from queue.active_job aj
        where p_state = 'ready' and aj.claim is null and aj.id < p_before order by aj.id desc limit p_n)
      union
      (select w.id from queue.waiting w where p_state = 'scheduled' and w.reason = 'schedule'
        and w.id < p_before order by w.id desc limit p_n)
      union
      (select w.id from queue.waiting w
       where w.reason = v_reason and w.id < p_before
         and w.reason in ('held', 'upstream_failed', 'needs', 'signal', 'task_paused')
       order by w.reason desc, w.id desc limit p_n)
      union
      (select w.id from queue.waiting w
       where p_state = 'waiting' and w.reason = 'signal' and w.id < p_before order by w.id desc limit p_n)
      union
      (select h.job_id from queue.unsettled h
        where (h.kind = 'again' or h.kind = 'replace' and p_state in ('ready', 'scheduled', 'waiting'))
          and h.job_id < p_before
        order by h.job_id desc limit p_n)
      union
      select u.id from unnest(queue._unadmitted(p_state, p_before, p_n)) u (id)) c
    order by c.id desc limit p_n);
end $$;

-- The newest blocked jobs below an id. Members of locks can't be read by id; if there are many, enough of
-- them are among the newest jobs.
create or replace function queue._blocked(p_before bigint, p_n integer)
returns bigint[] language plpgsql stable parallel safe security invoker as $$
declare
  v_ids bigint[];
begin
  v_ids := array(
    select j.id
    -- This does not use job_now, which would look each of them up in the log again.
    from (select j.id, j.lock from queue.job j where j.id < p_before order by j.id desc limit 20000) j
    left join lateral (select s.lock from queue.job_override s where s.id = j.id offset 0) s on true
    left join lateral (
      select m.id from queue.lock_member m
      where m.lock = coalesce(s.lock, j.lock) and m.id = j.id and m.is_passed offset 0) m on true
    left join lateral (select w.reason from queue.waiting w where w.id = j.id offset 0) w on true
    where w.reason in ('slot', 'parked', 'moving') or w.reason is null and m.id is not null
      and not exists (select from queue.active_job aj where aj.id = j.id)
      and not exists (select from queue.finished f where f.id = j.id)
    order by j.id desc limit p_n);
  if cardinality(v_ids) = p_n then
    return v_ids;
  end if;
  return array(
    select c.id
    from (
      (select w.id from queue.waiting w
        where w.reason = 'slot' and w.id < p_before order by w.id desc limit p_n)
      union
      (select w.id from queue.waiting w
        where w.reason = 'parked' and w.id < p_before order by w.id desc limit p_n)
      union
      (select w.id from queue.waiting w
        where w.reason = 'moving' and w.id < p_before order by w.id desc limit p_n)
      union
      (select m.id from queue.lock_member m
       where m.is_passed and m.id < p_before
         and not exists (select from queue.waiting w where w.id = m.id)
         and not exists (select from queue.active_job aj where aj.id = m.id)
         and not exists (select from queue.finished f where f.id = m.id)
       order by m.id desc limit p_n)) c
    order by c.id desc limit p_n);
end $$;

-- The newest running jobs below an id. Their only index is that of all ready and running jobs, because
-- another one would make each claim cost more.
create or replace function queue._running(p_before bigint, p_n integer)
returns bigint[] language plpgsql stable parallel safe security invoker as $$
declare
  v_ids bigint[];
begin
  -- If there are many, enough of them are among the newest.
  v_ids := array(
    select aj.id
    from (select aj.id, aj.claim from queue.active_job aj where aj.id < p_before
      order by aj.id desc limit 20000) aj
    where aj.claim is not null
    order by aj.id desc limit p_n);
  return case when cardinality(v_ids) = p_n then v_ids else queue._all_running(p_before, p_n) end;
end $$;

-- The newest running jobs below an id, by reading the whole table in its own order: a million ready jobs take
-- half the time that they take by id.
create or replace function queue._all_running(p_before bigint, p_n integer)
returns bigint[] language plpgsql stable parallel safe security invoker
set enable_seqscan = on set enable_indexscan = off as $$
begin
  return array(select aj.id from queue.active_job aj where aj.claim is not null and aj.id < p_before
    order by aj.id desc limit p_n);
end $$;

-- The newest jobs below an id that have not been admitted and may be in a state.
create or replace function queue._unadmitted(p_state text, p_before bigint, p_n integer)
returns bigint[] language plpgsql stable parallel safe security invoker as $$
declare
  v_found record;
  v_ids bigint[];
begin
  -- They can't be read by id. If there are many, enough of them are among the newest jobs.
  if (select count(*) from (select from queue.unadmitted a limit 1001) a) > 1000 then
    select k.next_xid, k.in_flight into v_found from queue.cursor_now k;
    v_ids := array(
      select j.id
      from (select j.id, j.xid, j.flags, j.scheduled_at, j.needs from queue.job j where j.id < p_before
        order by j.id desc limit 20000) j
      where queue._may_be_in_state(p_state, j.id, j.flags, j.scheduled_at, j.needs)
        and (j.xid >= v_found.next_xid or j.xid = any (v_found.in_flight)
             or (select true from queue.backlog b where (j.xid, j.id) > (b.from_xid, b.from_id)
               and j.xid <= b.to_xid limit 1)
             or (select true from queue.backlog_part b
                 where (j.xid, j.id) > (b.from_xid, b.from_id)
                   and (j.xid, j.id) <= (b.to_xid, b.to_id) limit 1))
      order by j.id desc limit p_n);
    if cardinality(v_ids) = p_n then
      return v_ids;
    end if;
  end if;
  return array(
    select a.id
    from (select a.id, a.flags, a.scheduled_at, a.needs from queue.unadmitted a offset 0) a
    where a.id < p_before and queue._may_be_in_state(p_state, a.id, a.flags, a.scheduled_at, a.needs)
    order by a.id desc limit p_n);
end $$;

-- Whether a job that is not admitted yet may be in a state. A replacement may have put it into another state
-- than the one it was deferred in.
create or replace function queue._may_be_in_state(p_state text, p_id bigint, p_flags smallint,
  p_scheduled_at timestamptz, p_needs bigint[])
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return p_state = case when p_flags & {{held}} <> 0 then 'held'
    when p_scheduled_at > statement_timestamp() then 'scheduled'
                        when p_needs is not null then 'waiting' else 'ready' end
    or p_state <> 'upstream_failed' and exists (select from queue.job_override s where s.id = p_id);
end $$;
