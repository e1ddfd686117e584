-- Admitted jobs that wait for something other than their turn at a lock. need_id: the job waits until this
-- need changes (admit/needs.sql). For a job that waits for a slot, the row has the columns of
-- queue.active_job (deadline: its place among the waiting jobs, a tag if there are shares) and these. at: for
-- the first job of a lane that waits for a key's rate, the time at which the rate allows more starts. weight:
-- how many slots of the key it takes, NULL for 1. moves: if it has several keys (key is the first full one),
-- how often the job has changed lines, else NULL. reserved, reserved_at: the keys of which it has reserved
-- slots, and since when; moves then also counts the looks at its key (admit/reserve.sql). task: the job's.
-- For the weight of a parked job see _park (admit/gates.sql).
create table queue.waiting (
  id bigint not null,
  at timestamptz,
  need_id bigint,
  deadline timestamptz,
  lane integer,
  flags smallint,
  attempt smallint,
  moves smallint,
  weight integer,
  reason text not null,
  key text collate "C",
  task text collate "C",
  reserved text[],
  reserved_at timestamptz,
  constraint waiting_pkey primary key (id),
  constraint waiting_reason_check check (reason in ('schedule', 'needs', 'upstream_failed', 'slot', 'held',
    'signal', 'task_paused', 'parked', 'moving'))
);

create index waiting_due_idx on queue.waiting (at, id) where at is not null;

create index waiting_slot_idx on queue.waiting (key, lane, deadline, id) where reason = 'slot';

-- These two are for workers with tasks (work/claim_filtered.sql). Their conditions are written so that no
-- other index serves such a query: with old statistics, the one above may look as good.
create index waiting_task_idx on queue.waiting (key, lane, task, deadline, id) where left(reason, 4) = 'slot';

create index waiting_weight_idx on queue.waiting (key, lane, weight, deadline, id)
where left(reason, 4) = 'slot' and weight is not null;

-- One job of each lane of a key whose rate allows no start now.
create index waiting_rate_idx on queue.waiting (lane) where reason = 'slot' and at is not null;

create index waiting_reserved_idx on queue.waiting (key) where reserved is not null;

create index waiting_parked_idx on queue.waiting (id) where reason = 'parked';

create index waiting_unpark_idx on queue.waiting (weight, id) where reason = 'parked' and weight is not null;

-- All unfinished jobs that have a lock. The first by id has the turn (has_turn is set only if the job's
-- position does not show this, see admit/locks.sql). is_passed: the job waits for nothing but its turn.
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

-- For each key: how many claims use its slots (used, of slots), and for each of its lanes how many jobs are
-- ready and how many wait for a slot; no waiting job has a (deadline, id) below (low_deadlines, lows). A
-- newer row replaces the row, and reads begin with the newest (see queue.cursor). used, ready: a job counts
-- as many times as it has weight. slots: 2147483647 means no limit. The key's first letter is its kind: k for
-- a concurrency key, m for a lock with mutex jobs, q for a queue. limit_id: the newest of the key's jobs,
-- whose limits apply unless configure_key sets others.
create table queue.semaphore (
  key text collate "C" not null,
  tick bigint not null,
  limit_id bigint not null,
  slots integer not null,
  rate_limit integer,
  rate_per interval,
  used integer not null,
  lanes integer[] not null,
  ready integer[] not null,
  waiting integer[] not null,
  lows bigint[] not null,
  low_deadlines timestamptz[] not null,
  constraint semaphore_pkey primary key (key, tick)
);

create index semaphore_idle_idx on queue.semaphore (tick) where used = 0 and lanes = '{}';

-- The needs of admitted jobs. mode: the bits any, proceed and ended. claim: under ended, the claim that
-- awaited the needed job; NULL: the need holds the job no longer, because a retry has forgotten that step, or
-- because the job is a fork. is_open: the need was not satisfied when the job's last run began (mode any).
-- deleted_state: the needed job's state when it was pruned, or deleted by force.
create table queue.need (
  job_id bigint not null,
  need_id bigint not null,
  claim bigint,
  is_open boolean not null default true,
  mode smallint not null,
  deleted_state text,
  constraint need_pkey primary key (job_id, need_id),
  constraint need_deleted_check check (deleted_state in ('succeeded', 'failed'))
);

-- The condition keeps plans from using this index to look up a job_id.
create index need_id_idx on queue.need (need_id, job_id) where need_id is not null;

-- Its last value is the largest id that any job has ever needed. It is a sequence, so that reading it meets
-- no dead rows.
create sequence queue.needed_seq minvalue 0 start 0;

-- Jobs that must not start after a time.
create table queue.expiry (
  id bigint not null,
  at timestamptz not null,
  constraint expiry_pkey primary key (id)
);

create index expiry_at_idx on queue.expiry (at, id);

-- Succeeded jobs that an operator has deleted. A row is kept while an open transaction may name the job as a
-- need: until all transactions below `until` have ended.
create table queue.deleted (
  id bigint not null,
  until xid8,
  constraint deleted_pkey primary key (id)
);

-- Ended claims for the next admission to settle: appended like the log, and read with the same cursor. Also
-- signals (job_id: the job that got one), events and groups (job_id: the negative number of one).
create table queue.pending_settlement (
  xid xid8 not null default pg_current_xact_id(),
  seq bigint generated by default as identity,
  job_id bigint not null,
  kind text not null,
  flags smallint not null,
  payload jsonb,
  constraint pending_settlement_pkey primary key (xid, seq)
);

-- Open settlements: those that the cursor has not passed, and those that were shelved. The
-- view finds them by equal xids and from next_xid on, so that dead rows cost nothing while a transaction that
-- stays open keeps them. Private.
create view queue.unsettled as
select h.xid, h.seq, h.job_id, h.kind, h.flags, h.payload
from queue.cursor_now k
cross join lateral (
  select h.* from queue.pending_settlement h where h.xid >= k.next_xid
  union all
  select h.* from queue.pending_settlement h where h.xid = any (k.in_flight)
  union all
  select h.* from queue.pending_settlement h where h.xid = {{shelved}}) h;

create sequence queue.tick_seq;
