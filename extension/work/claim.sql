-- Claiming: a newcomer, one lane, or the full loop. finish.sql fences claims; their numbers: base/era.sql.
-- Tests: work/fetch.sql, work/claim.newcomers.spec, work/claim.two.spec.

-- Claims jobs: their ids in claim order, NULL for none. first_claim: the number of their claim, if that order
-- is the order of ids, none is large and all of them start for the first time, so that queue.first_run
-- describes them. p_may_wait: the transaction holds no row that the holder of the admission lock could need.
-- p_at_once: how many of p_max_jobs the worker starts at once, as _start_at_once; NULL: all.
-- Fast path for a mostly idle worker: at most one new job and no other work pending. No lane has a ready job,
-- nothing is due, handed over or left from before, no task is paused, and the newcomer is plain, without a
-- timeout or a deadline. It is claimed as it is admitted, in three short statements: most of the cost of a
-- single job is set-up of statements, in every transaction (ADR 1). All else is left to _claim_one_lane.
-- Locks: the admission lock by try, if this session's last fetch took only newcomers (the hint was_dry); then
-- as _claim_one_lane.
-- Why the newcomer can be claimed as it is inserted: under the admission lock no other job becomes ready, so
-- the first statement's findings hold for the others. Claim and cursor commit together: if they are rolled
-- back, the next admission finds the job again. A row that another session is claiming counts as ready,
-- because the claim may be rolled back. The clock of the claim is read after the snapshot.
-- Why no wake-up is lost: rows that are not new, or not visible yet, stay ahead of the cursor or among its
-- in_flight.
-- With a function of its own for the look, a job takes 3.7 % more instructions; for the claim, 1.0 % more.
-- In one piece (ADR 1): set-up of statements and calls is most of the cost of a single job.
create or replace function queue._claim_newcomer(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_options jsonb, p_may_wait boolean,
  p_at_once integer, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz;
  v_has_lock boolean := false;
  v_queues text[];
  v_tick bigint;
  v_in_flight xid8[];
  v_upto pg_snapshot;
  v_own xid8;
  v_claimed record;
begin
  if current_setting('pgdefer.was_dry', true) = 'on' and p_max_jobs > 0 and p_options is null
    and queue._lock_admission(false) then
    v_has_lock := true;
    v_now := clock_timestamp();
    if p_queues is not null then
      v_queues := queue._match_queues(p_queues);
    end if;
    -- "is true" and "is false" keep the probes subplans; otherwise joins would be set up
    select k.tick, k.in_flight, pg_current_snapshot(), pg_current_xact_id_if_assigned(),
      array(
        select j.id from queue.job j
        where (j.xid, j.id) > (k.next_xid, -9223372036854775808)
          and j.xid <= pg_snapshot_xmax(pg_current_snapshot())
          and pg_visible_in_snapshot(j.xid, pg_current_snapshot())
          and j.xid is distinct from pg_current_xact_id_if_assigned()
        limit 2)
    into v_tick, v_in_flight, v_upto, v_own, ids
    from queue.cursor k
    where not k.has_backlog and k.due_at <= v_now and pg_snapshot_xmax(pg_current_snapshot()) >= k.next_xid
      and exists (select from queue.worker w where w.id = p_worker and w.gone_at is null
        and w.apart_since is null) is true
      and exists (select from queue.pending_settlement h
        where h.xid >= coalesce(k.in_flight[1], k.next_xid)) is false
      and exists (select from queue.waiting w where w.at >= k.due_at and w.at <= v_now) is false
      and exists (select from queue.schedule c where c.due_at >= k.due_at and c.due_at <= v_now) is false
      and exists (select from queue.pause p where p.task is not null) is false
      and exists (
        select from queue.lane l
        cross join lateral (
          select from queue.active_job aj
          where aj.lane = l.lane and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id)
            and aj.claim is null limit 1) r
        where not l.is_idle and (v_queues is null or l.queue = any (v_queues))
          and (l.paused_until is null or l.paused_until <= v_now)) is false
    order by k.tick desc limit 1;
    if v_in_flight <> '{}' then
      if exists (select from unnest(v_in_flight) x (xid)
                 where pg_visible_in_snapshot(x.xid, v_upto) and x.xid is distinct from v_own
                   and exists (select from queue.job j where j.xid = x.xid)) then
        ids := null;  -- jobs deferred in a transaction that was in flight are new too
      end if;
    end if;
    if cardinality(ids) = 1 then
      insert into queue.active_job (id, deadline, lane, attempt, flags, claim, claimed_at, worker_id)
      select j.id, 'infinity', l.lane, 1, j.flags | l.extra_flags, nextval('queue.claim_seq'),
        clock_timestamp(), p_worker
      from queue.job j
      cross join lateral (
        select l.lane, l.extra_flags from queue.lane l
        where l.queue = j.queue and l.priority = j.priority and l.kind = {{lane_plain}} and not l.is_idle
          and l.paused_until is null and l.tag_base is null
          and (v_queues is null or l.queue = any (v_queues))
          and ('infinity', j.id) >= (l.low_deadline, l.low_id) limit 1) l
      where j.id = ids[1] and j.flags & ({{gated}} | {{needed}} | {{lease}} | {{large}} | {{overridden}}) = 0
        and j.deadline is null and (j.options ? 'share') is not true
        and j.id > coalesce(pg_sequence_last_value('queue.needed_seq'), 0)
      returning claim into first_claim;
      if first_claim is not null then
        update queue.cursor k
        set tick = v_tick + 1, next_xid = pg_snapshot_xmax(v_upto), high_id = greatest(k.high_id, ids[1]),
          in_flight = case when pg_snapshot_xmin(v_upto) < pg_snapshot_xmax(v_upto)
            then queue._in_flight(v_upto, v_own) else '{}' end
        where k.tick = v_tick;
        if first_claim % 300 = 0 then  -- once in a while
          perform queue._raise_marks(array(select l.lane from queue.lane l
            where not l.is_idle and l.kind = {{lane_plain}}));
        end if;
        return;
      end if;
    elsif ids = '{}' and clock_timestamp() - v_now < interval '2 ms' then
      -- a slow read met many rows that are not visible yet: _admit lets the cursor pass them
      ids := null;
      return;
    end if;
  end if;
  v_claimed := queue._claim_one_lane(p_worker, p_queues,
    case when p_max_jobs > 30 then queue._fitting(p_max_jobs) else p_max_jobs end, p_options, p_may_wait,
    v_has_lock, p_at_once);
  ids := v_claimed.ids;
  first_claim := v_claimed.first_claim;
