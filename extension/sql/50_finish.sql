-- Ending claims.
--
-- Each function here takes the pair (id, claim) and deletes the row of queue.live that has both, so a
-- claim ends once. What ends goes, in the same transaction, to queue.finished or back to the gates.
-- Locks: the claims' rows of queue.live, in the order of ids. finish_many and finish_and_fetch then try
-- ADM and settle; succeed, fail, retry_later and release may stand in a handler's own long transaction,
-- so they never take ADM: they append a handover.

-- Locks: the claim's row in queue.live. Raises: QJ001, QJ002, QJ008.
create or replace function queue.succeed(id bigint, claim bigint, result jsonb default null)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_attempt smallint;
  v_flags smallint;
  v_claimed_at timestamptz;
  v_worker_id bigint;
  v_none regclass;
begin
  if coalesce(v_none, queue._unlimited()) is null or current_setting('transaction_isolation') <> 'read committed'
    or pg_column_size(succeed.result) >= 2000 or pg_column_compression(succeed.result) is not null then
    perform queue._check_isolation();
    if to_regclass('queue.unlimited') is null then
      perform queue._not_installed();
      perform queue._bound_claims(array[succeed.id], array[succeed.claim]);
    end if;
    perform queue._check_size('result', succeed.result);
  end if;
  -- as _succeed for one, in short statements (ADR 1)
  delete from queue.live v where v.id = succeed.id and v.claim = succeed.claim
  returning v.attempt, v.flags, v.claimed_at, v.worker_id into v_attempt, v_flags, v_claimed_at, v_worker_id;
  if v_flags is null then
    perform queue._refuse(succeed.id, succeed.claim);
  end if;
  insert into queue.finished (id, finished_at, started_at, worker_id, attempts, state, result)
  values (succeed.id, clock_timestamp(), v_claimed_at, v_worker_id, v_attempt, 'succeeded', succeed.result);
  if succeed.id <= pg_sequence_last_value('queue.awaited_seq') then
    perform queue._tell_waiters(array[succeed.id]);
  end if;
  if v_flags <> 0 then
    perform queue._leave(array[succeed.id], array[v_flags], v_flags, false);
  end if;
end $$;
comment on function queue.succeed(bigint, bigint, jsonb) is
  'The claim ends, the job has succeeded, with a result if given. May be the last statement of the handler''s own transaction: then its writes and the outcome commit together or not at all. A transaction that ends several jobs does so in the order of their ids, or by one finish_many, which sorts them: operators take them in that order, and would deadlock with another. A result may take as many bytes of JSON text as queue.configure says (22023).';

-- Raises: 22023, QJ001, QJ002, QJ008.
create or replace function queue.fail(id bigint, claim bigint, error text, details jsonb default null, options jsonb default null)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_outcomes(jsonb_build_array(jsonb_build_object('id', fail.id, 'claim', fail.claim, 'options', fail.options)));
  end if;
  perform queue._check_isolation();
  if fail.options is not null then
    perform queue._check_fail_options(fail.options);
  end if;
  return queue._end_attempt(jsonb_build_object('outcome', 'failed', 'error', left(fail.error, 10000), 'details', fail.details, 'options', fail.options),
                            fail.id, fail.claim, false);
end $$;
comment on function queue.fail(bigint, bigint, text, jsonb, jsonb) is
  'The attempt failed: returns the new state, scheduled or ready (it will be retried), failed, or cancelled (it was told to abort, or has expired). Of error 10,000 characters are kept, details up to 100 kB, of larger ones their size and how they begin. options: retryable (false: failed at once; true: retried, whatever the policy), retry_at or retry_in (when; without a policy they also make it retried), and priority, queue, lock to change on retry (lock: empty text for none), reason (of a job that has failed), outcome (timed_out, of an attempt that its worker ended for that). Several in one transaction: as succeed.';

