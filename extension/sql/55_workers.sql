-- Workers: a worker lives as long as it calls heartbeat, and its claims with it.

-- Locks: none, but as _check_era where a new era is due. Raises: 22023.
create or replace function queue.register_worker(name text, queues text[] default null, info jsonb default '{}')
returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    queues := queue._bound_queues('{worker}', queues);
  end if;
  return queue._register_worker(name, queues, info);
end $$;
comment on function queue.register_worker(text, text[], jsonb) is
  'Registers a worker that serves the queues (names, prefix*, *; NULL: all) and returns its id. info is shown in queue.workers; its keys dead_after (interval, 30 s) and listen (false: the worker only polls, as behind a transaction pooler) have a meaning.';

-- register_worker by whoever may. Locks and errors: as there.
create or replace function queue._register_worker(p_name text, p_queues text[], p_info jsonb)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_id bigint;
  v_dead_after interval := coalesce(queue._interval('dead_after', p_info -> 'dead_after'), interval '30 s');
begin
  perform queue._check_name('name', p_name);
  perform queue._check_list('queues', p_queues);
  if p_info is null or jsonb_typeof(p_info) <> 'object' then
    perform queue._invalid('info must be a JSON object', 'Pass an object such as {"host": "a"}.');
  elsif v_dead_after < interval '1 s' then
    perform queue._invalid('dead_after is too short', 'A worker is dead after 1 second without a heartbeat or more.');
  elsif cardinality(p_queues) = 0 then
    perform queue._invalid('queues is empty', 'Name queues or patterns, or pass NULL for all.');
  end if;
  perform queue._check_name('queue', q) from unnest(p_queues) q;
  perform queue._check_size('info', p_info);
  perform queue._check_versions(p_info ->> 'client');
  perform queue._check_era();
  insert into queue.worker (name, queues, info, registered_at, last_seen_at, dead_after)
  values (p_name, p_queues, p_info, clock_timestamp(), clock_timestamp(), v_dead_after)
  returning id into v_id;
  return v_id;
end $$;

-- Locks: the worker's row. Raises: QJ007.
create or replace function queue.heartbeat(worker bigint)
returns table (id bigint, claim bigint, reason text)
language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_worker(heartbeat.worker);
  end if;
  update queue.worker w set last_seen_at = clock_timestamp() where w.id = heartbeat.worker and w.gone_at is null;
  if not found then
    perform queue._worker_gone(heartbeat.worker);
  end if;
  return query select a.id, a.claim, a.reason from queue.abort a where a.worker_id = heartbeat.worker order by a.id, a.claim;
  -- a claim that was taken away is told once
  delete from queue.abort a
  where a.worker_id = heartbeat.worker and not exists (select from queue.live v where v.id = a.id and v.claim = a.claim);
end $$;
comment on function queue.heartbeat(bigint) is
  'Says that the worker lives; to be called each 10 s. Returns its jobs that it must abort: told to (cancelled), or taken from it (retried). Raises QJ007 when it was reaped or deregistered.';

create or replace function queue.claims(worker bigint)
returns table (id bigint, claim bigint)
language plpgsql stable parallel safe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_worker(claims.worker);
  end if;
  return query
    select v.id, v.claim from queue.live v
    where v.worker_id = claims.worker and v.claim is not null
      and not exists (select from queue.undelivered u where u.worker_id = v.worker_id and u.id = v.id and u.claim = v.claim)
    order by v.id;
end $$;
comment on function queue.claims(bigint) is
  'The claims that a worker holds: after a lost connection it gives back those that it never heard of.';

-- Until the timeout has passed it bounds the lease: the attempt ends 10 s past it, however often it is extended. Extended after
-- that, the handler could not be ended and still runs, as the live worker says by this: then the lease alone decides, so that
-- no second run, nor another holder of its lock or slot, starts beside it.
-- Locks: the claim's row. Raises: 22023, QJ001, QJ002.
create or replace function queue.extend(id bigint, claim bigint, lease interval)
returns timestamptz language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_claimed_at timestamptz;
  v_expires_at timestamptz;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_claims(array[extend.id], array[extend.claim]);
  end if;
  if extend.lease is null or extend.lease <= interval '0' then
    perform queue._invalid('lease must be longer than 0', 'Pass an interval such as ''20 minutes''.');
  end if;
  perform queue._check_interval('lease', extend.lease);
  update queue.live v set flags = v.flags | 128 where v.id = extend.id and v.claim = extend.claim returning v.claimed_at into v_claimed_at;
  if not found then
    perform queue._refuse(extend.id, extend.claim);
  end if;
  select case when v_claimed_at + t.timeout <= v_now then v_now + extend.lease
              else least(v_now + extend.lease, v_claimed_at + t.timeout + interval '10 s') end
  into v_expires_at
  from queue.job j cross join lateral (select (j.options ->> 'timeout')::interval as timeout) t where j.id = extend.id;
  insert into queue.lease as l (id, claim, expires_at, is_own) values (extend.id, extend.claim, v_expires_at, true)
  on conflict on constraint lease_pkey do update
    set claim = excluded.claim, expires_at = excluded.expires_at, is_own = true, given_at = excluded.given_at;
  return v_expires_at;
