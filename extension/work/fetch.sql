-- Fetching: claims ready jobs, and admits if there are too few.

-- Locks: rows of queue.active_job by skip locked; the admission lock, waited for only while nothing is held.
-- If it finds nothing, as _maintain; after one in 500 claims, as _prune_in_pace.
-- Raises: 22023, QJ007, QJ008.
-- Why nothing is claimed twice: the claim is an update of a row that this transaction has locked, and found
-- unclaimed in its newest version. Why no limit is exceeded: rows of limited lanes are claimed only under the
-- admission lock (_claim_limited).
-- In one piece (ADR 1): set-up of statements and calls is most of the cost of a single job.
create or replace function queue.fetch(
  worker bigint, queues text[] default null, max_jobs integer default 1, options jsonb default null)
returns table (id bigint, claim bigint, task text, args jsonb, queue text, priority integer, lock text,
  attempt integer, scheduled_at timestamptz, deadline timestamptz, timeout interval, headers jsonb,
  parent bigint, steps jsonb)
language plpgsql volatile parallel unsafe security definer rows 50
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_claimed record;
  v_at_once integer;
  v_none regclass;  -- stays NULL: see _unrestricted
begin
  if cardinality(queues) > 100 then
    perform queue._check_are_few(queues);
  end if;
  if coalesce(v_none, queue._unrestricted()) is null
    or current_setting('transaction_isolation') <> 'read committed'
    or current_setting('pgdefer.era', true) is distinct from to_regclass('queue.installation')::oid::text
  then
    perform queue._check_isolation();
    if to_regclass('queue.unrestricted') is null then
      perform queue._check_installed();
      perform queue._require_worker(worker);
      queues := queue._narrow_queues('{worker}', queues);
    end if;
    perform queue._ensure_era();
    -- Once per session: another session of the worker may have left undelivered claims.
    perform queue._look_for_undelivered(worker);
  end if;
  if current_setting('pgdefer.undelivered', true) = worker::text then
    v_claimed := queue._deliver(worker, max_jobs);
    return query
      select {{claimed_columns}}
      from unnest(v_claimed.ids, v_claimed.claims) with ordinality u (id, claim, n)
      cross join lateral (
        select c.*
        from queue.claimed_job c
        where c.id = u.id and c.claim = u.claim offset 0) c
      order by u.n;
    if v_claimed.ids is not null then
      return;
    end if;
  end if;
  if options ? 'ahead' then
    v_at_once := queue._start_at_once(max_jobs, options);
    options := nullif(options - 'ahead', '{}');
  end if;
  v_claimed := queue._claim_newcomer(worker, queues, max_jobs, options, true, v_at_once);
  if v_claimed.first_claim is null and cardinality(v_claimed.ids) = 1 then
    -- This reads its row once, for its length (_keep_undelivered) and for the answer.
    select {{claimed_columns}}
    into id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, timeout, headers,
      parent, steps
    from queue.claimed_job c where c.id = v_claimed.ids[1];
    if found and octet_length(concat(task, args, queue, lock, headers, steps))
      <= {{answer_bytes}} - {{row_bytes}} then
      if random() * 500 < 1 then
        perform queue._prune_in_pace();
      end if;
      return next;
      return;
    end if;
  end if;
  if v_claimed.first_claim is null or cardinality(v_claimed.ids) > {{always_fit}} then
    v_claimed.ids := queue._keep_undelivered(worker, v_claimed.ids, v_claimed.first_claim is not null);
  end if;
  if v_claimed.ids is null then
    perform queue._maintain_idle();
    return;
  elsif random() * 500 < cardinality(v_claimed.ids) then
    perform queue._prune_in_pace();
  end if;
  -- A separate statement, because only a new snapshot shows the claims.
  if v_claimed.first_claim is not null then
    return query
      select f.id, v_claimed.first_claim, f.task, f.args, f.queue, f.priority, f.lock, f.attempt,
        f.scheduled_at, f.deadline, f.timeout, f.headers, f.parent, null::jsonb
      from queue.first_run f where f.id = any (v_claimed.ids) order by f.id;
  else
    return query
      select {{claimed_columns}}
      from unnest(v_claimed.ids) with ordinality u (id, n)
      cross join lateral (select c.* from queue.claimed_job c where c.id = u.id offset 0) c
      order by u.n;
  end if;
end $$;
comment on function queue.fetch(bigint, text[], integer, jsonb) is
  'Claims up to max_jobs jobs for a worker and returns them in claim order. It needs a transaction of its'
    ' own, in READ COMMITTED. If it finds nothing, it runs the maintenance that is due. A job that has'
    ' crashed before goes only to a worker that runs nothing, and that worker gets no other job until it has'
    ' ended; so a worker must make these calls one after another. Claims that did not fit into an earlier'
    ' answer, of at most 64 kB, come first, whatever queues and options say now. steps: the finished steps'
    ' of a job, by name; NULL if there are none, an empty object if they take more than 64 kB'
    ' (queue.read_steps). options: ids, order (mixed | listed), tasks, functions (true: tasks that are'
    ' database functions), deadline_within, max_running ({"queue or prefix*": n}: of each such queue this'
    ' worker runs at most n jobs at once; the longest pattern applies), ahead (how many of max_jobs the'
    ' worker starts a moment later; they are claimed only where no option selects jobs and no ready job is'
    ' under a limit).';

-- Locks: as finish_many, then as fetch; the admission lock is waited for only if there are no outcomes, or as
-- _settle_and_claim says.
-- Raises: as finish_many and fetch.
-- In one piece: each return of rows ends it, and each depends on what came before.
create or replace function queue.finish_and_fetch(worker bigint, outcomes jsonb, queues text[] default null,
  max_jobs integer default 1, options jsonb default null)
