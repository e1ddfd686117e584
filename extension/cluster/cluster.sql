-- Shards: several databases, each with a complete queue, and a map of keys to them (docs/scaling.md, ADR 11).
-- Installed on demand, as the owner of the queue. The same file again replaces the functions
-- and keeps the map. Tests: tests/py/cluster.
begin;

-- The databases. is_self: this one; none of them is, in a database that only routes.
create table if not exists queue.shard (
  name text collate "C" not null,
  dsn text not null,
  is_self boolean not null default false,
  constraint shard_pkey primary key (name)
);

-- This database's copy of the map. The shard that gives a slot away raises the version: the highest is right.
create table if not exists queue.shard_slot (
  slot integer not null,
  shard text collate "C" not null,
  version bigint not null,
  constraint shard_slot_pkey primary key (slot)
);

-- The slots on their way to or from this database.
create table if not exists queue.shard_move (
  slot integer not null,
  from_shard text collate "C" not null,
  to_shard text collate "C" not null,
  version bigint not null,
  is_listed boolean not null default false,
  constraint shard_move_pkey primary key (slot)
);

-- The parts of such a slot that are not where they were: leaving (in queue.shard_sent, not yet there), gone,
-- or arrived here.
create table if not exists queue.shard_part (
  slot integer not null,
  part integer not null,
  state text not null,
  constraint shard_part_pkey primary key (slot, part)
);

-- The jobs of a slot that moves away. is_held: held by the move.
create table if not exists queue.shard_job (
  slot integer not null,
  part integer not null,
  id bigint not null,
  is_held boolean not null default false,
  constraint shard_job_pkey primary key (slot, part, id)
);

-- Jobs that have left this database, until the other one has them.
create table if not exists queue.shard_sent (
  slot integer not null,
  part integer not null,
  id bigint not null,
  job jsonb not null,
  constraint shard_sent_pkey primary key (slot, part, id)
);

-- The slot of a key, 0 to 1023: the first 10 bits of the SHA-256 of its UTF-8, the same in every version and
-- language.
create or replace function queue.shard_of(key text)
returns integer language sql immutable strict parallel safe as $$
  select (pg_catalog.get_byte(h, 0) operator(pg_catalog.*) 4)
    operator(pg_catalog.+) (pg_catalog.get_byte(h, 1) operator(pg_catalog./) 64)
  from pg_catalog.sha256(pg_catalog.convert_to(key, 'UTF8')) h
$$;
comment on function queue.shard_of(text) is
  'Returns the slot of a key, 0 to 1023: the first 10 bits of the SHA-256 of the key in UTF-8.';

-- The part of its slot that a key is in, 0 to 255: the next 8 bits. A slot moves part by part.
create or replace function queue._shard_part(p_key text)
returns integer language sql immutable strict parallel safe as $$
  select ((pg_catalog.get_byte(h, 1) operator(pg_catalog.%) 64) operator(pg_catalog.*) 4)
    operator(pg_catalog.+) (pg_catalog.get_byte(h, 2) operator(pg_catalog./) 64)
  from pg_catalog.sha256(pg_catalog.convert_to(p_key, 'UTF8')) h
$$;

