-- Tables with the columns of other queues, each with jobs that wait and one that has ended, for
-- docs/how-to/moving.md.

create table oban_jobs (id bigint primary key, state text, queue text, worker text, args jsonb, priority integer,
  scheduled_at timestamp, cancelled_at timestamp);
insert into oban_jobs values
  (1, 'available', 'mail', 'Shop.Mailer', '{"to": "ann"}', 0, '2020-01-01', null),
  (2, 'scheduled', 'mail', 'Shop.Mailer', '{"to": "bob"}', 3, '2100-01-01', null),
  (3, 'completed', 'mail', 'Shop.Mailer', '{"to": "eve"}', 0, '2020-01-01', null);
create type river_job_state as enum ('available', 'cancelled', 'completed', 'discarded', 'pending', 'retryable',
  'running', 'scheduled');
create table river_job (id bigint primary key, state river_job_state, kind text, queue text, args jsonb,
  priority smallint, scheduled_at timestamptz, finalized_at timestamptz);
insert into river_job values (1, 'retryable', 'mailer', 'mail', '{"to": "ann"}', 1, now(), null),
  (2, 'completed', 'mailer', 'mail', '{"to": "eve"}', 1, now(), now());
create schema pgboss;
create type pgboss.job_state as enum ('created', 'retry', 'active', 'completed', 'cancelled', 'failed');
create table pgboss.job (id uuid default gen_random_uuid(), name text, state pgboss.job_state, data jsonb,
  priority integer, start_after timestamptz default now(), created_on timestamptz default now(), completed_on timestamptz);
insert into pgboss.job (name, state, data, priority) values ('mail', 'created', '{"to": "ann"}', 5),
  ('mail', 'completed', '{"to": "eve"}', 5);
create table task_queue (id bigint, kind text, payload jsonb, is_done boolean);
insert into task_queue values (1, 'mail', '{"to": "ann"}', false), (2, 'mail', '{"to": "eve"}', true);
