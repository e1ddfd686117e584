-- tick: everything that is due. Any worker calls it; pg_cron or psql may call it instead.

-- Locks: as _check_era; as reap; then ADM, waited for while nothing is held. A transaction of its own.
-- Raises: QJ008. What fails in one of its later duties is a warning, and undoes no other duty.
create or replace function queue.tick()
returns table (admitted integer, reaped integer, pruned integer, next_due timestamptz, suspects integer)
language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
#variable_conflict use_column
declare
  v_admit record;
  v_start timestamptz := clock_timestamp();
  v_safe_at timestamptz;
begin
  if to_regclass('queue.installation') is null then
    perform queue._not_installed();
  end if;
  perform queue._check_isolation();
  perform queue._check_era();
  select r.reaped into reaped from queue.reap() r;
  -- with rows that reap has locked ADM is not waited for; whoever has it admits, and the next tick does the rest
  if not queue._lock_admission(pg_current_xact_id_if_assigned() is null) then
    admitted := 0;
    pruned := 0;
    suspects := 0;
    next_due := queue._next_due();
    return next;
    return;
  end if;
  v_safe_at := queue._safe_at();
  admitted := 0;
  loop
    select a.* into v_admit from queue._admit(1000) a;
    admitted := admitted + v_admit.admitted;
    exit when not v_admit.has_more or clock_timestamp() > v_start + interval '1 s';
  end loop;
  perform queue._expire_due();
  begin
    perform queue._repair();
  exception when others then
    raise warning 'pgdefer: repair failed: % (%)', sqlerrm, sqlstate;
  end;
  pruned := 0;
  begin
    if not v_admit.has_more then
      pruned := queue._prune(1000, v_safe_at);
      if random() < 0.01 then
        perform queue._prune_old_runs(1000);
        perform queue._forget_deleted();
      end if;
    end if;
  exception when others then
    raise warning 'pgdefer: pruning failed: % (%)', sqlerrm, sqlstate;
  end;
  next_due := queue._next_due();
  select count(*) into suspects
  from (select from queue.lane l
        cross join lateral (select from queue.live v where v.lane = l.lane and v.claim is null limit 100) v
        where l.kind = 2 limit 100) x;
  return next;
end $$;
comment on function queue.tick() is
  'Does everything that is due: admission, expiry, reaping, repair, recurring runs, pruning. Any worker calls it; pg_cron can. suspects: how many jobs (100 at most) have crashed and wait to be claimed alone, so that a worker that is never idle should run dry and fetch with {"alone": "crashed"}.';

-- Cancels jobs whose expires_at has passed. One that runs may go on, but is not run again (_end_attempt).
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._expire_due()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_id bigint;
begin
  for v_id in
    select e.id from queue.expiry e
    where e.at <= v_now and (select v.claim from queue.live v where v.id = e.id) is null
    order by e.at limit 1000
  loop
    begin
      perform queue._expire(array[v_id]);
    exception when others then
      update queue.expiry e set at = clock_timestamp() + interval '1 minute' where e.id = v_id;
      raise warning 'pgdefer: job % can''t expire: % (%)', v_id, sqlerrm, sqlstate;
    end;
  end loop;
end $$;

-- Cancels jobs with reason expired, if they do not run.
-- Locks: the caller holds ADM; rows of queue.live by skip locked.
create or replace function queue._expire(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_id bigint;
  v_place text;
  v_left text[];
  v_keys text[];
  v_ended bigint[];
begin
  foreach v_id in array p_ids loop
    if queue._is_settled(v_id) then
      select t.place, t.keys into v_place, v_left from queue._take_out(v_id) t;
      if v_place <> 'log' then
        v_keys := v_keys || v_left;
        v_ended := v_ended || v_id;
        continue;
      end if;
    end if;
    delete from queue.expiry e where e.id = v_id and exists (select from queue.finished f where f.id = v_id);
  end loop;
  if v_ended is not null then
    perform queue._finish_unclaimed(v_ended, 'cancelled', 'expired', null);
    perform queue._advance(p_ended => v_ended, p_keys => v_keys);
  end if;
end $$;

-- Mends what can only be wrong after a bug or an aborted repair, now and then; counts again what has begun to
-- run while a queue's limit was set; forgets lanes and semaphores that have not been used for long.
-- Locks: the caller holds ADM; rows of queue.live and queue.queueing_lock by skip locked.
create or replace function queue._repair()
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  if random() < 0.02 then
    perform queue._advance(p_keys => array_agg(s.key)) from queue.semaphore s where s.lanes <> '{}' and s.used < s.slots having count(*) > 0;
  end if;
  if random() < 0.1 then
    perform queue._mend_cursor();
  end if;
  perform queue._limit_queue(c.queue) from queue.queue_config c where c.limited_at > clock_timestamp() - interval '1 minute';
  perform queue._repair_replacing();
  perform queue._repair_handovers();
  perform queue._rest_lanes();
  perform queue._forget_semaphores();
end $$;

-- A dump's data restored over an installed queue, against all advice, leaves a second row of queue.cursor, and jobs that
-- the newer one has passed: all of them are admitted again as after any restore. Not each time, as it reads what others
-- have replaced. (A unique constraint would, with each move of the cursor.)
-- Locks: the caller holds ADM.
create or replace function queue._mend_cursor()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if (select count(*) from (select from queue.cursor k limit 2) k) > 1 then
    perform queue._restart_cursor();
    raise warning 'pgdefer: data was restored over an installed queue; its jobs are admitted anew';
  end if;
end $$;
