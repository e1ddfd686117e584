-- Moving a slot to another shard, part by part, while jobs go on. queue.shard_part has the state of each:
--
--   source  (no row)         leaving              gone
--   target             (no row)          arrived
--
-- Each step is one transaction in one database, and its repetition changes nothing, so a mover that dies at
-- any point is followed by another one. At most one side accepts jobs of a part: the source until leaving,
-- the target from arrived on. pgdefer.contrib.cluster calls this as the owner of both queues.
-- Tests: tests/py/cluster.
begin;

-- Source. From here on each defer for the slot takes the lock of its part, and notes its job.
-- Locks: advisory: that of the slot, exclusive, waited for (lock_timeout), so that every defer for it that
-- knows nothing of the move has ended; then rows of the map. Raises: 22023, 55P03 (a transaction stays open).
create or replace function queue.shard_leave(slot integer, target text)
returns bigint language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_self text := (select s.name from queue.shard s where s.is_self);
  v_version bigint;
begin
  perform pg_advisory_xact_lock(1885824115, shard_leave.slot);
  select v.version into v_version from queue.shard_move v
  where v.slot = shard_leave.slot and v.to_shard = target and v.from_shard = v_self;
  if found then
    return v_version;
  elsif exists (select from queue.shard_move v where v.slot = shard_leave.slot)
    or not exists (select from queue.shard s where s.name = target and not s.is_self)
    or not exists (select from queue.shard_slot m where m.slot = shard_leave.slot and m.shard = v_self) then
    raise exception using errcode = '22023', message = 'this slot can''t move there',
      detail = format('slot: %s, here: %s, to: %s', shard_leave.slot, v_self, target),
      hint = 'Its shard moves it, to another one of the map, and one move at a time.';
  end if;
  insert into queue.shard_move (slot, from_shard, to_shard, version)
  select m.slot, v_self, target, m.version + 1 from queue.shard_slot m where m.slot = shard_leave.slot
  returning version into v_version;
  return v_version;
end $$;

