-- Every unfinished job that has a lock. The first by id has the turn (has_turn is written only where
-- it can't be told from the job's place, see 32_locks.sql); is_passed: nothing else holds it up.
create table queue.lock_member (
  lock text collate "C" not null,
  id bigint not null,
  is_mutex boolean not null,
  is_late boolean not null,
  is_passed boolean not null,
  has_turn boolean not null,
  constraint lock_member_pkey primary key (lock, id)
) with (fillfactor = 80);
create index lock_member_late_idx on queue.lock_member (lock, id) where is_late;
create index lock_member_mutex_idx on queue.lock_member (lock) where is_mutex;

-- How many claims run under a key: replaced by a newer row, read newest first (see queue.cursor).
-- The key's first letter is its kind: k a concurrency key, m a mutex lock, q a queue.
create table queue.semaphore (
  key text collate "C" not null,
  tick bigint not null,
  slots integer not null,
  used integer not null,
  constraint semaphore_pkey primary key (key, tick)
);

-- Per key and lane: how many jobs are ready and how many wait for a slot.
create table queue.key_lane (
  key text collate "C" not null,
  lane integer not null,
  tick bigint not null,
  ready integer not null,
  waiting integer not null,
  constraint key_lane_pkey primary key (key, lane, tick)
);

-- Who holds a queueing lock. replacing: a replacement is committed and not yet applied.
create table queue.queueing_lock (
  key text collate "C" not null,
  job_id bigint not null,
  replacing bigint,
  constraint queueing_lock_pkey primary key (key)
);

-- Starts under a rate, newest first.
create table queue.rate_start (
  queue text collate "C" not null,
  at timestamptz not null,
  seq bigint not null,
  constraint rate_start_pkey primary key (queue, at, seq)
);
