-- Finding and locking jobs wherever they are.
--
-- Lock order of a call on one job: its row in queue.active_job, then its queueing lock's row, then the
-- admission lock, then the rest. For the first it waits for a session that ends or claims the job, for the
-- second for a session that replaces it. Once the call holds the admission lock, only a claim can move the
-- job, and claims skip the locked row. Under the admission lock it waits for nothing that another transaction
-- could hold for long: not for these rows, nor for queue.job_override of a job that is being finished. The
-- first lock is FOR NO KEY UPDATE, so the call does not wait for a transaction that has only finished a step
-- (work/steps.sql), which may last. _try_lock_job then finds the job busy. The call checks again under the
-- admission lock whether the caller may use the jobs' queues, because jobs may have moved while it waited.
--
-- A call on many jobs must keep no job from workers or other calls while it waits for one client. So it first
-- waits for each row, key and lock alone, and lets it go again. Only then does it take all of them in their
-- order. If it waits for one of them for half a second, it lets all of them go and starts again, four times
-- at most.
--
-- A call whose transaction already holds the admission lock, from an earlier call, waits for none of these: a
-- job that another transaction holds is busy. Otherwise nobody would get jobs meanwhile, and a worker that
-- waits for a row of the earlier call would be in a deadlock.
-- Tests: operate/change.claim.spec, operate/change.frozen.spec, operate/change.again.spec.

