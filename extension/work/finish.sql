-- Ending claims. Every claim ends in succeed, in _succeed (work/ends.sql) or in _end_attempt
-- (work/attempts.sql).
-- Each of these takes the pair (id, claim) and deletes the row of queue.active_job that has both. No claim
-- number comes twice (base/era.sql), so a claim ends exactly once. In the same transaction, the job goes to
-- queue.finished or back to the gates.
-- Locks: the claims' rows of queue.active_job, in the order of ids; for jobs that have ended, those of
-- _clean_up. finish_many and finish_and_fetch then try the admission lock and settle. succeed, fail,
-- retry_later and release may be part of a handler's own long transaction, so they never take the admission
-- lock: they append a pending settlement.

-- Locks: the claim's row of queue.active_job; then those of _clean_up. Raises: QJ001, QJ002, QJ008.
create or replace function queue.succeed(id bigint, claim bigint, result jsonb default null)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_attempt smallint;
  v_flags smallint;
  v_claimed_at timestamptz;
  v_worker_id bigint;
  v_none regclass;  -- stays NULL: see _unrestricted
begin
  if coalesce(v_none, queue._unrestricted()) is null
    or current_setting('transaction_isolation') <> 'read committed' then
    perform queue._check_isolation();
    if to_regclass('queue.unrestricted') is null then
      perform queue._check_installed();
      perform queue._require_claims(array[succeed.id], array[succeed.claim]);
    end if;
  end if;
  -- Nested conditions: the usual case evaluates few, and each is set up again in every transaction (ADR 1).
  if succeed.result is not null then
    if pg_column_size(succeed.result) >= 2000 or pg_column_compression(succeed.result) is not null then
      perform queue._check_size('result', succeed.result);
    end if;
  end if;
  -- The same as _succeed for one job, in short statements.
  delete from queue.active_job aj where aj.id = succeed.id and aj.claim = succeed.claim
  returning aj.attempt, aj.flags, aj.claimed_at, aj.worker_id
  into v_attempt, v_flags, v_claimed_at, v_worker_id;
  if v_flags is null then
    perform queue._raise_claim_error(succeed.id, succeed.claim);
  end if;
  insert into queue.finished (id, finished_at, started_at, worker_id, attempts, state, result)
  values (succeed.id, clock_timestamp(), v_claimed_at, v_worker_id, v_attempt, 'succeeded', succeed.result);
  if succeed.id <= pg_sequence_last_value('queue.awaited_seq') then
    perform queue._notify_waiters(array[succeed.id]);
  end if;
  if v_flags <> 0 then
    perform queue._clean_up_succeeded(array[succeed.id], array[v_flags], v_flags);
    perform queue._settle_or_append(array[succeed.id], array[v_flags], v_flags, 'ended', false);
  end if;
  {{if_operator}}
    perform queue._audit_claim('succeed', succeed.id, succeed.claim);
  end if;
end $$;
comment on function queue.succeed(bigint, bigint, jsonb) is
  'Ends the claim: the job has succeeded, with the result if given. It may be the last statement of the'
    ' handler''s own transaction: then its writes and the outcome commit together or not at all. A'
    ' transaction that ends several jobs must do so in the order of their ids, or by one finish_many, which'
    ' sorts them; any other order could deadlock with operators. queue.configure limits the size of results'
    ' (22023).';

-- Locks: see the top. Raises: 22023, QJ001, QJ002, QJ008.
create or replace function queue.fail(id bigint, claim bigint, error text, details jsonb default null,
  options jsonb default null)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_state text;
begin
  {{if_restricted}}
    perform queue._require_outcomes(jsonb_build_array(jsonb_build_object('id', fail.id, 'claim', fail.claim,
      'options', fail.options)));
  end if;
  perform queue._check_isolation();
  if fail.options is not null then
    perform queue._check_fail_options(fail.options);
  end if;
  v_state := queue._end_attempt(jsonb_build_object('outcome', 'failed', 'error', left(fail.error, 10000),
    'details', fail.details, 'options', fail.options), fail.id, fail.claim, false);
  {{if_operator}}
    perform queue._audit_claim('fail', fail.id, fail.claim, jsonb_build_object('error',
      left(fail.error, 1000), 'options', fail.options));
  end if;
  return v_state;
