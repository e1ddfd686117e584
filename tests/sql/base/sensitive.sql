-- Sensitive args: who sees them, in every place that shows args, and that nobody finds out by asking.

select plan(166);

create role pgdefer_hide_reader;
create role pgdefer_hide_operator;
create role pgdefer_hide_worker;
create role pgdefer_hide_shop;
create role pgdefer_hide_member;
create role pgdefer_hide_sleeper noinherit;
select queue.grant_access('pgdefer_hide_reader', 'reader'), queue.grant_access('pgdefer_hide_operator', 'operator'),
  queue.grant_access('pgdefer_hide_worker', 'worker'), queue.grant_access('pgdefer_hide_member', 'reader'),
  queue.grant_access('pgdefer_hide_sleeper', 'reader') \g /dev/null
select format('grant %I to pgdefer_hide_member, pgdefer_hide_sleeper', c.relowner::regrole::text) from pg_class c where c.oid = 'queue.access'::regclass \gexec

-- What a role sees: the first column of a query's rows, or the error. Its effects stay unless it fails.
create function pg_temp.seen(p_role text, p_query text) returns text language plpgsql as $$
declare
  v_row record;
  v_text text;
begin
  execute format('set local role %I', p_role);
  begin
    for v_row in execute format('select q.v::text as v from (%s) q (v)', p_query) loop
      v_text := concat_ws(' ', v_text, coalesce(v_row.v, 'NULL'));
    end loop;
  exception when others then
    v_text := sqlstate || ' ' || sqlerrm;
  end;
  set local role none;
  return v_text;
end $$;
create function pg_temp.reader(p_query text) returns text language sql as $$ select pg_temp.seen('pgdefer_hide_reader', p_query) $$;
create function pg_temp.operator(p_query text) returns text language sql as $$ select pg_temp.seen('pgdefer_hide_operator', p_query) $$;
create function pg_temp.worker(p_query text) returns text language sql as $$ select pg_temp.seen('pgdefer_hide_worker', p_query) $$;
-- What paths leave of args
create function pg_temp.cut(p_paths text, p_args text) returns text language sql as $$ select queue._mask_args(queue._sensitive_paths(p_paths::jsonb), p_args::jsonb)::text $$;

