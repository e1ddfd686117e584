-- Searching and listing jobs, newest first, in pages: what a call costs is bounded, however many jobs there are.

-- Reads jobs from the newest that is older than `before` until max_jobs have been found or max_bytes been
-- looked through. Then the last row has no id, and next_id is the `before` to go on with. Each job counts
-- as the bytes that were read of it, at least 100 (1,000 where only its state turned out to be another), so
-- that a call ends soon also where nothing matches.
-- Raises: 22023.
create or replace function queue.search(
  pattern text default null, queue text default null, state text default null, max_bytes bigint default 50000000,
  by text default 'text', task text default null, before bigint default null, max_jobs integer default 100)
returns table (id bigint, queue_name text, task_name text, job_state text, reason text, priority integer, attempts integer,
               created_at timestamptz, description text, bytes integer, excerpt text, next_id bigint)
language plpgsql stable parallel unsafe security definer rows 100
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_path jsonpath := queue._check_search(search.pattern, search.queue, search.state, search.max_bytes, search.by, search.task, search.max_jobs);
  v_before bigint := coalesce(search.before, 9223372036854775807);
  v_ids bigint[];
  v_n integer := case when search.pattern is null then least(search.max_jobs, 500) else 10 end;
  v_job record;
  v_bytes integer;
  v_looked bigint := 0;
  v_found integer := 0;
  v_limits text[] := queue._limits('{operator,reader}');
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  loop
    v_ids := queue._candidates(search.state, v_before, v_n);
    exit when v_ids = '{}';
    for v_job in
      select u.id, x.is_asked,
        case when x.is_asked and search.pattern is not null
          then queue._match(search.pattern, search.by, v_path, x.args, j.options ->> 'description', array[x.lock, j.queueing_lock] || j.keys) end as match
      from unnest(v_ids) with ordinality u (id, n)
      cross join lateral (select j.task, j.queue, j.lock, j.queueing_lock, j.keys, j.args, j.options, j.flags from queue.job j where j.id = u.id offset 0) j
      left join lateral (select s.queue, s.lock, s.args from queue.job_state s where s.id = u.id offset 0) s on true
      cross join lateral (
        select coalesce(queue._replaced_args(u.id, j.flags), s.args, j.args) as args, coalesce(s.lock, j.lock) as lock,
          (search.queue is null or queue._matches(coalesce(s.queue, j.queue), search.queue)) and (search.task is null or j.task = search.task)
            and (v_limits is null or queue._covers(v_limits, coalesce(s.queue, j.queue))) as is_asked) x
      order by u.n
    loop
      v_before := v_job.id;
      v_bytes := abs(v_job.match);
      v_looked := v_looked + greatest(100, v_bytes);
      if v_job.is_asked and (search.pattern is null or v_job.match > 0) then
        select v.id, v.queue, v.task, v.state, v.reason, v.priority, v.attempts, v.created_at, v.description, v_bytes,
          queue._excerpt(search.pattern, search.by, v_path, v.args)
        into id, queue_name, task_name, job_state, reason, priority, attempts, created_at, description, bytes, excerpt
        from queue.jobs v where v.id = v_job.id;
        if search.state is null or job_state = search.state then
          return next;
          v_found := v_found + 1;
        else
          v_looked := v_looked + 1000;
        end if;
      end if;
      exit when v_found >= search.max_jobs or v_looked >= search.max_bytes;
    end loop;
    exit when v_found >= search.max_jobs or v_looked >= search.max_bytes;
    v_n := case when v_bytes > 10000 then 10 else least(v_n * 2, 500) end;
  end loop;
  if v_ids <> '{}' and queue._candidates(search.state, v_before, 1) <> '{}' then
    return query
      select null::bigint, null::text, null::text, null::text, null::text, null::integer, null::integer, null::timestamptz, null::text, null::integer,
        format('stopped at %s jobs, %s bytes; go on with before => %s', v_found, v_looked, v_before), v_before;
  end if;
