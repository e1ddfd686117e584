-- Idempotency keys: the first call of defer with a key of a task defers a job. Until unique_for has passed,
-- further calls return the id of that job, even if it has ended or was deleted.

-- Takes the key for a new job that goes to p_queue.
--   id: the new job's; if the key is in use, minus the id of the job that was deferred first
--   key: the key, with its {fields} filled in
--   options: the caller's, with that key and without unique_for
-- Without a key, id and key are NULL.
-- Locks: the key's row. Transactions that take one key wait for each other, as with any unique key; a call
-- whose key has just expired may wait for the maintenance that deletes its row. While the key is in use, a
-- call only reads the row. A call of defer_many takes its keys in one order (_reserve_idempotency_keys).
-- Why no wake-up is lost: a call that waited returns a job whose commit has woken a worker.
-- Why the loop ends: it repeats only if another session has taken or deleted the key meanwhile. In REPEATABLE
-- READ the insert then raises 40001.
-- Raises: 22023.
create or replace function queue._take_idempotency_key(
  p_task text, p_queue text, p_args jsonb, p_options jsonb, p_given jsonb, out id bigint, out key text,
  out options jsonb)
language plpgsql volatile parallel unsafe security invoker set enable_seqscan = off as $$
declare
  v_new_id bigint;
  v_unique_for interval;
begin
  options := p_options - '{idempotency_key,unique_for}'::text[];
  if coalesce(p_options ->> 'idempotency_key', '') = '' then
    if p_given ? 'unique_for' and not p_options ? 'idempotency_key' then
      perform queue._invalid('unique_for needs an idempotency_key',
        'Pass an idempotency_key that says which calls count as the same, such as "invoice:{id}".');
    end if;
    return;
  end if;
  key := queue._fill('idempotency_key', p_options ->> 'idempotency_key', p_args);
  options := options || jsonb_build_object('idempotency_key', key);
  v_unique_for := coalesce(queue._interval('unique_for', p_options -> 'unique_for'), interval '1 day');
  loop
    select -k.job_id into id from queue.idempotency_key k
    where k.task = p_task and k.key = _take_idempotency_key.key and k.expires_at > clock_timestamp();
    exit when found;
    v_new_id := coalesce(v_new_id, nextval('queue.job_id_seq'));
    insert into queue.idempotency_key as k (task, key, job_id, expires_at, queue)
    values (p_task, _take_idempotency_key.key, v_new_id, clock_timestamp() + v_unique_for, p_queue)
    on conflict on constraint idempotency_key_pkey do update
      set (job_id, expires_at, queue) = (excluded.job_id, excluded.expires_at, excluded.queue)
      where k.expires_at <= clock_timestamp()
    returning k.job_id into id;
    exit when found;
  end loop;
end $$;

-- Makes a key that this transaction has just taken stand for another job: the one that has the queueing lock.
-- Locks: the key's row, which the caller has locked.
create or replace function queue._pass_idempotency_key(p_task text, p_key text, p_id bigint)
returns void language plpgsql volatile parallel unsafe security invoker set enable_seqscan = off as $$
begin
  update queue.idempotency_key k set job_id = p_id where k.task = p_task and k.key = p_key;
end $$;

-- Locks the free keys of a list of jobs, all in one order, so that two lists with the same keys don't
-- deadlock. For a key without a row it inserts one that has already expired, so the key stays free until its
-- job is deferred. It ignores jobs that defer refuses.
-- Locks: rows of queue.idempotency_key, in the order of task and key.
-- Raises: 22023.
create or replace function queue._reserve_idempotency_keys(p_jobs jsonb)
returns void language plpgsql volatile parallel unsafe security invoker set enable_seqscan = off as $$
declare
  v_tasks text[];
  v_keys text[];
begin
  select array_agg(x.task order by x.task, x.key), array_agg(x.key order by x.task, x.key)
  into v_tasks, v_keys
  from (
    select distinct (e ->> 'task') collate "C" as task,
      queue._fill('idempotency_key', k.template, coalesce(nullif(e -> 'args', 'null'), '{}'))
        collate "C" as key
    from jsonb_array_elements(p_jobs) e
    left join lateral (
      select t.options from queue.task t where t.name = e ->> 'task' offset 0) t on true
    cross join lateral (
      select coalesce(e -> 'options' ->> 'idempotency_key', t.options ->> 'idempotency_key') as template) k
    where jsonb_typeof(e) = 'object' and octet_length(e ->> 'task') between 1 and 1000
      and coalesce(jsonb_typeof(e -> 'args'), 'null') in ('object', 'null')
      and coalesce(jsonb_typeof(e -> 'options' -> 'idempotency_key'), 'null') in ('string', 'null')
      and k.template <> '') x;
  for i in 1 .. case when cardinality(v_keys) > 1 then cardinality(v_keys) else 0 end loop
    if not exists (select from queue.idempotency_key k
      where k.task = v_tasks[i] and k.key = v_keys[i] and k.expires_at > clock_timestamp()) then
      insert into queue.idempotency_key as k (task, key, job_id, expires_at, queue)
      values (v_tasks[i], v_keys[i], 0, '-infinity', '')
      on conflict on constraint idempotency_key_pkey do update
        set expires_at = k.expires_at where k.expires_at <= clock_timestamp();
    end if;
  end loop;
end $$;

-- The key of a call of defer that has just returned a job, and the queue of the key's first call; NULL
-- without a key.
create or replace function queue._used_idempotency_key(p_task text, p_args jsonb, p_options jsonb,
  out key text, out queue text)
language plpgsql stable parallel safe security invoker set enable_seqscan = off as $$
begin
  key := coalesce(p_options ->> 'idempotency_key',
    (select t.options ->> 'idempotency_key' from queue.task t where t.name = p_task));
  if key <> '' then
    key := queue._fill('idempotency_key', key, p_args);
    select k.queue into queue from queue.idempotency_key k
    where k.task = p_task and k.key = _used_idempotency_key.key;
  end if;
end $$;

-- Deletes rows whose keys have expired.
-- Locks: rows of queue.idempotency_key by skip locked.
create or replace function queue._prune_idempotency_keys(p_max integer)
returns void language plpgsql volatile parallel unsafe security invoker set enable_seqscan = off as $$
declare
  v_now timestamptz := clock_timestamp();
begin
  delete from queue.idempotency_key k
  where k.ctid = any (array(
    select e.ctid from queue.idempotency_key e where e.expires_at <= v_now
    order by e.expires_at limit p_max for update skip locked));
end $$;