-- Paths
select is(pg_temp.cut(p.paths, p.args), p.shown::jsonb::text, p.what) from (values
  ('["password"]', '{"password": "s", "user": "u"}', '{"password": "***", "user": "u"}', 'a name'),
  ('["card.number"]', '{"card": {"number": "4", "name": "n"}, "number": 1}', '{"card": {"number": "***", "name": "n"}, "number": 1}', 'a nested name'),
  ('["$.card.number"]', '{"card": {"number": "4"}}', '{"card": {"number": "***"}}', 'as a jsonpath'),
  ('["lax $.card.number"]', '{"card": {"number": "4"}}', '{"card": {"number": "***"}}', 'a lax one'),
  ('["card"]', '{"card": {"number": "4"}}', '{"card": "***"}', 'an object as a whole'),
  ('["a", "a.b", "a.b.c"]', '{"a": {"b": {"c": 1}}}', '{"a": "***"}', 'paths within each other'),
  ('["a.b.c", "a.b"]', '{"a": {"b": {"c": 1}, "d": 2}}', '{"a": {"b": "***", "d": 2}}', 'in any order'),
  ('["a.b", "a.b"]', '{"a": {"b": 1}}', '{"a": {"b": "***"}}', 'a path twice'),
  ('["card.number"]', '{}', '{}', 'a missing path'),
  ('["card.number"]', '{"card": null}', '{"card": null}', 'null on the way'),
  ('["card.number"]', '{"card": "4"}', '{"card": "4"}', 'a text on the way'),
  ('["card.number"]', '{"card": {"number": null}}', '{"card": {"number": "***"}}', 'null is hidden too'),
  ('["n"]', '{"n": 12345678901234567890.5}', '{"n": "***"}', 'a number'),
  ('["n"]', '{"n": [1, 2]}', '{"n": "***"}', 'a list as a whole'),
  ('["cards[*].number"]', '{"cards": [{"number": 1, "x": 1}, {"x": 2}, {"number": 3}]}', '{"cards": [{"number": "***", "x": 1}, {"x": 2}, {"number": "***"}]}', 'in all elements'),
  ('["cards.number"]', '{"cards": [{"number": 1}, [{"number": 2}]]}', '{"cards": [{"number": "***"}, [{"number": "***"}]]}', 'a name means those of all elements'),
  ('["cards[*].number"]', '{"cards": {"number": 1}}', '{"cards": {"number": "***"}}', 'one in place of a list'),
  ('["keys[*]"]', '{"keys": [1, {"a": 2}, null]}', '{"keys": ["***", "***", "***"]}', 'the elements themselves'),
  ('["keys[*]"]', '{"keys": "k"}', '{"keys": "***"}', 'or the one in place of a list'),
  ('["keys[1]"]', '{"keys": [1, 2, 3]}', '{"keys": [1, "***", 3]}', 'one element'),
  ('["keys[0]"]', '{"keys": "k"}', '{"keys": "***"}', 'the first of what is no list'),
  ('["keys[1]"]', '{"keys": "k"}', '{"keys": "k"}', 'which has no second'),
  ('["keys[9]"]', '{"keys": [1]}', '{"keys": [1]}', 'nor a list of one a tenth'),
  ('["m[*][1]"]', '{"m": [[1, 2], [3], 4]}', '{"m": [[1, "***"], [3], 4]}', 'lists in lists'),
  ('["\"a b\".\"c.d\"", "\"q\\\"r\"", "Ünï", "\"back\\\\slash\""]', '{"a b": {"c.d": 1}, "q\"r": 2, "Ünï": 3, "back\\slash": 4, "a": 5}',
   '{"a b": {"c.d": "***"}, "q\"r": "***", "Ünï": "***", "back\\slash": "***", "a": 5}', 'odd names'),
  ('["a.0"]', '{"a": [1]}', null, null),
  ('["o.\"0\""]', '{"o": {"0": 1, "1": 2}}', '{"o": {"0": "***", "1": 2}}', 'a number as a name'),
  ('["card.number"]', '{"card": {"type": "m:C", "value": {"number": 4, "x": 1}, "__pgdefer__": "dataclass"}}', '{"card": {"type": "m:C", "value": {"number": "***", "x": 1}, "__pgdefer__": "dataclass"}}', 'in what a client has tagged'),
  ('["card.value.number"]', '{"card": {"type": "m:C", "value": {"number": 4}, "__pgdefer__": "dataclass"}}', '{"card": {"type": "m:C", "value": {"number": "***"}, "__pgdefer__": "dataclass"}}', 'also by the path as stored'),
  ('["cards[*].number"]', '{"cards": {"value": [{"number": 4}], "__pgdefer__": "tuple"}}', '{"cards": {"value": [{"number": "***"}], "__pgdefer__": "tuple"}}', 'tagged lists'),
  ('["cards[1]"]', '{"cards": {"value": [3, 4], "__pgdefer__": "tuple"}}', '{"cards": {"value": [3, "***"], "__pgdefer__": "tuple"}}', 'and an element of one'),
  ('["card.number"]', '{"card": {"value": [["number", 4]], "__pgdefer__": "dict"}}', '{"card": "***"}', 'all of what has no names'),
  ('["card.number"]', '{"card": {"value": "NCwg", "__pgdefer__": "own"}}', '{"card": "***"}', 'or an encoding of its own'),
  ('["at"]', '{"at": {"value": "2000-01-01", "__pgdefer__": "date"}}', '{"at": "***"}', 'a tagged value')
) p (paths, args, shown, what) where p.shown is not null;
select is(pg_temp.cut('["l.x"]', (select jsonb_build_object('l', jsonb_agg(jsonb_build_object('x', i)), 'y', 1) from generate_series(1, 100) i)::text)::jsonb -> 'l' -> 99, '{"x": "***"}', 'a hundred values are cut each');
select is(pg_temp.cut('["l.x", "none"]', (select jsonb_build_object('l', jsonb_agg(jsonb_build_object('x', i)), 'y', 1) from generate_series(1, 101) i)::text)::jsonb, '{"l": "***", "y": 1}', 'more with what they are in');
select is(pg_temp.cut('["l.x"]', (select jsonb_build_object('l', jsonb_agg(jsonb_build_object('x', i))) from generate_series(1, 100000) i)::text), '{"l": "***"}', 'however many');

