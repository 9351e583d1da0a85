/**
 * What the host can be asked. Each operation takes the request and returns what its answer adds; `file` is always the path
 * of an index. All of qmd's own functions; what is called of it beyond its documented interface is imported below.
 */
import { existsSync, readFileSync, renameSync, rmSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { extractSnippet } from "@tobilu/qmd";
import { stores } from "./stores.js";

const entry = import.meta.resolve("@tobilu/qmd");
const {
  chunkDocumentByTokens,
  cleanupOrphanedVectors,
  clearAllEmbeddings,
  extractTitle,
  formatDocForEmbedding,
  getEmbeddingFingerprint,
  hashContent,
  insertEmbedding,
  vectorSearchQuery,
} = await import(new URL("store.js", entry));

export const version = JSON.parse(readFileSync(fileURLToPath(new URL("../package.json", entry)), "utf8")).version;

const BATCH_MS = 500; // others want to be answered, and time has an end
const MOST_AT_ONCE = 32; // parts of documents
const LARGE = 16 * 1024; // characters
const ADOPTED_AT_ONCE = 32; // documents
let pace = 1;
let cut = {}; // {hash, chunks} of the text that was cut last
const turns = new Map(); // nursery → the end of those who fill it, one after the other

const SNIPPET_LENGTH = 300; // as the command line's --json

/** `kind`: missing (no such index), unknown (no such operation), full (no space), failed. */
export class Failure extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

export const operations = { status, search, semantic, apply, update, embed, adopt, prune };

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
 * seconds} → {}. Writes nothing to `file`, so that others search it meanwhile; what is made is kept when time is up, in the
 * middle of a document too.
 */
async function embed({ file, nursery, config, seconds }) {
  const end = Date.now() + 1000 * seconds;
  await before(end, inTurn(nursery, () => fill(nursery, file, config, end))); // what is at work then is brought to its end, and kept
  return {};
}

/** What `act` gives, when those who change this nursery and came earlier are done. */
function inTurn(nursery, act) {
  const turn = (turns.get(nursery) ?? Promise.resolve()).then(act);
  const settled = turn.catch(() => {});
  turns.set(nursery, settled);
  settled.then(() => turns.get(nursery) === settled && turns.delete(nursery));
  return turn;
}

/** qmd's generateEmbeddings, but that it throws away a document that it was not done with, and starts it again. */
async function fill(nursery, file, config, end) {
  const kept = (act) => withNursery(nursery, config, act);
  const waiting = [];
  let failed = 0;
  const make = async () => {
    const some = waiting.splice(0, pace);
    const begun = Date.now();
    const texts = some.map(({ text, title }) => formatDocForEmbedding(text, title, model()));
    const made = await stores.models.embedBatch(texts, { model: model() });
    pace = Math.min(Math.max(Math.round((pace * BATCH_MS) / (Date.now() - begun + 1)), 1), MOST_AT_ONCE);
    failed = made.some(Boolean) ? 0 : failed + 1;
    if (failed > 2) throw new Failure("failed", "the model makes no vectors");
    await kept((store) => insert(store, some.map((chunk, at) => ({ ...chunk, vector: made[at]?.embedding }))));
  };
  for (const { hash, path } of lacking((await open(file)).internal.db)) {
    if (Date.now() >= end) return;
    const known = await kept(({ internal: { db } }) => seqs(db, hash));
    if (known.whole) continue;
    const text = (await open(file)).internal.db.prepare("SELECT doc FROM content WHERE hash = ?").get(hash)?.doc;
    if (text === undefined) continue; // it went meanwhile
    if (text.length > LARGE) while (waiting.length && Date.now() < end) await make(); // cutting it takes a while
    const chunks = await before(end, chunksOf(hash, text));
    const title = extractTitle(text, path);
    chunks?.forEach(({ text, pos }, seq) => known.has(seq) || waiting.push({ hash, seq, pos, text, title, of: chunks.length }));
    while (waiting.length >= pace && Date.now() < end) await make();
  }
  while (waiting.length && Date.now() < end) await make();
}

/** What a text is cut into; of the last one remembered, since a large one takes longer than a turn. */
function chunksOf(hash, text) {
  if (cut.hash !== hash) {
    const chunks = chunkDocumentByTokens(text);
    chunks.catch(() => (cut = {}));
    cut = { hash, chunks };
  }
  return cut.chunks;
}

/** What a promise gives, undefined when it does not until then. */
function before(end, promise) {
  let timer;
  const over = new Promise((resolve) => (timer = setTimeout(resolve, Math.max(end - Date.now(), 0))));
  return Promise.race([promise, over]).finally(() => clearTimeout(timer));
}

/**
 * Copies the vectors that `file` lacks out of `nursery`, and takes away those of another model and of texts that are gone:
 * {file, nursery, config, seconds} → {pending: documents that still lack theirs}. Writes to `file`; some documents at a
 * time, between which others are answered, until the time is up.
 */
