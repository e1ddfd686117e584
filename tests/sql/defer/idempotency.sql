-- Idempotency keys: of the calls with one key of a task, only the first within unique_for defers a job.

select plan(63);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
create function pg_temp.refusal(call text) returns text language plpgsql as $$
declare
  v_detail text;
begin
  execute call;
  return 'accepted';
exception when others then
  get stacked diagnostics v_detail = pg_exception_detail;
  return concat_ws(' ', sqlstate, nullif(v_detail, ''));
end $$;
create function pg_temp.again(key text, task text default 't', more jsonb default '{}') returns bigint language sql as $$
  select queue.defer(task, '{"n": 2}', options => jsonb_build_object('idempotency_key', key) || more) $$;
-- time passes for keys
create function pg_temp.pass(length interval) returns void language sql as $$
  update queue.idempotency_key set expires_at = expires_at - length $$;

-- The first job's id
select queue.defer('t', '{"n": 1}', options => '{"idempotency_key": "K"}') as a \gset
select is(pg_temp.again('K'), :a::bigint, 'the second call gets the first job''s id');
select results_eq('select j.id, j.args, j.idempotency_key from queue.jobs j', format($$values (%s::bigint, '{"n": 1}'::jsonb, 'K')$$, :a), 'and defers nothing; the job shows its key');
select is((select s.id from queue.search('K', by => 'key') s where s.id is not null), :a::bigint, 'search finds it by its key');
select isnt(pg_temp.again('k'), :a::bigint, 'another key, as case counts');
select isnt(pg_temp.again('K', 'other'), :a::bigint, 'keys of one task are apart from those of another');
select is(queue.defer('t', queue => 'elsewhere', priority => 9, options => '{"idempotency_key": "K"}'), :a::bigint, 'but not those of one queue');
select isnt(queue.defer('t'), :a::bigint, 'a call without a key defers');
select isnt(queue.defer('t', options => '{"idempotency_key": ""}'), queue.defer('t', options => '{"idempotency_key": ""}'), 'empty text is none');
select isnt(queue.defer('t', options => '{"idempotency_key": null}'), queue.defer('t', options => '{"idempotency_key": null}'), 'nor is JSON null');
select set_eq('select j.idempotency_key from queue.jobs j', $$values ('K'), ('k'), (null)$$, 'such jobs show none');
select ok((select count(*) from queue.idempotency_key) = 3, 'and have no row');

-- Whatever became of the job
select queue.cancel(j.id) from queue.jobs j where j.id <> :a \g /dev/null
select f.claim as claim from queue.fetch(:worker) f \gset
select is(pg_temp.again('K'), :a::bigint, 'while it runs');
select queue.succeed(:a, :claim, '5');
select is(pg_temp.again('K'), :a::bigint, 'once it has succeeded');
select is((select r.result from queue.result(:a) r), '5'::jsonb, 'so that the second caller can read its result');
select is((select d.outcome from queue.delete(array[:a]) d), 'deleted', 'it is deleted');
select is(pg_temp.again('K'), :a::bigint, 'deleted: a key outlives its job');
select is(pg_temp.refusal(format('select * from queue.result(%s)', :a)), format('QJ001 id: %s', :a), 'which can no longer be read');
select pg_temp.again('failed') as f \gset
select f.claim as claim from queue.fetch(:worker) f \gset
select queue.fail(:f, :claim, 'x') \g /dev/null
select is(pg_temp.again('failed'), :f::bigint, 'failed');
select is((select r.outcome from queue.retry(array[:f]) r), 'ready', 'retry, not defer, runs it again');
select queue.cancel(:f) \g /dev/null
select is(pg_temp.again('failed'), :f::bigint, 'cancelled');
select queue.copy(:f) as copy \gset
select is((select j.idempotency_key from queue.jobs j where j.id = :copy), null, 'a copy has no key');
select queue.cancel(:copy) \g /dev/null
select queue.move(array[:f], 'moved') \g /dev/null
select is(pg_temp.again('failed'), :f::bigint, 'moved');
select pg_temp.again('pruned', more => '{"retain": 0}') as p \gset
select f.claim as claim from queue.fetch(:worker) f \gset
select queue.succeed(:p, :claim);
select is(queue.prune(), 1, 'one is pruned');
select is(pg_temp.again('pruned'), :p::bigint, 'pruned');