select is(test.refusal(format('select queue.register_task(''bad'', %L)', jsonb_build_object('sensitive', p.paths::jsonb))), '22023', 'refused: ' || p.paths) from (values
  ('"a"'), ('{"a": 1}'), ('[1]'), ('[null]'), ('[""]'), ('["a..b"]'), ('["a."]'), ('["$"]'), ('["[0]"]'), ('["$[*]"]'), ('["a.*"]'), ('["a.**"]'), ('["a[last]"]'), ('["a[0 to 2]"]'), ('["a ? (@ > 1)"]'),
  ('["a.size()"]'), ('["$x"]'), ('["strict $.a"]'), ('["a == 1"]'), ('["a[9999999999]"]')) p (paths);
select is(test.refusal(format('select queue.register_task(''bad'', %L)', jsonb_build_object('sensitive', jsonb_build_array(v.path)))), '22023', 'refused: too long') from (values (repeat('x', 1001)), ('a' || repeat('.a', 20))) v (path);
select is(test.refusal(format('select queue.register_task(''bad'', %L)', jsonb_build_object('sensitive', '["card.number"]'::jsonb) || d.defaults::jsonb)), '22023', 'refused: a template that shows it, ' || d.defaults) from (values
  ('{"lock": "x {card}"}'), ('{"queueing_lock": "{card}"}'), ('{"share": "{card}"}'), ('{"group": "{card}"}'), ('{"idempotency_key": "{card}"}'), ('{"concurrency_key": "{card}", "concurrency_limit": 1}'), ('{"concurrency": [{"key": "{card}", "limit": 1}]}')) d (defaults);
select is(test.refusal('select queue.defer(''t'', options => ''{"sensitive": ["a"]}'')'), '22023', 'not an option of a job');

-- Who sees what
select queue.register_task('pay', '{"sensitive": ["card.number", "password"], "priority": 1}');
select queue.register_task('plain') \g /dev/null
select queue.defer('pay', '{"card": {"number": "4111", "name": "n"}, "password": "hunter2", "user": "u"}', queue => 'shop') as id, queue.defer('plain', '{"password": "shown"}', queue => 'other') as plain \gset
\set shown '{"card": {"name": "n", "number": "***"}, "user": "u", "password": "***"}'
\set whole '{"card": {"name": "n", "number": "4111"}, "user": "u", "password": "hunter2"}'
select format('select args from queue.jobs where id = %s', :id) as read \gset
select is(pg_temp.reader(:'read'), :'shown', 'queue.jobs: a reader');
select is(pg_temp.operator(:'read'), :'shown', 'an operator');
select is(pg_temp.seen('pgdefer_hide_member', :'read'), :'whole', 'a member of the owner');
select is(pg_temp.seen('pgdefer_hide_sleeper', :'read'), :'shown', 'not one that does not inherit');
select is((select j.args::text from queue.jobs j where j.id = :id), :'whole', 'the owner');
select is(pg_temp.seen((select c.relowner::regrole::text from pg_class c where c.oid = 'queue.access'::regclass), :'read'), :'whole', 'by its name too');
select is(pg_temp.reader(format('select args from queue.jobs where id = %s', :plain)), '{"password": "shown"}', 'other tasks are as they were');
select is(pg_temp.reader('select defaults -> ''sensitive'' from queue.tasks where name = ''pay'''), '["card.number", "password"]', 'queue.tasks names the paths');
select is(pg_temp.worker('select args from queue.peek() where task = ''pay'''), :'shown', 'peek: a worker too, which has not claimed it');
select is(pg_temp.reader('select args from queue.peek() where task = ''pay'''), :'shown', 'a reader');
select is((select p.args::text from queue.peek() p where p.task = 'pay'), :'whole', 'the owner');
set pgdefer.hide_sensitive = on;
select is((select j.args::text from queue.jobs j where j.id = :id), :'shown', 'an owner who hides them: the view');
select is((select p.args::text from queue.peek() p where p.task = 'pay'), :'shown', 'functions');
select is((select s.id from queue.search('hunter2') s), null, 'nor found by asking');
select queue.set_args(:id, jsonb_set(:'shown', '{user}', '"v"')) \g /dev/null
reset pgdefer.hide_sensitive;
select is((select j.args from queue.jobs j where j.id = :id), jsonb_set(:'whole', '{user}', '"v"'), 'what was shown keeps its value');
select queue.set_args(:id, :'whole') \g /dev/null
select is((select j.args::text from queue.jobs j where j.id = :id), :'whole', 'the owner again');
select is(pg_temp.reader(format('select queue.get(%s, %L)', :id, p.path)), p.value, 'get ' || p.path) from (values ('password', '"***"'), ('card.number', '"***"'), ('card.name', '"n"'), ('$.password ? (@ like_regex "^hunter")', null), ('card.none', null)) p (path, value);
select is(strpos(pg_temp.reader(format('select queue.get(%s, ''$.**'')', :id)), 'hunter2'), 0, 'get of everything');
select is((select g::text from queue.get(:id, 'password') g), '"hunter2"', 'get: the owner');
select is(strpos(pg_temp.reader(format('select queue.why(%s)', :id)), 'hunter2'), 0, 'why does not show args');

