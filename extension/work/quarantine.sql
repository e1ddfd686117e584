-- Quarantine: a job that has crashed before runs alone, because it may have killed its worker.
--
-- Such a job is ready in a lane of kind lane_crashed. fetch hands it out alone, to a worker that runs
-- nothing, and gives that worker no other job until it has ended. queue.worker records this in apart_since
-- and the columns after it. If apart_since is NULL and no lane of this kind is in sight, fetch takes the
-- ordinary paths, at no extra cost.
--
-- Why no job starves: a worker that runs nothing gets a quarantined job first, and the next time the others
-- first; so both get their turn while both are ready. A worker that always runs something would never take a
-- quarantined job. So if one has waited for 5 s since its crash, one worker that may run it runs dry: it
-- gets no more jobs until its own have ended. It does so for at most a quarter of the time that the job has
-- waited by then, or 30 s if that is longer. If that was too short, the worker takes jobs again for four
-- times as long, while another one may run dry. The other one does so for longer, because the job has waited
-- longer by then. So the job's turn comes within a small multiple of the duration of the longest jobs. At
-- most one worker of a queue runs dry at a time, for a fifth of its time.
--
-- To find out what a worker runs, queue.active_job is read: there is no index from a worker to its claims,
-- because each claim would pay for it. This is done only if a quarantined job is ready, and if it takes long,
-- for at most a twentieth of the time.
--
-- A worker must call fetch and finish_and_fetch one after another: two concurrent calls may give it a second
-- job.

-- What a worker may get: nothing; alone (a quarantined job of p_ready, quarantine lanes with ready jobs,
-- before others); either (others first, then a quarantined one); others only.
-- p_has_lock: without it no quarantined job can be claimed, and no worker begins to run dry.
-- p_tasks, p_before, p_only: as _claim_filtered, to see whether a worker that runs dry would get the job.
-- Locks: the worker's row by skip locked, because the holder of the admission lock never waits. If another
-- session has it (heartbeat), nothing changes until the next call.
-- Raises: QJ007.
create or replace function queue._may_claim(
  p_worker bigint, p_ready integer[], p_has_lock boolean, p_tasks text[] default null,
  p_before timestamptz default null, p_only bigint[] default null)
returns text language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_worker record;
  v_is_free boolean;
  v_waited interval;
begin
  select w.apart_since, w.apart_until, w.apart_id, w.apart_claim into v_worker
  from queue.worker w where w.id = p_worker and w.gone_at is null;
  if not found then
    perform queue._worker_gone(p_worker);
  elsif v_worker.apart_claim is not null then
    if exists (select from queue.active_job aj where aj.id = v_worker.apart_id
      and aj.claim = v_worker.apart_claim) then
      return 'nothing';
    end if;
    perform queue._set_apart(p_worker, null, null);
    return case when p_ready is null then 'others' else 'either' end;
  elsif v_worker.apart_since is not null
    and v_now > v_worker.apart_until + 4 * (v_worker.apart_until - v_worker.apart_since) then
    perform queue._set_apart(p_worker, null, null);
    v_worker.apart_since := null;
  end if;
  if p_ready is null then
    if v_worker.apart_since is not null then
      perform queue._set_apart(p_worker, null, null);
    end if;
    return 'others';
  end if;
  v_is_free := case when p_has_lock then queue._runs_nothing(p_worker) end;
  if v_is_free then
    return 'alone';
  elsif v_now <= v_worker.apart_until then
    return 'nothing';
  elsif v_worker.apart_since is not null or v_is_free is null then
    return 'others';
  end if;
  v_waited := v_now - queue._crashed_waits_since(p_worker, p_ready, p_tasks, p_before, p_only);
  if v_waited > interval '5 s' then
    return case when queue._set_apart(p_worker, v_now, v_now + greatest(v_waited / 4, interval '30 s'))
      then 'nothing' else 'others' end;
  end if;
  return 'others';
end $$;

-- The crash time of the quarantined job that has waited longest, among those that are ready for this worker
-- and in a queue for which no other worker runs dry. Reads the first 100 of a lane.
create or replace function queue._crashed_waits_since(
  p_worker bigint, p_lanes integer[], p_tasks text[], p_before timestamptz, p_only bigint[])
