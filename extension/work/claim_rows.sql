-- The rows and keys of jobs that are to be claimed under limits (work/claim_limited.sql).
-- Tests: admit/rates.sql, admit/slots.sql.

-- Locks the rows of ready jobs, and returns what it could lock, in the order of p_ids. are_limited: jobs
-- whose queue has a limit, or whose worker has one (p_is_worker_limited). all_flags: the flags that any of
-- them has.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked.
create or replace function queue._lock_ready_jobs(p_ids bigint[], p_is_worker_limited boolean,
  out ids bigint[], out flags smallint[], out lanes integer[], out deadlines timestamptz[], out queues text[],
  out are_limited boolean[], out all_flags smallint)
language plpgsql volatile parallel unsafe security invoker as $$
begin
  select array_agg(aj.id order by u.n), array_agg(aj.flags order by u.n), array_agg(aj.lane order by u.n),
    array_agg(aj.deadline order by u.n), array_agg(l.queue order by u.n),
    array_agg(l.kind > {{lane_plain}} and l.is_limited or p_is_worker_limited order by u.n),
    bit_or(aj.flags)
  into ids, flags, lanes, deadlines, queues, are_limited, all_flags
  from unnest(p_ids) with ordinality u (id, n)
  cross join lateral (
    select aj.id, aj.flags, aj.lane, aj.deadline from queue.active_job aj
    where aj.id = u.id and aj.claim is null for update of aj skip locked) aj
  cross join lateral (
    select l.queue, l.kind,
      exists (select from queue.queue_config c where c.queue = l.queue and {{has_limit}}) as is_limited
    from queue.lane l where l.lane = aj.lane offset 0) l;
end $$;

-- The keys of jobs that are to be claimed. The job at place ns[r] takes weights[r] slots of the key with the
-- number nos[r], in the order of the jobs. By number: each key, its limits and what of them is free.
create or replace function queue._keys_to_claim(p_ids bigint[], p_flags smallint[], p_now timestamptz,
  out ns integer[], out nos integer[], out weights integer[], out keys text[], out slots integer[],
  out free integer[], out rates integer[], out rate_room integer[])
language plpgsql volatile parallel safe security invoker as $$
begin
  select array_agg(x.n order by x.n), array_agg(x.no order by x.n), array_agg(x.weight order by x.n),
    array_agg(x.key order by x.no) filter (where x.is_first),
    array_agg(x.slots order by x.no) filter (where x.is_first),
    array_agg(x.free order by x.no) filter (where x.is_first),
    array_agg(x.rate_limit order by x.no) filter (where x.is_first),
    array_agg(x.rate_room order by x.no) filter (where x.is_first)
  into ns, nos, weights, keys, slots, free, rates, rate_room
  from (
    select x.n, x.key, x.no, x.is_first, x.weight, s.slots, s.rate_limit, {{free_slots}} as free,
      queue._rate_room(x.key, s.rate_limit, s.rate_per, s.rate_limit, p_now) as rate_room
    from (
      select x.n, x.key, x.weight, dense_rank() over (order by x.key)::integer as no,
        row_number() over (partition by x.key) = 1 as is_first
      from queue._keys_of(p_ids, p_flags) x) x
    left join lateral (
      select s.slots, s.used, s.rate_limit, s.rate_per from queue.semaphore s where s.key = x.key
      order by s.tick desc limit 1) s on x.is_first) x;
end $$;

-- Ready jobs go back to wait at the front of the lines of full keys. p_have_several: jobs with several keys.
-- Locks: the caller holds the admission lock, and the jobs' rows of queue.active_job. Why no wake-up is lost:
-- the caller counts the jobs as waiting (_add_slots).
create or replace function queue._leave_for_lines(p_ids bigint[], p_deadlines timestamptz[],
  p_flags smallint[], p_keys text[], p_weights integer[], p_have_several boolean[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform queue._keep_tag(u.id, u.deadline) from unnest(p_ids, p_deadlines) u (id, deadline);
  with gone as (
    delete from queue.active_job aj where aj.id = any (p_ids)
    returning aj.id, aj.lane, aj.deadline, aj.flags, aj.attempt)
  insert into queue.waiting (id, reason, key, lane, deadline, flags, attempt, moves, weight, task)
  select g.id, 'slot', p_keys[u.i], g.lane, queue._front_tag(p_keys[u.i], g.lane, g.deadline),
    g.flags, g.attempt, case when p_have_several[u.i] then 0 end, p_weights[u.i],
    (select j.task from queue.job j where j.id = g.id)
  from gone g cross join lateral (select array_position(p_ids, g.id) as i) u;
  perform queue._keep_turns(array_agg(u.id)) from unnest(p_ids, p_flags) u (id, flags)
    where u.flags & {{ordered}} <> 0 having count(*) > 0;
end $$;
