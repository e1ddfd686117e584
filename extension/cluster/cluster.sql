-- Shards: several databases, each with a complete queue, and a map of keys to them (docs/scaling.md, ADR 11).
-- They are installed on demand, as the owner of the queue: this file, defer.sql, move_slot.sql, leave.sql,
-- arrive.sql; in a database that only routes, this file alone. Running the same files again replaces the
-- functions and keeps the map.
-- Tests: tests/sql/cluster, tests/py/cluster.
begin;

-- The databases. is_self: this one; a database that only routes has none. version: the version of the DSN.
-- Whoever changes the DSN raises it; the row with the highest one is right.
create table if not exists queue.shard (
  name text collate "C" not null,
  dsn text not null,
  is_self boolean not null default false,
  version bigint not null default 1,
  constraint shard_pkey primary key (name)
);
do $$ begin
  if not exists (select from pg_catalog.pg_attribute a
    where a.attrelid = 'queue.shard'::regclass and a.attname = 'version') then
    alter table queue.shard add column version bigint not null default 1;  -- older tables have none
  end if;
end $$;

-- This database's copy of the map. The shard that gives a slot away raises the version; the row with the
-- highest one is right. is_plain: the slot is this shard's, and on no move. closed_until: a move waits for
-- the row, so nobody else may lock it until then.
create table if not exists queue.shard_slot (
  slot integer not null,
  shard text collate "C" not null,
  version bigint not null,
  is_plain boolean not null default false,
  closed_until timestamptz,
  constraint shard_slot_pkey primary key (slot)
);

-- The slots that move to or from this database. mover: the process that moves the slot, if it lives.
create table if not exists queue.shard_move (
  slot integer not null,
  from_shard text collate "C" not null,
  to_shard text collate "C" not null,
  version bigint not null,
  is_listed boolean not null default false,
  mover integer,
  constraint shard_move_pkey primary key (slot)
);

-- The parts of such a slot. state: in the source here, leaving (in queue.shard_sent, not yet in the target)
-- or gone; in the target arriving or arrived. piece: the number of the last piece that was sent or has
-- arrived. is_last: there was no job after it when it was taken out. receipt: what the target must return,
-- before the source forgets what it has sent. closed_until: as in queue.shard_slot.
create table if not exists queue.shard_part (
  slot integer not null,
  part integer not null,
  state text not null,
  piece integer not null default 0,
  is_last boolean not null default false,
  receipt uuid,
  closed_until timestamptz,
  constraint shard_part_pkey primary key (slot, part)
);

-- The jobs of a slot that moves away. Those that the move holds have the reason moving in queue.waiting.
-- is_ahead: the job was held before the pause, by itself, and was checked then. In the target, id is the
-- job's id in the source, and new_id its id here.
create table if not exists queue.shard_job (
  slot integer not null,
  part integer not null,
  id bigint not null,
  is_ahead boolean not null default false,
  new_id bigint,
  constraint shard_job_pkey primary key (slot, part, id)
);
-- For the pause, which must not read the jobs held ahead.
create index if not exists shard_job_here_idx on queue.shard_job (slot, part, id) where not is_ahead;

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

-- The part of its slot that a key is in, 0 to 4095: the next 12 bits. A slot moves part by part.
create or replace function queue._shard_part_of(p_key text)
returns integer language sql immutable strict parallel safe as $$
  select ((pg_catalog.get_byte(h, 1) operator(pg_catalog.%) 64) operator(pg_catalog.*) 64)
    operator(pg_catalog.+) (pg_catalog.get_byte(h, 2) operator(pg_catalog./) 4)
  from pg_catalog.sha256(pg_catalog.convert_to(p_key, 'UTF8')) h
$$;

