-- Fetching: claims what is ready, and admits when there is too little.

-- Locks: rows of queue.live by skip locked; ADM, waited for only while nothing is held.
-- Raises: 22023, QJ007, QJ008.
-- Why nothing is claimed twice: the claim is an update of a row that this transaction has locked, found
-- unclaimed in its newest version. Why no limit is exceeded: rows of limited lanes are claimed under ADM
-- only (_claim_limited).
create or replace function queue.fetch(
  worker bigint, queues text[] default null, max_jobs integer default 1, options jsonb default null)
returns table (id bigint, claim bigint, task text, args jsonb, queue text, priority integer, lock text, attempt integer,
               scheduled_at timestamptz, deadline timestamptz, timeout interval, headers jsonb, parent bigint)
language plpgsql volatile parallel unsafe security definer rows 50
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v record;
  v_none regclass;
begin
  if coalesce(v_none, queue._unlimited()) is null or current_setting('transaction_isolation') <> 'read committed'
    or current_setting('pgdefer.era', true) is distinct from queue._installation()
  then
    perform queue._check_isolation();
    if to_regclass('queue.unlimited') is null then
      perform queue._not_installed();
      perform queue._bound_worker(worker);
      queues := queue._bound_queues('{worker}', queues);
    end if;
    perform queue._know_era();
    -- once a session: what another one of the worker's has put aside
    perform queue._look_aside(worker);
  end if;
  if current_setting('pgdefer.undelivered', true) = worker::text then
    v := queue._deliver(worker, max_jobs, options);
    return query
      select c.id, c.claim, c.task, c.args, c.queue, c.priority, c.lock, c.attempt, c.scheduled_at, c.deadline, c.timeout, c.headers, c.parent
      from unnest(v.ids, v.claims) with ordinality u (id, claim, n)
      cross join lateral (select c.* from queue.claimed c where c.id = u.id and c.claim = u.claim offset 0) c
      order by u.n;
    if v.ids is not null then
      return;
    end if;
  end if;
  v := queue._claim(worker, queues, case when max_jobs > 30 then queue._fitting(max_jobs) else max_jobs end, options, true);
  if v.first_claim is null or cardinality(v.ids) > 30 then
    v.ids := queue._put_aside(worker, v.ids, v.first_claim is not null);
  end if;
  -- a statement of its own: only a new snapshot shows the claims
  if v.first_claim is not null then
    return query
      select f.id, v.first_claim, f.task, f.args, f.queue, f.priority, f.lock, f.attempt, f.scheduled_at, f.deadline, f.timeout, f.headers, f.parent
      from queue.first_run f where f.id = any (v.ids) order by f.id;
  else
    return query
      select c.id, c.claim, c.task, c.args, c.queue, c.priority, c.lock, c.attempt, c.scheduled_at, c.deadline, c.timeout, c.headers, c.parent
      from unnest(v.ids) with ordinality u (id, n)
      cross join lateral (select c.* from queue.claimed c where c.id = u.id offset 0) c
      order by u.n;
  end if;
end $$;
comment on function queue.fetch(bigint, text[], integer, jsonb) is
  'Claims up to max_jobs jobs for a worker and returns them in claim order. A transaction of its own, in READ COMMITTED. options: ids, alone (true: one job, which nothing may run beside, those that have crashed among them; crashed: one of these only), order (mixed | listed), tasks, deadline_within.';

