// The protocol of bench_peers.py, for drivers of systems in Node: as peer.py. Run in the folder with node_modules.
import { once } from "node:events";
import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";

export const require = createRequire(`${process.cwd()}/package.json`);
const [action, dsn, json] = process.argv.slice(2);
const options = JSON.parse(json);
// The clock that all processes of a machine share.
const now = () => Number(process.hrtime.bigint()) / 1e9;
// As in peer.py, in seconds.
const QUIET = 0.2;
const say = (line) => console.log(JSON.stringify(line));

class Ran {
  waits = [];

  constructor() {
    let said = 0, ran = 0, changed = now();
    setInterval(() => {
      if (ran !== this.waits.length) {
        ran = this.waits.length;
        changed = now();
        say({ pid: process.pid, ran });
      } else if (said < ran && now() - changed > QUIET) {
        say({ waits: this.waits.slice(said, ran).filter((wait) => wait !== null) });
        said = ran;
      }
    }, 10);
  }

  run = async ({ at }) => {
    if (!this.waits.length) say({ first: now() });
    this.waits.push(at === null ? null : now() - at);
    if (options.kind === "sleep") await sleep(1);
    else if (options.kind === "cpu") burn();
  };
}

// By the wall clock, as getrusage counts CPU time in ticks of 4 ms; what other processes take counts for these.
function burn() {
  const end = performance.now() + 1;
  while (performance.now() < end);
}

async function ready() {
  say({ ready: true });
  process.stdin.on("end", () => process.exit(0));
  await once(process.stdin, "data");
}

async function produce(producer, { jobs, size, rate }) {
  const { one, many } = await producer(dsn);
  await ready();
  const begun = now(), cpu = process.cpuUsage();
  for (let first = 0; first < jobs; first += size || 1) {
    if (rate) await sleep(Math.max(0, 1000 * (begun + first / rate - now())));
    const at = rate ? now() : null;
    const batch = [];
    for (let n = first; n < Math.min(first + (size || 1), jobs); n++) batch.push({ n, at });
    if (size) await many(batch);
    else await one(batch[0]);
  }
  const { user, system } = process.cpuUsage(cpu);
  say({ begun, ended: now(), cpu: (user + system) / 1e6 });
}

export async function drive(install, producer, work) {
  if (action === "install") await install(dsn);
  else if (action === "produce") await produce(producer, options);
  else {
    await ready();
    await work(dsn, new Ran(), options.setting);
    await new Promise(() => {});
  }
  process.exit(0);
}
