/** qmd's stores, opened once and kept: the ones used last stay open, all share one set of models. */
import { readFileSync, statSync } from "node:fs";
import { createStore } from "@tobilu/qmd";

const { setDefaultLlamaCpp } = await import(new URL("llm.js", import.meta.resolve("@tobilu/qmd")));

const MAX_OPEN = 32; // some 3 MB each
const MAX_STATEMENTS = 200;

class Stores {
  #open = new Map(); // path → {store, inode, settings}; the one used last is last
  #models = null; // qmd's LlamaCpp: loads a model when it is first needed, unloads it when idle

  /** The store of an index file; `config`: the settings file that a writer has to bring into it. */
  async get(path, { config, create = false } = {}) {
    const inode = inodeOf(path);
    if (inode === null && !create) throw Object.assign(new Error("there is no such index"), { code: "ENOENT" });
    const settings = config && readFileSync(config, "utf8");
    const known = this.#open.get(path);
    if (known?.inode === inode && (!config || known.settings === settings)) {
      this.#open.delete(path);
      this.#open.set(path, known);
      return known.store;
    }
    this.close(path);
    const store = await createStore(config ? { dbPath: path, configPath: config } : { dbPath: path });
    this.#share(store);
    keepStatements(store.internal.db);
    this.#open.set(path, { store, inode: inodeOf(path), settings });
    for (const [oldest] of this.#open) {
      if (this.#open.size <= MAX_OPEN) break;
      this.close(oldest);
    }
    return store;
  }

  get size() {
    return this.#open.size;
  }

  close(path) {
    const known = this.#open.get(path);
    this.#open.delete(path);
    known?.store.internal.close();
  }

  closeAll() {
    for (const path of [...this.#open.keys()]) this.close(path);
  }

  /** Gives back the space of indexes that were replaced or removed. */
  closeVanished() {
    for (const [path, { inode }] of [...this.#open]) if (inodeOf(path) !== inode) this.close(path);
  }

  /** `createStore` gives each store models of its own, not loaded yet. */
  #share(store) {
    if (!this.#models) {
      this.#models = store.internal.llm;
      setDefaultLlamaCpp(this.#models); // cutting a document into chunks takes that one
    }
    store.internal.llm = this.#models;
  }

  /** What is loaded is of the models named in the environment. */
  get models() {
    return this.#models;
  }
}

/** qmd prepares each statement anew each time it runs it, some fifty times a search: half of what that takes. */
function keepStatements(db) {
  const kept = new Map();
  const prepare = db.prepare.bind(db);
  db.prepare = (sql) => {
    let statement = kept.get(sql);
    if (!statement) {
      if (kept.size >= MAX_STATEMENTS) kept.clear();
      kept.set(sql, (statement = prepare(sql)));
    }
    return statement;
  };
}

function inodeOf(path) {
  return statSync(path, { throwIfNoEntry: false })?.ino ?? null;
}

export const stores = new Stores();
