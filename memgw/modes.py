"""What each way to search asks of qmd, what it needs, and which one is below it."""

import re
from dataclasses import replace

from memgw.engine import Kind, Part, QueryType, Question
from memgw.models import Role

BELOW = {
    QueryType.DEEP_SEARCH: QueryType.QUERY,
    QueryType.QUERY: QueryType.SEARCH,
    QueryType.VSEARCH: QueryType.SEARCH,
}

_NEGATION = re.compile(r'(^|\s)-(?=[\w"])')
_NAMES_A_THING = re.compile(r"\d|_|[A-Z]{2}|\w-\w|[a-z][A-Z]")  # v2.8, 2026-03-01, user_id, ERR, dead-letter, getUser
_PREFIX = re.compile(r"\s*(lex|vec|hyde|intent|expand):\s*", re.IGNORECASE)


def needs(question: Question) -> list[Role]:
    """The models without which the question can't be answered in this way."""
    if question.query_type is QueryType.SEARCH:
        return []
    by_words = question.parts and all(part.kind is Kind.LEX for part in question.parts)
    roles = [] if by_words else [Role.EMBED]
    if expands(question):
        roles.append(Role.GENERATE)
    if question.query_type is QueryType.DEEP_SEARCH:
        roles.append(Role.RERANK)
    return roles


def expands(question: Question) -> bool:
    """Whether the generation model rewrites the question."""
    return not question.parts and (question.expand or question.query_type is QueryType.DEEP_SEARCH)


def always_finds(question: Question) -> bool:
    """Whether every index of any documents has an answer: vectors are all more or less near."""
    return not question.min_score and not expands(question) and Role.EMBED in needs(question)


def parts(question: Question) -> list[Part]:
    """The query document of a semantic question that is not expanded. BM25 and vectors each get the text as they can
    take it: one line; no lone quote for the one, no exclusion for the other (qmd refuses both)."""
    if question.parts:
        return list(question.parts)
    vec = Part(Kind.VEC, plain(question.text))
    if question.query_type is QueryType.VSEARCH:
        return [vec]
    lexical = dict.fromkeys(filter(None, (closed(question.text), names(question.text))))
    return [*(Part(Kind.LEX, text) for text in lexical), vec]


def plain(text: str) -> str:
    """For vectors: one line without the signs of exclusion."""
    return _NEGATION.sub(r"\1", _line(text))


def closed(text: str) -> str:
    """For BM25: one line whose quotes come in pairs."""
    line = _line(text)
    if line.count('"') % 2:
        before, _, after = line.rpartition('"')
        line = _line(f"{before} {after}")
    return line


def names(text: str) -> str:
    """The words that name a thing: BM25 joins by AND, and finds what a whole sentence about it would not."""
    return " ".join(word for word in plain(text).replace('"', " ").split() if _NAMES_A_THING.search(word))


def below(question: Question) -> Question:
    """The same in the way that needs less: BM25 is asked with what was meant for it."""
    kind = BELOW[question.query_type]
    if kind is not QueryType.SEARCH or not question.parts:
        return replace(question, query_type=kind)
    first = next((part for part in question.parts if part.kind is Kind.LEX), question.parts[0])
    return replace(question, query_type=kind, text=first.text, parts=())


def document(question: Question) -> str:
    """The question as `qmd query` takes it: a query document, or one line of text for it to expand."""
    if not expands(question):
        return "\n".join(f"{part.kind}: {part.text}" for part in parts(question))
    return _PREFIX.sub(r"\1 ", _line(question.text), count=1)


def _line(text: str) -> str:
    return " ".join(text.split())
