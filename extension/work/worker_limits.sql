-- How many jobs of a queue one worker runs at once: the option max_running of fetch.
--
-- queue.worker_claim has a row for each claim that such a fetch makes in a queue with a limit. A row counts
-- while its claim is current. The worker's next fetch removes the others, so the end of a claim costs nothing
-- more, and a fetch reads at most as many rows as its worker may have claims there.

-- Forgets claims of a worker that have ended.
-- Locks: the caller holds the admission lock.
create or replace function queue._forget_ended_claims(p_worker bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.worker_claim c
  where c.worker_id = p_worker and not exists (
    select from queue.active_job aj where aj.id = c.id and aj.claim = c.claim);
end $$;

-- Raises: 22023 unless p_limits is an object of at most 100 names or patterns of queues, with numbers.
create or replace function queue._check_worker_limits(p_limits jsonb)
returns void language plpgsql immutable parallel safe security invoker as $$
declare
  v_limit record;
begin
  if jsonb_typeof(p_limits) <> 'object' then
    perform queue._invalid('max_running must be an object', 'Pass {"queue or prefix*": number}.');
  elsif (select count(*) from jsonb_object_keys(p_limits)) > 100 then
    perform queue._invalid('max_running has more than 100 queues', 'Use prefix* patterns.');
  end if;
  for v_limit in select l.key, l.value from jsonb_each(p_limits) l loop
    perform queue._check_name('queue', v_limit.key);
    if jsonb_typeof(v_limit.value) <> 'number' or v_limit.value #>> '{}' !~ '^[1-9][0-9]*$'
      or v_limit.value > '2147483647' then
      perform queue._invalid('max_running must be whole numbers of at least 1',
        'To take no job of a queue, leave it out of queues.',
        format('%s: %s', v_limit.key, left(v_limit.value::text, 200)));
    end if;
  end loop;
end $$;

-- How many more jobs of a queue, at most p_n, a worker may start: by the limit of the queue's name, else of
-- the longest prefix*; NULL for no limit.
create or replace function queue._worker_room(p_worker bigint, p_limits jsonb, p_queue text, p_n integer)
returns integer language plpgsql stable parallel safe security invoker as $$
declare
  v_limit integer := (
    select l.value::integer from jsonb_each(p_limits) l
    where queue._matches(p_queue, l.key) order by l.key = p_queue desc, length(l.key) desc limit 1);
begin
  return greatest(least(v_limit - (
    select count(*) from queue.worker_claim c where c.worker_id = p_worker and c.queue = p_queue), p_n), 0);
end $$;

-- Counts claims of jobs of a queue in their worker's limit.
-- Locks: the caller holds the admission lock.
create or replace function queue._count_worker_claims(
  p_worker bigint, p_limits jsonb, p_queue text, p_ids bigint[], p_claim bigint)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  insert into queue.worker_claim (worker_id, queue, id, claim)
  select p_worker, p_queue, u.id, p_claim from unnest(p_ids) u (id)
  where queue._worker_room(p_worker, p_limits, p_queue, 1) is not null;
end $$;

-- Forgets the claims of workers that are gone.
-- Locks: the caller holds the admission lock.
create or replace function queue._forget_claims_of_gone_workers()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.worker_claim c
  where not exists (select from queue.worker w where w.id = c.worker_id);
end $$;
