-- Eras: no pair (id, claim) is given out twice, and no id of a worker, whatever happens to the server.
--
-- claim_seq and worker_id_seq are as safe as the rest of the database: what a crash with synchronous_commit off, a standby
-- that was behind, or a backup has forgotten, they would give out again. So a new era begins with an installation, and
-- whenever the present one can't be told to be the one that is stored in queue.installation: both sequences jump, before
-- the first claim or worker of that era gets its number. An era ends with
--   a start of the server: a restart, a restore, a point in time, a standby, which was started by itself;
--   a recovery within one start, after a crash of one process: all statistics begin anew with it;
--   a copy of the database: its number;
--   a copy of the row, by a dump or replication: the row's xmin is another than the one written in it.
-- Nothing is lost without one of these. One too many, as by pg_stat_reset_shared, does no harm.
--
-- Where the jump leads: to the clock in microseconds, and at least 2^32 past the last number that is known; on from there
-- by chance, up to 2^32 (_era_start). Let an era begin at b and give out n numbers, and a later one begin at c without
-- knowing them all.
--   It knows b, as a standby that is some jobs behind does: c >= b + 2^32. They meet only if n > 2^32, which takes 12 hours
--   at 100,000 a second, between what was replicated last and the end of the older one: however the clock was set.
--   It does not know b, and the clock is right: b and c are moments, and c - b their distance, if that is over 71 minutes
--   (2^32 us). It outruns n, as nobody claims a million times a second.
--   Neither, or less than 71 minutes: b and c differ by chance. They meet with a probability of about 2n / 2^32, and then a
--   pair repeats only if the same job gets the same number.
-- The ids of jobs do not jump, so that they stay short: without its claim an id ends nothing. Those that a lossy failover
-- has forgotten are given to other jobs.

-- What tells the present era from others, but for the row's xmin. Exact, whatever extra_float_digits is.
create or replace function queue._era()
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return concat_ws(' ', extract(epoch from pg_postmaster_start_time()), extract(epoch from pg_stat_get_bgwriter_stat_reset_time()),
                   (select d.oid from pg_database d where d.datname = current_database()));
end $$;

-- Whether the numbers are those of the present era.
create or replace function queue._is_era(p_era text)
returns boolean language plpgsql volatile parallel safe security invoker as $$
begin
  return exists (select from queue.installation i where i.era = p_era and i.written = i.xmin);
end $$;

-- Begins a new era where that is due, and admits anew what stored transaction ids no longer tell, after a restore into
-- another cluster.
-- Locks: ADM, waited for, where a new era is due: the caller holds nothing. Then the row of queue.installation, which
-- nobody else locks for long. Why none gets a number of an era that has ended: as _know_era.
create or replace function queue._check_era()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_era text := queue._era();
begin
  if queue._is_era(v_era) then
    return;
  end if;
  perform queue._lock_admission(true);
  if queue._is_era(v_era) then
    return;  -- another has begun it meanwhile
  end if;
  if exists (select from queue.installation i where i.system_identifier <> (select c.system_identifier from pg_control_system() c)) then
    perform queue._restart_cursor();
  end if;
  perform queue._begin_era(v_era);
end $$;

-- Locks: the caller holds ADM, or has just made the tables. Others who take numbers meanwhile know the era that ends:
-- they will not take 2^32 of them, so that no sequence is set back.
create or replace function queue._begin_era(p_era text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform setval('queue.claim_seq', queue._era_start((select s.last_value from queue.claim_seq s))),
    setval('queue.worker_id_seq', queue._era_start((select s.last_value from queue.worker_id_seq s)));
  update queue.installation i set era = p_era;
  update queue.installation i set written = i.xmin;  -- which that of this transaction, or of a part of it, is by now
end $$;

-- Where numbers go on, of which p_last was the last.
create or replace function queue._era_start(p_last bigint)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
begin
  return greatest((extract(epoch from clock_timestamp()) * 1000000)::bigint, p_last + 4294967296) + (random() * 4294967296)::bigint;
end $$;

-- What pgdefer.era says in a session that knows the era: which installation it was of. It is called immutable as
-- _unlimited is, and used beside that in one expression only: the plan that holds the view is made anew when the tables are.
create or replace function queue._installation()
returns text language plpgsql immutable parallel safe security invoker as $$
begin
  return to_regclass('queue.installation')::oid::text;
end $$;

-- Asked by a session before its first claim. It is enough to ask once, as an era ends with all sessions that could claim:
-- with the server or its recovery; a session of a standby could not claim, so it has not asked; with the tables, when they
-- are made anew. What is left is no loss. A transaction that is rolled back forgets that it has asked.
-- Locks: as _check_era: the caller holds nothing.
create or replace function queue._know_era()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_installation text := to_regclass('queue.installation')::oid::text;
begin
  if current_setting('pgdefer.era', true) is distinct from v_installation then
    perform queue._check_era();
    perform set_config('pgdefer.era', v_installation, false);
  end if;
end $$;
