-- Cron expressions: grammar, day rule, refusals.

begin;
select plan(170);

\ir cron.helpers.psql

-- the session's own time zone must not matter
set local timezone = 'Australia/Lord_Howe';

-- SQLSTATE, and the offending part.
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

-- Refused: the error names the offending part.
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
select is(array(select r at time zone 'UTC' from queue.next_runs('0 0 1 1 *', after => '9997-06-01Z') r), '{9998-01-01,9999-01-01}'::timestamp[],
  'none after the year 9999, which clients may not be able to read');
select is_empty($$select queue.next_runs('every 3650 days', after => '9999-01-01Z')$$, 'also if there are no others');
select ok((select min(r) > now() from queue.next_runs('* * * * * *') r), 'after now by default');
select matches(pg_temp.refusal('* * * * *', 'UTC', after), '^22023 after: ',
  'after ' || coalesce(after::text, 'NULL'))
from unnest(array[null, 'infinity', '-infinity', '0001-01-01 BC', '10000-01-01 00:00Z']
  ::timestamptz[]) after;

select * from finish();
rollback;