returns timestamptz language plpgsql volatile parallel unsafe security invoker as $$
begin
  return (
    select min((select a.finished_at from queue.attempt a where a.job_id = aj.id
      order by a.claim desc limit 1))
    from unnest(p_lanes) u (lane)
    cross join lateral (
      select l.lane, l.queue, l.low_deadline, l.low_id from queue.lane l where l.lane = u.lane offset 0) l
    cross join lateral (
      select aj.id, aj.deadline from queue.active_job aj
      where {{is_ready}}
      order by aj.deadline, aj.id limit 100) aj
    where (p_before is null or aj.deadline < p_before) and (p_only is null or aj.id = any (p_only))
      and (p_tasks is null or exists (select from queue.job j where j.id = aj.id and j.task = any (p_tasks)))
      and not exists (
        select from queue.worker w
        where w.apart_until >= clock_timestamp() and w.gone_at is null and w.id <> p_worker
          and (w.queues is null or exists (select from unnest(w.queues) q
            where queue._matches(l.queue, q)))));
end $$;

-- Whether a worker has no claim. If the search took long, it is not repeated too soon: until then the answer
-- is NULL, which makes no worker run dry. The first search of a session does not count, because it fills the
-- session's caches.
create or replace function queue._runs_nothing(p_worker bigint)
returns boolean language plpgsql volatile parallel unsafe security invoker set enable_seqscan = on as $$
declare
  v_start double precision := date_part('epoch', clock_timestamp());
  v_after double precision := nullif(current_setting('pgdefer.look_after', true), '')::double precision;
  v_took double precision;
  v_is_idle boolean;
begin
  if v_after between v_start and v_start + 60 then
    return null;
  end if;
  v_is_idle := not exists (select from queue.active_job aj where aj.worker_id = p_worker
    and aj.claim is not null);
  v_took := date_part('epoch', clock_timestamp()) - v_start;
  if v_after is null then
    perform set_config('pgdefer.look_after', '0', false);
  elsif v_took > 0.005 then
    perform set_config('pgdefer.look_after', (v_start + 20 * v_took)::text, false);
  end if;
  return v_is_idle;
end $$;

-- Claims one quarantined job, which then runs alone, from lanes in the given order. NULL: there is none.
-- p_tasks, p_before, p_only: as _claim_filtered.
-- Locks: as _claim_limited; before it the worker's row by skip locked, so that no job runs alone without a
-- record of it.
create or replace function queue._claim_alone(
  p_worker bigint, p_lanes integer[], p_tasks text[] default null, p_before timestamptz default null,
  p_only bigint[] default null)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[];
begin
  if p_lanes is null or not queue._set_apart(p_worker, null, null) then
    return null;
  elsif num_nonnulls(p_tasks, p_before, p_only) > 0 then
    v_ids := queue._claim_filtered(p_worker, p_lanes, 1, p_tasks, p_before, p_only);
  else
    v_ids := queue._claim_limited(p_worker, p_lanes, 1);
  end if;
  if v_ids = '{}' then
    return null;
  end if;
  update queue.worker w set apart_since = aj.claimed_at, apart_id = aj.id, apart_claim = aj.claim
  from queue.active_job aj where w.id = p_worker and aj.id = v_ids[1];
  return v_ids;
end $$;

-- Records that a worker runs dry, or no longer does (NULL); false: another session has its row locked now.
-- Locks: the worker's row by skip locked.
create or replace function queue._set_apart(p_worker bigint, p_since timestamptz, p_until timestamptz)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.worker w set apart_since = p_since, apart_until = p_until, apart_id = null, apart_claim = null
  where w.ctid = any (array(select w.ctid from queue.worker w where w.id = p_worker for update skip locked));
  return found;
end $$;

-- Returns the quarantine lanes that hold a ready job which its queue allows to start, in the order of fetch;
-- NULL: none.
-- Locks: none.
create or replace function queue._quarantined_lanes(p_lanes integer[])
returns integer[] language plpgsql stable parallel safe security invoker as $$
begin
  return (select p.lanes
    from queue._probe_lanes(array(select l.lane from queue.lane l
    where l.lane = any (p_lanes) and l.kind = {{lane_crashed}})) p);
end $$;
