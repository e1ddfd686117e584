-- Deferring: every argument of defer, defer_many, defer_trigger, and refusals. Defaults: defer/tasks.sql.

select plan(308);

create function pg_temp.shown(id bigint, variadic columns text[]) returns text language plpgsql as $$
declare
  v_text text;
begin
  execute format('select row (%s)::text from queue.jobs j where j.id = %s', (select string_agg('j.' || c, ', ') from unnest(columns) c), id) into v_text;
  return v_text;
end $$;

-- One argument at a time
select queue.defer('t') as id \gset
select is(pg_temp.shown(:id, 'task', 'args', 'queue', 'priority', 'lock', 'queueing_lock', 'concurrency_key', 'needs', 'deadline', 'scheduled_at', 'expires_at'),
          '(t,{},default,0,,,,,,,)', 'a task alone');
select ok((select j.created_at between now() - interval '1 minute' and clock_timestamp() from queue.jobs j where j.id = :id), 'created now');
select is(pg_temp.shown(:id, 'state', 'attempts', 'failures', 'crashes', 'claims', 'claim', 'worker_id', 'started_at', 'finished_at', 'error', 'result', 'progress', 'parent'),
          '(ready,0,0,0,0,,,,,,,0,)', 'ready, never run');
select is(pg_temp.shown(queue.defer('t', '{"a": [1, null, {"b": "ü"}]}'), 'args'), '("{""a"": [1, null, {""b"": ""ü""}]}")', 'args');
select is(pg_temp.shown(queue.defer('t', null), 'args'), '({})', 'args NULL is {}');
select is(pg_temp.shown(queue.defer('t', queue => 'Q 1'), 'queue'), '("Q 1")', 'queue');
select is(pg_temp.shown(queue.defer('t', queue => '*a'), 'queue'), '(*a)', 'an asterisk elsewhere than at its end');
select is(pg_temp.shown(queue.defer('t', priority => -2147483648), 'priority'), '(-2147483648)', 'the lowest priority');
select is(pg_temp.shown(queue.defer('t', priority => 2147483647), 'priority'), '(2147483647)', 'the highest');
select is(pg_temp.shown(queue.defer('t', lock => 'L'), 'lock'), '(L)', 'lock');
select is(pg_temp.shown(queue.defer('t', queueing_lock => 'QL'), 'queueing_lock'), '(QL)', 'queueing_lock');
select is(pg_temp.shown(queue.defer('t', scheduled_at => '2999-01-01Z'), 'state', 'scheduled_at = ''2999-01-01Z'''), '(scheduled,t)', 'scheduled_at');
select is(pg_temp.shown(queue.defer('t', scheduled_at => '1999-01-01Z'), 'state', 'scheduled_at = ''1999-01-01Z'''), '(ready,t)', 'scheduled_at that has passed');
select is(pg_temp.shown(queue.defer('t', deadline => '2999-01-01Z'), 'deadline = ''2999-01-01Z'''), '(t)', 'deadline');
select is(pg_temp.shown(queue.defer('t', needs => array[:id, :id]::bigint[]), 'state', 'needs'), format('(waiting,{%s})', :id), 'needs, each once');
select is(pg_temp.shown(queue.defer('t', needs => '{}'), 'state', 'needs'), '(ready,)', 'no needs');
select is(pg_temp.shown(queue.defer('t', concurrency_key => 'K', concurrency_limit => 2), 'concurrency_key'), '(K)', 'concurrency_key');
select is(pg_temp.shown(queue.defer('t', concurrency_limit => 2), 'concurrency_key'), '()', 'a limit without a key');
select is(pg_temp.shown(queue.defer('t', options => 'null'), 'state'), '(ready)', 'options null');
select is(pg_temp.shown(queue.defer('t', options => '{}'), 'state'), '(ready)', 'options empty');
select is(pg_temp.shown(queue.defer('t', options => '{"delay": "1 hour"}'), 'state', 'scheduled_at between now() and now() + interval ''61 min'''), '(scheduled,t)', 'delay');
select is(pg_temp.shown(queue.defer('t', options => '{"delay": 3600.5}'), 'state', 'scheduled_at between now() and now() + interval ''61 min'''), '(scheduled,t)', 'delay in seconds');
select is(pg_temp.shown(queue.defer('t', options => '{"expires_at": "2999-01-01Z"}'), 'expires_at = ''2999-01-01Z'''), '(t)', 'expires_at');
select is(pg_temp.shown(queue.defer('t', options => '{"held": true}'), 'state'), '(held)', 'held');
select is(pg_temp.shown(queue.defer('t', options => '{"held": false}'), 'state'), '(ready)', 'not held');
select is(pg_temp.shown(queue.defer('t', options => '{"description": "what \"for\""}'), 'description'), '("what ""for""")', 'description');
select is(pg_temp.shown(queue.defer('t', options => '{"timeout": 5, "retain": {"failed": "1 day"}, "share": "ann", "retry": {"base": 1}, "delay": 0, "held": false, "description": "d"}'), 'options'), ('("' || replace('{"retry": {"base": 1}, "share": "ann", "retain": {"failed": "1 day"}, "timeout": 5}', '"', '""') || '")'), 'the others can be read again, without those that have a column');
select is(pg_temp.shown(queue.defer('t', concurrency_key => 'K', concurrency_limit => 2, options => '{"concurrency": [{"key": "{a}", "limit": 9, "weight": 3}, {"key": "R", "rate": {"limit": 1, "per": "1 s"}}]}', args => '{"a": "x"}'), 'options -> ''concurrency'' = ''[{"key": "K", "limit": 2}, {"key": "x", "limit": 9, "weight": 3}, {"key": "R", "rate": {"limit": 1, "per": "1 s"}}]'''), '(t)', 'with all keys, as they were filled');
select is(pg_temp.shown(queue.defer('t', options => '{"held": true, "description": "d"}'), 'options'), '()', 'or there are none');
select is(pg_temp.shown(queue.defer('t', options => '{"headers": {"traceparent": "00", "n": null}}'), 'headers'), '("{""n"": null, ""traceparent"": ""00""}")', 'headers, nulls too');
select is(pg_temp.shown(queue.defer('t', options => jsonb_build_object('parent', :id)), 'parent', 'deadline'), format('(%s,)', :id), 'parent');
select queue.defer('t', deadline => '2998-01-01Z') as parent \gset
select is(pg_temp.shown(queue.defer('t', options => jsonb_build_object('parent', :parent)), 'deadline = ''2998-01-01Z'''), '(t)', 'a child has its parent''s deadline');
select is(pg_temp.shown(queue.defer('t', deadline => '2999-01-01Z', options => jsonb_build_object('parent', :parent)), 'deadline = ''2999-01-01Z'''), '(t)', 'unless it is given one');
select isnt(queue.defer('t', queueing_lock => 'x', options => '{"on_conflict": "replace"}'), null, 'on_conflict');
select isnt(queue.defer('t', queueing_lock => 'y', options => '{"unique_until": "finish"}'), null, 'unique_until');
select isnt(queue.defer('t', lock => 'm', options => '{"lock_mode": "mutex"}'), null, 'lock_mode');
select isnt(queue.defer('t', needs => array[:id]::bigint[], options => '{"needs_mode": "any", "on_need_failure": "proceed"}'), null, 'needs_mode and on_need_failure');
select isnt(queue.defer('t', concurrency_key => 'K', concurrency_limit => 2, options => '{"on_limit": "discard"}'), null, 'on_limit');
select isnt(queue.defer('t', options => '{"retry": {"max_attempts": 3, "backoff": "exponential", "base": "1 s", "jitter": 0.5}}'), null, 'retry');
select isnt(queue.defer('t', options => '{"timeout": "1 min", "retain": "1 day", "max_progress": 5}'), null, 'timeout, retain and max_progress');
select is((select j.keys from queue.job j where j.id = queue.defer('t')), null, 'a job is not in the snapshot that defers it');
select queue.defer('t', concurrency_key => 'a', concurrency_limit => 1, options => '{"concurrency": [{"key": "b", "limit": 2}, {"key": "c", "limit": 3}]}') as id \gset
select is((select (j.keys, j.limits)::text from queue.job j where j.id = :id), '("{a,b,c}","{1,2,3}")', 'several keys');

