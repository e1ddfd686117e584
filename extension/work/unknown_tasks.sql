-- Unknown tasks: jobs whose worker does not know their task, as happens during a rolling deploy.
--
-- The worker reports such a job (finish_many, outcome unknown_task). The job then goes back, with no attempt
-- counted, for a worker that knows the task. A worker does the same with args in a version that it does not
-- know (args ->> '__version__'). A delay keeps the other workers from claiming the job again and again: 1 s,
-- 2 s, 4 s, 8 s, at most 10 s. If no worker knows the task for the grace period (queue.configure,
-- unknown_task_grace), the job fails. The attempts record all of this. An attempt that ended in this way is
-- released, with the task in its details. Any other end of an attempt shows that a worker has known the task.
--
-- The first worker that asks gets the job, so a single new worker among many old ones gets it by chance. With
-- 11 workers, all 63 offers of ten minutes miss the new one in one case of 400.

-- Returns when a job whose task a worker did not know at p_now goes to other workers. NULL: no worker has
-- known the task for the grace period, so the job fails. error: the text to record for this attempt.
create or replace function queue._unknown_task(p_id bigint, p_task text, p_worker bigint, p_now timestamptz,
  out at timestamptz, out error text)
language plpgsql stable parallel safe security invoker as $$
declare
  v_unknown record;
  v_task text := queue._task_and_version(p_id, p_task);
  v_grace interval := (select i.unknown_task_grace from queue.installation i);
  v_worker text := format('%s%s', p_worker,
    coalesce((select ' (' || left(w.name, 200) || ')' from queue.worker w where w.id = p_worker), ''));
begin
  v_unknown := queue._unknown_since(p_id);
  if p_now >= coalesce(v_unknown.since, p_now) + v_grace then
    error := format('no worker knows the task %s: %s', v_task,
                    case when v_worker = any (string_to_array(v_unknown.workers, ', ')) then v_unknown.workers
                         else concat_ws(', ', v_unknown.workers, v_worker) end);
    return;
  end if;
  at := least(p_now + least(2 ^ least(v_unknown.times, 4), 10) * interval '1 s',
    coalesce(v_unknown.since, p_now) + v_grace);
  error := format('worker %s does not know the task %s', v_worker, v_task);
end $$;

-- The name of a job's task, with the version of the job's args if they name one.
create or replace function queue._task_and_version(p_id bigint, p_task text)
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return left(p_task, 200) || coalesce(
    ' in version ' || left((select j.args ->> '__version__' from queue.job_now j where j.id = p_id), 20), '');
end $$;

-- Since when, in how many successive claims, and by which workers a job's task was not known. times is 0 if
-- the last claim's worker knew it.
-- Locks: none; the caller has the job's row, so no other attempt of the job ends meanwhile.
create or replace function queue._unknown_since(p_id bigint, out since timestamptz, out times integer,
  out workers text)
language plpgsql stable parallel safe security invoker as $$
begin
  select min(a.finished_at), count(*),
    string_agg(distinct format('%s%s', a.worker_id, coalesce(' (' || left(w.name, 200) || ')', '')), ', ')
  into since, times, workers
  from queue.attempt a left join queue.worker w on w.id = a.worker_id
  where a.job_id = p_id and a.outcome = 'released' and a.details ? 'unknown_task'
    and a.claim > coalesce((select max(k.claim) from queue.attempt k
                            where k.job_id = p_id
                              and (k.outcome = 'released' and k.details ? 'unknown_task') is not true), 0);
end $$;

-- The tasks of unfinished jobs whose last claim, within an hour, was by a worker that did not know them, and
-- those workers. Reads the last 1,000 such claims.
create or replace function queue._unknown_tasks(p_now timestamptz)
returns table (task text, jobs bigint,
  workers text) language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select queue._task_and_version(a.job_id, a.details ->> 'unknown_task'), count(distinct a.job_id),
      string_agg(distinct format('%s%s', a.worker_id, coalesce(' (' || left(w.name, 200) || ')', '')), ', ')
    from (select a.* from queue.attempt a
          where a.outcome = 'released' and a.details ? 'unknown_task' order by a.claim desc limit 1000) a
    left join queue.worker w on w.id = a.worker_id
    where a.finished_at > p_now - interval '1 hour' and not exists (select from queue.finished f
      where f.id = a.job_id)
      and (select x.times from queue._unknown_since(a.job_id) x) > 0
    group by 1 order by 1;
end $$;