-- Raises: 22023, QJ001, QJ002, QJ005, QJ008.
create or replace function queue.retry_later(id bigint, claim bigint, at timestamptz default null, needs bigint[] default '{}', message text default null)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
declare
  v_outcome jsonb := jsonb_build_object('outcome', 'retry_later', 'at', retry_later.at, 'message', left(retry_later.message, 10000), 'needs', retry_later.needs);
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_outcomes(jsonb_build_array(v_outcome || jsonb_build_object('id', retry_later.id, 'claim', retry_later.claim)));
  end if;
  perform queue._check_isolation();
  perform queue._check_outcome(v_outcome);
  return queue._end_attempt(v_outcome, retry_later.id, retry_later.claim, false);
end $$;
comment on function queue.retry_later(bigint, bigint, timestamptz, bigint[], text) is
  'The job yields: it is called again, not before `at`, and after its needs, to which `needs` are added (NULL: whatever its needs are). No failure; a job with more than max_progress yields fails. Returns the new state.';

-- Raises: QJ001, QJ002, QJ008.
create or replace function queue.release(id bigint, claim bigint)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  if to_regclass('queue.unlimited') is null then
    perform queue._not_installed();
    perform queue._bound_claims(array[release.id], array[release.claim]);
  end if;
  perform queue._check_isolation();
  perform queue._end_attempt('{"outcome": "released"}', release.id, release.claim, false);
end $$;
comment on function queue.release(bigint, bigint) is
  'Gives the job back as if it had never been claimed: no attempt is counted.';

-- Locks: the claims' rows of queue.live; then ADM by try.
-- Raises: 22023 for what is no outcome (then nothing is done), QJ008.
create or replace function queue.finish_many(outcomes jsonb)
returns table (id bigint, claim bigint, state text, error text)
language plpgsql volatile parallel unsafe security definer rows 50
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_ended record;
  v_none regclass;
begin
  if coalesce(v_none, queue._unlimited()) is null or current_setting('transaction_isolation') <> 'read committed' then
    perform queue._check_isolation();
    if to_regclass('queue.unlimited') is null then
      perform queue._not_installed();
      perform queue._bound_outcomes(finish_many.outcomes);
    end if;
  end if;
  v_ended := queue._finish(finish_many.outcomes);
  return query
    select f.id, f.claim, case when v_ended.states is null then 'succeeded' else f.state end, f.error
    from unnest(v_ended.ids, v_ended.claims, v_ended.states, v_ended.errors) f (id, claim, state, error);
end $$;
comment on function queue.finish_many(jsonb) is
  'Ends many claims: an array of {"id", "claim", "outcome": succeeded | failed | retry_later | released | aborted | crashed, ...} with the named arguments of the single calls. crashed: the process of its own in which the worker ran the job died. A row for each; a lost claim is reported there (error QJ002) and the rest goes on. They are ended in the order of ids, whatever their order in the array. In place of a result that is too large (see queue.configure) a note is kept, as the job''s work is done.';

-- Locks: as finish_many, then as fetch; ADM is waited for only when there are no outcomes.
-- Raises: as finish_many and fetch.
create or replace function queue.finish_and_fetch(worker bigint, outcomes jsonb, queues text[] default null, max_jobs integer default 1, options jsonb default null)
returns table (id bigint, claim bigint, task text, args jsonb, queue text, priority integer, lock text, attempt integer,
               scheduled_at timestamptz, deadline timestamptz, timeout interval, headers jsonb, parent bigint, error text)
language plpgsql volatile parallel unsafe security definer rows 50
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  v_ended record;
  v record;
  v_may_wait boolean := coalesce(finish_and_fetch.outcomes, '[]') = '[]';
  v_none regclass;