-- Templates
select is(pg_temp.shown(queue.defer('t', '{"a": 1, "b": "x", "c": true, "ü d": 2.50}', lock => '{a}/{b}:{c}-{ü d}{a}'), 'lock'), '(1/x:true-2.501)', 'fields of all kinds');
select is(pg_temp.shown(queue.defer('t', '{"a": "{b}", "b": "x"}', lock => '{a}'), 'lock'), '({b})', 'filled-in text is not filled in again');
select throws_ok($$select queue.defer('t', '{"a": ""}', lock => '{a}')$$, '22023', 'lock is empty with these args', 'a text that is filled in but empty');
select is(pg_temp.shown(queue.defer('t', '{"a": ""}', lock => '{a}!'), 'lock'), '(!)', 'one field of a longer text may be');
select is(pg_temp.shown(queue.defer('t', '{"a": 1}', lock => '{ {a} } {'), 'lock'), '("{ 1 } {")', 'braces that enclose no field stay');
select is(queue._fill('lock', l, '{"a": 1}'), w, l) from (values
  ('{{a}}', '{a}'), ('{{{a}}}', '{1}'), ('{{{{a}}}}', '{{a}}'), ('{a}}}', '1}'), ('{a}}', '1}'), ('}}{a}{{', '}1{'), ('{{}}', '{}'), ('}}', '}'), ('{{', '{'), ('a}}}b', 'a}}b'), ('{', '{'), ('}', '}'),
  ('{{b}}{a}{{b}}', '{b}1{b}')) v (l, w);
