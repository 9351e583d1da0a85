// What `qmd search --json` does (dist/cli/qmd.js: search, outputResults), over many questions in one process.
//
//     node reference.mjs …/dist/store.js < {"file": …, "collection": …, "questions": [[text, limit, min_score], …]}
//
// Prints a list of hits for each question. tests/test_host.py holds it to the command line.
import { readFileSync } from "node:fs";

const { createStore, extractSnippet, getContextForFile, searchFTS } = await import(process.argv[2]);
const { file, collection, questions } = JSON.parse(readFileSync(0, "utf8"));
const { db } = createStore(file);

function answer([query, limit, minScore]) {
  return searchFTS(db, query, Math.max(50, limit * 2), collection)
    .filter((row) => row.score >= minScore)
    .slice(0, limit)
    .map((row) => {
      const { line, snippet } = extractSnippet(row.body || "", query, 300, undefined, undefined, undefined);
      const context = getContextForFile(db, row.filepath);
      return {
        docid: `#${row.docid}`,
        score: Math.round(row.score * 100) / 100,
        file: row.displayPath,
        line,
        title: row.title,
        ...(context && { context }),
        snippet,
      };
    });
}

process.stdout.write(JSON.stringify(questions.map(answer)));
