-- Operating on many jobs: moving, copying, deleting, ending them by hand.
--
-- Each call is one transaction and takes its locks in the order of 80_operate.sql: rows of queue.live,
-- queueing locks and rows of queue.finished, each sorted and waited for, then ADM. What it meets under ADM
-- it locks by skip locked (_grasp): a job that got there meanwhile, and that another transaction is at, is
-- refused like one whose state does not allow the call. The claim of a running job that is taken away is
-- lost: its worker is told to abort, and its late outcome gets QJ002.
--
-- Whether an id is one of many is asked by (NOT) IN (SELECT unnest(...)), which the planner hashes: = ANY (array)
-- reads the array through for each row.

-- Locks: as above. Raises: 22023, QJ008.
create or replace function queue.move(ids bigint[], queue text, force boolean default false)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_job record;
  v_done bigint[] := '{}'::bigint[];
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', move.ids);
    perform queue._bound_queue('{operator}', move.queue);
  end if;
  perform queue._check_queue(move.queue);
  perform queue._reach_all(move.ids);
  for v_job in select distinct u.id from unnest(move.ids) u (id) order by u.id loop
    select v_job.id, g.* into v_job from queue._grasp(v_job.id) g;
    continue when v_job.standing in ('missing', 'busy') or v_job.standing = 'running' and move.force is not true;
    if v_job.standing = 'running' then
      perform queue._end_attempt('{"outcome": "released", "error": "taken back by a move with force"}', v_job.id, v_job.claim, true);
      perform queue._tell_abort(v_job.id, v_job.claim, v_job.worker_id, 'moved');
    end if;
    perform queue._amend(v_job.id, p_queue => move.queue);
    perform queue._set_purge_at(v_job.id);
    v_done := v_done || v_job.id;
  end loop;
  perform queue._announce();
  return query select t.id, t.outcome, t.error from queue._told(move.ids, v_done) t;
end $$;
comment on function queue.move(bigint[], text, boolean) is
  'Puts jobs into another queue, with their ids, args, attempts and history; finished ones run there if they are retried. A running job is refused (QJ003) without force; with force its claim is lost and it is ready again there. A row for each id: its state in outcome, or an error.';

-- Locks: none but the latch, shared and by try: it only appends, as defer does. Raises: 22023, QJ001.
create or replace function queue.copy(id bigint, queue text default null)
returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_now timestamptz;
  v_needs bigint[];
  v_id bigint;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', array[copy.id]);
    perform queue._bound_queue('{operator}', copy.queue) where copy.queue is not null;
  end if;
  if copy.queue is not null then
    perform queue._check_queue(copy.queue);
  end if;
  perform pg_current_xact_id();  -- as in _check_needs
  v_now := clock_timestamp();
  v_needs := array(
    select n.id from queue._direct_needs(copy.id) n
    cross join lateral (select o.id from queue.job o where o.id = n.id offset 0) o
    left join lateral (select f.purge_at, f.finished_at, f.state from queue.finished f where f.id = n.id offset 0) f on true
    where not coalesce(f.purge_at <= v_now or f.purge_at is null and f.state = 'succeeded' and f.finished_at < v_now - interval '7 days', false)
    order by n.id);
  insert into queue.log (task, args, given)
  select j.task, coalesce(s.args, j.args), row(
    coalesce(copy.queue, s.queue, j.queue), coalesce(s.priority, j.priority),
    (j.flags | coalesce(s.extra_flags, 0)) & ~(8 | 16 | 32 | 64 | 256 | 8192) & case when x.lock is null then ~3 else -1 end
      | case when v_needs <> '{}' or j.options ->> 'needs_mode' = 'any' then 8 else 0 end
      | case when x.scheduled_at is not null then 16 else 0 end
      | case when w.id is not null then 32 else 0 end
      | case when x.is_expiring then 64 else 0 end,
    x.scheduled_at, j.deadline, x.lock, null, nullif(v_needs, '{}'), j.keys, j.limits,
    case when x.is_expiring then j.options else nullif(j.options - 'expires_at', '{}') end, coalesce(s.size, j.size))::queue.given
  from queue.job j
  left join queue.job_state s on s.id = j.id
  left join queue.waiting w on w.id = j.id and w.reason = 'held'
  cross join lateral (
    select nullif(coalesce(s.lock, j.lock), '') as lock,
      nullif(case when s.claims > 0 then case when j.scheduled_at <= v_now then j.scheduled_at end
                  else coalesce(s.scheduled_at, j.scheduled_at) end, '-infinity') as scheduled_at,
      coalesce((j.options ->> 'expires_at')::timestamptz > v_now, false) as is_expiring) x
  where j.id = copy.id
  returning id into v_id;
  if v_id is null then
    perform queue._job_not_found(copy.id);
  end if;
  perform queue._announce();
  return v_id;
