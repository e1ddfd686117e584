-- Moving a slot to another shard, part by part, while jobs go on: the steps of the source, which gives it
-- away. queue.shard_part has the state of each part:
--
--   source: here -> leaving -> gone
--   target: no row -> arriving (more pieces follow) -> arrived
--
-- Each step is one transaction in one database, and repeating it changes nothing, so if a mover dies at any
-- point, another one can continue. A step that is called too early changes nothing, and raises 22023. At most
-- one side accepts jobs of a part: the source until leaving, the target from arrived on.
-- pgdefer.contrib.cluster calls these steps as the owner of both queues. A step that changes something writes
-- a row into queue.audit.
-- Tests: tests/sql/cluster, tests/py/cluster.
begin;

-- Raises: 22023 unless there is such a slot and part.
create or replace function queue._shard_check(p_slot integer, p_part integer default 0)
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if (p_slot between 0 and 1023 and p_part between 0 and 4095) is not true then
    perform queue._shard_invalid('no such slot or part', 'Slots are 0 to 1023, parts 0 to 4095.',
      format('slot: %s, part: %s', p_slot, p_part));
  end if;
end $$;

-- The state of a part in the source; NULL without one. Raises: 22023 unless the slot is leaving this shard
-- and, if that is required, its jobs are listed.
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

-- Source. Begins the move: from here on each defer for the slot locks the row of its part, and notes its job.
-- Locks: the slot's row, for update, waited for (lock_timeout): every defer for it that does not know of the
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

-- Source. Makes the session the slot's mover; false while another mover lives. If a mover has ended and
-- another session has got its process id, that session counts as the mover, until it ends too. Locks: the row
-- of the move. Raises: 22023.
create or replace function queue.shard_mover(slot integer)
returns boolean language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform queue._shard_leaving(slot, p_is_listed => false);
  update queue.shard_move r set mover = pg_backend_pid()
  where r.slot = shard_mover.slot and (r.mover is null or r.mover = pg_backend_pid() or not exists (
    select from pg_stat_activity a where a.pid = r.mover and a.datname = current_database()));
  return found;
end $$;

-- Source. Notes the jobs that were there before the move: one pass over the unfinished jobs. Locks: none.
-- Raises: 22023.
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

-- Source. Admits up to 1,000 committed jobs, so that no part has to wait until they are admitted. Returns
-- whether there are more. Locks: the admission lock, waited for. No wake-up is lost: admission announces what
-- is ready.
create or replace function queue.shard_catch_up()
returns boolean language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform queue._check_isolation(), queue._lock_admission(true);
  return (select a.has_more from queue._admit(1000) a);
end $$;

-- Source. Lets nobody enter a slot, or a part of it, for a second, so that those who are in it end before
-- others come. Locks: the row, for no key update, which waits for no defer. Raises: 22023.
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

-- What is left of a part: its unfinished jobs, or some of them, but not those that are held ahead. why: why
-- the part must wait for the job. is_next: the job could start, unless it is held; later jobs of an ordered
-- lock could not. is_moving: the move holds it. It is PL/pgSQL so that it keeps its plan, which looks each
-- job up by its id: it costs time only for the part's jobs.
create or replace function queue._shard_jobs(p_slot integer, p_part integer, p_started boolean,
  p_ids bigint[] default null)
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
        when exists (
          select from unnest(j.keys || array[j.options ->> 'share', j.options ->> 'idempotency_key']) k
          where octet_length(k) > 500 and octet_length(queue._literal(k)) > 1000)
          then 'a key has too many braces'
      end as why
    from queue.shard_job s
    join queue.job_now j on j.id = s.id
    left join queue.finished f on f.id = s.id
    left join queue.active_job aj on aj.id = s.id
    left join queue.waiting w on w.id = s.id
    where s.slot = p_slot and s.part = p_part and not s.is_ahead and f.id is null
      and (p_ids is null or s.id = any (p_ids))) u;
end $$;

-- Holds jobs of a part, each by itself, so that none can start whatever happens to the others; jobs that an
-- operator holds are left out. Returns how many.
-- Locks: the caller has those of _lock_rows. No wake-up is lost: as shard_hold.
create or replace function queue._shard_park(p_slot integer, p_part integer, p_ids bigint[])
returns integer language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp as $$
declare
  v_ids bigint[];
  v_taken record;
  v_parked integer;
begin
  v_ids := array(select u.id from unnest(p_ids) u (id) left join queue.waiting w on w.id = u.id
    where w.reason is null or w.reason not in ('held', 'moving'));
  v_taken := queue._dequeue_all(v_ids);
  insert into queue.waiting (id, reason) select u.id, 'moving' from unnest(v_taken.ids) u (id);
  update queue.shard_job s set is_ahead = true
  where s.slot = p_slot and s.part = p_part and s.id = any (p_ids)
    and exists (select from queue.waiting w where w.id = s.id and w.reason in ('held', 'moving'));
  get diagnostics v_parked = row_count;
  perform queue._advance(p_keys => v_taken.keys), queue._announce();
  return v_parked;
end $$;

-- As _shard_leaving. It also keeps the part as it is: until the transaction ends, the part does not leave,
-- and its move is neither given up nor over.
-- Locks: its row, for key share, until the transaction ends. It comes before rows of jobs, as in the
-- functions that give up a move.
create or replace function queue._shard_keep(p_slot integer, p_part integer)
returns text language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp as $$
begin
  perform from queue.shard_part p where p.slot = p_slot and p.part = p_part for key share;
  return queue._shard_leaving(p_slot, p_part);