end $$;
comment on function queue.extend(bigint, bigint, interval) is
  'Gives the claim a lease of its own from now on, which then alone decides when it is dead, whatever becomes of its worker; returns its end. A timeout still bounds the attempt; but extended after it has passed, a claim stays for as long as it is: so a live worker says that the handler could not be ended and still runs.';

-- Locks: the worker's row; the claims' rows of queue.live, all before ADM, which is then taken by try.
create or replace function queue.deregister_worker(worker bigint)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_claim record;
  v_ids bigint[] := '{}'::bigint[];
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_worker(deregister_worker.worker);
  end if;
  perform queue._check_isolation();
  update queue.worker w set gone_at = clock_timestamp(), has_left = true where w.id = deregister_worker.worker and w.gone_at is null;
  perform from queue.live v where v.worker_id = deregister_worker.worker order by v.id for update;
  for v_claim in
    select v.id, v.claim from queue.live v where v.worker_id = deregister_worker.worker and v.claim is not null order by v.id
  loop
    perform queue._end_attempt('{"outcome": "released"}', v_claim.id, v_claim.claim, false);
    v_ids := v_ids || v_claim.id;
  end loop;
  perform queue._settle_own(v_ids);
  return cardinality(v_ids);
end $$;
comment on function queue.deregister_worker(bigint) is
  'Removes the worker; its running jobs go back to ready. Returns how many. No error if it is gone already.';

-- Locks: the worker's row, then as reap. It waits for that row alone, the first that it takes, as reap skips rows that are
-- locked and tries ADM: so no two of these, nor of reap, wait for each other. Two for one worker: two_reapers.spec.
-- Raises: QJ007 (a limited role), QJ008.
-- What a dead worker's claims held up goes on as reap ends them, or with the tick after it. A fetch of the dead process may be under way in the server: reap looks for its claims as for those of any worker that went.
create or replace function queue.worker_died(worker bigint)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_worker(worker_died.worker);
  end if;
  perform queue._check_isolation();
  update queue.worker w set gone_at = clock_timestamp() where w.id = worker_died.worker and w.gone_at is null;
  return (select r.reaped from queue.reap() r);
end $$;
comment on function queue.worker_died(bigint) is
  'Says that a worker''s process has ended without deregistering it: its claims end as crashed now, not after dead_after, but for those with a lease of their own. For whoever watches processes. Returns how many claims were ended, those of other dead workers included. No error if the worker is gone already.';

