-- Tasks in SQL: tasks that are database functions, and a worker in SQL alone.
--
-- register_task names the function (defer/tasks.sql). Only the owner may do so, because workers call it with
-- their own rights: run_function and work are security invoker. For that reason they have no search_path of
-- their own, qualify every name, and call only public functions.
--
-- A claim of work lives as long as the transaction of its handler. No heartbeat is visible before that ends,
-- but reap sees in pg_locks that the session which registered (info.session) is in a transaction.
--
-- statement_timeout set within CALL has no effect on the CALL itself; transaction_timeout ends the session.
-- So a job's timeout can't end its handler: the attempt ends as timed_out when the handler returns, and its
-- writes are undone. Until then the claim stays, because reap renews its lease, and no second run starts
-- beside it. A statement_timeout set before the CALL, or a cancel, ends the handler: that job ends as
-- timed_out, and so does work.
--
-- The settings of one handler do not reach the next: role and search_path are reset, and chained transactions
-- keep their characteristics, whatever the defaults have become.

-- Locks: none between its transactions: fetch, run_function and heartbeat each have their own.
-- Raises: as register_worker and fetch; 2D000 within a transaction; 57014 if it is cancelled.
create or replace procedure queue.work(queues text[] default null, max_jobs integer default null)
language plpgsql security invoker as $$
declare
  v_worker bigint;
  v_id bigint;
  v_claim bigint;
  v_is_cancelled boolean := false;
  v_role pg_catalog.text := pg_catalog.current_setting('role');
  v_path pg_catalog.text := pg_catalog.current_setting('search_path');
begin
  if pg_catalog.int4lt(work.max_jobs, 1) then
    raise exception using errcode := '22023', message := 'max_jobs must be at least 1',
      detail := pg_catalog.format('max_jobs: %s', work.max_jobs), hint := 'Pass NULL to run all there are.';
  end if;
  v_worker := queue.register_worker('queue.work', work.queues, '{"listen": false, "session": true}');
  commit and chain;
  for v_n in 1 .. coalesce(work.max_jobs, 2147483647) loop
    perform from queue.heartbeat(v_worker);
    commit and chain;
    for v_look in 1 .. 2 loop  -- what is too large for the answer of one fetch comes with the next
      select f.id, f.claim into v_id, v_claim
      from queue.fetch(v_worker, work.queues, 1, '{"functions": true}') f;
      commit and chain;
      exit when v_id is not null;
    end loop;
    exit when v_id is null;
    begin
      perform queue.run_function(v_id, v_claim);
    exception
      when sqlstate 'QJ001' or sqlstate 'QJ002' then
        null;  -- the claim was taken away meanwhile, and everything is undone
      when query_canceled then
        v_is_cancelled := true;
    end;
    perform pg_catalog.set_config('role', v_role, false),
      pg_catalog.set_config('search_path', v_path, false);
    if v_is_cancelled then
      begin
        perform queue.fail(v_id, v_claim, 'it was cancelled, or statement_timeout has passed', null,
          '{"outcome": "timed_out"}');
      exception when sqlstate 'QJ001' or sqlstate 'QJ002' then
        null;
      end;
    end if;
    perform from queue.heartbeat(v_worker);  -- in the handler's transaction, which has shown that it lives
    commit and chain;
    exit when v_is_cancelled;
  end loop;
  perform queue.deregister_worker(v_worker);
  commit;
  if v_is_cancelled then
    raise exception using errcode := '57014', message := 'queue.work was cancelled',
      detail := pg_catalog.format('job: %s', v_id),
      hint := 'Its job has failed as timed_out. Call queue.work again; if statement_timeout has passed, set a'
        ' longer one.';
  end if;
end $$;
comment on procedure queue.work(text[], integer) is
  'A worker in SQL: runs jobs of the queues whose tasks are database functions, one after another, until'
    ' none is left or max_jobs have run. It claims each job in one transaction, and runs it in another'
    ' together with its outcome. Call it from psql, pg_cron or a loop, but not in a transaction block: there'
    ' it raises 2D000, invalid transaction termination. A statement_timeout that is set before limits the'
    ' whole call; the job that it interrupts has timed out. A job''s own timeout does not interrupt its'
    ' function: if it has passed when the function returns, the attempt has timed out and the function''s'
    ' writes are undone.';

