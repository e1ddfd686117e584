-- Eras: no pair (id, claim) and no worker id is ever used twice, whatever happens to the server.
--
-- claim_seq and worker_id_seq are only as durable as the rest of the database. After a crash with
-- synchronous_commit off, a failover to a lagging standby, or a restore, they would repeat lost numbers. So a
-- new era begins with an installation, and whenever the present era may not be the one stored in
-- queue.installation: both sequences jump before the first claim or worker of that era gets its number. These
-- end an era:
--   a start of the server: a restart, a restore (also to a point in time), or a standby, which has its own
--     start;
--   a recovery within one start, after a crash of one process: it resets all statistics;
--   a copy of the database: its number changes;
--   a copy of the row, by a dump or replication: the row's xmin differs from the one written in it.
-- Without one of these nothing is lost. An unnecessary era does no harm, except that on a promoted server
-- workers count as alive for dead_after once more (_up_since). So pg_stat_reset_shared of one kind begins
-- none.
--
-- The target of the jump: the clock in microseconds, and at least 2^32 past the last known number; plus a
-- random number up to 2^32 (_era_start). Suppose that an era begins at b and uses n numbers, and that a later
-- era begins at c without knowing them all.
--   It knows b, as a standby that lags by some jobs does: c >= b + 2^32. They collide only if n > 2^32, which
--     takes 12 hours at 100,000 a second, between the last replicated number and the end of the older era,
--     whatever the clock.
--   It does not know b, and the clock is right: b and c are times, and c - b is the time between them, if
--     that is over 71 minutes (2^32 us). It exceeds n, because nobody claims a million times a second.
--   Neither, or less than 71 minutes: b and c differ by the random number. They collide with a probability of
--     about 2n / 2^32, and then a pair repeats only if the same job gets the same number.
-- Job ids do not jump: an id without its claim can't end anything, and defer, which takes ids before the
-- first worker has come, does not look at the era. Ids that a lossy failover has lost are used for other
-- jobs.

-- Identifies the present era, except for the row's xmin. It does not depend on extra_float_digits. A recovery
-- resets the statistics of the background writer and of the archiver. A call of pg_stat_reset_shared resets
-- one of them. So the earlier of the two times changes only if both were reset.
create or replace function queue._era()
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return concat_ws(' ', extract(epoch from pg_postmaster_start_time()),
    extract(epoch from least(pg_stat_get_bgwriter_stat_reset_time(),
      (select a.stats_reset from pg_stat_get_archiver() a))),
    (select d.oid from pg_database d where d.datname = current_database()));
end $$;

-- Whether the sequences are those of the present era.
create or replace function queue._is_era(p_era text)
returns boolean language plpgsql volatile parallel safe security invoker as $$
begin
  return exists (select from queue.installation i where i.era = p_era and i.written = i.xmin);
end $$;

-- Begins the present era.
-- Locks: the caller holds the admission lock, or has just created the tables. Other sessions that take
-- numbers meanwhile know the ending era: they will not take 2^32 of them, so no sequence is set back.
create or replace function queue._begin_era(p_era text)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform setval('queue.claim_seq', queue._era_start((select s.last_value from queue.claim_seq s))),
    setval('queue.worker_id_seq', queue._era_start((select s.last_value from queue.worker_id_seq s)));
  update queue.installation i set era = p_era, up_since = case
    when pg_last_wal_replay_lsn() is not null  -- or in the same start and database as the last era
      or regexp_replace(i.era, ' .* ', ' ') = regexp_replace(p_era, ' .* ', ' ') then clock_timestamp()
    else pg_postmaster_start_time() end;
  -- xmin is now that of this transaction, or of one of its savepoints.
  update queue.installation i set written = i.xmin;
end $$;

-- The next number after p_last.
create or replace function queue._era_start(p_last bigint)
returns bigint language plpgsql volatile parallel unsafe security invoker as $$
begin
  return greatest((extract(epoch from clock_timestamp()) * 1000000)::bigint, p_last + 4294967296)
    + (random() * 4294967296)::bigint;
end $$;

-- Since when workers can reach the server, so that their silence means something. That is the start of the
-- server. If the server was promoted, or the last era was of the same start, it is the beginning of the era:
-- a recovery came between, and nobody knows when it was done. If all workers were found silent at once
-- (work/silence.sql), it is that time. The first worker that comes begins the era. Before that no worker
-- counts as dead.
create or replace function queue._up_since()
returns timestamptz language plpgsql stable parallel safe security invoker as $$
begin
  return (select case when i.era = queue._era() and i.written = i.xmin then i.up_since
    else clock_timestamp() end
          from queue.installation i);
end $$;
