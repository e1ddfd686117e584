-- Steps of durable jobs: the next run of a job continues after its last finished step.
--
-- Each step has a name. If a run uses a name again, the use gets a number: a, a#2, a#3. SQL applies this
-- rule, so that all clients behave alike. begin_step gives a name the number of its use in this run.
-- finish_step means the use that was begun, as do all calls that end a step (_step_to_end). A client that
-- counts the uses itself passes a#2, and needs no begin_step.
-- Locks: the claim's row of queue.active_job, FOR KEY SHARE; then the step's row of queue.step. The
-- worker's own end of the claim waits for a transaction that has finished a step; reap and operators
-- (retry with force) skip the row. After the end of the claim a step finds no row (QJ002). So a worker
-- that was declared dead writes nothing, while two connections of one handler, or its heartbeat, do not
-- wait for each other. Only the claim's holder writes the rows of queue.step while the job runs. Why no
-- wake-up is lost: nobody waits for a step.
-- Two sessions: work/steps.fenced.spec.

-- Locks: none; if it records a use or a fingerprint, those named above.
-- Raises: 22023, QJ001, QJ002, QJ008, QJ009.
create or replace function queue.begin_step(id bigint, claim bigint, name text, fingerprint text default null)
returns table (finished boolean, value jsonb)
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_key record;
  v_step record;
begin
  {{if_restricted}}
    perform queue._require_claims(array[begin_step.id], array[begin_step.claim]);
  end if;
  perform queue._check_isolation();
  v_key := queue._step_key(begin_step.name);
  perform queue._check_name('fingerprint', begin_step.fingerprint) where begin_step.fingerprint is not null;
  perform from queue.active_job aj where aj.id = begin_step.id and aj.claim = begin_step.claim;
  if not found then
    perform queue._raise_claim_error(begin_step.id, begin_step.claim);
  end if;
  v_step := queue._step_in_run(begin_step.id, begin_step.claim, v_key.name, v_key.no);
  finished := v_step.finished_at is not null;
  if finished and v_step.fingerprint <> begin_step.fingerprint then
    perform queue._step_changed(begin_step.id, begin_step.name, v_step.fingerprint, begin_step.fingerprint);
  elsif finished and v_step.run <> begin_step.claim then
    perform queue._lock_claim(begin_step.id, begin_step.claim);
    update queue.step s set run = begin_step.claim
    where s.job_id = begin_step.id and s.name = v_key.name and s.no = v_step.no;
  elsif not finished and (v_step.fingerprint is distinct from begin_step.fingerprint
    or v_key.no is null and v_step.no > 1) then
    perform queue._lock_claim(begin_step.id, begin_step.claim);
    insert into queue.step as s (job_id, claim, run, no, name, fingerprint)
    values (begin_step.id, begin_step.claim, begin_step.claim, v_step.no, v_key.name, begin_step.fingerprint)
    on conflict on constraint step_pkey do update set claim = excluded.claim, run = excluded.run,
      fingerprint = excluded.fingerprint;
  end if;
  value := v_step.value;
  return next;
end $$;
comment on function queue.begin_step(bigint, bigint, text, text) is
  'Returns whether a step of a job is finished, and its value. A finished step must not run again. If this'
    ' run has finished a step of this name before, the name means its next use: a, a#2, a#3; a name with a'
    ' number from 2 on means that use. A fingerprint is a text of up to 1,000 bytes that identifies the code'
    ' of the step: if that was finished with a different one, the call is refused (QJ009). Steps that fetch'
    ' has returned need no call.';