-- For how long
select is((select k.expires_at - clock_timestamp() between interval '23:59' and interval '1 day' from queue.idempotency_key k where k.key = 'pruned'), true, 'one day by default');
select pg_temp.again('hour', more => '{"unique_for": "1 hour"}') as h, pg_temp.again('seconds', more => '{"unique_for": 90.5}') as s \gset
select is((select k.expires_at - clock_timestamp() between interval '59 min' and interval '1 hour' from queue.idempotency_key k where k.key = 'hour'), true, 'or unique_for');
select is((select k.expires_at - clock_timestamp() between interval '80 s' and interval '90.5 s' from queue.idempotency_key k where k.key = 'seconds'), true, 'also as a number of seconds');
select pg_temp.pass('59 minutes');
select is(pg_temp.again('hour', more => '{"unique_for": "1 minute"}'), :h::bigint, 'the first call says for how long');
select pg_temp.pass('1 minute');
select pg_temp.again('hour', more => '{"unique_for": "1 hour"}') as h2 \gset
select isnt(:h2::bigint, :h::bigint, 'then the key is free');
select is(pg_temp.again('hour'), :h2::bigint, 'and stands for the next job');
select is((select j.state from queue.jobs j where j.id = :h), 'ready', 'the first one is unaffected');

-- The table stays small
select pg_temp.again(n::text, 'many', '{"unique_for": 1}') from generate_series(1, 5) n \g /dev/null
select pg_temp.pass('1 minute');
begin;
select queue._prune_idempotency_keys(3) \g /dev/null
select is((select count(*) from queue.idempotency_key k where k.expires_at < clock_timestamp()), 3::bigint, 'maintenance deletes those that have expired, in slices');
rollback;
select queue.tick() \g /dev/null
select is((select count(*) from queue.idempotency_key k where k.task = 'many'), 0::bigint, 'tick does');
select is((select count(*) from queue.idempotency_key k where k.key = 'hour'), 1::bigint, 'and no other');
select pg_temp.pass('10 years');
select queue.prune() \g /dev/null
select is_empty('select from queue.idempotency_key', 'prune does, too');

-- Templates, defaults, other ways to defer
select queue.register_task('invoice', '{"idempotency_key": "invoice:{id}", "unique_for": "30 days", "queue": "bills"}');
select queue.defer('invoice', '{"id": 7}') as i \gset
select is(queue.defer('invoice', '{"id": 7, "again": true}'), :i::bigint, 'a registered template is filled from args');
select results_eq('select k.key::text collate "default", k.queue, k.expires_at > clock_timestamp() + interval ''29 days'' from queue.idempotency_key k', $$values ('invoice:7', 'bills', true)$$, 'and unique_for is a default, too');
select isnt(queue.defer('invoice', '{"id": 7}', options => '{"idempotency_key": ""}'), :i::bigint, 'empty text overrides the default');
select isnt(queue.defer('invoice', '{"id": 7}', options => '{"idempotency_key": "{id}b"}'), :i::bigint, 'so does another key');
select results_eq($$select * from queue.defer_many('[{"task": "invoice", "args": {"id": 7}}, {"task": "invoice", "args": {"id": 8}}, {"task": "invoice", "args": {"id": 8}}]')$$,
                  format('values (%s::bigint), (%s), (%s)', :i, max(j.id) + 1, max(j.id) + 1), 'in defer_many, twice in one batch') from queue.jobs j where j.id <= currval('queue.job_id_seq');
