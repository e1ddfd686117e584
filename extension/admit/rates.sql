-- Rates: no window contains more starts of a key than its rate allows. Starts are numbered, and a job of
-- weight w counts as w starts. k more jobs may start if the start that is limit places before the k-th of
-- them lies outside the window. The starts of one moment have two rows in queue.rate_start, one for the first
-- and one for the last, so that a heavy job costs no more than another. A key's first letter is its kind, as
-- in queue.semaphore.

-- When a key's start of this number was; NULL: there was none, or none that counts. A number between two rows
-- has the time of both.
create or replace function queue._rate_start_at(p_key text, p_no bigint)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_next record;
begin
  if p_no <= 0 then
    return null;
  end if;
  select r.no, r.at into v_next from queue.rate_start r
  where r.key = p_key and r.no >= p_no order by r.no limit 1;
  if v_next.no > p_no and (select r.no from queue.rate_start r
    where r.key = p_key and r.no < p_no order by r.no desc limit 1) is null then
    return null;
  end if;
  return v_next.at;
end $$;

-- How many more jobs may start at p_now under a key's rate: at most p_n. NULL: the key has no rate.
create or replace function queue._rate_room(p_key text, p_limit integer, p_per interval, p_n integer,
  p_now timestamptz)
returns integer language plpgsql stable strict parallel safe security invoker as $$
declare
  v_last record;
  v_room integer := least(p_n, p_limit);
  v_low integer := 0;
  v_middle integer;
begin
  select r.no, greatest(r.at, p_now) - p_per as horizon into v_last
  from queue.rate_start r where r.key = p_key order by r.no desc limit 1;
  while v_low < v_room loop
    v_middle := (v_low::bigint + v_room + 1) / 2;
    if queue._rate_start_at(p_key, v_last.no + v_middle - p_limit) >= v_last.horizon then
      v_room := v_middle - 1;
    else
      v_low := v_middle;
    end if;
  end loop;
  return greatest(v_room, 0);
end $$;

-- The time from which p_n more jobs may start under a key's rate; NULL for at once.
create or replace function queue._rate_opens_at(p_key text, p_limit integer, p_per interval,
  p_n integer default 1)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_at timestamptz;
begin
  select queue._rate_start_at(p_key, l.no + least(p_n, p_limit) - p_limit) + p_per into v_at
  from (select r.no from queue.rate_start r where r.key = p_key order by r.no desc limit 1) l;
  return case when v_at >= clock_timestamp() then v_at end;
end $$;

-- Records p_n starts under a key's rate, and deletes those that no window can contain any more. It keeps all
-- of the new ones, also if a heavy job counts more often than the rate allows: a greater rate may come.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: jobs that the rate holds back wait for
-- a time (_rate_opens_at).
create or replace function queue._count_rate_starts(p_key text, p_limit integer, p_n integer,
  p_now timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_no bigint;
  v_at timestamptz;
begin
  select r.no, r.at into v_no, v_at from queue.rate_start r where r.key = p_key order by r.no desc limit 1;
  v_no := coalesce(v_no, 0);
  insert into queue.rate_start (key, no, at)
  select p_key, n, greatest(v_at, p_now) from (select v_no + 1 union select v_no + p_n) n (n);
  perform queue._forget_rate_starts(p_key, v_no - p_limit, v_no + p_n - greatest(p_limit, p_n));
end $$;

-- Deletes a key's starts up to a number. Of the starts of one moment it keeps the first row while the last
-- one remains (_rate_start_at). All starts up to p_from are gone: the search begins there, so that it reads
-- no dead rows.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: no window contains these starts.
create or replace function queue._forget_rate_starts(p_key text, p_from bigint, p_upto bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_upto <= 0 then
    return;
  end if;
  delete from queue.rate_start r
  where r.key = p_key and r.no >= coalesce(queue._first_rate_start(p_key, p_from), p_from)
    and r.no < queue._first_rate_start(p_key, p_upto);
end $$;

-- Returns the row that is then the first, if a key's starts up to a number are forgotten; NULL: all remain.
create or replace function queue._first_rate_start(p_key text, p_upto bigint)
returns bigint language plpgsql stable parallel safe security invoker as $$
begin
  return coalesce(
    (select r.no from queue.rate_start r where r.key = p_key and r.no = p_upto + 1),
    (select r.no from queue.rate_start r where r.key = p_key and r.no <= p_upto order by r.no desc limit 1));
end $$;

-- Returns the settings of configure_key for a concurrency key: those of its name, else of the longest prefix*
-- that matches; else no row.
create or replace function queue._key_config(p_key text)
returns table (slots integer, rate_limit integer, rate_per interval)
language plpgsql stable parallel safe security invoker rows 1 as $$
begin
  return query
    select c.slots, c.rate_limit, c.rate_per from queue.key_config c where c.pattern = p_key;
  if not found then
    return query
      select c.slots, c.rate_limit, c.rate_per from queue.key_config c
      where right(c.pattern, 1) = '*' and starts_with(p_key, left(c.pattern, -1))
      order by length(c.pattern) desc limit 1;
  end if;
end $$;
