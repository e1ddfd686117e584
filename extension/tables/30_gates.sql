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
create index lock_member_mutex_idx on queue.lock_member (lock, id) where is_mutex;
create index lock_member_turn_idx on queue.lock_member (lock) where has_turn;

-- How many claims run under a key (used, of slots), and per lane how many of its jobs are ready and how many
-- wait for a slot, none with an id below low. Replaced by a newer row, read newest first (see queue.cursor).
-- The key's first letter is its kind: k a concurrency key, m a lock with mutex jobs, q a queue. limit_id:
-- the job that has set slots.
create table queue.semaphore (
  key text collate "C" not null,
  tick bigint not null,
  limit_id bigint not null,
  slots integer not null,
  used integer not null,
  lanes integer[] not null,
  ready integer[] not null,
  waiting integer[] not null,
  lows bigint[] not null,
  constraint semaphore_pkey primary key (key, tick)
);
create index semaphore_idle_idx on queue.semaphore (tick) where used = 0 and lanes = '{}';

-- Who holds a queueing lock. replacing: a replacement is committed and not yet applied.
create table queue.queueing_lock (
  key text collate "C" not null,
  job_id bigint not null,
  replacing bigint,
  constraint queueing_lock_pkey primary key (key)
);
create index queueing_lock_replacing_idx on queue.queueing_lock (key) where replacing is not null;

-- Starts under a queue's rate, as many as its limit, numbered.
create table queue.rate_start (
  queue text collate "C" not null,
  no bigint not null,
  at timestamptz not null,
  constraint rate_start_pkey primary key (queue, no)
);
