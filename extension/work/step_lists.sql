-- Lists of steps: several steps are finished by one call, or together with the outcome of their run.
--
-- A client that need not store a step at once (a lazy step) keeps it for its next call. If the client dies
-- before that, these steps run again. A client that passes a list has counted the uses of each name: a, a#2,
-- a#3.
-- Locks and wake-ups: see work/steps.sql. Two sessions: work/step_lists.outcome.spec.

-- Locks: see the top.
-- Raises: 22023, QJ001, QJ002, QJ003 (one is already finished), QJ008; then none is stored.
create or replace function queue.finish_steps(id bigint, claim bigint, steps jsonb)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_finished text;
begin
  {{if_restricted}}
    perform queue._require_claims(array[finish_steps.id], array[finish_steps.claim]);
  end if;
  perform queue._check_isolation();
  perform queue._check_steps(finish_steps.steps);
  perform queue._lock_claim(finish_steps.id, finish_steps.claim);
  v_finished := queue._store_steps(finish_steps.id, finish_steps.claim, finish_steps.steps);
  if v_finished is not null then
    perform queue._step_is_finished(finish_steps.id, v_finished);
  end if;
end $$;
comment on function queue.finish_steps(bigint, bigint, jsonb) is
  'Finishes several steps of a job, in the order of the list: all or none. steps is an array of {"name",'
    ' "value", "fingerprint"}, of at most 1,000; without a value it is null. A name that is used again in one'
    ' run has the number of its use: a, a#2. As finish_step, it may be part of the handler''s own'
    ' transaction, and refuses a lost claim (QJ002) and a step that is already finished (QJ003).';

-- Raises: 22023 unless it is a list of steps.
create or replace function queue._check_steps(p_steps jsonb)
returns void language plpgsql stable parallel unsafe security invoker as $$
declare
  v_step jsonb;
  v_twice text;
begin
  if jsonb_typeof(p_steps) is distinct from 'array' then
    perform queue._invalid('steps must be a JSON array',
      'Pass [{"name": text, "value": any JSON, "fingerprint": text}, ...].');
  elsif jsonb_array_length(p_steps) > 1000 then
    perform queue._invalid('steps holds more than 1,000', 'Call queue.finish_steps for each further 1,000.',
      'steps: ' || jsonb_array_length(p_steps));
  end if;
  for v_step in select jsonb_array_elements(p_steps) loop
    perform queue._check_keys('a step', v_step, array['name', 'value', 'fingerprint']);
    if jsonb_typeof(v_step -> 'name') is distinct from 'string'
      or coalesce(jsonb_typeof(v_step -> 'fingerprint'), 'null') not in ('string', 'null') then
      perform queue._invalid('a step is malformed', 'name and fingerprint are text; a name is needed.',
        'step: ' || left(v_step::text, 200));
    end if;
    perform queue._check_name('fingerprint', v_step ->> 'fingerprint')
    where jsonb_typeof(v_step -> 'fingerprint') = 'string';
    perform queue._check_size('value', v_step -> 'value');
  end loop;
  select min(queue._step_name(s.name, s.no)) into v_twice
  from (select k.name, coalesce(k.no, 1) as no from jsonb_array_elements(p_steps) e
        cross join lateral queue._step_key(e ->> 'name') k
        group by 1, 2 having count(*) > 1) s;
  if v_twice is not null then
    perform queue._invalid('a step is named twice', 'Add the number of its use in the run: a, a#2.',
      'step: ' || left(v_twice, 200));
  end if;
end $$;

-- Finishes steps, with times in their order, except those that are finished already; returns the name of the
-- first of these.
-- Locks: the caller holds the claim's row of queue.active_job; the steps' rows, which only its holder writes.
create or replace function queue._store_steps(p_id bigint, p_claim bigint, p_steps jsonb)
returns text language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_finished text;
begin
  with given as (
    select k.name, coalesce(k.no, 1) as no, s.value, s.fingerprint, s.n
    from rows from (jsonb_to_recordset(p_steps) as (name text, value jsonb, fingerprint text))
      with ordinality s (name, value, fingerprint, n)
    cross join lateral queue._step_key(s.name) k),
  stored as (
    insert into queue.step as t (job_id, claim, run, finished_at, no, name, fingerprint, value)
    select p_id, p_claim, p_claim, v_now - (jsonb_array_length(p_steps) - g.n) * interval '1 us', g.no,
      g.name, g.fingerprint, g.value
    from given g order by g.n
    on conflict on constraint step_pkey do update set claim = excluded.claim, run = excluded.run,
      finished_at = excluded.finished_at, fingerprint = coalesce(excluded.fingerprint, t.fingerprint),
      value = excluded.value, error = null
    where t.finished_at is null
    returning t.name, t.no)
  select queue._step_name(g.name, g.no) into v_finished from given g
  where not exists (select from stored s where s.name = g.name and s.no = g.no)
  order by g.n limit 1;
  return v_finished;
end $$;

-- Stores the steps that come with outcomes, before these end their claims. An outcome whose claim is lost
-- stores none; a step that is finished already stays as it is, because an outcome may be sent twice.
-- Locks: the claims' rows of queue.active_job, which the caller holds, so that nobody else ends them.
create or replace function queue._store_steps_of(p_outcomes jsonb)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._store_steps(o.id, o.claim, o.steps)
  from jsonb_to_recordset(p_outcomes) o (id bigint, claim bigint, steps jsonb)
  where o.steps is not null
    and exists (select from queue.active_job aj where aj.id = o.id and aj.claim = o.claim);
end $$;
