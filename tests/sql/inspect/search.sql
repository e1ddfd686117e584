-- search: by substring, jsonpath and key, of a queue, task and state, in pages, with a limit on what it reads.

select plan(176);

set pgdefer.notify = off;

-- The tasks that a search finds; more: the last row says that there are more.
create function pg_temp.found(call text) returns text language plpgsql as $$
declare
  v_text text;
begin
  execute format('select string_agg(coalesce(s.task_name, ''more''), '' '') from queue.search(%s) s', call) into v_text;
  return v_text;
end $$;

select is_empty('select * from queue.search()', 'nothing in an empty queue');
select is_empty('select * from queue.search(''x'', max_bytes => 1)', 'nor anything left to look at');

select is(test.refusal('select queue.search(' || arguments || ')'), '22023', 'search(' || arguments || ')') from (values
  (''''''), ('queue => '''''), ('task => '''''), ('state => ''nope'''), ('state => '''''), ('max_bytes => 0'), ('max_bytes => -1'), ('max_jobs => 0'), ('max_jobs => null'), ('by => ''nope'''), ('by => null'),
  ('''$.'', by => ''path'''), ('''$[nope'', by => ''path'''), ('''$.a like_regex "("'', by => ''path'''), ('''$.a like_regex "a" flag "x"'', by => ''path'''), ('''$.a.datetime("zzz")'', by => ''path'''), ('''$foo'', by => ''path'''), ('''$.n ? (@ > $"f o")'', by => ''path'''), ('queue => repeat(''x'', 1001)')) v (arguments);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
select queue.defer('a', '{"n": 1, "name": "one", "list": [{"price": 5}], "deep": {"x": null}}', queue => 'q1', lock => 'lock a', options => '{"description": "the first"}') as a,
  queue.defer('b', '{"n": 20, "name": "say \"hi\"\nthere", "flag": true}', queue => 'q2', queueing_lock => 'unique b') as b,
  queue.defer('c', '{"n": 300, "name": "Ünïcode 日本", "flag": false, "list": [{"price": 1}, {"price": 9}]}', queue => 'q2x', concurrency_key => 'key c', concurrency_limit => 1,
    options => '{"concurrency": [{"key": "second key c", "limit": 2}]}') as c,
  queue.defer('d', queue => 'q1') as d \gset

-- All, newest first
select is(pg_temp.found(''), 'd c b a', 'without a pattern all, newest first');
select results_eq('select id, queue_name, task_name, job_state, reason, priority, attempts, description, bytes, excerpt, next_id from queue.search(task => ''a'')',
                  format($$values (%s::bigint, 'q1', 'a', 'ready', null::text, 0, 0, 'the first', null::integer, (select left(args::text, 200) from queue.jobs where id = %1$s), null::bigint)$$, :a), 'with what there is to see');
select is((select excerpt from queue.search('key c', by => 'key')), (select left(args::text, 200) from queue.jobs where id = :c), 'and the start of its args');
select is((select excerpt from queue.search(task => 'd', max_jobs => 2)), null, 'if it has any');
select is(pg_temp.found('max_jobs => 2'), 'd c more', 'a page');
select results_eq('select id, excerpt, next_id from queue.search(max_jobs => 2) where id is null', format('values (null::bigint, ''stopped at 2 jobs, 200 bytes; continue with before => %s'', %s::bigint)', :c, :c), 'says where to continue');
select is((select excerpt from queue.search(max_jobs => 1) where id is null), format('stopped at 1 job, 100 bytes; continue with before => %s', :d), 'one job');
select is(pg_temp.found(format('before => %s, max_jobs => 2', :c)), 'b a', 'the next page');
select is(pg_temp.found('max_jobs => 4'), 'd c b a', 'a page that is full and the last');
select is(pg_temp.found('before => 1'), null, 'before the first');
select is(pg_temp.found('max_bytes => 400'), 'd c b a', 'nor is there more if the limit is reached with the last one');

-- By substring
select is(pg_temp.found('''one'''), 'a', 'a substring of the args');
select is(pg_temp.found('''ONE'''), null, 'as it is written');
select is(pg_temp.found('''n'''), 'c b a', 'of keys too');
select is(pg_temp.found('''say "hi"'''), 'b', 'with quotes');
select is(pg_temp.found(E'''hi"\nthere'''), 'b', 'with a line break');
select is(pg_temp.found('''Ünïcode 日'''), 'c', 'with any letters');
select is(pg_temp.found('''the first'''), 'a', 'of the description');
select is(pg_temp.found('''%'''), null, 'no pattern of LIKE');
select is(pg_temp.found('''nowhere'''), null, 'nothing');
select ok((select s.bytes = octet_length(j.args::text) and s.excerpt = right(j.args::text, length(s.excerpt)) and strpos(s.excerpt, 'one') = 61 from queue.search('one') s join queue.jobs j on j.id = s.id),
          'shown with what surrounds it, and its size');
