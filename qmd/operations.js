/**
 * What the host can be asked. Each operation takes the request and returns what its answer adds; `file` is always the path
 * of an index. All of qmd's own functions; what is called of it beyond its documented interface is imported below.
 */
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { extractSnippet } from "@tobilu/qmd";
import { stores } from "./stores.js";

const entry = import.meta.resolve("@tobilu/qmd");
const {
  clearAllEmbeddings,
  extractTitle,
  generateEmbeddings,
  getEmbeddingFingerprint,
  getHashesForEmbedding,
  hashContent,
  insertEmbedding,
  vectorSearchQuery,
} = await import(new URL("store.js", entry));

export const version = JSON.parse(readFileSync(fileURLToPath(new URL("../package.json", entry)), "utf8")).version;

const NURSERY = "_";
const NURSERY_BATCH = 32; // documents
const turns = new Map(); // nursery → the end of those who fill it, one after the other

const SNIPPET_LENGTH = 300; // as the command line's --json

/** `kind`: missing (no such index), unknown (no such operation), full (no space), failed. */
export class Failure extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

export const operations = { status, search, semantic, apply, update, embed, adopt };

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

/**
 * Vectors, alone or fused with BM25: {file, collection, queries: [{type: lex | vec | hyde, query}], limit, min_score, rerank,
 * intent, candidate_limit, explain} → {hits}, as `qmd query --json` prints them.
 * With `query` in place of `queries`, qmd expands it with the generation model; `vectors_only` as `qmd vsearch`.
 */
async function semantic({ file, collection, query, queries, vectors_only, limit, min_score, rerank, ...more }) {
  const store = await open(file);
  const { intent, candidate_limit: candidateLimit, explain } = more;
  if (vectors_only) {
    const found = await vectorSearchQuery(store.internal, query, { collection, limit, minScore: min_score || 0.3, intent });
    return { hits: found.map((row) => hit(row, query, intent)) };
  }
  const options = { collection, limit, minScore: min_score, rerank, intent, candidateLimit, explain };
  const found = await store.search(queries ? { queries, ...options } : { query, ...options });
  const of = (wanted) => queries?.find(({ type }) => type === wanted)?.query;
  const shown = of("lex") ?? of("vec") ?? query ?? asDocument(queries);
  return {
    hits: found.map((row) => ({
      ...hit({ ...row, chunkPos: row.bestChunkPos, chunkLen: row.bestChunk.length }, shown, intent),
      ...(row.explain && { explain: row.explain }),
    })),
  };
}

/** What the command line was given, and looks for in a snippet when there is nothing better. */
function asDocument(queries) {
  return queries.map(({ type, query }) => `${type}: ${query}`).join("\n");
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

/**
 * Makes vectors that `file` lacks, in `nursery`, an index of vectors alone that all branches share: {file, nursery, config,
 * seconds} → {}. Writes nothing to `file`, so that others search it meanwhile; what is made is kept when time is up.
 */
async function embed({ file, nursery, config, seconds }) {
  const end = Date.now() + 1000 * seconds;
  const turn = (turns.get(nursery) ?? Promise.resolve()).then(() => fill(nursery, file, config, end));
  const settled = turn.catch(() => {});
  turns.set(nursery, settled);
  await turn.finally(() => turns.get(nursery) === settled && turns.delete(nursery));
  return {};
}

async function fill(nursery, file, config, end) {
  const [source, target] = [await open(file), await open(nursery, { config, create: true })];
  const known = complete(target);
  const lacking = getHashesForEmbedding(source.internal.db, model()).filter(({ hash }) => !known.has(hash));
  while (lacking.length && Date.now() < end) {
    try {
      for (const { hash, body, path } of lacking.splice(0, NURSERY_BATCH)) write(target, NURSERY, `${hash}/${path}`, body, hash);
      await generateEmbeddings(target.internal, { maxDurationMs: Math.max(end - Date.now(), 1) });
    } finally {
      target.internal.db.exec("DELETE FROM documents; DELETE FROM content"); // vectors stay, by hash
    }
  }
}

/**
 * Copies the vectors that `file` lacks out of `nursery`, all of them or none, and takes those of another model away:
 * {file, nursery, config} → {pending: documents that still lack theirs}. Writes to `file`.
 */
async function adopt({ file, nursery, config }) {
  const [source, target] = [await open(nursery, { config, create: true }), await open(file, { config })];
  const [from, to] = [source.internal.db, target.internal.db];
  to.exec("BEGIN IMMEDIATE");
  try {
    const others = to.prepare("SELECT 1 FROM content_vectors WHERE model <> ? OR embed_fingerprint <> ? LIMIT 1");
    if (others.get(model(), fingerprint())) clearAllEmbeddings(to);
    const known = complete(source);
    for (const { hash } of getHashesForEmbedding(to, model())) {
      if (!known.has(hash)) continue;
      const rows = from.prepare("SELECT * FROM content_vectors WHERE hash = ?").all(hash);
      for (const { seq, pos, embedded_at, total_chunks } of rows) {
        const { embedding } = from.prepare("SELECT embedding FROM vectors_vec WHERE hash_seq = ?").get(`${hash}_${seq}`);
        const floats = new Float32Array(embedding.buffer, embedding.byteOffset, embedding.byteLength / 4);
        target.internal.ensureVecTable(floats.length);
        insertEmbedding(to, hash, seq, pos, floats, model(), embedded_at, total_chunks, fingerprint());
      }
    }
    to.exec("COMMIT");
  } catch (error) {
    if (to.inTransaction) to.exec("ROLLBACK");
    stores.close(file);
    throw error;
  }
  return { pending: target.internal.getHashesNeedingEmbedding(model()) };
}

/** The hashes of which a nursery has every vector of the current model. */
function complete({ internal: { db } }) {
  if (!db.prepare("SELECT 1 FROM sqlite_master WHERE name = 'vectors_vec'").get()) return new Set();
  const rows = db.prepare(
    "SELECT hash FROM content_vectors WHERE model = ? AND embed_fingerprint = ? GROUP BY hash HAVING count(*) = max(total_chunks)",
  );
  return new Set(rows.all(model(), fingerprint()).map(({ hash }) => hash));
}

function model() {
  return stores.models.embedModelName;
}

function fingerprint() {
  return getEmbeddingFingerprint(model());
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
