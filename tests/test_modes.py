"""What each way to search asks of qmd."""

import pytest

from memgw import modes
from memgw.engine import Kind, Part, QueryType, Question
from memgw.models import Role

Q, V, D, S = QueryType.QUERY, QueryType.VSEARCH, QueryType.DEEP_SEARCH, QueryType.SEARCH


@pytest.mark.parametrize(
    ("question", "roles"),
    [
        (Question("a", S), []),
        (Question("a", V), [Role.EMBED]),
        (Question("a", Q), [Role.EMBED]),
        (Question("a", Q, expand=True), [Role.EMBED, Role.GENERATE]),
        (Question("a", D), [Role.EMBED, Role.GENERATE, Role.RERANK]),
        (Question("", D, parts=(Part(Kind.VEC, "a"),)), [Role.EMBED, Role.RERANK]),
    ],
)
def test_a_mode_needs_what_it_runs(question: Question, roles: list[Role]) -> None:
    assert modes.needs(question) == roles


@pytest.mark.parametrize(
    ("question", "document"),
    [
        (Question("where is it", V), "vec: where is it"),
        (Question("where is it", Q), "lex: where is it\nvec: where is it"),
        (Question("what does ERR_42 mean", Q), "lex: what does ERR_42 mean\nlex: ERR_42\nvec: what does ERR_42 mean"),
        (Question("user_id", Q), "lex: user_id\nvec: user_id"),
        (Question("two\r\nlines \t here", Q), "lex: two lines here\nvec: two lines here"),
        (Question('say "hello', Q), 'lex: say hello\nvec: say "hello'),
        (Question("-old new -done", Q), "lex: -old new -done\nvec: old new done"),
        (Question('"', Q), 'vec: "'),
        (Question("", Q, parts=(Part(Kind.HYDE, "It is so."), Part(Kind.LEX, "so"))), "hyde: It is so.\nlex: so"),
        (Question("where\nis it", D), "where is it"),
        (Question("lex: where", D), "lex where"),
        (Question("where", V, expand=True), "where"),
    ],
)
def test_a_question_is_the_document_that_qmd_takes(question: Question, document: str) -> None:
    assert modes.document(question) == document


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("the incident of 2026-02-20 again", "2026-02-20"),
        ("does getUser call the dead-letter queue", "getUser dead-letter"),
        ('"HTTP 503" -retry', "HTTP 503"),
        ("nothing of the kind", ""),
        ("发布窗口 v2.8", "v2.8"),
    ],
)
def test_words_that_name_a_thing_are_told_from_the_others(text: str, names: str) -> None:
    assert modes.names(text) == names


def test_below_a_mode_is_one_that_needs_less_and_asks_for_the_same() -> None:
    assert modes.below(Question("a", D)) == Question("a", Q)
    assert modes.below(Question("a", Q)) == modes.below(Question("a", V)) == Question("a", S)
    parts = (Part(Kind.VEC, "meaning"), Part(Kind.LEX, "words"))
    assert modes.below(Question("", D, parts=parts)) == Question("", Q, parts=parts)
    assert modes.below(Question("", Q, parts=parts)) == Question("words", S)
    assert modes.below(Question("", Q, parts=parts[:1])) == Question("meaning", S)
