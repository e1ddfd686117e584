-- Searching and listing jobs, newest first, in pages: the cost of a call is bounded, however many jobs there
-- are.

-- Reads jobs from the newest that is older than `before` until it has found max_jobs or read max_bytes. Then
-- the last row has no id, and next_id is the next value of `before`. Each job counts as the bytes that were
-- read of it, at least 100 (1,000 if only its state did not match), so that a call ends soon even if nothing
-- matches.
-- Raises: 22023.
create or replace function queue.search(pattern text default null, queue text default null,
  state text default null, max_bytes bigint default 50000000, by text default 'text', task text default null,
  before bigint default null, max_jobs integer default 100)
returns table (id bigint, queue_name text, task_name text, job_state text, reason text, priority integer,
  attempts integer, created_at timestamptz, scheduled_at timestamptz, started_at timestamptz,
  finished_at timestamptz, error text, description text, bytes integer, excerpt text, next_id bigint)
language plpgsql stable parallel unsafe security definer rows 100
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_path jsonpath := queue._check_search(search.pattern, search.queue, search.state, search.max_bytes,
    search.by, search.task, search.max_jobs);
  v_before bigint := coalesce(search.before, 9223372036854775807);
  v_ids bigint[];
  v_n integer := case when search.pattern is null then least(search.max_jobs, 500) else 10 end;
  v_job record;
  v_bytes integer;
  v_looked bigint := 0;
  v_hits bigint[];
  v_sizes integer[];
  v_is_cut boolean;
  v_shown integer;
  v_found integer := 0;
  v_allowed text[] := queue._allowed_queues('{operator,reader}');
  v_hidden jsonb;
  v_moved jsonb;
begin
  {{installed}}
  select queue._hidden_paths(), queue._moved_jobs() into v_hidden, v_moved;
  loop
    v_ids := queue._candidates(search.state, v_before, v_n);
    v_hits := '{}';
    v_sizes := '{}';
    v_is_cut := false;
    for v_job in
      select u.id, x.is_asked, case when x.is_asked and search.pattern is not null
          then queue._match(search.pattern, search.by, v_path, x.args, j.options ->> 'description',
            array[j.lock, j.queueing_lock, j.options ->> 'idempotency_key'] || j.keys) end as match
      from unnest(v_ids) with ordinality u (id, n)
      cross join lateral (select j.* from queue.job_now j where j.id = u.id offset 0) j
      cross join lateral (
        -- Masked before the pattern is compared, so that no pattern can find out what is hidden.
        select queue._mask_args(v_hidden -> j.task,
            coalesce(queue._replacement(u.id, j.flags) -> 'args', j.args)) as args,
          (search.queue is null or queue._matches(q.queue, search.queue))
            and (search.task is null or j.task = search.task)
            and (v_allowed is null or queue._allows(v_allowed, q.queue)) as is_asked
        from (select coalesce(v_moved ->> u.id::text, j.queue) as queue) q) x
      order by u.n
    loop
      v_before := v_job.id;
      v_bytes := abs(v_job.match);
      v_looked := v_looked + greatest(100, v_bytes);
      if v_job.is_asked and (search.pattern is null or v_job.match > 0) then
        v_hits := v_hits || v_job.id;
        v_sizes := v_sizes || v_bytes;
      end if;
      v_is_cut := v_found + cardinality(v_hits) >= search.max_jobs or v_looked >= search.max_bytes;
      exit when v_is_cut;
    end loop;
    if v_hits <> '{}' then
      return query select *
        from queue._found_jobs(v_hits, v_sizes, search.state, search.pattern, search.by, v_path, v_hidden);
      get diagnostics v_shown = row_count;
      v_found := v_found + v_shown;
      v_looked := v_looked + 1000 * (cardinality(v_hits) - v_shown);
    end if;
    exit when v_found >= search.max_jobs or v_looked >= search.max_bytes;
    continue when v_is_cut;
    exit when cardinality(v_ids) < v_n;  -- it got fewer than it asked for: there are no others
    v_before := v_ids[v_n];  -- a candidate whose job was deleted is not among the rows
    v_n := case when v_bytes > 10000 then 10 else least(v_n * 2, 500) end;
  end loop;
  if v_before > v_ids[cardinality(v_ids)]
    or cardinality(v_ids) = v_n and queue._candidates(search.state, v_before, 1) <> '{}' then
    excerpt := format('stopped at %s %s, %s bytes; continue with before => %s', v_found,
      case v_found when 1 then 'job' else 'jobs' end, v_looked, v_before);
    next_id := v_before;
    return next;
  end if;