-- Locks: see the top. Raises: 22023, QJ001, QJ002, QJ003 (the step is already finished), QJ008.
create or replace function queue.finish_step(id bigint, claim bigint, name text, value jsonb default null)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_key record;
begin
  {{if_restricted}}
    perform queue._require_claims(array[finish_step.id], array[finish_step.claim]);
  end if;
  perform queue._check_isolation();
  perform queue._check_size('value', finish_step.value);
  v_key := queue._step_key(finish_step.name);
  perform queue._lock_claim(finish_step.id, finish_step.claim);
  insert into queue.step (job_id, claim, run, finished_at, no, name, value)
  values (finish_step.id, finish_step.claim, finish_step.claim, clock_timestamp(), coalesce(v_key.no, 1),
    v_key.name, finish_step.value)
  on conflict on constraint step_pkey do nothing;
  if found then
    return;
  end if;
  update queue.step s
  set claim = finish_step.claim, run = finish_step.claim, finished_at = clock_timestamp(),
    value = finish_step.value, error = null
  where s.job_id = finish_step.id and s.name = v_key.name and s.finished_at is null
    and s.no = coalesce(v_key.no, (
      select min(b.no) from queue.step b
      where b.job_id = finish_step.id and b.name = v_key.name and b.finished_at is null));
  if not found then
    perform queue._step_is_finished(finish_step.id, finish_step.name);
  end if;
end $$;
comment on function queue.finish_step(bigint, bigint, text, jsonb) is
  'Finishes a step with a value, for this and all later runs of the job. It may be part of the handler''s own'
    ' transaction: the handler''s writes and the step then commit together or not at all, and a lost claim'
    ' rolls both back (QJ002). A step that is already finished is refused (QJ003): if the answer'
    ' was lost, that means that the first call counted. For a name that is used again in one run, see'
    ' begin_step, which counts each use.';

-- Locks: none. Raises: 22023, QJ001, QJ002.
create or replace function queue.read_steps(id bigint, claim bigint, after text default null)
returns table (name text, value jsonb)
language plpgsql stable parallel unsafe security definer rows 100
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_after record;
begin
  {{if_restricted}}
    perform queue._require_claims(array[read_steps.id], array[read_steps.claim]);
  end if;
  perform from queue.active_job aj where aj.id = read_steps.id and aj.claim = read_steps.claim;
  if not found then
    perform queue._raise_claim_error(read_steps.id, read_steps.claim);
  end if;
  if read_steps.after is not null then
    v_after := queue._step_key(read_steps.after);
  else
    select '' as name, 0 as no into v_after;
  end if;
  return query
    select queue._step_name(x.name, x.no), x.value
    from (
      select s.name, s.no, s.value, row_number() over (order by s.name, s.no) as n,
        sum(coalesce(pg_column_size(s.value), 0) + octet_length(s.name)) over (order by s.name, s.no) as total
      from queue.step s
      where s.job_id = read_steps.id and s.finished_at is not null
        and (s.name, s.no) > (v_after.name, coalesce(v_after.no, 1))) x
    where x.n = 1 or x.total <= {{answer_bytes}} and x.n <= 1000
    order by x.name, x.no;
end $$;
comment on function queue.read_steps(bigint, bigint, text) is
  'Returns the finished steps of a job that the caller runs, if fetch returned an empty object because they'
    ' take more than 64 kB: by name, as many as fit into one answer. Call it again with the last name as'
    ' after, until it returns no row.';

-- Splits a step's name into the name and the number of its use, NULL if the name has none. The first use
-- has no number, so a#1 is a name of its own, and _step_name returns each name as it was given. A name may
-- have 1,000 bytes, apart from its number.
-- Raises: 22023.
create or replace function queue._step_key(p_name text, out name text, out no integer)
language plpgsql immutable parallel safe security invoker as $$
declare
  v_parts text[];
begin
  name := p_name;
  if strpos(p_name, '#') > 0 and octet_length(p_name) <= 1010 then
    v_parts := regexp_match(p_name, '^(.+)#([2-9]|[1-9][0-9]{1,8})$');
    if v_parts is not null then
      name := v_parts[1];
      no := v_parts[2]::integer;
    end if;
  end if;
  perform queue._check_name('name', name);
end $$;

-- A step's name as clients and people see it.
create or replace function queue._step_name(p_name text, p_no integer)
returns text language plpgsql immutable parallel safe security invoker as $$
begin
  return p_name || case when p_no > 1 then '#' || p_no else '' end;
end $$;

-- The use that a name means in a run of a job. Without a number (p_no) it is the first use that is not
-- finished or that this run has not reached yet. If that has no row, only its number is returned.
create or replace function queue._step_in_run(p_id bigint, p_claim bigint, p_name text, p_no integer,
  out no integer, out run bigint, out finished_at timestamptz, out fingerprint text, out value jsonb)
