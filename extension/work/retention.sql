-- Retention: finished jobs are removed when their time has passed, unless an unfinished job needs them. A job
-- with steps may still await the jobs that it has deferred, so these are kept until it has ended. _retention
-- (admit/retain.sql) says how long a job is kept.

-- Locks: the admission lock, waited for, so that no new job needs a removed one; rows of finished jobs by
-- skip locked. Others can't fetch meanwhile, so a call ends after a second, or 10,000 jobs. With a state, it
-- looks for the jobs before it takes the lock, because many of them may be needed. Without a state, a round
-- that removes nothing does not end the call: it may have found only jobs whose retention was made longer
-- since.
-- Raises: 22023, 42501 (for the audit, if the caller lacks the owner's rights), QJ008.
create or replace function queue.prune(max_jobs integer default 10000, state text default null,
  older_than interval default null)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner_brin}} as $$
declare
  v_max_jobs integer := least(prune.max_jobs, 10000);
  v_finished_until timestamptz;
  v_ids bigint[];
  v_until timestamptz;
  v_safe_at timestamptz;
  v_pruned integer := 0;
begin
  {{installed}}
  perform queue._check_isolation();
  perform queue._check_max_jobs(prune.max_jobs);
  if not prune.state = any ('{succeeded,failed,cancelled,audit}'::text[]) then
    perform queue._invalid('state is not one of its values', 'Allowed: succeeded, failed, cancelled, audit.',
      'state: ' || left(prune.state, 200));
  elsif prune.older_than is not null and prune.state is null then
    perform queue._invalid('older_than needs a state', 'Say which: succeeded, failed or cancelled.');
  end if;
  perform queue._check_interval('older_than', prune.older_than);
  if prune.state = 'audit' then
    v_pruned := queue._prune_audit(prune.max_jobs, prune.older_than);
  else
    v_finished_until := clock_timestamp() - coalesce(prune.older_than, interval '0');
    v_ids := queue._prunable(v_max_jobs, prune.state, v_finished_until) where prune.state is not null;
    perform queue._lock_admission(true);
    v_safe_at := queue._safe_at();
    perform queue._admit_all(queue._new_dependents());
    perform queue._forget_deleted();
    perform queue._prune_events(v_max_jobs, v_safe_at);
    perform queue._prune_groups(v_max_jobs);
    perform queue._prune_idempotency_keys(v_max_jobs);
    v_until := clock_timestamp() + interval '1 s';
    if prune.state is not null then
      v_pruned := queue._prune_state(v_ids, v_max_jobs, prune.state, v_finished_until, v_until);
    else
      for v_no in 1 .. 5 loop
        v_pruned := v_pruned + queue._prune(least(2000, v_max_jobs - v_pruned), v_safe_at);
        exit when v_pruned = v_max_jobs or clock_timestamp() > v_until;
      end loop;
    end if;
  end if;
  perform queue._audit('prune', jsonb_build_object('max_jobs', prune.max_jobs, 'state', prune.state,
    'older_than', prune.older_than), p_before => jsonb_build_object('pruned', v_pruned));
  return v_pruned;
end $$;
comment on function queue.prune(integer, text, interval) is
  'Removes finished jobs whose retention has passed, at most max_jobs, and returns their number. One call'
    ' removes at most 10,000 jobs, and ends after about a second, because workers wait for it meanwhile.'
    ' Call it again, each time in a new transaction, until it returns 0. With a state it removes jobs in'
    ' that state that finished at least older_than ago, whatever their retention. Jobs that unfinished jobs'
    ' need are kept, and the children of jobs that run or have steps. If an uncommitted job names a removed'
    ' one as a need, the old state counts. State audit: it removes rows of queue.audit of at least that age;'
    ' only the owner may do this.';

-- p_safe_at: the result of _safe_at, called before all visible jobs with needs were admitted. A job whose end
-- has been handed over since then is not settled yet, and is kept.
-- Locks: the caller holds the admission lock; rows of queue.finished by skip locked.
create or replace function queue._prune(p_max_jobs integer, p_safe_at timestamptz)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_until timestamptz := least(v_now, p_safe_at);
  v_ids bigint[];
  v_kept bigint[];
