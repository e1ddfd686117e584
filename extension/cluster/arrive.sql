-- Moving a slot to another shard (move_slot.sql): how its jobs get there, the steps of the target, and the
-- end of the move in both.
begin;

-- The number of the format in which jobs are carried. It rises with each change of the format: a target takes
-- only its own.
create or replace function queue.shard_format()
returns integer language sql immutable set search_path = pg_catalog, pg_temp as $$ select 2 $$;

-- Source. A part that has left, as the target takes it: with its jobs in their order, and the receipt that
-- the target returns. Raises: 22023.
create or replace function queue.shard_part_jobs(slot integer, part integer)
returns jsonb language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_state text := queue._shard_leaving(slot, part);
begin
  if v_state is distinct from 'leaving' then
    perform queue._shard_invalid('this part is not leaving', case v_state
      when 'here' then 'Call queue.shard_part_leave first.' else 'Its jobs are in the target.' end,
      format('slot: %s, part: %s', slot, part));
  end if;
  return (
    select jsonb_build_object('format', queue.shard_format(), 'slot', p.slot, 'part', p.part,
      'version', r.version, 'receipt', p.receipt, 'piece', p.piece, 'is_last', p.is_last,
      'jobs', (
        select coalesce(jsonb_agg(s.job order by s.id), '[]') from queue.shard_sent s
        where s.slot = p.slot and s.part = p.part))
    from queue.shard_part p join queue.shard_move r on r.slot = p.slot
    where p.slot = shard_part_jobs.slot and p.part = shard_part_jobs.part);
end $$;

-- Raises: 22023 unless the jobs come in the format of this release.
create or replace function queue._shard_check_format(p_format text)
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if p_format is distinct from queue.shard_format()::text then
    perform queue._shard_invalid('the shards have different releases',
      'Install the functions of one release in both, and move the slot again.',
      format('format: %s, here: %s', left(coalesce(p_format, 'none'), 200), queue.shard_format()));
  end if;
end $$;

-- Target. Whether it may receive the slot; the mover asks before it lets the slot leave the source. False:
-- the target has all of it. format: queue.shard_format() of the source. Locks: none. Raises: 22023 if it may
-- not.
create or replace function queue.shard_may_receive(slot integer, source text, version bigint, format integer)
returns boolean language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform queue._shard_check(slot), queue._shard_check_format(format::text);
  if exists (select from queue.shard_slot m where m.slot = shard_may_receive.slot
    and m.version >= shard_may_receive.version) then
    return false;
  elsif exists (select from queue.shard_move r where r.slot = shard_may_receive.slot
    and (r.from_shard, r.version) is distinct from (source, shard_may_receive.version))
    or not exists (select from queue.shard s where s.name = source and not s.is_self)
    or version is null then
    perform queue._shard_invalid('this slot can''t come from there',
      'If it is on another move, end that one first.',
      pg_catalog.format('slot: %s, from: %s', slot, left(source, 1000)));
  end if;
  return true;
end $$;

-- Target. It accepts jobs of the parts that arrive. Locks: rows of the map. Raises: as shard_may_receive.
create or replace function queue.shard_receive(slot integer, source text, version bigint, format integer)
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  if not queue.shard_may_receive(slot, source, version, format) then
    return;
  end if;
  insert into queue.shard_move (slot, from_shard, to_shard, version)
  select shard_receive.slot, source, s.name, shard_receive.version from queue.shard s where s.is_self
  on conflict do nothing;
  if found then
    perform queue._shard_audit('shard_receive', jsonb_build_object('slot', slot, 'source', source));
  end if;
end $$;

