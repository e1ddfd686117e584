-- Maintenance: workers do what is due in heartbeat and in a fetch that finds nothing, so that they need no
-- tick.

-- Locks: as _check_era; as reap; then the admission lock, waited for while nothing is held. It needs a
-- transaction of its own.
-- Raises: QJ008. An error in one of the later steps is a warning, and undoes no other step.
create or replace function queue.tick()
returns table (admitted integer, reaped integer, pruned integer, next_due timestamptz)
language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner_brin}} as $$
begin
  {{installed}}
  perform queue._check_isolation();
  perform queue._check_era();
  select r.reaped into reaped from queue._reap(interval '1 s') r;
  -- The admission lock is not waited for while this holds rows that reap has locked. If another session has
  -- the lock, that session admits, and the next tick does the rest.
  if not queue._lock_admission(pg_current_xact_id_if_assigned() is null) then
    admitted := 0;
    pruned := 0;
  else
    select d.admitted, d.pruned into admitted, pruned from queue._do_duties(interval '1 s', 10000) d;
  end if;
  next_due := queue._next_due();
  {{if_operator}}
    perform queue._audit('tick', '{}', p_before => jsonb_build_object('admitted', admitted, 'reaped', reaped,
      'pruned', pruned));
  end if;
  return next;
end $$;
comment on function queue.tick() is
  'Does everything that is due: admission, expiry, reaping, repair, recurring runs, pruning. Workers do'
    ' this by heartbeat and fetch; without workers, call it from pg_cron.';

-- Ends dead claims, admits, expires, repairs and prunes, as far as p_budget roughly allows. An error is a
-- warning, and undoes what was done here, but nothing that the caller did.
-- Locks: as reap; then the admission lock by try. It waits for nothing, so a caller may hold its worker's
-- row, or the admission lock.
-- Why no wake-up is lost: work that is left stays due, and the next call of any worker finds it.
create or replace function queue._maintain(p_budget interval)
returns void language plpgsql volatile parallel unsafe security invoker {{planner_brin}} as $$
begin
  if not queue._is_era(queue._era()) then
    return;  -- the next fetch of a new session begins the era; it may wait for the admission lock
  end if;
  perform from queue._reap(p_budget);
  if queue._lock_admission(false) then
    perform from queue._do_duties(p_budget, 10);
  end if;
exception when others then
  raise warning 'pgdefer: maintenance failed: % (%)', sqlerrm, sqlstate;
end $$;

-- Runs _maintain after a fetch that found nothing, in four cases: every 10 s in a session; when a lease has
-- ended or a job has expired, because a sleeper was told to come back then; if an earlier call has not
-- reached all claims of a dead worker; and if a claim was not handed out for too long. The first call only
-- records the time, because heartbeats do most of the due work.
create or replace function queue._maintain_idle()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_epoch double precision := date_part('epoch', v_now);
  v_last double precision := nullif(current_setting('pgdefer.maintained_at', true), '')::double precision;
begin
  if v_last is null or abs(v_epoch - v_last) >= 10 then
    perform set_config('pgdefer.maintained_at', v_epoch::text, false);
  end if;
  if abs(v_epoch - v_last) >= 10
    or (select l.expires_at from queue.lease l order by l.expires_at limit 1) <= v_now
    or (select e.at from queue.expiry e
      where (select aj.claim from queue.active_job aj where aj.id = e.id) is null
      order by e.at limit 1) <= v_now
    or exists (select from queue.worker w where w.gone_at is not null and not w.is_clear and not w.has_left)
    or exists (select from queue.undelivered u cross join queue.active_job aj where {{is_stale}})
  then
    perform queue._maintain(interval '100 ms');
  end if;
end $$;

-- Does the work that is due besides reaping, for tick and _maintain: admission, expiry, repair, counting what
-- ended, pruning. It admits for p_budget and at most p_slices slices, because fetch admits a backlog at less
-- cost (work/claim_slice.sql).
-- Locks: the caller holds the admission lock.
create or replace function queue._do_duties(
  p_budget interval, p_slices integer, out admitted integer, out pruned integer)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_admit record;
  v_pruned integer;
  v_start timestamptz := clock_timestamp();
  v_safe_at timestamptz := queue._safe_at();