select is(pg_temp.shown(queue.defer('t', '{"a": 1}', queueing_lock => 'q{{a}}', concurrency_key => 'k{{a}}', concurrency_limit => 1, options => '{"share": "s{{a}}", "idempotency_key": "i{{a}}"}'), 'queueing_lock', 'concurrency_key'),
  '(q{a},k{a})', 'every template');
select is(array(select test.refusal(format('select queue.defer(''t'', ''{"a": 1}'', lock => %L)', l)) from unnest('{"{{a}","{{a}}}","{{{a}}","{{a}} {","} {{a}}","{{b}","{b}}","{{{b}}}","{{a}} {b}","{}","{}}","{\"k\": {{a"}'::text[]) l),
  array_fill('22023'::text, '{12}'), 'where braces are doubled, no single one is left over');
select is((select count(*) from generate_series(1, 3000) n
    cross join lateral (select string_agg(substr('{}{}ab', 1 + floor(random() * 6)::integer, 1), '') as text from generate_series(1, 1 + n % 9)) s
    where queue._fill('lock', queue._literal(s.text), '{}') is distinct from s.text), 0::bigint, 'a text is the text of its template');
select is(pg_temp.shown(queue.defer('t', '{"a": 1}', queueing_lock => 'q{a}', concurrency_key => 'k{a}', concurrency_limit => 1), 'queueing_lock', 'concurrency_key'), '(q1,k1)', 'queueing_lock and concurrency_key as well');
select queue.defer('t', '{"a": 1}', options => '{"concurrency": [{"key": "x{a}", "limit": 2}]}') as id \gset
select is((select j.keys from queue.job j where j.id = :id), '{x1}', 'keys in options too');
select is(pg_temp.shown(queue.defer('t{a}', '{"a": 1}', queue => 'q{a}'), 'task', 'queue'), '(t{a},q{a})', 'tasks and queues are no templates');

-- Names
create temp table names (name text);
insert into names values (e'a "b" ''c'' \\ %s {} \n\t$1 ;--'), ('Größe 🐘 日本'), (repeat('é', 500)), ('NULL'), (' '), (E'\u200f\u0001'), ('a,b}{"c'), ('-x');
create temp table named as
  select n.name, queue.defer(n.name, queue => n.name, lock => n.name, queueing_lock => n.name, concurrency_key => n.name, concurrency_limit => 1) as id
  from names n where n.name not like '%{%';
select is((select count(*) from named n join queue.jobs j on j.id = n.id
           where (j.task, j.queue, j.lock, j.queueing_lock, j.concurrency_key) = (n.name, n.name, n.name, n.name, n.name)), 6::bigint,
          'names of any characters, up to 1,000 bytes');
select is((select count(*) from queue.defer_many((select jsonb_agg(jsonb_build_object('task', m.name, 'queue', m.name || '|')) from names m
                                                 where octet_length(m.name) < 1000))), 7::bigint, 'deferring many');
select is((select count(*) from names n join queue.jobs j on j.task = n.name and j.queue = n.name || '|'), 7::bigint, 'in defer_many too');
select isnt(queue.defer('t', lock => 'case'), queue.defer('t', lock => 'CASE'), 'case is kept');

-- Transactions
select count(*) as before from queue.jobs \gset
begin;
select queue.defer('gone'), queue.defer_many('[{"task": "gone"}]');
rollback;
begin;
select queue.defer('kept');
savepoint s;
select queue.defer('gone', queueing_lock => 'free again');
rollback to s;
select queue.defer('kept', queueing_lock => 'free again');
commit;
select is((select count(*) from queue.jobs) - :before, 2::bigint, 'a job exists if its transaction and its savepoint commit');
begin isolation level serializable read write;
select queue.defer('serializable', lock => 'l', needs => array[:id]::bigint[]) as id \gset
commit;
select is(pg_temp.shown(:id, 'task'), '(serializable)', 'at any isolation level');

