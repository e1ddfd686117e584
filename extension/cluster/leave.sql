-- Moving a slot to another shard (move_slot.sql): how the jobs of a part leave the source, piece by piece.
-- Tests: tests/sql/cluster/leave.sql, tests/sql/cluster/move_slot.pieces.sql, tests/py/cluster.
begin;

-- How many jobs of a part move at once, and how many bytes of args and options they may have as text. A
-- larger part leaves in several pieces. As jsonb, which must not exceed 256 MB, it may be four times as much.
create or replace function queue._shard_piece()
returns integer language sql immutable set search_path = pg_catalog, pg_temp as $$ select 100 $$;
create or replace function queue._shard_piece_size()
returns integer language sql immutable set search_path = pg_catalog, pg_temp as $$ select 16777216 $$;

-- The oldest unfinished jobs of a part, at most as many as a piece has, and at least one.
create or replace function queue._shard_oldest(p_slot integer, p_part integer)
returns bigint[] language sql stable set search_path = pg_catalog, pg_temp as $$
  select array(
    select o.id from (
      select x.id, row_number() over in_order as n, sum((
        select coalesce(j.size, 2000) + coalesce(octet_length(j.options::text), 0) + coalesce((
          select sum(octet_length(r.payload::text)) from queue.received_signal r where r.job_id = x.id), 0)
        from queue.job_now j where j.id = x.id)) over in_order as bytes
      from (
        select s.id from queue.shard_job s
        where s.slot = p_slot and s.part = p_part
          and (select f.id from queue.finished f where f.id = s.id) is null
          and (select j.id from queue.job j where j.id = s.id) is not null
        order by s.slot, s.part, s.id limit queue._shard_piece()) x
      window in_order as (order by x.id)) o
    where o.n = 1 or o.bytes <= queue._shard_piece_size()
    order by o.id)
$$;

-- A job as queue.defer_many takes it, with its id, the ids of unfinished jobs that it needs, and the signals
-- that no wait has taken. Its lock and keys have been filled, so their braces are doubled. A job that has had
-- its slots was not discarded, so its on_limit is left out.
create or replace function queue._shard_call(p_id bigint, p_held boolean)
returns jsonb language plpgsql stable security invoker
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  return (
  select jsonb_build_object('id', j.id, 'task', j.task, 'args', j.args, 'queue', j.queue,
    'priority', j.priority, 'lock', coalesce(queue._literal(j.lock), ''),
    'queueing_lock', coalesce(queue._literal(j.queueing_lock), ''),
    'scheduled_at', j.scheduled_at, 'deadline', j.deadline, 'concurrency_key', '', 'needs', (
      -- Under any: no needs, once one of them is satisfied.
      select jsonb_agg(n.need_id order by n.need_id)
      from queue.need n left join queue.finished f on f.id = n.need_id
      where n.job_id = j.id and f.id is null and not (j.options ->> 'needs_mode' = 'any' and exists (
        select from queue.need o join queue.finished s on s.id = o.need_id and s.state = 'succeeded'
        where o.job_id = j.id))),
    'signals', (
      select jsonb_agg(to_jsonb(r) - '{job_id,no}'::text[] order by r.no) from queue.received_signal r
      where r.job_id = j.id),
    'options', coalesce(j.options, '{}') - ('{terms,parent,group,awaited}'::text[] || case
        when j.is_kept or j.claims > 0 or exists (select from queue.active_job aj where aj.id = j.id)
        then 'on_limit' end)
      || jsonb_build_object('held', p_held, 'share', coalesce(queue._literal(j.options ->> 'share'), ''),
        'idempotency_key', coalesce(queue._literal(j.options ->> 'idempotency_key'), ''))
      || case when j.queueing_lock is null then '{}'::jsonb else '{"on_conflict": "ignore"}' end
      || case when j.keys is null then '{}' else jsonb_build_object('concurrency', (
        select jsonb_agg(jsonb_strip_nulls(jsonb_build_object('key', queue._literal(k.key),
          'limit', case when k.key_limit > 999999999 then 999999999 else k.key_limit end))
          || coalesce(nullif(j.options -> 'terms' -> (k.n - 1)::integer, 'null'), '{}') order by k.n)
        from unnest(j.keys, j.limits) with ordinality k (key, key_limit, n))) end)
  from queue.job_now j
  where j.id = p_id);
end $$;

