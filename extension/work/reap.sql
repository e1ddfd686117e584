-- Reaping: ends the claims of workers that died (_mark_dead_workers) and of leases that have expired.

-- Locks: the worker's row; as _check_era; then as reap. The row comes first: a frozen client may hold it, and
-- must not be waited for under the admission lock. reap skips locked rows and tries the admission lock, so no
-- two of these functions wait for each other. Two calls for one worker: work/reap.two.spec; a frozen client:
-- work/reap.frozen.spec.
-- Raises: QJ007 (a restricted role), QJ008.
-- Jobs that a dead worker's claims held up can proceed when reap has ended these, or with the tick after it.
-- A fetch of the dead process may still be running in the server: reap looks for its claims as for those of
-- any other gone worker.
create or replace function queue.worker_died(worker bigint)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
begin
  {{if_restricted}}
    perform queue._require_worker(worker_died.worker);
  end if;
  perform queue._check_isolation();
  perform from queue.worker w where w.id = worker_died.worker for no key update;
  perform queue._check_era();
  update queue.worker w set gone_at = clock_timestamp() where w.id = worker_died.worker and w.gone_at is null;
  return (select r.reaped from queue._reap(interval '1 s') r);
end $$;
comment on function queue.worker_died(bigint) is
  'Reports that a worker process died without deregistering: its claims end as crashed now, not after'
    ' dead_after, except those with their own lease. For process supervisors. Returns the number of ended'
    ' claims, including those of other dead workers. It is not an error if the worker is already gone.';

-- Locks: as _check_era; rows of queue.worker and queue.active_job by skip locked, each row separately; the
-- admission lock by try. With two reapers at once, a claim ends exactly once, no matter which deletes its row
-- first.
-- A fetch that was running when its worker went may still create claims. So a worker's claims are looked for
-- at once, and again when every transaction that could have seen it alive has ended. After that no more
-- claims can appear (is_over). waits_for lists these transactions: the ones in flight after the worker's end
-- was committed. It leaves out those without a role, which are vacuum's: an owner who is not a superuser
-- can't see what kind of process they are.
-- A late claim of a worker that has deregistered is released, like its others; that of a dead worker has
-- crashed. No heartbeat could arrive while the server was down, or between the primary's death and the
-- promotion of its standby. So if the last sign of life was before workers could reach the server
-- (_up_since), a worker counts as dead only dead_after past that time, and a lease or a timeout ends 30 s
-- past it.
-- A session looks for claims of removed workers once in 10 s. It stops after a second (_reap: p_budget), but
-- not before 20 claims; the next call continues.
create or replace function queue.reap()
returns table (reaped integer, next_expiry timestamptz)
language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
begin
  {{installed}}
  perform queue._check_isolation();
  perform queue._check_era();
  select r.reaped, r.next_expiry into reaped, next_expiry from queue._reap(interval '1 s') r;
  {{if_operator}}
    perform queue._audit('reap', '{}', p_before => jsonb_build_object('reaped', reaped));
  end if;
  return next;
end $$;
comment on function queue.reap() is
  'Ends dead claims: those of workers without a heartbeat for dead_after (counted from the server''s start'
    ' or promotion at the earliest, and once more if all workers were silent at once), and those whose lease'
    ' or timeout has passed. Returns their number, and when the next may expire.';

-- reap for p_budget, but at least 20 claims, so that each call makes progress, and a few end at once however
-- busy the machine is. Locks, in this order: as _mark_dead_workers, _reap_gone, _reap_forgotten,
-- _forget_workers, _release_stale and _reap_leases; none is waited for.
create or replace function queue._reap(p_budget interval)
returns table (reaped integer, next_expiry timestamptz)
language plpgsql volatile parallel unsafe security invoker rows 1 as $$
declare
  v_now timestamptz := clock_timestamp();
  v_up_since timestamptz := queue._up_since();
begin
  perform queue._mark_dead_workers(v_now, v_up_since);
  reaped := queue._reap_gone(v_now + p_budget);
  if abs(date_part('epoch', v_now)
    - coalesce(nullif(current_setting('pgdefer.reviewed_at', true), '')::double precision, 0)) >= 10 then
    reaped := reaped + queue._reap_forgotten();
    perform set_config('pgdefer.reviewed_at', date_part('epoch', v_now)::text, false);
  end if;
  perform queue._forget_workers(v_now);
  perform queue._release_stale(v_now + p_budget);
  reaped := queue._reap_leases(v_now, v_now + p_budget, reaped);
  next_expiry := least((select min(greatest(w.last_seen_at, (select queue._up_since())) + w.dead_after)
    from queue.worker w where w.gone_at is null), queue._next_lease_end());
  return next;
