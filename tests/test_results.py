"""How qmd's `search --json` is read. The good rows here were printed by qmd 2.8.3."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memgw.errors import EngineBadOutput
from memgw.results import SNIPPET_BYTES, SNIPPET_UNITS, TITLE_BYTES, Hit, parse_hits, shorten

HEADER = "@@ -2,3 @@ (1 before, 0 after)\n"

ROW: dict[str, Any] = {
    "docid": "#7f577c",
    "score": 0.61,
    "file": "qmd://_/notes/a.md?index=ws-main",
    "line": 3,
    "title": "Title here",
    "snippet": HEADER + "\nhello world 记忆\n",
}


def parse(*rows: Any) -> list[Hit]:
    return parse_hits(json.dumps(rows).encode(), "ws-main", "_")


def path_of(file: str, index: str = "ws-main", collection: str = "_") -> str:
    [hit] = parse_hits(json.dumps([ROW | {"file": file}]).encode(), index, collection)
    return hit.path


def snippet_of(snippet: str) -> str:
    [hit] = parse(ROW | {"snippet": snippet})
    return hit.snippet


def is_bad(output: bytes) -> bool:
    with pytest.raises(EngineBadOutput) as caught:
        parse_hits(output, "ws-main", "_")
    return caught.value.detail == "the search engine's answer could not be read"


def test_what_qmd_prints_is_read() -> None:
    output = b"""[
  {
    "docid": "#7f577c",
    "score": 0,
    "file": "qmd://_/notes/a.md?index=ws-main",
    "line": 3,
    "title": "Title here",
    "context": "of the team",
    "snippet": "@@ -2,3 @@ (1 before, 0 after)\\n\\nhello \\u0000 \\"world\\" \\\\ \xe8\xae\xb0\xe5\xbf\x86\\n"
  }
]
"""
    assert parse_hits(output, "ws-main", "_") == [
        Hit(
            path="notes/a.md",
            docid="#7f577c",
            title="Title here",
            score=0.0,
            line=3,
            snippet='\nhello \0 "world" \\ 记忆\n',
            context="of the team",
        )
    ]


def test_nothing_found_is_an_empty_list() -> None:
    assert parse_hits(b"[]\n", "ws-main", "_") == []


def test_hits_keep_their_order() -> None:
    files = [f"qmd://_/{name}.md?index=ws-main" for name in "cab"]
    assert [hit.path for hit in parse(*(ROW | {"file": file} for file in files))] == ["c.md", "a.md", "b.md"]


def test_a_field_that_we_do_not_know_is_passed_over() -> None:
    assert parse(ROW | {"unknown": {"x": 1}}) == parse(ROW)


@pytest.mark.parametrize(
    "path",
    [
        "a.md", "q?index=ws-main.md", "?index=ws-main", "a?index=ws-main?index=ws-main", "#.md", "100%20.md",
        "a b/c d.md", "qmd:/_/a.md", "\n.md", "é/e\u0301.md", "记忆/🙂.md", "-x.md", "a//b", '"', "\\",
    ],
)  # fmt: skip
def test_a_path_is_what_stands_between_to_the_letter(path: str) -> None:
    assert path_of(f"qmd://_/{path}?index=ws-main") == path
    assert path_of(f"qmd://c/{path}?index=ws-task~0a.b", "ws-task~0a.b", "c") == path


@pytest.mark.parametrize(
    "file",
    [
        "", "a.md", "qmd://_/?index=ws-main", "qmd://_/a.md", "qmd://_/a.md?index=ws-mai",
        "qmd://_/a.md?index=ws-main2", "qmd://_/a.md?index=other", "qmd://other/a.md?index=ws-main",
        "qmd://__/a.md?index=ws-main", "/_/a.md?index=ws-main", "QMD://_/a.md?index=ws-main",
        "qmd://_/a.md?index=ws-main ", " qmd://_/a.md?index=ws-main", "qmd://_/?index=ws-mai",
    ],
)  # fmt: skip
def test_a_file_of_another_index_or_collection_is_refused(file: str) -> None:
    assert is_bad(json.dumps([ROW | {"file": file}]).encode())


@pytest.mark.parametrize(
    "output",
    [
        b"", b"\n", b"No results found.", b"null", b"{}", b"0", b'"[]"', b"[", b"[]]", b"[] []", b"warning\n[]",
        b"[null]", b"[[]]", b"[1]", b'["x"]', b"[{}]", b"[]\xff", b"\xff\xfe[\x00", b"[" * 100_000,
        b'{"results": []}', b"[NaN]",
    ],
)  # fmt: skip
def test_anything_but_a_list_of_hits_is_bad_output(output: bytes) -> None:
    assert is_bad(output)


@pytest.mark.parametrize("missing", ROW)
def test_a_hit_that_lacks_a_field_is_bad_output(missing: str) -> None:
    assert is_bad(json.dumps([ROW, {key: value for key, value in ROW.items() if key != missing}]).encode())


WRONG: dict[str, list[Any]] = {
    "docid": [None, "", "7f577c", "#7f577", "#7f577cc", "#7F577C", "#7f577g", "#7f577c\n", 7, ["#7f577c"]],
    "score": [None, "0.5", True, -0.01, 1.01, 10**400, [0.5], float("nan"), float("inf"), float("-inf")],
    "line": [None, "3", 3.0, True, 0, -1, [3]],
    "file": [None, 3, ["qmd://_/a.md?index=ws-main"], "qmd://_/a\ud800.md?index=ws-main"],
    "title": [None, 3, True, ["x"], "a\ud800b"],
    "snippet": [None, 3, ["x"], HEADER + "a\ud83db", HEADER + "a\ude00"],
    "context": [None, 3, ["x"], "a\ud800b"],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param(field, value, id=f"{field}-{number}")
        for field, values in WRONG.items()
        for number, value in enumerate(values)
    ],
)
def test_a_wrong_value_is_bad_output(field: str, value: object) -> None:
    assert is_bad(json.dumps([ROW, ROW | {field: value}]).encode())


@pytest.mark.parametrize("score", [0, 1, 0.0, 1.0, 0.333])
def test_a_score_is_between_0_and_1(score: float) -> None:
    [hit] = parse(ROW | {"score": score})
    assert hit.score == score
    assert isinstance(hit.score, float)


def test_a_snippet_is_the_documents_text_without_qmds_header() -> None:
    assert snippet_of(HEADER + "text\n") == "text\n"
    assert snippet_of("@@ -1,4 @@ (0 before, 1234 after)\n\n\n") == "\n\n"
    assert snippet_of(HEADER) == ""
    assert snippet_of("no header") == "no header"


def test_only_the_first_header_is_qmds_and_only_at_the_beginning() -> None:
    assert snippet_of(HEADER + HEADER + "text") == HEADER + "text"
    assert snippet_of("x" + HEADER + "text") == "x" + HEADER + "text"
    assert snippet_of("@@ -1 +1 @@ of a diff\n") == "@@ -1 +1 @@ of a diff\n"
    assert snippet_of("@@ -2,3 @@ (1 before, 0 after) more\n") == "@@ -2,3 @@ (1 before, 0 after) more\n"


def test_the_dots_of_a_cut_are_qmds_and_dots_of_the_document_its_own() -> None:
    assert SNIPPET_UNITS == 300
    assert snippet_of(HEADER + "x" * 297 + "...") == "x" * 297
    assert snippet_of(HEADER + "x" * 296 + "...") == "x" * 296 + "..."
    assert snippet_of(HEADER + "🙂" * 148 + "x" + "...") == shorten("🙂" * 148 + "x", SNIPPET_BYTES)
    assert snippet_of(HEADER + "and so on...") == "and so on..."


def test_a_cut_between_the_halves_of_a_character_leaves_it_out() -> None:
    assert snippet_of(HEADER + "x" * 296 + "\ud83d...") == "x" * 296
    assert snippet_of(HEADER + "x" * 200 + "🙂" * 48 + "\ud83d...") == "x" * 200 + "🙂" * 48


def test_titles_and_snippets_are_shortened_by_what_they_take_in_json() -> None:
    [hit] = parse(ROW | {"title": "记" * 200, "snippet": HEADER + "忆" * 290})
    assert hit.title == "记" * (TITLE_BYTES // 3)
    assert hit.snippet == "忆" * (SNIPPET_BYTES // 3)
    [hit] = parse(ROW | {"title": "\n" * 200})
    assert hit.title == "\n" * (TITLE_BYTES // 2)


def json_bytes(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False).encode()) - len('""')


pieces = st.sampled_from(["a", " ", '"', "\\", "\n", "\0", "\x7f", "é", "记", "🙂", "e\u0301", "👩‍👧", "\u2028"])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(pieces, max_size=30).map("".join), st.integers(0, 60))
def test_shorten_gives_the_longest_beginning_that_fits(text: str, limit: int) -> None:
    beginnings = [text[:size] for size in range(len(text) + 1)]
    assert shorten(text, limit) == max((part for part in beginnings if json_bytes(part) <= limit), key=len)