begin
  admitted := 0;
  for v_slice in 1 .. p_slices loop
    select a.* into v_admit from queue._admit_or_singly(1000) a;
    admitted := admitted + v_admit.admitted;
    exit when not v_admit.has_more or clock_timestamp() > v_start + p_budget;
  end loop;
  perform queue._expire_due();
  begin
    perform queue._repair();
  exception when others then
    raise warning 'pgdefer: repair failed: % (%)', sqlerrm, sqlstate;
  end;
  begin
    perform queue._count_minutes(p_budget);
  exception when others then
    raise warning 'pgdefer: counting what ended failed: % (%)', sqlerrm, sqlstate;
  end;
  pruned := 0;
  begin
    if not v_admit.has_more then
      for v_slice in 1 .. p_slices loop
        v_pruned := queue._prune(1000, v_safe_at);
        pruned := pruned + v_pruned;
        exit when v_pruned < 1000 or clock_timestamp() > v_start + p_budget / 2;
      end loop;
      perform queue._prune_idempotency_keys(5000);
      perform queue._prune_events(1000, v_safe_at);
      if random() < 0.01 then
        perform queue._prune_old_runs();
        perform queue._forget_deleted();
        perform queue._prune_groups(1000);
        perform queue._end_tags();
      end if;
    end if;
  exception when others then
    raise warning 'pgdefer: pruning failed: % (%)', sqlerrm, sqlstate;
  end;
end $$;

-- Occasionally repairs states that only a bug or an interrupted repair can cause, counts again jobs that
-- started while a queue's limit was being set, and removes lanes and semaphores that have not been used for
-- long.
-- Locks: the caller holds the admission lock; rows of queue.active_job and queue.queueing_lock by skip
-- locked.
create or replace function queue._repair()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if random() < 0.02 then
    perform queue._repair_settlements();
    perform queue._advance(p_keys => array_agg(s.key))
    from (
      select s.key from queue.semaphore s
      where s.lanes <> '{}' and s.used < s.slots
        and exists (select from unnest(s.ready, s.waiting) l (ready, waiting)
          where l.waiting > 0 and s.slots - s.used > l.ready)
      order by random() limit 1000) s
    having count(*) > 0;
  end if;
  if random() < 0.1 then
    perform queue._repair_cursor(), queue._retry_shelved();
  end if;
  perform queue._recount_limited();
  perform queue._repair_replacing();
  perform queue._mark_idle_lanes();
  perform queue._forget_semaphores();
  perform queue._forget_claims_of_gone_workers();
end $$;

-- When something is due that no commit announces: a schedule, a lease, a recurring run. now() if committed
-- jobs are not admitted yet.
create or replace function queue._next_due()
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_cursor record;
  v_due timestamptz;
begin
  select k.next_xid, k.in_flight, k.due_at,
    k.has_backlog or k.due_at > v_now as is_due,  -- due_at is ahead if the clock was set back
    exists (select from queue.job j where j.xid >= k.next_xid) as has_jobs,
    exists (select from queue.pending_settlement h where h.xid >= k.next_xid) as has_settlements
  into v_cursor from queue.cursor_now k;
  if v_cursor.is_due or v_cursor.has_jobs then
    return v_now;
  elsif v_cursor.in_flight <> '{}' then
    if exists (select from queue.job j
        where j.xid = any (array(select x from unnest(v_cursor.in_flight) x
          where pg_visible_in_snapshot(x, pg_current_snapshot())))) then
      return v_now;
    end if;
  end if;
  if v_cursor.has_settlements or v_cursor.in_flight <> '{}' then
    v_due := queue._next_settling(v_now);
  end if;
  return least(v_due,
    (select w.at from queue.waiting w where w.at >= v_cursor.due_at order by w.at limit 1),
    (select s.due_at from queue.schedule s where s.due_at >= v_cursor.due_at order by s.due_at limit 1),
    (select min(p.until) from queue.pause p where p.is_paused and p.until > v_now and isfinite(p.until)),
    -- Work that only tick does, and that may fail at once, is due after a moment, so that no caller spins.
    (select greatest(e.at, v_now + interval '10 ms') from queue.expiry e
     where (select aj.claim from queue.active_job aj where aj.id = e.id) is null order by e.at limit 1),
    (select greatest(x.at, v_now + interval '10 ms') from queue._next_lease_end() x (at)
      where x.at is not null),
    (select min(queue._next_start(c.queue)) from queue.queue_config c where c.rate_limit is not null));
end $$;

-- When to look again at open settlements; NULL: there are none.
create or replace function queue._next_settling(p_now timestamptz)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
begin
  return p_now + case
    when exists (select from queue.unsettled h
      where h.xid > {{shelved}} and pg_visible_in_snapshot(h.xid, pg_current_snapshot()))
    then interval '10 ms'
    -- A settlement waits for the end of a transaction (_row_locker), which wakes no worker.
    when exists (select from queue.unsettled h where h.xid > {{shelved}} and h.kind <> 'group')
    then interval '100 ms'
    -- A transaction that adds jobs to a group may be long, and its commit wakes a worker.
    when exists (select from queue.unsettled h where h.xid > {{shelved}}) then interval '1 s' end;
end $$;
