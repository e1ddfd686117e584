-- Cron expressions: their meaning, and their next runs (_cron_next, recur/cron_next.sql).
--
-- _cron_parse turns the text into eight numbers, which may be stored and passed to _cron_next later:
--   [1]     seconds between the runs of `every ...`; 0 for cron fields, which follow as bit masks:
--   [2]-[4] second, minute, hour: bit n is the value n
--   [5]     day of month: bits 0-30 are the days 1-31, bits 31-61 are L to L-30, bit 62 is LW
--   [6]     month: bits 0-11
--   [7]     day of week: bits 0-6 are Sunday to Saturday in every week of the month,
--           bits 7n to 7n+6 the n-th such day of it (n is 1-5), bits 42-48 the last one
--   [8]     1: both day fields must match; 2: the expression follows elapsed time
--
-- Daylight saving relies on two facts about time zone data: changes of a zone's offset are more than 48 hours
-- apart, and none is larger than 24 hours. In these functions a timestamptz is an instant, and a timestamp is
-- the local time in the zone.

create or replace function queue.next_runs(
  cron text, timezone text default 'UTC', after timestamptz default pg_catalog.now(),
  n int default 5)
returns setof timestamptz language plpgsql stable parallel unsafe rows 5 security definer
set search_path = pg_catalog, pg_temp as $$
declare
  v_cron bigint[];
  v_run timestamptz := next_runs.after;
begin
  if next_runs.n is null or next_runs.n not between 1 and 10000 then
    perform queue._invalid('n is out of range', 'n is 1 to 10,000.',
      pg_catalog.format('n: %s', coalesce(next_runs.n::text, 'NULL')));
  elsif next_runs.after is null
    or not (next_runs.after >= '0001-01-03 00:00+00' and next_runs.after < '10000-01-01 00:00+00')
  then
    perform queue._invalid('after is out of range', 'after is a time in the years 1 to 9999.',
      pg_catalog.format('after: %s', coalesce(next_runs.after::text, 'NULL')));
  end if;
  v_cron := queue._cron_parse(next_runs.cron);
  perform queue._check_timezone(next_runs.timezone);
  for v_i in 1..next_runs.n loop
    v_run := queue._cron_next(v_cron, next_runs.timezone, v_run);
    if v_run is null and v_i = 1 then
      perform queue._cron_never(next_runs.cron, next_runs.timezone);
    end if;
    exit when v_run is null or v_run >= '10000-01-01 00:00+00';  -- which many clients can't read
    return next v_run;
  end loop;
end $$;
comment on function queue.next_runs(text, text, timestamptz, int) is
  'Returns the next n runs of a cron expression in a time zone, ascending, later than after. It returns'
    ' fewer if the others are after the year 9999.';

-- Parses an expression.
-- Raises: 22023, naming the field and what is allowed there.
-- Invariant: some date matches the result, so every search for one ends.
create or replace function queue._cron_parse(cron text)
returns bigint[] language plpgsql immutable parallel safe security invoker as $$
declare
  v_blanks constant text := pg_catalog.chr(9) || pg_catalog.chr(10) || pg_catalog.chr(13);
  v_text text;
  v_every text[];
  v_fields text[];
  v_cron bigint[];
