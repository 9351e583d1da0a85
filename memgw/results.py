"""What a search found, and how qmd's `--json` is read. What a tool prints is untrusted: parsed here, once."""

import json
import re
from dataclasses import dataclass
from typing import Any

from memgw.errors import EngineBadOutput

SNIPPET_UNITS = 300
"""qmd cuts a snippet at this many UTF-16 units, the last three of them dots."""

SNIPPET_BYTES = 420
TITLE_BYTES = 120
"""Ten hits of Chinese text stay under 8 kB with these; a title is only a label for a path."""

_HEADER = re.compile(r"@@ -\d+,\d+ @@ \(\d+ before, \d+ after\)\n")
_DOCID = re.compile(r"#[0-9a-f]{6}")


@dataclass(frozen=True)
class Hit:
    """One document that was found.

    `path` as in Git; `docid` `#` and six hex digits of the content's hash; `score` 0 to 1; `line` counts from 1 and is
    the line that matches best; `snippet` is a piece of the document around it, to the letter.
    """

    path: str
    docid: str
    title: str
    score: float
    line: int
    snippet: str
    context: str = ""
    explain: Any = None


def parse_hits(output: bytes, index: str, collection: str) -> list[Hit]:
    """Reads the output of `qmd search --json`. Raises EngineBadOutput for anything that is not exactly that."""
    try:
        rows = json.loads(output)
    except (ValueError, RecursionError) as exc:
        raise EngineBadOutput("the search engine's answer could not be read") from exc
    return read_hits(rows, f"qmd://{collection}/", f"?index={index}")


def read_hits(rows: Any, before: str, after: str) -> list[Hit]:
    """Reads hits in the form of `qmd search --json`, whose files stand between `before` and `after`. Raises
    EngineBadOutput for anything that is not exactly that."""
    try:
        if not isinstance(rows, list):
            raise TypeError("not a list")
        return [_hit(row, before, after) for row in rows]
    except (ValueError, TypeError, KeyError, OverflowError) as exc:
        raise EngineBadOutput("the search engine's answer could not be read") from exc


def _hit(row: Any, before: str, after: str) -> Hit:
    file = _text(row["file"])
    if not (file.startswith(before) and file.endswith(after) and len(file) > len(before) + len(after)):
        raise ValueError("a file outside the collection")
    score = float(_is((int, float), row["score"]))
    line = _is(int, row["line"])
    docid = _is(str, row["docid"])
    if not (0 <= score <= 1 and line >= 1 and _DOCID.fullmatch(docid)):
        raise ValueError("a number out of range")
    return Hit(
        path=file[len(before) : len(file) - len(after)],
        docid=docid,
        title=shorten(_text(row["title"]), TITLE_BYTES),
        score=score,
        line=line,
        snippet=shorten(_exact(_is(str, row["snippet"])), SNIPPET_BYTES),
        context=_text(row.get("context", "")),
        explain=row.get("explain"),
    )


def _is(kind: Any, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind}")
    return value


def _text(value: Any) -> str:
    """Valid Unicode: half a character is half an answer."""
    text: str = _is(str, value)
    text.encode()
    return text


def _exact(snippet: str) -> str:
    """The document's own text: without qmd's header line (`line` says where it is) and its dots at a cut."""
    text = _HEADER.sub("", snippet, count=1) if _HEADER.match(snippet) else snippet
    if text.endswith("...") and len(text.encode("utf-16-le", "surrogatepass")) // 2 == SNIPPET_UNITS:
        text = text[:-3]
    if text and "\ud800" <= text[-1] <= "\udbff":  # cut between the halves of one character
        text = text[:-1]
    if text and "\udc00" <= text[0] <= "\udfff":
        text = text[1:]
    return _text(text)


def shorten(text: str, limit: int) -> str:
    """The longest beginning of `text` that takes at most `limit` bytes in JSON, so never half a character."""
    if _bytes(text) <= limit:
        return text
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _bytes(text[:middle]) <= limit else (low, middle - 1)
    return text[:low]


def _bytes(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False).encode()) - 2
