// Asks the site's own search, which the browser runs as a web worker: node site_search.mjs SITE < questions.json
// Prints, for each question, the pages found in the order shown, each with its sections.
import { readFileSync, readdirSync } from "node:fs";
import vm from "node:vm";

const site = process.argv[2];
const questions = JSON.parse(readFileSync(0, "utf8"));
const folder = `${site}/assets/javascripts/workers`;
const [name] = readdirSync(folder).filter((file) => /^search\..*\.js$/.test(file));

let answer;
let ask;
const worker = vm.createContext({
  addEventListener: (_event, listener) => { ask = listener; },
  postMessage: (message) => answer(message),
  console,
});
worker.self = worker.window = worker;
vm.runInContext(readFileSync(`${folder}/${name}`, "utf8"), worker);

const send = (message) => new Promise((resolve) => { answer = resolve; ask({ data: message }); });

const index = JSON.parse(readFileSync(`${site}/search/search_index.json`, "utf8"));
await send({ type: 0, data: { ...index, options: { suggest: true } } });
const found = [];
for (const question of questions) {
  const { data } = await send({ type: 2, data: question });
  found.push(data.items.map((page) => page.map((section) => section.location)));
}
console.log(JSON.stringify(found));