begin
  with due as materialized (
    select f.id, f.purge_at from queue.finished f where f.purge_at <= v_until
    order by f.purge_at limit p_max_jobs::bigint + 1000 for update skip locked),
  old as materialized (
    select f.id from queue.finished f
    where f.purge_at is null and f.state = 'succeeded'
      and f.finished_at < v_until - interval '{{keep_succeeded}}'
    limit p_max_jobs::bigint + 1000 for update skip locked),
  asked as materialized (
    select a.id, a.purge_at, queue._is_needed(a.id)
      or a.id = any (array(select h.job_id from queue.unsettled h)) as is_needed
    from (select d.id, d.purge_at from due d union all select o.id, null from old o) a)
  select array(select a.id from asked a where not a.is_needed order by a.purge_at limit p_max_jobs),
    array(select a.id from asked a where a.is_needed)
  into v_ids, v_kept;
  if cardinality(v_kept) >= 1000 then
    -- There are so many that reading them each time would cost too much.
    update queue.finished f set purge_at = v_now + interval '1 minute' where f.id = any (v_kept);
  end if;
  -- A queue's retention may have been set since, or purge_at may have been put off above.
  with kept as (
    update queue.finished f set purge_at = f.finished_at + queue._retention(f.id)
    where f.id = any (v_ids) and (f.finished_at + queue._retention(f.id) <= v_now) is not true
    returning f.id)
  select array(select u.id from unnest(v_ids) u (id) where u.id not in (select k.id from kept k))
  into v_ids;
  perform queue._delete_rows(v_ids);
  return cardinality(v_ids);
end $$;

-- Since when 10,000 jobs have been due for removal, and an hour more; NULL if fewer are. Jobs that others
-- need are due and stay, so a few say nothing.
create or replace function queue._removal_overdue_since(p_now timestamptz)
returns timestamptz language plpgsql stable parallel safe security invoker {{planner_brin}} as $$
begin
  return least(
    (select f.purge_at from queue.finished f
     where f.purge_at < p_now order by f.purge_at offset 10000 limit 1),
    (select f.finished_at + interval '{{keep_succeeded}}' from queue.finished f
     where f.purge_at is null and f.state = 'succeeded'
       and f.finished_at < p_now - interval '{{keep_succeeded}}' - interval '1 hour' offset 10000 limit 1))
    + interval '1 hour';
end $$;

-- Whether many jobs are new: over 100, or a backlog of more than one part. It reads one part at most: each
-- holds 1,000 jobs or fewer, and many of these may have been admitted.
create or replace function queue._has_many_new()
returns boolean language plpgsql stable parallel safe security invoker {{planner}} as $$
begin
  return exists (select from queue.backlog)
    or exists (select from queue.backlog_part offset 1)
    or exists (select from queue.unadmitted offset 100);
end $$;

-- Removes what is due, after one in 500 claims. A worker that is never idle runs no other maintenance than
-- that of heartbeat, and ends more jobs than that can remove. So here up to two jobs go for each one that
-- starts. If few went, the session looks again only after a minute, because a look may read all failed jobs.
-- If there are many new jobs, it leaves them to fetches, which claim as they admit (work/claim_slice.sql). An
-- error is a warning, as in _maintain.
-- Locks: the admission lock by try; then as _prune. Why no wake-up is lost: it admits as a fetch does, so the
-- next fetch finds what became ready, that of this worker at the latest.
create or replace function queue._prune_in_pace()
returns void language plpgsql volatile parallel unsafe security invoker {{planner_brin}} as $$
declare
  v_epoch double precision := date_part('epoch', clock_timestamp());
  v_safe_at timestamptz;
  v_pruned integer;