-- queueing_lock
select queue.defer('first', queueing_lock => 'one') as id \gset
select is(test.refusal($$select queue.defer('second', queueing_lock => 'one')$$), 'QJ004', 'one job holds a queueing lock');
select is(queue.defer('second', queueing_lock => 'one', options => '{"on_conflict": "ignore"}'), :id::bigint, 'ignore returns that one');
select is(queue.defer('second', '{"new": 1}', priority => 3, queueing_lock => 'one', options => '{"on_conflict": "replace"}'), :id::bigint, 'replace too');
begin;
select is(test.refusal($$select queue.defer('second', queueing_lock => 'one')$$), 'QJ004', 'a conflict');
select is(queue.defer('second', queueing_lock => 'one', options => '{"on_conflict": "ignore"}'), :id::bigint, 'leaves the transaction usable');
commit;

-- defer_many: order, all or nothing, both ways the same
create temp table many as
  select d.id, d.n from queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'many', 'args', jsonb_build_object('n', n))) from generate_series(1, 1000) n))
    with ordinality d (id, n);
select is((select string_agg(m.id::text, ',' order by m.n) from many m), (select string_agg(j.id::text, ',' order by j.id) from queue.jobs j where j.task = 'many'), 'ids in order');
select is((select string_agg(j.args ->> 'n', ',' order by j.id) from queue.jobs j where j.task = 'many'), (select string_agg(n::text, ',' order by n) from generate_series(1, 1000) n), 'of the input');
select queue.register_task('task ' || n, jsonb_build_object('queue', 'queue ' || n, 'priority', n)) from generate_series(1, 400) n \g /dev/null
analyze queue.task;
create temp table ordered as
  select d.id, d.n from queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'task ' || 400 - n % 400, 'args', jsonb_build_object('n', n)) order by n)
                                          from generate_series(1, 1000) n)) with ordinality d (id, n);
select is((select count(*) from ordered o join queue.jobs j on j.id = o.id
           where j.args ->> 'n' = o.n::text and j.task = 'task ' || 400 - o.n % 400 and j.queue = 'queue ' || j.priority and j.task = 'task ' || j.priority), 1000::bigint,
          'in order with many registered tasks too');
select is((select count(*) from ordered o join ordered p on p.n = o.n + 1 where p.id <= o.id), 0::bigint, 'and ascending');
select queue.defer_many('[{"task": "mixed", "lock": "x"}, {"task": "mixed"}, {"task": "mixed", "options": {"delay": 5}}, {"task": "mixed", "needs": []}]') \g /dev/null
select is((select string_agg(j.flags::text, ',' order by j.id) from queue.job j where j.task = 'mixed'), '1,0,16,0', 'jobs of all kinds in order');
select is_empty($$select queue.defer_many('[]')$$, 'no jobs');
select results_eq($$select count(*) from queue.defer_many('[{"task": "t"}, {"task": "t"}]')$$, 'values (2::bigint)', 'in FROM as well');

select queue.register_task('has defaults', '{"queue": "dq", "priority": 4}');
\set jobs '[{"task": "same"}, {"task": "same", "args": {"a": 1}}, {"task": "same", "queue": ""}, {"task": "same", "queue": "x", "priority": -5}, {"task": "has defaults"}, {"task": "has defaults", "queue": ""}, {"task": "has defaults", "priority": 0, "queue": "y"}]'
create temp table fast as
  select d.n, j.* from queue.defer_many(:'jobs') with ordinality d (id, n) cross join lateral (select d.id) j;
create temp table slow as
  select d.n, j.* from queue.defer_many(:'jobs' || '[{"task": "slow", "lock": "x"}]'::jsonb) with ordinality d (id, n) cross join lateral (select d.id) j where d.n < 8;
create temp table single as
  select j.n, queue.defer(j.job ->> 'task', j.job -> 'args', j.job ->> 'queue', (j.job ->> 'priority')::integer) as id
  from jsonb_array_elements(:'jobs') with ordinality j (job, n);
create function pg_temp.made(ids regclass) returns text language plpgsql as $$
declare
  v_text text;
begin
  execute format($q$select string_agg(row (j.task, j.args, j.queue, j.priority, j.lock, j.queueing_lock, j.keys, j.limits, j.needs, j.scheduled_at, j.deadline, j.flags, j.options)::text,
                                      e'\n' order by x.n) from %s x join queue.job j on j.id = x.id$q$, ids) into v_text;
  return v_text;
end $$;
select is(pg_temp.made('fast'), pg_temp.made('single'), 'the fast path gives the same result as defer');
select is(pg_temp.made('slow'), pg_temp.made('single'), 'the slow way too');
select is(pg_temp.shown((select d from queue.defer_many('[{"task": "t", "args": null, "queue": null, "priority": null, "lock": null, "queueing_lock": null, "scheduled_at": null, "deadline": null, "needs": null, "concurrency_key": null, "concurrency_limit": null, "options": null}]') d),
          'args', 'queue', 'priority', 'state'), '({},default,0,ready)', 'null is not given');