-- Raises: 22023 if the job has nothing to take its key from.
create or replace function queue.shard_key(job jsonb)
returns text language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp as $$
declare
  v_headers constant jsonb := coalesce(job #> '{options,headers}', job -> 'headers', 'null');
  v_key constant text := coalesce(job ->> 'shard_key', nullif(job ->> 'lock', ''),
    nullif(coalesce(job #>> '{options,share}', job ->> 'share'), ''), v_headers ->> 'tenant');
begin
  if coalesce(jsonb_typeof(job -> 'options'), 'null') not in ('object', 'null')
    or jsonb_typeof(v_headers) not in ('object', 'null') then
    raise exception using errcode = '22023', message = 'options and headers must be objects',
      hint = 'Pass a JSON object, or leave them out.';
  elsif coalesce(v_key, '') = '' or octet_length(v_key) > 1000 then
    raise exception using errcode = '22023', message = 'the job has no shard key of 1 to 1,000 bytes',
      hint = 'Pass a shard_key; or a lock, a share or the header tenant, which take its place.';
  elsif job ->> 'shard_key' is null and v_key ~ '\{.*\}|\{\{|\}\}' then
    raise exception using errcode = '22023', message = 'a shard key can''t be a template',
      detail = 'template: ' || v_key, hint = 'Pass the shard_key beside it.';
  end if;
  return v_key;
end $$;
comment on function queue.shard_key(jsonb) is
  'Returns the shard key of a job, an object as for queue.defer_many: its shard_key, else its lock, else its'
    ' share, else its header tenant.';

-- The map as this database knows it: {"self": name, "shards": {name: dsn}, "versions": {name: version},
-- "slots": [[name, version], ...]}.
create or replace function queue.shard_map()
returns jsonb language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select jsonb_build_object(
    'self', (select s.name from queue.shard s where s.is_self),
    'shards', (select coalesce(jsonb_object_agg(s.name, s.dsn), '{}') from queue.shard s),
    'versions', (select coalesce(jsonb_object_agg(s.name, s.version), '{}') from queue.shard s),
    'slots', (select coalesce(jsonb_agg(jsonb_build_array(m.shard, m.version) order by m.slot), '[]')
              from queue.shard_slot m))
$$;
comment on function queue.shard_map() is
  'Returns the map as this database knows it: its own name (self), the DSN of each shard with its version,'
    ' and for each slot the shard and the version.';

-- The shard that has a key, as far as this database knows; NULL while the key is on its way.
create or replace function queue.shard_find(key text)
returns text language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select case
    when p.state in ('leaving', 'arriving') then null
    when p.state in ('gone', 'arrived') then r.to_shard
    else coalesce(r.from_shard, m.shard) end
  from queue.shard_slot m
  left join queue.shard_move r on r.slot = m.slot
  left join queue.shard_part p on p.slot = m.slot and p.part = queue._shard_part_of(key)
  where m.slot = queue.shard_of(key)
$$;
comment on function queue.shard_find(text) is
  'Returns the name of the shard that has a key, as far as this database knows; NULL while it is on its way.';

-- The jobs that have left this database and, as far as it knows, have not arrived.
create or replace function queue.shard_under_way()
returns table (slot integer, target text, jobs bigint)
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select s.slot, r.to_shard, count(*) from queue.shard_sent s left join queue.shard_move r on r.slot = s.slot
  group by 1, 2 order by 1
$$;
comment on function queue.shard_under_way() is
  'Returns how many jobs of each slot have left this database and, as far as it knows, not arrived.';

-- The moves away from this database that have begun and have no mover now, with the jobs that each holds.
create or replace function queue.shard_stopped()
returns table (slot integer, target text, held bigint)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.waiting') is null then
    return;  -- it only routes
  end if;
  return query
  select r.slot, r.to_shard::text, (
    select count(*) from queue.shard_job s join queue.waiting w on w.id = s.id and w.reason = 'moving'
    where s.slot = r.slot)
  from queue.shard_move r join queue.shard s on s.is_self and s.name = r.from_shard
  where not exists (
    select from pg_stat_activity a where a.pid = r.mover and a.datname = current_database())
  order by 1;
end $$;
comment on function queue.shard_stopped() is
  'Returns the slots whose move away from this database has begun and is made by no process now: the target,'
    ' and how many jobs the move holds.';

-- Raises: 22023, always. A database that only routes has no other functions of the queue.
create or replace function queue._shard_invalid(p_message text, p_hint text, p_detail text default '')
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  raise exception using errcode = '22023', message = p_message, detail = left(p_detail, 2000), hint = p_hint;
end $$;

-- Appends a row to queue.audit, which a database that only routes does not have. Locks: none.
create or replace function queue._shard_audit(p_call text, p_args jsonb, p_ids bigint[] default null)
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.audit_log') is not null then
    perform queue._audit(p_call, p_args, p_ids => p_ids);
  end if;
end $$;

-- Raises: 22023 unless these are names of shards with their DSNs.
create or replace function queue._shard_check_names(p_shards jsonb, p_self text)
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if jsonb_typeof(p_shards) is distinct from 'object' or p_shards = '{}' or exists (
    select from jsonb_each(p_shards) s
    where s.key = '' or octet_length(s.key) > 1000 or jsonb_typeof(s.value) <> 'string') then
    perform queue._shard_invalid('shards must be an object of names and DSNs', 'Pass {"name": "DSN", ...}.');
  elsif not p_shards ? p_self then
    perform queue._shard_invalid('self is not one of the shards', 'Name all shards, with this one.',
      'self: ' || left(p_self, 1000));
  end if;
end $$;

-- Makes the first map: the slots divided evenly among the names in their order, so each shard makes the same.
-- Locks: rows of the map. Raises: 22023, also if there is another map.
create or replace function queue.shard_start(self text, shards jsonb)
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_names text[];
  v_slots jsonb;
begin
  perform queue._shard_check_names(shards, self);
  v_names := array(select k from jsonb_object_keys(shards) k order by k collate "C");
  v_slots := (select jsonb_agg(jsonb_build_array(v_names[n * cardinality(v_names) / 1024 + 1], 1) order by n)
    from generate_series(0, 1023) n);
  if queue.shard_map() - 'versions'
    = jsonb_build_object('self', self, 'shards', shards, 'slots', v_slots) then
    return;
  elsif exists (select from queue.shard_slot) then
    perform queue._shard_invalid('this database has a map',
      'Add a shard by queue.shard_learn, and move slots to it.');
  end if;
  insert into queue.shard (name, dsn, is_self)
  select s.key, s.value, coalesce(s.key = shard_start.self, false) from jsonb_each_text(shards) s;
  insert into queue.shard_slot (slot, shard, version, is_plain)
  select (s.n - 1)::integer, s.entry ->> 0, 1, coalesce(s.entry ->> 0 = shard_start.self, false)
  from jsonb_array_elements(v_slots) with ordinality s (entry, n);
  perform queue._shard_audit('shard_start', jsonb_build_object('self', self, 'shards',
    to_jsonb(v_names)));
end $$;

-- Takes over each slot and DSN of another copy of the map that is newer. While a slot is on a move, that move
-- alone decides about it, until a copy has the move's version, or a later one: then the move is over
-- (_shard_end). self is for the first map that a new shard learns; later it may be left out.
-- Locks: if a move is over, those of _shard_end; rows of the map, for no key update: that waits for no defer.
-- No wake-up is lost: as _shard_end. Raises: 22023; QJ008 (a move is over).
create or replace function queue.shard_learn(map jsonb, self text default null)
returns integer language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_slot integer;
  v_learnt integer;
begin
  perform queue._shard_check_names(map -> 'shards', self);
  if jsonb_typeof(map -> 'slots') is distinct from 'array' or jsonb_array_length(map -> 'slots') <> 1024
    or exists (
      select from jsonb_array_elements(map -> 'slots') s
      where jsonb_typeof(s -> 0) is distinct from 'string' or not map -> 'shards' ? (s ->> 0)
        or s ->> 1 ~ '^[0-9]{1,18}$' is not true) then
    perform queue._shard_invalid('the map must have 1,024 slots of its shards',
      'Pass what queue.shard_map() returns in another shard.');
  elsif coalesce(jsonb_typeof(map -> 'versions') <> 'object', false) or exists (
    select from jsonb_each_text(map -> 'versions') d where d.value ~ '^[0-9]{1,18}$' is not true) then
    perform queue._shard_invalid('versions must be an object of names and versions of DSNs',
      'Pass what queue.shard_map() returns in another shard.');
  elsif self is not null and exists (select from queue.shard_slot)
    and self is distinct from (select s.name from queue.shard s where s.is_self) then
    perform queue._shard_invalid('this database has a map, with another name for itself',
      'Leave out self.', format('self: %s, here: %s', left(self, 1000),
        coalesce((select s.name from queue.shard s where s.is_self), 'none, as it only routes')));
  end if;
  for v_slot in
    select r.slot from queue.shard_move r
    join jsonb_array_elements(map -> 'slots') with ordinality s (entry, n) on s.n = r.slot + 1
    where (s.entry ->> 1)::bigint >= r.version order by r.slot
  loop
    perform queue._shard_end(v_slot);  -- a database that only routes has no moves, and not this function
  end loop;
  insert into queue.shard (name, dsn, is_self, version)
  select s.key, s.value, coalesce(s.key = shard_learn.self, false),
    coalesce((map -> 'versions' ->> s.key)::bigint, 1)
  from jsonb_each_text(map -> 'shards') s
  on conflict on constraint shard_pkey do update set dsn = excluded.dsn, version = excluded.version
  where queue.shard.version < excluded.version;
  insert into queue.shard_slot (slot, shard, version, is_plain)
  select (s.n - 1)::integer, s.entry ->> 0, (s.entry ->> 1)::bigint,
    coalesce(s.entry ->> 0 = (select h.name from queue.shard h where h.is_self), false)
  from jsonb_array_elements(map -> 'slots') with ordinality s (entry, n)
  where not exists (select from queue.shard_move r where r.slot = s.n - 1)
  on conflict on constraint shard_slot_pkey do update set shard = excluded.shard, version = excluded.version,
    is_plain = excluded.is_plain
  where queue.shard_slot.version < excluded.version;
  get diagnostics v_learnt = row_count;
  if v_learnt > 0 then
    perform queue._shard_audit('shard_learn', jsonb_build_object('slots', v_learnt, 'self', self));
  end if;
  return v_learnt;
end $$;
comment on function queue.shard_learn(jsonb, text) is
  'Takes over each slot of a map (queue.shard_map) whose version is higher than in this database''s copy,'
    ' and the DSNs in the same way. In a new shard, self is its name; later a self with another name is'
    ' refused. Returns the number of slots that changed.';

-- In a database that only routes, roles that may use the schema may read the map; in a shard, those of
-- defer.sql.
revoke all on function queue.shard_start(text, jsonb), queue.shard_learn(jsonb, text),
  queue._shard_audit(text, jsonb, bigint[]), queue._shard_check_names(jsonb, text) from public;
commit;
