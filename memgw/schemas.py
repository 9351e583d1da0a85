"""What goes in and out over HTTP. Requests are strict: no unknown field, no converted type."""

import re
from typing import Any

from marshmallow import EXCLUDE, RAISE, Schema, ValidationError, fields, validate, validates_schema

from memgw.engine import Kind, QueryType
from memgw.forges import Reason
from memgw.inputs import Flag, Line, Name, Number, Text, WholeNumber

MAX_QUERY = 1024


def _doc(text: str) -> dict[str, Any]:
    return {"metadata": {"description": text}}


class SelectionIn(Schema):
    """Which branch. `branch` wins over `memory_profile`; with neither it is the default branch."""

    class Meta:
        unknown = RAISE

    branch = Name(**_doc("A branch of the remote, as Git names it below refs/heads/."))
    memory_profile = Name(**_doc("stable → main, monthly-YYYY-MM → memory/YYYY-MM, task-<id> → task/<id>."))
    debug = Flag(load_default=False, **_doc("Adds the debug object to the answer."))


class QueryIn(SelectionIn):
    """A question."""

    query = Text(
        validate=validate.Length(max=MAX_QUERY),
        **_doc('Words are joined by AND; "…" is a phrase, -word excludes. Required, unless there are queries.'),
    )
    queries = fields.List(
        fields.Nested(lambda: PartIn()),
        validate=validate.Length(1, 10),
        **_doc("A query document in place of query, for query and deep_search."),
    )
    intent = Line(validate=validate.Length(max=MAX_QUERY), **_doc("What the answer is for; not searched for itself."))
    expand = Flag(load_default=False, **_doc("Lets the generation model rewrite the question (vsearch, query)."))
    candidate_limit = WholeNumber(validate=validate.Range(1, 200), **_doc("Most candidates for fusion and reranking."))
    explain = Flag(load_default=False, **_doc("Adds to each result how its score came about (query, deep_search)."))
    strict = Flag(load_default=False, **_doc("An error where the answer would otherwise be found in another way."))
    query_type = fields.String(
        load_default="search",
        validate=validate.OneOf([str(kind) for kind in QueryType]),
        **_doc("How to search."),
    )
    require_latest = Flag(load_default=True, **_doc("Ask the remote first; false: answer from what is here."))
    limit = WholeNumber(load_default=10, validate=validate.Range(1, 50), **_doc("Most results."))
    min_score = Number(load_default=0.0, validate=validate.Range(0, 1), **_doc("Leave out results below."))
    full = Flag(load_default=False, **_doc("Adds the whole text of each result as body."))

    @validates_schema(pass_original=True, skip_on_field_errors=False)
    def _one_way_to_ask(self, data: dict[str, Any], original: dict[str, Any], **_: Any) -> None:
        kind = data.get("query_type")
        if "query" not in original and "queries" not in original:
            raise ValidationError("Missing data for required field.", "query")
        if "query" in original and "queries" in original:
            raise ValidationError("Give either query or queries.", "queries")
        if "queries" in original and kind not in (QueryType.QUERY, QueryType.DEEP_SEARCH):
            raise ValidationError("Only for query and deep_search.", "queries")
        if data.get("expand") and ("queries" in original or kind == QueryType.SEARCH):
            raise ValidationError("Only for a query that models can rewrite.", "expand")


class PartIn(Schema):
    """A line of a query document."""

    class Meta:
        unknown = RAISE

    type = fields.String(
        required=True,
        validate=validate.OneOf([str(kind) for kind in Kind]),
        **_doc("lex: BM25; vec: by meaning; hyde: a passage such as the answer might be."),
    )
    query = Line(required=True, validate=validate.Length(max=MAX_QUERY))

    @validates_schema
    def _as_qmd_takes_it(self, data: dict[str, Any], **_: Any) -> None:
        if data["type"] == Kind.LEX and data["query"].count('"') % 2:
            raise ValidationError("Quotes must come in pairs.", "query")
        if data["type"] != Kind.LEX and re.search(r'(^|\s)-[\w"]', data["query"]):
            raise ValidationError("Exclusion (-word) is for lex only.", "query")


class PushIn(Schema):
    """What is read of a forge's push event; all else in it is left alone."""

    class Meta:
        unknown = EXCLUDE

    ref = fields.String(required=True, **_doc("The full name of what was pushed: refs/heads/…"))
    after = fields.String(required=True, **_doc("Its commit now; zeros when it was deleted. Not believed."))


class ResultOut(Schema):
    """One document that was found."""

    path = fields.String(required=True, **_doc("Exactly the path in Git."))
    docid = fields.String(required=True, **_doc("Begins with #; the same for the same content."))
    title = fields.String(**_doc("The first heading, else the file's name; shortened."))
    score = fields.Float(required=True, **_doc("0 to 1, higher is better; only comparable within an answer."))
    line = fields.Integer(required=True, **_doc("The line that matches best, counted from 1."))
    snippet = fields.String(**_doc("The text around that line, to the letter."))
    context = fields.String(**_doc("What qmd was told about this part of the collection."))
    body = fields.String(**_doc("The whole document, with full."))
    explain = fields.Raw(**_doc("How the score came about, with explain."))


class DegradedOut(Schema):
    """Something that could not be done as asked."""

    code = fields.String(required=True)
    detail = fields.String(required=True)