select is(pg_temp.shown((select d from queue.defer_many(format('[{"task": "t", "args": {"a": 1}, "queue": "q", "priority": 1, "lock": "{a}", "queueing_lock": "many {a}", "scheduled_at": "2999-01-01Z",
            "deadline": "2999-01-02Z", "needs": [%s], "concurrency_key": "k", "concurrency_limit": 2, "options": {"description": "d"}}]', :id)::jsonb) d),
          'args', 'queue', 'priority', 'lock', 'queueing_lock', 'scheduled_at = ''2999-01-01Z''', 'deadline = ''2999-01-02Z''', 'concurrency_key', 'description', 'needs is null'),
          '("{""a"": 1}",q,1,1,"many 1",t,t,k,d,f)', 'every key');
select results_eq($$select pg_temp.shown(d, 'queue', 'state', 'description', 'headers', 'lock') from queue.defer_many('[{"task": "t", "queue": "q", "held": true, "description": "d", "headers": {"a": 1}, "lock": "flat"},
            {"task": "t", "queue": "q", "options": {"held": true, "headers": {"a": 1}}, "description": "d", "lock": "flat"}, {"task": "t", "queue": "q", "description": "d", "headers": {"a": 1}, "held": true, "lock": "flat", "options": null}]') d$$,
          $$select '(q,held,d,"{""a"": 1}",flat)' from generate_series(1, 3)$$, 'options beside the other keys');
select is((select count(distinct d)::integer from queue.defer_many('[{"task": "flat", "idempotency_key": "f"}, {"task": "flat", "options": {"idempotency_key": "f"}}]') d), 1, 'an idempotency key among them');

-- defer_trigger
create table public.account (id integer, name text, at timestamptz);
create trigger on_insert after insert on public.account for each row execute function queue.defer_trigger('inserted');
create trigger on_update after update on public.account for each row when (new.name <> old.name)
  execute function queue.defer_trigger('updated', '{"queue": "changes", "lock": "account {id}", "priority": 3, "options": {"delay": "1 hour"}}');
create trigger on_delete before delete on public.account for each row execute function queue.defer_trigger('deleted', '{}');
create function pg_temp.deferred(task text) returns text language sql as $$
  select string_agg(row (j.args ->> 'id', j.args ->> 'name', j.queue, j.lock, j.priority, j.state)::text, ' ' order by j.id) from queue.jobs j where j.task = deferred.task
$$;
insert into public.account values (1, 'a', '2030-01-01Z'), (2, null, null);
select is(pg_temp.deferred('inserted'), '(1,a,default,,0,ready) (2,,default,,0,ready)', 'a row inserted');
select is((select j.args from queue.jobs j where j.task = 'inserted' order by j.id limit 1), (select to_jsonb(a) from public.account a where a.id = 1), 'is the args, as to_jsonb has it');
update public.account set name = 'b' where id = 1;
select is(pg_temp.deferred('updated'), '(1,b,changes,"account 1",3,scheduled)', 'the new row of an update, with keys');
update public.account set name = 'b' where id = 1;
select is(pg_temp.deferred('updated'), '(1,b,changes,"account 1",3,scheduled)', 'a trigger''s WHEN decides');
delete from public.account where id = 1;
select is(pg_temp.deferred('deleted'), '(1,b,default,,0,ready)', 'the old row of a delete, before it too');
select is((select count(*) from public.account), 1::bigint, 'which continues');
select queue.register_task('inserted', '{"queue": "by default", "lock": "{name}"}');
begin;
insert into public.account values (3, 'c', null);
rollback;
insert into public.account values (4, 'd', null);
select is(split_part(pg_temp.deferred('inserted'), ' (', 3), '4,d,"by default",d,0,ready)', 'with the task''s defaults; only if it commits');
select is(test.refusal($$insert into public.account values (5, null, null)$$), '22023', 'a template that the row does not fill refuses the row');
select is((select count(*) from public.account a where a.id = 5), 0::bigint, 'nothing half done');
create trigger on_insert_2 before insert on public.account for each row execute function queue.defer_trigger('inserted too', '{"queueing_lock": "a{id}", "options": {"on_conflict": "ignore"}}');
insert into public.account values (6, 'e', null), (6, 'e', null);
select is((select count(*) from queue.jobs j where j.task = 'inserted too'), 1::bigint, 'queueing locks in triggers');
select is((select count(*) from public.account a where a.id = 6), 2::bigint, 'leave the rows');
drop trigger on_insert on public.account;
create trigger flat after insert on public.account for each row execute function queue.defer_trigger('flat row', '{"delay": "1 hour", "lock": "{id}"}');
insert into public.account values (7, 'f', null);
select is(pg_temp.deferred('flat row'), '(7,f,default,7,0,scheduled)', 'options beside the other keys of a trigger');
drop trigger flat on public.account;
drop trigger on_insert_2 on public.account;

-- Generated columns. Before 18 all are stored.
select current_setting('server_version_num')::integer >= 180000 as has_virtual \gset
create table public.bill (id integer, stored integer generated always as (id * 2) stored);
\if :has_virtual
  alter table public.bill add virtual integer generated always as (id * 3) virtual;
\endif
create trigger before before insert on public.bill for each row execute function queue.defer_trigger('before bill');
create trigger after after insert on public.bill for each row execute function queue.defer_trigger('after bill');
create trigger deleted before delete on public.bill for each row execute function queue.defer_trigger('deleted bill');
insert into public.bill (id) values (1);
delete from public.bill;
select is((select j.args from queue.jobs j where j.task = 'before bill'), '{"id": 1}', 'before a row is stored, generated columns are left out');
select is((select j.args from queue.jobs j where j.task = 'after bill'), '{"id": 1, "stored": 2}', 'afterwards only virtual ones');
select is((select j.args from queue.jobs j where j.task = 'deleted bill'), '{"id": 1, "stored": 2}', 'of an old row too');

create function pg_temp.refused_trigger(level text, arguments text) returns text language plpgsql as $$
declare
  v_answer text;
begin
  execute format('create trigger bad after insert on public.account for each %s execute function queue.defer_trigger(%s)', level, arguments);
  v_answer := test.refusal('insert into public.account values (9)');
  drop trigger bad on public.account;
  return v_answer;
end $$;
select is(pg_temp.refused_trigger(level, arguments), '22023', 'a trigger for each ' || level || ' with ' || arguments)
from (values ('statement', '''t'''), ('row', ''), ('row', '''t'', ''{}'', ''x'''), ('row', ''''''), ('row', '''t'', ''{'''), ('row', '''t'', ''[]'''), ('row', '''t'', ''null'''),
             ('row', '''t'', ''{"delay": 1, "options": {"delay": 1}}'''), ('row', '''t'', ''{"args": {}}'''), ('row', '''t'', ''{"task": "x"}'''), ('row', '''t'', ''{"priority": "x"}'''), ('row', '''t'', ''{"queue": "x*"}''')) v (level, arguments);

-- Refusals
create temp table before as select (select count(*) from queue.job) as jobs, (select count(*) from queue.queueing_lock) as locks, (select count(*) from queue.pending_settlement) as handovers;
create temp table bad as select v.call from (values
  ($$select queue.defer(null)$$),
  ($$select queue.defer('')$$),
  ($$select queue.defer(repeat('x', 1001))$$),
  ($$select queue.defer(repeat('é', 501))$$),
  ($$select queue.defer('t', '[]')$$),
  ($$select queue.defer('t', '"a"')$$),
  ($$select queue.defer('t', 'null')$$),
  ($$select queue.defer('t', queue => '*')$$),
  ($$select queue.defer('t', queue => 'a*')$$),
  ($$select queue.defer('t', queue => 'a*', lock => 'l')$$),
  ($$select queue.defer('t', queue => repeat('x', 1001))$$),
  ($$select queue.defer('t', queue => repeat('x', 1001), lock => 'l')$$),
  ($$select queue.defer('t', lock => repeat('x', 1001))$$),
  ($$select queue.defer('t', lock => '{missing}')$$),
  ($$select queue.defer('t', '{"a": null}', lock => '{a}')$$),
  ($$select queue.defer('t', '{"a": {}}', lock => '{a}')$$),
  ($$select queue.defer('t', '{"a": [1]}', lock => '{a}')$$),
  ($$select queue.defer('t', jsonb_build_object('a', repeat('x', 1000)), lock => '-{a}')$$),
  ($$select queue.defer('t', queueing_lock => repeat('x', 1001))$$),
  ($$select queue.defer('t', queueing_lock => '{missing}')$$),
  ($$select queue.defer('t', scheduled_at => 'infinity')$$),
  ($$select queue.defer('t', scheduled_at => '-infinity')$$),
  ($$select queue.defer('t', needs => '{1,null}')$$),
  ($$select queue.defer('t', concurrency_key => 'k')$$),
  ($$select queue.defer('t', concurrency_key => 'k', concurrency_limit => 1, options => jsonb_build_object('concurrency', (select jsonb_agg(jsonb_build_object('key', n::text, 'limit', 1)) from generate_series(1, 100) n)))$$),
  ($$select queue.defer('t', needs => array_fill(1::bigint, '{100001}'))$$),
  ($$select queue.defer('t', concurrency_key => 'k', concurrency_limit => 0)$$),
  ($$select queue.defer('t', concurrency_key => 'k', concurrency_limit => -1)$$),
  ($$select queue.defer('t', concurrency_limit => 0)$$),
  ($$select queue.defer('t', concurrency_key => '{missing}', concurrency_limit => 1)$$),
  ($$select queue.defer('t', concurrency_key => repeat('x', 1001), concurrency_limit => 1)$$),
  ($$select queue.defer('t', options => '[]')$$),
  ($$select queue.defer_many('[{"task": "t", "delay": 1, "options": {"delay": 1}}]')$$),
  ($$select queue.defer_many('[{"task": "t", "delay": 1, "options": []}]')$$),
  ($$select queue.defer_many('[{"task": "t", "delay": 1, "dealy": 1}]')$$),
  ($$select queue.defer_many('[{"task": "t", "delay": "soon"}]')$$),
  ($$select queue.defer('t', options => '1')$$),
  ($$select queue.defer('t', options => '{"unknown": 1}')$$),
  ($$select queue.defer('t', options => '{"queue": "q"}')$$),
  ($$select queue.defer('t', options => '{"delay": "soon"}')$$),
  ($$select queue.defer('t', options => '{"delay": "-1 s"}')$$),
  ($$select queue.defer('t', options => '{"delay": -0.5}')$$),
  ($$select queue.defer('t', options => '{"delay": true}')$$),
  ($$select queue.defer('t', options => '{"delay": 1e300}')$$),
  ($$select queue.defer('t', options => '{"delay": "200000 years"}')$$),
  ($$select queue.defer('t', scheduled_at => now(), options => '{"delay": 1}')$$),
  ($$select queue.defer('t', options => '{"on_conflict": "explode"}')$$),
  ($$select queue.defer('t', options => '{"on_conflict": 1}')$$),
  ($$select queue.defer('t', options => '{"unique_until": "never"}')$$),
  ($$select queue.defer('t', options => '{"lock_mode": "loose"}')$$),
  ($$select queue.defer('t', options => '{"needs_mode": "some"}')$$),
  ($$select queue.defer('t', options => '{"on_need_failure": "panic"}')$$),
  ($$select queue.defer('t', options => '{"on_limit": "drop"}')$$),
  ($$select queue.defer('t', options => '{"retry": 3}')$$),
  ($$select queue.defer('t', options => '{"retry": {"unknown": 3}}')$$),
  ($$select queue.defer('t', options => '{"retry": {"max_attempts": 0}}')$$),
  ($$select queue.defer('t', options => '{"retry": {"backoff": "fibonacci"}}')$$),
  ($$select queue.defer('t', options => '{"retry": {"jitter": 2}}')$$),
  ($$select queue.defer('t', options => '{"timeout": 0}')$$),
  ($$select queue.defer('t', options => '{"timeout": "x"}')$$),
  ($$select queue.defer('t', options => '{"timeout": "200000 years"}')$$),
  ($$select queue.defer('t', options => '{"expires_at": "x"}')$$),
  ($$select queue.defer('t', options => '{"expires_at": 5}')$$),
  ($$select queue.defer('t', options => '{"held": "yes"}')$$),
  ($$select queue.defer('t', options => '{"description": 1}')$$),
  ($$select queue.defer('t', options => '{"headers": "x"}')$$),
  ($$select queue.defer('t', options => '{"parent": "x"}')$$),
  ($$select queue.defer('t', options => '{"parent": 1.5}')$$),
  ($$select queue.defer('t', options => '{"parent": -1}')$$),
  ($$select queue.defer('t', options => '{"retain": "-1 s"}')$$),
  ($$select queue.defer('t', options => '{"concurrency": {}}')$$),
  ($$select queue.defer('t', options => '{"concurrency": [1]}')$$),
  ($$select queue.defer('t', options => '{"concurrency": [{"key": "k"}]}')$$),
  ($$select queue.defer('t', options => '{"concurrency": [{"key": "k", "limit": 0}]}')$$),
  ($$select queue.defer('t', options => '{"concurrency": [{"key": "k", "limit": 1.5}]}')$$),
  ($$select queue.defer('t', options => '{"concurrency": [{"key": "", "limit": 1}]}')$$),
  ($$select queue.defer('t', options => '{"concurrency": [{"key": "k", "limit": 1, "x": 1}]}')$$),
  ($$select queue.defer('t', options => '{"concurrency": [{"key": "k", "limit": 1}, {"key": "k", "limit": 1}]}')$$),
  ($$select queue.defer('t', '{"a": "k"}', concurrency_key => 'k', concurrency_limit => 1, options => '{"concurrency": [{"key": "{a}", "limit": 1}]}')$$),
  ($$select queue.defer('t', options => '{"max_progress": -1}')$$),
  ($$select queue.defer('t', options => '{"max_progress": 10000000000}')$$),
  ($$select queue.defer_many(null)$$),
  ($$select queue.defer_many('{}')$$),
  ($$select queue.defer_many('[1]')$$),
  ($$select queue.defer_many('[null]')$$),
  ($$select queue.defer_many('[[]]')$$),
  ($$select queue.defer_many('[{}]')$$),
  ($$select queue.defer_many('[{"task": null}]')$$),
  ($$select queue.defer_many('[{"task": ""}]')$$),
  ($$select queue.defer_many('[{"task": 5}]')$$),
  ($$select queue.defer_many('[{"task": "t", "unknown": 1}]')$$),
  ($$select queue.defer_many('[{"task": "t", "args": []}]')$$),
  ($$select queue.defer_many('[{"task": "t", "args": "x"}]')$$),
  ($$select queue.defer_many('[{"task": "t", "queue": "a*"}]')$$),
  ($$select queue.defer_many('[{"task": "t", "queue": {"a": 1}}]')$$),
  ($$select queue.defer_many('[{"task": "t", "priority": "5"}]')$$),
  ($$select queue.defer_many('[{"task": "t", "priority": 1.5}]')$$),
  ($$select queue.defer_many('[{"task": "t", "priority": 3000000000}]')$$),
  ($$select queue.defer_many('[{"task": "t", "lock": 5}]')$$),
  ($$select queue.defer_many('[{"task": "t", "scheduled_at": "x"}]')$$),
  ($$select queue.defer_many('[{"task": "t", "scheduled_at": 20300101}]')$$),
  ($$select queue.defer_many('[{"task": "t", "deadline": "x"}]')$$),
  ($$select queue.defer_many('[{"task": "t", "deadline": 20300101}]')$$),
  ($$select queue.defer_many('[{"task": "t", "needs": 1}]')$$),
  ($$select queue.defer_many('[{"task": "t", "needs": ["x"]}]')$$),
  ($$select queue.defer_many('[{"task": "t", "needs": [1.5]}]')$$),
  ($$select queue.defer_many('[{"task": "t", "needs": ["1"]}]')$$),
  ($$select queue.defer_many('[{"task": "t", "options": []}]')$$),
  ($$select queue.defer_many('[{"task": "t"}, {"task": "t"}, {"task": "t", "lock": "{missing}"}]')$$),
  ($$select queue.defer_many('[{"task": "t", "queueing_lock": "half"}, {"task": "t", "options": {"x": 1}}]')$$),
  ($$select queue.defer_many(jsonb_build_array(jsonb_build_object('task', repeat('x', 1001))))$$),
  ($$select queue.defer_many(jsonb_build_array(jsonb_build_object('task', 't', 'queue', repeat('x', 1001))))$$)
) v (call);
select is(test.refusal(b.call), '22023', left(b.call, 100)) from bad b;
select is(test.refusal(replace(b.call, $$defer('t'$$, $$defer('has defaults'$$)), '22023', 'of a registered task: ' || left(b.call, 100)) from bad b where b.call like $$%defer('t'%$$;
select is(test.refusal(call), code, left(call, 100))
from (values
  ($$select queue.defer('t', needs => '{999999999}')$$, 'QJ001'),
  ($$select queue.defer('t', options => '{"parent": 999999999}')$$, 'QJ001'),
  ($$select queue.defer_many('[{"task": "t"}, {"task": "t", "needs": [999999999]}]')$$, 'QJ001'),
  ($$select queue.defer_many('[{"task": "t", "queueing_lock": "twice"}, {"task": "t", "queueing_lock": "twice"}]')$$, 'QJ004')
) v (call, code);
select is((select (b.jobs, b.locks, b.handovers)::text from before b),
          (select ((select count(*) from queue.job), (select count(*) from queue.queueing_lock), (select count(*) from queue.pending_settlement))::text), 'and nothing was half done');

-- Everything that is accepted can be admitted: nothing here may stop the queue.
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
select test.change('queue._claim_loop', '100 ms', '1 hour') \g /dev/null
select count(*) as fetched from queue.fetch(:worker, max_jobs => 100000) \gset
select cmp_ok(:fetched + (select count(*) from queue.fetch(:worker, max_jobs => 100000)), '>', 1500::bigint, 'all that was accepted is admitted, and run');

select * from finish();