returns table (id bigint, claim bigint, task text, args jsonb, queue text, priority integer, lock text,
  attempt integer, scheduled_at timestamptz, deadline timestamptz, timeout interval, headers jsonb,
  parent bigint, steps jsonb, error text)
language plpgsql volatile parallel unsafe security definer rows 50
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_ended record;
  v_claimed record;
  v_may_wait boolean := coalesce(finish_and_fetch.outcomes, '[]') = '[]';
  v_has_kept boolean := false;  -- ended claims are still to be settled
  v_has_claimed boolean := false;
  v_at_once integer;
  v_none regclass;  -- stays NULL: see _unrestricted
begin
  if cardinality(queues) > 100 then
    perform queue._check_are_few(queues);
  end if;
  if coalesce(v_none, queue._unrestricted()) is null
    or current_setting('transaction_isolation') <> 'read committed'
    or current_setting('pgdefer.era', true) is distinct from to_regclass('queue.installation')::oid::text
  then
    perform queue._check_isolation();
    if to_regclass('queue.unrestricted') is null then
      perform queue._check_installed();
      perform queue._require_worker(worker);
      perform queue._require_outcomes(finish_and_fetch.outcomes);
      queues := queue._narrow_queues('{worker}', queues);
    end if;
    perform queue._ensure_era();
    -- Once per session: another session of the worker may have left undelivered claims.
    perform queue._look_for_undelivered(finish_and_fetch.worker);
  end if;
  if not v_may_wait then
    v_ended := queue._finish(finish_and_fetch.outcomes,
      (options is null or jsonb_typeof(options) = 'object' and options - 'ahead' = '{}')
      and current_setting('pgdefer.undelivered', true) is distinct from worker::text);
    v_has_kept := v_ended.kept_ids is not null;
    if v_ended.has_refused then
      return query
        select f.id, f.claim, null::text, null::jsonb, null::text, null::integer, null::text, null::integer,
          null::timestamptz,
          null::timestamptz, null::interval, null::jsonb, null::bigint, null::jsonb, f.error
        from unnest(v_ended.ids, v_ended.claims, v_ended.errors) f (id, claim, error)
        where f.error is not null;
      if cardinality(v_ended.ids) > 500 then
        return;  -- such a long answer must not travel with the admission lock held, which a claim may take
      end if;
    end if;
  end if;
  if current_setting('pgdefer.undelivered', true) = worker::text then
    -- Large answers must not travel while outcomes hold locks. A call without outcomes returns them alone.
    if v_may_wait then
      v_claimed := queue._deliver(worker, max_jobs);
      return query
        select {{claimed_columns}}, null::text
        from unnest(v_claimed.ids, v_claimed.claims) with ordinality u (id, claim, n)
        cross join lateral (
          select c.*
          from queue.claimed_job c
          where c.id = u.id and c.claim = u.claim offset 0) c
        order by u.n;
    end if;
    return;
  end if;
  if options ? 'ahead' then
    v_at_once := queue._start_at_once(max_jobs, options);
    options := nullif(options - 'ahead', '{}');
  end if;
  if v_has_kept then
    v_claimed := queue._settle_and_claim(v_ended.kept_ids, v_ended.kept_flags, finish_and_fetch.worker,
      finish_and_fetch.queues, case when max_jobs > {{always_fit}}
        then queue._fitting(least(max_jobs, v_at_once)) else least(max_jobs, v_at_once) end);
    v_has_claimed := v_claimed.ids is not null;
  end if;
  if not v_has_claimed then
    v_claimed := queue._claim_newcomer(
      finish_and_fetch.worker, finish_and_fetch.queues, finish_and_fetch.max_jobs, finish_and_fetch.options,
      v_may_wait, v_at_once);
  end if;
  if v_claimed.first_claim is null or cardinality(v_claimed.ids) > {{always_fit}} then
    v_claimed.ids := queue._keep_undelivered(finish_and_fetch.worker, v_claimed.ids,
      v_claimed.first_claim is not null);
  end if;
  if v_claimed.ids is null then
    perform queue._maintain_idle();
    return;
  elsif random() * 500 < cardinality(v_claimed.ids) then
    perform queue._prune_in_pace();
  end if;
  -- A separate statement, because only a new snapshot shows the claims.
  return query select r.* from queue._claimed_rows(v_claimed.ids, v_claimed.first_claim) r;
end $$;
comment on function queue.finish_and_fetch(bigint, jsonb, text[], integer, jsonb) is
  'Runs finish_many and fetch in one round trip and one commit. Rows with error report refused outcomes,'
    ' the others are claimed jobs.';

-- Claimed jobs, as finish_and_fetch returns them: apart only because of its length. p_first_claim: the number
-- of the first claim, if all are first runs and numbered in the order of their ids.
create or replace function queue._claimed_rows(p_ids bigint[], p_first_claim bigint)
returns table (id bigint, claim bigint, task text, args jsonb, queue text, priority integer, lock text,
  attempt integer, scheduled_at timestamptz, deadline timestamptz, timeout interval, headers jsonb,
  parent bigint, steps jsonb, error text)
language plpgsql volatile parallel unsafe security invoker rows 50 as $$
begin
  if p_first_claim is not null then
    return query
      select f.id, p_first_claim, f.task, f.args, f.queue, f.priority, f.lock, f.attempt,
        f.scheduled_at, f.deadline, f.timeout, f.headers, f.parent, null::jsonb, null::text
      from queue.first_run f where f.id = any (p_ids) order by f.id;
  else
    return query
      select {{claimed_columns}}, null::text
      from unnest(p_ids) with ordinality u (id, n)
      cross join lateral (select c.* from queue.claimed_job c where c.id = u.id offset 0) c
      order by u.n;
  end if;
end $$;
