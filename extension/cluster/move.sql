-- Moving a slot to another shard, part by part, while jobs go on: the steps of the source, which gives it
-- away. queue.shard_part has the state of each part:
--
--   source  here              leaving              gone
--   target             (no row)          arrived
--
-- Each step is one transaction in one database, and its repetition changes nothing, so a mover that dies at
-- any point is followed by another one. A step that is called too early changes nothing, and raises 22023. At
-- most one side accepts jobs of a part: the source until leaving, the target from arrived on.
-- pgdefer.contrib.cluster calls this as the owner of both queues. A step that changes something writes a row
-- into queue.audit.
-- Tests: tests/sql/cluster, tests/py/cluster.
begin;

-- Raises: 22023 unless there is such a slot and part.
create or replace function queue._shard_check(p_slot integer, p_part integer default 0)
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if p_slot between 0 and 1023 and p_part between 0 and 4095 is not true then
    perform queue._shard_invalid('no such slot or part', 'Slots are 0 to 1023, parts 0 to 4095.',
      format('slot: %s, part: %s', p_slot, p_part));
  end if;
end $$;

-- The state of a part in the source; NULL without one. Raises: 22023 unless the slot leaves this shard, and
-- its jobs are listed if they must be.
create or replace function queue._shard_leaving(p_slot integer, p_part integer default null,
  p_is_listed boolean default true)
returns text language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  v_is_listed boolean;
begin
  perform queue._shard_check(p_slot, coalesce(p_part, 0));
  select r.is_listed into v_is_listed from queue.shard_move r join queue.shard s
    on s.is_self and s.name = r.from_shard where r.slot = p_slot;
  if not found then
    perform queue._shard_invalid('this slot does not leave', 'Call queue.shard_leave first, in its shard.',
      format('slot: %s', p_slot));
  elsif p_is_listed and not v_is_listed then
    perform queue._shard_invalid('the jobs of this slot are not listed', 'Call queue.shard_list first.',
      format('slot: %s', p_slot));
  end if;
  return (select p.state from queue.shard_part p where p.slot = p_slot and p.part = p_part);
end $$;

-- Source. From here on each defer for the slot locks the row of its part, and notes its job.
-- Locks: the slot's row, for update, waited for (lock_timeout): every defer for it that knows nothing of the
-- move has ended; then rows of the map. Raises: 22023, 55P03 (a transaction stays open), QJ008.
create or replace function queue.shard_leave(slot integer, target text)
returns bigint language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_self text := (select s.name from queue.shard s where s.is_self);
  v_version bigint;
begin
  perform queue._check_isolation(), queue._shard_check(slot);
  perform from queue.shard_slot m where m.slot = shard_leave.slot for update;
  select r.version into v_version from queue.shard_move r
  where r.slot = shard_leave.slot and r.to_shard = target and r.from_shard = v_self;
  if found then
    return v_version;
  elsif exists (select from queue.shard_move r where r.slot = shard_leave.slot)
    or not exists (select from queue.shard s where s.name = target and not s.is_self)
    or not exists (select from queue.shard_slot m where m.slot = shard_leave.slot and m.shard = v_self) then
    perform queue._shard_invalid('this slot can''t move there',
      'Its shard moves it, to another one of the map, and one move at a time.',
      format('slot: %s, here: %s, to: %s', slot, v_self, left(target, 1000)));
  end if;
  insert into queue.shard_move (slot, from_shard, to_shard, version)
  select m.slot, v_self, target, m.version + 1 from queue.shard_slot m where m.slot = shard_leave.slot
  returning version into v_version;
  insert into queue.shard_part (slot, part, state)
  select shard_leave.slot, n, 'here' from generate_series(0, 4095) n;
  update queue.shard_slot m set is_plain = false, closed_until = null where m.slot = shard_leave.slot;
  perform queue._shard_audit('shard_leave', jsonb_build_object('slot', slot, 'target', target));
  return v_version;
end $$;