begin
  if abs(v_epoch - coalesce(nullif(current_setting('pgdefer.pruned_at', true), '')::double precision, 0)) < 60
    or queue._has_many_new()
    -- A settlement that this transaction has handed over may need an old job.
    or exists (select from queue.pending_settlement h where h.xid = pg_current_xact_id_if_assigned())
    or not queue._lock_admission(false) then
    return;
  end if;
  v_safe_at := queue._safe_at();
  perform from queue._admit(1000);
  if not exists (select from queue.unadmitted) then  -- one of them might need an old job
    v_pruned := queue._prune(1000, v_safe_at);
    perform queue._prune_idempotency_keys(1000);
    perform queue._forget_semaphores();
    if v_pruned < 100 then
      perform set_config('pgdefer.pruned_at', v_epoch::text, false);
    end if;
  end if;
exception when others then
  raise warning 'pgdefer: pruning failed: % (%)', sqlerrm, sqlstate;
end $$;

-- Jobs in a state that have finished by a time and that no job needs, as far as can be seen without a lock.
-- Locks: none; _prune_found asks again. Two sessions: work/retention.found.spec.
create or replace function queue._prunable(p_max_jobs integer, p_state text, p_finished_until timestamptz)
returns bigint[] language plpgsql stable parallel safe security invoker as $$
begin
  return array(
    select f.id from queue.finished f
    where f.state = p_state and f.finished_at <= p_finished_until and not queue._is_needed(f.id)
      and f.id <> all (array(
        select h.job_id from queue.pending_settlement h where h.xid = {{shelved}}))
    limit p_max_jobs);
end $$;

-- Removes the jobs that _prunable has found, in rounds, until a time, and returns their number. If it found
-- as many as it was asked for, and some of them have been removed or needed since, it looks again: there may
-- be others.
-- Locks: as _prune_found.
create or replace function queue._prune_state(p_ids bigint[], p_max_jobs integer, p_state text,
  p_finished_until timestamptz, p_until timestamptz)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[] := p_ids;
  v_pruned integer := 0;
begin
  for v_search in 1 .. 2 loop
    for v_no in 1 .. ceil(cardinality(v_ids) / 2000.0) loop
      v_pruned := v_pruned + queue._prune_found(v_ids[v_no * 2000 - 1999 : v_no * 2000], p_state,
        p_finished_until);
      exit when clock_timestamp() > p_until;
    end loop;
    exit when v_pruned = p_max_jobs or cardinality(p_ids) < p_max_jobs or clock_timestamp() > p_until;
    v_ids := queue._prunable(p_max_jobs - v_pruned, p_state, p_finished_until);
  end loop;
  return v_pruned;
end $$;

-- Removes those of the jobs that _prunable has found that still fit. Returns their number.
-- Locks: the caller holds the admission lock; rows of queue.finished by skip locked.
create or replace function queue._prune_found(p_ids bigint[], p_state text, p_finished_until timestamptz)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[] := array(
    select f.id from queue.finished f
    where f.id = any (p_ids) and f.state = p_state and f.finished_at <= p_finished_until
      and not queue._is_needed(f.id)
      and f.id <> all (array(select h.job_id from queue.unsettled h))
    for update skip locked);
begin
  -- A transaction that names one of them as a need may not have committed yet.
  insert into queue.deleted (id) select u.id from unnest(v_ids) u (id) where p_state = 'succeeded';
  perform queue._delete_rows(v_ids);
  return cardinality(v_ids);
end $$;

-- Whether an unfinished job needs this one, or may await it as its child. A job with steps may await its
-- children; so may a job that runs, because it may be in its first step.
create or replace function queue._is_needed(p_id bigint)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  perform from queue.need d
  left join lateral (select f.id from queue.finished f where f.id = d.job_id offset 0) f on true
  where d.need_id = p_id and f.id is null limit 1;
  return found or exists (
    select from queue.job j
    cross join lateral (select (j.options ->> 'parent')::bigint as id) p
    where j.id = p_id and p.id is not null
      and (exists (select from queue.step s where s.job_id = p.id)
        or exists (select from queue.active_job aj where aj.id = p.id and aj.claim is not null))
      and not exists (select from queue.finished f where f.id = p.id));
end $$;