end $$;

-- Marks workers as gone whose last heartbeat is too long ago. For workers that went before, it notes which
-- transactions may still create claims (waits_for). If all are silent at once, silence counts afresh. If the
-- clock was set back, what was seen at a later time counts as seen now.
-- Locks: rows of queue.worker by skip locked; as _restart_grace.
create or replace function queue._mark_dead_workers(p_now timestamptz, p_up_since timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.worker w set last_seen_at = clock_timestamp()
  where w.id = any (array(select w.id from queue.worker w where w.gone_at is null
    and w.last_seen_at > clock_timestamp() + interval '10 s' for update skip locked));
  if queue._are_all_silent(p_now, p_up_since) then
    perform queue._restart_grace(p_now);
  else
    -- Calls _up_since again: one snapshot must show who was seen, and whether silence was restarted.
    update queue.worker w set gone_at = p_now
    where w.id = any (array(select w.id from queue.worker w where w.gone_at is null
      and greatest(w.last_seen_at, (select queue._up_since())) + w.dead_after < p_now
      and not (w.info ? 'session' and queue._is_in_handler(w.info)) for update skip locked));
  end if;
  update queue.worker w
  set waits_for = queue._virtual_transactions()
  where w.id = any (array(select w.id from queue.worker w
                          where w.gone_at < p_now and w.waits_for is null
                            and w.xmin <> pg_current_xact_id()::xid for update skip locked));
end $$;

-- Ends the claims of gone workers until p_until, but at least 20; returns their number. A worker is clear
-- (is_clear) if it has no claim left, and over (is_over) if none can appear any more.
-- Locks: rows of queue.worker by skip locked; each claim as _reap_claim; rows of queue.worker as before.
create or replace function queue._reap_gone(p_until timestamptz)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ending bigint[];                          -- nothing of theirs is in flight any more
  v_gone bigint[];
  v_left bigint[] := '{}'::bigint[];          -- these still have claims
  v_claim record;
  v_ended integer;
  v_reaped integer := 0;
begin
  v_ending := array(
    select w.id from queue.worker w
    where w.waits_for is not null and not w.is_over
      and not exists (select from pg_locks l where l.locktype = 'virtualxid'
        and l.virtualtransaction = any (w.waits_for))
    for update skip locked);
  v_gone := v_ending || array(select w.id from queue.worker w where w.gone_at is not null and not w.is_clear
    and w.id <> all (v_ending));
  if v_gone = '{}' then
    return 0;
  end if;
  for v_claim in
    select aj.id, aj.claim, aj.worker_id, w.name, w.last_seen_at, w.has_left from queue.active_job aj
    join queue.worker w on w.id = aj.worker_id
    where aj.worker_id = any (v_gone) and not exists (select from queue.lease l
      where l.id = aj.id and l.claim = aj.claim and l.is_own)
    order by aj.id
  loop
    v_ended := 0;
    if v_reaped < 20 or clock_timestamp() < p_until then
      v_ended := queue._reap_claim(v_claim.id,
        v_claim.claim, case when v_claim.has_left then 'released' else 'crashed' end,
        format('worker %s (%s) died: its last heartbeat was at %s', v_claim.worker_id,
          left(v_claim.name, 200), v_claim.last_seen_at));
    end if;
    v_reaped := v_reaped + v_ended;
    if v_ended = 0 then
      v_left := v_left || v_claim.worker_id;
    end if;
  end loop;
  update queue.worker w set is_clear = true
  where w.id = any (array(select w.id from queue.worker w where w.id = any (v_gone) and not w.is_clear
    and w.id <> all (v_left) for update skip locked));
  update queue.worker w set is_over = true where w.id = any (v_ending) and w.id <> all (v_left);
  return v_reaped;
end $$;

-- Deletes workers that are over and went a minute ago, with what was meant for them.
-- Locks: rows of queue.worker, queue.abort, queue.undelivered and queue.sleeper by skip locked.
create or replace function queue._forget_workers(p_now timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_over bigint[] := array(select w.id from queue.worker w where w.is_over
    and w.gone_at < p_now - interval '1 minute' for update skip locked);
begin
  if v_over <> '{}' then
    delete from queue.abort a
    where a.ctid = any (array(select a.ctid from queue.abort a
      where a.worker_id = any (v_over) for update skip locked));
    delete from queue.undelivered u
    where u.ctid = any (array(select u.ctid from queue.undelivered u
      where u.worker_id = any (v_over) for update skip locked));
    delete from queue.sleeper s where s.worker_id in (
      select d.worker_id from queue.sleeper d where d.worker_id = any (v_over) for update skip locked);
    delete from queue.worker w where w.id = any (v_over);
  end if;
end $$;

-- Until p_until, ends claims whose lease or timeout has passed; but at least 20, together with the p_reaped
-- that the caller has ended. Returns the number of both.
-- Locks: for each claim as _renew_in_handler, _reap_claim.
create or replace function queue._reap_leases(p_now timestamptz, p_until timestamptz, p_reaped integer)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_up_since timestamptz := queue._up_since();
  v_grace_until timestamptz := queue._grace_until();
  v_claim record;
  v_reaped integer := p_reaped;
begin
  for v_claim in
    select l.id, l.claim, j.options ->> 'timeout' as timeout, l.is_own,
      coalesce(aj.claimed_at + (j.options ->> 'timeout')::interval + {{timeout_grace}} <= p_now, false)
        as is_timed_out, l.expires_at
    from queue.lease l
    cross join lateral (select j.options from queue.job j where j.id = l.id offset 0) j
    left join lateral (
      select aj.claimed_at
      from queue.active_job aj
      where aj.id = l.id and aj.claim = l.claim offset 0) aj on true
    where l.expires_at <= p_now and (v_grace_until <= p_now or l.given_at >= v_up_since) order by l.expires_at
  loop
    exit when v_reaped >= 20 and clock_timestamp() > p_until;
    continue when not v_claim.is_own and queue._renew_in_handler(v_claim.id, v_claim.claim);
    v_reaped := v_reaped + queue._reap_claim(
      v_claim.id, v_claim.claim, case when v_claim.is_timed_out then 'timed_out' else 'crashed' end,
      case when v_claim.is_timed_out then format('not done within its timeout of %s', v_claim.timeout)
           else format('its lease ended at %s', v_claim.expires_at) end);
  end loop;
  return v_reaped;
end $$;

-- Ends as crashed the claims whose worker was removed, unless they have a lease of their own: how they ended
-- is unknown. A fetch leaves such a claim only if it was prepared (PREPARE TRANSACTION) and committed long
-- after; the other causes are an incomplete restore and a bug. It reads the first 5,000 rows of
-- queue.active_job by id, and if there are more, as many from a random id on.
-- Locks: as reap.
create or replace function queue._reap_forgotten()
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_claim record;
  v_reaped integer := 0;
begin
  for v_claim in
    with least as materialized (
      select aj.id, aj.claim, aj.worker_id from queue.active_job aj order by aj.id limit 5000),
    chosen as materialized (
      select aj.id, aj.claim, aj.worker_id
      from (select min(l.id)
        + (random() * ((select aj.id from queue.active_job aj
        order by aj.id desc limit 1) - min(l.id)))::bigint as id
            from least l having count(*) = 5000) x
      cross join lateral (select aj.id, aj.claim, aj.worker_id from queue.active_job aj where aj.id >= x.id
        order by aj.id limit 5000) aj)
    select x.id, x.claim, x.worker_id
    from (select l.* from least l union select c.* from chosen c) x
    where x.claim is not null and not exists (select from queue.worker w where w.id = x.worker_id)
      and not exists (select from queue.lease l where l.id = x.id and l.claim = x.claim and l.is_own)
    order by x.id limit 1000
  loop
    v_reaped := v_reaped + queue._reap_claim(v_claim.id, v_claim.claim, 'crashed',
      format('worker %s was removed', v_claim.worker_id));
  end loop;
  return v_reaped;
end $$;

-- Releases claims that were put aside (work/deliver.sql) and not fetched in time, until p_until.
-- Locks: rows of queue.undelivered by skip locked; each claim as _reap_claim.
-- Why no wake-up is lost: as _reap_claim.
create or replace function queue._release_stale(p_until timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_claim record;
begin
  for v_claim in
    select u.worker_id, u.no, u.id, u.claim from queue.undelivered u
    where exists (select from queue.active_job aj where {{is_stale}})
    order by u.id limit 100 for update skip locked
  loop
    if queue._reap_claim(v_claim.id, v_claim.claim, 'released', null) > 0 then
      delete from queue.undelivered u where u.worker_id = v_claim.worker_id and u.no = v_claim.no;
    end if;
    exit when clock_timestamp() > p_until;
  end loop;
end $$;

-- Ends one dead claim; returns 0 if another session has ended it or holds it, or if it can't be ended now. A
-- claim that was never handed out (work/deliver.sql) is released.
-- Locks: the claim's row and the row of the job's queueing lock by skip locked, because the admission lock
-- may be held from an earlier claim; then as _end_attempt. Why no wake-up is lost: as there.
-- Two sessions: work/reap.replaced.spec.
create or replace function queue._reap_claim(p_id bigint, p_claim bigint, p_outcome text, p_error text)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_outcome text := p_outcome;
begin
  perform from queue.active_job aj where aj.id = p_id and aj.claim = p_claim for update skip locked;
  if not found then
    if not exists (select from queue.active_job aj where aj.id = p_id and aj.claim = p_claim) then
      -- Two reapers may meet this row, one of them with the admission lock: neither waits.
      delete from queue.lease l
      where l.ctid = any (array(select l.ctid from queue.lease l
        where l.id = p_id and l.claim = p_claim for update skip locked));
    end if;
    return 0;
  elsif exists (select from queue.lease l where l.id = p_id and l.claim = p_claim and l.is_own
    and l.expires_at > clock_timestamp())  -- it was extended since the caller looked
    or not queue._try_lock_queueing_lock(p_id) then
    return 0;
  end if;
  if exists (select from queue.active_job aj
    join queue.undelivered u on u.worker_id = aj.worker_id and u.id = aj.id and u.claim = aj.claim
    where aj.id = p_id) then
    v_outcome := 'released';
  end if;
  perform queue._end_attempt(
    case v_outcome
      when 'timed_out' then jsonb_build_object('outcome', 'failed', 'error', p_error, 'options',
        '{"outcome": "timed_out"}'::jsonb)
      when 'crashed' then jsonb_build_object('outcome', 'crashed', 'error', p_error)
      else '{"outcome": "released"}' end,
    p_id, p_claim, true);
  return 1;
exception when others then
  -- One bad row must not stop the reaping of the others, or keep every worker awake.
  update queue.lease l set expires_at = clock_timestamp() + interval '1 minute'
  where l.ctid = any (array(select l.ctid from queue.lease l
    where l.id = p_id and l.claim = p_claim for update skip locked));
  raise warning 'pgdefer: job % can''t be reaped: % (%)', p_id, sqlerrm, sqlstate;
  return 0;
end $$;

-- Invariants, for queue.check().
create or replace function queue._check_claim_rows()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'claimed by a removed worker'::text, aj.id, format('worker %s', aj.worker_id)
    from queue.active_job aj
    where aj.claim is not null and not exists (select from queue.worker w where w.id = aj.worker_id)
      and not exists (select from queue.lease l where l.id = aj.id and l.claim = aj.claim and l.is_own);
  return query
    select 'running, but its attempt has ended'::text, aj.id, format('claim %s', aj.claim)
    from queue.active_job aj join queue.attempt a on a.job_id = aj.id and a.claim = aj.claim;
  return query
    select 'a lease without its claim'::text, l.id, format('claim %s', l.claim)
    from queue.lease l
    where not exists (select from queue.active_job aj where aj.id = l.id and aj.claim = l.claim
      and aj.flags & {{lease}} <> 0);
  return query
    select 'told to abort, but not marked so'::text, aj.id, format('claim %s', aj.claim)
    from queue.active_job aj join queue.abort a on a.id = aj.id and a.claim = aj.claim
    where aj.flags & {{aborting}} = 0;
  return query
    select 'crashed before, but not quarantined'::text, aj.id, format('lane %s', aj.lane)
    from queue.active_job aj join queue.lane l on l.lane = aj.lane join queue.job_override s on s.id = aj.id
    where aj.claim is null and s.crashes > 0 and l.kind <> {{lane_crashed}};
  return query
    select 'finished, but still set to expire'::text, e.id, e.at::text
    from queue.expiry e join queue.finished f on f.id = e.id;
end $$;