select is((select excerpt from queue.search('the first')), null, 'but not what the description shows');
select queue.defer('long', jsonb_build_object('text', repeat('x', 1000) || 'needle' || repeat('y', 1000))) as long \gset
select ok((select strpos(excerpt, 'needle') = 61 and length(excerpt) = 200 and bytes > 2000 from queue.search('needle')), 'of long args a part');

-- By path
select is(pg_temp.found('''$.n'', by => ''path'''), 'c b a', 'a path that finds something');
select is(pg_temp.found('''$.n ? (@ > 10)'', by => ''path'''), 'c b', 'with a filter');
select is(pg_temp.found('''$.n > 10'', by => ''path'''), 'c b', 'a predicate that is true');
select is(pg_temp.found('''$.flag == true'', by => ''path'''), 'b', 'of booleans');
select is(pg_temp.found('''$.flag'', by => ''path'''), 'c b', 'a path to one of them is not a predicate');
select is(pg_temp.found('''$.deep.x'', by => ''path'''), 'a', 'nor one to null');
select is(pg_temp.found('''$.name > 3'', by => ''path'''), null, 'a predicate that is neither true nor false');
select is(pg_temp.found('''exists($.list)'', by => ''path'''), 'c a', 'exists');
select is(pg_temp.found('''!exists($.n)'', by => ''path'''), 'long d', 'not');
select is(pg_temp.found('''$.list[*].price ? (@ >= 5)'', by => ''path'''), 'c a', 'in lists');
select is((select string_agg(excerpt, ' ') from queue.search('$.list[*].price ? (@ >= 5)', by => 'path')), '9 5', 'shows what it found');
select is(pg_temp.found('''strict $.list[5]'', by => ''path'''), null, 'a path that fails finds nothing');
select is(pg_temp.found('''$.name like_regex "^O" flag "i"'', by => ''path'''), 'a', 'a regular expression');
select is(pg_temp.found('''$'', by => ''path'''), 'long d c b a', 'the args themselves');
select is(pg_temp.found('''$.name == "\"$\"" || $.n == 1'', by => ''path'''), 'a', 'a dollar in a text is no variable');
select is(pg_temp.found('''$."$" == "$" || $.n == 1'', by => ''path'''), 'a', 'nor one in a key');
select queue.defer('date', '{"d": "2020-06-01T12:00:00+02:00"}') as date \gset
select is(pg_temp.found('''$.d.datetime() < "2021-01-01T00:00:00+00:00".datetime()'', by => ''path'''), 'date', 'times with a time zone');
select is(pg_temp.found('''$.d.datetime() < "2021-01-01".datetime()'', by => ''path'''), 'date', 'and with dates, which have none');
select is(pg_temp.found('''$.d ? (@.datetime() > "2021-01-01".datetime())'', by => ''path'''), null, 'later ones');
select is((select excerpt from queue.search('$.d ? (@.datetime() < "2021-01-01".datetime())', by => 'path')), '"2020-06-01T12:00:00+02:00"', 'show what was found');
select is((select count(*) from queue.get(:date, '$.d ? (@.datetime() < "2021-01-01".datetime())')), 1::bigint, 'for get too');
select queue.delete(array[:date]) \g /dev/null

-- By key
select is(pg_temp.found('''lock a'', by => ''key'''), 'a', 'a lock');
select is(pg_temp.found('''unique b'', by => ''key'''), 'b', 'a queueing lock');
select is(pg_temp.found('''key c'', by => ''key'''), 'c', 'a concurrency key');
select is(pg_temp.found('''second key c'', by => ''key'''), 'c', 'any of them');
select is(pg_temp.found('''key'', by => ''key'''), null, 'the whole of it');