end $$;

-- Claims ready jobs, and admits if that is due: every 10 ms, because newcomers may have a higher priority, or
-- if the admission lock is already held (p_has_lock). This function handles the most common case, one plain
-- lane with enough jobs; the rest is left to _claim_loop.
-- Locks: the admission lock by try; rows of queue.active_job by skip locked; the admission lock by try.
-- For why claims rise, and come after the jobs that they follow, see _claim_plain.
-- In one piece: with a function that claims one job, defer, fetch and succeed of it cost 1.1 % more.
create or replace function queue._claim_one_lane(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_options jsonb, p_may_wait boolean,
  p_has_lock boolean, p_at_once integer, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_queues text[];
  v_now timestamptz := clock_timestamp();
  v_has_lock boolean := p_has_lock;
  v_has_more boolean := false;
  v_admitted integer;
  v_is_claimed boolean := false;
  v_max_jobs integer := p_max_jobs;
  v_claimed record;
  v_choice record;
  v_attempt smallint;
  v_flags smallint;
  v_claimed_at timestamptz;
begin
  if p_max_jobs is null or p_max_jobs < 1 then
    perform queue._check_max_jobs(p_max_jobs);
  elsif p_options <> '{}' then
    ids := queue._claim_by_options(p_worker, p_queues, coalesce(p_at_once, p_max_jobs), p_options,
      p_may_wait);
    return;
  end if;
  if v_has_lock
    or abs(date_part('epoch',
      v_now) - coalesce(nullif(current_setting('pgdefer.looked_at', true), '')::double precision, 0)) >= 0.01
      and queue._lock_admission(false)
  then
    v_has_lock := true;
    select a.has_more, a.admitted into v_has_more, v_admitted from queue._admit(greatest(1000, p_max_jobs)) a;
    perform set_config('pgdefer.looked_at', date_part('epoch', v_now)::text, false);
  end if;
  if p_queues is not null then
    v_queues := queue._match_queues(p_queues);  -- admission may have found a new queue
  end if;
  select array_agg(l.lane) as lanes, max(l.kind) as kind into v_choice
  from queue.lane l
  where not l.is_idle and (v_queues is null or l.queue = any (v_queues))
    and (l.paused_until is null or l.paused_until <= v_now)
    and exists (select from queue.worker w where w.id = p_worker and w.gone_at is null
      and w.apart_since is null) is true;
  if v_choice.kind = {{lane_limited}} then
    v_max_jobs := least(p_max_jobs, p_at_once);
    if v_has_lock or queue._lock_admission(false) then
      select c.ids, c.first_claim into ids, first_claim
      from queue._claim_one_key(p_worker, v_choice.lanes, v_max_jobs) c;
    elsif not p_may_wait and cardinality(v_choice.lanes) = 1 then
      return;  -- nothing else is ready, and whoever holds the lock admits
    end if;  -- else _claim_loop waits, and then looks which lanes it may claim from
  elsif v_choice.kind = {{lane_plain}} and cardinality(v_choice.lanes) = 1 then
    v_is_claimed := true;
    if p_max_jobs = 1 then
      -- as _claim_plain, for one job
      update queue.active_job aj
      set claim = nextval('queue.claim_seq'), worker_id = p_worker, claimed_at = clock_timestamp(),
        attempt = aj.attempt + 1
      where aj.ctid = (
        select c.ctid
        from queue.lane l
        cross join lateral (
          select aj.ctid from queue.active_job aj
          where aj.lane = l.lane and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id) and aj.claim is null
          order by aj.deadline, aj.id limit 1 for update of aj skip locked) c
        where l.lane = v_choice.lanes[1] and l.kind = {{lane_plain}}
          and (l.paused_until is null or l.paused_until <= v_now))
      returning array[aj.id], aj.claim, aj.attempt, aj.flags, aj.claimed_at
      into ids, first_claim, v_attempt, v_flags, v_claimed_at;
      if v_flags & {{lease}} <> 0 then
        perform queue._lease_timeouts(ids, first_claim, v_claimed_at);
      end if;
      if v_attempt > 1 or v_flags & {{overridden}} <> 0 or v_flags < 0 then
        first_claim := null;
      end if;
    else
      v_claimed := queue._claim_plain(p_worker, v_choice.lanes, p_max_jobs);
      ids := v_claimed.ids;
      first_claim := v_claimed.first_claim;
    end if;
  end if;
  if cardinality(ids) = v_max_jobs then
    if v_has_lock then
      perform set_config('pgdefer.was_dry', case when v_admitted between 1 and p_max_jobs then 'on'
        else 'off' end, false);
    end if;
    if random() * 300 < least(v_max_jobs, 20) and queue._lock_admission(false) then
      perform queue._raise_marks(v_choice.lanes);
    end if;
    return;
  end if;
  select c.ids, c.first_claim into ids, first_claim
  from queue._claim_loop(p_worker, p_queues, p_max_jobs, p_may_wait, v_now, ids, first_claim, v_is_claimed,
    v_has_lock, v_has_more, v_admitted <= p_max_jobs is true, p_at_once) c;
