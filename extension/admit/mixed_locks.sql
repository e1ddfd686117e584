-- Ordered jobs that hold a lock's turn without its slot, in a lock that has become mixed.
-- Tests: admit/locks.sql, admit/locks.mixed.spec.

-- The ordered job that had the turn when its lock became mixed may be ready, running or waiting for another
-- slot without having used the semaphore. Before a mutex job can become ready, that job must go through the
-- semaphore, or be counted.
-- asked: ordered jobs that were taken out for that. keys: semaphores that have room now. postponed: mutex
-- jobs that must come back later, because another transaction holds the row of the ordered job.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._ask_for_slots(p_ids bigint[], p_flags smallint[], out asked bigint[],
  out keys text[], out postponed bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_turn record;
  v_job record;
begin
  for v_turn in
    select k.key, m.id, array_agg(k.id) as mutex_ids
    from queue._keys_of(p_ids, p_flags) k
    cross join lateral (
      select m.id
      from queue.lock_member m
      where m.lock = substr(k.key, 2) and m.has_turn offset 0) m
    where p_flags[k.n] & {{lock}} = {{mutex}} and left(k.key, 1) = 'm'
      and ((select aj.flags & {{mutex}} from queue.active_job aj where aj.id = m.id) = 0
        or (select w.flags & {{mutex}} from queue.waiting w where w.id = m.id) = 0)
    group by k.key, m.id
  loop
    delete from queue.waiting w where w.id = v_turn.id returning w.key, w.lane, w.at, w.weight, w.reserved
    into v_job;
    if found then
      perform queue._count_unwaiting(v_job.key, v_job.lane);
      perform queue._free_reserved(array[v_turn.id], v_job.reserved);
      keys := keys || case when num_nonnulls(v_job.at, v_job.weight) > 0 then array[v_job.key] end
        || v_job.reserved;
      asked := asked || v_turn.id;
      continue;
    end if;
    select aj.claim, aj.lane, aj.flags, aj.deadline into v_job from queue.active_job aj
    where aj.id = v_turn.id for update skip locked;
    if not found then
      if exists (select from queue.active_job aj where aj.id = v_turn.id) then
        postponed := postponed || v_turn.mutex_ids;
      end if;
    elsif v_job.claim is not null then
      perform queue._set_slots(array[v_turn.key], array[1], array[v_turn.id]);
      perform queue._add_slots(array[v_turn.key], null, array[1], null, null, null);
      update queue.active_job aj set flags = aj.flags | {{mutex}} where aj.id = v_turn.id;
    else
      delete from queue.active_job aj where aj.id = v_turn.id;
      perform queue._keep_tag(v_turn.id, v_job.deadline);
      if v_job.flags & {{keys}} <> 0 then
        keys := keys || queue._count_unready(array[v_turn.id], array[v_job.lane], array[v_job.flags]);
      end if;
      asked := asked || v_turn.id;
    end if;
  end loop;
  insert into queue.waiting (id, reason, at, key)
  select k.id, 'slot', clock_timestamp() + interval '20 ms', k.key
  from queue._keys_of(p_ids, p_flags) k where k.id = any (postponed) and left(k.key, 1) = 'm';
end $$;