begin
  if coalesce(v_none, queue._unlimited()) is null or current_setting('transaction_isolation') <> 'read committed'
    or current_setting('pgdefer.era', true) is distinct from queue._installation()
  then
    perform queue._check_isolation();
    if to_regclass('queue.unlimited') is null then
      perform queue._not_installed();
      perform queue._bound_worker(worker);
      perform queue._bound_outcomes(finish_and_fetch.outcomes);
      queues := queue._bound_queues('{worker}', queues);
    end if;
    perform queue._know_era();
    -- once a session: what another one of the worker's has put aside
    perform queue._look_aside(finish_and_fetch.worker);
  end if;
  if not v_may_wait then
    v_ended := queue._finish(finish_and_fetch.outcomes);
    if v_ended.has_refused then
      return query
        select f.id, f.claim, null::text, null::jsonb, null::text, null::integer, null::text, null::integer, null::timestamptz,
          null::timestamptz, null::interval, null::jsonb, null::bigint, f.error
        from unnest(v_ended.ids, v_ended.claims, v_ended.errors) f (id, claim, error) where f.error is not null;
      if cardinality(v_ended.ids) > 500 then
        return;  -- so long an answer must not travel with ADM held, which a claim may take
      end if;
    end if;
  end if;
  if current_setting('pgdefer.undelivered', true) = worker::text then
    -- what outcomes hold must not wait for large answers to travel: these come alone, once no outcomes come
    if v_may_wait then
      v := queue._deliver(worker, max_jobs, options);
      return query
        select c.id, c.claim, c.task, c.args, c.queue, c.priority, c.lock, c.attempt, c.scheduled_at, c.deadline, c.timeout, c.headers, c.parent,
          null::text
        from unnest(v.ids, v.claims) with ordinality u (id, claim, n)
        cross join lateral (select c.* from queue.claimed c where c.id = u.id and c.claim = u.claim offset 0) c
        order by u.n;
    end if;
    return;
  end if;
  v := queue._claim(
    finish_and_fetch.worker, finish_and_fetch.queues,
    case when finish_and_fetch.max_jobs > 30 then queue._fitting(finish_and_fetch.max_jobs) else finish_and_fetch.max_jobs end,
    finish_and_fetch.options, v_may_wait);
  if v.first_claim is null or cardinality(v.ids) > 30 then
    v.ids := queue._put_aside(finish_and_fetch.worker, v.ids, v.first_claim is not null);
  end if;
  if v.first_claim is not null then
    return query
      select f.id, v.first_claim, f.task, f.args, f.queue, f.priority, f.lock, f.attempt, f.scheduled_at, f.deadline, f.timeout, f.headers, f.parent,
        null::text
      from queue.first_run f where f.id = any (v.ids) order by f.id;
  else
    return query
      select c.id, c.claim, c.task, c.args, c.queue, c.priority, c.lock, c.attempt, c.scheduled_at, c.deadline, c.timeout, c.headers, c.parent,
        null::text
      from unnest(v.ids) with ordinality u (id, n)
      cross join lateral (select c.* from queue.claimed c where c.id = u.id offset 0) c
      order by u.n;
  end if;
end $$;
comment on function queue.finish_and_fetch(bigint, jsonb, text[], integer, jsonb) is
  'finish_many and fetch in one round trip and one commit. A row with error reports a refused outcome, the others are claimed jobs.';

-- Ends the claims of a list of outcomes: what became of each, with those that succeeded as one set. Nothing
-- is done unless all of it is well formed. states and errors stay NULL where all have succeeded. With others
-- all rows are locked first, in the order of ids: the first that is settled takes ADM, and from then on no row
-- may be waited for.
create or replace function queue._finish(
  p_outcomes jsonb, out ids bigint[], out claims bigint[], out states text[], out errors text[], out has_refused boolean)
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_outcomes text[];
  v_results jsonb[];
  v_result_size integer;  -- of the largest, NULL where none has any
  v_has_others boolean;
  v_is_bad boolean;
  v_done bigint[];
  v_outcome jsonb;
  v_state text;
  v_error text;