end $$;
comment on function queue.search(text, text, text, bigint, text, text, bigint, integer) is
  'Returns jobs, newest first, whose args (or description) match pattern; sensitive args count as'
    ' ***. by: text (a substring of the args as JSON text), path (a jsonpath that finds something, or a'
    ' predicate that is true; without variables), key (a whole lock, queueing lock, idempotency key or'
    ' concurrency key). Without a pattern it returns all jobs of a queue (a name, prefix* or *), task and'
    ' state. excerpt: what was found with what surrounds it; without a pattern, or by key, the start of'
    ' args that take at most 2 kB. If it stops at max_jobs or after max_bytes (NULL: no limit), the last'
    ' row has no id, excerpt says so, and next_id is the value of before for the next call.';

-- Raises: 22023, QJ001.
create or replace function queue.get(id bigint, path text)
returns setof jsonb language plpgsql stable parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp as $$
declare
  v_args jsonb;
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator,reader}', array[get.id]);
  end if;
  if get.path is null or get.path = '' then
    perform queue._invalid('path is missing',
      'Write it as in items[0].price, or as a jsonpath: $.items[*].price.');
  end if;
  select queue._mask_args(queue._hidden_paths() -> j.task,
    coalesce(queue._replacement(j.id, j.flags) -> 'args', j.args))
  into v_args
  from queue.job_now j where j.id = get.id;
  if not found then
    perform queue._job_not_found(get.id);
  end if;
  return query
    select jsonb_path_query_tz(v_args,
      queue._jsonpath(case when get.path ~ '^[[:space:]]*([$]|(lax|strict)[[:space:]])' then get.path
      when starts_with(get.path, '[') then '$' || get.path else '$.' || get.path end), '{}', true);
end $$;
comment on function queue.get(bigint, text) is
  'Returns the values that a path finds in a job''s args, a row for each: items[0].price, or any'
    ' jsonpath, such as $.items[*].price. JSON null gives a row with null; a missing value gives no row. A'
    ' sensitive value (register_task) gives *** to all but the owner.';

