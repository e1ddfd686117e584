-- Workers: a worker and its claims live as long as it calls heartbeat; when it no longer does, reap ends the
-- claims (work/reap.sql). heartbeat also tells a worker which claims to abort; _notify_abort
-- (base/notify.sql) asks for that.

-- Locks: as _check_era, if a new era is due; as _restart_grace, if all workers were silent. Raises: 22023.
create or replace function queue.register_worker(name text, queues text[] default null,
  info jsonb default '{}')
returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  perform queue._check_are_few(queues);
  {{if_restricted}}
    queues := queue._narrow_queues('{worker}', queues);
  end if;
  return queue._register_worker(name, queues, info);
end $$;
comment on function queue.register_worker(text, text[], jsonb) is
  'Registers a worker that serves the queues (names, prefix*, *; NULL: all) and returns its id.'
    ' queue.workers shows info. These of its keys have a meaning: client (name and version; refused with'
    ' QJ090 if it does not fit), dead_after (interval, 30 s), listen (false: the worker only polls, as'
    ' behind a transaction pooler) and session (true: see queue.work).';

-- Locks: as _restart_grace, if all workers were silent; the worker's row; its rows of queue.abort; then as
-- _maintain, which waits for nothing: the answer is complete by then.
-- Raises: 22023, QJ007.
create or replace function queue.heartbeat(worker bigint, memory bigint default null)
returns table (id bigint, claim bigint, reason text)
language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_told tid[];
  v_is_seen boolean := true;
  -- Maintenance might keep others waiting for locks that another part of the transaction holds.
  v_may_maintain boolean := current_setting('transaction_isolation') = 'read committed'
    and pg_current_xact_id_if_assigned() is null;
begin
  {{if_restricted}}
    perform queue._require_worker(heartbeat.worker);
  end if;
  if heartbeat.memory < 0 then
    perform queue._invalid('memory must not be negative',
      'Pass how many bytes the worker''s processes have in memory, or NULL if that is unknown.');
  end if;
  if exists (select from queue.worker w where w.id = heartbeat.worker and w.gone_at is null)
    and queue._are_all_silent(clock_timestamp(), queue._up_since()) then
    v_is_seen := current_setting('transaction_isolation') = 'read committed'
      and queue._restart_grace(clock_timestamp());
    v_may_maintain := false;
  end if;
  update queue.worker w set memory = heartbeat.memory,
    last_seen_at = case when v_is_seen then clock_timestamp() else w.last_seen_at end
  where w.id = heartbeat.worker and w.gone_at is null;
  if not found then
    perform queue._worker_gone(heartbeat.worker);
  end if;
  -- It takes a random thousand, so that repeated calls name all of them.
  v_told := array(
    select a.ctid from queue.abort a where a.worker_id = heartbeat.worker order by random() limit 1000);
  return query
    select a.id, a.claim, a.reason from queue.abort a where a.ctid = any (v_told) order by a.id, a.claim;
  -- A claim that was taken away is reported once.
  delete from queue.abort a
  where a.ctid = any (v_told) and not exists (select from queue.active_job aj
    where aj.id = a.id and aj.claim = a.claim);
  -- Of many workers about two maintain each second, chosen at random: more would find nothing to do. Those
  -- that have died do not count, so their claims end in time though few are left.
  if v_may_maintain and random() * (
      select count(*) from queue.worker w
      where w.gone_at is null and w.last_seen_at > clock_timestamp() - interval '10 s') < 20 then
    perform queue._maintain(interval '200 ms');
  end if;
end $$;
comment on function queue.heartbeat(bigint, bigint) is
  'Reports that the worker is alive; call it every 10 s. memory: the resident bytes of its processes, which'
    ' queue.workers shows (NULL: unknown). Returns the jobs that it must abort, at most 1,000: cancelled'
    ' ones, and those taken from it (retried). Then it runs due maintenance, as tick, but only briefly and'
    ' without waiting; it does not if the transaction has already written, or is not READ COMMITTED. If more'
    ' than 20 workers were seen in the last 10 s, about two calls a second do so, chosen at random. Raises'
    ' QJ007 if the worker was reaped or deregistered.';

create or replace function queue.claims(worker bigint)
returns table (id bigint, claim bigint)
language plpgsql stable parallel safe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  {{if_restricted}}
    perform queue._require_worker(claims.worker);
  end if;
  return query
    select aj.id, aj.claim from queue.active_job aj
    where aj.worker_id = claims.worker and aj.claim is not null
      and not exists (select from queue.undelivered u where u.worker_id = aj.worker_id and u.id = aj.id
        and u.claim = aj.claim)
    order by aj.id;
end $$;
comment on function queue.claims(bigint) is
  'Returns the claims that a worker holds, so that after a lost connection it can give back those that it'
    ' never received.';