begin
  begin
    select array_agg(o.id), array_agg(o.claim), array_agg(o.outcome), array_agg(o.result), max(pg_column_size(o.result)),
      bool_or(o.outcome <> 'succeeded'), bool_or(o.id is null or o.claim is null or o.outcome is null)
    into ids, claims, v_outcomes, v_results, v_result_size, v_has_others, v_is_bad
    from (select o.id, o.claim, o.result, o.outcome
          from jsonb_to_recordset(p_outcomes) o (id bigint, claim bigint, outcome text, result jsonb) order by o.id, o.claim) o;
  exception when data_exception then
    perform queue._check_is_list(p_outcomes);
    perform queue._invalid('an outcome is malformed', 'id and claim are numbers, outcome is text.', sqlerrm);
  end;
  -- a key that is not known: lists are made by a loop, so of those that succeeded the first is looked at
  if v_is_bad or v_has_others or v_result_size >= 2000 or (p_outcomes -> 0) - '{id,claim,outcome,result}'::text[] = '{}' is not true then
    perform queue._check_is_list(p_outcomes);
    if v_is_bad then
      perform queue._invalid('an outcome lacks id, claim or outcome', 'Each needs {"id", "claim", "outcome"}.');
    end if;
    perform queue._check_outcome(o) from jsonb_array_elements(p_outcomes) o;
    if v_result_size >= 2000 then
      v_results := array(select queue._cut_result(r.result) from unnest(v_results) with ordinality r (result, n) order by r.n);
    end if;
  end if;
  has_refused := false;
  if v_has_others then
    select array_agg(o.id order by o.n), array_agg(o.claim order by o.n), array_agg(o.result order by o.n) into ids, claims, v_results
    from unnest(ids, claims, v_results, v_outcomes) with ordinality o (id, claim, result, outcome, n) where o.outcome = 'succeeded';
    perform from queue.live l
    where l.id = any (array(select (o ->> 'id')::bigint from jsonb_array_elements(p_outcomes) o))
      and l.claim = any (array(select (o ->> 'claim')::bigint from jsonb_array_elements(p_outcomes) o))
    order by l.id for update;
  end if;
  if ids is not null then
    v_done := queue._succeed(ids, claims, case when v_result_size is not null then v_results end);
    if v_has_others then
      states := array_fill('succeeded'::text, array[cardinality(ids)]);
      errors := array_fill(null::text, array[cardinality(ids)]);
    end if;
    if cardinality(v_done) is distinct from cardinality(ids) then
      has_refused := true;
      select array_agg(case when r.ok then 'succeeded' end order by u.n), array_agg(case when not r.ok then 'QJ002' end order by u.n)
      into states, errors
      from unnest(ids) with ordinality u (id, n)
      cross join lateral (select coalesce(u.id = any (v_done), false) and ids[u.n + 1] is distinct from u.id as ok) r;
    end if;
  end if;
  if v_has_others then
    for v_outcome in select o from jsonb_array_elements(p_outcomes) o where o ->> 'outcome' <> 'succeeded' order by (o ->> 'id')::bigint loop
      v_state := null;
      v_error := null;
      begin
        v_state := queue._end_attempt(v_outcome, (v_outcome ->> 'id')::bigint, (v_outcome ->> 'claim')::bigint, false);
      exception when sqlstate 'QJ001' or sqlstate 'QJ002' or sqlstate 'QJ005' then
        v_error := sqlstate;
        has_refused := true;
      end;
      ids := ids || (v_outcome ->> 'id')::bigint;
      claims := claims || (v_outcome ->> 'claim')::bigint;
      states := states || v_state;
      errors := errors || v_error;
    end loop;
    perform queue._settle_own(ids);
  end if;
end $$;

-- A result that is too large as the note of that which clients know: the job has done its work, and to have it done again
-- would be wrong. It is as _check_size says.
create or replace function queue._cut_result(p_result jsonb)
returns jsonb language plpgsql stable parallel unsafe security invoker as $$
begin
  perform queue._check_size('result', p_result);
  return p_result;
exception when invalid_parameter_value then
  return jsonb_build_object('__pgdefer__', 'unencodable', 'value', 'JSON that is too large');
end $$;