end $$;
comment on function queue.search(text, text, text, bigint, text, text, bigint, integer) is
  'Jobs, newest first, whose args hold pattern (or whose description does). by: text (a substring of the args as JSON text), path (a jsonpath that finds something, or a predicate that is true; without variables), key (the whole of a lock, queueing_lock or concurrency key). Without a pattern all, of a queue (a name, prefix* or *), task and state. When it stops at max_jobs or after max_bytes (NULL: no limit), the last row says so in excerpt, has no id, and next_id is the before to go on with.';

-- Raises: 22023, QJ001.
create or replace function queue.get(id bigint, path text)
returns setof jsonb language plpgsql stable parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_args jsonb;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator,reader}', array[get.id]);
  end if;
  if get.path is null or get.path = '' then
    perform queue._invalid('path is missing', 'Write it as in items[0].price, or as a jsonpath: $.items[*].price.');
  end if;
  select coalesce(queue._replaced_args(j.id, j.flags), s.args, j.args) into v_args from queue.job j left join queue.job_state s on s.id = j.id where j.id = get.id;
  if not found then
    perform queue._job_not_found(get.id);
  end if;
  return query
    select jsonb_path_query_tz(v_args, queue._jsonpath(case when get.path ~ '^[[:space:]]*([$]|(lax|strict)[[:space:]])' then get.path
                                                            when starts_with(get.path, '[') then '$' || get.path else '$.' || get.path end), '{}', true);
end $$;
comment on function queue.get(bigint, text) is
  'What a path finds in a job''s args, a row for each: items[0].price, or any jsonpath, as $.items[*].price. JSON null is a row with null in it, what is missing no row.';

-- Returns the pattern as a jsonpath where it is one.
-- Raises: 22023.
create or replace function queue._check_search(p_pattern text, p_queue text, p_state text, p_max_bytes bigint, p_by text, p_task text, p_max_jobs integer)
returns jsonpath language plpgsql immutable parallel unsafe security invoker as $$
begin
  if p_by is null or p_by not in ('text', 'path', 'key') then
    perform queue._invalid('by is not one of its values', 'Allowed: text, path, key.', 'by: ' || coalesce(left(p_by, 200), 'NULL'));
  elsif p_pattern = '' then
    perform queue._invalid('pattern is empty', 'Pass what to look for, or NULL to list every job.');
  elsif not p_state = any ('{scheduled,waiting,upstream_failed,blocked,ready,running,held,succeeded,failed,cancelled}'::text[]) then
    perform queue._invalid('state is not one of its values', 'Allowed: scheduled, waiting, upstream_failed, blocked, ready, running, held, succeeded, failed, cancelled.',
                           'state: ' || left(p_state, 200));
  elsif p_max_bytes < 1 then
    perform queue._invalid('max_bytes must be at least 1', 'Pass how many bytes to look through, or NULL for no limit.');
  elsif p_max_jobs < 1 or p_max_jobs is null then
    perform queue._invalid('max_jobs must be at least 1', 'Say how many jobs to return at most.');
  end if;
  if p_queue is not null then
    perform queue._check_name('queue', p_queue);
  end if;
  if p_task is not null then
    perform queue._check_name('task', p_task);
  end if;
  return case when p_by = 'path' then queue._jsonpath(p_pattern) end;
end $$;

-- Raises: 22023 unless it is a jsonpath without variables.
create or replace function queue._jsonpath(p_path text)
returns jsonpath language plpgsql immutable parallel unsafe security invoker as $$
declare
  v_path jsonpath;
begin
  begin
    v_path := p_path::jsonpath;
    -- a template is read only when a text is
    perform jsonb_path_query('"x"', ('$.datetime(' || t[1] || ')')::jsonpath, '{}', true)
    from regexp_matches(v_path::text, replace('[.]datetime[(]("(?:~~.|[^"~~])*")[)]', '~', chr(92)), 'g') t;
  exception when syntax_error or data_exception or feature_not_supported or program_limit_exceeded then
    perform queue._invalid('not a jsonpath', 'Write it as in $.items[*] ? (@.price > 3); quote odd names: $."a b".', sqlerrm);
  end;
  -- it is shown with every name and text in quotes
  if strpos(regexp_replace(v_path::text, replace('"(?:~~.|[^"~~])*"', '~', chr(92)), '""', 'g'), '$""') > 0 then
    perform queue._invalid('a jsonpath may not hold variables', 'Write the value itself; $ alone stands for the args.', 'path: ' || left(p_path, 200));
  end if;
  return v_path;
