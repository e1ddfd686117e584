-- Cron expressions: grammar, day rule, daylight saving, refusals, speed.

begin;
select plan(230);

-- the session's own time zone must not matter
set local timezone = 'Australia/Lord_Howe';

-- The next runs after an instant of UTC, as local times.
create function pg_temp.runs(cron text, zone text, after text, n int) returns text
language sql as $$
  select string_agg(to_char(r at time zone zone, 'YYYY-MM-DD HH24:MI:SS'), ', ' order by r)
  from queue.next_runs(cron, zone, (after || 'Z')::timestamptz, n) r
$$;

-- The same, and the first of them in UTC.
create function pg_temp.runs_and_first(cron text, zone text, after text, n int) returns text
language sql as $$
  select pg_temp.runs(cron, zone, after, n) || ' / '
    || to_char(min(r) at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS')
  from queue.next_runs(cron, zone, (after || 'Z')::timestamptz, 1) r
$$;

-- SQLSTATE, and the part that is to blame.
create function pg_temp.refusal(
  cron text, zone text default 'UTC', after timestamptz default now(), n int default 1)
returns text language plpgsql as $$
declare
  v_detail text;
  v_hint text;
begin
  perform queue.next_runs(cron, zone, after, n);
  return 'accepted';
exception when others then
  get stacked diagnostics v_detail = pg_exception_detail, v_hint = pg_exception_hint;
  return sqlstate || case when v_hint = '' then ' without a hint ' else ' ' end
    || coalesce(substring(v_detail, '^cron: .*'', ([a-z ]+: .*)$'), v_detail);
end $$;

-- Grammar. 2024-02-28 is a Wednesday of a leap year.
select is(pg_temp.runs(cron, 'UTC', '2024-02-28 12:00:00', 3), expected, translate(cron, E'\t\n', '  '))
from (values
  ('* * * * *', '2024-02-28 12:01:00, 2024-02-28 12:02:00, 2024-02-28 12:03:00'),
  ('*/25 * * * *', '2024-02-28 12:25:00, 2024-02-28 12:50:00, 2024-02-28 13:00:00'),
  ('5/20 * * * *', '2024-02-28 12:05:00, 2024-02-28 12:25:00, 2024-02-28 12:45:00'),
  ('10-50/20 * * * *', '2024-02-28 12:10:00, 2024-02-28 12:30:00, 2024-02-28 12:50:00'),
  ('7,3,59,3 * * * *', '2024-02-28 12:03:00, 2024-02-28 12:07:00, 2024-02-28 12:59:00'),
  ('58-59,*/40 * * * *', '2024-02-28 12:40:00, 2024-02-28 12:58:00, 2024-02-28 12:59:00'),
  ('*/90 * * * *', '2024-02-28 13:00:00, 2024-02-28 14:00:00, 2024-02-28 15:00:00'),
  ('1-1/4 13 * * *', '2024-02-28 13:01:00, 2024-02-29 13:01:00, 2024-03-01 13:01:00'),
  ('00 09 * * *', '2024-02-29 09:00:00, 2024-03-01 09:00:00, 2024-03-02 09:00:00'),
  ('0 12 * * *', '2024-02-29 12:00:00, 2024-03-01 12:00:00, 2024-03-02 12:00:00'),
  (E' 0\t 12  * *\n* ', '2024-02-29 12:00:00, 2024-03-01 12:00:00, 2024-03-02 12:00:00'),
  ('30 0 12 * * *', '2024-02-28 12:00:30, 2024-02-29 12:00:30, 2024-03-01 12:00:30'),
  ('*/40 * * * * *', '2024-02-28 12:00:40, 2024-02-28 12:01:00, 2024-02-28 12:01:40'),
  ('59 59 23 * * *', '2024-02-28 23:59:59, 2024-02-29 23:59:59, 2024-03-01 23:59:59'),
  ('0 9 * * MON-FRI', '2024-02-29 09:00:00, 2024-03-01 09:00:00, 2024-03-04 09:00:00'),
  ('0 9 * * mon,Thu', '2024-02-29 09:00:00, 2024-03-04 09:00:00, 2024-03-07 09:00:00'),
  ('0 9 * * 0', '2024-03-03 09:00:00, 2024-03-10 09:00:00, 2024-03-17 09:00:00'),
  ('0 9 * * 7', '2024-03-03 09:00:00, 2024-03-10 09:00:00, 2024-03-17 09:00:00'),
  ('0 9 * * 5-7', '2024-03-01 09:00:00, 2024-03-02 09:00:00, 2024-03-03 09:00:00'),
  ('0 9 * * FRI-SUN', '2024-03-01 09:00:00, 2024-03-02 09:00:00, 2024-03-03 09:00:00'),
  ('0 9 * * SUN-SUN', '2024-03-03 09:00:00, 2024-03-10 09:00:00, 2024-03-17 09:00:00'),
  ('0 9 * * SUN-MON', '2024-03-03 09:00:00, 2024-03-04 09:00:00, 2024-03-10 09:00:00'),
  ('0 9 * * */3', '2024-03-02 09:00:00, 2024-03-03 09:00:00, 2024-03-06 09:00:00'),
  ('0 9 * * 5/2', '2024-03-01 09:00:00, 2024-03-03 09:00:00, 2024-03-08 09:00:00'),
  ('0 9 1 JAN,apr *', '2024-04-01 09:00:00, 2025-01-01 09:00:00, 2025-04-01 09:00:00'),
  ('0 9 1 MAR-May/2 *', '2024-03-01 09:00:00, 2024-05-01 09:00:00, 2025-03-01 09:00:00'),
  ('0 9 31 * *', '2024-03-31 09:00:00, 2024-05-31 09:00:00, 2024-07-31 09:00:00'),
  ('0 9 29 2 *', '2024-02-29 09:00:00, 2028-02-29 09:00:00, 2032-02-29 09:00:00'),
  ('0 9 L * *', '2024-02-29 09:00:00, 2024-03-31 09:00:00, 2024-04-30 09:00:00'),
  ('0 9 L 2 *', '2024-02-29 09:00:00, 2025-02-28 09:00:00, 2026-02-28 09:00:00'),
  ('0 9 1,l * *', '2024-02-29 09:00:00, 2024-03-01 09:00:00, 2024-03-31 09:00:00'),
  ('0 9 L-3 * *', '2024-03-28 09:00:00, 2024-04-27 09:00:00, 2024-05-28 09:00:00'),
  ('0 9 L-30 * *', '2024-03-01 09:00:00, 2024-05-01 09:00:00, 2024-07-01 09:00:00'),
  ('0 9 L-28 2 *', '2028-02-01 09:00:00, 2032-02-01 09:00:00, 2036-02-01 09:00:00'),
  ('0 9 LW * *', '2024-02-29 09:00:00, 2024-03-29 09:00:00, 2024-04-30 09:00:00'),
  ('0 9 * * 5L', '2024-03-29 09:00:00, 2024-04-26 09:00:00, 2024-05-31 09:00:00'),
  ('0 9 * * FriL', '2024-03-29 09:00:00, 2024-04-26 09:00:00, 2024-05-31 09:00:00'),
  ('0 9 * * THUL', '2024-02-29 09:00:00, 2024-03-28 09:00:00, 2024-04-25 09:00:00'),
  ('0 9 * * 7L', '2024-03-31 09:00:00, 2024-04-28 09:00:00, 2024-05-26 09:00:00'),
  ('0 9 * * MON#1', '2024-03-04 09:00:00, 2024-04-01 09:00:00, 2024-05-06 09:00:00'),
  ('0 9 * * 4#5', '2024-02-29 09:00:00, 2024-05-30 09:00:00, 2024-08-29 09:00:00'),
  ('0 9 * * SUN#1,WED,SATL', '2024-03-03 09:00:00, 2024-03-06 09:00:00, 2024-03-13 09:00:00'),
  -- day fields: either where neither begins with an asterisk, else both
  ('0 9 1 * MON', '2024-03-01 09:00:00, 2024-03-04 09:00:00, 2024-03-11 09:00:00'),
  ('0 9 15 * *', '2024-03-15 09:00:00, 2024-04-15 09:00:00, 2024-05-15 09:00:00'),
  ('0 9 1-7 * */7', '2024-03-03 09:00:00, 2024-04-07 09:00:00, 2024-05-05 09:00:00'),
  ('0 9 */15 * FRI', '2024-03-01 09:00:00, 2024-05-31 09:00:00, 2024-08-16 09:00:00'),
  ('0 9 1 * 1,*', '2024-02-29 09:00:00, 2024-03-01 09:00:00, 2024-03-02 09:00:00'),
  ('0 9 L * MON#1', '2024-02-29 09:00:00, 2024-03-04 09:00:00, 2024-03-31 09:00:00'),
  ('0 9 30 2 FRI', '2025-02-07 09:00:00, 2025-02-14 09:00:00, 2025-02-21 09:00:00'),
  -- nicknames and intervals
  ('@hourly', '2024-02-28 13:00:00, 2024-02-28 14:00:00, 2024-02-28 15:00:00'),
  ('@daily', '2024-02-29 00:00:00, 2024-03-01 00:00:00, 2024-03-02 00:00:00'),
  ('@midnight', '2024-02-29 00:00:00, 2024-03-01 00:00:00, 2024-03-02 00:00:00'),
  ('@weekly', '2024-03-03 00:00:00, 2024-03-10 00:00:00, 2024-03-17 00:00:00'),
  ('@Monthly', '2024-03-01 00:00:00, 2024-04-01 00:00:00, 2024-05-01 00:00:00'),
  ('@yearly', '2025-01-01 00:00:00, 2026-01-01 00:00:00, 2027-01-01 00:00:00'),
  ('@ANNUALLY', '2025-01-01 00:00:00, 2026-01-01 00:00:00, 2027-01-01 00:00:00'),
  ('every 90 seconds', '2024-02-28 12:01:30, 2024-02-28 12:03:00, 2024-02-28 12:04:30'),
  ('Every  45 Minutes', '2024-02-28 12:45:00, 2024-02-28 13:30:00, 2024-02-28 14:15:00'),
  ('every 7 hours', '2024-02-28 17:00:00, 2024-02-29 00:00:00, 2024-02-29 07:00:00'),
  ('every 2 days', '2024-02-29 00:00:00, 2024-03-02 00:00:00, 2024-03-04 00:00:00'),
  ('every 1 hour', '2024-02-28 13:00:00, 2024-02-28 14:00:00, 2024-02-28 15:00:00'),
  ('every minute', '2024-02-28 12:01:00, 2024-02-28 12:02:00, 2024-02-28 12:03:00')
) x(cron, expected);

select is(
  array(select extract(epoch from r)::bigint % 25200 from queue.next_runs('every 7 hours') r),
  array[0, 0, 0, 0, 0]::bigint[], 'every counts from the Unix epoch');
select is(pg_temp.runs('every 7 days', 'UTC', '1969-12-20 00:00:00', 3),
  '1969-12-25 00:00:00, 1970-01-01 00:00:00, 1970-01-08 00:00:00', 'before the epoch too');
select is(pg_temp.runs('every 7 hours', 'Asia/Kathmandu', '1970-01-01 00:00:00', 1),
  '1970-01-01 12:30:00', 'whatever the time zone');

-- Years with their ends and leap days.
select is(pg_temp.runs(cron, 'UTC', after, n), expected, cron || ' after ' || after)
from (values
  ('0 0 29 2 *', '1896-03-01 00:00:00', 2, '1904-02-29 00:00:00, 1908-02-29 00:00:00'),
  ('0 0 29 2 *', '2096-03-01 00:00:00', 2, '2104-02-29 00:00:00, 2108-02-29 00:00:00'),
  ('0 0 29 2 *', '1999-12-31 23:59:59', 1, '2000-02-29 00:00:00'),
  ('0 0 29 2 *', '2396-03-01 00:00:00', 1, '2400-02-29 00:00:00'),
  ('0 0 29 2 */7', '2072-01-01 00:00:00', 2, '2088-02-29 00:00:00, 2128-02-29 00:00:00'),
  ('0 0 */28 2 MON', '2076-03-01 00:00:00', 2, '2077-02-01 00:00:00, 2083-02-01 00:00:00'),
  ('59 59 23 31 12 *', '2024-12-31 23:59:58', 2, '2024-12-31 23:59:59, 2025-12-31 23:59:59'),
  ('0 0 1 1 *', '2024-12-31 23:59:59.999999', 1, '2025-01-01 00:00:00'),
  ('* * * * * *', '2024-06-30 23:59:58.5', 2, '2024-06-30 23:59:59, 2024-07-01 00:00:00'),
  ('0 0 31 12 *', '0002-01-01 00:00:00', 1, '0002-12-31 00:00:00'),
  ('@yearly', '9999-12-31 23:59:59', 1, '10000-01-01 00:00:00')
) x(cron, after, n, expected);

-- Daylight saving. Starts are in UTC; runs in local time and, after the slash, the first in UTC.
select is(pg_temp.runs_and_first(cron, zone, after, n), expected,
  format('%s: %s after %s', zone, cron, after))
from (values
  -- an hour is skipped: fixed times run at the first instant after it, all of them once
  ('30 2 * * *', 'Europe/Paris', '2024-03-30 12:00:00', 2,
   '2024-03-31 03:00:00, 2024-04-01 02:30:00 / 2024-03-31 01:00:00'),
  ('0,20,40 2 * * *', 'Europe/Paris', '2024-03-30 12:00:00', 2,
   '2024-03-31 03:00:00, 2024-04-01 02:00:00 / 2024-03-31 01:00:00'),
  ('0 2,3 * * *', 'Europe/Paris', '2024-03-30 12:00:00', 2,
   '2024-03-31 03:00:00, 2024-04-01 02:00:00 / 2024-03-31 01:00:00'),
  ('30 2,3 * * *', 'Europe/Paris', '2024-03-31 00:59:59', 2,
   '2024-03-31 03:00:00, 2024-03-31 03:30:00 / 2024-03-31 01:00:00'),
  ('30 2,3 * * *', 'Europe/Paris', '2024-03-31 01:00:00', 2,
   '2024-03-31 03:30:00, 2024-04-01 02:30:00 / 2024-03-31 01:30:00'),
  ('15 30 2 * * *', 'America/New_York', '2024-03-09 12:00:00', 2,
   '2024-03-10 03:00:00, 2024-03-11 02:30:15 / 2024-03-10 07:00:00'),
  ('0-59 2 * * 0', 'America/New_York', '2024-03-09 12:00:00', 2,
   '2024-03-10 03:00:00, 2024-03-17 02:00:00 / 2024-03-10 07:00:00'),
  -- elapsed time: there is no such hour that day
  ('*/30 2 * * *', 'Europe/Paris', '2024-03-30 12:00:00', 2,
   '2024-04-01 02:00:00, 2024-04-01 02:30:00 / 2024-04-01 00:00:00'),
  ('*/30 * * * *', 'Europe/Paris', '2024-03-31 00:00:00', 3,
   '2024-03-31 01:30:00, 2024-03-31 03:00:00, 2024-03-31 03:30:00 / 2024-03-31 00:30:00'),
  ('15 */2 * * *', 'Europe/Paris', '2024-03-30 22:30:00', 2,
   '2024-03-31 00:15:00, 2024-03-31 04:15:00 / 2024-03-30 23:15:00'),
  ('@hourly', 'Europe/Paris', '2024-03-31 00:00:00', 2,
   '2024-03-31 03:00:00, 2024-03-31 04:00:00 / 2024-03-31 01:00:00'),
  -- an hour comes twice: fixed times run in its first pass
  ('30 2 * * *', 'Europe/Paris', '2024-10-26 12:00:00', 2,
   '2024-10-27 02:30:00, 2024-10-28 02:30:00 / 2024-10-27 00:30:00'),
  ('30 2 * * *', 'Europe/Paris', '2024-10-27 00:30:00', 1,
   '2024-10-28 02:30:00 / 2024-10-28 01:30:00'),
  ('30 2 * * *', 'Europe/Paris', '2024-10-27 01:10:00', 1,
   '2024-10-28 02:30:00 / 2024-10-28 01:30:00'),
  ('0,30 2,3 * * *', 'Europe/Paris', '2024-10-27 00:15:00', 3,
   '2024-10-27 02:30:00, 2024-10-27 03:00:00, 2024-10-27 03:30:00 / 2024-10-27 00:30:00'),
  ('0 0-59 1 * * 0', 'America/New_York', '2024-11-03 05:58:30', 2,
   '2024-11-03 01:59:00, 2024-11-10 01:00:00 / 2024-11-03 05:59:00'),
  -- elapsed time runs in both
  ('*/30 2 * * *', 'Europe/Paris', '2024-10-26 12:00:00', 5,
   '2024-10-27 02:00:00, 2024-10-27 02:30:00, 2024-10-27 02:00:00, 2024-10-27 02:30:00, '
   '2024-10-28 02:00:00 / 2024-10-27 00:00:00'),
  ('@hourly', 'Europe/Paris', '2024-10-27 00:00:00', 2,
   '2024-10-27 02:00:00, 2024-10-27 03:00:00 / 2024-10-27 01:00:00'),
  ('*/15 * * * *', 'Europe/Paris', '2024-10-27 00:50:00', 2,
   '2024-10-27 02:00:00, 2024-10-27 02:15:00 / 2024-10-27 01:00:00'),
  -- midnight is skipped, or comes twice
  ('0 0 * * *', 'America/Sao_Paulo', '2018-11-03 12:00:00', 2,
   '2018-11-04 01:00:00, 2018-11-05 00:00:00 / 2018-11-04 03:00:00'),
  ('0 0 4 11 *', 'America/Sao_Paulo', '2018-11-03 12:00:00', 2,
   '2018-11-04 01:00:00, 2019-11-04 00:00:00 / 2018-11-04 03:00:00'),
  ('30 23 * * *', 'America/Sao_Paulo', '2018-02-17 12:00:00', 2,
   '2018-02-17 23:30:00, 2018-02-18 23:30:00 / 2018-02-18 01:30:00'),
  ('0 0 * * *', 'Africa/Cairo', '2024-04-25 12:00:00', 2,
   '2024-04-26 01:00:00, 2024-04-27 00:00:00 / 2024-04-25 22:00:00'),
  ('0 0 * * 0', 'Asia/Beirut', '2025-03-29 12:00:00', 2,
   '2025-03-30 01:00:00, 2025-04-06 00:00:00 / 2025-03-29 22:00:00'),
  ('* 1 * * */7', 'Asia/Beirut', '2025-03-29 12:00:00', 2,
   '2025-03-30 01:00:00, 2025-03-30 01:01:00 / 2025-03-29 22:00:00'),
  -- shifts of 30 minutes and of two hours; offsets of 45 minutes; changes at 0:01
  ('15 2 * * *', 'Australia/Lord_Howe', '2024-10-05 12:00:00', 2,
   '2024-10-06 02:30:00, 2024-10-07 02:15:00 / 2024-10-05 15:30:00'),
  ('45 1 * * *', 'Australia/Lord_Howe', '2024-04-06 12:00:00', 2,
   '2024-04-07 01:45:00, 2024-04-08 01:45:00 / 2024-04-06 14:45:00'),
  ('45 * * * *', 'Australia/Lord_Howe', '2024-04-06 14:00:00', 3,
   '2024-04-07 01:45:00, 2024-04-07 01:45:00, 2024-04-07 02:45:00 / 2024-04-06 14:45:00'),
  ('30 2 * * *', 'Antarctica/Troll', '2024-03-30 12:00:00', 2,
   '2024-03-31 03:00:00, 2024-04-01 02:30:00 / 2024-03-31 01:00:00'),
  ('0 9 * * *', 'Asia/Kathmandu', '2024-01-01 00:00:00', 1,
   '2024-01-01 09:00:00 / 2024-01-01 03:15:00'),
  ('0 3 * * *', 'Pacific/Chatham', '2024-09-28 00:00:00', 2,
   '2024-09-29 03:45:00, 2024-09-30 03:00:00 / 2024-09-28 14:00:00'),
  ('*/30 0 * * *', 'America/St_Johns', '2007-11-03 12:00:00', 3,
   '2007-11-04 00:00:00, 2007-11-04 00:00:00, 2007-11-04 00:30:00 / 2007-11-04 02:30:00'),
  -- a day is skipped, and one comes twice
  ('0 9 * * *', 'Pacific/Apia', '2011-12-29 12:00:00', 3,
   '2011-12-29 09:00:00, 2011-12-31 00:00:00, 2011-12-31 09:00:00 / 2011-12-29 19:00:00'),
  ('0 0 30 * *', 'Pacific/Apia', '2011-12-29 12:00:00', 2,
   '2011-12-31 00:00:00, 2012-01-30 00:00:00 / 2011-12-30 10:00:00'),
  ('0 0 30 12 */5', 'Pacific/Apia', '2011-12-29 12:00:00', 1,
   '2011-12-31 00:00:00 / 2011-12-30 10:00:00'),
  ('*/30 9 * * *', 'Pacific/Apia', '2011-12-30 09:00:00', 1,
   '2011-12-31 09:00:00 / 2011-12-30 19:00:00'),
  ('0 12 * * *', 'Pacific/Kwajalein', '1969-09-29 12:00:00', 3,
   '1969-09-30 12:00:00, 1969-10-01 12:00:00, 1969-10-02 12:00:00 / 1969-09-30 01:00:00'),
  -- offsets of seconds, before time zones were agreed on; far years
  ('0 9 * * *', 'Europe/Paris', '1890-01-01 12:00:00', 1,
   '1890-01-02 09:00:00 / 1890-01-02 08:50:39'),
  ('30 2 * * *', 'Europe/Paris', '2399-03-27 12:00:00', 2,
   '2399-03-28 03:00:00, 2399-03-29 02:30:00 / 2399-03-28 01:00:00'),
  ('0 0 29 2 *', 'America/New_York', '2396-03-01 12:00:00', 1,
   '2400-02-29 00:00:00 / 2400-02-29 05:00:00')
) x(cron, zone, after, n, expected);

-- Whatever the expression, runs are distinct, ascending and later than the start.
select is((
  select count(*)
  from (
    select r as run, lag(r, 1, '2024-10-26 18:00Z') over (order by i) as previous
    from queue.next_runs(cron, 'Europe/Paris', '2024-10-26 18:00Z', 1000)
      with ordinality as x(r, i)) y
  where run <= previous), 0::bigint, 'ascending: ' || cron)
from unnest(array['* * * * *', '*/7 1-3 * * *', '0-59/7 1-3 * * *', '0-59 2 * * *',
                  '*/20 30 2 * * *', '@hourly', 'every 11 minutes']) cron;

-- Refused: the part to blame is named.
select is(pg_temp.refusal(cron), '22023 ' || blame, coalesce(cron, 'NULL'))
from (values
  (null, 'cron: NULL'),
  ('', 'cron: '''''),
  ('   ', 'cron: ''   '''),
  ('* * * *', 'cron: ''* * * *'''),
  ('0 0 1 1 * 0 2030', 'cron: ''0 0 1 1 * 0 2030'''),
  ('60 * * * *', 'minute: ''60'''),
  ('60 * * * * *', 'second: ''60'''),
  ('-1 * * * *', 'minute: ''-1'''),
  ('* 24 * * *', 'hour: ''24'''),
  ('* * 0 * *', 'day of month: ''0'''),
  ('* * 32 * *', 'day of month: ''32'''),
  ('* * * 0 *', 'month: ''0'''),
  ('* * * 13 *', 'month: ''13'''),
  ('* * * * 8', 'day of week: ''8'''),
  ('* * * MON *', 'month: ''MON'''),
  ('* * * * JAN', 'day of week: ''JAN'''),
  ('* * * * MONDAY', 'day of week: ''MONDAY'''),
  ('MON * * * *', 'minute: ''MON'''),
  ('*/0 * * * *', 'minute: ''*/0'''),
  ('*/ * * * *', 'minute: ''*/'''),
  ('/5 * * * *', 'minute: ''/5'''),
  ('*/5/5 * * * *', 'minute: ''*/5/5'''),
  ('*-5 * * * *', 'minute: ''*-5'''),
  ('5- * * * *', 'minute: ''5-'''),
  ('1-2-3 * * * *', 'minute: ''1-2-3'''),
  ('1,,2 * * * *', 'minute: '''''),
  (', * * * *', 'minute: '''''),
  ('5-64/30 * * * *', 'minute: ''5-64/30'''),
  ('1.5 * * * *', 'minute: ''1.5'''),
  ('99999999999999999999 * * * *', 'minute: ''99999999999999999999'''),
  ('٣ * * * *', 'minute: ''٣'''),
  ('0 22-2 * * *', 'hour: ''22-2'''),
  ('0 0 * * SAT-2', 'day of week: ''SAT-2'''),
  ('0 0 * * 7-1', 'day of week: ''7-1'''),
  ('0 0 ? * MON', 'day of month: ''?'''),
  ('0 0 15W * *', 'day of month: ''15W'''),
  ('0 0 L-0 * *', 'day of month: ''L-0'''),
  ('0 0 L-31 * *', 'day of month: ''L-31'''),
  ('0 0 1-L * *', 'day of month: ''1-L'''),
  ('0 0 * * L', 'day of week: ''L'''),
  ('0 0 * * L5', 'day of week: ''L5'''),
  ('0 0 * * 8L', 'day of week: ''8L'''),
  ('0 0 * * MON#6', 'day of week: ''MON#6'''),
  ('0 0 * * MON#0', 'day of week: ''MON#0'''),
  ('L * * * *', 'minute: ''L'''),
  ('H * * * *', 'minute: ''H'''),
  ('@reboot', 'cron: ''@reboot'''),
  ('@every 5m', 'cron: ''@every 5m'''),
  ('every 0 seconds', 'cron: ''every 0 seconds'''),
  ('every -1 seconds', 'cron: ''every -1 seconds'''),
  ('every 2 weeks', 'cron: ''every 2 weeks'''),
  ('every 5000 days', 'cron: ''every 5000 days'''),
  ('every 90', 'cron: ''every 90'''),
  ('30 2 30 2 *', 'dates: ''30 2 *'''),
  ('30 2 31 2,4,6,9,11 *', 'dates: ''31 2,4,6,9,11 *'''),
  ('30 2 31 FEB */2', 'dates: ''31 FEB */2'''),
  ('30 2 */20 4 MON#4', 'dates: ''*/20 4 MON#4'''),
  ('30 2 L-29 2 *', 'dates: ''L-29 2 *''')
) x(cron, blame);

select is(pg_temp.refusal('0 0 */2 2 MON#5'), 'accepted',
  'a 29 February that is a Monday comes, if rarely');
select matches(pg_temp.refusal(repeat('1,', 600) || '1 * * * *'), '^22023 cron: ',
  'at most 1,000 bytes');
select throws_ok($$select queue.next_runs('0 22-2 * * *')$$, '22023', 'invalid cron expression',
  'the message is fixed');

select is(pg_temp.refusal('* 2 * 3 SUN#2', 'America/New_York', '2024-01-01', 1),
  '22023 cron: ''* 2 * 3 SUN#2''', 'elapsed time that is always skipped ends in an error');
select is(pg_temp.runs('* 2 * 3 SUN#2', 'UTC', '2024-01-01 00:00:00', 1), '2024-03-10 02:00:00',
  'and is well elsewhere');
select is(pg_temp.runs('0 2 * 3 SUN#2', 'America/New_York', '2024-01-01 00:00:00', 1),
  '2024-03-10 03:00:00', 'as is the fixed time');

-- Time zones: names only, by PostgreSQL's own data.
select is(pg_temp.refusal('* * * * *', zone), '22023 timezone: ' || coalesce(zone, 'NULL'),
  'time zone ' || coalesce(zone, 'NULL'))
from unnest(array[null, '', ' ', 'Mars/Olympus', 'Europe/Paris ', 'CET', 'cest', 'EST', 'UTC+3',
                  '+02:00', '3', 'Etc/GMT+13', 'Etc/GMT-15', 'Foo/Bar5', '<x>5']) zone;
select is(pg_temp.refusal('* * * * *', zone), 'accepted', 'time zone ' || zone)
from unnest(array['UTC', 'utc', 'GMT', 'Etc/UTC', 'europe/paris', 'Etc/GMT+12',
                  'Etc/GMT-14', 'EST5EDT', 'America/Argentina/Buenos_Aires', 'Japan']) zone;
select is(pg_temp.runs('0 9 * * *', 'Etc/GMT+3', '2024-01-01 00:00:00', 1), '2024-01-01 09:00:00',
  'Etc/GMT+3 is three hours behind');

-- The other arguments.
select is(pg_temp.refusal('* * * * *', n => n), '22023 n: ' || coalesce(n::text, 'NULL'),
  'n ' || coalesce(n::text, 'NULL'))
from unnest(array[null, 0, -1, 10001, 2147483647]) n;
select is((select count(*) from queue.next_runs('* * * * *', n => 10000)), 10000::bigint,
  'n up to 10,000');
select is((select count(*) from queue.next_runs('@daily')), 5::bigint, 'five runs by default');
select ok((select min(r) > now() from queue.next_runs('* * * * * *') r), 'after now by default');
select matches(pg_temp.refusal('* * * * *', 'UTC', after), '^22023 after: ',
  'after ' || coalesce(after::text, 'NULL'))
from unnest(array[null, 'infinity', '-infinity', '0001-01-01 BC', '10000-01-01 00:00Z']
  ::timestamptz[]) after;

-- Kept numbers give the same runs as the text.
select is(queue._cron_next(queue._cron_parse('30 2 * * *'), 'Europe/Paris', '2024-03-30 12:00Z'),
  '2024-03-31 01:00Z'::timestamptz, 'parsed once, computed often');

-- Speed: generous bounds, some fifteen times what is measured.
select performs_ok($$select queue.next_runs('0 0 29 2 *', 'Europe/Paris', '2096-03-01', 1)$$, 20,
  'once in 8 years');
select performs_ok($$select queue.next_runs('* * 29 2 */7', 'Europe/Paris', '2088-03-01', 1)$$, 20,
  'once in 40 years');
select performs_ok($$
  select queue._cron_next(queue._cron_parse(i % 60 || ' 9 * * MON-FRI'), 'Europe/Paris', now())
  from generate_series(1, 1000) i$$, 2000, 'a thousand schedules');

select * from finish();
rollback;
