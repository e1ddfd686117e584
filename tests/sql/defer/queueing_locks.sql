-- Queueing locks: at most one job that has not started, or not finished, per key.

select plan(40);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
create function pg_temp.refusal(call text) returns text language plpgsql as $$
declare
  v_detail text;
begin
  execute call;
  return 'accepted';
exception when others then
  get stacked diagnostics v_detail = pg_exception_detail;
  return sqlstate || ' ' || v_detail;
end $$;

select queue.defer('t', queueing_lock => 'Q') as a \gset
select is(pg_temp.refusal($$select queue.defer('t', queueing_lock => 'Q')$$), format('QJ004 id: %s, queueing_lock: Q', :a), 'raise, with the id');
select is(queue.defer('t', queueing_lock => 'Q', options => '{"on_conflict": "ignore"}'), :a::bigint, 'ignore returns the waiting job');
select is(queue.defer('u', '{"new": 1}', priority => 7, queueing_lock => 'Q', options => '{"on_conflict": "replace"}'), :a::bigint, 'replace too');
select is((select row (f.id, f.task, f.args, f.priority)::text from queue.fetch(:worker) f), format('(%s,t,"{""new"": 1}",7)', :a), 'with its new args and priority');
select isnt(queue.defer('t', queueing_lock => 'Q'), :a::bigint, 'once it has started the key is free');
select max(j.id) as b from queue.jobs j \gset
select is(queue.fail(:a, j.claim, 'x'), 'failed', 'the first one ends') from queue.jobs j where j.id = :a;
select is(queue.cancel(:b), 'cancelled', 'a cancelled job');
select queue.defer('t', queueing_lock => 'Q', options => '{"retry": {"max_attempts": 3}}') as c \gset
select isnt(:c::bigint, :b::bigint, 'frees the key');
select f.claim as claim from queue.fetch(:worker) f \gset
select queue.defer('t', queueing_lock => 'Q') as d \gset
select is(queue.fail(:c, :claim, 'x'), 'ready', 'a retry never collides');
select is((select array_agg(f.id order by f.id) from queue.fetch(:worker, null, 10) f), array[:c, :d]::bigint[], 'both run');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.state = 'running';

-- replace changes the time
select queue.defer('t', queueing_lock => 'Q', options => '{"delay": "1 hour"}') as e \gset
select is((select f.id from queue.fetch(:worker) f), null, 'later');
select queue.defer('t', queueing_lock => 'Q', options => '{"on_conflict": "replace"}') \g /dev/null
select is((select f.id from queue.fetch(:worker) f), :e::bigint, 'replaced by now');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.state = 'running';
select queue.defer('t', queueing_lock => 'Q') as g \gset
select queue.defer('t', queueing_lock => 'Q', scheduled_at => '2999-01-01Z', options => '{"on_conflict": "replace"}') \g /dev/null
select is((select f.id from queue.fetch(:worker) f), null, 'replaced by later');
select is((select j.state from queue.jobs j where j.id = :g), 'scheduled', 'it is scheduled');
select queue.cancel(:g) \g /dev/null

-- Debounce: each further call moves the time and replaces the args, but for no longer than max_wait
select queue.defer('t', '{"n": 1}', queueing_lock => 'D', options => '{"delay": "10 s", "on_conflict": "replace", "max_wait": "1 minute"}') as debounced \gset
create function pg_temp.debounce(delay text, max_wait text) returns text language sql as $$
  select queue.defer('t', '{"n": 2}', queueing_lock => 'D', options => jsonb_build_object('delay', delay, 'on_conflict', 'replace', 'max_wait', max_wait)) $$;
