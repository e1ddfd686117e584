-- One round of calls for test_settings.py. Texts mean the same under any setting, and so do answers.
-- Each statement ends with a semicolon at the end of its line.

select queue.register_task('t', '{"queue": "q", "deadline": "1 year 2 mons", "timeout": "1 mon 2 days", "retry": {"base": 5}}');
select queue.register_worker('w', '{q*,r}', '{"client": "pgdefer 0.1.0", "dead_after": 86400}');
select extract(epoch from dead_after), queues from queue.workers;
select queue.defer_many(('[' || $${"task": "t", "args": {"k": "v\\w", "n": 1.5}, "queue": "q", "priority": 3, "lock": "l {k}", "scheduled_at": "2001-02-03T04:05:06Z", "deadline": "2999-12-31T23:59:59Z", "concurrency_key": "k {n}", "concurrency_limit": 2, "options": {"timeout": "1 day 02:03:04", "retain": "P1M", "description": "d", "delay": null, "headers": {"h": "'"}, "expires_at": "2999-01-01T00:00:00Z", "retry": {"max_attempts": 5, "backoff": "exponential", "base": "90 s", "cap": 3600}}}$$ || ']')::jsonb);
select queue.defer('t', '{"a": "b"}', 'r', 5, lock => 'x', queueing_lock => 'ql');
select queue.defer('t', '{"a": "c"}', 'r', 6, queueing_lock => 'ql', options => '{"on_conflict": "replace"}');
select queue.defer('u', '{}', needs => array[1002]::bigint[]);
select queue.defer('u'), queue.defer('u', queue => 'r');
insert into public.settings (b, t, f, i) values (decode('00ff5c', 'hex'), 'x', 0.1::float8 + 0.2::float8, make_interval(1, 2, 0, 3, 4)) returning 1;
select queue.defer_chain('[{"task": "u"}, {"task": "u"}]');
select to_jsonb(d) from queue.defer_group('[{"task": "u"}]', '{"task": "u"}') d;
select id, task, args, queue, priority, lock, needs, extract(epoch from scheduled_at), extract(epoch from deadline) > 0, extract(epoch from expires_at), description, headers, state from queue.jobs order by id;
select id, task, queue, priority from queue.peek(null, 20);
select admitted > 0, reaped, pruned from queue.tick();
select left(queue.why(id), 20) from queue.jobs order by id;
select id, task, args, queue, priority, lock, attempt, extract(epoch from scheduled_at), extract(epoch from timeout), headers from queue.fetch(101, '{q,r}', 2);
select id, task, args, queue, attempt from queue.fetch(101, '{q*,r}', 10, '{"order": "listed", "deadline_within": "4000 years"}');
select may_sleep, channels from queue.before_sleep(101);
select queue.after_sleep(101);
select count(*) from queue.heartbeat(101);
select queue.extend(id, claim, interval '5 minutes') > now() from queue.jobs where state = 'running' order by id;
select id, state, error from queue.finish_many((
  select jsonb_agg(jsonb_build_object('id', id, 'claim', claim, 'outcome',
    case id % 3 when 0 then 'succeeded' when 1 then 'failed' else 'retry_later' end, 'at', at))
  from queue.jobs, to_timestamp(4102444800) at where state = 'running')
);
select job_id, outcome from queue.attempts order by 1;
select id, state, extract(epoch from scheduled_at) - extract(epoch from now()) > 80 from queue.jobs order by id;
select * from queue.retry(array(select id from queue.jobs where state = 'failed'));
select id, attempt from queue.fetch(101, '{*}', 1);
select queue.fail(id, claim, 'e''' || chr(92), '{"d": 1}', '{"retry_in": "1 mon", "queue": "r2"}') from queue.jobs where state = 'running' order by id limit 1;
select error, details from queue.attempts order by claim desc limit 1;
select extract(epoch from queue.backoff('{"base": "1 day 02:00", "backoff": "linear"}', 3));
select extract(epoch from r) from queue.next_runs(E'0\t0 L FEB,oct MON', 'America/New_York', '2030-01-01T00:00:00Z', 4) r;
select extract(epoch from r) from queue.next_runs('every 90 seconds', 'Etc/GMT+5', '2030-01-01T00:00:00Z', 2) r;
select queue.schedule('s', '30 4 29 2 *', 'u', '{"a": 1}', 'Europe/Rome', '{"max_delay": "1 day", "timeout": 90, "catch_up": "all"}') > now();
select name, cron, timezone, options, extract(epoch from max_delay) from queue.schedules;
select queue.run_now('s');
select args ->> 'scheduled_for' ~ '^....-..-..T..:..:..[.]......[+]0[12]:00$' from queue.jobs order by id desc limit 1;
select id, bytes, excerpt from queue.search(E'v\\w');
select id from queue.search('$.k ? (@ like_regex "^v" || @.datetime("YYYY-MM-DD") < "2020-01-01".datetime())', by => 'path');
select id from queue.search('ql', by => 'key');
select queue.get(1001, 'k'), queue.get(1001, '$.n');
select (queue.result(id)).state, (select count(*) from queue.graph(id)), (select count(*) from queue.needs(id)) from queue.jobs order by id;
select queue.configure_queue('q', '{"max_running": 5, "rate": {"limit": 5, "per": "1 mon"}, "retain": 86400}');
select name, max_running, extract(epoch from rate_per), extract(epoch from retain) from queue.queues order by name collate "C";
select queue.pause('q*', '2999-01-01T00:00:00Z'), queue.resume('q*'), queue.pause(task => 'u'), queue.resume(task => 'u');
select queue.hold(id), queue.unhold(id), queue.reschedule(id, '2998-01-01T00:00:00Z') from queue.jobs where state in ('ready', 'scheduled') order by id limit 1;
select * from queue.move(array[1001, 1002], 'r3', true);
select * from queue.set_priority(array[1004], 9);
select queue.set_args(1004, jsonb_build_object('z', chr(92))), queue.copy(1004);
select * from queue.fail_jobs(array[1004], 'm'), queue.done(array[1005]), queue.delete(array[1006], true);
select queue.prune(10, 'failed', interval '1 day');
select queue, task, ready, running, failed from queue.stats() order by queue collate "C", task collate "C";
select queue, ready from queue.metrics order by queue collate "C";
select name, status from queue.health() where name in ('version', 'workers');
select queue from queue.autoscale_hint() order by queue collate "C";
select lock, job_id from queue.locks order by lock collate "C";
select kind, key, used from queue.semaphores order by kind collate "C", key collate "C";
select queue.unschedule('s'), queue.deregister_worker(101) >= 0;
select queue.grant_access('settings_role', 'reader', '{q*,r_%}');
set role settings_role;
select id, queue from queue.jobs order by id;
select queue.search('zzz');
reset role;
select queue.revoke_access('settings_role');
select queue.cancel(id) from queue.jobs where state = 'ready' order by id limit 1;
select * from queue.check();
select code = tables from queue.version();
