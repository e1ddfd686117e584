-- Deferring in a shard: only for the keys that it has. Tests: tests/sql/cluster, tests/py/cluster.
begin;

-- Lets the transaction defer for keys, or refuses. Returns whether some of them are in slots that move away.
-- Locks, until the transaction ends: the slots' rows of queue.shard_slot, for key share and by skip locked;
-- if a slot moves, also its parts' rows of queue.shard_part. So it never waits. A move takes the same rows
-- for update, which only the owner may do; when it has one, it knows that every earlier job is committed.
-- The map is read after the locks are held, by other statements, which needs READ COMMITTED. The statement
-- that locks must not read it: for key share returns a row as it was, if another transaction has changed it
-- meanwhile.
-- Raises: 55000 (another shard's), 55P03 (on its way), QJ008.
create or replace function queue._shard_enter(p_keys text[])
returns boolean language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_self text;
  v_slots integer[] := array[queue.shard_of(p_keys[1])];
  v_locked integer;
  v_parts bigint[];
  v_refused record;
  v_is_moving boolean := false;
begin
  perform queue._check_isolation();
  if cardinality(p_keys) > 1 then
    v_slots := array(select distinct queue.shard_of(k) from unnest(p_keys) k);
  end if;
  perform from queue.shard_slot m where m.slot = any (v_slots) for key share skip locked;
  get diagnostics v_locked = row_count;
  if v_locked = cardinality(v_slots) and (
    select bool_and(m.is_plain and coalesce(m.closed_until < clock_timestamp(), true))
    from queue.shard_slot m where m.slot = any (v_slots)) then
    return false;
  end if;
  v_slots := array(select m.slot from queue.shard_slot m where m.slot = any (v_slots)
    for key share skip locked);
  select s.name into v_self from queue.shard s where s.is_self;
  if exists (select from queue.shard_move r where r.slot = any (v_slots) and r.from_shard = v_self) then
    v_is_moving := true;
    v_parts := array(select p.slot * 4096::bigint + p.part from queue.shard_part p
      where (p.slot, p.part) in (select queue.shard_of(k), queue._shard_part_of(k) from unnest(p_keys) k)
      for key share skip locked);
  end if;
  select f.key, f.shard into v_refused
  from (select k as key, queue.shard_of(k) as slot, queue._shard_part_of(k) as part,
    queue.shard_find(k) as shard from unnest(p_keys) k) f
  left join queue.shard_slot m on m.slot = f.slot
  left join queue.shard_part p on v_is_moving and p.slot = f.slot and p.part = f.part
  where f.shard is distinct from v_self or v_self is null or m.slot is null or m.slot <> all (v_slots)
    or greatest(m.closed_until, p.closed_until) > clock_timestamp()
    or p.part is not null and f.slot * 4096::bigint + f.part <> all (v_parts)
  limit 1;
  if found then
    perform queue._shard_refuse(case when v_refused.shard is null or v_refused.shard = v_self then '55P03'
      else '55000' end, v_refused.key);
  end if;
  return v_is_moving;
end $$;

-- Raises: the SQLSTATE, always.
create or replace function queue._shard_refuse(p_code text, p_key text)
returns void language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  raise exception using errcode = p_code,
    message = case p_code when '55000' then 'the key belongs to another shard'
      else 'the key is on its way' end,
    detail = format('slot: %s, shard: %s', queue.shard_of(p_key),
      coalesce(queue.shard_find(p_key), 'unknown')),
    hint = case p_code when '55000' then 'Read queue.shard_map() again, and defer it there.'
      else 'Try again in a moment: its slot moves.' end;
end $$;

-- Raises: 22023 if a job needs a job of another key, because that job may be in another shard, now or later.
-- For a job that the caller may not use it says what queue.defer says: there is none (QJ001).
create or replace function queue._shard_check_needs(p_key text, p_needs jsonb)
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_needs bigint[];
  v_need bigint;
begin
  begin
    v_needs := array(
      select n from jsonb_to_record(jsonb_build_object('needs', p_needs)) j (needs bigint[])
      cross join unnest(j.needs) n where n is not null);
  exception when data_exception then
    return;  -- queue.defer_many, which reads them in the same way, refuses them
  end;
  if v_needs = '{}' then
    return;
  end if;
  perform queue._require_jobs('{producer}', v_needs);
  select j.id into v_need from unnest(v_needs) n
  cross join lateral (select j.id, j.options from queue.job j where j.id = n offset 0) j
  where j.options #>> '{headers,shard_key}' is distinct from p_key limit 1;
  if found then
    raise exception using errcode = '22023', message = 'a need has another shard key',
      detail = format('job %s has another shard key', v_need),
      hint = 'Give jobs that need each other one shard key.';
  end if;
end $$;

-- Returns the jobs without their shard keys, with all options in `options`.
-- Raises: 22023 as queue.defer_many for unknown keys, and if a job has a group, of its own or by default.
create or replace function queue._shard_nested_jobs(p_jobs jsonb)
returns jsonb language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_jobs constant jsonb := queue._nested_jobs((
    select coalesce(jsonb_agg(j.job - 'shard_key' order by j.n), '[]')
    from jsonb_array_elements(p_jobs) with ordinality j (job, n)));
begin
  if exists (
    select from jsonb_array_elements(v_jobs) j left join queue.task t on t.name = j ->> 'task'
    where coalesce(nullif(j #> '{options,group}', 'null'), t.options -> 'group') <> '""') then
    raise exception using errcode = '22023', message = 'a group has no shard key',
      hint = 'Use one database for the jobs of a group: queue.defer in the shard of your choice. If it is the'
        ' default of the task, pass the option group as empty text.';
  end if;
  return v_jobs;
end $$;

-- Notes jobs of a slot that moves. The caller has entered with these keys. Any role may call this, so it
-- notes only jobs of this transaction. Older jobs were noted by their own transactions, or listed.
-- Locks: none.
create or replace function queue._shard_note(p_keys text[], p_ids bigint[])
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  insert into queue.shard_job (slot, part, id)
  select r.slot, queue._shard_part_of(k.key), k.id
  from unnest(p_keys, p_ids) k (key, id)
  join queue.job j on j.id = k.id and j.xid = pg_current_xact_id()
    and j.options #>> '{headers,shard_key}' = k.key
  join queue.shard_move r on r.slot = queue.shard_of(k.key)
  join queue.shard s on s.is_self and s.name = r.from_shard
  on conflict do nothing;
end $$;

-- Locks: those of _shard_enter, then as queue.defer_many. No wake-up is lost: queue.defer_many notifies.
-- Raises: as both; 22023 for a group, or needs of another key.
create or replace function queue.shard_defer_many(jobs jsonb)
returns setof bigint language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp as $$
declare
  v_keys text[];
  v_jobs jsonb;
  v_ids bigint[];
begin
  if jsonb_typeof(jobs) is distinct from 'array' then
    perform queue._shard_invalid('jobs must be a JSON array',
      'Pass [{"task": text, "args": object, ...}, ...].');
  end if;
  v_keys := array(select queue.shard_key(j.job)
    from jsonb_array_elements(jobs) with ordinality j (job, n) order by j.n);
  v_jobs := queue._shard_tagged(queue._shard_nested_jobs(jobs), v_keys);
  perform queue._shard_check_needs(v_keys[j.n], j.job -> 'needs')
  from jsonb_array_elements(v_jobs) with ordinality j (job, n) where jsonb_typeof(j.job -> 'needs') = 'array';
  if queue._shard_enter(array(select distinct k from unnest(v_keys) k order by k)) then
    v_ids := array(select d from queue.defer_many(v_jobs) d);
    perform queue._shard_note(v_keys, v_ids);
    return query select unnest(v_ids);
  else
    return query select d from queue.defer_many(v_jobs) d;
  end if;
end $$;
comment on function queue.shard_defer_many(jsonb) is
  'As queue.defer_many, for objects that may have a shard_key (queue.shard_key). Refuses all jobs with 55000'
    ' if one of the keys belongs to another shard, with 55P03 while one is on its way. The jobs have the key'
    ' as header shard_key.';

-- The jobs, each with its key among its headers.
create or replace function queue._shard_tagged(p_jobs jsonb, p_keys text[])
returns jsonb language sql immutable set search_path = pg_catalog, pg_temp as $$
  select coalesce(jsonb_agg(j.job || jsonb_build_object('options',
    coalesce(nullif(j.job -> 'options', 'null'), '{}') || jsonb_build_object('headers',
      coalesce(nullif(j.job #> '{options,headers}', 'null'), '{}')
        || jsonb_build_object('shard_key', p_keys[j.n]))) order by j.n), '[]')
  from jsonb_array_elements(p_jobs) with ordinality j (job, n)
$$;

-- As shard_defer_many, for one job.
create or replace function queue.shard_defer(shard_key text, task text, args jsonb default '{}',
  options jsonb default null)
returns bigint language sql volatile security invoker set search_path = pg_catalog, pg_temp as $$
  select queue.shard_defer_many(jsonb_build_array(coalesce(options, '{}')
    || jsonb_build_object('shard_key', shard_key, 'task', task, 'args', args)))
$$;
comment on function queue.shard_defer(text, text, jsonb, jsonb) is
  'Defers one job by queue.shard_defer_many. options: its other keys, such as {"lock": "a", "options": {}}.';

-- Roles get these functions by queue.grant_access (base/permissions.sql, _function_grants), which an upgrade
-- repeats: those that have access get them now. PUBLIC has none. Locks: as migrate.
revoke all on function queue._shard_enter, queue._shard_refuse, queue._shard_check_needs,
  queue._shard_nested_jobs, queue._shard_note, queue.shard_defer_many, queue._shard_tagged,
  queue.shard_defer, queue.shard_of, queue._shard_part_of, queue.shard_key, queue.shard_map,
  queue.shard_find, queue.shard_under_way, queue.shard_stopped, queue._shard_invalid from public;
lock table queue.access in share row exclusive mode;
commit;