-- Claims jobs: their ids in claim order, NULL for none. first_claim: the number of their claim, where that order is
-- the order of ids, none is large and all of them start for the first time, so that queue.first_run tells what they are. p_may_wait:
-- the transaction holds no row that the holder of ADM could need.
-- Here is what a worker meets that is mostly idle: one newcomer, or none, and nothing else to be done: no lane holds anything
-- ready, nothing is due, handed over or left from before, no task is paused, and the newcomer is plain, without a timeout or
-- a deadline. It is claimed as it is admitted, in three short statements: to set up statements and expressions, anew in every
-- transaction, is most of what a single job costs, and a WITH makes it more (ADR 1). All else is up to _claim_ready.
-- Locks: ADM by try, where this session's last look took newcomers only (the hint was_dry); then as _claim_ready.
-- Why the newcomer can be claimed as it is inserted: under ADM nothing becomes ready beside it, so that what the first
-- statement sees holds for the others. Claim and cursor commit together: taken back, the next admitter finds it new. A row
-- that another is just claiming counts as ready, as it may be given up. The clock of the claim is read after the snapshot.
-- Why no wake-up is lost: what is not new, or not visible yet, stays in front of the cursor or among its in_flight.
-- Two sessions: newcomers.spec.
create or replace function queue._claim(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_options jsonb, p_may_wait boolean, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz;
  v_has_adm boolean := false;
  v_queues text[];
  v_tick bigint;
  v_in_flight xid8[];
  v_upto pg_snapshot;
  v_own xid8;
  v_claimed record;
begin
  if current_setting('pgdefer.was_dry', true) = 'on' and p_max_jobs > 0 and p_options is null and queue._lock_admission(false) then
    v_has_adm := true;
    v_now := clock_timestamp();
    if p_queues is not null then
      v_queues := queue._match_queues(p_queues);
    end if;
    -- "is true" and "is false" leave the probes subplans, where joins would be set up
    select k.tick, k.in_flight, pg_current_snapshot(), pg_current_xact_id_if_assigned(),
      array(
        select j.id from queue.job j
        where (j.xid, j.id) > (k.next_xid, -9223372036854775808) and j.xid <= pg_snapshot_xmax(pg_current_snapshot())
          and pg_visible_in_snapshot(j.xid, pg_current_snapshot()) and j.xid is distinct from pg_current_xact_id_if_assigned()
        limit 2)
    into v_tick, v_in_flight, v_upto, v_own, ids
    from queue.cursor k
    where not k.has_backlog and k.due_at <= v_now and pg_snapshot_xmax(pg_current_snapshot()) >= k.next_xid
      and exists (select from queue.worker w where w.id = p_worker and w.gone_at is null) is true
      and exists (select from queue.handover h where h.xid >= coalesce(k.in_flight[1], k.next_xid)) is false
      and exists (select from queue.waiting w where w.at >= k.due_at and w.at <= v_now) is false
      and exists (select from queue.schedule c where c.due_at >= k.due_at and c.due_at <= v_now) is false
      and exists (select from queue.pause p where p.task is not null) is false
      and exists (
        select from queue.lane l
        cross join lateral (
          select from queue.live v
          where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null limit 1) r
        where not l.is_idle and (v_queues is null or l.queue = any (v_queues)) and (l.paused_until is null or l.paused_until <= v_now) and l.kind < 2) is false
    order by k.tick desc limit 1;
    if v_in_flight <> '{}' then
      if exists (select from unnest(v_in_flight) x (xid)
                 where pg_visible_in_snapshot(x.xid, v_upto) and x.xid is distinct from v_own and exists (select from queue.job j where j.xid = x.xid)) then
        ids := null;  -- what was deferred in a transaction that was in flight is new too
      end if;
    end if;
    if cardinality(ids) = 1 then
      insert into queue.live (id, deadline, lane, attempt, flags, claim, claimed_at, worker_id)
      select j.id, 'infinity', l.lane, 1, j.flags | l.extra_flags, nextval('queue.claim_seq'), clock_timestamp(), p_worker
      from queue.job j
      cross join lateral (
        select l.lane, l.extra_flags from queue.lane l
        where l.queue = j.queue and l.priority = j.priority and l.kind = 0 and not l.is_idle and l.paused_until is null
          and (v_queues is null or l.queue = any (v_queues)) and ('infinity', j.id) >= (l.low_deadline, l.low_id) limit 1) l
      where j.id = ids[1] and j.flags & (1 | 2 | 4 | 8 | 16 | 32 | 64 | 128 | 256 | 8192 | -32768) = 0 and j.deadline is null
        and j.id > coalesce(pg_sequence_last_value('queue.needed_seq'), 0)
      returning claim into first_claim;
      if first_claim is not null then
        update queue.cursor k
        set tick = v_tick + 1, next_xid = pg_snapshot_xmax(v_upto), high_id = greatest(k.high_id, ids[1]),
          in_flight = case when pg_snapshot_xmin(v_upto) < pg_snapshot_xmax(v_upto) then queue._in_flight(v_upto, v_own) else '{}' end
        where k.tick = v_tick;
        if first_claim % 300 = 0 then  -- now and then
          perform queue._raise_low_marks(array(select l.lane from queue.lane l where not l.is_idle and l.kind = 0));
        end if;
        return;
      end if;
    elsif ids = '{}' and clock_timestamp() - v_now < interval '2 ms' then
      -- a look that took longer met many rows that are not visible yet: _admit lets the cursor pass them
      ids := null;
      return;
    end if;
  end if;
  v_claimed := queue._claim_ready(p_worker, p_queues, p_max_jobs, p_options, p_may_wait, v_has_adm);
  ids := v_claimed.ids;
  first_claim := v_claimed.first_claim;
end $$;

-- Claims what is ready, and admits where that is due: every 10 ms, as newcomers may be of higher priority, or with ADM held
-- already (p_has_adm). Here is the case that most calls meet, one plain lane that holds enough; the rest is up to _claim_on.
-- Locks: ADM by try; then rows of queue.live by skip locked, then ADM by try.
-- Why claims rise, and come after what they follow: as in _claim_plain.
create or replace function queue._claim_ready(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_options jsonb, p_may_wait boolean, p_has_adm boolean, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_queues text[];
  v_now timestamptz := clock_timestamp();
  v_has_adm boolean := p_has_adm;
  v_has_more boolean := false;
  v_admitted integer;
  v_is_claimed boolean := false;
  v_claimed record;
  v_lane integer;
  v_attempt smallint;
  v_flags smallint;
  v_claimed_at timestamptz;
begin
  if p_max_jobs is null or p_max_jobs < 1 then
    perform queue._check_max_jobs(p_max_jobs);
  elsif p_options <> '{}' then
    ids := queue._claim_special(p_worker, p_queues, p_max_jobs, p_options, p_may_wait);
    return;
  end if;
  if v_has_adm
    or abs(date_part('epoch', v_now) - coalesce(nullif(current_setting('pgdefer.looked_at', true), '')::double precision, 0)) >= 0.01
      and queue._lock_admission(false)
  then
    v_has_adm := true;
    select a.has_more, a.admitted into v_has_more, v_admitted from queue._admit(greatest(1000, p_max_jobs)) a;
    perform set_config('pgdefer.looked_at', date_part('epoch', v_now)::text, false);
  end if;
  if p_queues is not null then
    v_queues := queue._match_queues(p_queues);  -- admission may have met a new queue
  end if;
  select l.lane into v_lane
  from queue.lane l
  where not l.is_idle and (v_queues is null or l.queue = any (v_queues)) and (l.paused_until is null or l.paused_until <= v_now) and l.kind = 0
    and exists (select from queue.worker w where w.id = p_worker and w.gone_at is null) is true
    and exists (
      select from queue.lane o
      where not o.is_idle and (v_queues is null or o.queue = any (v_queues)) and (o.paused_until is null or o.paused_until <= v_now) and o.kind < 2
        and o.lane <> l.lane) is false
  limit 1;
  if v_lane is not null then
    v_is_claimed := true;
    if p_max_jobs = 1 then
      -- as _claim_plain for one
      update queue.live v
      set claim = nextval('queue.claim_seq'), worker_id = p_worker, claimed_at = clock_timestamp(), attempt = v.attempt + 1
      where v.ctid = (
        select c.ctid
        from queue.lane l
        cross join lateral (
          select v.ctid from queue.live v
          where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null
          order by v.deadline, v.id limit 1 for update of v skip locked) c
        where l.lane = v_lane and l.kind = 0 and (l.paused_until is null or l.paused_until <= v_now))
      returning array[v.id], v.claim, v.attempt, v.flags, v.claimed_at into ids, first_claim, v_attempt, v_flags, v_claimed_at;
      if v_flags & 128 <> 0 then
        perform queue._lease_timeouts(ids, first_claim, v_claimed_at);
      end if;
      if v_attempt > 1 or v_flags & 2048 <> 0 or v_flags < 0 then
        first_claim := null;
      end if;
    else
      v_claimed := queue._claim_plain(p_worker, array[v_lane], p_max_jobs);
      ids := v_claimed.ids;
      first_claim := v_claimed.first_claim;
    end if;
    if cardinality(ids) = p_max_jobs then
      if v_has_adm then
        perform set_config('pgdefer.was_dry', case when v_admitted between 1 and p_max_jobs then 'on' else 'off' end, false);
      end if;
      if random() * 300 < least(p_max_jobs, 20) and queue._lock_admission(false) then
        perform queue._raise_low_marks(array[v_lane]);
      end if;
      return;
    end if;
  end if;
  select c.ids, c.first_claim into ids, first_claim
  from queue._claim_on(p_worker, p_queues, p_max_jobs, p_may_wait, v_now, ids, first_claim, v_is_claimed, v_has_adm, v_has_more, v_admitted <= p_max_jobs is true) c;
end $$;

-- Goes on with what _claim_ready has begun: p_ids are claimed so far, p_is_claimed: all that was ready, so that more has to
-- be admitted first; p_has_adm: ADM is held and was used, p_has_more: and would find more, p_is_dry: there were
-- newcomers only.
-- Locks: as fetch. Why no wake-up is lost: one that finds nothing has looked under ADM, or was refused ADM by one
-- who looks, and rows that others hold are theirs to finish or to hand over.
create or replace function queue._claim_on(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_may_wait boolean, p_now timestamptz, p_ids bigint[], p_first_claim bigint,
  p_is_claimed boolean, p_has_adm boolean, p_has_more boolean, p_is_dry boolean, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_queues text[] := p_queues;
  v_has_adm boolean := p_has_adm;
  v_has_more boolean := p_has_more;
  v_is_dry boolean := p_is_dry;
  v_admit record;
  v record;
  v_lanes integer[];  -- those claimed from
  v_claimed record;
begin
  ids := p_ids;
  first_claim := p_first_claim;
  if p_queues is not null then
    v_queues := queue._match_queues(p_queues);
  end if;
  for v_pass in 1 .. 100 loop
    if v_pass > 1 or not p_is_claimed then
      select array_agg(l.lane) as lanes, max(l.kind) as kind, array_agg(l.lane) as plain_lanes, exists (select from queue.worker w where w.id = p_worker and w.gone_at is null) as is_registered
      into v
      from queue.lane l
      where not l.is_idle and (v_queues is null or l.queue = any (v_queues)) and (l.paused_until is null or l.paused_until <= p_now) and l.kind < 2;
      if not v.is_registered then
        perform queue._worker_gone(p_worker);
      elsif cardinality(v.lanes) > 1 or v.kind = 1 then
        v := queue._probe_lanes(v.lanes);
      end if;
      v_lanes := coalesce(v.lanes, v_lanes);
      if v.kind = 1 and not v_has_adm then
        v_has_adm := queue._lock_admission(ids is null and p_may_wait);
        if v_has_adm then
          v_admit := queue._admit(greatest(1000, p_max_jobs));
          v_has_more := v_admit.has_more;
          if v_queues is distinct from p_queues then
            v_queues := queue._match_queues(p_queues);
          end if;
          continue;
        end if;
      end if;
      if v.kind = 1 and v_has_adm then
        ids := ids || nullif(queue._claim_limited(p_worker, v.lanes, p_max_jobs - coalesce(cardinality(ids), 0)), '{}');
        if coalesce(cardinality(ids), 0) < p_max_jobs then
          -- it may have looked at so many that can't start that its time was over
          ids := ids || (select c.ids from queue._claim_plain(p_worker, v.lanes, p_max_jobs - coalesce(cardinality(ids), 0)) c);
        end if;
        first_claim := null;
      elsif v.plain_lanes is not null then
        v_claimed := queue._claim_plain(p_worker, v.plain_lanes, p_max_jobs - coalesce(cardinality(ids), 0));
        if v_claimed.ids is not null then
          first_claim := case when ids is null then v_claimed.first_claim end;
          ids := ids || v_claimed.ids;
        end if;
      end if;
    end if;
    exit when cardinality(ids) >= p_max_jobs;
    exit when v_has_adm and not v_has_more or clock_timestamp() > p_now + interval '100 ms';
    if not v_has_adm then
      -- while rows are held ADM is not waited for
      v_has_adm := queue._lock_admission(ids is null and p_may_wait);
      exit when not v_has_adm;
    end if;
    v_admit := queue._admit(greatest(1000, p_max_jobs));
    v_has_more := v_admit.has_more;
    v_is_dry := v_admit.admitted <= p_max_jobs;
    if v_queues is distinct from p_queues then
      v_queues := queue._match_queues(p_queues);  -- admission may have met a new queue
    end if;
  end loop;
  if v_is_dry is distinct from (current_setting('pgdefer.was_dry', true) = 'on') then
    perform set_config('pgdefer.was_dry', case when v_is_dry then 'on' else 'off' end, false);
  end if;
  if random() * 300 < least(cardinality(ids), 20) and v_lanes is not null and (v_has_adm or queue._lock_admission(false)) then
    perform queue._raise_low_marks(v_lanes);
  end if;
end $$;

-- fetch with options: ids, alone, order, tasks, deadline_within.
-- Locks and errors: as fetch. Claims under ADM, so that every order and filter can be had of one function.
create or replace function queue._claim_special(
  p_worker bigint, p_queues text[], p_max_jobs integer, p_options jsonb, p_may_wait boolean)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_options jsonb := jsonb_strip_nulls(p_options);
  v_alone boolean;
  v_crashed boolean;
  v_tasks text[];
  v_before timestamptz;
  v_only bigint[];
  v_max integer := p_max_jobs;
  v_lanes integer[];
  v_ids bigint[] := '{}'::bigint[];
  v_more boolean;
begin
  perform queue._check_keys('options', p_options, array['ids', 'alone', 'order', 'tasks', 'deadline_within']);
  if coalesce(v_options -> 'order', '"mixed"') not in ('"mixed"', '"listed"') then
    perform queue._invalid('order is not one of its values', 'Allowed: mixed, listed.', 'order: ' || (v_options ->> 'order'));
  elsif coalesce(jsonb_typeof(v_options -> 'alone'), 'boolean') <> 'boolean' and v_options -> 'alone' <> '"crashed"' then
    perform queue._invalid('alone must be true, false or crashed', 'Pass a JSON boolean, or "crashed" for a job that has crashed only.');
  elsif coalesce(jsonb_typeof(v_options -> 'tasks'), 'array') <> 'array' or coalesce(jsonb_typeof(v_options -> 'ids'), 'array') <> 'array' then
    perform queue._invalid('tasks and ids must be lists', 'Pass JSON arrays.');
  end if;
  v_crashed := coalesce(v_options -> 'alone' = '"crashed"', false);
  v_alone := v_crashed or coalesce(v_options -> 'alone' = 'true', false);
  v_tasks := case when v_options ? 'tasks' then array(select t from jsonb_array_elements_text(v_options -> 'tasks') t) end;
  v_before := v_now + queue._interval('deadline_within', v_options -> 'deadline_within');
  begin
    v_only := case when v_options ? 'ids' then array(select i::bigint from jsonb_array_elements_text(v_options -> 'ids') i) end;
  exception when data_exception then
    perform queue._invalid('ids must be numbers', 'Pass ids of jobs.');
  end;
  if v_alone then
    v_max := 1;
  end if;
  if not queue._lock_admission(p_may_wait) then
    return null;
  elsif not exists (select from queue.worker w where w.id = p_worker and w.gone_at is null) then
    perform queue._worker_gone(p_worker);  -- it went while this waited
  end if;
  loop
    select a.has_more into v_more from queue._admit(greatest(1000, p_max_jobs)) a;
    select array_agg(l.lane order by case when v_options ->> 'order' = 'listed' then l.place end, l.priority desc, l.first_id, l.lane) into v_lanes
    from (
      select l.lane, l.priority, m.place, min(f.id) over (partition by l.queue, l.priority) as first_id
      from queue.lane l
      cross join lateral (
        select min(q.n) as place from unnest(coalesce(p_queues, '{*}')) with ordinality q (pattern, n)
        where queue._matches(l.queue, q.pattern)) m
      left join lateral (
        select v.id from queue.live v
        where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null
        order by v.deadline, v.id limit 1) f on true
      where m.place is not null and (l.paused_until is null or l.paused_until <= v_now) and (l.kind < 2 or v_alone) and (l.kind = 2 or not v_crashed)) l;
    if v_tasks is not null or v_before is not null or v_only is not null then
      v_ids := v_ids || queue._claim_chosen(p_worker, v_lanes, v_max - cardinality(v_ids), v_tasks, v_before, v_only);
    else
      v_ids := v_ids || queue._claim_limited(p_worker, v_lanes, v_max - cardinality(v_ids));
    end if;
    exit when cardinality(v_ids) >= v_max or not v_more or clock_timestamp() > v_now + interval '100 ms';
  end loop;
  if v_alone then
    update queue.live v set flags = v.flags | 16 where v.id = any (v_ids);
  end if;
  if random() * 300 < least(cardinality(v_ids), 20) then
    perform queue._raise_low_marks(v_lanes);
  end if;
  return v_ids;
end $$;

-- Of lanes those that hold something ready that may start, in the order in which they are read: by priority,
-- then the one whose first job is oldest. plain_lanes: those that can be claimed from without ADM, as no limited one has a
-- higher priority.
create or replace function queue._probe_lanes(
  p_lanes integer[], out lanes integer[], out kind smallint, out plain_lanes integer[], out is_registered boolean)
language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
begin
  is_registered := true;
  with ready as (
    select l.lane, l.kind, l.priority,
      row_number() over (order by l.priority desc, f.id, l.lane) as n, max(l.priority) filter (where l.kind = 1) over () as limited_priority
    from unnest(p_lanes) u (lane)
    cross join lateral (
      select l.lane, l.priority, l.kind, l.queue, l.low_deadline, l.low_id from queue.lane l where l.lane = u.lane offset 0) l
    cross join lateral (
      select v.id from queue.live v
      where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null
      order by v.deadline, v.id limit 1) f
    where l.kind = 0
      or not exists (select from queue.queue_config c where c.queue = l.queue and (c.max_running is not null or c.rate_limit is not null))
      or queue._queue_room(l.queue, 1, clock_timestamp()) > 0)
  select array_agg(r.lane order by r.n), max(r.kind),
    array_agg(r.lane order by r.n) filter (where r.is_plain)
  into lanes, kind, plain_lanes
  from (select r.*, r.kind = 0 and (r.limited_priority is null or r.priority >= r.limited_priority) as is_plain from ready r) r;
end $$;

-- Claims up to p_n jobs of plain lanes, in the order of p_lanes. first_claim: as of _claim.
-- Locks: rows of queue.live by skip locked.
-- Why nothing starts that was paused, or uncounted that was limited, before: the statement that claims reads the lanes again.
-- Why a job's claims rise: a row that this statement sees was made ready by one that had its number before.
-- Why it starts after what it needed or followed has ended: the clock is read after the snapshot.
create or replace function queue._claim_plain(
  p_worker bigint, p_lanes integer[], p_n integer, out ids bigint[], out first_claim bigint)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_flags integer;
  v_is_mixed boolean;
begin
  with claimed as (
    update queue.live v
    set claim = (select nextval('queue.claim_seq')), worker_id = p_worker, claimed_at = (select clock_timestamp()), attempt = v.attempt + 1
    where v.ctid = any (array(
      select c.ctid
      from unnest(p_lanes) u (lane)
      cross join lateral (
        select l.lane, l.low_deadline, l.low_id from queue.lane l
        where l.lane = u.lane and l.kind = 0 and (l.paused_until is null or l.paused_until <= (select clock_timestamp())) offset 0) l
      cross join lateral (
        select v.ctid from queue.live v
        where v.lane = l.lane and (v.deadline, v.id) >= (l.low_deadline, l.low_id) and v.claim is null
        order by v.deadline, v.id limit p_n for update of v skip locked) c
      limit p_n))
    returning v.id, v.claim, v.lane, v.deadline, v.attempt, v.flags)
  select array_agg(c.id order by c.id), max(c.claim), bit_or(c.flags | case when c.attempt > 1 then 2048 else 0 end),
    bool_or(c.deadline < 'infinity' or c.lane <> p_lanes[1])
  into ids, first_claim, v_flags, v_is_mixed
  from claimed c;
  if v_flags & (128 | 2048) <> 0 or v_flags < 0 or v_is_mixed then
    if v_flags & 128 <> 0 then
      perform queue._lease_timeouts(ids, first_claim, (select v.claimed_at from queue.live v where v.id = ids[1]));
    end if;
    ids := array(select v.id from queue.live v where v.id = any (ids) order by array_position(p_lanes, v.lane), v.deadline, v.id);
    if v_is_mixed or v_flags & 2048 <> 0 or v_flags < 0 then
      first_claim := null;
    end if;
  end if;
end $$;

-- Raises: 22023 unless it is a number of jobs to ask for.
create or replace function queue._check_max_jobs(p_max_jobs integer)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  if p_max_jobs is null or p_max_jobs < 1 then
    perform queue._invalid('max_jobs must be at least 1', 'Ask for 1 job or more.', format('max_jobs: %s', coalesce(p_max_jobs::text, 'NULL')));
  end if;
end $$;

-- Notes when reap must end claims of jobs with a timeout: 10 s past it.
create or replace function queue._lease_timeouts(p_ids bigint[], p_claim bigint, p_now timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  insert into queue.lease (id, claim, expires_at, is_own)
  select j.id, p_claim, p_now + (j.options ->> 'timeout')::interval + interval '10 s', false
  from queue.job j where j.id = any (p_ids) and j.flags & 128 <> 0;
end $$;

-- The queues that a list of names and patterns selects among those that may hold something ready; NULL is all.
-- Raises: 22023.
create or replace function queue._match_queues(p_queues text[])
returns text[] language plpgsql stable parallel safe security invoker as $$
begin
  if '*' = any (p_queues) then
    return null;
  elsif p_queues = '{}' or array_ndims(p_queues) > 1 or array_position(p_queues, null) is not null or '' = any (p_queues) then
    perform queue._invalid('queues holds no name, or NULL', 'Name queues, prefix* patterns or *; NULL instead of a list is all.');
  elsif not exists (select from unnest(p_queues) q where right(q, 1) = '*') then
    return p_queues;
  end if;
  return array(select distinct l.queue from queue.lane l
               where not l.is_idle and exists (select from unnest(p_queues) q where queue._matches(l.queue, q)));
end $$;

-- Whether a queue's name is selected by a name, prefix* or *.
create or replace function queue._matches(p_queue text, p_pattern text)
returns boolean language plpgsql immutable parallel safe security invoker as $$
begin
  return p_queue = p_pattern or right(p_pattern, 1) = '*' and starts_with(p_queue, left(p_pattern, -1));
end $$;