end $$;

-- How many bytes of a job were read, below zero if they do not match. A path is a predicate if it gives an
-- empty object a truth value; then it must be true.
create or replace function queue._match(p_pattern text, p_by text, p_path jsonpath, p_args jsonb, p_description text, p_keys text[])
returns integer language plpgsql stable parallel safe security invoker as $$
declare
  v_text text;
  v_item jsonb;
begin
  if p_by = 'key' then
    return case when p_pattern = any (p_keys) then 1 else -1 end;
  end if;
  v_text := p_args::text;
  if p_by = 'path' then
    v_item := jsonb_path_query_first_tz(p_args, p_path, '{}', true);
    if v_item = 'true' or v_item is not null and coalesce(jsonb_typeof(jsonb_path_query_first_tz('{}', p_path, '{}', true)), '') not in ('boolean', 'null') then
      return octet_length(v_text);
    end if;
  elsif strpos(v_text, p_pattern) > 0 or strpos(p_description, p_pattern) > 0 or strpos(v_text, queue._escaped(p_pattern)) > 0 then
    return octet_length(v_text);
  end if;
  return -octet_length(v_text);
end $$;

-- What is shown of a job that matches.
create or replace function queue._excerpt(p_pattern text, p_by text, p_path jsonpath, p_args jsonb)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_text text;
  v_at integer;
begin
  if p_pattern is null or p_by = 'key' then
    return null;
  elsif p_by = 'path' then
    return left(jsonb_path_query_first_tz(p_args, p_path, '{}', true)::text, 200);
  end if;
  v_text := p_args::text;
  v_at := coalesce(nullif(strpos(v_text, p_pattern), 0), strpos(v_text, queue._escaped(p_pattern)));
  return case when v_at > 0 then substr(v_text, greatest(v_at - 60, 1), 200) end;
end $$;

-- A text as it stands in JSON, without its quotes.
create or replace function queue._escaped(p_text text)
returns text language plpgsql immutable parallel safe security invoker as $$
begin
  return substr(to_json(p_text)::text, 2, length(to_json(p_text)::text) - 2);
end $$;

-- The newest jobs below an id that may be in a state (NULL: any), newest first: by the table that holds
-- those of that state, and what has not been admitted yet.
create or replace function queue._candidates(p_state text, p_before bigint, p_n integer)
returns bigint[] language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  v_reason text := case p_state when 'ready' then 'task_paused' when 'waiting' then 'needs' else p_state end;
  v_ids bigint[];
