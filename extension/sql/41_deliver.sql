-- Delivering: what is claimed gets to its worker.
--
-- The rows of an answer travel before its transaction ends: a client that stops reading (frozen, a stalled network) keeps the
-- transaction open, with all its locks, for as long as TCP takes. So an answer is never larger than what the sockets' buffers take
-- in any case: 64 kB. What is claimed beyond that is put aside in queue.undelivered, and the next fetch of the worker hands it out, in
-- a transaction that holds nothing but the rows that say so: neither ADM nor claims, so that a worker which freezes over them is
-- given up as any other. A claim that was never handed out counts as released, whatever becomes of the worker.
--
-- pgdefer.undelivered, a setting of the session, names the worker for whom something is aside, so that other fetches need not look
-- for it. Another session looks once, and when it finds nothing to claim (behind a transaction pooler).

-- Locks, here and in who calls this: a fetch that puts aside holds the rows of queue.live that it has claimed, and ADM if it took it; its
-- rows of queue.undelivered are new, so that nobody waits for them. A fetch that hands out holds rows of queue.undelivered alone, which
-- reap and before_sleep pass by. A fetch that meets expired claims ends these, and hands out nothing.
-- Why nothing is lost: a claim and its row here commit together, so each claim is handed out by the fetch that made it or has a row. The
-- row goes in the transaction that hands the claim out, and comes back with it where that fails. What ends a claim meanwhile (reap, abort,
-- retry with force) takes its row of queue.live and leaves the one here: the pair is no longer the current one, and is passed by.
-- Two sessions: deliver_reap.spec.

