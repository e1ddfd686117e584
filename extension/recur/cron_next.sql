-- The next run of a cron expression: the next matching time in a time zone.

-- The first run later than `after`. NULL if there is none in a hundred years, which happens only for
-- expressions that follow elapsed time, if daylight saving skips every time that they name.
-- Invariant: a run is a whole second.
create or replace function queue._cron_next(cron bigint[], timezone text, after timestamptz)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_after timestamptz := pg_catalog.date_trunc('second', after);
  v_epoch bigint;
begin
  if cron[1] > 0 then
    v_epoch := pg_catalog.date_part('epoch', v_after)::bigint;
    return pg_catalog.to_timestamp(
      (v_epoch - (v_epoch % cron[1] + cron[1]) % cron[1] + cron[1])::double precision);
  elsif timezone = 'UTC' then
    return queue._cron_local(cron, (v_after at time zone 'UTC') + interval '1 second')
      at time zone 'UTC';
  elsif cron[8] & 2 = 0 then
    return queue._cron_next_fixed(cron, timezone, v_after);
  else
    return queue._cron_next_elapsed(cron, timezone, v_after);
  end if;
end $$;

-- The first run later than the whole second `after` of an expression with fixed times. Each matching local
-- time runs once, at the first instant at which clocks have reached it. For every time in a gap that is the
-- first instant after the gap, for a repeated time its first pass. So a local time is still to come if it is
-- later than any that clocks have shown up to `after`. If clocks were set back just before, they have shown
-- later times than the one at `after`.
create or replace function queue._cron_next_fixed(cron bigint[], timezone text, after timestamptz)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_local timestamp := after at time zone timezone;
  v_offset interval := v_local - (after at time zone 'UTC');
  v_earlier timestamptz := after - interval '24 hours';
  v_old_offset interval := (v_earlier at time zone timezone) - (v_earlier at time zone 'UTC');
  v_run timestamptz;
  v_first timestamptz;
begin
  if v_old_offset > v_offset then
    v_local := greatest(v_local, (queue._cron_change(timezone, v_earlier, after)
      at time zone 'UTC') + v_old_offset - interval '1 second');
  end if;
  v_local := queue._cron_local(cron, v_local + interval '1 second');

  -- PostgreSQL reads a repeated time as the second one, and a time in a gap by the old offset.
  v_run := v_local at time zone timezone;
  v_offset := (v_run at time zone timezone) - (v_run at time zone 'UTC');
  v_earlier := v_run - interval '24 hours';
  v_old_offset := (v_earlier at time zone timezone) - (v_earlier at time zone 'UTC');
  if v_old_offset > v_offset then
    v_first := (v_local - v_old_offset) at time zone 'UTC';
    if v_first at time zone timezone = v_local then
      return v_first;
    end if;
  elsif v_old_offset < v_offset and v_run at time zone timezone <> v_local then
    return queue._cron_change(timezone, v_earlier, v_run);
  end if;
  return v_run;
end $$;

-- The first instant later than the whole second `after` whose local time matches; NULL as in _cron_next. The
-- search goes from one stretch of constant offset to the next. A change of offset matters only in two spans:
-- in the 24 hours after the point reached, because clocks set back show earlier times again, and in the 24
-- hours before the match, because clocks set forward get there sooner. The search skips the time between.
create or replace function queue._cron_next_elapsed(
  cron bigint[], timezone text, after timestamptz)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_at timestamptz := after + interval '1 second';
  v_local timestamp;
  v_offset interval;
  v_run timestamptz;
  v_until timestamptz;
begin
  while v_at < after + interval '876600 hours' loop
    v_local := v_at at time zone timezone;
    v_offset := v_local - (v_at at time zone 'UTC');
    v_run := (queue._cron_local(cron, v_local) - v_offset) at time zone 'UTC';
    v_until := least(v_run, v_at + interval '24 hours');
    if (v_until at time zone timezone) - (v_until at time zone 'UTC') <> v_offset then
      v_at := queue._cron_change(timezone, v_at, v_until);
    elsif v_until = v_run then
      return v_run;
    else
      v_at := greatest(v_until, v_run - interval '25 hours');
    end if;
  end loop;
  return null;
end $$;

-- The instant after `low`, up to `high`, at which the zone's offset changes.
-- Invariant: both are whole seconds, at most 24 hours apart, and differ in offset.
create or replace function queue._cron_change(timezone text, low timestamptz, high timestamptz)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
declare
  v_offset constant interval := (low at time zone timezone) - (low at time zone 'UTC');
  v_low timestamptz := low;
  v_high timestamptz := high;
  v_middle timestamptz;
begin
  while v_high > v_low + interval '1 second' loop
    v_middle := v_low + pg_catalog.date_trunc('second', (v_high - v_low) / 2);
    if (v_middle at time zone timezone) - (v_middle at time zone 'UTC') = v_offset then
      v_low := v_middle;
    else
      v_high := v_middle;
    end if;
  end loop;
  return v_high;