-- Locks: rows of queue.worker and queue.live by skip locked, each row on its own; ADM by try.
-- Two reapers at once: a claim ends once, whoever deletes its row.
-- A fetch that was under way when its worker went may still bring claims: so a worker's claims are looked
-- for at once, and again when every transaction has ended that could have seen it alive (waits_for: those
-- that were under way after its end had been committed; of a role, as vacuum's workers are not: their kind is hidden
-- from an owner who is no superuser). Then nothing can come any more (is_over).
-- The late claim of a worker that has said good-bye is released, as its others were; that of a dead one has crashed.
-- Nobody could be heard while the server was down: what was last heard of before its start counts as dead dead_after past that at
-- the earliest, a lease or a timeout 30 s.
-- Claims of forgotten workers a session looks for once in 10 s. Stops after a second: the next call goes on.
create or replace function queue.reap()
returns table (reaped integer, next_expiry timestamptz)
language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_up_since timestamptz := pg_postmaster_start_time();
  v_grace_until timestamptz := queue._grace_until();
  v_last bigint[];
  v_gone bigint[];
  v_left bigint[] := '{}'::bigint[];
  v_claim record;
  v_ended integer;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  perform queue._check_isolation();
  reaped := 0;
  update queue.worker w set gone_at = v_now
  where w.id = any (array(select w.id from queue.worker w where w.gone_at is null and greatest(w.last_seen_at, v_up_since) + w.dead_after < v_now for update skip locked));
  update queue.worker w
  set waits_for = array(
    select l.virtualtransaction from pg_locks l join pg_stat_activity a on a.pid = l.pid
    where l.locktype = 'virtualxid' and l.pid <> pg_backend_pid() and a.usesysid is not null
      and a.datid = (select d.oid from pg_database d where d.datname = current_database()))
  where w.id = any (array(select w.id from queue.worker w
                          where w.gone_at < v_now and w.waits_for is null and w.xmin <> pg_current_xact_id()::xid for update skip locked));
  v_last := array(
    select w.id from queue.worker w
    where w.waits_for is not null and not w.is_over
      and not exists (select from pg_locks l where l.locktype = 'virtualxid' and l.virtualtransaction = any (w.waits_for))
    for update skip locked);
  v_gone := v_last || array(select w.id from queue.worker w where w.gone_at is not null and not w.is_clear and w.id <> all (v_last));
  if v_gone <> '{}' then
    for v_claim in
      select v.id, v.claim, v.worker_id, w.name, w.last_seen_at, w.has_left from queue.live v join queue.worker w on w.id = v.worker_id
      where v.worker_id = any (v_gone) and not exists (select from queue.lease l where l.id = v.id and l.claim = v.claim and l.is_own)
      order by v.id
    loop
      v_ended := 0;
      if clock_timestamp() < v_now + interval '1 s' then
        v_ended := queue._reap_claim(v_claim.id, v_claim.claim, case when v_claim.has_left then 'released' else 'crashed' end,
          format('worker %s (%s) died: its last heartbeat was at %s', v_claim.worker_id, left(v_claim.name, 200), v_claim.last_seen_at));
      end if;
      reaped := reaped + v_ended;
      if v_ended = 0 then
        v_left := v_left || v_claim.worker_id;
      end if;
    end loop;
    update queue.worker w set is_clear = true
    where w.id = any (array(select w.id from queue.worker w where w.id = any (v_gone) and not w.is_clear and w.id <> all (v_left) for update skip locked));
    update queue.worker w set is_over = true where w.id = any (v_last) and w.id <> all (v_left);
  end if;
  if abs(date_part('epoch', v_now) - coalesce(nullif(current_setting('pgdefer.reviewed_at', true), '')::double precision, 0)) >= 10 then
    reaped := reaped + queue._reap_forgotten();
    perform set_config('pgdefer.reviewed_at', date_part('epoch', v_now)::text, false);
  end if;
  v_last := array(select w.id from queue.worker w where w.is_over and w.gone_at < v_now - interval '1 minute' for update skip locked);
  if v_last <> '{}' then
    delete from queue.abort a
    where a.ctid = any (array(select a.ctid from queue.abort a where a.worker_id = any (v_last) for update skip locked));
    delete from queue.undelivered u
    where u.ctid = any (array(select u.ctid from queue.undelivered u where u.worker_id = any (v_last) for update skip locked));
    delete from queue.worker w where w.id = any (v_last);
  end if;
  for v_claim in
    select l.id, l.claim, j.options ->> 'timeout' as timeout, l.is_own,
      coalesce(v.claimed_at + (j.options ->> 'timeout')::interval + interval '10 s' <= v_now, false) as is_timed_out, l.expires_at
    from queue.lease l
    cross join lateral (select j.options from queue.job j where j.id = l.id offset 0) j
    left join lateral (select v.claimed_at from queue.live v where v.id = l.id and v.claim = l.claim offset 0) v on true
    where l.expires_at <= v_now and (v_grace_until <= v_now or l.given_at >= v_up_since) order by l.expires_at
  loop
    exit when clock_timestamp() > v_now + interval '1 s';
    reaped := reaped + queue._reap_claim(
      v_claim.id, v_claim.claim, case when v_claim.is_timed_out then 'timed_out' else 'crashed' end,
      case when v_claim.is_timed_out then format('not done within its timeout of %s', v_claim.timeout)
           else format('its lease ended at %s', v_claim.expires_at) end);
  end loop;
  next_expiry := least((select min(greatest(w.last_seen_at, v_up_since) + w.dead_after) from queue.worker w where w.gone_at is null),
                       queue._next_lease_end());
  return next;
end $$;
comment on function queue.reap() is
  'Ends what is dead: claims of workers without a heartbeat for dead_after, since the server was started at the earliest, and leases and timeouts that have passed. Returns how many, and when the next may expire.';

-- Until when leases and timeouts that were set before the server's start last at least.
create or replace function queue._grace_until()
returns timestamptz language plpgsql stable parallel safe security invoker as $$
begin
  return pg_postmaster_start_time() + interval '30 s';
end $$;

-- When the next lease or timeout ends, as reap counts.
create or replace function queue._next_lease_end()
returns timestamptz language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
begin
  if queue._grace_until() <= clock_timestamp() then
    return (select l.expires_at from queue.lease l order by l.expires_at limit 1);
  end if;
  return (select min(case when l.given_at < pg_postmaster_start_time() then greatest(l.expires_at, queue._grace_until()) else l.expires_at end)
          from queue.lease l);
end $$;