-- Nobody finds out by searching
select is(pg_temp.reader(format('select s.id from queue.search(%s) s', s.call)), null, 'search(' || s.call || ')') from (values ('''hunter2'''), ('''4111'''), ('''hunt'', ''shop'''), ('''$.password == "hunter2"'', by => ''path'''), ('''$.card.number ? (@ starts with "4")'', by => ''path'''),
  ('''$.password ? (@ <> "***")'', by => ''path'', task => ''pay'''), ('''$.** ? (@ == "hunter2")'', by => ''path'''), ('''hunter2'', by => ''key''')) s (call);
select is(pg_temp.reader('select s.excerpt from queue.search(''$.password'', by => ''path'', task => ''pay'') s'), '"***"', 'a path that only finds it shows nothing');
select is(pg_temp.reader('select s.excerpt from queue.search(''user'', task => ''pay'') s'), :'shown', 'nor what surrounds a text');
select is(pg_temp.reader('select s.bytes from queue.search(''user'', task => ''pay'') s'), length(:'shown')::text, 'nor how long it is');
select is((select s.id from queue.search('hunter2') s), :id::bigint, 'search: the owner');
select is(pg_temp.reader(format('select max(args ->> ''password'') from queue.jobs where args ->> ''password'' like %L', '%hunter%')), 'NULL', 'nor by a condition on the view');

-- A role limited to some queues
select queue.grant_access('pgdefer_hide_shop', 'operator', '{shop*}');
select is(pg_temp.seen('pgdefer_hide_shop', 'select args from queue.jobs'), :'shown', 'a role for some queues');
select is(pg_temp.seen('pgdefer_hide_shop', 'select s.id from queue.search(''hunter2'') s'), null, 'searches as the others');
select is(pg_temp.seen('pgdefer_hide_shop', 'select args from queue.peek()'), :'shown', 'and peeks');
select is(pg_temp.seen('pgdefer_hide_member', :'read'), :'whole', 'the owner''s members see all still');

-- Editing
\set edited '{"card": {"name": "other", "number": "***"}, "user": "v", "password": "***"}'
select is(pg_temp.operator(format('select queue.set_args(%s, %L)', :id, :'edited')), 'ready', 'an edit of the args as shown');
select is((select j.args from queue.jobs j where j.id = :id), '{"card": {"name": "other", "number": "4111"}, "user": "v", "password": "hunter2"}', 'keeps what was hidden');
select is(pg_temp.operator(format('select queue.set_args(%s, ''{"password": "***", "new": "***"}'')', :id)), 'ready', 'parts may go; a mark in another place is a text');
select is((select j.args from queue.jobs j where j.id = :id), '{"password": "hunter2", "new": "***"}', 'as any other');
select is(pg_temp.operator(format('select queue.set_args(%s, ''{"card": {"number": "***"}}'')', :id)), '22023 args contain *** in place of a sensitive value', 'a mark where nothing was is refused');
select is(pg_temp.operator(format('select queue.set_args(%s, ''{"password": "new", "card": {"number": 5}}'')', :id)), 'ready', 'new values are taken');
select is((select j.args from queue.jobs j where j.id = :id), '{"password": "new", "card": {"number": 5}}', 'and stored');
select is(queue.set_args(:id, '{"password": "***"}'), 'ready', 'who sees the value may write anything');
select is((select j.args from queue.jobs j where j.id = :id), '{"password": "***"}', 'the mark too');
select is(pg_temp.operator(format('select queue.set_args(%s, ''{"password": "***", "a": 1}'')', :id)), 'ready', 'which is then the value');
select queue.register_task('list', '{"sensitive": ["cards[*].number"]}');
select queue.defer('list', '{"cards": [{"number": 1}, {"number": 2}], "a": 1}') as list \gset
select is(pg_temp.operator(format('select queue.set_args(%s, ''{"cards": [{"number": "***"}, {"number": "***"}], "a": 2}'')', :list)), 'ready', 'a list as it was shown');
select is((select j.args from queue.jobs j where j.id = :list), '{"cards": [{"number": 1}, {"number": 2}], "a": 2}', 'keeps its values');
select is(left(pg_temp.operator(format('select queue.set_args(%s, %L)', :list, l.args)), 5), '22023', 'not a changed one, whose values might change places') from (values ('{"cards": [{"number": "***"}]}'), ('{"cards": [{"number": "***", "x": 1}, {"number": "***"}]}'), ('{"cards": [{"number": "***"}, {"number": 3}]}'), ('{"cards": {"number": "***"}}')) l (args);

