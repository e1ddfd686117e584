// A complete worker in Node, written from docs/worker-protocol.md: node worker.mjs HANDLERS [QUEUE...]
// Queues may be patterns; none: all. HANDLERS is a module whose default export maps tasks to functions (args, {id,
// claim, attempt, signal}), which return a result or throw: an error with the name RetryLater to be called again,
// with `retryable` false to fail for good. They end when `signal` says so, and never block the event loop for long.
// Environment: pg's (PGHOST ...); CONCURRENCY; HEARTBEAT_EVERY, DEAD_AFTER and MAX_WAIT, the longest sleep, in
// seconds; DRAIN=1: exit when no job is left. SIGTERM or SIGINT: exit when the running jobs have ended; again, or
// SIGQUIT: give them back. Events go to stdout, one JSON object per line.
import { resolve } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import pg from "pg";
const [file, ...names] = process.argv.slice(2);
const handlers = new Map(Object.entries((await import(resolve(file))).default));
const queues = names.length ? names : null;
const { CONCURRENCY = 4, HEARTBEAT_EVERY = 10, DEAD_AFTER = 30, MAX_WAIT = 60, DRAIN } = process.env;
const SPOILT = { result: { __pgdefer__: "unencodable", value: "object" }, error: "the outcome could not be stored" };
const running = new Map(), outcomes = new Map(); // by "id.claim"
let worker, stopping = 0, beatAt = 0, wasHinted = false, wake = () => {};
const tell = (event, id, claim, what) => console.log(JSON.stringify({ event, id, claim, what }));
const hint = () => { wasHinted = true; wake(); };
const hinted = (seconds) => new Promise((resolve) => { wake = resolve; setTimeout(resolve, wasHinted ? 0 : seconds * 1000); });
const plain = (text) => String(text).slice(0, 2000).replaceAll("\0", "\u2400").toWellFormed();
// Whether the statement itself was refused; otherwise the server may accept it later.
const isRefused = (error) => error instanceof pg.DatabaseError && !/^(08|25|40|53|55|57|58|F0|XX)/.test(error.code);
// A connection that opens when it is needed, and again after a loss.
function link(onNotice = () => {}) {
  let client;
  const lose = (lost) => { client = undefined; lost.end().catch(() => {}); onNotice("pgdefer"); };
  const open = async () => {
    const made = new pg.Client({ query_timeout: 20_000, connectionTimeoutMillis: 20_000 });
    made.on("error", () => lose(made)).on("notification", ({ channel }) => onNotice(channel));
    return made.connect().then(() => made);
  };
  return async (text, ...values) => {
    const used = await (client ??= open().catch((error) => { client = undefined; throw error; }));
    return (await used.query(text, values).catch((error) => { if (!isRefused(error)) lose(used); throw error; })).rows;
  };
}
const heart = link(), main = link((channel) => (channel === "pgdefer" ? hint() : beat()));
// Others have the claims of an earlier registration by now: abort their jobs, drop their outcomes.
async function register() {
  for (const job of running.values()) job.abort("gone");
  outcomes.clear();
  const given = [`worker.mjs:${process.pid}`, queues, { dead_after: `${DEAD_AFTER} s` }];
  worker = (await main("select queue.register_worker($1, $2, $3) id", ...given))[0].id;
  beatAt = performance.now();
  tell("ready", worker);
}
async function beat() {
  const now = performance.now();
  try {
    for (const { id, claim, reason } of await heart("select id, claim, reason from queue.heartbeat($1)", worker))
      running.get(`${id}.${claim}`)?.abort(reason);
    beatAt = now;
  } catch (error) { if (error.code === "QJ007") hint(); } // the main connection learns of it, too
}
// Handlers that go on after their timeout hold what they hold; the claim would end 10 s after it.
async function extendLate() {
  for (const { id, claim, lateAt } of running.values())
    if (lateAt + 2000 < performance.now()) await heart("select queue.extend($1, $2, $3)", id, claim, `${Math.max(DEAD_AFTER, 15)} s`).catch(() => {});
}
const report = (outcome) => { // to be sent with the next call
  outcomes.set(`${outcome.id}.${outcome.claim}`, outcome);
  hint(tell("finished", outcome.id, outcome.claim, outcome.outcome));
};
async function run({ id, claim, task, args, attempt, seconds }, askedAt) {
  const controller = new AbortController(), key = `${id}.${claim}`, lateAt = askedAt + (seconds ?? Infinity) * 1000;
  // It was asked for before; or this process was frozen, and the claim may soon end.
  if (stopping || performance.now() > lateAt + 5000) return report({ id, claim, outcome: "released" });
  const job = { id, claim, lateAt, abort: (reason) => { job.reason ??= reason; controller.abort(); } };
  tell("started", id, claim);
  running.set(key, job);
  const ms = lateAt - performance.now();
  const timer = ms < 2 ** 31 ? setTimeout(() => job.abort("timed out"), ms) : undefined;
  const outcome = await call(handlers.get(task), args, { id, claim, attempt, signal: controller.signal }, job);
  clearTimeout(timer);
  if (running.delete(key) && job.reason !== "gone") report({ id, claim, ...outcome });
}
async function call(handler, args, context, job) {
  if (!handler) return { outcome: "unknown_task" };
  try {
    const result = await handler(args, context);
    if (job.reason === "timed out") throw new Error(job.reason);
    try { return { outcome: "succeeded", result: JSON.parse(JSON.stringify(result ?? null)) }; } catch { return { outcome: "succeeded", ...SPOILT }; }
  } catch (error) {
    if (job.reason === "stopped") return { outcome: "released" };
    const { name, at, needs = [], retryable } = error ?? {};
    if (name === "RetryLater") return { outcome: "retry_later", at, needs, message: plain(error.message) };
    const said = { error: plain(error), details: { type: name, message: plain(error?.message), traceback: plain(error?.stack) } };
    if (job.reason === "timed out") return { outcome: "failed", ...said, options: { outcome: "timed_out" } };
    return { outcome: job.reason ? "aborted" : "failed", ...said, options: retryable === false ? { retryable } : {} };
  }
}
// Sends outcomes and fetches jobs. A refused outcome is sent alone, then without its content.
async function exchange(sent, free) {
  const askedAt = performance.now();
  let rows;
  try {
    rows = free
      ? await main(`select id, claim, task, args, attempt, extract(epoch from timeout)::float8 seconds, error
          from queue.finish_and_fetch($1, $2, $3, $4)`, worker, JSON.stringify(sent), queues, free)
      : await main("select id, claim, error from queue.finish_many($1) where error is not null", JSON.stringify(sent));
  } catch (error) {
    if (!sent.length || !/^2[1-3]/.test(error.code)) throw error;
    if (sent.length > 1) for (const one of sent) await exchange([one], 0);
    else report({ ...SPOILT, id: sent[0].id, claim: sent[0].claim, outcome: sent[0].outcome.replace("retry_later", "failed") });
    return 0;
  }
  for (const { id, claim } of sent) outcomes.delete(`${id}.${claim}`);
  for (const { id, claim, error } of rows.filter((row) => row.error)) {
    tell("refused", id, claim, error);
    const isLater = sent.some((one) => one.id === id && one.claim === claim && one.outcome === "retry_later");
    if (error === "QJ005" || (error === "QJ001" && isLater)) // needs that make a cycle, or do not exist
      report({ id, claim, outcome: "failed", error: `refused: ${error}`, options: { retryable: false } });
  }
  if (performance.now() - beatAt > DEAD_AFTER * 1000) // frozen so long, it may be gone
    await main("select from queue.heartbeat($1)", worker);
  return rows.filter((row) => !row.error).map((row) => run(row, askedAt)).length;
}
// Goes to sleep: listens, fetches once more, then waits for a notification.
async function rest(free) {
  const [{ seconds, channels, is_drained }] = await main(`select extract(epoch from wait_for)::float8 seconds, channels,
    is_drained from queue.before_sleep($1, $2)`, worker, queues);
  for (const channel of channels) await main(`listen ${pg.escapeIdentifier(channel)}`);
  if (DRAIN && is_drained && !running.size) stop();
  else if (!stopping && (await exchange([], free))) await main("select queue.after_sleep($1)", worker);
  else await hinted(Math.min(seconds, MAX_WAIT));
}
function stop() {
  if (stopping++) {
    for (const job of running.values()) job.abort("stopped"); // jobs that have not ended in a second are given back
    setTimeout(() => { for (const { id, claim } of running.values()) report({ id, claim, outcome: "released" }); running.clear(); }, 1000);
  } else tell("stopping", worker);
  hint();
}
for (const signal of ["SIGTERM", "SIGINT", "SIGQUIT"]) process.on(signal, () => { stop(); if (signal === "SIGQUIT") stop(); });
setInterval(() => worker && beat(), HEARTBEAT_EVERY * 1000);
setInterval(extendLate, 3000);
for (let lookAt = 0; ; ) {
  try {
    if (!worker) await register();
    const isDue = performance.now() > lookAt; // for claims whose answer was lost
    for (const { id, claim } of isDue ? await main("select id, claim from queue.claims($1)", worker) : [])
      if (!running.has(`${id}.${claim}`) && !outcomes.has(`${id}.${claim}`)) report({ id, claim, outcome: "released" });
    if (isDue) lookAt = performance.now() + HEARTBEAT_EVERY * 1000;
    const sent = [...outcomes.values()], free = stopping ? 0 : CONCURRENCY - running.size;
    if (stopping && !running.size && !sent.length) break;
    wasHinted = false;
    if (sent.length ? await exchange(sent, free) : free && (await exchange([], free))) continue;
    if (free && !outcomes.size) await rest(free); else await hinted(1);
  } catch (error) {
    if (error.code === "QJ007") { tell("gone", worker); worker = undefined; continue; }
    if (isRefused(error) || stopping > 1) throw error;
    tell("lost", worker, null, error.message);
    await sleep(200);
  }
}
await main("select queue.deregister_worker($1)", worker).catch(() => {});
tell("ended", worker);
process.exit(0);