-- Source. Notes the jobs that were there before: one pass over the unfinished jobs. Locks: none.
create or replace function queue.shard_list(slot integer)
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  insert into queue.shard_job (slot, part, id)
  select shard_list.slot, queue._shard_part(j.options #>> '{headers,shard_key}'), j.id
  from queue.job j left join queue.finished f on f.id = j.id
  where f.id is null and j.options #> '{headers}' ? 'shard_key'
    and queue.shard_of(j.options #>> '{headers,shard_key}') = shard_list.slot
    and not (select v.is_listed from queue.shard_move v where v.slot = shard_list.slot)
  on conflict do nothing;
  update queue.shard_move v set is_listed = true where v.slot = shard_list.slot;
end $$;

-- Target. It accepts jobs of the parts that arrive. Locks: rows of the map. Raises: 22023.
create or replace function queue.shard_receive(slot integer, source text, version bigint)
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  if exists (select from queue.shard_slot m where m.slot = shard_receive.slot
    and m.version >= shard_receive.version) then
    return;  -- it has all of it
  elsif exists (select from queue.shard_move v where v.slot = shard_receive.slot
    and (v.from_shard, v.version) is distinct from (source, shard_receive.version)) then
    raise exception using errcode = '22023', message = 'this slot is on another move',
      hint = 'End that one first.';
  end if;
  insert into queue.shard_move (slot, from_shard, to_shard, version)
  select shard_receive.slot, source, s.name, shard_receive.version from queue.shard s where s.is_self
  on conflict do nothing;
end $$;

-- What is left of a part: its unfinished jobs. why: what it must wait for. PL/pgSQL, as it keeps its plan.
create or replace function queue._shard_jobs(p_slot integer, p_part integer, p_started boolean)
returns table (id bigint, state text, is_held boolean, why text)
language plpgsql stable security invoker rows 100
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  return query
  select j.id, j.state, s.is_held,
    case
      when j.state = 'running' then 'it runs'
      when j.state = 'upstream_failed' then 'a job that it needs has failed'
      when j.reason = 'signal' or exists (select from queue.steps x where x.job_id = j.id)
        then 'it has steps'
      when j.claims > 0 and not p_started then 'it has been started before'
      when concat_ws(' ', o.lock, o.queueing_lock, array_to_string(o.keys, ' '), o.options ->> 'share',
        o.options ->> 'idempotency_key') ~ '\{.*\}' then 'its keys look like templates'
    end
  from queue.shard_job s
  join queue.jobs j on j.id = s.id
  join queue.job o on o.id = s.id
  where s.slot = p_slot and s.part = p_part and j.finished_at is null
    and queue.shard_of(j.headers ->> 'shard_key') = p_slot;
end $$;

-- Source. Holds up to 100 jobs of a part that have not started, so that those that have can end, and no
-- others begin. Returns how many are left to hold, and a job that the part must wait for.
-- Locks: as queue.hold, for each job. A wake-up is not lost: unhold, or the target, makes the jobs ready.
create or replace function queue.shard_hold(slot integer, part integer, started boolean default false,
  out to_hold bigint, out waits_for bigint, out why text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_id bigint;
begin
  for v_id in select j.id from queue._shard_jobs(slot, part, started) j
    where not j.is_held and j.why is null and j.state <> 'held' order by j.id desc limit 100
  loop
    begin
      perform queue.hold(v_id);
      update queue.shard_job s set is_held = true
      where s.slot = shard_hold.slot and s.part = shard_hold.part and s.id = v_id;
    exception when sqlstate 'QJ001' or sqlstate 'QJ003' then
      null;  -- it has started, or ended
    end;
  end loop;
  select count(*) filter (where not j.is_held and j.why is null and j.state <> 'held'), min(j.id)
      filter (where j.why is not null), (array_agg(j.why order by j.id) filter (where j.why is not null))[1]
  into to_hold, waits_for, why
  from queue._shard_jobs(slot, part, started) j;
end $$;

-- Source. Gives back the jobs that the move holds, of one part or of all. Locks: as queue.unhold, for each.
create or replace function queue.shard_unhold(slot integer, part integer default null)
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_id bigint;
begin
  for v_id in update queue.shard_job s set is_held = false
    where s.slot = shard_unhold.slot and s.part = coalesce(shard_unhold.part, s.part) and s.is_held
    returning s.id
  loop
    begin
      perform queue.unhold(v_id);
    exception when sqlstate 'QJ001' or sqlstate 'QJ003' then
      null;  -- an operator was faster
    end;
  end loop;
end $$;

-- Source. Takes the jobs of a part out of the queue, into queue.shard_sent, if all may leave. From its commit
-- on the source refuses the part. Returns whether it left.
-- Locks: advisory: that of the part, exclusive, waited for (lock_timeout): every defer for it has committed;
-- then as queue.delete. Nothing is lost: the jobs are deleted and noted in one transaction.
-- Raises: 55P03 (a transaction that defers for it stays open), QJ008.
create or replace function queue.shard_part_leave(slot integer, part integer, started boolean default false)
returns boolean language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_ids bigint[];
  v_refused record;
begin
  perform queue._check_isolation();
  perform pg_advisory_xact_lock(1885824116, shard_part_leave.slot * 256 + shard_part_leave.part);
  if exists (select from queue.shard_part p where p.slot = shard_part_leave.slot
    and p.part = shard_part_leave.part) then
    return true;
  elsif exists (select from queue._shard_jobs(slot, part, started) j
    where j.why is not null or not j.is_held and j.state <> 'held') then
    return false;
  end if;
  insert into queue.shard_sent (slot, part, id, job)
  select shard_part_leave.slot, shard_part_leave.part, j.id,
    queue._shard_call(j.id, j.state = 'held' and not j.is_held)
  from queue._shard_jobs(slot, part, started) j;
  v_ids := array(select s.id from queue.shard_sent s
    where s.slot = shard_part_leave.slot and s.part = shard_part_leave.part order by s.id);
  if v_ids <> '{}' then
    select d.id, d.outcome into v_refused from queue.delete(v_ids) d
    where d.outcome is distinct from 'deleted' limit 1;
    if found then
      raise exception using errcode = '55000', message = 'a job of this part can''t leave',
        detail = format('job %s: %s', v_refused.id, v_refused.outcome),
        hint = 'It goes on here. End what needs it, and move the slot again.';
    end if;
  end if;
  insert into queue.shard_part (slot, part, state) values (slot, part, 'leaving');
  return true;
end $$;

-- Source. Lets all parts leave at once that have no jobs, and for which nobody defers; returns them.
-- Locks: advisory: those of the parts, exclusive, by try. A defer that comes later is refused: it tries
-- again.
create or replace function queue.shard_leave_empty(slot integer)
returns setof integer language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform queue._check_isolation();
  for v_part in 0 .. 255 loop
    if pg_try_advisory_xact_lock(1885824116, shard_leave_empty.slot * 256 + v_part)
    and not exists (select from queue.shard_job s where s.slot = shard_leave_empty.slot and s.part = v_part)
    then
      insert into queue.shard_part (slot, part, state) values (slot, v_part, 'leaving')
      on conflict do nothing;
      if found then
        return next v_part;
      end if;
    end if;
  end loop;
end $$;

-- A job as queue.defer_many takes it, with its id, and the ids of unfinished jobs that it needs.
create or replace function queue._shard_call(p_id bigint, p_held boolean)
returns jsonb language plpgsql stable security invoker
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_bitmapscan = off set jit = off as $$
begin
  return (
  select jsonb_build_object('id', j.id, 'task', j.task, 'args', j.args, 'queue', j.queue,
    'priority', j.priority, 'lock', coalesce(j.lock, ''), 'queueing_lock', coalesce(j.queueing_lock, ''),
    'scheduled_at', j.scheduled_at, 'deadline', j.deadline, 'concurrency_key', '', 'needs', (
      -- any: nothing, once one of them is satisfied
      select jsonb_agg(n order by n) from unnest(v.needs) n left join queue.finished f on f.id = n
      where f.id is null and not (j.options ->> 'needs_mode' = 'any' and exists (
        select from unnest(v.needs) o join queue.finished s on s.id = o and s.state = 'succeeded'))),
    'options', coalesce(j.options, '{}') - '{terms,parent,group}'::text[]
      || jsonb_build_object('held', p_held, 'share', coalesce(j.options ->> 'share', ''), 'idempotency_key',
        coalesce(j.options ->> 'idempotency_key', ''))
      || case when j.queueing_lock is null then '{}'::jsonb else '{"on_conflict": "ignore"}' end
      || case when j.keys is null then '{}' else jsonb_build_object('concurrency', (
        select jsonb_agg(jsonb_strip_nulls(jsonb_build_object('key', k.key, 'limit', k.key_limit))
          || coalesce(nullif(j.options -> 'terms' -> (k.n - 1)::integer, 'null'), '{}') order by k.n)
        from unnest(j.keys, j.limits) with ordinality k (key, key_limit, n))) end)
  from queue.job_now j
  join queue.jobs v on v.id = j.id
  where j.id = p_id);
end $$;

-- Source. The jobs of a part that has left, in their order.
create or replace function queue.shard_part_jobs(slot integer, part integer)
returns jsonb language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select coalesce(jsonb_agg(s.job order by s.id), '[]') from queue.shard_sent s
  where s.slot = shard_part_jobs.slot and s.part = shard_part_jobs.part
$$;

-- Target. Defers the jobs of a part, once: the row of the part is inserted in the same transaction, and a
-- second call waits for the first.
-- Locks: that row; then as queue.defer_many. No wake-up is lost: that notifies.
create or replace function queue.shard_part_arrive(slot integer, part integer, jobs jsonb)
returns integer language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_job jsonb;
  v_new jsonb := '{}';  -- the new id of each
  v_id bigint;
  v_count integer := 0;
begin
  if exists (select from queue.shard_slot m join queue.shard s on s.is_self and s.name = m.shard
    where m.slot = shard_part_arrive.slot) then
    return 0;  -- the whole slot has
  end if;
  insert into queue.shard_part (slot, part, state) values (slot, part, 'arrived') on conflict do nothing;
  if not found then
    return 0;
  end if;
  for v_job in select j from jsonb_array_elements(jobs) j loop
    select d into v_id from queue.defer_many(jsonb_build_array(v_job - 'id' || jsonb_build_object('needs', (
      select jsonb_agg(v_new -> n) from jsonb_array_elements_text(nullif(v_job -> 'needs', 'null')) n
      where v_new ? n)))) d;
    v_new := v_new || jsonb_build_object(v_job ->> 'id', v_id);
    v_count := v_count + 1;
  end loop;
  return v_count;
end $$;

-- Source, after the part arrived. Locks: rows of the map.
create or replace function queue.shard_part_gone(slot integer, part integer)
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  update queue.shard_part p set state = 'gone'
  where p.slot = shard_part_gone.slot and p.part = shard_part_gone.part;
  delete from queue.shard_sent s where s.slot = shard_part_gone.slot and s.part = shard_part_gone.part;
  delete from queue.shard_job s where s.slot = shard_part_gone.slot and s.part = shard_part_gone.part;
end $$;

-- Source and target: the parts of a slot that have left or arrived, and their states.
create or replace function queue.shard_parts(slot integer)
returns table (part integer, state text) language sql stable security definer
set search_path = pg_catalog, pg_temp as $$
  select p.part, p.state from queue.shard_part p where p.slot = shard_parts.slot order by p.part
$$;

-- Target, then source, once all 256 parts are there. Locks: advisory: the slot's, exclusive; rows of the map.
-- Raises: 22023 before that.
create or replace function queue.shard_moved(slot integer, version bigint)
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform pg_advisory_xact_lock(1885824115, shard_moved.slot);
  if not exists (select from queue.shard_move v
    where v.slot = shard_moved.slot and v.version = shard_moved.version) then
    return;
  elsif 256 > (select count(*) from queue.shard_part p
    where p.slot = shard_moved.slot and p.state in ('gone', 'arrived')) then
    raise exception using errcode = '22023', message = 'parts of this slot have not moved yet',
      detail = format('slot: %s', shard_moved.slot), hint = 'Move the slot again.';
  end if;
  update queue.shard_slot m set shard = v.to_shard, version = v.version
  from queue.shard_move v where v.slot = m.slot and m.slot = shard_moved.slot;
  delete from queue.shard_move v where v.slot = shard_moved.slot;
  delete from queue.shard_part p where p.slot = shard_moved.slot;
  delete from queue.shard_job s where s.slot = shard_moved.slot;
end $$;

do $$
declare
  v_name regprocedure;
begin
  foreach v_name in array '{queue.shard_leave,queue.shard_list,queue.shard_receive,queue._shard_jobs,
    queue.shard_hold,queue.shard_unhold,queue.shard_part_leave,queue.shard_leave_empty,
    queue._shard_call,queue.shard_part_jobs,
    queue.shard_part_arrive,queue.shard_part_gone,queue.shard_parts,queue.shard_moved}'::regproc[] loop
    execute format('revoke all on function %s from public', v_name);
  end loop;
end $$;
commit;