-- The time up to which retention may count. Every transaction has ended that began a wait, or named a job as
-- a need, before that time (_check_needs refuses the need afterwards). What these committed is visible, so
-- _prune sees it once all visible jobs with needs are admitted, and _prune_events after an admission. If no
-- other transaction has an xid, it is now. Else it is the last recorded time before which every transaction
-- has ended.
-- Locks: the caller holds the admission lock.
create or replace function queue._safe_at()
returns timestamptz language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_old record;
  v_safe_at timestamptz;
begin
  select h.looked_at, h.looked_xid, h.safe_at, h.looked_xid < pg_snapshot_xmin(pg_current_snapshot())
    as is_over,
    greatest(h.looked_at, h.safe_at) > v_now as is_ahead into v_old
  from queue.horizon h;
  -- is_ahead: the clock was set back, so the recorded times do not count.
  v_safe_at := case when v_old.is_ahead then '-infinity' when v_old.is_over then v_old.looked_at
    else v_old.safe_at end;
  if v_old.is_ahead or v_old.is_over and v_old.looked_at < now() - interval '1 s' then
    update queue.horizon h set looked_at = now(), looked_xid = pg_current_xact_id(), safe_at = v_safe_at;
  end if;
  if v_safe_at > v_now - interval '1 minute'
    and not exists (select from queue.finished f where f.purge_at > v_safe_at and f.purge_at <= v_now)
    and not exists (select from queue.event e where e.expires_at > v_safe_at and e.expires_at <= v_now) then
    return v_safe_at;
  end if;
  perform from pg_locks l
  left join pg_stat_activity a on a.pid = l.pid
  left join pg_prepared_xacts p on l.pid is null and p.transaction = l.transactionid
  where l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and l.granted
    and l.pid is distinct from pg_backend_pid()
    and (a.datname = current_database() and a.backend_type is distinct from 'autovacuum worker'
      or p.database = current_database())
  limit 1;
  return case when found then v_safe_at else v_now end;
end $$;

-- Removes every trace of jobs that are finished and in no gate. Finished jobs that needed them and may be
-- retried keep a record of their state.
-- Locks: the caller holds the admission lock and the rows of queue.finished.
create or replace function queue._delete_rows(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._count_ends_of(p_ids, true);
  update queue.need d
  set deleted_state = (select case f.state when 'succeeded' then 'succeeded' else 'failed' end
    from queue.finished f where f.id = d.need_id)
  where d.ctid = any (array(
    select d.ctid from unnest(p_ids) u (id)
    cross join lateral (select f.id from queue.finished f where f.id = u.id offset 0) f
    cross join lateral (select d.ctid, d.job_id from queue.need d where d.need_id = f.id offset 0) d
    where d.job_id not in (select unnest(p_ids))));
  delete from queue.need d where d.job_id = any (p_ids);
  delete from queue.awaited a
  where a.ctid = any (array(select a.ctid from queue.awaited a
    where a.id = any (p_ids) for update skip locked));
  delete from queue.finished f where f.id = any (p_ids);
  delete from queue.attempt a where a.job_id = any (p_ids);
  delete from queue.job_override s where s.id = any (p_ids);
  delete from queue.step s where s.job_id = any (p_ids);
  delete from queue.suspended s where s.job_id = any (p_ids);
  delete from queue.received_signal r where r.job_id = any (p_ids);
  delete from queue.stream_item i where i.job_id = any (p_ids);
  delete from queue.group_member m where m.job_id = any (p_ids);
  delete from queue.log l where l.id = any (p_ids);
end $$;

-- queue.deleted keeps the ids of removed jobs that had succeeded, for jobs that need one of them and whose
-- transaction began before the removal. A row is removed once every such transaction has ended and its jobs
-- have been admitted.
-- Locks: the caller holds the admission lock.
create or replace function queue._forget_deleted()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.deleted d
  where d.until <= (select least(k.next_xid, k.in_flight[1]) from queue.cursor_now k)
    and not exists (select from queue.backlog) and not exists (select from queue.backlog_part);
  update queue.deleted d set until = pg_current_xact_id() where d.until is null;
end $$;