language plpgsql stable parallel safe security invoker as $$
begin
  select s.no, s.run, s.finished_at, s.fingerprint, s.value into no, run, finished_at, fingerprint, value
  from queue.step s
  where s.job_id = p_id and s.name = p_name
    and (s.no = p_no or p_no is null and (s.run <> p_claim or s.finished_at is null))
  order by s.no limit 1;
  if no is null then
    no := coalesce(p_no,
      (select max(s.no) from queue.step s where s.job_id = p_id and s.name = p_name) + 1, 1);
  end if;
end $$;

-- Which use of a name is ended by a call that gives no number (p_no), and whether that use is finished. If
-- the first use has no row, because it was begun without one, it is that one; else the first that was begun
-- and has not finished; else the next one. Of uses that run at once, any may end first.
create or replace function queue._step_to_end(p_id bigint, p_claim bigint, p_name text, p_no integer,
  out no integer, out is_finished boolean)
language plpgsql stable parallel safe security invoker as $$
begin
  no := p_no;
  if no is null and not exists (
    select from queue.step s where s.job_id = p_id and s.name = p_name and s.no = 1) then
    no := 1;
  elsif no is null then
    select s.no into no from queue.step s
    where s.job_id = p_id and s.name = p_name and s.finished_at is null order by s.no limit 1;
    if not found then
      no := (queue._step_in_run(p_id, p_claim, p_name, null)).no;
    end if;
  end if;
  is_finished := queue._has_step(p_id, p_name, no);
end $$;

-- Whether a job has finished a step.
create or replace function queue._has_step(p_id bigint, p_name text, p_no integer)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (select from queue.step s
    where s.job_id = p_id and s.name = p_name and s.no = coalesce(p_no, 1) and s.finished_at is not null);
end $$;

-- Keeps a claim from ending before this transaction ends. p_may_end: this transaction may end it.
-- Locks: see the top; with p_may_end, FOR NO KEY UPDATE: of two such transactions one waits for the other
-- here, as they would be deadlocked where they end it. Raises: QJ001, QJ002.
create or replace function queue._lock_claim(p_id bigint, p_claim bigint, p_may_end boolean default false)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_may_end then
    perform from queue.active_job aj where aj.id = p_id and aj.claim = p_claim for no key update;
  else
    perform from queue.active_job aj where aj.id = p_id and aj.claim = p_claim for key share;
  end if;
  if not found then
    perform queue._raise_claim_error(p_id, p_claim);
  end if;
end $$;

-- Raises: QJ009, always.
create or replace function queue._step_changed(id bigint, step text, was text, fingerprint text)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ009', message = 'step changed',
    detail = format('id: %s, step: %s, finished with fingerprint: %s, now: %s', id, left(step, 200), was,
      fingerprint),
    hint = 'The step has run with other code. Give the new step another name, pass the old fingerprint,'
      ' or let the step run again by queue.retry with from_step.';
end $$;

-- Raises: QJ003, always.
create or replace function queue._step_is_finished(p_id bigint, p_name text)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  perform queue._invalid_state(p_id, format('running, step %s is finished', left(p_name, 200)),
    'Call queue.begin_step before a step runs. If a run uses a name again, call it for each use, or add a'
      ' number: name#2.');
end $$;

-- The finished steps of a job for fetch: an object by name, empty if they are too long for an answer.
create or replace function queue._steps(p_id bigint)
returns jsonb language plpgsql stable parallel safe security invoker as $$
declare
  v_steps jsonb;
begin
  select case when x.total <= {{answer_bytes}} then (
    select jsonb_object_agg(queue._step_name(s.name, s.no), s.value)
    from queue.step s where s.job_id = p_id and s.finished_at is not null)
    when x.total > {{answer_bytes}} then '{}' end into v_steps
  from (
    select sum(coalesce(pg_column_size(s.value), 0) + octet_length(s.name)) as total
    from queue.step s where s.job_id = p_id and s.finished_at is not null) x;
  return case when octet_length(v_steps::text) > {{answer_bytes}} then '{}'::jsonb else v_steps end;
end $$;