-- Raises: 22023 if the job has nothing to take its key from.
create or replace function queue.shard_key(job jsonb)
returns text language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp as $$
declare
  v_key text := coalesce(job ->> 'shard_key', nullif(job ->> 'lock', ''),
    nullif(job #>> '{options,share}', ''), job #>> '{options,headers,tenant}');
begin
  if coalesce(v_key, '') = '' or octet_length(v_key) > 1000 then
    raise exception using errcode = '22023', message = 'the job has no shard key of 1 to 1,000 bytes',
      hint = 'Pass a shard_key; or a lock, a share or the header tenant, which take its place.';
  elsif job ->> 'shard_key' is null and v_key ~ '\{.*\}' then
    raise exception using errcode = '22023', message = 'a template is no shard key',
      detail = 'template: ' || v_key, hint = 'Pass the shard_key beside it.';
  end if;
  return v_key;
end $$;
comment on function queue.shard_key(jsonb) is
  'Returns the shard key of a job, an object as for queue.defer_many: its shard_key, else its lock, else its'
    ' share, else its header tenant.';

-- The map as this database knows it: {"self": name, "shards": {name: dsn}, "slots": [[name, version], ...]}.
create or replace function queue.shard_map()
returns jsonb language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select jsonb_build_object(
    'self', (select s.name from queue.shard s where s.is_self),
    'shards', (select coalesce(jsonb_object_agg(s.name, s.dsn), '{}') from queue.shard s),
    'slots', (select coalesce(jsonb_agg(jsonb_build_array(m.shard, m.version) order by m.slot), '[]')
              from queue.shard_slot m))
$$;
comment on function queue.shard_map() is
  'Returns the map as this database knows it: its own name (self), the DSN of each shard, and for each slot'
    ' the shard and the version.';

-- The shard that has a key, as far as this database knows; NULL while the key is on its way.
create or replace function queue.shard_find(key text)
returns text language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select case
    when p.state = 'leaving' then null
    when p.state in ('gone', 'arrived') then v.to_shard
    else coalesce(v.from_shard, m.shard) end
  from queue.shard_slot m
  left join queue.shard_move v on v.slot = m.slot
  left join queue.shard_part p on p.slot = m.slot and p.part = queue._shard_part(key)
  where m.slot = queue.shard_of(key)
$$;
comment on function queue.shard_find(text) is
  'Returns the name of the shard that has a key, as far as this database knows; NULL while it is on its way.';

-- Makes the first map: the slots divided evenly among the names in their order, so each shard makes the same.
-- Locks: rows of the map. Raises: 22023, if there is a map.
create or replace function queue.shard_start(self text, shards jsonb)
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  if exists (select from queue.shard_slot) then
    raise exception using errcode = '22023', message = 'this database has a map',
      hint = 'Add a shard by queue.shard_learn, and move slots to it.';
  elsif self is not null and not shards ? self then
    raise exception using errcode = '22023', message = 'self is not one of the shards',
      detail = 'self: ' || self, hint = 'Name all shards, with this one.';
  end if;
  insert into queue.shard (name, dsn, is_self)
  select s.key, s.value, coalesce(s.key = shard_start.self, false) from jsonb_each_text(shards) s;
  insert into queue.shard_slot (slot, shard, version)
  select n, (array(select s.name from queue.shard s order by s.name))[
    (n * (select count(*) from queue.shard) / 1024 + 1)::integer], 1
  from generate_series(0, 1023) n;
end $$;

-- Takes over what another copy of the map knows better. A slot that moves here is decided by its move alone.
-- Locks: rows of the map.
create or replace function queue.shard_learn(map jsonb, self text default null)
returns integer language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_learnt integer;
begin
  insert into queue.shard (name, dsn, is_self)
  select s.key, s.value, coalesce(s.key = shard_learn.self, false) from jsonb_each_text(map -> 'shards') s
  on conflict on constraint shard_pkey do update set dsn = excluded.dsn;
  insert into queue.shard_slot (slot, shard, version)
  select (s.n - 1)::integer, s.entry ->> 0, (s.entry ->> 1)::bigint
  from jsonb_array_elements(map -> 'slots') with ordinality s (entry, n)
  where not exists (select from queue.shard_move v where v.slot = s.n - 1)
  on conflict on constraint shard_slot_pkey do update set shard = excluded.shard, version = excluded.version
  where queue.shard_slot.version < excluded.version;
  get diagnostics v_learnt = row_count;
  return v_learnt;
end $$;
comment on function queue.shard_learn(jsonb, text) is
  'Takes over each slot of a map (queue.shard_map) whose version is higher than in the own copy, and the'
    ' DSNs. In a new shard, self is its name. Returns the number of slots that changed.';

-- Lets the transaction defer for keys, or refuses. Returns whether some of them are in slots that move away.
-- Locks: advisory, shared and by try, until the transaction ends: those of the slots; if a slot moves, also
-- those of the parts. So it never waits, and a move that has one of them knows that every earlier job is
-- committed. The map is read after the lock is held: hence READ COMMITTED.
-- Raises: 55000 (another shard's), 55P03 (on its way), QJ008.
create or replace function queue._shard_enter(p_keys text[])
returns boolean language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_key text;
  v_found record;
  v_is_moving boolean := false;
begin
  perform queue._check_isolation();
  foreach v_key in array p_keys loop
    if not pg_try_advisory_xact_lock_shared(1885824115, queue.shard_of(v_key)) then
      perform queue._shard_refuse('55P03', v_key);
    end if;
    select s.is_self, v.from_shard = s.name as is_leaving into v_found
    from queue.shard_slot m
    left join queue.shard_move v on v.slot = m.slot
    left join queue.shard s on s.is_self
    where m.slot = queue.shard_of(v_key);
    if v_found.is_leaving is not null and not pg_try_advisory_xact_lock_shared(1885824116,
      queue.shard_of(v_key) * 256 + queue._shard_part(v_key)) then
      perform queue._shard_refuse('55P03', v_key);
    end if;
    if queue.shard_find(v_key) is distinct from (select s.name from queue.shard s where s.is_self) then
      perform queue._shard_refuse(case when queue.shard_find(v_key) is null then '55P03' else '55000' end,
        v_key);
    end if;
    v_is_moving := v_is_moving or coalesce(v_found.is_leaving, false);
  end loop;
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

-- Raises: 22023 if a job needs a job of another key: that may be, or come to be, in another shard.
create or replace function queue._shard_check_needs(p_key text, p_needs jsonb)
returns void language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_need bigint;
begin
  select j.id into v_need from jsonb_array_elements_text(p_needs) n
  cross join lateral (select j.id, j.options from queue.job j where j.id = n::bigint offset 0) j
  where j.options #>> '{headers,shard_key}' is distinct from p_key limit 1;
  if found then
    raise exception using errcode = '22023', message = 'a need across shards',
      detail = format('job %s has another shard key', v_need),
      hint = 'Give jobs that need each other one shard key.';
  end if;
end $$;

-- Notes jobs of a slot that moves. The caller has entered with these keys. Any role may call this, so it notes
-- only jobs of this transaction: those that are older have been noted by theirs, or listed. Locks: none.
create or replace function queue._shard_note(p_keys text[], p_ids bigint[])
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  insert into queue.shard_job (slot, part, id)
  select v.slot, queue._shard_part(k.key), k.id
  from unnest(p_keys, p_ids) k (key, id)
  join queue.job j on j.id = k.id and j.xid = pg_current_xact_id()
    and j.options #>> '{headers,shard_key}' = k.key
  join queue.shard_move v on v.slot = queue.shard_of(k.key)
  join queue.shard s on s.is_self and s.name = v.from_shard
  on conflict do nothing;
end $$;

-- Locks: those of _shard_enter, then as queue.defer_many. No wake-up is lost: that notifies.
-- Raises: as both; 22023 for a group, or needs of another key.
create or replace function queue.shard_defer_many(jobs jsonb)
returns setof bigint language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp as $$
declare
  v_keys text[] := array(select queue.shard_key(j.job)
    from jsonb_array_elements(jobs) with ordinality j (job, n) order by j.n);
  v_ids bigint[];
begin
  if exists (select from jsonb_array_elements(jobs) j where j #> '{options,group}' <> 'null') then
    raise exception using errcode = '22023', message = 'a group has no shard key',
      hint = 'Use one database for the jobs of a group: queue.defer in the shard of your choice.';
  end if;
  perform queue._shard_check_needs(v_keys[j.n], j.job -> 'needs')
  from jsonb_array_elements(jobs) with ordinality j (job, n) where jsonb_typeof(j.job -> 'needs') = 'array';
  if queue._shard_enter(array(select distinct k from unnest(v_keys) k order by k)) then
    v_ids := array(select d from queue.defer_many(queue._shard_tagged(jobs, v_keys)) d);
    perform queue._shard_note(v_keys, v_ids);
    return query select unnest(v_ids);
  else
    return query select d from queue.defer_many(queue._shard_tagged(jobs, v_keys)) d;
  end if;
end $$;
comment on function queue.shard_defer_many(jsonb) is
  'As queue.defer_many, for objects that may have a shard_key (queue.shard_key). Refuses all with 55000 if'
    ' one of the keys is another shard''s, with 55P03 while one is on its way. The key is the header'
    ' shard_key.';

-- The jobs, each with its key among its headers.
create or replace function queue._shard_tagged(p_jobs jsonb, p_keys text[])
returns jsonb language sql immutable set search_path = pg_catalog, pg_temp as $$
  select coalesce(jsonb_agg(j.job - 'shard_key' || jsonb_build_object('options',
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

-- Roles that may use the schema may also ask; what queue.defer_many allows them decides about deferring.
do $$
declare
  v_name regprocedure;
begin
  for v_name in select p.oid from pg_catalog.pg_proc p
    where p.pronamespace = 'queue'::regnamespace and p.proname like any ('{shard\_%,\_shard\_%}') loop
    execute format('revoke all on function %s from public', v_name);
  end loop;
end $$;
grant execute on function queue.shard_of(text), queue._shard_part(text), queue.shard_key(jsonb),
  queue.shard_map(), queue.shard_find(text), queue._shard_enter(text[]), queue._shard_refuse(text, text),
  queue._shard_check_needs(text, jsonb), queue._shard_note(text[], bigint[]), queue.shard_defer_many(jsonb),
  queue._shard_tagged(jsonb, text[]), queue.shard_defer(text, text, jsonb, jsonb) to public;
commit;