end $$;
comment on function queue.copy(bigint, text) is
  'Defers a job with the same task, args and options once more, into a queue (NULL: the same), and returns its id. The copy has a history of its own. It takes no queueing_lock, no expires_at that has passed, and of the needs those that are still there; it is held if the job is.';

-- Locks: as above. Raises: 22023, QJ008.
create or replace function queue.delete(ids bigint[], force boolean default false)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_done bigint[];
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', delete.ids);
  end if;
  perform queue._reach_all(delete.ids);
  v_done := queue._delete(delete.ids, coalesce(delete.force, false));
  perform queue._announce();
  return query
    select t.id, case when t.id in (select unnest(v_done)) then 'deleted' else t.outcome || coalesce(', needed by job ' || n.id, '') end,
      case when t.id not in (select unnest(v_done)) then t.error end
    from queue._told(delete.ids, v_done) t
    left join lateral (select d.job_id as id from queue.need d where d.need_id = t.id and t.outcome is distinct from 'running'
                         and not exists (select from queue.finished f where f.id = d.job_id) order by d.job_id limit 1) n on true;
end $$;
comment on function queue.delete(bigint[], boolean) is
  'Removes jobs and every trace of them. One that runs, or that an unfinished job needs which is not removed with it, is refused (QJ003) without force; with force the claim is lost, and those that need it count it as failed unless it had succeeded. A row for each id: deleted, or an error with its state.';

-- Locks: as above. Raises: 22023, QJ008.
create or replace function queue.fail_jobs(ids bigint[], message text default null)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_job record;
  v_done bigint[] := '{}'::bigint[];
  v_taken record;
  v_message text := left(fail_jobs.message, 10000);
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', fail_jobs.ids);
  end if;
  perform queue._reach_all(fail_jobs.ids);
  for v_job in select distinct u.id from unnest(fail_jobs.ids) u (id) order by u.id loop
    select v_job.id, g.* into v_job from queue._grasp(v_job.id) g;
    if v_job.standing = 'running' then
      -- it fails, whether it was told to abort or not
      update queue.live v set flags = v.flags & ~32 where v.id = v_job.id;
      perform queue._end_attempt(
        jsonb_build_object('outcome', 'failed', 'error', v_message, 'options', '{"retryable": false, "reason": "operator"}'::jsonb),
        v_job.id, v_job.claim, true);
      perform queue._tell_abort(v_job.id, v_job.claim, v_job.worker_id, 'failed');
    elsif v_job.standing = 'open' then
      v_taken := queue._take_out(v_job.id);
      perform queue._finish_unclaimed(array[v_job.id], 'failed', 'operator', v_message);
      perform queue._advance(p_ended => array[v_job.id], p_keys => v_taken.keys);
    else
      continue;
    end if;
    v_done := v_done || v_job.id;
  end loop;
  perform queue._announce();
  return query select t.id, t.outcome, t.error from queue._told(fail_jobs.ids, v_done) t;
end $$;
comment on function queue.fail_jobs(bigint[], text) is
  'Ends unfinished jobs as failed, reason operator, with message as their error; they are not retried. A running one''s claim is lost. Finished ones are refused (QJ003). A row for each id: failed, or an error with its state.';

