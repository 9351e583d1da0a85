"""The eval's own parts: what it asks, and how it counts."""

from collections import Counter

import pytest

from tests.eval.__main__ import bounds
from tests.eval.measures import Score, by_kind, rank, score, table
from tests.eval.questions import KINDS, Question, grep, memory, questions, words

COMMON = set(
    "a an and are as at by can do does did for from given has have how i in is it may of on or our over own should "
    "that the their them then there they this to use used was we what when where which who whom why with without you "
    "your after before because into instead only some other every more than no not so still".split()
)


def test_there_is_enough_of_each_kind() -> None:
    assert len(memory()) >= 64
    assert sum(path.startswith("zh/") for path in memory()) >= 16
    counts = Counter(question.kind for question in questions())
    assert sum(counts.values()) >= 72
    assert counts["paraphrase"] >= 30
    assert set(counts) == set(KINDS)
    assert min(counts.values()) >= 8


def test_all_questions_are_different_and_their_answers_are_documents() -> None:
    asked = questions()
    assert len({question.question for question in asked}) == len(asked)
    for question in asked:
        assert question.answers
        assert set(question.answers) <= set(memory()), question


def test_documents_are_notes_and_not_books() -> None:
    for path, text in memory().items():
        assert text.startswith("# "), path
        length = sum("\u4e00" <= letter <= "\u9fff" for letter in text) if path.startswith("zh/") else len(text.split())
        assert 30 <= length <= 150, path


@pytest.mark.parametrize("question", [q for q in questions() if q.kind == "paraphrase"], ids=lambda q: q.question)
def test_a_paraphrase_shares_few_words_with_its_answer(question: Question) -> None:
    asked = set(words(question.question)) - COMMON
    for answer in question.answers:
        shared = asked & set(words(memory()[answer]))
        assert len(shared) <= len(asked) / 2, shared
    assert not set(grep(memory(), question.question)) & set(question.answers)


def test_ranks_begin_at_one_and_end_at_ten() -> None:
    assert rank(["b", "a"], ["a"]) == 2
    assert rank(["b", "a", "c"], ["c", "a"]) == 2
    assert rank([], ["a"]) is None
    assert rank([*"bcdefghijk", "a"], ["a"]) is None


def test_scores_are_shares_and_the_mean_of_reciprocal_ranks() -> None:
    assert score([1, 2, None, 10]) == Score(first=0.25, five=0.5, mrr=(1 + 1 / 2 + 0 + 1 / 10) / 4)
    assert str(score([1, 2])) == "0.50 · 1.00 · 0.750"


def test_kinds_are_counted_by_themselves_and_together() -> None:
    asked = [Question("date", "a", ("x",)), Question("error", "b", ("x",)), Question("date", "c", ("x",))]
    scores = by_kind(asked, [1, None, 2])
    assert list(scores) == ["error", "date", "all"]
    assert (scores["date"].mrr, scores["error"].mrr, scores["all"].mrr) == (0.75, 0.0, 0.5)
    assert table({"grep": scores}) == (
        "| recall@1 · recall@5 · MRR | error | date | all |\n"
        "| --- | --- | --- | --- |\n"
        "| grep | 0.00 · 0.00 · 0.000 | 0.50 · 1.00 · 0.750 | 0.33 · 0.67 · 0.500 |"
    )


def test_grep_wants_all_words_and_counts_them() -> None:
    documents = {
        "a.md": "Deploy on Tuesday",
        "b.md": "deploy, deploy; tuesday",
        "tuesday.md": "deploys",
        "d.md": "deploy",
    }
    assert grep(documents, "deploy Tuesday?") == ["b.md", "a.md", "tuesday.md"]
    assert grep(documents, "deploy friday") == []


def test_missed_bounds_are_told() -> None:
    def scores(query: float, search: float, vsearch: float, found: float) -> dict[str, dict[str, Score]]:
        mrr = {"query": query, "search": search, "vsearch": vsearch}
        return {f"memgw {mode}": {"all": Score(0, 0, mrr[mode]), "paraphrase": Score(0, found, 0)} for mode in mrr}

    assert bounds(scores(0.7, 0.3, 0.6, 0.8)) == []
    assert len(bounds(scores(0.6, 0.3, 0.6, 0.8))) == 1
    assert len(bounds(scores(0.6, 0.3, 0.7, 0.79))) == 2
