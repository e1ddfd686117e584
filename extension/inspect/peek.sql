-- Peeking: the jobs that a fetch would give next.
-- It looks past 1,000 ready jobs of a lane whose key or lock is full, and so stays cheap if there are more.
-- Tests: inspect/why.sql, inspect/peek.sql.

create or replace function queue.peek(queues text[] default null, n integer default 10)
returns table (id bigint, task text, args jsonb, queue text, priority integer, lock text, attempts integer,
  scheduled_at timestamptz, deadline timestamptz)
language plpgsql stable parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_hidden jsonb;
begin
  perform queue._check_are_few(peek.queues);
  perform queue._check_asked(peek.queues);
  {{if_restricted}}
    queues := queue._narrow_queues('{worker,operator,reader}', queues);
  end if;
  if peek.n is null or peek.n < 1 then
    perform queue._invalid('n must be at least 1', 'Pass how many jobs to show.');
  end if;
  v_hidden := queue._hidden_paths();
  return query
    with admitted as (
      -- The lanes of a queue and priority count as one.
      select c.id, g.queue, g.priority, c.deadline
      from (
        select l.queue, l.priority, array_agg(l.lane) as lanes, array_agg(l.low_deadline) as deadlines,
          array_agg(l.low_id) as ids
        from queue.lane l
        where not l.is_idle and (l.paused_until is null or l.paused_until <= clock_timestamp())
          and (peek.queues is null or exists (select from unnest(peek.queues) q
            where queue._matches(l.queue, q)))
          and (l.kind = {{lane_plain}} or not queue._is_queue_full(l.queue))
        group by l.queue, l.priority) g
      cross join lateral (
        select aj.id, aj.deadline
        from unnest(g.lanes, g.deadlines, g.ids) l (lane, deadline, id)
        cross join lateral (
          select aj.id, aj.deadline
          from (
            select aj.id, aj.deadline, aj.flags from queue.active_job aj
            where aj.lane = l.lane and (aj.deadline, aj.id) >= (l.deadline, l.id) and aj.claim is null
            order by aj.deadline, aj.id limit peek.n::bigint + 1000) aj
          where aj.flags & {{slots}} = 0 or queue._why_no_slot_left(aj.id) is null
          order by aj.deadline, aj.id limit peek.n) aj
        order by aj.deadline, aj.id limit peek.n) c),
    fresh as (
      select a.id, a.queue, a.priority, a.deadline
      from (
        select a.id, a.queue, a.priority, coalesce(a.deadline, 'infinity') as deadline,
          row_number() over (partition by a.queue, a.priority
            order by coalesce(a.deadline, 'infinity'), a.id) as place
        from queue.unadmitted a
        where a.flags & {{held}} = 0 and a.needs is null
          and coalesce(a.scheduled_at <= clock_timestamp(), true)
          and (a.lock is null or not exists (select from queue.lock_member m where m.lock = a.lock))
          and (peek.queues is null or exists (select from unnest(peek.queues) q
            where queue._matches(a.queue, q)))
          and coalesce(queue._paused_until(a.queue) <= clock_timestamp(), true)
          and (not exists (select from queue.pause p where p.task is not null)
            or coalesce(queue._task_paused_until(a.task, a.queue) <= clock_timestamp(), true))) a
      where a.place <= peek.n),
    placed as (
      select c.id, c.queue, c.priority, c.deadline,
        first_value(c.id) over (partition by c.queue, c.priority order by c.deadline, c.id) as first_id,
        row_number() over (partition by c.queue order by c.priority desc, c.deadline, c.id) as place
      from (select * from admitted union all select * from fresh union all
            select * from queue._ready_again(peek.queues)) c),
    room as (
      select q.queue, queue._queue_room(q.queue, peek.n, clock_timestamp()) as jobs
      from queue.queue_config q offset 0)
    select j.id, j.task, queue._mask_args(v_hidden -> j.task, j.args), j.queue,
      j.priority, j.lock, j.attempts, j.scheduled_at, j.deadline
    from (
      select p.id, p.priority, p.deadline, p.first_id
      from placed p left join room r on r.queue = p.queue
      where coalesce(p.place <= r.jobs, true)
      order by p.priority desc, p.first_id, p.deadline, p.id limit peek.n) c
    cross join lateral (select j.* from queue.all_jobs j where j.id = c.id offset 0) j
    order by c.priority desc, c.first_id, c.deadline, c.id;
end $$;
comment on function queue.peek(text[], integer) is
  'Returns the jobs that fetch would claim next, in order. Changes nothing. It is an estimate: it leaves'
    ' out ready jobs whose key or lock is full now, but shows some that a fetch will find to wait for a key,'
    ' a lock in mode mutex, or other shares. It may leave out a job that waits for a key behind a ready job'
    ' which another full key stops, and some jobs of a queue at its limit whose jobs have just ended.'
    ' Sensitive args read *** for all but the owner.';

-- Ready jobs whose last claim has ended, and that are not admitted again yet: at most 100 of them.
create or replace function queue._ready_again(p_queues text[])
returns table (id bigint, queue text, priority integer, deadline timestamptz)
language plpgsql stable parallel safe security invoker as $$
begin
  return query
    select j.id, j.queue, j.priority, coalesce(j.deadline, 'infinity')
    from (select distinct h.job_id from queue.unsettled h where h.kind = 'again' limit 100) h
    cross join lateral (select j.* from queue.all_jobs j where j.id = h.job_id offset 0) j
    where j.state = 'ready' and j.reason is null
      and not exists (select from queue.active_job aj where aj.id = j.id)
      and (exists (select from queue.lock_member m where m.lock = j.lock and m.id = j.id)
           or not exists (select from queue.lock_member m where m.lock = j.lock))
      and (p_queues is null or exists (select from unnest(p_queues) q where queue._matches(j.queue, q)));
end $$;