end $$;

-- The first matching local time not before the given whole second, ignoring daylight saving.
-- Ends because some date matches (_cron_parse), and dates repeat every 400 years.
create or replace function queue._cron_local(cron bigint[], not_before timestamp)
returns timestamp language plpgsql immutable parallel safe security invoker as $$
declare
  v_year int := pg_catalog.date_part('year', not_before)::int;
  v_month int := pg_catalog.date_part('month', not_before)::int;
  v_day int := pg_catalog.date_part('day', not_before)::int;
  v_hour int;
  v_minute int;
  v_next int;
  v_days bigint;
begin
  if (cron[6] >> (v_month - 1)) & 1 = 1 then
    v_days := queue._cron_days(cron, pg_catalog.make_date(v_year, v_month, 1));
    if (v_days >> (v_day - 1)) & 1 = 1 then
      v_hour := pg_catalog.date_part('hour', not_before)::int;
      if (cron[4] >> v_hour) & 1 = 1 then
        v_minute := pg_catalog.date_part('minute', not_before)::int;
        if (cron[3] >> v_minute) & 1 = 1 then
          v_next := queue._cron_bit(cron[2], pg_catalog.date_part('second', not_before)::int);
          if v_next is not null then
            return pg_catalog.make_timestamp(v_year, v_month, v_day, v_hour, v_minute, v_next);
          end if;
        end if;
        v_next := queue._cron_bit(cron[3], v_minute + 1);
        if v_next is not null then
          return pg_catalog.make_timestamp(
            v_year, v_month, v_day, v_hour, v_next, queue._cron_bit(cron[2], 0));
        end if;
      end if;
      v_next := queue._cron_bit(cron[4], v_hour + 1);
      if v_next is not null then
        return pg_catalog.make_timestamp(v_year, v_month, v_day,
          v_next, queue._cron_bit(cron[3], 0), queue._cron_bit(cron[2], 0));
      end if;
    end if;
    v_next := queue._cron_bit(v_days, v_day);
  end if;
  while v_next is null loop
    v_month := queue._cron_bit(cron[6], v_month) + 1;
    if v_month is null then
      v_year := v_year + 1;
      v_month := queue._cron_bit(cron[6], 0) + 1;
    end if;
    v_next := queue._cron_bit(
      queue._cron_days(cron, pg_catalog.make_date(v_year, v_month, 1)), 0);
  end loop;
  return pg_catalog.make_timestamp(v_year, v_month, v_next + 1,
    queue._cron_bit(cron[4], 0), queue._cron_bit(cron[3], 0), queue._cron_bit(cron[2], 0));
end $$;

-- The matching days in the month that begins on `first`: bit 0 is the 1st.
create or replace function queue._cron_days(cron bigint[], first date)
returns bigint language plpgsql immutable parallel safe security invoker as $$
declare
  v_length int := 33 - pg_catalog.date_part('day', first + 32)::int;
  v_weekday int := pg_catalog.date_part('dow', first)::int;
  v_by_month bigint := cron[5] & 2147483647;
  v_by_week bigint := cron[7] & 127;
  v_week bigint;
begin
  -- The mask's week, rotated to begin on the weekday of the 1st, five times.
  v_by_week := (((v_by_week | (v_by_week << 7)) >> v_weekday) & 127) * 270549121;
  if cron[7] > 127 then
    for v_nth in 1..5 loop
      v_week := (cron[7] >> (7 * v_nth)) & 127;
      v_by_week := v_by_week
        | ((((v_week | (v_week << 7)) >> v_weekday) & 127) << (7 * (v_nth - 1)));
    end loop;
    v_week := cron[7] >> 42;
    v_by_week := v_by_week
      | ((((v_week | (v_week << 7)) >> ((v_weekday + v_length) % 7)) & 127) << (v_length - 7));
  end if;
  if cron[5] > 2147483647 then
    for v_back in 0..v_length - 1 loop
      if (cron[5] >> (31 + v_back)) & 1 = 1 then
        v_by_month := v_by_month | (1::bigint << (v_length - 1 - v_back));
      end if;
    end loop;
    if cron[5] >> 62 = 1 then
      v_by_month := v_by_month | (1::bigint << (v_length - 1
        - greatest(pg_catalog.date_part('isodow', first + v_length - 1)::int - 5, 0)));
    end if;
  end if;
  return case when cron[8] & 1 = 1 then v_by_month & v_by_week else v_by_month | v_by_week end
    & ((1::bigint << v_length) - 1);
end $$;

-- The lowest bit set in the mask from bit `low` on; null if there is none.
create or replace function queue._cron_bit(mask bigint, low int)
returns int language plpgsql immutable parallel safe security invoker as $$
declare
  v_rest bigint := mask >> low;
begin
  if v_rest = 0 then
    return null;
  end if;
  return low + 64 - pg_catalog.length(pg_catalog.rtrim(v_rest::bit(64)::text, '0'));
end $$;