-- The new queue, by id, of each job whose last run has moved it to another one, until it is admitted there;
-- NULL: none.
create or replace function queue._moved_jobs()
returns jsonb language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select jsonb_object_agg(u.job_id, u.payload #> '{change,queue}' order by u.seq)
    from queue.unsettled u
    where u.kind = 'again' and u.payload #> '{change,queue}' is not null);
end $$;

-- Returns what search says of these jobs, in their order; with a state, only of those in it. One query reads
-- them all: to start one of queue.jobs takes as long as to read twenty of its rows.
create or replace function queue._found_jobs(p_ids bigint[], p_bytes integer[], p_state text, p_pattern text,
  p_by text, p_path jsonpath, p_hidden jsonb)
returns table (id bigint, queue_name text, task_name text, job_state text, reason text, priority integer,
  attempts integer, created_at timestamptz, scheduled_at timestamptz, started_at timestamptz,
  finished_at timestamptz, error text, description text, bytes integer, excerpt text, next_id bigint)
language plpgsql stable parallel unsafe security invoker as $$
begin
  return query
    select job.id, job.queue, job.task, job.state, job.reason, job.priority, job.attempts, job.created_at,
      job.scheduled_at, job.started_at, job.finished_at, job.error, job.description, f.bytes,
      queue._excerpt(p_pattern, p_by, p_path, queue._mask_args(p_hidden -> job.task, job.args)), null::bigint
    from unnest(p_ids, p_bytes) with ordinality f (id, bytes, n)
    cross join lateral (select j.* from queue.all_jobs j where j.id = f.id offset 0) job
    where p_state is null or job.state = p_state
    order by f.n;
end $$;

-- Returns the pattern as a jsonpath if it is one.
-- Raises: 22023.
create or replace function queue._check_search(p_pattern text, p_queue text, p_state text, p_max_bytes bigint,
  p_by text, p_task text, p_max_jobs integer)
returns jsonpath language plpgsql immutable parallel unsafe security invoker as $$
begin
  if p_by is null or p_by not in ('text', 'path', 'key') then
    perform queue._invalid('by is not one of its values', 'Allowed: text, path, key.',
      'by: ' || coalesce(left(p_by, 200), 'NULL'));
  elsif p_pattern = '' then
    perform queue._invalid('pattern is empty', 'Pass what to look for, or NULL to list every job.');
  elsif not p_state = any (
    '{scheduled,waiting,upstream_failed,blocked,ready,running,held,succeeded,failed,cancelled}'::text[]) then
    perform queue._invalid('state is not one of its values',
      'Allowed: scheduled, waiting, upstream_failed, blocked, ready, running, held, succeeded, failed,'
      ' cancelled.', 'state: ' || left(p_state, 200));
  elsif p_max_bytes < 1 then
    perform queue._invalid('max_bytes must be at least 1',
      'Pass how many bytes to read, or NULL for no limit.');
  end if;
  perform queue._check_max_jobs(p_max_jobs);
  if p_queue is not null then
    perform queue._check_name('queue', p_queue);
  end if;
  if p_task is not null then
    perform queue._check_name('task', p_task);
  end if;
  return case when p_by = 'path' then queue._jsonpath(p_pattern) end;
end $$;

-- The number of bytes read of a job, negative if it does not match. A path is a predicate if it gives a truth
-- value for an empty object; then it must be true.
create or replace function queue._match(p_pattern text, p_by text, p_path jsonpath, p_args jsonb,
  p_description text, p_keys text[])
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
    if v_item = 'true' or v_item is not null
      and coalesce(jsonb_typeof(jsonb_path_query_first_tz('{}', p_path, '{}', true)), '') not in ('boolean',
      'null') then
      return octet_length(v_text);
    end if;
  elsif strpos(v_text, p_pattern) > 0 or strpos(p_description, p_pattern) > 0
    or strpos(v_text, queue._escaped(p_pattern)) > 0 then
    return octet_length(v_text);
  end if;
  return -octet_length(v_text);
end $$;

-- The text shown for a job: what matches with what surrounds it, or else the start of args that are small.
create or replace function queue._excerpt(p_pattern text, p_by text, p_path jsonpath, p_args jsonb)
returns text language plpgsql stable parallel unsafe security invoker as $$
declare
  v_text text;
  v_at integer;
begin
  if p_pattern is null or p_by = 'key' then
    -- The size in the row comes first: large args are not even read.
    return case when pg_column_size(p_args) <= 2000 and queue._text_size(p_args, 2000) <= 2000
      then nullif(left(p_args::text, 200), '{}') end;
  elsif p_by = 'path' then
    return left(jsonb_path_query_first_tz(p_args, p_path, '{}', true)::text, 200);
  end if;
  v_text := p_args::text;
  v_at := coalesce(nullif(strpos(v_text, p_pattern), 0), strpos(v_text, queue._escaped(p_pattern)));
  return case when v_at > 0 then substr(v_text, greatest(v_at - 60, 1), 200) end;
end $$;

-- A text as it appears in JSON, without its quotes.
create or replace function queue._escaped(p_text text)
returns text language plpgsql immutable parallel safe security invoker as $$
begin
  return substr(to_json(p_text)::text, 2, length(to_json(p_text)::text) - 2);
end $$;