begin
  if cron is null or pg_catalog.octet_length(cron) > 1000 then
    perform queue._cron_refuse(cron, null, null, null);
  end if;
  v_text := pg_catalog.upper(
    pg_catalog.btrim(pg_catalog.regexp_replace(pg_catalog.translate(cron, v_blanks, '   '), ' +', ' ',
      'g')) collate "C");
  v_every := pg_catalog.regexp_match(
    v_text, '^EVERY (?:([0-9]{1,9}) )?(SECOND|MINUTE|HOUR|DAY)S?$');
  if v_every is not null then
    v_cron := array[
      coalesce(v_every[1], '1')::bigint * case v_every[2]
        when 'SECOND' then 1 when 'MINUTE' then 60 when 'HOUR' then 3600 else 86400 end,
      0, 0, 0, 0, 0, 0, 0];
    if v_cron[1] not between 1 and {{ten_years}} then
      perform queue._cron_refuse(cron, null, null, 'An interval is 1 second to 3,650 days.');
    end if;
    return v_cron;
  end if;

  v_fields := pg_catalog.string_to_array(case v_text
    when '@HOURLY' then '0 * * * *'
    when '@DAILY' then '0 0 * * *'
    when '@MIDNIGHT' then '0 0 * * *'
    when '@WEEKLY' then '0 0 * * 0'
    when '@MONTHLY' then '0 0 1 * *'
    when '@YEARLY' then '0 0 1 1 *'
    when '@ANNUALLY' then '0 0 1 1 *'
    else v_text end, ' ');
  if pg_catalog.cardinality(v_fields) = 5 then
    v_fields := array['0'] || v_fields;
  end if;
  if pg_catalog.cardinality(v_fields) <> 6 then
    perform queue._cron_refuse(cron, null, null, null);
  end if;

  v_cron := array[
    0,
    queue._cron_field(cron, 1, v_fields[1]),
    queue._cron_field(cron, 2, v_fields[2]),
    queue._cron_field(cron, 3, v_fields[3]),
    queue._cron_field(cron, 4, v_fields[4]),
    queue._cron_field(cron, 5, v_fields[5]),
    queue._cron_field(cron, 6, v_fields[6]),
    case when v_fields[4] like '*%' or v_fields[6] like '*%' then 1 else 0 end
    + case when v_fields[2] like '*%' or v_fields[3] like '*%' then 2 else 0 end];

  -- 28 years contain every month with every weekday as its first day, leap years included
  for v_month in 0..335 loop
    if (v_cron[6] >> (v_month % 12)) & 1 = 1
      and queue._cron_days(
        v_cron, pg_catalog.make_date(2000 + v_month / 12, v_month % 12 + 1, 1)) <> 0
    then
      return v_cron;
    end if;
  end loop;
  perform queue._cron_refuse(cron, null, pg_catalog.concat_ws(' ', variadic v_fields[4:6]),
    'No such date exists in any year: change day of month, month or day of week.');
  return null;
end $$;

-- The bit mask of a field, 1 (second) to 6 (day of week), as _cron_parse keeps it.
-- Raises: 22023.
create or replace function queue._cron_field(cron text, field int, spec text)
returns bigint language plpgsql immutable parallel safe security invoker as $$
declare
  v_low constant int := (array[0, 0, 0, 1, 1, 0])[field];
  v_high constant int := (array[59, 59, 23, 31, 12, 7])[field];
  v_names constant text[] := case field
    when 5 then array['JAN', 'FEB', 'MAR', 'APR', 'MAY', 'JUN',
                      'JUL', 'AUG', 'SEP', 'OCT', 'NOV', 'DEC']
    when 6 then array['SUN', 'MON', 'TUE', 'WED', 'THU', 'FRI', 'SAT'] end;
  v_item text;
  v_suffix text;
  v_match text[];
  v_from int;
  v_to int;
  v_step int;
  v_shift int := -v_low;
  v_mask bigint := 0::bigint;
begin
  foreach v_item in array pg_catalog.string_to_array(spec, ',') loop
    if field = 4 and v_item like 'L%' then
      v_match := pg_catalog.regexp_match(v_item, '^L-([1-9]|[12][0-9]|30)$');
      v_mask := v_mask | (1::bigint << case
        when v_match is not null then 31 + v_match[1]::int
        when v_item = 'L' then 31
        when v_item = 'LW' then 62
        else queue._cron_refuse(cron, field, v_item, null) end);
      continue;
    elsif field = 6 then
      v_suffix := coalesce(pg_catalog.substring(v_item, '^(?:[0-7]|[A-Z]{3})(L|#[1-5])$'), '');
      v_shift := case v_suffix
        when '' then 0 when 'L' then 42 else 7 * pg_catalog.right(v_suffix, 1)::int end;
    end if;

    v_match := pg_catalog.regexp_match(
      pg_catalog.left(v_item, pg_catalog.length(v_item) - coalesce(pg_catalog.length(v_suffix), 0)),
      '^(?:([*])|([0-9]{1,4}|[A-Z]{3})(?:-([0-9]{1,4}|[A-Z]{3}))?)(?:/([0-9]{1,4}))?$');
    v_from := case
      when v_match[1] = '*' then v_low
      when v_match[2] ~ '^[0-9]' then v_match[2]::int
      else pg_catalog.array_position(v_names, v_match[2]) - 1 + v_low end;
    v_to := case
      when v_match[1] = '*' then v_high
      when v_match[3] ~ '^[0-9]' then v_match[3]::int
      when v_match[3] = 'SUN' and v_from > 0 then 7
      when v_match[3] is not null then
        pg_catalog.array_position(v_names, v_match[3]) - 1 + v_low
      when v_match[4] is not null then v_high
      else v_from end;
    v_step := coalesce(v_match[4], '1')::int;
    if v_from is null or v_to is null or v_step = 0
      or v_from not between v_low and v_high or v_to not between v_low and v_high
    then
      perform queue._cron_refuse(cron, field, v_item, null);
    elsif v_from > v_to then
      perform queue._cron_refuse(cron, field, v_item, 'A range must ascend: write ' || case
        when field = 6 and v_from = 7 then ''
        when field = 6 then v_from || '-6,'
        else v_from || '-' || v_high || ',' end || v_low || '-' || v_to || ' instead.');
    end if;

    for v_value in v_from..v_to by v_step loop
      v_mask := v_mask
        | (1::bigint << (v_shift + case field when 6 then v_value % 7 else v_value end));
    end loop;
  end loop;
  if v_mask = 0 then
    perform queue._cron_refuse(cron, field, spec, null);
  end if;
  return v_mask;
