/**
 * Takes out of package-lock.json what an image has no use for: the builds of node-llama-cpp for other machines and for GPUs.
 *
 *     node lean.mjs [cuda]
 *
 * `npm ci` would fetch 650 MB of them, since all are optional and Linux is what they are for. What stays is as locked as before.
 */
import { readFileSync, writeFileSync } from "node:fs";

const machine = `linux-${process.arch}`;
const wanted = new Set([machine, ...process.argv.slice(2).map((gpu) => `${machine}-${gpu}`)]);
const lock = JSON.parse(readFileSync("package-lock.json", "utf8"));

function isUnwanted(path) {
  const [, build] = path.split("@node-llama-cpp/");
  return build !== undefined && !wanted.has(build);
}

function without(table) {
  return Object.fromEntries(Object.entries(table).filter(([path]) => !isUnwanted(path)));
}

lock.packages = without(lock.packages);
for (const entry of Object.values(lock.packages)) {
  if (entry.optionalDependencies) entry.optionalDependencies = without(entry.optionalDependencies);
}
writeFileSync("package-lock.json", `${JSON.stringify(lock, null, 2)}\n`);