select queue.register_task('deep', '{"sensitive": ["a.b"]}');
select queue.defer('deep', ('{"a": ' || repeat('{"__pgdefer__": "x", "value": ', 1000) || '{"b": "hid"}' || repeat('}', 1001))::jsonb) as deep \gset
select is(strpos(pg_temp.operator(format('select args from queue.jobs where id = %s', :deep)), 'hid'), 0, 'tags in tags in tags');
select is(pg_temp.operator(format('select queue.set_args(%s, (select args || ''{"c": 1}'' from queue.jobs where id = %s))', :deep, :deep)), 'ready', 'what is as it was is kept, however deep');
select is(strpos((select j.args::text from queue.jobs j where j.id = :deep), '"b": "hid"') > 0, true, 'there');
select is(left(pg_temp.operator(format('select queue.set_args(%s, (select jsonb_set(args, ''{a,x}'', ''1'') || ''{"c": 2}'' from queue.jobs where id = %s))', :deep, :deep)), 5), 'ready', 'also beside a change that is not too deep');
select is(left(pg_temp.operator(format('select queue.set_args(%s, (select jsonb_set(args, (''{a'' || repeat('',value'', 200) || '',x}'')::text[], ''1'') from queue.jobs where id = %s))', :deep, :deep)), 5), '22023', 'but not beside one that is');

-- The audit
select queue.set_args(:id, :'whole') \g /dev/null
select is(pg_temp.reader('select args -> ''args'' from queue.audit where call = ''set_args'' order by id desc limit 1'), :'shown', 'the audit''s args');
select pg_temp.operator(format('select queue.set_args(%s, ''{"password": "third"}'')', :id)) \g /dev/null
select is(pg_temp.reader('select before -> 0 -> ''args'' from queue.audit where call = ''set_args'' order by id desc limit 1'), :'shown', 'and what was before');
select is(pg_temp.operator('select args -> ''args'' from queue.audit where call = ''set_args'' order by id desc limit 1'), '{"password": "***"}', 'also of the role''s own call');
select is((select a.before -> 0 -> 'args' from queue.audit a where a.call = 'set_args' order by a.id desc limit 1), :'whole'::jsonb, 'the owner reads all');
select is(pg_temp.reader('select count(*) from queue.audit where concat(args, before) ~ ''hunter2|4111|third'''), '0', 'nothing else shows in any row');
select is((select count(*) from queue.audit a where concat(a.args, a.before) ~ 'hunter2'), 7::bigint, 'which the owner finds');
select queue.delete(array[:id]) \g /dev/null
select is(pg_temp.reader('select count(*) from queue.audit where concat(args, before) ~ ''hunter2|4111|third'''), '0', 'nor once the job is gone');

-- Schedules
select queue.schedule('s', '@daily', 'pay', '{"password": "sesame", "user": "u"}'), queue.schedule('s', '@daily', 'pay', '{"password": "sesame2", "user": "u"}') \g /dev/null
select is(pg_temp.operator('select args from queue.schedules'), '{"user": "u", "password": "***"}', 'schedules show it as jobs do');
select is(pg_temp.operator('select queue.schedule(''s'', ''@hourly'', ''pay'', ''{"password": "***", "user": "v"}'')'), '22023 args contain *** in place of a sensitive value', 'and take no mark');
select is(left(pg_temp.operator('select queue.schedule(''s2'', ''@hourly'', ''pay'', ''{"password": "x"}'', options => ''{"lock": "{password}"}'')'), 5), '22023', 'nor a lock that shows it');
select queue.unschedule('s') \g /dev/null
select is(pg_temp.reader('select count(*) from queue.audit where concat(args, before) ~ ''sesame'''), '0', 'nor does the audit');
select is((select count(*) from queue.audit a where concat(a.args, a.before) ~ 'sesame'), 3::bigint, 'but to the owner');

