"""The memory and what is asked of it."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
MEMORY = FOLDER / "memory"

KINDS = ("paraphrase", "identifier", "error", "date", "keyword", "chinese")


@dataclass(frozen=True)
class Question:
    """`answers`: paths of the documents that answer it; one of them is enough."""

    kind: str
    question: str
    answers: tuple[str, ...]


def questions() -> list[Question]:
    lines = (FOLDER / "questions.jsonl").read_text("utf-8").splitlines()
    read = [json.loads(line) for line in lines]
    return [Question(one["kind"], one["question"], tuple(one["answers"])) for one in read]


def memory() -> dict[str, str]:
    """Path → text."""
    return {path.relative_to(MEMORY).as_posix(): path.read_text("utf-8") for path in sorted(MEMORY.rglob("*.md"))}


def words(text: str) -> list[str]:
    """In lower case, without what stands around them."""
    return [word.strip(".:-") for word in re.split(r"[^\w.:-]+", text.lower()) if word.strip(".:-")]


def grep(documents: dict[str, str], question: str) -> list[str]:
    """Paths of the documents that have each word somewhere, those first that have them most often."""
    wanted = set(words(question))
    found = []
    for path, text in documents.items():
        counts = [f"{path}\n{text}".lower().count(word) for word in wanted]
        if all(counts):
            found.append((-sum(counts), path))
    return [path for _, path in sorted(found)]