-- Raises: 22023 unless it is a list.
create or replace function queue._check_is_list(p_outcomes jsonb)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if jsonb_typeof(p_outcomes) is distinct from 'array' then
    perform queue._invalid('outcomes must be a JSON array', 'Pass [{"id": number, "claim": number, "outcome": text, ...}, ...].');
  end if;
end $$;

-- Raises: 22023 unless it is an outcome.
create or replace function queue._check_outcome(p_outcome jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
declare
  v_bad text;
begin
  perform queue._check_keys('an outcome', p_outcome, array['id', 'claim', 'outcome', 'result', 'error', 'details', 'options', 'at', 'needs', 'message']);
  if not p_outcome ->> 'outcome' = any ('{succeeded,failed,retry_later,released,aborted,crashed}'::text[]) then
    perform queue._invalid('unknown outcome', 'Outcomes: succeeded, failed, retry_later, released, aborted, crashed.', 'outcome: ' || left(p_outcome ->> 'outcome', 200));
  end if;
  select e.key into v_bad from jsonb_each(p_outcome) e
  where e.key in ('error', 'message') and jsonb_typeof(e.value) not in ('string', 'null') limit 1;
  if found then
    perform queue._invalid(v_bad || ' must be text', 'Pass a JSON string; what has a structure goes into details.');
  elsif jsonb_typeof(p_outcome -> 'options') <> 'null' then
    perform queue._check_fail_options(p_outcome -> 'options');
  end if;
  perform queue._check_moment('at', queue._timestamp('at', p_outcome -> 'at'));
  if jsonb_typeof(p_outcome -> 'needs') = 'array' then
    select n::text into v_bad from jsonb_array_elements(p_outcome -> 'needs') n where n::text !~ '^[0-9]{1,18}$' limit 1;
  elsif jsonb_typeof(p_outcome -> 'needs') <> 'null' then
    v_bad := p_outcome ->> 'needs';
  end if;
  if v_bad is not null then
    perform queue._invalid('needs must be a list of ids', 'Pass ids of jobs, or null.', 'value: ' || left(v_bad, 200));
  end if;
end $$;

-- Ends claims as succeeded. Returns the ids whose claim was the current one, NULL for none. p_ids ascend,
-- so that width_bucket finds an id's place in them; p_results NULL: none has one.
create or replace function queue._succeed(p_ids bigint[], p_claims bigint[], p_results jsonb[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_done bigint[];
  v_special bigint[];
  v_flags smallint[];
  v_all_flags smallint;
  v_may_be_awaited boolean;
begin
  with gone as (
    delete from queue.live v
    where v.id = any (p_ids) and v.claim = p_claims[width_bucket(v.id, p_ids)]
    returning v.id, v.attempt, v.flags, v.claimed_at, v.worker_id),
  kept as (
    insert into queue.finished (id, finished_at, started_at, worker_id, attempts, state, result)
    select g.id, clock_timestamp(), g.claimed_at, g.worker_id, g.attempt, 'succeeded', case when p_results is not null then p_results[width_bucket(g.id, p_ids)] end from gone g)
  select array_agg(g.id), array_agg(g.id) filter (where g.flags <> 0), array_agg(g.flags) filter (where g.flags <> 0), bit_or(g.flags),
    min(g.id) <= coalesce(pg_sequence_last_value('queue.awaited_seq'), 0)
  into v_done, v_special, v_flags, v_all_flags, v_may_be_awaited
  from gone g;
  if v_may_be_awaited then
    perform queue._tell_waiters(v_done);
  end if;
  if v_all_flags <> 0 then
    -- of more the answer may be too long to hold ADM while it travels (41_deliver.sql)
    perform queue._leave(v_special, v_flags, v_all_flags, cardinality(p_ids) <= 1000);
  end if;
  return v_done;
end $$;

-- What jobs that have succeeded leave, by their flags, of which p_all_flags has each.
-- Locks: those of _close, on rows of these jobs alone, then as _hand_over, which says why no wake-up is lost.
create or replace function queue._leave(p_ids bigint[], p_flags smallint[], p_all_flags smallint, p_settle boolean)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_all_flags & (32 | 64 | 128 | 256 | 512 | 8192) <> 0 then
    perform queue._close(p_ids, p_flags);
  end if;
  perform queue._hand_over(p_ids, p_flags, 'ended', p_settle);
end $$;

-- What jobs that have reached their end leave beside the gates: leases, aborts, queueing locks, retention.
create or replace function queue._close(p_ids bigint[], p_flags smallint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_all smallint;
begin
  select bit_or(f) into v_all from unnest(p_flags) f;
  if v_all & 128 <> 0 then
    delete from queue.lease l where l.id = any (p_ids);
  end if;
  if v_all & 32 <> 0 then
    -- one that heartbeat holds it deletes
    delete from queue.abort a where a.ctid = any (array(select a.ctid from queue.abort a where a.id = any (p_ids) for update skip locked));
  end if;
  if v_all & (256 | 8192) <> 0 then
    perform queue._drop_queueing_locks(p_ids, 256 | 8192);
  end if;
  if v_all & 64 <> 0 then
    delete from queue.expiry e where e.id = any (p_ids);
  end if;
  if v_all & 512 <> 0 then
    update queue.finished f set purge_at = f.finished_at + queue._retention(f.id) where f.id = any (p_ids);
  end if;
end $$;

-- Passes ended claims on: settles them at once where ADM is free (p_settle), or appends a handover.
-- Locks: ADM by try, after the claims' rows. Why no wake-up is lost: see 30_admission.sql.
create or replace function queue._hand_over(p_ids bigint[], p_flags smallint[], p_kind text, p_settle boolean, p_payload jsonb default null)
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v_ids bigint[] := p_ids;
  v_flags smallint[] := p_flags;
  v_all_flags smallint;
begin
  if p_kind = 'ended' then
    select array_agg(u.id), array_agg(u.flags), bit_or(u.flags) into v_ids, v_flags, v_all_flags
    from unnest(p_ids, p_flags) u (id, flags) where u.flags & (1 | 2 | 4 | 4096 | 16384) <> 0;
    if v_ids is null then
      return;
    end if;
  end if;
  if not p_settle or not queue._lock_admission(false) then
    insert into queue.handover (job_id, kind, flags, payload)
    select u.id, p_kind, u.flags, p_payload from unnest(v_ids, v_flags) u (id, flags);
  elsif v_all_flags & (2 | 4 | 4096 | 16384) = 0 then
    -- what _settle_here does for those that have nothing but an ordered lock
    if queue._has_news() then
      perform queue._admit(1000);
    end if;
    perform queue._advance(p_turned => queue._leave_locks(v_ids, true));
  else
    perform queue._settle_here(v_ids, array_fill(p_kind, array[cardinality(v_ids)]), v_flags, case when p_payload is not null then array[p_payload] end);
  end if;
  if not pg_try_advisory_xact_lock_shared(1885824102, 1) then
    perform queue._wake();
  end if;
end $$;

-- Settles what this transaction has handed over of the claims on p_ids, as one set, where ADM is free.
create or replace function queue._settle_own(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
begin
  -- of more the answer may be too long to hold ADM while it travels (41_deliver.sql)
  if cardinality(p_ids) > 1000 or not queue._lock_admission(false) then
    return;
  end if;
  with gone as (
    delete from queue.handover h
    where h.xid = pg_current_xact_id() and h.job_id = any (p_ids) and h.kind in ('ended', 'again')
    returning h.job_id, h.kind, h.flags, h.payload, h.seq)
  select array_agg(g.job_id order by g.seq) as ids, array_agg(g.kind order by g.seq) as kinds, array_agg(g.flags order by g.seq) as flags,
    array_agg(g.payload order by g.seq) as payloads
  into v from gone g;
  if v.ids is not null then
    perform queue._settle_here(v.ids, v.kinds, v.flags, v.payloads);
  end if;
end $$;

-- Settles claims that this transaction has ended. What is visible by now is admitted before turns are given
-- on, so that the turn goes to the oldest.
-- Locks: the caller holds ADM.
create or replace function queue._settle_here(p_ids bigint[], p_kinds text[], p_flags smallint[], p_payloads jsonb[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._settle_slots(p_ids, p_kinds, p_flags, p_payloads);
  if 'ended' = any (p_kinds) and exists (select from unnest(p_flags) f where f & 3 <> 0) and queue._has_news() then
    perform queue._admit(1000);
  end if;
  perform queue._settle(p_ids, p_kinds, p_flags);
end $$;

-- Reads the handovers that are new by the same snapshots as the log.
-- Locks: the caller holds ADM.
create or replace function queue._take_handovers(
  p_xmax xid8, p_ended xid8[], p_upto pg_snapshot, p_own xid8, out ids bigint[], out kinds text[], out flags smallint[], out payloads jsonb[])
language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
begin
  with gone as (
    delete from queue.handover h
    where h.ctid = any (array(
      select h.ctid from unnest(p_ended) e (x) cross join lateral (select h.ctid from queue.handover h where h.xid = e.x offset 0) h
      union all
      select h.ctid from queue.handover h
      where h.xid >= p_xmax and h.xid < pg_snapshot_xmax(p_upto) and pg_visible_in_snapshot(h.xid, p_upto) and h.xid is distinct from p_own))
    returning h.job_id, h.kind, h.flags, h.payload, h.seq)
  select array_agg(g.job_id order by g.seq), array_agg(g.kind order by g.seq), array_agg(g.flags order by g.seq), array_agg(g.payload order by g.seq)
  into ids, kinds, flags, payloads from gone g;
end $$;

-- Handovers that are committed and that the cursor has passed: nobody would ever take them. None, but for a bug or half a
-- restore. What is in flight, or has ended since the cursor moved, is not among them (30_admission.sql).
create or replace function queue._orphaned_handovers()
returns table (xid xid8, seq bigint, job_id bigint, kind text)
language plpgsql stable parallel safe security invoker rows 10 as $$
#variable_conflict use_column
begin
  return query
    select h.xid, h.seq, h.job_id, h.kind
    from (select k.next_xid, k.in_flight from queue.cursor k order by k.tick desc limit 1) k
    join queue.handover h on h.xid < k.next_xid and h.xid <> all (k.in_flight);
end $$;

-- Hands them over anew, to the next admission.
-- Locks: the caller holds ADM, so that neither the cursor nor they move meanwhile.
create or replace function queue._repair_handovers()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.handover h set xid = pg_current_xact_id()
  where (h.xid, h.seq) in (select o.xid, o.seq from queue._orphaned_handovers() o);
end $$;

-- Gives back the slots of ended claims and sends those of them that run again through the gates, with those that are in no
-- gate for another reason (flags 0: they did not run, and have no turn to keep); then lets in whoever is first for these slots.
-- What takes a job out of where it waits comes after that: before it, a job that runs again is in no gate, and only looks as if it
-- waited for its turn.
-- Locks: the caller holds ADM.
create or replace function queue._settle_slots(p_ids bigint[], p_kinds text[], p_flags smallint[], p_payloads jsonb[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
  v_keys text[];
  v_item record;
  v_circular bigint[];
begin
  select array_agg(u.id) filter (where u.kind = 'again') as again,
    array_agg(u.id) filter (where u.kind = 'again' and u.flags & 3 <> 0) as locked,
    array_agg(u.id) filter (where u.kind in ('ended', 'again') and u.flags & (2 | 4 | 16384) <> 0) as ids,
    array_agg(u.flags) filter (where u.kind in ('ended', 'again') and u.flags & (2 | 4 | 16384) <> 0) as flags
  into v
  from unnest(p_ids, p_kinds, p_flags) u (id, kind, flags);
  if v.ids is not null then
    v_keys := queue._release_slots(v.ids, v.flags);
  end if;
  for v_item in
    select u.id, u.kind, u.payload from unnest(p_ids, p_kinds, p_payloads) u (id, kind, payload)
    where p_payloads is not null and u.payload is not null
  loop
    if v_item.kind = 'refill' then
      v_keys := v_keys || array(select k from jsonb_array_elements_text(v_item.payload) k);
    elsif v_item.payload ? 'change' then
      perform queue._change_on_retry(v_item.id, v_item.payload -> 'change');
    elsif v_item.kind = 'again' and not queue._add_yield_needs(v_item.id, v_item.payload) then
      v_circular := v_circular || v_item.id;
    end if;
  end loop;
  if v.locked is not null then
    perform queue._keep_turns(v.locked);
  end if;
  if v.again is not null then
    perform queue._advance(p_arrived => v.again, p_locks => case when v.locked is not null then queue._locks_of(v.locked) end);
  end if;
  for v_item in
    select u.id, u.kind, u.flags, u.payload
    from (
      select u.id, u.kind, u.flags, u.payload, u.n, row_number() over (partition by u.id, u.kind order by u.n desc) as from_last
      from unnest(p_ids, p_kinds, p_flags, p_payloads) with ordinality u (id, kind, flags, payload, n)
      where p_payloads is not null and u.payload is not null) u
    -- of replacements of one job the last is what is left of it
    where u.kind = 'replace' and u.from_last = 1 or u.kind = 'again' and (u.payload -> 'change' ? 'lock' or u.id = any (v_circular))
    order by u.n
  loop
    if v_item.kind = 'replace' then
      perform queue._apply_replacement(v_item.id, v_item.payload);
    elsif v_item.id = any (v_circular) then
      v_keys := v_keys || (select t.keys from queue._take_out(v_item.id) t);
      if not queue._is_settled(v_item.id) then
        -- a defer is replacing it, and holds its key
        insert into queue.handover (job_id, kind, flags, payload)
        values (v_item.id, 'again', v_item.flags & ~(2 | 4 | 16384), v_item.payload);
        continue;
      end if;
      perform queue._finish_unclaimed(array[v_item.id], 'failed', 'dependency_cycle', 'two jobs came to need each other');
      perform queue._advance(p_ended => array[v_item.id]);
    else
      perform queue._change_lock(v_item.id, v_item.payload #>> '{change,lock}');
    end if;
  end loop;
  if v_keys is not null then
    perform queue._advance(p_keys => v_keys);
  end if;
end $$;

-- Moves on what ended claims let go, their slots excepted: turns and dependents.
-- Locks: the caller holds ADM.
create or replace function queue._settle(p_ids bigint[], p_kinds text[], p_flags smallint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
#variable_conflict use_column
declare
  v record;
begin
  select array_agg(u.id) filter (where u.kind = 'ended' and u.flags & 3 <> 0) as locked,
    array_agg(u.id) filter (where u.kind = 'ended' and u.flags & 4096 <> 0) as needed,
    array_agg(distinct u.id) filter (where u.kind = 'recheck') as recheck,
    array_agg(distinct u.id) filter (where u.kind = 'regate') as regate
  into v
  from unnest(p_ids, p_kinds, p_flags) u (id, kind, flags);
  if v.locked is not null or v.needed is not null then
    perform queue._advance(
      p_turned => case when v.locked is not null then queue._leave_locks(v.locked, true) end, p_changed => v.needed);
  end if;
  if v.recheck is not null then
    perform queue._recheck_needs(v.recheck);
  end if;
  if v.regate is not null then
    perform queue._regate(v.regate);
  end if;
end $$;

-- Raises: QJ001 or QJ002, always: says why a claim is refused. A job that is gone was deleted or pruned.
create or replace function queue._refuse(p_id bigint, p_claim bigint)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if p_id is null or p_claim is null then
    perform queue._invalid('id and claim are needed', 'Pass the pair that fetch returned.');
  elsif p_id not between 1 and (select s.last_value from queue.job_id_seq s) then
    perform queue._job_not_found(p_id);
  end if;
  perform queue._claim_lost(p_id, p_claim);
end $$;
