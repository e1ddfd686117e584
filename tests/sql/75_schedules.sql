-- Recurring runs: what they defer, outages, overlap, pauses, changes, refusals, history.

select plan(110);

select queue.register_worker('w') as worker \gset

-- An expression for each hour whose last run was 20 minutes ago, so that none comes due while the tests run.
select format('%s * * * *', to_char(now() - interval '20 min', 'FMMI')) as hourly, date_trunc('minute', now() - interval '20 min') as last_run \gset
create function pg_temp.last_run() returns timestamptz language sql as format($$select %L::timestamptz$$, :'last_run');