-- Ends claims without a lease of their own whose worker is forgotten, as crashed: how it ended nobody can tell. No fetch
-- leaves such a claim, but one that was prepared (PREPARE TRANSACTION) and committed long after; nor do half a restore and
-- a bug. Looks at 5,000 rows of queue.live from the least id on, and at as many from one by chance where there are more.
-- Locks: as reap.
create or replace function queue._reap_forgotten()
returns integer language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_claim record;
  v_reaped integer := 0;
begin
  for v_claim in
    with least as materialized (
      select v.id, v.claim, v.worker_id from queue.live v order by v.id limit 5000),
    chosen as materialized (
      select v.id, v.claim, v.worker_id
      from (select min(l.id) + (random() * ((select v.id from queue.live v order by v.id desc limit 1) - min(l.id)))::bigint as id
            from least l having count(*) = 5000) x
      cross join lateral (select v.id, v.claim, v.worker_id from queue.live v where v.id >= x.id order by v.id limit 5000) v)
    select x.id, x.claim, x.worker_id
    from (select l.* from least l union select c.* from chosen c) x
    where x.claim is not null and not exists (select from queue.worker w where w.id = x.worker_id)
      and not exists (select from queue.lease l where l.id = x.id and l.claim = x.claim and l.is_own)
    order by x.id limit 1000
  loop
    v_reaped := v_reaped + queue._reap_claim(v_claim.id, v_claim.claim, 'crashed', format('worker %s is forgotten', v_claim.worker_id));
  end loop;
  return v_reaped;
end $$;

-- Ends one dead claim; 0 when another has ended it, holds it, or it can't be ended now. One that was never handed out
-- (41_deliver.sql) is released.
create or replace function queue._reap_claim(p_id bigint, p_claim bigint, p_outcome text, p_error text)
returns integer language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  perform from queue.live v where v.id = p_id and v.claim = p_claim for update skip locked;
  if not found then
    if not exists (select from queue.live v where v.id = p_id and v.claim = p_claim) then
      -- two reapers may meet it, one of them with ADM: neither waits
      delete from queue.lease l
      where l.ctid = any (array(select l.ctid from queue.lease l where l.id = p_id and l.claim = p_claim for update skip locked));
    end if;
    return 0;
  elsif exists (select from queue.lease l where l.id = p_id and l.claim = p_claim and l.is_own and l.expires_at > clock_timestamp()) then
    return 0;  -- it was extended since the caller looked
  end if;
  perform queue._end_attempt(
    case
      case when exists (select from queue.live v join queue.undelivered u on u.worker_id = v.worker_id and u.id = v.id and u.claim = v.claim
                        where v.id = p_id) then 'released' else p_outcome end
      when 'timed_out' then jsonb_build_object('outcome', 'failed', 'error', p_error, 'options', '{"outcome": "timed_out"}'::jsonb)
      when 'crashed' then jsonb_build_object('outcome', 'crashed', 'error', p_error)
      else '{"outcome": "released"}' end,
    p_id, p_claim, true);
  return 1;
exception when others then
  -- one poisoned row must not keep the others from being reaped, nor every worker awake
  update queue.lease l set expires_at = clock_timestamp() + interval '1 minute'
  where l.ctid = any (array(select l.ctid from queue.lease l where l.id = p_id and l.claim = p_claim for update skip locked));
  raise warning 'pgdefer: job % can''t be reaped: % (%)', p_id, sqlerrm, sqlstate;
  return 0;
end $$;

-- Invariants, for queue.check().
create or replace function queue._check_claim_rows()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select 'claimed by a worker that is forgotten'::text, v.id, format('worker %s', v.worker_id)
    from queue.live v
    where v.claim is not null and not exists (select from queue.worker w where w.id = v.worker_id)
      and not exists (select from queue.lease l where l.id = v.id and l.claim = v.claim and l.is_own);
  return query
    select 'running, and its attempt has ended'::text, v.id, format('claim %s', v.claim)
    from queue.live v join queue.attempt a on a.job_id = v.id and a.claim = v.claim;
  return query
    select 'a lease without its claim'::text, l.id, format('claim %s', l.claim)
    from queue.lease l where not exists (select from queue.live v where v.id = l.id and v.claim = l.claim and v.flags & 128 <> 0);
  return query
    select 'told to abort, and its end would not heed it'::text, v.id, format('claim %s', v.claim)
    from queue.live v join queue.abort a on a.id = v.id and a.claim = v.claim where v.flags & 32 = 0;
  return query
    select 'crashed before, and ready beside others'::text, v.id, format('lane %s', v.lane)
    from queue.live v join queue.lane l on l.lane = v.lane join queue.job_state s on s.id = v.id
    where v.claim is null and s.crashes > 0 and l.kind <> 2;
  return query
    select 'finished, and expires'::text, e.id, e.at::text
    from queue.expiry e join queue.finished f on f.id = e.id;
end $$;