begin
  case
    when p_state is null then
      return array(select j.id from queue.job j where j.id < p_before order by j.id desc limit p_n);
    when p_state = 'failed' then
      return array(select f.id from queue.finished f where f.state = 'failed' and f.id < p_before order by f.id desc limit p_n);
    when p_state = 'cancelled' then
      return array(select f.id from queue.finished f where f.state = 'cancelled' and f.id < p_before order by f.id desc limit p_n);
    when p_state = 'succeeded' then
      return array(select f.id from queue.finished f where f.state = 'succeeded' and f.id < p_before order by f.id desc limit p_n);
    when p_state = 'running' then
      return array(select v.id from queue.live v where v.claim is not null and v.id < p_before order by v.id desc limit p_n);
    when p_state = 'blocked' then
      -- members of locks can't be read by id: where they abound, enough are among the newest jobs
      v_ids := array(
        select j.id
        from (select j.id, j.lock from queue.job j where j.id < p_before order by j.id desc limit 20000) j
        left join lateral (select s.lock from queue.job_state s where s.id = j.id offset 0) s on true
        left join lateral (select m.id from queue.lock_member m where m.lock = coalesce(s.lock, j.lock) and m.id = j.id and m.is_passed offset 0) m on true
        left join lateral (select w.reason from queue.waiting w where w.id = j.id offset 0) w on true
        where w.reason in ('slot', 'parked') or w.reason is null and m.id is not null
          and not exists (select from queue.live v where v.id = j.id) and not exists (select from queue.finished f where f.id = j.id)
        order by j.id desc limit p_n);
      if cardinality(v_ids) = p_n then
        return v_ids;
      end if;
      return array(
        select c.id
        from (
          (select w.id from queue.waiting w where w.reason = 'slot' and w.id < p_before order by w.id desc limit p_n)
          union
          (select w.id from queue.waiting w where w.reason = 'parked' and w.id < p_before order by w.id desc limit p_n)
          union
          (select m.id from queue.lock_member m
           where m.is_passed and m.id < p_before and not exists (select from queue.waiting w where w.id = m.id)
             and not exists (select from queue.live v where v.id = m.id) and not exists (select from queue.finished f where f.id = m.id)
           order by m.id desc limit p_n)) c
        order by c.id desc limit p_n);
    else null;
  end case;
  return array(
    select c.id
    from (
      (select v.id from queue.live v where p_state = 'ready' and v.claim is null and v.id < p_before order by v.id desc limit p_n)
      union
      (select w.id from queue.waiting w where p_state = 'scheduled' and w.reason = 'schedule' and w.id < p_before order by w.id desc limit p_n)
      union
      (select w.id from queue.waiting w
       where w.reason = v_reason and w.reason in ('held', 'upstream_failed', 'needs', 'task_paused') and w.id < p_before
       order by w.reason desc, w.id desc limit p_n)
      union
      (select h.job_id from queue.handover h where h.kind = 'again' and h.job_id < p_before order by h.job_id desc limit p_n)
      union
      select u.id from unnest(queue._unadmitted(p_state, p_before, p_n)) u (id)) c
    order by c.id desc limit p_n);
end $$;

-- The newest jobs below an id that have not been admitted and may be in a state.
create or replace function queue._unadmitted(p_state text, p_before bigint, p_n integer)
returns bigint[] language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
declare
  c record;
  v_ids bigint[];
begin
  -- they can't be read by id: where they abound, enough are among the newest jobs
  if (select count(*) from (select from queue.unadmitted a limit 1001) a) > 1000 then
    select k.next_xid, k.in_flight into c from queue.cursor k order by k.tick desc limit 1;
    v_ids := array(
      select j.id
      from (select j.id, j.xid, j.flags, j.scheduled_at, j.needs from queue.job j where j.id < p_before order by j.id desc limit 20000) j
      where queue._may_be(p_state, j.id, j.flags, j.scheduled_at, j.needs)
        and (j.xid >= c.next_xid or j.xid = any (c.in_flight)
             or (select true from queue.backlog b where (j.xid, j.id) > (b.from_xid, b.from_id) and j.xid <= b.to_xid limit 1)
             or (select true from queue.backlog_part b
                 where (j.xid, j.id) > (b.from_xid, b.from_id) and (j.xid, j.id) <= (b.to_xid, b.to_id) limit 1))
      order by j.id desc limit p_n);
    if cardinality(v_ids) = p_n then
      return v_ids;
    end if;
  end if;
  return array(
    select a.id
    from (select a.id, a.flags, a.scheduled_at, a.needs from queue.unadmitted a offset 0) a
    where a.id < p_before and queue._may_be(p_state, a.id, a.flags, a.scheduled_at, a.needs)
    order by a.id desc limit p_n);
end $$;

-- Whether a job that has not been admitted may be in a state. One that was replaced may be in another than
-- it was deferred in.
create or replace function queue._may_be(p_state text, p_id bigint, p_flags smallint, p_scheduled_at timestamptz, p_needs bigint[])
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return p_state = case when p_flags & 32 <> 0 then 'held' when p_scheduled_at > statement_timestamp() then 'scheduled'
                        when p_needs is not null then 'waiting' else 'ready' end
    or p_state <> 'upstream_failed' and exists (select from queue.job_state s where s.id = p_id);
end $$;
