-- Eras: where the numbers of claims and workers continue. On servers that lose transactions: tests/py/compat/test_eras.py.

select plan(20);

create function pg_temp.micros() returns bigint language sql as $$
  select (extract(epoch from clock_timestamp()) * 1000000)::bigint
$$;
create function pg_temp.last() returns bigint language sql as 'select s.last_value from queue.claim_seq s';

-- Tests count from 1, in the current era
select queue.register_worker('w') as worker \gset
select queue.defer('t') from generate_series(1, 20) \g /dev/null
select is((select f.claim from queue.fetch(:worker) f), 1::bigint, 'an era that continues');
select queue.tick(), queue.register_worker('x') \g /dev/null
select is((select f.claim from queue.fetch(:worker) f), 2::bigint, 'continues, whichever call checks it');

-- A new era: numbers jump to the clock
update queue.installation set era = 'another';
reset pgdefer.era;
select cmp_ok((select f.claim from queue.fetch(:worker) f), '>=', pg_temp.micros() - 60000000, 'a session that does not know the era looks before it claims');
select cmp_ok(pg_temp.last(), '<=', pg_temp.micros() + 4294967296, 'to at most 2^32 past the clock');
select cmp_ok(queue.register_worker('y'), '>', (:worker)::bigint + 4294967296, 'workers too');
select pg_temp.last() as last \gset
select is((select f.claim from queue.fetch(:worker) f), :last + 1, 'and one by one from there');
update queue.installation set era = 'another';
select is((select f.claim from queue.fetch(:worker) f), :last + 2, 'a session asks once');
select queue.tick() \g /dev/null
select cmp_ok(pg_temp.last(), '>', :last + 4294967296, 'tick whenever it runs');
select cmp_ok(pg_temp.last(), '<=', :last + 2 + 2 * 4294967296, 'by chance between 2^32 and 2^33, as the clock is behind it');

-- A row that was written by a transaction other than it says is a copy
select pg_temp.last() as last \gset
update queue.installation set version = version;
select queue.register_worker('z') \g /dev/null
select cmp_ok(pg_temp.last(), '>', :last + 4294967296, 'a copy of the row begins an era');
select pg_temp.last() as last \gset
begin;
update queue.installation set era = 'another';
savepoint a;
select queue.register_worker('z') \g /dev/null
release a;
commit;
select cmp_ok(pg_temp.last(), '>', :last + 4294967296, 'also in a savepoint');
select pg_temp.last() as last \gset
select queue.register_worker('z') \g /dev/null
select is(pg_temp.last(), :last::bigint, 'once');

-- A rolled-back call has not checked the era, but its jump stays
update queue.installation set era = 'another';
reset pgdefer.era;
begin;
select f.claim from queue.fetch(:worker) f \g /dev/null
rollback;
select is(coalesce(current_setting('pgdefer.era', true), ''), '', 'a session whose fetch was rolled back asks again');
select cmp_ok(pg_temp.last(), '>', :last + 4294967296, 'the number is used nevertheless');
select queue.tick() \g /dev/null

-- No setting of the caller affects the precision of the mark
select queue._era() as era \gset
set extra_float_digits = -15;
set timezone = 'Asia/Kolkata';
set datestyle = 'German';
set intervalstyle = 'sql_standard';
select is(queue._era(), :'era', 'the same whatever is set');
reset all;
select pg_stat_reset_shared('bgwriter');
select is(queue._era(), :'era', 'the statistics of one kind may be reset');

-- finish_and_fetch and next check too
update queue.installation set era = 'another';
reset pgdefer.era;
select pg_temp.last() as last \gset
select cmp_ok((select f.claim from queue.finish_and_fetch(:worker, '[]') f), '>', :last + 4294967296, 'finish_and_fetch asks');
update queue.installation set era = 'another';
select pg_temp.last() as last \gset
select cmp_ok((select f.claim from queue.next() f), '>', :last + 4294967296, 'so does next');

-- Claim numbers of one job ascend
select f.id, f.claim from queue.fetch(:worker) f \gset
select queue.release(:id, :claim) \g /dev/null
update queue.installation set era = 'another';
reset pgdefer.era;
select cmp_ok((select f.claim from queue.fetch(:worker, options => jsonb_build_object('ids', jsonb_build_array((:id)::bigint))) f), '>', :claim::bigint, 'the claims of a job rise');
select is_empty('select * from queue.check()', 'sound');

select * from finish();
