-- Delivering: claimed jobs are returned to their worker.
--
-- The rows of an answer travel before its transaction ends. A client that stops reading (frozen, or on a
-- stalled network) keeps the transaction open, with all its locks, for as long as TCP takes. So an answer is
-- never larger than what the sockets' buffers always take: 64 kB. Further claims are kept undelivered, in
-- queue.undelivered. The next fetch of the worker hands them out, in a transaction that holds only these
-- rows: neither the admission lock nor claims. So a worker that freezes meanwhile is declared dead like any
-- other. A claim that was never handed out counts as released, whatever happens to the worker.
--
-- pgdefer.undelivered, a setting of the session, names the worker that has undelivered claims, so that other
-- fetches need not look for them. A new session looks once, and whenever it finds nothing to claim (behind a
-- transaction pooler).
--
-- The worker does not know of undelivered claims. It may not fetch for long: it stops, or its slots have
-- become full, partly with jobs that were claimed ahead. So a claim that was not fetched in time (macro
-- is_stale) is released, because the job's timeout counts from the claim. Any maintenance does this
-- (_release_stale, work/reap.sql), the worker's next fetch at the latest.

-- Locks, here and in callers: a fetch that keeps claims undelivered holds the rows of queue.active_job that
-- it has claimed, and the admission lock if it took it. Its rows of queue.undelivered are new, so nobody
-- waits for them. A fetch that hands out holds only rows of queue.undelivered, which reap and before_sleep
-- skip. A fetch that meets expired claims ends these, and hands out nothing.
-- Why nothing is lost: a claim and its row here commit together, so each claim is either handed out by the
-- fetch that made it or has a row. The transaction that hands the claim out deletes the row; if it fails, the
-- row is still there. If the claim ends meanwhile (reap, abort, retry with force), its row of
-- queue.active_job goes and the row here stays: its pair is no longer current, so it is skipped.
-- Two sessions: work/deliver.reap.spec.

-- Whether a claimed job may start: it has not expired, its worker was not told to abort it, its claim is not
-- stale, and neither its queue nor its task is paused.
create or replace function queue._may_start(p_id bigint, p_claim bigint, p_size integer)
returns boolean language plpgsql volatile parallel safe security invoker as $$
begin
  if exists (select from queue.expiry e where e.id = p_id and e.at <= clock_timestamp())
    or exists (select from queue.abort a where a.id = p_id and a.claim = p_claim)
    or exists (select from queue.active_job aj
      cross join (values (p_id, p_claim, p_size)) u (id, claim, size) where {{is_stale}}) then
    return false;
  end if;
  return not exists (select from queue.pause p where p.is_paused) or (
    select greatest(queue._paused_until(j.queue), queue._task_paused_until(j.task, j.queue))
             > clock_timestamp() is not true
    from queue.job_now j where j.id = p_id);
end $$;

-- Releases undelivered claims of a worker that may no longer start; this cancels an expired or aborted job.
-- Returns whether there was any. A claim whose row another transaction holds stays undelivered; the next call
-- finds out whether it has ended.
-- Locks: rows of queue.undelivered, then of queue.active_job, by skip locked.
create or replace function queue._give_back_undelivered(p_worker bigint)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_claim record;
  v_has_any boolean := false;
begin
  for v_claim in
    select u.no, u.id, u.claim from queue.undelivered u
    where u.worker_id = p_worker and not queue._may_start(u.id, u.claim, u.size)
    order by u.id for update skip locked
  loop
    perform from queue.active_job aj where aj.id = v_claim.id
      and aj.claim = v_claim.claim for update skip locked;
    if found then
      perform queue._end_attempt('{"outcome": "released"}', v_claim.id, v_claim.claim, false);
      v_has_any := true;
    end if;
    delete from queue.undelivered u
    where u.worker_id = p_worker and u.no = v_claim.no
      and not exists (select from queue.active_job aj where aj.id = v_claim.id and aj.claim = v_claim.claim);
  end loop;
  if v_has_any then
    perform queue._announce();
  end if;
  return v_has_any;
end $$;