-- Source. Makes the session the slot's mover; false while another one lives. A session that got the number of
-- one that has ended passes for it, until it ends too. Locks: the row of the move. Raises: 22023.
create or replace function queue.shard_mover(slot integer)
returns boolean language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform queue._shard_leaving(slot, p_is_listed => false);
  update queue.shard_move r set mover = pg_backend_pid()
  where r.slot = shard_mover.slot and (r.mover is null or r.mover = pg_backend_pid() or not exists (
    select from pg_stat_activity a where a.pid = r.mover and a.datname = current_database()));
  return found;
end $$;

-- Source. Notes the jobs that were there before: one pass over the unfinished jobs. Locks: none. Raises:
-- 22023.
create or replace function queue.shard_list(slot integer)
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform queue._shard_leaving(slot, p_is_listed => false);
  insert into queue.shard_job (slot, part, id)
  select shard_list.slot, queue._shard_part_of(j.options #>> '{headers,shard_key}'), j.id
  from queue.job j left join queue.finished f on f.id = j.id
  where f.id is null and j.options #> '{headers}' ? 'shard_key'
    and queue.shard_of(j.options #>> '{headers,shard_key}') = shard_list.slot
    and not (select r.is_listed from queue.shard_move r where r.slot = shard_list.slot)
  on conflict do nothing;
  update queue.shard_move r set is_listed = true where r.slot = shard_list.slot;
end $$;

-- Source. Admits up to 1,000 committed jobs, so that no part has to wait until they are. Returns whether
-- there are more. Locks: the admission lock, waited for. A wake-up is not lost: admission announces what is
-- ready.
create or replace function queue.shard_catch_up()
returns boolean language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform queue._check_isolation(), queue._lock_admission(true);
  return (select a.has_more from queue._admit(1000) a);
end $$;

-- Source. Lets nobody enter a slot, or a part of it, for a second, so that those who are in it end before
-- others come. Locks: the row, for no key update: that waits for no defer. Raises: 22023.
create or replace function queue.shard_close(slot integer, part integer default null)
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  if part is null then
    perform queue._shard_check(slot);
    update queue.shard_slot m set closed_until = clock_timestamp() + interval '1 s'
    where m.slot = shard_close.slot and m.shard in (select s.name from queue.shard s where s.is_self);
    if not found then
      perform queue._shard_invalid('this slot is another shard''s', 'Call it in the shard that has the slot.',
        format('slot: %s', slot));
    end if;
  else
    perform queue._shard_leaving(slot, part);
    update queue.shard_part p set closed_until = clock_timestamp() + interval '1 s'
    where p.slot = shard_close.slot and p.part = shard_close.part and p.state = 'here';
  end if;
end $$;

-- Takes the locks of a change of these jobs, however many, in their order (operate/reach.sql).
-- Locks, waited for: rows of queue.active_job and queue.queueing_lock; the admission lock.
create or replace function queue._shard_lock(p_ids bigint[])
returns void language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp as $$
begin
  perform from queue.active_job aj where aj.id = any (p_ids) order by aj.id for no key update;
  perform from queue.queueing_lock k
  where k.key = any (array(select j.queueing_lock from queue.job j
    where j.id = any (p_ids) and j.queueing_lock is not null)) and k.job_id = any (p_ids)
  order by k.key for update;
  perform queue._admit_all();
end $$;

-- What is left of a part: its unfinished jobs. why: what it must wait for. is_next: it could start, unless it
-- is held: not the later ones of an ordered lock. is_moving: the move holds it. PL/pgSQL, as it keeps its
-- plan, which looks each job up by its id: the time is that of the part's jobs.
create or replace function queue._shard_jobs(p_slot integer, p_part integer, p_started boolean)
returns table (id bigint, is_held boolean, is_moving boolean, why text, is_next boolean)
language plpgsql stable security invoker rows 100
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  return query
  select u.id, u.reason = 'held', u.reason = 'moving', u.why, u.why is null and (u.lock is null or u.is_mutex
    or u.id = min(u.id) filter (where u.why is null) over (partition by u.lock))
  from (
    select j.id, coalesce(w.reason, '') as reason, j.lock,
      coalesce(j.options ->> 'lock_mode' = 'mutex', false) as is_mutex,
      case
        when aj.claim is not null then 'it runs'
        when w.reason = 'upstream_failed' then 'a job that it needs has failed'
        when w.reason = 'signal' or exists (select from queue.step x
          where x.job_id = j.id and x.finished_at is not null) then 'it has steps'
        when j.claims > 0 and p_started is not true then 'it has been started before'
        when exists (select from queue.need d left join queue.finished g on g.id = d.need_id
          where d.job_id = j.id and d.need_id > j.id and g.id is null) then 'it needs a younger job'
        when concat_ws(' ', j.lock, j.queueing_lock, array_to_string(j.keys, ' '), j.options ->> 'share',
          j.options ->> 'idempotency_key') ~ '\{.*\}' then 'its keys look like templates'
      end as why
    from queue.shard_job s
    join queue.job_now j on j.id = s.id
    left join queue.finished f on f.id = s.id
    left join queue.active_job aj on aj.id = s.id
    left join queue.waiting w on w.id = s.id
    where s.slot = p_slot and s.part = p_part and f.id is null) u;
end $$;

-- Source. Holds up to 1,000 of those jobs of a part that could start next, so that running ones can end, and
-- no others begin. They wait with the reason moving: jobs that need them go on waiting, and an operator may
-- hold them besides. Returns how many are left to hold, and a job that the part must wait for.
-- Locks: as queue.hold, for all of them. A wake-up is not lost: unhold, or the target, makes the jobs ready.
-- Raises: 22023, QJ008.
create or replace function queue.shard_hold(slot integer, part integer, started boolean default false,
  out to_hold bigint, out waits_for bigint, out why text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_ids bigint[];
  v_taken record;
  v_held bigint[] := '{}'::bigint[];
  v_keys text[];
begin
  perform queue._check_isolation();
  if queue._shard_leaving(slot, part) is distinct from 'here' then
    perform queue._shard_invalid('this part has left', 'Carry it to the target: queue.shard_part_jobs.',
      format('slot: %s, part: %s', slot, part));
  end if;
  v_ids := array(select j.id from queue._shard_jobs(slot, part, started) j
    where j.is_next and not j.is_moving and not j.is_held order by j.id limit 1000);
  if v_ids <> '{}' then
    perform queue._shard_lock(v_ids);
    for i in 1 .. cardinality(v_ids) loop
      -- not one that an operator has held meanwhile
      continue when exists (select from queue.waiting w where w.id = v_ids[i] and w.reason = 'held');
      v_taken := queue._dequeue(v_ids[i]);
      if coalesce(v_taken.place, 'log') <> 'log' then  -- else it has started, or ended
        v_held := v_held || v_ids[i];
        v_keys := v_keys || v_taken.keys;
      end if;
    end loop;
    insert into queue.waiting (id, reason) select u.id, 'moving' from unnest(v_held) u (id);
    perform queue._advance(p_keys => v_keys), queue._announce();
    perform queue._shard_audit('shard_hold', jsonb_build_object('slot', slot, 'part', part), v_held);
  end if;
  select count(*) filter (where j.is_next and not j.is_moving and not j.is_held),
    min(j.id) filter (where j.why is not null),
    (array_agg(j.why order by j.id) filter (where j.why is not null))[1]
  into to_hold, waits_for, why
  from queue._shard_jobs(slot, part, started) j;
end $$;

-- Source. Gives back the jobs that the move holds, of one part or of all, and lets defers in again. What an
-- operator holds stays held.
-- Locks: as queue.unhold, for all of them; rows of the parts, for no key update. Raises: 22023, QJ008.
create or replace function queue.shard_unhold(slot integer, part integer default null)
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_ids bigint[];
begin
  perform queue._check_isolation(), queue._shard_leaving(slot, part);
  update queue.shard_part p set closed_until = null where p.slot = shard_unhold.slot
    and p.part = coalesce(shard_unhold.part, p.part) and p.closed_until is not null;
  v_ids := array(select s.id from queue.shard_job s
    join queue.waiting w on w.id = s.id and w.reason = 'moving'
    where s.slot = shard_unhold.slot and s.part = coalesce(shard_unhold.part, s.part));
  if v_ids = '{}' then
    return;
  end if;
  perform queue._shard_lock(v_ids);
  with freed as (
    delete from queue.waiting w where w.id = any (v_ids) and w.reason = 'moving' returning w.id)
  select coalesce(array_agg(f.id), '{}') into v_ids from freed f;
  perform queue._advance(p_arrived => v_ids), queue._announce();
  perform queue._shard_audit('shard_unhold', jsonb_build_object('slot', slot, 'part', part), v_ids);
end $$;

-- Source. Takes the jobs of a part out of the queue, into queue.shard_sent, if all may leave. From its commit
-- on the source refuses the part. Returns whether it left.
-- Locks: the part's row, for update, waited for (lock_timeout): every defer for it has committed; then as
-- queue.delete. Nothing is lost: the jobs are deleted and noted in one transaction.
-- Raises: 55P03 (a transaction that defers for it stays open), 55000 (another job needs one), 22023, QJ008.
create or replace function queue.shard_part_leave(slot integer, part integer, started boolean default false)
returns boolean language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_jobs record;
  v_ids bigint[];
  v_done bigint[];
begin
  perform queue._check_isolation(), queue._shard_leaving(slot, part);
  perform from queue.shard_part p where p.slot = shard_part_leave.slot and p.part = shard_part_leave.part
    and p.state = 'here' for update;
  if not found then
    return true;
  end if;
  v_ids := array(select s.id from queue.shard_job s left join queue.finished f on f.id = s.id
    where s.slot = shard_part_leave.slot and s.part = shard_part_leave.part and f.id is null);
  if exists (select from queue.active_job aj where aj.id = any (v_ids) and aj.claim is not null) then
    return false;
  elsif v_ids <> '{}' then
    perform queue._shard_lock(v_ids);
    select coalesce(array_agg(j.id order by j.id), '{}') as ids,
      array_agg(j.is_held order by j.id) as held, bool_or(j.why is not null) as must_wait into v_jobs
    from queue._shard_jobs(slot, part, started) j;
    if v_jobs.must_wait then
      return false;
    end if;
    v_ids := v_jobs.ids;
    insert into queue.shard_sent (slot, part, id, job)
    select shard_part_leave.slot, shard_part_leave.part, u.id, queue._shard_call(u.id, u.is_held)
    from unnest(v_ids, v_jobs.held) u (id, is_held);
    v_done := queue._delete(v_ids, false);
    if cardinality(v_done) < cardinality(v_ids) then
      raise exception using errcode = '55000', message = 'a job of this part can''t leave',
        detail = (select format('job %s', u.id) from unnest(v_ids) u (id)
          where u.id not in (select unnest(v_done)) limit 1),
        hint = 'It goes on here. End what needs it, and move the slot again.';
    end if;
    perform queue._announce();
    perform queue._shard_audit('shard_part_leave', jsonb_build_object('slot', slot, 'part', part), v_ids);
  end if;
  update queue.shard_part p set state = 'leaving', receipt = gen_random_uuid()
  where p.slot = shard_part_leave.slot and p.part = shard_part_leave.part;
  return true;
end $$;

-- Source. Lets all parts leave at once that have no jobs, and for which nobody defers; returns them.
-- Locks: the parts' rows, for update, by skip locked; their jobs are read afterwards, by a new snapshot. A
-- defer that comes meanwhile is refused: it tries again. Raises: 22023, QJ008.
create or replace function queue.shard_leave_empty(slot integer)
returns setof integer language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_parts integer[];
begin
  perform queue._check_isolation(), queue._shard_leaving(slot);
  v_parts := array(select p.part from queue.shard_part p
    where p.slot = shard_leave_empty.slot and p.state = 'here' for update skip locked);
  return query
    update queue.shard_part p set state = 'leaving', receipt = gen_random_uuid()
    where p.slot = shard_leave_empty.slot and p.part = any (v_parts)
      and not exists (select from queue.shard_job s where s.slot = p.slot and s.part = p.part)
    returning p.part;
end $$;

do $$
declare
  v_name regprocedure;
begin
  foreach v_name in array '{queue._shard_check,queue._shard_leaving,queue.shard_leave,queue.shard_mover,
    queue.shard_list,queue.shard_catch_up,queue.shard_close,queue._shard_lock,queue._shard_jobs,
    queue.shard_hold,queue.shard_unhold,queue.shard_part_leave,queue.shard_leave_empty}'::regproc[] loop
    execute format('revoke all on function %s from public', v_name);
  end loop;
end $$;
commit;
