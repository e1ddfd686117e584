-- Claiming from one lane, or in a loop from all. claim_newcomer.sql claims new jobs; finish.sql fences
-- claims; base/era.sql makes their numbers.
-- Tests: work/fetch.sql, work/claim.two.spec.

-- Claims ready jobs, and admits if that is due: every 10 ms, because newcomers may have a higher priority, or
-- if the admission lock is already held (p_has_lock). If the last fetch left no job ready (the hint was_dry),
-- one that asks for many claims them as it admits them (work/claim_slice.sql). This function handles the most
-- common case, one plain lane with enough jobs; the rest is left to _claim_loop.
-- Locks: the admission lock by try; rows of queue.active_job by skip locked; then as _claim_loop.
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
  v_has_read_lane boolean := false;
  v_claimed record;
  v_slice record;
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
    or {{is_look_due}} and queue._lock_admission(false)
  then
    v_has_lock := true;
    if p_max_jobs >= {{bulk}} and current_setting('pgdefer.was_dry', true) in ('on', 'slice') then
      v_slice := queue._claim_slice(p_worker, p_queues, p_max_jobs);
      ids := v_slice.ids;
      first_claim := v_slice.first_claim;
      if ids is not null then
        if v_slice.is_all or cardinality(ids) = p_max_jobs then
          perform set_config('pgdefer.was_dry', case when v_slice.is_all then 'on' else 'slice' end, false);
        else
          select c.ids, c.first_claim into ids, first_claim
          from queue._claim_loop(p_worker, p_queues, p_max_jobs, p_may_wait, v_now, ids, first_claim, '{}',
            true, true, false, p_at_once) c;
        end if;
        return;
      end if;
    end if;
    select a.has_more, a.admitted into v_has_more, v_admitted
    from queue._admit(1000, p_max_jobs >= {{bulk}}, p_queues) a;
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
    if p_at_once < p_max_jobs then
      null;  -- _claim_loop asks whether a limited job is ready, or only its lane is not idle
    elsif v_has_lock or queue._lock_admission(false) then
      select c.ids, c.first_claim into ids, first_claim
      from queue._claim_one_key(p_worker, v_choice.lanes, p_max_jobs) c;
    elsif not p_may_wait and cardinality(v_choice.lanes) = 1 then
      return;  -- nothing else is ready, and whoever holds the lock admits
    end if;  -- else _claim_loop waits, and then looks which lanes it may claim from
  elsif v_choice.kind = {{lane_plain}} and cardinality(v_choice.lanes) = 1 then
    v_has_read_lane := true;
    if p_max_jobs = 1 then
      -- As _claim_plain, for one job.
      update queue.active_job aj
      set claim = nextval('queue.claim_seq'), worker_id = p_worker, claimed_at = clock_timestamp(),
        attempt = aj.attempt + 1
      where aj.ctid = (
        select c.ctid
        from queue.lane l
        cross join lateral (
          select aj.ctid from queue.active_job aj
          where {{is_ready}}
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
  if cardinality(ids) = p_max_jobs then
    if v_has_lock then
      perform set_config('pgdefer.was_dry', case when v_admitted between 1 and p_max_jobs then 'on'
        else 'off' end, false);
    end if;
    if random() * 300 < least(p_max_jobs, 20) and queue._lock_admission(false) then
      perform queue._raise_marks(v_choice.lanes);
    end if;
    return;
  end if;
  select c.ids, c.first_claim into ids, first_claim
  from queue._claim_loop(p_worker, p_queues, p_max_jobs, p_may_wait, v_now, ids, first_claim,
    case when v_has_read_lane then v_choice.lanes end, v_has_lock, v_has_more,
    v_admitted <= p_max_jobs is true, p_at_once) c;
end $$;

-- Continues what _claim_one_lane has begun. p_ids: claimed so far. p_lanes: the lanes whose ready jobs these
-- were, so that more must be admitted first; NULL: no lane was read. p_has_lock: the admission lock is held
-- and was used. p_has_more: another admission would find more. p_is_dry: there were only newcomers.
-- While a limited job is ready, at most p_at_once are claimed: it would hold its slot while it waits.
-- Locks: as fetch.
-- Why no wake-up is lost: a call that finds nothing has looked under the admission lock, or another session
-- holds that lock and looks. Rows that others hold are theirs to finish or to hand over.
-- The lanes claimed from only say where a look for a higher low mark is worth it: _raise_marks reads lane and
-- jobs again, under the admission lock.
-- In one piece: each round of the loop passes all its variables to the next.
create or replace function queue._claim_loop(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_may_wait boolean, p_now timestamptz, p_ids bigint[],
  p_first_claim bigint, p_lanes integer[], p_has_lock boolean, p_has_more boolean, p_is_dry boolean,
  p_at_once integer, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_queues text[] := p_queues;
  v_has_lock boolean := p_has_lock;
  v_has_more boolean := p_has_more;
  v_was_dry text := case when p_is_dry then 'on' else 'off' end;  -- as the setting
  v_max_jobs integer := p_max_jobs;
  v_admit record;
  v_choice record;
  v_lanes integer[] := p_lanes;  -- the lanes claimed from
  v_quarantined integer[];  -- lanes of quarantined jobs, each claimed alone
  v_turn text;
  v_claimed record;
begin
  ids := p_ids;
  first_claim := p_first_claim;
  if p_queues is not null then
    v_queues := queue._match_queues(p_queues);
  end if;
  for v_pass in 1 .. 100 loop
    if v_pass > 1 or p_lanes is null then
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
          v_admit := queue._admit(1000);
          v_has_more := v_admit.has_more;
          if v_queues is distinct from p_queues then
            v_queues := queue._match_queues(p_queues);
          end if;
          continue;
        end if;
        v_quarantined := case when v_choice.kind = {{lane_crashed}}
          then queue._quarantined_lanes(v_choice.lanes) end;
        if v_turn is null then
          v_turn := nullif(queue._may_claim(p_worker, v_quarantined, v_has_lock),
            case when v_quarantined is null then 'others' end);
          if v_turn = 'alone' then
            ids := queue._claim_alone(p_worker, v_quarantined);
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
      v_lanes := v_lanes || v_choice.lanes;
      if v_choice.kind = {{lane_limited}} and not v_has_lock then
        v_has_lock := queue._lock_admission(ids is null and p_may_wait);
        if v_has_lock then
          v_admit := queue._admit(1000);
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
          -- It may have used its time on many jobs that can't start.
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
      -- The admission lock is not waited for while rows are held.
      v_has_lock := queue._lock_admission(ids is null and p_may_wait);
      exit when not v_has_lock;
    end if;
    if p_max_jobs >= {{bulk}} then
      v_claimed := queue._claim_slice(p_worker, p_queues, v_max_jobs - coalesce(cardinality(ids), 0));
      if v_claimed.ids is not null then
        first_claim := case when ids is null then v_claimed.first_claim end;
        ids := ids || v_claimed.ids;
        v_was_dry := case when v_claimed.is_all then 'on' else 'slice' end;
        exit when v_claimed.is_all or cardinality(ids) >= v_max_jobs;
      end if;
    end if;
    v_admit := queue._admit(1000);
    v_has_more := v_admit.has_more;
    v_was_dry := case when v_admit.admitted <= p_max_jobs then 'on' else 'off' end;
    if v_queues is distinct from p_queues then
      v_queues := queue._match_queues(p_queues);  -- admission may have found a new queue
    end if;
  end loop;
  if ids is null and v_has_lock and v_turn in ('alone', 'either') then
    ids := queue._claim_alone(p_worker, v_quarantined);
    first_claim := null;
  end if;
  if v_was_dry is distinct from current_setting('pgdefer.was_dry', true) then
    perform set_config('pgdefer.was_dry', v_was_dry, false);
  end if;
  if random() * 300 < least(cardinality(ids), 20) and v_lanes is not null
    and (v_has_lock or queue._lock_admission(false)) then
    perform queue._raise_marks(v_lanes);
  end if;
end $$;