-- Has the next fetch of this session hand out what is aside for a worker, if anything is.
-- Locks: none. Why nothing is overlooked: a session looks at its first fetch, and whenever it finds nothing to claim.
create or replace function queue._look_aside(p_worker bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if exists (select from queue.undelivered u where u.worker_id = p_worker) then
    perform set_config('pgdefer.undelivered', p_worker::text, false);
  end if;
end $$;

-- How many jobs to claim where a worker asks for many: as many as fitted into this session's last answer that was full, and an
-- eighth more each time that these left room for it, as it costs more to put jobs aside than to ask again.
create or replace function queue._fitting(p_max_jobs integer)
returns integer language plpgsql stable parallel safe security invoker as $$
begin
  return least(p_max_jobs, nullif(current_setting('pgdefer.fitting', true), '')::integer);
end $$;

-- Of claimed jobs, in claim order, those that fit into one answer, of which each takes about 120 bytes beside its args and headers;
-- the others are put aside. p_are_first: as first_claim of _claim, so that most often one sum tells that all fit.
-- Locks: none that another waits for; the transaction holds the rows of queue.live, maybe ADM.
-- Why no wake-up is lost: a worker that gets none of what was claimed may be on its way to sleep, and is told to fetch again.
create or replace function queue._put_aside(p_worker bigint, p_ids bigint[], p_are_first boolean)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
  v_total bigint;
begin
  if p_ids is null or p_ids = '{}' then
    perform queue._look_aside(p_worker);
    return p_ids;
  elsif p_are_first then
    select sum(octet_length(l.args::text) + octet_length(l.task) + coalesce(pg_column_size(l.given), 0) + 120) into v_total
    from queue.log l where l.id = any (p_ids);
    if v_total <= 65536 then
      if v_total <= 57344 and cardinality(p_ids) >= nullif(current_setting('pgdefer.fitting', true), '')::integer then
        perform set_config('pgdefer.fitting', (cardinality(p_ids) + cardinality(p_ids) / 8)::text, false);
      end if;
      return p_ids;
    end if;
  end if;
  select array_agg(x.id order by x.n) filter (where x.total <= 65536) as ids, array_agg(x.id order by x.n) filter (where x.total > 65536) as rest,
    array_agg(x.size order by x.n) filter (where x.total > 65536) as sizes
  into v
  from (
    select u.id, u.n, j.size, sum(j.size + 120) over (order by u.n) as total
    from unnest(p_ids) with ordinality u (id, n)
    cross join lateral (
      select coalesce(s.size, j.size, octet_length(j.args::text)) + octet_length(j.task) + octet_length(coalesce(s.queue, j.queue))
        + coalesce(octet_length(coalesce(s.lock, j.lock)), 0) as size
      from queue.job j left join queue.job_state s on s.id = j.id where j.id = u.id offset 0) j) x;
  if v.rest is not null then
    insert into queue.undelivered (worker_id, id, claim, size, is_alone)
    select p_worker, u.id, v.claim, u.size, v.flags & 16 <> 0
    from unnest(v.rest, v.sizes) with ordinality u (id, size, n)
    cross join lateral (select v.claim, v.flags from queue.live v where v.id = u.id offset 0) v
    order by u.n;
    perform set_config('pgdefer.undelivered', p_worker::text, false), set_config('pgdefer.fitting', greatest(cardinality(v.ids), 30)::text, false);
    if v.ids is null then
      perform queue._announce();
    end if;
  end if;
  return v.ids;
end $$;

-- What is aside for a worker, in claim order: at most p_n jobs, up to 4 MB, or one job; what must run alone goes to a fetch that asks
-- for that. It is no longer aside; some claims may have ended meanwhile. NULL: there is none.
-- Where some may start no longer, these are given back instead, and none is handed out (ids is empty): large rows must not travel
-- while a claim's row is held.
-- Locks: rows of queue.undelivered by skip locked; if any may start no longer, then rows of queue.live by skip locked, never ADM.
-- Why no wake-up is lost: the end of a claim is handed over as by succeed; what is left aside before_sleep sees, and who is on
-- its way to sleep is told to fetch again.
-- Raises: 22023, QJ007.
create or replace function queue._deliver(p_worker bigint, p_n integer, p_options jsonb, out ids bigint[], out claims bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_is_alone constant boolean := coalesce(p_options -> 'alone' <> 'false', false);
begin
  perform queue._check_max_jobs(p_n);
  if not exists (select from queue.worker w where w.id = p_worker and w.gone_at is null) then
    perform queue._worker_gone(p_worker);
  elsif queue._give_back_aside(p_worker) then
    ids := '{}'::bigint[];
  else
    with aside as (
      select u.no, u.size from queue.undelivered u
      where u.worker_id = p_worker and u.is_alone = v_is_alone and queue._may_start(u.id)
      order by u.no for update skip locked),
    gone as (
      delete from queue.undelivered u
      where u.worker_id = p_worker and u.no in (
        select a.no from (select a.no, sum(a.size) over (order by a.no) as total, row_number() over (order by a.no) as n from aside a) a
        where a.n = 1 or a.total <= 4000000 and a.n <= p_n)
      returning u.no, u.id, u.claim)
    select array_agg(g.id order by g.no), array_agg(g.claim order by g.no) into ids, claims from gone g;
  end if;
  if not exists (select from queue.undelivered u where u.worker_id = p_worker) then
    perform set_config('pgdefer.undelivered', '', false);
  end if;
end $$;

-- Whether a claimed job may start: it has not expired, and neither its queue nor its task is paused.
create or replace function queue._may_start(p_id bigint)
returns boolean language plpgsql volatile parallel safe security invoker as $$
#variable_conflict use_column
begin
  if exists (select from queue.expiry e where e.id = p_id and e.at <= clock_timestamp()) then
    return false;
  end if;
  return not exists (select from queue.pause p where p.is_paused) or (
    select greatest(queue._paused_until(coalesce(s.queue, j.queue)), queue._task_paused_until(j.task, coalesce(s.queue, j.queue)))
             > clock_timestamp() is not true
    from queue.job j left join queue.job_state s on s.id = j.id where j.id = p_id);
end $$;

-- Releases what is aside for a worker and may start no longer: one that has expired is cancelled by that. Returns whether there was
-- any. A claim that another transaction is at stays aside and is not handed out: the next look finds whether it has ended.
-- Locks: rows of queue.undelivered, then of queue.live, by skip locked.
create or replace function queue._give_back_aside(p_worker bigint)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_claim record;
  v_has_any boolean := false;
begin
  for v_claim in
    select u.no, u.id, u.claim from queue.undelivered u
    where u.worker_id = p_worker and not queue._may_start(u.id)
    order by u.id for update skip locked
  loop
    perform from queue.live v where v.id = v_claim.id and v.claim = v_claim.claim for update skip locked;
    if found then
      perform queue._end_attempt('{"outcome": "released"}', v_claim.id, v_claim.claim, false);
      v_has_any := true;
    end if;
    delete from queue.undelivered u
    where u.worker_id = p_worker and u.no = v_claim.no
      and not exists (select from queue.live v where v.id = v_claim.id and v.claim = v_claim.claim);
  end loop;
  if v_has_any then
    perform queue._announce();
  end if;
  return v_has_any;
end $$;