-- Takes the oldest jobs of a part out of the queue, into queue.shard_sent: all, if they are no more than a
-- piece. Jobs of later pieces that need one of them are held, so they do not see that it is gone.
-- Locks: the caller has those of _lock_rows for these jobs; queue.received_signal, not waited for, until the
-- transaction ends: every signal so far has committed, and a later one does not find the job (QJ001).
-- Nothing is lost: the jobs are deleted and noted, with their signals, in one transaction.
-- Raises: 55000 (another job needs one of them; or one runs, because an operator held and released it
-- meanwhile; or signals are too large), 55P03 (a transaction that has sent a signal stays open).
create or replace function queue._shard_cut(p_slot integer, p_part integer)
returns void language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp as $$
declare
  v_ids bigint[] := queue._shard_oldest(p_slot, p_part);
  v_kept text;
  v_done bigint[];
begin
  delete from queue.shard_job s where s.slot = p_slot and s.part = p_part
    and (v_ids = '{}' or s.id < v_ids[1]);  -- these have ended
  lock table queue.received_signal in share row exclusive mode nowait;
  insert into queue.shard_sent (slot, part, id, job)
  select p_slot, p_part, u.id, queue._shard_call(u.id, exists (select from queue.waiting w
    where w.id = u.id and w.reason = 'held'))
  from unnest(v_ids) u (id);
  select format('job %s: another one needs it', min(d.need_id)) into v_kept from queue.need d
  where d.need_id = any (v_ids)
    and (select f.id from queue.finished f where f.id = d.job_id) is null
    and (select s.id from queue.shard_job s
      where s.slot = p_slot and s.part = p_part and s.id = d.job_id) is null
  having count(*) > 0;
  v_kept := coalesce(v_kept, (
    select format('job %s: it runs', min(aj.id)) from queue.active_job aj
    where aj.id = any (v_ids) and aj.claim is not null having count(*) > 0));
  v_kept := coalesce(v_kept, (
    select format('job %s: it and others have too large signals', min(r.job_id))
    from queue.received_signal r where r.job_id = any (v_ids)
    having sum(octet_length(r.payload::text)) > queue._shard_piece_size()));
  if v_kept is null then
    v_done := queue._delete(v_ids, true);
    select format('job %s: another transaction has it', min(u.id)) into v_kept from unnest(v_ids) u (id)
    where u.id not in (select unnest(v_done)) having count(*) > 0;
  end if;
  if v_kept is not null then
    raise exception using errcode = '55000', message = 'a job of this part can''t leave',
      detail = v_kept, hint = 'The part stays here. When the reason in DETAIL is gone, move the slot again.';
  end if;
  update queue.shard_part p set state = 'leaving', receipt = gen_random_uuid(), piece = p.piece + 1,
    is_last = queue._shard_oldest(p_slot, p_part) = '{}'
  where p.slot = p_slot and p.part = p_part;
  perform queue._announce();
  if v_ids <> '{}' then
    perform queue._shard_audit('shard_part_leave', jsonb_build_object('slot', p_slot, 'part', p_part),
      v_ids);
  end if;
end $$;

-- Source. Lets the first piece of a part leave, if the whole part may: its oldest jobs, usually all. The
-- other jobs are held, each by itself; they follow piece by piece, by shard_part_gone, while the target runs
-- the first ones. Once this is committed, the source refuses jobs for the part. Returns whether the piece
-- left.
-- Locks: the part's row, for update, waited for (lock_timeout): every defer for it has committed; then as
-- queue.delete. Nothing is lost: as _shard_cut.
-- Raises: 55P03 (a transaction that defers for it, or signals, stays open), 55000 (another job needs one),
-- 22023, QJ008.
create or replace function queue.shard_part_leave(slot integer, part integer, started boolean default false)
returns boolean language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_jobs record;
  v_ids bigint[];
begin
  perform queue._check_isolation(), queue._shard_leaving(slot, part);
  perform from queue.shard_part p where p.slot = shard_part_leave.slot and p.part = shard_part_leave.part
    and p.state = 'here' for update;
  if not found then
    return true;
  end if;
  v_ids := array(select s.id from queue.shard_job s left join queue.finished f on f.id = s.id
    where s.slot = shard_part_leave.slot and s.part = shard_part_leave.part and not s.is_ahead
      and f.id is null);
  if exists (select from queue.active_job aj where aj.id = any (v_ids) and aj.claim is not null) then
    return false;
  end if;
  perform queue._lock_rows(v_ids || queue._shard_oldest(slot, part), null);
  -- A signal that came now would make the piece smaller.
  lock table queue.received_signal in share row exclusive mode nowait;
  select coalesce(array_agg(j.id order by j.id), '{}') as ids, bool_or(j.why is not null) as must_wait
  into v_jobs from queue._shard_jobs(slot, part, started) j;
  if v_jobs.must_wait then
    return false;
  end if;
  v_ids := array(select u.id from unnest(v_jobs.ids) u (id)
    where u.id not in (select unnest(queue._shard_oldest(slot, part))));
  if v_ids <> '{}' then
    perform queue._shard_park(slot, part, v_ids);
  end if;
  perform queue._shard_cut(slot, part);
  return true;