select is(pg_temp.debounce('50 s', '1 minute'), :'debounced', 'a further call');
select is((select j.args = '{"n": 2}' and j.scheduled_at - j.created_at between interval '50 s' and interval '1 minute' from queue.jobs j where j.id = :debounced), true, 'replaces the args and moves the time');
select queue.tick() \g /dev/null
select is((select j.scheduled_at - j.created_at >= interval '50 s' from queue.jobs j where j.id = :debounced), true, 'for good');
select pg_temp.debounce('2 minutes', '1 minute') \g /dev/null
select is((select j.scheduled_at - j.created_at from queue.jobs j where j.id = :debounced), interval '1 minute', 'at most to max_wait after the first call');
select pg_temp.debounce('3 days', null) \g /dev/null
select is((select j.scheduled_at > now() + interval '2 days' from queue.jobs j where j.id = :debounced), true, 'without a limit as far as it says');
select queue.defer('t', queueing_lock => 'D', options => '{"on_conflict": "replace", "max_wait": "1 hour"}') \g /dev/null
select is((select f.id from queue.fetch(:worker) f), :debounced::bigint, 'without a time it starts at once');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.state = 'running';

-- until finish
select queue.defer('t', queueing_lock => 'F', options => '{"unique_until": "finish"}') as h \gset
select f.claim as claim from queue.fetch(:worker) f \gset
select is(pg_temp.refusal($$select queue.defer('t', queueing_lock => 'F')$$), format('QJ004 id: %s, queueing_lock: F', :h), 'finish: the key is taken while it runs');
create function pg_temp.hint(call text) returns text language plpgsql as $$
declare
  v_hint text;
begin
  execute call;
  return null;
exception when sqlstate 'QJ004' then
  get stacked diagnostics v_hint = pg_exception_hint;
  return v_hint;
end $$;
select matches(pg_temp.hint($$select queue.defer('t', queueing_lock => 'F')$$), '"replace" to change it while it waits', 'the hint says what may be passed');
select is(pg_temp.hint($$select queue.defer('t', queueing_lock => 'F', options => '{"on_conflict": "replace"}')$$),
  'The job with this queueing_lock runs, and "replace" changes only one that waits. Pass options {"on_conflict": "ignore"}, or call again when it has ended.',
  'and not again what was passed');
select queue.succeed(:h, :claim);
select is(pg_temp.refusal($$select queue.defer('t', queueing_lock => 'F')$$), 'accepted', 'and free when it has ended');

-- A refusal leaves the caller's transaction usable if the caller asks for that.
begin;
select is(queue.defer('t', queueing_lock => 'F', options => '{"on_conflict": "ignore"}'), (select max(j.id) from queue.jobs j), 'ignore poisons nothing');
select lives_ok($$select queue.defer('t')$$, 'so that the transaction continues');
rollback;

-- One claim starts a job that has given the key up and one that keeps it until it finishes.
create function pg_temp.defer_until(until text) returns bigint language sql as $$
  select queue.defer('t', queue => 'both', queueing_lock => 'both', options => jsonb_build_object('unique_until', until, 'retry', '{"max_attempts": 5}'::jsonb)) $$;
select pg_temp.defer_until('start') as until_start \gset
select f.claim as claim from queue.fetch(:worker, '{both}') f \gset
select queue.fail(:until_start, :claim, 'x') \g /dev/null
select pg_temp.defer_until('finish') as until_finish \gset
select set_eq(format($$select f.id from queue.fetch(%s, '{both}', 2) f$$, :worker), array[:until_start, :until_finish]::bigint[], 'two jobs of a key start together');
select is(pg_temp.refusal($$select pg_temp.defer_until('finish')$$), format('QJ004 id: %s, queueing_lock: both', :until_finish), 'the key stays with the one until its finish');
begin;
delete from queue.queueing_lock k where k.key = 'both';
select is((select c.problem from queue.check() c), 'a job without its queueing lock', 'check would see it');
rollback;
select queue.succeed(j.id, j.claim) from queue.jobs j where j.state = 'running' \g /dev/null

-- A template
select queue.register_task('tt', '{"queueing_lock": "user:{id}"}');
select queue.defer('tt', '{"id": 1}') as i \gset
select is(pg_temp.refusal($$select queue.defer('tt', '{"id": 1}')$$), format('QJ004 id: %s, queueing_lock: user:1', :i), 'a registered template is filled');

select is_empty('select * from queue.check()', 'sound');

