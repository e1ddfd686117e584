-- Succeeded jobs that an operator has deleted, as long as a transaction may be under way that names them as
-- needs. until: once every transaction below it has ended none can be.
create table queue.deleted (
  id bigint not null,
  until xid8,
  constraint deleted_pkey primary key (id)
);