end $$;

-- Source. Before the pause of a part that is larger than a piece, holds up to 1,000 of its newest jobs, while
-- the oldest go on. Returns how many it held: 0 once the pause may begin, or if the part must stay for other
-- reasons than a running job.
-- Locks: as _shard_keep; then as queue.hold, for all of them. No wake-up is lost: as shard_hold.
-- Raises: 22023, QJ008.
create or replace function queue.shard_hold_ahead(slot integer, part integer, started boolean default false)
returns integer language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_oldest bigint[];
  v_ids bigint[];
  v_jobs record;
  v_parked integer;
begin
  perform queue._check_isolation();
  if queue._shard_keep(slot, part) is distinct from 'here' then
    return 0;
  end if;
  v_oldest := queue._shard_oldest(slot, part);
  v_ids := array(
    select s.id from queue.shard_job s
    where s.slot = shard_hold_ahead.slot and s.part = shard_hold_ahead.part and not s.is_ahead
      and s.id > v_oldest[cardinality(v_oldest)]
      and (select f.id from queue.finished f where f.id = s.id) is null
    order by s.slot desc, s.part desc, s.id desc limit 1000);
  if v_ids = '{}' then
    return 0;
  end if;
  perform queue._lock_rows(v_ids, null);
  select array_agg(j.id) filter (where j.why is null) as ids,
    coalesce(bool_or(j.why <> 'it runs'), false) as must_stay into v_jobs
  from queue._shard_jobs(slot, part, started, v_ids) j;
  if v_jobs.must_stay or v_jobs.ids is null then
    return 0;
  end if;
  v_parked := queue._shard_park(slot, part, v_jobs.ids);
  perform queue._shard_audit('shard_hold_ahead', jsonb_build_object('slot', slot, 'part', part), v_jobs.ids);
  return v_parked;
end $$;

-- Source. Holds up to 1,000 of those jobs of a part that could start next, so that running ones can end, and
-- no others begin. They wait with the reason moving: jobs that need them go on waiting, and an operator may
-- also hold them. Returns how many are left to hold, and a job that the part must wait for.
-- Locks: as _shard_keep, so that no move ends meanwhile and leaves them held; then as queue.hold, for all of
-- them. No wake-up is lost: unhold, or the target, makes the jobs ready.
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
  if queue._shard_keep(slot, part) is distinct from 'here' then
    perform queue._shard_invalid('this part has left', 'Carry it to the target: queue.shard_part_jobs.',
      format('slot: %s, part: %s', slot, part));
  end if;
  v_ids := array(select j.id from queue._shard_jobs(slot, part, started) j
    where j.is_next and not j.is_moving and not j.is_held order by j.id limit 1000);
  if v_ids <> '{}' then
    perform queue._lock_rows(v_ids, null);
    for i in 1 .. cardinality(v_ids) loop
      -- A job that an operator has held meanwhile is left out.
      continue when exists (select from queue.waiting w where w.id = v_ids[i] and w.reason = 'held');
      v_taken := queue._dequeue(v_ids[i]);
      if coalesce(v_taken.place, 'log') <> 'log' then  -- otherwise it has started, or ended
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

-- Source. Gives back the jobs that the move holds, of one part or of all that have not begun to leave, and
-- lets defers in again. What an operator holds stays held.
-- Locks: rows of the parts, for no key update; the admission lock, but not the jobs' rows. The jobs wait, so
-- nobody claims them, and a transaction that replaces one may last. Raises: 22023, QJ008.
create or replace function queue.shard_unhold(slot integer, part integer default null)
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_parts integer[];
  v_ids bigint[];
begin
  perform queue._check_isolation(), queue._shard_leaving(slot, part);
  v_parts := array(select p.part from queue.shard_part p where p.slot = shard_unhold.slot
    and p.part = coalesce(shard_unhold.part, p.part) and p.state = 'here');
  update queue.shard_part p set closed_until = null where p.slot = shard_unhold.slot
    and p.part = any (v_parts) and p.closed_until is not null;
  v_ids := array(select s.id from queue.shard_job s
    join queue.waiting w on w.id = s.id and w.reason = 'moving'
    where s.slot = shard_unhold.slot and s.part = any (v_parts));
  if v_ids <> '{}' then
    perform queue._admit_all();
    with freed as (
      delete from queue.waiting w where w.id = any (v_ids) and w.reason = 'moving' returning w.id)
    select coalesce(array_agg(f.id), '{}') into v_ids from freed f;
    perform queue._advance(p_arrived => v_ids), queue._announce();
    perform queue._shard_audit('shard_unhold', jsonb_build_object('slot', slot, 'part', part), v_ids);
  end if;
  update queue.shard_job s set is_ahead = false
  where s.slot = shard_unhold.slot and s.part = any (v_parts) and s.is_ahead;
end $$;

revoke all on function queue._shard_check, queue._shard_leaving, queue.shard_leave, queue.shard_mover,
  queue.shard_list, queue.shard_catch_up, queue.shard_close, queue._shard_jobs,
  queue._shard_park, queue._shard_keep, queue.shard_hold_ahead, queue.shard_hold,
  queue.shard_unhold from public;
commit;
