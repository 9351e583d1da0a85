/**
 * What the host can be asked. Each operation takes the request and returns what its answer adds; `file` is always the path
 * of an index. All of qmd's own functions; what is called of it beyond its documented interface is imported below.
 */
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { extractSnippet } from "@tobilu/qmd";
import { stores } from "./stores.js";

const entry = import.meta.resolve("@tobilu/qmd");
const { extractTitle, hashContent } = await import(new URL("store.js", entry));

export const version = JSON.parse(readFileSync(fileURLToPath(new URL("../package.json", entry)), "utf8")).version;

const embedding = new Set();

const SNIPPET_LENGTH = 300; // as the command line's --json

/** `kind`: missing (no such index), unknown (no such operation), full (no space), failed. */
export class Failure extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

export const operations = { status, search, vector, hybrid, apply, update, embed };

/** The process: → {pid, rss (bytes), stores (how many are open)}. */
function status() {
  return { pid: process.pid, rss: process.memoryUsage.rss(), stores: stores.size };
}

/** BM25: {file, query, limit, min_score} → {hits}, as `qmd search --json` prints them. */
async function search({ file, query, limit, min_score }) {
  const store = await open(file);
  try {
    const found = await store.searchLex(query, { limit });
    return { hits: found.filter((row) => row.score >= min_score).map((row) => hit(row, query)) };
  } catch (error) {
    stores.close(file); // a broken index: whatever is there next is looked at anew
    throw error;
  }
}

/** Vectors alone, the text as it is: {file, collection, query, limit, min_score, …as hybrid} → {hits}. */
function vector({ query, ...more }) {
  return hybrid({ ...more, queries: [{ type: "vec", query }], rerank: false });
}

/**
 * BM25 and vectors, fused: {file, collection, queries: [{type: lex | vec | hyde, query}], limit, min_score, rerank, intent,
 * candidate_limit, explain} → {hits}. With `query` in place of `queries`, qmd expands it with the generation model.
 */
async function hybrid({ file, collection, query, queries, limit, min_score, rerank, intent, candidate_limit, explain }) {
  const store = await open(file);
  const shown = query ?? (queries.find(({ type }) => type === "lex") ?? queries.find(({ type }) => type === "vec") ?? queries[0]).query;
  const options = { collection, limit, minScore: min_score, rerank, intent, candidateLimit: candidate_limit, explain };
  const found = await store.search(queries ? { queries, ...options } : { query, ...options });
  return {
    hits: found.map((row) => ({
      ...hit({ ...row, chunkPos: row.bestChunkPos, chunkLen: row.bestChunk.length }, shown, intent),
      ...(row.explain && { explain: row.explain }),
    })),
  };
}

/**
 * Writes changes of one collection, all of them or none: {file, config, collection, gone: [path], put: [[path, text]]} → {}.
 * `config`: the settings file; what it says of collections is brought in first. Makes the index if there is none.
 */
async function apply({ file, config, collection, gone, put }) {
  const store = await open(file, { config, create: true });
  const { db } = store.internal;
  const hashes = await Promise.all(put.map(([, text]) => hashContent(text)));
  try {
    db.exec("BEGIN IMMEDIATE"); // and no await before it ends: others use this store too
    const loose = gone.map((path) => remove(store, collection, path));
    put.forEach(([path, text], at) => loose.push(write(store, collection, path, text, hashes[at])));
    loose.forEach((hash) => hash && removeUnused(db, hash));
    db.exec("COMMIT");
  } catch (error) {
    if (db.inTransaction) db.exec("ROLLBACK");
    stores.close(file);
    throw error;
  }
  return {};
}

/** qmd's own update, which reads every file: {file, config} → {}. */
async function update({ file, config }) {
  const store = await open(file, { config, create: true });
  await store.update();
  return {};
}

/** Makes the vectors that are missing: {file, config} → {chunks, errors, pending (documents)}. One at a time an index. */
async function embed({ file, config }) {
  const store = await open(file, { config });
  if (embedding.has(file)) throw new Failure("failed", "vectors of this index are being made already");
  embedding.add(file);
  try {
    const { chunksEmbedded, errors } = await store.embed();
    return { chunks: chunksEmbedded, errors, pending: store.internal.getHashesNeedingEmbedding() };
  } finally {
    embedding.delete(file);
  }
}

/** As reindexCollection does with a file that it has read; → the hash that the path had before. */
function write(store, collection, path, text, hash) {
  const { internal } = store;
  const now = new Date().toISOString();
  const title = extractTitle(text, path);
  const before = internal.findActiveDocument(collection, path);
  internal.insertContent(hash, text, now);
  if (before) internal.updateDocument(before.id, title, hash, now);
  else internal.insertDocument(collection, path, title, hash, now, now);
  return before?.hash === hash ? null : before?.hash;
}

/** Takes the row away, where qmd would leave it inactive: an index built from nothing has none of these. */
function remove(store, collection, path) {
  const before = store.internal.findActiveDocument(collection, path);
  store.internal.db.prepare("DELETE FROM documents WHERE collection = ? AND path = ?").run(collection, path);
  return before?.hash;
}

/** cleanupOrphanedContent for one text: that one reads the whole table. */
function removeUnused(db, hash) {
  db.prepare("DELETE FROM content WHERE hash = ? AND NOT EXISTS (SELECT 1 FROM documents WHERE hash = ?)").run(hash, hash);
}

async function open(file, how) {
  try {
    return await stores.get(file, how);
  } catch (error) {
    if (error?.code === "ENOENT") throw new Failure("missing", "there is no such index");
    throw error;
  }
}

function hit(row, query, intent) {
  const { line, snippet } = extractSnippet(row.body, query, SNIPPET_LENGTH, row.chunkPos, row.chunkLen, intent);
  return {
    docid: `#${row.docid}`,
    score: Math.round(row.score * 100) / 100,
    file: row.displayPath,
    line,
    title: row.title,
    ...(row.context && { context: row.context }),
    snippet,
  };
}