-- Copies, retries, runs
select queue.defer('pay', :'whole', queue => 'shop') as first \gset
select pg_temp.operator(format('select queue.copy(%s)', :first)) as copy \gset
select is(pg_temp.reader(format('select args from queue.jobs where id = %s', :copy)), :'shown', 'a copy is cut');
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
select is(pg_temp.worker(format('select f.args from queue.fetch(%s, ''{shop}'', 2) f', :worker)), :'whole' || ' ' || :'whole', 'workers get everything, of copies too');
select j.claim from queue.jobs j where j.id = :first \gset
select queue.fail(:first, :claim, 'x') \g /dev/null
select is(pg_temp.reader(format('select args from queue.jobs where id = %s', :first)), :'shown', 'a failed job');
select pg_temp.operator(format('select queue.retry(array[%s])', :first)) \g /dev/null
select is(pg_temp.reader(format('select args from queue.jobs where id = %s', :first)), :'shown', 'one that is retried');
select is(pg_temp.worker(format('select f.args from queue.finish_and_fetch(%s, ''[]'', ''{shop}'') f', :worker)), :'whole', 'and runs with all its args');
select queue.defer('pay', :'whole', queue => 'hand') \g /dev/null
select is(pg_temp.operator('select n.args from queue.next(''{hand}'') n'), :'shown', 'next, by which a person takes a job');

-- A replacement that is not applied yet
select queue.defer('pay', '{"password": "old"}', queueing_lock => 'one') as kept \gset
select queue.defer('pay', '{"password": "replaced"}', queueing_lock => 'one', options => '{"on_conflict": "replace"}') \g /dev/null
select is(pg_temp.reader(format('select args from queue.jobs where id = %s', :kept)), '{"password": "***"}', 'a replacement');
select is(pg_temp.reader(format('select g from queue.get(%s, ''password'') g', :kept)), '"***"', 'by get');
select is(pg_temp.reader('select s.id from queue.search(''replaced'') s'), null, 'by search');

-- Changing the paths
select pg_temp.operator('select queue.register_task(''pay'', ''{"priority": 2}'')') \g /dev/null
select is((select t.defaults from queue.tasks t where t.name = 'pay'), '{"priority": 2, "sensitive": ["card.number", "password"]}', 'who may not see them removes no path');
select pg_temp.worker('select queue.register_task(''pay'', ''{"sensitive": ["user", "$.password"]}'')') \g /dev/null
select is((select t.defaults from queue.tasks t where t.name = 'pay'), '{"sensitive": ["card.number", "password", "user"]}', 'but may add some');
select is(pg_temp.reader(format('select args from queue.jobs where id = %s', :first)), '{"card": {"name": "n", "number": "***"}, "user": "***", "password": "***"}', 'at once, for jobs there are');
select is(left(pg_temp.operator('select queue.register_task(''pay'', ''{"lock": "{password}"}'')'), 5), '22023', 'nor shows one in a lock');
select queue.register_task('pay', '{"sensitive": ["user"]}');
select is(pg_temp.reader(format('select args from queue.jobs where id = %s', :first)), '{"card": {"name": "n", "number": "4111"}, "user": "***", "password": "hunter2"}', 'the owner removes them');
select queue.register_task('pay', '{"sensitive": []}');
select is(pg_temp.reader(format('select args from queue.jobs where id = %s', :first)), :'whole', 'all');
select queue.register_task('plain', '{"sensitive": ["password"]}');
select is(pg_temp.reader(format('select args from queue.jobs where id = %s', :plain)), '{"password": "***"}', 'a task that gets some hides those of old jobs');

-- The tables, and what the views are made of, are nobody's
select is(pg_temp.operator(format('select 1 from queue.%I', t.name)), '42501 permission denied for ' || t.kind || ' ' || t.name, 'queue.' || t.name || ' is private')
from (values ('log', 'table'), ('job_override', 'table'), ('audit_log', 'table'), ('schedule', 'table'), ('pending_settlement', 'table'), ('task', 'table'), ('job', 'view'), ('job_now', 'view'), ('all_jobs', 'view'), ('hidden_paths', 'view')) t (name, kind);

select queue.revoke_access(r) from unnest('{pgdefer_hide_reader,pgdefer_hide_operator,pgdefer_hide_worker,pgdefer_hide_shop,pgdefer_hide_member,pgdefer_hide_sleeper}'::text[]) r \g /dev/null
drop role pgdefer_hide_reader, pgdefer_hide_operator, pgdefer_hide_worker, pgdefer_hide_shop, pgdefer_hide_member, pgdefer_hide_sleeper;
select * from finish();