end $$;

-- Continues what _claim_one_lane has begun. p_ids: claimed so far; p_is_claimed: these were all ready jobs,
-- so that more must be admitted first; p_has_lock: the admission lock is held and was used; p_has_more:
-- another admission would find more; p_is_dry: there were only newcomers.
-- While a limited job is ready, at most p_at_once are claimed: it would hold its slot while it waits.
-- Locks: as fetch.
-- Why no wake-up is lost: a call that finds nothing has looked under the admission lock, or another session
-- holds that lock and looks. Rows that others hold are theirs to finish or to hand over.
-- In one piece: each round of the loop passes all its variables to the next.
create or replace function queue._claim_loop(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_may_wait boolean, p_now timestamptz, p_ids bigint[],
  p_first_claim bigint, p_is_claimed boolean, p_has_lock boolean, p_has_more boolean, p_is_dry boolean,
  p_at_once integer, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_queues text[] := p_queues;
  v_has_lock boolean := p_has_lock;
  v_has_more boolean := p_has_more;
  v_is_dry boolean := p_is_dry;
  v_max_jobs integer := p_max_jobs;
  v_admit record;
  v_choice record;
  v_lanes integer[];  -- the lanes claimed from
  v_ready integer[];  -- of quarantined jobs
  v_turn text;
  v_claimed record;
begin
  ids := p_ids;
  first_claim := p_first_claim;
  if p_queues is not null then
    v_queues := queue._match_queues(p_queues);
  end if;
  for v_pass in 1 .. 100 loop
    if v_pass > 1 or not p_is_claimed then
      select array_agg(l.lane) as lanes, max(l.kind) as kind, array_agg(l.lane) as plain_lanes,
        exists (select from queue.worker w where w.id = p_worker and w.gone_at is null
          and w.apart_since is null) as is_free
      into v_choice
      from queue.lane l
      where not l.is_idle and (v_queues is null or l.queue = any (v_queues))
        and (l.paused_until is null or l.paused_until <= p_now);
      if not v_choice.is_free or v_choice.kind = {{lane_crashed}} then
        if not v_has_lock and v_turn is null and queue._lock_admission(ids is null and p_may_wait) then
          v_has_lock := true;
          v_admit := queue._admit(greatest(1000, p_max_jobs));
          v_has_more := v_admit.has_more;
          if v_queues is distinct from p_queues then
            v_queues := queue._match_queues(p_queues);
          end if;
          continue;
        end if;
        v_ready := case when v_choice.kind = {{lane_crashed}}
          then queue._quarantined_lanes(v_choice.lanes) end;
        if v_turn is null then
          v_turn := nullif(queue._worker_turn(p_worker, v_ready, v_has_lock),
            case when v_ready is null then 'others' end);
          if v_turn = 'alone' then
            ids := queue._claim_alone(p_worker, v_ready);
            first_claim := null;
          end if;
        end if;
        if v_turn = 'nothing' or v_turn = 'alone' and ids is not null then
          return;
        end if;
        select array_agg(l.lane) as lanes, max(l.kind) as kind, array_agg(l.lane) as plain_lanes into v_choice
        from queue.lane l where l.lane = any (v_choice.lanes) and l.kind < {{lane_crashed}};
      end if;
      if cardinality(v_choice.lanes) > 1 or v_choice.kind = {{lane_limited}} then
        v_choice := queue._probe_lanes(v_choice.lanes);
        if v_choice.kind = {{lane_limited}} then
          v_max_jobs := least(p_max_jobs, p_at_once);
          exit when coalesce(cardinality(ids), 0) >= v_max_jobs;
        end if;
      end if;
      v_lanes := coalesce(v_choice.lanes, v_lanes);
      if v_choice.kind = {{lane_limited}} and not v_has_lock then
        v_has_lock := queue._lock_admission(ids is null and p_may_wait);
        if v_has_lock then
          v_admit := queue._admit(greatest(1000, p_max_jobs));
          v_has_more := v_admit.has_more;
          if v_queues is distinct from p_queues then
            v_queues := queue._match_queues(p_queues);
          end if;
          continue;
        end if;
      end if;
      if v_choice.kind = {{lane_limited}} and v_has_lock then
        v_claimed := queue._claim_one_key(p_worker, v_choice.lanes,
          v_max_jobs - coalesce(cardinality(ids), 0));
        ids := ids || coalesce(v_claimed.ids, nullif(queue._claim_limited(p_worker, v_choice.lanes,
          v_max_jobs - coalesce(cardinality(ids), 0)), '{}'));
        if coalesce(cardinality(ids), 0) < v_max_jobs then
          -- it may have used its time on many jobs that can't start
          ids := ids || (select c.ids
            from queue._claim_plain(p_worker, v_choice.lanes, v_max_jobs - coalesce(cardinality(ids), 0)) c);
        end if;
        first_claim := null;
      elsif v_choice.plain_lanes is not null then
        v_claimed := queue._claim_plain(p_worker, v_choice.plain_lanes,
          v_max_jobs - coalesce(cardinality(ids), 0));
        if v_claimed.ids is not null then
          first_claim := case when ids is null then v_claimed.first_claim end;
          ids := ids || v_claimed.ids;
        end if;
      end if;
    end if;
    exit when cardinality(ids) >= v_max_jobs;
    exit when v_has_lock and (not v_has_more or clock_timestamp() > p_now + interval '100 ms');
    if not v_has_lock then
      -- the admission lock is not waited for while rows are held
      v_has_lock := queue._lock_admission(ids is null and p_may_wait);
      exit when not v_has_lock;
    end if;
    v_admit := queue._admit(greatest(1000, p_max_jobs));
    v_has_more := v_admit.has_more;
    v_is_dry := v_admit.admitted <= p_max_jobs;
    if v_queues is distinct from p_queues then
      v_queues := queue._match_queues(p_queues);  -- admission may have found a new queue
    end if;
  end loop;
  if ids is null and v_has_lock and v_turn in ('alone', 'either') then
    ids := queue._claim_alone(p_worker, v_ready);
    first_claim := null;
  end if;
  if v_is_dry is distinct from (current_setting('pgdefer.was_dry', true) = 'on') then
    perform set_config('pgdefer.was_dry', case when v_is_dry then 'on' else 'off' end, false);
  end if;
  if random() * 300 < least(cardinality(ids), 20) and v_lanes is not null
    and (v_has_lock or queue._lock_admission(false)) then
    perform queue._raise_marks(v_lanes);
  end if;
end $$;
