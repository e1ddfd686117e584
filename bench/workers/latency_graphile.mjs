// graphile-worker for bench_latency.py: `work DSN JOBS` prints how long each job waited, in seconds,
// and `produce DSN JOBS RATE` adds them. Run in the folder where it is installed.
import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";

const require = createRequire(`${process.cwd()}/package.json`);
const { Logger, makeWorkerUtils, run } = require("graphile-worker");

const [mode, connectionString, jobs, rate] = process.argv.slice(2);
const logger = new Logger(() => () => {});
const now = () => (performance.timeOrigin + performance.now()) / 1000;

if (mode === "work") {
  const waits = [];
  const stamp = async ({ at }) => {
    waits.push(now() - at);
    if (waits.length === Number(jobs)) {
      console.log(JSON.stringify(waits));
      void runner.stop();
    }
  };
  const runner = await run({ connectionString, logger, concurrency: 10, taskList: { stamp } });
  console.log("ready");
  await runner.promise;
} else {
  const utils = await makeWorkerUtils({ connectionString, logger });
  if (mode === "install") await utils.migrate();
  const begun = performance.now();
  for (let number = 0; number < Number(jobs ?? 0); number++) {
    await sleep(Math.max(0, begun + (1000 * number) / Number(rate) - performance.now()));
    await utils.addJob("stamp", { at: now() });
  }
  await utils.release();
}