-- Raises: 22023 unless this is what queue.shard_part_jobs returns for a part that comes here.
create or replace function queue._shard_check_carried(p_carried jsonb)
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  perform queue._shard_check_format(p_carried ->> 'format');
  if jsonb_typeof(p_carried -> 'jobs') is distinct from 'array'
    or (p_carried ->> 'slot' ~ '^[0-9]{1,4}$' and p_carried ->> 'part' ~ '^[0-9]{1,4}$'
      and p_carried ->> 'version' ~ '^[0-9]{1,18}$' and p_carried ->> 'piece' ~ '^[0-9]{1,9}$'
      and jsonb_typeof(p_carried -> 'is_last') = 'boolean'
      and p_carried ->> 'receipt' ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$') is not true
    or exists (
      select from jsonb_array_elements(case jsonb_typeof(p_carried -> 'jobs') when 'array'
        then p_carried -> 'jobs' end) j
      where (j ->> 'id' ~ '^[0-9]{1,18}$') is not true
        or coalesce(jsonb_typeof(j -> 'needs'), 'null') not in ('array', 'null')
        or coalesce(jsonb_typeof(j -> 'signals'), 'null') not in ('array', 'null')
        or exists (select from jsonb_array_elements_text(case jsonb_typeof(j -> 'needs') when 'array'
          then j -> 'needs' end) n where (n ~ '^[0-9]{1,18}$') is not true)) then
    perform queue._shard_invalid('this is not a part of a slot', 'Pass what queue.shard_part_jobs returns.');
  end if;
  perform queue._shard_check((p_carried ->> 'slot')::integer, (p_carried ->> 'part')::integer);
end $$;

-- Whether the carried part belongs to a move to this shard that has not ended. False: the move has ended
-- here. A mover that comes late may bring a part of it that has arrived already, and may have left again.
-- Locks: the row of the move, for key share, until the transaction ends, so that the move does not end
-- meanwhile.
-- Raises: 22023 if the slot never came here, or has moved on.
create or replace function queue._shard_is_expected(p_slot integer, p_version bigint)
returns boolean language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp as $$
begin
  perform from queue.shard_move r join queue.shard s on s.is_self and s.name = r.to_shard
  where r.slot = p_slot and r.version = p_version for key share of r;
  if not found and not exists (select from queue.shard_slot m join queue.shard s on s.is_self
    and s.name = m.shard where m.slot = p_slot and m.version >= p_version) then
    perform queue._shard_invalid('this slot does not come here', 'Call queue.shard_receive first.',
      format('slot: %s, version: %s', p_slot, p_version));
  end if;
  return found;
end $$;

-- Returns the job so that its task's defaults here add nothing, because it has had those of the source. Where
-- it lacks an option that its task has a default for, it gets the value that means none, if there is one.
create or replace function queue._shard_without_defaults(p_job jsonb)
returns jsonb language plpgsql stable security invoker set search_path = pg_catalog, pg_temp as $$
declare
  v_task record;
  v_none jsonb;
begin
  select t.deadline, t.options into v_task from queue.task t where t.name = p_job ->> 'task';
  v_none := (
    select jsonb_object_agg(n.key, n.value)
    from jsonb_each('{"delay": 0, "unique_until": "start", "lock_mode": "ordered", "needs_mode": "all",
      "on_need_failure": "block", "on_limit": "block", "group": "", "max_progress": 100}') n
    where v_task.options ? n.key and (n.key <> 'delay' or p_job ->> 'scheduled_at' is null));
  if v_task.deadline is not null and p_job ->> 'deadline' is null then
    p_job := p_job || '{"deadline": "infinity"}';
  end if;
  return case when v_none is null then p_job else p_job || jsonb_build_object('options',
    v_none || coalesce(nullif(p_job -> 'options', 'null'), '{}')) end;
end $$;

-- Defers jobs that the source has accepted, even if they are larger than this queue allows.
-- Locks: if a job may be too large, the row of queue.installation, as queue.configure; then as
-- queue.defer_many. The row must stay that of its era (base/era.sql). Raises: as queue.defer_many.
create or replace function queue._shard_defer(p_calls jsonb)
returns bigint[] language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp as $$
declare
  v_calls jsonb := (
    select jsonb_agg(queue._shard_without_defaults(c.job) order by c.n)
    from jsonb_array_elements(p_calls) with ordinality c (job, n));
  v_own record;
  v_ids bigint[];
begin
  if not exists (select from jsonb_array_elements(v_calls) c, queue.installation i
    where octet_length(c::text) > i.max_size) then
    return array(select d from queue.defer_many(v_calls) d);
  end if;
  select i.max_size, i.written = i.xmin as is_of_era into v_own from queue.installation i for no key update;
  update queue.installation i set max_size = 268435456;
  v_ids := array(select d from queue.defer_many(v_calls) d);
  update queue.installation i set max_size = v_own.max_size;
  update queue.installation i set written = i.xmin where v_own.is_of_era;
  return v_ids;
end $$;

-- Appends the signals of jobs that arrive. Locks: none. No wake-up is lost: no job waits for them yet.
create or replace function queue._shard_signal(p_jobs jsonb, p_ids bigint[])
returns void language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp as $$
begin
  insert into queue.received_signal (job_id, name, received_at, payload)
  select p_ids[j.n], s.sent ->> 'name', (s.sent ->> 'received_at')::timestamptz, s.sent -> 'payload'
  from jsonb_array_elements(p_jobs) with ordinality j (job, n)
  cross join jsonb_array_elements(nullif(j.job -> 'signals', 'null')) with ordinality s (sent, n)
  order by j.n, s.n;
end $$;

-- Target. Defers the jobs of a piece, once: the row of the part counts its pieces in the same transaction,
-- and a second call waits for the first. The jobs may run at once: they are older than those of the pieces
-- that follow, none of which can start in the source. Their signals come with them. A job with needs begins a
-- new call of queue.defer_many, because the new ids of its needs are known by then. Returns how many jobs it
-- deferred, and the receipt for queue.shard_part_gone.
-- Locks: as _shard_is_expected; that row; then as _shard_defer. No wake-up is lost: _shard_defer notifies.
-- Raises: 22023; as _shard_defer.
create or replace function queue.shard_part_arrive(carried jsonb, out deferred integer, out receipt uuid)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_slot integer;
  v_part integer;
  v_piece integer;
  v_some jsonb;
  v_calls jsonb;
  v_again record;
  v_ids bigint[];
  v_new jsonb := '{}'::jsonb;  -- the new id of each
  v_all bigint[] := '{}'::bigint[];
begin
  perform queue._shard_check_carried(carried);
  v_slot := (carried ->> 'slot')::integer;
  deferred := 0;
  receipt := (carried ->> 'receipt')::uuid;
  v_part := (carried ->> 'part')::integer;
  if not queue._shard_is_expected(v_slot, (carried ->> 'version')::bigint) then
    return;
  end if;
  insert into queue.shard_part (slot, part, state) values (v_slot, v_part, 'arriving') on conflict do nothing;
  update queue.shard_part p set piece = p.piece + 1,
    state = case when (carried ->> 'is_last')::boolean then 'arrived' else 'arriving' end
  where p.slot = v_slot and p.part = v_part and p.piece < (carried ->> 'piece')::integer
  returning p.piece into v_piece;
  if v_piece is null then
    return;  -- it has arrived
  elsif v_piece < (carried ->> 'piece')::integer then
    perform queue._shard_invalid('a piece before this one has not arrived',
      'Carry the pieces in their order.',
      format('slot: %s, part: %s, piece: %s', v_slot, v_part, carried ->> 'piece'));
  end if;
  for v_some in
    select jsonb_agg(x.job order by x.n)
    from (
      select j.job, j.n, count(*) filter (where jsonb_typeof(j.job -> 'needs') = 'array') over (order by j.n)
        as with_needs
      from jsonb_array_elements(carried -> 'jobs') with ordinality j (job, n)) x
    group by x.with_needs, x.n / 500 order by min(x.n)
  loop
    v_calls := (
      select jsonb_agg(j.job - '{id,signals}'::text[] || jsonb_build_object('needs', (
        select jsonb_agg(coalesce((v_new ->> e.need)::bigint, s.new_id))
        from jsonb_array_elements_text(nullif(j.job -> 'needs', 'null')) e (need)
        left join queue.shard_job s on s.slot = v_slot and s.part = v_part and s.id = e.need::bigint
        where v_new ? e.need or s.id is not null)) order by j.n)
      from jsonb_array_elements(v_some) with ordinality j (job, n));
    v_ids := queue._shard_defer(v_calls);
    -- If an id is of another transaction, or comes twice, a job here has the queueing lock or the idempotency
    -- key. The job that arrives must not be lost, so it is deferred without the key.
    for v_again in
      select x.n from (
        select u.n, u.id, row_number() over (partition by u.id order by u.n) as use
        from unnest(v_ids) with ordinality u (id, n)) x
      left join queue.job j on j.id = x.id  -- the first job of an idempotency key may have been deleted
      where j.xid is distinct from pg_current_xact_id() or x.use > 1 or x.id in (select unnest(v_all))
      order by x.n
    loop
      v_ids[v_again.n] := (queue._shard_defer(jsonb_build_array(
        (v_calls -> (v_again.n - 1)::integer) || jsonb_build_object('queueing_lock', '', 'options',
          (v_calls -> (v_again.n - 1)::integer -> 'options') - 'on_conflict'
            || '{"idempotency_key": ""}'))))[1];
    end loop;
    perform queue._shard_signal(v_some, v_ids);
    v_new := v_new || (select jsonb_object_agg(j.job ->> 'id', v_ids[j.n])
      from jsonb_array_elements(v_some) with ordinality j (job, n));
    v_all := v_all || v_ids;
  end loop;
  if not (carried ->> 'is_last')::boolean then
    insert into queue.shard_job (slot, part, id, new_id)
    select v_slot, v_part, e.key::bigint, e.value::bigint from jsonb_each_text(v_new) e;
  end if;
  if v_all <> '{}' then
    perform queue._shard_audit('shard_part_arrive', carried - '{jobs,receipt}'::text[], v_all);
  end if;
  deferred := cardinality(v_all);
end $$;

-- Source. After a piece has arrived, forgets it and takes out the next one. receipt: what
-- queue.shard_part_arrive has returned for the piece. Returns whether there is a next one to carry.
-- Locks: the part's row; then as queue.delete. Nothing is lost: as _shard_cut.
-- Raises: 22023, 55000 (another job needs a job of the next piece), 55P03 (a signal is on its way), QJ008.
create or replace function queue.shard_part_gone(slot integer, part integer, receipt uuid)
returns boolean language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_part record;
  v_sent bigint[];
begin
  perform queue._check_isolation(), queue._shard_leaving(slot, part);
  select p.state, p.is_last, p.receipt into v_part from queue.shard_part p
  where p.slot = shard_part_gone.slot and p.part = shard_part_gone.part for no key update;
  if v_part.state = 'gone' then
    return false;
  elsif v_part.receipt = shard_part_gone.receipt is not true then
    perform queue._shard_invalid('this part has not arrived',
      'Bring it to the target first, and pass the receipt that queue.shard_part_arrive returns there.',
      format('slot: %s, part: %s, state: %s', slot, part, v_part.state));
  end if;
  v_sent := array(select s.id from queue.shard_sent s
    where s.slot = shard_part_gone.slot and s.part = shard_part_gone.part);
  delete from queue.shard_sent s where s.slot = shard_part_gone.slot and s.part = shard_part_gone.part;
  delete from queue.shard_job s where s.slot = shard_part_gone.slot and s.part = shard_part_gone.part
    and s.id = any (v_sent);
  if not v_part.is_last then
    -- The next piece has no jobs if they have ended meanwhile: the target waits for the last piece.
    perform queue._lock_rows(queue._shard_oldest(slot, part), null);
    perform queue._shard_cut(slot, part);
    return true;
  end if;
  update queue.shard_part p set state = 'gone'
  where p.slot = shard_part_gone.slot and p.part = shard_part_gone.part;
  delete from queue.shard_job s where s.slot = shard_part_gone.slot and s.part = shard_part_gone.part;
  return false;
end $$;

-- Source and target: the parts of a slot that have left or arrived, and their states.
create or replace function queue.shard_parts(slot integer)
returns table (part integer, state text) language sql stable security definer
set search_path = pg_catalog, pg_temp as $$
  select p.part, p.state from queue.shard_part p where p.slot = shard_parts.slot and p.state <> 'here'
  order by p.part
$$;

-- Called in the target, then in the source, once all 4,096 parts are in the target. It also ends an earlier
-- move whose last step is missing: a later version tells that the slot has moved on.
-- Locks: rows of the map, for no key update: that waits for no defer. A defer that was let in before finds
-- the slot here in the target; in the source it is refused, as the part already did. Raises: 22023 before the
-- parts are there, or if the slot is on no such move.
create or replace function queue.shard_moved(slot integer, version bigint)
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform queue._shard_check(slot);
  if exists (select from queue.shard_slot m where m.slot = shard_moved.slot
    and m.version >= shard_moved.version) then
    return;
  elsif not exists (select from queue.shard_move r
    where r.slot = shard_moved.slot and r.version <= shard_moved.version) then
    perform queue._shard_invalid('this slot is not on this move',
      'Call queue.shard_leave in its shard, and queue.shard_receive in the target, first.',
      format('slot: %s, version: %s', slot, version));
  elsif 4096 > (select count(*) from queue.shard_part p
    where p.slot = shard_moved.slot and p.state in ('gone', 'arrived')) then
    perform queue._shard_invalid('parts of this slot have not moved yet', 'Move the slot again.',
      format('slot: %s', slot));
  end if;
  update queue.shard_slot m set shard = r.to_shard, version = r.version,
    is_plain = r.to_shard in (select s.name from queue.shard s where s.is_self)
  from queue.shard_move r where r.slot = m.slot and m.slot = shard_moved.slot;
  perform queue._shard_forget(slot);
  perform queue._shard_audit('shard_moved', jsonb_build_object('slot', slot, 'version', version));
end $$;

revoke all on function queue.shard_format, queue.shard_part_jobs, queue._shard_check_format,
  queue.shard_may_receive, queue.shard_receive, queue._shard_check_carried, queue._shard_is_expected,
  queue._shard_without_defaults, queue._shard_defer, queue._shard_signal, queue.shard_part_arrive,
  queue.shard_part_gone, queue.shard_parts, queue.shard_moved from public;
do $$ begin perform queue._restore_grants(); end $$;
commit;
