-- Names of queues and patterns, and the queues that are paused.
-- Tests: operate/pause.sql, work/fetch.sql.

-- Whether a queue's name is selected by a name, prefix* or *.
create or replace function queue._matches(p_queue text, p_pattern text)
returns boolean language plpgsql immutable parallel safe security invoker as $$
begin
  return p_queue = p_pattern or right(p_pattern, 1) = '*' and starts_with(p_queue, left(p_pattern, -1));
end $$;

-- Raises: 22023 unless it is a list of names and patterns, or NULL. If * is among them, nothing else is
-- checked.
create or replace function queue._check_asked(p_queues text[])
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if '*' = any (p_queues) is not true and (p_queues = '{}' or array_ndims(p_queues) > 1
    or array_position(p_queues, null) is not null or '' = any (p_queues)) then
    perform queue._invalid('queues is empty or contains NULL',
      'Name queues, prefix* patterns or *; pass NULL for all.');
  end if;
end $$;

-- The queues that a list of names and patterns selects among those that may have ready jobs; NULL means all.
-- Raises: 22023.
create or replace function queue._match_queues(p_queues text[])
returns text[] language plpgsql stable parallel safe security invoker as $$
begin
  if '*' = any (p_queues) then
    return null;
  end if;
  perform queue._check_asked(p_queues);
  if not exists (select from unnest(p_queues) q where right(q, 1) = '*') then
    return p_queues;
  end if;
  return array(select distinct p.queue from queue._places_of(p_queues, false) p);
end $$;

-- The lanes of queues that a list of names and patterns selects (NULL: all). place: the position of the first
-- entry that selects the lane. p_idle: also lanes without ready jobs. Others wait for the admission lock
-- meanwhile. So this looks names up by a hash join, which fetch switches off: comparing each of 2,000 queues
-- with 900 names and 100 patterns took seconds.
create or replace function queue._places_of(p_queues text[], p_idle boolean)
returns table (lane integer, queue text, place bigint)
language plpgsql stable parallel safe security invoker rows 10 set enable_hashjoin = on as $$
begin
  return query
    with asked as materialized (select q.name, q.n from unnest(p_queues) with ordinality q (name, n))
    select l.lane, l.queue, min(u.n)
    from queue.lane l
    left join (
      select d.queue, q.n
      from (select distinct l.queue from queue.lane l) d join asked q on q.name = d.queue
      union all
      select d.queue, q.n
      from (select distinct l.queue from queue.lane l) d join asked q
        on right(q.name, 1) = '*' and starts_with(d.queue, left(q.name, -1))) u on u.queue = l.queue
    where (p_idle or not l.is_idle) and (p_queues is null or u.queue is not null)
    group by l.lane, l.queue;
end $$;

-- Checks what a caller passes, before it is narrowed to what the caller may use.
-- Raises: 22023 for more than 1,000 names, or 100 patterns: each pattern is compared with each queue, while
-- others wait for the admission lock.
create or replace function queue._check_are_few(queues text[])
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if cardinality(queues) > 1000 then
    perform queue._invalid('queues holds more than 1,000 names',
      'Use patterns such as prefix*, or pass NULL for all.', 'names: ' || cardinality(queues));
  elsif (select count(*) from unnest(queues) q where right(q, 1) = '*') > 100 then
    perform queue._invalid('queues holds more than 100 patterns',
      'Use shorter patterns, or pass NULL for all.');
  end if;
end $$;

-- Whether one of the names is that of a queue that the caller asks for. A list of 1,000 names was cut, so it
-- counts as containing one.
create or replace function queue._has_any_of(p_queues text[], p_names text[])
returns boolean language plpgsql immutable parallel safe security invoker as $$
begin
  return cardinality(p_names) > 0
    and (p_queues is null or cardinality(p_names) >= 1000
         or exists (select from unnest(p_names) n join unnest(p_queues) q on queue._matches(n, q)));
end $$;

-- The end of a queue's pause: NULL if it is not paused.
create or replace function queue._paused_until(p_queue text)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_until timestamptz;
begin
  select case when p.is_paused then coalesce(p.until, 'infinity') end into v_until
  from queue.pause p
  where p.task is null and (p.queue is null or queue._matches(p_queue, p.queue))
  order by p.no desc limit 1;
  return v_until;
end $$;

-- The end of a task's pause on a queue: NULL if it is not paused.
create or replace function queue._task_paused_until(p_task text, p_queue text)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_until timestamptz;
begin
  select case when p.is_paused then coalesce(p.until, 'infinity') end into v_until
  from queue.pause p
  where (p.task = p_task or p.task is null and not p.is_paused)
    and (p.queue is null or queue._matches(p_queue, p.queue))
  order by p.no desc limit 1;
  return v_until;
end $$;
