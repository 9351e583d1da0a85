"""The bench's own arithmetic: its figures are only as good as these."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from tests.bench import corpus, repository
from tests.bench.answers import WrongAnswer, check, check_commit, check_order, check_paths
from tests.bench.floor import fts_query
from tests.bench.report import Kind, Row, amount, as_json, table
from tests.bench.sample import Sample, every, in_turns, percentile, rounds, seconds


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(number) for number in range(200, 0, -1)]
    assert percentile(values, 0.99) == 198
    assert percentile(values, 0.5) == 100
    assert percentile([3.0], 0.99) == 3
    assert seconds([1.0, 9.0, 2.0]).p99 == 9
    assert seconds([4.0, 1.0, 2.0, 3.0]).median == 2.5


def test_a_series_ends_early_but_never_before_its_least() -> None:
    assert list(rounds(5, 60)) == [0, 1, 2, 3, 4]
    assert list(rounds(5, -1)) == [0, 1, 2]
    assert list(rounds(5, -1, 0)) == []


def test_sides_take_turns_at_being_first_and_get_the_same() -> None:
    played: list[tuple[str, int]] = []

    def side(name: str) -> Callable[[int], float]:
        def play(item: int) -> float:
            played.append((name, item))
            return float(item)

        return play

    a, b = in_turns([7, 8, 9], range(3), side("a"), every(2, side("b")))
    assert played == [("a", 7), ("b", 7), ("a", 8), ("a", 9), ("b", 9)]
    assert (a, b) == ([7, 8, 9], [7, 9])


def test_the_corpus_is_the_same_everywhere() -> None:
    text = "".join(map("".join, corpus.notes(30))) + "".join(corpus.questions(500, 50, "test"))
    assert sha256(text.encode()).hexdigest()[:16] == "a12e42958a6d7790"


def test_notes_are_of_a_realistic_size_each_at_a_path_of_its_own() -> None:
    notes = dict(corpus.notes(200))
    assert len(notes) == 200
    assert all(1_000 <= len(text) <= 3_700 for text in notes.values())
    assert sum("\u4e00" <= max(text) for text in notes.values()) > 3


def test_an_edit_keeps_the_path_and_has_its_word() -> None:
    path, text = corpus.note(4, 12)
    assert path == corpus.note(4)[0]
    assert corpus.marker(12) in text
    assert corpus.marker(12) not in corpus.note(4)[1]
    assert not corpus.marker(123).startswith(corpus.marker(12))


def test_questions_differ_and_mostly_find_something() -> None:
    asked = corpus.questions(100, 150, "test")
    assert len(set(asked)) == 150
    assert {len(text.split()) for text in asked} == {1, 2, 3}
    texts = [text.lower() for _, text in corpus.notes(100)]
    found = [text for text in asked if any(all(word in note for word in text.split()) for note in texts)]
    assert 120 <= len(found)
    assert set(asked).isdisjoint(corpus.vocabulary()[: corpus.COMMON])


def test_a_remote_is_copied_so_that_pushes_do_not_stay(tmp_path: Path) -> None:
    one = repository.upstream(tmp_path, 20, tmp_path / "one.git")
    before = one.tip("main")
    repository.add_branches(one, 25)
    one.commit("main", {"a.md": "a"})
    two = repository.upstream(tmp_path, 20, tmp_path / "two.git")
    assert two.tip("main") == before != one.tip("main")
    assert two.blob("main", corpus.note(3)[0]) == corpus.note(3)[1]
    assert one.tip("task/B-00024") == one.tip("task/B-00004") != before
    assert two.tip("task/B-00024") is None


def test_words_become_the_query_that_qmd_makes_of_them() -> None:
    assert fts_query("deploy win") == '"deploy"* AND "win"*'
    assert fts_query("部署") == '"部 署"'


FOUND = [(f"{name}.md", score) for name, score in zip("abcdefghijkl", (0.9, *[0.5] * 11), strict=True)]


def test_a_right_answer_may_resolve_ties_in_any_way() -> None:
    check("x", "q", FOUND[:10], FOUND)
    check("x", "q", [FOUND[0], *FOUND[3:]], FOUND)
    check("x", "q", [], [])


@pytest.mark.parametrize("found", [FOUND[:9], [("z.md", 0.9), *FOUND[1:10]], FOUND[1:11], FOUND[:11], []])
def test_a_wrong_answer_is_no_fast_one(found: list[tuple[str, float]]) -> None:
    with pytest.raises(WrongAnswer):
        check("x", "q", found, FOUND)


def test_an_answer_from_another_commit_or_with_other_paths_is_wrong() -> None:
    right = {"commit_hash": "c", "freshness": "fresh", "degraded": []}
    check_commit(right, "q", "c")
    for wrong in ({**right, "commit_hash": "d"}, {**right, "freshness": "unknown"}, {"ok": False}):
        with pytest.raises(WrongAnswer):
            check_commit(wrong, "q", "c")
    check_paths("x", "q", ["b", "a"], ["a", "b"])
    with pytest.raises(WrongAnswer):
        check_paths("x", "q", ["a"], ["a", "b"])


def test_an_order_is_right_to_the_digits_that_qmd_prints() -> None:
    check_order("x", "q", [("a", 1.0), ("b", 0.13)], [("a", 1), ("b", 0.125)])
    for wrong in ([("b", 1.0), ("a", 0.13)], [("a", 1.0)], [("a", 1.0), ("b", 0.14)]):
        with pytest.raises(WrongAnswer):
            check_order("x", "q", wrong, [("a", 1), ("b", 0.125)])


def test_a_row_is_judged_by_its_kind() -> None:
    slow, fast = seconds([2.0]), seconds([0.1])
    assert Row("", "", slow, fast, target=15).met is True
    assert Row("", "", slow, fast, target=25).met is False
    assert Row("", "", fast, slow, Kind.TIMES, 15).met is False
    assert Row("", "", fast, slow, Kind.TIMES, 20).met is True
    assert Row("", "", Sample((2.0,), "/s"), Sample((500.0,), "/s"), target=200).met is True
    assert Row("", memgw=Sample((41.0, 90.0), "MB"), kind=Kind.AMOUNT, target=80).met is False
    assert Row("", "", slow, fast).met is None
    assert Row("", target=3).met is None


def test_the_table_can_be_pasted_and_the_rest_is_json() -> None:
    rows = [
        Row("one", "(a)", seconds([2.3] * 3), seconds([0.0123, 0.0456]), target=50),
        Row("two", "(c)", note="not measured: no network"),
    ]
    lines = table(rows).splitlines()
    assert lines[2] == "| one | (a) | 2.3 s · 2.3 s (3) | 28.9 ms · 45.6 ms (2) | 79.4 × faster | ≥ 50 × | yes |"
    assert lines[3] == "| two | (c) | – | – | – | – | – |"
    assert lines[-1] == "- two, (c): not measured: no network"
    assert len({line.count("|") for line in lines[:4]}) == 1
    first, second = as_json(rows)
    assert first["memgw"]["values"] == [0.0123, 0.0456]
    assert first["met"] is True
    assert second["baseline"] is None


def test_amounts_have_three_digits() -> None:
    values = [amount(value, "s") for value in (0.0004, 0.05912, 0.3, 2.345, 130.2)]
    assert values == ["0.4 ms", "59.1 ms", "300 ms", "2.35 s", "130 s"]
    assert amount(1234.5, "/s") == "1,234 /s"
