// graphile-worker. Best: a local queue of 500, completions in batches, as its page Performance advises; default: 1 job.
import { drive, require } from "./peer.mjs";

const { Logger, makeWorkerUtils, run } = require("graphile-worker");
const logger = new Logger(() => () => {});
const BEST = { concurrentJobs: 24, localQueue: { size: 500 }, completeJobBatchDelay: 0, failJobBatchDelay: 0 };

async function install(connectionString) {
  const utils = await makeWorkerUtils({ connectionString, logger });
  await utils.migrate();
  await utils.release();
}

async function producer(connectionString) {
  const utils = await makeWorkerUtils({ connectionString, logger });
  return {
    one: (payload) => utils.addJob("noop", payload),
    many: (batch) => utils.addJobs(batch.map((payload) => ({ identifier: "noop", payload }))),
  };
}

async function work(connectionString, ran, setting) {
  const worker = { connectionString, ...(setting === "best" ? BEST : {}) };
  await run({ preset: { worker }, logger, taskList: { noop: ran.run } });
}

await drive(install, producer, work);