end $$;

-- Source. Lets all parts leave at once that have no jobs and for which nobody is deferring; returns them.
-- Locks: the parts' rows, for update, by skip locked; their jobs are read afterwards, by a new snapshot. A
-- defer that comes meanwhile is refused, and tries again. Raises: 22023, QJ008.
create or replace function queue.shard_leave_empty(slot integer)
returns setof integer language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_parts integer[];
begin
  perform queue._check_isolation(), queue._shard_leaving(slot);
  v_parts := array(select p.part from queue.shard_part p
    where p.slot = shard_leave_empty.slot and p.state = 'here' for update skip locked);
  return query
    update queue.shard_part p set state = 'leaving', receipt = gen_random_uuid(), piece = 1, is_last = true
    where p.slot = shard_leave_empty.slot and p.part = any (v_parts)
      and not exists (select from queue.shard_job s where s.slot = p.slot and s.part = p.part)
    returning p.part;
end $$;

-- Removes all that is noted of a slot's move. Locks: its rows, that of the move first, for update, waited
-- for. Then whoever was bringing its parts, or deferring for them, has ended.
create or replace function queue._shard_forget(p_slot integer)
returns void language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp as $$
begin
  delete from queue.shard_move r where r.slot = p_slot;
  delete from queue.shard_part p where p.slot = p_slot;
  delete from queue.shard_job s where s.slot = p_slot;
  delete from queue.shard_sent s where s.slot = p_slot;
end $$;

-- Ends a move that another copy of the map knows to be over. It is still noted here because its last step is
-- missing, because the source has given it up, or because this shard was restored to a time before the end.
-- What has left this shard is in the target by then; what the move still holds is given back, and ends here.
-- Locks: the rows of the move and its parts, for update, waited for: whoever brings a part, or defers for
-- one, has ended; then as shard_unhold. No wake-up is lost: as shard_unhold. Raises: QJ008.
create or replace function queue._shard_end(p_slot integer)
returns void language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp as $$
declare
  v_version bigint;
  v_is_listed boolean;
begin
  select r.version, r.is_listed into v_version, v_is_listed from queue.shard_move r
  where r.slot = p_slot for update;
  perform from queue.shard_part p where p.slot = p_slot order by p.part for update;
  if v_is_listed then
    update queue.shard_part p set state = 'here' where p.slot = p_slot;  -- also partly left ones
    perform queue.shard_unhold(p_slot);
  end if;
  perform queue._shard_forget(p_slot);
  perform queue._shard_audit('shard_learn', jsonb_build_object('slot', p_slot, 'ended', v_version));
end $$;

-- Source. Gives up a move of which no part has left. The slot stays, with the move's version, from which the
-- target learns that nothing comes.
-- Locks: the rows of the move and its parts, for update, waited for (lock_timeout): no part leaves meanwhile,
-- and every defer for them has ended; then as shard_unhold. No wake-up is lost: as shard_unhold. Raises:
-- 22023 (a part has left), 55P03, QJ008.
create or replace function queue.shard_stay(slot integer)
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform queue._check_isolation(), queue._shard_leaving(slot, p_is_listed => false);
  perform from queue.shard_move r where r.slot = shard_stay.slot for update;
  perform from queue.shard_part p where p.slot = shard_stay.slot order by p.part for update;
  if exists (select from queue.shard_part p where p.slot = shard_stay.slot and p.state <> 'here') then
    perform queue._shard_invalid('parts of this slot have left', 'Move the slot to its end, and then back.',
      format('slot: %s', slot));
  elsif (select r.is_listed from queue.shard_move r where r.slot = shard_stay.slot) then
    perform queue.shard_unhold(slot);
  end if;
  update queue.shard_slot m set version = r.version, is_plain = true
  from queue.shard_move r where r.slot = m.slot and m.slot = shard_stay.slot;
  perform queue._shard_forget(slot), queue._shard_audit('shard_stay', jsonb_build_object('slot', slot));
end $$;

revoke all on function queue._shard_piece, queue._shard_piece_size, queue._shard_oldest, queue._shard_call,
  queue._shard_cut, queue.shard_part_leave, queue.shard_leave_empty,
  queue._shard_forget, queue._shard_end, queue.shard_stay from public;
commit;
