-- Jobs that must not start after a time.
create table queue.expiry (
  id bigint not null,
  at timestamptz not null,
  constraint expiry_pkey primary key (id)
);
create index expiry_at_idx on queue.expiry (at, id);