-- Makes the next fetch of this session hand out the undelivered claims of a worker, if there are any.
-- Locks: none. Why nothing is missed: a session looks at its first fetch, and whenever it finds nothing to
-- claim.
create or replace function queue._look_for_undelivered(p_worker bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if exists (select from queue.undelivered u where u.worker_id = p_worker) then
    perform set_config('pgdefer.undelivered', p_worker::text, false);
  end if;
end $$;

-- Returns those of the claimed jobs, in claim order, that fit into one answer, and keeps the others
-- undelivered. Each takes about 120 bytes (row_bytes) in addition to its args, headers and steps.
-- p_are_first: as first_claim of _claim_newcomer, so that usually one sum shows that all fit.
-- Locks: none that another transaction waits for; the transaction holds the rows of queue.active_job, and
-- maybe the admission lock.
-- Why no wake-up is lost: a worker that gets none of the claimed jobs may be about to sleep, and is told to
-- fetch again.
create or replace function queue._keep_undelivered(p_worker bigint, p_ids bigint[], p_are_first boolean)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_fit record;
  v_total bigint;
begin
  if p_ids is null or p_ids = '{}' then
    perform queue._look_for_undelivered(p_worker);
    return null;
  elsif p_are_first then
    select sum(octet_length(l.args::text) + octet_length(l.task) + coalesce(pg_column_size(l.job_options), 0)
      + {{row_bytes}}) into v_total
    from queue.log l where l.id = any (p_ids);
    if v_total <= {{answer_bytes}} then
      -- There is room for an eighth more such jobs.
      if v_total <= {{answer_bytes}} / 8 * 7
        and cardinality(p_ids) >= nullif(current_setting('pgdefer.fitting', true), '')::integer then
        perform set_config('pgdefer.fitting', (cardinality(p_ids) + cardinality(p_ids) / 8)::text, false);
      end if;
      return p_ids;
    end if;
  end if;
  select array_agg(x.id order by x.n) filter (where x.total <= {{answer_bytes}}) as ids,
    array_agg(x.id order by x.n) filter (where x.total > {{answer_bytes}}) as rest,
    array_agg(x.size order by x.n) filter (where x.total > {{answer_bytes}}) as sizes
  into v_fit
  from (
    select u.id, u.n, j.size, sum(j.size + {{row_bytes}}) over (order by u.n) as total
    from unnest(p_ids) with ordinality u (id, n)
    cross join lateral (
      select coalesce(j.size, octet_length(j.args::text)) + octet_length(j.task)
        + octet_length(j.queue) + coalesce(octet_length(j.lock), 0)
        + case when j.has_steps then coalesce(octet_length(queue._steps(j.id)::text), 0) else 0 end as size
      from queue.job_now j where j.id = u.id offset 0) j) x;
  if v_fit.rest is not null then
    insert into queue.undelivered (worker_id, id, claim, size)
    select p_worker, u.id, aj.claim, u.size
    from unnest(v_fit.rest, v_fit.sizes) with ordinality u (id, size, n)
    cross join lateral (select aj.claim from queue.active_job aj where aj.id = u.id offset 0) aj
    order by u.n;
    perform set_config('pgdefer.undelivered', p_worker::text, false),
      set_config('pgdefer.fitting', greatest(cardinality(v_fit.ids), {{always_fit}})::text, false);
    if v_fit.ids is null then
      perform queue._announce();
    end if;
  end if;
  return v_fit.ids;
end $$;

-- Returns undelivered claims of a worker, in claim order: at most p_n jobs, up to 4 MB, or one job. They
-- count as delivered; some may have ended meanwhile. NULL: there are none.
-- If some may no longer start, these are given back instead, and none is handed out (ids is empty): large
-- rows must not travel while a claim's row is held.
-- Locks: rows of queue.undelivered by skip locked; if some may no longer start, then rows of queue.active_job
-- by skip locked, never the admission lock.
-- Why no wake-up is lost: the end of a claim is handed over as by succeed. before_sleep sees claims that are
-- still undelivered, and a worker about to sleep is told to fetch again.
-- Raises: 22023, QJ007.
create or replace function queue._deliver(p_worker bigint, p_n integer, out ids bigint[], out claims bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._check_max_jobs(p_n);
  if not exists (select from queue.worker w where w.id = p_worker and w.gone_at is null) then
    perform queue._worker_gone(p_worker);
  elsif queue._give_back_undelivered(p_worker) then
    ids := '{}'::bigint[];
  else
    with deliverable as (
      select u.no, u.size from queue.undelivered u
      where u.worker_id = p_worker and queue._may_start(u.id, u.claim, u.size)
      order by u.no for update skip locked),
    gone as (
      delete from queue.undelivered u
      where u.worker_id = p_worker and u.no in (
        select a.no from (select a.no, sum(a.size) over (order by a.no) as total,
          row_number() over (order by a.no) as n from deliverable a) a
        where a.n = 1 or a.total <= 4000000 and a.n <= p_n)
      returning u.no, u.id, u.claim)
    select array_agg(g.id order by g.no), array_agg(g.claim order by g.no) into ids, claims from gone g;
  end if;
  if not exists (select from queue.undelivered u where u.worker_id = p_worker) then
    perform set_config('pgdefer.undelivered', '', false);
  end if;
end $$;
