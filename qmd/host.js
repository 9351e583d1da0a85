/**
 * The warm host: qmd as a library in one process that stays, for all workspaces.
 *
 *     node host.js SOCKET
 *
 * Listens on a Unix socket. A request is one line of JSON, `{"op": …}`, an answer one line, `{"ok": true, "qmd": version, …}`
 * or `{"ok": false, "kind": …, "error": text}`; on one connection one after the other. operations.js says what
 * there is. TERM drains: what was asked is answered, then the process ends.
 */
import { chmodSync, statSync, unlinkSync } from "node:fs";
import net from "node:net";
import { basename, dirname } from "node:path";
import { Failure, operations, version } from "./operations.js";
import { stores } from "./stores.js";

const MAX_LINE = 256 * 1024 * 1024; // a document has at most 64 MiB
const LOOK_EVERY_MS = 5_000;
const DRAIN_MS = 10_000;
const MAX_HEAP = 768 * 1024 * 1024; // of JavaScript; models are not in it

const connections = new Set();
let draining = false;
let address; // {path, inode} of our socket

const server = net.createServer((socket) => {
  const connection = { socket, busy: false };
  connections.add(connection);
  socket.on("close", () => {
    connections.delete(connection);
    endWhenDrained();
  });
  socket.on("error", () => socket.destroy()); // the asker has gone: nobody is left to be told
  readLines(connection);
});

function readLines(connection) {
  const { socket } = connection;
  let pieces = [];
  let length = 0;
  socket.on("data", async (chunk) => {
    length += chunk.length;
    if (length > MAX_LINE) return socket.destroy();
    pieces.push(chunk);
    if (connection.busy || !chunk.includes(10)) return;
    connection.busy = true;
    for (;;) {
      const all = Buffer.concat(pieces);
      const end = all.indexOf(10);
      if (end < 0) {
        pieces = [all];
        break;
      }
      pieces = [all.subarray(end + 1)];
      length -= end + 1;
      const answer = await answerTo(all.toString("utf8", 0, end));
      if (!socket.writable) break;
      socket.write(`${JSON.stringify(answer)}\n`);
    }
    connection.busy = false;
    if (draining) socket.destroySoon();
  });
}

async function answerTo(line) {
  try {
    const request = JSON.parse(line);
    const operation = Object.hasOwn(operations, request?.op) ? operations[request.op] : undefined;
    if (!operation) throw new Failure("unknown", "no such operation");
    return { ok: true, qmd: version, ...(await operation(request)) };
  } catch (error) {
    return { ok: false, qmd: version, kind: kindOf(error), error: String(error?.message ?? error) };
  }
}

function kindOf(error) {
  if (error instanceof Failure) return error.kind;
  if (error instanceof SyntaxError) return "unknown";
  if (error?.code === "SQLITE_FULL" || error?.code === "ENOSPC" || error?.code === "EDQUOT") return "full";
  return "failed";
}

function drain() {
  if (draining) return;
  draining = true;
  if (!wasTakenAway()) server.close(); // removes the name, which may be a successor's otherwise
  for (const { socket, busy } of connections) if (!busy) socket.destroySoon();
  setTimeout(() => process.exit(1), DRAIN_MS).unref();
  endWhenDrained();
}

function endWhenDrained() {
  if (!draining || connections.size) return;
  stores.closeAll();
  process.exit(0);
}

function wasTakenAway() {
  return address && statSync(address.path, { throwIfNoEntry: false })?.ino !== address.inode;
}

function lookAfter() {
  stores.closeVanished();
  if (wasTakenAway()) {
    console.error("the host's socket was taken away: it ends, to be started anew");
    drain();
  }
  const { heapTotal, external } = process.memoryUsage();
  if (heapTotal + external > MAX_HEAP) {
    console.error("the host takes too much memory: it ends, to be started anew");
    drain();
  }
}

function listen(path) {
  process.chdir(dirname(path)); // a socket's address has room for some 100 bytes only
  const name = basename(path);
  const probe = net.connect(name);
  probe.on("connect", () => {
    console.error("another host is listening already");
    process.exit(1);
  });
  probe.on("error", () => {
    try {
      unlinkSync(name); // of a host that was killed
    } catch (error) {
      if (error.code !== "ENOENT") throw error;
    }
    process.umask(0o077);
    server.listen(name, () => {
      chmodSync(name, 0o600);
      address = { path, inode: statSync(path).ino };
    });
  });
}

process.on("SIGTERM", drain);
process.on("SIGINT", drain);
setInterval(lookAfter, LOOK_EVERY_MS).unref();
listen(process.argv[2]);