end $$;
comment on function queue.fail(bigint, bigint, text, jsonb, jsonb) is
  'Ends the claim: the attempt failed. Returns the new state: scheduled or ready (it will be retried),'
    ' failed, or cancelled (it was told to abort, or has expired). It stores up to 10,000 characters of'
    ' error and 100 kB of details; of larger details, the size and the beginning. options: retryable (false:'
    ' fail at once; true: retry, whatever the policy), retry_at or retry_in (the time; without a policy they'
    ' also cause the retry), and priority, queue, lock to change on retry (lock: empty text for none),'
    ' reason (stored with a failed job), outcome (timed_out, if the worker ended the attempt for its'
    ' timeout). For several in one transaction see succeed.';

-- Locks: see the top. Raises: 22023, QJ001, QJ002, QJ005, QJ008.
create or replace function queue.retry_later(id bigint, claim bigint, at timestamptz default null,
  needs bigint[] default '{}', message text default null)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_outcome jsonb := jsonb_build_object('outcome', 'retry_later', 'at', retry_later.at, 'message',
    left(retry_later.message, 10000), 'needs', retry_later.needs);
  v_state text;
begin
  {{if_restricted}}
    perform queue._require_outcomes(jsonb_build_array(v_outcome
      || jsonb_build_object('id', retry_later.id, 'claim', retry_later.claim)));
  end if;
  perform queue._check_isolation();
  perform queue._check_outcome(v_outcome);
  v_state := queue._end_attempt(v_outcome, retry_later.id, retry_later.claim, false);
  {{if_operator}}
    perform queue._audit_claim('retry_later', retry_later.id, retry_later.claim, jsonb_build_object('at',
      retry_later.at, 'needs', retry_later.needs, 'message', left(retry_later.message, 1000)));
  end if;
  return v_state;
end $$;
comment on function queue.retry_later(bigint, bigint, timestamptz, bigint[], text) is
  'The job yields: it is called again, not before `at`, and after its needs, to which `needs` are added'
    ' (NULL: without waiting for any needs). This is not a failure, but a job with more than max_progress'
    ' yields fails. Returns the new state.';

-- Locks: see the top. Raises: QJ001, QJ002, QJ008.
create or replace function queue.release(id bigint, claim bigint)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
begin
  {{if_restricted}}
    perform queue._require_claims(array[release.id], array[release.claim]);
  end if;
  perform queue._check_isolation();
  perform queue._end_attempt('{"outcome": "released"}', release.id, release.claim, false);
  {{if_operator}}
    perform queue._audit_claim('release', release.id, release.claim);
  end if;
end $$;
comment on function queue.release(bigint, bigint) is
  'Gives the job back as if it had never been claimed; no attempt is counted.';

-- Locks: the claims' rows of queue.active_job; then the admission lock by try.
-- Raises: 22023 for invalid outcomes (then nothing is done), QJ008.
create or replace function queue.finish_many(outcomes jsonb)
returns table (id bigint, claim bigint, state text, error text)
language plpgsql volatile parallel unsafe security definer rows 50
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_ended record;
  v_none regclass;  -- stays NULL: see _unrestricted
begin
  if coalesce(v_none, queue._unrestricted()) is null
    or current_setting('transaction_isolation') <> 'read committed' then
    perform queue._check_isolation();
    if to_regclass('queue.unrestricted') is null then
      perform queue._check_installed();
      perform queue._require_outcomes(finish_many.outcomes);
    end if;
  end if;
  v_ended := queue._finish(finish_many.outcomes, false);
  return query
    select f.id, f.claim, case when v_ended.states is null then 'succeeded' else f.state end, f.error
    from unnest(v_ended.ids, v_ended.claims, v_ended.states, v_ended.errors) f (id, claim, state, error);
end $$;
comment on function queue.finish_many(jsonb) is
  'Ends many claims: an array of {"id", "claim", "outcome": succeeded | failed | retry_later | released |'
    ' aborted | crashed | unknown_task, ...} with the named arguments of the single calls. crashed: the'
    ' process in which the worker ran the job died. unknown_task: the worker does not know the task. The job'
    ' goes back for other workers, with no attempt counted, after a delay that grows from 1 s to 10 s. It'
    ' fails if no worker knows the task for unknown_task_grace (see queue.configure). Returns a row for'
    ' each; a lost claim is reported there (error QJ002) and does not stop the others. steps: finished steps'
    ' of the run (see finish_steps), stored with its outcome; one that was stored before stays as it is.'
    ' Claims are ended in the order of ids, whatever their order in the array. If a result is too large (see'
    ' queue.configure), a note is stored in its place, because the job''s work is done.';