async function adopt({ file, nursery, config, seconds }) {
  const end = Date.now() + 1000 * seconds;
  const { internal } = await open(file, { config });
  try {
    const others = internal.db.prepare("SELECT 1 FROM content_vectors WHERE model <> ? OR embed_fingerprint <> ? LIMIT 1");
    if (others.get(model(), fingerprint())) internal.db.transaction(() => clearAllEmbeddings(internal.db)).immediate();
    cleanupOrphanedVectors(internal.db);
    const hashes = lacking(internal.db).map(({ hash }) => hash);
    while (hashes.length && Date.now() < end) {
      const some = hashes.splice(0, ADOPTED_AT_ONCE);
      insert(await open(file), await withNursery(nursery, config, (store) => some.flatMap((hash) => vectorsOf(store, hash))));
      await new Promise(setImmediate);
    }
    return { pending: (await open(file)).internal.getHashesNeedingEmbedding(model()) };
  } catch (error) {
    stores.close(file);
    throw error;
  }
}

/**
 * Takes the vectors of the texts in `drop` out of `nursery`, and those of other models: {nursery, config, drop: [hash]} → {}.
 * It is written anew, since a vector table gives no space back, and then takes the old one's place.
 */
async function prune({ nursery, config, drop }) {
  const unwanted = new Set(drop);
  const next = `${nursery}.next`;
  await inTurn(nursery, async () => {
    removeFiles(next); // of a host that was killed
    if (!existsSync(nursery)) return;
    try {
      const { internal } = await open(nursery, { config });
      const hashes = internal.db.prepare("SELECT DISTINCT hash FROM content_vectors").all();
      const kept = hashes.map(({ hash }) => hash).filter((hash) => !unwanted.has(hash));
      await open(next, { config, create: true });
      while (kept.length) {
        const some = kept.splice(0, ADOPTED_AT_ONCE);
        insert(await open(next), await withNursery(nursery, config, (store) => some.flatMap((hash) => vectorsOf(store, hash))));
        await new Promise(setImmediate);
      }
      stores.close(next);
      stores.close(nursery);
      for (const end of ["-wal", "-shm"]) rmSync(nursery + end, { force: true });
      renameSync(next, nursery);
    } finally {
      stores.close(next);
      removeFiles(next);
    }
  });
  return {};
}

/** Documents without all their vectors of the current model: [{hash, path}], the smallest first, so that a large one, or one
 * that can't be embedded, keeps no other waiting. */
function lacking(db) {
  const rows = db.prepare(
    `SELECT d.hash, min(d.path) AS path FROM documents d JOIN content c USING (hash)
     WHERE d.active = 1 AND d.hash NOT IN (SELECT hash FROM content_vectors WHERE model = ? AND embed_fingerprint = ?
       GROUP BY hash HAVING count(*) >= max(total_chunks))
     GROUP BY d.hash ORDER BY length(c.doc), d.hash`,
  );
  return rows.all(model(), fingerprint());
}

/** The parts of a text that have a vector; `whole`: all of them. */
function seqs(db, hash) {
  const rows = db.prepare("SELECT seq, total_chunks FROM content_vectors WHERE hash = ? AND model = ? AND embed_fingerprint = ?");
  const found = rows.all(hash, model(), fingerprint());
  return Object.assign(new Set(found.map(({ seq }) => seq)), { whole: found.length > 0 && found.length >= found[0].total_chunks });
}

/** All vectors of a text, or none when one is missing. */
function vectorsOf({ internal: { db } }, hash) {
  if (!seqs(db, hash).whole) return [];
  const rows = db.prepare("SELECT seq, pos, total_chunks, embedded_at AS at FROM content_vectors WHERE hash = ?").all(hash);
  const vector = db.prepare("SELECT embedding FROM vectors_vec WHERE hash_seq = ?");
  const found = rows.map(({ seq, pos, total_chunks, at }) => {
    const bytes = vector.get(`${hash}_${seq}`)?.embedding;
    return { hash, seq, pos, of: total_chunks, at, vector: bytes && new Float32Array(Uint8Array.from(bytes).buffer) };
  });
  if (found.every(({ vector }) => vector)) return found;
  db.prepare("DELETE FROM content_vectors WHERE hash = ?").run(hash); // it is made again
  return [];
}

function insert({ internal: { db, ensureVecTable } }, vectors) {
  const whole = vectors.filter(({ vector }) => vector);
  if (!whole.length) return;
  try {
    ensureVecTable(whole[0].vector.length);
  } catch (error) {
    if (!/dimension/.test(error?.message)) throw error;
    clearAllEmbeddings(db); // of another model in a file of the same name
    ensureVecTable(whole[0].vector.length);
  }
  const now = new Date().toISOString();
  const put = ({ hash, seq, pos, of, at = now, vector }) =>
    insertEmbedding(db, hash, seq, pos, Float32Array.from(vector), model(), at, of, fingerprint());
  db.transaction(() => whole.forEach(put)).immediate();
}

/** What `act` gives for the nursery's store. It is a cache: a broken one is made anew. */
async function withNursery(path, config, act) {
  const look = async () => act(await open(path, { config, create: true }));
  try {
    return await look();
  } catch (error) {
    if (!/^SQLITE_(NOTADB|CORRUPT|ERROR|SCHEMA|CANTOPEN)/.test(error?.code)) throw error;
    console.error(`the vectors in ${path} can't be used, and are made anew: ${error.message}`);
    stores.close(path);
    removeFiles(path);
    return look();
  }
}

/** An index and what SQLite keeps beside it. */
function removeFiles(path) {
  for (const end of ["", "-wal", "-shm"]) rmSync(path + end, { recursive: true, force: true });
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