-- Locks: as above. Raises: 22023, QJ008.
create or replace function queue.done(ids bigint[])
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_job record;
  v_now timestamptz := clock_timestamp();
  v_done bigint[] := '{}'::bigint[];
  v_taken record;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', done.ids);
  end if;
  perform queue._reach_all(done.ids);
  for v_job in select distinct u.id from unnest(done.ids) u (id) order by u.id loop
    select v_job.id, g.* into v_job from queue._grasp(v_job.id) g;
    if v_job.standing = 'running' then
      perform queue._succeed(array[v_job.id], array[v_job.claim], null);
      update queue.finished f set reason = 'operator' where f.id = v_job.id;
      perform queue._tell_abort(v_job.id, v_job.claim, v_job.worker_id, 'done');
    elsif v_job.standing = 'open' then
      v_taken := queue._take_out(v_job.id);
      perform queue._finish_unclaimed(array[v_job.id], 'succeeded', 'operator', null);
      perform queue._advance(p_ended => array[v_job.id], p_keys => v_taken.keys);
    elsif v_job.standing = 'finished' then
      update queue.finished f set state = 'succeeded', reason = 'operator', finished_at = v_now, worker_id = null
      where f.id = v_job.id and f.state <> 'succeeded';
      continue when not found;
      perform queue._set_purge_at(v_job.id);
      perform queue._advance(p_changed => array[v_job.id]);
    else
      continue;
    end if;
    v_done := v_done || v_job.id;
  end loop;
  perform queue._announce();
  return query select t.id, t.outcome, t.error from queue._told(done.ids, v_done) t;
end $$;
comment on function queue.done(bigint[]) is
  'Marks jobs as succeeded, reason operator, without running them: unfinished ones, failed and cancelled ones too, so that what needs them goes on. A running one''s claim is lost. One that has succeeded is refused (QJ003). A row for each id: succeeded, or an error with its state.';

-- Locks: as above. Raises: 22023, QJ008.
create or replace function queue.set_priority(ids bigint[], priority integer)
returns table (id bigint, outcome text, error text)
language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_job record;
  v_done bigint[] := '{}'::bigint[];
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', set_priority.ids);
  end if;
  if set_priority.priority is null then
    perform queue._invalid('priority is missing', 'Give a whole number; higher runs first.');
  end if;
  perform queue._reach_all(set_priority.ids);
  for v_job in select distinct u.id from unnest(set_priority.ids) u (id) order by u.id loop
    select v_job.id, g.* into v_job from queue._grasp(v_job.id) g;
    continue when v_job.standing in ('missing', 'busy');
    perform queue._amend(v_job.id, p_priority => set_priority.priority);
    v_done := v_done || v_job.id;
  end loop;
  perform queue._announce();
  return query select t.id, t.outcome, t.error from queue._told(set_priority.ids, v_done) t;
end $$;
comment on function queue.set_priority(bigint[], integer) is
  'Changes the priority of jobs; of running and finished ones for their next run. A row for each id: its state in outcome, or an error.';

-- Locks: the job's row of queue.live, waited for; ADM, waited for.
-- Raises: 22023, QJ001, QJ003 (running or finished), QJ008.
create or replace function queue.reschedule(id bigint, at timestamptz default null)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', array[reschedule.id]);
  end if;
  if not isfinite(reschedule.at) then
    perform queue._invalid('at must be finite', 'Give a moment, or NULL for now. To put a job aside without one, use queue.hold.');
  end if;
  perform queue._check_moment('at', reschedule.at);
  perform queue._reach(reschedule.id);
  if (select g.standing from queue._grasp(reschedule.id) g) <> 'open' then
    perform queue._invalid_state(reschedule.id, queue._state(reschedule.id), 'Only a job that is neither running nor finished has a time to come; queue.retry runs a finished one again.');
  end if;
  perform queue._amend(reschedule.id, p_scheduled_at => coalesce(reschedule.at, '-infinity'));
  perform queue._announce();
  return queue._state(reschedule.id);