class IndexOut(Schema):
    documents = fields.Integer(required=True)
    pending_embeddings = fields.Integer(required=True)


class DebugOut(Schema):
    """How the answer came about."""

    qmd_command = fields.List(fields.String(), **_doc("The search, for people to repeat."))
    timings_ms = fields.Dict(fields.String(), fields.Float(), required=True, **_doc("Step → milliseconds."))
    lock_wait_ms = fields.Float(required=True)
    mode_used = fields.String(**_doc("How the answer was found: query_type, or what it was degraded to."))
    index = fields.Nested(IndexOut, required=True)


class CommitOut(Schema):
    """What every answer says of where it comes from."""

    ok = fields.Boolean(required=True)
    branch = fields.String(required=True)
    resolved_workspace = fields.String(required=True)
    commit_hash = fields.String(required=True, **_doc("40 hex digits: the answer is of exactly this commit."))
    synced_at = fields.String(required=True, **_doc("RFC 3339, UTC: when the remote was asked."))
    freshness = fields.String(
        required=True,
        validate=validate.OneOf(["fresh", "unknown"]),
        **_doc("fresh: the remote was asked after the request arrived; unknown: it was not asked."),
    )
    qmd_collection = fields.String(required=True)
    degraded = fields.List(fields.Nested(DegradedOut), required=True)
    debug = fields.Nested(DebugOut)


class AnswerOut(CommitOut):
    """The answer to a question."""

    query_type = fields.String(required=True)
    results = fields.List(fields.Nested(ResultOut), required=True)


class SyncOut(CommitOut):
    """What a sync did."""

    changed = fields.Boolean(required=True)
    previous_commit = fields.String(required=True, allow_none=True, **_doc("null: none, or lost."))
    documents = fields.Integer(required=True)
    added = fields.Integer(required=True, **_doc("Files, between previous_commit and commit_hash."))
    modified = fields.Integer(required=True)
    deleted = fields.Integer(required=True)


class HookOut(Schema):
    """What becomes of a hook."""

    ok = fields.Boolean(required=True)
    outcome = fields.String(
        required=True,
        validate=validate.OneOf(["accepted", "ignored"]),
        **_doc("accepted: the branch is brought to its newest commit behind this answer."),
    )
    branch = fields.String(**_doc("Which branch was pushed."))
    reason = fields.String(validate=validate.OneOf([str(reason) for reason in Reason]), **_doc("Why it is ignored."))


class ErrorOut(Schema):
    at = fields.String(required=True)
    code = fields.String(required=True)
    detail = fields.String(required=True)


class WorkspaceOut(Schema):
    workspace = fields.String(required=True)
    branch = fields.String(required=True)
    commit = fields.String(required=True, allow_none=True)
    indexed_commit = fields.String(required=True, allow_none=True)
    embedded_commit = fields.String(required=True, allow_none=True, **_doc("The newest whose vectors were all there."))
    synced_at = fields.String(required=True, allow_none=True)
    documents = fields.Integer(required=True, allow_none=True)
    pending_embeddings = fields.Integer(required=True, allow_none=True)
    last_error = fields.Nested(ErrorOut, required=True, allow_none=True)
    bytes = fields.Integer(required=True)


class VersionsOut(Schema):
    memgw = fields.String(required=True)
    qmd = fields.String(required=True, allow_none=True)
    git = fields.String(required=True, allow_none=True)
    node = fields.String(required=True, allow_none=True)


class ModelOut(Schema):
    uri = fields.String(required=True, **_doc("A path of the server is shortened to its name."))
    loadable = fields.Boolean(required=True)
    detail = fields.String(required=True, allow_none=True, **_doc("Why it can't be loaded."))


class ModelsOut(Schema):
    embed = fields.Nested(ModelOut, required=True)
    rerank = fields.Nested(ModelOut, required=True)
    generate = fields.Nested(ModelOut, required=True)


class MirrorOut(Schema):
    remote = fields.String(required=True, **_doc("Without user, password and token."))
    bytes = fields.Integer(required=True)


class StatusOut(Schema):
    """The state of the gateway."""

    ok = fields.Boolean(required=True)
    default_branch = fields.String(required=True)
    versions = fields.Nested(VersionsOut, required=True)
    mirror = fields.Nested(MirrorOut, required=True)
    models = fields.Nested(ModelsOut, required=True)
    workspaces = fields.List(fields.Nested(WorkspaceOut), required=True)


class HealthOut(Schema):
    """The process answers."""

    ok = fields.Boolean(required=True)


class CheckOut(Schema):
    ok = fields.Boolean(required=True)
    detail = fields.String(**_doc("Why not."))


class ReadyOut(Schema):
    """Whether questions can be answered now."""

    ok = fields.Boolean(required=True)
    checks = fields.Dict(fields.String(), fields.Nested(CheckOut), required=True, **_doc("remote, engine, data, disk."))


class ProblemOut(Schema):
    """Every failure (RFC 9457)."""

    ok = fields.Boolean(required=True)
    status = fields.Integer(required=True)
    code = fields.String(required=True)
    title = fields.String(required=True)
    detail = fields.String(required=True)
    request_id = fields.String(required=True)
    errors = fields.Dict(fields.String(), fields.List(fields.String()), **_doc("Field → what is wrong with it."))