-- Queue, task, and together
select is(pg_temp.found('queue => ''q1'''), 'd a', 'a queue');
select is(pg_temp.found('queue => ''q2*'''), 'c b', 'queues with a prefix');
select is(pg_temp.found('queue => ''*'''), 'long d c b a', 'all queues');
select is(pg_temp.found('task => ''c'''), 'c', 'a task');
select is(pg_temp.found('''n'', ''q2'''), 'b', 'a pattern and a queue');
select is(pg_temp.found('''name'', ''q2*'', ''ready'', 1000'), 'c b', 'and a state, by position');
select queue.tick() \g /dev/null
select queue.move(array[:a], 'moved'), queue.set_priority(array[:a], 4) \g /dev/null
select is(pg_temp.found('queue => ''moved'''), 'a', 'the queue that it is in now');
select queue.delete(array[:long]) \g /dev/null

-- State: every one, newest first, admitted or not
select is(pg_temp.found('state => ''ready'''), 'd c b a', 'ready ones');
select array_agg(f.id) as ids from queue.fetch(:worker, '{q2,q2x}', 10) f \gset
select is(pg_temp.found('state => ''running'''), 'c b', 'running ones');
select is(pg_temp.found('state => ''running'', max_jobs => 1'), 'c more', 'the newest of them');
select is(pg_temp.found(format('state => ''running'', max_jobs => 1, before => %s', :c)), 'b', 'the next one');
begin;
insert into queue.active_job (id, deadline, lane, attempt, flags) select 1000000 + n, 'infinity', 0, 0, 0 from generate_series(1, 20001) n;
select s.seq_scan as scans from pg_stat_xact_user_tables s where s.relid = 'queue.active_job'::regclass \gset
select is(pg_temp.found('state => ''running'''), 'c b', 'also below many ready ones');
select is((select s.seq_scan from pg_stat_xact_user_tables s where s.relid = 'queue.active_job'::regclass) - :scans, 1::bigint, 'which it reads once');
rollback;
select queue.finish_many(jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', case j.task when 'b' then 'failed' else 'succeeded' end) || case j.task when 'b' then '{"error": "boom"}' else '{}' end::jsonb))
from queue.jobs j where j.state = 'running' \g /dev/null
select is(pg_temp.found('state => ''failed'''), 'b', 'failed ones');
select is(pg_temp.found('state => ''succeeded'''), 'c', 'succeeded ones');
select queue.cancel(:d) \g /dev/null
select is(pg_temp.found('state => ''cancelled'''), 'd', 'cancelled ones');
select queue.defer('held', options => '{"held": true}'), queue.defer('scheduled', scheduled_at => '2999-01-01Z'), queue.defer('waiting', needs => array[:a]),
  queue.defer('upstream_failed', needs => array[:b]), queue.defer('locked 1', lock => 'l'), queue.defer('locked 2', lock => 'l'), queue.defer('paused task') \g /dev/null
select is(pg_temp.found('state => ''' || state || ''''), tasks, state || ' ones, before they are admitted') from (values
  ('held', 'held'), ('scheduled', 'scheduled'), ('waiting', 'upstream_failed waiting'), ('ready', 'paused task locked 2 locked 1 a'), ('blocked', null), ('upstream_failed', null)) v (state, tasks);
select queue.pause(task => 'paused task') \g /dev/null
select is(pg_temp.found('state => ''' || state || ''''), tasks, state || ' ones') from (values
  ('held', 'held'), ('scheduled', 'scheduled'), ('waiting', 'waiting'), ('ready', 'paused task locked 1 a'), ('blocked', 'locked 2'), ('upstream_failed', 'upstream_failed'), ('running', null)) v (state, tasks);
select is(pg_temp.found('state => ''ready'', max_jobs => 1'), 'paused task more', 'a page of them');
select is(pg_temp.found('state => ''ready'', max_jobs => 3'), 'paused task locked 1 a', 'the last page');
select is((select string_agg(distinct s.job_state, ' ') from unnest('{scheduled,waiting,upstream_failed,blocked,ready,running,held,succeeded,failed,cancelled}'::text[]) u (state)
           cross join lateral queue.search(state => u.state) s where s.job_state <> u.state), null, 'no other states');
select is((select count(*)::integer from unnest('{scheduled,waiting,upstream_failed,blocked,ready,running,held,succeeded,failed,cancelled}'::text[]) u (state)
           cross join lateral queue.search(state => u.state) s), (select count(*)::integer from queue.jobs), 'each job has one');
select results_eq('select s.id, s.scheduled_at, s.started_at, s.finished_at, s.error from queue.search() s order by s.id', 'select j.id, j.scheduled_at, j.started_at, j.finished_at, j.error from queue.jobs j order by j.id', 'shown with its times and error');
select is((select error from queue.search(state => 'failed')), 'boom', 'the error of a failed one');
select isnt((select scheduled_at from queue.search(state => 'scheduled')), null, 'the time of a scheduled one');

-- Jobs of other states that its candidates include, and that fill its batches: replacements that no admission has seen
select queue.defer('early') \g /dev/null
select queue.defer('late', queueing_lock => 'late 0', lock => 'late') \g /dev/null
select queue.defer('late', queueing_lock => 'late ' || n) from generate_series(1, 5) n \g /dev/null
select queue.tick() \g /dev/null
select queue.defer('late', queueing_lock => 'late ' || n, scheduled_at => '2999-01-01Z', options => '{"on_conflict": "replace"}') from generate_series(0, 5) n \g /dev/null
select is(pg_temp.found('state => ''ready'', max_jobs => 1'), 'early more', 'it reads on behind jobs of another state');
select is((select count(*) from queue.search(state => 'scheduled', task => 'late')), 6::bigint, 'and finds them in the state that they get');
select queue.delete(array(select j.id from queue.jobs j where j.task in ('early', 'late'))) \g /dev/null
select array_agg(queue.defer('gone', queueing_lock => 'gone ' || n)) as gone from generate_series(1, 501) n \gset
select queue.tick() \g /dev/null
begin;
select queue.defer('gone', queueing_lock => 'gone ' || n, options => '{"on_conflict": "replace"}') from generate_series(1, 501) n \g /dev/null
select is((select count(*) from queue.delete(:'gone') where outcome = 'deleted'), 501::bigint, 'replaced jobs are deleted');
commit;
set statement_timeout = '60 s';
select is(pg_temp.found('state => ''ready'', max_jobs => 1'), 'paused task more', 'and behind more of these than it reads at a time');
reset statement_timeout;

-- The limit: on the amount read, and reported
select queue.defer('large', jsonb_build_object('text', repeat('0123456789', 100000), 'n', n)) from generate_series(1, 5) n \g /dev/null
select is(pg_temp.found('''0123'', max_bytes => 2500000'), 'large large large more', 'it stops after so many bytes');
select is(pg_temp.found('''nowhere'', max_bytes => 2500000'), 'more', 'and says so where nothing was found');
select is((select s.next_id from queue.search('nowhere', max_bytes => 2500000) s), (select min(x.id) from (select j.id from queue.jobs j where j.task = 'large' order by j.id desc limit 3) x), 'with the place to continue');
select is((with recursive page (n, next_id, found) as (
             select 1, null::bigint, 0
             union all
             select p.n + 1, x.next_id, x.found from page p
             cross join lateral (select max(s.next_id) as next_id, count(s.id)::integer as found from queue.search('0123', before => p.next_id, max_bytes => 2500000) s) x
             where p.n = 1 or p.next_id is not null)
           select string_agg(found::text, ' ' order by n) from page), '0 3 2', 'page by page all of them');
select is(pg_temp.found('''0123'', max_bytes => null'), 'large large large large large', 'without a cap');
select is(pg_temp.found('max_bytes => 250'), 'large large large more', 'a list counts 100 bytes for each job');
select is(pg_temp.found('''key'', by => ''key'', max_bytes => 500'), 'more', 'as do keys');
select is(pg_temp.found('task => ''large'', max_bytes => 10000'), 'large large large large large', 'and what is not asked for');
select is((select string_agg(length(excerpt)::text, ' ') from queue.search('0123', max_jobs => 2) where id is not null), '200 200', 'large args are shown cut');
select is((select string_agg(excerpt, ' ') from queue.search(task => 'large')), null, 'but not without a pattern, which would take long to read');
select is((select max(bytes) from queue.search('0123')), (select max(octet_length(args::text)) from queue.jobs), 'with their size');

select queue.defer('digits', (select jsonb_object_agg(n, 1e131071) from generate_series(1, 20) n)) as digits \gset
select is((select excerpt from queue.search(task => 'digits')), null, 'nor of numbers with many digits');
select queue.defer('middling', jsonb_build_object('text', repeat('x', 1900))) as middling \gset
select is((select length(excerpt) from queue.search(task => 'middling')), 200, 'only the start of args of up to 2 kB');
select queue.delete(array[:digits, :middling]) \g /dev/null
-- Odd patterns
select queue.defer('odd', jsonb_build_object('v', v)) from (values ('\'), ('''; drop table x; --'), ('$.a'), (E'\t'), ('<b>')) x (v) \g /dev/null
select is(pg_temp.found(quote_literal(v)), 'odd', 'finds ' || quote_literal(v)) from (values ('''; drop'), ('$.a'), (E'\t'), ('<b>')) x (v);
select is((select count(*)::integer from queue.search('\')), 3, 'and a backslash, wherever JSON has one');

-- get distinguishes a value, JSON null, several values, and nothing
select queue.defer('get', '{"items": [{"price": 1, "a b": "x"}, {"price": 2}], "nothing": null, "text": "t", "flag": false}') as id \gset
select is((select coalesce(string_agg(g::text, ' '), 'missing') from queue.get(:id, path) g), value, path) from (values
  ('text', '"t"'), ('items[0].price', '1'), ('items[1]', '{"price": 2}'), ('items[*].price', '1 2'), ('$.items[*] ? (@.price > 1).price', '2'), ('items[0]."a b"', '"x"'), ('flag', 'false'),
  ('nothing', 'null'), ('no_such', 'missing'), ('items[7].price', 'missing'), ('text.deeper', 'missing'), ('items.size()', '2'), ('strict $.items[0].price', '1'), ('strict $.no', 'missing')) v (path, value);
select is((select count(*)::integer from queue.get(:id, 'nothing')), 1, 'null is a row');
select is_empty(format('select * from queue.get(%s, ''no_such'')', :id), 'a missing value no row');
select is(test.refusal(format('select queue.get(%s, %L)', :id, path)), '22023', 'no path: ' || coalesce(path, 'NULL')) from (values (null), (''), ('items['), ('a b'), ('$.'), ('text.datetime("z\"")'), ('$foo'), ('items[$foo]'), ('text ? (@ like_regex "a" flag "x")'), ('text ? (@ == $"f\"o")')) v (path);
select is(test.refusal('select queue.get(424242, ''a'')'), 'QJ001', 'no such job');

-- Jobs in other states are not read, so there is nothing more to read
select queue.cancel(j.id, true) from queue.jobs j where j.state not in ('succeeded', 'failed', 'cancelled', 'running') order by j.id \g /dev/null
select queue.fail_jobs(array(select j.id from queue.jobs j where j.state = 'running')) \g /dev/null
select count(queue.defer('later', lock => 'lock ' || n, scheduled_at => '2999-01-01Z')) from generate_series(1, 30) n \g /dev/null
select is_empty(format('select * from queue.search(state => %L, max_bytes => 1)', state), 'not yet admitted, no ' || state || ' ones') from unnest('{waiting,upstream_failed,blocked,ready,running,held}'::text[]) state;
select queue.tick() \g /dev/null
select is_empty(format('select * from queue.search(state => %L, max_bytes => 1)', state), 'no ' || state || ' ones') from unnest('{waiting,upstream_failed,blocked,ready,running,held}'::text[]) state;
select is(pg_temp.found('state => ''scheduled'', max_jobs => 3'), 'later later later more', 'but those');

-- Jobs that are not admitted, however many: a page costs as much as it returns
select count(*) from queue.defer_many((select jsonb_agg(jsonb_build_object('task', case when n % 4000 = 0 then 'rare' else 'many' end, 'queue', 'many', 'options', jsonb_build_object('held', n % 4000 = 0)))
                                       from generate_series(1, 20000) n)) \g /dev/null
create function pg_temp.reads(call text) returns bigint language plpgsql as $$
begin
  perform pg_temp.found(call);
  return (select sum(pg_stat_get_xact_tuples_fetched(i.indexrelid)) from pg_index i where i.indrelid = 'queue.log'::regclass);
end $$;
select cmp_ok(pg_temp.reads('state => ''ready'''), '<', 5000::bigint, 'a page of ready ones');
select cmp_ok(pg_temp.reads('state => ''ready'', queue => ''nowhere'', max_bytes => null'), '<', 200000::bigint, 'all pages');
select is((select count(*) from queue.search(state => 'ready', queue => 'many', max_jobs => 100000, max_bytes => null)), 19995::bigint, 'each is found');
select is((select count(distinct id) from queue.search(state => 'ready', queue => 'many', max_jobs => 100000, max_bytes => null)), 19995::bigint, 'once');
select is(pg_temp.found('state => ''held'', queue => ''many'''), 'rare rare rare rare rare', 'and the few among many');
select is(pg_temp.found('state => ''scheduled'', queue => ''many'''), null, 'or none');
select is(pg_temp.found('state => ''scheduled'', max_jobs => 2'), 'later later more', 'beside those that are older');

-- A search changes nothing, and may be part of a read-only transaction
begin transaction isolation level repeatable read read only;
select is(pg_temp.found('''one'''), 'a', 'in a read-only transaction');
commit;
select * from finish();