-- Prepares a call that changes one job: checks that it exists and takes the locks in their order.
-- Locks, each waited for: the job's row of queue.active_job, that of its queueing lock, the admission lock.
-- If this transaction already holds the admission lock, the rows by skip locked.
-- Raises: QJ001, QJ003 (then, if another transaction has one of these rows), QJ008.
create or replace function queue._lock_for_change(p_id bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._check_isolation();
  if p_id is null or not exists (select from queue.job j where j.id = p_id) then
    perform queue._job_not_found(p_id);
  end if;
  if not queue._has_admission() then
    perform from queue.active_job aj where aj.id = p_id for no key update;
    perform from queue.queueing_lock k
    where k.job_id = p_id and k.key = (select j.queueing_lock from queue.job j where j.id = p_id) for update;
  else
    perform from queue.active_job aj where aj.id = p_id for no key update skip locked;
    if not found and exists (select from queue.active_job aj where aj.id = p_id)
      or not queue._try_lock_queueing_lock(p_id) then
      perform queue._invalid_state(p_id, queue._state(p_id),
        'Another transaction may be changing this job. Yours holds the admission lock, so it can''t wait:'
        ' make this call in a transaction of its own.');
    end if;
  end if;
  perform queue._admit_all(array[p_id]);
  perform queue._require_jobs('{operator}', array[p_id]);
end $$;

-- Prepares a call that changes many jobs: takes the locks in their order. p_dependents: more jobs that the
-- call must find behind the gates.
-- Locks: those of _lock_rows. Raises: 22023, QJ008.
create or replace function queue._lock_all_for_change(p_ids bigint[], p_dependents bigint[] default '{}')
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._check_isolation();
  perform queue._check_ids(p_ids);
  perform queue._lock_rows(p_ids, p_admitted => p_ids || p_dependents);
  perform queue._require_jobs('{operator}', p_ids);
end $$;

-- Locks the rows of jobs. The caller then knows their state, except where another transaction holds a row.
-- With p_retakes, also takes queueing locks of finished jobs; returns the jobs that got one. p_admitted: the
-- jobs that the caller must find behind the gates; NULL: all that are visible.
-- Locks: those of _take_rows; all other rows of queue.active_job by skip locked. If this transaction holds
-- the admission lock already: those of _try_retake_queueing_locks; all rows by skip locked.
-- Why it ends: after five rounds it goes on without the rows that others hold: those jobs are busy.
create or replace function queue._lock_rows(p_ids bigint[], p_admitted bigint[],
  p_retakes boolean default false)
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_taken record;
  v_keyed bigint[];
begin
  if queue._has_admission() then
    v_keyed := queue._try_retake_queueing_locks(p_ids) where p_retakes;
  else
    for v_round in 1 .. 5 loop
      perform queue._await_rows(p_ids), queue._await_keys(p_ids, p_retakes), queue._await_admission();
      v_taken := queue._take_rows(p_ids, p_retakes);
      exit when v_taken.is_done;
    end loop;
    v_keyed := v_taken.keyed;
  end if;
  perform queue._admit_all(p_admitted);
  perform from queue.active_job aj where aj.id = any (p_ids) for no key update skip locked;
  return v_keyed;
end $$;

-- Waits for the transactions that are claiming, ending or changing jobs, in the order of ids. It does not
-- wait for a job that is free meanwhile.
-- Locks: the rows of queue.active_job and queue.finished that are free, by skip locked; then one of the
-- others, and so on. Each lock is released at once, as its savepoint is rolled back. xmax is 0 if no
-- transaction has ever locked this version of the row.
-- Why no wake-up is lost: a fetch that skips such a row looks again when the call announces what it has
-- changed, or after its sleep, which is short.
-- Two sessions: operate/change.frozen.spec.
create or replace function queue._await_rows(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_left bigint[];
  v_free bigint[];
begin
  v_left := array(
    select aj.id from queue.active_job aj where aj.id = any (p_ids) and aj.xmax <> '0'::xid
    union select f.id from queue.finished f where f.id = any (p_ids) and f.xmax <> '0'::xid);
  loop
    begin
      v_free := array(select aj.id from queue.active_job aj where aj.id = any (v_left)
          for no key update skip locked)
        || array(select f.id from queue.finished f where f.id = any (v_left) for update skip locked);
      {{roll_back}}
    end;
    v_left := array(select unnest(v_left) except select unnest(v_free) order by 1);
    exit when v_left = '{}';
    begin
      perform from queue.active_job aj where aj.id = v_left[1] for no key update;
      perform from queue.finished f where f.id = v_left[1] for update;
      {{roll_back}}
    end;
    v_left := v_left[2:];
  end loop;
end $$;

-- Waits for the transactions that replace the jobs of queueing locks and, with p_retakes, for those that
-- defer others with the keys of finished jobs.
-- Locks: rows of queue.queueing_lock, one at a time in the order of keys, as _await_rows.
-- Two sessions: operate/change.frozen.spec.
create or replace function queue._await_keys(p_ids bigint[], p_retakes boolean)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_key text;
begin
  foreach v_key in array array(
    select k.key from queue.queueing_lock k
    where k.key = any (array(select j.queueing_lock from queue.job j
      where j.id = any (p_ids) and j.queueing_lock is not null)) and k.job_id = any (p_ids)
      and k.xmax <> '0'::xid
    order by k.key)
  loop
    begin
      perform from queue.queueing_lock k where k.key = v_key and k.job_id = any (p_ids) for update;
      {{roll_back}}
    end;
  end loop;
  if p_retakes then
    foreach v_key in array array(
      select distinct j.queueing_lock from queue.job j
      where j.id = any (queue._retakable(p_ids)) order by j.queueing_lock)
    loop
      begin
        insert into queue.queueing_lock (key, job_id) values (v_key, 0)
        on conflict on constraint queueing_lock_pkey do nothing;
        {{roll_back}}
      end;
    end loop;
  end if;
end $$;

-- Waits for the transaction that holds the admission lock, up to 2 s.
-- Locks: the admission lock, released at once. It does not use _lock_admission: its savepoint within this one
-- would make others wait for the end of this transaction.
-- Why no wake-up is lost: the caller takes the lock next, and admits what others have left to it.
-- Raises: 55P03 after the caller's lock_timeout, if that is at most 2 s.
create or replace function queue._await_admission()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_timeout constant text := current_setting('lock_timeout');
begin
  perform queue._cap_lock_timeout('2s');
  perform from queue.admission for update;
  {{roll_back}}
  when lock_not_available then
    if v_timeout <> '0' and v_timeout::interval <= interval '2 s' then
      raise;
    end if;
  when deadlock_detected then
    null;  -- with a transaction that held the lock until it rolled back to a savepoint, and now waits for it
end $$;

-- Takes the locks of a change of many jobs: all, or none if it has waited for one of them for half a second.
-- keyed: the jobs whose queueing locks were taken (p_retakes).
-- Locks, each waited for: the free queueing locks of finished jobs (p_retakes); claimed rows of
-- queue.active_job and rows of queue.finished, in the order of ids; the admission lock.
-- Why no deadlock: ends of claims take claimed rows in the order of ids, too, and all take the admission lock
-- after them. A session that holds that lock or a key, and wants one of these rows, waits for half a second.
create or replace function queue._take_rows(p_ids bigint[], p_retakes boolean, out is_done boolean,
  out keyed bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_timeout text;
begin
  v_timeout := queue._cap_lock_timeout('500ms');  -- set here, so that it is undone with the rest
  keyed := case when p_retakes then queue._retake_queueing_locks(p_ids) end;
  perform from queue.active_job aj where aj.id = any (p_ids) and aj.claim is not null
  order by aj.id for no key update;
  perform from queue.finished f where f.id = any (p_ids) order by f.id for update;
  is_done := queue._lock_admission(true);
  perform set_config('lock_timeout', v_timeout, true);
exception when lock_not_available or deadlock_detected then
  is_done := false;
  keyed := null;
end $$;

-- Takes the free queueing locks of finished jobs that have never started, and returns the jobs that got one.
-- A job does not get it if another call took it while this one waited.
-- Locks: the locks' rows, in their order, before anything else.
create or replace function queue._retake_queueing_locks(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_ids bigint[] := queue._retakable(p_ids);
  v_keyed bigint[];
begin
  with taken as (
    insert into queue.queueing_lock (key, job_id)
    select j.queueing_lock, j.id from queue.job j where j.id = any (v_ids) order by j.queueing_lock, j.id
    on conflict on constraint queueing_lock_pkey do nothing
    returning job_id)
  select array_agg(t.job_id) into v_keyed from taken t;
  return v_keyed;
end $$;

-- _retake_queueing_locks, but without the keys for which another transaction is deferring a job.
-- Locks: the caller holds the admission lock; the locks' rows, each waited for up to 5 ms.
create or replace function queue._try_retake_queueing_locks(p_ids bigint[])
returns bigint[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_id bigint;
  v_timeout text;
  v_keyed bigint[];
begin
  foreach v_id in array queue._retakable(p_ids) loop
    begin
      v_timeout := queue._cap_lock_timeout('5ms');
      v_keyed := v_keyed || queue._retake_queueing_locks(array[v_id]);
      perform set_config('lock_timeout', v_timeout, true);
    exception when lock_not_available then
      null;
    end;
  end loop;
  return v_keyed;
end $$;

-- The finished jobs among these that have never started, and have a queueing lock.
create or replace function queue._retakable(p_ids bigint[])
returns bigint[] language plpgsql stable parallel safe security invoker as $$
begin
  return array(
    select f.id from unnest(p_ids) u (id)
    cross join lateral (
      select f.id from queue.finished f join queue.job_now j on j.id = f.id
      where f.id = u.id and j.queueing_lock is not null and j.claims = 0
        and not (f.state = 'succeeded' and f.worker_id is not null)
      offset 0) f);
end $$;

-- The situation of a job: missing, running, finished, open (neither), or busy: another transaction holds it,
-- the end of its claim is not settled, or it is not admitted yet. All but missing and busy jobs are locked.
-- Locks: the caller holds the admission lock; the job's rows by skip locked.
create or replace function queue._try_lock_job(p_id bigint, out situation text, out claim bigint,
  out worker_id bigint)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_xid xid8;
begin
  select j.xid into v_xid from queue.job j where j.id = p_id;
  if not found then
    situation := 'missing';
    return;
  end if;
  situation := 'busy';
  if v_xid is not distinct from pg_current_xact_id_if_assigned()
      and p_id > coalesce((select max(r.upto) from queue.rehearsal r), 0)
    or queue._is_unsettled(p_id)
    or not queue._try_lock_queueing_lock(p_id)
  then
    return;
  end if;
  select aj.claim, aj.worker_id into claim, worker_id from queue.active_job aj
  where aj.id = p_id for update skip locked;
  if found then
    situation := case when claim is null then 'open' else 'running' end;
    return;
  elsif exists (select from queue.active_job aj where aj.id = p_id) then
    return;
  end if;
  perform from queue.finished f where f.id = p_id for update skip locked;
  if found then
    situation := 'finished';
  elsif not exists (select from queue.finished f where f.id = p_id) and queue._is_gated(p_id) then
    situation := 'open';
  end if;
  -- Its claim may have ended since the first look; then this look shows the settlement, too.
  situation := case when queue._is_unsettled(p_id) then 'busy' else situation end;
end $$;

-- _try_lock_job for many jobs, in the order of ids, each once, without those that are missing or busy.
-- Locks: as there.
create or replace function queue._try_lock_jobs(p_ids bigint[])
returns table (id bigint, situation text, claim bigint, worker_id bigint)
language plpgsql volatile parallel unsafe security invoker rows 10 as $$
begin
  return query
    select u.id, g.situation, g.claim, g.worker_id
    from (select distinct i.id from unnest(p_ids) i (id) order by i.id) u
    cross join lateral queue._try_lock_job(u.id) g
    where g.situation not in ('missing', 'busy');
end $$;

-- Whether the end of a claim of a job is not settled.
create or replace function queue._is_unsettled(p_id bigint)
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return exists (select from queue.unsettled h where h.job_id = p_id and h.kind in ('ended', 'again')
    and not (h.kind = 'again' and h.flags = 0 and h.payload is null));
end $$;

-- A job's state as queue.jobs shows it.
create or replace function queue._state(p_id bigint)
returns text language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_state text;
begin
  select j.state into v_state from queue.all_jobs j where j.id = p_id;
  return v_state;
end $$;

-- The outcome for each id, in the given order, each id once. p_unkeyed: jobs whose queueing lock belongs to
-- another job.
create or replace function queue._change_results(p_ids bigint[], p_done bigint[],
  p_unkeyed bigint[] default null)
returns table (id bigint, outcome text, error text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select u.id, j.state, case when j.id is null then 'QJ001'
      when u.id in (select unnest(p_unkeyed)) then 'QJ004'
      when u.id not in (select unnest(p_done)) then 'QJ003' end
    from (select u.id, min(u.n) as n from unnest(p_ids) with ordinality u (id, n) group by u.id) u
    left join lateral (select j.id, j.state from queue.all_jobs j where j.id = u.id offset 0) j on true
    order by u.n;
end $$;
