"""`make eval` · `make eval STRICT=1 OUT=eval.json`

Asks the questions of tests/eval over HTTP in each mode, beside qmd itself at the same commit, and beside grep. Exit 1
when memgw's answers are not qmd's; with STRICT=1 also when a bound is missed or a mode stepped down.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from memgw.config import ROOT
from tests.actors import MINILM, Upstream
from tests.bench.__main__ import facts, isolate
from tests.bench.stack import Answer, Client, running
from tests.eval.measures import DEPTH, Score, by_kind, rank, table
from tests.eval.plain import MODES, Hits, Plain, PlainServer
from tests.eval.questions import Question, grep, memory, questions

Way = Callable[[str], Hits]


def main() -> int:
    wanted = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    start = time.monotonic()
    subprocess.run([sys.executable, "bin/minilm.py", str(MINILM)], cwd=ROOT, check=True)
    asked, documents = questions(), memory()
    with TemporaryDirectory(prefix="memgw-eval-") as folder:
        work = Path(folder)
        isolate(work / "home")
        remote = Upstream(work / "remote.git")
        commit = remote.commit("main", documents)
        plain = Plain(work / "plain", remote.url, commit, MINILM)
        found: dict[str, list[Hits]] = {"grep": [[(path, 0) for path in grep(documents, q.question)] for q in asked]}
        with plain.served() as server, running(work / "data", remote.url, QMD_EMBED_MODEL_URI=str(MINILM)) as stack:
            memgw = Memgw(stack.port, commit, server)
            for mode in MODES:
                found[f"qmd {mode}"] = answers(asked, lambda text, mode=mode: server.ask(mode, text))  # type: ignore[misc]
            for mode in MODES:
                found[f"memgw {mode}"] = answers(asked, lambda text, mode=mode: memgw.ask(mode, text))  # type: ignore[misc]
    scores = {
        way: by_kind(asked, [rank(paths(hits), q.answers) for q, hits in zip(asked, of, strict=True)])
        for way, of in found.items()
    }
    stepped_down = sorted(memgw.stepped_down)
    wrong = memgw.wrong
    missed = [*bounds(scores), *(f"{mode} stepped down to BM25" for mode in stepped_down)]
    about = facts(time.monotonic() - start)
    print(f"\n{len(asked)} questions over {len(documents)} documents\n\n{table(scores)}\n")
    print("answers through memgw are qmd's own" if not wrong else f"{len(wrong)} answers are not qmd's own:")
    for line in wrong[:10]:
        print(f"  {line}")
    for line in missed:
        print(f"missed: {line}")
    report = {**about, "scores": as_json(scores), "wrong": wrong, "missed": missed, "ranks": ranks(asked, found)}
    wanted.out.parent.mkdir(parents=True, exist_ok=True)
    wanted.out.write_text(json.dumps(report, indent=1, ensure_ascii=False))
    return 1 if wrong or (wanted.strict and missed) else 0


def arguments() -> argparse.Namespace:
    """From the command line, else from the environment."""
    parser = argparse.ArgumentParser(prog="python -m tests.eval", description=__doc__)
    parser.add_argument("--strict", action="store_true", default=os.environ.get("STRICT") == "1")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / ".eval" / "eval.json"))
    return parser.parse_args()


class Memgw:
    """The gateway over HTTP."""

    def __init__(self, port: int, commit: str, plain: PlainServer) -> None:
        self._client, self._commit, self._plain = Client(port), commit, plain
        self.stepped_down: set[str] = set()
        self.wrong: list[str] = []

    def ask(self, mode: str, text: str) -> Hits:
        answer = self._client.ask(text, query_type=mode, limit=DEPTH, debug=True)
        if answer.status != 200 or answer.json["commit_hash"] != self._commit:
            raise RuntimeError(f"memgw answered {answer.status}: {answer.body[:300]!r}")
        if any(note["code"] == "model_unavailable" for note in answer.json["degraded"]):
            self.stepped_down.add(mode)
        self.compare(mode, text, answer)
        return answer.hits

    def compare(self, mode: str, text: str, answer: Answer) -> None:
        """With what qmd itself says to the command that the answer names."""
        theirs = self._plain.repeat(answer.json["debug"]["qmd_command"])
        if answer.hits != theirs:
            self.wrong.append(f"{mode}: {text}: {answer.hits} and not {theirs}")


def answers(asked: Sequence[Question], way: Way) -> list[Hits]:
    return [way(question.question) for question in asked]


def paths(hits: Hits) -> list[str]:
    return [path for path, _ in hits]


def bounds(scores: Mapping[str, Mapping[str, Score]]) -> list[str]:
    """A line for each that is missed."""
    query, search, vsearch = (scores[f"memgw {mode}"]["all"].mrr for mode in ("query", "search", "vsearch"))
    found = scores["memgw vsearch"]["paraphrase"].five
    missed = []
    if query <= max(search, vsearch):
        missed.append(f"query beats search and vsearch: MRR {query:.3f}, {search:.3f}, {vsearch:.3f}")
    if found < 0.8:
        missed.append(f"vsearch finds 80 % of the English paraphrases among the first five: {found:.0%}")
    return missed


def as_json(scores: Mapping[str, Mapping[str, Score]]) -> dict[str, dict[str, object]]:
    return {way: {kind: asdict(score) for kind, score in of.items()} for way, of in scores.items()}


def ranks(asked: Sequence[Question], found: Mapping[str, Sequence[Hits]]) -> list[dict[str, object]]:
    """Of each question's answer, by way; null is not found."""
    return [
        {**asdict(question), "ranks": {way: rank(paths(of[at]), question.answers) for way, of in found.items()}}
        for at, question in enumerate(asked)
    ]


if __name__ == "__main__":
    sys.exit(main())