end $$;
comment on function queue.reschedule(bigint, timestamptz) is
  'Gives a job that is neither running nor finished another time, NULL: now; one that waits for a retry too. Returns its new state.';

-- Locks: as _reach; then, under ADM, the job's row of queue.finished by skip locked.
-- Why no run has other args than it was given: a fetch that has the job's row is waited for, and the job is then running; one that
-- comes later skips that row, and what is in no row of queue.live is let in under ADM. Two sessions: operate_claim.spec.
-- Why no wake-up is lost: it ends with _announce, as all that may leave a job ready.
-- Raises: 22023, QJ001, QJ003 (running or succeeded), QJ008.
create or replace function queue.set_args(id bigint, args jsonb)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_standing text;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_jobs('{operator}', array[set_args.id]);
  end if;
  if jsonb_typeof(set_args.args) is distinct from 'object' then
    perform queue._invalid('args must be a JSON object', 'Pass the arguments by name: {"name": value}.', 'type: ' || coalesce(jsonb_typeof(set_args.args), 'NULL'));
  end if;
  perform queue._check_size('args', set_args.args);
  perform queue._reach(set_args.id);
  select g.standing into v_standing from queue._grasp(set_args.id) g;
  if v_standing not in ('open', 'finished') or exists (select from queue.finished f where f.id = set_args.id and f.state = 'succeeded') then
    perform queue._invalid_state(set_args.id, queue._state(set_args.id), 'Only a job that neither runs nor has succeeded can get other args, and not before the transaction that deferred it has committed. Where another transaction may be at it, try again.');
  end if;
  perform queue._amend(set_args.id, p_args => set_args.args);
  perform queue._announce();
  return queue._state(set_args.id);
end $$;
comment on function queue.set_args(bigint, jsonb) is
  'Gives a job that neither runs nor has succeeded other args, an object, in place of all it had: a failed or cancelled one for its retry. Its lock and keys stay as they were filled from the old ones. Returns its state.';

-- Locks: as fetch. A transaction of its own. The claim hangs on its lease alone: the worker that it was made
-- with is gone at once.
-- Raises: 22023, QJ008.
create or replace function queue.next(queues text[] default null, ack boolean default false, lease interval default '20 minutes')
returns table (id bigint, claim bigint, task text, args jsonb, queue text, priority integer, lock text, attempt integer,
               scheduled_at timestamptz, deadline timestamptz, headers jsonb, expires_at timestamptz)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_worker bigint;
  v record;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    queues := queue._bound_queues('{operator}', queues);
  end if;
  perform queue._check_isolation();
  if next.ack is not true and (next.lease is null or next.lease <= interval '0') then
    perform queue._invalid('lease must be longer than 0', 'Pass an interval such as ''20 minutes''.');
  end if;
  perform queue._check_interval('lease', next.lease) where next.ack is not true;
  v_worker := queue._register_worker('operator', queues, '{"listen": false}');
  v := queue._claim(v_worker, queues, 1, '{"alone": true}', true);
  select c.id, c.claim, c.task, case when x.size <= 65536 then c.args end, c.queue, c.priority, c.lock, c.attempt, c.scheduled_at, c.deadline,
    case when x.size <= 65536 then c.headers end
  into id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, headers
  from queue.claimed c
  cross join lateral (select coalesce(s.size, j.size, 0) as size from queue.job j left join queue.job_state s on s.id = j.id where j.id = c.id) x
  where c.id = v.ids[1];
  if id is null or next.ack then
    delete from queue.worker w where w.id = v_worker;
    if id is null then
      return;
    end if;
    perform queue._succeed(array[id], array[claim], null);
    update queue.finished f set reason = 'operator' where f.id = next.id;
  else
    expires_at := queue.extend(id, claim, next.lease);
    update queue.worker w set gone_at = clock_timestamp(), is_clear = true where w.id = v_worker;
  end if;
  return next;