select is((select count(*) from queue.jobs j where j.idempotency_key = 'invoice:8'), 1::bigint, 'deferred once');
select is_empty('select from queue.idempotency_key k where k.job_id = 0', 'nothing stays reserved');
create table paid (id integer);
create trigger paid after insert on paid for each row execute function queue.defer_trigger('paid', '{"options": {"idempotency_key": "{id}"}}');
insert into paid values (1), (1), (2);
select is((select count(*) from queue.jobs j where j.task = 'paid'), 2::bigint, 'defer_trigger');
select g.then_id as then_id, g.ids[1] as member from queue.defer_group('[{"task": "g", "options": {"idempotency_key": "g"}}]', '{"task": "then", "options": {"idempotency_key": "then"}}') g \gset
select results_eq($$select g.then_id, g.ids from queue.defer_group('[{"task": "g", "options": {"idempotency_key": "g"}}]', '{"task": "then", "options": {"idempotency_key": "then"}}') g$$,
                  format('values (%s::bigint, array[%s]::bigint[])', :then_id, :member), 'a group is deferred once');
select queue.delete(array[:member], true) \g /dev/null
select is((select g.then_id from queue.defer_group('[{"task": "g", "options": {"idempotency_key": "g"}}]', '{"task": "then", "options": {"idempotency_key": "then"}}') g), :then_id::bigint, 'also once a need was removed');
select is(pg_temp.refusal($$select queue.defer('needs', needs => '{987654321}', options => '{"idempotency_key": "refused"}')$$), 'QJ001 id: 987654321', 'a refused call');
select lives_ok($$select pg_temp.again('refused', 'needs')$$, 'takes no key');
begin;
savepoint s;
select pg_temp.again('undone') as undone \gset
rollback to s;
select isnt(pg_temp.again('undone'), :undone::bigint, 'nor does one that is rolled back to a savepoint');
commit;

-- Beside a queueing lock
select queue.defer('q', queueing_lock => 'Q') as q \gset
select is(queue.defer('q', queueing_lock => 'Q', options => '{"idempotency_key": "q", "on_conflict": "ignore"}'), :q::bigint, 'a call that gives way to a waiting job');
select is(queue.cancel(:q), 'cancelled', 'keeps its key when that has ended:');
select is(queue.defer('q', queueing_lock => 'Q', options => '{"idempotency_key": "q"}'), :q::bigint, 'it stands for the waiting job');
select queue.defer('q', queueing_lock => 'Q', options => '{"idempotency_key": "q2"}') as q2 \gset
select is(queue.defer('q', queueing_lock => 'Q', options => '{"idempotency_key": "q2"}'), :q2::bigint, 'the same key comes before the queueing lock: no QJ004');
select is((select k.job_id from queue.queueing_lock k where k.key = 'Q'), :q2::bigint, 'the lock is that job''s');

-- What is refused
select is(pg_temp.refusal(format('select queue.defer(%L, %L, options => %L)', 't', '{"o": {}}', o)), e, format('refused: %s', left(o, 60)))
from (values ('{"unique_for": "1 day"}', '22023'), ('{"idempotency_key": 5}', '22023'), ('{"idempotency_key": "x", "unique_for": 0}', '22023'),
             ('{"idempotency_key": "{o}"}', '22023 template: {o}, field: o')) v (o, e);
select is(pg_temp.refusal(format('select queue.defer_many(%L)', format('[{"task": "many", "options": {"idempotency_key": "b"}}, %s]', j))) ~ '^22023', true, format('refused in a batch: %s', j))
from (values ('5'), ('{"task": "many", "args": 5, "options": {"idempotency_key": "{n}"}}'), ('{"task": "many", "options": {"idempotency_key": {"n": 1}}}')) v (j);
select is(pg_temp.refusal(format('select queue.defer(left(%L, 1000), options => jsonb_build_object(%L, left(%L, %s)))', x.long, 'idempotency_key', x.long, n)), e, format('%s bytes that can''t be compressed', n))
from (values (1000, 'accepted'), (1001, '22023 1001 bytes')) v (n, e) cross join (select string_agg(md5(i::text), '') as long from generate_series(1, 40) i) x;

select is_empty('select * from queue.check()', 'sound');

select * from finish();
