/**
 * qmd's library, asked over stdin: `node library.js INDEX QMD` (its dist/index.js). A line `{"queries": […], "limit": n}` in, a line
 * `{"seconds": s, "hits": [[path, score], …]}` out.
 */
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const [, , index, qmd] = process.argv;
const { createStore } = await import(pathToFileURL(qmd));
const store = await createStore({ dbPath: index });
for await (const line of createInterface({ input: process.stdin })) {
  const { queries, limit } = JSON.parse(line);
  const begun = performance.now();
  const found = await store.search({ queries, limit, rerank: false, collection: "_" });
  const seconds = (performance.now() - begun) / 1000;
  process.stdout.write(`${JSON.stringify({ seconds, hits: found.map(({ displayPath, score }) => [displayPath, score]) })}\n`);
}
await store.close();
