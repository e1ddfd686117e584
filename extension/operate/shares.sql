-- Weights of shares.
-- Tests: admit/shares.sql.

-- Locks: the admission lock, waited for. Raises: 22023, QJ008.
-- Why it takes effect at once: ready jobs get tags by the new weight, which lie before the old ones: one
-- slice here, and one with each admission (admit/retag.sql).
-- Why no wake-up is lost: it makes no job ready. The cursor tells the next admission that there is more to
-- do.
create or replace function queue.configure_share(pattern text, options jsonb)
returns void language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_weight jsonb;
  v_before jsonb;
begin
  {{installed}}
  perform queue._check_isolation();
  perform queue._check_name('pattern', configure_share.pattern);
  perform queue._check_keys('options', configure_share.options, array['weight']);
  v_weight := configure_share.options -> 'weight';
  if v_weight is null then
    perform queue._invalid('weight is missing', 'Pass {"weight": 2}, or null for the default of 1.');
  elsif v_weight <> 'null' and (jsonb_typeof(v_weight) <> 'number' or not v_weight between '0.001' and '1000')
    then
    perform queue._invalid('weight must be a number from 0.001 to 1,000, or null',
      'A share of weight 3 gets three turns for each of a share of weight 1.',
      'weight: ' || left(v_weight::text, 200));
  end if;
  perform queue._lock_admission(true);
  v_before := (select jsonb_build_object('weight', c.weight) from queue.share_config c
    where c.pattern = configure_share.pattern);
  if v_weight = 'null' then
    delete from queue.share_config c where c.pattern = configure_share.pattern;
  else
    insert into queue.share_config as c (pattern, weight)
    values (configure_share.pattern, (v_weight #>> '{}')::double precision)
    on conflict on constraint share_config_pkey do update set weight = excluded.weight;
  end if;
  perform queue._begin_tags(t.queue, t.priority)
  from (
    select distinct t.queue, t.priority from queue.share_tag t
    where t.share <> '' and queue._matches(t.share, configure_share.pattern)) t;
  perform queue._retag(1000);
  perform queue._announce();
  perform queue._audit('configure_share', jsonb_build_object('pattern', configure_share.pattern, 'options',
    configure_share.options), null, v_before);
end $$;
comment on function queue.configure_share(text, jsonb) is
  'Sets the weight of the shares that match a name or prefix*; the longest pattern applies. A share of weight'
    ' 3 gets three turns for each turn of a share of weight 1, the default (null). The weight takes effect at'
    ' once, also for ready jobs.';
