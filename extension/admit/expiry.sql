-- Jobs that must not start after a time.
-- Tests: work/maintenance.sql.

-- Cancels jobs with reason expired, unless they run.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._expire(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_id bigint;
  v_place text;
  v_left text[];
  v_keys text[];
  v_ended bigint[];
begin
  foreach v_id in array p_ids loop
    if queue._try_lock_queueing_lock(v_id) then
      select t.place, t.keys into v_place, v_left from queue._dequeue(v_id) t;
      if v_place <> 'log' then
        v_keys := v_keys || v_left;
        v_ended := v_ended || v_id;
        continue;
      end if;
    end if;
    delete from queue.expiry e where e.id = v_id and exists (select from queue.finished f where f.id = v_id);
  end loop;
  if v_ended is not null then
    perform queue._finish_unclaimed(v_ended, 'cancelled', 'expired', null);
    perform queue._advance(p_ended => v_ended, p_keys => v_keys);
  end if;
end $$;

-- Cancels jobs whose expires_at has passed. A running job may continue, but does not run again
-- (_end_attempt).
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._expire_due()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_now timestamptz := clock_timestamp();
  v_id bigint;
begin
  for v_id in
    select e.id from queue.expiry e
    where e.at <= v_now and (select aj.claim from queue.active_job aj where aj.id = e.id) is null
    order by e.at limit 1000
  loop
    begin
      perform queue._expire(array[v_id]);
    exception when others then
      update queue.expiry e set at = clock_timestamp() + interval '1 minute' where e.id = v_id;
      raise warning 'pgdefer: job % can''t expire: % (%)', v_id, sqlerrm, sqlstate;
    end;
  end loop;
end $$;
