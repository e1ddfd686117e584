-- Members of a lock that have ended, and that an open transaction keeps as dead rows.

select plan(5);

begin;
select pg_current_xact_id() \g /dev/null
prepare transaction 'locks.dead_rows';
insert into queue.lock_member select l, -n, l = 'mutex', false, true, false from unnest('{ordered,mutex}'::text[]) l, generate_series(1, 1000) n;
delete from queue.lock_member;

-- How many entries of the members' indexes a tick reads.
create function pg_temp.reads() returns bigint language plpgsql as $$
declare
  v_before bigint := (select sum(pg_stat_get_xact_tuples_returned(i.indexrelid)) from pg_index i where i.indrelid = 'queue.lock_member'::regclass);
begin
  perform queue.tick();
  return (select sum(pg_stat_get_xact_tuples_returned(i.indexrelid)) from pg_index i where i.indrelid = 'queue.lock_member'::regclass) - v_before;
end $$;
create function pg_temp.defer(lock text, mode text, n integer) returns bigint language sql as $$
  select count(*) from queue.defer_many((select jsonb_agg(jsonb_build_object('task', 't', 'lock', lock, 'options', jsonb_build_object('lock_mode', mode)))
    from generate_series(1, n)))
$$;
select pg_temp.defer('ordered', 'ordered', 1) \g /dev/null
select cmp_ok(pg_temp.reads(), '>=', 1000::bigint, 'a job that finds no member of its lock reads them once');
select queue.cancel(j.id) from queue.jobs j \g /dev/null
select pg_temp.defer('ordered', 'ordered', 50) \g /dev/null
select cmp_ok(pg_temp.reads(), '<', 1500::bigint, 'fifty of them do so together');
select pg_temp.defer('ordered', 'ordered', 50) \g /dev/null
select cmp_ok(pg_temp.reads(), '<', 500::bigint, 'and fifty that find a member do not');
select pg_temp.defer('mutex', 'mutex', 50) \g /dev/null
select cmp_ok(pg_temp.reads(), '<', 1500::bigint, 'the same for mutex jobs');
select pg_temp.defer('mutex', 'mutex', 50) \g /dev/null
select cmp_ok(pg_temp.reads(), '<', 1500::bigint, 'of which the others are looked for once');
rollback prepared 'locks.dead_rows';

select * from finish();
