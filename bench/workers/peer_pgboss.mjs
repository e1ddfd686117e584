// pg-boss. Best: batches of 500, the next at once while they are full, and LISTEN; default: one job each 2 seconds.
import { drive, require } from "./peer.mjs";

const { PgBoss } = require("pg-boss");
const BEST = { batchSize: 500, burstWhenBatchFull: true, pollingIntervalSeconds: 0.5 };

async function started(connectionString, options = {}) {
  const boss = new PgBoss({ connectionString, ...options });
  boss.on("error", console.error);
  return await boss.start();
}

async function install(dsn) {
  const boss = await started(dsn);
  await boss.createQueue("noop", { notify: true });
}

async function producer(dsn) {
  const boss = await started(dsn);
  return {
    one: (data) => boss.send("noop", data),
    many: (batch) => boss.insert("noop", batch.map((data) => ({ data }))),
  };
}

async function work(dsn, ran, setting) {
  const best = setting === "best";
  const boss = await started(dsn, { useListenNotify: best });
  await boss.work("noop", best ? BEST : {}, (jobs) => Promise.all(jobs.map(({ data }) => ran.run(data))));
}

await drive(install, producer, work);