end $$;
comment on function queue.next(text[], boolean, interval) is
  'Claims the next job of queues (names, prefix*, *; NULL: all) by hand, for queue.succeed, fail or release with its id and claim. It has a lease of its own, at whose end (expires_at) it counts as crashed; queue.extend renews it. With ack it is done with at once: it has succeeded, reason operator. No row: there is none. Args of more than 64 kB are left out: read them in queue.jobs.';

-- Locks: as above. The whole log is read to find the queue's jobs.
-- Raises: 22023 (no such queue), QJ006, QJ008.
create or replace function queue.delete_queue(name text, force boolean default false)
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_later bigint[];
  v_ids bigint[];
  v_done bigint[];
  v_deleted integer := 0;
  v_open bigint;
  v_running bigint;
  v_need record;
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_queue('{operator}', delete_queue.name);
  end if;
  perform queue._check_isolation();
  perform queue._check_queue(delete_queue.name);
  perform from queue.live v
  where v.lane = any (array(select l.lane from queue.lane l where l.queue = delete_queue.name)) order by v.id for update;
  perform queue._admit_all();
  if not exists (select from queue.queue_config c where c.queue = delete_queue.name)
    and not exists (select from queue.lane l where l.queue = delete_queue.name)
    and not exists (select from queue.job j left join queue.job_state s on s.id = j.id where coalesce(s.queue, j.queue) = delete_queue.name) then
    perform queue._invalid('no such queue', 'queue.queues lists them.', 'queue: ' || delete_queue.name);
  end if;
  -- again, as the end of a claim admits what was committed meanwhile (delete_queue_defer.spec); that ends, as nothing
  -- that is admitted under this ADM can run
  loop
    v_later := array(select u.id from queue.unadmitted u);  -- what was committed since is deferred later
    v_ids := array(
      select j.id from queue.job j left join queue.job_state s on s.id = j.id
      where coalesce(s.queue, j.queue) = delete_queue.name and j.id <> all (v_later) order by j.id);
    exit when v_ids = '{}';
    if delete_queue.force is not true then
      select count(*), count(*) filter (where v.claim is not null) into v_open, v_running
      from unnest(v_ids) u (id) left join queue.finished f on f.id = u.id left join queue.live v on v.id = u.id where f.id is null;
      if v_open > 0 then
        perform queue._queue_not_empty(delete_queue.name, format('unfinished jobs: %s, of these running: %s', v_open, v_running));
      end if;
      select d.job_id, d.need_id into v_need
      from queue.need d
      where d.need_id = any (v_ids) and not exists (select from queue.finished f where f.id = d.job_id) limit 1;
      if found then
        perform queue._queue_not_empty(delete_queue.name, format('job %s of another queue needs job %s', v_need.job_id, v_need.need_id));
      end if;
    end if;
    v_done := queue._delete(v_ids, true);
    if cardinality(v_done) < cardinality(v_ids) then
      perform queue._queue_not_empty(delete_queue.name, format('jobs that another transaction is at just now: %s', cardinality(v_ids) - cardinality(v_done)));
    end if;
    v_deleted := v_deleted + cardinality(v_done);
  end loop;
  delete from queue.lane l where l.queue = delete_queue.name;
  delete from queue.queue_config c where c.queue = delete_queue.name;
  delete from queue.pause p where p.queue = delete_queue.name;
  delete from queue.rate_start r where r.queue = delete_queue.name;
  delete from queue.semaphore s where s.key = 'q' || delete_queue.name;
  perform queue._announce();
  return v_deleted;
end $$;
comment on function queue.delete_queue(text, boolean) is
  'Removes a queue with its settings and all its finished jobs. With unfinished jobs in it, or one that another queue''s needs, it is refused (QJ006) without force, which removes them as queue.delete does. Returns how many jobs. A job deferred later makes the queue anew, without settings.';

-- Raises: QJ006, always.
create or replace function queue._queue_not_empty(p_queue text, p_detail text)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ006', message = 'queue not empty', detail = format('queue: %s, %s', p_queue, p_detail),
    hint = 'Let them end or move them, or pass force => true to remove them.';
