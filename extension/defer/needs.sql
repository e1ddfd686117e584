-- Needs of a job that is being deferred: checks that they exist, and says how they are combined.
-- Tests: admit/needs.sql, admit/deadlines.sql.

-- Checks needs and returns them as a sorted set. It assigns an xid first, so that _safe_at waits for this
-- transaction.
-- Settings: a plan made while the log was empty would read all of it. Left to choose, PostgreSQL would always
-- prefer a plan that knows the number of needs, and so plan in each call, which takes three times as long as
-- the rest.
-- Locks: outside READ COMMITTED, where a need may have been removed since the snapshot, the needs' rows of
-- queue.log by skip locked. They are free again at once, so that what removes jobs waits for no client.
-- Raises: 22023, QJ001 if a need can't be seen, is being removed, or is no longer kept; 40001 if it was
-- removed since the snapshot. Two sessions: defer/needs.repeatable.spec.
create or replace function queue._check_needs(p_needs bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off
set enable_mergejoin = off set enable_bitmapscan = off as $$
declare
  v_now timestamptz;
  v_missing bigint;
begin
  if array_ndims(p_needs) > 1 or array_position(p_needs, null) is not null then
    perform queue._check_list('needs', p_needs::text[]);
  elsif cardinality(p_needs) > {{most_needs}} then
    perform queue._invalid(format('a job has at most %s needs', {{most_needs}}),
      'Put the jobs into a group, and defer this job as a callback of the group.',
      format('needs: %s', cardinality(p_needs)));
  end if;
  perform pg_current_xact_id();
  v_now := clock_timestamp();
  select u.n into v_missing
  from unnest(p_needs) u (n)
  left join lateral (select j.id from queue.job j where j.id = u.n offset 0) j on true
  left join lateral (
    select f.state, f.finished_at, f.purge_at
    from queue.finished f
    where f.id = u.n offset 0) f on true
  where j.id is null or {{is_past}}
  limit 1;
  if not found and current_setting('transaction_isolation') <> 'read committed' then
    begin
      select n into v_missing from unnest(p_needs) n
      where n <> all (array(select l.id from queue.log l where l.id = any (p_needs)
        for key share skip locked));
      {{roll_back}}
    end;
  end if;
  if v_missing is not null then
    perform queue._job_not_found(v_missing);
  end if;
  if cardinality(p_needs) = 1 then
    return p_needs;
  end if;
  return array(select distinct n from unnest(p_needs) n order by n);
end $$;

-- The deadline that a child inherits from its parent. Settings: a plan made while the log was empty would
-- read all of it.
-- Raises: QJ001.
create or replace function queue._parent_deadline(p_parent bigint)
returns timestamptz language plpgsql stable parallel safe security invoker set enable_seqscan = off as $$
declare
  v_deadline timestamptz;
begin
  select j.deadline into v_deadline from queue.job_now j where j.id = p_parent;
  if not found then
    perform queue._job_not_found(p_parent);
  end if;
  return v_deadline;
end $$;

-- How a job's needs are combined, as bits: any, proceed.
create or replace function queue._needs_mode(p_options jsonb)
returns smallint language plpgsql immutable parallel safe security invoker as $$
begin
  return coalesce((p_options ->> 'needs_mode' = 'any')::integer * {{any}}, 0)
    | coalesce((p_options ->> 'on_need_failure' = 'proceed')::integer * {{proceed}}, 0);
end $$;

-- The needs of a job, admitted or not.
create or replace function queue._direct_needs(p_id bigint)
returns table (id bigint) language plpgsql stable parallel safe security invoker rows 5 as $$
begin
  return query
    select d.need_id from queue.need d where d.job_id = p_id
    union
    select n from queue.job j cross join lateral unnest(j.needs) n where j.id = p_id;
end $$;