-- Returns the statement that calls the function of a claim's task, with $1 for the args, and the args. NULL:
-- the task has no function, or no longer has one. late_at: when its timeout has passed.
-- Raises: QJ001, QJ002.
create or replace function queue.function_call(id bigint, claim bigint)
returns table (statement text, args jsonb, timeout interval, late_at timestamptz)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_task text;
begin
  {{if_restricted}}
    perform queue._require_claims(array[function_call.id], array[function_call.claim]);
  end if;
  select c.task, c.args, c.timeout,
    (select aj.claimed_at from queue.active_job aj where aj.id = c.id) + c.timeout
  into v_task, args, timeout, late_at
  from queue.claimed_job c where c.id = function_call.id and c.claim = function_call.claim;
  if not found then
    perform queue._raise_claim_error(function_call.id, function_call.claim);
  end if;
  select case when p.prorettype = 'void'::regtype
    then format('select cast(null as pg_catalog.jsonb) from %s($1)', t.function)
              else format('select pg_catalog.to_jsonb(%s($1))', t.function) end
  into statement
  from queue.task t join pg_proc p on p.oid = to_regprocedure(t.function || '(jsonb)')
  where t.name = v_task;
  return next;
end $$;
comment on function queue.function_call(bigint, bigint) is
  'Returns the statement that queue.run_function runs for a claim: it calls the function of the task,'
    ' with the args for $1. NULL if the task has none. late_at: when the job''s timeout has passed.';

-- Locks: those of the handler; then the claim's row, as succeed, fail and finish_many.
-- Why it takes effect exactly once: it commits or is undone together with the outcome. If the claim is lost,
-- succeed raises, then fail does, and everything is undone. If the function itself has ended the claim, only
-- succeed raises: by then that end is undone, too, and the job fails.
-- Raises: QJ001, QJ002, QJ008. An error of the function is the job's failure, except a cancel (57014), which
-- the caller handles.
create or replace function queue.run_function(id bigint, claim bigint)
returns table (state text, outcome text, error text)
language plpgsql volatile parallel unsafe security invoker rows 1 as $$
declare
  v_call pg_catalog.record;
  v_role pg_catalog.text := pg_catalog.current_setting('role');
  v_result pg_catalog.jsonb;
  v_has_returned boolean := false;
  v_options pg_catalog.jsonb;
  v_state pg_catalog.text;
  v_message pg_catalog.text;
  v_context pg_catalog.text;
begin
  select c.statement, c.args, c.timeout, c.late_at into v_call
  from queue.function_call(run_function.id, run_function.claim) c;
  if v_call.statement is null then
    select f.state into state
    from queue.finish_many(pg_catalog.jsonb_build_array(pg_catalog.jsonb_build_object(
      'id', run_function.id, 'claim', run_function.claim, 'outcome', 'unknown_task'))) f;
    if state is null then
      -- This raises, because the claim is lost by now.
      perform from queue.function_call(run_function.id, run_function.claim);
    end if;
    outcome := queue.attempt_outcome(run_function.id, run_function.claim);
    error := 'no worker knows the task';
    return next;
    return;
  end if;
  begin
    execute v_call.statement into v_result using v_call.args;
    set constraints all immediate;
    perform pg_catalog.set_config('role', v_role, true);  -- the function may have set a lesser role
    if pg_catalog.timestamptz_ge(pg_catalog.clock_timestamp(), v_call.late_at) then
      v_options := '{"outcome": "timed_out"}';
      raise exception using
        message := pg_catalog.format('not done within its timeout of %s', v_call.timeout),
        hint := 'Its writes are undone.';
    end if;
    v_has_returned := true;
    perform queue.succeed(run_function.id, run_function.claim, v_result);
    state := 'succeeded';
    outcome := 'succeeded';
    return next;
    return;
  exception when others or assert_failure then
    get stacked diagnostics v_state := returned_sqlstate, v_message := message_text,
      v_context := pg_exception_context;
    if v_has_returned and pg_catalog.starts_with(v_state, 'QJ') then
      v_message := pg_catalog.concat('the claim had ended when the function returned: ', v_message);
    end if;
  end;
  error := v_message;
  state := queue.fail(run_function.id, run_function.claim, v_message, pg_catalog.jsonb_build_object(
    'type', v_state, 'message', pg_catalog.left(v_message, 2000), 'traceback',
    pg_catalog.right(v_context, 16000)), v_options);
  outcome := queue.attempt_outcome(run_function.id, run_function.claim);
  return next;
end $$;
comment on function queue.run_function(bigint, bigint) is
  'Runs the database function of a claim''s task, as the calling role, and ends the claim in the same'
    ' transaction. It ends as succeeded, with the return value; or as failed, with the error and its'
    ' context, and without any of the function''s writes. It also fails if the function has ended the claim'
    ' itself, or its timeout has passed. Use it for claims whose task a client does not know: without a'
    ' function the claim ends as unknown_task. Returns the job''s new state, the outcome as queue.attempts'
    ' has it, or succeeded, and the error. Raises QJ002 if the claim is lost; then everything is undone. It'
    ' needs a transaction of its own, in READ COMMITTED, with statement_timeout set to the job''s timeout.';