end $$;

-- Raises: 22023, for an invalid expression. Without its own hint it says what is allowed.
create or replace function queue._cron_refuse(cron text, field int, part text, hint text)
returns int language plpgsql immutable parallel safe security invoker as $$
begin
  perform queue._invalid('invalid cron expression',
    coalesce(hint, case
      when field is null then
        'Give minute, hour, day of month, month and day of week, or these with seconds before '
        'them; or @hourly, @daily, @midnight, @weekly, @monthly, @yearly or @annually; '
        'or every N seconds, minutes, hours or days.'
      else 'Allowed are ' || (array[
        '0-59', '0-59', '0-23', '1-31, L (the last day), L-1 to L-30 and LW (the last weekday)',
        '1-12 and JAN to DEC',
        '0-7 (0 and 7 are Sunday), SUN to SAT, FRI#2 (the second) and FRIL (the last)'])[field]
        || '; *; ranges 1-5; steps */2, 1-5/2 and 1/2; and lists of these, with commas.'
      end),
    pg_catalog.concat_ws(', ',
      'cron: ' || coalesce(pg_catalog.quote_literal(pg_catalog.left(cron, 200)), 'NULL'),
      coalesce((array['second', 'minute', 'hour', 'day of month', 'month', 'day of week'])[field],
        'dates') || ': ' || pg_catalog.quote_literal(pg_catalog.left(part, 100))));
  return null;
end $$;

-- Raises: 22023, for an expression that matches dates but no time that exists in the zone.
create or replace function queue._cron_never(cron text, timezone text)
returns void language plpgsql immutable parallel safe security invoker as $$
begin
  perform queue._cron_refuse(cron, null, null, pg_catalog.format(
    'It never runs: in %s the clocks skip every time that it names.', timezone));
end $$;

-- Refuses unknown time zones. It also refuses names that PostgreSQL accepts but that are no zones:
-- abbreviations, which mean one offset all year (CET would have no summer time), and POSIX rules (UTC+3 would
-- be three hours behind UTC).
-- Raises: 22023.
create or replace function queue._check_timezone(timezone text)
returns void language plpgsql stable parallel unsafe security invoker as $$
begin
  if pg_catalog.upper(timezone) in ('UTC', 'GMT', 'ETC/UTC') then
    return;
  end if;
  if timezone !~ '[0-9]' and not exists (
      select from pg_catalog.pg_timezone_abbrevs a where a.abbrev = pg_catalog.upper(timezone))
    or timezone ~* '^Etc/GMT(0|[+-]0|[+]([1-9]|1[0-2])|-([1-9]|1[0-4]))$'
    or timezone ~* '^(EST5E|CST6C|MST7M|PST8P)DT$'
  then
    begin
      perform pg_catalog.now() at time zone timezone;
      return;
    exception when invalid_parameter_value then
      null;
    end;
  end if;
  perform queue._invalid('unknown time zone',
    'Name a zone of pg_timezone_names, such as UTC or Europe/Paris, not an abbreviation or offset.',
    pg_catalog.format('timezone: %s', coalesce(pg_catalog.left(timezone, 200), 'NULL')));
end $$;
