// The tasks of README.md, for examples/worker.mjs.
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";

const echo = (args) => args;
const names = JSON.parse(readFileSync(new URL("names.json", import.meta.url), "utf8"));

export default {
  echo,
  ...Object.fromEntries(names.map((name) => [name, echo])),
  none() {},
  fail({ message }) {
    throw new Error(message);
  },
  fail_for_good({ message }) {
    throw Object.assign(new Error(message), { retryable: false });
  },
  async hold({ path }, { signal }) {
    writeFileSync(`${path}.began`, "");
    while (!existsSync(path)) await sleep(20, undefined, { signal });
  },
  async stubborn({ path }) {
    while (!existsSync(path)) await sleep(20);
  },
  async crash({ path }) {
    if (existsSync(path)) return;
    writeFileSync(path, "");
    process.kill(process.pid, "SIGKILL");
    await sleep(1000_000);
  },
  again({ path }) {
    if (existsSync(path)) return;
    writeFileSync(path, "");
    throw Object.assign(new Error("not yet"), { name: "RetryLater" });
  },
  again_after_none() {
    throw Object.assign(new Error("not yet"), { name: "RetryLater", needs: [999999999999] });
  },
  large: () => "x".repeat(100_000),
  unstorable: () => ({ number: 1n }),
  nul() {
    throw new Error("a\0b");
  },
};