-- Ends the claims of a list of outcomes and returns their new states. It does nothing unless the whole list
-- is well formed. Claims that succeeded are ended as one set; states and errors stay NULL if all succeeded.
-- If not all did, or steps come with them, all rows are locked first, in the order of ids. The first
-- settlement takes the admission lock, and from then on no row may be waited for. p_keeps, kept_ids,
-- kept_flags: as for _succeed.
create or replace function queue._finish(
  p_outcomes jsonb, p_keeps boolean, out ids bigint[], out claims bigint[], out states text[],
  out errors text[], out has_refused boolean, out kept_ids bigint[], out kept_flags smallint[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_outcomes text[];
  v_results jsonb[];
  v_result_size integer;  -- the largest size, NULL if there are no results
  v_has_others boolean;  -- an outcome is no success, or comes with steps
  v_is_bad boolean;
  v_ended record;
  v_done bigint[];
begin
  begin
    select array_agg(o.id), array_agg(o.claim), array_agg(o.outcome), array_agg(o.result),
      max(pg_column_size(o.result)), bool_or(o.outcome <> 'succeeded' or o.steps is not null),
      bool_or(o.id is null or o.claim is null or o.outcome is null)
    into ids, claims, v_outcomes, v_results, v_result_size, v_has_others, v_is_bad
    from (select o.id, o.claim, o.result, o.steps, o.outcome
          from jsonb_to_recordset(p_outcomes)
            o (id bigint, claim bigint, outcome text, result jsonb, steps jsonb)
          order by o.id, o.claim) o;
  exception when data_exception then
    perform queue._check_is_list(p_outcomes);
    perform queue._invalid('an outcome is malformed', 'id and claim are numbers, outcome is text.', sqlerrm);
  end;
  -- Refuses unknown keys. A loop makes such lists, so of the succeeded outcomes only the first is checked.
  if v_is_bad or v_has_others or v_result_size >= 2000
    or (p_outcomes -> 0) - '{id,claim,outcome,result}'::text[] = '{}' is not true then
    perform queue._check_is_list(p_outcomes);
    if v_is_bad then
      perform queue._invalid('an outcome lacks id, claim or outcome',
        'Each needs {"id", "claim", "outcome"}.');
    end if;
    perform queue._check_outcome(o) from jsonb_array_elements(p_outcomes) o;
    if v_result_size >= 2000 then
      v_results := array(select queue._truncate_result(r.result)
        from unnest(v_results) with ordinality r (result, n) order by r.n);
    end if;
  end if;
  has_refused := false;
  if v_has_others then
    perform from queue.active_job aj where aj.id = any (ids) and aj.claim = any (claims)
    order by aj.id for update;
    perform queue._store_steps_of(p_outcomes);
    select array_agg(o.id order by o.n), array_agg(o.claim order by o.n), array_agg(o.result order by o.n)
    into ids, claims, v_results
    from unnest(ids, claims, v_results, v_outcomes) with ordinality o (id, claim, result, outcome, n)
    where o.outcome = 'succeeded';
  end if;
  if ids is not null then
    v_ended := queue._succeed(ids, claims, case when v_result_size is not null then v_results end,
      p_keeps and not v_has_others);
    v_done := v_ended.done;
    kept_ids := v_ended.kept_ids;
    kept_flags := v_ended.kept_flags;
    if v_has_others then
      states := array_fill('succeeded'::text, array[cardinality(ids)]);
      errors := array_fill(null::text, array[cardinality(ids)]);
    end if;
    if cardinality(v_done) is distinct from cardinality(ids) then
      has_refused := true;
      select array_agg(case when r.ok then 'succeeded' end order by u.n),
        array_agg(case when not r.ok then 'QJ002' end order by u.n)
      into states, errors
      from unnest(ids) with ordinality u (id, n)
      cross join lateral (
        select coalesce(u.id = any (v_done), false) and ids[u.n + 1] is distinct from u.id as ok) r;
    end if;
  end if;
  if v_has_others then
    select e.ids, e.claims, e.states, e.errors, _finish.has_refused or e.has_refused
    into ids, claims, states, errors, has_refused
    from queue._end_others(p_outcomes, ids, claims, states, errors) e;
  end if;
end $$;

-- Ends the claims of the outcomes other than succeeded, appends their states and errors, and settles.
-- Locks: the caller holds the rows of all claims; then as _settle_own, which says why no wake-up is lost.
create or replace function queue._end_others(
  p_outcomes jsonb, inout ids bigint[], inout claims bigint[], inout states text[], inout errors text[],
  out has_refused boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_outcome jsonb;
  v_state text;
  v_error text;
begin
  has_refused := false;
  for v_outcome in select o from jsonb_array_elements(p_outcomes) o where o ->> 'outcome' <> 'succeeded'
    order by (o ->> 'id')::bigint loop
    v_state := null;
    v_error := null;
    begin
      v_state := queue._end_attempt(v_outcome, (v_outcome ->> 'id')::bigint,
        (v_outcome ->> 'claim')::bigint, false);
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
end $$;

-- Replaces a result that is too large by a note that clients know: the job has done its work, and running it
-- again would be wrong. The limit is that of _check_size.
create or replace function queue._truncate_result(p_result jsonb)
returns jsonb language plpgsql stable parallel unsafe security invoker as $$
begin
  perform queue._check_size('result', p_result);
  return p_result;
exception when invalid_parameter_value then
  return jsonb_build_object('__pgdefer__', 'unencodable', 'value', 'JSON that is too large');
end $$;

-- Raises: 22023 if it is not a list of objects.
create or replace function queue._check_is_list(p_outcomes jsonb)
returns void language plpgsql stable parallel safe security invoker as $$
begin
  if jsonb_typeof(p_outcomes) is distinct from 'array' then
    perform queue._invalid('outcomes must be a JSON array',
      'Pass [{"id": number, "claim": number, "outcome": text, ...}, ...].');
  elsif exists (select from jsonb_array_elements(p_outcomes) o where jsonb_typeof(o) <> 'object') then
    perform queue._invalid('an outcome must be a JSON object',
      'Each needs {"id": number, "claim": number, "outcome": text}.');
  end if;
end $$;

-- Raises: 22023 if it is not an outcome.
create or replace function queue._check_outcome(p_outcome jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
declare
  v_bad text;
begin
  perform queue._check_keys('an outcome', p_outcome,
    array['id', 'claim', 'outcome', 'result', 'error', 'details', 'options', 'at', 'needs', 'message',
    'steps']);
  if not p_outcome ->> 'outcome' = any (
    '{succeeded,failed,retry_later,released,aborted,crashed,unknown_task}'::text[]) then
    perform queue._invalid('unknown outcome',
      'Outcomes: succeeded, failed, retry_later, released, aborted, crashed, unknown_task.',
      'outcome: ' || left(p_outcome ->> 'outcome', 200));
  end if;
  select e.key into v_bad from jsonb_each(p_outcome) e
  where e.key in ('error', 'message') and jsonb_typeof(e.value) not in ('string', 'null') limit 1;
  if found then
    perform queue._invalid(v_bad || ' must be text',
      'Pass a JSON string; put structured data into details.');
  elsif jsonb_typeof(p_outcome -> 'options') <> 'null' then
    perform queue._check_fail_options(p_outcome -> 'options');
  end if;
  if jsonb_typeof(p_outcome -> 'steps') <> 'null' then
    perform queue._check_steps(p_outcome -> 'steps');
  end if;
  perform queue._check_moment('at', queue._timestamp('at', p_outcome -> 'at'));
  if jsonb_typeof(p_outcome -> 'needs') = 'array' then
    select n::text into v_bad from jsonb_array_elements(p_outcome -> 'needs') n
    where n::text !~ '^[0-9]{1,18}$' limit 1;
  elsif jsonb_typeof(p_outcome -> 'needs') <> 'null' then
    v_bad := p_outcome ->> 'needs';
  end if;
  if v_bad is not null then
    perform queue._invalid('needs must be a list of ids', 'Pass ids of jobs, or null.',
      'value: ' || left(v_bad, 200));
  end if;
end $$;
