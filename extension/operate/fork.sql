-- Forking a job: a copy of it continues from one of its steps.

-- Locks: none, as copy: it only appends. Why no wake-up is lost: the copy is a new job of the log; see defer.
-- Raises: 22023, QJ001, QJ009. Two sessions: operate/fork.retry.spec.
create or replace function queue.fork(id bigint, from_step text)
returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_key record;
  v_id bigint;
  v_is_found boolean;
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator}', array[fork.id]);
  end if;
  v_key := queue._step_key(fork.from_step);
  v_id := queue._copy(fork.id, null, {{overridden}});
  insert into queue.job_override (id, has_steps) values (v_id, true);
  -- One statement does both, because a retry may forget the step meanwhile.
  with point as materialized (
    select f.claim, f.finished_at from queue.step f
    where f.job_id = fork.id and f.name = v_key.name and f.no = coalesce(v_key.no, 1)
      and f.finished_at is not null),
  kept as (
    insert into queue.step (job_id, claim, run, finished_at, no, name, fingerprint, value, failures,
      failed_at, error)
    select v_id, s.claim, s.run, s.finished_at, s.no, s.name, s.fingerprint, s.value, s.failures, s.failed_at,
      s.error
    from queue.step s join point f on (s.claim, s.finished_at) < (f.claim, f.finished_at)
    where s.job_id = fork.id and s.finished_at is not null)
  select exists (select from point) into v_is_found;
  if not v_is_found then
    perform queue._no_such_step(fork.id, fork.from_step);
  end if;
  perform queue._announce();
  perform queue._audit_jobs('fork', jsonb_build_object('from_step', fork.from_step), array[fork.id, v_id],
    queue._jobs_before(array[fork.id]));
  return v_id;
end $$;
comment on function queue.fork(bigint, text) is
  'Defers a copy of a job (queue.copy) that continues from one of its finished steps. The copy has the steps'
    ' that were finished before that one. It also has the awaited jobs of the original that have ended.'
    ' Returns the id of the copy.';

-- Raises: QJ009, always.
create or replace function queue._no_such_step(id bigint, step text)
returns void language plpgsql volatile parallel safe security invoker as $$
begin
  raise exception using errcode = 'QJ009', message = 'step changed',
    detail = format('id: %s, step: %s, not finished', id, left(step, 200)),
    hint = 'The job has finished no such step; queue.steps lists those that it has finished.';
end $$;