end $$;

-- Readies a call that changes many jobs: takes the locks in their order.
-- Locks: see the top. Raises: 22023, QJ008.
create or replace function queue._reach_all(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  perform queue._check_isolation();
  perform queue._check_ids(p_ids);
  perform from queue.live v where v.id = any (p_ids) order by v.id for update;
  perform from queue.queueing_lock k
  where k.key = any (array(select j.queueing_lock from queue.job j where j.id = any (p_ids) and j.queueing_lock is not null)) and k.job_id = any (p_ids)
  order by k.key for update;
  perform from queue.finished f where f.id = any (p_ids) order by f.id for update;
  perform queue._admit_all();
end $$;

-- How a job stands: missing, running, finished, open (neither), or busy: another transaction is at it, its
-- claim's end is not settled, or it has yet to be admitted. All but missing and busy are locked.
-- Locks: the caller holds ADM; the job's rows by skip locked.
create or replace function queue._grasp(p_id bigint, out standing text, out claim bigint, out worker_id bigint)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_xid xid8;
begin
  select j.xid into v_xid from queue.job j where j.id = p_id;
  if not found then
    standing := 'missing';
    return;
  end if;
  standing := 'busy';
  if v_xid is not distinct from pg_current_xact_id_if_assigned()
    or exists (select from queue.handover h where h.job_id = p_id and h.kind in ('ended', 'again')
                 and not (h.kind = 'again' and h.flags = 0 and h.payload is null))
    or not queue._is_settled(p_id)
  then
    return;
  end if;
  select v.claim, v.worker_id into claim, worker_id from queue.live v where v.id = p_id for update skip locked;
  if found then
    standing := case when claim is null then 'open' else 'running' end;
    return;
  elsif exists (select from queue.live v where v.id = p_id) then
    return;
  end if;
  perform from queue.finished f where f.id = p_id for update skip locked;
  if found then
    standing := 'finished';
  elsif not exists (select from queue.finished f where f.id = p_id) and queue._is_gated(p_id) then
    standing := 'open';
  end if;
end $$;

-- Whether a job waits in a gate: one that is in neither queue.live nor queue.finished has else yet to be admitted.
-- Locks: the caller holds ADM.
create or replace function queue._is_gated(p_id bigint)
returns boolean language plpgsql stable parallel safe security invoker as $$
#variable_conflict use_column
begin
  return exists (select from queue.waiting w where w.id = p_id)
    or exists (select from queue.handover h where h.job_id = p_id and h.kind = 'again')
    or exists (select from queue.job j left join queue.job_state s on s.id = j.id
               join queue.lock_member m on m.lock = coalesce(s.lock, j.lock) and m.id = j.id where j.id = p_id);
end $$;

-- Sets until when a finished job is kept, which its queue or its state has changed.
create or replace function queue._set_purge_at(p_id bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  -- not before now: a job whose transaction names this one as a need may have yet to commit (_safe_at)
  update queue.finished f set purge_at = greatest(f.finished_at + x.retain, case when x.retain is not null then clock_timestamp() end)
  from (select coalesce((j.options ->> 'retain')::interval, c.retain) as retain
        from queue.job j left join queue.job_state s on s.id = j.id
        left join queue.queue_config c on c.queue = coalesce(s.queue, j.queue) where j.id = p_id) x
  where f.id = p_id;
end $$;

-- What became of each id, in the order in which they were given, each once.
create or replace function queue._told(p_ids bigint[], p_done bigint[])
returns table (id bigint, outcome text, error text)
language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select u.id, j.state, case when u.id in (select unnest(p_done)) then null when j.id is null then 'QJ001' else 'QJ003' end
    from (select u.id, min(u.n) as n from unnest(p_ids) with ordinality u (id, n) group by u.id) u
    left join lateral (select j.id, j.state from queue.jobs j where j.id = u.id offset 0) j on true
    order by u.n;
end $$;

-- Deletes those jobs that may be, and returns their ids. Finished ones, and ready ones that hold nothing,
-- as sets; the others are ended one by one first, and so let go what they held.
-- Locks: the caller holds ADM; the jobs' rows by skip locked.
create or replace function queue._delete(p_ids bigint[], p_force boolean)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_job record;
  v_finished bigint[];
  v_plain bigint[];
  v_open bigint[] := '{}'::bigint[];
  v_claims bigint[] := '{}'::bigint[];
  v_workers bigint[] := '{}'::bigint[];
  v_all bigint[];
  v_needed bigint[];
  v_taken record;
begin
  perform queue._forget_deleted();
  v_finished := array(
    select f.id from queue.finished f
    where f.id = any (p_ids) and not exists (select from queue.handover h where h.job_id = f.id and h.kind in ('ended', 'again'))
    for update skip locked);
  v_plain := array(
    select v.id from queue.live v
    where v.id = any (p_ids) and v.claim is null and v.flags & ~(128 | 512 | 2048 | -32768) = 0
      and (select d.need_id from queue.need d where d.need_id = v.id limit 1) is null
    for update skip locked);
  for v_job in
    select u.id, g.standing, g.claim, g.worker_id
    from (select distinct u.id from unnest(p_ids) u (id) where u.id not in (select unnest(v_finished || v_plain)) order by u.id desc) u
    cross join lateral queue._grasp(u.id) g
  loop
    if v_job.standing = 'open' or v_job.standing = 'running' and p_force then
      v_open := v_open || v_job.id;
      v_claims := v_claims || v_job.claim;
      v_workers := v_workers || v_job.worker_id;
    end if;
  end loop;
  v_all := v_finished || v_plain || v_open;
  while not p_force loop
    v_needed := array(
      select distinct d.need_id from queue.need d
      where d.need_id = any (v_all) and d.job_id not in (select unnest(v_all)) and (select f.id from queue.finished f where f.id = d.job_id) is null);
    exit when v_needed = '{}';
    v_all := array(select u.id from unnest(v_all) u (id) where u.id not in (select unnest(v_needed)));
  end loop;
  insert into queue.deleted (id)
  select f.id from queue.finished f where f.id = any (v_all) and f.state = 'succeeded';
  for v_job in select u.id, u.claim, u.worker_id from unnest(v_open, v_claims, v_workers) u (id, claim, worker_id)
    where not u.id not in (select unnest(v_all)) loop
    if v_job.claim is not null then
      perform queue._end_attempt('{"outcome": "aborted"}', v_job.id, v_job.claim, true);
      perform queue._tell_abort(v_job.id, v_job.claim, v_job.worker_id, 'deleted');
    else
      v_taken := queue._take_out(v_job.id);
      if v_taken.place is null then
        v_all := array_remove(v_all, v_job.id);
      else
        perform queue._finish_unclaimed(array[v_job.id], 'cancelled', 'deleted', null);
        perform queue._advance(p_ended => array[v_job.id], p_keys => v_taken.keys);
      end if;
    end if;
  end loop;
  delete from queue.live v where v.id = any (v_plain);
  perform queue._erase(v_all);
  return v_all;
end $$;

-- queue.deleted tells jobs whose transaction began before a need of theirs was deleted that it had
-- succeeded: a row goes once every such transaction has ended and its jobs have been admitted.
-- Locks: the caller holds ADM.
create or replace function queue._forget_deleted()
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  delete from queue.deleted d
  where d.until <= (select least(k.next_xid, k.in_flight[1]) from queue.cursor k order by k.tick desc limit 1)
    and not exists (select from queue.backlog) and not exists (select from queue.backlog_part);
  update queue.deleted d set until = pg_current_xact_id() where d.until is null;
end $$;

-- What a job that is gone was, for one that comes to need it.
create or replace function queue._deleted_state(p_id bigint)
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return case when exists (select from queue.deleted d where d.id = p_id) then 'succeeded' else 'failed' end;
end $$;