-- A job that is being replaced does not start before the replacement is applied, which its own transaction can't do
select queue.defer('t', '{"n": 1}', queueing_lock => 'own') as own \gset
select queue.tick() \g /dev/null
begin;
select queue.defer('t', '{"n": 2}', queueing_lock => 'own', options => '{"on_conflict": "replace"}') \g /dev/null
select is_empty(format('select f.id from queue.fetch(%s, null, 10) f where f.id = %s', :worker, :own), 'a job is not started while it is being replaced, by whomever');
commit;
select is((select f.args from queue.fetch(:worker, null, 10) f where f.id = :own), '{"n": 2}', 'and then with its new args');
-- A replacement is visible as soon as it is committed, before it is admitted
select queue.defer('seen', '{"n": 1}', queueing_lock => 'seen', scheduled_at => '2999-01-01Z') as seen \gset
select queue.tick() \g /dev/null
select queue.defer('seen', '{"n": 2}', priority => 7, queueing_lock => 'seen', options => '{"on_conflict": "replace"}') \g /dev/null
select results_eq(format('select j.args, j.priority, j.scheduled_at, j.state from queue.jobs j where j.id = %s', :seen),
                  $$values ('{"n": 2}'::jsonb, 7, null::timestamptz, 'ready')$$, 'queue.jobs shows it');
select is((select count(*) from queue.search('"n": 2') s where s.id = :seen), 1::bigint, 'search finds it');
select is(queue.get(:seen, 'n'), '2', 'so does get');
select queue.tick() \g /dev/null
select results_eq(format('select p.args, p.priority from queue.peek() p where p.id = %s', :seen), $$values ('{"n": 2}'::jsonb, 7)$$, 'it stays so');
select queue.cancel(:seen) \g /dev/null

-- A job that runs again and is replaced before its end is settled
create procedure pg_temp.replace_again(lock_mode text) language plpgsql as $$
declare
  v_options jsonb := jsonb_build_object('unique_until', 'finish', 'on_conflict', 'replace', 'lock_mode', lock_mode, 'retry', '{"max_attempts": 5}'::jsonb);
  v_worker bigint := queue.register_worker('again', info => '{"dead_after": "1 day"}');
  v_id bigint;
  v_claim bigint;
begin
  v_id := queue.defer('t', '{"n": 1}', queue => 'again', queueing_lock => 'again', lock => 'again', options => v_options);
  commit;
  select f.claim into v_claim from queue.fetch(v_worker, '{again}') f;
  commit;
  perform queue.fail(v_id, v_claim, 'x');
  commit;
  perform queue.defer('t', '{"n": 2}', queue => 'again', queueing_lock => 'again', lock => 'again', options => v_options);
  commit;
  insert into again select f.id = v_id, f.args, f.attempt, (select count(*) from queue.check()) from queue.fetch(v_worker, '{again}', 5) f;
  commit;
  perform queue.succeed(v.id, v.claim) from queue.active_job v where v.id = v_id;
end $$;
create temporary table again (is_it boolean, args jsonb, attempt integer, problems bigint);
call pg_temp.replace_again('ordered');
call pg_temp.replace_again('mutex');
select results_eq('table again', $$values (true, '{"n": 2}'::jsonb, 2, 0::bigint), (true, '{"n": 2}', 2, 0)$$, 'a job that is to run again and is replaced runs once, with the new args');

-- The mark of a replacement is cleared by that replacement alone.
select queue.defer('t', queue => 'marked', queueing_lock => 'marked') \g /dev/null
select queue.defer('t', '{"n": 2}', queue => 'marked', queueing_lock => 'marked', options => '{"on_conflict": "replace"}') \g /dev/null
select queue._clear_replacing('marked', 0) \g /dev/null
select is((select k.replacing is null from queue.queueing_lock k where k.key = 'marked'), false, 'the mark of another stays');
select queue._clear_replacing('marked', (select k.replacing from queue.queueing_lock k where k.key = 'marked')) \g /dev/null
select is((select k.replacing is null from queue.queueing_lock k where k.key = 'marked'), true, 'its own goes');

select * from finish();