-- It runs with the caller's rights, because PostgreSQL shows a session's state to its own role, and to few
-- others. A session that waits for its client does not count as working: it may have no client any more.
-- Locks: none.
create or replace function queue.is_busy(session integer)
returns boolean language plpgsql stable parallel restricted security invoker
set search_path = pg_catalog, pg_temp as $$
begin
  return exists (select from pg_stat_activity a
    where a.pid = is_busy.session and a.usename = session_user and a.backend_type = 'client backend'
      and a.state = 'active' and a.wait_event_type is distinct from 'Client');
end $$;
comment on function queue.is_busy(integer) is
  'Returns whether a session of the calling role (its number is pg_backend_pid) still works on a call, or'
    ' waits in one. A worker that has given up a call asks this before it calls again. Otherwise sessions'
    ' could use up max_connections: while no synchronous standby answers, each commit waits, however long'
    ' its client has been gone.';

-- Locks: the worker's row; the claims' rows of queue.active_job, all before the admission lock, which is then
-- taken by try.
create or replace function queue.deregister_worker(worker bigint)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_claim record;
  v_ids bigint[] := '{}'::bigint[];
begin
  {{if_restricted}}
    perform queue._require_worker(deregister_worker.worker);
  end if;
  perform queue._check_isolation();
  update queue.worker w set gone_at = clock_timestamp(), last_seen_at = clock_timestamp(), has_left = true
  where w.id = deregister_worker.worker and w.gone_at is null;
  perform from queue.active_job aj where aj.worker_id = deregister_worker.worker order by aj.id for update;
  for v_claim in
    select aj.id, aj.claim from queue.active_job aj where aj.worker_id = deregister_worker.worker
      and aj.claim is not null order by aj.id
  loop
    perform queue._end_attempt('{"outcome": "released"}', v_claim.id, v_claim.claim, false);
    v_ids := v_ids || v_claim.id;
  end loop;
  perform queue._settle_own(v_ids);
  return cardinality(v_ids);
end $$;
comment on function queue.deregister_worker(bigint) is
  'Removes the worker; its running jobs go back to ready. Returns their number. It is not an error if the'
    ' worker is already gone.';

-- register_worker without the check of rights. Locks and errors: as there.
create or replace function queue._register_worker(p_name text, p_queues text[], p_info jsonb)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_id bigint;
  v_dead_after interval := coalesce(queue._interval('dead_after', p_info -> 'dead_after'), interval '30 s');
begin
  perform queue._check_name('name', p_name);
  perform queue._check_list('queues', p_queues);
  if p_info is null or jsonb_typeof(p_info) <> 'object' then
    perform queue._invalid('info must be a JSON object', 'Pass an object such as {"host": "a"}.');
  elsif coalesce(jsonb_typeof(p_info -> 'listen'), 'boolean') not in ('boolean', 'null') then
    perform queue._invalid('listen must be true or false', 'Pass a JSON boolean.');
  elsif v_dead_after < interval '1 s' then
    perform queue._invalid('dead_after is too short',
      'Pass an interval of at least 1 second.');
  elsif cardinality(p_queues) = 0 then
    perform queue._invalid('queues is empty', 'Name queues or patterns, or pass NULL for all.');
  end if;
  perform queue._check_name('queue', q) from unnest(p_queues) q;
  perform queue._check_size('info', p_info);
  if p_info ? 'session' then
    if p_info -> 'session' <> 'true' then
      perform queue._invalid('session must be true',
        'Leave it out, except for a worker that runs its jobs in the session that registers it.');
    end if;
    p_info := jsonb_set(p_info, '{session}', to_jsonb(pg_backend_pid()));
  end if;
  perform queue._check_versions(p_info ->> 'client');
  perform queue._check_era();
  -- queue.work registers every few seconds. After a silence of all workers it may be the first to come back.
  if p_info ? 'session' and queue._are_all_silent(clock_timestamp(), queue._up_since()) then
    perform queue._restart_grace(clock_timestamp());
  end if;
  insert into queue.worker (name, queues, info, registered_at, last_seen_at, dead_after)
  values (p_name, p_queues, p_info, clock_timestamp(), clock_timestamp(), v_dead_after)
  returning id into v_id;
  return v_id;
end $$;

-- How many workers that are alive serve a queue. One last seen before p_up_since counts as seen then.
create or replace function queue._live_workers(
  p_queue text, p_now timestamptz, p_up_since timestamptz default '-infinity')
returns bigint language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select count(*) from queue.worker w
    where w.gone_at is null and greatest(w.last_seen_at, p_up_since) + w.dead_after >= p_now
      and (w.queues is null or exists (select from unnest(w.queues) q where queue._matches(p_queue, q))));
end $$;
